/*
 * store.h - what a store must implement.
 *
 * A store keeps the rows. A session is one transaction's worth of it: it locks the rows of one
 * request, keeps them, and gives all of them back at once. The core makes sessions, reuses them and
 * decides when; a store knows nothing of handles, pools or Lua.
 *
 * The life of a session:
 *
 *                     take: HL_OK
 *      open -> idle ----------------> held --- take (extend) ---.
 *               ^ |                    | ^                      |
 *               | '-- take: any other  | '----------------------'
 *               |     (nothing held)   |
 *               '------ give_back -----'
 *
 * A take for a lease leaves the session idle: it grants a record, which no session holds. See
 * hl_lease_ops.
 *
 * give_back and renew send and do not wait. The answer is outstanding until settle has read it.
 * While an answer is outstanding, the core calls only settle, check, take, give_back, interrupt
 * and close. take waits for the answer first; give_back must not, see there.
 *
 * A take that was started (start) has the session until the store calls back; meanwhile the core
 * calls only interrupt and told.
 *
 * Threads: the core calls the functions of one session from one thread at a time. Only interrupt
 * and told come from any thread, while another is in take, check or settle. Several threads may
 * call the functions of a store at once.
 *
 * Forks: a store watches its descriptors with hl__fork_watch (fork.h), so that a child closes its
 * copies at once. The core calls nothing in the child for what its parent has made, which stays
 * allocated there: a thread of the parent may have been in the middle of it.
 */
#ifndef HIERLOCK_STORE_H
#define HIERLOCK_STORE_H

#include "clock.h"
#include "dsn.h"
#include "hierlock.h"

#include <stdatomic.h>
#include <string.h>

/* Raised whenever anything in this file changes its meaning. The core refuses a store that was
   built for another number. */
#define HL_STORE_ABI 32u

typedef struct hl_store hl_store;
typedef struct hl_session hl_session;

/* The core's settings for a store that it opens. The settings outlive the store. */
typedef struct hl_store_config hl_store_config;
struct hl_store_config {
  const hl_dsn *dsn;
  /* The program's layout; from the first open on, the layout on which program and space have agreed
     (hl__layout_agree). */
  hl_layout *layout;
  int64_t timeout;         /* the default of an acquisition; ms */
  int64_t hold_timeout;    /* ms */
  const char *application; /* shown to observers */
  const char *host;        /* shown to observers */
  int64_t pid;
  bool interoperates; /* plans have rows of HL_LEVEL_NAMED */
  /* Called around each wait for the server that may take long, without a mutex. wait_end does not
     return once another thread runs exit(), as the client library is being taken apart then; so
     call it before the library goes on. NULL: nothing to call. */
  void (*wait_begin)(void);
  void (*wait_end)(void);
  /* For a store that is made of other stores: finds the store of a DSN. HL_EDSN; HL_ESTORE: the
     store is not available. */
  int (*find)(const hl_store_config *config, const char *dsn, const struct hl_store_ops **ops,
              hl_error *error);
  const struct hl_store_ops *const *stores; /* for find */
};

/* A lease, as the store sees it. The store keeps its record as long as the lease is unbroken:
   presence decides, and time only permits deletion. A request that meets an expired record in its
   way deletes it in one step, provided that it is still expired. A request never ignores the
   record. */
typedef struct hl_lease_terms {
  uint8_t id[16];     /* the name of the lease; random */
  uint8_t secret[16]; /* knowing it permits an import; random */
  uint8_t holder[16]; /* the handle that has the lease now; random */
  /* The id of an earlier, unanswered try of this grant. The server may still carry it out and
     write a record, which no caller wants: anyone may delete that. Zeroes: there was no such
     try. */
  uint8_t former[16];
  int64_t ttl; /* ms */
  /* The number of a refresh, counted from 1. A store that may apply a refresh late keeps the last
     number that it applied, and ignores a refresh whose number is not greater: the holder does not
     believe its end any more. An import sets the number to 0. */
  uint64_t turn;
  uint64_t place; /* where the store has the record, as a grant or the last conversion has said;
                     only the store uses it */
  uint64_t token; /* of the grant, or of the last upgrade that was answered; 0: not known. A store
                     that has forgotten an upgrade finds a lower one in the record */
  const char *owner; /* 1 to HL_OWNER_MAX bytes */
  bool again;        /* of a drop: an earlier one was sent and not answered */
  /* Of an adoption: 16 bytes, the only holder that it may replace, beside `holder` itself. NULL: it
     may replace any. */
  const uint8_t *replaces;
} hl_lease_terms;

