/*
 * leases.c - leases of the embedded store: looking for those that are in the way of a row,
 * recording one, and the operations on a record (hl_lease_ops). How records are kept is
 * ledger.c's; how rows are locked, table.c's.
 *
 * A lease is recorded while its rows are locked. Whoever locks one of them later looks at
 * the records: so nobody passes a lease, and no lease comes where somebody is. The
 * operations touch the record alone. Presence decides: a refresh finds the record or does
 * not, and does not ask for the time; whoever is kept out by a record whose time is up
 * deletes it. Both hold the ledger, so one of them is first.
 */
#include "board.h"
#include "ledger.h"
#include "mode.h"

#include <stdlib.h>
#include <string.h>

/* For the ledger, where nobody has set a time: it is kept for microseconds. */
#define TAKE_MS 1000
/* Copied in one piece, while a list is made. */
#define LIST_PIECE 16u

static hl__file_session *session_of(hl_session *session) {
  return (hl__file_session *)(void *)session;
}

static int64_t at_least(int64_t deadline) {
  int64_t least = hl__now_ms() + TAKE_MS;
  return deadline > least ? deadline : least;
}

/* The ledger of a session whose space is there; HL__ABSENT where there is none and none
   is to be made. */
static int ledger_take(hl__file_session *session, bool make, int64_t deadline, hl_error *error)
    HL__ACQUIRES_IF_0(hl__file_ledger_mutex) HL__UNCHECKED {
  int status = hl__file_session_check(session, error);
  if (status) return status;
  return hl__ledger_take(session->space->ledger, make, deadline, error);
}

static void text_copy(char *out, size_t size, const char *text) {
  size_t length = text ? strnlen(text, size - 1) : 0;
  if (length > 0) memcpy(out, text, length);
  out[length] = '\0';
}

/* What others have written: cut to size, and nothing that a terminal obeys. */
static void text_take(char *out, size_t size, const char *text, size_t room) {
  (void)hl__escape(out, size, text, strnlen(text, room - 1));
}

/* A lease in the way. */
typedef struct obstacle {
  int64_t nearest; /* ms until it ends */
  bool update;     /* it may want to make the row exclusive */
} obstacle;

static bool same(const uint8_t a[16], const uint8_t b[16]) { return memcmp(a, b, 16) == 0; }

/* ------------------------------------------------------ in the way of a row */

/* One chain. HL_TIMEOUT: a lease is in the way; *nearest: until it ends. Deletes those before
   it whose time is up. It does not look for more: there may be a hundred thousand, and each
   that ends has it look again. Model: ledger.pml, get. */
static int chain_scan(hl__ledger *ledger, const uint8_t *exempt, const hl_row *row, uint32_t stripe,
                      hl_mode mode, obstacle *found) HL__REQUIRES(hl__file_ledger_mutex) {
  uint64_t steps = (uint64_t)ledger->records * HL__LEDGER_ROWS;
  uint32_t at = hl__ledger_chain(ledger, stripe, mode);
  while (at != HL__LEDGER_NONE) {
    uint32_t number;
    const hl__ledger_row *theirs = hl__ledger_row_at(ledger, at, &number);
    if (!theirs || steps-- == 0) {
      /* Not what we write: it is made anew, once. */
      hl__ledger_mend(ledger);
      at = hl__ledger_chain(ledger, stripe, mode);
      steps = (uint64_t)ledger->records * HL__LEDGER_ROWS;
      continue;
    }
    uint32_t next = hl__ledger_chain_next(ledger, at);
    const hl__ledger_record *record = hl__ledger_record_at(ledger, number);
    if (theirs->bucket == row->bucket && theirs->level == row->level &&
        !(exempt && same(record->id, exempt))) {
      int64_t left = hl__ledger_left(ledger, record);
      if (left == 0) {
        hl__ledger_remove(ledger, number, HL__LEDGER_FREE);
        at = hl__ledger_chain(ledger, stripe, mode); /* it may have had others */
        continue;
      }
      *found = (obstacle){left, record->mode == HL_UPDATE};
      return HL_TIMEOUT;
    }
    at = next;
  }
  return HL_OK;
}

static int row_scan(hl__file_session *session, const hl_request *request, const hl_row *row,
                    uint32_t hash, obstacle *found, hl_error *error) {
  hl__ledger *ledger = session->space->ledger;
  int status = ledger_take(session, false, hl__now_ms() + TAKE_MS, error);
  if (status == HL__ABSENT) return HL_OK;
  *found = (obstacle){status == HL_TIMEOUT ? 0 : HL_FOREVER, false}; /* 0: not known, look again */
  if (status) return status;
  static const hl_mode modes[] = {HL_EXCLUSIVE, HL_SHARED};
  for (int i = 0; i < 2 && status == HL_OK; i++)
    if (hl__modes_conflict((hl_mode)row->mode, modes[i]))
      status = chain_scan(ledger, request->exempt, row, hl__file_stripe_of(hash), modes[i], found);
  hl__ledger_give(ledger);
  return status;
}

