/*
 * test_waiting.c - where the callers of one process wait: the line, pendings in every state, calls
 * on a lock, the first of several, and waiters that are parked. Crowds are in test_crowd.c.
 */
#include "hierlock.h"
#include "clock.h"
#include "store.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "leftovers.h"
#include "waiting.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ------------------------------------------------------------- the line */

static void test_first_come_first_served(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *lock = acquire(manager, "u1/a1/r1", HL_EXCLUSIVE);
  hl_pending *waiting[20];
  for (int i = 0; i < 20; i++)
    waiting[i] = start(manager, i % 3 ? "u1/a1/r1" : "u1/a1", HL_EXCLUSIVE, -1);
  for (int i = 0; i < 20; i++) {
    for (int j = i; j < 20; j++) assert_false(hl_pending_done(waiting[j]));
    hl_lock_free(lock);
    lock = granted(waiting[i]);
  }
  hl_lock_free(lock);
  hl_manager_close(manager);
}

static void test_a_crowd_shares(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *lock = acquire(manager, "u1/a1/r1", HL_EXCLUSIVE), *shared[30];
  hl_pending *readers[30];
  for (int i = 0; i < 30; i++) readers[i] = start(manager, "u1/a1/r1", HL_SHARED, -1);
  hl_pending *writer = start(manager, "u1/a1/r1", HL_EXCLUSIVE, -1);
  hl_pending *late = start(manager, "u1/a1/r1", HL_SHARED, -1);
  hl_lock_free(lock);
  for (int i = 0; i < 30; i++) shared[i] = granted(readers[i]);
  assert_false(hl_pending_done(writer));
  assert_false(hl_pending_done(late));
  for (int i = 0; i < 30; i++) hl_lock_free(shared[i]);
  lock = granted(writer);
  assert_false(hl_pending_done(late));
  hl_lock_free(lock);
  hl_lock_free(granted(late));
  hl_manager_close(manager);
}

static void count_waiting(void *context, const hl_holder *holder) {
  if (holder->waiting) ++*(int *)context;
}

/* How many requests wait at the store. */
static int at_store(hl_manager *manager, const char *path) {
  int n = 0;
  hl_plan *plan = plan_of(manager, path, HL_EXCLUSIVE);
  assert_int_equal(hl_manager_holders(manager, plan, count_waiting, &n, NULL), HL_OK);
  hl_plan_free(plan);
  return n;
}

/* Behind the present holder, the first of a crowd waits for all. */
static void test_a_crowd_behind_a_writer(void **state) {
  (void)state;
  hl_manager *manager = open_manager(), *observer = open_manager();
  hl_lock *lock = acquire(manager, "u1/a1/r1", HL_EXCLUSIVE), *shared[20];
  hl_pending *writer = start(manager, "u1/a1/r1", HL_EXCLUSIVE, -1);
  hl_pending *readers[20];
  for (int i = 0; i < 20; i++) readers[i] = start(manager, "u1/a1/r1", HL_SHARED, -1);
  hl_lock_free(lock);
  lock = granted(writer);
  (void)usleep(50000); /* for those who should not */
  assert_int_equal(at_store(observer, "u1/a1/r1"), 1);
  /* The first gives up: the next waits alone. */
  hl_pending_free(readers[0]);
  (void)usleep(50000);
  assert_int_equal(at_store(observer, "u1/a1/r1"), 1);
  hl_lock_free(lock);
  for (int i = 1; i < 20; i++) shared[i] = granted(readers[i]);
  for (int i = 1; i < 20; i++) hl_lock_free(shared[i]);
  hl_manager_close(observer);
  hl_manager_close(manager);
}

/* A waiter for something else does not hold up callers that could have their locks now, though
   it will want the same later. */
