/*
 * statement.c - the one statement that locks the rows of a request:
 *
 *     (SELECT ... WHERE level=0 AND bucket=? AND (@hierlock:=?) IS NOT NULL
 *      FOR SHARE)
 *     UNION ALL (SELECT ... WHERE level=1 AND bucket=? FOR SHARE)
 *     UNION ALL (SELECT UUID_SHORT(), read-only? ... FOR UPDATE)
 *
 * - Both servers execute the parts from left to right, each a look-up by primary
 *   key that locks one row and no gap. (An IN list may become a scan that waits
 *   for rows that nobody asked for.)
 * - Parsing and planning is what a server spends its time on. So a shape that
 *   comes a second time is prepared, and from then on only told its buckets.
 * - @hierlock tells observers who waits or holds. It is set in the first part's
 *   WHERE, for that is evaluated before the row is locked; select lists are
 *   evaluated afterwards.
 * - UUID_SHORT() in the last part is evaluated after the wait, so tokens grow in
 *   the order of the grants, and needs no write: start time of the server and a
 *   counter below the server's id.
 * - read_only is looked at in the same trip: a fail-over makes the old primary
 *   read-only while we are connected to it.
 * - A row that is missing is no error to the server, and locks nothing. So the
 *   rows that come back are counted.
 * - An ALTER TABLE may give the table to an engine that locks no rows. It waits
 *   for those who hold, so the engine cannot change while a lock is held. With an
 *   engine without transactions the server says that none is open: looked at on
 *   each grant. MariaDB's Aria says that one is; so every LOOK_AGAIN_MS the session
 *   asks for the engine, behind the lock statement and in the same trip.
 */
#include "mysql_store.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Rows of one statement; more are locked by several, in the same order. */
#define STATEMENT_ROWS_MAX 256
/* NOWAIT does not cover the wait for a metadata lock on MySQL. */
#define TRY_MS 500
/* The session's limits serve for waits that are shorter by at most this. */
#define WAIT_SLACK_MS 4
/* The whole-second limits, a second net behind the exact one. */
#define NET_SECONDS 2
/* For so long a session believes that the table is still of InnoDB. */
#define LOOK_AGAIN_MS 10000

/* --------------------------------------------------------------- text */

typedef struct text {
  char *data;
  size_t used, capacity;
} text;

/* The caller has reserved enough: see text_new. */
static void put(text *t, const char *format, ...) HL__PRINTF(2, 3);
static void put(text *t, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int n = vsnprintf(t->data + t->used, t->capacity - t->used, format,
                    arguments);
  va_end(arguments);
  if (n > 0) t->used += (size_t)n;
}

static bool text_new(text *t, size_t rows, size_t tag_size) {
  t->used = 0;
  t->capacity = 1024 + rows * (200 + HL__MYSQL_NAME_MAX) + 2 * tag_size;
  t->data = malloc(t->capacity);
  return t->data != NULL;
}

/* As a literal. */
static void put_hex(text *t, const char *data, size_t n) {
  static const char digits[] = "0123456789abcdef";
  put(t, "0x");
  for (size_t i = 0; i < n; i++) {
    t->data[t->used++] = digits[(unsigned char)data[i] >> 4];
    t->data[t->used++] = digits[(unsigned char)data[i] & 15];
  }
}

/* The lock statement; prepared: with parameters instead of buckets and tag. */
static void put_select(text *t, const hl__mysql_session *session,
                       const hl_row *rows, size_t n, bool nowait,
                       bool prepared) {
  bool mariadb = session->dialect == HL_MARIADB;
  const char *shared = mariadb ? "LOCK IN SHARE MODE" : "FOR SHARE";
  for (size_t i = 0; i < n; i++) {
    put(t, "%s(SELECT ", i ? " UNION ALL " : "");
    if (i == 0 && nowait && !mariadb)
      put(t, "/*+ MAX_EXECUTION_TIME(%d) */ ", TRY_MS);
    put(t, "%s FROM %s WHERE level=%u AND bucket=",
        i + 1 == n ? "UUID_SHORT(),CONCAT(@@global.read_only) NOT IN "
                     "('0','OFF')"
                   : "CAST(0 AS UNSIGNED) t,0 r",
        session->store->table, (unsigned)rows[i].level);
    if (prepared)
      put(t, "?");
    else
      put(t, "%" PRIu32, rows[i].bucket);
    if (i == 0) {
      put(t, " AND (@hierlock:=");
      if (prepared)
        put(t, "?");
      else
        put_hex(t, session->tag, session->tag_size);
      put(t, ") IS NOT NULL");
    }
    put(t, " %s%s)", rows[i].mode == HL_SHARED ? shared : "FOR UPDATE",
        nowait ? " NOWAIT" : "");
  }
}

