/*
 * line.h - requests of this process that wait, in the order of their arrival.
 *
 * Five hundred coroutines that want one node could wait at a database on five hundred connections.
 * But 499 of these requests are sure to wait behind another request of this manager. So they wait
 * here, without a connection and without a thread, and only the first goes to the store. The line
 * hands no lock over inside the process: the next request joins the store's queue at its end,
 * behind the requests of other processes. So other processes wait no longer than they would without
 * the line: if the store's queue is fair, each of them has its turn between two grants to this
 * process.
 *
 * Followers. A request R stands behind a waiting request P (not behind a holder) in two cases:
 *
 *   - P came earlier, and R needs all rows that P needs, up to P's first row that conflicts
 *     with R. Then the store cannot grant R before P is granted or gives up: R would wait for
 *     P, or for the same row as P. But if P needs, before that row, a row that R does not
 *     need, P may wait for a lock that does not concern R. So then R goes to the store.
 *   - P follows no request, all rows of P are shared, R needs all of them, and none
 *     conflicts. Then a lock that blocks P blocks R, too. So of many requests that can share,
 *     one goes first. Once it is granted, all others follow at once. If it gives up, the
 *     next goes alone.
 *
 * R stands behind all such P, and goes when the last of them has left. R holds nothing while it
 * stands in line, so no circle of waiters goes through it. Requests that may hold rows already
 * (hl_lock_extend), and requests that do not wait (timeout 0), do not stand in line.
 *
 * Finding P. P is a member of several classes: one for each of its rows up to the first exclusive
 * one. A class is a row, the rows of P before it, and the mode in which P takes that row. The path
 * u1/a1/r1, for example, has a class under each of u1, u1/a1 and u1/a1/r1. R searches under each of
 * its own rows for classes whose rows it needs, too. So joining and leaving take a few steps per
 * row, however many requests wait. R checks at most HL__LINE_CLASSES classes under a row, and P
 * enters at most HL__LINE_DEPTH classes. Beyond these limits R may miss P and go to the store,
 * which is correct, too, but costs a connection.
 *
 * Going to the store. A pending that follows no request is READY. If connections are scarce, the
 * first READY pending goes when the pool has room, with a worker. Otherwise the store calls back
 * (hl_store_ops.start), so that a wait costs no thread, and all READY pendings go.
 *
 * No function here takes more than a few steps for other requests. If one departure concerns
 * thousands, the keeper does the work in pieces, and frees the mutex between two pieces.
 */
#ifndef HIERLOCK_LINE_H
#define HIERLOCK_LINE_H

#include "heap.h"
#include "list.h"
#include "mutex.h"
#include "store.h"

#include <pthread.h>

typedef struct hl__waiter hl__waiter;
typedef struct hl__member hl__member;

#define HL__LINE_HEADS 4096u

/* The waiting requests of a manager. */
typedef struct hl__line {
  hl__list all; /* waiters, in order of arrival */
  uint64_t arrivals;
  hl__member *heads[HL__LINE_HEADS]; /* by row: the classes under it */
  /* Followers of a waiter that has just left: they search for another waiter to follow. `together`:
     the waiter was granted rows that they share with it. */
  hl__list loose, together;
  hl__list ready;        /* READY, in order */
  unsigned going;        /* threads that send READY pendings */
  unsigned started;      /* calls that the store has, and calls back */
  unsigned looking;      /* workers that look for holders in the way of such a call */
  bool short_of_threads; /* none could be started just now */
  hl__heap *soonest;     /* by deadline: the pendings in line */
} hl__line;

#define HL__LINE_CLASSES 16
#define HL__LINE_DEPTH HL_LEVELS_MAX

typedef enum hl__place {
  HL__BEHIND,  /* it follows another waiter */
  HL__READY,   /* a pending that goes once there is room */
  HL__AT_STORE /* at the store, or on its way */
} hl__place;

/* A waiter's membership in a class. The members form a ring in the order of their arrival. The
   table has the first of them, the head. */
