/*
 * record.c - a record of a lease: how it is written and read; its time.
 */
#include "sqlite_store.h"

#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------- rows */

int64_t hl__sqlite_rows_at(const uint8_t *packed, size_t i, bool *exclusive) {
  const uint8_t *row = packed + i * HL__SQLITE_ROW_SIZE;
  uint64_t key = 0;
  for (int byte = 8; byte-- > 0;) key = key << 8 | row[byte];
  *exclusive = row[8] != 0;
  return (int64_t)key;
}

/* ------------------------------------------------------------------- time */

void hl__sqlite_until(const hl__sqlite_store *store, int64_t now, int64_t ttl,
                      hl__sqlite_end_time *end) {
  memcpy(end->boot, store->boot, sizeof end->boot);
  end->till = hl__deadline(now, ttl);
  end->till_unix = hl__deadline(hl__unix_ms(), ttl);
}

int64_t hl__sqlite_over(const hl__sqlite_store *store, const hl__sqlite_end_time *end) {
  bool same = memcmp(end->boot, store->boot, sizeof end->boot) == 0;
  return same ? hl__between_ms(end->till, hl__boot_ms())
              : hl__between_ms(end->till_unix, hl__unix_ms());
}

int64_t hl__sqlite_left(const hl__sqlite_store *store, const hl__sqlite_end_time *end) {
  int64_t over = hl__sqlite_over(store, end);
  if (over >= 0) return 0;
  /* Whatever is written there. */
  return over > -HL_TTL_MAX ? -over : HL_TTL_MAX;
}

void hl__sqlite_bind_end(sqlite3_stmt *statement, int first, const hl__sqlite_end_time *end) {
  (void)sqlite3_bind_blob(statement, first, end->boot, sizeof end->boot, SQLITE_STATIC);
  (void)sqlite3_bind_int64(statement, first + 1, end->till);
  (void)sqlite3_bind_int64(statement, first + 2, end->till_unix);
}

void hl__sqlite_column_end(sqlite3_stmt *statement, int first, hl__sqlite_end_time *end) {
  memset(end, 0, sizeof *end);
  const void *boot = sqlite3_column_blob(statement, first);
  if (boot && sqlite3_column_bytes(statement, first) == sizeof end->boot)
    memcpy(end->boot, boot, sizeof end->boot);
  end->till = sqlite3_column_int64(statement, first + 1);
  end->till_unix = sqlite3_column_int64(statement, first + 2);
}

void hl__sqlite_column_text(sqlite3_stmt *statement, int column, char *out, size_t size) {
  const unsigned char *text = sqlite3_column_text(statement, column);
  int n = sqlite3_column_bytes(statement, column);
  out[0] = '\0';
  if (text && n > 0) (void)hl__escape(out, size, (const char *)text, (size_t)n);
}

/* -------------------------------------------------------------- recording */

int hl__sqlite_row_run(hl__sqlite_session *session, hl__sqlite_number statement, int64_t key,
                       bool exclusive, int64_t number) {
  sqlite3_stmt *it = hl__sqlite_statement_of(session, statement, key);
  (void)sqlite3_bind_int(it, 2, exclusive);
  (void)sqlite3_bind_int64(it, 3, number);
  return hl__sqlite_run(session, it);
}

static int rows_add(hl__sqlite_session *session, hl__sqlite_number statement, const hl_row *rows,
                    size_t n, int64_t number) {
  int code = SQLITE_OK;
  for (size_t i = 0; i < n && code == SQLITE_OK; i++)
    code = hl__sqlite_row_run(session, statement, hl__sqlite_key(&rows[i]),
                              rows[i].mode != HL_SHARED, number);
  return code;
}

/* The packed rows in that column, where a statement stands; *size: bytes. */
static const void *rows_of(sqlite3_stmt *at, int column, size_t *size) {
  const void *rows = sqlite3_column_blob(at, column);
  *size = rows ? (size_t)sqlite3_column_bytes(at, column) : 0;
  return rows;
}

/* Deletes these rows of the number in the first column. */
static int rows_delete(hl__sqlite_session *session, hl__sqlite_number statement, sqlite3_stmt *at,
                       int column) {
  int code = SQLITE_OK;
  size_t size;
  const uint8_t *packed = rows_of(at, column, &size);
  for (size_t i = 0; i < size / HL__SQLITE_ROW_SIZE && code == SQLITE_OK; i++) {
    bool exclusive;
    int64_t key = hl__sqlite_rows_at(packed, i, &exclusive);
    code = hl__sqlite_row_run(session, statement, key, exclusive, sqlite3_column_int64(at, 0));
  }
  return code;
}

