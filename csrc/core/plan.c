/*
 * plan.c - from targets to ordered rows. The order in which locks are taken, and the argument that
 * it is free of deadlock, are here and nowhere else.
 *
 * A plan lists each row once, in the strongest mode that any target needs: first the update rows
 * (mode.h), then the others, each in ascending order of (level, bucket). Stores take the rows in
 * exactly this order.
 *
 * Why calls cannot deadlock. Let every call own a plan, and say that call A waits for call B when A
 * requests a row that B holds, or for which B waits ahead of A in that row's queue. While A waits
 * for row r it holds only rows below r, and it never requests again a row that it holds (each row
 * is listed once, in its strongest mode, so there are no conversions). Take a circle of waiting
 * calls, and in it the highest row r that any of them waits for. Each call that waits for r waits
 * for a call that holds r, or for one ahead of it in r's queue. A call of the circle that holds r
 * waits for a row above r, but no call of the circle does. So each call that waits for r waits for
 * one ahead of it in r's queue. But the first call in the queue has none ahead. Hence there is no
 * circle.
 *
 * An update lock that becomes exclusive does request again a row that it holds, and below the last
 * one. The call waits only for the sharers of that row: its update row keeps out other calls that
 * want to become exclusive, and a call that waits for the update row holds nothing, as that row
 * comes first. A sharer does not wait for it, with one exception: it holds several nodes, and the
 * sharer takes these one after the other. Then the sharer may hold the first node and wait for the
 * second, behind a call that wants that one exclusively. This is the only circle left.
 *
 * If nodes are locked by name, too (hl_config.interoperate), a name is one more row, on a level of
 * its own after all others. The same argument holds among our programs; other programs do not know
 * the order.
 *
 * Ordering by id would not do: two ids in different buckets may come in one order by id and in the
 * other by bucket, and the rows of buckets are locked.
 */
#include "plan.h"

#include "error.h"
#include "layout.h"
#include "mode.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* A plan's rows, targets and bytes lie one behind the other in one block: behind the plan itself,
   or apart once they outgrow that. */
static uint64_t block_size(uint64_t rows, uint64_t targets, uint64_t bytes) {
  return rows * sizeof(hl_row) + targets * sizeof(hl__plan_target) + bytes;
}

static void block_set(hl_plan *plan, void *block, size_t rows, size_t targets, size_t bytes) {
  plan->rows = block;
  plan->targets = (hl__plan_target *)(plan->rows + rows);
  plan->bytes = (char *)(plan->targets + targets);
  plan->row_capacity = rows;
  plan->target_capacity = targets;
  plan->byte_capacity = bytes;
}

static hl_plan *plan_init(hl_plan *plan, hl_layout *layout, size_t rows, size_t targets,
                          size_t bytes) {
  if (!plan) return NULL;
  *plan = (hl_plan){.layout = layout, .ordered = true};
  block_set(plan, plan->inside, rows, targets, bytes);
  return plan;
}

hl_plan *hl_plan_new(hl_layout *layout) {
  hl_plan *plan = layout ? malloc(sizeof *plan + (size_t)block_size(6, 2, 96)) : NULL;
  return plan_init(plan, plan ? hl_layout_ref(layout) : NULL, 6, 2, 96);
}

/* Makes room for so many more. A row has 32 bits for the place of its name; one bit is left for the
   room to double. */
static bool reserve(hl_plan *plan, size_t rows, size_t targets, size_t bytes) {
  if (bytes > UINT32_MAX / 2 - plan->byte_count) return false;
  if (rows <= plan->row_capacity - plan->row_count &&
      targets <= plan->target_capacity - plan->target_count &&
      bytes <= plan->byte_capacity - plan->byte_count)
    return true;
  const hl_plan before = *plan;
  rows = 2 * (plan->row_count + rows);
  targets = 2 * (plan->target_count + targets);
  bytes = 2 * (plan->byte_count + bytes);
  uint64_t size = block_size(rows, targets, bytes);
  void *block = size <= PTRDIFF_MAX ? malloc((size_t)size) : NULL;
  if (!block) return false;
  block_set(plan, block, rows, targets, bytes);
  memcpy(plan->rows, before.rows, before.row_count * sizeof *plan->rows);
  memcpy(plan->targets, before.targets, before.target_count * sizeof *plan->targets);
  memcpy(plan->bytes, before.bytes, before.byte_count);
  if (before.rows != plan->inside) free(before.rows);
  return true;
}

void hl_plan_clear(hl_plan *plan) {
  if (!plan) return;
  plan->row_count = plan->target_count = plan->byte_count = 0;
  plan->ordered = true;
}