/* ------------------------------------------------------ shapes, prepared */

static size_t shape_key(const hl_row *rows, size_t n, bool nowait,
                        uint8_t key[HL__SHAPE_ROWS_MAX + 1]) {
  key[0] = nowait;
  for (size_t i = 0; i < n; i++)
    key[i + 1] =
        (uint8_t)(rows[i].level << 1 | (rows[i].mode == HL_EXCLUSIVE));
  return n + 1;
}

static void shape_clear(hl__shape *shape) {
  if (shape->statement) (void)mysql_stmt_close(shape->statement);
  memset(shape, 0, sizeof *shape);
}

/* The parameters: the first bucket, the tag, the other buckets. Nonzero when it
   fails. */
static int shape_bind(hl__mysql_session *session, MYSQL_STMT *statement,
                      size_t n) {
  MYSQL_BIND parameters[HL__SHAPE_ROWS_MAX + 1], results[2];
  memset(parameters, 0, sizeof parameters);
  memset(results, 0, sizeof results);
  for (size_t i = 0; i < n; i++) {
    MYSQL_BIND *parameter = &parameters[i ? i + 1 : 0];
    parameter->buffer_type = MYSQL_TYPE_LONG;
    parameter->buffer = &session->buckets[i];
  }
  parameters[1].buffer_type = MYSQL_TYPE_BLOB;
  parameters[1].buffer = session->tag;
  parameters[1].buffer_length = (unsigned long)session->tag_capacity;
  parameters[1].length = &session->tag_size;
  for (int i = 0; i < 2; i++) {
    results[i].buffer_type = MYSQL_TYPE_LONGLONG;
    results[i].buffer = i ? &session->read_only : &session->token;
    results[i].is_unsigned = 1;
  }
  return mysql_stmt_bind_param(statement, parameters) ||
         mysql_stmt_bind_result(statement, results);
}

/* The statement for a shape that is seen again; NULL when it is seen for the
   first time, or cannot be prepared: then it is sent as text. */
static int shape_find(hl__mysql_session *session, const hl_row *rows, size_t n,
                      bool nowait, MYSQL_STMT **statement, hl_error *error) {
  uint8_t key[HL__SHAPE_ROWS_MAX + 1];
  hl__shape *shape = NULL, *oldest = &session->shapes[0];
  *statement = NULL;
  if (n > HL__SHAPE_ROWS_MAX || session->unprepared) return HL_OK;
  size_t size = shape_key(rows, n, nowait, key);
  for (size_t i = 0; i < HL__SHAPES_MAX && !shape; i++) {
    hl__shape *candidate = &session->shapes[i];
    if (candidate->size == size && memcmp(candidate->key, key, size) == 0)
      shape = candidate;
    else if (candidate->used < oldest->used)
      oldest = candidate;
  }
  if (!shape) {
    shape_clear(oldest);
    oldest->size = size;
    memcpy(oldest->key, key, size);
    oldest->used = ++session->clock;
    return HL_OK;
  }
  shape->used = ++session->clock;
  if (!shape->statement) {
    text t;
    if (!text_new(&t, n, 0)) return hl__error_memory(error);
    put_select(&t, session, rows, n, nowait, true);
    shape->statement = mysql_stmt_init(session->mysql);
    if (!shape->statement) {
      free(t.data);
      return hl__error_memory(error);
    }
    if (mysql_stmt_prepare(shape->statement, t.data, (unsigned long)t.used) ||
        shape_bind(session, shape->statement, n)) {
      /* The server may have as many statements as it wants: as text, then. */
      int status =
          hl__mysql_error(session, shape->statement, "prepare", error);
      free(t.data);
      shape_clear(shape);
      if (status != HL_ESTORE) return status;
      session->unprepared = true;
      return HL_OK;
    }
    free(t.data);
  }
  *statement = shape->statement;
  return HL_OK;
}

