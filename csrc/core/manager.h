/*
 * manager.h - the inside of a manager: its sessions, its pool, its keeper and
 * its locks. For manager.c, pool.c, keeper.c and lock.c.
 *
 * The life of a slot (a session, and what the core knows of it):
 *
 *                .------------------------------------------.
 *                v                                          | keeper
 *     (new) -> BUSY -> HELD -> release -> IDLE <- RELEASING-'
 *                ^       |         |        |        ^
 *                |       |         '--------+--------' an answer was still
 *                |       v                  |          to come
 *                |     ENDED (lost, closed) |
 *                '--------------------------'
 *
 *   BUSY       one thread owns it: it connects, locks, or looks for holders
 *   HELD       belongs to an hl_lock; the keeper renews it
 *   RELEASING  given back, but the release is not yet sent
 *   IDLE       in the pool
 *   ENDED      was held; its session is closed; its hl_lock has not looked yet
 *
 * Locks of the library, in the order in which they may be taken:
 *
 *   1. manager->mutex    lists, states, counters, and the sessions of IDLE and
 *                        RELEASING slots. Never held while something blocks.
 *   2. slot->mutex       the session of a HELD slot. hl_lock_check holds it for
 *                        a round trip; everybody else only tries it, or is the
 *                        same thread.
 *   3. what a store has  (see there)
 *   4. fork.c's births   fork() itself takes it, and nothing of 1 to 3
 *   5. fork.c's mutex
 *
 * The session of a BUSY slot belongs to its thread and needs no mutex.
 */
#ifndef HIERLOCK_MANAGER_H
#define HIERLOCK_MANAGER_H

#include "hierlock.h"
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

struct hl__slot {
  hl__slot *next, *previous; /* all slots of the manager; 1 */
  hl__slot *older, *newer;   /* the idle ones; 1 */
  hl__slot_state state;      /* 1 */
  hl_session *session;       /* NULL while it is made, and when ENDED */
  pthread_mutex_t mutex;     /* 2 */
  pthread_t owner;           /* the thread that took it; 1 */
  int64_t due;               /* BUSY: overrun after this, watched; 1 */
  bool overrun;              /* the keeper has interrupted it; 1 */
  bool fresh;                /* it has just been made; owner */
  int64_t idle_since;        /* IDLE, RELEASING; 1 */
  /* When the last command that was answered was sent, and when a sign of life
     was sent that is not answered yet (0: none); hl__lease_ms. HELD: 2; IDLE: 1 */
  int64_t answered, asked;
};

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

  pthread_mutex_t mutex;
  pthread_cond_t freed;  /* a slot became idle or went away */
  pthread_cond_t wakeup; /* for the keeper */
  hl_store *store;
  hl__slot *slots;
  unsigned slot_count;
  hl__slot *newest, *oldest; /* idle */
  bool closed;

  bool keeper_runs, keeper_stops;
  pthread_t keeper;

  hl_stats stats;
  atomic_uint_fast64_t losses;
  int64_t looks_since; /* of the current second, see hl_manager_blockers */
  unsigned looks;
};

/* --- manager.c */

/* To be called first by whatever uses a manager: in a forked child it leaves
   the parent's store and sessions alone and makes the manager a fresh one.
   Takes a reference; hl__manager_leave gives it back. */
int hl__manager_enter(hl_manager *manager, hl_error *error);
void hl__manager_leave(hl_manager *manager);

/* --- pool.c */

typedef enum hl__take { HL__TAKE_ANY, HL__TAKE_FRESH, HL__TAKE_EXTRA } hl__take;

/* A BUSY slot with an open session, for this thread. `how`: any; one that is
   connected afresh; or one even when the pool is full, for a look.
   HL_OK; HL_BUSY, HL_CANCELLED; what session_open says. */
int hl__pool_take(hl_manager *manager, hl__take how, int64_t deadline,
                  bool try_once, hl__slot **slot, hl_error *error);
/* A BUSY slot whose session holds nothing goes back, or is closed. */
void hl__pool_put(hl_manager *manager, hl__slot *slot);
void hl__pool_discard(hl_manager *manager, hl__slot *slot);
/* Frees a slot that is in no list. Closes its session. No mutex is held. */
void hl__slot_free(hl_manager *manager, hl__slot *slot);
/* manager->mutex is held. */
void hl__pool_unlink(hl_manager *manager, hl__slot *slot);
void hl__pool_idle(hl_manager *manager, hl__slot *slot);

/* --- keeper.c */

/* Starts the keeper unless it runs; manager->mutex is held. */
int hl__keeper_start(hl_manager *manager, hl_error *error);
/* Ends it and waits for its end; no mutex is held. */
void hl__keeper_stop(hl_manager *manager);

/* --- lock.c */

/* Whether the session of a HELD slot stands, as far as can be told without
   waiting: reads an answer that has come, looks at the connection and at the
   clock. slot->mutex is held. */
int hl__slot_look(hl_manager *manager, hl__slot *slot, hl_error *error);
/* A HELD slot has been lost, or its manager is closed: ends its session.
   manager->mutex and slot->mutex are held. */
void hl__slot_end(hl_manager *manager, hl__slot *slot, bool lost);

#endif
