/*
 * main.c - a soak run: starts the workers, disturbs them, has the history checked,
 * and says every few seconds how it goes.
 *
 *   soak DSN [--admin=DSN] [--control=COMMAND] [--seconds=30] [--seed=N] [--workers=3] [--threads=7]
 *        [--mood=mixed|large|narrow] [--leases=yes|no] [--lua=SCRIPT] [--report=FILE] [--faults=NAME,... | none | all]
 *
 * The space has leases, which workers use beside sessions, or it has none, and they use only these: as --leases says,
 * else as the seed does, on three stores of four; the first line tells it.
 *
 *   kill    kill -9 of a worker, which is started again
 *   stop    SIGSTOP of a worker for up to twice the hold_timeout
 *   fork    children of workers, with threads and locks
 *   cut     every second worker goes through a proxy that is slow, goes silent, resets
 *   sever   KILL of a random connection by an administrator
 *   query   KILL QUERY of a random statement
 *   extend  calls of hl_lock_extend (not a fault; the only calls that may deadlock)
 *   clock   the workers' wall clock jumps by hours
 *
 * and the large ones of faults.c: crash, stopserver, readonly, alter, full of a server
 * (the first two by COMMAND, which is run with kill, start or pid behind it; see
 * spec/support/servers.sh), hostile and disk of the embedded store, limits of both.
 *
 * On SQLite, Redis, Memcached and a quorum there are leases only, and neither the faults of the directory or the server
 * nor the worker in Lua.
 *
 * Every REST_EVERY all workers let go, and a process of its own must get everything.
 * With --lua one more worker is a program in Lua, run by $HIERLOCK_LUA.
 * The report (report.c) is written when there are violations, and where it is asked for, always.
 * Exit: 0 no violation, 1 violations, 2 it could not run.
 */
#include "soak.h"

#include "servers.h"
#include "stacks.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define SWEEP_EVERY S
#define PROGRESS_EVERY (5 * S)
#define REST_EVERY (20 * S)
#define MOOD_EVERY (4 * S)

static struct { bool kill, stop, fork, cut, sever, query, extend, clock; } faults;

static const char *program;
static char area_name[64];
static char clock_library[512];
static int64_t seconds = 30;
static bool only_mood;
static int leases_wanted = -1; /* -1: as the seed says */
static const char *report;
static const char *lua_script; /* the last worker runs it; or NULL */
static dice main_dice;
static pid_t proxy_pid;
static uint64_t rounds; /* processes started so far */
static int64_t stopped_since[WORKERS];
static uint64_t kills, stops, severed, interrupted, rests;
static int64_t longest_rest;

static void die(const char *what) {
  (void)fprintf(stderr, "soak: %s: %s\n", what, strerror(errno));
  exit(2);
}

/* ----------------------------------------------------------------- processes */

/* A program of Lua's: see lua/worker.lua. */
static pid_t start_lua(int i, uint64_t round) {
  char first[32], second[32];
  const char *lua = getenv("HIERLOCK_LUA");
  if (!lua) lua = "lua5.4";
  (void)snprintf(first, sizeof first, "%d", i);
  (void)snprintf(second, sizeof second, "%llu", (unsigned long long)round);
  pid_t pid = fork();
  if (pid < 0) die("fork");
  if (pid == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (shared->clock_jumps) (void)setenv("LD_PRELOAD", clock_library, 1);
    (void)execlp(lua, lua, lua_script, area_name, first, second, (char *)NULL);
    _exit(2);
  }
  return pid;
}

/* This program again, in a role; main itself never uses the library. */
pid_t process_start(const char *role, long a, uint64_t b) {
  char first[32], second[32];
  (void)snprintf(first, sizeof first, "%ld", a);
  (void)snprintf(second, sizeof second, "%llu", (unsigned long long)b);
  pid_t pid = fork();
  if (pid < 0) die("fork");
  if (pid == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (shared->clock_jumps && strcmp(role, "worker") == 0)
      (void)setenv("LD_PRELOAD", clock_library, 1);
    (void)execl("/proc/self/exe", program, role, area_name, first, second, (char *)NULL);
    _exit(2);
  }
  return pid;
}

static void worker_start(int i) {
  atomic_store(&shared->worker[i].threads_at_rest, 0);
  atomic_store(&shared->worker[i].attached, false);
  rounds++;
  bool lua = lua_script && i == shared->workers - 1;
  atomic_store(&shared->worker[i].pid,
               lua ? start_lua(i, rounds) : process_start("worker", i, rounds));
}

