/*
 * lock.c - one acquisition and the lock that comes of it: where a call of
 * hl_acquire passes through, from the plan to the store and back.
 *
 *   1. enter    not in a child of the manager's process, not closed
 *   2. take     a session from the pool, or a new one
 *   3. lock     the store takes the rows, in order, in one go, or nothing
 *   4. hold     the slot becomes HELD, and the keeper looks after it
 *   5. release  sent, not waited for; the slot goes back to the pool
 */
#include "lock.h"

#include "internal.h"
#include "pending.h"
#include "plan.h"

#include <stdlib.h>
#include <string.h>

/* A wait is cut into pieces of this length, so that each has an end on the
   server's side even when the caller wants to wait for ever: a server does not
   notice that a waiting client has died, and the dead waiter keeps the rows that
   it has already got. */
#define WAIT_PIECE_MS 3600000

/* For the answer to a confirmed release, where the store's own limit is not
   shorter. */
#define CONFIRM_MS 10000

/* ----------------------------------------------------------- acquiring */

int hl__options_take(const hl_options *given, hl_options *own,
                     hl_error *error) {
  *own = (hl_options)HL_OPTIONS_INIT;
  if (!given) return HL_OK;
  return hl__struct_take(own, sizeof *own, given, "hl_options", error);
}

int hl__options_check(const hl_options *options, hl_manager *manager,
                      const hl_plan *plan, hl_error *error) {
  if (hl_plan_target_count(plan) == 0)
    return hl__error(error, HL_EMISUSE, "there is no target to lock");
  if (hl_plan_layout(plan) != manager->layout)
    return hl__error(error, HL_EMISUSE, "the plan is of another layout");
  if (options->label_size > 0 && !options->label)
    return hl__error(error, HL_EMISUSE, "label is missing");
  return HL_OK;
}

void hl__acquire_count(hl_manager *manager, int status, int64_t waited) {
  hl_stats *stats = &manager->stats;
  stats->waiting--;
  stats->wait_ms += (uint64_t)waited;
  switch (status) {
  case HL_OK:
    stats->acquired++;
    if (waited >= HL_WAITED_MS) stats->waited++;
    break;
  case HL_TIMEOUT: stats->timeouts++; break;
  case HL_DEADLOCK: stats->deadlocks++; break;
  case HL_CANCELLED: stats->cancelled++; break;
  case HL_BUSY: stats->busy++; break;
  default: stats->errors++; break;
  }
}

bool hl__piece(hl_manager *manager, hl__slot *slot, int64_t deadline,
               int64_t longest, hl_pending *pending, hl_request *request) {
  int64_t now = hl__now_ms();
  int64_t end = now + (longest < WAIT_PIECE_MS ? longest : WAIT_PIECE_MS);
  if (deadline < end) end = deadline;
  request->deadline = end;
  hl__manager_lock(manager);
  bool wanted = !manager->closed;
  if (pending && !hl__pending_slot(pending, slot)) wanted = false;
  if (pending && !wanted) pending->slot = NULL; /* it is about to go */
  slot->due = end > now ? end : now;
  hl__manager_unlock(manager);
  /* Not one that was given up: exit() waits for it, until it is gone. */
  if (wanted) hl__exit_check(0);
  return wanted;
}

static int closed_error(hl_error *error) {
  return hl__error(error, HL_CANCELLED, "the manager was closed");
}

/* Whether nobody wants what is being acquired any more. */
static bool unwanted(const hl_manager *manager, const hl_pending *pending)
    HL__REQUIRES(hl__manager_mutex) {
  return manager->closed || (pending && pending->given_up);
}

/* Takes a session and locks the request's rows in it. On HL_OK *slot is BUSY
   and holds them; otherwise nothing is held. */
