/*
 * extend.h - more locks in the transaction of one that is held, in three steps:
 * what can run out of memory first, then what blocks, then what the lock's user
 * sees. For extend.c and pending.c.
 */
#ifndef HIERLOCK_EXTEND_H
#define HIERLOCK_EXTEND_H

#include "lock.h"

typedef struct hl__extension {
  const hl_plan *plan;  /* a copy of what was asked for */
  const hl_plan *whole; /* the lock's plan as it will be */
  hl_row *missing;
  hl_request request;
  int64_t timeout;
  uint64_t token;
  char path[256];
} hl__extension;

/* options->label lives as long as the extension. To be disposed of after
   any outcome. HL_OK, HL_EMISUSE, HL_ENOMEM. */
int hl__extension_init(hl__extension *extension, hl_lock *lock,
                       const hl_plan *plan, const hl_options *options,
                       hl_error *error);
/* Blocks. pending: for which it is done; NULL: for the calling thread. */
int hl__extension_run(hl__extension *extension, hl_lock *lock,
                      hl_pending *pending, hl_error *error);
/* After it succeeded, by the lock's user. */
void hl__extension_commit(hl__extension *extension, hl_lock *lock);
void hl__extension_dispose(hl__extension *extension);

#endif
