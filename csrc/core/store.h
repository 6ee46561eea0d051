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
 *                     take: HL_OK
 *      open -> idle ----------------> held --- take (extend) ---.
 *               ^ |                    | ^                      |
 *               | '-- take: any other  | '----------------------'
 *               |     (nothing held)   |
 *               '------ give_back -----'
 *
 * A take for a lease leaves the session idle: what was granted is a record then, which no
 * session holds. See hl_lease_ops.
 *
 * give_back and renew send and do not wait; the answer is outstanding until
 * settle has read it. While one is outstanding only settle, check, take,
 * give_back, interrupt, close and forget may be called; take and give_back settle
 * by themselves (take waits for it; give_back must not, see there).
 *
 * Threads: the core calls the functions of one session from one thread at a
 * time; interrupt and told alone come from any thread while another is in take,
 * check or settle. Functions of a store may be called by several threads at once.
 *
 * Forks: a store watches its descriptors with hl__fork_watch (fork.h), so
 * that a child closes its copies at once; the core then calls only forget.
 */
#ifndef HIERLOCK_STORE_H
#define HIERLOCK_STORE_H

#include "dsn.h"
#include "hierlock.h"

#include <string.h>

/* Raised whenever anything in this file changes its meaning. A store built
   for another number is refused. */
#define HL_STORE_ABI 22u

typedef struct hl_store hl_store;
typedef struct hl_session hl_session;

/* What the core tells a store when it opens it. Outlives the store. */
typedef struct hl_store_config hl_store_config;
struct hl_store_config {
  const hl_dsn *dsn;
  /* What the program wants; from the first open on, what it and the space have
     agreed on (hl__layout_agree). */
  hl_layout *layout;
  int64_t timeout;         /* the usual one of an acquisition; ms */
  int64_t hold_timeout;    /* ms */
  const char *application; /* shown to observers */
  const char *host;        /* likewise */
  int64_t pid;
  bool interoperates; /* plans have rows of HL_LEVEL_NAMED */
  /* Around each wait for the server that may take long. wait_end does not return
     once another thread runs exit(), as the client library is being taken apart
     then: to be called without a mutex, and before the library goes on. NULL: nobody
     waits. */
  void (*wait_begin)(void);
  void (*wait_end)(void);
  /* For a store that is made of others: which store a DSN asks for. HL_EDSN; HL_ESTORE: it is
     not available. */
  int (*find)(const hl_store_config *config, const char *dsn, const struct hl_store_ops **ops,
              hl_error *error);
  const struct hl_store_ops *const *stores; /* for find */
};

/* A lease, as the store is told of it. The record that the store keeps of it is there as
   long as the lease is unbroken: presence decides, and time only permits deletion. Whoever
   meets a record that is in the way and whose time is up deletes it if it is still up, in one
   step; he never ignores it. */
typedef struct hl_lease_terms {
  uint8_t id[16];     /* random: its name */
  uint8_t secret[16]; /* random: who knows it may take the lease over */
  uint8_t holder[16]; /* random: which handle has it now */
  /* The id under which an earlier try of this grant, which was not answered, may come to
     record one that nobody wants: it may be deleted at any time. Zeroes: there was none. */
  uint8_t former[16];
  int64_t ttl; /* ms */
  /* The number of a refresh, from 1, one more for each that is sent. A store that may carry out a refresh
     late keeps the last number that it applied, and ignores a refresh whose number is not greater: the
     holder does not believe its end any more. An import sets the number to 0. */
  uint64_t turn;
  uint64_t place;    /* where the store has the record: what a grant, or the last conversion, has
                         said; of no matter to anybody else */
  const char *owner; /* 1 to HL_OWNER_MAX bytes */
  bool again;        /* of a drop: an earlier one was sent, and was not answered */
} hl_lease_terms;

