/*
 * postgresql.c - PostgreSQL, by libpq. PostgreSQL's locks need no table: so the acts on a table
 * have no like here.
 */
#include "servers.h"

#include <errno.h>
#include <libpq-fe.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

struct sql {
  PGconn *connection;
  bool impatient;
  int changed;
  char error[300];
};

static void disconnect(sql *self) {
  if (!self) return;
  PQfinish(self->connection);
  free(self);
}

static void silence(void *argument, const PGresult *result) { (void)argument, (void)result; }

static bool failed(sql *self, const char *message) {
  (void)snprintf(self->error, sizeof self->error, "%.*s", (int)strcspn(message, "\n"), message);
  return false;
}

static int64_t now_ms(void) {
  struct timespec t;
  (void)clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* libpq itself waits without a limit. */
static bool answered(sql *self) {
  int64_t end = now_ms() + 1000;
  while (PQisBusy(self->connection)) {
    struct pollfd p = {.fd = PQsocket(self->connection), .events = POLLIN};
    int64_t left = end - now_ms();
    int n = poll(&p, 1, !self->impatient ? -1 : left > 0 ? (int)left : 0);
    if (n == 0) return failed(self, "no answer in time");
    if (n < 0 && errno == EINTR) continue;
    if (!PQconsumeInput(self->connection)) return failed(self, PQerrorMessage(self->connection));
  }
  return true;
}

static void rows(const PGresult *result, row_fn *fn, void *context) {
  const char *fields[16] = {NULL};
  for (int i = 0; i < PQntuples(result); i++) {
    for (int j = 0; j < PQnfields(result) && j < 16; j++)
      fields[j] = PQgetisnull(result, i, j) ? NULL : PQgetvalue(result, i, j);
    fn(context, fields);
  }
}

static bool run(sql *self, const char *text, row_fn *fn, void *context) {
  bool fine = true;
  if (!PQsendQuery(self->connection, text)) return failed(self, PQerrorMessage(self->connection));
  for (;;) {
    if (!answered(self)) return false;
    PGresult *result = PQgetResult(self->connection);
    if (!result) return fine;
    ExecStatusType status = PQresultStatus(result);
    if (status != PGRES_TUPLES_OK && status != PGRES_COMMAND_OK)
      fine = failed(self, PQresultErrorMessage(result));
    else if (fn)
      rows(result, fn, context);
    self->changed = atoi(PQcmdTuples(result));
    PQclear(result);
  }
}

static sql *log_in(const hl_dsn *dsn, const char *database, int seconds, bool impatient) {
  char port[16], limit[16];
  sql *self = calloc(1, sizeof *self);
  if (!self) abort();
  (void)snprintf(port, sizeof port, "%u", dsn->port);
  (void)snprintf(limit, sizeof limit, "%d", seconds);
  const char *const names[] = {
      "host", "port", "user", "password", "dbname", "connect_timeout", "sslmode", "options", NULL};
  const char *const values[] = {
      dsn->host,
      port,
      dsn->user,
      dsn->password,
      database ? database : dsn->database,
      limit,
      "disable",
      "-c statement_timeout=0 -c lock_timeout=3s -c default_transaction_read_only=off",
      NULL};
  self->impatient = impatient;
  self->connection = PQconnectdbParams(names, values, 0);
  (void)PQsetNoticeReceiver(self->connection, silence, NULL);
  if (PQstatus(self->connection) == CONNECTION_OK &&
      (PQserverVersion(self->connection) < 140000 ||
       run(self, "SET idle_session_timeout = 0", NULL, NULL)))
    return self;
  disconnect(self);
  return NULL;
}

static int changed(const sql *self) { return self->changed; }

static const char *error(const sql *self) { return self->error; }

/* A server may say that a setting has changed. */
static bool ended(sql *self) {
  char byte;
  ssize_t n = recv(PQsocket(self->connection), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (n < 0) return errno != EAGAIN && errno != EINTR;
  return n == 0 || !PQconsumeInput(self->connection);
}

/* There is no table. Tokens are made of the clock or, if an administrator has made one, of a sequence. */
/* The tables of `hierlock provision --leases`. */
static bool lease(sql *self, const char *user) {
  static const char *const tables[] = {
      "CREATE TABLE public.hier_lock_leases (id uuid PRIMARY KEY, holder uuid NOT NULL, secret "
      "bytea NOT NULL, till timestamptz NOT NULL,"
      " token bigint NOT NULL, shared boolean NOT NULL, owner bytea NOT NULL, path bytea NOT NULL, "
      "label bytea NOT NULL,"
      " application bytea NOT NULL, host bytea NOT NULL, pid bigint NOT NULL, since timestamptz "
      "NOT NULL, turn bigint NOT NULL DEFAULT 0, revoked timestamptz,"
      " revoked_by bytea, reason bytea) WITH (fillfactor=50)",
      "CREATE TABLE public.hier_lock_lease_rows (key bigint NOT NULL, exclusive boolean NOT NULL, "
      "id uuid NOT NULL, PRIMARY KEY (key, id))",
      "CREATE INDEX hier_lock_lease_rows_id ON public.hier_lock_lease_rows (id)",
      "CREATE INDEX hier_lock_lease_rows_exclusive ON public.hier_lock_lease_rows (key) WHERE "
      "exclusive",
      "CREATE SEQUENCE public.hier_lock_gate MINVALUE 1 MAXVALUE 2",
      "SELECT setval('public.hier_lock_gate', 1)"};
  char text[256];
  for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
    if (!run(self, tables[i], NULL, NULL)) return false;
  (void)snprintf(text, sizeof text,
                 "GRANT SELECT, INSERT, UPDATE, DELETE ON public.hier_lock_leases, "
                 "public.hier_lock_lease_rows TO %s",
                 user);
  if (!run(self, text, NULL, NULL)) return false;
  (void)snprintf(text, sizeof text, "GRANT SELECT, UPDATE ON SEQUENCE public.hier_lock_gate TO %s",
                 user);
  return run(self, text, NULL, NULL);
}

static bool provision(sql *self, const char *database, const char *table, int buckets, bool variant,
                      bool leases, const char *user) {
  (void)database, (void)table, (void)buckets;
  if (leases && !lease(self, user)) return false;
  if (!run(self, "DROP SEQUENCE IF EXISTS public.hier_lock_token", NULL, NULL)) return false;
  return !variant ||
         (run(self, "CREATE SEQUENCE public.hier_lock_token", NULL, NULL) &&
          run(self, "GRANT USAGE ON SEQUENCE public.hier_lock_token TO PUBLIC", NULL, NULL));
}

#define CLIENTS "FROM pg_stat_activity WHERE datname = '{database}' AND usename = '{user}'"
/* The proxy connects from 127.0.0.2. Behind it a holder learns late that he was killed: so these are left alone. */
#define VICTIM "SELECT pid " CLIENTS " AND client_addr = '127.0.0.1'"
#define CHOSEN " ORDER BY md5(pid || '{seed}') LIMIT 1"
#define RELOAD "SELECT pg_reload_conf()"
#define FUNCTIONS                                                                                  \
  "FUNCTION pg_advisory_xact_lock(bigint), pg_advisory_xact_lock_shared(bigint),"                  \
  " pg_try_advisory_xact_lock(bigint), pg_try_advisory_xact_lock_shared(bigint)"
#define OF_ROLE "ALTER ROLE {user} IN DATABASE {database} "

const server_kind server_postgresql = {
    .name = "postgresql",
    .store = &hl_store_postgresql,
    .connect = log_in,
    .close = disconnect,
    .run = run,
    .changed = changed,
    .error = error,
    .ended = ended,
    .plain = "sslmode=disable",
    .secure = "sslmode=require",
    .soak = "sslmode=disable",
    .provision = provision,
    .space_drop = {"DROP TABLE IF EXISTS public.hier_lock_leases, public.hier_lock_lease_rows",
                   "DROP SEQUENCE IF EXISTS public.hier_lock_gate"},
    .database_make = {"DROP DATABASE IF EXISTS {database}", "CREATE DATABASE {database}"},
    .database_drop = {"DROP DATABASE {database}"},
    .rows_table = "public.hierlock_soak_rows",
    .number = "NUMERIC(20)",
    /* A connection that the proxy cuts while it is idle, or logs in, would stay for ever: in an
       hour of cuts they use the server up. The pool's connections give signs of life. */
    .limits = {.begin = {"ALTER SYSTEM SET idle_session_timeout = '10s'",
                         "ALTER SYSTEM SET authentication_timeout = '10s'", RELOAD},
               .end = {"ALTER SYSTEM RESET idle_session_timeout",
                       "ALTER SYSTEM RESET authentication_timeout", RELOAD}},
    .victim = VICTIM CHOSEN,
    .victim_busy = VICTIM " AND state = 'active'" CHOSEN,
    .kill = "SELECT pg_terminate_backend(%lld)",
    .interrupt = "SELECT pg_cancel_backend(%lld)",
    .connections = "SELECT count(*) " CLIENTS,
    .transactions = "SELECT count(DISTINCT pid) FROM pg_locks WHERE locktype = 'advisory'",
    .show = {"SELECT concat_ws(' ', 'locks of backend', pid, mode, granted, count(*)) FROM "
             "pg_locks WHERE locktype = 'advisory'"
             " GROUP BY pid, mode, granted",
             "SELECT concat_ws(' ', 'connection', pid, usename, client_addr, client_port, state, "
             "wait_event, 'since', state_change,"
             " left(query, 150)) FROM pg_stat_activity WHERE backend_type = 'client backend'"},
    /* Advisory locks write nothing, and a session of ours sets it for itself: nothing changes. Leases are written. */
    .read_only = {{.what = "default_transaction_read_only",
                   .leases_may = STATUS_BIT(HL_EUNSAFE_SERVER),
                   .begin = {"ALTER SYSTEM SET default_transaction_read_only = on", RELOAD},
                   .end = {"ALTER SYSTEM RESET default_transaction_read_only", RELOAD}}},
    .alter = {{.what = "REVOKE EXECUTE",
               .shuts = true,
               .extends = true, /* the server looks at rights of before, unless it has to begin */
               .may = STATUS_BIT(HL_ESTORE) | STATUS_BIT(HL_ENOT_PROVISIONED),
               .begin = {"REVOKE EXECUTE ON " FUNCTIONS " FROM PUBLIC"},
               .end = {"GRANT EXECUTE ON " FUNCTIONS " TO PUBLIC"}},
              {.what = "LOCK TABLE pg_proc",
               .begin = {"BEGIN", "LOCK TABLE pg_proc IN ACCESS EXCLUSIVE MODE"},
               .end = {"COMMIT"}},
              {.what = "settings of the role",
               .leases_may = STATUS_BIT(HL_EUNSAFE_SERVER),
               .begin = {OF_ROLE "SET statement_timeout = '200ms'",
                         OF_ROLE "SET lock_timeout = '1ms'",
                         OF_ROLE "SET idle_in_transaction_session_timeout = '1ms'",
                         OF_ROLE "SET default_transaction_isolation = 'serializable'",
                         OF_ROLE "SET default_transaction_read_only = on",
                         OF_ROLE "SET search_path = ''"},
               .end = {OF_ROLE "RESET ALL"}}},
    /* max_connections can only be changed by a restart; the limit of a role has the same error.
       The table of all locks is filled, too: these keys are pairs, and no lock of ours. The
       locks taken before the error stay. */
    .full =
        {{.what = "connections of the role",
          .begin = {"DO 'BEGIN EXECUTE format(''ALTER ROLE {user} CONNECTION LIMIT %s'',"
                    " (SELECT greatest(count(*), 1) FROM pg_stat_activity WHERE usename = "
                    "''{user}'')); END'"},
          .end = {"ALTER ROLE {user} CONNECTION LIMIT -1"}},
         {.what = "table of locks",
          .may = STATUS_BIT(HL_ESTORE),
          .begin = {"DO 'BEGIN PERFORM pg_advisory_lock(7, i) FROM generate_series(1, 10000000) i;"
                    " EXCEPTION WHEN out_of_memory THEN NULL; END'"},
          .end = {"SELECT pg_advisory_unlock_all()"}}},
};
