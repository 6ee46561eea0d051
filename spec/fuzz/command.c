/* command.c - any command line, environment and answers of a server, for the command
   `hierlock`: see command.lua. */
#include "state.h"

/* The state grows, and looking for leaks would take longer than all the rest. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "detect_leaks=0"; }

/* (value): what the core reads of the environment, too. */
static int set_dsn(lua_State *L) {
  return luaL_fileresult(L, setenv("HIERLOCK_DSN", luaL_checkstring(L, 1), 1) == 0, NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static lua_State *L; /* reading argparse takes longer than all the rest */
  if (!L) {
    L = state_new();
    lua_register(L, "set_dsn", set_dsn);
  }
  state_call(L, "spec/fuzz/command.lua", "", data, size);
  return 0;
}
