/*
 * socket.h - how a store waits for its server: with poll(), for a socket, and for a wake-up that
 * another thread sends. A store that is a module of its own has its own copy.
 */
#ifndef HIERLOCK_SOCKET_H
#define HIERLOCK_SOCKET_H

#include "store.h"

#include <poll.h>
#include <stdatomic.h>

/* The wake-up of a session. Only the thread that makes the session's calls waits for it. */
typedef struct hl__wakeup {
  int fd; /* an eventfd, which hl__wake makes readable */
  uint64_t ticket;
  atomic_bool interrupted; /* hl_store_ops.interrupt */
} hl__wakeup;

/* HL_OK, HL_ECONNECTION, HL_ENOMEM; close it in each case. A forked child keeps no copy of it. */
int hl__wakeup_open(hl__wakeup *wakeup, hl_error *error);
void hl__wakeup_close(const hl__wakeup *wakeup);
/* Both from any thread. interrupt wakes, too, unless the last interruption has not been taken. */
void hl__wake(const hl__wakeup *wakeup);
void hl__wakeup_interrupt(hl__wakeup *wakeup);
/* Makes the eventfd unreadable. */
void hl__wakeup_clear(const hl__wakeup *wakeup);
/* Clears, and forgets the interruption. Returns whether there was one. */
bool hl__wakeup_interruption_take(hl__wakeup *wakeup);

/* hl_store_config.wait_begin, wait_end. The second leaves errno alone. */
void hl__server_wait_begin(const hl_store_config *config);
void hl__server_wait_end(const hl_store_config *config);

/* Calls poll() until the deadline (hl__now_ms; 0: once, without a wait), and wait_begin and
   wait_end around each wait. Without a wait it may be called with a mutex. > 0: something has come;
   0: nothing has come in time; < 0: poll() has failed, and errno says why. */
int hl__poll(const hl_store_config *config, struct pollfd *p, nfds_t n, int64_t deadline);
/* Waits for one of the events at the socket, or for an error, which reading will tell: HL_OK.
   HL_CANCELLED: the session is interrupted (NULL: it cannot be). HL_TIMEOUT: the deadline is over.
   HL_ECONNECTION: poll() has failed. fd < 0: there is no socket. */
int hl__socket_await(const hl_store_config *config, int fd, short events, const hl__wakeup *wakeup,
                     int64_t deadline);

#endif
