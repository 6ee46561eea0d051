/*
 * manager.c - class hierlock.manager: opening, closing, and what a manager tells
 * about itself. Acquiring is in acquire.c.
 */
/*** @module hierlock */
#include "hll.h"

#include "error.h"
#include "manager.h"
#include "store.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A quorum has at most so many stores. */
#define STORES_MAX 15

/* ------------------------------------------------------------- opening */

typedef struct open_options {
  hll_manager manager; /* as it will be */
  hl_config config;
  hll_layout_options layout;
  bool list, all;                       /* of DSNs; granted when all stores grant */
  const char *names[HL_LEVELS_MAX + 1]; /* of config */
  const char *units[HL_UNITS_MAX + 1];
} open_options;

/* Reads "symfony", or a table that has it in `with`; on the top. */
static void interoperate_option(lua_State *L, open_options *options) {
  hl_config *config = &options->config;
  if (lua_istable(L, -1)) {
    for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
      const char *key = hll_word(L, -2);
      if (key && strcmp(key, "with") == 0) {
        config->interoperate = hll_word(L, -1);
      } else if (key && strcmp(key, "names") == 0) {
        hll_words(L, "interoperate.names", "strings", HL_LEVELS_MAX, options->names);
        config->names = options->names;
      } else {
        hll_misuse(L, "interoperate has keys beside 'with' and 'names'");
      }
    }
  } else {
    config->interoperate = hll_word(L, -1);
  }
  if (!config->interoperate || strcmp(config->interoperate, "symfony") != 0)
    hll_misuse(L, "interoperate must be \"symfony\" or {with = \"symfony\", names = {...}}");
}

static bool open_option(lua_State *L, const char *name, void *context) {
  open_options *options = context;
  hll_manager *self = &options->manager;
  hl_config *config = &options->config;
  if (strcmp(name, "timeout") == 0) {
    config->timeout = hll_milliseconds(L, -1, "timeout");
  } else if (strcmp(name, "hold_timeout") == 0) {
    config->hold_timeout = hll_milliseconds(L, -1, "hold_timeout");
  } else if (strcmp(name, "pool_size") == 0) {
    lua_Number size = lua_tonumber(L, -1);
    if (lua_type(L, -1) != LUA_TNUMBER || !(size >= 1 && size <= 100000) ||
        (lua_Number)(unsigned)size != size)
      hll_misuse(L, "pool_size must be a whole number from 1 to 100000");
    config->pool_size = (unsigned)size;
  } else if (strcmp(name, "application") == 0) {
    config->application = hll_word(L, -1);
    if (!config->application)
      hll_misuse(L, "application must be a string without NUL bytes, not %s", luaL_typename(L, -1));
  } else if (strcmp(name, "on_lost") == 0 || hll_hook_named(name)) {
    if (!lua_isfunction(L, -1))
      hll_misuse(L, "%s must be a function, not %s", name, luaL_typename(L, -1));
    self->watches = true;
    if (hll_hook_named(name)) self->hooks = true;
  } else if (strcmp(name, "quorum") == 0) {
    const char *strategy = hll_word(L, -1);
    if (!options->list) hll_misuse(L, "quorum is for a list of DSNs");
    if (!strategy || (strcmp(strategy, "majority") != 0 && strcmp(strategy, "all") != 0))
      hll_misuse(L, "quorum must be \"majority\" or \"all\"");
    options->all = strcmp(strategy, "all") == 0;
  } else if (strcmp(name, "interoperate") == 0) {
    interoperate_option(L, options);
  } else if (strcmp(name, "warn_unreleased") == 0) {
    self->warn_unreleased = hll_report_option(L, name, false);
  } else if (strcmp(name, "check_order") == 0) {
    self->check_order = self->check_units = hll_report_option(L, name, true);
    self->prints_order = !lua_isfunction(L, -1);
    self->raises_order = lua_type(L, -1) == LUA_TSTRING;
  } else if (strcmp(name, "units") == 0) {
    hll_words(L, name, "names", HL_UNITS_MAX, options->units);
    config->units = options->units;
  } else if (strcmp(name, "own_handles") == 0) {
    self->own_handles = hll_boolean(L, name);
  } else if (strcmp(name, "loop") == 0) {
    /* lua/hierlock/init.lua has checked it. */
  } else {
    return hll_layout_option(L, name, &options->layout);
  }
  return true;
}

