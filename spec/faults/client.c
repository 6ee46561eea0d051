/*
 * client.c - the script of a client: what a program does with locks, from opening to closing.
 * The client notes its results, goes on after errors, tries a failed call once more, and reports
 * results that do not fit docs.
 */
#include "faults.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <unistd.h>

enum { TIMEOUT_MS = SOON / MS, CANCEL_AFTER_MS = 5 };

static lane_area *area;
static hl_manager *manager;

static void stage_is(stage s) { atomic_store(&area->stage, s); }
static bool disturbed(void) { return atomic_load(&area->disturbed); }

/* ------------------------------------------------------------------ holding */

static holding *handle_new(int nodes, int64_t asked) {
  if (area->handles == HANDLES) abort();
  holding *h = &area->handle[area->handles];
  *h = (holding){.nodes = nodes, .asked = asked};
  return h;
}

static void handle_granted(holding *h, hl_lock *lock) {
  h->granted = now_ns();
  h->token = hl_lock_token(lock);
  area->handles++;
}

static bool believe(holding *h, hl_lock *lock) {
  int64_t before = now_ns();
  if (!hl_lock_is_held(lock)) {
    if (!h->ending) h->ending = now_ns();
    return false;
  }
  atomic_store(&h->held, before);
  before = now_ns();
  int64_t left = hl_lock_remaining(lock);
  if (left > 0) h->promised = left == HL_FOREVER ? INT64_MAX : before + left * MS;
  return true;
}

/* Holds for some time; once a fault was done, until the peer has tried everything. */
static void hold(holding *h, hl_lock *lock, stage s) {
  stage_is(s);
  for (int i = 0; i < 3 && believe(h, lock); i++) (void)usleep(500);
  stage_is(BETWEEN);
  unsigned rounds = atomic_load(&area->rounds);
  int64_t end = now_ns() + S / 2;
  while (disturbed() && now_ns() < end && atomic_load(&area->rounds) < rounds + 2 &&
         believe(h, lock))
    (void)usleep(300);
}

/* ------------------------------------------------------------------- judging */

static const char *const stage_names[STAGES] = {
    "between", "open", "acquire", "hold",  "check",  "extend", "hold-both", "look",
    "release", "wait", "confirm", "start", "cancel", "again",  "last",      "close"};

/* The statuses, beside HL_OK, with which a call may end when something failed under it; bits by
   number. */
#define MAY(status) (1u << ((status) + 10))
#define MAY_FAIL (MAY(HL_ECONNECTION) | MAY(HL_ESTORE) | MAY(HL_ENOMEM) | MAY(HL_BUSY))
/* What only a lease may come to: its time was up when the client went on; or the store has not said
   whether it is there. */
#define LEASES_MAY(statuses) (shared->leases || shared->with_leases ? (statuses) : 0)

/* True: it succeeded. */
static bool came_to(stage s, int status, const hl_error *error, unsigned may) {
  if (status == HL_OK) return true;
  area->failed[s]++;
  /* To stand still costs nothing on the embedded store, and a call that was only interrupted
     goes on. On a busy machine a call with a short limit of its own may fail, too. */
  bool limited = s == LOOK || (LEASES_MAY(true) && (s == CHECK || s == EXTEND));
  bool excused = shared->silence_ends && (area->mode == STOP || limited);
  if (disturbed() && area->mode == FAIL && area->failure != EINTR) excused = true;
  if (!excused || !(may & MAY(status)) || status != error->status || !error->message[0])
    complain(area, "%s came to %s (%s)", stage_names[s], hl_status_name(status), error->message);
  return false;
}

/* As acquired; NULL when it failed twice, which one fault does not excuse. */
static hl_lock *acquired(stage s, int nodes, holding **h) {
  hl_plan *plan = plan_make(manager, nodes);
  hl_options options = HL_OPTIONS_INIT;
  hl_lock *lock = NULL;
  options.timeout = TIMEOUT_MS;
  for (int tries = 0; plan && tries < 2 && !lock; tries++) {
    hl_error error;
    *h = handle_new(nodes, now_ns());
    stage_is(s);
    int status = hl_acquire(manager, plan, &options, &lock, &error);
    stage_is(BETWEEN);
    if (status == HL_OK) handle_granted(*h, lock);
    (void)came_to(s, status, &error, MAY_FAIL | LEASES_MAY(MAY(HL_ELOST)));
    if (status && tries)
      complain(area, "%s failed again: %s (%s)", stage_names[s], hl_status_name(status),
               error.message);
  }
  if (!plan) complain(area, "no plan");
  hl_plan_free(plan);
  return lock;
}

static void released(stage s, holding *h, hl_lock *lock, bool confirm) {
  hl_error error;
  if (!lock) return;
  if (!h->ending) h->ending = now_ns();
  stage_is(s);
  int status = hl_lock_release(lock, confirm, &error);
  stage_is(BETWEEN);
  (void)came_to(s, status, &error, MAY(HL_ELOST) | LEASES_MAY(MAY_FAIL));
  hl_lock_free(lock);
}

/* ----------------------------------------------------------------- the script */

