/*
 * test_waiting.c - where the callers of one process wait: the line, pendings in every state, and
 * a crowd of threads and pendings that come, go and give up at random, under a checker that sees
 * two holders at once. On the embedded store, as that needs no server.
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

#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define DEADLINE 20000

static char directory[64];

static hl_manager *open_small(unsigned pool_size) {
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager;
  hl_error error;
  char dsn[80];
  (void)snprintf(dsn, sizeof dsn, "file:%s", directory);
  config.dsn = dsn;
  if (pool_size) config.pool_size = pool_size;
  assert_int_equal(hl_manager_open(&config, &manager, &error), HL_OK);
  return manager;
}

static hl_manager *open_manager(void) { return open_small(0); }

static hl_plan *plan_of(hl_manager *manager, const char *path, hl_mode mode) {
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  char text[256];
  (void)snprintf(text, sizeof text, "%s", path);
  char *rest = text;
  for (char *target; (target = strtok_r(rest, " ", &rest));) {
    hl_id ids[3];
    unsigned n = 0;
    for (char *id = target; id && n < 3; n++) {
      char *slash = strchr(id, '/');
      ids[n] = (hl_id){id, slash ? (size_t)(slash - id) : strlen(id)};
      id = slash ? slash + 1 : NULL;
    }
    assert_int_equal(hl_plan_add(plan, ids, n, mode, false, NULL), HL_OK);
  }
  return plan;
}

static hl_lock *acquire(hl_manager *manager, const char *path, hl_mode mode) {
  hl_plan *plan = plan_of(manager, path, mode);
  hl_lock *lock = NULL;
  hl_error error;
  assert_int_equal(hl_acquire(manager, plan, NULL, &lock, &error), HL_OK);
  hl_plan_free(plan);
  return lock;
}

static hl_pending *start(hl_manager *manager, const char *path, hl_mode mode, int64_t timeout) {
  hl_plan *plan = plan_of(manager, path, mode);
  hl_options options = HL_OPTIONS_INIT;
  hl_pending *pending = NULL;
  options.timeout = timeout;
  assert_int_equal(hl_start(manager, plan, &options, &pending, NULL), HL_OK);
  hl_plan_free(plan);
  return pending;
}

static hl_lock *granted(hl_pending *pending) {
  hl_lock *lock;
  hl_error error;
  assert_int_equal(hl_pending_wait(pending, DEADLINE, &lock, &error), HL_OK);
  hl_pending_free(pending);
  return lock;
}

static void failed(hl_pending *pending, int expected) {
  hl_lock *lock;
  hl_error error;
  assert_int_equal(hl_pending_wait(pending, DEADLINE, &lock, &error), expected);
  assert_true(hl_pending_done(pending));
  assert_null(lock);
  hl_pending_free(pending);
}

/* Checks that the target is free, or soon will be. */
static void assert_free(hl_manager *manager, const char *path) {
  hl_plan *plan = plan_of(manager, path, HL_EXCLUSIVE);
  hl_options options = HL_OPTIONS_INIT;
  hl_lock *lock = NULL;
  options.timeout = DEADLINE;
  assert_int_equal(hl_acquire(manager, plan, &options, &lock, NULL), HL_OK);
  hl_plan_free(plan);
  hl_lock_free(lock);
}

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
  hl_error error;
  assert_int_equal(hl_lock_start_extend(lock, plan, NULL, &pending, &error), HL_OK);
  assert_false(hl_pending_done(pending));
  assert_true(hl_lock_is_held(lock));
  assert_int_equal(hl_lock_check(lock, &error), HL_EMISUSE);
  assert_int_equal(hl_lock_extend(lock, plan, NULL, &error), HL_EMISUSE);
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

/* Released, freed or dropped while a call on it waits: it goes back. */
static void test_use_given_up(void **state) {
  (void)state;
  hl_manager *manager = open_manager(), *other = open_manager();
  hl_lock *held = acquire(other, "u1/a2", HL_EXCLUSIVE);
  hl_plan *plan = plan_of(manager, "u1/a2", HL_EXCLUSIVE);
  for (int how = 0; how < 8; how++) {
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
      assert_int_equal(hl_lock_start_release(lock, &(hl_pending *){NULL}, NULL), HL_OK);
      hl_pending_free(pending);
      hl_lock_free(lock);
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

/* A manager has one place at the store, and a line whose next waiter always wants that place:
   the parked waiter is granted all the same. Otherwise it is granted only when no waiter of
   another manager has come meanwhile: never, where they always come. */
static void test_parked_in_turn(void **state) {
  (void)state;
  enum {
    LINE = 12
  };
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
    (void)execl(program, "test_waiting", name, NULL);
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
  enum {
    CROWD = 10000
  };
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

int main(int argc, char **argv) {
  const struct CMUnitTest alone[] = {
      cmocka_unit_test(with_few_threads),
      cmocka_unit_test(without_a_thread),
      cmocka_unit_test(without_any_thread),
  };
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_first_come_first_served),
      cmocka_unit_test(test_a_crowd_shares),
      cmocka_unit_test(test_a_crowd_behind_a_writer),
      cmocka_unit_test(test_no_false_wait),
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
      cmocka_unit_test(test_crowd),
      cmocka_unit_test(test_threads_are_bounded),
      cmocka_unit_test(test_parked_in_turn),
      cmocka_unit_test(test_parked_alone),
      cmocka_unit_test(test_few_threads),
      cmocka_unit_test(test_a_crowd_without_a_thread),
      cmocka_unit_test(test_without_any_thread),
      cmocka_unit_test(test_many),
      cmocka_unit_test(nothing_is_left),
  };
  (void)snprintf(directory, sizeof directory, "/dev/shm/hierlock-test-%d", (int)getpid());
  int failures = 0;
  bool by_itself = false;
  for (size_t i = 0; argc > 1 && i < sizeof alone / sizeof *alone; i++)
    if (strcmp(argv[1], alone[i].name) == 0) {
      by_itself = true;
      failures += _cmocka_run_group_tests(alone[i].name, &alone[i], 1, NULL, NULL);
    }
  if (argc > 1 && !by_itself) cmocka_set_test_filter(argv[1]);
  if (!by_itself) failures = cmocka_run_group_tests_name("waiting", tests, NULL, NULL);
  struct rlimit limit;
  (void)getrlimit(RLIMIT_NPROC, &limit);
  limit.rlim_cur = limit.rlim_max;
  (void)setrlimit(RLIMIT_NPROC, &limit);
  char command[96];
  (void)snprintf(command, sizeof command, "rm -rf %s", directory);
  if (system(command) != 0) {
    perror(command);
    failures++;
  }
  return failures > 0;
}
