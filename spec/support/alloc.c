/*
 * alloc.c - for the specs of what happens when Lua runs out of memory: runs a
 * chunk in a Lua state of its own, whose allocator fails when it is told to. And
 * says how much memory is in use beside Lua's.
 */
#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

typedef struct budget {
  int counts;    /* requests are counted, and may fail */
  long requests; /* so far */
  long first;    /* the number of the first that fails; 0: all succeed */
  long failures; /* how many fail from there on; < 0: all */
} budget;

/* Only what grows may fail: Lua relies on that. */
static void *allocate(void *context, void *block, size_t old, size_t size) {
  budget *b = context;
  if (!block) old = 0; /* else it is a type */
  if (size == 0) {
    free(block);
    return NULL;
  }
  if (b->counts && size > old) {
    b->requests++;
    if (b->first && b->requests >= b->first &&
        (b->failures < 0 || b->requests < b->first + b->failures))
      return NULL;
  }
  return realloc(block, size);
}

static int traceback(lua_State *L) {
  if (!lua_isstring(L, 1)) {
    lua_getglobal(L, "tostring");
    lua_pushvalue(L, 1);
    lua_call(L, 1, 1);
  }
  return 1;
}

/* Runs source(argument); leaves nothing, or a message. */
static int run(lua_State *L, const char *source, const char *argument, budget *b, int counts) {
  lua_pushcfunction(L, traceback);
  int status = luaL_loadbuffer(L, source, strlen(source), "=chunk");
  if (status == 0) {
    lua_pushstring(L, argument);
    b->counts = counts;
    status = lua_pcall(L, 1, 0, counts ? 0 : -3);
    b->counts = 0;
  }
  return status;
}

/* run(setup, body, check, argument, first, failures): runs the three chunks in
   a fresh state, with failing allocations in body alone. Returns nil where such
   states cannot be had; else
     body's error message or false, its number of requests,
     the error message of setup or check or false */
static int l_run(lua_State *L) {
  const char *setup = luaL_checkstring(L, 1);
  const char *body = luaL_checkstring(L, 2);
  const char *check = luaL_checkstring(L, 3);
  const char *argument = luaL_checkstring(L, 4);
  budget b = {0};
  b.first = (long)luaL_checkinteger(L, 5);
  b.failures = (long)luaL_checkinteger(L, 6);
  char messages[2][512] = {"", ""};

#if LUA_VERSION_NUM >= 505
  lua_State *inner = lua_newstate(allocate, &b, 1);
#else
  lua_State *inner = lua_newstate(allocate, &b);
#endif
  if (!inner) return 0;
  luaL_openlibs(inner);
  const struct {
    const char *source;
    int counts;
  } steps[] = {{setup, 0}, {body, 1}, {check, 0}};
  for (int i = 0; i < 3; i++) {
    lua_settop(inner, 0);
    if (run(inner, steps[i].source, argument, &b, steps[i].counts) == 0) continue;
    const char *message = lua_tostring(inner, -1);
    strncpy(messages[steps[i].counts], message ? message : "no message", 511);
    if (i == 0) break;
  }
  lua_close(inner);

  for (int i = 1; i >= 0; i--) {
    if (messages[i][0])
      lua_pushstring(L, messages[i]);
    else
      lua_pushboolean(L, 0);
    if (i == 1) lua_pushinteger(L, (lua_Integer)b.requests);
  }
  return 3;
}

/* heap(): how many bytes malloc has handed out; 0 under a sanitizer. */
static int l_heap(lua_State *L) {
  struct mallinfo2 info = mallinfo2();
  lua_pushnumber(L, (lua_Number)(info.uordblks + info.hblkhd));
  return 1;
}

int luaopen_hierlock_spec_alloc(lua_State *L);

int luaopen_hierlock_spec_alloc(lua_State *L) {
  lua_newtable(L);
  lua_pushcfunction(L, l_run);
  lua_setfield(L, -2, "run");
  lua_pushcfunction(L, l_heap);
  lua_setfield(L, -2, "heap");
  return 1;
}
