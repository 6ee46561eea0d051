/*
 * line.h - requests of this process that wait, in the order of their arrival.
 *
 * Five hundred coroutines that want one node could wait at a database on five hundred
 * connections. Four hundred and ninety-nine of these waits are pointless: each of those
 * requests is sure to wait behind another request of this manager. So they wait
 * here, without a connection and without a thread, and only the first goes to the store.
 * Nothing is handed over inside the process: the next one joins the store's queue at its
 * end, behind the requests of other processes. So other processes wait no longer than
 * they would without the line: where the store's queue is fair, each of them has its turn
 * between two grants to this process.
 *
 * Who follows whom. A request R stands behind a waiting request P (not behind a holder) in
 * two cases:
 *
 *   - P came earlier, and R needs all rows that P needs, up to P's first row that conflicts
 *     with R. Then the store could not grant R before P is granted or gives up: whatever
 *     P waits for, R would wait for, too, or R would wait for P. If P needs, before that
 *     row, one that R does not need, P may wait for something that does not concern R. So R
 *     goes to the store by itself.
 *   - P stands behind nobody, all rows of P are shared, R needs all of them, and none
 *     conflicts. Then whatever blocks P blocks R. So of many requests that can share,
 *     one goes first. When it is granted, all others follow at once. When it gives up, the
 *     next goes alone.
 *
 * R stands behind all such P, and goes when the last of them has left. R holds nothing
 * while it stands in line, so no circle of waiters goes through it. Requests that may hold
 * something already (hl_lock_extend), and those that do not wait (timeout 0), do not
 * stand in line.
 *
 * How P is found. P is a member of several classes: one for each of its rows up to the
 * first exclusive one. A class is a row, the rows of P before it, and the mode in which
 * P takes that row. Under u1, u1/a1 and u1/a1/r1, for example, the path u1/a1/r1 has a
 * class each. R looks under each of its own rows for classes whose rows it needs, too. So
 * joining and leaving take a few steps for each row, however many requests wait. R looks at
 * no more than HL__LINE_CLASSES classes under a row, and P enters no more than
 * HL__LINE_DEPTH classes. Beyond these limits R may miss P and go to the store, which is
 * correct, too, but costs a connection.
 *
 * Who goes to the store. A pending that follows nobody is READY.
 *
 *   - Where connections are scarce, the first READY one goes when the pool has room.
 *   - Elsewhere a wait costs a thread, and a try next to nothing. One worker tries the
 *     READY ones, one after the other. One that is refused waits in the store's queue with
 *     a worker of its own, while fewer than pool_size pendings do that. Beyond pool_size, or
 *     when no thread can be started, it is PARKED. The pending parked first gets the
 *     first place that becomes free, before all that came later. Meanwhile each parked one
 *     is tried again every HL__LINE_ASK_MS; of more than can be tried in that time, 64 are
 *     tried each HL__LINE_ROUND_MS, in turn. So none that could be granted is forgotten,
 *     whatever those with a place wait for. (Its tries are refused while another process
 *     waits for its row; then it needs its place.)
 *
 * No function here takes more than a few steps for others. When one departure concerns
 * thousands, the keeper does the work in pieces, and frees the mutex between two pieces.
 */
#ifndef HIERLOCK_LINE_H
#define HIERLOCK_LINE_H

#include "list.h"
#include "mutex.h"
#include "store.h"

#include <pthread.h>

typedef struct hl__waiter hl__waiter;
typedef struct hl__member hl__member;

#define HL__LINE_HEADS 4096u

/* Of a manager: its requests that wait. */
typedef struct hl__line {
  hl__waiter *first, *last; /* all, in order of arrival */
  uint64_t arrivals;
  hl__member *heads[HL__LINE_HEADS]; /* by row: whom a newcomer may follow */
  /* BEHIND somebody who has just left: whom they follow now is still to be looked
     for. `together`: he was granted what they share with him. */
  hl__list loose, together;
  hl__list ready;       /* READY, in order */
  hl__list parked;      /* PARKED, or being TRIED again; in order of arrival there */
  hl__list *next_asked; /* the next of them whose turn it is, or the list itself */
  unsigned parked_count;
  unsigned asks;         /* so many of them may be tried now */
  int64_t next_round;    /* when more of them may be */
  unsigned trying;       /* TRIED */
  unsigned waiting;      /* AT_STORE with a worker, of a store whose connections are
                             not scarce */
  bool short_of_threads; /* none could be started a moment ago */
  hl__waiter *soonest;   /* a heap of those in line whom no thread awaits, by deadline */
} hl__line;

#define HL__LINE_CLASSES 16
#define HL__LINE_DEPTH HL_LEVELS_MAX
#define HL__LINE_ASK_MS 100
#define HL__LINE_ROUND_MS 10

