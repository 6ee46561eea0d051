/*
 * test_embedded_store.c - the embedded store, through its hl_store_ops: its grants, their order, and
 * the leftovers when processes die or fork. Its directory: test_embedded_directory.c; leases:
 * test_embedded_leases.c; the table beneath: test_embedded.c.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "embedded_processes.h"
#include "leftovers.h"

/* Late by more than the promised 10 ms, only because a test machine is busy. A machine that keeps a
   thread from running for longer spoils a try, so the best of some tries counts. */
enum { SLACK_MS = 60, TRIES = 40 };

/* How often a row goes from one thread to another, to meet each moment of that. */
enum { HANDOVERS = 5000 };

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

/* Waits in vain, never for less than the time-out. How late it ended, in us. */
static int64_t lateness(hl_session *session, hl_mode mode, int64_t timeout) {
  struct timespec t, u;
  (void)clock_gettime(CLOCK_MONOTONIC, &t);
  assert_int_equal(take1(session, 1, mode, timeout), HL_TIMEOUT);
  (void)clock_gettime(CLOCK_MONOTONIC, &u);
  int64_t us = (u.tv_sec - t.tv_sec) * 1000000 + (u.tv_nsec - t.tv_nsec) / 1000;
  assert_true(us >= timeout * 1000);
  return us - timeout * 1000;
}

static void timeouts_are_exact(void **state) {
  (void)state;
  static const int64_t timeouts[] = {1, 7, 49, 50, 51, 120};
  pid_t pid = spawn(hold_until_stop, HL_EXCLUSIVE);
  WAIT_UNTIL(atomic_load(&shared->step));
  hl_store *store = store_new();
  hl_session *a = session_new(store), *b = session_new(store);
  for (size_t i = 0; i < sizeof timeouts / sizeof *timeouts; i++) {
    int64_t late = INT64_MAX;
    for (int tries = 0; late > SLACK_MS * 1000; tries++) {
      assert_in_range(tries, 0, TRIES);
      waiting first; /* b is second in the queue in half of the cases */
      if (i % 2) waiting_start(&first, a, HL_EXCLUSIVE, 200, false);
      late = lateness(b, HL_EXCLUSIVE, timeouts[i]);
      if (i % 2) assert_int_equal(waiting_end(&first), HL_TIMEOUT);
    }
  }
  for (int tries = 0; lateness(b, HL_SHARED, 0) > SLACK_MS * 1000; tries++)
    assert_in_range(tries, 0, TRIES);
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
  enum { N = sizeof modes / sizeof *modes };
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

/* The processors' time of processes that live, together. */
static double seconds_of(const pid_t *pids, int n) {
  double all = 0;
  for (int i = 0; i < n; i++) {
    clockid_t clock;
    struct timespec t = {0};
    assert_int_equal(clock_getcpuclockid(pids[i], &clock), 0);
    assert_int_equal(clock_gettime(clock, &t), 0);
    all += (double)t.tv_sec + (double)t.tv_nsec / 1e9;
  }
  return all;
}

static void wait_in_the_crowd(intptr_t argument) {
  (void)argument;
  hl_store *store = store_new();
  hl_session *session = session_new(store);
  (void)atomic_fetch_add(&shared->step, 1);
  if (take1(session, 1, HL_EXCLUSIVE, HL_FOREVER) != HL_OK)
    (void)atomic_fetch_add(&shared->wrong, 1);
  (void)atomic_fetch_add(&shared->grants[0], 1);
  ops->session_close(session);
  ops->close(store);
}

/* More processes wait for a row than one of them watches. Compared by the processors' time: the
   machine may be busy. */
static void a_crowd_waits_asleep(void **state) {
  (void)state;
  enum { N = 200, SECONDS = 3 };
  hl_store *store = store_new();
  hl_session *session = session_new(store);
  pid_t pids[N];
  atomic_store(&shared->step, 0);
  assert_int_equal(take1(session, 1, HL_EXCLUSIVE, 0), HL_OK);
  for (int i = 0; i < N; i++) pids[i] = spawn(wait_in_the_crowd, 0);
  WAIT_UNTIL(atomic_load(&shared->step) == N);
  sleep_ms(2000); /* until each has seen all others */
  double before = seconds_of(pids, N);
  sleep_ms(SECONDS * 1000);
  assert_true(seconds_of(pids, N) - before < SECONDS * 0.5);
  give(session);
  for (int i = 0; i < N; i++) reap(pids[i]);
  assert_int_equal(atomic_load(&shared->grants[0]), N);
  assert_int_equal(atomic_load(&shared->wrong), 0);
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
  enum { N = 6 };
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

/* How long a waiter waits for the row of a holder that is killed, in ms. */
static int64_t outlive_holder(void) {
  memset(shared, 0, sizeof *shared);
  pid_t pid = spawn(hold_until_stop, HL_EXCLUSIVE);
  hl_store *store = store_new();
  hl_session *session = session_new(store);
  waiting w;
  WAIT_UNTIL(atomic_load(&shared->step));
  waiting_start(&w, session, HL_EXCLUSIVE, PATIENCE_MS, false);
  int64_t start = hl__now_ms();
  murder(pid);
  assert_int_equal(waiting_end(&w), HL_OK);
  int64_t ms = hl__now_ms() - start;
  ops->session_close(session);
  ops->close(store);
  return ms;
}

static void a_killed_holder_lets_go(void **state) {
  (void)state;
  for (int tries = 0; outlive_holder() > 50 + 2 * SLACK_MS; tries++)
    assert_in_range(tries, 0, TRIES);
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

static void try_beside_parent(intptr_t unused) {
  (void)unused;
  hl_session *session = session_new(store_new());
  if (take1(session, 1, HL_SHARED, 0) != HL_TIMEOUT) _exit(1);
  if (take1(session, 2, HL_EXCLUSIVE, 0) != HL_OK) _exit(2);
}

static void a_child_leaves_the_parents_locks_alone(void **state) {
  (void)state;
  hl_store *parents_store = store_new();
  hl_session *parents_session = session_new(parents_store);
  assert_int_equal(take1(parents_session, 1, HL_EXCLUSIVE, 0), HL_OK);
  reap(spawn(try_beside_parent, 0));
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

/* ---------------------------------------------------------------- tokens */

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

/* ------------------------------------------------------- many, and few */

static void ten_thousand_need_a_few_descriptors(void **state) {
  (void)state;
  enum { N = 10000 };
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
      SPEC(a_crowd_waits_asleep),
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
      SPEC(ten_thousand_need_a_few_descriptors),
      SPEC(holders_are_shown),
      SPEC(random_plans_exclude),
      cmocka_unit_test(nothing_is_left),
  };
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests(specs, processes_begin, processes_end);
}
