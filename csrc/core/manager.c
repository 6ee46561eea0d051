/*
 * manager.c - opening and closing: from a DSN to a store that excludes, and
 * back. Also what a manager does in a forked child, and what it tells about
 * itself and about others.
 */
#include "line.h"
#include "pending.h"
#include "plan.h"

#include "internal.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LOOKS_EACH_SECOND 10
/* For a look at the holders, where the server does not end it sooner. */
#define LOOK_MS 1000

static const hl_store_ops *const built_in[] = {&hl_store_file, &hl_store_null,
                                               NULL};

static const hl_store_ops *find_store(const hl_store_ops *const *stores,
                                      const char *scheme) {
  for (; stores && *stores; stores++)
    if (strcmp((*stores)->scheme, scheme) == 0) return *stores;
  return NULL;
}

/* Everything that belongs to one process generation: no store, no slots.
   Unchecked, as fields_renew: nobody else can have the mutex. */
HL__UNCHECKED static void fields_init(hl_manager *manager) {
  pthread_condattr_t monotonic;
  (void)pthread_condattr_init(&monotonic);
  (void)pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  (void)pthread_mutex_init(&manager->mutex, NULL);
  (void)pthread_cond_init(&manager->freed, &monotonic);
  (void)pthread_cond_init(&manager->wakeup, &monotonic);
  (void)pthread_cond_init(&manager->work, &monotonic);
  (void)pthread_cond_init(&manager->done, &monotonic);
  (void)pthread_condattr_destroy(&monotonic);
  manager->store = NULL;
  manager->slots = manager->newest = manager->oldest = NULL;
  manager->slot_count = manager->idle_count = manager->settling = 0;
  hl__line_init(&manager->line);
  manager->reserved = 0;
  manager->first_task = manager->last_task = NULL;
  manager->task_count = manager->idle_workers = manager->workers = 0;
  manager->coming_workers = 0;
  manager->keeper_runs = manager->keeper_stops = false;
  memset(&manager->stats, 0, sizeof manager->stats);
  manager->config.pid = getpid();
}

/* In a forked child: mutexes may be in any state, the keeper does not exist, and
   sessions, slots and store are the parent's. They are forgotten, not freed by
   their usual ways. Two threads of the child must not do it at once. */
HL__UNCHECKED static void fields_renew(hl_manager *manager) {
  static pthread_mutex_t renewing = PTHREAD_MUTEX_INITIALIZER;
  (void)pthread_mutex_lock(&renewing);
  unsigned generation = hl__fork_generation();
  if (atomic_load(&manager->generation) != generation) {
    for (hl__slot *slot = manager->slots, *next; slot; slot = next) {
      next = slot->next;
      if (slot->session) manager->ops->session_forget(slot->session);
      free(slot);
    }
    if (manager->store) manager->ops->forget(manager->store);
    fields_init(manager);
    atomic_store(&manager->generation, generation);
  }
  (void)pthread_mutex_unlock(&renewing);
}

int hl__manager_enter(hl_manager *manager, hl_error *error) {
  int status = HL_OK;
  if (atomic_load(&manager->generation) != hl__fork_generation())
    fields_renew(manager);
  hl__manager_lock(manager);
  if (manager->closed)
    status = hl__error(error, HL_EMISUSE, "the manager is closed");
  else if (!manager->store)
    status = manager->ops->open(&manager->config, &manager->store, error);
  if (status == HL_OK) atomic_fetch_add(&manager->references, 1u);
  hl__manager_unlock(manager);
  return status;
}

void hl__manager_leave(hl_manager *manager) {
  if (atomic_fetch_sub(&manager->references, 1u) != 1) return;
  /* Nobody else has it: no call, no lock, not its opener. */
  if (manager->store) {
    if (atomic_load(&manager->generation) == hl__fork_generation())
      manager->ops->close(manager->store);
    else
      manager->ops->forget(manager->store);
  }
  (void)pthread_cond_destroy(&manager->freed);
  (void)pthread_cond_destroy(&manager->wakeup);
  (void)pthread_cond_destroy(&manager->work);
  (void)pthread_cond_destroy(&manager->done);
  (void)pthread_mutex_destroy(&manager->mutex);
  hl_layout_unref(manager->layout);
  hl_dsn_dispose(&manager->dsn);
  free(manager->path);
  free(manager);
}

