/*
 * extend.c - see extend.h.
 */
#include "extend.h"

#include "error.h"
#include "plan.h"

#include <stdlib.h>

int hl__extension_init(hl__extension *self, hl_lock *lock,
                       const hl_plan *plan, hl_error *error) {
  size_t n;
  *self = (hl__extension){0};
  hl_plan *asked = hl_plan_copy(plan), *whole = hl_plan_copy(lock->plan);
  self->plan = asked;
  self->whole = whole;
  if (!asked || !whole || !hl__plan_append(whole, asked))
    return hl__error_memory(error);
  hl__plan_order(whole);
  (void)hl__plan_rows(asked, &n);
  self->missing = malloc(n * sizeof *self->missing);
  if (!self->missing) return hl__error_memory(error);
  self->missing_count = hl__plan_missing(asked, lock->plan, self->missing);
  self->token = lock->hold.token;
  return HL_OK;
}

void hl__extension_commit(hl__extension *self, hl_lock *lock) {
  const hl_plan *before = lock->plan;
  lock->plan = self->whole;
  self->whole = before;
  lock->hold.token = self->token;
}

void hl__extension_dispose(hl__extension *self) {
  free(self->missing);
  hl_plan_free(self->whole);
  hl_plan_free(self->plan);
}
