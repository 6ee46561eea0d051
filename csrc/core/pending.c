/*
 * pending.c - calls that wait without blocking their caller: started here, done
 * by a worker, and taken, cancelled or dropped at any moment in between. No order
 * of these leaks a lock: see the life in pending.h.
 */
#include "pending.h"

#include "internal.h"
#include "plan.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

static void unref(hl_pending *pending) {
  if (atomic_fetch_sub(&pending->references, 1u) != 1) return;
  hl_lock_free(pending->lock);
  hl__manager_leave(pending->manager);
  free(pending);
}

/* ------------------------------------------------------------ its end */

/* From now on its owner sees that it is done. */
static void finish(hl_pending *pending, int status)
    HL__REQUIRES(hl__manager_mutex) {
  hl_manager *manager = pending->manager;
  pending->done = true;
  pending->status = status;
  hl__acquire_count(manager, status, hl__now_ms() - pending->start);
  if (pending->fd >= 0) {
    static const uint64_t one = 1;
    ssize_t ignored = write(pending->fd, &one, sizeof one); /* never blocks */
    (void)ignored;
  }
  (void)pthread_cond_broadcast(&manager->done);
}

/* Of one in line, which no worker has: its place and its lock go with it. */
static void finish_in_line(hl_pending *pending, int status)
    HL__REQUIRES(hl__manager_mutex) {
  hl__line_leave(pending->manager, &pending->waiter);
  pending->in_line = false;
  finish(pending, status);
}

static int closed_error(hl_error *error) {
  return hl__error(error, HL_CANCELLED, "the manager was closed");
}

static int cancelled_error(hl_error *error) {
  return hl__error(error, HL_CANCELLED, "the wait was cancelled");
}

void hl__pending_expire(hl_pending *pending) {
  bool behind = pending->waiter.place == HL__BEHIND;
  if (behind)
    (void)hl__timeout_error(&pending->error, pending->waiter.plan,
                            pending->timeout);
  else
    (void)hl__pool_busy_error(pending->manager, &pending->error);
  finish_in_line(pending, pending->error.status);
}

/* Ends it, wherever it is, for its owner; the store is told. */
static void give_up(hl_pending *pending) HL__REQUIRES(hl__manager_mutex) {
  if (pending->in_line && pending->waiter.place != HL__AT_STORE) {
    finish_in_line(pending, pending->error.status);
    return;
  }
  pending->given_up = true;
  if (pending->slot && pending->slot->session)
    pending->manager->ops->interrupt(pending->slot->session);
  finish(pending, pending->error.status);
}

void hl__pending_close(hl_pending *pending) {
  if (pending->done) return;
  (void)closed_error(&pending->error);
  give_up(pending);
}

/* ------------------------------------------------------------- its work */

void hl__pending_send(hl_pending *pending) {
  hl_manager *manager = pending->manager;
  atomic_fetch_add(&pending->references, 1u);
  int status = hl__worker_give(manager, pending, &pending->error);
  if (status == HL_OK) {
    pending->reserved = true;
    manager->reserved++;
    return;
  }
  atomic_fetch_sub(&pending->references, 1u); /* not the last: its owner's */
  if (pending->in_line)
    finish_in_line(pending, status);
  else
    finish(pending, status);
}

static void unreserve(hl_pending *pending) HL__REQUIRES(hl__manager_mutex) {
  if (pending->reserved) pending->manager->reserved--;
  pending->reserved = false;
}

bool hl__pending_slot(hl_pending *pending, hl__slot *slot) {
  unreserve(pending);
  pending->slot = slot;
  return !pending->given_up;
}

/* The lock is the worker's until it is done: unchecked. */
HL__UNCHECKED void hl__pending_run(hl_pending *pending) {
  hl_manager *manager = pending->manager;
  hl_error error;
  hl__manager_lock(manager);
  bool given_up = pending->given_up;
  hl__manager_unlock(manager);
  int status = given_up ? HL_CANCELLED
                        : hl__lock_acquire(pending->lock, &pending->options,
                                           pending->start, pending->timeout,
                                           pending, &error);
  hl__manager_lock(manager);
  unreserve(pending);
  pending->slot = NULL;
  if (pending->in_line) hl__line_leave(manager, &pending->waiter);
  pending->in_line = false;
  given_up = pending->given_up;
  if (!given_up) {
    if (status) pending->error = error;
    finish(pending, status);
  }
  hl__manager_unlock(manager);
  /* What it got after all goes back. */
  if (given_up) (void)hl_lock_release(pending->lock, false, NULL);
  unref(pending);
}

/* Without a thread, where the store needs none to grant at once or to refuse:
   one that connects to nothing does not block a try. False: it has to wait. */
static bool run_at_once(hl_pending *pending) {
  hl_manager *manager = pending->manager;
  if (manager->ops->connects) return false;
  hl__manager_lock(manager);
  bool follows = hl__line_would_follow(manager, hl__lock_plan(pending->lock));
  hl__manager_unlock(manager);
  if (follows && pending->timeout > 0) return false;
  hl_error error;
  int status = hl__lock_acquire(pending->lock, &pending->options,
                                pending->start, 0, NULL, &error);
  if (status == HL_TIMEOUT && pending->timeout > 0) return false;
  hl__manager_lock(manager);
  if (status) pending->error = error;
  finish(pending, status);
  hl__manager_unlock(manager);
  return true;
}

