/*
 * clock.h - time, and waiting for a condition until a deadline. Uses nothing of the rest of the
 * core: a store that is a module of its own has its own copy.
 */
#ifndef HIERLOCK_CLOCK_H
#define HIERLOCK_CLOCK_H

#include "hierlock.h"

#include <pthread.h>

/* Milliseconds of CLOCK_MONOTONIC. */
int64_t hl__now_ms(void);
/* Microseconds of CLOCK_MONOTONIC, for measuring: 1000 times hl__now_ms. */
int64_t hl__now_us(void);
/* Milliseconds of CLOCK_BOOTTIME, which goes on while the machine sleeps, as the server's clock
   does: for belief in locks only. Not comparable with hl__now_ms. Then milliseconds and
   microseconds of Unix time. */
int64_t hl__boot_ms(void);
int64_t hl__unix_ms(void);
int64_t hl__unix_us(void);

/* Sums and differences saturate in these functions. A time from a store, a text or an option may be
   any number, and a clock may have begun just now. */

/* Milliseconds left until deadline, never negative; HL_FOREVER stays. */
int64_t hl__left_ms(int64_t deadline);
/* The time for which a lease surely lasts that ends at `end` (hl__boot_ms): rounded down, never
   negative; HL_FOREVER stays. */
int64_t hl__lease_left_ms(int64_t end);
/* now + ms; HL_FOREVER stays. Either may be negative. */
int64_t hl__deadline(int64_t now, int64_t ms);
/* until - since */
int64_t hl__between_ms(int64_t since, int64_t until);

/* ms from now, or `limit`, if that is sooner. */
int64_t hl__within_ms(int64_t ms, int64_t limit);
/* How long to wait for the store's answer in a call that must end by the deadline, or now if that
   has passed: no call returns later than 200 ms after its timeout. */
int64_t hl__answer_by(int64_t deadline);
/* Like hl__answer_by, and about 800 ms longer: for calls where giving up costs the connection, or
   leaves a lease without an owner. A busy machine may answer that late. */
int64_t hl__late_answer_by(int64_t deadline);
int64_t hl__late_answer_at(int64_t now, int64_t deadline); /* the same, at that time */

/* Makes a condition for hl__cond_wait: its time is CLOCK_MONOTONIC. */
void hl__cond_init(pthread_cond_t *condition);
/* Waits for the condition, but at most until the deadline. */
void hl__cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, int64_t deadline);

#endif
