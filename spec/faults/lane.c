/*
 * lane.c - one lane: a client, a peer, and one fault after the other. This file does the fault
 * at a point, and judges its outcome.
 */
#include "faults.h"

#include "stacks.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

/* A client that has not ended by then hangs: each of its calls has a shorter limit. */
#define RUN_LIMIT (6 * SOON)
/* How long a client of the embedded store stands still. The client's locks have no end. */
#define STILL (120 * MS)
/* For the peer to stand in line before the client is killed. */
#define IN_LINE (2 * MS)

static lane_area *area;
static int lane, runs;
static pid_t peer;

void complain(lane_area *of, const char *format, ...) {
  va_list arguments;
  int i = atomic_fetch_add(&of->complaints, 1);
  if (i >= COMPLAINTS) return;
  va_start(arguments, format);
  (void)vsnprintf(of->complaint[i], MESSAGE, format, arguments);
  va_end(arguments);
}

void peer_ended(lane_area *of, int status) {
  atomic_store(&of->peer, 0);
  complain(of, "the peer ended with status 0x%x", (unsigned)status);
}

static void give_order(order o) {
  unsigned before = atomic_load(&area->order);
  atomic_store(&area->order, before - before % ORDERS + ORDERS + o);
}

/* False: the peer has ended, and that is among the complaints. */
static bool peer_lives(void) {
  int status = 0;
  if (atomic_load(&area->peer) && waitpid(peer, &status, WNOHANG) == peer) peer_ended(area, status);
  return atomic_load(&area->peer) != 0;
}

/* True: the peer had everything, at or after `since`, before the deadline. */
static bool peer_had_all(int64_t since, int64_t deadline) {
  while (atomic_load(&area->grabbed_at) < since) {
    if (now_ns() > deadline || !peer_lives()) return false;
    (void)usleep(200);
  }
  return true;
}

static void worst(mode m, int64_t took, const point *p) {
  int64_t before = atomic_load(&shared->worst[m]);
  while (took > before)
    if (atomic_compare_exchange_weak(&shared->worst[m], &before, took)) {
      (void)point_show(p, shared->worst_at[m]);
      return;
    }
}

/* ---------------------------------------------------------------- the faults */

static int64_t killed_at; /* 0: not */

static void do_kill(tracer *client, const point *p) {
  int64_t began = now_ns();
  area->dirty = true;
  give_order(GRAB);
  while (!atomic_load(&area->asks) && atomic_load(&area->grabbed_at) < began &&
         now_ns() < began + S)
    (void)usleep(100);
  (void)usleep(IN_LINE / 1000);
  killed_at = now_ns();
  (void)kill(client->pid, SIGKILL);
  (void)trace_run(client, killed_at + SOON);
  if (!peer_had_all(began, killed_at + SOON))
    complain(area, "%.0f s after the client was killed the peer cannot get what it had",
             SOON / 1e9);
  int64_t had = atomic_load(&area->grabbed_at);
  worst(KILL, had > killed_at ? had - killed_at : 0, p);
}

static void do_stop(tracer *client, const point *p) {
  int64_t began = now_ns(), limit = area->hold_timeout * MS;
  atomic_store(&area->frozen, true);
  give_order(GRAB);
  if (shared->silence_ends) {
    if (!peer_had_all(began, began + limit + SOON))
      complain(
          area,
          "the client stands still for %.0f s longer than hold_timeout, and the peer gets nothing",
          SOON / 1e9);
    worst(STOP, atomic_load(&area->grabbed_at) - began, p);
    while (now_ns() < began + limit + STILL) (void)usleep(1000);
  } else {
    while (now_ns() < began + STILL) (void)usleep(1000);
  }
  atomic_store(&area->frozen, false);
  atomic_store(&area->disturbed, true);
  give_order(RACE);
  trace_continue(client);
}

static void do_fail(tracer *client) {
  atomic_store(&area->disturbed, true);
  give_order(RACE);
  trace_continue(client);
}

/* ------------------------------------------------------------------- judging */

