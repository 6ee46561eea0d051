/*
 * postgresql_store.h - shared by the files of the PostgreSQL store. Only this folder includes
 * <libpq-fe.h>.
 *
 *     postgresql.c  the store's operations: the life of a session
 *     dsn.c         parses a DSN
 *     connect.c     from a DSN to a logged-in connection
 *     server.c      checks that a server excludes, and sets a session up
 *     tag.c         the comment before a statement: tells observers who waits for which lock
 *     trip.c        one round trip: what it locks, and what its answer means
 *     prepared.c    takes free rows with a prepared statement
 *     statement.c   the statement that locks the rows of a request
 *     wire.c        sending, answers, errors
 *     cancel.c      ends a wait at the server
 *     holders.c     finds the holders and waiters of a row
 *     gate.c        finds out whether there are leases, and waits for those in the way
 *     bell.c        tells a waiter that the lease in its way has ended
 *     pipeline.c    several statements in one round trip
 *     record.c      the record of a lease: written when the lease is taken
 *     leases.c      the other operations on records (hl_lease_ops)
 *     tables.c      the tables of leases, and sweeping them
 *
 * csrc/lua/store/postgresql.c makes a Lua module of it.
 *
 * A row is an advisory lock of a transaction. The key is a number of 64 bits: the level in the
 * upper four bits, a hash in the others. There is no table, and nothing is written, except for
 * leases: see gate.c. A session connects, sends SET, and checks the server (server.c); then, many
 * times, it sends BEGIN with the lock statement in one message, and later ROLLBACK. An extend locks
 * more rows after a SAVEPOINT, as an error ends the transaction back to there.
 */
#ifndef HIERLOCK_POSTGRESQL_STORE_H
#define HIERLOCK_POSTGRESQL_STORE_H

#include "clock.h"
#include "error.h"
#include "fork.h"
#include "layout.h"
#include "record.h"
#include "socket.h"
#include "store.h"

#include <libpq-fe.h>
#include <pthread.h>
#include <stdatomic.h>

/* OpenSSL's functions if libpq is linked with OpenSSL; else NULL. */
extern void OPENSSL_thread_stop(void) __attribute__((weak));
extern int OPENSSL_init_ssl(uint64_t options, const void *settings) __attribute__((weak));

typedef struct hl__pg_session hl__pg_session;

typedef struct hl__pg_store {
  hl_store base;
  const hl_store_config *config;
  int64_t connect_timeout;        /* ms; per host, if the DSN names several */
  atomic_int_fast64_t connecting; /* how long the last connecting took; ms */
  /* When to sweep the tables of leases next; hl__now_ms. */
  atomic_int_fast64_t sweep;
  atomic_uint sessions; /* without those aside */
  /* The connection that listens for the ends of leases, or NULL: see bell.c. It, and when to
     connect another one at the earliest (hl__now_ms) and the pause before that (ms), belong to the
     thread that has set ear_taken. */
  atomic_bool ear_taken;
  hl__pg_session *ear;
  int64_t ear_after, ear_rest;
} hl__pg_store;

/* The most bytes, with the NUL, of the comment in which a session describes itself. Servers show
   the first 1,024 bytes of a statement, unless configured otherwise (track_activity_query_size). */
#define HL__PG_TAG_MAX 960u

/* A session that alters or vacuums the tables of leases locks them. A statement that needs the
   tables fails after HL__PG_TABLE_MS (lock_timeout; ms). A wait for rows or a lead has an end of
   its own (statement_timeout), and lifts this limit. A try ends before its caller's time is up
   (hl__late_answer_by); a request that may wait is then tried again. */
#define HL__PG_TABLE_MS 1000
#define HL__PG_TRY "set_config('lock_timeout','500',true)"

/* The advisory lock that writers of the gate have; sql/postgresql_leases.sql names it, too. */
#define HL__PG_GATE_KEYS "1751999844, 1952409963"

/* The values of the column HL__PG_GATE. */
enum {
  HL__PG_GATE_UNKNOWN = -1, /* the gate exists, but was not read or may not be read */
  HL__PG_GATE_ABSENT,       /* there are no tables of leases */
  HL__PG_GATE_CLOSED,       /* there is no lease */
  HL__PG_GATE_OPEN          /* there may be leases */
};

