/*
 * soak.h - a stress test with a checker of its own. A main process starts worker processes, which
 * acquire and release at random, and disturbs them. Both sides meet in a shared mapping, so that a
 * worker's records survive its kill -9.
 *
 *   main.c     starts workers, does the small faults, prints progress and the summary
 *   faults.c   the large faults, what is expected of each, what was measured
 *   fault_*.c  the process that does one: see fault.h
 *   clock.c    is preloaded into workers: a wall clock that jumps
 *   worker.c   a worker: threads that acquire, extend, cancel, release
 *   lease.c    what its threads do with leases: see worker.h
 *   lua/       a worker in Lua: coroutines that do the same, through the binding
 *   area.c     what all of them use of the shared mapping
 *   history.c  decides whether what the workers wrote fits the rule
 *   leasing.c  the same, of leases
 *   classic.c  a counter and a set, changed under the lock
 *   report.c   draws what happened, for people
 *   server.c   an administrator's connection: provisions, kills, counts leftovers; which
 *              statements that takes, and which library, is a matter of spec/servers
 *   proxy.c    a TCP proxy that delays, cuts and resets
 *
 * The checker knows of hierlock only what docs promise: it computes from the
 * targets which nodes a call holds, and in which mode, and compares times.
 *
 * What it counts. A holder asks hl_lock_is_held again and again. When the answer
 * is yes, it notes the time at which it *began* to ask: at that moment it held, as
 * far as it was told. So each holding is an interval from its grant to the last such
 * moment. Two conflicting intervals of two handles that overlap are two holders at
 * once, whatever was killed, stopped or cut. The death of a process needs no care: it
 * asks no more.
 *
 * Leases beside sessions. A lease has one handle number as long as its record lives, through all
 * holders that import it. More is known of it than its holder believes:
 *
 *   held       as of a session
 *   sure       a refresh, check or release that was called then said that the lease is unbroken:
 *              no other had any of its nodes from its grant to that call, also while its
 *              time was up, or no holder had it between an export and an import
 *   promised   remaining() said that the store keeps it until then, whether or not its holder
 *              lives. REMAINING_NS before: remaining() counts whole milliseconds
 *
 * The interval of a lease ends at the latest of these, and it begins at its grant, however often it
 * was exported since. Two acts end belief without the believer: another process revokes the lease, or
 * imports it. The holder is told at its next call. `held` and `promised` do not count from the call of
 * such an act on (`cut`): that is counted apart. But `sure` counts: a holder that is told after a
 * revocation that its lease is unbroken is a violation.
 *
 * All times are nanoseconds of CLOCK_MONOTONIC, which all processes share.
 */
#ifndef SOAK_H
#define SOAK_H

#include "hierlock.h"

#include <stdatomic.h>
#include <stdio.h>
#include <sys/types.h>
#include <time.h>

/* ---------------------------------------------------------------- the tree */

enum {
  USERS = 6,
  ACCOUNTS = 4,   /* of each user */
  RESOURCES = 40, /* of each account */
  FIRST_ACCOUNT = USERS,
  FIRST_RESOURCE = FIRST_ACCOUNT + USERS * ACCOUNTS,
  NODES = FIRST_RESOURCE + USERS * ACCOUNTS * RESOURCES,
  BUCKETS = 4096 /* so few that some nodes share one */
};

/* The servers' table of locks, where they have one. */
#define SOAK_TABLE "hierlock_soak"

/* A node's name, "u1/a2/r3"; its number of levels and ids. */
typedef struct node_name {
  char text[3][8];
  hl_id ids[3];
  unsigned n;
} node_name;

void node_ids(int node, node_name *name);
const char *node_show(int node, char out[32]);
int node_parent(int node); /* -1 of a user */

/* -------------------------------------------------- what workers write down */

enum {
  WORKERS = 8,   /* at most */
  THREADS = 8,   /* of each worker, at most */
  RECORDS = 256, /* of each thread: called, held, or not yet read */
  MESSAGE = 256
};

typedef enum call_kind {
  CALL_ACQUIRE,
  CALL_START,
  CALL_EXTEND,
  CALL_START_EXTEND,
  CALL_IMPORT,
  CALL_REVOKE /* not of a lock: `filter` names the leases that it revokes */
} call_kind;

