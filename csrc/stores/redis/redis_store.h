/*
 * redis_store.h - what the files of the Redis store share. Only this folder includes hiredis. It
 * serves Redis and Valkey.
 *
 *     redis.c       the store's operations: the life of a session
 *     dsn.c         a DSN, taken apart
 *     connect.c     from a DSN to a connection
 *     dial.c        reaches one server: socket, TLS, login
 *     sentinel.c    which server is the master, where the DSN names sentinels
 *     slots.c       Redis Cluster: which slot a tree is in, and which node has it
 *     cluster.c     connections to the nodes of a cluster
 *     tls.c         rediss://, by OpenSSL
 *     server.c      does this server exclude?
 *     wire.c        sending, answers, errors
 *     script.c      the scripts, and their arguments
 *     scripts/      the steps of the protocol, in Lua; common.lua has the keys, amnesia.lua what a
 *                   server may have forgotten
 *     take.c        acquiring: asks, stands in the queue, sleeps, asks again
 *     subscription.c       the one subscription by which all that wait here are woken
 *     leases.c      the other operations on records (hl_lease_ops)
 *
 * csrc/lua/store makes a Lua module of it.
 *
 * There are only leases. Each step is one script, which the server runs alone, and does
 * all of it or nothing. So a session holds nothing between two calls, and a lock pins no
 * connection.
 */
#ifndef HIERLOCK_REDIS_STORE_H
#define HIERLOCK_REDIS_STORE_H

#include "clock.h"
#include "error.h"
#include "fork.h"
#include "layout.h"
#include "list.h"
#include "record.h"
#include "socket.h"
#include "store.h"

#include <hiredis/hiredis.h>
#include <pthread.h>
#include <stdatomic.h>

typedef enum hl__redis_script {
  HL__REDIS_TAKE,
  HL__REDIS_LEAVE,
  HL__REDIS_REFRESH,
  HL__REDIS_INSPECT,
  HL__REDIS_DROP,
  HL__REDIS_RECALL,
  HL__REDIS_ADOPT,
  HL__REDIS_CONVERT,
  HL__REDIS_LIST,
  HL__REDIS_RAISE,
  HL__REDIS_SCRIPTS
} hl__redis_script;

/* For the answer of a server that has nothing else to do. */
#define HL__REDIS_ANSWER_MS 5000

typedef struct hl__redis_session hl__redis_session;
typedef struct hl__redis_tls hl__redis_tls; /* of a connection; see tls.c */

typedef enum hl__redis_tls_mode {
  HL__REDIS_TLS_OFF,
  HL__REDIS_TLS_REQUIRED,       /* any server */
  HL__REDIS_TLS_VERIFY_CA,      /* its certificate is trusted */
  HL__REDIS_TLS_VERIFY_IDENTITY /* and has the DSN's host */
} hl__redis_tls_mode;

typedef struct hl__redis_address {
  char host[256];
  unsigned port;
} hl__redis_address;

#define HL__REDIS_SENTINELS 16
#define HL__REDIS_SLOTS 16384

/* A master of Redis Cluster. */
typedef struct hl__redis_node {
  char id[41];
  hl__redis_address address;
} hl__redis_node;

#define HL__REDIS_NODES 255
#define HL__REDIS_NO_NODE 255

/* Which node has which slot. */
typedef struct hl__redis_cluster {
  atomic_bool stale; /* a node has said so */
  atomic_bool seen[HL__REDIS_SLOTS];
  /* The masters, so many. This and what follows: under the store's mutex. */
  unsigned n;
  hl__redis_node nodes[HL__REDIS_NODES];
  uint8_t owner[HL__REDIS_SLOTS]; /* index, or HL__REDIS_NO_NODE */
  /* A number, in hexadecimal a tag of that slot. Never changed. */
  uint32_t tags[HL__REDIS_SLOTS];
} hl__redis_cluster;

HL__MUTEX_CLASS(hl__redis_mutex) HL__AFTER(hl__connection_mutex) HL__BEFORE(hl__births);

typedef struct hl__redis_login {
  const char *user, *password; /* password NULL, or empty: it does not log in */
} hl__redis_login;

