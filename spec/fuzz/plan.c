/* plan.c - any targets: the rows are as a plain reading of the contract gives them, and a
   refused call changes nothing; the missing rows are the rows that are not held; texts fit. */
#include "fuzz.h"

#include "plan.h"

#define TARGETS_MAX 64

/* The contract, computed in the plainest way. */
typedef struct oracle {
  size_t n;
  hl_row rows[TARGETS_MAX * HL_LEVELS_MAX];
} oracle;

static uint32_t oracle_bucket(const char *name, const hl_id *ids, unsigned n, uint32_t buckets) {
  uint32_t hash = 0x811c9dc5;
  for (; *name; name++) hash = (hash ^ (uint8_t)*name) * 0x01000193;
  for (unsigned i = 0; i < n; i++) {
    hash = (hash ^ ':') * 0x01000193;
    for (size_t k = 0; k < ids[i].size; k++) hash = (hash ^ (uint8_t)ids[i].data[k]) * 0x01000193;
  }
  return hash % buckets;
}

/* Whether rows of level a come before rows of level b: update rows first. */
static bool before_level(uint8_t a, uint8_t b) {
  bool update = a >= 128, other = b >= 128;
  return update == other ? a < b : update;
}

/* Sorted in, once. */
static void oracle_row(oracle *self, uint8_t level, uint32_t bucket, uint8_t mode) {
  size_t at = 0;
  while (at < self->n && (before_level(self->rows[at].level, level) ||
                          (self->rows[at].level == level && self->rows[at].bucket < bucket)))
    at++;
  if (at < self->n && self->rows[at].level == level && self->rows[at].bucket == bucket) {
    if (mode == HL_EXCLUSIVE) self->rows[at].mode = mode;
    return;
  }
  memmove(&self->rows[at + 1], &self->rows[at], (self->n - at) * sizeof *self->rows);
  self->rows[at] = (hl_row){.level = level, .bucket = bucket, .mode = mode};
  self->n++;
}

static void oracle_target(oracle *self, const hl_layout *layout, const hl_id *ids, unsigned n,
                          hl_mode mode) {
  if (n < hl_layout_levels(layout)) mode = HL_EXCLUSIVE;
  if (mode == HL_UPDATE) {
    oracle_row(self, (uint8_t)(n - 1 + 128),
               oracle_bucket(hl_layout_name(layout, n - 1), ids, n, hl_layout_buckets(layout)),
               HL_EXCLUSIVE);
    mode = HL_SHARED;
  }
  for (unsigned i = 0; i < n; i++)
    oracle_row(self, (uint8_t)i,
               oracle_bucket(hl_layout_name(layout, i), ids, i + 1, hl_layout_buckets(layout)),
               (uint8_t)(i + 1 == n ? mode : HL_SHARED));
}

static void claim_equal(const oracle *expected, const hl_row *rows, size_t n) {
  CLAIM(n == expected->n);
  for (size_t i = 0; i < n; i++)
    CLAIM(rows[i].level == expected->rows[i].level && rows[i].bucket == expected->rows[i].bucket &&
          rows[i].mode == expected->rows[i].mode);
}

static void claim_ordered(const hl_row *rows, size_t n) {
  for (size_t i = 1; i < n; i++)
    CLAIM(before_level(rows[i - 1].level, rows[i].level) ||
          (rows[i - 1].level == rows[i].level && rows[i - 1].bucket < rows[i].bucket));
}

static void claim_texts(hl_plan *plan, size_t size) {
  char text[600];
  size_t n;
  (void)hl_plan_rows(plan, &n);
  memset(text, 'x', sizeof text);
  size_t room = 1 + size % (sizeof text - 1);
  CLAIM(hl_plan_describe(plan, text, room) == text);
  claim_line(text, room);
  CLAIM(text[room] == 'x');
  for (hl_dialect dialect = HL_MYSQL; dialect <= HL_MARIADB; dialect++) {
    char *sql = hl_plan_sql(plan, dialect, "t");
    size_t selects = 0;
    for (const char *at = sql; (at = strstr(at, "(SELECT ")); at++) selects++;
    CLAIM(selects == n);
    free(sql);
  }
}

/* Two plans together need the rows of the one, and the rows that are missing for the other. */
static void claim_missing(const hl_plan *held, const hl_plan *wanted) {
  size_t n, k, all, held_n;
  hl_plan *whole = hl_plan_copy(held);
  (void)hl__plan_rows(wanted, &n);
  const hl_row *held_rows = hl__plan_rows(held, &held_n);
  hl_row *missing = malloc((n + 1) * sizeof *missing);
  k = hl__plan_missing(wanted, held, missing);
  claim_ordered(missing, k);
  CLAIM(k <= n);
  CLAIM(hl__plan_append(whole, wanted));
  hl__plan_order(whole);
  const hl_row *whole_rows = hl__plan_rows(whole, &all);
  claim_ordered(whole_rows, all);
  for (size_t i = 0; i < all; i++) {
    bool strong = false;
    for (size_t j = 0; j < k && !strong; j++)
      strong = missing[j].level == whole_rows[i].level &&
               missing[j].bucket == whole_rows[i].bucket && missing[j].mode == whole_rows[i].mode;
    for (size_t j = 0; j < held_n && !strong; j++)
      strong = held_rows[j].level == whole_rows[i].level &&
               held_rows[j].bucket == whole_rows[i].bucket &&
               held_rows[j].mode == whole_rows[i].mode;
    CLAIM(strong);
  }
  free(missing);
  hl_plan_free(whole);
}