static int acquire(hl_manager *manager, hl_request *request, int64_t deadline,
                   hl_pending *pending, hl__slot **slot, hl_grant *grant,
                   hl_error *error) {
  bool repaired = false;
  for (;;) {
    int status =
        hl__pool_take(manager, repaired ? HL__TAKE_FRESH : HL__TAKE_ANY,
                      deadline, request->try_once, pending, slot, error);
    if (status) return status;
    bool fresh = (*slot)->fresh;
    /* Connecting took all the time that there was: the store is asked, once. */
    if (hl__left_ms(deadline) == 0) request->try_once = true;

    if (!hl__piece(manager, *slot, deadline, HL_FOREVER, pending, request)) {
      hl__pool_discard(manager, *slot);
      *slot = NULL;
      return closed_error(error);
    }
    status = manager->ops->lock((*slot)->session, request, grant, error);
    if (status == HL_OK) return HL_OK;

    hl__manager_lock(manager);
    bool ended = unwanted(manager, pending), overrun = (*slot)->overrun;
    if (pending) pending->slot = NULL; /* nobody interrupts it any more */
    /* Should it try again, nobody else takes its room meanwhile. */
    if (pending && !ended && manager->ops->connects)
      hl__pending_reserve(pending);
    hl__manager_unlock(manager);
    if (status == HL_ECONNECTION || overrun || ended) {
      hl__pool_discard(manager, *slot);
      *slot = NULL;
      if (ended) return closed_error(error);
      if (overrun)
        return hl__error(error, HL_ECONNECTION,
                         "the server did not answer in time");
      /* A pooled connection may have gone stale; nothing was held yet. */
      if (fresh || repaired) return status;
      repaired = true;
      hl__manager_lock(manager);
      manager->stats.reconnects++;
      hl__manager_unlock(manager);
      continue;
    }
    hl__pool_put(manager, *slot);
    *slot = NULL;
    if (status == HL_TIMEOUT && !request->try_once &&
        hl__left_ms(deadline) > 0)
      continue; /* only a piece has ended */
    return status;
  }
}

int hl__timeout_error(hl_error *error, const hl_plan *plan, int64_t timeout) {
  char path[256];
  (void)hl_plan_describe(plan, path, sizeof path);
  if (timeout == 0)
    return hl__error(error, HL_TIMEOUT, "%s is locked; tried once",
                     path);
  return hl__error(error, HL_TIMEOUT, "%s was not granted within %.3f s", path,
                   (double)timeout / 1000);
}

void hl__timeout_say(hl_error *error, const hl_plan *plan, int64_t timeout) {
  if (!error) return;
  hl_error before = *error;
  (void)hl__timeout_error(error, plan, timeout);
  error->server_errno = before.server_errno;
  memcpy(error->sqlstate, before.sqlstate, sizeof error->sqlstate);
}

/* The slot becomes HELD, unless nobody wants it any more. */
static int hold(hl_manager *manager, hl__slot *slot, hl_pending *pending,
                const hl_grant *grant, hl_error *error) {
  hl__manager_lock(manager);
  bool ended = unwanted(manager, pending);
  if (pending) pending->slot = NULL; /* nobody interrupts it any more */
  if (!ended) {
    slot->state = HL__HELD;
    if (pending) slot->owner = pending->owner;
    slot->answered = grant->sent_ms;
    slot->asked = 0;
    manager->stats.held++;
  }
  hl__manager_unlock(manager);
  if (!ended) return HL_OK;
  hl__pool_discard(manager, slot);
  return closed_error(error);
}

const hl_plan *hl__lock_plan(const hl_lock *lock) { return lock->plan; }

hl_lock *hl__lock_new(hl_manager *manager, const hl_plan *plan) {
  hl_lock *lock = calloc(1, sizeof *lock);
  if (!lock) return NULL;
  lock->plan = hl_plan_copy(plan);
  if (!lock->plan) {
    free(lock);
    return NULL;
  }
  lock->generation = hl__fork_generation();
  lock->manager = manager;
  atomic_fetch_add(&manager->references, 1u);
  return lock;
}

void hl__request_fill(hl_request *request, const hl_plan *plan,
                      const hl_options *options, int64_t timeout,
                      char path[256]) {
  size_t n;
  const hl_row *rows = hl__plan_rows(plan, &n);
  *request = (hl_request){
      .rows = rows,
      .n = n,
      .shown = rows,
      .shown_n = n,
      .try_once = timeout == 0,
      .path = hl_plan_describe(plan, path, 256),
      .label = options->label,
      .label_size = options->label_size,
      .mode = hl_plan_mode(plan),
  };
}

