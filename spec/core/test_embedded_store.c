/*
 * test_embedded_store.c - the embedded store, through its hl_store_ops: its grants, their order,
 * and the leftovers when processes die, fork or lose their directory. Other processes are real
 * ones: a forked child opens the store afresh, as another program would. Leases:
 * test_embedded_leases.c; the table beneath: test_embedded.c.
 */
#include "../../csrc/stores/embedded/embedded_store.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "leftovers.h"

/* For how long something must stay as it is before it is believed to stay. */
#define STAYS_MS 60
/* After that much a condition that should come true has failed to. */
#define PATIENCE_MS 20000
/* Late by more than the promised 10 ms, only because a test machine is busy. */
#define SLACK_MS 60

/* How often a row goes from one thread to another, to meet each moment of that. */
enum {
  HANDOVERS = 5000
};

static const hl_store_ops *const ops = &hl_store_file;
static hl_layout *layout;
static char directory[64];
static hl_dsn dsn;
static hl_store_config config;

/* Shared by a test's processes; zero when the test begins. */
static struct shared {
  atomic_int step, stop, holders[16], writers[16], wrong, grants[16];
  _Atomic uint64_t token;
} * shared;

/* -------------------------------------------------------------- helpers */

static hl_store *store_new(void) {
  hl_store *store;
  hl_error error;
  config.pid = getpid();
  if (ops->open(&config, &store, &error) != HL_OK) {
    (void)fprintf(stderr, "open: %s\n", error.message);
    abort();
  }
  return store;
}

static hl_session *session_new(hl_store *store) {
  hl_session *session;
  if (ops->session_open(store, HL_FOREVER, &session, NULL) != HL_OK) abort();
  return session;
}

static hl_row row(unsigned level, uint32_t bucket, hl_mode mode) {
  return (hl_row){.level = (uint8_t)level, .bucket = bucket, .mode = (uint8_t)mode};
}

/* timeout: ms; 0 tries once. */
static int take(hl_session *session, const hl_row *rows, size_t n, int64_t timeout, bool extend,
                hl_error *error) {
  hl_request request = {.rows = rows,
                        .n = n,
                        .extend = extend,
                        .try_once = timeout == 0,
                        .deadline = hl__deadline(hl__now_ms(), timeout),
                        .path = "u1/a1",
                        .label = "a\nlabel",
                        .label_size = 7,
                        .mode = HL_EXCLUSIVE};
  hl_grant grant;
  int status = ops->take(session, &request, &grant, error);
  if (status == HL_OK) atomic_store(&shared->token, grant.token);
  return status;
}

static int take1(hl_session *session, uint32_t bucket, hl_mode mode, int64_t timeout) {
  hl_row r = row(2, bucket, mode);
  return take(session, &r, 1, timeout, false, NULL);
}

static int extend1(hl_session *session, uint32_t bucket, hl_mode mode, int64_t timeout) {
  hl_row r = row(2, bucket, mode);
  return take(session, &r, 1, timeout, true, NULL);
}

static void give(hl_session *session) { assert_int_equal(ops->give_back(session, NULL), HL_OK); }

static void sleep_ms(int64_t ms) {
  struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
  (void)nanosleep(&t, NULL);
}

#define WAIT_UNTIL(condition)                                                                      \
  do {                                                                                             \
    int64_t end_ = hl__now_ms() + PATIENCE_MS;                                                     \
    while (!(condition) && hl__now_ms() < end_) sleep_ms(1);                                       \
    if (!(condition)) {                                                                            \
      (void)fprintf(stderr, "in vain: %s\n", #condition);                                          \
      abort();                                                                                     \
    }                                                                                              \
  } while (0)

/* Runs fn in another process, which ends with it. */
static pid_t spawn(void (*fn)(intptr_t), intptr_t argument) {
  pid_t pid = fork();
  if (pid == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* also where a test fails */
    fn(argument);
    _exit(0);
  }
  assert_true(pid > 0);
  return pid;
}

static void reap(pid_t pid) {
  int status;
  assert_int_equal(waitpid(pid, &status, 0), pid);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), 0);
}

static void murder(pid_t pid) {
  assert_int_equal(kill(pid, SIGKILL), 0);
  assert_int_equal(waitpid(pid, NULL, 0), pid);
}

static int count_files(const char *path, const char *prefix) {
  DIR *names = opendir(path);
  int n = 0;
  assert_non_null(names);
  for (struct dirent *file; (file = readdir(names));)
    n += strncmp(file->d_name, prefix, strlen(prefix)) == 0;
  (void)closedir(names);
  return n;
}

static void remove_path(const char *path) {
  DIR *names = opendir(path);
  if (!names) return;
  for (struct dirent *file; (file = readdir(names));) (void)unlinkat(dirfd(names), file->d_name, 0);
  (void)closedir(names);
  (void)rmdir(path);
}

static void remove_directory(void) { remove_path(directory); }

/* A name in the directory, or beside it ("-x"); valid until the next call. */
static const char *path_of(const char *name) {
  static char path[2][400];
  static int turn;
  turn = !turn;
  (void)snprintf(path[turn], sizeof path[turn], "%s%s%s", directory, *name == '-' ? "" : "/", name);
  return path[turn];
}

static int set_up(void **state) {
  (void)state;
  memset(shared, 0, sizeof *shared);
  (void)alarm(600); /* a test that hangs ends; valgrind is slow */
  return 0;
}

static int tear_down(void **state) {
  (void)state;
  (void)alarm(0);
  remove_directory();
  remove_path(path_of("-x"));
  (void)unlink(path_of("-link"));
  return 0;
}

/* A process that takes bucket 1, says so (step 1), and gives it back when told
   to (stop). */
static void hold_until_stop(intptr_t mode) {
  hl_session *session = session_new(store_new());
  if (take1(session, 1, (hl_mode)mode, HL_FOREVER) != HL_OK) _exit(1);
  atomic_store(&shared->step, 1);
  WAIT_UNTIL(atomic_load(&shared->stop));
  (void)ops->give_back(session, NULL);
}

typedef struct waiting {
  pthread_t thread;
  hl_session *session;
  hl_row row;
  int64_t timeout;
  bool extend;
  atomic_int status; /* 99: not yet */
  int order;
} waiting;

static atomic_int granted_count;

static void *waiting_run(void *argument) {
  waiting *w = argument;
  int status = take(w->session, &w->row, 1, w->timeout, w->extend, NULL);
  w->order = atomic_fetch_add(&granted_count, 1);
  atomic_store(&w->status, status);
  return NULL;
}

/* Starts a thread that takes bucket 1; it is in the queue, or done, on return. */
static void waiting_start(waiting *w, hl_session *session, hl_mode mode, int64_t timeout,
                          bool extend) {
  *w = (waiting){.session = session, .row = row(2, 1, mode), .timeout = timeout, .extend = extend};
  atomic_init(&w->status, 99);
  assert_int_equal(pthread_create(&w->thread, NULL, waiting_run, w), 0);
  hl__embedded_session *s = hl__embedded_session_of(session);
  int64_t end = hl__now_ms() + PATIENCE_MS;
  for (bool there = false; !there && hl__now_ms() < end; sleep_ms(1)) {
    (void)pthread_mutex_lock(&s->guard);
    there = atomic_load(&s->table->waits) || atomic_load(&w->status) != 99;
    (void)pthread_mutex_unlock(&s->guard);
  }
}

static int waiting_end(waiting *w) {
  assert_int_equal(pthread_join(w->thread, NULL), 0);
  return atomic_load(&w->status);
}

/* An observer's view. */
typedef struct seen {
  int held, waiting;
  hl_holder last;
} seen;

static void see(void *context, const hl_holder *holder) {
  seen *s = context;
  *(holder->waiting ? &s->waiting : &s->held) += 1;
  s->last = *holder;
}

static int holders(hl_session *session, const hl_row *rows, size_t n, hl_holder_fn fn,
                   void *context) {
  const hl_lease_filter filter = {.rows = rows, .n = n};
  return ops->holders(session, &filter, fn, context, HL_FOREVER, NULL);
}

