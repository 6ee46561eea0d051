/*
 * leased.c - the claims of leases, and who has what. What a lease means (its id, its secret, who
 * may do what with it) is lease.c's. See the invariants 4 and 10 to 12 of format.h.
 *
 * A lease's nodes hang in a chain, for speed. A process that was killed while it freed them leaves
 * a chain that leads astray; then the nodes are found by the lease's stamp, which no other lease
 * ever has, and which stays in a node while its claim is not FREE (invariant 3).
 */
#include "embedded.h"

#include <string.h>

#define STEPS_MAX (1u << 22)
/* How long a call waits for a partition that a stopped process has. */
#define PATIENCE_NS 200000000
/* How soon a waiter looks again at a lease that is being made. */
#define SOON_MS 5

/* ---------------------------------------------------------- setting aside */

/* Its slot is free, or another process has it: then it is mended. */
bool hl__shm_is_left(const hl__shm_space *space, uint64_t word) {
  const uint32_t slot = (uint32_t)(word >> 48) - 1;
  if (slot >= HL__SHM_SLOTS) return true;
  const hl__shm_slot *it = &space->table->slot[slot];
  return atomic_load(&it->state) == 0 ||
         (atomic_load(&it->generation) & 0xFFFFu) != (word >> 32 & 0xFFFFu);
}

/* Whether a thread works on the lease that the record was: it stays that lease's so long. */
static bool is_busy(hl__shm_space *space, hl__shm_lease *lease) {
  uint64_t word = atomic_load(&lease->busy);
  return word &&
         !(hl__shm_is_left(space, word) && atomic_compare_exchange_strong(&lease->busy, &word, 0));
}

/* Sets a unit of slot 0's aside by `word`, its first one. False: it is not free. */
static bool common_claim(hl__shm_space *space, enum hl__shm_kind kind, hl__a64 *first,
                         uint64_t word) {
  uint64_t none = 0;
  hl__shm_lease *lease = kind == HL__LEASES ? (void *)first : NULL;
  if (atomic_load_explicit(first, memory_order_relaxed) ||
      !atomic_compare_exchange_strong(first, &none, word))
    return false;
  /* From here on no thread can begin to work on the earlier lease: `used` is another. */
  if (!lease || !is_busy(space, lease)) return true;
  (void)atomic_compare_exchange_strong(first, &word, 0);
  return false;
}

/* A free unit of slot 0's chunks of that kind, whose first word is 0, set aside by `word`. 0: no
   space is left. */
static uint32_t common_get(hl__shm_space *space, enum hl__shm_kind kind, uint64_t word) {
  const uint32_t units = hl__shm_units(kind);
  hl__a32 *hint = &space->hints[kind == HL__NODES];
  const uint32_t chunks = hl__shm_chunks(space), from = atomic_load(hint);
  for (uint32_t n = 0;; n++) {
    /* Where all are full, a new one; others may have filled that by now, too. */
    const uint32_t chunk = n < chunks ? (from + n) % chunks : hl__shm_chunk_get(space, kind, 0);
    if (n >= chunks && chunk == 0) return 0;
    if (atomic_load(&space->table->dir[chunk]) != (uint32_t)kind << 24) continue;
    for (uint32_t i = 0; i < HL__SHM_PER_CHUNK; i += units) {
      const uint32_t at = chunk * HL__SHM_PER_CHUNK + i;
      hl__a64 *first = hl__shm_unit(space, at, units);
      if (!first || !common_claim(space, kind, first, word)) continue;
      atomic_store(hint, chunk);
      return at;
    }
  }
}

uint32_t hl__shm_lease_make(hl__shm_space *space) {
  const uint64_t stamp = atomic_fetch_add(&space->table->header.seq, 1) + 1;
  uint32_t index =
      common_get(space, HL__LEASES, HL__LEASE | HL__MAKES | space->me | hl__shm_used_stamp(stamp));
  hl__shm_lease *lease = index ? hl__shm_lease_at(space, index) : NULL;
  if (!lease) return 0;
  hl__a64 *words = (hl__a64 *)(void *)lease;
  for (size_t i = 1; i < sizeof *lease / sizeof *words; i++) /* all of it but `used` and `busy` */
    if (&words[i] != &lease->busy) atomic_store_explicit(&words[i], 0, memory_order_relaxed);
  atomic_store(&lease->base.stamp, stamp);
  atomic_store(&lease->base.slot, space->me);
  return index;
}

/* ---------------------------------------------------------------- claims */

