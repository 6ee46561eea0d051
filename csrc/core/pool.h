/*
 * pool.h - the connections of a manager: a connection is a way to the store, with
 * what the core knows of it. They are reused.
 *
 * The life of a connection; docs/life.svg draws it:
 *
 *   BUSY       one thread owns it: it connects, locks, or looks for holders.
 *              HELD when granted, IDLE when not; freed when its session ended
 *   HELD       pinned by a hold (hold.h); the keeper renews it. BUSY while an extend
 *              runs. Released: IDLE, where the release was sent; its answer may still be
 *              to come. RELEASING, where it cannot be sent, as a sign of life is
 *              not answered yet. Lost, or the manager closed: ENDED
 *   RELEASING  released, but the release is not sent. IDLE once the keeper has
 *              read that answer and sent the release; freed when no answer came
 *              for a second: the end of the connection releases, too
 *   IDLE       in the pool. BUSY when it is taken; freed when its session ended,
 *              or nobody took it for long
 *   ENDED      was held; its session is closed; its hold has not looked yet,
 *              and frees it then
 *
 * The session of a BUSY connection belongs to its thread and needs no mutex; that of a
 * HELD one is guarded by the connection's mutex, of the others by the manager's.
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

/* Something that was sent on an idle connection and is not answered yet. */
typedef struct hl__sent hl__sent;
struct hl__sent {
  /* Called once, with the manager's mutex: whether it was answered. If not, the connection
     has ended, or been given up, before. */
  void (*end)(hl__sent *sent, bool answered);
};

struct hl__connection {
  pthread_mutex_t mutex;
  /* The store's part. NULL while it is made, and when ENDED. */
  hl_session *session;
  /* When the last command that was answered was sent, and when a sign of life
     was sent that is not answered yet (0: none); hl__boot_ms. As the session. */
  int64_t answered, asked;
  bool fresh;    /* it has just been made; its thread's */
  hl__span span; /* HELD: what it holds */

  hl__connection_state state HL__GUARDED_BY(hl__manager_mutex);
  /* All of the manager; the idle ones. */
  hl__connection *next HL__GUARDED_BY(hl__manager_mutex);
  hl__connection *previous HL__GUARDED_BY(hl__manager_mutex);
  hl__connection *older HL__GUARDED_BY(hl__manager_mutex);
  hl__connection *newer HL__GUARDED_BY(hl__manager_mutex);
  /* The thread that took it. */
  pthread_t owner HL__GUARDED_BY(hl__manager_mutex);
  /* BUSY: from then on its store hangs, and the keeper ends the call (hl__pool_watch). */
  int64_t due HL__GUARDED_BY(hl__manager_mutex);
  /* BUSY: a call is in the store's hands that hl_manager_cancel interrupts. */
  bool waits HL__GUARDED_BY(hl__manager_mutex);
  /* The keeper has interrupted it. */
  bool overrun HL__GUARDED_BY(hl__manager_mutex);
  /* IDLE, RELEASING: since when. */
  int64_t idle_since HL__GUARDED_BY(hl__manager_mutex);
  hl__sent *sent HL__GUARDED_BY(hl__manager_mutex); /* or NULL */
};

HL__MUTEX_FUNCTIONS(hl__connection_mutex, hl__connection, mutex, hl__connection_mutex)

/* 0: it is held now. */
static inline int hl__connection_mutex_trylock(hl__connection *connection)
    HL__ACQUIRES_IF_0(hl__connection_mutex) HL__UNCHECKED {
  return pthread_mutex_trylock(&connection->mutex);
}

/* Of a manager. */
typedef struct hl__pool {
  hl__connection *all;
  unsigned count;
  hl__connection *newest, *oldest; /* the idle ones */
  unsigned idle_count;
  /* BUSY, but idle again at once: see releases_await. */
  unsigned settling;
  /* Connections that calls on their way to the store will take: each counts from
     when it is sent until it has its connection, which counts from then on. */
  unsigned reserved;
  /* Told, with the manager's mutex, whenever there is more room than before. */
  void (*room)(hl_manager *manager);
  pthread_cond_t freed; /* the same, for threads that wait in hl__pool_take */
} hl__pool;

