/*
 * keeper.h - one thread per manager, if its store gives up silent sessions, or if it has pendings
 * in line or leases to refresh. See keeper.c for its work.
 */
#ifndef HIERLOCK_KEEPER_H
#define HIERLOCK_KEEPER_H

#include "hierlock.h"
#include "mutex.h"

/* The keeper of a manager. */
typedef struct hl__keeper {
  bool runs, stops;
  int64_t next;          /* its next turn; hl__now_ms */
  pthread_cond_t wakeup; /* take a turn sooner */
  pthread_t thread;      /* valid while it runs, then for the thread that stops it */
} hl__keeper;

/* Starts the keeper, unless it runs or the manager is closed. HL_OK; HL_BUSY: no thread can be
   started. */
int hl__keeper_start(hl_manager *manager, hl_error *error) HL__REQUIRES(hl__manager_mutex);
/* Stops the keeper, and waits for its end. Hold no mutex. */
void hl__keeper_stop(hl_manager *manager);

#endif
