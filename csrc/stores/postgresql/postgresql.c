/*
 * postgresql.c - the store's operations: the life of a session between the lock statement and
 * ROLLBACK. statement.c writes the statements that lock rows; wire.c sends them.
 */
#include "postgresql_store.h"

#include <stdlib.h>
#include <string.h>

/* How long to wait for the answer to the last release before the rows of the next request. */
#define SETTLE_MS 1000
/* A shorter limit before a query for holders: its caller has already waited for nothing, and does
   not wait longer for a server that hangs. */
#define QUERY_SETTLE_MS 250

static hl__pg_session *session_of(hl_session *session) { return (hl__pg_session *)session; }

/* ------------------------------------------------------------ the store */

/* OpenSSL registers a handler with exit() that takes it apart. */
static void library_init(void) {
  if (OPENSSL_init_ssl) (void)OPENSSL_init_ssl(0, NULL);
}

/* Turns outcomes of locking into HL_ECONNECTION: while connecting, a stranger may have ended our
   statement, or the server may refuse with any SQLSTATE. */
static int not_connected(int status, hl_error *error) {
  return status <= 0 ? status : hl__error_as(error, HL_ECONNECTION);
}

/* Connects, and checks the server. A short wait does not cut off the connecting, which may take
   three times as long as the last time. Otherwise no short wait would ever get a connection over a
   slow line. Failures do not count as the last time, or a server that hangs would keep each call
   longer than the one before. */
static int connect_verified(hl__pg_store *store, int64_t deadline, hl__pg_session **session,
                            hl_error *error) {
  int64_t begun = hl__now_ms();
  int64_t usual = hl__deadline(begun, 3 * atomic_load(&store->connecting));
  if (deadline < usual) deadline = usual;
  int status = hl__pg_connect(store, deadline, session, error);
  if (status == HL_OK) status = hl__pg_verify(*session, error);
  status = not_connected(status, error);
  if (status) {
    hl__pg_disconnect(*session);
    *session = NULL;
  } else {
    atomic_store(&store->connecting, hl__now_ms() - begun);
  }
  return status;
}

static int session_open(hl_store *base, int64_t deadline, hl_session **result, hl_error *error) {
  hl__pg_store *store = (hl__pg_store *)base;
  hl__pg_session *session = NULL;
  int status = connect_verified(store, deadline, &session, error);
  *result = session ? &session->base : NULL;
  if (session) atomic_fetch_add(&store->sessions, 1u);
  return status;
}

static void session_close(hl_session *session) {
  hl__pg_store *store = session_of(session)->store;
  hl__pg_disconnect(session_of(session));
  if (atomic_fetch_sub(&store->sessions, 1u) == 1) hl__pg_ear_end(store);
}

static void store_close(hl_store *base) {
  hl__pg_store *store = (hl__pg_store *)base;
  if (base->first) session_close(base->first);
  hl_layout_unref(base->layout);
  free(store);
}

static int store_open(const hl_store_config *config, hl_store **result, hl_error *error) {
  hl__pg_store *store = calloc(1, sizeof *store);
  if (!store) return hl__error_memory(error);
  store->config = config;
  hl_session *first = NULL;
  int status = hl__pg_params(store, error);
  if (status == HL_OK)
    status = session_open(&store->base, hl__now_ms() + store->connect_timeout, &first, error);
  store->base.first = first;
  if (status) {
    store_close(&store->base);
    return status;
  }
#ifdef LIBPQ_HAS_PIPELINING
  store->base.leases = &hl__pg_leases;
#endif
  *result = &store->base;
  return HL_OK;
}

/* ------------------------------------------------------------ a session */

