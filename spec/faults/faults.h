/*
 * faults.h - a fault at every system call. A client goes through a script that uses
 * each function of a lock's life, under ptrace. A run without a fault counts its system
 * calls; each further run does one thing at one of them:
 *
 *   kill   kill -9, before the call is made or after it
 *   stop   the client stands still there; where there is a server, for longer than hold_timeout
 *   fail   the call is not made, and says ENOMEM, EMFILE, ECONNRESET, as it could
 *
 * Meanwhile and afterwards a peer, which nobody traces, wants the same nodes.
 *
 *   main.c     the points, the lanes that do them side by side, the summary
 *   lane.c     one lane: starts a client, does the fault, judges what came of it
 *   tracer.c   ptrace: stops at a call, changes what it says
 *   client.c   the script
 *   peer.c     the peer, and what is left behind in the directory or at the server
 *   server.c   an administrator's connection to the server; its library and statements: spec/servers
 *
 * What it counts. A holder asks hl_lock_is_held again and again. When the answer is yes, it
 * notes the time at which it *began* to ask. So each holding is an interval from its grant to
 * the last such moment. Two conflicting ones of client and peer that overlap are two holders at
 * once, whatever was killed, stopped or failed. A result of remaining() is a promise until a
 * time; it must not be broken either.
 *
 * A point is named by the stage of the script and the number of the call in it, as
 * the threads of a client do not always come in the same order. So a name may mean
 * another call in the next run, and now and then none; such are counted.
 *
 * All times are nanoseconds of CLOCK_MONOTONIC, which all processes share.
 */
#ifndef FAULTS_H
#define FAULTS_H

#include "hierlock.h"

#include <stdatomic.h>
#include <sys/types.h>
#include <time.h>

/* ------------------------------------------------------------------ points */

typedef enum mode { KILL, STOP, FAIL, MODES } mode;

/* The stages of the script; the code between stages counts no calls. */
typedef enum stage {
  BETWEEN,
  OPEN,
  ACQUIRE,
  HOLD,
  CHECK,
  EXTEND,
  HOLD_BOTH,
  LOOK,
  RELEASE,
  WAIT,
  CONFIRM,
  START,
  CANCEL,
  AGAIN,
  LAST,
  CLOSE,
  STAGES
} stage;

typedef struct point {
  mode mode;
  stage stage;
  int number;  /* from 1, in its stage */
  bool after;  /* the call was made */
  int failure; /* FAIL: errno */
  int variant; /* 0, 1: an old or a new directory; without or with TLS */
  int turn;    /* main's, for their order */
  uint64_t random;
} point;

/* "stop:acquire.12:exit:0", "fail:open.3:EMFILE:1" */
const char *point_show(const point *p, char out[64]);

/* ------------------------------------------------------------ shared memory */

enum { LANES = 16, CALLS = 600, GRANTS = 65536, HANDLES = 16, COMPLAINTS = 24, MESSAGE = 400 };

/* Nodes, as bits: resources of one account, which is in the user. A holder of one of the last
   two has all. */
enum { R1 = 1, R2 = 2, R3 = 4, ACCOUNT = 8, USER = 16, ALL = 31 };

static inline bool nodes_conflict(int a, int b) { return (a & b) || ((a | b) & (ACCOUNT | USER)); }

/* A lock of the client or the peer. Written by its holder. */
typedef struct holding {
  int nodes;
  uint64_t token;
  int64_t asked, granted;
  _Atomic int64_t held; /* the last time at which it was told that it holds */
  int64_t promised;     /* until then it stays, as remaining() said */
  int64_t ending;       /* release called, or the loss known; 0: not yet */
} holding;

/* Orders for the peer. */
typedef enum order {
  REST, /* hold nothing, have nothing open; then report the leftovers */
  BUSY, /* be in the client's way at R3, as the script wants it */
  GRAB, /* get everything, however long it takes; then as RACE */
  RACE, /* get one node after the other, each for a moment, if it can be had soon */
  QUIT,
  ORDERS
} order;

typedef struct lane_area {
  /* ORDERS * n + the n-th order; and which one the peer has come to, REST: and done. */
  _Atomic unsigned order, obeyed;
  _Atomic pid_t peer; /* 0: it has ended */

  /* From here on new in each run. */
  char dsn[512], directory[256]; /* of this run; the directory of the embedded store */
  bool fresh;                    /* the client is to be the first in the directory */
  bool dirty;           /* a client that was killed, or cannot remove it, leaves a temporary file */
  int64_t hold_timeout; /* ms; the client's */

  /* The client's. */
  _Atomic int stage;
  _Atomic bool opened;
  _Atomic int handles;
  holding handle[HANDLES];
  int failed[STAGES]; /* calls that did not succeed */

  /* The lane's. */
  _Atomic bool disturbed; /* the fault has been done, or begins now */
  _Atomic bool frozen;    /* and the client stands still */
  mode mode;
  int failure; /* errno of FAIL */

  /* The peer's. */
  _Atomic bool busy; /* it holds R3 */
  _Atomic bool asks; /* for everything */
  _Atomic int64_t grabbed,
      grabbed_at;          /* when it last asked for everything that it got, and got it */
  _Atomic unsigned rounds; /* it wanted each node once more */
  _Atomic int grants;
  holding grant[GRANTS];

  _Atomic int complaints;
  char complaint[COMPLAINTS][MESSAGE];
} lane_area;

