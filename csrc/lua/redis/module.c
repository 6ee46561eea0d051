/*
 * module.c - the Lua module hierlock.store.redis: a userdata with the address of the
 * store's operations, for the core to find; indexed, it offers a connection for
 * administration.
 */
#include "connection.h"
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
  hll_redis_connection_register(L);
  lua_setfield(L, -2, "__index");
  lua_setmetatable(L, -2);
  return 1;
}