static open_options options_begin(bool list) {
  bool checks = hll_report_default();
  return (open_options){.manager = {.warn_unreleased = checks,
                                    .check_order = checks,
                                    .check_units = true,
                                    .prints_order = true,
                                    .raises_order = checks},
                        .config = HL_CONFIG_INIT,
                        .list = list};
}

/* Returns the client library that a store's module needs. */
static const char *store_needs(const char *name) {
  if (strcmp(name, "mysql") == 0) return "libmysqlclient or MariaDB Connector/C";
  if (strcmp(name, "postgresql") == 0) return "libpq";
  if (strcmp(name, "redis") == 0) return "hiredis";
  if (strcmp(name, "sqlite") == 0) return "libsqlite3";
  if (strcmp(name, "memcached") == 0) return "libmemcached";
  return "its client library";
}

/* A store with a client library, or of another maker's, is loaded at first use, by `require`. The
   module is a userdata with the address of its hl_store_ops; another maker's is the address. */
const hl_store_ops *hll_store_load(lua_State *L, const char *name) {
  if (strcmp(name, "file") == 0) return &hl_store_file;
  if (strcmp(name, "null") == 0) return &hl_store_null;
  if (strcmp(name, "quorum") == 0) return &hl_store_quorum;
  lua_getglobal(L, "require");
  lua_pushfstring(L, "hierlock.store.%s", strncmp(name, "store+", 6) == 0 ? name + 6 : name);
  if (lua_pcall(L, 1, 1, 0) == 0) {
    const hl_store_ops **own = hll_testmetatable(L, -1, HLL_STORE);
    const hl_store_ops *ops = lua_islightuserdata(L, -1) ? lua_touserdata(L, -1) : NULL;
    if (own) ops = *own;
    if (ops && strcmp(ops->scheme, name) == 0) return ops;
    if (ops) {
      lua_pushfstring(L, "there is no store '%s': its module has the store '%s'", name,
                      ops->scheme);
      return NULL;
    }
    lua_pushliteral(L, "it is no store");
  }
  if (!lua_isstring(L, -1)) lua_pushliteral(L, "unknown reason");
  /* The message takes one line of the reason: not the list of places that `require` searched. Where
     `require` found a file and could not load it, this is the loader's line. */
  const char *reason = lua_tostring(L, -1);
  size_t size = strcspn(reason, "\n");
  if (strncmp(reason, "error loading", 13) == 0 && reason[size]) {
    reason += size + 1 + strspn(reason + size + 1, "\t");
    size = strcspn(reason, "\n");
  } else if (size && reason[size - 1] == ':') {
    size--;
  }
  lua_pushlstring(L, reason, size);
  lua_pushfstring(L, "the %s store is not built or cannot be loaded (it needs %s): %s", name,
                  store_needs(name), lua_tostring(L, -1));
  return NULL;
}

/* Replaces the list at 1 by the DSN of a quorum of it; see csrc/stores/quorum/quorum.c. */
static void quorum_dsn(lua_State *L, bool all) {
  lua_pushstring(L, all ? "quorum:all" : "quorum:majority");
  int n = (int)hll_rawlen(L, 1);
  for (int i = 1; i <= n; i++) {
    lua_rawgeti(L, 1, i);
    luaL_gsub(L, lua_tostring(L, -1), "%", "%25");
    luaL_gsub(L, lua_tostring(L, -1), ";", "%3B");
    lua_pushfstring(L, "%s;%s", lua_tostring(L, -4), lua_tostring(L, -1));
    lua_insert(L, -5);
    lua_pop(L, 4);
  }
  lua_replace(L, 1);
}

