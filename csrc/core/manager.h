/*
 * manager.h - the inside of a manager: its parts, its life, and its mutex. Each part has a
 * header of its own: pool.h, line.h, worker.h, keeper.h.
 *
 * Mutexes; mutex.h has their order:
 *
 *   manager->mutex      lists, states, counters, and the sessions of IDLE and RELEASING
 *                       connections. No thread blocks while it holds this mutex, except a
 *                       forked child that connects for the first time.
 *   connection->mutex   the session of a HELD connection. A check holds it for a round trip.
 *                       Other threads only try to lock it.
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
  char *path; /* dsn.path made absolute; NULL: it was absolute */
  hl_layout *layout;
  const hl_store_ops **stores; /* additional stores; ends with NULL */
  char *units;                 /* see order.h; NULL: none */
  const hl_store_ops *ops;
  hl_store_config config;
  unsigned pool_size;
  char application[64];
  char host[64];
  hl_store *store; /* set before the first call is let in */
  atomic_uint_fast64_t losses;
  /* When the next lease ends that was not yet counted as lost; hl__boot_ms or HL_FOREVER. May be
     too early, never too late. */
  _Atomic int64_t leases_end;

  pthread_mutex_t mutex;
  bool closed HL__GUARDED_BY(hl__manager_mutex);
  bool cancelled HL__GUARDED_BY(hl__manager_mutex); /* no call waits any more; also when closed */
  hl__pool pool HL__GUARDED_BY(hl__manager_mutex);
  hl__line line HL__GUARDED_BY(hl__manager_mutex);
  hl__workers workers HL__GUARDED_BY(hl__manager_mutex);
  hl__keeper keeper HL__GUARDED_BY(hl__manager_mutex);
  hl__list leases HL__GUARDED_BY(hl__manager_mutex); /* the HELD ones: see lease.h */
  /* Released leases whose records a worker still has to delete. */
  hl__list drops HL__GUARDED_BY(hl__manager_mutex);
  bool drops_begun HL__GUARDED_BY(hl__manager_mutex);
  /* How many leases were ever put into `drops`, and how many of them are gone, in that order. */
  uint64_t drops_put HL__GUARDED_BY(hl__manager_mutex);
  uint64_t drops_gone HL__GUARDED_BY(hl__manager_mutex);
  uint64_t drops_failed HL__GUARDED_BY(hl__manager_mutex); /* failed attempts */
  /* Workers that refresh leases. */
  unsigned refreshers HL__GUARDED_BY(hl__manager_mutex);
  pthread_cond_t done; /* a pending, a refresh or a drop is done */
  hl_stats stats HL__GUARDED_BY(hl__manager_mutex);
  struct {
    hl_histogram waits, holds;
  } levels[HL_LEVELS_MAX] HL__GUARDED_BY(hl__manager_mutex);
  /* Queries for holders in the current second: see watch.c. */
  int64_t queries_since HL__GUARDED_BY(hl__manager_mutex);
  unsigned queries HL__GUARDED_BY(hl__manager_mutex);
  unsigned queries_late HL__GUARDED_BY(hl__manager_mutex); /* queries whose callers have left */
};

HL__MUTEX_FUNCTIONS(hl__manager_mutex, hl_manager, mutex, hl__manager_mutex)

/* Makes a manager with one reference, the caller's, and no DSN, layout or store. room: the function
   that the pool calls whenever it has more room. NULL: out of memory. */
hl_manager *hl__manager_new(void (*room)(hl_manager *));
/* In a forked child, makes the manager a fresh one and leaves the parent's store and connections
   alone. Every function that is given a manager calls it first. */
void hl__manager_renew(hl_manager *manager);
/* hl__manager_enter begins a call: opens the store if it is not open (in a forked child), and takes
   a reference, which hl__manager_leave gives back. HL_EMISUSE: the manager is closed; else as the
   store's `open`. */
int hl__manager_store_open(hl_manager *manager, hl_error *error);
int hl__manager_enter(hl_manager *manager, hl_error *error) HL__REQUIRES(hl__manager_mutex);
/* Gives back a reference; the last one frees the manager. Hold no mutex. */
void hl__manager_leave(hl_manager *manager);

/* Has the keeper take its next turn at `when` (hl__now_ms) at the latest. */
void hl__manager_hurry(hl_manager *manager, int64_t when) HL__REQUIRES(hl__manager_mutex);
/* Waits for the condition, without the mutex. exit() does not wait for a thread of a client library
   meanwhile. */
void hl__manager_wait(pthread_cond_t *condition, hl_manager *manager, int64_t deadline)
    HL__REQUIRES(hl__manager_mutex);
/* Counts what happened; see event.h. */
static inline void hl__manager_event(hl_manager *manager, hl__event_kind kind, int status,
                                     int64_t ms) HL__REQUIRES(hl__manager_mutex) {
  hl__event(&manager->stats, kind, status, ms);
}
/* Counts how long an acquisition waited, whatever its outcome, and how long a lock was held. */
static inline void hl__manager_waited(hl_manager *manager, unsigned level, int64_t us)
    HL__REQUIRES(hl__manager_mutex) {
  hl__histogram_add(&manager->levels[level].waits, us);
}
static inline void hl__manager_held(hl_manager *manager, const hl__span *span)
    HL__REQUIRES(hl__manager_mutex) {
  hl__histogram_add(&manager->levels[span->level].holds, hl__now_us() - span->since);
}

/* Copies the caller's structure into `own`, which has the same type and holds the defaults. Both
   begin with their size; `least` is the size of the first version, `name` the name for messages.
   HL_OK, HL_EMISUSE. */
int hl__struct_take(void *own, size_t size, size_t least, const void *given, const char *name,
                    hl_error *error);

/* Like hl_manager_close, but waits for no server, so that a garbage collector may call it.
   Workers delete the released leases, and exit() waits for them. See open.c. */
void hl__manager_collect(hl_manager *manager);

/* HL_CANCELLED */
int hl__manager_closed_error(hl_error *error);

#endif
