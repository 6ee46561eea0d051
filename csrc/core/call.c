/*
 * call.c - see call.h. What a request passes through:
 *
 *   1. line         behind those of this process for whom it would wait at the store
 *   2. connection   from the pool, or a new one
 *   3. store        takes the rows, in order, in one go, or nothing
 *   4. hold         the connection becomes HELD, and the keeper looks after it
 *
 * A thread that need not wait takes the manager's mutex twice: for 1 and 2, and for 4.
 */
#include "call.h"

#include "clock.h"
#include "error.h"
#include "exit.h"
#include "plan.h"

#include <assert.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A wait is cut into pieces of this length, so that each piece has an end on the
   server's side even when the caller wants to wait for ever. A server does not
   notice that a waiting client has died, and the dead waiter keeps the rows that
   it has already got. */
#define WAIT_PIECE_MS 3600000

/* -------------------------------------------------------------- what for */

int hl__options_take(const hl_options *given, hl_options *own, hl_error *error) {
  if (given && given->size == sizeof *own) {
    *own = *given;
    return HL_OK;
  }
  *own = (hl_options)HL_OPTIONS_INIT;
  if (!given) return HL_OK;
  return hl__struct_take(own, sizeof *own, offsetof(hl_options, ttl), given, "hl_options", error);
}

int hl__lease_options_check(const hl_options *options, hl_error *error) {
  if (options->ttl < 1 || options->ttl > HL_TTL_MAX)
    return hl__error(error, HL_EMISUSE, "ttl must be 0.001 to 315360000 seconds");
  size_t owner = options->owner ? strlen(options->owner) : 1;
  if (owner < 1 || owner > HL_OWNER_MAX)
    return hl__error(error, HL_EMISUSE, "owner must have 1 to %d bytes", HL_OWNER_MAX);
  return HL_OK;
}

int hl__updates_check(const hl_manager *manager, bool lease, hl_error *error) {
  const hl_store_traits *traits = &manager->ops->traits;
  if (manager->config.interoperates)
    return hl__error(error, HL_EUNSUPPORTED,
                     "Symfony Lock knows no update locks: acquire exclusively, or "
                     "open without `interoperate`");
  if (lease ? traits->leases_update : traits->updates) return HL_OK;
  return hl__error(error, HL_EUNSUPPORTED,
                   lease && traits->updates
                       ? "the store '%s' has no update locks that are leases: "
                         "acquire without a ttl, or exclusively"
                       : "the store '%s' has no update locks: acquire exclusively",
                   manager->ops->scheme);
}

int hl__options_check(hl_options *options, const hl_manager *manager, const hl_plan *plan,
                      hl_error *error) {
  if (!options->ttl && manager->ops->traits.leases_only) {
    options->ttl = manager->config.hold_timeout;
    options->auto_refresh = true;
  }
  if (hl_plan_target_count(plan) == 0)
    return hl__error(error, HL_EMISUSE, "there is no target to lock");
  if (hl_plan_layout(plan) != manager->layout)
    return hl__error(error, HL_EMISUSE, "the plan is of another layout");
  if (options->label_size > 0 && !options->label)
    return hl__error(error, HL_EMISUSE, "label is missing");
  if (hl__plan_updates(plan)) {
    int status = hl__updates_check(manager, options->ttl > 0, error);
    if (status) return status;
  }
  return options->ttl ? hl__lease_options_check(options, error) : HL_OK;
}

/* Unchecked: no other thread has it yet. */
HL__UNCHECKED void hl__call_init(hl__call *call, hl_manager *manager, hl__call_kind kind,
                                 hl_lock *lock, const hl_options *given) {
  int64_t start_us = hl__now_us(), start = start_us / 1000;
  int64_t timeout = given->timeout < 0 ? manager->config.timeout : given->timeout;
  /* Never early: our milliseconds are cut. */
  int64_t deadline = hl__deadline(start + 1, timeout);
  call->manager = manager;
  call->kind = kind;
  call->lock = lock;
  call->extension = NULL;
  call->lease = kind == HL__ACQUIRE ? lock->lease : NULL;
  call->adopts = call->lease && call->lease->imported;
  call->became = false;
  call->options = *given;
  call->start = start;
  call->start_us = start_us;
  call->timeout = timeout;
  call->deadline = deadline;
  call->owner = pthread_self();
  call->agent = hl__agent_number(given->agent);
  call->by_worker = call->in_line = false;
  call->waiter.plan = lock->plan;
  call->waiter.deadline = deadline;
  call->waiter.ops = NULL;
  call->waiter.members = NULL;
  call->connection = NULL;
  call->reserved = call->given_up = false;
}

