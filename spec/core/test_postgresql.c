/*
 * test_postgresql.c - trouble of the PostgreSQL store below libpq: here the system takes, once,
 * none of the bytes that it is given to send, as when it has no memory for them, and the
 * connection stands. libpq does not tell.
 *
 * At its end, exit() beside threads that connect.
 *
 * With $HIERLOCK_POSTGRESQL_DSN; without it nothing is tested.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "clock.h"
#include "hierlock.h"
#include "leftovers.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* A call that waits for an answer to a message that was never sent lasts as long as its
   time-out. */
#define TIMEOUT_MS 30000
#define SOON_MS 15000

/* How many sends are left until one fails, that one included; 0: none fails. */
static atomic_long failing, sends;

/* libpq's, too. */
__attribute__((visibility("default"))) ssize_t send(int fd, const void *data, size_t n, int flags) {
  (void)atomic_fetch_add(&sends, 1);
  if (atomic_load(&failing) > 0 && atomic_fetch_sub(&failing, 1) == 1) {
    errno = ENOBUFS;
    return -1;
  }
  return sendto(fd, data, n, flags, NULL, 0);
}

static hl_manager *open_with(const char *tls) {
  static const struct hl_store_ops *const stores[] = {&hl_store_postgresql, NULL};
  char dsn[512];
  const char *server = getenv("HIERLOCK_POSTGRESQL_DSN");
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager = NULL;
  hl_error error;
  (void)snprintf(dsn, sizeof dsn, "%s%csslmode=%s", server, strchr(server, '?') ? '&' : '?', tls);
  assert_int_equal(hl_layout_new(NULL, 0, HL_BUCKETS_DEFAULT, &config.layout, &error), HL_OK);
  config.dsn = dsn;
  config.stores = stores;
  config.timeout = TIMEOUT_MS;
  if (hl_manager_open(&config, &manager, &error)) fail_msg("%s", error.message);
  hl_layout_unref(config.layout);
  return manager;
}

static hl_manager *open_manager(void) { return open_with("disable"); }

static hl_plan *plan_of(hl_manager *manager, const char *account) {
  const hl_id ids[2] = {{"u1", 2}, {account, strlen(account)}};
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  assert_int_equal(hl_plan_add(plan, ids, 2, HL_EXCLUSIVE, false, NULL), HL_OK);
  return plan;
}

/* Checks that a call ended soon, granted or with a connection error. */
static int came_to(const char *what, int64_t begun, int status, const hl_error *error) {
  if (hl__now_ms() - begun > SOON_MS)
    fail_msg("%s lasted for %d ms", what, (int)(hl__now_ms() - begun));
  if (status != HL_OK && status != HL_ECONNECTION && status != HL_ELOST)
    fail_msg("%s: %s", what, error->message);
  return status;
}

/* The n-th send fails. */
static void use(hl_manager *manager, const hl_plan *plan, const hl_plan *more, long n) {
  hl_error error;
  hl_lock *lock = NULL;
  atomic_store(&failing, n);
  int64_t begun = hl__now_ms();
  if (came_to("acquire", begun, hl_acquire(manager, plan, NULL, &lock, &error), &error)) return;
  begun = hl__now_ms();
  (void)came_to("check", begun, hl_lock_check(lock, &error), &error);
  begun = hl__now_ms();
  (void)came_to("extend", begun, hl_lock_extend(lock, more, NULL, &error), &error);
  begun = hl__now_ms();
  (void)came_to("release", begun, hl_lock_release(lock, n % 2, &error), &error);
  hl_lock_free(lock);
}

static void what_the_system_refuses_to_send(void **state) {
  (void)state;
  if (!getenv("HIERLOCK_POSTGRESQL_DSN")) skip();
  hl_manager *manager = open_manager(), *other = open_manager();
  hl_plan *plan = plan_of(manager, "a1"), *more = plan_of(manager, "a2"),
          *same = plan_of(other, "a1");
  use(manager, plan, more, 0);
  atomic_store(&sends, 0);
  use(manager, plan, more, 0);
  long last = atomic_load(&sends);
  assert_true(last >= 4);
  for (long n = 1; n <= last; n++) {
    hl_error error;
    hl_lock *lock = NULL;
    use(manager, plan, more, n);
    atomic_store(&failing, 0);
    /* The lock is free now. */
    int64_t begun = hl__now_ms();
    int status = hl_acquire(other, same, NULL, &lock, &error);
    if (status || hl__now_ms() - begun > SOON_MS)
      fail_msg("send %ld of %ld: something is held", n, last);
    (void)hl_lock_release(lock, true, NULL);
    hl_lock_free(lock);
  }
  hl_plan_free(plan);
  hl_plan_free(more);
  hl_plan_free(same);
  hl_manager_close(manager);
  hl_manager_close(other);
}

static void *opens(void *unused) {
  while (!unused) hl_manager_close(open_with("require"));
  return NULL;
}

/* exit() takes OpenSSL apart: first it awaits threads that open a manager. */
static void exit_while_others_open(void **state) {
  (void)state;
  enum { CHILDREN = 60, AT_ONCE = 3 };
  if (!getenv("HIERLOCK_POSTGRESQL_DSN")) skip();
  hl_manager_close(open_with("require"));
  for (int i = 0; i < CHILDREN; i++) {
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
      pthread_t thread;
      for (int n = 0; n < AT_ONCE; n++) (void)pthread_create(&thread, NULL, opens, NULL);
      (void)usleep((useconds_t)(1500 * i));
      exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    if (status) fail_msg("child %d ended with %#x", i, (unsigned)status);
  }
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(what_the_system_refuses_to_send),
      cmocka_unit_test(exit_while_others_open),
      cmocka_unit_test(nothing_is_left),
  };
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
