/*
 * mysql_store.h - what the files of the MySQL store share. This folder is the
 * only one that includes <mysql.h>, of Oracle's libmysqlclient or of MariaDB
 * Connector/C.
 *
 *     mysql.c      the store's operations: the life of a session
 *     holders.c    who holds or awaits a row
 *     leases.c     leases, in a space that has them: the operations on their records
 *     kill.c       ends a wait at the server
 *     record.c     one record: written, refreshed, converted, deleted
 *     rows.c       all rows of a request, or none
 *     gate.c       whether there are leases in the way of what was locked
 *     tag.c        what a session says of itself to observers
 *     statement.c  the one statement that locks the rows of a request
 *     server.c     does this server exclude? and is the table the right one?
 *     connect.c    from a DSN to a logged-in connection; TLS, option files
 *     wire.c       sending, answers, errors
 *     text.c       SQL, put together
 *     dsn.c        a DSN, taken apart
 *
 * Each file uses only those below it. csrc/lua/store/mysql.c makes a Lua module of them.
 *
 * The session of a server:  connect, SET and look (server.c); then many times
 * { lock statement, ROLLBACK }. With autocommit off, which is sent with the first
 * lock statement, this begins a transaction by itself. In READ COMMITTED no gap is
 * ever locked. A server that logs statements (binlog_format=STATEMENT) locks no row
 * exclusively in READ COMMITTED; there it is REPEATABLE READ, which locks the same
 * rows, and a gap only where a row is missing, until the ROLLBACK that follows.
 */
#ifndef HIERLOCK_MYSQL_STORE_H
#define HIERLOCK_MYSQL_STORE_H

#include "clock.h"
#include "error.h"
#include "fork.h"
#include "mode.h"
#include "store.h"

#include "../sql/judge.h"

#include <mysql.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#if defined(MARIADB_BASE_VERSION) || defined(MARIADB_PACKAGE_VERSION)
#define HL_CONNECTOR_C 1
/* It asks us when it has to wait (MARIADB_OPT_IO_WAIT), so that we say until when. */
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
  /* The table of the buckets: of that name, or in a space with leases of another one,
     which older programs do not find. Constant from the first session on, as are the
     others. */
  char table[HL__MYSQL_NAME_MAX + 1];
  bool leased;                         /* the space has leases */
  char leases[HL__MYSQL_NAME_MAX + 1]; /* one row for each lease */
  char rows[HL__MYSQL_NAME_MAX + 1];   /* what they lock */
  char gate[HL__MYSQL_NAME_MAX + 1];   /* where there may be any */
  pthread_mutex_t mutex;
  /* Connected by open, for the first session. */
  hl__mysql_session *spare HL__GUARDED_BY(hl__mysql_store_mutex);
  /* On which leases are deleted whose time is up, while another one keeps its place. */
  hl__mysql_session *aside HL__GUARDED_BY(hl__mysql_store_mutex);
  /* The connection on which waits are ended: of the thread that has set killing,
     or, when none has, of whoever holds the mutex. NULL: there is none. */
  hl__mysql_session *killer;
  bool killing HL__GUARDED_BY(hl__mysql_store_mutex);
  pthread_cond_t killed; /* killing has become false */
  /* No killer is connected in advance before then; hl__now_ms. */
  int64_t killer_after HL__GUARDED_BY(hl__mysql_store_mutex);
} hl__mysql_store;

HL__MUTEX_FUNCTIONS(hl__mysql_store, hl__mysql_store, mutex, hl__mysql_store_mutex)

/* A statement that is prepared once for each shape of a request (levels and
   modes of its rows), and then only told other buckets. */
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

/* The value of @hierlock: at most so many bytes. */
#define HL__TAG_MAX 4096u