static void test_no_false_wait(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  /* Rows go in the order of their buckets: both orders are tried. */
  static const char *const pairs[][2] = {{"u1", "u2"}, {"u2", "u1"}};
  for (int i = 0; i < 2; i++) {
    hl_lock *lock = acquire(manager, pairs[i][0], HL_EXCLUSIVE);
    hl_pending *both = start(manager, "u1 u2", HL_EXCLUSIVE, -1);
    hl_pending *other = start(manager, pairs[i][1], HL_EXCLUSIVE, 300);
    hl_lock *got = NULL;
    int status = hl_pending_wait(other, DEADLINE, &got, NULL);
    /* u1's bucket is the lower one: who wants both holds nothing while it waits
       for u1, and u1 while it waits for u2. */
    assert_int_equal(status, i == 0 ? HL_OK : HL_TIMEOUT);
    hl_lock_free(got);
    hl_pending_free(other);
    hl_lock_free(lock);
    hl_lock_free(granted(both));
  }
  hl_manager_close(manager);
}

/* A request for several waits here behind a request for any one of them, and holds none. */
static void test_one_of_several(void **state) {
  static const char *const each[] = {"u1/a1", "u2/a1", "u3/a1"};
  (void)state;
  hl_manager *manager = open_manager(), *observer = open_manager();
  for (int i = 0; i < 3; i++) {
    hl_lock *lock = acquire(manager, each[i], HL_EXCLUSIVE);
    hl_pending *one = start(manager, each[i], HL_EXCLUSIVE, -1);
    hl_pending *all = start(manager, "u1/a1 u2/a1 u3/a1", HL_EXCLUSIVE, -1);
    (void)usleep(50000); /* for the one that should not */
    assert_int_equal(at_store(observer, each[i]), 1);
    hl_lock_free(lock);
    hl_lock_free(granted(one));
    hl_lock_free(granted(all));
  }
  hl_manager_close(observer);
  hl_manager_close(manager);
}

static void test_timeouts_in_line(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *lock = acquire(manager, "u1", HL_EXCLUSIVE);
  hl_pending *head = start(manager, "u1", HL_EXCLUSIVE, -1), *waiting[10];
  int64_t begun = hl__now_ms();
  for (int i = 0; i < 10; i++) waiting[i] = start(manager, "u1/a1", HL_EXCLUSIVE, 200 - 10 * i);
  for (int i = 9; i >= 0; i--) {
    failed(waiting[i], HL_TIMEOUT);
    int64_t took = hl__now_ms() - begun;
    assert_true(took >= 200 - 10 * i);
    assert_true(took < 200 - 10 * i + 100);
  }
  failed(start(manager, "u1", HL_EXCLUSIVE, 0), HL_TIMEOUT);
  hl_lock_free(lock);
  hl_lock_free(granted(head));
  hl_manager_close(manager);
}

static void *acquire_in_thread(void *argument) {
  hl_manager *manager = argument;
  return acquire(manager, "u1/a1", HL_EXCLUSIVE);
}

static void test_threads_stand_in_line_too(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *lock = acquire(manager, "u1/a1", HL_EXCLUSIVE);
  hl_pending *first = start(manager, "u1/a1", HL_EXCLUSIVE, -1);
  pthread_t thread;
  hl_stats stats = {0};
  assert_int_equal(pthread_create(&thread, NULL, acquire_in_thread, manager), 0);
  while (stats.waiting < 2) hl_manager_stats(manager, &stats);
  hl_pending *last = start(manager, "u1/a1", HL_EXCLUSIVE, -1);
  hl_lock_free(lock);
  lock = granted(first);
  assert_false(hl_pending_done(last));
  hl_lock_free(lock);
  void *result;
  assert_int_equal(pthread_join(thread, &result), 0);
  assert_false(hl_pending_done(last));
  hl_lock_free(result);
  hl_lock_free(granted(last));
  hl_manager_close(manager);
}

/* ------------------------------------------------------------- pendings */

static void test_descriptor(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *lock = acquire(manager, "u1", HL_EXCLUSIVE);
  for (int early = 0; early < 2; early++) {
    hl_pending *pending = start(manager, "u1", HL_EXCLUSIVE, -1);
    struct pollfd p = {.fd = -1, .events = POLLIN};
    if (early) {
      p.fd = hl_pending_fd(pending, NULL);
      assert_int_equal(poll(&p, 1, 20), 0);
    }
    hl_lock_free(lock);
    if (!early) {
      while (!hl_pending_done(pending)) (void)usleep(100);
      p.fd = hl_pending_fd(pending, NULL);
    }
    assert_int_equal(poll(&p, 1, DEADLINE), 1);
    assert_true(hl_pending_done(pending));
    assert_int_equal(poll(&p, 1, 0), 1);
    lock = granted(pending);
  }
  hl_lock_free(lock);
  hl_manager_close(manager);
}