/* For the peer to be in the way. */
static void wait_for_peer(void) {
  int64_t end = now_ns() + SOON;
  while (!atomic_load(&area->busy) && !disturbed()) {
    if (now_ns() > end) {
      complain(area, "the peer does not come to hold r3");
      return;
    }
    (void)usleep(300);
  }
}

/* Once a fault was done: the peer must get everything, now that this process holds nothing. */
static void expect_nothing_held(const char *when) {
  int64_t began = now_ns();
  while (disturbed() && atomic_load(&area->grabbed) < began) {
    if (now_ns() > began + SOON) {
      complain(area, "%s the peer cannot get what this process has given back", when);
      return;
    }
    (void)usleep(300);
  }
}

static void check_and_extend(holding *h, hl_lock *lock) {
  hl_options options = HL_OPTIONS_INIT;
  hl_error error;
  hl_plan *more = plan_make(manager, R2);
  if (!more) return;
  options.timeout = TIMEOUT_MS;
  stage_is(CHECK);
  int status = hl_lock_check(lock, &error);
  stage_is(BETWEEN);
  (void)came_to(CHECK, status, &error, MAY(HL_ELOST));
  stage_is(EXTEND);
  status = hl_lock_extend(lock, more, &options, &error);
  stage_is(BETWEEN);
  if (came_to(EXTEND, status, &error, MAY_FAIL | MAY(HL_ELOST))) {
    /* A handle of its own, as it counts from now. */
    holding *both = handle_new(R1 | R2, now_ns());
    if (!h->ending) h->ending = now_ns();
    handle_granted(both, lock);
    hold(both, lock, HOLD_BOTH);
    if (!both->ending) both->ending = now_ns();
  } else {
    hold(h, lock, HOLD_BOTH);
  }
  hl_plan_free(more);
}

/* Where no lock can be extended: the lease is renewed, and goes through a text, as to another program. */
static hl_lock *renew_and_hand_over(holding **h, hl_lock *lock) {
  hl_options options = HL_OPTIONS_INIT;
  hl_error error;
  hl_lock *imported = NULL;
  char *text = NULL;
  if (shared->with_leases) {
    hl_options lease = HL_OPTIONS_INIT;
    lease.ttl = area->mode == KILL || area->mode == STOP ? LEASE_MS : LONG_LEASE_MS;
    stage_is(EXTEND);
    int made = hl_lock_to_lease(lock, &lease, &error);
    stage_is(BETWEEN);
    if (!came_to(EXTEND, made, &error, MAY_FAIL | MAY(HL_ELOST))) return lock;
    hold(*h, lock, HOLD_BOTH);
  }
  options.timeout = TIMEOUT_MS;
  stage_is(CHECK);
  int status = hl_lock_check(lock, &error);
  stage_is(BETWEEN);
  (void)came_to(CHECK, status, &error, MAY_FAIL | MAY(HL_ELOST));
  stage_is(EXTEND);
  status = hl_lock_refresh(lock, 0, &error);
  stage_is(BETWEEN);
  (void)came_to(EXTEND, status, &error, MAY_FAIL | MAY(HL_ELOST) | MAY(HL_TIMEOUT));
  hold(*h, lock, HOLD_BOTH);
  stage_is(EXTEND);
  status = hl_lock_export(lock, &text, &error);
  stage_is(BETWEEN);
  if (!came_to(EXTEND, status, &error, MAY_FAIL | MAY(HL_ELOST))) return lock;
  if (!(*h)->ending) (*h)->ending = now_ns();
  hl_lock_free(lock);
  for (int tries = 0; tries < 2 && !imported; tries++) {
    *h = handle_new(R1, now_ns());
    stage_is(EXTEND);
    status = hl_import(manager, text, strlen(text), &options, &imported, &error);
    stage_is(BETWEEN);
    if (status == HL_OK) handle_granted(*h, imported);
    if (came_to(EXTEND, status, &error, MAY_FAIL | MAY(HL_ELOST))) hold(*h, imported, HOLD_BOTH);
  }
  free(text);
  return imported;
}

static void count_holder(void *context, const hl_holder *holder) {
  (void)holder;
  ++*(int *)context;
}

static void look(void) {
  int n = 0;
  hl_error error;
  hl_plan *plan = plan_make(manager, R3);
  if (!plan) return;
  stage_is(LOOK);
  int status = hl_manager_holders(manager, plan, count_holder, &n, &error);
  stage_is(BETWEEN);
  (void)came_to(LOOK, status, &error, MAY_FAIL | MAY(HL_TIMEOUT));
  /* A server shows who holds as it was up to 0.1 s ago. */
  if (status == HL_OK && n == 0 && !disturbed() && !shared->server)
    complain(area, "nobody is shown to hold r3");
  hl_plan_free(plan);
}

