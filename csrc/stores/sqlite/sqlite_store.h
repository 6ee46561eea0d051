/*
 * sqlite_store.h - what the files of the SQLite store share. Only this folder includes <sqlite3.h>.
 *
 *     sqlite.c     the store's operations: the life of a session
 *     dsn.c        takes a DSN apart
 *     place.c      which file it is, and whether it can be trusted
 *     database.c   opens, sets up and closes a connection of SQLite's to the file
 *     forks.c      lets no connection of SQLite's live through a fork
 *     statement.c  prepared statements; what an error of SQLite's means
 *     side.c       the file beside it: futexes, and who is alive
 *     turn.c       write transactions, one after the other, in the order in which they came
 *     grant.c      grants a lease, or waits for it in the order of tickets
 *     leases.c     the other operations on records (hl_lease_ops), and observers
 *     record.c     how a record is written and read; its time
 *
 * csrc/lua/store makes a Lua module of it.
 *
 * The store has leases only. Each operation is one transaction of SQLite's, so it is done or not
 * done wherever its process is killed. A row of a request is a number of 64 bits, the level in the
 * upper four and a hash in the others, as on PostgreSQL: there are no buckets. The tables:
 *
 *     hierlock          one row: levels, and the last number that was given
 *     hierlock_leases   a row for each lease, and for what is left of one that was revoked
 *     hierlock_rows     a row for each row of a lease: key, mode, number of the lease
 *     hierlock_waiters  a row for each ticket: a request that waits
 *     hierlock_waits    a row for each row of such a request
 *
 * Rules.
 *
 *   1. A lease is granted in one write transaction, which finds no lease, nor an earlier waiter,
 *      that conflicts with any of its rows. SQLite has one such transaction at a time. So no two
 *      leases conflict, whatever else here goes wrong.
 *   2. Presence decides. A session that meets an expired lease deletes it, in the transaction in
 *      which it looks at the lease's time. A refresh finds the record, or does not, and does not
 *      ask for the time.
 *   3. A request that has to wait draws a ticket, and locks the byte of that number in the side
 *      file. The request is granted once no lease and no living earlier ticket blocks it. Before
 *      the grant it holds nothing: there is no deadlock. The kernel unlocks the byte of a process
 *      that dies, however it dies. A request that meets such a ticket deletes it. It also deletes
 *      the ticket of a process that was stopped for 3 s: that process draws another when it goes
 *      on.
 *   4. The side file serves order and futexes only. Where it is lost or damaged, requests wait
 *      longer, or in another order; rule 1 is not concerned.
 */
#ifndef HIERLOCK_SQLITE_STORE_H
#define HIERLOCK_SQLITE_STORE_H

#include "clock.h"
#include "error.h"
#include "fork.h"
#include "layout.h"
#include "list.h"
#include "record.h"
#include "store.h"

#include <pthread.h>
#include <sqlite3.h>
#include <stdatomic.h>
#include <sys/stat.h>

#if defined(SQLITE_VERSION_NUMBER) && SQLITE_VERSION_NUMBER < 3020000
#error "the SQLite store needs SQLite 3.20 or later"
#endif

/* The words of the side file, mapped. All are counters that wrap around, or go
   too high when a process is killed: see side.c and turn.c. */
typedef struct hl__sqlite_futex {
  _Atomic uint32_t events;
  _Atomic uint32_t sleepers;
} hl__sqlite_futex;

#define HL__SQLITE_FUTEXES 1000u

/* Lines in which numbers stand: those who write, and tickets. */
typedef enum hl__sqlite_range {
  HL__SQLITE_TURNS,
  HL__SQLITE_TICKETS,
  HL__SQLITE_RANGES
} hl__sqlite_range;

#define HL__SQLITE_BEATS 2048u

typedef struct hl__sqlite_side {
  _Atomic uint32_t version;                     /* of this structure */
  hl__sqlite_futex turn;                        /* rung when a write transaction has ended */
  _Atomic uint64_t turns;                       /* the last number that was drawn for one */
  _Atomic uint64_t turn_waiters;                /* how many wait for it; above them a version */
  hl__sqlite_futex futexes[HL__SQLITE_FUTEXES]; /* by key */
  /* Versions before had zeros from here on. Turns before this one were passed. */
  _Atomic uint64_t turns_from;
  /* By number: when its session was last seen at work, in ms; 0: not known. */
  _Atomic uint32_t beats[HL__SQLITE_RANGES][HL__SQLITE_BEATS];
} hl__sqlite_side;

