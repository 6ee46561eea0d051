/*
 * server.c - checks that a server excludes, and sets a session up. On a standby a lock succeeds
 * without the primary knowing of it. So each new connection is checked: after a fail-over it may
 * lead to another server.
 */
#include "postgresql_store.h"

#include "../judge/judge.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Judges the greeting, as another kind of server would not understand the query that follows. */
static int greeting_refuse(const hl__pg_session *session, hl_error *error) {
  PGconn *connection = session->connection;
  const char *version = PQparameterStatus(connection, "server_version");
  if (PQparameterStatus(connection, "crdb_version"))
    return hl__error(error, HL_EUNSAFE_SERVER, "CockroachDB has no advisory locks");
  return hl__pg_server_judge((const hl__fact[]){{"version", version}, {0}}, error);
}

enum { VERSION, STANDBY, BACKEND, MULTIPLE, SEQUENCE, MAY_USE, LEVELS, GATE, RINGS, COLUMNS };

static const char server_sql[] =
    "SELECT version(),pg_is_in_recovery(),pg_backend_pid()," HL__PG_MULTIPLE
    ",s.oid,has_sequence_privilege(s.oid,'USAGE'),"
    "obj_description(s.oid,'pg_class'),"
    "(SELECT CASE WHEN NOT pg_catalog.has_schema_privilege(n.oid,'USAGE') "
    "THEN 'b' WHEN " HL__PG_GATE_NAME " IS NULL THEN "
    "CASE WHEN " HL__PG_GATE_ROWS " IS NULL THEN 'a' ELSE 'm' END "
    "WHEN pg_catalog.has_sequence_privilege(" HL__PG_GATE_NAME ",'SELECT') THEN 't' "
    "ELSE 'u' END FROM pg_catalog.pg_namespace n WHERE n.nspname='public'),"
    "has_function_privilege(to_regprocedure('pg_notify(text,text)'),'EXECUTE') AND "
    "has_function_privilege(to_regprocedure('pg_notification_queue_usage()'),'EXECUTE') "
    "FROM (SELECT 1) one LEFT JOIN pg_catalog.pg_class s ON s.relkind='S' AND "
    "s.relname='hier_lock_token' AND s.relnamespace="
    "(SELECT n.oid FROM pg_catalog.pg_namespace n WHERE n.nspname='public')";

static int server_refuse(hl__pg_session *session, const PGresult *result, hl_error *error) {
  const char *version = hl__pg_field(result, 0, VERSION);
  const char *backend = hl__pg_field(result, 0, BACKEND);
  const char *oid = hl__pg_field(result, 0, SEQUENCE), *gate = hl__pg_field(result, 0, GATE);
  const char *rings = hl__pg_field(result, 0, RINGS);
  if (!version || !backend)
    return hl__error(error, HL_ECONNECTION, "the server answers what was not asked");
  const hl__fact facts[] = {{"version", version},
                            {"standby", hl__pg_field(result, 0, STANDBY)},
                            {"multiple", hl__pg_field(result, 0, MULTIPLE)},
                            {"sequence", oid},
                            {"sequence_usable", hl__pg_field(result, 0, MAY_USE)},
                            {"gate", gate},
                            {0}};
  session->sequence = oid ? (unsigned)strtoul(oid, NULL, 10) : 0;
  /* What this role can see of leases: see gate.c. */
  session->blind = gate && *gate == 'b';
  session->gated = gate && *gate == 't';
  session->rings = rings && *rings == 't';
  int status = hl__pg_server_judge(facts, error);
  if (status) return status;
  /* A pooler shows a number of its own, and may lead each transaction to another session, without
     our settings. */
  if (atoi(backend) != session->backend)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "a pooler or proxy stands before the server, and may give "
                     "our session to others: connect to the server itself");
  return HL_OK;
}

/* Other levels have other keys, so a program with other levels would exclude no one. The sequence's
   comment says which levels the database has, if it begins like this. The first session decides
   what the program has left open; no other thread has the store then. */
#define LEVELS_ARE "hierlock levels: "

static int layout_agree(hl__pg_session *session, const char *comment, hl_error *error) {
  hl__pg_store *store = session->store;
  const hl_layout *wanted = store->base.layout ? store->base.layout : store->config->layout;
  char names[HL__LAYOUT_NAMES_MAX];
  const char *ours = hl__layout_names(wanted, names);
  bool said = comment && strncmp(comment, LEVELS_ARE, strlen(LEVELS_ARE)) == 0;
  comment = said ? comment + strlen(LEVELS_ARE) : ours;
  int status = hl__layout_settle(wanted, comment, &store->base.layout, error);
  if (status != HL_EMISMATCH) return status;
  return hl__error(error, HL_EMISMATCH,
                   "this database has the levels %.130s, as the comment of "
                   "public.hier_lock_token says; this program wants %.130s: "
                   "leave out `levels`, and it uses the existing ones",
                   comment, ours);
}

/* Sets everything that we rely on and that an administrator may have changed, for the server or the
   role. Queries of leases use indexes, however few rows the tables had when they were planned, and
   start no processes, however many dead rows there are: that takes longer than the query. If
   row-level security would hide rows, they are to fail (row_security). After
   `idle_in_transaction_session_timeout` of silence the server ends a session that holds locks: this
   is hold_timeout. */
static void session_sql(const hl__pg_session *session, char *out, size_t size) {
  int64_t lease = session->store->config->hold_timeout;
  (void)snprintf(out, size,
                 "SET statement_timeout=0;SET lock_timeout=%d;%sSET search_path=pg_catalog;"
                 "SET default_transaction_isolation='read committed';"
                 "SET default_transaction_read_only=off;"
                 "SET default_transaction_deferrable=off;"
                 "SET row_security=off;SET enable_seqscan=off;SET jit=off;"
                 "SET max_parallel_workers_per_gather=0;"
                 "SET plan_cache_mode=force_generic_plan;"
                 "SET idle_in_transaction_session_timeout=%lld;%s",
                 HL__PG_TABLE_MS,
                 PQserverVersion(session->connection) >= 170000 ? "SET transaction_timeout=0;" : "",
                 /* The server's limit is 24 days. If it keeps a lock longer than we believe, that
                    does no harm. */
                 (long long)(lease <= INT32_MAX ? lease : 0), server_sql);
}

/* How often a server checks that the client is still there while its session waits for a lock; ms.
   Since PostgreSQL 14, but not on all systems. */
#define CHECK_MS 1000

int hl__pg_verify(hl__pg_session *session, hl_error *error) {
  char sql[3072];
  PGresult *result = NULL;
  int status = greeting_refuse(session, error);
  if (status) return status;
  session_sql(session, sql, sizeof sql);
  status = hl__pg_query(session, sql, COLUMNS, &result, error);
  if (status == HL_OK) status = server_refuse(session, result, error);
  if (status == HL_OK) status = layout_agree(session, hl__pg_field(result, 0, LEVELS), error);
  PQclear(result);
  if (status || PQserverVersion(session->connection) < 140000) return status;
  (void)snprintf(sql, sizeof sql, "SET client_connection_check_interval=%d", CHECK_MS);
  status = hl__pg_query(session, sql, 0, NULL, error);
  return status == HL_ECONNECTION ? status : HL_OK;
}
