/*
 * request.c - handles and pendings that end with a request of the program's host.
 * A host such as nginx drops the coroutine of a request that is aborted without a
 * word to it; the collector would come too late for what it had locked. So
 * what a request acquires is tied to it: at its end, however it ends, the host calls
 * a C function of ours (see lua/hierlock/loop/ngx.lua), which releases and cancels
 * what is still there. That function calls no Lua, and nothing that blocks.
 *
 * All this is of one thread: the host's, which runs Lua, too.
 */
/*** @module hierlock */
#include "hll.h"

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct request request;
struct request {
  uintptr_t id; /* its address in the host */
  request *next;
  hll_tied *first;
};

/* Those that live and have acquired anything; by id. */
#define CHAINS 256
static request *requests[CHAINS];

static request **chain(uintptr_t id) {
  return &requests[(id >> 6 ^ id >> 14) % CHAINS];
}

void hll_tie(hll_tied *tied, hll_tied **list, void (*end)(hll_tied *tied)) {
  hll_untie(tied);
  *tied = (hll_tied){*list, list, end};
  if (*list) (*list)->at = &tied->next;
  *list = tied;
}

void hll_untie(hll_tied *tied) {
  if (!tied->at) return;
  *tied->at = tied->next;
  if (tied->next) tied->next->at = tied->at;
  *tied = (hll_tied){0};
}

static void handle_end(hll_tied *tied) {
  hll_handle *self =
      (hll_handle *)(void *)((char *)tied - offsetof(hll_handle, tied));
  if (self->lock) (void)hl_lock_release(self->lock, false, NULL);
}

static void pending_end(hll_tied *tied) {
  hll_pending *self =
      (hll_pending *)(void *)((char *)tied - offsetof(hll_pending, tied));
  if (self->pending) hl_pending_cancel(self->pending);
}

/* The host calls it when the request has ended. */
static void request_end(void *data) {
  request *self = data;
  request **at = chain(self->id);
  while (*at != self) at = &(*at)->next;
  *at = self->next;
  while (self->first) {
    hll_tied *tied = self->first;
    void (*end)(hll_tied *) = tied->end;
    hll_untie(tied);
    end(tied);
  }
  free(self);
}

static uintptr_t id_check(lua_State *L, int index) {
  return (uintptr_t)luaL_checknumber(L, index);
}

/***
Ties a handle or a pending to a request; for hierlock's own Lua code.
@function core.tie
@local
@param object a handle or a pending; anything else is left alone
@number id the request's address
@treturn boolean whether the request is known, see `core.request`
*/
static int tie(lua_State *L) {
  uintptr_t id = id_check(L, 2);
  request *self = *chain(id);
  while (self && self->id != id) self = self->next;
  if (self) {
    hll_handle *handle = hll_handle_test(L, 1);
    hll_pending *pending = hll_pending_test(L, 1);
    if (handle) hll_tie(&handle->tied, &self->first, handle_end);
    if (pending) hll_tie(&pending->tied, &self->first, pending_end);
  }
  lua_pushboolean(L, self != NULL);
  return 1;
}

/***
Makes a request known, from now on until the function is called with the data; for
hierlock's own Lua code.
@function core.request
@local
@number id its address; not one of a request that is known
@return the address of the function
@return the address of the data
*/
static int request_new(lua_State *L) {
  uintptr_t id = id_check(L, 1);
  request *self = malloc(sizeof *self);
  if (!self) return luaL_error(L, "not enough memory");
  request **at = chain(id);
  *self = (request){id, *at, NULL};
  *at = self;
  void (*end)(void *) = request_end;
  void *address;
  memcpy(&address, &end, sizeof address); /* as POSIX allows */
  lua_pushlightuserdata(L, address);
  lua_pushlightuserdata(L, self);
  return 2;
}

void hll_request_register(lua_State *L) {
  static const luaL_Reg functions[] = {
      {"tie", tie}, {"request", request_new}, {NULL, NULL}};
  hll_setfuncs(L, functions);
}
