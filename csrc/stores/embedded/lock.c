/*
 * lock.c - the lock of a partition: a futex that names the slot of the process inside, so that the
 * lock of a dead process can be broken (mend.c), and a message can say who keeps others waiting.
 */
#include "embedded.h"

#include <stdio.h>

/* How often the lock is tried before a thread sleeps; about 2 us. */
#define SPINS 64
/* After this time inside a process is suspected to be dead; after the second its waiters look less
   often. */
#define SUSPECT_NS 1000000
#define PATIENT_NS 20000000

/* HL_TIMEOUT. The core says what was not granted, with error->reason. */
static int inside_error(hl__shm_space *space, uint32_t slot, int64_t ns, hl_error *error) {
  char name[64], since[48] = "";
  if (!error) return HL_TIMEOUT;
  hl__shm_slot_name(space, slot, name, sizeof name);
  if (ns > 0) (void)snprintf(since, sizeof since, " for %lld ms", (long long)(ns / 1000000));
  (void)hl__error(error, HL_TIMEOUT, "%s has been inside the table of locks%s", name, since);
  (void)snprintf(error->reason, sizeof error->reason, "%.127s", error->message);
  return HL_TIMEOUT;
}

void hl__shm_part_blame(hl__shm_space *space, uint32_t part, hl_error *error) {
  const uint32_t word = atomic_load(&space->table->part[part].lock);
  const uint32_t slot = (word & ~HL__SHM_CONTENDED) - 1;
  if (word && hl__shm_is_stopped(space, slot)) (void)inside_error(space, slot, 0, error);
}

static bool spin(hl__shm_space *space, uint32_t part) {
  hl__a32 *lock = &space->table->part[part].lock;
  for (int i = 0; i < SPINS; i++) {
    if (atomic_load_explicit(lock, memory_order_relaxed) == 0 && hl__shm_part_try(space, part))
      return true;
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
  }
  return false;
}

int hl__shm_part_wait(hl__shm_space *space, uint32_t part, int64_t deadline,
                      const atomic_bool *cancelled, hl_error *error) {
  hl__a32 *lock = &space->table->part[part].lock;
  const uint32_t me = space->me + 1;
  uint32_t whose = 0;
  int64_t since = 0;
  if (spin(space, part)) return HL_OK;
  for (;;) {
    uint32_t word = atomic_load(lock);
    if (word == 0) {
      /* Others may sleep: the bit is not known to be needless. */
      if (atomic_compare_exchange_strong(lock, &word, me | HL__SHM_CONTENDED)) return HL_OK;
      continue;
    }
    if (!(word & HL__SHM_CONTENDED)) {
      if (!atomic_compare_exchange_strong(lock, &word, word | HL__SHM_CONTENDED)) continue;
      word |= HL__SHM_CONTENDED;
    }
    int64_t now = hl__shm_now();
    const uint32_t slot = (word & ~HL__SHM_CONTENDED) - 1;
    if (word != whose) {
      whose = word;
      since = now;
    }
    if (cancelled && atomic_load(cancelled))
      return hl__error(error, HL_CANCELLED, "the wait was cancelled");
    if (now > deadline) return inside_error(space, slot, now - since, error);
    if (now - since > SUSPECT_NS && hl__shm_is_dead(space, slot)) {
      space->break_locks(space, slot);
      whose = 0;
    }
    int64_t until = now + (now - since > PATIENT_NS ? HL__SHM_POLL_NS : SUSPECT_NS);
    hl__futex_wait(lock, word, until < deadline ? until : deadline + 1);
    if (now - since > SUSPECT_NS && hl__shm_look(space)) return hl__shm_gone_error(space, error);
  }
}