static void thread_show(const char *line) { (void)printf("             %s\n", line); }

static void worker_ended(int i, int status, bool expected) {
  if (!expected && !faults_may_end(status))
    violation("worker %d (pid %d) ended with status 0x%x", i, (int)shared->worker[i].pid,
              (unsigned)status);
  history_died(i, now_ns());
  for (int t = 0; t < TEXTS; t++) { /* a text that it was using is free again */
    int its = i + 1;
    if (atomic_load(&shared->texts[t].busy) != its) continue;
    shared->texts[t].there = false;
    (void)atomic_compare_exchange_strong(&shared->texts[t].busy, &its, 0);
  }
  if (!expected) report_fault("died", i, now_ns(), 0);
  if (stopped_since[i]) stopped_since[i] = 0;
}

static void worker_continue(int i) {
  if (!stopped_since[i]) return;
  (void)atomic_fetch_add(&shared->worker[i].stopped, now_ns() - stopped_since[i] + 20 * MS);
  report_fault("SIGSTOP", i, stopped_since[i], now_ns());
  stopped_since[i] = 0;
  (void)kill(shared->worker[i].pid, SIGCONT);
}

/* Orphaned children come to us: see PR_SET_CHILD_SUBREAPER. */
static void reap(void) {
  int status;
  for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
    for (int i = 0; !faults_reap(pid, status) && i < shared->workers; i++)
      if (pid == shared->worker[i].pid) {
        worker_ended(i, status, false);
        if (!atomic_load(&shared->stop)) worker_start(i);
      }
}

/* -------------------------------------------------------------------- faults */

/* Each once in so many milliseconds, on average. */
static bool due(bool wanted, int64_t *at, int mean_ms) {
  int64_t now = now_ns();
  if (!wanted) return false;
  bool is = *at && now > *at;
  if (!*at || is) *at = now + roll_below(&main_dice, 2 * mean_ms) * MS;
  return is;
}

static void disturb(void) {
  static int64_t kill_at, stop_at, sever_at, query_at, cut_at;
  static int64_t continue_at[WORKERS];
  int i = roll_below(&main_dice, shared->workers);
  if (due(faults.kill, &kill_at, shared->server ? 8000 : 3000)) {
    pid_t pid = shared->worker[i].pid;
    (void)kill(pid, SIGKILL);
    (void)waitpid(pid, NULL, 0);
    report_fault("kill -9", i, now_ns(), 0);
    kills++;
    worker_ended(i, 0, true);
    worker_start(i);
  }
  i = roll_below(&main_dice, shared->workers);
  if (due(faults.stop, &stop_at, shared->server ? 6000 : 2000) && !stopped_since[i]) {
    int64_t most = roll_percent(&main_dice, 50) ? 200 : 2 * shared->hold_timeout;
    stopped_since[i] = now_ns();
    (void)kill(shared->worker[i].pid, SIGSTOP);
    continue_at[i] = now_ns() + roll_below(&main_dice, (int)most) * MS;
    stops++;
  }
  for (i = 0; i < shared->workers; i++)
    if (stopped_since[i] && now_ns() > continue_at[i]) worker_continue(i);
  if (due(faults.cut, &cut_at, 6000)) atomic_store(&shared->partition, now_ns());
  if (due(faults.sever, &sever_at, 2000) && server_kill(&main_dice, false)) {
    report_fault("KILL", -1, now_ns(), 0);
    severed++;
  }
  if (due(faults.query, &query_at, 1000) && server_kill(&main_dice, true)) {
    report_fault("KILL QUERY", -1, now_ns(), 0);
    interrupted++;
  }
}

/* ------------------------------------------------------------------ progress */

static uint64_t counted(int what) {
  uint64_t n = 0;
  for (int i = 0; i < WORKERS; i++) n += atomic_load(&shared->worker[i].counts[what]);
  return n;
}

