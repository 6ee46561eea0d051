/*
 * pending.c - class hierlock.pending: a call that the program has started without waiting for it.
 * A pending's uservalue is a table:
 *     [1] The table that the manager's handles share.
 *     [2] The handle that an acquisition will fill in, made first, so that the grant
 *         allocates nothing. For other calls it is the handle on which they work.
 *     [3] `cqueues.cancel`, once cqueues has polled the pending.
 */
/*** @module hierlock */
#include "hll.h"

static hll_pending *pending_check(lua_State *L) {
  hll_pending *self = hll_testudata(L, 1, HLL_PENDING);
  if (!self) hll_misuse(L, "self must be a pending, not %s", hll_typename(L, 1, HLL_PENDING));
  return self;
}

/* ------------------------------------------------------------- methods */

/***
An acquisition that `manager:start` or `manager:start_any` has started. A program's `loop` also gets
pendings of other calls. The library's threads carry the call on. A
request that waits behind another request of the same manager occupies no thread. When the
pending is collected or closed (`local pending <close>`, Lua 5.4), the call is cancelled.
@type pending
*/

/***
Says whether the call is done: granted, failed or cancelled. Then `wait` returns at once.
@function pending:done
@treturn boolean
*/
static int pending_done(lua_State *L) {
  hll_pending *self = pending_check(L);
  lua_pushboolean(L, !self->pending || hl_pending_done(self->pending));
  return 1;
}

/***
Returns a descriptor that becomes readable when the call is done, and stays readable. Poll it, but
do not read or close it. The descriptor lives as long as the pending.
@function pending:fd
@treturn[1] integer
@return[2] nil
@return[2] err `store`: the process has no descriptor left
*/
static int pending_fd(lua_State *L) {
  hll_pending *self = pending_check(L);
  hl_error error;
  if (!self->pending) return hll_fail(L, HL_ERELEASED, "the pending was closed");
  int fd = hl_pending_fd(self->pending, &error);
  if (fd < 0) return hll_failure(L, &error, 0);
  lua_pushinteger(L, fd);
  return 1;
}

/***
Blocks until the call is done, and returns the call's result. Returns the result only once.
@function pending:wait
@tparam[opt] number seconds at most; by default as long as the call takes. When they
  have passed, `wait` returns `timeout`. The call goes on, and the program can wait again
@treturn[1] handle
@return[2] nil
@return[2] err as from `acquire`; `cancelled`
@raise when the pending has given its result already
*/
int hll_pending_wait(lua_State *L) {
  hll_pending *self = pending_check(L);
  hl_error error;
  hl_lock *lock;
  int64_t timeout = lua_isnoneornil(L, 2) ? HL_FOREVER : hll_milliseconds(L, 2, "seconds");
  lua_settop(L, 1);
  if (!self->pending) return hll_fail(L, HL_CANCELLED, "the pending was closed");
  hll_getuservalue(L, 1);
  lua_rawgeti(L, 2, 2);
  hll_handle *handle = hll_handle_test(L, 3);
  int status = hl_pending_wait(self->pending, timeout, &lock, &error);
  if (status == HL_OK && !lock) { /* a call on a handle */
    if (handle) hll_handle_rewatch(L, 3);
    lua_pushboolean(L, 1);
    if (!self->trace) return 1;
    lua_rawgeti(L, 2, 1);
    hll_trace_extended(L, 5, &self->trace, 3);
    lua_pop(L, 1);
    return 1;
  }
  if (status == HL_OK) {
    handle->lock = lock;
    hll_untie(&self->tied);
    lua_pushnil(L); /* nothing is allocated for a nil */
    lua_rawseti(L, 2, 2);
    hll_trace_move(&self->trace, &handle->trace);
    if (!handle->trace) return 1;
    lua_rawgeti(L, 2, 1);
    hll_trace_granted(L, 4, &handle->trace, 3);
    lua_settop(L, 3);
    return 1;
  }
  if (!hl_pending_done(self->pending) || error.status == HL_EMISUSE)
    return hll_failure(L, &error, 0);
  hll_plan *plan = hll_plan_push(L);
  hll_holders *found = hll_holders_push(L);
  if (self->pending) {
    const hl_plan *theirs = hl_pending_plan(self->pending);
    plan->plan = theirs ? hl_plan_copy(theirs) : NULL;
    hl_error why;
    if (hl_pending_holders(self->pending, hll_holders_add, found, &why)) found->error = why;
  }
  int values = hll_acquire_failure(L, &error, plan->plan, found);
  int err = lua_gettop(L);
  lua_rawgeti(L, 2, 1);
  hll_trace_failed(L, err + 1, &self->trace, err);
  if (error.status == HL_DEADLOCK && handle) hll_trace_end(L, err + 1, handle->trace, "deadlock");
  lua_settop(L, err);
  return values;
}

