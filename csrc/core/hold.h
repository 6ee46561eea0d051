/*
 * hold.h - a grant of the store: rows, for as long as their connection stands and the store hears
 * of it in time. A hold pins its connection. This file says what its owner may believe of it, and
 * how it is given back or found lost. Neither the request nor the lock is known here.
 */
#ifndef HIERLOCK_HOLD_H
#define HIERLOCK_HOLD_H

#include "manager.h"

typedef struct hl__hold {
  hl_manager *manager;        /* the lock's reference */
  hl__connection *connection; /* HELD or ENDED; NULL: nothing is held */
  uint64_t token;
  hl__span span; /* its connection's */
  bool lost;     /* found lost */
  /* A worker runs a call on the hold. Until the call ends, the owner of the lock reads the fields
     below instead of the connection, which is the worker's. */
  bool busy HL__GUARDED_BY(hl__manager_mutex);
  /* The store keeps the rows at least until then. hl__boot_ms; HL_FOREVER. 0: the session was
     interrupted, and may have ended. */
  int64_t kept_until HL__GUARDED_BY(hl__manager_mutex);
  /* The connection whose session can say (`told`) whether the server has sent something. NULL:
     none. */
  hl__connection *watched HL__GUARDED_BY(hl__manager_mutex);
} hl__hold;

/* Turns a BUSY connection, which was granted rows on that level, into a HELD one of `owner`. */
void hl__hold_begin(hl__hold *hold, hl__connection *connection, const hl_grant *grant,
                    pthread_t owner, unsigned level) HL__REQUIRES(hl__manager_mutex);

/* Checks the hold, and ends it if it is lost. HL_OK: it is held as far as can be told, and the
   caller has the mutex of its connection. HL_ELOST, HL_ERELEASED: it is not held, and has no
   connection any more. Only the thread that uses the lock calls it. */
int hl__hold_use(hl__hold *hold, hl_error *error) HL__ACQUIRES_IF_0(hl__connection_mutex);
/* Ends the hold, as a store call failed for that reason. Returns HL_ELOST. Hold no mutex. */
int hl__hold_lose(hl__hold *hold, const hl_error *reason, hl_error *error);
/* Asks the store, and waits for its answer. HL_OK, HL_ELOST, HL_ERELEASED. */
int hl__hold_check(hl__hold *hold, hl_error *error);
/* Gives all rows back; with confirm, waits for the answer. HL_OK, also if that was done before;
   HL_ELOST. HL_ECONNECTION: hl_manager_close did that at a server, and did not wait. */
int hl__hold_release(hl__hold *hold, bool confirm, hl_error *error);
/* Makes the rows a lease's, which they become in one step; the hold has no rows then. HL_OK;
   HL_ELOST, HL_ERELEASED; after any other status it holds its rows as before. */
int hl__hold_to_lease(hl__hold *hold, const hl_request *request, hl_grant *grant, hl_error *error);
/* Makes the upgraded rows shared, and keeps all others. HL_OK; HL_ELOST, HL_ERELEASED; after any
   other status nothing has changed. */
int hl__hold_downgrade(hl__hold *hold, const hl_request *request, hl_error *error);
/* Milliseconds for which the store surely keeps the rows; HL_FOREVER; 0: not held. */
int64_t hl__hold_left(hl__hold *hold);
/* Like hl__hold_left, but also while a worker uses the hold. Then 0 once its session was
   interrupted, or once the server has sent something that may say that the lock is lost. Waits
   up to 100 ms for the worker to read that. */
int64_t hl__hold_left_busy(hl__hold *hold);

/* Milliseconds for which the store keeps the rows of a connection. Model: lease.pml, BELIEVES. */
int64_t hl__connection_left(const hl_manager *manager, const hl__connection *connection);
/* Waits for the answer to the last sign of life, so that the session can be used; until the
   deadline, or until the hold would be lost anyhow. HL_OK, or as the store's settle. */
int hl__hold_settle(hl_manager *manager, hl__connection *connection, int64_t deadline,
                    hl_error *error) HL__REQUIRES(hl__connection_mutex);
/* Checks the session of a HELD connection without waiting: reads an answer that has come, then
   checks the session and the clock. HL_OK or HL_ECONNECTION. */
int hl__connection_check(hl_manager *manager, hl__connection *connection, hl_error *error)
    HL__REQUIRES(hl__connection_mutex);
/* Ends the session of a HELD connection that is lost, or whose manager is closed. */
void hl__hold_end(hl_manager *manager, hl__connection *connection, bool lost)
    HL__REQUIRES(hl__manager_mutex, hl__connection_mutex);

#endif