void hl_plan_free(const hl_plan *plan) {
  if (!plan || plan->housed) return;
  if (plan->rows != plan->inside) free(plan->rows);
  hl_layout_unref(plan->layout);
  free((void *)plan);
}

bool hl__plan_append(hl_plan *plan, const hl_plan *other) {
  if (!reserve(plan, other->row_count, other->target_count, other->byte_count)) return false;
  memcpy(plan->rows + plan->row_count, other->rows, other->row_count * sizeof *plan->rows);
  for (size_t i = 0; i < other->row_count; i++)
    if (other->rows[i].level == HL_LEVEL_NAMED)
      plan->rows[plan->row_count + i].root += (uint32_t)plan->byte_count;
  memcpy(plan->bytes + plan->byte_count, other->bytes, other->byte_count);
  for (size_t i = 0; i < other->target_count; i++) {
    hl__plan_target *target = &plan->targets[plan->target_count + i];
    *target = other->targets[i];
    target->ids += plan->byte_count;
  }
  plan->ordered = plan->row_count == 0 && other->ordered;
  plan->row_count += other->row_count;
  plan->byte_count += other->byte_count;
  plan->target_count += other->target_count;
  return true;
}

size_t hl__plan_copy_size(const hl_plan *plan) {
  return sizeof *plan + (size_t)block_size(plan->row_count, plan->target_count, plan->byte_count);
}

hl_plan *hl__plan_house(void *room, const hl_plan *plan) {
  hl_plan *copy =
      plan_init(room, plan->layout, plan->row_count, plan->target_count, plan->byte_count);
  if (!copy) return NULL;
  copy->housed = true;
  (void)hl__plan_append(copy, plan); /* there is room */
  hl__plan_order(copy);
  return copy;
}

hl_plan *hl_plan_copy(const hl_plan *plan) {
  hl_plan *copy = plan ? hl__plan_house(malloc(hl__plan_copy_size(plan)), plan) : NULL;
  if (!copy) return NULL;
  copy->housed = false;
  (void)hl_layout_ref(copy->layout);
  return copy;
}

hl_layout *hl_plan_layout(const hl_plan *plan) { return plan ? plan->layout : NULL; }

static int row_compare(const void *left, const void *right) { return hl__row_compare(left, right); }

static int ids_check(const hl_plan *plan, const hl_id *ids, unsigned n, size_t *bytes,
                     hl_error *error) {
  if (n < 1 || n > plan->layout->levels)
    return hl__error(error, HL_EMISUSE, "a target has 1 to %u ids (levels), not %u",
                     plan->layout->levels, n);
  for (unsigned i = 0; i < n; i++) {
    if (ids[i].size == 0 || !ids[i].data)
      return hl__error(error, HL_EMISUSE, "the id of level '%s' is empty", plan->layout->names[i]);
    if (ids[i].size > HL_ID_MAX)
      return hl__error(error, HL_EMISUSE, "the id of level '%s' has %zu bytes; %d are allowed",
                       plan->layout->names[i], ids[i].size, HL_ID_MAX);
    *bytes += sizeof(uint16_t) + ids[i].size;
  }
  return HL_OK;
}

/* Adds the row of the name that other programs lock for the node ids[0]/.../ids[n-1]. There is room
   for it. */
static void name_add(hl_plan *plan, const hl_id *ids, unsigned n, hl_mode mode) {
  char *at = plan->bytes + plan->byte_count;
  char *name = at + sizeof(uint32_t);
  uint32_t size = (uint32_t)hl__layout_node_name(plan->layout, ids, n, name);
  memcpy(at, &size, sizeof size);
  plan->rows[plan->row_count++] = (hl_row){
      .bucket = plan->layout->name_key(name, size),
      .level = HL_LEVEL_NAMED,
      .mode = (uint8_t)mode,
      .root = (uint32_t)plan->byte_count,
  };
  plan->byte_count += sizeof size + size;
}

/* Refuses ids whose names would be the store's own keys. The plan's bytes have room for a name. */
static int names_check(const hl_plan *plan, const hl_id *ids, unsigned n, hl_error *error) {
  const hl_layout *layout = plan->layout;
  size_t own = strlen(layout->own_names);
  for (unsigned i = 0; own && i < n; i++) {
    char *name = plan->bytes + plan->byte_count;
    size_t size = hl__layout_node_name(layout, ids, i + 1, name);
    if (size >= own && memcmp(name, layout->own_names, own) == 0)
      return hl__error(error, HL_EMISUSE,
                       "the name by which Symfony Lock would lock the node of level '%s' begins "
                       "with '%s', as the keys of hierlock itself do: open with other `names`, or "
                       "with another ?prefix= in the DSN",
                       layout->names[i], layout->own_names);
  }
  return HL_OK;
}

