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

/* Of a quorum. */
#define STORES_MAX 15

/* ------------------------------------------------------------- opening */

typedef struct open_options {
  hl_config config;
  hll_layout_options layout;
  bool on_lost, hooks;
  bool own_handles;
  bool warn_unreleased, check_order, prints, prints_order, raises_order;
  bool check_units;
  bool list, all;                       /* of DSNs; granted when all stores grant */
  const char *names[HL_LEVELS_MAX + 1]; /* of config */
  const char *units[HL_UNITS_MAX + 1];
} open_options;

/* A list of patterns, on the top. The list keeps the strings. */
static void names_option(lua_State *L, open_options *options) {
  if (!lua_istable(L, -1))
    hll_misuse(L, "interoperate.names must be a list of strings, not %s", luaL_typename(L, -1));
  size_t n = hll_rawlen(L, -1), fields = 0;
  if (n < 1 || n > HL_LEVELS_MAX)
    hll_misuse(L, "interoperate.names must be a list of 1 to %d strings", HL_LEVELS_MAX);
  for (size_t i = 0; i < n; i++) {
    lua_rawgeti(L, -1, (int)i + 1);
    options->names[i] = hll_word(L, -1);
    if (!options->names[i])
      hll_misuse(L,
                 "interoperate.names: number %d is no string without NUL "
                 "bytes",
                 (int)i + 1);
    lua_pop(L, 1);
  }
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) fields++;
  if (fields != n) hll_misuse(L, "interoperate.names has other keys than 1 to %d", (int)n);
  options->names[n] = NULL;
  options->config.names = options->names;
}

/* "symfony", or a table that says so in its `with`; on the top. */
static void interoperate_option(lua_State *L, open_options *options) {
  hl_config *config = &options->config;
  if (lua_istable(L, -1)) {
    for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
      const char *key = hll_word(L, -2);
      if (key && strcmp(key, "with") == 0)
        config->interoperate = hll_word(L, -1);
      else if (key && strcmp(key, "names") == 0)
        names_option(L, options);
      else
        hll_misuse(L, "interoperate has keys beside 'with' and 'names'");
    }
  } else {
    config->interoperate = hll_word(L, -1);
  }
  if (!config->interoperate || strcmp(config->interoperate, "symfony") != 0)
    hll_misuse(L, "interoperate must be \"symfony\" or {with = \"symfony\", "
                  "names = {...}}");
}

/* A list of names, on the top. The list keeps the strings. */
static void units_option(lua_State *L, open_options *options) {
  if (!lua_istable(L, -1))
    hll_misuse(L, "units must be a list of names, not %s", luaL_typename(L, -1));
  size_t n = hll_rawlen(L, -1), fields = 0;
  if (n < 1 || n > HL_UNITS_MAX)
    hll_misuse(L, "units must be a list of 1 to %d names", HL_UNITS_MAX);
  for (size_t i = 0; i < n; i++) {
    lua_rawgeti(L, -1, (int)i + 1);
    options->units[i] = hll_word(L, -1);
    if (!options->units[i])
      hll_misuse(L, "units must be a list of names; number %d is none", (int)i + 1);
    lua_pop(L, 1);
  }
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) fields++;
  if (fields != n) hll_misuse(L, "units has other keys than 1 to %d", (int)n);
  options->units[n] = NULL;
  options->config.units = options->units;
}

static int open_option(lua_State *L, const char *name, void *context) {
  open_options *options = context;
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
  } else if (strcmp(name, "on_lost") == 0) {
    if (!lua_isfunction(L, -1))
      hll_misuse(L, "on_lost must be a function, not %s", luaL_typename(L, -1));
    options->on_lost = true;
  } else if (hll_hook_named(name)) {
    if (!lua_isfunction(L, -1))
      hll_misuse(L, "%s must be a function, not %s", name, luaL_typename(L, -1));
    options->hooks = true;
  } else if (strcmp(name, "quorum") == 0) {
    const char *strategy = hll_word(L, -1);
    if (!options->list) hll_misuse(L, "quorum is for a list of DSNs");
    if (!strategy || (strcmp(strategy, "majority") != 0 && strcmp(strategy, "all") != 0))
      hll_misuse(L, "quorum must be \"majority\" or \"all\"");
    options->all = strcmp(strategy, "all") == 0;
  } else if (strcmp(name, "interoperate") == 0) {
    interoperate_option(L, options);
  } else if (strcmp(name, "warn_unreleased") == 0) {
    hll_report_option(L, name, &options->warn_unreleased, &options->prints, NULL);
  } else if (strcmp(name, "check_order") == 0) {
    hll_report_option(L, name, &options->check_order, &options->prints_order,
                      &options->raises_order);
    options->check_units = options->check_order;
  } else if (strcmp(name, "units") == 0) {
    units_option(L, options);
  } else if (strcmp(name, "own_handles") == 0) {
    if (!lua_isboolean(L, -1))
      hll_misuse(L, "own_handles must be a boolean, not %s", luaL_typename(L, -1));
    options->own_handles = lua_toboolean(L, -1);
  } else if (strcmp(name, "loop") == 0) {
    /* lua/hierlock/init.lua has found it good. */
  } else {
    return hll_layout_option(L, name, &options->layout);
  }
  return 1;
}

