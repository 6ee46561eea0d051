/*
 * record.c - a record of a lease: how it is written and read; its time.
 */
#include "sqlite_store.h"

#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------- rows */

void hl__sqlite_rows_pack(const hl_row *rows, size_t n, uint8_t *out) {
  for (size_t i = 0; i < n; i++) {
    uint64_t key = (uint64_t)hl__sqlite_key(&rows[i]);
    for (int byte = 0; byte < 8; byte++) *out++ = (uint8_t)(key >> 8 * byte);
    *out++ = rows[i].mode != HL_SHARED;
  }
}

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

/* Adds or deletes a row of a number. SQLite's code. */
static int row_run(hl__sqlite_session *session, hl__sqlite_number statement, int64_t key,
                   bool exclusive, int64_t number) {
  sqlite3_stmt *it = hl__sqlite_statement_of(session, statement, key);
  if (!it) return sqlite3_errcode(session->db);
  (void)sqlite3_bind_int(it, 2, exclusive);
  (void)sqlite3_bind_int64(it, 3, number);
  return hl__sqlite_run(session, statement);
}

static int rows_add(hl__sqlite_session *session, hl__sqlite_number statement, const hl_row *rows,
                    size_t n, int64_t number) {
  int code = SQLITE_OK;
  for (size_t i = 0; i < n && code == SQLITE_OK; i++)
    code = row_run(session, statement, hl__sqlite_key(&rows[i]), rows[i].mode != HL_SHARED, number);
  return code;
}

static int rows_delete(hl__sqlite_session *session, hl__sqlite_number statement,
                       const uint8_t *packed, size_t size, int64_t number) {
  int code = SQLITE_OK;
  for (size_t i = 0; i < size / HL__SQLITE_ROW_SIZE && code == SQLITE_OK; i++) {
    bool exclusive;
    int64_t key = hl__sqlite_rows_at(packed, i, &exclusive);
    code = row_run(session, statement, key, exclusive, number);
  }
  return code;
}

static void bind_text(sqlite3_stmt *it, int number, const char *text) {
  (void)sqlite3_bind_text(it, number, text, -1, SQLITE_STATIC);
}

static void bind_bytes(sqlite3_stmt *it, int number, const uint8_t bytes[16]) {
  (void)sqlite3_bind_blob(it, number, bytes, 16, SQLITE_STATIC);
}

/* The code of sqlite3_bind_blob64. */
static int bind_rows(sqlite3_stmt *it, int number, const hl_row *rows, size_t n) {
  size_t size = n * HL__SQLITE_ROW_SIZE;
  uint8_t *packed = sqlite3_malloc64(size);
  if (!packed) return SQLITE_NOMEM;
  hl__sqlite_rows_pack(rows, n, packed);
  return sqlite3_bind_blob64(it, number, packed, size, sqlite3_free);
}

int hl__sqlite_record_add(hl__sqlite_session *session, const hl_request *request, int64_t number,
                          int64_t now) {
  const hl_lease_terms *terms = request->lease;
  const hl_store_config *config = session->store->config;
  hl__sqlite_end_time end;
  char label[128];
  sqlite3_stmt *it = hl__sqlite_statement_of(session, HL__SQLITE_ADD_LEASE, number);
  if (!it) return sqlite3_errcode(session->db);
  hl__sqlite_until(session->store, now, terms->ttl, &end);
  (void)hl__escape(label, sizeof label, request->label, request->label_size);
  bind_bytes(it, 2, terms->id);
  bind_bytes(it, 3, terms->secret);
  bind_bytes(it, 4, terms->holder);
  hl__sqlite_bind_end(it, 5, &end);
  int code = bind_rows(it, 8, request->rows, request->n);
  (void)sqlite3_bind_int(it, 9, hl__sqlite_mode(request->mode));
  bind_text(it, 10, terms->owner);
  bind_text(it, 11, request->path);
  bind_text(it, 12, label);
  bind_text(it, 13, config->application);
  bind_text(it, 14, config->host);
  (void)sqlite3_bind_int64(it, 15, config->pid);
  (void)sqlite3_bind_int64(it, 16, hl__unix_ms());
  if (code == SQLITE_OK) code = hl__sqlite_run(session, HL__SQLITE_ADD_LEASE);
  (void)sqlite3_clear_bindings(it);
  if (code != SQLITE_OK) return code;
  return rows_add(session, HL__SQLITE_ADD_ROW, request->rows, request->n, number);
}

int hl__sqlite_record_delete(hl__sqlite_session *session, int64_t number, const void *packed,
                             size_t size, bool record) {
  int code = rows_delete(session, HL__SQLITE_DELETE_ROW, packed, size, number);
  if (code != SQLITE_OK || !record) return code;
  return hl__sqlite_run_of(session, HL__SQLITE_DELETE_LEASE, number);
}

/* The lease of that number. */
static int record_convert(hl__sqlite_session *session, const hl__sqlite_conversion *self,
                          int64_t number) {
  const hl_request *request = self->request;
  int code =
      rows_delete(session, HL__SQLITE_DELETE_ROW, self->rows.packed, self->rows.size, number);
  if (code != SQLITE_OK) return code;
  sqlite3_stmt *it = hl__sqlite_statement_of(session, HL__SQLITE_SET_ROWS, number);
  if (!it) return sqlite3_errcode(session->db);
  code = bind_rows(it, 2, request->recorded, request->recorded_n);
  (void)sqlite3_bind_int(it, 3, hl__sqlite_mode(request->mode));
  (void)sqlite3_bind_int64(it, 4, self->number);
  if (code == SQLITE_OK) code = hl__sqlite_run(session, HL__SQLITE_SET_ROWS);
  (void)sqlite3_clear_bindings(it);
  if (code != SQLITE_OK) return code;
  return rows_add(session, HL__SQLITE_ADD_ROW, request->recorded, request->recorded_n,
                  self->number);
}

