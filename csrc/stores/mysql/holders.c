/*
 * holders.c - who holds or awaits a row. Each session says so itself, in its user
 * variable @hierlock, which others see in performance_schema:
 *
 *     2 SEP since SEP application SEP host SEP pid SEP mode SEP path SEP label
 *     SEP rows
 *
 * with SEP the byte 0x1F, and rows such as "0.3142546s,2.185732x,"; a "w" behind them
 * says that a lease is waited for, and that the rows are only locked meanwhile. On MySQL,
 * data_locks says which sessions hold which rows, programs of others included,
 * and @hierlock who they are. MariaDB lists only contended locks; there we go by
 * the transactions that are open, and by what they say of themselves.
 *
 * Looking costs the server milliseconds: only on demand, and filtered.
 */
#include "mysql_store.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SEPARATOR "\x1f"
#define FIELDS 9
#define LABEL_MAX 128
#define ROW_MAX 16 /* "15.2147483647x," */
#define NUMBERS_MAX 64 /* time, pid, mode and separators */
#define QUERY_MAX 16384
/* As many rows are asked for; whoever asks for more gets those of the first. */
#define ASKED_MAX 200

/* By hand: it is written for every acquisition, and printf took a tenth of the
   client's time. The caller sees to the room. */
static char *put_text(char *at, const char *text) {
  while (*text) *at++ = *text++;
  return at;
}

static char *put_number(char *at, uint64_t number) {
  char digits[20];
  int n = 0;
  do digits[n++] = (char)('0' + number % 10);
  while (number /= 10);
  while (n > 0) *at++ = digits[--n];
  return at;
}


size_t hl__mysql_tag_room(const hl__mysql_session *session,
                          const hl_request *request) {
  const hl_store_config *config = session->store->config;
  size_t room = NUMBERS_MAX + strlen(config->application) +
                strlen(config->host) + strlen(request->path) + LABEL_MAX;
  if (request->shown_n > (HL__TAG_MAX - room) / ROW_MAX) return HL__TAG_MAX;
  return room + request->shown_n * ROW_MAX;
}

void hl__mysql_tag(hl__mysql_session *session, const hl_request *request) {
  const hl_store_config *config = session->store->config;
  char *at = put_text(session->tag, "2" SEPARATOR);
  at = put_number(at, (uint64_t)hl__unix_ms());
  *at++ = SEPARATOR[0];
  at = put_text(at, config->application);
  *at++ = SEPARATOR[0];
  at = put_text(at, config->host);
  *at++ = SEPARATOR[0];
  at = put_number(at, (uint64_t)config->pid);
  *at++ = SEPARATOR[0];
  *at++ = hl__mode_letter(request->mode);
  *at++ = SEPARATOR[0];
  at = put_text(at, request->path);
  *at++ = SEPARATOR[0];
  at += hl__escape(at, LABEL_MAX, request->label ? request->label : "",
                   request->label_size);
  *at++ = SEPARATOR[0];
  const char *end = session->tag + session->tag_capacity - ROW_MAX;
  for (size_t i = 0; i < request->shown_n && at <= end; i++) {
    at = put_number(at, request->shown[i].level);
    *at++ = '.';
    at = put_number(at, request->shown[i].bucket);
    *at++ = hl__mode_letter((hl_mode)request->shown[i].mode);
    *at++ = ',';
  }
  session->tag_size = (unsigned long)(at - session->tag);
}

void hl__mysql_put_waiting(hl__text *t, const hl__mysql_session *session,
                           bool waiting) {
  hl__text_put(t, "SET @hierlock=");
  hl__text_hex(t, session->tag, session->tag_size);
  if (waiting) hl__text_put(t, "77");
}

static bool tag_waits(const char *rows) {
  size_t n = strlen(rows);
  return n > 0 && rows[n - 1] == 'w';
}

/* Whoever has a connection can say anything of himself. */
static void text_take(char *out, size_t size, const char *text) {
  (void)hl__escape(out, size, text, strlen(text));
}

/* What a session says of itself; the fields point into its text, which is cut
   up. False: it is not of our making. */
