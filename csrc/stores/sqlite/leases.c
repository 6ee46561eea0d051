/*
 * leases.c - the operations on records of leases (hl_lease_ops), except taking; and the
 * observers' list of the holders and waiters of a row. Each is a write transaction, or reads
 * alone.
 *
 * A record is found by its number (terms->place), and id and holder are compared. Presence
 * decides: a refresh finds the record or does not, and does not ask for the time; a request that
 * meets an expired record deletes it. Both write, so one of them is first.
 */
#include "sqlite_store.h"

#include "mode.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A revoked record stays so long beyond the lease's time; so does a record that no session has
   released, refreshed or met since. */
#define KEPT_MS 3600000
/* Such records are looked for so often by each manager that uses leases, and at
   most so many are deleted at a time. */
#define SWEEP_MS 60000
#define SWEEP_MAX 256

static hl__sqlite_session *session_of(hl_session *session) {
  return (hl__sqlite_session *)(void *)session;
}

/* For its turn: a transaction takes as long as the disk. */
static int64_t at_least(int64_t deadline) {
  int64_t least = hl__answer_by(0);
  return deadline > least ? deadline : least;
}

/* An operation on a record. */
typedef struct operation {
  const hl_lease_terms *terms;
  int64_t ttl;
  int64_t number; /* the record's */
  int64_t sent_ms;
  const hl_request *request; /* adopt */
  hl_grant *grant;           /* adopt */
} operation;

static int refresh_in(hl__sqlite_session *session, void *context, int *status, hl_error *error) {
  operation *self = context;
  hl__sqlite_end_time end;
  sqlite3_stmt *record;
  int code = hl__sqlite_find_held(session, self->terms, &record, status, error);
  if (code == SQLITE_ROW) {
    hl__sqlite_column_end(record, HL__COLUMN_BOOT, &end);
    /* The waiters for its end must hear that it is sooner. */
    bool sooner = self->ttl < hl__sqlite_left(session->store, &end);
    code = sooner ? hl__sqlite_rows_free(session, record) : SQLITE_OK;
  }
  if (code == SQLITE_OK) {
    self->sent_ms = hl__boot_ms();
    hl__sqlite_until(session->store, self->sent_ms, self->ttl, &end);
    sqlite3_stmt *it = hl__sqlite_statement_of(session, HL__SQLITE_SET_END,
                                               sqlite3_column_int64(record, HL__COLUMN_NUMBER));
    hl__sqlite_bind_end(it, 2, &end);
    code = hl__sqlite_run(session, it);
  }
  return hl__sqlite_reset(record, code);
}

static int lease_refresh(hl_session *base, const hl_lease_terms *terms, int64_t ttl,
                         int64_t deadline, int64_t *sent_ms, hl_error *error) {
  operation self = {.terms = terms, .ttl = ttl};
  int status = hl__sqlite_write(session_of(base), refresh_in, &self, "refresh a lease",
                                at_least(deadline), error);
  if (status == HL_OK) *sent_ms = self.sent_ms;
  return status;
}

static int lease_inspect(hl_session *base, const hl_lease_terms *terms, int64_t deadline,
                         int64_t *left_ms, hl_error *error) {
  hl__sqlite_session *session = session_of(base);
  hl__sqlite_end_time end;
  sqlite3_stmt *it;
  (void)deadline; /* reading never waits */
  int status = hl__sqlite_read(session, error);
  if (status) return status;
  int code = hl__sqlite_find_held(session, terms, &it, &status, error);
  if (code == SQLITE_ROW) {
    hl__sqlite_column_end(it, HL__COLUMN_BOOT, &end);
    *left_ms = hl__sqlite_left(session->store, &end);
  } else if (code != SQLITE_DONE) {
    status = hl__sqlite_error(session, code, "look at a lease", error);
  }
  (void)sqlite3_reset(it);
  hl__sqlite_leave();
  return status;
}

typedef struct several {
  const hl_lease_terms *terms;
  size_t n;
  int missed; /* HL_OK: all were there; else why one was not */
} several;

/* In one transaction; those that are not there are left out. */
static int drop_in(hl__sqlite_session *session, void *context, int *status, hl_error *error) {
  several *self = context;
  int code = SQLITE_OK;
  (void)status;
  self->missed = HL_OK;
  for (size_t i = 0; i < self->n && code == SQLITE_OK; i++) {
    hl_lease_terms terms = self->terms[i];
    sqlite3_stmt *record;
    int found = HL_OK;
    terms.token = 0; /* one whose upgrade the file has not goes, too */
    code = hl__sqlite_find_held(session, &terms, &record, &found, error);
    if (code == SQLITE_ROW) code = hl__sqlite_rows_free(session, record);
    if (code == SQLITE_OK) code = hl__sqlite_record_delete(session, record, true);
    code = hl__sqlite_reset(record, code);
    if (found) self->missed = found;
  }
  return code;
}

