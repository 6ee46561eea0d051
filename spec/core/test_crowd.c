/*
 * test_crowd.c - crowds of threads and pendings in one process: they come, go and give up at random
 * under a checker that sees two holders at once; they wait where a process has few threads or none;
 * and very many are started, granted and ended in time.
 */
#include "hierlock.h"
#include "clock.h"
#include "error.h"
#include "store.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "leftovers.h"
#include "waiting.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* -------------------------------------------------------------- a crowd */

#define THREADS 4
#define ROUNDS 400
#define NODES 3

static atomic_int holders[NODES]; /* exclusive: 1000; shared: 1 */
static atomic_int overlaps, grants;

static void hold(hl_lock *lock, int node, bool shared, unsigned *seed) {
  int before = atomic_fetch_add(&holders[node], shared ? 1 : 1000);
  if (before >= 1000 || (!shared && before > 0)) atomic_fetch_add(&overlaps, 1);
  atomic_fetch_add(&grants, 1);
  if (rand_r(seed) % 4 == 0) (void)usleep((unsigned)rand_r(seed) % 300);
  atomic_fetch_sub(&holders[node], shared ? 1 : 1000);
  hl_lock_free(lock);
}

typedef struct worker {
  hl_manager *manager;
  unsigned seed;
} worker;

static void *crowd(void *argument) {
  worker *self = argument;
  static const char *const paths[NODES] = {"u1/a1/r1", "u1/a1/r2", "u1/a2/r1"};
  for (int i = 0; i < ROUNDS; i++) {
    hl_pending *pending[8];
    int node[8];
    bool shared[8];
    int n = 1 + rand_r(&self->seed) % 8;
    for (int j = 0; j < n; j++) {
      node[j] = rand_r(&self->seed) % NODES;
      shared[j] = rand_r(&self->seed) % 3 == 0;
      pending[j] = start(self->manager, paths[node[j]], shared[j] ? HL_SHARED : HL_EXCLUSIVE,
                         rand_r(&self->seed) % 20);
    }
    for (int j = 0; j < n; j++) {
      hl_lock *lock = NULL;
      int what = rand_r(&self->seed) % 10;
      if (what < 2) hl_pending_cancel(pending[j]);
      if (what > 3 && hl_pending_wait(pending[j], DEADLINE, &lock, NULL) == 0)
        hold(lock, node[j], shared[j], &self->seed);
      hl_pending_free(pending[j]);
    }
  }
  return NULL;
}

static void test_crowd(void **state) {
  (void)state;
  hl_manager *managers[2] = {open_manager(), open_manager()};
  pthread_t threads[THREADS];
  worker workers[THREADS];
  for (int i = 0; i < THREADS; i++) {
    workers[i] = (worker){managers[i % 2], (unsigned)i};
    assert_int_equal(pthread_create(&threads[i], NULL, crowd, &workers[i]), 0);
  }
  for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_join(threads[i], NULL), 0);
  assert_int_equal(atomic_load(&overlaps), 0);
  assert_true(atomic_load(&grants) > ROUNDS);
  /* Nothing was left locked, nothing waits. */
  assert_free(managers[0], "u1 u2");
  for (int i = 0; i < 2; i++) {
    hl_stats stats;
    do {
      hl_manager_stats(managers[i], &stats);
    } while (stats.held > 0);
    assert_int_equal(stats.waiting, 0);
    hl_manager_close(managers[i]);
  }
}

/* ------------------------------------------------------- few threads */

#define BELOW 3000

static int threads_now(void) {
  char line[128];
  int n = 0;
  FILE *file = fopen("/proc/self/status", "r");
  assert_non_null(file);
  while (fgets(line, sizeof line, file))
    if (sscanf(line, "Threads: %d", &n) == 1) break;
  (void)fclose(file);
  return n;
}

/* Very many wait below an account, each for a node of its own, so that none is sure
   to wait behind another. */
static hl_pending **many_below(hl_manager *manager) {
  static hl_pending *pending[BELOW];
  char path[32];
  for (int i = 0; i < BELOW; i++) {
    (void)snprintf(path, sizeof path, "u1/a1/r%d", i);
    /* Shared, as two of them may be in one bucket. */
    pending[i] = start(manager, path, HL_SHARED, 3 * DEADLINE);
  }
  return pending;
}

