/*
 * postgresql_store.h - what the files of the PostgreSQL store share. This folder is
 * the only one that includes <libpq-fe.h>.
 *
 *     postgresql.c  the store's operations: the life of a session
 *     dsn.c         a DSN, taken apart
 *     connect.c     from a DSN to a logged-in connection
 *     server.c      does this server exclude? and what a session wants of it
 *     tag.c         the comment before a statement, by which observers know who waits for what
 *     trip.c        one trip: what it locks, and what its answer means
 *     prepared.c    takes what is free, by a statement that is prepared
 *     statement.c   the one statement that locks the rows of a request
 *     wire.c        sending, answers, errors
 *     cancel.c      ends a wait at the server
 *     holders.c     who holds or awaits a row
 *     gate.c        are there leases? and waiting for those that are in the way
 *     pipeline.c    several statements in one trip
 *     record.c      the record of a lease: written when it is taken
 *     leases.c      the other operations on records (hl_lease_ops)
 *     tables.c      the tables of leases; and who sweeps them
 *
 * csrc/lua/postgresql makes a Lua module of it.
 *
 * A row is an advisory lock of a transaction; its key is a number of 64 bits, the
 * level in the upper four and a hash in the others. There is no table, and nothing
 * is written, but where there are leases: see gate.c. The session of a server: connect, SET and look (server.c); then many
 * times { BEGIN and the lock statement in one message, ROLLBACK }. More rows
 * (extend) are taken behind a SAVEPOINT, as an error ends the transaction up to
 * there.
 */
#ifndef HIERLOCK_POSTGRESQL_STORE_H
#define HIERLOCK_POSTGRESQL_STORE_H

#include "clock.h"
#include "error.h"
#include "fork.h"
#include "layout.h"
#include "socket.h"
#include "store.h"

#include <libpq-fe.h>
#include <pthread.h>
#include <stdatomic.h>

/* OpenSSL's, where libpq is linked with that; else NULL. */
extern void OPENSSL_thread_stop(void) __attribute__((weak));
extern int OPENSSL_init_ssl(uint64_t options, const void *settings) __attribute__((weak));

typedef struct hl__pg_session hl__pg_session;

HL__MUTEX_CLASS(hl__pg_store_mutex) HL__AFTER(hl__connection_mutex) HL__BEFORE(hl__births);

typedef struct hl__pg_store {
  hl_store base;
  const hl_store_config *config;
  int64_t connect_timeout;        /* ms; for each host, where the DSN names several */
  atomic_int_fast64_t connecting; /* how long it took the last time; ms */
  bool provisions;                /* it makes the tables of leases, and needs not find them whole */
  pthread_mutex_t mutex;
  /* When the tables of leases are to be swept next; hl__now_ms. */
  atomic_int_fast64_t sweep;
  /* Connected by open, for the first session. */
  hl__pg_session *spare HL__GUARDED_BY(hl__pg_store_mutex);
} hl__pg_store;

HL__MUTEX_FUNCTIONS(hl__pg_store, hl__pg_store, mutex, hl__pg_store_mutex)

/* What a session says of itself, in a comment: at most so many bytes, its NUL
   included. Servers show the first 1,024 bytes of a statement, unless told
   otherwise (track_activity_query_size). */
#define HL__PG_TAG_MAX 960u

/* Whoever alters, or cleans up, the tables of leases keeps everybody from them: what asks for
   them fails after so long (lock_timeout; ms). What waits for rows, or a lead, has an end of its own
   (statement_timeout), and lifts this. A try's end comes before its caller's time is up
   (hl__late_answer_by): a request that may wait is then tried again. */
#define HL__PG_TABLE_MS 1000
#define HL__PG_TRY "set_config('lock_timeout','500',true)"

/* What a lock statement says of leases: HL__PG_GATE. */
enum {
  HL__PG_GATE_UNKNOWN = -1, /* it was there, or may not be looked at */
  HL__PG_GATE_ABSENT,       /* there are no tables of leases */
  HL__PG_GATE_CLOSED,       /* there is no lease */
  HL__PG_GATE_OPEN          /* there may be some */
};

/* Statements that a session keeps prepared: one for each sequence of modes. */
#define HL__PG_SHAPES_MAX 16u
#define HL__PG_SHAPE_ROWS_MAX 16u