static void bind_text(sqlite3_stmt *it, int number, const char *text) {
  (void)sqlite3_bind_text(it, number, text, -1, SQLITE_STATIC);
}

static void bind_bytes(sqlite3_stmt *it, int number, const uint8_t bytes[16]) {
  (void)sqlite3_bind_blob(it, number, bytes, 16, SQLITE_STATIC);
}

/* SQLite's code. */
static int bind_rows(sqlite3_stmt *it, int number, const hl_row *rows, size_t n) {
  size_t size = n * HL__SQLITE_ROW_SIZE;
  if (!it) return SQLITE_OK; /* running it says why */
  uint8_t *packed = sqlite3_malloc64(size);
  if (!packed) return SQLITE_NOMEM;
  uint8_t *out = packed;
  for (size_t i = 0; i < n; i++) {
    uint64_t key = (uint64_t)hl__sqlite_key(&rows[i]);
    for (int byte = 0; byte < 8; byte++) *out++ = (uint8_t)(key >> 8 * byte);
    *out++ = rows[i].mode != HL_SHARED;
  }
  return sqlite3_bind_blob64(it, number, packed, size, sqlite3_free);
}

/* Who asks for what, from the second value on: in records and tickets. As bind_rows. */
static int bind_request(hl__sqlite_session *session, sqlite3_stmt *it, const hl_request *request) {
  const hl_store_config *config = session->store->config;
  (void)hl__escape(session->label, sizeof session->label, request->label, request->label_size);
  (void)sqlite3_bind_int(it, 3, hl__sqlite_mode(request->mode));
  bind_text(it, 4, request->path);
  bind_text(it, 5, session->label);
  bind_text(it, 6, config->application);
  bind_text(it, 7, config->host);
  (void)sqlite3_bind_int64(it, 8, config->pid);
  (void)sqlite3_bind_int64(it, 9, hl__unix_ms());
  return bind_rows(it, 2, request->rows, request->n);
}

int hl__sqlite_record_add(hl__sqlite_session *session, const hl_request *request, int64_t number,
                          int64_t now) {
  const hl_lease_terms *terms = request->lease;
  hl__sqlite_end_time end;
  sqlite3_stmt *it = hl__sqlite_statement_of(session, HL__SQLITE_ADD_LEASE, number);
  int code = bind_request(session, it, request);
  hl__sqlite_until(session->store, now, terms->ttl, &end);
  bind_bytes(it, 10, terms->id);
  bind_bytes(it, 11, terms->secret);
  bind_bytes(it, 12, terms->holder);
  hl__sqlite_bind_end(it, 13, &end);
  bind_text(it, 16, terms->owner);
  if (code == SQLITE_OK) code = hl__sqlite_run(session, it);
  if (code != SQLITE_OK) return code;
  return rows_add(session, HL__SQLITE_ADD_ROW, request->rows, request->n, number);
}

int hl__sqlite_record_delete(hl__sqlite_session *session, sqlite3_stmt *record, bool whole) {
  int code = rows_delete(session, HL__SQLITE_DELETE_ROW, record, HL__COLUMN_ROWS);
  if (code != SQLITE_OK || !whole) return code;
  return hl__sqlite_run(session, hl__sqlite_statement_of(session, HL__SQLITE_DELETE_LEASE,
                                                         sqlite3_column_int64(record, 0)));
}

int hl__sqlite_rows_free(hl__sqlite_session *session, sqlite3_stmt *record) {
  hl__sqlite_rows *self = &session->freed;
  size_t size;
  const void *rows = rows_of(record, HL__COLUMN_ROWS, &size);
  uint8_t *grown = realloc(self->packed, self->size + size + 1);
  if (!grown) return SQLITE_NOMEM;
  self->packed = grown;
  if (size > 0) memcpy(grown + self->size, rows, size);
  self->size += size;
  return SQLITE_OK;
}

int hl__sqlite_ticket_add(hl__sqlite_session *session, const hl_request *request, int64_t ticket) {
  sqlite3_stmt *it = hl__sqlite_statement_of(session, HL__SQLITE_ADD_WAITER, ticket);
  int code = bind_request(session, it, request);
  if (code == SQLITE_OK) code = hl__sqlite_run(session, it);
  if (code != SQLITE_OK) return code;
  return rows_add(session, HL__SQLITE_ADD_WAIT, request->rows, request->n, ticket);
}

