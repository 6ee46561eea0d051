/*
 * stress.c - leases and session locks of many processes at random, and a checker of its own.
 *
 *   stress DSN [--seconds=N] [--seed=N] [--processes=N] [--threads=N]
 *          [--hurry] [--control=COMMAND | --fails-over]
 *
 * On a store that has leases. --hurry: workers seldom sleep while they hold a lock, there are more users, and processes are
 * killed and stopped twenty times as often, which a store without a server can bear. COMMAND starts and stops its server (spec/support/servers.sh
 * control); without it the server is left alone. --fails-over: the caller does something to the
 * servers, as spec/redis_cluster_spec.lua and spec/redis_sentinel_spec.lua do, which run this.
 *
 * Processes, each with threads that share a manager, acquire one node or two, upgrade and downgrade update locks, refresh (often in the last moment,
 * sometimes too late), sleep beyond their time, hand over, convert, revoke and forget. They are
 * stopped (also beyond the time of their locks) and killed anywhere; their connections are cut.
 * The server is stopped for a moment. Redis is also killed and started again: with an odd seed
 * it keeps its data, with an even one it has lost them, and grants nothing until its former
 * grants are over. Memcached, which promises nothing after that, is not.
 *
 * Each thread notes its results in a shared mapping: from when to when it held which lock, with
 * which token. An interval begins when the call that granted it, or a refresh, has returned. It
 * lasts to the last moment at which the process *began* to ask whether it still held it, and the
 * answer was yes. A holder whose lease is revoked cannot know: the revoker cuts the holder's
 * intervals, before it revokes; so does an importer.
 *
 * In the end the checker goes through all intervals. The checker knows of hierlock only the
 * rule: who holds a path exclusively, or for update, holds all above it shared; who holds a path
 * shared, and was told so, shares all below it. Two intervals that conflict and overlap, of two holders, are two holders at once. And
 * of two exclusive ones of a path the later has the greater token. In the end, when all have
 * gone, everything can be had.
 */
#include "hierlock.h"

#include "stacks.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* A lease of so long is held through a restart of the server, perhaps; ms. */
#define OUTLIVES_MS 500

enum {
  USERS_MAX = 16,
  ACCOUNTS = 2,
  RESOURCES = 2,
  WORKERS_MAX = 64, /* threads of all processes */
  NOTES = 120000,
  NODES = 2, /* in a call */
  TEXTS = 4,
  TEXT_SIZE = 512,
  HOLDERS = 1 << 22
};

/* Beyond the longest ttl, hold_timeout included, on any store; ms. */
#define LEFT_MS 20000
/* A process hangs that has not ended so long after it was told to; ms. */
#define HANG_MS 120000
/* In a store of leases only, a killed process keeps a lock without a ttl for so long; ms. */
#define HOLD_MS 1000

/* What a call locks: nodes, all in one mode. */
typedef struct locked {
  int8_t n, mode;        /* hl_mode */
  int8_t path[NODES][3]; /* -1: not so deep */
} locked;

/* The results that a worker was told. Written by it alone. */
typedef struct note {
  int64_t from, to; /* ns */
  uint64_t token;
  uint64_t holder; /* the same as long as one handle has it */
  locked nodes;
} note;

typedef struct text {
  atomic_int busy;
  char text[TEXT_SIZE]; /* "" : none */
  uint64_t holder;
  locked nodes;
} text;

static struct shared {
  atomic_int stop;
  atomic_int used[WORKERS_MAX];
  _Atomic uint64_t grants[2], waits, refreshes, late, restored, lost, revoked, imports, converted,
      upgraded, kills, stops, cuts_made, freezes, restarts, connections, holders, failures;
  _Atomic int64_t granted_at, longest_gap; /* ns: without any grant */
  text texts[TEXTS];
  _Atomic int64_t cuts[HOLDERS];   /* when it was taken away, or 0 */
  _Atomic uint64_t heirs[HOLDERS]; /* who has imported it next, or 0 */
  note notes[WORKERS_MAX][NOTES];
} * shared;

static const char *dsn, *control;
static bool fails_over, hurry;
static int users = 2;
extern const struct hl_store_ops STRESS_OTHER; /* another maker's, as of examples/store */
static const struct hl_store_ops *const stores[] = {
#ifdef STRESS_MYSQL
    &hl_store_mysql,
#endif
#ifdef STRESS_POSTGRESQL
    &hl_store_postgresql,
#endif
#ifdef STRESS_REDIS
    &hl_store_redis,
#endif
#ifdef STRESS_SQLITE
    &hl_store_sqlite,
#endif
#ifdef STRESS_MEMCACHED
    &hl_store_memcached,
#endif
    &STRESS_OTHER,        NULL};
