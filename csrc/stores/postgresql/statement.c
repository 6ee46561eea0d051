/*
 * statement.c - locks the rows of a request. First a prepared statement tries all rows at once
 * (prepared.c): most are free. If one is not, a message waits for them:
 *
 *     BEGIN; SET LOCAL lock_timeout=0; SET LOCAL statement_timeout=...;
 *     SELECT pg_advisory_xact_lock_shared(...), ..., pg_advisory_xact_lock(...),
 *            set_config('lock_timeout',...), set_config('statement_timeout','0',true);
 *     SELECT token, server, gate
 *
 * - The server evaluates a select list from left to right, so it takes the rows in order.
 * - Each statement of a message has statement_timeout for itself (since PostgreSQL 13), with
 *   the value at its beginning: so this ends just the wait. A reset after the last row keeps
 *   the rest of a short wait from ending a later statement.
 * - The time may run out just after the last row was locked. Then the server ends the transaction
 *   where it next looks for interrupts: at the latest before the second SELECT. Without that
 *   SELECT it would do so after it had reported the grant.
 * - A request that tries once takes one row after the other by CASE, which stops at the first
 *   row that is not free. The server's log has no error then.
 * - An error ends the transaction: when the server reports it, it has given everything back.
 *   So an extend locks its rows after a savepoint. Rolling back to the savepoint gives back
 *   the rows taken since, and lifts the error. After success the savepoint stays until the
 *   next extend, which costs no trip. So rolling back to it also undoes an upgrade, if that
 *   was the last extend: the shared lock is older, and stays.
 * - A request that waits for a lease keeps its rows, and a lease for update may want one of
 *   them. So a request with update rows that finds a lease in its way gives everything back and
 *   begins again: it takes its update rows, waits until no lease is in their way, and then
 *   takes the others.
 * - A comment in front tells observers who waits or holds: see tag.c.
 * - The server says in the same trip that it is the one to which we have connected, and no
 *   standby: a proxy may lead a SELECT elsewhere.
 */
#include "postgresql_store.h"

#include "mode.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The most rows in one statement; a larger request takes several, in order. A select list has at
   most 1,664 columns. */
#define STATEMENT_ROWS_MAX 500
/* The most bytes that a row needs in a statement. */
#define ROW_BYTES 96

/* --------------------------------------------------------------- text */

typedef struct text {
  char *data;
  size_t used, capacity;
} text;

/* The buffer is large enough: see text_new. */
static void put(text *t, const char *format, ...) HL__PRINTF(2, 3);
static void put(text *t, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int n = vsnprintf(t->data + t->used, t->capacity - t->used, format, arguments);
  va_end(arguments);
  if (n > 0) t->used += (size_t)n;
}

static bool text_new(text *t, size_t rows) {
  t->used = 0;
  t->capacity = 2048 + HL__PG_TAG_MAX + rows * ROW_BYTES;
  t->data = malloc(t->capacity);
  return t->data != NULL;
}

/* Writes the functions or, for a try, the CASE that lock the rows. */
static void put_locks(text *t, const hl_row *rows, size_t n, bool try_once) {
  if (try_once) put(t, "CASE");
  for (size_t i = 0; i < n; i++) {
    const char *mode = rows[i].mode == HL_SHARED ? "_shared" : "";
    int64_t key = hl__pg_key(rows[i].level, rows[i].bucket);
    if (try_once)
      put(t, " WHEN NOT pg_try_advisory_xact_lock%s('%" PRId64 "') THEN 1", mode, key);
    else
      put(t, "pg_advisory_xact_lock%s('%" PRId64 "'),", mode, key);
  }
  if (try_once) put(t, " ELSE 0 END,");
}

