/*
 * worker.c - threads that make blocking calls for those who must not block. One is
 * started when none is idle, reused, and ended when it has been idle for
 * IDLE_MS. They block all signals. How many there are at once is decided by the
 * line: as many as the pool has room for, or as wait at the embedded store, and one
 * more; and by the calls on locks that are held. When no thread can be started, the
 * line waits until one can.
 *
 * exit() takes apart what a client library stands on (OpenSSL, say) while threads
 * are in it still. So our handler, before_exit, runs before that. First it waits for
 * those that are on their way out: threads that are connecting, and threads that tell
 * the server to end a wait, because their manager was closed or their pending was
 * given up (as the collector does at the end of a Lua state). Then it closes the client
 * library to all threads but its own: see the library below. Threads that wait for a
 * lock stay in their waits; the server keeps what those have got until their time is
 * up.
 */
#include "internal.h"
#include "pending.h"

#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* An idle worker ends after this. */
#define IDLE_MS 10000
/* A client library of a database, with TLS, needs less than half of this. */
#define STACK_BYTES ((size_t)512 * 1024)

/* exit() waits for those on their way out for so long; a server that hangs keeps
   them no longer than that. */
#define EXIT_MS 2500

/* Threads on their way out. */
static atomic_uint leaving;
static atomic_bool exiting;
/* Who called exit(), and runs its handlers; set before `exiting`. */
static pthread_t exiter;

/* The library: no thread but the one that runs exit() goes into the client library
   once it is closed. Workers and keepers count as inside except while they wait,
   for the server or for each other. Whoever finds it closed stays where it is, for
   what is left of the process: never with a mutex that the thread that runs exit()
   may want. */
static atomic_bool library_closed;
static atomic_uint inside;
static _Thread_local bool is_inside;
/* exit() waits so long for those inside. They do not wait but compute: each that logs
   in reads all certificates of the system, one after the other. Only a name server
   can take them longer. */
#define EXIT_INSIDE_MS 5000

static bool is_exiter(void) {
  return atomic_load(&exiting) && pthread_equal(exiter, pthread_self());
}

static void stay(void) {
  if (is_inside) atomic_fetch_sub(&inside, 1u);
  for (;;) (void)pause();
}

static void wait_for_none(const atomic_uint *count, int64_t ms) {
  static const struct timespec moment = {0, 1000000};
  for (int64_t end = hl__now_ms() + ms;
       atomic_load(count) > 0 && hl__left_ms(end) > 0;)
    (void)nanosleep(&moment, NULL);
}

static void before_exit(void) {
  exiter = pthread_self();
  atomic_store(&exiting, true);
  wait_for_none(&leaving, EXIT_MS);
  atomic_store(&library_closed, true);
  wait_for_none(&inside, EXIT_INSIDE_MS);
}

/* A child has none of its parent's threads. */
static void in_child(void) {
  atomic_store(&leaving, 0u);
  atomic_store(&inside, 0u);
}

static void watch_forks(void) { (void)pthread_atfork(NULL, NULL, in_child); }
static void watch_exit(void) { (void)atexit(before_exit); }

/* exit() concerns managers that connect. When the first thread of one is about to begin,
   its client library has been initialised: so our handler runs before what that has
   registered. */
void hl__exit_watch(const hl_manager *manager) {
  static pthread_once_t forks = PTHREAD_ONCE_INIT, exits = PTHREAD_ONCE_INIT;
  (void)pthread_once(&forks, watch_forks);
  if (manager->ops->connects) (void)pthread_once(&exits, watch_exit);
}

bool hl__library_closed(void) { return atomic_load(&library_closed); }

void hl__library_enter(void) {
  is_inside = true;
  atomic_fetch_add(&inside, 1u); /* before looking: exit() closes, and counts */
  if (atomic_load(&library_closed) && !is_exiter()) stay();
}

void hl__library_leave(void) {
  is_inside = false;
  atomic_fetch_sub(&inside, 1u);
}

void hl__wait_begin(void) {
  if (is_inside) atomic_fetch_sub(&inside, 1u);
}

void hl__wait_end(void) {
  if (is_inside) atomic_fetch_add(&inside, 1u);
  if (atomic_load(&library_closed) && !is_exiter()) stay();
}

void hl__wait_unlocked(pthread_cond_t *condition, hl_manager *manager,
                       int64_t deadline) {
  hl__wait_begin();
  hl__cond_wait(condition, &manager->mutex, deadline);
  if (is_inside) {
    hl__manager_unlock(manager);
    hl__wait_end();
    hl__manager_lock(manager);
  }
}

void hl__leave_begin(unsigned n) {
  atomic_fetch_add(&leaving, n);
}

