/*
 * layout.h - the inside of a layout, for layout.c and plan.c.
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

#endif
