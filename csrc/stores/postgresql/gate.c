/*
 * gate.c - finds out whether there are leases, and waits for those that are in the way.
 *
 * A lease is a record in tables (tables.c). A session writes it while it has the lease's rows
 * locked. A request that locks one of these rows later must see the record. Without leases this
 * must cost next to nothing.
 *
 * - The gate is a sequence, public.hier_lock_gate: 2 if there may be leases, else 1.
 *   A sequence has no versions: all transactions read a new value at once. So the
 *   value can be a column of the locking statement, evaluated after the locks. (A table read
 *   there would show what was committed before the wait.) A session sets it to 2 before it
 *   commits a record. A session that sets it to 1 has made sure that no session is about to
 *   commit a record: see record.c and tables.c.
 * - If the gate does not exist, the statement must not search for it in the server's cache,
 *   which is updated only when a statement locks a relation. So the statement locks an
 *   arbitrary one (pg_class), after the rows, and finds a gate made during the wait.
 * - If the gate is open, a statement of its own reads the records, with a snapshot of its
 *   own. A session that expects an open gate sends it in the same round trip.
 * - A role that may not read the schema asks pg_class in a statement of its own, and is
 *   refused if there is a gate.
 *
 * A request that finds a lease in its way keeps its rows, and polls, until it is told that the
 * lease has ended (bell.c). The request deletes an expired lease, in one statement that checks
 * again, on a connection of its own, as its transaction ends with ROLLBACK. The requests behind it
 * sleep in the server's queue. Many requests can be first in a queue below one lease. Then one of
 * them polls, and has the lead: an advisory lock of two numbers, held by the session. The others
 * wait for the lead. The session with the lead waits for no lock.
 *
 * But a lease for update may want a row exclusively that such a request keeps. So a request that
 * wants that row itself gives way (HL__BEHIND_UPDATE).
 */
#include "postgresql_store.h"

#include "../judge/judge.h"
#include "mode.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The pause between two polls, in ms: the first, that from which on the request listens, and the
   longest: without and with the bell (bell.c). */
#define PAUSE_FIRST_MS 1
#define PAUSE_LISTEN_MS 4
#define PAUSE_LAST_MS 25
#define PAUSE_BELL_MS 100
/* A request that has waited this long for the lead polls itself: the session that has it may have
   been stopped. */
#define LEAD_NET_MS 15000

static int blind_check(hl__pg_session *session, hl_error *error) {
  PGresult *result;
  session->patience = hl__pg_answer_by(session);
  int status =
      hl__pg_query(session,
                   "SELECT count(*) FROM pg_catalog.pg_class WHERE relname='hier_lock_gate' "
                   "AND relnamespace=(SELECT n.oid FROM pg_catalog.pg_namespace n WHERE "
                   "n.nspname='public')",
                   1, &result, error);
  const char *count = hl__pg_field(result, 0, 0);
  session->outdated = status == HL_OK && (!count || *count != '0');
  if (session->outdated)
    status = hl__pg_denied(hl__error(error, HL_ENOT_PROVISIONED,
                                     "there are leases in this database, and no privilege to see "
                                     "them: GRANT USAGE ON SCHEMA public"),
                           error);
  PQclear(result);
  return status;
}

/* Columns. ALONE: no other request can be first in a queue for the row. UPDATE: the lease has the
   update row of a row for which the request gives way; their keys are each other's complement. */
enum { ID, LEFT, ALONE, UPDATE, COLUMNS };
/* Finds exclusive rows of all keys, and all rows of keys wanted exclusively, by one index scan
   each. With one condition, the server would read all rows of an ancestor, one for each lease below
   it. Parameters: exclusive, upgradable, keys, exclusive, exempt. */
#define CONFLICTS                                                                                  \
  "SELECT l.id," HL__PG_LEFT ","                                                                   \
  "bool_or(r.key=ANY('%s'::int8[])),bool_or(r.key=ANY('%s'::int8[]) AND "                          \
  "EXISTS(SELECT FROM public.hier_lock_lease_rows u WHERE u.id=r.id AND "                          \
  "u.key=(~r.key))) FROM (SELECT id,key FROM public.hier_lock_lease_rows "                         \
  "WHERE exclusive AND key=ANY('%s'::int8[]) UNION ALL SELECT id,key FROM "                        \
  "public.hier_lock_lease_rows WHERE key=ANY('%s'::int8[])) r "                                    \
  "JOIN public.hier_lock_leases l ON l.id=r.id WHERE true%s "                                      \
  "GROUP BY l.id,l.till ORDER BY l.till LIMIT 50"

