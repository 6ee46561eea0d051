/*
 * hook.c - a manager's hooks: on_wait, on_grant, on_timeout, on_error, on_release.
 * (on_lost is older; see hll_losses_tell in shared.c.)
 *
 * A trace is a call of which the hooks hear. hll_trace_begin makes it, and calls on_wait. The trace
 * belongs to the call's pending or handle. Each hook gets the trace's event, a table of Lua's. A
 * trace ends with the call of its last hook:
 *
 *     on_wait --.-- on_grant --- on_release      (of `extend`: on_grant is the last)
 *               |-- on_timeout
 *               '-- on_error
 *
 * Hooks run only in calls that the program makes into hierlock, in the Lua state that makes them:
 * never in another thread, nor in the collector, nor at the end of a request of nginx. A trace that
 * ends there is queued. The next call on the manager or one of its handles tells the hooks, as it
 * tells on_lost. A call that a hook makes has no trace: else a hook that locks would call itself.
 *
 * Without hooks a manager has no traces, and an acquisition looks at two fields, no more.
 */
/*** @module hierlock */
#include "hll.h"

#include "clock.h"
#include "error.h"
#include "fork.h"

#include <stdlib.h>
#include <string.h>

struct hll_trace {
  hll_trace *next, **at; /* of its manager's live or ended traces */
  hll_trace **owner;     /* where the handle or the pending has it; NULL: it has none */
  hll_manager *manager;
  unsigned generation; /* of the process that made it: a child tells nothing of it */
  int64_t granted;     /* hl__now_us; 0: not granted */
  int64_t ended;       /* hl__now_us, once it is queued */
  const char *by;      /* what ended it */
};

static const char *const names[] = {"on_wait",  "on_grant",   "on_timeout",
                                    "on_error", "on_release", NULL};

bool hll_hook_named(const char *name) {
  for (const char *const *hook = names; *hook; hook++)
    if (strcmp(*hook, name) == 0) return true;
  return false;
}

void hll_hooks_set(lua_State *L, int options, int shared) {
  for (const char *const *hook = names; *hook; hook++) {
    lua_getfield(L, options, *hook);
    lua_setfield(L, shared, *hook);
  }
  lua_newtable(L); /* trace -> event */
  lua_setfield(L, shared, "events");
}

/* -------------------------------------------------------------- traces */

static void list_remove(hll_trace *trace) {
  *trace->at = trace->next;
  if (trace->next) trace->next->at = trace->at;
}

static void list_add(hll_trace *trace, hll_trace **at) {
  trace->next = *at;
  trace->at = at;
  if (*at) (*at)->at = &trace->next;
  *at = trace;
}

static void owner_set(hll_trace *trace, hll_trace **owner) {
  if (trace->owner) *trace->owner = NULL;
  trace->owner = owner;
  if (owner) *owner = trace;
}

/* Frees a trace. The table of events keeps its event: see event_take. */
static void trace_free(hll_trace *trace) {
  owner_set(trace, NULL);
  list_remove(trace);
#ifndef __clang_analyzer__ /* it does not see that the list forgets it */
  free(trace);
#endif
}

static void list_drop(hll_trace **list) {
  while (*list) {
    hll_trace *trace = *list;
    *list = trace->next;
    owner_set(trace, NULL);
    free(trace);
  }
}

void hll_traces_drop(hll_manager *self) {
  list_drop(&self->traces);
  list_drop(&self->ended);
}

/* Queues the trace, for a later call to tell. The collector calls it, so it allocates nothing in
   Lua. */
static void queue(hll_trace *trace, const char *by) {
  owner_set(trace, NULL);
  trace->by = by;
  trace->ended = hl__now_us();
  list_remove(trace);
  hll_trace **at = &trace->manager->ended;
  while (*at) at = &(*at)->next;
  list_add(trace, at);
}

void hll_trace_queue(hll_trace *trace, const char *by) {
  if (trace) queue(trace, by);
}

void hll_trace_move(hll_trace **from, hll_trace **owner) {
  if (*from) owner_set(*from, owner);
}

