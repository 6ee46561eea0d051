/*
 * clock.c - the clocks: monotonic milliseconds for everything that is measured,
 * boot time for leases, Unix time for what people are shown.
 */
#include "clock.h"

#include <time.h>

static int64_t clock_ms(clockid_t clock) {
  struct timespec t;
  (void)clock_gettime(clock, &t);
  return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

int64_t hl__now_ms(void) { return clock_ms(CLOCK_MONOTONIC); }

int64_t hl__now_us(void) {
  struct timespec t;
  (void)clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

int64_t hl__lease_ms(void) { return clock_ms(CLOCK_BOOTTIME); }

int64_t hl__unix_ms(void) { return clock_ms(CLOCK_REALTIME); }

int64_t hl__left_ms(int64_t deadline) {
  if (deadline == HL_FOREVER) return HL_FOREVER;
  int64_t left = deadline - hl__now_ms();
  return left > 0 ? left : 0;
}

void hl__cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex,
                   int64_t deadline) {
  if (deadline == HL_FOREVER) {
    (void)pthread_cond_wait(condition, mutex);
    return;
  }
  struct timespec t = {.tv_sec = deadline / 1000,
                       .tv_nsec = deadline % 1000 * 1000000};
  (void)pthread_cond_timedwait(condition, mutex, &t);
}

int64_t hl__deadline(int64_t now, int64_t ms) {
  return ms >= HL_FOREVER - now ? HL_FOREVER : now + ms;
}