/* After a lock statement. */
static void transaction_note(hl__mysql_session *session) {
  session->in_transaction =
      session->mysql->server_status & SERVER_STATUS_IN_TRANS;
}

static int execute_prepared(hl__mysql_session *session, MYSQL_STMT *statement,
                            const hl_row *rows, size_t n, size_t *count,
                            hl_error *error) {
  for (size_t i = 0; i < n; i++)
    session->buckets[i] = (int32_t)rows[i].bucket;
  *count = 0;
  if (mysql_stmt_execute(statement))
    return hl__mysql_error(session, statement, "lock rows", error);
  int fetched;
  while ((fetched = mysql_stmt_fetch(statement)) == 0) (*count)++;
  transaction_note(session);
  int status = HL_OK;
  if (fetched != MYSQL_NO_DATA)
    status = hl__mysql_error(session, statement, "lock rows", error);
  (void)mysql_stmt_free_result(statement);
  return status;
}

/* ---------------------------------------------------- as text, for once */

int hl__mysql_limits(const hl__mysql_session *session, int64_t wait, char *out,
                     size_t size) {
  long long ms = wait, seconds = (wait + 999) / 1000 + NET_SECONDS;
  char exact[64];
  if (session->dialect == HL_MARIADB)
    (void)snprintf(exact, sizeof exact, "max_statement_time=%lld.%03lld",
                   ms / 1000, ms % 1000);
  else
    (void)snprintf(exact, sizeof exact, "max_execution_time=%lld", ms);
  return snprintf(out, size,
                  "%s,innodb_lock_wait_timeout=%lld,lock_wait_timeout=%lld",
                  exact, seconds, seconds);
}

/* The result behind those of so many SETs, which have succeeded then: the session has
   the limits for such a wait. */
static int text_result(hl__mysql_session *session, unsigned sets, int64_t wait,
                       size_t *count, hl_error *error) {
  MYSQL *mysql = session->mysql;
  for (; sets > 0; sets--)
    if (mysql_next_result(mysql) != 0)
      return hl__mysql_error(session, NULL, "lock rows", error);
  if (wait) session->wait = wait;
  MYSQL_RES *result = mysql_store_result(mysql);
  if (!result) return hl__mysql_error(session, NULL, "lock rows", error);
  MYSQL_ROW row;
  *count = 0;
  while ((row = mysql_fetch_row(result))) {
    (*count)++;
    session->token = row[0] ? strtoull(row[0], NULL, 10) : 0;
    session->read_only = row[1] && row[1][0] == '1';
  }
  mysql_free_result(result);
  transaction_note(session);
  return HL_OK;
}

/* The result behind that of the lock statement: the table's engine. The look has a limit
   of its own; when it could not be taken in time, the next request looks. */
static int engine_result(hl__mysql_session *session, hl_error *error) {
  MYSQL_RES *result = mysql_next_result(session->mysql) == 0
                          ? mysql_store_result(session->mysql)
                          : NULL;
  if (!result) {
    int status = hl__mysql_error(session, NULL, "look at the table", error);
    return status == HL_TIMEOUT ? HL_OK : status;
  }
  int status = hl__mysql_table_refuse(session, result, error);
  mysql_free_result(result);
  return status;
}

/* wait: the session's new limits, in the same trip; 0: as they are. look: asks
   for the table's engine, too. */