int hl__file_lease_await(hl__file_session *session, const hl_request *request, const hl_row *row,
                         uint32_t hash, hl_error *error) {
  obstacle found;
  bool gives_way = request->gives_way && hl__may_upgrade(session->base.store->layout, row);
  int status = row_scan(session, request, row, hash, &found, error);
  if (status != HL_TIMEOUT || request->try_once) return status;
  hl__file_futex_enter(session, hash);
  for (;;) {
    uint32_t seen = hl__file_futex_seen(session, hash);
    status = row_scan(session, request, row, hash, &found, error);
    if (status != HL_TIMEOUT) break;
    if (found.update && gives_way) {
      status = HL__BEHIND_UPDATE;
      break;
    }
    if (atomic_load(&session->interrupted)) {
      status = HL_CANCELLED;
      break;
    }
    /* Never early, as in hl__file_queue_wait. */
    int64_t now = hl__now_ms();
    if (now > request->deadline) break;
    int64_t end = hl__deadline(request->deadline, 1);
    int64_t over = hl__deadline(now, found.nearest);
    hl__file_futex_sleep(session, hash, seen, over < end ? over : end);
  }
  hl__file_futex_leave(session, hash);
  return status;
}

/* -------------------------------------------------------------- recording */

static void whose(hl__file_session *session, hl__ledger_record *record) {
  const hl_store_config *config = hl__file_session_config(session);
  text_copy(record->application, sizeof record->application, config->application);
  text_copy(record->host, sizeof record->host, config->host);
  record->pid = config->pid;
}

/* The rows are the session's; it keeps them. Model: ledger.pml, add. */
static int record_write(hl__file_session *session, const hl_request *request, hl_grant *grant,
                        hl_error *error) {
  const hl_lease_terms *terms = request->lease;
  hl__ledger *ledger = session->space->ledger;
  hl__ledger_record model = {
      .mode = (uint8_t)request->mode, .since_unix = hl__unix_ms(), .token = grant->token};
  memcpy(model.id, terms->id, sizeof model.id);
  memcpy(model.secret, terms->secret, sizeof model.secret);
  memcpy(model.holder, terms->holder, sizeof model.holder);
  text_copy(model.owner, sizeof model.owner, terms->owner);
  text_copy(model.path, sizeof model.path, request->path);
  if (request->label_size > 0)
    (void)hl__escape(model.label, sizeof model.label, request->label, request->label_size);
  whose(session, &model);
  uint32_t number;
  int status = ledger_take(session, true, hl__now_ms() + TAKE_MS, error);
  if (status) return status;
  /* The time counts from here: whoever waits has not seen the record yet. */
  int64_t now = hl__boot_ms();
  hl__ledger_until(ledger, &model, now, terms->ttl);
  status = hl__ledger_add(ledger, &model, request->recorded, request->recorded_n, &number, error);
  hl__ledger_give(ledger);
  grant->sent_ms = now;
  grant->place = number;
  return status;
}

int hl__file_lease_write(hl__file_session *session, const hl_request *request, hl_grant *grant,
                         hl_error *error) {
  return record_write(session, request, grant, error);
}

static int to_lease(hl_session *base, const hl_request *request, hl_grant *grant, hl_error *error) {
  hl__file_session *session = session_of(base);
  int status = record_write(session, request, grant, error);
  if (status == HL_OK) hl__file_session_clear(session);
  return status;
}

/* -------------------------------------------------------------- one record */

/* The record of that id, LIVE or REVOKED; NULL when there is none. */
static hl__ledger_record *find(hl__ledger *ledger, const hl_lease_terms *terms, uint32_t *number)
    HL__REQUIRES(hl__file_ledger_mutex) {
  uint32_t hint = terms->place < UINT32_MAX ? (uint32_t)terms->place : 0;
  for (uint32_t i = 0; i <= ledger->records; i++) {
    *number = i == 0 ? hint : i - 1; /* where it was first, then everywhere */
    hl__ledger_record *record = hl__ledger_record_at(ledger, *number);
    uint32_t state = record ? atomic_load(&record->state) : HL__LEDGER_FREE;
    if ((state == HL__LEDGER_LIVE || state == HL__LEDGER_REVOKED) && same(record->id, terms->id))
      return record;
  }
  return NULL;
}