/* Fills in what the store and its observers are told. `plan`: all that is held then. A store that
   grants all shows no path. */
static void request_fill(hl_request *request, const hl__call *call, const hl_plan *plan,
                         int64_t timeout, char path[256]) {
  size_t n;
  const hl_row *rows = hl__plan_rows(plan, &n);
  *request = (hl_request){
      .rows = rows,
      .n = n,
      .names = hl__plan_names(plan),
      .recorded = rows,
      .recorded_n = n,
      .try_once = timeout == 0,
      .cancellable = call->by_worker,
      .path = call->manager->ops->traits.grants_all ? "" : hl_plan_describe(plan, path, 256),
      .label = call->options.label,
      .label_size = call->options.label_size,
      .mode = hl_plan_mode(plan),
      .agent = call->agent,
      .blocks = !call->by_worker && hl__wait_lasts(&call->options, timeout),
      .holds = !call->by_worker && hl__wait_counts(&call->options, timeout),
  };
  if (call->lease) request->lease = &call->lease->terms;
}

int hl__timeout_error(hl_error *error, const hl_plan *plan, int64_t timeout) {
  char path[256];
  (void)hl_plan_describe(plan, path, sizeof path);
  if (timeout == 0) return hl__error(error, HL_TIMEOUT, "%s is locked; tried once", path);
  return hl__error(error, HL_TIMEOUT, "%s was not granted within %.3f s", path,
                   (double)timeout / 1000);
}

/* Replaces the message of the store's statement: the error names the nodes that were not granted,
   and how long the caller waited. The store's errno and SQLSTATE stay. */
static void timeout_say(hl_error *error, const hl_plan *plan, int64_t timeout) {
  if (!error) return;
  hl_error before = *error;
  (void)hl__timeout_error(error, plan, timeout);
  error->server_errno = before.server_errno;
  error->retry_after_ms = before.retry_after_ms;
  memcpy(error->sqlstate, before.sqlstate, sizeof error->sqlstate);
  if (!before.reason[0]) return;
  char path[256];
  memcpy(error->reason, before.reason, sizeof error->reason);
  (void)snprintf(error->message, sizeof error->message, "%s was not granted within %.3f s: %s",
                 hl_plan_describe(plan, path, sizeof path), (double)timeout / 1000, before.reason);
}

/* ------------------------------------------------------ in the store's hands */

static bool is_unwanted(const hl__call *call) HL__REQUIRES(hl__manager_mutex) {
  return call->manager->cancelled || call->given_up;
}

static int64_t answer_by(const hl__call *call, int64_t deadline) {
  return call->manager->ops->traits.leases_only && !call->adopts ? hl__answer_by(deadline)
                                                                 : hl__late_answer_by(deadline);
}

/* Takes a connection; a fresh one where an older one was of no use. */
static int connection_take(hl__call *call, const hl_request *request, bool fresh, int64_t deadline,
                           hl__connection **connection, hl_error *error)
    HL__REQUIRES(hl__manager_mutex) {
  const hl__take take = {.fresh = fresh,
                         .try_once = request->try_once,
                         .deadline = deadline,
                         .reservation = &call->reserved,
                         .given_up = &call->given_up};
  return hl__pool_take(call->manager, &take, connection, error);
}

/* Sets the deadline of the store's next piece of waiting, which takes `longest` ms,
   or what the core allows at most. The keeper watches it, from now on: the store has answered soon
   afterwards, and by `limit`, or hangs. Time that went into connecting is not the server's. False:
   the call is given up. A thread that gives it up from now on finds the connection, and interrupts
   it. */
static bool piece_begin(hl__call *call, hl__connection *connection, int64_t deadline,
                        int64_t longest, int64_t limit, hl_request *request)
    HL__REQUIRES(hl__manager_mutex) {
  if (is_unwanted(call)) return false;
  int64_t now = hl__now_ms();
  int64_t end = now + (longest < WAIT_PIECE_MS ? longest : WAIT_PIECE_MS);
  if (deadline < end) end = deadline;
  request->deadline = end;
  int64_t due = hl__late_answer_at(now, end);
  bool own = call->manager->ops->traits.leases_only; /* which sees to the limit itself */
  hl__pool_watch(call->manager, connection, own || connection->fresh || due < limit ? due : limit);
  call->connection = connection;
  connection->waits = !(call->by_worker && call->in_line); /* else its pending is given up */
  return true;
}