/* The k-th claim of the session in a mode that covers all that it has of the row; 0: an earlier one
   is of that row. */
static uint64_t joined(const hl__shm_session *session, uint32_t k) {
  const uint64_t key = hl__shm_key_of(session->held[k].claim);
  unsigned mode = hl__shm_mode_of(session->held[k].claim);
  for (uint32_t i = 0; i < session->n; i++) {
    const uint64_t other = session->held[i].claim;
    if (hl__shm_key_of(other) != key) continue;
    if (i < k) return 0;
    mode = hl__mode_supremum(mode, hl__shm_mode_of(other));
  }
  return hl__shm_claim(key, mode, HL__HELD);
}

int hl__shm_lease_claims(hl__shm_session *session, uint32_t index, int64_t deadline,
                         hl_error *error) {
  hl__shm_space *space = session->space;
  hl__shm_lease *lease = hl__shm_lease_at(space, index);
  for (uint32_t k = 0; k < session->n; k++) {
    const uint64_t claim = joined(session, k);
    if (!claim) continue;
    uint32_t at = common_get(space, HL__NODES, hl__shm_claim(space->me, 0, HL__RESERVED));
    hl__shm_node *node = at ? hl__shm_node_at(space, at) : NULL;
    const hl__shm_node *own = hl__shm_node_at(space, session->held[k].node);
    if (!node) return hl__shm_full_error(space, error);
    const uint32_t part = hl__shm_claim_part(claim);
    int status = hl__shm_part_lock(space, part, deadline, error);
    hl__shm_row *row = status || !own ? NULL : hl__shm_row_of(space, own);
    if (!row) {
      atomic_store(&node->claim, 0);
      if (status) return status;
      hl__shm_part_unlock(space, part);
      return hl__error(error, HL_ESTORE, "the table of locks is damaged");
    }
    node->own = atomic_load(&lease->base.stamp);
    node->flags = HL__LEASED;
    atomic_store(&node->session, index);
    atomic_store(&node->note, index);
    node->row = own->row;
    atomic_store(&node->chain, atomic_load(&lease->base.first));
    atomic_store(&lease->base.first, at);
    hl__shm_hold_link(space, row, at, hl__shm_mode_of(claim));
    atomic_store(&node->claim, claim); /* beside the session's: both count for a moment */
    hl__shm_part_unlock(space, part);
  }
  return HL_OK;
}

/* A claim of a lease whose partition is locked. */
typedef struct locked {
  hl__shm_node *node;
  uint64_t claim;
  hl__shm_row *row; /* NULL in a damaged file */
  uint32_t next;    /* in the lease's chain */
  hl__shm_wakes wakes;
} locked;

/* HL_OK; HL__ABSENT: it is not the lease's; else it was not to be locked. Only HL_OK: the lock is
   held. */
static int claim_lock(hl__shm_space *space, uint32_t at, uint64_t stamp, int64_t deadline,
                      locked *self) {
  hl__shm_node *node = hl__shm_node_at(space, at);
  const uint64_t claim = node ? atomic_load(&node->claim) : 0;
  if (hl__shm_state_of(claim) != HL__HELD) return HL__ABSENT;
  const uint32_t part = hl__shm_claim_part(claim);
  const int status = hl__shm_part_lock(space, part, deadline, NULL);
  if (status) return status;
  /* HELD as before, and only under this lock does it become another. */
  self->claim = atomic_load(&node->claim);
  if (hl__shm_key_of(self->claim) == hl__shm_key_of(claim) &&
      hl__shm_state_of(self->claim) == HL__HELD && node->flags & HL__LEASED && node->own == stamp) {
    self->node = node;
    self->row = hl__shm_row_of(space, node);
    self->next = atomic_load(&node->chain);
    self->wakes.n = 0;
    return HL_OK;
  }
  hl__shm_part_unlock(space, part);
  return HL__ABSENT;
}

static void claim_unlock(hl__shm_space *space, locked *self) {
  hl__shm_part_unlock(space, hl__shm_claim_part(self->claim));
  hl__shm_wakes_send(&self->wakes);
}

/* Takes a claim away, if it is the lease's. As claim_lock. */
static int claim_take(hl__shm_space *space, uint32_t at, uint64_t stamp, int64_t deadline,
                      uint32_t *next) {
  locked it;
  const int status = claim_lock(space, at, stamp, deadline, &it);
  if (status) return status;
  *next = it.next;
  hl__shm_claim_end(space, at, &it.wakes);
  claim_unlock(space, &it);
  return HL_OK;
}

