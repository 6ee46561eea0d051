/*
 * hierlock.h - hierarchical locks: the public C interface.
 *
 * To lock a node of a tree (user -> account -> resource, or other levels) a
 * caller takes a shared lock on each ancestor and an exclusive lock on the
 * node. A store maps the nodes to a fixed number of buckets for each level, and
 * locks the buckets. The stores:
 *
 *     mysql:, mariadb:             row locks
 *     postgresql:                  advisory locks, without buckets
 *     redis:, sqlite:, memcached:  records, without buckets
 *     file:                        a table in memory that programs share
 *     a quorum                     several of these
 *     null:                        no locks at all, for tests of the calling program
 *
 * A program makes these calls, in this order. Example:
 *
 *     hl_config config = HL_CONFIG_INIT;
 *     hl_manager_open(&config, &manager, &error);
 *     plan = hl_plan_new(hl_manager_layout(manager));
 *     hl_plan_add(plan, ids, 3, HL_EXCLUSIVE, true, &error);
 *     hl_acquire(manager, plan, &options, &lock, &error);
 *     ... work ...
 *     hl_lock_release(lock, false, &error);
 *     hl_lock_free(lock);
 *     hl_plan_free(plan);
 *     hl_manager_close(manager);
 *
 * Caveats, which every user should have read once:
 *
 * - Locks are advisory: they keep out programs that ask for them, and no others.
 * - A lock can be lost while it is held (a killed connection, a restarted
 *   server, a process stopped for longer than hold_timeout). The function
 *   hl_lock_is_held says so without a round trip. A fencing token
 *   (hl_lock_token) protects a resource that can compare numbers.
 * - After fork(), the child's copies of managers and locks are not the
 *   parent's: a copied lock is dead, a copied manager starts afresh. While
 *   another thread is logging in to a server, fork() waits for it: for
 *   milliseconds, or for connect_timeout where the server hangs.
 * - A shared object that has this library in it stays loaded once a thread of the library's was
 *   started: dlclose() is safe, and unloads nothing.
 * - pthread_cancel() ends a thread that waits in a function of this library when that
 *   returns. hl_manager_cancel and hl_pending_cancel end waits.
 * - A manager may be used by any number of threads. A lock is used by one
 *   thread at a time.
 *
 * Status. Functions that can fail return an int: 0 is success, a positive
 * number an expected outcome (HL_TIMEOUT ...), a negative one a failure
 * (HL_ECONNECTION ...). Such functions fill in *error, which belongs to the caller, is
 * of fixed size and is never freed; error may be NULL.
 *
 * NULL. Where a comment says so, NULL is fine or stands for a default; so it is for the context of
 * a function that is called back. Elsewhere it is a bug of the caller's: a function with a status
 * returns HL_EMISUSE; any other does nothing, and returns 0, false, NULL or "", hl_lock_look
 * HL_RELEASED. So a lock that was not granted is not held.
 *
 * Times are int64_t milliseconds.
 */
#ifndef HIERLOCK_H
#define HIERLOCK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HL_VERSION "0.1.0"
/* The HL_VERSION of the library, which may differ from the header's. Static storage. */
const char *hl_version(void);

/* ------------------------------------------------------------- status */

enum hl_status {
  HL_OK = 0,
  HL_TIMEOUT = 1,   /* not granted in time */
  HL_DEADLOCK = 2,  /* chosen as the victim; the transaction is gone */
  HL_CANCELLED = 3, /* the program cancelled the wait, or all waits of the manager, or
                       closed the manager */
  HL_BUSY = 4,      /* all connections of the pool are in use, or no thread can
                       be started */

  HL_ECONNECTION = -1,      /* the store cannot be reached or logged in to */
  HL_ELOST = -2,            /* the lock was lost while it was held */
  HL_ERELEASED = -3,        /* the lock holds nothing any more */
  HL_ENOT_PROVISIONED = -4, /* the table or a bucket row is missing */
  HL_EMISMATCH = -5,        /* the space has other buckets or levels; a quorum: another list */
  HL_EUNSAFE_SERVER = -6,   /* a server on which locks would not exclude */
  HL_EDSN = -7,             /* the DSN cannot be understood */
  HL_ESTORE = -8,           /* anything else that the store reported */
  HL_EMISUSE = -9,          /* a bug of the caller's: the message names it */
  HL_ENOMEM = -10,          /* out of memory */
  HL_EUNSUPPORTED = -11     /* the store cannot do that; the message names a store
                               that can */
};

typedef struct hl_error {
  int status;            /* enum hl_status */
  bool retryable;        /* may the same call succeed later? */
  unsigned server_errno; /* the server's own number, 0 where none spoke */
  char sqlstate[6];      /* the server's own SQLSTATE, "" where none spoke */
  int level;             /* the row concerned, -1 where none is */
  uint32_t bucket;       /* valid where level >= 0 */
  char message[512];     /* one line for people, NUL-terminated */
  /* HL_ELOST of a revoked lease: who revoked it, and why. HL_TIMEOUT: the reason, where it was
     something else than other locks. Else "". */
  char revoked_by[64];
  char reason[128];
  /* HL_TIMEOUT: for so long no retry can succeed, in ms; 0: not known. */
  int64_t retry_after_ms;
  uint64_t reserved[16]; /* 0; what a later version adds comes here */
} hl_error;

