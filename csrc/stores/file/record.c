/*
 * record.c - the records in the ledger, and what follows from them: chains, counts, the list
 * of free ones. The caller has taken the ledger. See ledger.h.
 */
#include "ledger.h"
#include "mode.h"

#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(hl__ledger_record) == 2048, "part of the format");

/* What is left of a revoked lease stays so long beyond the lease's time; and one that nobody
   has released, refreshed or wanted since. */
#define KEPT_MS 3600000

/* ----------------------------------------------------------------- clock */

int64_t hl__ledger_left(const hl__ledger *ledger, const hl__ledger_record *record) {
  bool same = atomic_load(&record->boot[0]) == ledger->boot[0] &&
              atomic_load(&record->boot[1]) == ledger->boot[1];
  int64_t end = atomic_load(same ? &record->end : &record->end_unix);
  int64_t now = same ? hl__boot_ms() : hl__unix_ms();
  if (end <= now) return 0;
  /* Whatever is written there. */
  int64_t left = hl__between_ms(now, end);
  return left < HL_TTL_MAX ? left : HL_TTL_MAX;
}

/* Killed between any two of these, its end is the new one or the one it was. */
void hl__ledger_until(const hl__ledger *ledger, hl__ledger_record *record, int64_t now,
                      int64_t ttl) {
  atomic_store(&record->end_unix, hl__deadline(hl__unix_ms(), ttl));
  atomic_store(&record->end, hl__deadline(now, ttl));
  atomic_store(&record->boot[0], ledger->boot[0]);
  atomic_store(&record->boot[1], ledger->boot[1]);
}

/* --------------------------------------------------------------- records */

hl__ledger_record *hl__ledger_record_at(hl__ledger *ledger, uint32_t number) {
  if (number >= ledger->records) return NULL;
  return (hl__ledger_record *)(void *)((char *)ledger->header + HL__LEDGER_CHUNK) + number;
}

static hl__ledger_row *row_at(hl__ledger *ledger, uint32_t row)
    HL__REQUIRES(hl__file_ledger_mutex) {
  hl__ledger_record *record = hl__ledger_record_at(ledger, row / HL__LEDGER_ROWS);
  return record ? &record->rows[row % HL__LEDGER_ROWS] : NULL;
}

const hl__ledger_row *hl__ledger_row_at(hl__ledger *ledger, uint32_t row, uint32_t *number) {
  uint32_t own = row / HL__LEDGER_ROWS;
  const hl__ledger_record *record = hl__ledger_record_at(ledger, own);
  if (!record) return NULL;
  *number = atomic_load(&record->state) == HL__LEDGER_REST ? record->first : own;
  const hl__ledger_record *first = hl__ledger_record_at(ledger, *number);
  if (!first || atomic_load(&first->state) != HL__LEDGER_LIVE) return NULL;
  return &record->rows[row % HL__LEDGER_ROWS];
}

static uint32_t row_hash(const hl__ledger_row *row) {
  return hl__file_hash(row->level, row->bucket);
}

static hl__file_signal *row_signal(const hl__ledger *ledger, const hl__ledger_row *row) {
  return &ledger->space->control->signals[hl__file_stripe_of(row_hash(row))];
}

/* What a row adds to its stripe's count. */
static uint64_t row_count(const hl__ledger_row *row) {
  return row->mode == HL_SHARED ? 1 : UINT64_C(1) << 32;
}

static bool row_valid(const hl__ledger_row *row) {
  return (row->level & (HL_LEVEL_UPDATE - 1)) < HL_LEVELS_MAX &&
         (row->mode == HL_SHARED || row->mode == HL_EXCLUSIVE);
}

static _Atomic uint32_t *row_head(const hl__ledger *ledger, const hl__ledger_row *row)
    HL__REQUIRES(hl__file_ledger_mutex) {
  return &ledger->header->heads[hl__file_stripe_of(row_hash(row))][row->mode != HL_SHARED];
}

