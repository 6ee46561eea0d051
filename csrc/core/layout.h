/*
 * layout.h - the inside of a layout, for layout.c and plan.c; and what a store asks of it
 * when it is opened.
 */
#ifndef HIERLOCK_LAYOUT_H
#define HIERLOCK_LAYOUT_H

#include "hierlock.h"

#include <stdatomic.h>

#define HL__OWN_NAMES_MAX 79

struct hl_layout {
  atomic_uint references;
  unsigned levels;
  uint32_t buckets;               /* 0: as many as there are hashes, see hl_layout_bucket */
  bool levels_open, buckets_open; /* defaults: a space may record others */
  uint32_t seeds[HL_LEVELS_MAX];  /* the hash of the level's name */
  uint64_t wide_seeds[HL_LEVELS_MAX];
  char names[HL_LEVELS_MAX][HL_LEVEL_NAME_MAX + 1];
  /* Where nodes are locked by name, too: the store's key of a name; else NULL. */
  uint64_t (*name_key)(const char *name, size_t size);
  char *patterns; /* of names, one behind the other, each with its NUL; NULL: joined */
  char own_names[HL__OWN_NAMES_MAX + 1]; /* no name begins so; "": any may */
};

/* "user,account,resource" */
#define HL__LAYOUT_NAMES_MAX ((size_t)HL_LEVELS_MAX * (HL_LEVEL_NAME_MAX + 1))
const char *hl__layout_names(const hl_layout *layout, char out[HL__LAYOUT_NAMES_MAX]);

/* What a space and a program agree on: what the space records, as far as the program
   wants nothing else. names: as from hl__layout_names. *agreed: a reference to a layout
   that leaves nothing open; it is `wanted` when that leaves nothing open. HL_ENOMEM;
   HL_EMISMATCH, the message begins with `space` ("the table x") and ends with `other`,
   how the program gets a space of its own. */
int hl__layout_agree(hl_layout *wanted, const char *names, uint32_t buckets, const char *space,
                     const char *other, hl_layout **agreed, hl_error *error);

#define HL__PATTERN_MAX 255
/* A copy of `wanted` whose nodes have names, too. patterns: as hl_config.names; own_names: as
   hl_store.own_names. HL_ENOMEM; HL_EMISUSE: a pattern cannot be understood, or there are not
   as many as levels. */
int hl__layout_named(const hl_layout *wanted, uint64_t (*name_key)(const char *name, size_t size),
                     const char *const *patterns, const char *own_names, hl_layout **layout,
                     hl_error *error);
/* The name of the node ids[0]/.../ids[n-1]: returns its size; writes it unless out is
   NULL. */
size_t hl__layout_node_name(const hl_layout *layout, const hl_id *ids, unsigned n, char *out);

/* The bits of a bucket where there are no buckets: beside them there is room for a
   level in 64. */
#define HL__HASH_BITS 60

/* A row as one number, signed, as a store without buckets keeps it: the level in the upper four
   bits, and the hash; of an update row all bits of that, turned over. */
static inline int64_t hl__row_key(unsigned level, uint64_t bucket) {
  uint64_t key = (uint64_t)(level & ~HL_LEVEL_UPDATE) << HL__HASH_BITS | bucket;
  return (int64_t)(level & HL_LEVEL_UPDATE ? ~key : key);
}

/* A layout of the levels of `wanted` that has no buckets and leaves nothing open. The
   number of buckets that a program wants is of no matter then. HL_ENOMEM. */
int hl__layout_unbucketed(const hl_layout *wanted, hl_layout **layout, hl_error *error);

#endif