static int execute_text(hl__mysql_session *session, int64_t wait, bool look,
                        const hl_row *rows, size_t n, bool nowait,
                        size_t *count, hl_error *error) {
  text t;
  if (!text_new(&t, n, session->tag_size)) return hl__error_memory(error);
  unsigned sets = 0;
  if (!session->begun) {
    put(&t,
        "SET SESSION TRANSACTION ISOLATION LEVEL %s, READ WRITE;"
        "SET SESSION autocommit=0;",
        session->repeatable ? "REPEATABLE READ" : "READ COMMITTED");
    sets += 2;
  }
  if (wait) {
    char limits[160];
    (void)hl__mysql_limits(session, wait, limits, sizeof limits);
    put(&t, "SET SESSION %s;", limits);
    sets++;
    session->wait = 0; /* not known, until it has succeeded */
  }
  put_select(&t, session, rows, n, nowait, false);
  if (look) {
    char sql[HL__MYSQL_TABLE_SQL];
    (void)hl__mysql_table_sql(session, sql, sizeof sql);
    put(&t, ";%s", sql);
  }
  int failed =
      mysql_real_query(session->mysql, t.data, (unsigned long)t.used);
  free(t.data);
  if (failed) return hl__mysql_error(session, NULL, "lock rows", error);
  int status = text_result(session, sets, wait, count, error);
  if (status == HL_OK) session->begun = true;
  if (status == HL_OK && look) status = engine_result(session, error);
  return status;
}

/* ------------------------------------------------------------- locking */

/* Locks n rows (at most STATEMENT_ROWS_MAX) by one statement. */
static int execute(hl__mysql_session *session, const hl_request *request,
                   const hl_row *rows, size_t n, size_t *count,
                   hl_error *error) {
  MYSQL_STMT *statement = NULL;
  /* Connecting may have taken all the time there was: then it still tries. */
  bool nowait = request->try_once || hl__left_ms(request->deadline) == 0;
  /* Never early: our milliseconds are cut. */
  int64_t left = nowait ? TRY_MS : hl__left_ms(request->deadline) + 1;
  /* A try on MySQL has a limit of its own, and MariaDB's NOWAIT only must not be
     ended by what is left of a very short wait. */
  bool same = session->wait >= left &&
              (nowait || session->wait - left <= WAIT_SLACK_MS);
  if (nowait && session->dialect == HL_MYSQL) same = true;
  bool text_only = !session->begun || !same;
  bool look = hl__lease_ms() - session->looked >= LOOK_AGAIN_MS;
  int status = HL_OK;
  hl__sigpipe guard = hl__sigpipe_begin(session);
  hl__mysql_statement_begin(session);
  if (!text_only && !look)
    status = shape_find(session, rows, n, nowait, &statement, error);
  if (status == HL_OK && statement)
    status = execute_prepared(session, statement, rows, n, count, error);
  else if (status == HL_OK)
    status = execute_text(session, same ? 0 : left, look, rows, n, nowait,
                          count, error);
  hl__mysql_statement_end(session);
  hl__sigpipe_end(guard);
  return status;
}

/* Names the first row that is missing. Best effort: the rows are no longer
   locked. */
static int missing(hl__mysql_session *session, const hl_row *rows, size_t n,
                   hl_error *error) {
  const char *table = session->store->table;
  (void)hl__error(error, HL_ENOT_PROVISIONED,
                  "a bucket row is missing in table %s; run `hierlock "
                  "provision`",
                  table);
  if (!error ||
      hl__mysql_settle(session, hl__now_ms() + 1000, NULL) != HL_OK)
    return HL_ENOT_PROVISIONED;
  session->patience = hl__now_ms() + 1000;
  for (size_t i = 0; i < n; i++) {
    char sql[256];
    MYSQL_RES *result;
    int size = snprintf(sql, sizeof sql,
                        "SELECT 1 FROM %s WHERE level=%u AND bucket=%" PRIu32,
                        table, (unsigned)rows[i].level, rows[i].bucket);
    if (hl__mysql_query(session, sql, (size_t)size, &result, NULL) || !result)
      break;
    bool there = mysql_num_rows(result) > 0;
    mysql_free_result(result);
    if (there) continue;
    (void)hl__error(error, HL_ENOT_PROVISIONED,
                    "the row of level %u, bucket %" PRIu32
                    " is missing in table %s; run `hierlock provision`",
                    (unsigned)rows[i].level, rows[i].bucket, table);
    error->level = rows[i].level;
    error->bucket = rows[i].bucket;
    break;
  }
  (void)hl__mysql_rollback_send(session, NULL);
  return HL_ENOT_PROVISIONED;
}

