/*
 * await.h - waits for a condition, not for a time.
 */
#ifndef AWAIT_H
#define AWAIT_H

#include "clock.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* After that much a condition that should come true has failed to. */
#define PATIENCE_MS 20000

static inline void sleep_ms(int64_t ms) {
  struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
  (void)nanosleep(&t, NULL);
}

#define WAIT_UNTIL(condition)                                                                      \
  do {                                                                                             \
    int64_t end_ = hl__now_ms() + PATIENCE_MS;                                                     \
    while (!(condition) && hl__now_ms() < end_) sleep_ms(1);                                       \
    if (!(condition)) {                                                                            \
      (void)fprintf(stderr, "in vain: %s\n", #condition);                                          \
      abort();                                                                                     \
    }                                                                                              \
  } while (0)

#endif
