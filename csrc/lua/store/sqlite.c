/*
 * sqlite.c - the Lua module hierlock.store.sqlite.
 */
#include "module.h"

__attribute__((visibility("default"))) int luaopen_hierlock_store_sqlite(lua_State *L);

int luaopen_hierlock_store_sqlite(lua_State *L) {
  return hll_store_module(L, &hl_store_sqlite, NULL);
}
