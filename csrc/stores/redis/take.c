/*
 * take.c - acquiring: asks (scripts/take.lua), stands in the queue, sleeps, asks again. The
 * server decides at each question alone; what a waiter misses costs time, never a lock.
 */
#include "redis_store.h"

#include "mode.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* For the answers to earlier commands, a release perhaps. */
#define SETTLE_MS 1000
/* The pause between two polls of a waiter that nothing wakes. */
#define UNRUNG_MS 50

/* The home of a request: an upgrade's lease knows it. */
static uint32_t home_of(const hl_request *request) {
  return request->upgrade ? (uint32_t)request->lease->place : request->rows[0].root;
}

/* The arguments of take.lua, and of convert.lua: token is the lease's token. */
static void call_fill(hl__redis_call *call, hl__redis_script script,
                      const hl__redis_session *session, const hl_request *request, bool queues,
                      uint64_t token) {
  hl__redis_store *store = session->store;
  const hl_store_config *config = store->config;
  const hl_lease_terms *terms = request->lease;
  bool takes = script == HL__REDIS_TAKE;
  uint32_t root = takes ? home_of(request) : (uint32_t)terms->place;
  char memory[96], label[128];
  int64_t forgets = atomic_load(&store->longest);
  if (forgets < store->quarantine) forgets = store->quarantine;
  hl__redis_memory_key(store, root, memory);
  (void)hl__escape(label, sizeof label, request->label, request->label_size);
  hl__redis_call_init(call, store, script, root);
  hl__redis_id(call, terms->id);
  if (!takes) hl__redis_id(call, terms->holder);
  hl__redis_text(call, queues ? "1" : "0");
  hl__redis_text(call, store->channel);
  hl__redis_text(call, memory);
  hl__redis_text(call, session->run);
  if (session->start)
    hl__redis_number(call, session->start);
  else
    hl__redis_text(call, "");
  hl__redis_text(call, session->durable ? "1" : "0");
  hl__redis_number(call, store->quarantine ? forgets : 0);
  hl__redis_text(call, hl__redis_memory_seen(store, root) ? "1" : "0");
  if (takes) {
    hl__redis_id(call, terms->former);
    hl__redis_id(call, terms->holder);
    hl__redis_id(call, terms->secret);
    hl__redis_number(call, terms->ttl);
    hl__redis_text(call, terms->owner);
  }
  hl__redis_text(call, request->path);
  hl__redis_text(call, label);
  hl__redis_text(call, config->application);
  hl__redis_text(call, config->host);
  hl__redis_number(call, config->pid);
  const char mode[] = {hl__mode_letter(request->mode), '\0'};
  hl__redis_text(call, mode);
  hl__redis_roots(call, request->recorded, request->recorded_n);
  hl__redis_rows(call, store, request->rows, request->n, request->names);
  if (!takes) hl__redis_rows(call, store, request->recorded, request->recorded_n, NULL);
  if (!takes) hl__redis_number(call, (int64_t)(token >> 8));
}

/* Gives up the wait: the waiters behind it go on. No caller awaits the answer. */
static void leave(hl__redis_session *session, const hl_request *request) {
  hl__redis_call call;
  uint32_t root = home_of(request);
  if (hl__redis_route(session, root, hl__now_ms(), &session, NULL) != HL_OK) return;
  hl__redis_call_init(&call, session->store, HL__REDIS_LEAVE, root);
  hl__redis_id(&call, request->lease->id);
  hl__redis_rows(&call, session->store, request->rows, request->n, request->names);
  (void)hl__redis_call_send(session, &call, NULL);
  hl__redis_call_dispose(&call);
}

int64_t hl__redis_answer_by(const hl__redis_session *session) {
  return hl__within_ms(HL__REDIS_ANSWER_MS, session->face->patience);
}

enum { BLOCKED = 0, GRANTED = 1, FORGETFUL = 2, RECALLED = 3 };

typedef struct verdict {
  int64_t is;   /* one of those */
  int64_t wait; /* ms until the next question */
} verdict;

