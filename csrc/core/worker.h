/*
 * worker.h - threads that run tasks which block, for those who must not block.
 *
 * One is started when none is idle, reused, and ended when it has been idle for ten
 * seconds. They block all signals. How many tasks there are at once is for those to
 * decide who give them.
 */
#ifndef HIERLOCK_WORKER_H
#define HIERLOCK_WORKER_H

#include "hierlock.h"
#include "mutex.h"

typedef struct hl__task hl__task;

/* Something to be run once. It is its giver's memory, until run is called. */
struct hl__task {
  /* Called without a mutex. The worker counts as busy until run has called
     hl__worker_comes, which it must do exactly once. */
  void (*run)(hl__task *task);
  /* No worker has taken it yet. */
  bool queued HL__GUARDED_BY(hl__manager_mutex);
  hl__task *next HL__GUARDED_BY(hl__manager_mutex);
  hl__task *previous HL__GUARDED_BY(hl__manager_mutex);
};

/* Of a manager. */
typedef struct hl__workers {
  hl__task *first, *last; /* queued, in the order in which they came */
  unsigned tasks;
  unsigned idle;
  unsigned coming;     /* look for a task in a moment: just started, or about to be idle */
  unsigned running;    /* not yet on their way out */
  unsigned alive;      /* those, and the others, until they touch the manager no more */
  pthread_cond_t work; /* there is a task, or the manager is closed */
} hl__workers;

/* Has a worker run it. False: there is none, and no thread can be started. */
bool hl__worker_give(hl_manager *manager, hl__task *task) HL__REQUIRES(hl__manager_mutex);
/* A task is not to be run. False: a worker has taken it. */
bool hl__worker_take_back(hl_manager *manager, hl__task *task) HL__REQUIRES(hl__manager_mutex);
/* Whether there is a worker for one task more; starts one if need be. */
bool hl__worker_spare(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* The worker that calls it will look for a task in a moment. */
void hl__worker_comes(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* The manager has just been closed: its workers end, and exit() waits for them. */
void hl__workers_end(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* Waits for that, for a second at most: then a server hangs. */
void hl__workers_await(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);

#endif
