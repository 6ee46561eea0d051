/*
 * manager.h - the inside of a manager: its sessions, its pool, its keeper and
 * its locks. For manager.c, pool.c, keeper.c and lock.c; those who wait are in
 * line.h and pending.h.
 *
 * The life of a slot (a session, and what the core knows of it); docs/life.svg
 * draws it:
 *
 *   BUSY       one thread owns it: it connects, locks, or looks for holders.
 *              HELD when granted, IDLE when not; freed when its session ended
 *   HELD       belongs to an hl_lock; the keeper renews it. BUSY while an extend
 *              runs. Released: IDLE, the release is sent, its answer may still be
 *              to come; RELEASING where it cannot be sent, as a sign of life is
 *              not answered yet. Lost, or the manager closed: ENDED
 *   RELEASING  released, but the release is not sent. IDLE once the keeper has
 *              read that answer and sent the release; freed when no answer came
 *              for hold_timeout: the end of the connection releases, too
 *   IDLE       in the pool. BUSY when it is taken; freed when its session ended,
 *              or nobody took it for long
 *   ENDED      was held; its session is closed; its hl_lock has not looked yet,
 *              and frees it then
 *
 * Mutexes, of which mutex.h has the order:
 *
 *   manager->mutex    lists, states, counters, and the sessions of IDLE and
 *                     RELEASING slots. Never held while something blocks; but a
 *                     forked child connects under it, the first time.
 *   slot->mutex       the session of a HELD slot. hl_lock_check holds it for a
 *                     round trip; everybody else only tries it, or is the same
 *                     thread.
 *
 * The session of a BUSY slot belongs to its thread and needs no mutex.
 */
#ifndef HIERLOCK_MANAGER_H
#define HIERLOCK_MANAGER_H

#include "hierlock.h"
#include "mutex.h"
#include "store.h"

#include <pthread.h>
#include <stdatomic.h>

typedef enum hl__slot_state {
  HL__BUSY,
  HL__HELD,
  HL__RELEASING,
  HL__IDLE,
  HL__ENDED
} hl__slot_state;

typedef struct hl__slot hl__slot;
typedef struct hl__waiter hl__waiter; /* line.h */

struct hl__slot {
  pthread_mutex_t mutex;
  /* See above who may use it: NULL while it is made, and when ENDED. */
  hl_session *session;
  /* When the last command that was answered was sent, and when a sign of life
     was sent that is not answered yet (0: none); hl__lease_ms. As the session. */
  int64_t answered, asked;
  bool fresh; /* it has just been made; its thread */

  hl__slot_state state HL__GUARDED_BY(hl__manager_mutex);
  /* All slots of the manager; the idle ones. */
  hl__slot *next HL__GUARDED_BY(hl__manager_mutex);
  hl__slot *previous HL__GUARDED_BY(hl__manager_mutex);
  hl__slot *older HL__GUARDED_BY(hl__manager_mutex);
  hl__slot *newer HL__GUARDED_BY(hl__manager_mutex);
  /* The thread that took it. */
  pthread_t owner HL__GUARDED_BY(hl__manager_mutex);
  /* BUSY: overrun after this, watched. */
  int64_t due HL__GUARDED_BY(hl__manager_mutex);
  /* The keeper has interrupted it. */
  bool overrun HL__GUARDED_BY(hl__manager_mutex);
  /* IDLE, RELEASING: since when. */
  int64_t idle_since HL__GUARDED_BY(hl__manager_mutex);
};

HL__MUTEX_FUNCTIONS(hl__slot, hl__slot, mutex, hl__slot_mutex)

/* A node of a circular list, or the list itself: then it stands between the last
   and the first. By itself: empty, or in no list. */
typedef struct hl__list {
  struct hl__list *next, *previous;
} hl__list;

typedef struct hl__member hl__member; /* line.h */

#define HL__LINE_HEADS 4096u

/* The requests of a manager that wait; see line.h. */
typedef struct hl__line {
  hl__waiter *first, *last; /* all, in order of arrival */
  uint64_t arrivals;
  hl__member *heads[HL__LINE_HEADS]; /* by row: whom a newcomer may follow */
  /* BEHIND somebody who has just left: whom they follow now is still to be looked
     for. `together`: he was granted what they share with him. */
  hl__list loose, together;
  hl__list ready;         /* READY, in order */
  hl__list parked;        /* PARKED, or being TRIED again; in order of arrival there */
  hl__list *next_asked;   /* the next of them whose turn it is, or the list itself */
  unsigned parked_count;
  unsigned asks;          /* so many of them may be tried now */
  int64_t next_round;     /* when more of them may be */
  unsigned trying;        /* TRIED */
  unsigned waiting;       /* pendings AT_STORE, of a store that connects to nothing */
  bool short_of_threads;  /* none could be started a moment ago */
  hl__waiter *soonest;    /* a heap of the pendings in line, by deadline */
} hl__line;

