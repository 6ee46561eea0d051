/*
 * connection.c - class hierlock.connection.postgresql: a connection for administration, as the
 * command `hierlock` makes it to provision and to verify the tables of leases. It reaches the
 * server as the locks do, and then says any SQL. It takes no locks, and no pool knows of it.
 * Internal: programs have drivers of their own.
 */
#include "connection.h"

#include "hll.h"
#include "postgresql_store.h"

#include <string.h>
#include <unistd.h>

#define HLL_CONNECTION "hierlock.connection.postgresql"
/* For an answer: somebody may hold a table. */
#define ANSWER_MS 60000

typedef struct connection {
  hl_dsn dsn;
  hl_store_config config;
  hl__pg_store store;
  hl__pg_session *session; /* NULL before it is connected, and once closed */
  int64_t answer_ms;       /* for each answer */
} connection;

static connection *connection_check(lua_State *L) {
  connection *self = hll_testudata(L, 1, HLL_CONNECTION);
  if (!self) hll_misuse(L, "self must be a connection");
  return self;
}

/* The last rows as a list of lists of strings, false for NULL. */
static void push_rows(lua_State *L, const PGresult *result) {
  lua_newtable(L);
  for (int i = 0; result && i < PQntuples(result); i++) {
    lua_newtable(L);
    for (int j = 0; j < PQnfields(result); j++) {
      const char *field = hl__pg_field(result, i, j);
      if (field)
        lua_pushstring(L, field);
      else
        lua_pushboolean(L, 0);
      lua_rawseti(L, -2, j + 1);
    }
    lua_rawseti(L, -2, i + 1);
  }
}

/* query(sql): the rows of the last statement | nil, err. */
static int connection_query(lua_State *L) {
  connection *self = connection_check(L);
  const char *sql = luaL_checkstring(L, 2);
  hl_error error;
  PGresult *result;
  if (!self->session)
    return hll_fail(L, HL_ECONNECTION, "the connection is closed");
  self->session->patience = hl__now_ms() + self->answer_ms;
  if (hl__pg_query(self->session, sql, 0, &result, &error)) {
    if (error.status == HL_ECONNECTION) {
      hl__pg_disconnect(self->session);
      self->session = NULL;
    }
    return hll_failure(L, &error, 0);
  }
  /* Raises for want of memory only; then the result is lost, and the command
     with it. */
  push_rows(L, result);
  PQclear(result);
  return 1;
}

/* answers_within(seconds): a query that takes longer fails, and ends the connection.
   Before it is called, within ANSWER_MS. */
static int connection_answers_within(lua_State *L) {
  connection *self = connection_check(L);
  lua_Number seconds = luaL_checknumber(L, 2);
  luaL_argcheck(L, seconds >= 0.001 && seconds < 1e6, 2, "must be seconds");
  self->answer_ms = (int64_t)(seconds * 1000);
  return 0;
}

static int connection_close(lua_State *L) {
  connection *self = connection_check(L);
  hl__pg_disconnect(self->session);
  self->session = NULL;
  hl_dsn_dispose(&self->dsn);
  return 0;
}

static const luaL_Reg methods[] = {
    {"query", connection_query},
    {"answers_within", connection_answers_within},
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

  int status = hl_dsn_parse(text, hl__pg_dsn, &self->dsn, &error);
  if (status) return hll_failure(L, &error, 0);
  self->config = (hl_store_config){.dsn = &self->dsn,
                                   .timeout = 50000,
                                   .hold_timeout = 30000,
                                   .application = application,
                                   .host = "",
                                   .pid = getpid()};
  self->store.base.ops = &hl_store_postgresql;
  self->store.config = &self->config;
  self->store.provisions = true;
  self->answer_ms = ANSWER_MS;
  status = hl__pg_params(&self->store, &error);
  int64_t deadline = hl__now_ms() + self->store.connect_timeout;
  if (status == HL_OK)
    status = hl__pg_connect(&self->store, deadline, &self->session, &error);
  return status ? hll_failure(L, &error, 0) : 1;
}

static const luaL_Reg functions[] = {
    {"connect", connect_new},
    {NULL, NULL},
};

void hll_pg_connection_register(lua_State *L) {
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
