/*
 * owner.c - what the owner of a pending does with it: waits for the call, takes its result, asks
 * who was in the way, cancels the call, frees the pending.
 */
#include "pending.h"

#include "clock.h"
#include "error.h"
#include "order.h"
#include "plan.h"

#include <sys/eventfd.h>
#include <unistd.h>

/* Unchecked: a whole keeps its group until its end. */
HL__UNCHECKED static hl__group *group_of(hl_pending *pending) { return pending->group; }

bool hl_pending_done(hl_pending *pending) {
  if (!pending) return false;
  if (hl__pending_is_foreign(pending)) return true;
  hl__manager_mutex_lock(pending->call.manager);
  bool done = pending->done;
  hl__manager_mutex_unlock(pending->call.manager);
  return done;
}

static int foreign_error(hl_error *error) {
  return hl__error(error, HL_ERELEASED, "the pending belongs to the parent of this process");
}

int hl_pending_fd(hl_pending *pending, hl_error *error) {
  HL__NEEDS(pending, error);
  if (hl__pending_is_foreign(pending)) return foreign_error(error);
  hl__manager_mutex_lock(pending->call.manager);
  if (pending->fd < 0) pending->fd = eventfd(pending->done, EFD_CLOEXEC | EFD_NONBLOCK);
  int fd = pending->fd;
  hl__manager_mutex_unlock(pending->call.manager);
  return fd >= 0 ? fd : hl__error_errno(error, HL_ESTORE, "cannot make a descriptor");
}

void hl_pending_notify(hl_pending *pending, hl_notify_fn fn, uint64_t tag) {
  if (!pending || !fn || hl__pending_is_foreign(pending)) return;
  hl__manager_mutex_lock(pending->call.manager);
  pending->notify = fn;
  pending->notify_tag = tag;
  if (pending->done) fn(tag);
  hl__manager_mutex_unlock(pending->call.manager);
}

/* Gives the lock that was granted to its owner. */
static hl_lock *granted_take(hl_pending *pending) HL__REQUIRES(hl__manager_mutex) {
  hl_pending *granted = pending->group ? pending->group->winner : pending;
  const hl_options *options = &granted->call.options;
  hl_lock *lock = granted->call.lock;
  granted->call.lock = NULL;
  granted->call.waiter.plan = NULL;
  granted->taken = true;
  pending->call.waiter.plan = NULL;
  hl__agent_keep(&lock->held, pending->agent);
  if (pending->group && pending->call.options.kinds) /* the kinds of the granted target */
    lock->held.kinds = hl__order_kinds(pending->call.manager->units, lock->plan, options->label,
                                       options->label_size);
  return lock;
}

int hl_pending_wait(hl_pending *pending, int64_t timeout, hl_lock **lock, hl_error *error) {
  HL__UNCANCELLED;
  HL__NEEDS(pending && lock, error);
  *lock = NULL;
  if (hl__pending_is_foreign(pending)) return foreign_error(error);
  hl_manager *manager = pending->call.manager;
  int64_t deadline = timeout > 0 ? hl__deadline(hl__now_ms() + 1, timeout) : 0;
  int status = HL_OK;
  bool ended = false;
  hl__manager_mutex_lock(manager);
  while (!pending->done && deadline && hl__left_ms(deadline) > 0)
    hl__cond_wait(&manager->done, &manager->mutex, deadline);
  if (!pending->done) {
    status = hl__error(error, HL_TIMEOUT, "it is not done yet");
  } else if (pending->taken) {
    status = hl__error(error, HL_EMISUSE, "the pending has given its result already");
  } else {
    bool acquired = pending->status == HL_OK && pending->call.kind == HL__ACQUIRE;
    pending->taken = true;
    status = pending->status;
    if (status && error) *error = pending->error;
    if (acquired && manager->closed)
      status = hl__manager_closed_error(error); /* the close has released the lock */
    else if (acquired)
      *lock = granted_take(pending);
    ended = pending->call.kind != HL__ACQUIRE && !pending->call.given_up && pending->call.lock;
  }
  bool taken = pending->taken;
  hl__manager_mutex_unlock(manager);
  if (taken) hl__wait_end(&pending->wait);
  if (taken && group_of(pending)) group_of(pending)->cancel(pending, false);
  if (ended) hl__pending_occupation_end(pending, hl__call_commits(&pending->call, status));
  return status;
}

void hl_pending_cancel(hl_pending *pending) {
  HL__UNCANCELLED;
  if (!pending || hl__pending_is_foreign(pending)) return;
  hl_manager *manager = pending->call.manager;
  const hl__group *group = group_of(pending);
  bool granted = false, ended = false, extended = false;
  hl__manager_mutex_lock(manager);
  if (pending->done && pending->call.kind == HL__ACQUIRE) {
    granted = !pending->taken && pending->status == HL_OK;
    if (granted) pending->status = hl__pending_cancelled_error(&pending->error);
  } else if (pending->done) {
    ended = !pending->call.given_up && pending->call.lock;
    extended = hl__call_commits(&pending->call, pending->status);
  } else {
    int status = hl__pending_cancelled_error(&pending->error);
    if (group)
      hl__pending_tell(pending, status);
    else
      hl__pending_give_up(pending);
    ended = pending->call.kind != HL__ACQUIRE && !pending->call.given_up;
  }
  hl__manager_mutex_unlock(manager);
  if (group)
    group->cancel(pending, true);
  else if (granted)
    hl__pending_give_away(pending);
  if (ended) hl__pending_occupation_end(pending, extended);
}

/* Unchecked: it is done, and its owner's. A call that was in line until its end has not asked the
   store. */
HL__UNCHECKED static int holders_tell(const hl_pending *pending, hl_holder_fn fn, void *context,
                                      hl_error *error) {
  const hl__blockers *found = pending->found;
  if (!found && hl__call_is_refused(&pending->call, pending->status))
    return hl__error(error, HL_BUSY, "the store was not asked");
  for (size_t i = 0; found && i < found->n; i++) fn(context, &found->list[i]);
  if (!found || !found->error.status) return HL_OK;
  if (error) *error = found->error;
  return found->error.status;
}

int hl_pending_holders(hl_pending *pending, hl_holder_fn fn, void *context, hl_error *error) {
  HL__NEEDS(pending && fn, error);
  if (hl__pending_is_foreign(pending) || !hl_pending_done(pending)) return HL_OK;
  const hl__group *group = group_of(pending);
  if (!group) return holders_tell(pending, fn, context, error);
  int failure = HL_OK;
  for (size_t i = 0; i < group->n; i++) {
    hl_pending *member = group->members[i];
    if (!hl_pending_done(member)) continue; /* also one that was not started */
    int status = holders_tell(member, fn, context, failure ? NULL : error);
    if (!failure) failure = status;
  }
  return failure;
}

const hl_plan *hl_pending_plan(const hl_pending *pending) {
  return pending ? pending->call.waiter.plan : NULL;
}

/* Unchecked: only the owner touches these fields. */
HL__UNCHECKED void hl__pending_end(hl_pending *pending) {
  hl__wait_end(&pending->wait);
  hl_pending_cancel(pending);
  hl_agent_unref(pending->agent);
  /* No thread writes to the descriptor of a pending that is done. */
  if (pending->fd >= 0) (void)close(pending->fd);
  hl__pending_unref(pending);
}

void hl_pending_free(hl_pending *pending) {
  HL__UNCANCELLED;
  if (!pending) return;
  if (group_of(pending)) {
    hl_pending_cancel(pending);
    group_of(pending)->free(pending);
  }
  hl__pending_end(pending);
}