uint32_t hl__ledger_chain(hl__ledger *ledger, uint32_t stripe, hl_mode mode) {
  return atomic_load(&ledger->header->heads[stripe][mode != HL_SHARED]);
}

uint32_t hl__ledger_chain_next(hl__ledger *ledger, uint32_t row) {
  const hl__ledger_row *it = row_at(ledger, row);
  return it ? it->next : HL__LEDGER_NONE;
}

/* ---------------------------------------------------------------- chains */

static void row_link(hl__ledger *ledger, uint32_t row) HL__REQUIRES(hl__file_ledger_mutex) {
  hl__ledger_row *it = row_at(ledger, row);
  _Atomic uint32_t *head = row_head(ledger, it);
  uint32_t first = atomic_load(head);
  hl__ledger_row *behind = row_at(ledger, first);
  it->previous = HL__LEDGER_NONE;
  it->next = behind ? first : HL__LEDGER_NONE;
  if (behind) behind->previous = row;
  atomic_store(head, row);
}

static void row_unlink(hl__ledger *ledger, uint32_t row) HL__REQUIRES(hl__file_ledger_mutex) {
  hl__ledger_row *it = row_at(ledger, row);
  hl__ledger_row *before = row_at(ledger, it->previous);
  hl__ledger_row *behind = row_at(ledger, it->next);
  if (before)
    before->next = it->next;
  else if (atomic_load(row_head(ledger, it)) == row)
    atomic_store(row_head(ledger, it), it->next);
  if (behind) behind->previous = it->previous;
}

static void record_free(hl__ledger *ledger, uint32_t number) HL__REQUIRES(hl__file_ledger_mutex) {
  hl__ledger_record *record = hl__ledger_record_at(ledger, number);
  atomic_store(&record->state, HL__LEDGER_FREE);
  record->next = atomic_load(&ledger->header->free);
  atomic_store(&ledger->header->free, number);
}

static void change_begin(hl__ledger *ledger) HL__REQUIRES(hl__file_ledger_mutex) {
  atomic_store(&ledger->header->changing, 1u);
}

static void change_end(hl__ledger *ledger) HL__REQUIRES(hl__file_ledger_mutex) {
  atomic_store(&ledger->header->changing, 0u);
}

/* Whether a record is what it says, as far as it can be told; what belongs to no lease is
   none. */
static bool record_valid(hl__ledger *ledger, const hl__ledger_record *record)
    HL__REQUIRES(hl__file_ledger_mutex) {
  uint32_t state = atomic_load(&record->state);
  if (state == HL__LEDGER_REVOKED) return true;
  if (state != HL__LEDGER_LIVE && state != HL__LEDGER_REST) return false;
  if (record->row_count < 1 || record->row_count > HL__LEDGER_ROWS) return false;
  for (uint32_t i = 0; i < record->row_count; i++)
    if (!row_valid(&record->rows[i])) return false;
  if (state == HL__LEDGER_LIVE) return true;
  const hl__ledger_record *first = hl__ledger_record_at(ledger, record->first);
  return first && atomic_load(&first->state) == HL__LEDGER_LIVE &&
         memcmp(first->id, record->id, sizeof first->id) == 0;
}

