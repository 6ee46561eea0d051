/*
 * dsn.c - the DSNs of Memcached, and which server has which root:
 *
 *     memcached://host[:port][,host[:port]]…[?prefix=hierlock&connect_timeout=10]
 */
#include "memcached_store.h"

#include <ctype.h>
#include <libmemcached/memcached.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_PORT 11211
#define CONNECT_TIMEOUT_MS 10000

/* The list is taken apart by hl__memcached_params. */
static int parse_hosts(char *text, hl_dsn *dsn, hl_error *error) {
  dsn->host = *text ? text : NULL;
  return hl__dsn_decode(text, "host", error);
}

int hl__memcached_dsn(char *text, hl_dsn *dsn, hl_error *error) {
  if (*text == '/')
    return hl__error(error, HL_EDSN,
                     "the DSN names no host: Memcached is reached by TCP, write "
                     "memcached://host:11211");
  int status = hl__dsn_url(text, parse_hosts, dsn, error);
  if (status) return status;
  if (dsn->user || dsn->password)
    return hl__error(error, HL_EDSN,
                     "the DSN names a user or password: Memcached is used "
                     "without a log-in, on a network that is yours");
  if (dsn->database)
    return hl__error(error, HL_EDSN,
                     "the DSN names a database, and Memcached has none; spaces "
                     "of their own are had by ?prefix=");
  return HL_OK;
}

static int server_add(hl__memcached_store *store, char *text, hl_error *error) {
  hl_dsn part = {0};
  hl__memcached_server *server = &store->servers[store->server_count];
  if (store->server_count == HL__MEMCACHED_SERVERS_MAX)
    return hl__error(error, HL_EDSN, "the DSN names more than %d servers",
                     HL__MEMCACHED_SERVERS_MAX);
  int status = hl__dsn_host(text, &part, error);
  if (status) return status;
  const char *host = part.host ? part.host : "127.0.0.1";
  if (strlen(host) >= sizeof server->host)
    return hl__error(error, HL_EDSN, "a host in the DSN is too long");
  for (size_t i = 0; i <= strlen(host); i++)
    server->host[i] = (char)tolower((unsigned char)host[i]);
  server->port = part.port ? part.port : DEFAULT_PORT;
  for (unsigned i = 0; i < store->server_count; i++)
    if (store->servers[i].port == server->port && strcmp(store->servers[i].host, server->host) == 0)
      return hl__error(error, HL_EDSN, "the DSN names the server %s:%u twice", server->host,
                       server->port);
  store->server_count++;
  return HL_OK;
}

static int parse_servers(hl__memcached_store *store, hl_error *error) {
  const char *host = store->config->dsn->host;
  char *list = strdup(host ? host : ""), *rest = list, *part;
  if (!list) return hl__error_memory(error);
  int status = HL_OK;
  do {
    part = hl__dsn_cut(&rest, ",");
    char *text = part ? part : rest;
    if (host && !*text)
      status = hl__error(error, HL_EDSN, "the DSN names an empty server");
    else
      status = server_add(store, text, error);
  } while (part && status == HL_OK);
  free(list);
  return status;
}

static const hl__dsn_known params[] = {
    {"prefix", HL__DSN_PREFIX, .offset = offsetof(hl__memcached_store, prefix)},
    {"connect_timeout", HL__DSN_SECONDS, .offset = offsetof(hl__memcached_store, connect_timeout),
     .most = HL__DSN_DAY},
    {.name = NULL}};

/* ------------------------------------------------------ which server has it */

/* Makes the same digest of the same servers in any order: so does ketama. A single server may
   have several names: all programs find the same there. */
static void digest_make(hl__memcached_store *store) {
  uint64_t sum = 0;
  if (store->server_count == 1) {
    (void)snprintf(store->list, sizeof store->list, "1");
    return;
  }
  for (unsigned i = 0; i < store->server_count; i++) {
    char name[300];
    (void)snprintf(name, sizeof name, "%s:%u", store->servers[i].host, store->servers[i].port);
    uint64_t hash = UINT64_C(0xcbf29ce484222325); /* FNV-1a */
    for (const char *c = name; *c; c++) hash = (hash ^ (unsigned char)*c) * UINT64_C(0x100000001b3);
    sum += hash;
  }
  (void)snprintf(store->list, sizeof store->list, "%u-%016llx", store->server_count,
                 (unsigned long long)sum);
}

static int distribute(hl__memcached_store *store, hl_error *error) {
  if (store->server_count == 1) return HL_OK;
  memcached_st *library = memcached_create(NULL);
  if (!library) return hl__error_memory(error);
  memcached_return_t rc = memcached_behavior_set(library, MEMCACHED_BEHAVIOR_KETAMA, 1);
  for (unsigned i = 0; i < store->server_count && memcached_success(rc); i++)
    rc = memcached_server_add(library, store->servers[i].host, (in_port_t)store->servers[i].port);
  for (unsigned i = 0; i < HL__MEMCACHED_SLOTS && memcached_success(rc); i++) {
    char name[24];
    int size = snprintf(name, sizeof name, "slot-%u", i);
    store->slots[i] = (uint8_t)memcached_generate_hash(library, name, (size_t)size);
    if (store->slots[i] >= store->server_count) rc = MEMCACHED_FAILURE;
  }
  memcached_free(library);
  if (memcached_success(rc)) return HL_OK;
  return hl__error(error, HL_ESTORE, "libmemcached cannot distribute: %s",
                   memcached_strerror(NULL, rc));
}

int hl__memcached_params(hl__memcached_store *store, hl_error *error) {
  const hl_dsn *dsn = store->config->dsn;
  store->prefix = "hierlock";
  store->connect_timeout = CONNECT_TIMEOUT_MS;
  int status = parse_servers(store, error);
  if (status == HL_OK) status = hl__dsn_store(dsn, params, store, error);
  if (status == HL_OK) status = distribute(store, error);
  digest_make(store);
  return status;
}
