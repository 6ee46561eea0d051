/*
 * mysql_store.h - declarations that the files of the MySQL store share. No other folder includes
 * <mysql.h>, of Oracle's libmysqlclient or of MariaDB Connector/C.
 *
 *     mysql.c      the store's operations: the life of a session
 *     holders.c    who holds or awaits a row
 *     leases.c     leases, in a space that has them: the operations on their records
 *     kill.c       ends a wait at the server
 *     record.c     one record: written, refreshed, converted, deleted
 *     rows.c       all rows of a request, or none
 *     gate.c       whether there are leases in the way of locked rows
 *     tag.c        the tag by which observers know a session
 *     statement.c  the one statement that locks the rows of a request
 *     server.c     does this server exclude? and is the table the right one?
 *     connect.c    from a DSN to a logged-in connection; TLS, option files
 *     wire.c       sending, answers, errors
 *     text.c       SQL, put together
 *     dsn.c        a DSN, taken apart
 *
 * Each file uses only those below it. csrc/lua/store/mysql.c makes a Lua module of them.
 *
 * The session of a server:  connect, SET and check (server.c); then many times
 * { lock statement, ROLLBACK }. The first lock statement comes with a SET of autocommit to off, so
 * each begins a transaction by itself. READ COMMITTED never locks a gap. But a server that logs
 * statements (binlog_format=STATEMENT) locks no row exclusively in it. There the session is in
 * REPEATABLE READ, which locks the same rows, and a gap only where a row is missing, until the
 * ROLLBACK that follows.
 */
#ifndef HIERLOCK_MYSQL_STORE_H
#define HIERLOCK_MYSQL_STORE_H

#include "clock.h"
#include "error.h"
#include "fork.h"
#include "mode.h"
#include "socket.h"
#include "store.h"

#include "../../core/record.h"
#include "../judge/judge.h"

#include <mysql.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#if defined(MARIADB_BASE_VERSION) || defined(MARIADB_PACKAGE_VERSION)
#define HL_CONNECTOR_C 1
/* The library asks us when it has to wait (MARIADB_OPT_IO_WAIT), and we say until when. */
#if MARIADB_PACKAGE_VERSION_ID >= 30110
#define HL__BOUNDS_WAITS 1
#endif
#endif

/* OpenSSL's, where the client library is linked with that; else NULL. */
extern void ERR_clear_error(void) __attribute__((weak));
extern void OPENSSL_thread_stop(void) __attribute__((weak));

#define HL__MYSQL_NAME_MAX 64 /* of a table; the servers' own limit */

typedef enum hl__tls {
  HL__TLS_OFF,
  HL__TLS_PREFERRED,
  HL__TLS_REQUIRED,
  HL__TLS_VERIFY_CA,
  HL__TLS_VERIFY_IDENTITY
} hl__tls;

typedef struct hl__mysql_session hl__mysql_session;

HL__MUTEX_CLASS(hl__mysql_store_mutex) HL__AFTER(hl__connection_mutex) HL__BEFORE(hl__births);

