/*
 * mode.h - everything that depends on which modes there are: which modes conflict, which mode
 * covers two, in which modes a node and its ancestors are locked, and the order of rows. (Names:
 * hl_mode_name.) No other code compares modes by their numbers.
 *
 * Targets are shared, update or exclusive. So are rows; but where the layout has intentions, the
 * row of an ancestor says what is intended below it (Gray, Lorie, Putzolu, Traiger, "Granularity of
 * Locks", 1976): IS, to share a node there; IX, to have one exclusively or for update. Then a
 * shared lock (S) on an inner node shares its subtree. SIX is S and IX. Without intentions an
 * ancestor's row is shared, whatever is wanted below it.
 *
 * No row is taken for update. A node that is locked for update is two rows: its own, shared,
 * and its update row, exclusively, which other modes do not request. So at most one holder has the
 * update lock, and only that one may make the node's row exclusive.
 *
 * All update rows come before all other rows. So a request that waits for one holds no node.
 * Otherwise the holder, on its way to exclusive, would have to wait for it.
 */
#ifndef HIERLOCK_MODE_H
#define HIERLOCK_MODE_H

#include "hierlock.h"

/* The modes of rows beside hl_mode. */
enum { HL__IS = HL_UPDATE + 1, HL__IX, HL__SIX };

/* What a holder in the mode keeps out: a bit for each mode. 0 and 7 are no modes, only a damaged
   file has them, and they conflict with all. 1: the one waits for the other. */
#define HL__KEEPS_OUT(is, ix, s, u, six)                                                           \
  (0x81 | 1 << HL_EXCLUSIVE | (is) << HL__IS | (ix) << HL__IX | (s) << HL_SHARED |                 \
   (u) << HL_UPDATE | (six) << HL__SIX)
static const uint8_t hl__mode_conflicts[] = {[0] = 0xFF,
                                             [HL__IS] = HL__KEEPS_OUT(0, 0, 0, 0, 0),
                                             [HL__IX] = HL__KEEPS_OUT(0, 0, 1, 1, 1),
                                             [HL_SHARED] = HL__KEEPS_OUT(0, 1, 0, 0, 1),
                                             [HL_UPDATE] = HL__KEEPS_OUT(0, 1, 0, 1, 1),
                                             [HL__SIX] = HL__KEEPS_OUT(0, 1, 1, 1, 1),
                                             [HL_EXCLUSIVE] = HL__KEEPS_OUT(1, 1, 1, 1, 1),
                                             [7] = 0xFF};

/* Whether two requests for one row, or one node, exclude each other. */
static inline bool hl__modes_conflict(unsigned a, unsigned b) {
  return hl__mode_conflicts[a & 7u] >> (b & 7u) & 1u;
}

/* Whether a holder in `held` need not lock again for `wanted`: it keeps out all that that would. */
static inline bool hl__mode_covers(unsigned held, unsigned wanted) {
  return (hl__mode_conflicts[wanted & 7u] & ~hl__mode_conflicts[held & 7u]) == 0;
}

/* The weakest mode that keeps out all that either does, for a row of two targets: there is one. */
static inline hl_mode hl__mode_supremum(unsigned a, unsigned b) {
  const uint8_t both = hl__mode_conflicts[a & 7u] | hl__mode_conflicts[b & 7u];
  unsigned mode = HL_SHARED;
  while (hl__mode_conflicts[mode] != both) mode++;
  return (hl_mode)mode;
}

/* The mode of the rows of the ancestors of a node that is locked in this mode. An update lock may
   become exclusive. */
static inline hl_mode hl__mode_of_ancestor(hl_mode mode, bool intentions) {
  return intentions ? (hl_mode)(mode == HL_SHARED ? HL__IS : HL__IX) : HL_SHARED;
}

/* The mode in which a node is locked that was requested in `wanted`. A shared lock of an inner node
   excludes the writers below it only if these say what they intend: else they hold the inner node
   shared, too. */
static inline hl_mode hl__mode_of_node(hl_mode wanted, bool deepest_level, bool intentions) {
  return deepest_level || (intentions && wanted == HL_SHARED) ? wanted : HL_EXCLUSIVE;
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
