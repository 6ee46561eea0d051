/*
 * call.h - one request of a program on its way to the store: its place in line, its
 * connection, what it takes, and how it comes out. A thread that blocks has one on its
 * stack; a worker makes that of a pending. A thread that interrupts a request finds its
 * connection here and nowhere else.
 */
#ifndef HIERLOCK_CALL_H
#define HIERLOCK_CALL_H

#include "extend.h"
#include "lock.h"
#include "manager.h"

typedef enum hl__call_kind {
  HL__ACQUIRE,
  HL__EXTEND, /* this and the others: on a lock that is held */
  HL__UPGRADE,
  HL__DOWNGRADE,
  HL__TO_LEASE,
  HL__CHECK, /* this and the others take no options */
  HL__RELEASE,
  HL__REFRESH
} hl__call_kind;

typedef struct hl__call {
  hl_manager *manager;
  hl__call_kind kind;
  hl_lock *lock;            /* HL__ACQUIRE: the new one, which holds nothing yet */
  hl__extension *extension; /* HL__EXTEND, HL__UPGRADE, HL__DOWNGRADE: `extends`; else NULL */
  hl__extension extends;
  /* HL__ACQUIRE: its lock's, or NULL. HL__TO_LEASE: what the lock becomes; the call's own
     until hl__call_commit. */
  hl__lease *lease;
  bool became; /* HL__TO_LEASE: the session is given back, and the lock is that lease */
  bool adopts; /* HL__ACQUIRE: an import */
  hl_options options;
  int64_t start, timeout; /* ms; hl__now_ms */
  int64_t start_us;       /* hl__now_us */
  int64_t deadline;       /* of both */
  pthread_t owner;        /* the thread whose lock it will be */
  uint64_t agent;         /* hl_request.agent; the agent itself may end before a worker has done */
  /* A worker makes it, and others may give it up meanwhile: the store must then be
     told. */
  bool by_worker;
  /* What hl__call_start has begun ends so. The error is the caller's. */
  void (*ended)(struct hl__call *call, int status, const hl_error *error);
  bool in_line; /* it has a place there: it waits at all */
  hl__waiter waiter;
  /* In the store's hands now: to be interrupted. */
  hl__connection *connection HL__GUARDED_BY(hl__manager_mutex);
  bool reserved HL__GUARDED_BY(hl__manager_mutex); /* room in the pool */
  bool given_up HL__GUARDED_BY(hl__manager_mutex); /* its owner does not want the result */
} hl__call;

/* Whether others may have been in the way of a call that ended so. An import waits for none, and a
   refresh has no plan. */
static inline bool hl__call_is_refused(const hl__call *call, int status) {
  return call->waiter.plan && !call->adopts && (status == HL_TIMEOUT || status == HL_DEADLOCK);
}

/* Fills in a call on a new lock or on a held one. `given`: the program's options, as
   hl__options_take has read them. */
void hl__call_init(hl__call *call, hl_manager *manager, hl__call_kind kind, hl_lock *lock,
                   const hl_options *given);

/* The whole of an acquisition, for a thread that blocks: as hl_acquire. */
int hl__call_make(hl__call *call, hl_error *error);
/* Makes the part of a call from the connection on, until timeout ms after its start. The call has
   its place in line. Counts nothing. */
int hl__call_acquire(hl__call *call, int64_t timeout, hl_error *error);
/* As hl__call_acquire, where the store has `start`: gives the mutex back meanwhile, but never
   blocks. HL__UNFREE: call->ended is called later, by a thread of the store's and without a mutex,
   perhaps before this returns; so the call may not be there any more. HL_BUSY: no thread can be
   started now. */
int hl__call_start(hl__call *call, hl_error *error) HL__REQUIRES(hl__manager_mutex);
/* An acquisition ends so: counts it. Returns for how long it has waited, in ms. */
int64_t hl__call_ends(hl__call *call, int status) HL__REQUIRES(hl__manager_mutex);
/* Allocates what a call on a held lock needs before it blocks: the extension by `plan` (HL__EXTEND)
   or by another mode; the lease that the lock becomes. The caller disposes of it after any outcome.
   HL_OK, HL_ENOMEM; of HL__TO_LEASE also HL_ESTORE, and HL_EUNSUPPORTED: the lock is a lease
   already, or the store has no leases. */
int hl__call_prepare(hl__call *call, const hl_plan *plan, hl_error *error);
void hl__call_dispose(hl__call *call);
/* Makes the call of HL__EXTEND or HL__UPGRADE; blocks. The caller commits the extension, if it was
   granted. */
int hl__call_extend(hl__call *call, hl_error *error);
/* Makes the call of HL__DOWNGRADE; blocks. */
int hl__call_downgrade(hl__call *call, hl_error *error);
/* Makes the call of HL__TO_LEASE; blocks. */
int hl__call_to_lease(hl__call *call, hl_error *error);
/* Whether the lock has what the call wanted, after that status. A lease claims no more after a
   downgrade that failed at the store: the store may have made it, and the answer was lost. */
bool hl__call_commits(const hl__call *call, int status);
/* Gives the lock what the call has got. The thread that uses the lock calls it. */
void hl__call_commit(hl__call *call);
/* Ends a call that is in the store's hands, soon. */
void hl__call_interrupt(hl__call *call) HL__REQUIRES(hl__manager_mutex);

/* Reads the options of a caller, of any version, or NULL. HL_EMISUSE. */
int hl__options_take(const hl_options *given, hl_options *own, hl_error *error);
/* Checks the options. On a store that has only leases a session lock becomes a lease of
   hold_timeout. */
int hl__options_check(hl_options *options, const hl_manager *manager, const hl_plan *plan,
                      hl_error *error);
/* HL_EUNSUPPORTED: there are no update locks there, or none that are leases. */
int hl__updates_check(const hl_manager *manager, bool lease, hl_error *error);
/* The options of a lease. HL_EMISUSE. */
int hl__lease_options_check(const hl_options *options, hl_error *error);
/* HL_TIMEOUT: it was not granted in time. */
int hl__timeout_error(hl_error *error, const hl_plan *plan, int64_t timeout);

#endif
