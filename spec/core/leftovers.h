/*
 * leftovers.h - nothing_is_left is the last test of each program here: no thread, child,
 * descriptor or mapping of a lock directory may be left of those before. The test waits for
 * things that need a moment to end.
 *
 * Include behind <cmocka.h>; once in a program.
 */
#ifndef LEFTOVERS_H
#define LEFTOVERS_H

#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { LEFTOVERS_PATIENCE_S = 20 };

/* ThreadSanitizer has one of its own, from some moment on. */
#if defined(__SANITIZE_THREAD__)
enum { THREADS_OF_TOOLS = 1 };
#else
enum { THREADS_OF_TOOLS = 0 };
#endif

static int entries_of(const char *path) {
  DIR *names = opendir(path);
  int n = 0;
  if (!names) return -1;
  while (readdir(names)) n++;
  (void)closedir(names);
  return n;
}

static int descriptors_before;

__attribute__((constructor)) static void leftovers_begin(void) {
  descriptors_before = entries_of("/proc/self/fd");
}

/* Counts mappings of the control file and the board of a lock directory. */
static int mappings_of_stores(void) {
  char line[512];
  int n = 0;
  FILE *maps = fopen("/proc/self/maps", "re");
  if (!maps) return -1;
  while (fgets(line, sizeof line, maps)) n += strstr(line, "/control") || strstr(line, "/board");
  (void)fclose(maps);
  return n;
}

static void nothing_is_left(void **state) {
  (void)state;
  int threads, descriptors, mappings;
  for (time_t end = time(NULL) + LEFTOVERS_PATIENCE_S;;) {
    threads = entries_of("/proc/self/task") - 2 - 1; /* ".", "..", this one */
    descriptors = entries_of("/proc/self/fd") - descriptors_before;
    mappings = mappings_of_stores();
    if (threads <= THREADS_OF_TOOLS && descriptors <= 0 && mappings == 0) break;
    if (time(NULL) > end) break;
    (void)usleep(1000);
  }
  assert_in_range(threads, 0, THREADS_OF_TOOLS);
  assert_true(descriptors <= 0);
  assert_int_equal(mappings, 0);
  assert_int_equal(waitpid(-1, NULL, WNOHANG), -1); /* no child */
}

#endif