void hl__ledger_mend(hl__ledger *ledger) {
  hl__ledger_header *header = ledger->header;
  uint64_t counts[HL__FILE_STRIPES] = {0};
  change_begin(ledger);
  atomic_store(&header->free, HL__LEDGER_NONE);
  for (uint32_t i = 0; i < HL__FILE_STRIPES; i++) {
    atomic_store(&header->heads[i][0], HL__LEDGER_NONE);
    atomic_store(&header->heads[i][1], HL__LEDGER_NONE);
  }
  /* First the leases, then what belongs to them. */
  for (uint32_t i = ledger->records; i-- > 0;) {
    hl__ledger_record *record = hl__ledger_record_at(ledger, i);
    if (atomic_load(&record->state) == HL__LEDGER_REST) continue;
    if (record_valid(ledger, record))
      record->next = HL__LEDGER_NONE;
    else
      record_free(ledger, i);
  }
  for (uint32_t i = ledger->records; i-- > 0;) {
    hl__ledger_record *record = hl__ledger_record_at(ledger, i);
    uint32_t state = atomic_load(&record->state);
    if (state != HL__LEDGER_LIVE && state != HL__LEDGER_REST) continue;
    if (!record_valid(ledger, record)) {
      record_free(ledger, i);
      continue;
    }
    if (state == HL__LEDGER_REST) {
      hl__ledger_record *first = hl__ledger_record_at(ledger, record->first);
      record->next = first->next;
      first->next = i;
    }
    for (uint32_t j = 0; j < record->row_count; j++) {
      row_link(ledger, i * HL__LEDGER_ROWS + j);
      counts[hl__file_stripe_of(row_hash(&record->rows[j]))] += row_count(&record->rows[j]);
    }
  }
  for (uint32_t i = 0; i < HL__FILE_STRIPES; i++)
    atomic_store(&ledger->space->control->signals[i].leases, counts[i]);
  change_end(ledger);
}

/* ------------------------------------------------------ adding, removing */

/* More free records: half as many as there are, at least a chunk of them. */
static int ledger_grow(hl__ledger *ledger, hl_error *error) HL__REQUIRES(hl__file_ledger_mutex) {
  uint32_t before = ledger->records;
  uint32_t chunks = before / HL__LEDGER_CHUNK_RECORDS / 2;
  uint32_t after = before + (chunks ? chunks : 1) * HL__LEDGER_CHUNK_RECORDS;
  if (after > HL__LEDGER_MAX) after = HL__LEDGER_MAX;
  if (after == before)
    return hl__error(error, HL_ESTORE, "there are as many leases in %s as it can keep",
                     ledger->space->directory.path);
  int status = hl__ledger_extend(ledger, after, error);
  if (status) return status;
  for (uint32_t i = after; i-- > before;) record_free(ledger, i);
  atomic_store(&ledger->header->records, after);
  return HL_OK;
}

/* A free one; NULL: it is none. */
static hl__ledger_record *record_unused(hl__ledger *ledger, uint32_t number)
    HL__REQUIRES(hl__file_ledger_mutex) {
  hl__ledger_record *record = hl__ledger_record_at(ledger, number);
  return record && atomic_load(&record->state) == HL__LEDGER_FREE ? record : NULL;
}

/* Whether so many are free. */
static bool records_unused(hl__ledger *ledger, size_t n) HL__REQUIRES(hl__file_ledger_mutex) {
  uint32_t number = atomic_load(&ledger->header->free);
  for (; n > 0; n--) {
    const hl__ledger_record *record = record_unused(ledger, number);
    if (!record) return false;
    number = record->next;
  }
  return true;
}

static int record_take(hl__ledger *ledger, uint32_t *number, hl_error *error)
    HL__REQUIRES(hl__file_ledger_mutex) {
  *number = atomic_load(&ledger->header->free);
  hl__ledger_record *record = record_unused(ledger, *number);
  if (!record) {
    int status = ledger_grow(ledger, error);
    if (status) return status;
    *number = atomic_load(&ledger->header->free);
    record = record_unused(ledger, *number);
  }
  if (!record) return hl__ledger_strange_error(ledger, error);
  atomic_store(&ledger->header->free, record->next);
  return HL_OK;
}

