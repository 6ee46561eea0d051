/*
 * worker.h - shared by the two halves of a worker. worker.c acquires, extends and ends locks of
 * both kinds. lease.c does all that only leases have: refreshes them, in time, in the last
 * moment and late, exports, imports, converts and revokes.
 */
#ifndef WORKER_H
#define WORKER_H

#include "soak.h"

#include <pthread.h>

enum { LANES = 8, LANE_RECORDS = 4 };

/* ASKING: a refresh, a check or a to_lease was started. */
typedef enum lane_state {
  LANE_FREE,
  LANE_STARTED,
  LANE_HELD,
  LANE_EXTENDING,
  LANE_ASKING
} lane_state;

typedef enum lane_question { ASK_REFRESH, ASK_CHECK, ASK_CONVERT } lane_question;

/* A lock and its extensions; records[0] is the acquisition. */
typedef struct lane {
  lane_state state;
  hl_lock *lock;
  hl_pending *pending;
  record *records[LANE_RECORDS];
  int64_t meanwhile; /* it was last told that it holds while an extend waited; or 0 */
  bool cancelled;    /* an extend was, and may still be under way */
  int n;
  int64_t until;     /* hold so long */
  int64_t cancel_at; /* of the pending; 0: not */
  /* Fields of a lease. */
  bool lease;
  int64_t ttl;        /* ms: its own */
  int64_t late_at;    /* its time was up, and then something is done about it; or 0 */
  int64_t refresh_at; /* in time; 0: in the last moment; INT64_MAX: not */
  int64_t heard_at;   /* a check that was called then has told us of a loss; or 0 */
  /* The question under way: */
  lane_question question;
  int64_t asked_at, asked_ttl;
  bool was_over;
} lane;

typedef enum thread_kind { BLOCKING, WAITING, CLOSING } thread_kind;

typedef struct thread {
  pthread_t id;
  int number;
  thread_kind kind;
  int manager_number;
  hl_manager *manager;
  dice dice;
  record *records;
  int next_record;
  hl_plan *plan;
  bool follows; /* others of a burst, after a large one */
  lane lanes[LANES];
  int lane_count;
} thread;

/* ---------------------------------------------------------------- worker.c */

void count(int what);
/* A free record, filled in; the caller publishes it by record_call. NULL: main has not
   read enough of them yet. */
record *record_new(thread *self, call_kind kind, uint64_t handle, int64_t timeout);
uint64_t handle_new(void);
void record_call(record *r);
void record_end(record *r, end_kind how, int64_t ending);
/* Chooses the targets, into the record and the thread's plan. */
void targets_choose(thread *self, record *r, bool few);
/* Notes the outcome of a call; the record of a failed one ends here. */
void call_returned(record *r, int status, hl_lock *lock, const hl_error *error, bool cancelled);
bool lane_sample(lane *self);
void lane_promise(lane *self);
void lane_update(thread *self, lane *l);
void lane_end(lane *self, end_kind how, int64_t ending);
void lane_held(thread *self, lane *l);

/* ----------------------------------------------------------------- lease.c */

/* Makes the record a lease's, at random, and fills in the options; label: at least 24 bytes, as
   `owner`. */
void lease_choose(thread *self, lane *l, record *r, hl_options *options, char *label, char *owner);
/* Notes that the lease was granted. */
void lease_held(thread *self, lane *l);
/* Does the next act of a lease's holder. */
void lease_turn(thread *self, lane *l);
/* A session becomes one. */
void lease_convert(thread *self, lane *l);
/* The question's answer, if it is there. */
void lease_answer(thread *self, lane *l);
/* Ends it, in one of the ways that a lease has. */
void lease_drop(thread *self, lane *l);
/* Just before its manager is closed, and just after. */
void lease_closing(lane *l);
void lease_closed(lane *l, int64_t ending);
/* Whether the store says that no other has had it since it was granted: for a holder that has
   written under it. */
bool lease_confirm(lane *l);
/* Takes over a lease that another thread has exported, if there is any. */
void lease_import(thread *self, lane *l);
void lease_revoke_sometimes(thread *self);

#endif
