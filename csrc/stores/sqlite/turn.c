/*
 * turn.c - write transactions. SQLite has one at a time, and lets those who come meanwhile try
 * again; chance decides which of them is next. So they stand in line: a session that finds
 * others draws a number, locks its byte, and tries when no living session has a lower number. A
 * session that ends a transaction rings. A session that is stopped in line is passed, with all
 * numbers up to its own.
 *
 * A transaction of ours takes microseconds, or as long as the disk takes for data that must
 * survive a power failure. A process that is stopped inside a transaction keeps the others
 * waiting, until their time is up.
 */
#include "sqlite_store.h"

/* The first in line tries again by itself so often: another program may have been writing, or a
   process that was killed. Sessions behind the first do so, too: the first may have been killed. */
#define FIRST_MS 1
#define OTHERS_MS 10

/* turn_waiters: the count is in the lower bits, below a version that every change raises. Thus a
   count that is too high, because processes were killed, differs from one in change. */
#define VERSION_ONE (UINT64_C(1) << 32)
#define COUNT (VERSION_ONE - 1)

/* Numbers in line are below it. */
#define TURNS_END (UINT64_C(1) << 56)

/* Whether a session at work is in line before `number`. Passes those that are
   stopped. */
static bool others(const hl__sqlite_session *session, uint64_t number) {
  _Atomic uint64_t *from = &session->side->turns_from;
  uint64_t least = atomic_load(from), which;
  while (least < number &&
         hl__sqlite_bytes_locked(session, HL__SQLITE_TURNS, least, number - least, &which)) {
    if (!hl__sqlite_is_stopped(session, HL__SQLITE_TURNS, which)) return true;
    if (atomic_compare_exchange_strong(from, &least, which + 1)) least = which + 1;
  }
  return false;
}

/* Whether a session stands in line. Each change of the count is made while a byte is locked; so
   where no byte is locked, the counted sessions were killed. A session that was passed may make
   the count wrong, until it is set right here. */
static bool crowded(const hl__sqlite_session *session) {
  hl__sqlite_side *side = session->side;
  uint64_t seen = atomic_load(&side->turn_waiters);
  if ((seen & COUNT) == 0) return false;
  if (others(session, TURNS_END)) return true;
  uint64_t healed = (seen & ~COUNT) + VERSION_ONE;
  (void)atomic_compare_exchange_strong(&side->turn_waiters, &seen, healed);
  return false;
}

int hl__sqlite_read(hl__sqlite_session *session, hl_error *error) {
  int status = hl__sqlite_enter(session, error);
  if (status) return status;
  if (hl__sqlite_place_stands(session)) return HL_OK;
  hl__sqlite_leave();
  return hl__sqlite_moved_error(session, error);
}

/* Sets the durability that the session wants; not in a transaction. */
static int durability_set(hl__sqlite_session *session) {
  if (!session->store->lasts || session->relax == session->relaxed) return SQLITE_OK;
  int code = sqlite3_exec(session->db,
                          session->relax ? "PRAGMA synchronous=NORMAL" : "PRAGMA synchronous=FULL",
                          NULL, NULL, NULL);
  if (code == SQLITE_OK) session->relaxed = session->relax;
  return code;
}

/* HL_OK: begun, and entered. HL_TIMEOUT: another process writes. */
static int try_begin(hl__sqlite_session *session, hl_error *error) {
  int code = SQLITE_READONLY, status = HL_OK;
  /* Where SQLite could not open the log for writing, if only for want of a descriptor, it opens it
     for reading, and the connection can never write. Another connection opens it anew. */
  for (int tries = 0; tries < 2 && (code & 0xFF) == SQLITE_READONLY; tries++) {
    if (tries) {
      hl__sqlite_close(session);
      hl__sqlite_leave();
    }
    status = hl__sqlite_enter(session, error);
    if (status) return status;
    code = durability_set(session);
    if (code == SQLITE_OK)
      code = hl__sqlite_run(session, hl__sqlite_statement(session, HL__SQLITE_BEGIN));
  }
  if (code == SQLITE_OK) {
    /* Readers of the new file would not see a write here. */
    if (hl__sqlite_place_stands(session)) return HL_OK;
    (void)hl__sqlite_run(session, hl__sqlite_statement(session, HL__SQLITE_ROLLBACK));
    status = hl__sqlite_moved_error(session, error);
  } else {
    status = hl__sqlite_error(session, code, "begin a transaction", error);
  }
  hl__sqlite_leave();
  return status;
}

