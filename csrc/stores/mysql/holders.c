/*
 * holders.c - who holds or awaits a row. Each session says so itself, in @hierlock (tag.c). On
 * MySQL, data_locks says which sessions hold which rows, programs of others included, and
 * @hierlock who they are. MariaDB lists only contended locks; there we go by the open
 * transactions, and by their sessions' tags.
 *
 * Looking costs the server milliseconds: only on demand, and filtered.
 */
#include "mysql_store.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define QUERY_MAX 16384
/* The query asks for so many rows. A caller that asks for more gets the holders of the first. */
#define ASKED_MAX 200

/* Whether a row conflicts with the rows of the filter; without any it does. */
static bool conflicts(const hl_row *rows, size_t n, unsigned level, uint32_t bucket, hl_mode mode) {
  if (n == 0) return true;
  for (size_t i = 0; i < n; i++)
    if (rows[i].level == level && rows[i].bucket == bucket &&
        hl__modes_conflict((hl_mode)rows[i].mode, mode))
      return true;
  return false;
}

/* Whether a row that a session names conflicts with the rows of the filter. */
static bool rows_conflict(const hl_row *rows, size_t n, const char *named) {
  unsigned level;
  uint32_t bucket;
  char mode;
  int used = 0; /* stays 0 when there is no comma */
  while (sscanf(named, "%u.%" SCNu32 "%c,%n", &level, &bucket, &mode, &used) == 3 && used > 0) {
    if (conflicts(rows, n, level, bucket, mode == 's' ? HL_SHARED : HL_EXCLUSIVE)) return true;
    named += used;
    used = 0;
  }
  return false;
}

/* ------------------------------------------------------------ looking */

/* The most time that a query for err.holders may cost the server: its caller's wait has just
   timed out. */
#define HASTE_MS 35

/* Each query has its own limit at the server: a short wait may have left another one to the
   session. */
static int query_run(hl__mysql_session *session, const hl_lease_filter *filter, const char *sql,
                     MYSQL_RES **result, hl_error *error) {
  int64_t ms = filter->most ? HASTE_MS : hl__left_ms(session->patience) + 1;
  hl__text t = {0};
  if (session->dialect == HL_MARIADB)
    hl__text_put(&t, "SET STATEMENT max_statement_time=%d.%03d FOR %s", (int)(ms / 1000),
                 (int)(ms % 1000), sql);
  else
    hl__text_put(&t, "SELECT /*+ MAX_EXECUTION_TIME(%d) */ %s", (int)ms,
                 sql + sizeof "SELECT " - 1);
  int status = hl__mysql_ask(session, &t, result, error);
  if (status != HL_ESTORE || !error) return status;
  hl_error said = *error;
  (void)hl__error(error, status,
                  "the server does not show who holds or waits: %.300s "
                  "(docs/operations.md has the privileges of observers)",
                  mysql_error(session->mysql));
  error->server_errno = said.server_errno;
  memcpy(error->sqlstate, said.sqlstate, sizeof said.sqlstate);
  return status;
}

/* Several lists of the server, fetched by one query and joined here. To join them the server,
   which has no index on them, would need the product of their lengths. */
typedef struct lists {
  MYSQL_RES *result;
  MYSQL_ROW *rows; /* by list and key */
  size_t n;
} lists;

enum { WHICH, KEY, FIRST, SECOND, SINCE, TELLS, COLUMNS };

static uint64_t number(const char *text) { return text ? strtoull(text, NULL, 10) : 0; }

static int by_key(const void *a, const void *b) {
  MYSQL_ROW x = *(const MYSQL_ROW *)a, y = *(const MYSQL_ROW *)b;
  uint64_t m = number(x[KEY]), n = number(y[KEY]);
  return x[WHICH][0] != y[WHICH][0] ? x[WHICH][0] - y[WHICH][0] : (m > n) - (m < n);
}

