/*
 * request.c - handles and pendings that live as long as a request of the program's host,
 * such as nginx. The collector alone would release them at a wrong time:
 *
 *   too soon   A handle is a local variable of one phase, and the next phase works on
 *              under the handle's lock. So a handle is anchored: a table of Lua's keeps it from
 *              the collector until the program releases it, or the request ends.
 *   too late   The host drops the coroutine of an aborted request without a word to it. The
 *              collector would release this coroutine's locks too late. So handles and pendings are
 *              tied to the request, too. However the request ends, the host then calls request_end
 *              (see lua/hierlock/loop/ngx.lua), which releases the handles and cancels the
 *              pendings that are left. This function calls no Lua, and does not block. A
 *              later call into this file drops the anchors.
 *
 * All this runs in one thread: the host's, which runs Lua, too.
 */
/*** @module hierlock */
#include "hll.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct request request;
struct request {
  uintptr_t id; /* the request's address in the host */
  request *next;
  hll_tied *first;
  double number;     /* never used again; an address may be */
  unsigned anchored; /* handles; and how many there may be before prune */
  unsigned limit;
};

/* Requests that core.request has made known and that have not ended; by id. */
#define CHAINS 256
static request *requests[CHAINS];
/* Requests that have ended, whose anchors are still there. */
static request *ended;

/* With so few anchors, no call looks for released handles. */
#define LIMIT_LEAST 16

/* In the registry: number of a request -> the request's handles, as keys. */
#define ANCHORS "hierlock.anchors"

static request **chain(uintptr_t id) { return &requests[(id >> 6 ^ id >> 14) % CHAINS]; }

static void handle_end(hll_handle *self) {
  if (!self->lock) return;
  int status = hl_lock_close(self->lock, NULL);
  hll_trace_queue(self->trace, status == HL_ELOST ? "lost" : "request");
}

static void pending_end(hll_pending *self) {
  if (self->pending) hl_pending_cancel(self->pending);
  hll_trace_queue(self->trace, NULL);
}

/* ------------------------------------------------------------- anchors */

/* Drops the anchors of requests that have ended; the table of anchors is on the top.
   Allocates nothing. */
static void sweep(lua_State *L) {
  while (ended) {
    request *self = ended;
    ended = self->next;
    double number = self->number;
    free(self);
    lua_pushnumber(L, (lua_Number)number);
    lua_rawget(L, -2);
    bool anchored = !lua_isnil(L, -1); /* else the assignment would allocate a key */
    lua_pop(L, 1);
    if (!anchored) continue;
    lua_pushnumber(L, (lua_Number)number);
    lua_pushnil(L);
    lua_rawset(L, -3);
  }
}

/* Drops the anchors of released handles; the request's handles are on the top. A lost handle
   stays, as on_lost may not have heard of it. */
static void prune(lua_State *L, request *self) {
  self->anchored = 0;
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
    const hll_handle *handle = hll_handle_test(L, -2);
    if (handle && handle->lock && hl_lock_look(handle->lock) != HL_RELEASED) {
      self->anchored++;
      continue;
    }
    lua_pushvalue(L, -2);
    lua_pushnil(L);
    lua_rawset(L, -5);
  }
  self->limit = 2 * self->anchored;
  if (self->limit < LIMIT_LEAST) self->limit = LIMIT_LEAST;
}

/* Anchors the handle at index; the table of anchors is on the top. */
static void anchor(lua_State *L, int index, request *self) {
  lua_pushnumber(L, (lua_Number)self->number);
  lua_rawget(L, -2);
  if (lua_isnil(L, -1)) {
    lua_pop(L, 1);
    lua_newtable(L);
    lua_pushnumber(L, (lua_Number)self->number);
    lua_pushvalue(L, -2);
    lua_rawset(L, -4);
  }
  if (++self->anchored > self->limit) prune(L, self);
  lua_pushvalue(L, index);
  lua_pushboolean(L, 1);
  lua_rawset(L, -3);
  lua_pop(L, 1);
}

/* ------------------------------------------------------------ requests */

/* Releases and cancels all that is tied to a request. The host calls it at the request's end. */
static void request_end(void *data) {
  request *self = data;
  request **at = chain(self->id);
  while (*at != self) at = &(*at)->next;
  *at = self->next;
  while (self->first) {
    hll_tied *tied = self->first;
    const hll_header *header = (const hll_header *)(void *)tied - 1;
    hll_untie(tied);
    if (header->class == HLL_HANDLE)
      handle_end((hll_handle *)(void *)tied);
    else
      pending_end((hll_pending *)(void *)tied);
  }
  self->next = ended;
  ended = self;
}

static uintptr_t id_check(lua_State *L, int index) { return (uintptr_t)luaL_checknumber(L, index); }

/***
Ties a handle or a pending to a request, and anchors a handle. For hierlock's own Lua
code.
@function core.tie
@local
@param object a handle or a pending; other values are left alone
@number id the request's address
@treturn boolean whether the request is known, see `core.request`
*/
static int tie(lua_State *L) {
  uintptr_t id = id_check(L, 2);
  lua_settop(L, 2);
  lua_getfield(L, LUA_REGISTRYINDEX, ANCHORS);
  sweep(L);
  request *self = *chain(id);
  while (self && self->id != id) self = self->next;
  if (self) {
    hll_handle *handle = hll_handle_test(L, 1);
    hll_pending *pending = hll_pending_test(L, 1);
    if (handle) {
      anchor(L, 1, self);
      hll_tie(&handle->tied, &self->first);
    }
    if (pending) hll_tie(&pending->tied, &self->first);
  }
  lua_pushboolean(L, self != NULL);
  return 1;
}

/***
Makes a request known, until the host calls the function with the data. For
hierlock's own Lua code.
@function core.request
@local
@number id the request's address; no known request has it
@return the address of the function
@return the address of the data
*/
static int request_new(lua_State *L) {
  static double last;
  uintptr_t id = id_check(L, 1);
  request *self = malloc(sizeof *self);
  if (!self) return luaL_error(L, "not enough memory");
  void (*end)(void *) = request_end;
  void *address;
  memcpy(&address, &end, sizeof address); /* as POSIX allows */
  lua_pushlightuserdata(L, address);
  lua_pushlightuserdata(L, self);
  request **at = chain(id);
  *self = (request){.id = id, .next = *at, .number = ++last, .limit = LIMIT_LEAST};
  *at = self;
  return 2;
}

void hll_request_register(lua_State *L) {
  static const luaL_Reg functions[] = {{"tie", tie}, {"request", request_new}, {NULL, NULL}};
  hll_setfuncs(L, functions);
  lua_newtable(L);
  lua_setfield(L, LUA_REGISTRYINDEX, ANCHORS);
}
