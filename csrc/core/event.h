/*
 * event.h - what happens to the calls, holds and connections of a manager, said in
 * one place once. The counters of hl_manager_stats are made of it.
 */
#ifndef HIERLOCK_EVENT_H
#define HIERLOCK_EVENT_H

#include "hierlock.h"
#include "mutex.h"

typedef enum hl__event_kind {
  HL__CALL_BEGINS,     /* somebody begins to wait for a grant */
  HL__CALL_ENDS,       /* an acquisition: `status`, after `ms` */
  HL__EXTEND_ENDS,     /* more locks for a hold: `status` */
  HL__HOLD_BEGINS,     /* granted */
  HL__HOLD_GIVEN_UP,   /* granted, but nobody wanted it any more: it counts as
                          acquired and released */
  HL__HOLD_RELEASED,
  HL__HOLD_LOST,
  HL__HOLD_ENDS,       /* a victim: the store has given everything back */
  HL__CONNECTION_REPAIRED /* one had gone stale in the pool: another is made */
} hl__event_kind;

void hl__event(hl_stats *stats, hl__event_kind kind, int status, int64_t ms);

#endif