/* Written, not yet valid. */
static void record_fill(hl__ledger_record *record, const hl__ledger_record *model, uint32_t next,
                        uint32_t first, const hl_row *rows, size_t n) {
  /* All behind the words by which a free one is known. */
  const size_t skip = offsetof(hl__ledger_record, mode);
  memcpy((char *)record + skip, (const char *)model + skip,
         offsetof(hl__ledger_record, rows) - skip);
  record->next = next;
  record->first = first;
  record->row_count = (uint16_t)n;
  for (size_t i = 0; i < n; i++)
    record->rows[i] = (hl__ledger_row){
        .bucket = (uint32_t)rows[i].bucket, .level = rows[i].level, .mode = rows[i].mode};
}

/* Its rows count and are found, before it is valid. Model: ledger.pml, add. */
static void record_enter(hl__ledger *ledger, uint32_t number) HL__REQUIRES(hl__file_ledger_mutex) {
  hl__ledger_record *record = hl__ledger_record_at(ledger, number);
  for (uint32_t i = 0; i < record->row_count; i++) {
    hl__ledger_row *row = &record->rows[i];
    (void)atomic_fetch_add(&row_signal(ledger, row)->leases, row_count(row));
    row_link(ledger, number * HL__LEDGER_ROWS + i);
  }
}

static int lease_add(hl__ledger *ledger, const hl__ledger_record *model, const hl_row *rows,
                     size_t n, uint32_t *number, hl_error *error)
    HL__REQUIRES(hl__file_ledger_mutex) {
  uint32_t next = HL__LEDGER_NONE;
  size_t beyond = n > HL__LEDGER_ROWS ? n - HL__LEDGER_ROWS : 0;
  size_t here = n - beyond;
  change_begin(ledger);
  int status = record_take(ledger, number, error);
  while (beyond > 0 && status == HL_OK) {
    uint32_t rest;
    size_t some = beyond < HL__LEDGER_ROWS ? beyond : HL__LEDGER_ROWS;
    status = record_take(ledger, &rest, error);
    if (status) break;
    beyond -= some;
    hl__ledger_record *record = hl__ledger_record_at(ledger, rest);
    record_fill(record, model, next, *number, rows + here + beyond, some);
    record_enter(ledger, rest);
    atomic_store(&record->state, HL__LEDGER_REST);
    next = rest;
  }
  if (status) {
    hl__ledger_mend(ledger); /* those that were taken belong to no lease */
    return status;
  }
  hl__ledger_record *record = hl__ledger_record_at(ledger, *number);
  record_fill(record, model, next, *number, rows, here);
  record_enter(ledger, *number);
  atomic_store(&record->state, HL__LEDGER_LIVE);
  change_end(ledger);
  return HL_OK;
}

/* It has ceased to be valid: its rows are not found and do not count any more. Model:
   ledger.pml, remove. */
static void record_leave(hl__ledger *ledger, uint32_t number) HL__REQUIRES(hl__file_ledger_mutex) {
  hl__ledger_record *record = hl__ledger_record_at(ledger, number);
  for (uint32_t i = 0; i < record->row_count && i < HL__LEDGER_ROWS; i++) {
    hl__ledger_row *row = &record->rows[i];
    if (!row_valid(row)) continue;
    row_unlink(ledger, number * HL__LEDGER_ROWS + i);
    (void)atomic_fetch_sub(&row_signal(ledger, row)->leases, row_count(row));
    hl__file_futex_wake(ledger->space, row_hash(row));
  }
}

void hl__ledger_remove(hl__ledger *ledger, uint32_t number, enum hl__ledger_state state) {
  hl__ledger_record *record = hl__ledger_record_at(ledger, number);
  uint32_t rest = record->next;
  change_begin(ledger);
  atomic_store(&record->state, state);
  record_leave(ledger, number);
  record->next = HL__LEDGER_NONE;
  if (state == HL__LEDGER_FREE) record_free(ledger, number);
  while (rest != HL__LEDGER_NONE) {
    hl__ledger_record *more = hl__ledger_record_at(ledger, rest);
    if (!more || atomic_load(&more->state) != HL__LEDGER_REST || more->first != number) {
      hl__ledger_mend(ledger);
      return;
    }
    uint32_t behind = more->next;
    record_leave(ledger, rest);
    record_free(ledger, rest);
    rest = behind;
  }
  change_end(ledger);
}

