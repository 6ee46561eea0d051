/*
 * peer.c - another process that wants the client's nodes, by the same library. No fault is done
 * to the peer: its answers hold. The peer obeys an order until the next one comes.
 */
#include "faults.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

enum {
  TRY_MS = 4,
  TRIES_MS = 2048,
  HOLD_US = 1500,
  SLICE_MS = 5,
  IN_THE_WAY_US = 12000,
  SLOWLY_US = 12000 /* so that there is room for the grants of a run whose client hangs */
};

static lane_area *area;
static int lane;
static hl_manager *manager;

static unsigned order_now; /* the present order */

/* No other one has come. */
static bool ordered(void) { return atomic_load(&area->order) == order_now; }

/* -------------------------------------------------------------- both have it */

hl_manager *manager_open(const lane_area *of, int64_t hold_timeout, int *status, hl_error *error) {
  static const struct hl_store_ops *const stores[] = {&hl_store_mysql,     &hl_store_postgresql,
                                                      &hl_store_sqlite,    &hl_store_redis,
                                                      &hl_store_memcached, NULL};
  hl_config config = HL_CONFIG_INIT;
  hl_manager *result = NULL;
  *status = hl_layout_new(NULL, 0, BUCKETS, &config.layout, error);
  if (*status) return NULL;
  config.dsn = of->dsn;
  config.hold_timeout = hold_timeout;
  config.stores = stores;
  config.application = "faults";
  *status = hl_manager_open(&config, &result, error);
  hl_layout_unref(config.layout);
  return *status ? NULL : result;
}

static bool plan_path(hl_plan *plan, const char *resource, unsigned n) {
  const hl_id ids[3] = {{"u1", 2}, {"a1", 2}, {resource, strlen(resource)}};
  return hl_plan_add(plan, ids, n, HL_EXCLUSIVE, false, NULL) == HL_OK;
}

/* Plans all the rows exclusively; an ancestor's only where the ancestor itself is named. */
hl_plan *plan_make(hl_manager *of, int nodes) {
  hl_plan *plan = hl_plan_new(hl_manager_layout(of));
  bool made = plan != NULL;
  if (made && nodes & USER) made = plan_path(plan, "", 1);
  if (made && nodes & ACCOUNT) made = plan_path(plan, "", 2);
  if (made && nodes & R1) made = plan_path(plan, "r1", 3);
  if (made && nodes & R2) made = plan_path(plan, "r2", 3);
  if (made && nodes & R3) made = plan_path(plan, "r3", 3);
  if (made) return plan;
  hl_plan_free(plan);
  return NULL;
}

/* ------------------------------------------------------------------- the peer */

static void failed(const char *what, const hl_error *error) {
  complain(area, "the peer, to whom nothing was done, cannot %s: %s (%s)", what,
           hl_status_name(error->status), error->message);
}

static bool opened(void) {
  hl_error error;
  int status;
  if (manager) return true;
  manager = manager_open(area, HOLD_TIMEOUT_MS, &status, &error);
  /* A client that stands still in a transaction of SQLite's keeps it out. */
  if (!manager && !(shared->leases && status == HL_ECONNECTION)) failed("open", &error);
  return manager != NULL;
}

static bool believes(holding *g, hl_lock *lock) {
  int64_t before = now_ns();
  if (!hl_lock_is_held(lock)) {
    complain(area, "the peer lost its lock");
    return false;
  }
  atomic_store(&g->held, before);
  return true;
}

/* NULL: not granted while the order lasted, or in time. */
static hl_lock *get(int nodes, int64_t timeout, holding **g) {
  hl_options options = HL_OPTIONS_INIT;
  hl_error error;
  hl_pending *pending = NULL;
  hl_lock *lock = NULL;
  hl_plan *plan = plan_make(manager, nodes);
  int64_t asked = now_ns();
  int status;
  options.timeout = timeout;
  if (!plan) abort();
  if (timeout <= TRIES_MS) {
    status = hl_acquire(manager, plan, &options, &lock, &error);
  } else {
    status = hl_start(manager, plan, &options, &pending, &error);
    atomic_store(&area->asks, nodes == ALL);
    while (status == HL_OK) {
      status = hl_pending_wait(pending, SLICE_MS, &lock, &error);
      if (status != HL_TIMEOUT || hl_pending_done(pending) || !ordered()) break;
      status = HL_OK;
    }
    hl_pending_free(pending);
    atomic_store(&area->asks, false);
  }
  hl_plan_free(plan);
  /* A short try may end with the time that a connection may take at least. */
  bool late = status == HL_TIMEOUT || (status == HL_ECONNECTION && timeout <= TRIES_MS);
  if (status && !late) failed("acquire", &error);
  if (status) return NULL;
  int n = atomic_load(&area->grants);
  if (n == GRANTS) abort();
  *g = &area->grant[n];
  **g =
      (holding){.nodes = nodes, .asked = asked, .token = hl_lock_token(lock), .granted = now_ns()};
  atomic_store(&area->grants, n + 1);
  (void)believes(*g, lock);
  return lock;
}

