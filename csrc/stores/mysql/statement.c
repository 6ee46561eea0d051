/*
 * statement.c - the one statement that locks the rows of a request (rows.c locks very many rows by
 * several):
 *
 *     (SELECT ... WHERE level=0 AND bucket=? AND (@hierlock:=?) IS NOT NULL
 *      FOR SHARE)
 *     UNION ALL (SELECT ... WHERE level=1 AND bucket=? FOR SHARE)
 *     UNION ALL (SELECT UUID_SHORT(), read-only? ... FOR UPDATE)
 *
 * - Both servers execute the parts from left to right. Each part is a look-up by primary key that
 *   locks one row and no gap. (A server may turn an IN list into a scan, which waits for rows that
 *   the request does not want.)
 * - A server spends its time on parsing and planning. So a shape that comes a second time is
 *   prepared; from then on the session sends only buckets. MySQL gets it as a join of the same
 *   look-ups, for which it needs an eighth less:
 *
 *     SELECT UUID_SHORT(), read-only? FROM t r0 STRAIGHT_JOIN t r1 STRAIGHT_JOIN t r2
 *     WHERE r0.level=0 AND r0.bucket=? AND (@hierlock:=?) IS NOT NULL
 *     AND r1.level=1 AND r1.bucket=? AND ... FOR SHARE OF r0 ... FOR UPDATE OF r2
 *
 *   MariaDB has no OF.
 *
 * - @hierlock tells observers who waits or holds. The first part's WHERE sets it, for the server
 *   evaluates that before it locks the row; select lists come afterwards.
 * - UUID_SHORT() in the last part, or of the join, is evaluated after the wait. So tokens grow in
 *   the order of the grants, and need no write: start time of the server and a counter below the
 *   server's id.
 * - The same trip reads read_only: a fail-over makes the old primary read-only while we are
 *   connected to it.
 * - A missing row is no error to the server, and locks nothing. So we count the rows that come
 *   back.
 * - An ALTER TABLE may give the table to an engine that locks no rows. The ALTER TABLE waits for
 *   the holders, so the engine cannot change while a lock is held. With an engine without
 *   transactions the server says that none is open; we check this on each grant. MariaDB's Aria
 *   says that a transaction is open, and so does each statement that reads a gate. So every
 *   CHECK_AGAIN_MS the session asks for the engine, behind the lock statement and in the same trip.
 * - In a space with leases the last part, or the last table of the join, is the row of the root's
 *   gate (gate.c). It is not locked, except by a statement that records a lease: that shares it.
 *   In READ COMMITTED the server makes the view at the first plain read. Only here, where all
 *   waits are over, does the view show what was committed during them.
 */
#include "statement.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The session's limits serve for waits that are up to this much shorter. */
#define WAIT_SLACK_MS 4
/* A session believes for this long that the table is of InnoDB. */
#define CHECK_AGAIN_MS 10000

/* --------------------------------------------------------------- text */

/* The value, or the parameter of a prepared statement. */
static void put_bucket(hl__text *t, const hl_row *row, bool prepared) {
  if (prepared)
    hl__text_put(t, "?");
  else
    hl__text_put(t, "%" PRIu64, row->bucket);
}

static void put_tag(hl__text *t, const hl__mysql_session *session, bool prepared) {
  hl__text_put(t, " AND (@hierlock:=");
  if (prepared)
    hl__text_put(t, "?");
  else
    hl__text_hex(t, session->tag, session->tag_size);
  hl__text_put(t, ") IS NOT NULL");
}

#define TOKEN_AND_READ_ONLY "UUID_SHORT(),CONCAT(@@global.read_only) NOT IN ('0','OFF')"

/* Marks the gate's row in the column that tells, for the table's rows, whether the server is
   read-only. */
#define GATE 2