static open_options options_begin(bool list) {
  bool checks = hll_report_default();
  return (open_options){.config = HL_CONFIG_INIT,
                        .list = list,
                        .warn_unreleased = checks,
                        .check_order = checks,
                        .check_units = true,
                        .prints_order = true,
                        .raises_order = checks};
}

/* What a store that is a module of its own is made of. */
static const char *store_needs(const char *name) {
  if (strcmp(name, "mysql") == 0) return "libmysqlclient or MariaDB Connector/C";
  if (strcmp(name, "postgresql") == 0) return "libpq";
  if (strcmp(name, "redis") == 0) return "hiredis";
  if (strcmp(name, "sqlite") == 0) return "libsqlite3";
  if (strcmp(name, "memcached") == 0) return "libmemcached";
  return "its client library";
}

/* Such a store is loaded at first use, by `require`: its userdata holds the address
   of its hl_store_ops. */
const hl_store_ops *hll_store_load(lua_State *L, const char *name) {
  if (strcmp(name, "file") == 0) return &hl_store_file;
  if (strcmp(name, "null") == 0) return &hl_store_null;
  if (strcmp(name, "quorum") == 0) return &hl_store_quorum;
  lua_getglobal(L, "require");
  lua_pushfstring(L, "hierlock.store.%s", name);
  if (lua_pcall(L, 1, 1, 0) == 0) {
    const hl_store_ops **ops = hll_testudata(L, -1, HLL_STORE);
    if (ops) return *ops;
    lua_pushliteral(L, "it is no store");
  }
  if (!lua_isstring(L, -1)) lua_pushliteral(L, "unknown reason");
  /* One line of it: not the list of places that were searched; but where a file
     was found and could not be loaded, what the loader says of it. */
  const char *reason = lua_tostring(L, -1);
  size_t size = strcspn(reason, "\n");
  if (strncmp(reason, "error loading", 13) == 0 && reason[size]) {
    reason += size + 1 + strspn(reason + size + 1, "\t");
    size = strcspn(reason, "\n");
  } else if (size && reason[size - 1] == ':') {
    size--;
  }
  lua_pushlstring(L, reason, size);
  lua_pushfstring(L,
                  "the %s store is not built or cannot be loaded (it needs "
                  "%s): %s",
                  name, store_needs(name), lua_tostring(L, -1));
  return NULL;
}

/* The DSN of a quorum, of the list at 1, in the place of that; see
   csrc/stores/quorum/quorum.c. */
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

/* Misuse, where the list at 1 is none of DSNs. */
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

/* Leaves on the stack the DSN of the store that stands there in that of a quorum. */
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

/* Loads the stores of a DSN: it, and of a quorum those of its members. False, with a failure
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

/* The one agent of this Lua state: pushes it. */
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

