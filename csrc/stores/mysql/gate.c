/*
 * gate.c - whether a lease is in the way of rows that a session has just locked.
 *
 * In a space with leases each root shares a row of the gate with other roots: 1 says that there
 * may be leases below them. A session that records a lease holds the rows of its nodes, and sets
 * the gate to 1. A session that locks one of these rows later reads the gate after its wait, in
 * the same statement and last of all; with 1 it reads the records. So no session passes a lease,
 * and where there are no leases the gate costs nothing.
 *
 * The first waiter in the queue polls the records, or has the server look (the lookout), and keeps
 * its place; the others sleep. Below one lease many queues can have a first waiter; then one waiter
 * has the lead of the leased row: see there. A waiter never ignores a record whose time is up: it
 * deletes the record, if its time is still up, in a transaction of another connection, as its own
 * keeps the rows.
 *
 * But the holder of an update lease may want a row exclusively that such a waiter keeps. So a
 * waiter that wants that row exclusively, too, gives way (HL__BEHIND_UPDATE).
 */
#include "mysql_store.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The pause between two polls. */
#define POLL_MIN_US 1000
#define POLL_MAX_US 25000
/* Four times as much: a pause beyond this follows one of POLL_MAX_US. */
#define PAUSE_LAST_US 100000
/* The lookout looks every LOOKOUT_US, so many times at most. */
#define LOOKOUT_US 1000
#define LOOKOUT_LOOKS 1000
/* A look takes no longer on a server that is not too busy. */
#define LOOKOUT_MOST_US 2000
/* After the lookout has failed, waiters poll for so long. */
#define LOOKOUT_REST_MS 10000
/* If the answer to a question of a waiter takes longer than this, the server hangs. A busy server,
   as with hundreds of waiters, may take seconds. */
#define POLL_MS 10000
/* The same where other callers wait for a deletion, or for the rows that the caller holds. */
#define ASIDE_MS 1000
/* A waiter waits this long for a lead, and then polls: the lead's owner may have been stopped. */
#define LEAD_NET_SECONDS 15
/* A poll asks for so many rows at once; more rows need several questions. */
#define POLL_ROWS 256u
/* The most ids that are deleted at once. */
#define EXPIRED_MAX 16u
/* A session that reads 1 and finds no lease in the way tries to shut the gate, one time in so
   many. */
#define SWEEP_PART 32u

static int64_t poll_by(int64_t deadline) {
  return hl__within_ms(POLL_MS, hl__late_answer_by(deadline));
}

int64_t hl__mysql_gate(const hl__mysql_session *session, const hl_request *request) {
  const hl__mysql_store *store = session->store;
  uint64_t buckets = hl_layout_buckets(store->base.layout);
  int64_t gate = -1;
  if (!store->leased) return -1;
  for (size_t i = hl__update_rows(request->recorded, request->recorded_n);
       i < request->recorded_n && request->recorded[i].level == 0; i++) {
    int64_t next = hl__sql_gate(request->recorded[i].bucket, buckets);
    if (gate >= 0 && next != gate) return -1;
    gate = next;
  }
  return gate;
}

void hl__mysql_put_conflicts(hl__text *t, const hl_row *rows, size_t n) {
  for (size_t i = 0; i < n; i++)
    hl__text_put(t, "%s(r.level=%d AND r.bucket=%u%s)", i ? " OR " : " (",
                 hl__sql_level(rows[i].level), (unsigned)rows[i].bucket,
                 rows[i].mode == HL_SHARED ? " AND r.x=1" : "");
  hl__text_put(t, ")");
}

/* The same without the lease that the request exempts; its rows are some of the request's. */
static void put_in_the_way(hl__text *t, const hl_request *request, const hl_row *rows, size_t n) {
  if (request->exempt) {
    hl__text_put(t, " r.id<>");
    hl__text_hex(t, request->exempt, 16);
    hl__text_put(t, " AND");
  }
  hl__mysql_put_conflicts(t, rows, n);
}

/* The leases that a poll has found in the way. */
typedef struct finding {
  char former[33]; /* hexadecimal; is deleted before its end, too: see hl_lease_terms */
  bool blocked;
  bool update;        /* a lease has the update row of a row for which the request gives way */
  size_t row;         /* the first row that a lease keeps */
  int64_t nearest_us; /* until the first of these leases ends */
  unsigned expired_n;
  char expired[EXPIRED_MAX][33];
} finding;