static int lists_get(hl__mysql_session *session, const hl_lease_filter *filter, const char *sql,
                     lists *self, hl_error *error) {
  MYSQL_ROW row;
  int status = query_run(session, filter, sql, &self->result, error);
  if (status || !self->result) return status;
  size_t n = (size_t)mysql_num_rows(self->result);
  self->rows = malloc((n + 1) * sizeof *self->rows);
  if (!self->rows) return hl__error_memory(error);
  while (self->n < n && (row = hl__mysql_row(self->result, COLUMNS)))
    if (row[WHICH]) self->rows[self->n++] = row;
  qsort(self->rows, self->n, sizeof *self->rows, by_key);
  return HL_OK;
}

static MYSQL_ROW lists_find(const lists *self, char list, char *key) {
  char name[] = {list, '\0'};
  char *columns[] = {name, key};
  MYSQL_ROW wanted = columns, *found = NULL;
  if (key && self->n > 0) found = bsearch(&wanted, self->rows, self->n, sizeof *self->rows, by_key);
  return found ? *found : NULL;
}

static void lists_free(lists *self) {
  free(self->rows);
  mysql_free_result(self->result);
}

static bool is_one(const char *value) { return value && value[0] == '1'; }

/* INNODB_TRX may be 100 ms old; the variables and the sessions' commands are current. So a
   transaction counts only if it had locked or awaited a row then. A transaction that had only
   read, as ours does, may be of a session that locks by now. */
#define TRANSACTIONS                                                                               \
  "SELECT 'T',trx_mysql_thread_id,trx_state='LOCK WAIT',trx_id,"                                   \
  "CAST(UNIX_TIMESTAMP(trx_started)*1000 AS SIGNED),@@performance_schema "                         \
  "FROM information_schema.INNODB_TRX WHERE trx_mysql_thread_id<>CONNECTION_ID() AND "             \
  "(trx_rows_locked>0 OR trx_state='LOCK WAIT')"

/* ------------------------------------------------------------- MariaDB */

/* Calls fn for a session's tag, if it conflicts. A session that executes a statement waits for
   its rows, whatever the older list of transactions says. False: the tag is not of our making. */
static bool tag_tell(char *text, bool waits, const char *id, const hl_lease_filter *filter,
                     hl_holder_fn fn, void *context) {
  hl_holder holder;
  char *named;
  if (!hl__mysql_tag_read(text, &holder, &named)) return false;
  if (filter->n > 0 && !rows_conflict(filter->rows, filter->n, named)) return true;
  holder.waiting = holder.waiting || waits;
  hl__text_take(holder.session, sizeof holder.session, id);
  fn(context, &holder);
  return true;
}

/* Sets *tells: whether the server shows the sessions' variables. */
static int holders_mariadb(hl__mysql_session *session, const hl_lease_filter *filter,
                           hl_holder_fn fn, void *context, bool *tells, hl_error *error) {
  static const char sql[] =
      TRANSACTIONS " UNION ALL SELECT 'P',PROCESSLIST_ID,THREAD_ID,"
                   "PROCESSLIST_COMMAND<>'Sleep',NULL,NULL FROM performance_schema.threads "
                   "WHERE PROCESSLIST_ID>0 UNION ALL SELECT 'V',THREAD_ID,VARIABLE_VALUE,NULL,"
                   "NULL,NULL FROM performance_schema.user_variables_by_thread "
                   "WHERE VARIABLE_NAME='hierlock'";
  lists all = {.n = 0};
  int status = lists_get(session, filter, sql, &all, error);
  for (size_t i = 0; status == HL_OK && i < all.n; i++) {
    MYSQL_ROW one = all.rows[i];
    if (one[WHICH][0] != 'T') continue;
    *tells = is_one(one[TELLS]);
    MYSQL_ROW thread = lists_find(&all, 'P', one[KEY]);
    MYSQL_ROW said = thread ? lists_find(&all, 'V', thread[FIRST]) : NULL;
    if (said && said[FIRST])
      (void)tag_tell(said[FIRST], is_one(one[FIRST]) || is_one(thread[SECOND]), one[KEY], filter,
                     fn, context);
  }
  lists_free(&all);
  return status;
}

/* ------------------------------------------- without performance_schema */

/* A waiter's tag stands in its statement, as @hierlock:=0x... Returns the tag, cut out of the
   statement. NULL: the statement has no tag, or a question mark. */