static void progress(void) {
  static uint64_t before;
  static int64_t before_at;
  uint64_t granted = counted(COUNT_GRANTS);
  int64_t now = now_ns();
  say("%llu calls, %llu granted (%.0f/s), %llu waited, %llu timed out, %llu cancelled, %llu "
      "extends, %llu lost, "
      "longest wait %.2f s; %llu kills, %llu stops, %llu severed, %llu cuts; violations: %u",
      (unsigned long long)counted(COUNT_CALLS), (unsigned long long)granted,
      before_at ? (double)(granted - before) / ((double)(now - before_at) / 1e9) : 0.0,
      (unsigned long long)counted(COUNT_WAITS), (unsigned long long)counted(COUNT_TIMEOUTS),
      (unsigned long long)counted(COUNT_CANCELS), (unsigned long long)counted(COUNT_EXTENDS),
      (unsigned long long)counted(COUNT_LOST), (double)longest_wait / 1e9,
      (unsigned long long)kills, (unsigned long long)stops, (unsigned long long)severed,
      (unsigned long long)(atomic_load(&shared->cuts) + atomic_load(&shared->resets)), violations);
  before = granted;
  before_at = now;
}

static void hear_complaints(void) {
  static unsigned heard;
  for (; heard < atomic_load(&shared->complaints) && heard < 64; heard++)
    violation("%s", shared->complaint[heard]);
}

/* Also for the report, so each line is a name of 24 characters and a value. */
static void summary(FILE *to) {
  static const char *const names[COUNTS] = {"acquisitions",
                                            "grants",
                                            "waits of 2 ms or more",
                                            "time-outs",
                                            "cancels",
                                            "extends",
                                            "deadlocks",
                                            "busy",
                                            "losses told",
                                            "failed connections",
                                            "looks at is_held",
                                            "forks",
                                            "managers opened",
                                            "updates in memory",
                                            "updates in the table",
                                            "refused by the fence",
                                            "leases",
                                            "of them converted",
                                            "refreshes",
                                            "of them after its end",
                                            "is_held ended in time",
                                            "exports",
                                            "imports",
                                            "revocations",
                                            "told by whom",
                                            "left to their end"};
  (void)fprintf(to, "summary of %.0f s, seed %llu\n", seconds_at(now_ns()),
                (unsigned long long)shared->seed);
  for (int i = 0; i < (shared->leases ? COUNTS : COUNT_LEASES); i++)
    (void)fprintf(to, "  %-24s %llu\n", names[i], (unsigned long long)counted(i));
  (void)fprintf(
      to,
      "  %-24s %llu\n  %-24s %llu\n  %-24s %llu\n  %-24s %llu\n  %-24s %llu, %llu, %llu, %llu\n",
      "kill -9", (unsigned long long)kills, "SIGSTOP", (unsigned long long)stops, "KILL",
      (unsigned long long)severed, "KILL QUERY", (unsigned long long)interrupted,
      "cut, reset, half, delayed", (unsigned long long)atomic_load(&shared->cuts),
      (unsigned long long)atomic_load(&shared->resets),
      (unsigned long long)atomic_load(&shared->halves),
      (unsigned long long)atomic_load(&shared->delays));
  (void)fprintf(to, "  %-24s %.3f s\n  %-24s %.3f s\n  %-24s %llu, longest %.3f s\n",
                "longest wait", (double)longest_wait / 1e9, "latest time-out, by",
                (double)latest_timeout / 1e9, "rests", (unsigned long long)rests,
                (double)longest_rest / 1e9);
  faults_summary(to);
  if (shared->leases)
    (void)fprintf(to,
                  "  %-24s %llu, at most %.3f s\n  %-24s %llu\n  %-24s %llu, at most %.3f s late\n "
                  " %-24s %llu\n",
                  "taken away, and believed", (unsigned long long)cut_believed,
                  (double)longest_cut / 1e9, "ends without a believer",
                  (unsigned long long)promises_checked, "waits for an end alone",
                  (unsigned long long)delays_checked, (double)longest_delay / 1e9,
                  "losses explained", (unsigned long long)losses_checked);
  if (longest_overlap)
    (void)fprintf(to, "  %-24s %.3f ms\n", "longest overlap", (double)longest_overlap / 1e6);
  (void)fprintf(to, "  %-24s %u\n", "violations", violations);
}

static void summaries(void) {
  char *text = NULL;
  size_t size;
  FILE *to = open_memstream(&text, &size);
  if (!to) die("open_memstream");
  summary(to);
  (void)fclose(to);
  (void)fputs(text, stdout);
  if (!report && violations) report = "/tmp/hierlock-soak.html";
  if (report && report_write(report, text)) die(report);
  if (report) (void)printf("report: %s\n", report);
  free(text);
}

/* ----------------------------------------------------------------- the phases */