static seen look_for(hl_session *session, uint32_t bucket, hl_mode mode) {
  seen s = {0};
  hl_row r = row(2, bucket, mode);
  assert_int_equal(holders(session, &r, 1, see, &s), HL_OK);
  return s;
}

/* ------------------------------------------------- who excludes whom */

static const struct {
  hl_mode held, wanted;
  int status;
} table[] = {
    {HL_SHARED, HL_SHARED, HL_OK},
    {HL_SHARED, HL_EXCLUSIVE, HL_TIMEOUT},
    {HL_EXCLUSIVE, HL_SHARED, HL_TIMEOUT},
    {HL_EXCLUSIVE, HL_EXCLUSIVE, HL_TIMEOUT},
};
#define TABLE_SIZE (sizeof table / sizeof *table)

static void sessions_and_stores_exclude(void **state) {
  (void)state;
  hl_store *one = store_new(), *two = store_new();
  for (int other = 0; other < 2; other++) {
    hl_session *a = session_new(one), *b = session_new(other ? two : one);
    for (size_t i = 0; i < TABLE_SIZE; i++) {
      assert_int_equal(take1(a, 1, table[i].held, 0), HL_OK);
      assert_int_equal(take1(b, 1, table[i].wanted, 0), table[i].status);
      give(b);
      assert_int_equal(take1(b, 2, HL_EXCLUSIVE, 0), HL_OK);
      give(a);
      give(b);
      assert_int_equal(take1(b, 1, table[i].wanted, 0), HL_OK);
      give(b);
    }
    ops->session_close(a);
    ops->session_close(b);
  }
  ops->close(one);
  ops->close(two);
}

static void processes_exclude(void **state) {
  (void)state;
  for (size_t i = 0; i < TABLE_SIZE; i++) {
    memset(shared, 0, sizeof *shared);
    pid_t pid = spawn(hold_until_stop, table[i].held);
    hl_store *store = store_new();
    hl_session *session = session_new(store);
    WAIT_UNTIL(atomic_load(&shared->step));
    assert_int_equal(take1(session, 1, table[i].wanted, 0), table[i].status);
    give(session);
    atomic_store(&shared->stop, 1);
    assert_int_equal(take1(session, 1, table[i].wanted, PATIENCE_MS), HL_OK);
    ops->session_close(session);
    ops->close(store);
    reap(pid);
  }
}

static void a_closed_session_holds_nothing(void **state) {
  (void)state;
  hl_store *store = store_new();
  hl_session *a = session_new(store), *b = session_new(store);
  assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
  ops->session_close(a);
  assert_int_equal(take1(b, 1, HL_EXCLUSIVE, 0), HL_OK);
  ops->session_close(b);
  ops->close(store);
}

static void a_call_is_all_or_nothing(void **state) {
  (void)state;
  hl_store *store = store_new();
  hl_session *a = session_new(store), *b = session_new(store), *c = session_new(store);
  hl_error error;
  hl_row rows[] = {row(0, 7, HL_SHARED), row(1, 8, HL_EXCLUSIVE), row(2, 1, HL_EXCLUSIVE)};
  assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
  for (int timeout = 0; timeout < 40; timeout += 30) {
    assert_int_equal(take(b, rows, 3, timeout, false, &error), HL_TIMEOUT);
    assert_int_equal(error.level, 2);
    assert_int_equal(error.bucket, 1);
    rows[0].mode = HL_EXCLUSIVE;
    assert_int_equal(take(c, rows, 2, 0, false, NULL), HL_OK);
    rows[0].mode = HL_SHARED;
    give(c);
  }
  ops->session_close(a);
  ops->session_close(b);
  ops->session_close(c);
  ops->close(store);
}

/* ------------------------------------------------------------- waiting */

static void timeouts_are_exact(void **state) {
  (void)state;
  static const int64_t timeouts[] = {1, 7, 49, 50, 51, 120};
  pid_t pid = spawn(hold_until_stop, HL_EXCLUSIVE);
  WAIT_UNTIL(atomic_load(&shared->step));
  hl_store *store = store_new();
  hl_session *a = session_new(store), *b = session_new(store);
  for (size_t i = 0; i < sizeof timeouts / sizeof *timeouts; i++) {
    waiting first; /* b is second in the queue in half of the cases */
    if (i % 2) waiting_start(&first, a, HL_EXCLUSIVE, 200, false);
    struct timespec t, u;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    assert_int_equal(take1(b, 1, HL_EXCLUSIVE, timeouts[i]), HL_TIMEOUT);
    (void)clock_gettime(CLOCK_MONOTONIC, &u);
    int64_t us = (u.tv_sec - t.tv_sec) * 1000000 + (u.tv_nsec - t.tv_nsec) / 1000;
    assert_in_range(us, timeouts[i] * 1000, (timeouts[i] + SLACK_MS) * 1000);
    if (i % 2) assert_int_equal(waiting_end(&first), HL_TIMEOUT);
  }
  int64_t start = hl__now_ms();
  assert_int_equal(take1(b, 1, HL_SHARED, 0), HL_TIMEOUT);
  assert_in_range(hl__now_ms() - start, 0, SLACK_MS);
  atomic_store(&shared->stop, 1);
  ops->session_close(a);
  ops->session_close(b);
  ops->close(store);
  reap(pid);
}

static void an_interrupted_wait_ends(void **state) {
  (void)state;
  hl_store *store = store_new();
  hl_session *s[3];
  waiting w[3];
  for (int i = 0; i < 3; i++) s[i] = session_new(store);
  assert_int_equal(take1(s[0], 1, HL_EXCLUSIVE, 0), HL_OK);
  waiting_start(&w[1], s[1], HL_EXCLUSIVE, HL_FOREVER, false);
  waiting_start(&w[2], s[2], HL_EXCLUSIVE, HL_FOREVER, false);
  for (int i = 2; i > 0; i--) { /* behind the first, then the first */
    ops->interrupt(s[i]);
    assert_int_equal(waiting_end(&w[i]), HL_CANCELLED);
  }
  give(s[0]);
  assert_int_equal(take1(s[1], 1, HL_EXCLUSIVE, 30), HL_OK);
  for (int i = 0; i < 3; i++) ops->session_close(s[i]);
  ops->close(store);
}

static void a_late_interruption_hits_nobody(void **state) {
  (void)state;
  hl_store *store = store_new();
  hl_session *a = session_new(store), *b = session_new(store);
  assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
  assert_int_equal(take1(b, 2, HL_EXCLUSIVE, 0), HL_OK);
  ops->interrupt(b); /* as that call returned */
  assert_int_equal(ops->settle(b, 0, NULL), HL_OK);
  assert_int_equal(extend1(b, 1, HL_EXCLUSIVE, 30), HL_TIMEOUT);
  ops->session_close(a);
  ops->session_close(b);
  ops->close(store);
}

static void one_process_is_served_in_order(void **state) {
  (void)state;
  static const hl_mode modes[] = {HL_EXCLUSIVE, HL_SHARED, HL_SHARED, HL_EXCLUSIVE, HL_SHARED};
  enum {
    N = sizeof modes / sizeof *modes
  };
  hl_store *store = store_new();
  hl_session *holder = session_new(store), *s[N];
  waiting w[N];
  atomic_store(&granted_count, 0);
  assert_int_equal(take1(holder, 1, HL_SHARED, 0), HL_OK);
  for (int i = 0; i < N; i++) {
    s[i] = session_new(store);
    waiting_start(&w[i], s[i], modes[i], HL_FOREVER, false);
  }
  give(holder);
  assert_int_equal(waiting_end(&w[0]), HL_OK);
  sleep_ms(STAYS_MS);
  assert_int_equal(atomic_load(&w[1].status), 99);
  give(s[0]);
  assert_int_equal(waiting_end(&w[1]), HL_OK); /* both share */
  assert_int_equal(waiting_end(&w[2]), HL_OK);
  sleep_ms(STAYS_MS);
  assert_int_equal(atomic_load(&w[3].status), 99);
  give(s[1]);
  give(s[2]);
  assert_int_equal(waiting_end(&w[3]), HL_OK);
  assert_int_equal(atomic_load(&w[4].status), 99);
  give(s[3]);
  assert_int_equal(waiting_end(&w[4]), HL_OK);
  for (int i = 0; i < N; i++) ops->session_close(s[i]);
  ops->session_close(holder);
  ops->close(store);
}