/* The contract's name of a status ("timeout", "not_provisioned" ...);
   HL_EMISUSE is "misuse" and HL_ENOMEM "memory". Static storage. */
const char *hl_status_name(int status);

/* ------------------------------------------------------------- layout */

#define HL_LEVELS_MAX 16
#define HL_LEVEL_NAME_MAX 64
#define HL_ID_MAX 1024 /* bytes of an id */
#define HL_BUCKETS_DEFAULT 10000000u

/* HL_UPDATE: one holder, beside any number of sharing holders. Only the update holder may become
   exclusive, see hl_lock_upgrade. */
typedef enum hl_mode { HL_SHARED = 1, HL_EXCLUSIVE = 2, HL_UPDATE = 3 } hl_mode;

/* "shared", "exclusive", "update"; "" for another number. Static storage. */
const char *hl_mode_name(hl_mode mode);
/* The mode of that name. False, and *mode unchanged, when no mode has it. */
bool hl_mode_named(const char *name, hl_mode *mode);

/* The shape of a tree: names of its levels from root to leaf, and the number
   of buckets of each level. Immutable, reference-counted, free of threads. */
typedef struct hl_layout hl_layout;

/* names: 1 to HL_LEVELS_MAX distinct, non-empty names of at most HL_LEVEL_NAME_MAX bytes, without
   ',' or ':' or control bytes; NULL stands for user, account, resource. buckets: 1 to 2^31 - 1; 0
   stands for HL_BUCKETS_DEFAULT. The names are copied. If names was NULL or buckets 0, a manager
   that is opened with the layout takes them from its space: hl_config. Fails with HL_EMISUSE,
   HL_ENOMEM. */
int hl_layout_new(const char *const *names, unsigned levels, uint32_t buckets, hl_layout **layout,
                  hl_error *error);
hl_layout *hl_layout_ref(hl_layout *layout);
void hl_layout_unref(hl_layout *layout);
unsigned hl_layout_levels(const hl_layout *layout);
/* 0: it has none, see hl_layout_bucket. */
uint32_t hl_layout_buckets(const hl_layout *layout);
/* The name of a level, NULL past the deepest. Lives as long as the layout. */
const char *hl_layout_name(const hl_layout *layout, unsigned level);

typedef struct hl_id {
  const char *data; /* any bytes */
  size_t size;      /* 1 to HL_ID_MAX */
} hl_id;

/* The bucket of the node ids[0]/.../ids[n-1], which is on level n - 1:
   FNV-1a (32 bits; Fowler, Noll, Vo, draft-eastlake-fnv) of
   level_name ":" id ":" id ..., modulo the number of buckets.
   A store whose rows are mere numbers has no buckets. On the layouts that
   hl_manager_layout gives of it this is the 60 bits
   of FNV-1a (64 bits) of the same text, xor-folded: (h >> 60) ^ (h & (2^60 - 1)).
   No ':' in an id is escaped: "d:1", "x" and "d", "1:x" are one node. 0, where the layout has
   no such level. */
uint64_t hl_layout_bucket(const hl_layout *layout, const hl_id *ids, unsigned n);

/* --------------------------------------------------------------- plan */

typedef struct hl_row {
  uint64_t bucket;
  uint8_t level;
  uint8_t mode; /* hl_mode; or an ancestor's intention, with such a layout (mode.h) */
  /* The bucket of the tree's root, so all rows of a tree have the same number. On HL_LEVEL_NAMED:
     where the plan has the name. */
  uint32_t root;
} hl_row;

/* The level of rows that are no nodes, but the names that programs of another kind lock for nodes:
   see hl_config.interoperate. Rows with names come behind all others. */
#define HL_LEVEL_NAMED HL_LEVELS_MAX

/* Added to the level of a node: its update row, which the update holder of the node holds
   exclusively. Update rows come before all others. */
#define HL_LEVEL_UPDATE 128u

/* The targets of a call, and the rows that they need. Each row is there once, in the strongest mode
   that any target needs, shared or exclusive. The update rows come first, then the others, both in
   the order (level, bucket). All callers take rows in that order, so calls cannot deadlock. A plan
   is used by one thread at a time. */
typedef struct hl_plan hl_plan;

typedef struct hl_target {
  unsigned level;
  hl_mode mode;    /* as it will be taken */
  bool mode_given; /* it came with a mode of its own */
  bool updates;    /* it was asked for in HL_UPDATE: hl_lock_upgrade makes it exclusive */
} hl_target;

/* An empty plan, or NULL when out of memory. Takes a reference to layout. */
hl_plan *hl_plan_new(hl_layout *layout);
/* The copy's rows are in locking order already. NULL when out of memory. */
hl_plan *hl_plan_copy(const hl_plan *plan);
void hl_plan_free(const hl_plan *plan); /* NULL is fine */
void hl_plan_clear(hl_plan *plan);      /* makes it empty again */
hl_layout *hl_plan_layout(const hl_plan *plan);

