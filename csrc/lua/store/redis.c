/*
 * redis.c - the Lua module hierlock.store.redis, and its connection for administration, which
 * carries any command, also to a server that the store would refuse for leases.
 */
#include "module.h"
#include "redis_store.h"

#include <stdlib.h>
#include <string.h>

#define WORDS_MAX 8 /* of hl__redis_command */

typedef struct connection {
  hll_connection base;
  hl__redis_store store;
  hl__redis_session *session; /* NULL before it is connected, and once closed */
  redisReply *reply;          /* on its way to Lua; NULL otherwise */
} connection;

static const hll_connection_kind kind;

/* Pushes a text or a number; false for another type. */
static void push_scalar(lua_State *L, const redisReply *reply) {
  switch (reply->type) {
  case REDIS_REPLY_STRING:
  case REDIS_REPLY_STATUS: lua_pushlstring(L, reply->str, reply->len); break;
  case REDIS_REPLY_INTEGER: lua_pushnumber(L, (lua_Number)reply->integer); break;
  default: lua_pushboolean(L, 0);
  }
}

/* Pushes the reply: a text, a number or false, or a list of these. */
static void push_reply(lua_State *L, const redisReply *reply) {
  if (reply->type != REDIS_REPLY_ARRAY) {
    push_scalar(L, reply);
    return;
  }
  lua_newtable(L);
  for (size_t i = 0; i < reply->elements; i++) {
    push_scalar(L, reply->element[i]);
    lua_rawseti(L, -2, (int)i + 1);
  }
}

static void reply_free(connection *self) {
  if (self->reply) freeReplyObject(self->reply);
  self->reply = NULL;
}

static void disconnect(hll_connection *base) {
  connection *self = (connection *)base;
  reply_free(self);
  hl__redis_disconnect(self->session);
  self->session = NULL;
  hl__redis_tls_close(&self->store);
  free(self->store.sentinel_text);
  self->store.sentinel_text = NULL;
}

/* command(word, ...): the answer | nil, err. */
static int connection_command(lua_State *L) {
  connection *self = hll_connection_check(L, &kind);
  const char *words[WORDS_MAX];
  int n = lua_gettop(L) - 1;
  hl_error error;
  if (n < 1 || n > WORDS_MAX) hll_misuse(L, "a command has 1 to 8 words");
  for (int i = 0; i < n; i++) words[i] = luaL_checkstring(L, i + 2);
  if (!self->session) return hll_fail(L, HL_ECONNECTION, "the connection is closed");
  reply_free(self);
  int status = hl__redis_command(self->session, hl__now_ms() + self->base.answer_ms, (size_t)n,
                                 words, &self->reply, &error);
  if (status) {
    self->reply = NULL;
    /* Without its answer the connection ends: the next command would take a late answer for its
       own. A message of hl__redis_error, in the server's words, is an answer. */
    if (strncmp(error.message, "the server says: ", 17) != 0) disconnect(&self->base);
    return hll_failure(L, &error, 0);
  }
  push_reply(L, self->reply);
  reply_free(self);
  return 1;
}

static const luaL_Reg methods[] = {
    {"command", connection_command},
    {NULL, NULL},
};

static int connect_to(lua_State *L, hll_connection *base, hl_error *error) {
  (void)L;
  connection *self = (connection *)base;
  self->store.config = &base->config;
  base->answer_ms = HL__REDIS_ANSWER_MS;
  int status = hl__redis_params(&self->store, error);
  if (status == HL_OK) status = hl__redis_tls_open(&self->store, error);
  if (status == HL_OK)
    status = hl__redis_connect(&self->store, hl__now_ms() + self->store.connect_timeout,
                               &self->session, error);
  return status;
}

static const hll_connection_kind kind = {
    .name = "hierlock.connection.redis",
    .size = sizeof(connection),
    .parse = hl__redis_dsn,
    .connect = connect_to,
    .disconnect = disconnect,
    .methods = methods,
};

__attribute__((visibility("default"))) int luaopen_hierlock_store_redis(lua_State *L);

int luaopen_hierlock_store_redis(lua_State *L) {
  return hll_store_module(L, &hl_store_redis, &kind);
}