static int take(hl_session *base, const hl_request *request, hl_grant *grant, hl_error *error) {
  hl__pg_session *session = session_of(base);
  /* The answer to the last release must be read first. Without it nothing was requested, so that is
     no timeout: half of the time is left for another connection. */
  session->limit = hl__late_answer_by(request->deadline);
  int64_t half = hl__left_ms(session->limit) / 2;
  int64_t patience = hl__now_ms() + (half < SETTLE_MS ? half : SETTLE_MS);
  int status = hl__pg_settle(session, patience, true, error);
  if (status == HL_TIMEOUT)
    status = hl__error(error, HL_ECONNECTION, "the server has not answered the last release");
  /* If there are leases, some session has to sweep. */
  if (status == HL_OK && !request->extend && (request->lease || session->gate == HL__PG_GATE_OPEN))
    status = hl__pg_sweep(session, error);
  if (status == HL_OK)
    status = request->lease ? hl__pg_lease_take(session, request, grant, error)
                            : hl__pg_lock_rows(session, request, grant, error);
  /* settle forgets a later one. */
  (void)hl__wakeup_interruption_take(&session->wakeup);
  return status;
}

static int give_back(hl_session *base, hl_error *error) {
  hl__pg_session *session = session_of(base);
  int status = hl__pg_settle(session, 0, false, error);
  if (status == HL_TIMEOUT) return hl__error(error, HL_BUSY, "an earlier answer has not come yet");
  if (status) return status;
  return hl__pg_rollback_send(session, error);
}

/* Sends only the comment for observers: the server has nothing to do, and cannot fail. But it has
   heard from us, and its answer says whether the transaction is still open. */
static int renew(hl_session *base, int64_t *sent_ms, hl_error *error) {
  hl__pg_session *session = session_of(base);
  *sent_ms = hl__boot_ms();
  return hl__pg_send(session, session->holds ? session->tag : "", error);
}

static int settle(hl_session *base, int64_t deadline, hl_error *error) {
  hl__pg_session *session = session_of(base);
  /* Without a wait, an interruption has come too late. */
  if (deadline == 0) (void)hl__wakeup_interruption_take(&session->wakeup);
  int status = hl__pg_settle(session, deadline, deadline != 0, error);
  if (status == HL_CANCELLED) status = hl__error(error, HL_ECONNECTION, "the wait was interrupted");
  if (status == HL_OK && session->outdated && !session->holds)
    status = hl__error(error, HL_ECONNECTION, "the session is outdated");
  return status;
}

static int session_check(hl_session *base, hl_error *error) {
  hl__pg_session *session = session_of(base);
  if (session->outstanding || hl__pg_stands(session)) return HL_OK;
  return hl__pg_gone(session, error);
}

/* Whether the socket is readable or closed, or another thread is reading its data. libpq may have
   closed the descriptor, and its number may be a stranger's; then in_hand is set. */
static bool told(hl_session *base) {
  const hl__pg_session *session = session_of(base);
  return atomic_load(&session->in_hand) || hl__pg_readable(session);
}

/* The waiting thread wakes up, and has the server end the wait. Nothing here may block. */
static void interrupt(hl_session *base) { hl__wakeup_interrupt(&session_of(base)->wakeup); }

static int holders(hl_session *base, const hl_lease_filter *filter, hl_holder_fn fn, void *context,
                   int64_t deadline, hl_error *error) {
  hl__pg_session *session = session_of(base);
  int status = hl__pg_settle(session, hl__within_ms(QUERY_SETTLE_MS, deadline), false, error);
  if (status) return status == HL_TIMEOUT ? hl__pg_gone(session, error) : status;
  session->patience = session->limit = deadline;
  return hl__pg_holders(session, filter, fn, context, error);
}

/* Frees what OpenSSL keeps for the thread. Otherwise the end of the thread would free it, when
   exit() may be taking the library apart. */
static void thread_end(void) {
  if (OPENSSL_thread_stop) OPENSSL_thread_stop();
}

const hl_store_ops hl_store_postgresql = {
    .abi = HL_STORE_ABI,
    .scheme = "postgresql",
    .traits =
        {.scarce = true, .expires = true, .blocks = true, .updates = true, .leases_update = true},
    .parse = hl__pg_dsn,
    .name_key = hl__pg_name_key,
    .open = store_open,
    .close = store_close,
    .session_open = session_open,
    .session_close = session_close,
    .take = take,
    .downgrade = hl__pg_downgrade,
    .give_back = give_back,
    .settle = settle,
    .renew = renew,
    .check = session_check,
    .told = told,
    .interrupt = interrupt,
    .library_init = library_init,
    .thread_end = thread_end,
    .holders = holders,
};
