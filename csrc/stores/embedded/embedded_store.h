/*
 * embedded_store.h - what makes a store of the table in shared memory (embedded.h). The files, from
 * the bottom; each uses only those above it in this list, and the table:
 *
 *   holders.c   who holds and awaits what, and the list of leases, for observers
 *   session.c   sessions: their rows in the table, and Symfony's files
 *   lease.c     the operations on leases
 *   start.c     takes that do not block
 *   store.c     the store, and its hl_store_ops
 *
 * Locks: a store's mutex comes before those of the table. A lease's word `busy` is a lock, too: the
 * process whose number is in it changes the lease, and takes locks of partitions meanwhile. The
 * next process that wants the word finds out if its owner has died. Whatever is changed under it is
 * switched by one word, so there is nothing to mend.
 */
#ifndef HIERLOCK_EMBEDDED_STORE_H
#define HIERLOCK_EMBEDDED_STORE_H

#include "embedded.h"
#include "flock.h"

HL__MUTEX_CLASS(hl__embedded_store_mutex)
HL__AFTER(hl__connection_mutex) HL__BEFORE(hl__shm_registry);
HL__MUTEX_CLASS(hl__embedded_guard)
HL__AFTER(hl__embedded_store_mutex) HL__BEFORE(hl__shm_space_mutex);

typedef struct hl__embedded_store {
  hl_store base;
  const hl_store_config *config;
  pthread_mutex_t mutex;
  hl__shm_space *space HL__GUARDED_BY(hl__embedded_store_mutex); /* a reference */
  char *flocks; /* hl__flock_directory; NULL: they are not wanted. Constant */
} hl__embedded_store;

HL__MUTEX_FUNCTIONS(hl__embedded_store, hl__embedded_store, mutex, hl__embedded_store_mutex)

/* A lock file of Symfony's that a session has locked. */
typedef struct hl__embedded_file {
  hl_row row;
  hl__flock flock;
} hl__embedded_file;

typedef struct hl__embedded_session {
  hl_session base;
  pthread_mutex_t guard;  /* another thread uses `table`, or its own replaces it */
  hl__shm_session *table; /* its claims; its own thread reads it without the guard */
  hl__embedded_file *files;
  size_t file_count, file_capacity;
  int64_t checked;                  /* when it looked at the directory last; hl__shm_now */
  bool holds;                       /* it counts in space->holding */
  struct hl__embedded_start *start; /* the take that was started (start.c); NULL */
  atomic_bool interrupted;          /* until the call under way ends, or settle */
} hl__embedded_session;

HL__MUTEX_FUNCTIONS(hl__embedded_guard, hl__embedded_session, guard, hl__embedded_guard)

static inline hl__embedded_session *hl__embedded_session_of(hl_session *session) {
  return (hl__embedded_session *)(void *)session;
}
static inline hl__embedded_store *hl__embedded_store_of(const hl__embedded_session *session) {
  return (hl__embedded_store *)(void *)session->base.store;
}

/* ------------------------------------------------------------ holders.c */

/* The bytes of an id as the table has them. */
bool hl__embedded_id_is(hl__a64 words[2], const uint8_t id[16]);
void hl__embedded_id_get(uint8_t id[16], hl__a64 words[2]);
/* Whether a lease that has not ended is one of the filter's, its time up or not. The caller
   compares the stamp afterwards. */
bool hl__embedded_lease_matches(hl__shm_space *space, uint32_t lease,
                                const hl_lease_filter *filter);
/* Milliseconds until a lease with that word `end` ends; 0: its time is up. */
int64_t hl__embedded_left(hl__shm_space *space, uint64_t end);
/* Calls fn for the matching leases. */
void hl__embedded_leases_list(hl__shm_space *space, const hl_lease_filter *filter, hl_holder_fn fn,
                              void *context);
/* Calls fn for the sessions that hold or await what conflicts with the filter's rows. HL_OK,
   HL_ENOMEM. */
int hl__embedded_sessions_list(hl__shm_space *space, const hl_lease_filter *filter, hl_holder_fn fn,
                               void *context, hl_error *error);

/* ------------------------------------------------------------ session.c */

int hl__embedded_session_open(hl_store *store, int64_t deadline, hl_session **session,
                              hl_error *error);
void hl__embedded_session_close(hl_session *session);
/* Before a call on a session that holds nothing: leaves a table that the directory does not lead to
   any more. HL_OK, HL_ECONNECTION ... */
int hl__embedded_session_refresh(hl__embedded_session *session, hl_error *error);
/* Takes all rows of a request, or none: see hl_store_ops.take. exempt: the stamp of a lease; 0:
   none. */
int hl__embedded_session_take(hl__embedded_session *session, const hl_request *request,
                              uint64_t exempt, hl_error *error);
/* The beginning of a take: room for the files, and what observers see. *part: the request without
   its files, which come last in it. HL_OK, HL_ECONNECTION, HL_ESTORE, HL_ENOMEM. */
int hl__embedded_take_begin(hl__embedded_session *session, const hl_request *request,
                            hl_request *part, hl_error *error);
/* Locks one of Symfony's files, for which there is room, or tries to: HL_TIMEOUT. */
int hl__embedded_file_try(hl__embedded_session *session, const hl_request *request,
                          const hl_row *row, hl_error *error);
/* The session holds something from now on. */
void hl__embedded_session_holds(hl__embedded_session *session);
/* Gives back all that it holds. */
void hl__embedded_session_clear(hl__embedded_session *session);
/* Checks that the session's locks still exclude other programs. HL_OK, HL_ECONNECTION. */
int hl__embedded_session_check(hl__embedded_session *session, hl_error *error);

/* -------------------------------------------------------------- lease.c */

extern const hl_lease_ops hl__embedded_leases;
/* Makes a lease of the rows that the session holds, which keeps them. HL_OK, HL_TIMEOUT,
   HL_ECONNECTION, HL_ESTORE. */
int hl__embedded_lease_write(hl__embedded_session *session, const hl_request *request,
                             hl_grant *grant, hl_error *error);

/* -------------------------------------------------------------- start.c */

/* hl_store_ops.start */
int hl__embedded_start(hl_session *session, const hl_request *request, hl_started *started,
                       hl_error *error);
/* What a take does once it has the rows: draws the token, and makes a lease of them if the request
   is for one. */
int hl__embedded_grant(hl__embedded_session *session, const hl_request *request, hl_grant *grant,
                       hl_error *error);

#endif
