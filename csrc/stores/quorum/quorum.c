/*
 * quorum.c - the store that is a quorum of others: how it is opened, and the
 * operations of a store. See quorum_store.h.
 *
 * The DSN has the members' DSNs in it:
 *
 *     quorum:majority;dsn;dsn;dsn        quorum:all;dsn;dsn
 *
 * where '%' and ';' in a member's DSN are written as %25 and %3B.
 */
#include "quorum_store.h"

#include "exit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

static hl__quorum_session *session_of(hl_session *session) {
  return (hl__quorum_session *)(void *)session;
}

/* ------------------------------------------------------------------- DSN */

static int quorum_parse(char *text, hl_dsn *dsn, hl_error *error) {
  char *strategy = hl__dsn_cut(&text, ";");
  if (!strategy || (strcmp(strategy, "majority") != 0 && strcmp(strategy, "all") != 0))
    return hl__error(error, HL_EDSN,
                     "write a quorum as quorum:majority;dsn;dsn;dsn or quorum:all;dsn;dsn");
  for (char *part; text; text = part ? text : NULL) {
    part = hl__dsn_cut(&text, ";");
    char *member = part ? part : text;
    int status = hl__dsn_decode(member, "store", error);
    if (status) return status;
    for (unsigned i = 0; i < dsn->param_count; i++)
      if (strcmp(dsn->params[i].value, member) == 0)
        return hl__error(error, HL_EDSN, "stores %u and %u of the quorum are the same", i + 1,
                         dsn->param_count + 1);
    if (dsn->param_count == HL__QUORUM_MAX)
      return hl__error(error, HL_EDSN, "a quorum has at most %d stores", HL__QUORUM_MAX);
    dsn->params[dsn->param_count++] = (hl_dsn_param){strategy, member};
  }
  if (strcmp(strategy, "majority") == 0 && dsn->param_count < 3)
    return hl__error(error, HL_EDSN,
                     "%u stores are no majority of anything: when one is down no "
                     "majority is left; name three, or set quorum = \"all\"",
                     dsn->param_count);
  return HL_OK;
}

/* "mysql at db:3306", "file:/a": nothing of users and passwords. */
static void member_name(hl__quorum_member *member) {
  const hl_dsn *dsn = &member->dsn;
  char place[96];
  const char *where = dsn->path ? dsn->path : dsn->socket ? dsn->socket : dsn->host;
  (void)hl__escape(place, sizeof place, where ? where : "", where ? strlen(where) : 0);
  if (dsn->path)
    (void)snprintf(member->name, sizeof member->name, "%s:%s", dsn->store, place);
  else if (dsn->port)
    (void)snprintf(member->name, sizeof member->name, "%s at %s:%u", dsn->store, place, dsn->port);
  else
    (void)snprintf(member->name, sizeof member->name, "%s%s%s", dsn->store, *place ? " at " : "",
                   place);
}

/* Says in the error which member it is about. */
static int member_error(unsigned number, int status, hl_error *error) {
  hl_error said;
  if (!error) return status;
  said = *error;
  return hl__error(error, status, "store %u of the quorum: %.400s", number + 1, said.message);
}

static int member_make(hl__quorum_member *member, const hl_store_config *config, const char *text,
                       hl_error *error) {
  int status = config->find(config, text, &member->ops, error);
  if (status == HL_OK) status = hl_dsn_parse(text, member->ops->parse, &member->dsn, error);
  if (status) return status;
  if (member->dsn.path && member->dsn.path[0] != '/')
    return hl__error(error, HL_EDSN,
                     "the directory '%.80s' is not absolute: in another working "
                     "directory it would name another store",
                     member->dsn.path);
  member->config = *config;
  member->config.dsn = &member->dsn;
  member->config.layout = member->store->wanted;
  member->config.application = member->store->application;
  member->config.host = member->store->host;
  member_name(member);
  return HL_OK;
}

/* ------------------------------------------------------------- the store */

/* Unchecked, like all that makes or ends a store: no other thread has it yet. */
HL__UNCHECKED static int members_make(hl__quorum_store *store, const hl_store_config *config,
                                      hl_error *error) {
  int status = HL_OK;
  for (unsigned i = 0; status == HL_OK && i < config->dsn->param_count; i++) {
    hl__quorum_member *member = &store->members[i];
    member->store = store;
    member->number = i;
    member->heard = hl__now_ms();
    hl__cond_init(&member->work);
    hl__cond_init(&member->opened);
    store->n = i + 1;
    status = member_make(member, config, config->dsn->params[i].value, error);
    if (status) (void)member_error(i, status, error);
  }
  store->need = store->all ? store->n : store->n / 2 + 1;
  return status;
}

/* Once a quorum is open, the other members have so long: ms. */
#define OPEN_MS (HL__QUORUM_ANSWER_MS / 4)
/* So many tries, where another list is in use; and the pause between two, which grows: ms. */
#define TRIES 4
#define PAUSE_MS 20

