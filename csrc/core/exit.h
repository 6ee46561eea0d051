/*
 * exit.h - what our threads do when the program calls exit().
 *
 * exit() takes apart what a client library stands on (OpenSSL, say) while threads of
 * ours may be in it. So a handler of our own runs first. It waits for those on their
 * way out: threads that connect, that tell the server to end a wait, and that give back
 * what the program has released. Then
 * it closes the client library to all threads but its own, and waits for those inside
 * to come out. Threads that wait for a lock stay in their waits; the server keeps what
 * those have got until their time is up.
 */
#ifndef HIERLOCK_EXIT_H
#define HIERLOCK_EXIT_H

#include <stdbool.h>

/* Has exit() run our handler, and keeps this code loaded. To be called before a thread of ours
   starts.
   `library`: it will be in a client library, and this tells that library from others
   (its store's operations); NULL: in none. The library is initialised by now, so our
   handler runs before those that it has registered: exit() runs the last one first. */
void hl__exit_watch(const void *library);

/* Begin and end of being on the way out, for n threads. exit() waits for them, for
   2.5 s at most. */
void hl__exit_await(unsigned n);
void hl__exit_await_end(void);
/* Does not return once another thread has called exit(), which then waits for
   n threads less: nothing new is begun. Returns in a thread that gives back. Without a
   mutex. */
void hl__exit_check(unsigned n);
/* Between the two, this thread gives back to the store what the program has released, or
   does not want: exit() waits for it, as for those on their way out. They may be nested. */
void hl__exit_give_back_begin(void);
void hl__exit_give_back_end(void);
/* Some thread has called exit(). */
bool hl__exit_begun(void);

/* A thread of ours is in the client library between the two. enter does not return
   once exit() has closed it, except in the thread that runs exit(). Without a mutex. */
void hl__library_enter(void);
void hl__library_leave(void);
/* A thread that is inside waits, for the server or for another thread, between the
   two: exit() need not wait for it. wait_end, as enter, may not return. */
void hl__library_wait_begin(void);
void hl__library_wait_end(void);
bool hl__library_is_inside(void);
bool hl__library_closed(void);

#endif