int hl__plan_add(hl_plan *plan, const hl_id *ids, hl_target target, hl_error *error) {
  unsigned level = target.level, n = level + 1;
  hl_mode mode = target.mode;
  size_t bytes = 0;
  if (mode != HL_SHARED && mode != HL_EXCLUSIVE && mode != HL_UPDATE)
    return hl__error(error, HL_EMISUSE, "%d is no mode", (int)mode);
  int status = ids_check(plan, ids, n, &bytes, error);
  if (status) return status;
  bool named = plan->layout->name_key != NULL;
  for (unsigned i = 1; named && i <= n; i++)
    bytes += sizeof(uint32_t) + hl__layout_node_name(plan->layout, ids, i, NULL);
  if (!reserve(plan, 1 + (named ? 2 * n : n), 1, bytes)) return hl__error_memory(error);
  status = names_check(plan, ids, n, error);
  if (status) return status;

  bool deepest = n == plan->layout->levels, intentions = plan->layout->intentions > 0;
  /* The names of nodes have no modes for intentions. */
  mode = hl__mode_of_node(mode, deepest, intentions && !named);
  plan->targets[plan->target_count++] = (hl__plan_target){
      .ids = plan->byte_count,
      .level = (uint8_t)level,
      .mode = (uint8_t)mode,
      .mode_given = target.mode_given,
      .updates = target.updates,
  };
  for (unsigned i = 0; i < n; i++) {
    uint16_t size = (uint16_t)ids[i].size;
    memcpy(plan->bytes + plan->byte_count, &size, sizeof size);
    memcpy(plan->bytes + plan->byte_count + sizeof size, ids[i].data, size);
    plan->byte_count += sizeof size + size;
  }
  /* The rows of one target are in order by themselves, level by level. */
  if (plan->row_count > 0) plan->ordered = false;
  hl_mode row_mode = hl__mode_of_row(mode);
  uint64_t root = hl_layout_bucket(plan->layout, ids, 1);
  if (target.updates && deepest)
    plan->rows[plan->row_count++] = (hl_row){
        .bucket = n > 1 ? hl_layout_bucket(plan->layout, ids, n) : root,
        .root = (uint32_t)(root ^ root >> 32),
        .level = (uint8_t)(level | HL_LEVEL_UPDATE),
        .mode = HL_EXCLUSIVE,
    };
  for (unsigned i = 0; i < n; i++)
    plan->rows[plan->row_count++] = (hl_row){
        .bucket = i ? hl_layout_bucket(plan->layout, ids, i + 1) : root,
        .root = (uint32_t)(root ^ root >> 32),
        .level = (uint8_t)i,
        .mode = (uint8_t)(i == level ? row_mode : hl__mode_of_ancestor(mode, intentions)),
    };
  if (!named) return HL_OK;
  for (unsigned i = 0; i < n; i++) name_add(plan, ids, i + 1, i == level ? row_mode : HL_SHARED);
  plan->ordered = false;
  return HL_OK;
}

int hl_plan_add(hl_plan *plan, const hl_id *ids, unsigned n, hl_mode mode, bool mode_given,
                hl_error *error) {
  HL__NEEDS(plan && ids, error);
  return hl__plan_add(plan, ids, (hl_target){n - 1, mode, mode_given, mode == HL_UPDATE}, error);
}

hl_plan *hl__plan_converted(const hl_plan *plan, bool exclusive) {
  hl_plan *made = hl_plan_new(plan->layout);
  for (size_t i = 0; made && i < plan->target_count; i++) {
    hl_id ids[HL_LEVELS_MAX];
    hl_target target = hl_plan_target(plan, i, ids);
    if (target.updates) target.mode = exclusive ? HL_EXCLUSIVE : HL_UPDATE;
    if (hl__plan_add(made, ids, target, NULL) == HL_OK) continue;
    hl_plan_free(made);
    return NULL;
  }
  if (made) hl__plan_order(made);
  return made;
}

