/*
 * pending.c - calls that wait without blocking their program: started here, made
 * by a worker, and taken, cancelled or dropped at any moment in between. No order
 * of these leaks a lock. The life of a pending:
 *
 *                      room: a worker
 *      start -> IN LINE ------------> AT STORE -----------------> DONE -> wait
 *                  |  ^                  | |  its worker has come
 *                  |  '------------------' |  back
 *                  |    refused: PARKED    |
 *                  '-----------------------'----------------------^
 *                    timeout, cancel, close: at once
 *
 *   IN LINE    costs no thread and no connection; the keeper ends it when its
 *              time is up; line.h has its places
 *   AT STORE   a worker makes the blocking call. When it is given up meanwhile,
 *              it is DONE at once for its owner; the worker, interrupted, throws
 *              away what it gets, and keeps the place in line until then
 *   DONE       its descriptor is readable, and hl_pending_wait returns
 */
#include "call.h"

#include "clock.h"
#include "error.h"
#include "exit.h"
#include "fork.h"
#include "mode.h"
#include "order.h"
#include "plan.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Who was in the way, as its worker found it. */
typedef struct blockers {
  hl_holder *list;
  size_t n;
  bool upgrade;   /* who holds for update is the asker himself */
  hl_error error; /* why they may not be all; HL_OK: they are */
} blockers;

/* Of one that is granted when the first of its members is (hl_start_any). */
typedef struct any {
  hl_pending *winner;
  hl_plan *plan;         /* all of them, for messages */
  size_t n, going;       /* members, and those that are not done */
  hl_pending *members[]; /* NULL: not started */
} any;

struct hl_pending {
  atomic_uint references; /* its owner's, its worker's */
  unsigned generation;    /* of the process that started it */
  /* call.lock, of HL__ACQUIRE: the new lock. The worker owns it until `done` (if the call was given up:
     until the worker returns), then the owner does. NULL once it was taken.
     Of other calls: the occupied lock; NULL once the occupation has ended. */
  hl__call call;
  hl__task task;
  hl__occupant occupant;
  blockers *found; /* its owner's once it is done; NULL: nobody has looked */
  bool done HL__GUARDED_BY(hl__manager_mutex);
  bool taken HL__GUARDED_BY(hl__manager_mutex); /* hl_pending_wait returned it */
  /* At the end of the occupation, what its owner wants done with the lock. */
  bool release_then HL__GUARDED_BY(hl__manager_mutex);
  bool free_then HL__GUARDED_BY(hl__manager_mutex);
  int fd HL__GUARDED_BY(hl__manager_mutex); /* eventfd; -1 until asked for */
  /* Of a group: it has no lock, no task and no place in line of its own. */
  any *group HL__GUARDED_BY(hl__manager_mutex);
  /* Of a member: whose. NULL once that has ended. */
  hl_pending *whole HL__GUARDED_BY(hl__manager_mutex);
  hl__wait wait;   /* of a strand that does nothing else; its owner's */
  hl_agent *agent; /* for the lock; its owner's */
  hl_notify_fn notify HL__GUARDED_BY(hl__manager_mutex); /* NULL: nobody asked */
  uint64_t notify_tag HL__GUARDED_BY(hl__manager_mutex);
  int status HL__GUARDED_BY(hl__manager_mutex);
  hl_error error HL__GUARDED_BY(hl__manager_mutex);
  char label[];
};

static void blockers_free(blockers *found) {
  if (found) free(found->list);
  free(found);
}

static void unref(hl_pending *pending) {
  if (atomic_fetch_sub(&pending->references, 1u) != 1) return;
  hl__line_forget(&pending->call.waiter);
  if (pending->call.kind == HL__ACQUIRE)
    hl_lock_free(pending->call.lock);
  else
    hl__lease_unref(pending->call.lease);
  if (pending->call.extension) hl__extension_dispose(pending->call.extension);
  free(pending->call.extension);
  blockers_free(pending->found);
  hl__manager_leave(pending->call.manager);
  free(pending);
}

/* ---------------------------------------------------------------- its end */

/* The owner of the lock may ask the lock itself again. */
static void lock_idle(hl_pending *pending) HL__REQUIRES(hl__manager_mutex) {
  if (pending->call.kind != HL__ACQUIRE) pending->call.lock->hold.busy = false;
}

/* From now on its owner sees that it is done. */
static void tell(hl_pending *pending, int status) HL__REQUIRES(hl__manager_mutex) {
  pending->done = true;
  pending->status = status;
  if (pending->fd >= 0) {
    static const uint64_t one = 1;
    ssize_t ignored = write(pending->fd, &one, sizeof one); /* never blocks */
    (void)ignored;
  }
  if (pending->notify) pending->notify(pending->notify_tag);
  (void)pthread_cond_broadcast(&pending->call.manager->done);
}

static void member_done(hl_pending *whole, hl_pending *member) HL__REQUIRES(hl__manager_mutex);

static void finish(hl_pending *pending, int status) HL__REQUIRES(hl__manager_mutex) {
  hl__call *call = &pending->call;
  if (call->kind == HL__ACQUIRE)
    (void)hl__call_ends(call, status);
  else if (!call->given_up)
    lock_idle(pending);
  tell(pending, status);
  if (pending->whole) member_done(pending->whole, pending);
}

