/*
 * store.h - what a store must implement.
 *
 * A store keeps the rows. A session is one transaction's worth of it: it
 * locks the rows of one request, keeps them, and gives all of them back at
 * once. The core makes sessions, reuses them and decides when; a store knows
 * nothing of handles, pools or Lua.
 *
 * The life of a session:
 *
 *                     lock: HL_OK
 *      open -> idle ----------------> held --- lock (extend) ---.
 *               ^ |                    | ^                      |
 *               | '-- lock: any other  | '----------------------'
 *               |     (nothing held)   |
 *               '------- unlock -------'
 *
 * unlock and renew send and do not wait; the answer is outstanding until
 * settle has read it. While one is outstanding only settle, look, lock,
 * unlock, interrupt, close and forget may be called; lock and unlock settle
 * by themselves (lock waits for it; unlock must not, see there).
 *
 * Threads: the core calls the functions of one session from one thread at a
 * time; interrupt and told alone come from any thread while another is in lock,
 * check or settle. Functions of a store may be called by several threads at once.
 *
 * Forks: a store watches its descriptors with hl__fork_watch (internal.h), so
 * that a child closes its copies at once; the core then calls only forget.
 */
#ifndef HIERLOCK_STORE_H
#define HIERLOCK_STORE_H

#include "dsn.h"
#include "hierlock.h"

/* Raised whenever anything in this file changes its meaning. A store built
   for another number is refused. */
#define HL_STORE_ABI 7u

typedef struct hl_store hl_store;
typedef struct hl_session hl_session;

/* What the core tells a store when it opens it. Outlives the store. */
typedef struct hl_store_config {
  const hl_dsn *dsn;
  /* What the program wants; from the first open on, what it and the space have
     agreed on (hl__layout_agree). */
  hl_layout *layout;
  int64_t timeout;         /* the usual one of an acquisition; ms */
  int64_t hold_timeout;    /* ms */
  const char *application; /* shown to observers */
  const char *host;        /* likewise */
  int64_t pid;
  /* Around each wait for the server that may take long. wait_end does not return
     once another thread runs exit(), as the client library is being taken apart
     then: to be called without a mutex, and before the library goes on. NULL: nobody
     waits. */
  void (*wait_begin)(void);
  void (*wait_end)(void);
} hl_store_config;

typedef struct hl_request {
  const hl_row *rows; /* in locking order, each once */
  size_t n;
  int64_t deadline;  /* hl__now_ms(); HL_FOREVER; ignored when try_once */
  bool try_once;     /* do not wait for any row */
  bool cancellable;  /* interrupt may come: the wait must then end at the store,
                        too */
  bool extend;       /* the session holds rows already, and keeps them when
                        this fails, except with HL_DEADLOCK and
                        HL_ECONNECTION (it ended, or holds nothing any more) */
  const hl_row *shown; /* for observers: the rows, and those already held */
  size_t shown_n;
  const char *path;  /* for observers; one line, escaped, at most 255 bytes */
  const char *label; /* for observers; any bytes */
  size_t label_size;
  hl_mode mode;      /* for observers: of the targets */
} hl_request;

typedef struct hl_grant {
  uint64_t token;  /* fencing token, comparable over all processes */
  /* When the last command that was answered was sent (hl__lease_ms). A failed
     extend, too, sets it, where the session still stands; 0 otherwise. */
  int64_t sent_ms;
} hl_grant;

struct hl_store {
  const struct hl_store_ops *ops;
  hl_layout *layout; /* a reference: what open has agreed on; until the store ends */
};

/* A store's own structures begin with these. */
struct hl_session {
  hl_store *store;
};