typedef struct hl__sqlite_store {
  hl_store base;
  const hl_store_config *config;
  bool lasts; /* a grant survives a power failure (synchronous=full) */
  uint64_t boot[2];
  atomic_int_fast64_t sweep; /* when records that ended long ago go; hl__now_ms */
} hl__sqlite_store;

/* The statements of a session; statement.c has their texts. */
typedef enum hl__sqlite_number {
  HL__SQLITE_BEGIN,
  HL__SQLITE_COMMIT,
  HL__SQLITE_ROLLBACK,
  HL__SQLITE_STATE,
  HL__SQLITE_COUNT,
  HL__SQLITE_RAISE,
  HL__SQLITE_PAGES,
  HL__SQLITE_BLOCKER,
  HL__SQLITE_ADD_LEASE,
  HL__SQLITE_ADD_ROW,
  HL__SQLITE_GET_LEASE,
  HL__SQLITE_DELETE_LEASE,
  HL__SQLITE_DELETE_ROW,
  HL__SQLITE_SET_END,
  HL__SQLITE_SET_HOLDER,
  HL__SQLITE_SET_ROWS,
  HL__SQLITE_SET_REVOKED,
  HL__SQLITE_LIST,
  HL__SQLITE_LIST_AT,
  HL__SQLITE_ADD_WAITER,
  HL__SQLITE_ADD_WAIT,
  HL__SQLITE_GET_WAITER,
  HL__SQLITE_DELETE_WAITER,
  HL__SQLITE_DELETE_WAIT,
  HL__SQLITE_EARLIER,
  HL__SQLITE_LIST_WAITERS,
  HL__SQLITE_STATEMENTS
} hl__sqlite_number;

typedef struct hl__sqlite_rows {
  uint8_t *packed; /* as a record has them; malloc'ed, or NULL */
  size_t size;
} hl__sqlite_rows;

typedef struct hl__sqlite_session hl__sqlite_session;
struct hl__sqlite_session {
  hl_session base;
  hl__sqlite_store *store;
  char *path;   /* of the database, without symbolic links */
  dev_t device; /* which file that was when the session began */
  ino_t inode;
  char *side_path;
  int side_fd; /* of this session alone: byte locks belong to it */
  struct stat side_stat;
  hl__sqlite_side *side;
  hl__sqlite_side *retired; /* the side file of a file that was taken away; or NULL */
  atomic_bool interrupted;
  /* Commits need not survive a power failure: as the caller wants it; as the connection is set. */
  bool relax, relaxed;
  char label[128];       /* of the request that is recorded; shown */
  hl__sqlite_rows freed; /* by the write transaction: it wakes their waiters */
  bool full;             /* the last write found no space */
  bool cancellable;      /* an interruption ends the wait for the turn to write, too */
  /* On which it sleeps; NULL: it does not. Set by the session's thread. */
  hl__sqlite_futex *_Atomic asleep;
  /* For the session's numbers: the word that it beats, and its last beat. */
  _Atomic uint32_t *beats[HL__SQLITE_RANGES];
  uint32_t beaten[HL__SQLITE_RANGES];
  /* Between hl__sqlite_enter and leave the session's thread owns it; else a thread that forks
     does. NULL: closed, by a fork or because it had become useless. */
  sqlite3 *db;
  int64_t page_size; /* bytes */
  int64_t file_size; /* as it was looked at last; bytes */
  sqlite3_stmt *statements[HL__SQLITE_STATEMENTS];
  hl__list node; /* forks.c */
};

/* ---- dsn.c */

/* As hl_store_ops.parse. */
int hl__sqlite_dsn(char *text, hl_dsn *dsn, hl_error *error);
/* Reads the DSN's parameters into the store. HL_EDSN. */
int hl__sqlite_params(hl__sqlite_store *store, hl_error *error);

/* ---- place.c */

/* Finds the file, or makes an empty one; sets path, device and inode.
   HL_ESTORE, HL_EUNSAFE_SERVER, HL_ENOMEM. */
