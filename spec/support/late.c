/*
 * late.c - for LD_PRELOAD in a PostgreSQL server: a statement whose time is limited ends only when
 * its time is up. So the end of its time comes after its last row, as on a busy machine it may.
 *
 * The names are PostgreSQL's. The programs that start the server have them not: hence weak.
 */
#include <stdbool.h>
#include <unistd.h>

enum {
  STATEMENT_TIMEOUT = 3 /* of TimeoutId, in utils/timeout.h */
};
extern void (*ExecutorEnd_hook)(void *query) __attribute__((weak));
extern void standard_ExecutorEnd(void *query) __attribute__((weak));
extern bool get_timeout_active(int id) __attribute__((weak));

static void end_late(void *query) {
  standard_ExecutorEnd(query);
  while (get_timeout_active(STATEMENT_TIMEOUT)) (void)usleep(1000);
}

__attribute__((constructor)) static void begin(void) {
  if (&ExecutorEnd_hook) ExecutorEnd_hook = end_late;
}
