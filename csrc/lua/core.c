/*
 * core.c - the module hierlock.core: functions without a class. lua/hierlock/init.lua has the
 * functions that are plainer in Lua.
 */
/*** @module hierlock */
#include "hll.h"

#include "../stores/judge/judge.h"
#include "clock.h"
#include "dsn.h"
#include "error.h"
#include "hmac.h"
#include "machine.h"
#include "store.h"

#include <stdio.h>

#define DEFAULT_MANAGER "hierlock.default_manager"

/***
Returns the default manager, and opens it at first use. For hierlock's own Lua code.
@function core.default
@local
@tparam function open opens it
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
Raises misuse, at the position of the caller outside of hierlock. For hierlock's own
Lua code.
@function core.misuse
@local
@string message
@raise the message, always
*/
static int misuse(lua_State *L) { return hll_misuse(L, "%s", luaL_checkstring(L, 1)); }

/***
Returns a failure as a store would. For hierlock's own Lua code.
@function core.failure
@local
@string code
@string message becomes one line
@int[opt] errno the server's own
@string[opt] sqlstate the server's own
@tparam[opt] table target the node concerned
@return nil
@return err
*/
static int failure(lua_State *L) {
  hl_error error;
  lua_settop(L, 5);
  (void)hl__error(&error, hl__status_named(luaL_checkstring(L, 1)), "%s", luaL_checkstring(L, 2));
  error.server_errno = (unsigned)luaL_optinteger(L, 3, 0);
  (void)snprintf(error.sqlstate, sizeof error.sqlstate, "%s", luaL_optstring(L, 4, ""));
  return hll_failure(L, &error, lua_isnil(L, 5) ? 0 : 5);
}

/***
Returns the seconds of a clock that only goes on. For hierlock's own Lua code.
@function core.now
@local
@treturn number
*/
static int now(lua_State *L) {
  lua_pushnumber(L, (lua_Number)hl__now_ms() / 1000);
  return 1;
}

/***
Says whether a value is a manager, open or closed. For hierlock's own Lua code.
@function core.is_manager
@local
@param value anything
@treturn boolean
*/
static int is_manager(lua_State *L) {
  lua_pushboolean(L, hll_testudata(L, 1, HLL_MANAGER) != NULL);
  return 1;
}

/* Returns whether the running coroutine may yield here. Lua 5.1 does not say: there no C function
   may be in between, such as pcall, except core.loop itself. The function does not recognise a call
   by a metamethod, nor in 5.2 a call by a C function such as table.sort: there the loop's yield
   raises. */
static bool is_yieldable(lua_State *L) {
#if LUA_VERSION_NUM >= 503 || defined(LUA_LJDIR)
  return lua_isyieldable(L);
#elif LUA_VERSION_NUM == 501
  lua_Debug ar;
  for (int level = 1; lua_getstack(L, level, &ar); level++) {
    (void)lua_getinfo(L, "S", &ar);
    if (*ar.what == 'C') return false;
  }
  return true;
#else
  (void)L;
  return true;
#endif
}

/***
Says how the running coroutine waits for a call on a manager or a handle. For hierlock's own Lua
code.
@function core.loop
@local
@param object
@return the manager's option `loop`, a function, a table or true. Nil: the call is to block, as the
  running thread cannot yield here. The main thread never can
*/
static int loop(lua_State *L) {
  const hll_handle *handle = hll_handle_test(L, 1);
  const hll_manager *manager = handle ? handle->owner : hll_manager_test(L, 1);
  if (!manager) return 0;
  if (!manager->loops_anywhere && (lua_pushthread(L) || !is_yieldable(L))) return 0;
  hll_getuservalue(L, 1);
  lua_getfield(L, -1, "loop");
  return 1;
}

/***
Sets what `core.loop` returns. For hierlock's own Lua code.
@function core.set_loop
@local
@param manager
@param loop
@bool[opt] anywhere the loop needs no yield of Lua's
@return manager
*/
static int set_loop(lua_State *L) {
  hll_manager_check(L)->loops_anywhere = lua_toboolean(L, 3);
  hll_getuservalue(L, 1);
  lua_pushvalue(L, 2);
  lua_setfield(L, -2, "loop");
  lua_settop(L, 1);
  return 1;
}

/***
Says whether a value is a pending. For hierlock's own Lua code.
@function core.is_pending
@local
@param value
@treturn boolean
*/
static int is_pending(lua_State *L) {
  lua_pushboolean(L, hll_pending_test(L, 1) != NULL);
  return 1;
}