/* A wait for leases. */
typedef struct wait {
  hl__pg_session *session;
  const hl_request *request;
  char tag[HL__PG_TAG_MAX];
  const char *sql;
  PGresult *found;
  int64_t nearest; /* ms until the first lease ends */
  int64_t sent;
  uint32_t seed;
  /* The store's ear, or NULL; the lease for which it last listened; whether it hears its end. */
  hl__pg_session *ear;
  char listened[40];
  bool hears;
} wait;

/* The keys of the rows for which the request gives way. */
static char *upgradable(const hl_layout *layout, const hl_request *request) {
  size_t n = request->gives_way ? request->n : 0, kept = 0;
  hl_row *rows = malloc((n + 1) * sizeof *rows);
  if (!rows) return NULL;
  for (size_t i = 0; i < n; i++)
    if (hl__may_upgrade(layout, &request->rows[i])) rows[kept++] = request->rows[i];
  char *keys = hl__pg_keys(rows, kept, false);
  free(rows);
  return keys;
}

/* The query for leases in the way, behind a comment; the caller frees it. NULL: out of memory. */
static char *conflicts_text(const hl__pg_session *session, const char *tag,
                            const hl_request *request) {
  char *keys = hl__pg_keys(request->rows, request->n, false);
  char *exclusive = hl__pg_keys(request->rows, request->n, true);
  char *behind = upgradable(session->store->base.layout, request);
  char exempt[64] = "", *sql = NULL;
  if (request->exempt) {
    char *at = stpcpy(exempt, " AND l.id<>'");
    (void)stpcpy(hl__hex(at, request->exempt, 16), "'");
  }
  if (keys && exclusive && behind) {
    size_t size = sizeof CONFLICTS + HL__PG_TAG_MAX + strlen(keys) + 2 * strlen(exclusive) +
                  strlen(behind) + strlen(exempt);
    sql = malloc(size);
    if (sql)
      (void)snprintf(sql, size, "%s" CONFLICTS, tag, exclusive, behind, keys, exclusive, exempt);
  }
  free(keys);
  free(exclusive);
  free(behind);
  return sql;
}

/* Runs a query. An error ends the transaction; the caller undoes it. */
static int ask(wait *self, const char *sql, int columns, hl_error *error) {
  PQclear(self->found);
  self->found = NULL;
  self->sent = hl__boot_ms();
  self->session->patience = hl__pg_answer_by(self->session);
  hl_error said;
  int status = hl__pg_query(self->session, sql, columns, &self->found, &said);
  if (status == HL_OK) return status;
  /* Not by our request, so the locks are not certain. */
  if (status == HL_CANCELLED) status = said.status = HL_ECONNECTION;
  /* Provisioning does not help against other errors. */
  if (status == HL_ESTORE && hl__pg_state_is(said.sqlstate, HL__PG_OBJECT)) {
    status = hl__error(error, HL_ENOT_PROVISIONED,
                       "there are leases, and they cannot be looked at: %.200s", said.message);
    if (error) memcpy(error->sqlstate, said.sqlstate, sizeof error->sqlstate);
  } else if (error) {
    *error = said;
  }
  return status;
}

/* The number of leases in the way. Also sets `nearest`. */
static int count(wait *self) {
  int n = self->found ? PQntuples(self->found) : 0;
  const char *left = hl__pg_field(self->found, 0, LEFT);
  self->nearest = left ? strtoll(left, NULL, 10) : 0;
  return n;
}

/* ------------------------------------------------------------ expired leases */

/* Deletes the leases found that have expired, and the record of an earlier try of this request that
   was not answered. */
