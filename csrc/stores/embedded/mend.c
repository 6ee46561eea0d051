/*
 * mend.c - cleans up after a dead process.
 *
 * Why that is sound. A killed process has executed a prefix of its instructions, and each prefix
 * leaves the claims in a state that satisfies invariant 1, as they change one at a time. One mender
 * at a time has the byte MEND + slot, which the kernel frees when the mender dies. No new process
 * gets the slot before `state` is 0, nor while a mender has that byte. A mender may repeat each of
 * its steps: a claim that is FREE stays FREE.
 */
#include "embedded.h"

#include <limits.h>
#include <string.h>
#include <time.h>

/* Between two looks whether another mender is done. */
#define LOOK_NS 100000

void hl__shm_parts_break(hl__shm_space *space, uint32_t dead) {
  for (uint32_t p = 0; p < HL__SHM_PARTS; p++) {
    hl__a32 *lock = &space->table->part[p].lock;
    uint32_t word = atomic_load(lock);
    while (word && (word & ~HL__SHM_CONTENDED) - 1 == dead) {
      if (!atomic_compare_exchange_strong(lock, &word, (space->me + 1) | HL__SHM_CONTENDED))
        continue;
      hl__shm_rebuild(space, p);
      atomic_store(lock, 0);
      hl__futex_wake(lock, INT_MAX);
      break;
    }
  }
}

/* A lease that the dead process was making or unmaking, or that has ended and is still in the way.
   */
static void lease_mend(hl__shm_space *space, uint32_t index, uint32_t dead, int64_t deadline) {
  hl__shm_lease *lease = hl__shm_lease_at(space, index);
  uint64_t used = lease ? atomic_load(&lease->base.used) : 0;
  if (!(used & HL__LEASE)) return;
  if (atomic_load(&lease->base.end) == 0)
    hl__shm_lease_unmake(space, index, deadline);
  else if (used & HL__MAKES && (uint32_t)used == dead) /* it was published */
    (void)atomic_compare_exchange_strong(&lease->base.used, &used, used & ~HL__MAKES);
}

/* A slot that is being mended. */
typedef struct mending {
  hl__shm_space *space;
  uint32_t dead;
  int64_t deadline;
  bool stuck[HL__SHM_PARTS]; /* a process is stopped inside, or was for too long */
} mending;

/* Where a partition cannot be had, only its own claims stay: those of the others keep no process
   waiting. */
static void claim_mend(mending *self, uint32_t at, const hl__shm_node *node) {
  bool *stuck = &self->stuck[hl__shm_claim_part(atomic_load(&node->claim))];
  if (!*stuck) *stuck = hl__shm_claim_clear(self->space, at, self->deadline, NULL) != HL_OK;
}

/* Of the claims of a dead process those that wait are ended first. A wait counts the claims that
   its session has of the row as its own: if these were ended before it, it would take another
   session's for them, and be granted beside that. The claims of a row are in one partition: where
   the wait stays, they stay. */
static void claims_end(mending *self, bool waits) {
  for (uint32_t at = 0; hl__shm_unit_next(self->space, HL__NODES, self->dead, &at);) {
    const hl__shm_node *node = hl__shm_node_at(self->space, at);
    if (node && (!waits || hl__shm_state_of(atomic_load(&node->claim)) == HL__WAIT))
      claim_mend(self, at, node);
  }
}

/* What the dead process has begun with units of slot 0, which are any process'. */
static void commons_mend(hl__shm_space *space, uint32_t dead, int64_t deadline) {
  for (uint32_t at = 0; hl__shm_unit_next(space, HL__NODES, 0, &at);) {
    hl__shm_node *node = hl__shm_node_at(space, at);
    uint64_t claim = hl__shm_claim(dead, 0, HL__RESERVED); /* for a lease that has not come to be */
    if (node) (void)atomic_compare_exchange_strong(&node->claim, &claim, 0);
  }
  for (uint32_t at = 0; hl__shm_unit_next(space, HL__LEASES, 0, &at);)
    lease_mend(space, at, dead, deadline);
}

bool hl__shm_chunks_leave(hl__shm_space *space, uint32_t slot) {
  for (uint32_t at = 0; hl__shm_unit_next(space, HL__NODES, slot, &at);) {
    const hl__shm_node *node = hl__shm_node_at(space, at);
    if (node && hl__shm_state_of(atomic_load(&node->claim)) != HL__FREE) return false;
  }
  for (unsigned kind = HL__NODES; kind <= HL__RECORDS; kind++)
    for (uint32_t chunk = 0; (chunk = hl__shm_chunk_next(space, kind, slot, chunk)) != 0;)
      atomic_store(&space->table->dir[chunk], kind << 24 | HL__SHM_UNOWNED);
  return true;
}

static void slot_mend(hl__shm_space *space, uint32_t dead, int64_t deadline) {
  hl__shm_parts_break(space, dead);
  if (dead == 0 || dead >= HL__SHM_SLOTS || atomic_load(&space->table->slot[dead].state) == 0)
    return;
  mending self = {.space = space, .dead = dead, .deadline = deadline};
  claims_end(&self, true);
  claims_end(&self, false);
  commons_mend(space, dead, deadline);
  if (!hl__shm_chunks_leave(space, dead)) return;
  atomic_store(&space->table->slot[dead].state, 0);
}

