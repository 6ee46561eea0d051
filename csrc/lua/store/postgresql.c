/*
 * postgresql.c - the Lua module hierlock.store.postgresql, and its connection for administration,
 * which carries any SQL.
 */
#include "module.h"
#include "postgresql_store.h"

/* The time for an answer, until answers_within sets another: another session may hold a table. */
#define ANSWER_MS 60000

typedef struct connection {
  hll_connection base;
  hl__pg_store store;
  hl__pg_session *session; /* NULL before it is connected, and once closed */
} connection;

static const hll_connection_kind kind;

/* Pushes the last rows as a list of lists of strings, false for NULL. */
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
  connection *self = hll_connection_check(L, &kind);
  const char *sql = luaL_checkstring(L, 2);
  hl_error error;
  PGresult *result;
  if (!self->session) return hll_fail(L, HL_ECONNECTION, "the connection is closed");
  self->session->patience = hl__now_ms() + self->base.answer_ms;
  if (hl__pg_query(self->session, sql, 0, &result, &error))
    return hll_connection_failed(L, &self->base, &error);
  /* Raises for want of memory only: then the result is lost, and the command ends with it. */
  push_rows(L, result);
  PQclear(result);
  return 1;
}

static const luaL_Reg methods[] = {
    {"query", connection_query},
    {NULL, NULL},
};

static int connect_to(lua_State *L, hll_connection *base, hl_error *error) {
  (void)L;
  connection *self = (connection *)base;
  self->store.config = &base->config;
  base->answer_ms = ANSWER_MS;
  int status = hl__pg_params(&self->store, error);
  if (status) return status;
  return hl__pg_connect(&self->store, hl__now_ms() + self->store.connect_timeout, &self->session,
                        error);
}

static void disconnect(hll_connection *base) {
  connection *self = (connection *)base;
  hl__pg_disconnect(self->session);
  self->session = NULL;
}

static const hll_connection_kind kind = {
    .name = "hierlock.connection.postgresql",
    .size = sizeof(connection),
    .parse = hl__pg_dsn,
    .connect = connect_to,
    .disconnect = disconnect,
    .methods = methods,
    .sql = hl__pg_tables_sql,
};

__attribute__((visibility("default"))) int luaopen_hierlock_store_postgresql(lua_State *L);

int luaopen_hierlock_store_postgresql(lua_State *L) {
  return hll_store_module(L, &hl_store_postgresql, &kind);
}