/* Up to HL__PARKED it stands in line. From HL__TRIED on, a thread or a worker has it. */
typedef enum hl__place {
  HL__BEHIND,  /* it follows another one */
  HL__READY,   /* a pending that goes as soon as there is room */
  HL__PARKED,  /* a pending that was refused, and is tried again in turn */
  HL__TRIED,   /* a pending that a worker tries */
  HL__AT_STORE /* or on its way */
} hl__place;

/* A waiter as a member of one class. The members form a ring in the order of their
   arrival; the first of them, the head, is in the table. */
struct hl__member {
  hl__waiter *waiter;
  hl__member *next, *previous; /* in the ring; NULL: it is not entered */
  hl__member *chain, **link;   /* of the head: in the table */
  hl__list followers;          /* those that stand behind it because of this class */
  size_t rows;                 /* how many of the waiter's rows, from the first */
  uint8_t kind;                /* see line.c */
  bool head;
};

/* As many as a path of three levels needs. */
#define HL__MEMBERS_INSIDE 4

/* What the line has done by whoever waits without a thread. With the manager's
   mutex. */
typedef struct hl__waiter_ops {
  /* Goes to the store, or tries there (TRIED). False: there is no thread for it. */
  bool (*send)(hl__waiter *waiter);
  /* Its time is up, in line. It leaves the line. */
  void (*expire)(hl__waiter *waiter);
  /* The manager is closed. In line, it leaves it. */
  void (*close)(hl__waiter *waiter);
} hl__waiter_ops;

struct hl__waiter {
  const hl_plan *plan;
  int64_t deadline;
  const hl__waiter_ops *ops; /* NULL: a thread waits in hl__line_wait */
  uint64_t arrival HL__GUARDED_BY(hl__manager_mutex);
  hl__waiter *next HL__GUARDED_BY(hl__manager_mutex);
  hl__waiter *previous HL__GUARDED_BY(hl__manager_mutex);
  hl__place place HL__GUARDED_BY(hl__manager_mutex);
  bool in_parked HL__GUARDED_BY(hl__manager_mutex); /* also while TRIED again */
  /* BEHIND: among the followers of one, or loose. READY, parked: in those lists. */
  hl__list node HL__GUARDED_BY(hl__manager_mutex);
  /* Its classes; the last is that of its whole, when all its rows are shared. */
  hl__member *members HL__GUARDED_BY(hl__manager_mutex);
  unsigned member_count HL__GUARDED_BY(hl__manager_mutex);
  bool shares HL__GUARDED_BY(hl__manager_mutex); /* the last one is such */
  hl__member inside[HL__MEMBERS_INSIDE] HL__GUARDED_BY(hl__manager_mutex);
  /* In the heap of deadlines: `back` is the parent of a first child, else the
     sibling before. */
  bool timed HL__GUARDED_BY(hl__manager_mutex);
  hl__waiter *child HL__GUARDED_BY(hl__manager_mutex);
  hl__waiter *sibling HL__GUARDED_BY(hl__manager_mutex);
  hl__waiter *back HL__GUARDED_BY(hl__manager_mutex);
  pthread_cond_t *turn HL__GUARDED_BY(hl__manager_mutex); /* of that thread */
};

static inline void hl__line_init(hl__line *line) {
  *line = (hl__line){.first = NULL};
  hl__list_init(&line->loose);
  hl__list_init(&line->together);
  hl__list_init(&line->ready);
  hl__list_init(&line->parked);
  line->next_asked = &line->parked;
}

/* Puts it at the end of the line. */
void hl__line_join(hl_manager *manager, hl__waiter *waiter) HL__REQUIRES(hl__manager_mutex);
/* Takes it out, granted or not; those behind it go on. */
void hl__line_leave(hl_manager *manager, hl__waiter *waiter, bool granted)
    HL__REQUIRES(hl__manager_mutex);
/* Frees the memory of a waiter that will never leave, as it is a forked child's copy. */
void hl__line_forget(hl__waiter *waiter);
/* Waits in line until it may go to the store: HL_OK; HL_TIMEOUT, or HL_CANCELLED
   when the manager is closed. It stands in line still. */
int hl__line_wait(hl_manager *manager, hl__waiter *waiter) HL__REQUIRES(hl__manager_mutex);
/* The store has refused a TRIED one. True: its worker may wait at the store, AT_STORE.
   False: it is PARKED, and its worker is free. */
bool hl__line_refused(hl_manager *manager, hl__waiter *waiter) HL__REQUIRES(hl__manager_mutex);
/* Sends pendings to the store while there is room. To be called when there is more room
   than before. */
void hl__line_advance(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* The keeper calls it: ends pendings whose time is up in line, and does the work that was
   left to the keeper, in pieces between which the mutex is free. Returns when it wants to
   be called next (hl__now_ms), or HL_FOREVER. */
int64_t hl__line_keep(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* The manager is closed: all who stand in line end. */
void hl__line_close(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* Whether a request for this plan would stand behind another if it came now. */
bool hl__line_would_follow(hl_manager *manager, const hl_plan *plan)
    HL__REQUIRES(hl__manager_mutex);

#endif