/* An upgrade asks only for rows that are shared, exclusively; after a downgrade the plan is as
   it was. */
static void claim_converted(const hl_plan *plan) {
  size_t n, m, k;
  const hl_row *rows = hl__plan_rows(plan, &n);
  hl_plan *up = hl__plan_converted(plan, true);
  hl_plan *down = hl__plan_converted(up, false);
  const hl_row *raised = hl__plan_rows(up, &m);
  claim_ordered(raised, m);
  CLAIM(m == n);
  hl_row *missing = malloc((n + 1) * sizeof *missing);
  k = hl__plan_missing(up, plan, missing);
  for (size_t i = 0; i < k; i++)
    CLAIM(missing[i].mode == HL_EXCLUSIVE &&
          missing[i].level + 1u == hl_layout_levels(hl_plan_layout(plan)));
  free(missing);
  const hl_row *again = hl__plan_rows(down, &m);
  CLAIM(m == n);
  for (size_t i = 0; i < n; i++)
    CLAIM(again[i].level == rows[i].level && again[i].mode == rows[i].mode &&
          again[i].bucket == rows[i].bucket && again[i].root == rows[i].root);
  hl_row *behind = hl__plan_behind_updates(up, &m);
  claim_ordered(behind, m);
  free(behind);
  hl_plan_free(up);
  hl_plan_free(down);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  input in = {data, size};
  hl_error error;
  hl_layout *layout = NULL;
  char names[HL_LEVELS_MAX + 2][8];
  const char *pointers[HL_LEVELS_MAX + 2];
  unsigned levels = take_byte(&in) % (HL_LEVELS_MAX + 2);
  for (unsigned i = 0; i < levels; i++) {
    (void)snprintf(names[i], sizeof names[i], "l%u%c", i, take_byte(&in));
    pointers[i] = names[i];
  }
  uint32_t buckets = take_number(&in) >> take_byte(&in) % 32;
  int status = hl_layout_new(pointers, levels, buckets, &layout, &error);
  if (status) {
    claim_error(&error, HL_EMISUSE);
    return 0;
  }
  hl_plan *plan = hl_plan_new(layout), *before = NULL;
  static oracle expected;
  expected.n = 0;
  for (int i = 0; i < TARGETS_MAX && in.left > 0; i++) {
    hl_id ids[HL_LEVELS_MAX + 1];
    unsigned n = take_byte(&in) % (HL_LEVELS_MAX + 2);
    static const hl_mode modes[] = {HL_EXCLUSIVE, HL_SHARED, HL_UPDATE, HL_SHARED};
    hl_mode mode = modes[take_byte(&in) % 4];
    for (unsigned k = 0; k < n && k <= HL_LEVELS_MAX; k++) {
      size_t bytes = take_byte(&in) % 16;
      if (bytes == 15) bytes = take_number(&in) % 1100;
      ids[k].data = (const char *)take_bytes(&in, &bytes);
      ids[k].size = bytes;
    }
    size_t count = hl_plan_target_count(plan);
    status = hl_plan_add(plan, ids, n, mode, false, &error);
    if (status) {
      claim_error(&error, HL_EMISUSE);
      CLAIM(hl_plan_target_count(plan) == count);
      continue;
    }
    CLAIM(hl_plan_target_count(plan) == count + 1);
    oracle_target(&expected, layout, ids, n, mode);
    hl_id kept[HL_LEVELS_MAX];
    hl_target target = hl_plan_target(plan, count, kept);
    CLAIM(target.level == n - 1);
    for (unsigned k = 0; k < n; k++)
      CLAIM(kept[k].size == ids[k].size && memcmp(kept[k].data, ids[k].data, ids[k].size) == 0);
    if (i == 3) before = hl_plan_copy(plan);
  }
  size_t n;
  const hl_row *rows = hl_plan_rows(plan, &n);
  claim_equal(&expected, rows, n);
  if (hl_plan_target_count(plan) > 0) claim_texts(plan, size);
  if (hl_plan_target_count(plan) > 0) claim_converted(plan);
  if (before) {
    hl_plan *copy = hl_plan_copy(plan);
    claim_missing(before, copy);
    claim_missing(copy, before);
    hl_plan_free(copy);
    hl_plan_free(before);
  }
  hl_plan_free(plan);
  hl_layout_unref(layout);
  return 0;
}