int hl__struct_take(void *own, size_t size, const void *given, const char *name,
                    hl_error *error) {
  size_t given_size;
  memcpy(&given_size, given, sizeof given_size);
  /* All that there was in the first version. */
  if (given_size < size)
    return hl__error(error, HL_EMISUSE, "%s was not begun with its _INIT", name);
  for (size_t i = size; i < given_size; i++)
    if (((const char *)given)[i])
      return hl__error(error, HL_EMISUSE,
                       "%s has fields that this version of hierlock does not "
                       "know",
                       name);
  memcpy(own, given, size);
  memcpy(own, &size, sizeof size);
  return HL_OK;
}

static int config_check(const hl_config *config, hl_error *error) {
  if (config->timeout < 0)
    return hl__error(error, HL_EMISUSE, "timeout must not be negative");
  if (config->hold_timeout < 1000 || config->hold_timeout > 31536000000)
    return hl__error(error, HL_EMISUSE,
                     "hold_timeout must be 1 to 31536000 seconds");
  if (config->pool_size < 1 || config->pool_size > 100000)
    return hl__error(error, HL_EMISUSE, "pool_size must be 1 to 100000");
  return HL_OK;
}

/* A store may be opened again (in a forked child, or when its directory was
   removed), in another working directory perhaps: there a relative path would
   name another space, which excludes nobody. */
static int make_absolute(hl_manager *manager, hl_error *error) {
  const char *path = manager->dsn.path;
  if (!path || *path == '/') return HL_OK;
  char *here = getcwd(NULL, 0);
  if (!here)
    return hl__error_errno(error, HL_ESTORE, "the working directory is gone");
  int n = asprintf(&manager->path, "%s/%s", here, path);
  free(here);
  if (n < 0) {
    manager->path = NULL;
    return hl__error_memory(error);
  }
  manager->dsn.path = manager->path;
  return HL_OK;
}

/* What observers are shown of this process. */
static void name_process(hl_manager *manager, const char *application) {
  if (!application) application = program_invocation_short_name;
  (void)hl__escape(manager->application, sizeof manager->application,
                   application, strlen(application));
  if (gethostname(manager->host, sizeof manager->host) != 0)
    strcpy(manager->host, "localhost");
  manager->host[sizeof manager->host - 1] = '\0';
}

int hl_manager_open(const hl_config *given, hl_manager **result,
                    hl_error *error) {
  hl_config own = HL_CONFIG_INIT;
  const hl_config *config = &own;
  *result = NULL;
  int status = hl__struct_take(&own, sizeof own, given, "hl_config", error);
  if (status == HL_OK) status = config_check(config, error);
  if (status) return status;

  hl_manager *manager = calloc(1, sizeof *manager);
  if (!manager) return hl__error_memory(error);
  atomic_init(&manager->references, 1u);
  atomic_init(&manager->generation, hl__fork_generation());
  fields_init(manager);
  name_process(manager, config->application);
  manager->pool_size = config->pool_size;
  if (config->layout)
    manager->layout = hl_layout_ref(config->layout);
  else
    status = hl_layout_new(NULL, 0, 0, &manager->layout, error);

  if (status == HL_OK)
    status = hl_dsn_parse(hl_dsn_default(config->dsn), &manager->dsn, error);
  if (status == HL_OK) status = make_absolute(manager, error);
  if (status == HL_OK) {
    manager->ops = find_store(config->stores, manager->dsn.store);
    if (!manager->ops) manager->ops = find_store(built_in, manager->dsn.store);
    if (!manager->ops)
      status = hl__error(error, HL_ESTORE, "the store '%s' is not available",
                         manager->dsn.store);
    else if (manager->ops->abi != HL_STORE_ABI)
      status = hl__error(error, HL_ESTORE,
                         "the store '%s' was built for interface %u, this is "
                         "%u: build both from one version",
                         manager->dsn.store, manager->ops->abi, HL_STORE_ABI);
  }
  if (status == HL_OK) {
    manager->config = (hl_store_config){
        .dsn = &manager->dsn,
        .layout = manager->layout,
        .timeout = config->timeout,
        .hold_timeout = config->hold_timeout,
        .application = manager->application,
        .host = manager->host,
        .pid = getpid(),
        .wait_begin = hl__wait_begin,
        .wait_end = hl__wait_end,
    };
    status = manager->ops->open(&manager->config, &manager->store, error);
  }
  if (status == HL_OK) {
    hl_layout_unref(manager->layout);
    manager->layout = hl_layout_ref(manager->store->layout);
    manager->config.layout = manager->layout;
  }
  if (status == HL_OK)
    *result = manager;
  else
    hl__manager_leave(manager);
  return status;
}

