/*
 * tables.c - the tables of leases, and sweeping them:
 *
 *     public.hier_lock_leases      a record per lease; a revoked one stays for at least an
 *                                  hour, so that its holder hears of it. The reason of
 *                                  another is NULL, or '' once a waiter listens (bell.c)
 *     public.hier_lock_lease_rows  the rows that a lease locks; none for a revoked one
 *     public.hier_lock_gate        a sequence: 2 if there may be leases, else 1 (gate.c)
 *
 * sql/postgresql_leases.sql defines them. Texts of programs are stored as bytes, in any encoding.
 */
#include "postgresql_store.h"

#include "../judge/judge.h"

#include <stdio.h>
#include <string.h>

#define ANSWER_MS 10000
/* What a session that is younger than this keeps from its beginning is true now. */
#define FRESH_MS 1000
/* Each store sweeps when it begins, then with this pause. */
#define SWEEP_MS 60000

const char hl__pg_tables_sql[] =
#include "postgresql_leases.sql.h"
    ;

int64_t hl__pg_answer_by(const hl__pg_session *session) {
  return hl__within_ms(ANSWER_MS, session->limit);
}

int hl__pg_aside_open(hl__pg_session *session, int64_t deadline, hl__pg_session **result,
                      hl_error *error) {
  hl__pg_session *other;
  *result = NULL;
  int status = hl__pg_connect(session->store, deadline, &other, error);
  if (status) return status;
  other->patience = deadline;
  status = hl__pg_verify(other, error);
  if (status)
    hl__pg_disconnect(other);
  else
    *result = other;
  return status;
}

int hl__pg_aside(hl__pg_session *session, const char *sql, hl_error *error) {
  hl__pg_session *other;
  int status = hl__pg_aside_open(session, hl__pg_answer_by(session), &other, error);
  if (status) return status;
  status = hl__pg_query(other, "SET statement_timeout=5000", 0, NULL, error);
  if (status == HL_OK) status = hl__pg_query(other, sql, 0, NULL, error);
  hl__pg_disconnect(other);
  return status;
}

/* ------------------------------------------------------------- existence */

enum { TABLES, PRIVILEGES, MAY_CREATE, READ_ONLY, STARTED, COLUMNS };

/* What the role and the database had set when the session began: its own setting is ours. */
#define READ_ONLY_SQL                                                                              \
  "SELECT s.reset_val FROM pg_catalog.pg_settings s WHERE s.name='default_transaction_read_only'"
/* A proxy may lead a new session to another server, which did not start in the same microsecond. */
#define STARTED_SQL "(extract(epoch FROM pg_postmaster_start_time())*1e6)::int8"

/* Missing tables are no error here. */
static const char tables_sql[] =
    "SELECT (to_regclass('public.hier_lock_leases') IS NOT NULL)::int+"
    "(to_regclass('public.hier_lock_lease_rows') IS NOT NULL)::int+"
    "(to_regclass('public.hier_lock_gate') IS NOT NULL)::int,"
    "(SELECT bool_and(coalesce(has_table_privilege(to_regclass(name),what),false)) FROM (VALUES "
    "('public.hier_lock_leases','SELECT'),('public.hier_lock_leases','INSERT'),"
    "('public.hier_lock_leases','UPDATE'),('public.hier_lock_leases','DELETE'),"
    "('public.hier_lock_lease_rows','SELECT'),('public.hier_lock_lease_rows','INSERT'),"
    "('public.hier_lock_lease_rows','DELETE')) needed(name,what)) AND "
    "coalesce(has_sequence_privilege(to_regclass('public.hier_lock_gate'),'SELECT') AND "
    "has_sequence_privilege(to_regclass('public.hier_lock_gate'),'UPDATE'),false),"
    "coalesce((SELECT has_schema_privilege(n.oid,'CREATE') FROM pg_catalog.pg_namespace n WHERE "
    "n.nspname='public'),false),"
    "(" READ_ONLY_SQL ")," STARTED_SQL;

static bool is_true(const char *value) { return value && *value == 't'; }

static int schema_denied(hl_error *error) {
  return hl__pg_denied(
      hl__error(error, HL_ENOT_PROVISIONED, "leases need GRANT USAGE ON SCHEMA public"), error);
}

static bool is_on(const char *value) { return value && strcmp(value, "on") == 0; }

/* Asks a new session whether it is read-only by default, as the present one is, which may have
   begun long ago, on the server that started then. It gets half of the time, as a lock that becomes
   a lease needs the rest. HL_OK; HL_ECONNECTION, or HL_TIMEOUT where the session holds a lock,
   which stays: no answer. */
static int read_only_ask(hl__pg_session *session, const char *started, bool *read_only,
                         hl_error *error) {
  hl__pg_session *other;
  PGresult *result = NULL;
  int64_t now = hl__now_ms(), deadline = now + (hl__pg_answer_by(session) - now) / 2;
  *read_only = true;
  if (now - session->began < FRESH_MS) return HL_OK;
  int status = hl__pg_aside_open(session, deadline, &other, error);
  if (status == HL_OK) {
    status = hl__pg_query(other, "SELECT (" READ_ONLY_SQL ")," STARTED_SQL, 2, &result, error);
    *read_only = is_on(hl__pg_field(result, 0, 0));
    const char *there = hl__pg_field(result, 0, 1);
    if (status == HL_OK && (!there || !started || strcmp(there, started) != 0))
      status = hl__error(error, HL_ECONNECTION, "a proxy leads new sessions to another server");
    PQclear(result);
    hl__pg_disconnect(other);
  }
  if (status) status = hl__error_as(error, session->holds ? HL_TIMEOUT : HL_ECONNECTION);
  return status;
}

