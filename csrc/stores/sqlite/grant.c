/*
 * grant.c - grants a lease, or waits for it. sqlite_store.h has the rules,
 * side.c why no wake-up is lost.
 *
 *     newcomer --- free ----------------------------------> granted
 *        |                                                    ^
 *        '-- in its way: a lease, or an earlier waiter        |
 *              |                                              |
 *              v                                              |
 *           draws a ticket -> sleeps -> looks --- free -------'
 *                               ^         |
 *                               '---------'
 *
 * A ticket is a number, lower than all that are drawn later; the session that has it keeps the
 * byte of that number locked. If the byte is not locked, its process has died, or its wait has
 * ended: a waiter writes nothing only to say that it gives up. Such a ticket blocks no request,
 * nor does the ticket of a stopped session: the next write transaction that meets it deletes it.
 *
 * A look is made by reading alone, so those who wait do not keep each other, nor those who grant
 * and release, from writing. The write transaction that grants checks once more what the look
 * found free.
 */
#include "sqlite_store.h"

#include "mode.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* How soon it is noticed that an earlier waiter has died. */
#define ALIVE_MS 50
/* A sleeper looks so often by itself: a process that frees a row may be killed before it rings,
   or may change the database by other means. */
#define POLL_MS 250

/* So many tickets are looked at by a request that draws one. */
#define SWEEP 16

/* A request's blocker: a lease, with its remaining time; or a waiter. */
typedef struct blocker {
  int64_t key;    /* of the row where it stands */
  int64_t ticket; /* 0: it is a lease */
  int64_t left;   /* ms; HL_FOREVER of a waiter */
} blocker;

/* ---------------------------------------------------------------- tickets */

/* Deletes a dead one that was met at a row; the row, too, where it belongs to no ticket: not what
   we write. */
static int ticket_clear(hl__sqlite_session *session, int64_t ticket, int64_t key, bool exclusive) {
  int code = hl__sqlite_ticket_delete(session, ticket);
  if (code != SQLITE_OK) return code;
  return hl__sqlite_row_run(session, HL__SQLITE_DELETE_WAIT, key, exclusive, ticket);
}

/* Finds a ticket before `before` at a row. *ticket: 0, no ticket. */
static int earlier_at(hl__sqlite_session *session, int64_t key, bool exclusive, int64_t before,
                      int64_t *ticket) {
  sqlite3_stmt *it = hl__sqlite_statement_of(session, HL__SQLITE_EARLIER, key);
  (void)sqlite3_bind_int(it, 2, exclusive);
  (void)sqlite3_bind_int64(it, 3, before ? before : INT64_MAX);
  return hl__sqlite_ask(session, it, ticket);
}

/* Looks for a living waiter before `ticket` (0: before a newcomer) that conflicts with the
   request. SQLITE_OK: there is none; SQLITE_ROW: *found; else SQLite's code. In a write
   transaction it deletes those it meets that have died; else SQLITE_EMPTY: one has died. */
static int earlier(hl__sqlite_session *session, const hl_request *request, int64_t ticket,
                   blocker *found) {
  for (size_t i = 0; i < request->n; i++) {
    const hl_row *row = &request->rows[i];
    int64_t key = hl__sqlite_key(row);
    const int least = row->mode == HL_SHARED ? 1 : 0;
    for (int exclusive = 1; exclusive >= least;) {
      int64_t other = 0;
      int code = earlier_at(session, key, exclusive, ticket, &other);
      if (code != SQLITE_OK) return code;
      if (other == 0) {
        exclusive--;
        continue;
      }
      if (hl__sqlite_is_alive(session, other)) {
        *found = (blocker){key, other, HL_FOREVER};
        return SQLITE_ROW;
      }
      if (sqlite3_get_autocommit(session->db)) return SQLITE_EMPTY;
      int changes = sqlite3_total_changes(session->db);
      code = ticket_clear(session, other, key, exclusive);
      if (code != SQLITE_OK) return code;
      /* The loop would meet it for ever: it is not a row that we write. */
      if (sqlite3_total_changes(session->db) == changes) return SQLITE_CORRUPT;
    }
  }
  return SQLITE_OK;
}

/* In a write transaction: deletes some that have died. */
static int tickets_sweep(hl__sqlite_session *session) {
  int code = SQLITE_OK;
  sqlite3_stmt *it = hl__sqlite_statement(session, HL__SQLITE_LIST_WAITERS);
  for (int i = 0; i < SWEEP && code == SQLITE_OK; i++) {
    code = hl__sqlite_step(session, it);
    if (code != SQLITE_ROW) break;
    int64_t ticket = sqlite3_column_int64(it, 0);
    code = hl__sqlite_is_alive(session, ticket) ? SQLITE_OK
                                                : hl__sqlite_ticket_delete(session, ticket);
  }
  return hl__sqlite_reset(it, code);
}

