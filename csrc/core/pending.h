/*
 * pending.h - the inside of an hl_pending: a call that waits without blocking
 * its caller. For pending.c, line.c, lock.c and worker.c.
 *
 * Its life:
 *
 *                      room: a worker
 *      start -> IN LINE ------------> AT STORE -----------------> DONE -> wait
 *                  |  ^                  | |  its worker has come
 *                  |  '------------------' |  back
 *                  |    refused: PARKED    |
 *                  '-----------------------'----------------------^
 *                    timeout, cancel, close: at once
 *
 *   IN LINE    costs no thread and no connection; the keeper ends it when its
 *              time is up; line.h has its places
 *   AT STORE   a worker makes the blocking call. When it is given up meanwhile,
 *              it is DONE at once for its owner; the worker, interrupted, throws
 *              away what it gets, and keeps the place in line until then
 *   DONE       its descriptor is readable, and hl_pending_wait returns
 */
#ifndef HIERLOCK_PENDING_H
#define HIERLOCK_PENDING_H

#include "extend.h"
#include "line.h"

typedef enum hl__work {
  HL__ACQUIRE,
  HL__EXTEND, /* the other three: of a lock, which is in use until the end */
  HL__CHECK,
  HL__RELEASE
} hl__work;

struct hl_pending {
  atomic_uint references; /* its owner's, its worker's */
  unsigned generation;    /* of the process that started it */
  hl_manager *manager;    /* a reference */
  hl__work work;
  pthread_t owner;        /* the thread that started it */
  /* HL__ACQUIRE: to be filled in. Its worker's until it is done, or, when it is
     given up, until the end; then its owner's. NULL once it has been taken.
     Otherwise the lock that is in use; NULL once it is not. */
  hl_lock *lock;
  hl__extension *extension; /* HL__EXTEND; NULL otherwise */
  /* Of the lock in use: the store keeps it until then at least. hl__lease_ms;
     HL_FOREVER. 0: its session was interrupted, and may have ended. */
  int64_t lease_end HL__GUARDED_BY(hl__manager_mutex);
  hl_holder *holders;      /* who was in the way; its owner's once it is done */
  size_t holder_count;
  hl_options options;
  int64_t start, timeout;
  bool in_line;       /* it has a place there: it waits at all */
  hl__waiter waiter;
  /* While it waits for a worker to take it. */
  bool queued HL__GUARDED_BY(hl__manager_mutex);
  hl_pending *next_task HL__GUARDED_BY(hl__manager_mutex);
  hl_pending *previous_task HL__GUARDED_BY(hl__manager_mutex);
  /* Its worker's, BUSY: to be interrupted. NULL before and afterwards. */
  hl__slot *slot HL__GUARDED_BY(hl__manager_mutex);
  bool reserved HL__GUARDED_BY(hl__manager_mutex); /* room in the pool */
  bool done HL__GUARDED_BY(hl__manager_mutex);
  bool given_up HL__GUARDED_BY(hl__manager_mutex); /* while at the store */
  bool taken HL__GUARDED_BY(hl__manager_mutex); /* hl_pending_wait returned it */
  /* At the end of its use, what its owner wants done with the lock. */
  bool release_then HL__GUARDED_BY(hl__manager_mutex);
  bool free_then HL__GUARDED_BY(hl__manager_mutex);
  int fd HL__GUARDED_BY(hl__manager_mutex); /* eventfd; -1 until asked for */
  hl_notify_fn notify HL__GUARDED_BY(hl__manager_mutex); /* NULL: nobody asked */
  uint64_t notify_tag HL__GUARDED_BY(hl__manager_mutex);
  int status HL__GUARDED_BY(hl__manager_mutex);
  hl_error error HL__GUARDED_BY(hl__manager_mutex);
  char label[];
};

/* Gives it to a worker. False: no thread can be had now; nothing is changed. */
bool hl__pending_send(hl_pending *pending) HL__REQUIRES(hl__manager_mutex);
/* Room in the pool is kept for it, until it has its slot, or its end. */
void hl__pending_reserve(hl_pending *pending) HL__REQUIRES(hl__manager_mutex);
void hl__pending_unreserve(hl_pending *pending)
    HL__REQUIRES(hl__manager_mutex);
/* In line: its time is up; the manager is closed. */
void hl__pending_expire(hl_pending *pending) HL__REQUIRES(hl__manager_mutex);
void hl__pending_close(hl_pending *pending) HL__REQUIRES(hl__manager_mutex);
/* Its worker has got a slot: false when it has been given up. */
bool hl__pending_slot(hl_pending *pending, hl__slot *slot)
    HL__REQUIRES(hl__manager_mutex);
/* What its worker does. When it returns, the worker is counted as coming. */
void hl__pending_run(hl_pending *pending);

/* --- worker.c */

/* Has a worker run it. False: there is none, and no thread can be started. */
bool hl__worker_give(hl_manager *manager, hl_pending *pending)
    HL__REQUIRES(hl__manager_mutex);
/* Whether there is a worker for one task more; starts one if need be. */
bool hl__worker_spare(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* A task that no worker has taken yet is not to be done. False: one has. */
bool hl__worker_take_back(hl_manager *manager, hl_pending *pending)
    HL__REQUIRES(hl__manager_mutex);
/* exit() waits for n more threads, for a while; for one less. */
void hl__leave_begin(unsigned n);
void hl__leave_end(void);
/* Does not return once another thread has called exit(), which then waits for n
   threads less: nothing new is begun then. */
void hl__exit_check(unsigned n);
/* exit() is to run our handler; to be called before a thread of the manager starts. */
void hl__exit_watch(const hl_manager *manager);
/* A thread of ours is in the client library from enter to leave. Neither enter nor
   wait_end returns once exit() has closed it (hl__library_closed), except in the
   thread that runs exit(): so they are called without a mutex. Between wait_begin
   and wait_end (see hl_store_config) nobody counts as inside. */
void hl__library_enter(void);
void hl__library_leave(void);
bool hl__library_closed(void);
void hl__wait_begin(void);
void hl__wait_end(void);
/* hl__cond_wait on the manager's mutex; in the client library the mutex is given
   back before it goes on, and taken again. */
void hl__wait_unlocked(pthread_cond_t *condition, hl_manager *manager,
                       int64_t deadline) HL__REQUIRES(hl__manager_mutex);
/* The manager has just been closed: exit() waits for its workers. */
void hl__workers_leave(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);

#endif