static char *tag_of_statement(char *sql) {
  static const char mark[] = "@hierlock:=0x";
  char *tag = sql ? strstr(sql, mark) : NULL, *to = tag;
  unsigned byte;
  if (!tag) return NULL;
  for (const char *at = tag + sizeof mark - 1; sscanf(at, "%2x", &byte) == 1 && byte; at += 2)
    *to++ = (char)byte;
  *to = '\0';
  return tag;
}

/* Calls fn for a transaction without a tag, and the row that it waits for, if any. */
static void stranger_tell(MYSQL_ROW one, MYSQL_ROW process, MYSQL_ROW lock,
                          const hl_lease_filter *filter, hl_holder_fn fn, void *context) {
  int level = 0;
  uint32_t bucket = 0;
  hl_holder holder = {.waiting = is_one(one[FIRST])};
  if (lock && lock[FIRST] && lock[SECOND] &&
      sscanf(lock[SECOND], "%d, %" SCNu32, &level, &bucket) == 2) {
    holder.mode = lock[FIRST][0] == 'S' ? HL_SHARED : HL_EXCLUSIVE;
    (void)snprintf(holder.path, sizeof holder.path, "bucket (%d, %" PRIu32 ")", level, bucket);
  }
  /* The transaction may hold other rows of the filter. */
  if (filter->n > 0 &&
      (!holder.mode || !conflicts(filter->rows, filter->n, (uint8_t)level, bucket, holder.mode)))
    return;
  hl__text_take(holder.application, sizeof holder.application, "unknown");
  if (process && process[FIRST]) hl__text_take(holder.host, sizeof holder.host, process[FIRST]);
  holder.host[strcspn(holder.host, ":")] = '\0'; /* the port */
  holder.since_ms = (int64_t)number(one[SINCE]);
  hl__text_take(holder.session, sizeof holder.session, one[KEY] ? one[KEY] : "");
  fn(context, &holder);
}

/* Calls fn for all that can be seen: waiters say in their statements who they are, and MariaDB
   lists the rows that are waited for. *unseen: how many sessions hold other rows. */
static int holders_blind(hl__mysql_session *session, const hl_lease_filter *filter, hl_holder_fn fn,
                         void *context, size_t *unseen, hl_error *error) {
  char sql[1536], rows[512] = "";
  lists all = {.n = 0};
  if (session->dialect == HL_MARIADB)
    (void)snprintf(rows, sizeof rows,
                   " UNION ALL SELECT 'L',lock_trx_id,lock_mode,lock_data,NULL,NULL FROM "
                   "information_schema.INNODB_LOCKS WHERE lock_type='RECORD' AND "
                   "lock_trx_id<>0 AND lock_table=CONCAT('`',DATABASE(),'`.`%s`')",
                   session->store->table);
  (void)snprintf(sql, sizeof sql,
                 TRANSACTIONS " UNION ALL SELECT 'P',ID,HOST,INFO,NULL,NULL FROM "
                              "information_schema.PROCESSLIST%s",
                 rows);
  int status = lists_get(session, filter, sql, &all, error);
  for (size_t i = 0; status == HL_OK && i < all.n; i++) {
    MYSQL_ROW one = all.rows[i];
    if (one[WHICH][0] != 'T') continue;
    MYSQL_ROW process = lists_find(&all, 'P', one[KEY]);
    char *tag = process ? tag_of_statement(process[SECOND]) : NULL;
    if (tag && tag_tell(tag, true, one[KEY], filter, fn, context)) continue;
    (*unseen)++;
    stranger_tell(one, process, lists_find(&all, 'L', one[SECOND]), filter, fn, context);
  }
  lists_free(&all);
  return status;
}

static int blind_error(size_t unseen, hl_error *error) {
  if (unseen == 0) return HL_OK;
  return hl__error(error, HL_EUNSUPPORTED,
                   "performance_schema is off: the server does not show which rows %zu %s; set "
                   "performance_schema=ON in its configuration, and restart it",
                   unseen, unseen == 1 ? "session holds" : "sessions hold");
}

/* --------------------------------------------------------------- MySQL */