void hl_manager_close(hl_manager *manager) {
  hl__slot *idle = NULL;
  if (atomic_load(&manager->generation) != hl__fork_generation())
    fields_renew(manager);

  hl__manager_lock(manager);
  manager->closed = true;
  for (hl__slot *slot = manager->slots, *next; slot; slot = next) {
    next = slot->next;
    switch (slot->state) {
    case HL__HELD:
      if (hl__slot_trylock(slot) != 0) {
        /* Its thread has it for ever. */
        if (hl__library_closed()) break;
        /* Another thread waits in hl_lock_check, for a round trip at most. */
        manager->ops->interrupt(slot->session);
        hl__slot_lock(slot);
      }
      (void)manager->ops->unlock(slot->session, NULL);
      hl__slot_end(manager, slot, false);
      hl__slot_unlock(slot);
      break;
    case HL__IDLE:
    case HL__RELEASING:
      hl__pool_bury(manager, slot, &idle);
      break;
    case HL__BUSY:
      /* Its thread finds the manager closed, and drops the slot. */
      if (slot->session) manager->ops->interrupt(slot->session);
      break;
    case HL__ENDED:
      break;
    }
  }
  (void)pthread_cond_broadcast(&manager->freed);
  (void)pthread_cond_broadcast(&manager->work);
  hl__workers_leave(manager);
  hl__line_close(manager);
  hl__manager_unlock(manager);

  hl__pool_free(manager, idle);
  /* By a handler of exit(): the keeper may stay for ever, and look at the manager
     until the process ends. */
  if (manager->ops->connects && hl__library_closed()) return;
  hl__keeper_stop(manager);
  hl__manager_leave(manager);
}

hl_layout *hl_manager_layout(const hl_manager *manager) {
  return manager->layout;
}

void hl_manager_stats(hl_manager *manager, hl_stats *stats) {
  if (atomic_load(&manager->generation) != hl__fork_generation())
    fields_renew(manager);
  hl__manager_lock(manager);
  *stats = manager->stats;
  stats->connections = manager->ops->connects ? manager->slot_count : 0;
  hl__manager_unlock(manager);
}

uint64_t hl_manager_losses(const hl_manager *manager) {
  return atomic_load(&manager->losses);
}

int hl_manager_holders(hl_manager *manager, const hl_plan *plan,
                       hl_holder_fn fn, void *context, hl_error *error) {
  hl__slot *slot;
  size_t n;
  int status = hl__manager_enter(manager, error);
  if (status) return status;
  hl_plan *copy = hl_plan_copy(plan);
  if (!copy) {
    status = hl__error_memory(error);
    goto out;
  }
  const hl_row *rows = hl__plan_rows(copy, &n);
  for (bool again = true;; again = false) {
    int64_t deadline = hl__now_ms() + LOOK_MS;
    status = hl__pool_take(manager, again ? HL__TAKE_EXTRA : HL__TAKE_FRESH,
                           deadline, true, NULL, &slot, error);
    if (status) break;
    hl__manager_lock(manager);
    slot->due = deadline;
    hl__manager_unlock(manager);
    bool fresh = slot->fresh;
    status =
        manager->ops->holders(slot->session, rows, n, fn, context, error);
    if (status != HL_ECONNECTION) {
      hl__pool_put(manager, slot);
      break;
    }
    hl__pool_discard(manager, slot);
    if (fresh || !again) break; /* else it had only gone stale in the pool */
  }
out:
  hl_plan_free(copy);
  hl__manager_leave(manager);
  return status;
}

int hl_manager_blockers(hl_manager *manager, const hl_plan *plan,
                        hl_holder_fn fn, void *context, hl_error *error) {
  int64_t now = hl__now_ms();
  hl__manager_lock(manager);
  if (now - manager->looks_since >= 1000) {
    manager->looks_since = now;
    manager->looks = 0;
  }
  bool look = manager->looks < LOOKS_EACH_SECOND;
  if (look) manager->looks++;
  hl__manager_unlock(manager);
  if (!look)
    return hl__error(error, HL_BUSY, "more than %d looks in a second",
                     LOOKS_EACH_SECOND);
  return hl_manager_holders(manager, plan, fn, context, error);
}