typedef struct hl_request {
  const hl_row *rows; /* in locking order, each once */
  size_t n;
  const char *names; /* hl__request_name */
  int64_t deadline;  /* hl__now_ms or HL_FOREVER; ignored if try_once */
  bool try_once;     /* wait for no row */
  bool cancellable;  /* interrupt may come, and must then end the wait at the store, too */
  bool extend;       /* the session holds rows already. It keeps them when this fails, except with
                        HL_DEADLOCK and HL_ECONNECTION, after which it has ended or holds nothing */
  /* take may return HL__BEHIND_UPDATE, and hold nothing, if the request wants a node of the deepest
     level exclusively, and in its way is a lease for update whose holder may want the same. The
     core then asks again with the node's update row: so the waiter waits there, and does not hold
     the node. */
  bool gives_way;
  const uint8_t *exempt; /* the id of a lease that is not in the way; NULL: none */
  bool upgrade;          /* of an extend: it holds all rows shared and wants them exclusively; no
                            other session that holds them shared waits for the same */
  const hl_row
      *recorded; /* for observers and records of leases: the requested rows and those already held,
                    without the update rows that HL__BEHIND_UPDATE has added */
  size_t recorded_n;
  const char *path;  /* for observers; one line, escaped, at most 255 bytes */
  const char *label; /* for observers; any bytes */
  size_t label_size;
  hl_mode mode; /* of the targets; for observers */
  /* NULL: a session lock. Otherwise take locks the rows in the same way, queue and order, then
     writes a record, after which the session holds nothing. */
  const hl_lease_terms *lease;
  /* The agent's number, which no other agent of any process has; 0: none. For stores that search
     for circles of waiters themselves: while a request `blocks` its agent, the agent releases
     nothing; it `holds` locks, or else it closes no circle. */
  uint64_t agent;
  bool blocks, holds;
} hl_request;

/* The row of a *presence*: a lease that is no lock, but says that a process of a quorum is there
   (../stores/quorum/presence.c). The row is shared. No target has this bucket. Only the id of a
   presence begins with eight zeroes; the core shows it to no caller. */
#define HL__PRESENCE_BUCKET 2147483647u
static inline bool hl__is_presence(const uint8_t id[16]) {
  static const uint8_t zeroes[8] = {0};
  return memcmp(id, zeroes, sizeof zeroes) == 0;
}

/* The name of a request's row on HL_LEVEL_NAMED; not terminated by a NUL. */
static inline hl_id hl__request_name(const hl_request *request, const hl_row *row) {
  uint32_t size;
  memcpy(&size, request->names + row->root, sizeof size);
  return (hl_id){request->names + row->root + sizeof size, size};
}

/* The request as a session's that takes the rows for the lease to upgrade. The lease is not in its
   way: it stands in the queue of the rows, and once it has them, no other session and no other
   lease has any of them. */
static inline hl_request hl__upgrade_request(const hl_request *request) {
  hl_request own = *request;
  own.lease = NULL;
  own.extend = own.upgrade = false;
  own.recorded = own.rows;
  own.recorded_n = own.n;
  own.exempt = request->lease->id;
  return own;
}

typedef struct hl_grant {
  uint64_t token; /* fencing token, comparable over all processes */
  /* When the last answered command was sent (hl__boot_ms); else 0. Also set by a failed extend
     whose session still stands. With HL_ECONNECTION and a value, the record of a lease may exist:
     the core first has it deleted, over another session. */
  int64_t sent_ms;
  /* Of a lease: the value for hl_lease_terms.place; also when a record only may exist, see
     sent_ms. */
  uint64_t place;
  /* Of a conversion, also of a failed one: until when the holder may believe the lease now, at most
     (hl__boot_ms); 0: as before. */
  int64_t until_ms;
  uint8_t replaced[16]; /* of an adoption: the holder that it has replaced */
} hl_grant;

/* A take that was started (hl_store_ops.start), in the caller's memory until `done` is called. */
typedef struct hl_started hl_started;
struct hl_started {
  /* Called once, on a thread of the store's, without a mutex: the take has ended with that status,
     as `take` would have. From now on the session is the caller's again. */
  void (*done)(hl_started *started, int status);
  hl_grant grant;
  hl_error error;
};

/* An adoption finds that holder: notes it in the grant. False: it may not replace it. */
static inline bool hl__replaces(const hl_lease_terms *terms, const uint8_t found[16],
                                hl_grant *grant) {
  memcpy(grant->replaced, found, 16);
  return !terms->replaces || memcmp(found, terms->replaces, 16) == 0 ||
         memcmp(found, terms->holder, 16) == 0;
}

