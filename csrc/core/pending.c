/*
 * pending.c - calls that wait without blocking their program: start.c starts them, a worker or a
 * store's own thread makes them, and their owner takes, cancels or drops them at any moment in
 * between. No order of these leaks a lock. The life of a pending:
 *
 *                      room                its worker has come
 *                                          back, or the store calls
 *      start -> IN LINE ------------> AT STORE -----------------> DONE -> wait
 *                  |                       |                       ^
 *                  '-----------------------'-----------------------'
 *                    timeout, cancel, close: at once
 *
 *   IN LINE    costs no thread and no connection; the keeper ends it in time; see line.h
 *   AT STORE   a worker makes the blocking call, or the store has it without one. When the call is
 *              given up meanwhile, it is DONE at once for its owner; the interrupted worker, or the
 *              store's thread, drops what it gets
 *   DONE       its descriptor is readable, and hl_pending_wait returns
 */
#include "pending.h"

#include "error.h"
#include "exit.h"
#include "fork.h"
#include "plan.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void blockers_free(hl__blockers *found) {
  if (found) free(found->list);
  free(found);
}

void hl__pending_unref(hl_pending *pending) {
  if (atomic_fetch_sub(&pending->references, 1u) != 1) return;
  hl__line_forget(&pending->call.waiter);
  if (pending->call.kind == HL__ACQUIRE)
    hl_lock_free(pending->call.lock);
  else
    hl__call_dispose(&pending->call);
  blockers_free(pending->found);
  hl__manager_leave(pending->call.manager);
  free(pending);
}

/* ---------------------------------------------------------------- its end */

/* The owner of the lock may use the lock's session again. */
static void lock_idle(hl_pending *pending) HL__REQUIRES(hl__manager_mutex) {
  if (pending->call.kind != HL__ACQUIRE) pending->call.lock->hold.busy = false;
}