/* Pushes the event, and forgets it and its trace. Allocates nothing. */
static void event_take(lua_State *L, int shared, hll_trace *trace) {
  lua_getfield(L, shared, "events");
  lua_pushlightuserdata(L, trace);
  lua_rawget(L, -2);
  lua_pushlightuserdata(L, trace);
  lua_pushnil(L);
  lua_rawset(L, -4);
  lua_remove(L, -2);
  trace_free(trace);
}

void hll_trace_push(lua_State *L, int shared, hll_trace *trace) {
  lua_getfield(L, shared, "events");
  lua_pushlightuserdata(L, trace);
  lua_rawget(L, -2);
  lua_remove(L, -2);
}

/* -------------------------------------------------------------- telling */

/* Calls the hook of that name, where there is one, with the n values on the top. Returns what
   lua_pcall does; the error that the hook has raised is then on the top. */
static int tell(lua_State *L, int shared, hll_manager *self, const char *name, int n) {
  lua_getfield(L, shared, name);
  if (lua_isnil(L, -1)) {
    lua_pop(L, n + 1);
    return 0;
  }
  lua_insert(L, -(n + 1));
  bool before = self->telling;
  self->telling = true;
  int raised = lua_pcall(L, n, 0, 0);
  self->telling = before;
  return raised;
}

static void set_seconds(lua_State *L, int event, const char *name, int64_t us) {
  lua_pushnumber(L, (lua_Number)us / 1000000);
  lua_setfield(L, event, name);
}

/* Calls on_error or on_timeout, with the event and the error on the top. */
static int tell_failed(lua_State *L, int shared, hll_manager *self) {
  lua_getfield(L, -1, "code");
  const char *code = lua_tostring(L, -1);
  bool timeout = code && strcmp(code, "timeout") == 0;
  lua_pop(L, 1);
  return tell(L, shared, self, timeout ? "on_timeout" : "on_error", 2);
}

/* Calls the last hook of a trace that has ended. */
static int tell_ended(lua_State *L, int shared, hll_trace *trace) {
  hll_manager *self = trace->manager;
  bool granted = trace->granted != 0;
  bool foreign = trace->generation != hl__fork_generation();
  int64_t held = trace->ended - trace->granted;
  const char *by = trace->by;
  event_take(L, shared, trace);
  if (foreign || !lua_istable(L, -1)) {
    lua_pop(L, 1);
    return 0;
  }
  int event = lua_gettop(L);
  if (granted) {
    set_seconds(L, event, "held", held);
    lua_pushstring(L, by);
    lua_setfield(L, event, "by");
    return tell(L, shared, self, "on_release", 1);
  }
  hl_error why;
  (void)hl__error(&why, HL_CANCELLED, "the wait was cancelled");
  (void)hll_failure(L, &why, 0);
  lua_remove(L, -2); /* the nil of nil, err */
  return tell_failed(L, shared, self);
}

void hll_traces_tell(lua_State *L, int shared, hll_manager *self) {
  luaL_checkstack(L, 12, NULL);
  while (self->ended && !self->telling)
    if (tell_ended(L, shared, self->ended)) (void)lua_error(L);
}

void hll_traces_close(lua_State *L, int shared, hll_manager *self) {
  while (self->traces) queue(self->traces, "manager");
  hll_traces_tell(L, shared, self);
}

void hll_trace_end(lua_State *L, int shared, hll_trace *trace, const char *by) {
  if (!trace) return;
  hll_manager *self = trace->manager;
  queue(trace, by);
  hll_traces_tell(L, shared, self);
}

/* ------------------------------------------------------------- beginning */

static void set_targets(lua_State *L, int event, const hl_plan *plan) {
  hll_targets_push(L, plan);
  lua_setfield(L, event, "targets");
  lua_pushstring(L, hl_mode_name(hl_plan_mode(plan)));
  lua_setfield(L, event, "mode");
}

