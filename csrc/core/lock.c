/*
 * lock.c - the life of a lock: how it is made, what it tells of itself, how it is exported,
 * released and freed.
 */
#include "lock.h"

#include "call.h"
#include "error.h"
#include "export.h"
#include "fork.h"
#include "plan.h"

#include <stdlib.h>
#include <string.h>

/* For another call on the lock, which a confirmed release gives up, until it has ended. */
#define VACATE_MIN_MS 170
#define VACATE_MAX_MS 10000

/* ----------------------------------------------------------- who has it */

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
  if (hl__lock_is_foreign(lock) || lock->released || hl__lock_is_occupied(lock)) return false;
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

int hl__lock_new(hl_manager *manager, const hl_plan *plan, const hl_options *options,
                 hl_lock **result, hl_error *error) {
  hl__lease *lease = NULL;
  int status = options->ttl ? hl__lease_new(manager, options, &lease, error) : HL_OK;
  if (status) return status;
  size_t label = options->label_size, most = sizeof((hl_holder *)0)->label;
  size_t where = options->where ? strnlen(options->where, HL_WHERE_SIZE - 1) : 0;
  if (label > most) label = most;
  size_t size = hl__plan_copy_size(plan);
  hl_lock *lock = malloc(sizeof *lock + size + label + where + 1);
  if (!lock) {
    hl__lease_unref(lease);
    return hl__error_memory(error);
  }
  char *texts = (char *)(lock + 1) + size;
  *lock = (hl_lock){
      .hold.manager = manager,
      .lease = lease,
      .generation = hl__fork_generation(),
      .plan = hl__plan_house(lock + 1, plan),
      .label = texts,
      .label_size = label,
      .held =
          {
              .strand = options->strand,
              .task = options->task,
              .kinds = options->kinds,
              .manager = manager,
              .plan = &lock->plan,
              .where = texts + label,
              .stands = held_stands,
              .lease = held_lease,
          },
  };
  if (label) memcpy(texts, options->label, label);
  if (where) memcpy(texts + label, options->where, where);
  texts[label + where] = '\0';
  atomic_fetch_add(&manager->references, 1u);
  *result = lock;
  return HL_OK;
}

/* --------------------------------------------------------------- holding */

static int foreign_error(hl_error *error) {
  return hl__error(error, HL_ERELEASED, "the lock belongs to the parent of this process");
}

int hl__lock_unusable_error(const hl_lock *lock, hl_error *error) {
  if (hl__lock_is_foreign(lock)) return foreign_error(error);
  if (lock->released) return hl__error(error, HL_ERELEASED, "the lock has been released");
  return hl__error(error, HL_EMISUSE, "the lock is in use by a call that has not returned yet");
}

int hl__lock_no_lease_error(hl_error *error) {
  return hl__error(error, HL_EUNSUPPORTED,
                   "it is a session lock, not a lease: acquire it with a ttl");
}

int hl__lock_check(hl_lock *lock, hl_error *error) {
  return lock->lease ? hl__lease_check(lock->lease, error) : hl__hold_check(&lock->hold, error);
}

bool hl_lock_is_held(hl_lock *lock) { return hl_lock_remaining(lock) > 0; }

int64_t hl_lock_remaining(hl_lock *lock) {
  HL__UNCANCELLED;
  if (!lock) return 0;
  if (hl__lock_is_foreign(lock) || lock->released) return 0;
  if (lock->lease) return hl__lease_left(lock->lease);
  return hl__lock_is_occupied(lock) ? hl__hold_left_busy(&lock->hold) : hl__hold_left(&lock->hold);
}

hl_lock_state hl_lock_look(hl_lock *lock) {
  if (!lock) return HL_RELEASED;
  if (hl__lock_is_foreign(lock)) return HL_FOREIGN;
  if (hl__lock_is_occupied(lock)) return lock->released ? HL_RELEASED : HL_IN_USE;
  if (lock->lease) return lock->released ? HL_RELEASED : hl__lease_inspect(lock->lease);
  if (hl_lock_is_held(lock)) return HL_HELD;
  return lock->hold.lost ? HL_LOST : HL_RELEASED;
}

int hl__lock_run(hl__call *call, hl_error *error) {
  hl_lock *lock = call->lock;
  switch (call->kind) {
  case HL__EXTEND:
  case HL__UPGRADE: return hl__call_extend(call, error);
  case HL__DOWNGRADE: return hl__call_downgrade(call, error);
  case HL__CHECK: return hl__lock_check(lock, error);
  case HL__RELEASE: return hl__lock_release(lock, true, error);
  case HL__REFRESH: return hl__lease_refresh(lock->lease, call->options.ttl, error);
  case HL__TO_LEASE: return hl__call_to_lease(call, error);
  case HL__ACQUIRE: break; /* the lock is not held yet */
  }
  return HL_OK;
}

void hl_lock_loss(hl_lock *lock, hl_error *error) {
  if (!lock) {
    (void)hl__error_null(error, __func__);
    return;
  }
  (void)hl__error(error, HL_ELOST, "the lock was lost while it was held");
  if (lock->lease && !hl__lock_is_foreign(lock)) hl__lease_loss(lock->lease, error);
}

