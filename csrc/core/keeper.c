/*
 * keeper.c - the thread of keeper.h. It
 *
 *   - renews held and idle sessions, well before the store would give them up;
 *   - notices what has been lost;
 *   - finishes releases that could not be sent at once;
 *   - interrupts a call that is overdue, because its server hangs or the network is cut;
 *   - closes connections that were idle for long;
 *   - has workers refresh leases;
 *   - ends pendings whose time is up while they are in line.
 *
 * The keeper waits for no answer, unless no worker can be had: it sends, and reads in a later turn.
 * So a dead connection does not keep it from the others. The thread blocks all signals.
 * spec/model/lease.pml says when it renews, and what it may believe.
 */
#include "hold.h"
#include "lease.h"
#include "manager.h"

#include "clock.h"
#include "error.h"
#include "exit.h"

#include <errno.h>

/* The longest pause between two turns. */
#define TURN_MS 1000
/* The pause while a release waits for an earlier answer. */
#define TURN_SOON_MS 2
/* An idle session is renewed for this long, then closed. */
#define IDLE_MS 300000

/* Sends a sign of life if it is due: three times per hold_timeout, so that two may be late. The
   caller owns the session: see pool.h. */
static int renew_if_due(hl_manager *manager, hl__connection *connection) {
  if (connection->asked || hl__boot_ms() - connection->answered < manager->config.hold_timeout / 3)
    return HL_OK;
  return manager->ops->renew(connection->session, &connection->asked, NULL);
}

static void held_turn(hl_manager *manager, hl__connection *connection)
    HL__REQUIRES(hl__manager_mutex) {
  /* The owner is using it, and so needs no keeper. */
  if (hl__connection_mutex_trylock(connection) != 0) return;
  if (connection->session) {
    int status = hl__connection_check(manager, connection, NULL);
    if (status == HL_OK) status = renew_if_due(manager, connection);
    if (status) hl__hold_end(manager, connection, true);
  }
  hl__connection_mutex_unlock(connection);
}

/* False: the session has ended, or was idle for too long. */
static bool idle_turn(hl_manager *manager, hl__connection *connection, int64_t now)
    HL__REQUIRES(hl__manager_mutex) {
  int status = hl__pool_settle(manager, connection);
  if (status == HL_OK) {
    status = manager->ops->check(connection->session, NULL);
    if (status == HL_OK) status = renew_if_due(manager, connection);
  }
  return (status == HL_OK || status == HL_TIMEOUT) && now - connection->idle_since < IDLE_MS;
}

/* Sends a sign of life on each idle session, after a call had to be interrupted. The sessions
   may be as dead as that one, and are given up if they do not answer. */
static void idle_suspect(hl_manager *manager) HL__REQUIRES(hl__manager_mutex) {
  for (hl__connection *connection = manager->pool.newest; connection;
       connection = connection->older)
    if (hl__pool_settle(manager, connection) == HL_OK)
      (void)manager->ops->renew(connection->session, &connection->asked, NULL);
}

/* True: the connection is IDLE again, or has ended, or was given up, which releases the rows, too.
   False: the answer has still not come. */
static bool releasing_turn(hl_manager *manager, hl__connection *connection, hl__connection **dead)
    HL__REQUIRES(hl__manager_mutex) {
  int status = hl__pool_settle(manager, connection);
  if (status == HL_OK) status = manager->ops->give_back(connection->session, NULL);
  if (status == HL_TIMEOUT || status == HL_BUSY) return false;
  if (status == HL_OK)
    hl__pool_idle(manager, connection);
  else
    hl__pool_bury(manager, connection, dead);
  return true;
}

/* Visits all connections. Buries those that are to be closed. Returns the longest pause before the
   next turn; ms. */
static int64_t turn(hl_manager *manager, hl__connection **dead) HL__REQUIRES(hl__manager_mutex) {
  int64_t now = hl__now_ms();
  if (!manager->ops->traits.expires || !manager->pool.all) return HL_FOREVER;
  int64_t wait = manager->config.hold_timeout / 6;
  if (wait > TURN_MS) wait = TURN_MS;
  for (hl__connection *connection = manager->pool.all, *next; connection; connection = next) {
    next = connection->next;
    switch (connection->state) {
    case HL__HELD: held_turn(manager, connection); break;
    case HL__IDLE:
      if (!idle_turn(manager, connection, now)) hl__pool_bury(manager, connection, dead);
      break;
    case HL__RELEASING:
      if (!releasing_turn(manager, connection, dead)) wait = TURN_SOON_MS;
      break;
    case HL__BUSY:
      if (!connection->session || connection->overrun) break;
      if (now >= connection->due) {
        connection->overrun = true;
        manager->ops->interrupt(connection->session);
        idle_suspect(manager);
      } else if (hl__between_ms(now, connection->due) < wait) {
        wait = hl__between_ms(now, connection->due);
      }
      break;
    case HL__ENDED: break;
    }
  }
  return wait;
}

static void *keeper_main(void *argument) {
  hl_manager *manager = argument;
  bool uses_library = manager->ops->traits.blocks;
  if (uses_library) hl__library_enter();
  hl__manager_mutex_lock(manager);
  while (!manager->keeper.stops) {
    hl__connection *dead = NULL;
    manager->keeper.next = HL_FOREVER; /* earlier if hl__manager_hurry is called meanwhile */
    hl__manager_hurry(manager, hl__line_keep(manager));
    hl__manager_hurry(manager, hl__leases_keep(manager));
    int64_t now = hl__now_ms();
    hl__manager_hurry(manager, hl__deadline(now, turn(manager, &dead)));
    if (dead) {
      hl__manager_mutex_unlock(manager);
      hl__pool_free(manager, dead);
      hl__manager_mutex_lock(manager);
      continue;
    }
    /* Without connections it sleeps until there is one. */
    if (!manager->keeper.stops) /* it may have come while the mutex was free */
      hl__manager_wait(&manager->keeper.wakeup, manager, manager->keeper.next);
  }
  hl__manager_mutex_unlock(manager);
  if (manager->ops->thread_end) manager->ops->thread_end();
  if (uses_library) hl__library_leave();
  return NULL;
}

int hl__keeper_start(hl_manager *manager, hl_error *error) {
  if (manager->keeper.runs || manager->closed) return HL_OK;
  hl__exit_begin();
  errno = hl__thread_start(&manager->keeper.thread, 0, keeper_main, manager);
  if (errno) return hl__error_errno(error, HL_BUSY, "cannot start a thread");
  manager->keeper.runs = true;
  return HL_OK;
}

void hl__keeper_stop(hl_manager *manager) {
  hl__manager_mutex_lock(manager);
  bool runs = manager->keeper.runs;
  pthread_t thread = manager->keeper.thread;
  manager->keeper.stops = true;
  manager->keeper.runs = false;
  (void)pthread_cond_signal(&manager->keeper.wakeup);
  hl__manager_mutex_unlock(manager);
  if (runs) (void)pthread_join(thread, NULL);
}