typedef struct hl__mysql_store {
  hl_store base;
  const hl_store_config *config;
  hl__tls tls;
  const char *tls_ca, *tls_cert, *tls_key, *my_cnf_group; /* NULL: none */
  int64_t connect_timeout;                                /* ms */
  atomic_int_fast64_t connecting;                         /* how long it took the last time; ms */
  const char *space; /* the table's name, as the DSN says; at most HL__MYSQL_NAME_MAX */
  /* The table of the buckets. In a space with leases it has another name, so that older programs
     do not find it. Constant from the first session on, as are the names below. */
  char table[HL__MYSQL_NAME_MAX + 1];
  bool leased;                         /* the space has leases */
  char leases[HL__MYSQL_NAME_MAX + 1]; /* one row for each lease */
  char rows[HL__MYSQL_NAME_MAX + 1];   /* the rows that leases lock */
  char gate[HL__MYSQL_NAME_MAX + 1];   /* where there may be leases */
  pthread_mutex_t mutex;
  /* Deletes leases whose time is up, while the session that found them keeps its rows. */
  hl__mysql_session *aside HL__GUARDED_BY(hl__mysql_store_mutex);
  /* The connection that looks for a waiter (gate.c), or NULL. A thread may take it at lookout_from
     (hl__now_ms), and makes that INT64_MAX meanwhile. */
  hl__mysql_session *lookout;
  atomic_int_fast64_t lookout_from;
  /* The connection that ends waits, or NULL. The killer belongs to the thread that has set
     killing; while killing is false, to the thread that holds the mutex. */
  hl__mysql_session *killer;
  bool killing HL__GUARDED_BY(hl__mysql_store_mutex);
  pthread_cond_t killed; /* killing has become false */
  /* Connect no killer in advance before then; hl__now_ms. */
  int64_t killer_after HL__GUARDED_BY(hl__mysql_store_mutex);
} hl__mysql_store;

HL__MUTEX_FUNCTIONS(hl__mysql_store, hl__mysql_store, mutex, hl__mysql_store_mutex)

/* A statement that is prepared once for each shape of a request (levels and modes of its rows).
   Each execution sends only the buckets. */
#define HL__SHAPES_MAX 8
#define HL__SHAPE_ROWS_MAX 16

typedef struct hl__shape {
  uint8_t key[HL__SHAPE_ROWS_MAX + 1]; /* see statement.c */
  size_t size;
  uint64_t used;         /* a clock for choosing which one to forget */
  MYSQL_STMT *statement; /* NULL: seen once, and not prepared yet */
} hl__shape;

/* The name of a server's life: see hl__mysql_identify. */
#define HL__SERVER_MAX 256

/* The value of @hierlock has at most so many bytes. */
#define HL__TAG_MAX 4096u

struct hl__mysql_session {
  hl_session base;
  hl__mysql_store *store;
  MYSQL *mysql;
  int fd;
  uint64_t ticket; /* of fd: see hl__fork_watch */
  /* A thread reads what has come from the server, and it may be a loss. Stays false with a
     library that does not tell when it waits. */
  atomic_bool in_hand;
  hl_dialect dialect;
  bool tls;
  unsigned long id;            /* the connection's number at the server */
  char server[HL__SERVER_MAX]; /* that gave the number; "": not asked yet */
  /* While the session connects. greeted: the server has said whether it offers TLS. untrusted:
     it offers none, and must. stranger: it has greeted in another way, which begins so
     (escaped). */
  bool greeted, untrusted;
  char stranger[64];
  /* We have sent a ROLLBACK or a sign of life, and not yet read its answer. The client libraries
     do not notice when another command is sent before: they take the old answer for the new
     one's. */
  bool outstanding;
  unsigned answers; /* so many answers are outstanding; of statements that return no rows */
  uint64_t number;  /* see hl__mysql_commands */
  /* A transaction of ours is open: settle believes what the server says of it, not what we
     remember. */
  bool holds;
  bool tells_transaction; /* the outstanding answer shall say so */
  int64_t patience;       /* hl__mysql_query waits until then; hl__now_ms */
  bool unprepared;        /* the server has refused to prepare: no more tries */
  atomic_bool interrupted;
  bool begun;          /* autocommit is off: a lock statement begins a transaction */
  bool repeatable;     /* in REPEATABLE READ instead of READ COMMITTED: see above */
  bool in_transaction; /* after a lock statement: as the server says */
  int64_t checked;     /* the table was of InnoDB then; hl__boot_ms */
  int64_t wait;        /* the session's time limits on the server; ms */
  bool brief;          /* but a wait for a lock ends after a second */
  bool briefly;        /* between hl__mysql_brief_begin and hl__mysql_brief_end */
  uint64_t clock, dice;
  hl__shape shapes[HL__SHAPES_MAX];
  /* Parameters and results of the prepared statements, bound once. A client that binds again
     before each execution sends the types again, too. */
  int32_t buckets[HL__SHAPE_ROWS_MAX + 1]; /* and the gate */
  char *tag; /* of the last request; malloc'ed, as most tags are far from HL__TAG_MAX */
  size_t tag_capacity;
  unsigned long tag_size;
  unsigned long long fetched[3], token, read_only;
  /* The last lock statement has read the gate; the gate says that there may be leases. */
  bool gate_seen, gate;
};