/* The most statements that a session keeps prepared, one per sequence of modes. */
#define HL__PG_SHAPES_MAX 16u
#define HL__PG_SHAPE_ROWS_MAX 16u

struct hl__pg_session {
  hl_session base;
  hl__pg_store *store;
  PGconn *connection;
  int fd; /* the connection's, for other threads; see hl__fork_watch */
  uint64_t ticket;
  int64_t began; /* before it logged in; hl__now_ms */
  hl__wakeup wakeup;
  /* A message from the server is being read, and may say that the lock is lost. */
  atomic_bool in_hand;
  int backend;       /* process number of the server's backend */
  unsigned sequence; /* OID of the sequence that makes tokens; 0: no sequence */
  /* The server has said that it ends the connection; the SQLSTATE and the message. */
  bool ended;
  char ended_state[6], ended_message[200];
  /* An answer is outstanding. kept: the last rows so far, or the first error. */
  bool outstanding;
  bool pipelined; /* the answer ends with that to a sync */
  PGresult *kept;
  PGresult *second; /* of a pipeline: the second set of rows */
  /* A transaction of ours is open. Settle believes the server about it, not our memory. */
  bool holds;
  bool tells_transaction; /* the outstanding answer must confirm the transaction */
  bool releases;          /* the outstanding answer is to ROLLBACK */
  int64_t patience;       /* the deadline of hl__pg_query; hl__now_ms */
  int64_t limit;          /* the deadline of the call that has the session: see hl__pg_answer_by */
  char tag[HL__PG_TAG_MAX]; /* of the last request: a comment; "" before the first */
  /* The modes of each prepared shape, as in its name. */
  char shapes[HL__PG_SHAPES_MAX][HL__PG_SHAPE_ROWS_MAX + 1];
  unsigned shape_count;
  /* Leases. gate: its last known state. gated: it existed when the session began. blind: the role
     may not read the gate's schema. */
  int gate;
  bool gated, blind;
  bool rings; /* the role may notify: see bell.c */
  /* ready: the tables exist, and may be used. prepared: which statements of leases.c are prepared,
     by number, under names of this generation. */
  bool ready;
  /* A call was refused because of something that a session keeps from its beginning: its role's
     settings and rights. A new session may succeed. */
  bool outdated;
  unsigned prepared, generation;
  bool savepoint; /* the savepoint of the last extend exists */
  bool upgraded;  /* the last extend was an upgrade */
};

/* A statement of a pipeline. */
typedef struct hl__pg_part {
  int number;      /* prepared once under this number; -1: not prepared */
  const char *sql; /* has no parameters if not prepared */
  int n;
  const char *values[16];
  int lengths[16], formats[16];
} hl__pg_part;
/* Numbers of prepared statements; from HL__PG_SHAPES on: lock statements of leases. */
enum { HL__PG_CONFLICTS, HL__PG_TAKE, HL__PG_REFRESH, HL__PG_DROP, HL__PG_ADOPT, HL__PG_SHAPES };

/* ---- dsn.c */

/* Like hl_store_ops.parse. */
int hl__pg_dsn(char *text, hl_dsn *dsn, hl_error *error);
/* Reads the DSN's parameters into the store. HL_OK, HL_EDSN, HL_ENOMEM. */
int hl__pg_params(hl__pg_store *store, hl_error *error);

/* ---- connect.c */

/* Connects and logs in, and does nothing else. Ends at the deadline, or after connect_timeout if
   that is sooner. */
int hl__pg_connect(hl__pg_store *store, int64_t deadline, hl__pg_session **session,
                   hl_error *error);
/* Says goodbye without waiting, and frees the session. NULL is fine. */
void hl__pg_disconnect(hl__pg_session *session);

/* ---- server.c */

/* Checks that locks on this server exclude, and sets the session up, until session->patience. The
   first session decides the store's layout. HL_OK, HL_EUNSAFE_SERVER, HL_EMISMATCH, or as
   hl__pg_query. */
int hl__pg_verify(hl__pg_session *session, hl_error *error);

/* ---- tag.c */

/* Writes the request's description for observers, as a comment of SQL. */
void hl__pg_tag(const hl__pg_session *session, const hl_request *request, char tag[HL__PG_TAG_MAX]);
/* Changes a tag to say that the request holds its rows and waits for a lease. */
void hl__pg_tag_waits(char tag[HL__PG_TAG_MAX]);
/* Reads the description of another session. The server may have cut it. False: the comment is not
   ours. */
