/*
 * clock.c - the clocks: monotonic milliseconds for measuring, boot time for belief in locks, and
 * Unix time to show to people.
 */
#include "clock.h"

#include <time.h>

static int64_t clock_us(clockid_t clock) {
  struct timespec t;
  (void)clock_gettime(clock, &t);
  return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static int64_t clock_ms(clockid_t clock) { return clock_us(clock) / 1000; }

int64_t hl__now_ms(void) { return clock_ms(CLOCK_MONOTONIC); }

int64_t hl__now_us(void) { return clock_us(CLOCK_MONOTONIC); }

int64_t hl__boot_ms(void) { return clock_ms(CLOCK_BOOTTIME); }

int64_t hl__unix_ms(void) { return clock_ms(CLOCK_REALTIME); }

int64_t hl__unix_us(void) { return clock_us(CLOCK_REALTIME); }

static int64_t left_at(int64_t now, int64_t deadline) {
  if (deadline == HL_FOREVER) return HL_FOREVER;
  return deadline > now ? hl__between_ms(now, deadline) : 0;
}

int64_t hl__left_ms(int64_t deadline) { return left_at(hl__now_ms(), deadline); }

int64_t hl__lease_left_ms(int64_t end) {
  return left_at(hl__boot_ms() + 1, end); /* the clock's milliseconds are rounded down */
}

/* The rest of the 200 ms is for what the call does beside waiting. */
#define LATE_MS 170
#define LATER_MS 970

static int64_t after(int64_t now, int64_t deadline, int64_t ms) {
  return hl__deadline(deadline > now ? deadline : now, ms);
}

int64_t hl__answer_by(int64_t deadline) { return after(hl__now_ms(), deadline, LATE_MS); }

int64_t hl__late_answer_by(int64_t deadline) { return hl__late_answer_at(hl__now_ms(), deadline); }

int64_t hl__late_answer_at(int64_t now, int64_t deadline) { return after(now, deadline, LATER_MS); }

int64_t hl__within_ms(int64_t ms, int64_t limit) {
  int64_t usual = hl__deadline(hl__now_ms(), ms);
  return usual < limit ? usual : limit;
}

void hl__cond_init(pthread_cond_t *condition) {
  pthread_condattr_t monotonic;
  (void)pthread_condattr_init(&monotonic);
  (void)pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  (void)pthread_cond_init(condition, &monotonic);
  (void)pthread_condattr_destroy(&monotonic);
}

void hl__cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, int64_t deadline) {
  if (deadline == HL_FOREVER) {
    (void)pthread_cond_wait(condition, mutex);
    return;
  }
  if (deadline < 0) deadline = 0;
  int64_t seconds = deadline / 1000;
  if (sizeof(time_t) == 4 && seconds > INT32_MAX) seconds = INT32_MAX;
  struct timespec t = {.tv_sec = (time_t)seconds, .tv_nsec = (long)(deadline % 1000) * 1000000};
  (void)pthread_cond_timedwait(condition, mutex, &t);
}

int64_t hl__deadline(int64_t now, int64_t ms) {
  int64_t sum;
  if (now == HL_FOREVER || ms == HL_FOREVER) return HL_FOREVER;
  if (!__builtin_add_overflow(now, ms, &sum)) return sum;
  return ms > 0 ? HL_FOREVER : INT64_MIN;
}

int64_t hl__between_ms(int64_t since, int64_t until) {
  int64_t ms;
  if (!__builtin_sub_overflow(until, since, &ms)) return ms;
  return until > since ? INT64_MAX : INT64_MIN;
}
