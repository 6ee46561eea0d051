/*
 * mysql.c - the Lua module hierlock.store.mysql, and its connection for administration, which
 * carries any SQL. The connection, too, refuses a server that would not exclude.
 */
#include "module.h"
#include "mysql_store.h"

#include <mysqld_error.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct connection {
  hll_connection base;
  hl__mysql_store store;
  hl__mysql_session *session; /* NULL before it is connected, and once closed */
} connection;

static const hll_connection_kind kind;

/* Makes the tables of hier_lock_buckets, and then the tables of leases. */
static const char tables_sql[] =
#include "schema.sql.h"
#include "leases.sql.h"
    ;

/* ------------------------------------------------------------- methods */

/* Pushes the rows of a result as a list of lists of strings, false for NULL. */
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
  connection *self = hll_connection_check(L, &kind);
  size_t size;
  const char *sql = luaL_checklstring(L, 2, &size);
  hl_error error;
  MYSQL_RES *result;
  if (!self->session) return hll_fail(L, HL_ECONNECTION, "the connection is closed");
  self->session->patience = self->base.answer_ms ? hl__now_ms() + self->base.answer_ms : HL_FOREVER;
  if (hl__mysql_query(self->session, sql, size, &result, &error))
    return hll_connection_failed(L, &self->base, &error);
  if (result) {
    /* Raises for want of memory only: then the result is lost, and the command ends with it. */
    push_rows(L, result);
    mysql_free_result(result);
  } else {
    lua_pushinteger(L, (lua_Integer)mysql_affected_rows(self->session->mysql));
  }
  return 1;
}

/* Pushes whether the server logs statements: then the session is in REPEATABLE READ. */
static int connection_logs_statements(lua_State *L) {
  connection *self = hll_connection_check(L, &kind);
  lua_pushboolean(L, self->session && self->session->repeatable);
  return 1;
}

/* Pushes the name of the table from the DSN. */
static int connection_table(lua_State *L) {
  connection *self = hll_connection_check(L, &kind);
  lua_pushstring(L, self->store.space);
  return 1;
}

static const luaL_Reg methods[] = {
    {"query", connection_query},
    {"table", connection_table},
    {"logs_statements", connection_logs_statements},
    {NULL, NULL},
};

/* ------------------------------------------------------------- connect */

/* Sets the session up, as the server's administrator may have set other defaults. In READ COMMITTED
   an INSERT ... SELECT locks no row that it reads. A server that logs statements allows no INSERT
   in READ COMMITTED. MariaDB ends a recursion that is too deep without an error. */
static int set_up(hl__mysql_session *session, hl_error *error) {
  const char *statements[] = {
      session->repeatable ? "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ WRITE"
                          : "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE",
      "SET SESSION autocommit=1,completion_type=0,"
      "sql_select_limit=18446744073709551615,sql_big_selects=1",
      session->dialect == HL_MARIADB
          ? "SET SESSION max_statement_time=0,max_recursive_iterations=1000"
          : "SET SESSION max_execution_time=0,cte_max_recursion_depth=1000"};
  for (size_t i = 0; i < sizeof statements / sizeof *statements; i++) {
    MYSQL_RES *none;
    int status = hl__mysql_query(session, statements[i], strlen(statements[i]), &none, error);
    if (status) return status;
  }
  return HL_OK;
}

/* connect(dsn, application [, password [, any]]): the password takes the place of the DSN's
   password. With `any` it also connects to a server that it would refuse, for a caller that asks
   what is wrong with the server. */
static int connect_to(lua_State *L, hll_connection *base, hl_error *error) {
  connection *self = (connection *)base;
  const char *password = luaL_optstring(L, 3, NULL);
  if (password) base->dsn.password = password;
  self->store.config = &base->config;
  hl__mysql_library_init();
  int status = hl__mysql_params(&self->store, error);
  int64_t deadline = hl__now_ms() + self->store.connect_timeout;
  if (status == HL_OK) status = hl__mysql_connect(&self->store, deadline, &self->session, error);
  base->dsn.password = NULL; /* may be Lua's string */
  if (status == HL_OK) {
    self->session->patience = deadline;
    if (!lua_toboolean(L, 4)) status = hl__mysql_verify_server(self->session, error);
  }
  return status ? status : set_up(self->session, error);
}

static void disconnect(hll_connection *base) {
  connection *self = (connection *)base;
  hl__mysql_disconnect(self->session);
  self->session = NULL;
}

static const hll_connection_kind kind = {
    .name = "hierlock.connection",
    .size = sizeof(connection),
    .parse = hl__mysql_dsn,
    .connect = connect_to,
    .disconnect = disconnect,
    .methods = methods,
    .sql = tables_sql,
};

__attribute__((visibility("default"))) int luaopen_hierlock_store_mysql(lua_State *L);

int luaopen_hierlock_store_mysql(lua_State *L) {
  return hll_store_module(L, &hl_store_mysql, &kind);
}