/* Of one in line, which no worker has: its place and its lock go with it. */
static void finish_in_line(hl_pending *pending, int status) HL__REQUIRES(hl__manager_mutex) {
  hl__line_leave(pending->call.manager, &pending->call.waiter, false);
  pending->call.in_line = false;
  finish(pending, status);
}

static int cancelled_error(hl_error *error) {
  return hl__error(error, HL_CANCELLED, "the wait was cancelled");
}

static int threads_error(hl_error *error) {
  return hl__error(error, HL_BUSY,
                   "no thread can be started: see ulimit -u, and the limits of "
                   "the container");
}

/* Ends it, wherever it is, for its owner; the store is told. Model: line.pml,
   give_up. */
static void give_up(hl_pending *pending) HL__REQUIRES(hl__manager_mutex) {
  hl__call *call = &pending->call;
  hl_manager *manager = call->manager;
  int status = pending->error.status;
  if (call->in_line && call->waiter.place < HL__TRIED) {
    finish_in_line(pending, status);
    return;
  }
  if (hl__worker_take_back(manager, &pending->task)) {
    hl__pool_unreserve(manager, &call->reserved);
    atomic_fetch_sub(&pending->references, 1u); /* not the last: its owner's */
    if (call->in_line) {
      finish_in_line(pending, status);
    } else {
      finish(pending, status);
      hl__line_advance(manager);
    }
    return;
  }
  call->given_up = true;
  if (call->kind != HL__ACQUIRE) call->lock->hold.busy = true;
  hl__exit_await(1);                                  /* until its worker has told the store */
  (void)pthread_cond_broadcast(&manager->pool.freed); /* or waits for a connection */
  hl__call_interrupt(call);
  finish(pending, status);
}

/* ---------------------------------------------------------- of several */

static int none_error(hl_pending *whole) HL__REQUIRES(hl__manager_mutex) {
  char path[256];
  (void)hl_plan_describe(whole->group->plan, path, sizeof path);
  return hl__error(&whole->error, HL_TIMEOUT, "none of %s was granted within %.3f s", path,
                   (double)whole->call.timeout / 1000);
}

/* The first that is granted is the result; a failure of another kind than HL_TIMEOUT is one, too. Does not
   reach into the line, in which a failure may have been found. */
static void member_done(hl_pending *whole, hl_pending *member) {
  any *group = whole->group;
  int status = member->status;
  group->going--;
  if (whole->done) return;
  if (status == HL_OK) {
    group->winner = member;
    tell(whole, HL_OK);
  } else if (status != HL_TIMEOUT) {
    whole->error = member->error;
    tell(whole, status);
  } else if (group->going == 0) {
    tell(whole, none_error(whole));
  }
}

/* One was granted: the others are given up before the mutex is, and so none of them is granted to
   anybody any more. */
static void others_give_up(const hl_pending *winner) HL__REQUIRES(hl__manager_mutex) {
  const any *group = winner->whole ? winner->whole->group : NULL;
  if (!group || group->winner != winner) return;
  for (size_t i = 0; i < group->n; i++) {
    hl_pending *other = group->members[i];
    if (!other || other->done) continue;
    (void)cancelled_error(&other->error);
    give_up(other);
  }
}

/* -------------------------------------------------------------- in line */

static hl_pending *pending_of_waiter(hl__waiter *waiter) {
  return HL__LIST_ENTRY(waiter, hl_pending, call.waiter);
}

/* To a worker. False: no thread can be had now; nothing is changed. */
static bool send(hl_pending *pending) HL__REQUIRES(hl__manager_mutex) {
  hl__call *call = &pending->call;
  atomic_fetch_add(&pending->references, 1u);
  if (hl__worker_give(call->manager, &pending->task)) {
    call->by_worker = true;
    if (call->kind == HL__ACQUIRE) hl__pool_reserve(call->manager, &call->reserved);
    return true;
  }
  atomic_fetch_sub(&pending->references, 1u); /* not the last: its owner's */
  return false;
}

static bool waiter_send(hl__waiter *waiter) HL__REQUIRES(hl__manager_mutex) {
  return send(pending_of_waiter(waiter));
}

static void waiter_expire(hl__waiter *waiter) HL__REQUIRES(hl__manager_mutex) {
  hl_pending *pending = pending_of_waiter(waiter);
  const hl_manager *manager = pending->call.manager;
  bool ready = waiter->place == HL__READY;
  if (ready && !hl__pool_has_room(manager))
    (void)hl__pool_busy_error(manager, &pending->error);
  else if (ready && manager->line.short_of_threads)
    (void)threads_error(&pending->error);
  else
    (void)hl__timeout_error(&pending->error, waiter->plan, pending->call.timeout);
  finish_in_line(pending, pending->error.status);
}

static void waiter_close(hl__waiter *waiter) HL__REQUIRES(hl__manager_mutex) {
  hl_pending *pending = pending_of_waiter(waiter);
  if (pending->done) return;
  (void)hl__manager_closed_error(&pending->error);
  give_up(pending);
}

static const hl__waiter_ops waiter_ops = {
    .send = waiter_send, .expire = waiter_expire, .close = waiter_close};

/* --------------------------------------------------------- its occupation */

/* Ends the occupation of the lock. Runs a pending release first. Afterwards the owner may free the
   lock. */