/* Has those look again who wait for the lease's rows: it has another end. */
static void waiters_wake(hl__shm_space *space, hl__shm_lease *lease, uint64_t stamp) {
  uint32_t steps = 0;
  for (uint32_t at = atomic_load(&lease->base.first); at && steps < STEPS_MAX; steps++) {
    locked it;
    if (claim_lock(space, at, stamp, hl__shm_now() + PATIENCE_NS, &it) != HL_OK) return;
    if (it.row && hl__shm_node_at(space, it.row->first))
      hl__shm_waiter_wake(space, it.row->first, &it.wakes);
    at = it.next;
    claim_unlock(space, &it);
  }
}

/* ------------------------------------------------------ the life of a lease */

/* Never less than before: the power may fail before `end` is what it is to be. */
static void ttl_raise(hl__shm_space *space, hl__shm_lease *lease, int64_t end_ms) {
  const int64_t ttl = hl__between_ms(hl__shm_boot_ms(space), end_ms);
  if (ttl > (int64_t)atomic_load(&lease->ttl)) atomic_store(&lease->ttl, (uint64_t)ttl);
}

void hl__shm_lease_publish(hl__shm_space *space, uint32_t index, int64_t end_ms) {
  hl__shm_lease *lease = hl__shm_lease_at(space, index);
  if (!lease) return;
  const uint64_t stamp = atomic_load(&lease->base.stamp);
  ttl_raise(space, lease, end_ms);
  atomic_store(&lease->base.end, hl__shm_end_word(end_ms, stamp)); /* now there is a lease */
  (void)atomic_fetch_and(&lease->base.used, ~HL__MAKES);
  waiters_wake(space, lease, stamp);
}

/* The lease, if the record is still its. */
static hl__shm_lease *lease_of(hl__shm_space *space, uint32_t index, uint64_t stamp) {
  hl__shm_lease *lease = hl__shm_lease_at(space, index);
  bool is = lease && atomic_load(&lease->base.used) & HL__LEASE &&
            atomic_load(&lease->base.stamp) == stamp;
  return is ? lease : NULL;
}

bool hl__shm_lease_extend(hl__shm_space *space, uint32_t index, uint64_t stamp, int64_t end_ms) {
  hl__shm_lease *lease = lease_of(space, index, stamp);
  const uint64_t fresh = hl__shm_end_word(end_ms, stamp);
  uint64_t end = lease ? atomic_load(&lease->base.end) : 0;
  if (end) ttl_raise(space, lease, end_ms);
  while (end && (end & HL__STAMP_MASK) == (stamp & HL__STAMP_MASK)) {
    if (!atomic_compare_exchange_strong(&lease->base.end, &end, fresh)) continue;
    if (fresh < end) waiters_wake(space, lease, stamp);
    return true;
  }
  return false;
}

bool hl__shm_lease_end(hl__shm_space *space, uint32_t index, uint64_t stamp, uint64_t seen) {
  hl__shm_lease *lease = lease_of(space, index, stamp);
  uint64_t end = lease ? atomic_load(&lease->base.end) : 0;
  while (end && (end & HL__STAMP_MASK) == (stamp & HL__STAMP_MASK) && (!seen || end == seen)) {
    if (!atomic_compare_exchange_strong(&lease->base.end, &end, 0)) continue;
    hl__shm_lease_unmake(space, index, hl__shm_now() + PATIENCE_NS);
    return true;
  }
  return false;
}

/* All claims of the lease with that stamp. The record may be another lease's meanwhile. chained:
   along the chain; but if a node of it is not the lease's any more, another process is at it, too,
   and the chain leads astray. Else each node is looked at. False: not all could be taken. */
static bool claims_take(hl__shm_space *space, hl__shm_lease *lease, uint64_t stamp, bool chained,
                        int64_t deadline) {
  bool all = true;
  uint32_t steps = 0, at = chained ? atomic_load(&lease->base.first) : 0, next = 0;
  while (at && steps++ < STEPS_MAX && claim_take(space, at, stamp, deadline, &next) == HL_OK)
    at = next;
  if (chained && !at) return true;
  for (at = 0; hl__shm_unit_next(space, HL__NODES, 0, &at);) {
    const int status = claim_take(space, at, stamp, deadline, &next);
    all = all && (status == HL_OK || status == HL__ABSENT);
  }
  return all;
}

/* Takes away what is `used` so, and over. chained: its chain is whole, and no other process is at
   it. Where not all could be taken, it stays as it is for the next one. */