/* ------------------------------------------------------- the other connection */

static int aside_take(hl__mysql_store *store, int64_t deadline, hl__mysql_session **session,
                      hl_error *error) {
  hl__mysql_store_lock(store);
  *session = store->aside;
  store->aside = NULL;
  hl__mysql_store_unlock(store);
  if (*session && hl__mysql_readable(*session)) { /* the connection has ended */
    hl__mysql_disconnect(*session);
    *session = NULL;
  }
  return *session ? HL_OK : hl__mysql_connect_verified(store, deadline, session, error);
}

static void aside_give(hl__mysql_store *store, hl__mysql_session *session, bool stands) {
  if (stands) {
    hl__mysql_store_lock(store);
    hl__mysql_session *other = store->aside;
    store->aside = session;
    hl__mysql_store_unlock(store);
    session = other;
  }
  hl__mysql_disconnect(session);
}

/* Autocommit is on there: each deletion is a transaction. *gone: whether a record was deleted. */
static int expired_delete(hl__mysql_store *store, const finding *found, int64_t limit, bool *gone,
                          hl_error *error) {
  hl__mysql_session *aside;
  int64_t deadline = hl__within_ms(ASIDE_MS, limit);
  int status = aside_take(store, deadline, &aside, error);
  if (status) return status;
  for (unsigned i = 0; i < found->expired_n && status == HL_OK; i++) {
    const char *id = found->expired[i];
    char sql[512];
    uint64_t deleted = 0;
    int size = snprintf(sql, sizeof sql,
                        "DELETE l,r FROM %s l LEFT JOIN %s r ON r.id=l.id WHERE l.id=0x%s%s",
                        store->leases, store->rows, id,
                        strcmp(id, found->former) == 0 ? "" : " AND l.till<=UTC_TIMESTAMP(6)");
    aside->patience = hl__within_ms(ASIDE_MS, limit);
    status = hl__mysql_commands(aside, sql, (size_t)size, 1, &deleted, error);
    if (deleted > 0) *gone = true;
  }
  aside_give(store, aside, status != HL_ECONNECTION);
  return status;
}

/* Sets the gate to 0 if there are no leases behind it any more. The first statement locks the
   gate's row, so that no session records a lease before the second is done. A transaction of a
   program may keep the row (hierlock.attach); then the gate stays open: our caller holds rows,
   and must not wait. */
static void gate_shut(hl__mysql_store *store, uint32_t gate, int64_t limit) {
  hl__mysql_session *aside;
  uint64_t buckets = hl_layout_buckets(store->base.layout), affected[4];
  uint64_t first = gate, last = gate;
  char sql[640];
  if (buckets > HL__SQL_GATES) {
    first = (gate * buckets + HL__SQL_GATES - 1) / HL__SQL_GATES;
    last = ((gate + 1) * buckets + HL__SQL_GATES - 1) / HL__SQL_GATES - 1;
  }
  if (aside_take(store, hl__within_ms(ASIDE_MS, limit), &aside, NULL)) return;
  int size =
      snprintf(sql, sizeof sql,
               "BEGIN;SET @hierlock_gate=(SELECT g FROM %s WHERE g=%u FOR UPDATE SKIP LOCKED);"
               "UPDATE %s SET n=0 WHERE g=@hierlock_gate AND NOT EXISTS (SELECT 1 FROM %s r WHERE "
               "r.level=0 AND r.bucket BETWEEN %llu AND %llu);COMMIT",
               store->gate, (unsigned)gate, store->gate, store->rows, (unsigned long long)first,
               (unsigned long long)last);
  aside->patience = hl__within_ms(ASIDE_MS, limit);
  int status = hl__mysql_commands(aside, sql, (size_t)size, 4, affected, NULL);
  aside_give(store, aside, status == HL_OK);
}

/* -------------------------------------------------------------- looking */

