/*
 * compat.h - one source for Lua 5.1 to 5.5 and LuaJIT. The functions that older versions
 * lack are here, under the prefix hll_. A userdata has exactly one uservalue, always a
 * table (in 5.1 it is the environment, which can be nothing else).
 */
#ifndef HIERLOCK_LUA_COMPAT_H
#define HIERLOCK_LUA_COMPAT_H

#include <lauxlib.h>
#include <lua.h>
#include <string.h>

/* Stands in front of each userdata, and notes its address. luv hands a userdata to another thread's
   Lua state as a copy of its bytes, with that state's metatable. The copy would be a second owner.
   The binding recognises the copy by its address, and rejects it. */
typedef struct hll_header {
  const void *self;
  const char *class; /* its name: the metatable's key in the registry */
} hll_header;
_Static_assert(sizeof(hll_header) % 8 == 0, "what follows is aligned as Lua aligns");

/* Like luaL_setfuncs with no upvalues, into the table on the top. */
static inline void hll_setfuncs(lua_State *L, const luaL_Reg *functions) {
  for (; functions->name; functions++) {
    lua_pushcfunction(L, functions->func);
    lua_setfield(L, -2, functions->name);
  }
}

/* Makes the class, and pushes its metatable and the table of its methods, which is its __index. */
static inline void hll_class_new(lua_State *L, const char *class, const luaL_Reg *metamethods,
                                 const luaL_Reg *methods) {
  (void)luaL_newmetatable(L, class);
  hll_setfuncs(L, metamethods);
  lua_pushstring(L, class);
  lua_setfield(L, -2, "__name");
  lua_newtable(L);
  hll_setfuncs(L, methods);
  lua_pushvalue(L, -1);
  lua_setfield(L, -3, "__index");
}

/* Pushes a userdata of the class, without its metatable, and returns its memory, all zero. */
static inline void *hll_bareuserdata(lua_State *L, const char *class, size_t size) {
#if LUA_VERSION_NUM >= 504
  hll_header *header = lua_newuserdatauv(L, sizeof *header + size, 1);
#else
  hll_header *header = lua_newuserdata(L, sizeof *header + size);
#endif
  memset(header, 0, sizeof *header + size);
  *header = (hll_header){header, class};
  return header + 1;
}

/* Pushes a userdata of the class, and returns its memory, all zero. */
static inline void *hll_newuserdata(lua_State *L, const char *class, size_t size) {
  void *memory = hll_bareuserdata(L, class, size);
  luaL_getmetatable(L, class);
  lua_setmetatable(L, -2);
  return memory;
}

static inline void hll_getuservalue(lua_State *L, int index) {
#if LUA_VERSION_NUM >= 504
  (void)lua_getiuservalue(L, index, 1);
#elif LUA_VERSION_NUM >= 502
  (void)lua_getuservalue(L, index);
#else
  lua_getfenv(L, index);
#endif
}

static inline void hll_setuservalue(lua_State *L, int index) {
#if LUA_VERSION_NUM >= 504
  (void)lua_setiuservalue(L, index, 1);
#elif LUA_VERSION_NUM >= 502
  lua_setuservalue(L, index);
#else
  (void)lua_setfenv(L, index);
#endif
}

static inline int hll_absindex(lua_State *L, int index) {
  return index > 0 || index <= LUA_REGISTRYINDEX ? index : lua_gettop(L) + index + 1;
}

static inline size_t hll_rawlen(lua_State *L, int index) {
#if LUA_VERSION_NUM >= 502
  return (size_t)lua_rawlen(L, index);
#else
  return lua_objlen(L, index);
#endif
}

/* Returns the memory of the userdata, and NULL for any value that hll_newuserdata has not made for
   this very class. `class` has the same address then: so the metatable need not be asked. */
static inline void *hll_testudata(lua_State *L, int index, const char *class) {
  hll_header *header = lua_touserdata(L, index);
  if (!header || hll_rawlen(L, index) < sizeof *header) return NULL; /* light: its length is 0 */
  return header->self == header && header->class == class ? header + 1 : NULL;
}

/* Returns the memory of a userdata that another module may have made, by its metatable. */
static inline void *hll_testmetatable(lua_State *L, int index, const char *class) {
  hll_header *header = lua_touserdata(L, index);
  if (!header || !lua_getmetatable(L, index)) return NULL;
  luaL_getmetatable(L, class);
  int same = lua_rawequal(L, -1, -2);
  lua_pop(L, 2);
  return same ? header + 1 : NULL;
}

/* Returns a name for the value, for an error: a userdata of the class was wanted. */
static inline const char *hll_typename(lua_State *L, int index, const char *class) {
  return hll_testmetatable(L, index, class) ? "one of another Lua state" : luaL_typename(L, index);
}

/* Returns whether the value is a number without a fraction, for an id. Where Lua tells integers
   from floats, it rejects floats. Where Lua does not, 2^53 is the last whole number that is
   sure to be itself. */
static inline int hll_tointeger(lua_State *L, int index, long long *integer) {
#if LUA_VERSION_NUM >= 503
  if (!lua_isinteger(L, index)) return 0;
  *integer = (long long)lua_tointeger(L, index);
  return 1;
#else
  lua_Number number = lua_tonumber(L, index);
  if (!(number >= -9007199254740992.0 && number <= 9007199254740992.0)) return 0;
  *integer = (long long)number;
  return (lua_Number)*integer == number;
#endif
}

/* Tells the collector of memory that it does not see, in KiB. Lua 5.4 and later call only a few
   finalizers in each step, and fall behind a program that makes nothing but handles: the heap
   grew by half every 500,000 handles. Other versions keep up. The function does not start a
   collector that the program has stopped. */
static inline void hll_gc_account(lua_State *L, int kib) {
#if LUA_VERSION_NUM >= 504
#if LUA_VERSION_NUM >= 505
  size_t step = (size_t)kib * 1024;
#else
  int step = kib;
#endif
  if (lua_gc(L, LUA_GCISRUNNING)) (void)lua_gc(L, LUA_GCSTEP, step);
#else
  (void)L;
  (void)kib;
#endif
}

#endif
