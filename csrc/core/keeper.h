/*
 * keeper.h - one thread for each manager whose store gives up what it hears nothing
 * of, or which has pendings in line or leases to refresh. See keeper.c for what it does.
 */
#ifndef HIERLOCK_KEEPER_H
#define HIERLOCK_KEEPER_H

#include "hierlock.h"
#include "mutex.h"

/* Of a manager. */
typedef struct hl__keeper {
  bool runs, stops;
  int64_t next;          /* when it will look next; hl__now_ms */
  pthread_cond_t wakeup; /* look sooner */
  pthread_t thread;      /* while it runs, and then whoever stops it */
} hl__keeper;

/* Starts it unless it runs, or the manager is closed. HL_OK; HL_BUSY: no thread can be
   had. */
int hl__keeper_start(hl_manager *manager, hl_error *error) HL__REQUIRES(hl__manager_mutex);
/* Ends it and waits for its end; no mutex is held. */
void hl__keeper_stop(hl_manager *manager);

#endif
