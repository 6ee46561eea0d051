/*
 * module.c - see module.h.
 */
#include "module.h"

#include <string.h>
#include <unistd.h>

void *hll_connection_check(lua_State *L, const hll_connection_kind *kind) {
  void *self = hll_testudata(L, 1, kind->name);
  if (!self) hll_misuse(L, "self must be a connection");
  return self;
}

int hll_connection_failed(lua_State *L, hll_connection *self, const hl_error *error) {
  if (error->status == HL_ECONNECTION) self->kind->disconnect(self);
  return hll_failure(L, error, 0);
}

static const hll_connection_kind *kind_of(lua_State *L) {
  return lua_touserdata(L, lua_upvalueindex(1));
}

/* answers_within(seconds): a later query that takes longer fails, and ends the connection. */
static int connection_answers_within(lua_State *L) {
  hll_connection *self = hll_connection_check(L, kind_of(L));
  lua_Number seconds = luaL_checknumber(L, 2);
  luaL_argcheck(L, seconds >= 0.001 && seconds < 1e6, 2, "must be seconds");
  self->answer_ms = (int64_t)(seconds * 1000);
  return 0;
}

/* close(). The garbage collector calls it, too. */
static int connection_close(lua_State *L) {
  hll_connection *self = hll_connection_check(L, kind_of(L));
  self->kind->disconnect(self);
  hl_dsn_dispose(&self->dsn);
  return 0;
}

/* connect(dsn, application, ...): a connection | nil, err. */
static int connect_new(lua_State *L) {
  const hll_connection_kind *kind = kind_of(L);
  const char *text = luaL_checkstring(L, 1);
  const char *application = luaL_checkstring(L, 2);
  lua_settop(L, 4);
  hll_connection *self = hll_newuserdata(L, kind->name, kind->size);
  self->kind = kind;

  hl_error error;
  int status = hl_dsn_parse(text, kind->parse, &self->dsn, &error);
  if (status) return hll_failure(L, &error, 0);
  self->config = (hl_store_config){.dsn = &self->dsn,
                                   .timeout = 50000,
                                   .hold_timeout = 30000,
                                   .application = application,
                                   .host = "",
                                   .pid = getpid()};
  return kind->connect(L, self, &error) ? hll_failure(L, &error, 0) : 1;
}

static void function_set(lua_State *L, const char *name, lua_CFunction function,
                         const hll_connection_kind *kind) {
  lua_pushlightuserdata(L, (void *)kind);
  lua_pushcclosure(L, function, 1);
  lua_setfield(L, -2, name);
}

static void class_register(lua_State *L, const hll_connection_kind *kind) {
  hll_error_register(L);
  if (luaL_newmetatable(L, kind->name)) {
    function_set(L, "__gc", connection_close, kind);
    lua_newtable(L);
    hll_setfuncs(L, kind->methods);
    function_set(L, "answers_within", connection_answers_within, kind);
    function_set(L, "close", connection_close, kind);
    lua_setfield(L, -2, "__index");
  }
  lua_pop(L, 1);
}

typedef struct module {
  const hl_store_ops *ops; /* first: the core reads no more of it */
  const hll_connection_kind *kind;
} module;

/* The stores share a metatable. The first store that is loaded makes it. */
static int module_index(lua_State *L) {
  const module *self = hll_testmetatable(L, 1, HLL_STORE);
  const char *name = lua_tostring(L, 2);
  if (!self || !self->kind || !name) return 0;
  if (strcmp(name, "sql") == 0) return lua_pushstring(L, self->kind->sql), 1;
  if (strcmp(name, "connect") != 0) return 0;
  lua_pushlightuserdata(L, (void *)self->kind);
  lua_pushcclosure(L, connect_new, 1);
  return 1;
}

int hll_store_module(lua_State *L, const hl_store_ops *ops, const hll_connection_kind *kind) {
  module *self = hll_newuserdata(L, HLL_STORE, sizeof *self);
  *self = (module){.ops = ops, .kind = kind};
  if (luaL_newmetatable(L, HLL_STORE)) {
    lua_pushcfunction(L, module_index);
    lua_setfield(L, -2, "__index");
  }
  lua_setmetatable(L, -2);
  if (kind) class_register(L, kind);
  return 1;
}
