/*
 * line.h - requests of this process that wait, in the order of their arrival.
 *
 * A database would let each of five hundred coroutines that want one node wait on
 * a connection of its own. So a request that is sure to wait behind another one of
 * this manager's waits here instead, and costs no connection and no thread; only the
 * first goes to the store. Nothing is handed over in the process: whoever comes
 * to the head of the line joins the store's queue behind everybody else's
 * requests. So other processes wait no longer than they would without the line:
 * between two grants to this process each of them has had its turn, where the
 * store's queue is fair.
 *
 * Who follows whom. Request R stands behind request P, while P waits (not while it
 * holds), in two cases.
 *
 *   - P came earlier, and P's rows, up to the first that conflicts with R, are all
 *     R's, too. Whatever P waits for, R would wait for, or would wait for P: the
 *     store would not grant R before P is granted or gives up. Where P needs, before
 *     that, a row that R does not, P may wait for something that does not concern
 *     R: then R goes to the store by itself.
 *   - P stands behind nobody, nothing conflicts, and P's rows, all shared, are all
 *     R's. Then whatever keeps P keeps R. So of a crowd that will share, one goes
 *     first, and the others follow at once when it is granted; when it gives up, the
 *     next goes alone.
 *
 * R follows all such P, and goes when the last of them has left. R holds nothing
 * while it stands in line, so no circle of waiting goes through it. What may hold
 * something already (hl_lock_extend), and what does not wait (timeout 0), does not
 * stand in line.
 *
 * How P is found. P is entered, under each of its rows up to the first exclusive
 * one, in the class of those with the same rows up to there, and the same mode of
 * that one: the path u1/a1/r1 under u1, u1/a1 and u1/a1/r1. R looks under each of its
 * rows for classes of which it has all rows. So joining and leaving cost a few steps
 * for each row, however many wait. At most HL__LINE_CLASSES classes under one
 * row are looked at, and HL__LINE_DEPTH rows of P entered: beyond that R may miss P,
 * and goes to the store, which is right, too, and costs a connection.
 *
 * Who goes to the store. A pending that follows nobody is READY. On a store with
 * connections it goes there when the pool has room, first come, first served. On
 * one without, a wait costs a thread, and a try costs next to nothing. So one worker
 * tries those that are READY, one after the other. One that is refused waits in the
 * store's queue, while fewer than pool_size pendings do. Beyond that, or when no thread
 * can be had, it is PARKED. Promised: the one parked first gets the first place that
 * becomes free, before all that came later; and
 * each parked one is tried again, every HL__LINE_ASK_MS, or, of more than can be
 * tried in that time, in turn, 64 each HL__LINE_ROUND_MS. So none that could be
 * granted is forgotten, whatever those with a place wait for. (Its
 * tries are refused while another process waits for its row; its place comes.)
 *
 * No call here does more than a few steps for others. What one departure means for
 * thousands is done by the keeper, in pieces, between which the mutex is free.
 */
#ifndef HIERLOCK_LINE_H
#define HIERLOCK_LINE_H

#include "manager.h"

#define HL__LINE_CLASSES 16
#define HL__LINE_DEPTH HL_LEVELS_MAX
#define HL__LINE_ASK_MS 100
#define HL__LINE_ROUND_MS 10

/* Up to HL__PARKED it stands in line; then a thread or a worker has it. */
typedef enum hl__place {
  HL__BEHIND,  /* it follows another one */
  HL__READY,   /* a pending that goes as soon as there is room */
  HL__PARKED,  /* a pending that was refused, and is asked for in turn */
  HL__TRIED,   /* a pending that a worker tries */
  HL__AT_STORE /* or on its way */
} hl__place;

/* A waiter in one of its classes, which is a ring in the order of arrival. The
   first, its head, is in the table. */
struct hl__member {
  hl__waiter *waiter;
  hl__member *next, *previous; /* in the ring; NULL: it is not entered */
  hl__member *chain, **link;   /* of the head: in the table */
  hl__list followers;          /* those that stand behind it because of this class */
  size_t rows;                 /* of the waiter's rows, so many from the first */
  uint8_t kind;                /* see line.c */
  bool head;
};

/* A path of the usual depth needs so many. */
#define HL__MEMBERS_INSIDE 4

struct hl__waiter {
  const hl_plan *plan;
  int64_t deadline;
  hl_pending *pending; /* NULL: a thread waits in hl__line_wait */
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

void hl__line_init(hl__line *line);
/* Puts it at the end of the line. */
void hl__line_join(hl_manager *manager, hl__waiter *waiter)
    HL__REQUIRES(hl__manager_mutex);
/* Takes it out, granted or not; those behind it go on. */
void hl__line_leave(hl_manager *manager, hl__waiter *waiter, bool granted)
    HL__REQUIRES(hl__manager_mutex);
/* Frees what a waiter has that will never leave: a forked child's. */
void hl__line_forget(hl__waiter *waiter);
/* Waits in line until it may go to the store: HL_OK; HL_TIMEOUT, or HL_CANCELLED
   when the manager is closed. It stands in line still. */
int hl__line_wait(hl_manager *manager, hl__waiter *waiter)
    HL__REQUIRES(hl__manager_mutex);
/* The store has refused it (TRIED), and would have it wait. True: a worker may
   wait for it there, AT_STORE; false: it is PARKED. */
bool hl__line_refused(hl_manager *manager, hl__waiter *waiter)
    HL__REQUIRES(hl__manager_mutex);
/* Sends pendings that may go to the store there, as far as there is room. To be
   called when there is some. */
void hl__line_advance(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* The keeper's part: ends pendings in line whose time is up, and does what was left
   to it, in pieces between which the mutex is not held. Returns when it wants to be
   called next, or HL_FOREVER. */
int64_t hl__line_keep(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* The manager is closed: all who stand in line end. */
void hl__line_close(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* Whether a request of the plan, were it to come now, would stand behind one. */
bool hl__line_would_follow(hl_manager *manager, const hl_plan *plan)
    HL__REQUIRES(hl__manager_mutex);

#endif
