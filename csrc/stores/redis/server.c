/*
 * server.c - does this server exclude? Looked at on each connection, as another server may have
 * taken the address over. take.lua notices forgotten leases, with the facts that are read here.
 */
#include "redis_store.h"

#include "../judge/judge.h"

#include <stdlib.h>
#include <string.h>

/* The value of a field of INFO, up to the end of its line; "" where it is absent. */
static const char *info(const char *text, const char *field, char out[64]) {
  size_t size = strlen(field);
  out[0] = '\0';
  for (const char *line = text; line; line = strchr(line, '\n')) {
    if (*line == '\n') line++;
    if (strncmp(line, field, size) != 0 || line[size] != ':') continue;
    const char *value = line + size + 1;
    size_t n = strcspn(value, "\r\n");
    if (n > 63) n = 63;
    memcpy(out, value, n);
    out[n] = '\0';
    break;
  }
  return out;
}

static bool info_is(const char *text, const char *field, const char *value) {
  char found[64];
  return strcmp(info(text, field, found), value) == 0;
}

static int refuse(const hl__redis_session *session, const char *text, bool sentinels,
                  hl_error *error) {
  const hl__redis_store *store = session->store;
  bool cluster = info_is(text, "cluster_enabled", "1");
  char version[64], role[64], policy[64];
  const hl__fact facts[] = {{"redis_version", info(text, "redis_version", version)},
                            {"role", info(text, "role", role)},
                            {"maxmemory_policy", info(text, "maxmemory_policy", policy)},
                            {0}};
  if (info_is(text, "loading", "1"))
    return hl__error(error, HL_ECONNECTION, "the server is loading its data");
  if (sentinels && strcmp(role, "master") != 0)
    return hl__error(error, HL_ECONNECTION, "it is a replica yet");
  if (store->base.layout && cluster != (store->cluster != NULL))
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the server has joined or left a cluster: open it anew");
  if (cluster && store->config->interoperates)
    return hl__error(error, HL_EUNSUPPORTED,
                     "`interoperate` is not possible on Redis Cluster: the names of Symfony "
                     "Lock lie in other slots than the tree; use one server");
  if (cluster && (store->database || sentinels))
    return hl__error(error, HL_EUNSUPPORTED,
                     "a node of Redis Cluster has neither databases nor sentinels");
  if (cluster && strcmp(role, "master") != 0) {
    /* Any node can tell of the others. */
    if (session->face == session) return HL_OK;
    (void)hl__error(error, HL_ECONNECTION, "the node is a replica now");
    if (error) error->retryable = true;
    return HL_ECONNECTION;
  }
  return hl__redis_server_judge(facts, error);
}

/* Whether a restart forgets nothing. Without the right to ask, assume that it forgets. */
static int durability_read(hl__redis_session *session, const char *text, int64_t deadline,
                           hl_error *error) {
  const char *words[] = {"CONFIG", "GET", "*appendfsync*"};
  redisReply *reply;
  bool always = false, pauses = false;
  session->durable = false;
  if (!info_is(text, "aof_enabled", "1") || session->start == 0) return HL_OK;
  /* Where there are sentinels, another one may have been the master meanwhile. */
  if (session->store->service || session->store->cluster) return HL_OK;
  int status = hl__redis_command(session, deadline, 3, words, &reply, error);
  if (status == HL_OK) {
    for (size_t i = 0; reply->type == REDIS_REPLY_ARRAY && i + 1 < (size_t)reply->elements;
         i += 2) {
      const char *name = hl__redis_reply_text(reply, i);
      const char *value = hl__redis_reply_text(reply, i + 1);
      if (strcmp(name, "appendfsync") == 0) always = strcmp(value, "always") == 0;
      if (strcmp(name, "no-appendfsync-on-rewrite") == 0) pauses = strcmp(value, "no") != 0;
    }
    session->durable = always && !pauses;
    freeReplyObject(reply);
  }
  return status == HL_ECONNECTION ? status : HL_OK;
}

/* When it was started, by its own clock. */
static int start_read(hl__redis_session *session, const char *text, int64_t deadline,
                      hl_error *error) {
  static const char never[] = "0000000000000000000000000000000000000000";
  const char *words[] = {"TIME"};
  char found[64];
  redisReply *reply;
  int64_t up = strtoll(info(text, "uptime_in_seconds", found), NULL, 10);
  int status = hl__redis_command(session, deadline, 1, words, &reply, error);
  if (status) return status;
  /* Both are cut to whole seconds: not too early. */
  session->start = (hl__redis_reply_number(reply, 0) - up + 1) * 1000;
  freeReplyObject(reply);
  if (!info_is(text, "master_replid2", never)) session->start = 0;
  return HL_OK;
}

int hl__redis_verify(hl__redis_session *session, int64_t deadline, hl_error *error) {
  const char *words[] = {"INFO"};
  redisReply *reply;
  char found[64];
  int status = hl__redis_command(session, deadline, 1, words, &reply, error);
  if (status) return status;
  const char *text = reply->type == REDIS_REPLY_STRING ? reply->str : "";
  status = refuse(session, text, session->store->service, error);
  session->master = info_is(text, "role", "master");
  if (status == HL_OK && info_is(text, "cluster_enabled", "1"))
    status = hl__redis_cluster_read(session, deadline, error);
  /* The database, too: two may be swapped. */
  (void)snprintf(session->run, sizeof session->run, "%s/%u", info(text, "run_id", found),
                 session->store->database);
  if (status == HL_OK) status = start_read(session, text, deadline, error);
  if (status == HL_OK) status = durability_read(session, text, deadline, error);
  freeReplyObject(reply);
  if (status == HL_OK && !session->store->seen)
    status = hl__redis_scripts_load(session, deadline, error);
  return status;
}
