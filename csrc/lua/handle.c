/*
 * handle.c - class hierlock.handle: a lock that is held, until it is released
 * by `release`, by `<close>`, by the collector, by the manager or by the store.
 */
/***
@module hierlock
*/
#include "hll.h"

#include "plan.h"
#include "start.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ------------------------------------------------------------- methods */

/* Ends the trace, where there is one: the handle at 1 holds nothing any more. */
static void trace_end(lua_State *L, const hll_handle *self, int status, const char *by) {
  if (!self->trace) return;
  hll_getuservalue(L, 1);
  hll_trace_end(L, lua_gettop(L), self->trace, status == HL_ELOST ? "lost" : by);
  lua_pop(L, 1);
}

static bool release_option(lua_State *L, const char *name, void *context) {
  if (strcmp(name, "confirm") != 0) return false;
  *(bool *)context = hll_boolean(L, name);
  return true;
}

/***
A lock that is held. The first of these events releases it: `handle:release`, the end of the scope
of `local handle <close>` (Lua 5.4), the collector, the manager's end, the end of the process or of
the connection.

A lease ends when its time is up, and not with its process or a connection. With
`auto_release=false` neither scope nor collector nor manager releases a lease.

In a forked child a copy of a handle is dead: the copy's methods say `released`, and the copy's
collection leaves the parent's lock alone.

`tostring(handle)` shows mode, targets and state. The fields keep their values after the release.
@type handle
*/

/***
The strongest mode of the targets: `"exclusive"`, `"update"` or `"shared"`.
@field mode
*/

/***
The fencing token: 16 hexadecimal digits. When a node has two exclusive holders in turn, the later
holder's token is greater (`<` on strings). `handle:extend` and `handle:upgrade` give a new token.
@field token
*/

/***
The number of the deepest target's level, 0 at the root.
@field level
*/

/***
Seconds from the call until the grant.
@field waited
*/

/***
`"session"` or `"lease"`. A handle has a lease when the program acquired it with a `ttl`, imported
it, or called `handle:to_lease`.
@field kind
*/

/***
The targets that the handle locks, or locked: a list of tables keyed by level. Each look at the
field makes a new list.
@field targets
*/

/***
Gives the lock back. The second call returns true and does nothing. Without
`confirm` the call does not block.
@function handle:release
@tparam[opt] table options an unknown name raises
@bool[opt=false] options.confirm wait for the store's answer, 10 s at most: the locks
  are free when the call returns. Without it the call sends the release and does not wait
  for the answer
@treturn[1] boolean true
@return[2] nil
@return[2] err `lost`: the handle lost the lock while it held it; `connection`, with `confirm`:
  the release is not confirmed, as the store did not answer, or as another call on the handle was
  under way, which the release follows, or as the manager was closed before and the handle had a
  session lock of a server; `released`: the lock belongs to the parent of this process
*/
static int handle_release(lua_State *L) {
  hll_handle *self = hll_handle_self(L);
  bool confirm = false;
  hl_error error;
  hll_options(L, 2, release_option, &confirm);
  int place = confirm ? hll_handle_pending(L) : 0;
  if (!self->lock) return hll_push_true(L);
  int status = confirm ? hl__lock_call(self->lock, &(hl__wish){.kind = HL__RELEASE},
                                       hll_pending_at(L, place), &error)
                       : hl_lock_release(self->lock, false, &error);
  if (!place) hll_losses_tell(L, self->owner);
  trace_end(L, self, status, "release");
  return hll_handle_answer(L, place, status, &error);
}

/***
Says whether the lock is held, as far as can be told without a round trip: looks at the
connection and at the clock. Does not block. The handle may lose the lock a moment later: only
the token keeps a late write out.
@function handle:is_held
@treturn boolean
*/
static int handle_is_held(lua_State *L) {
  hll_handle *self = hll_handle_check(L);
  lua_pushboolean(L, self->lock && hl_lock_is_held(self->lock));
  return 1;
}

/***
Asks the store whether the lock is held: one round trip. Blocks for the rest of
`hold_timeout` at most; by then the lock is lost anyhow.
@function handle:check
@treturn[1] boolean true
@return[2] nil
@return[2] err `lost`, `released`
*/
static int handle_check_held(lua_State *L) {
  const hll_handle *self = hll_handle_check(L);
  return hll_handle_call(L, self, hll_handle_pending(L), &(hl__wish){.kind = HL__CHECK});
}

