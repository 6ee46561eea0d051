/*
 * exit.h - what our threads do when the program calls exit().
 *
 * exit() takes apart the libraries under a client library (OpenSSL, say) while our threads may be
 * in it. So a handler of ours runs first. The handler waits for threads on their way out: those
 * that connect, that tell the server to end a wait, or that give back released locks. Then it
 * closes the client library to all threads but its own, and waits for those inside to come out.
 * Threads that wait for a lock stay in their waits; the server keeps their pending requests until
 * these time out.
 */
#ifndef HIERLOCK_EXIT_H
#define HIERLOCK_EXIT_H

#include "store.h"

#include <pthread.h>
#include <stdbool.h>

/* Call it before a thread of ours starts: keeps this code loaded. */
void hl__exit_begin(void);
/* Starts a thread that blocks all signals: they are the program's. stack: its bytes, and it is
   detached; 0: as usual, and another thread joins it. 0, or an errno. */
int hl__thread_start(pthread_t *thread, size_t stack, void *(*run)(void *context), void *context);
/* Opens a store as ops->open does, which see. Before that, initialises its client library, and
   registers our handler with exit() behind the library's: exit() runs the last one first. exit()
   waits for this call as for a thread on its way out; the call does not return once another thread
   runs exit(). */
int hl__exit_watched_open(const hl_store_ops *ops, const hl_store_config *config, hl_store **store,
                          hl_error *error);

/* Begin and end of being on the way out, for n threads. exit() waits for them, but at most 2.5
   s. */
void hl__exit_await(unsigned n);
void hl__exit_await_end(void);
/* Does not return once another thread has called exit(), which then waits for n threads less: so no
   new work begins. Returns in a thread that gives back locks. Hold no mutex. */
void hl__exit_check(unsigned n);
/* As hl__exit_await(1); false, and nothing to end, once another thread has called exit(). Before
   the client library closes a connection: the end of the process closes it, too. */
bool hl__exit_try_await(void);
/* Between the two, this thread gives back locks that the program has released or does not want.
   exit() waits for it, as for threads on their way out. May be nested. */
void hl__exit_give_back_begin(void);
void hl__exit_give_back_end(void);
/* Whether a thread has called exit(). */
bool hl__exit_begun(void);

/* A thread of ours is in the client library between the two. enter does not return once exit() has
   closed it, except in the thread that runs exit(). Hold no mutex. */
void hl__library_enter(void);
void hl__library_leave(void);
/* Between the two, a thread inside waits, for the server or for another thread, so exit() need not
   wait for it. Like enter, wait_end may not return. */
void hl__library_wait_begin(void);
void hl__library_wait_end(void);
bool hl__library_is_inside(void);
bool hl__library_closed(void);

#endif