/* Records become free of what has been over for so long (ms). Returns how many. */
static uint32_t ledger_sweep(hl__ledger *ledger, int64_t over) HL__REQUIRES(hl__file_ledger_mutex) {
  int64_t now = hl__unix_ms();
  uint32_t freed = 0;
  for (uint32_t i = 0; i < ledger->records; i++) {
    hl__ledger_record *record = hl__ledger_record_at(ledger, i);
    uint32_t state = atomic_load(&record->state);
    if ((state != HL__LEDGER_LIVE && state != HL__LEDGER_REVOKED) ||
        hl__ledger_left(ledger, record) > 0 ||
        hl__between_ms(atomic_load(&record->end_unix), now) < over)
      continue;
    if (state == HL__LEDGER_LIVE)
      hl__ledger_remove(ledger, i, HL__LEDGER_FREE);
    else
      hl__ledger_forget(ledger, i);
    freed++;
  }
  return freed;
}

static int row_compare(const void *a, const void *b) {
  const hl__ledger_row *x = a;
  const hl_row *y = b;
  return hl__row_order(x->level, x->bucket, y->level, y->bucket);
}

static void row_convert(hl__ledger *ledger, uint32_t at, uint8_t mode)
    HL__REQUIRES(hl__file_ledger_mutex) {
  hl__ledger_row *row = row_at(ledger, at);
  hl__file_signal *signal = row_signal(ledger, row);
  uint64_t before = row_count(row);
  row_unlink(ledger, at);
  row->mode = mode;
  (void)atomic_fetch_add(&signal->leases, row_count(row));
  row_link(ledger, at);
  (void)atomic_fetch_sub(&signal->leases, before);
  hl__file_futex_wake(ledger->space, row_hash(row));
}

void hl__ledger_convert(hl__ledger *ledger, uint32_t number, const hl_row *rows, size_t n,
                        hl_mode mode) {
  hl__ledger_record *record = hl__ledger_record_at(ledger, number);
  record->mode = (uint8_t)mode;
  change_begin(ledger);
  for (uint32_t steps = ledger->records; steps > 0 && record; steps--) {
    for (uint32_t i = 0; i < record->row_count && i < HL__LEDGER_ROWS; i++) {
      const hl_row *found = bsearch(&record->rows[i], rows, n, sizeof *rows, row_compare);
      if (found && found->mode != record->rows[i].mode)
        row_convert(ledger, number * HL__LEDGER_ROWS + i, found->mode);
    }
    number = record->next;
    record = hl__ledger_record_at(ledger, number);
  }
  change_end(ledger);
}

int hl__ledger_add(hl__ledger *ledger, const hl__ledger_record *model, const hl_row *rows, size_t n,
                   uint32_t *number, hl_error *error) {
  if (hl__update_rows(rows, n) > 0) ledger->header->version = HL__LEDGER_VERSION_UPDATES;
  /* Where that has found little it is not worth looking again so soon. */
  if (!records_unused(ledger, (n + HL__LEDGER_ROWS - 1) / HL__LEDGER_ROWS) &&
      ledger_sweep(ledger, KEPT_MS) < ledger->records / 16) {
    change_begin(ledger);
    (void)ledger_grow(ledger, NULL);
    change_end(ledger);
  }
  int status = lease_add(ledger, model, rows, n, number, error);
  /* There is no space: then nothing stays that is over. */
  if (status == HL_ESTORE && ledger_sweep(ledger, 0) > 0)
    status = lease_add(ledger, model, rows, n, number, error);
  return status;
}

void hl__ledger_forget(hl__ledger *ledger, uint32_t number) {
  change_begin(ledger);
  record_free(ledger, number);
  change_end(ledger);
}
