/*
 * event.h - counts what happens to the calls, holds and connections of a manager, each in one
 * place, for hl_manager_stats; and how long waits and holds took, for hl_manager_histograms. The
 * manager's mutex guards both. The callers hold it anyhow, so the counters need no atomics, and fit
 * each other.
 */
#ifndef HIERLOCK_EVENT_H
#define HIERLOCK_EVENT_H

#include "hierlock.h"
#include "mutex.h"

typedef enum hl__event_kind {
  HL__CALL_BEGINS,   /* a call begins to wait for a grant */
  HL__CALL_ENDS,     /* an acquisition: `status`, after `ms` */
  HL__EXTEND_ENDS,   /* an extend: `status` */
  HL__HOLD_BEGINS,   /* granted */
  HL__HOLD_GIVEN_UP, /* granted, but no longer wanted: counts as acquired and released */
  HL__HOLD_RELEASED,
  HL__HOLD_LOST,
  HL__HOLD_ENDS,          /* a victim: the store has given its rows back; or it became, or was left
                             as, a lease */
  HL__CONNECTION_REPAIRED /* a stale connection of the pool was replaced */
} hl__event_kind;

void hl__event(hl_stats *stats, hl__event_kind kind, int status, int64_t ms);

/* Since when a lock is held (hl__now_us), and on which level: the deepest of its call's targets. */
typedef struct hl__span {
  int64_t since;
  unsigned level;
} hl__span;

/* Counts a duration. */
void hl__histogram_add(hl_histogram *histogram, int64_t us);

#endif
