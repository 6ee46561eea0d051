/*
 * pending.h - the inside of an hl_pending, for pending.c and the files above: owner.c is its
 * owner's part, start.c makes pendings, any.c waits for the first of several.
 */
#ifndef HIERLOCK_PENDING_H
#define HIERLOCK_PENDING_H

#include "call.h"

typedef struct hl__group hl__group;

/* The holders that were in the way of a call when its worker looked. */
typedef struct hl__blockers {
  hl_holder *list;
  size_t n;
  bool upgrade;   /* the call is an upgrade: the update holder is the asker itself */
  hl_error error; /* the look failed, so the list may be incomplete; HL_OK: it is complete */
} hl__blockers;

struct hl_pending {
  atomic_uint references; /* the owner has one, the worker another */
  unsigned generation;    /* of the process that started it */
  /* An acquisition's call.lock is the new lock. The worker owns it until `done` (or, if the call
     was given up, until the worker returns); then the owner does. It is NULL once it was taken. Any
     other call occupies call.lock, which becomes NULL when the occupation ends. */
  hl__call call;
  hl__task task;
  hl__occupant occupant;
  /* The store has refused it, so, and a worker looks for the holders in the way; else HL_OK. */
  int refused HL__GUARDED_BY(hl__manager_mutex);
  hl__blockers *found; /* the owner reads it when the pending is done; NULL: no worker looked */
  bool done HL__GUARDED_BY(hl__manager_mutex);
  bool taken HL__GUARDED_BY(hl__manager_mutex); /* hl_pending_wait returned the result */
  /* What the end of the occupation does to the lock, as its owner asked meanwhile. */
  bool release_then HL__GUARDED_BY(hl__manager_mutex);
  bool free_then HL__GUARDED_BY(hl__manager_mutex);
  int fd HL__GUARDED_BY(hl__manager_mutex); /* an eventfd; -1 until the owner asks for it */
  /* Set for a whole, which has no lock, no task and no place in line of its own. */
  hl__group *group HL__GUARDED_BY(hl__manager_mutex);
  /* Set for a member. NULL once its whole has ended. */
  hl_pending *whole HL__GUARDED_BY(hl__manager_mutex);
  hl__wait wait;   /* the owner's: of a strand that does nothing else meanwhile */
  hl_agent *agent; /* the owner's: the agent that will hold the lock */
  hl_notify_fn notify HL__GUARDED_BY(hl__manager_mutex); /* NULL: the owner has not asked */
  uint64_t notify_tag HL__GUARDED_BY(hl__manager_mutex);
  int status HL__GUARDED_BY(hl__manager_mutex);
  hl_error error HL__GUARDED_BY(hl__manager_mutex);
  char label[];
};

/* A whole is granted when the first of its members is: see any.c, which gives these functions to
   pending.c. */
struct hl__group {
  /* A member has ended. Called with the mutex, perhaps from inside the line, so it must not reach
     into the line. */
  void (*member_done)(hl_pending *whole, hl_pending *member);
  /* A member has ended, and its thread may reach into the line. Called with the mutex. */
  void (*others_give_up)(hl_pending *whole, const hl_pending *member);
  /* Cancels the members, and the winner only when `all`. */
  void (*cancel)(hl_pending *whole, bool all);
  /* Frees the members and the group. */
  void (*free)(hl_pending *whole);
  hl_pending *winner;
  hl_plan *plan;         /* all targets, for messages */
  size_t n, going;       /* the members; how many of them are not done */
  hl_pending *members[]; /* NULL: not started */
};

static inline bool hl__pending_is_foreign(const hl_pending *pending) {
  return pending->generation != hl__fork_generation();
}

/* A pending with a reference to the manager and a copy of the options. NULL: out of memory. */
hl_pending *hl__pending_new(hl_manager *manager, hl__call_kind kind, hl_lock *lock,
                            const hl_options *given);
/* Drops one reference; the last one frees the pending. */
void hl__pending_unref(hl_pending *pending);
/* Begins an acquisition: makes it at once where the store cannot block, or hands it to a worker or
   to the line. It may be done afterwards. */
void hl__pending_acquire(hl_pending *pending);
/* Occupies the lock, and hands the call to a worker. The lock's owner believes in it until
   kept_until (hl__boot_ms) meanwhile. */
void hl__pending_occupy(hl_pending *pending, int64_t kept_until);
/* Marks it done with that status, and wakes its owner. */
void hl__pending_tell(hl_pending *pending, int status) HL__REQUIRES(hl__manager_mutex);
/* Ends a call that no worker has: counts it, tells its owner, and its whole. */
void hl__pending_finish(hl_pending *pending, int status) HL__REQUIRES(hl__manager_mutex);
/* Ends it for its owner, wherever it is; error.status says how. A worker that has it tells the
   store. */
void hl__pending_give_up(hl_pending *pending) HL__REQUIRES(hl__manager_mutex);
/* Gives back what was granted and is not wanted any more. An import leaves the lease to the
   programs that have its text. */
void hl__pending_give_away(hl_pending *pending);
/* Ends the occupation of the lock; commit: with what the call got. Runs a pending release first.
   Afterwards the owner may free the lock. */
void hl__pending_occupation_end(hl_pending *pending, bool commit);
/* HL_CANCELLED */
int hl__pending_cancelled_error(hl_error *error);

/* ---- owner.c */

/* Cancels it, and drops the owner's reference. The members of a whole have been freed before. */
void hl__pending_end(hl_pending *pending);

#endif
