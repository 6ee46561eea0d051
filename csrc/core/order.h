/*
 * order.h - in which order a program takes locks of several kinds while it holds others, learnt
 * over its whole run, by all its threads: a kind that is taken both before and after another
 * one is a deadlock that only waits for its moment. For tests; whoever does not ask for it
 * pays nothing. Where a program has declared the order of its units, that is looked at, and not
 * learnt.
 *
 * A kind is a unit; else a level, and the label where there is one, its digits taken for one `#`: "order
 * 4711" is "order #". So it stands for the place in the program, not for the node, as the classes do of
 * lockdep (Linux, Documentation/locking/lockdep-design.rst): what was seen of two accounts is
 * held against all. Within one kind there is an order of nodes (by id, say), which nobody can know:
 * there, only two nodes that were taken in both orders count.
 *
 * What one call takes has the order of the plan, and counts as one step. A call that tries once
 * waits for nothing, and is no step; what it got is held for the next ones. Shared locks
 * count as others do: one that waits in between makes them exclude each other.
 */
#ifndef HIERLOCK_ORDER_H
#define HIERLOCK_ORDER_H

#include "hierlock.h"

/* Copies hl_config.units: the names in their order, each with its NUL, and an empty one behind the last.
   NULL, of NULL. To be freed by the caller. HL_EMISUSE, HL_ENOMEM. */
int hl__units_copy(const char *const *names, char **units, hl_error *error);

/* One set bit for each kind of the plan's targets under this label. units: of their manager; or
   NULL. */
uint64_t hl__order_kinds(const char *units, const hl_plan *plan, const char *label,
                         size_t label_size);

/* What is held, as far as the order of it matters. */
typedef struct hl__order_step {
  const hl_plan *plan;
  uint64_t kinds; /* hl__order_kinds */
  const char *where;
} hl__order_step;

/* Learns that `taken` was asked for while `held` was held. True: it is the first time that this order
   and an earlier one make a circle, of which `report` says what and where. Any thread. */
bool hl__order_learn(const hl__order_step *held, const hl__order_step *taken, char *report,
                     size_t size);

/* Whether a unit of `taken` comes before one of `held`, which `report` tells. first: no step has been
   told of these two units before. Learns nothing else. Any thread. */
bool hl__order_units(const char *units, const hl__order_step *held, const hl__order_step *taken,
                     bool *first, char *report, size_t size);

#endif
