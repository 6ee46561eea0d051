/*
 * prepared.c - takes free rows by a statement that is prepared once for each session and sequence
 * of modes, as a server spends its time on parsing and planning:
 *
 *     BEGIN
 *     SELECT set_config('lock_timeout',...),
 *            CASE WHEN NOT pg_try_advisory_xact_lock_shared($1) THEN 1 ... ELSE 0 END,
 *            token, server, gate
 *
 * - A CASE goes from left to right, and stops at the first row that is not free. The server
 *   also refuses a try while another session waits for the key, so a try overtakes no waiter.
 * - A refused try has taken its first rows in the order of the plan. A request that then waits
 *   requests the same rows, in the same order, in the same transaction. Taking a row again
 *   costs nothing and adds no circle of waiters.
 * - A prepared statement cannot contain the comment for observers. So an empty statement,
 *   which is only parsed, brings it after the locks: the server shows it from then on, while
 *   the session is idle.
 * - Everything goes in a pipeline: one round trip. This needs libpq 14.
 */
#include "postgresql_store.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef LIBPQ_HAS_PIPELINING

#define BEFORE "SELECT " HL__PG_TRY ",CASE"
#define EACH " WHEN NOT pg_try_advisory_xact_lock_shared($16::int8) THEN 1"

/* The name of the statement, like "hierlock_ssx". */
static void shape_name(const hl_request *request, char modes[], char name[32]) {
  for (size_t i = 0; i < request->n; i++) modes[i] = request->rows[i].mode == HL_SHARED ? 's' : 'x';
  modes[request->n] = '\0';
  (void)snprintf(name, 32, "hierlock_%s", modes);
}

static bool shape_is_prepared(const hl__pg_session *session, const char *modes) {
  for (unsigned i = 0; i < session->shape_count; i++)
    if (strcmp(session->shapes[i], modes) == 0) return true;
  return false;
}

static void shape_sql(const hl__pg_session *session, const char *modes, char *out, size_t size) {
  size_t used = (size_t)snprintf(out, size, BEFORE);
  for (size_t i = 0; modes[i]; i++)
    used += (size_t)snprintf(out + used, size - used,
                             " WHEN NOT pg_try_advisory_xact_lock%s($%zu::int8) THEN 1",
                             modes[i] == 's' ? "_shared" : "", i + 1);
  used += (size_t)snprintf(out + used, size - used, " ELSE 0 END,");
  (void)hl__pg_columns(session, out + used, size - used);
}

static bool conflicts_queue(hl__pg_session *session, const hl_request *request) {
  char *keys = hl__pg_keys(request->rows, request->n, false);
  char *exclusive = hl__pg_keys(request->rows, request->n, true);
  bool done = keys && exclusive && hl__pg_conflicts_queue(session, keys, exclusive);
  free(keys);
  free(exclusive);
  return done;
}

/* Queues everything. False: libpq has refused a part. */
static bool queue(hl__pg_session *session, const hl_request *request, const char *tag) {
  PGconn *connection = session->connection;
  char modes[HL__PG_SHAPE_ROWS_MAX + 1], name[32];
  char sql[HL__PG_SHAPE_ROWS_MAX * sizeof EACH + 1024];
  char keys[HL__PG_SHAPE_ROWS_MAX][24];
  const char *values[HL__PG_SHAPE_ROWS_MAX];
  shape_name(request, modes, name);
  for (size_t i = 0; i < request->n; i++) {
    const hl_row *row = &request->rows[i];
    (void)snprintf(keys[i], sizeof keys[i], "%" PRId64, hl__pg_key(row->level, row->bucket));
    values[i] = keys[i];
  }
  if (!PQsendQueryParams(connection, "BEGIN", 0, NULL, NULL, NULL, NULL, 0)) return false;
  if (!shape_is_prepared(session, modes)) {
    shape_sql(session, modes, sql, sizeof sql);
    if (!PQsendPrepare(connection, name, sql, 0, NULL)) return false;
  }
  if (!PQsendQueryPrepared(connection, name, (int)request->n, values, NULL, NULL, 0) ||
      !PQsendPrepare(connection, "", tag, 0, NULL))
    return false;
  /* If there are leases, their query is probably needed: send it in the same trip. */
  if (session->gate == HL__PG_GATE_OPEN && !conflicts_queue(session, request)) return false;
  return PQpipelineSync(connection);
}

bool hl__pg_send_try(hl__pg_session *session, const hl_request *request, const char *tag,
                     int *status, hl_error *error) {
  char modes[HL__PG_SHAPE_ROWS_MAX + 1], name[32];
  if (request->extend || request->n > HL__PG_SHAPE_ROWS_MAX) return false;
  shape_name(request, modes, name);
  if (!shape_is_prepared(session, modes) && session->shape_count >= HL__PG_SHAPES_MAX) return false;
  if (!PQenterPipelineMode(session->connection)) return false;
  hl__pg_results_clear(session);
  session->releases = false;
  *status = HL_OK;
  hl__pg_sending();
  if (!queue(session, request, tag) || !hl__pg_sent(session)) {
    *status = hl__pg_send_error(session, error);
    return true;
  }
  session->outstanding = session->pipelined = true;
  session->tells_transaction = false;
  return true;
}

/* After a failure the session may lack a statement, so it prepares no more shapes. */
void hl__pg_try_done(hl__pg_session *session, const hl_request *request, bool fine) {
  char modes[HL__PG_SHAPE_ROWS_MAX + 1], name[32];
  shape_name(request, modes, name);
  if (!fine) hl__pg_unprepare(session);
  if (shape_is_prepared(session, modes)) return;
  if (fine)
    memcpy(session->shapes[session->shape_count++], modes, request->n + 1);
  else
    session->shape_count = HL__PG_SHAPES_MAX;
}

#else

bool hl__pg_send_try(hl__pg_session *session, const hl_request *request, const char *tag,
                     int *status, hl_error *error) {
  (void)session, (void)request, (void)tag, (void)status, (void)error;
  return false;
}

void hl__pg_try_done(hl__pg_session *session, const hl_request *request, bool fine) {
  (void)session, (void)request, (void)fine;
}

#endif

bool hl__pg_conflicts_queue(hl__pg_session *session, const char *keys, const char *exclusive) {
  hl__pg_part part = {.number = HL__PG_CONFLICTS,
                      .sql = "SELECT id FROM public.hier_lock_lease_rows WHERE exclusive AND "
                             "key=ANY($1::int8[]) UNION ALL SELECT id FROM "
                             "public.hier_lock_lease_rows WHERE key=ANY($2::int8[]) LIMIT 1"};
  hl__pg_value(&part, keys);
  hl__pg_value(&part, exclusive);
  return hl__pg_part_queue(session, &part);
}
