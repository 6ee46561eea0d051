/*
 * mysql.c - the store's operations: the life of a session between lock and
 * ROLLBACK. What is sent to lock rows is in statement.c, how it is sent in
 * wire.c.
 */
#include "mysql_store.h"

#include <mysqld_error.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

/* ---------------------------------------------------------- operations */

/* For the answer to the last release, before the rows of the next request can be
   asked for. */
#define SETTLE_MS 1000
/* The same for a look at the holders: a caller that has just waited in vain waits no
   longer for a server that hangs. */
#define QUERY_SETTLE_MS 250

static hl__mysql_session *session_of(hl_session *session) { return (hl__mysql_session *)session; }

/* The library sets SIGPIPE to be ignored: the host may have other wishes. */
static void library_init(void) {
  struct sigaction before;
  bool known = sigaction(SIGPIPE, NULL, &before) == 0;
  (void)mysql_library_init(0, NULL, NULL);
  if (known) (void)sigaction(SIGPIPE, &before, NULL);
}

void hl__mysql_library_init(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  (void)pthread_once(&once, library_init);
}

/* A connection that could be made is not given up for a short wait, or no wait over
   a slow line would ever get one: it may take thrice as long as the last one. One that was given
   up does not count: a server that hangs would keep each call longer than the one before. */
int hl__mysql_connect_verified(hl__mysql_store *store, int64_t deadline,
                               hl__mysql_session **session, hl_error *error) {
  int64_t begun = hl__now_ms();
  int64_t usual = hl__deadline(begun, 3 * atomic_load(&store->connecting));
  if (deadline < usual) deadline = usual;
  int status = hl__mysql_connect(store, deadline, session, error);
  if (status == HL_OK) {
    status = hl__mysql_verify(*session, error);
    if (status == HL_TIMEOUT) /* of a table's metadata lock, say */
      status = hl__error(error, HL_ECONNECTION, "the server did not answer in time");
  }
  if (status) {
    hl__mysql_disconnect(*session);
    *session = NULL;
  } else {
    atomic_store(&store->connecting, hl__now_ms() - begun);
  }
  return status;
}

/* The descriptor is closed already, and its number may be in use again: the
   library's part stays allocated. */
static void session_forget(hl_session *session) {
  free(session_of(session)->tag);
  free(session);
}

static void store_free(hl__mysql_store *store) {
  (void)pthread_cond_destroy(&store->killed);
  (void)pthread_mutex_destroy(&store->mutex);
  hl_layout_unref(store->base.layout);
  free(store);
}

/* Unchecked, as store_close and store_open: nobody else has the store. A thread of
   the parent's may have been at the killer, or at the mutex: neither is touched. */
HL__UNCHECKED static void store_forget(hl_store *base) {
  hl__mysql_store *store = (hl__mysql_store *)base;
  if (store->spare) session_forget(&store->spare->base);
  if (store->aside) session_forget(&store->aside->base);
  hl_layout_unref(base->layout);
  free(store);
}

HL__UNCHECKED static void store_close(hl_store *base) {
  hl__mysql_store *store = (hl__mysql_store *)base;
  hl__mysql_disconnect(store->spare);
  hl__mysql_disconnect(store->aside);
  hl__mysql_disconnect(store->killer);
  store_free(store);
}

HL__UNCHECKED static int store_open(const hl_store_config *config, hl_store **result,
                                    hl_error *error) {
  hl__mysql_library_init();
  hl__mysql_store *store = calloc(1, sizeof *store);
  if (!store) return hl__error_memory(error);
  store->base.ops = &hl_store_mysql;
  store->config = config;
  (void)pthread_mutex_init(&store->mutex, NULL);
  pthread_condattr_t monotonic;
  (void)pthread_condattr_init(&monotonic);
  (void)pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  (void)pthread_cond_init(&store->killed, &monotonic);
  (void)pthread_condattr_destroy(&monotonic);
  int status = hl__mysql_params(store, error);
  if (status == HL_OK)
    status = hl__mysql_connect_verified(store, hl__now_ms() + store->connect_timeout, &store->spare,
                                        error);
  if (status) {
    store_close(&store->base);
    return status;
  }
  if (store->leased) store->base.leases = &hl__mysql_leases;
  *result = &store->base;
  return HL_OK;
}