static int drop(hl_session *base, const hl_lease_terms *terms, size_t n, int64_t deadline,
                hl_error *error) {
  several self = {terms, n, HL_OK};
  int status =
      hl__sqlite_write(session_of(base), drop_in, &self, "release a lease", deadline, error);
  return status ? status : self.missed;
}

static int lease_drop(hl_session *base, const hl_lease_terms *terms, bool confirm, int64_t deadline,
                      hl_error *error) {
  return drop(base, terms, 1, confirm ? at_least(deadline) : deadline, error);
}

static int lease_drop_all(hl_session *base, const hl_lease_terms *terms, size_t n, int64_t deadline,
                          hl_error *error) {
  int status = drop(base, terms, n, at_least(deadline), error);
  return status == HL_ELOST ? HL__ABSENT : status;
}

/* --------------------------------------------------------------- adopting */

static bool is_same_rows(sqlite3_stmt *it, const hl_request *request) {
  const uint8_t *packed = sqlite3_column_blob(it, HL__COLUMN_ROWS);
  size_t size = (size_t)sqlite3_column_bytes(it, HL__COLUMN_ROWS), i = 0;
  if (size != request->n * HL__SQLITE_ROW_SIZE) return false;
  for (bool exclusive; i < request->n; i++)
    if (hl__sqlite_rows_at(packed, i, &exclusive) != hl__sqlite_key(&request->rows[i]) ||
        exclusive != (request->rows[i].mode != HL_SHARED))
      break;
  return i == request->n;
}

static int adopt_in(hl__sqlite_session *session, void *context, int *status, hl_error *error) {
  operation *self = context;
  const hl_lease_terms *terms = self->terms;
  const hl_store_config *config = session->store->config;
  hl__sqlite_end_time end;
  sqlite3_stmt *it;
  /* Given up while it waited for the file: another process may have imported since. */
  if (atomic_load(&session->interrupted)) {
    *status = hl__error(error, HL_CANCELLED, "the import was interrupted");
    return SQLITE_OK;
  }
  int code = hl__sqlite_find(session, terms, &it);
  if (code == SQLITE_ROW || code == SQLITE_DONE) {
    hl__record record = {.import = true};
    if (code == SQLITE_ROW) {
      record.secret = hl__sqlite_is_bytes(it, HL__COLUMN_SECRET, terms->secret);
      record.holder = sqlite3_column_bytes(it, HL__COLUMN_HOLDER) == 16 &&
                      hl__replaces(terms, sqlite3_column_blob(it, HL__COLUMN_HOLDER), self->grant);
      record.rows = is_same_rows(it, self->request);
      self->number = sqlite3_column_int64(it, HL__COLUMN_NUMBER);
      /* Where it has no memory for a column, the column is NULL. */
      if (sqlite3_errcode(session->db) == SQLITE_NOMEM) code = SQLITE_NOMEM;
    }
    *status = hl__sqlite_judge(it, code, &record, error);
  }
  code = hl__sqlite_reset(it, code);
  if (code != SQLITE_OK || *status) return code;
  self->sent_ms = hl__boot_ms();
  hl__sqlite_until(session->store, self->sent_ms, terms->ttl, &end);
  it = hl__sqlite_statement_of(session, HL__SQLITE_SET_HOLDER, self->number);
  hl__sqlite_bind_end(it, 2, &end);
  (void)sqlite3_bind_blob(it, 5, terms->holder, 16, SQLITE_STATIC);
  (void)sqlite3_bind_text(it, 6, config->application, -1, SQLITE_STATIC);
  (void)sqlite3_bind_text(it, 7, config->host, -1, SQLITE_STATIC);
  (void)sqlite3_bind_int64(it, 8, config->pid);
  return hl__sqlite_run(session, it);
}

static int lease_adopt(hl_session *base, const hl_request *request, hl_grant *grant,
                       hl_error *error) {
  operation self = {.terms = request->lease, .request = request, .grant = grant};
  int status = hl__sqlite_write(session_of(base), adopt_in, &self, "import a lease",
                                hl__answer_by(request->deadline), error);
  if (status) return status;
  grant->sent_ms = self.sent_ms;
  grant->token = (uint64_t)self.number << 8;
  grant->place = (uint64_t)self.number;
  return HL_OK;
}