static void unmake(hl__shm_space *space, hl__shm_lease *lease, uint64_t used, bool chained,
                   int64_t deadline) {
  if (!(used & HL__UNMAKES)) {
    uint64_t mine = (used & ~(HL__MAKES | UINT32_MAX)) | HL__UNMAKES | space->me;
    if (!atomic_compare_exchange_strong(&lease->base.used, &used, mine)) return;
    used = mine;
  }
  /* Another stamp: a later lease has the record, and `used` is another by now; or the process died
     before it wrote the stamp, and so before there was a claim. */
  const uint64_t stamp = atomic_load(&lease->base.stamp);
  const bool stamped = hl__shm_used_is(used, stamp);
  if (stamped && !claims_take(space, lease, stamp, chained, deadline)) return;
  uint64_t kept = (used & ~HL__UNMAKES) | HL__KEPT;
  (void)atomic_compare_exchange_strong(&lease->base.used, &used,
                                       stamped && atomic_load(&lease->revoked) ? kept : 0);
}

void hl__shm_lease_abandon(hl__shm_space *space, uint32_t index, int64_t deadline) {
  hl__shm_lease *lease = hl__shm_lease_at(space, index);
  if (lease) unmake(space, lease, atomic_load(&lease->base.used), true, deadline);
}

void hl__shm_lease_unmake(hl__shm_space *space, uint32_t index, int64_t deadline) {
  hl__shm_lease *lease = hl__shm_lease_at(space, index);
  const uint64_t used = lease ? atomic_load(&lease->base.used) : 0; /* before `end` */
  if (!(used & HL__LEASE) || used & HL__KEPT || atomic_load(&lease->base.end) != 0) return;
  if (used & HL__MAKES && !hl__shm_is_dead(space, (uint32_t)used)) return;
  unmake(space, lease, used, !(used & (HL__MAKES | HL__UNMAKES)), deadline);
}

void hl__shm_lease_forget(hl__shm_space *space, uint32_t index, uint64_t stamp) {
  hl__shm_lease *lease = lease_of(space, index, stamp);
  uint64_t used = lease ? atomic_load(&lease->base.used) : 0;
  if (!lease || atomic_load(&lease->base.end) != 0) return;
  atomic_store(&lease->revoked, 0);
  if (!(used & HL__KEPT))
    hl__shm_lease_unmake(space, index, hl__shm_now() + PATIENCE_NS);
  else if (hl__shm_used_is(used, stamp))
    (void)atomic_compare_exchange_strong(&lease->base.used, &used, 0);
}

int hl__shm_lease_convert(hl__shm_space *space, uint32_t index, uint64_t stamp, const hl_row *row,
                          int64_t deadline, hl_error *error) {
  hl__shm_lease *lease = lease_of(space, index, stamp);
  const uint64_t key = hl__shm_row_key(row);
  uint32_t steps = 0;
  for (uint32_t at = lease ? atomic_load(&lease->base.first) : 0; at && steps < STEPS_MAX;
       steps++) {
    const hl__shm_node *node = hl__shm_node_at(space, at);
    if (!node) break;
    const uint32_t next = atomic_load(&node->chain);
    locked it;
    if (hl__shm_key_of(atomic_load(&node->claim)) != key) {
      at = next;
      continue;
    }
    if (claim_lock(space, at, stamp, deadline, &it) != HL_OK) break;
    if (it.row) {
      const unsigned before = hl__shm_mode_of(it.claim);
      it.row->count[row->mode & 7u]++;
      atomic_store(&it.node->claim, hl__shm_claim(key, row->mode, HL__HELD));
      if (it.row->count[before]) it.row->count[before]--;
      hl__shm_grant(space, it.row, &it.wakes);
    }
    claim_unlock(space, &it);
    return it.row ? HL_OK : hl__error(error, HL_ESTORE, "the table of locks is damaged");
  }
  if (hl__shm_now() > deadline)
    return hl__error(error, HL_TIMEOUT, "another process keeps the table of locks for itself");
  return hl__error(error, HL_ELOST, "the lease has ended");
}

/* -------------------------------------------------------------- in the way */

/* Whether a holder is the claim of a lease that has no record any more. The record is freed behind
   the last claim, and its words say whose it is; so only a damaged file has such a claim, or one
   that a power failure has torn. The partition is locked. */
static bool is_orphan(hl__shm_space *space, const hl__shm_node *holder) {
  hl__shm_lease *lease = hl__shm_lease_at(space, atomic_load(&holder->session));
  return !lease || !lease_of(space, atomic_load(&holder->session), holder->own) ||
         atomic_load(&lease->base.used) & HL__KEPT;
}