static int session_open(hl_store *base, int64_t deadline, hl_session **result, hl_error *error) {
  hl__mysql_store *store = (hl__mysql_store *)base;
  hl__mysql_store_lock(store);
  hl__mysql_session *session = store->spare;
  store->spare = NULL;
  hl__mysql_store_unlock(store);
  if (session && hl__mysql_readable(session)) { /* it has ended meanwhile */
    hl__mysql_disconnect(session);
    session = NULL;
  }
  int status = HL_OK;
  if (!session) status = hl__mysql_connect_verified(store, deadline, &session, error);
  *result = session ? &session->base : NULL;
  return status;
}

static void session_close(hl_session *session) { hl__mysql_disconnect(session_of(session)); }

/* ------------------------------------------------------- ending a wait

   A client that goes away does not end its wait: the server looks at the socket
   only afterwards, and the dead waiter keeps the rows that it has got. So the
   thread that was interrupted has the server told, on another connection.

   That one, the killer, must be there before it is needed: when a manager is
   closed whose waits have taken all connections that the server had left, no new
   one can be had. So it is connected with the first wait that can be cancelled,
   and kept. One thread at a time uses it; no mutex is held meanwhile. */

/* Each answer of the killer gets a step, and so does connecting: a second, or where
   connecting takes long, thrice what it took last. A new one is tried for KILL_MS, or two
   steps. Whoever waits for his turn does so until the server ends the wait itself.
   exit() waits for all of them, but not for much longer than KILL_MS (worker.c). */
#define KILL_MS 2000
#define KILL_STEP_MS 1000
/* The server had no connection left: those that are being killed give some back. */
#define KILL_AGAIN_NS 20000000L

static bool killer_take(hl__mysql_store *store, int64_t deadline) {
  hl__mysql_wait_begin(store);
  hl__mysql_store_lock(store);
  while (store->killing && hl__left_ms(deadline) > 0)
    hl__cond_wait(&store->killed, &store->mutex, deadline);
  bool taken = !store->killing;
  if (taken) store->killing = true;
  hl__mysql_store_unlock(store);
  hl__mysql_wait_end(store);
  return taken;
}

static void killer_give(hl__mysql_store *store) {
  hl__mysql_store_lock(store);
  store->killing = false;
  (void)pthread_cond_signal(&store->killed);
  hl__mysql_store_unlock(store);
}

static int64_t killer_step(hl__mysql_store *store) {
  int64_t usual = 3 * atomic_load(&store->connecting);
  return usual > KILL_STEP_MS ? usual : KILL_STEP_MS;
}

static void killer_drop(hl__mysql_store *store) {
  hl__mysql_disconnect(store->killer);
  store->killer = NULL;
}

/* By the thread that has taken it. */
static int killer_connect(hl__mysql_store *store, hl_error *error) {
  int64_t deadline = hl__now_ms() + killer_step(store);
  int status = hl__mysql_connect(store, deadline, &store->killer, error);
  if (status) return status;
  store->killer->patience = deadline;
  status = hl__mysql_identify(store->killer, error);
  if (status) killer_drop(store);
  return status;
}

/* A wait begins that may be cancelled, and lasts so long. Not to have a killer is no
   failure of that wait; the next one tries again, but not all the time. One that
   lasts no longer than connecting needs none: its server ends it as soon. */
