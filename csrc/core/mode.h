/*
 * mode.h - everything that depends on which modes there are: who conflicts with
 * whom, what two modes amount to, and what an ancestor is locked in. (Names: hl_mode_name.) Nothing else compares modes by their numbers.
 *
 *                     the other holds it
 *                     shared     exclusive
 *     shared          both       waits
 *     exclusive       waits      waits
 */
#ifndef HIERLOCK_MODE_H
#define HIERLOCK_MODE_H

#include "hierlock.h"

/* Whether two requests for one row exclude each other. */
static inline bool hl__modes_conflict(hl_mode a, hl_mode b) {
  static const bool conflict[][HL_EXCLUSIVE + 1] = {
      [HL_SHARED] = {[HL_SHARED] = false, [HL_EXCLUSIVE] = true},
      [HL_EXCLUSIVE] = {[HL_SHARED] = true, [HL_EXCLUSIVE] = true},
  };
  return conflict[a][b];
}

/* The weakest mode that allows what both allow: whoever needs a row for two targets
   takes it in this one. */
static inline hl_mode hl__mode_supremum(hl_mode a, hl_mode b) {
  static const hl_mode supremum[][HL_EXCLUSIVE + 1] = {
      [HL_SHARED] = {[HL_SHARED] = HL_SHARED, [HL_EXCLUSIVE] = HL_EXCLUSIVE},
      [HL_EXCLUSIVE] = {[HL_SHARED] = HL_EXCLUSIVE,
                        [HL_EXCLUSIVE] = HL_EXCLUSIVE},
  };
  return supremum[a][b];
}

/* Whether a holder in `held` need not take the row again for `wanted`. */
static inline bool hl__mode_covers(hl_mode held, hl_mode wanted) {
  return hl__mode_supremum(held, wanted) == held;
}

/* What the ancestors of a node are locked in that is taken in this mode. */
static inline hl_mode hl__mode_of_ancestor(hl_mode mode) {
  (void)mode;
  return HL_SHARED;
}

/* What a node is locked in for which `wanted` was asked. A shared lock of an inner node
   would not keep writers out of what is below it: they hold the inner node shared,
   too. */
static inline hl_mode hl__mode_of_node(hl_mode wanted, bool deepest_level) {
  return deepest_level ? wanted : HL_EXCLUSIVE;
}

#endif