/* Raises misuse, where the list at 1 is no list of DSNs. */
static void list_check(lua_State *L) {
  int n = (int)hll_rawlen(L, 1), entries = 0;
  for (lua_pushnil(L); lua_next(L, 1); lua_pop(L, 1)) entries++;
  if (n == 0 || entries != n) hll_misuse(L, "dsn must be a string or a list of strings");
  if (n > STORES_MAX) hll_misuse(L, "a quorum has at most %d stores", STORES_MAX);
  for (int i = 1; i <= n; i++) {
    lua_rawgeti(L, 1, i);
    if (!hll_word(L, -1))
      hll_misuse(L, "each DSN of a list must be a string without NUL bytes, not %s",
                 luaL_typename(L, -1));
    lua_pop(L, 1);
  }
}

#define HLL_AGENT "hierlock.agent"

/* Locks and managers have references of their own: they may be finalized later. */
static int agent_gc(lua_State *L) {
  hl_agent **self = lua_touserdata(L, 1);
  hl_agent_unref(*self);
  *self = NULL;
  return 0;
}

/* Pushes the DSN of a member, whose escaped text stands in the DSN of a quorum. */
static void push_member(lua_State *L, const char *text, size_t size) {
  luaL_Buffer buffer;
  luaL_buffinit(L, &buffer);
  for (size_t i = 0; i < size; i++) {
    char digits[3] = {0};
    if (text[i] == '%' && i + 2 < size) memcpy(digits, text + i + 1, 2);
    char *end = digits;
    long c = digits[0] ? strtol(digits, &end, 16) : 0;
    bool escaped = end == digits + 2 && c > 0;
    luaL_addchar(&buffer, escaped ? (char)c : text[i]);
    if (escaped) i += 2;
  }
  luaL_pushresult(&buffer);
}

/* Loads the store of a DSN, and the stores of a quorum's members. Returns false with a failure
   on the stack. */
static bool stores_load(lua_State *L, const char *dsn, const hl_store_ops *stores[STORES_MAX + 2]) {
  hl_error error;
  int n = 0;
  const char *name = hl_dsn_store(dsn, &error);
  const char *at = name && strcmp(name, "quorum") == 0 ? strchr(dsn, ';') : NULL;
  for (; name; n++) {
    stores[n] = hll_store_load(L, name);
    if (!stores[n]) {
      (void)hll_fail(L, HL_ESTORE, lua_tostring(L, -1));
      return false;
    }
    if (!at || n == STORES_MAX) return true;
    size_t size = strcspn(at + 1, ";");
    push_member(L, at + 1, size);
    name = hl_dsn_store(lua_tostring(L, -1), &error);
    at = at[1 + size] ? at + 1 + size : NULL;
    lua_pop(L, 1);
  }
  (void)hll_failure(L, &error, 0);
  return false;
}

/* Pushes and returns the agent of this Lua state: each state has only one. */
static hl_agent *push_agent(lua_State *L) {
  lua_getfield(L, LUA_REGISTRYINDEX, HLL_AGENT);
  hl_agent **self = lua_touserdata(L, -1);
  if (self) return *self;
  lua_pop(L, 1);
  self = lua_newuserdata(L, sizeof(hl_agent *));
  *self = NULL;
  lua_createtable(L, 0, 1);
  lua_pushcfunction(L, agent_gc);
  lua_setfield(L, -2, "__gc");
  lua_setmetatable(L, -2);
  *self = hl_agent_new();
  if (!*self) (void)luaL_error(L, "not enough memory");
  lua_pushvalue(L, -1);
  lua_setfield(L, LUA_REGISTRYINDEX, HLL_AGENT);
  return *self;
}

/* Pushes the table that the manager at that index shares with its handles: see hll.h. The options
   of open are at 2. */