/* ---- text.c */

/* All zero: empty. */
typedef struct hl__text {
  char *data; /* malloc'ed */
  size_t used, capacity;
  bool failed; /* out of memory: the text is not whole, and must not be sent */
} hl__text;

void hl__text_put(hl__text *text, const char *format, ...) HL__PRINTF(2, 3);
/* Puts the bytes; as a literal. */
void hl__text_add(hl__text *text, const void *data, size_t n);
void hl__text_hex(hl__text *text, const void *data, size_t n);
/* Copies text that other programs have written: cut to size, and escaped for terminals. NULL: an
   empty text. */
void hl__text_take(char *out, size_t size, const char *text);

/* ---- mysql.c */

/* Once, before anything else of the client library. */
void hl__mysql_library_init(void);

/* ---- kill.c */

/* Has the server end the session's connection. The server ends its wait itself at `end`. */
void hl__mysql_kill(const hl__mysql_session *session, int64_t end);
/* A wait of `ms` begins that may be cancelled: connects a killer. A wait goes on without a
   killer; the next one tries again, but not all the time. A wait that is no longer than
   connecting needs none: the server ends it as soon. */
void hl__mysql_killer_prepare(hl__mysql_store *store, int64_t ms);

/* ---- dsn.c */

/* As hl_store_ops.parse. */
int hl__mysql_dsn(char *text, hl_dsn *dsn, hl_error *error);

/* ---- connect.c */

/* Reads the DSN's parameters into the store. HL_OK or HL_EDSN. */
int hl__mysql_params(hl__mysql_store *store, hl_error *error);
/* Connects and logs in; nothing else. Until the deadline, or for connect_timeout if that is
   shorter; leaves this moment in session->patience. */
int hl__mysql_connect(hl__mysql_store *store, int64_t deadline, hl__mysql_session **session,
                      hl_error *error);
/* On: until it is off again, the client library reads on this connection until session->patience
   at the latest. Counts for the calling thread only. */
void hl__mysql_waits_bound(hl__mysql_session *session, bool on);
/* Around a statement for which the server may wait for long, without a mutex: see
   hl_store_config.wait_begin. */
void hl__mysql_statement_begin(hl__mysql_session *session);
void hl__mysql_statement_end(hl__mysql_session *session);
/* Closes politely, without waiting; frees. */
void hl__mysql_disconnect(hl__mysql_session *session);

/* ---- server.c */

/* Asks which server it is, and which life of that server. hl__mysql_connect_verified asks it,
   too. HL_OK or what hl__mysql_query says. */
int hl__mysql_identify(hl__mysql_session *session, hl_error *error);

/* Looks whether locks on this server exclude. HL_OK, HL_EUNSAFE_SERVER or what
   hl__mysql_query says. */
int hl__mysql_verify_server(hl__mysql_session *session, hl_error *error);
/* Connects in the time that is left, and does the same; checks whether the table is the right one
   for the layout, and sets the session up. The session is the caller's, not the pool's. */
int hl__mysql_connect_verified(hl__mysql_store *store, int64_t deadline,
                               hl__mysql_session **session, hl_error *error);

/* The statement that asks for the table's engine; its length, less than
   HL__MYSQL_TABLE_SQL. */