typedef struct hl_request {
  const hl_row *rows; /* in locking order, each once */
  size_t n;
  const char *names; /* hl__request_name */
  int64_t deadline;  /* hl__now_ms(); HL_FOREVER; ignored when try_once */
  bool try_once;     /* do not wait for any row */
  bool cancellable;  /* interrupt may come: the wait must then end at the store,
                        too */
  bool extend;       /* the session holds rows already, and keeps them when
                        this fails, except with HL_DEADLOCK and
                        HL_ECONNECTION (it ended, or holds nothing any more) */
  /* take may return HL__BEHIND_UPDATE, holding nothing, where the request wants a node of the deepest level
     exclusively and a lease for update is in the way, whose holder may want the same. The core then asks
     again with the node's update row: so the waiter waits there, and does not hold the node. */
  bool gives_way;
  const uint8_t *exempt; /* the id of a lease that is not in the way; NULL: each is */
  bool upgrade;          /* extend: it holds all rows shared, and nobody else waits in order to get
                        them exclusively and holds them shared himself */
  const hl_row
      *recorded; /* for observers, and records of leases: the rows, and those already held; not
                          update rows that HL__BEHIND_UPDATE has added */
  size_t recorded_n;
  const char *path;  /* for observers; one line, escaped, at most 255 bytes */
  const char *label; /* for observers; any bytes */
  size_t label_size;
  hl_mode mode; /* for observers: of the targets */
  /* NULL: a session lock. Else the rows are taken in the same way, in the same queue and
     order; then a record is written, and the session holds nothing any more. */
  const hl_lease_terms *lease;
  /* A number that no other agent has, of any process, for a store that looks for circles of
     waiters itself: an agent releases nothing while it waits in a request that `blocks` it.
     0: not said. */
  uint64_t agent;
  bool blocks;
} hl_request;

/* The row of a *presence*: a lease that is no lock, but says that a process of a quorum is here
   (../stores/quorum/presence.c), shared. No target has that bucket. Its id begins with eight zeroes,
   as no other's; the core shows it to nobody. */
#define HL__PRESENCE_BUCKET 2147483647u
static inline bool hl__is_presence(const uint8_t id[16]) {
  static const uint8_t zeroes[8] = {0};
  return memcmp(id, zeroes, sizeof zeroes) == 0;
}

/* The name of a row of the request, which is on HL_LEVEL_NAMED; not ended by a NUL. */
static inline hl_id hl__request_name(const hl_request *request, const hl_row *row) {
  uint32_t size;
  memcpy(&size, request->names + row->root, sizeof size);
  return (hl_id){request->names + row->root + sizeof size, size};
}

typedef struct hl_grant {
  uint64_t token; /* fencing token, comparable over all processes */
  /* When the last command that was answered was sent (hl__boot_ms). A failed
     extend, too, sets it, where the session still stands; so does, with
     HL_ECONNECTION, the grant of a lease whose record may be there: the core then has
     it dropped, on another session, before it does anything else. 0 otherwise. */
  int64_t sent_ms;
  /* Of a lease: for hl_lease_terms.place. Also of one that may be there, see sent_ms. */
  uint64_t place;
  /* Of a conversion: until when the lease is to be believed now, if not for longer
     before (hl__boot_ms); 0: that has not changed. */
  int64_t until_ms;
} hl_grant;

/* Which leases: hl_filter, as the store is told. */
typedef struct hl_lease_filter {
  const char *owner;  /* NULL: any */
  const uint8_t *id;  /* 16 bytes; NULL: any */
  const hl_row *rows; /* in locking order; those that conflict with any of them */
  size_t n;           /* 0: any */
  const char *names;  /* of rows on HL_LEVEL_NAMED, as in hl_request; NULL: leave those out */
  bool over;          /* to list: also those whose time is up */
  size_t most;        /* to list: the caller takes no more; 0: all */
  /* To revoke: a random number of the call, below 2^63; and whether it was sent before, and was not answered. Then
     the count is of both. */
  uint64_t call;
  bool again;
} hl_lease_filter;

/* What an opened store does with leases. Each is called on a session that holds nothing,
   unless it says otherwise, and blocks until the deadline at most (hl__now_ms), when it
   returns HL_TIMEOUT. HL_ECONNECTION: the session has ended, and the core does it once more
   on another one. HL_ELOST: there is no record of that id and holder any more; where it was
   revoked, *error says by whom (hl__error_revoked). Only terms->id, holder, place
   count, and what is named. */