/* Adds the node ids[0]/.../ids[n-1] with its ancestors. HL_SHARED or HL_UPDATE on a level
   that is not the deepest becomes HL_EXCLUSIVE: those who write below it hold
   it shared, too, and would not be kept out. HL_SHARED stays so with the layout of a manager whose
   space knows intentions (docs/locking.md). The ids are copied.
   Fails with HL_EMISUSE (no id, too many, one too long or empty), HL_ENOMEM;
   the plan is then unchanged. */
int hl_plan_add(hl_plan *plan, const hl_id *ids, unsigned n, hl_mode mode, bool mode_given,
                hl_error *error);

size_t hl_plan_target_count(const hl_plan *plan);
/* The i-th target (0 <= i < count; else all of it is 0), its ids in ids[0 .. level]. The bytes
   live until the plan is next changed. */
hl_target hl_plan_target(const hl_plan *plan, size_t i, hl_id ids[HL_LEVELS_MAX]);
/* The rows in locking order; valid until the plan is next changed. */
const hl_row *hl_plan_rows(hl_plan *plan, size_t *n);
/* The strongest of its targets: HL_EXCLUSIVE when any is exclusive. */
hl_mode hl_plan_mode(const hl_plan *plan);
/* The targets as one line for people ("u1/a1/r1, u1/a1/r2"), odd bytes, '/', ',' and '%'
   of an id escaped as %NN, cut to size with "...". Returns out. */
char *hl_plan_describe(const hl_plan *plan, char *out, size_t size);

typedef enum hl_dialect { HL_MYSQL = 1, HL_MARIADB = 2, HL_POSTGRESQL = 3 } hl_dialect;

/* The one statement that locks the plan's rows in the caller's own
   transaction, as a malloc'ed string that the caller frees; NULL when out of
   memory, or for an unknown dialect. table is an identifier ([A-Za-z0-9_$]+), which the caller has
   checked; HL_POSTGRESQL does not use it. The statement returns as many rows as the plan has. */
char *hl_plan_sql(hl_plan *plan, hl_dialect dialect, const char *table);
/* The statement of hl_plan_sql for a space of MySQL or MariaDB with leases. table is the name that
   the DSN gives. The statement locks and reads the roots' gates, too, last of all, and returns
   *gates rows more. If leases may be below a root, the statement returns fewer rows: the caller
   then looks for leases. */
char *hl_plan_sql_leased(hl_plan *plan, hl_dialect dialect, const char *table, size_t *gates);

/* ------------------------------------------------------------ manager */

#define HL_FOREVER INT64_MAX

struct hl_store_ops; /* hierlock/store.h, for stores of other makers: docs/adding-a-store.md */

/* MySQL and MariaDB. A program that names this store links the client library as well
   (pkg-config --static --libs hierlock). A hierlock that was built without one does not have it. */
extern const struct hl_store_ops hl_store_mysql;
/* PostgreSQL; likewise, with libpq. */
extern const struct hl_store_ops hl_store_postgresql;
/* Redis and Valkey; likewise, with hiredis. */
extern const struct hl_store_ops hl_store_redis;
/* SQLite; likewise, with libsqlite3. */
extern const struct hl_store_ops hl_store_sqlite;
/* Memcached, for efficiency, never for correctness; likewise, with libmemcached. */
extern const struct hl_store_ops hl_store_memcached;

/* hl_config and hl_options begin with their size as the program was compiled with it, and
   later versions only add fields at the end: a program that knows fewer gets their
   defaults. Fields that this library does not know must be zero, else HL_EMISUSE; so is a size
   that no version has. Begin with HL_CONFIG_INIT and HL_OPTIONS_INIT.
   hl_error and hl_stats, which the library fills in, have their size for ever. hl_holder grows
   at its end: the library makes it. All others stay as they are. */
typedef struct hl_config {
  size_t size;             /* sizeof(hl_config) */
  const char *dsn;         /* NULL: $HIERLOCK_DSN, else "file:", which excludes the
                              programs of the same user alone */
  int64_t timeout;         /* of an acquisition; ms; HL_FOREVER */
  int64_t hold_timeout;    /* ms, at least 1000 */
  hl_layout *layout;       /* the space decides about NULL and 0 in it;
                              NULL: about all of it. See hl_manager_layout */
  unsigned pool_size;      /* connections at most */
  const char *application; /* NULL: the program's name */
  /* Stores beyond file: and null:, e.g. { &hl_store_mysql, NULL }; may be
     NULL. */
  const struct hl_store_ops *const *stores;
  /* "symfony": also locks each node by its name, as Symfony Lock does on the same store. Leases are
     then unsupported, except on stores that have only leases. NULL: as the DSN says.
     HL_EUNSUPPORTED where the store cannot. */
  const char *interoperate;
  /* With it: the name of a node, for each level, and NULL behind the last. "{level}"
     stands for the id of that level: "invoice-{resource}". NULL: ids joined by '/'. */
  const char *const *names;
  /* Units of business data, in the order in which they are to be taken, and NULL behind the last;
     NULL: none. A target whose first id is a unit's name is of that unit. 1 to HL_UNITS_MAX
     distinct names of 1 to HL_UNIT_NAME_MAX bytes without control characters. See
     hl_units_check. */
  const char *const *units;
} hl_config;

