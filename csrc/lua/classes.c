/*
 * classes.c - makes and recognises the userdata of each class.
 */
#include "hll.h"

#include <string.h>

const char HLL_MANAGER[] = "hierlock.manager";
const char HLL_HANDLE[] = "hierlock.handle";
const char HLL_PENDING[] = "hierlock.pending";
const char HLL_PLAN[] = "hierlock.plan";
const char HLL_HOLDERS[] = "hierlock.holders";

hll_handle *hll_handle_test(lua_State *L, int index) { return hll_testudata(L, index, HLL_HANDLE); }

void hll_token_push(lua_State *L, uint64_t token) {
  char text[17];
  (void)snprintf(text, sizeof text, "%016llx", (unsigned long long)token);
  lua_pushstring(L, text);
}

hll_pending *hll_pending_test(lua_State *L, int index) {
  return hll_testudata(L, index, HLL_PENDING);
}

hll_pending *hll_pending_push(lua_State *L, int shared, int handle) {
  hll_pending *self = hll_newuserdata(L, HLL_PENDING, sizeof *self);
  lua_createtable(L, 2, 0);
  lua_pushvalue(L, shared);
  lua_rawseti(L, -2, 1);
  lua_pushvalue(L, handle);
  lua_rawseti(L, -2, 2);
  hll_setuservalue(L, -2);
  return self;
}

hll_plan *hll_plan_push(lua_State *L) { return hll_newuserdata(L, HLL_PLAN, sizeof(hll_plan)); }

hll_plan *hll_plan_test(lua_State *L, int index) { return hll_testudata(L, index, HLL_PLAN); }

hll_plan *hll_plan_borrow(lua_State *L, int shared) {
  lua_rawgeti(L, shared, 2);
  hll_plan *self = hll_testudata(L, -1, HLL_PLAN);
  if (!self || !self->plan || self->borrowed) { /* no plan: it has been finalized */
    lua_pop(L, 1);
    self = hll_plan_push(L);
    lua_pushvalue(L, -1);
    lua_rawseti(L, shared, 2);
  }
  self->borrowed = true;
  return self;
}

hl_plan *hll_plan_begin(lua_State *L, hll_plan *self, hl_layout *layout) {
  if (self->plan)
    hl_plan_clear(self->plan);
  else
    self->plan = hl_plan_new(layout);
  if (!self->plan) (void)luaL_error(L, "not enough memory");
  return self->plan;
}

void hll_tie(hll_tied *tied, hll_tied **list) {
  hll_untie(tied);
  *tied = (hll_tied){*list, list};
  if (*list) (*list)->at = &tied->next;
  *list = tied;
}

void hll_untie(hll_tied *tied) {
  if (!tied->at) return;
  *tied->at = tied->next;
  if (tied->next) tied->next->at = tied->at;
  *tied = (hll_tied){0};
}

hll_manager *hll_manager_test(lua_State *L, int index) {
  return hll_testudata(L, index, HLL_MANAGER);
}