static int lease_convert(hl_session *base, const hl_request *request, hl_grant *grant,
                         hl_error *error) {
  hl__sqlite_session *session = session_of(base);
  if (request->upgrade) return hl__sqlite_take(session, request, grant, error);
  hl__sqlite_conversion self = {.request = request};
  int status = hl__sqlite_write(session, hl__sqlite_convert, &self, "share a lease",
                                hl__answer_by(request->deadline), error);
  if (status == HL_OK) grant->place = (uint64_t)self.number;
  return status;
}

/* ----------------------------------------------------------- many records */

/* Compares a key with a row in the locking order. The keys of update rows, which come first, are
   turned over. */
static int key_compare(const void *key, const void *row) {
  uint64_t a = *(const uint64_t *)key;
  uint64_t b = (uint64_t)hl__sqlite_key(row);
  return a < b ? -1 : a > b;
}

static int turned_compare(const void *key, const void *row) { return key_compare(key, row) * -1; }

/* The first of these rows, in locking order, with which a lease, or a ticket,
   of the packed ones conflicts; n: none. */
static size_t first_met(const hl_row *rows, size_t n, const uint8_t *packed, size_t size) {
  size_t first = n;
  for (size_t k = 0; k < size / HL__SQLITE_ROW_SIZE; k++) {
    bool exclusive;
    uint64_t key = (uint64_t)hl__sqlite_rows_at(packed, k, &exclusive);
    size_t updates = hl__update_rows(rows, n);
    const hl_row *row = bsearch(&key, rows + updates, n - updates, sizeof *rows, key_compare);
    if (!row) row = bsearch(&key, rows, updates, sizeof *rows, turned_compare);
    if (row && (size_t)(row - rows) < first &&
        hl__modes_conflict((hl_mode)row->mode, exclusive ? HL_EXCLUSIVE : HL_SHARED))
      first = (size_t)(row - rows);
  }
  return first;
}

/* Whether the filter wants a record. The i-th row of the filter must be the first that the
   record meets: so each record is found once. */
static bool matches(const hl__sqlite_session *session, sqlite3_stmt *it,
                    const hl_lease_filter *filter, size_t i) {
  hl__sqlite_end_time end;
  if (sqlite3_column_int(it, HL__COLUMN_REVOKED)) return false;
  if (filter->id && !hl__sqlite_is_bytes(it, HL__COLUMN_ID, filter->id)) return false;
  if (filter->owner) {
    const unsigned char *owner = sqlite3_column_text(it, HL__COLUMN_OWNER);
    if (!owner || strcmp((const char *)owner, filter->owner) != 0) return false;
  }
  if (filter->n > 0) {
    const void *blob = sqlite3_column_blob(it, HL__COLUMN_ROWS);
    if (!blob || first_met(filter->rows, filter->n, blob,
                           (size_t)sqlite3_column_bytes(it, HL__COLUMN_ROWS)) != i)
      return false;
  }
  if (filter->over) return true;
  hl__sqlite_column_end(it, HL__COLUMN_BOOT, &end);
  return hl__sqlite_left(session->store, &end) > 0;
}

/* Calls fn for each record that matches, at `it`. fn's code, or SQLite's. */
typedef int (*record_fn)(hl__sqlite_session *session, sqlite3_stmt *it, void *context);
static int visit(hl__sqlite_session *session, const hl_lease_filter *filter, record_fn fn,
                 void *context) {
  int code = SQLITE_OK;
  for (size_t i = 0; code == SQLITE_OK && i < (filter->n ? filter->n : 1); i++) {
    sqlite3_stmt *it =
        hl__sqlite_statement(session, filter->n ? HL__SQLITE_LIST_AT : HL__SQLITE_LIST);
    if (filter->n) {
      (void)sqlite3_bind_int64(it, 1, hl__sqlite_key(&filter->rows[i]));
      (void)sqlite3_bind_int(it, 2, filter->rows[i].mode == HL_SHARED);
    }
    while (code == SQLITE_OK && (code = hl__sqlite_step(session, it)) == SQLITE_ROW)
      code = matches(session, it, filter, i) ? fn(session, it, context) : SQLITE_OK;
    code = hl__sqlite_reset(it, code);
  }
  return code;
}

typedef struct listing {
  hl_holder_fn fn;
  void *context;
} listing;

