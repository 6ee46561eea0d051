/*
 * acquire.c - the methods of a manager that acquire, and manager:holders.
 * Here a call passes from Lua into the core: targets become a plan, the plan a
 * lock, the lock a handle. (From there on, read csrc/core/start.c.)
 */
/***
@module hierlock
*/
/***
@type manager
*/
#include "hll.h"

#include "clock.h"
#include "error.h"
#include "start.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/***
Lists the programs that an exclusive request for the target would have to wait for: those which hold
or await a lock that conflicts with it. Without a target, lists all locks that are held or awaited.

The call costs the server more than a lock does: it is for people to ask, not for a loop. Blocks for
about a second at most. The list is a snapshot. MariaDB shows an old snapshot to callers that look
more often than every 100 ms, and it shows only programs that use hierlock.
@function manager:holders
@tparam[opt] table target as for `manager:acquire`; `nil` raises
@treturn[1] {table,...} for each lock its `application`, `host`, `path`, `mode`
  (`"exclusive"`, `"update"`, `"shared"`), `waiting` (boolean) and `kind` (`"session"`, `"lease"`).
  Where they are known, also `pid`, `label`, `since` (Unix time of the request, seconds) and
  `session`, the store's name for it.
  `session` is the connection's id on MySQL and MariaDB, the number of the server's process on
  PostgreSQL, and `PID.NUMBER` on `file:`. A lease also has `owner`, `id` and `remaining` (seconds).
  The list is empty when no lock is in the way
@return[2] nil
@return[2] err `timeout` (the store does not answer now), `busy`, `connection`,
  `unsafe_server`, `store` (no privilege to look), `unsupported`. Memcached shows no locks. MySQL
  and MariaDB without performance_schema show some: `err.holders` then has these
*/
int hll_manager_holders(lua_State *L) {
  hl_error error;
  hll_manager *self = hll_manager_check(L);
  bool all = lua_isnone(L, 2); /* nil is a mistake */
  int shared = hll_manager_shared(L, 2);
  hll_holders *found = hll_holders_push(L);
  hll_plan *borrowed = hll_plan_borrow(L, shared);
  hl_manager *manager = hll_manager_still_open(L, self);
  hl_plan *plan = hll_plan_begin(L, borrowed, hl_manager_layout(manager));
  if (!all) hll_target_add(L, 2, plan, HL_EXCLUSIVE);
  int status = hl_manager_holders(manager, all ? NULL : plan, hll_holders_add, found, &error);
  borrowed->borrowed = false;
  if (status) {
    (void)hll_failure(L, &error, 2);
    if (found->n > 0) {
      hll_holders_list(L, found);
      lua_setfield(L, -2, "holders");
    }
    return 2;
  }
  if (found->error.status) return luaL_error(L, "not enough memory");
  hll_holders_list(L, found);
  return 1;
}

/* A call that acquires. The call's Lua values lie on the stack, behind its n arguments: the shared
   table at n + 1, the plan and the handle. Behind these lies the pending, of a call to be started.
   */
typedef struct call {
  hll_manager *self;
  hl_manager *manager;
  int n;
  hll_handle *handle;
  hll_pending *pending; /* NULL: it blocks, or is granted at once */
  bool at_once;         /* it is tried so first: the pending is made if it has to wait */
  hll_call_options options;
  hll_plan *borrowed;
  hl_plan *plan; /* to be filled in between call_begin and call_acquire; NULL: of an import */
} call;