int hl__sqlite_ticket_delete(hl__sqlite_session *session, int64_t ticket) {
  sqlite3_stmt *it = hl__sqlite_statement_of(session, HL__SQLITE_GET_WAITER, ticket);
  int code = hl__sqlite_step(session, it);
  if (code == SQLITE_ROW) code = rows_delete(session, HL__SQLITE_DELETE_WAIT, it, 1);
  code = hl__sqlite_reset(it, code);
  if (code != SQLITE_OK) return code;
  hl__sqlite_beat_clear(session, ticket);
  return hl__sqlite_run(session,
                        hl__sqlite_statement_of(session, HL__SQLITE_DELETE_WAITER, ticket));
}

/* ------------------------------------------------------------- one record */

bool hl__sqlite_is_bytes(sqlite3_stmt *it, int column, const uint8_t bytes[16]) {
  const void *blob = sqlite3_column_blob(it, column);
  return blob && sqlite3_column_bytes(it, column) == 16 && memcmp(blob, bytes, 16) == 0;
}

int hl__sqlite_judge(sqlite3_stmt *it, int code, hl__record *record, hl_error *error) {
  char by[64] = "", reason[128] = "";
  record->there = code == SQLITE_ROW;
  record->revoked = record->there && sqlite3_column_int(it, HL__COLUMN_REVOKED);
  if (record->revoked) {
    hl__sqlite_column_text(it, HL__COLUMN_REVOKED_BY, by, sizeof by);
    hl__sqlite_column_text(it, HL__COLUMN_REASON, reason, sizeof reason);
  }
  record->by = by;
  record->reason = reason;
  int status = hl__record_check(record, error);
  record->by = record->reason = NULL;
  return status;
}

int hl__sqlite_find(hl__sqlite_session *session, const hl_lease_terms *terms,
                    sqlite3_stmt **statement) {
  *statement = hl__sqlite_statement_of(session, HL__SQLITE_GET_LEASE, (int64_t)terms->place);
  bind_bytes(*statement, 2, terms->id);
  return hl__sqlite_step(session, *statement);
}

int hl__sqlite_find_held(hl__sqlite_session *session, const hl_lease_terms *terms,
                         sqlite3_stmt **statement, int *status, hl_error *error) {
  int code = hl__sqlite_find(session, terms, statement);
  sqlite3_stmt *it = *statement;
  if (code != SQLITE_ROW && code != SQLITE_DONE) return code;
  hl__record record = {HL__RECORD_FITS, .again = terms->again};
  if (code == SQLITE_ROW) {
    record.holder = hl__sqlite_is_bytes(it, HL__COLUMN_HOLDER, terms->holder);
    /* A restored file, without the upgrade, may let readers in. */
    record.behind = (uint64_t)sqlite3_column_int64(it, HL__COLUMN_NUMBER) < terms->token >> 8;
  }
  *status = hl__sqlite_judge(it, code, &record, error);
  return *status ? SQLITE_DONE : code;
}

/* -------------------------------------------------------------- converting */

/* The record gets another number, or keeps its own; and other rows. */
static int record_convert(hl__sqlite_session *session, sqlite3_stmt *record,
                          hl__sqlite_conversion *self) {
  const hl_request *request = self->request;
  int64_t number = sqlite3_column_int64(record, HL__COLUMN_NUMBER);
  /* An upgraded lease is in the way of those who wait for it as before. */
  int code = self->number ? SQLITE_OK : hl__sqlite_rows_free(session, record);
  if (code == SQLITE_OK)
    code = rows_delete(session, HL__SQLITE_DELETE_ROW, record, HL__COLUMN_ROWS);
  if (code != SQLITE_OK) return code;
  if (!self->number) self->number = number;
  sqlite3_stmt *it = hl__sqlite_statement_of(session, HL__SQLITE_SET_ROWS, number);
  code = bind_rows(it, 2, request->recorded, request->recorded_n);
  (void)sqlite3_bind_int(it, 3, hl__sqlite_mode(request->mode));
  (void)sqlite3_bind_int64(it, 4, self->number);
  if (code == SQLITE_OK) code = hl__sqlite_run(session, it);
  if (code != SQLITE_OK) return code;
  return rows_add(session, HL__SQLITE_ADD_ROW, request->recorded, request->recorded_n,
                  self->number);
}

int hl__sqlite_convert(hl__sqlite_session *session, void *conversion, int *status,
                       hl_error *error) {
  hl__sqlite_conversion *self = conversion;
  sqlite3_stmt *it;
  int code = hl__sqlite_find_held(session, self->request->lease, &it, status, error);
  if (code == SQLITE_ROW) code = record_convert(session, it, self);
  return hl__sqlite_reset(it, code);
}
