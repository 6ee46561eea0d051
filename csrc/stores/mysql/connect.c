/*
 * connect.c - from a DSN to a logged-in connection: parameters, option files,
 * TLS. Knows nothing of locks. No message of it contains a password.
 */
#include "mysql_store.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

#define CONNECT_TIMEOUT_MS 10000

/* ---------------------------------------------------------- parameters */

static int param_tls(hl__mysql_store *store, const char *value,
                     hl_error *error) {
  static const struct {
    const char *name;
    hl__tls tls;
  } modes[] = {
      {"off", HL__TLS_OFF},
      {"preferred", HL__TLS_PREFERRED},
      {"required", HL__TLS_REQUIRED},
      {"verify-ca", HL__TLS_VERIFY_CA},
      {"verify-identity", HL__TLS_VERIFY_IDENTITY},
      /* as Go's driver says it */
      {"false", HL__TLS_OFF},
      {"skip-verify", HL__TLS_REQUIRED},
      {"true", HL__TLS_VERIFY_IDENTITY},
  };
  for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
    if (strcmp(modes[i].name, value) == 0) {
      store->tls = modes[i].tls;
      return HL_OK;
    }
  return hl__error(error, HL_EDSN,
                   "the parameter tls in the DSN must be off, preferred, "
                   "required, verify-ca or verify-identity");
}

static int param_table(hl__mysql_store *store, const char *value,
                       hl_error *error) {
  static const char allowed[] =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_$";
  size_t n = strlen(value);
  if (n < 1 || n > HL__MYSQL_NAME_MAX || strspn(value, allowed) != n)
    return hl__error(error, HL_EDSN,
                     "the parameter table in the DSN must be a plain name of "
                     "1 to %d letters, digits, _ or $",
                     HL__MYSQL_NAME_MAX);
  memcpy(store->table, value, n + 1);
  return HL_OK;
}

static int param_connect_timeout(hl__mysql_store *store, const char *value,
                                 hl_error *error) {
  char *end;
  double seconds = strtod(value, &end);
  if (end == value || *end || !(seconds > 0 && seconds <= 86400))
    return hl__error(error, HL_EDSN,
                     "the parameter connect_timeout in the DSN must be a "
                     "number of seconds");
  store->connect_timeout = (int64_t)(seconds * 1000 + 0.999);
  return HL_OK;
}

int hl__mysql_params(hl__mysql_store *store, hl_error *error) {
  /* Of Go's driver; without a meaning here. */
  static const char *const harmless[] = {
      "parseTime", "multiStatements",   "loc", "charset",
      "collation", "interpolateParams", NULL};
  const hl_dsn *dsn = store->config->dsn;
  store->tls = HL__TLS_PREFERRED;
  store->connect_timeout = CONNECT_TIMEOUT_MS;
  strcpy(store->table, "hier_lock_buckets");
  for (unsigned i = 0; i < dsn->param_count; i++) {
    const char *name = dsn->params[i].name, *value = dsn->params[i].value;
    int status = HL_OK;
    if (strcmp(name, "tls") == 0) {
      status = param_tls(store, value, error);
    } else if (strcmp(name, "table") == 0) {
      status = param_table(store, value, error);
    } else if (strcmp(name, "connect_timeout") == 0) {
      status = param_connect_timeout(store, value, error);
    } else if (strcmp(name, "tls_ca") == 0) {
      store->tls_ca = value;
    } else if (strcmp(name, "tls_cert") == 0) {
      store->tls_cert = value;
    } else if (strcmp(name, "tls_key") == 0) {
      store->tls_key = value;
    } else if (strcmp(name, "my_cnf_group") == 0) {
      store->my_cnf_group = value;
    } else if (strcmp(name, "socket") != 0) { /* that one is dsn->socket */
      const char *const *known = harmless;
      while (*known && strcmp(*known, name) != 0) known++;
      if (!*known)
        status = hl__error(error, HL_EDSN,
                           "unknown parameter '%.40s' in the DSN", name);
    }
    if (status) return status;
  }
  if (store->tls >= HL__TLS_VERIFY_CA && !store->tls_ca)
    return hl__error(error, HL_EDSN,
                     "tls=verify-ca and verify-identity need the parameter "
                     "tls_ca in the DSN");
  if (!dsn->database && !store->my_cnf_group)
    return hl__error(error, HL_EDSN, "the DSN names no database");
  return HL_OK;
}

/* ----------------------------------------------------------------- TLS */

#ifdef HL_CONNECTOR_C
/* Connector/C encrypts only when it is told to, checks the chain when there is
   a CA, and silently goes on in plain text on a server without TLS unless the
   certificate is to be verified; hence tls_check. */