/* The manager is at 1, the options are at n. */
static void call_begin(lua_State *L, call *c, int n, unsigned takes) {
  c->self = hll_manager_check(L);
  c->n = n;
  c->pending = NULL;
  const bool starts = hll_starts(L);
  c->at_once = starts && hll_awaits(L) && takes == HLL_ALL && !c->self->hooks &&
               !hl_manager_blocks(c->self->manager);
  hll_call_options_begin(L, c->self, takes, &c->options);
  int shared = hll_manager_shared(L, n);
  hll_manager_account(L, c->self);
  c->borrowed = hll_plan_borrow(L, shared);
  c->handle = hll_handle_push(L, c->self, shared);
  if (starts && !c->at_once) c->pending = hll_pending_push(L, shared, lua_gettop(L));

  c->manager = hll_manager_still_open(L, c->self);
  hll_call_options_read(L, n, c->self, &c->options);
  c->plan = hll_plan_begin(L, c->borrowed, hl_manager_layout(c->manager));
}

/* Calls on_wait. The hook may close the manager and change the options: so both are read again. */
static void call_tell(lua_State *L, call *c, const char *name) {
  hll_trace_begin(L, c->n + 1, c->self, name, c->plan,
                  c->pending ? &c->pending->trace : &c->handle->trace);
  c->manager = hll_manager_still_open(L, c->self);
  hll_call_options_read(L, c->n, c->self, &c->options);
}

static int call_granted(lua_State *L, call *c) {
  int shared = c->n + 1;
  c->borrowed->borrowed = false;
  lua_settop(L, shared + (c->pending ? 3 : 2));
  if (c->handle->trace) hll_trace_granted(L, shared, &c->handle->trace, shared + 2);
  return 1;
}

static int call_end(lua_State *L, call *c, int status, hl_error *error) {
  int shared = c->n + 1;
  if (status) {
    int values =
        c->plan ? hll_acquire_refused(L, error, c->plan, c->self) : hll_failure(L, error, 0);
    c->borrowed->borrowed = false;
    hll_trace_failed(L, shared, c->pending ? &c->pending->trace : &c->handle->trace, lua_gettop(L));
    return values;
  }
  return call_granted(L, c);
}

static int call_acquire(lua_State *L, call *c) {
  hl_error error;
  hll_order_check(L, c->self, c->plan, &c->options.core);
  if (c->at_once) {
    /* What comes behind an allocation looks again, as a finalizer may have closed the manager. */
    if (hl__acquire_at_once(c->manager, c->plan, &c->options.core, &c->handle->lock))
      return call_granted(L, c);
    c->pending = hll_pending_push(L, c->n + 1, c->n + 3);
    c->manager = hll_manager_still_open(L, c->self);
    hll_call_options_read(L, c->n, c->self, &c->options);
  }
  if (c->self->hooks) call_tell(L, c, "acquire");
  int status = c->pending
                   ? hl_start(c->manager, c->plan, &c->options.core, &c->pending->pending, &error)
                   : hl_acquire(c->manager, c->plan, &c->options.core, &c->handle->lock, &error);
  return call_end(L, c, status, &error);
}

/* Raises where the manager's first n levels are not those that acquire_user and its like name. */
static void levels_check(lua_State *L, const hl_layout *layout, unsigned n) {
  static const char *const levels[] = {"user", "account", "resource"};
  for (unsigned i = 0; i < n; i++) {
    const char *name = hl_layout_name(layout, i);
    if (!name || strcmp(name, levels[i]) != 0)
      hll_misuse(L, "the manager has no level '%s' at its place; use acquire", levels[i]);
  }
}

/* Acquires a target of n ids, from stack index 2 on; the options follow the ids. */
static int acquire_ids(lua_State *L, unsigned n) {
  hl_id ids[3];
  char rooms[3][24];
  hl_error error;
  call c;
  call_begin(L, &c, (int)n + 2, HLL_ALL);
  hl_layout *layout = hl_manager_layout(c.manager);
  levels_check(L, layout, n);
  for (unsigned i = 0; i < n; i++)
    ids[i] = hll_id(L, (int)i + 2, hl_layout_name(layout, i), rooms[i]);
  if (hl_plan_add(c.plan, ids, n, c.options.mode, false, &error)) return hll_failure(L, &error, 0);
  return call_acquire(L, &c);
}