/* Which leases; hl_filter in the store's terms. */
typedef struct hl_lease_filter {
  const char *owner;  /* NULL: any */
  const uint8_t *id;  /* 16 bytes; NULL: any */
  const hl_row *rows; /* in locking order: only leases that conflict with one of them */
  size_t n;           /* 0: any */
  const char *names;  /* of rows on HL_LEVEL_NAMED, as in hl_request; NULL: leave such rows out */
  bool over;          /* of a list: include expired leases */
  size_t most;        /* of a list: the caller needs no more; 0: all */
  const char *by, *reason; /* of a revoke: by whom, and why; "" where that is not said */
  /* Of a revoke: a random number of this call, below 2^63, and whether the same call was sent
     before and not answered. Then it counts the leases of both. */
  uint64_t call;
  bool again;
} hl_lease_filter;

/* The store's operations on leases. Each is called on a session that holds nothing, unless it says
   otherwise, and returns HL_TIMEOUT if it is not done by the deadline (hl__now_ms).

   HL_ECONNECTION: the session has ended (but see traits.several); the core repeats the call on
   another one. HL_ELOST: there is no record of that id and holder any more; if it was revoked,
   *error says by whom (hl__record_refuse). Of terms, only id, holder, place and the fields that are
   named count. */
typedef struct hl_lease_ops {
  /* Has the lease end `ttl` from now. terms->turn and token count. Never creates a record.
     *sent_ms: when the command was sent (hl__boot_ms), not when it was answered. After a failure,
     too, the holder does not believe beyond *sent_ms + ttl, unless it is 0. */
  int (*refresh)(hl_session *session, const hl_lease_terms *terms, int64_t ttl, int64_t deadline,
                 int64_t *sent_ms, hl_error *error);
  /* Whether the record is there, and how long it lasts: 0 if it is over. terms->token counts. */
  int (*inspect)(hl_session *session, const hl_lease_terms *terms, int64_t deadline,
                 int64_t *left_ms, hl_error *error);
  /* Deletes the record, and wakes its waiters. HL_OK: the record was there. HL__ABSENT: with
     terms->again, it is not there, and no note says who ended it: perhaps the earlier drop did.
     Without confirm the answer may stay outstanding, as give_back's does; then drop never blocks on
     a session on which nothing is outstanding. */
  int (*drop)(hl_session *session, const hl_lease_terms *terms, bool confirm, int64_t deadline,
              hl_error *error);
  /* Like drop with confirm, but deletes n records in one or few round trips. HL__ABSENT: none is
     there any more, but some may not have been there before. NULL: the core drops them one after
     the other. */
  int (*drop_all)(hl_session *session, const hl_lease_terms *terms, size_t n, int64_t deadline,
                  hl_error *error);
  /* Like drop, but for a record whose creation was sent and not answered. HL_OK: the record is not
     there and never will be, even if the server reads the command late. NULL: the core uses drop,
     as the store has ended that session at the server. */
  int (*recall)(hl_session *session, const hl_lease_terms *terms, int64_t deadline,
                hl_error *error);
  /* Changes the mode of the request's rows, which are rows of the lease, in one step: others see
     the lease in the one mode or the other. upgrade: to exclusive, once only this lease is in the
     way, which it awaits until the deadline; else to shared, at once. recorded: all rows of the
     lease, in the modes that they get. The lease's end stays.

     *grant: place, and for an upgrade the token. Before the call, grant->token is the token of the
     lease: a downgrade that the server reads late, after a later upgrade, finds another token, and
     changes nothing. If a downgrade finds another token because an unanswered upgrade was carried
     out, the core calls again with that token. HL_OK; HL_ELOST; else as take. NULL:
     traits.leases_update is false. */
  int (*convert)(hl_session *session, const hl_request *request, hl_grant *grant, hl_error *error);
  /* Gives the lease to a new holder, who knows id and secret. The record ends `ttl` from now. The
     lease's rows must be the request's (HL_EMISMATCH). HL_ELOST: also where terms->replaces names
     another holder than the record's. Does not wait. Of the request only lease,
     rows and deadline count. */
  int (*adopt)(hl_session *session, const hl_request *request, hl_grant *grant, hl_error *error);
  /* On a session that holds the request's rows: writes the record, then gives the rows back, as
     give_back does. grant->token is the session's, and becomes the lease's. After a failure other
     than HL_ECONNECTION the session still holds the rows. */
  int (*to_lease)(hl_session *session, const hl_request *request, hl_grant *grant, hl_error *error);
  /* Calls fn for each lease that has not expired; with filter->over, for expired ones, too. */
  int (*list)(hl_session *session, const hl_lease_filter *filter, hl_holder_fn fn, void *context,
              int64_t deadline, hl_error *error);
  /* Ends the matching leases and wakes their waiters. Keeps who ended them, and why, until the
     holder asks, at least for an hour beyond their end. Ends and counts expired leases, too, as a
     refresh could revive them. */
  int (*revoke)(hl_session *session, const hl_lease_filter *filter, int64_t deadline,
                uint64_t *count, hl_error *error);
  /* Makes every later token greater than `token`. NULL: the store's tokens come from a source that
     cannot be set; in a quorum of such stores tokens may fall. */
  int (*raise)(hl_session *session, uint64_t token, int64_t deadline, hl_error *error);
  /* Says that this process has exported the lease, and must do nothing to it any more. Never
     blocks; any thread. NULL: the store does nothing to leases by itself. */
  void (*leave)(hl_store *store, const hl_lease_terms *terms);
} hl_lease_ops;

