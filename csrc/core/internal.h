/*
 * internal.h - what the files of the core, and the stores, share: errors, the
 * clock, and what happens to descriptors in a forked child. error.c, clock.c
 * and fork.c are small and free of the rest, so that a store which is a module
 * of its own can be linked with its own copy of them.
 */
#ifndef HIERLOCK_INTERNAL_H
#define HIERLOCK_INTERNAL_H

#include "hierlock.h"
#include "mutex.h"

#if defined(__GNUC__)
#define HL__PRINTF(f, a) __attribute__((format(printf, f, a)))
#else
#define HL__PRINTF(f, a)
#endif

/* Fills in *error (unless NULL) with a status, its usual retryability and a
   message; clears the rest. Returns status, so that a caller can write
   `return hl__error(error, HL_ESTORE, "...")`. */
int hl__error(hl_error *error, int status, const char *format, ...)
    HL__PRINTF(3, 4);
/* The same with the text of errno (taken at the call) appended. */
int hl__error_errno(hl_error *error, int status, const char *format, ...)
    HL__PRINTF(3, 4);
int hl__error_memory(hl_error *error);
/* The status of that name in the contract; HL_ESTORE when there is none. */
int hl__status_named(const char *name);

/* Milliseconds of CLOCK_MONOTONIC, and of Unix time. */
int64_t hl__now_ms(void);
/* Milliseconds of CLOCK_BOOTTIME, which goes on while the machine sleeps, as the
   server's lease does: for nothing but leases. Not comparable with hl__now_ms. */
int64_t hl__lease_ms(void);
int64_t hl__unix_ms(void);
/* Milliseconds left until deadline, never negative; HL_FOREVER stays. */
int64_t hl__left_ms(int64_t deadline);
/* now + ms, without overflow; HL_FOREVER stays. */
int64_t hl__deadline(int64_t now, int64_t ms);

/* Descriptors that a forked child must close at once: a socket or a lock file
   kept open by a child would keep the locks of a parent that died. Between
   opening and watching births must be forbidden (below), or a child may keep
   it. unwatch before the descriptor is closed. Any thread.
   watch returns a ticket, never the same; 0: there is no memory, or no such
   descriptor. A library may close its socket without telling us, and the number be
   watched for somebody else by then: so whoever cannot know shows his ticket, and
   another's is left alone. Ticket 0: whoever watches it. */
uint64_t hl__fork_watch(int fd);
void hl__fork_unwatch(int fd, uint64_t ticket);
/* Whether the number is still what was watched under this ticket. */
bool hl__fork_watches(int fd, uint64_t ticket);
/* Closes a watched descriptor; nothing, if it is another file by now, because a
   stranger has closed it and its number was given to somebody else. Not while
   births are forbidden by the same thread. Leaves errno alone. */
void hl__fork_close(int fd);
/* Between the two, fork() waits: for what must not be under way when a child is
   born. Not nested. Any number of threads. */
void hl__fork_forbid(void) HL__ACQUIRES_SHARED(hl__births);
void hl__fork_allow(void) HL__RELEASES_SHARED(hl__births);
/* Grows by one in each forked child: what was made under another number
   belongs to a parent. One atomic read. */
unsigned hl__fork_generation(void);

/* Waits for the condition, of CLOCK_MONOTONIC, until the deadline at most. */
void hl__cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex,
                   int64_t deadline);

/* Escapes bytes for people: control bytes, DEL and invalid UTF-8 as \xNN; "..."
   where the text was cut. Always NUL-terminated; returns the length written. */
size_t hl__escape(char *out, size_t size, const char *data, size_t n);

#endif
