/*
 * lua.c - the Lua module hierlock.store.folder: the address of the store's operations. A program in
 * C needs none of it, as it names the store in hl_config.stores.
 */
#include <hierlock/store.h>
#include <lauxlib.h>

extern const hl_store_ops hl_store_folder;
__attribute__((visibility("default"))) int luaopen_hierlock_store_folder(lua_State *L);

int luaopen_hierlock_store_folder(lua_State *L) {
  lua_pushlightuserdata(L, (void *)&hl_store_folder);
  return 1;
}