/* (address of an hl_dsn): the table that core.dsn returns. */
static int push_dsn(lua_State *L) {
  const hl_dsn *found = lua_touserdata(L, 1);
  const struct {
    const char *name, *value;
  } parts[] = {{"store", found->store},   {"user", found->user},         {"host", found->host},
               {"socket", found->socket}, {"database", found->database}, {"path", found->path}};
  lua_createtable(L, 0, 8);
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
    lua_pushstring(L, parts[i].value); /* nil for NULL */
    lua_setfield(L, -2, parts[i].name);
  }
  lua_pushinteger(L, (lua_Integer)found->port);
  lua_setfield(L, -2, "port");
  lua_pushboolean(L, found->password != NULL);
  lua_setfield(L, -2, "password");
  return 1;
}

/***
Returns the parts of a DSN. For hierlock's own Lua code.
@function core.dsn
@local
@string[opt] text
@treturn[1] table `store`, `user`, `host`, `port`, `socket`, `database`, `path`, and `password`, a
  boolean
@return[2] nil
@return[2] err `dsn`; `store` where its store cannot be loaded
*/
static int dsn(lua_State *L) {
  hl_error error;
  hl_dsn found = {0};
  lua_settop(L, 1);
  const char *text = hl_dsn_default(luaL_optstring(L, 1, NULL));
  const char *name = hl_dsn_store(text, &error);
  if (!name) return hll_failure(L, &error, 0);
  const hl_store_ops *store = hll_store_load(L, name);
  if (!store) return hll_fail(L, HL_ESTORE, lua_tostring(L, -1));
  lua_pushcfunction(L, push_dsn);
  lua_pushlightuserdata(L, &found);
  int status = hl_dsn_parse(text, store->parse, &found, &error);
  /* Protected, as the parsed DSN has to be freed. */
  int raised = status ? 0 : lua_pcall(L, 1, 1, 0);
  hl_dsn_dispose(&found);
  if (status) return hll_failure(L, &error, 0);
  return raised ? lua_error(L) : 1;
}

/***
Judges whether the locks of a server exclude. For hierlock's own Lua code.
@function core.judge
@local
@string store `mysql`, `postgresql`, `redis` or `memcached`
@tparam table facts what the server says of itself, by the names of judge.h: texts, and booleans
@treturn[1] boolean true
@return[2] nil
@return[2] err `unsafe_server`, `not_provisioned`, `store`
*/
static int judge(lua_State *L) {
  static const char *const stores[] = {"mysql", "postgresql", "redis", "memcached", NULL};
  static int (*const judges[])(const hl__fact *,
                               hl_error *) = {hl__mysql_server_judge, hl__pg_server_judge,
                                              hl__redis_server_judge, hl__memcached_server_judge};
  hl__fact facts[HL__FACTS_MAX + 1] = {{0}};
  hl_error error;
  int n = 0, store = luaL_checkoption(L, 1, NULL, stores);
  luaL_checktype(L, 2, LUA_TTABLE);
  lua_settop(L, 2);
  /* The table keeps the texts. */
  for (lua_pushnil(L); lua_next(L, 2); lua_pop(L, 1)) {
    luaL_argcheck(L, n < HL__FACTS_MAX && lua_type(L, 3) == LUA_TSTRING, 2, "must be facts");
    bool is_true = lua_isboolean(L, 4) && lua_toboolean(L, 4);
    facts[n++] = (hl__fact){lua_tostring(L, 3), is_true ? "1" : NULL};
    if (lua_type(L, 4) == LUA_TSTRING) facts[n - 1].value = lua_tostring(L, 4);
  }
  if (judges[store](facts, &error)) return hll_failure(L, &error, 0);
  lua_pushboolean(L, 1);
  return 1;
}

/***
Explains an error number of MySQL or MariaDB, in a program's own transaction. For hierlock's own
Lua code.
@function core.judge_mysql_error
@local
@int errno
@string[opt] message the server's own
@treturn string the code
@treturn string advice, for the end of the server's message
*/
static int judge_mysql_error(lua_State *L) {
  char hint[HL__MYSQL_HINT_MAX];
  int status = hl__mysql_error_judge((unsigned)luaL_checkinteger(L, 1), luaL_optstring(L, 2, ""),
                                     true, hint, sizeof hint);
  lua_pushstring(L, hl_status_name(status));
  lua_pushstring(L, hint);
  return 2;
}

/***
Says whether another machine may have the same file system. For hierlock's own Lua code.
@function core.remote_kind
@local
@number magic of statfs(2): `uv.fs_statfs(path).type`
@treturn[1] string its name: NFS, say
@treturn[2] nil only this machine has it
*/
static int remote_kind(lua_State *L) {
  const char *name = hl__remote_kind((unsigned long)luaL_checknumber(L, 1));
  if (name)
    lua_pushstring(L, name);
  else
    lua_pushnil(L);
  return 1;
}