/* Pushes the table that the manager at that index shares with its handles: see hll.h. The options of open are at 2. */
static void shared_push(lua_State *L, int manager, const open_options *options) {
  lua_createtable(L, 2, 2);
  lua_pushvalue(L, manager);
  lua_rawseti(L, -2, 1);
  if (options->hooks) hll_hooks_set(L, 2, manager + 1);
  if (options->on_lost || options->hooks) {
    lua_getfield(L, 2, "on_lost");
    lua_setfield(L, -2, "on_lost");
    lua_newtable(L);
    lua_createtable(L, 0, 1);
    lua_pushliteral(L, "k");
    lua_setfield(L, -2, "__mode");
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
Opens a manager: connects, and looks whether locks on this store exclude.
Blocks for at most the DSN's `connect_timeout` (10 s).
@function hierlock.open
@tparam[opt] string|{string,...} dsn `mysql://user:password@host:port/database?parameters`,
  `user:password@tcp(host:port)/database?parameters`,
  `postgresql://user:password@host:port/database?parameters`, `host=... dbname=...` (libpq's), `file:`,
  `file:/directory` or `null:`; or a list of these: a quorum; absent, `$HIERLOCK_DSN`; absent too, `file:`.
  Symfony Lock's `pgsql+advisory:...` and `flock:///directory` say `interoperate = "symfony"`, too
@tparam[opt] table options an unknown name raises
@number[opt=50] options.timeout seconds that an acquisition waits; 0 tries once;
  `math.huge` waits for ever
@number[opt=30] options.hold_timeout seconds, 1 to a year: after as long without
  a word from us the server frees our locks. A store without connections takes
  no notice of it
@tparam[opt] {string,...} options.levels 1 to 16 names from root to leaf; by default
  those that the table or directory records, else `user`, `account`, `resource`. Others
  than it records are a `mismatch`
@int[opt] options.buckets for each level, 1 to 2147483647; by default likewise, else
  10000000. PostgreSQL has none, and takes no notice of it
@int[opt=64] options.pool_size connections at most, 1 to 100000: one for each held
  or waiting lock. A store without connections takes no notice of it
@string[opt="majority"] options.quorum of a list of DSNs: `"majority"` or `"all"` of the stores
  have to grant. See docs/quorum.md
@tparam[opt] string|table options.interoperate `"symfony"`: each node is locked by its name, too, as
  PHP programs that use Symfony Lock on the same store lock it, and so both keep each other out; on
  PostgreSQL, on Redis and Valkey, and in files. The name is the ids with `/` between; or
  `{with = "symfony", names = {"user-{user}", "{user}-{account}", "invoice-{resource}"}}`: one for each
  level. There are no leases then on PostgreSQL and in files; on Redis there is nothing else
@string[opt] options.application shown to observers; by default the program's name
@tparam[opt] function options.on_lost called as `on_lost(handle, err)`, once for
  each lost lock, at the next call on the manager or one of its handles; never from
  another thread. What it raises comes out of that call. Of a lease it is also called
  when its time is up. Where there are other hooks, their event is a third argument
@tparam[opt] function options.on_wait called as `on_wait(event)`, when an acquisition begins. Of it and the
  four that follow, docs/observability.md has the fields of the event, and when each is called: always in a call
  on the manager or one of its handles. What they raise comes out of that call; they cannot yield
@tparam[opt] function options.on_grant `on_grant(event, handle)`: it was granted. If it raises, it is
  released
@tparam[opt] function options.on_timeout `on_timeout(event, err)`: it was not granted in time
@tparam[opt] function options.on_error `on_error(event, err)`: it failed otherwise
@tparam[opt] function options.on_release `on_release(event)`: it is not held any more, released or lost
@tparam[opt=false] boolean|function options.warn_unreleased reports each handle that nobody has
  released until the collector found it: `true` to stderr, or to a function `report(message)`, at
  the next call into hierlock; what it raises comes out of that call. `manager:close()` tells the
  last ones. The message names the line that acquired it
@tparam[opt=false] boolean|string|function options.check_order likewise, once for each kind of circle: learns
  the order in which the program, with all its threads, takes locks while it holds others, and
  reports the first that are taken in both orders, though nothing has deadlocked yet. For tests:
  with `HIERLOCK_CHECK=1` in the environment `warn_unreleased` is `true` unless said, and this is
  `"raise"`: as `true`, and a call against the order of `units` raises. See docs/deadlocks.md
@tparam[opt] {string,...} options.units 1 to 64 names of units of business data, in the order in which a program
  takes them: a target whose first id is such a name is of that unit, see `manager:unit`. A call that waits for a
  unit, while its coroutine holds one that comes after it, is reported, once for these two, as
  `check_order` says: to stderr unless that is said, not at all with `false`; or it raises. See
  docs/exclusive-control.md
@bool[opt=false] options.own_handles the program promises that a handle is released by the coroutine
  that acquired it, and by no other: then a coroutine that would wait, under a loop, for
  itself or in a circle of coroutines gets `deadlock` at once. See docs/deadlocks.md
@tparam[opt="auto"] string|function options.loop how a coroutine waits: by the loop
  `"cqueues"`, `"luv"`, `"copas"`, `"ngx"` or `"tarantool"`; `"auto"` notices ngx and cqueues by itself,
  and otherwise blocks; `"block"`. Or a function `loop(pending)` that yields as a loop of
  the program's own wants, and returns once `pending:done()`:
  `while not pending:done() do my_loop.wait_readable(pending:fd()) end`. What it raises
  ends the wait. Where a coroutine cannot yield, the call blocks, but for `"tarantool"`, whose
  fibers need no yield
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
  hll_options(L, 2, open_option, &options); /* so that what is wrong raises */
  if (list) quorum_dsn(L, options.all);
  options.config.dsn = hll_word(L, 1);
  if (!lua_isnil(L, 1) && !options.config.dsn)
    return hll_fail(L, HL_EDSN, "the DSN has a NUL byte");

  hll_manager *self = hll_newuserdata(L, sizeof *self);
  int manager = lua_gettop(L);
  *self = (hll_manager){.hooks = options.hooks};
  shared_push(L, manager, &options);
  hll_setuservalue(L, manager);
  luaL_getmetatable(L, HLL_MANAGER);
  lua_setmetatable(L, manager);

  hl_agent *agent = push_agent(L);
  const char *dsn = hl_dsn_default(options.config.dsn);
  if (!stores_load(L, dsn, stores)) return 2;
  /* Once more, as nothing allocates from here on: they point into the table. */
  options = options_begin(list);
  hll_options(L, 2, open_option, &options);
  options.config.dsn = dsn;
  options.config.stores = stores;
  options.config.layout = hll_layout_new(L, &options.layout);
  int status = hl_manager_open(&options.config, &self->manager, &error);
  hl_layout_unref(options.config.layout);
  if (status) return hll_failure(L, &error, 0);
  self->agent = hl_agent_ref(agent);
  self->own_handles = options.own_handles;
  self->warn_unreleased = options.warn_unreleased;
  self->check_order = options.check_order;
  self->prints_order = options.prints_order;
  self->raises_order = options.raises_order;
  self->check_units = options.check_units && options.config.units;
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

/* The end of its scope: tells of what it has ended, and what was to be told before. */
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
Opened by `hierlock.open`. Also closed by the end of the scope of
`local manager <close>` (Lua 5.4) and by the collector; its handles keep it from
being collected. `tostring(manager)` says whether it is open.
@type manager
*/

/***
Releases everything that the manager's handles hold, and ends its connections and
its threads. Waits until the store has given back what was released: a round trip, and two seconds at
most where a server hangs. The collector does not wait. Idempotent; any other method raises
afterwards, and the handles' methods find their locks released.
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

/* Copies: a finalizer may close the manager while they are pushed. */
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
    lua_pushstring(L, levels[i].name);
    lua_setfield(L, -2, "name");
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
Counters since the manager was opened (in a forked child: since its first use
there), and what is so now. Does not block, and asks no store. A new table at each call.
@function manager:stats
@treturn table whole numbers, and `wait_seconds`. So far: `acquired` (grants),
  `waited` (of those, 2 ms or longer), `released`, `timeouts`, `deadlocks`,
  `cancelled`, `busy`, `lost`, `errors` (other failures of acquisitions),
  `reconnects` (stale connections repaired unseen), `wait_seconds` (in all
  acquisitions, granted or not). Now: `held`, `waiting`, `connections` (0 on a
  store without them). And histograms: `levels`, a list from root to leaf of
  `{name = "user", waits = ..., holds = ...}`, of the acquisitions whose deepest target was on
  that level: `waits`, how long they waited, granted or not; `holds`, for how long was held what
  is not held any more. Each is `{count = n, seconds = sum, buckets = {...}}`: `buckets[i]`
  took at most `bounds[i]` seconds, and longer than `bounds[i - 1]`; the last one, beyond the
  list, longer than all `bounds` (0.0001 to 5000, in steps of 1, 2, 5). `hierlock.prometheus`
  makes a text of it all
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
  (void)luaL_newmetatable(L, HLL_MANAGER);
  hll_setfuncs(L, metamethods);
  lua_pushliteral(L, HLL_MANAGER);
  lua_setfield(L, -2, "__name");
  lua_newtable(L);
  hll_setfuncs(L, methods);
  hll_setfuncs(L, hll_acquire_methods);
  lua_setfield(L, -2, "__index");
  lua_pop(L, 1);
}

static int manager_plan_option(lua_State *L, const char *name, void *context) {
  if (strcmp(name, "mode") != 0) return 0;
  *(hl_mode *)context = hll_mode(L, -1);
  return 1;
}

/***
@type manager
*/

/***
As `hierlock.plan`, with the manager's levels and buckets: what its acquisitions lock. Does not
block.
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
A target of a unit, for `acquire` and all that takes targets: `manager:unit("order", 7)` is `{"order", "7"}`, by
a name that has been looked at. Without ids, the whole unit: who holds it keeps out all who want one of its. A `mode` may
be added to it.
@function manager:unit
@string name one of the option `units`; another one raises
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
  /* What allocates may close the manager: from here on it is not looked at. */
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
