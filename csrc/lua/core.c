/*
 * core.c - the module hierlock.core: functions without a class, and the
 * methods of a manager as functions on a default manager. What is better said in
 * Lua is in lua/hierlock/init.lua.
 */
/*** @module hierlock */
#include "hll.h"

#include "dsn.h"

#define DEFAULT_MANAGER "hierlock.default_manager"

/* Leaves the default manager, opened at first use, on the stack; or nil, err and
   returns false. */
static int push_default(lua_State *L) {
  lua_getfield(L, LUA_REGISTRYINDEX, DEFAULT_MANAGER);
  hll_manager *manager = hll_testudata(L, -1, HLL_MANAGER);
  if (manager && manager->manager) return 1;
  lua_pop(L, 1);
  lua_pushcfunction(L, hll_manager_open);
  lua_call(L, 0, 2);
  if (lua_isnil(L, -2)) return 0;
  lua_pop(L, 1);
  lua_pushvalue(L, -1);
  lua_setfield(L, LUA_REGISTRYINDEX, DEFAULT_MANAGER);
  return 1;
}

/***
As `manager:acquire`, on the default manager: one for each Lua state, opened at first
use as `hierlock.open()` does, and again once it was closed. So it may also
fail with what `hierlock.open` says.
@function hierlock.acquire
@tparam table target
@tparam[opt] table options as for `manager:acquire`
@treturn[1] handle
@return[2] nil
@return[2] err as from `manager:acquire` and `hierlock.open`
*/

/***
As `manager:acquire_user`, on the default manager.
@function hierlock.acquire_user
@tparam string|integer user
@tparam[opt] table options as for `manager:acquire`
@treturn[1] handle
@return[2] nil
@return[2] err as from `hierlock.acquire`
*/

/***
As `manager:acquire_account`, on the default manager.
@function hierlock.acquire_account
@tparam string|integer user
@tparam string|integer account
@tparam[opt] table options as for `manager:acquire`
@treturn[1] handle
@return[2] nil
@return[2] err as from `hierlock.acquire`
*/

/***
As `manager:acquire_resource`, on the default manager.
@function hierlock.acquire_resource
@tparam string|integer user
@tparam string|integer account
@tparam string|integer resource
@tparam[opt] table options as for `manager:acquire`
@treturn[1] handle
@return[2] nil
@return[2] err as from `hierlock.acquire`
*/

/***
As `manager:acquire_resources`, on the default manager.
@function hierlock.acquire_resources
@tparam string|integer user
@tparam string|integer account
@tparam {string|integer,...} resources
@tparam[opt] table options as for `manager:acquire`
@treturn[1] handle
@return[2] nil
@return[2] err as from `hierlock.acquire`
*/

/***
As `manager:acquire_all`, on the default manager.
@function hierlock.acquire_all
@tparam {table,...} targets
@tparam[opt] table options as for `manager:acquire`
@treturn[1] handle
@return[2] nil
@return[2] err as from `hierlock.acquire`
*/

/***
As `manager:holders`, on the default manager.
@function hierlock.holders
@tparam table target
@treturn[1] {table,...} as from `manager:holders`
@return[2] nil
@return[2] err as from `manager:holders` and `hierlock.open`
*/

/* hierlock.acquire(...) is default:acquire(...); upvalue 1 is the method. It
   runs in this very frame, so that misuse is reported where the caller is. */
static int default_method(lua_State *L) {
  if (!push_default(L)) return 2;
  lua_insert(L, 1);
  return lua_tocfunction(L, lua_upvalueindex(1))(L);
}

/***
The default manager, opened at first use; for hierlock's own Lua code.
@function core.default
@local
@treturn[1] manager
@return[2] nil
@return[2] err as from `hierlock.open`
*/
static int default_manager(lua_State *L) { return push_default(L) ? 1 : 2; }

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

/* What a DSN says, for Lua code of ours: dsn([text]) is a table with store, user,
   host, port, socket, database, path, and of the password only that there is
   one; nil, err. */
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
    {NULL, NULL},
};

__attribute__((visibility("default"))) int
luaopen_hierlock_core(lua_State *L);

int luaopen_hierlock_core(lua_State *L) {
  hll_error_register(L);
  hll_plan_register(L);
  hll_holders_register(L);
  hll_handle_register(L);
  hll_manager_register(L);

  lua_newtable(L);
  hll_setfuncs(L, functions);
  lua_pushliteral(L, HL_VERSION);
  lua_setfield(L, -2, "version");
  luaL_getmetatable(L, HLL_MANAGER);
  lua_getfield(L, -1, "__index");
  lua_setfield(L, -3, "manager_methods");
  lua_pop(L, 1);
  for (const luaL_Reg *f = hll_acquire_methods; f->name; f++) {
    lua_pushcfunction(L, f->func);
    lua_pushcclosure(L, default_method, 1);
    lua_setfield(L, -2, f->name);
  }
  lua_pushcfunction(L, hll_holders);
  lua_pushcclosure(L, default_method, 1);
  lua_setfield(L, -2, "holders");
  return 1;
}
