/*
 * layout.c - the shape of a tree, and the way from a node to its bucket. The mapping is part of the
 * contract: programs in other languages compute the same buckets on the same table, so it must
 * never change.
 */
#include "layout.h"

#include "error.h"

#include <stdlib.h>
#include <string.h>

#define FNV_OFFSET_BASIS 2166136261u
#define FNV_PRIME 16777619u

static uint32_t fnv1a(uint32_t hash, const char *data, size_t n) {
  for (size_t i = 0; i < n; i++) hash = (hash ^ (unsigned char)data[i]) * FNV_PRIME;
  return hash;
}

static int name_check(const char *const *names, unsigned level, hl_error *error) {
  const char *name = names[level];
  size_t size = name ? strlen(name) : 0;
  if (size == 0 || size > HL_LEVEL_NAME_MAX)
    return hl__error(error, HL_EMISUSE, "level name %u must have 1 to %d bytes", level + 1,
                     HL_LEVEL_NAME_MAX);
  for (size_t i = 0; i < size; i++)
    if (name[i] == ':' || name[i] == ',' || (unsigned char)name[i] < ' ')
      return hl__error(error, HL_EMISUSE,
                       "level name %u must not contain ':', ',' or control characters", level + 1);
  for (unsigned i = 0; i < level; i++)
    if (strcmp(names[i], name) == 0)
      return hl__error(error, HL_EMISUSE, "level name '%s' is given twice", name);
  return HL_OK;
}

int hl_layout_new(const char *const *names, unsigned levels, uint32_t buckets, hl_layout **layout,
                  hl_error *error) {
  static const char *const default_names[] = {"user", "account", "resource"};
  bool levels_open = !names, buckets_open = buckets == 0;
  HL__NEEDS(layout, error);
  *layout = NULL;
  if (!names) {
    names = default_names;
    levels = 3;
  }
  if (buckets == 0) buckets = HL_BUCKETS_DEFAULT;
  if (levels < 1 || levels > HL_LEVELS_MAX)
    return hl__error(error, HL_EMISUSE, "a tree has 1 to %d levels, not %u", HL_LEVELS_MAX, levels);
  if (buckets > INT32_MAX)
    return hl__error(error, HL_EMISUSE, "buckets must be 1 to %d", INT32_MAX);
  for (unsigned i = 0; i < levels; i++) {
    int status = name_check(names, i, error);
    if (status) return status;
  }

  hl_layout *made = calloc(1, sizeof *made);
  if (!made) return hl__error_memory(error);
  atomic_init(&made->references, 1u);
  made->levels = levels;
  made->buckets = buckets;
  made->levels_open = levels_open;
  made->buckets_open = buckets_open;
  for (unsigned i = 0; i < levels; i++) {
    strcpy(made->names[i], names[i]);
    made->seeds[i] = fnv1a(FNV_OFFSET_BASIS, names[i], strlen(names[i]));
    made->wide_seeds[i] = hl__hash(names[i], strlen(names[i]), HL__HASH_BEGIN);
  }
  *layout = made;
  return HL_OK;
}

const char *hl__layout_names(const hl_layout *layout, char out[HL__LAYOUT_NAMES_MAX]) {
  out[0] = '\0';
  for (unsigned i = 0; i < layout->levels; i++) {
    if (i) strcat(out, ",");
    strcat(out, layout->names[i]);
  }
  return out;
}

/* Makes the layout of these names, which may be invalid: HL_EMISUSE. */
static int layout_parse(const char *names, uint32_t buckets, hl_layout **layout, hl_error *error) {
  char copy[HL__LAYOUT_NAMES_MAX] = "", *rest = copy, *name;
  const char *list[HL_LEVELS_MAX];
  unsigned n = 0;
  if (strlen(names) < sizeof copy) strcpy(copy, names);
  while (n < HL_LEVELS_MAX && (name = strsep(&rest, ","))) list[n++] = name;
  return hl_layout_new(list, rest ? 0 : n, buckets, layout, error);
}