struct hl__mysql_session {
  hl_session base;
  hl__mysql_store *store;
  MYSQL *mysql;
  int fd;
  uint64_t ticket; /* of fd: see hl__fork_watch */
  /* What has come from the server is being read, and may be a loss. Not known of a
     library that does not tell when it waits. */
  atomic_bool in_hand;
  hl_dialect dialect;
  bool tls;
  unsigned long id;            /* the connection's number at the server */
  char server[HL__SERVER_MAX]; /* which has given it; "": not asked yet */
  /* While it connects: the server has said whether it offers TLS; it does not, and
     must; it has said something else, which begins so (escaped). */
  bool greeted, untrusted;
  char stranger[64];
  /* A ROLLBACK or a sign of life was sent, and its answer not yet read. The
     client libraries do not notice when another command is sent before: they
     take the old answer for the new one's. */
  bool outstanding;
  unsigned answers; /* so many are outstanding then; of statements that return no rows */
  uint64_t number;  /* see hl__mysql_commands */
  /* A transaction of ours is open: what the server says of it is believed, not
     what we remember (settle). */
  bool holds;
  bool tells_transaction; /* the outstanding answer shall say so */
  int64_t patience;       /* hl__mysql_query waits until then; hl__now_ms */
  bool unprepared;        /* the server has refused to prepare: no more tries */
  atomic_bool interrupted;
  bool begun;          /* autocommit is off: a lock statement begins a transaction */
  bool repeatable;     /* in REPEATABLE READ instead of READ COMMITTED: see below */
  bool in_transaction; /* after a lock statement: as the server says */
  int64_t checked;     /* the table was of InnoDB then; hl__boot_ms */
  int64_t wait;        /* the session's time limits on the server; ms */
  uint64_t clock, dice;
  hl__shape shapes[HL__SHAPES_MAX];
  /* What the prepared statements are told and what they return, bound once:
     whoever binds again before each execution sends the types again, too. */
  int32_t buckets[HL__SHAPE_ROWS_MAX + 1]; /* and the gate */
  char *tag; /* of the last request; malloc'ed, as most are far from HL__TAG_MAX */
  size_t tag_capacity;
  unsigned long tag_size;
  unsigned long long fetched[3], token, read_only;
  /* Of the last lock statement: it has read the gate, and there may be leases. */
  bool gate_seen, gate;
};

/* ---- text.c */

typedef struct hl__text {
  char *data; /* malloc'ed */
  size_t used, capacity;
} hl__text;

/* False: out of memory. */
bool hl__text_new(hl__text *text, size_t capacity);
/* Whoever puts has reserved enough. */
void hl__text_put(hl__text *text, const char *format, ...) HL__PRINTF(2, 3);
/* As a literal. */
void hl__text_hex(hl__text *text, const void *data, size_t n);
/* What others have written: cut to size, and nothing that a terminal obeys. NULL: nothing. */
void hl__text_take(char *out, size_t size, const char *text);

/* ---- mysql.c */

/* Once, before anything else of the client library. */
void hl__mysql_library_init(void);

/* ---- kill.c */

/* The server ends whatever the session does there, by `end`. */
void hl__mysql_kill(const hl__mysql_session *session, int64_t end);
/* A wait begins that may be cancelled, and lasts so long. Not to have a killer is no
   failure of that wait; the next one tries again, but not all the time. One that
   lasts no longer than connecting needs none: its server ends it as soon. */
void hl__mysql_killer_prepare(hl__mysql_store *store, int64_t ms);

/* ---- dsn.c */

/* As hl_store_ops.parse. */
int hl__mysql_dsn(char *text, hl_dsn *dsn, hl_error *error);

/* ---- connect.c */

/* Reads the DSN's parameters into the store. HL_OK or HL_EDSN. */
int hl__mysql_params(hl__mysql_store *store, hl_error *error);
/* Connects and logs in; nothing else. Until the deadline, or for connect_timeout if
   that is shorter; session->patience is left at this moment. */
int hl__mysql_connect(hl__mysql_store *store, int64_t deadline, hl__mysql_session **session,
                      hl_error *error);
/* On: until it is off again, the client library reads on this connection until
   session->patience at the latest. By this thread. */
void hl__mysql_waits_bound(hl__mysql_session *session, bool on);
/* Around a statement for which the server may wait for long, without a mutex: see
   hl_store_config.wait_begin. */