int hl__lock_acquire(hl_lock *lock, const hl_options *options, int64_t start,
                     int64_t timeout, hl_pending *pending, hl_error *error) {
  hl_manager *manager = lock->manager;
  hl_request request;
  hl_grant grant = {0};
  hl__slot *slot = NULL;
  char path[256];
  hl__request_fill(&request, lock->plan, options, timeout, path);
  request.cancellable = pending != NULL;
  /* Never early: our milliseconds are cut. */
  int status = acquire(manager, &request, hl__deadline(start + 1, timeout),
                       pending, &slot, &grant, error);
  if (status == HL_OK) status = hold(manager, slot, pending, &grant, error);
  lock->waited = hl__now_ms() - start;
  if (status == HL_TIMEOUT) hl__timeout_say(error, lock->plan, timeout);
  if (status == HL_OK) {
    lock->slot = slot;
    lock->token = grant.token;
  }
  return status;
}

/* The calling thread's place in line; one that tries once has none. */
static int line_up(hl_manager *manager, hl__waiter *waiter,
                   const hl_plan *plan, int64_t timeout, hl_error *error)
    HL__REQUIRES(hl__manager_mutex) {
  manager->stats.waiting++;
  if (timeout == 0) return HL_OK;
  hl__line_join(manager, waiter);
  int status = hl__line_wait(manager, waiter);
  if (status == HL_TIMEOUT) return hl__timeout_error(error, plan, timeout);
  if (status == HL_CANCELLED) return closed_error(error);
  return status;
}

int hl_acquire(hl_manager *manager, const hl_plan *plan,
               const hl_options *given, hl_lock **result, hl_error *error) {
  hl_options own;
  const hl_options *options = &own;
  hl_lock *lock = NULL;
  *result = NULL;

  int status = hl__options_take(given, &own, error);
  if (status == HL_OK) status = hl__manager_enter(manager, error);
  if (status) return status;
  status = hl__options_check(options, manager, plan, error);
  if (status) goto out;
  lock = hl__lock_new(manager, plan);
  if (!lock) {
    status = hl__error_memory(error);
    goto out;
  }
  int64_t start = hl__now_ms();
  int64_t timeout =
      options->timeout < 0 ? manager->config.timeout : options->timeout;
  hl__waiter waiter = {.plan = lock->plan,
                       /* Never early: our milliseconds are cut. */
                       .deadline = hl__deadline(start + 1, timeout)};

  hl__manager_lock(manager);
  status = line_up(manager, &waiter, plan, timeout, error);
  hl__manager_unlock(manager);
  if (status == HL_OK)
    status = hl__lock_acquire(lock, options, start, timeout, NULL, error);
  hl__manager_lock(manager);
  if (timeout != 0) hl__line_leave(manager, &waiter, status == HL_OK);
  hl__acquire_count(manager, status, hl__now_ms() - start);
  hl__manager_unlock(manager);

  if (status == HL_OK) {
    *result = lock;
    lock = NULL;
  }
out:
  hl_lock_free(lock);
  hl__manager_leave(manager);
  return status;
}

/* ------------------------------------------------------------- holding */

/* Milliseconds for which the store keeps what the slot holds. */
static int64_t lease_left(const hl_manager *manager, const hl__slot *slot) {
  int64_t left =
      slot->answered + manager->config.hold_timeout - hl__lease_ms();
  return left > 0 ? left : 0;
}

int hl__slot_look(hl_manager *manager, hl__slot *slot, hl_error *error) {
  const hl_store_ops *ops = manager->ops;
  if (slot->asked) {
    int status = ops->settle(slot->session, 0, error);
    if (status == HL_OK) {
      slot->answered = slot->asked;
      slot->asked = 0;
    } else if (status != HL_TIMEOUT) {
      return status;
    }
  }
  int status = ops->look(slot->session, error);
  if (status == HL_OK && ops->connects && lease_left(manager, slot) == 0)
    status = hl__error(error, HL_ECONNECTION,
                       "the server has not answered for hold_timeout, and may "
                       "have given the lock away");
  return status;
}

void hl__slot_end(hl_manager *manager, hl__slot *slot, bool lost) {
  if (slot->state != HL__HELD) return;
  manager->ops->session_close(slot->session);
  slot->session = NULL;
  hl__pool_unlink(manager, slot);
  slot->state = HL__ENDED;
  manager->stats.held--;
  if (lost) {
    manager->stats.lost++;
    atomic_fetch_add(&manager->losses, 1u);
  } else {
    manager->stats.released++;
  }
}