static void tls_options(const hl__mysql_store *store, MYSQL *mysql) {
  my_bool yes = 1;
  if (store->tls == HL__TLS_OFF) return;
  (void)mysql_optionsv(mysql, MYSQL_OPT_SSL_ENFORCE, &yes);
  if (store->tls == HL__TLS_VERIFY_IDENTITY)
    (void)mysql_optionsv(mysql, MYSQL_OPT_SSL_VERIFY_SERVER_CERT, &yes);
}
#else
static void tls_options(const hl__mysql_store *store, MYSQL *mysql) {
  static const unsigned modes[] = {
      [HL__TLS_OFF] = SSL_MODE_DISABLED,
      [HL__TLS_PREFERRED] = SSL_MODE_PREFERRED,
      [HL__TLS_REQUIRED] = SSL_MODE_REQUIRED,
      [HL__TLS_VERIFY_CA] = SSL_MODE_VERIFY_CA,
      [HL__TLS_VERIFY_IDENTITY] = SSL_MODE_VERIFY_IDENTITY,
  };
  (void)mysql_options(mysql, MYSQL_OPT_SSL_MODE, &modes[store->tls]);
  /* For caching_sha2_password without TLS: Connector/C asks by itself. */
  bool yes = true;
  if (store->tls < HL__TLS_VERIFY_CA)
    (void)mysql_options(mysql, MYSQL_OPT_GET_SERVER_PUBLIC_KEY, &yes);
}
#endif

static int tls_check(hl__mysql_session *session, hl_error *error) {
  session->tls = mysql_get_ssl_cipher(session->mysql) != NULL;
  if (session->tls || session->store->tls <= HL__TLS_PREFERRED) return HL_OK;
  return hl__error(error, HL_ECONNECTION,
                   "the server offers no TLS, which the DSN requires");
}

/* ---------------------------------------------------------- connecting */

/* A cut network is noticed by the kernel, too, and not only by our clocks. */
static void keep_alive(int fd, int64_t hold_timeout) {
  int yes = 1;
  int seconds = (int)(hold_timeout / 3000);
  int probes = 3;
  unsigned milliseconds =
      hold_timeout < INT32_MAX ? (unsigned)hold_timeout : INT32_MAX;
  if (seconds < 1) seconds = 1;
  if (seconds > 3600) seconds = 3600;
  (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof seconds);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds,
                   sizeof milliseconds);
}

static int socket_of(MYSQL *mysql) {
#ifdef HL_CONNECTOR_C
  return (int)mysql_get_socket(mysql);
#else
  return (int)mysql->net.fd;
#endif
}

/* The session's socket is closed in each child that is born from now on. While
   connecting it may still be replaced: a host can have several addresses. */
static int socket_watch(hl__mysql_session *session, int fd) {
  if (session->fd == fd) return HL_OK;
  if (session->fd >= 0) hl__fork_unwatch(session->fd);
  int status = hl__fork_watch(fd);
  session->fd = status == HL_OK ? fd : -1;
  return status;
}

/* No child is born while a thread is inside of mysql_real_connect. It would get a
   socket that nobody closes in it; and mutexes of the whole process, locked for
   ever: Connector/C holds one while it sets TLS up, OpenSSL has its own. But
   fork() shall not have to wait for a server that hangs, so births are allowed
   while the library waits for the network; where it does not tell us (during a
   TLS handshake, and all the time with Oracle's), for connect_timeout at most. */
#if defined(HL_CONNECTOR_C) && MARIADB_PACKAGE_VERSION_ID >= 30110
static _Thread_local hl__mysql_session *connecting;

static int wait_io(my_socket fd, my_bool is_read, int timeout)
    HL__REQUIRES_SHARED(hl__births) {
  struct pollfd p = {.fd = fd, .events = is_read ? POLLIN : POLLOUT};
  int n;
  if (socket_watch(connecting, fd)) return -1;
  hl__fork_allow();
  do
    n = poll(&p, 1, timeout > 0 ? timeout : -1);
  while (n < 0 && errno == EINTR);
  if (n == 0) errno = ETIMEDOUT;
  hl__fork_forbid();
  return n;
}

static void wait_io_set(hl__mysql_session *session, bool on) {
  int (*callback)(my_socket, my_bool, int) = on ? wait_io : NULL;
  connecting = on ? session : NULL;
  (void)mysql_optionsv(session->mysql, MARIADB_OPT_IO_WAIT, callback);
}
#else
static void wait_io_set(hl__mysql_session *session, bool on) {
  (void)session, (void)on;
}
#endif