#define HL__MYSQL_TABLE_SQL 384
int hl__mysql_table_sql(const hl__mysql_session *session, char *out, size_t size);
/* Judges the table by the result: HL_OK, HL_EUNSAFE_SERVER (an engine that locks no rows),
   HL_ENOT_PROVISIONED, HL_EDSN. Notes when the session has checked. */
int hl__mysql_table_refuse(hl__mysql_session *session, MYSQL_RES *result, hl_error *error);
/* Asks and judges, in a trip of its own. */
int hl__mysql_table_check(hl__mysql_session *session, hl_error *error);

/* ---- rows.c */

/* Takes a session lock; see hl_store_ops.take. */
int hl__mysql_lock_rows(hl__mysql_session *session, const hl_request *request, hl_grant *grant,
                        hl_error *error);

/* Statements that follow the lock statement in the same trip, and record a lease. */
typedef struct hl__tail {
  hl__text text;
  unsigned statements;
  bool begun, recorded; /* what the server has answered */
} hl__tail;
/* Whether a tail can record the request: its roots have one gate, and so on. */
bool hl__mysql_records_at_once(const hl__mysql_session *session, const hl_request *request);
/* Tries to lock the rows, without waiting, with the tail. Locks nothing beyond the call. HL_OK:
   see the tail. grant: the token; and when the statement was sent, once it was. */
int hl__mysql_lock_and_record(hl__mysql_session *session, const hl_request *request, hl__tail *tail,
                              hl_grant *grant, hl_error *error);

/* ---- gate.c */

/* The gate that the request reads last of all (hl__sql_gate): its row says 1 while there may be
   leases below its roots. -1: the request's roots have several gates, or the space has no
   leases. */
int64_t hl__mysql_gate(const hl__mysql_session *session, const hl_request *request);
/* The session holds the request's rows. Returns when no lease but request->exempt is in the way.
   Deletes leases whose time is up. Draws session->token anew after a wait. HL_TIMEOUT.
   HL__BEHIND_UPDATE. *sent: when the last command that was answered was sent. */
int hl__mysql_leases_await(hl__mysql_session *session, const hl_request *request, int64_t *sent,
                           hl_error *error);
/* " (r.level=0 AND r.bucket=1 AND r.x=1 OR ...)": the conflicting rows of leases. */
void hl__mysql_put_conflicts(hl__text *t, const hl_row *rows, size_t n);

/* ---- leases.c, record.c */

extern const hl_lease_ops hl__mysql_leases;
/* Takes a lease; see hl_store_ops.take. */
int hl__mysql_lease_take(hl__mysql_session *session, const hl_request *request, hl_grant *grant,
                         hl_error *error);
/* Lists the leases that match; the session is idle. */
int hl__mysql_leases_list(hl__mysql_session *session, const hl_lease_filter *filter,
                          hl_holder_fn fn, void *context, hl_error *error);

/* ---- tag.c */

/* Puts the session's tag as a literal. waiting: its rows wait behind a lease. */
void hl__mysql_put_tag(hl__text *t, const hl__mysql_session *session, bool waiting);

/* Returns how many bytes the value of @hierlock for the request may have. */
size_t hl__mysql_tag_room(const hl__mysql_session *session, const hl_request *request);
/* Puts that value into the session's tag, which has the room: no NUL, not empty. */
void hl__mysql_tag(hl__mysql_session *session, const hl_request *request);
/* Takes a session's tag apart; cuts the text up, and *rows points into it. False: the tag is not
   of our making. */
bool hl__mysql_tag_read(char *text, hl_holder *holder, char **rows);

/* ---- holders.c */

int hl__mysql_holders(hl__mysql_session *session, const hl_lease_filter *filter, hl_holder_fn fn,
                      void *context, hl_error *error);

/* ---- wire.c */

/* No wait of a session is longer; ms. The core cuts longer ones. */
#define HL__MYSQL_WAIT_MAX 3600000
/* The assignments of a SET SESSION that limit a wait to so many ms. Returns their
   length. */
