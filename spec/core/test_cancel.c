/*
 * test_cancel.c - waits that a program ends from another thread: by pthread_cancel, by
 * hl_manager_cancel, by closing. And waits of processes that are forked from one.
 */
#include "hierlock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "leftovers.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
  PATIENCE_S = 90,
  LONG_MS = 20000,
  SHORT_MS = 2000, /* the first thread still waits when the second begins, under valgrind, too */
  CIRCLE_MS = 6000
};

static char directory[] = "/dev/shm/hierlock-cancel-XXXXXX", dsn[64];

static int prepare(void **state) {
  (void)state;
  alarm(PATIENCE_S); /* a mutex that is left locked blocks for ever */
  if (!mkdtemp(directory)) return -1;
  (void)snprintf(dsn, sizeof dsn, "file:%s", directory);
  return 0;
}

static int clean(void **state) {
  char command[128];
  (void)state;
  (void)snprintf(command, sizeof command, "rm -rf %s", directory);
  return system(command);
}

static hl_manager *open_manager(void) {
  static const struct hl_store_ops *const stores[] = {&hl_store_memcached, NULL};
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager;
  config.dsn = dsn;
  config.stores = stores;
  assert_int_equal(hl_manager_open(&config, &manager, NULL), HL_OK);
  return manager;
}

static hl_plan *plan_of(hl_manager *manager) {
  const hl_id ids[] = {{"u", 1}, {"a", 1}};
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  assert_non_null(plan);
  assert_int_equal(hl_plan_add(plan, ids, 2, HL_EXCLUSIVE, true, NULL), HL_OK);
  return plan;
}

static hl_lock *take(hl_manager *manager) {
  hl_options options = HL_OPTIONS_INIT;
  hl_lock *lock;
  hl_plan *plan = plan_of(manager);
  options.timeout = 0;
  assert_int_equal(hl_acquire(manager, plan, &options, &lock, NULL), HL_OK);
  hl_plan_free(plan);
  return lock;
}

typedef struct waiter {
  hl_manager *manager;
  int64_t timeout;
  int status;
} waiter;

static void *wait_main(void *argument) {
  waiter *self = argument;
  hl_options options = HL_OPTIONS_INIT;
  hl_lock *lock = NULL;
  hl_plan *plan = plan_of(self->manager);
  options.timeout = self->timeout;
  self->status = hl_acquire(self->manager, plan, &options, &lock, NULL);
  hl_lock_free(lock);
  hl_plan_free(plan);
  pthread_testcancel();
  return NULL;
}

static void await_waiters(hl_manager *manager, uint64_t n) {
  hl_stats stats;
  do {
    (void)usleep(1000);
    hl_manager_stats(manager, &stats);
  } while (stats.waiting < n);
  (void)usleep(20000); /* until they are in their wait, most likely */
}

/* Behind a lock of this manager, and behind one of another. The first thread waits at the store,
   the second in line. */
static void a_cancelled_thread_leaves_nothing_behind(void **state) {
  (void)state;
  for (int other = 0; other < 2; other++) {
    hl_manager *manager = open_manager(), *holder = open_manager();
    hl_lock *lock = take(other ? holder : manager);
    waiter self[2] = {{.manager = manager, .timeout = SHORT_MS},
                      {.manager = manager, .timeout = SHORT_MS}};
    pthread_t threads[2];
    void *how;
    for (unsigned i = 0; i < 2; i++) {
      assert_int_equal(pthread_create(&threads[i], NULL, wait_main, &self[i]), 0);
      await_waiters(manager, i + 1);
    }
    for (int i = 0; i < 2; i++) assert_int_equal(pthread_cancel(threads[i]), 0);
    for (int i = 0; i < 2; i++) {
      assert_int_equal(pthread_join(threads[i], &how), 0);
      assert_ptr_equal(how, PTHREAD_CANCELED);
      assert_int_equal(self[i].status, HL_TIMEOUT);
    }
    hl_lock_free(lock);
    hl_lock_free(take(manager));
    hl_manager_close(holder);
    hl_manager_close(manager);
  }
}

static void a_cancelled_manager_ends_all_waits_and_stays(void **state) {
  (void)state;
  hl_manager *manager = open_manager(), *holder = open_manager();
  hl_lock *far = take(holder), *got = NULL;
  hl_plan *plan = plan_of(manager);
  const hl_id other[] = {{"v", 1}};
  hl_plan *free_one = hl_plan_new(hl_manager_layout(manager));
  hl_lock *held;
  assert_int_equal(hl_plan_add(free_one, other, 1, HL_EXCLUSIVE, true, NULL), HL_OK);
  assert_int_equal(hl_acquire(manager, free_one, NULL, &held, NULL), HL_OK);
  waiter threads[3];
  pthread_t ids[3];
  for (int i = 0; i < 3; i++) { /* the first is at the store */
    threads[i] = (waiter){.manager = manager, .timeout = LONG_MS};
    assert_int_equal(pthread_create(&ids[i], NULL, wait_main, &threads[i]), 0);
  }
  hl_pending *pending;
  assert_int_equal(hl_start(manager, plan, NULL, &pending, NULL), HL_OK);
  await_waiters(manager, 4);
  hl_manager_cancel(manager);
  for (int i = 0; i < 3; i++) {
    assert_int_equal(pthread_join(ids[i], NULL), 0);
    assert_int_equal(threads[i].status, HL_CANCELLED);
  }
  assert_int_equal(hl_pending_wait(pending, LONG_MS, &got, NULL), HL_CANCELLED);
  hl_pending_free(pending);
  /* New requests fail, even for a free node; held locks stay held. */
  assert_int_equal(hl_acquire(manager, plan, NULL, &got, NULL), HL_CANCELLED);
  assert_int_equal(hl_acquire(manager, free_one, NULL, &got, NULL), HL_CANCELLED);
  assert_int_equal(hl_start(manager, plan, NULL, &pending, NULL), HL_OK);
  assert_int_equal(hl_pending_wait(pending, LONG_MS, &got, NULL), HL_CANCELLED);
  hl_pending_free(pending);
  assert_true(hl_lock_is_held(held));
  assert_int_equal(hl_lock_check(held, NULL), HL_OK);
  assert_int_equal(hl_lock_release(held, true, NULL), HL_OK);
  hl_lock_free(held);
  hl_manager_close(manager);
  assert_true(hl_lock_is_held(far));
  hl_lock_free(far);
  hl_manager_close(holder);
  hl_plan_free(plan);
  hl_plan_free(free_one);
}