bool hl__pg_tag_read(const char *query, hl_holder *holder);

/* ---- trip.c */

/* The advisory lock that Symfony's PostgreSqlStore and DoctrineDbalPostgreSqlStore take for a name:
   PHP's crc32(). */
uint64_t hl__pg_name_key(const char *name, size_t size);
/* The advisory lock of a row as the server shows it: signed. */
static inline int64_t hl__pg_key(unsigned level, uint64_t bucket) {
  if (level == HL_LEVEL_NAMED) return (int64_t)bucket; /* hl__pg_name_key */
  return hl__row_key(level, bucket);
}
/* The last columns that a lock statement returns. */
enum { HL__PG_REFUSED, HL__PG_TOKEN, HL__PG_SERVER, HL__PG_GATE, HL__PG_COLUMNS };
/* Writes all of these columns except the first. */
int hl__pg_columns(const hl__pg_session *session, char *out, size_t size);
/* hl__pg_token writes the first of them. hl__pg_grant_read reads the row that the statement
   returned. */
int hl__pg_token(const hl__pg_session *session, char *out, size_t size);
int hl__pg_grant_read(hl__pg_session *session, bool try_once, uint64_t *token, hl_error *error);
/* The expression for HL__PG_GATE. The server evaluates it after the locks, in the same
   statement. */
const char *hl__pg_gate_column(const hl__pg_session *session);
/* The keys of rows as an array of SQL, "{1,2}"; with `exclusive`, only of rows wanted exclusively.
   The caller frees it. NULL: out of memory. */
char *hl__pg_keys(const hl_row *rows, size_t n, bool exclusive);
/* Waits for the answer. When interrupted, has the server end the wait; the answer still comes, and
   may be a grant. */
int hl__pg_answer_await(hl__pg_session *session, const hl_request *request, hl_error *error);
/* Tells a time-out from a cancel request: the server uses one code for both. end: when the server
   was to end the statement; hl__now_ms. */
int hl__pg_failure(hl__pg_session *session, int64_t end, hl_error *error);
/* Sends a statement that waits, and awaits its answer as the request says. */
int hl__pg_wait_run(hl__pg_session *session, const hl_request *request, const char *sql,
                    hl_error *error);
/* Sends a statement that must succeed while rows are held, and waits for its answer. */
int hl__pg_command(hl__pg_session *session, const char *tag, const char *sql, int64_t *sent,
                   hl_error *error);

/* ---- statement.c */

int hl__pg_lock_rows(hl__pg_session *session, const hl_request *request, hl_grant *grant,
                     hl_error *error);
/* As hl_store_ops.downgrade. */
int hl__pg_downgrade(hl_session *session, const hl_request *request, int64_t *sent_ms,
                     hl_error *error);

/* ---- prepared.c */

/* Begins a transaction and takes the rows of the request in one round trip, if all are free. Sends,
   and does not wait. The answer has a lock statement's columns; if they say that it was refused,
   the transaction holds some of the first rows. False: not possible for such a request, and nothing
   was sent. */
bool hl__pg_send_try(hl__pg_session *session, const hl_request *request, const char *tag,
                     int *status, hl_error *error);
/* Queues the query for leases in the way behind a lock statement of a pipeline. keys, exclusive:
   from hl__pg_keys. */
bool hl__pg_conflicts_queue(hl__pg_session *session, const char *keys, const char *exclusive);
/* Ends what hl__pg_send_try began. fine: its statement is prepared now, and can be used again. */
void hl__pg_try_done(hl__pg_session *session, const hl_request *request, bool fine);

/* ---- holders.c */

int hl__pg_holders(hl__pg_session *session, const hl_lease_filter *filter, hl_holder_fn fn,
                   void *context, hl_error *error);

/* ---- gate.c */

/* How long the record `l` lasts: ms, in SQL. A stranger may have written an endless time. */
#define HL__PG_LEFT                                                                                \
  "ceil(least(greatest((extract(epoch FROM l.till)-extract(epoch FROM "                            \
  "clock_timestamp()))*1000,-1),9e15))::int8"
