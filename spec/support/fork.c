/*
 * fork.c - for the specs of forked children: fork, _exit and waiting for the child's end, which
 * no Lua library offers on all Luas.
 */
#include <lauxlib.h>
#include <lua.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef __SANITIZE_ADDRESS__
#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

/* Whether each other thread sleeps in a system call, or has ended. */
static bool others_sleep(void) {
  bool sleep = true;
  DIR *threads = opendir("/proc/self/task");
  for (struct dirent *it; threads && sleep && (it = readdir(threads)) != NULL;) {
    char path[300], state = 'S';
    if (*it->d_name == '.' || atol(it->d_name) == gettid()) continue;
    (void)snprintf(path, sizeof path, "/proc/self/task/%s/stat", it->d_name);
    FILE *file = fopen(path, "r");
    if (!file) continue;
    if (fscanf(file, "%*d (%*[^)]) %c", &state) == 1) sleep = state == 'S' || state == 'Z';
    (void)fclose(file);
  }
  if (threads) (void)closedir(threads);
  return sleep;
}

/* AddressSanitizer's allocator knows no fork: a child whose parent had another thread in the
   allocator waits for that thread for ever. So the child is born while the others sleep, or after a
   second. */
static void await_sleep(void) {
  for (int i = 0; i < 1000 && !others_sleep(); i++) (void)usleep(1000);
}
#else
static void await_sleep(void) {}
#endif

static int l_fork(lua_State *L) {
  await_sleep();
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