int hl__sqlite_place(hl__sqlite_session *session, const char *path, hl_error *error);
/* Whether the path still leads to that file; and how large it is. */
bool hl__sqlite_place_stands(hl__sqlite_session *session);
/* HL_ECONNECTION: it does not. */
int hl__sqlite_moved_error(const hl__sqlite_session *session, hl_error *error);

/* ---- database.c; between enter and leave */

/* Opens session->db, makes missing tables, and compares the levels; the first session settles
   the store's layout. Until the deadline. */
int hl__sqlite_open(hl__sqlite_session *session, int64_t deadline, hl_error *error);
void hl__sqlite_close(hl__sqlite_session *session);

/* ---- forks.c */

/* SQLite must not be carried over a fork: its knowledge of its files and their locks belongs to
   the process. So fork() waits until every thread has left, and closes all connections before
   the child is born; parent and child open them again. Between enter and leave a thread does
   nothing that waits for others, and calls nothing of fork.h. Not nested. */
void hl__sqlite_forks_init(void); /* before anything else */
/* Opens the connection where it is closed. HL_ECONNECTION: it is another file
   now. After any failure it is not entered. */
int hl__sqlite_enter(hl__sqlite_session *session, hl_error *error);
void hl__sqlite_leave(void);
/* From now on, and no more. */
void hl__sqlite_forks_add(hl__sqlite_session *session);
void hl__sqlite_forks_remove(hl__sqlite_session *session);

/* ---- statement.c; between enter and leave */

/* The statement, prepared. NULL: it could not be; to bind its values does nothing then, and the
   next three functions return why. */
sqlite3_stmt *hl__sqlite_statement(hl__sqlite_session *session, hl__sqlite_number number);
/* The same, with its first value. */
sqlite3_stmt *hl__sqlite_statement_of(hl__sqlite_session *session, hl__sqlite_number number,
                                      int64_t value);
/* Its next row: SQLITE_ROW, or SQLITE_DONE, or an error. */
int hl__sqlite_step(hl__sqlite_session *session, sqlite3_stmt *statement);
/* Runs one to its end, and forgets its values. SQLITE_OK or an error. */
int hl__sqlite_run(hl__sqlite_session *session, sqlite3_stmt *statement);
/* The first column of its first row; 0: it has none. SQLITE_OK or an error. */
int hl__sqlite_ask(hl__sqlite_session *session, sqlite3_stmt *statement, int64_t *value);
/* Resets it. Returns the code of its last step; SQLITE_OK for SQLITE_ROW and SQLITE_DONE. */
int hl__sqlite_reset(sqlite3_stmt *statement, int code);
/* Translates an error of SQLite's for a caller. `doing` names the attempt ("grant a lease").
   HL_TIMEOUT: another process writes. */
int hl__sqlite_error(hl__sqlite_session *session, int code, const char *doing, hl_error *error);

/* ---- side.c */

/* Opens and maps it. The place has been found. */
int hl__sqlite_side_open(hl__sqlite_session *session, hl_error *error);
void hl__sqlite_side_close(hl__sqlite_session *session);
/* NULL is fine. */
void hl__sqlite_side_unmap(hl__sqlite_side *side);
/* Whether others who come now open the same one. */
bool hl__sqlite_side_stands(const hl__sqlite_session *session);

/* Byte locks of the session's, at most one of each range; each is one number's.
   False: another has it. From here to the unlocking hl__sqlite_sleep says that
   the session is at work. Unlocking is fine where nothing is locked. */
bool hl__sqlite_byte_lock(hl__sqlite_session *session, hl__sqlite_range range, uint64_t number);
void hl__sqlite_byte_unlock(hl__sqlite_session *session, hl__sqlite_range range, uint64_t number);
/* Whether another session has locked any of n numbers from the first on; *which:
   one of them, unless NULL. */
bool hl__sqlite_bytes_locked(const hl__sqlite_session *session, hl__sqlite_range range,
                             uint64_t first, uint64_t n, uint64_t *which);
/* Whether the session that has the number is stopped: for so long it has not
   said that it is at work. */
bool hl__sqlite_is_stopped(const hl__sqlite_session *session, hl__sqlite_range range,
                           uint64_t number);
