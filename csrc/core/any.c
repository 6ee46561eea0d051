/*
 * any.c - the first of several (hl_start_any). A whole has a pending as a member for each plan; the
 * first grant is its result, and ends the waits of the other members.
 */
#include "clock.h"
#include "error.h"
#include "mode.h"
#include "pending.h"
#include "plan.h"
#include "start.h"

#include <stdlib.h>

bool hl_manager_blocks(const hl_manager *manager) { return manager && manager->ops->traits.blocks; }

/* ------------------------------------------------------- what a group does */

static int none_error(hl_pending *whole) HL__REQUIRES(hl__manager_mutex) {
  char path[256];
  (void)hl_plan_describe(whole->group->plan, path, sizeof path);
  return hl__error(&whole->error, HL_TIMEOUT, "none of %s was granted within %.3f s", path,
                   (double)whole->call.timeout / 1000);
}

/* The result is the first grant, or the first failure other than HL_TIMEOUT. */
static void member_done(hl_pending *whole, hl_pending *member) HL__REQUIRES(hl__manager_mutex) {
  hl__group *group = whole->group;
  int status = member->status;
  group->going--;
  if (whole->done) return;
  if (status == HL_OK) {
    group->winner = member;
    hl__pending_tell(whole, HL_OK);
  } else if (status != HL_TIMEOUT) {
    whole->error = member->error;
    hl__pending_tell(whole, status);
  } else if (group->going == 0) {
    hl__pending_tell(whole, none_error(whole));
  }
}

/* The others are given up before this thread gives the mutex back, so no owner can be given two
   locks. */
static void others_give_up(hl_pending *whole, const hl_pending *member)
    HL__REQUIRES(hl__manager_mutex) {
  const hl__group *group = whole->group;
  if (group->winner != member) return;
  for (size_t i = 0; i < group->n; i++) {
    hl_pending *other = group->members[i];
    if (!other || other->done) continue;
    (void)hl__pending_cancelled_error(&other->error);
    hl__pending_give_up(other);
  }
}

static void members_cancel(hl_pending *whole, bool all) {
  hl_manager *manager = whole->call.manager;
  hl__manager_mutex_lock(manager);
  const hl__group *group = whole->group;
  const hl_pending *kept = all ? NULL : group->winner;
  hl__manager_mutex_unlock(manager);
  /* Only the owner changes the list of members. */
  for (size_t i = 0; i < group->n; i++)
    if (group->members[i] && group->members[i] != kept) hl_pending_cancel(group->members[i]);
}

/* Workers may still be busy with members, which belong to no whole then. Unchecked: only the owner
   touches these fields. */
HL__UNCHECKED static void group_free(hl_pending *whole) {
  hl_manager *manager = whole->call.manager;
  hl__group *group = whole->group;
  if (!hl__pending_is_foreign(whole)) {
    hl__manager_mutex_lock(manager);
    for (size_t i = 0; i < group->n; i++)
      if (group->members[i]) group->members[i]->whole = NULL;
    hl__manager_mutex_unlock(manager);
  }
  for (size_t i = 0; i < group->n; i++)
    if (group->members[i]) hl__pending_end(group->members[i]);
  hl_plan_free(group->plan);
  free(group);
  whole->group = NULL;
}

/* ---------------------------------------------------------------- starting */

/* A whole with n members, none of them started. NULL: out of memory. Unchecked: no other thread has
   it yet. */
HL__UNCHECKED static hl_pending *whole_new(hl_manager *manager, const hl_plan *const *plans,
                                           size_t n, const hl_options *options) {
  hl_pending *whole = calloc(1, sizeof *whole);
  hl__group *group = calloc(1, sizeof *group + n * sizeof(hl_pending *));
  hl_plan *plan = hl_plan_new(manager->layout);
  bool good = whole && group && plan;
  for (size_t i = 0; i < n && good; i++) good = hl__plan_append(plan, plans[i]);
  if (!good) {
    hl_plan_free(plan);
    free(group);
    free(whole);
    return NULL;
  }
  hl__plan_order(plan);
  atomic_init(&whole->references, 1u);
  atomic_fetch_add(&manager->references, 1u);
  *group = (hl__group){.member_done = member_done,
                       .others_give_up = others_give_up,
                       .cancel = members_cancel,
                       .free = group_free,
                       .plan = plan,
                       .n = n,
                       .going = n};
  whole->group = group;
  whole->generation = hl__fork_generation();
  whole->fd = -1;
  whole->agent = hl_agent_ref(options->agent);
  whole->call.manager = manager;
  whole->call.kind = HL__ACQUIRE;
  whole->call.options.kinds = options->kinds;
  whole->call.start = hl__now_ms();
  whole->call.timeout = options->timeout < 0 ? manager->config.timeout : options->timeout;
  whole->call.waiter.plan = plan;
  return whole;
}

