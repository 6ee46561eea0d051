/*
 * partition.c - the index of a partition: rows found by their key, the holders of each and its
 * queue; who is granted what; and making all of it anew from the claims.
 *
 * The index is for speed. The index is right while no process has the lock (invariant 6). If a
 * process dies inside, the mender calls hl__shm_rebuild.
 */
#include "embedded.h"

#include <stdlib.h>
#include <string.h>

/* No list is longer, unless it leads in a circle. */
#define STEPS_MAX (1u << 22)
/* Holders that a purge looks at: it must not take long. */
#define PURGE_MAX 256u

static uint64_t row_key(uint64_t key) { return hl__shm_claim(key, 0, HL__ROW); }

/* ------------------------------------------------------------------ rows */

static void row_free(hl__shm_space *space, uint32_t part, uint32_t index) {
  hl__shm_row *row = hl__shm_row_at(space, index);
  if (!row) return;
  *row = (hl__shm_row){.key = row_key(0), .next = space->table->part[part].free_row};
  space->table->part[part].free_row = index;
}

/* A chunk more of free rows, if there is space. */
static void rows_add(hl__shm_space *space, uint32_t part) {
  const uint32_t chunk = hl__shm_chunk_get(space, HL__ROWS, part);
  space->table->part[part].free_row = 0;
  for (uint32_t i = HL__SHM_PER_CHUNK; chunk && i-- > 0;)
    row_free(space, part, chunk * HL__SHM_PER_CHUNK + i);
}

/* The number of the row of that key; 0: there is none. False: the chain leads nowhere, or in a
   circle. */
static bool row_search(hl__shm_space *space, uint64_t key, uint32_t *index) {
  const uint32_t hash = hl__shm_hash(key);
  uint32_t steps = 0;
  *index = space->table->head[hl__shm_part_of(hash)][hl__shm_head_of(hash)];
  while (*index) {
    const hl__shm_row *row = hl__shm_row_at(space, *index);
    if (!row || ++steps > STEPS_MAX) return false;
    if (row->key == row_key(key)) return true;
    *index = row->next;
  }
  return true;
}

static hl__shm_row *row_make(hl__shm_space *space, uint64_t key, uint32_t *index) {
  const uint32_t hash = hl__shm_hash(key), number = hl__shm_part_of(hash);
  hl__shm_part *part = &space->table->part[number];
  uint32_t *head = &space->table->head[number][hl__shm_head_of(hash)];
  hl__shm_row *row = hl__shm_row_at(space, part->free_row);
  if (!row) rows_add(space, number);
  if (!row) row = hl__shm_row_at(space, part->free_row);
  if (!row) return NULL;
  const uint32_t rest = row->next;
  *index = part->free_row;
  *row = (hl__shm_row){.key = row_key(key), .next = *head};
  part->free_row = rest;
  *head = *index;
  return row;
}

hl__shm_row *hl__shm_row_find(hl__shm_space *space, uint64_t key, bool make, uint32_t *index) {
  if (!row_search(space, key, index)) {
    hl__shm_rebuild(space, hl__shm_claim_part(key));
    if (!row_search(space, key, index)) return NULL;
  }
  if (*index) return hl__shm_row_at(space, *index);
  return make ? row_make(space, key, index) : NULL;
}

hl__shm_row *hl__shm_row_of(hl__shm_space *space, const hl__shm_node *node) {
  hl__shm_row *row = hl__shm_row_at(space, node->row);
  return row && row->key == row_key(hl__shm_key_of(atomic_load(&node->claim))) ? row : NULL;
}

void hl__shm_row_drop(hl__shm_space *space, hl__shm_row *row, uint32_t index) {
  if (row->holders || row->first) return;
  const uint32_t hash = hl__shm_hash(hl__shm_key_of(row->key)), number = hl__shm_part_of(hash);
  uint32_t *link = &space->table->head[number][hl__shm_head_of(hash)];
  for (uint32_t steps = 0; *link != index; steps++) {
    hl__shm_row *before = hl__shm_row_at(space, *link);
    if (!before || steps > STEPS_MAX) {
      return; /* the next one that follows the chain has it made anew */
    }
    link = &before->next;
  }
  *link = row->next;
  row_free(space, number, index);
}

/* ----------------------------------------------------------------- lists */

void hl__shm_hold_link(hl__shm_space *space, hl__shm_row *row, uint32_t index, unsigned mode) {
  hl__shm_node *node = hl__shm_node_at(space, index), *first = hl__shm_node_at(space, row->holders);
  node->prev = 0;
  node->next = first ? row->holders : 0;
  if (first) first->prev = index;
  row->holders = index;
  row->count[mode]++;
}

