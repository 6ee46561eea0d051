/*
 * lease.h - the second kind of hold: a lease. The store has a record of it, which ends at a
 * time of the store's clock; no connection is pinned. What its owner may believe of it,
 * how it is renewed, given back or found lost, is here.
 *
 * Belief. The store keeps the record until (the time at which it read the last refresh) +
 * ttl. It cannot have read it before it was sent. So until (the time of sending the last
 * refresh that was answered) + ttl the lease is held for sure, by a clock that goes on
 * while the machine sleeps: `end`. Beyond it the lease is over, as far as its owner knows.
 * It may be unbroken still, for others only delete its record when they want what it locks.
 * A refresh tells: where the record is there, nobody has had it since, and the lease is
 * held again.
 */
#ifndef HIERLOCK_LEASE_H
#define HIERLOCK_LEASE_H

#include "list.h"
#include "manager.h"

typedef enum hl__lease_state {
  HL__LEASE_NEW,  /* asked for, not granted yet */
  HL__LEASE_HELD, /* or over: see end */
  HL__LEASE_LOST, /* the store has said so */
  HL__LEASE_ENDED /* released, exported, or left to itself */
} hl__lease_state;

typedef struct hl__lease {
  atomic_uint references; /* its lock's or call's, its tasks' */
  hl_manager *manager;
  bool refreshes, releases; /* auto_refresh, auto_release */
  bool imported;            /* others may have its text; constant once it was granted */
  hl_lease_terms terms;     /* constant once it was granted, but for its place */
  /* An upgrade or a downgrade was sent and not answered. The store may carry it out late, so the record may be
     exclusive though the handle says HL_UPDATE. Never taken back, for the same reason. The thread that uses the
     lock has it. */
  bool unsure;
  atomic_ullong turn; /* of the last refresh that was sent */
  hl__lease_state state HL__GUARDED_BY(hl__manager_mutex);
  hl__span span HL__GUARDED_BY(hl__manager_mutex); /* set by who begins it */
  /* Of the manager's leases while it is HELD, then perhaps of its drops. */
  hl__list node HL__GUARDED_BY(hl__manager_mutex);
  int64_t end HL__GUARDED_BY(hl__manager_mutex); /* hl__boot_ms */
  /* When the keeper has it refreshed; hl__boot_ms. */
  int64_t due HL__GUARDED_BY(hl__manager_mutex);
  bool busy HL__GUARDED_BY(hl__manager_mutex); /* a refresh is under way */
  bool told HL__GUARDED_BY(hl__manager_mutex); /* that it is over was counted */
  /* Of the drops: its grant was not answered. */
  bool recalls HL__GUARDED_BY(hl__manager_mutex);
  hl_error loss HL__GUARDED_BY(hl__manager_mutex); /* LOST: why */
  hl__task refresh, drop;
  hl__sent sent; /* a release that is not answered yet */
  char owner[HL_OWNER_MAX + 1];
} hl__lease;

/* False: there are no random numbers. */
bool hl__random_fill(void *data, size_t size);
/* A new one, with an id, a secret and a holder of its own. options->ttl > 0, and checked.
   HL_OK, HL_ENOMEM, HL_ESTORE (no random numbers). */
int hl__lease_new(hl_manager *manager, const hl_options *options, hl__lease **lease,
                  hl_error *error);
/* Before another try of a grant that was not answered: that one may still be carried out, or
   its recall, and must not meet what this one makes. adopts: the id and the secret are those
   of a text. HL_OK, HL_ESTORE. */
int hl__lease_redraw(hl__lease *lease, bool adopts, hl_error *error);
/* The owner's reference. NULL is fine. */
void hl__lease_unref(hl__lease *lease);
/* In a forked child: the parent's copy. */
void hl__lease_forget(hl__lease *lease);

/* The store has granted it. False: it is over already, or the manager is closed; the record
   is to be dropped. */
bool hl__lease_begin(hl__lease *lease, const hl_grant *grant) HL__REQUIRES(hl__manager_mutex);
/* Deletes the record of a granted lease that its caller does not want, over any connection, even of a closed
   manager. */
void hl__lease_undo(hl__lease *lease) HL__REQUIRES(hl__manager_mutex);
/* The same of one whose grant was asked for, and not answered. HL_OK: there is none; another
   try needs another name. Else, also where the deadline is over, it is not known, and a worker goes
   on: no caller waits for a server that hangs beyond its timeout. */
int hl__lease_recall(hl__lease *lease, int64_t deadline) HL__REQUIRES(hl__manager_mutex);
/* Waits up to a second until the deletions that were queued so far are done (put: manager->drops_put
   then). */
void hl__leases_drops_await(hl_manager *manager, uint64_t put, int64_t deadline)
    HL__REQUIRES(hl__manager_mutex);
/* HL_ELOST: the grant was over when it came. */
int hl__lease_late_error(hl_error *error);
/* HL_EUNSUPPORTED. what: "a lease cannot be had" */
int hl__lease_unsupported(const hl_manager *manager, hl_error *error);

/* Milliseconds for which it is held for sure. */
int64_t hl__lease_left(hl__lease *lease);
/* HL_HELD, HL_OVER, HL_LOST, HL_RELEASED */
hl_lock_state hl__lease_inspect(hl__lease *lease);
/* Why it is lost, or over. */
void hl__lease_loss(hl__lease *lease, hl_error *error);

/* HL_OK: it is HELD, or over; HL_ELOST, HL_ERELEASED. */
int hl__lease_use(hl__lease *lease, hl_error *error) HL__REQUIRES(hl__manager_mutex);
/* It is believed until then, if not for less. */
void hl__lease_until(hl__lease *lease, int64_t end) HL__REQUIRES(hl__manager_mutex);
/* The store has said HL_ELOST, and why. */
void hl__lease_lost(hl__lease *lease, const hl_error *why) HL__REQUIRES(hl__manager_mutex);
/* As hl_lock_refresh; ttl 0: its own. */
int hl__lease_refresh(hl__lease *lease, int64_t ttl, hl_error *error);
/* Asks the store. HL_OK, HL_ELOST, HL_ERELEASED; what a connection says: then nobody
   knows. */
int hl__lease_check(hl__lease *lease, hl_error *error);
/* Gives it back; once. HL_OK; HL_ELOST, when there was nothing to give back. Without confirm
   it does not block: where that cannot be done at once a worker does it, as one also does
   after any other failure. */
int hl__lease_release(hl__lease *lease, bool confirm, hl_error *error);
/* It is nobody's in this process any more, and goes on. HL_OK; HL_ELOST, HL_ERELEASED: it
   was not held. */
int hl__lease_leave(hl__lease *lease, hl_error *error);

/* Counts those that are over and were not counted. In a forked child: none. */
void hl__leases_inspect(hl_manager *manager);
/* The keeper: has those refreshed whose time has come. Returns when it wants to be called
   next (hl__now_ms), or HL_FOREVER. */
int64_t hl__leases_keep(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* The manager is about to be closed: gives back those that are to be released so, and what was
   released before, and leaves the others. `waits`: for the answer, for a second at most. Otherwise, and then,
   a worker goes on. The mutex is given back meanwhile. */
void hl__leases_close(hl_manager *manager, bool waits) HL__REQUIRES(hl__manager_mutex);

#endif