typedef enum end_kind {
  END_RELEASED,
  END_FREED,     /* hl_lock_free without release */
  END_CLOSED,    /* its manager was closed */
  END_LOST,      /* is_held said no */
  END_NO_GRANT,  /* the call failed */
  END_CANCELLED, /* by us */
  END_DIED,      /* its process */
  /* Leases only: they go on until their time is up. */
  END_EXPORTED,
  END_LEFT /* without auto_release; or it is unknown whether the release came through */
} end_kind;

/* Says what a revocation names. */
typedef enum revoke_filter { BY_OWNER, BY_ID, BY_TARGET, FILTERS } revoke_filter;

typedef enum record_state { FREE, CALLED, HELD, ENDED } record_state;

/* A call and its outcome. The worker owns it until ENDED, then main does until FREE. */
typedef struct record {
  _Atomic int state; /* record_state */
  uint64_t handle;   /* an extension has its lock's */
  int worker, thread, manager;
  pid_t pid;
  call_kind kind;
  end_kind how;
  bool proxied;
  int64_t timeout; /* ms */
  int64_t called;
  int64_t
      asked; /* of a pending: the last time it was not done; a thread that waits for something else asks late. Or 0 */
  int64_t granted;      /* the call returned; 0: it has not, or failed */
  _Atomic int64_t held; /* the last time it was told that it holds; 0: never */
  int64_t promised;     /* until then the lock stays, as remaining() said */
  int64_t ending;       /* release (or cancel) called */
  int64_t ended;        /* and returned */
  int64_t stopped;      /* of `stopped` of its worker when it was called */
  int status;           /* of the call */
  char why[120];        /* its message */
  uint64_t token;
  uint64_t before; /* the token that an extend found; 0: none */
  int targets;

  /* ---- of a lease, or of what became one */
  bool lease;
  bool refreshes, stays; /* auto_refresh; not auto_release */
  int owner;             /* its number; of a CALL_REVOKE: whose */
  int64_t since;         /* its grant, by whichever handle; 0: `granted` */
  int64_t leased;        /* a lease since that call; 0: it was called as one */
  int parts; /* more than 1: so many records belong to one lease, which was extended as a session */
  int64_t ttl_most;        /* ms: the longest that it was ever asked for */
  _Atomic int64_t sure;    /* see above; 0: never */
  _Atomic int64_t yields;  /* from then on its holder itself may end it; 0: not yet */
  _Atomic int64_t expires; /* in the store, at the latest; 0: a refresh may be under way */
  int64_t asked_ttl;       /* ms: of the refresh or import that was told of the loss; 0: none was */
  int64_t lost_at;         /* when the call that was told of it began */
  uint64_t revocation;     /* that it was told of; its own number of a CALL_REVOKE; or 0 */
  int64_t cut;             /* the checker's: see above; INT64_MAX: not */
  /* ---- a CALL_REVOKE's; by id `handle` is the lease's */
  revoke_filter filter;
  uint64_t revoked; /* how many */
  /* By node, 0 or hl_mode: the nodes to be locked, ancestors included. */
  unsigned char modes[NODES];
} record;

enum {
  COUNT_CALLS,
  COUNT_GRANTS,
  COUNT_WAITS,
  COUNT_TIMEOUTS,
  COUNT_CANCELS,
  COUNT_EXTENDS,
  COUNT_DEADLOCKS,
  COUNT_BUSY,
  COUNT_LOST,
  COUNT_FAILED, /* the connection did */
  COUNT_SAMPLES,
  COUNT_FORKS,
  COUNT_OPENS,
  COUNT_UPDATES, /* in memory */
  COUNT_ROWS,    /* in the table */
  COUNT_REFUSED, /* there, by a greater token */
  COUNT_LEASES,
  COUNT_CONVERTED, /* to_lease */
  COUNT_REFRESHES,
  COUNT_RESTORED, /* of them, after its time was up */
  COUNT_OVER,     /* the time was up, and is_held said so */
  COUNT_EXPORTS,
  COUNT_IMPORTS,
  COUNT_REVOKES, /* that found any */
  COUNT_TOLD,    /* holders that were told who revoked their lease */
  COUNT_LEFT,    /* to their time */
  COUNTS
};

