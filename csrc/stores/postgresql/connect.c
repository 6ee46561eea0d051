/*
 * connect.c - from a DSN to a logged-in connection. Knows nothing of locks. No message contains
 * a password.
 */
#include "postgresql_store.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------- options */

#define OPTIONS_MAX (HL_DSN_PARAMS_MAX + 16)

/* The options for libpq, which takes the last one of each name. */
typedef struct options {
  const char *names[OPTIONS_MAX + 1], *values[OPTIONS_MAX + 1];
  size_t n;
  char room[512]; /* for values made here */
  size_t used;
} options;

static void option(options *o, const char *name, const char *value) {
  if (!value || o->n == OPTIONS_MAX) return;
  o->names[o->n] = name;
  o->values[o->n++] = value;
}

static void option_number(options *o, const char *name, int64_t value) {
  char *at = o->room + o->used;
  int n = snprintf(at, sizeof o->room - o->used, "%lld", (long long)value);
  o->used += (size_t)n + 1;
  option(o, name, at);
}

/* Adds the i-th value of a comma-separated list as an option; if the list has a single value, that.
   A value too long for `room` stays as libpq has it. */
static void option_of_list(options *o, const char *name, const char *list, unsigned i) {
  const char *end;
  if (!list) return;
  while (i > 0 && (end = strchr(list, ','))) list = end + 1, i--;
  size_t size = strcspn(list, ",");
  char *at = o->room + o->used;
  if (o->used + size + 1 > sizeof o->room) return;
  memcpy(at, list, size);
  at[size] = '\0';
  o->used += size + 1;
  option(o, name, at);
}

static unsigned list_size(const char *list) {
  unsigned n = 1;
  for (; list && *list; list++) n += *list == ',';
  return n;
}

static bool is_set(const hl_dsn *dsn, const char *name, const char *variable) {
  const char *value = getenv(variable);
  return hl_dsn_param_get(dsn, name) || (value && *value);
}

/* Whether an eavesdropper could ask for the password in clear text, as TLS is not required. Does
   not know what a service file says. */
static bool is_overheard(const hl_dsn *dsn, const char *host) {
  const char *mode = hl_dsn_param_get(dsn, "sslmode");
  if (!mode) mode = getenv("PGSSLMODE");
  if (!host) host = getenv("PGHOST");
  bool local =
      !hl_dsn_param_get(dsn, "hostaddr") && (!host || !*host || *host == '/' || *host == '@');
  bool required = mode && (strcmp(mode, "require") == 0 || strncmp(mode, "verify-", 7) == 0);
  return !local && !required && !is_set(dsn, "service", "PGSERVICE");
}

/* Fills in the options for one host. The kernel, too, is to notice a cut network, not only our
   clocks. If the DSN names several hosts, `host` is the number of this one: libpq limits the time
   for each host only if it may block. */
static void options_fill(const hl__pg_store *store, unsigned host, options *o) {
  const hl_store_config *config = store->config;
  const hl_dsn *dsn = config->dsn;
  int64_t seconds = config->hold_timeout / 3000;
  if (seconds < 1) seconds = 1;
  if (seconds > 3600) seconds = 3600;
  o->n = o->used = 0;
  option(o, "application_name", config->application);
  option_number(o, "keepalives_idle", seconds);
  option_number(o, "keepalives_interval", seconds);
  option_number(o, "keepalives_count", 3);
  option_number(o, "tcp_user_timeout",
                config->hold_timeout < INT32_MAX ? config->hold_timeout : INT32_MAX);
  option(o, "host", dsn->host);
  if (dsn->port) option_number(o, "port", dsn->port);
  option(o, "user", dsn->user);
  option(o, "password", dsn->password);
  option(o, "dbname", dsn->database);
  for (unsigned i = 0; i < dsn->param_count; i++)
    option(o, dsn->params[i].name, dsn->params[i].value);
  /* libpq does not use this if it may not block. */
  option(o, "connect_timeout", "");
  option(o, "client_encoding", "UTF8");
  if (list_size(dsn->host) > 1) {
    option_of_list(o, "host", dsn->host, host);
    option_of_list(o, "hostaddr", hl_dsn_param_get(dsn, "hostaddr"), host);
    option_of_list(o, "port", hl_dsn_param_get(dsn, "port"), host);
  }
  if (PQlibVersion() >= 160000 && is_overheard(dsn, dsn->host) &&
      !is_set(dsn, "require_auth", "PGREQUIREAUTH"))
    option(o, "require_auth", "!password");
  o->names[o->n] = o->values[o->n] = NULL;
}

/* ---------------------------------------------------------- connecting */

/* Takes the SQLSTATE of a refused login out of libpq's verbose message, the only place that has it:
   "...: FATAL: 28P01: password ...\nLOCATION: ...". */
static int log_in_error(PGconn *connection, hl_error *error) {
  char message[400], state[6] = "";
  (void)snprintf(message, sizeof message, "%s", PQerrorMessage(connection));
  for (char *at = message; (at = strstr(at, ":  ")); at += 3) {
    if (strspn(at + 3, "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ") != 5 ||
        strncmp(at + 8, ": ", 2) != 0)
      continue;
    memcpy(state, at + 3, 5);
    memmove(at + 2, at + 9, strlen(at + 9) + 1);
    break;
  }
  int status = hl__pg_error_state(state, message, "connect", error);
  /* The role may not connect to this database. */
  if (hl__pg_state_is(state, HL__PG_DENIES)) status = HL_ECONNECTION;
  return hl__error_as(error, status);
}

