/*
 * asker.c - reads the options of a call, and notes its asker: the program's line, thread and
 * coroutine.
 */
#include "hll.h"

#include <string.h>

/* ---------------------------------------------------------- who asks */

#define STRANDS "hierlock.strands"

/* The registry has a table: coroutine -> number, and the last number. Addresses would not do: Lua
   may give a coroutine's address to a later one. */
static uint64_t strand_number(lua_State *L, const hll_manager *self) {
  if (!self->own_handles && !self->check_order && !self->check_units) return 0;
  lua_getfield(L, LUA_REGISTRYINDEX, STRANDS);
  if (!lua_istable(L, -1)) {
    lua_pop(L, 1);
    lua_newtable(L);
    lua_createtable(L, 0, 1);
    hll_set_text(L, "__mode", "k");
    lua_setmetatable(L, -2);
    lua_pushvalue(L, -1);
    lua_setfield(L, LUA_REGISTRYINDEX, STRANDS);
  }
  (void)lua_pushthread(L);
  lua_rawget(L, -2);
  if (!lua_isnumber(L, -1)) {
    lua_pop(L, 1);
    lua_rawgeti(L, -1, 1);
    lua_pushnumber(L, lua_tonumber(L, -1) + 1);
    lua_pushvalue(L, -1);
    lua_rawseti(L, -4, 1);
    (void)lua_pushthread(L);
    lua_pushvalue(L, -2);
    lua_rawset(L, -5);
    lua_remove(L, -2);
  }
  uint64_t strand = (uint64_t)lua_tonumber(L, -1);
  lua_pop(L, 2);
  return strand;
}

void hll_call_options_begin(lua_State *L, const hll_manager *self, unsigned takes,
                            hll_call_options *options) {
  options->takes = takes;
  options->core.kinds = 0;
  options->strand = strand_number(L, self);
  options->where[0] = '\0';
  if (self->names_lines) hll_where(L, options->where);
}

/* ------------------------------------------------------------- options */

static bool call_option(lua_State *L, const char *name, void *context) {
  hll_call_options *self = context;
  hl_options *core = &self->core;
  if (self->takes & HLL_TIMEOUT && strcmp(name, "timeout") == 0) {
    core->timeout = hll_milliseconds(L, -1, name);
  } else if (self->takes & HLL_MODE && strcmp(name, "mode") == 0) {
    self->mode = hll_mode(L, -1);
  } else if (self->takes & HLL_LABEL && strcmp(name, "label") == 0) {
    if (lua_type(L, -1) != LUA_TSTRING)
      hll_misuse(L, "label must be a string, not %s", luaL_typename(L, -1));
    core->label = lua_tolstring(L, -1, &core->label_size);
  } else if (self->takes & HLL_OWNER && strcmp(name, "owner") == 0) {
    core->owner = hll_text(L, name, HL_OWNER_MAX);
  } else if (self->takes & HLL_TTL && strcmp(name, "ttl") == 0) {
    core->ttl = hll_ttl(L, -1);
  } else if (self->takes & HLL_TTL && strcmp(name, "auto_refresh") == 0) {
    core->auto_refresh = hll_boolean(L, name);
  } else if (self->takes & HLL_TTL && strcmp(name, "auto_release") == 0) {
    core->auto_release = hll_boolean(L, name);
  } else {
    return false;
  }
  return true;
}

void hll_call_options_read(lua_State *L, int index, const hll_manager *self,
                           hll_call_options *options) {
  hl_options *core = &options->core;
  uint64_t kinds = core->kinds;
  *core = (hl_options)HL_OPTIONS_INIT;
  options->mode = HL_EXCLUSIVE;
  hll_options(L, index, call_option, options);
  core->where = options->where;
  core->agent = self->agent; /* NULL once the manager is closed */
  core->task = options->strand;
  core->kinds = kinds;
  if (!self->own_handles) return;
  core->strand = options->strand;
  core->awaited = lua_toboolean(L, lua_upvalueindex(HLL_AWAITS));
}