/* One thread of a process does so at a time, as the bytes are its process'. It may meet a partition
   that another dead process has locked: only that lock is broken then. False: another thread or
   process is mending. */
HL__UNCHECKED static bool dead_do(hl__shm_space *space, uint32_t dead, bool all, int64_t deadline) {
  const off_t byte = HL__SHM_MEND + (off_t)(dead < HL__SHM_SLOTS ? dead : HL__SHM_SLOTS);
  if (pthread_mutex_trylock(&space->mending) != 0) return false;
  const uint32_t outer = space->mends;
  const bool has = outer && byte == HL__SHM_MEND + (off_t)outer; /* only in a damaged file */
  const bool mine = has || hl__shm_byte_lock(space, byte);
  if (mine) {
    /* Behind both: were the descriptor another file's by now, neither would mean anything. */
    if (hl__shm_is_dead(space, dead) && hl__shm_touchable(space)) {
      if (all && !outer) {
        space->mends = dead;
        slot_mend(space, dead, deadline);
        space->mends = 0;
      } else {
        hl__shm_parts_break(space, dead);
      }
    }
    if (!has) hl__shm_byte_unlock(space, byte);
  }
  (void)pthread_mutex_unlock(&space->mending);
  return mine;
}

void hl__shm_mend(hl__shm_space *space, uint32_t slot, int64_t deadline) {
  (void)dead_do(space, slot, true, deadline);
}

void hl__shm_break(hl__shm_space *space, uint32_t slot) { (void)dead_do(space, slot, false, 0); }

static void slots_mend(hl__shm_space *space, bool awaits, int64_t deadline) {
  static const struct timespec moment = {.tv_nsec = LOOK_NS};
  const uint32_t top = atomic_load(&space->table->header.slots_top);
  for (uint32_t i = 1; i < top && i < HL__SHM_SLOTS; i++)
    while (i != space->me && atomic_load(&space->table->slot[i].state) &&
           hl__shm_is_dead(space, i) && !dead_do(space, i, true, deadline) && awaits &&
           hl__shm_now() < deadline)
      (void)nanosleep(&moment, NULL);
}

void hl__shm_sweep(hl__shm_space *space, bool force, int64_t deadline) {
  hl__shm_header *header = &space->table->header;
  const uint64_t now = (uint64_t)hl__shm_now();
  uint64_t last = atomic_load(&header->swept);
  if (!force && last <= now && now - last < HL__SHM_POLL_NS / 2) return;
  if (!atomic_compare_exchange_strong(&header->swept, &last, now) && !force) return;
  slots_mend(space, false, deadline);
}

void hl__shm_sweep_out(hl__shm_space *space, int64_t deadline) {
  slots_mend(space, true, deadline);
}

/* After a boot the ends of leases are made of their Unix times. But the machine's clock may be
   wrong now. A lease was given before the boot: it ends no later than its ttl behind the boot. */
static void lease_reboot(hl__shm_space *space, hl__shm_lease *lease) {
  if (atomic_load(&lease->base.end) == 0) return;
  int64_t left = hl__between_ms(hl__unix_ms(), (int64_t)atomic_load(&lease->end_unix));
  int64_t end = hl__deadline(hl__shm_boot_ms(space), left);
  const int64_t most = (int64_t)atomic_load(&lease->ttl); /* of the boot's time, which began at 0 */
  if (end > most) end = most;
  atomic_store(&lease->base.end, hl__shm_end_word(end, atomic_load(&lease->base.stamp)));
}

/* Of all claims only those of leases are left: no process is alive that has another, or that has
   set a node aside. */
static void claims_reboot(hl__shm_space *space) {
  for (uint32_t at = 0; hl__shm_unit_next(space, HL__NODES, HL__SHM_ANY, &at);) {
    hl__shm_node *node = hl__shm_node_at(space, at);
    if (node && (hl__shm_owner_of(space, at) != 0 ||
                 hl__shm_state_of(atomic_load(&node->claim)) != HL__HELD))
      atomic_store(&node->claim, 0);
  }
}

void hl__shm_reboot(hl__shm_space *space, const uint64_t boot[2]) {
  hl__shm_table *table = space->table;
  for (uint32_t i = 1; i < HL__SHM_SLOTS; i++) atomic_store(&table->slot[i].pid, 0);
  claims_reboot(space);
  for (uint32_t p = 0; p < HL__SHM_PARTS; p++) {
    atomic_store(&table->part[p].lock, space->me + 1);
    hl__shm_rebuild(space, p);
    atomic_store(&table->part[p].lock, 0);
  }
  for (uint32_t at = 0; hl__shm_unit_next(space, HL__LEASES, 0, &at);) {
    hl__shm_lease *lease = hl__shm_lease_at(space, at);
    if (lease) lease_reboot(space, lease);
  }
  atomic_store(&table->header.swept, 0);
  atomic_store(&table->header.boot[1], boot[1]);
  atomic_store(&table->header.boot[0], boot[0]);
}