/* ----------------------------------------------------------- the calls */

int hl_start(hl_manager *manager, hl_plan *plan, const hl_options *options,
             hl_pending **result, hl_error *error) {
  static const hl_options defaults = HL_OPTIONS_INIT;
  hl_pending *pending = NULL;
  *result = NULL;
  if (!options) options = &defaults;
  int status = hl__manager_enter(manager, error);
  if (status) return status;
  status = hl__options_check(options, manager, plan, error);
  if (status) goto out;
  pending = calloc(1, sizeof *pending + options->label_size);
  hl_lock *lock = pending ? hl__lock_new(manager, plan) : NULL;
  if (!lock) {
    free(pending);
    status = hl__error_memory(error);
    goto out;
  }
  atomic_init(&pending->references, 1u);
  atomic_fetch_add(&manager->references, 1u);
  pending->manager = manager;
  pending->generation = hl__fork_generation();
  pending->owner = pthread_self();
  pending->lock = lock;
  pending->options = *options;
  if (options->label_size)
    memcpy(pending->label, options->label, options->label_size);
  pending->options.label = pending->label;
  pending->start = hl__now_ms();
  pending->timeout =
      options->timeout < 0 ? manager->config.timeout : options->timeout;
  pending->waiter.plan = hl__lock_plan(lock);
  pending->waiter.deadline = hl__deadline(pending->start, pending->timeout);
  pending->waiter.pending = pending;
  pending->fd = -1;
  *result = pending;

  hl__manager_lock(manager);
  manager->stats.waiting++;
  hl__manager_unlock(manager);
  if (run_at_once(pending)) goto out;
  hl__manager_lock(manager);
  if (manager->closed) {
    finish(pending, closed_error(&pending->error));
  } else if (pending->timeout == 0) {
    hl__pending_send(pending);
  } else {
    pending->in_line = true;
    hl__line_join(manager, &pending->waiter);
    hl__line_advance(manager);
    if (!pending->done && pending->waiter.place != HL__AT_STORE) {
      /* The keeper ends it in time. */
      status = hl__keeper_start(manager, &pending->error);
      if (status) finish_in_line(pending, status);
      else hl__keeper_hurry(manager, pending->waiter.deadline);
      status = HL_OK;
    }
  }
  hl__manager_unlock(manager);
out:
  hl__manager_leave(manager);
  return status;
}

static bool is_foreign(const hl_pending *pending) {
  return pending->generation != hl__fork_generation();
}

bool hl_pending_done(hl_pending *pending) {
  if (is_foreign(pending)) return true;
  hl__manager_lock(pending->manager);
  bool done = pending->done;
  hl__manager_unlock(pending->manager);
  return done;
}

int hl_pending_fd(hl_pending *pending, hl_error *error) {
  if (is_foreign(pending))
    return hl__error(error, HL_ERELEASED,
                     "the pending belongs to the parent of this process");
  hl__manager_lock(pending->manager);
  if (pending->fd < 0)
    pending->fd = eventfd(pending->done, EFD_CLOEXEC | EFD_NONBLOCK);
  int fd = pending->fd;
  hl__manager_unlock(pending->manager);
  return fd >= 0 ? fd
                 : hl__error_errno(error, HL_ESTORE, "cannot make a descriptor");
}

int hl_pending_wait(hl_pending *pending, int64_t timeout, hl_lock **lock,
                    hl_error *error) {
  *lock = NULL;
  if (is_foreign(pending))
    return hl__error(error, HL_ERELEASED,
                     "the pending belongs to the parent of this process");
  hl_manager *manager = pending->manager;
  int64_t deadline = timeout > 0 ? hl__deadline(hl__now_ms(), timeout) : 0;
  int status = HL_OK;
  hl__manager_lock(manager);
  while (!pending->done && deadline && hl__left_ms(deadline) > 0)
    hl__cond_wait(&manager->done, &manager->mutex, deadline);
  if (!pending->done) {
    status = hl__error(error, HL_TIMEOUT, "it is not done yet");
  } else if (pending->taken) {
    status = hl__error(error, HL_EMISUSE,
                       "the pending has given its result already");
  } else {
    pending->taken = true;
    status = pending->status;
    if (status == HL_OK) {
      *lock = pending->lock;
      pending->lock = NULL;
      pending->waiter.plan = NULL;
    } else if (error) {
      *error = pending->error;
    }
  }
  hl__manager_unlock(manager);
  return status;
}

void hl_pending_cancel(hl_pending *pending) {
  if (is_foreign(pending)) return;
  hl_manager *manager = pending->manager;
  bool granted = false;
  hl__manager_lock(manager);
  if (pending->done) {
    granted = !pending->taken && pending->status == HL_OK;
    if (granted) pending->status = cancelled_error(&pending->error);
  } else {
    (void)cancelled_error(&pending->error);
    give_up(pending);
  }
  hl__manager_unlock(manager);
  if (granted) (void)hl_lock_release(pending->lock, false, NULL);
}

const hl_plan *hl_pending_plan(const hl_pending *pending) {
  return pending->waiter.plan;
}

/* What is its owner's is freed by its owner: unchecked. */
HL__UNCHECKED void hl_pending_free(hl_pending *pending) {
  if (!pending) return;
  hl_pending_cancel(pending);
  /* It is done: nobody writes to it any more. */
  if (pending->fd >= 0) (void)close(pending->fd);
  unref(pending);
}