/* The server granted, but says that no transaction is open: nothing is locked.
   Says which engine the table is of, where it can be seen. */
static int no_transaction(hl__mysql_session *session, hl_error *error) {
  int status = HL_OK;
  if (error &&
      hl__mysql_settle(session, hl__now_ms() + 1000, NULL) == HL_OK) {
    session->patience = hl__now_ms() + 1000;
    status = hl__mysql_table_check(session, error);
    (void)hl__mysql_rollback_send(session, NULL);
  }
  if (status == HL_EUNSAFE_SERVER) return status;
  return hl__error(error, HL_EUNSAFE_SERVER,
                   "the table %s is of an engine that locks no rows; it must "
                   "be InnoDB",
                   session->store->table);
}

/* The server's lease began when it answered, which we know only to lie after the
   request was sent. After a long wait that is too long ago to be of use: then a
   sign of life tells a later time. */
static int lease_begin(hl__mysql_session *session, int64_t *sent,
                       hl_error *error) {
  int64_t hold_timeout = session->store->config->hold_timeout;
  if (hl__lease_ms() - *sent < hold_timeout / 4) return HL_OK;
  int status = session->base.store->ops->renew(&session->base, sent, error);
  if (status == HL_OK)
    status = hl__mysql_settle(session, hl__now_ms() + hold_timeout, error);
  return status == HL_TIMEOUT
             ? hl__error(error, HL_ECONNECTION,
                         "the server did not answer in time")
             : status;
}

/* Room for the request's tag. Prepared statements know the old place: they are
   made again. */
static bool tag_reserve(hl__mysql_session *session, size_t room) {
  if (room <= session->tag_capacity) return true;
  char *tag = malloc(room);
  if (!tag) return false;
  hl__sigpipe guard = hl__sigpipe_begin(session);
  for (size_t i = 0; i < HL__SHAPES_MAX; i++)
    shape_clear(&session->shapes[i]);
  hl__sigpipe_end(guard);
  char *before = session->tag; /* a child that is born meanwhile frees what it finds */
  session->tag = tag;
  session->tag_capacity = room;
  free(before);
  return true;
}

/* What gives observers the tag of what is held again, once an extend has failed: the
   statement, and behind it the tag; data is NULL when out of memory. */
static text held_statement(const hl__mysql_session *session) {
  text t;
  if (text_new(&t, 0, session->tag_size + session->tag_size / 2 + 1)) {
    put(&t, "SET @hierlock=");
    put_hex(&t, session->tag, session->tag_size);
    memcpy(t.data + t.used, session->tag, session->tag_size);
  }
  return t;
}

/* After an extend that failed: tells observers again what is held, and asks at
   once whether it still is. */
static int extend_undo(hl__mysql_session *session, const text *held,
                       unsigned long held_size, hl_grant *grant,
                       hl_error *error) {
  memcpy(session->tag, held->data + held->used, held_size);
  session->tag_size = held_size;
  int64_t sent = hl__lease_ms();
  int status = hl__mysql_send(session, held->data, held->used, error);
  if (status == HL_OK)
    status = hl__mysql_settle(
        session, hl__now_ms() + session->store->config->hold_timeout, error);
  if (status == HL_OK) grant->sent_ms = sent;
  return status == HL_TIMEOUT ? HL_ECONNECTION : status;
}

/* MariaDB shows open transactions as they were up to 100 ms ago. Takes the tag
   back with the rows, or those who look now would be told that this session
   holds what it has just waited for in vain. Waits for the answer, as the next
   to look is most often the caller, on another connection. */
