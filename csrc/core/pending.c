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
  hl__line_forget(&pending->waiter);
  if (pending->work == HL__ACQUIRE) hl_lock_free(pending->lock);
  if (pending->extension) hl__extension_dispose(pending->extension);
  free(pending->extension);
  free(pending->holders);
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
  if (pending->work == HL__ACQUIRE)
    hl__acquire_count(manager, status, hl__now_ms() - pending->start);
  if (pending->fd >= 0) {
    static const uint64_t one = 1;
    ssize_t ignored = write(pending->fd, &one, sizeof one); /* never blocks */
    (void)ignored;
  }
  if (pending->notify) pending->notify(pending->notify_tag);
  (void)pthread_cond_broadcast(&manager->done);
}

/* Of one in line, which no worker has: its place and its lock go with it. */
static void finish_in_line(hl_pending *pending, int status)
    HL__REQUIRES(hl__manager_mutex) {
  hl__line_leave(pending->manager, &pending->waiter, false);
  pending->in_line = false;
  finish(pending, status);
}

static int closed_error(hl_error *error) {
  return hl__error(error, HL_CANCELLED, "the manager was closed");
}

static int cancelled_error(hl_error *error) {
  return hl__error(error, HL_CANCELLED, "the wait was cancelled");
}

static int threads_error(hl_error *error) {
  return hl__error(error, HL_BUSY,
                   "no thread can be started: see ulimit -u, and the limits of "
                   "the container");
}

void hl__pending_expire(hl_pending *pending) {
  hl_manager *manager = pending->manager;
  bool ready = pending->waiter.place == HL__READY;
  if (ready && !hl__pool_has_room(manager))
    (void)hl__pool_busy_error(manager, &pending->error);
  else if (ready && manager->line.short_of_threads)
    (void)threads_error(&pending->error);
  else
    (void)hl__timeout_error(&pending->error, pending->waiter.plan,
                            pending->timeout);
  finish_in_line(pending, pending->error.status);
}

/* Ends it, wherever it is, for its owner; the store is told. */
static void give_up(hl_pending *pending) HL__REQUIRES(hl__manager_mutex) {
  if (pending->in_line && pending->waiter.place < HL__TRIED) {
    finish_in_line(pending, pending->error.status);
    return;
  }
  if (hl__worker_take_back(pending->manager, pending)) {
    hl__pending_unreserve(pending);
    atomic_fetch_sub(&pending->references, 1u); /* not the last: its owner's */
    if (pending->in_line) {
      finish_in_line(pending, pending->error.status);
    } else {
      finish(pending, pending->error.status);
      hl__line_advance(pending->manager);
    }
    return;
  }
  pending->given_up = true;
  hl__leave_begin(1); /* until its worker has told the store */
  /* Not a round trip that ends soon by itself: the lock may be worth it. */
  if (pending->work <= HL__EXTEND && pending->slot && pending->slot->session) {
    const hl_store_ops *ops = pending->manager->ops;
    ops->interrupt(pending->slot->session);
    if (ops->connects) pending->lease_end = 0;
  }
  finish(pending, pending->error.status);
}

void hl__pending_close(hl_pending *pending) {
  if (pending->done) return;
  (void)closed_error(&pending->error);
  give_up(pending);
}

/* ------------------------------------------------------------- its work */

bool hl__pending_send(hl_pending *pending) {
  atomic_fetch_add(&pending->references, 1u);
  if (hl__worker_give(pending->manager, pending)) {
    if (pending->work == HL__ACQUIRE) hl__pending_reserve(pending);
    return true;
  }
  atomic_fetch_sub(&pending->references, 1u); /* not the last: its owner's */
  return false;
}

void hl__pending_reserve(hl_pending *pending) {
  if (!pending->reserved) pending->manager->reserved++;
  pending->reserved = true;
}

void hl__pending_unreserve(hl_pending *pending) {
  if (pending->reserved) pending->manager->reserved--;
  pending->reserved = false;
}

