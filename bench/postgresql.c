/*
 * postgresql.c - the cost of PostgreSQL and the wire, without hierlock: advisory locks, numbers
 * of 64 bits. Usage:
 *
 *   postgresql lock CONNINFO   One number, locked until it is unlocked. Both statements are prepared, and the client
 *                              waits for both answers.
 *   postgresql rows CONNINFO   Three numbers (shared, shared, exclusive) in a transaction, prepared, in one trip.
 *                              ROLLBACK is sent; the session's next use reads the answer. Two sessions in turn.
 *   postgresql lease CONNINFO  A lease of three rows, as the store takes it. BEGIN, the locks, an INSERT which looks
 *                              whether another lease is in the way, and COMMIT go in one trip. Then comes a DELETE,
 *                              whose answer the client waits for. The database has tables for leases.
 */
#include "client.h"

#include <libpq-fe.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LEVELS = 3, SESSIONS = 2 };

static struct session {
  PGconn *connection;
  bool answer_pending; /* ROLLBACK is sent, its answer not yet read */
} session[SESSIONS];

static int sessions, turn;
static char number[LEVELS][24];
static const char *const values[LEVELS] = {number[0], number[1], number[2]};

static void check(const struct session *s, const char *what, bool fine) {
  if (!fine) client_die(what, PQerrorMessage(s->connection));
}

static void prepare(struct session *s, const char *name, const char *statement) {
  PGresult *result = PQprepare(s->connection, name, statement, 0, NULL);
  check(s, statement, PQresultStatus(result) == PGRES_COMMAND_OK);
  PQclear(result);
}

/* mode lock */

static void lock_prepare(struct session *s) {
  prepare(s, "take", "SELECT pg_advisory_lock($1)");
  prepare(s, "give", "SELECT pg_advisory_unlock($1)");
}

/* Executes; the answer must have one row, `expected`. */
static void execute(struct session *s, const char *statement, const char *expected) {
  PGresult *result = PQexecPrepared(s->connection, statement, 1, values, NULL, NULL, 0);
  check(s, statement, PQresultStatus(result) == PGRES_TUPLES_OK);
  if (strcmp(PQgetvalue(result, 0, 0), expected)) client_die(statement, "not what was expected");
  PQclear(result);
}

static void lock_take(struct session *s) { execute(s, "take", ""); /* void */ }
static void lock_give(struct session *s) { execute(s, "give", "t"); }

/* mode rows */

static void rows_prepare(struct session *s) {
  prepare(s, "begin", "BEGIN");
  prepare(s, "take",
          "SELECT pg_advisory_xact_lock_shared($1),pg_advisory_xact_lock_shared($2),"
          "pg_advisory_xact_lock($3)");
  prepare(s, "give", "ROLLBACK");
  check(s, "pipeline", PQenterPipelineMode(s->connection));
}

/* Reads the results, up to the sync. */
static void read_answers(struct session *s) {
  for (;;) {
    PGresult *result = PQgetResult(s->connection);
    ExecStatusType status = result ? PQresultStatus(result) : PGRES_COMMAND_OK;
    PQclear(result);
    if (status == PGRES_PIPELINE_SYNC) return;
    check(s, "rows", status == PGRES_COMMAND_OK || status == PGRES_TUPLES_OK);
  }
}

static void rows_take(struct session *s) {
  if (s->answer_pending) read_answers(s);
  check(s, "rows",
        PQsendQueryPrepared(s->connection, "begin", 0, NULL, NULL, NULL, 0) &&
            PQsendQueryPrepared(s->connection, "take", LEVELS, values, NULL, NULL, 0) &&
            PQpipelineSync(s->connection));
  read_answers(s);
}

static void rows_give(struct session *s) {
  check(s, "ROLLBACK",
        PQsendQueryPrepared(s->connection, "give", 0, NULL, NULL, NULL, 0) &&
            PQpipelineSync(s->connection));
  s->answer_pending = true;
}

/* mode lease: what csrc/stores/postgresql/record.c and leases.c send */

