/*
 * shared.c - the checks with which each method of a manager or a handle begins, and the news of
 * lost locks that it tells.
 */
#include "hll.h"

#include "error.h"
#include "start.h"

#include <string.h>

hl_manager *hll_manager_still_open(lua_State *L, const hll_manager *self) {
  if (!self->manager) hll_misuse(L, "the manager is closed");
  return self->manager;
}

/* A lock and its plan cost about half a KiB outside of Lua. */
#define HLL_ACCOUNT_EACH 16

void hll_manager_account(lua_State *L, hll_manager *self) {
  if (++self->acquired % HLL_ACCOUNT_EACH == 0) hll_gc_account(L, HLL_ACCOUNT_EACH / 2);
}

hll_handle *hll_handle_push(lua_State *L, hll_manager *owner, int shared) {
  hll_handle *self = hll_bareuserdata(L, HLL_HANDLE, sizeof *self);
  lua_rawgeti(L, shared, 3);
  lua_setmetatable(L, -2);
  self->owner = owner;
  lua_pushvalue(L, shared);
  hll_setuservalue(L, -2);
  if (!owner->watches) return self;
  lua_getfield(L, shared, "handles");
  lua_pushvalue(L, -2);
  lua_pushboolean(L, 1);
  lua_rawset(L, -3);
  lua_pop(L, 1);
  return self;
}

void hll_handle_rewatch(lua_State *L, int index) {
  if (!hll_handle_test(L, index)->owner->watches) return;
  hll_getuservalue(L, index);
  lua_getfield(L, -1, "handles");
  lua_pushvalue(L, index);
  lua_rawget(L, -2);
  if (lua_isboolean(L, -1)) { /* it is there: nothing is allocated */
    lua_pushvalue(L, index);
    lua_pushboolean(L, 1);
    lua_rawset(L, -4);
  }
  lua_pop(L, 3);
}

hll_manager *hll_manager_check(lua_State *L) {
  hll_manager *self = hll_manager_test(L, 1);
  if (!self)
    hll_misuse(L, "self must be a manager, not %s; call it with a colon",
               hll_typename(L, 1, HLL_MANAGER));
  (void)hll_manager_still_open(L, self);
  hll_losses_tell(L, self);
  (void)hll_manager_still_open(L, self); /* on_lost may close it */
  return self;
}

int hll_manager_shared(lua_State *L, int n) {
  lua_settop(L, n);
  hll_getuservalue(L, 1);
  return n + 1;
}

/* Pushes a list of the handles that are lost or over, and of which on_lost has not heard. Returns
   their number. Sets *in_use when a call is using a handle, which cannot be judged yet. */
static int losses_list(lua_State *L, int handles, bool *in_use) {
  int lost = handles + 1, n = 0;
  *in_use = false;
  lua_newtable(L);
  for (lua_pushnil(L); lua_next(L, handles); lua_pop(L, 1)) {
    if (!lua_toboolean(L, -1)) continue; /* on_lost has heard of it */
    hll_handle *handle = hll_handle_test(L, -2);
    hl_lock_state state = handle && handle->lock ? hl_lock_look(handle->lock) : HL_RELEASED;
    if (state == HL_IN_USE) *in_use = true;
    if (state == HL_LOST || state == HL_OVER) {
      lua_pushvalue(L, -2);
      lua_rawseti(L, lost, ++n);
    }
  }
  return n;
}

/* Tells on_lost of the handle on the top, which it pops. */
static void loss_tell(lua_State *L, int shared, int handles) {
  int top = lua_gettop(L);
  lua_pushvalue(L, top);
  lua_rawget(L, handles);
  bool told = !lua_toboolean(L, -1); /* by a call of the callback's own */
  lua_settop(L, told ? top - 1 : top);
  if (told) return;
  lua_pushvalue(L, top);
  lua_pushboolean(L, 0);
  lua_rawset(L, handles); /* it is told once, even if the callback raises */
  lua_getfield(L, shared, "on_lost");
  lua_insert(L, top);
  hl_error why;
  hll_handle *handle = hll_handle_test(L, top + 1);
  bool gone = handle->lock && hl_lock_look(handle->lock) == HL_LOST;
  (void)hl__error(&why, HL_ELOST, "the lock was lost while it was held");
  if (handle->lock) hl_lock_loss(handle->lock, &why);
  (void)hll_failure(L, &why, 0);
  lua_remove(L, -2); /* the nil of nil, err */
  bool traced = handle->trace != NULL;
  if (traced) hll_trace_push(L, shared, handle->trace);
  if (lua_isnil(L, top))
    lua_settop(L, top - 1);
  else
    lua_call(L, 2 + traced, 0);
  if (gone) hll_trace_end(L, shared, handle->trace, "lost");
}

/* Tells what there is to be told. */
static void news_tell(lua_State *L, int shared, hll_manager *self) {
  if (self->ended) hll_traces_tell(L, shared, self);
  if (self->manager && self->reports) hll_reports_tell(L, shared, self);
  if (!self->manager) return; /* closed by the function that was told */
  uint64_t losses = hl_manager_losses(self->manager);
  if (losses == self->losses) return;
  if (self->watches) {
    bool in_use;
    lua_getfield(L, shared, "handles");
    int handles = lua_gettop(L);
    /* First all losses are listed, then told: a callback may acquire. */
    int n = losses_list(L, handles, &in_use);
    for (int i = 1; i <= n; i++) {
      lua_rawgeti(L, handles + 1, i);
      loss_tell(L, shared, handles);
    }
    /* Not sooner: where a callback raises, the next call tells the rest. */
    if (in_use) return;
  }
  self->losses = losses;
}

void hll_losses_tell(lua_State *L, hll_manager *self) {
  if (!self->manager) return;
  if (!self->ended && !self->reports && hl_manager_losses(self->manager) == self->losses) return;
  int top = lua_gettop(L);
  hll_getuservalue(L, 1);
  news_tell(L, top + 1, self);
  lua_settop(L, top);
}

hll_handle *hll_handle_self(lua_State *L) {
  hll_handle *self = hll_handle_test(L, 1);
  if (!self) hll_misuse(L, "self must be a handle, not %s", hll_typename(L, 1, HLL_HANDLE));
  return self;
}

hll_handle *hll_handle_check(lua_State *L) {
  hll_handle *self = hll_handle_self(L);
  hll_losses_tell(L, self->owner);
  return self;
}

int hll_handle_collected(lua_State *L) {
  return hll_fail(L, HL_ERELEASED, "the lock has been released");
}

int hll_handle_call(lua_State *L, const hll_handle *self, int place, const hl__wish *wish) {
  hl_error error;
  if (!self->lock) return hll_handle_collected(L);
  int status = hl__lock_call(self->lock, wish, hll_pending_at(L, place), &error);
  return hll_handle_answer(L, place, status, &error);
}

int hll_push_true(lua_State *L) {
  lua_pushboolean(L, 1);
  return 1;
}
