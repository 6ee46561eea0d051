/*
 * trip.c - one round trip to the server: the rows that it locks, and the meaning of its answer.
 */
#include "postgresql_store.h"

#include "../judge/judge.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* After an interruption: the time for the cancel request, and for the answer. */
#define CANCEL_MS 1000

/* CRC-32 of IEEE 802.3, bit by bit, as names are short. */
uint64_t hl__pg_name_key(const char *name, size_t size) {
  uint32_t crc = UINT32_MAX;
  for (size_t i = 0; i < size; i++) {
    crc ^= (unsigned char)name[i];
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1u ? UINT32_C(0xEDB88320) : 0);
  }
  return (uint32_t)~crc;
}

/* A token of the clock is microseconds of Unix time. A token of the sequence has the second of the
   server's start above its 24 bits, and is greater: a sequence repeats numbers if the server
   crashed before they were on disk. */
int hl__pg_token(const hl__pg_session *session, char *out, size_t size) {
  if (session->sequence)
    return snprintf(out, size,
                    "(date_part('epoch',pg_postmaster_start_time())::int8<<24)+nextval('%u')",
                    session->sequence);
  /* 51 bits: exact */
  return snprintf(out, size, "(date_part('epoch',clock_timestamp())*1000000)::int8");
}

int hl__pg_columns(const hl__pg_session *session, char *out, size_t size) {
  char token[128];
  (void)hl__pg_token(session, token, sizeof token);
  return snprintf(out, size, "%s,CASE WHEN pg_is_in_recovery() THEN 0 ELSE pg_backend_pid() END,%s",
                  token, hl__pg_gate_column(session));
}

int hl__pg_answer_await(hl__pg_session *session, const hl_request *request, hl_error *error) {
  int status = hl__pg_await(session, HL_FOREVER, true, error);
  if (status != HL_CANCELLED) return status;
  /* A try has no wait to end. After the deadline the server has ended the wait itself, or hangs. */
  if (request->try_once || hl__left_ms(request->deadline) == 0)
    return hl__error(error, HL_ECONNECTION, "the server did not answer in time");
  int64_t patience = hl__now_ms() + CANCEL_MS;
  status = hl__pg_cancel(session, patience, error);
  if (status == HL_OK) status = hl__pg_await(session, patience + CANCEL_MS, false, error);
  if (status == HL_TIMEOUT)
    status = hl__error(error, HL_ECONNECTION, "the server did not end the wait in time");
  return status;
}

int hl__pg_failure(hl__pg_session *session, int64_t end, hl_error *error) {
  int status = hl__pg_error(session, session->kept, "lock rows", error);
  const char *state = PQresultErrorField(session->kept, PG_DIAG_SQLSTATE);
  const char *said = PQresultErrorMessage(session->kept);
  const char *first = PQresultErrorField(session->kept, PG_DIAG_MESSAGE_PRIMARY);
  /* The tables of leases were dropped, or this role may not use them or their schema: a new session
     finds out which. Servers translate everything except names. */
  bool named = strstr(said, "hier_lock_") || (first && strstr(first, "public"));
  if (state &&
      (hl__pg_state_is(state, HL__PG_PLAN) || (hl__pg_state_is(state, HL__PG_OBJECT) && named)))
    return hl__error_as(error, HL_ECONNECTION);
  /* The server has ended the wait because its time was up, whether or not an interruption came. */
  if (status != HL_CANCELLED || hl__now_ms() < end) return status;
  return hl__error_as(error, HL_TIMEOUT);
}

/* Reads the row that a lock statement has returned. */
int hl__pg_grant_read(hl__pg_session *session, bool try_once, uint64_t *token, hl_error *error) {
  const PGresult *result = session->kept;
  int last = (result ? PQnfields(result) : 0) - HL__PG_COLUMNS;
  const char *refused = hl__pg_field(result, 0, last + HL__PG_REFUSED);
  const char *number = hl__pg_field(result, 0, last + HL__PG_TOKEN);
  const char *server = hl__pg_field(result, 0, last + HL__PG_SERVER);
  const char *gate = hl__pg_field(result, 0, last + HL__PG_GATE);
  if (!refused || !number || !server || !gate)
    return hl__error(error, HL_ECONNECTION, "the server answers what was not asked");
  if (try_once && *refused != '0') return hl__error(error, HL_TIMEOUT, "the lock is not free");
  if (atoi(server) != session->backend)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "a proxy has led the request to another server than that "
                     "to which it has connected: connect to the server itself");
  session->gate = atoi(gate);
  if (session->gate > HL__PG_GATE_OPEN)
    return hl__error(error, HL_ECONNECTION, "the server answers what was not asked");
  if (session->gate == HL__PG_GATE_UNKNOWN)
    return hl__error(error, HL_ECONNECTION,
                     "the tables of leases were replaced, or closed to this role");
  *token = strtoull(number, NULL, 10);
  return HL_OK;
}

int hl__pg_wait_run(hl__pg_session *session, const hl_request *request, const char *sql,
                    hl_error *error) {
  int64_t end = request->deadline;
  int status = hl__pg_send(session, sql, error);
  if (status == HL_OK) status = hl__pg_answer_await(session, request, error);
  if (status == HL_OK && session->kept && PQresultStatus(session->kept) == PGRES_FATAL_ERROR)
    status = hl__pg_failure(session, end, error);
  return status;
}

int hl__pg_command(hl__pg_session *session, const char *tag, const char *sql, int64_t *sent,
                   hl_error *error) {
  char both[HL__PG_TAG_MAX + 128];
  *sent = hl__boot_ms();
  (void)snprintf(both, sizeof both, "%s%s", tag, sql);
  session->holds = true;
  int status = hl__pg_send(session, both, error);
  if (status == HL_OK) status = hl__pg_settle(session, hl__pg_answer_by(session), true, error);
  if (status == HL_TIMEOUT || status == HL_CANCELLED)
    status = hl__error(error, HL_ECONNECTION, "the server did not answer in time");
  return status;
}

const char *hl__pg_gate_column(const hl__pg_session *session) {
  if (session->blind) return "0";
  /* A sequence that was restarted, or restored without data, has no value. */
  if (session->gated)
    return "coalesce(pg_sequence_last_value(" HL__PG_GATE_NAME "),"
           "CASE WHEN " HL__PG_GATE_NAME " IS NULL THEN -1 ELSE 2 END)";
  return HL__PG_GATE_VALUE("-1");
}

char *hl__pg_keys(const hl_row *rows, size_t n, bool exclusive) {
  char *text = malloc(n * 21 + 3), *at = text;
  if (!text) return NULL;
  *at++ = '{';
  for (size_t i = 0; i < n; i++) {
    if (exclusive && rows[i].mode == HL_SHARED) continue;
    if (at[-1] != '{') *at++ = ',';
    at += snprintf(at, 21, "%" PRId64, hl__pg_key(rows[i].level, rows[i].bucket));
  }
  *at++ = '}';
  *at = '\0';
  return text;
}
