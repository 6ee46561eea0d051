/*
 * late_set.c - for LD_PRELOAD in a PostgreSQL server: a SET, or another command that is no query,
 * ends only when its time is up, where that is limited. So the end of its time comes after it has
 * done its work, as on a busy machine it may. The server then has its client wait for a moment
 * before it says more than the answer: meanwhile the client sends its next message.
 *
 * The names are PostgreSQL's, but for send(): see late.c.
 */
#include <dlfcn.h>
#include <stdbool.h>
#include <sys/socket.h>
#include <unistd.h>

#define PAUSE_US 100000

enum {
  STATEMENT_TIMEOUT = 3 /* of TimeoutId, in utils/timeout.h */
};
/* PostgreSQL 13 has a word less, and does not read the last one. */
typedef void utility(void *, void *, void *, void *, void *, void *, void *, void *);
extern utility *ProcessUtility_hook __attribute__((weak));
extern utility standard_ProcessUtility __attribute__((weak));
extern bool get_timeout_active(int id) __attribute__((weak));

static bool late;

static void end_late(void *a, void *b, void *c, void *d, void *e, void *f, void *g, void *h) {
  standard_ProcessUtility(a, b, c, d, e, f, g, h);
  for (; get_timeout_active(STATEMENT_TIMEOUT); late = true) (void)usleep(1000);
}

ssize_t send(int fd, const void *data, size_t size, int flags) {
  ssize_t (*real)(int, const void *, size_t, int);
  *(void **)&real = dlsym(RTLD_NEXT, "send");
  ssize_t sent = real(fd, data, size, flags);
  if (late) (void)usleep(PAUSE_US);
  late = false;
  return sent;
}

__attribute__((constructor)) static void begin(void) {
  if (&ProcessUtility_hook) ProcessUtility_hook = end_late;
}