static size_t row_find(const hl_row *rows, size_t n, const char *level, const char *bucket) {
  size_t i = 0;
  uint8_t l = (uint8_t)strtol(level, NULL, 10);
  unsigned long b = strtoul(bucket, NULL, 10);
  while (i + 1 < n && (rows[i].level != l || rows[i].bucket != b)) i++;
  return i;
}

static void finding_add(finding *found, const hl_layout *layout, const hl_row *rows, size_t n,
                        MYSQL_ROW row) {
  if (!row[0] || !row[1] || !row[2] || !row[3] || !row[4]) return;
  int64_t left = strtoll(row[3], NULL, 10);
  found->blocked = true;
  if (left <= 0 || strcmp(row[2], found->former) == 0) {
    if (found->expired_n < EXPIRED_MAX && strlen(row[2]) == 32)
      memcpy(found->expired[found->expired_n++], row[2], 33);
    return;
  }
  size_t i = row_find(rows, n, row[0], row[1]);
  if (row[4][0] == '1' && hl__may_upgrade(layout, &rows[i])) found->update = true;
  if (left < found->nearest_us) found->nearest_us = left;
  if (i < found->row) found->row = i;
}

static int conflicts_find(hl__mysql_session *session, const hl_request *request, finding *found,
                          hl_error *error) {
  const hl_row *rows = request->rows;
  size_t n = request->n;
  const hl_lease_terms *terms = request->lease;
  const hl__mysql_store *store = session->store;
  *found = (finding){.row = n, .nearest_us = INT64_MAX};
  for (size_t i = 0; terms && i < sizeof terms->former; i++)
    (void)snprintf(found->former + 2 * i, 3, "%02X", terms->former[i]);
  int status = HL_OK;
  for (size_t done = 0; done < n && status == HL_OK; done += POLL_ROWS) {
    size_t some = n - done < POLL_ROWS ? n - done : POLL_ROWS;
    hl__text t = {0};
    MYSQL_RES *result;
    MYSQL_ROW row;
    hl__text_put(&t, "SELECT r.level,r.bucket,HEX(r.id),"
                     "TIMESTAMPDIFF(MICROSECOND,UTC_TIMESTAMP(6),l.till),");
    if (request->gives_way)
      hl__text_put(&t,
                   "EXISTS(SELECT 1 FROM %s u WHERE u.id=r.id AND "
                   "u.level=r.level-%u AND u.bucket=r.bucket)",
                   store->rows, HL_LEVEL_UPDATE);
    else
      hl__text_put(&t, "0");
    hl__text_put(&t, " FROM %s r STRAIGHT_JOIN %s l ON l.id=r.id WHERE", store->rows,
                 store->leases);
    put_in_the_way(&t, request, rows + done, some);
    hl__text_put(&t, " LIMIT 64");
    session->patience = poll_by(request->deadline);
    status = hl__mysql_ask(session, &t, &result, error);
    while (status == HL_OK && (row = hl__mysql_row(result, 5)))
      finding_add(found, store->base.layout, rows, n, row);
    mysql_free_result(result);
  }
  if (status == HL_OK && !(session->mysql->server_status & SERVER_STATUS_IN_TRANS))
    status = hl__error(error, HL_ECONNECTION, "the server has rolled the transaction back");
  return status;
}

/* --------------------------------------------------------------- the lead

   Waiters that want to share a row which is leased exclusively stand in no queue for it. So one
   of them has the row's lead, a lock of a name at the server, and polls; the others wait for the
   lead there. A waiter that gets the lead and finds the lease still recorded keeps the lead, and
   polls from then on. Otherwise the server passes the lead on within the same statement. So all
   are awake a moment after the lease has ended, however far away they are. The owner of a lead
   waits for no lock. The lead decides nothing: each waiter reads the records, with or without
   having had it. */

typedef struct lead {
  bool ours;
  hl_row row;
} lead;

static void put_lead_name(hl__text *t, const hl__mysql_session *session, const hl_row *row) {
  hl__text_put(t,
               "CONCAT('hierlock-',LEFT(SHA2(CONCAT_WS('/',DATABASE(),'%s',%d,%u),"
               "256),32))",
               session->store->rows, hl__sql_level(row->level), (unsigned)row->bucket);
}