void hl__mysql_statement_begin(hl__mysql_session *session);
void hl__mysql_statement_end(hl__mysql_session *session);
/* Closes politely, without waiting; frees. */
void hl__mysql_disconnect(hl__mysql_session *session);

/* ---- server.c */

/* Asks which server it is, and which life of that server; hl__mysql_verify does so,
   too. HL_OK or what hl__mysql_query says. */
int hl__mysql_identify(hl__mysql_session *session, hl_error *error);

/* Looks whether locks on this server exclude. HL_OK, HL_EUNSAFE_SERVER or what
   hl__mysql_query says. */
int hl__mysql_verify_server(hl__mysql_session *session, hl_error *error);
/* The same, and whether the table is the one that the layout needs; sets the
   session up. */
int hl__mysql_verify(hl__mysql_session *session, hl_error *error);
/* As connect and verify, in the time that there is; a session that is not the pool's. */
int hl__mysql_connect_verified(hl__mysql_store *store, int64_t deadline,
                               hl__mysql_session **session, hl_error *error);

/* The statement that asks for the table's engine; its length, less than
   HL__MYSQL_TABLE_SQL. */
#define HL__MYSQL_TABLE_SQL 384
int hl__mysql_table_sql(const hl__mysql_session *session, char *out, size_t size);
/* What its result says of the table: HL_OK, HL_EUNSAFE_SERVER (an engine that locks
   no rows), HL_ENOT_PROVISIONED, HL_EDSN. Notes when the session has looked. */
int hl__mysql_table_refuse(hl__mysql_session *session, MYSQL_RES *result, hl_error *error);
/* Both, in a trip of its own. */
int hl__mysql_table_check(hl__mysql_session *session, hl_error *error);

/* ---- rows.c */

/* As hl_store_ops.take, for a session lock. */
int hl__mysql_lock_rows(hl__mysql_session *session, const hl_request *request, hl_grant *grant,
                        hl_error *error);

/* Statements that record a lease, behind the one that locks its rows and in the same trip. */
typedef struct hl__tail {
  hl__text text;
  unsigned statements;
  bool begun, recorded, committed; /* what the server has answered */
} hl__tail;
/* Whether that can be done for the request: its roots have one gate, and so on. */
bool hl__mysql_records_at_once(const hl__mysql_session *session, const hl_request *request);
/* Tries to lock the rows, without waiting, with the tail. Afterwards nothing is locked. HL_OK:
   see the tail. grant: token, and when it was sent, once it was. */
int hl__mysql_lock_and_record(hl__mysql_session *session, const hl_request *request, hl__tail *tail,
                              hl_grant *grant, hl_error *error);

/* ---- gate.c */

/* Those who lock a node read, last of all, the row of its root's gate (hl__sql_gate); 1 says that
   there may be leases there. Of the roots of all that the request is to hold; -1: there is not
   one gate for all, or there are no leases in this space. */
int64_t hl__mysql_gate(const hl__mysql_session *session, const hl_request *request);
/* The session holds the request's rows. Returns when no lease is in the way of them, but
   request->exempt. Deletes those whose time is up. session->token is another one after a wait.
   HL_TIMEOUT. HL__BEHIND_UPDATE. *sent: when the last command that was answered was sent. */
int hl__mysql_leases_await(hl__mysql_session *session, const hl_request *request, int64_t *sent,
                           hl_error *error);
/* " (r.level=0 AND r.bucket=1 AND r.x=1 OR ...)": the rows of leases that conflict. Room:
   HL__MYSQL_CONFLICT_ROOM for each. */
#define HL__MYSQL_CONFLICT_ROOM 64
void hl__mysql_put_conflicts(hl__text *t, const hl_row *rows, size_t n);

/* ---- leases.c, record.c */

extern const hl_lease_ops hl__mysql_leases;
/* As hl_store_ops.take, for a lease. */
int hl__mysql_lease_take(hl__mysql_session *session, const hl_request *request, hl_grant *grant,
                         hl_error *error);