static int piece_run(hl__call *call, hl_request *request, hl_grant *grant, hl_error *error)
    HL__REQUIRES(hl__manager_mutex) {
  hl_manager *manager = call->manager;
  hl_session *session = call->connection->session;
  hl__manager_mutex_unlock(manager);
  hl__exit_check(0);
  int status = call->adopts ? manager->store->leases->adopt(session, request, grant, error)
                            : manager->ops->take(session, request, grant, error);
  assert(call->adopts || !hl__is_step(status) ||
         (status == HL__BEHIND_UPDATE && request->gives_way));
  hl__manager_mutex_lock(manager);
  return status;
}

void hl__call_interrupt(hl__call *call) {
  const hl_store_ops *ops = call->manager->ops;
  /* Not a round trip that ends soon by itself: the lock may be worth it. */
  if (call->kind > HL__UPGRADE || !call->connection || !call->connection->session) return;
  ops->interrupt(call->connection->session);
  if (ops->traits.expires) call->lock->hold.kept_until = 0;
}

/* ------------------------------------------------------------- acquiring */

/* The lock takes over what the connection has got. A lease leaves nothing at the connection. */
static int granted(hl__call *call, hl__connection *connection, const hl_grant *grant,
                   hl_error *error) HL__REQUIRES(hl__manager_mutex) {
  if (!call->lease) {
    hl__hold_begin(&call->lock->hold, connection, grant, call->owner,
                   hl__plan_level(call->lock->plan));
    return HL_OK;
  }
  hl__pool_put(call->manager, connection);
  call->lock->hold.token = grant->token;
  call->lease->span = (hl__span){hl__now_us(), hl__plan_level(call->lock->plan)};
  if (hl__lease_begin(call->lease, grant)) return HL_OK;
  /* Where the manager was closed while the connection was put back, the caller gets no handle. The
     program whose text was imported has that still. */
  bool closed = call->manager->closed;
  if (!closed || !call->adopts) hl__lease_undo(call->lease);
  return closed ? hl__manager_closed_error(error) : hl__lease_late_error(error);
}

/* Whether the store may still have the record of a lease whose caller got nothing, after that
   status: the connection ended, or the interruption of the take has met the drop. A lease that its
   caller does not want any more goes here; an imported one stays with its text. */
static bool record_stays(hl__call *call, hl__connection *connection, const hl_grant *grant,
                         int status) HL__REQUIRES(hl__manager_mutex) {
  hl_manager *manager = call->manager;
  if (!call->lease) return false;
  if (status != HL_OK) return status == HL_ECONNECTION && !call->adopts;
  call->lease->terms.place = grant->place;
  if (!grant->sent_ms || call->adopts) return false;
  hl__manager_mutex_unlock(manager);
  hl__exit_give_back_begin();
  status = manager->store->leases->drop(connection->session, &call->lease->terms, true,
                                        hl__now_ms() + 1000, NULL);
  hl__exit_give_back_end();
  hl__manager_mutex_lock(manager);
  return status != HL_OK && status != HL_ELOST;
}

/* Whether a call goes on after the end of its connection, with a fresh one. An older connection may
   have gone stale in the pool. The store may have ended a fresh connection that was silent for
   hold_timeout, as on a busy machine. */
static bool repairs(const hl__call *call, const hl__connection *connection, bool repaired,
                    int64_t limit) HL__REQUIRES(hl__manager_mutex) {
  bool first = !repaired && !connection->fresh;
  bool silent = hl__boot_ms() - connection->answered >= call->manager->config.hold_timeout;
  return (first || silent) && !is_unwanted(call) && hl__left_ms(limit) > 0;
}

/* How an acquisition tries, and tries again. */
typedef struct attempts {
  int64_t deadline, limit; /* a store that hangs gets no more than the limit */
  bool repaired;           /* its connection had ended, and it goes on with a fresh one */
  bool dropping;           /* a try awaits deletions, once */
  uint64_t put;
  hl__connection *connection; /* of the present try */
  hl_grant *grant;
} attempts;

static int attempts_begin(hl__call *call, int64_t deadline, hl_grant *grant, attempts *self,
                          hl_error *error) HL__REQUIRES(hl__manager_mutex) {
  hl_manager *manager = call->manager;
  if (call->lease && !manager->store->leases) return hl__lease_unsupported(manager, error);
  if (manager->ops->traits.expires || (call->lease && call->lease->refreshes)) {
    int status = hl__keeper_start(manager, error);
    if (status) return status;
  }
  /* A try must not fail on a lease that this process has released but not deleted yet: it waits for
     those deletions, then tries once more. */
  uint64_t put = manager->drops_put;
  *self = (attempts){.deadline = deadline,
                     .limit = answer_by(call, deadline),
                     .dropping = manager->ops->traits.blocks && manager->drops_gone < put,
                     .put = put,
                     .grant = grant};
  return HL_OK;
}