#define HL_UNITS_MAX 64
#define HL_UNIT_NAME_MAX HL_LEVEL_NAME_MAX

#define HL_CONFIG_INIT                                                                             \
  { sizeof(hl_config), NULL, 50000, 30000, NULL, 64, NULL, NULL, NULL, NULL, NULL }

typedef struct hl_manager hl_manager;

/* dsn, unless it is NULL: then $HIERLOCK_DSN, and without one "file:". An empty
   variable is an empty DSN, which is refused: the program was meant to be told. */
const char *hl_dsn_default(const char *dsn);

/* The store that a DSN asks for, by its form: "mysql", "postgresql", "redis", "sqlite",
   "memcached", "file", "null" or "quorum". A quorum is quorum:majority;dsn;dsn;dsn or
   quorum:all;..., with '%' as %25 and ';' as %3B in each dsn. A store of another maker's, from
   hl_config.stores, is store+NAME:..., and "store+NAME" here. Static storage. NULL, with HL_EDSN in
   *error, when no known store has that form; HL_ENOMEM. */
const char *hl_dsn_store(const char *dsn, hl_error *error);

/* Opens the store and looks whether it will exclude. Everything in config is
   copied. Fails with HL_EDSN, HL_ECONNECTION, HL_EUNSAFE_SERVER,
   HL_EMISMATCH, HL_ENOT_PROVISIONED, HL_ESTORE, HL_EMISUSE, HL_ENOMEM. */
int hl_manager_open(const hl_config *config, hl_manager **manager, hl_error *error);

/* Releases every lock of the manager, ends its threads and connections, and
   drops the caller's reference. Waits of other threads end with
   HL_CANCELLED. Locks that still exist afterwards hold nothing and are freed
   by hl_lock_free as usual. Waits until the store has given back all released and unwanted
   locks: a round trip. A session lock that is still held ends with its session: a server may free
   it a moment later. Where a server hangs, this takes two seconds at most; the threads then end
   later, and exit() waits for them for 2.5 s at most. No other call on the manager may begin
   afterwards, or while this one runs: a program with several threads calls hl_manager_cancel, joins
   the threads, and then closes. NULL is fine. */
void hl_manager_close(hl_manager *manager);

/* Ends all waits of the manager, in any thread, with HL_CANCELLED; until the manager is closed,
   later waits end so at once. Locks stay held, and are released as usual. An extend that this ends
   may cost its lock, see hl_lock_start_extend. Any thread; any number of times. */
void hl_manager_cancel(hl_manager *manager);

/* The layout for plans of this manager: as its space records, else as in hl_config, else the
   default. Lives as long as the manager. */
hl_layout *hl_manager_layout(const hl_manager *manager);

/* Whether hl_config.units had that name. */
bool hl_manager_has_unit(const hl_manager *manager, const char *name, size_t size);

typedef struct hl_stats {
  uint64_t acquired; /* grants */
  uint64_t waited;   /* grants that took HL_WAITED_MS or longer */
  uint64_t released; /* by whatever route */
  uint64_t timeouts;
  uint64_t deadlocks;
  uint64_t cancelled;
  uint64_t busy;
  uint64_t lost;
  uint64_t errors;       /* failures of acquisitions not counted above */
  uint64_t reconnects;   /* stale connections repaired unseen */
  uint64_t wait_ms;      /* sum over all acquisitions, granted or not */
  uint64_t held;         /* now */
  uint64_t waiting;      /* now */
  uint64_t connections;  /* now; 0 on a store without connections */
  uint64_t reserved[18]; /* 0; what a later version adds comes here */
} hl_stats;

#define HL_WAITED_MS 2

void hl_manager_stats(hl_manager *manager, hl_stats *stats);

/* How often something took how long. */
#define HL_HISTOGRAM_BOUNDS 24
typedef struct hl_histogram {
  uint64_t count;
  uint64_t sum_us;
  /* [i]: those that took longer than hl_histogram_bound_us(i - 1), and at most (i); [0]: at most
     (0); the last: longer than any bound. */
  uint64_t buckets[HL_HISTOGRAM_BOUNDS + 1];
} hl_histogram;

/* Microseconds; 100 us to 5,000 s, in steps of 1, 2, 5. From HL_HISTOGRAM_BOUNDS on: INT64_MAX. */
int64_t hl_histogram_bound_us(unsigned i);

/* The acquisitions whose deepest target was on that level, since the manager was opened. waits: how
   long they waited, granted or not. holds: how long their locks were held that are not held any
   more. A level beyond the deepest has no acquisitions. Any thread. */
void hl_manager_histograms(hl_manager *manager, unsigned level, hl_histogram *waits,
                           hl_histogram *holds);

/* How many locks this manager has found lost so far, or leases over; grows by one for each.
   Two atomic reads, so a caller can look at its locks only when the number has grown. */
uint64_t hl_manager_losses(hl_manager *manager);

