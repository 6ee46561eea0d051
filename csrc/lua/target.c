/*
 * target.c - targets as Lua writes them, turned into a plan:
 *
 *     {user="u1", account="a1", resource="r1"}     the deepest key is the level
 *     {user="u1", account="a1", resources={"r1", "r2"}}
 *     {"u1", "a1", "r1"}
 *
 * Each may have a `mode`. Tables are read raw: no code of the caller's runs in between.
 */
/*** @module hierlock */
#include "hll.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

hl_id hll_id(lua_State *L, int index, const char *level, char room[24]) {
  long long integer;
  hl_id id = {NULL, 0};
  switch (lua_type(L, index)) {
  case LUA_TSTRING: id.data = lua_tolstring(L, index, &id.size); break;
  case LUA_TNUMBER:
    if (hll_tointeger(L, index, &integer)) {
      id.size = (size_t)snprintf(room, 24, "%lld", integer);
      id.data = room;
      break;
    }
    hll_misuse(L, "%s must be a string or an integer, not a float", level);
    break;
  case LUA_TNIL:
  case LUA_TNONE: hll_misuse(L, "%s is missing", level); break;
  default:
    hll_misuse(L, "%s must be a string or an integer, not %s", level, luaL_typename(L, index));
  }
  if (id.size == 0) hll_misuse(L, "%s must not be empty", level);
  if (id.size > HL_ID_MAX)
    hll_misuse(L, "%s has %d bytes; an id has at most %d", level, (int)id.size, HL_ID_MAX);
  return id;
}

/* The fields of a target that have been read so far. */
typedef struct reading {
  hl_plan *plan;
  hl_layout *layout;
  hl_id ids[HL_LEVELS_MAX]; /* and what they point to: of the levels that are given alone */
  char rooms[HL_LEVELS_MAX][24];
  unsigned given; /* bit i: level i */
  unsigned positions;
  unsigned named;
  int list; /* stack index of the deepest level's list; nil: none */
  hl_mode mode;
  bool mode_given;
} reading;

/* Returns whether name is the deepest level's name with an "s": "resources". */
static int names_list(const hl_layout *layout, const char *name) {
  const char *deepest = hl_layout_name(layout, hl_layout_levels(layout) - 1);
  size_t n = strlen(deepest);
  return strncmp(name, deepest, n) == 0 && strcmp(name + n, "s") == 0;
}

/* Reads a field: its key at -2, its value at -1. */
static void read_field(lua_State *L, reading *r) {
  unsigned levels = hl_layout_levels(r->layout);
  long long position = 0;
  if (lua_type(L, -2) == LUA_TNUMBER) {
    if (!hll_tointeger(L, -2, &position) || position < 1 || position > (long long)levels)
      hll_misuse(L, "target has a position that is none of 1 to %d", (int)levels);
    unsigned level = (unsigned)position - 1;
    r->ids[level] = hll_id(L, -1, hl_layout_name(r->layout, level), r->rooms[level]);
    r->given |= 1u << level;
    r->positions++;
    return;
  }
  if (lua_type(L, -2) != LUA_TSTRING)
    hll_misuse(L, "target has a key of type %s", luaL_typename(L, -2));
  const char *name = hll_word(L, -2);
  if (!name) hll_misuse(L, "unknown key '%s' in target", lua_tostring(L, -2));
  for (unsigned level = 0; level < levels; level++)
    if (strcmp(name, hl_layout_name(r->layout, level)) == 0) {
      r->ids[level] = hll_id(L, -1, name, r->rooms[level]);
      r->given |= 1u << level;
      r->named++;
      return;
    }
  if (strcmp(name, "mode") == 0) {
    r->mode = hll_mode(L, -1);
    r->mode_given = true;
  } else if (names_list(r->layout, name)) {
    if (!lua_istable(L, -1)) hll_misuse(L, "%s must be a list, not %s", name, luaL_typename(L, -1));
    if (hll_rawlen(L, -1) == 0) hll_misuse(L, "%s must not be empty", name);
    lua_pushvalue(L, -1);
    lua_replace(L, r->list);
    r->named++;
  } else {
    hll_misuse(L, "unknown key '%s' in target", name);
  }
}

