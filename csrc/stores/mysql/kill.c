/*
 * kill.c - ends a wait at the server, on another connection.
 *
 * A client that goes away does not end its wait: the server looks at the socket only afterwards,
 * and the dead waiter keeps the rows that it has got. So the thread that was interrupted has
 * another connection, the killer, tell the server.
 *
 * The killer must be there before it is needed: when a manager is closed whose waits have taken
 * all connections that the server had left, no new one can be had. So the first wait that can be
 * cancelled connects the killer, and the store keeps it. One thread at a time uses the killer; no
 * mutex is held meanwhile.
 */
#include "mysql_store.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

/* A step is the time for each answer of the killer, and for connecting it: a second, or thrice
   what connecting took last. A new killer is tried for KILL_MS, or two steps. A thread that
   waits for its turn does so until the server ends the wait itself. exit() waits for all these
   threads, but not for much longer than KILL_MS (worker.c). */
#define KILL_MS 2000
#define KILL_STEP_MS 1000
/* The server had no connection left: the sessions that are being killed give some back. */
#define KILL_AGAIN_NS 20000000L

static bool killer_take(hl__mysql_store *store, int64_t deadline) {
  hl__server_wait_begin(store->config);
  hl__mysql_store_lock(store);
  while (store->killing && hl__left_ms(deadline) > 0)
    hl__cond_wait(&store->killed, &store->mutex, deadline);
  bool taken = !store->killing;
  if (taken) store->killing = true;
  hl__mysql_store_unlock(store);
  hl__server_wait_end(store->config);
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

/* The calling thread has taken the killer. */
static int killer_connect(hl__mysql_store *store, hl_error *error) {
  int64_t deadline = hl__now_ms() + killer_step(store);
  int status = hl__mysql_connect(store, deadline, &store->killer, error);
  if (status) return status;
  store->killer->patience = deadline;
  status = hl__mysql_identify(store->killer, error);
  if (status) killer_drop(store);
  return status;
}

void hl__mysql_killer_prepare(hl__mysql_store *store, int64_t ms) {
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

/* Kills the session, if the killer is connected to the very server that gave the session its
   number; else the number may be an innocent's. A server that starts again ends the killer's
   connection, so the server stays the same between the comparison and the KILL. (Numbers of 32
   bits come again after four thousand million connections in one life of a server. We do not
   look for that.) False: the killer is of no use; it is connected to another server, or to none. */
static bool killer_kill(hl__mysql_store *store, const hl__mysql_session *session) {
  hl__mysql_session *killer = store->killer;
  if (strcmp(killer->server, session->server) != 0) return false;
  char sql[64];
  int n = snprintf(sql, sizeof sql, "KILL %lu", session->id);
  MYSQL_RES *none;
  killer->patience = hl__now_ms() + killer_step(store);
  /* The server may have no such connection any more: so much the better. */
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
    if (!hl__mysql_error_is(error.server_errno, HL__MYSQL_FULL)) break;
    (void)nanosleep(&again, NULL);
  }
out:
  killer_give(store);
}