/* How a request's rows are taken. token, sent: the last statement's. */
typedef struct hl__pg_taking {
  hl__pg_session *session;
  char tag[HL__PG_TAG_MAX];
  bool begun; /* a transaction, or in an extend a savepoint, is open */
  uint64_t token;
  int64_t sent;
} hl__pg_taking;
/* Called once the request's rows are locked. Waits, with the rows held, until no lease except
   request->exempt is in the way. After a wait the token is new, as the lease's token may have grown
   meanwhile. HL_OK; HL_TIMEOUT, HL_CANCELLED; HL__BEHIND_UPDATE. */
int hl__pg_leases_await(hl__pg_taking *taking, const hl_request *request, hl_error *error);

/* ---- bell.c */

/* A column behind RETURNING of a statement that ends a lease, or lets readers in: wakes the waiter
   that has marked the record. Only for a session that rings. A notification must not fail the
   release: none where the server's queue is almost full, and no limit for the lock of the whole
   server that COMMIT waits for, which other programs' notifications take as well. */
#define HL__PG_BELL(reason)                                                                        \
  ",CASE WHEN " reason " IS NOT NULL AND pg_notification_queue_usage()<0.9 THEN "                  \
  "set_config('lock_timeout','0',true)||pg_notify('hierlock_'||l.id,'')::text END"
/* Listens for the end of this lease, instead of earlier ones; does not await the answer. *ear: the
   store's ear, or NULL: takes it until hl__pg_ear_give, and may connect. False: not now. session:
   the waiter's, which has time until the deadline. */
bool hl__pg_ear_listen(hl__pg_session *session, hl__pg_session **ear, const char *id,
                       int64_t deadline);
void hl__pg_ear_give(hl__pg_session *ear, bool failed);
/* Closes the ear, unless a waiter has it. */
void hl__pg_ear_end(hl__pg_store *store);
/* Reads what has come, without a wait. HL_OK: the waiter is to poll; after the first time *marked
   says whether the lease's end will be heard. HL_TIMEOUT: nothing yet. HL_ECONNECTION: the ear has
   failed, or the server does not let it mark records. */
int hl__pg_ear_read(hl__pg_session *ear, bool *marked);

/* ---- record.c */

/* Like hl_store_ops.take, for a lease. */
int hl__pg_lease_take(hl__pg_session *session, const hl_request *request, hl_grant *grant,
                      hl_error *error);
int hl__pg_to_lease(hl_session *session, const hl_request *request, hl_grant *grant,
                    hl_error *error);
/* Like hl_lease_ops.convert, but on a session with tables, and HL_ELOST does not say why. */
int hl__pg_lease_convert(hl__pg_session *session, const hl_request *request, hl_grant *grant,
                         hl_error *error);
/* ---- pipeline.c */

/* Sends the parts as one pipeline; the answer is outstanding. */
int hl__pg_pipeline(hl__pg_session *session, const hl__pg_part *parts, size_t n, hl_error *error);
/* Like hl__pg_pipeline, but waits for the answer until the deadline, and judges errors:
   HL_ENOT_PROVISIONED: the tables are not as they should be; HL_TIMEOUT: another session has
   locked a row or a table. */
int hl__pg_pipeline_run(hl__pg_session *session, const hl__pg_part *parts, size_t n,
                        int64_t deadline, hl_error *error);
/* Forgets which statements are prepared. */
void hl__pg_unprepare(hl__pg_session *session);
/* Queues a part. False: libpq refused it. */
bool hl__pg_part_queue(hl__pg_session *session, const hl__pg_part *part);
/* Appends a parameter to a part: text, bytes, or a number, which is written into `room`. */
void hl__pg_value(hl__pg_part *part, const char *text);
void hl__pg_bytes(hl__pg_part *part, const void *data, size_t size);
void hl__pg_number(hl__pg_part *part, char room[24], int64_t number);

/* ---- leases.c */

extern const hl_lease_ops hl__pg_leases;
int hl__pg_lease_holders(hl__pg_session *session, const hl_lease_filter *filter, hl_holder_fn fn,
                         void *context, hl_error *error);

/* ---- tables.c */

/* Creates the tables of leases, in one transaction. */
extern const char hl__pg_tables_sql[];
/* Finds tables of leases that this role may use; with `make`, creates them if possible. HL_OK;
   HL__ABSENT: no tables, and `make` was false. */
