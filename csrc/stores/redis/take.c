/*
 * take.c - acquiring: asks (scripts/take.lua), stands in the queue, sleeps, asks again. The
 * server decides at each question alone; what a waiter misses costs time, never a lock.
 */
#include "redis_store.h"

#include <stdlib.h>
#include <string.h>

/* For the answers to what was sent before, a release perhaps. */
#define SETTLE_MS 1000
/* Between two looks of one whom nobody rings. */
#define UNRUNG_MS 50

void hl__redis_longest_note(hl__redis_store *store, int64_t ttl) {
  int_fast64_t before = atomic_load(&store->longest);
  while (before < ttl &&
         !atomic_compare_exchange_weak(&store->longest, &before, ttl)) {
  }
}

/* The arguments of take.lua. */
static void call_fill(hl__redis_call *call, const hl__redis_session *session,
                      const hl_request *request, bool queues) {
  hl__redis_store *store = session->store;
  const hl_store_config *config = store->config;
  const hl_lease_terms *terms = request->lease;
  char memory[96], label[128] = "";
  int64_t forgets = atomic_load(&store->longest);
  if (forgets < store->quarantine) forgets = store->quarantine;
  (void)snprintf(memory, sizeof memory, "%s:memory", store->prefix);
  if (request->label_size)
    (void)hl__escape(label, sizeof label, request->label, request->label_size);
  hl__redis_call_init(call, store, HL__REDIS_TAKE, request->rows[0].root);
  hl__redis_id(call, terms->id);
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
  hl__redis_text(call, atomic_load(&store->seen) ? "1" : "0");
  hl__redis_id(call, terms->former);
  hl__redis_id(call, terms->holder);
  hl__redis_id(call, terms->secret);
  hl__redis_number(call, terms->ttl);
  hl__redis_text(call, terms->owner);
  hl__redis_text(call, request->path);
  hl__redis_text(call, label);
  hl__redis_text(call, config->application);
  hl__redis_text(call, config->host);
  hl__redis_number(call, config->pid);
  hl__redis_text(call, request->mode == HL_SHARED ? "s" : "x");
  hl__redis_roots(call, request->rows, request->n);
  hl__redis_rows(call, store, request->rows, request->n);
}

/* It waits no longer: those behind it go on. Nobody waits for the answer. */
static void leave(hl__redis_session *session, const hl_request *request) {
  hl__redis_call call;
  hl__redis_call_init(&call, session->store, HL__REDIS_LEAVE,
                      request->rows[0].root);
  hl__redis_id(&call, request->lease->id);
  hl__redis_rows(&call, session->store, request->rows, request->n);
  if (hl__redis_call_send(session, &call, NULL) == HL_OK) session->outstanding++;
  hl__redis_call_dispose(&call);
}

enum { BLOCKED = 0, GRANTED = 1, FORGETFUL = 2 };

/* One question. *wait: ms until the next. */
static int ask(hl__redis_session *session, const hl_request *request,
               bool queues, int *answer, int64_t *wait, hl_grant *grant,
               hl_error *error) {
  hl__redis_call call;
  redisReply *reply;
  int64_t sent;
  call_fill(&call, session, request, queues);
  int status = hl__redis_call_run(session, &call,
                                  hl__now_ms() + HL__REDIS_ANSWER_MS,
                                  true, &sent, &reply, error);
  hl__redis_call_dispose(&call);
  /* Where it was not answered, it may have been granted all the same. */
  if (status == HL_ECONNECTION) grant->sent_ms = sent;
  if (status) return status;
  atomic_store(&session->store->seen, true);
  *answer = (int)hl__redis_reply_number(reply, 0);
  *wait = hl__redis_reply_number(reply, 1);
  if (*answer == GRANTED) {
    grant->token = (uint64_t)hl__redis_reply_number(reply, 1) << 8;
    grant->sent_ms = sent;
    hl__redis_longest_note(session->store, request->lease->ttl);
  }
  freeReplyObject(reply);
  if (*answer < BLOCKED || *answer > FORGETFUL)
    return hl__error(error, HL_ESTORE, "the server answers what was not asked");
  return HL_OK;
}

/* As many replicas have it as the DSN wants; or it is given back. */
static int replicate(hl__redis_session *session, const hl_request *request,
                     hl_grant *grant, hl_error *error) {
  int status = hl__redis_replicated(session, error);
  if (status == HL_OK || status == HL_ECONNECTION) return status;
  hl_lease_terms terms = *request->lease;
  terms.place = grant->place;
  if (hl__redis_leases.drop(&session->base, &terms, false,
                            hl__now_ms() + SETTLE_MS, NULL) != HL_OK)
    status = HL_ECONNECTION;
  else
    grant->sent_ms = 0;
  return status;
}

static int wait_granted(hl__redis_session *session, const hl_request *request,
                        hl_grant *grant, hl_error *error) {
  bool joined = false, rings = false, queued = false;
  int status;
  for (;;) {
    int answer;
    int64_t wait;
    status = ask(session, request, joined, &answer, &wait, grant, error);
    if (status == HL_ECONNECTION) queued = false; /* nobody can be told */
    if (status || answer == GRANTED) {
      queued = queued && status;
      break;
    }
    queued = queued || (joined && answer == BLOCKED);
    if (request->try_once || hl__left_ms(request->deadline) == 0)
      status = hl__error(error, HL_TIMEOUT, "the lock is not free");
    else if (atomic_load(&session->interrupted))
      status = hl__error(error, HL_CANCELLED, "the wait was cancelled");
    if (status) break;
    /* Each time: the subscription may have ended. */
    rings = hl__redis_bells_join(session, request->lease->id);
    if (!joined) {
      joined = true;
      continue; /* and has a place in the queue from now on */
    }
    if (wait > 1000) wait = 1000;
    if (!rings && wait > UNRUNG_MS) wait = UNRUNG_MS;
    int64_t until = hl__now_ms() + (wait > 0 ? wait : 1);
    if (request->deadline < until) until = request->deadline;
    hl__redis_bells_sleep(session, until);
  }
  if (joined) hl__redis_bells_leave(session);
  if (queued) leave(session, request);
  return status;
}

int hl__redis_take(hl_session *base, const hl_request *request, hl_grant *grant,
                   hl_error *error) {
  hl__redis_session *session = hl__redis_session_of(base);
  if (!request->lease)
    return hl__error(error, HL_EUNSUPPORTED, "Redis has only leases");
  int status = hl__redis_settle(session, hl__now_ms() + SETTLE_MS, error);
  if (status == HL_TIMEOUT)
    status = hl__error(error, HL_ECONNECTION,
                       "the server has not answered what came before");
  grant->place = request->rows[0].root;
  if (status == HL_OK) status = wait_granted(session, request, grant, error);
  if (status == HL_OK) status = replicate(session, request, grant, error);
  /* One that comes later is forgotten by settle. */
  if (atomic_exchange(&session->interrupted, false)) hl__redis_bell_clear(session);
  return status;
}