/* Those that are in the way of the rows; the session is idle. */
int hl__mysql_leases_list(hl__mysql_session *session, const hl_lease_filter *filter,
                          hl_holder_fn fn, void *context, hl_error *error);

/* ---- tag.c */

/* From now on, or no longer, what the session holds is said to wait: it stands behind a
   lease. Part of the next statement: HL__TAG_MAX * 2 + 32 bytes of room. */
void hl__mysql_put_waiting(hl__text *t, const hl__mysql_session *session, bool waiting);

/* As many bytes as the value of @hierlock for a request may have. */
size_t hl__mysql_tag_room(const hl__mysql_session *session, const hl_request *request);
/* Puts that value into the session's tag, which has the room: no NUL, not empty. */
void hl__mysql_tag(hl__mysql_session *session, const hl_request *request);
/* What a session says of itself; the fields point into its text, which is cut
   up. False: it is not of our making. */
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
/* What a client library's error means for a caller, with errno and SQLSTATE.
   `doing` is what was tried ("connect", "lock rows"). */
int hl__mysql_error(hl__mysql_session *session, MYSQL_STMT *statement, const char *doing,
                    hl_error *error);
/* HL_ECONNECTION: the connection has ended, and nobody said why. */
int hl__mysql_gone(hl_error *error);
/* Whether the socket can be read: something has come, or the connection has
   ended. */
bool hl__mysql_readable(const hl__mysql_session *session);
/* Waits until the deadline (hl__now_ms; 0: not at all) for the first packet of an
   answer, or the end of the connection. True: the client library reads it
   without waiting. */
bool hl__mysql_answer_await(const hl__mysql_session *session, int64_t deadline);
/* hl_store_config.wait_begin, wait_end. */
void hl__mysql_wait_begin(const hl__mysql_store *store);
void hl__mysql_wait_end(const hl__mysql_store *store);
/* Sends without waiting; the answer is outstanding. */
int hl__mysql_send(hl__mysql_session *session, const char *sql, size_t size, hl_error *error);
int hl__mysql_rollback_send(hl__mysql_session *session, hl_error *error);
/* Reads the outstanding answer: as hl_store_ops.settle. */
int hl__mysql_settle(hl__mysql_session *session, int64_t deadline, hl_error *error);
/* Sends a query and waits for its result until session->patience: *result may be
   NULL (no rows). Nothing is outstanding. HL_OK or what hl__mysql_error says;
   HL_ECONNECTION when the server does not answer. A SELECT has a limit of its own at the
   server, sooner by HL__MYSQL_ANSWER_MS, for the answer: HL_TIMEOUT. The session's limit may be
   that of a very short wait. */
#define HL__MYSQL_ANSWER_MS 50
int hl__mysql_query(hl__mysql_session *session, const char *sql, size_t size, MYSQL_RES **result,
                    hl_error *error);

/* The same of several statements that return no rows: affected has how many rows each has
   changed, session->number what LAST_INSERT_ID(…) of one of them was. When one fails, the
   ones behind it are not executed. */
int hl__mysql_commands(hl__mysql_session *session, const char *sql, size_t size, unsigned n,
                       uint64_t *affected, hl_error *error);
/* Sends so many of them; the answers are outstanding. */
int hl__mysql_commands_send(hl__mysql_session *session, const char *sql, size_t size, unsigned n,
                            hl_error *error);

/* The next row of a result; NULL when there is none, or none of so many columns: what
   has answered is no server then. */
MYSQL_ROW hl__mysql_row(MYSQL_RES *result, unsigned columns);

/* Writing on a connection that its peer has closed must not end the process:
   both libraries avoid SIGPIPE on a plain socket, OpenSSL does not. Around
   calls that may write on a TLS connection. `failed`: one of them may have failed, so a
   SIGPIPE may be there to be taken away. Two system calls where none has. */
typedef struct hl__sigpipe {
  bool guarded, was_blocked, was_pending;
  sigset_t before;
} hl__sigpipe;
hl__sigpipe hl__sigpipe_begin(const hl__mysql_session *session);
void hl__sigpipe_end(hl__sigpipe guard, bool failed);

#endif
