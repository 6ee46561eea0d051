/*
 * faults.c - the large faults, which one process of its own does at a time (fault.h),
 * and what the checker expects of each, with the promises of docs/locking.md and
 * docs/failover.md. Nothing here excuses two holders, or tokens
 * that do not grow.
 *
 * Of each one three times are measured, and have a limit:
 *
 *   believed   a lock that is lost is said to be held for so long after its loss
 *   late       a call that met the fault returned so long after its time-out
 *   served     after its end each worker was granted something within this
 *
 * It is begun only when all workers have been served since the last one.
 */
#include "soak.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* In milliseconds, on average: from the time that all are served to the next one. */
#define PAUSE_MS 1500
/* A fault that does not end. */
#define FAULT_HANGS (90 * S)
/* A holder behind the proxy hears of the loss when that has passed it on. */
#define PROXY_PASSES (1 * S)
/* The limits for a worker, until its next grant: holders let go after 6 s, a call waits for 5 s,
   connecting has 10 s; on a server, locks that were cut meanwhile are freed within a lease. */
#define SERVED_SERVER (25 * S)
#define SERVED_FILE (15 * S)

typedef struct fault_kind {
  const char *name;
  bool server, file; /* where it can be done */
  bool excuses;      /* calls may time out, though no worker holds */
} fault_kind;

static const fault_kind kinds[FAULTS] = {
    [CRASH] = {"crash", true, false, true},       [STOPSERVER] = {"stopserver", true, false, true},
    [READONLY] = {"readonly", true, false, true}, [ALTER] = {"alter", true, false, true},
    [FULL] = {"full", true, false, true},         [HOSTILE] = {"hostile", false, true, true},
    [DISK] = {"disk", false, true, true},         [LIMITS] = {"limits", true, true, true},
};

static bool wanted[FAULTS];

bool fault_add(const char *name, bool all) {
  bool found = all;
  for (int i = 0; i < FAULTS; i++)
    if (all || strcmp(name, kinds[i].name) == 0) {
      found = true;
      if (!(shared->server ? kinds[i].server : kinds[i].file)) continue;
      if (shared->leases_only && (i == HOSTILE || i == DISK)) continue;
      if ((i == CRASH || i == STOPSERVER) && !shared->control[0])
        (void)printf("soak: without --control there is no %s\n", kinds[i].name);
      else if (i == DISK && !shared->disk)
        (void)printf("soak: without a file system of its own, which only root can mount, there is "
                     "no disk\n");
      else
        wanted[i] = true;
    }
  return found;
}

bool faults_any(void) {
  for (int i = 0; i < FAULTS; i++)
    if (wanted[i]) return true;
  return false;
}

/* ------------------------------------------------------------------- windows */

static fault_window *window(unsigned i) { return &shared->windows[i % WINDOWS]; }

bool faults_excuse(int64_t from, int64_t to) {
  for (unsigned i = fault_first(); i < atomic_load(&shared->window_count); i++)
    if (fault_meets(window(i), from, to, patience(15 * S)) && kinds[window(i)->kind].excuses)
      return true;
  return false;
}

/* A process looks at the directory every 10 ms, by a clock that may be 10 ms late; and its thread
   may lose the processor between that look and its grant. */
static int64_t looks(void) { return patience(20 * MS); }

/* The files of the embedded store go, and the leases in them. */
static bool loses_leases(const fault_window *w) {
  if (w->kind == HOSTILE || w->kind == DISK)
    return atomic_load(&w->lost) || !atomic_load(&w->ended);
  return false;
}

int64_t faults_cut(int64_t from, int64_t to) {
  for (unsigned i = fault_first(); i < atomic_load(&shared->window_count); i++)
    if (loses_leases(window(i)) && fault_meets(window(i), from, to, looks()))
      return atomic_load(&window(i)->began);
  return INT64_MAX;
}

bool faults_meet(int64_t from, int64_t to) {
  for (unsigned i = fault_first(); i < atomic_load(&shared->window_count); i++)
    if (fault_meets(window(i), from, to, patience(1 * S))) return true;
  return false;
}

bool faults_lose_leases(int64_t from, int64_t to) {
  for (unsigned i = fault_first(); i < atomic_load(&shared->window_count); i++)
    if ((window(i)->kind == HOSTILE || window(i)->kind == DISK) &&
        fault_meets(window(i), from, to, looks()))
      return true;
  return false;
}

