/* values.c - any values of Lua's as arguments of any function: see values.lua. */
#include "state.h"

#include <dirent.h>
#include <fcntl.h>

static char directory[] = "/dev/shm/hierlock-fuzz-XXXXXX";

static void at_exit(void) {
  DIR *names = opendir(directory);
  for (struct dirent *file; names && (file = readdir(names));)
    (void)unlinkat(dirfd(names), file->d_name, 0);
  if (names) (void)closedir(names);
  (void)rmdir(directory);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static bool begun;
  if (!begun) CLAIM(mkdtemp(directory) && atexit(at_exit) == 0);
  begun = true;
  (void)setenv("HIERLOCK_DSN", "null:", 1);
  lua_State *L = state_new();
  state_call(L, "spec/fuzz/values.lua", directory, data, size);
  lua_close(L);
  return 0;
}