struct hl_store {
  hl_layout *layout; /* a reference: the layout on which open has agreed; until the store ends */
  const hl_lease_ops *leases; /* NULL: it has none */
  /* The prefix of the store's own names, if names of HL_LEVEL_NAMED lie beside them: at most
     HL__OWN_NAMES_MAX bytes, until the store ends. NULL: they lie elsewhere. */
  const char *own_names;
  /* A session that open has made, as it had to look at the server: hl__session_open takes it. If it
     is still here, close ends it. NULL: there is none. */
  hl_session *_Atomic first;
};

/* A store's own session begins with this. */
struct hl_session {
  hl_store *store;
};

/* The traits of a store. A store whose connections are scarce also blocks. */
typedef struct hl_store_traits {
  /* A session is a connection to a server: pool_size counts, and a session may have ended while it
     was in the pool. */
  bool scarce;
  /* The store gives up a session of which it has heard nothing for hold_timeout. The keeper renews
     the session, and the core does not believe in its locks for longer. */
  bool expires;
  /* Every call may block, even a try. A client library makes it, which exit() takes apart. */
  bool blocks;
  /* There are no session locks: an acquisition without a ttl becomes a lease of hold_timeout, which
     the core refreshes. Each take is for a lease, and none for an extend. A session never holds
     anything, and to_lease is never called. */
  bool leases_only;
  /* hl_lease_ops.drop without confirm sends, and does not block, on a session on which nothing is
     outstanding: the core calls it at once, under a mutex. */
  bool drop_sends;
  /* A session is no connection. HL_ECONNECTION says of one call that too few servers have answered;
     the session goes on, and another call may be answered. */
  bool several;
  /* No request ever waits. */
  bool grants_all;
  /* Requests may have update rows: for session locks, and for leases. */
  bool updates, leases_update;
} hl_store_traits;

