/*
 * main.c - which points there are, and the lanes that go through them.
 */
#include "faults.h"

#include "servers.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define PROGRESS_EVERY (10 * S)
/* After so many nothing more is learnt. */
#define VIOLATIONS_MAX 20

shared_area *shared;

static const char *admin, *only;
static bool wanted[MODES] = {true, true, true};
static int errno_wanted; /* 0: all */
static point *points;
static size_t point_count;

/* -------------------------------------------------------------------- names */

static const char *const mode_names[MODES] = {"kill", "stop", "fail"};
static const char *const stage_names[STAGES] = {
    "between", "open", "acquire", "hold",  "check",  "extend", "hold-both", "look",
    "release", "wait", "confirm", "start", "cancel", "again",  "last",      "close"};

const char *point_show(const point *p, char out[64]) {
  (void)snprintf(out, 64, "%s:%s.%d:%s:%d", mode_names[p->mode], stage_names[p->stage], p->number,
                 p->mode == FAIL ? strerrorname_np(p->failure)
                 : p->after      ? "exit"
                                 : "entry",
                 p->variant);
  return out;
}

static int name_find(const char *const *names, int n, const char *name) {
  for (int i = 0; i < n; i++)
    if (strcmp(names[i], name) == 0) return i;
  return -1;
}

static int errno_read(const char *text) {
  for (int e = 1; e < 134; e++) {
    const char *name = strerrorname_np(e);
    if (name && strcmp(name, text) == 0) return e;
  }
  return 0;
}

/* Reads a point as point_show writes it; the last parts may be missing. */
static bool point_read(const char *text, point *p) {
  char mode_name[16], stage_name[16], how[32] = "entry";
  *p = (point){0};
  if (sscanf(text, "%15[^:]:%15[^.].%d:%31[^:]:%d", mode_name, stage_name, &p->number, how,
             &p->variant) < 3)
    return false;
  int m = name_find(mode_names, MODES, mode_name), s = name_find(stage_names, STAGES, stage_name);
  if (m < 0 || s < 0 || p->variant < 0 || p->variant > 1) return false;
  p->mode = (mode)m;
  p->stage = (stage)s;
  p->after = strcmp(how, "exit") == 0;
  if (m == FAIL) p->failure = errno_read(how);
  return m != FAIL || p->failure;
}

/* -------------------------------------------------------------------- points */

static void point_add(point p) {
  points = realloc(points, (point_count + 1) * sizeof *points);
  if (!points) abort();
  points[point_count++] = p;
}

static void points_of_call(const census *c, int variant, stage s, int number) {
  point p = {.stage = s, .number = number, .variant = variant};
  for (int m = KILL; m <= STOP; m++)
    for (int after = 0; after < 2 && wanted[m]; after++) {
      p.mode = (mode)m;
      p.after = after;
      point_add(p);
    }
  p.mode = FAIL;
  p.after = false;
  for (const int *f = c->failures[s][number]; f && *f && wanted[FAIL]; f++) {
    p.failure = *f;
    if (!errno_wanted || *f == errno_wanted) point_add(p);
  }
}

static int point_compare(const void *a, const void *b) {
  const point *p = a, *q = b;
  return p->turn < q->turn       ? -1
         : p->turn > q->turn     ? 1
         : p->random < q->random ? -1
                                 : p->random > q->random;
}

/* Puts the points in a random order, which follows from the seed. But each stage has its turn in
   each mode, so that in a short time the many calls of a log-in leave time for the calls that
   lock rows. */
static void points_shuffle(void) {
  uint64_t state = shared->seed * UINT64_C(0x9E3779B97F4A7C15) + 1;
  int turns[MODES][STAGES] = {0};
  for (int pass = 0; pass < 2; pass++) {
    for (size_t i = 0; i < point_count; i++) {
      state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
      points[i].random = state * UINT64_C(2685821657736338717);
      points[i].turn = pass ? turns[points[i].mode][points[i].stage]++ : 0;
    }
    qsort(points, point_count, sizeof *points, point_compare);
  }
}

/* ------------------------------------------------------------------ processes */

