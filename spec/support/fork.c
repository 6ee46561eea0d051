/*
 * fork.c - for the specs of forked children: fork, _exit and waiting for the child's end, which
 * no Lua library offers on all Luas.
 */
#include <lauxlib.h>
#include <lua.h>
#include <sys/wait.h>
#include <unistd.h>

static int l_fork(lua_State *L) {
  lua_pushinteger(L, fork());
  return 1;
}

static int l_exit(lua_State *L) { _exit((int)luaL_checkinteger(L, 1)); }

/* wait(pid): the exit status, or minus the signal */
static int l_wait(lua_State *L) {
  int status;
  if (waitpid((pid_t)luaL_checkinteger(L, 1), &status, 0) < 0) return 0;
  lua_pushinteger(L, WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  return 1;
}

static int l_getpid(lua_State *L) {
  lua_pushinteger(L, getpid());
  return 1;
}

int luaopen_hierlock_spec_fork(lua_State *L);

int luaopen_hierlock_spec_fork(lua_State *L) {
  lua_newtable(L);
  lua_pushcfunction(L, l_fork);
  lua_setfield(L, -2, "fork");
  lua_pushcfunction(L, l_exit);
  lua_setfield(L, -2, "exit");
  lua_pushcfunction(L, l_wait);
  lua_setfield(L, -2, "wait");
  lua_pushcfunction(L, l_getpid);
  lua_setfield(L, -2, "getpid");
  return 1;
}