/* The lock's slot has ended: nothing but the lock points to it any more, and the call
   that uses the lock. */
static void slot_drop(hl_lock *lock) {
  hl__manager_lock(lock->manager);
  hl_pending *use = atomic_load(&lock->use);
  if (use) {
    use->slot = NULL;
    use->lease_end = 0;
  }
  hl__manager_unlock(lock->manager);
  (void)pthread_mutex_destroy(&lock->slot->mutex);
  free(lock->slot);
  lock->slot = NULL;
}

static bool is_foreign(const hl_lock *lock) {
  return lock->generation != hl__fork_generation();
}

static int foreign_error(hl_error *error) {
  return hl__error(error, HL_ERELEASED,
                   "the lock belongs to the parent of this process");
}

int hl__lock_lose(hl_lock *lock, const hl_error *reason, hl_error *error) {
  hl_manager *manager = lock->manager;
  hl__manager_lock(manager);
  hl__slot_lock(lock->slot);
  hl__slot_end(manager, lock->slot, true);
  hl__slot_unlock(lock->slot);
  hl__manager_unlock(manager);
  slot_drop(lock);
  lock->lost = true;
  return hl__error(error, HL_ELOST, "the lock was lost: %s", reason->message);
}

/* Unchecked: clang cannot follow a function that returns sometimes with a
   mutex. */
HL__UNCHECKED int hl__lock_enter(hl_lock *lock, hl_error *error) {
  hl_manager *manager = lock->manager;
  if (is_foreign(lock)) return foreign_error(error);
  if (lock->lost)
    return hl__error(error, HL_ELOST, "the lock was lost while it was held");
  if (!lock->slot)
    return hl__error(error, HL_ERELEASED, "the lock has been released");

  hl_error reason;
  hl__slot_lock(lock->slot);
  if (lock->slot->session) {
    if (hl__slot_look(manager, lock->slot, &reason) == HL_OK) return HL_OK;
    hl__slot_unlock(lock->slot);
    return hl__lock_lose(lock, &reason, error);
  }
  /* The keeper, or hl_manager_close, has ended it. */
  hl__slot_unlock(lock->slot);
  slot_drop(lock);
  hl__manager_lock(manager);
  lock->lost = !manager->closed;
  hl__manager_unlock(manager);
  return lock->lost
             ? hl__error(error, HL_ELOST, "the lock was lost while it was held")
             : hl__error(error, HL_ERELEASED,
                         "the lock was released when its manager was closed");
}

int hl__lock_in_use_error(hl_error *error) {
  return hl__error(error, HL_EMISUSE,
                   "the lock is in use by a call that has not returned yet");
}

bool hl_lock_is_held(hl_lock *lock) {
  int64_t left;
  if (hl__lock_use_left(lock, &left)) return left > 0;
  if (hl__lock_enter(lock, NULL)) return false;
  hl__slot_unlock(lock->slot);
  return true;
}

hl_lock_state hl_lock_look(hl_lock *lock) {
  if (is_foreign(lock)) return HL_FOREIGN;
  if (hl__lock_in_use(lock)) return lock->released ? HL_RELEASED : HL_IN_USE;
  if (hl_lock_is_held(lock)) return HL_HELD;
  return lock->lost ? HL_LOST : HL_RELEASED;
}

int64_t hl_lock_remaining(hl_lock *lock) {
  int64_t left;
  if (hl__lock_use_left(lock, &left)) return left;
  if (hl__lock_enter(lock, NULL)) return 0;
  hl_manager *manager = lock->manager;
  left = HL_FOREVER;
  if (manager->ops->connects)
    left = lease_left(manager, lock->slot);
  hl__slot_unlock(lock->slot);
  return left;
}

int hl__slot_settle(hl_manager *manager, hl__slot *slot, hl_error *error) {
  if (!slot->asked) return HL_OK;
  int status = manager->ops->settle(
      slot->session, hl__now_ms() + lease_left(manager, slot), error);
  if (status == HL_OK) slot->answered = slot->asked;
  slot->asked = 0;
  return status;
}