/* How a lock is held: as long as its connection or process lives, or until a time. */
typedef enum hl_kind { HL_SESSION = 0, HL_LEASE = 1 } hl_kind;

#define HL_OWNER_MAX 127    /* bytes of the name of a lease's owner */
#define HL_LEASE_ID_SIZE 33 /* 32 hexadecimal digits and a NUL */

typedef struct hl_holder {
  char application[64];
  char host[64];
  char label[128];
  char path[256];
  int64_t pid;      /* 0 where unknown */
  int64_t since_ms; /* of the request; Unix time; 0 where unknown */
  hl_mode mode;     /* of its target; 0 where unknown */
  bool waiting;
  hl_kind kind;
  /* A lease has these; "" and 0 otherwise. */
  char owner[HL_OWNER_MAX + 1];
  char id[HL_LEASE_ID_SIZE];
  int64_t remaining_ms;
  /* The store's name of a session (MySQL: the connection's id; PostgreSQL: the number of the
     server's process; file: PID.NUMBER), by which an administrator ends it. "" where the store
     knows none. */
  char session[24];
} hl_holder;

typedef void (*hl_holder_fn)(void *context, const hl_holder *holder);

/* Calls fn for each lock, held or awaited, that an acquisition of plan would
   have to wait for; plan NULL: for each of the space. The list is a snapshot.
   HL_TIMEOUT: the store does not answer now. Fails with HL_ECONNECTION, HL_ESTORE
   (e.g. no privilege to look), HL_EUNSUPPORTED (the store does not show all of them: fn
   has been called for those that it shows), HL_ENOMEM. */
int hl_manager_holders(hl_manager *manager, const hl_plan *plan, hl_holder_fn fn, void *context,
                       hl_error *error);

/* hl_manager_holders after a failed acquisition, for a caller in a hurry: at most a hundred
   holders, within 50 ms. HL_TIMEOUT: the store has not told all by then; fn was called for the
   known ones. HL_BUSY: the store was not asked, because it has not answered the last look yet, or
   was asked ten times for this manager in this second. Looking costs the server more than a try
   does, and programs try in loops. After any failure there may be holders that fn does not know. */
int hl_manager_blockers(hl_manager *manager, const hl_plan *plan, hl_holder_fn fn, void *context,
                        hl_error *error);

/* Which leases. All that is given must hold. */
typedef struct hl_filter {
  size_t size;         /* sizeof(hl_filter); see hl_config */
  const char *owner;   /* of this owner; NULL: of any */
  const char *id;      /* this one, as in hl_holder.id; NULL: any */
  const hl_plan *plan; /* those for which an acquisition of the plan would have to
                          wait; NULL: any */
  bool over;           /* also those whose time is up; hl_manager_revoke ends them anyhow */
} hl_filter;

#define HL_FILTER_INIT                                                                             \
  { sizeof(hl_filter), NULL, NULL, NULL, false }

/* Calls fn for each lease of the space whose time is not up, unless the filter says
   otherwise. filter: NULL stands for all.
   fn must not call this library. HL_EUNSUPPORTED, HL_ECONNECTION, HL_ESTORE, HL_EMISUSE,
   HL_ENOMEM. */
int hl_manager_leases(hl_manager *manager, const hl_filter *filter, hl_holder_fn fn, void *context,
                      hl_error *error);
/* Ends leases of any holder, and frees their nodes at once. Ends leases whose time is up, too: a
   refresh could bring them back, as long as no other request has wanted their nodes. The next call
   of each holder is HL_ELOST with `by` and `reason` (NULL: none; at most 63 and 127 bytes of them)
   in its hl_error. A filter that gives nothing is HL_EMISUSE. *count: how many. Fails as
   hl_manager_leases. */
int hl_manager_revoke(hl_manager *manager, const hl_filter *filter, const char *by,
                      const char *reason, uint64_t *count, hl_error *error);

/* --------------------------------------------------------------- lock */

typedef struct hl_lock hl_lock;

/* The asker: a part of a program that does one thing at a time, such as a Lua state. A program that
   names an agent promises that no other part of it releases the agent's locks. So a request that
   would wait for the agent itself, or in a circle of waiting agents, is HL_DEADLOCK before it
   waits, if it may wait for a second or longer. An agent is used by one thread at a time. NULL: out
   of memory. */
typedef struct hl_agent hl_agent;
hl_agent *hl_agent_new(void);
hl_agent *hl_agent_ref(hl_agent *agent); /* NULL is fine */
void hl_agent_unref(hl_agent *agent);    /* NULL is fine; also before its locks end */

#define HL_WHERE_SIZE 96

/* A lease is a record in the store. The lease ends at a time of the store's clock, survives its
   process, and can be renewed, listed, handed over and revoked. A session lock and a lease on the
   same nodes exclude each other. */