static int over_delete(wait *self, hl_error *error) {
  const hl_lease_terms *own = self->request->lease;
  char ids[50 * 40 + 16] = "", mine[40] = "", sql[sizeof ids + 700];
  size_t used = 0;
  if (own) (void)hl__hex(mine, own->former, 16);
  for (int i = 0; i < PQntuples(self->found) && i < 50; i++) {
    const char *id = hl__pg_field(self->found, i, ID);
    const char *left = hl__pg_field(self->found, i, LEFT);
    if (!id || !left || strlen(id) != 36) continue;
    char plain[40], *at = plain;
    for (const char *c = id; *c; c++)
      if (*c != '-') *at++ = *c;
    *at = '\0';
    if (strtoll(left, NULL, 10) > 0 && strcmp(plain, mine) != 0) continue;
    used += (size_t)snprintf(ids + used, sizeof ids - used, "%s%s", used ? "," : "", plain);
  }
  if (!used) return HL_OK;
  (void)snprintf(sql, sizeof sql,
                 "WITH gone AS (DELETE FROM public.hier_lock_leases WHERE id IN (SELECT "
                 "l.id FROM public.hier_lock_leases l WHERE l.id=ANY('{%s}'::uuid[]) AND "
                 "(l.till<=clock_timestamp()%s%s%s) FOR UPDATE SKIP LOCKED) RETURNING id) "
                 "DELETE FROM public.hier_lock_lease_rows r USING gone WHERE r.id=gone.id",
                 ids, own ? " OR l.id='" : "", mine, own ? "'" : "");
  int status = hl__pg_aside(self->session, sql, error);
  /* The server was too slow for that, or takes no further connection; our own stands. The record
     stays in the way. */
  bool later = status == HL_CANCELLED || status == HL_TIMEOUT || status == HL_ECONNECTION;
  return later ? HL_OK : status;
}

/* ----------------------------------------------------------------- pauses */

static bool is_found(const wait *self, const char *id) {
  for (int i = 0; i < PQntuples(self->found); i++) {
    const char *other = hl__pg_field(self->found, i, ID);
    if (other && strcmp(other, id) == 0) return true;
  }
  return false;
}

static void ear_leave(wait *self, bool failed) {
  if (self->ear) hl__pg_ear_give(self->ear, failed);
  self->ear = NULL;
  self->hears = false;
  if (failed) *self->listened = '\0'; /* again when there is another ear */
}

/* Listens for the end of the first lease, if the request has polled for a while, and does not
   listen yet for the end of one that is in the way. */
static void ear_listen(wait *self, const char *first, int64_t pause) {
  if (pause < PAUSE_LISTEN_MS || !self->session->rings || is_found(self, self->listened)) return;
  self->hears = false;
  if (hl__pg_ear_listen(self->session, &self->ear, first, self->request->deadline))
    (void)snprintf(self->listened, sizeof self->listened, "%s", first);
}

/* Sleeps, until the bell rings, or until interrupted. HL_ECONNECTION if the connection ends; while
   the request listens, the next poll finds that out. */
static int nap(wait *self, int64_t ms) {
  hl__pg_session *session = self->session, *heard = self->ear ? self->ear : session;
  int64_t end = hl__now_ms() + ms;
  do {
    int status = hl__socket_await(session->store->config, heard->fd, POLLIN, &session->wakeup, end);
    if (status) return status == HL_TIMEOUT ? HL_OK : status;
    if (!self->ear && !hl__pg_stands(session)) return HL_ECONNECTION;
    if (!self->ear) continue;
    status = hl__pg_ear_read(self->ear, &self->hears);
    if (status == HL_TIMEOUT) continue;
    if (status || !self->hears) ear_leave(self, status != HL_OK);
    return HL_OK;
  } while (hl__left_ms(end) > 0);
  return HL_OK;
}

static uint32_t chance(wait *self) {
  self->seed = self->seed * 1664525u + 1013904223u;
  return self->seed >> 16;
}

/* The pause until the next poll. The pause grows each time, but ends with the first lease and the
   deadline. */
static int64_t pause_ms(wait *self, int64_t *pause) {
  int64_t ms = *pause + chance(self) % (uint32_t)(*pause + 1);
  int64_t last = self->hears ? PAUSE_BELL_MS : PAUSE_LAST_MS;
  if (ms > last) ms = last - chance(self) % 5;
  if (*pause < last) *pause *= 2;
  if (self->nearest > 0 && self->nearest < ms) ms = self->nearest;
  int64_t left = hl__left_ms(self->request->deadline);
  if (left < ms) ms = left;
  return ms > 0 ? ms : 1;
}