/* Asks all members. Waits until a quorum has answered HL_OK, and the others have had a moment more;
   or until no quorum can. only: asks the members whose answer there was HL_OK. */
static void members_ask(hl__quorum_store *store, hl__quorum_session *session, hl__quorum_kind kind,
                        hl__quorum_ask *const *only, hl__quorum_ask **asks, unsigned *opened)
    HL__REQUIRES(hl__quorum_mutex) {
  unsigned open = 0;
  int64_t patience = HL_FOREVER;
  for (unsigned i = 0; i < store->n; i++) {
    if (only && !hl__ask_is_ok(only[i])) continue;
    asks[i] = hl__ask_new(&store->members[i], kind, NULL, NULL, session);
    if (asks[i]) hl__ask_give(asks[i]);
  }
  for (;;) {
    open = *opened = 0;
    for (unsigned i = 0; i < store->n; i++) {
      open += hl__ask_is_open(asks[i]);
      *opened += hl__ask_is_ok(asks[i]);
    }
    if (*opened >= store->need && patience == HL_FOREVER) patience = hl__now_ms() + OPEN_MS;
    if (open == 0 || hl__now_ms() >= patience || (!only && *opened + open < store->need)) break;
    hl__quorum_wait(session, patience);
  }
  hl__silent_suspect(store, asks);
}

/* Opens all at once. HL_OK: a quorum is open, none is refused for what will not pass, and none that
   has answered is used with another list. */
static int members_open(hl__quorum_store *store, hl__quorum_session *session, hl_error *error)
    HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_ask *asks[HL__QUORUM_MAX] = {NULL}, *joins[HL__QUORUM_MAX] = {NULL};
  unsigned opened, joined;
  members_ask(store, session, HL__ASK_OPEN, NULL, asks, &opened);
  int status = HL_OK;
  for (unsigned i = 0; i < store->n && status == HL_OK; i++) {
    hl__quorum_member *member = &store->members[i];
    if (!member->refusal) continue;
    status = member->refusal;
    if (error) *error = member->reason;
    (void)member_error(i, status, error);
  }
  if (status == HL_OK && opened < store->need) {
    status = hl__quorum_failure(store, asks);
    (void)hl__quorum_error(store, status, asks, "could not be opened", error);
  }
  if (status == HL_OK) {
    hl__presence_adopt(store, asks);
    members_ask(store, session, HL__ASK_JOIN, asks, joins, &joined);
    status = hl__quorum_stopped(store, error);
  }
  hl__asks_leave(asks, false);
  hl__asks_leave(joins, false);
  return status;
}

/* Ends the presences. While a lease goes on without us, they stay: they say which list it is of. A
   suspect member is asked, too: it may only have been slow, and would keep the presence. */
static void members_part(hl__quorum_store *store) HL__REQUIRES(hl__quorum_mutex) {
  for (unsigned i = 0; i < store->n && !hl__known_goes_on(store); i++) {
    hl__quorum_member *member = &store->members[i];
    if (!member->presence.turn && !member->joins) continue;
    hl__quorum_ask *ask = hl__ask_new(member, HL__ASK_PART, NULL, NULL, NULL);
    if (!ask) continue;
    hl__ask_give(ask);
    hl__ask_leave(ask, false);
  }
}

/* Two processes that come at once with different lists stop each other. So each tries again, after
   a random pause: then one is first. Besides, programs with another list may just be leaving. */
static int members_join(hl__quorum_store *store, hl__quorum_session *session, hl_error *error)
    HL__REQUIRES(hl__quorum_mutex) {
  for (int tries = 1;; tries++) {
    uint8_t random;
    hl__presence_init(store);
    int status = members_open(store, session, error);
    if (!hl__quorum_stopped(store, NULL) || tries == TRIES) return status;
    members_part(store);
    if (getrandom(&random, 1, 0) != 1) random = (uint8_t)hl__now_ms();
    int64_t end = hl__now_ms() + PAUSE_MS + (int64_t)tries * (random % PAUSE_MS);
    while (hl__left_ms(end) > 0) hl__quorum_wait(session, end);
    store->stopped.status = HL_OK;
    /* A presence that has not ended yet may name a list that this try has found, not the next. */
    for (unsigned i = 0; i < store->n; i++) store->members[i].present_till = 0;
  }
}

static void session_init(hl__quorum_session *session, hl__quorum_store *store) {
  session->base.store = &store->base;
  hl__cond_init(&session->answered);
}

static void store_close(hl_store *base) {
  hl__quorum_store *store = (hl__quorum_store *)(void *)base;
  hl__quorum_mutex_lock(store);
  store->closing = true;
  members_part(store);
  bool busy = false;
  for (unsigned i = 0; i < store->n; i++) {
    hl__quorum_member *member = &store->members[i];
    busy = busy || member->queued > 0 || member->threads > member->idle_threads;
    (void)pthread_cond_broadcast(&member->work);
  }
  /* Threads still tell members of releases: exit() waits a moment for them. */
  store->awaited = busy;
  if (busy) hl__exit_await(1);
  hl__quorum_mutex_unlock(store);
  hl__quorum_unref(store);
}