/* The store has answered with that status; where the call was not wanted any more, it was perhaps
   not asked. HL_OK: the lock holds what the request says; HL__AGAIN: to be tried again; otherwise
   nothing is held. Model: acquire.pml, line.pml, hold. */
static int attempt_end(hl__call *call, const hl_request *request, attempts *self, int status,
                       hl_error *error) HL__REQUIRES(hl__manager_mutex) {
  hl_manager *manager = call->manager;
  hl__connection *connection = self->connection;
  const hl_grant *grant = self->grant;
  call->connection = NULL; /* no thread interrupts it any more */
  bool wanted = !is_unwanted(call);
  bool overrun = connection->overrun; /* the keeper has ended its session */
  if (wanted && status == HL_OK && !overrun) return granted(call, connection, grant, error);
  bool recorded = record_stays(call, connection, grant, status);
  /* So that no other call takes its room before it tries again. */
  if (wanted && call->by_worker && manager->ops->traits.scarce)
    hl__pool_reserve(manager, &call->reserved);
  if (!wanted || overrun || status == HL_ECONNECTION) {
    bool again = repairs(call, connection, self->repaired, self->limit);
    hl__pool_discard(manager, connection);
    /* The record may be there, and would keep the next try out. */
    if (call->lease && !call->adopts) call->lease->terms.place = grant->place;
    if (recorded && grant->sent_ms && hl__lease_recall(call->lease, self->limit) != HL_OK)
      again = false;
    if (!wanted) return hl__manager_closed_error(error);
    if (overrun) return hl__error(error, HL_ECONNECTION, "the server did not answer in time");
    if (!again || hl__left_ms(self->limit) == 0) return status;
    self->repaired = true;
    if (call->lease && (status = hl__lease_redraw(call->lease, error)) != HL_OK) return status;
    hl__manager_event(manager, HL__CONNECTION_REPAIRED, 0, 0);
    return HL__AGAIN;
  }
  hl__pool_put(manager, connection);
  if (status == HL__BEHIND_UPDATE) return status;
  if (status == HL_TIMEOUT && !request->try_once && hl__left_ms(self->deadline) > 0)
    return HL__AGAIN; /* only a piece has ended */
  if (status != HL_TIMEOUT || !request->try_once || !self->dropping) return status;
  hl__leases_drops_await(manager, self->put, self->limit);
  self->dropping = false;
  return HL__AGAIN;
}

static int attempt_connect(hl__call *call, const hl_request *request, attempts *self,
                           hl_error *error) HL__REQUIRES(hl__manager_mutex) {
  *self->grant = (hl_grant){0};
  return connection_take(call, request, self->repaired,
                         self->repaired ? self->limit : self->deadline, &self->connection, error);
}

/* From now on the store has the request. False: it is not wanted any more. */
static bool attempt_begin(hl__call *call, hl_request *request, attempts *self)
    HL__REQUIRES(hl__manager_mutex) {
  return piece_begin(call, self->connection, self->deadline, HL_FOREVER, self->limit, request);
}

/* On HL_OK the lock holds what the request says; otherwise nothing is held. */
static int acquire_rows(hl__call *call, hl_request *request, int64_t deadline, hl_error *error)
    HL__REQUIRES(hl__manager_mutex) {
  attempts self = {0};
  hl_grant grant;
  int status = attempts_begin(call, deadline, &grant, &self, error);
  if (status) return status;
  do {
    status = attempt_connect(call, request, &self, error);
    if (status) return status;
    /* Connecting took all the time that there was: the store is asked, once. */
    if (hl__left_ms(deadline) == 0) request->try_once = true;
    if (attempt_begin(call, request, &self)) status = piece_run(call, request, &grant, error);
    status = attempt_end(call, request, &self, status, error);
  } while (status == HL__AGAIN);
  return status;
}

/* Runs acquire_rows, and once more if the store sends it behind an update lock. */
static int acquire(hl__call *call, hl_request *request, int64_t deadline, hl_error *error)
    HL__REQUIRES(hl__manager_mutex) {
  request->gives_way = !request->try_once;
  int status = acquire_rows(call, request, deadline, error);
  request->gives_way = false;
  if (status != HL__BEHIND_UPDATE) return status;
  size_t n;
  hl_row *rows = hl__plan_behind_updates(call->lock->plan, &n);
  if (!rows) return hl__error_memory(error);
  request->rows = rows; /* what is shown and recorded stays */
  request->n = n;
  status = acquire_rows(call, request, deadline, error);
  free(rows);
  return status;
}