void hll_trace_begin(lua_State *L, int shared, hll_manager *self, const char *call,
                     const hl_plan *plan, hll_trace **owner) {
  static const char *const copied[] = {"label", "owner", "timeout", "ttl", NULL};
  if (!self->hooks || self->telling) return;
  luaL_checkstack(L, 12, NULL);
  lua_createtable(L, 0, 12);
  int event = lua_gettop(L);
  hll_set_text(L, "call", call);
  /* Raw, as the options were read. */
  for (const char *const *field = copied; *field; field++) {
    if (!lua_istable(L, shared - 1)) break;
    lua_pushstring(L, *field);
    lua_pushvalue(L, -1);
    lua_rawget(L, shared - 1);
    lua_rawset(L, event);
  }
  if (plan) set_targets(L, event, plan);
  lua_getfield(L, shared, "events");

  hll_trace *trace = calloc(1, sizeof *trace);
  if (!trace) (void)luaL_error(L, "not enough memory");
  trace->manager = self;
  trace->generation = hl__fork_generation();
  list_add(trace, &self->traces);
  if (*owner) queue(*owner, NULL); /* of a call that ended by an error of Lua's */
  owner_set(trace, owner);
  lua_pushlightuserdata(L, trace);
  lua_pushvalue(L, event);
  lua_rawset(L, -3); /* should it raise, no hook hears of the trace */
  lua_settop(L, event);
  if (!tell(L, shared, self, "on_wait", 1)) return; /* and the stack is as it was */
  if (*owner) {                                     /* else the manager was closed */
    event_take(L, shared, *owner);
    lua_pop(L, 1);
  }
  (void)lua_error(L);
}

/* --------------------------------------------------------------- outcomes */

/* Sets the event's fields of the grant; the event is on the top. */
static void set_grant(lua_State *L, int handle) {
  const hl_lock *lock = hll_handle_test(L, handle)->lock;
  int64_t waited = hl_lock_waited(lock);
  uint64_t token = hl_lock_token(lock);
  bool lease = hl_lock_kind(lock) == HL_LEASE;
  int event = lua_gettop(L);
  lua_getfield(L, event, "targets");
  if (lua_isnil(L, -1)) { /* an import */
    hll_plan *copy = hll_plan_push(L);
    lock = hll_handle_test(L, handle)->lock;
    if (lock) copy->plan = hl_plan_copy(hl_lock_plan(lock));
    if (copy->plan) set_targets(L, event, copy->plan);
  }
  lua_settop(L, event);
  set_seconds(L, event, "waited", waited * 1000);
  hll_token_push(L, token);
  lua_setfield(L, event, "token");
  hll_set_text(L, "kind", lease ? "lease" : "session");
}

void hll_trace_granted(lua_State *L, int shared, hll_trace **owner, int handle) {
  if (!*owner) return;
  hll_manager *self = (*owner)->manager;
  luaL_checkstack(L, 12, NULL);
  hll_trace_push(L, shared, *owner);
  set_grant(L, handle);
  if (!*owner) { /* a finalizer has closed the manager meanwhile */
    lua_pop(L, 1);
    return;
  }
  (*owner)->granted = hl__now_us();
  lua_pushvalue(L, handle);
  if (!tell(L, shared, self, "on_grant", 2)) return;
  /* The caller gets no handle: nothing stays locked. */
  hll_handle *granted = hll_handle_test(L, handle);
  if (granted->lock) (void)hl_lock_release(granted->lock, false, NULL);
  hll_trace_queue(*owner, "error");
  (void)lua_error(L);
}

void hll_trace_extended(lua_State *L, int shared, hll_trace **owner, int handle) {
  if (!*owner) return;
  hll_manager *self = (*owner)->manager;
  luaL_checkstack(L, 12, NULL);
  event_take(L, shared, *owner);
  lua_pushvalue(L, handle);
  if (tell(L, shared, self, "on_grant", 2)) (void)lua_error(L);
}

void hll_trace_failed(lua_State *L, int shared, hll_trace **owner, int err) {
  if (!*owner) return;
  hll_manager *self = (*owner)->manager;
  luaL_checkstack(L, 12, NULL);
  event_take(L, shared, *owner);
  lua_pushvalue(L, err);
  if (tell_failed(L, shared, self)) (void)lua_error(L);
}