/* Three of these, if they share, hold it nearly always. */
static void stream(intptr_t mode) {
  hl_session *session = session_new(store_new());
  while (!atomic_load(&shared->stop)) {
    if (take1(session, 1, (hl_mode)mode, PATIENCE_MS) != HL_OK) _exit(1);
    (void)atomic_fetch_add(&shared->grants[0], 1);
    sleep_ms(2);
    (void)ops->give_back(session, NULL);
  }
}

static void nobody_starves(hl_mode stream_mode, hl_mode wanted) {
  pid_t pids[3];
  for (int i = 0; i < 3; i++) pids[i] = spawn(stream, stream_mode);
  hl_store *store = store_new();
  hl_session *session = session_new(store);
  WAIT_UNTIL(atomic_load(&shared->grants[0]) > 20);
  for (int i = 0; i < 5; i++) {
    assert_int_equal(take1(session, 1, wanted, PATIENCE_MS / 2), HL_OK);
    give(session);
  }
  atomic_store(&shared->stop, 1);
  for (int i = 0; i < 3; i++) reap(pids[i]);
  ops->session_close(session);
  ops->close(store);
}

static void a_writer_passes_a_stream_of_readers(void **state) {
  (void)state;
  nobody_starves(HL_SHARED, HL_EXCLUSIVE);
}

static void a_reader_passes_a_stream_of_writers(void **state) {
  (void)state;
  nobody_starves(HL_EXCLUSIVE, HL_SHARED);
}

static void wait_for_it(intptr_t number) {
  hl_session *session = session_new(store_new());
  atomic_store(&shared->step, (int)number);
  if (take1(session, 1, HL_EXCLUSIVE, HL_FOREVER) != HL_OK) _exit(1);
  (void)atomic_fetch_add(&shared->grants[number], 1);
  WAIT_UNTIL(atomic_load(&shared->stop) >= number);
  (void)ops->give_back(session, NULL);
}

/* The sessions of all processes that stand in the queue of bucket 1. */
static int waiters(hl_session *observer) { return look_for(observer, 1, HL_SHARED).waiting; }

/* Runs one round: chance may put the waiters in order by itself. */
static void serve_in_order(hl_session *session) {
  pid_t pids[4];
  atomic_store(&shared->stop, 0);
  for (int i = 0; i < 4; i++) atomic_store(&shared->grants[i], 0);
  assert_int_equal(take1(session, 1, HL_EXCLUSIVE, 0), HL_OK);
  for (int i = 1; i < 4; i++) {
    pids[i] = spawn(wait_for_it, i);
    WAIT_UNTIL(waiters(session) == i);
  }
  give(session);
  for (int i = 1; i < 4; i++) {
    WAIT_UNTIL(atomic_load(&shared->grants[i]));
    /* A newcomer comes after the waiters. */
    assert_int_equal(take1(session, 1, HL_EXCLUSIVE, 0), HL_TIMEOUT);
    if (i < 3) assert_int_equal(atomic_load(&shared->grants[i + 1]), 0);
    atomic_store(&shared->stop, i);
  }
  for (int i = 1; i < 4; i++) reap(pids[i]);
  assert_int_equal(take1(session, 1, HL_EXCLUSIVE, 0), HL_OK);
  give(session);
}

static void processes_are_served_in_order(void **state) {
  (void)state;
  hl_store *store = store_new();
  hl_session *session = session_new(store);
  for (int round = 0; round < 5; round++) serve_in_order(session);
  ops->session_close(session);
  ops->close(store);
}

static void *take_and_give(void *store) {
  hl_session *session = session_new(store);
  for (int i = 0; i < HANDOVERS; i++) {
    if (take1(session, 1, HL_EXCLUSIVE, HL_FOREVER) != HL_OK)
      (void)atomic_fetch_add(&shared->wrong, 1);
    else
      give(session);
    (void)atomic_fetch_add(&shared->grants[0], 1);
    (void)sched_yield();
  }
  ops->session_close(session);
  return NULL;
}

/* No wake-up is lost: none of many sleeps on. */
static void many_hand_over(void **state) {
  (void)state;
  enum {
    N = 6
  };
  pthread_t threads[N];
  hl_store *store = store_new();
  for (int i = 0; i < N; i++)
    assert_int_equal(pthread_create(&threads[i], NULL, take_and_give, store), 0);
  for (int last = -1, n = 0; n < N * HANDOVERS; last = n) {
    WAIT_UNTIL((n = atomic_load(&shared->grants[0])) > last);
    sleep_ms(1);
  }
  for (int i = 0; i < N; i++) (void)pthread_join(threads[i], NULL);
  assert_int_equal(atomic_load(&shared->wrong), 0);
  ops->close(store);
}

/* ------------------------------------------------------ death and forks */

static void a_killed_holder_lets_go(void **state) {
  (void)state;
  pid_t pid = spawn(hold_until_stop, HL_EXCLUSIVE);
  hl_store *store = store_new();
  hl_session *session = session_new(store);
  waiting w;
  WAIT_UNTIL(atomic_load(&shared->step));
  waiting_start(&w, session, HL_EXCLUSIVE, PATIENCE_MS, false);
  int64_t start = hl__now_ms();
  murder(pid);
  assert_int_equal(waiting_end(&w), HL_OK);
  assert_in_range(hl__now_ms() - start, 0, 50 + 2 * SLACK_MS);
  ops->session_close(session);
  ops->close(store);
}

static void a_killed_waiter_leaves_the_queue(void **state) {
  (void)state;
  hl_store *store = store_new();
  hl_session *a = session_new(store), *b = session_new(store);
  waiting w;
  assert_int_equal(take1(a, 1, HL_SHARED, 0), HL_OK);
  pid_t pid = spawn(wait_for_it, 1);
  WAIT_UNTIL(waiters(a) == 1);
  waiting_start(&w, b, HL_SHARED, PATIENCE_MS, false);
  sleep_ms(STAYS_MS);
  assert_int_equal(atomic_load(&w.status), 99);
  murder(pid);
  assert_int_equal(waiting_end(&w), HL_OK);
  assert_int_equal(waiters(a), 0);
  ops->session_close(a);
  ops->session_close(b);
  ops->close(store);
}

static void sleep_on(intptr_t step) {
  atomic_store(&shared->step, (int)step);
  WAIT_UNTIL(atomic_load(&shared->stop));
}

static void hold_and_fork(intptr_t unused) {
  (void)unused;
  hl_session *session = session_new(store_new());
  (void)take1(session, 1, HL_EXCLUSIVE, HL_FOREVER);
  (void)spawn(sleep_on, 2);
  WAIT_UNTIL(atomic_load(&shared->stop));
}

static void a_child_keeps_nothing_of_a_killed_parent(void **state) {
  (void)state;
  pid_t pid = spawn(hold_and_fork, 0);
  hl_store *store = store_new();
  hl_session *session = session_new(store);
  WAIT_UNTIL(atomic_load(&shared->step) == 2);
  assert_int_equal(take1(session, 1, HL_SHARED, 0), HL_TIMEOUT);
  murder(pid);
  assert_int_equal(take1(session, 1, HL_EXCLUSIVE, PATIENCE_MS), HL_OK);
  atomic_store(&shared->stop, 1);
  ops->session_close(session);
  ops->close(store);
}

static hl_store *parents_store;
static hl_session *parents_session;

static void forget_and_try(intptr_t unused) {
  (void)unused;
  ops->session_forget(parents_session);
  ops->forget(parents_store);
  hl_session *session = session_new(store_new());
  if (take1(session, 1, HL_SHARED, 0) != HL_TIMEOUT) _exit(1);
  if (take1(session, 2, HL_EXCLUSIVE, 0) != HL_OK) _exit(2);
}

