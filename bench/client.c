/*
 * client.c - the conversation that every client of the bench has with
 * contest.lua; loop.lua and symfony.php speak it as well. The client reads
 * lines, and answers each by a line:
 *
 *   N       N times take + give, names at random       microseconds of a pair
 *   take    takes the lock that is handed over         when it began, when it had it
 *   give    gives it back                              when it began
 *
 * Before the first N the client uses each name once, so that files and the like
 * exist. Points in time are nanoseconds of CLOCK_MONOTONIC, which processes
 * share.
 */
#include "client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Names 0 to NAMES - 1. The handed-over lock has another name. */
enum { NAMES = 2000 };

_Noreturn void client_die(const char *what, const char *why) {
  fprintf(stderr, "bench: %s: %s\n", what, why);
  exit(1);
}

static long long now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static unsigned random_name(void) {
  static unsigned long long seed = 88172645463325252ull;
  seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
  return (unsigned)(seed % NAMES);
}

static void cycle(unsigned name) {
  client_take(name);
  client_give();
}

static double cycles(int n) {
  static unsigned used;
  while (used < NAMES) cycle(used++);
  long long start = now();
  for (int i = 0; i < n; i++) cycle(random_name());
  return (double)(now() - start) / 1e3 / n;
}

int main(int argc, char **argv) {
  char line[32];

  client_open(argc - 1, argv + 1);
  while (fgets(line, sizeof line, stdin)) {
    if (!strcmp(line, "take\n")) {
      long long began = now();
      client_take(NAMES);
      printf("%lld %lld\n", began, now());
    } else if (!strcmp(line, "give\n")) {
      printf("%lld\n", now()); /* said only after: stdout is a pipe */
      client_give();
    } else {
      int n = atoi(line);
      if (n < 1) client_die("not understood", line);
      printf("%.2f\n", cycles(n));
    }
    fflush(stdout);
  }
  return 0;
}