/* Begin: a large fault may begin, too. */
static void turn(bool disturbed, bool begin) {
  static int64_t sweep_at, progress_at, mood_at;
  int64_t now = now_ns();
  reap();
  if (disturbed) disturb();
  faults_turn(&main_dice, begin);
  hear_complaints();
  if (now > sweep_at) {
    history_sweep(now);
    sweep_at = now + SWEEP_EVERY;
  }
  if (!only_mood && now > mood_at) {
    atomic_store(&shared->mood, (atomic_load(&shared->mood) + 1) % MOODS);
    mood_at = now + MOOD_EVERY;
  }
  report_turn(now, report);
  if (now > progress_at) {
    progress();
    progress_at = now + PROGRESS_EVERY;
  }
  now = now_ns();
  (void)usleep(5000);
  int64_t woken = now_ns();
  history_late(woken - now - 5 * MS, woken);
}

/* All let go; then another process must get everything, within the time that a dead waiter or a
   cut connection may need. */
static void rest(void) {
  while (!faults_settled()) turn(true, false);
  int64_t began = now_ns();
  atomic_store(&shared->pause, true);
  /* Continue each worker first: a worker that stands still in a transaction of SQLite's keeps
     the others from their rest. */
  for (int i = 0; i < shared->workers; i++) worker_continue(i);
  for (int i = 0; i < shared->workers; i++) {
    while (atomic_load(&shared->worker[i].threads_at_rest) < shared->threads) {
      turn(false, false);
      if (now_ns() - began > patience(60 * S)) {
        violation("worker %d (pid %d) does not come to rest: %d of %d threads", i,
                  (int)shared->worker[i].pid, atomic_load(&shared->worker[i].threads_at_rest),
                  shared->threads);
        stacks_of(shared->worker[i].pid, thread_show);
        atomic_store(&shared->pause, false);
        return;
      }
    }
  }
  classic_check();
  int64_t resting = now_ns();
  pid_t pid = process_start("probe", 0, (uint64_t)patience(shared->server ? 15 * S : 5 * S));
  int status = 0;
  while (waitpid(pid, &status, WNOHANG) == 0) turn(false, false);
  hear_complaints();
  if (status && shared->server) server_show();
  if (now_ns() - resting > longest_rest) longest_rest = now_ns() - resting;
  report_fault("rest", -1, began, now_ns());
  rests++;
  atomic_store(&shared->pause, false);
}

static void wait_for_none(const char *what, int (*count)(void)) {
  int64_t end = now_ns() + patience(20 * S);
  int left = 0;
  /* A server shows the same old transactions when it is asked more often than each 0.1 s. */
  while (now_ns() < end && (left = count()) > 0) (void)usleep(250000);
  if (left > 0) {
    violation("at the end there are %d %s left", left, what);
    server_show();
  }
}

static void finish(void) {
  int64_t end = now_ns() + patience(40 * S);
  atomic_store(&shared->proxy_harmless, true);
  for (int i = 0; i < shared->workers; i++) worker_continue(i);
  atomic_store(&shared->stop, true);
  for (int i = 0; i < shared->workers; i++) {
    int status = 0;
    pid_t pid = shared->worker[i].pid;
    while (waitpid(pid, &status, WNOHANG) == 0 && now_ns() < end) (void)usleep(5000);
    if (kill(pid, 0) == 0) {
      violation("worker %d (pid %d) does not end", i, (int)pid);
      stacks_of(pid, thread_show);
      (void)kill(pid, SIGKILL);
      (void)waitpid(pid, NULL, 0);
    } else if (status) {
      violation("worker %d (pid %d) ended with status 0x%x", i, (int)pid, (unsigned)status);
    }
    history_died(i, now_ns());
    atomic_store(&shared->worker[i].pid, 0);
  }
  hear_complaints();
  history_sweep(now_ns());
  if (proxy_pid) {
    (void)kill(proxy_pid, SIGKILL);
    (void)waitpid(proxy_pid, NULL, 0);
  }
  if (shared->server) {
    wait_for_none("transactions", server_transactions);
    wait_for_none("connections", server_connections);
    server_restore();
  }
}

/* ------------------------------------------------------------------- starting */

static void area_make(void) {
  (void)snprintf(area_name, sizeof area_name, "/hierlock-soak-%d", (int)getpid());
  int fd = shm_open(area_name, O_RDWR | O_CREAT | O_EXCL, 0600);
  if (fd < 0 || ftruncate(fd, sizeof *shared)) die(area_name);
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (shared == MAP_FAILED) die("mmap");
  (void)close(fd);
}

static void area_forget(void) { (void)shm_unlink(area_name); }