/* Asks once. */
static int ask_at(hl__redis_session *session, const hl_request *request, bool queues,
                  verdict *answer, hl_grant *grant, hl_error *error) {
  hl__redis_call call;
  redisReply *reply;
  call_fill(&call, request->upgrade ? HL__REDIS_CONVERT : HL__REDIS_TAKE, session, request, queues,
            grant->token);
  int status =
      hl__redis_call_run(session, &call, hl__redis_answer_by(session), true, &reply, error);
  hl__redis_call_dispose(&call);
  /* Where it was not answered, it may have been granted all the same. */
  if (status == HL_ECONNECTION) grant->sent_ms = call.sent_ms;
  if (status) return status;
  answer->is = hl__redis_reply_number(reply, 0);
  answer->wait = hl__redis_reply_number(reply, 1);
  if (request->upgrade && *hl__redis_reply_text(reply, 1)) status = hl__redis_judge(reply, error);
  if (answer->is == GRANTED) {
    grant->token = (uint64_t)hl__redis_reply_number(reply, 1) << 8;
    grant->sent_ms = call.sent_ms;
    if (!request->upgrade && !hl__is_presence(request->lease->id))
      hl__redis_longest_note(session->store, request->lease->ttl);
  }
  freeReplyObject(reply);
  if (status) return status;
  hl__redis_memory_see(session->store, home_of(request));
  if (answer->is == RECALLED)
    return hl__error(error, HL_ELOST,
                     "the try was recalled, or what it was granted before was revoked");
  if (answer->is < BLOCKED || answer->is > FORGETFUL)
    return hl__error(error, HL_ESTORE, "the server answers what was not asked");
  return HL_OK;
}

/* A slot that is moved is asked for at its new master, once that has it. */
#define MOVING_MS 20
#define MOVED_TRIES_MS 500

static int ask(hl__redis_session *session, const hl_request *request, bool queues, verdict *answer,
               hl_grant *grant, hl_error *error) {
  int64_t patience = hl__now_ms() + MOVED_TRIES_MS;
  if (!request->try_once && request->deadline > patience) patience = request->deadline;
  for (;;) {
    hl__redis_session *at;
    int status =
        hl__redis_route(session, home_of(request), hl__redis_answer_by(session), &at, error);
    if (status) return status;
    status = ask_at(at, request, queues, answer, grant, error);
    if (status != HL_ECONNECTION || !at->moving || hl__left_ms(patience) == 0) return status;
    if (atomic_load(&session->wakeup.interrupted))
      return hl__error(error, HL_CANCELLED, "the wait was cancelled");
    hl__redis_subscription_sleep(session, hl__now_ms() + MOVING_MS);
  }
}

/* Waits for as many replicas as the DSN wants; or gives the lease back. */
static int replicate(hl__redis_session *session, const hl_request *request, hl_grant *grant,
                     hl_error *error) {
  hl__redis_session *at;
  int status =
      hl__redis_route(session, (uint32_t)grant->place, hl__redis_answer_by(session), &at, error);
  if (status == HL_OK) status = hl__redis_replicated(at, hl__redis_answer_by(session), error);
  if (status == HL_OK || status == HL_ECONNECTION) return status;
  hl_lease_terms terms = *request->lease;
  terms.place = grant->place;
  if (session->store->base.leases->drop(&session->base, &terms, false, hl__now_ms() + SETTLE_MS,
                                        NULL) != HL_OK)
    status = HL_ECONNECTION;
  else
    grant->sent_ms = 0;
  return status;
}

static int forgetful_error(int64_t wait, hl_error *error) {
  (void)hl__error(error, HL_TIMEOUT, "the server grants nothing yet");
  if (!error) return HL_TIMEOUT;
  (void)snprintf(error->reason, sizeof error->reason,
                 "nothing is granted for %.0f s more: the server has forgotten what it had granted",
                 ceil((double)wait / 1000));
  error->retry_after_ms = wait;
  return HL_TIMEOUT;
}

