/*
 * open.c - opens and closes a manager: from a DSN to a store that excludes, and back.
 */
#include "hold.h"
#include "lease.h"
#include "manager.h"

#include "error.h"
#include "exit.h"
#include "layout.h"
#include "order.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const hl_store_ops *const built_in[] = {&hl_store_file, &hl_store_null, &hl_store_quorum,
                                               NULL};

static const hl_store_ops *find_store(const hl_store_ops *const *stores, const char *scheme) {
  for (; stores && *stores; stores++)
    if (strcmp((*stores)->scheme, scheme) == 0) return *stores;
  return NULL;
}

static int config_check(const hl_config *config, hl_error *error) {
  if (config->timeout < 0) return hl__error(error, HL_EMISUSE, "timeout must not be negative");
  if (config->hold_timeout < 1000 || config->hold_timeout > 31536000000)
    return hl__error(error, HL_EMISUSE, "hold_timeout must be 1 to 31536000 seconds");
  if (config->pool_size < 1 || config->pool_size > 100000)
    return hl__error(error, HL_EMISUSE, "pool_size must be 1 to 100000");
  return HL_OK;
}

/* A store may be opened again (in a forked child, or after its directory was removed), perhaps in
   another working directory. There a relative path would name another space, and exclude no one. */
static int make_absolute(hl_manager *manager, hl_error *error) {
  const char *path = manager->dsn.path;
  if (!path || *path == '/') return HL_OK;
  char *here = getcwd(NULL, 0);
  if (!here) return hl__error_errno(error, HL_ESTORE, "the working directory is gone");
  int n = asprintf(&manager->path, "%s/%s", here, path);
  free(here);
  if (n < 0) {
    manager->path = NULL;
    return hl__error_memory(error);
  }
  manager->dsn.path = manager->path;
  return HL_OK;
}

/* Sets the names of this process that observers see. */
static void name_process(hl_manager *manager, const char *application) {
  if (!application) application = program_invocation_short_name;
  (void)hl__escape(manager->application, sizeof manager->application, application,
                   strlen(application));
  if (gethostname(manager->host, sizeof manager->host) != 0) strcpy(manager->host, "localhost");
  manager->host[sizeof manager->host - 1] = '\0';
}

/* Finds the store of a DSN. HL_OK, HL_EDSN, HL_ESTORE. */
static int find_ops(const hl_store_ops *const *stores, const char *dsn, const hl_store_ops **ops,
                    hl_error *error) {
  const char *name = hl_dsn_store(dsn, error);
  if (!name) return HL_EDSN;
  *ops = find_store(stores, name);
  if (!*ops) *ops = find_store(built_in, name);
  if (!*ops)
    return hl__error(error, HL_ESTORE,
                     "the program has not given the store '%s' (hl_config.stores)", name);
  if ((*ops)->abi != HL_STORE_ABI)
    return hl__error(error, HL_ESTORE,
                     "the store '%s' was built for interface %u, this is "
                     "%u: build both from one version",
                     name, (*ops)->abi, HL_STORE_ABI);
  return HL_OK;
}

static int find_of_config(const hl_store_config *config, const char *dsn, const hl_store_ops **ops,
                          hl_error *error) {
  return find_ops(config->stores, dsn, ops, error);
}

/* The caller's list may be gone when a store searches for another one. */
static int stores_copy(hl_manager *manager, const hl_store_ops *const *stores, hl_error *error) {
  size_t n = 0;
  while (stores && stores[n]) n++;
  manager->stores = calloc(n + 1, sizeof(hl_store_ops *));
  if (!manager->stores) return hl__error_memory(error);
  for (size_t i = 0; i < n; i++) manager->stores[i] = stores[i];
  return HL_OK;
}

/* Decides whether nodes are also locked by name, and refuses that where it is impossible. */
static int names_check(hl_manager *manager, const hl_config *config, hl_error *error) {
  const char *with = config->interoperate ? config->interoperate : manager->dsn.interoperate;
  if (!with) {
    if (!config->names) return HL_OK;
    return hl__error(error, HL_EMISUSE, "names are for `interoperate`");
  }
  if (strcmp(with, "symfony") != 0)
    return hl__error(error, HL_EMISUSE, "interoperate must be \"symfony\"");
  if (!manager->ops->name_key)
    return hl__error(error, HL_EUNSUPPORTED,
                     "the store '%s' cannot keep out programs that use Symfony Lock: PostgreSQL "
                     "(Symfony's PostgreSqlStore, pgsql+advisory:...), Redis and Valkey (its "
                     "RedisStore, redis://host) and the embedded store (its FlockStore, "
                     "flock:///directory) can; tables (lock_keys) and Memcached cannot be shared",
                     manager->ops->scheme);
  manager->config.interoperates = true;
  return HL_OK;
}

/* Takes over the layout on which the program and the space have agreed. */
static int layout_take(hl_manager *manager, const hl_config *config, hl_error *error) {
  hl_layout *layout;
  int status = HL_OK;
  if (manager->config.interoperates)
    status = hl__layout_named(manager->store->layout, manager->ops->name_key, config->names,
                              manager->store->own_names, &layout, error);
  else
    layout = hl_layout_ref(manager->store->layout);
  if (status) return status;
  hl_layout_unref(manager->layout);
  manager->config.layout = manager->layout = layout;
  return HL_OK;
}