struct hl__pg_session {
  hl_session base;
  hl__pg_store *store;
  PGconn *connection;
  int fd; /* of the connection, for other threads; see hl__fork_watch */
  uint64_t ticket;
  hl__wakeup wakeup;
  /* What has come from the server is being read, and may be a loss. */
  atomic_bool in_hand;
  int backend;       /* number of the server's process */
  unsigned sequence; /* its OID, of which tokens are made; 0: there is none */
  /* The server has said that it ends the connection; of what kind, and why. */
  bool ended;
  char ended_state[6], ended_message[200];
  /* Something was sent whose answer is not read yet; what has come of it: the last
     rows, or the first error. */
  bool outstanding;
  bool pipelined; /* it ends with the answer to a sync */
  PGresult *kept;
  PGresult *second; /* of a pipeline: rows that came behind those */
  /* A transaction of ours is open: what the server says of it is believed, not what
     we remember (settle). */
  bool holds;
  bool tells_transaction; /* the outstanding answer shall say so */
  bool releases;          /* the outstanding answer is one to ROLLBACK */
  int64_t patience;       /* hl__pg_query waits until then; hl__now_ms */
  int64_t limit; /* the call that has the session is to return by then: see hl__pg_answer_by */
  char tag[HL__PG_TAG_MAX]; /* of the last request; a comment, "" before it */
  /* Modes of the shapes that are prepared, as in their names. */
  char shapes[HL__PG_SHAPES_MAX][HL__PG_SHAPE_ROWS_MAX + 1];
  unsigned shape_count;
  /* Leases. gate: as it was last. gated: it was there when the session began. blind: the
     role may not look into its schema. */
  int gate;
  bool gated, blind;
  /* The tables are there, and may be used; what of leases.c is prepared, by number, under
     names of this generation. */
  bool ready;
  /* It was refused for what a session keeps from its beginning: the settings of its role,
     and what that role could see then. A new one may be better off. */
  bool outdated;
  unsigned prepared, generation;
  bool savepoint; /* that of the last extend is still there */
  bool upgraded;  /* that was an upgrade */
};

/* A statement of a pipeline. */
typedef struct hl__pg_part {
  int number;      /* it is prepared, once, under this number; -1: it is not */
  const char *sql; /* without parameters where it is not */
  int n;
  const char *values[16];
  int lengths[16], formats[16];
} hl__pg_part;
enum { /* numbers */
  HL__PG_CONFLICTS,
  HL__PG_TAKE,
  HL__PG_REFRESH,
  HL__PG_DROP,
  HL__PG_ADOPT,
  HL__PG_SHAPES /* and above: lock statements of leases */
};

/* ---- dsn.c */

/* As hl_store_ops.parse. */
int hl__pg_dsn(char *text, hl_dsn *dsn, hl_error *error);
/* Reads the DSN's parameters into the store. HL_OK, HL_EDSN, HL_ENOMEM. */
int hl__pg_params(hl__pg_store *store, hl_error *error);

/* ---- connect.c */

/* Connects and logs in; nothing else. Until the deadline, or for connect_timeout if
   that is shorter. */
int hl__pg_connect(hl__pg_store *store, int64_t deadline, hl__pg_session **session,
                   hl_error *error);
/* Closes politely, without waiting; frees. NULL is fine. */
void hl__pg_disconnect(hl__pg_session *session);

/* ---- server.c */

/* Looks whether locks on this server exclude, and sets the session up, until
   session->patience. The first session settles the store's layout. HL_OK,
   HL_EUNSAFE_SERVER, HL_EMISMATCH or what hl__pg_query says. */
int hl__pg_verify(hl__pg_session *session, hl_error *error);

/* ---- tag.c */

/* Writes what observers are shown of the request, as a comment of SQL. */
void hl__pg_tag(const hl__pg_session *session, const hl_request *request, char tag[HL__PG_TAG_MAX]);
/* The same, of one that holds its rows and waits for a lease. */
void hl__pg_tag_waits(char tag[HL__PG_TAG_MAX]);
/* What a session says of itself. False: it is not of our making. A server may have cut
   it. */
bool hl__pg_tag_read(const char *query, hl_holder *holder);

/* ---- trip.c */

/* The advisory lock that Symfony's PostgreSqlStore and DoctrineDbalPostgreSqlStore take for
   a name: PHP's crc32(). */
uint64_t hl__pg_name_key(const char *name, size_t size);
/* The advisory lock of a row, as the server shows it: signed. */
static inline int64_t hl__pg_key(unsigned level, uint64_t bucket) {
  if (level == HL_LEVEL_NAMED) return (int64_t)bucket; /* hl__pg_name_key */
  return hl__row_key(level, bucket);
}
/* What a lock statement returns, as its last columns. */
enum {
  HL__PG_REFUSED,
  HL__PG_TOKEN,
  HL__PG_SERVER,
  HL__PG_GATE,
  HL__PG_COLUMNS
};
/* Writes all but the first of them. */
int hl__pg_columns(const hl__pg_session *session, char *out, size_t size);
/* The first of them, and what the row says. */
int hl__pg_token(const hl__pg_session *session, char *out, size_t size);
int hl__pg_grant_read(hl__pg_session *session, bool try_once, uint64_t *token, hl_error *error);
/* The column HL__PG_GATE: evaluated behind the locks, in their statement. */
const char *hl__pg_gate_column(const hl__pg_session *session);
/* Keys of rows as an array of SQL, "{1,2}"; of those that are wanted exclusively only, if
   so. NULL: out of memory. The caller frees it. */
