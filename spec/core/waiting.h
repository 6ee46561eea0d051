/*
 * waiting.h - what the tests of waiting share: managers on the embedded store, as that needs no
 * server, and the calls that start, grant and fail.
 *
 * Include behind <cmocka.h>; once in a program.
 */
#ifndef WAITING_H
#define WAITING_H

#include "hierlock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEADLINE 20000 /* ms; soon, on a busy machine */

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

static void make_directory_name(void) {
  (void)snprintf(directory, sizeof directory, "/dev/shm/hierlock-test-%d", (int)getpid());
}

/* Returns whether it could be removed. */
static bool remove_directory(void) {
  char command[96];
  (void)snprintf(command, sizeof command, "rm -rf %s", directory);
  if (system(command) == 0) return true;
  perror(command);
  return false;
}

#endif