static void options_set(hl__mysql_store *store, MYSQL *mysql,
                        int64_t deadline) {
  int64_t left = hl__left_ms(deadline);
  if (left > store->connect_timeout) left = store->connect_timeout;
  unsigned seconds = (unsigned)((left + 999) / 1000);
  if (seconds < 1) seconds = 1;
  (void)mysql_options(mysql, MYSQL_OPT_CONNECT_TIMEOUT, &seconds);
  (void)mysql_options(mysql, MYSQL_SET_CHARSET_NAME, "utf8mb4");
  (void)mysql_options4(mysql, MYSQL_OPT_CONNECT_ATTR_ADD, "program_name",
                       store->config->application);
  if (store->my_cnf_group)
    (void)mysql_options(mysql, MYSQL_READ_DEFAULT_GROUP, store->my_cnf_group);
  const hl_dsn *dsn = store->config->dsn;
  if (!dsn->socket && dsn->host) {
    /* "localhost" is a host like any other, not a word for a socket. */
    unsigned tcp = MYSQL_PROTOCOL_TCP;
    (void)mysql_options(mysql, MYSQL_OPT_PROTOCOL, &tcp);
  }
  if (!dsn->socket) {
    (void)mysql_options(mysql, MYSQL_OPT_SSL_CA, store->tls_ca);
    (void)mysql_options(mysql, MYSQL_OPT_SSL_CERT, store->tls_cert);
    (void)mysql_options(mysql, MYSQL_OPT_SSL_KEY, store->tls_key);
    tls_options(store, mysql);
  }
}

/* Connects the session, whose options are set. */
static int log_in(hl__mysql_session *session, hl_error *error) {
  const hl__mysql_store *store = session->store;
  const hl_dsn *dsn = store->config->dsn;
  int status = HL_OK;
  const char *host = dsn->socket ? NULL : dsn->host;
  if (!host && !dsn->socket && !store->my_cnf_group) host = "127.0.0.1";

  hl__fork_forbid();
  wait_io_set(session, true);
  if (!mysql_real_connect(session->mysql, host, dsn->user, dsn->password,
                          dsn->database, dsn->socket ? 0 : dsn->port,
                          dsn->socket, CLIENT_MULTI_STATEMENTS)) {
    status = hl__mysql_error(session, NULL, "connect", error);
    /* The library has closed it: its number may be another file's. */
    if (session->fd >= 0) hl__fork_unwatch(session->fd);
    session->fd = -1;
  } else if (socket_watch(session, socket_of(session->mysql))) {
    status = hl__error_memory(error);
  } else {
    /* A program that is started by this one would keep the connection, and so
       the locks, of a process that has died: no atfork handler runs for it. */
    (void)fcntl(session->fd, F_SETFD, FD_CLOEXEC);
  }
  wait_io_set(session, false);
  hl__fork_allow();
  return status;
}

int hl__mysql_connect(hl__mysql_store *store, int64_t deadline,
                      hl__mysql_session **result, hl_error *error) {
  const hl_dsn *dsn = store->config->dsn;
  int status = HL_OK;
  *result = NULL;
  hl__mysql_session *session = calloc(1, sizeof *session);
  if (!session) return hl__error_memory(error);
  session->base.store = &store->base;
  session->store = store;
  session->fd = -1;
  atomic_init(&session->interrupted, false);
  session->mysql = mysql_init(NULL);
  if (!session->mysql) {
    status = hl__error_memory(error);
    goto out;
  }
  options_set(store, session->mysql, deadline);

  status = log_in(session, error);
  if (status) goto out;
  session->tls = mysql_get_ssl_cipher(session->mysql) != NULL;
  session->dialect = strstr(mysql_get_server_info(session->mysql), "MariaDB")
                         ? HL_MARIADB
                         : HL_MYSQL;
  if (!dsn->socket) {
    keep_alive(session->fd, store->config->hold_timeout);
    status = tls_check(session, error);
  }
out:
  if (status)
    hl__mysql_disconnect(session);
  else
    *result = session;
  return status;
}

void hl__mysql_disconnect(hl__mysql_session *session) {
  if (!session) return;
  if (session->fd >= 0) hl__fork_unwatch(session->fd);
  if (session->mysql) {
    hl__sigpipe guard = hl__sigpipe_begin(session);
    mysql_close(session->mysql);
    hl__sigpipe_end(guard);
  }
  /* Without their connection, statements are only memory. */
  for (size_t i = 0; i < HL__SHAPES_MAX; i++)
    if (session->shapes[i].statement)
      (void)mysql_stmt_close(session->shapes[i].statement);
  free(session->tag);
  free(session);
}