static void lease_prepare(struct session *s) {
  prepare(s, "take",
          "SELECT set_config('hierlock.refused',CASE WHEN NOT pg_try_advisory_xact_lock_shared($1) "
          "THEN '1' "
          "WHEN NOT pg_try_advisory_xact_lock_shared($2) THEN '1' "
          "WHEN NOT pg_try_advisory_xact_lock($3) THEN '1' ELSE '0' END,true),"
          "(date_part('epoch',clock_timestamp())*1000000)::int8,"
          "CASE WHEN pg_is_in_recovery() THEN 0 ELSE pg_backend_pid() END,"
          "coalesce(pg_sequence_last_value(to_regclass('public.hier_lock_gate')),-1)");
  prepare(
      s, "record",
      "WITH made AS (INSERT INTO public.hier_lock_leases "
      "(id,holder,secret,till,token,shared,owner,path,"
      "label,application,host,pid,since) SELECT md5($4)::uuid,md5($4)::uuid,sha256($4::bytea),"
      "clock_timestamp()+60000*interval '1 millisecond',"
      "(date_part('epoch',clock_timestamp())*1000000)::int8,false,'bench','user/account/"
      "resource','',"
      "'bench','host',1,clock_timestamp() WHERE current_setting('hierlock.refused',true)='0' AND "
      "NOT EXISTS (SELECT FROM public.hier_lock_lease_rows r WHERE "
      "r.key=ANY(ARRAY[$1,$2,$3]::int8[]) "
      "AND (r.exclusive OR r.key=ANY(ARRAY[$3]::int8[]))) RETURNING token),kept AS (INSERT INTO "
      "public.hier_lock_lease_rows (key,exclusive,id) SELECT k,k=$3::int8,md5($4)::uuid FROM made,"
      "unnest(ARRAY[$1,$2,$3]::int8[]) k) SELECT made.token,"
      "pg_advisory_xact_lock_shared(1751999844,1952409963)::text,"
      "CASE WHEN pg_sequence_last_value('public.hier_lock_gate'::regclass)=2 THEN 2 "
      "ELSE setval('public.hier_lock_gate'::regclass,2) END FROM made");
  prepare(s, "give",
          "WITH gone AS (DELETE FROM public.hier_lock_leases WHERE id=md5($1)::uuid AND "
          "holder=md5($1)::uuid AND revoked IS NULL RETURNING id) DELETE FROM "
          "public.hier_lock_lease_rows r USING gone WHERE r.id=gone.id");
  check(s, "pipeline", PQenterPipelineMode(s->connection));
}

static char lease[64];

static void lease_take(struct session *s) {
  static unsigned long long serial;
  const char *const all[] = {number[0], number[1], number[2], lease};
  snprintf(lease, sizeof lease, "%d %llu", PQbackendPID(s->connection), ++serial);
  check(s, "lease",
        PQsendQueryParams(s->connection, "BEGIN", 0, NULL, NULL, NULL, NULL, 0) &&
            PQsendQueryPrepared(s->connection, "take", LEVELS, values, NULL, NULL, 0) &&
            PQsendQueryPrepared(s->connection, "record", 4, all, NULL, NULL, 0) &&
            PQsendQueryParams(s->connection, "COMMIT", 0, NULL, NULL, NULL, NULL, 0) &&
            PQpipelineSync(s->connection));
  read_answers(s);
}

static void lease_give(struct session *s) {
  const char *const id[] = {lease};
  check(s, "DELETE",
        PQsendQueryPrepared(s->connection, "give", 1, id, NULL, NULL, 0) &&
            PQpipelineSync(s->connection));
  read_answers(s);
}

static const struct mode {
  const char *name;
  int sessions;
  void (*prepare)(struct session *);
  void (*take)(struct session *);
  void (*give)(struct session *);
} modes[] = {
    {"lock", 1, lock_prepare, lock_take, lock_give},
    {"rows", 2, rows_prepare, rows_take, rows_give},
    {"lease", 1, lease_prepare, lease_take, lease_give},
};

static const struct mode *mode;

void client_open(int argc, char **argv) {
  for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
    if (argc == 2 && !strcmp(modes[i].name, argv[0])) mode = &modes[i];
  if (!mode) client_die("arguments", "postgresql lock|rows|lease CONNINFO");
  sessions = mode->sessions;
  for (int i = 0; i < sessions; i++) {
    session[i].connection = PQconnectdb(argv[1]);
    check(&session[i], "PQconnectdb", PQstatus(session[i].connection) == CONNECTION_OK);
    mode->prepare(&session[i]);
  }
}

/* A name's numbers: scattered, and the same in every process. */
void client_take(unsigned name) {
  unsigned long long x = name + 1;
  turn = (turn + 1) % sessions;
  for (int i = 0; i < LEVELS; i++) {
    x *= 6364136223846793005ull;
    snprintf(number[i], sizeof number[i], "%llu", x >> 1);
  }
  mode->take(&session[turn]);
}

void client_give(void) { mode->give(&session[turn]); }
