/*
 * line.h - requests of this process that wait, in the order of their arrival.
 *
 * A database would let each of five hundred coroutines that want one node wait on
 * a connection of its own. So a request that is sure to wait behind another one of
 * this manager's waits here instead, and costs no connection and no thread; only the
 * first goes to the store. Nothing is handed over in the process: whoever comes
 * to the head of the line joins the store's queue behind everybody else's
 * requests. So other processes wait no longer than they would without the line:
 * between two grants to this process each of them has had its turn, where the
 * store's queue is fair.
 *
 * Request R stands behind an earlier request P, while P waits (not while it
 * holds), in two cases.
 *
 *   - P's rows, up to the first that conflicts with R, are all R's, too. Whatever
 *     P waits for, R would wait for, or would wait for P: the store would not grant
 *     R before P is granted or gives up. Where P needs, before that, a row that R
 *     does not, P may wait for something that does not concern R: then R
 *     goes to the store by itself.
 *   - P stands behind nobody, nothing conflicts, and P's rows, all shared, are all
 *     R's. Then whatever keeps P keeps R. So of a crowd that will share, one goes
 *     first, and the others follow at once when it is granted; when it gives up, the
 *     next goes alone.
 *
 * R holds nothing while it stands in line, so no circle of waiting goes through
 * it. What may hold something already (hl_lock_extend), and what does not wait
 * (timeout 0), does not stand in line.
 */
#ifndef HIERLOCK_LINE_H
#define HIERLOCK_LINE_H

#include "manager.h"

typedef enum hl__place {
  HL__BEHIND,  /* it follows another one */
  HL__READY,   /* a pending that may go as soon as the pool has room */
  HL__AT_STORE /* or on its way */
} hl__place;

struct hl__waiter {
  const hl_plan *plan;
  int64_t deadline;
  hl_pending *pending; /* NULL: a thread waits in hl__line_wait */
  hl__waiter *next HL__GUARDED_BY(hl__manager_mutex);
  hl__waiter *previous HL__GUARDED_BY(hl__manager_mutex);
  hl__place place HL__GUARDED_BY(hl__manager_mutex);
  /* HL__BEHIND: the nearest that it follows. */
  hl__waiter *behind HL__GUARDED_BY(hl__manager_mutex);
  pthread_cond_t *turn HL__GUARDED_BY(hl__manager_mutex); /* of that thread */
};

/* Puts it at the end of the line. */
void hl__line_join(hl_manager *manager, hl__waiter *waiter)
    HL__REQUIRES(hl__manager_mutex);
/* Takes it out, granted or not; those behind it go on. */
void hl__line_leave(hl_manager *manager, hl__waiter *waiter, bool granted)
    HL__REQUIRES(hl__manager_mutex);
/* Waits in line until it may go to the store: HL_OK; HL_TIMEOUT, or HL_CANCELLED
   when the manager is closed. It stands in line still. */
int hl__line_wait(hl_manager *manager, hl__waiter *waiter)
    HL__REQUIRES(hl__manager_mutex);
/* Sends pendings that may go to the store there, as far as the pool has room. To
   be called when it has got some. */
void hl__line_advance(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* Ends the pendings in line whose time is up; returns the next one's deadline, or
   HL_FOREVER. */
int64_t hl__line_expire(hl_manager *manager, int64_t now)
    HL__REQUIRES(hl__manager_mutex);
/* The manager is closed: all who stand in line end. */
void hl__line_close(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* Whether a request of the plan, were it to come now, would stand behind one. */
bool hl__line_would_follow(hl_manager *manager, const hl_plan *plan)
    HL__REQUIRES(hl__manager_mutex);

#endif
