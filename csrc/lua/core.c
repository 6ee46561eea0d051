/*
 * core.c - the module hierlock.core: functions without a class. What is better
 * said in Lua is in lua/hierlock/init.lua.
 */
/*** @module hierlock */
#include "hll.h"

#include "dsn.h"

#include <string.h>

#define DEFAULT_MANAGER "hierlock.default_manager"

/***
The default manager; for hierlock's own Lua code.
@function core.default
@local
@tparam function open opens it at first use
@treturn[1] manager
@return[2] nil
@return[2] err as from `hierlock.open`
*/
static int default_manager(lua_State *L) {
  lua_settop(L, 1);
  lua_getfield(L, LUA_REGISTRYINDEX, DEFAULT_MANAGER);
  hll_manager *manager = hll_testudata(L, -1, HLL_MANAGER);
  if (manager && manager->manager) return 1;
  lua_settop(L, 1);
  lua_call(L, 0, 2);
  if (lua_isnil(L, -2)) return 2;
  lua_pop(L, 1);
  lua_pushvalue(L, -1);
  lua_setfield(L, LUA_REGISTRYINDEX, DEFAULT_MANAGER);
  return 1;
}

/***
Raises misuse, at the position of the caller outside of hierlock; for hierlock's own
Lua code.
@function core.misuse
@local
@string message
@raise the message, always
*/
static int misuse(lua_State *L) {
  return hll_misuse(L, "%s", luaL_checkstring(L, 1));
}

/***
Whether a value is a manager, open or closed; for hierlock's own Lua code.
@function core.is_manager
@local
@param value anything
@treturn boolean
*/
static int is_manager(lua_State *L) {
  lua_pushboolean(L, hll_testudata(L, 1, HLL_MANAGER) != NULL);
  return 1;
}

/***
How the running coroutine waits for a call on a manager or a handle; for hierlock's
own Lua code.
@function core.loop
@local
@param object
@return the manager's option `loop`, a function, or true where it has none; nil where
  the call is to block, as in the main thread
*/
static int loop(lua_State *L) {
#if LUA_VERSION_NUM >= 503
  if (!lua_isyieldable(L)) return 0;
#elif LUA_VERSION_NUM == 501 && !defined(LUAJIT_VERSION)
  /* No yield passes a function in C there: not pcall, not manager:with. */
  lua_Debug ar;
  for (int level = 1; lua_getstack(L, level, &ar); level++)
    if (lua_getinfo(L, "S", &ar) && strcmp(ar.what, "C") == 0) return 0;
#endif
  if (lua_pushthread(L)) return 0;
  if (!hll_testudata(L, 1, HLL_MANAGER) && !hll_handle_test(L, 1)) return 0;
  hll_getuservalue(L, 1);
  lua_getfield(L, -1, "loop");
  return lua_isnil(L, -1) ? 0 : 1;
}

/***
Sets what `core.loop` returns; for hierlock's own Lua code.
@function core.set_loop
@local
@param manager
@param loop
@return manager
*/
static int set_loop(lua_State *L) {
  hll_getuservalue(L, 1);
  lua_pushvalue(L, 2);
  lua_setfield(L, -2, "loop");
  lua_settop(L, 1);
  return 1;
}

/***
For hierlock's own Lua code.
@function core.is_pending
@local
@param value
@treturn boolean
*/
static int is_pending(lua_State *L) {
  lua_pushboolean(L, hll_pending_test(L, 1) != NULL);
  return 1;
}

/***
What a DSN says; for hierlock's own Lua code.
@function core.dsn
@local
@string[opt] text
@treturn[1] table `store`, `user`, `host`, `port`, `socket`, `database`, `path`, and of
  the password only that there is one
@return[2] nil
@return[2] err `dsn`
*/
static int dsn(lua_State *L) {
  hl_error error;
  hl_dsn found = {0};
  int status =
      hl_dsn_parse(hl_dsn_default(luaL_optstring(L, 1, NULL)), &found, &error);
  if (status == HL_OK) {
    const struct {
      const char *name, *value;
    } parts[] = {{"store", found.store},   {"user", found.user},
                 {"host", found.host},     {"socket", found.socket},
                 {"database", found.database}, {"path", found.path}};
    lua_createtable(L, 0, 8);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
      lua_pushstring(L, parts[i].value); /* nil for NULL */
      lua_setfield(L, -2, parts[i].name);
    }
    lua_pushinteger(L, (lua_Integer)found.port);
    lua_setfield(L, -2, "port");
    lua_pushboolean(L, found.password != NULL);
    lua_setfield(L, -2, "password");
  }
  hl_dsn_dispose(&found);
  return status ? hll_failure(L, &error, 0) : 1;
}

static const luaL_Reg functions[] = {
    {"open", hll_manager_open}, {"plan", hll_plan_new},
    {"is_error", hll_is_error}, {"default", default_manager},
    {"misuse", misuse},         {"is_manager", is_manager},
    {"dsn", dsn},
    {"loop", loop},
    {"set_loop", set_loop},
    {"is_pending", is_pending},
    {NULL, NULL},
};

/* Adds to the table on the top the functions as they start their call. */
static void push_starting(lua_State *L, const luaL_Reg *calls) {
  for (; calls->name; calls++) {
    lua_pushnil(L);
    lua_pushboolean(L, 1);
    lua_pushcclosure(L, calls->func, HLL_STARTS);
    lua_setfield(L, -2, calls->name);
  }
}

__attribute__((visibility("default"))) int
luaopen_hierlock_core(lua_State *L);

int luaopen_hierlock_core(lua_State *L) {
  hll_error_register(L);
  hll_plan_register(L);
  hll_holders_register(L);
  hll_handle_register(L);
  hll_pending_register(L);
  hll_manager_register(L);

  lua_newtable(L);
  hll_setfuncs(L, functions);
  lua_pushliteral(L, HL_VERSION);
  lua_setfield(L, -2, "version");
  luaL_getmetatable(L, HLL_MANAGER);
  lua_getfield(L, -1, "__index");
  lua_setfield(L, -3, "manager_methods");
  lua_pop(L, 1);
  lua_newtable(L);
  push_starting(L, hll_acquire_methods);
  push_starting(L, hll_handle_calls);
  lua_setfield(L, -2, "start");
  luaL_getmetatable(L, HLL_HANDLE);
  lua_getfield(L, -1, "methods");
  lua_setfield(L, -3, "handle_methods");
  lua_pop(L, 1);
  return 1;
}
