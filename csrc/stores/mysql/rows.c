/*
 * rows.c - locks all rows of a request, or none: sends the statements, judges their answers,
 * undoes a failed request, and waits behind leases.
 */
#include "statement.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Names the first missing row, if it can: the rows are no longer locked. */
static int missing(hl__mysql_session *session, const hl_row *rows, size_t n, hl_error *error) {
  const char *table = session->store->table;
  (void)hl__error(error, HL_ENOT_PROVISIONED,
                  "a bucket row is missing in table %s; run `hierlock provision`", table);
  if (!error || hl__mysql_settle(session, hl__now_ms() + 1000, NULL) != HL_OK)
    return HL_ENOT_PROVISIONED;
  session->patience = hl__now_ms() + 1000;
  bool there = true;
  for (size_t i = 0; there && i < n; i++) {
    char sql[256];
    MYSQL_RES *result = NULL;
    int size = snprintf(sql, sizeof sql, "SELECT 1 FROM %s WHERE level=%d AND bucket=%" PRIu64,
                        table, hl__sql_level(rows[i].level), rows[i].bucket);
    bool asked = !hl__mysql_query(session, sql, (size_t)size, &result, NULL) && result;
    there = asked && mysql_num_rows(result) > 0;
    mysql_free_result(result);
    if (there || !asked) continue;
    (void)hl__error(error, HL_ENOT_PROVISIONED,
                    "the row of level %d, bucket %" PRIu64
                    " is missing in table %s%s; run `hierlock provision%s`",
                    hl__sql_level(rows[i].level), rows[i].bucket, table,
                    hl__is_update_row(&rows[i]) ? ", which is for update locks" : "",
                    hl__is_update_row(&rows[i]) ? " --updates" : "");
    error->level = (int)(rows[i].level & (HL_LEVEL_UPDATE - 1));
    error->bucket = (uint32_t)rows[i].bucket;
  }
  if (there && session->store->leased)
    (void)hl__error(error, HL_ENOT_PROVISIONED,
                    "a row is missing in table %s; run `hierlock provision`", session->store->gate);
  (void)hl__mysql_rollback_send(session, NULL);
  return HL_ENOT_PROVISIONED;
}

/* The server granted, but says that no transaction is open: nothing is locked. Names the table's
   engine, where the server shows it. */
static int no_transaction(hl__mysql_session *session, hl_error *error) {
  int status = HL_OK;
  if (error && hl__mysql_settle(session, hl__now_ms() + 1000, NULL) == HL_OK) {
    session->patience = hl__now_ms() + 1000;
    status = hl__mysql_table_check(session, error);
    (void)hl__mysql_rollback_send(session, NULL);
  }
  if (status == HL_EUNSAFE_SERVER) return status;
  return hl__error(error, HL_EUNSAFE_SERVER,
                   "the table %s is of an engine that locks no rows; it must be InnoDB",
                   session->store->table);
}

/* The server counts its silence (wait_timeout) from its answer, of which we know only that it
   came after the request was sent. After a long wait that moment is too long ago to be of use;
   so a sign of life gives a later one. Model: lease.pml, BEGINNING. */
static int keep_alive_begin(hl__mysql_session *session, int64_t *sent, hl_error *error) {
  int64_t hold_timeout = session->store->config->hold_timeout;
  if (hl__boot_ms() - *sent < hold_timeout / 4) return HL_OK;
  *sent = hl__boot_ms();
  int status = hl__mysql_send(session, "DO 0", 4, error);
  if (status) return status;
  return hl__mysql_settle_late(session, hl__now_ms() + hold_timeout, HL__MYSQL_LATE, error);
}

/* The statement that shows observers again what is held, once an extend has failed; behind it
   stands the tag. */
typedef struct held {
  hl__text statement; /* empty: nothing is held */
  unsigned long tag_size;
} held;

static held held_before(const hl__mysql_session *session) {
  held self = {.tag_size = session->tag_size};
  hl__text_put(&self.statement, "SET @hierlock=");
  hl__text_hex(&self.statement, session->tag, self.tag_size);
  hl__text_add(&self.statement, session->tag, self.tag_size);
  self.statement.used -= self.tag_size;
  return self;
}

/* Undoes a failed extend: shows observers again what is held, and asks at once whether it still
   is. */