static void put_gate(hl__text *t, const hl__part *p, bool prepared) {
  if (prepared)
    hl__text_put(t, "?");
  else
    hl__text_put(t, "%u", (unsigned)p->gate);
}

/* The lock statement. prepared: with parameters instead of buckets and tag. */
static void put_union(hl__text *t, const hl__mysql_session *session, const hl__part *p,
                      bool prepared) {
  const hl__mysql_store *store = session->store;
  bool mariadb = session->dialect == HL_MARIADB;
  const char *shared = mariadb ? "LOCK IN SHARE MODE" : "FOR SHARE";
  for (size_t i = 0; i < p->n; i++) {
    hl__text_put(t, "%s(SELECT ", i ? " UNION ALL " : "");
    if (i == 0 && p->nowait && !mariadb)
      hl__text_put(t, "/*+ MAX_EXECUTION_TIME(%d) */ ", HL__TRY_MS);
    hl__text_put(t, "%s%s FROM %s WHERE level=%d AND bucket=",
                 i + 1 == p->n && p->tail ? "@hierlock_token:=" : "",
                 i + 1 == p->n ? TOKEN_AND_READ_ONLY : "CAST(0 AS UNSIGNED) t,0 r", store->table,
                 hl__sql_level(p->rows[i].level));
    put_bucket(t, &p->rows[i], prepared);
    if (i == 0) put_tag(t, session, prepared);
    hl__text_put(t, " %s%s)", p->rows[i].mode == HL_SHARED ? shared : "FOR UPDATE",
                 p->nowait ? " NOWAIT" : "");
  }
  if (!p->gated) return;
  hl__text_put(t, " UNION ALL (SELECT n,%d FROM %s WHERE g=", GATE, store->gate);
  put_gate(t, p, prepared);
  if (p->tail) hl__text_put(t, " %s NOWAIT", shared);
  hl__text_put(t, ")");
}

/* The lock statement on MySQL: a join of look-ups, which MySQL plans sooner. One row comes back
   when all its rows are there. */
static void put_join(hl__text *t, const hl__mysql_session *session, const hl__part *p,
                     bool prepared) {
  hl__text_put(t, "SELECT ");
  if (p->nowait) hl__text_put(t, "/*+ MAX_EXECUTION_TIME(%d) */ ", HL__TRY_MS);
  hl__text_put(t, TOKEN_AND_READ_ONLY "%s FROM", p->gated ? ",g.n" : "");
  for (size_t i = 0; i < p->n; i++)
    hl__text_put(t, "%s %s r%zu", i ? " STRAIGHT_JOIN" : "", session->store->table, i);
  if (p->gated) hl__text_put(t, " STRAIGHT_JOIN %s g", session->store->gate);
  for (size_t i = 0; i < p->n; i++) {
    hl__text_put(t, " %s r%zu.level=%d AND r%zu.bucket=", i ? "AND" : "WHERE", i,
                 hl__sql_level(p->rows[i].level), i);
    put_bucket(t, &p->rows[i], prepared);
    if (i == 0) put_tag(t, session, prepared);
  }
  if (p->gated) {
    hl__text_put(t, " AND g.g=");
    put_gate(t, p, prepared);
  }
  for (size_t i = 0; i < p->n; i++)
    hl__text_put(t, " FOR %s OF r%zu%s", p->rows[i].mode == HL_SHARED ? "SHARE" : "UPDATE", i,
                 p->nowait ? " NOWAIT" : "");
}

/* ------------------------------------------------------ shapes, prepared */

static size_t shape_key(const hl__part *p, uint8_t key[HL__SHAPE_ROWS_MAX + 1]) {
  key[0] = (uint8_t)(p->nowait | p->gated << 1);
  for (size_t i = 0; i < p->n; i++) /* a level is below 16, but for the flag of an update row */
    key[i + 1] =
        (uint8_t)((p->rows[i].level & HL_LEVEL_UPDATE) |
                  (p->rows[i].level & ~HL_LEVEL_UPDATE) << 1 | (p->rows[i].mode == HL_EXCLUSIVE));
  return p->n + 1;
}