/* Whatever the pendings wait for, others are granted a node that is free, or becomes free. */
static void others_go_on(hl_manager *manager, hl_manager *other) {
  hl_lock_free(granted(start(manager, "u2", HL_EXCLUSIVE, DEADLINE)));
  hl_lock *held = acquire(other, "u3", HL_EXCLUSIVE);
  hl_pending *late = start(manager, "u3/a1", HL_EXCLUSIVE, DEADLINE);
  hl_pending *later = start(manager, "u3/a1", HL_EXCLUSIVE, DEADLINE);
  hl_pending *impatient = start(manager, "u3/a1/r1", HL_EXCLUSIVE, 50);
  failed(impatient, HL_TIMEOUT);
  (void)usleep(50000);
  assert_false(hl_pending_done(late));
  hl_lock_free(held);
  hl_lock_free(granted(late));
  hl_lock_free(granted(later));
}

static void grant_many_below(hl_manager *manager, hl_manager *other, hl_lock *held, int threads) {
  hl_pending **pending = many_below(manager);
  (void)usleep(100000);
  others_go_on(manager, other);
  assert_true(threads_now() <= threads);
  for (int i = 0; i < BELOW; i += 3) hl_pending_cancel(pending[i]);
  hl_lock_free(held);
  for (int i = 0; i < BELOW; i++)
    if (i % 3)
      hl_lock_free(granted(pending[i]));
    else
      failed(pending[i], HL_CANCELLED);
  assert_true(threads_now() <= threads);
}

static void test_threads_are_bounded(void **state) {
  (void)state;
  hl_manager *manager = open_manager(), *other = open_manager();
  hl_lock *held = acquire(other, "u1/a1", HL_EXCLUSIVE);
  /* pool_size, one that tries, the two keepers, this thread; a few on their way out. */
  grant_many_below(manager, other, held, 64 + 16);
  hl_manager_close(other);
  hl_manager_close(manager);
}

static void *nothing(void *argument) { return argument; }

/* From now on this process can have that many threads more, or a few less. */
static void limit_threads(rlim_t more) {
  pthread_t thread;
  struct rlimit limit;
  /* The superuser has no limit, and others may have processes already. */
  if (geteuid() == 0) assert_int_equal(setuid(54321 + (uid_t)getpid() % 10000), 0);
  assert_int_equal(getrlimit(RLIMIT_NPROC, &limit), 0);
  limit.rlim_cur = 1;
  do {
    limit.rlim_cur += more;
    assert_int_equal(setrlimit(RLIMIT_NPROC, &limit), 0);
  } while (pthread_create(&thread, NULL, nothing, NULL) != 0);
  assert_int_equal(pthread_join(thread, NULL), 0);
}

/* Runs one test in a process of its own, as limits last. */
static void in_process(const char *name) {
  /* Read the program's name first: under valgrind the link is right, but leads to valgrind. */
  char program[PATH_MAX];
  ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
  assert_true(n > 0);
  program[n] = '\0';
  pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    (void)execl(program, "test_crowd", name, NULL);
    _exit(127);
  }
  int status;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), 0);
}

/* A call that cannot have a thread now waits until it can. */
static void with_few_threads(void **state) {
  (void)state;
  limit_threads(6);
  hl_manager *manager = open_manager(), *other = open_manager();
  hl_lock *held = acquire(other, "u1/a1", HL_EXCLUSIVE);
  grant_many_below(manager, other, held, 8);
  hl_manager_close(other);
  hl_manager_close(manager);
}

static void test_few_threads(void **state) {
  (void)state;
  in_process("with_few_threads");
}

