/*
 * start.h - what a program asks for: an acquisition, an import, or a call on a lock that it holds.
 * The program's thread makes the call, or a pending is started for it.
 */
#ifndef HIERLOCK_START_H
#define HIERLOCK_START_H

#include "call.h"

/* A program's call on a lock that it holds. */
typedef struct hl__wish {
  hl__call_kind kind;        /* not HL__ACQUIRE */
  const hl_plan *plan;       /* HL__EXTEND */
  const hl_options *options; /* HL__EXTEND, HL__UPGRADE: NULL is the default; HL__TO_LEASE */
  int64_t ttl;               /* HL__REFRESH; 0: the lease's own */
} hl__wish;

/* Makes the call, and blocks: pending is NULL. Otherwise starts it, unless its outcome shows at
   once; then *pending is NULL. Returns what the hl_lock_ function of that name says. */
int hl__lock_call(hl_lock *lock, const hl__wish *wish, hl_pending **pending, hl_error *error);

/* As hl_acquire, where the store cannot block and grants the lock without a wait. False: it does
   not, or the arguments are wrong; then nothing has happened, and nothing was counted. */
bool hl__acquire_at_once(hl_manager *manager, const hl_plan *plan, const hl_options *given,
                         hl_lock **result);

/* As hl_start, with options that hl__options_take has read. whole: the group that the pending
   joins, or NULL. */
int hl__start(hl_manager *manager, const hl_plan *plan, const hl_options *given, hl_pending *whole,
              hl_pending **result, hl_error *error);

#endif
