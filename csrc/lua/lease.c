/*
 * lease.c - what a manager and a handle do with leases: exporting, refreshing, listing, revoking.
 */
/*** @module hierlock */
#include "hll.h"

#include "start.h"

#include <stdlib.h>
#include <string.h>

/* -------------------------------------------------------------- handles */

/***
@type handle
*/

/***
Sets the time at which a lease ends, sooner or later than before. Blocks for a
round trip. Works also after the lease's
time is up: the answer then says whether another program has had its nodes meanwhile.
@function handle:refresh
@number[opt] ttl seconds from now. The default is the `ttl` of the acquisition
@treturn[1] boolean true: the lease was unbroken
@return[2] nil
@return[2] err `lost`: another program has taken its nodes, imported it or revoked it.
  `err.revoked_by` and `err.reason` tell of a revocation. Or the new time was up before the store
  had answered. `released`. `unsupported`: the handle has a session lock. `timeout`, `connection`,
  `store`: the call failed, and the store may have refreshed the lease or not
*/
int hll_handle_refresh(lua_State *L) {
  hll_handle *self = hll_handle_check(L);
  hl_error error;
  int64_t ms = lua_isnoneornil(L, 2) ? 0 : hll_ttl(L, 2);
  int place = hll_handle_pending(L);
  if (!self->lock) return hll_handle_collected(L);
  const hl__wish wish = {.kind = HL__REFRESH, .ttl = ms};
  int status = hl__lock_call(self->lock, &wish, hll_pending_at(L, place), &error);
  if (status == HL_OK && !place) hll_handle_rewatch(L, 1);
  return hll_handle_answer(L, place, status, &error);
}

/***
Makes a lease of a session lock. No other program can take the lock in between. The token stays.
Blocks for a round trip.
@function handle:to_lease
@tparam table options an unknown name raises
@number options.ttl seconds from now
@string[opt] options.owner as for `manager:acquire`, as are the next two
@bool[opt=false] options.auto_refresh
@bool[opt=true] options.auto_release
@string[opt] options.label shown to observers
@treturn[1] boolean true
@return[2] nil
@return[2] err `unsupported`: the handle has a lease already, or the store has no leases. `lost`,
  `released`: the handle holds nothing. After other failures the handle keeps its session lock
*/
int hll_handle_to_lease(lua_State *L) {
  hll_handle *self = hll_handle_check(L);
  hll_call_options options;
  lua_settop(L, 2);
  hll_call_options_begin(L, self->owner, HLL_LABEL | HLL_OWNER | HLL_TTL, &options);
  int place = hll_handle_pending(L);
  hll_call_options_read(L, 2, self->owner, &options);
  if (!options.core.ttl) hll_misuse(L, "ttl is missing");
  const hl__wish wish = {.kind = HL__TO_LEASE, .options = &options.core};
  return hll_handle_call(L, self, place, &wish);
}

/* (text in C, handle): pushes the text as a string. */
static int push_text(lua_State *L) {
  lua_pushstring(L, lua_touserdata(L, 1));
  return 1;
}

/***
Returns a printable text. With the text another process, or this one, takes the lease over by
`manager:import`. A program that has the text has the lock: keep the text where only the program
reads it, such as a session of a web server. The lease goes on, and ends when its time is up. The
handle is `released`. Does not block. Where `on_release` raises, nothing was exported, and the
handle keeps the lease.
@function handle:export
@treturn[1] string
@return[2] nil
@return[2] err `lost`, `released`; `unsupported`: the handle has a session lock
*/
int hll_handle_export(lua_State *L) {
  hll_handle *self = hll_handle_check(L);
  hl_error error;
  char *text;
  lua_settop(L, 1);
  lua_pushcfunction(L, push_text);
  if (!self->lock) return hll_handle_collected(L);
  int status = hl_lock_text(self->lock, &text, &error);
  if (status) return hll_failure(L, &error, 0);
  lua_pushlightuserdata(L, text);
  int raised = lua_pcall(L, 1, 1, 0); /* protected, as the text has to be freed */
  free(text);
  if (raised) return lua_error(L); /* it is held still */
  /* Told before it is left: a hook that raises loses the text, and the lease is held still. */
  hll_getuservalue(L, 1);
  hll_trace_end(L, lua_gettop(L), self->trace, "export");
  lua_pop(L, 1);
  if (!self->lock) return hll_handle_collected(L); /* by a finalizer or a hook meanwhile */
  status = hl_lock_export(self->lock, NULL, &error);
  if (status) return hll_failure(L, &error, 0);
  return 1;
}

/* ------------------------------------------------------------- managers */