static void occupation_end(hl_pending *pending, bool commit) {
  hl_manager *manager = pending->call.manager;
  hl_lock *lock = pending->call.lock;
  hl__manager_mutex_lock(manager);
  /* A lease that it has become it is, whoever wanted it. */
  if (commit || pending->call.kind == HL__TO_LEASE) hl__call_commit(&pending->call);
  if (pending->release_then) {
    hl__manager_mutex_unlock(manager);
    (void)hl__lock_release(lock, false, NULL);
    hl__manager_mutex_lock(manager);
  }
  bool free_it = pending->free_then;
  lock->hold.busy = false;
  pending->call.lock = NULL;
  atomic_store_explicit(&lock->occupant, NULL, memory_order_release);
  hl__manager_mutex_unlock(manager);
  if (free_it) hl_lock_free(lock);
}

static hl_pending *pending_of_occupant(hl__occupant *occupant) {
  return HL__LIST_ENTRY(occupant, hl_pending, occupant);
}

static bool occupant_abandon(hl__occupant *occupant, bool free_it) HL__REQUIRES(hl__manager_mutex) {
  hl_pending *pending = pending_of_occupant(occupant);
  if (!free_it || hl__lock_releases(pending->call.lock)) pending->release_then = true;
  pending->free_then = pending->free_then || free_it;
  pending->call.lock->hold.kept_until = 0;
  if (!pending->done) {
    (void)hl__error(&pending->error, HL_ERELEASED, "the lock was released meanwhile");
    give_up(pending);
  }
  return !pending->call.given_up;
}

static void occupant_end(hl__occupant *occupant) {
  occupation_end(pending_of_occupant(occupant), false);
}

/* ------------------------------------------------------------- its worker */

/* It was granted, and nobody wants it. An import leaves the lease to whoever has its
   text. */
static void give_away(hl_pending *pending) {
  hl__call *call = &pending->call;
  if (call->adopts)
    (void)hl__lease_leave(call->lease, NULL);
  else
    (void)hl_lock_release(call->lock, false, NULL);
}

/* Where a try blocks nobody, it is tried before it takes a place among those that
   wait. HL__AGAIN: it has none; it stands in line again, or is done. */
static int try_and_wait(hl_pending *pending, hl_error *error) {
  hl__call *call = &pending->call;
  hl_manager *manager = call->manager;
  int status = hl__call_acquire(call, 0, error);
  if (status != HL_TIMEOUT) return status;
  hl__manager_mutex_lock(manager);
  bool wanted = !call->given_up && !manager->cancelled;
  bool late = hl__left_ms(call->deadline) == 0;
  bool waits = wanted && !late && hl__line_refused(manager, &call->waiter);
  hl__manager_mutex_unlock(manager);
  if (!wanted) return HL_CANCELLED;
  if (late) return hl__timeout_error(error, call->waiter.plan, call->timeout);
  if (!waits) return HL__AGAIN;
  return hl__call_acquire(call, call->timeout, error);
}

static int work(hl_pending *pending, hl_error *error) {
  hl__call *call = &pending->call;
  hl__hold *hold = &call->lock->hold;
  switch (call->kind) {
  case HL__ACQUIRE:
    if (!call->manager->ops->traits.scarce) return try_and_wait(pending, error);
    return hl__call_acquire(call, call->timeout, error);
  case HL__EXTEND: return hl__call_extend(call, error);
  case HL__DOWNGRADE: return hl__call_downgrade(call, error);
  case HL__CHECK:
    hl__manager_mutex_lock(call->manager);
    hold->watched = hold->connection; /* so that its owner can look at it */
    hl__manager_mutex_unlock(call->manager);
    return hl__lock_check(call->lock, error);
  case HL__RELEASE: return hl__lock_release(call->lock, true, error);
  case HL__REFRESH: return hl__lease_refresh(call->lock->lease, call->options.ttl, error);
  case HL__TO_LEASE: return hl__call_to_lease(call, error);
  }
  return HL_OK;
}

static void blockers_add(void *context, const hl_holder *holder) {
  blockers *self = context;
  if (self->upgrade && holder->mode == HL_UPDATE) return;
  hl_holder *grown = realloc(self->list, (self->n + 1) * sizeof *grown);
  if (!grown) {
    (void)hl__error_memory(&self->error);
    return;
  }
  grown[self->n++] = *holder;
  self->list = grown;
}

/* Its worker may have been given up meanwhile: then its owner must not see them grow. NULL: out
   of memory. */
static blockers *blockers_find(const hl__call *call) {
  hl_error error = {.status = HL_OK};
  blockers *found = calloc(1, sizeof *found);
  if (!found) return NULL;
  found->upgrade = call->extension && call->extension->converts;
  if (hl_manager_blockers(call->manager, call->waiter.plan, blockers_add, found, &error))
    found->error = error;
  return found;
}

