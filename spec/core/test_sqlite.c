/*
 * test_sqlite.c - SQLite where a file of the database cannot be opened for a moment, as when the process has no
 * descriptor left; a write while another program writes; and an open while it keeps the file locked.
 */
#include "hierlock.h"
#include "clock.h"
#include "dsn.h"
#include "store.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <sqlite3.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

typedef int open_fn(const char *path, int flags, int mode);

/* So many of the next attempts to open a log for writing fail. */
static int failures;
static int opened; /* how many files */
static open_fn *open_really;

static int open_or_fail(const char *path, int flags, int mode) {
  size_t size = strlen(path);
  opened++;
  bool log = size > 4 && strcmp(path + size - 4, "-wal") == 0;
  if (!log || (flags & O_ACCMODE) != O_RDWR || failures == 0) return open_really(path, flags, mode);
  failures--;
  errno = EMFILE;
  return -1;
}

static void opens_pass(bool by_us) {
  sqlite3_vfs *vfs = sqlite3_vfs_find(NULL);
  if (!open_really) open_really = (open_fn *)vfs->xGetSystemCall(vfs, "open");
  assert_int_equal(
      vfs->xSetSystemCall(vfs, "open", by_us ? (sqlite3_syscall_ptr)open_or_fail : NULL),
      SQLITE_OK);
}

static int take_and_release(hl_manager *manager, hl_error *error) {
  hl_options options = HL_OPTIONS_INIT;
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  hl_lock *lock = NULL;
  const hl_id id = {"u1", 2};
  options.timeout = 5000;
  assert_int_equal(hl_plan_add(plan, &id, 1, HL_EXCLUSIVE, false, NULL), HL_OK);
  int status = hl_acquire(manager, plan, &options, &lock, error);
  if (status == HL_OK) assert_int_equal(hl_lock_release(lock, true, error), HL_OK);
  hl_lock_free(lock);
  hl_plan_free(plan);
  return status;
}

static void directory_remove(const char *directory) {
  static const char *const names[] = {"db", "db-wal", "db-shm", "db-hierlock"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    char path[96];
    (void)snprintf(path, sizeof path, "%s/%s", directory, names[i]);
    (void)unlink(path);
  }
  assert_int_equal(rmdir(directory), 0);
}

/* SQLite then opens the log for reading only, and its connection can never write. */
static void a_log_that_cannot_be_opened_for_writing_is_opened_anew(void **state) {
  static const struct hl_store_ops *const stores[] = {&hl_store_sqlite, NULL};
  char directory[] = "/tmp/hierlock-sqlite-XXXXXX", dsn[64];
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager;
  hl_error error;
  (void)state;
  assert_non_null(mkdtemp(directory));
  (void)snprintf(dsn, sizeof dsn, "sqlite:%s/db", directory);
  config.dsn = dsn;
  config.stores = stores;
  assert_int_equal(hl_layout_new(NULL, 0, 0, &config.layout, &error), HL_OK);
  assert_int_equal(hl_manager_open(&config, &manager, &error), HL_OK);
  opens_pass(true);

  failures = 1;
  assert_int_equal(take_and_release(manager, &error), HL_OK);
  assert_int_equal(failures, 0);
  hl_manager_close(manager);

  /* As long as it lasts, the caller is told. */
  assert_int_equal(hl_manager_open(&config, &manager, &error), HL_OK);
  failures = INT32_MAX;
  assert_int_equal(take_and_release(manager, &error), HL_ESTORE);
  assert_non_null(strstr(error.message, "read-only"));
  failures = 0;
  assert_int_equal(take_and_release(manager, &error), HL_OK);

  opens_pass(false);
  hl_manager_close(manager);
  hl_layout_unref(config.layout);
  directory_remove(directory);
}

#define SOON_MS 20000 /* on a busy machine, too */

static atomic_int sleeps, sleeps_ended; /* of a session; exit() is told of each */
static void sleep_begins(void) { atomic_fetch_add(&sleeps, 1); }
static void sleep_ends(void) { atomic_fetch_add(&sleeps_ended, 1); }

static void sleeps_await(int n) {
  int64_t end = hl__now_ms() + SOON_MS;
  while (atomic_load(&sleeps) < n && hl__now_ms() < end) (void)usleep(500);
  assert_true(atomic_load(&sleeps) >= n);
}

static void *raise_tokens(void *context) {
  hl_session *session = context;
  int64_t deadline = hl__now_ms() + SOON_MS;
  int status = session->store->leases->raise(session, 5, deadline, NULL);
  return (void *)(intptr_t)status;
}