HL__UNCHECKED static int store_open(const hl_store_config *config, hl_store **result,
                                    hl_error *error) {
  hl__quorum_session session = {.interrupted = false};
  hl__quorum_store *store = calloc(1, sizeof *store);
  if (!store) return hl__error_memory(error);
  store->base.leases = &hl__quorum_leases;
  store->references = 1;
  store->heal_at = HL_FOREVER;
  store->thread_start = hl__member_start;
  store->all = config->dsn->param_count && strcmp(config->dsn->params[0].name, "all") == 0;
  store->wanted = hl_layout_ref(config->layout);
  store->wait_begin = config->wait_begin;
  store->wait_end = config->wait_end;
  (void)snprintf(store->application, sizeof store->application, "%s", config->application);
  (void)snprintf(store->host, sizeof store->host, "%s", config->host);
  (void)pthread_mutex_init(&store->mutex, NULL);
  session_init(&session, store);
  int status = members_make(store, config, error);
  if (status == HL_OK) {
    hl__quorum_mutex_lock(store);
    status = members_join(store, &session, error);
    hl__quorum_mutex_unlock(store);
  }
  (void)pthread_cond_destroy(&session.answered);
  if (status)
    store_close(&store->base);
  else
    *result = &store->base;
  return status;
}

/* ------------------------------------------------------------- a session */

static int session_open(hl_store *base, int64_t deadline, hl_session **result, hl_error *error) {
  hl__quorum_store *store = (hl__quorum_store *)(void *)base;
  hl__quorum_session *session = calloc(1, sizeof *session);
  (void)deadline;
  if (!session) return hl__error_memory(error);
  session_init(session, store);
  hl__quorum_mutex_lock(store);
  store->sessions++;
  hl__quorum_mutex_unlock(store);
  *result = &session->base;
  return HL_OK;
}

static void session_close(hl_session *base) {
  hl__quorum_session *session = session_of(base);
  hl__quorum_store *store = hl__quorum_store_of(base);
  hl__quorum_mutex_lock(store);
  hl__quorum_drops_leave(session);
  /* A manager that is closed may be referred to for long. */
  if (--store->sessions == 0) members_part(store);
  hl__quorum_mutex_unlock(store);
  (void)pthread_cond_destroy(&session->answered);
  free(session);
}

/* settle waits so long for members that a quorum does without: ms. */
#define GRACE_MS 50

/* Waits until all members have dropped the released lease; after a moment, until a quorum has. So
   the released lease does not refuse the next try. A suspect member is not waited for. */
static int settle(hl_session *base, int64_t deadline, hl_error *error) {
  hl__quorum_session *session = session_of(base);
  hl__quorum_store *store = hl__quorum_store_of(base);
  int status = HL_OK;
  hl__quorum_mutex_lock(store);
  session->interrupted = false;
  while (session->dropped) {
    unsigned open = 0;
    int64_t now = hl__now_ms();
    for (unsigned i = 0; i < store->n; i++) {
      const hl__quorum_ask *ask = session->drops[i];
      if (store->members[i].suspect) continue;
      open += session->dropped->at[i].making > 0 ||
              (hl__ask_is_open(ask) && now < ask->begun + HL__QUORUM_ANSWER_MS / 2);
    }
    if (open == 0 || (store->n - open >= store->need && now >= session->told + GRACE_MS)) break;
    if (hl__left_ms(deadline) == 0) {
      status = hl__error(error, HL_TIMEOUT, "the release is not answered yet");
      break;
    }
    int64_t end = now + 5 < deadline ? now + 5 : deadline; /* a take has no listener */
    hl__quorum_wait(session, end);
  }
  if (status == HL_OK) hl__quorum_drops_leave(session);
  hl__quorum_mutex_unlock(store);
  return status;
}

static void interrupt(hl_session *base) {
  hl__quorum_session *session = session_of(base);
  hl__quorum_store *store = hl__quorum_store_of(base);
  hl__quorum_mutex_lock(store);
  session->interrupted = true;
  (void)pthread_cond_signal(&session->answered);
  hl__quorum_mutex_unlock(store);
}

const hl_store_ops hl_store_quorum = {
    .abi = HL_STORE_ABI,
    .scheme = "quorum",
    .traits = {.scarce = true,
               .blocks = true,
               .leases_only = true,
               .drop_sends = true,
               .several = true,
               .updates = true,
               .leases_update = true},
    .parse = quorum_parse,
    .open = store_open,
    .close = store_close,
    .session_open = session_open,
    .session_close = session_close,
    .take = hl__quorum_take,
    .give_back = hl__session_rests,
    .renew = hl__session_renewed,
    .settle = settle,
    .check = hl__session_rests,
    .interrupt = interrupt,
    .holders = hl__quorum_holders,
};
