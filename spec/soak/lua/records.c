/*
 * records.c - lets a worker in Lua (worker.lua) write the same records as one in C: the
 * module hierlock_spec.soak. A record is a number here. Times are integers, in nanoseconds.
 */
#include "soak.h"

#include <lauxlib.h>
#include <lua.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int me;
static worker_area *area;
static dice our_dice;
static int next_record[THREADS];

static record *record_at(lua_State *L, int index) {
  lua_Integer i = luaL_checkinteger(L, index);
  luaL_argcheck(L, i >= 0 && i < (lua_Integer)THREADS * RECORDS, index, "no such record");
  return &area->records[i / RECORDS][i % RECORDS];
}

/* soak.attach(area, worker, round) -> what the run wants */
static int attach(lua_State *L) {
  uint64_t round = (uint64_t)luaL_checkinteger(L, 3);
  me = (int)luaL_checkinteger(L, 2);
  luaL_argcheck(L, me >= 0 && me < WORKERS, 2, "no such worker");
  if (!area_attach(luaL_checkstring(L, 1)))
    return luaL_error(L, "there is no area %s", lua_tostring(L, 1));
  area = &shared->worker[me];
  our_dice = dice_of(shared->seed, (round * WORKERS + (uint64_t)me) * THREADS);
  /* Not every process goes through the proxy: it opens managers while others wait. */
  bool proxied = shared->proxied_dsn[0] && (round + shared->seed) % 2;
  lua_newtable(L);
  lua_pushstring(L, proxied ? shared->proxied_dsn : shared->dsn);
  lua_setfield(L, -2, "dsn");
  lua_pushboolean(L, proxied);
  lua_setfield(L, -2, "proxied");
  lua_pushboolean(L, shared->extends);
  lua_setfield(L, -2, "extends");
  lua_pushboolean(L, shared->leases);
  lua_setfield(L, -2, "leases");
  lua_pushnumber(L, (lua_Number)shared->hold_timeout / 1000);
  lua_setfield(L, -2, "hold_timeout");
  lua_pushinteger(L, shared->threads);
  lua_setfield(L, -2, "threads");
  lua_pushinteger(L, BUCKETS);
  lua_setfield(L, -2, "buckets");
  return 1;
}

static int now(lua_State *L) {
  lua_pushinteger(L, (lua_Integer)now_ns());
  return 1;
}

/* 0 <= result < n */
static int roll_lua(lua_State *L) {
  lua_pushinteger(L, roll_below(&our_dice, (int)luaL_checkinteger(L, 1)));
  return 1;
}

static int stopping(lua_State *L) {
  lua_pushboolean(L, atomic_load(&shared->stop));
  return 1;
}

static int pausing(lua_State *L) {
  lua_pushboolean(L, atomic_load(&shared->pause));
  return 1;
}

static int mood_name(lua_State *L) {
  static const char *const names[MOODS] = {"mixed", "large", "narrow"};
  lua_pushstring(L, names[atomic_load(&shared->mood) % MOODS]);
  return 1;
}

/* soak.rest(true | false): all of it rests, or not any more. */
static int rest(lua_State *L) {
  int n = shared->threads;
  (void)atomic_fetch_add(&area->threads_at_rest, lua_toboolean(L, 1) ? n : -n);
  return 0;
}

static int count(lua_State *L) {
  static const char *const names[] = {
      "calls",   "grants",  "waits",   "timeouts",  "cancels",   "extends",  "deadlocks",
      "busy",    "lost",    "failed",  "samples",   "forks",     "opens",    "updates",
      "rows",    "refused", "leases",  "converted", "refreshes", "restored", "over",
      "exports", "imports", "revokes", "told",      "left",      NULL};
  (void)atomic_fetch_add(&area->counts[luaL_checkoption(L, 1, NULL, names)], 1u);
  return 0;
}

static int complain_lua(lua_State *L) {
  complain("worker %d, in Lua: %s", me, luaL_checkstring(L, 1));
  return 0;
}

/* soak.names(node) -> user, account, resource */
static int names(lua_State *L) {
  node_name name;
  node_ids((int)luaL_checkinteger(L, 1), &name);
  for (unsigned i = 0; i < name.n; i++) lua_pushstring(L, name.text[i]);
  return (int)name.n;
}

/* soak.call(thread, manager, kind, handle | 0, timeout in ms, proxied, {node, mode, node, mode …}
   [, token before]) -> record, handle; or nothing: main has not read enough of them yet. */
