/*
 * sentinel.c - redis+sentinel://: which server is the master, is asked of the sentinels for each
 * connection. The first that answers is believed: which one it names may be the master of before,
 * for as long as they take to agree on another; docs/redis.md says what that costs.
 */
#include "redis_store.h"

#include <stdlib.h>
#include <string.h>

#define SENTINEL_PORT 26379
/* A silent sentinel leaves time for the others. */
#define ANSWER_MS 2000

int hl__redis_sentinels_read(hl__redis_store *store, hl_error *error) {
  const char *hosts = store->config->dsn->host;
  store->sentinel_text = strdup(hosts ? hosts : "");
  if (!store->sentinel_text) return hl__error_memory(error);
  char *rest = store->sentinel_text;
  while (rest) {
    char *text = rest;
    char *part = hl__dsn_cut(&rest, ",");
    if (!part) {
      part = text;
      rest = NULL;
    }
    hl_dsn one = {.port = SENTINEL_PORT};
    int status = hl__dsn_host(part, &one, error);
    if (status) return status;
    if (!one.host && (rest || store->sentinel_count))
      return hl__error(error, HL_EDSN, "the DSN has a sentinel without a host");
    if (store->sentinel_count == HL__REDIS_SENTINELS)
      return hl__error(error, HL_EDSN, "the DSN names more than %d sentinels", HL__REDIS_SENTINELS);
    hl__redis_address *sentinel = &store->sentinels[store->sentinel_count++];
    if (snprintf(sentinel->host, sizeof sentinel->host, "%s", one.host ? one.host : "127.0.0.1") >=
        (int)sizeof sentinel->host)
      return hl__error(error, HL_EDSN, "a sentinel's host in the DSN is too long");
    sentinel->port = one.port;
  }
  return HL_OK;
}

static int master_read(const hl__redis_store *store, const redisReply *reply,
                       hl__redis_address *master, hl_error *error) {
  if (reply->type == REDIS_REPLY_NIL)
    return hl__error(error, HL_ECONNECTION, "it knows no master '%.100s'", store->service);
  const char *host = hl__redis_reply_text(reply, 0);
  unsigned port = 0;
  if (!*host || strlen(host) >= sizeof master->host ||
      hl__dsn_port(hl__redis_reply_text(reply, 1), &port, NULL) != HL_OK)
    return hl__error(error, HL_ECONNECTION, "it answers what was not asked");
  strcpy(master->host, host);
  master->port = port;
  return HL_OK;
}

static int ask(hl__redis_store *store, const hl__redis_address *sentinel, int64_t deadline,
               hl__redis_address *master, hl_error *error) {
  hl__redis_session *session;
  redisReply *reply;
  int status = hl__redis_dial(store, sentinel, &store->sentinel_login, deadline, &session, error);
  if (status) return status;
  const char *words[] = {"SENTINEL", "GET-MASTER-ADDR-BY-NAME", store->service};
  status = hl__redis_command(session, deadline, 3, words, &reply, error);
  if (status == HL_OK) {
    status = master_read(store, reply, master, error);
    freeReplyObject(reply);
  }
  hl__redis_disconnect(session);
  return status;
}

int hl__redis_sentinels_ask(hl__redis_store *store, int64_t deadline, hl__redis_address *master,
                            hl_error *error) {
  unsigned count = store->sentinel_count;
  unsigned first = atomic_load(&store->sentinel) % count;
  hl_error last = {.status = HL_ECONNECTION};
  for (unsigned i = 0; i < count; i++) {
    unsigned n = (first + i) % count;
    const hl__redis_address *sentinel = &store->sentinels[n];
    int64_t share = hl__left_ms(deadline) / (count - i + 1);
    if (share > ANSWER_MS) share = ANSWER_MS;
    int status = ask(store, sentinel, hl__now_ms() + share, master, &last);
    if (status == HL_OK) {
      atomic_store(&store->sentinel, n); /* it is asked first from now on */
      return HL_OK;
    }
    if (status == HL_ENOMEM) return hl__error_memory(error);
  }
  const hl__redis_address *asked = &store->sentinels[(first + count - 1) % count];
  (void)hl__error(error, HL_ECONNECTION,
                  "no sentinel of %u says which server is the master '%.100s'; "
                  "the last, %.100s:%u: %.200s",
                  count, store->service, asked->host, asked->port, last.message);
  if (error) error->retryable = last.retryable;
  return HL_ECONNECTION;
}
