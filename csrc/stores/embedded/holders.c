/*
 * holders.c - who holds and awaits what, for observers, and the list of leases. Other
 * processes write and change what this file reads. So it copies, looks again, and cuts to size.
 */
#include "embedded_store.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* How often a text that changes under our eyes is read again. */
#define ATTEMPTS 8
/* So many rows has a lease at most, in a table that is not damaged. */
#define CHAIN_MAX (HL__SHM_CHUNKS * HL__SHM_PER_CHUNK)

bool hl__embedded_id_is(hl__a64 words[2], const uint8_t id[16]) {
  uint64_t wanted[2];
  memcpy(wanted, id, sizeof wanted);
  return atomic_load(&words[0]) == wanted[0] && atomic_load(&words[1]) == wanted[1];
}

void hl__embedded_id_get(uint8_t id[16], hl__a64 words[2]) {
  uint64_t values[2] = {atomic_load(&words[0]), atomic_load(&words[1])};
  memcpy(id, values, sizeof values);
}

int64_t hl__embedded_left(hl__shm_space *space, uint64_t word) {
  int64_t now = hl__shm_boot_ms(space), end = hl__shm_end_ms(word);
  if (end <= now) return 0;
  /* Whatever is written there. */
  int64_t left = hl__between_ms(now, end);
  return left < HL_TTL_MAX ? left : HL_TTL_MAX;
}

/* Nothing that a terminal obeys. */
static void text_take(char *out, size_t size, const hl__a64 *words, size_t count) {
  char text[256];
  hl__shm_text_get(text, words, count);
  (void)hl__escape(out, size, text, strnlen(text, count * sizeof *words));
}

static void note_take(hl_holder *holder, const hl__shm_note *note) {
  text_take(holder->application, sizeof holder->application, note->application,
            HL__SHM_TEXT(sizeof holder->application));
  text_take(holder->label, sizeof holder->label, note->label, HL__SHM_TEXT(sizeof holder->label));
  text_take(holder->path, sizeof holder->path, note->path, HL__SHM_TEXT(sizeof holder->path));
  holder->since_ms = (int64_t)atomic_load(&note->since_ms);
  holder->mode = hl__mode_read(atomic_load(&note->mode));
}

/* ------------------------------------------------------------------- rows */

static int row_compare(const void *a, const void *b) { return hl__row_compare(a, b); }

/* Finds the row of a claim among rows in locking order; NULL: it is none of them. */
static const hl_row *row_find(const hl_row *rows, size_t n, uint64_t claim) {
  const hl_row row = {.level = (uint8_t)(hl__shm_key_of(claim) >> 32), .bucket = (uint32_t)claim};
  return bsearch(&row, rows, n, sizeof *rows, row_compare);
}

static bool conflicts(const hl_lease_filter *filter, uint64_t claim) {
  if (filter->n == 0) return true;
  const hl_row *row = row_find(filter->rows, filter->n, claim);
  return row && hl__modes_conflict(row->mode, hl__shm_mode_of(claim));
}

/* ----------------------------------------------------------------- leases */

bool hl__embedded_lease_matches(hl__shm_space *space, uint32_t index,
                                const hl_lease_filter *filter) {
  hl__shm_lease *lease = hl__shm_lease_at(space, index);
  char owner[HL_OWNER_MAX + 1];
  if (!lease || (atomic_load(&lease->base.used) & HL__MAKES) != 0 ||
      atomic_load(&lease->base.end) == 0)
    return false;
  if (filter->id && !hl__embedded_id_is(lease->id, filter->id)) return false;
  hl__shm_text_get(owner, lease->owner, HL__SHM_TEXT(sizeof owner));
  if (filter->owner && strcmp(filter->owner, owner) != 0) return false;
  if (filter->n == 0) return true;
  uint32_t at = atomic_load(&lease->base.first);
  for (uint32_t steps = 0; at && steps < CHAIN_MAX; steps++) {
    hl__shm_node *node = hl__shm_node_at(space, at);
    if (!node || atomic_load(&node->session) != index) return false;
    uint64_t claim = atomic_load(&node->claim);
    if (hl__shm_state_of(claim) == HL__HELD && conflicts(filter, claim)) return true;
    at = node->chain;
  }
  return false;
}