static int call(lua_State *L) {
  static const char *const kinds[] = {"acquire", "start", "extend", NULL};
  int thread = (int)luaL_checkinteger(L, 1) % shared->threads;
  luaL_checktype(L, 7, LUA_TTABLE);
  for (int tries = 0; tries < RECORDS; tries++) {
    int i = next_record[thread]++ % RECORDS;
    record *r = &area->records[thread][i];
    if (atomic_load_explicit(&r->state, memory_order_acquire) != FREE) continue;
    uint64_t handle = (uint64_t)luaL_checkinteger(L, 4);
    if (!handle) handle = atomic_fetch_add(&area->handles, 1u) * WORKERS + (uint64_t)me;
    r->handle = handle;
    r->worker = me;
    r->thread = thread;
    r->manager = (int)luaL_checkinteger(L, 2);
    r->pid = getpid();
    r->kind = (call_kind)luaL_checkoption(L, 3, NULL, kinds);
    record_clear(r);
    r->timeout = (int64_t)luaL_checkinteger(L, 5);
    r->proxied = lua_toboolean(L, 6);
    r->before = strtoull(luaL_optstring(L, 8, "0"), NULL, 16);
    for (lua_Integer j = 1, n = (lua_Integer)lua_rawlen(L, 7); j < n; j += 2) {
      (void)lua_rawgeti(L, 7, j);
      (void)lua_rawgeti(L, 7, j + 1);
      int node = (int)lua_tointeger(L, -2), mode = (int)lua_tointeger(L, -1);
      lua_pop(L, 2);
      r->targets++;
      if (node < FIRST_RESOURCE) mode = HL_EXCLUSIVE;
      if (r->modes[node] < mode) r->modes[node] = (unsigned char)mode;
      for (int at = node_parent(node); at >= 0; at = node_parent(at))
        if (!r->modes[at]) r->modes[at] = HL_SHARED;
    }
    r->stopped = atomic_load(&area->stopped);
    r->called = now_ns();
    atomic_store_explicit(&r->state, CALLED, memory_order_release);
    lua_pushinteger(L, (lua_Integer)thread * RECORDS + i);
    lua_pushinteger(L, (lua_Integer)handle);
    return 2;
  }
  return 0;
}

/* soak.granted(record, token) */
static int granted(lua_State *L) {
  record *r = record_at(L, 1);
  r->granted = now_ns();
  r->token = strtoull(luaL_checkstring(L, 2), NULL, 16);
  if (r->kind == CALL_IMPORT) r->promised = 0; /* until now its exporter's */
  atomic_store(&area->granted_at, r->granted);
  atomic_store_explicit(&r->state, HELD, memory_order_release);
  (void)atomic_fetch_add(&area->counts[COUNT_GRANTS], 1u);
  if (r->granted - r->called > 2 * MS) (void)atomic_fetch_add(&area->counts[COUNT_WAITS], 1u);
  return 0;
}

/* soak.held(record, time): at that time it began to ask, and was told so. */
static int held(lua_State *L) {
  record *r = record_at(L, 1);
  atomic_store_explicit(&r->held, (int64_t)luaL_checkinteger(L, 2), memory_order_release);
  return 0;
}

/* soak.promised(record, time, seconds) */
static int promised(lua_State *L) {
  record *r = record_at(L, 1);
  lua_Number left = luaL_checknumber(L, 3);
  if (left <= 0) return 0;
  r->promised = isinf(left) ? INT64_MAX : (int64_t)luaL_checkinteger(L, 2) + (int64_t)(left * 1e9);
  return 0;
}

static int status_of(const char *code) {
  static const struct {
    const char *code;
    int status;
  } codes[] = {{"timeout", HL_TIMEOUT},
               {"deadlock", HL_DEADLOCK},
               {"cancelled", HL_CANCELLED},
               {"busy", HL_BUSY},
               {"lost", HL_ELOST},
               {"released", HL_ERELEASED},
               {"connection", HL_ECONNECTION},
               {"store", HL_ESTORE},
               {"not_provisioned", HL_ENOT_PROVISIONED},
               {"unsafe_server", HL_EUNSAFE_SERVER},
               {"mismatch", HL_EMISMATCH}};
  for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++)
    if (strcmp(codes[i].code, code) == 0) return codes[i].status;
  return HL_OK;
}

/* soak.called(record) -> when */
static int called(lua_State *L) {
  lua_pushinteger(L, (lua_Integer)record_at(L, 1)->called);
  return 1;
}

/* soak.allows(code, time [, lease]): whether a fault allows a call begun then to end so */
static int allows(lua_State *L) {
  bool lease = lua_toboolean(L, 3);
  lua_pushboolean(L, (lease ? fault_allows_lease : fault_allows)(status_of(luaL_checkstring(L, 1)),
                                                                 (int64_t)luaL_checkinteger(L, 2)));
  return 1;
}

/* soak.killed(number, message): whether an administrator has ended the statement */
static int killed(lua_State *L) {
  lua_pushboolean(L, killed_query((unsigned)luaL_optinteger(L, 1, 0), luaL_checkstring(L, 2)));
  return 1;
}