static int revoked_error(const hl__ledger_record *record, hl_error *error) {
  char by[sizeof record->by], reason[sizeof record->reason];
  text_take(by, sizeof by, record->by, sizeof record->by);
  text_take(reason, sizeof reason, record->reason, sizeof record->reason);
  return hl__record_refuse(HL__RECORD_REVOKED, &(hl__record){.by = by, .reason = reason}, error);
}

static int gone_error(hl_error *error) { return hl__record_check(&(hl__record){0}, error); }

/* The record that this holder has. HL_ELOST: it has none. */
static int record_of_holder(hl__ledger *ledger, const hl_lease_terms *terms, uint32_t *number,
                            hl__ledger_record **record, hl_error *error)
    HL__REQUIRES(hl__file_ledger_mutex) {
  *record = find(ledger, terms, number);
  if (!*record) return gone_error(error);
  if (!same((*record)->holder, terms->holder))
    return hl__record_refuse(HL__RECORD_IMPORTED, NULL, error);
  if (atomic_load(&(*record)->state) == HL__LEDGER_LIVE) return HL_OK;
  int status = revoked_error(*record, error);
  hl__ledger_forget(ledger, *number);
  return status;
}

/* Where there is no ledger there is no lease. */
static int take_for_record(hl__file_session *session, int64_t deadline, hl_error *error)
    HL__ACQUIRES_IF_0(hl__file_ledger_mutex) HL__UNCHECKED {
  int status = ledger_take(session, false, deadline, error);
  return status == HL__ABSENT ? gone_error(error) : status;
}

static int lease_refresh(hl_session *base, const hl_lease_terms *terms, int64_t ttl,
                         int64_t deadline, int64_t *sent_ms, hl_error *error) {
  hl__file_session *session = session_of(base);
  hl__ledger *ledger = session->space->ledger;
  hl__ledger_record *record;
  uint32_t number;
  int status = take_for_record(session, at_least(deadline), error);
  if (status) return status;
  status = record_of_holder(ledger, terms, &number, &record, error);
  if (status == HL_OK) {
    *sent_ms = hl__boot_ms();
    hl__ledger_until(ledger, record, *sent_ms, ttl);
  }
  hl__ledger_give(ledger);
  return status;
}

static int lease_inspect(hl_session *base, const hl_lease_terms *terms, int64_t deadline,
                         int64_t *left_ms, hl_error *error) {
  hl__file_session *session = session_of(base);
  hl__ledger *ledger = session->space->ledger;
  hl__ledger_record *record;
  uint32_t number;
  int status = take_for_record(session, at_least(deadline), error);
  if (status) return status;
  status = record_of_holder(ledger, terms, &number, &record, error);
  if (status == HL_OK) *left_ms = hl__ledger_left(ledger, record);
  hl__ledger_give(ledger);
  return status;
}

static int lease_drop(hl_session *base, const hl_lease_terms *terms, bool confirm, int64_t deadline,
                      hl_error *error) {
  hl__file_session *session = session_of(base);
  hl__ledger *ledger = session->space->ledger;
  hl__ledger_record *record;
  uint32_t number;
  int status = take_for_record(session, confirm ? at_least(deadline) : deadline, error);
  if (status) return status;
  status = record_of_holder(ledger, terms, &number, &record, error);
  if (status == HL_OK) hl__ledger_remove(ledger, number, HL__LEDGER_FREE);
  hl__ledger_give(ledger);
  return status;
}

static int row_compare(const void *a, const void *b) {
  const hl__ledger_row *x = a;
  const hl_row *y = b;
  return hl__row_order(x->level, x->bucket, y->level, y->bucket);
}

/* Calls `each` for the rows of a lease, until that says false. */
typedef bool (*row_fn)(void *context, const hl__ledger_row *row);
static bool rows_visit(hl__ledger *ledger, uint32_t number, row_fn each, void *context)
    HL__REQUIRES(hl__file_ledger_mutex) {
  for (uint32_t steps = ledger->records; steps > 0; steps--) {
    const hl__ledger_record *record = hl__ledger_record_at(ledger, number);
    if (!record) return true;
    for (uint32_t i = 0; i < record->row_count && i < HL__LEDGER_ROWS; i++)
      if (!each(context, &record->rows[i])) return false;
    number = record->next;
  }
  return true;
}

/* Rows in locking order; and how many of them were met. */
typedef struct wanted {
  const hl_row *rows;
  size_t n, met;
} wanted;