static int tables_read(hl__pg_session *session, int *tables, bool *may_use, bool *may_create,
                       hl_error *error) {
  PGresult *result;
  session->patience = hl__pg_answer_by(session);
  hl_error said;
  int status = hl__pg_query(session, tables_sql, COLUMNS, &result, &said);
  /* It is about a schema: the role could look into it when the session began. */
  if (status == HL_ESTORE && hl__pg_state_is(said.sqlstate, HL__PG_DENIES)) {
    session->outdated = true;
    return schema_denied(error);
  }
  if (status && error) *error = said;
  if (status) return status;
  session->outdated = false;
  const char *count = hl__pg_field(result, 0, TABLES);
  *tables = count ? *count - '0' : 0;
  *may_use = is_true(hl__pg_field(result, 0, PRIVILEGES));
  *may_create = is_true(hl__pg_field(result, 0, MAY_CREATE));
  if (is_on(hl__pg_field(result, 0, READ_ONLY)))
    status = read_only_ask(session, hl__pg_field(result, 0, STARTED), &session->outdated, error);
  if (status == HL_OK && session->outdated)
    status = hl__error(error, HL_EUNSAFE_SERVER,
                       "default_transaction_read_only is on for this role or "
                       "database, but leases must be written");
  PQclear(result);
  return status;
}

int hl__pg_tables(hl__pg_session *session, bool make, hl_error *error) {
  static const char hint[] = "hierlock provision --leases makes them";
  int tables = 0, status;
  bool may_use = false, may_create = false;
  if (session->ready) return HL_OK;
  session->outdated = session->blind && make;
  if (session->blind) return make ? schema_denied(error) : HL__ABSENT;
  status = tables_read(session, &tables, &may_use, &may_create, error);
  if (status) return status;
  if (tables == 0 && !make) return HL__ABSENT;
  if (tables < 3) {
    if (!may_create)
      return hl__pg_denied(hl__error(error, HL_ENOT_PROVISIONED,
                                     "this database has no tables for leases, and the role may "
                                     "not make them: %s",
                                     hint),
                           error);
    status = hl__pg_aside(session, hl__pg_tables_sql, error);
    if (status == HL_OK) status = tables_read(session, &tables, &may_use, &may_create, error);
    if (status) return status;
  }
  if (tables < 3 || !may_use)
    return hl__pg_denied(
        hl__error(error, HL_ENOT_PROVISIONED,
                  "leases need GRANT SELECT, INSERT, UPDATE, DELETE ON "
                  "public.hier_lock_leases, public.hier_lock_lease_rows, and "
                  "SELECT, UPDATE ON SEQUENCE public.hier_lock_gate: %s --grant-to "
                  "ROLE grants them",
                  hint),
        error);
  /* A write must end, even if another session locks the tables. */
  if (!session->holds)
    status = hl__pg_query(session, "SET statement_timeout=10000", 0, NULL, error);
  if (status == HL_OK) session->ready = !session->holds;
  return status;
}

/* --------------------------------------------------------------- sweeping */

/* Deletes leases that ended an hour ago: until then an expired lease may be refreshed, while no one
   wants its rows. The sweep waits for no session, and none waits for it: a session that is about to
   commit a record holds the gate's lock, shared. Each statement after the first two lines has a
   snapshot of its own. If an administrator has locked a table, the sweep is left for later. */
static const char sweep_sql[] =
    "BEGIN;SET LOCAL lock_timeout=10;"
    "WITH gone AS (DELETE FROM public.hier_lock_leases WHERE id IN (SELECT l.id "
    "FROM public.hier_lock_leases l WHERE greatest(l.till,l.revoked)<"
    "clock_timestamp()-interval '1 hour' FOR UPDATE SKIP LOCKED) RETURNING id) "
    "DELETE FROM public.hier_lock_lease_rows r USING gone WHERE r.id=gone.id;"
    "SELECT set_config('hierlock.gate',"
    "pg_try_advisory_xact_lock(" HL__PG_GATE_KEYS ")::text,true);"
    "SELECT CASE WHEN current_setting('hierlock.gate')='true' AND NOT EXISTS("
    "SELECT FROM public.hier_lock_lease_rows) "
    "THEN setval('public.hier_lock_gate',1) END;"
    "COMMIT";

/* A failed sweep does not fail the request. */
int hl__pg_sweep(hl__pg_session *session, hl_error *error) {
  hl__pg_store *store = session->store;
  int64_t now = hl__now_ms(), due = atomic_load(&store->sweep);
  if (now < due) return HL_OK;
  if (!atomic_compare_exchange_strong(&store->sweep, &due, now + SWEEP_MS)) return HL_OK;
  hl_error reason = {0};
  int status = hl__pg_tables(session, false, &reason);
  if (status == HL_OK) {
    session->patience = hl__pg_answer_by(session);
    status = hl__pg_query(session, sweep_sql, 0, NULL, &reason);
    if (status != HL_OK && status != HL_ECONNECTION) {
      status = hl__pg_rollback_send(session, &reason);
      if (status == HL_OK)
        status = hl__pg_settle(session, hl__pg_answer_by(session), true, &reason);
    }
  }
  if (status != HL_ECONNECTION && status != HL_TIMEOUT) return HL_OK;
  if (error) *error = reason;
  return hl__error_as(error, HL_ECONNECTION);
}