static void a_child_leaves_the_parents_locks_alone(void **state) {
  (void)state;
  parents_store = store_new();
  parents_session = session_new(parents_store);
  assert_int_equal(take1(parents_session, 1, HL_EXCLUSIVE, 0), HL_OK);
  reap(spawn(forget_and_try, 0));
  memset(shared, 0, sizeof *shared);
  assert_int_equal(ops->check(parents_session, NULL), HL_OK);
  pid_t pid = spawn(hold_until_stop, HL_EXCLUSIVE);
  sleep_ms(STAYS_MS);
  assert_int_equal(atomic_load(&shared->step), 0);
  give(parents_session);
  WAIT_UNTIL(atomic_load(&shared->step));
  atomic_store(&shared->stop, 1);
  reap(pid);
  ops->session_close(parents_session);
  ops->close(parents_store);
}

/* -------------------------------------------------------------- extend */

static void a_conversion_passes_those_who_wait(void **state) {
  (void)state;
  hl_store *store = store_new();
  hl_session *a = session_new(store), *b = session_new(store), *c = session_new(store),
             *d = session_new(store);
  waiting writer, conversion;
  assert_int_equal(take1(a, 1, HL_SHARED, 0), HL_OK);
  assert_int_equal(take1(b, 1, HL_SHARED, 0), HL_OK);
  waiting_start(&writer, c, HL_EXCLUSIVE, PATIENCE_MS, false);
  assert_int_equal(extend1(a, 1, HL_EXCLUSIVE, 0), HL_TIMEOUT);
  waiting_start(&conversion, a, HL_EXCLUSIVE, PATIENCE_MS, true);
  assert_int_equal(take1(d, 1, HL_SHARED, 0), HL_TIMEOUT);
  give(b);
  assert_int_equal(waiting_end(&conversion), HL_OK);
  sleep_ms(STAYS_MS);
  assert_int_equal(atomic_load(&writer.status), 99);
  give(a);
  assert_int_equal(waiting_end(&writer), HL_OK);
  ops->session_close(a);
  ops->session_close(b);
  ops->session_close(c);
  ops->session_close(d);
  ops->close(store);
}

static void a_conversion_waits_for_other_processes(void **state) {
  (void)state;
  pid_t pid = spawn(hold_until_stop, HL_SHARED);
  hl_store *store = store_new();
  hl_session *session = session_new(store);
  WAIT_UNTIL(atomic_load(&shared->step));
  assert_int_equal(take1(session, 1, HL_SHARED, 0), HL_OK);
  assert_int_equal(extend1(session, 1, HL_EXCLUSIVE, 30), HL_TIMEOUT);
  assert_int_equal(ops->check(session, NULL), HL_OK);
  atomic_store(&shared->stop, 1);
  assert_int_equal(extend1(session, 1, HL_EXCLUSIVE, PATIENCE_MS), HL_OK);
  reap(pid);
  ops->session_close(session);
  ops->close(store);
}

static void a_failed_extend_is_undone(void **state) {
  (void)state;
  hl_store *store = store_new();
  hl_session *a = session_new(store), *b = session_new(store), *c = session_new(store);
  hl_row rows[] = {row(2, 1, HL_EXCLUSIVE), row(2, 4, HL_SHARED), row(2, 5, HL_EXCLUSIVE),
                   row(2, 6, HL_EXCLUSIVE)};
  hl_row first[] = {row(2, 1, HL_SHARED), row(2, 4, HL_EXCLUSIVE)};
  assert_int_equal(take(a, first, 2, 0, false, NULL), HL_OK);
  assert_int_equal(take1(b, 6, HL_SHARED, 0), HL_OK);
  for (int timeout = 0; timeout < 40; timeout += 30) {
    assert_int_equal(take(a, rows, 4, timeout, true, NULL), HL_TIMEOUT);
    assert_int_equal(take1(c, 1, HL_EXCLUSIVE, 0), HL_TIMEOUT);
    assert_int_equal(take1(c, 1, HL_SHARED, 0), HL_OK);
    give(c);
    assert_int_equal(take1(c, 4, HL_SHARED, 0), HL_TIMEOUT);
    assert_int_equal(take1(c, 5, HL_EXCLUSIVE, 0), HL_OK);
    give(c);
  }
  give(b);
  assert_int_equal(take(a, rows, 4, 0, true, NULL), HL_OK);
  assert_int_equal(take1(c, 1, HL_SHARED, 0), HL_TIMEOUT);
  give(a);
  assert_int_equal(take(c, rows, 4, 0, false, NULL), HL_OK);
  ops->session_close(a);
  ops->session_close(b);
  ops->session_close(c);
  ops->close(store);
}