/* ------------------------------------------------------------- exporting */

int hl_lock_text(hl_lock *lock, char **text, hl_error *error) {
  HL__NEEDS(lock && text, error);
  *text = NULL;
  int status = hl__lock_usable_lease(lock, error);
  if (status) return status;
  *text = hl__export_write(&lock->lease->terms, lock->plan);
  return *text ? HL_OK : hl__error_memory(error);
}

int hl_lock_export(hl_lock *lock, char **text, hl_error *error) {
  HL__NEEDS(lock, error);
  /* Made before it is left, as there may be no memory. */
  int status = text ? hl_lock_text(lock, text, error) : hl__lock_usable_lease(lock, error);
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

/* ------------------------------------------------------------- releasing */

/* The lock is occupied: its occupant releases it, and frees it, perhaps, as soon as he
   has ended. False: he has just ended, and the caller does that himself. */
static bool leave_to_occupant(hl_lock *lock, hl__afterwards afterwards) {
  hl_manager *manager = lock->hold.manager;
  if (!hl__lock_is_occupied(lock)) return false;
  hl__manager_mutex_lock(manager);
  hl__occupant *occupant = atomic_load(&lock->occupant);
  bool ended = occupant && occupant->abandon(occupant, afterwards);
  hl__manager_mutex_unlock(manager);
  if (ended) occupant->end(occupant);
  return occupant != NULL;
}

bool hl__lock_vacate(hl_lock *lock, int64_t ms) {
  hl_manager *manager = lock->hold.manager;
  int64_t deadline = hl__now_ms() + ms;
  if (!hl__lock_is_occupied(lock)) return true;
  hl__manager_mutex_lock(manager);
  hl__occupant *occupant = atomic_load(&lock->occupant);
  bool ended = occupant && occupant->abandon(occupant, HL__AFTERWARDS_NOTHING);
  while (!ended && atomic_load(&lock->occupant) && hl__left_ms(deadline) > 0)
    hl__manager_wait(&manager->done, manager, deadline);
  bool vacant = ended || !atomic_load(&lock->occupant);
  if (!vacant) (void)occupant->abandon(occupant, HL__AFTERWARDS_RELEASE);
  hl__manager_mutex_unlock(manager);
  if (ended) occupant->end(occupant);
  if (vacant) return true;
  lock->released = true;
  hl__agent_forget(&lock->held);
  return false;
}

int hl__lock_unconfirmed_error(hl_error *error) {
  return hl__error(error, HL_ECONNECTION,
                   "the release is not confirmed: another call on the lock has not ended yet, and "
                   "the lock is released behind it");
}

/* The time that a confirmed release has to vacate the lock. A store that hangs must not keep the
   caller beyond the end of the lock. */
static int64_t vacate_ms(hl_lock *lock) {
  int64_t left = hl_lock_remaining(lock);
  if (left > VACATE_MAX_MS) return VACATE_MAX_MS;
  return left > VACATE_MIN_MS ? left : VACATE_MIN_MS;
}

int hl_lock_release(hl_lock *lock, bool confirm, hl_error *error) {
  HL__UNCANCELLED;
  HL__NEEDS(lock, error);
  if (hl__lock_is_foreign(lock)) return foreign_error(error);
  if (lock->released) return HL_OK;
  if (confirm && !hl__lock_vacate(lock, vacate_ms(lock))) return hl__lock_unconfirmed_error(error);
  lock->released = true;
  hl__agent_forget(&lock->held);
  if (leave_to_occupant(lock, HL__AFTERWARDS_RELEASE)) return HL_OK;
  return hl__lock_release(lock, confirm, error);
}

int hl__lock_release(hl_lock *lock, bool confirm, hl_error *error) {
  return lock->lease ? hl__lease_release(lock->lease, confirm, error)
                     : hl__hold_release(&lock->hold, confirm, error);
}

int hl_lock_close(hl_lock *lock, hl_error *error) {
  HL__NEEDS(lock, error);
  if (hl__lock_is_foreign(lock)) return foreign_error(error);
  if (hl__lock_releases(lock)) return hl_lock_release(lock, false, error);
  if (lock->released) return HL_OK;
  lock->released = true;
  hl__agent_forget(&lock->held);
  if (hl__lock_is_occupied(lock)) return HL_OK; /* hl_lock_free leaves it */
  int status = hl__lease_leave(lock->lease, error);
  return status == HL_ERELEASED ? HL_OK : status;
}

static void lease_end(const hl_lock *lock) {
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
  if (leave_to_occupant(lock, HL__AFTERWARDS_FREE)) return;
  /* The parent's connections and leases are the parent's: see hl__manager_renew. */
  bool ours = !hl__lock_is_foreign(lock);
  if (ours && lock->lease)
    lease_end(lock);
  else if (ours && lock->hold.connection)
    (void)hl__hold_release(&lock->hold, false, NULL);
  hl_plan_free(lock->plan);
  hl_plan_free(lock->replaced);
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