static void shared_push(lua_State *L, int manager, const hll_manager *self) {
  lua_createtable(L, 3, 2);
  lua_pushvalue(L, manager);
  lua_rawseti(L, -2, 1);
  luaL_getmetatable(L, HLL_HANDLE);
  lua_rawseti(L, -2, 3);
  if (self->hooks) hll_hooks_set(L, 2, manager + 1);
  if (self->watches) {
    lua_getfield(L, 2, "on_lost");
    lua_setfield(L, -2, "on_lost");
    lua_newtable(L);
    lua_createtable(L, 0, 1);
    hll_set_text(L, "__mode", "k");
    lua_setmetatable(L, -2);
    lua_setfield(L, -2, "handles");
  }
  const char *const told[] = {"warn_unreleased", "check_order"};
  for (int i = 0; i < 2 && lua_istable(L, 2); i++) {
    lua_getfield(L, 2, told[i]);
    if (lua_isfunction(L, -1))
      lua_setfield(L, -2, told[i]);
    else
      lua_pop(L, 1);
  }
}

/***
Opens a manager: connects, and checks that locks on this store exclude.
Blocks for at most the DSN's `connect_timeout` (10 s).
@function hierlock.open
@tparam[opt] string|{string,...} dsn `mysql://user:password@host:port/database?parameters`,
  `user:password@tcp(host:port)/database?parameters`,
  `postgresql://user:password@host:port/database?parameters`, `host=... dbname=...` (libpq's),
  `file:`, `file:/directory` or `null:`. A list of DSNs opens a quorum. The default is
  `$HIERLOCK_DSN`, and without that `file:`.
  Symfony Lock's `pgsql+advisory:...` and `flock:///directory` say `interoperate = "symfony"`, too
@tparam[opt] table options an unknown name raises
@number[opt=50] options.timeout seconds that an acquisition waits. 0 tries once.
  `math.huge` waits for ever
@number[opt=30] options.hold_timeout seconds, 1 to a year. The server frees the manager's locks when
  it has not heard from the process for so long. A store without connections ignores it
@tparam[opt] {string,...} options.levels 1 to 16 names from root to leaf. The default is what the
  table or directory records, else `user`, `account`, `resource`. If it records other names, `open`
  fails with `mismatch`
@int[opt] options.buckets for each level, 1 to 2147483647. The default is what the table or
  directory records, else 10000000. PostgreSQL has no buckets, and ignores it
@int[opt=64] options.pool_size connections at most, 1 to 100000. Each held or waiting lock takes
  one. A store without connections ignores it
@string[opt="majority"] options.quorum of a list of DSNs. `"majority"` or `"all"` of the stores
  have to grant. See docs/quorum.md
@tparam[opt] string|table options.interoperate `"symfony"`: locks each node also by its name, as
  PHP programs with Symfony Lock lock it on the same store. So both keep each other out.
  PostgreSQL, Redis, Valkey and files can do so. The name is the ids with `/` between. For other
  names, pass a table with a pattern for each level:
  `{with = "symfony", names = {"user-{user}", "{user}-{account}", "invoice-{resource}"}}`.
  PostgreSQL and files then have no leases. Redis has only leases
@string[opt] options.application shown to observers. The default is the program's name
@tparam[opt] function options.on_lost called as `on_lost(handle, err)`, once for each lost lock. It
  also comes for a lease whose time is up, which a refresh may still revive. The next call on the
  manager or a handle of it calls `on_lost`; another thread never does. An error that `on_lost`
  raises comes out of that call. With other hooks, `on_lost` gets their event as third argument
@tparam[opt] function options.on_wait called as `on_wait(event)`, when an acquisition begins. For
  this hook and the next four, docs/observability.md has the event's fields, and the time of each
  call. Only a call on the manager or a handle of it calls a hook. An error that a hook raises comes
  out of this call. Hooks cannot yield
@tparam[opt] function options.on_grant `on_grant(event, handle)`: the store granted it. If the hook
  raises, the lock of an acquisition is released. A handle whose `extend` was granted keeps its
  locks
@tparam[opt] function options.on_timeout `on_timeout(event, err)`: the store did not grant it in
  time
@tparam[opt] function options.on_error `on_error(event, err)`: the acquisition failed otherwise
@tparam[opt] function options.on_release `on_release(event)`: the handle has released or lost it
@tparam[opt=false] boolean|function options.warn_unreleased reports each handle that only the
  collector releases. With `true` the next call into hierlock writes the report to stderr. With a
  function it calls `report(message)`, and an error that the function raises comes out of the call.
  `manager:close()` tells the last reports. The message names the line that acquired the handle
@tparam[opt=false] boolean|string|function options.check_order reports orders of locks that may
  deadlock, once for each kind of circle. With `true` the call that finds one writes the report to
  stderr at once. With a function the next call into hierlock passes it the report. The manager
  learns the order in which all threads of the program take locks while they hold others. The
  manager reports locks that the program takes in both orders, before they deadlock. For tests:
  `HIERLOCK_CHECK=1` in the environment sets the defaults `true` for `warn_unreleased`, and
  `"raise"` here. `"raise"` does as `true`, and raises for a call against the order of `units`. See
  docs/deadlocks.md
@tparam[opt] {string,...} options.units 1 to 64 names of units of business data, in the order in
  which a program takes them. A target is of a unit if its first id is the unit's name, see
  `manager:unit`. A call breaks the order if it waits for a unit while its coroutine holds a later
  unit. Each such pair is reported once. `check_order` decides where: stderr unless it is set,
  nowhere with `false`. With `"raise"` the call raises. See docs/exclusive-control.md
@bool[opt=false] options.own_handles a promise of the program. Only the coroutine that acquired a
  handle releases it. Then hierlock finds circles of coroutines under a loop. A coroutine that would
  wait for itself, or in such a circle, gets `deadlock` at once. See docs/deadlocks.md
@tparam[opt="auto"] string|function|table options.loop how a coroutine waits: by the loop
  `"cqueues"`, `"luv"`, `"copas"`, `"ngx"` or `"tarantool"`. With
  `"auto"` hierlock recognises ngx and cqueues, and blocks elsewhere. With
  `"block"` it always blocks. A function `loop(pending)` yields as the program's own loop wants, and
  returns once `pending:done()`:
  `while not pending:done() do my_loop.wait_readable(pending:fd()) end`. An error that it raises
  ends the wait. Where a coroutine cannot yield, the call blocks. The fibers of `"tarantool"` need
  no yield, nor does `{anywhere = loop}`: such a function is called wherever the call waits
@treturn[1] manager
@return[2] nil
@return[2] err `dsn`, `connection`, `unsafe_server`, `mismatch`,
  `not_provisioned`, `unsupported` (`interoperate`), `store`
*/
int hll_manager_open(lua_State *L) {
  const hl_store_ops *stores[STORES_MAX + 2] = {NULL};
  bool list = lua_istable(L, 1);
  open_options options = options_begin(list);
  hl_error error;
  lua_settop(L, 2);
  if (!lua_isnil(L, 1) && !list && lua_type(L, 1) != LUA_TSTRING)
    hll_misuse(L, "dsn must be a string or a list of strings, not %s", luaL_typename(L, 1));
  if (list) list_check(L);
  hll_options(L, 2, open_option, &options); /* so that wrong options raise */
  if (list) quorum_dsn(L, options.all);
  options.config.dsn = hll_word(L, 1);
  if (!lua_isnil(L, 1) && !options.config.dsn)
    return hll_fail(L, HL_EDSN, "the DSN has a NUL byte");

  hll_manager *self = hll_newuserdata(L, HLL_MANAGER, sizeof *self);
  int manager = lua_gettop(L);
  shared_push(L, manager, &options.manager);
  hll_setuservalue(L, manager);

  hl_agent *agent = push_agent(L);
  const char *dsn = hl_dsn_default(options.config.dsn);
  if (!stores_load(L, dsn, stores)) return 2;
  /* Reads the options once more, as they point into the table: nothing allocates from here on. */
  options = options_begin(list);
  hll_options(L, 2, open_option, &options);
  options.config.dsn = dsn;
  options.config.stores = stores;
  options.config.layout = hll_layout_new(L, &options.layout);
  int status = hl_manager_open(&options.config, &options.manager.manager, &error);
  hl_layout_unref(options.config.layout);
  if (status) return hll_failure(L, &error, 0);
  *self = options.manager;
  self->agent = hl_agent_ref(agent);
  self->check_units = self->check_units && options.config.units;
  self->names_lines = !self->manager->ops->traits.grants_all || self->warn_unreleased ||
                      self->check_order || options.config.units;
  lua_settop(L, manager);
  return 1;
}