static void killer_prepare(hl__mysql_store *store, int64_t ms) {
  if (ms <= killer_step(store)) return;
  hl__mysql_store_lock(store);
  bool wanted = !store->killing && hl__now_ms() >= store->killer_after &&
                (!store->killer || hl__mysql_readable(store->killer));
  if (wanted) store->killing = true;
  hl__mysql_store_unlock(store);
  if (!wanted) return;
  killer_drop(store);
  int status = killer_connect(store, NULL);
  hl__mysql_store_lock(store);
  if (status) store->killer_after = hl__now_ms() + KILL_STEP_MS;
  hl__mysql_store_unlock(store);
  killer_give(store);
}

/* KILL of the session, if the killer is connected to the very server that gave it
   its number; else the number may be an innocent's. A server that is started again
   ends the killer's connection, so between looking and killing it stays the same
   one. (Numbers of 32 bits come again after four thousand million connections in
   one life of a server. That is not looked at.) False: the killer is of no use, as
   it is connected to another server, or to none any more. */
static bool killer_kill(hl__mysql_store *store, const hl__mysql_session *session) {
  hl__mysql_session *killer = store->killer;
  if (strcmp(killer->server, session->server) != 0) return false;
  char sql[64];
  int n = snprintf(sql, sizeof sql, "KILL %lu", session->id);
  MYSQL_RES *none;
  killer->patience = hl__now_ms() + killer_step(store);
  /* There may be no such connection any more: so much the better. */
  return hl__mysql_query(killer, sql, (size_t)n, &none, NULL) != HL_ECONNECTION;
}

/* The server ends the wait itself at `end`. Model: acquire.pml, kill_remote. */
void hl__mysql_kill(const hl__mysql_session *session, int64_t end) {
  static const struct timespec again = {.tv_nsec = KILL_AGAIN_NS};
  hl__mysql_store *store = session->store;
  if (!*session->server || !killer_take(store, end)) return;
  if (store->killer && killer_kill(store, session)) goto out;
  killer_drop(store);
  /* A killer that hangs has cost a step already. */
  int64_t step = killer_step(store);
  int64_t deadline = hl__now_ms() + (KILL_MS > 2 * step ? KILL_MS : 2 * step);
  while (hl__left_ms(deadline) >= step) {
    hl_error error;
    if (killer_connect(store, &error) == HL_OK) {
      (void)killer_kill(store, session);
      break;
    }
    if (error.server_errno != ER_CON_COUNT_ERROR &&
        error.server_errno != ER_TOO_MANY_USER_CONNECTIONS &&
        error.server_errno != ER_USER_LIMIT_REACHED)
      break;
    (void)nanosleep(&again, NULL);
  }
out:
  killer_give(store);
}

/* ------------------------------------------------------- a session */

/* For the answer to the last release: at most half of the time that there is, the rest is for another
   connection. */
static int64_t patience_ms(const hl_request *request) {
  int64_t half = hl__left_ms(hl__late_answer_by(request->deadline)) / 2;
  return hl__now_ms() + (half < SETTLE_MS ? half : SETTLE_MS);
}

static int take(hl_session *base, const hl_request *request, hl_grant *grant, hl_error *error) {
  hl__mysql_session *session = session_of(base);
  /* Not while rows are held: their lease runs. */
  if (request->cancellable && !request->try_once && !request->extend)
    killer_prepare(session->store, hl__left_ms(request->deadline));
  /* The answer to the last release must be read first. Without it nothing was asked
     for: that is no timeout, and on another connection it may go on. */
  int status = hl__mysql_settle(session, patience_ms(request), error);
  if (status == HL_TIMEOUT)
    status = hl__error(error, HL_ECONNECTION, "the server has not answered the last release");
  while (status == HL_OK) {
    status = request->lease ? hl__mysql_lease_take(session, request, grant, error)
                            : hl__mysql_lock_rows(session, request, grant, error);
    /* One that upgrades its lock does not pass us, who wait for it: MariaDB, and MySQL before 8.0.41,
       have us give way. Nothing is held: so we come back behind it. */
    if (status != HL_DEADLOCK || request->extend || request->try_once ||
        hl__left_ms(request->deadline) == 0)
      break;
    status = hl__mysql_settle(session, patience_ms(request), error);
  }
  if (status == HL_DEADLOCK && !request->extend)
    status = hl__error(error, HL_TIMEOUT, "the lock was not granted in time");
  /* After the deadline the server has ended the wait, or hangs. */
  if (status == HL_ECONNECTION && atomic_load(&session->interrupted) &&
      hl__left_ms(request->deadline) > 0)
    hl__mysql_kill(session, request->deadline);
  return status;
}

