/*
 * record.c - the record of a lease. A session that has the lease's rows locked writes it, in the
 * same transaction, whose COMMIT gives the rows back. So the waiters for these rows see the record,
 * and a client that dies leaves all of it or nothing.
 *
 * If nothing is in the way, one round trip does it all:
 *
 *     BEGIN
 *     SELECT set_config('lock_timeout', ...),
 *            set_config('hierlock.refused', CASE WHEN NOT pg_try_advisory... END, true), ...
 *     INSERT ... WHERE current_setting('hierlock.refused')='0' AND NOT EXISTS (a lease)
 *     COMMIT
 *
 * - The INSERT is a statement of its own, so its snapshot is later than the locks.
 * - Its time is clock_timestamp(): now() is the time of BEGIN, before any wait.
 * - It takes the gate's lock, shared, and keeps it until the COMMIT; then it opens the gate.
 *   A session that closes the gate holds this lock exclusively before it searches for
 *   records. So it sees this record, or this INSERT sees the closed gate.
 *
 * Otherwise the rows are locked as for a session lock, whose waits have an end. Then the record is
 * written as when a session lock becomes a lease.
 *
 * A COMMIT without an answer may have been executed: grant->sent_ms tells the core.
 */
#include "postgresql_store.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHAPE_ROWS_MAX 5u /* 2^2 + 2^3 + ... shapes have numbers */
#define ROW_BYTES 80u

/* $1: id; $2: holder; $3: secret; $4: ttl; $5: keys; $6: exclusive keys; $7: owner; $8: path; $9:
   label; $10: application; $11: host; $12: pid; $13: not exclusive (for update, if a key is an
   update row's); $14: token, or NULL; $15: its rows are held. */
#define TAKE                                                                                       \
  "WITH made AS (INSERT INTO public.hier_lock_leases (id,holder,secret,till,"                      \
  "token,shared,owner,path,label,application,host,pid,since) SELECT "                              \
  "$1::uuid,$2::uuid,sha256($3::bytea),"                                                           \
  "clock_timestamp()+$4::int8*interval '1 millisecond',"                                           \
  "coalesce($14::int8,%s),$13::bool,$7::bytea,$8::bytea,$9::bytea,"                                \
  "$10::bytea,$11::bytea,$12::int8,clock_timestamp() WHERE $15::bool OR ("                         \
  "current_setting('hierlock.refused',true)='0' AND NOT EXISTS (SELECT FROM "                      \
  "public.hier_lock_lease_rows WHERE exclusive AND key=ANY($5::int8[])) AND "                      \
  "NOT EXISTS (SELECT FROM public.hier_lock_lease_rows WHERE "                                     \
  "key=ANY($6::int8[]))) RETURNING token),"                                                        \
  "kept AS (INSERT INTO public.hier_lock_lease_rows (key,exclusive,id) "                           \
  "SELECT k,k=ANY($6::int8[]),$1::uuid FROM made,unnest($5::int8[]) k) "                           \
  "SELECT made.token,CASE WHEN pg_is_in_recovery() THEN 0 ELSE "                                   \
  "pg_backend_pid() END,"                                                                          \
  "pg_advisory_xact_lock_shared(" HL__PG_GATE_KEYS ")::text,"                                      \
  "CASE WHEN pg_sequence_last_value('public.hier_lock_gate'::regclass)=2 "                         \
  "THEN 2 ELSE setval('public.hier_lock_gate'::regclass,2) END FROM made"

enum { TOKEN, SERVER, COLUMNS = 4 };

/* The memory behind the parameters of a TAKE. */
typedef struct record {
  hl__pg_part part;
  char sql[sizeof TAKE + 160];
  char ttl[24], pid[24], token[24], label[128];
  char *keys, *exclusive;
} record;

static void record_dispose(record *self) {
  free(self->keys);
  free(self->exclusive);
  self->keys = self->exclusive = NULL;
}

