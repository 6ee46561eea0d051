/*
 * memcached.c - the store's operations: the life of a session, which is a connection to each
 * server that it has needed. take.c and leases.c have the questions to the servers.
 */
#include "memcached_store.h"

#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------ a session's life */

static void session_free(hl__memcached_session *session) {
  if (!session) return;
  for (unsigned i = 0; i < session->store->server_count; i++)
    hl__memcached_link_free(&session->links[i]);
  hl__wakeup_close(&session->wakeup);
  free(session);
}

static int session_make(hl__memcached_store *store, hl__memcached_session **result,
                        hl_error *error) {
  *result = NULL;
  hl__memcached_session *session =
      calloc(1, sizeof *session + store->server_count * sizeof session->links[0]);
  if (!session) return hl__error_memory(error);
  session->base.store = &store->base;
  session->store = store;
  session->random = (uint32_t)hl__now_ms() ^ (uint32_t)(uintptr_t)session;
  for (unsigned i = 0; i < store->server_count; i++) {
    session->links[i].fd = -1;
    session->links[i].server = &store->servers[i];
  }
  int status = hl__wakeup_open(&session->wakeup, error);
  if (status) {
    session_free(session);
    return status;
  }
  *result = session;
  return HL_OK;
}

/* Connected to all servers. */
static int session_connected(hl__memcached_store *store, hl__memcached_session **result,
                             hl_error *error) {
  int64_t deadline = hl__now_ms() + store->connect_timeout;
  int status = session_make(store, result, error);
  for (unsigned i = 0; i < store->server_count && status == HL_OK; i++)
    status = hl__memcached_connect(*result, &(*result)->links[i], deadline, error);
  if (status) {
    session_free(*result);
    *result = NULL;
  }
  return status;
}

static void session_close(hl_session *session) { session_free(hl__memcached_session_of(session)); }

/* ------------------------------------------------------------ the store */

static void store_close(hl_store *base) {
  hl__memcached_store *store = (hl__memcached_store *)(void *)base;
  if (base->first) session_close(base->first);
  (void)pthread_mutex_destroy(&store->mutex);
  hl_layout_unref(base->layout);
  free(store);
}

static int store_open(const hl_store_config *config, hl_store **result, hl_error *error) {
  hl__memcached_store *store = calloc(1, sizeof *store);
  if (!store) return hl__error_memory(error);
  store->base.leases = &hl__memcached_leases;
  store->config = config;
  (void)pthread_mutex_init(&store->mutex, NULL);
  hl__memcached_session *first = NULL;
  int status = hl__memcached_params(store, error);
  if (status == HL_OK) status = session_connected(store, &first, error);
  if (first) store->base.first = &first->base;
  if (status) {
    store_close(&store->base);
    return status;
  }
  *result = &store->base;
  return HL_OK;
}

/* A session connects to a server when it first needs that server. */
static int session_open(hl_store *base, int64_t deadline, hl_session **result, hl_error *error) {
  hl__memcached_store *store = (hl__memcached_store *)(void *)base;
  hl__memcached_session *session = NULL;
  int status = session_make(store, &session, error);
  /* With a single server: connect now, as other stores do. */
  if (status == HL_OK && store->server_count == 1)
    status = hl__memcached_connect(session, &session->links[0], deadline, error);
  if (status) {
    session_free(session);
    session = NULL;
  }
  *result = session ? &session->base : NULL;
  return status;
}

/* ------------------------------------------------------------ a session */

static int renew(hl_session *base, int64_t *sent_ms, hl_error *error) {
  hl__memcached_session *session = hl__memcached_session_of(base);
  *sent_ms = hl__boot_ms();
  for (unsigned i = 0; i < session->store->server_count; i++) {
    hl__memcached_link *link = &session->links[i];
    if (link->fd < 0) continue;
    hl__memcached_addf(&link->out, "mn\r\n");
    int status = hl__memcached_flush(link, error);
    if (status) return status;
    link->outstanding++;
  }
  return HL_OK;
}

static int settle(hl_session *base, int64_t deadline, hl_error *error) {
  hl__memcached_session *session = hl__memcached_session_of(base);
  /* Where it does not wait, an interruption is late. */
  if (deadline == 0) (void)hl__wakeup_interruption_take(&session->wakeup);
  return hl__memcached_settle(session, deadline, error);
}

static int session_check(hl_session *base, hl_error *error) {
  if (hl__memcached_stands(hl__memcached_session_of(base))) return HL_OK;
  return hl__error(error, HL_ECONNECTION, "the server has closed the connection");
}

static void interrupt(hl_session *base) {
  hl__wakeup_interrupt(&hl__memcached_session_of(base)->wakeup);
}

const hl_store_ops hl_store_memcached = {
    .abi = HL_STORE_ABI,
    .scheme = "memcached",
    .traits = {.scarce = true,
               .expires = true,
               .blocks = true,
               .leases_only = true,
               .drop_sends = true,
               .updates = true,
               .leases_update = true},
    .parse = hl__memcached_dsn,
    .open = store_open,
    .close = store_close,
    .session_open = session_open,
    .session_close = session_close,
    .take = hl__memcached_take,
    .give_back = hl__session_rests,
    .settle = settle,
    .renew = renew,
    .check = session_check,
    .interrupt = interrupt,
    .holders = hl__memcached_holders,
};