/***
Says for how many seconds the store will keep the lock without a word from this process.
`math.huge`: as long as the process lives. 0: the handle holds nothing. Does not block. A
background thread of the process renews this time; for a lease, only with `auto_refresh`. A
lease's time counts from the moment at which the last refresh was sent.
@function handle:remaining
@treturn number seconds
*/
static int handle_remaining(lua_State *L) {
  hll_handle *self = hll_handle_check(L);
  int64_t left = self->lock ? hl_lock_remaining(self->lock) : 0;
  lua_pushnumber(L, left == HL_FOREVER ? (lua_Number)HUGE_VAL : (lua_Number)left / 1000);
  return 1;
}

/* Calls on_wait, where there are hooks. The hook may change the options, so they are read again.
   Returns false when the handle was collected meanwhile. */
static bool extend_tell(lua_State *L, int shared, const hll_handle *self, hll_call_options *options,
                        const hl_plan *plan, hll_trace **trace) {
  hll_manager *manager = self->owner;
  if (!manager->hooks) return true;
  hll_trace_begin(L, shared, manager, "extend", plan, trace);
  hll_call_options_read(L, 3, manager, options);
  return self->lock != NULL;
}

/***
Acquires more locks for the same handle, which releases them together with the rest. The call may
break the common order, so it can deadlock. Blocks like `manager:acquire`. After
`deadlock` or `lost` the handle holds nothing any more. After any other failure the
handle still holds its earlier locks. A server may keep some of the requested rows until the handle
is released.
@function handle:extend
@tparam table target as for `manager:acquire`
@tparam[opt] table options as for `manager:acquire`
@treturn[1] boolean true
@return[2] nil
@return[2] err `timeout`, `deadlock`, `lost`, `released`, `cancelled`, `not_provisioned`,
  `unsafe_server`, `store`; `unsupported`: the handle has a lease
*/
static int handle_extend(lua_State *L) {
  hll_call_options options;
  hl_error error;
  hll_handle *self = hll_handle_check(L);
  int shared = hll_manager_shared(L, 3);
  hll_plan *borrowed = hll_plan_borrow(L, shared);
  hll_pending *pending = hll_starts(L) ? hll_pending_push(L, shared, 1) : NULL;
  hll_manager *manager = self->owner;
  hll_call_options_begin(L, manager, HLL_ALL, &options);
  hll_call_options_read(L, 3, manager, &options);
  if (options.core.ttl) hll_misuse(L, "extend takes no ttl");
  if (!self->lock) return hll_handle_collected(L);
  hl_plan *plan = hll_plan_begin(L, borrowed, hl_plan_layout(hl_lock_plan(self->lock)));
  hll_target_add(L, 2, plan, options.mode);
  hll_trace **trace = pending ? &pending->trace : &self->extending;
  if (manager->manager) hll_order_check(L, manager, plan, &options.core);
  if (!extend_tell(L, shared, self, &options, plan, trace)) return hll_handle_collected(L);
  int place = pending ? shared + 2 : 0;
  const hl__wish wish = {.kind = HL__EXTEND, .plan = plan, .options = &options.core};
  int status = hl__lock_call(self->lock, &wish, hll_pending_at(L, place), &error);
  int values = status ? hll_acquire_refused(L, &error, plan, manager)
                      : hll_handle_answer(L, place, status, &error);
  borrowed->borrowed = false;
  if (status)
    hll_trace_failed(L, shared, trace, lua_gettop(L));
  else if (!pending || !pending->pending)
    hll_trace_extended(L, shared, trace, 1);
  if (status == HL_DEADLOCK) trace_end(L, self, status, "deadlock");
  return values;
}

/* Drops the update holder from the list: it is the handle itself. */
static void others_keep(hll_holders *found) {
  size_t kept = 0;
  for (size_t i = 0; i < found->n; i++)
    if (found->list[i].mode != HL_UPDATE) found->list[kept++] = found->list[i];
  found->n = kept;
}

/* Pushes a plan of what the handle at 1 wants to be, and returns it. Raises when the handle has no
   update lock. Returns NULL when the handle was collected. The caller looks again, as later
   allocations may collect it, too. */