/* A lease in the way of a waiter. */
typedef struct obstacle {
  uint32_t record;
  uint64_t stamp, end;
  uint32_t orphan; /* a node */
} obstacle;

/* Finds a lease on the row that is over and conflicts with the mode; returns when the next such one
   ends. One that is in no request's way can still be refreshed. The partition is locked. */
static int64_t over_find(hl__shm_space *space, const hl__shm_row *row, unsigned mode,
                         obstacle *found) {
  const int64_t now = hl__shm_boot_ms(space);
  int64_t nearest = INT64_MAX;
  uint32_t steps = 0;
  for (uint32_t i = row->holders; i && steps < STEPS_MAX; steps++) {
    const hl__shm_node *holder = hl__shm_node_at(space, i);
    if (!holder) break;
    const uint32_t at = i;
    i = holder->next;
    if (!(holder->flags & HL__LEASED)) continue;
    if (is_orphan(space, holder)) {
      found->orphan = at;
      continue;
    }
    const uint32_t record = atomic_load(&holder->session);
    const hl__shm_lease *lease = hl__shm_lease_at(space, record);
    const unsigned other = hl__shm_mode_of(atomic_load(&holder->claim));
    if (!lease || !hl__modes_conflict(mode, other)) continue;
    const bool made = !(atomic_load(&lease->base.used) & HL__MAKES);
    const uint64_t end = atomic_load(&lease->base.end); /* after `used` */
    if (made && hl__shm_end_ms(end) <= now) {
      *found = (obstacle){record, holder->own, end, found->orphan};
    } else {
      const int64_t until = made ? hl__shm_end_ms(end) : now + SOON_MS;
      if (until < nearest) nearest = until;
    }
  }
  return nearest;
}

int64_t hl__shm_leases_look(hl__shm_space *space, uint64_t key, unsigned mode, int64_t deadline) {
  const uint32_t part = hl__shm_claim_part(key);
  uint32_t index;
  obstacle found = {0};
  hl__shm_wakes wakes = {0};
  /* A process may be stopped inside for ever: meanwhile the caller looks whether it is given up. */
  const int64_t most = hl__shm_now() + PATIENCE_NS;
  if (deadline > most) deadline = most;
  if (hl__shm_part_lock(space, part, deadline, NULL) != HL_OK) return INT64_MAX;
  const hl__shm_row *row = hl__shm_row_find(space, key, false, &index);
  const int64_t nearest = row ? over_find(space, row, mode, &found) : INT64_MAX;
  if (found.orphan) hl__shm_claim_end(space, found.orphan, &wakes);
  hl__shm_part_unlock(space, part);
  hl__shm_wakes_send(&wakes);
  if (!found.record) return found.orphan ? 0 : nearest;
  /* It has ended already where its end is 0: who ended it was held up. */
  if (found.end == 0)
    hl__shm_lease_unmake(space, found.record, deadline);
  else
    (void)hl__shm_lease_end(space, found.record, found.stamp, found.end);
  return 0;
}

/* ------------------------------------------------------------ who has what */

void hl__shm_each_claim(hl__shm_space *space, bool (*fn)(void *context, const hl__shm_claim_seen *),
                        void *context) {
  for (uint32_t at = 0; hl__shm_unit_next(space, HL__NODES, HL__SHM_ANY, &at);) {
    const hl__shm_node *node = hl__shm_node_at(space, at);
    const uint64_t claim = node ? atomic_load(&node->claim) : 0;
    const unsigned state = hl__shm_state_of(claim);
    if (state != HL__WAIT && state != HL__HELD) continue;
    const hl__shm_claim_seen seen = {.node = at,
                                     .claim = claim,
                                     .session = atomic_load(&node->session),
                                     .note = atomic_load(&node->note),
                                     .slot = hl__shm_owner_of(space, at)};
    if (atomic_load(&node->claim) == claim && !fn(context, &seen)) return;
  }
}

void hl__shm_each_lease(hl__shm_space *space, bool (*fn)(void *context, uint32_t lease),
                        void *context) {
  for (uint32_t at = 0; hl__shm_unit_next(space, HL__LEASES, 0, &at);) {
    const hl__shm_lease *lease = hl__shm_lease_at(space, at);
    if (lease && atomic_load(&lease->base.used) & HL__LEASE && !fn(context, at)) return;
  }
}