static bool row_is_wanted(void *context, const hl__ledger_row *row) {
  wanted *self = context;
  const hl_row *found = bsearch(row, self->rows, self->n, sizeof *self->rows, row_compare);
  if (found) self->met++;
  return found && found->mode == row->mode;
}

static bool row_is_free(void *context, const hl__ledger_row *row) {
  const wanted *self = context;
  const hl_row *found = bsearch(row, self->rows, self->n, sizeof *self->rows, row_compare);
  return !found || !hl__modes_conflict((hl_mode)found->mode,
                                       row->mode == HL_SHARED ? HL_SHARED : HL_EXCLUSIVE);
}

static int adopt(hl__file_session *session, const hl_request *request, hl_grant *grant,
                 hl_error *error) HL__REQUIRES(hl__file_ledger_mutex) {
  hl__ledger *ledger = session->space->ledger;
  const hl_lease_terms *terms = request->lease;
  uint32_t number;
  wanted rows = {request->rows, request->n, 0};
  /* Given up while it waited for the ledger: somebody may have imported since. */
  if (atomic_load(&session->interrupted))
    return hl__error(error, HL_CANCELLED, "the import was interrupted");
  hl__ledger_record *record = find(ledger, terms, &number);
  if (!record || !same(record->secret, terms->secret)) return gone_error(error);
  if (atomic_load(&record->state) != HL__LEDGER_LIVE) return revoked_error(record, error);
  hl__record seen = {HL__RECORD_FITS, .import = true};
  seen.holder = hl__replaces(terms, record->holder, grant);
  seen.rows = rows_visit(ledger, number, row_is_wanted, &rows) && rows.met == rows.n;
  int status = hl__record_check(&seen, error);
  if (status) return status;
  /* Killed in the middle: the holder is nobody, and the text is as good as it was. */
  memcpy(record->holder, terms->holder, sizeof record->holder);
  whose(session, record);
  grant->sent_ms = hl__boot_ms();
  grant->token = record->token;
  grant->place = number;
  hl__ledger_until(ledger, record, grant->sent_ms, terms->ttl);
  return HL_OK;
}

/* The rows of an upgrade are locked as for anybody else, so it stands in their queue: who waits
   there waits for this lease no more than for those who share it, as whoever wants them exclusively
   has given way (HL__BEHIND_UPDATE). Then nobody else is there, in a session or by a lease. */
static int rows_lock(hl__file_session *session, const hl_request *request, hl_grant *grant,
                     hl_error *error) {
  hl_request own = *request;
  own.lease = NULL;
  own.upgrade = false;
  own.extend = false;
  own.recorded = own.rows;
  own.recorded_n = own.n;
  own.exempt = request->lease->id;
  return hl_store_file.take(&session->base, &own, grant, error);
}

static int record_convert(hl__file_session *session, const hl_request *request, uint64_t token,
                          hl_grant *grant, hl_error *error) {
  hl__ledger *ledger = session->space->ledger;
  hl__ledger_record *record;
  uint32_t number;
  int status = take_for_record(session, hl__now_ms() + TAKE_MS, error);
  if (status) return status;
  status = record_of_holder(ledger, request->lease, &number, &record, error);
  if (status == HL_OK) {
    if (request->upgrade) record->token = token;
    hl__ledger_convert(ledger, number, request->rows, request->n, request->mode);
    grant->place = number;
    grant->token = token;
  }
  hl__ledger_give(ledger);
  return status;
}

static int lease_convert(hl_session *base, const hl_request *request, hl_grant *grant,
                         hl_error *error) {
  hl__file_session *session = session_of(base);
  hl_grant held = {0};
  if (!request->upgrade) return record_convert(session, request, 0, grant, error);
  int status = rows_lock(session, request, &held, error);
  if (status) return status;
  status = record_convert(session, request, held.token, grant, error);
  hl__file_session_clear(session);
  return status;
}

static int lease_adopt(hl_session *base, const hl_request *request, hl_grant *grant,
                       hl_error *error) {
  hl__file_session *session = session_of(base);
  int status = take_for_record(session, at_least(request->deadline), error);
  if (status) return status;
  status = adopt(session, request, grant, error);
  hl__ledger_give(session->space->ledger);
  return status;
}

/* ------------------------------------------------------------ many records */

/* Whether its time is up or not. */
static bool matches(hl__ledger *ledger, uint32_t number, const hl_lease_filter *filter)
    HL__REQUIRES(hl__file_ledger_mutex) {
  const hl__ledger_record *record = hl__ledger_record_at(ledger, number);
  wanted rows = {filter->rows, filter->n, 0};
  if (atomic_load(&record->state) != HL__LEDGER_LIVE) return false;
  if (filter->id && !same(filter->id, record->id)) return false;
  if (filter->owner && strncmp(filter->owner, record->owner, sizeof record->owner) != 0)
    return false;
  if (filter->n > 0 && rows_visit(ledger, number, row_is_free, &rows)) return false;
  return true;
}

