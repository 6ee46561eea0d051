/*
 * verify.h - whether the index of the embedded store's table is what its claims say (format.h,
 * invariants 1 and 6), for its tests: they include it, and no process is at work meanwhile.
 */
#ifndef HIERLOCK_SPEC_EMBEDDED_VERIFY_H
#define HIERLOCK_SPEC_EMBEDDED_VERIFY_H

#include "../../csrc/stores/embedded/embedded.h"

#include <string.h>

#define VERIFY_STEPS 1000000u

/* Two holders of one row that exclude each other. A lease that is being made stands beside its
   session; no process makes one now. */
static inline bool verify_excludes(hl__shm_space *space, const hl__shm_row *row) {
  uint32_t n = 0;
  for (uint32_t i = row->holders; i && n < 200; n++) {
    const hl__shm_node *a = hl__shm_node_at(space, i);
    uint32_t m = 0;
    for (uint32_t j = a->next; j && m < 200; m++) {
      const hl__shm_node *b = hl__shm_node_at(space, j);
      if (atomic_load(&a->session) != atomic_load(&b->session) &&
          hl__modes_conflict(hl__shm_mode_of(a->claim), hl__shm_mode_of(b->claim)))
        return false;
      j = b->next;
    }
    i = a->next;
  }
  return true;
}

/* One row, whose index is given; *linked: its claims. NULL, or what is wrong. */
static inline const char *verify_row(hl__shm_space *space, const hl__shm_row *row,
                                     uint32_t *linked) {
  const uint64_t key = hl__shm_key_of(row->key);
  uint32_t held[8] = {0}, prev = 0, n = 0;
  for (uint32_t i = row->holders; i; n++) {
    const hl__shm_node *node = hl__shm_node_at(space, i);
    const uint64_t claim = node ? atomic_load(&node->claim) : 0;
    if (!node || n > VERIFY_STEPS || node->prev != prev || hl__shm_key_of(claim) != key ||
        hl__shm_state_of(claim) != HL__HELD)
      return "a list of holders";
    held[hl__shm_mode_of(claim)]++;
    prev = i;
    i = node->next;
  }
  if (memcmp(held, row->count, sizeof held) != 0) return "a count of holders";
  *linked += n;
  prev = 0;
  for (uint32_t i = row->first; i; n++) {
    const hl__shm_node *node = hl__shm_node_at(space, i);
    const uint64_t claim = node ? atomic_load(&node->claim) : 0;
    if (!node || n > VERIFY_STEPS || node->prev != prev) return "a queue";
    if (hl__shm_state_of(claim) == HL__WAIT) {
      if (hl__shm_key_of(claim) != key) return "a waiter in another row's queue";
      ++*linked;
    }
    prev = i;
    i = node->next;
  }
  if (row->last != prev) return "the end of a queue";
  if (n == 0) return "a row of which nobody has anything";
  const hl__shm_node *first = hl__shm_node_at(space, row->first);
  if (first && hl__shm_state_of(first->claim) == HL__WAIT &&
      !hl__shm_blocked(space, row, first, hl__shm_mode_of(first->claim)))
    return "a waiter that nothing is in the way of";
  return verify_excludes(space, row) ? NULL : "two holders that exclude each other";
}

/* NULL, or what is wrong. */
static inline const char *verify(hl__shm_space *space) {
  static uint32_t claims[HL__SHM_PARTS], linked[HL__SHM_PARTS];
  memset(claims, 0, sizeof claims);
  memset(linked, 0, sizeof linked);
  for (uint32_t chunk = 1; chunk < hl__shm_chunks(space); chunk++) {
    if (atomic_load(&space->table->dir[chunk]) >> 24 != HL__NODES) continue;
    for (uint32_t i = 0; i < HL__SHM_PER_CHUNK; i++) {
      uint64_t claim = atomic_load(&hl__shm_node_at(space, chunk * HL__SHM_PER_CHUNK + i)->claim);
      unsigned state = hl__shm_state_of(claim);
      if (state == HL__HELD || state == HL__WAIT)
        claims[hl__shm_part_of(hl__shm_hash(hl__shm_key_of(claim)))]++;
    }
  }
  for (uint32_t p = 0; p < HL__SHM_PARTS; p++) {
    const char *wrong = NULL;
    if (hl__shm_part_lock(space, p, hl__shm_now() + 500000000, NULL))
      return "a partition is locked";
    for (uint32_t h = 0; h < HL__SHM_HEADS && !wrong; h++) {
      uint32_t n = 0;
      for (uint32_t i = space->table->head[p][h]; i && !wrong;) {
        const hl__shm_row *row = hl__shm_row_at(space, i);
        wrong = !row || n++ > VERIFY_STEPS ? "a chain" : verify_row(space, row, &linked[p]);
        i = row ? row->next : 0;
      }
    }
    hl__shm_part_unlock(space, p);
    if (wrong) return wrong;
    if (linked[p] != claims[p]) return "claims that the index does not have";
  }
  return NULL;
}

#endif
