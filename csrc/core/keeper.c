/*
 * keeper.c - one thread for each manager whose store has connections. It
 *
 *   - renews what is held and what lies idle, well before the store would give
 *     it up;
 *   - notices what has been lost;
 *   - finishes releases that could not be sent at once;
 *   - interrupts a call that overran its deadline, because its server hangs or
 *     the network is cut;
 *   - closes what nobody has used for long.
 *
 * It never waits for an answer: it sends, and reads at a later turn. So one dead
 * connection does not keep it from the others. Its thread blocks all signals.
 */
#include "internal.h"
#include "manager.h"

#include <errno.h>
#include <signal.h>
#include <time.h>

/* The longest time between two looks at everything. */
#define TURN_MS 1000
/* While a release waits for an earlier answer. */
#define TURN_SOON_MS 2
/* A store ends its waits itself; beyond its deadline by this much, it hangs. */
#define OVERRUN_MS 1000
/* An idle session is renewed for so long, and then closed. */
#define IDLE_MS 300000

/* Sends a sign of life when it is time: thrice in a hold_timeout, so that two
   may be late. The session is ours: see manager.h. */
static int renew_if_due(hl_manager *manager, hl__slot *slot) {
  if (slot->asked || hl__lease_ms() - slot->answered <
                         manager->config.hold_timeout / 3)
    return HL_OK;
  return manager->ops->renew(slot->session, &slot->asked, NULL);
}

static void held_turn(hl_manager *manager, hl__slot *slot)
    HL__REQUIRES(hl__manager_mutex) {
  /* Its owner is at it: then it needs no keeper. */
  if (hl__slot_trylock(slot) != 0) return;
  if (slot->session) {
    int status = hl__slot_look(manager, slot, NULL);
    if (status == HL_OK) status = renew_if_due(manager, slot);
    if (status) hl__slot_end(manager, slot, true);
  }
  hl__slot_unlock(slot);
}

/* False: its session has ended, or has been idle for too long. */
static bool idle_turn(hl_manager *manager, hl__slot *slot, int64_t now)
    HL__REQUIRES(hl__manager_mutex) {
  int status = manager->ops->settle(slot->session, 0, NULL);
  if (status == HL_OK) {
    if (slot->asked) slot->answered = slot->asked;
    slot->asked = 0;
    status = manager->ops->look(slot->session, NULL);
    if (status == HL_OK) status = renew_if_due(manager, slot);
  }
  return (status == HL_OK || status == HL_TIMEOUT) &&
         now - slot->idle_since < IDLE_MS;
}

/* True: it is released or ended; false: the answer has still not come. */
static bool releasing_turn(hl_manager *manager, hl__slot *slot)
    HL__REQUIRES(hl__manager_mutex) {
  int status = manager->ops->settle(slot->session, 0, NULL);
  if (status == HL_OK) status = manager->ops->unlock(slot->session, NULL);
  if (status == HL_TIMEOUT || status == HL_BUSY) return false;
  /* An ended session gave everything back; the pool will find it so. */
  slot->asked = 0;
  hl__pool_idle(manager, slot);
  return true;
}

/* One look at everything. Buries the slots that are to be closed. Returns how
   long the next turn may wait; ms. */
static int64_t turn(hl_manager *manager, hl__slot **dead)
    HL__REQUIRES(hl__manager_mutex) {
  int64_t now = hl__now_ms();
  int64_t wait = manager->config.hold_timeout / 6;
  if (wait > TURN_MS) wait = TURN_MS;
  for (hl__slot *slot = manager->slots, *next; slot; slot = next) {
    next = slot->next;
    switch (slot->state) {
    case HL__HELD:
      held_turn(manager, slot);
      break;
    case HL__IDLE:
      if (!idle_turn(manager, slot, now)) hl__pool_bury(manager, slot, dead);
      break;
    case HL__RELEASING:
      if (releasing_turn(manager, slot)) break;
      wait = TURN_SOON_MS;
      /* The end of its connection releases it, too. */
      if (now - slot->idle_since > manager->config.hold_timeout)
        hl__pool_bury(manager, slot, dead);
      break;
    case HL__BUSY:
      if (slot->due != HL_FOREVER && now > slot->due + OVERRUN_MS &&
          slot->session) {
        slot->overrun = true;
        manager->ops->interrupt(slot->session);
      }
      break;
    case HL__ENDED:
      break;
    }
  }
  return wait;
}

static void *keeper_main(void *argument) {
  hl_manager *manager = argument;
  hl__manager_lock(manager);
  while (!manager->keeper_stops) {
    hl__slot *dead = NULL;
    int64_t next = hl__now_ms() + turn(manager, &dead);
    if (dead) {
      hl__manager_unlock(manager);
      hl__pool_free(manager, dead);
      hl__manager_lock(manager);
      continue;
    }
    struct timespec t = {.tv_sec = next / 1000,
                         .tv_nsec = next % 1000 * 1000000};
    if (!manager->slots) /* nothing to keep: sleep until there is */
      (void)pthread_cond_wait(&manager->wakeup, &manager->mutex);
    else
      (void)pthread_cond_timedwait(&manager->wakeup, &manager->mutex, &t);
  }
  hl__manager_unlock(manager);
  return NULL;
}

int hl__keeper_start(hl_manager *manager, hl_error *error) {
  sigset_t all, before;
  if (manager->keeper_runs) {
    if (!manager->slots) (void)pthread_cond_signal(&manager->wakeup);
    return HL_OK;
  }
  (void)sigfillset(&all);
  (void)pthread_sigmask(SIG_SETMASK, &all, &before);
  int failure = pthread_create(&manager->keeper, NULL, keeper_main, manager);
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
  errno = failure;
  if (failure)
    return hl__error_errno(error, HL_ESTORE, "cannot start a thread");
  manager->keeper_runs = true;
  return HL_OK;
}

void hl__keeper_stop(hl_manager *manager) {
  hl__manager_lock(manager);
  bool runs = manager->keeper_runs;
  manager->keeper_stops = true;
  manager->keeper_runs = false;
  (void)pthread_cond_signal(&manager->wakeup);
  hl__manager_unlock(manager);
  if (runs) (void)pthread_join(manager->keeper, NULL);
}
