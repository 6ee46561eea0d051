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

/* ----------------------------------------------------------- who has it */

static bool is_foreign(const hl_lock *lock) { return lock->generation != hl__fork_generation(); }

/* A lease that was revoked may not know it yet: its own thread asks. */
static bool lease_stands(hl__lease *lease, int64_t ms, bool mine) {
  hl_error error;
  if (hl__lease_inspect(lease) != HL_HELD || !(lease->refreshes || hl__lease_left(lease) > ms))
    return false;
  return !mine || hl__lease_check(lease, &error) == HL_OK;
}

static bool held_stands(hl__held *held, int64_t ms, bool mine) {
  hl_lock *lock = HL__LIST_ENTRY(held, hl_lock, held);
  hl_manager *manager = lock->hold.manager;
  if (is_foreign(lock) || lock->released || hl__lock_is_occupied(lock)) return false;
  if (lock->lease) return lease_stands(lock->lease, ms, mine);
  if (mine) return hl_lock_is_held(lock);
  hl__manager_mutex_lock(manager);
  hl__connection *connection = lock->hold.connection;
  /* BUSY: its own thread waits in a call that extends it. */
  bool stands = connection && (connection->state == HL__HELD || connection->state == HL__BUSY);
  if (stands && connection->state == HL__HELD && hl__connection_mutex_trylock(connection) == 0) {
    stands = connection->session && hl__connection_check(manager, connection, NULL) == HL_OK;
    hl__connection_mutex_unlock(connection);
  }
  hl__manager_mutex_unlock(manager);
  return stands;
}

static hl__lease *held_lease(const hl__held *held) {
  return HL__LIST_ENTRY(held, const hl_lock, held)->lease;
}

int hl__lock_wait_begin(hl__wait *wait, hl_manager *manager, const hl_plan *plan,
                        const hl_options *options, int64_t timeout, const hl__held *own,
                        hl_error *error) {
  if (!hl__wait_counts(options, timeout) || manager->ops->traits.grants_all) return HL_OK;
  wait->agent = options->agent;
  wait->strand = options->strand;
  wait->manager = manager;
  wait->plan = plan;
  wait->own = own;
  wait->where = options->where;
  wait->timeout = timeout;
  hl__manager_renew(manager);
  return hl__wait_begin(wait, error);
}

/* Of a call that is to block its agent; counts what is refused. */
static int wait_begin(hl__wait *wait, const hl__call *call, const hl__held *own, hl_error *error) {
  hl_manager *manager = call->manager;
  const hl_plan *plan = call->extension ? call->extension->plan : call->lock->plan;
  int status = hl__lock_wait_begin(wait, manager, plan, &call->options, call->timeout, own, error);
  if (status == HL_OK) return HL_OK;
  hl__manager_mutex_lock(manager);
  hl__manager_event(manager, HL__CALL_BEGINS, 0, 0);
  hl__manager_event(manager, HL__CALL_ENDS, status, 0);
  hl__manager_mutex_unlock(manager);
  return status;
}

hl_lock *hl__lock_new(hl_manager *manager, const hl_plan *plan, const hl_options *options) {
  hl_lock *lock = calloc(1, sizeof *lock);
  if (!lock) return NULL;
  lock->plan = hl_plan_copy(plan);
  if (!lock->plan) {
    free(lock);
    return NULL;
  }
  lock->generation = hl__fork_generation();
  lock->hold.manager = manager;
  lock->held.manager = manager;
  lock->held.plan = &lock->plan;
  lock->held.strand = options->strand;
  lock->held.task = options->task;
  lock->held.kinds = options->kinds;
  lock->held.stands = held_stands;
  lock->held.lease = held_lease;
  lock->label_size =
      options->label_size < sizeof lock->label ? options->label_size : sizeof lock->label;
  if (lock->label_size) memcpy(lock->label, options->label, lock->label_size);
  if (options->where) {
    size_t size = strnlen(options->where, sizeof lock->held.where - 1);
    memcpy(lock->held.where, options->where, size);
  }
  atomic_fetch_add(&manager->references, 1u);
  return lock;
}

int hl__lock_lease(hl_lock **lock, const hl_options *options, hl_error *error) {
  if (!*lock) return hl__error_memory(error);
  int status = hl__lease_new((*lock)->hold.manager, options, &(*lock)->lease, error);
  if (status) {
    hl_lock_free(*lock);
    *lock = NULL;
  }
  return status;
}