void hl__pending_tell(hl_pending *pending, int status) {
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

void hl__pending_finish(hl_pending *pending, int status) {
  hl__call *call = &pending->call;
  if (call->kind == HL__ACQUIRE)
    (void)hl__call_ends(call, status);
  else if (!call->given_up)
    lock_idle(pending);
  hl__pending_tell(pending, status);
  if (pending->whole) pending->whole->group->member_done(pending->whole, pending);
}

/* Ends a pending that no worker has, and gives up its place in line; error.status says how. */
static void finish_unmade(hl_pending *pending) HL__REQUIRES(hl__manager_mutex) {
  if (pending->call.in_line)
    hl__line_leave(pending->call.manager, &pending->call.waiter, false);
  else
    hl__line_advance(pending->call.manager);
  pending->call.in_line = false;
  hl__pending_finish(pending, pending->error.status);
}

int hl__pending_cancelled_error(hl_error *error) {
  return hl__error(error, HL_CANCELLED, "the wait was cancelled");
}

static int threads_error(hl_error *error) {
  return hl__error(error, HL_BUSY,
                   "no thread can be started: see ulimit -u, and the limits of the container");
}

/* Model: line.pml, give_up. */
void hl__pending_give_up(hl_pending *pending) {
  hl__call *call = &pending->call;
  hl_manager *manager = call->manager;
  bool unmade = call->in_line && call->waiter.place < HL__AT_STORE;
  if (!unmade && hl__worker_take_back(manager, &pending->task)) {
    if (pending->refused) manager->line.looking--;
    hl__pool_unreserve(manager, &call->reserved);
    atomic_fetch_sub(&pending->references, 1u); /* the owner has one still */
    unmade = true;
  }
  if (unmade) {
    finish_unmade(pending);
    return;
  }
  call->given_up = true;
  if (call->kind != HL__ACQUIRE) call->lock->hold.busy = true;
  hl__exit_await(1);                                  /* until its worker has told the store */
  (void)pthread_cond_broadcast(&manager->pool.freed); /* the worker may wait for a connection */
  hl__call_interrupt(call);
  hl__pending_finish(pending, pending->error.status);
}

/* -------------------------------------------------------------- in line */

static bool send_started(hl_pending *pending) HL__REQUIRES(hl__manager_mutex);

static hl_pending *pending_of_waiter(hl__waiter *waiter) {
  return HL__LIST_ENTRY(waiter, hl_pending, call.waiter);
}

/* Hands it to a worker. False: no thread can be had now, and nothing is changed. */
static bool send(hl_pending *pending) HL__REQUIRES(hl__manager_mutex) {
  hl__call *call = &pending->call;
  atomic_fetch_add(&pending->references, 1u);
  if (hl__worker_give(call->manager, &pending->task)) {
    call->by_worker = true;
    if (call->kind == HL__ACQUIRE) hl__pool_reserve(call->manager, &call->reserved);
    return true;
  }
  atomic_fetch_sub(&pending->references, 1u); /* the owner has one still */
  return false;
}

static bool waiter_send(hl__waiter *waiter) HL__REQUIRES(hl__manager_mutex) {
  hl_pending *pending = pending_of_waiter(waiter);
  const hl_manager *manager = pending->call.manager;
  return manager->ops->start && !pending->call.adopts ? send_started(pending) : send(pending);
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
  finish_unmade(pending);
}

static void waiter_close(hl__waiter *waiter) HL__REQUIRES(hl__manager_mutex) {
  hl_pending *pending = pending_of_waiter(waiter);
  if (pending->done) return;
  (void)hl__manager_closed_error(&pending->error);
  hl__pending_give_up(pending);
}

static const hl__waiter_ops waiter_ops = {
    .send = waiter_send, .expire = waiter_expire, .close = waiter_close};

/* --------------------------------------------------------- its occupation */

void hl__pending_occupation_end(hl_pending *pending, bool commit) {
  hl_manager *manager = pending->call.manager;
  hl_lock *lock = pending->call.lock;
  hl__manager_mutex_lock(manager);
  /* A lock that has become a lease is one, even if its call was given up. */
  if (commit || pending->call.kind == HL__TO_LEASE) hl__call_commit(&pending->call);
  if (commit && pending->call.given_up) {
    hl_plan_free(lock->replaced);
    lock->replaced = pending->call.extension->whole;
    pending->call.extension->whole = NULL;
  }
  /* The store may have made an upgrade that was given up. */
  if (pending->call.given_up && pending->call.extension && lock->lease) lock->unsure = true;
  if (pending->release_then) {
    hl__manager_mutex_unlock(manager);
    (void)hl__lock_release(lock, false, NULL);
    hl__manager_mutex_lock(manager);
  }
  bool free_it = pending->free_then;
  lock->hold.busy = false;
  pending->call.lock = NULL;
  atomic_store_explicit(&lock->occupant, NULL, memory_order_release);
  (void)pthread_cond_broadcast(&manager->done);
  hl__manager_mutex_unlock(manager);
  if (free_it) hl_lock_free(lock);
}

static bool occupant_abandon(hl__occupant *occupant, hl__afterwards afterwards)
    HL__REQUIRES(hl__manager_mutex) {
  hl_pending *pending = HL__LIST_ENTRY(occupant, hl_pending, occupant);
  bool free_it = afterwards == HL__AFTERWARDS_FREE;
  if (free_it ? hl__lock_releases(pending->call.lock) : afterwards == HL__AFTERWARDS_RELEASE)
    pending->release_then = true;
  pending->free_then = pending->free_then || free_it;
  pending->call.lock->hold.kept_until = 0;
  if (!pending->done) {
    (void)hl__error(&pending->error, HL_ERELEASED, "the lock was released meanwhile");
    hl__pending_give_up(pending);
  }
  return !pending->call.given_up;
}

static void occupant_end(hl__occupant *occupant) {
  hl__pending_occupation_end(HL__LIST_ENTRY(occupant, hl_pending, occupant), false);
}

void hl__pending_occupy(hl_pending *pending, int64_t kept_until) {
  hl_lock *lock = pending->call.lock;
  hl_manager *manager = pending->call.manager;
  hl__manager_mutex_lock(manager);
  /* The lock is released afterwards, even when the store cannot confirm it. */
  pending->release_then = pending->call.kind == HL__RELEASE;
  lock->hold.busy = true;
  lock->hold.kept_until = kept_until;
  lock->hold.watched = manager->ops->traits.expires ? NULL : lock->hold.connection;
  atomic_store_explicit(&lock->occupant, &pending->occupant, memory_order_release);
  if (!send(pending)) hl__pending_finish(pending, threads_error(&pending->error));
  hl__manager_mutex_unlock(manager);
}

/* ------------------------------------------------------------- its worker */

static void blockers_add(void *context, const hl_holder *holder) {
  hl__blockers *self = context;
  if (self->upgrade && holder->mode == HL_UPDATE) return;
  hl_holder *grown = realloc(self->list, (self->n + 1) * sizeof *grown);
  if (!grown) {
    (void)hl__error_memory(&self->error);
    return;
  }
  grown[self->n++] = *holder;
  self->list = grown;
}

/* The caller publishes the list when it is complete: the owner of a call that is given up meanwhile
   must not see it grow. NULL: out of memory. */
static hl__blockers *blockers_find(const hl__call *call) {
  hl_error error = {.status = HL_OK};
  hl__blockers *found = calloc(1, sizeof *found);
  if (!found) return NULL;
  found->upgrade = call->extension && call->extension->converts;
  if (hl_manager_blockers(call->manager, call->waiter.plan, blockers_add, found, &error))
    found->error = error;
  return found;
}

void hl__pending_give_away(hl_pending *pending) {
  if (pending->call.adopts)
    (void)hl__lease_leave(pending->call.lease, NULL);
  else
    (void)hl_lock_release(pending->call.lock, false, NULL);
}

/* Ends a call that was made. Gives back what it got if its owner has given it up. */
static void made(hl_pending *pending, int status, const hl_error *error, hl__blockers *found) {
  hl__call *call = &pending->call;
  hl_manager *manager = call->manager;
  hl__manager_mutex_lock(manager);
  bool given_up = call->given_up, acquires = call->kind == HL__ACQUIRE;
  if (given_up && acquires && status == HL_OK) hl__manager_event(manager, HL__HOLD_GIVEN_UP, 0, 0);
  if (!given_up) {
    if (status) pending->error = *error;
    pending->found = found;
    hl__pending_finish(pending, status);
    if (pending->whole) pending->whole->group->others_give_up(pending->whole, pending);
  }
  hl__manager_mutex_unlock(manager);
  if (!given_up) return;
  blockers_free(found);
  /* A lock shows what it has, whether or not the owner waits for it. A lease asks its store. */
  bool shows = call->kind == HL__DOWNGRADE || (call->kind == HL__UPGRADE && !call->lock->lease);
  if (acquires)
    hl__pending_give_away(pending);
  else
    hl__pending_occupation_end(pending, shows && hl__call_commits(call, status));
  hl__exit_await_end();
}

static int work(hl_pending *pending, hl_error *error) {
  hl__call *call = &pending->call;
  if (call->kind == HL__ACQUIRE) return hl__call_acquire(call, call->timeout, error);
  if (call->kind == HL__CHECK) { /* the lock's owner may look at its session */
    hl__hold *hold = &call->lock->hold;
    hl__manager_mutex_lock(call->manager);
    hold->watched = hold->connection;
    hl__manager_mutex_unlock(call->manager);
  }
  return hl__lock_run(call, error);
}

/* The call was made so, and leaves the line. True: its worker, if it has one, still has to look for
   holders in the way. */
static bool leave(hl_pending *pending, int status) HL__REQUIRES(hl__manager_mutex) {
  hl__call *call = &pending->call;
  hl_manager *manager = call->manager;
  hl__pool_unreserve(manager, &call->reserved);
  if (!call->given_up) lock_idle(pending);
  if (call->in_line)
    hl__line_leave(manager, &call->waiter, status == HL_OK);
  else
    hl__line_advance(manager);
  call->in_line = false;
  return !call->given_up && hl__call_is_refused(call, status);
}

/* A call that was refused: its worker looks for the holders in the way. */
static void look(hl_pending *pending, int status, const hl_error *error) {
  hl_manager *manager = pending->call.manager;
  hl__blockers *found = blockers_find(&pending->call);
  hl__manager_mutex_lock(manager);
  hl__worker_comes(manager);
  if (pending->refused) manager->line.looking--;
  hl__manager_mutex_unlock(manager);
  made(pending, status, error, found);
  hl__pending_unref(pending);
}

static void run(hl__task *task) {
  hl_pending *pending = HL__LIST_ENTRY(task, hl_pending, task);
  hl__call *call = &pending->call;
  hl_manager *manager = call->manager;
  hl_error error;
  hl__manager_mutex_lock(manager);
  bool given_up = call->given_up;
  int refused = pending->refused;
  error = pending->error;
  hl__manager_mutex_unlock(manager);
  if (refused) {
    look(pending, refused, &error);
    return;
  }
  int status = given_up ? HL_CANCELLED : work(pending, &error);
  hl__manager_mutex_lock(manager);
  bool looks = leave(pending, status);
  if (!looks) hl__worker_comes(manager);
  hl__manager_mutex_unlock(manager);
  if (looks) {
    look(pending, status, &error);
    return;
  }
  made(pending, status, &error, NULL);
  hl__pending_unref(pending);
}

/* ------------------------------------------------------- without a worker */

/* The most calls at a time that are refused, and look for the holders in their way: that takes a
   worker. The others do not look. */
#define LOOKING_MAX 16

/* The store has ended the call so. Gives the mutex back meanwhile. The calling thread counts in
   `going`: it sends afterwards what may go now. */
static void started_end(hl_pending *pending, int status, const hl_error *error)
    HL__REQUIRES(hl__manager_mutex) {
  hl_manager *manager = pending->call.manager;
  bool looks = leave(pending, status) && manager->line.looking < LOOKING_MAX;
  if (looks) {
    pending->error = *error;
    pending->refused = status;
    looks = hl__worker_give(manager, &pending->task);
    if (looks) manager->line.looking++;
    if (!looks) pending->refused = HL_OK;
  }
  if (!looks) {
    hl__manager_mutex_unlock(manager);
    made(pending, status, error, NULL);
    hl__pending_unref(pending); /* not the manager's last reference: the caller has one */
    hl__manager_mutex_lock(manager);
  }
  manager->line.started--;
  if (manager->closed) (void)pthread_cond_broadcast(&manager->done);
}

/* hl__call.ended */
static void ended(hl__call *call, int status, const hl_error *error) {
  hl_manager *manager = call->manager;
  hl__manager_mutex_lock(manager);
  manager->line.going++;
  started_end(HL__LIST_ENTRY(call, hl_pending, call), status, error);
  manager->line.going--;
  hl__line_go(manager);
  hl__manager_mutex_unlock(manager);
}

/* Has the store begin it. False: no thread can be had now, and nothing is changed. */
static bool send_started(hl_pending *pending) {
  hl__call *call = &pending->call;
  hl_manager *manager = call->manager;
  hl_error error;
  atomic_fetch_add(&pending->references, 1u);
  call->by_worker = true;
  call->ended = ended;
  manager->line.started++;
  int status = hl__call_start(call, &error);
  if (status == HL__UNFREE) return true;
  if (status == HL_BUSY && !call->given_up) {
    manager->line.started--;
    atomic_fetch_sub(&pending->references, 1u); /* the owner has one still */
    return false;
  }
  /* Were the next one sent from here, a store that refuses all would have this call itself once for
     each of them. */
  started_end(pending, status, &error);
  return true;
}

/* Makes the call without a thread, where the store needs none: a try there does not block. False:
   the call has to wait. */
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
  made(pending, status, &error, hl__call_is_refused(call, status) ? blockers_find(call) : NULL);
  return true;
}