int hl__mysql_limits(const hl__mysql_session *session, int64_t wait, char *out, size_t size);
/* Turns a client library's error into a status, with errno and SQLSTATE. `doing` names the step
   that failed ("connect", "lock rows"). */
int hl__mysql_error(hl__mysql_session *session, MYSQL_STMT *statement, const char *doing,
                    hl_error *error);
/* HL_ECONNECTION: the connection has ended, for a reason that we do not know. */
int hl__mysql_gone(hl_error *error);
/* Whether the socket can be read: an answer has come, or the connection has ended. */
bool hl__mysql_readable(const hl__mysql_session *session);
/* Sends without waiting; the answer is outstanding. */
int hl__mysql_send(hl__mysql_session *session, const char *sql, size_t size, hl_error *error);
int hl__mysql_rollback_send(hl__mysql_session *session, hl_error *error);
/* Reads the outstanding answer: as hl_store_ops.settle. */
int hl__mysql_settle(hl__mysql_session *session, int64_t deadline, hl_error *error);
/* Does the same, but HL_ECONNECTION, with that message, where no answer has come. */
#define HL__MYSQL_LATE "the server did not answer in time"
#define HL__MYSQL_UNANSWERED "the server has not answered the last release"
int hl__mysql_settle_late(hl__mysql_session *session, int64_t deadline, const char *late,
                          hl_error *error);
/* Sends a query and waits for its result until session->patience. *result may be NULL (no rows).
   Nothing is outstanding. HL_OK or the status of hl__mysql_error; HL_ECONNECTION when the server
   does not answer. A SELECT gets a limit at the server, HL__MYSQL_ANSWER_MS sooner for the
   answer: HL_TIMEOUT. The session's own limit may be left from a very short wait. */
#define HL__MYSQL_ANSWER_MS 50
int hl__mysql_query(hl__mysql_session *session, const char *sql, size_t size, MYSQL_RES **result,
                    hl_error *error);
/* As hl__mysql_query, also HL_ENOMEM. Frees the text. */
int hl__mysql_ask(hl__mysql_session *session, hl__text *t, MYSQL_RES **result, hl_error *error);

/* Does the same with several statements that return no rows. affected: how many rows each has
   changed. session->number: the value of a statement's LAST_INSERT_ID(…). When one fails, the
   server does not execute the statements behind it. */
int hl__mysql_commands(hl__mysql_session *session, const char *sql, size_t size, unsigned n,
                       uint64_t *affected, hl_error *error);
/* The commands between these two each wait for a lock for a second at most, which is the server's
   least limit. The first goes before all else that is put into their text; it returns how many
   statements it has put, as the session may have the limit still. status: of the commands. */
unsigned hl__mysql_brief_begin(hl__mysql_session *session, hl__text *t);
void hl__mysql_brief_end(hl__mysql_session *session, int status);
/* Sends n statements; the answers are outstanding. HL_ENOMEM. Frees the text. */
int hl__mysql_commands_send(hl__mysql_session *session, hl__text *t, unsigned n, hl_error *error);

/* The next row of a result. NULL: there are no more, or they have fewer columns, and the peer is
   no server. */
MYSQL_ROW hl__mysql_row(MYSQL_RES *result, unsigned columns);

/* A write on a connection that its peer has closed must not end the process. Both libraries
   avoid SIGPIPE on a plain socket, OpenSSL does not. hl__sigpipe_begin and _end stand around
   calls that may write on a TLS connection. `failed`: a call may have failed, and a SIGPIPE may
   be there to be taken away. Costs two system calls where none has. */
typedef struct hl__sigpipe {
  bool guarded, was_blocked, was_pending;
  sigset_t before;
} hl__sigpipe;
hl__sigpipe hl__sigpipe_begin(const hl__mysql_session *session);
void hl__sigpipe_end(hl__sigpipe guard, bool failed);

#endif