/* A start that is cancelled. */
static void cancelled(void) {
  hl_options options = HL_OPTIONS_INIT;
  hl_error error;
  hl_pending *pending = NULL;
  hl_plan *plan = plan_make(manager, R3);
  if (!plan) return;
  options.timeout = TIMEOUT_MS;
  stage_is(START);
  int status = hl_start(manager, plan, &options, &pending, &error);
  if (status == HL_OK) {
    struct pollfd p = {.fd = hl_pending_fd(pending, &error), .events = POLLIN};
    if (p.fd >= 0) (void)poll(&p, 1, CANCEL_AFTER_MS);
    stage_is(CANCEL);
    hl_pending_cancel(pending);
    hl_pending_free(pending);
  }
  stage_is(BETWEEN);
  (void)came_to(START, status, &error, MAY_FAIL);
  hl_plan_free(plan);
}

/* A start that is waited for; and freed without a release. */
static void waited_for(void) {
  hl_options options = HL_OPTIONS_INIT;
  hl_plan *plan = plan_make(manager, R1);
  hl_lock *lock = NULL;
  if (!plan) return;
  options.timeout = TIMEOUT_MS;
  for (int tries = 0; tries < 2 && !lock; tries++) {
    hl_error error;
    hl_pending *pending = NULL;
    holding *h = handle_new(R1, now_ns());
    stage_is(AGAIN);
    int status = hl_start(manager, plan, &options, &pending, &error);
    if (status == HL_OK) status = hl_pending_wait(pending, INT64_C(2) * TIMEOUT_MS, &lock, &error);
    if (status == HL_OK) handle_granted(h, lock);
    if (status == HL_OK) (void)believe(h, lock);
    stage_is(BETWEEN);
    (void)came_to(AGAIN, status, &error, MAY_FAIL | LEASES_MAY(MAY(HL_ELOST)));
    if (status && tries)
      complain(area, "a start failed again: %s (%s)", hl_status_name(status), error.message);
    if (status == HL_OK && !h->ending) h->ending = now_ns();
    stage_is(AGAIN);
    hl_pending_free(pending);
    hl_lock_free(lock);
    stage_is(BETWEEN);
  }
  hl_plan_free(plan);
}

static bool opened(void) {
  for (int tries = 0; tries < 2; tries++) {
    hl_error error;
    int status;
    stage_is(OPEN);
    manager = manager_open(area, area->hold_timeout, &status, &error);
    stage_is(BETWEEN);
    (void)came_to(OPEN, status, &error, MAY_FAIL);
    if (manager) return true;
    if (tries) complain(area, "open failed again: %s (%s)", hl_status_name(status), error.message);
  }
  return false;
}

static void script(void) {
  holding *h = NULL;
  if (!opened()) return;
  atomic_store(&area->opened, true);
  wait_for_peer();

  hl_lock *lock = acquired(ACQUIRE, R1, &h);
  if (lock) {
    hold(h, lock, HOLD);
    if (shared->leases || shared->with_leases)
      lock = renew_and_hand_over(&h, lock);
    else
      check_and_extend(h, lock);
  }
  look();
  released(RELEASE, h, lock, false);

  lock = acquired(WAIT, R3, &h); /* the peer gives it back when it sees this stage */
  if (lock) hold(h, lock, HOLD_BOTH);
  released(CONFIRM, h, lock, true);

  wait_for_peer();
  cancelled();
  waited_for();
  expect_nothing_held("before the manager is closed,");

  lock = acquired(LAST, R2, &h);
  if (lock) {
    (void)believe(h, lock);
    if (!h->ending) h->ending = now_ns();
  }
  stage_is(CLOSE);
  hl_manager_close(manager);
  hl_lock_free(lock);
  stage_is(BETWEEN);
  expect_nothing_held("after the manager is closed,");
}

/* -------------------------------------------------------- leftovers */

static int entries(const char *name) {
  DIR *directory = opendir(name);
  int n = 0;
  while (directory && readdir(directory)) n++;
  if (directory) (void)closedir(directory);
  return n;
}

static int mappings(void) {
  char line[512];
  int n = 0;
  FILE *file = fopen("/proc/self/maps", "r");
  while (file && fgets(line, sizeof line, file))
    n += area->directory[0] && strstr(line, area->directory);
  if (file) (void)fclose(file);
  return n;
}

static void show_descriptors(void) {
  for (int fd = 3; fd < 100; fd++) {
    char name[64], target[200];
    (void)snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(name, target, sizeof target - 1);
    if (n <= 0) continue;
    target[n] = '\0';
    complain(area, "descriptor %d is %s", fd, target);
  }
}

_Noreturn void client_main(lane_area *given) {
  area = given;
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  int descriptors = entries("/proc/self/fd");
  (void)ptrace(PTRACE_TRACEME, 0, NULL, NULL);
  (void)raise(SIGSTOP);
  script();
  /* Threads that a server keeps waiting end when its answer comes. */
  int left = 0, threads = 0;
  for (int64_t end = now_ns() + SOON; now_ns() < end; (void)usleep(1000)) {
    left = entries("/proc/self/fd") - descriptors;
    threads = entries("/proc/self/task") - 3;
    if (left == 0 && threads == 0) break;
  }
  if (left || threads)
    complain(area, "after closing there are %d descriptors and %d threads left", left, threads);
  if (left) show_descriptors();
  if (mappings())
    complain(area, "after closing there are %d mappings of its files left", mappings());
  exit(0);
}