/* Watches libpq's socket, which libpq may replace while it connects, as a host can have several
   addresses. libpq makes it close-on-exec. */
static int socket_watch(hl__pg_session *session) {
  int fd = PQsocket(session->connection);
  if (fd < 0 || (fd == session->fd && hl__fork_watches(fd, session->ticket))) return HL_OK;
  if (session->fd >= 0) hl__fork_unwatch(session->fd, session->ticket);
  session->ticket = hl__fork_watch(fd);
  session->fd = session->ticket ? fd : -1;
  return session->ticket ? HL_OK : HL_ENOMEM;
}

static int connect_late(hl_error *error) {
  return hl__error(error, HL_ECONNECTION, "cannot connect: no answer in time");
}

/* Waits until libpq can go on. */
static int wait_for_socket(const hl__pg_session *session, bool writes, int64_t deadline,
                           hl_error *error) {
  int status = hl__socket_await(session->store->config, session->fd, writes ? POLLOUT : POLLIN,
                                NULL, deadline);
  if (status == HL_TIMEOUT) return connect_late(error);
  return status ? hl__error(error, HL_ECONNECTION, "cannot connect") : HL_OK;
}

/* How many more steps to make after the deadline, as the login may be almost done. While a server
   never stops sending, poll() never times out. */
#define LATE_STEPS 16

/* Connects and logs in. No child is born while a thread is inside libpq here: it would get a socket
   that no one closes in it, and mutexes of OpenSSL that stay locked. But fork() does not wait for a
   server that hangs: births are allowed while we wait for it. (libpq itself waits for a name server
   that hangs.) */
static int log_in(hl__pg_session *session, const options *o, int64_t deadline, hl_error *error) {
  int status = HL_OK;
  PostgresPollingStatusType next = PGRES_POLLING_WRITING;
  unsigned late = 0;
  hl__fork_forbid();
  session->connection = PQconnectStartParams(o->names, o->values, 0);
  if (!session->connection) {
    status = hl__error_memory(error);
  } else {
    (void)PQsetNoticeReceiver(session->connection, hl__pg_notice, session);
    (void)PQsetErrorVerbosity(session->connection, PQERRORS_VERBOSE);
    if (PQstatus(session->connection) == CONNECTION_BAD)
      next = PGRES_POLLING_FAILED;
    else if (socket_watch(session))
      status = hl__error_memory(error);
  }
  hl__fork_allow();
  while (status == HL_OK && next != PGRES_POLLING_OK && next != PGRES_POLLING_FAILED) {
    status = wait_for_socket(session, next == PGRES_POLLING_WRITING, deadline, error);
    if (status == HL_OK && hl__left_ms(deadline) == 0 && ++late > LATE_STEPS)
      status = connect_late(error);
    if (status) break;
    hl__fork_forbid();
    next = PQconnectPoll(session->connection);
    if (socket_watch(session)) status = hl__error_memory(error);
    hl__fork_allow();
  }
  if (status == HL_OK && next == PGRES_POLLING_FAILED)
    status = log_in_error(session->connection, error);
  return status;
}

static int connect_host(hl__pg_store *store, unsigned host, int64_t deadline,
                        hl__pg_session **result, hl_error *error) {
  options o;
  int64_t began = hl__now_ms(), patience = hl__within_ms(store->connect_timeout, deadline);
  *result = NULL;
  hl__pg_session *session = calloc(1, sizeof *session);
  if (!session) return hl__error_memory(error);
  session->base.store = &store->base;
  session->store = store;
  session->fd = -1;
  session->began = began;
  session->patience = patience;
  atomic_init(&session->in_hand, false);
  options_fill(store, host, &o);
  int status = hl__wakeup_open(&session->wakeup, error);
  if (status == HL_OK) status = log_in(session, &o, patience, error);
  if (status == HL_OK) {
    (void)PQsetErrorVerbosity(session->connection, PQERRORS_DEFAULT);
    (void)PQsetnonblocking(session->connection, 1);
    session->backend = PQbackendPID(session->connection);
    *result = session;
  } else {
    hl__pg_disconnect(session);
  }
  return status;
}

/* Tries the hosts in turn, and takes the first that is usable. */
int hl__pg_connect(hl__pg_store *store, int64_t deadline, hl__pg_session **session,
                   hl_error *error) {
  unsigned hosts = list_size(store->config->dsn->host);
  int status = HL_ECONNECTION;
  for (unsigned i = 0; i < hosts; i++) {
    status = connect_host(store, i, deadline, session, error);
    if (status != HL_ECONNECTION) break;
  }
  return status;
}

void hl__pg_disconnect(hl__pg_session *session) {
  if (!session) return;
  if (session->fd >= 0) hl__fork_unwatch(session->fd, session->ticket);
  hl__pg_results_clear(session);
  PQfinish(session->connection);
  hl__wakeup_close(&session->wakeup);
  free(session);
}