char *hl__pg_keys(const hl_row *rows, size_t n, bool exclusive);
/* Waits for the answer. Interrupted, it has the server end the wait; the answer comes
   all the same, and may be a grant. */
int hl__pg_answer_await(hl__pg_session *session, const hl_request *request, hl_error *error);
/* The server ends a statement for its time-out and for somebody's request with the same
   code. `end`: when it was to end it itself; hl__now_ms. */
int hl__pg_failure(hl__pg_session *session, int64_t end, hl_error *error);
/* Sends a statement that waits, and waits for it, as the request says. */
int hl__pg_wait_run(hl__pg_session *session, const hl_request *request, const char *sql,
                    hl_error *error);
/* Sends what must succeed while rows are held, and waits for that. */
int hl__pg_command(hl__pg_session *session, const char *tag, const char *sql, int64_t *sent,
                   hl_error *error);

/* ---- statement.c */

int hl__pg_lock_rows(hl__pg_session *session, const hl_request *request, hl_grant *grant,
                     hl_error *error);
/* hl_store_ops.downgrade */
int hl__pg_downgrade(hl_session *session, const hl_request *request, int64_t *sent_ms,
                     hl_error *error);

/* ---- prepared.c */

/* Begins a transaction and takes the rows of the request, if all are free, in one trip;
   sends, and does not wait. The answer has a lock statement's columns; when they say that
   it was refused, the transaction holds some of the first rows. False: nothing was sent,
   as this is not possible for such a request; use another way. */
bool hl__pg_send_try(hl__pg_session *session, const hl_request *request, const char *tag,
                     int *status, hl_error *error);
/* Puts the look behind a lock statement of a pipeline. keys: as of hl__pg_keys. */
bool hl__pg_conflicts_queue(hl__pg_session *session, const char *keys, const char *exclusive);
/* Whether that was prepared by it, and can be again. */
void hl__pg_try_done(hl__pg_session *session, const hl_request *request, bool fine);

/* ---- holders.c */

int hl__pg_holders(hl__pg_session *session, const hl_lease_filter *filter, hl_holder_fn fn,
                   void *context, hl_error *error);

/* ---- gate.c */

/* How long the record `l` lasts: ms, of SQL. Somebody may have written an endless time. */
#define HL__PG_LEFT                                                                                \
  "ceil(least(greatest((extract(epoch FROM l.till)-extract(epoch FROM "                            \
  "clock_timestamp()))*1000,-1),9e15))::int8"
/* After the rows of the request have been locked: waits until no lease is in the way, but
   request->exempt, with the rows in hand. *token is another one after a wait: that of the lease may
   have grown meanwhile. HL_OK; HL_TIMEOUT, HL_CANCELLED; HL__BEHIND_UPDATE. */
int hl__pg_leases_await(hl__pg_session *session, const hl_request *request, const char *tag,
                        uint64_t *token, int64_t *sent, hl_error *error);

/* ---- record.c */

/* As hl_store_ops.take, for a lease. */
int hl__pg_lease_take(hl__pg_session *session, const hl_request *request, hl_grant *grant,
                      hl_error *error);
int hl__pg_to_lease(hl_session *session, const hl_request *request, hl_grant *grant,
                    hl_error *error);
/* As hl_lease_ops.convert, on a session with tables; HL_ELOST does not say why. */
int hl__pg_lease_convert(hl__pg_session *session, const hl_request *request, hl_grant *grant,
                         hl_error *error);
/* ---- pipeline.c */

/* Sends the parts as one pipeline; the answer is outstanding. */
int hl__pg_pipeline(hl__pg_session *session, const hl__pg_part *parts, size_t n, hl_error *error);
/* The same, and waits for it until the deadline; what the server says against it is
   judged: HL_ENOT_PROVISIONED where the tables are not what they should be, HL_TIMEOUT where
   somebody has locked what is to be written. */
int hl__pg_pipeline_run(hl__pg_session *session, const hl__pg_part *parts, size_t n,
                        int64_t deadline, hl_error *error);
/* What was prepared is not known any more. */
void hl__pg_unprepare(hl__pg_session *session);
/* Queues a part. */
bool hl__pg_part_queue(hl__pg_session *session, const hl__pg_part *part);
/* The next parameter of a part: text, bytes, a number written in its room. */
void hl__pg_value(hl__pg_part *part, const char *text);
void hl__pg_bytes(hl__pg_part *part, const void *data, size_t size);
void hl__pg_number(hl__pg_part *part, char room[24], int64_t number);

