/*
 * manager.h - the inside of a manager: what it is made of, its life, and its mutex.
 * Each part has a header of its own: pool.h, line.h, worker.h, keeper.h.
 *
 * Mutexes, of which mutex.h has the order:
 *
 *   manager->mutex      lists, states, counters, and the sessions of IDLE and
 *                       RELEASING connections. Never held while something blocks; but a
 *                       forked child connects under it, the first time.
 *   connection->mutex   the session of a HELD connection. A check holds it for a
 *                       round trip; everybody else only tries it, or is the same
 *                       thread.
 */
#ifndef HIERLOCK_MANAGER_H
#define HIERLOCK_MANAGER_H

#include "clock.h"
#include "dsn.h"
#include "event.h"
#include "hierlock.h"
#include "keeper.h"
#include "line.h"
#include "list.h"
#include "mutex.h"
#include "pool.h"
#include "store.h"
#include "worker.h"

#include <stdatomic.h>

struct hl_manager {
  atomic_uint references; /* the opener, each lock, each call under way */
  /* The process generation (fork.c) that the fields below belong to. */
  atomic_uint generation;

  hl_dsn dsn;
  char *path; /* dsn.path made absolute; NULL: it was */
  hl_layout *layout;
  const hl_store_ops **stores; /* beyond those in the core; ends with NULL */
  char *units;                 /* see order.h; NULL: none */
  const hl_store_ops *ops;
  hl_store_config config;
  unsigned pool_size;
  char application[64];
  char host[64];
  hl_store *store; /* set before the first call is let in */
  atomic_uint_fast64_t losses;
  /* When the next lease is over that was not counted as lost; hl__boot_ms, HL_FOREVER.
     It may say so too soon. */
  _Atomic int64_t leases_end;

  pthread_mutex_t mutex;
  bool closed HL__GUARDED_BY(hl__manager_mutex);
  bool cancelled HL__GUARDED_BY(hl__manager_mutex); /* nobody waits any more; also when closed */
  hl__pool pool HL__GUARDED_BY(hl__manager_mutex);
  hl__line line HL__GUARDED_BY(hl__manager_mutex);
  hl__workers workers HL__GUARDED_BY(hl__manager_mutex);
  hl__keeper keeper HL__GUARDED_BY(hl__manager_mutex);
  hl__list leases HL__GUARDED_BY(hl__manager_mutex); /* HELD: see lease.h */
  /* Released, and still to be given back; by a worker. */
  hl__list drops HL__GUARDED_BY(hl__manager_mutex);
  bool drops_begun HL__GUARDED_BY(hl__manager_mutex);
  /* How many were ever put there, and how many of these are gone; in that order. */
  uint64_t drops_put HL__GUARDED_BY(hl__manager_mutex);
  uint64_t drops_gone HL__GUARDED_BY(hl__manager_mutex);
  uint64_t drops_failed HL__GUARDED_BY(hl__manager_mutex); /* how often it was tried in vain */
  /* Workers that refresh them. */
  unsigned refreshers HL__GUARDED_BY(hl__manager_mutex);
  pthread_cond_t done; /* a pending is done, or a refresh, or a drop */
  hl_stats stats HL__GUARDED_BY(hl__manager_mutex);
  struct {
    hl_histogram waits, holds;
  } levels[HL_LEVELS_MAX] HL__GUARDED_BY(hl__manager_mutex);
  /* Looks for holders, of the current second: see watch.c. */
  int64_t queries_since HL__GUARDED_BY(hl__manager_mutex);
  unsigned queries HL__GUARDED_BY(hl__manager_mutex);
  unsigned queries_late HL__GUARDED_BY(hl__manager_mutex); /* their callers have left */
};

HL__MUTEX_FUNCTIONS(hl__manager_mutex, hl_manager, mutex, hl__manager_mutex)

/* With a reference for the caller, no DSN, no layout and no store. `room`: whom the pool
   tells that there is more of it. NULL: out of memory. */
hl_manager *hl__manager_new(void (*room)(hl_manager *));
/* A forked child makes the manager a fresh one, and leaves the parent's store and
   connections alone. To be called first by whatever uses a manager. */
void hl__manager_renew(hl_manager *manager);
/* Whether a call may begin; opens the store in a forked child. Takes a reference;
   hl__manager_leave gives it back. HL_EMISUSE: it is closed; what a store's open says. */
int hl__manager_store_open(hl_manager *manager, hl_error *error);
int hl__manager_enter(hl_manager *manager, hl_error *error) HL__REQUIRES(hl__manager_mutex);
/* Frees it when nobody has it any more. No mutex is held. */
void hl__manager_leave(hl_manager *manager);

/* Has the keeper look again at that time at the latest. */
void hl__manager_hurry(hl_manager *manager, int64_t when) HL__REQUIRES(hl__manager_mutex);
/* Waits for the condition without the mutex. In the client library, exit() does not
   wait for the thread meanwhile. */
void hl__manager_wait(pthread_cond_t *condition, hl_manager *manager, int64_t deadline)
    HL__REQUIRES(hl__manager_mutex);
/* Says what happened; see event.h. */
static inline void hl__manager_event(hl_manager *manager, hl__event_kind kind, int status,
                                     int64_t ms) HL__REQUIRES(hl__manager_mutex) {
  hl__event(&manager->stats, kind, status, ms);
}
/* An acquisition has waited, with whatever outcome; what was held is so no more. */
static inline void hl__manager_waited(hl_manager *manager, unsigned level, int64_t us)
    HL__REQUIRES(hl__manager_mutex) {
  hl__histogram_add(&manager->levels[level].waits, us);
}
static inline void hl__manager_held(hl_manager *manager, const hl__span *span)
    HL__REQUIRES(hl__manager_mutex) {
  hl__histogram_add(&manager->levels[span->level].holds, hl__now_us() - span->since);
}

/* Copies what a caller has given into a structure of the same kind, which holds the
   defaults. Both begin with their size; `least`: that of the first version. `name` is for
   the message. HL_EMISUSE. */
int hl__struct_take(void *own, size_t size, size_t least, const void *given, const char *name,
                    hl_error *error);

/* hl_manager_close, as a collector may call it: waits for no server. Workers give back what was released, and exit()
   waits for them. See open.c. */
void hl__manager_collect(hl_manager *manager);

/* HL_CANCELLED */
int hl__manager_closed_error(hl_error *error);

#endif