/* token 0: make a new one. held: the session holds the rows. */
static int record_fill(record *self, const hl__pg_session *session, const hl_request *request,
                       int64_t token, bool held, hl_error *error) {
  const hl_store_config *config = session->store->config;
  const hl_lease_terms *terms = request->lease;
  hl__pg_part *part = &self->part;
  char made[128];
  memset(self, 0, sizeof *self);
  self->keys = hl__pg_keys(request->recorded, request->recorded_n, false);
  self->exclusive = hl__pg_keys(request->recorded, request->recorded_n, true);
  if (!self->keys || !self->exclusive) {
    record_dispose(self);
    return hl__error_memory(error);
  }
  (void)hl__pg_token(session, made, sizeof made);
  (void)snprintf(self->sql, sizeof self->sql, TAKE, made);
  (void)hl__escape(self->label, sizeof self->label, request->label, request->label_size);
  part->number = HL__PG_TAKE;
  part->sql = self->sql;
  hl__pg_bytes(part, terms->id, 16);
  hl__pg_bytes(part, terms->holder, 16);
  hl__pg_bytes(part, terms->secret, 16);
  hl__pg_number(part, self->ttl, terms->ttl);
  hl__pg_value(part, self->keys);
  hl__pg_value(part, self->exclusive);
  hl__pg_bytes(part, terms->owner, strlen(terms->owner));
  hl__pg_bytes(part, request->path, strlen(request->path));
  hl__pg_bytes(part, self->label, strlen(self->label));
  hl__pg_bytes(part, config->application, strlen(config->application));
  hl__pg_bytes(part, config->host, strlen(config->host));
  hl__pg_number(part, self->pid, config->pid);
  hl__pg_value(part, request->mode == HL_EXCLUSIVE ? "f" : "t");
  if (token)
    hl__pg_number(part, self->token, token);
  else
    hl__pg_value(part, NULL);
  hl__pg_value(part, held ? "t" : "f");
  return HL_OK;
}

/* Reads the row that TAKE has returned. */
static int record_read(const hl__pg_session *session, const PGresult *result, uint64_t *token,
                       hl_error *error) {
  const char *number = hl__pg_field(result, 0, TOKEN);
  const char *server = hl__pg_field(result, 0, SERVER);
  if (!number || !server)
    return hl__error(error, HL_ECONNECTION, "the server answers what was not asked");
  if (atoi(server) != session->backend)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "a proxy has led the request to another server than that "
                     "to which it has connected: connect to the server itself");
  *token = strtoull(number, NULL, 10);
  return HL_OK;
}

/* ----------------------------------------------------- in one round trip */

/* The number of a sequence of modes: a 1, then one bit per row. */
static int shape_number(const hl_request *request) {
  unsigned number = 1;
  for (size_t i = 0; i < request->n; i++)
    number = number << 1 | (request->rows[i].mode != HL_SHARED);
  return number < 32u - HL__PG_SHAPES ? (int)(HL__PG_SHAPES + number) : -1;
}

/* Writes the statement that tries the rows; their keys are parameters. */
static void shape_fill(hl__pg_part *part, const hl__pg_session *session, const hl_request *request,
                       char *sql, size_t size, char keys[SHAPE_ROWS_MAX][24]) {
  char columns[768];
  size_t used =
      (size_t)snprintf(sql, size, "SELECT " HL__PG_TRY ",set_config('hierlock.refused',CASE");
  part->number = shape_number(request);
  part->sql = sql;
  for (size_t i = 0; i < request->n; i++) {
    const hl_row *row = &request->rows[i];
    hl__pg_number(part, keys[i], hl__pg_key(row->level, row->bucket));
    used += (size_t)snprintf(sql + used, size - used,
                             " WHEN NOT pg_try_advisory_xact_lock%s($%zu::int8) THEN '1'",
                             row->mode == HL_SHARED ? "_shared" : "", i + 1);
  }
  (void)hl__pg_columns(session, columns, sizeof columns);
  (void)snprintf(sql + used, size - used, " ELSE '0' END,true),%s", columns);
}

/* Tries to take the lease in one round trip. HL_OK: granted. HL_TIMEOUT: another session has
   locked the tables. HL__UNFREE: a row was not free. HL__IN_STEPS: a lease may be in the way, or
   the request has too many rows for one statement. In the last three cases nothing is held or
   written. */