static void run(hl__task *task) {
  hl_pending *pending = HL__LIST_ENTRY(task, hl_pending, task);
  hl__call *call = &pending->call;
  hl_manager *manager = call->manager;
  hl_error error;
  blockers *found = NULL;
  hl__manager_mutex_lock(manager);
  bool given_up = call->given_up;
  hl__manager_mutex_unlock(manager);
  int status = given_up ? HL_CANCELLED : work(pending, &error);
  if (status == HL__AGAIN) {
    unref(pending);
    return;
  }

  hl__manager_mutex_lock(manager);
  given_up = call->given_up;
  /* Nobody was in the way of a refresh that the store had no time for. */
  bool look = !given_up && call->waiter.plan && (status == HL_TIMEOUT || status == HL_DEADLOCK);
  hl__pool_unreserve(manager, &call->reserved);
  if (!given_up) lock_idle(pending);
  if (!look) hl__worker_comes(manager);
  if (call->in_line)
    hl__line_leave(manager, &call->waiter, status == HL_OK);
  else
    hl__line_advance(manager);
  call->in_line = false;
  hl__manager_mutex_unlock(manager);
  if (look) found = blockers_find(call);

  hl__manager_mutex_lock(manager);
  if (look) hl__worker_comes(manager);
  given_up = call->given_up;
  if (given_up && call->kind == HL__ACQUIRE && status == HL_OK)
    hl__manager_event(manager, HL__HOLD_GIVEN_UP, 0, 0);
  if (!given_up) {
    if (status) pending->error = error;
    pending->found = found;
    finish(pending, status);
    others_give_up(pending);
  }
  hl__manager_mutex_unlock(manager);
  if (given_up) blockers_free(found);
  /* What it got after all goes back. */
  if (given_up && call->kind == HL__ACQUIRE)
    give_away(pending);
  else if (given_up)
    occupation_end(pending, false);
  if (given_up) hl__exit_await_end();
  unref(pending);
}

/* Without a thread, where the store needs none to grant at once or to refuse:
   a try there does not block. False: it has to wait. */
static bool run_at_once(hl_pending *pending) {
  hl__call *call = &pending->call;
  hl_manager *manager = call->manager;
  if (manager->ops->traits.blocks) return false;
  hl__manager_mutex_lock(manager);
  bool follows = hl__line_would_follow(manager, call->lock->plan);
  hl__manager_mutex_unlock(manager);
  if (follows && call->timeout > 0) return false;
  hl_error error;
  int status = hl__call_acquire(call, 0, &error);
  if (status == HL_TIMEOUT && call->timeout > 0) return false;
  blockers *found = status == HL_TIMEOUT ? blockers_find(call) : NULL;
  hl__manager_mutex_lock(manager);
  bool given_up = call->given_up;
  if (given_up && status == HL_OK) hl__manager_event(manager, HL__HOLD_GIVEN_UP, 0, 0);
  if (!given_up) {
    if (status) pending->error = error;
    pending->found = found;
    finish(pending, status);
    others_give_up(pending);
  }
  hl__manager_mutex_unlock(manager);
  if (given_up) {
    blockers_free(found);
    give_away(pending);
    hl__exit_await_end();
  }
  return true;
}

/* ---------------------------------------------------------------- starting */

/* With a reference to the manager, and a copy of the options. NULL: out of memory.
   Unchecked: nobody else has it yet. */
HL__UNCHECKED static hl_pending *pending_new(hl_manager *manager, hl__call_kind kind, hl_lock *lock,
                                             const hl_options *given) {
  hl_pending *pending = calloc(1, sizeof *pending + given->label_size);
  if (!pending) return NULL;
  atomic_init(&pending->references, 1u);
  atomic_fetch_add(&manager->references, 1u);
  pending->generation = hl__fork_generation();
  hl_options own = *given;
  if (own.label_size) memcpy(pending->label, given->label, own.label_size);
  own.label = pending->label;
  hl__call_init(&pending->call, manager, kind, lock, &own);
  /* That of a lock that is held is not the pending's, and may end before it. */
  if (kind != HL__ACQUIRE) pending->call.waiter.plan = NULL;
  pending->call.waiter.ops = &waiter_ops;
  pending->task.run = run;
  pending->occupant = (hl__occupant){occupant_abandon, occupant_end};
  pending->fd = -1;
  return pending;
}

/* To a worker, or into the line; or it ends at once. */
static void acquire_begin(hl_pending *pending) HL__REQUIRES(hl__manager_mutex) {
  hl__call *call = &pending->call;
  hl_manager *manager = call->manager;
  if (call->given_up) { /* before it began: another of its group was granted */
    hl__exit_await_end();
    return;
  }
  if (manager->cancelled) {
    finish(pending, hl__manager_closed_error(&pending->error));
    return;
  }
  /* Nor would anybody end it in time. */
  if (call->timeout == 0 || (manager->ops->traits.blocks && hl__library_closed())) {
    if (!send(pending)) finish(pending, threads_error(&pending->error));
    return;
  }
  /* Which ends it in time. */
  int status = hl__keeper_start(manager, &pending->error);
  if (status) {
    finish(pending, status);
    return;
  }
  call->in_line = true;
  hl__line_join(manager, &call->waiter);
  hl__line_advance(manager);
  if (call->waiter.place < HL__TRIED) hl__manager_hurry(manager, call->deadline);
}

static const hl_options defaults = HL_OPTIONS_INIT;

static bool is_over(hl__wait *wait) {
  return hl_pending_done(HL__LIST_ENTRY(wait, hl_pending, wait));
}

/* It would have waited for ever, and nobody has seen it yet. */
static void finish_refused(hl_pending *pending, int status) {
  hl__manager_mutex_lock(pending->call.manager);
  finish(pending, status);
  hl__manager_mutex_unlock(pending->call.manager);
  hl_pending_free(pending);
}