/***
Says whether a file system is mounted at a path without symbolic links. For hierlock's own Lua code.
@function core.is_mount_point
@local
@string path
@treturn boolean
*/
static int is_mount_point(lua_State *L) {
  lua_pushboolean(L, hl__is_mount_point(luaL_checkstring(L, 1)) > 0);
  return 1;
}

/***
Returns the HMAC-SHA-256 of a text. For hierlock's own Lua code.
@function core.hmac
@local
@string key any bytes
@string text any bytes
@treturn string 64 hexadecimal digits
*/
static int hmac(lua_State *L) {
  size_t key_size, text_size;
  uint8_t mac[HL__HMAC_SIZE];
  char hex[2 * HL__HMAC_SIZE + 1];
  const char *key = luaL_checklstring(L, 1, &key_size);
  const char *text = luaL_checklstring(L, 2, &text_size);
  hl__hmac(key, key_size, text, text_size, mac);
  (void)hl__hex(hex, mac, sizeof mac);
  lua_pushstring(L, hex);
  return 1;
}

/***
Closes a pending, and its descriptor, without waiting for the collector. The caller must be the
pending's only owner. For hierlock's own Lua code.
@function core.close
@local
@param pending
@return nothing
*/

static const luaL_Reg functions[] = {
    {"open", hll_manager_open},
    {"plan", hll_plan_new},
    {"is_error", hll_is_error},
    {"default", default_manager},
    {"misuse", misuse},
    {"is_manager", is_manager},
    {"dsn", dsn},
    {"failure", failure},
    {"judge", judge},
    {"judge_mysql_error", judge_mysql_error},
    {"remote_kind", remote_kind},
    {"is_mount_point", is_mount_point},
    {"now", now},
    {"hmac", hmac},
    {"loop", loop},
    {"set_loop", set_loop},
    {"is_pending", is_pending},
    {"close", hll_pending_close},
    {NULL, NULL},
};

/* Adds to the table on the top the functions that start their calls. `awaits`: each for a coroutine
   that waits for its call. */
static void push_starting(lua_State *L, const luaL_Reg *calls, bool awaits) {
  for (; calls->name; calls++) {
    lua_pushnil(L);
    lua_pushboolean(L, 1);
    lua_pushboolean(L, awaits);
    lua_pushcclosure(L, calls->func, HLL_AWAITS);
    lua_setfield(L, -2, calls->name);
  }
}

/* The Lua version for which this is built. Another Lua may not be able to load the file. So
   init.lua also finds the version in the file, by these first characters. */
#define BUILT_FOR "hierlock.core is built for "
#ifdef LUA_LJDIR
#define HLL_LUA "LuaJIT"
#else
#define HLL_LUA LUA_VERSION
#endif

__attribute__((visibility("default"))) int luaopen_hierlock_core(lua_State *L);

int luaopen_hierlock_core(lua_State *L) {
  hll_error_register(L);
  hll_plan_register(L);
  hll_holders_register(L);
  hll_handle_register(L);
  hll_pending_register(L);
  hll_manager_register(L);

  lua_newtable(L);
  hll_setfuncs(L, functions);
  hll_request_register(L);
  hll_notifier_register(L);
  hll_any_register(L);
  hll_set_text(L, "version", HL_VERSION);
  hll_set_text(L, "mysql_variables", "SHOW GLOBAL VARIABLES WHERE " HL__MYSQL_VARIABLES);
  lua_pushinteger(L, HL__SQL_GATES);
  lua_setfield(L, -2, "mysql_gates");
  hll_set_text(L, "postgresql_multiple", HL__PG_MULTIPLE);
  hll_set_text(L, "postgresql_gate", HL__PG_GATE_VALUE("-1"));
  hll_set_text(L, "built", BUILT_FOR HLL_LUA);
  luaL_getmetatable(L, HLL_MANAGER);
  lua_getfield(L, -1, "__index");
  lua_setfield(L, -3, "manager_methods");
  lua_pop(L, 1);
  lua_newtable(L);
  push_starting(L, hll_acquire_methods, false);
  push_starting(L, hll_handle_calls, false);
  lua_setfield(L, -2, "start");
  lua_newtable(L);
  push_starting(L, hll_acquire_methods, true);
  push_starting(L, hll_handle_calls, true);
  lua_setfield(L, -2, "await");
  luaL_getmetatable(L, HLL_HANDLE);
  lua_getfield(L, -1, "methods");
  lua_setfield(L, -3, "handle_methods");
  lua_pop(L, 1);
  return 1;
}
