/*
 * keeper.c - one thread for each manager whose store has connections, or who has
 * pendings in line. It
 *
 *   - renews what is held and what lies idle, well before the store would give
 *     it up;
 *   - notices what has been lost;
 *   - finishes releases that could not be sent at once;
 *   - interrupts a call that overran its deadline, because its server hangs or
 *     the network is cut;
 *   - closes what nobody has used for long;
 *   - ends pendings whose time is up while they stand in line.
 *
 * It never waits for an answer: it sends, and reads at a later turn. So one dead
 * connection does not keep it from the others. Its thread blocks all signals.
 */
#include "internal.h"
#include "line.h"
#include "pending.h"

#include <errno.h>
#include <signal.h>

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
  int status = hl__pool_settle(manager, slot);
  if (status == HL_OK) {
    status = manager->ops->look(slot->session, NULL);
    if (status == HL_OK) status = renew_if_due(manager, slot);
  }
  return (status == HL_OK || status == HL_TIMEOUT) &&
         now - slot->idle_since < IDLE_MS;
}

/* One call has waited in vain for its server. The idle sessions may be as dead: each
   gives a sign of life at once, and is given up when that is not answered. */
static void idle_suspect(hl_manager *manager) HL__REQUIRES(hl__manager_mutex) {
  for (hl__slot *slot = manager->newest; slot; slot = slot->older)
    if (hl__pool_settle(manager, slot) == HL_OK)
      (void)manager->ops->renew(slot->session, &slot->asked, NULL);
}

/* True: it is released, or has ended, or is given up: the end of its connection
   releases it, too. False: the answer has still not come. */
static bool releasing_turn(hl_manager *manager, hl__slot *slot,
                           hl__slot **dead) HL__REQUIRES(hl__manager_mutex) {
  int status = hl__pool_settle(manager, slot);
  if (status == HL_OK) status = manager->ops->unlock(slot->session, NULL);
  if (status == HL_TIMEOUT || status == HL_BUSY) return false;
  if (status == HL_OK)
    hl__pool_idle(manager, slot);
  else
    hl__pool_bury(manager, slot, dead);
  return true;
}

/* One look at everything. Buries the slots that are to be closed. Returns how
   long the next turn may wait; ms. */
static int64_t turn(hl_manager *manager, hl__slot **dead)
    HL__REQUIRES(hl__manager_mutex) {
  int64_t now = hl__now_ms();
  if (!manager->ops->connects || !manager->slots) return HL_FOREVER;
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
      if (!releasing_turn(manager, slot, dead)) wait = TURN_SOON_MS;
      break;
    case HL__BUSY:
      if (slot->due != HL_FOREVER && now > slot->due + OVERRUN_MS &&
          slot->session && !slot->overrun) {
        slot->overrun = true;
        manager->ops->interrupt(slot->session);
        idle_suspect(manager);
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
  bool connects = manager->ops->connects;
  if (connects) hl__library_enter();
  hl__manager_lock(manager);
  while (!manager->keeper_stops) {
    hl__slot *dead = NULL;
    manager->keeper_next = HL_FOREVER; /* sooner when it is hurried meanwhile */
    hl__keeper_hurry(manager, hl__line_keep(manager));
    int64_t now = hl__now_ms();
    hl__keeper_hurry(manager, hl__deadline(now, turn(manager, &dead)));
    if (dead) {
      hl__manager_unlock(manager);
      hl__pool_free(manager, dead);
      hl__manager_lock(manager);
      continue;
    }
    /* With nothing to keep: until there is something. */
    hl__wait_unlocked(&manager->wakeup, manager, manager->keeper_next);
  }
  hl__manager_unlock(manager);
  if (manager->ops->thread_end) manager->ops->thread_end();
  if (connects) hl__library_leave();
  return NULL;
}

int hl__keeper_start(hl_manager *manager, hl_error *error) {
  sigset_t all, before;
  if (manager->keeper_runs) {
    if (!manager->slots) hl__keeper_hurry(manager, 0);
    return HL_OK;
  }
  hl__exit_watch(manager);
  (void)sigfillset(&all);
  (void)pthread_sigmask(SIG_SETMASK, &all, &before);
  int failure = pthread_create(&manager->keeper, NULL, keeper_main, manager);
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
  errno = failure;
  if (failure)
    return hl__error_errno(error, HL_BUSY, "cannot start a thread");
  manager->keeper_runs = true;
  return HL_OK;
}

void hl__keeper_hurry(hl_manager *manager, int64_t when) {
  if (when >= manager->keeper_next) return;
  manager->keeper_next = when;
  (void)pthread_cond_signal(&manager->wakeup);
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
