/*
 * options.c - option tables. An unknown name raises: if a misspelt option were silently ignored,
 * a program might run without a limit for years.
 */
#include "hll.h"

#include <math.h>
#include <string.h>

const char *hll_word(lua_State *L, int index) {
  if (lua_type(L, index) != LUA_TSTRING) return NULL;
  size_t size;
  const char *word = lua_tolstring(L, index, &size);
  return strlen(word) == size ? word : NULL;
}

int64_t hll_milliseconds(lua_State *L, int index, const char *what) {
  if (lua_type(L, index) != LUA_TNUMBER)
    hll_misuse(L, "%s must be a number of seconds, not %s", what, luaL_typename(L, index));
  lua_Number seconds = lua_tonumber(L, index);
  if (!(seconds >= 0)) hll_misuse(L, "%s must not be negative or NaN", what);
  /* Never shorter than asked; beyond a thousand years it is for ever. */
  if (seconds > 31536000000.0) return HL_FOREVER;
  return (int64_t)ceil((double)seconds * 1000.0 - 1e-6);
}

void hll_options(lua_State *L, int index, hll_option_fn each, void *context) {
  if (lua_isnoneornil(L, index)) return;
  index = hll_absindex(L, index);
  if (!lua_istable(L, index))
    hll_misuse(L, "options must be a table, not %s", luaL_typename(L, index));
  lua_pushnil(L);
  while (lua_next(L, index)) {
    if (lua_type(L, -2) != LUA_TSTRING) hll_misuse(L, "options has a key that is no string");
    const char *name = hll_word(L, -2);
    if (!name || !each(L, name, context)) hll_misuse(L, "unknown option '%s'", lua_tostring(L, -2));
    lua_pop(L, 1);
  }
}

hl_mode hll_mode(lua_State *L, int index) {
  const char *mode = hll_word(L, index);
  hl_mode found;
  if (mode && hl_mode_named(mode, &found)) return found;
  hll_misuse(L, "mode must be \"exclusive\", \"update\" or \"shared\"");
}

void hll_words(lua_State *L, const char *what, const char *of, size_t most, const char *words[]) {
  if (!lua_istable(L, -1))
    hll_misuse(L, "%s must be a list of %s, not %s", what, of, luaL_typename(L, -1));
  size_t n = hll_rawlen(L, -1), fields = 0;
  if (n < 1 || n > most) hll_misuse(L, "%s must be a list of 1 to %d %s", what, (int)most, of);
  for (size_t i = 0; i < n; i++) {
    lua_rawgeti(L, -1, (int)i + 1);
    words[i] = hll_word(L, -1);
    if (!words[i])
      hll_misuse(L, "%s must be a list of %s; number %d is no string without NUL bytes", what, of,
                 (int)i + 1);
    lua_pop(L, 1);
  }
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) fields++;
  if (fields != n) hll_misuse(L, "%s has other keys than 1 to %d", what, (int)n);
  words[n] = NULL;
}

bool hll_layout_option(lua_State *L, const char *name, hll_layout_options *options) {
  if (strcmp(name, "buckets") == 0) {
    lua_Number buckets = lua_tonumber(L, -1);
    if (lua_type(L, -1) != LUA_TNUMBER || !(buckets >= 1) || buckets > 2147483647.0 ||
        floor((double)buckets) != (double)buckets)
      hll_misuse(L, "buckets must be a whole number from 1 to 2147483647");
    options->buckets = (uint32_t)buckets;
    return true;
  }
  if (strcmp(name, "levels") != 0) return false;
  hll_words(L, "levels", "names", HL_LEVELS_MAX, options->names);
  for (options->levels = 0; options->names[options->levels]; options->levels++)
    if (strcmp(options->names[options->levels], "mode") == 0)
      hll_misuse(L, "a level cannot be named 'mode'");
  return true;
}

hl_layout *hll_layout_new(lua_State *L, const hll_layout_options *options) {
  hl_layout *layout;
  hl_error error;
  if (hl_layout_new(options->levels ? options->names : NULL, options->levels, options->buckets,
                    &layout, &error))
    (void)hll_failure(L, &error, 0);
  return layout;
}

bool hll_boolean(lua_State *L, const char *what) {
  if (!lua_isboolean(L, -1))
    hll_misuse(L, "%s must be a boolean, not %s", what, luaL_typename(L, -1));
  return lua_toboolean(L, -1) != 0;
}

int64_t hll_ttl(lua_State *L, int index) {
  int64_t ms = hll_milliseconds(L, index, "ttl");
  if (ms < 1 || ms > HL_TTL_MAX) hll_misuse(L, "ttl must be 0.001 to 315360000 seconds");
  return ms;
}

const char *hll_text(lua_State *L, const char *what, size_t most) {
  const char *found = hll_word(L, -1);
  if (!found)
    hll_misuse(L, "%s must be a string without NUL bytes, not %s", what, luaL_typename(L, -1));
  size_t size = strlen(found);
  if (size < 1 || size > most) hll_misuse(L, "%s must have 1 to %d bytes", what, (int)most);
  return found;
}