/* A crowd is let go when there is no thread for any of it. */
static void without_a_thread(void **state) {
  (void)state;
  enum { CROWD = 10000 };
  static hl_pending *pending[CROWD];
  limit_threads(3);
  hl_manager *manager = open_manager(), *other = open_manager();
  hl_lock *held = acquire(other, "u1/a1", HL_EXCLUSIVE);
  for (int i = 0; i < CROWD; i++) pending[i] = start(manager, "u1/a1/r1", HL_SHARED, 3 * DEADLINE);
  (void)usleep(20000);
  struct rlimit limit;
  assert_int_equal(getrlimit(RLIMIT_NPROC, &limit), 0);
  limit.rlim_cur = 1;
  assert_int_equal(setrlimit(RLIMIT_NPROC, &limit), 0);
  hl_lock_free(held);
  for (int i = 0; i < CROWD; i++) hl_lock_free(granted(pending[i]));
  hl_manager_close(other);
  hl_manager_close(manager);
}

static void test_a_crowd_without_a_thread(void **state) {
  (void)state;
  in_process("without_a_thread");
}

/* No thread at all: it is said at once, and that it may be otherwise later. */
static void without_any_thread(void **state) {
  (void)state;
  hl_error error;
  hl_lock *lock;
  limit_threads(2);
  hl_manager *manager = open_manager(), *other = open_manager();
  hl_lock *held = acquire(other, "u1", HL_EXCLUSIVE);
  struct rlimit limit;
  assert_int_equal(getrlimit(RLIMIT_NPROC, &limit), 0);
  limit.rlim_cur = 1;
  assert_int_equal(setrlimit(RLIMIT_NPROC, &limit), 0);
  hl_pending *pending = start(manager, "u1/a1", HL_EXCLUSIVE, 200);
  assert_int_equal(hl_pending_wait(pending, DEADLINE, &lock, &error), HL_BUSY);
  assert_true(error.retryable);
  hl_pending_free(pending);
  hl_plan *plan = plan_of(other, "u2", HL_EXCLUSIVE);
  assert_int_equal(hl_lock_start_extend(held, plan, NULL, &pending, &error), HL_OK);
  assert_int_equal(hl_pending_wait(pending, DEADLINE, &lock, &error), HL_BUSY);
  assert_true(error.retryable);
  assert_true(hl_lock_is_held(held));
  hl_pending_free(pending);
  hl_plan_free(plan);
  /* The lock goes back all the same. */
  assert_int_equal(hl_lock_start_release(held, &pending, &error), HL_OK);
  assert_int_equal(hl_pending_wait(pending, DEADLINE, &lock, &error), HL_BUSY);
  hl_pending_free(pending);
  hl_lock_free(held);
  assert_free(manager, "u1");
  hl_manager_close(other);
  hl_manager_close(manager);
}

static void test_without_any_thread(void **state) {
  (void)state;
  in_process("without_any_thread");
}

/* The keeper refreshes leases by itself where it can have no worker. */
static void refreshed_without_a_worker(void **state) {
  (void)state;
  enum { LEASES = 20, TTL = 300 };
  hl_lock *leases[LEASES];
  hl_options options = HL_OPTIONS_INIT;
  hl_error error;
  limit_threads(2);
  hl_manager *manager = open_manager();
  options.ttl = TTL;
  options.auto_refresh = true;
  struct rlimit limit;
  for (int i = 0; i < LEASES; i++) {
    char path[32];
    (void)snprintf(path, sizeof path, "u1/a%d", i);
    hl_plan *plan = plan_of(manager, path, HL_EXCLUSIVE);
    assert_int_equal(hl_acquire(manager, plan, &options, &leases[i], &error), HL_OK);
    hl_plan_free(plan);
    /* Its keeper has begun. */
    assert_int_equal(getrlimit(RLIMIT_NPROC, &limit), 0);
    limit.rlim_cur = 1;
    assert_int_equal(setrlimit(RLIMIT_NPROC, &limit), 0);
  }
  (void)usleep(4 * TTL * 1000);
  for (int i = 0; i < LEASES; i++) {
    assert_true(hl_lock_is_held(leases[i]));
    assert_int_equal(hl_lock_release(leases[i], true, &error), HL_OK);
    hl_lock_free(leases[i]);
  }
  hl_manager_close(manager);
}

static void test_refreshed_without_a_worker(void **state) {
  (void)state;
  in_process("refreshed_without_a_worker");
}