typedef struct hl_lease_ops {
  /* The lease ends ttl from now. terms->turn counts. Never makes a record. *sent_ms: when the command was sent
     (hl__boot_ms), not when it was answered. */
  int (*refresh)(hl_session *session, const hl_lease_terms *terms, int64_t ttl, int64_t deadline,
                 int64_t *sent_ms, hl_error *error);
  /* Whether the record is there, and how long it lasts: 0 when its time is up. */
  int (*inspect)(hl_session *session, const hl_lease_terms *terms, int64_t deadline,
                 int64_t *left_ms, hl_error *error);
  /* Deletes the record, and wakes those who wait. HL_OK only when it was there. HL__ABSENT: terms->again, and it
     is not there, nor is there word of who else has ended it: the earlier one has, perhaps. Without
     confirm the answer may be left outstanding, as give_back's is; it never blocks then, on
     a session on which nothing is outstanding. */
  int (*drop)(hl_session *session, const hl_lease_terms *terms, bool confirm, int64_t deadline,
              hl_error *error);
  /* drop with confirm, of n at once, in a trip for all or for many of them. HL_OK also when some were
     not there. NULL: one after the other. */
  int (*drop_all)(hl_session *session, const hl_lease_terms *terms, size_t n, int64_t deadline,
                  hl_error *error);
  /* The same of a record whose making was sent and not answered. HL_OK: it is not there, and
     never will be, even if the server reads late what was sent. NULL: drop has to do, as the
     store has ended that session at the server. */
  int (*recall)(hl_session *session, const hl_lease_terms *terms, int64_t deadline,
                hl_error *error);
  /* The request's rows, which are rows of the lease, come to be in another mode: exclusive ones when
     nobody but this lease is in the way, for which it waits until the deadline; shared ones at once.
     In one step: others see the lease in the one state or the other. recorded: all its rows as they
     then are. upgrade: to exclusive ones. The time of the lease stays. *grant: place; token, of exclusive ones; before,
     the token that the lease has: where a shared one may be carried out late, behind an upgrade that was sent later, it
     is not, as that has changed the token. A downgrade that finds another one, which an upgrade that was not
     answered gave the lease, is made again with that. HL_OK; HL_ELOST; as take. NULL: traits.leases_update is false. */
  int (*convert)(hl_session *session, const hl_request *request, hl_grant *grant, hl_error *error);
  /* A new holder: whoever knows id and secret. The record ends ttl from now; its rows must be
     those of the request (HL_EMISMATCH). Waits for nobody. Of the request only lease, rows,
     deadline count. */
  int (*adopt)(hl_session *session, const hl_request *request, hl_grant *grant, hl_error *error);
  /* On a session that holds the request's rows: writes the record, then gives the rows back,
     as give_back does. grant->token is the session's, and becomes the lease's. After any failure but HL_ECONNECTION it holds them still. */
  int (*to_lease)(hl_session *session, const hl_request *request, hl_grant *grant, hl_error *error);
  /* Calls fn for each whose time is not up; with filter->over for the others, too. */
  int (*list)(hl_session *session, const hl_lease_filter *filter, hl_holder_fn fn, void *context,
              int64_t deadline, hl_error *error);
  /* Ends them, keeps in mind by whom and why until the holder asks, for an hour beyond
     their time at least, and wakes those who wait. Those whose time is up, too, and they
     count: their holders could come back by a refresh. */
  int (*revoke)(hl_session *session, const hl_lease_filter *filter, const char *by,
                const char *reason, int64_t deadline, uint64_t *count, hl_error *error);
  /* Each token that is made from now on is greater than that. NULL: the store makes them of
     what nobody can set; of a quorum of such stores tokens may fall. */
  int (*raise)(hl_session *session, uint64_t token, int64_t deadline, hl_error *error);
  /* This process has handed the lease over as a text, and makes nothing of it any more.
     Never blocks; any thread. NULL: the store makes nothing by itself. */
  void (*leave)(hl_store *store, const hl_lease_terms *terms);
} hl_lease_ops;

struct hl_store {
  const struct hl_store_ops *ops;
  hl_layout *layout;          /* a reference: what open has agreed on; until the store ends */
  const hl_lease_ops *leases; /* NULL: it has none */
  /* How names begin that are the store's own, where those of HL_LEVEL_NAMED lie beside them:
     at most HL__OWN_NAMES_MAX bytes, until the store ends. NULL: they lie elsewhere. */
  const char *own_names;
};

/* A store's own structures begin with these. */
struct hl_session {
  hl_store *store;
};

/* What a store says of itself. One whose connections are scarce blocks. */
typedef struct hl_store_traits {
  /* A session is a connection to somebody: pool_size counts, and one that lay in
     the pool may have ended. */
  bool scarce;
  /* The store gives up what it has heard nothing of for hold_timeout: the keeper
     renews it, and nobody believes in it any longer. */
  bool expires;
  /* Every call may block, a try, too; and is made by a client library, which exit()
     takes apart. */
  bool blocks;
  /* There are no session locks: what is acquired without a ttl is a lease of hold_timeout,
     which the core refreshes. Each take is for a lease, none for an extend; a session never
     holds anything, and to_lease is never called. */
  bool leases_only;
  /* hl_lease_ops.drop without confirm sends, and does not block, on a session on which
     nothing is outstanding: the core has it do so at once, under a mutex. */
  bool drop_sends;
  /* Nobody ever waits. */
  bool grants_all;
  /* Requests may have update rows: of session locks, and of leases. */
  bool updates, leases_update;
} hl_store_traits;