/* Takes a node out of a list. */
static void unlink_from(hl__shm_space *space, uint32_t *first, uint32_t *last, uint32_t index) {
  hl__shm_node *node = hl__shm_node_at(space, index);
  hl__shm_node *before = hl__shm_node_at(space, node->prev);
  hl__shm_node *after = hl__shm_node_at(space, node->next);
  if (before)
    before->next = node->next;
  else if (*first == index)
    *first = node->next;
  if (after)
    after->prev = node->prev;
  else if (*last == index)
    *last = node->prev;
}

static void hold_unlink(hl__shm_space *space, hl__shm_row *row, uint32_t index, unsigned mode) {
  uint32_t no_last = 0;
  unlink_from(space, &row->holders, &no_last, index);
  if (row->count[mode]) row->count[mode]--;
}

static void queue_unlink(hl__shm_space *space, hl__shm_row *row, uint32_t index) {
  unlink_from(space, &row->first, &row->last, index);
}

/* Whether a waiter's place is before another's: those that hold the row already come first. */
static bool is_before(const hl__shm_node *a, const hl__shm_node *b) {
  const uint32_t converts = a->flags & HL__CONVERTS;
  if (converts != (b->flags & HL__CONVERTS)) return converts != 0;
  return a->seq < b->seq;
}

/* A newcomer is the last, or the last of those that convert; so one of these loops ends at once. */
void hl__shm_queue_link(hl__shm_space *space, hl__shm_row *row, uint32_t index) {
  hl__shm_node *node = hl__shm_node_at(space, index);
  uint32_t before = row->last, after = 0, steps = 0;
  hl__shm_node *at;
  if (node->flags & HL__CONVERTS) {
    after = row->first;
    while ((at = hl__shm_node_at(space, after)) && !is_before(node, at) && steps++ < STEPS_MAX)
      after = at->next;
    if (at) before = at->prev;
  } else {
    while ((at = hl__shm_node_at(space, before)) && is_before(node, at) && steps++ < STEPS_MAX) {
      after = before;
      before = at->prev;
    }
  }
  hl__shm_node *a = hl__shm_node_at(space, before), *b = hl__shm_node_at(space, after);
  node->prev = a ? before : 0;
  node->next = b ? after : 0;
  *(a ? &a->next : &row->first) = index;
  *(b ? &b->prev : &row->last) = index;
}

/* -------------------------------------------------------------- granting */

void hl__shm_wakes_send(hl__shm_wakes *wakes) {
  for (uint32_t i = 0; i < wakes->n; i++) hl__futex_wake(wakes->word[i], 1);
  wakes->n = 0;
}

static void wakes_add(hl__shm_wakes *wakes, hl__a32 *word) {
  if (wakes->n == sizeof wakes->word / sizeof *wakes->word) hl__shm_wakes_send(wakes);
  wakes->word[wakes->n++] = word;
}

/* Tells the bell of the process that has the node. */
static void ring(hl__shm_space *space, uint32_t index, hl__shm_wakes *wakes) {
  const uint32_t owner = hl__shm_owner_of(space, index);
  if (owner == 0 || owner >= HL__SHM_SLOTS) return; /* in a damaged file */
  hl__shm_slot *slot = &space->table->slot[owner];
  const uint32_t at = atomic_fetch_add(&slot->turn, 1) % HL__SHM_RUNG;
  uint32_t none = 0;
  if (!atomic_compare_exchange_strong(&slot->rung[at], &none, index))
    atomic_store(&slot->missed, 1);
  (void)atomic_fetch_add(&slot->bell, 1);
  if (atomic_load(&slot->asleep) && (wakes->n == 0 || wakes->word[wakes->n - 1] != &slot->bell))
    wakes_add(wakes, &slot->bell);
}

void hl__shm_waiter_wake(hl__shm_space *space, uint32_t index, hl__shm_wakes *wakes) {
  hl__shm_node *node = hl__shm_node_at(space, index);
  if (node->flags & HL__RINGS) {
    ring(space, index, wakes);
  } else {
    wakes_add(wakes, &node->wake);
    atomic_store(&node->wake, 1);
  }
}

/* Looks at each holder: those of the node's own session are not in its way, nor are those of the
   lease that it exempts. The exempted lease may end while the node waits, so no count can be kept.
   */