/* soak.ended(record, how, time of ending [, code, message]) */
static int ended(lua_State *L) {
  static const char *const hows[] = {"released",  "freed", "closed",   "lost", "refused",
                                     "cancelled", "died",  "exported", "left", NULL};
  record *r = record_at(L, 1);
  const char *code = luaL_optstring(L, 4, "");
  r->how = (end_kind)luaL_checkoption(L, 2, NULL, hows);
  r->ending = (int64_t)luaL_checkinteger(L, 3);
  r->status = status_of(code);
  (void)strncpy(r->why, luaL_optstring(L, 5, ""), sizeof r->why - 1);
  r->ended = now_ns();
  atomic_store_explicit(&r->state, ENDED, memory_order_release);
  return 0;
}

/* ------------------------------------------------------------------- leases: see soak.h */

/* soak.lease(record, ttl in ms, owner, auto_refresh, stays [, converted]): it is one, or is to become one. */
static int lease(lua_State *L) {
  record *r = record_at(L, 1);
  if (lua_toboolean(L, 6)) r->leased = now_ns(), r->promised = 0;
  record_leases(r, (int64_t)luaL_checkinteger(L, 2), (int)luaL_checkinteger(L, 3),
                lua_toboolean(L, 4), lua_toboolean(L, 5));
  return 0;
}

/* soak.discard(record): nothing was called. */
static int discard(lua_State *L) {
  atomic_store_explicit(&record_at(L, 1)->state, FREE, memory_order_release);
  return 0;
}

/* soak.unlease(record): makes it a session's again. */
static int unlease(lua_State *L) {
  record_at(L, 1)->lease = false;
  return 0;
}

/* soak.asks(record, time, ttl in ms): a refresh is called. */
static int asks(lua_State *L) {
  record *r = record_at(L, 1);
  int64_t at = (int64_t)luaL_checkinteger(L, 2), ttl = (int64_t)luaL_checkinteger(L, 3);
  if (r->ttl_most < ttl) r->ttl_most = ttl;
  atomic_store(&r->expires, 0);
  if (r->promised > at + ttl * MS) r->promised = at + ttl * MS;
  return 0;
}

/* soak.expires(record, ttl in ms): it was granted, or refreshed. */
static int expires(lua_State *L) {
  record *r = record_at(L, 1);
  if (!r->refreshes)
    atomic_store(&r->expires, now_ns() + ((int64_t)luaL_checkinteger(L, 2) + 1) * MS);
  return 0;
}

/* soak.sure(record, time) */
static int sure(lua_State *L) {
  atomic_store(&record_at(L, 1)->sure, (int64_t)luaL_checkinteger(L, 2));
  return 0;
}

/* soak.is_lease(record) */
static int is_lease(lua_State *L) {
  lua_pushboolean(L, record_at(L, 1)->lease);
  return 1;
}

/* soak.yields(record) */
static int yields(lua_State *L) {
  record_yields(record_at(L, 1));
  return 0;
}

/* soak.told(record, time of the call, its ttl in ms or 0, revoked_by | nil) */
static int told(lua_State *L) {
  record *r = record_at(L, 1);
  r->lost_at = (int64_t)luaL_checkinteger(L, 2);
  r->asked_ttl = (int64_t)luaL_checkinteger(L, 3);
  r->revocation = revocation_of(luaL_optstring(L, 4, ""));
  if (r->revocation) (void)atomic_fetch_add(&area->counts[COUNT_TOLD], 1u);
  return 0;
}

static text_slot *text_slot_any(void) {
  text_slot *slot = &shared->texts[roll_below(&our_dice, TEXTS)];
  int nobody = 0;
  return atomic_compare_exchange_strong(&slot->busy, &nobody, me + 1) ? slot : NULL;
}

/* soak.put(record, text, ttl in ms): puts the text where another thread may find it. */
static int put(lua_State *L) {
  const record *r = record_at(L, 1);
  const char *text = luaL_checkstring(L, 2);
  int64_t ttl = (int64_t)luaL_checkinteger(L, 3);
  text_slot *slot = strlen(text) < TEXT_MOST ? text_slot_any() : NULL;
  if (!slot) return 0;
  slot->there = true;
  (void)strcpy(slot->text, text);
  slot->handle = r->handle;
  slot->token = r->token;
  slot->owner = r->owner;
  slot->targets = r->targets;
  slot->since = r->since ? r->since : r->granted;
  slot->promised = r->promised;
  slot->put = now_ns();
  slot->ttl = ttl;
  slot->ttl_most = r->ttl_most;
  memcpy(slot->modes, r->modes, sizeof slot->modes);
  atomic_store(&slot->busy, 0);
  return 0;
}

