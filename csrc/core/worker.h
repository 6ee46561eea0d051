/*
 * worker.h - threads that run blocking tasks for callers that must not block.
 *
 * A worker is started when none is idle, is reused, and ends after ten idle seconds. Workers block
 * all signals. The callers of hl__worker_give decide how many tasks there are at once.
 */
#ifndef HIERLOCK_WORKER_H
#define HIERLOCK_WORKER_H

#include "hierlock.h"
#include "list.h"
#include "mutex.h"

typedef struct hl__task hl__task;

/* Something to run once. The memory belongs to the caller of hl__worker_give until run is
   called. */
struct hl__task {
  /* Called without a mutex. The worker counts as busy until run has called hl__worker_comes, which
     run must do exactly once. */
  void (*run)(hl__task *task);
  /* No worker has taken it yet. */
  bool queued HL__GUARDED_BY(hl__manager_mutex);
  hl__list node HL__GUARDED_BY(hl__manager_mutex); /* queued: in that list */
};

/* The workers of a manager. */
typedef struct hl__workers {
  hl__list queue; /* of the tasks, oldest first */
  unsigned tasks;
  unsigned idle;
  unsigned coming;     /* soon look for a task: just started, or about to be idle */
  unsigned running;    /* not on their way out */
  unsigned alive;      /* have not touched the manager for the last time */
  pthread_cond_t work; /* there is a task, or the manager is closed */
} hl__workers;

/* Queues the task for a worker. False: there is no worker, and no thread can be started. */
bool hl__worker_give(hl_manager *manager, hl__task *task) HL__REQUIRES(hl__manager_mutex);
/* Removes a queued task. False: a worker has already taken it. */
bool hl__worker_take_back(hl_manager *manager, hl__task *task) HL__REQUIRES(hl__manager_mutex);
/* Says that the calling worker will soon look for its next task. */
void hl__worker_comes(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* Ends the workers of a manager that has just been closed. exit() waits for them. */
void hl__workers_end(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* Waits until the workers have ended, and what the store calls back, but at most one second: then
   a server hangs. */
void hl__workers_await(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);

#endif