int hl__lock_check(hl_lock *lock, hl_error *error) {
  int status = hl__lock_enter(lock, error);
  if (status) return status;
  hl_manager *manager = lock->manager;
  const hl_store_ops *ops = manager->ops;
  hl__slot *slot = lock->slot;
  hl_error reason;
  int64_t sent = 0;
  status = hl__slot_settle(manager, slot, &reason);
  if (status == HL_OK) status = ops->renew(slot->session, &sent, &reason);
  if (status == HL_OK) {
    slot->asked = sent;
    status = hl__slot_settle(manager, slot, &reason);
  }
  if (status == HL_OK) status = ops->look(slot->session, &reason);
  hl__slot_unlock(slot);
  return status == HL_OK ? HL_OK : hl__lock_lose(lock, &reason, error);
}

int hl_lock_check(hl_lock *lock, hl_error *error) {
  if (hl__lock_in_use(lock)) return hl__lock_in_use_error(error);
  return hl__lock_check(lock, error);
}

/* ----------------------------------------------------------- releasing */

/* Sends the release; when confirming, waits for its answer. HL_BUSY: it cannot
   be sent before an earlier answer has come. */
static int unlock(hl_manager *manager, hl__slot *slot, bool confirm,
                  hl_error *error) HL__REQUIRES(hl__slot_mutex) {
  const hl_store_ops *ops = manager->ops;
  if (!confirm) return ops->unlock(slot->session, error);
  int status = hl__slot_settle(manager, slot, error);
  if (status == HL_OK) status = ops->unlock(slot->session, error);
  if (status == HL_OK)
    status = ops->settle(slot->session, hl__now_ms() + CONFIRM_MS, error);
  return status;
}

int hl__lock_release(hl_lock *lock, bool confirm, hl_error *error) {
  hl_manager *manager = lock->manager;
  int status = hl__lock_enter(lock, error);
  if (status == HL_ERELEASED) return HL_OK;
  if (status) return status;

  hl__slot *slot = lock->slot;
  hl_error reason;
  status = unlock(manager, slot, confirm, &reason);
  hl__slot_unlock(slot);
  if (status != HL_OK && status != HL_BUSY)
    return hl__lock_lose(lock, &reason, error);

  hl__manager_lock(manager);
  lock->slot = NULL;
  if (slot->state == HL__HELD) {
    manager->stats.held--;
    manager->stats.released++;
    slot->answered = hl__lease_ms();
    if (status == HL_OK) {
      slot->asked = 0;
      hl__pool_idle(manager, slot);
    } else {
      slot->state = HL__RELEASING;
      slot->idle_since = hl__now_ms();
      (void)pthread_cond_signal(&manager->wakeup);
    }
    slot = NULL;
  }
  hl__manager_unlock(manager);
  if (slot) { /* hl_manager_close came between */
    lock->slot = slot;
    slot_drop(lock);
  }
  return HL_OK;
}

int hl_lock_release(hl_lock *lock, bool confirm, hl_error *error) {
  if (is_foreign(lock)) return foreign_error(error);
  if (lock->released) return HL_OK;
  lock->released = true;
  if (hl__lock_in_use(lock)) {
    hl__lock_use_end(lock, false);
    return HL_OK;
  }
  return hl__lock_release(lock, confirm, error);
}

void hl_lock_free(hl_lock *lock) {
  if (!lock) return;
  if (hl__lock_in_use(lock)) {
    hl__lock_use_end(lock, true);
    return;
  }
  /* A slot of the parent's is the parent's: see hl__manager_enter. */
  if (lock->slot && !is_foreign(lock))
    (void)hl_lock_release(lock, false, NULL);
  hl_plan_free(lock->plan);
  hl__manager_leave(lock->manager);
  free(lock);
}

/* ----------------------------------------------------------- observing */

hl_mode hl_lock_mode(const hl_lock *lock) { return hl_plan_mode(lock->plan); }

unsigned hl_lock_level(const hl_lock *lock) {
  return hl__plan_level(lock->plan);
}

int64_t hl_lock_waited(const hl_lock *lock) { return lock->waited; }

uint64_t hl_lock_token(const hl_lock *lock) { return lock->token; }

const hl_plan *hl_lock_plan(const hl_lock *lock) { return lock->plan; }