/* soak.take(record, ttl in ms | 0, auto_refresh, stays) -> text, its ttl, handle, token; or nothing. The record is one of
   soak.call without targets. */
static int take(lua_State *L) {
  record *r = record_at(L, 1);
  text_slot *slot = text_slot_any();
  if (!slot) return 0;
  bool there = slot->there && now_ns() - slot->put < 8 * S;
  if (there) {
    int64_t ttl = (int64_t)luaL_checkinteger(L, 2);
    if (!ttl) ttl = slot->ttl;
    r->handle = slot->handle;
    record_leases(r, slot->ttl_most > ttl ? slot->ttl_most : ttl, slot->owner, lua_toboolean(L, 3),
                  lua_toboolean(L, 4));
    r->since = slot->since;
    r->promised = slot->promised;
    r->before = slot->token;
    r->asked_ttl = ttl;
    r->targets = slot->targets;
    memcpy(r->modes, slot->modes, sizeof r->modes);
    r->kind = CALL_IMPORT;
    lua_pushstring(L, slot->text);
    lua_pushinteger(L, (lua_Integer)ttl);
    char token[17];
    (void)snprintf(token, sizeof token, "%016llx", (unsigned long long)slot->token);
    lua_pushinteger(L, (lua_Integer)slot->handle);
    lua_pushstring(L, token);
  }
  if (roll_below(&our_dice, 100) < 40) slot->there = false;
  atomic_store(&slot->busy, 0);
  return there ? 4 : 0;
}

/* soak.exclusive(record) -> a node that it is to hold exclusively, or nil */
static int exclusive(lua_State *L) {
  const record *r = record_at(L, 1);
  int node = roll_below(&our_dice, NODES);
  for (int tries = 0; tries < NODES; tries++, node = (node + 1) % NODES)
    if (r->modes[node] == HL_EXCLUSIVE) {
      lua_pushinteger(L, node);
      return 1;
    }
  return 0;
}

/* soak.read(node) -> element, counter, set; soak.write and soak.confirm(node, element, counter, set) */
static int cell_read_lua(lua_State *L) {
  cell_change change;
  cell_read((int)luaL_checkinteger(L, 1), roll_below(&our_dice, 64), &change);
  lua_pushinteger(L, (lua_Integer)change.element);
  lua_pushinteger(L, (lua_Integer)change.counter);
  lua_pushinteger(L, (lua_Integer)change.set);
  return 3;
}

static cell_change change_at(lua_State *L) {
  return (cell_change){(int)luaL_checkinteger(L, 1), (uint64_t)luaL_checkinteger(L, 2),
                       (uint64_t)luaL_checkinteger(L, 3), (uint64_t)luaL_checkinteger(L, 4)};
}

static int cell_write_lua(lua_State *L) {
  cell_change change = change_at(L);
  cell_write(&change);
  return 0;
}

static int cell_confirm_lua(lua_State *L) {
  cell_change change = change_at(L);
  cell_confirm(&change);
  return 0;
}

int luaopen_hierlock_spec_soak(lua_State *L);
int luaopen_hierlock_spec_soak(lua_State *L) {
  static const luaL_Reg functions[] = {{"attach", attach},
                                       {"now", now},
                                       {"roll", roll_lua},
                                       {"stopping", stopping},
                                       {"pausing", pausing},
                                       {"mood", mood_name},
                                       {"rest", rest},
                                       {"count", count},
                                       {"complain", complain_lua},
                                       {"names", names},
                                       {"call", call},
                                       {"granted", granted},
                                       {"held", held},
                                       {"lease", lease},
                                       {"discard", discard},
                                       {"is_lease", is_lease},
                                       {"unlease", unlease},
                                       {"asks", asks},
                                       {"expires", expires},
                                       {"sure", sure},
                                       {"yields", yields},
                                       {"told", told},
                                       {"put", put},
                                       {"take", take},
                                       {"promised", promised},
                                       {"ended", ended},
                                       {"exclusive", exclusive},
                                       {"called", called},
                                       {"allows", allows},
                                       {"killed", killed},
                                       {"read", cell_read_lua},
                                       {"write", cell_write_lua},
                                       {"confirm", cell_confirm_lua},
                                       {NULL, NULL}};
  luaL_newlib(L, functions);
#define NUMBER(name) (lua_pushinteger(L, name), lua_setfield(L, -2, #name))
  NUMBER(USERS);
  NUMBER(ACCOUNTS);
  NUMBER(RESOURCES);
  NUMBER(FIRST_ACCOUNT);
  NUMBER(FIRST_RESOURCE);
  NUMBER(OWNERS);
  NUMBER(TTL_MOST);
  NUMBER(HL_SHARED);
  NUMBER(HL_EXCLUSIVE);
  return 1;
}
