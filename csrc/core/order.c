/*
 * order.c - see order.h. Everything here is kept until the process ends; its size depends on the
 * kinds and lines of the program. A lock of fork.h guards it. An entry that another thread was
 * writing during a fork stays half learnt in the child.
 */
#include "order.h"

#include "error.h"
#include "fork.h"
#include "layout.h"
#include "manager.h"
#include "plan.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KINDS 64
#define NAME_MAX_SIZE (HL_LEVEL_NAME_MAX + 48)

typedef struct edge {
  const char *held, *taken; /* lines of the program; NULL: never seen */
} edge;

/* Two nodes of one kind, or two units, taken in this order. */
typedef struct pair {
  uint64_t first, second; /* hashes of the nodes or units */
  edge lines;
} pair;

#define PAIRS 65536u /* at most half of them are used */
#define LINES 4096u

static atomic_uint lock_word;
static char names[KINDS][NAME_MAX_SIZE];
static char levels[KINDS][HL_LEVEL_NAME_MAX + 1]; /* the kind's level, without its label; or its
                                                     unit */
static bool is_unit[KINDS];
static unsigned kind_count;
static uint64_t after[KINDS]; /* bit j of after[i]: j was taken while i was held */
static edge (*edges)[KINDS];
static pair *pairs;
static unsigned pair_count;
static char *lines[LINES];

/* Keeps one copy of each line of the program. If there are too many, or no memory, returns a
   substitute. */
static const char *line_of(const char *where) {
  const char *none = "a place that is not known";
  if (!where || !*where) return none;
  size_t size = strlen(where) + 1;
  for (uint64_t h = hl__hash(where, size, HL__HASH_BEGIN), i = 0; i < 16; i++) {
    char **slot = &lines[(h + i) % LINES];
    if (!*slot) {
      *slot = malloc(size);
      if (!*slot) return none;
      memcpy(*slot, where, size);
    }
    if (strcmp(*slot, where) == 0) return *slot;
  }
  return none;
}

/* -------------------------------------------------------------- units */

static int unit_check(const char *const *given, size_t n, hl_error *error) {
  const char *name = given[n];
  size_t size = strlen(name);
  if (n == HL_UNITS_MAX)
    return hl__error(error, HL_EMISUSE, "a manager has at most %d units", HL_UNITS_MAX);
  if (size == 0 || size > HL_UNIT_NAME_MAX)
    return hl__error(error, HL_EMISUSE, "unit name %zu must have 1 to %d bytes", n + 1,
                     HL_UNIT_NAME_MAX);
  for (size_t i = 0; i < size; i++)
    if ((unsigned char)name[i] < ' ')
      return hl__error(error, HL_EMISUSE, "unit name %zu must not contain control characters",
                       n + 1);
  for (size_t i = 0; i < n; i++)
    if (strcmp(given[i], name) == 0)
      return hl__error(error, HL_EMISUSE, "unit name '%s' is given twice", name);
  return HL_OK;
}

int hl__units_copy(const char *const *given, char **units, hl_error *error) {
  size_t size = 1, n = 0;
  if (!given) return HL_OK;
  for (; given[n]; n++) {
    int status = unit_check(given, n, error);
    if (status) return status;
    size += strlen(given[n]) + 1;
  }
  if (n == 0) return hl__error(error, HL_EMISUSE, "units must not be empty");
  char *end = *units = calloc(1, size);
  if (!end) return hl__error_memory(error);
  for (size_t i = 0; i < n; i++) end = stpcpy(end, given[i]) + 1;
  return HL_OK;
}

static bool is_id(const char *name, const hl_id *id) {
  return strlen(name) == id->size && memcmp(name, id->data, id->size) == 0;
}

/* The unit of that name; NULL: no unit. Units compare by their address: the later one is
   greater. */
static const char *find_unit(const char *units, const hl_id *id) {
  for (; units && *units; units += strlen(units) + 1)
    if (is_id(units, id)) return units;
  return NULL;
}

bool hl_manager_has_unit(const hl_manager *manager, const char *name, size_t size) {
  return manager && name && find_unit(manager->units, &(hl_id){name, size}) != NULL;
}

/* The first, or the last, unit of the plan's targets; NULL: they have none. */
static const char *unit_at_end(const char *units, const hl_plan *plan, bool last) {
  const char *found = NULL;
  for (size_t i = 0; i < hl_plan_target_count(plan); i++) {
    hl_id ids[HL_LEVELS_MAX];
    (void)hl_plan_target(plan, i, ids);
    const char *unit = find_unit(units, &ids[0]);
    if (unit && (!found || (last ? unit > found : unit < found))) found = unit;
  }
  return found;
}

/* -------------------------------------------------------------- kinds */