static bool blocked_by_others(hl__shm_space *space, const hl__shm_row *row,
                              const hl__shm_node *node, unsigned mode) {
  const uint32_t session = atomic_load_explicit(&node->session, memory_order_relaxed);
  uint32_t steps = 0;
  for (uint32_t i = row->holders; i;) {
    const hl__shm_node *holder = hl__shm_node_at(space, i);
    if (!holder || steps++ > STEPS_MAX) return true; /* a damaged file grants nothing */
    const uint64_t claim = atomic_load(&holder->claim);
    const bool own = atomic_load_explicit(&holder->session, memory_order_relaxed) == session ||
                     (holder->flags & HL__LEASED && holder->own == node->own);
    if (!own && hl__modes_conflict(mode, hl__shm_mode_of(claim))) return true;
    i = holder->next;
  }
  return false;
}

bool hl__shm_blocked(hl__shm_space *space, const hl__shm_row *row, const hl__shm_node *node,
                     unsigned mode) {
  bool blocked = false;
  for (unsigned other = 0; other < 8 && row->holders; other++) {
    uint32_t own = node->flags & HL__EXEMPTS ? 0 : (uint32_t)(node->own >> 8 * other) & 0xFF;
    if (hl__modes_conflict(mode, other) && row->count[other] > own) blocked = true;
  }
  return blocked && (!(node->flags & HL__EXEMPTS) || blocked_by_others(space, row, node, mode));
}

void hl__shm_grant(hl__shm_space *space, hl__shm_row *row, hl__shm_wakes *wakes) {
  uint32_t steps = 0;
  for (uint32_t index; (index = row->first) != 0;) {
    hl__shm_node *node = hl__shm_node_at(space, index);
    if (!node || steps++ > STEPS_MAX) {
      row->first = row->last = 0;
      return;
    }
    node->prev = 0; /* as it is, but in a damaged file: there it would stay the first */
    uint64_t claim = atomic_load(&node->claim);
    const unsigned mode = hl__shm_mode_of(claim), state = hl__shm_state_of(claim);
    if (state != HL__WAIT) { /* its owner has given up, and did not get the lock */
      queue_unlink(space, row, index);
      if (state == HL__GONE) atomic_store(&node->claim, hl__shm_claim_as(claim, HL__LOOSE));
      continue;
    }
    if (hl__shm_blocked(space, row, node, mode)) return;
    if (!atomic_compare_exchange_strong(&node->claim, &claim, hl__shm_claim_as(claim, HL__HELD)))
      continue;
    queue_unlink(space, row, index);
    hl__shm_hold_link(space, row, index, mode);
    hl__shm_waiter_wake(space, index, wakes);
    (void)atomic_fetch_add_explicit(&space->handed, 1, memory_order_relaxed);
  }
}

void hl__shm_row_purge(hl__shm_space *space, hl__shm_row *row, hl__shm_wakes *wakes) {
  uint32_t steps = 0;
  for (uint32_t i = row->holders; i && steps < PURGE_MAX; steps++) {
    hl__shm_node *node = hl__shm_node_at(space, i);
    if (!node) return;
    const uint32_t next = node->next;
    const uint64_t claim = atomic_load(&node->claim);
    if (hl__shm_state_of(claim) == HL__LEFT) {
      hold_unlink(space, row, i, hl__shm_mode_of(claim));
      atomic_store(&node->claim, hl__shm_claim_as(claim, HL__LOOSE));
    }
    i = next;
  }
  hl__shm_grant(space, row, wakes);
}

void hl__shm_claim_end(hl__shm_space *space, uint32_t index, hl__shm_wakes *wakes) {
  hl__shm_node *node = hl__shm_node_at(space, index);
  const uint64_t claim = atomic_load(&node->claim);
  const unsigned state = hl__shm_state_of(claim), mode = hl__shm_mode_of(claim);
  const bool linked = state != HL__FREE && state != HL__LOOSE && state != HL__RESERVED;
  const uint32_t at = node->row;
  hl__shm_row *row = linked ? hl__shm_row_of(space, node) : NULL;
  /* Out of its list first: any process may set a node of slot 0 aside once the claim is FREE, and
     write its links. */
  if (row && (state == HL__HELD || state == HL__LEFT))
    hold_unlink(space, row, index, mode);
  else if (row)
    queue_unlink(space, row, index);
  /* The claim is FREE before another session is granted what it kept out. */
  atomic_store_explicit(&node->claim, 0, memory_order_release);
  if (row) {
    if (row->first) hl__shm_grant(space, row, wakes);
    hl__shm_row_drop(space, row, at);
  } else if (linked) { /* the file was damaged */
    hl__shm_rebuild(space, hl__shm_claim_part(claim));
  }
}