/***
Acquires a user, and keeps everything below it from others. For managers whose first level
is `user`. Other managers raise.
@function manager:acquire_user
@tparam string|integer user
@tparam[opt] table options as for `manager:acquire`
@treturn[1] handle
@return[2] nil
@return[2] err as from `manager:acquire`
*/
static int acquire_user(lua_State *L) { return acquire_ids(L, 1); }

/***
Acquires an account. For managers whose levels begin with `user`, `account`. Other managers
raise.
@function manager:acquire_account
@tparam string|integer user
@tparam string|integer account
@tparam[opt] table options as for `manager:acquire`
@treturn[1] handle
@return[2] nil
@return[2] err as from `manager:acquire`
*/
static int acquire_account(lua_State *L) { return acquire_ids(L, 2); }

/***
Acquires a resource. For managers whose levels begin with `user`, `account`,
`resource`. Other managers raise.
@function manager:acquire_resource
@tparam string|integer user
@tparam string|integer account
@tparam string|integer resource
@tparam[opt] table options as for `manager:acquire`
@treturn[1] handle
@return[2] nil
@return[2] err as from `manager:acquire`
*/
static int acquire_resource(lua_State *L) { return acquire_ids(L, 3); }

/***
Acquires several resources of the same account, in any order, free of deadlock. Grants all of
them, or nothing. For managers whose levels are `user`, `account`, `resource`. Other managers raise.
@function manager:acquire_resources
@tparam string|integer user
@tparam string|integer account
@tparam {string|integer,...} resources at least one. A repeated resource counts once
@tparam[opt] table options as for `manager:acquire`
@treturn[1] handle
@return[2] nil
@return[2] err as from `manager:acquire`
*/
static int acquire_resources(lua_State *L) {
  static const char *const keys[] = {"user", "account", "resources"};
  call c;
  (void)hll_manager_check(L);
  lua_settop(L, 5);
  for (int i = 0; i < 3; i++)
    if (lua_isnil(L, i + 2)) hll_misuse(L, "%s is missing", keys[i]);
  lua_createtable(L, 0, 3);
  for (int i = 0; i < 3; i++) {
    lua_pushvalue(L, i + 2);
    lua_setfield(L, -2, keys[i]);
  }
  lua_replace(L, 2);
  call_begin(L, &c, 5, HLL_ALL);
  levels_check(L, hl_manager_layout(c.manager), 3);
  hll_target_add(L, 2, c.plan, c.options.mode);
  return call_acquire(L, &c);
}

/***
Acquires a target: a shared lock on each ancestor, and the node itself. Blocks until the store
grants it, for `timeout` at most (and a second more, where the manager has to connect first). A call
that fails holds nothing.
@function manager:acquire
@tparam table target `{user="u1", account="a1", resource="r1"}`: the deepest key decides the level.
  Or `{user="u1", account="a1", resources={"r1", "r2"}}`.
  Or positions, `{"u1", "a1", "r1"}`. Each may have a `mode`. A manager with other levels takes
  their names. An id is a string of 1 to 1,024 bytes, any bytes, or an integer. An integer is the
  same id as its decimal digits
@tparam[opt] table options an unknown name raises
@number[opt] options.timeout seconds, to the millisecond, never early. 0 tries once.
  `math.huge` waits for ever. The default is the manager's
@string[opt="exclusive"] options.mode `"exclusive"`, `"update"` (see `handle:upgrade`) or
  `"shared"`, for a target without a mode. A target on an inner level is locked exclusively, and
  `handle.mode` says so. But a space with intentions shares all that is below a shared one
@string[opt] options.label shown to observers: any bytes. Observers see some 120 of them
@number[opt] options.ttl makes it a lease: seconds from the grant, 0.001 to ten years. The lease
  ends then, unless it is refreshed. Without a `ttl` the call takes a session lock
@bool[opt=false] options.auto_refresh of a lease: a thread of the manager's refreshes it
  thrice in its time
@bool[opt=true] options.auto_release of a lease. With false neither the collector nor
  the end of a scope, of the manager or of the process releases it.
@string[opt] options.owner of a lease: the owner's name. A name has 1 to 127 bytes without NUL. The
  default is the application
@treturn[1] handle
@return[2] nil
@return[2] err `timeout`, `busy`, `connection`, `cancelled` (another thread closed the
  manager, or an administrator ended the wait), `not_provisioned`, `unsafe_server`,
  `mismatch`, `store`. For a lease also `lost`: its time was up before the store had answered. And
  `unsupported`: the store has no leases. The call fails with `deadlock` at once where this thread
  would wait for itself, or in a circle of threads, and its timeout is 1 s or longer. A server may
  find other circles later, see docs/deadlocks.md
*/
static int acquire_target(lua_State *L) {
  call c;
  call_begin(L, &c, 3, HLL_ALL);
  hll_target_add(L, 2, c.plan, c.options.mode);
  return call_acquire(L, &c);
}

