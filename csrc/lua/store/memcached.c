/*
 * memcached.c - the Lua module hierlock.store.memcached.
 */
#include "module.h"

__attribute__((visibility("default"))) int luaopen_hierlock_store_memcached(lua_State *L);

int luaopen_hierlock_store_memcached(lua_State *L) {
  return hll_store_module(L, &hl_store_memcached, NULL);
}
