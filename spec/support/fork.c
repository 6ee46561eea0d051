/*
 * fork.c - for the specs of forked children: fork, _exit and waiting for the child's end, which
 * no Lua library offers on all Luas. It also locks a file, so that a store which keeps the file
 * locked for moments is slow.
 */
#include <fcntl.h>
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

/* lock(path): a descriptor that has the whole file locked, until it is closed; nil: it cannot
   be opened or locked. */
static int l_lock(lua_State *L) {
  struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
  int fd = open(luaL_checkstring(L, 1), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return 0;
  if (fcntl(fd, F_OFD_SETLKW, &whole) != 0) {
    (void)close(fd);
    return 0;
  }
  lua_pushinteger(L, fd);
  return 1;
}

static int l_close(lua_State *L) {
  (void)close((int)luaL_checkinteger(L, 1));
  return 0;
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
  lua_pushcfunction(L, l_lock);
  lua_setfield(L, -2, "lock");
  lua_pushcfunction(L, l_close);
  lua_setfield(L, -2, "close");
  lua_pushcfunction(L, l_getpid);
  lua_setfield(L, -2, "getpid");
  return 1;
}
