/*
 * manager.c - the life of a manager: who has references to it, and what becomes of it in a forked
 * child. open.c opens and closes it.
 */
#include "manager.h"

#include "clock.h"
#include "error.h"
#include "exit.h"
#include "fork.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Initialises everything that belongs to one process generation, with no store and no connections.
   Unchecked, as in hl__manager_renew: no other thread can have the mutex. */
HL__UNCHECKED static void fields_init(hl_manager *manager) {
  manager->store = NULL;
  manager->pool = (hl__pool){.room = manager->pool.room};
  manager->workers = (hl__workers){.tasks = 0};
  hl__list_init(&manager->workers.queue);
  manager->keeper = (hl__keeper){.next = 0};
  manager->stats = (hl_stats){0};
  memset(manager->levels, 0, sizeof manager->levels);
  hl__line_init(&manager->line);
  hl__list_init(&manager->leases); /* its entries are the parent's */
  hl__list_init(&manager->drops);
  manager->drops_begun = false;
  manager->drops_put = manager->drops_gone = manager->drops_failed = 0;
  manager->refreshers = 0;
  manager->queries_late = 0;
  atomic_store(&manager->leases_end, HL_FOREVER);
  (void)pthread_mutex_init(&manager->mutex, NULL);
  hl__cond_init(&manager->pool.freed);
  hl__cond_init(&manager->keeper.wakeup);
  hl__cond_init(&manager->workers.work);
  hl__cond_init(&manager->done);
  manager->config.pid = getpid();
}

HL__UNCHECKED hl_manager *hl__manager_new(void (*room)(hl_manager *)) {
  hl_manager *manager = calloc(1, sizeof *manager);
  if (!manager) return NULL;
  atomic_init(&manager->references, 1u);
  atomic_init(&manager->generation, hl__fork_generation());
  manager->pool.room = room;
  fields_init(manager);
  return manager;
}

/* In a forked child, mutexes may be in any state, and the keeper does not run. Sessions,
   connections and store are the parent's. Another thread may have been in the middle of any of
   them, as it moved a buffer, which the child would free again. So the child leaves them allocated.
   `renewing` keeps two threads of the child from doing this at once. */
HL__UNCHECKED void hl__manager_renew(hl_manager *manager) {
  static pthread_mutex_t renewing = PTHREAD_MUTEX_INITIALIZER;
  if (atomic_load(&manager->generation) == hl__fork_generation()) return;
  (void)pthread_mutex_lock(&renewing);
  unsigned generation = hl__fork_generation();
  if (atomic_load(&manager->generation) != generation) {
    fields_init(manager);
    atomic_store(&manager->generation, generation);
  }
  (void)pthread_mutex_unlock(&renewing);
}

int hl__manager_store_open(hl_manager *manager, hl_error *error) {
  int status = hl__exit_watched_open(manager->ops, &manager->config, &manager->store, error);
  /* A program that looks only at names does not see a record, so a record does not exclude it.
     Leases are possible only where they are what such programs look at. */
  if (status == HL_OK && manager->config.interoperates && !manager->ops->traits.leases_only)
    manager->store->leases = NULL;
  return status;
}

int hl__manager_enter(hl_manager *manager, hl_error *error) {
  int status = HL_OK;
  if (manager->closed)
    status = hl__error(error, HL_EMISUSE, "the manager is closed");
  else if (!manager->store)
    status = hl__manager_store_open(manager, error);
  if (status == HL_OK) atomic_fetch_add(&manager->references, 1u);
  return status;
}

/* Unchecked: no other thread has it. */
HL__UNCHECKED void hl__manager_leave(hl_manager *manager) {
  if (atomic_fetch_sub(&manager->references, 1u) != 1) return;
  if (manager->store && atomic_load(&manager->generation) == hl__fork_generation() &&
      hl__exit_try_await()) {
    manager->ops->close(manager->store);
    hl__exit_await_end();
  }
  (void)pthread_cond_destroy(&manager->pool.freed);
  (void)pthread_cond_destroy(&manager->keeper.wakeup);
  (void)pthread_cond_destroy(&manager->workers.work);
  (void)pthread_cond_destroy(&manager->done);
  (void)pthread_mutex_destroy(&manager->mutex);
  hl_layout_unref(manager->layout);
  hl_dsn_dispose(&manager->dsn);
  free(manager->path);
  free((void *)manager->stores);
  free(manager->units);
  free(manager);
}

void hl__manager_hurry(hl_manager *manager, int64_t when) {
  if (when >= manager->keeper.next) return;
  manager->keeper.next = when;
  (void)pthread_cond_signal(&manager->keeper.wakeup);
}

void hl__manager_wait(pthread_cond_t *condition, hl_manager *manager, int64_t deadline) {
  hl__library_wait_begin();
  hl__cond_wait(condition, &manager->mutex, deadline);
  if (!hl__library_is_inside()) return;
  hl__manager_mutex_unlock(manager);
  hl__library_wait_end();
  hl__manager_mutex_lock(manager);
}

int hl__manager_closed_error(hl_error *error) {
  return hl__error(error, HL_CANCELLED, "the manager was closed, or its waits were cancelled");
}

/* No structure of any version is larger. A greater size means that it was not initialised. */
#define STRUCT_MAX 4096u

int hl__struct_take(void *own, size_t size, size_t least, const void *given, const char *name,
                    hl_error *error) {
  size_t given_size;
  memcpy(&given_size, given, sizeof given_size);
  /* The size of each version is a multiple of a pointer's. */
  if (given_size < least || given_size > STRUCT_MAX || given_size % sizeof(void *) != 0)
    return hl__error(error, HL_EMISUSE, "%s was not begun with its _INIT", name);
  for (size_t i = size; i < given_size; i++)
    if (((const char *)given)[i])
      return hl__error(error, HL_EMISUSE,
                       "%s has fields that this version of hierlock does not know", name);
  memcpy(own, given, given_size < size ? given_size : size);
  memcpy(own, &size, sizeof size);
  return HL_OK;
}
