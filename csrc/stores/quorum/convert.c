/*
 * convert.c - what a lease has at a quorum comes to be in another mode.
 *
 * Upgraded it is when a quorum of those that are in it has made its rows
 * exclusive (take.c). The others are out of it from then on: their record is in
 * the mode of before, and keeps nobody out who may not be let in. It is
 * dropped, and made anew, when the lease is healed, or upgraded late, by an
 * answer that nobody waited for.
 *
 * A downgrade keeps everybody in: an exclusive record keeps out all that one
 * for update does, and more. Where it could not be asked for, the record counts
 * as long as it is needed.
 *
 * A member is asked for one of them at a time, so that none is carried out
 * behind a later one. One that was sent on a connection that has ended since is
 * refused by the member itself: see the tokens of hl_lease_ops.convert.
 */
#include "quorum.h"

/* HL_OK: a quorum has done it. */
static int answers(hl__quorum_session *session, hl__quorum_ask **asks)
    HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_store *store = hl__quorum_store_of(&session->base);
  int64_t end = hl__now_ms() + HL__QUORUM_ANSWER_MS;
  for (;;) {
    unsigned ok = 0, open = 0, awaited = 0;
    for (unsigned i = 0; i < store->n; i++) {
      if (!asks[i]) continue;
      bool done = asks[i]->state == HL__ASK_DONE;
      ok += done && asks[i]->status == HL_OK;
      open += !done;
      awaited += !done && !store->members[i].suspect;
    }
    /* All of them, as long as they are not known to be slow: readers wait for
     * each. */
    if (ok >= store->need && awaited == 0) return HL_OK;
    if (open == 0 || hl__now_ms() >= end)
      return ok >= store->need ? HL_OK : open > 0 ? HL_TIMEOUT : hl__quorum_failure(store, asks);
    hl__quorum_wait(session, end);
  }
}

static int downgrade(hl__quorum_session *session, hl__quorum_lease *lease, hl__quorum_rows *rows,
                     hl__quorum_rows *shown, hl_error *error) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_store *store = hl__quorum_store_of(&session->base);
  hl__quorum_ask *asks[HL__QUORUM_MAX] = {NULL};
  const hl__quorum_ask *revoked = NULL;
  /* Whether it is answered or not, the handle is for update from now on. */
  shown->references++;
  hl__known_show(lease, shown);
  for (unsigned i = 0; i < store->n; i++) {
    if (!lease->at[i].in) continue;
    if (!lease->at[i].converting)
      asks[i] = hl__ask_new(&store->members[i], HL__ASK_DOWNGRADE, lease, NULL, session);
    if (!asks[i]) {
      hl__known_old(store, lease, i);
      continue;
    }
    hl__ask_rows(asks[i], rows, NULL);
    hl__ask_give(asks[i]);
  }
  int status = answers(session, asks);
  for (unsigned i = 0; i < store->n; i++) {
    if (!asks[i] || asks[i]->state != HL__ASK_DONE) continue;
    if (hl__quorum_is_revoked(asks[i])) revoked = asks[i];
    asks[i]->listener = NULL;
  }
  if (revoked || hl__known_in(store, lease) < store->need) {
    status = hl__quorum_error(store, HL_ELOST, asks, "do not have the lease", error);
    if (revoked && error) *error = revoked->error;
    if (!lease->dropped) hl__quorum_abandon(store, lease);
  } else if (status) {
    (void)hl__quorum_error(store, status, asks, "did not downgrade", error);
  }
  for (unsigned i = 0; i < store->n; i++)
    if (asks[i]) hl__ask_leave(asks[i], false);
  return status;
}

int hl__quorum_convert(hl_session *base, const hl_request *request, hl_grant *grant,
                       hl_error *error) {
  hl__quorum_session *session = (hl__quorum_session *)(void *)base;
  hl__quorum_store *store = hl__quorum_store_of(base);
  if (request->upgrade) return hl__quorum_upgrade(base, request, grant, error);
  hl__quorum_mutex_lock(store);
  hl__quorum_lease *lease = hl__known_find(store, request->lease);
  hl__quorum_rows *rows = hl__rows_new(request->rows, request->n, request->mode);
  hl__quorum_rows *shown = hl__rows_new(request->recorded, request->recorded_n, request->mode);
  int status;
  if (!rows || !shown)
    status = hl__error_memory(error);
  else if (!lease || lease->dropped)
    status = hl__error(error, HL_ELOST, "nothing is known of the lease any more");
  else
    status = downgrade(session, lease, rows, shown, error);
  hl__rows_unref(rows);
  hl__rows_unref(shown);
  hl__known_unref(lease);
  session->interrupted = false;
  hl__quorum_mutex_unlock(store);
  return status;
}