/* Whoever ends a member must find the others. */
static void member_of(hl_pending *pending, hl_pending *whole, hl_pending **result) {
  hl_manager *manager = pending->call.manager;
  hl__manager_mutex_lock(manager);
  pending->whole = whole;
  *result = pending;
  hl__manager_mutex_unlock(manager);
}

/* status: the result of creating `lock`. whole: the acquire_any group that the pending joins, or NULL. */
static int begin(hl_manager *manager, const hl_options *options, int status, hl_lock *lock,
                 bool adopts, hl_pending *whole, hl_pending **result, hl_error *error) {
  hl_pending *pending = lock ? pending_new(manager, HL__ACQUIRE, lock, options) : NULL;
  if (!pending) {
    hl_lock_free(lock);
    if (status == HL_OK) status = hl__error_memory(error);
    hl__manager_mutex_lock(manager);
    hl__manager_event(manager, HL__CALL_ENDS, status, 0);
    hl__manager_mutex_unlock(manager);
    hl__manager_leave(manager);
    return status;
  }
  pending->call.adopts = adopts;
  pending->agent = hl_agent_ref(options->agent);
  /* What is held is the agent's for the store, too, which looks for circles; that one waits, the
     whole says. */
  if (whole) pending->call.agent = hl__agent_number(whole->agent);
  if (options->awaited && options->strand) {
    pending->wait.over = is_over;
    status = hl__lock_wait_begin(&pending->wait, manager, lock->plan, options,
                                 pending->call.timeout, NULL, error);
  }
  if (status) {
    finish_refused(pending, status);
    hl__manager_leave(manager);
    return status;
  }
  member_of(pending, whole, result);
  if (!run_at_once(pending)) {
    hl__manager_mutex_lock(manager);
    acquire_begin(pending);
    hl__manager_mutex_unlock(manager);
  }
  hl__manager_leave(manager);
  return HL_OK;
}

static int enter(hl_manager *manager, hl_error *error) {
  hl__manager_renew(manager);
  hl__manager_mutex_lock(manager);
  int status = hl__manager_enter(manager, error);
  if (status == HL_OK) hl__manager_event(manager, HL__CALL_BEGINS, 0, 0);
  hl__manager_mutex_unlock(manager);
  return status;
}

static int start(hl_manager *manager, const hl_plan *plan, const hl_options *given,
                 hl_pending *whole, hl_pending **result, hl_error *error) {
  hl_options options = *given;
  hl_lock *lock;
  int status = hl__options_check(&options, manager, plan, error);
  if (status == HL_OK) status = enter(manager, error);
  if (status) return status;
  lock = hl__lock_new(manager, plan, &options);
  if (options.ttl) status = hl__lock_lease(&lock, &options, error);
  return begin(manager, &options, status, lock, false, whole, result, error);
}

int hl_start(hl_manager *manager, const hl_plan *plan, const hl_options *given, hl_pending **result,
             hl_error *error) {
  HL__UNCANCELLED;
  HL__NEEDS(manager && plan && result, error);
  hl_options options;
  *result = NULL;
  int status = hl__options_take(given, &options, error);
  if (status) return status;
  return start(manager, plan, &options, NULL, result, error);
}

bool hl_manager_blocks(const hl_manager *manager) { return manager && manager->ops->traits.blocks; }