int hl__layout_agree(hl_layout *wanted, const hl__space *space, hl_layout **agreed,
                     hl_error *error) {
  char ours[HL__LAYOUT_NAMES_MAX];
  (void)hl__layout_names(wanted, ours);
  *agreed = NULL;
  if (space->buckets > 0 && (wanted->levels_open || strcmp(ours, space->names) == 0) &&
      (wanted->buckets_open || wanted->buckets == space->buckets)) {
    if (!wanted->levels_open && !wanted->buckets_open && wanted->intentions == space->intentions) {
      *agreed = hl_layout_ref(wanted);
      return HL_OK;
    }
    int status = layout_parse(space->names, space->buckets, agreed, error);
    if (status == HL_OK) (*agreed)->intentions = space->intentions;
    if (status != HL_EMISUSE) return status;
  }
  return hl__error(error, HL_EMISMATCH,
                   "%.130s has %u buckets for each of the levels %.90s; this program wants %u for "
                   "%.90s: leave out `buckets` and `levels`, and it uses the existing ones; or %s",
                   space->name, space->buckets, space->names, wanted->buckets, ours, space->other);
}

bool hl__layout_is_same(const hl_layout *a, const hl_layout *b) {
  unsigned levels = hl_layout_levels(a);
  if (levels != hl_layout_levels(b) || hl_layout_buckets(a) != hl_layout_buckets(b)) return false;
  for (unsigned i = 0; i < levels; i++)
    if (strcmp(hl_layout_name(a, i), hl_layout_name(b, i)) != 0) return false;
  return true;
}

int hl__layout_plain(const hl_layout *layout, hl_layout **copy, hl_error *error) {
  *copy = malloc(sizeof **copy);
  if (!*copy) return hl__error_memory(error);
  memcpy(*copy, layout, sizeof **copy);
  atomic_init(&(*copy)->references, 1u);
  (*copy)->intentions = 0;
  (*copy)->name_key = NULL;
  (*copy)->patterns = NULL;
  (*copy)->own_names[0] = '\0';
  return HL_OK;
}

int hl__layout_unbucketed(const hl_layout *wanted, hl_layout **layout, hl_error *error) {
  int status = hl__layout_plain(wanted, layout, error);
  if (status) return status;
  (*layout)->buckets = 0;
  (*layout)->levels_open = (*layout)->buckets_open = false;
  return HL_OK;
}

int hl__layout_settle(const hl_layout *wanted, const char *names, hl_layout **agreed,
                      hl_error *error) {
  char ours[HL__LAYOUT_NAMES_MAX];
  bool same = strcmp(hl__layout_names(*agreed ? *agreed : wanted, ours), names) == 0;
  if (*agreed) return same ? HL_OK : HL_EMISMATCH;
  if (same) return hl__layout_unbucketed(wanted, agreed, error);
  hl_layout *theirs = NULL;
  int status = wanted->levels_open ? layout_parse(names, 1, &theirs, error) : HL_EMISMATCH;
  if (status == HL_OK) status = hl__layout_unbucketed(theirs, agreed, error);
  hl_layout_unref(theirs);
  return status == HL_EMISUSE ? HL_EMISMATCH : status;
}

/* ----------------------------------------------------------------- names */

/* The level of the "{level}" at *at, which begins with '{', if it is one of the first `levels`;
   then moves *at behind it. Returns `levels` if it is not. */
static unsigned pattern_level(const hl_layout *layout, unsigned levels, const char **at) {
  for (unsigned i = 0; i < levels; i++) {
    size_t size = strlen(layout->names[i]);
    if (strncmp(*at + 1, layout->names[i], size) != 0 || (*at)[size + 1] != '}') continue;
    *at += size + 2;
    return i;
  }
  return levels;
}

static int pattern_check(const hl_layout *layout, unsigned level, const char *pattern,
                         hl_error *error) {
  size_t size = strlen(pattern);
  if (size == 0 || size > HL__PATTERN_MAX)
    return hl__error(error, HL_EMISUSE, "names: the pattern of level '%s' must have 1 to %d bytes",
                     layout->names[level], HL__PATTERN_MAX);
  bool own = false;
  for (const char *at = pattern; (at = strchr(at, '{'));) {
    unsigned found = pattern_level(layout, level + 1, &at);
    if (found > level)
      return hl__error(error, HL_EMISUSE,
                       "names: the pattern of level '%s' contains '%.20s': between "
                       "{ and } it may have the name of this level or a higher one",
                       layout->names[level], at);
    own |= found == level;
  }
  if (!own)
    return hl__error(error, HL_EMISUSE,
                     "names: the pattern of level '%s' lacks {%s}, so all its "
                     "nodes would have the same name",
                     layout->names[level], layout->names[level]);
  return HL_OK;
}