static _Thread_local int self; /* which worker */
static int processes = 8, threads = 1;

static bool is_store(const char *name) {
  size_t n = strlen(name);
  return strncmp(dsn, name, n) == 0 && dsn[n] == ':';
}

static bool is_other(void) { return strncmp(dsn, "store+", 6) == 0; }

/* In these stores a lock without a ttl is a lease, too, of hold_timeout. */
static bool leases_only(void) {
  return is_store("sqlite") || is_store("redis") || is_store("redis+sentinel") ||
         is_store("memcached") || is_store("quorum") || is_other();
}

/* Whether it has connections, which are cut. */
static bool has_server(void) { return !is_store("file") && !is_store("sqlite") && !is_other(); }

static _Thread_local uint64_t random_state;

static uint64_t any(uint64_t below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state % below;
}

static int64_t now(void) {
  struct timespec t;
  (void)clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void sleep_us(uint64_t us) {
  struct timespec t = {.tv_sec = (time_t)(us / 1000000), .tv_nsec = (long)(us % 1000000 * 1000)};
  (void)nanosleep(&t, NULL);
}

/* As a holder that has something to do. */
static void dawdle(uint64_t us) {
  if (!hurry || any(16) == 0) sleep_us(us);
}

static void add(_Atomic uint64_t *counter) { (void)atomic_fetch_add(counter, 1u); }

/* Whether the server's grants, or its knowledge of them, survive a restart. */
static bool is_restarted(void) { return control && strstr(dsn, "redis:"); }

/* Memcached's leases last for whole seconds. Acts that would leave a lease behind are done less
   often there: otherwise all would wait all the time for the ends of these leases. */
static unsigned rarely(void) { return is_store("memcached") ? 8 : 1; }

/* Where connections are cut and servers stopped, or a process while it writes, a call may remain
   without an answer. */
static void add_failure(const char *what, int status, const hl_error *error) {
  if (status == HL_TIMEOUT || (status == HL_ECONNECTION && has_server()) ||
      (fails_over && error->retryable)) {
    add(&shared->connections);
    sleep_us(any(20000)); /* it is down, perhaps */
    return;
  }
  if (atomic_fetch_add(&shared->failures, 1u) < 5)
    fprintf(stderr, "%s failed: %s: %s\n", what, hl_status_name(status), error->message);
}

/* The number of a new lock. */
static uint64_t add_holder(void) { return atomic_fetch_add(&shared->holders, 1u) + 1; }

/* ------------------------------------------------------------------ notes */

static note *note_at(int worker, int number) { return &shared->notes[worker][number]; }

/* A new one; NULL: there is no room, and the process ends. */
static note *begin(const locked *nodes, uint64_t holder, uint64_t token) {
  int number = atomic_load(&shared->used[self]);
  if (number >= NOTES) return NULL;
  note *it = note_at(self, number);
  it->nodes = *nodes;
  it->holder = holder;
  it->token = token;
  it->to = it->from = now();
  atomic_store(&shared->used[self], number + 1);
  return it;
}

/* Notes that no present or former holder can rely on the lease from that time on. Returns the
   last of them. */
static uint64_t cut(uint64_t holder, int64_t at) {
  for (;;) {
    int64_t none = 0;
    if (holder >= HOLDERS) return holder;
    (void)atomic_compare_exchange_strong(&shared->cuts[holder], &none, at);
    uint64_t heir = atomic_load(&shared->heirs[holder]);
    if (!heir) return holder;
    holder = heir;
  }
}

/* Notes the heir that is about to import the lease. */
static void inherit(uint64_t holder, uint64_t heir) {
  uint64_t nobody;
  do {
    nobody = 0;
    holder = cut(holder, now());
  } while (holder < HOLDERS &&
           !atomic_compare_exchange_strong(&shared->heirs[holder], &nobody, heir));
}

/* Whether it is held, as far as it is told. */
static bool ask(hl_lock *lock, note *it) {
  int64_t at = now();
  bool held = hl_lock_is_held(lock);
  if (held) it->to = at;
  return held;
}

/* ------------------------------------------------------------------ a process */

static void target(hl_plan *plan, locked *nodes, bool updates) {
  const int many[] = {users, ACCOUNTS, RESOURCES};
  uint64_t dice = any(10);
  int depth = dice < 1 ? 1 : dice < 3 ? 2 : 3;
  nodes->mode = HL_EXCLUSIVE;
  if (any(3) == 0)
    nodes->mode = HL_SHARED;
  else if (depth == 3 && updates && any(3) == 0)
    nodes->mode = HL_UPDATE;
  nodes->n = any(4) ? 1 : NODES;
  for (int node = 0; node < nodes->n; node++) {
    int8_t *path = nodes->path[node];
    char names[3][8];
    hl_id ids[3];
    for (int i = 0; i < 3; i++) {
      path[i] = i < depth ? (int8_t)any((uint64_t)many[i]) : -1;
      /* Redis Cluster locks one root in a step, Memcached upgrades one. */
      if (i == 0 && (fails_over || is_store("memcached"))) path[0] = nodes->path[0][0];
      int n = snprintf(names[i], sizeof names[i], "%c%d", "uar"[i], path[i]);
      ids[i] = (hl_id){names[i], (size_t)n};
    }
    if (hl_plan_add(plan, ids, (unsigned)depth, (hl_mode)nodes->mode, true, NULL)) abort();
  }
  nodes->mode = (int8_t)hl_plan_mode(plan); /* it may be exclusive where shared was wanted */
}

/* By it others find its cut. */
static void owner_name(char out[32], uint64_t holder) {
  (void)snprintf(out, 32, "%llu", (unsigned long long)holder);
}

static void revoke_one(void *context, const hl_holder *holder) {
  hl_holder *found = context;
  if (found->id[0] == '\0' || any(3) == 0) *found = *holder;
}

static void revoke_any(hl_manager *manager) {
  hl_holder found = {.id = ""};
  uint64_t count = 0;
  hl_filter filter = HL_FILTER_INIT;
  if (hl_manager_leases(manager, NULL, revoke_one, &found, NULL) || !found.id[0]) return;
  uint64_t owner = strtoull(found.owner, NULL, 10);
  int64_t at = now();
  (void)cut(owner, at);
  filter.id = found.id;
  if (hl_manager_revoke(manager, &filter, "stress", "at random", &count, NULL) == HL_OK && count)
    add(&shared->revoked);
  (void)cut(owner, at); /* another process may have imported it meanwhile */
}

/* Puts a text where other processes may find it. */
static void publish(const char *exported, const note *it) {
  text *slot = &shared->texts[any(TEXTS)];
  int free_one = 0;
  if (strlen(exported) >= TEXT_SIZE ||
      !atomic_compare_exchange_strong(&slot->busy, &free_one, self + 1))
    return;
  (void)strcpy(slot->text, exported);
  slot->holder = it->holder;
  slot->nodes = it->nodes;
  atomic_store(&slot->busy, 0);
}

static void use(hl_manager *manager, hl_lock *lock, note *it, int64_t ttl);

static void import(hl_manager *manager) {
  text *slot = &shared->texts[any(TEXTS)];
  int free_one = 0;
  hl_options options = HL_OPTIONS_INIT;
  hl_lock *lock = NULL;
  hl_error error;
  if (!atomic_compare_exchange_strong(&slot->busy, &free_one, self + 1)) return;
  uint64_t holder = add_holder();
  if (slot->text[0]) {
    inherit(slot->holder, holder);
    options.ttl = (int64_t)(4 + any(60));
    options.auto_release = any(2);
    int status = hl_import(manager, slot->text, strlen(slot->text), &options, &lock, &error);
    if (status != HL_OK) {
      slot->text[0] = '\0';
      /* A holder since then has upgraded it. */
      bool other = status == HL_EMISMATCH && slot->nodes.mode == HL_UPDATE;
      if (status != HL_ELOST && !other) add_failure("import", status, &error);
    }
  }
  if (!lock) {
    atomic_store(&slot->busy, 0);
    return;
  }
  add(&shared->imports);
  note *it = begin(&slot->nodes, holder, hl_lock_token(lock));
  slot->holder = holder;
  atomic_store(&slot->busy, 0);
  if (it) use(manager, lock, it, options.ttl);
  hl_lock_free(lock);
}

/* Makes a lock for update exclusive, or for update again. NULL: it has ended. */
static note *convert(hl_lock *lock, note *it, bool updates) {
  hl_options options = HL_OPTIONS_INIT;
  hl_error error;
  locked nodes = it->nodes;
  bool upgrades = nodes.mode == HL_UPDATE;
  if (!updates || any(2)) return it;
  (void)ask(lock, it);
  options.timeout = any(2) ? (int64_t)any(60) : 0;
  int status = upgrades ? hl_lock_upgrade(lock, &options, &error) : hl_lock_downgrade(lock, &error);
  if (status == HL_OK) {
    if (upgrades) add(&shared->upgraded);
    nodes.mode = upgrades ? HL_EXCLUSIVE : HL_UPDATE;
    return begin(&nodes, it->holder, hl_lock_token(lock));
  }
  if (status == HL_TIMEOUT || (status == HL_EUNSUPPORTED && !upgrades)) return it;
  if (status != HL_ELOST && status != HL_DEADLOCK)
    add_failure(upgrades ? "upgrade" : "downgrade", status, &error);
  return NULL;
}

static void use(hl_manager *manager, hl_lock *lock, note *it, int64_t ttl) {
  bool lease = ttl > 0, updates = it->nodes.mode == HL_UPDATE;
  hl_error error;
  for (uint64_t turns = any(4); turns > 0; turns--) {
    it = convert(lock, it, updates);
    if (!it) return;
    (void)ask(lock, it);
    if (ttl >= OUTLIVES_MS) dawdle(any((uint64_t)ttl * 500));
    switch (any(16)) {
    case 0: dawdle(any(800)); break;
    case 1: dawdle(any((uint64_t)(lease ? ttl : 10) * 1300)); break; /* too long */
    case 5: /* the same, where the store has made more of the ttl */
      if (lease && any(8) == 0 && hl_lock_remaining(lock) < 4000)
        dawdle(any((uint64_t)hl_lock_remaining(lock) * 1300 + 1));
      break;
    case 2: /* up to the last moment */
      if (lease && hl_lock_remaining(lock) > 2 && (hl_lock_remaining(lock) < 100 || any(8) == 0))
        dawdle((uint64_t)(hl_lock_remaining(lock) - 1 - (int64_t)any(2)) * 1000 + any(2000));
      break;
    case 3:
      if (!lease && hl_lock_kind(lock) == HL_SESSION) {
        hl_options options = HL_OPTIONS_INIT;
        char owner[32];
        owner_name(owner, it->holder);
        options.ttl = ttl = (int64_t)(4 + any(60));
        options.owner = owner;
        int status = hl_lock_to_lease(lock, &options, &error);
        lease = status == HL_OK;
        if (lease)
          add(&shared->converted);
        else if (status != HL_ELOST && status != HL_EUNSUPPORTED)
          add_failure("to_lease", status, &error);
        if (!lease) return;
      }
      break;
    case 4:
      if (any(200) == 0) (void)raise(SIGKILL);
      if (any(3) == 0) revoke_any(manager);
      break;
    default: break;
    }
    bool held = ask(lock, it);
    if (!lease && !held) return;
    if (lease && any(2)) {
      int status = hl_lock_refresh(lock, any(3) ? 0 : (int64_t)(4 + any(60)), &error);
      add(&shared->refreshes);
      if (!held) add(&shared->late);
      if (status == HL_ELOST) {
        add(&shared->lost);
        return;
      }
      if (status != HL_OK) {
        add_failure("refresh", status, &error);
        return;
      }
      /* Where the lease was over, the time between belongs to no holder. */
      if (!held) {
        add(&shared->restored);
        it = begin(&it->nodes, it->holder, it->token);
        if (!it) return;
      }
    } else if (!held) {
      return;
    }
  }
  (void)ask(lock, it);
  if (lease && any(4 * rarely()) == 0) {
    char *exported;
    if (hl_lock_export(lock, &exported, NULL) == HL_OK) {
      publish(exported, it);
      free(exported);
    }
  } else if (any(10 * rarely())) {
    (void)hl_lock_release(lock, any(2), NULL);
  } /* otherwise its end does it, or no call */
}

static void note_grant(void) {
  int64_t at = now(), before = atomic_exchange(&shared->granted_at, at);
  int64_t longest = atomic_load(&shared->longest_gap);
  while (before && at - before > longest &&
         !atomic_compare_exchange_weak(&shared->longest_gap, &longest, at - before)) {}
}

static void turn(hl_manager *manager) {
  hl_options options = HL_OPTIONS_INIT;
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  hl_lock *lock;
  static _Thread_local bool refused[2]; /* update locks, as sessions and leases */
  locked nodes;
  char owner[32];
  uint64_t holder = add_holder();
  if (!plan) abort();
  bool lease = any(leases_only() ? 12 : 3) != 0;
  target(plan, &nodes, !refused[lease]);
  options.timeout = any(4) ? (int64_t)any(120) : 0;
  if (lease) {
    options.ttl = (int64_t)(4 + any(50));
    if ((is_restarted() || fails_over) && any(16) == 0)
      options.ttl = (int64_t)(OUTLIVES_MS + any(2000));
    options.auto_release = any(8 * rarely()) != 0;
    options.auto_refresh = any(4) == 0;
  }
  /* Where there are only leases, a session is one, and may be revoked. */
  owner_name(owner, holder);
  options.owner = owner;
  hl_error error;
  int status = hl_acquire(manager, plan, &options, &lock, &error);
  hl_plan_free(plan);
  if (status == HL_OK) {
    add(&shared->grants[lease]);
    note_grant();
    if (hl_lock_waited(lock) >= 2) add(&shared->waits);
    note *it = begin(&nodes, holder, hl_lock_token(lock));
    if (it) use(manager, lock, it, options.ttl);
    hl_lock_free(lock);
  } else if (nodes.mode == HL_UPDATE &&
             (status == HL_EUNSUPPORTED || status == HL_ENOT_PROVISIONED)) {
    refused[lease] = true;
  } else if (status != HL_TIMEOUT && status != HL_ELOST) {
    add_failure("acquire", status, &error);
  }
}

/* Seeds the thread's choices, and works until the end. */
static void work(hl_manager *manager, int which, uint64_t seed) {
  self = which;
  random_state = (seed + (uint64_t)which) * 2654435761u + (uint64_t)getpid() * 40503u + 1;
  while (!atomic_load(&shared->stop) && atomic_load(&shared->used[self]) < NOTES &&
         atomic_load(&shared->holders) < HOLDERS - WORKERS_MAX)
    if (any(12) == 0)
      import(manager);
    else
      turn(manager);
}

typedef struct worker {
  hl_manager *manager;
  int which;
  uint64_t seed;
} worker;

static void *run(void *context) {
  const worker *it = context;
  work(it->manager, it->which, it->seed);
  return NULL;
}

static void process(int first, uint64_t seed) {
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager;
  random_state = seed + (uint64_t)getpid();
  config.dsn = dsn;
  config.stores = stores;
  if (leases_only()) config.hold_timeout = HOLD_MS;
  for (;;) {
    hl_error error;
    int status = hl_manager_open(&config, &manager, &error);
    if (status == HL_OK) break;
    if (atomic_load(&shared->stop)) _exit(0);
    if ((status != HL_ECONNECTION || !has_server()) && !(fails_over && error.retryable)) {
      fprintf(stderr, "cannot open: %s\n", error.message);
      _exit(3);
    }
    sleep_us(20000);
  }
  pthread_t others[WORKERS_MAX];
  worker workers[WORKERS_MAX];
  for (int i = 1; i < threads; i++) {
    workers[i] = (worker){manager, first + i, seed};
    if (pthread_create(&others[i], NULL, run, &workers[i])) abort();
  }
  work(manager, first, seed);
  for (int i = 1; i < threads; i++) (void)pthread_join(others[i], NULL);
  hl_manager_close(manager);
  _exit(0);
}

/* --------------------------------------------------------------- the checker */

static int by_time(const void *a, const void *b) {
  const note *x = *(note *const *)a, *y = *(note *const *)b;
  return x->from < y->from ? -1 : x->from > y->from;
}

static int64_t until(const note *it) {
  int64_t at = it->holder < HOLDERS ? atomic_load(&shared->cuts[it->holder]) : 0;
  return at && at < it->to ? at : it->to;
}

/* By the rule alone: one path is above the other, and not both are shared; or is the same. */
static bool paths_meet(const int8_t a[3], const int8_t b[3], bool weak, bool both) {
  for (int i = 0; i < 3; i++) {
    if (a[i] < 0 || b[i] < 0) return !both; /* one above the other */
    if (a[i] != b[i]) return false;
  }
  return !weak;
}

static bool conflict(const note *a, const note *b) {
  const int x = a->nodes.mode, y = b->nodes.mode;
  const bool weak = x != HL_EXCLUSIVE && y != HL_EXCLUSIVE && !(x == HL_UPDATE && y == HL_UPDATE);
  for (int i = 0; i < a->nodes.n; i++)
    for (int j = 0; j < b->nodes.n; j++)
      if (paths_meet(a->nodes.path[i], b->nodes.path[j], weak, x == HL_SHARED && y == HL_SHARED))
        return true;
  return false;
}

static void show(const char *what, const note *it) {
  printf("%s", what);
  for (int i = 0; i < it->nodes.n; i++)
    printf(" u%d a%d r%d", it->nodes.path[i][0], it->nodes.path[i][1], it->nodes.path[i][2]);
  printf(" %s token %016llx holder %llu from %lld to %lld\n", hl_mode_name((hl_mode)it->nodes.mode),
         (unsigned long long)it->token, (unsigned long long)it->holder, (long long)it->from,
         (long long)until(it));
}

static unsigned check(void) {
  size_t n = 0;
  unsigned wrong = 0, backwards = 0;
  for (int i = 0; i < processes * threads; i++) n += (size_t)atomic_load(&shared->used[i]);
  note **all = malloc((n + 1) * sizeof *all), **active = malloc((n + 1) * sizeof *active);
  if (!all || !active) abort();
  n = 0;
  for (int i = 0; i < processes * threads; i++)
    for (int j = 0; j < atomic_load(&shared->used[i]); j++) all[n++] = note_at(i, j);
  qsort(all, n, sizeof *all, by_time);
  size_t live = 0;
  /* The last exclusive holder of each path. */
  note *last[USERS_MAX + 1][ACCOUNTS + 1][RESOURCES + 1] = {{{NULL}}};
  for (size_t i = 0; i < n; i++) {
    note *it = all[i];
    size_t kept = 0;
    for (size_t j = 0; j < live; j++) {
      if (until(active[j]) <= it->from) continue;
      active[kept++] = active[j];
      if (active[kept - 1]->holder == it->holder || !conflict(active[kept - 1], it) ||
          until(it) <= it->from)
        continue;
      if (wrong++ < 5) show("two at once:", active[kept - 1]), show("         and:", it);
    }
    live = kept;
    active[live++] = it;
    /* A lease that was taken away before it began says nothing of the order. */
    if (it->nodes.mode != HL_EXCLUSIVE || until(it) <= it->from) continue;
    for (int node = 0; node < it->nodes.n; node++) {
      const int8_t *path = it->nodes.path[node];
      note **before = &last[path[0] + 1][path[1] + 1][path[2] + 1];
      if (*before && (*before)->to < it->from && (*before)->token > it->token && backwards++ < 5)
        show("token fell:", *before), show("       to:", it);
      if (!*before || it->token > (*before)->token) *before = it;
    }
  }
  printf("%zu intervals: %u times two at once, %u tokens that fell\n", n, wrong, backwards);
  free(all), free(active);
  return wrong + backwards;
}

/* All users from the first to the one before `end`, alone. */
static int take_users(hl_manager *manager, int first, int end, hl_lock **lock, hl_error *error) {
  hl_options options = HL_OPTIONS_INIT;
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  int64_t stop = now() + LEFT_MS * INT64_C(1000000);
  for (int i = first; i < end; i++) {
    char name[8];
    int n = snprintf(name, sizeof name, "u%d", i);
    hl_id id = {name, (size_t)n};
    if (!plan || hl_plan_add(plan, &id, 1, HL_EXCLUSIVE, true, NULL)) abort();
  }
  options.timeout = LEFT_MS;
  int status;
  do { /* a fail-over may be under way yet */
    status = hl_acquire(manager, plan, &options, lock, error);
    if (status) sleep_us(20000);
  } while (status && status != HL_TIMEOUT && fails_over && error->retryable && now() < stop);
  hl_plan_free(plan);
  return status;
}

/* When all have gone, takes everything: at once, or, where that is no call of one server, one
   after the other. */
static unsigned take_everything(void) {
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager;
  hl_error error;
  int64_t begun = now();
  int status;
  config.dsn = dsn;
  config.stores = stores;
  if (leases_only()) config.hold_timeout = HOLD_MS;
  if (hl_manager_open(&config, &manager, &error)) {
    printf("cannot open in the end: %s\n", error.message);
    return 1;
  }
  hl_lock *locks[USERS_MAX] = {NULL};
  if (!fails_over)
    status = take_users(manager, 0, users, &locks[0], &error);
  else
    status = HL_OK;
  for (int i = 0; fails_over && i < users && status == HL_OK; i++)
    status = take_users(manager, i, i + 1, &locks[i], &error);
  if (status)
    printf("something is left behind: %s\n", error.message);
  else
    printf("everything was free %.1f s after the end\n", (double)(now() - begun) / 1e9);
  for (int i = 0; i < users; i++) hl_lock_free(locks[i]);
  hl_manager_close(manager);
  return status != HL_OK;
}

/* -------------------------------------------------------------------- faults */

/* Ends all connections of a process. The server may still read the bytes that were sent. */
static void cut_connections(int signal) {
  int before = errno;
  (void)signal;
  for (int fd = 3; fd < 256; fd++) (void)shutdown(fd, SHUT_RDWR);
  errno = before;
}

static int server(const char *verb) {
  char command[1024];
  (void)snprintf(command, sizeof command, "%s %s >/dev/null 2>&1", control, verb);
  return system(command);
}

static pid_t server_pid(void) {
  char command[1024], line[32] = "";
  (void)snprintf(command, sizeof command, "%s pid 2>/dev/null", control);
  FILE *pipe = popen(command, "r");
  if (!pipe) return 0;
  (void)!fgets(line, sizeof line, pipe);
  (void)pclose(pipe);
  return (pid_t)atol(line);
}

/* Longer than a lease, longer than an answer is awaited: both happen. */
static void freeze_server(void) {
  pid_t pid = server_pid();
  if (pid <= 1 || kill(pid, SIGSTOP)) return;
  sleep_us(any(any(4) ? 300000 : 2500000));
  (void)kill(pid, SIGCONT);
  add(&shared->freezes);
}

static void restart_server(void) {
  if (server("kill")) return;
  sleep_us(any(2) ? any(300000) : 0);
  if (server("start")) fprintf(stderr, "the server does not start again\n");
  add(&shared->restarts);
}

static void fault(pid_t victim) {
  uint64_t dice = any(100);
  if (dice < 4 && is_restarted()) {
    restart_server();
  } else if (dice < 7 && control) {
    freeze_server();
  } else if (dice < 20 && has_server()) {
    (void)kill(victim, SIGUSR1);
    add(&shared->cuts_made);
  } else if (dice < 50) {
    (void)kill(victim, SIGSTOP);
    sleep_us(any(any(8) ? 400000 : 2500000) / (hurry ? 20 : 1));
    (void)kill(victim, SIGCONT);
    add(&shared->stops);
  } else {
    (void)kill(victim, SIGKILL);
    add(&shared->kills);
  }
}

/* ---------------------------------------------------------------------- main */

static pid_t start(int which, uint64_t seed) {
  (void)fflush(stdout);
  pid_t pid = fork();
  if (pid == 0) process(which * threads, seed);
  return pid;
}

static unsigned long long value(_Atomic uint64_t *counter) { return atomic_load(counter); }

static void progress(int64_t begun) {
  printf("%3d s: %llu granted, %llu waited, %llu lost, %llu killed, %llu stopped, %llu cut, "
         "server stopped %llu times, restarted %llu times\n",
         (int)((now() - begun) / 1000000000), value(&shared->grants[0]) + value(&shared->grants[1]),
         value(&shared->waits), value(&shared->lost), value(&shared->kills), value(&shared->stops),
         value(&shared->cuts_made), value(&shared->freezes), value(&shared->restarts));
  (void)fflush(stdout);
}

static void report(void) {
  printf("%llu sessions, %llu leases (%llu of them waited), %llu refreshes (%llu late, %llu "
         "of these in time enough, %llu lost), %llu converted, %llu upgraded, %llu imported, %llu "
         "revoked, "
         "%llu killed, %llu stopped, %llu cut, server stopped %llu times, restarted %llu times; "
         "%llu calls were not answered, %llu failed otherwise; longest time without a grant "
         "%.1f s\n",
         value(&shared->grants[0]), value(&shared->grants[1]), value(&shared->waits),
         value(&shared->refreshes), value(&shared->late), value(&shared->restored),
         value(&shared->lost), value(&shared->converted), value(&shared->upgraded),
         value(&shared->imports), value(&shared->revoked), value(&shared->kills),
         value(&shared->stops), value(&shared->cuts_made), value(&shared->freezes),
         value(&shared->restarts), value(&shared->connections), value(&shared->failures),
         (double)atomic_load(&shared->longest_gap) / 1e9);
}

static bool ended_badly(int which, int status) {
  if (WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : WEXITSTATUS(status) == 0) return false;
  printf("process %d ended with status %x\n", which, (unsigned)status);
  return true;
}

static void thread_show(const char *line) { printf("  %s\n", line); }

/* Waits until a process that was told to has ended. False: it should not have, or it hangs. */
static bool ends(int which, pid_t pid) {
  int64_t until_ns = now() + INT64_C(1000000) * HANG_MS;
  int status = 0;
  while (waitpid(pid, &status, WNOHANG) == 0) {
    if (now() > until_ns) {
      printf("VIOLATION: process %d does not end\n", which);
      stacks_of(pid, thread_show);
      (void)kill(pid, SIGKILL);
      (void)waitpid(pid, &status, 0);
      return false;
    }
    sleep_us(5000);
  }
  return !ended_badly(which, status);
}

/* Starts ended processes anew. *died: the number that should not have ended. False: one is full. */
static bool tend(pid_t *pids, uint64_t seed, unsigned *died) {
  bool goes_on = true;
  for (int i = 0; i < processes; i++) {
    int status;
    if (waitpid(pids[i], &status, WNOHANG) != pids[i]) continue;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) goes_on = false;
    if (ended_badly(i, status)) (*died)++;
    for (int j = 0; j < TEXTS; j++) { /* the texts that it was using */
      int its = atomic_load(&shared->texts[j].busy);
      if (its > i * threads && its <= (i + 1) * threads)
        (void)atomic_compare_exchange_strong(&shared->texts[j].busy, &its, 0);
    }
    pids[i] = start(i, seed + any(1000000));
  }
  return goes_on;
}