/* ------------------------------------------------------------- methods */

static int manager_end(lua_State *L, void (*end)(hl_manager *)) {
  hll_manager *self = hll_manager_test(L, 1);
  if (self && self->manager) {
    hl_manager *manager = self->manager;
    self->manager = NULL;
    end(manager);
    hl_agent_unref(self->agent);
    self->agent = NULL;
  }
  if (self) hll_reports_end(self);
  return 0;
}

static int manager_gc(lua_State *L) {
  hll_manager *self = hll_manager_test(L, 1);
  if (self) hll_traces_drop(self);
  return manager_end(L, hl__manager_collect);
}

/* Ends the manager at the end of its scope. Tells the reports, then the ends of traces. */
static int manager_close_scope(lua_State *L) {
  hll_manager *self = hll_manager_test(L, 1);
  if (!self) return 0;
  int shared = hll_manager_shared(L, 1);
  if (self->manager && self->reports) hll_reports_tell(L, shared, self);
  bool open = self->manager != NULL;
  (void)manager_end(L, hl_manager_close);
  if (open) hll_traces_close(L, shared, self);
  return 0;
}

/***
Opened by `hierlock.open`. The end of the scope of `local manager <close>` (Lua 5.4) and the
collector close it, too. The handles keep a manager from the collector. `tostring(manager)` says
whether it is open.
@type manager
*/