/* A failed extend does not give up the grant of an earlier one. */
static void a_failed_extend_undoes_no_earlier_one(void **state) {
  (void)state;
  hl_store *store = store_new();
  hl_session *a = session_new(store), *b = session_new(store), *c = session_new(store);
  assert_int_equal(take1(a, 1, HL_SHARED, 0), HL_OK);
  assert_int_equal(take1(b, 6, HL_SHARED, 0), HL_OK);
  assert_int_equal(extend1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
  for (int timeout = 0; timeout < 40; timeout += 30) {
    assert_int_equal(extend1(a, 6, HL_EXCLUSIVE, timeout), HL_TIMEOUT);
    assert_int_equal(take1(c, 1, HL_SHARED, 0), HL_TIMEOUT);
  }
  give(a);
  assert_int_equal(take1(c, 1, HL_EXCLUSIVE, 0), HL_OK);
  ops->session_close(a);
  ops->session_close(b);
  ops->session_close(c);
  ops->close(store);
}

/* ------------------------------------------------- tokens and directory */

static void take_a_token(intptr_t unused) {
  (void)unused;
  hl_session *session = session_new(store_new());
  if (take1(session, 1, HL_EXCLUSIVE, 0) != HL_OK) _exit(1);
  /* Opening raises them to the time; the next one has only the counter. */
  uint64_t first = atomic_load(&shared->token);
  if (ops->give_back(session, NULL) != HL_OK) _exit(2);
  if (take1(session, 1, HL_EXCLUSIVE, 0) != HL_OK) _exit(3);
  if (atomic_load(&shared->token) <= first) _exit(4);
}

static void tokens_grow(void **state) {
  (void)state;
  uint64_t last = 0;
  for (int i = 0; i < 20; i++) {
    if (i >= 4) remove_directory(); /* seeded by the time */
    reap(spawn(take_a_token, 0));
    assert_true(atomic_load(&shared->token) > last);
    last = atomic_load(&shared->token);
    assert_int_equal(last & 0xFF, 0);
  }
}

static void a_removed_directory_is_noticed(void **state) {
  (void)state;
  hl_store *store = store_new();
  hl_session *a = session_new(store), *b = session_new(store), *c;
  assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
  remove_directory();
  assert_int_equal(ops->check(a, NULL), HL_ECONNECTION);
  assert_int_equal(take1(b, 2, HL_EXCLUSIVE, 0), HL_ECONNECTION);
  /* A session that opens now, opens the same directory as all others that open now. */
  c = session_new(store);
  assert_int_equal(take1(c, 1, HL_EXCLUSIVE, 0), HL_OK);
  give(a);
  assert_int_equal(ops->check(c, NULL), HL_OK);
  assert_int_equal(take1(b, 1, HL_SHARED, 0), HL_TIMEOUT);
  pid_t pid = spawn(hold_until_stop, HL_SHARED);
  sleep_ms(STAYS_MS);
  assert_int_equal(atomic_load(&shared->step), 0);
  give(c);
  atomic_store(&shared->stop, 1);
  reap(pid);
  ops->session_close(a);
  ops->session_close(b);
  ops->session_close(c);
  ops->close(store);
}

static int open_status(const char *path, hl_layout *other) {
  hl_dsn where = {.store = "file", .path = path};
  hl_store_config c = config;
  hl_store *store;
  c.dsn = &where;
  if (other) c.layout = other;
  int status = ops->open(&c, &store, NULL);
  if (status == HL_OK) ops->close(store);
  return status;
}

static void what_is_wrong_is_refused(void **state) {
  (void)state;
  static const char *const names[] = {"user", "account"};
  char path[128];
  hl_layout *other;
  hl_store *store = store_new();
  ops->close(store);
  assert_int_equal(hl_layout_new(names, 2, 0, &other, NULL), HL_OK);
  assert_int_equal(open_status(directory, other), HL_EMISMATCH);
  hl_layout_unref(other);
  assert_int_equal(hl_layout_new(NULL, 0, 77, &other, NULL), HL_OK);
  assert_int_equal(open_status(directory, other), HL_EMISMATCH);
  hl_layout_unref(other);
  assert_int_equal(open_status(directory, NULL), HL_OK);

  (void)snprintf(path, sizeof path, "%s/control", directory);
  assert_int_equal(truncate(path, 10), 0);
  assert_int_equal(open_status(directory, NULL), HL_ESTORE);
  assert_int_equal(open_status(path, NULL), HL_ESTORE);
  (void)snprintf(path, sizeof path, "%s/not/there", directory);
  assert_int_equal(open_status(path, NULL), HL_ESTORE);

  hl_dsn odd = {.store = "file", .path = directory, .param_count = 1, .params = {{"shared", "1"}}};
  hl_store_config c = config;
  hl_error error;
  c.dsn = &odd;
  assert_int_equal(ops->open(&c, &store, &error), HL_EDSN);
  assert_non_null(strstr(error.message, "shared"));
}

static void files_have_the_directorys_rights(void **state) {
  (void)state;
  char path[128];
  struct stat st;
  assert_int_equal(mkdir(directory, 0700), 0);
  assert_int_equal(chmod(directory, 0770), 0);
  ops->close(store_new());
  (void)snprintf(path, sizeof path, "%s/control", directory);
  assert_int_equal(stat(path, &st), 0);
  assert_int_equal(st.st_mode & 0777, 0660);
}

static void files_are_for_writers_alone(void **state) {
  (void)state;
  static const struct {
    mode_t directory, file;
  } cases[] = {{0700, 0600}, {0755, 0600}, {0750, 0600}, {0770, 0660}, {0775, 0660}, {01777, 0666}};
  struct stat st;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    assert_int_equal(mkdir(directory, 0700), 0);
    assert_int_equal(chmod(directory, cases[i].directory), 0);
    hl_store *store = store_new();
    hl_session *a = session_new(store);
    assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
    assert_int_equal(stat(path_of("control"), &st), 0);
    assert_int_equal(st.st_mode & 0777, cases[i].file);
    ops->session_close(a);
    ops->close(store);

    /* A file that more users may read than the directory says. */
    assert_int_equal(chmod(path_of("control"), 0644), 0);
    store = store_new();
    a = session_new(store);
    assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
    assert_int_equal(stat(path_of("control"), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0644 & cases[i].file);
    ops->session_close(a);
    ops->close(store);
    remove_directory();
  }
}

static void what_root_makes_is_the_directorys_owners(void **state) {
  (void)state;
  enum {
    OWNER = 54321,
    GROUP = 54322
  };
  if (geteuid() != 0) skip();
  assert_int_equal(mkdir(directory, 0700), 0);
  assert_int_equal(chown(directory, OWNER, GROUP), 0);
  hl_store *store = store_new();
  hl_session *a = session_new(store);
  assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
  int n = 0;
  DIR *names = opendir(directory);
  for (struct dirent *file; (file = readdir(names));) {
    struct stat st;
    assert_int_equal(stat(path_of(file->d_name), &st), 0);
    if (!S_ISREG(st.st_mode)) continue;
    assert_int_equal(st.st_uid, OWNER);
    assert_int_equal(st.st_gid, GROUP);
    n++;
  }
  (void)closedir(names);
  assert_int_equal(n, 1);
  ops->session_close(a);
  ops->close(store);
}

/* ----------------------------------------- renamed, replaced, truncated */

/* A session that opens the path afterwards is kept out by no earlier session, and no earlier
   session believes that it still holds. */
static void what_the_path_does_not_show_is_lost(int how) {
  hl_store *store = store_new(), *fresh;
  hl_session *a = session_new(store), *b = session_new(store), *c = session_new(store), *d;
  assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
  assert_int_equal(take1(c, 2, HL_EXCLUSIVE, 0), HL_OK);
  switch (how) {
  case 0: assert_int_equal(rename(directory, path_of("-x")), 0); break;
  case 1: assert_int_equal(rename(path_of("control"), path_of("other")), 0); break;
  case 2: /* as a kill between link and unlink left it */
    assert_int_equal(link(path_of("control"), path_of("tmp-1-2")), 0);
    assert_int_equal(unlink(path_of("control")), 0);
    break;
  default:;
  }
  assert_int_equal(ops->check(a, NULL), HL_ECONNECTION);
  assert_int_equal(take1(b, 3, HL_SHARED, 0), HL_ECONNECTION);
  fresh = store_new();
  d = session_new(fresh);
  if (how == 0) assert_int_equal(take1(d, 1, HL_EXCLUSIVE, 0), HL_OK);
  assert_int_equal(ops->check(c, NULL), HL_ECONNECTION);
  give(a);
  give(c);
  if (how == 0) {
    assert_int_equal(take1(a, 1, HL_SHARED, 0), HL_TIMEOUT);
    assert_int_equal(take1(b, 1, HL_SHARED, 0), HL_TIMEOUT);
    assert_int_equal(ops->check(d, NULL), HL_OK);
    give(d);
  }
  assert_int_equal(take1(b, 1, HL_EXCLUSIVE, 0), HL_OK);
  assert_int_equal(take1(d, 1, HL_EXCLUSIVE, 0), HL_TIMEOUT);
  ops->session_close(a);
  ops->session_close(b);
  ops->session_close(c);
  ops->session_close(d);
  ops->close(store);
  ops->close(fresh);
}

static void a_renamed_directory_is_noticed(void **state) {
  (void)state;
  what_the_path_does_not_show_is_lost(0);
}

static void a_replaced_control_file_is_noticed(void **state) {
  (void)state;
  what_the_path_does_not_show_is_lost(1);
  what_the_path_does_not_show_is_lost(2);
}

/* Two names lead to one directory; then one of them leads elsewhere. */
static void a_changed_link_is_noticed(void **state) {
  (void)state;
  char link_path[400];
  (void)snprintf(link_path, sizeof link_path, "%s", path_of("-link"));
  hl_dsn by_link = {.store = "file", .path = link_path};
  hl_store_config c = config;
  hl_store *store = store_new(), *linked;
  assert_int_equal(symlink(directory, link_path), 0);
  c.dsn = &by_link;
  assert_int_equal(ops->open(&c, &linked, NULL), HL_OK);
  hl_session *a = session_new(store), *b = session_new(linked), *d;
  assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
  assert_int_equal(take1(b, 1, HL_EXCLUSIVE, 0), HL_TIMEOUT);
  assert_int_equal(take1(b, 2, HL_EXCLUSIVE, 0), HL_OK);
  assert_int_equal(mkdir(path_of("-x"), 0700), 0);
  assert_int_equal(unlink(link_path), 0);
  assert_int_equal(symlink(path_of("-x"), link_path), 0);
  assert_int_equal(ops->check(b, NULL), HL_ECONNECTION);
  assert_int_equal(ops->check(a, NULL), HL_OK);
  d = session_new(linked);
  assert_int_equal(take1(d, 2, HL_EXCLUSIVE, 0), HL_OK);
  give(a);
  assert_int_equal(take1(a, 3, HL_EXCLUSIVE, 0), HL_OK);
  ops->session_close(a);
  ops->session_close(b);
  ops->session_close(d);
  ops->close(store);
  ops->close(linked);
}

/* A waiter in it goes on in the present directory. */
static void a_waiter_leaves_a_renamed_directory(void **state) {
  (void)state;
  pid_t pid = spawn(hold_until_stop, HL_EXCLUSIVE);
  WAIT_UNTIL(atomic_load(&shared->step));
  hl_store *store = store_new();
  hl_session *a = session_new(store);
  waiting w;
  waiting_start(&w, a, HL_EXCLUSIVE, HL_FOREVER, false);
  assert_int_equal(rename(directory, path_of("-x")), 0);
  assert_int_equal(waiting_end(&w), HL_OK);
  assert_int_equal(ops->check(a, NULL), HL_OK);
  assert_int_equal(access(path_of("control"), F_OK), 0);
  atomic_store(&shared->stop, 1);
  reap(pid);
  ops->session_close(a);
  ops->close(store);
}

/* In a process of its own, which SIGBUS may end if it touches the table before its next look at the
   file, within 10 ms. */
static void go_on_with_a_cut_file(intptr_t waits) {
  (void)signal(SIGBUS, SIG_DFL); /* not as a failure of the test, which cmocka makes of it */
  hl_store *store = store_new();
  hl_session *a = session_new(store), *b = session_new(store), *c = session_new(store);
  waiting w;
  hl_row r = row(2, 1, HL_EXCLUSIVE);
  seen s = {0};
  if (take1(a, 1, HL_EXCLUSIVE, 0) != HL_OK) _exit(1);
  if (take1(b, 2, HL_SHARED, 0) != HL_OK) _exit(1);
  if (waits) waiting_start(&w, c, HL_EXCLUSIVE, PATIENCE_MS, false);
  if (truncate(path_of("control"), 0) != 0) _exit(2);
  sleep_ms(STAYS_MS);
  if (extend1(b, 2, HL_EXCLUSIVE, 0) != HL_ECONNECTION) _exit(3);
  if (ops->check(a, NULL) != HL_ECONNECTION) _exit(4);
  if (waits && waiting_end(&w) == HL_OK) _exit(5);
  (void)ops->give_back(a, NULL);
  (void)ops->give_back(b, NULL);
  if (holders(a, &r, 1, see, &s) == HL_OK) _exit(6);
  if (take1(a, 1, HL_EXCLUSIVE, 30) == HL_OK) _exit(7);
  ops->session_close(a);
  ops->session_close(b);
  ops->session_close(c);
  ops->close(store);
}

static void a_truncated_control_file_is_never_begun_anew(void **state) {
  (void)state;
  hl_error error;
  hl_store *store;
  for (int waits = 0; waits < 2; waits++) {
    int status;
    pid_t pid = spawn(go_on_with_a_cut_file, waits);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    /* A sanitizer makes a status of the signal. */
    if (!(waits && (WIFSIGNALED(status) || WEXITSTATUS(status) > 7))) assert_int_equal(status, 0);
    assert_int_equal(ops->open(&config, &store, &error), HL_ESTORE);
    assert_non_null(strstr(error.message, "truncated"));
    remove_directory();
  }
}

static void a_copied_directory_is_refused(void **state) {
  (void)state;
  char command[600];
  hl_store *store = store_new();
  hl_session *a = session_new(store);
  hl_error error;
  assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
  (void)snprintf(command, sizeof command, "cp -r %s %s", directory, path_of("-x"));
  assert_int_equal(system(command), 0); // NOLINT: a path of our own
  hl_dsn where = {.store = "file", .path = path_of("-x")};
  hl_store_config c = config;
  hl_store *other;
  c.dsn = &where;
  assert_int_equal(ops->open(&c, &other, &error), HL_ESTORE);
  assert_non_null(strstr(error.message, "copy"));
  ops->session_close(a);
  ops->close(store);
}

/* ------------------------------------------------- hostile, and careless */

/* A process that may write the file can lock all of it. It keeps new programs out; those that have
   the directory open go on. */
static void a_program_that_locks_all_bytes_stops_openers_alone(void **state) {
  (void)state;
  hl_store *store = store_new(), *other;
  hl_session *a = session_new(store), *b = session_new(store);
  struct flock mend = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = HL__SHM_MEND};
  hl_error error;
  waiting w;
  assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
  int fd = open(path_of("control"), O_RDONLY | O_CLOEXEC);
  assert_true(fd >= 0);
  /* All that is not locked: by whom it is mended and opened. */
  assert_int_equal(fcntl(fd, F_OFD_SETLK, &mend), 0);
  waiting_start(&w, b, HL_EXCLUSIVE, HL_FOREVER, false);
  give(a);
  assert_int_equal(waiting_end(&w), HL_OK);
  pid_t pid = fork();
  if (pid == 0) _exit(ops->open(&config, &other, &error) != HL_ESTORE);
  reap(pid);
  (void)close(fd);
  give(b);
  reap(spawn(take_a_token, 0));
  ops->session_close(a);
  ops->session_close(b);
  ops->close(store);
}