/***
Acquires any mixture of targets in the common order, free of deadlock. The store grants all
of them, or nothing.
@function manager:acquire_all
@tparam {table,...} targets at least one, each as for `manager:acquire`. Each may have a `mode`
@tparam[opt] table options as for `manager:acquire`
@treturn[1] handle
@return[2] nil
@return[2] err as from `manager:acquire`
*/
static int acquire_all(lua_State *L) {
  call c;
  call_begin(L, &c, 3, HLL_ALL);
  hll_targets_add(L, 2, c.plan, c.options.mode);
  return call_acquire(L, &c);
}

/***
Takes over a lease from the text that `handle:export` returned, and refreshes it. When two callers
import the same text, the later import wins, and the handle of the earlier import is `lost`. Blocks
for a round trip.
@function manager:import
@string text from `handle:export`. Other texts do no harm
@tparam[opt] table options an unknown name raises
@number[opt] options.ttl seconds from now. The default is the `ttl` of the acquisition
@bool[opt=false] options.auto_refresh as for `manager:acquire`
@bool[opt=true] options.auto_release as for `manager:acquire`
@treturn[1] handle
@return[2] nil
@return[2] err `lost`: the lease has ended. `mismatch`: the text is damaged, or of another
  tree. Other codes as from `manager:acquire`
*/
static int import_text(lua_State *L) {
  call c;
  hl_error error;
  size_t size;
  call_begin(L, &c, 3, HLL_TTL);
  if (lua_type(L, 2) != LUA_TSTRING)
    hll_misuse(L, "text must be a string, not %s", luaL_typename(L, 2));
  c.plan = NULL; /* the text has it */
  if (c.self->hooks) call_tell(L, &c, "import");
  const char *text = lua_tolstring(L, 2, &size);
  int status =
      c.pending
          ? hl_start_import(c.manager, text, size, &c.options.core, &c.pending->pending, &error)
          : hl_import(c.manager, text, size, &c.options.core, &c.handle->lock, &error);
  return call_end(L, &c, status, &error);
}

/* Each target is a wait of its own: a program hardly wants more at a time. */
#define ANY_MAX 1000

/* Pushes a list of n empty plans, and an array that will point to them. */
static const hl_plan **push_plans(lua_State *L, size_t n) {
  lua_createtable(L, (int)n, 0);
  for (size_t i = 1; i <= n; i++) {
    (void)hll_plan_push(L);
    lua_rawseti(L, -2, (int)i);
  }
  return lua_newuserdata(L, n * sizeof(hl_plan *));
}

/* (manager, targets, options): the part of manager:acquire_any that waits. The function `check`
   only looks whether the order allows the call; see lua/hierlock/init.lua. Allocates in Lua only
   what hll.h allows. */