static void holder_fill(const hl__ledger *ledger, const hl__ledger_record *record,
                        hl_holder *holder) {
  static const char hex[] = "0123456789abcdef";
  *holder = (hl_holder){.pid = record->pid,
                        .since_ms = record->since_unix,
                        .mode = hl__mode_read(record->mode),
                        .kind = HL_LEASE,
                        .remaining_ms = hl__ledger_left(ledger, record)};
  text_take(holder->application, sizeof holder->application, record->application,
            sizeof record->application);
  text_take(holder->host, sizeof holder->host, record->host, sizeof record->host);
  text_take(holder->label, sizeof holder->label, record->label, sizeof record->label);
  text_take(holder->path, sizeof holder->path, record->path, sizeof record->path);
  text_copy(holder->owner, sizeof holder->owner, record->owner);
  for (size_t i = 0; i < 16; i++) {
    holder->id[2 * i] = hex[record->id[i] >> 4];
    holder->id[2 * i + 1] = hex[record->id[i] & 15];
  }
}

/* In pieces: fn is called while nobody waits for the ledger. */
static int list(hl__file_session *session, const hl_lease_filter *filter, hl_holder_fn fn,
                void *context, int64_t deadline, hl_error *error) {
  hl__ledger *ledger = session->space->ledger;
  hl_holder found[LIST_PIECE];
  uint32_t at = 0;
  for (bool more = true; more;) {
    unsigned n = 0;
    int status = ledger_take(session, false, at_least(deadline), error);
    if (status == HL__ABSENT) return HL_OK;
    if (status) return status;
    uint32_t end = at + 1024;
    for (; at < ledger->records && at < end && n < LIST_PIECE; at++) {
      if (!matches(ledger, at, filter)) continue;
      const hl__ledger_record *record = hl__ledger_record_at(ledger, at);
      if (filter->over || hl__ledger_left(ledger, record) > 0)
        holder_fill(ledger, record, &found[n++]);
    }
    more = at < ledger->records;
    hl__ledger_give(ledger);
    for (unsigned i = 0; i < n; i++) fn(context, &found[i]);
  }
  return HL_OK;
}

static int lease_list(hl_session *base, const hl_lease_filter *filter, hl_holder_fn fn,
                      void *context, int64_t deadline, hl_error *error) {
  return list(session_of(base), filter, fn, context, deadline, error);
}

/* Those that are over, too: they may be refreshed, as long as the record is there. */
static int lease_revoke(hl_session *base, const hl_lease_filter *filter, int64_t deadline,
                        uint64_t *count, hl_error *error) {
  hl__file_session *session = session_of(base);
  hl__ledger *ledger = session->space->ledger;
  int status = ledger_take(session, false, at_least(deadline), error);
  if (status == HL__ABSENT) return HL_OK;
  if (status) return status;
  for (uint32_t i = 0; i < ledger->records; i++) {
    if (!matches(ledger, i, filter)) continue;
    hl__ledger_record *record = hl__ledger_record_at(ledger, i);
    text_copy(record->by, sizeof record->by, filter->by);
    text_copy(record->reason, sizeof record->reason, filter->reason);
    hl__ledger_remove(ledger, i, HL__LEDGER_REVOKED);
    (*count)++;
  }
  hl__ledger_give(ledger);
  return HL_OK;
}

int hl__file_lease_holders(hl__file_session *session, const hl_lease_filter *filter,
                           hl_holder_fn fn, void *context, hl_error *error) {
  if (atomic_load(&session->space->control->ledger) == 0) return HL_OK;
  return list(session, filter, fn, context, 0, error);
}

/* The counter is the directory's, in the mapping of all who use it. */
static int lease_raise(hl_session *base, uint64_t token, int64_t deadline, hl_error *error) {
  hl__file_session *session = session_of(base);
  (void)deadline;
  int status = hl__file_session_check(session, error);
  if (status == HL_OK) hl__file_tokens_raise(session->space->control, token >> 8);
  return status;
}

const hl_lease_ops hl__file_leases = {
    .refresh = lease_refresh,
    .inspect = lease_inspect,
    .drop = lease_drop,
    .convert = lease_convert,
    .adopt = lease_adopt,
    .to_lease = to_lease,
    .list = lease_list,
    .revoke = lease_revoke,
    .raise = lease_raise,
};
