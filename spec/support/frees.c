/*
 * frees.c - for the specs of a fork: counts what the library's own code frees, where this is preloaded.
 */
#include <dlfcn.h>
#include <lauxlib.h>
#include <lua.h>
#include <stdbool.h>
#include <string.h>

void __libc_free(void *block); /* glibc's */
void free(void *block);

static bool counts;
static long frees;

void free(void *block) {
  Dl_info caller;
  if (counts && block && dladdr(__builtin_return_address(0), &caller) &&
      strstr(caller.dli_fname, "/hierlock/"))
    frees++;
  __libc_free(block);
}

static int l_begin(lua_State *L) {
  (void)L;
  counts = true;
  return 0;
}

/* count(): so many since begin(). */
static int l_count(lua_State *L) {
  lua_pushinteger(L, (lua_Integer)frees);
  return 1;
}

int luaopen_hierlock_spec_frees(lua_State *L);

int luaopen_hierlock_spec_frees(lua_State *L) {
  lua_newtable(L);
  lua_pushcfunction(L, l_begin);
  lua_setfield(L, -2, "begin");
  lua_pushcfunction(L, l_count);
  lua_setfield(L, -2, "count");
  return 1;
}
