/*
 * store.c - the embedded store: locks between the processes and threads of one machine, without a
 * server. Here are the store and its hl_store_ops; see embedded_store.h.
 *
 * Nothing is ever outstanding: each call ends its work before it returns.
 */
#include "embedded_store.h"

#include <stdlib.h>
#include <string.h>

/* How long an observer waits until the dead are out of its sight: another process may be stopped
   where it keeps that up. */
#define MENDED_NS 100000000
/* How often a call begins anew because the directory was removed under it. */
#define REOPEN_MAX 3

/* ----------------------------------------------------------------- store */

/* Unchecked, as store_close: no other thread has the store. */
HL__UNCHECKED static int store_open(const hl_store_config *config, hl_store **result,
                                    hl_error *error) {
  const hl_dsn *dsn = config->dsn;
  *result = NULL;
  hl__embedded_store *store = calloc(1, sizeof *store);
  if (!store) return hl__error_memory(error);
  store->base.leases = &hl__embedded_leases;
  store->config = config;
  int status = HL_OK;
  if (config->interoperates) status = hl__flock_directory(dsn, &store->flocks, error);
  if (status == HL_OK)
    status = hl__shm_space_open(config, dsn->path, &store->base.layout, &store->space, error);
  if (status) {
    free(store->flocks);
    free(store);
    return status;
  }
  (void)pthread_mutex_init(&store->mutex, NULL);
  *result = &store->base;
  return HL_OK;
}

HL__UNCHECKED static void store_close(hl_store *base) {
  hl__embedded_store *store = (hl__embedded_store *)(void *)base;
  hl__shm_space_unref(store->space);
  (void)pthread_mutex_destroy(&store->mutex);
  free(store->flocks);
  hl_layout_unref(base->layout);
  free(store);
}

/* --------------------------------------------------------------- locking */

static int rows_take(hl__embedded_session *session, const hl_request *request, hl_grant *grant,
                     hl_error *error) {
  int status = hl__embedded_session_take(session, request, 0, error);
  return status ? status : hl__embedded_grant(session, request, grant, error);
}

static int session_take(hl_session *base, const hl_request *request, hl_grant *grant,
                        hl_error *error) {
  hl__embedded_session *session = hl__embedded_session_of(base);
  int status, tries = 0;
  do {
    status = request->extend ? HL_OK : hl__embedded_session_refresh(session, error);
    if (status == HL_OK) status = rows_take(session, request, grant, error);
    /* The table forgets an interruption when the directory is gone: then it must not wait again. */
  } while (status == HL_ECONNECTION && !request->extend && !atomic_load(&session->interrupted) &&
           ++tries < REOPEN_MAX);
  /* settle forgets an interruption that comes later. */
  atomic_store(&session->interrupted, false);
  return status;
}

/* Gives the claims back that the upgrade has added. */
static int session_downgrade(hl_session *base, const hl_request *request, int64_t *sent_ms,
                             hl_error *error) {
  hl__embedded_session *session = hl__embedded_session_of(base);
  int status = hl__embedded_session_check(session, error);
  if (status) return status;
  for (size_t i = request->n; i-- > 0;) {
    hl_row row = request->rows[i];
    row.mode = HL_EXCLUSIVE;
    (void)hl__shm_give_back_row(session->table, &row);
  }
  hl__shm_tell_mode(session->table, request->mode);
  *sent_ms = hl__boot_ms();
  return HL_OK;
}

static int session_give_back(hl_session *base, hl_error *error) {
  (void)error;
  hl__embedded_session_clear(hl__embedded_session_of(base));
  return HL_OK;
}

/* ------------------------------------------------------------ the rest */

static int session_check(hl_session *base, hl_error *error) {
  return hl__embedded_session_check(hl__embedded_session_of(base), error);
}

static int session_renew(hl_session *base, int64_t *sent_ms, hl_error *error) {
  *sent_ms = hl__boot_ms();
  return session_check(base, error);
}

/* Nothing is outstanding but an interruption that came when the call for which it was meant had
   ended. */
static int session_settle(hl_session *base, int64_t deadline, hl_error *error) {
  (void)deadline, (void)error;
  hl__embedded_session *session = hl__embedded_session_of(base);
  atomic_store(&session->interrupted, false);
  atomic_store(&session->table->cancelled, false);
  return HL_OK;
}

/* While another thread waits for more rows. The session holds some, so it stays in the space in
   which it is. */
static bool session_told(hl_session *base) {
  hl__embedded_session *session = hl__embedded_session_of(base);
  hl__embedded_guard_lock(session);
  bool lost = hl__shm_check(session->table->space, true, NULL) != HL_OK;
  hl__embedded_guard_unlock(session);
  return lost;
}

static void session_interrupt(hl_session *base) {
  hl__embedded_session *session = hl__embedded_session_of(base);
  atomic_store(&session->interrupted, true);
  hl__embedded_guard_lock(session);
  hl__shm_cancel(session->table);
  hl__embedded_guard_unlock(session);
}

static int session_holders(hl_session *base, const hl_lease_filter *filter, hl_holder_fn fn,
                           void *context, int64_t deadline, hl_error *error) {
  hl__embedded_session *session = hl__embedded_session_of(base);
  int status = hl__embedded_session_refresh(session, error);
  if (status) return status;
  hl__shm_space *space = session->table->space;
  /* What dead processes held is in the table until it is mended. */
  const int64_t end = hl__shm_ns(deadline), most = hl__shm_now() + MENDED_NS;
  hl__shm_sweep_out(space, end < most ? end : most);
  hl__embedded_leases_list(space, filter, fn, context);
  return hl__embedded_sessions_list(space, filter, fn, context, error);
}

const hl_store_ops hl_store_file = {
    .abi = HL_STORE_ABI,
    .scheme = "file",
    .traits = {.updates = true, .leases_update = true},
    .parse = hl__file_dsn,
    .name_key = hl__file_name_key,
    .open = store_open,
    .close = store_close,
    .session_open = hl__embedded_session_open,
    .session_close = hl__embedded_session_close,
    .take = session_take,
    .start = hl__embedded_start,
    .downgrade = session_downgrade,
    .give_back = session_give_back,
    .renew = session_renew,
    .settle = session_settle,
    .check = session_check,
    .told = session_told,
    .interrupt = session_interrupt,
    .holders = session_holders,
};
