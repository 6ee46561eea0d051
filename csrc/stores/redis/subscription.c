/*
 * subscription.c - the single subscription that wakes all waiters of this manager.
 *
 * Each waiter sleeps on an eventfd of its own. One sleeper reads the subscribed connection, too,
 * and rings the others; when it leaves, it wakes another, which reads. So no thread is needed
 * for it. A message that is published while no waiter sleeps stays in the socket, and the next
 * one reads it.
 *
 * Wake-ups only save time: a waiter that misses one polls each second, and as often as FALLBACK_MS
 * where there is no subscription.
 */
#include "redis_store.h"

#include <poll.h>
#include <stdio.h>
#include <string.h>

/* After a subscription could not be had. */
#define AGAIN_MS 1000
#define CONNECT_MS 1000

static int subscribe(hl__redis_store *store, hl__redis_session **result) {
  const char *words[] = {"SUBSCRIBE", store->channel};
  int64_t deadline = hl__now_ms() + CONNECT_MS;
  int status = hl__redis_connect(store, deadline, result, NULL);
  if (status == HL_OK) status = hl__redis_command(*result, deadline, 2, words, NULL, NULL);
  if (status == HL_OK) return HL_OK;
  hl__redis_disconnect(*result);
  *result = NULL;
  return status;
}

bool hl__redis_subscription_join(hl__redis_session *session, const uint8_t id[16]) {
  hl__redis_store *store = session->store;
  hl__redis_store_lock(store);
  if (hl__list_empty(&session->node)) {
    (void)hl__hex(session->id, id, 16);
    session->rung = false;
    hl__list_add(&store->waiting, &session->node);
  }
  bool connects = !store->subscription && !store->reading && hl__now_ms() >= store->subscribe_again;
  if (connects) store->reading = true;
  hl__redis_store_unlock(store);
  if (connects) {
    hl__redis_session *subscription = NULL;
    (void)subscribe(store, &subscription);
    hl__redis_store_lock(store);
    store->subscription = subscription;
    store->reading = false;
    if (!subscription) store->subscribe_again = hl__now_ms() + AGAIN_MS;
    hl__redis_store_unlock(store);
  }
  hl__redis_store_lock(store);
  bool rings = store->subscription != NULL;
  hl__redis_store_unlock(store);
  return rings;
}

static void ring(hl__redis_session *session) HL__REQUIRES(hl__redis_mutex) {
  session->rung = true;
  hl__wake(&session->wakeup);
}

static void ring_named(hl__redis_store *store, const char *id) HL__REQUIRES(hl__redis_mutex) {
  for (hl__list *node = store->waiting.next; node != &store->waiting; node = node->next) {
    hl__redis_session *session = HL__LIST_ENTRY(node, hl__redis_session, node);
    if (strcmp(session->id, id) == 0) ring(session);
  }
}

/* The subscription has ended. Wake-ups may be lost, so all waiters poll. */
static void subscription_lose(hl__redis_store *store) HL__REQUIRES(hl__redis_mutex) {
  hl__redis_session *subscription = store->subscription;
  store->subscription = NULL; /* before it is freed: a child may be born */
  hl__redis_disconnect(subscription);
  store->subscribe_again = hl__now_ms();
  for (hl__list *node = store->waiting.next; node != &store->waiting; node = node->next)
    ring(HL__LIST_ENTRY(node, hl__redis_session, node));
}

/* Reads all that has come. The caller is the reader. */
static void subscription_read(hl__redis_store *store, hl__redis_session *subscription) {
  for (;;) {
    redisReply *reply;
    int status = hl__redis_await(subscription, 0, false, &reply, NULL);
    if (status == HL_TIMEOUT) return;
    hl__redis_store_lock(store);
    if (status)
      subscription_lose(store);
    else
      ring_named(store, hl__redis_reply_text(reply, 2));
    hl__redis_store_unlock(store);
    if (status) return;
    freeReplyObject(reply);
  }
}

/* Another sleeper reads from now on. */
static void pass_on(hl__redis_store *store, const hl__redis_session *from)
    HL__REQUIRES(hl__redis_mutex) {
  store->reading = false;
  for (hl__list *node = store->waiting.next; node != &store->waiting; node = node->next) {
    hl__redis_session *session = HL__LIST_ENTRY(node, hl__redis_session, node);
    if (session == from || session->rung) continue;
    hl__wake(&session->wakeup);
    return;
  }
}

void hl__redis_subscription_leave(hl__redis_session *session) {
  hl__redis_store *store = session->store;
  hl__redis_store_lock(store);
  hl__list_remove(&session->node);
  session->rung = false;
  /* The session may have been due to read next, and was not asleep. */
  if (store->subscription && !store->reading) pass_on(store, session);
  hl__redis_store_unlock(store);
}

void hl__redis_subscription_sleep(hl__redis_session *session, int64_t until) {
  hl__redis_store *store = session->store;
  bool reads = false;
  for (;;) {
    hl__redis_store_lock(store);
    bool awake =
        session->rung || atomic_load(&session->wakeup.interrupted) || hl__left_ms(until) == 0;
    if (reads && !store->subscription) reads = store->reading = false; /* it was lost */
    if (!awake && !reads && store->subscription && !store->reading) reads = store->reading = true;
    if (awake && reads) pass_on(store, session);
    if (awake) session->rung = false;
    hl__redis_session *subscription = reads ? store->subscription : NULL;
    hl__redis_store_unlock(store);
    if (awake) return;
    struct pollfd p[2] = {{.fd = session->wakeup.fd, .events = POLLIN},
                          {.fd = subscription ? subscription->fd : -1, .events = POLLIN}};
    int n = hl__poll(store->config, p, subscription ? 2 : 1, until);
    if (n > 0 && p[0].revents) hl__wakeup_clear(&session->wakeup);
    if (n > 0 && subscription && p[1].revents) subscription_read(store, subscription);
  }
}

/* Unchecked: no other thread has the store. */
HL__UNCHECKED void hl__redis_subscription_close(hl__redis_store *store) {
  hl__redis_disconnect(store->subscription);
  store->subscription = NULL;
}