static int give_back(hl_session *base, hl_error *error) {
  hl__mysql_session *session = session_of(base);
  int status = hl__mysql_settle(session, 0, error);
  if (status == HL_TIMEOUT) return hl__error(error, HL_BUSY, "an earlier answer has not come yet");
  if (status) return status;
  return hl__mysql_rollback_send(session, error);
}

static int renew(hl_session *base, int64_t *sent_ms, hl_error *error) {
  hl__mysql_session *session = session_of(base);
  *sent_ms = hl__boot_ms();
  return hl__mysql_send(session, "DO 0", 4, error);
}

static int settle(hl_session *session, int64_t deadline, hl_error *error) {
  return hl__mysql_settle(session_of(session), deadline, error);
}

/* A server that ends a connection writes to it or closes it; nothing else makes
   it readable while no answer is awaited. */
static int session_check(hl_session *base, hl_error *error) {
  hl__mysql_session *session = session_of(base);
  if (session->outstanding || !hl__mysql_readable(session)) return HL_OK;
  return hl__mysql_gone(error);
}

/* The socket has something to read, or its end, or the thread that waits for that has
   it in hand. The library may have closed the descriptor meanwhile: then this looks
   at nothing, or at a stranger's, but that thread has its end in hand. */
static bool told(hl_session *base) {
  const hl__mysql_session *session = session_of(base);
  return atomic_load(&session->in_hand) || hl__mysql_readable(session);
}

static void interrupt(hl_session *base) {
  hl__mysql_session *session = session_of(base);
  /* Once: the library closes the socket when it notices, and the number may be
     that of the connection on which its wait is being killed. */
  if (atomic_exchange(&session->interrupted, true)) return;
  if (hl__fork_watches(session->fd, session->ticket)) (void)shutdown(session->fd, SHUT_RDWR);
}

static int holders(hl_session *base, const hl_lease_filter *filter, hl_holder_fn fn, void *context,
                   int64_t deadline, hl_error *error) {
  hl__mysql_session *session = session_of(base);
  int64_t settled = hl__now_ms() + QUERY_SETTLE_MS;
  int status = hl__mysql_settle(session, settled < deadline ? settled : deadline, error);
  if (status) return status == HL_TIMEOUT ? hl__mysql_gone(error) : status;
  session->patience = deadline;
  status = hl__mysql_holders(session, filter, fn, context, error);
  if (status != HL_ECONNECTION) {
    /* Looking, too, began a transaction. */
    int sent = hl__mysql_rollback_send(session, NULL);
    if (sent && status == HL_OK) status = hl__mysql_gone(error);
  }
  return status;
}

/* What OpenSSL keeps for a thread would be freed when that has ended, and by then exit()
   may be taking the library apart. */
static void thread_end(void) {
  mysql_thread_end();
  if (OPENSSL_thread_stop) OPENSSL_thread_stop();
}

const hl_store_ops hl_store_mysql = {
    .abi = HL_STORE_ABI,
    .scheme = "mysql",
    .traits =
        {.scarce = true, .expires = true, .blocks = true, .updates = true, .leases_update = true},
    .parse = hl__mysql_dsn,
    .open = store_open,
    .close = store_close,
    .forget = store_forget,
    .session_open = session_open,
    .session_close = session_close,
    .session_forget = session_forget,
    .take = take,
    .give_back = give_back,
    .settle = settle,
    .renew = renew,
    .check = session_check,
    .told = told,
    .interrupt = interrupt,
    .thread_end = thread_end,
    .holders = holders,
};