typedef struct worker_area {
  _Atomic pid_t pid;
  _Atomic bool attached;       /* the process of that number has this area */
  _Atomic int64_t granted_at;  /* its last grant */
  _Atomic int threads_at_rest; /* while `pause`, and they hold nothing */
  _Atomic int64_t stopped;     /* ns that it spent stopped; main's */
  _Atomic uint64_t handles;
  _Atomic uint64_t counts[COUNTS];
  record records[THREADS][RECORDS];
} worker_area;

/* A counter and a set of 64 elements of a node, and what all updates that are known make of
   them: see classic.c. A row of the table has only the latter. */
typedef struct cell {
  volatile uint64_t counter, set; /* read and written under the lock, and not atomic */
  _Atomic uint64_t updates, elements, unknown;
} cell;

/* Texts of exported leases, for any thread that takes one. */
enum { TEXTS = 24, TEXT_MOST = 12 * 1024, OWNERS = 60, TTL_MOST = 3000 };

typedef struct text_slot {
  _Atomic int busy; /* 1 + the worker who is at it; main frees a dead one's */
  bool there;
  char text[TEXT_MOST];
  uint64_t handle, token;
  int owner, targets;
  int64_t since, promised, put; /* by the exporter; put: when */
  int64_t ttl, ttl_most;        /* ms: its own; the longest that it was ever asked for */
  unsigned char modes[NODES];
} text_slot;

/* The workers' wishes change every few seconds: some faults need many large requests that do not
   wait, others many that meet at few nodes. */
typedef enum mood { MIXED, LARGE, NARROW, MOODS } mood;

/* ------------------------------------------------------------- the large faults */

typedef enum large_fault {
  CRASH,      /* kill -9 of the server, and a start */
  STOPSERVER, /* SIGSTOP and SIGCONT of the server */
  READONLY,   /* the server takes no writes for a while */
  ALTER,      /* what an administrator does to the table of locks, rights, settings */
  FULL,       /* no connection is left, or no room for a lock */
  HOSTILE,    /* another program changes the lock directory and its files */
  DISK,       /* the file system is full */
  LIMITS,     /* a worker gets no more descriptors or memory */
  FAULTS
} large_fault;

enum { WINDOWS = 64 };

/* The time of one large fault; one at a time. Its process writes all but the last two fields.
   Times are 0 as long as they have not come. */
typedef struct fault_window {
  int kind; /* large_fault */
  int who;  /* the worker that it is done to; -1: all */
  _Atomic int64_t began;
  _Atomic int64_t lost;        /* earlier holders hold nothing any more; */
  _Atomic int64_t before;      /* but only if it was granted before this, if this is not 0 */
  _Atomic int64_t shut;        /* from then on nothing is granted, */
  _Atomic int64_t opened;      /* until then, */
  _Atomic bool extends;        /* but by an extend */
  _Atomic bool new_tokens;     /* those after `lost` do not follow those before */
  _Atomic bool may_end;        /* a worker may die of it */
  _Atomic unsigned may;        /* STATUS_BIT (spec/servers): what a call may come to by it */
  _Atomic unsigned leases_may; /* and a call on a lease */
  _Atomic int64_t ended;
  char what[32];
} fault_window;

typedef struct shared_area {
  /* The run, set before the first worker starts. */
  char dsn[512], proxied_dsn[512], admin_dsn[512], control[512];
  char rows_table[160];
  uint64_t seed;
  int workers, threads;
  bool server;        /* not the embedded store */
  bool buckets;       /* nodes may share one */
  bool tokens_repeat; /* some, when a process of the server crashes: docs/locking.md */
  bool disk;          /* the embedded store has a file system of its own */
  bool clock_jumps;
  bool has_lua; /* the last worker is Lua's */
  bool extends, forks, queries;
  bool leases; /* the space has them, and workers use them beside sessions */
  int64_t
      lingers; /* ns: so much later than its holder others see the end of a lease, at most; the store has deleted it then (Memcached) */
  bool leases_only; /* SQLite, Redis, Memcached, a quorum: no sessions, no administrator; a thread
                      gives back unconfirmed releases */
  int64_t hold_timeout; /* ms */

  _Atomic bool pause, stop;
  _Atomic int mood;
  /* Violations that a worker sees itself, in turn. */
  _Atomic unsigned complaints;
  char complaint[64][MESSAGE];
  /* Counts of the proxy's acts. */
  _Atomic uint64_t cuts, resets, halves, delays;
  _Atomic bool proxy_harmless;
  _Atomic int64_t partition; /* connections from before are cut */
  _Atomic int64_t crashed;   /* connections from before are dead, cut or not */

  _Atomic unsigned window_count;
  unsigned ways[FAULTS];         /* in which they were done so far; of the process that does one */
  fault_window windows[WINDOWS]; /* the last ones, in turn */

  cell cells[NODES], rows[NODES];
  text_slot texts[TEXTS];
  worker_area worker[WORKERS];
} shared_area;