static int take_at_once(hl__pg_session *session, const hl_request *request, hl_grant *grant,
                        hl_error *error) {
  hl__pg_part parts[4] = {
      {.number = -1, .sql = "BEGIN"}, {0}, {0}, {.number = -1, .sql = "COMMIT"}};
  char sql[SHAPE_ROWS_MAX * ROW_BYTES + 1024], keys[SHAPE_ROWS_MAX][24];
  record made;
  uint64_t token = 0;
  if (request->n > SHAPE_ROWS_MAX) return HL__IN_STEPS;
  int status = record_fill(&made, session, request, 0, false, error);
  if (status) return status;
  shape_fill(&parts[1], session, request, sql, sizeof sql, keys);
  parts[2] = made.part;
  grant->sent_ms = hl__boot_ms();
  status = hl__pg_pipeline_run(session, parts, 4, hl__pg_answer_by(session), error);
  record_dispose(&made);
  if (status == HL_ECONNECTION) return status; /* the record may exist */
  if (status) {
    grant->sent_ms = 0;
    if (hl__pg_rollback_send(session, NULL) != HL_OK)
      return hl__error(error, HL_ECONNECTION, "the connection has ended");
    return status;
  }
  status = hl__pg_grant_read(session, true, &token, error);
  if (status == HL_TIMEOUT) status = HL__UNFREE;
  if (status == HL_OK && PQntuples(session->second) == 0) status = HL__IN_STEPS;
  if (status == HL_OK) status = record_read(session, session->second, &token, error);
  grant->token = token << 8;
  /* Nothing was written, unless a stranger has answered. */
  if (hl__is_step(status)) grant->sent_ms = 0;
  return status;
}

/* -------------------------------------------------- where rows are held */

/* Writes the record for rows that the session holds. token: the session's; 0: make a new one. After
   a failure other than HL_ECONNECTION the rows are still held. */
static int write_held(hl__pg_session *session, const hl_request *request, uint64_t token,
                      hl_grant *grant, hl_error *error) {
  char patience[64];
  hl__pg_part parts[5] = {{.number = -1, .sql = "SAVEPOINT hierlock_record"},
                          {.number = -1, .sql = "SET LOCAL statement_timeout=5000"},
                          {.number = -1, .sql = patience},
                          {0},
                          {.number = -1, .sql = "COMMIT"}};
  record made;
  (void)snprintf(patience, sizeof patience, "SET LOCAL lock_timeout=%d", HL__PG_TABLE_MS);
  uint64_t number = 0;
  int status = record_fill(&made, session, request, (int64_t)token, true, error);
  if (status) return status;
  parts[3] = made.part;
  grant->sent_ms = hl__boot_ms();
  status = hl__pg_pipeline_run(session, parts, 5, hl__pg_answer_by(session), error);
  record_dispose(&made);
  if (status == HL_ECONNECTION) return status; /* the record may exist */
  if (status == HL_OK) {
    status = record_read(session, session->kept, &number, error);
    if (status) return HL_ECONNECTION;
    session->holds = session->savepoint = false;
    grant->token = number << 8;
    return HL_OK;
  }
  hl_error reason;
  int64_t sent;
  grant->sent_ms = 0;
  if (hl__pg_command(session, session->tag,
                     "ROLLBACK TO SAVEPOINT hierlock_record;"
                     "RELEASE SAVEPOINT hierlock_record",
                     &sent, &reason) == HL_OK)
    return status;
  if (error) *error = reason;
  return HL_ECONNECTION;
}

int hl__pg_lease_take(hl__pg_session *session, const hl_request *request, hl_grant *grant,
                      hl_error *error) {
  hl_grant held = {0};
  int status = hl__pg_tables(session, true, error);
  if (status) return status;
  status = take_at_once(session, request, grant, error);
  if (status == HL__UNFREE && request->try_once)
    return hl__error(error, HL_TIMEOUT, "the lock is not free");
  if (!hl__is_step(status)) return status;
  status = hl__pg_lock_rows(session, request, &held, error);
  if (status) return status;
  status = write_held(session, request, 0, grant, error);
  if (status && status != HL_ECONNECTION && hl__pg_rollback_send(session, NULL) != HL_OK)
    return hl__error(error, HL_ECONNECTION, "the connection has ended");
  return status;
}