/* A group of n without members. NULL: out of memory. Unchecked: nobody else has it yet. */
HL__UNCHECKED static hl_pending *group_new(hl_manager *manager, const hl_plan *const *plans,
                                           size_t n, const hl_options *options) {
  hl_pending *whole = calloc(1, sizeof *whole);
  any *group = calloc(1, sizeof *group + n * sizeof(hl_pending *));
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
  group->n = group->going = n;
  group->plan = plan;
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

static void cancel(hl_pending *pending);

static void members_cancel(hl_pending *whole, bool winner) {
  hl_manager *manager = whole->call.manager;
  hl__manager_mutex_lock(manager);
  any *group = whole->group;
  const hl_pending *won = winner ? NULL : group->winner;
  hl__manager_mutex_unlock(manager);
  /* Only its owner changes these. */
  for (size_t i = 0; i < group->n; i++)
    if (group->members[i] && group->members[i] != won) cancel(group->members[i]);
}

/* Each of the waits would be in vain: the agent or strand holds what is in its way. */
static bool all_vain(hl_manager *manager, const hl_plan *const *plans, size_t n,
                     const hl_options *options, int64_t timeout) {
  if (!options->awaited || !hl__wait_counts(options, timeout) || manager->ops->traits.grants_all)
    return false;
  for (size_t i = 0; i < n; i++) {
    hl_plan *copy = hl_plan_copy(plans[i]); /* whose rows are in order */
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

/* Deeper targets come first; on one node, shared before exclusive. Else a weaker request would queue
   behind our own stronger one. */
static int compare_places(const hl_plan *x, const hl_plan *y) {
  unsigned i = hl__plan_level(x), j = hl__plan_level(y);
  if (i != j) return i < j ? 1 : -1;
  return (int)hl__mode_covers(hl_plan_mode(x), hl_plan_mode(y)) -
         (int)hl__mode_covers(hl_plan_mode(y), hl_plan_mode(x));
}

static int members_start(hl_pending *whole, const hl_plan *const *plans, size_t n,
                         const hl_options *options, hl_error *error) {
  hl_manager *manager = whole->call.manager;
  hl__manager_mutex_lock(manager);
  any *group = whole->group;
  hl__manager_mutex_unlock(manager);
  int status = HL_OK;
  for (size_t i = 0; i < n && status == HL_OK; i++) {
    if (hl_pending_done(whole)) break;
    status = start(manager, plans[i], options, whole, &group->members[i], error);
  }
  /* One that began just when another one was granted. */
  if (status == HL_OK && hl_pending_done(whole)) members_cancel(whole, false);
  return status;
}

/* Stable: what compares equal stays in the order of the list. */
static void plans_sort(const hl_plan **plans, size_t n) {
  for (size_t i = 1; i < n; i++)
    for (size_t j = i; j > 0 && compare_places(plans[j - 1], plans[j]) > 0; j--) {
      const hl_plan *plan = plans[j];
      plans[j] = plans[j - 1];
      plans[j - 1] = plan;
    }
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
  int64_t timeout = options.timeout < 0 ? manager->config.timeout : options.timeout;
  const hl_plan **sorted = malloc(n * sizeof(hl_plan *));
  hl_pending *whole = sorted ? group_new(manager, plans, n, &options) : NULL;
  if (whole && all_vain(manager, plans, n, &options, timeout)) {
    char path[256];
    status = hl__error(error, HL_DEADLOCK,
                       "%s would be waited for in vain: what is in the way of each is held by "
                       "this %s itself",
                       hl_plan_describe(hl_pending_plan(whole), path, sizeof path),
                       options.strand ? "coroutine" : "thread");
    if (error) error->retryable = false;
  } else if (whole) {
    options.agent = NULL; /* the group's */
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

int hl_start_import(hl_manager *manager, const char *text, size_t size, const hl_options *given,
                    hl_pending **result, hl_error *error) {
  HL__UNCANCELLED;
  HL__NEEDS(manager && text && result, error);
  hl_options options;
  hl_lock *lock;
  *result = NULL;
  int status = enter(manager, error);
  if (status) return status;
  status = hl__import_begin(manager, text, size, given, &options, &lock, error);
  return begin(manager, &options, status, lock, true, NULL, result, error);
}

static int extension_new(hl_lock *lock, hl__call_kind kind, const hl_plan *plan,
                         hl__extension **result, hl_error *error) {
  *result = calloc(1, sizeof **result);
  if (!*result) return hl__error_memory(error);
  if (plan) return hl__extension_init(*result, lock, plan, error);
  return hl__extension_convert(*result, lock, kind == HL__EXTEND, error);
}

/* Starts a call on a lock that is held, and occupies the lock; `plan` for
   HL__EXTEND, NULL: it is an upgrade. */
HL__UNCHECKED /* nobody else has the pending yet */
    static int
    occupy(hl_lock *lock, hl__call_kind kind, const hl_plan *plan, const hl_options *options,
           hl_pending **result, hl_error *error) {
  HL__UNCANCELLED;
  hl__hold *hold = &lock->hold;
  hl_manager *manager = hold->manager;
  hl_pending *pending = pending_new(manager, kind, lock, options);
  if (!pending) return hl__error_memory(error);
  if (kind == HL__EXTEND || kind == HL__DOWNGRADE) {
    int status = extension_new(lock, kind, plan, &pending->call.extension, error);
    if (status) {
      unref(pending);
      return status;
    }
    if (kind == HL__EXTEND) pending->call.waiter.plan = pending->call.extension->plan;
  }
  if (kind == HL__TO_LEASE) {
    int status = hl__call_to_lease_new(&pending->call, error);
    if (status) {
      unref(pending);
      return status;
    }
  }
  int64_t kept_until = hl__deadline(hl__boot_ms(), hl_lock_remaining(lock));
  if (kind == HL__RELEASE) { /* also when nobody can confirm it */
    lock->released = pending->release_then = true;
    hl__agent_forget(&lock->held);
    kept_until = 0;
  }
  /* It may be one before anybody here hears of it, and end. */
  if (kind == HL__TO_LEASE && kept_until > hl__deadline(hl__boot_ms(), options->ttl))
    kept_until = hl__deadline(hl__boot_ms(), options->ttl);
  hl__manager_mutex_lock(manager);
  hold->busy = true;
  hold->kept_until = kept_until;
  hold->watched = manager->ops->traits.expires ? NULL : hold->connection;
  atomic_store_explicit(&lock->occupant, &pending->occupant, memory_order_release);
  if (!send(pending)) finish(pending, threads_error(&pending->error));
  hl__manager_mutex_unlock(manager);
  *result = pending;
  return HL_OK;
}

int hl_lock_start_extend(hl_lock *lock, const hl_plan *plan, const hl_options *given,
                         hl_pending **result, hl_error *error) {
  HL__NEEDS(lock && plan && result, error);
  hl_options options;
  *result = NULL;
  if (hl__lock_is_occupied(lock)) return hl__lock_occupied_error(error);
  int status = hl__options_take(given, &options, error);
  if (status == HL_OK) status = hl__options_check(&options, lock->hold.manager, plan, error);
  if (status) return status;
  /* Where there is nothing to wait for, it says at once what is the matter. */
  if (lock->lease || !hl_lock_is_held(lock)) return hl_lock_extend(lock, plan, &options, error);
  return occupy(lock, HL__EXTEND, plan, &options, result, error);
}

int hl_lock_start_upgrade(hl_lock *lock, const hl_options *given, hl_pending **result,
                          hl_error *error) {
  HL__NEEDS(lock && result, error);
  hl_options options;
  *result = NULL;
  int status = hl__options_take(given, &options, error);
  if (status) return status;
  /* Where there is nothing to wait for, it says at once what is the matter. */
  if (!hl_lock_is_held(lock) || hl__lock_convert_check(lock, NULL) != HL_OK)
    return hl_lock_upgrade(lock, &options, error);
  hl__lock_relabel(lock, &options);
  return occupy(lock, HL__EXTEND, NULL, &options, result, error);
}

int hl_lock_start_downgrade(hl_lock *lock, hl_pending **result, hl_error *error) {
  HL__NEEDS(lock && result, error);
  *result = NULL;
  if (!hl_lock_is_held(lock) || hl__lock_convert_check(lock, NULL) != HL_OK)
    return hl_lock_downgrade(lock, error);
  hl_options options = HL_OPTIONS_INIT;
  hl__lock_relabel(lock, &options);
  return occupy(lock, HL__DOWNGRADE, NULL, &options, result, error);
}

int hl_lock_start_check(hl_lock *lock, hl_pending **result, hl_error *error) {
  HL__NEEDS(lock && result, error);
  *result = NULL;
  if (hl__lock_is_occupied(lock)) return hl__lock_occupied_error(error);
  if (!hl_lock_is_held(lock)) return hl_lock_check(lock, error);
  return occupy(lock, HL__CHECK, NULL, &defaults, result, error);
}

int hl_lock_start_refresh(hl_lock *lock, int64_t ttl, hl_pending **result, hl_error *error) {
  HL__NEEDS(lock && result, error);
  hl_options options = HL_OPTIONS_INIT;
  options.ttl = ttl;
  *result = NULL;
  hl_lock_state state = hl_lock_look(lock);
  if (!lock->lease || ttl < 0 || ttl > HL_TTL_MAX || (state != HL_HELD && state != HL_OVER))
    return hl_lock_refresh(lock, ttl, error);
  return occupy(lock, HL__REFRESH, NULL, &options, result, error);
}

int hl_lock_start_to_lease(hl_lock *lock, const hl_options *given, hl_pending **result,
                           hl_error *error) {
  HL__NEEDS(lock && given && result, error);
  hl_options options;
  *result = NULL;
  if (lock->lease || hl__lock_is_occupied(lock) || !hl_lock_is_held(lock))
    return hl_lock_to_lease(lock, given, error);
  int status = hl__options_take(given, &options, error);
  if (status == HL_OK) status = hl__lease_options_check(&options, error);
  if (status) return status;
  return occupy(lock, HL__TO_LEASE, NULL, &options, result, error);
}

int hl_lock_start_release(hl_lock *lock, hl_pending **result, hl_error *error) {
  HL__NEEDS(lock && result, error);
  *result = NULL;
  if (hl__lock_is_occupied(lock) || !hl_lock_is_held(lock))
    return hl_lock_release(lock, true, error);
  return occupy(lock, HL__RELEASE, NULL, &defaults, result, error);
}

/* --------------------------------------------------------- its owner's */

static bool is_foreign(const hl_pending *pending) {
  return pending->generation != hl__fork_generation();
}

bool hl_pending_done(hl_pending *pending) {
  if (!pending) return false;
  if (is_foreign(pending)) return true;
  hl__manager_mutex_lock(pending->call.manager);
  bool done = pending->done;
  hl__manager_mutex_unlock(pending->call.manager);
  return done;
}

int hl_pending_fd(hl_pending *pending, hl_error *error) {
  HL__NEEDS(pending, error);
  if (is_foreign(pending))
    return hl__error(error, HL_ERELEASED, "the pending belongs to the parent of this process");
  hl__manager_mutex_lock(pending->call.manager);
  if (pending->fd < 0) pending->fd = eventfd(pending->done, EFD_CLOEXEC | EFD_NONBLOCK);
  int fd = pending->fd;
  hl__manager_mutex_unlock(pending->call.manager);
  return fd >= 0 ? fd : hl__error_errno(error, HL_ESTORE, "cannot make a descriptor");
}

void hl_pending_notify(hl_pending *pending, hl_notify_fn fn, uint64_t tag) {
  if (!pending || !fn) return;
  if (is_foreign(pending)) return;
  hl__manager_mutex_lock(pending->call.manager);
  if (pending->done) {
    fn(tag);
  } else {
    pending->notify = fn;
    pending->notify_tag = tag;
  }
  hl__manager_mutex_unlock(pending->call.manager);
}

int hl_pending_wait(hl_pending *pending, int64_t timeout, hl_lock **lock, hl_error *error) {
  HL__UNCANCELLED;
  HL__NEEDS(pending && lock, error);
  *lock = NULL;
  if (is_foreign(pending))
    return hl__error(error, HL_ERELEASED, "the pending belongs to the parent of this process");
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
    pending->taken = true;
    status = pending->status;
    if (status && error) *error = pending->error;
    if (status == HL_OK && pending->call.kind == HL__ACQUIRE && manager->closed) {
      status = hl__manager_closed_error(error); /* which has released it */
    } else if (status == HL_OK && pending->call.kind == HL__ACQUIRE) {
      hl_pending *granted = pending->group ? pending->group->winner : pending;
      *lock = granted->call.lock;
      granted->call.lock = NULL;
      granted->call.waiter.plan = NULL;
      granted->taken = true;
      pending->call.waiter.plan = NULL;
      hl__agent_keep(&(*lock)->held, pending->agent);
      if (pending->group && pending->call.options.kinds) /* which of them it is */
        (*lock)->held.kinds =
            hl__order_kinds(pending->call.manager->units, (*lock)->plan,
                            granted->call.options.label, granted->call.options.label_size);
    }
    ended = pending->call.kind != HL__ACQUIRE && !pending->call.given_up && pending->call.lock;
  }
  bool taken = pending->taken, whole = pending->group != NULL;
  hl__manager_mutex_unlock(manager);
  if (taken) hl__wait_end(&pending->wait);
  if (taken && whole) members_cancel(pending, false);
  if (ended) occupation_end(pending, hl__call_commits(&pending->call, status));
  return status;
}

/* Cancels a pending that is no group. */
static void cancel(hl_pending *pending) {
  hl_manager *manager = pending->call.manager;
  bool granted = false, ended = false, extended = false;
  hl__manager_mutex_lock(manager);
  if (pending->done && pending->call.kind == HL__ACQUIRE) {
    granted = !pending->taken && pending->status == HL_OK;
    if (granted) pending->status = cancelled_error(&pending->error);
  } else if (pending->done) {
    ended = !pending->call.given_up && pending->call.lock;
    extended = hl__call_commits(&pending->call, pending->status);
  } else {
    (void)cancelled_error(&pending->error);
    give_up(pending);
    ended = pending->call.kind != HL__ACQUIRE && !pending->call.given_up;
  }
  hl__manager_mutex_unlock(manager);
  if (granted) give_away(pending);
  if (ended) occupation_end(pending, extended);
}

static void group_cancel(hl_pending *whole) {
  hl_manager *manager = whole->call.manager;
  hl__manager_mutex_lock(manager);
  if (!whole->done) {
    (void)cancelled_error(&whole->error);
    tell(whole, HL_CANCELLED);
  } else if (!whole->taken && whole->status == HL_OK) {
    whole->status = cancelled_error(&whole->error);
  }
  hl__manager_mutex_unlock(manager);
  members_cancel(whole, true);
}

static any *group_of(hl_pending *pending);

void hl_pending_cancel(hl_pending *pending) {
  HL__UNCANCELLED;
  if (!pending || is_foreign(pending)) return;
  if (group_of(pending))
    group_cancel(pending);
  else
    cancel(pending);
}

/* Unchecked: it is done, and its owner's. One that was in line until its
   end never came to the store. */
HL__UNCHECKED static int holders_tell(const hl_pending *pending, hl_holder_fn fn, void *context,
                                      hl_error *error) {
  const blockers *found = pending->found;
  bool refused = pending->call.waiter.plan &&
                 (pending->status == HL_TIMEOUT || pending->status == HL_DEADLOCK);
  if (!found && refused) return hl__error(error, HL_BUSY, "the store was not asked");
  for (size_t i = 0; found && i < found->n; i++) fn(context, &found->list[i]);
  if (!found || !found->error.status) return HL_OK;
  if (error) *error = found->error;
  return found->error.status;
}

/* A group keeps it until its end. */
HL__UNCHECKED static any *group_of(hl_pending *pending) { return pending->group; }

int hl_pending_holders(hl_pending *pending, hl_holder_fn fn, void *context, hl_error *error) {
  HL__NEEDS(pending && fn, error);
  if (is_foreign(pending) || !hl_pending_done(pending)) return HL_OK;
  const any *group = group_of(pending);
  if (!group) return holders_tell(pending, fn, context, error);
  int failure = HL_OK;
  for (size_t i = 0; i < group->n; i++) {
    hl_pending *member = group->members[i];
    if (!member || !hl_pending_done(member)) continue;
    int status = holders_tell(member, fn, context, failure ? NULL : error);
    if (!failure) failure = status;
  }
  return failure;
}

const hl_plan *hl_pending_plan(const hl_pending *pending) {
  return pending ? pending->call.waiter.plan : NULL;
}

/* Drops the owner's reference to a pending that is no group, or whose group is freed. Unchecked: only the
   owner touches these fields. */
HL__UNCHECKED static void end(hl_pending *pending) {
  hl__wait_end(&pending->wait);
  hl_pending_cancel(pending);
  hl_agent_unref(pending->agent);
  /* It is done: nobody writes to it any more. */
  if (pending->fd >= 0) (void)close(pending->fd);
  unref(pending);
}

/* Workers may be busy with members still; these are nobody's then. */
HL__UNCHECKED static void group_free(hl_pending *whole) {
  hl_manager *manager = whole->call.manager;
  any *group = group_of(whole);
  if (!is_foreign(whole)) {
    hl__manager_mutex_lock(manager);
    for (size_t i = 0; i < group->n; i++)
      if (group->members[i]) group->members[i]->whole = NULL;
    hl__manager_mutex_unlock(manager);
  }
  for (size_t i = 0; i < group->n; i++)
    if (group->members[i]) end(group->members[i]);
  hl_plan_free(group->plan);
  free(group);
  whole->group = NULL;
}

void hl_pending_free(hl_pending *pending) {
  HL__UNCANCELLED;
  if (!pending) return;
  if (group_of(pending)) {
    hl_pending_cancel(pending);
    group_free(pending);
  }
  end(pending);
}