typedef struct hl_store_ops {
  uint32_t abi;       /* HL_STORE_ABI */
  const char *scheme; /* as in hl_dsn.store */
  /* A session is a connection that can be lost: pool_size counts, and the
     keeper renews it. Otherwise sessions are free and need no keeper. */
  bool connects;

  /* Makes the store; looks whether it excludes (replicas, clusters, other
     buckets or levels ...) and refuses with HL_EUNSAFE_SERVER, HL_EMISMATCH,
     HL_ENOT_PROVISIONED, HL_EDSN, HL_ECONNECTION, HL_ESTORE, HL_ENOMEM. */
  int (*open)(const hl_store_config *config, hl_store **store,
              hl_error *error);
  /* After all sessions have been closed. Never blocks. */
  void (*close)(hl_store *store);
  /* In a forked child, instead of close: touches nothing of the parent's. */
  void (*forget)(hl_store *store);

  /* Blocks until `deadline` at most (ms, hl__now_ms). */
  int (*session_open)(hl_store *store, int64_t deadline,
                      hl_session **session, hl_error *error);
  /* Whatever its state; gives back what it holds. Never blocks. */
  void (*session_close)(hl_session *session);
  void (*session_forget)(hl_session *session); /* in a forked child */

  /* Locks the rows of the request, waiting until its deadline. On anything
     but HL_OK nothing that this call took is held (but see extend above).
     HL_TIMEOUT, HL_DEADLOCK, HL_CANCELLED (interrupted); HL_ECONNECTION (the
     session has ended), HL_ENOT_PROVISIONED (error->level, bucket are set),
     HL_EUNSAFE_SERVER, HL_ESTORE, HL_ENOMEM. */
  int (*lock)(hl_session *session, const hl_request *request,
              hl_grant *grant, hl_error *error);
  /* Gives everything back without waiting; the caller has just looked whether
     the session stands. HL_OK: the answer, if the store
     answers at all, is outstanding. HL_BUSY: an earlier answer has to be
     settled first, and it has not come: call again after settle.
     HL_ECONNECTION: the session has ended. */
  int (*unlock)(hl_session *session, hl_error *error);
  /* Sends a sign of life, so that the store goes on keeping the session.
     HL_OK: its answer is outstanding; *sent_ms is when it was sent
     (hl__lease_ms). */
  int (*renew)(hl_session *session, int64_t *sent_ms, hl_error *error);
  /* Reads the outstanding answer, waiting until deadline (0: not at all), and
     forgets an interruption that came after the call for which it was meant.
     HL_OK: nothing is outstanding (any more). HL_TIMEOUT: it has not come.
     HL_ECONNECTION: the session has ended, or does not hold any more what it
     should. */
  int (*settle)(hl_session *session, int64_t deadline, hl_error *error);
  /* Whether the session stands, without a round trip: HL_OK or
     HL_ECONNECTION. While an answer is outstanding it may say HL_OK of a
     session that has just ended. */
  int (*look)(hl_session *session, hl_error *error);
  /* From any thread, also while another is in lock, check or settle: whether something
     has come from the server that the other one has not told yet. It may be that its
     connection has ended, or that the store has given everything back. NULL where
     there are no connections. */
  bool (*told)(hl_session *session);
  /* From any thread: a blocking call on the session, or the next one, ends soon.
     The session may end with it. */
  void (*interrupt)(hl_session *session);

  /* The last call of a thread of the core's, for what a client library keeps for
     each; NULL: nothing. */
  void (*thread_end)(void);

  /* Calls fn for every lock, held or awaited, that conflicts with any of the
     rows. On an idle session. HL_TIMEOUT: the store does not answer now. */
  int (*holders)(hl_session *session, const hl_row *rows, size_t n,
                 hl_holder_fn fn, void *context, hl_error *error);
} hl_store_ops;

/* Two requests for one row can be granted together only when both are shared.
 *
 *                  held shared   held exclusive
 *     shared       yes           no
 *     exclusive    no            no
 */
static inline bool hl__modes_conflict(hl_mode a, hl_mode b) {
  return a == HL_EXCLUSIVE || b == HL_EXCLUSIVE;
}

extern const hl_store_ops hl_store_null;
extern const hl_store_ops hl_store_file;

#endif
