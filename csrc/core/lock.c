/*
 * lock.c - the calls on a lock that block, and what it tells of itself.
 */
#include "lock.h"

#include "call.h"
#include "error.h"
#include "export.h"
#include "fork.h"
#include "plan.h"

#include <stdlib.h>
#include <string.h>

hl_lock *hl__lock_new(hl_manager *manager, const hl_plan *plan) {
  hl_lock *lock = calloc(1, sizeof *lock);
  if (!lock) return NULL;
  lock->plan = hl_plan_copy(plan);
  if (!lock->plan) {
    free(lock);
    return NULL;
  }
  lock->generation = hl__fork_generation();
  lock->hold.manager = manager;
  atomic_fetch_add(&manager->references, 1u);
  return lock;
}

int hl__lock_lease(hl_lock **lock, const hl_options *options,
                   hl_error *error) {
  if (!*lock) return hl__error_memory(error);
  int status =
      hl__lease_new((*lock)->hold.manager, options, &(*lock)->lease, error);
  if (status) {
    hl_lock_free(*lock);
    *lock = NULL;
  }
  return status;
}

int hl_acquire(hl_manager *manager, const hl_plan *plan,
               const hl_options *given, hl_lock **result, hl_error *error) {
  hl_options options;
  hl__call call;
  *result = NULL;
  int status = hl__options_take(given, &options, error);
  if (status == HL_OK)
    status = hl__options_check(&options, manager, plan, error);
  if (status) return status;
  hl_lock *lock = hl__lock_new(manager, plan);
  if (!lock) return hl__error_memory(error);
  if (options.ttl && (status = hl__lock_lease(&lock, &options, error)) != HL_OK)
    return status;
  hl__call_init(&call, manager, HL__ACQUIRE, lock, &options);
  status = hl__call_make(&call, error);
  if (status == HL_OK)
    *result = lock;
  else
    hl_lock_free(lock);
  return status;
}

/* --------------------------------------------------------------- holding */

static bool is_foreign(const hl_lock *lock) {
  return lock->generation != hl__fork_generation();
}

static int foreign_error(hl_error *error) {
  return hl__error(error, HL_ERELEASED,
                   "the lock belongs to the parent of this process");
}

int hl__lock_occupied_error(hl_error *error) {
  return hl__error(error, HL_EMISUSE,
                   "the lock is in use by a call that has not returned yet");
}

bool hl_lock_is_held(hl_lock *lock) { return hl_lock_remaining(lock) > 0; }

int64_t hl_lock_remaining(hl_lock *lock) {
  if (is_foreign(lock) || lock->released) return 0;
  if (lock->lease) return hl__lease_left(lock->lease);
  return hl__lock_is_occupied(lock) ? hl__hold_left_busy(&lock->hold)
                                    : hl__hold_left(&lock->hold);
}

hl_lock_state hl_lock_look(hl_lock *lock) {
  if (is_foreign(lock)) return HL_FOREIGN;
  if (hl__lock_is_occupied(lock))
    return lock->released ? HL_RELEASED : HL_IN_USE;
  if (lock->lease)
    return lock->released ? HL_RELEASED : hl__lease_look(lock->lease);
  if (hl_lock_is_held(lock)) return HL_HELD;
  return lock->hold.lost ? HL_LOST : HL_RELEASED;
}

int hl_lock_check(hl_lock *lock, hl_error *error) {
  if (is_foreign(lock)) return foreign_error(error);
  if (hl__lock_is_occupied(lock)) return hl__lock_occupied_error(error);
  return hl__lock_check(lock, error);
}

int hl__lock_check(hl_lock *lock, hl_error *error) {
  return lock->lease ? hl__lease_check(lock->lease, error)
                     : hl__hold_check(&lock->hold, error);
}

void hl_lock_loss(hl_lock *lock, hl_error *error) {
  (void)hl__error(error, HL_ELOST, "the lock was lost while it was held");
  if (lock->lease && !is_foreign(lock)) hl__lease_loss(lock->lease, error);
}

