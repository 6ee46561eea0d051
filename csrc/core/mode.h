/*
 * mode.h - everything that depends on which modes there are: which modes conflict, which mode
 * covers two, in which modes a node and its ancestors are locked, and the order of rows. (Names:
 * hl_mode_name.) No other code compares modes by their numbers.
 *
 *                     the other holds it
 *                     shared     update     exclusive
 *     shared          both       both       waits
 *     update          both       waits      waits
 *     exclusive       waits      waits      waits
 *
 * Rows are only shared or exclusive. A node that is locked for update is two rows: its own, shared,
 * and its update row, exclusively, which other modes do not request. So at most one holder has the
 * update lock, and only that one may make the node's row exclusive.
 *
 * All update rows come before all other rows. So a request that waits for one holds no node.
 * Otherwise the holder, on its way to exclusive, would have to wait for it.
 */
#ifndef HIERLOCK_MODE_H
#define HIERLOCK_MODE_H

#include "hierlock.h"

/* Whether two requests for one row, or one node, exclude each other. */
static inline bool hl__modes_conflict(hl_mode a, hl_mode b) {
  static const bool conflict[][HL_UPDATE + 1] = {
      [HL_SHARED] = {[HL_EXCLUSIVE] = true},
      [HL_UPDATE] = {[HL_UPDATE] = true, [HL_EXCLUSIVE] = true},
      [HL_EXCLUSIVE] = {[HL_SHARED] = true, [HL_UPDATE] = true, [HL_EXCLUSIVE] = true},
  };
  return conflict[a][b];
}

/* The weakest mode that allows everything that both modes allow. A request that needs a row for two
   targets takes it in this mode. */
static inline hl_mode hl__mode_supremum(hl_mode a, hl_mode b) {
  static const hl_mode supremum[][HL_UPDATE + 1] = {
      [HL_SHARED] =
          {[HL_SHARED] = HL_SHARED, [HL_UPDATE] = HL_UPDATE, [HL_EXCLUSIVE] = HL_EXCLUSIVE},
      [HL_UPDATE] =
          {[HL_SHARED] = HL_UPDATE, [HL_UPDATE] = HL_UPDATE, [HL_EXCLUSIVE] = HL_EXCLUSIVE},
      [HL_EXCLUSIVE] =
          {[HL_SHARED] = HL_EXCLUSIVE, [HL_UPDATE] = HL_EXCLUSIVE, [HL_EXCLUSIVE] = HL_EXCLUSIVE},
  };
  return supremum[a][b];
}

/* Whether a holder in `held` does not need to lock again for `wanted`. */
static inline bool hl__mode_covers(hl_mode held, hl_mode wanted) {
  return hl__mode_supremum(held, wanted) == held;
}

/* The mode of the ancestors of a node that is locked in this mode. */
static inline hl_mode hl__mode_of_ancestor(hl_mode mode) {
  (void)mode;
  return HL_SHARED;
}

/* The mode in which a node is locked that was requested in `wanted`. A shared lock of an inner node
   would not exclude the writers below it: they hold the inner node shared, too. */
static inline hl_mode hl__mode_of_node(hl_mode wanted, bool deepest_level) {
  return deepest_level ? wanted : HL_EXCLUSIVE;
}

/* The mode of the row of a node that is locked in this mode. */
static inline hl_mode hl__mode_of_row(hl_mode mode) { return mode == HL_UPDATE ? HL_SHARED : mode; }

/* The mode that another process or program has written as a number. */
static inline hl_mode hl__mode_read(unsigned written) {
  if (written == HL_SHARED || written == HL_UPDATE) return (hl_mode)written;
  return HL_EXCLUSIVE;
}

/* A mode as a letter, and back. */
static inline char hl__mode_letter(hl_mode mode) {
  return mode == HL_SHARED ? 's' : mode == HL_UPDATE ? 'u' : 'x';
}
static inline hl_mode hl__mode_of_letter(char letter) {
  return letter == 's' ? HL_SHARED : letter == 'u' ? HL_UPDATE : HL_EXCLUSIVE;
}

/* The place of this level in the order of all rows: update rows come first. */
static inline unsigned hl__level_place(uint8_t level) { return level ^ HL_LEVEL_UPDATE; }

static inline bool hl__is_update_row(const hl_row *row) {
  return (row->level & HL_LEVEL_UPDATE) != 0;
}

/* Compares two rows by the order in which rows are taken. */
static inline int hl__row_compare(const hl_row *a, const hl_row *b) {
  if (a->level != b->level) return hl__level_place(a->level) < hl__level_place(b->level) ? -1 : 1;
  if (a->bucket != b->bucket) return a->bucket < b->bucket ? -1 : 1;
  return 0;
}

/* Whether the row is wanted exclusively, and its sharers may have update rows. */
static inline bool hl__may_upgrade(const hl_layout *layout, const hl_row *row) {
  return row->mode == HL_EXCLUSIVE && row->level + 1u == hl_layout_levels(layout);
}

/* How many of the rows, which are in order, are update rows. Update rows come first. */
static inline size_t hl__update_rows(const hl_row *rows, size_t n) {
  size_t count = 0;
  while (count < n && hl__is_update_row(&rows[count])) count++;
  return count;
}

/* How many of the rows, which are in order, are roots'; moves *rows to them, behind the update
   rows. */
static inline size_t hl__roots(const hl_row **rows, size_t n) {
  size_t roots = 0, updates = hl__update_rows(*rows, n);
  *rows += updates;
  while (roots < n - updates && (*rows)[roots].level == 0) roots++;
  return roots;
}

#endif