int hl__call_acquire(hl__call *call, int64_t timeout, hl_error *error) {
  hl_request request;
  char path[256];
  const hl_plan *plan = call->lock->plan;
  request_fill(&request, call, plan, timeout, path);
  hl__manager_mutex_lock(call->manager);
  int status = acquire(call, &request, hl__deadline(call->start + 1, timeout), error);
  hl__manager_mutex_unlock(call->manager);
  call->lock->waited = hl__now_ms() - call->start;
  if (status == HL_TIMEOUT && !call->adopts) timeout_say(error, plan, timeout);
  return status;
}

/* ------------------------------------------------------- without a thread */

/* An acquisition that the store has, and calls back. */
typedef struct flight {
  hl_started base;
  hl__call *call;
  hl_request request;
  attempts attempts;
  char path[256];
} flight;

/* HL__UNFREE: the store has the flight, or has called back already, so that the flight may be
   freed. Any other status: the flight has ended. */
static int flight_go(flight *self) HL__REQUIRES(hl__manager_mutex) {
  hl__call *call = self->call;
  hl_manager *manager = call->manager;
  hl_error *error = &self->base.error;
  int status;
  do {
    status = attempt_connect(call, &self->request, &self->attempts, error);
    if (status) return status;
    if (attempt_begin(call, &self->request, &self->attempts)) {
      hl_session *session = self->attempts.connection->session;
      hl__manager_mutex_unlock(manager);
      status = manager->ops->start(session, &self->request, &self->base, error);
      hl__manager_mutex_lock(manager);
      if (status == HL_OK) return HL__UNFREE;
    }
    status = attempt_end(call, &self->request, &self->attempts, status, error);
  } while (status == HL__AGAIN);
  return status;
}

/* Ends the flight. */
static int flight_end(flight *self, int status, hl_error *error) {
  hl__call *call = self->call;
  call->lock->waited = hl__now_ms() - call->start;
  *error = self->base.error;
  if (status == HL_TIMEOUT) timeout_say(error, call->lock->plan, call->timeout);
  free(self);
  return status;
}

/* hl_started.done */
static void flight_done(hl_started *base, int status) {
  flight *self = (flight *)(void *)base;
  hl__call *call = self->call;
  hl_manager *manager = call->manager;
  hl_error error;
  (void)atomic_fetch_add(&manager->references, 1u); /* the call's may go meanwhile */
  hl__manager_mutex_lock(manager);
  status = attempt_end(call, &self->request, &self->attempts, status, &self->base.error);
  if (status == HL__AGAIN) status = flight_go(self);
  hl__manager_mutex_unlock(manager);
  if (status != HL__UNFREE) {
    status = flight_end(self, status, &error);
    call->ended(call, status, &error);
  }
  hl__manager_leave(manager);
}

int hl__call_start(hl__call *call, hl_error *error) {
  flight *self = malloc(sizeof *self);
  if (!self) return hl__error_memory(error);
  self->base.done = flight_done;
  self->base.error.status = HL_OK;
  self->call = call;
  request_fill(&self->request, call, call->lock->plan, call->timeout, self->path);
  int status =
      attempts_begin(call, call->deadline, &self->base.grant, &self->attempts, &self->base.error);
  if (status == HL_OK) status = flight_go(self);
  return status == HL__UNFREE ? status : flight_end(self, status, error);
}

/* Waits for the calling thread's place in line. A call that does not wait has no place. */
static int line_up(hl__call *call, hl_error *error) HL__REQUIRES(hl__manager_mutex) {
  if (call->timeout == 0 || call->manager->ops->traits.grants_all) return HL_OK;
  call->in_line = true;
  hl__line_join(call->manager, &call->waiter);
  int status = hl__line_wait(call->manager, &call->waiter);
  if (status == HL_TIMEOUT) return hl__timeout_error(error, call->waiter.plan, call->timeout);
  if (status == HL_CANCELLED) return hl__manager_closed_error(error);
  return status;
}

int64_t hl__call_ends(hl__call *call, int status) {
  hl_manager *manager = call->manager;
  const hl__span *span = call->lease ? &call->lease->span : &call->lock->hold.span;
  int64_t end = status == HL_OK ? span->since : hl__now_us();
  int64_t ms = end / 1000 - call->start;
  hl__manager_event(manager, HL__CALL_ENDS, status, ms);
  hl__manager_waited(manager, hl__plan_level(call->lock->plan), end - call->start_us);
  return ms;
}

