/*
 * lock.h - the inside of an hl_lock: a hold or a lease, and what its program knows of it.
 */
#ifndef HIERLOCK_LOCK_H
#define HIERLOCK_LOCK_H

#include "agent.h"
#include "fork.h"
#include "hold.h"
#include "lease.h"

/* A call on the lock that was started (hl_lock_start_...). Until its result has been
   taken it occupies the lock: everybody else only asks for what they want here. */
typedef struct hl__occupant hl__occupant;
struct hl__occupant {
  /* The lock's owner wants it released, and freed, perhaps: the call is given up.
     True: the owner may end it himself, at once, by end. With the manager's mutex. */
  bool (*abandon)(hl__occupant *occupant, bool free_it);
  /* Ends the occupation, and does what was asked for. No mutex is held. */
  void (*end)(hl__occupant *occupant);
};

struct hl_lock {
  hl__hold hold;       /* of a lease: its manager and its token */
  hl__lease *lease;    /* NULL: a session lock */
  unsigned generation; /* of the process that acquired it */
  bool released;       /* hl_lock_release has been called */
  const hl_plan *plan;
  int64_t waited;
  /* For an upgrade: what observers are shown of it. */
  char label[sizeof((hl_holder *)0)->label];
  size_t label_size;
  _Atomic(hl__occupant *) occupant; /* NULL: it is its owner's */
  hl__held held;                    /* in the books of who acquired it */
};

/* Never in a forked child: there it is of no use any more. */
static inline bool hl__lock_is_occupied(hl_lock *lock) {
  return atomic_load_explicit(&lock->occupant, memory_order_acquire) != NULL &&
         lock->generation == hl__fork_generation();
}

/* An empty lock, with a reference to the manager and a copy of the plan; options: who asks
   for it. NULL: out of memory. */
hl_lock *hl__lock_new(hl_manager *manager, const hl_plan *plan, const hl_options *options);
/* For a request that is about to wait for so long: fills in the wait, except `blocks` and
   `over`, and hl__wait_begin, if it counts. The plan is in order. `own`: as in hl__wait. */
int hl__lock_wait_begin(hl__wait *wait, hl_manager *manager, const hl_plan *plan,
                        const hl_options *options, int64_t timeout, const hl__held *own,
                        hl_error *error);
/* Creates the lease that *lock will hold, from options that were checked. HL_OK. HL_ENOMEM, also where *lock
   is NULL, HL_ESTORE: it has freed *lock. */
int hl__lock_lease(hl_lock **lock, const hl_options *options, hl_error *error);
/* The lock of an import, with a lease that is to be adopted; and the options of that, of those
   that were given. What hl_import says. */
int hl__import_begin(hl_manager *manager, const char *text, size_t size, const hl_options *given,
                     hl_options *options, hl_lock **lock, hl_error *error);
/* The label that the lock was acquired with. */
void hl__lock_relabel(const hl_lock *lock, hl_options *options);
/* HL_OK: the lock is for update, and its owner's; HL_EMISUSE, HL_ERELEASED. */
int hl__lock_convert_check(hl_lock *lock, hl_error *error);
/* hl_lock_check and the release, for whoever occupies the lock. */
int hl__lock_check(hl_lock *lock, hl_error *error);
int hl__lock_release(hl_lock *lock, bool confirm, hl_error *error);
/* Whether its end by itself, not by hl_lock_release, releases it. */
static inline bool hl__lock_releases(const hl_lock *lock) {
  return !lock->lease || lock->lease->releases;
}
/* HL_EMISUSE */
int hl__lock_occupied_error(hl_error *error);

#endif