static void add(lua_State *L, const reading *r, unsigned n) {
  hl_error error;
  if (hl_plan_add(r->plan, r->ids, n, r->mode, r->mode_given, &error))
    (void)hll_failure(L, &error, 0);
}

/* Adds each id of the list at index, below the ancestors that have been read. */
static void add_list(lua_State *L, int index, reading *r) {
  unsigned level = hl_layout_levels(r->layout) - 1;
  size_t n = hll_rawlen(L, index);
  size_t fields = 0;
  for (size_t i = 1; i <= n; i++) {
    lua_rawgeti(L, index, (int)i);
    r->ids[level] = hll_id(L, -1, hl_layout_name(r->layout, level), r->rooms[level]);
    add(L, r, level + 1);
    lua_pop(L, 1);
  }
  for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) fields++;
  if (fields != n)
    hll_misuse(L, "the list of %ss has other keys than 1 to %d", hl_layout_name(r->layout, level),
               (int)n);
}

void hll_target_add(lua_State *L, int index, hl_plan *plan, hl_mode mode) {
  index = hll_absindex(L, index);
  if (!lua_istable(L, index))
    hll_misuse(L, "target must be a table, not %s", luaL_typename(L, index));
  reading r; /* most of it is left as it is: each acquisition comes here */
  r.plan = plan;
  r.layout = hl_plan_layout(plan);
  r.given = r.positions = r.named = 0;
  r.mode = mode;
  r.mode_given = false;
  luaL_checkstack(L, 8, "target");
  lua_pushnil(L);
  r.list = lua_gettop(L);

  for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) read_field(L, &r);

  if (r.positions && r.named) hll_misuse(L, "target mixes positions and names");
  unsigned levels = hl_layout_levels(r.layout);
  unsigned n = 0;
  assert(levels > 0);
  while (n < levels && (r.given >> n & 1u)) n++;
  if (!lua_isnil(L, r.list)) {
    if (r.given >> (levels - 1) & 1u)
      hll_misuse(L, "target has both %s and %ss", hl_layout_name(r.layout, levels - 1),
                 hl_layout_name(r.layout, levels - 1));
    if (n < levels - 1) hll_misuse(L, "%s is missing in target", hl_layout_name(r.layout, n));
    add_list(L, r.list, &r);
    lua_pop(L, 1);
    return;
  }
  lua_pop(L, 1);
  if (n < levels && r.given >> n)
    hll_misuse(L, "%s is missing in target", hl_layout_name(r.layout, n));
  if (n == 0) hll_misuse(L, "target is empty: it needs %s", hl_layout_name(r.layout, 0));
  add(L, &r, n);
}

void hll_targets_add(lua_State *L, int index, hl_plan *plan, hl_mode mode) {
  index = hll_absindex(L, index);
  if (!lua_istable(L, index))
    hll_misuse(L, "targets must be a list of targets, not %s", luaL_typename(L, index));
  size_t n = hll_rawlen(L, index), fields = 0;
  if (n == 0) hll_misuse(L, "targets must not be empty");
  for (size_t i = 1; i <= n; i++) {
    lua_rawgeti(L, index, (int)i);
    hll_target_add(L, -1, plan, mode);
    lua_pop(L, 1);
  }
  for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) fields++;
  if (fields != n) hll_misuse(L, "targets must be a list; it has other keys than 1 to %d", (int)n);
}

void hll_target_push(lua_State *L, const hl_plan *plan, size_t i) {
  hl_id ids[HL_LEVELS_MAX];
  hl_target target = hl_plan_target(plan, i, ids);
  hl_layout *layout = hl_plan_layout(plan);
  lua_createtable(L, 0, (int)target.level + 1 + target.mode_given);
  for (unsigned level = 0; level <= target.level; level++) {
    lua_pushlstring(L, ids[level].data, ids[level].size);
    lua_setfield(L, -2, hl_layout_name(layout, level));
  }
  if (target.mode_given) hll_set_text(L, "mode", hl_mode_name(target.mode));
}

void hll_targets_push(lua_State *L, const hl_plan *plan) {
  size_t n = hl_plan_target_count(plan);
  lua_createtable(L, (int)n, 0);
  for (size_t i = 0; i < n; i++) {
    hll_target_push(L, plan, i);
    lua_rawseti(L, -2, (int)i + 1);
  }
}
