/*
 * connection.c - class hierlock.connection.redis: a connection for
 * administration, as the command `hierlock` makes it to look at a server. It
 * reaches the server as the leases do (DSN, TLS, password), also one that would
 * be refused, and then says any command. It takes no leases, and no pool knows
 * of it. Internal: programs have clients of their own.
 */
#include "connection.h"

#include "hll.h"
#include "redis_store.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define HLL_CONNECTION "hierlock.connection.redis"
#define WORDS_MAX 8 /* of hl__redis_command */

typedef struct connection {
  hl_dsn dsn;
  hl_store_config config;
  hl__redis_store store;
  hl__redis_session *session; /* NULL before it is connected, and once closed */
  redisReply *reply;          /* on its way to Lua; NULL otherwise */
} connection;

static connection *connection_check(lua_State *L) {
  connection *self = hll_testudata(L, 1, HLL_CONNECTION);
  if (!self) hll_misuse(L, "self must be a connection");
  return self;
}

/* A text, a number, or false for what is neither. */
static void push_scalar(lua_State *L, const redisReply *reply) {
  switch (reply->type) {
  case REDIS_REPLY_STRING:
  case REDIS_REPLY_STATUS:
    lua_pushlstring(L, reply->str, reply->len);
    break;
  case REDIS_REPLY_INTEGER:
    lua_pushnumber(L, (lua_Number)reply->integer);
    break;
  default:
    lua_pushboolean(L, 0);
  }
}

/* That, or a list of such. */
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

static void disconnect(connection *self) {
  reply_free(self);
  hl__redis_disconnect(self->session);
  self->session = NULL;
}

/* command(word, ...): the answer | nil, err. */
static int connection_command(lua_State *L) {
  connection *self = connection_check(L);
  const char *words[WORDS_MAX];
  int n = lua_gettop(L) - 1;
  hl_error error;
  if (n < 1 || n > WORDS_MAX) hll_misuse(L, "a command has 1 to 8 words");
  for (int i = 0; i < n; i++)
    words[i] = luaL_checkstring(L, i + 2);
  if (!self->session)
    return hll_fail(L, HL_ECONNECTION, "the connection is closed");
  reply_free(self);
  int status =
      hl__redis_command(self->session, hl__now_ms() + HL__REDIS_ANSWER_MS,
                        (size_t)n, words, &self->reply, &error);
  if (status) {
    self->reply = NULL;
    /* An answer that has not come would be taken for that to the next command; one that says
       no, in the words of hl__redis_error, has. */
    if (strncmp(error.message, "the server says: ", 17) != 0) disconnect(self);
    return hll_failure(L, &error, 0);
  }
  push_reply(L, self->reply);
  reply_free(self);
  return 1;
}

static int connection_close(lua_State *L) {
  connection *self = connection_check(L);
  disconnect(self);
  hl__redis_tls_close(&self->store);
  free(self->store.sentinel_text);
  self->store.sentinel_text = NULL;
  hl_dsn_dispose(&self->dsn);
  return 0;
}

static const luaL_Reg methods[] = {
    {"command", connection_command},
    {"close", connection_close},
    {NULL, NULL},
};

/* connect(dsn, application): a connection | nil, err. */
static int connect_new(lua_State *L) {
  const char *text = luaL_checkstring(L, 1);
  const char *application = luaL_checkstring(L, 2);
  hl_error error;
  connection *self = hll_newuserdata(L, sizeof *self);
  memset(self, 0, sizeof *self);
  luaL_getmetatable(L, HLL_CONNECTION);
  lua_setmetatable(L, -2);

  int status = hl_dsn_parse(text, hl__redis_dsn, &self->dsn, &error);
  if (status) return hll_failure(L, &error, 0);
  self->config = (hl_store_config){.dsn = &self->dsn,
                                   .timeout = 50000,
                                   .hold_timeout = 30000,
                                   .application = application,
                                   .host = "",
                                   .pid = getpid()};
  self->store.base.ops = &hl_store_redis;
  self->store.config = &self->config;
  status = hl__redis_params(&self->store, &error);
  if (status == HL_OK) status = hl__redis_tls_open(&self->store, &error);
  if (status == HL_OK)
    status = hl__redis_connect(&self->store,
                               hl__now_ms() + self->store.connect_timeout,
                               &self->session, &error);
  return status ? hll_failure(L, &error, 0) : 1;
}

static const luaL_Reg functions[] = {
    {"connect", connect_new},
    {NULL, NULL},
};

void hll_redis_connection_register(lua_State *L) {
  hll_error_register(L);
  if (luaL_newmetatable(L, HLL_CONNECTION)) {
    lua_pushcfunction(L, connection_close);
    lua_setfield(L, -2, "__gc");
    lua_newtable(L);
    hll_setfuncs(L, methods);
    lua_setfield(L, -2, "__index");
  }
  lua_pop(L, 1);
  lua_newtable(L);
  hll_setfuncs(L, functions);
}
