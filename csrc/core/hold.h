/*
 * hold.h - what the store has granted: rows, for as long as their connection stands
 * and the store hears of it in time. A hold pins its connection. What its owner may
 * believe of it, and how it is given back or found lost, is here; who asked for it, and
 * what for, is not.
 */
#ifndef HIERLOCK_HOLD_H
#define HIERLOCK_HOLD_H

#include "manager.h"

typedef struct hl__hold {
  hl_manager *manager;        /* the lock's reference */
  hl__connection *connection; /* HELD or ENDED; NULL: nothing is held any more */
  uint64_t token;
  hl__span span; /* its connection's */
  bool lost;     /* it was found lost */
  /* A call of a worker's is under way on it. Until its end the owner of the lock looks
     at the fields below instead of the connection, which is the worker's. */
  bool busy HL__GUARDED_BY(hl__manager_mutex);
  /* The store keeps it until then at least. hl__boot_ms; HL_FOREVER. 0: its session
     was interrupted, and may have ended. */
  int64_t kept_until HL__GUARDED_BY(hl__manager_mutex);
  /* Whose session to ask whether it has been told something; NULL: nobody's. */
  hl__connection *watched HL__GUARDED_BY(hl__manager_mutex);
} hl__hold;

/* A BUSY connection holds what was granted, on that level: it becomes HELD, of that
   thread's. */
void hl__hold_begin(hl__hold *hold, hl__connection *connection, const hl_grant *grant,
                    pthread_t owner, unsigned level) HL__REQUIRES(hl__manager_mutex);

/* Looks, and ends what is found lost. HL_OK: it is held as far as can be
   told, and the mutex of its connection is held, too. HL_ELOST, HL_ERELEASED: it is
   not, and there is no connection any more. Called by whoever uses the lock. */
int hl__hold_use(hl__hold *hold, hl_error *error) HL__ACQUIRES_IF_0(hl__connection_mutex);
/* Ends it, as a call of the store's failed for that reason. No mutex is held.
   Returns HL_ELOST. */
int hl__hold_lose(hl__hold *hold, const hl_error *reason, hl_error *error);
/* Asks the store, and waits for its answer. HL_OK, HL_ELOST, HL_ERELEASED. */
int hl__hold_check(hl__hold *hold, hl_error *error);
/* Gives everything back; when confirming, waits for the answer. HL_OK, also when
   that had been done already; HL_ELOST. */
int hl__hold_release(hl__hold *hold, bool confirm, hl_error *error);
/* Its rows become a lease's, with no moment in between, and it holds nothing any more. HL_OK;
   HL_ELOST, HL_ERELEASED; after anything else it holds what it held. */
int hl__hold_to_lease(hl__hold *hold, const hl_request *request, hl_grant *grant, hl_error *error);
/* What it made exclusive becomes shared; it keeps all else. HL_OK; HL_ELOST, HL_ERELEASED; after
   anything else it holds what it held. */
int hl__hold_downgrade(hl__hold *hold, const hl_request *request, hl_error *error);
/* Milliseconds for which the store is sure to keep it; HL_FOREVER; 0: it is not
   held. */
int64_t hl__hold_left(hl__hold *hold);
/* The same while a worker may be at it: 0 from the moment at which its session was
   interrupted, or at which something came from the store that may be its loss; that it
   is read is waited for, for 100 ms at most. */
int64_t hl__hold_left_busy(hl__hold *hold);

/* Milliseconds for which the store keeps what a connection holds. Model: lease.pml,
   BELIEVES. */
int64_t hl__connection_left(const hl_manager *manager, const hl__connection *connection);
/* Reads the answer to the last sign of life, waiting for it, so that the
   session can be used; until the deadline, but no longer than the lease lasts, for then the
   hold is lost anyhow. */
int hl__hold_settle(hl_manager *manager, hl__connection *connection, int64_t deadline,
                    hl_error *error) HL__REQUIRES(hl__connection_mutex);
/* Whether the session of a HELD connection stands, as far as can be told without
   waiting: reads an answer that has come, looks at the session and at the
   clock. */
int hl__connection_check(hl_manager *manager, hl__connection *connection, hl_error *error)
    HL__REQUIRES(hl__connection_mutex);
/* A HELD connection has been lost, or its manager is closed: ends its session. */
void hl__hold_end(hl_manager *manager, hl__connection *connection, bool lost)
    HL__REQUIRES(hl__manager_mutex, hl__connection_mutex);

#endif
