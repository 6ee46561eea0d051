/*
 * lock.h - the inside of an hl_lock: a hold or a lease, and what its program knows of it.
 */
#ifndef HIERLOCK_LOCK_H
#define HIERLOCK_LOCK_H

#include "agent.h"
#include "fork.h"
#include "hold.h"
#include "lease.h"

/* A call on the lock that was started (hl_lock_start_...). It occupies the lock until its result
   has been taken. Meanwhile the lock's owner says here what he wants done with the lock. */
typedef struct hl__occupant hl__occupant;
/* What the occupant does with the lock when its call has ended. */
typedef enum hl__afterwards {
  HL__AFTERWARDS_NOTHING, /* the owner waits for that */
  HL__AFTERWARDS_RELEASE,
  HL__AFTERWARDS_FREE
} hl__afterwards;
struct hl__occupant {
  /* Gives the call up, as the lock's owner wants the lock released, or also freed. True: the
     owner ends the occupation himself, by end. Called with the manager's mutex. */
  bool (*abandon)(hl__occupant *occupant, hl__afterwards afterwards);
  /* Ends the occupation, and does what the owner asked for. No mutex is held. */
  void (*end)(hl__occupant *occupant);
};

struct hl_lock {
  hl__hold hold;       /* of a lease: its manager and its token */
  hl__lease *lease;    /* NULL: a session lock */
  unsigned generation; /* of the process that acquired it */
  bool released;       /* hl_lock_release has been called */
  /* The store may have rows exclusively that the plan has for update. Of a lease: an upgrade was
     given up or not answered in time, or a downgrade has failed; the store may carry it out late,
     so this is never reset. Of a session whose store gives back no single row: an upgrade has
     failed, perhaps after some of its rows. Belongs to the thread that uses the lock. */
  bool unsure;
  /* Atomic for a cancelled downgrade, which a worker commits while the owner may read. The owner
     may have the plan that the worker replaced, so that one stays until the lock is freed. */
  _Atomic(const hl_plan *) plan;
  const hl_plan *replaced; /* or NULL */
  int64_t waited;
  const char *label; /* that it was acquired with: observers see it during an upgrade, too */
  size_t label_size;
  _Atomic(hl__occupant *) occupant; /* NULL: the owner may use the lock */
  hl__held held;                    /* in the books of the agent that acquired it */
}; /* and behind it, in one allocation, its first plan, the label and held.where */

/* The lock belongs to the parent of this process. */
static inline bool hl__lock_is_foreign(const hl_lock *lock) {
  return lock->generation != hl__fork_generation();
}
/* False in a forked child, which has no thread that makes the call. */
static inline bool hl__lock_is_occupied(hl_lock *lock) {
  return atomic_load_explicit(&lock->occupant, memory_order_acquire) != NULL &&
         !hl__lock_is_foreign(lock);
}

/* Makes an empty lock, with a reference to the manager and a copy of the plan; with a ttl also the
   lease that it will hold. The options were checked, and name the asker. HL_OK, or what
   hl__lease_new says. */
int hl__lock_new(hl_manager *manager, const hl_plan *plan, const hl_options *options,
                 hl_lock **result, hl_error *error);
/* HL_ERELEASED: the lock is foreign or released; HL_EMISUSE: it is occupied. */
int hl__lock_unusable_error(const hl_lock *lock, hl_error *error);
/* HL_OK: the lock belongs to this process, was not released, and no call occupies it. HL_ERELEASED,
   HL_EMISUSE. */
static inline int hl__lock_usable(hl_lock *lock, hl_error *error) {
  bool usable = !hl__lock_is_foreign(lock) && !lock->released && !hl__lock_is_occupied(lock);
  return usable ? HL_OK : hl__lock_unusable_error(lock, error);
}
/* HL_EUNSUPPORTED: the lock is no lease. */
int hl__lock_no_lease_error(hl_error *error);
/* As hl__lock_usable. HL_EUNSUPPORTED: the lock is no lease. */
static inline int hl__lock_usable_lease(hl_lock *lock, hl_error *error) {
  int status = hl__lock_usable(lock, error);
  return status || lock->lease ? status : hl__lock_no_lease_error(error);
}
/* Asks the store, as hl_lock_check; a call may occupy the lock. */
int hl__lock_check(hl_lock *lock, hl_error *error);
/* Makes a call of any kind but HL__ACQUIRE; blocks. */
struct hl__call;
int hl__lock_run(struct hl__call *call, hl_error *error);
/* Gives the lock back, as hl_lock_release; a call may occupy the lock. */
int hl__lock_release(hl_lock *lock, bool confirm, hl_error *error);
/* Gives up the call that occupies the lock, before a confirmed release, and waits so many
   milliseconds for its end. False: it has not ended. Then the lock counts as released, and its
   occupant releases it behind the call. */
bool hl__lock_vacate(hl_lock *lock, int64_t ms);
/* HL_ECONNECTION: the lock could not be vacated. */
int hl__lock_unconfirmed_error(hl_error *error);
/* Whether hl_lock_free and hl_lock_close release it: not a lease without auto_release. */
static inline bool hl__lock_releases(const hl_lock *lock) {
  return !lock->lease || lock->lease->releases;
}
#endif