/* The row's first two columns are truth values; -1: NULL. */
static int lead_ask(hl__mysql_session *session, hl__text *t, int said[2], hl_error *error) {
  MYSQL_RES *result;
  int status = hl__mysql_ask(session, t, &result, error);
  MYSQL_ROW row = status == HL_OK ? hl__mysql_row(result, 2) : NULL;
  for (int i = 0; i < 2; i++) said[i] = row && row[i] ? row[i][0] == '1' : -1;
  mysql_free_result(result);
  return status;
}

static int lead_leave(hl__mysql_session *session, int64_t deadline, lead *self, hl_error *error) {
  hl__text t = {0};
  int none[2];
  hl__text_put(&t, "SELECT RELEASE_LOCK(");
  put_lead_name(&t, session, &self->row);
  hl__text_put(&t, "),1");
  session->patience = poll_by(deadline);
  self->ours = false;
  return lead_ask(session, &t, none, error) == HL_OK
             ? HL_OK
             : hl__error(error, HL_ECONNECTION, HL__MYSQL_LATE);
}

/* Waits until the lead is ours, its lease has ended, its owner has had LEAD_NET_SECONDS, or the
   deadline. */
static int lead_await(hl__mysql_session *session, int64_t deadline, lead *self, hl_error *error) {
  hl__text t = {0};
  int said[2];
  hl__text_put(&t, "SELECT GET_LOCK(");
  put_lead_name(&t, session, &self->row);
  hl__text_put(&t, ",%d),IF((SELECT COUNT(*) FROM %s r WHERE", LEAD_NET_SECONDS,
               session->store->rows);
  hl__mysql_put_conflicts(&t, &self->row, 1);
  hl__text_put(&t, ")>0,0,RELEASE_LOCK(");
  put_lead_name(&t, session, &self->row);
  hl__text_put(&t, "))");
  session->patience = hl__deadline(deadline, HL__MYSQL_ANSWER_MS + 1);
  hl_error reason;
  int status = lead_ask(session, &t, said, &reason);
  if (status == HL_OK && said[0] >= 0) {
    self->ours = said[0] == 1 && said[1] != 1;
    return HL_OK;
  }
  /* The statement may have ended just when the lead was ours. */
  if (status != HL_ECONNECTION && lead_leave(session, deadline, self, error)) return HL_ECONNECTION;
  if (status == HL_TIMEOUT) return HL_OK;
  if (status && error) *error = reason;
  return status;
}

/* -------------------------------------------------------------- waiting */

static uint64_t random_below(hl__mysql_session *session, uint64_t n) {
  session->dice = session->dice * 6364136223846793005u + session->id * 2 + 1;
  return (session->dice >> 33) % n;
}

static void pause_us(hl__mysql_session *session, int64_t us) {
  us = us / 2 + (int64_t)random_below(session, (uint64_t)us / 2 + 1);
  const struct timespec moment = {.tv_nsec = (long)us * 1000};
  hl__server_wait_begin(session->store->config);
  (void)nanosleep(&moment, NULL);
  hl__server_wait_end(session->store->config);
}

/* -------------------------------------------------------------- the lookout

   One waiter of a manager at a time has the server look, by one statement that sleeps and looks by
   turns, until the row is free. Only READ UNCOMMITTED sees within a statement what others have
   changed meanwhile; so the statement runs on a connection of its own. The lookout decides
   nothing: it may see a deletion before its COMMIT, or one that is rolled back. */

/* HL_OK: the lookout can be asked. HL_TIMEOUT: not now: it still looks for a waiter that has gone,
   or it would have to connect. A short wait is not worth a connection. */
static int lookout_open(hl__mysql_store *store, bool connect, int64_t limit) {
  char sql[128];
  uint64_t none[2];
  int status = store->lookout ? hl__mysql_settle(store->lookout, 0, NULL) : HL_OK;
  if (status || (store->lookout && !hl__mysql_readable(store->lookout))) return status;
  hl__mysql_disconnect(store->lookout);
  store->lookout = NULL;
  if (!connect) return HL_TIMEOUT;
  int64_t deadline = hl__within_ms(ASIDE_MS, limit);
  status = hl__mysql_connect_verified(store, deadline, &store->lookout, NULL);
  if (status) return status;
  store->lookout->patience = deadline;
  store->lookout->wait = 0; /* so this sets limits, too, for all that comes */
  int size = snprintf(sql, sizeof sql,
                      "SET SESSION TRANSACTION ISOLATION LEVEL READ UNCOMMITTED;SET %s=%d",
                      store->lookout->dialect == HL_MARIADB ? "max_recursive_iterations"
                                                            : "cte_max_recursion_depth",
                      LOOKOUT_LOOKS + 1);
  return hl__mysql_commands(store->lookout, sql, (size_t)size, 2, none, NULL);
}

