/*
 * clock.c - a library that is preloaded into the workers, for the fault `clock`: the wall clock
 * jumps forward and back, by up to twelve hours, several times a second. The clocks that only
 * grow are left alone. Nothing of hierlock's may depend on the wall clock, so nothing may
 * change.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <sys/time.h>
#include <time.h>

typedef int clock_function(clockid_t clock, struct timespec *t);

static int64_t jump(clock_function *real) {
  struct timespec t;
  if (real(CLOCK_MONOTONIC, &t)) return 0;
  uint64_t slot = (uint64_t)t.tv_sec * 4 + (uint64_t)t.tv_nsec / 250000000;
  slot = (slot + 1) * UINT64_C(0x9E3779B97F4A7C15);
  slot ^= slot >> 29;
  return (int64_t)(slot * UINT64_C(0xBF58476D1CE4E5B9) % 86400) - 43200;
}

static clock_function *real_clock(void) {
  static clock_function *real;
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "clock_gettime");
  return real;
}

int clock_gettime(clockid_t clock, struct timespec *t) {
  clock_function *real = real_clock();
  int result = real(clock, t);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    t->tv_sec += jump(real);
  return result;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
  struct timespec now;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
  t->tv_sec = now.tv_sec;
  t->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *result) {
  struct timespec now;
  (void)clock_gettime(CLOCK_REALTIME, &now);
  if (result) *result = now.tv_sec;
  return now.tv_sec;
}