int hl_acquire(hl_manager *manager, const hl_plan *plan, const hl_options *given, hl_lock **result,
               hl_error *error) {
  HL__UNCANCELLED;
  HL__NEEDS(manager && plan && result, error);
  hl_options options;
  hl__call call;
  *result = NULL;
  int status = hl__options_take(given, &options, error);
  if (status == HL_OK) status = hl__options_check(&options, manager, plan, error);
  if (status) return status;
  hl_lock *lock = hl__lock_new(manager, plan, &options);
  if (!lock) return hl__error_memory(error);
  if (options.ttl && (status = hl__lock_lease(&lock, &options, error)) != HL_OK) return status;
  hl__wait wait = {.blocks = true};
  hl__call_init(&call, manager, HL__ACQUIRE, lock, &options);
  status = wait_begin(&wait, &call, NULL, error);
  if (status == HL_OK) {
    status = hl__call_make(&call, error);
    hl__wait_end(&wait);
  }
  if (status == HL_OK) {
    hl__agent_keep(&lock->held, options.agent);
    *result = lock;
  } else {
    hl_lock_free(lock);
  }
  return status;
}

/* --------------------------------------------------------------- holding */

static int foreign_error(hl_error *error) {
  return hl__error(error, HL_ERELEASED, "the lock belongs to the parent of this process");
}

int hl__lock_occupied_error(hl_error *error) {
  return hl__error(error, HL_EMISUSE, "the lock is in use by a call that has not returned yet");
}

bool hl_lock_is_held(hl_lock *lock) { return hl_lock_remaining(lock) > 0; }

int64_t hl_lock_remaining(hl_lock *lock) {
  HL__UNCANCELLED;
  if (!lock) return 0;
  if (is_foreign(lock) || lock->released) return 0;
  if (lock->lease) return hl__lease_left(lock->lease);
  return hl__lock_is_occupied(lock) ? hl__hold_left_busy(&lock->hold) : hl__hold_left(&lock->hold);
}

hl_lock_state hl_lock_look(hl_lock *lock) {
  if (!lock) return HL_RELEASED;
  if (is_foreign(lock)) return HL_FOREIGN;
  if (hl__lock_is_occupied(lock)) return lock->released ? HL_RELEASED : HL_IN_USE;
  if (lock->lease) return lock->released ? HL_RELEASED : hl__lease_inspect(lock->lease);
  if (hl_lock_is_held(lock)) return HL_HELD;
  return lock->hold.lost ? HL_LOST : HL_RELEASED;
}

int hl_lock_check(hl_lock *lock, hl_error *error) {
  HL__UNCANCELLED;
  HL__NEEDS(lock, error);
  if (is_foreign(lock)) return foreign_error(error);
  if (hl__lock_is_occupied(lock)) return hl__lock_occupied_error(error);
  return hl__lock_check(lock, error);
}

int hl__lock_check(hl_lock *lock, hl_error *error) {
  return lock->lease ? hl__lease_check(lock->lease, error) : hl__hold_check(&lock->hold, error);
}

void hl_lock_loss(hl_lock *lock, hl_error *error) {
  if (!lock) {
    (void)hl__error_null(error, __func__);
    return;
  }
  (void)hl__error(error, HL_ELOST, "the lock was lost while it was held");
  if (lock->lease && !is_foreign(lock)) hl__lease_loss(lock->lease, error);
}

/* Whoever is the victim of a circle holds nothing any more, whether the store has found it
   or we. */
static int extend(hl__call *call, hl_error *error) {
  hl__wait wait = {.blocks = true};
  hl_lock *lock = call->lock;
  int status = wait_begin(&wait, call, &lock->held, error);
  if (status == HL_DEADLOCK) {
    hl__agent_forget(&lock->held);
    (void)hl__lock_release(lock, false, NULL);
  }
  if (status) return status;
  status = hl__call_extend(call, error);
  hl__wait_end(&wait);
  if (status == HL_OK) lock->held.kinds |= call->options.kinds;
  return status;
}