extern shared_area *shared;
bool area_attach(const char *name);

static inline int64_t now_ns(void) {
  struct timespec t;
  (void)clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#define MS INT64_C(1000000)
#define S (1000 * MS)

/* xorshift64*: small, and the same everywhere. */
typedef struct dice {
  uint64_t state;
} dice;

static inline uint64_t roll(dice *self) {
  self->state ^= self->state >> 12;
  self->state ^= self->state << 25;
  self->state ^= self->state >> 27;
  return self->state * UINT64_C(2685821657736338717);
}

/* 0 <= result < n */
static inline int roll_below(dice *self, int n) { return (int)((roll(self) >> 33) % (uint64_t)n); }

static inline bool roll_percent(dice *self, int percent) { return roll_below(self, 100) < percent; }

static inline dice dice_of(uint64_t seed, uint64_t which) {
  dice self = {seed * UINT64_C(0x9E3779B97F4A7C15) + which + 1};
  for (int i = 0; i < 8; i++) (void)roll(&self);
  return self;
}

void complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ------------------------------------------------------------------- area.c */

/* All that a call has not written yet is as if it was never asked. The state is left. */
void record_clear(record *r);
/* The record's time as a lease counts from now on. */
void record_leases(record *r, int64_t ttl, int owner, bool refreshes, bool stays);
/* The holder itself may end it from now on, or from before. */
void record_yields(record *r);
/* The revocation that ended a lease, in the words of `by`; 0: none of ours. */
uint64_t revocation_of(const char *by);

/* An update in memory: the read, the write, and, when it was held before and after, that it counts. */
typedef struct cell_change {
  int node;
  uint64_t element, counter, set;
} cell_change;
void cell_read(int node, int element, cell_change *change);
void cell_write(const cell_change *change);
void cell_confirm(const cell_change *change);
/* Whether it lasted, with an echo after its end, into the time between these two. */
bool fault_meets(const fault_window *w, int64_t from, int64_t to, int64_t echo);
/* The number of the first large fault that can still matter. */
unsigned fault_first(void);
/* In a worker: whether a large fault allows a call begun then to end so. */
bool fault_allows(int status, int64_t called);
/* Likewise for a call on a lease. */
bool fault_allows_lease(int status, int64_t called);
/* Whether an administrator has ended the statement. */
bool killed_query(unsigned number, const char *message);

/* ------------------------------------------------------------------ main.c */

/* This program again, in a role. */
pid_t process_start(const char *role, long a, uint64_t b);

/* ---------------------------------------------------------------- faults.c */

/* Adds a fault by its name; false: no such fault. */
bool fault_add(const char *name, bool all);
bool faults_any(void);
/* In main, again and again: begins one when it is time. */
void faults_turn(dice *dice, bool begin);
/* Nothing is under way, and all workers have been served since. */
bool faults_settled(void);
/* An ended process of ours; whether it was the fault's. */
bool faults_reap(pid_t pid, int status);
/* Checks that the outcome of a call that has ended is as it should be. */
void faults_check(const record *r);
/* Whether a session was granted in a directory that had gone a moment before: see docs/embedded.md. Such
   a holding is none. */
bool faults_unseen(const record *r);
/* A call that lasted from .. to may have been kept waiting by one. */
bool faults_excuse(int64_t from, int64_t to);
/* When leases that were there between these two may have been lost with their files; INT64_MAX: never. */
int64_t faults_cut(int64_t from, int64_t to);
/* Whether there was one then, or shortly before. */
bool faults_meet(int64_t from, int64_t to);
/* Whether a fault may tell a holder so, though its lock was not taken. */
bool faults_lose_leases(int64_t from, int64_t to);
/* Between these two, tokens may have begun anew. */
bool faults_new_tokens(int64_t from, int64_t to);
/* Whether a worker may end so. */
bool faults_may_end(int status);
void faults_summary(FILE *to);
/* Does the fault, in a process of its own. */
int fault_main(int kind, uint64_t seed);

/* ---------------------------------------------------------------- worker.c */

/* Runs a worker, in a process of its own. */
int worker_main(int worker, uint64_t round);
/* Takes and releases every user in turn, each within so many ms; 0: it could. */
int probe_main(int64_t timeout);

/* --------------------------------------------------------------- history.c */

/* Reads the records that have ended, and checks all that can still matter. */
void history_sweep(int64_t now);
/* A worker has ended: its locks and calls end now. */
void history_died(int worker, int64_t now);
/* Whether the run's faults can lose locks of its workers, or make them slow. */
void history_expect(bool faults, bool kills);
/* Main slept longer than it wanted to, by so much. */
void history_late(int64_t by, int64_t now);
/* Stretches the time for this machine, as busy as it is. */
int64_t patience(int64_t time);

extern unsigned violations;
extern int64_t longest_wait, latest_timeout, longest_overlap;
extern uint64_t grants_checked;
/* Figures of leases: how many were believed after a revocation or an import, and for how long at
   most; how long after a lease's end a waiter was granted; how many ended by their time with a
   promise to a holder dead or gone. */
extern uint64_t cut_believed, promises_checked, delays_checked, losses_checked;
extern int64_t longest_cut, longest_delay;

/* Prints "VIOLATION n: ..." and counts. */
void violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Whether one of them had to wait for the other. */
bool history_in_the_way(const record *a, const record *b);
const char *history_kind(const record *r);
const char *history_end(const record *r);
/* Seconds since the program began. */
double seconds_at(int64_t when);
void show_record(const char *name, const record *r);
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* --------------------------------------------------------------- classic.c */

/* An update in the table. 1: done; 0: refused, by a greater token; -1: not known. */
int row_update(int node, uint64_t token, int element, int pause_us);
/* Ends what this thread has at the server. */
void classic_close(void);
/* While all rest: whether any was lost. */
void classic_check(void);
/* The contents of a row; returns whether all updates of it are known. */
bool row_seen(int node, uint64_t counter, uint64_t set);
void row_begun_again(int node);

/* ---------------------------------------------------------------- report.c */

/* Something was done, to a worker or (-1) to all: marked on the axes. The name is a
   literal. A moment when `to` is not after `from`. */
void report_fault(const char *what, int worker, int64_t from, int64_t to);
/* Takes a record that has ended. */
void report_record(const record *r);
/* A violation, and then up to two records that it is about, of a node (or -1). */
void report_violation(const char *text);
void report_about(const char *name, const record *r, int node, const char *text);
/* Again and again. Writes the file, if there is a path and a new violation. */
void report_turn(int64_t now, const char *path);
/* The summary is a text; NULL while the run goes on. 0: it could. */
int report_write(const char *path, const char *summary);

/* ---------------------------------------------------------------- server.c */

int server_open(void);
/* After it was killed: false, not yet. */
bool server_open_again(void);
/* How many connections of others, which do nothing, have ended. */
int server_bystanders_lost(void);
void server_restore(void); /* its settings */
void server_provision(void);
/* Ends a random connection of the workers, or its statement; false: none. */
bool server_kill(dice *dice, bool query);
/* Transactions that hold rows of ours, connections of ours. */
/* Shows classic.c what stands in its rows. Rows that it is not sure of begin anew, with a fence
   that keeps out every holder that has written its token there. */
void server_rows(void);
int server_transactions(void);
int server_connections(void);
void server_show(void);

/* ----------------------------------------------------------------- proxy.c */

/* Runs the proxy, in a process of its own: listens on the descriptor, in front of a port of this
   machine. */
int proxy_main(int listener, int port, uint64_t seed);

#endif