/* --------------------------------------------------------------- the lead */

static void lead_of(const char *id, char numbers[32]) {
  char high[9] = "0", low[9] = "0";
  if (strlen(id) == 36) {
    memcpy(high, id, 8);
    memcpy(low, id + 9, 4);
    memcpy(low + 4, id + 14, 4);
    high[8] = low[8] = '\0';
  }
  (void)snprintf(numbers, 32, "%" PRId32 ",%" PRId32, (int32_t)(uint32_t)strtoul(high, NULL, 16),
                 (int32_t)(uint32_t)strtoul(low, NULL, 16));
}

/* Tries to take the lead. */
static int lead_try(wait *self, const char *numbers, bool *ours, hl_error *error) {
  char sql[HL__PG_TAG_MAX + 128];
  (void)snprintf(sql, sizeof sql, "%sSELECT pg_try_advisory_lock(%s)", self->tag, numbers);
  int status = ask(self, sql, 1, error);
  const char *got = hl__pg_field(self->found, 0, 0);
  *ours = got && *got == 't';
  return status;
}

static int lead_leave(wait *self, const char *numbers, hl_error *error) {
  char sql[HL__PG_TAG_MAX + 128];
  (void)snprintf(sql, sizeof sql, "%sSELECT pg_advisory_unlock(%s)", self->tag, numbers);
  return ask(self, sql, 1, error);
}

/* Waits in the server's queue until the session with the lead leaves it, at most LEAD_NET_MS. If a
   wait ends at the very moment of its grant, the lock may remain; so it belongs to the transaction,
   and goes with the savepoint or the ROLLBACK. */
static int lead_await(wait *self, const char *numbers, hl_error *error) {
  char sql[HL__PG_TAG_MAX + 256];
  int64_t most = hl__left_ms(self->request->deadline);
  if (most > LEAD_NET_MS) most = LEAD_NET_MS;
  int64_t end = hl__now_ms() + most;
  self->sent = hl__boot_ms();
  (void)snprintf(sql, sizeof sql,
                 "%sSAVEPOINT hierlock_lead;SET LOCAL lock_timeout=0;"
                 "SET LOCAL statement_timeout=%" PRId64 ";SELECT pg_advisory_xact_lock_shared(%s);"
                 "ROLLBACK TO SAVEPOINT hierlock_lead;"
                 "RELEASE SAVEPOINT hierlock_lead",
                 self->tag, most + 1, numbers);
  int status = hl__pg_wait_run(self->session, self->request, sql, error);
  if (status != HL_CANCELLED || atomic_load(&self->session->wakeup.interrupted) ||
      hl__now_ms() < end)
    return status;
  return hl__pg_wait_run(self->session, self->request,
                         "ROLLBACK TO SAVEPOINT hierlock_lead;"
                         "RELEASE SAVEPOINT hierlock_lead",
                         error);
}

/* ------------------------------------------------------------------ waiting */

static int cancelled(wait *self, int status, hl_error *error) {
  if (status == HL_CANCELLED) return hl__error(error, status, "the wait was cancelled");
  return hl__pg_gone(self->session, error);
}

/* Deletes expired leases. Polls again if no unexpired one was in the way. */
static int over_take(wait *self, hl_error *error) {
  bool left = self->nearest > 0;
  if (left && !self->request->lease) return HL_OK;
  int status = over_delete(self, error);
  if (status || left) return status;
  return ask(self, self->sql, COLUMNS, error);
}

/* Whether a lease may want to make a row exclusive that the request keeps. */
static bool is_behind_update(const wait *self) {
  for (int i = 0; i < PQntuples(self->found); i++) {
    const char *update = hl__pg_field(self->found, i, UPDATE);
    if (update && *update == 't') return true;
  }
  return false;
}