static unsigned kind_of(const char *name, const char *level, bool unit) {
  for (unsigned i = 0; i < kind_count; i++)
    if (strcmp(names[i], name) == 0) return i;
  if (kind_count == KINDS) return KINDS;
  strcpy(names[kind_count], name);
  strcpy(levels[kind_count], level);
  is_unit[kind_count] = unit;
  return kind_count++;
}

static void kind_name(char name[NAME_MAX_SIZE], const char *level, const char *label, size_t size) {
  int used = snprintf(name, NAME_MAX_SIZE, size ? "%s \"" : "%s", level);
  size_t n = (size_t)used;
  if (!size) return;
  for (size_t i = 0; i < size && n < NAME_MAX_SIZE - 2; i++) {
    bool digit = label[i] >= '0' && label[i] <= '9';
    if (digit && name[n - 1] == '#') continue;
    char c = label[i];
    if (digit) c = '#';
    if ((unsigned char)c < ' ') c = '?';
    name[n++] = c;
  }
  name[n++] = '"';
  name[n] = '\0';
}

uint64_t hl__order_kinds(const char *units, const hl_plan *plan, const char *label,
                         size_t label_size) {
  uint64_t kinds = 0;
  char name[NAME_MAX_SIZE];
  hl_layout *layout = hl_plan_layout(plan);
  (void)hl__fork_lock(&lock_word);
  for (size_t i = 0; i < hl_plan_target_count(plan); i++) {
    hl_id ids[HL_LEVELS_MAX];
    const char *level = hl_layout_name(layout, hl_plan_target(plan, i, ids).level);
    const char *unit = find_unit(units, &ids[0]);
    if (unit)
      (void)snprintf(name, sizeof name, "\"%s\" (unit)", unit);
    else
      kind_name(name, level, label, label_size);
    unsigned kind = kind_of(name, unit ? unit : level, unit != NULL);
    if (kind == KINDS) { /* too many kinds: the level alone */
      kind_name(name, level, NULL, 0);
      kind = kind_of(name, level, false);
    }
    if (kind < KINDS) kinds |= UINT64_C(1) << kind;
  }
  hl__fork_unlock(&lock_word);
  return kinds;
}

/* -------------------------------------------------------------- orders */

static bool has(uint64_t kinds, unsigned kind) { return kinds >> kind & 1u; }

/* The shortest way from one kind to another along the orders seen; way[0] is `from`. Returns its
   length; 0: there is no way. */
static unsigned find_way(unsigned from, unsigned to, unsigned way[KINDS]) {
  unsigned before[KINDS], queue[KINDS], first = 0, last = 0, n = 1;
  uint64_t seen = UINT64_C(1) << from;
  queue[last++] = from;
  while (first < last && !has(seen, to)) {
    unsigned at = queue[first++];
    for (unsigned next = 0; next < KINDS; next++)
      if (has(after[at] & ~seen, next)) {
        seen |= UINT64_C(1) << next;
        before[next] = at;
        queue[last++] = next;
      }
  }
  if (!has(seen, to)) return 0;
  for (unsigned at = to; at != from; at = before[at]) n++;
  for (unsigned at = to, i = n; i-- > 0; at = i ? before[at] : at) way[i] = at;
  return n;
}

static void say(char *report, size_t size, const char *begin, const char *taken, const char *held,
                const edge *lines_of) {
  size_t used = strlen(report);
  (void)snprintf(report + used, size - used, "%s%s at %s while %s is held, since %s", begin, taken,
                 lines_of->taken, held, lines_of->held);
}

/* Learns that a kind was taken while another one was held. */
static bool learn_kinds(unsigned held, unsigned taken, const edge *seen, char *report,
                        size_t size) {
  unsigned way[KINDS];
  if (has(after[held], taken)) return false;
  unsigned n = find_way(taken, held, way);
  after[held] |= UINT64_C(1) << taken;
  edges[held][taken] = *seen;
  if (n < 2 || *report) return false;
  say(report, size, "locks are taken in a circle of orders: ", names[taken], names[held], seen);
  for (unsigned i = 0; i + 1 < n; i++)
    say(report, size, i ? ", and " : "; but elsewhere ", names[way[i + 1]], names[way[i]],
        &edges[way[i]][way[i + 1]]);
  return true;
}

/* The entry of two hashes, or a free one for them. NULL: neither, as the table is full. */
static pair *pair_at(uint64_t first, uint64_t second) {
  for (uint64_t h = first * HL__HASH_PRIME ^ second, i = 0;; i++) {
    pair *at = &pairs[(h + i) % PAIRS];
    if (!at->lines.held) return pair_count < PAIRS / 2 ? at : NULL;
    if (at->first == first && at->second == second) return at;
  }
}