struct hl__member {
  hl__waiter *waiter;
  hl__member *next, *previous; /* in the ring; NULL: not entered */
  hl__member *chain, **link;   /* of a head: in the table */
  hl__list followers;          /* waiters behind it because of this class */
  size_t rows;                 /* how many of the waiter's rows, from the first on */
  uint8_t kind;                /* see line.c */
  bool head;
};

/* Enough for a path of three levels. */
#define HL__MEMBERS_INSIDE 4

/* Functions that the line calls for a waiter without a thread, with the manager's mutex. */
typedef struct hl__waiter_ops {
  /* Goes to the store; where that has `start`, the function gives the mutex back meanwhile. False:
     no thread can be started, and nothing has changed. */
  bool (*send)(hl__waiter *waiter);
  /* The waiter's time is up in line; it leaves the line. */
  void (*expire)(hl__waiter *waiter);
  /* The manager is closed; a waiter in line leaves it. */
  void (*close)(hl__waiter *waiter);
} hl__waiter_ops;

struct hl__waiter {
  const hl_plan *plan;
  int64_t deadline;
  const hl__waiter_ops *ops; /* NULL: a thread waits in hl__line_wait */
  uint64_t arrival HL__GUARDED_BY(hl__manager_mutex);
  hl__list all HL__GUARDED_BY(hl__manager_mutex); /* of the line */
  hl__place place HL__GUARDED_BY(hl__manager_mutex);
  /* BEHIND: in the followers of a member, or loose. READY: in that list. */
  hl__list node HL__GUARDED_BY(hl__manager_mutex);
  /* The waiter's classes. If all its rows are shared, the last one is WHOLE (line.c). */
  hl__member *members HL__GUARDED_BY(hl__manager_mutex);
  unsigned member_count HL__GUARDED_BY(hl__manager_mutex);
  bool shares HL__GUARDED_BY(hl__manager_mutex); /* the last class is WHOLE */
  hl__member inside[HL__MEMBERS_INSIDE] HL__GUARDED_BY(hl__manager_mutex);
  hl__heap timed HL__GUARDED_BY(hl__manager_mutex);       /* by `deadline` */
  pthread_cond_t *turn HL__GUARDED_BY(hl__manager_mutex); /* of the thread that waits */
};

static inline void hl__line_init(hl__line *line) {
  *line = (hl__line){.arrivals = 0};
  hl__list_init(&line->all);
  hl__list_init(&line->loose);
  hl__list_init(&line->together);
  hl__list_init(&line->ready);
}

/* Puts the waiter at the end of the line. */
void hl__line_join(hl_manager *manager, hl__waiter *waiter) HL__REQUIRES(hl__manager_mutex);
/* Removes the waiter, granted or not. Then its followers go on. */
void hl__line_leave(hl_manager *manager, hl__waiter *waiter, bool granted)
    HL__REQUIRES(hl__manager_mutex);
/* Frees the memory of a waiter that never leaves, as it is a forked child's copy. */
void hl__line_forget(hl__waiter *waiter);
/* Waits in line. HL_OK: the waiter may go to the store; HL_TIMEOUT; HL_CANCELLED: the manager is
   closed. In each case it is still in line. */
int hl__line_wait(hl_manager *manager, hl__waiter *waiter) HL__REQUIRES(hl__manager_mutex);
/* Sends pendings to the store while there is room; where the store calls back, has the keeper do
   so. Call it whenever there is more room. */
void hl__line_advance(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* Sends some pendings to a store that calls back, and gives the mutex back meanwhile. The keeper
   sends the rest. */
void hl__line_go(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* The keeper calls it. Ends pendings whose time is up in line, and does the work that was left to
   the keeper, in pieces between which the mutex is free. Returns when to call it next (hl__now_ms),
   or HL_FOREVER. */
int64_t hl__line_keep(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* Ends all waiters in line, as the manager is closed. */
void hl__line_close(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* Whether a new request for this plan would follow another request. */
bool hl__line_would_follow(hl_manager *manager, const hl_plan *plan)
    HL__REQUIRES(hl__manager_mutex);

#endif