/* ----------------------------------------------------------------- leases */

/* As `earlier`: finds a lease that blocks one row, but not `own`. */
static int lease_at(hl__sqlite_session *session, const hl_row *row, int64_t own, blocker *found) {
  int code = SQLITE_OK;
  while (code == SQLITE_OK) {
    hl__sqlite_end_time end;
    sqlite3_stmt *it = hl__sqlite_statement_of(session, HL__SQLITE_BLOCKER, hl__sqlite_key(row));
    (void)sqlite3_bind_int(it, 2, row->mode == HL_SHARED);
    (void)sqlite3_bind_int64(it, 3, own);
    code = hl__sqlite_step(session, it);
    if (code != SQLITE_ROW) return hl__sqlite_reset(it, code);
    hl__sqlite_column_end(it, HL__COLUMN_BOOT, &end);
    int64_t left = hl__sqlite_left(session->store, &end);
    if (left > 0) {
      *found = (blocker){hl__sqlite_key(row), 0, left};
    } else if (sqlite3_get_autocommit(session->db)) {
      code = SQLITE_EMPTY;
    } else {
      int changes = sqlite3_total_changes(session->db);
      code = hl__sqlite_record_delete(session, it, true);
      /* The loop would meet the lease for ever. */
      if (code == SQLITE_OK && sqlite3_total_changes(session->db) == changes) code = SQLITE_CORRUPT;
    }
    (void)sqlite3_reset(it);
  }
  return code;
}

/* Finds what blocks the request, as `earlier`: earlier waiters first, so that of many
   waiters for one lease only the first looks when the lease is over. */
static int blocker_find(hl__sqlite_session *session, const hl_request *request, int64_t ticket,
                        int64_t own, bool waiters, blocker *found) {
  int code = SQLITE_OK;
  /* A waiter for the rows that are to be upgraded waits for that lease: the upgrade passes it. */
  if (waiters && !request->upgrade) code = earlier(session, request, ticket, found);
  for (size_t i = 0; i < request->n && code == SQLITE_OK; i++)
    code = lease_at(session, &request->rows[i], own, found);
  return code;
}

/* --------------------------------------------------------------- granting */

typedef struct attempt {
  const hl_request *request;
  hl_grant *grant;
  int64_t ticket; /* 0: none yet */
  int64_t own;    /* of an upgrade: the number of the lease; else 0 */
  bool granted;
  bool barred; /* another transaction was in the way, for all the time there was */
  bool draws;  /* one is to be drawn, in a transaction that need not last */
  blocker blocker;
} attempt;

/* Draws the next number. It repeats no earlier number, even when the last ones were lost with
   the power (synchronous=normal), unless the clock was set back, too, or tokens were raised
   beyond it. */
static int number_next(hl__sqlite_session *session, int64_t last, bool ticket, int64_t *number) {
  int64_t now = hl__unix_ms() * 1000;
  *number = now > last ? now : last + 1;
  if (ticket) *number = hl__sqlite_beat_free(session, *number);
  return hl__sqlite_run(session, hl__sqlite_statement_of(session, HL__SQLITE_COUNT, *number));
}

/* The ticket is there no more: a request took it for dead, or passed it, or it
 * was never committed. */
static int ticket_check(hl__sqlite_session *session, attempt *self, bool *there) {
  int64_t ticket = 0;
  int code = SQLITE_OK;
  if (self->ticket)
    code = hl__sqlite_ask(
        session, hl__sqlite_statement_of(session, HL__SQLITE_GET_WAITER, self->ticket), &ticket);
  *there = ticket != 0;
  return code;
}

static void ticket_give(hl__sqlite_session *session, attempt *self) {
  hl__sqlite_byte_unlock(session, HL__SQLITE_TICKETS, (uint64_t)self->ticket);
  self->ticket = 0;
}

static int ticket_draw(hl__sqlite_session *session, attempt *self, int64_t last) {
  int64_t ticket;
  ticket_give(session, self);
  int code = number_next(session, last, true, &ticket);
  if (code == SQLITE_OK) code = tickets_sweep(session);
  if (code != SQLITE_OK) return code;
  self->ticket = ticket;
  /* Lock the byte before another session can see the ticket. */
  (void)hl__sqlite_byte_lock(session, HL__SQLITE_TICKETS, (uint64_t)ticket);
  return hl__sqlite_ticket_add(session, self->request, ticket);
}