/***
Ends the wait, in the store too. Releases a lock that the store has granted, if `wait` has not
returned it yet. `wait` returns `cancelled` then. Does not block.
@function pending:cancel
@treturn boolean true
*/
static int pending_cancel(lua_State *L) {
  hll_pending *self = pending_check(L);
  if (self->pending) hl_pending_cancel(self->pending);
  if (self->trace) {
    hll_getuservalue(L, 1);
    lua_rawgeti(L, -1, 1);
    hll_trace_end(L, lua_gettop(L), self->trace, NULL);
  }
  lua_pushboolean(L, 1);
  return 1;
}

/***
Tells `cqueues.poll` which descriptor to poll.
@function pending:pollfd
@treturn integer
*/
static int pending_pollfd(lua_State *L) {
  int values = pending_fd(L);
  if (values != 1) return values;
  hll_getuservalue(L, 1);
  lua_rawgeti(L, -1, 3);
  if (lua_isnil(L, -1)) {
    lua_getfield(L, LUA_REGISTRYINDEX, "_LOADED");
    lua_getfield(L, -1, "cqueues");
    if (lua_istable(L, -1)) {
      lua_getfield(L, -1, "cancel");
      lua_rawseti(L, -5, 3);
    }
    lua_pop(L, 2);
  }
  lua_pop(L, 2);
  return 1;
}

/***
Tells `cqueues.poll` for which events to poll.
@function pending:events
@treturn string `"r"`
*/
static int pending_events(lua_State *L) {
  (void)pending_check(L);
  lua_pushliteral(L, "r");
  return 1;
}

/***
Tells `cqueues.poll` how long to poll. Nil sets no limit.
@function pending:timeout
@treturn nil
*/
static int pending_timeout(lua_State *L) {
  (void)pending_check(L);
  lua_pushnil(L);
  return 1;
}

/* --------------------------------------------------------- metamethods */

/* Makes cqueues forget the pending's descriptor before it is closed. A controller notes the
   descriptors of which it has told the kernel. If it kept this one, it would take the next file of
   the same number for it, and wait for ever. Allocates nothing. */
static void cqueues_forget(lua_State *L, hl_pending *pending) {
  hl_error error;
  hll_getuservalue(L, 1);
  lua_rawgeti(L, -1, 3);
  if (!lua_isnil(L, -1)) {
    lua_pushinteger(L, hl_pending_fd(pending, &error));
    if (lua_pcall(L, 1, 0, 0)) lua_pop(L, 1);
  } else {
    lua_pop(L, 1);
  }
  lua_pop(L, 1);
}

int hll_pending_close(lua_State *L) {
  hll_pending *self = hll_testudata(L, 1, HLL_PENDING);
  if (self && self->pending) {
    cqueues_forget(L, self->pending);
    hl_pending *pending = self->pending;
    self->pending = NULL;
    hll_untie(&self->tied);
    hl_pending_free(pending);
  }
  if (self) hll_trace_queue(self->trace, NULL);
  return 0;
}

static int pending_tostring(lua_State *L) {
  hll_pending *self = pending_check(L);
  bool done = !self->pending || hl_pending_done(self->pending);
  lua_pushfstring(L, "hierlock.pending (%s)", done ? "done" : "waiting");
  return 1;
}

static const luaL_Reg methods[] = {
    {"done", pending_done},       {"fd", pending_fd},
    {"wait", hll_pending_wait},   {"cancel", pending_cancel},
    {"pollfd", pending_pollfd},   {"events", pending_events},
    {"timeout", pending_timeout}, {NULL, NULL},
};

static const luaL_Reg metamethods[] = {
    {"__gc", hll_pending_close},
    {"__close", hll_pending_close},
    {"__tostring", pending_tostring},
    {NULL, NULL},
};

void hll_pending_register(lua_State *L) {
  hll_class_new(L, HLL_PENDING, metamethods, methods);
  lua_pop(L, 2);
}

/* Returns whether the method is to start its call instead of waiting for it. */
bool hll_starts(lua_State *L) { return lua_toboolean(L, lua_upvalueindex(HLL_STARTS)) != 0; }
bool hll_awaits(lua_State *L) { return lua_toboolean(L, lua_upvalueindex(HLL_AWAITS)) != 0; }

int hll_handle_pending(lua_State *L) {
  if (!hll_starts(L)) return 0;
  hll_getuservalue(L, 1);
  (void)hll_pending_push(L, lua_gettop(L), 1);
  return lua_gettop(L);
}