static void lease_take(hl__shm_space *space, hl__shm_lease *lease, hl_holder *holder) {
  uint8_t id[16];
  hl__embedded_id_get(id, lease->id);
  const uint64_t pid = atomic_load(&lease->pid);
  *holder = (hl_holder){.pid = hl__shm_pid(space, (uint32_t)pid, pid >> 32),
                        .kind = HL_LEASE,
                        .remaining_ms = hl__embedded_left(space, atomic_load(&lease->base.end))};
  note_take(holder, &lease->base.note);
  text_take(holder->host, sizeof holder->host, lease->host, HL__SHM_TEXT(sizeof holder->host));
  hl__shm_text_get(holder->owner, lease->owner, HL__SHM_TEXT(sizeof holder->owner));
  (void)hl__hex(holder->id, id, sizeof id);
}

/* A list of leases under way. */
typedef struct listing {
  hl__shm_space *space;
  const hl_lease_filter *filter;
  hl_holder_fn fn;
  void *context;
} listing;

static bool lease_list(void *context, uint32_t index) {
  const listing *self = context;
  hl__shm_lease *lease = hl__shm_lease_at(self->space, index);
  if (!lease) return true;
  uint64_t stamp = atomic_load(&lease->base.stamp), turn;
  hl_holder holder;
  if (!hl__embedded_lease_matches(self->space, index, self->filter)) return true;
  int attempts = 0;
  do {
    turn = atomic_load(&lease->base.note.turn);
    lease_take(self->space, lease, &holder);
  } while ((turn % 2 != 0 || turn != atomic_load(&lease->base.note.turn)) && ++attempts < ATTEMPTS);
  /* The copy is of one lease, and the lease is still there. */
  if (atomic_load(&lease->base.stamp) != stamp || atomic_load(&lease->base.end) == 0) return true;
  if (self->filter->over || holder.remaining_ms > 0) self->fn(self->context, &holder);
  return true;
}

void hl__embedded_leases_list(hl__shm_space *space, const hl_lease_filter *filter, hl_holder_fn fn,
                              void *context) {
  listing self = {space, filter, fn, context};
  hl__shm_each_lease(space, lease_list, &self);
}

/* --------------------------------------------------------------- sessions */

/* A claim of a request. */
typedef struct finding {
  hl__shm_claim_seen seen;
  bool hit;     /* it conflicts */
  bool waiting; /* a claim of the request waits */
} finding;

typedef struct findings {
  hl__shm_space *space;
  const hl_lease_filter *filter;
  finding *all;
  size_t n, capacity;
  bool failed;
} findings;

/* Whether a request that waits wants a row that conflicts. */
static bool is_wanted(const findings *self, uint32_t note) {
  hl__shm_record *record = hl__shm_record_at(self->space, note);
  uint32_t number = record ? atomic_load(&record->first) : 0;
  const hl__shm_record *rows = hl__shm_record_at(self->space, number);
  uint32_t n = rows ? atomic_load(&rows->note.mode) : 0;
  const hl__a64 *words = rows ? rows->note.application : NULL; /* and the texts behind it */
  for (uint32_t i = 0; i < n && i < HL__SHM_WANTED; i++)
    if (conflicts(self->filter, atomic_load(&words[i]))) return true;
  return false;
}

static bool claim_find(void *context, const hl__shm_claim_seen *seen) {
  findings *self = context;
  bool hit = conflicts(self->filter, seen->claim);
  bool waiting = hl__shm_state_of(seen->claim) == HL__WAIT;
  if (seen->slot == 0 || (!hit && !waiting)) return true;
  hit = hit || is_wanted(self, seen->note);
  if (self->n == self->capacity) {
    size_t capacity = self->capacity ? 2 * self->capacity : 64;
    finding *grown = realloc(self->all, capacity * sizeof *grown);
    self->failed = !grown;
    if (!grown) return false;
    self->all = grown;
    self->capacity = capacity;
  }
  self->all[self->n++] = (finding){*seen, hit, waiting};
  return true;
}