/* Reserves room in the file for all that is in the log, and some more. Without it the log could
   not be written to its place, nor begin anew, and on a full disk no lease could be given back
   any more. SQLITE_FULL: there is no space. */
static int room_reserve(hl__sqlite_session *session) {
  int64_t pages;
  int code = hl__sqlite_ask(session, hl__sqlite_statement(session, HL__SQLITE_PAGES), &pages);
  if (code != SQLITE_OK) return code;
  sqlite3_int64 size = pages * session->page_size + HL__SQLITE_CHUNK / 4;
  if (session->file_size >= size) return SQLITE_OK;
  return sqlite3_file_control(session->db, "main", SQLITE_FCNTL_SIZE_HINT, &size) == SQLITE_OK
             ? SQLITE_OK
             : SQLITE_FULL;
}

/* The lease that is upgraded. */
static int own_find(hl__sqlite_session *session, attempt *self, int *status, hl_error *error) {
  sqlite3_stmt *it;
  int code = hl__sqlite_find_held(session, self->request->lease, &it, status, error);
  if (code == SQLITE_ROW) self->own = sqlite3_column_int64(it, HL__COLUMN_NUMBER);
  return hl__sqlite_reset(it, code);
}

/* In a write transaction, which is committed. Not granted: something is in the
   way, and a ticket was drawn; or one is to be drawn: self->draws. A ticket
   need not outlive its process: that it is there is no reason to wait for the
   disk. */
static int attempt_make(hl__sqlite_session *session, void *context, int *status, hl_error *error) {
  attempt *self = context;
  const hl_request *request = self->request;
  bool there;
  int64_t number;
  self->draws = self->granted = false;
  sqlite3_stmt *it = hl__sqlite_statement(session, HL__SQLITE_STATE);
  int code = hl__sqlite_step(session, it);
  if (code != SQLITE_ROW) {
    (void)sqlite3_reset(it);
    return code == SQLITE_DONE ? SQLITE_CORRUPT : code;
  }
  int64_t last = sqlite3_column_int64(it, 0);
  bool waiters = sqlite3_column_int(it, 1) != 0;
  (void)sqlite3_reset(it);
  code = ticket_check(session, self, &there);
  if (code == SQLITE_OK && request->upgrade) code = own_find(session, self, status, error);
  if (code == SQLITE_OK && *status) return code;
  if (code == SQLITE_OK)
    code = blocker_find(session, request, there ? self->ticket : 0, self->own, waiters,
                        &self->blocker);
  bool found = code == SQLITE_ROW;
  if (code != SQLITE_OK && !found) return code;
  bool draws = found && !there && !request->try_once;
  self->draws = draws && session->store->lasts && !session->relax;
  if (draws && !self->draws) return ticket_draw(session, self, last);
  if (found || session->relax) return SQLITE_OK; /* a grant has to last */
  if (there) code = hl__sqlite_ticket_delete(session, self->ticket);
  if (code == SQLITE_OK) code = number_next(session, last, false, &number);
  /* The time counts from here: no waiter has seen the record yet. */
  int64_t now = hl__boot_ms();
  if (code == SQLITE_OK && request->upgrade) {
    hl__sqlite_conversion upgrade = {.request = request, .number = number};
    code = hl__sqlite_convert(session, &upgrade, status, error);
  } else if (code == SQLITE_OK) {
    code = hl__sqlite_record_add(session, request, number, now);
  }
  if (code == SQLITE_OK) code = room_reserve(session);
  if (code != SQLITE_OK) return code;
  self->grant->sent_ms = now;
  self->grant->token = (uint64_t)number << 8;
  self->grant->place = (uint64_t)number;
  self->granted = true;
  return SQLITE_OK;
}

/* HL_OK: granted. HL_TIMEOUT: something is, or was, in the way. Then there is a ticket, unless the
   request tries once, or the blocker left meanwhile. */
static int attempt_run(hl__sqlite_session *session, attempt *self, int64_t deadline,
                       hl_error *error) {
  int status = HL_OK;
  do {
    session->relax = self->draws;
    self->draws = self->granted = false;
    status = hl__sqlite_write(session, attempt_make, self, "record a lease", deadline, error);
  } while (status == HL_OK && self->draws);
  session->relax = false;
  self->barred = status == HL_TIMEOUT;
  if (status) self->grant->sent_ms = 0;
  return status == HL_OK && !self->granted ? HL_TIMEOUT : status;
}

/* ---------------------------------------------------------------- waiting */

/* Whether the request seems to be free now; else finds its blocker. HL_OK: free; HL_TIMEOUT:
   blocked. */
