/*
 * layout.h - the inside of a layout, for layout.c alone, and what the core
 * asks of it beyond hierlock.h.
 */
#ifndef HIERLOCK_LAYOUT_H
#define HIERLOCK_LAYOUT_H

#include "hierlock.h"

#include <stdatomic.h>

struct hl_layout {
  atomic_uint references;
  unsigned levels;
  uint32_t buckets;
  uint32_t seeds[HL_LEVELS_MAX]; /* the hash of the level's name */
  char names[HL_LEVELS_MAX][HL_LEVEL_NAME_MAX + 1];
};

/* Same level names and bucket count: the same ids give the same rows. */
bool hl__layout_same(const hl_layout *a, const hl_layout *b);

#endif