/* Until its next look a process grants in the directory that is gone, with that one's tokens. */
bool faults_new_tokens(int64_t from, int64_t to) {
  /* Nothing is known of the time before the windows that are remembered. */
  unsigned first = fault_first();
  if (first > 0 && from < atomic_load(&window(first)->began)) return true;
  for (unsigned i = fault_first(); i < atomic_load(&shared->window_count); i++)
    if (atomic_load(&window(i)->new_tokens) &&
        fault_meets(window(i), from, to, shared->server ? 0 : looks()))
      return true;
  return false;
}

bool faults_may_end(int status) {
  unsigned count = atomic_load(&shared->window_count);
  return count && atomic_load(&window(count - 1)->may_end) && WIFSIGNALED(status) &&
         WTERMSIG(status) == SIGBUS;
}

/* ------------------------------------------------- what is measured, and held to */

typedef struct measured {
  unsigned times;
  int64_t believed, late, served;
} measured;

static measured found[FAULTS];

static void longer(int64_t *longest, int64_t time) {
  if (time > *longest) *longest = time;
}

/* A handle that is asked looks once in this time. */
#define HANDLE_LOOKS (1 * MS)

/* How long a loss may be believed. What was overwritten is seen at once. */
static int64_t believes(const record *r, const fault_window *w) {
  if (r->proxied) return patience(PROXY_PASSES);
  return shared->server || atomic_load(&w->before) ? 0 : HANDLE_LOOKS;
}

/* The earliest time at which it may have been granted. A thread that was stopped, or has others to ask, asks late
   whether a pending is done. */
static int64_t granted_from(const record *r) {
  int64_t stopped = atomic_load(&shared->worker[r->worker].stopped) - r->stopped;
  int64_t from = r->kind == CALL_START ? r->asked : r->granted - stopped;
  return from > r->called ? from : r->called;
}

bool faults_unseen(const record *r) {
  if (shared->server || !r->granted || r->how != END_LOST || r->lease) return false;
  for (unsigned i = fault_first(); i < atomic_load(&shared->window_count); i++) {
    int64_t lost = atomic_load(&window(i)->lost), before = atomic_load(&window(i)->before);
    /* A handle that has been believed in for longer is of the next directory. */
    if (lost && (before ? before : lost) <= r->granted && granted_from(r) < lost + looks() &&
        atomic_load(&r->held) < lost + looks() + HANDLE_LOOKS)
      return true;
  }
  return false;
}

/* On the embedded store only a fault after its call loses a lock: a lock in a directory that was
   gone before is not granted, but for a moment. */
static void check_loss(const record *r) {
  if (shared->server || !r->granted || r->how != END_LOST || r->lease || faults_unseen(r)) return;
  for (unsigned i = fault_first(); i < atomic_load(&shared->window_count); i++) {
    int64_t lost = atomic_load(&window(i)->lost);
    if (fault_meets(window(i), r->called, r->ended, 0) && (!lost || lost >= r->called)) return;
  }
  violation("granted and lost, and nothing was done to it since it was called");
  show_record("it", r);
}

void faults_check(const record *r) {
  check_loss(r);
  for (unsigned i = fault_first(); i < atomic_load(&shared->window_count); i++) {
    const fault_window *w = window(i);
    measured *m = &found[w->kind];
    int64_t lost = atomic_load(&w->lost), shut = atomic_load(&w->shut),
            opened = atomic_load(&w->opened);
    int64_t held = atomic_load(&r->held), before = atomic_load(&w->before);
    if (lost && !r->lease && r->granted && r->granted < (before ? before : lost) && held > lost) {
      longer(&m->believed, held - lost);
      if (held - lost > believes(r, w)) {
        violation("%s (%s): lost at %.6f, and believed for %.3f ms more", kinds[w->kind].name,
                  w->what, seconds_at(lost), (double)(held - lost) / 1e6);
        show_record("it", r);
      }
    }
    /* An extend that wants no more than is held asks no store, and keeps the token. */
    bool extends = r->kind == CALL_EXTEND || r->kind == CALL_START_EXTEND;
    /* A file that was replaced or cut is seen by the next look, one that was overwritten at once. */
    int64_t seen = shut && !shared->server && !before ? shut + looks() : shut;
    if (r->granted && r->token != r->before && shut && r->called > seen && r->granted < opened &&
        !(extends && atomic_load(&w->extends))) {
      violation("%s (%s): granted, and nothing may be from %.6f to %.6f", kinds[w->kind].name,
                w->what, seconds_at(shut), seconds_at(opened));
      show_record("it", r);
    }
    if (r->how == END_DIED || r->kind == CALL_IMPORT || r->kind == CALL_REVOKE ||
        !fault_meets(w, r->called, r->granted ? r->granted : r->ended, 0))
      continue;
    int64_t stopped = atomic_load(&shared->worker[r->worker].stopped) - r->stopped;
    longer(&m->late, (r->granted ? r->granted : r->ended) - r->called - r->timeout * MS - stopped);
  }
}