/* --------------------------------------------------------- very many */

/* Very many waiters as one thread, an event loop's, sees them: the time for all of them, and the
   longest call. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define FEW 500
#define MANY 2000
#else
#define FEW 5000
#define MANY 20000
#endif
/* No call may keep the others waiting for longer, while MANY wait. Counted is the processor time
   of this process meanwhile, in any thread, as the machine may give the processor to others in
   the middle of a call. The count is never more than the time that passed. In some of the TRIES
   another thread may have worked then that was not waited for. HIERLOCK_SLOWER: so many times
   slower is what runs the program, valgrind for instance. */
#define STALL_MS 20
#define TRIES 8
/* Nor may any call sleep for long. */
#define SLEEP_MS 1000
/* Four times as many may take so many times as long. */
#define LINEAR 10

static double clock_ms(clockid_t id) {
  struct timespec t;
  (void)clock_gettime(id, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static double now_ms(void) { return clock_ms(CLOCK_MONOTONIC); }

typedef struct moment {
  double passed, worked; /* ms */
} moment;

static moment moment_now(void) { return (moment){now_ms(), clock_ms(CLOCK_PROCESS_CPUTIME_ID)}; }

static double work_since(moment began) {
  moment now = moment_now();
  double passed = now.passed - began.passed, worked = now.worked - began.worked;
  return worked < passed ? worked : passed;
}

typedef struct measured {
  double total, stall; /* ms, see STALL_MS */
  double slept;        /* ms; passed in the longest call, see SLEEP_MS */
} measured;

#define TIMED(m, call)                                                                             \
  do {                                                                                             \
    moment began_ = moment_now();                                                                  \
    call;                                                                                          \
    double took_ = work_since(began_);                                                             \
    if (took_ > (m)->stall) (m)->stall = took_;                                                    \
    took_ = now_ms() - began_.passed;                                                              \
    if (took_ > (m)->slept) (m)->slept = took_;                                                    \
  } while (0)

/* Looks at the manager all the time until so many wait. */
static void until_waiting(hl_manager *manager, unsigned n, measured *m) {
  static const struct timespec between = {0, 20000};
  hl_stats stats;
  double end = now_ms() + 60000;
  do {
    TIMED(m, hl_manager_stats(manager, &stats));
    (void)nanosleep(&between, NULL);
    assert_true(now_ms() < end);
  } while (stats.waiting > n);
}

typedef struct crowd_of {
  hl_manager *manager, *other;
  hl_lock *held; /* by the other */
  hl_pending **pending;
  int n;
} crowd_of;

static void crowd_start(crowd_of *self, int n, const char *held) {
  *self = (crowd_of){.manager = open_manager(), .other = open_manager(), .n = n};
  self->held = acquire(self->other, held, HL_EXCLUSIVE);
  self->pending = calloc((size_t)n, sizeof(hl_pending *));
  assert_non_null(self->pending);
}

static void crowd_free(crowd_of *self) {
  for (int i = 0; i < self->n; i++) hl_pending_free(self->pending[i]);
  free(self->pending);
  hl_lock_free(self->held);
  if (self->manager) hl_manager_close(self->manager);
  hl_manager_close(self->other);
}

/* All for one node, exclusively. */
static measured crowd_starts(crowd_of *self, hl_mode mode, int64_t timeout) {
  measured m = {0};
  moment began = moment_now();
  for (int i = 0; i < self->n; i++)
    TIMED(&m, self->pending[i] = start(self->manager, "u1/a1/r1", mode, timeout));
  m.total = work_since(began);
  return m;
}

static measured many_start(int n) {
  crowd_of crowd;
  crowd_start(&crowd, n, "u1/a1");
  measured m = crowd_starts(&crowd, HL_EXCLUSIVE, -1);
  crowd_free(&crowd);
  return m;
}

static measured many_cancel(int n) {
  crowd_of crowd;
  measured m = {0};
  crowd_start(&crowd, n, "u1/a1");
  (void)crowd_starts(&crowd, HL_EXCLUSIVE, -1);
  unsigned seed = 1;
  for (int i = 0; i < n; i++) { /* in no order */
    int j = rand_r(&seed) % n;
    hl_pending *pending = crowd.pending[i];
    crowd.pending[i] = crowd.pending[j];
    crowd.pending[j] = pending;
  }
  moment began = moment_now();
  for (int i = 0; i < n; i++) TIMED(&m, hl_pending_cancel(crowd.pending[i]));
  m.total = work_since(began);
  crowd_free(&crowd);
  return m;
}

/* The first of a crowd gives up, and then the next, who stands for the rest. */
static measured many_cancel_shared(int n) {
  crowd_of crowd;
  measured m = {0};
  crowd_start(&crowd, n, "u1/a1");
  (void)crowd_starts(&crowd, HL_SHARED, -1);
  moment began = moment_now();
  for (int i = 0; i < n; i++) TIMED(&m, hl_pending_cancel(crowd.pending[i]));
  m.total = work_since(began);
  crowd_free(&crowd);
  return m;
}

static measured many_grant(int n) {
  crowd_of crowd;
  measured m = {0};
  crowd_start(&crowd, n, "u1/a1");
  (void)crowd_starts(&crowd, HL_SHARED, DEADLINE * 5);
  moment began = moment_now();
  TIMED(&m, hl_lock_free(crowd.held));
  crowd.held = NULL;
  until_waiting(crowd.manager, 0, &m);
  m.total = work_since(began);
  for (int i = 0; i < n; i++) {
    hl_lock *lock = NULL;
    assert_int_equal(hl_pending_wait(crowd.pending[i], 0, &lock, NULL), HL_OK);
    hl_lock_free(lock);
  }
  crowd_free(&crowd);
  return m;
}

static measured many_expire(int n) {
  crowd_of crowd;
  measured m = {0};
  crowd_start(&crowd, n, "u1/a1");
  int64_t end = hl__now_ms() + (n < MANY ? 1000 : 2500);
  for (int i = 0; i < n; i++)
    crowd.pending[i] =
        start(crowd.manager, "u1/a1/r1", HL_EXCLUSIVE, end > hl__now_ms() ? end - hl__now_ms() : 1);
  while (hl__now_ms() <= end) (void)usleep(200);
  moment began = moment_now();
  until_waiting(crowd.manager, 0, &m);
  m.total = work_since(began);
  for (int i = 0; i < n; i++) {
    failed(crowd.pending[i], HL_TIMEOUT);
    crowd.pending[i] = NULL;
  }
  crowd_free(&crowd);
  return m;
}

/* Each waits for a node of its own, behind a waiter that gives up. */
static measured many_go(int n) {
  crowd_of crowd;
  measured m = {0};
  char path[32];
  crowd_start(&crowd, n, "u1");
  hl_pending *first = start(crowd.manager, "u1", HL_EXCLUSIVE, -1);
  for (int i = 0; i < n; i++) {
    (void)snprintf(path, sizeof path, "u1/a%d/r%d", i / 10, i);
    /* Shared, as two of them may be in one bucket. */
    crowd.pending[i] = start(crowd.manager, path, HL_SHARED, DEADLINE * 5);
  }
  moment began = moment_now();
  TIMED(&m, hl_pending_free(first));
  hl_lock_free(crowd.held);
  crowd.held = NULL;
  until_waiting(crowd.manager, 0, &m);
  m.total = work_since(began);
  crowd_free(&crowd);
  return m;
}

static measured many_close(int n) {
  crowd_of crowd;
  measured m = {0};
  crowd_start(&crowd, n, "u1/a1");
  (void)crowd_starts(&crowd, HL_SHARED, -1);
  TIMED(&m, hl_manager_close(crowd.manager));
  m.total = m.stall;
  crowd.manager = NULL;
  for (int i = 0; i < n; i++) assert_true(hl_pending_done(crowd.pending[i]));
  crowd_free(&crowd);
  return m;
}

static void test_many(void **state) {
  (void)state;
  static const struct {
    const char *what;
    measured (*run)(int n);
  } all[] = {
      {"start", many_start},        {"cancel", many_cancel}, {"cancel shared", many_cancel_shared},
      {"grant shared", many_grant}, {"let go", many_go},     {"expire", many_expire},
      {"close", many_close}};
  const char *slower = getenv("HIERLOCK_SLOWER");
  double factor = slower ? strtod(slower, NULL) : 1, limit = STALL_MS * factor;
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    measured few, many;
    int tries = 0;
    do { /* what others do on the machine shall not decide */
      few = all[i].run(FEW);
      many = all[i].run(MANY);
    } while (++tries < TRIES && (many.stall >= limit || many.slept >= SLEEP_MS * factor ||
                                 many.total >= LINEAR * few.total + 200));
    print_message("%-14s %d: %7.1f ms, stall %5.2f; %d: %7.1f ms, stall %5.2f, "
                  "%5.1f with what others did\n",
                  all[i].what, FEW, few.total, few.stall, MANY, many.total, many.stall, many.slept);
    assert_true(many.stall < limit);
    assert_true(many.slept < SLEEP_MS * factor);
    /* With a few milliseconds, the machine's mood decides. */
    assert_true(many.total < LINEAR * few.total + 200);
  }
}

/* -------------------------------------------------------- all are refused */

static hl_store_ops refusing_store;
static atomic_bool refuses;

static int refusing_start(hl_session *session, const hl_request *request, hl_started *started,
                          hl_error *error) {
  if (!atomic_load(&refuses)) return hl_store_file.start(session, request, started, error);
  return hl__error(error, HL_ESTORE, "refused");
}

/* Each that leaves lets the next one go, which the store refuses at once. */
static void test_all_are_refused(void **state) {
  (void)state;
  const hl_store_ops *const stores[] = {&refusing_store, NULL};
  hl_config config = HL_CONFIG_INIT;
  crowd_of crowd;
  char dsn[80];
  refusing_store = hl_store_file;
  refusing_store.start = refusing_start;
  crowd_start(&crowd, MANY, "u1/a1");
  hl_manager_close(crowd.manager);
  (void)snprintf(dsn, sizeof dsn, "file:%s", directory);
  config.dsn = dsn;
  config.stores = stores;
  assert_int_equal(hl_manager_open(&config, &crowd.manager, NULL), HL_OK);
  (void)crowd_starts(&crowd, HL_EXCLUSIVE, 10 * DEADLINE);
  atomic_store(&refuses, true);
  hl_lock_free(crowd.held);
  crowd.held = NULL;
  hl_lock_free(granted(crowd.pending[0]));
  for (int i = 1; i < MANY; i++) failed(crowd.pending[i], HL_ESTORE);
  crowd.n = 0;
  crowd_free(&crowd);
}

/* The manager whose keeper is watched, and what its pauses were: how many waited in the first, and
   how many were of a second or more. */
static _Atomic(hl_manager *) paused;
static atomic_uint_fast64_t waiting_then;
static atomic_int long_pauses;

int nanosleep(const struct timespec *time, struct timespec *rest) {
  hl_manager *manager = atomic_load(&paused);
  hl_stats stats;
  if (manager) {
    hl_manager_stats(manager, &stats);
    if (atomic_load(&waiting_then) == 0) atomic_store(&waiting_then, stats.waiting);
    if (time->tv_sec > 0) atomic_fetch_add(&long_pauses, 1);
  }
  int failure = clock_nanosleep(CLOCK_MONOTONIC, 0, time, rest);
  if (failure == 0) return 0;
  errno = failure;
  return -1;
}

static void all_expire_at_once(int n) {
  crowd_of crowd;
  crowd_start(&crowd, n, "u1/a1");
  int64_t end = hl__now_ms() + 1000;
  for (int i = 0; i < n; i++)
    crowd.pending[i] = start(crowd.manager, "u1/a1/r1", HL_EXCLUSIVE, hl__left_ms(end));
  atomic_store(&paused, crowd.manager);
  for (int i = 0; i < n; i++)
    assert_int_equal(hl_pending_wait(crowd.pending[i], DEADLINE, &(hl_lock *){NULL}, NULL),
                     HL_TIMEOUT);
  atomic_store(&paused, NULL);
  crowd_free(&crowd);
}

/* A thread that takes a mutex again at once starves the others, so the keeper sleeps between two
   pieces of its work: not for long, as waits would end late. On a busy machine others may have
   ended the waits before the keeper comes. */
static void test_the_keeper_gives_way(void **state) {
  (void)state;
  for (int i = 0; i < 10 && atomic_load(&waiting_then) == 0; i++) all_expire_at_once(600);
  assert_in_range(atomic_load(&waiting_then), 1, 599);
  assert_int_equal(atomic_load(&long_pauses), 0);
}

/* A handler of exit() may close a manager whose pendings are granted at this moment. */

/* --------------------------------------------------------- amidst exit() */

static crowd_of closed_late;

static void close_late(void) {
  hl_lock_free(closed_late.held);
  (void)usleep(200000); /* the keeper and the store's thread let the crowd go */
  hl_manager_close(closed_late.manager);
}

/* With a store that blocks there is a handler of exit(), which says that it has begun. */
static void exit_with_a_crowd(void) {
  static hl_store_ops blocking_store;
  const hl_store_ops *const stores[] = {&blocking_store, NULL};
  hl_config config = HL_CONFIG_INIT;
  hl_manager *blocking;
  char dsn[80];
  if (atexit(close_late) != 0) _exit(1);
  blocking_store = hl_store_file;
  blocking_store.traits.blocks = true;
  (void)snprintf(dsn, sizeof dsn, "file:%s", directory);
  config.dsn = dsn;
  config.stores = stores;
  if (hl_manager_open(&config, &blocking, NULL) != HL_OK) _exit(2);
  crowd_start(&closed_late, FEW, "u1/a1");
  (void)crowd_starts(&closed_late, HL_SHARED, 10 * DEADLINE);
  exit(0); /* NOLINT: that is the test */
}

/* A handler of exit() may close a manager whose pendings are granted at this moment. */
static void test_closed_by_a_handler_of_exit(void **state) {
  (void)state;
  int status = 0;
  pid_t child = fork(), ended = 0;
  if (child == 0) exit_with_a_crowd();
  for (int i = 0; i < DEADLINE && ended == 0; i++) {
    (void)usleep(1000);
    ended = waitpid(child, &status, WNOHANG);
  }
  if (ended == 0) {
    (void)kill(child, SIGKILL);
    (void)waitpid(child, NULL, 0);
  }
  assert_int_equal(ended, child);
  assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(int argc, char **argv) {
  const struct CMUnitTest alone[] = {
      cmocka_unit_test(with_few_threads),
      cmocka_unit_test(without_a_thread),
      cmocka_unit_test(without_any_thread),
      cmocka_unit_test(refreshed_without_a_worker),
  };
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_crowd),
      cmocka_unit_test(test_threads_are_bounded),
      cmocka_unit_test(test_few_threads),
      cmocka_unit_test(test_a_crowd_without_a_thread),
      cmocka_unit_test(test_without_any_thread),
      cmocka_unit_test(test_refreshed_without_a_worker),
      cmocka_unit_test(test_many),
      cmocka_unit_test(test_all_are_refused),
      cmocka_unit_test(test_the_keeper_gives_way),
      cmocka_unit_test(test_closed_by_a_handler_of_exit),
      cmocka_unit_test(nothing_is_left),
  };
  make_directory_name();
  int failures = 0;
  bool by_itself = false;
  for (size_t i = 0; argc > 1 && i < sizeof alone / sizeof *alone; i++)
    if (strcmp(argv[1], alone[i].name) == 0) {
      by_itself = true;
      failures += _cmocka_run_group_tests(alone[i].name, &alone[i], 1, NULL, NULL);
    }
  if (argc > 1 && !by_itself) cmocka_set_test_filter(argv[1]);
  if (!by_itself) failures = cmocka_run_group_tests_name("crowd", tests, NULL, NULL);
  struct rlimit limit;
  (void)getrlimit(RLIMIT_NPROC, &limit);
  limit.rlim_cur = limit.rlim_max;
  (void)setrlimit(RLIMIT_NPROC, &limit);
  return !remove_directory() || failures > 0;
}
