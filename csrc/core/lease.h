/*
 * lease.h - the second kind of hold: a lease. The store has a record of it, which ends at a time of
 * the store's clock. No connection is pinned. This file says what its owner may believe of it, and
 * how it is renewed, given back or found lost.
 *
 * Belief. The store keeps the record until (the time at which it read the last refresh) + ttl. The
 * store cannot have read the refresh before it was sent. So the lease is surely held until `end`:
 * (the time of sending the last answered refresh) + ttl, by a clock that goes on while the machine
 * sleeps. After that the lease is over, as far as its owner knows. The lease may still be unbroken,
 * as other requests delete its record only if they want its rows. A refresh tells: if the record is
 * there, no other request has had the rows since, and the lease is held again.
 */
#ifndef HIERLOCK_LEASE_H
#define HIERLOCK_LEASE_H

#include "list.h"
#include "manager.h"

typedef enum hl__lease_state {
  HL__LEASE_NEW,  /* requested, not granted yet */
  HL__LEASE_HELD, /* or over: see `end` */
  HL__LEASE_LOST, /* the store says so */
  /* By the close of its manager. What became of the record is not known; with auto_release it is
     being dropped, or that has failed. */
  HL__LEASE_CLOSED,
  HL__LEASE_ENDED /* released, exported, or abandoned */
} hl__lease_state;

typedef struct hl__lease {
  atomic_uint references; /* of its lock or call, and its tasks */
  hl_manager *manager;
  bool refreshes, releases; /* auto_refresh, auto_release */
  /* Id and secret come from a text, which another process may have, too. Constant. */
  bool imported;
  hl_lease_terms terms; /* constant once granted, except `place`, `token`, `again` */
  atomic_ullong turn;   /* of the last refresh sent */
  hl__lease_state state HL__GUARDED_BY(hl__manager_mutex);
  hl__span span HL__GUARDED_BY(hl__manager_mutex); /* set by the caller of hl__lease_begin */
  /* In the manager's `leases` while HELD, later perhaps in its `drops`. */
  hl__list node HL__GUARDED_BY(hl__manager_mutex);
  int64_t end HL__GUARDED_BY(hl__manager_mutex); /* hl__boot_ms */
  /* When the keeper has it refreshed; hl__boot_ms. */
  int64_t due HL__GUARDED_BY(hl__manager_mutex);
  bool busy HL__GUARDED_BY(hl__manager_mutex); /* a refresh is running */
  bool told HL__GUARDED_BY(hl__manager_mutex); /* that it is over was counted */
  /* In `drops`: its grant was not answered. */
  bool recalls HL__GUARDED_BY(hl__manager_mutex);
  hl_error loss HL__GUARDED_BY(hl__manager_mutex); /* LOST: why */
  hl__task refresh, drop;
  hl__sent sent; /* a release not answered yet */
  char owner[HL_OWNER_MAX + 1];
} hl__lease;

/* Fills data with random bytes. False: the system gives none. */
bool hl__random_fill(void *data, size_t size);
/* Makes a lease with a new id, secret and holder. options->ttl is > 0, and checked. HL_OK,
   HL_ENOMEM, HL_ESTORE (no random numbers). */
int hl__lease_new(hl_manager *manager, const hl_options *options, hl__lease **lease,
                  hl_error *error);
/* Draws new names before another try of a grant that was not answered: the earlier try, or its
   recall, may still be carried out, and must not meet the record of the new try. An import keeps id
   and secret. HL_OK, HL_ESTORE. */
int hl__lease_redraw(hl__lease *lease, hl_error *error);
/* Gives back the owner's reference. NULL is fine. */
void hl__lease_unref(hl__lease *lease);

/* Begins the lease that the store has granted. False: it is over already, or the manager is closed;
   then the caller must have the record deleted. */
bool hl__lease_begin(hl__lease *lease, const hl_grant *grant) HL__REQUIRES(hl__manager_mutex);
/* Deletes the record of a granted lease that its caller does not want, over any connection, even if
   the manager is closed. */
void hl__lease_undo(hl__lease *lease) HL__REQUIRES(hl__manager_mutex);
/* Like hl__lease_undo, but for a grant that was not answered. HL_OK: there is no record, and
   another try needs a new name. Any other status, also if the deadline passes: it is not known, and
   a worker goes on. So no caller waits beyond its timeout for a server that hangs. */
int hl__lease_recall(hl__lease *lease, int64_t deadline) HL__REQUIRES(hl__manager_mutex);
/* Waits up to a second for the deletions queued so far (put: manager->drops_put at that time). */
void hl__leases_drops_await(hl_manager *manager, uint64_t put, int64_t deadline)
    HL__REQUIRES(hl__manager_mutex);
/* HL_ELOST: the grant was over when it came. */
int hl__lease_late_error(hl_error *error);
/* HL_EUNSUPPORTED. */
int hl__lease_unsupported(const hl_manager *manager, hl_error *error);

/* Milliseconds for which the lease is surely held. */
int64_t hl__lease_left(hl__lease *lease);
/* HL_HELD, HL_OVER, HL_LOST, HL_RELEASED */
hl_lock_state hl__lease_inspect(hl__lease *lease);
/* Says in *error why the lease is lost, or over. */
void hl__lease_loss(hl__lease *lease, hl_error *error);

/* HL_OK: the lease is HELD, or over; HL_ELOST, HL_ERELEASED. */
int hl__lease_use(hl__lease *lease, hl_error *error) HL__REQUIRES(hl__manager_mutex);
/* As hl__lease_use, but HL_ELOST also when the lease is over. */
int hl__lease_stands(hl__lease *lease, hl_error *error) HL__REQUIRES(hl__manager_mutex);
/* Sets the end of the lease to `end`, unless it is later already. */
void hl__lease_until(hl__lease *lease, int64_t end) HL__REQUIRES(hl__manager_mutex);
/* Ends the lease, of which the store has said HL_ELOST, and why. */
void hl__lease_lost(hl__lease *lease, const hl_error *why) HL__REQUIRES(hl__manager_mutex);
/* Like hl_lock_refresh. ttl 0: the lease's own. */
int hl__lease_refresh(hl__lease *lease, int64_t ttl, hl_error *error);
/* Asks the store whether the lease stands. HL_OK, HL_ELOST, HL_ERELEASED; else a status of the
   connection: then it is not known. */
int hl__lease_check(hl__lease *lease, hl_error *error);
/* Gives the lease back; once. HL_OK; HL_ELOST: there was nothing to give back. Without confirm it
   does not block. If it cannot send at once, or fails otherwise, a worker goes on. Of a lease that
   ended with its manager: gives it back if the close left it to itself; with confirm, asks the
   store, unless the close has heard that it is gone, or was lost before. */
int hl__lease_release(hl__lease *lease, bool confirm, hl_error *error);
/* Leaves the lease to itself: this process has no part in it any more. HL_OK; HL_ELOST,
   HL_ERELEASED: it was not held. */
int hl__lease_leave(hl__lease *lease, hl_error *error);

/* Counts the leases that are over and not yet counted as lost. A forked child has none. */
void hl__leases_inspect(hl_manager *manager);
/* The keeper calls it: has workers refresh the leases that are due. Returns when to call it next
   (hl__now_ms), or HL_FOREVER. */
int64_t hl__leases_keep(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* Called before the manager is closed. Gives back the leases with auto_release and those released
   before, and leaves the others to themselves. waits: for the answers, up to a second; after that,
   or without it, a worker goes on. Gives the mutex back meanwhile. */
void hl__leases_close(hl_manager *manager, bool waits) HL__REQUIRES(hl__manager_mutex);

#endif