bool hl__pending_slot(hl_pending *pending, hl__slot *slot) {
  pending->slot = slot;
  return !pending->given_up;
}

/* Where a try blocks nobody, it is tried before it takes a place among those that
   wait. HL_PARKED_AGAIN: it has none; it stands in line again, or is done. */
#define HL_PARKED_AGAIN 1000
static int try_and_wait(hl_pending *pending, hl_error *error) {
  hl_manager *manager = pending->manager;
  int status = hl__lock_acquire(pending->lock, &pending->options,
                                pending->start, 0, pending, error);
  if (status != HL_TIMEOUT) return status;
  hl__manager_lock(manager);
  bool wanted = !pending->given_up && !manager->closed;
  bool late = hl__left_ms(pending->waiter.deadline) == 0;
  bool waits = wanted && !late && hl__line_refused(manager, &pending->waiter);
  hl__manager_unlock(manager);
  if (!wanted) return HL_CANCELLED;
  if (late)
    return hl__timeout_error(error, pending->waiter.plan, pending->timeout);
  if (!waits) return HL_PARKED_AGAIN;
  return hl__lock_acquire(pending->lock, &pending->options, pending->start,
                          pending->timeout, pending, error);
}

static int work(hl_pending *pending, hl_error *error) {
  switch (pending->work) {
  case HL__ACQUIRE:
    if (!pending->manager->ops->connects) return try_and_wait(pending, error);
    return hl__lock_acquire(pending->lock, &pending->options, pending->start,
                            pending->timeout, pending, error);
  case HL__EXTEND:
    return hl__extension_run(pending->extension, pending->lock, pending,
                             error);
  case HL__CHECK:
    hl__manager_lock(pending->manager);
    pending->slot = pending->lock->slot; /* so that its owner can look at it */
    hl__manager_unlock(pending->manager);
    return hl__lock_check(pending->lock, error);
  case HL__RELEASE:
    return hl__lock_release(pending->lock, true, error);
  }
  return HL_OK;
}

/* Found by its worker, which may have been given up meanwhile: then its owner must
   not see them grow. */
typedef struct blockers {
  hl_holder *list;
  size_t n;
} blockers;

static void blockers_add(void *context, const hl_holder *holder) {
  blockers *self = context;
  hl_holder *grown = realloc(self->list, (self->n + 1) * sizeof *grown);
  if (!grown) return;
  grown[self->n++] = *holder;
  self->list = grown;
}

/* The use of the lock ends: for its worker, or, when that has done its work, for
   its owner. What its owner has asked for meanwhile is done before: as soon as
   nobody uses the lock it is its owner's again, who may free it. */
static void use_end(hl_pending *pending, bool commit) {
  hl_lock *lock = pending->lock;
  hl__manager_lock(pending->manager);
  if (commit) hl__extension_commit(pending->extension, lock);
  if (pending->release_then) {
    hl__manager_unlock(pending->manager);
    (void)hl__lock_release(lock, false, NULL);
    hl__manager_lock(pending->manager);
  }
  bool free_it = pending->free_then;
  pending->lock = NULL;
  atomic_store_explicit(&lock->use, NULL, memory_order_release);
  hl__manager_unlock(pending->manager);
  if (free_it) hl_lock_free(lock);
}

