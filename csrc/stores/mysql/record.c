/*
 * record.c - one record: written in the transaction that locks the lease's rows, refreshed,
 * converted and deleted; and helpers of the files that work with records.
 *
 * Times are the server's, UTC_TIMESTAMP(6): the beginning of the statement. So such a statement
 * must not wait for holders that it keeps out; another statement locks and waits.
 */
#include "record.h"
#include "statement.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A text that records a lease may wait for the gate's row, or for gaps where the record goes; one
   that deletes or converts, for a record. Another recorder has these for a moment; a transaction of
   hierlock.attach or of another program until it ends. So each statement waits a second at most
   (hl__mysql_brief_begin), and the caller tries again. */
#define RECORD_WAIT_MS 1000
#define RECORD_MS 10000
/* The most tries of a recording that the server undoes because of a deadlock. */
#define TRIES_MAX 4
/* A record is forgotten, by and by, once its time has been up for so long, revoked or not. */
#define FORGET_HOURS 1
#define FORGET_AT_ONCE 50
#define FORGET_PART 256u

/* ---------------------------------------------------------------- shared */

int hl__mysql_begin(hl__mysql_session *session, int64_t deadline, hl_error *error) {
  session->patience = deadline;
  return hl__mysql_settle_late(session, deadline, HL__MYSQL_UNANSWERED, error);
}

int hl__mysql_changes(hl__mysql_session *session, hl__text *t, unsigned n, uint64_t *affected,
                      hl_error *error) {
  int status = t->failed ? hl__error_memory(error)
                         : hl__mysql_commands(session, t->data, t->used, n, affected, error);
  if (status != HL_OK && status != HL_ECONNECTION) (void)hl__mysql_rollback_send(session, NULL);
  return status;
}

int hl__mysql_whole(hl__mysql_session *session, hl__text *t, unsigned n, uint64_t *affected,
                    int64_t deadline, hl_error *error) {
  int status;
  for (;;) {
    status = hl__mysql_changes(session, t, n, affected, error);
    if (status != HL_DEADLOCK) break;
    status = hl__mysql_begin(session, deadline, error);
    if (status) break;
  }
  free(t->data);
  return status;
}

void hl__mysql_put_id(hl__text *t, const char *column, const uint8_t id[16]) {
  hl__text_put(t, "%s", column);
  hl__text_hex(t, id, 16);
}

void hl__mysql_put_secret(hl__text *t, const char *column, const uint8_t secret[16]) {
  hl__text_put(t, "%sLEFT(UNHEX(SHA2(", column);
  hl__text_hex(t, secret, 16);
  hl__text_put(t, ",256)),16)");
}

void hl__mysql_put_string(hl__text *t, const char *text, size_t most) {
  hl__text_hex(t, text ? text : "", text ? strnlen(text, most) : 0);
}

/* -------------------------------------------------------------- recording */

static void put_lease_columns(hl__text *t, const hl__mysql_store *store) {
  hl__text_put(t,
               "INSERT INTO %s (id,secret,holder,till,turn,since,token,mode,owner,"
               "label,path,application,host,pid,revoked) ",
               store->leases);
}

/* token: SQL. The column mode is 1 when the lease is not exclusive; update rows make it an
   update lease. */
static void put_lease_values(hl__text *t, const hl__mysql_store *store, const hl_request *request,
                             const char *token) {
  const hl_lease_terms *terms = request->lease;
  const hl_store_config *config = store->config;
  char label[128];
  (void)hl__escape(label, sizeof label, request->label, request->label_size);
  hl__mysql_put_id(t, "", terms->id);
  hl__mysql_put_secret(t, ",", terms->secret);
  hl__mysql_put_id(t, ",", terms->holder);
  hl__text_put(t, "," HL__END_AFTER ",0,UTC_TIMESTAMP(6),%s,%d,", hl__mysql_us(terms->ttl), token,
               request->mode != HL_EXCLUSIVE);
  hl__mysql_put_string(t, terms->owner, HL_OWNER_MAX);
  hl__text_put(t, ",");
  hl__mysql_put_string(t, label, sizeof label);
  hl__text_put(t, ",");
  hl__mysql_put_string(t, request->path, 255);
  hl__text_put(t, ",");
  hl__mysql_put_string(t, config->application, 255);
  hl__text_put(t, ",");
  hl__mysql_put_string(t, config->host, 255);
  hl__text_put(t, ",%lld,0", (long long)config->pid);
}