int hl_lock_extend(hl_lock *lock, const hl_plan *plan, const hl_options *given, hl_error *error) {
  HL__UNCANCELLED;
  HL__NEEDS(lock && plan, error);
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
  if (status == HL_OK) status = hl__options_check(&options, manager, plan, error);
  if (status) return status;
  status = hl__extension_init(&extension, lock, plan, error);
  if (status == HL_OK) {
    hl__call_init(&call, manager, HL__EXTEND, lock, &options);
    call.extension = &extension;
    status = extend(&call, error);
  }
  if (status == HL_OK) hl__call_commit(&call);
  hl__extension_dispose(&extension);
  return status;
}

/* -------------------------------------------------------------- converting */

int hl__lock_convert_check(hl_lock *lock, hl_error *error) {
  if (is_foreign(lock)) return foreign_error(error);
  if (hl__lock_is_occupied(lock)) return hl__lock_occupied_error(error);
  if (hl__plan_updates(lock->plan)) return HL_OK;
  return hl__error(error, HL_EMISUSE, "the lock is none for update: acquire it with that mode");
}

void hl__lock_relabel(const hl_lock *lock, hl_options *options) {
  options->label = lock->label;
  options->label_size = lock->label_size;
}

int hl_lock_upgrade(hl_lock *lock, const hl_options *given, hl_error *error) {
  HL__UNCANCELLED;
  HL__NEEDS(lock, error);
  hl_options options;
  hl__extension extension;
  hl__call call;
  int status = hl__lock_convert_check(lock, error);
  if (status == HL_OK) status = hl__options_take(given, &options, error);
  if (status) return status;
  hl__lock_relabel(lock, &options);
  status = hl__extension_convert(&extension, lock, true, error);
  if (status == HL_OK) {
    hl__call_init(&call, lock->hold.manager, HL__EXTEND, lock, &options);
    call.extension = &extension;
    status = extend(&call, error);
  }
  if (status == HL_OK) hl__call_commit(&call);
  hl__extension_dispose(&extension);
  return status;
}

int hl_lock_downgrade(hl_lock *lock, hl_error *error) {
  HL__UNCANCELLED;
  HL__NEEDS(lock, error);
  hl_options options = HL_OPTIONS_INIT;
  hl__extension extension;
  hl__call call;
  int status = hl__lock_convert_check(lock, error);
  if (status) return status;
  hl__lock_relabel(lock, &options);
  status = hl__extension_convert(&extension, lock, false, error);
  if (status == HL_OK) {
    hl__call_init(&call, lock->hold.manager, HL__DOWNGRADE, lock, &options);
    call.extension = &extension;
    status = hl__call_downgrade(&call, error);
    if (hl__call_commits(&call, status)) hl__call_commit(&call);
  }
  hl__extension_dispose(&extension);
  return status;
}

/* ---------------------------------------------------------------- leases */

static int not_a_lease(hl_error *error) {
  return hl__error(error, HL_EUNSUPPORTED,
                   "it is a session lock, not a lease: acquire it with a ttl");
}

int hl_lock_refresh(hl_lock *lock, int64_t ttl, hl_error *error) {
  HL__UNCANCELLED;
  HL__NEEDS(lock, error);
  if (ttl < 0 || ttl > HL_TTL_MAX)
    return hl__error(error, HL_EMISUSE, "ttl must be 0.001 to 315360000 seconds");
  if (is_foreign(lock)) return foreign_error(error);
  if (hl__lock_is_occupied(lock)) return hl__lock_occupied_error(error);
  if (!lock->lease) return not_a_lease(error);
  return hl__lease_refresh(lock->lease, ttl, error);
}

int hl_lock_to_lease(hl_lock *lock, const hl_options *given, hl_error *error) {
  HL__UNCANCELLED;
  HL__NEEDS(lock && given, error);
  hl_options options;
  hl__call call;
  int status = hl__options_take(given, &options, error);
  if (status == HL_OK) status = hl__lease_options_check(&options, error);
  if (status) return status;
  if (is_foreign(lock)) return foreign_error(error);
  if (hl__lock_is_occupied(lock)) return hl__lock_occupied_error(error);
  if (lock->released) return hl__error(error, HL_ERELEASED, "the lock has been released");
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
  HL__NEEDS(lock && text, error);
  *text = NULL;
  int status = export_check(lock, error);
  if (status) return status;
  *text = hl__export_write(&lock->lease->terms, lock->plan);
  return *text ? HL_OK : hl__error_memory(error);
}

