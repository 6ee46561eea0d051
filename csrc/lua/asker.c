/*
 * asker.c - reads the options of acquisitions and of extend, and notes their asker: the program's
 * line, thread and coroutine.
 */
#include "hll.h"

#include <string.h>

/* ------------------------------------------------------------- options */

static bool acquire_option(lua_State *L, const char *name, void *context) {
  hll_acquire_options *options = context;
  if (strcmp(name, "timeout") == 0) {
    options->core.timeout = hll_milliseconds(L, -1, "timeout");
  } else if (strcmp(name, "mode") == 0) {
    options->mode = hll_mode(L, -1);
  } else if (strcmp(name, "label") == 0) {
    if (lua_type(L, -1) != LUA_TSTRING)
      hll_misuse(L, "label must be a string, not %s", luaL_typename(L, -1));
    options->core.label = lua_tolstring(L, -1, &options->core.label_size);
  } else {
    return hll_lease_option(L, name, &options->core);
  }
  return true;
}

void hll_acquire_options_read(lua_State *L, int index, hll_acquire_options *options) {
  *options = (hll_acquire_options){HL_OPTIONS_INIT, HL_EXCLUSIVE};
  hll_options(L, index, acquire_option, options);
}

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
    lua_pushliteral(L, "k");
    lua_setfield(L, -2, "__mode");
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

void hll_asker_find(lua_State *L, const hll_manager *self, hll_asker *asker) {
  asker->strand = strand_number(L, self);
  asker->where[0] = '\0';
  if (self->names_lines) hll_where(L, asker->where);
}

void hll_asker_add(lua_State *L, const hll_manager *self, const hll_asker *asker,
                   hl_options *options) {
  options->where = asker->where;
  options->agent = self->agent;
  options->task = asker->strand;
  if (!self->own_handles) return;
  options->strand = asker->strand;
  options->awaited = lua_toboolean(L, lua_upvalueindex(HLL_AWAITS));
}

void hll_acquire_options_again(lua_State *L, int index, hll_acquire_options *options) {
  hl_options before = options->core;
  hll_acquire_options_read(L, index, options);
  options->core.where = before.where;
  options->core.agent = before.agent;
  options->core.task = before.task;
  options->core.kinds = before.kinds;
  options->core.strand = before.strand;
  options->core.awaited = before.awaited;
}

bool hll_lease_option(lua_State *L, const char *name, hl_options *options) {
  if (strcmp(name, "ttl") == 0)
    options->ttl = hll_ttl(L, -1);
  else if (strcmp(name, "owner") == 0)
    options->owner = hll_text(L, "owner", HL_OWNER_MAX);
  else if (strcmp(name, "auto_refresh") == 0)
    options->auto_refresh = hll_boolean(L, name);
  else if (strcmp(name, "auto_release") == 0)
    options->auto_release = hll_boolean(L, name);
  else
    return false;
  return true;
}
