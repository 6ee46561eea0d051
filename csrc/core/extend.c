/*
 * extend.c - see extend.h.
 */
#include "extend.h"

#include "error.h"
#include "plan.h"

#include <stdlib.h>

int hl__extension_init(hl__extension *self, hl_lock *lock, const hl_plan *plan, hl_error *error) {
  size_t n;
  *self = (hl__extension){0};
  hl_plan *asked = hl_plan_copy(plan), *whole = hl_plan_copy(lock->plan);
  self->plan = asked;
  self->whole = whole;
  if (!asked || !whole || !hl__plan_append(whole, asked)) return hl__error_memory(error);
  hl__plan_order(whole);
  (void)hl__plan_rows(asked, &n);
  self->missing = malloc(n * sizeof *self->missing);
  if (!self->missing) return hl__error_memory(error);
  self->missing_count = hl__plan_missing(asked, lock->plan, self->missing);
  self->token = lock->hold.token;
  return HL_OK;
}

int hl__extension_convert(hl__extension *self, hl_lock *lock, bool exclusive, hl_error *error) {
  size_t n;
  *self = (hl__extension){.converts = true};
  hl_plan *whole = hl__plan_converted(lock->plan, exclusive);
  self->whole = whole;
  self->plan = whole ? hl_plan_copy(whole) : NULL;
  /* The store may have more than the lock's plan says. */
  bool unsure = !exclusive && lock->unsure;
  hl_plan *most = unsure ? hl__plan_converted(lock->plan, true) : NULL;
  if (!self->plan || (unsure && !most)) {
    hl_plan_free(most);
    return hl__error_memory(error);
  }
  (void)hl__plan_rows(whole, &n);
  self->missing = malloc(n * sizeof *self->missing);
  if (self->missing)
    self->missing_count = exclusive
                              ? hl__plan_missing(whole, lock->plan, self->missing)
                              : hl__plan_missing(most ? most : lock->plan, whole, self->missing);
  hl_plan_free(most);
  if (!self->missing) return hl__error_memory(error);
  for (size_t i = 0; i < self->missing_count && !exclusive; i++) self->missing[i].mode = HL_SHARED;
  self->token = lock->hold.token;
  return HL_OK;
}

void hl__extension_commit(hl__extension *self, hl_lock *lock) {
  const hl_plan *before = lock->plan;
  lock->plan = self->whole;
  self->whole = before->housed ? NULL : before; /* the lock may be freed before the call */
  if (lock->hold.token != self->token) lock->hold.token = self->token;
}

void hl__extension_dispose(hl__extension *self) {
  free(self->missing);
  hl_plan_free(self->whole);
  hl_plan_free(self->plan);
}