/* Writes a statement. wait: ms, unless the request tries once. */
static void put_statement(text *t, const hl__pg_taking *self, const hl_request *request,
                          int64_t wait) {
  const hl__pg_session *session = self->session;
  put(t, "%s", self->tag);
  if (!self->begun && request->extend && session->savepoint) put(t, "RELEASE SAVEPOINT hierlock;");
  if (!self->begun) put(t, "%s;", request->extend ? "SAVEPOINT hierlock" : "BEGIN");
  if (!request->try_once)
    put(t, "SET LOCAL lock_timeout=0;SET LOCAL statement_timeout=%" PRId64 ";", wait);
  put(t, "SELECT %s", request->try_once ? HL__PG_TRY "," : "");
  put_locks(t, request->rows, request->n, request->try_once);
  if (!request->try_once)
    put(t,
        "set_config('lock_timeout','%d',true),"
        "set_config('statement_timeout','0',true);SELECT 0,",
        HL__PG_TABLE_MS);
  char columns[768];
  (void)hl__pg_columns(session, columns, sizeof columns);
  put(t, "%s", columns);
}

/* Awaits the answer, and checks that the rows were granted and the transaction is open. */
static int answer_judge(hl__pg_taking *self, const hl_request *request, int64_t end, bool tried,
                        hl_error *error) {
  hl__pg_session *session = self->session;
  int status = hl__pg_answer_await(session, request, error);
  if (status) return status;
  if (session->kept && PQresultStatus(session->kept) == PGRES_FATAL_ERROR)
    return hl__pg_failure(session, end, error);
  if (PQtransactionStatus(session->connection) != PQTRANS_INTRANS)
    return hl__error(error, HL_ECONNECTION, "the server has rolled the transaction back");
  return hl__pg_grant_read(session, tried, &self->token, error);
}

/* Locks at most STATEMENT_ROWS_MAX rows by one message. `begun` is true afterwards, unless nothing
   was sent. */
static int execute(hl__pg_taking *self, const hl_request *request, hl_error *error) {
  text t;
  /* Add one, as milliseconds are rounded down: no timeout is early. */
  int64_t wait = request->try_once ? 0 : hl__left_ms(request->deadline) + 1;
  if (!text_new(&t, request->n)) return hl__error_memory(error);
  put_statement(&t, self, request, wait);
  self->begun = true;
  int64_t end = hl__now_ms() + wait;
  int status = hl__pg_send(self->session, t.data, error);
  free(t.data);
  return status ? status : answer_judge(self, request, end, request->try_once, error);
}

/* Takes all rows in one trip, if they are free. HL_TIMEOUT: they are not free, or the request does
   not fit. HL__TABLES_LOCKED: they are free, but another session has locked the tables of leases;
   the transaction has failed. */
static int execute_try(hl__pg_taking *self, const hl_request *request, hl_error *error) {
  hl__pg_session *session = self->session;
  int status;
  if (!hl__pg_send_try(session, request, self->tag, &status, error)) return HL_TIMEOUT;
  if (status == HL_OK) status = answer_judge(self, request, HL_FOREVER, true, error);
  self->begun = status == HL_OK || status == HL_TIMEOUT;
  if (status == HL_TIMEOUT && PQtransactionStatus(session->connection) != PQTRANS_INTRANS)
    status = HL__TABLES_LOCKED;
  hl__pg_try_done(session, request, self->begun && status != HL__TABLES_LOCKED);
  return status;
}

/* Gives back what a failed extend took, and shows observers the held rows again. */
static int extend_undo(hl__pg_session *session, int64_t *sent, hl_error *error) {
  session->savepoint = false;
  return hl__pg_command(session, session->tag,
                        "ROLLBACK TO SAVEPOINT hierlock;RELEASE SAVEPOINT hierlock", sent, error);
}

/* Cleans up after a request that failed. After HL_DEADLOCK nothing may be held any more. */
static int undo(hl__pg_session *session, const hl_request *request, int status, hl_grant *grant,
                hl_error *error) {
  hl_error reason;
  if (status == HL_ECONNECTION) return status;
  if (request->extend && status != HL_DEADLOCK) {
    (void)hl__wakeup_interruption_take(&session->wakeup);
    if (extend_undo(session, &grant->sent_ms, &reason) == HL_OK) return status;
    grant->sent_ms = 0;
    if (error) *error = reason;
    return HL_ECONNECTION;
  }
  if (hl__pg_rollback_send(session, NULL) != HL_OK)
    return hl__error(error, HL_ECONNECTION, "the connection has ended");
  return status;
}

/* The server's timeout began when it answered, which we only know to be after the request was sent.
   After a long wait that time is too old to use; then a sign of life gives a later one. Model:
   lease.pml, BEGINNING. */