static void proxy_start(void) {
  hl_dsn dsn;
  struct sockaddr_in address = {.sin_family = AF_INET};
  socklen_t size = sizeof address;
  const server_kind *kind = server_kind_of(shared->dsn);
  if (!server_dsn(kind, shared->dsn, &dsn)) exit(2);
  address.sin_addr.s_addr = htonl(0x7f000001);
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (bind(fd, (struct sockaddr *)&address, size) || listen(fd, 128) ||
      getsockname(fd, (struct sockaddr *)&address, &size))
    die("listen");
  (void)snprintf(shared->proxied_dsn, sizeof shared->proxied_dsn, "%s://%s:%s@127.0.0.1:%u/%s?%s",
                 kind->name, dsn.user, dsn.password, ntohs(address.sin_port), dsn.database,
                 kind->soak);
  proxy_pid = process_start("proxy", fd, (uint64_t)dsn.port);
  (void)close(fd);
  hl_dsn_dispose(&dsn);
}

/* The library beside this program that is preloaded for `clock`. */
static void clock_find(void) {
  ssize_t n = readlink("/proc/self/exe", clock_library, sizeof clock_library - 16);
  if (n < 0) die("/proc/self/exe");
  memcpy(clock_library + n, "-clock.so", 10);
  if (access(clock_library, R_OK)) die(clock_library);
  shared->clock_jumps = true;
}

/* A small file system for the directory, in a mount namespace of our own, gone with us. The file
   system is mounted on the parent of the directory. */
static void disk_make(void) {
  char parent[sizeof shared->dsn];
  (void)snprintf(parent, sizeof parent, "%s", shared->dsn + strlen("file:"));
  char *slash = strrchr(parent, '/');
  if (slash && slash > parent) *slash = '\0';
  shared->disk =
      slash > parent && unshare(CLONE_NEWNS) == 0 &&
      mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
      mount("soak", parent, "tmpfs", MS_NOSUID | MS_NODEV, "size=48m,nr_inodes=12k") == 0;
}

static bool faults_choose(const char *list) {
  static const struct {
    const char *name;
    bool *wanted;
  } small[] = {{"kill", &faults.kill},     {"stop", &faults.stop},   {"fork", &faults.fork},
               {"cut", &faults.cut},       {"sever", &faults.sever}, {"query", &faults.query},
               {"extend", &faults.extend}, {"clock", &faults.clock}};
  char names[256];
  bool all = strcmp(list, "all") == 0;
  (void)snprintf(names, sizeof names, "%s", strcmp(list, "none") == 0 ? "" : list);
  if (!shared->server && !shared->leases_only && (all || strstr(names, "disk"))) disk_make();
  for (char *rest = names, *name; (name = strsep(&rest, ","));) {
    bool known = !*name;
    for (size_t i = 0; i < sizeof small / sizeof *small; i++)
      if (all || strcmp(name, small[i].name) == 0) known = *small[i].wanted = true;
    if (*name && fault_add(name, all)) known = true;
    if (!known) {
      (void)fprintf(stderr, "soak: no fault %s\n", name);
      return false;
    }
  }
  if (!shared->server) faults.cut = faults.sever = faults.query = false;
  if (shared->leases_only) faults.extend = false;
  if (faults.clock) clock_find();
  return true;
}

/* With each seed one store in four has no leases; which, in the order of this list, changes with
   the seed. */
static bool leases_choose(void) {
  static const char *const stores[] = {"file", "mysql", "mariadb", "postgresql"};
  uint64_t which = 0;
  if (shared->leases_only) return true;
  if (leases_wanted >= 0) return leases_wanted;
  while (which < 3 && strncmp(shared->dsn, stores[which], strlen(stores[which])) != 0) which++;
  return shared->seed % 4 != which;
}

static int usage(void) {
  (void)fprintf(stderr, "usage: soak DSN [--admin=DSN] [--control=COMMAND] [--seconds=N] "
                        "[--seed=N] [--workers=N] [--threads=N] [--mood=mixed|large|narrow]\n"
                        "            [--leases=yes|no] [--lua=SCRIPT] [--report=FILE] "
                        "[--faults=NAME,...|none|all]\n");
  return 2;
}

static int role_main(char **argv) {
  uint64_t number = strtoull(argv[4], NULL, 10);
  int which = atoi(argv[3]);
  if (!area_attach(argv[2])) die(argv[2]);
  if (strcmp(argv[1], "worker") == 0) return worker_main(which, number);
  if (strcmp(argv[1], "fault") == 0) return fault_main(which, number);
  if (strcmp(argv[1], "proxy") == 0) return proxy_main(which, (int)number, shared->seed);
  return probe_main((int64_t)number / MS);
}

