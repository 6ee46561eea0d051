/*
 * pool.c - see pool.h. A connection whose release is not answered yet is in the pool, too. The next
 * acquisition prefers one whose answer has come, so it need not wait for it.
 */
#include "manager.h"

#include "clock.h"
#include "error.h"
#include "exit.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

/* A program that acquires and releases in turn never waits for an answer if it has two sessions.
   More would only keep connections busy. */
#define POOL_PAIR 2

/* The least time for connecting, even if less is left, so that a try (timeout 0) can connect. */
#define CONNECT_AT_LEAST_MS 1000

/* An answer to a release or a sign of life takes a round trip. An idle connection that waits longer
   than this is given up: it may be half open, and a new one can be opened. */
#define ANSWER_MS 1000

static void all_insert(hl_manager *manager, hl__connection *connection)
    HL__REQUIRES(hl__manager_mutex) {
  /* The keeper sleeps while there are no connections. */
  if (!manager->pool.all && manager->ops->traits.expires) hl__manager_hurry(manager, 0);
  connection->next = manager->pool.all;
  connection->previous = NULL;
  if (manager->pool.all) manager->pool.all->previous = connection;
  manager->pool.all = connection;
  manager->pool.count++;
}

static void all_remove(hl_manager *manager, hl__connection *connection)
    HL__REQUIRES(hl__manager_mutex) {
  if (connection->previous)
    connection->previous->next = connection->next;
  else
    manager->pool.all = connection->next;
  if (connection->next) connection->next->previous = connection->previous;
  manager->pool.count--;
}

static void idle_insert(hl_manager *manager, hl__connection *connection)
    HL__REQUIRES(hl__manager_mutex) {
  connection->newer = NULL;
  connection->older = manager->pool.newest;
  if (manager->pool.newest)
    manager->pool.newest->newer = connection;
  else
    manager->pool.oldest = connection;
  manager->pool.newest = connection;
  manager->pool.idle_count++;
}

static void idle_remove(hl_manager *manager, hl__connection *connection)
    HL__REQUIRES(hl__manager_mutex) {
  if (connection->newer)
    connection->newer->older = connection->older;
  else
    manager->pool.newest = connection->older;
  if (connection->older)
    connection->older->newer = connection->newer;
  else
    manager->pool.oldest = connection->newer;
  connection->newer = connection->older = NULL;
  manager->pool.idle_count--;
}

static void sent_end(hl__connection *connection, bool answered) HL__REQUIRES(hl__manager_mutex) {
  hl__sent *sent = connection->sent;
  connection->sent = NULL;
  if (sent) sent->end(sent, answered);
}

void hl__pool_sent(hl__connection *connection, hl__sent *sent) {
  connection->sent = sent;
  connection->idle_since = hl__now_ms(); /* a try awaits its answer */
}

void hl__pool_sent_end(hl_manager *manager) {
  for (hl__connection *connection = manager->pool.all; connection; connection = connection->next)
    if (connection->sent &&
        (connection->state != HL__IDLE || hl__pool_settle(manager, connection) != HL_OK))
      sent_end(connection, false);
}

hl__connection *hl__pool_quiet(hl_manager *manager) {
  hl__connection *connection = manager->pool.newest;
  while (connection && (hl__pool_settle(manager, connection) != HL_OK ||
                        manager->ops->check(connection->session, NULL) != HL_OK))
    connection = connection->older;
  return connection;
}

void hl__pool_idle(hl_manager *manager, hl__connection *connection) {
  connection->state = HL__IDLE;
  connection->idle_since = hl__now_ms();
  connection->asked = 0;
  idle_insert(manager, connection);
  (void)pthread_cond_broadcast(&manager->pool.freed);
  manager->pool.room(manager);
}

void hl__pool_unlink(hl_manager *manager, hl__connection *connection) {
  if (connection->state == HL__IDLE) idle_remove(manager, connection);
  all_remove(manager, connection);
  sent_end(connection, false);
  (void)pthread_cond_broadcast(&manager->pool.freed);
  manager->pool.room(manager);
}

/* How many connections there may be. A query, and one that runs, takes no call's room. */
static unsigned limit_of(const hl_manager *manager, bool query) HL__REQUIRES(hl__manager_mutex) {
  return manager->pool_size + (query || manager->pool.queries > 0);
}

bool hl__pool_has_room(const hl_manager *manager) {
  return !manager->ops->traits.scarce ||
         manager->pool.count - manager->pool.idle_count + manager->pool.reserved <
             limit_of(manager, false);
}

int hl__pool_busy_error(const hl_manager *manager, hl_error *error) {
  return hl__error(error, HL_BUSY,
                   "all %u connections of the pool are in use; wait longer, or raise pool_size",
                   manager->pool_size);
}