static void mysql_sql(const hl__mysql_session *session, const hl_row *rows, size_t n,
                      char sql[QUERY_MAX]) {
  int used = snprintf(sql, QUERY_MAX,
                      "SELECT d.LOCK_DATA,d.LOCK_MODE,d.LOCK_STATUS,t.PROCESSLIST_ID,"
                      "t.PROCESSLIST_HOST,u.VARIABLE_VALUE,"
                      "(SELECT a.ATTR_VALUE FROM performance_schema.session_connect_attrs a "
                      "WHERE a.PROCESSLIST_ID=t.PROCESSLIST_ID AND a.ATTR_NAME='program_name'),"
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
                             i ? "," : " AND d.LOCK_DATA IN (", hl__sql_level(rows[i].level),
                             rows[i].bucket);
  /* The row for which a session waits, if any, comes first of its rows. The last part tells
     whether the server shows anything. */
  (void)snprintf(sql + size, QUERY_MAX - size,
                 "%s UNION ALL SELECT NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,"
                 "@@performance_schema ORDER BY 4,3 DESC",
                 n ? ")" : "");
}

/* A session without a tag: of another program. */
static void stranger_read(MYSQL_ROW row, int level, uint32_t bucket, hl_mode mode,
                          hl_holder *holder) {
  memset(holder, 0, sizeof *holder);
  hl__text_take(holder->application, sizeof holder->application, row[6] ? row[6] : "unknown");
  hl__text_take(holder->host, sizeof holder->host, row[4] ? row[4] : "");
  holder->pid = row[7] ? strtoll(row[7], NULL, 10) : 0;
  (void)snprintf(holder->path, sizeof holder->path, "bucket (%d, %" PRIu32 ")", level, bucket);
  holder->mode = mode;
}

static int holders_mysql(hl__mysql_session *session, const hl_lease_filter *filter, hl_holder_fn fn,
                         void *context, bool *tells, hl_error *error) {
  char sql[QUERY_MAX];
  MYSQL_RES *result = NULL;
  MYSQL_ROW row;
  const hl_row *rows = filter->rows;
  size_t n = filter->n > ASKED_MAX ? ASKED_MAX : filter->n;
  mysql_sql(session, rows, n, sql);
  int status = query_run(session, filter, sql, &result, error);
  if (status) return status;
  char previous[32] = "";
  while ((row = hl__mysql_row(result, 9))) {
    int level;
    uint32_t bucket;
    hl_mode mode = row[1] && row[1][0] == 'S' ? HL_SHARED : HL_EXCLUSIVE;
    const char *id = row[3] ? row[3] : "";
    if (!row[0] && !row[1]) *tells = is_one(row[8]);
    if (!row[0] || sscanf(row[0], "%d, %" SCNu32, &level, &bucket) != 2 ||
        !conflicts(rows, n, (uint8_t)level, bucket, mode) || strcmp(id, previous) == 0)
      continue;
    (void)snprintf(previous, sizeof previous, "%s", id);
    hl_holder holder;
    char *named;
    bool waits = row[2] && strcmp(row[2], "WAITING") == 0;
    if (!row[5] || !hl__mysql_tag_read(row[5], &holder, &named))
      stranger_read(row, level, bucket, mode, &holder);
    else if (is_one(row[8])) /* it may wait for a row outside the filter */
      waits = true;
    holder.waiting = holder.waiting || waits;
    hl__text_take(holder.session, sizeof holder.session, id);
    fn(context, &holder);
  }
  mysql_free_result(result);
  return HL_OK;
}

int hl__mysql_holders(hl__mysql_session *session, const hl_lease_filter *filter, hl_holder_fn fn,
                      void *context, hl_error *error) {
  bool tells = true;
  size_t unseen = 0;
  hl_error said = {.status = HL_OK};
  int status;
  if (session->dialect == HL_MARIADB)
    status = holders_mariadb(session, filter, fn, context, &tells, &said);
  else
    status = holders_mysql(session, filter, fn, context, &tells, &said);
  if (status == HL_OK && !tells)
    status = holders_blind(session, filter, fn, context, &unseen, &said);
  if (status == HL_OK && session->store->leased)
    status = hl__mysql_leases_list(session, filter, fn, context, &said);
  if (status == HL_OK) return blind_error(unseen, error);
  if (error) *error = said;
  return status;
}