/* An account that may write in the directory can make any name first: a link to a file of the
   victim's, a second name of it, a FIFO at which an open would hang. */
static void planted_names_are_not_followed(void **state) {
  (void)state;
  enum {
    LINK,
    SECOND_NAME,
    FIFO,
    DIRECTORY,
    KINDS
  };
  static const char *const names[] = {"control", "tmp-0-0"};
  static const struct timespec old[] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
  static const char text[] = "precious";
  char victim[128], content[sizeof text] = "";
  (void)snprintf(victim, sizeof victim, "%s", path_of("-x"));
  for (int kind = 0; kind < KINDS; kind++)
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
      const char *path = path_of(names[i]);
      char planted[128];
      struct stat before, after;
      hl_store *store = NULL;
      hl_error error;
      (void)snprintf(planted, sizeof planted, "%s", path);
      assert_int_equal(mkdir(directory, 0700), 0);
      assert_int_equal(chmod(directory, 01777), 0);
      int fd = open(victim, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0640);
      assert_true(fd >= 0);
      assert_int_equal(write(fd, text, sizeof text), sizeof text);
      assert_int_equal(futimens(fd, old), 0);
      assert_int_equal(fstat(fd, &before), 0);
      if (kind == LINK) assert_int_equal(symlink(victim, planted), 0);
      if (kind == SECOND_NAME) assert_int_equal(link(victim, planted), 0);
      if (kind == FIFO) assert_int_equal(mkfifo(planted, 0666), 0);
      if (kind == DIRECTORY) assert_int_equal(mkdir(planted, 0777), 0);

      int status = ops->open(&config, &store, &error);
      if (i == 0) assert_int_equal(status, HL_ESTORE);
      if (i != 0) assert_int_equal(status, HL_OK);
      if (status == HL_OK) {
        hl_session *a = session_new(store);
        assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
        (void)look_for(a, 1, HL_EXCLUSIVE);
        ops->session_close(a);
        ops->close(store);
      }
      assert_int_equal(fstat(fd, &after), 0);
      assert_int_equal(after.st_mode, before.st_mode);
      assert_int_equal(after.st_uid, before.st_uid);
      assert_int_equal(after.st_size, before.st_size);
      assert_int_equal(after.st_mtim.tv_sec, before.st_mtim.tv_sec);
      assert_true(after.st_nlink >= 1);
      assert_int_equal(pread(fd, content, sizeof content, 0), sizeof content);
      assert_string_equal(content, text);
      (void)close(fd);
      assert_int_equal(unlink(victim), 0);
      (void)rmdir(planted);
      remove_directory();
    }
}

static void see_text(void *context, const hl_holder *holder) {
  (void)snprintf(context, 600, "%s|%s|%s|%s", holder->application, holder->host, holder->label,
                 holder->path);
}

/* Other users of the directory can write what they like about themselves. */
static void what_others_say_of_themselves_is_escaped_and_cut(void **state) {
  (void)state;
  char text[600] = "";
  hl_row r = row(2, 1, HL_EXCLUSIVE);
  hl_store *store = store_new();
  hl_session *a = session_new(store);
  assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
  hl__shm_session *own = hl__embedded_session_of(a)->table;
  hl__shm_note *note = &hl__shm_record_at(own->space, own->note)->note;
  memset(own->space->table->slot[own->space->me].host, '\x1b',
         sizeof own->space->table->slot[0].host);
  memset(note->application, 'x', sizeof note->application);
  memcpy(note->label, "a\n\x1b]0;b\a\x7f\xff", 10);
  memset(note->path, '\r', sizeof note->path);
  assert_int_equal(holders(a, &r, 1, see_text, text), HL_OK);
  assert_non_null(strstr(text, "a\\x0a\\x1b]0;b\\x07\\x7f\\xff"));
  assert_non_null(strstr(text, "xxx|"));
  for (const char *c = text; *c; c++) assert_in_range(*c, ' ', 0x7E);
  ops->session_close(a);
  ops->close(store);
}

static void hold_and_be_killed(intptr_t unused) {
  (void)unused;
  hold_until_stop(HL_EXCLUSIVE);
}