int hl__pg_to_lease(hl_session *base, const hl_request *request, hl_grant *grant, hl_error *error) {
  hl__pg_session *session = (hl__pg_session *)(void *)base;
  uint64_t token = grant->token;
  session->limit = request->deadline;
  int status = hl__pg_settle(session, hl__pg_answer_by(session), false, error);
  if (status == HL_TIMEOUT) status = hl__error(error, HL_ECONNECTION, "the server does not answer");
  if (status == HL_OK) status = hl__pg_tables(session, true, error);
  /* An error at the server has ended the transaction. */
  if (status && PQtransactionStatus(session->connection) != PQTRANS_INTRANS)
    return hl__error_as(error, HL_ECONNECTION);
  if (status == HL_OK) status = write_held(session, request, token >> 8, grant, error);
  if (status == HL_OK) grant->token = token;
  return status;
}

/* ----------------------------------------------------- rows in another mode */

/* $1: id; $2: holder; $3: keys; $4: to exclusive; $5: the new token, or of a downgrade the token
   that the lease must still have. */
#define CONVERT(bell)                                                                              \
  "WITH held AS (UPDATE public.hier_lock_leases l SET shared=NOT $4::bool,"                        \
  "token=$5::int8 WHERE id=$1::uuid AND holder=$2::uuid AND revoked IS NULL "                      \
  "AND ($4::bool OR token=$5::int8) RETURNING id" bell ") "                                        \
  "UPDATE public.hier_lock_lease_rows r SET "                                                      \
  "exclusive=$4::bool FROM held WHERE r.id=held.id AND "                                           \
  "r.key=ANY($3::int8[]) RETURNING r.key"

/* Changes the record: in a transaction of its own, or, in an upgrade, at the end of the transaction
   that holds the rows. */
static int record_convert(hl__pg_session *session, const hl_request *request, uint64_t token,
                          hl_error *error) {
  bool rings = session->rings && !request->upgrade;
  hl__pg_part parts[3] = {
      {.number = -1, .sql = rings ? CONVERT(HL__PG_BELL("reason")) : CONVERT("")}};
  size_t n = 1;
  char number[24], *keys = hl__pg_keys(request->rows, request->n, false);
  if (!keys) return hl__error_memory(error);
  hl__pg_bytes(&parts[0], request->lease->id, 16);
  hl__pg_bytes(&parts[0], request->lease->holder, 16);
  hl__pg_value(&parts[0], keys);
  hl__pg_value(&parts[0], request->upgrade ? "t" : "f");
  hl__pg_number(&parts[0], number, (int64_t)(token >> 8));
  if (request->upgrade) {
    parts[n++] = parts[0];
    parts[n++] = (hl__pg_part){.number = -1, .sql = "COMMIT"};
    parts[0] = (hl__pg_part){.number = -1, .sql = "SET LOCAL statement_timeout=5000"};
  }
  int status = hl__pg_pipeline_run(session, parts, n, hl__pg_answer_by(session), error);
  free(keys);
  return status;
}

int hl__pg_lease_convert(hl__pg_session *session, const hl_request *request, hl_grant *grant,
                         hl_error *error) {
  hl_grant held = {.token = grant->token};
  int status = HL_OK;
  if (request->upgrade) {
    const hl_request own = hl__upgrade_request(request);
    status = hl__pg_lock_rows(session, &own, &held, error);
    if (status) return status;
  }
  status = record_convert(session, request, held.token, error);
  if (status == HL_ECONNECTION) return status;
  if (request->upgrade && status && hl__pg_rollback_send(session, NULL) != HL_OK)
    return hl__error(error, HL_ECONNECTION, "the connection has ended");
  if (status) return status;
  session->holds = session->savepoint = false;
  if (PQntuples(session->kept) == 0)
    return hl__error(error, HL_ELOST, "there is no such lease any more");
  grant->token = held.token;
  return HL_OK;
}