/* It may be the release of a lease that no handle has any more. */
static void a_write_in_line_is_not_interrupted(void **state) {
  char directory[] = "/tmp/hierlock-sqlite-XXXXXX", dsn[64], path[64];
  hl_dsn parsed;
  hl_store_config config = {.dsn = &parsed,
                            .application = "test",
                            .host = "here",
                            .wait_begin = sleep_begins,
                            .wait_end = sleep_ends};
  hl_store *store;
  hl_session *session;
  hl_error error;
  sqlite3 *other;
  pthread_t thread;
  void *status;
  (void)state;
  assert_non_null(mkdtemp(directory));
  (void)snprintf(dsn, sizeof dsn, "sqlite:%s/db", directory);
  (void)snprintf(path, sizeof path, "%s/db", directory);
  assert_int_equal(hl_layout_new(NULL, 0, 0, &config.layout, &error), HL_OK);
  assert_int_equal(hl_dsn_parse(dsn, hl_store_sqlite.parse, &parsed, NULL), HL_OK);
  assert_int_equal(hl_store_sqlite.open(&config, &store, &error), HL_OK);
  assert_int_equal(hl_store_sqlite.session_open(store, hl__now_ms() + SOON_MS, &session, &error),
                   HL_OK);
  assert_int_equal(sqlite3_open(path, &other), SQLITE_OK);
  assert_int_equal(sqlite3_exec(other, "BEGIN IMMEDIATE", NULL, NULL, NULL), SQLITE_OK);

  assert_int_equal(pthread_create(&thread, NULL, raise_tokens, session), 0);
  sleeps_await(1);
  hl_store_sqlite.interrupt(session);
  sleeps_await(atomic_load(&sleeps) + 3);
  assert_int_equal(sqlite3_exec(other, "COMMIT", NULL, NULL, NULL), SQLITE_OK);
  assert_int_equal(pthread_join(thread, &status), 0);
  assert_int_equal((intptr_t)status, HL_OK);
  assert_int_equal(atomic_load(&sleeps_ended), atomic_load(&sleeps));

  assert_int_equal(sqlite3_close(other), SQLITE_OK);
  hl_store_sqlite.session_close(session);
  hl_store_sqlite.close(store);
  hl_dsn_dispose(&parsed);
  hl_layout_unref(config.layout);
  directory_remove(directory);
}

/* Keeps the file locked until its end of the pipe is closed. Between processes, as SQLite opens a
   file that it has open in the same process without a system call. */
static pid_t keep_locked(const char *path, int until[2]) {
  int ready[2];
  char byte;
  assert_int_equal(pipe(ready), 0);
  assert_int_equal(pipe(until), 0);
  pid_t pid = fork();
  if (pid == 0) {
    sqlite3 *other;
    (void)close(until[1]);
    bool locked = sqlite3_open(path, &other) == SQLITE_OK &&
                  sqlite3_exec(other, "BEGIN EXCLUSIVE", NULL, NULL, NULL) == SQLITE_OK;
    if (locked && write(ready[1], "", 1) == 1) (void)!read(until[0], &byte, 1);
    _exit(0);
  }
  assert_true(pid > 0);
  (void)close(ready[1]);
  (void)close(until[0]);
  assert_int_equal(read(ready[0], &byte, 1), 1);
  (void)close(ready[0]);
  return pid;
}

/* Many processes that open a file at once would keep the one from its work that recovers the log. */
static void a_file_that_stays_locked_is_opened_ever_more_seldom(void **state) {
  static const struct hl_store_ops *const stores[] = {&hl_store_sqlite, NULL};
  char directory[] = "/tmp/hierlock-sqlite-XXXXXX", dsn[64];
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager;
  hl_error error;
  int until[2];
  (void)state;
  assert_non_null(mkdtemp(directory));
  (void)snprintf(dsn, sizeof dsn, "sqlite:%s/db", directory);
  config.dsn = dsn;
  config.stores = stores;
  pid_t other = keep_locked(dsn + strlen("sqlite:"), until);
  opens_pass(true);
  opened = 0;
  assert_int_equal(hl_manager_open(&config, &manager, &error), HL_ECONNECTION);
  assert_in_range(opened, 2, 100);

  (void)close(until[1]);
  assert_int_equal(waitpid(other, NULL, 0), other);
  assert_int_equal(hl_manager_open(&config, &manager, &error), HL_OK);
  opens_pass(false);
  hl_manager_close(manager);
  directory_remove(directory);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_log_that_cannot_be_opened_for_writing_is_opened_anew),
      cmocka_unit_test(a_write_in_line_is_not_interrupted),
      cmocka_unit_test(a_file_that_stays_locked_is_opened_ever_more_seldom),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
