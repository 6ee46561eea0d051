/*
 * connection.h - see connection.c.
 */
#ifndef HIERLOCK_LUA_POSTGRESQL_CONNECTION_H
#define HIERLOCK_LUA_POSTGRESQL_CONNECTION_H

#include <lua.h>

/* Pushes a table of functions: connect. */
void hll_pg_connection_register(lua_State *L);

#endif