void hl__pending_run(hl_pending *pending) {
  hl_manager *manager = pending->manager;
  hl_error error;
  blockers found = {NULL, 0};
  hl__manager_lock(manager);
  bool given_up = pending->given_up;
  hl__manager_unlock(manager);
  int status = given_up ? HL_CANCELLED : work(pending, &error);
  if (status == HL_PARKED_AGAIN) {
    unref(pending);
    return;
  }

  hl__manager_lock(manager);
  given_up = pending->given_up;
  bool look = !given_up && (status == HL_TIMEOUT || status == HL_DEADLOCK);
  hl__pending_unreserve(pending);
  pending->slot = NULL;
  if (!look) manager->coming_workers++;
  if (pending->in_line)
    hl__line_leave(manager, &pending->waiter, status == HL_OK);
  else
    hl__line_advance(manager);
  pending->in_line = false;
  hl__manager_unlock(manager);
  if (look)
    (void)hl_manager_blockers(manager, pending->waiter.plan, blockers_add,
                              &found, NULL);

  hl__manager_lock(manager);
  if (look) manager->coming_workers++;
  given_up = pending->given_up;
  if (given_up && pending->work == HL__ACQUIRE && status == HL_OK)
    manager->stats.acquired++; /* it is counted as released, too */
  if (!given_up) {
    if (status) pending->error = error;
    pending->holders = found.list;
    pending->holder_count = found.n;
    finish(pending, status);
  }
  hl__manager_unlock(manager);
  if (given_up) free(found.list);
  /* What it got after all goes back. */
  if (given_up && pending->work == HL__ACQUIRE)
    (void)hl_lock_release(pending->lock, false, NULL);
  else if (given_up)
    use_end(pending, false);
  if (given_up) hl__leave_end();
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
  blockers found = {NULL, 0};
  if (status == HL_TIMEOUT)
    (void)hl_manager_blockers(manager, pending->waiter.plan, blockers_add,
                              &found, NULL);
  pending->holders = found.list;
  pending->holder_count = found.n;
  hl__manager_lock(manager);
  if (status) pending->error = error;
  finish(pending, status);
  hl__manager_unlock(manager);
  return true;
}

/* ------------------------------------------------------------ starting */

/* With a reference to the manager, and a copy of the options. NULL: out of memory.
   Unchecked: nobody else has it yet. */
HL__UNCHECKED static hl_pending *pending_new(hl_manager *manager,
                                             hl__work what,
                                             const hl_options *options) {
  hl_pending *pending = calloc(1, sizeof *pending + options->label_size);
  if (!pending) return NULL;
  atomic_init(&pending->references, 1u);
  atomic_fetch_add(&manager->references, 1u);
  pending->manager = manager;
  pending->work = what;
  pending->generation = hl__fork_generation();
  pending->owner = pthread_self();
  pending->options = *options;
  if (options->label_size)
    memcpy(pending->label, options->label, options->label_size);
  pending->options.label = pending->label;
  pending->start = hl__now_ms();
  pending->timeout =
      options->timeout < 0 ? manager->config.timeout : options->timeout;
  pending->waiter.pending = pending;
  pending->fd = -1;
  return pending;
}

/* To a worker, or into the line; or it ends at once. */
static void acquire_begin(hl_pending *pending)
    HL__REQUIRES(hl__manager_mutex) {
  hl_manager *manager = pending->manager;
  if (manager->closed) {
    finish(pending, closed_error(&pending->error));
    return;
  }
  /* Nor would anybody end it in time. */
  if (pending->timeout == 0 ||
      (manager->ops->connects && hl__library_closed())) {
    if (!hl__pending_send(pending))
      finish(pending, threads_error(&pending->error));
    return;
  }
  /* Which ends it in time. */
  int status = manager->keeper_runs
                   ? HL_OK
                   : hl__keeper_start(manager, &pending->error);
  if (status) {
    finish(pending, status);
    return;
  }
  pending->in_line = true;
  hl__line_join(manager, &pending->waiter);
  hl__line_advance(manager);
  if (pending->waiter.place < HL__TRIED)
    hl__keeper_hurry(manager, pending->waiter.deadline);
}

static const hl_options defaults = HL_OPTIONS_INIT;