/* After the end of the last one: who has not been granted anything since. */
static bool unserved[WORKERS];
static pid_t unserved_pid[WORKERS];
static int64_t unserved_stopped[WORKERS];
static fault_window *last;
static pid_t running;
static int64_t running_since;

static void serve_begin(void) {
  for (int i = 0; i < shared->workers; i++) {
    unserved[i] = true;
    unserved_pid[i] = atomic_load(&shared->worker[i].pid);
    unserved_stopped[i] = atomic_load(&shared->worker[i].stopped);
  }
}

static void serve_turn(int64_t now) {
  int64_t limit = shared->server ? SERVED_SERVER : SERVED_FILE;
  for (int i = 0; i < shared->workers; i++) {
    worker_area *area = &shared->worker[i];
    if (!unserved[i]) continue;
    int64_t ended = atomic_load(&last->ended), granted = atomic_load(&area->granted_at);
    int64_t stopped = atomic_load(&area->stopped) - unserved_stopped[i];
    if (atomic_load(&area->pid) != unserved_pid[i] ||
        atomic_load(&area->stopped) < unserved_stopped[i]) {
      unserved[i] = false; /* killed meanwhile */
    } else if (granted > ended) {
      unserved[i] = false;
      longer(&found[last->kind].served, granted - ended - stopped);
    } else if (now - ended > patience(limit) + stopped + 2 * shared->hold_timeout * MS) {
      unserved[i] = false;
      violation("%s (%s): %.1f s after its end worker %d has not been granted anything",
                kinds[last->kind].name, last->what, (double)(now - ended) / 1e9, i);
    }
  }
}

bool faults_settled(void) {
  for (int i = 0; i < shared->workers; i++)
    if (unserved[i]) return false;
  return !running;
}

bool faults_reap(pid_t pid, int status) {
  if (pid != running) return false;
  running = 0;
  last = window(atomic_load(&shared->window_count) - 1);
  if (status)
    violation("%s (%s): could not be done or undone, status 0x%x", kinds[last->kind].name,
              last->what, (unsigned)status);
  if (!atomic_load(&last->ended)) atomic_store(&last->ended, now_ns());
  found[last->kind].times++;
  report_fault(kinds[last->kind].name, last->who, atomic_load(&last->began),
               atomic_load(&last->ended));
  say("%s%s%s from %.3f to %.3f%s", kinds[last->kind].name, last->what[0] ? ": " : "", last->what,
      seconds_at(atomic_load(&last->began)), seconds_at(atomic_load(&last->ended)),
      atomic_load(&last->lost) ? ", what was held is lost" : "");
  if (last->kind == CRASH) {
    int64_t end = now_ns() + patience(20 * S);
    while (!server_open_again() && now_ns() < end) (void)usleep(20000);
  }
  serve_begin();
  return true;
}

void faults_turn(dice *d, bool begin) {
  static int next_kind = -1;
  static int64_t at;
  int64_t now = now_ns();
  if (shared->server && !running && server_bystanders_lost())
    violation("connections of others were ended, which nobody was asked to");
  if (running && now - running_since > patience(FAULT_HANGS)) {
    violation("%s does not end", kinds[window(atomic_load(&shared->window_count) - 1)->kind].name);
    running_since = now;
  }
  if (last && !running) serve_turn(now);
  if (!begin || !faults_any() || !faults_settled()) {
    at = 0;
    return;
  }
  if (!at) at = now + roll_below(d, 2 * PAUSE_MS) * MS;
  if (now < at) return;
  if (next_kind < 0) next_kind = roll_below(d, FAULTS);
  do next_kind = (next_kind + 1) % FAULTS;
  while (!wanted[next_kind]);
  fault_window *w = window(atomic_load(&shared->window_count));
  memset(w, 0, sizeof *w);
  w->kind = next_kind;
  w->who = -1;
  atomic_store(&w->began, now);
  (void)atomic_fetch_add(&shared->window_count, 1u);
  at = 0;
  running_since = now;
  running = process_start("fault", next_kind, roll(d));
}

void faults_summary(FILE *to) {
  for (int i = 0; i < FAULTS; i++) {
    const measured *m = &found[i];
    if (!m->times) continue;
    (void)fprintf(to,
                  "  %-24s %u times; a loss believed for %.3f s more, a call %.3f s after its "
                  "time-out, all served %.3f s after its end\n",
                  kinds[i].name, m->times, (double)m->believed / 1e9, (double)m->late / 1e9,
                  (double)m->served / 1e9);
  }
}