/* Who holds or waits: `path` and the columns behind it, which records and tickets have in the same
   order. */
static void holder_read(sqlite3_stmt *it, int shared, int path, hl_holder *holder) {
  enum { PATH, LABEL, APPLICATION, HOST, PID, SINCE };
  *holder = (hl_holder){.kind = HL_LEASE,
                        .pid = sqlite3_column_int64(it, path + PID),
                        .since_ms = sqlite3_column_int64(it, path + SINCE),
                        .mode = hl__sqlite_mode_read(sqlite3_column_int(it, shared))};
  hl__sqlite_column_text(it, path + PATH, holder->path, sizeof holder->path);
  hl__sqlite_column_text(it, path + LABEL, holder->label, sizeof holder->label);
  hl__sqlite_column_text(it, path + APPLICATION, holder->application, sizeof holder->application);
  hl__sqlite_column_text(it, path + HOST, holder->host, sizeof holder->host);
}

static int list_one(hl__sqlite_session *session, sqlite3_stmt *it, void *context) {
  const listing *self = context;
  hl__sqlite_end_time end;
  hl_holder holder;
  holder_read(it, HL__COLUMN_SHARED, HL__COLUMN_PATH, &holder);
  hl__sqlite_column_end(it, HL__COLUMN_BOOT, &end);
  holder.remaining_ms = hl__sqlite_left(session->store, &end);
  const unsigned char *owner = sqlite3_column_text(it, HL__COLUMN_OWNER);
  (void)snprintf(holder.owner, sizeof holder.owner, "%s", owner ? (const char *)owner : "");
  const uint8_t *id = sqlite3_column_blob(it, HL__COLUMN_ID);
  size_t id_size = (size_t)sqlite3_column_bytes(it, HL__COLUMN_ID);
  if (id) (void)hl__hex(holder.id, id, id_size < 16 ? id_size : 16);
  self->fn(self->context, &holder);
  return SQLITE_OK;
}

static int list(hl__sqlite_session *session, const hl_lease_filter *filter, hl_holder_fn fn,
                void *context, hl_error *error) {
  listing self = {fn, context};
  int status = hl__sqlite_read(session, error);
  if (status) return status;
  int code = visit(session, filter, list_one, &self);
  if (code != SQLITE_OK) status = hl__sqlite_error(session, code, "list leases", error);
  hl__sqlite_leave();
  return status;
}

/* --------------------------------------------------------------- sweeping */

static bool is_old(const hl__sqlite_session *session, sqlite3_stmt *it) {
  hl__sqlite_end_time end;
  hl__sqlite_column_end(it, HL__COLUMN_BOOT, &end);
  return hl__sqlite_over(session->store, &end) >= KEPT_MS;
}

/* Deletes old records, outside of a transaction none; *found: how many there were, as far as it
   came. A statement may stand at a row that another one deletes or changes. */
static int sweep_in(hl__sqlite_session *session, void *found, int *status, hl_error *error) {
  int *n = found;
  const bool looks = sqlite3_get_autocommit(session->db);
  sqlite3_stmt *it = hl__sqlite_statement(session, HL__SQLITE_LIST);
  int code = SQLITE_ROW;
  (void)status, (void)error;
  for (*n = 0; code == SQLITE_ROW && *n < (looks ? 1 : SWEEP_MAX);) {
    code = hl__sqlite_step(session, it);
    if (code != SQLITE_ROW || !is_old(session, it)) continue;
    ++*n;
    int deleted = looks ? SQLITE_OK : hl__sqlite_record_delete(session, it, true);
    if (deleted != SQLITE_OK) code = deleted;
  }
  return hl__sqlite_reset(it, code);
}

void hl__sqlite_sweep(hl__sqlite_session *session) {
  hl__sqlite_store *store = session->store;
  int64_t now = hl__now_ms();
  int_fast64_t due = atomic_load(&store->sweep);
  int found;
  if (now < due || !atomic_compare_exchange_strong(&store->sweep, &due, now + SWEEP_MS)) return;
  if (hl__sqlite_enter(session, NULL) != HL_OK) return;
  (void)sweep_in(session, &found, NULL, NULL);
  hl__sqlite_leave();
  if (found > 0) (void)hl__sqlite_write(session, sweep_in, &found, "sweep", now, NULL);
}

/* ------------------------------------------------------------ many, ended */

typedef struct revocation {
  const hl_lease_filter *filter;
  uint64_t count;
} revocation;