/* " WHERE g IN (...)": the gates of the roots. */
static void put_gates(hl__text *t, const hl__mysql_store *store, const hl_request *request) {
  uint64_t buckets = hl_layout_buckets(store->base.layout);
  int64_t before = -1;
  hl__text_put(t, " WHERE g IN (");
  for (size_t i = hl__update_rows(request->rows, request->n);
       i < request->n && request->rows[i].level == 0; i++) {
    int64_t gate = hl__sql_gate(request->rows[i].bucket, buckets);
    if (gate != before) hl__text_put(t, "%s%u", before >= 0 ? "," : "", (unsigned)gate);
    before = gate;
  }
  hl__text_put(t, ")");
}

/* Two statements. The first takes the gates' rows for this transaction, so that no session shuts
   a gate before the commit. Two recorders do not wait for each other in a circle either: behind
   the gates they wait for no other. Only this statement can have a limit to the millisecond. */
static void put_gates_open(hl__text *t, const hl__mysql_session *session,
                           const hl_request *request) {
  const hl__mysql_store *store = session->store;
  long long ms = hl__left_ms(hl__late_answer_by(request->deadline));
  ms = ms > RECORD_WAIT_MS ? RECORD_WAIT_MS : ms / 2 + 1;
  if (session->dialect == HL_MARIADB)
    hl__text_put(t, "SET STATEMENT max_statement_time=%lld.%03lld FOR SELECT ", ms / 1000,
                 ms % 1000);
  else
    hl__text_put(t, "SELECT /*+ MAX_EXECUTION_TIME(%lld) */ ", ms);
  hl__text_put(t, "COUNT(*) INTO @hierlock_gates FROM %s", store->gate);
  put_gates(t, store, request);
  /* The gate tells later lockers to look for leases. */
  hl__text_put(t, " FOR UPDATE;UPDATE %s SET n=1", store->gate);
  put_gates(t, store, request);
}

/* Four statements. */
static void put_record(hl__text *t, const hl__mysql_session *session, const hl_request *request,
                       uint64_t token) {
  const hl__mysql_store *store = session->store;
  char number[24];
  (void)snprintf(number, sizeof number, "%llu", (unsigned long long)token);
  if (hl__is_presence(request->lease->id))
    hl__text_put(t, "DO 0;DO 0"); /* a presence has no gate */
  else
    put_gates_open(t, session, request);
  hl__text_put(t, ";");
  put_lease_columns(t, store);
  hl__text_put(t, "VALUES (");
  put_lease_values(t, store, request, number);
  hl__text_put(t, ");INSERT INTO %s (level,bucket,x,id) VALUES ", store->rows);
  for (size_t i = 0; i < request->recorded_n; i++) {
    hl__text_put(t, "%s(%d,%u,%d", i ? "," : "", hl__sql_level(request->recorded[i].level),
                 (unsigned)request->recorded[i].bucket, request->recorded[i].mode != HL_SHARED);
    hl__mysql_put_id(t, ",", request->lease->id);
    hl__text_put(t, ")");
  }
}

/* Three statements that record behind a lock statement, in one trip with it. Nothing is recorded
   unless the lock statement's last row gave a token, the gate says 1 already, and no lease is in
   the way. Where the request comes late, the only record of its id may be a tombstone. */
static void put_record_at_once(hl__text *t, const hl__mysql_store *store, const hl_request *request,
                               uint32_t gate) {
  put_lease_columns(t, store);
  hl__text_put(t, "SELECT ");
  put_lease_values(t, store, request, "@hierlock_token<<8");
  hl__text_put(t,
               " FROM %s g WHERE @hierlock_token IS NOT NULL AND g.g=%u AND g.n=1 AND NOT EXISTS "
               "(SELECT 1 FROM %s r WHERE",
               store->gate, (unsigned)gate, store->rows);
  hl__mysql_put_conflicts(t, request->rows, request->n);
  hl__text_put(t, ");INSERT INTO %s (level,bucket,x,id) SELECT r.a,r.b,r.c,l.id FROM (",
               store->rows);
  for (size_t i = 0; i < request->recorded_n; i++)
    hl__text_put(t, i ? " UNION ALL SELECT %d,%u,%d" : "SELECT %d a,%u b,%d c",
                 hl__sql_level(request->recorded[i].level), (unsigned)request->recorded[i].bucket,
                 request->recorded[i].mode != HL_SHARED);
  hl__text_put(t, ") r JOIN %s l", store->leases);
  hl__mysql_put_id(t, " ON l.revoked=0 AND l.id=", request->lease->id);
  hl__text_put(t, ";COMMIT");
}