static const hl_plan *push_upgraded(lua_State *L, const hll_handle *self) {
  hll_plan *made = hll_plan_push(L);
  if (!self->lock) return NULL;
  if (!hl__plan_updates(hl_lock_plan(self->lock)))
    hll_misuse(L, "the handle is none for update: acquire it with mode=\"update\"");
  made->plan = hl__plan_converted(hl_lock_plan(self->lock), true);
  if (!made->plan) (void)luaL_error(L, "not enough memory");
  return made->plan;
}

static int upgrade_failed(lua_State *L, const hll_manager *manager, hl_error *error,
                          const hl_plan *plan) {
  hll_holders *found = hll_holders_push(L);
  if ((error->status == HL_TIMEOUT || error->status == HL_DEADLOCK) && manager->manager)
    hll_holders_find(found, manager->manager, plan);
  others_keep(found);
  return hll_acquire_failure(L, error, plan, found);
}

/***
Makes an update lock exclusive: waits until the readers of its nodes have gone. Newcomers wait
meanwhile where the store is fair. A node has only one update holder, so two upgrades of a node
never wait for each other. A handle that is exclusive already stays exclusive. The upgrade gives a
new token; docs/update-locks.md names the exceptions. Blocks like `manager:acquire`.
@function handle:upgrade
@tparam[opt] table options an unknown name raises
@number[opt] options.timeout seconds, as for `manager:acquire`
@treturn[1] boolean true: `handle.mode` is `"exclusive"`
@return[2] nil
@return[2] err `timeout`, `cancelled`, `connection`, `store`: the handle keeps its update lock.
  On some stores a failed upgrade may keep readers out, see docs/update-locks.md.
  `deadlock`, `lost`, `released`: the handle holds nothing. Only a handle of several nodes can be in
  a deadlock, or a handle on an old MySQL or MariaDB (see docs/update-locks.md)
@raise when the program did not acquire it with `mode="update"`
*/
static int handle_upgrade(lua_State *L) {
  hll_call_options options;
  hl_error error;
  hll_handle *self = hll_handle_check(L);
  lua_settop(L, 2);
  int place = hll_handle_pending(L);
  hll_call_options_begin(L, self->owner, HLL_TIMEOUT, &options);
  const hl_plan *plan = push_upgraded(L, self);
  hll_call_options_read(L, 2, self->owner, &options);
  if (!self->lock || !plan) return hll_handle_collected(L);
  const hl__wish wish = {.kind = HL__UPGRADE, .options = &options.core};
  int status = hl__lock_call(self->lock, &wish, hll_pending_at(L, place), &error);
  if (status == HL_OK) return hll_handle_answer(L, place, status, &error);
  int values = upgrade_failed(L, self->owner, &error, plan);
  if (status == HL_DEADLOCK) trace_end(L, self, status, "deadlock");
  return values;
}

/***
Makes a handle that `handle:upgrade` has made exclusive an update lock again. Readers may share its
nodes then, and no other writer has come in between. A handle that is an update lock already stays
an update lock. Blocks for a round trip.
@function handle:downgrade
@treturn[1] boolean true
@return[2] nil
@return[2] err `unsupported`: the handle stays exclusive. Sessions of MySQL and MariaDB give back no
  single lock. Sessions of PostgreSQL give back no lock that they had before a later
  `handle:extend`. `lost`, `released`: the handle holds nothing
@raise when the program did not acquire it with `mode="update"`
*/
static int handle_downgrade(lua_State *L) {
  hll_handle *self = hll_handle_check(L);
  lua_settop(L, 1);
  int place = hll_handle_pending(L);
  (void)push_upgraded(L, self);
  return hll_handle_call(L, self, place, &(hl__wish){.kind = HL__DOWNGRADE});
}

/* --------------------------------------------------------- metamethods */

/* Pushes the targets of a copy of the plan: meanwhile an extend may end, or a finalizer may
   collect the handle. */
static int push_targets(lua_State *L, const hll_handle *self) {
  hll_plan *copy = hll_plan_push(L);
  if (self->lock) copy->plan = hl_plan_copy(hl_lock_plan(self->lock));
  const hl_plan *plan = copy->plan;
  if (!plan) return luaL_error(L, "not enough memory");
  hll_targets_push(L, plan);
  return 1;
}

static const char *mode_name(const hl_lock *lock) { return hl_mode_name(hl_lock_mode(lock)); }

