/*
 * connection.h - what module.c needs of connection.c.
 */
#ifndef HIERLOCK_LUA_REDIS_CONNECTION_H
#define HIERLOCK_LUA_REDIS_CONNECTION_H

struct lua_State;
/* Pushes a table with the function connect. */
void hll_redis_connection_register(struct lua_State *L);

#endif
