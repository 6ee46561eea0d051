/*
 * fork.h - what happens to descriptors in a forked child. A store that is a module of its own has
 * its own copy, with its own list.
 */
#ifndef HIERLOCK_FORK_H
#define HIERLOCK_FORK_H

#include "hierlock.h"
#include "mutex.h"

#include <stdatomic.h>

/* hl__fork_watch has each forked child close the descriptor at once: a socket or lock file that a
   child keeps open would keep the locks of a parent that died. Forbid births (below) from opening
   the descriptor until it is watched, or a child may keep it. Unwatch it before it is closed. Any
   thread.

   watch returns a ticket, never the same one twice; 0: out of memory, or no such descriptor. A
   library may close its socket without telling us, and the number may since be watched for another
   user. So a caller that cannot know passes its ticket to unwatch, which ignores the call if the
   ticket is not the current one. Ticket 0: unwatch in any case. */
uint64_t hl__fork_watch(int fd);
void hl__fork_unwatch(int fd, uint64_t ticket);
/* Whether the descriptor is still the file that was watched under this ticket. */
bool hl__fork_watches(int fd, uint64_t ticket);
/* Closes a watched descriptor, unless it is another file by now, because a stranger closed it and
   its number was given out again. Do not call it while the same thread forbids births. Leaves errno
   alone. */
void hl__fork_close(int fd);
/* Between the two, fork() waits: for work that must not be interrupted by the birth of a child. Not
   nested. Any number of threads. */
void hl__fork_forbid(void) HL__ACQUIRES_SHARED(hl__births);
void hl__fork_allow(void) HL__RELEASES_SHARED(hl__births);
/* Grows by one in each forked child. A thing made under another number belongs to a parent. One
   atomic read. */
unsigned hl__fork_generation(void);
/* A random number of this process, which no parent, child or sibling has. 0: there were no random
   numbers. */
uint64_t hl__fork_identity(void);
/* A lock that a forked child can take even if a thread of the parent held it: then what it guards
   may be half changed. The word is 0 at first. Other threads spin, so keep it for a moment only.
   Returns a number that is not 0, and that no parent gets. */
unsigned hl__fork_lock(atomic_uint *word);
void hl__fork_unlock(atomic_uint *word);

#endif