/* Learns the order of two nodes of one kind: one was taken while the other was held. */
static bool learn_nodes(const hl__order_step *held, const hl__order_step *taken, const pair *nodes,
                        unsigned kind, char *report, size_t size) {
  pair *other = pair_at(nodes->second, nodes->first), *own = pair_at(nodes->first, nodes->second);
  if (!own || own->lines.held) return false;
  *own = *nodes;
  pair_count++;
  if (!other || !other->lines.held || *report) return false;
  char path[128], other_path[128];
  (void)hl_plan_describe(held->plan, path, sizeof path);
  (void)hl_plan_describe(taken->plan, other_path, sizeof other_path);
  (void)snprintf(report, size, "locks of one kind (%s) are taken in both orders: ", names[kind]);
  say(report, size, "", other_path, path, &nodes->lines);
  say(report, size, "; but elsewhere ", path, other_path, &other->lines);
  return true;
}

/* The node of the i-th target as a number. False: the target is not of that level or unit. */
static bool node_of(const hl_plan *plan, size_t i, unsigned kind, uint64_t *node) {
  hl_id ids[HL_LEVELS_MAX];
  hl_layout *layout = hl_plan_layout(plan);
  hl_target target = hl_plan_target(plan, i, ids);
  const char *own = hl_layout_name(layout, target.level);
  if (is_unit[kind] ? !is_id(levels[kind], &ids[0]) : strcmp(own, levels[kind]) != 0) return false;
  uint64_t h = hl__hash(own, strlen(own), HL__HASH_BEGIN);
  for (unsigned j = 0; j <= target.level; j++) {
    h = hl__hash(&ids[j].size, sizeof ids[j].size, h);
    h = hl__hash(ids[j].data, ids[j].size, h);
  }
  *node = h;
  return true;
}

static bool learn_same(const hl__order_step *held, const hl__order_step *taken, unsigned kind,
                       const edge *seen, char *report, size_t size) {
  bool found = false;
  for (size_t i = 0; i < hl_plan_target_count(held->plan); i++)
    for (size_t j = 0; j < hl_plan_target_count(taken->plan); j++) {
      pair nodes = {.lines = *seen};
      if (node_of(held->plan, i, kind, &nodes.first) &&
          node_of(taken->plan, j, kind, &nodes.second) && nodes.first != nodes.second &&
          learn_nodes(held, taken, &nodes, kind, report, size))
        found = true;
    }
  return found;
}

bool hl__order_learn(const hl__order_step *held, const hl__order_step *taken, char *report,
                     size_t size) {
  bool found = false;
  *report = '\0';
  (void)hl__fork_lock(&lock_word);
  if (!edges) edges = calloc(KINDS, sizeof *edges);
  if (!pairs) pairs = calloc(PAIRS, sizeof *pairs);
  const edge seen = {line_of(held->where), line_of(taken->where)};
  for (unsigned i = 0; edges && pairs && i < kind_count; i++)
    for (unsigned j = 0; has(held->kinds, i) && j < kind_count; j++) {
      if (!has(taken->kinds, j)) continue;
      bool new = i == j ? learn_same(held, taken, i, &seen, report, size)
                        : learn_kinds(i, j, &seen, report, size);
      found = found || new;
    }
  hl__fork_unlock(&lock_word);
  return found;
}

bool hl__order_units(const char *units, const hl__order_step *held, const hl__order_step *taken,
                     bool *first, char *report, size_t size) {
  const char *later = unit_at_end(units, held->plan, true);
  const char *sooner = unit_at_end(units, taken->plan, false);
  if (!later || !sooner || sooner >= later) return false;
  char path[128], other_path[128];
  (void)hl__fork_lock(&lock_word);
  if (!pairs) pairs = calloc(PAIRS, sizeof *pairs);
  const edge seen = {line_of(held->where), line_of(taken->where)};
  const uint64_t a = hl__hash(later, strlen(later), HL__HASH_BEGIN);
  const uint64_t b = hl__hash(sooner, strlen(sooner), HL__HASH_BEGIN);
  pair *own = pairs ? pair_at(a, b) : NULL;
  *first = !own || !own->lines.held;
  if (own && *first) {
    *own = (pair){a, b, seen};
    pair_count++;
  }
  hl__fork_unlock(&lock_word);
  *report = '\0';
  say(report, size, "units are taken against the declared order: ",
      hl_plan_describe(taken->plan, other_path, sizeof other_path),
      hl_plan_describe(held->plan, path, sizeof path), &seen);
  size_t used = strlen(report);
  (void)snprintf(report + used, size - used, "; \"%s\" comes before \"%s\"", sooner, later);
  return true;
}
