/*
 * order.h - learns in which order a program takes locks of several kinds, over its whole run and
 * all its threads. A kind that is taken both before and after another one is a deadlock waiting to
 * happen. For tests; a program that does not ask for it pays nothing. If a program has declared the
 * order of its units, that order is checked instead, and nothing is learnt about it.
 *
 * A kind is a unit; else a level with the label, if there is one, each number in it replaced by
 * `#`: "order 4711" is "order #". So a kind stands for a place in the program rather than a node,
 * as the classes of lockdep do (Linux, Documentation/locking/lockdep-design.rst): an order seen for
 * two accounts counts for all. Within a kind a program may have an order of nodes (by id, say),
 * which we cannot know: so there only two nodes that were taken in both orders count.
 *
 * A call takes its rows in the order of the plan, and counts as one step. A call that tries once
 * does not wait, and is no step; but its lock is held during later steps. Shared locks count like
 * others: a waiter between two of them makes them exclude each other.
 */
#ifndef HIERLOCK_ORDER_H
#define HIERLOCK_ORDER_H

#include "hierlock.h"

/* Copies hl_config.units: the names in their order, each with its NUL, and an empty name at the
   end. NULL gives NULL. The caller frees the copy. HL_OK, HL_EMISUSE, HL_ENOMEM. */
int hl__units_copy(const char *const *names, char **units, hl_error *error);

/* A bit set: one bit for each kind of the plan's targets under this label. units: the manager's, or
   NULL. */
uint64_t hl__order_kinds(const char *units, const hl_plan *plan, const char *label,
                         size_t label_size);

/* A lock that is held or requested, as far as its order matters. */
typedef struct hl__order_step {
  const hl_plan *plan;
  uint64_t kinds; /* hl__order_kinds */
  const char *where;
} hl__order_step;

/* Learns that `taken` was requested while `held` was held. True: this order makes a circle with
   earlier ones, and is new; `report` describes the circle and its places. Any thread. */
bool hl__order_learn(const hl__order_step *held, const hl__order_step *taken, char *report,
                     size_t size);

/* Whether a unit of `taken` comes before a unit of `held`; if so, fills in `report`. *first: no
   step was reported for these two units before. Learns only that. Any thread. */
bool hl__order_units(const char *units, const hl__order_step *held, const hl__order_step *taken,
                     bool *first, char *report, size_t size);

#endif
