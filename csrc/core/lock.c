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
#include "internal.h"
#include "manager.h"
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

struct hl_lock {
  hl_manager *manager; /* a reference */
  unsigned generation; /* of the process that acquired it */
  hl__slot *slot;      /* NULL once released; HELD or ENDED otherwise */
  bool lost;           /* it was found lost */
  bool released;       /* hl_lock_release has been called */
  hl_plan *plan;
  uint64_t token;
  int64_t waited;
};

/* ----------------------------------------------------------- acquiring */

static int options_check(const hl_options *options, hl_manager *manager,
                         hl_plan *plan, hl_error *error) {
  if (hl_plan_target_count(plan) == 0)
    return hl__error(error, HL_EMISUSE, "there is no target to lock");
  if (hl_plan_layout(plan) != manager->layout)
    return hl__error(error, HL_EMISUSE, "the plan is of another layout");
  if (options->label_size > 0 && !options->label)
    return hl__error(error, HL_EMISUSE, "label is missing");
  return HL_OK;
}

static void count(hl_manager *manager, int status, int64_t waited) {
  hl_stats *stats = &manager->stats;
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

/* Sets the deadline of the store's next piece of waiting. The keeper watches it,
   from now on: time that went into connecting is not the server's. False: the
   manager has been closed; whoever closes it from now on finds the session. */
static bool piece(hl_manager *manager, hl__slot *slot, int64_t deadline,
                  hl_request *request) {
  int64_t now = hl__now_ms(), end = now + WAIT_PIECE_MS;
  if (deadline < end) end = deadline;
  request->deadline = end;
  hl__manager_lock(manager);
  bool open = !manager->closed;
  slot->due = end > now ? end : now;
  hl__manager_unlock(manager);
  return open;
}

static int closed_error(hl_error *error) {
  return hl__error(error, HL_CANCELLED, "the manager was closed");
}

/* Takes a session and locks the request's rows in it. On HL_OK *slot is BUSY
   and holds them; otherwise nothing is held. */
static int acquire(hl_manager *manager, hl_request *request, int64_t deadline,
                   hl__slot **slot, hl_grant *grant, hl_error *error) {
  bool repaired = false;
  for (;;) {
    int status =
        hl__pool_take(manager, repaired ? HL__TAKE_FRESH : HL__TAKE_ANY,
                      deadline, request->try_once, slot, error);
    if (status) return status;
    bool fresh = (*slot)->fresh;

    if (!piece(manager, *slot, deadline, request)) {
      hl__pool_discard(manager, *slot);
      *slot = NULL;
      return closed_error(error);
    }
    status = manager->ops->lock((*slot)->session, request, grant, error);
    if (status == HL_OK) return HL_OK;

    hl__manager_lock(manager);
    bool closed = manager->closed, overrun = (*slot)->overrun;
    hl__manager_unlock(manager);
    if (status == HL_ECONNECTION || overrun) {
      hl__pool_discard(manager, *slot);
      *slot = NULL;
      if (closed) return closed_error(error);
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

/* Says what was not granted, and how long it was waited for, instead of what
   the store's statement said; its errno and SQLSTATE stay. */
static void timeout_say(hl_error *error, const char *path, int64_t timeout) {
  if (!error) return;
  hl_error before = *error;
  if (timeout == 0)
    (void)hl__error(error, HL_TIMEOUT, "%s is locked by others; tried once",
                    path);
  else
    (void)hl__error(error, HL_TIMEOUT, "%s was not granted within %.3f s",
                    path, (double)timeout / 1000);
  error->server_errno = before.server_errno;
  memcpy(error->sqlstate, before.sqlstate, sizeof error->sqlstate);
}

/* The slot becomes HELD, unless the manager was closed meanwhile. */
static int hold(hl_manager *manager, hl__slot *slot, const hl_grant *grant,
                hl_error *error) {
  hl__manager_lock(manager);
  bool closed = manager->closed;
  if (!closed) {
    slot->state = HL__HELD;
    slot->answered = grant->sent_ms;
    slot->asked = 0;
    manager->stats.held++;
  }
  hl__manager_unlock(manager);
  if (!closed) return HL_OK;
  hl__pool_discard(manager, slot);
  return closed_error(error);
}

static hl_lock *lock_new(hl_manager *manager, hl_plan *plan) {
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

static void request_fill(hl_request *request, hl_plan *plan,
                         const hl_options *options, int64_t timeout,
                         char path[256]) {
  size_t n;
  const hl_row *rows = hl_plan_rows(plan, &n);
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

int hl_acquire(hl_manager *manager, hl_plan *plan, const hl_options *options,
               hl_lock **result, hl_error *error) {
  static const hl_options defaults = HL_OPTIONS_INIT;
  hl_request request;
  hl_grant grant = {0};
  hl__slot *slot = NULL;
  hl_lock *lock = NULL;
  char path[256];
  *result = NULL;
  if (!options) options = &defaults;

  int status = hl__manager_enter(manager, error);
  if (status) return status;
  status = options_check(options, manager, plan, error);
  if (status) goto out;
  lock = lock_new(manager, plan);
  if (!lock) {
    status = hl__error_memory(error);
    goto out;
  }

  int64_t start = hl__now_ms();
  int64_t timeout =
      options->timeout < 0 ? manager->config.timeout : options->timeout;
  request_fill(&request, lock->plan, options, timeout, path);

  hl__manager_lock(manager);
  manager->stats.waiting++;
  hl__manager_unlock(manager);
  status = acquire(manager, &request, hl__deadline(start, timeout), &slot,
                   &grant, error);
  if (status == HL_OK) status = hold(manager, slot, &grant, error);
  lock->waited = hl__now_ms() - start;
  hl__manager_lock(manager);
  manager->stats.waiting--;
  count(manager, status, lock->waited);
  hl__manager_unlock(manager);

  if (status == HL_TIMEOUT) timeout_say(error, path, timeout);
  if (status == HL_OK) {
    lock->slot = slot;
    lock->token = grant.token;
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

/* The lock's slot has ended: nothing but the lock points to it any more. */
static void slot_drop(hl_lock *lock) {
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

/* Ends the lock's slot, which failed under its owner's hands. Its mutex is not
   held: see manager.h for the order. */
static int lock_lose(hl_lock *lock, const hl_error *reason, hl_error *error) {
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

/* Looks, and ends what is found lost. HL_OK: the lock is held as far as can be
   told, and its slot's mutex is held, too; HL_ELOST or HL_ERELEASED: it is not,
   and the lock has no slot any more. Unchecked: clang cannot follow a function
   that returns sometimes with a mutex. */
static int lock_enter(hl_lock *lock, hl_error *error)
    HL__ACQUIRES_IF_0(hl__slot_mutex) HL__UNCHECKED {
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
    return lock_lose(lock, &reason, error);
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

bool hl_lock_is_held(hl_lock *lock) {
  if (lock_enter(lock, NULL)) return false;
  hl__slot_unlock(lock->slot);
  return true;
}

hl_lock_state hl_lock_look(hl_lock *lock) {
  if (is_foreign(lock)) return HL_FOREIGN;
  if (hl_lock_is_held(lock)) return HL_HELD;
  return lock->lost ? HL_LOST : HL_RELEASED;
}

int64_t hl_lock_remaining(hl_lock *lock) {
  if (lock_enter(lock, NULL)) return 0;
  hl_manager *manager = lock->manager;
  int64_t left = HL_FOREVER;
  if (manager->ops->connects)
    left = lease_left(manager, lock->slot);
  hl__slot_unlock(lock->slot);
  return left;
}

/* Reads the answer to the last sign of life, waiting for it, so that the
   session can be used; but no longer than the lease lasts, for then the lock is
   lost anyhow. */
static int settle_asked(hl_manager *manager, hl__slot *slot, hl_error *error)
    HL__REQUIRES(hl__slot_mutex) {
  if (!slot->asked) return HL_OK;
  int status = manager->ops->settle(
      slot->session, hl__now_ms() + lease_left(manager, slot), error);
  if (status == HL_OK) slot->answered = slot->asked;
  slot->asked = 0;
  return status;
}

int hl_lock_check(hl_lock *lock, hl_error *error) {
  int status = lock_enter(lock, error);
  if (status) return status;
  hl_manager *manager = lock->manager;
  const hl_store_ops *ops = manager->ops;
  hl__slot *slot = lock->slot;
  hl_error reason;
  int64_t sent = 0;
  status = settle_asked(manager, slot, &reason);
  if (status == HL_OK) status = ops->renew(slot->session, &sent, &reason);
  if (status == HL_OK) {
    slot->asked = sent;
    status = settle_asked(manager, slot, &reason);
  }
  if (status == HL_OK) status = ops->look(slot->session, &reason);
  hl__slot_unlock(slot);
  return status == HL_OK ? HL_OK : lock_lose(lock, &reason, error);
}

/* ----------------------------------------------------------- extending */

/* Locks more rows in a slot that already holds some. While it does, the slot is
   BUSY: the keeper need not renew it (a waiting statement is a sign of life to
   the server), and interrupts it when it hangs. */
static int extend(hl_lock *lock, hl_request *request, int64_t deadline,
                  hl_error *error) HL__RELEASES(hl__slot_mutex) {
  hl_manager *manager = lock->manager;
  hl__slot *slot = lock->slot;
  hl_grant grant = {0};
  hl_error reason = {0};

  int status = settle_asked(manager, slot, &reason);
  hl__slot_unlock(slot);
  if (status) return lock_lose(lock, &reason, error);

  hl__manager_lock(manager);
  bool held = slot->state == HL__HELD;
  if (held) slot->state = HL__BUSY;
  manager->stats.waiting++;
  hl__manager_unlock(manager);
  if (held) {
    do {
      if (!piece(manager, slot, deadline, request)) break;
      status = manager->ops->lock(slot->session, request, &grant, &reason);
    } while (status == HL_TIMEOUT && !request->try_once &&
             hl__left_ms(deadline) > 0);
  }

  hl__manager_lock(manager);
  manager->stats.waiting--;
  bool closed = manager->closed, overrun = slot->overrun;
  if (held) slot->state = HL__HELD;
  if (held && grant.sent_ms) slot->answered = grant.sent_ms;
  if (status == HL_TIMEOUT) manager->stats.timeouts++;
  if (status == HL_DEADLOCK) manager->stats.deadlocks++;
  if (held && closed) {
    hl__slot_lock(slot);
    hl__slot_end(manager, slot, false);
    hl__slot_unlock(slot);
  } else if (held && status == HL_DEADLOCK) {
    /* The store has already given everything back. */
    manager->stats.held--;
    hl__pool_idle(manager, slot);
    lock->slot = NULL;
  }
  hl__manager_unlock(manager);

  /* Ended by the keeper before we could begin, or closed meanwhile. */
  if (!held || closed) return lock_enter(lock, error);
  if (overrun && status != HL_DEADLOCK) {
    (void)hl__error(&reason, HL_ECONNECTION,
                    "the server did not answer in time");
    status = HL_ECONNECTION;
  }
  if (status == HL_ECONNECTION) return lock_lose(lock, &reason, error);
  /* It grew: who holds a row of it now is later than whoever held one before. */
  if (status == HL_OK) lock->token = grant.token;
  if (status && error) *error = reason;
  return status;
}

int hl_lock_extend(hl_lock *lock, hl_plan *plan, const hl_options *options,
                   hl_error *error) {
  static const hl_options defaults = HL_OPTIONS_INIT;
  hl_manager *manager = lock->manager;
  hl_request request;
  char path[256];
  hl_plan *whole = NULL;
  hl_row *missing = NULL;
  size_t n;
  if (!options) options = &defaults;

  int status = options_check(options, manager, plan, error);
  if (status) return status;
  status = lock_enter(lock, error);
  if (status) return status;

  /* Everything that can run out of memory, before anything is taken. */
  (void)hl_plan_rows(plan, &n);
  missing = malloc(n * sizeof *missing);
  whole = hl_plan_copy(lock->plan);
  if (!whole || !missing || !hl__plan_append(whole, plan)) {
    hl__slot_unlock(lock->slot);
    status = hl__error_memory(error);
    goto out;
  }
  int64_t timeout =
      options->timeout < 0 ? manager->config.timeout : options->timeout;
  request_fill(&request, whole, options, timeout, path);
  request.rows = missing;
  request.n = hl__plan_missing(plan, lock->plan, missing);
  request.extend = true;
  if (request.n == 0)
    hl__slot_unlock(lock->slot);
  else
    status = extend(lock, &request, hl__deadline(hl__now_ms(), timeout), error);
  if (status == HL_TIMEOUT)
    timeout_say(error, hl_plan_describe(plan, path, sizeof path), timeout);
  if (status == HL_OK) {
    hl_plan *before = lock->plan;
    lock->plan = whole;
    whole = before;
  }
out:
  free(missing);
  hl_plan_free(whole);
  return status;
}

/* ----------------------------------------------------------- releasing */

/* Sends the release; when confirming, waits for its answer. HL_BUSY: it cannot
   be sent before an earlier answer has come. */
static int unlock(hl_manager *manager, hl__slot *slot, bool confirm,
                  hl_error *error) HL__REQUIRES(hl__slot_mutex) {
  const hl_store_ops *ops = manager->ops;
  if (!confirm) return ops->unlock(slot->session, error);
  int status = settle_asked(manager, slot, error);
  if (status == HL_OK) status = ops->unlock(slot->session, error);
  if (status == HL_OK)
    status = ops->settle(slot->session, hl__now_ms() + CONFIRM_MS, error);
  return status;
}

int hl_lock_release(hl_lock *lock, bool confirm, hl_error *error) {
  hl_manager *manager = lock->manager;
  if (is_foreign(lock)) return foreign_error(error);
  if (lock->released) return HL_OK;
  lock->released = true;
  int status = lock_enter(lock, error);
  if (status == HL_ERELEASED) return HL_OK;
  if (status) return status;

  hl__slot *slot = lock->slot;
  hl_error reason;
  status = unlock(manager, slot, confirm, &reason);
  hl__slot_unlock(slot);
  if (status != HL_OK && status != HL_BUSY)
    return lock_lose(lock, &reason, error);

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

void hl_lock_free(hl_lock *lock) {
  if (!lock) return;
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
