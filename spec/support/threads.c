/*
 * threads.c - for the specs of what a program is told while its other threads get no
 * processor: stops all threads of a process but its first one.
 */
#include <dirent.h>
#include <errno.h>
#include <lauxlib.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

/* Calls fn for each thread of the process but the first; returns how many succeed. */
static int each(pid_t pid, int (*fn)(pid_t thread)) {
  char name[64];
  int n = 0;
  (void)snprintf(name, sizeof name, "/proc/%d/task", (int)pid);
  DIR *threads = opendir(name);
  for (struct dirent *entry; threads && (entry = readdir(threads));) {
    pid_t thread = (pid_t)atoi(entry->d_name);
    if (thread > 0 && thread != pid) n += fn(thread) == 0;
  }
  if (threads) (void)closedir(threads);
  return n;
}

static int stop(pid_t thread) {
  int status;
  if (ptrace(PTRACE_SEIZE, thread, NULL, NULL) || ptrace(PTRACE_INTERRUPT, thread, NULL, NULL))
    return -1;
  while (waitpid(thread, &status, __WALL) < 0 && errno == EINTR) continue;
  return 0;
}

static int go(pid_t thread) { return (int)ptrace(PTRACE_DETACH, thread, NULL, NULL); }

/* stop(pid), go(pid): how many threads. By the same thread. */
static int l_stop(lua_State *L) {
  lua_pushinteger(L, each((pid_t)luaL_checkinteger(L, 1), stop));
  return 1;
}

static int l_go(lua_State *L) {
  lua_pushinteger(L, each((pid_t)luaL_checkinteger(L, 1), go));
  return 1;
}

int luaopen_hierlock_spec_threads(lua_State *L);

int luaopen_hierlock_spec_threads(lua_State *L) {
  lua_newtable(L);
  lua_pushcfunction(L, l_stop);
  lua_setfield(L, -2, "stop");
  lua_pushcfunction(L, l_go);
  lua_setfield(L, -2, "go");
  return 1;
}