/* Whether a session has the ticket's byte, and is not stopped. */
bool hl__sqlite_is_alive(const hl__sqlite_session *session, int64_t ticket);
/* The first number from this one on which no other shares its beat. */
int64_t hl__sqlite_beat_free(const hl__sqlite_session *session, int64_t number);
/* Marks the ticket as unused. */
void hl__sqlite_beat_clear(const hl__sqlite_session *session, int64_t ticket);

hl__sqlite_futex *hl__sqlite_futex_of(const hl__sqlite_session *session, int64_t key);
/* Wakes all sleepers that have counted themselves in `sleepers`; without a system call where the
   count is 0. */
void hl__sqlite_wake(hl__sqlite_futex *futex);
/* The session's thread sleeps until the futex's word is not `seen` any more,
   until `until` (hl__now_ms), or less. */
void hl__sqlite_sleep(hl__sqlite_session *session, hl__sqlite_futex *futex, uint32_t seen,
                      int64_t until);
/* From any thread: ends the session's sleep, and its wait. */
void hl__sqlite_interrupt(hl__sqlite_session *session);

/* ---- turn.c */

/* Enters, to read: each statement a snapshot. HL_ECONNECTION: the file is another one now. */
int hl__sqlite_read(hl__sqlite_session *session, hl_error *error);
/* Runs fn in a write transaction, and once more where there was no space for it: the log may be
   reused then. fn returns SQLite's code, and an outcome in *status. Where status is not HL_OK,
   or the code not SQLITE_OK, nothing is changed. Waits for its turn until the deadline. HL_TIMEOUT;
   HL_CANCELLED, where session->cancellable; HL_ECONNECTION: the file is another one now;
   HL_ESTORE. */
typedef int (*hl__sqlite_fn)(hl__sqlite_session *session, void *context, int *status,
                             hl_error *error);
int hl__sqlite_write(hl__sqlite_session *session, hl__sqlite_fn fn, void *context,
                     const char *doing, int64_t deadline, hl_error *error);

/* ---- record.c */

/* A row as it stands in the tables. */
static inline int64_t hl__sqlite_key(const hl_row *row) {
  return hl__row_key(row->level, row->bucket);
}
/* Rows as bytes, of which a record and a ticket have a copy: for each its key
   (8 bytes, the lowest first) and 1 where it is exclusive, else 0. */
#define HL__SQLITE_ROW_SIZE 9u
int64_t hl__sqlite_rows_at(const uint8_t *packed, size_t i, bool *exclusive);

/* When a lease ends. `till` is of the clock of boot time, and means something
   only in the boot with that id; after another boot it is till_unix that
   counts. */
typedef struct hl__sqlite_end_time {
  uint64_t boot[2];
  int64_t till, till_unix; /* ms */
} hl__sqlite_end_time;
void hl__sqlite_until(const hl__sqlite_store *store, int64_t now, int64_t ttl,
                      hl__sqlite_end_time *end);
/* For how many milliseconds its time has been up; less than 0: it is not up. */
int64_t hl__sqlite_over(const hl__sqlite_store *store, const hl__sqlite_end_time *end);
/* Milliseconds until then; 0: it is over. */
int64_t hl__sqlite_left(const hl__sqlite_store *store, const hl__sqlite_end_time *end);
void hl__sqlite_bind_end(sqlite3_stmt *statement, int first, const hl__sqlite_end_time *end);
void hl__sqlite_column_end(sqlite3_stmt *statement, int first, hl__sqlite_end_time *end);
/* Text that others have written, made fit for people. */
void hl__sqlite_column_text(sqlite3_stmt *statement, int column, char *out, size_t size);
/* In a write transaction: adds or deletes a row of a number; SQLite's code. */
int hl__sqlite_row_run(hl__sqlite_session *session, hl__sqlite_number statement, int64_t key,
                       bool exclusive, int64_t number);
/* In a write transaction: writes the lease under a number; SQLite's code. */
int hl__sqlite_record_add(hl__sqlite_session *session, const hl_request *request, int64_t number,
                          int64_t now);
/* In a write transaction, of the record at which a statement stands: deletes it and its rows; or,
   where it becomes revoked, the rows only. */