static int stand_in_line(hl__sqlite_session *session, uint64_t number, int64_t deadline,
                         hl_error *error) {
  hl__sqlite_futex *futex = &session->side->turn;
  int status;
  atomic_store(&session->asleep, futex);
  (void)atomic_fetch_add(&futex->sleepers, 1u);
  for (;;) {
    uint32_t seen = atomic_load(&futex->events);
    bool first = !others(session, number);
    status = first ? try_begin(session, error) : HL_TIMEOUT;
    if (status != HL_TIMEOUT) break;
    if (session->cancellable && atomic_load(&session->interrupted)) {
      status = HL_CANCELLED;
      break;
    }
    /* Never early: the millisecond of the deadline is waited for, too. */
    int64_t now = hl__now_ms();
    if (now > deadline) break;
    int64_t again = now + (first ? FIRST_MS : OTHERS_MS);
    int64_t end = hl__deadline(deadline, 1);
    hl__sqlite_sleep(session, futex, seen, again < end ? again : end);
  }
  (void)atomic_fetch_sub(&futex->sleepers, 1u);
  atomic_store(&session->asleep, NULL);
  return status;
}

/* Begins a write transaction. The caller waits for its turn until the deadline. HL_OK: entered;
   write_end follows. */
static int write_begin(hl__sqlite_session *session, int64_t deadline, hl_error *error) {
  hl__sqlite_side *side = session->side;
  int status = crowded(session) ? HL_TIMEOUT : try_begin(session, error);
  if (status != HL_TIMEOUT) return status;
  uint64_t number = atomic_fetch_add(&side->turns, 1u) % TURNS_END;
  bool locked = hl__sqlite_byte_lock(session, HL__SQLITE_TURNS, number);
  if (locked) (void)atomic_fetch_add(&side->turn_waiters, VERSION_ONE + 1);
  status = stand_in_line(session, number, deadline, error);
  if (locked) {
    (void)atomic_fetch_add(&side->turn_waiters, VERSION_ONE - 1);
    hl__sqlite_byte_unlock(session, HL__SQLITE_TURNS, number);
    /* The session behind us is first now; it tries when we have done. */
    if (status) hl__sqlite_wake(&side->turn);
  }
  if (status == HL_TIMEOUT)
    return hl__error(error, HL_TIMEOUT, "another program keeps %s locked", session->path);
  return status;
}

/* Ends it: commits where status is HL_OK, else rolls back. Returns status; or why it could not be
   committed. Leaves. */
static int write_end(hl__sqlite_session *session, int status, const char *doing, hl_error *error) {
  if (status == HL_OK) {
    int code = hl__sqlite_run(session, hl__sqlite_statement(session, HL__SQLITE_COMMIT));
    if (code != SQLITE_OK) {
      status = hl__sqlite_error(session, code, doing, error);
      if (status == HL_TIMEOUT) /* it is no outcome of this */
        status = hl__error(error, HL_ESTORE, "cannot %s: %s is locked", doing, session->path);
    }
  }
  if (status && !sqlite3_get_autocommit(session->db))
    (void)hl__sqlite_run(session, hl__sqlite_statement(session, HL__SQLITE_ROLLBACK));
  /* Writes the log to its place, so that it can begin anew. */
  if (status && session->full)
    (void)sqlite3_wal_checkpoint_v2(session->db, NULL, SQLITE_CHECKPOINT_PASSIVE, NULL, NULL);
  hl__sqlite_leave();
  hl__sqlite_wake(&session->side->turn);
  return status;
}

/* Wakes those who wait for any of the rows that the transaction has freed. */
static void freed_ring(const hl__sqlite_session *session) {
  for (size_t i = 0; i < session->freed.size / HL__SQLITE_ROW_SIZE; i++) {
    bool exclusive;
    int64_t key = hl__sqlite_rows_at(session->freed.packed, i, &exclusive);
    hl__sqlite_wake(hl__sqlite_futex_of(session, key));
  }
}

int hl__sqlite_write(hl__sqlite_session *session, hl__sqlite_fn fn, void *context,
                     const char *doing, int64_t deadline, hl_error *error) {
  for (bool again = false;; again = true) {
    int status = write_begin(session, deadline, error);
    if (status) return status;
    session->full = false;
    session->freed.size = 0;
    int code = fn(session, context, &status, error);
    if (code != SQLITE_OK) {
      status = hl__sqlite_error(session, code, doing, error);
      if (status == HL_TIMEOUT) status = HL_ESTORE;
    }
    status = write_end(session, status, doing, error);
    if (status == HL_OK) freed_ring(session);
    if (status != HL_ESTORE || !session->full || again) return status;
  }
}