static void what_the_killed_left_is_swept(void **state) {
  (void)state;
  static const struct timespec old[] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
  pid_t pid = spawn(hold_and_be_killed, 0);
  WAIT_UNTIL(atomic_load(&shared->step));
  murder(pid);
  memset(shared, 0, sizeof *shared);
  pid = spawn(hold_until_stop, HL_EXCLUSIVE);
  WAIT_UNTIL(atomic_load(&shared->step));
  for (int i = 0; i < 2; i++) {
    int fd = open(path_of(i ? "tmp-1-old" : "tmp-1-young"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    if (i) assert_int_equal(futimens(fd, old), 0);
    (void)close(fd);
  }
  ops->close(store_new());
  assert_int_equal(count_files(directory, "tmp-1-old"), 0);
  assert_int_equal(count_files(directory, "tmp-"), 1);
  atomic_store(&shared->stop, 1);
  reap(pid);
}

/* Fewer than the tries of a process that makes a file. */
#define SWEEPS 5

/* Sweeps like processes whose clocks are ahead: every new file looks old to them. Each sweeps once,
   when it opens. */
static void sweep_what_is_new(intptr_t unused) {
  (void)unused;
  atomic_store(&shared->holders[0], 1);
  while (!atomic_load(&shared->stop)) {
    DIR *names = opendir(directory);
    if (!names) _exit(1);
    for (struct dirent *file; (file = readdir(names));)
      if (atomic_load(&shared->step) < SWEEPS && strncmp(file->d_name, "tmp-", 4) == 0 &&
          unlinkat(dirfd(names), file->d_name, 0) == 0)
        (void)atomic_fetch_add(&shared->step, 1);
    (void)closedir(names);
  }
}

static void a_clock_that_is_ahead_costs_nothing(void **state) {
  (void)state;
  assert_int_equal(mkdir(directory, 0700), 0);
  pid_t pid = spawn(sweep_what_is_new, 0);
  WAIT_UNTIL(atomic_load(&shared->holders[0]));
  for (int i = 0; i < 2000 && atomic_load(&shared->step) < SWEEPS; i++) {
    ops->close(store_new());
    (void)unlink(path_of("control"));
  }
  assert_true(atomic_load(&shared->step) > 0);
  atomic_store(&shared->stop, 1);
  reap(pid);
}

/* How many descriptors of the process lead into the directory. In a child of a process
   with threads, so without malloc: a sanitizer's may be locked for ever there. */
static int descriptors_into(void) {
  enum {
    MOST = 1024
  };
  int n = 0;
  for (int fd = 0; fd < MOST; fd++) {
    char name[32], target[200];
    (void)snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(name, target, sizeof target - 1);
    target[length > 0 ? length : 0] = '\0';
    n += strncmp(target, directory, strlen(directory)) == 0;
  }
  return n;
}

/* Whether the process has mapped a file of the directory. As descriptors_into. */
static bool maps_into(void) {
  enum {
    MOST = 1 << 20
  };
  static char maps[MOST];
  size_t size = 0;
  int fd = open("/proc/self/maps", O_RDONLY);
  ssize_t n;
  while (fd >= 0 && (n = read(fd, maps + size, MOST - size)) > 0) size += (size_t)n;
  (void)close(fd);
  return memmem(maps, size, directory, strlen(directory)) != NULL;
}

static void *spaces_come_and_go(void *unused) {
  (void)unused;
  while (!atomic_load(&shared->stop)) {
    hl_store *store = store_new();
    hl_session *session = session_new(store);
    for (uint32_t i = 0; i < 200; i++) {
      if (take1(session, i, HL_EXCLUSIVE, 0) != HL_OK) abort();
      (void)ops->give_back(session, NULL);
    }
    ops->session_close(session);
    ops->close(store);
  }
  return NULL;
}

static void a_child_keeps_no_descriptor(void **state) {
  (void)state;
  pthread_t thread;
  int kept = 0;
  assert_int_equal(pthread_create(&thread, NULL, spaces_come_and_go, NULL), 0);
  int64_t end = hl__now_ms() + 5000; /* enough, also where forks are slow */
  for (int i = 0; i < 600 && (i < 30 || hl__now_ms() < end); i++) {
    int status;
    pid_t pid = fork();
    if (pid == 0) _exit(descriptors_into() > 0 || maps_into());
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    kept += WEXITSTATUS(status);
  }
  atomic_store(&shared->stop, 1);
  assert_int_equal(pthread_join(thread, NULL), 0);
  assert_int_equal(kept, 0);
}

/* Acts like a program that becomes a daemon. */
static void close_all_and_open_others(intptr_t unused) {
  (void)unused;
  enum {
    LAST = 40
  };
  struct stat st;
  hl_store *store = store_new();
  hl_session *a = session_new(store), *b = session_new(store), *c;
  if (take1(a, 1, HL_EXCLUSIVE, 0) != HL_OK) _exit(1);
  for (int fd = 3; fd < LAST; fd++) (void)close(fd);
  for (int fd = 3; fd < LAST; fd++)
    if (open("/dev/zero", O_RDONLY | O_CLOEXEC) != fd) _exit(2);
  if (ops->check(a, NULL) != HL_ECONNECTION) _exit(3);
  c = session_new(store); /* opened anew */
  if (take1(c, 2, HL_EXCLUSIVE, PATIENCE_MS) != HL_OK) _exit(4);
  (void)ops->give_back(a, NULL);
  ops->session_close(a);
  ops->session_close(b);
  pid_t pid = fork();
  if (pid != 0) {
    int status;
    if (waitpid(pid, &status, 0) != pid || status != 0) _exit(5);
  }
  for (int fd = 3; fd < LAST; fd++)
    if (fstat(fd, &st) != 0 || !S_ISCHR(st.st_mode)) _exit(6);
  if (pid == 0) _exit(descriptors_into() > 0);
  if (ops->check(c, NULL) != HL_OK) _exit(7);
  ops->session_close(c);
  ops->close(store);
}

static void descriptors_of_the_host_are_left_alone(void **state) {
  (void)state;
  reap(spawn(close_all_and_open_others, 0));
}

/* ------------------------------------------------------- many, and few */

static void ten_thousand_need_a_few_descriptors(void **state) {
  (void)state;
  enum {
    N = 10000
  };
  const int before = count_files("/proc/self/fd", "");
  hl_store *store = store_new();
  hl_session **s = calloc(N, sizeof *s);
  assert_non_null(s);
  for (uint32_t i = 0; i < N; i++) {
    hl_row rows[] = {row(0, 1, HL_SHARED), row(1, i, HL_SHARED), row(2, i, HL_EXCLUSIVE)};
    s[i] = session_new(store);
    assert_int_equal(take(s[i], rows, 3, 0, false, NULL), HL_OK);
  }
  assert_in_range(count_files("/proc/self/fd", "") - before, 0, 8);
  for (uint32_t i = 0; i < N; i++) ops->session_close(s[i]);

  /* One request with as many. */
  hl_row *rows = calloc(N, sizeof *rows);
  hl_error error;
  assert_non_null(rows);
  for (uint32_t i = 0; i < N; i++) rows[i] = row(2, i, HL_EXCLUSIVE);
  s[0] = session_new(store);
  assert_int_equal(take(s[0], rows, N, 0, false, &error), HL_OK);
  free(rows);
  ops->session_close(s[0]);
  free(s);
  ops->close(store);
}

/* ------------------------------------------------------------- holders */

static void holders_are_shown(void **state) {
  (void)state;
  hl_store *store = store_new();
  hl_session *a = session_new(store), *b = session_new(store);
  hl_row rows[100];
  waiting w;
  pid_t pid = spawn(hold_until_stop, HL_SHARED);
  WAIT_UNTIL(atomic_load(&shared->step));
  seen s = look_for(a, 1, HL_EXCLUSIVE);
  assert_int_equal(s.held, 1);
  assert_int_equal(s.last.pid, pid);
  assert_string_equal(s.last.application, "test");
  assert_string_equal(s.last.host, "here");
  assert_string_equal(s.last.path, "u1/a1");
  assert_string_equal(s.last.label, "a\\x0alabel");
  assert_in_range(hl__unix_ms() - s.last.since_ms, 0, PATIENCE_MS);
  assert_int_equal(look_for(a, 1, HL_SHARED).held, 0);
  assert_int_equal(look_for(a, 2, HL_EXCLUSIVE).held, 0);

  waiting_start(&w, b, HL_EXCLUSIVE, PATIENCE_MS, false);
  s = look_for(a, 1, HL_SHARED);
  assert_int_equal(s.waiting, 1);
  assert_int_equal(s.last.pid, getpid());
  murder(pid);
  assert_int_equal(waiting_end(&w), HL_OK);
  s = look_for(a, 1, HL_SHARED);
  assert_int_equal(s.held, 1);
  assert_int_equal(s.waiting, 0);
  give(b);

  for (uint32_t i = 0; i < 100; i++) rows[i] = row(2, 10 + i, HL_EXCLUSIVE);
  assert_int_equal(take(b, rows, 100, 0, false, NULL), HL_OK);
  seen all = {0};
  assert_int_equal(holders(a, rows, 100, see, &all), HL_OK);
  assert_int_equal(all.held, 1); /* once */
  assert_int_equal(look_for(a, 109, HL_SHARED).held, 1);
  give(b);
  assert_int_equal(look_for(a, 109, HL_SHARED).held, 0);
  ops->session_close(a);
  ops->session_close(b);
  ops->close(store);
}

/* -------------------------------------------------------------- stress */

#define STRESS_THREADS 4
/* ThreadSanitizer takes it for a race where another process has had the lock of a partition between
   two threads of its own. */
#if defined(__SANITIZE_THREAD__)
#define STRESS_PROCESSES 1
#else
#define STRESS_PROCESSES 4
#endif
#ifndef STRESS_ROUNDS
#define STRESS_ROUNDS 1500
#endif

/* Marks a row as held; two who must not hold it together are seen. */
static void mark(const hl_row *r, int sign) {
  uint32_t i = r->level * 4u + (uint32_t)r->bucket;
  if (r->mode == HL_EXCLUSIVE) {
    int writers = atomic_fetch_add(&shared->writers[i], sign);
    if (sign > 0 && (writers != 0 || atomic_load(&shared->holders[i]) != 0))
      (void)atomic_fetch_add(&shared->wrong, 1);
  } else {
    (void)atomic_fetch_add(&shared->holders[i], sign);
    if (sign > 0 && atomic_load(&shared->writers[i]) != 0)
      (void)atomic_fetch_add(&shared->wrong, 1);
  }
}

static void *stress_thread(void *argument) {
  hl_store *store = argument;
  hl_session *session = session_new(store);
  unsigned seed = (unsigned)getpid() ^ (unsigned)(uintptr_t)&seed;
  for (int i = 0; i < STRESS_ROUNDS; i++) {
    hl_row rows[9];
    size_t n = 0;
    for (uint32_t level = 0; level < 3; level++)
      for (uint32_t bucket = 0; bucket < 3; bucket++)
        if (rand_r(&seed) % 3 == 0)
          rows[n++] = row(level, bucket, rand_r(&seed) % 3 ? HL_SHARED : HL_EXCLUSIVE);
    if (n == 0) continue;
    int kind = rand_r(&seed) % 8;
    int64_t timeout = kind == 0 ? 0 : kind == 1 ? 2 : PATIENCE_MS;
    int status = take(session, rows, n, timeout, false, NULL);
    if (status == HL_TIMEOUT && timeout < PATIENCE_MS) continue;
    if (status != HL_OK) {
      (void)atomic_fetch_add(&shared->wrong, 1000);
      continue;
    }
    for (size_t k = 0; k < n; k++) mark(&rows[k], 1);
    if (kind == 2) sched_yield();
    if (kind == 3 && rows[0].mode == HL_SHARED) {
      hl_row wanted = rows[0];
      wanted.mode = HL_EXCLUSIVE;
      if (take(session, &wanted, 1, 2, true, NULL) == HL_OK) {
        mark(&rows[0], -1);
        mark(&wanted, 1);
        rows[0] = wanted;
      }
    }
    for (size_t k = 0; k < n; k++) mark(&rows[k], -1);
    (void)atomic_fetch_add(&shared->grants[0], 1);
    (void)ops->give_back(session, NULL);
  }
  ops->session_close(session);
  return NULL;
}

static void stress_process(intptr_t unused) {
  (void)unused;
  pthread_t threads[STRESS_THREADS];
  hl_store *store = store_new();
  for (int i = 0; i < STRESS_THREADS; i++)
    if (pthread_create(&threads[i], NULL, stress_thread, store)) _exit(1);
  for (int i = 0; i < STRESS_THREADS; i++)
    if (pthread_join(threads[i], NULL)) _exit(1);
  ops->close(store);
}

static void random_plans_exclude(void **state) {
  (void)state;
  pid_t pids[STRESS_PROCESSES];
  for (int i = 0; i < STRESS_PROCESSES; i++) pids[i] = spawn(stress_process, i);
  for (int i = 0; i < STRESS_PROCESSES; i++) reap(pids[i]);
  assert_int_equal(atomic_load(&shared->wrong), 0);
  assert_true(atomic_load(&shared->grants[0]) > STRESS_ROUNDS);
}

/* test_embedded_store [PATTERN]: which tests. */
int main(int argc, char **argv) {
#define SPEC(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)
  const struct CMUnitTest specs[] = {
      SPEC(sessions_and_stores_exclude),
      SPEC(processes_exclude),
      SPEC(a_closed_session_holds_nothing),
      SPEC(a_call_is_all_or_nothing),
      SPEC(timeouts_are_exact),
      SPEC(an_interrupted_wait_ends),
      SPEC(a_late_interruption_hits_nobody),
      SPEC(one_process_is_served_in_order),
      SPEC(processes_are_served_in_order),
      SPEC(many_hand_over),
      SPEC(a_writer_passes_a_stream_of_readers),
      SPEC(a_reader_passes_a_stream_of_writers),
      SPEC(a_killed_holder_lets_go),
      SPEC(a_killed_waiter_leaves_the_queue),
      SPEC(a_child_keeps_nothing_of_a_killed_parent),
      SPEC(a_child_leaves_the_parents_locks_alone),
      SPEC(a_conversion_passes_those_who_wait),
      SPEC(a_conversion_waits_for_other_processes),
      SPEC(a_failed_extend_is_undone),
      SPEC(a_failed_extend_undoes_no_earlier_one),
      SPEC(tokens_grow),
      SPEC(a_removed_directory_is_noticed),
      SPEC(what_is_wrong_is_refused),
      SPEC(files_have_the_directorys_rights),
      SPEC(files_are_for_writers_alone),
      SPEC(what_root_makes_is_the_directorys_owners),
      SPEC(a_renamed_directory_is_noticed),
      SPEC(a_replaced_control_file_is_noticed),
      SPEC(a_changed_link_is_noticed),
      SPEC(a_waiter_leaves_a_renamed_directory),
      SPEC(a_truncated_control_file_is_never_begun_anew),
      SPEC(a_copied_directory_is_refused),
      SPEC(a_program_that_locks_all_bytes_stops_openers_alone),
      SPEC(planted_names_are_not_followed),
      SPEC(what_others_say_of_themselves_is_escaped_and_cut),
      SPEC(what_the_killed_left_is_swept),
      SPEC(a_clock_that_is_ahead_costs_nothing),
      SPEC(a_child_keeps_no_descriptor),
      SPEC(descriptors_of_the_host_are_left_alone),
      SPEC(ten_thousand_need_a_few_descriptors),
      SPEC(holders_are_shown),
      SPEC(random_plans_exclude),
      cmocka_unit_test(nothing_is_left),
  };
  (void)snprintf(directory, sizeof directory, "/dev/shm/hierlock-test-%ld", (long)getpid());
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  if (hl_layout_new(NULL, 0, 0, &layout, NULL) != HL_OK) return 1;
  dsn = (hl_dsn){.store = "file", .path = directory};
  config = (hl_store_config){.dsn = &dsn, .layout = layout, .application = "test", .host = "here"};
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 1;
  int failed = cmocka_run_group_tests(specs, NULL, NULL);
  hl_layout_unref(layout);
  return failed;
}
