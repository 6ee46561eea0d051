/*
 * layout.h - the inside of a layout, for layout.c and plan.c, and the functions by which a store
 * agrees with its space on a layout.
 */
#ifndef HIERLOCK_LAYOUT_H
#define HIERLOCK_LAYOUT_H

#include "hierlock.h"

#include <stdatomic.h>

#define HL__OWN_NAMES_MAX 79

struct hl_layout {
  atomic_uint references;
  unsigned levels;
  uint32_t buckets;               /* 0: one per hash, see hl_layout_bucket */
  bool levels_open, buckets_open; /* defaults: the space may have others */
  int intentions; /* in rows of ancestors (mode.h): 1; none: -1; none yet: 0, the space decides */
  uint32_t seeds[HL_LEVELS_MAX]; /* the hash of the level's name */
  uint64_t wide_seeds[HL_LEVELS_MAX];
  char names[HL_LEVELS_MAX][HL_LEVEL_NAME_MAX + 1];
  /* If nodes are also locked by name: the store's key of a name; else NULL. */
  uint64_t (*name_key)(const char *name, size_t size);
  char *patterns; /* of names, one after the other, each with its NUL; NULL: ids joined with '/' */
  char own_names[HL__OWN_NAMES_MAX + 1]; /* no name may begin with this; "": any name may */
};

/* Writes the names of the levels, like "user,account,resource", and returns out. */
#define HL__LAYOUT_NAMES_MAX ((size_t)HL_LEVELS_MAX * (HL_LEVEL_NAME_MAX + 1))
const char *hl__layout_names(const hl_layout *layout, char out[HL__LAYOUT_NAMES_MAX]);

/* A space with buckets, as a store has found it. */
typedef struct hl__space {
  const char *name;  /* "the table x" */
  const char *names; /* of its levels, as from hl__layout_names */
  uint32_t buckets;
  int intentions;    /* as in a layout; `wanted` has the same, or 0 */
  const char *other; /* how the program gets a space of its own, for messages */
} hl__space;

/* Finds the layout on which space and program agree: the space's, unless the program wants another.
   *agreed: a reference to a layout that leaves nothing open that the space decides; it is `wanted`
   if that does not either. HL_ENOMEM, HL_EMISMATCH. */
int hl__layout_agree(hl_layout *wanted, const hl__space *space, hl_layout **agreed,
                     hl_error *error);
/* The same for a space without buckets, of whose levels a store has found the names. The first
   session makes *agreed of `wanted`; later ones look whether it is the space's still. HL_ENOMEM;
   HL_EMISMATCH, without a message. */
int hl__layout_settle(const hl_layout *wanted, const char *names, hl_layout **agreed,
                      hl_error *error);

/* Whether both have the same levels and buckets. */
bool hl__layout_is_same(const hl_layout *a, const hl_layout *b);

#define HL__PATTERN_MAX 255
/* Makes a copy of `wanted` whose nodes have names, too. patterns: as hl_config.names; own_names: as
   hl_store.own_names. HL_OK, HL_ENOMEM; HL_EMISUSE: a pattern is not understood, or there is not
   exactly one for each level. */
int hl__layout_named(const hl_layout *wanted, uint64_t (*name_key)(const char *name, size_t size),
                     const char *const *patterns, const char *own_names, hl_layout **layout,
                     hl_error *error);
/* Writes the name of the node ids[0]/.../ids[n-1], unless out is NULL; no NUL. Returns its size. */
size_t hl__layout_node_name(const hl_layout *layout, const hl_id *ids, unsigned n, char *out);

/* FNV-1a of 64 bits, of data behind what `h` is the hash of. The first: HL__HASH_BEGIN. */
#define HL__HASH_BEGIN UINT64_C(14695981039346656037)
#define HL__HASH_PRIME UINT64_C(1099511628211)
static inline uint64_t hl__hash(const void *data, size_t size, uint64_t h) {
  const uint8_t *byte = data;
  for (size_t i = 0; i < size; i++) h = (h ^ byte[i]) * HL__HASH_PRIME;
  return h;
}

/* The bits of a hash that is used as a bucket: 4 of 64 bits are left for a level. */
#define HL__HASH_BITS 60

/* A row as one signed number, as a store without buckets keeps it: the level in the upper four
   bits, then the hash; for an update row all bits of that, inverted. */
static inline int64_t hl__row_key(unsigned level, uint64_t bucket) {
  uint64_t key = (uint64_t)(level & ~HL_LEVEL_UPDATE) << HL__HASH_BITS | bucket;
  return (int64_t)(level & HL_LEVEL_UPDATE ? ~key : key);
}

/* Copies a layout without names of nodes and intentions. HL_OK, HL_ENOMEM. */
int hl__layout_plain(const hl_layout *layout, hl_layout **copy, hl_error *error);
/* Makes such a layout with the levels of `wanted`, no buckets, and nothing open. The program's
   number of buckets does not count then. HL_OK, HL_ENOMEM. */
int hl__layout_unbucketed(const hl_layout *wanted, hl_layout **layout, hl_error *error);

#endif