int main(int argc, char **argv) {
  const char *list = "all";
  program = argv[0];
  if (argc == 5 && argv[2][0] == '/') return role_main(argv);
  if (argc < 2) return usage();
  area_make();
  (void)atexit(area_forget);
  (void)prctl(PR_SET_CHILD_SUBREAPER, 1);
  shared->workers = 3;
  shared->threads = 7;
  shared->seed = (uint64_t)now_ns() % 1000000;
  shared->hold_timeout = 3000;
  for (int i = 2; i < argc; i++) {
    char *value = strchr(argv[i], '=');
    if (!value) return usage();
    value++;
    if (strncmp(argv[i], "--admin=", 8) == 0)
      (void)snprintf(shared->admin_dsn, sizeof shared->admin_dsn, "%s", value);
    else if (strncmp(argv[i], "--control=", 10) == 0)
      (void)snprintf(shared->control, sizeof shared->control, "%s", value);
    else if (strncmp(argv[i], "--seconds=", 10) == 0)
      seconds = atoll(value);
    else if (strncmp(argv[i], "--seed=", 7) == 0)
      shared->seed = strtoull(value, NULL, 10);
    else if (strncmp(argv[i], "--workers=", 10) == 0)
      shared->workers = atoi(value);
    else if (strncmp(argv[i], "--threads=", 10) == 0)
      shared->threads = atoi(value);
    else if (strncmp(argv[i], "--report=", 9) == 0)
      report = value;
    else if (strncmp(argv[i], "--lua=", 6) == 0)
      lua_script = value;
    else if (strncmp(argv[i], "--faults=", 9) == 0)
      list = value;
    else if (strncmp(argv[i], "--leases=", 9) == 0)
      leases_wanted = *value == 'y';
    else if (strncmp(argv[i], "--mood=", 7) == 0) {
      only_mood = true;
      atomic_store(&shared->mood, *value == 'm' ? MIXED : *value == 'l' ? LARGE : NARROW);
    } else
      return usage();
  }
  const server_kind *kind = server_kind_of(argv[1]);
  shared->server = kind != NULL;
  shared->leases_only = !kind && strncmp(argv[1], "file:", 5) != 0;
  if (strncmp(argv[1], "memcached:", 10) == 0)
    shared->lingers = 4 * S;                  /* whole seconds, and three more */
  if (shared->leases_only) lua_script = NULL; /* it takes sessions, and extends them */
  if (lua_script) shared->workers++;
  shared->has_lua = lua_script != NULL;
  if (shared->workers < 1 || shared->workers > WORKERS || shared->threads < 2 ||
      shared->threads > THREADS)
    return usage();
  main_dice = dice_of(shared->seed, 0);
  if (shared->server && !shared->admin_dsn[0]) return usage();
  (void)snprintf(shared->dsn, sizeof shared->dsn, "%s%s%s", argv[1],
                 shared->server ? strchr(argv[1], '?') ? "&" : "?" : "", kind ? kind->soak : "");
  shared->leases = leases_choose();
  if (!faults_choose(list)) return 2;
  shared->forks = faults.fork;
  shared->extends = faults.extend;
  shared->queries = faults.query;
  if (shared->server) {
    if (server_open()) return 2;
    server_provision();
  }
  if (faults.cut) proxy_start();
  history_expect(faults.kill || faults.stop || faults.cut || faults.sever || faults.query ||
                     faults_any(),
                 faults.sever || faults.query || faults.cut || faults_any());
  (void)printf("soak: %s, seed %llu, %lld s, %d workers of %d threads, leases: %s, faults: %s\n",
               kind ? kind->name : shared->dsn, (unsigned long long)shared->seed,
               (long long)seconds, shared->workers, shared->threads, shared->leases ? "yes" : "no",
               list);
  for (int i = 0; i < shared->workers; i++) worker_start(i);

  int64_t end = now_ns() + seconds * S, rest_at = now_ns() + REST_EVERY;
  if (seconds < 45) rest_at = now_ns() + seconds * S / 2;
  while (now_ns() < end) {
    turn(true, true);
    if (now_ns() > rest_at) {
      rest();
      rest_at = now_ns() + REST_EVERY;
    }
  }
  rest();
  finish();
  if (!grants_checked) violation("nothing was granted in all that time");
  progress();
  summaries();
  return violations > 0;
}