/* Shared by all lanes; main owns it. */
typedef struct shared_area {
  bool server; /* MySQL, MariaDB, PostgreSQL: an administrator looks what is left there */
  bool leases; /* SQLite, Redis, Memcached, a quorum: a lock is a lease, and the holder renews it */
  bool with_leases; /* on another store: the client makes its first lock a lease */
  /* The store gives a client's locks away when it does not hear from it for hold_timeout, wherever it stands still. A
     client of SQLite that stands inside a transaction keeps all others out. */
  bool silence_ends;
  pid_t pid; /* of the main process */
  /* How the lanes' directories, or DSNs, begin: of a server with sessions without a database. */
  char base[512];
  char options[2][96]; /* of the server's DSN, by variant */
  char user[64];       /* of the clients */
  uint64_t seed;
  int lanes;
  int64_t end; /* 0: when all points are done */
  _Atomic unsigned done[MODES], missed, violations;
  _Atomic int64_t worst[MODES]; /* until the peer had everything */
  char worst_at[MODES][64];
  lane_area lane[LANES];
} shared_area;

extern shared_area *shared;

static inline int64_t now_ns(void) {
  struct timespec t;
  (void)clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#define MS INT64_C(1000000)
#define S (1000 * MS)

/* How long the peer may need for everything once no client has it or may have it. This is much
   longer than measured, as a loaded machine may keep a thread from running for ten seconds, and
   shorter than the hold_timeout of killed clients. That is no longer than it must be, as some clients
   wait so long for the answer to what they could not send. */
#define SOON (30 * S)
#define HOLD_TIMEOUT_MS 45000
#define SHORT_HOLD_TIMEOUT_MS 1000
/* A lease stays for so long when its holder is killed, or its release fails. */
#define LEASE_MS 2000
#define LONG_LEASE_MS 10000

/* Reports an error of the present run, from any process of the lane. */
void complain(lane_area *area, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ------------------------------------------------------------------- lane.c */

/* The system calls of an undisturbed run, by stage. */
typedef struct census {
  int count[STAGES];
  long call[STAGES][CALLS];
  const int *failures[STAGES][CALLS]; /* errnos, 0 at the end */
} census;

void lane_open(int lane, const char *admin);
/* Runs a lane once. p is NULL: without a fault, and counted. */
void lane_run(const point *p, int variant, census *found);
void lane_close(void);
/* Complains that the peer has ended; the caller has waited for it. */
void peer_ended(lane_area *area, int status);

/* ----------------------------------------------------------------- tracer.c */

typedef enum trace_event { TRACE_POINT, TRACE_END, TRACE_LATE } trace_event;

typedef struct tracer {
  lane_area *area;
  pid_t pid, at;      /* of the client; the thread that has come to the point */
  const point *point; /* NULL: none */
  census *found;      /* NULL: not wanted */
  int count[STAGES];
  bool passed;                 /* the point: nothing is counted any more */
  pid_t leaving;               /* the thread whose return is the point, or is changed */
  int failure;                 /* its changed result; 0: the real one */
  unsigned long long argument; /* of brk */
  int status;                  /* at the end */
  long call, last[STAGES];     /* at the point, of each stage; for messages */
} tracer;

/* Forks a client that is traced from its first stage on. */
void trace_start(tracer *self, lane_area *area, const point *p, census *found);
/* Until the point, the end of the client, or the deadline. At the point all stands still. */
trace_event trace_run(tracer *self, int64_t deadline);
/* Goes on after a point; without stops, as nothing is counted any more. */
void trace_continue(tracer *self);
/* Lets go of a client that hangs, so that a debugger can trace it. */
void trace_detach(tracer *self);
const char *call_name(long call, char out[32]);

/* ----------------------------------------------- client.c, peer.c, server.c */

_Noreturn void client_main(lane_area *area);
_Noreturn void peer_main(lane_area *area, int lane, const char *admin);

hl_manager *manager_open(const lane_area *area, int64_t hold_timeout, int *status, hl_error *error);
hl_plan *plan_make(hl_manager *manager, int nodes);

void server_connect(const char *admin);
/* Makes a lane's database, and removes it; each by a connection of its own. */
void server_provision(const char *admin, int lane);
void server_remove(int lane);
/* Connections to the lane's database; or of transactions with locks, of all. */
int server_connections(int lane);
int server_transactions(void);

enum { BUCKETS = 997 };
#define TABLE "hierlock_faults" /* where there is a table of buckets */
/* The numbers are of the main process and the lane. */
#define DATABASE "hierlock_faults_%d_%d"

#endif