static void test_given_up_in_every_state(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *lock = acquire(manager, "u1", HL_EXCLUSIVE);
  for (int drop = 0; drop < 2; drop++) {
    hl_pending *at_store = start(manager, "u1", HL_EXCLUSIVE, -1);
    hl_pending *in_line = start(manager, "u1", HL_EXCLUSIVE, -1);
    hl_pending *last = start(manager, "u1", HL_EXCLUSIVE, -1);
    if (drop) {
      hl_pending_free(in_line);
      hl_pending_free(at_store);
    } else {
      hl_pending_cancel(in_line);
      hl_pending_cancel(at_store);
      failed(in_line, HL_CANCELLED);
      failed(at_store, HL_CANCELLED);
    }
    hl_lock_free(lock);
    lock = granted(last);
  }
  hl_lock_free(lock);

  /* Granted, and not taken. */
  hl_pending *pending = start(manager, "u2", HL_EXCLUSIVE, -1);
  while (!hl_pending_done(pending)) (void)usleep(100);
  hl_pending_cancel(pending);
  assert_free(manager, "u2");
  failed(pending, HL_CANCELLED);
  pending = start(manager, "u2", HL_EXCLUSIVE, -1);
  while (!hl_pending_done(pending)) (void)usleep(100);
  hl_pending_free(pending);
  assert_free(manager, "u2");

  /* Taken: a cancellation comes too late. */
  pending = start(manager, "u2", HL_EXCLUSIVE, -1);
  assert_int_equal(hl_pending_wait(pending, DEADLINE, &lock, NULL), HL_OK);
  hl_pending_cancel(pending);
  assert_true(hl_lock_is_held(lock));
  hl_lock *again;
  assert_int_equal(hl_pending_wait(pending, 0, &again, NULL), HL_EMISUSE);
  hl_pending_free(pending);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

static void test_closed_manager(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *lock = acquire(manager, "u1", HL_EXCLUSIVE);
  hl_pending *at_store = start(manager, "u1", HL_EXCLUSIVE, -1);
  hl_pending *in_line = start(manager, "u1", HL_EXCLUSIVE, -1);
  hl_pending *done = start(manager, "u2", HL_EXCLUSIVE, -1);
  while (!hl_pending_done(done)) (void)usleep(100);
  hl_manager_close(manager);
  failed(at_store, HL_CANCELLED);
  failed(in_line, HL_CANCELLED);
  failed(done, HL_CANCELLED); /* a lock that is not held is given to no caller */
  hl_lock_free(lock);
  manager = open_manager();
  assert_free(manager, "u1");
  assert_free(manager, "u2");
  hl_manager_close(manager);
}

/* ---------------------------------------------------- calls on a lock */

static void test_calls_on_a_lock(void **state) {
  (void)state;
  hl_manager *manager = open_manager(), *other = open_manager();
  hl_lock *lock = acquire(manager, "u1/a1", HL_EXCLUSIVE), *none;
  hl_lock *held = acquire(other, "u1/a2", HL_EXCLUSIVE);
  uint64_t token = hl_lock_token(lock);
  hl_plan *plan = plan_of(manager, "u1/a2", HL_EXCLUSIVE);
  hl_pending *pending;
  hl_error error, occupied;
  assert_int_equal(hl_lock_start_extend(lock, plan, NULL, &pending, &error), HL_OK);
  assert_false(hl_pending_done(pending));
  assert_true(hl_lock_is_held(lock));
  assert_int_equal(hl_lock_check(lock, &occupied), HL_EMISUSE);
  assert_int_equal(hl_lock_extend(lock, plan, NULL, &error), HL_EMISUSE);
  assert_string_equal(error.message, occupied.message);
  assert_int_equal(hl_lock_upgrade(lock, NULL, &error), HL_EMISUSE);
  assert_string_equal(error.message, occupied.message); /* not that it is none for update */
  hl_lock_free(held);
  assert_int_equal(hl_pending_wait(pending, DEADLINE, &none, &error), HL_OK);
  assert_null(none);
  hl_pending_free(pending);
  assert_int_equal(hl_plan_target_count(hl_lock_plan(lock)), 2);
  assert_true(hl_lock_token(lock) > token);

  assert_int_equal(hl_lock_start_check(lock, &pending, &error), HL_OK);
  assert_int_equal(hl_pending_wait(pending, DEADLINE, &none, &error), HL_OK);
  /* The lock's plan may end before it. */
  assert_null(hl_pending_plan(pending));
  hl_pending_free(pending);

  assert_int_equal(hl_lock_start_release(lock, &pending, &error), HL_OK);
  assert_false(hl_lock_is_held(lock));
  assert_int_equal(hl_pending_wait(pending, DEADLINE, &none, &error), HL_OK);
  hl_pending_free(pending);
  assert_free(other, "u1");
  assert_int_equal(hl_lock_start_release(lock, &pending, &error), HL_OK);
  assert_null(pending);
  assert_int_equal(hl_lock_start_check(lock, &pending, &error), HL_ERELEASED);
  hl_lock_free(lock);
  hl_plan_free(plan);
  hl_manager_close(other);
  hl_manager_close(manager);
}

/* Also while a call on it waits, or has not even begun to. */
static void test_lost_while_it_waits(void **state) {
  (void)state;
  hl_manager *manager = open_manager(), *other = open_manager();
  hl_lock *lock = acquire(manager, "u1/a1", HL_EXCLUSIVE), *none;
  hl_lock *held = acquire(other, "u1/a2", HL_EXCLUSIVE);
  hl_plan *plan = plan_of(manager, "u1/a2", HL_EXCLUSIVE);
  hl_pending *pending;
  hl_error error;
  char control[80], away[80];
  (void)snprintf(control, sizeof control, "%s/control", directory);
  (void)snprintf(away, sizeof away, "%s/control.away", directory);
  assert_int_equal(hl_lock_start_extend(lock, plan, NULL, &pending, &error), HL_OK);
  assert_true(hl_lock_is_held(lock));
  assert_int_equal(rename(control, away), 0);
  assert_false(hl_lock_is_held(lock));
  assert_false(hl_lock_is_held(held));
  assert_int_equal(hl_pending_wait(pending, DEADLINE, &none, &error), HL_ELOST);
  hl_pending_free(pending);
  hl_lock_free(lock);
  hl_lock_free(held);
  hl_plan_free(plan);
  hl_manager_close(other);
  hl_manager_close(manager);
  assert_int_equal(unlink(away), 0);
}

static void assert_free_at_once(hl_manager *manager, const char *path) {
  hl_plan *plan = plan_of(manager, path, HL_EXCLUSIVE);
  hl_options options = HL_OPTIONS_INIT;
  hl_lock *lock = NULL;
  options.timeout = 0;
  assert_int_equal(hl_acquire(manager, plan, &options, &lock, NULL), HL_OK);
  hl_plan_free(plan);
  hl_lock_free(lock);
}

/* Not confirmed: the worker of another call on the lock, which was given up, is still at it, and
   releases the lock. That call may also have ended before its worker came. */
static void start_release(hl_lock *lock, bool at_work) {
  hl_pending *pending;
  hl_lock *none;
  hl_error error;
  int status = hl_lock_start_release(lock, &pending, &error);
  if (status || at_work) {
    assert_int_equal(status, HL_ECONNECTION);
    assert_null(pending);
    return;
  }
  assert_int_equal(hl_pending_wait(pending, DEADLINE, &none, &error), HL_OK);
  hl_pending_free(pending);
}

/* Released, freed or dropped while a call on it waits: it goes back. */
static void test_use_given_up(void **state) {
  (void)state;
  hl_manager *manager = open_manager(), *other = open_manager();
  hl_lock *held = acquire(other, "u1/a2", HL_EXCLUSIVE);
  hl_plan *plan = plan_of(manager, "u1/a2", HL_EXCLUSIVE);
  for (int how = 0; how < 10; how++) {
    hl_lock *lock = acquire(manager, "u1/a1", HL_EXCLUSIVE);
    hl_pending *pending;
    assert_int_equal(hl_lock_start_extend(lock, plan, NULL, &pending, NULL), HL_OK);
    /* At once, and when it waits at the store. */
    if (how % 2)
      while (at_store(other, "u1/a2") == 0) (void)usleep(200);
    switch (how / 2) {
    case 0:
      assert_int_equal(hl_lock_release(lock, false, NULL), HL_OK);
      failed(pending, HL_ERELEASED);
      hl_lock_free(lock);
      break;
    case 1:
      hl_lock_free(lock);
      hl_pending_free(pending);
      break;
    case 2:
      hl_pending_free(pending);
      hl_lock_free(lock);
      break;
    case 3:
      start_release(lock, how % 2);
      hl_pending_free(pending);
      hl_lock_free(lock);
      break;
    case 4:
      assert_int_equal(hl_lock_release(lock, true, NULL), HL_OK);
      assert_free_at_once(other, "u1/a1");
      hl_lock_free(lock);
      hl_pending_free(pending);
      break;
    }
    assert_free(other, "u1/a1");
  }
  hl_lock_free(held);
  hl_plan_free(plan);
  hl_manager_close(other);
  hl_manager_close(manager);
}

/* The embedded store, interrupted when the call that was meant has just ended: as
   when an extend is cancelled that moment. */
static hl_store_ops late_store;
static bool interrupt_late;

static int late_lock(hl_session *session, const hl_request *request, hl_grant *grant,
                     hl_error *error) {
  int status = hl_store_file.take(session, request, grant, error);
  if (interrupt_late) hl_store_file.interrupt(session);
  return status;
}

/* The next extend of the same lock waits as if nothing had been. */
static void test_cancelled_too_late(void **state) {
  (void)state;
  const hl_store_ops *const stores[] = {&late_store, NULL};
  hl_config config = HL_CONFIG_INIT;
  hl_options options = HL_OPTIONS_INIT;
  hl_manager *manager, *other = open_manager();
  hl_error error;
  char dsn[80];
  late_store = hl_store_file;
  late_store.take = late_lock;
  (void)snprintf(dsn, sizeof dsn, "file:%s", directory);
  config.dsn = dsn;
  config.stores = stores;
  assert_int_equal(hl_manager_open(&config, &manager, &error), HL_OK);
  hl_lock *held = acquire(other, "u1/a3", HL_EXCLUSIVE);
  hl_lock *lock = acquire(manager, "u1/a1", HL_EXCLUSIVE);
  hl_plan *first = plan_of(manager, "u1/a2", HL_EXCLUSIVE),
          *second = plan_of(manager, "u1/a3", HL_EXCLUSIVE);
  interrupt_late = true;
  assert_int_equal(hl_lock_extend(lock, first, NULL, &error), HL_OK);
  interrupt_late = false;
  options.timeout = 50;
  assert_int_equal(hl_lock_extend(lock, second, &options, &error), HL_TIMEOUT);
  hl_lock_free(lock);
  hl_lock_free(held);
  hl_plan_free(first);
  hl_plan_free(second);
  hl_manager_close(manager);
  hl_manager_close(other);
}

/* The owner of a lock may look at it, and free it, at each moment of the release that its worker
   makes. AddressSanitizer sees the errors of that. */
static void test_released_by_the_worker(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  for (int i = 0; i < 600; i++) {
    hl_lock *lock = acquire(manager, "u1/a1", HL_EXCLUSIVE);
    hl_pending *pending;
    assert_int_equal(hl_lock_start_check(lock, &pending, NULL), HL_OK);
    assert_int_equal(hl_lock_release(lock, false, NULL), HL_OK);
    for (int j = 0; j < i % 40; j++) (void)sched_yield();
    assert_false(hl_lock_is_held(lock));
    assert_int_equal(hl_lock_remaining(lock), 0);
    hl_lock_free(lock);
    hl_pending_free(pending);
    assert_free(manager, "u1/a1");
  }
  hl_manager_close(manager);
}

/* The worker looks for the blockers while its owner gives up, and reads the result: nothing.
   ThreadSanitizer sees the errors of that. */
static void test_given_up_while_it_looks(void **state) {
  (void)state;
  hl_manager *manager = open_manager(), *other = open_manager();
  hl_lock *held[40];
  for (int i = 0; i < 40; i++) {
    char path[16];
    (void)snprintf(path, sizeof path, "u1/a%d", i);
    held[i] = acquire(other, path, HL_EXCLUSIVE);
  }
  for (int i = 0; i < 8; i++) {
    hl_pending *pending = start(manager, "u1", HL_EXCLUSIVE, 20);
    hl_stats stats;
    int found = 0;
    int64_t end = hl__now_ms() + 20;
    while (hl__now_ms() < end) (void)usleep(10);
    (void)usleep((useconds_t)i * 50);
    hl_pending_cancel(pending);
    bool late = hl_pending_wait(pending, 0, &(hl_lock *){NULL}, NULL) == HL_TIMEOUT;
    for (int j = 0; j < 200; j++) (void)hl_pending_holders(pending, count_waiting, &found, NULL);
    assert_true(late || found == 0);
    hl_pending_free(pending);
    hl_manager_stats(manager, &stats);
    assert_int_equal(stats.waiting, 0);
  }
  for (int i = 0; i < 40; i++) hl_lock_free(held[i]);
  hl_manager_close(other);
  hl_manager_close(manager);
}

/* ------------------------------------------------- the first of several */

static hl_store_ops slow_store;
static hl_manager *slow_manager;
static _Atomic(hl_lock *) released; /* in the middle of the next try */

/* The try of the second goes on until the first is granted. */
static int slow_try(hl_session *session, const hl_request *request, hl_grant *grant,
                    hl_error *error) {
  if (request->try_once && released && strcmp(request->path, "u1/a2") == 0) {
    int64_t end = hl__now_ms() + DEADLINE;
    hl_stats stats;
    hl_lock_free(atomic_exchange(&released, NULL));
    do {
      (void)usleep(100);
      hl_manager_stats(slow_manager, &stats);
    } while (stats.acquired == 0 && hl__now_ms() < end);
  }
  return hl_store_file.take(session, request, grant, error);
}

/* The pending ends once, and is counted once; a late grant goes back. */
static void test_given_up_while_it_begins(void **state) {
  const hl_store_ops *const stores[] = {&slow_store, NULL};
  hl_config config = HL_CONFIG_INIT;
  char dsn[80], path[80];
  (void)state;
  slow_store = hl_store_file;
  slow_store.take = slow_try;
  (void)snprintf(dsn, sizeof dsn, "file:%s", directory);
  config.dsn = dsn;
  config.stores = stores;
  for (int second_held = 0; second_held < 2; second_held++) {
    hl_manager *other = open_manager();
    hl_pending *pending;
    hl_stats stats;
    assert_int_equal(hl_manager_open(&config, &slow_manager, NULL), HL_OK);
    const hl_plan *plans[] = {plan_of(slow_manager, "u1/a1", HL_EXCLUSIVE),
                              plan_of(slow_manager, "u1/a2", HL_EXCLUSIVE)};
    released = acquire(other, "u1/a1", HL_EXCLUSIVE);
    hl_lock *held = second_held ? acquire(other, "u1/a2", HL_EXCLUSIVE) : NULL;
    assert_int_equal(hl_start_any(slow_manager, plans, 2, NULL, &pending, NULL), HL_OK);
    hl_lock *lock = granted(pending);
    assert_string_equal(hl_plan_describe(hl_lock_plan(lock), path, sizeof path), "u1/a1");
    hl_manager_stats(slow_manager, &stats);
    assert_int_equal(stats.waiting, 0);
    assert_int_equal(stats.held, 1);
    hl_lock_free(held);
    assert_free(other, "u1/a2");
    hl_lock_free(lock);
    assert_free(other, "u1");
    for (int i = 0; i < 2; i++) hl_plan_free(plans[i]);
    hl_manager_close(slow_manager);
    hl_manager_close(other);
  }
}

/* ------------------------------------------------------------ the parked */

/* A manager has one place at the store, and a line whose next waiter always wants that place:
   the parked waiter is granted all the same. Otherwise it is granted only when no waiter of
   another manager has come meanwhile: never, where they always come. */
static void test_parked_in_turn(void **state) {
  (void)state;
  enum { LINE = 12 };
  hl_manager *manager = open_small(1), *other = open_manager();
  hl_lock *held = acquire(other, "u1", HL_EXCLUSIVE);
  hl_lock *wanted = acquire(other, "u2", HL_EXCLUSIVE);
  hl_pending *line[LINE], *parked, *next, *after;
  for (int i = 0; i < LINE; i++) line[i] = start(manager, "u1", HL_EXCLUSIVE, -1);
  (void)usleep(30000);
  parked = start(manager, "u2", HL_EXCLUSIVE, -1);
  (void)usleep(30000);
  next = start(other, "u2", HL_EXCLUSIVE, -1);
  int places = 0;
  while (!hl_pending_done(parked) && places < LINE - 1) {
    (void)usleep(30000);
    hl_lock_free(held);
    held = granted(line[places++]); /* its place is free now */
    (void)usleep(30000);
    after = start(other, "u2", HL_EXCLUSIVE, -1);
    (void)usleep(30000);
    hl_lock_free(wanted);
    wanted = NULL;
    for (int i = 0; i < 100 && !hl_pending_done(parked) && !hl_pending_done(next); i++)
      (void)usleep(10000);
    if (hl_pending_done(next)) {
      wanted = granted(next);
      next = after;
    } else {
      hl_pending_free(after);
    }
  }
  assert_true(hl_pending_done(parked));
  hl_lock_free(granted(parked));
  hl_pending_free(next);
  if (wanted) hl_lock_free(wanted);
  hl_lock_free(held);
  while (places < LINE) hl_lock_free(granted(line[places++]));
  hl_manager_close(manager);
  hl_manager_close(other);
}

/* A waiter that waits for ever has the only place. The parked waiter gets its row when that is
   given back, though no other departure lets the line advance. */
static void test_parked_alone(void **state) {
  (void)state;
  hl_manager *manager = open_small(1), *other = open_manager();
  hl_lock *for_ever = acquire(other, "u1", HL_EXCLUSIVE);
  hl_lock *wanted = acquire(other, "u2", HL_EXCLUSIVE);
  hl_pending *waiter = start(manager, "u1", HL_EXCLUSIVE, -1);
  (void)usleep(30000);
  hl_pending *parked = start(manager, "u2", HL_EXCLUSIVE, -1);
  (void)usleep(300000);
  assert_false(hl_pending_done(parked));
  hl_lock_free(wanted);
  for (int i = 0; i < 2000 && !hl_pending_done(parked); i++) (void)usleep(10000);
  assert_true(hl_pending_done(parked));
  hl_lock_free(granted(parked));
  assert_false(hl_pending_done(waiter));
  hl_lock_free(for_ever);
  hl_lock_free(granted(waiter));
  hl_manager_close(manager);
  hl_manager_close(other);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_first_come_first_served),
      cmocka_unit_test(test_a_crowd_shares),
      cmocka_unit_test(test_a_crowd_behind_a_writer),
      cmocka_unit_test(test_no_false_wait),
      cmocka_unit_test(test_one_of_several),
      cmocka_unit_test(test_timeouts_in_line),
      cmocka_unit_test(test_threads_stand_in_line_too),
      cmocka_unit_test(test_descriptor),
      cmocka_unit_test(test_given_up_in_every_state),
      cmocka_unit_test(test_closed_manager),
      cmocka_unit_test(test_calls_on_a_lock),
      cmocka_unit_test(test_lost_while_it_waits),
      cmocka_unit_test(test_use_given_up),
      cmocka_unit_test(test_cancelled_too_late),
      cmocka_unit_test(test_released_by_the_worker),
      cmocka_unit_test(test_given_up_while_it_looks),
      cmocka_unit_test(test_given_up_while_it_begins),
      cmocka_unit_test(test_parked_in_turn),
      cmocka_unit_test(test_parked_alone),
      cmocka_unit_test(nothing_is_left),
  };
  make_directory_name();
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  int failures = cmocka_run_group_tests_name("waiting", tests, NULL, NULL);
  return !remove_directory() || failures > 0;
}
