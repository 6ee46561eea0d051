/*
 * event.h - what happens to the calls, holds and connections of a manager, said in
 * one place once. The counters of hl_manager_stats are made of it. Where something ends that
 * took its time, that is said, too: the histograms of hl_manager_histograms are made of it.
 * Both are guarded by the manager's mutex, which whoever says it holds anyhow: so they need no
 * atomics, and fit each other.
 */
#ifndef HIERLOCK_EVENT_H
#define HIERLOCK_EVENT_H

#include "hierlock.h"
#include "mutex.h"

typedef enum hl__event_kind {
  HL__CALL_BEGINS,   /* somebody begins to wait for a grant */
  HL__CALL_ENDS,     /* an acquisition: `status`, after `ms` */
  HL__EXTEND_ENDS,   /* more locks for a hold: `status` */
  HL__HOLD_BEGINS,   /* granted */
  HL__HOLD_GIVEN_UP, /* granted, but nobody wanted it any more: it counts as
                          acquired and released */
  HL__HOLD_RELEASED,
  HL__HOLD_LOST,
  HL__HOLD_ENDS,          /* a victim: the store has given everything back */
  HL__CONNECTION_REPAIRED /* one had gone stale in the pool: another is made */
} hl__event_kind;

void hl__event(hl_stats *stats, hl__event_kind kind, int status, int64_t ms);

/* Since when something is held (hl__now_us), and on which level: that of the deepest target
   of the call that got it. */
typedef struct hl__span {
  int64_t since;
  unsigned level;
} hl__span;

/* Something took so long. */
void hl__histogram_add(hl_histogram *histogram, int64_t us);

#endif