static void a_cancelled_manager_ends_a_wait_at_memcached(void **state) {
  (void)state;
  const char *server = getenv("HIERLOCK_MEMCACHED_DSN");
  if (!server) skip();
  char file[sizeof dsn];
  memcpy(file, dsn, sizeof dsn);
  (void)snprintf(dsn, sizeof dsn, "%s?prefix=cancel", server);
  hl_manager *manager = open_manager(), *holder = open_manager();
  memcpy(dsn, file, sizeof dsn);
  hl_lock *lock = take(holder);
  waiter thread = {.manager = manager, .timeout = PATIENCE_S * 2000};
  pthread_t id;
  assert_int_equal(pthread_create(&id, NULL, wait_main, &thread), 0);
  await_waiters(manager, 1);
  hl_manager_cancel(manager);
  assert_int_equal(pthread_join(id, NULL), 0);
  assert_int_equal(thread.status, HL_CANCELLED);
  assert_int_equal(hl_lock_release(lock, true, NULL), HL_OK);
  hl_lock_free(lock);
  hl_manager_close(holder);
  hl_manager_close(manager);
}

static void a_result_that_was_closed_away_is_no_lock(void **state) {
  (void)state;
  hl_manager *manager = open_manager(), *other = open_manager();
  hl_plan *plan = plan_of(manager);
  hl_pending *pending;
  hl_lock *lock = NULL;
  assert_int_equal(hl_start(manager, plan, NULL, &pending, NULL), HL_OK);
  while (!hl_pending_done(pending)) (void)usleep(1000);
  hl_manager_close(manager);
  hl_lock *theirs = take(other);
  assert_int_equal(hl_pending_wait(pending, 0, &lock, NULL), HL_CANCELLED);
  assert_null(lock);
  hl_pending_free(pending);
  assert_true(hl_lock_is_held(theirs));
  hl_lock_free(theirs);
  hl_plan_free(plan);
  hl_manager_close(other);
  hl_manager_close(NULL);
}

static int take_root(hl_manager *manager, const char *id, const hl_options *options,
                     hl_lock **lock) {
  const hl_id ids[] = {{id, 1}};
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  int status = hl_plan_add(plan, ids, 1, HL_EXCLUSIVE, true, NULL);
  if (status == HL_OK) status = hl_acquire(manager, plan, options, lock, NULL);
  hl_plan_free(plan);
  return status;
}

/* A child that has one node, says so, and when it is told waits for another. Ends with what that
   comes to. */
static pid_t child(hl_manager *manager, const hl_options *options, const char *has,
                   const char *wants, int said, int go) {
  pid_t pid = fork();
  if (pid) return pid;
  hl_lock *lock;
  char byte;
  int status = take_root(manager, has, options, &lock);
  if (status == HL_OK && write(said, "", 1) == 1 && read(go, &byte, 1) == 1)
    status = take_root(manager, wants, options, &lock);
  _exit(status < 0 ? 100 : status);
}

static int end_of(pid_t pid) {
  int status;
  assert_int_equal(waitpid(pid, &status, 0), pid);
  assert_true(WIFEXITED(status));
  return WEXITSTATUS(status);
}

/* Each waits for what the other has: one is the victim, and the other goes on. */
static void forked_siblings_are_two_agents(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_options options = HL_OPTIONS_INIT;
  int said[2], go[2];
  char bytes[2];
  assert_int_equal(pipe(said) | pipe(go), 0);
  options.agent = hl_agent_new();
  options.timeout = CIRCLE_MS;
  pid_t first = child(manager, &options, "u", "v", said[1], go[0]);
  pid_t second = child(manager, &options, "v", "u", said[1], go[0]);
  assert_int_equal(read(said[0], bytes, 1) + read(said[0], bytes, 1), 2);
  assert_int_equal(write(go[1], "go", 2), 2);
  int ends[2] = {end_of(first), end_of(second)};
  assert_int_equal(ends[0] + ends[1], HL_OK + HL_DEADLOCK);
  for (int i = 0; i < 2; i++) assert_int_equal(close(said[i]) | close(go[i]), 0);
  hl_agent_unref(options.agent);
  hl_manager_close(manager);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_cancelled_thread_leaves_nothing_behind),
      cmocka_unit_test(a_cancelled_manager_ends_all_waits_and_stays),
      cmocka_unit_test(a_cancelled_manager_ends_a_wait_at_memcached),
      cmocka_unit_test(a_result_that_was_closed_away_is_no_lock),
      cmocka_unit_test(forked_siblings_are_two_agents),
      cmocka_unit_test(nothing_is_left),
  };
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests(tests, prepare, clean);
}