int hl__layout_named(const hl_layout *wanted, uint64_t (*name_key)(const char *name, size_t size),
                     const char *const *patterns, const char *own_names, hl_layout **layout,
                     hl_error *error) {
  size_t size = 1;
  unsigned n = 0;
  *layout = NULL;
  for (; patterns && patterns[n]; n++) {
    if (n == wanted->levels) break;
    int status = pattern_check(wanted, n, patterns[n], error);
    if (status) return status;
    size += strlen(patterns[n]) + 1;
  }
  if (patterns && (n < wanted->levels || patterns[n]))
    return hl__error(error, HL_EMISUSE, "names: there must be one for each of the %u levels",
                     wanted->levels);
  int status = hl__layout_plain(wanted, layout, error);
  if (status) return status;
  (*layout)->intentions = wanted->intentions;
  (*layout)->name_key = name_key;
  if (own_names) strcpy((*layout)->own_names, own_names);
  if (!patterns) return HL_OK;
  char *at = (*layout)->patterns = malloc(size);
  if (!at) {
    hl_layout_unref(*layout);
    *layout = NULL;
    return hl__error_memory(error);
  }
  for (unsigned i = 0; i < n; i++) at = stpcpy(at, patterns[i]) + 1;
  return HL_OK;
}

static size_t append(char *out, size_t used, const char *data, size_t size) {
  if (out) memcpy(out + used, data, size);
  return used + size;
}

size_t hl__layout_node_name(const hl_layout *layout, const hl_id *ids, unsigned n, char *out) {
  size_t used = 0;
  const char *at = layout->patterns;
  if (!at) {
    for (unsigned i = 0; i < n; i++) {
      if (i) used = append(out, used, "/", 1);
      used = append(out, used, ids[i].data, ids[i].size);
    }
    return used;
  }
  for (unsigned i = 1; i < n; i++) at += strlen(at) + 1;
  while (*at) {
    size_t plain = strcspn(at, "{");
    used = append(out, used, at, plain);
    at += plain;
    if (!*at) break;
    unsigned level = pattern_level(layout, n, &at); /* pattern_check made sure that there is one */
    used = append(out, used, ids[level].data, ids[level].size);
  }
  return used;
}

/* ------------------------------------------------------------- references */

hl_layout *hl_layout_ref(hl_layout *layout) {
  if (layout) atomic_fetch_add(&layout->references, 1u);
  return layout;
}

void hl_layout_unref(hl_layout *layout) {
  if (!layout || atomic_fetch_sub(&layout->references, 1u) != 1) return;
  free(layout->patterns);
  free(layout);
}

unsigned hl_layout_levels(const hl_layout *layout) { return layout ? layout->levels : 0; }

uint32_t hl_layout_buckets(const hl_layout *layout) { return layout ? layout->buckets : 0; }

const char *hl_layout_name(const hl_layout *layout, unsigned level) {
  return layout && level < layout->levels ? layout->names[level] : NULL;
}

static uint64_t wide_bucket(const hl_layout *layout, const hl_id *ids, unsigned n) {
  const uint64_t mask = (UINT64_C(1) << HL__HASH_BITS) - 1;
  uint64_t hash = layout->wide_seeds[n - 1];
  for (unsigned i = 0; i < n; i++) {
    hash = hl__hash(":", 1, hash);
    hash = hl__hash(ids[i].data, ids[i].size, hash);
  }
  return hash >> HL__HASH_BITS ^ (hash & mask);
}

uint64_t hl_layout_bucket(const hl_layout *layout, const hl_id *ids, unsigned n) {
  if (!layout || !ids || n < 1 || n > layout->levels) return 0;
  if (layout->buckets == 0) return wide_bucket(layout, ids, n);
  uint32_t hash = layout->seeds[n - 1];
  for (unsigned i = 0; i < n; i++) {
    hash = fnv1a(hash, ":", 1);
    hash = fnv1a(hash, ids[i].data, ids[i].size);
  }
  return hash % layout->buckets;
}