/***
@type manager
*/

/* Takes the value on the top, a target, into the plan. */
typedef struct filter {
  hl_filter core;
  hl_plan *plan;
} filter;

static bool filter_option(lua_State *L, const char *name, void *context) {
  filter *self = context;
  if (strcmp(name, "owner") == 0) {
    self->core.owner = hll_text(L, "owner", HL_OWNER_MAX);
  } else if (strcmp(name, "id") == 0) {
    self->core.id = hll_text(L, "id", HL_LEASE_ID_SIZE - 1);
  } else if (strcmp(name, "over") == 0) {
    self->core.over = hll_boolean(L, name);
  } else if (strcmp(name, "target") == 0) {
    hll_target_add(L, lua_gettop(L), self->plan, HL_EXCLUSIVE);
    self->core.plan = self->plan;
  } else {
    return false;
  }
  return true;
}

/* The filter is at 2; `borrowed` has been made. */
static void filter_read(lua_State *L, hll_plan *borrowed, hl_manager *manager, filter *self) {
  *self = (filter){HL_FILTER_INIT, hll_plan_begin(L, borrowed, hl_manager_layout(manager))};
  hll_options(L, 2, filter_option, self);
}

/***
Lists the space's leases whose time is not up. Costs the store more than a lock does.
@function manager:leases
@tparam[opt] table filter selects the leases for which all its fields hold
@string[opt] filter.owner
@string[opt] filter.id
@tparam[opt] table filter.target as for `manager:acquire`. Selects the leases that keep others from
  locking the target exclusively: leases of the node, of its ancestors and of its descendants. About
  once in ten million a stranger in the same bucket is listed, too
@bool[opt=false] filter.over also lists leases whose time is up, if a refresh would have them back.
  Their `remaining` is 0
@treturn[1] {table,...} for each lease its `id`, `owner`, `path`, `mode`, `since` (Unix time of the
  grant), `remaining` (seconds), `application`, `host`, `pid`, `kind` and, where the lease has one,
  `label`
@return[2] nil
@return[2] err `unsupported`, `timeout`, `connection`, `store`
*/
int hll_manager_leases(lua_State *L) {
  hl_error error;
  filter wanted;
  hll_manager *self = hll_manager_check(L);
  int shared = hll_manager_shared(L, 2);
  hll_holders *found = hll_holders_push(L);
  hll_plan *borrowed = hll_plan_borrow(L, shared);
  hl_manager *manager = hll_manager_still_open(L, self);
  filter_read(L, borrowed, manager, &wanted);
  int status = hl_manager_leases(manager, &wanted.core, hll_holders_add, found, &error);
  borrowed->borrowed = false;
  if (status) return hll_failure(L, &error, 0);
  if (found->error.status) return luaL_error(L, "not enough memory");
  hll_holders_list(L, found);
  return 1;
}

typedef struct revoke_options {
  const char *by, *reason;
} revoke_options;

static bool revoke_option(lua_State *L, const char *name, void *context) {
  revoke_options *options = context;
  if (strcmp(name, "by") == 0)
    options->by = hll_text(L, "by", 63);
  else if (strcmp(name, "reason") == 0)
    options->reason = hll_text(L, "reason", 127);
  else
    return false;
  return true;
}

/***
Ends leases of any holder. Their nodes are free at once. Also ends leases whose time is up, if a
refresh would have them back. Each holder's next call returns `nil, err` with code `lost`,
`err.revoked_by` and `err.reason`.
@function manager:revoke
@tparam table filter as for `manager:leases`, with at least one field
@tparam[opt] table options an unknown name raises
@string[opt] options.by the name of the caller, at most 63 bytes
@string[opt] options.reason why, at most 127 bytes
@treturn[1] integer number of leases that the call ended
@return[2] nil
@return[2] err `unsupported`, `timeout`, `connection`, `store`
*/
int hll_manager_revoke(lua_State *L) {
  hl_error error;
  filter wanted;
  revoke_options options = {NULL, NULL};
  uint64_t count = 0;
  hll_manager *self = hll_manager_check(L);
  int shared = hll_manager_shared(L, 3);
  hll_plan *borrowed = hll_plan_borrow(L, shared);
  hl_manager *manager = hll_manager_still_open(L, self);
  filter_read(L, borrowed, manager, &wanted);
  hll_options(L, 3, revoke_option, &options);
  int status = hl_manager_revoke(manager, &wanted.core, options.by, options.reason, &count, &error);
  borrowed->borrowed = false;
  if (status) return hll_failure(L, &error, 0);
  lua_pushinteger(L, (lua_Integer)count);
  return 1;
}