int hl__sqlite_ticket_add(hl__sqlite_session *session, const hl_request *request, int64_t ticket) {
  const hl_store_config *config = session->store->config;
  char label[128];
  sqlite3_stmt *it = hl__sqlite_statement_of(session, HL__SQLITE_ADD_WAITER, ticket);
  if (!it) return sqlite3_errcode(session->db);
  (void)hl__escape(label, sizeof label, request->label, request->label_size);
  int code = bind_rows(it, 2, request->rows, request->n);
  (void)sqlite3_bind_int(it, 3, hl__sqlite_mode(request->mode));
  bind_text(it, 4, request->path);
  bind_text(it, 5, label);
  bind_text(it, 6, config->application);
  bind_text(it, 7, config->host);
  (void)sqlite3_bind_int64(it, 8, config->pid);
  (void)sqlite3_bind_int64(it, 9, hl__unix_ms());
  if (code == SQLITE_OK) code = hl__sqlite_run(session, HL__SQLITE_ADD_WAITER);
  (void)sqlite3_clear_bindings(it);
  if (code != SQLITE_OK) return code;
  return rows_add(session, HL__SQLITE_ADD_WAIT, request->rows, request->n, ticket);
}

int hl__sqlite_ticket_delete(hl__sqlite_session *session, int64_t ticket, const void *packed,
                             size_t size) {
  int code = rows_delete(session, HL__SQLITE_DELETE_WAIT, packed, size, ticket);
  if (code != SQLITE_OK) return code;
  sqlite3_stmt *it = hl__sqlite_statement_of(session, HL__SQLITE_DELETE_WAITER, ticket);
  if (!it) return sqlite3_errcode(session->db);
  hl__sqlite_beat_clear(session, HL__SQLITE_TICKETS, (uint64_t)ticket);
  return hl__sqlite_run(session, HL__SQLITE_DELETE_WAITER);
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

static int find_by(hl__sqlite_session *session, hl__sqlite_number by, const hl_lease_terms *terms,
                   sqlite3_stmt **statement) {
  *statement = hl__sqlite_statement(session, by);
  if (!*statement) return sqlite3_errcode(session->db);
  if (by == HL__SQLITE_GET_LEASE)
    (void)sqlite3_bind_int64(*statement, 1, (int64_t)terms->place);
  else
    (void)sqlite3_bind_blob(*statement, 1, terms->id, 16, SQLITE_TRANSIENT);
  int code = hl__sqlite_step(*statement);
  bool found = code == SQLITE_ROW && hl__sqlite_is_bytes(*statement, HL__COLUMN_ID, terms->id);
  return code == SQLITE_ROW && !found ? SQLITE_DONE : code;
}

int hl__sqlite_find(hl__sqlite_session *session, const hl_lease_terms *terms,
                    sqlite3_stmt **statement) {
  int code = SQLITE_DONE;
  if (terms->place) code = find_by(session, HL__SQLITE_GET_LEASE, terms, statement);
  /* A lease that was granted while it was cancelled has no known place, and an upgrade gives it
     another one. */
  if (code == SQLITE_DONE && terms->place) (void)sqlite3_reset(*statement);
  if (code == SQLITE_DONE) code = find_by(session, HL__SQLITE_GET_LEASE_BY_ID, terms, statement);
  return code;
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

int hl__sqlite_rows_keep(sqlite3_stmt *it, hl__sqlite_rows *rows) {
  const void *blob = sqlite3_column_blob(it, HL__COLUMN_ROWS);
  rows->size = blob ? (size_t)sqlite3_column_bytes(it, HL__COLUMN_ROWS) : 0;
  free(rows->packed);
  rows->packed = malloc(rows->size ? rows->size : 1);
  if (!rows->packed) return SQLITE_NOMEM;
  if (rows->size) memcpy(rows->packed, blob, rows->size);
  return SQLITE_OK;
}

/* -------------------------------------------------------------- converting */

int hl__sqlite_held(hl__sqlite_session *session, const hl_lease_terms *terms, int64_t *number,
                    hl__sqlite_rows *rows, int *status, hl_error *error) {
  sqlite3_stmt *it;
  int code = hl__sqlite_find_held(session, terms, &it, status, error);
  if (code == SQLITE_ROW) {
    *number = sqlite3_column_int64(it, HL__COLUMN_NUMBER);
    code = rows ? hl__sqlite_rows_keep(it, rows) : SQLITE_OK;
  }
  (void)sqlite3_reset(it);
  return code == SQLITE_DONE ? SQLITE_OK : code;
}

int hl__sqlite_convert(hl__sqlite_session *session, void *conversion, int *status,
                       hl_error *error) {
  hl__sqlite_conversion *self = conversion;
  const hl_lease_terms *terms = self->request->lease;
  int64_t number = 0;
  int code = hl__sqlite_held(session, terms, &number, &self->rows, status, error);
  if (code != SQLITE_OK || *status) return code;
  if (!self->number) self->number = number;
  return record_convert(session, self, number);
}