int hl_lock_export(hl_lock *lock, char **text, hl_error *error) {
  HL__NEEDS(lock, error);
  /* Made before it is left, as there may be no memory. */
  int status = text ? hl_lock_text(lock, text, error) : export_check(lock, error);
  if (status == HL_OK) status = hl__lease_leave(lock->lease, error);
  if (status == HL_OK) {
    lock->released = true;
    hl__agent_forget(&lock->held);
  } else if (text) {
    free(*text);
    *text = NULL;
  }
  return status;
}

int hl__import_begin(hl_manager *manager, const char *text, size_t size, const hl_options *given,
                     hl_options *options, hl_lock **lock, hl_error *error) {
  hl_lease_terms terms = {0};
  hl_plan *plan = NULL;
  *lock = NULL;
  int status = hl__options_take(given, options, error);
  if (status == HL_OK && options->ttl) status = hl__lease_options_check(options, error);
  if (status == HL_OK) status = hl__export_read(text, size, manager->layout, &terms, &plan, error);
  if (status) return status;
  options->timeout = 0;
  options->label_size = 0;
  options->owner = NULL; /* the record has it */
  if (!options->ttl) options->ttl = terms.ttl;
  *lock = hl__lock_new(manager, plan, options);
  status = hl__lock_lease(lock, options, error);
  if (status == HL_OK) {
    hl_lease_terms *own = &(*lock)->lease->terms;
    memcpy(own->id, terms.id, sizeof own->id);
    memcpy(own->secret, terms.secret, sizeof own->secret);
    own->place = terms.place;
    (*lock)->lease->imported = true;
  }
  hl_plan_free(plan);
  return status;
}

int hl_import(hl_manager *manager, const char *text, size_t size, const hl_options *given,
              hl_lock **result, hl_error *error) {
  HL__UNCANCELLED;
  HL__NEEDS(manager && text && result, error);
  hl_options options;
  hl__call call;
  hl_lock *lock;
  *result = NULL;
  int status = hl__import_begin(manager, text, size, given, &options, &lock, error);
  if (status) return status;
  hl__call_init(&call, manager, HL__ACQUIRE, lock, &options);
  call.adopts = true;
  status = hl__call_make(&call, error);
  if (status == HL_OK) {
    hl__agent_keep(&lock->held, options.agent);
    *result = lock;
  } else {
    hl_lock_free(lock);
  }
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
  HL__UNCANCELLED;
  HL__NEEDS(lock, error);
  if (is_foreign(lock)) return foreign_error(error);
  if (lock->released) return HL_OK;
  lock->released = true;
  hl__agent_forget(&lock->held);
  if (leave_to_occupant(lock, false)) return HL_OK;
  return hl__lock_release(lock, confirm, error);
}

int hl__lock_release(hl_lock *lock, bool confirm, hl_error *error) {
  return lock->lease ? hl__lease_release(lock->lease, confirm, error)
                     : hl__hold_release(&lock->hold, confirm, error);
}

int hl_lock_close(hl_lock *lock, hl_error *error) {
  HL__NEEDS(lock, error);
  if (is_foreign(lock)) return foreign_error(error);
  if (hl__lock_releases(lock)) return hl_lock_release(lock, false, error);
  if (lock->released) return HL_OK;
  lock->released = true;
  hl__agent_forget(&lock->held);
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
  HL__UNCANCELLED;
  if (!lock) return;
  hl__agent_forget(&lock->held);
  if (leave_to_occupant(lock, true)) return;
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

hl_mode hl_lock_mode(const hl_lock *lock) { return hl_plan_mode(hl_lock_plan(lock)); }

unsigned hl_lock_level(const hl_lock *lock) { return lock ? hl__plan_level(lock->plan) : 0; }

int64_t hl_lock_waited(const hl_lock *lock) { return lock ? lock->waited : 0; }

hl_kind hl_lock_kind(const hl_lock *lock) { return lock && lock->lease ? HL_LEASE : HL_SESSION; }

uint64_t hl_lock_token(const hl_lock *lock) { return lock ? lock->hold.token : 0; }

const hl_plan *hl_lock_plan(const hl_lock *lock) { return lock ? lock->plan : NULL; }

bool hl_lock_auto_releases(const hl_lock *lock) { return lock && hl__lock_releases(lock); }

const char *hl_lock_where(const hl_lock *lock) { return lock ? lock->held.where : ""; }