int hl__mysql_record_delete(hl__mysql_session *session, const hl_lease_terms *terms, bool confirm,
                            uint64_t *deleted, hl_error *error) {
  const hl__mysql_store *store = session->store;
  hl__text t = {0};
  uint64_t affected[2] = {0, 0};
  hl__text_put(&t, "DELETE l,r FROM %s l LEFT JOIN %s r ON r.id=l.id", store->leases, store->rows);
  hl__mysql_put_id(&t, " WHERE l.id=", terms->id);
  hl__mysql_put_id(&t, " AND l.holder=", terms->holder);
  hl__text_put(&t, " AND l.revoked=0;COMMIT");
  int status = confirm ? hl__mysql_whole(session, &t, 2, affected, session->patience, error)
                       : hl__mysql_commands_send(session, &t, 2, error);
  *deleted = affected[0];
  return status;
}

int hl__mysql_record_refresh(hl__mysql_session *session, const hl_lease_terms *terms, int64_t ttl,
                             int64_t *sent_ms, uint64_t *changed, hl_error *error) {
  hl__text t = {0};
  uint64_t affected[2] = {0, 0};
  hl__text_put(&t, "UPDATE %s SET till=" HL__END_AFTER ",turn=%llu", session->store->leases,
               hl__mysql_us(ttl), (unsigned long long)terms->turn);
  hl__mysql_put_id(&t, " WHERE id=", terms->id);
  hl__mysql_put_id(&t, " AND holder=", terms->holder);
  hl__text_put(&t, " AND revoked=0 AND turn<%llu AND token DIV 256>=%llu;COMMIT",
               (unsigned long long)terms->turn, (unsigned long long)(terms->token >> 8));
  *sent_ms = hl__boot_ms();
  int status = hl__mysql_whole(session, &t, 2, affected, session->patience, error);
  *changed = affected[0];
  return status;
}

/* Deletes the record of a lease that was not granted, should it be there. The session holds
   nothing afterwards. */
static void recall(hl__mysql_session *session, const hl_lease_terms *terms) {
  uint64_t deleted;
  session->holds = false;
  if (hl__mysql_rollback_send(session, NULL)) return;
  if (hl__mysql_begin(session, hl__now_ms() + HL__SETTLE_MS, NULL) == HL_OK)
    (void)hl__mysql_record_delete(session, terms, true, &deleted, NULL);
}

/* Tries once. */
static int record_try(hl__mysql_session *session, const hl_request *request, bool kept,
                      hl_grant *grant, hl_error *error) {
  hl__text t = {0};
  uint64_t affected[7];
  unsigned limits = hl__mysql_brief_begin(session, &t);
  if (kept) hl__text_put(&t, "SAVEPOINT hierlock;");
  put_record(&t, session, request, grant->token);
  hl__text_put(&t, ";COMMIT");
  session->patience = hl__now_ms() + RECORD_MS;
  if (kept && request->deadline < session->patience)
    session->patience = request->deadline; /* else the keeper would end it */
  grant->sent_ms = hl__boot_ms();
  int status =
      t.failed ? hl__error_memory(error)
               : hl__mysql_commands(session, t.data, t.used, limits + kept + 5, affected, error);
  hl__mysql_brief_end(session, status);
  free(t.data);
  return status;
}

/* Brings the transaction back to its state before the try. */
static int record_undo(hl__mysql_session *session, int status, hl_error *error) {
  static const char back[] = "ROLLBACK TO SAVEPOINT hierlock";
  uint64_t none;
  session->patience = hl__now_ms() + HL__SETTLE_MS;
  if (status == HL_DEADLOCK || hl__mysql_commands(session, back, sizeof back - 1, 1, &none, NULL))
    return hl__error(error, HL_ECONNECTION, "the server has rolled the transaction back");
  return status;
}