int hl_lock_extend(hl_lock *lock, const hl_plan *plan,
                   const hl_options *given, hl_error *error) {
  hl_options options;
  hl__extension extension;
  hl__call call;
  if (is_foreign(lock)) return foreign_error(error);
  if (hl__lock_is_occupied(lock)) return hl__lock_occupied_error(error);
  if (lock->lease)
    return hl__error(error, HL_EUNSUPPORTED,
                     "a lease cannot be extended by more targets; acquire all of "
                     "them at once");
  hl_manager *manager = lock->hold.manager;
  int status = hl__options_take(given, &options, error);
  if (status == HL_OK)
    status = hl__options_check(&options, manager, plan, error);
  if (status) return status;
  status = hl__extension_init(&extension, lock, plan, error);
  if (status == HL_OK) {
    hl__call_init(&call, manager, HL__EXTEND, lock, &options);
    call.extension = &extension;
    status = hl__call_extend(&call, error);
  }
  if (status == HL_OK) hl__call_commit(&call);
  hl__extension_dispose(&extension);
  return status;
}

/* ---------------------------------------------------------------- leases */

static int not_a_lease(hl_error *error) {
  return hl__error(error, HL_EUNSUPPORTED,
                   "it is a session lock, not a lease: acquire it with a ttl");
}

int hl_lock_refresh(hl_lock *lock, int64_t ttl, hl_error *error) {
  if (ttl < 0 || ttl > HL_TTL_MAX)
    return hl__error(error, HL_EMISUSE,
                     "ttl must be 0.001 to 315360000 seconds");
  if (is_foreign(lock)) return foreign_error(error);
  if (hl__lock_is_occupied(lock)) return hl__lock_occupied_error(error);
  if (!lock->lease) return not_a_lease(error);
  return hl__lease_refresh(lock->lease, ttl, error);
}

int hl_lock_to_lease(hl_lock *lock, const hl_options *given,
                     hl_error *error) {
  hl_options options;
  hl__call call;
  int status = hl__options_take(given, &options, error);
  if (status == HL_OK) status = hl__lease_options_check(&options, error);
  if (status) return status;
  if (is_foreign(lock)) return foreign_error(error);
  if (hl__lock_is_occupied(lock)) return hl__lock_occupied_error(error);
  if (lock->released)
    return hl__error(error, HL_ERELEASED, "the lock has been released");
  hl__call_init(&call, lock->hold.manager, HL__TO_LEASE, lock, &options);
  status = hl__call_to_lease_new(&call, error);
  if (status == HL_OK) status = hl__call_to_lease(&call, error);
  hl__call_commit(&call);
  return status;
}

static int export_check(hl_lock *lock, hl_error *error) {
  if (is_foreign(lock)) return foreign_error(error);
  if (hl__lock_is_occupied(lock)) return hl__lock_occupied_error(error);
  return lock->lease ? HL_OK : not_a_lease(error);
}

int hl_lock_text(hl_lock *lock, char **text, hl_error *error) {
  *text = NULL;
  int status = export_check(lock, error);
  if (status) return status;
  *text = hl__export_write(&lock->lease->terms, lock->plan);
  return *text ? HL_OK : hl__error_memory(error);
}

int hl_lock_export(hl_lock *lock, char **text, hl_error *error) {
  /* Made before it is left, as there may be no memory. */
  int status = text ? hl_lock_text(lock, text, error)
                    : export_check(lock, error);
  if (status == HL_OK) status = hl__lease_leave(lock->lease, error);
  if (status == HL_OK) {
    lock->released = true;
  } else if (text) {
    free(*text);
    *text = NULL;
  }
  return status;
}

int hl__import_begin(hl_manager *manager, const char *text, size_t size,
                     const hl_options *given, hl_options *options,
                     hl_lock **lock, hl_error *error) {
  hl_lease_terms terms = {0};
  hl_plan *plan = NULL;
  *lock = NULL;
  int status = hl__options_take(given, options, error);
  if (status == HL_OK && options->ttl)
    status = hl__lease_options_check(options, error);
  if (status == HL_OK)
    status = hl__export_read(text, size, manager->layout, &terms, &plan, error);
  if (status) return status;
  options->timeout = 0;
  options->label_size = 0;
  options->owner = NULL; /* the record has it */
  if (!options->ttl) options->ttl = terms.ttl;
  *lock = hl__lock_new(manager, plan);
  status = hl__lock_lease(lock, options, error);
  if (status == HL_OK) {
    hl_lease_terms *own = &(*lock)->lease->terms;
    memcpy(own->id, terms.id, sizeof own->id);
    memcpy(own->secret, terms.secret, sizeof own->secret);
    own->place = terms.place;
  }
  hl_plan_free(plan);
  return status;
}