/* Methods (upvalue 1), and the fields mode, token, level, waited, kind, targets. */
static int handle_index(lua_State *L) {
  lua_settop(L, 2);
  lua_pushvalue(L, 2);
  lua_rawget(L, lua_upvalueindex(1));
  if (!lua_isnil(L, -1)) return 1;
  const hll_handle *self = hll_handle_test(L, 1);
  const char *field = hll_word(L, 2);
  if (!self || !self->lock || !field) return 1;

  const hl_lock *lock = self->lock;
  if (strcmp(field, "mode") == 0) {
    lua_pushstring(L, mode_name(lock));
  } else if (strcmp(field, "token") == 0) {
    hll_token_push(L, hl_lock_token(lock));
  } else if (strcmp(field, "level") == 0) {
    lua_pushinteger(L, (lua_Integer)hl_lock_level(lock));
  } else if (strcmp(field, "waited") == 0) {
    lua_pushnumber(L, (lua_Number)hl_lock_waited(lock) / 1000);
  } else if (strcmp(field, "kind") == 0) {
    lua_pushstring(L, hl_lock_kind(lock) == HL_LEASE ? "lease" : "session");
  } else if (strcmp(field, "targets") == 0) {
    return push_targets(L, self);
  } else {
    return 1;
  }
  return 1;
}

static int handle_tostring(lua_State *L) {
  static const char *const states[] = {
      [HL_HELD] = "held",     [HL_RELEASED] = "released",          [HL_LOST] = "lost",
      [HL_IN_USE] = "in use", [HL_FOREIGN] = "of another process", [HL_OVER] = "over",
  };
  char text[512];
  hll_handle *self = hll_handle_self(L);
  if (!self->lock) {
    lua_pushliteral(L, "hierlock.handle (released)");
    return 1;
  }
  lua_pushfstring(L, "hierlock.handle (%s %s, %s)", mode_name(self->lock),
                  hl_plan_describe(hl_lock_plan(self->lock), text, sizeof text),
                  states[hl_lock_look(self->lock)]);
  return 1;
}

/* Notes, where the program wants it, that only the collector releases the lock. */
static void report_unreleased(hll_manager *manager, hl_lock *lock) {
  if (manager->warn_unreleased && hl_lock_auto_releases(lock) && hl_lock_look(lock) == HL_HELD)
    hll_unreleased_report(manager, lock);
}

/* Frees; never blocks, never raises. */
static int handle_gc(lua_State *L) {
  hll_handle *self = hll_handle_test(L, 1);
  if (self && self->lock) {
    hl_lock *lock = self->lock;
    self->lock = NULL;
    hll_untie(&self->tied);
    report_unreleased(self->owner, lock);
    if (self->trace) {
      int status = hl_lock_close(lock, NULL);
      hll_trace_queue(self->trace, status == HL_ELOST ? "lost" : "collector");
    }
    hl_lock_free(lock);
  }
  if (self) { /* of calls that ended by an error of Lua's */
    hll_trace_queue(self->trace, NULL);
    hll_trace_queue(self->extending, NULL);
  }
  return 0;
}

static int handle_close(lua_State *L) {
  hll_handle *self = hll_handle_test(L, 1);
  if (!self || !self->lock) return 0;
  int status = hl_lock_close(self->lock, NULL);
  trace_end(L, self, status, "scope");
  return 0;
}

static const luaL_Reg methods[] = {
    {"is_held", handle_is_held},
    {"remaining", handle_remaining},
    {"export", hll_handle_export},
    {NULL, NULL},
};

const luaL_Reg hll_handle_calls[] = {
    {"release", handle_release},       {"check", handle_check_held},
    {"extend", handle_extend},         {"upgrade", handle_upgrade},
    {"downgrade", handle_downgrade},   {"refresh", hll_handle_refresh},
    {"to_lease", hll_handle_to_lease}, {NULL, NULL},
};

static const luaL_Reg metamethods[] = {
    {"__gc", handle_gc},
    {"__close", handle_close},
    {"__tostring", handle_tostring},
    {NULL, NULL},
};

void hll_handle_register(lua_State *L) {
  hll_class_new(L, HLL_HANDLE, metamethods, methods);
  hll_setfuncs(L, hll_handle_calls);
  lua_pushvalue(L, -1);
  lua_setfield(L, -3, "methods"); /* for hierlock's own Lua code */
  lua_pushcclosure(L, handle_index, 1);
  lua_setfield(L, -2, "__index");
  lua_pop(L, 1);
}