static int wait_any(lua_State *L) {
  hll_call_options options;
  hl_error error;
  hll_manager *self = hll_manager_check(L);
  bool checks = lua_toboolean(L, lua_upvalueindex(HLL_CHECKS));
  if (checks && !self->check_order && !self->check_units) return 0;
  hll_call_options_begin(L, self, HLL_ALL, &options);
  int shared = hll_manager_shared(L, 3);
  hll_manager_account(L, self);
  if (!lua_istable(L, 2))
    hll_misuse(L, "targets must be a list of targets, not %s", luaL_typename(L, 2));
  size_t n = hll_rawlen(L, 2), fields = 0;
  if (n == 0) hll_misuse(L, "targets must not be empty");
  if (n > ANY_MAX) hll_misuse(L, "targets are %d; at most %d can be waited for", (int)n, ANY_MAX);
  (void)hll_handle_push(L, self, shared);
  hll_pending *pending = hll_pending_push(L, shared, shared + 1);
  const hl_plan **plans = push_plans(L, n);
  hl_manager *manager = hll_manager_still_open(L, self);
  hll_call_options_read(L, 3, self, &options);
  bool starts = hll_starts(L);
  if (!starts) options.core.awaited = true;
  for (size_t i = 0; i < n; i++) {
    lua_rawgeti(L, shared + 3, (int)i + 1);
    hl_plan *plan = hll_plan_begin(L, hll_plan_test(L, -1), hl_manager_layout(manager));
    lua_rawgeti(L, 2, (int)i + 1);
    hll_target_add(L, -1, plan, options.mode);
    lua_pop(L, 2);
    hll_order_check(L, self, plan, &options.core);
    plans[i] = plan;
  }
  if (checks) return 0;
  for (lua_pushnil(L); lua_next(L, 2); lua_pop(L, 1)) fields++;
  if (fields != n) hll_misuse(L, "targets must be a list; it has other keys than 1 to %d", (int)n);
  if (hl_start_any(manager, plans, n, &options.core, &pending->pending, &error))
    return hll_failure(L, &error, 0);
  lua_settop(L, shared + 2);
  if (starts) return 1;
  lua_pushcfunction(L, hll_pending_wait);
  lua_pushvalue(L, shared + 2);
  lua_call(L, 1, 2);
  hl_pending *whole = pending->pending;
  pending->pending = NULL;
  hl_pending_free(whole);
  return 2;
}

/* Pushes whether a try on this manager blocks. */
static int tries_block(lua_State *L) {
  lua_pushboolean(L, hl_manager_blocks(hll_manager_check(L)->manager));
  return 1;
}

/***
The parts of manager:acquire_any. For hierlock's own Lua code.
@table core.any
@local
@field block waits for any of several targets
@field start starts this wait
@field await starts it for a coroutine that waits for it
@field check only checks the order of the targets
@field tries_block says whether a try blocks
*/
void hll_any_register(lua_State *L) {
  lua_newtable(L);
  lua_pushcfunction(L, tries_block);
  lua_setfield(L, -2, "tries_block");
  lua_pushcfunction(L, wait_any);
  lua_setfield(L, -2, "block");
  for (int awaits = 0; awaits < 2; awaits++) {
    lua_pushnil(L);
    lua_pushboolean(L, 1);
    lua_pushboolean(L, awaits);
    lua_pushcclosure(L, wait_any, HLL_AWAITS);
    lua_setfield(L, -2, awaits ? "await" : "start");
  }
  for (int i = 1; i < HLL_CHECKS; i++) lua_pushnil(L);
  lua_pushboolean(L, 1);
  lua_pushcclosure(L, wait_any, HLL_CHECKS);
  lua_setfield(L, -2, "check");
  lua_setfield(L, -2, "any");
}

const luaL_Reg hll_acquire_methods[] = {
    {"acquire", acquire_target},
    {"acquire_user", acquire_user},
    {"acquire_account", acquire_account},
    {"acquire_resource", acquire_resource},
    {"acquire_resources", acquire_resources},
    {"acquire_all", acquire_all},
    {"import", import_text},
    {NULL, NULL},
};
