/*
 * unloaded.c - a shared object with the static library in it, which test_unload.c loads,
 * calls and unloads.
 */
#include "hierlock.h"

enum { WAITS_MAX = 16 };

__attribute__((visibility("default"))) int use(const char *dsn, int waits);

/* Closes a manager while so many waits are with its threads. */
int use(const char *dsn, int waits) {
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager = NULL;
  hl_lock *lock = NULL;
  hl_error error;
  const hl_id ids[] = {{"u", 1}, {"a", 1}};
  config.dsn = dsn;
  int status = hl_manager_open(&config, &manager, &error);
  if (status) return status;
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  status = hl_plan_add(plan, ids, 2, HL_EXCLUSIVE, true, &error);
  if (status == HL_OK) status = hl_acquire(manager, plan, NULL, &lock, &error);
  hl_pending *pending[WAITS_MAX] = {NULL};
  for (int i = 0; i < waits && i < WAITS_MAX && status == HL_OK; i++)
    status = hl_start(manager, plan, NULL, &pending[i], &error);
  hl_manager_close(manager);
  for (int i = 0; i < WAITS_MAX; i++) hl_pending_free(pending[i]);
  hl_lock_free(lock);
  hl_plan_free(plan);
  return status;
}