static bool tag_read(char *text, hl_holder *holder, char **rows) {
  char *fields[FIELDS];
  for (int i = 0; i < FIELDS; i++) {
    if (!text) return false;
    fields[i] = text;
    text = strchr(text, SEPARATOR[0]);
    if (text) *text++ = '\0';
  }
  if (strcmp(fields[0], "2") != 0) return false;
  memset(holder, 0, sizeof *holder);
  holder->since_ms = strtoll(fields[1], NULL, 10);
  text_take(holder->application, sizeof holder->application, fields[2]);
  text_take(holder->host, sizeof holder->host, fields[3]);
  holder->pid = strtoll(fields[4], NULL, 10);
  holder->mode = hl__mode_of_letter(fields[5][0]);
  text_take(holder->path, sizeof holder->path, fields[6]);
  text_take(holder->label, sizeof holder->label, fields[7]);
  *rows = fields[8];
  return true;
}

/* With no rows of ours, all do. */
static bool conflicts(const hl_row *rows, size_t n, unsigned level,
                      uint32_t bucket, hl_mode mode) {
  if (n == 0) return true;
  for (size_t i = 0; i < n; i++)
    if (rows[i].level == level && rows[i].bucket == bucket &&
        hl__modes_conflict((hl_mode)rows[i].mode, mode))
      return true;
  return false;
}

/* Whether any of the rows that a session names conflicts with ours. */
static bool rows_conflict(const hl_row *rows, size_t n, const char *named) {
  unsigned level;
  uint32_t bucket;
  char mode;
  int used = 0; /* stays so when there is no comma */
  while (sscanf(named, "%u.%" SCNu32 "%c,%n", &level, &bucket, &mode,
                &used) == 3 &&
         used > 0) {
    if (conflicts(rows, n, level, bucket,
                  mode == 's' ? HL_SHARED : HL_EXCLUSIVE))
      return true;
    named += used;
    used = 0;
  }
  return false;
}

/* ------------------------------------------------------------- MariaDB */

/* INNODB_TRX may be 100 ms old, while the variables and the sessions' commands are
   not. So a transaction counts only if it had locked or awaited a row then, and
   not one that has only looked, as we do here, and whose session locks by now. A
   session that executes something now waits for its rows, whatever it did then. */
static int holders_mariadb(hl__mysql_session *session, const hl_row *rows,
                           size_t n, hl_holder_fn fn, void *context,
                           hl_error *error) {
  static const char sql[] =
      "SELECT u.VARIABLE_VALUE,"
      "x.trx_state='LOCK WAIT' OR t.PROCESSLIST_COMMAND<>'Sleep',"
      "t.PROCESSLIST_ID "
      "FROM information_schema.INNODB_TRX x "
      "JOIN performance_schema.threads t ON t.PROCESSLIST_ID="
      "x.trx_mysql_thread_id "
      "JOIN performance_schema.user_variables_by_thread u ON "
      "u.THREAD_ID=t.THREAD_ID AND u.VARIABLE_NAME='hierlock' "
      "WHERE t.PROCESSLIST_ID<>CONNECTION_ID() AND "
      "(x.trx_rows_locked>0 OR x.trx_state='LOCK WAIT')";
  MYSQL_RES *result;
  MYSQL_ROW row;
  int status = hl__mysql_query(session, sql, sizeof sql - 1, &result, error);
  if (status) return status;
  while ((row = hl__mysql_row(result, 3))) {
    hl_holder holder;
    char *named;
    if (!row[0] || !tag_read(row[0], &holder, &named) ||
        (n > 0 && !rows_conflict(rows, n, named)))
      continue;
    holder.waiting = (row[1] && row[1][0] == '1') || tag_waits(named);
    text_take(holder.session, sizeof holder.session, row[2] ? row[2] : "");
    fn(context, &holder);
  }
  mysql_free_result(result);
  return HL_OK;
}

/* --------------------------------------------------------------- MySQL */

