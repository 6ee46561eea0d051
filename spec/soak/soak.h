/*
 * soak.h - a stress test with a checker of its own. A main process starts worker
 * processes, which acquire and release at random, and disturbs them; both sides
 * meet in a shared mapping, so that what a worker wrote survives its kill -9.
 *
 *   main.c     starts workers, does the faults, prints progress and the summary
 *   worker.c   a worker: threads that acquire, extend, cancel, release
 *   history.c  decides whether what the workers wrote fits the rule
 *   server.c   an administrator's connection: provisions, kills, counts leftovers
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
 * All times are nanoseconds of CLOCK_MONOTONIC, which all processes share.
 */
#ifndef SOAK_H
#define SOAK_H

#include "hierlock.h"

#include <stdatomic.h>
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
  RECORDS = 256,  /* of each thread: called, held, or not yet read */
  MESSAGE = 256
};

typedef enum call_kind {
  CALL_ACQUIRE,
  CALL_START,
  CALL_EXTEND,
  CALL_START_EXTEND
} call_kind;

typedef enum end_kind {
  END_RELEASED,
  END_FREED,     /* hl_lock_free without release */
  END_CLOSED,    /* its manager was closed */
  END_LOST,      /* is_held said no */
  END_NO_GRANT,  /* the call failed */
  END_CANCELLED, /* by us */
  END_DIED       /* its process */
} end_kind;

typedef enum record_state { FREE, CALLED, HELD, ENDED } record_state;

/* One call and what came of it. The worker owns it until ENDED, then main does
   until FREE. */
typedef struct record {
  _Atomic int state; /* record_state */
  uint64_t handle;   /* an extension has its lock's */
  int worker, thread, manager;
  pid_t pid;
  call_kind kind;
  end_kind how;
  bool proxied;
  int64_t timeout;      /* ms */
  int64_t called;
  int64_t granted;      /* the call returned; 0: it has not, or failed */
  _Atomic int64_t held; /* the last time it was told that it holds; 0: never */
  int64_t promised;     /* until then the lock stays, as remaining() said */
  int64_t ending;       /* release (or cancel) called */
  int64_t ended;        /* and returned */
  int64_t stopped;      /* of `stopped` of its worker when it was called */
  int status;           /* of the call */
  char why[120];        /* its message */
  uint64_t token;
  int targets;
  /* By node, 0 or hl_mode: what is to be locked, ancestors included. */
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
  COUNTS
};

typedef struct worker_area {
  _Atomic pid_t pid;
  _Atomic int threads_at_rest; /* while `pause`, and they hold nothing */
  _Atomic int64_t stopped;     /* ns that it spent stopped; main's */
  _Atomic uint64_t handles;
  _Atomic uint64_t counts[COUNTS];
  record records[THREADS][RECORDS];
} worker_area;

/* What workers want changes every few seconds: some faults need many large
   requests that do not wait, others many that meet at few nodes. */
typedef enum mood { MIXED, LARGE, NARROW, MOODS } mood;

typedef struct shared_area {
  /* The run, set before the first worker starts. */
  char dsn[512], proxied_dsn[512];
  uint64_t seed;
  int workers, threads;
  bool server; /* not the embedded store */
  bool extends, forks, queries;
  int64_t hold_timeout; /* ms */

  _Atomic bool pause, stop;
  _Atomic int mood;
  /* Violations that a worker sees itself, in turn. */
  _Atomic unsigned complaints;
  char complaint[64][MESSAGE];
  /* What the proxy did. */
  _Atomic uint64_t cuts, resets, delays;
  _Atomic bool proxy_harmless;
  _Atomic int64_t partition; /* connections from before are cut */

  worker_area worker[WORKERS];
} shared_area;

extern shared_area *shared;

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
static inline int roll_below(dice *self, int n) {
  return (int)((roll(self) >> 33) % (uint64_t)n);
}

static inline bool roll_percent(dice *self, int percent) {
  return roll_below(self, 100) < percent;
}

static inline dice dice_of(uint64_t seed, uint64_t which) {
  dice self = {seed * UINT64_C(0x9E3779B97F4A7C15) + which + 1};
  for (int i = 0; i < 8; i++) (void)roll(&self);
  return self;
}

void complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---------------------------------------------------------------- worker.c */

/* Of a process of its own. */
int worker_main(int worker, uint64_t round);
/* Takes and releases every user in turn, each within a time; 0: it could. */
int probe_main(void);

/* --------------------------------------------------------------- history.c */

/* Reads what has ended, and looks at all that can still matter. */
void history_sweep(int64_t now);
/* A worker has ended: what it held and called ends now. */
void history_died(int worker, int64_t now);
/* Whether its workers can lose their locks, or be slow, by what is done. */
void history_expect(bool faults, bool kills);

extern unsigned violations;
extern int64_t longest_wait, latest_timeout, longest_overlap;
extern uint64_t grants_checked;

/* Prints "VIOLATION n: ..." and counts. */
void violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Seconds since the program began. */
double seconds_at(int64_t when);
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---------------------------------------------------------------- server.c */

int server_open(const char *dsn);
void server_provision(void);
/* Ends a random connection of the workers, or its statement; false: none. */
bool server_kill(dice *dice, bool query);
/* Transactions that hold rows of ours, connections of ours. */
int server_transactions(void);
int server_connections(void);
void server_show(void);

/* ----------------------------------------------------------------- proxy.c */

/* Of a process of its own: listens on the descriptor, in front of a port of this
   machine. */
int proxy_main(int listener, int port, uint64_t seed);

#endif