int hl_start(hl_manager *manager, const hl_plan *plan,
             const hl_options *given, hl_pending **result, hl_error *error) {
  hl_options own;
  const hl_options *options = &own;
  *result = NULL;
  int status = hl__options_take(given, &own, error);
  if (status == HL_OK) status = hl__manager_enter(manager, error);
  if (status) return status;
  status = hl__options_check(options, manager, plan, error);
  if (status) goto out;
  hl_pending *pending = pending_new(manager, HL__ACQUIRE, options);
  if (pending) pending->lock = hl__lock_new(manager, plan);
  if (!pending || !pending->lock) {
    if (pending) unref(pending);
    status = hl__error_memory(error);
    goto out;
  }
  pending->waiter.plan = hl__lock_plan(pending->lock);
  /* Never early: our milliseconds are cut. */
  pending->waiter.deadline = hl__deadline(pending->start + 1, pending->timeout);
  *result = pending;

  hl__manager_lock(manager);
  manager->stats.waiting++;
  hl__manager_unlock(manager);
  if (run_at_once(pending)) goto out;
  hl__manager_lock(manager);
  acquire_begin(pending);
  hl__manager_unlock(manager);
out:
  hl__manager_leave(manager);
  return status;
}

/* A call on a lock that is held; `plan` for HL__EXTEND. */
HL__UNCHECKED /* nobody else has the pending yet */
static int use(hl_lock *lock, hl__work what, const hl_plan *plan,
               const hl_options *options, hl_pending **result,
               hl_error *error) {
  hl_manager *manager = lock->manager;
  hl_pending *pending = pending_new(manager, what, options);
  if (!pending) return hl__error_memory(error);
  if (plan) {
    pending->extension = calloc(1, sizeof *pending->extension);
    int status = pending->extension
                     ? hl__extension_init(pending->extension, lock, plan,
                                          &pending->options, error)
                     : hl__error_memory(error);
    if (status) {
      unref(pending);
      return status;
    }
    pending->waiter.plan = pending->extension->plan;
  }
  pending->lease_end = hl__deadline(hl__lease_ms(), hl_lock_remaining(lock));
  pending->lock = lock;
  if (what == HL__RELEASE) /* also when nobody can confirm it */
    lock->released = pending->release_then = true;
  atomic_store_explicit(&lock->use, pending, memory_order_release);
  hl__manager_lock(manager);
  if (!hl__pending_send(pending))
    finish(pending, threads_error(&pending->error));
  hl__manager_unlock(manager);
  *result = pending;
  return HL_OK;
}

int hl_lock_start_extend(hl_lock *lock, const hl_plan *plan,
                         const hl_options *given, hl_pending **result,
                         hl_error *error) {
  hl_options own;
  const hl_options *options = &own;
  *result = NULL;
  if (hl__lock_in_use(lock)) return hl__lock_in_use_error(error);
  int status = hl__options_take(given, &own, error);
  if (status == HL_OK)
    status = hl__options_check(options, lock->manager, plan, error);
  if (status) return status;
  /* Where there is nothing to wait for, it says at once what is the matter. */
  if (!hl_lock_is_held(lock)) return hl_lock_extend(lock, plan, options, error);
  return use(lock, HL__EXTEND, plan, options, result, error);
}

int hl_lock_start_check(hl_lock *lock, hl_pending **result, hl_error *error) {
  *result = NULL;
  if (hl__lock_in_use(lock)) return hl__lock_in_use_error(error);
  if (!hl_lock_is_held(lock)) return hl_lock_check(lock, error);
  return use(lock, HL__CHECK, NULL, &defaults, result, error);
}

int hl_lock_start_release(hl_lock *lock, hl_pending **result,
                          hl_error *error) {
  *result = NULL;
  if (hl__lock_in_use(lock) || !hl_lock_is_held(lock))
    return hl_lock_release(lock, true, error);
  return use(lock, HL__RELEASE, NULL, &defaults, result, error);
}

void hl__lock_use_end(hl_lock *lock, bool free_it) {
  hl_manager *manager = lock->manager;
  hl__manager_lock(manager);
  hl_pending *pending = atomic_load(&lock->use);
  bool ended = !pending || (pending->done && !pending->given_up);
  if (pending) {
    pending->release_then = true;
    pending->free_then = pending->free_then || free_it;
    if (!pending->done) {
      (void)hl__error(&pending->error, HL_ERELEASED,
                      "the lock was released meanwhile");
      give_up(pending);
      ended = !pending->given_up;
    }
  }
  hl__manager_unlock(manager);
  if (pending && ended) {
    use_end(pending, false);
  } else if (!pending) { /* its worker has just ended it */
    (void)hl__lock_release(lock, false, NULL);
    if (free_it) hl_lock_free(lock);
  }
}