void hl__pool_bury(hl_manager *manager, hl__connection *connection, hl__connection **dead) {
  hl__pool_unlink(manager, connection);
  connection->next = *dead;
  *dead = connection;
}

void hl__session_close(const hl_manager *manager, hl_session *session) {
  if (!session || !hl__exit_try_await()) return;
  manager->ops->session_close(session);
  hl__exit_await_end();
}

/* The connection is in no list of the manager. */
static void connection_free(hl_manager *manager, hl__connection *connection) {
  hl__session_close(manager, connection->session);
  (void)pthread_mutex_destroy(&connection->mutex);
  free(connection);
}

/* Unchecked: no other thread has the list. */
HL__UNCHECKED void hl__pool_free(hl_manager *manager, hl__connection *dead) {
  while (dead) {
    hl__connection *next = dead->next;
    connection_free(manager, dead);
    dead = next;
  }
}

void hl__pool_reserve(hl_manager *manager, bool *reservation) {
  if (!*reservation) manager->pool.reserved++;
  *reservation = true;
}

void hl__pool_unreserve(hl_manager *manager, bool *reservation) {
  if (*reservation) manager->pool.reserved--;
  *reservation = false;
}

void hl__pool_watch(hl_manager *manager, hl__connection *connection, int64_t due) {
  connection->due = due;
  if (manager->ops->traits.expires) hl__manager_hurry(manager, due);
}

void hl__pool_discard(hl_manager *manager, hl__connection *connection) {
  hl__pool_unlink(manager, connection);
  hl__manager_mutex_unlock(manager);
  connection_free(manager, connection);
  hl__manager_mutex_lock(manager);
}

void hl__pool_put(hl_manager *manager, hl__connection *connection) {
  if (manager->closed || connection->overrun)
    hl__pool_discard(manager, connection);
  else
    hl__pool_idle(manager, connection);
}

int hl__pool_settle(hl_manager *manager, hl__connection *connection) {
  int status = manager->ops->settle(connection->session, 0, NULL);
  if (status == HL_OK) {
    if (connection->asked) connection->answered = connection->asked;
    connection->asked = 0;
    sent_end(connection, true);
  } else if (status == HL_TIMEOUT) {
    int64_t age = connection->asked ? hl__boot_ms() - connection->asked
                                    : hl__now_ms() - connection->idle_since;
    if (age > ANSWER_MS) status = HL_ECONNECTION;
  }
  return status;
}

/* Whether the connection can be used at once. If it still waits for an answer, it becomes *pending;
   if it has ended, it is moved to *dead. */
static bool idle_try(hl_manager *manager, hl__connection *connection, hl__connection **pending,
                     hl__connection **dead) HL__REQUIRES(hl__manager_mutex) {
  int status = hl__pool_settle(manager, connection);
  if (status == HL_OK && manager->ops->traits.scarce)
    status = manager->ops->check(connection->session, NULL);
  if (status == HL_OK) return true;
  if (status == HL_TIMEOUT) {
    *pending = connection;
  } else {
    hl__pool_bury(manager, connection, dead);
  }
  return false;
}

/* Finds an idle connection whose answer has come, preferring new ones: their statements are
   prepared and their memory is warm. The newest was only just released, so its answer may be
   outstanding: the second newest is tried first. But where no answer can be outstanding (leases
   only, and releases wait for their answer) the newest is tried first: two connections in turn
   would each read again what the other has changed. NULL with *pending: all wait for an answer. */
static hl__connection *idle_find(hl_manager *manager, hl__connection **pending,
                                 hl__connection **dead) HL__REQUIRES(hl__manager_mutex) {
  hl__connection *newest = manager->pool.newest;
  *pending = NULL;
  if (!newest) return NULL;
  hl__connection *connection = newest->older;
  hl__connection *rest = connection ? connection->older : NULL;
  const hl_store_traits *traits = &manager->ops->traits;
  bool quiet = traits->leases_only && !traits->drop_sends;
  if (quiet && idle_try(manager, newest, pending, dead)) return newest;
  if (connection && idle_try(manager, connection, pending, dead)) return connection;
  if (!quiet && idle_try(manager, newest, pending, dead)) return newest;
  for (connection = rest; connection; connection = rest) {
    rest = connection->older;
    if (idle_try(manager, connection, pending, dead)) return connection;
  }
  return NULL;
}

/* A try must not fail because of a lock that this process has already released. So it waits for the
   answers to the releases sent just before: one round trip in all. The thread waits without the
   mutex; meanwhile the connection is BUSY, and this thread's. */
#define RELEASES_MS 100

