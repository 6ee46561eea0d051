/*
 * fork.h - what happens to descriptors in a forked child. A store that is a module of its
 * own has its own copy, with its own list.
 */
#ifndef HIERLOCK_FORK_H
#define HIERLOCK_FORK_H

#include "hierlock.h"
#include "mutex.h"

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
/* A random number of this process: no parent, child or sibling has it. 0: none could be had. */
uint64_t hl__fork_identity(void);

#endif
