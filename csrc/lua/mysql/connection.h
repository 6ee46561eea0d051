/*
 * connection.h - what module.c needs of connection.c.
 */
#ifndef HIERLOCK_LUA_MYSQL_CONNECTION_H
#define HIERLOCK_LUA_MYSQL_CONNECTION_H

struct lua_State;
/* Pushes a table with the function connect. */
void hll_connection_register(struct lua_State *L);

#endif