/* By session, then by request; of a request, what waits first. */
static int claim_compare(const void *a, const void *b) {
  const finding *x = a, *y = b;
  if (x->seen.session != y->seen.session) return x->seen.session < y->seen.session ? -1 : 1;
  if (x->seen.note != y->seen.note) return x->seen.note < y->seen.note ? -1 : 1;
  if (x->waiting != y->waiting) return x->waiting ? -1 : 1;
  return (int)y->hit - (int)x->hit;
}

/* By session; held rows before awaited ones. */
static int request_compare(const void *a, const void *b) {
  const finding *x = a, *y = b;
  if (x->seen.session != y->seen.session) return x->seen.session < y->seen.session ? -1 : 1;
  return (int)x->waiting - (int)y->waiting;
}

/* Keeps one claim of each request that has a conflicting one. */
static size_t requests_of(finding *all, size_t n) {
  size_t count = 0;
  for (size_t i = 0, next; i < n; i = next) {
    bool waiting = all[i].waiting;
    size_t hit = n;
    for (next = i; next < n && all[next].seen.session == all[i].seen.session &&
                   all[next].seen.note == all[i].seen.note;
         next++)
      if (all[next].hit && hit == n) hit = next;
    if (hit == n) continue;
    all[count] = all[hit];
    all[count++].waiting = waiting;
  }
  return count;
}

/* False: the request has ended meanwhile. */
static bool session_take(hl__shm_space *space, const finding *found, hl_holder *holder) {
  const hl__shm_claim_seen *seen = &found->seen;
  const hl__shm_record *session = hl__shm_record_at(space, seen->session);
  hl__shm_record *record = hl__shm_record_at(space, seen->note);
  hl__shm_node *node = hl__shm_node_at(space, seen->node);
  if (!session || !record || !node || seen->slot >= HL__SHM_SLOTS) return false;
  hl__shm_slot *slot = &space->table->slot[seen->slot];
  int attempts = 0;
  uint64_t turn;
  do {
    turn = atomic_load(&record->note.turn);
    *holder = (hl_holder){.pid = hl__shm_slot_pid(space, slot), .waiting = found->waiting};
    note_take(holder, &record->note);
  } while ((turn % 2 != 0 || turn != atomic_load(&record->note.turn)) && ++attempts < ATTEMPTS);
  text_take(holder->host, sizeof holder->host, slot->host, HL__SHM_TEXT(sizeof holder->host));
  /* The sessions of each process have numbers of their own. */
  if (holder->pid)
    (void)snprintf(holder->session, sizeof holder->session, "%" PRId64 ".%" PRIu32, holder->pid,
                   atomic_load(&session->number));
  /* Or it was granted meanwhile. */
  uint64_t claim = atomic_load(&node->claim);
  unsigned state = hl__shm_state_of(claim);
  return hl__shm_key_of(claim) == hl__shm_key_of(seen->claim) &&
         (state == HL__HELD || state == HL__WAIT) && atomic_load(&node->note) == seen->note;
}

int hl__embedded_sessions_list(hl__shm_space *space, const hl_lease_filter *filter, hl_holder_fn fn,
                               void *context, hl_error *error) {
  findings found = {.space = space, .filter = filter};
  hl__shm_each_claim(space, claim_find, &found);
  if (found.failed) {
    free(found.all);
    return hl__error_memory(error);
  }
  if (found.n > 0) qsort(found.all, found.n, sizeof *found.all, claim_compare);
  size_t n = requests_of(found.all, found.n);
  if (n > 0) qsort(found.all, n, sizeof *found.all, request_compare);
  /* Tells of each session once, though it may have made several requests. A list of everything also
     tells what a session awaits beside its locks. */
  const finding *told = NULL;
  for (size_t i = 0; i < n; i++) {
    const finding *it = &found.all[i];
    hl_holder holder;
    bool again = told && told->seen.session == it->seen.session &&
                 (filter->n > 0 || told->waiting == it->waiting);
    if (again || !session_take(space, it, &holder)) continue;
    fn(context, &holder);
    told = it;
  }
  free(found.all);
  return HL_OK;
}