typedef struct hl__redis_store {
  hl_store base;
  const hl_store_config *config;
  /* The parameters of the DSN. */
  const char *prefix;
  char own_names[HL__OWN_NAMES_MAX + 1]; /* "PREFIX:" */
  int64_t connect_timeout;               /* ms */
  unsigned database, wait_replicas;
  hl__redis_tls_mode tls;
  const char *tls_ca, *tls_cert, *tls_key; /* paths; NULL: the system's, none */
  void *tls_context;                       /* OpenSSL's SSL_CTX */
  /* Of redis+sentinel://. The name of the master; NULL: the DSN names the server itself. */
  const char *service;
  hl__redis_login sentinel_login;
  char *sentinel_text;
  hl__redis_address sentinels[HL__REDIS_SENTINELS];
  unsigned sentinel_count;
  atomic_uint sentinel; /* that has answered last */
  /* Redis Cluster: its map; made by open, and of no other kind later. NULL: one server. */
  hl__redis_cluster *cluster;
  void (*hint)(hl__redis_session *session, const char *said); /* an error reply; NULL: no cluster */
  atomic_uint seed; /* which of its addresses new sessions connect to */
  /* After what a server has forgotten, so long nothing is granted, at least; ms. 0: it is
     no matter. */
  int64_t quarantine;
  /* The longest ttl that was asked for here, and whether the server's memory was seen. */
  atomic_int_fast64_t longest;
  atomic_bool seen;
  char channel[128]; /* wakes the waiters of this store; drawn when it is opened */

  pthread_mutex_t mutex;
  /* Digests of the scripts, in hexadecimal, as the server has told. */
  char digests[HL__REDIS_SCRIPTS][41] HL__GUARDED_BY(hl__redis_mutex);
  /* Sessions that wait to be rung. */
  hl__list waiting HL__GUARDED_BY(hl__redis_mutex);
  /* The subscribed connection; NULL: none. The reader has it alone. */
  hl__redis_session *subscription HL__GUARDED_BY(hl__redis_mutex);
  bool reading HL__GUARDED_BY(hl__redis_mutex);
  int64_t subscribe_again HL__GUARDED_BY(hl__redis_mutex); /* not connected before */
} hl__redis_store;

HL__MUTEX_FUNCTIONS(hl__redis_store, hl__redis_store, mutex, hl__redis_mutex)

struct hl__redis_session {
  hl_session base;
  hl__redis_store *store;
  redisContext *context;
  hl__redis_tls *tls;        /* NULL: in clear text */
  hl__redis_address address; /* host "": by the DSN's socket */
  int fd;                    /* of the connection; see hl__fork_watch */
  uint64_t ticket;
  hl__wakeup wakeup;
  int64_t patience;     /* of the request that is under way: answers are awaited until then */
  unsigned outstanding; /* answers that no caller awaits */
  /* Bytes to be sent; out_sent of them are. */
  char *out;
  size_t out_size, out_sent;
  /* The server: its run id, and the database. start: when it was started, ms of its TIME; 0: it
     was once a replica of another, and took its place at an unknown time. durable: it forgets
     nothing. */
  char run[72];
  int64_t start;
  bool durable;
  /* In a cluster: connections to other nodes, and their face: the session that the core has, and
     interrupts. */
  hl__redis_session *face;
  hl__list links;
  char node_id[41];
  bool master;
  bool moving; /* it has just refused, as the slot is being moved or was */
  /* While it waits: among store->waiting, under this name. */
  hl__list node;
  char id[33];
  bool rung;
};

static inline hl__redis_session *hl__redis_session_of(hl_session *session) {
  return (hl__redis_session *)(void *)session;
}

/* ---- dsn.c */

/* As hl_store_ops.parse. */
int hl__redis_dsn(char *text, hl_dsn *dsn, hl_error *error);
/* Reads the DSN into the store. HL_OK, HL_EDSN, HL_EUNSUPPORTED. */
int hl__redis_params(hl__redis_store *store, hl_error *error);

/* ---- dial.c */

/* Connects to that address (NULL: the DSN's socket), and logs in; as NULL: as the DSN says. */
int hl__redis_dial(hl__redis_store *store, const hl__redis_address *address,
                   const hl__redis_login *as, int64_t deadline, hl__redis_session **result,
                   hl_error *error);
/* Closes, without waiting; frees. NULL is fine. */
void hl__redis_disconnect(hl__redis_session *session);

/* ---- connect.c */

/* Connects and logs in, until the deadline, or for connect_timeout if that is shorter. */
int hl__redis_connect(hl__redis_store *store, int64_t deadline, hl__redis_session **session,
                      hl_error *error);
/* Has the message say which server it was that the sentinels named. */
void hl__redis_named(const hl__redis_store *store, const hl__redis_address *address,
                     hl_error *error);

/* ---- sentinel.c */

/* The sentinels of the DSN, into the store. HL_OK, HL_EDSN, HL_ENOMEM. */
int hl__redis_sentinels_read(hl__redis_store *store, hl_error *error);
/* Asks one after the other for the master, until one answers. HL_OK, HL_ECONNECTION, HL_ENOMEM. */
int hl__redis_sentinels_ask(hl__redis_store *store, int64_t deadline, hl__redis_address *master,
                            hl_error *error);

