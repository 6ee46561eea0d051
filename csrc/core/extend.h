/*
 * extend.h - what an extend, an upgrade or a downgrade asks for, made before it blocks, so that it
 * cannot run out of memory afterwards; and what the lock becomes by it.
 */
#ifndef HIERLOCK_EXTEND_H
#define HIERLOCK_EXTEND_H

#include "lock.h"

typedef struct hl__extension {
  const hl_plan *plan;  /* a copy of the plan of the request */
  const hl_plan *whole; /* the lock's plan as it will be */
  hl_row *missing;      /* what the lock does not hold yet, in order */
  size_t missing_count;
  uint64_t token; /* the lock's as it will be */
  bool converts;  /* an upgrade or a downgrade */
} hl__extension;

/* To be disposed of after any outcome. HL_OK, HL_ENOMEM. */
int hl__extension_init(hl__extension *extension, hl_lock *lock, const hl_plan *plan,
                       hl_error *error);
/* Makes the extension of an upgrade or a downgrade; missing: the rows that change their mode. */
int hl__extension_convert(hl__extension *extension, hl_lock *lock, bool exclusive, hl_error *error);
/* Gives the lock what was granted. The thread that uses the lock calls it. */
void hl__extension_commit(hl__extension *extension, hl_lock *lock);
void hl__extension_dispose(hl__extension *extension);

#endif