typedef struct hl_options {
  size_t size;       /* sizeof(hl_options); see hl_config */
  int64_t timeout;   /* ms; 0 tries once; HL_FOREVER; < 0: the manager's */
  const char *label; /* free text shown to observers; NULL: none */
  size_t label_size;
  /* ms from the grant until the lease ends, unless it is refreshed: 1 to HL_TTL_MAX. 0: a
     session lock, for which the next three fields have no effect. On a store that has only leases,
     0 means a lease of the manager's hold_timeout, with auto_refresh. */
  int64_t ttl;
  const char *owner; /* who holds it: 1 to HL_OWNER_MAX bytes; NULL: the application */
  bool auto_refresh; /* a thread of the manager's refreshes it thrice in its ttl */
  /* Released by hl_lock_free, hl_lock_close and hl_manager_close, too; not only by
     hl_lock_release. */
  bool auto_release;
  hl_agent *agent; /* NULL: not said, and no circle is looked for */
  /* Which of several strands (coroutines) of the agent; each promises the same for itself. 0: they
     promise nothing to each other. */
  uint64_t strand;
  bool awaited;      /* hl_start: the strand does nothing else until it is done */
  const char *where; /* the line of the program that asks, for messages; NULL: not said */
  uint64_t task;     /* for the two checks below: which coroutine of the agent; no promise */
  uint64_t kinds;    /* what hl_order_check has set; 0: it was not asked */
} hl_options;

#define HL_TTL_MAX INT64_C(315360000000) /* ten years */

#define HL_OPTIONS_INIT                                                                            \
  { sizeof(hl_options), -1, NULL, 0, 0, NULL, false, true, NULL, 0, false, NULL, 0, 0 }

#define HL_REPORT_SIZE 1024

/* For tests of a program, which calls this before each request of an agent. Learns which kinds of
   targets the agent takes while its task holds others, over the whole run of the process. A kind is
   a unit; else a level, and a label with its digits made one '#'. True: for the first time these
   orders make a circle, a deadlock that has not happened yet; the report says in one line what and
   where. Sets options->kinds. Any thread. */
bool hl_order_check(const hl_manager *manager, const hl_plan *plan, hl_options *options,
                    char report[HL_REPORT_SIZE]);

/* Checks a request against the declared order, hl_config.units. True: the agent asks for a unit
   while its task holds a later unit, by a manager that has units, too; the report says which, and
   where. first: no call of this process has said so of these two units before. A request with
   several targets takes them in an order of its own, and a request that tries once waits for
   nothing: neither breaks the declared order. Any thread. */
bool hl_units_check(const hl_manager *manager, const hl_plan *plan, const hl_options *options,
                    bool *first, char report[HL_REPORT_SIZE]);

/* Locks what plan says, or nothing. Waits as long as options allow. The plan is copied. options may
   be NULL.
   Returns HL_OK with *lock set; HL_TIMEOUT, HL_DEADLOCK, HL_CANCELLED, HL_BUSY; HL_ECONNECTION,
   HL_ENOT_PROVISIONED, HL_EUNSAFE_SERVER, HL_ESTORE, HL_EMISUSE (an empty plan, another layout),
   HL_ENOMEM; then *lock is NULL and nothing is held. A call of this function closes no circle of
   waiters. But it can stand in a circle that an hl_lock_extend has closed; then the store may pick
   it as the victim: HL_DEADLOCK. Try again. With options->agent a call that would wait for ever is
   HL_DEADLOCK, too, before it waits; see hl_agent. */
int hl_acquire(hl_manager *manager, const hl_plan *plan, const hl_options *options, hl_lock **lock,
               hl_error *error);

/* Takes more locks in the same transaction. May break the common order: so this call alone can
   close a circle of waiters. options may be NULL. HL_DEADLOCK: the store has picked this call as
   the victim, and the lock holds nothing any more. After any other failure the lock holds the rows
   that it held before. MySQL, which cannot give back single rows, may keep some of the wanted rows
   until the lock is released. */
int hl_lock_extend(hl_lock *lock, const hl_plan *plan, const hl_options *options, hl_error *error);

/* Makes exclusive what the lock has in HL_UPDATE, as soon as the sharing holders have gone. No
   other lock can become exclusive before, and newcomers wait meanwhile where the store is fair.
   HL_OK, also when the lock is exclusive already; it has a new token then. HL_TIMEOUT,
   HL_CANCELLED, and any failure beside the following: the lock is unchanged. But a lease whose
   request or answer was delayed or cut off may be exclusive at the store, until it is downgraded or
   released. HL_DEADLOCK: the lock holds nothing any more. A lock of several nodes can stand in a
   circle, if other requests share several of them. A lock on MariaDB, or on MySQL before 8.0.41,
   can, too, if a request of many nodes waits for it. HL_ELOST, HL_ERELEASED. HL_EMISUSE: the caller
   did not ask for HL_UPDATE. Only timeout and the asker of options count; NULL: the manager's. */
int hl_lock_upgrade(hl_lock *lock, const hl_options *options, hl_error *error);
/* Makes the lock HL_UPDATE again, with no moment in between in which another program could change
   its nodes; sharing holders may then come. HL_OK, also when the lock is so already; a lease with
   an upgrade or a downgrade that was not answered asks the store even then. HL_EUNSUPPORTED: the
   store gives back no single row (sessions of MySQL and MariaDB), or, on PostgreSQL, the lock was
   extended meanwhile. HL_ELOST, HL_ERELEASED, HL_EMISUSE. */
