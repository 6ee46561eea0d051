/*
 * pipeline.c - several statements in one round trip; the longer ones are prepared once per session.
 * The server skips the statements after a failed one.
 *
 * After a failure it is not known which statements are prepared: the session then uses other names.
 */
#include "postgresql_store.h"

#include "../judge/judge.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* The most generations of statements that a session may leave behind. */
#define GENERATIONS_MAX 50u

void hl__pg_value(hl__pg_part *part, const char *text) { part->values[part->n++] = text; }

void hl__pg_bytes(hl__pg_part *part, const void *data, size_t size) {
  part->formats[part->n] = 1;
  part->lengths[part->n] = (int)size;
  part->values[part->n++] = size ? data : "";
}

void hl__pg_number(hl__pg_part *part, char room[24], int64_t number) {
  (void)snprintf(room, 24, "%" PRId64, number);
  hl__pg_value(part, room);
}

#ifdef LIBPQ_HAS_PIPELINING

bool hl__pg_part_queue(hl__pg_session *session, const hl__pg_part *part) {
  PGconn *connection = session->connection;
  char name[48];
  if (part->number < 0)
    return PQsendQueryParams(connection, part->sql, part->n, NULL, part->values, part->lengths,
                             part->formats, 0);
  (void)snprintf(name, sizeof name, "hierlock_%u_%d", session->generation, part->number);
  if (!(session->prepared >> part->number & 1u)) {
    if (!PQsendPrepare(connection, name, part->sql, 0, NULL)) return false;
    session->prepared |= 1u << part->number;
  }
  return PQsendQueryPrepared(connection, name, part->n, part->values, part->lengths, part->formats,
                             0);
}

void hl__pg_unprepare(hl__pg_session *session) {
  session->prepared = 0;
  session->generation++;
}

static int send_error(hl__pg_session *session, hl_error *error) {
  if (session->ended)
    (void)hl__pg_gone(session, error);
  else
    (void)hl__pg_error(session, NULL, "send to the server", error);
  return hl__error_as(error, HL_ECONNECTION);
}

int hl__pg_pipeline(hl__pg_session *session, const hl__pg_part *parts, size_t n, hl_error *error) {
  PGconn *connection = session->connection;
  hl__pg_results_clear(session);
  session->releases = false;
  if (session->generation > GENERATIONS_MAX)
    return hl__error(error, HL_ECONNECTION, "too many statements have failed");
  if (!PQenterPipelineMode(connection)) return send_error(session, error);
  for (size_t i = 0; i < n; i++)
    if (!hl__pg_part_queue(session, &parts[i])) return send_error(session, error);
  if (!PQpipelineSync(connection) || PQflush(connection) < 0) return send_error(session, error);
  session->outstanding = session->pipelined = true;
  session->tells_transaction = false;
  return HL_OK;
}

#else

bool hl__pg_part_queue(hl__pg_session *session, const hl__pg_part *part) {
  (void)session, (void)part;
  return false;
}

void hl__pg_unprepare(hl__pg_session *session) { (void)session; }

int hl__pg_pipeline(hl__pg_session *session, const hl__pg_part *parts, size_t n, hl_error *error) {
  (void)session, (void)parts, (void)n;
  return hl__error(error, HL_EUNSUPPORTED, "leases need libpq 14 or later");
}

#endif

/* The tables were dropped or altered, or this role may not use them: the next call checks that. */
static int tables_error(hl__pg_session *session, const char *state, hl_error *error) {
  const char *said = PQresultErrorField(session->kept, PG_DIAG_MESSAGE_PRIMARY);
  int status = HL_ENOT_PROVISIONED;
  session->ready = false;
  session->rings = false; /* its function may be what is closed to this role */
  if (hl__pg_state_is(state, HL__PG_DENIES))
    status =
        hl__pg_denied(hl__error(error, status, "this role may not use the tables of leases: %.200s",
                                said ? said : ""),
                      error);
  else
    status = hl__error(error, status,
                       "the tables of leases are not what they should be (%.5s): "
                       "hierlock provision --leases mends them",
                       state);
  if (error) (void)snprintf(error->sqlstate, sizeof error->sqlstate, "%.5s", state);
  return status;
}

int hl__pg_pipeline_run(hl__pg_session *session, const hl__pg_part *parts, size_t n,
                        int64_t deadline, hl_error *error) {
  int status = hl__pg_pipeline(session, parts, n, error);
  if (status) return status;
  status = hl__pg_await(session, deadline, true, error);
  if (status == HL_TIMEOUT || status == HL_CANCELLED)
    return hl__error(error, HL_ECONNECTION, "the server did not answer in time");
  if (status) return status;
  if (!session->kept || PQresultStatus(session->kept) != PGRES_FATAL_ERROR) return HL_OK;
  hl__pg_unprepare(session);
  status = hl__pg_error(session, session->kept, "write leases", error);
  const char *state = PQresultErrorField(session->kept, PG_DIAG_SQLSTATE);
  if (state && status == HL_ESTORE && hl__pg_state_is(state, HL__PG_OBJECT | HL__PG_PLAN))
    return tables_error(session, state, error);
  if (status == HL_CANCELLED)
    status =
        hl__error(error, HL_TIMEOUT, "another session keeps a record or a table of leases locked");
  return status;
}