int hl__shm_claim_clear(hl__shm_space *space, uint32_t index, int64_t deadline, hl_error *error) {
  hl__shm_node *node = hl__shm_node_at(space, index);
  const uint64_t claim = node ? atomic_load(&node->claim) : 0;
  hl__shm_wakes wakes = {0};
  if (hl__shm_state_of(claim) == HL__FREE) return HL_OK;
  /* The key of a claim that is not FREE stays; its state may change until we have the lock. */
  const uint32_t part = hl__shm_claim_part(claim);
  int status = hl__shm_part_lock(space, part, deadline, error);
  if (status) return status;
  hl__shm_claim_end(space, index, &wakes);
  hl__shm_part_unlock(space, part);
  hl__shm_wakes_send(&wakes);
  return HL_OK;
}

/* ------------------------------------------------------------- rebuilding */

static void rows_clear(hl__shm_space *space, uint32_t part) {
  hl__shm_table *table = space->table;
  memset(table->head[part], 0, sizeof table->head[part]);
  table->part[part].free_row = 0;
  for (uint32_t at = 0; hl__shm_unit_next(space, HL__ROWS, part, &at);) row_free(space, part, at);
}

/* What waits in the partition. */
typedef struct waiter {
  uint64_t seq;
  uint32_t converts, index;
} waiter;

typedef struct waiters {
  waiter *all;
  size_t n, capacity;
} waiters;

static int waiter_compare(const void *a, const void *b) {
  const waiter *x = a, *y = b;
  if (x->converts != y->converts) return x->converts ? -1 : 1;
  return x->seq < y->seq ? -1 : x->seq > y->seq;
}

static bool waiters_add(waiters *them, uint32_t index, const hl__shm_node *node) {
  if (them->n == them->capacity) {
    size_t capacity = them->capacity ? 2 * them->capacity : 64;
    waiter *more = realloc(them->all, capacity * sizeof *more);
    if (!more) return false;
    them->all = more;
    them->capacity = capacity;
  }
  them->all[them->n++] = (waiter){node->seq, node->flags & HL__CONVERTS, index};
  return true;
}

/* Enters one claim, if it is of the partition. Changes no claim but GONE and LEFT to LOOSE. */
static void claim_enter(hl__shm_space *space, uint32_t part, uint32_t index, waiters *them,
                        hl__shm_wakes *wakes) {
  hl__shm_node *node = hl__shm_node_at(space, index);
  const uint64_t claim = node ? atomic_load(&node->claim) : 0, key = hl__shm_key_of(claim);
  const unsigned state = hl__shm_state_of(claim);
  if (state < HL__WAIT || state > HL__LEFT || hl__shm_claim_part(claim) != part) return;
  if (state == HL__GONE || state == HL__LEFT) {
    atomic_store(&node->claim, hl__shm_claim_as(claim, HL__LOOSE));
    return;
  }
  /* Without a row only in a file that was damaged: each claim has had one. */
  if (!row_search(space, key, &node->row)) return;
  hl__shm_row *row =
      node->row ? hl__shm_row_at(space, node->row) : row_make(space, key, &node->row);
  if (!row) return;
  if (state == HL__WAIT) {
    if (!waiters_add(them, index, node))
      hl__shm_queue_link(space, row, index); /* slowly, without memory */
    return;
  }
  hl__shm_hold_link(space, row, index, hl__shm_mode_of(claim));
  /* The dead process may have granted it just now. */
  if (node->flags & HL__RINGS) ring(space, index, wakes);
}

/* Before the last step it changes nothing that counts; so it can be killed anywhere, and begun
   again. It needs no space in the file. */
void hl__shm_rebuild(hl__shm_space *space, uint32_t part) {
  waiters them = {0};
  hl__shm_wakes wakes = {0};
  rows_clear(space, part);
  for (uint32_t at = 0; hl__shm_unit_next(space, HL__NODES, HL__SHM_ANY, &at);)
    claim_enter(space, part, at, &them, &wakes);
  if (them.n) qsort(them.all, them.n, sizeof *them.all, waiter_compare);
  for (size_t i = 0; i < them.n; i++) {
    hl__shm_node *node = hl__shm_node_at(space, them.all[i].index);
    hl__shm_row *row = hl__shm_row_at(space, node->row);
    if (row) hl__shm_queue_link(space, row, them.all[i].index);
  }
  for (size_t i = 0; i < them.n; i++) { /* the dead process may have been about to grant them */
    hl__shm_node *node = hl__shm_node_at(space, them.all[i].index);
    hl__shm_row *row = hl__shm_row_at(space, node->row);
    if (row && hl__shm_state_of(atomic_load(&node->claim)) == HL__WAIT)
      hl__shm_grant(space, row, &wakes);
  }
  hl__shm_wakes_send(&wakes);
  free(them.all);
}