int hl_manager_open(const hl_config *given, hl_manager **result, hl_error *error) {
  HL__UNCANCELLED;
  hl_config own = HL_CONFIG_INIT;
  const hl_config *config = &own;
  HL__NEEDS(given && result, error);
  *result = NULL;
  int status = hl__struct_take(&own, sizeof own, offsetof(hl_config, interoperate), given,
                               "hl_config", error);
  if (status == HL_OK) status = config_check(config, error);
  if (status) return status;

  hl_manager *manager = hl__manager_new(hl__line_advance);
  if (!manager) return hl__error_memory(error);
  name_process(manager, config->application);
  manager->pool_size = config->pool_size;
  status = config->layout ? hl__layout_plain(config->layout, &manager->layout, error)
                          : hl_layout_new(NULL, 0, 0, &manager->layout, error);

  const char *dsn = hl_dsn_default(config->dsn);
  if (status == HL_OK) status = find_ops(config->stores, dsn, &manager->ops, error);
  if (status == HL_OK) status = hl_dsn_parse(dsn, manager->ops->parse, &manager->dsn, error);
  if (status == HL_OK) status = make_absolute(manager, error);
  if (status == HL_OK) status = stores_copy(manager, config->stores, error);
  if (status == HL_OK) status = hl__units_copy(config->units, &manager->units, error);
  if (status == HL_OK) {
    manager->config = (hl_store_config){
        .dsn = &manager->dsn,
        .layout = manager->layout,
        .timeout = config->timeout,
        .hold_timeout = config->hold_timeout,
        .application = manager->application,
        .host = manager->host,
        .pid = getpid(),
        .wait_begin = hl__library_wait_begin,
        .wait_end = hl__library_wait_end,
        .find = find_of_config,
        .stores = manager->stores,
    };
    status = names_check(manager, config, error);
  }
  if (status == HL_OK) status = hl__manager_store_open(manager, error);
  if (status == HL_OK) status = layout_take(manager, config, error);
  if (status == HL_OK)
    *result = manager;
  else
    hl__manager_leave(manager);
  return status;
}

static void manager_close(hl_manager *manager, bool waits) {
  hl__connection *idle = NULL;
  hl__manager_renew(manager);

  hl__manager_mutex_lock(manager);
  hl__leases_close(manager, waits);
  manager->closed = manager->cancelled = true;
  for (hl__connection *connection = manager->pool.all, *next; connection; connection = next) {
    next = connection->next;
    switch (connection->state) {
    case HL__HELD:
      if (hl__connection_mutex_trylock(connection) != 0) {
        /* The library is closed to its thread, which never gives the mutex back. */
        if (hl__library_closed()) break;
        /* Another thread waits in hl_lock_check, at most for a round trip. */
        manager->ops->interrupt(connection->session);
        hl__connection_mutex_lock(connection);
      }
      (void)manager->ops->give_back(connection->session, NULL);
      hl__hold_end(manager, connection, false);
      hl__connection_mutex_unlock(connection);
      break;
    case HL__IDLE:
    case HL__RELEASING: hl__pool_bury(manager, connection, &idle); break;
    case HL__BUSY:
      /* The owning thread finds the manager closed, and drops the connection. */
      if (connection->session) manager->ops->interrupt(connection->session);
      break;
    case HL__ENDED: break;
    }
  }
  (void)pthread_cond_broadcast(&manager->pool.freed);
  (void)pthread_cond_broadcast(&manager->done);
  hl__workers_end(manager);
  hl__line_close(manager);
  hl__manager_mutex_unlock(manager);

  hl__pool_free(manager, idle);
  /* A handler of exit() calls: the keeper may block for ever, and reads the manager until the
     process ends. */
  if (manager->ops->traits.blocks && hl__library_closed()) return;
  hl__keeper_stop(manager);
  if (waits) {
    hl__manager_mutex_lock(manager);
    hl__workers_await(manager);
    hl__manager_mutex_unlock(manager);
  }
  hl__manager_leave(manager);
}

void hl_manager_close(hl_manager *manager) {
  HL__UNCANCELLED;
  if (manager) manager_close(manager, true);
}

void hl__manager_collect(hl_manager *manager) {
  HL__UNCANCELLED;
  manager_close(manager, false);
}

void hl_manager_cancel(hl_manager *manager) {
  HL__UNCANCELLED;
  if (!manager) return;
  hl__manager_renew(manager);
  hl__manager_mutex_lock(manager);
  manager->cancelled = true;
  for (hl__connection *connection = manager->pool.all; connection; connection = connection->next)
    if (connection->state == HL__BUSY && connection->waits && connection->session)
      manager->ops->interrupt(connection->session);
  (void)pthread_cond_broadcast(&manager->pool.freed);
  hl__line_close(manager);
  hl__manager_mutex_unlock(manager);
}