void hl__exit_check(unsigned n) {
  /* Handlers of the program's own may go on; they keep nobody waiting but exit(). */
  if (!atomic_load(&exiting) || is_exiter()) return;
  atomic_fetch_sub(&leaving, n);
  stay();
}

void hl__leave_end(void) { atomic_fetch_sub(&leaving, 1u); }

void hl__workers_leave(hl_manager *manager) {
  hl__leave_begin(manager->workers);
  manager->workers = 0;
}

static void task_add(hl_manager *manager, hl_pending *pending)
    HL__REQUIRES(hl__manager_mutex) {
  pending->queued = true;
  pending->next_task = NULL;
  pending->previous_task = manager->last_task;
  if (manager->last_task)
    manager->last_task->next_task = pending;
  else
    manager->first_task = pending;
  manager->last_task = pending;
  manager->task_count++;
}

static void task_remove(hl_manager *manager, hl_pending *pending)
    HL__REQUIRES(hl__manager_mutex) {
  pending->queued = false;
  if (pending->previous_task)
    pending->previous_task->next_task = pending->next_task;
  else
    manager->first_task = pending->next_task;
  if (pending->next_task)
    pending->next_task->previous_task = pending->previous_task;
  else
    manager->last_task = pending->previous_task;
  manager->task_count--;
}

/* Whether an idle worker is to stay, though it has nothing to do: of those that wait
   at the embedded store none can try what comes new, and a thread may not be to be
   had then. */
static bool is_spare(const hl_manager *manager)
    HL__REQUIRES(hl__manager_mutex) {
  return manager->line.waiting > 0 && !manager->closed &&
         manager->idle_workers + manager->coming_workers == 0;
}

static void *worker_main(void *argument) {
  hl_manager *manager = argument;
  bool connects = manager->ops->connects;
  hl__manager_lock(manager);
  for (;;) {
    manager->coming_workers--;
    hl_pending *pending = manager->first_task;
    if (pending) {
      task_remove(manager, pending);
      hl__manager_unlock(manager);
      if (connects) hl__library_enter();
      hl__pending_run(pending);
      if (connects) hl__library_leave();
      hl__manager_lock(manager);
      continue;
    }
    if (manager->closed) break;
    do {
      int64_t end = hl__now_ms() + IDLE_MS;
      manager->idle_workers++;
      while (!manager->first_task && !manager->closed && hl__left_ms(end) > 0)
        hl__cond_wait(&manager->work, &manager->mutex, end);
      manager->idle_workers--;
    } while (!manager->first_task && is_spare(manager));
    if (!manager->first_task) break;
    manager->coming_workers++;
  }
  if (!manager->closed) { /* else hl__workers_leave has counted it */
    manager->workers--;
    hl__leave_begin(1);
  }
  hl__manager_unlock(manager);
  if (connects) hl__library_enter();
  if (manager->ops->thread_end) manager->ops->thread_end();
  hl__manager_leave(manager);
  if (connects) hl__library_leave();
  hl__leave_end();
  return NULL;
}

/* False: the system has no thread for us now. */
static bool worker_start(hl_manager *manager)
    HL__REQUIRES(hl__manager_mutex) {
  sigset_t all, before;
  hl__exit_watch(manager);
  pthread_t thread;
  pthread_attr_t detached;
  (void)pthread_attr_init(&detached);
  (void)pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  (void)pthread_attr_setstacksize(&detached, STACK_BYTES);
  (void)sigfillset(&all);
  (void)pthread_sigmask(SIG_SETMASK, &all, &before);
  atomic_fetch_add(&manager->references, 1u);
  int failure = pthread_create(&thread, &detached, worker_main, manager);
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
  (void)pthread_attr_destroy(&detached);
  if (failure) {
    atomic_fetch_sub(&manager->references, 1u); /* not the last: the caller's */
    return false;
  }
  manager->workers++;
  manager->coming_workers++;
  return true;
}

bool hl__worker_spare(hl_manager *manager) {
  /* Workers would only stay. */
  if (manager->ops->connects && hl__library_closed()) return false;
  return manager->idle_workers + manager->coming_workers >
             manager->task_count ||
         worker_start(manager);
}

bool hl__worker_give(hl_manager *manager, hl_pending *pending) {
  if (!hl__worker_spare(manager)) return false;
  if (manager->coming_workers <= manager->task_count)
    (void)pthread_cond_signal(&manager->work);
  task_add(manager, pending);
  return true;
}

bool hl__worker_take_back(hl_manager *manager, hl_pending *pending) {
  if (!pending->queued) return false;
  task_remove(manager, pending);
  return true;
}