static int keep_alive_begin(hl__pg_session *session, int64_t *sent, hl_error *error) {
  int64_t hold_timeout = session->store->config->hold_timeout;
  if (hl__boot_ms() - *sent < hold_timeout / 4) return HL_OK;
  return hl__pg_command(session, session->tag, "", sent, error);
}

/* Takes all rows of the request, one statement after the other. */
static int rows_take(hl__pg_taking *self, const hl_request *request, hl_error *error) {
  hl_request part = *request;
  int status = HL_OK;
  for (size_t left = request->n; left > 0 && status == HL_OK; left -= part.n, part.rows += part.n) {
    part.n = left < STATEMENT_ROWS_MAX ? left : STATEMENT_ROWS_MAX;
    self->sent = hl__boot_ms();
    status = execute(self, &part, error);
  }
  return status;
}

/* Waits, with all rows held, until no lease is in the way. A request with update rows only checks
   that, and otherwise begins again, and waits with its update rows only. */
static int leases_await(hl__pg_taking *self, const hl_request *request, hl_error *error) {
  hl__pg_session *session = self->session;
  hl_request part = *request;
  size_t updates = request->extend ? 0 : hl__update_rows(request->rows, request->n);
  part.try_once = request->try_once || updates;
  int status = hl__pg_leases_await(self, &part, error);
  if (status != HL_TIMEOUT || updates == 0 || request->try_once) return status;
  status = hl__pg_rollback_send(session, error);
  if (status == HL_OK) status = hl__pg_settle(session, hl__pg_answer_by(session), false, error);
  if (status)
    return hl__error(error, HL_ECONNECTION, "the server did not give back in time what was locked");
  self->begun = false;
  part = *request;
  part.n = updates;
  for (int i = 0; i < 2 && status == HL_OK; i++) {
    status = rows_take(self, &part, error);
    if (status == HL_OK) status = hl__pg_leases_await(self, &part, error);
    part.rows += updates;
    part.n = request->n - updates;
  }
  return status;
}

int hl__pg_lock_rows(hl__pg_session *session, const hl_request *request, hl_grant *grant,
                     hl_error *error) {
  hl__pg_taking self = {.session = session, .sent = hl__boot_ms()};
  hl__pg_tag(session, request, self.tag);
  int status = execute_try(&self, request, error);
  bool refused = status == HL_TIMEOUT && !(self.begun && request->try_once);
  if (status == HL__TABLES_LOCKED) status = HL_TIMEOUT;
  if (refused) status = rows_take(&self, request, error);
  if (status != HL_DEADLOCK && status != HL_ECONNECTION)
    atomic_store(&session->in_hand, false);              /* the rows held before are still held */
  if (status == HL_ENOMEM && !self.begun) return status; /* nothing was sent */
  if (status == HL_OK) status = leases_await(&self, request, error);
  if (status) return undo(session, request, status, grant, error);
  session->holds = true;
  session->savepoint = request->extend; /* the next extend ends it */
  session->upgraded = request->upgrade;
  memcpy(session->tag, self.tag, sizeof self.tag);
  status = keep_alive_begin(session, &self.sent, error);
  if (status) return status;
  /* The lowest byte is for hand-overs inside a process. */
  grant->token = self.token << 8;
  grant->sent_ms = self.sent;
  return HL_OK;
}

int hl__pg_downgrade(hl_session *base, const hl_request *request, int64_t *sent_ms,
                     hl_error *error) {
  hl__pg_session *session = (hl__pg_session *)base;
  char tag[HL__PG_TAG_MAX];
  if (!session->savepoint || !session->upgraded)
    return hl__error(error, HL_EUNSUPPORTED,
                     "the lock was extended after it was upgraded, and PostgreSQL would give both "
                     "back: release it, or keep it exclusive");
  hl__pg_tag(session, request, tag);
  session->savepoint = false;
  session->limit = request->deadline;
  int status = hl__pg_command(
      session, tag, "ROLLBACK TO SAVEPOINT hierlock;RELEASE SAVEPOINT hierlock", sent_ms, error);
  if (status == HL_OK)
    memcpy(session->tag, tag, sizeof tag);
  else if (status != HL_ENOMEM)
    status = HL_ECONNECTION;
  return status;
}
