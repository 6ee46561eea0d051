/*
 * clock.h - time, and waiting for a condition until some time. Free of the rest of the
 * core: a store that is a module of its own has its own copy.
 */
#ifndef HIERLOCK_CLOCK_H
#define HIERLOCK_CLOCK_H

#include "hierlock.h"

#include <pthread.h>

/* Milliseconds of CLOCK_MONOTONIC, and of Unix time. */
int64_t hl__now_ms(void);
/* Microseconds of CLOCK_MONOTONIC: to measure with. A thousandth of it is hl__now_ms. */
int64_t hl__now_us(void);
/* Milliseconds of CLOCK_BOOTTIME, which goes on while the machine sleeps, as the
   server's lease does: for nothing but leases. Not comparable with hl__now_ms. */
int64_t hl__boot_ms(void);
int64_t hl__unix_ms(void);

/* Sums and differences saturate here. A time that a store, a text or an option gave
   may be any number, and a clock that has just begun says next to nothing. */

/* Milliseconds left until deadline, never negative; HL_FOREVER stays. */
int64_t hl__left_ms(int64_t deadline);
/* The time that a lease surely lasts which ends then by hl__boot_ms: rounded down, never
   negative; HL_FOREVER stays. */
int64_t hl__lease_left_ms(int64_t end);
/* now + ms; HL_FOREVER stays. Either may be negative. */
int64_t hl__deadline(int64_t now, int64_t ms);
/* until - since */
int64_t hl__between_ms(int64_t since, int64_t until);

/* Until when the answer of a store is awaited, for a call that is to end by the deadline, or now
   where that is over: no call returns later than 200 ms after its timeout. */
int64_t hl__answer_by(int64_t deadline);
/* The same, and a second: where giving up costs the connection, or leaves a lease to nobody. A busy
   machine answers later than after 200 ms, and is no reason for that. */
int64_t hl__late_answer_by(int64_t deadline);

/* Waits for the condition, of CLOCK_MONOTONIC, until the deadline at most. */
void hl__cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, int64_t deadline);

#endif