/* ---------------------------------------------------------------- starting */

/* Unchecked: no other thread has it yet. */
HL__UNCHECKED hl_pending *hl__pending_new(hl_manager *manager, hl__call_kind kind, hl_lock *lock,
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
  /* The plan of a held lock is the lock's, which may be freed before the pending. */
  if (kind != HL__ACQUIRE) pending->call.waiter.plan = NULL;
  pending->call.waiter.ops = &waiter_ops;
  pending->task.run = run;
  pending->occupant = (hl__occupant){occupant_abandon, occupant_end};
  pending->fd = -1;
  return pending;
}

/* Hands it to a worker, or puts it into the line, or ends it. */
static void acquire_begin(hl_pending *pending) HL__REQUIRES(hl__manager_mutex) {
  hl__call *call = &pending->call;
  hl_manager *manager = call->manager;
  if (call->given_up) { /* before it began: another member of its group was granted */
    hl__exit_await_end();
    return;
  }
  if (manager->cancelled) {
    hl__pending_finish(pending, hl__manager_closed_error(&pending->error));
    return;
  }
  /* After the library was closed, no keeper would end a wait in line in time. */
  if (call->timeout == 0 || (manager->ops->traits.blocks && hl__library_closed())) {
    if (!send(pending)) hl__pending_finish(pending, threads_error(&pending->error));
    return;
  }
  int status = hl__keeper_start(manager, &pending->error);
  if (status) {
    hl__pending_finish(pending, status);
    return;
  }
  call->in_line = true;
  hl__line_join(manager, &call->waiter);
  hl__line_advance(manager);
  if (call->waiter.place < HL__AT_STORE) hl__manager_hurry(manager, call->deadline);
}

void hl__pending_acquire(hl_pending *pending) {
  hl_manager *manager = pending->call.manager;
  if (run_at_once(pending)) return;
  hl__manager_mutex_lock(manager);
  manager->line.going++;
  acquire_begin(pending);
  manager->line.going--;
  hl__line_go(manager);
  hl__manager_mutex_unlock(manager);
}