static pid_t start(void) {
  (void)fflush(stdout);
  pid_t pid = fork();
  if (pid < 0) abort();
  if (pid == 0) (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  return pid;
}

static int ended(pid_t pid) {
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {}
  return status;
}

/* A client library belongs into a process of its own: clients are children of lanes, and lanes
   of this process. */
static void administer(bool begin) {
  pid_t pid = shared->server ? start() : -1;
  if (pid == 0) {
    server_connect(admin);
    for (int i = 0; begin && i < shared->lanes; i++) server_provision(admin, i);
    int left = begin ? 0 : server_transactions();
    for (int64_t until = now_ns() + SOON; left && now_ns() < until; left = server_transactions())
      (void)usleep(250000);
    if (left) (void)printf("VIOLATION at the end: %d transactions are left at the server\n", left);
    for (int i = 0; !begin && !left && i < shared->lanes; i++) server_remove(i);
    exit(left ? 1 : 0);
  }
  int status = pid > 0 ? ended(pid) : 0;
  if (status && begin) exit(2);
  if (status) (void)atomic_fetch_add(&shared->violations, 1u);
}

static void survey(census *found) {
  pid_t pid = start();
  if (pid == 0) {
    lane_open(0, admin);
    lane_run(NULL, 0, NULL); /* makes what the others find */
    for (int variant = 0; variant < 2; variant++) lane_run(NULL, variant, &found[variant]);
    lane_close();
    exit(0);
  }
  if (ended(pid) || atomic_load(&shared->violations)) {
    (void)printf("the script does not go through without a fault\n");
    exit(1);
  }
}

static _Noreturn void lane_main(int lane) {
  lane_open(lane, admin);
  for (size_t i = (size_t)lane; i < point_count; i += (size_t)shared->lanes) {
    if ((shared->end && now_ns() > shared->end) ||
        atomic_load(&shared->violations) >= VIOLATIONS_MAX)
      break;
    lane_run(&points[i], points[i].variant, NULL);
  }
  lane_close();
  exit(0);
}

static void progress(int64_t began) {
  unsigned kills = atomic_load(&shared->done[KILL]), stops = atomic_load(&shared->done[STOP]);
  unsigned fails = atomic_load(&shared->done[FAIL]);
  (void)printf("%5.0f s: %u of %zu points: %u kills, %u stops, %u failures; %u not reached; "
               "violations: %u\n",
               (double)(now_ns() - began) / 1e9, kills + stops + fails, point_count, kills, stops,
               fails, atomic_load(&shared->missed), atomic_load(&shared->violations));
  (void)fflush(stdout);
}

static void go(int64_t began) {
  pid_t pids[LANES] = {0};
  int64_t next = now_ns() + PROGRESS_EVERY;
  int running = shared->lanes;
  for (int i = 0; i < shared->lanes; i++)
    if ((pids[i] = start()) == 0) lane_main(i);
  while (running > 0) {
    (void)usleep(20000);
    for (int i = 0; i < shared->lanes; i++) {
      int status = 0;
      if (!pids[i] || waitpid(pids[i], &status, WNOHANG) == 0) continue;
      if (status) {
        (void)printf("VIOLATION: lane %d ended with status 0x%x\n", i, (unsigned)status);
        (void)atomic_fetch_add(&shared->violations, 1u);
      }
      pids[i] = 0;
      running--;
    }
    if (now_ns() < next) continue;
    progress(began);
    next = now_ns() + PROGRESS_EVERY;
  }
}

static void summary(int64_t began) {
  progress(began);
  for (int m = KILL; m < MODES; m++)
    if (atomic_load(&shared->worst[m]))
      (void)printf("  %s: %u points; the peer had everything after %.0f ms at most (%s)\n",
                   mode_names[m], atomic_load(&shared->done[m]),
                   (double)atomic_load(&shared->worst[m]) / 1e6, shared->worst_at[m]);
}

/* ----------------------------------------------------------------- the options */

static int usage(void) {
  (void)fprintf(
      stderr,
      "usage: faults DSN [--admin=DSN] [--seconds=N] [--seed=N] [--lanes=N] "
      "[--modes=kill,stop,fail] [--errno=NAME] [--only=POINT] [--leases=yes]\n"
      "without --seconds: every point; --leases: the client makes a session lock a lease\n");
  return 2;
}

static bool dsn_take(const char *text) {
  hl_dsn dsn;
  const server_kind *kind = server_kind_of(text);
  shared->server = shared->silence_ends = kind != NULL;
  shared->leases = !shared->server && strncmp(text, "file:", 5) != 0;
  if (!shared->server) {
    bool served = shared->leases && !strstr(text, "sqlite:");
    shared->silence_ends = served;
    (void)snprintf(shared->base, sizeof shared->base, "%s%s", text + (shared->leases ? 0 : 5),
                   !served             ? ""
                   : strchr(text, '?') ? "&prefix=faults"
                                       : "?prefix=faults");
    return true;
  }
  if (!admin || !server_dsn(kind, text, &dsn)) return false;
  (void)snprintf(shared->user, sizeof shared->user, "%s", dsn.user);
  (void)snprintf(shared->base, sizeof shared->base, "%s://%s:%s@%s:%u/", kind->name, dsn.user,
                 dsn.password, dsn.host, dsn.port);
  const char *table = kind->buckets ? "&table=" TABLE : "";
  (void)snprintf(shared->options[0], sizeof shared->options[0], "?%s&connect_timeout=%d%s",
                 kind->plain, (int)(SOON / S), table);
  (void)snprintf(shared->options[1], sizeof shared->options[1], "?%s&connect_timeout=%d%s",
                 kind->secure, (int)(SOON / S), table);
  hl_dsn_dispose(&dsn);
  return true;
}

int main(int argc, char **argv) {
  int64_t began = now_ns(), seconds = 0;
  size_t census_size = 2 * sizeof(census);
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  census *found =
      mmap(NULL, census_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED || found == MAP_FAILED || argc < 2) return usage();
  shared->pid = getpid();
  shared->seed = (uint64_t)began % 1000000;
  for (int i = 2; i < argc; i++) {
    const char *value = strchr(argv[i], '=');
    if (!value) return usage();
    value++;
    if (strcmp(argv[i], "--leases=yes") == 0)
      shared->with_leases = true;
    else if (strncmp(argv[i], "--admin=", 8) == 0)
      admin = value;
    else if (strncmp(argv[i], "--seconds=", 10) == 0)
      seconds = atoll(value);
    else if (strncmp(argv[i], "--seed=", 7) == 0)
      shared->seed = strtoull(value, NULL, 10);
    else if (strncmp(argv[i], "--lanes=", 8) == 0)
      shared->lanes = atoi(value);
    else if (strncmp(argv[i], "--only=", 7) == 0)
      only = value;
    else if (strncmp(argv[i], "--errno=", 8) == 0)
      errno_wanted = errno_read(value);
    else if (strncmp(argv[i], "--modes=", 8) == 0)
      for (int m = 0; m < MODES; m++) wanted[m] = strstr(value, mode_names[m]) != NULL;
    else
      return usage();
  }
  /* All stores run side by side. More lanes would let a server starve on two processors: a peer that
     the server does not answer in time looks like one that is refused. */
  if (!shared->lanes) shared->lanes = only ? 1 : 2;
  if (shared->lanes < 1 || shared->lanes > LANES || !dsn_take(argv[1])) return usage();
  administer(true);
  survey(found);
  if (only) {
    point p;
    if (!point_read(only, &p)) return usage();
    point_add(p);
  } else {
    for (int variant = 0; variant < 2; variant++)
      for (int s = OPEN; s < STAGES; s++)
        for (int n = 1; n <= found[variant].count[s] && n < CALLS; n++)
          points_of_call(&found[variant], variant, (stage)s, n);
    points_shuffle();
  }
  (void)printf("faults: seed %llu, %d lanes, %zu points; system calls of a run:",
               (unsigned long long)shared->seed, shared->lanes, point_count);
  for (int s = OPEN; s < STAGES; s++) (void)printf(" %s %d", stage_names[s], found[0].count[s]);
  (void)printf("\n");
  if (seconds) shared->end = now_ns() + seconds * S;
  go(began);
  administer(false);
  summary(began);
  return atomic_load(&shared->violations) > 0;
}