/* 0: it is held now. */
static inline int hl__slot_trylock(hl__slot *slot)
    HL__ACQUIRES_IF_0(hl__slot_mutex) HL__UNCHECKED {
  return pthread_mutex_trylock(&slot->mutex);
}

struct hl_manager {
  atomic_uint references; /* the opener, each lock, each call under way */
  /* The process generation (fork.c) that the fields below belong to. */
  atomic_uint generation;

  hl_dsn dsn;
  char *path; /* dsn.path made absolute; NULL: it was */
  hl_layout *layout;
  const hl_store_ops *ops;
  hl_store_config config;
  unsigned pool_size;
  char application[64];
  char host[64];
  hl_store *store; /* set before the first call is let in */
  atomic_uint_fast64_t losses;

  pthread_mutex_t mutex;
  pthread_cond_t freed;  /* a slot became idle or went away */
  pthread_cond_t wakeup; /* for the keeper */
  pthread_cond_t work;   /* for the workers */
  pthread_cond_t done;   /* a pending is done */
  bool closed HL__GUARDED_BY(hl__manager_mutex);
  hl__slot *slots HL__GUARDED_BY(hl__manager_mutex);
  unsigned slot_count HL__GUARDED_BY(hl__manager_mutex);
  /* The idle ones. */
  hl__slot *newest HL__GUARDED_BY(hl__manager_mutex);
  hl__slot *oldest HL__GUARDED_BY(hl__manager_mutex);
  unsigned idle_count HL__GUARDED_BY(hl__manager_mutex);
  /* BUSY, but idle again at once: see releases_await. */
  unsigned settling HL__GUARDED_BY(hl__manager_mutex);

  hl__line line HL__GUARDED_BY(hl__manager_mutex);
  /* Slots that pendings on their way to the store will take: each counts from when
     it is sent until it has its slot, which counts from then on. */
  unsigned reserved HL__GUARDED_BY(hl__manager_mutex);

  /* Pendings that no worker has taken yet. */
  hl_pending *first_task HL__GUARDED_BY(hl__manager_mutex);
  hl_pending *last_task HL__GUARDED_BY(hl__manager_mutex);
  unsigned task_count HL__GUARDED_BY(hl__manager_mutex);
  unsigned idle_workers HL__GUARDED_BY(hl__manager_mutex);
  /* Workers that look for a task in a moment: just started, or about to be idle. */
  unsigned coming_workers HL__GUARDED_BY(hl__manager_mutex);
  unsigned workers HL__GUARDED_BY(hl__manager_mutex); /* not yet on their way out */

  bool keeper_runs HL__GUARDED_BY(hl__manager_mutex);
  bool keeper_stops HL__GUARDED_BY(hl__manager_mutex);
  /* When it will look next; hl__now_ms. */
  int64_t keeper_next HL__GUARDED_BY(hl__manager_mutex);
  pthread_t keeper; /* while keeper_runs, and then whoever stops it */

  hl_stats stats HL__GUARDED_BY(hl__manager_mutex);
  /* Of the current second, see hl_manager_blockers. */
  int64_t looks_since HL__GUARDED_BY(hl__manager_mutex);
  unsigned looks HL__GUARDED_BY(hl__manager_mutex);
};

HL__MUTEX_FUNCTIONS(hl__manager, hl_manager, mutex, hl__manager_mutex)

/* --- manager.c */

/* Copies what a caller has given into a structure of the same kind, which holds the
   defaults. Both begin with their size. `name` is for the message. HL_EMISUSE. */
int hl__struct_take(void *own, size_t size, const void *given, const char *name,
                    hl_error *error);

/* To be called first by whatever uses a manager: in a forked child it leaves
   the parent's store and sessions alone and makes the manager a fresh one.
   Takes a reference; hl__manager_leave gives it back. */
int hl__manager_enter(hl_manager *manager, hl_error *error);
void hl__manager_leave(hl_manager *manager);

/* --- pool.c */

