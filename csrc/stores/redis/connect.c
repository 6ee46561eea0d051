/*
 * connect.c - from a DSN to a connection: which server it is, and which database.
 */
#include "redis_store.h"

#include <stdlib.h>
#include <string.h>

#define DEFAULT_PORT 6379

/* The server of the DSN, or the master that the sentinels name. */
static int address_find(hl__redis_store *store, int64_t deadline, hl__redis_address *address,
                        hl_error *error) {
  const hl_dsn *dsn = store->config->dsn;
  if (store->service) return hl__redis_sentinels_ask(store, deadline, address, error);
  if (hl__redis_cluster_seed(store, atomic_load(&store->seed), address)) return HL_OK;
  *address = (hl__redis_address){.port = dsn->port ? dsn->port : DEFAULT_PORT};
  if (!dsn->socket && snprintf(address->host, sizeof address->host, "%s",
                               dsn->host ? dsn->host : "127.0.0.1") >= (int)sizeof address->host)
    return hl__error(error, HL_ECONNECTION, "the host's name is too long");
  return HL_OK;
}

static int database_select(hl__redis_session *session, int64_t deadline, hl_error *error) {
  char number[24];
  if (!session->store->database) return HL_OK;
  (void)snprintf(number, sizeof number, "%u", session->store->database);
  const char *words[] = {"SELECT", number};
  return hl__redis_command(session, deadline, 2, words, NULL, error);
}

int hl__redis_connect(hl__redis_store *store, int64_t deadline, hl__redis_session **result,
                      hl_error *error) {
  hl__redis_address address;
  deadline = hl__within_ms(store->connect_timeout, deadline);
  *result = NULL;
  int status = address_find(store, deadline, &address, error);
  if (status == HL_OK) {
    status = hl__redis_dial(store, &address, NULL, deadline, result, error);
    if (status == HL_OK) status = database_select(*result, deadline, error);
    if (status) hl__redis_named(store, &address, error);
  }
  /* The others are no outcomes of connecting. */
  if (status > 0) status = hl__error_as(error, HL_ECONNECTION);
  if (status) {
    hl__redis_disconnect(*result);
    *result = NULL;
  }
  return status;
}

void hl__redis_named(const hl__redis_store *store, const hl__redis_address *address,
                     hl_error *error) {
  if (!store->service || !error) return;
  hl_error said = *error;
  (void)hl__error(error, said.status, "%.100s:%u, which the sentinels name as '%.100s': %.250s",
                  address->host, address->port, store->service, said.message);
  error->retryable = said.retryable;
}