static int extend_undo(hl__mysql_session *session, const held *before, hl_grant *grant,
                       hl_error *error) {
  const hl__text *statement = &before->statement;
  memcpy(session->tag, statement->data + statement->used, before->tag_size);
  session->tag_size = before->tag_size;
  int64_t sent = hl__boot_ms();
  int status = hl__mysql_send(session, statement->data, statement->used, error);
  if (status == HL_OK)
    status = hl__mysql_settle_late(session, hl__now_ms() + session->store->config->hold_timeout,
                                   HL__MYSQL_LATE, error);
  if (status == HL_OK) grant->sent_ms = sent;
  return status;
}

/* MariaDB shows open transactions as they were up to 100 ms ago. So this takes the tag back with
   the rows; else observers would see this session as the holder of rows that it was not granted.
   We wait for the answer, as the next to look is most often the caller, on another connection. */
#define RETRACT_MS 100
static int rollback_retracting(hl__mysql_session *session) {
  static const char sql[] = "BEGIN NOT ATOMIC SET @hierlock=NULL; ROLLBACK; END";
  session->holds = false;
  int status = hl__mysql_send(session, sql, sizeof sql - 1, NULL);
  if (status == HL_OK) status = hl__mysql_settle(session, hl__now_ms() + RETRACT_MS, NULL);
  return status == HL_TIMEOUT ? HL_OK : status;
}

/* Undoes a failed request. Most errors leave the first rows locked. Model: acquire.pml, where
   the store said TIMEOUT. */
static int undo(hl__mysql_session *session, const hl_request *request, const held *before,
                int status, hl_grant *grant, hl_error *error) {
  if (status == HL_DEADLOCK) session->holds = false;
  if (status == HL_ECONNECTION || status == HL_DEADLOCK) return status;
  if (request->extend) {
    hl_error reason;
    if (extend_undo(session, before, grant, &reason) != HL_ECONNECTION) return status;
    if (error) *error = reason;
    return HL_ECONNECTION;
  }
  int undone = session->dialect == HL_MARIADB ? rollback_retracting(session)
                                              : hl__mysql_rollback_send(session, NULL);
  if (undone != HL_OK) return hl__error(error, HL_ECONNECTION, "the connection has ended");
  return status;
}

/* The server's answers to the statements of a request. */
typedef struct answer {
  int64_t sent;      /* when the last statement was sent; hl__boot_ms */
  bool untransacted; /* no transaction is open: nothing is locked */
  hl__part missed;   /* not all of these rows are there; n is 0: none */
} answer;

/* Locks all rows of a request, in as many statements as they need. */
static int rows_lock(hl__mysql_session *session, const hl_request *request, hl__tail *tail,
                     answer *said, hl_error *error) {
  int64_t gate = hl__mysql_gate(session, request);
  int status = HL_OK;
  said->missed.n = 0;
  said->untransacted = false;
  for (size_t done = 0; done < request->n && status == HL_OK;) {
    hl__part p = {.rows = request->rows + done, .n = request->n - done, .tail = tail};
    size_t count = 0;
    if (p.n > HL__STATEMENT_ROWS_MAX) p.n = HL__STATEMENT_ROWS_MAX;
    done += p.n;
    /* The gate comes last of all: a gate that is read sooner may be older than a lease. */
    p.gated = gate >= 0 && done == request->n;
    if (p.gated) p.gate = (uint32_t)gate;
    said->sent = hl__boot_ms();
    status = hl__mysql_execute(session, request, &p, &count, error);
    if (status == HL_OK && !session->in_transaction) {
      said->untransacted = !request->extend;
      status = said->untransacted
                   ? HL_EUNSAFE_SERVER
                   : hl__error(error, HL_ECONNECTION, "the server has rolled the transaction back");
    }
    if (status != HL_DEADLOCK && status != HL_ECONNECTION)
      atomic_store(&session->in_hand, false); /* the session still holds what it held before */
    if (status == HL_OK && count != p.n) {
      status = HL_ENOT_PROVISIONED;
      said->missed = p;
    }
    if (status == HL_OK && session->read_only)
      status = hl__error(error, HL_EUNSAFE_SERVER,
                         "the server has become read-only: locks there "
                         "protect nothing; connect to the primary");
  }
  if (gate < 0) session->gate = true; /* no statement has read it */
  return status;
}

