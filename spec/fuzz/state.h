/*
 * state.h - for fuzzers that come to the library through Lua: a Lua state in which a file is
 * called with the input. An error that the file raises is a finding.
 */
#ifndef FUZZ_STATE_H
#define FUZZ_STATE_H

#include "fuzz.h"

#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>
#include <unistd.h>

int luaopen_hierlock_core(lua_State *L);

static inline int traceback(lua_State *L) {
  luaL_traceback(L, L, luaL_tolstring(L, 1, NULL), 1);
  return 1;
}

/* Lines of our own Lua count as code reached. */
__attribute__((section("__libfuzzer_extra_counters"))) static uint8_t lines[4096];

static inline void line_reached(lua_State *L, lua_Debug *ar) {
  (void)lua_getinfo(L, "Sl", ar);
  if (strncmp(ar->source, "@lua/hierlock", 13) != 0) return;
  size_t hash = (size_t)ar->currentline;
  for (const char *c = ar->source; *c; c++) hash = hash * 31 + (uint8_t)*c;
  lines[hash % sizeof lines]++;
}

static inline lua_State *state_new(void) {
  lua_State *L = luaL_newstate();
  CLAIM(L);
  luaL_openlibs(L);
  CLAIM(luaL_dostring(L, "package.path = 'lua/?.lua;lua/?/init.lua;' .. "
                         "package.path") == 0);
  (void)luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_PRELOAD_TABLE);
  lua_pushcfunction(L, luaopen_hierlock_core);
  lua_setfield(L, -2, "hierlock.core");
  lua_settop(L, 0);
  lua_pushcfunction(L, traceback);
  lua_sethook(L, line_reached, LUA_MASKLINE, 0);
  return L;
}

/* Calls the file with the input and the directory. */
static inline void state_call(lua_State *L, const char *file, const char *directory,
                              const uint8_t *data, size_t size) {
  lua_settop(L, 1);
  int failed = luaL_loadfile(L, file);
  lua_pushlstring(L, (const char *)data, size);
  lua_pushstring(L, directory);
  if (!failed && lua_pcall(L, 2, 0, 1) == LUA_OK) return;
  fprintf(stderr, "%s\n", lua_tostring(L, failed ? 2 : -1));
  abort();
}

#endif