int hl_lock_downgrade(hl_lock *lock, hl_error *error);

/* Gives everything back; once. A second call returns HL_OK and does nothing.
   Without confirm it does not wait for the store's answer and never blocks.
   HL_ELOST when the lock is known to have been lost before. Another call on the lock is given up,
   and the lock is released when that call has ended: with confirm this waits for that, as long as
   the lock is surely held, and then says HL_ECONNECTION: it is not confirmed. After
   hl_manager_close: a lease without auto_release is released, by a thread without confirm. With
   confirm, a lease asks the store, and a session lock of a server is HL_ECONNECTION, as its session
   has ended without an answer. In a forked child HL_ERELEASED, and nothing happens to the parent's
   lock. */
int hl_lock_release(hl_lock *lock, bool confirm, hl_error *error);

/* The end of its scope: as hl_lock_release without confirm, but a lease without
   auto_release goes on. */
int hl_lock_close(hl_lock *lock, hl_error *error);

/* Does what hl_lock_close does, and frees the lock; never blocks. NULL is fine. */
void hl_lock_free(hl_lock *lock);

/* A lease ends ttl ms from now (0: its own ttl), sooner or later than before. HL_OK: it was
   unbroken, though its time may have been up for a while. HL_ELOST: another request has taken its
   nodes, or it was revoked or imported; or the answer came when the new time was up already.
   HL_ERELEASED; HL_EUNSUPPORTED: a session lock; HL_ECONNECTION, HL_ESTORE, HL_TIMEOUT: it was not
   refreshed, and ends when it would have ended. */
int hl_lock_refresh(hl_lock *lock, int64_t ttl, hl_error *error);
/* Makes a session lock a lease, with no moment in between in which its nodes are free. Uses ttl,
   owner, auto_refresh, auto_release and label of options. HL_OK; HL_ELOST, HL_ERELEASED; after any
   other failure the lock is unchanged. */
int hl_lock_to_lease(hl_lock *lock, const hl_options *options, hl_error *error);
/* A printable text, malloc'ed, to be freed by the caller, with which hl_import takes the lease
   over, in any process. The lease goes on; the lock is as if released. A program that has the text
   has the lease. HL_EUNSUPPORTED: a session lock. HL_ELOST, HL_ERELEASED, HL_ENOMEM. */
int hl_lock_export(hl_lock *lock, char **text, hl_error *error);
/* hl_lock_export in two steps, for a caller that must keep the text safe before the lock is as if
   released: first this gives the text alone; then call hl_lock_export with text NULL. */
int hl_lock_text(hl_lock *lock, char **text, hl_error *error);
/* Takes a lease over, with one refresh: for options' ttl (0: its own) from now. options may
   be NULL; of the others only auto_refresh and auto_release are used. The later of two imports of a
   text wins, and the earlier lock is lost. Returns HL_OK with *lock set; HL_ELOST: the
   lease is not there any more; HL_EMISMATCH: the text is damaged, or of another layout; as
   hl_acquire. */
int hl_import(hl_manager *manager, const char *text, size_t size, const hl_options *options,
              hl_lock **lock, hl_error *error);

/* Whether the lock is held as far as can be told without a round trip. */
bool hl_lock_is_held(hl_lock *lock);
/* Asks the store. HL_OK, HL_ELOST or HL_ERELEASED. */
int hl_lock_check(hl_lock *lock, hl_error *error);
/* Milliseconds for which the store keeps the lock without hearing from this
   process; HL_FOREVER where it keeps it until the process ends; 0 when it is
   not held. */
int64_t hl_lock_remaining(hl_lock *lock);

typedef enum hl_lock_state {
  HL_HELD,
  HL_RELEASED,
  HL_LOST,
  HL_IN_USE,  /* by a call that was started, and whose result is not taken */
  HL_FOREIGN, /* it belongs to the parent of this process */
  HL_OVER     /* a lease whose time is up: only hl_lock_refresh can tell whether another holder
             has had its nodes since */
} hl_lock_state;

hl_lock_state hl_lock_look(hl_lock *lock);
/* Fills in *error with why it is lost, HL_ELOST. */
void hl_lock_loss(hl_lock *lock, hl_error *error);
hl_kind hl_lock_kind(const hl_lock *lock);
hl_mode hl_lock_mode(const hl_lock *lock);
unsigned hl_lock_level(const hl_lock *lock); /* the deepest of its targets */
int64_t hl_lock_waited(const hl_lock *lock); /* ms until it was granted */
/* The fencing token: a later exclusive holder of a node has a greater one than an earlier holder.
   hl_lock_extend and hl_lock_upgrade give a new token. */
uint64_t hl_lock_token(const hl_lock *lock);
/* The plan that the lock holds, or held. Lives as long as the lock. */
const hl_plan *hl_lock_plan(const hl_lock *lock);
/* Whether hl_lock_free releases it: not a lease without auto_release. */
bool hl_lock_auto_releases(const hl_lock *lock);
/* hl_options.where, cut; "": not said. Lives as long as the lock. */
const char *hl_lock_where(const hl_lock *lock);

/* ------------------------------------------------------------ pending */