#define RETRACT_MS 100
static int rollback_retracting(hl__mysql_session *session) {
  static const char sql[] =
      "BEGIN NOT ATOMIC SET @hierlock=NULL; ROLLBACK; END";
  session->holds = false;
  int status = hl__mysql_send(session, sql, sizeof sql - 1, NULL);
  if (status == HL_OK)
    status = hl__mysql_settle(session, hl__now_ms() + RETRACT_MS, NULL);
  return status == HL_TIMEOUT ? HL_OK : status;
}

/* After a request that failed. Most errors leave the first rows locked. */
static int undo(hl__mysql_session *session, const hl_request *request,
                const text *held, unsigned long held_size, int status,
                hl_grant *grant, hl_error *error) {
  if (status == HL_DEADLOCK) session->holds = false;
  if (status == HL_ECONNECTION || status == HL_DEADLOCK) return status;
  if (request->extend) {
    hl_error reason;
    if (extend_undo(session, held, held_size, grant, &reason) != HL_ECONNECTION)
      return status;
    if (error) *error = reason;
    return HL_ECONNECTION;
  }
  int undone = session->dialect == HL_MARIADB
                   ? rollback_retracting(session)
                   : hl__mysql_rollback_send(session, NULL);
  if (undone != HL_OK)
    return hl__error(error, HL_ECONNECTION, "the connection has ended");
  return status;
}

int hl__mysql_lock_rows(hl__mysql_session *session, const hl_request *request,
                        hl_grant *grant, hl_error *error) {
  const hl_row *missed = NULL;
  size_t missed_count = 0;
  int64_t sent = 0;
  int status = HL_OK;
  bool untransacted = false;
  text held = {NULL, 0, 0};
  unsigned long held_size = session->tag_size;
  if (request->extend) {
    held = held_statement(session);
    if (!held.data) return hl__error_memory(error);
  }
  if (!tag_reserve(session, hl__mysql_tag_room(session, request))) {
    free(held.data);
    return hl__error_memory(error);
  }
  hl__mysql_tag(session, request);
  for (size_t done = 0; done < request->n && status == HL_OK;) {
    size_t n = request->n - done, count = 0;
    if (n > STATEMENT_ROWS_MAX) n = STATEMENT_ROWS_MAX;
    const hl_row *rows = request->rows + done;
    sent = hl__lease_ms();
    status = execute(session, request, rows, n, &count, error);
    if (status != HL_DEADLOCK && status != HL_ECONNECTION)
      atomic_store(&session->in_hand, false); /* what was held before, is */
    if (status == HL_OK && !session->in_transaction) {
      untransacted = !request->extend;
      status = untransacted
                   ? HL_EUNSAFE_SERVER
                   : hl__error(error, HL_ECONNECTION,
                               "the server has rolled the transaction back");
    }
    if (status == HL_OK && count != n) {
      status = HL_ENOT_PROVISIONED;
      missed = rows;
      missed_count = n;
    }
    if (status == HL_OK && session->read_only)
      status = hl__error(error, HL_EUNSAFE_SERVER,
                         "the server has become read-only: locks there "
                         "protect nothing; connect to the primary");
    done += n;
  }
  if (status == HL_OK) {
    session->holds = true;
    status = lease_begin(session, &sent, error);
  }
  if (status == HL_OK) {
    free(held.data);
    /* The top byte is the server's id; the lowest is left for hand-overs inside
       a process. */
    grant->token = (uint64_t)session->token << 8;
    grant->sent_ms = sent;
    return HL_OK;
  }
  status = undo(session, request, &held, held_size, status, grant, error);
  free(held.data);
  if (untransacted && status == HL_EUNSAFE_SERVER)
    return no_transaction(session, error);
  if (missed && status == HL_ENOT_PROVISIONED && !request->extend)
    status = missing(session, missed, missed_count, error);
  else if (missed && status == HL_ENOT_PROVISIONED)
    status = hl__error(error, HL_ENOT_PROVISIONED,
                       "a bucket row is missing in table %s; run `hierlock "
                       "provision`",
                       session->store->table);
  return status;
}