int main(int argc, char **argv) {
  int seconds = 30;
  uint64_t seed = (uint64_t)time(NULL);
  for (int i = 1; i < argc; i++) {
    const char *equals = strchr(argv[i], '='), *given = equals ? equals + 1 : "";
    if (strncmp(argv[i], "--", 2) != 0)
      dsn = argv[i];
    else if (strncmp(argv[i], "--seconds=", 10) == 0)
      seconds = atoi(given);
    else if (strncmp(argv[i], "--seed=", 7) == 0)
      seed = strtoull(given, NULL, 0);
    else if (strncmp(argv[i], "--processes=", 12) == 0)
      processes = atoi(given);
    else if (strncmp(argv[i], "--threads=", 10) == 0)
      threads = atoi(given);
    else if (strncmp(argv[i], "--control=", 10) == 0)
      control = *given ? given : NULL;
    else if (strcmp(argv[i], "--hurry") == 0)
      hurry = true, users = USERS_MAX;
    else if (strcmp(argv[i], "--fails-over") == 0)
      fails_over = true;
    else if (strncmp(argv[i], "--admin=", 8) != 0)
      return 2;
  }
  if (!dsn || processes < 1 || threads < 1 || processes > WORKERS_MAX / threads) return 2;
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE,
                MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (shared == MAP_FAILED) return 2;
  random_state = seed + 88172645463325252u;
  const struct sigaction cuts = {.sa_handler = cut_connections, .sa_flags = SA_RESTART};
  (void)sigaction(SIGUSR1, &cuts, NULL);
  printf("seed %llu, %d processes of %d threads, %d s\n", (unsigned long long)seed, processes,
         threads, seconds);
  if (is_restarted()) {
    if (seed % 2)
      (void)setenv("HIERLOCK_SERVER_OPTIONS", "--appendonly yes --appendfsync always", 1);
    printf("the server %s\n", seed % 2 ? "keeps its data" : "forgets all when it is restarted");
    if (server("restart")) return 2;
  }
  pid_t pids[WORKERS_MAX];
  for (int i = 0; i < processes; i++) pids[i] = start(i, seed + (uint64_t)i);
  int64_t begun = now(), told = begun, end = begun + (int64_t)seconds * 1000000000;
  unsigned died = 0;
  while (now() < end) {
    sleep_us((rarely() + 1) / 2 * (50000 + any(200000)) / (hurry ? 20 : 1));
    fault(pids[any((uint64_t)processes)]);
    if (!tend(pids, seed, &died)) end = 0;
    if (now() - told < INT64_C(5000000000)) continue;
    told = now();
    progress(begun);
  }
  atomic_store(&shared->stop, 1);
  for (int i = 0; i < processes; i++)
    if (!ends(i, pids[i])) died++;
  report();
  unsigned wrong = check() + died + (unsigned)shared->failures;
  wrong += take_everything();
  printf("seed %llu: %s\n", (unsigned long long)seed, wrong ? "FAILED" : "no violation");
  return wrong ? 1 : 0;
}
