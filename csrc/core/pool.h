/*
 * pool.h - the connections of a manager. A connection is a session of the store, with what the core
 * knows of it. Connections are reused.
 *
 * The life of a connection; docs/life.svg draws it:
 *
 *   BUSY       one thread owns it: it connects, locks, or queries holders. Becomes HELD
 *              when granted, else IDLE; freed if its session ended
 *   HELD       pinned by a hold (hold.h); the keeper renews it. BUSY while an extend
 *              runs. Released: becomes IDLE if the release was sent, though the answer may
 *              still be outstanding; RELEASING if it could not be sent, as a sign of life
 *              is not answered yet. Lost, or the manager closed: ENDED
 *   RELEASING  released, but the release is not sent. IDLE once the keeper has read that
 *              answer and sent the release. Freed if no answer came for a second: the end
 *              of the connection releases the rows, too
 *   IDLE       in the pool. BUSY when it is taken; freed if its session ended, or if it
 *              was idle for long
 *   ENDED      was held; its session is closed. Its hold has not noticed yet, and frees
 *              it when it does
 *
 * The thread of a BUSY connection owns its session, and needs no mutex for it. The connection's
 * mutex guards the session of a HELD connection; the manager's mutex guards the others.
 */
#ifndef HIERLOCK_POOL_H
#define HIERLOCK_POOL_H

#include "event.h"
#include "mutex.h"
#include "store.h"

typedef enum hl__connection_state {
  HL__BUSY,
  HL__HELD,
  HL__RELEASING,
  HL__IDLE,
  HL__ENDED
} hl__connection_state;

typedef struct hl__connection hl__connection;

/* A command that was sent on an idle connection and is not answered yet. */
typedef struct hl__sent hl__sent;
struct hl__sent {
  /* Called once, with the manager's mutex. answered false: the connection ended or was given up
     before the answer came. */
  void (*end)(hl__sent *sent, bool answered);
};

struct hl__connection {
  pthread_mutex_t mutex;
  /* The store's part. NULL while connecting, and when ENDED. */
  hl_session *session;
  /* When the last answered command was sent, and when the sign of life was sent that is not
     answered yet (0: none); hl__boot_ms. Guarded as the session is. */
  int64_t answered, asked;
  bool fresh;    /* just connected; the owning thread's */
  hl__span span; /* HELD: since when, and on which level */

  hl__connection_state state HL__GUARDED_BY(hl__manager_mutex);
  /* Links of the list of all connections, and of the idle ones. */
  hl__connection *next HL__GUARDED_BY(hl__manager_mutex);
  hl__connection *previous HL__GUARDED_BY(hl__manager_mutex);
  hl__connection *older HL__GUARDED_BY(hl__manager_mutex);
  hl__connection *newer HL__GUARDED_BY(hl__manager_mutex);
  /* The thread that took it. */
  pthread_t owner HL__GUARDED_BY(hl__manager_mutex);
  /* BUSY: the time at which the keeper ends the call, as the store hangs (hl__pool_watch). */
  int64_t due HL__GUARDED_BY(hl__manager_mutex);
  /* BUSY: the store runs a call that hl_manager_cancel interrupts. */
  bool waits HL__GUARDED_BY(hl__manager_mutex);
  /* The keeper has interrupted the call. */
  bool overrun HL__GUARDED_BY(hl__manager_mutex);
  /* IDLE, RELEASING: since when. */
  int64_t idle_since HL__GUARDED_BY(hl__manager_mutex);
  hl__sent *sent HL__GUARDED_BY(hl__manager_mutex); /* or NULL */
};

HL__MUTEX_FUNCTIONS(hl__connection_mutex, hl__connection, mutex, hl__connection_mutex)

/* 0: the mutex is locked. */
static inline int hl__connection_mutex_trylock(hl__connection *connection)
    HL__ACQUIRES_IF_0(hl__connection_mutex) HL__UNCHECKED {
  return pthread_mutex_trylock(&connection->mutex);
}

/* The pool of a manager. */
typedef struct hl__pool {
  hl__connection *all;
  unsigned count;
  hl__connection *newest, *oldest; /* the idle ones */
  unsigned idle_count;
  /* BUSY connections that become IDLE again as soon as they are settled: see releases_await. */
  unsigned settling;
  unsigned queries; /* that have a connection now, or are connecting (hl__pool_run) */
  /* Connections that calls on their way to the store are going to take. A reservation counts here
     until its call has the connection; then the connection counts. */
  unsigned reserved;
  /* Called, with the manager's mutex, whenever there is more room than before. */
  void (*room)(hl_manager *manager);
  pthread_cond_t freed; /* broadcast likewise, for threads in hl__pool_take */
} hl__pool;

