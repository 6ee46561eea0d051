/*
 * table.c - the rows that this process holds. Takes a row at once where that is
 * possible, and gives rows back; what happens where it is not possible is in
 * queue.c. Knows no requests, only single rows.
 *
 * A row is granted in two steps, both under its stripe's mutex: the sessions of
 * the process must allow it (the entry), and then the kernel on behalf of the
 * process. The common case costs one system call to take a row and one to give
 * it back; none, where another session of the process holds it shared already.
 */
#include "file.h"
#include "offset.h"

#include <errno.h>
#include <stdlib.h>

/* Mixes (Appleby's finaliser of MurmurHash3), because neighbouring buckets must
   not share a stripe. Part of the format: all processes must find a row in the
   same stripe. */
uint32_t hl__file_hash(uint32_t level, uint64_t bucket) {
  uint32_t h = (uint32_t)bucket + level * 0x9E3779B9u;
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  h ^= h >> 16;
  return h;
}

static hl__file_entry **head_of(hl__file_stripe *stripe, uint32_t hash) {
  return &stripe->heads[hash / HL__FILE_STRIPES % HL__FILE_HEADS];
}

/* ------------------------------------------------------------- entries */

static bool entry_idle(const hl__file_entry *entry) HL__REQUIRES(hl__file_stripe_mutex) {
  return !entry->exclusive && entry->shared == 0 && !entry->first;
}

/* The row's entry, a new one if need be; NULL when out of memory. */
static hl__file_entry *entry_find(hl__file_stripe *stripe, uint32_t hash, const hl_row *row)
    HL__REQUIRES(hl__file_stripe_mutex) {
  hl__file_entry **head = head_of(stripe, hash);
  hl__file_entry *entry = *head;
  while (entry && (entry->bucket != row->bucket || entry->level != row->level)) entry = entry->next;
  if (entry) return entry;

  entry = stripe->free;
  if (entry)
    stripe->free = entry->next;
  else if (!(entry = malloc(sizeof *entry)))
    return NULL;
  *entry = (hl__file_entry){.next = *head, .bucket = (uint32_t)row->bucket, .level = row->level};
  *head = entry;
  stripe->entries++;
  return entry;
}

/* Puts an entry that nobody needs any more on the free list. */
static void entry_drop(hl__file_stripe *stripe, uint32_t hash, hl__file_entry *entry)
    HL__REQUIRES(hl__file_stripe_mutex) {
  if (!entry_idle(entry)) return;
  hl__file_entry **link = head_of(stripe, hash);
  while (*link != entry) link = &(*link)->next;
  *link = entry->next;
  entry->next = stripe->free;
  stripe->free = entry;
  stripe->entries--;
}

int hl__file_entry_grant(hl__file_stripe *stripe, hl__file_entry *entry, hl_mode mode,
                         bool conversion, hl_error *error) {
  /* The sessions of the process: those who convert hold it themselves. */
  uint32_t own = conversion ? 1 : 0;
  if (entry->exclusive || (mode == HL_EXCLUSIVE && entry->shared > own)) return HL_TIMEOUT;
  /* The kernel. Where the process has it shared, that is enough for one more
     who shares. */
  if (mode == HL_EXCLUSIVE || entry->shared == 0) {
    struct flock range = hl__file_row_range(entry);
    range.l_type = mode == HL_EXCLUSIVE ? F_WRLCK : F_RDLCK;
    if (fcntl(stripe->fd, F_OFD_SETLK, &range) != 0) {
      if (errno == EAGAIN || errno == EACCES) return HL_TIMEOUT;
      return hl__error_errno(error, HL_ESTORE, "the kernel refuses a lock on a file");
    }
  }
  if (mode == HL_SHARED) {
    entry->shared++;
  } else {
    entry->exclusive = true;
    entry->shared -= own;
  }
  return HL_OK;
}

/* -------------------------------------------------------------- taking */

/* Finds the row's stripe and entry. On HL_OK the stripe's mutex is held.
   Unchecked: clang cannot follow a function that returns sometimes with it. */
static int row_enter(hl__file_session *session, hl__file_holding *want, hl_error *error)
    HL__ACQUIRES_IF_0(hl__file_stripe_mutex) HL__UNCHECKED {
  uint32_t index = hl__file_stripe_of(want->hash);
  hl__file_stripe *stripe = &session->space->stripes[index];
  int status = HL_OK;
  hl__file_stripe_lock(stripe);
  stripe->recent = true;
  if (stripe->fd < 0) status = hl__file_stripe_open(session->space, index, error);
  if (status == HL_OK && !want->entry) {
    want->entry = entry_find(stripe, want->hash, &want->row);
    if (!want->entry) status = hl__error_memory(error);
  }
  if (status) hl__file_stripe_unlock(stripe);
  return status;
}