int hl__call_make(hl__call *call, hl_error *error) {
  hl_manager *manager = call->manager;
  hl_request request;
  char path[256];
  request_fill(&request, call, call->lock->plan, call->timeout, path);
  hl__manager_renew(manager);
  hl__manager_mutex_lock(manager);
  int status = hl__manager_enter(manager, error);
  bool entered = status == HL_OK;
  if (entered) {
    hl__manager_event(manager, HL__CALL_BEGINS, 0, 0);
    status = line_up(call, error);
    if (status == HL_OK) status = acquire(call, &request, call->deadline, error);
    if (call->in_line) hl__line_leave(manager, &call->waiter, status == HL_OK);
    call->lock->waited = hl__call_ends(call, status);
  }
  hl__manager_mutex_unlock(manager);
  if (status == HL_TIMEOUT && !call->adopts) timeout_say(error, call->lock->plan, call->timeout);
  if (entered) hl__manager_leave(manager);
  return status;
}

/* ------------------------------------------------------------- extending */

/* ms. A wait ends, and begins again, so often that its answers show in time that the
   store still keeps what is held. A thread that looks at the lock meanwhile then
   sees it lost only when no answer came. */
static int64_t extend_piece_ms(const hl_manager *manager) {
  return manager->ops->traits.expires ? manager->config.hold_timeout / 2 : HL_FOREVER;
}

/* The store has answered what was sent then (0: it has not). A thread that looks
   at the lock sees at once whether it is lost. */
static void answered(hl__call *call, hl__connection *connection, int status, int64_t sent_ms)
    HL__REQUIRES(hl__manager_mutex) {
  hl_manager *manager = call->manager;
  hl__hold *hold = &call->lock->hold;
  bool lost = status == HL_DEADLOCK || status == HL_ECONNECTION;
  if (sent_ms) {
    connection->answered = sent_ms;
    connection->asked = 0; /* the answer to that came before */
  }
  if (lost)
    hold->kept_until = 0;
  else if (manager->ops->traits.expires && sent_ms && hold->kept_until) /* not interrupted */
    hold->kept_until = hl__deadline(sent_ms, manager->config.hold_timeout);
}

/* The store's part. The connection is BUSY meanwhile: the keeper does not renew it, and
   interrupts it when it hangs. */
static int extend_pieces(hl__call *call, hl__connection *connection, hl_request *request,
                         hl_grant *grant, hl_error *reason) HL__REQUIRES(hl__manager_mutex) {
  hl_manager *manager = call->manager;
  hl__hold *hold = &call->lock->hold;
  int64_t longest = extend_piece_ms(manager);
  int status = HL_OK;
  connection->state = HL__BUSY;
  do {
    if (!piece_begin(call, connection, call->deadline, longest, HL_FOREVER, request)) {
      status = hl__manager_closed_error(reason);
      break;
    }
    hold->watched = connection;
    grant->sent_ms = 0;
    status = piece_run(call, request, grant, reason);
    answered(call, connection, status, grant->sent_ms);
  } while (status == HL_TIMEOUT && !request->try_once && hl__left_ms(call->deadline) > 0);
  call->connection = NULL; /* no thread interrupts it any more */
  if (manager->ops->traits.expires) hold->watched = NULL;
  connection->state = HL__HELD;
  return status;
}

/* The lease of the lock comes to have those rows in their new mode, by whatever connection. Done
   twice, as after a connection that ended without an answer, it is done once. */