/* The answer to a release or to a sign of life takes a round trip. An idle session
   that waits for one for so long is given up: its connection may be half open, and
   a new one can be had. */
#define HL__ANSWER_MS 1000

typedef enum hl__take { HL__TAKE_ANY, HL__TAKE_FRESH, HL__TAKE_EXTRA } hl__take;

/* A BUSY slot with an open session, for this thread. `how`: any; one that is
   connected afresh; or one even when the pool is full, for a look. `for_pending`:
   whose reservation it uses up; or NULL.
   HL_OK; HL_BUSY, HL_CANCELLED; what session_open says. */
int hl__pool_take(hl_manager *manager, hl__take how, int64_t deadline,
                  bool try_once, hl_pending *for_pending, hl__slot **slot,
                  hl_error *error);
/* A BUSY slot whose session holds nothing goes back, or is closed. */
void hl__pool_put(hl_manager *manager, hl__slot *slot);
void hl__pool_discard(hl_manager *manager, hl__slot *slot);
/* Reads the answer for which an IDLE or RELEASING slot waits, if it has come. HL_OK:
   there is none to wait for; HL_TIMEOUT: it may still come; HL_ECONNECTION: the
   session has ended, or the answer is overdue. */
int hl__pool_settle(hl_manager *manager, hl__slot *slot)
    HL__REQUIRES(hl__manager_mutex);
/* Unlinks a slot and adds it to a list, by `next`, of those that are to be freed
   as soon as no mutex is held; which closes their sessions. */
void hl__pool_bury(hl_manager *manager, hl__slot *slot, hl__slot **dead)
    HL__REQUIRES(hl__manager_mutex);
void hl__pool_free(hl_manager *manager, hl__slot *dead);
/* Whether a request that comes now finds a slot, beside those for which one is
   reserved. */
bool hl__pool_has_room(const hl_manager *manager)
    HL__REQUIRES(hl__manager_mutex);
int hl__pool_busy_error(const hl_manager *manager, hl_error *error);
void hl__pool_unlink(hl_manager *manager, hl__slot *slot)
    HL__REQUIRES(hl__manager_mutex);
void hl__pool_idle(hl_manager *manager, hl__slot *slot)
    HL__REQUIRES(hl__manager_mutex);

/* --- keeper.c */

/* Starts the keeper unless it runs. */
int hl__keeper_start(hl_manager *manager, hl_error *error)
    HL__REQUIRES(hl__manager_mutex);
/* It looks again at that time at the latest. */
void hl__keeper_hurry(hl_manager *manager, int64_t when)
    HL__REQUIRES(hl__manager_mutex);
/* Ends it and waits for its end; no mutex is held. */
void hl__keeper_stop(hl_manager *manager);

/* --- lock.c */

/* What the caller has given, NULL included, as this library knows it. HL_EMISUSE. */
int hl__options_take(const hl_options *given, hl_options *own, hl_error *error);
int hl__options_check(const hl_options *options, hl_manager *manager,
                      const hl_plan *plan, hl_error *error);
/* An empty lock, with a reference to the manager and a copy of the plan. NULL:
   out of memory. */
hl_lock *hl__lock_new(hl_manager *manager, const hl_plan *plan);
const hl_plan *hl__lock_plan(const hl_lock *lock);
/* Takes what an empty lock's plan says, blocking, for timeout ms from start on.
   pending: for which it is done; NULL: for the calling thread. As hl_acquire,
   but counts nothing. */
int hl__lock_acquire(hl_lock *lock, const hl_options *options, int64_t start,
                     int64_t timeout, hl_pending *pending, hl_error *error);
/* A request has ended: counts it in the statistics. */
void hl__acquire_count(hl_manager *manager, int status, int64_t waited)
    HL__REQUIRES(hl__manager_mutex);
/* HL_TIMEOUT: it was not granted in time. */
int hl__timeout_error(hl_error *error, const hl_plan *plan, int64_t timeout);

/* Whether the session of a HELD slot stands, as far as can be told without
   waiting: reads an answer that has come, looks at the connection and at the
   clock. */
int hl__slot_look(hl_manager *manager, hl__slot *slot, hl_error *error)
    HL__REQUIRES(hl__slot_mutex);
/* A HELD slot has been lost, or its manager is closed: ends its session. */
void hl__slot_end(hl_manager *manager, hl__slot *slot, bool lost)
    HL__REQUIRES(hl__manager_mutex, hl__slot_mutex);

#endif
