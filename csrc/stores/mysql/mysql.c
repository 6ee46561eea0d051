/*
 * mysql.c - the store's operations: the life of a session between lock and ROLLBACK. statement.c
 * has the text that locks rows, wire.c sends it.
 */
#include "mysql_store.h"

#include <stdlib.h>
#include <sys/socket.h>

/* ---------------------------------------------------------- operations */

/* The time for the answer to the last release, before the next request. */
#define SETTLE_MS 1000
/* The time for that answer before a query for the holders: a caller whose wait has just timed
   out waits no longer for a server that hangs. */
#define QUERY_SETTLE_MS 250

static hl__mysql_session *session_of(hl_session *session) { return (hl__mysql_session *)session; }

/* The library sets SIGPIPE to be ignored; the host program may have other wishes. */
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

static void store_free(hl__mysql_store *store) {
  (void)pthread_cond_destroy(&store->killed);
  (void)pthread_mutex_destroy(&store->mutex);
  hl_layout_unref(store->base.layout);
  free(store);
}

static int session_open(hl_store *base, int64_t deadline, hl_session **result, hl_error *error) {
  hl__mysql_store *store = (hl__mysql_store *)base;
  hl__mysql_session *session = NULL;
  int status = hl__mysql_connect_verified(store, deadline, &session, error);
  *result = session ? &session->base : NULL;
  return status;
}

static void session_close(hl_session *session) { hl__mysql_disconnect(session_of(session)); }

/* Unchecked: no other thread has the store. */
HL__UNCHECKED static void store_close(hl_store *base) {
  hl__mysql_store *store = (hl__mysql_store *)base;
  if (base->first) session_close(base->first);
  hl__mysql_disconnect(store->aside);
  hl__mysql_disconnect(store->lookout);
  hl__mysql_disconnect(store->killer);
  store_free(store);
}

static int store_open(const hl_store_config *config, hl_store **result, hl_error *error) {
  hl__mysql_store *store = calloc(1, sizeof *store);
  if (!store) return hl__error_memory(error);
  store->config = config;
  (void)pthread_mutex_init(&store->mutex, NULL);
  hl__cond_init(&store->killed);
  hl_session *first = NULL;
  int status = hl__mysql_params(store, error);
  if (status == HL_OK)
    status = session_open(&store->base, hl__now_ms() + store->connect_timeout, &first, error);
  store->base.first = first;
  if (status) {
    store_close(&store->base);
    return status;
  }
  if (store->leased) store->base.leases = &hl__mysql_leases;
  *result = &store->base;
  return HL_OK;
}

/* ------------------------------------------------------- a session */

/* For the answer to the last release: at most half of the time that is left. The rest is for
   another connection. */
static int64_t patience_ms(const hl_request *request) {
  int64_t half = hl__left_ms(hl__late_answer_by(request->deadline)) / 2;
  return hl__now_ms() + (half < SETTLE_MS ? half : SETTLE_MS);
}

static int take(hl_session *base, const hl_request *request, hl_grant *grant, hl_error *error) {
  hl__mysql_session *session = session_of(base);
  /* Not while rows are held: their session must be renewed in time. */
  if (request->cancellable && !request->try_once && !request->extend)
    hl__mysql_killer_prepare(session->store, hl__left_ms(request->deadline));
  /* Reads the answer to the last release first. Without it we have asked for nothing: that is no
     timeout, and the core may go on with another connection. */
  int status = hl__mysql_settle_late(session, patience_ms(request), HL__MYSQL_UNANSWERED, error);
  while (status == HL_OK) {
    status = request->lease ? hl__mysql_lease_take(session, request, grant, error)
                            : hl__mysql_lock_rows(session, request, grant, error);
    /* A holder that upgrades its lock would stand behind our waiting request: MariaDB, and MySQL
       before 8.0.41, have us give way. Nothing is held, so we ask again, and stand behind the
       upgrade. */
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

/* A server that ends a connection writes to it or closes it. Nothing else makes the socket
   readable while no answer is awaited. */
static int session_check(hl_session *base, hl_error *error) {
  hl__mysql_session *session = session_of(base);
  if (session->outstanding || !hl__mysql_readable(session)) return HL_OK;
  return hl__mysql_gone(error);
}

/* True: the socket has something to read, or its end, or the thread that waits for that is at
   it. If the library has closed the descriptor meanwhile, this looks at nothing, or at another
   file; but then in_hand is set. */
static bool told(hl_session *base) {
  const hl__mysql_session *session = session_of(base);
  return atomic_load(&session->in_hand) || hl__mysql_readable(session);
}

static void interrupt(hl_session *base) {
  hl__mysql_session *session = session_of(base);
  /* Once only. The library closes the socket when it notices, and the number may then be that of
     the killer's connection. */
  if (atomic_exchange(&session->interrupted, true)) return;
  if (hl__fork_watches(session->fd, session->ticket)) (void)shutdown(session->fd, SHUT_RDWR);
}

static int holders(hl_session *base, const hl_lease_filter *filter, hl_holder_fn fn, void *context,
                   int64_t deadline, hl_error *error) {
  hl__mysql_session *session = session_of(base);
  int status = hl__mysql_settle(session, hl__within_ms(QUERY_SETTLE_MS, deadline), error);
  if (status) return status == HL_TIMEOUT ? hl__mysql_gone(error) : status;
  session->patience = deadline;
  status = hl__mysql_holders(session, filter, fn, context, error);
  if (status != HL_ECONNECTION) {
    /* The query, too, began a transaction. */
    int sent = hl__mysql_rollback_send(session, NULL);
    if (sent && status == HL_OK) status = hl__mysql_gone(error);
  }
  return status;
}

/* OpenSSL would free a thread's data when the thread has ended, and by then exit() may be taking
   the library apart. */
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
    .session_open = session_open,
    .session_close = session_close,
    .take = take,
    .give_back = give_back,
    .settle = settle,
    .renew = renew,
    .check = session_check,
    .told = told,
    .interrupt = interrupt,
    .library_init = hl__mysql_library_init,
    .thread_end = thread_end,
    .holders = holders,
};