int hl__sqlite_record_delete(hl__sqlite_session *session, sqlite3_stmt *record, bool whole);
/* Has the waiters for its rows woken once the transaction is committed. SQLITE_OK, SQLITE_NOMEM. */
int hl__sqlite_rows_free(hl__sqlite_session *session, sqlite3_stmt *record);

/* A lease that gets the rows and mode of a request (shown). */
typedef struct hl__sqlite_conversion {
  const hl_request *request;
  int64_t number; /* an upgrade's: a new one, and so a new token. 0: the lease keeps its own, which
                     is here then */
} hl__sqlite_conversion;
/* How the mode of a request stands in the tables, in the column `shared`. */
static inline int hl__sqlite_mode(hl_mode mode) { return mode == HL_EXCLUSIVE ? 0 : (int)mode; }
static inline hl_mode hl__sqlite_mode_read(int column) {
  if (column == 0) return HL_EXCLUSIVE;
  return column == HL_UPDATE ? HL_UPDATE : HL_SHARED;
}

/* The file grows by this much at a time; its size is a multiple of it. */
#define HL__SQLITE_CHUNK 262144
/* How long another user's program may need to give the files that it makes their mode; ms. */
#define HL__SQLITE_MAKING_MS 100

/* In a write transaction: enters a ticket, whose byte is locked before. */
int hl__sqlite_ticket_add(hl__sqlite_session *session, const hl_request *request, int64_t ticket);
int hl__sqlite_ticket_delete(hl__sqlite_session *session, int64_t ticket);

/* ---- grant.c */

/* As hl_store_ops.take. With request->upgrade: the lease, which is there, gets the rows in
   their new mode; as hl_lease_ops.convert. */
int hl__sqlite_take(hl__sqlite_session *session, const hl_request *request, hl_grant *grant,
                    hl_error *error);

/* Columns of a record, as statement.c names them. */
enum hl__sqlite_column {
  HL__COLUMN_NUMBER,
  HL__COLUMN_ID,
  HL__COLUMN_SECRET,
  HL__COLUMN_HOLDER,
  HL__COLUMN_BOOT,
  HL__COLUMN_TILL,
  HL__COLUMN_TILL_UNIX,
  HL__COLUMN_ROWS,
  HL__COLUMN_SHARED,
  HL__COLUMN_OWNER,
  HL__COLUMN_PATH,
  HL__COLUMN_LABEL,
  HL__COLUMN_APPLICATION,
  HL__COLUMN_HOST,
  HL__COLUMN_PID,
  HL__COLUMN_SINCE,
  HL__COLUMN_REVOKED,
  HL__COLUMN_REVOKED_BY,
  HL__COLUMN_REASON
};
/* Finds the record of that id. SQLITE_ROW, with the record at *statement, which the caller
   resets; SQLITE_DONE: not found. */
int hl__sqlite_find(hl__sqlite_session *session, const hl_lease_terms *terms,
                    sqlite3_stmt **statement);
/* Like hl__sqlite_find, where the record is this holder's and not revoked; else SQLITE_DONE, and
   *status and *error say why. */
int hl__sqlite_find_held(hl__sqlite_session *session, const hl_lease_terms *terms,
                         sqlite3_stmt **statement, int *status, hl_error *error);
bool hl__sqlite_is_bytes(sqlite3_stmt *it, int column, const uint8_t bytes[16]);
/* Judges what a statement has found: `code` is SQLITE_ROW or SQLITE_DONE, and *record says what was
   compared beside that. HL_OK, HL_ELOST, HL_EMISMATCH. */
int hl__sqlite_judge(sqlite3_stmt *it, int code, hl__record *record, hl_error *error);
/* Converts the held record of a hl__sqlite_conversion: a hl__sqlite_fn. */
int hl__sqlite_convert(hl__sqlite_session *session, void *conversion, int *status, hl_error *error);

/* ---- leases.c */

extern const hl_lease_ops hl__sqlite_leases;
/* Deletes now and then the records that ended long ago. */
void hl__sqlite_sweep(hl__sqlite_session *session);
int hl__sqlite_holders(hl__sqlite_session *session, const hl_lease_filter *filter, hl_holder_fn fn,
                       void *context, hl_error *error);

#endif
