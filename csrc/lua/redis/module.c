/*
 * module.c - the Lua module hierlock.store.redis: a userdata with the address of the
 * store's operations, for the core to find.
 */
#include "hll.h"
#include "store.h"

__attribute__((visibility("default"))) int
luaopen_hierlock_store_redis(lua_State *L);

int luaopen_hierlock_store_redis(lua_State *L) {
  /* The address, not the operations. */
  const hl_store_ops **ops =
      hll_newuserdata(L, sizeof(const hl_store_ops *)); // NOLINT
  *ops = &hl_store_redis;
  (void)luaL_newmetatable(L, HLL_STORE);
  lua_setmetatable(L, -2);
  return 1;
}