static void judge_pair(const holding *h, const holding *g) {
  int64_t h_held = atomic_load(&h->held), g_held = atomic_load(&g->held);
  if (!nodes_conflict(h->nodes, g->nodes)) return;
  int64_t from = h->granted > g->granted ? h->granted : g->granted;
  int64_t until = h_held < g_held ? h_held : g_held;
  if (h_held && g_held && from < until)
    complain(area, "two holders for %.3f ms: the client held %d, the peer %d",
             (double)(until - from) / 1e6, h->nodes, g->nodes);
  /* A failed call may lose a lock before its time. */
  int64_t end = h->promised;
  if (h->ending && h->ending < end) end = h->ending;
  if (killed_at && killed_at < end) end = killed_at;
  if (area->mode != FAIL && g->granted > h->granted && g->granted < end)
    complain(
        area,
        "the peer was granted %d, %.3f ms before the client's lock could end, as remaining() said",
        g->nodes, (double)(end - g->granted) / 1e6);
  if (h_held && g_held && (h->granted < g->granted) != (h->token < g->token))
    complain(
        area,
        "the token of the later holder is not greater: %016llx of the client, %016llx of the peer",
        (unsigned long long)h->token, (unsigned long long)g->token);
}

static void judge(void) {
  for (int i = 0; i < atomic_load(&area->handles); i++)
    for (int j = 0; j < atomic_load(&area->grants); j++)
      judge_pair(&area->handle[i], &area->grant[j]);
}

static void judge_end(const tracer *client, trace_event event) {
  char call[32];
  int in = atomic_load(&area->stage);
  if (event == TRACE_LATE)
    complain(area, "the client hangs in stage %d, whose last call that was seen is %s", in,
             call_name(client->last[in], call));
  else if (WIFSIGNALED(client->status) && !killed_at)
    complain(area, "the client died of signal %d in stage %d", WTERMSIG(client->status), in);
  else if (WIFEXITED(client->status) && WEXITSTATUS(client->status) != 0)
    complain(area, "the client ended with status %d in stage %d", WEXITSTATUS(client->status), in);
}

/* While it is on, it interrupts each wait, so that trace_run sees its deadline. */
static void timer_set(bool on) {
  const suseconds_t us = on ? 50000 : 0;
  const struct itimerval often = {.it_interval.tv_usec = us, .it_value.tv_usec = us};
  (void)setitimer(ITIMER_REAL, &often, NULL);
}

static void thread_show(const char *line) { complain(area, "%s", line); }

static void show_stacks(pid_t pid) {
  timer_set(false);
  stacks_of(pid, thread_show);
  timer_set(true);
}

static void report(const tracer *client, const point *p) {
  char name[64], call[32];
  int n = atomic_load(&area->complaints);
  if (n == 0) return;
  (void)atomic_fetch_add(&shared->violations, 1u);
  for (int i = 0; i < n && i < COMPLAINTS; i++)
    (void)printf("VIOLATION at %s (%s): %s\n", p ? point_show(p, name) : "nothing",
                 call_name(client->call, call), area->complaint[i]);
  (void)fflush(stdout);
}

/* --------------------------------------------------------------------- a run */

static void files_remove(const char *path, const char *prefix) {
  DIR *directory = opendir(path);
  struct dirent *file;
  while (directory && (file = readdir(directory)))
    if (strncmp(file->d_name, prefix, strlen(prefix)) == 0)
      (void)unlinkat(dirfd(directory), file->d_name, 0);
  if (directory) (void)closedir(directory);
}

static void directory_remove(const char *path) {
  files_remove(path, "");
  (void)rmdir(path);
}

/* On a store that has only leases: its path or prefix, and that of each store of a quorum, is of this run. */
static void dsn_of_run(int run) {
  size_t n = 0;
  for (const char *at = shared->base; *at && n < sizeof area->dsn;) {
    size_t part = strcspn(at, ";");
    bool opens = at == shared->base && at[part]; /* a quorum's strategy */
    n += (size_t)snprintf(area->dsn + n, sizeof area->dsn - n, "%s%.*s", n ? ";" : "", (int)part,
                          at);
    if (!opens && n < sizeof area->dsn)
      n += (size_t)snprintf(area->dsn + n, sizeof area->dsn - n, "-%d-%d-%d", (int)shared->pid,
                            lane, run);
    at += part + (at[part] != 0);
  }
}

static void prepare(const point *p, int variant) {
  memset(area->dsn, 0, sizeof *area - offsetof(lane_area, dsn));
  area->mode = p ? p->mode : MODES;
  area->failure = p ? p->failure : 0;
  bool ends = area->mode == KILL || area->mode == STOP;
  if (shared->leases)
    area->hold_timeout = ends ? LEASE_MS : LONG_LEASE_MS;
  else
    area->hold_timeout =
        shared->server && area->mode == STOP ? SHORT_HOLD_TIMEOUT_MS : HOLD_TIMEOUT_MS;
  if (shared->server) {
    (void)snprintf(area->dsn, sizeof area->dsn, "%.400s" DATABASE "%s", shared->base,
                   (int)shared->pid, lane, shared->options[variant]);
    return;
  }
  area->fresh = variant != 0;
  int run = area->fresh ? ++runs : 0;
  if (shared->leases) {
    dsn_of_run(run);
    return;
  }
  (void)snprintf(area->directory, sizeof area->directory, "%.200s-%d-%d", shared->base, lane, run);
  (void)snprintf(area->dsn, sizeof area->dsn, "file:%s", area->directory);
}

