/*
 * worker.c - see worker.h.
 */
#include "manager.h"

#include "clock.h"
#include "exit.h"

/* An idle worker ends after this. */
#define IDLE_MS 10000
/* Within this time an interrupted call of a worker ends, if its server answers. */
#define END_MS 1000
/* The client library of a database, with TLS, needs less than half of this. */
#define STACK_BYTES ((size_t)512 * 1024)

static void task_add(hl__workers *workers, hl__task *task) HL__REQUIRES(hl__manager_mutex) {
  task->queued = true;
  hl__list_add(&workers->queue, &task->node);
  workers->tasks++;
}

static void task_remove(hl__workers *workers, hl__task *task) HL__REQUIRES(hl__manager_mutex) {
  task->queued = false;
  hl__list_remove(&task->node);
  workers->tasks--;
}

static void *worker_main(void *argument) {
  hl_manager *manager = argument;
  hl__workers *workers = &manager->workers;
  bool uses_library = manager->ops->traits.blocks;
  hl__manager_mutex_lock(manager);
  for (;;) {
    workers->coming--;
    if (workers->tasks > 0) {
      hl__task *task = HL__LIST_ENTRY(workers->queue.next, hl__task, node);
      task_remove(workers, task);
      hl__manager_mutex_unlock(manager);
      if (uses_library) hl__library_enter();
      task->run(task);
      if (uses_library) hl__library_leave();
      hl__manager_mutex_lock(manager);
      continue;
    }
    if (manager->closed) break;
    int64_t end = hl__now_ms() + IDLE_MS;
    workers->idle++;
    while (workers->tasks == 0 && !manager->closed && hl__left_ms(end) > 0)
      hl__cond_wait(&workers->work, &manager->mutex, end);
    workers->idle--;
    if (workers->tasks == 0) break;
    workers->coming++;
  }
  if (!manager->closed) { /* else hl__workers_end has counted it */
    workers->running--;
    hl__exit_await(1);
  }
  workers->alive--;
  (void)pthread_cond_broadcast(&manager->done);
  hl__manager_mutex_unlock(manager);
  if (uses_library) hl__library_enter();
  if (manager->ops->thread_end) manager->ops->thread_end();
  hl__manager_leave(manager);
  if (uses_library) hl__library_leave();
  hl__exit_await_end();
  return NULL;
}

/* False: the system gives us no thread now. */
static bool worker_start(hl_manager *manager) HL__REQUIRES(hl__manager_mutex) {
  pthread_t thread;
  hl__exit_begin();
  atomic_fetch_add(&manager->references, 1u);
  if (hl__thread_start(&thread, STACK_BYTES, worker_main, manager) != 0) {
    atomic_fetch_sub(&manager->references, 1u); /* not the last one: the caller has one */
    return false;
  }
  if (manager->closed) /* hl__workers_end has counted the others */
    hl__exit_await(1);
  else
    manager->workers.running++;
  manager->workers.coming++;
  manager->workers.alive++;
  return true;
}

/* Whether a worker is available for one more task; starts one if necessary. */
static bool is_spare(hl_manager *manager) HL__REQUIRES(hl__manager_mutex) {
  const hl__workers *workers = &manager->workers;
  /* The client library has been taken apart: a new worker would only block. */
  if (manager->ops->traits.blocks && hl__library_closed()) return false;
  return workers->idle + workers->coming > workers->tasks || worker_start(manager);
}

bool hl__worker_give(hl_manager *manager, hl__task *task) {
  hl__workers *workers = &manager->workers;
  if (!is_spare(manager)) return false;
  if (workers->coming <= workers->tasks) (void)pthread_cond_signal(&workers->work);
  task_add(workers, task);
  return true;
}

bool hl__worker_take_back(hl_manager *manager, hl__task *task) {
  if (!task->queued) return false;
  task_remove(&manager->workers, task);
  return true;
}

void hl__worker_comes(hl_manager *manager) { manager->workers.coming++; }

void hl__workers_end(hl_manager *manager) {
  (void)pthread_cond_broadcast(&manager->workers.work);
  hl__exit_await(manager->workers.running);
  manager->workers.running = 0;
}

void hl__workers_await(hl_manager *manager) {
  int64_t end = hl__now_ms() + END_MS;
  while (manager->workers.alive + manager->line.started > 0 && hl__left_ms(end) > 0)
    hl__manager_wait(&manager->done, manager, end);
}
