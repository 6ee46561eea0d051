/*
 * fault_main.c - the process that does one large fault, and the resources that it may use of a
 * worker.
 */
#include "fault.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

fault_window *fault_self;
dice fault_dice;

int fault_way(int n) {
  return (int)((shared->seed / FAULTS + shared->ways[fault_self->kind]++) % (uint64_t)n);
}

void fault_what(const char *text) {
  (void)snprintf(fault_self->what, sizeof fault_self->what, "%s", text);
}

void fault_sleep_ms(int ms) { (void)usleep((unsigned)ms * 1000); }

void fault_fail(const char *text) {
  (void)fprintf(stderr, "soak: %s: %s\n", text, strerror(errno));
  exit(2);
}

void fault_shut_begin(void) { atomic_store(&fault_self->shut, now_ns()); }
void fault_shut_end(void) { atomic_store(&fault_self->opened, now_ns()); }

static rlim_t address_space(pid_t pid) {
  char path[64];
  unsigned long pages = 0;
  (void)snprintf(path, sizeof path, "/proc/%d/statm", (int)pid);
  FILE *file = fopen(path, "r");
  if (file && fscanf(file, "%lu", &pages) != 1) pages = 0;
  if (file) (void)fclose(file);
  return (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE);
}

/* Not of the one in Lua: that raises an error for want of memory, wherever it is. */
static void limits(void) {
  int worker = roll_below(&fault_dice, shared->workers - shared->has_lua);
  pid_t pid = atomic_load(&shared->worker[worker].pid);
  bool memory = fault_way(2);
  struct rlimit before, now;
  enum __rlimit_resource which = memory ? RLIMIT_AS : RLIMIT_NOFILE;
  fault_self->who = worker;
  fault_what(memory ? "memory" : "descriptors");
  /* A worker that begins just now could not even map the area. */
  if (!atomic_load(&shared->worker[worker].attached)) return;
  if (prlimit(pid, which, NULL, &before)) return; /* it was killed */
  now = before;
  now.rlim_cur = memory ? address_space(pid) + (rlim_t)roll_below(&fault_dice, 200) * 4096
                        : (rlim_t)(3 + roll_below(&fault_dice, 60));
  if (now.rlim_cur == 0 || prlimit(pid, which, &now, NULL)) return;
  fault_sleep_ms(roll_below(&fault_dice, 1500));
  (void)prlimit(pid, which, &before, NULL);
}

int fault_main(int kind, uint64_t seed) {
  static void (*const act[FAULTS])(void) = {
      [CRASH] = fault_crash,        [STOPSERVER] = fault_stop_server,
      [READONLY] = fault_read_only, [ALTER] = fault_alter,
      [FULL] = fault_full,          [HOSTILE] = fault_hostile,
      [DISK] = fault_disk,          [LIMITS] = limits};
  fault_self = &shared->windows[(atomic_load(&shared->window_count) - 1) % WINDOWS];
  fault_dice = dice_of(seed, 0);
  act[kind]();
  atomic_store(&fault_self->ended, now_ns());
  return 0;
}
