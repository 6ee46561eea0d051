/*
 * redis.c - the store's operations: the life of a session. take.c and leases.c have the
 * questions to the server.
 */
#include "redis_store.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* ------------------------------------------------------------ the store */

/* Nodes of other levels have other names, so a program with other levels would exclude none. */
static int layout_agree(hl__redis_session *session, int64_t deadline, hl_error *error) {
  hl__redis_store *store = session->store;
  const hl_layout *wanted = store->base.layout ? store->base.layout : store->config->layout;
  char key[96], names[HL__LAYOUT_NAMES_MAX];
  (void)snprintf(key, sizeof key, "%s:levels", store->prefix);
  const char *set[] = {"SETNX", key, hl__layout_names(wanted, names)};
  const char *get[] = {"GET", key};
  redisReply *reply = NULL;
  int status = hl__redis_route_key(session, key, deadline, &session, error);
  if (status == HL_OK) status = hl__redis_command(session, deadline, 2, get, &reply, error);
  if (status == HL_OK && reply->type == REDIS_REPLY_NIL) { /* the first, or it was emptied */
    freeReplyObject(reply);
    status = hl__redis_command(session, deadline, 3, set, NULL, error);
    if (status == HL_OK) status = hl__redis_command(session, deadline, 2, get, &reply, error);
  }
  if (status) return status;
  const char *found = reply->type == REDIS_REPLY_STRING ? reply->str : "";
  status = hl__layout_settle(wanted, found, &store->base.layout, error);
  if (status == HL_EMISMATCH)
    (void)hl__error(error, status,
                    "the levels of this database are %.150s (%s); this program "
                    "wants %.150s: leave out `levels`, and it takes what is "
                    "there; or write another ?prefix= in the DSN",
                    found, key, names);
  freeReplyObject(reply);
  return status;
}

static int connect_verified(hl__redis_store *store, int64_t deadline, hl__redis_session **session,
                            hl_error *error) {
  int status = hl__redis_connect(store, deadline, session, error);
  if (status == HL_OK) {
    status = hl__redis_verify(*session, deadline, error);
    /* In a cluster one node has it, and the others serve while that is down: open alone looks. */
    if (status == HL_OK && !(store->cluster && store->base.layout))
      status = layout_agree(*session, deadline, error);
    if (status) hl__redis_named(store, &(*session)->address, error);
  }
  if (status) {
    hl__redis_disconnect(*session);
    *session = NULL;
  }
  return status;
}

static int session_open(hl_store *base, int64_t deadline, hl_session **result, hl_error *error) {
  hl__redis_store *store = (hl__redis_store *)(void *)base;
  hl__redis_session *session = NULL;
  int status = HL_OK;
  /* In a cluster any node will do, for as long as there is time. */
  unsigned tries = hl__redis_cluster_size(store) + 1;
  while (!session && tries-- > 0) {
    status = connect_verified(store, deadline, &session, error);
    if (status != HL_ECONNECTION || hl__left_ms(deadline) == 0) break;
    atomic_fetch_add(&store->seed, 1u);
  }
  *result = session ? &session->base : NULL;
  return status;
}

static void session_close(hl_session *session) {
  hl__redis_disconnect(hl__redis_session_of(session));
}

/* Unchecked: no other thread has the store. */
HL__UNCHECKED static void store_close(hl_store *base) {
  hl__redis_store *store = (hl__redis_store *)(void *)base;
  if (base->first) session_close(base->first);
  hl__redis_subscription_close(store);
  hl__redis_tls_close(store);
  free(store->cluster);
  (void)pthread_mutex_destroy(&store->mutex);
  hl_layout_unref(base->layout);
  free(store->sentinel_text);
  free(store);
}

/* The channel on which this manager's waiters are woken, and no others. Programs of other versions
   publish to the name in a waiter's record, and a server may allow no other: the name stays. */
static int channel_draw(hl__redis_store *store, hl_error *error) {
  uint8_t random[16];
  if (getrandom(random, sizeof random, 0) != sizeof random)
    return hl__error_errno(error, HL_ESTORE, "there are no random numbers");
  int used = snprintf(store->channel, sizeof store->channel, "%s:bells:", store->prefix);
  (void)hl__hex(store->channel + used, random, sizeof random);
  return HL_OK;
}

HL__UNCHECKED static int store_open(const hl_store_config *config, hl_store **result,
                                    hl_error *error) {
  hl__redis_store *store = calloc(1, sizeof *store);
  if (!store) return hl__error_memory(error);
  store->base.leases = &hl__redis_leases;
  store->config = config;
  hl__list_init(&store->waiting);
  atomic_init(&store->longest, 0);
  atomic_init(&store->seen, false);
  atomic_init(&store->seed, 0u);
  atomic_init(&store->sentinel, 0);
  (void)pthread_mutex_init(&store->mutex, NULL);
  hl_session *first = NULL;
  int status = hl__redis_params(store, error);
  if (status == HL_OK) status = hl__redis_tls_open(store, error);
  if (status == HL_OK) status = channel_draw(store, error);
  if (status == HL_OK)
    status = session_open(&store->base, hl__now_ms() + store->connect_timeout, &first, error);
  store->base.first = first;
  if (status) {
    store_close(&store->base);
    return status;
  }
  *result = &store->base;
  return HL_OK;
}

/* ------------------------------------------------------------ a session */

static int renew(hl_session *base, int64_t *sent_ms, hl_error *error) {
  hl__redis_session *session = hl__redis_session_of(base);
  const char *words[] = {"PING"};
  const size_t sizes[] = {4};
  *sent_ms = hl__boot_ms();
  int status = hl__redis_queue(session, 1, words, sizes, error);
  return status ? status : hl__redis_unawaited(session, error);
}

static int settle(hl_session *base, int64_t deadline, hl_error *error) {
  hl__redis_session *session = hl__redis_session_of(base);
  /* Where it does not wait, an interruption is late. */
  if (deadline == 0) (void)hl__wakeup_interruption_take(&session->wakeup);
  return hl__redis_settle(session, deadline, error);
}

static int session_check(hl_session *base, hl_error *error) {
  hl__redis_session *session = hl__redis_session_of(base);
  if (session->outstanding || hl__redis_stands(session)) return HL_OK;
  return hl__redis_gone(session, error);
}

static void interrupt(hl_session *base) {
  hl__wakeup_interrupt(&hl__redis_session_of(base)->wakeup);
}

const hl_store_ops hl_store_redis = {
    .abi = HL_STORE_ABI,
    .scheme = "redis",
    .traits = {.scarce = true,
               .expires = true,
               .blocks = true,
               .leases_only = true,
               .updates = true,
               .leases_update = true,
               .drop_sends = true},
    .parse = hl__redis_dsn,
    .name_key = hl__redis_name_key,
    .open = store_open,
    .close = store_close,
    .session_open = session_open,
    .session_close = session_close,
    .take = hl__redis_take,
    .give_back = hl__session_rests,
    .settle = settle,
    .renew = renew,
    .check = session_check,
    .interrupt = interrupt,
    .holders = hl__redis_holders,
    .library_init = hl__redis_tls_init,
    .thread_end = hl__redis_tls_thread_end,
};
