/*
 * convert.c - a lease at a quorum changes its mode.
 *
 * An upgrade succeeds when a quorum of the members in the lease has made its rows exclusive
 * (take.c). The other members leave the lease: their record is in the old mode, and lets in
 * readers. Healing drops that record and makes it anew, unless a late answer upgrades it first.
 *
 * A downgrade keeps all members in the lease: an exclusive record keeps out all that an update
 * lock does, and more. If a member could not be asked, its record counts as long as a quorum
 * needs it.
 *
 * A member has one conversion of a lease at a time, so it carries none out behind a later one. If
 * the connection ended after a conversion was sent, the member itself refuses that: see the tokens
 * of hl_lease_ops.convert.
 */
#include "quorum_store.h"

/* Waits for the answers. HL_OK: a quorum has done it. */
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
    /* The caller waits for all members that are not suspect: readers wait for each of them. */
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
  /* The handle is for update from now on, also without an answer. */
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
  hl__asks_leave(asks, false);
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
  if (lease && !lease->dropped) grant->until_ms = hl__known_until(store, lease);
  hl__rows_unref(rows);
  hl__rows_unref(shown);
  hl__known_unref(lease);
  session->interrupted = false;
  hl__quorum_mutex_unlock(store);
  return status;
}