static hl__connection *releases_next(hl_manager *manager) HL__REQUIRES(hl__manager_mutex) {
  int64_t since = hl__now_ms() - RELEASES_MS;
  for (hl__connection *connection = manager->pool.newest; connection;
       connection = connection->older)
    if (connection->idle_since > since && hl__pool_settle(manager, connection) == HL_TIMEOUT)
      return connection;
  return NULL;
}

static void releases_await(hl_manager *manager, hl__connection **dead)
    HL__REQUIRES(hl__manager_mutex) {
  for (hl__connection *connection; (connection = releases_next(manager));) {
    int64_t end = connection->idle_since + RELEASES_MS;
    idle_remove(manager, connection);
    connection->state = HL__BUSY;
    connection->owner = pthread_self();
    connection->due = HL_FOREVER;
    manager->pool.settling++;
    hl__manager_mutex_unlock(manager);
    int status = manager->ops->settle(connection->session, end, NULL);
    hl__manager_mutex_lock(manager);
    manager->pool.settling--;
    if (manager->closed || (status != HL_OK && status != HL_TIMEOUT)) {
      hl__pool_bury(manager, connection, dead);
    } else {
      connection->state = HL__IDLE; /* idle_since stays */
      idle_insert(manager, connection);
      manager->pool.room(manager);
    }
    (void)pthread_cond_broadcast(&manager->pool.freed);
  }
}

void hl__pool_releases_await(hl_manager *manager) {
  hl__connection *dead = NULL;
  if (manager->ops->traits.scarce) releases_await(manager, &dead);
  if (!dead) return;
  hl__manager_mutex_unlock(manager);
  hl__pool_free(manager, dead);
  hl__manager_mutex_lock(manager);
}

/* Whether this thread holds all connections in use, so that it would wait for itself. */
static bool all_ours(hl_manager *manager) HL__REQUIRES(hl__manager_mutex) {
  for (hl__connection *connection = manager->pool.all; connection; connection = connection->next)
    if (connection->state != HL__IDLE &&
        (connection->state != HL__HELD || !pthread_equal(connection->owner, pthread_self())))
      return false;
  return true;
}

static hl__connection *connection_new(hl_manager *manager) HL__REQUIRES(hl__manager_mutex) {
  hl__connection *connection = calloc(1, sizeof *connection);
  if (!connection) return NULL;
  (void)pthread_mutex_init(&connection->mutex, NULL);
  connection->state = HL__BUSY;
  connection->owner = pthread_self();
  connection->due = HL_FOREVER; /* the store limits how long it connects */
  connection->fresh = true;
  all_insert(manager, connection);
  return connection;
}

/* Opens the session of a BUSY connection, which is in the list of all and so counts. */
static int connection_open(hl_manager *manager, hl__connection *connection, int64_t deadline,
                           hl_error *error) HL__REQUIRES(hl__manager_mutex) {
  hl_session *session = NULL;
  hl__manager_mutex_unlock(manager);
  int64_t sent = hl__boot_ms();
  hl__exit_await(1);
  /* Where no library is taken apart, the keeper may be here: a handler of exit() that closes the
     manager waits for it. */
  if (manager->ops->traits.blocks) hl__exit_check(1);
  int status = hl__session_open(manager->ops, manager->store, deadline, &session, error);
  hl__exit_await_end();
  hl__manager_mutex_lock(manager);
  connection->session = session;
  connection->answered = sent;
  return status;
}

/* Makes an IDLE connection BUSY, and this thread its owner. */
static void connection_take(hl_manager *manager, hl__connection *connection)
    HL__REQUIRES(hl__manager_mutex) {
  idle_remove(manager, connection);
  connection->state = HL__BUSY;
  connection->owner = pthread_self();
  connection->due = HL_FOREVER;
  connection->fresh = connection->waits = false;
}

/* Finds an idle connection, or makes one, *made, that has no session yet. HL_BUSY if neither is
   possible in time. */