int hl__mysql_record(hl__mysql_session *session, const hl_request *request, bool kept,
                     hl_grant *grant, hl_error *error) {
  for (;;) {
    int status = record_try(session, request, kept, grant, error);
    if (status == HL_OK) {
      session->holds = false;
      return HL_OK;
    }
    if (status == HL_ECONNECTION) return status;
    if (status == HL_DEADLOCK) session->holds = false;
    if (kept) status = record_undo(session, status, error);
    if (status == HL_ECONNECTION) return status;
    grant->sent_ms = 0;
    if (!kept) recall(session, request->lease);
    /* Without the rows the caller begins anew. */
    if (!kept || status != HL_TIMEOUT || hl__left_ms(request->deadline) < RECORD_WAIT_MS)
      return status;
  }
}

/* Records in the trip that locks the rows. HL_OK: see tail->recorded. */
static int take_at_once(hl__mysql_session *session, const hl_request *request, hl__tail *tail,
                        hl_grant *grant, hl_error *error) {
  put_record_at_once(&tail->text, session->store, request,
                     (uint32_t)hl__mysql_gate(session, request));
  tail->statements = 3;
  int status = tail->text.failed ? hl__error_memory(error)
                                 : hl__mysql_lock_and_record(session, request, tail, grant, error);
  free(tail->text.data);
  if (status == HL_ECONNECTION) return status; /* grant->sent_ms: it may be there */
  if (status && tail->begun) {
    /* A row was missing, or the server is read-only, and the lease locks nothing; or the COMMIT
       failed. */
    uint64_t deleted;
    if (hl__mysql_begin(session, hl__now_ms() + HL__SETTLE_MS, NULL) == HL_OK)
      (void)hl__mysql_record_delete(session, request->lease, true, &deleted, NULL);
  }
  if (status || !tail->recorded) grant->sent_ms = 0;
  return status;
}

static int take_in_steps(hl__mysql_session *session, const hl_request *request, hl_grant *grant,
                         hl_error *error) {
  for (int tries = 1;; tries++) {
    int status = hl__mysql_begin(session, hl__now_ms() + HL__SETTLE_MS, error);
    if (status == HL_OK) status = hl__mysql_lock_rows(session, request, grant, error);
    if (status) {
      grant->sent_ms = 0;
      return status;
    }
    status = hl__mysql_record(session, request, false, grant, error);
    if (status != HL_DEADLOCK || tries == TRIES_MAX) return status;
  }
}

/* Deletes records that no holder will ask for: their time has been up for long. Tombstones, too. */
static void forget_some(hl__mysql_session *session) {
  const hl__mysql_store *store = session->store;
  MYSQL_RES *result = NULL;
  MYSQL_ROW row;
  char sql[512];
  int n = snprintf(sql, sizeof sql,
                   "SELECT HEX(id) FROM %s WHERE till<UTC_TIMESTAMP(6)-INTERVAL %d HOUR LIMIT %d",
                   store->leases, FORGET_HOURS, FORGET_AT_ONCE);
  if (hl__mysql_begin(session, hl__now_ms() + HL__SETTLE_MS, NULL)) return;
  if (hl__mysql_query(session, sql, (size_t)n, &result, NULL)) return;
  int status = HL_OK;
  while (status == HL_OK && (row = hl__mysql_row(result, 1))) {
    uint64_t affected[2];
    n = snprintf(sql, sizeof sql,
                 "DELETE l,r FROM %s l LEFT JOIN %s r ON r.id=l.id WHERE "
                 "l.id=0x%.32s AND l.till<UTC_TIMESTAMP(6)-INTERVAL %d HOUR;COMMIT",
                 store->leases, store->rows, row[0] ? row[0] : "0", FORGET_HOURS);
    session->patience = hl__now_ms() + HL__SETTLE_MS;
    status = hl__mysql_commands(session, sql, (size_t)n, 2, affected, NULL);
  }
  mysql_free_result(result);
  if (status != HL_ECONNECTION) (void)hl__mysql_rollback_send(session, NULL);
}