/***
Releases everything that the manager's handles hold, and ends its connections and
its threads. Waits until the store has released everything: a round trip, and two seconds at
most where a server hangs. The collector does not wait. A second `close` does nothing. Any other
method of a closed manager raises, and the methods of its handles find their locks released.
@function manager:close
@treturn boolean true
*/
static int manager_close_method(lua_State *L) {
  if (!hll_manager_test(L, 1))
    hll_misuse(L, "self must be a manager, not %s; call it with a colon",
               hll_typename(L, 1, HLL_MANAGER));
  (void)manager_close_scope(L);
  lua_pushboolean(L, 1);
  return 1;
}

static void push_histogram(lua_State *L, const hl_histogram *histogram) {
  lua_createtable(L, 0, 3);
  lua_pushinteger(L, (lua_Integer)histogram->count);
  lua_setfield(L, -2, "count");
  lua_pushnumber(L, (lua_Number)histogram->sum_us / 1000000);
  lua_setfield(L, -2, "seconds");
  lua_createtable(L, HL_HISTOGRAM_BOUNDS + 1, 0);
  for (int i = 0; i <= HL_HISTOGRAM_BOUNDS; i++) {
    lua_pushinteger(L, (lua_Integer)histogram->buckets[i]);
    lua_rawseti(L, -2, i + 1);
  }
  lua_setfield(L, -2, "buckets");
}

/* Copies: a finalizer may close the manager while the caller pushes them. */
typedef struct level_stats {
  char name[HL_LEVEL_NAME_MAX + 1];
  hl_histogram waits, holds;
} level_stats;