static void shape_clear(hl__shape *shape) {
  if (shape->statement) (void)mysql_stmt_close(shape->statement);
  memset(shape, 0, sizeof *shape);
}

/* Binds the parameters (the first bucket, the tag, the other buckets, the gate) and the results.
   Nonzero when it fails. The library takes as many of both as the server says that there are. */
static int shape_bind(hl__mysql_session *session, MYSQL_STMT *statement, const hl__part *p) {
  MYSQL_BIND parameters[HL__SHAPE_ROWS_MAX + 2], results[3];
  unsigned columns = p->gated && session->dialect == HL_MYSQL ? 3 : 2;
  if (mysql_stmt_param_count(statement) != p->n + 1 + p->gated ||
      mysql_stmt_field_count(statement) != columns)
    return -1;
  memset(parameters, 0, sizeof parameters);
  memset(results, 0, sizeof results);
  for (size_t i = 0; i < p->n + p->gated; i++) {
    MYSQL_BIND *parameter = &parameters[i ? i + 1 : 0];
    parameter->buffer_type = MYSQL_TYPE_LONG;
    parameter->buffer = &session->buckets[i];
  }
  parameters[1].buffer_type = MYSQL_TYPE_BLOB;
  parameters[1].buffer = session->tag;
  parameters[1].buffer_length = (unsigned long)session->tag_capacity;
  parameters[1].length = &session->tag_size;
  for (int i = 0; i < 3; i++) {
    results[i].buffer_type = MYSQL_TYPE_LONGLONG;
    results[i].buffer = &session->fetched[i];
    results[i].is_unsigned = 1;
  }
  return mysql_stmt_bind_param(statement, parameters) || mysql_stmt_bind_result(statement, results);
}

/* The statement for a shape that comes a second time. NULL when it comes for the first time, or
   cannot be prepared: the caller then sends text. */