static int wait_granted(hl__redis_session *session, const hl_request *request, hl_grant *grant,
                        hl_error *error) {
  bool joined = false, rings = false, queued = false;
  int status;
  for (;;) {
    verdict answer = {.is = BLOCKED};
    status = ask(session, request, joined, &answer, grant, error);
    if (status == HL_ECONNECTION) queued = false; /* no server to tell */
    if (status || answer.is == GRANTED) {
      queued = queued && status;
      break;
    }
    queued = queued || (joined && answer.is == BLOCKED);
    if (request->try_once || hl__left_ms(request->deadline) == 0)
      status = answer.is == FORGETFUL && answer.wait > 0
                   ? forgetful_error(answer.wait, error)
                   : hl__error(error, HL_TIMEOUT, "the lock is not free");
    else if (atomic_load(&session->wakeup.interrupted))
      status = hl__error(error, HL_CANCELLED, "the wait was cancelled");
    if (status) break;
    /* Each time: the subscription may have ended. */
    rings = hl__redis_subscription_join(session, request->lease->id);
    if (!joined) {
      joined = true;
      continue; /* and has a place in the queue from now on */
    }
    int64_t wait = answer.wait < 1000 ? answer.wait : 1000;
    if (!rings && wait > UNRUNG_MS) wait = UNRUNG_MS;
    int64_t until = hl__now_ms() + (wait > 0 ? wait : 1);
    if (request->deadline < until) until = request->deadline;
    hl__redis_subscription_sleep(session, until);
  }
  if (joined) hl__redis_subscription_leave(session);
  if (queued) leave(session, request);
  return status;
}

int hl__redis_take(hl_session *base, const hl_request *request, hl_grant *grant, hl_error *error) {
  hl__redis_session *session = hl__redis_session_of(base);
  if (!request->lease) return hl__error(error, HL_EUNSUPPORTED, "Redis has only leases");
  int status = hl__redis_one_root(session->store, request->rows, request->n, error);
  if (status) return status;
  session->patience = hl__answer_by(request->deadline);
  status = hl__redis_settle(session, hl__redis_answer_by(session), error);
  if (status == HL_TIMEOUT)
    status = hl__error(error, HL_ECONNECTION, "the server has not answered what came before");
  grant->place = home_of(request);
  if (status == HL_OK) status = wait_granted(session, request, grant, error);
  if (status == HL_OK && !request->upgrade) status = replicate(session, request, grant, error);
  /* A late interruption is forgotten by settle. */
  (void)hl__wakeup_interruption_take(&session->wakeup);
  return status;
}

/* ------------------------------------------------------------- converting */

/* *token: the one that the lease has now, and where that is another one, the lease is not shared
   yet. */
static int downgrade_once(hl__redis_session *session, const hl_request *request, uint64_t *token,
                          hl_error *error) {
  hl__redis_session *at;
  hl__redis_call call;
  redisReply *reply;
  int status = hl__redis_settle(session, hl__now_ms() + SETTLE_MS, error);
  if (status == HL_OK)
    status = hl__redis_route(session, (uint32_t)request->lease->place,
                             hl__now_ms() + HL__REDIS_ANSWER_MS, &at, error);
  if (status) return status;
  call_fill(&call, HL__REDIS_CONVERT, at, request, false, *token);
  status = hl__redis_call_run(at, &call, hl__now_ms() + HL__REDIS_ANSWER_MS, false, &reply, error);
  hl__redis_call_dispose(&call);
  if (status) return status;
  status = hl__redis_judge(reply, error);
  if (status == HL_OK) *token = (uint64_t)hl__redis_reply_number(reply, 1) << 8;
  freeReplyObject(reply);
  return status;
}

/* An upgrade that was not answered may have given the lease another token than its holder knows. */
static int downgrade(hl__redis_session *session, const hl_request *request, uint64_t token,
                     hl_error *error) {
  uint64_t named;
  int status;
  do {
    named = token;
    status = downgrade_once(session, request, &token, error);
  } while (status == HL_OK && token >> 8 != named >> 8);
  return status;
}

/* Where too few replicas have it, it is exclusive there, and its holder does not know: it keeps out
   more than need be, until it is released, or upgraded again. */
int hl__redis_convert(hl_session *base, const hl_request *request, hl_grant *grant,
                      hl_error *error) {
  hl__redis_session *session = hl__redis_session_of(base), *at;
  grant->place = request->lease->place;
  if (!request->upgrade) return downgrade(session, request, grant->token, error);
  int status = hl__redis_take(base, request, grant, error);
  if (status) return status;
  status =
      hl__redis_route(session, (uint32_t)grant->place, hl__redis_answer_by(session), &at, error);
  return status ? status : hl__redis_replicated(at, hl__redis_answer_by(session), error);
}
