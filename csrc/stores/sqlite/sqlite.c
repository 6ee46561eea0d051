/*
 * sqlite.c - the store's operations: the life of a session. There are leases
 * only: a session is a connection of SQLite's, and holds nothing between two
 * calls.
 */
#include "machine.h"
#include "sqlite_store.h"

#include <stdlib.h>
#include <string.h>

static hl__sqlite_session *session_of(hl_session *session) {
  return (hl__sqlite_session *)(void *)session;
}

/* -------------------------------------------------------------- a session */

static void session_close(hl_session *base) {
  hl__sqlite_session *session = session_of(base);
  hl__sqlite_forks_remove(session);
  hl__sqlite_side_close(session);
  hl__sqlite_side_unmap(session->retired);
  free(session->freed.packed);
  free(session->path);
  free(session);
}

/* Opens what belongs to a session. */
static int session_begin(hl__sqlite_session *session, hl_error *error) {
  hl__sqlite_forks_add(session);
  int status = hl__sqlite_place(session, session->store->config->dsn->path, error);
  if (status == HL_OK) status = hl__sqlite_enter(session, error);
  if (status) return status;
  hl__sqlite_leave();
  return hl__sqlite_side_open(session, error);
}

static int session_open(hl_store *base, int64_t deadline, hl_session **result, hl_error *error) {
  hl__sqlite_store *store = (hl__sqlite_store *)(void *)base;
  *result = NULL;
  (void)deadline;
  hl__sqlite_session *session = calloc(1, sizeof *session);
  if (!session) return hl__error_memory(error);
  session->base.store = base;
  session->store = store;
  session->side_fd = -1;
  int status = session_begin(session, error);
  if (status)
    session_close(&session->base);
  else
    *result = &session->base;
  return status;
}

/* The file was taken away under a request that waits: it goes on in the new one, once. The old
   words stay mapped, as another thread may be interrupting its sleep on one. HL_ECONNECTION: the
   session is of no more use. */
static int session_renew(hl__sqlite_session *session, hl_error *error) {
  if (session->retired) return HL_ECONNECTION;
  hl__sqlite_forks_remove(session);
  session->retired = session->side;
  session->side = NULL;
  hl__sqlite_side_close(session);
  free(session->path);
  session->path = NULL;
  int status = session_begin(session, error);
  return status ? hl__error_as(error, HL_ECONNECTION) : HL_OK;
}

/* -------------------------------------------------------------- the store */

static void store_close(hl_store *base) {
  hl__sqlite_store *store = (hl__sqlite_store *)(void *)base;
  hl_layout_unref(base->layout);
  free(store);
}

static int store_open(const hl_store_config *config, hl_store **result, hl_error *error) {
  hl_session *session;
  hl__sqlite_forks_init();
  if (!sqlite3_threadsafe())
    return hl__error(error, HL_ESTORE, "this SQLite was built for programs without threads");
  hl__sqlite_store *store = calloc(1, sizeof *store);
  if (!store) return hl__error_memory(error);
  store->base.leases = &hl__sqlite_leases;
  store->config = config;
  int status = HL_OK;
  if (hl__boot_id(store->boot) != 0)
    status = hl__error_errno(error, HL_ESTORE, "cannot read the id of this boot in /proc");
  if (status == HL_OK) status = hl__sqlite_params(store, error);
  if (status == HL_OK) status = session_open(&store->base, 0, &session, error);
  if (status) {
    store_close(&store->base);
    return status;
  }
  session_close(session);
  *result = &store->base;
  return HL_OK;
}

/* ---------------------------------------------------------- between calls */

static int take(hl_session *base, const hl_request *request, hl_grant *grant, hl_error *error) {
  hl__sqlite_session *session = session_of(base);
  hl__sqlite_sweep(session);
  int status = hl__sqlite_take(session, request, grant, error);
  if (status == HL_ECONNECTION && session_renew(session, error) == HL_OK)
    status = hl__sqlite_take(session, request, grant, error);
  atomic_store(&session->interrupted, false); /* a late one: settle */
  return status;
}

static int settle(hl_session *base, int64_t deadline, hl_error *error) {
  (void)deadline, (void)error;
  atomic_store(&session_of(base)->interrupted, false);
  return HL_OK;
}

/* Whether the file is still there is looked at in each transaction. */
static int session_check(hl_session *base, hl_error *error) {
  const hl__sqlite_session *session = session_of(base);
  return session->side ? HL_OK : hl__sqlite_moved_error(session, error);
}

static void interrupt(hl_session *base) { hl__sqlite_interrupt(session_of(base)); }

static int holders(hl_session *base, const hl_lease_filter *filter, hl_holder_fn fn, void *context,
                   int64_t deadline, hl_error *error) {
  (void)deadline;
  return hl__sqlite_holders(session_of(base), filter, fn, context, error);
}

const hl_store_ops hl_store_sqlite = {
    .abi = HL_STORE_ABI,
    .scheme = "sqlite",
    .traits = {.scarce = true,
               .blocks = true,
               .leases_only = true,
               .updates = true,
               .leases_update = true},
    .parse = hl__sqlite_dsn,
    .open = store_open,
    .close = store_close,
    .session_open = session_open,
    .session_close = session_close,
    .take = take,
    .give_back = hl__session_rests,
    .settle = settle,
    .renew = hl__session_renewed,
    .check = session_check,
    .interrupt = interrupt,
    .holders = holders,
};