int hl_import(hl_manager *manager, const char *text, size_t size,
              const hl_options *given, hl_lock **result, hl_error *error) {
  hl_options options;
  hl__call call;
  hl_lock *lock;
  *result = NULL;
  int status =
      hl__import_begin(manager, text, size, given, &options, &lock, error);
  if (status) return status;
  hl__call_init(&call, manager, HL__ACQUIRE, lock, &options);
  call.adopts = true;
  status = hl__call_make(&call, error);
  if (status == HL_OK)
    *result = lock;
  else
    hl_lock_free(lock);
  return status;
}

/* ------------------------------------------------------------- releasing */

/* The lock is occupied: its occupant releases it, and frees it, perhaps, as soon as he
   has ended. False: he has just ended, and the caller does that himself. */
static bool leave_to_occupant(hl_lock *lock, bool free_it) {
  hl_manager *manager = lock->hold.manager;
  if (!hl__lock_is_occupied(lock)) return false;
  hl__manager_mutex_lock(manager);
  hl__occupant *occupant = atomic_load(&lock->occupant);
  bool ended = occupant && occupant->abandon(occupant, free_it);
  hl__manager_mutex_unlock(manager);
  if (ended) occupant->end(occupant);
  return occupant != NULL;
}

int hl_lock_release(hl_lock *lock, bool confirm, hl_error *error) {
  if (is_foreign(lock)) return foreign_error(error);
  if (lock->released) return HL_OK;
  lock->released = true;
  if (leave_to_occupant(lock, false)) return HL_OK;
  return hl__lock_release(lock, confirm, error);
}

int hl__lock_release(hl_lock *lock, bool confirm, hl_error *error) {
  return lock->lease ? hl__lease_release(lock->lease, confirm, error)
                     : hl__hold_release(&lock->hold, confirm, error);
}

int hl_lock_close(hl_lock *lock, hl_error *error) {
  if (is_foreign(lock)) return foreign_error(error);
  if (hl__lock_releases(lock)) return hl_lock_release(lock, false, error);
  if (lock->released) return HL_OK;
  lock->released = true;
  if (hl__lock_is_occupied(lock)) return HL_OK; /* hl_lock_free leaves it */
  int status = hl__lease_leave(lock->lease, error);
  return status == HL_ERELEASED ? HL_OK : status;
}

static void lease_end(const hl_lock *lock) {
  if (is_foreign(lock)) {
    hl__lease_forget(lock->lease);
    return;
  }
  if (lock->lease->releases)
    (void)hl__lease_release(lock->lease, false, NULL);
  else
    (void)hl__lease_leave(lock->lease, NULL);
  hl__lease_unref(lock->lease);
}

void hl_lock_free(hl_lock *lock) {
  if (!lock || leave_to_occupant(lock, true)) return;
  /* A connection of the parent's is the parent's: see hl__manager_renew. */
  if (lock->lease)
    lease_end(lock);
  else if (lock->hold.connection && !is_foreign(lock))
    (void)hl__hold_release(&lock->hold, false, NULL);
  hl_plan_free(lock->plan);
  hl__manager_leave(lock->hold.manager);
  free(lock);
}

/* ------------------------------------------------------------- observing */

hl_mode hl_lock_mode(const hl_lock *lock) { return hl_plan_mode(lock->plan); }

unsigned hl_lock_level(const hl_lock *lock) {
  return hl__plan_level(lock->plan);
}

int64_t hl_lock_waited(const hl_lock *lock) { return lock->waited; }

hl_kind hl_lock_kind(const hl_lock *lock) {
  return lock->lease ? HL_LEASE : HL_SESSION;
}

uint64_t hl_lock_token(const hl_lock *lock) { return lock->hold.token; }

const hl_plan *hl_lock_plan(const hl_lock *lock) { return lock->plan; }