int hl__pg_tables(hl__pg_session *session, bool make, hl_error *error);
/* If it is time, closes the gate and deletes records that ended long ago. On an idle session. */
int hl__pg_sweep(hl__pg_session *session, hl_error *error);
/* Connects like a session of the pool. */
int hl__pg_aside_open(hl__pg_session *session, int64_t deadline, hl__pg_session **result,
                      hl_error *error);
/* Runs a statement on a connection of its own, as the session's transaction must neither end nor
   undo it. */
int hl__pg_aside(hl__pg_session *session, const char *sql, hl_error *error);
/* The deadline for an answer that takes a server only a moment. Later, the server hangs. */
int64_t hl__pg_answer_by(const hl__pg_session *session);

/* ---- cancel.c */

/* Has the server end the session's current statement, and waits until it has, or until the
   deadline. So it never hits a later statement. HL_OK; HL_ECONNECTION: the cancel may still come,
   and the session must not be used any more. */
int hl__pg_cancel(hl__pg_session *session, int64_t deadline, hl_error *error);

/* ---- wire.c */

/* Receives libpq's notices; prints nothing. argument: the session. */
void hl__pg_notice(void *argument, const PGresult *result);
/* The status of an error, and its message. result: NULL for the connection's error. doing: the
   attempted action ("connect", "lock rows"). */
int hl__pg_error(const hl__pg_session *session, const PGresult *result, const char *doing,
                 hl_error *error);
enum {
  HL__PG_DENIES = 1, /* a role or its password, and that lasts */
  HL__PG_OBJECT = 2, /* an object is missing, is another one, or is closed to the role */
  HL__PG_PLAN = 4    /* a prepared statement's objects have changed */
};
/* Whether the SQLSTATE has one of these traits. */
bool hl__pg_state_is(const char *state, unsigned traits);
/* Like hl__pg_error, for an SQLSTATE ("": libpq's own error) and a message. */
int hl__pg_error_state(const char *state, const char *message, const char *doing, hl_error *error);
/* HL_ECONNECTION: the connection has ended. */
int hl__pg_gone(const hl__pg_session *session, hl_error *error);
/* Whether the connection stands, without a round trip. Reads any bytes that came while no
   answer was outstanding. */
bool hl__pg_stands(hl__pg_session *session);
/* Whether the socket is readable or closed. Any thread. */
bool hl__pg_readable(const hl__pg_session *session);
/* hl__pg_sent says whether everything was sent that libpq was given since hl__pg_sending. The
   kernel may refuse bytes, for want of memory say. Then libpq drops them and all that follow, and
   reports success. It expects to read the end of the connection, which may never come.
   Call hl__pg_sending, give libpq the data, then call hl__pg_sent, which also flushes the rest. */
void hl__pg_sending(void);
bool hl__pg_sent(hl__pg_session *session);
/* HL_ECONNECTION: the data was not sent. */
int hl__pg_send_error(const hl__pg_session *session, hl_error *error);
void hl__pg_results_clear(hl__pg_session *session);
/* Sends without waiting; the answer is outstanding. No other answer may be outstanding. */
int hl__pg_send(hl__pg_session *session, const char *sql, hl_error *error);
/* Gives all rows back; the answer is outstanding. */
int hl__pg_rollback_send(hl__pg_session *session, hl_error *error);
/* Reads the outstanding answer into session->kept, waiting until the deadline (hl__now_ms; 0: not
   at all). HL_OK; HL_TIMEOUT, or, if interruptible, HL_CANCELLED: the answer is still outstanding;
   HL_ECONNECTION. */
int hl__pg_await(hl__pg_session *session, int64_t deadline, bool interruptible, hl_error *error);
/* Like hl_store_ops.settle, but keeps an interruption, which ends the wait if interruptible. */
int hl__pg_settle(hl__pg_session *session, int64_t deadline, bool interruptible, hl_error *error);
/* Sends a query and waits for its result until session->patience. *result: the last result with
   rows, of at least so many columns (0: no rows needed, may be NULL); the caller clears it.
   result NULL: the caller wants none. HL_OK or as hl__pg_error; HL_ECONNECTION: the server does
   not answer. */
int hl__pg_query(hl__pg_session *session, const char *sql, int columns, PGresult **result,
                 hl_error *error);
/* A field of a result. NULL: it is NULL, or does not exist. */
const char *hl__pg_field(const PGresult *result, int row, int column);

#endif