static int lookout_ask(hl__mysql_store *store, const hl_request *request, const hl_row *row,
                       int64_t looks) {
  hl__text t = {0};
  hl__text_put(&t,
               "WITH RECURSIVE look(n) AS (SELECT 1 UNION ALL SELECT n+1 FROM look WHERE n<%lld "
               "AND IF(SLEEP(0.%06d),0,(SELECT COUNT(*) FROM %s r WHERE look.n>0 AND",
               (long long)looks, LOOKOUT_US, store->rows);
  put_in_the_way(&t, request, row, 1);
  hl__text_put(&t, "))) SELECT MAX(n) INTO @hierlock_looks FROM look");
  return hl__mysql_commands_send(store->lookout, &t, 1, NULL);
}

/* Has the server look, so many times at most, and sleeps meanwhile; also until our connection has
   ended. Returns for how long; us. -1: the lookout cannot be had. */
static int64_t lookout(hl__mysql_session *session, const hl_request *request, const hl_row *row,
                       int64_t looks, bool connect) {
  hl__mysql_store *store = session->store;
  int64_t from = atomic_load(&store->lookout_from), slept = -1;
  if (hl__left_ms(from) > 0 ||
      !atomic_compare_exchange_strong(&store->lookout_from, &from, INT64_MAX))
    return -1;
  int status = lookout_open(store, connect, request->deadline);
  if (status == HL_OK) status = lookout_ask(store, request, row, looks);
  from = hl__now_ms();
  if (status == HL_OK) {
    struct pollfd p[2] = {{.fd = store->lookout->fd, .events = POLLIN | POLLRDHUP},
                          {.fd = session->fd, .events = POLLIN | POLLRDHUP}};
    (void)hl__poll(store->config, p, 2, from + looks * LOOKOUT_MOST_US / 1000);
    slept = (hl__now_ms() - from) * 1000;
  } else if (status != HL_TIMEOUT) {
    hl__mysql_disconnect(store->lookout);
    store->lookout = NULL;
    from += LOOKOUT_REST_MS;
  }
  atomic_store(&store->lookout_from, from);
  return slept;
}

/* Tells observers that our rows wait behind a lease. */
static int waiting_show(hl__mysql_session *session, int64_t deadline, hl_error *error) {
  hl__text t = {0};
  uint64_t none;
  hl__text_put(&t, "SET @hierlock=");
  hl__mysql_put_tag(&t, session, true);
  session->patience = poll_by(deadline);
  int status = t.failed ? hl__error_memory(error)
                        : hl__mysql_commands(session, t.data, t.used, 1, &none, error);
  free(t.data);
  return status;
}

/* Tells them of the end of the wait, and draws a token: the lease may have drawn a higher one
   meanwhile. */
static int token_redraw(hl__mysql_session *session, int64_t deadline, hl_error *error) {
  hl__text t = {0};
  MYSQL_RES *result;
  hl__text_put(&t, "SELECT UUID_SHORT(),@hierlock:=");
  hl__mysql_put_tag(&t, session, false);
  session->patience = poll_by(deadline);
  int status = hl__mysql_ask(session, &t, &result, error);
  if (status) return status;
  MYSQL_ROW row = hl__mysql_row(result, 1);
  if (row && row[0])
    session->token = strtoull(row[0], NULL, 10);
  else
    status = hl__error(error, HL_ECONNECTION, "the server answers what was not asked");
  mysql_free_result(result);
  return status;
}

static int blocked_error(const hl_row *row, hl_error *error) {
  (void)hl__error(error, HL_TIMEOUT, "a lease is in the way");
  if (error) {
    error->level = (int)(row->level & (HL_LEVEL_UPDATE - 1));
    error->bucket = (uint32_t)row->bucket;
  }
  return HL_TIMEOUT;
}

