/*
 * extend.c - more locks in the transaction of one that is held. It may break the
 * common order, so it, and only it, can deadlock.
 */
#include "extend.h"

#include "internal.h"
#include "pending.h"
#include "plan.h"

#include <stdlib.h>

int hl__extension_init(hl__extension *self, hl_lock *lock,
                       const hl_plan *plan, const hl_options *options,
                       hl_error *error) {
  hl_manager *manager = lock->manager;
  size_t n;
  *self = (hl__extension){0};
  int status = hl__options_check(options, manager, plan, error);
  if (status) return status;
  hl_plan *asked = hl_plan_copy(plan), *whole = hl_plan_copy(lock->plan);
  self->plan = asked;
  self->whole = whole;
  if (!asked || !whole || !hl__plan_append(whole, asked))
    return hl__error_memory(error);
  hl__plan_order(whole);
  (void)hl__plan_rows(asked, &n);
  self->missing = malloc(n * sizeof *self->missing);
  if (!self->missing) return hl__error_memory(error);
  self->timeout =
      options->timeout < 0 ? manager->config.timeout : options->timeout;
  hl__request_fill(&self->request, self->whole, options, self->timeout,
                   self->path);
  self->request.rows = self->missing;
  self->request.n = hl__plan_missing(asked, lock->plan, self->missing);
  self->request.extend = true;
  self->token = lock->token;
  return HL_OK;
}

void hl__extension_dispose(hl__extension *self) {
  free(self->missing);
  hl_plan_free(self->whole);
  hl_plan_free(self->plan);
}

/* A wait ends, and begins again, so often that its answers show in time that the
   store still keeps what is held: ms. Whoever looks at the lock meanwhile then
   sees it lost only when no answer came. */
static int64_t piece_ms(const hl_manager *manager) {
  return manager->ops->connects ? manager->config.hold_timeout / 2 : HL_FOREVER;
}

/* The store has answered what was sent then (0: it has not): whoever looks at the
   lock sees at once what it is worth. */
static void answered(hl_manager *manager, hl__slot *slot, hl_pending *pending,
                     int status, int64_t sent_ms) {
  bool lost = status == HL_DEADLOCK || status == HL_ECONNECTION;
  if (sent_ms) slot->answered = sent_ms;
  if (!pending || !manager->ops->connects || (!lost && !sent_ms)) return;
  hl__manager_lock(manager);
  if (lost)
    pending->lease_end = 0;
  else if (pending->lease_end) /* not interrupted */
    pending->lease_end = sent_ms + manager->config.hold_timeout;
  hl__manager_unlock(manager);
}

/* Locks more rows in a slot that already holds some. While it does, the slot is
   BUSY: the keeper does not renew it, and interrupts it when it hangs. */
static int extend(hl_lock *lock, hl_request *request, int64_t deadline,
                  hl_pending *pending, uint64_t *token, hl_error *error)
    HL__RELEASES(hl__slot_mutex) {
  hl_manager *manager = lock->manager;
  hl__slot *slot = lock->slot;
  hl_grant grant = {0};
  hl_error reason = {0};

  int status = hl__slot_settle(manager, slot, &reason);
  /* An earlier extend may have been cancelled when it had just ended. */
  if (status == HL_OK) status = manager->ops->settle(slot->session, 0, &reason);
  hl__slot_unlock(slot);
  if (status) return hl__lock_lose(lock, &reason, error);

  hl__manager_lock(manager);
  bool held = slot->state == HL__HELD;
  if (held) slot->state = HL__BUSY;
  slot->due = HL_FOREVER; /* what is there is of the last wait */
  manager->stats.waiting++;
  hl__manager_unlock(manager);
  if (held) {
    do {
      if (!hl__piece(manager, slot, deadline, piece_ms(manager), pending,
                     request))
        break;
      grant.sent_ms = 0;
      status = manager->ops->lock(slot->session, request, &grant, &reason);
      answered(manager, slot, pending, status, grant.sent_ms);
    } while (status == HL_TIMEOUT && !request->try_once &&
             hl__left_ms(deadline) > 0);
  }

  hl__manager_lock(manager);
  manager->stats.waiting--;
  if (pending) pending->slot = NULL; /* nobody interrupts it any more */
  bool closed = manager->closed, overrun = slot->overrun;
  if (overrun && pending) pending->lease_end = 0;
  if (held) slot->state = HL__HELD;
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
  if (!held || closed) return hl__lock_enter(lock, error);
  if (overrun && status != HL_DEADLOCK) {
    (void)hl__error(&reason, HL_ECONNECTION,
                    "the server did not answer in time");
    status = HL_ECONNECTION;
  }
  if (status == HL_ECONNECTION) return hl__lock_lose(lock, &reason, error);
  /* It grew: who holds a row of it now is later than whoever held one before. */
  if (status == HL_OK) *token = grant.token;
  if (status && error) *error = reason;
  return status;
}

int hl__extension_run(hl__extension *self, hl_lock *lock, hl_pending *pending,
                      hl_error *error) {
  /* Never early: our milliseconds are cut. */
  int64_t deadline = hl__deadline(hl__now_ms() + 1, self->timeout);
  self->request.cancellable = pending != NULL;
  int status = hl__lock_enter(lock, error);
  if (status) return status;
  if (self->request.n == 0)
    hl__slot_unlock(lock->slot);
  else
    status = extend(lock, &self->request, deadline, pending, &self->token,
                    error);
  if (status == HL_TIMEOUT) hl__timeout_say(error, self->plan, self->timeout);
  return status;
}

void hl__extension_commit(hl__extension *self, hl_lock *lock) {
  const hl_plan *before = lock->plan;
  lock->plan = self->whole;
  self->whole = before;
  lock->token = self->token;
}

int hl_lock_extend(hl_lock *lock, const hl_plan *plan,
                   const hl_options *given, hl_error *error) {
  hl_options options;
  hl__extension extension;
  if (hl__lock_in_use(lock)) return hl__lock_in_use_error(error);
  int status = hl__options_take(given, &options, error);
  if (status) return status;
  status = hl__extension_init(&extension, lock, plan, &options, error);
  if (status == HL_OK)
    status = hl__extension_run(&extension, lock, NULL, error);
  if (status == HL_OK) hl__extension_commit(&extension, lock);
  hl__extension_dispose(&extension);
  return status;
}