static int row_leave(hl__file_session *session, hl__file_holding *want, int status)
    HL__RELEASES(hl__file_stripe_mutex) {
  hl__file_stripe *stripe = &session->space->stripes[hl__file_stripe_of(want->hash)];
  if (status) {
    entry_drop(stripe, want->hash, want->entry);
    want->entry = NULL;
  }
  hl__file_stripe_unlock(stripe);
  return status;
}

int hl__file_row_try(hl__file_session *session, hl__file_holding *want, bool conversion,
                     bool crowded, hl_error *error) {
  uint32_t index = hl__file_stripe_of(want->hash);
  int status = row_enter(session, want, error);
  if (status) return status;
  hl__file_entry *entry = want->entry;
  /* No session passes those that wait, here or elsewhere, but one that holds the row
     shared already and for which they have to wait. */
  bool queue = conversion ? entry->first && entry->first->conversion
                          : entry->first ||
                                (crowded && hl__file_queue_elsewhere(session->space, index, entry));
  hl__file_stripe *stripe = &session->space->stripes[index];
  if (!queue)
    status = hl__file_entry_grant(stripe, entry, (hl_mode)want->row.mode, conversion, error);
  return row_leave(session, want, queue ? HL_TIMEOUT : status);
}

int hl__file_row_wait(hl__file_session *session, hl__file_holding *want, bool conversion,
                      int64_t deadline, hl_error *error) {
  int status = row_enter(session, want, error);
  if (status) return status;
  return row_leave(session, want, hl__file_queue_wait(session, want, conversion, deadline, error));
}

/* -------------------------------------------------------------- giving back */

/* Model: queue.pml, give_back. */
void hl__file_row_release(hl__file_space *space, const hl__file_holding *holding) {
  hl__file_stripe *stripe = &space->stripes[hl__file_stripe_of(holding->hash)];
  hl__file_entry *entry = holding->entry;
  hl__file_stripe_lock(stripe);
  if (entry->exclusive)
    entry->exclusive = false;
  else
    entry->shared--;
  /* Numbers that a stranger has closed may be of other files. */
  bool ours = atomic_load(&space->gone) != HL__FILE_CLOSED;
  if (entry->shared == 0 && ours) {
    /* Cannot fail: the range is one whole lock of ours, which neighbours do not
       touch, so the kernel need not split anything. */
    struct flock range = hl__file_row_range(entry);
    range.l_type = F_UNLCK;
    (void)fcntl(stripe->fd, F_OFD_SETLK, &range);
  }
  entry_drop(stripe, holding->hash, entry);
  hl__file_stripe_unlock(stripe);
}

void hl__file_row_downgrade(hl__file_space *space, const hl__file_holding *holding) {
  hl__file_stripe *stripe = &space->stripes[hl__file_stripe_of(holding->hash)];
  struct flock range = hl__file_row_range(holding->entry);
  hl__file_stripe_lock(stripe);
  /* Were it to fail, the row would only be kept better than need be. */
  range.l_type = F_RDLCK;
  if (atomic_load(&space->gone) != HL__FILE_CLOSED) (void)fcntl(stripe->fd, F_OFD_SETLK, &range);
  holding->entry->exclusive = false;
  holding->entry->shared = 1;
  hl__file_stripe_unlock(stripe);
}

/* --------------------------------------------------------------- the whole */

bool hl__file_table_empty(hl__file_space *space) {
  for (uint32_t i = 0; i < HL__FILE_STRIPES; i++) {
    hl__file_stripe_lock(&space->stripes[i]);
    uint32_t entries = space->stripes[i].entries;
    hl__file_stripe_unlock(&space->stripes[i]);
    if (entries > 0) return false;
  }
  return true;
}

/* Unchecked: nobody else has the space any more. */
HL__UNCHECKED void hl__file_table_free(hl__file_space *space) {
  for (uint32_t i = 0; i < HL__FILE_STRIPES; i++) {
    hl__file_entry *entry = space->stripes[i].free;
    while (entry) {
      hl__file_entry *next = entry->next;
      free(entry);
      entry = next;
    }
  }
}