/* ---- slots.c. Where the store has no cluster, there is the one memory. */

/* The slot of a key, and of a tree's keys. */
unsigned hl__redis_slot(const char *text, size_t size);
unsigned hl__redis_slot_of_root(uint32_t root);
/* Reads the map, on a face; learns who the node is. */
int hl__redis_cluster_read(hl__redis_session *session, int64_t deadline, hl_error *error);
/* The i-th address beside the DSN's. False: take the DSN's. */
bool hl__redis_cluster_seed(hl__redis_store *store, unsigned i, hl__redis_address *address);
unsigned hl__redis_cluster_size(hl__redis_store *store);
/* HL_EUNSUPPORTED: a cluster, and rows of several roots. */
int hl__redis_one_root(const hl__redis_store *store, const hl_row *rows, size_t n, hl_error *error);
/* The memory of the server: of the tree's slot in a cluster, where each node forgets by itself. */
void hl__redis_memory_key(const hl__redis_store *store, uint32_t root, char out[96]);
bool hl__redis_memory_seen(hl__redis_store *store, uint32_t root);
void hl__redis_memory_see(hl__redis_store *store, uint32_t root);

/* ---- cluster.c. Where the store has none, each takes the session itself. */

/* Finds the connection to the master of the tree, or of the key; makes a missing one. With a
   deadline that is over: only an existing connection, else HL_TIMEOUT. The session owns it.
   HL_ECONNECTION, HL_EUNSAFE_SERVER ... */
int hl__redis_route(hl__redis_session *session, uint32_t root, int64_t deadline,
                    hl__redis_session **at, hl_error *error);
int hl__redis_route_key(hl__redis_session *session, const char *key, int64_t deadline,
                        hl__redis_session **at, hl_error *error);
/* Calls fn for all masters, until it fails. */
int hl__redis_each_master(hl__redis_session *session, int64_t deadline,
                          int (*fn)(hl__redis_session *at, void *context, hl_error *error),
                          void *context, hl_error *error);

/* ---- tls.c */

/* Reads certificates as the store's DSN says. HL_OK, HL_ECONNECTION, HL_ENOMEM; HL_EUNSUPPORTED: it
   was built without. */
int hl__redis_tls_open(hl__redis_store *store, hl_error *error);
void hl__redis_tls_close(hl__redis_store *store);
/* As hl_store_ops.library_init and thread_end. */
void hl__redis_tls_init(void);
void hl__redis_tls_thread_end(void);
/* The handshake, until the deadline, where the DSN wants one. HL_OK, HL_ECONNECTION, HL_ENOMEM. */
int hl__redis_tls_start(hl__redis_session *session, int64_t deadline, hl_error *error);
/* Sends session->out without blocking. *done: all is sent. */
int hl__redis_tls_write(hl__redis_session *session, bool *done, hl_error *error);
/* Has hiredis parse the received bytes, without blocking. False: the connection has ended. */
bool hl__redis_tls_read(hl__redis_session *session);
/* Frees, and sends nothing. */
void hl__redis_tls_end(hl__redis_session *session);

/* ---- server.c */

/* Looks whether leases on this server exclude, and learns what the session has of it; the first
   learns the digests. HL_OK, HL_EUNSAFE_SERVER, or what wire.c says. */
int hl__redis_verify(hl__redis_session *session, int64_t deadline, hl_error *error);

/* ---- wire.c */

/* HL_ECONNECTION: the connection has ended. */
int hl__redis_gone(const hl__redis_session *session, hl_error *error);
/* Translates an answer that is an error, and notes what it says of a slot's move. */
int hl__redis_error(hl__redis_session *session, const char *said, hl_error *error);
/* Queues a command; hl__redis_flush sends as much as it can without blocking. */
int hl__redis_queue(hl__redis_session *session, size_t n, const char *const *words,
                    const size_t *sizes, hl_error *error);
int hl__redis_flush(hl__redis_session *session, hl_error *error);
/* hl__redis_flush of a command whose answer no caller awaits. The answer is outstanding whether or
   not this succeeds: the command stays queued, and goes with the next one. */
int hl__redis_unawaited(hl__redis_session *session, hl_error *error);
/* The next answer, until the deadline; the caller frees it. An answer that is an error is one.
   HL_TIMEOUT: it has not come; HL_CANCELLED: interrupted, where it is interruptible. */
int hl__redis_await(hl__redis_session *session, int64_t deadline, bool interruptible,
                    redisReply **reply, hl_error *error);
/* Sends one command of words and waits for its answer, which is freed where it is an error, as
   hl__redis_error says. reply NULL: it is freed in any case. */