static int revoke_one(hl__sqlite_session *session, sqlite3_stmt *record, void *context) {
  revocation *self = context;
  int code = hl__sqlite_rows_free(session, record);
  if (code == SQLITE_OK) code = hl__sqlite_record_delete(session, record, false);
  if (code != SQLITE_OK) return code;
  sqlite3_stmt *it = hl__sqlite_statement_of(session, HL__SQLITE_SET_REVOKED,
                                             sqlite3_column_int64(record, HL__COLUMN_NUMBER));
  (void)sqlite3_bind_text(it, 2, self->filter->by, -1, SQLITE_STATIC);
  (void)sqlite3_bind_text(it, 3, self->filter->reason, -1, SQLITE_STATIC);
  code = hl__sqlite_run(session, it);
  self->count++;
  return code;
}

static int revoke_in(hl__sqlite_session *session, void *context, int *status, hl_error *error) {
  revocation *self = context;
  (void)status, (void)error;
  self->count = 0;
  return visit(session, self->filter, revoke_one, self);
}

static int lease_revoke(hl_session *base, const hl_lease_filter *filter, int64_t deadline,
                        uint64_t *count, hl_error *error) {
  /* Include expired leases: as long as the record is there they may be refreshed. */
  hl_lease_filter all = *filter;
  all.over = true;
  revocation self = {.filter = &all};
  int status = hl__sqlite_write(session_of(base), revoke_in, &self, "revoke leases",
                                at_least(deadline), error);
  if (status == HL_OK) *count += self.count;
  return status;
}

static int lease_list(hl_session *base, const hl_lease_filter *filter, hl_holder_fn fn,
                      void *context, int64_t deadline, hl_error *error) {
  (void)deadline;
  hl__sqlite_sweep(session_of(base));
  return list(session_of(base), filter, fn, context, error);
}

/* ----------------------------------------------------------------- tokens */

static int raise_in(hl__sqlite_session *session, void *context, int *status, hl_error *error) {
  const int64_t *least = context;
  (void)status, (void)error;
  return hl__sqlite_run(session, hl__sqlite_statement_of(session, HL__SQLITE_RAISE, *least));
}

/* The next number is beyond it, whatever the clock shows. The raise lasts as a grant does: with
   synchronous=full it is on the disk before this returns, where it was not before. */
static int lease_raise(hl_session *base, uint64_t token, int64_t deadline, hl_error *error) {
  int64_t least = (int64_t)(token >> 8);
  return hl__sqlite_write(session_of(base), raise_in, &least, "raise tokens", at_least(deadline),
                          error);
}

/* -------------------------------------------------------------- observers */

enum { W_TICKET, W_ROWS, W_SHARED, W_PATH };

static bool waiter_conflicts(sqlite3_stmt *it, const hl_row *rows, size_t n) {
  const void *blob = sqlite3_column_blob(it, W_ROWS);
  size_t size = (size_t)sqlite3_column_bytes(it, W_ROWS);
  return n == 0 || (blob && first_met(rows, n, blob, size) < n);
}

int hl__sqlite_holders(hl__sqlite_session *session, const hl_lease_filter *filter, hl_holder_fn fn,
                       void *context, hl_error *error) {
  int status = list(session, filter, fn, context, error);
  if (status) return status;
  status = hl__sqlite_read(session, error);
  if (status) return status;
  int code;
  sqlite3_stmt *it = hl__sqlite_statement(session, HL__SQLITE_LIST_WAITERS);
  while ((code = hl__sqlite_step(session, it)) == SQLITE_ROW) {
    hl_holder holder;
    if (!hl__sqlite_bytes_locked(session, HL__SQLITE_TICKETS,
                                 (uint64_t)sqlite3_column_int64(it, W_TICKET), 1, NULL) ||
        !waiter_conflicts(it, filter->rows, filter->n))
      continue;
    holder_read(it, W_SHARED, W_PATH, &holder);
    holder.waiting = true;
    fn(context, &holder);
  }
  if (code != SQLITE_DONE) status = hl__sqlite_error(session, code, "list waiters", error);
  (void)sqlite3_reset(it);
  hl__sqlite_leave();
  return status;
}

const hl_lease_ops hl__sqlite_leases = {
    .refresh = lease_refresh,
    .inspect = lease_inspect,
    .drop = lease_drop,
    .drop_all = lease_drop_all,
    .convert = lease_convert,
    .adopt = lease_adopt,
    .list = lease_list,
    .revoke = lease_revoke,
    .raise = lease_raise,
};