hl_row *hl__plan_behind_updates(const hl_plan *plan, size_t *n) {
  size_t count, made = 0, updates, kept = 0;
  const hl_row *rows = hl__plan_rows(plan, &count);
  hl_row *all = malloc(2 * count * sizeof *all);
  if (!all) return NULL;
  updates = hl__update_rows(rows, count);
  for (size_t i = 0; i < count; i++) {
    if (i >= updates && !hl__may_upgrade(plan->layout, &rows[i])) continue;
    all[made] = rows[i];
    all[made++].level |= HL_LEVEL_UPDATE;
  }
  qsort(all, made, sizeof *all, row_compare);
  for (size_t i = 0; i < made; i++)
    if (i == 0 || row_compare(&all[kept - 1], &all[i]) != 0) all[kept++] = all[i];
  memcpy(all + kept, rows + updates, (count - updates) * sizeof *all);
  *n = kept + count - updates;
  return all;
}

bool hl__plan_updates(const hl_plan *plan) {
  for (size_t i = 0; i < plan->target_count; i++)
    if (plan->targets[i].updates) return true;
  return false;
}

size_t hl_plan_target_count(const hl_plan *plan) { return plan ? plan->target_count : 0; }

hl_target hl_plan_target(const hl_plan *plan, size_t i, hl_id ids[HL_LEVELS_MAX]) {
  if (!ids || i >= hl_plan_target_count(plan)) return (hl_target){0};
  const hl__plan_target *target = &plan->targets[i];
  const char *at = plan->bytes + target->ids;
  for (unsigned level = 0; level <= target->level; level++) {
    uint16_t size;
    memcpy(&size, at, sizeof size);
    ids[level] = (hl_id){at + sizeof size, size};
    at += sizeof size + size;
  }
  return (hl_target){target->level, (hl_mode)target->mode, target->mode_given, target->updates};
}

void hl__plan_order(hl_plan *plan) {
  if (plan->ordered) return;
  qsort(plan->rows, plan->row_count, sizeof *plan->rows, row_compare);
  size_t kept = 0;
  for (size_t i = 0; i < plan->row_count; i++) {
    hl_row *row = &plan->rows[i], *last = kept ? &plan->rows[kept - 1] : NULL;
    if (last && row_compare(last, row) == 0)
      last->mode = (uint8_t)hl__mode_supremum(last->mode, row->mode);
    else
      plan->rows[kept++] = *row;
  }
  plan->row_count = kept;
  plan->ordered = true;
}

const hl_row *hl__plan_rows(const hl_plan *plan, size_t *n) {
  assert(plan->ordered);
  *n = plan->row_count;
  return plan->rows;
}

const hl_row *hl_plan_rows(hl_plan *plan, size_t *n) {
  if (n) *n = 0;
  if (!plan || !n) return NULL;
  hl__plan_order(plan);
  return hl__plan_rows(plan, n);
}

const char *hl__plan_names(const hl_plan *plan) { return plan->bytes; }

size_t hl__plan_missing(const hl_plan *plan, const hl_plan *held, hl_row *missing) {
  size_t n, held_count, count = 0, j = 0;
  const hl_row *rows = hl__plan_rows(plan, &n);
  const hl_row *have = hl__plan_rows(held, &held_count);
  for (size_t i = 0; i < n; i++) {
    while (j < held_count && hl__row_compare(&have[j], &rows[i]) < 0) j++;
    bool covered = j < held_count && hl__row_compare(&have[j], &rows[i]) == 0 &&
                   hl__mode_covers(have[j].mode, rows[i].mode);
    if (!covered) missing[count++] = rows[i];
  }
  return count;
}

hl_mode hl_plan_mode(const hl_plan *plan) {
  hl_mode mode = HL_SHARED;
  if (!plan) return (hl_mode)0;
  for (size_t i = 0; i < plan->target_count; i++)
    mode = hl__mode_supremum(mode, plan->targets[i].mode);
  return mode;
}

unsigned hl__plan_level(const hl_plan *plan) {
  unsigned deepest = 0;
  for (size_t i = 0; i < plan->target_count; i++)
    if (plan->targets[i].level > deepest) deepest = plan->targets[i].level;
  return deepest;
}

char *hl_plan_describe(const hl_plan *plan, char *out, size_t size) {
  size_t used = 0, n = out ? hl_plan_target_count(plan) : 0;
  if (out && size) out[0] = '\0';
  for (size_t i = 0; i < n; i++) {
    hl_id ids[HL_LEVELS_MAX];
    hl_target target = hl_plan_target(plan, i, ids);
    for (unsigned level = 0; level <= target.level; level++) {
      const char *between = level ? "/" : i ? ", " : "";
      if (used + strlen(between) + 8 >= size) {
        if (used + 3 < size) strcpy(out + used, "...");
        return out;
      }
      memcpy(out + used, between, strlen(between));
      used += strlen(between);
      used += hl__escape_id(out + used, size - used, ids[level].data, ids[level].size);
    }
  }
  return out;
}