/* Waits, then polls once. id: the lease for which the request has the lead, or "". */
static int poll_once(wait *self, int64_t *pause, char id[40], hl_error *error) {
  char numbers[32];
  const char *first = hl__pg_field(self->found, 0, ID);
  const char *alone = hl__pg_field(self->found, 0, ALONE);
  if (!first || !alone)
    return hl__error(error, HL_ECONNECTION, "the server answers what was not asked");
  bool ours = *id != '\0';
  if (!ours && *alone != 't') {
    (void)snprintf(id, 40, "%s", first);
    lead_of(id, numbers);
    int status = lead_try(self, numbers, &ours, error);
    if (!ours) *id = '\0';
    ear_leave(self, false);
    if (status == HL_OK && !ours) status = lead_await(self, numbers, error);
    if (status) return status;
    if (!ours) return ask(self, self->sql, COLUMNS, error);
  } else {
    ear_listen(self, first, *pause);
  }
  int status = nap(self, pause_ms(self, pause));
  if (status) return cancelled(self, status, error);
  status = ask(self, self->sql, COLUMNS, error);
  if (status || !ours || is_found(self, id)) return status;
  /* The lease is gone: leave its lead. */
  PGresult *found = self->found;
  self->found = NULL;
  lead_of(id, numbers);
  *id = '\0';
  status = lead_leave(self, numbers, error);
  PQclear(self->found);
  self->found = found;
  return status;
}

/* Polls until no lease is in the way. Begins with self->found. */
static int poll_until_free(wait *self, hl_error *error) {
  int64_t pause = PAUSE_FIRST_MS;
  char id[40] = "", numbers[32];
  int status = HL_OK;
  while (status == HL_OK && count(self) > 0) {
    status = over_take(self, error);
    if (status || count(self) == 0) break;
    if (self->request->try_once || hl__left_ms(self->request->deadline) == 0)
      status = hl__error(error, HL_TIMEOUT, "a lease is in the way");
    else if (is_behind_update(self))
      status = HL__BEHIND_UPDATE;
    else
      status = poll_once(self, &pause, id, error);
  }
  if (!*id || status == HL_ECONNECTION) return status;
  hl_error reason;
  lead_of(id, numbers);
  int left = lead_leave(self, numbers, &reason);
  if (left == HL_OK) return status;
  if (error) *error = reason;
  return HL_ECONNECTION;
}

/* Gets a new token. The tag tells observers that the request no longer waits. */
static int waited(hl__pg_taking *taking, hl_error *error) {
  hl__pg_session *session = taking->session;
  char sql[128] = "SELECT ";
  (void)hl__pg_token(session, sql + strlen(sql), sizeof sql - strlen(sql));
  int status = hl__pg_command(session, taking->tag, sql, &taking->sent, error);
  if (status) return status;
  const char *number = hl__pg_field(session->kept, 0, 0);
  if (!number) return hl__error(error, HL_ECONNECTION, "the server answers what was not asked");
  taking->token = strtoull(number, NULL, 10);
  return HL_OK;
}

int hl__pg_leases_await(hl__pg_taking *taking, const hl_request *request, hl_error *error) {
  hl__pg_session *session = taking->session;
  if (session->blind) return blind_check(session, error);
  if (session->gate != HL__PG_GATE_OPEN) return HL_OK;
  wait self = {.session = session,
               .request = request,
               .found = session->second,
               .seed = (uint32_t)session->backend * 2654435761u + (uint32_t)hl__now_ms()};
  session->second = NULL;
  session->holds = true;
  int status = HL_OK;
  /* The query in the same trip says only whether there is a lease. */
  if (!self.found || PQnfields(self.found) != 1 || PQntuples(self.found) > 0) {
    char *first = conflicts_text(session, taking->tag, request);
    status = first ? ask(&self, first, COLUMNS, error) : hl__error_memory(error);
    free(first);
  }
  if (status == HL_OK && PQntuples(self.found) > 0) {
    memcpy(self.tag, taking->tag, sizeof self.tag);
    hl__pg_tag_waits(self.tag);
    char *later = conflicts_text(session, self.tag, request);
    self.sql = later;
    status = later ? poll_until_free(&self, error) : hl__error_memory(error);
    free(later);
    if (status == HL_OK) status = waited(taking, error);
  } else if (status == HL_OK && self.sent) {
    status = waited(taking, error); /* a lease was there, and is gone */
  }
  ear_leave(&self, false);
  PQclear(self.found);
  return status;
}