typedef struct hl_store_ops {
  uint32_t abi;       /* HL_STORE_ABI */
  const char *scheme; /* as in hl_dsn.store */
  hl_store_traits traits;
  /* Takes the DSNs apart that ask for this store. */
  hl_dsn_fn parse;

  /* The bucket, on HL_LEVEL_NAMED, of what programs of another kind lock by this name on
     such a store. One lock of theirs has one bucket, and only very rarely does it share it
     with another one. NULL: the store knows none. Any thread. */
  uint64_t (*name_key)(const char *name, size_t size);

  /* Makes the store; looks whether it excludes (replicas, clusters, other
     buckets or levels ...) and refuses with HL_EUNSAFE_SERVER, HL_EMISMATCH,
     HL_ENOT_PROVISIONED, HL_EDSN, HL_ECONNECTION, HL_ESTORE, HL_ENOMEM. */
  int (*open)(const hl_store_config *config, hl_store **store, hl_error *error);
  /* After all sessions have been closed. Never blocks. */
  void (*close)(hl_store *store);
  /* In a forked child, instead of close: touches nothing of the parent's. */
  void (*forget)(hl_store *store);

  /* Blocks until `deadline` at most (ms, hl__now_ms). */
  int (*session_open)(hl_store *store, int64_t deadline, hl_session **session, hl_error *error);
  /* Whatever its state; gives back what it holds. Never blocks. */
  void (*session_close)(hl_session *session);
  void (*session_forget)(hl_session *session); /* in a forked child */

  /* Locks the rows of the request, waiting until its deadline. On anything
     but HL_OK nothing that this call took is held (but see extend above).
     HL_TIMEOUT, HL_DEADLOCK, HL_CANCELLED (interrupted); HL_ECONNECTION (the
     session has ended), HL_ENOT_PROVISIONED (error->level, bucket are set),
     HL_EUNSAFE_SERVER, HL_ESTORE, HL_ENOMEM. */
  int (*take)(hl_session *session, const hl_request *request, hl_grant *grant, hl_error *error);
  /* On a session that holds rows: those of the request, which it made exclusive by `upgrade`,
     become shared, with no moment in between in which it holds them not at all. Waits
     until the request's deadline. HL_OK: *sent_ms as hl_grant.sent_ms. HL_EUNSUPPORTED: not
     these, and all is as it was; HL_ECONNECTION: the session has ended. NULL: it cannot. */
  int (*downgrade)(hl_session *session, const hl_request *request, int64_t *sent_ms,
                   hl_error *error);
  /* Gives everything back without waiting; the caller has just looked whether
     the session stands. HL_OK: the answer, if the store
     answers at all, is outstanding. HL_BUSY: an earlier answer has to be
     settled first, and it has not come: call again after settle.
     HL_ECONNECTION: the session has ended. */
  int (*give_back)(hl_session *session, hl_error *error);
  /* Sends a sign of life, so that the store goes on keeping the session.
     HL_OK: its answer is outstanding; *sent_ms is when it was sent
     (hl__boot_ms). */
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
  int (*check)(hl_session *session, hl_error *error);
  /* From any thread, also while another is in take, renew or settle: whether something
     has come from the server that the other one has not told yet. It may be that its
     connection has ended, or that the store has given everything back. Where there
     are no connections: whether what the session holds is lost. NULL: it never is. */
  bool (*told)(hl_session *session);
  /* From any thread: a blocking call on the session, or the next one, ends soon.
     The session may end with it. */
  void (*interrupt)(hl_session *session);

  /* The last call of a thread of the core's, for what a client library keeps for
     each; NULL: nothing. */
  void (*thread_end)(void);

  /* Calls fn for every lock, held or awaited, that conflicts with any of the
     filter's rows; n is 0: for every one of the space. On an idle session. HL_TIMEOUT: the
     store does not answer until the deadline. Where the store does not show all of
     them, it calls fn for those that it shows, and fails: *error says what is missing. */
  int (*holders)(hl_session *session, const hl_lease_filter *filter, hl_holder_fn fn, void *context,
                 int64_t deadline, hl_error *error);
} hl_store_ops;

extern const hl_store_ops hl_store_null;
extern const hl_store_ops hl_store_file;
extern const hl_store_ops hl_store_quorum;

#endif