static int lease_convert(hl__call *call, hl_request *request, hl_error *error) {
  hl_manager *manager = call->manager;
  hl__lease *lease = call->lock->lease;
  hl_error reason = {0};
  hl_grant grant = {0};
  bool repaired = false, upgrades = call->kind == HL__UPGRADE;
  const int64_t limit = answer_by(call, call->deadline);
  request->lease = &lease->terms;
  hl__manager_renew(manager);
  hl__manager_mutex_lock(manager);
  hl__manager_event(manager, HL__CALL_BEGINS, 0, 0);
  int status = hl__lease_use(lease, error);
  while (status == HL_OK && request->n > 0) {
    grant = (hl_grant){.place = lease->terms.place, .token = call->extension->token};
    hl__connection *connection;
    status = connection_take(call, request, repaired, repaired ? limit : call->deadline,
                             &connection, error);
    if (status) break;
    bool wanted = piece_begin(call, connection, call->deadline, HL_FOREVER, limit, request);
    if (wanted) {
      hl__manager_mutex_unlock(manager);
      hl__exit_check(0);
      status = manager->store->leases->convert(connection->session, request, &grant, &reason);
      hl__manager_mutex_lock(manager);
    }
    call->connection = NULL; /* no thread interrupts it any more */
    bool ended = !wanted || connection->overrun || status == HL_ECONNECTION;
    if (connection->overrun && status != HL_ELOST)
      status = hl__error(&reason, HL_ECONNECTION, "the server did not answer in time");
    if (ended)
      hl__pool_discard(manager, connection);
    else
      hl__pool_put(manager, connection);
    if (!wanted) {
      status = hl__manager_closed_error(error);
      break;
    }
    if (status == HL_ELOST) hl__lease_lost(lease, &reason);
    if (grant.until_ms) hl__lease_until(lease, grant.until_ms);
    if (status == HL_ECONNECTION || (status && !upgrades)) call->lock->unsure = true;
    if (status == HL_OK) {
      lease->terms.place = grant.place;
      lease->terms.token = grant.token;
      status = hl__lease_stands(lease, error); /* released meanwhile, or over? */
      if (status) call->lock->unsure = true;
      break;
    }
    bool again = status == HL_TIMEOUT && !request->try_once && hl__left_ms(call->deadline) > 0;
    if (status == HL_ECONNECTION && !repaired && !is_unwanted(call) && hl__left_ms(limit) > 0)
      again = repaired = true;
    if (error && reason.status) *error = reason;
    if (again) status = hl__lease_use(lease, error);
    if (!again) break;
  }
  hl__manager_event(manager, HL__EXTEND_ENDS, status, 0);
  hl__manager_mutex_unlock(manager);
  if (status == HL_OK && upgrades && request->n > 0) call->extension->token = grant.token;
  return status;
}

static int extend(hl__call *call, hl_request *request, hl_error *error) {
  hl_manager *manager = call->manager;
  hl__hold *hold = &call->lock->hold;
  hl_grant grant = {0};
  hl_error reason = {0};

  int status = hl__hold_use(hold, error);
  if (status) return status;
  hl__connection *connection = hold->connection;
  if (request->n == 0) {
    hl__connection_mutex_unlock(connection);
    return HL_OK;
  }
  status = hl__hold_settle(manager, connection, hl__late_answer_by(call->deadline), &reason);
  /* An earlier extend may have been cancelled when it had just ended. */
  if (status == HL_OK) status = manager->ops->settle(connection->session, 0, &reason);
  hl__connection_mutex_unlock(connection);
  if (status) return hl__hold_lose(hold, &reason, error);

  hl__manager_mutex_lock(manager);
  bool held = connection->state == HL__HELD;
  hl__manager_event(manager, HL__CALL_BEGINS, 0, 0);
  if (held) status = extend_pieces(call, connection, request, &grant, &reason);
  hl__manager_event(manager, HL__EXTEND_ENDS, status, 0);
  bool closed = manager->closed, overrun = held && connection->overrun;
  if (overrun) hold->kept_until = 0;
  if (held && closed) {
    hl__connection_mutex_lock(connection);
    hl__hold_end(manager, connection, false);
    hl__connection_mutex_unlock(connection);
  } else if (held && status == HL_DEADLOCK) {
    /* The store has already given everything back. */
    hold->connection = hold->watched = NULL;
    hl__manager_event(manager, HL__HOLD_ENDS, 0, 0);
    hl__manager_held(manager, &hold->span);
    hl__pool_put(manager, connection);
  }
  hl__manager_mutex_unlock(manager);

  /* Ended by the keeper before we could begin, or closed meanwhile. */
  if (!held || closed) return hl__hold_use(hold, error);
  if (overrun && status != HL_DEADLOCK) {
    (void)hl__error(&reason, HL_ECONNECTION, "the server did not answer in time");
    status = HL_ECONNECTION;
  }
  if (status == HL_ECONNECTION) return hl__hold_lose(hold, &reason, error);
  /* The lock grew, so its token must be greater than the tokens of all earlier holders of its
     rows. */
  if (status == HL_OK) call->extension->token = grant.token;
  if (status && request->upgrade && !manager->ops->downgrade) call->lock->unsure = true;
  if (status && error) *error = reason;
  return status;
}

int hl__call_extend(hl__call *call, hl_error *error) {
  hl__extension *extension = call->extension;
  hl_request request;
  char path[256];
  request_fill(&request, call, extension->whole, call->timeout, path);
  request.rows = extension->missing;
  request.n = extension->missing_count;
  request.names = hl__plan_names(extension->plan);
  request.extend = true;
  request.upgrade = extension->converts;
  int status =
      call->lock->lease ? lease_convert(call, &request, error) : extend(call, &request, error);
  if (status == HL_TIMEOUT) timeout_say(error, extension->plan, call->timeout);
  return status;
}