/* How a thread takes a connection. */
typedef struct hl__take {
  /* Neither: it may take a second to connect, however soon the deadline is. */
  bool fresh; /* it connects afresh, by the deadline, because another connection was stale */
  bool query; /* it connects by the deadline, even if calls use all of the pool (hl__pool_run) */
  bool try_once;
  int64_t deadline;
  bool *reservation; /* the caller's (hl__pool_reserve), which is used up; or NULL */
  /* NULL, or a flag that another thread sets, before a broadcast of `freed`, when the connection is
     no longer wanted. */
  const bool *given_up;
} hl__take;

/* Gives the calling thread a BUSY connection with an open session. Gives the mutex back while it
   blocks. HL_OK; HL_BUSY; HL_CANCELLED: given up, or the manager is closed; else as session_open.
   */
int hl__pool_take(hl_manager *manager, const hl__take *take, hl__connection **connection,
                  hl_error *error) HL__REQUIRES(hl__manager_mutex);
/* Waits for the answers to the releases that were sent just before, for 0.1 s at most. So a look at
   the holders does not find a session of this program that has ended. Gives the mutex back
   meanwhile. */
void hl__pool_releases_await(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* Has the keeper end the call on a BUSY connection if it has not returned by `due`. */
void hl__pool_watch(hl_manager *manager, hl__connection *connection, int64_t due)
    HL__REQUIRES(hl__manager_mutex);
/* hl__pool_put returns a BUSY connection that holds nothing to the pool, or closes it if it is no
   longer usable. hl__pool_discard always closes it. Both give the mutex back meanwhile if they
   close it. */
void hl__pool_put(hl_manager *manager, hl__connection *connection) HL__REQUIRES(hl__manager_mutex);
void hl__pool_discard(hl_manager *manager, hl__connection *connection)
    HL__REQUIRES(hl__manager_mutex);
/* Reserves room for one connection, and notes that in *reservation. Does nothing if it is reserved
   already. */
void hl__pool_reserve(hl_manager *manager, bool *reservation) HL__REQUIRES(hl__manager_mutex);
void hl__pool_unreserve(hl_manager *manager, bool *reservation) HL__REQUIRES(hl__manager_mutex);
/* Whether a new request would find a connection that is neither taken nor reserved. */
bool hl__pool_has_room(const hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* HL_BUSY */
int hl__pool_busy_error(const hl_manager *manager, hl_error *error);

/* Reads the answer for which an IDLE or RELEASING connection waits, if it has come. HL_OK: nothing
   is outstanding; HL_TIMEOUT: the answer may still come; HL_ECONNECTION: the session has ended, or
   the answer is overdue. */
int hl__pool_settle(hl_manager *manager, hl__connection *connection)
    HL__REQUIRES(hl__manager_mutex);
/* The newest IDLE connection that stands, as far as is known, and waits for no answer; or NULL. */
hl__connection *hl__pool_quiet(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* Notes a command that was sent on the connection. */
void hl__pool_sent(hl__connection *connection, hl__sent *sent) HL__REQUIRES(hl__manager_mutex);
/* Gives up waiting for the answers to such commands, but for those that have come. */
void hl__pool_sent_end(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* Makes a connection IDLE that is not in the list of idle ones. */
void hl__pool_idle(hl_manager *manager, hl__connection *connection) HL__REQUIRES(hl__manager_mutex);
/* Removes the connection from all lists. The caller owns it then. */
void hl__pool_unlink(hl_manager *manager, hl__connection *connection)
    HL__REQUIRES(hl__manager_mutex);
/* Like hl__pool_unlink, but adds the connection to the list *dead, by `next`, for hl__pool_free. */
void hl__pool_bury(hl_manager *manager, hl__connection *connection, hl__connection **dead)
    HL__REQUIRES(hl__manager_mutex);
/* Runs a short operation on a connection that holds nothing, even when the pool is full. If that
   says HL_ECONNECTION because a reused connection was stale, runs it once more on a fresh one.
   Gives the mutex back meanwhile. Returns what run or hl__pool_take returns. */
int hl__pool_run(hl_manager *manager,
                 int (*run)(hl_session *session, void *context, hl_error *error), void *context,
                 int64_t deadline, hl_error *error) HL__REQUIRES(hl__manager_mutex);
/* Like hl__pool_run, but for a closed manager: once, on a session of its own. */
int hl__pool_run_alone(hl_manager *manager,
                       int (*run)(hl_session *session, void *context, hl_error *error),
                       void *context, int64_t deadline, hl_error *error)
    HL__REQUIRES(hl__manager_mutex);
/* Closes a session, or NULL. exit() waits for that, as a client library is in it. Once another
   thread has called exit(), the session stays: the end of the process closes it. */
void hl__session_close(const hl_manager *manager, hl_session *session);
/* Closes and frees the connections of a list made by hl__pool_bury. Hold no mutex. */
void hl__pool_free(hl_manager *manager, hl__connection *dead);

#endif