static size_t mysql_sql(const hl__mysql_session *session, const hl_row *rows,
                        size_t n, char sql[QUERY_MAX]) {
  int used = snprintf(
      sql, QUERY_MAX,
      "SELECT d.LOCK_DATA,d.LOCK_MODE,d.LOCK_STATUS,t.PROCESSLIST_ID,"
      "t.PROCESSLIST_HOST,u.VARIABLE_VALUE,"
      "(SELECT a.ATTR_VALUE FROM performance_schema.session_connect_attrs a "
      "WHERE a.PROCESSLIST_ID=t.PROCESSLIST_ID AND "
      "a.ATTR_NAME='program_name'),"
      "(SELECT a.ATTR_VALUE FROM performance_schema.session_connect_attrs a "
      "WHERE a.PROCESSLIST_ID=t.PROCESSLIST_ID AND a.ATTR_NAME='_pid'),"
      "t.PROCESSLIST_COMMAND IN ('Query','Execute') "
      "FROM performance_schema.data_locks d "
      "LEFT JOIN performance_schema.threads t ON t.THREAD_ID=d.THREAD_ID "
      "LEFT JOIN performance_schema.user_variables_by_thread u ON "
      "u.THREAD_ID=d.THREAD_ID AND u.VARIABLE_NAME='hierlock' "
      "WHERE d.OBJECT_SCHEMA=DATABASE() AND d.OBJECT_NAME='%s' AND "
      "d.LOCK_TYPE='RECORD' AND NOT t.PROCESSLIST_ID<=>CONNECTION_ID()",
      session->store->table);
  size_t size = (size_t)used;
  for (size_t i = 0; i < n; i++)
    size += (size_t)snprintf(sql + size, QUERY_MAX - size, "%s'%d, %" PRIu64 "'",
                             i ? "," : " AND d.LOCK_DATA IN (",
                             hl__sql_level(rows[i].level), rows[i].bucket);
  /* Of one session, the row that it waits for, if any, comes first. */
  size += (size_t)snprintf(sql + size, QUERY_MAX - size,
                           "%s ORDER BY t.PROCESSLIST_ID,d.LOCK_STATUS DESC",
                           n ? ")" : "");
  return size;
}

/* A session that does not say who it is: another program's. */
static void stranger_read(MYSQL_ROW row, int level, uint32_t bucket,
                          hl_mode mode, hl_holder *holder) {
  memset(holder, 0, sizeof *holder);
  text_take(holder->application, sizeof holder->application,
            row[6] ? row[6] : "unknown");
  text_take(holder->host, sizeof holder->host, row[4] ? row[4] : "");
  holder->pid = row[7] ? strtoll(row[7], NULL, 10) : 0;
  (void)snprintf(holder->path, sizeof holder->path, "bucket (%d, %" PRIu32 ")",
                 level, bucket);
  holder->mode = mode;
}

static int holders_mysql(hl__mysql_session *session, const hl_row *rows,
                         size_t n, hl_holder_fn fn, void *context,
                         hl_error *error) {
  char sql[QUERY_MAX];
  MYSQL_RES *result;
  MYSQL_ROW row;
  if (n > ASKED_MAX) n = ASKED_MAX;
  size_t size = mysql_sql(session, rows, n, sql);
  int status = hl__mysql_query(session, sql, size, &result, error);
  if (status) return status;
  char previous[32] = "";
  while ((row = hl__mysql_row(result, 9))) {
    int level;
    uint32_t bucket;
    hl_mode mode = row[1] && row[1][0] == 'S' ? HL_SHARED : HL_EXCLUSIVE;
    const char *id = row[3] ? row[3] : "";
    if (!row[0] || sscanf(row[0], "%d, %" SCNu32, &level, &bucket) != 2 ||
        !conflicts(rows, n, (uint8_t)level, bucket, mode) || strcmp(id, previous) == 0)
      continue;
    (void)snprintf(previous, sizeof previous, "%s", id);
    hl_holder holder;
    char *named;
    bool waits = row[2] && strcmp(row[2], "WAITING") == 0;
    if (!row[5] || !tag_read(row[5], &holder, &named))
      stranger_read(row, level, bucket, mode, &holder);
    else /* the row that it waits for may be none of ours */
      waits = waits || (row[8] && row[8][0] == '1') || tag_waits(named);
    holder.waiting = waits;
    text_take(holder.session, sizeof holder.session, id);
    fn(context, &holder);
  }
  mysql_free_result(result);
  return HL_OK;
}

int hl__mysql_holders(hl__mysql_session *session, const hl_row *rows, size_t n,
                      hl_holder_fn fn, void *context, hl_error *error) {
  int status = session->dialect == HL_MARIADB
                   ? holders_mariadb(session, rows, n, fn, context, error)
                   : holders_mysql(session, rows, n, fn, context, error);
  if (status || !session->store->leased) return status;
  const hl_lease_filter filter = {.rows = rows, .n = n};
  return hl__mysql_leases_list(session, &filter, fn, context, error);
}
