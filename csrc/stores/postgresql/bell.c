/*
 * bell.c - tells a waiter that the lease in its way has ended.
 *
 * A request that finds a lease in its way polls (gate.c). After some polls it also listens. A
 * session gets its notifications between transactions only, and the request's transaction keeps
 * its rows. So another connection listens, the store's ear. One waiter at a time has the ear; the
 * others poll. The store keeps the ear, as connecting takes longer than a poll, until its last
 * session ends.
 *
 * In one transaction the ear listens on a channel of the lease and marks its record: `reason`,
 * which else only a revoked record has, is no longer NULL. A statement that ends a lease notifies
 * the channel if it finds the mark (HL__PG_BELL). Both statements lock the record, so the server
 * orders them: the later one finds the mark, or it marks nothing, and the waiter polls at once. A
 * release without a waiter pays nothing: a notification takes a lock of the whole server.
 *
 * A waiter that listens still polls, but seldom, as an older program ends a lease in silence. So a
 * mark or a notification that is lost delays a waiter, and does no other harm.
 */
#include "postgresql_store.h"

#include <stdio.h>
#include <stdlib.h>

/* How long connecting may take, as the waiter does not poll meanwhile: at first, and at most. */
#define CONNECT_FIRST_MS 100
#define CONNECT_LAST_MS 1000
/* How long waiters only poll after the ear has failed: at first, and at most. A server that is full
   writes each refusal into its log. */
#define REST_FIRST_MS 500
#define REST_LAST_MS 60000

static void ear_fail(hl__pg_store *store) {
  int64_t rest = 2 * store->ear_rest;
  if (rest < REST_FIRST_MS) rest = REST_FIRST_MS;
  if (rest > REST_LAST_MS) rest = REST_LAST_MS;
  hl__pg_disconnect(store->ear);
  store->ear = NULL;
  store->ear_rest = rest;
  store->ear_after = hl__now_ms() + rest;
}

/* The longer waiters have rested, the longer it may take: the server may be busy. */
static void ear_open(hl__pg_session *session, int64_t deadline) {
  hl__pg_store *store = session->store;
  int64_t now = hl__now_ms(), patience = CONNECT_FIRST_MS + store->ear_rest / 4;
  int64_t end = now + (patience < CONNECT_LAST_MS ? patience : CONNECT_LAST_MS);
  hl_error error;
  if (now < store->ear_after || end >= deadline) return;
  if (hl__pg_aside_open(session, end, &store->ear, &error)) ear_fail(store);
}

/* NULL: another waiter has the ear, or there is none now. */
static hl__pg_session *ear_take(hl__pg_session *session, int64_t deadline) {
  hl__pg_store *store = session->store;
  if (atomic_exchange(&store->ear_taken, true)) return NULL;
  if (!store->ear) ear_open(session, deadline);
  int status = store->ear ? hl__pg_settle(store->ear, 0, false, NULL) : HL_TIMEOUT;
  if (status == HL_OK && hl__pg_stands(store->ear)) return store->ear;
  if (status != HL_TIMEOUT) ear_fail(store);
  atomic_store(&store->ear_taken, false);
  return NULL;
}

void hl__pg_ear_give(hl__pg_session *ear, bool failed) {
  hl__pg_store *store = ear->store;
  if (failed || (!ear->outstanding && hl__pg_send(ear, "UNLISTEN *", NULL))) ear_fail(store);
  atomic_store(&store->ear_taken, false);
}

void hl__pg_ear_end(hl__pg_store *store) {
  if (atomic_exchange(&store->ear_taken, true)) return; /* by a waiter with a new session */
  hl__pg_disconnect(store->ear);
  store->ear = NULL;
  atomic_store(&store->ear_taken, false);
}

bool hl__pg_ear_listen(hl__pg_session *session, hl__pg_session **ear, const char *id,
                       int64_t deadline) {
  char sql[320];
  if (!*ear) *ear = ear_take(session, deadline);
  if (!*ear || (*ear)->outstanding) return false;
  (void)snprintf(
      sql, sizeof sql,
      "SET synchronous_commit=off;UNLISTEN *;LISTEN \"hierlock_%.36s\";"
      "UPDATE public.hier_lock_leases SET reason='' WHERE id='%.36s' AND revoked IS NULL",
      id, id);
  if (hl__pg_send(*ear, sql, NULL) == HL_OK) return true;
  hl__pg_ear_give(*ear, true);
  *ear = NULL;
  return false;
}

int hl__pg_ear_read(hl__pg_session *ear, bool *marked) {
  int status = HL_TIMEOUT;
  if (ear->outstanding) {
    status = hl__pg_settle(ear, 0, false, NULL);
    if (status) return status;
    *marked = atoi(PQcmdTuples(ear->kept)) == 1;
    if (*marked) ear->store->ear_rest = 0;
  } else if (!hl__pg_stands(ear)) {
    return HL_ECONNECTION;
  }
  for (PGnotify *one; (one = PQnotifies(ear->connection)); PQfreemem(one)) status = HL_OK;
  return status;
}