static int shape_find(hl__mysql_session *session, const hl__part *p, MYSQL_STMT **statement,
                      hl_error *error) {
  uint8_t key[HL__SHAPE_ROWS_MAX + 1];
  hl__shape *shape = NULL, *oldest = &session->shapes[0];
  *statement = NULL;
  if (p->n > HL__SHAPE_ROWS_MAX || session->unprepared) return HL_OK;
  size_t size = shape_key(p, key);
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
    hl__text t = {0};
    if (session->dialect == HL_MYSQL)
      put_join(&t, session, p, true);
    else
      put_union(&t, session, p, true);
    shape->statement = t.failed ? NULL : mysql_stmt_init(session->mysql);
    if (!shape->statement) {
      free(t.data);
      return hl__error_memory(error);
    }
    if (mysql_stmt_prepare(shape->statement, t.data, (unsigned long)t.used) ||
        shape_bind(session, shape->statement, p)) {
      /* The server may have its limit of prepared statements: we send text, then. */
      int status = hl__mysql_error(session, shape->statement, "prepare", error);
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

/* Notes, after a lock statement, whether the server says that a transaction is open. */
static void transaction_note(hl__mysql_session *session) {
  session->in_transaction = session->mysql->server_status & SERVER_STATUS_IN_TRANS;
}

/* Takes a row of the union: a locked row, or the gate's. */
static void row_came(hl__mysql_session *session, const hl__part *p, unsigned long long token,
                     unsigned long long mark, size_t *count) {
  if (p->gated && *count == p->n && mark == GATE) {
    session->gate = token != 0;
    session->gate_seen = true;
    return;
  }
  (*count)++;
  session->token = token;
  session->read_only = mark;
}

static int execute_prepared(hl__mysql_session *session, MYSQL_STMT *statement, const hl__part *p,
                            size_t *count, hl_error *error) {
  for (size_t i = 0; i < p->n; i++) session->buckets[i] = (int32_t)p->rows[i].bucket;
  if (p->gated) session->buckets[p->n] = (int32_t)p->gate;
  *count = 0;
  if (mysql_stmt_execute(statement)) return hl__mysql_error(session, statement, "lock rows", error);
  int fetched;
  bool joined = session->dialect == HL_MYSQL;
  while ((fetched = mysql_stmt_fetch(statement)) == 0) {
    row_came(session, p, session->fetched[0], session->fetched[1], count);
    if (joined && p->gated) {
      session->gate = session->fetched[2] != 0;
      session->gate_seen = true;
    }
  }
  /* A join's one row says that all rows were there. */
  if (joined && *count == 1) *count = p->n;
  transaction_note(session);
  int status = HL_OK;
  if (fetched != MYSQL_NO_DATA) status = hl__mysql_error(session, statement, "lock rows", error);
  (void)mysql_stmt_free_result(statement);
  return status;
}

/* ---------------------------------------------------- as text, for once */

/* A KILL QUERY that comes between two statements of a text ends the text: the server
   leaves out the others, and reports no error. */
static int text_error(hl__mysql_session *session, hl_error *error) {
  if (mysql_errno(session->mysql) == 0)
    return hl__error(error, HL_CANCELLED,
                     "cannot lock rows: an administrator has ended the request");
  return hl__mysql_error(session, NULL, "lock rows", error);
}

/* Reads the result behind the results of `sets` SETs. When they have succeeded, the session has
   the limits for a wait of `wait`. */
static int text_result(hl__mysql_session *session, unsigned sets, int64_t wait, const hl__part *p,
                       size_t *count, hl_error *error) {
  MYSQL *mysql = session->mysql;
  for (; sets > 0; sets--)
    if (mysql_next_result(mysql) != 0) return text_error(session, error);
  if (wait) {
    session->wait = wait;
    session->brief = false;
  }
  MYSQL_RES *result = mysql_store_result(mysql);
  if (!result) return text_error(session, error);
  MYSQL_ROW row;
  *count = 0;
  while ((row = hl__mysql_row(result, 2)))
    row_came(session, p, row[0] ? strtoull(row[0], NULL, 10) : 0,
             row[1] ? strtoull(row[1], NULL, 10) : 0, count);
  mysql_free_result(result);
  transaction_note(session);
  return HL_OK;
}

/* Reads the result behind the lock statement's: the table's engine. The check has its own limit.
   If it ran out of time, the next request checks. */
static int engine_result(hl__mysql_session *session, hl_error *error) {
  MYSQL_RES *result =
      mysql_next_result(session->mysql) == 0 ? mysql_store_result(session->mysql) : NULL;
  int status = result ? hl__mysql_table_refuse(session, result, error) : text_error(session, error);
  mysql_free_result(result);
  /* Rows of the table were locked just now: a check that sees no table was cut short. */
  return status == HL_TIMEOUT || status == HL_ENOT_PROVISIONED ? HL_OK : status;
}

/* Reads the results of the statements that record a lease. The first tells whether the lease was
   recorded; the answer to the last, COMMIT, that the record stays. */
static int tail_result(hl__mysql_session *session, hl__tail *tail, hl_error *error) {
  for (unsigned i = 0; i < tail->statements; i++) {
    if (mysql_next_result(session->mysql) != 0) return text_error(session, error);
    tail->begun = true;
    if (i == 0) tail->recorded = mysql_affected_rows(session->mysql) == 1;
  }
  return HL_OK;
}

/* wait: the session's new limits, in the same trip; 0: as they are. check: asks for the table's
   engine, too. */
static int execute_text(hl__mysql_session *session, int64_t wait, bool check, const hl__part *p,
                        size_t *count, hl_error *error) {
  hl__text t = {0};
  unsigned sets = 0;
  if (!session->begun) {
    hl__text_put(&t,
                 "SET SESSION TRANSACTION ISOLATION LEVEL %s, READ WRITE;"
                 "SET SESSION autocommit=0;",
                 session->repeatable ? "REPEATABLE READ" : "READ COMMITTED");
    sets += 2;
  }
  if (wait) {
    char limits[160];
    (void)hl__mysql_limits(session, wait, limits, sizeof limits);
    hl__text_put(&t, "SET SESSION %s;", limits);
    sets++;
    session->wait = 0; /* not known, until it has succeeded */
  }
  put_union(&t, session, p, false);
  if (check) {
    char sql[HL__MYSQL_TABLE_SQL];
    (void)hl__mysql_table_sql(session, sql, sizeof sql);
    hl__text_put(&t, ";%s", sql);
  }
  if (p->tail) hl__text_put(&t, ";%s", p->tail->text.data);
  bool sent = !t.failed && mysql_real_query(session->mysql, t.data, (unsigned long)t.used) == 0;
  free(t.data);
  if (t.failed) return hl__error_memory(error);
  if (!sent) return hl__mysql_error(session, NULL, "lock rows", error);
  int status = text_result(session, sets, wait, p, count, error);
  if (status == HL_OK) session->begun = true;
  if (status == HL_OK && check) status = engine_result(session, error);
  if (status == HL_OK && p->tail) status = tail_result(session, p->tail, error);
  return status;
}

/* ------------------------------------------------------------- locking */

bool hl__mysql_check_is_due(const hl__mysql_session *session) {
  return hl__boot_ms() - session->checked >= CHECK_AGAIN_MS;
}

int hl__mysql_execute(hl__mysql_session *session, const hl_request *request, hl__part *p,
                      size_t *count, hl_error *error) {
  MYSQL_STMT *statement = NULL;
  /* Connecting may have taken all the time: the request then still gets a try. */
  p->nowait = p->tail || request->try_once || hl__left_ms(request->deadline) == 0;
  /* Never early: our milliseconds are cut. */
  int64_t left = p->nowait ? HL__TRY_MS : hl__left_ms(request->deadline) + 1;
  /* A try on MySQL has its own limit. On MariaDB the session's limit must only not end the
     NOWAIT: it may be left from a very short wait. */
  bool same = session->wait >= left &&
              (p->nowait || (!session->brief && session->wait - left <= WAIT_SLACK_MS));
  if (p->nowait && session->dialect == HL_MYSQL) same = true;
  bool text_only = !session->begun || !same || p->tail;
  bool check = hl__mysql_check_is_due(session);
  int status = HL_OK;
  session->gate_seen = false;
  hl__sigpipe guard = hl__sigpipe_begin(session);
  hl__mysql_statement_begin(session);
  if (!text_only && !check) status = shape_find(session, p, &statement, error);
  if (status == HL_OK && statement)
    status = execute_prepared(session, statement, p, count, error);
  else if (status == HL_OK)
    status = execute_text(session, same ? 0 : left, check, p, count, error);
  hl__mysql_statement_end(session);
  hl__sigpipe_end(guard, status != HL_OK);
  /* The gate's row is missing: we cannot know whether there are leases. */
  if (status == HL_OK && p->gated && !session->gate_seen) *count = 0;
  return status;
}

bool hl__mysql_tag_reserve(hl__mysql_session *session, size_t room) {
  if (room <= session->tag_capacity) return true;
  char *tag = malloc(room);
  if (!tag) return false;
  hl__sigpipe guard = hl__sigpipe_begin(session);
  for (size_t i = 0; i < HL__SHAPES_MAX; i++) shape_clear(&session->shapes[i]);
  hl__sigpipe_end(guard, true); /* perhaps: the library does not say */
  char *before = session->tag;  /* a child that is born meanwhile frees session->tag */
  session->tag = tag;
  session->tag_capacity = room;
  free(before);
  return true;
}