/* Whether the agent or strand itself holds the rows in the way of each wait, so that all would be
   in vain. */
static bool all_vain(hl_manager *manager, const hl_plan *const *plans, size_t n,
                     const hl_options *options) {
  int64_t timeout = options->timeout < 0 ? manager->config.timeout : options->timeout;
  if (!options->awaited || !hl__wait_counts(options, timeout) || manager->ops->traits.grants_all)
    return false;
  for (size_t i = 0; i < n; i++) {
    hl_plan *copy = hl_plan_copy(plans[i]); /* its rows are in order */
    const hl__wait wait = {.agent = options->agent,
                           .strand = options->strand,
                           .blocks = options->strand == 0,
                           .manager = manager,
                           .plan = copy,
                           .timeout = timeout};
    bool vain = copy && hl__wait_is_vain(&wait);
    hl_plan_free(copy);
    if (!vain) return false;
  }
  return true;
}

/* Deeper targets come first; on one node, shared before exclusive. Else a weaker request would
   queue behind our own stronger one. */
static int compare_places(const hl_plan *x, const hl_plan *y) {
  unsigned i = hl__plan_level(x), j = hl__plan_level(y);
  if (i != j) return i < j ? 1 : -1;
  return (int)hl__mode_covers(hl_plan_mode(x), hl_plan_mode(y)) -
         (int)hl__mode_covers(hl_plan_mode(y), hl_plan_mode(x));
}

/* Stable: plans that compare equal stay in the order of the list. */
static void plans_sort(const hl_plan **plans, size_t n) {
  for (size_t i = 1; i < n; i++)
    for (size_t j = i; j > 0 && compare_places(plans[j - 1], plans[j]) > 0; j--) {
      const hl_plan *plan = plans[j];
      plans[j] = plans[j - 1];
      plans[j - 1] = plan;
    }
}

static int members_start(hl_pending *whole, const hl_plan *const *plans, size_t n,
                         const hl_options *options, hl_error *error) {
  hl_manager *manager = whole->call.manager;
  hl__manager_mutex_lock(manager);
  hl__group *group = whole->group;
  hl__manager_mutex_unlock(manager);
  int status = HL_OK;
  for (size_t i = 0; i < n && status == HL_OK; i++) {
    if (hl_pending_done(whole)) break;
    status = hl__start(manager, plans[i], options, whole, &group->members[i], error);
  }
  /* A member may have begun just when another one was granted. */
  if (status == HL_OK && hl_pending_done(whole)) members_cancel(whole, false);
  return status;
}

int hl_start_any(hl_manager *manager, const hl_plan *const *plans, size_t n,
                 const hl_options *given, hl_pending **result, hl_error *error) {
  HL__UNCANCELLED;
  HL__NEEDS(manager && plans && result, error);
  hl_options options;
  *result = NULL;
  if (n == 0) return hl__error(error, HL_EMISUSE, "there is no target to lock");
  for (size_t i = 0; i < n; i++) HL__NEEDS(plans[i], error);
  int status = hl__options_take(given, &options, error);
  for (size_t i = 0; i < n && status == HL_OK; i++) {
    hl_options checked = options;
    status = hl__options_check(&checked, manager, plans[i], error);
  }
  if (status) return status;
  hl__manager_renew(manager);
  const hl_plan **sorted = malloc(n * sizeof(hl_plan *));
  hl_pending *whole = sorted ? whole_new(manager, plans, n, &options) : NULL;
  if (whole && all_vain(manager, plans, n, &options)) {
    char path[256];
    status = hl__error(error, HL_DEADLOCK,
                       "%s would be waited for in vain: what is in the way of each is held by "
                       "this %s itself",
                       hl_plan_describe(hl_pending_plan(whole), path, sizeof path),
                       options.strand ? "coroutine" : "thread");
    if (error) error->retryable = false;
  } else if (whole) {
    options.agent = NULL; /* the whole has it */
    options.awaited = false;
    for (size_t i = 0; i < n; i++) sorted[i] = plans[i];
    plans_sort(sorted, n);
    status = members_start(whole, sorted, n, &options, error);
  } else {
    status = hl__error_memory(error);
  }
  free(sorted);
  if (status)
    hl_pending_free(whole);
  else
    *result = whole;
  return status;
}