/* Finds out, after the undo, why nothing was locked. */
static int reason_find(hl__mysql_session *session, const hl_request *request, const answer *said,
                       int status, hl_error *error) {
  const hl__part *missed = &said->missed;
  if (status == HL_EUNSAFE_SERVER && said->untransacted) return no_transaction(session, error);
  if (status != HL_ENOT_PROVISIONED || missed->n == 0) return status;
  if (!request->extend) return missing(session, missed->rows, missed->n, error);
  bool updates = hl__update_rows(missed->rows, missed->n) > 0;
  return hl__error(error, HL_ENOT_PROVISIONED,
                   "a bucket row is missing in table %s; run `hierlock provision%s`",
                   session->store->table, updates ? " --updates" : "");
}

/* ------------------------------------------------- behind a lease */

static int rolled_back(hl__mysql_session *session, hl_error *error) {
  int status = hl__mysql_rollback_send(session, error);
  if (status) return status;
  return hl__mysql_settle_late(session, hl__now_ms() + HL__TRY_MS, HL__MYSQL_LATE, error);
}

/* A waiter behind a lease keeps its rows, and the holder of an update lease may want one of
   them. So a request with update rows that finds a lease in its way begins anew: it waits with
   its update rows only, and then takes the others. */
static int rows_take_in_turn(hl__mysql_session *session, const hl_request *request, size_t updates,
                             answer *said, hl_error *error) {
  hl_request part = *request;
  int status = rolled_back(session, error);
  part.n = updates;
  for (int i = 0; i < 2 && status == HL_OK; i++) {
    status = rows_lock(session, &part, NULL, said, error);
    if (status == HL_OK) {
      session->holds = true;
      if (session->gate) status = hl__mysql_leases_await(session, &part, &said->sent, error);
    }
    part.rows += updates;
    part.n = request->n - updates;
  }
  return status;
}

/* HL_OK: the session holds the rows, and no lease is in the way. */
static int rows_take(hl__mysql_session *session, const hl_request *request, answer *said,
                     hl_error *error) {
  bool leaves = !request->extend && !request->try_once;
  size_t updates = leaves ? hl__update_rows(request->rows, request->n) : 0;
  hl_request looks = *request;
  if (updates > 0) looks.try_once = true;
  int status = rows_lock(session, request, NULL, said, error);
  if (status) return status;
  session->holds = true;
  if (!session->store->leased || !session->gate) return HL_OK;
  status = hl__mysql_leases_await(session, &looks, &said->sent, error);
  if (status == HL_TIMEOUT && updates > 0)
    return rows_take_in_turn(session, request, updates, said, error);
  return status;
}

int hl__mysql_lock_rows(hl__mysql_session *session, const hl_request *request, hl_grant *grant,
                        hl_error *error) {
  answer said = {.sent = 0};
  held before = {.tag_size = 0};
  if (request->extend) before = held_before(session);
  if (before.statement.failed ||
      !hl__mysql_tag_reserve(session, hl__mysql_tag_room(session, request))) {
    free(before.statement.data);
    return hl__error_memory(error);
  }
  hl__mysql_tag(session, request);
  int status = rows_take(session, request, &said, error);
  if (status == HL_OK) status = keep_alive_begin(session, &said.sent, error);
  if (status == HL_OK) {
    /* The top byte is the server's id. The lowest is left for hand-overs inside a process. */
    grant->token = (uint64_t)session->token << 8;
    grant->sent_ms = said.sent;
  } else {
    status = undo(session, request, &before, status, grant, error);
    status = reason_find(session, request, &said, status, error);
  }
  free(before.statement.data);
  return status;
}

bool hl__mysql_records_at_once(const hl__mysql_session *session, const hl_request *request) {
  return session->begun && request->n <= HL__STATEMENT_ROWS_MAX &&
         hl__mysql_gate(session, request) >= 0 && !hl__mysql_check_is_due(session);
}

int hl__mysql_lock_and_record(hl__mysql_session *session, const hl_request *request, hl__tail *tail,
                              hl_grant *grant, hl_error *error) {
  static const held nothing = {.tag_size = 0};
  answer said = {.sent = grant->sent_ms};
  if (!hl__mysql_tag_reserve(session, hl__mysql_tag_room(session, request)))
    return hl__error_memory(error);
  hl__mysql_tag(session, request);
  int status = rows_lock(session, request, tail, &said, error);
  grant->sent_ms = said.sent;
  grant->token = (uint64_t)session->token << 8;
  if (status == HL_OK) return HL_OK;
  status = undo(session, request, &nothing, status, grant, error);
  return reason_find(session, request, &said, status, error);
}
