/*
 * lock.h - the inside of an hl_lock, for lock.c, extend.c and pending.c.
 */
#ifndef HIERLOCK_LOCK_H
#define HIERLOCK_LOCK_H

#include "internal.h"
#include "manager.h"

struct hl_lock {
  hl_manager *manager; /* a reference */
  unsigned generation; /* of the process that acquired it */
  hl__slot *slot;      /* NULL once released; HELD or ENDED otherwise */
  bool lost;           /* it was found lost */
  bool released;       /* hl_lock_release has been called */
  const hl_plan *plan;
  uint64_t token;
  int64_t waited;
  /* A call on the lock that was started (hl_lock_start_...): until its result has
     been taken the lock is its, and everybody else only asks for it here. */
  _Atomic(hl_pending *) use;
};

/* --- pending.c */

/* Never in a forked child: there it is of no use any more. */
static inline bool hl__lock_in_use(hl_lock *lock) {
  return atomic_load_explicit(&lock->use, memory_order_acquire) != NULL &&
         lock->generation == hl__fork_generation();
}
/* Releases the lock, and frees it, as soon as the call in use of it has ended; which
   is given up. */
void hl__lock_use_end(hl_lock *lock, bool free_it);
/* While a call on the lock is under way: true, and *left are the ms for which the
   store is sure to keep the lock. 0 from the moment at which its session was
   interrupted, or at which something came from the server that may be its loss; what
   is read within a few ms is waited for. False: no call is, and the lock can be
   asked itself. */
bool hl__lock_use_left(hl_lock *lock, int64_t *left);

/* --- lock.c */

/* HL_EMISUSE */
int hl__lock_in_use_error(hl_error *error);
/* As hl_lock_check and hl_lock_release, for whoever uses the lock. */
int hl__lock_check(hl_lock *lock, hl_error *error);
int hl__lock_release(hl_lock *lock, bool confirm, hl_error *error);

/* Sets the deadline of the store's next piece of waiting, which takes `longest` ms,
   or what the core allows at most. The keeper watches it,
   from now on: time that went into connecting is not the server's. False: the
   manager has been closed, or the pending given up; whoever does that from now
   on finds the session. */
bool hl__piece(hl_manager *manager, hl__slot *slot, int64_t deadline,
               int64_t longest, hl_pending *pending, hl_request *request);
void hl__request_fill(hl_request *request, const hl_plan *plan,
                      const hl_options *options, int64_t timeout,
                      char path[256]);
/* Says what was not granted, and how long it was waited for, instead of what
   the store's statement said; its errno and SQLSTATE stay. */
void hl__timeout_say(hl_error *error, const hl_plan *plan, int64_t timeout);

/* Looks, and ends what is found lost. HL_OK: the lock is held as far as can be
   told, and its slot's mutex is held, too; HL_ELOST or HL_ERELEASED: it is not,
   and the lock has no slot any more. Whoever calls it is the one who uses the
   lock. */
int hl__lock_enter(hl_lock *lock, hl_error *error)
    HL__ACQUIRES_IF_0(hl__slot_mutex);
/* Ends the lock's slot, which failed under its user's hands. Its mutex is not
   held: mutex.h has the order. */
int hl__lock_lose(hl_lock *lock, const hl_error *reason, hl_error *error);
/* Reads the answer to the last sign of life, waiting for it, so that the
   session can be used; but no longer than the lease lasts, for then the lock is
   lost anyhow. */
int hl__slot_settle(hl_manager *manager, hl__slot *slot, hl_error *error)
    HL__REQUIRES(hl__slot_mutex);

#endif