static int poll_again(hl__sqlite_session *session, attempt *self, hl_error *error) {
  bool there = true;
  int status = hl__sqlite_read(session, error);
  if (status) return status;
  int code = ticket_check(session, self, &there);
  if (code == SQLITE_OK && there)
    code = blocker_find(session, self->request, self->ticket, self->own, true, &self->blocker);
  bool found = code == SQLITE_ROW;
  if (code != SQLITE_OK && code != SQLITE_EMPTY && !found) {
    status = hl__sqlite_error(session, code, "look for leases", error);
    found = status == HL_TIMEOUT; /* another process recovers the log: later */
    if (found) self->blocker = (blocker){0, 0, 1};
  }
  hl__sqlite_leave();
  if (status && status != HL_TIMEOUT) return status;
  return found ? HL_TIMEOUT : HL_OK;
}

/* Sleeps until there is a reason to look: the futex, the end of the blocker, its death or stop,
   the deadline, an interruption, or POLL_MS. */
static void sleep_on(hl__sqlite_session *session, const attempt *self, hl__sqlite_futex *futex,
                     uint32_t seen, int64_t deadline) {
  int64_t now = hl__now_ms();
  int64_t end = hl__deadline(now, POLL_MS);
  int64_t over = hl__deadline(now, self->blocker.left);
  if (over < end) end = over;
  if (hl__deadline(deadline, 1) < end) end = hl__deadline(deadline, 1);
  while (now < end && atomic_load(&futex->events) == seen && !atomic_load(&session->interrupted)) {
    int64_t ticket = self->blocker.ticket;
    if (ticket && !hl__sqlite_is_alive(session, ticket)) return;
    int64_t piece = now + ALIVE_MS;
    hl__sqlite_sleep(session, futex, seen, piece < end ? piece : end);
    now = hl__now_ms();
  }
}

/* HL_OK: it is worth another attempt. */
static int wait_for_it(hl__sqlite_session *session, attempt *self, int64_t deadline,
                       hl_error *error) {
  int status = HL_TIMEOUT;
  while (status == HL_TIMEOUT) {
    int64_t key = self->blocker.key;
    hl__sqlite_futex *futex = hl__sqlite_futex_of(session, key);
    (void)atomic_fetch_add(&futex->sleepers, 1u);
    atomic_store(&session->asleep, futex);
    for (;;) {
      uint32_t seen = atomic_load(&futex->events);
      status = poll_again(session, self, error);
      if (status != HL_TIMEOUT) break;
      if (atomic_load(&session->interrupted)) {
        status = HL_CANCELLED;
        break;
      }
      /* Never early: the millisecond of the deadline is waited for, too. */
      if (hl__now_ms() > deadline) break;
      if (hl__sqlite_futex_of(session, self->blocker.key) != futex) break;
      sleep_on(session, self, futex, seen, deadline);
    }
    atomic_store(&session->asleep, NULL);
    (void)atomic_fetch_sub(&futex->sleepers, 1u);
    if (hl__now_ms() > deadline) break;
  }
  return status;
}

int hl__sqlite_take(hl__sqlite_session *session, const hl_request *request, hl_grant *grant,
                    hl_error *error) {
  attempt self = {.request = request, .grant = grant};
  int64_t deadline = request->try_once ? hl__answer_by(request->deadline) : request->deadline;
  int status;
  session->cancellable = true;
  for (;;) {
    status = attempt_run(session, &self, deadline, error);
    if (status != HL_TIMEOUT || request->try_once) break;
    if (hl__now_ms() > deadline) break; /* also where nothing is in the way */
    if (!self.ticket) continue;         /* it did not come to its turn, or need not wait */
    /* Others, who come now, would neither see that we live nor ring for us. */
    if (!hl__sqlite_side_stands(session)) {
      status = hl__sqlite_moved_error(session, error);
      break;
    }
    status = wait_for_it(session, &self, deadline, error);
    if (status != HL_OK) break;
  }
  session->cancellable = false;
  bool waited = self.ticket != 0;
  ticket_give(session, &self);
  /* Wake the sessions that waited only for us. After a grant they wait for the lease instead. */
  for (size_t i = 0; waited && status != HL_OK && i < request->n; i++)
    hl__sqlite_wake(hl__sqlite_futex_of(session, hl__sqlite_key(&request->rows[i])));
  if (status == HL_TIMEOUT) {
    (void)hl__error(error, HL_TIMEOUT, "the lock is not free");
    if (self.barred && error)
      (void)snprintf(error->reason, sizeof error->reason, "another program keeps %s locked",
                     session->path);
    return HL_TIMEOUT;
  }
  if (status == HL_CANCELLED) return hl__error(error, HL_CANCELLED, "the wait was interrupted");
  return status;
}
