/*
 * mysql.c - the store's operations: the life of a session between lock and
 * ROLLBACK. What is sent to lock rows is in statement.c, how it is sent in
 * wire.c.
 */
#include "mysql_store.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>

/* ---------------------------------------------------------- operations */

/* Whoever looks for holders has just waited in vain, and waits no longer for a
   server that hangs. */
#define LOOK_SETTLE_MS 250
#define LOOK_MS 1000

static hl__mysql_session *session_of(hl_session *session) {
  return (hl__mysql_session *)session;
}

static void library_init(void) { (void)mysql_library_init(0, NULL, NULL); }

void hl__mysql_library_init(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  (void)pthread_once(&once, library_init);
}

static int connect_verified(hl__mysql_store *store, int64_t deadline,
                            hl__mysql_session **session, hl_error *error) {
  int status = hl__mysql_connect(store, deadline, session, error);
  if (status == HL_OK) {
    (*session)->patience = deadline;
    status = hl__mysql_verify(*session, error);
    if (status == HL_TIMEOUT) /* of a table's metadata lock, say */
      status = hl__error(error, HL_ECONNECTION,
                         "the server did not answer in time");
  }
  if (status) {
    hl__mysql_disconnect(*session);
    *session = NULL;
  }
  return status;
}

static void store_forget(hl_store *base) {
  hl__mysql_store *store = (hl__mysql_store *)base;
  (void)pthread_mutex_destroy(&store->mutex);
  free(store);
}

/* Unchecked, as store_open: nobody else has the store. */
HL__UNCHECKED static void store_close(hl_store *base) {
  hl__mysql_store *store = (hl__mysql_store *)base;
  hl__mysql_disconnect(store->spare);
  store_forget(base);
}

HL__UNCHECKED static int store_open(const hl_store_config *config,
                                    hl_store **result, hl_error *error) {
  hl__mysql_library_init();
  hl__mysql_store *store = calloc(1, sizeof *store);
  if (!store) return hl__error_memory(error);
  store->base.ops = &hl_store_mysql;
  store->config = config;
  (void)pthread_mutex_init(&store->mutex, NULL);
  int status = hl__mysql_params(store, error);
  if (status == HL_OK)
    status = connect_verified(store, hl__now_ms() + store->connect_timeout,
                              &store->spare, error);
  if (status) {
    store_close(&store->base);
    return status;
  }
  *result = &store->base;
  return HL_OK;
}

static int session_open(hl_store *base, int64_t deadline, hl_session **result,
                        hl_error *error) {
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
  if (!session) status = connect_verified(store, deadline, &session, error);
  *result = session ? &session->base : NULL;
  return status;
}

static void session_close(hl_session *session) {
  hl__mysql_disconnect(session_of(session));
}

/* The descriptor is closed already, and its number may be in use again: the
   library's part stays allocated. */
static void session_forget(hl_session *session) {
  free(session_of(session)->tag);
  free(session);
}

/* A client that goes away does not end its wait: the server looks at the socket
   only afterwards, and the dead waiter keeps what it has got. So the thread that
   was interrupted tells the server on another connection. */
static void kill_remote(hl__mysql_session *session) {
  hl__mysql_session *other;
  char sql[64];
  if (hl__mysql_connect(session->store, hl__now_ms() + 1000, &other, NULL))
    return;
  int n = snprintf(sql, sizeof sql, "KILL %lu",
                   mysql_thread_id(session->mysql));
  MYSQL_RES *none;
  other->patience = hl__now_ms() + 1000;
  (void)hl__mysql_query(other, sql, (size_t)n, &none, NULL);
  hl__mysql_disconnect(other);
}

static int lock(hl_session *base, const hl_request *request, hl_grant *grant,
                hl_error *error) {
  hl__mysql_session *session = session_of(base);
  int status = hl__mysql_settle(session, request->deadline, error);
  /* The answer to the last release is so late that there is no time left, and
     the connection cannot be used before it. */
  if (status == HL_TIMEOUT && !request->try_once) return status;
  if (status == HL_TIMEOUT)
    status = hl__mysql_settle(session, hl__now_ms() + 1000, error);
  if (status == HL_OK)
    status = hl__mysql_lock_rows(session, request, grant, error);
  /* After the deadline the server has ended the wait, or hangs. */
  if (status == HL_ECONNECTION && atomic_load(&session->interrupted) &&
      hl__left_ms(request->deadline) > 0)
    kill_remote(session);
  return status;
}

static int unlock(hl_session *base, hl_error *error) {
  hl__mysql_session *session = session_of(base);
  int status = hl__mysql_settle(session, 0, error);
  if (status == HL_TIMEOUT)
    return hl__error(error, HL_BUSY, "an earlier answer has not come yet");
  if (status) return status;
  return hl__mysql_rollback_send(session, error);
}

static int renew(hl_session *base, int64_t *sent_ms, hl_error *error) {
  hl__mysql_session *session = session_of(base);
  *sent_ms = hl__lease_ms();
  return hl__mysql_send(session, "DO 0", 4, error);
}

static int settle(hl_session *session, int64_t deadline, hl_error *error) {
  return hl__mysql_settle(session_of(session), deadline, error);
}

/* A server that ends a connection writes to it or closes it; nothing else makes
   it readable while no answer is awaited. */
static int look(hl_session *base, hl_error *error) {
  hl__mysql_session *session = session_of(base);
  if (session->outstanding || !hl__mysql_readable(session)) return HL_OK;
  return hl__mysql_gone(error);
}

static void interrupt(hl_session *base) {
  hl__mysql_session *session = session_of(base);
  /* Once: the library closes the socket when it notices, and the number may be
     that of the connection on which its wait is being killed. */
  if (atomic_exchange(&session->interrupted, true)) return;
  (void)shutdown(session->fd, SHUT_RDWR);
}

static int holders(hl_session *base, const hl_row *rows, size_t n,
                   hl_holder_fn fn, void *context, hl_error *error) {
  hl__mysql_session *session = session_of(base);
  int status = hl__mysql_settle(session, hl__now_ms() + LOOK_SETTLE_MS, error);
  if (status) return status;
  session->patience = hl__now_ms() + LOOK_MS;
  status = hl__mysql_holders(session, rows, n, fn, context, error);
  if (status != HL_ECONNECTION) {
    /* Looking, too, began a transaction. */
    int sent = hl__mysql_rollback_send(session, NULL);
    if (sent && status == HL_OK) status = hl__mysql_gone(error);
  }
  return status;
}

const hl_store_ops hl_store_mysql = {
    .abi = HL_STORE_ABI,
    .scheme = "mysql",
    .connects = true,
    .open = store_open,
    .close = store_close,
    .forget = store_forget,
    .session_open = session_open,
    .session_close = session_close,
    .session_forget = session_forget,
    .lock = lock,
    .unlock = unlock,
    .settle = settle,
    .renew = renew,
    .look = look,
    .interrupt = interrupt,
    .thread_end = mysql_thread_end,
    .holders = holders,
};