static void give(holding *g, hl_lock *lock) {
  hl_error error;
  if (!lock) return;
  (void)believes(g, lock);
  g->ending = now_ns();
  if (hl_lock_release(lock, false, &error)) failed("release", &error);
  hl_lock_free(lock);
}

/* In the way at r3 until the client has waited for a moment; and again when it has had it. */
static void busy(void) {
  holding *g = NULL;
  while (area->fresh && !atomic_load(&area->opened))
    if (!ordered())
      return;
    else
      (void)usleep(300);
  if (!opened()) return;
  for (stage until = WAIT; ordered(); until = STAGES) {
    hl_lock *lock = get(R3, HOLD_TIMEOUT_MS, &g);
    if (!lock) return;
    atomic_store(&area->busy, true);
    while (ordered() && atomic_load(&area->stage) < (int)until) (void)usleep(300);
    if (ordered()) (void)usleep(IN_THE_WAY_US);
    atomic_store(&area->busy, false);
    give(g, lock);
    while (ordered() && atomic_load(&area->stage) == WAIT) (void)usleep(300);
  }
}

/* Everything, and keeps it while the client stands still. False: not granted. */
static bool grab(int64_t timeout) {
  holding *g = NULL;
  hl_lock *lock = get(ALL, timeout, &g);
  if (!lock) return false;
  atomic_store(&area->grabbed_at, g->granted);
  atomic_store(&area->grabbed, g->asked);
  while (atomic_load(&area->frozen) && believes(g, lock)) (void)usleep(1000);
  (void)usleep(HOLD_US);
  give(g, lock);
  return true;
}

/* Where the server cannot answer a short try for everything, as the machine is loaded, each next one is
   twice as long. */
static void race(void) {
  static const int wanted[] = {R1, USER, R2, ACCOUNT, R3};
  static int64_t patience = TRY_MS;
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted && ordered(); i++) {
    holding *g = NULL;
    hl_lock *lock = get(wanted[i], TRY_MS, &g);
    if (lock) (void)usleep(HOLD_US);
    give(g, lock);
    (void)usleep(atomic_load(&area->grants) < GRANTS / 2 ? 200 : SLOWLY_US);
  }
  if (ordered()) {
    if (grab(patience))
      patience = TRY_MS;
    else if (patience < TRIES_MS)
      patience *= 2;
  }
  (void)atomic_fetch_add(&area->rounds, 1u);
}

/* ------------------------------------------------------- leftovers */

static int files_left(char first[256]) {
  DIR *directory = opendir(area->directory);
  struct dirent *file;
  int n = 0;
  while (directory && (file = readdir(directory)))
    if (file->d_name[0] != '.' && strcmp(file->d_name, "control") != 0 &&
        strncmp(file->d_name, "rows-", 5) != 0 &&
        !(area->dirty && strncmp(file->d_name, "tmp-", 4) == 0)) {
      (void)snprintf(first, 256, "%s", file->d_name);
      n++;
    }
  if (directory) (void)closedir(directory);
  return n;
}

/* Everything is closed. A process that opens the directory removes the leftovers of the dead. */
static void rest(void) {
  char first[256] = "";
  int left = 0;
  if (manager) hl_manager_close(manager);
  manager = NULL;
  if (shared->leases) return;
  /* A thread whose wait was cancelled may be the last to use them. */
  for (int64_t end = now_ns() + SOON; now_ns() < end; (void)usleep(2000)) {
    if ((left = shared->server ? server_connections(lane) : files_left(first)) == 0) return;
    if (area->dirty && !shared->server && opened()) hl_manager_close(manager);
    manager = NULL;
  }
  if (shared->server)
    complain(area, "%d connections are left at the server", left);
  else
    complain(area, "%d files are left behind, one of them %s", left, first);
}

_Noreturn void peer_main(lane_area *given, int number, const char *admin) {
  area = given;
  lane = number;
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (shared->server) server_connect(admin);
  for (;; (void)usleep(300)) {
    bool first = !ordered();
    order_now = atomic_load(&area->order);
    order o = (order)(order_now % ORDERS);
    if (o == QUIT) exit(0);
    if (o == REST && first) rest();
    if (o == BUSY) busy();
    if (o == GRAB && first && opened()) (void)grab(HOLD_TIMEOUT_MS);
    if ((o == RACE || (o == GRAB && !first)) && opened()) race();
    atomic_store(&area->obeyed, order_now);
  }
}