static unsigned levels_read(hl_manager *manager, level_stats levels[HL_LEVELS_MAX]) {
  hl_layout *layout = hl_manager_layout(manager);
  unsigned n = hl_layout_levels(layout);
  for (unsigned i = 0; i < n; i++) {
    (void)snprintf(levels[i].name, sizeof levels[i].name, "%s", hl_layout_name(layout, i));
    hl_manager_histograms(manager, i, &levels[i].waits, &levels[i].holds);
  }
  return n;
}

/* Adds `levels` and `bounds` to the table on the top. */
static void set_histograms(lua_State *L, const level_stats *levels, unsigned n) {
  lua_createtable(L, (int)n, 0);
  for (unsigned i = 0; i < n; i++) {
    lua_createtable(L, 0, 3);
    hll_set_text(L, "name", levels[i].name);
    push_histogram(L, &levels[i].waits);
    lua_setfield(L, -2, "waits");
    push_histogram(L, &levels[i].holds);
    lua_setfield(L, -2, "holds");
    lua_rawseti(L, -2, (int)i + 1);
  }
  lua_setfield(L, -2, "levels");
  lua_createtable(L, HL_HISTOGRAM_BOUNDS, 0);
  for (int i = 0; i < HL_HISTOGRAM_BOUNDS; i++) {
    lua_pushnumber(L, (lua_Number)hl_histogram_bound_us((unsigned)i) / 1000000);
    lua_rawseti(L, -2, i + 1);
  }
  lua_setfield(L, -2, "bounds");
}

/***
Returns counters since the manager was opened, and the present state. In a forked child the counters
begin with the manager's first use there. Does not block, and asks no store. Each call returns a new
table.
@function manager:stats
@treturn table whole numbers, and `wait_seconds`. Since the opening: `acquired` (grants),
  `waited` (grants after 2 ms or longer), `released`, `timeouts`, `deadlocks`,
  `cancelled`, `busy`, `lost`, `errors` (other failures of acquisitions),
  `reconnects` (stale connections repaired unseen), `wait_seconds` (in all
  acquisitions, granted or not). Now: `held`, `waiting`, `connections` (0 on a
  store without them). Histograms: `levels`, a list from root to leaf of
  `{name = "user", waits = ..., holds = ...}`. A level's histograms count the acquisitions whose
  deepest target is on that level.
  `waits` has how long they waited, granted or not.
  `holds` has how long each lock was held, once it is not held any more. Each is
  `{count = n, seconds = sum, buckets = {...}}`. A time in
  `buckets[i]` is at most `bounds[i]` seconds, and longer than `bounds[i - 1]`. The last bucket has
  the times longer than all `bounds` (0.0001 to 5000, in steps of 1, 2, 5).
  `hierlock.prometheus` writes all this as a text
*/
static int manager_stats(lua_State *L) {
  hl_stats s;
  level_stats levels[HL_LEVELS_MAX];
  hl_manager *manager = hll_manager_check(L)->manager;
  hl_manager_stats(manager, &s);
  unsigned level_count = levels_read(manager, levels);
  const struct {
    const char *name;
    uint64_t value;
  } counters[] = {
      {"acquired", s.acquired},
      {"waited", s.waited},
      {"released", s.released},
      {"timeouts", s.timeouts},
      {"deadlocks", s.deadlocks},
      {"cancelled", s.cancelled},
      {"busy", s.busy},
      {"lost", s.lost},
      {"errors", s.errors},
      {"reconnects", s.reconnects},
      {"held", s.held},
      {"waiting", s.waiting},
      {"connections", s.connections},
  };
  const int n = sizeof counters / sizeof *counters;
  lua_createtable(L, 0, n + 3);
  for (int i = 0; i < n; i++) {
    lua_pushinteger(L, (lua_Integer)counters[i].value);
    lua_setfield(L, -2, counters[i].name);
  }
  lua_pushnumber(L, (lua_Number)s.wait_ms / 1000);
  lua_setfield(L, -2, "wait_seconds");
  set_histograms(L, levels, level_count);
  return 1;
}