/* What has come from the server is read at once, when its worker gets a processor. On a
   machine so full that it does not get one for so long, nothing is sure. */
#define READING_MS 100

bool hl__lock_use_left(hl_lock *lock, int64_t *left) {
  static const struct timespec moment = {.tv_nsec = 100000};
  hl_manager *manager = lock->manager;
  if (!hl__lock_in_use(lock)) return false;
  int64_t patience = hl__now_ms() + READING_MS;
  for (;;) {
    hl__manager_lock(manager);
    const hl_pending *pending = atomic_load(&lock->use);
    bool under_way = pending && (!pending->done || pending->given_up);
    int64_t end = under_way ? pending->lease_end : 0;
    const hl__slot *slot = under_way ? pending->slot : NULL;
    if (lock->released || manager->closed || (slot && slot->overrun)) end = 0;
    bool told = end && slot && slot->session && manager->ops->told &&
                manager->ops->told(slot->session);
    hl__manager_unlock(manager);
    if (told && hl__left_ms(patience) > 0) {
      (void)nanosleep(&moment, NULL);
      continue;
    }
    if (told) end = 0; /* it may be that the lock is lost */
    *left = end == HL_FOREVER ? HL_FOREVER : end - hl__lease_ms();
    if (*left < 0) *left = 0;
    return under_way;
  }
}

/* --------------------------------------------------------- its owner's */

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

void hl_pending_notify(hl_pending *pending, hl_notify_fn fn, uint64_t tag) {
  if (is_foreign(pending)) return;
  hl__manager_lock(pending->manager);
  if (pending->done) {
    fn(tag);
  } else {
    pending->notify = fn;
    pending->notify_tag = tag;
  }
  hl__manager_unlock(pending->manager);
}

int hl_pending_wait(hl_pending *pending, int64_t timeout, hl_lock **lock,
                    hl_error *error) {
  *lock = NULL;
  if (is_foreign(pending))
    return hl__error(error, HL_ERELEASED,
                     "the pending belongs to the parent of this process");
  hl_manager *manager = pending->manager;
  int64_t deadline = timeout > 0 ? hl__deadline(hl__now_ms() + 1, timeout) : 0;
  int status = HL_OK;
  bool ended = false;
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
    if (status && error) *error = pending->error;
    if (status == HL_OK && pending->work == HL__ACQUIRE) {
      *lock = pending->lock;
      pending->lock = NULL;
      pending->waiter.plan = NULL;
    }
    ended = pending->work != HL__ACQUIRE && !pending->given_up && pending->lock;
  }
  hl__manager_unlock(manager);
  if (ended) use_end(pending, status == HL_OK && pending->work == HL__EXTEND);
  return status;
}

void hl_pending_cancel(hl_pending *pending) {
  if (is_foreign(pending)) return;
  hl_manager *manager = pending->manager;
  bool granted = false, ended = false, extended = false;
  hl__manager_lock(manager);
  if (pending->done && pending->work == HL__ACQUIRE) {
    granted = !pending->taken && pending->status == HL_OK;
    if (granted) pending->status = cancelled_error(&pending->error);
  } else if (pending->done) {
    ended = !pending->given_up && pending->lock;
    extended = pending->work == HL__EXTEND && pending->status == HL_OK;
  } else {
    (void)cancelled_error(&pending->error);
    give_up(pending);
    ended = pending->work != HL__ACQUIRE && !pending->given_up;
  }
  hl__manager_unlock(manager);
  if (granted) (void)hl_lock_release(pending->lock, false, NULL);
  if (ended) use_end(pending, extended);
}

void hl_pending_holders(hl_pending *pending, hl_holder_fn fn, void *context) {
  if (is_foreign(pending) || !hl_pending_done(pending)) return;
  for (size_t i = 0; i < pending->holder_count; i++)
    fn(context, &pending->holders[i]);
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
