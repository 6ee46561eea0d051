/*
 * holders.c - who holds or awaits a row. Each session says so itself, in a comment in
 * front of whatever it sends while it waits or holds, which others see in
 * pg_stat_activity:
 *
 *     (slash)*hierlock1|since|pid|mode|application|host|label|path*(slash)
 *
 * in ASCII: all other bytes, and the characters that mean something here, are written as
 * %XX. The mode is "s" or "x", with a "w" behind it while the session has the locks, and waits
 * for a lease. pg_locks says which sessions hold or await which keys, programs of others
 * included. Statements of other roles are shown only to members of pg_read_all_stats:
 * without that, a session's application_name is all that is known of it.
 */
#include "postgresql_store.h"

#include "mode.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BEGINNING "/*hierlock1|"
#define FIELDS 7
#define QUERY_MAX 16384
/* As many rows are asked for; whoever asks for more gets those of the first. */
#define ASKED_MAX 400
/* Bytes of the encoded fields; with numbers and separators, less than HL__PG_TAG_MAX. */
#define NAME_MAX_BYTES 120
#define LABEL_MAX_BYTES 220
#define PATH_MAX_BYTES 400

/* -------------------------------------------------------------- the tag */

static bool is_plain(unsigned char c) {
  return c >= ' ' && c < 0x7F && c != '%' && c != '|' && c != '*';
}

/* By hand: it is written for every acquisition. At most size bytes, and only whole
   characters. */
static char *put_field(char *at, size_t size, const char *text) {
  static const char digits[] = "0123456789ABCDEF";
  char *end = at + size, *whole = at;
  for (; *text; text++) {
    unsigned char c = (unsigned char)*text;
    if ((c & 0xC0) != 0x80) whole = at; /* else it goes on a character */
    if (at + (is_plain(c) ? 1 : 3) > end) return whole;
    if (is_plain(c)) {
      *at++ = (char)c;
    } else {
      *at++ = '%';
      *at++ = digits[c >> 4];
      *at++ = digits[c & 15];
    }
  }
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

void hl__pg_tag(const hl__pg_session *session, const hl_request *request,
                char tag[HL__PG_TAG_MAX]) {
  const hl_store_config *config = session->store->config;
  char label[128] = "";
  if (request->label_size)
    (void)hl__escape(label, sizeof label, request->label, request->label_size);
  char *at = stpcpy(tag, BEGINNING);
  at = put_number(at, (uint64_t)hl__unix_ms());
  *at++ = '|';
  at = put_number(at, (uint64_t)config->pid);
  *at++ = '|';
  *at++ = hl__mode_letter(request->mode);
  *at++ = '|';
  at = put_field(at, NAME_MAX_BYTES, config->application);
  *at++ = '|';
  at = put_field(at, NAME_MAX_BYTES, config->host);
  *at++ = '|';
  at = put_field(at, LABEL_MAX_BYTES, label);
  *at++ = '|';
  at = put_field(at, PATH_MAX_BYTES, request->path);
  (void)stpcpy(at, "*/");
}

void hl__pg_tag_waits(char tag[HL__PG_TAG_MAX]) {
  char *mode = strchr(strchr(tag + strlen(BEGINNING), '|') + 1, '|') + 1;
  size_t rest = strlen(mode + 1) + 1;
  if (mode + 2 + rest > tag + HL__PG_TAG_MAX) return;
  memmove(mode + 2, mode + 1, rest);
  mode[1] = 'w';
}

static int hex_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

/* Whoever has a connection can say anything of himself. Decodes in place. */
static void field_take(char *out, size_t size, char *field) {
  char *end = field;
  for (const char *in = field; *in; in++) {
    int high = *in == '%' ? hex_value(in[1]) : -1;
    int low = high < 0 ? -1 : hex_value(in[2]);
    if (low < 0) {
      *end++ = *in;
    } else {
      *end++ = (char)(unsigned char)(high * 16 + low);
      in += 2;
    }
  }
  (void)hl__escape(out, size, field, (size_t)(end - field));
}

/* What a session says of itself. False: it is not of our making. A server may have cut
   it. */
static bool tag_read(const char *query, hl_holder *holder) {
  char text[2048], *fields[FIELDS];
  if (!query || strncmp(query, BEGINNING, strlen(BEGINNING)) != 0) return false;
  (void)snprintf(text, sizeof text, "%s", query + strlen(BEGINNING));
  char *end = strstr(text, "*/"), *rest = text;
  if (end) *end = '\0';
  for (int i = 0; i < FIELDS; i++) {
    fields[i] = rest ? strsep(&rest, "|") : text + strlen(text);
  }
  memset(holder, 0, sizeof *holder);
  holder->since_ms = strtoll(fields[0], NULL, 10);
  holder->pid = strtoll(fields[1], NULL, 10);
  holder->mode = hl__mode_of_letter(*fields[2]);
  holder->waiting = *fields[2] && fields[2][1] == 'w';
  field_take(holder->application, sizeof holder->application, fields[3]);
  field_take(holder->host, sizeof holder->host, fields[4]);
  field_take(holder->label, sizeof holder->label, fields[5]);
  field_take(holder->path, sizeof holder->path, fields[6]);
  return true;
}

/* ------------------------------------------------------------ the locks */

/* What a look for err.holders may cost the server: its caller waited in vain already. */
#define HASTE_MS 35

enum {
  BACKEND,
  MODE,
  GRANTED,
  KEY,
  APPLICATION,
  HOST,
  QUERY,
  SINCE,
  WAITS,
  COLUMNS
};

/* With no rows of ours, all do. */
static bool conflicts(const hl_row *rows, size_t n, int64_t key, hl_mode mode) {
  if (n == 0) return true;
  for (size_t i = 0; i < n; i++)
    if (hl__pg_key(rows[i].level, rows[i].bucket) == key &&
        hl__modes_conflict((hl_mode)rows[i].mode, mode))
      return true;
  return false;
}

/* Of one session, the row that it waits for, if any, comes first. The functions are
   those below the views pg_locks and pg_stat_activity, and show what these show: the
   views join catalogs that nothing here needs, which makes a look three times as long. */
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
  (void)snprintf(sql + used, QUERY_MAX - (size_t)used, "%s ORDER BY l.pid,l.granted", n ? ")" : "");
}

static void text_take(char *out, size_t size, const char *text) {
  if (text) (void)hl__escape(out, size, text, strlen(text));
}

/* A session that does not say who it is, or not to us. */
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
    if (!tag_read(hl__pg_field(result, i, QUERY), &holder)) stranger_read(result, i, mode, &holder);
    /* The key that it waits for may be none of ours. */
    const char *waits = hl__pg_field(result, i, WAITS);
    if (*granted == 'f' || (waits && *waits == 't')) holder.waiting = true;
    text_take(holder.session, sizeof holder.session, backend);
    fn(context, &holder);
  }
  PQclear(result);
  return hl__pg_lease_holders(session, filter, fn, context, error);
}