/* --------------------------------------------------------- metamethods */

static int manager_tostring(lua_State *L) {
  hll_manager *self = hll_manager_test(L, 1);
  lua_pushfstring(L, "hierlock.manager (%s)", self && self->manager ? "open" : "closed");
  return 1;
}

static const luaL_Reg methods[] = {
    {"close", manager_close_method},  {"stats", manager_stats},
    {"holders", hll_manager_holders}, {"plan", hll_manager_plan},
    {"unit", hll_manager_unit},       {"leases", hll_manager_leases},
    {"revoke", hll_manager_revoke},   {NULL, NULL},
};

static const luaL_Reg metamethods[] = {
    {"__gc", manager_gc},
    {"__close", manager_close_scope},
    {"__tostring", manager_tostring},
    {NULL, NULL},
};

void hll_manager_register(lua_State *L) {
  hll_class_new(L, HLL_MANAGER, metamethods, methods);
  hll_setfuncs(L, hll_acquire_methods);
  lua_pop(L, 2);
}

static bool manager_plan_option(lua_State *L, const char *name, void *context) {
  if (strcmp(name, "mode") != 0) return false;
  *(hl_mode *)context = hll_mode(L, -1);
  return true;
}

/***
@type manager
*/

/***
Makes a plan as `hierlock.plan` does, with the manager's levels and buckets: the rows that its
acquisitions lock. Does not block.
@function manager:plan
@tparam {table,...} targets at least one, each as for `manager:acquire`
@tparam[opt] table options an unknown name raises
@string[opt="exclusive"] options.mode for targets without their own
@treturn plan
*/
int hll_manager_plan(lua_State *L) {
  hll_manager *self = hll_manager_check(L);
  hl_mode mode = HL_EXCLUSIVE;
  lua_settop(L, 3);
  hll_plan *plan = hll_plan_push(L);
  hll_options(L, 3, manager_plan_option, &mode);
  plan->plan = hl_plan_new(hl_manager_layout(hll_manager_still_open(L, self)));
  if (!plan->plan) return luaL_error(L, "not enough memory");
  hll_targets_add(L, 2, plan->plan, mode);
  return 1;
}

/***
@type manager
*/

/***
Returns a target of a unit, for `acquire` and all other functions that take targets:
`manager:unit("order", 7)` is `{"order", "7"}`. The manager checks the name. Without ids the target
is the whole unit: its holder keeps out all requests for parts of it. The program may add a `mode`.
@function manager:unit
@string name from the option `units`; another name raises
@tparam string|integer ... ids, from the second level on
@treturn table target
*/
int hll_manager_unit(lua_State *L) {
  int n = lua_gettop(L);
  const hl_manager *manager = hll_manager_check(L)->manager;
  hl_layout *layout = hl_manager_layout(manager);
  size_t size;
  if (lua_type(L, 2) != LUA_TSTRING)
    hll_misuse(L, "name must be a string, not %s", luaL_typename(L, 2));
  const char *name = lua_tolstring(L, 2, &size);
  if (!hl_manager_has_unit(manager, name, size)) hll_misuse(L, "unknown unit '%s'", name);
  if (n - 1 > (int)hl_layout_levels(layout))
    hll_misuse(L, "the manager has %d levels for ids of a unit", (int)hl_layout_levels(layout) - 1);
  char room[24];
  for (int i = 3; i <= n; i++) (void)hll_id(L, i, hl_layout_name(layout, (unsigned)i - 2), room);
  /* An allocation may close the manager: from here on it is not looked at. */
  lua_createtable(L, n - 1, 1);
  lua_pushvalue(L, 2);
  lua_rawseti(L, -2, 1);
  for (int i = 3; i <= n; i++) {
    hl_id id = hll_id(L, i, "id", room);
    lua_pushlstring(L, id.data, id.size);
    lua_rawseti(L, -2, i - 1);
  }
  return 1;
}