/* ---- leases.c */

extern const hl_lease_ops hl__pg_leases;
int hl__pg_lease_holders(hl__pg_session *session, const hl_lease_filter *filter, hl_holder_fn fn,
                         void *context, hl_error *error);

/* ---- tables.c */

/* Makes the tables of leases: one transaction. */
extern const char hl__pg_tables_sql[];
/* Whether there are tables of leases that this role may use; otherwise they are made, if
   they can be, and that is wanted. HL__ABSENT: there are none, and were not wanted. */
int hl__pg_tables(hl__pg_session *session, bool make, hl_error *error);
/* Now and then: closes the gate, deletes what has ended long ago. On an idle session. */
int hl__pg_sweep(hl__pg_session *session, hl_error *error);
/* Runs a statement on a connection of its own, as the session's own transaction must neither
   end nor keep what it does. */
int hl__pg_aside(hl__pg_session *session, const char *sql, hl_error *error);
/* Until when the server is to answer what takes it a moment only. Longer, and it hangs. */
int64_t hl__pg_answer_by(const hl__pg_session *session);

/* ---- cancel.c */

/* Asks the server that has the session to end what it does for it now, and waits, until
   the deadline at most, for the server to have done so: a later statement is never
   hit. HL_OK; HL_ECONNECTION: it may come later, and the session must not be used any
   more. */
int hl__pg_cancel(hl__pg_session *session, int64_t deadline, hl_error *error);

/* ---- wire.c */

/* Takes notices; nothing is printed. argument: the session. */
void hl__pg_notice(void *argument, const PGresult *result);
/* Gives an error the SQLSTATE of a missing privilege, which a catalog has told. Returns its status. */
int hl__pg_denied(int status, hl_error *error);
/* What an error means for a caller. result: NULL, the connection's. `doing` is what was
   tried ("connect", "lock rows"). */
int hl__pg_error(const hl__pg_session *session, const PGresult *result, const char *doing,
                 hl_error *error);
/* The same, of an SQLSTATE ("": libpq's own) and a message. */
int hl__pg_error_state(const char *state, const char *message, const char *doing, hl_error *error);
/* HL_ECONNECTION: the connection has ended. */
int hl__pg_gone(const hl__pg_session *session, hl_error *error);
/* Whether the connection stands, without a round trip: reads what has come while no
   answer is outstanding. */
bool hl__pg_stands(hl__pg_session *session);
/* Whether something has come on the socket, or it has ended. Any thread. */
bool hl__pg_readable(const hl__pg_session *session);
/* What the kernel refuses to send, as for want of memory, libpq drops, with all that
   follows, and calls it sent: it expects to read the end of the connection, which may
   never come. So: hl__pg_sending; then libpq is given something to send; hl__pg_sent sends
   the rest, and says whether nothing was refused. */
void hl__pg_sending(void);
bool hl__pg_sent(hl__pg_session *session);
/* HL_ECONNECTION: it was not sent. */
int hl__pg_send_error(const hl__pg_session *session, hl_error *error);
void hl__pg_results_clear(hl__pg_session *session);
/* Sends without waiting; the answer is outstanding. Nothing may be outstanding. */
int hl__pg_send(hl__pg_session *session, const char *sql, hl_error *error);
/* Gives everything back; the answer is outstanding. */
int hl__pg_rollback_send(hl__pg_session *session, hl_error *error);
/* Reads the outstanding answer into session->kept, waiting until the deadline
   (hl__now_ms; 0: not at all). HL_OK; HL_TIMEOUT; HL_CANCELLED: interrupted, where
   that was allowed; both leave it outstanding. HL_ECONNECTION. */
int hl__pg_await(hl__pg_session *session, int64_t deadline, bool interruptible, hl_error *error);
/* As hl_store_ops.settle, but an interruption is not forgotten; it ends the wait, where
   that is allowed. */
int hl__pg_settle(hl__pg_session *session, int64_t deadline, bool interruptible, hl_error *error);
/* Sends a query and waits for its result until session->patience: *result is the last
   one with rows, of so many columns at least (0: none is wanted, it may be NULL); the
   caller clears it. HL_OK or what hl__pg_error says; HL_ECONNECTION when the server does
   not answer. */
int hl__pg_query(hl__pg_session *session, const char *sql, int columns, PGresult **result,
                 hl_error *error);
/* A field of a result; NULL where it is NULL, or not there. */
const char *hl__pg_field(const PGresult *result, int row, int column);

#endif