int hl__redis_command(hl__redis_session *session, int64_t deadline, size_t n,
                      const char *const *words, redisReply **reply, hl_error *error);
/* Reads the answers that no caller awaits. HL_OK, HL_TIMEOUT, HL_ECONNECTION. */
int hl__redis_settle(hl__redis_session *session, int64_t deadline, hl_error *error);
/* Whether the connection stands, without a round trip. Nothing is outstanding. */
bool hl__redis_stands(hl__redis_session *session);

/* ---- script.c */

/* The words of a command that runs a script. */
typedef struct hl__redis_call {
  hl__redis_script script;
  size_t n, capacity;
  struct {
    size_t at, size;
  } words[64];
  char *bytes;
  size_t used;
  bool failed;     /* out of memory */
  int64_t sent_ms; /* 0: it was not sent yet, or was refused */
  char inside[2048];
} hl__redis_call;

/* For the tree of that root. The call's first arguments are the prefix and the root's tag. */
void hl__redis_call_init(hl__redis_call *call, const hl__redis_store *store,
                         hl__redis_script script, uint32_t root);
void hl__redis_call_dispose(hl__redis_call *call);
void hl__redis_text(hl__redis_call *call, const char *text); /* NULL: "" */
void hl__redis_number(hl__redis_call *call, int64_t number);
/* 16 bytes, in hexadecimal; all zeroes: "". */
void hl__redis_id(hl__redis_call *call, const uint8_t id[16]);
/* Rows as the scripts have them, and the tags of their roots. names: as in hl_request; NULL:
   leaves out the rows of HL_LEVEL_NAMED. */
void hl__redis_rows(hl__redis_call *call, const hl__redis_store *store, const hl_row *rows,
                    size_t n, const char *names);
void hl__redis_roots(hl__redis_call *call, const hl_row *rows, size_t n);

/* As hl_store_ops.name_key. */
uint64_t hl__redis_name_key(const char *name, size_t size);

/* Sends it, and does not wait: the answer is outstanding. Sends the whole script, where others
   send its digest. */
int hl__redis_call_send(hl__redis_session *session, hl__redis_call *call, hl_error *error);
/* Sends it, and waits for the answer, which the caller frees; again with the script, where the
   server has forgotten that. An answer that is an error is what hl__redis_error says.
   HL_ECONNECTION with call->sent_ms: it may have been run. */
int hl__redis_call_run(hl__redis_session *session, hl__redis_call *call, int64_t deadline,
                       bool interruptible, redisReply **reply, hl_error *error);
/* Has the server tell the digests. */
int hl__redis_scripts_load(hl__redis_session *session, int64_t deadline, hl_error *error);

/* The element of an answer: a number, or 0; a text, or "". */
int64_t hl__redis_reply_number(const redisReply *reply, size_t i);
const char *hl__redis_reply_text(const redisReply *reply, size_t i);

/* ---- subscription.c */

/* Has the session rung, from now on, for the waiter of that id. False: nothing wakes it; poll
   often. */
bool hl__redis_subscription_join(hl__redis_session *session, const uint8_t id[16]);
void hl__redis_subscription_leave(hl__redis_session *session);
/* Sleeps until the session is rung or interrupted, or until then. */
void hl__redis_subscription_sleep(hl__redis_session *session, int64_t until);
void hl__redis_subscription_close(hl__redis_store *store);

/* Notes that a lease of that time may be held. */
void hl__redis_longest_note(hl__redis_store *store, int64_t ttl);
/* Translates a script's answer about a lease: HL_OK; HL_ELOST, and why. */
int hl__redis_judge(const redisReply *reply, hl_error *error);
/* Waits until as many replicas as the DSN wants have the writes of this session. HL_ESTORE: not
   by the deadline, or within 500 ms. */
int hl__redis_replicated(hl__redis_session *session, int64_t deadline, hl_error *error);

/* ---- take.c */

/* The end of the wait for an answer: patience, or the usual time. */
int64_t hl__redis_answer_by(const hl__redis_session *session);
/* As hl_store_ops.take. */
int hl__redis_take(hl_session *base, const hl_request *request, hl_grant *grant, hl_error *error);
/* hl_lease_ops.convert */
int hl__redis_convert(hl_session *base, const hl_request *request, hl_grant *grant,
                      hl_error *error);

/* ---- leases.c */

extern const hl_lease_ops hl__redis_leases;
/* As hl_store_ops.holders. */
int hl__redis_holders(hl_session *base, const hl_lease_filter *filter, hl_holder_fn fn,
                      void *context, int64_t deadline, hl_error *error);

#endif