/* An acquisition that has been started and is not waited for: for programs with
   an event loop. A pending is used by one thread at a time. A thread of the library
   waits for it, unless it waits behind another request of the same manager. */
typedef struct hl_pending hl_pending;

/* Starts hl_acquire, and returns at once. HL_OK: *pending will be done, whatever the
   outcome; hl_pending_wait returns the outcome. HL_EMISUSE, HL_ENOMEM: no pending was made. */
int hl_start(hl_manager *manager, const hl_plan *plan, const hl_options *options,
             hl_pending **pending, hl_error *error);

/* Starts n acquisitions, of which the first that is granted counts: hl_pending_wait gives its lock,
   and hl_lock_plan says which plan that is. The pending waits in every queue. The first grant ends
   the other waits; a second grant that comes together with it is given back at once, and no caller
   sees it. When several plans could be granted at once, the first in the list is, where the store
   tells without blocking. HL_TIMEOUT: no plan was granted. Any other failure of a plan ends all.
   Each wait takes a connection, as hl_start does, where connections are scarce. The plans are
   copied. options, as for hl_start; with `awaited` and no strand the agent itself blocks until the
   pending is done. */
int hl_start_any(hl_manager *manager, const hl_plan *const *plans, size_t n,
                 const hl_options *options, hl_pending **pending, hl_error *error);
/* Whether a call of this manager's store may block, a try, too. */
bool hl_manager_blocks(const hl_manager *manager);

/* Start calls on a lock: hl_lock_extend, hl_lock_upgrade, hl_lock_check, hl_lock_release with
   confirm, and so on. The lock is in use until hl_pending_wait has taken the result (it returns no
   lock then), or until the call was cancelled and has ended. Meanwhile another call on the lock is
   HL_EMISUSE. Only hl_lock_release, hl_lock_start_release and hl_lock_free may be called: they give
   the started call up, which may cost the lock. hl_lock_start_release does not wait for its end,
   and is HL_ECONNECTION until then. HL_OK with *pending NULL: the call is done already, and well.
   Any other status: as that call. */
int hl_lock_start_extend(hl_lock *lock, const hl_plan *plan, const hl_options *options,
                         hl_pending **pending, hl_error *error);
int hl_lock_start_upgrade(hl_lock *lock, const hl_options *options, hl_pending **pending,
                          hl_error *error);
int hl_lock_start_downgrade(hl_lock *lock, hl_pending **pending, hl_error *error);
int hl_lock_start_check(hl_lock *lock, hl_pending **pending, hl_error *error);
int hl_lock_start_release(hl_lock *lock, hl_pending **pending, hl_error *error);
int hl_lock_start_refresh(hl_lock *lock, int64_t ttl, hl_pending **pending, hl_error *error);
int hl_lock_start_to_lease(hl_lock *lock, const hl_options *options, hl_pending **pending,
                           hl_error *error);

/* Starts hl_import. A pending that is given up leaves the lease to the programs that have the text.
   */
int hl_start_import(hl_manager *manager, const char *text, size_t size, const hl_options *options,
                    hl_pending **pending, hl_error *error);

bool hl_pending_done(hl_pending *pending);

/* A descriptor that becomes readable when the pending is done, and stays so: to be
   polled, not read, and not closed by the caller. The descriptor lives as long as the pending.
   Made at the first call. HL_ESTORE: no descriptor can be had. */
int hl_pending_fd(hl_pending *pending, hl_error *error);

/* Calls fn(tag) once, when the pending is done: in the thread that ends it, or here, when
   it is done already. fn must not block and must not call this library. The tag is a
   number, because the caller's object for it may be gone by then. */
typedef void (*hl_notify_fn)(uint64_t tag);
void hl_pending_notify(hl_pending *pending, hl_notify_fn fn, uint64_t tag);

/* Waits for timeout ms (0: not at all; HL_FOREVER) until it is done, and gives what
   hl_acquire would have returned; once. HL_TIMEOUT with hl_pending_done false:
   it is not done yet, and goes on. HL_EMISUSE: it has given its result already. */
int hl_pending_wait(hl_pending *pending, int64_t timeout, hl_lock **lock, hl_error *error);

/* Ends the wait, in the store too, and does not wait for that. The pending is done: the
   result is HL_CANCELLED, also when the lock had been granted and not yet been
   taken by hl_pending_wait; then the lock is released. */
void hl_pending_cancel(hl_pending *pending);

/* The plan to be locked; NULL once hl_pending_wait has returned the lock. Lives as long
   as the pending. */
const hl_plan *hl_pending_plan(const hl_pending *pending);

/* Calls fn for the holders that were in the way, when the pending is done with HL_TIMEOUT or
   HL_DEADLOCK. Returns the status of hl_manager_blockers at that time: after a failure there may be
   others. HL_BUSY, too, when the pending stood in line inside this process until its end, and never
   reached the store. */
int hl_pending_holders(hl_pending *pending, hl_holder_fn fn, void *context, hl_error *error);

/* Cancels if need be and frees; never blocks. NULL is fine. */
void hl_pending_free(hl_pending *pending);

#ifdef __cplusplus
}
#endif
#endif