/* Sleeps before the next poll, for `most` us at most. Returns the next pause; the first is 0. */
static int64_t nap(hl__mysql_session *session, const hl_request *request, size_t row, int64_t pause,
                   int64_t most) {
  /* The server ends a session that is silent for hold_timeout. */
  int64_t quiet = session->store->config->hold_timeout * 1000 / 4;
  int64_t looks = (most < quiet ? most : quiet) / LOOKOUT_MOST_US;
  if (looks > LOOKOUT_LOOKS) looks = LOOKOUT_LOOKS;
  bool first = pause == 0;
  if ((first || pause > PAUSE_LAST_US) && row < request->n && looks * LOOKOUT_US > POLL_MAX_US) {
    /* While rows are held, their session must be renewed in time. */
    bool connect = !first && !request->extend;
    int64_t slept = lookout(session, request, &request->rows[row], looks, connect);
    /* A deletion that the lookout sees is soon committed, as a rule; but not always. */
    if (slept >= 0) return slept < looks * LOOKOUT_US ? POLL_MIN_US / 4 : pause;
  }
  if (first) pause = POLL_MIN_US;
  if (most > POLL_MAX_US) most = POLL_MAX_US;
  pause_us(session, pause < most ? pause : most);
  return pause > PAUSE_LAST_US ? pause : 4 * pause;
}

/* Polls and sleeps by turns: HL_OK when no lease is in the way, or what ends the wait. */
static int poll_until_free(hl__mysql_session *session, const hl_request *request, lead *rung,
                           int64_t *sent, hl_error *error) {
  int64_t pause = 0;
  bool shown = false;
  for (unsigned turn = 0;; turn++) {
    finding found;
    int64_t asked = hl__boot_ms();
    int status = conflicts_find(session, request, &found, error);
    if (status == HL_OK && !found.blocked && turn > 0)
      status = token_redraw(session, request->deadline, error);
    if (status) return status;
    *sent = asked;
    if (!found.blocked) return HL_OK;
    bool gone = false;
    if (found.expired_n > 0) {
      status = expired_delete(session->store, &found, hl__late_answer_by(request->deadline), &gone,
                              error);
      if (status == HL_ESTORE || status == HL_ENOMEM) return status;
    }
    if (gone) continue;
    const hl_row *row = &request->rows[found.row < request->n ? found.row : 0];
    if (request->try_once) {
      /* The lease was refreshed or deleted since the poll saw that its time was up; another poll
         can tell. */
      if (found.nearest_us == INT64_MAX && turn < 8) continue;
      return blocked_error(row, error);
    }
    if (hl__left_ms(request->deadline) == 0) return blocked_error(row, error);
    if (found.update) return HL__BEHIND_UPDATE;
    if (!shown) status = waiting_show(session, request->deadline, error);
    shown = true;
    /* The lease of this lead is gone, and another lease is in the way. */
    if (status == HL_OK && rung->ours && hl__row_compare(&rung->row, row) != 0)
      status = lead_leave(session, request->deadline, rung, error);
    if (status) return status;
    if (!rung->ours && found.row < request->n && row->mode == HL_SHARED) {
      rung->row = *row;
      status = lead_await(session, request->deadline, rung, error);
      if (status) return status;
      pause = 0;
      continue;
    }
    int64_t most = hl__left_ms(request->deadline) * 1000 + 500;
    if (found.nearest_us < most) most = found.nearest_us + 100;
    pause = nap(session, request, found.row, pause, most);
  }
}

int hl__mysql_leases_await(hl__mysql_session *session, const hl_request *request, int64_t *sent,
                           hl_error *error) {
  lead rung = {.ours = false};
  int status = poll_until_free(session, request, &rung, sent, error);
  if (rung.ours && status != HL_ECONNECTION &&
      lead_leave(session, request->deadline, &rung, error) != HL_OK)
    status = HL_ECONNECTION;
  if (status) return status;
  int64_t gate = hl__mysql_gate(session, request);
  if (gate >= 0 && random_below(session, SWEEP_PART) == 0)
    gate_shut(session->store, (uint32_t)gate, hl__late_answer_by(request->deadline));
  return HL_OK;
}