typedef enum hl__take {
  HL__TAKE_ANY,
  HL__TAKE_FRESH,
  HL__TAKE_EXTRA
} hl__take;

/* A BUSY connection with an open session, for this thread. `how`: any, and it may take a second
   to connect, however soon the deadline is; or, by the deadline: one that is connected afresh, as
   another one has been of no use; one even when the pool is full, for a look. `reservation`:
   the caller's (hl__pool_reserve), which it uses up; or NULL. `given_up`: NULL, or
   what becomes true, before a broadcast of `freed`, when nobody wants it any more. The
   mutex is given back meanwhile where something blocks.
   HL_OK; HL_BUSY; HL_CANCELLED: given up, or the manager is closed; what session_open
   says. */
int hl__pool_take(hl_manager *manager, hl__take how, int64_t deadline, bool try_once,
                  bool *reservation, const bool *given_up, hl__connection **connection,
                  hl_error *error) HL__REQUIRES(hl__manager_mutex);
/* The call on a BUSY connection is to return by then: the keeper ends it otherwise. */
void hl__pool_watch(hl_manager *manager, hl__connection *connection, int64_t due)
    HL__REQUIRES(hl__manager_mutex);
/* A BUSY connection that holds nothing goes back; it is closed where it is of no more
   use. discard closes it in any case. The mutex is given back meanwhile. */
void hl__pool_put(hl_manager *manager, hl__connection *connection) HL__REQUIRES(hl__manager_mutex);
void hl__pool_discard(hl_manager *manager, hl__connection *connection)
    HL__REQUIRES(hl__manager_mutex);
/* Keeps room for one more connection, and notes that in *reservation; once. */
void hl__pool_reserve(hl_manager *manager, bool *reservation) HL__REQUIRES(hl__manager_mutex);
void hl__pool_unreserve(hl_manager *manager, bool *reservation) HL__REQUIRES(hl__manager_mutex);
/* Whether a request that comes now finds a connection, beside those that are
   reserved. */
bool hl__pool_has_room(const hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* HL_BUSY */
int hl__pool_busy_error(const hl_manager *manager, hl_error *error);

/* Reads the answer for which an IDLE or RELEASING connection waits, if it has come.
   HL_OK: there is none to wait for; HL_TIMEOUT: it may still come; HL_ECONNECTION:
   the session has ended, or the answer is overdue. */
int hl__pool_settle(hl_manager *manager, hl__connection *connection)
    HL__REQUIRES(hl__manager_mutex);
/* An IDLE connection that stands, as far as is known, and waits for no answer; the newest;
   or NULL. */
hl__connection *hl__pool_quiet(hl_manager *manager) HL__REQUIRES(hl__manager_mutex);
/* Something was sent on it. */
void hl__pool_sent(hl__connection *connection, hl__sent *sent) HL__REQUIRES(hl__manager_mutex);
/* A connection that is in no list of the idle ones becomes IDLE. */
void hl__pool_idle(hl_manager *manager, hl__connection *connection) HL__REQUIRES(hl__manager_mutex);
/* Takes it out of all lists; it is the caller's from now on. */
void hl__pool_unlink(hl_manager *manager, hl__connection *connection)
    HL__REQUIRES(hl__manager_mutex);
/* The same, and adds it to a list, by `next`, for hl__pool_free. */
void hl__pool_bury(hl_manager *manager, hl__connection *connection, hl__connection **dead)
    HL__REQUIRES(hl__manager_mutex);
/* Runs something short on a connection of its own that holds nothing, even when the pool is
   full; once more, on another one, where HL_ECONNECTION says that the first had gone stale.
   The mutex is given back meanwhile. What run says; what hl__pool_take says. */
int hl__pool_run(hl_manager *manager,
                 int (*run)(hl_session *session, void *context, hl_error *error), void *context,
                 int64_t deadline, hl_error *error) HL__REQUIRES(hl__manager_mutex);
/* The same of a manager that is closed: on a session of its own, once. */
int hl__pool_run_alone(hl_manager *manager,
                       int (*run)(hl_session *session, void *context, hl_error *error),
                       void *context, int64_t deadline) HL__REQUIRES(hl__manager_mutex);
/* Closes and frees the connections of such a list. No mutex is held. */
void hl__pool_free(hl_manager *manager, hl__connection *dead);

#endif
