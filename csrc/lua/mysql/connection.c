/*
 * connection.c - class hierlock.connection: a connection for administration, as
 * the command `hierlock` makes it to provision and to verify a table. It reaches
 * the server as the locks do (DSN, option files, TLS, refusal of servers that
 * would not exclude), and then says any SQL. It takes no locks, and no pool knows
 * of it. Internal: programs have drivers of their own.
 */
#include "connection.h"

#include "hll.h"
#include "mysql_store.h"

#include <mysqld_error.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define HLL_CONNECTION "hierlock.connection"

typedef struct connection {
  hl_dsn dsn;
  hl_store_config config;
  hl__mysql_store store;
  hl__mysql_session *session; /* NULL before it is connected, and once closed */
  int64_t answer_ms;          /* for each answer; 0: as long as it takes */
} connection;

static connection *connection_check(lua_State *L) {
  connection *self = hll_testudata(L, 1, HLL_CONNECTION);
  if (!self) hll_misuse(L, "self must be a connection");
  return self;
}

/* ------------------------------------------------------------- methods */

/* The rows of a result as a list of lists of strings, false for NULL. */
static void push_rows(lua_State *L, MYSQL_RES *result) {
  unsigned columns = mysql_num_fields(result);
  lua_createtable(L, (int)mysql_num_rows(result), 0);
  MYSQL_ROW row;
  for (int i = 1; (row = mysql_fetch_row(result)); i++) {
    unsigned long *sizes = mysql_fetch_lengths(result);
    lua_createtable(L, (int)columns, 0);
    for (unsigned j = 0; j < columns; j++) {
      if (row[j])
        lua_pushlstring(L, row[j], sizes[j]);
      else
        lua_pushboolean(L, 0);
      lua_rawseti(L, -2, (int)j + 1);
    }
    lua_rawseti(L, -2, i);
  }
}

/* query(sql): a list of rows, or the number of rows that were changed; nil, err.
   Waits as long as answers_within says; the connection may end with an error. */
static int connection_query(lua_State *L) {
  connection *self = connection_check(L);
  size_t size;
  const char *sql = luaL_checklstring(L, 2, &size);
  hl_error error;
  MYSQL_RES *result;
  if (!self->session)
    return hll_fail(L, HL_ECONNECTION, "the connection is closed");
  self->session->patience =
      self->answer_ms ? hl__now_ms() + self->answer_ms : HL_FOREVER;
  if (hl__mysql_query(self->session, sql, size, &result, &error)) {
    if (error.status == HL_ECONNECTION) {
      hl__mysql_disconnect(self->session);
      self->session = NULL;
    }
    return hll_failure(L, &error, 0);
  }
  if (result) {
    /* Raises for want of memory only; then the result is lost, and the command
       with it. */
    push_rows(L, result);
    mysql_free_result(result);
  } else {
    lua_pushinteger(L, (lua_Integer)mysql_affected_rows(self->session->mysql));
  }
  return 1;
}

/* answers_within(seconds): a query that takes longer fails, and ends the connection.
   Before it is called, a query may take for ever. */
static int connection_answers_within(lua_State *L) {
  connection *self = connection_check(L);
  lua_Number seconds = luaL_checknumber(L, 2);
  luaL_argcheck(L, seconds >= 0.001 && seconds < 1e6, 2, "must be seconds");
  self->answer_ms = (int64_t)(seconds * 1000);
  return 0;
}

/* Whether the server logs statements, so that the session is in REPEATABLE READ. */
static int connection_logs_statements(lua_State *L) {
  connection *self = connection_check(L);
  lua_pushboolean(L, self->session && self->session->repeatable);
  return 1;
}

/* The name of the table that the DSN says. */
static int connection_table(lua_State *L) {
  lua_pushstring(L, connection_check(L)->store.space);
  return 1;
}

static int connection_close(lua_State *L) {
  connection *self = connection_check(L);
  hl__mysql_disconnect(self->session);
  self->session = NULL;
  hl_dsn_dispose(&self->dsn);
  return 0;
}

static const luaL_Reg methods[] = {
    {"query", connection_query},
    {"answers_within", connection_answers_within},
    {"table", connection_table},
    {"logs_statements", connection_logs_statements},
    {"close", connection_close},
    {NULL, NULL},
};

/* ------------------------------------------------------------- connect */

/* A server's administrator may have set other defaults. In READ COMMITTED an
   INSERT ... SELECT locks no row that it reads; but where statements are logged,
   there is no INSERT in READ COMMITTED. MariaDB ends a recursion that is too deep
   without an error. */
static int set_up(hl__mysql_session *session, hl_error *error) {
  const char *statements[] = {
      session->repeatable
          ? "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ WRITE"
          : "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE",
      "SET SESSION autocommit=1,completion_type=0,"
      "sql_select_limit=18446744073709551615,sql_big_selects=1",
      session->dialect == HL_MARIADB
          ? "SET SESSION max_statement_time=0,max_recursive_iterations=1000"
          : "SET SESSION max_execution_time=0,cte_max_recursion_depth=1000"};
  for (size_t i = 0; i < sizeof statements / sizeof *statements; i++) {
    MYSQL_RES *none;
    int status = hl__mysql_query(session, statements[i], strlen(statements[i]),
                                 &none, error);
    if (status) return status;
  }
  return HL_OK;
}

/* connect(dsn, application [, password [, any]]): a connection | nil, err. The password
   takes the place of the DSN's. any: to a server that would be refused, too, for who asks
   what is wrong with it. */
static int connect_new(lua_State *L) {
  const char *text = luaL_checkstring(L, 1);
  const char *application = luaL_checkstring(L, 2);
  const char *password = luaL_optstring(L, 3, NULL);
  hl_error error;
  connection *self = hll_newuserdata(L, sizeof *self);
  memset(self, 0, sizeof *self);
  luaL_getmetatable(L, HLL_CONNECTION);
  lua_setmetatable(L, -2);

  int status = hl_dsn_parse(text, hl__mysql_dsn, &self->dsn, &error);
  if (status) return hll_failure(L, &error, 0);
  if (password) self->dsn.password = password;
  self->config = (hl_store_config){.dsn = &self->dsn,
                                   .timeout = 50000,
                                   .hold_timeout = 30000,
                                   .application = application,
                                   .host = "",
                                   .pid = getpid()};
  self->store.base.ops = &hl_store_mysql;
  self->store.config = &self->config;
  hl__mysql_library_init();
  status = hl__mysql_params(&self->store, &error);
  int64_t deadline = hl__now_ms() + self->store.connect_timeout;
  if (status == HL_OK)
    status = hl__mysql_connect(&self->store, deadline, &self->session, &error);
  self->dsn.password = NULL; /* Lua's string, perhaps */
  if (status == HL_OK) {
    self->session->patience = deadline;
    if (!lua_toboolean(L, 4))
      status = hl__mysql_verify_server(self->session, &error);
  }
  if (status == HL_OK) status = set_up(self->session, &error);
  if (status) return hll_failure(L, &error, 0);
  return 1;
}

static const luaL_Reg functions[] = {
    {"connect", connect_new},
    {NULL, NULL},
};

void hll_connection_register(lua_State *L) {
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