/* Shows where a client that hangs is, and ends it. */
static void end_hanging(tracer *client) {
  stacks_of_kernel(client->pid, thread_show);
  trace_detach(client);
  show_stacks(client->pid);
  area->dirty = true;
  killed_at = now_ns();
  (void)kill(client->pid, SIGKILL);
  (void)trace_run(client, killed_at + SOON);
}

/* False: the peer hangs or has ended, and that is among the complaints. */
static bool peer_rests(int64_t deadline) {
  give_order(REST);
  while (peer_lives() && atomic_load(&area->obeyed) != atomic_load(&area->order)) {
    if (now_ns() > deadline) {
      complain(area, "the peer hangs");
      show_stacks(peer);
      return false;
    }
    (void)usleep(200);
  }
  return peer_lives();
}

void lane_run(const point *p, int variant, census *found) {
  tracer client;
  prepare(p, variant);
  killed_at = 0;
  int64_t began = now_ns();
  give_order(BUSY);
  trace_start(&client, area, p, found);
  trace_event event = trace_run(&client, began + RUN_LIMIT);
  if (event == TRACE_POINT) {
    switch (p->mode) {
    case KILL: do_kill(&client, p); break;
    case STOP: do_stop(&client, p); break;
    default: do_fail(&client);
    }
    if (p->mode != KILL)
      event = trace_run(&client, began + RUN_LIMIT);
    else
      event = TRACE_END;
  }
  judge_end(&client, event);
  if (event == TRACE_LATE) end_hanging(&client);
  int64_t ended = now_ns();
  give_order(GRAB);
  if (!peer_had_all(ended, ended + SOON))
    complain(area, "the client has ended, and the peer cannot get what it had");
  if (p && p->mode == FAIL && client.passed) worst(FAIL, atomic_load(&area->grabbed_at) - ended, p);
  bool rests = peer_rests(ended + 3 * SOON);
  judge();
  report(&client, p);
  if (!rests) exit(0); /* the lane needs a peer; its violation is counted */
  if (area->fresh && *area->directory)
    directory_remove(area->directory);
  else if (area->dirty && *area->directory)
    files_remove(area->directory, "tmp-"); /* a sweep spares young ones */
  if (p) (void)atomic_fetch_add(&shared->done[p->mode], 1u);
  if (p && !client.passed) (void)atomic_fetch_add(&shared->missed, 1u);
}

/* ------------------------------------------------------------------- a lane */

static void tick(int number) { (void)number; }

/* Where it crashed, for addr2line. */
static void crashed(int number) {
  void *frames[40];
  int n = backtrace(frames, 40);
  for (int i = 0; i < n; i++) {
    Dl_info info = {0};
    (void)dladdr(frames[i], &info);
    complain(area, "signal %d: %s + 0x%lx (%s)", number, info.dli_fname,
             (unsigned long)((char *)frames[i] - (char *)info.dli_fbase),
             info.dli_sname ? info.dli_sname : "");
  }
  (void)signal(number, SIG_DFL);
  (void)raise(number);
}

/* The lane's processes say where they crash. */
static void crashes_show(void) {
  void *loaded[1];
  (void)backtrace(loaded, 1);
  (void)signal(SIGSEGV, crashed);
  (void)signal(SIGBUS, crashed);
  (void)signal(SIGABRT, crashed);
}

void lane_open(int number, const char *admin) {
  lane = number;
  area = &shared->lane[lane];
  memset(area, 0, sizeof *area);
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  crashes_show();
  (void)fflush(stdout);
  peer = fork();
  if (peer < 0) abort();
  if (peer == 0) peer_main(area, lane, admin);
  atomic_store(&area->peer, peer);
  (void)sigaction(SIGALRM, &(const struct sigaction){.sa_handler = tick}, NULL);
  timer_set(true);
}

void lane_close(void) {
  char path[256];
  give_order(QUIT);
  while (waitpid(peer, NULL, 0) < 0 && errno == EINTR) {}
  if (shared->server || shared->leases) return;
  (void)snprintf(path, sizeof path, "%.200s-%d-0", shared->base, lane);
  directory_remove(path);
}