typedef struct hl_store_ops {
  uint32_t abi;       /* HL_STORE_ABI */
  const char *scheme; /* as in hl_dsn.store */
  hl_store_traits traits;
  /* Parses the DSNs of this store. */
  hl_dsn_fn parse;

  /* The bucket, on HL_LEVEL_NAMED, of a lock that other programs take by this name on such a store.
     Each such lock has one bucket, and very rarely shares it with another. NULL: the store knows no
     such locks. Any thread. */
  uint64_t (*name_key)(const char *name, size_t size);

  /* Initialises the client library: every handler that the library registers with exit(). The core
     calls it before each open, and registers its own handler behind those, so that exit() runs the
     core's first. NULL: not needed. */
  void (*library_init)(void);

  /* Makes the store. Checks that it excludes (replicas, clusters, other buckets or levels ...), and
     refuses with HL_EUNSAFE_SERVER, HL_EMISMATCH, HL_ENOT_PROVISIONED, HL_EDSN, HL_ECONNECTION,
     HL_ESTORE or HL_ENOMEM. */
  int (*open)(const hl_store_config *config, hl_store **store, hl_error *error);
  /* Called after all sessions have been closed. Never blocks. */
  void (*close)(hl_store *store);

  /* Connects; blocks until `deadline` at most (ms, hl__now_ms). */
  int (*session_open)(hl_store *store, int64_t deadline, hl_session **session, hl_error *error);
  /* Closes a session in any state, and so gives back its rows. Never blocks. */
  void (*session_close)(hl_session *session);

  /* Locks the rows of the request, waiting until its deadline. After a failure the session holds no
     row that this call has locked (but see extend above).

     HL_OK; HL_TIMEOUT, HL_DEADLOCK, HL_CANCELLED (interrupted); HL_ECONNECTION (the session has
     ended), HL_ENOT_PROVISIONED (error->level and bucket are set), HL_EUNSAFE_SERVER, HL_ESTORE,
     HL_ENOMEM. */
  int (*take)(hl_session *session, const hl_request *request, hl_grant *grant, hl_error *error);
  /* Begins a take of a session that holds nothing, and calls back instead of blocking. HL_OK:
     started->done is called later, by another thread, perhaps before this returns. Else the take
     has not begun. HL_BUSY: no thread can be started now. The request, what it leads to, and
     *started stay until `done` is called. A take that waits costs no thread. NULL: the store
     cannot. */
  int (*start)(hl_session *session, const hl_request *request, hl_started *started,
               hl_error *error);
  /* Makes rows shared that the session made exclusive by `upgrade`; it holds them throughout. Waits
     until the request's deadline. HL_OK: *sent_ms as hl_grant.sent_ms. HL_EUNSUPPORTED: not
     possible for these rows, and nothing has changed; HL_ECONNECTION: the session has ended. NULL:
     the store cannot. */
  int (*downgrade)(hl_session *session, const hl_request *request, int64_t *sent_ms,
                   hl_error *error);
  /* Gives all rows back without waiting. The caller has just checked the session. HL_OK: the
     answer, if the store answers at all, is outstanding. HL_BUSY: an earlier answer has not come,
     and must be settled before the next call. HL_ECONNECTION: the session has ended. */
  int (*give_back)(hl_session *session, hl_error *error);
  /* Sends a sign of life, so that the store keeps the session. HL_OK: its answer is outstanding;
     *sent_ms is when it was sent (hl__boot_ms). */
  int (*renew)(hl_session *session, int64_t *sent_ms, hl_error *error);
  /* Reads the outstanding answer, waiting until deadline (0: not at all). Also forgets an
     interruption that came after the call for which it was meant. HL_OK: nothing is outstanding.
     HL_TIMEOUT: the answer has not come. HL_ECONNECTION: the session has ended, or no longer
     holds its rows. */
  int (*settle)(hl_session *session, int64_t deadline, hl_error *error);
  /* Checks the session without a round trip: HL_OK or HL_ECONNECTION. While an answer is
     outstanding it may say HL_OK of a session that has just ended. */
  int (*check)(hl_session *session, hl_error *error);
  /* Whether the server has sent something that the thread in take, renew or settle has not reported
     yet: perhaps that the connection has ended, or that the rows were given back. Without
     connections: whether the rows of the session are lost. Any thread. NULL: never. */
  bool (*told)(hl_session *session);
  /* Ends a blocking call on the session soon, or else the next one. The session may end with it.
     Any thread. */
  void (*interrupt)(hl_session *session);

  /* The last call of each thread of the core, so that a client library can free its memory of the
     thread. NULL: not needed. */
  void (*thread_end)(void);

  /* Calls fn for every lock, held or awaited, that conflicts with one of the filter's rows; if n is
     0, for every lock of the space. On an idle session. HL_TIMEOUT: no answer by the deadline. If
     the store shows only some of the locks, calls fn for these, and fails: *error names the
     reason. */
  int (*holders)(hl_session *session, const hl_lease_filter *filter, hl_holder_fn fn, void *context,
                 int64_t deadline, hl_error *error);
} hl_store_ops;

/* The operations of a store whose sessions hold nothing between two calls: give_back and check, and
   renew. */
static inline int hl__session_rests(hl_session *session, hl_error *error) {
  (void)session, (void)error;
  return HL_OK;
}
static inline int hl__session_renewed(hl_session *session, int64_t *sent_ms, hl_error *error) {
  *sent_ms = hl__boot_ms();
  return hl__session_rests(session, error);
}

/* Takes the session that open has made, if it still stands; else calls ops->session_open. */
static inline int hl__session_open(const hl_store_ops *ops, hl_store *store, int64_t deadline,
                                   hl_session **session, hl_error *error) {
  *session = atomic_exchange(&store->first, NULL);
  if (*session && ops->check(*session, NULL) == HL_OK) return HL_OK;
  if (*session) ops->session_close(*session); /* it has ended meanwhile */
  return ops->session_open(store, deadline, session, error);
}

extern const hl_store_ops hl_store_null;
extern const hl_store_ops hl_store_file;
extern const hl_store_ops hl_store_quorum;

#endif