int hl__call_downgrade(hl__call *call, hl_error *error) {
  hl__extension *extension = call->extension;
  hl_request request;
  char path[256];
  request_fill(&request, call, extension->whole, call->timeout, path);
  request.rows = extension->missing;
  request.n = extension->missing_count;
  request.deadline = call->deadline;
  if (call->lock->lease) return lease_convert(call, &request, error);
  return hl__hold_downgrade(&call->lock->hold, &request, error);
}

/* ------------------------------------------------------- becoming a lease */

int hl__call_to_lease(hl__call *call, hl_error *error) {
  hl_manager *manager = call->manager;
  hl__hold *hold = &call->lock->hold;
  hl_request request;
  hl_grant grant = {.token = hold->token};
  char path[256];
  request_fill(&request, call, call->lock->plan, call->timeout, path);
  request.deadline = call->deadline;
  int64_t limit = hl__late_answer_by(call->deadline);
  int64_t sure = hl__deadline(hl__now_ms(), hl__hold_left(hold));
  if (sure < limit) limit = sure;
  int status = HL_OK;
  if (call->lease->refreshes) {
    hl__manager_mutex_lock(manager);
    status = hl__keeper_start(manager, error);
    hl__manager_mutex_unlock(manager);
  }
  if (status == HL_OK) status = hl__hold_to_lease(hold, &request, &grant, error);
  if (status == HL_ELOST && grant.sent_ms) { /* the record may be there */
    hl__manager_mutex_lock(manager);
    (void)hl__lease_recall(call->lease, limit);
    hl__manager_mutex_unlock(manager);
  }
  if (status) {
    hl__lease_unref(call->lease);
    call->lease = NULL;
    return status;
  }
  call->became = true;
  hl__manager_mutex_lock(manager);
  call->lease->span = hold->span; /* it was held all the time */
  if (!hl__lease_begin(call->lease, &grant)) {
    bool closed = manager->closed;
    hl__lease_undo(call->lease); /* no program has a handle of it */
    status = closed ? hl__error(error, HL_ERELEASED,
                                "the lock was released when "
                                "its manager was closed")
                    : hl__lease_late_error(error);
  }
  hl__manager_mutex_unlock(manager);
  return status;
}

/* -------------------------------------------------- before and after a call */

/* HL__TO_LEASE: makes the lease that the lock becomes. */
static int lease_prepare(hl__call *call, hl_error *error) {
  hl_manager *manager = call->manager;
  if (call->lock->lease)
    return hl__error(error, HL_EUNSUPPORTED, "it is a lease already: refresh says when it ends");
  if (!manager->store || !manager->store->leases) return hl__lease_unsupported(manager, error);
  if (hl__plan_updates(call->lock->plan)) {
    int status = hl__updates_check(manager, true, error);
    if (status) return status;
  }
  return hl__lease_new(manager, &call->options, &call->lease, error);
}

int hl__call_prepare(hl__call *call, const hl_plan *plan, hl_error *error) {
  if (call->kind == HL__TO_LEASE) return lease_prepare(call, error);
  if (call->kind != HL__EXTEND && call->kind != HL__UPGRADE && call->kind != HL__DOWNGRADE)
    return HL_OK;
  call->extension = &call->extends;
  int status =
      plan ? hl__extension_init(&call->extends, call->lock, plan, error)
           : hl__extension_convert(&call->extends, call->lock, call->kind == HL__UPGRADE, error);
  if (call->kind != HL__DOWNGRADE) call->waiter.plan = call->extends.plan;
  return status;
}

void hl__call_dispose(hl__call *call) {
  if (call->extension) hl__extension_dispose(call->extension);
  hl__lease_unref(call->lease);
}

bool hl__call_commits(const hl__call *call, int status) {
  if (!call->lock) return false;
  if (!call->extension) return call->became;
  const hl__lease *lease = call->lock->lease;
  return status == HL_OK || (call->kind == HL__DOWNGRADE && lease && call->lock->unsure);
}

void hl__call_commit(hl__call *call) {
  if (call->extension) hl__extension_commit(call->extension, call->lock);
  /* A call that was given up before its worker came to it leaves the lock a session. */
  if (call->kind != HL__TO_LEASE || !call->became) return;
  call->lock->lease = call->lease;
  call->lease = NULL;
}
