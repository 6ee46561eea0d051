/*
 * holders.c - finds the holders and waiters of a row. A session describes itself in a comment
 * (tag.c) in front of the statements that it sends while it waits or holds; other sessions read it
 * in pg_stat_activity. pg_locks says which sessions hold or await which keys, with those of other
 * programs. Only members of pg_read_all_stats see the statements of other roles: without that, only
 * the application_name of such a session is known.
 */
#include "postgresql_store.h"

#include "mode.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define QUERY_MAX 16384
/* The most rows in a query; a request with more is told about the first ones. */
#define ASKED_MAX 400

/* ------------------------------------------------------------ the locks */

/* The time for a query for err.holders: its caller has already waited for nothing. */
#define HASTE_MS 35

enum { BACKEND, MODE, GRANTED, KEY, APPLICATION, HOST, QUERY, SINCE, WAITS, COLUMNS };

/* Whether a lock of that key and mode conflicts with one of the rows. n 0: it always does. */
static bool conflicts(const hl_row *rows, size_t n, int64_t key, hl_mode mode) {
  if (n == 0) return true;
  for (size_t i = 0; i < n; i++)
    if (hl__pg_key(rows[i].level, rows[i].bucket) == key &&
        hl__modes_conflict((hl_mode)rows[i].mode, mode))
      return true;
  return false;
}

/* Lists for each session the row that it waits for first. The functions are those
   under the views pg_locks and pg_stat_activity, and show the same. The views also join catalogs
   that are not needed here, which makes a query three times as long. The time may end just after
   the last row, as in statement.c, or within the statement that lifts the limit. The server says so
   before its next statement: so one follows. Else it would end the next request of this session. */
static void holders_sql(const hl_row *rows, size_t n, int ms, char sql[QUERY_MAX]) {
  static const char key[] = "((l.classid::int8<<32)|l.objid::int8)";
  int used =
      snprintf(sql, QUERY_MAX,
               "SET LOCAL statement_timeout=%d;SELECT l.pid,l.mode,l.granted,%s,a.application_name,"
               "host(a.client_addr),a.query,"
               "(extract(epoch FROM a.xact_start)*1000)::int8,"
               "a.wait_event_type='Lock' AND a.wait_event='advisory' "
               "FROM pg_lock_status() l "
               "LEFT JOIN pg_stat_get_activity(NULL) a ON a.pid=l.pid "
               "WHERE l.locktype='advisory' AND l.objsubid=1 AND l.pid<>pg_backend_pid()"
               " AND l.database=(SELECT d.oid FROM pg_database d WHERE "
               "d.datname=current_database())",
               ms, key);
  for (size_t i = 0; i < n; i++)
    used += snprintf(sql + used, QUERY_MAX - (size_t)used, "%s%s%s'%" PRId64 "'", i ? "" : " AND ",
                     i ? "" : key, i ? "," : " IN (", hl__pg_key(rows[i].level, rows[i].bucket));
  (void)snprintf(sql + used, QUERY_MAX - (size_t)used,
                 "%s ORDER BY l.pid,l.granted;SET LOCAL statement_timeout=0;"
                 "SET LOCAL statement_timeout=0",
                 n ? ")" : "");
}

static void text_take(char *out, size_t size, const char *text) {
  if (text) (void)hl__escape(out, size, text, strlen(text));
}

/* Describes a session that does not describe itself, or not to this role. */
static void stranger_read(const PGresult *result, int row, hl_mode mode, hl_holder *holder) {
  const char *since = hl__pg_field(result, row, SINCE);
  const char *application = hl__pg_field(result, row, APPLICATION);
  memset(holder, 0, sizeof *holder);
  text_take(holder->application, sizeof holder->application,
            application && *application ? application : "unknown");
  text_take(holder->host, sizeof holder->host, hl__pg_field(result, row, HOST));
  (void)snprintf(holder->path, sizeof holder->path,
                 "advisory lock %.24s of the server's process %.16s",
                 hl__pg_field(result, row, KEY), hl__pg_field(result, row, BACKEND));
  holder->mode = mode;
  holder->since_ms = since ? strtoll(since, NULL, 10) : 0;
}

int hl__pg_holders(hl__pg_session *session, const hl_lease_filter *filter, hl_holder_fn fn,
                   void *context, hl_error *error) {
  char sql[QUERY_MAX], previous[32] = "";
  PGresult *result;
  const hl_row *rows = filter->rows;
  size_t n = filter->n > ASKED_MAX ? ASKED_MAX : filter->n;
  int64_t ms = filter->most ? HASTE_MS : hl__left_ms(session->patience) + 1;
  holders_sql(rows, n, (int)ms, sql);
  int status = hl__pg_query(session, sql, COLUMNS, &result, error);
  if (status == HL_CANCELLED)
    status = hl__error(error, HL_TIMEOUT, "the server did not tell in time");
  if (status) return status;
  for (int i = 0; i < PQntuples(result); i++) {
    const char *backend = hl__pg_field(result, i, BACKEND);
    const char *shown = hl__pg_field(result, i, MODE);
    const char *granted = hl__pg_field(result, i, GRANTED);
    const char *key = hl__pg_field(result, i, KEY);
    if (!backend || !shown || !granted || !key) continue;
    hl_mode mode = *shown == 'S' ? HL_SHARED : HL_EXCLUSIVE;
    if (strcmp(backend, previous) == 0 || !conflicts(rows, n, strtoll(key, NULL, 10), mode))
      continue;
    (void)snprintf(previous, sizeof previous, "%s", backend);
    hl_holder holder;
    if (!hl__pg_tag_read(hl__pg_field(result, i, QUERY), &holder))
      stranger_read(result, i, mode, &holder);
    /* The session may wait for a key that is not ours. */
    const char *waits = hl__pg_field(result, i, WAITS);
    if (*granted == 'f' || (waits && *waits == 't')) holder.waiting = true;
    text_take(holder.session, sizeof holder.session, backend);
    fn(context, &holder);
  }
  PQclear(result);
  return hl__pg_lease_holders(session, filter, fn, context, error);
}
