/*
 * plan.h - the inside of a plan, for plan.c, and the functions that the core needs beyond
 * hierlock.h. A plan for one or two targets takes one allocation, and so does every copy.
 *
 * Only the thread that makes a plan may change it. Once several threads see the plan (the plan of a
 * lock or a waiter), it is const everywhere: copying has put its rows in order, which is not
 * possible afterwards.
 */
#ifndef HIERLOCK_PLAN_H
#define HIERLOCK_PLAN_H

#include "hierlock.h"

typedef struct hl__plan_target {
  size_t ids; /* offset in bytes: for each level a uint16_t size and the id */
  uint8_t level;
  uint8_t mode; /* as it will be locked */
  bool mode_given;
  bool updates; /* requested in HL_UPDATE */
} hl__plan_target;

struct hl_plan {
  hl_layout *layout;
  hl_row *rows;
  size_t row_count, row_capacity;
  hl__plan_target *targets;
  size_t target_count, target_capacity;
  char *bytes; /* ids, and names: a uint32_t size and the name */
  size_t byte_count, byte_capacity;
  bool ordered;    /* rows are in locking order, each once */
  bool housed;     /* see hl__plan_house */
  hl_row inside[]; /* the room for all three, until they outgrow it */
};

/* Like hl_plan_add. A target that updates is in HL_UPDATE, or has become exclusive. */
int hl__plan_add(hl_plan *plan, const hl_id *ids, hl_target target, hl_error *error);
/* Adds all targets and rows of other, which has the same layout. False: out of memory; plan is
   unchanged. */
bool hl__plan_append(hl_plan *plan, const hl_plan *other);
/* How much room a copy needs, and a copy in that room, which ends with the room. It takes no
   reference to the layout, may not be changed, and hl_plan_free ignores it. NULL: room is NULL. */
size_t hl__plan_copy_size(const hl_plan *plan);
hl_plan *hl__plan_house(void *room, const hl_plan *plan);
/* Puts the rows in locking order, each once. */
void hl__plan_order(hl_plan *plan);
/* The rows of a plan that is in order, as copies are. Changes nothing, so threads may share the
   plan. */
const hl_row *hl__plan_rows(const hl_plan *plan, size_t *n);
/* The hl_request.names of the plan's rows; valid until the plan changes. */
const char *hl__plan_names(const hl_plan *plan);
/* Writes those rows of plan that held does not cover, in locking order, and returns their number.
   missing has room for all rows of plan. Both plans are in order. */
size_t hl__plan_missing(const hl_plan *plan, const hl_plan *held, hl_row *missing);
/* A plan of the same targets, where those requested in HL_UPDATE are exclusive, or not. Their
   update rows are rows of it in both cases. In order. NULL: out of memory. */
hl_plan *hl__plan_converted(const hl_plan *plan, bool exclusive);
/* The plan's rows, and the update rows of all nodes of the deepest level that it wants exclusively;
   *n of them, allocated with malloc. NULL: out of memory. The plan is in order. */
hl_row *hl__plan_behind_updates(const hl_plan *plan, size_t *n);
/* Whether any target was requested in HL_UPDATE. */
bool hl__plan_updates(const hl_plan *plan);
/* The level of the deepest target. */
unsigned hl__plan_level(const hl_plan *plan);

#endif