int hl__mysql_lease_take(hl__mysql_session *session, const hl_request *request, hl_grant *grant,
                         hl_error *error) {
  hl__tail tail = {.recorded = false};
  int status = HL_OK;
  int64_t again = hl__deadline(hl__late_answer_by(request->deadline), -HL__TRY_MS);
  if (hl__is_presence(request->lease->id)) { /* a presence locks no row of the table */
    status = hl__mysql_begin(session, hl__now_ms() + HL__SETTLE_MS, error);
    return status ? status : hl__mysql_record(session, request, false, grant, error);
  }
  if (hl__mysql_records_at_once(session, request))
    status = take_at_once(session, request, &tail, grant, error);
  /* The try at once does not wait for the gate either, which another recorder may have for a
     moment. A lock that an administrator holds for longer takes all of the try's time. */
  if (status && (status != HL_TIMEOUT || hl__left_ms(again) == 0)) return status;
  if (!tail.recorded) status = take_in_steps(session, request, grant, error);
  if (status) return status;
  session->clock++;
  if (session->clock % FORGET_PART == 0) forget_some(session);
  /* The answer took long, and the holder counts the ttl from when the request was sent:
     refreshes the lease. */
  if (hl__boot_ms() - grant->sent_ms > request->lease->ttl / 4) {
    int64_t sent = 0;
    uint64_t changed = 0;
    if (hl__mysql_begin(session, hl__now_ms() + RECORD_MS, NULL) == HL_OK &&
        hl__mysql_record_refresh(session, request->lease, request->lease->ttl, &sent, &changed,
                                 NULL) == HL_OK &&
        changed > 0)
      grant->sent_ms = sent;
  }
  return HL_OK;
}

/* ----------------------------------------------------- rows in another mode */

/* Converts by one statement: other sessions see the record as before or as after. *changed is 0
   when there is no such record, or it had that mode. Commits. */
static int record_convert(hl__mysql_session *session, const hl_request *request, uint64_t token,
                          uint64_t *changed, hl_error *error) {
  const hl__mysql_store *store = session->store;
  uint64_t affected[3] = {0};
  hl__text t = {0};
  unsigned limits = hl__mysql_brief_begin(session, &t);
  hl__text_put(&t, "UPDATE %s l JOIN %s r ON r.id=l.id SET l.mode=%d,r.x=%d", store->leases,
               store->rows, !request->upgrade, request->upgrade);
  if (request->upgrade) hl__text_put(&t, ",l.token=%llu", (unsigned long long)token);
  hl__mysql_put_id(&t, " WHERE l.id=", request->lease->id);
  /* A downgrade that the server reads late, behind an upgrade, changes nothing. */
  hl__text_put(&t, " AND l.token DIV 256%s%llu", request->upgrade ? ">=" : "=",
               (unsigned long long)((request->upgrade ? request->lease->token : token) >> 8));
  hl__mysql_put_id(&t, " AND l.holder=", request->lease->holder);
  hl__text_put(&t, " AND l.revoked=0 AND");
  hl__mysql_put_conflicts(&t, request->rows, request->n);
  hl__text_put(&t, ";COMMIT");
  session->patience = hl__now_ms() + RECORD_MS;
  int status = hl__mysql_changes(session, &t, limits + 2, affected, error);
  hl__mysql_brief_end(session, status);
  free(t.data);
  *changed = status == HL_OK ? affected[limits] : 0;
  return status;
}

int hl__mysql_record_convert(hl__mysql_session *session, const hl_request *request, hl_grant *grant,
                             uint64_t *changed, hl_error *error) {
  const hl_request own = hl__upgrade_request(request);
  for (;;) {
    hl_grant held = {.token = grant->token};
    int status = hl__mysql_begin(session, hl__now_ms() + HL__SETTLE_MS, error);
    if (status == HL_OK && request->upgrade)
      status = hl__mysql_lock_rows(session, &own, &held, error);
    bool locked = status == HL_OK;
    if (locked) status = record_convert(session, request, held.token, changed, error);
    if (locked && status != HL_ECONNECTION) session->holds = false;
    grant->token = held.token;
    /* Another program is at the record, for a moment; or the server has ended a circle. */
    bool again = status == HL_DEADLOCK || (locked && status == HL_TIMEOUT);
    if (!again) return status;
    if (request->try_once || hl__left_ms(request->deadline) == 0)
      return hl__error(error, HL_TIMEOUT, "the lock was not granted in time");
  }
}