static int find(hl_manager *manager, const hl__take *take, hl__connection **found, bool *made,
                hl__connection **dead, hl_error *error) HL__REQUIRES(hl__manager_mutex) {
  const bool *given_up = take->given_up;
  bool scarce = manager->ops->traits.scarce;
  hl__connection *pending = NULL;
  *made = false;
  for (;;) {
    if (manager->closed || (given_up && (*given_up || manager->cancelled)))
      return hl__manager_closed_error(error);
    if (take->try_once && !take->fresh && scarce) releases_await(manager, dead);
    /* Calls leave one connection to queries, which refresh leases, though it be idle. */
    unsigned limit = scarce ? limit_of(manager, take->query) : UINT32_MAX;
    bool room = manager->pool.count - manager->pool.idle_count < limit;
    if (room && !take->fresh && (*found = idle_find(manager, &pending, dead)) != NULL) return HL_OK;
    /* A query waits for an answer, or replaces a session as stale as its last one, rather than
       connect. */
    bool makes = take->query ? !pending && !(take->fresh && manager->pool.oldest)
                             : !pending || manager->pool.count < POOL_PAIR;
    if (makes && manager->pool.count < limit) {
      *found = connection_new(manager);
      *made = *found != NULL;
      return *found ? HL_OK : hl__error_memory(error);
    }
    /* None is free at once, but an answer must come soon. */
    *found = pending ? pending : room ? manager->pool.oldest : NULL;
    if (*found) return HL_OK;
    bool ours = all_ours(manager);
    bool settling = manager->pool.settling > 0;
    if (ours)
      return hl__error(error, HL_BUSY,
                       "all %u connections of the pool hold locks of this "
                       "thread; release some, or raise pool_size",
                       manager->pool_size);
    if (!settling && (take->try_once || hl__left_ms(take->deadline) == 0))
      return hl__pool_busy_error(manager, error);
    hl__manager_wait(&manager->pool.freed, manager,
                     settling ? hl__now_ms() + RELEASES_MS : take->deadline);
  }
}

int hl__pool_take(hl_manager *manager, const hl__take *take, hl__connection **taken,
                  hl_error *error) {
  hl__connection *connection = NULL, *dead = NULL;
  hl_session *stale = NULL;
  bool made;
  *taken = NULL;
  int status = find(manager, take, &connection, &made, &dead, error);
  if (status == HL_OK && take->reservation) hl__pool_unreserve(manager, take->reservation);
  if (status == HL_OK && take->query) manager->pool.queries++;
  if (status == HL_OK && !made) {
    connection_take(manager, connection);
    if (take->fresh) {
      /* The pool is full of sessions that may be as stale as the last one. */
      stale = connection->session;
      connection->session = NULL;
      connection->fresh = made = true;
    }
  }
  if (dead || stale) {
    hl__manager_mutex_unlock(manager);
    hl__pool_free(manager, dead);
    hl__session_close(manager, stale);
    hl__manager_mutex_lock(manager);
  }
  if (status == HL_OK && made) {
    int64_t deadline = take->deadline, least = hl__now_ms() + CONNECT_AT_LEAST_MS;
    if (!take->fresh && !take->query && deadline < least) deadline = least;
    status = connection_open(manager, connection, deadline, error);
    if (status) {
      if (take->query) manager->pool.queries--;
      hl__pool_discard(manager, connection);
      return status;
    }
  }
  if (status == HL_OK) *taken = connection;
  return status;
}

static int run_once(hl_manager *manager, const hl__take *take,
                    int (*run)(hl_session *, void *, hl_error *), void *context, bool *fresh,
                    hl_error *error) HL__REQUIRES(hl__manager_mutex) {
  hl__connection *connection;
  int status = hl__pool_take(manager, take, &connection, error);
  *fresh = true;
  if (status) return status;
  *fresh = connection->fresh;
  hl__pool_watch(manager, connection, take->deadline);
  hl__manager_mutex_unlock(manager);
  status = run(connection->session, context, error);
  assert(!hl__is_step(status));
  hl__manager_mutex_lock(manager);
  manager->pool.queries--;
  if (status == HL_ECONNECTION && connection->overrun)
    status = hl__error(error, HL_ECONNECTION, "the server did not answer in time");
  if (status == HL_ECONNECTION)
    hl__pool_discard(manager, connection);
  else
    hl__pool_put(manager, connection);
  return status;
}

int hl__pool_run(hl_manager *manager, int (*run)(hl_session *, void *, hl_error *), void *context,
                 int64_t deadline, hl_error *error) {
  bool fresh;
  hl__take take = {.query = true, .deadline = deadline};
  int status = run_once(manager, &take, run, context, &fresh, error);
  if (status == HL_ECONNECTION && !fresh && hl__left_ms(deadline) > 0) {
    take.fresh = true;
    status = run_once(manager, &take, run, context, &fresh, error);
  }
  return status;
}

int hl__pool_run_alone(hl_manager *manager, int (*run)(hl_session *, void *, hl_error *),
                       void *context, int64_t deadline, hl_error *error) {
  hl_session *session;
  hl__manager_mutex_unlock(manager);
  int status = hl__session_open(manager->ops, manager->store, deadline, &session, error);
  if (status == HL_OK) {
    status = run(session, context, error);
    hl__session_close(manager, session);
  }
  hl__manager_mutex_lock(manager);
  return status;
}
