/*
 * module.h - the common part of the stores' Lua modules: hierlock.store.NAME is a userdata
 * with the address of the store's operations, which the core looks for. A store that the command
 * `hierlock` administers offers it a connection, too. The connection reaches the server as the
 * locks do (DSN, TLS, password), and then carries any statement or command. The connection takes no
 * locks, and no pool knows of it. Internal: programs have drivers of their own.
 */
#ifndef HIERLOCK_LUA_STORE_MODULE_H
#define HIERLOCK_LUA_STORE_MODULE_H

#include "dsn.h"
#include "hll.h"
#include "store.h"

/* A store's connection begins with this struct, all zero before `connect`. */
typedef struct hll_connection {
  const struct hll_connection_kind *kind;
  hl_dsn dsn;
  hl_store_config config;
  int64_t answer_ms; /* for each answer; 0, on MySQL: as long as it takes */
} hll_connection;

typedef struct hll_connection_kind {
  const char *name; /* of the metatable */
  size_t size;
  hl_dsn_fn parse;
  /* Connects; the arguments of connect() are at 1 to 4. Returns HL_OK or an error. */
  int (*connect)(lua_State *L, hll_connection *self, hl_error *error);
  /* Ends the session, if the connection has one. */
  void (*disconnect)(hll_connection *self);
  const luaL_Reg *methods; /* beside close and answers_within */
  const char *sql; /* makes the store's tables, for people and `hierlock provision`; or NULL */
} hll_connection_kind;

/* Returns the connection at index 1; raises for other values. */
void *hll_connection_check(lua_State *L, const hll_connection_kind *kind);
/* Pushes nil, err and returns 2. Ends a connection that is lost. */
int hll_connection_failed(lua_State *L, hll_connection *self, const hl_error *error);
/* Pushes the module. kind: NULL where the store needs no administration. */
int hll_store_module(lua_State *L, const hl_store_ops *ops, const hll_connection_kind *kind);

#endif
