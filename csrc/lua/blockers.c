/*
 * blockers.c - the holders in the way of a request: as Lua tables, and in the errors that name
 * them.
 */
#include "hll.h"

#include "clock.h"
#include "error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ------------------------------------------------------------- holders */

void hll_holders_add(void *context, const hl_holder *holder) {
  hll_holders *self = context;
  if (self->n == self->capacity) {
    size_t capacity = self->capacity ? 2 * self->capacity : 8;
    hl_holder *list = realloc(self->list, capacity * sizeof *list);
    if (!list) {
      (void)hl__error_memory(&self->error);
      return;
    }
    self->list = list;
    self->capacity = capacity;
  }
  self->list[self->n++] = *holder;
}

static int holders_gc(lua_State *L) {
  hll_holders *self = hll_testudata(L, 1, HLL_HOLDERS);
  if (self) {
    free(self->list);
    self->list = NULL;
    self->n = self->capacity = 0;
  }
  return 0;
}

hll_holders *hll_holders_push(lua_State *L) {
  return hll_newuserdata(L, HLL_HOLDERS, sizeof(hll_holders));
}

static void set_seconds(lua_State *L, const char *name, int64_t ms) {
  lua_pushnumber(L, (lua_Number)ms / 1000);
  lua_setfield(L, -2, name);
}

void hll_holders_list(lua_State *L, const hll_holders *self) {
  lua_createtable(L, (int)self->n, 0);
  for (size_t i = 0; i < self->n; i++) {
    const hl_holder *holder = &self->list[i];
    lua_createtable(L, 0, 9);
    lua_pushstring(L, holder->application);
    lua_setfield(L, -2, "application");
    lua_pushstring(L, holder->host);
    lua_setfield(L, -2, "host");
    if (holder->pid) {
      lua_pushinteger(L, (lua_Integer)holder->pid);
      lua_setfield(L, -2, "pid");
    }
    hll_set_text(L, "label", holder->label);
    lua_pushstring(L, holder->path);
    lua_setfield(L, -2, "path");
    hll_set_text(L, "mode", hl_mode_name(holder->mode));
    if (holder->since_ms) set_seconds(L, "since", holder->since_ms);
    lua_pushboolean(L, holder->waiting);
    lua_setfield(L, -2, "waiting");
    hll_set_text(L, "kind", holder->kind == HL_LEASE ? "lease" : "session");
    hll_set_text(L, "session", holder->session);
    if (holder->kind == HL_LEASE) {
      hll_set_text(L, "owner", holder->owner);
      hll_set_text(L, "id", holder->id);
      set_seconds(L, "remaining", holder->remaining_ms);
    }
    lua_rawseti(L, -2, (int)i + 1);
  }
}

void hll_holders_register(lua_State *L) {
  (void)luaL_newmetatable(L, HLL_HOLDERS);
  lua_pushcfunction(L, holders_gc);
  lua_setfield(L, -2, "__gc");
  lua_pop(L, 1);
}

/* ----------------------------------------------------------- acquiring */

/* Pushes the node that an error concerns, and returns its index. The node is the one whose row is
   missing, else the only target. Returns 0 where the error concerns no single node. */
static int push_concerned(lua_State *L, const hl_plan *plan, const hl_error *error) {
  size_t n = hl_plan_target_count(plan);
  hl_layout *layout = hl_plan_layout(plan);
  for (size_t i = 0; error->level >= 0 && i < n; i++) {
    hl_id ids[HL_LEVELS_MAX];
    hl_target target = hl_plan_target(plan, i, ids);
    unsigned level = (unsigned)error->level;
    if (target.level < level || hl_layout_bucket(layout, ids, level + 1) != error->bucket) continue;
    lua_createtable(L, 0, (int)level + 1);
    for (unsigned j = 0; j <= level; j++) {
      lua_pushlstring(L, ids[j].data, ids[j].size);
      lua_setfield(L, -2, hl_layout_name(layout, j));
    }
    return lua_gettop(L);
  }
  if (n != 1) return 0;
  hll_target_push(L, plan, 0);
  return lua_gettop(L);
}

/* Returns whether the holder is this process. Takes processes that share host name and number, as
   in containers, for one. */
static bool is_this_process(const hl_holder *holder) {
  char host[sizeof holder->host] = "";
  (void)gethostname(host, sizeof host - 1);
  return holder->pid == (int64_t)getpid() && strcmp(holder->host, host) == 0;
}

/* Adds to the message a holder in the way; without holders, a waiter.
   `u1/a1 is held by billing (pid 4711 on db3, "nightly") for 12 s`. */
static void say_holder(hl_error *error, const hll_holders *found) {
  const hl_holder *holder = found->list;
  for (size_t i = 0; i < found->n && holder->waiting; i++)
    if (!found->list[i].waiting) holder = &found->list[i];
  char label[sizeof holder->label + 8] = "", since[32] = "", pid[32] = "";
  char lease[sizeof holder->owner + 32] = "", remaining[48] = "";
  if (holder->pid) (void)snprintf(pid, sizeof pid, "pid %lld on ", (long long)holder->pid);
  if (holder->label[0]) (void)snprintf(label, sizeof label, ", \"%s\"", holder->label);
  int64_t ms = hl__between_ms(holder->since_ms, hl__unix_ms());
  if (holder->since_ms && ms >= 0)
    (void)snprintf(since, sizeof since, " for %.*f s", ms < 10000 ? 1 : 0, (double)ms / 1000);
  if (holder->kind == HL_LEASE) {
    if (holder->owner[0]) (void)snprintf(lease, sizeof lease, "%s by a lease of ", holder->owner);
    if (!holder->waiting)
      (void)snprintf(remaining, sizeof remaining, ", and for %.*f s more",
                     holder->remaining_ms < 10000 ? 1 : 0, (double)holder->remaining_ms / 1000);
  }
  /* The store may know none of these of a program without hierlock. */
  bool known = holder->pid || holder->host[0] || holder->label[0];
  char text[2 * sizeof error->message], *message = error->message;
  (void)snprintf(text, sizeof text, "%s %s by %s%s%s%s%s%s%s%s%s",
                 holder->path[0] ? holder->path : "it",
                 holder->waiting ? "is waited for" : "is held", lease,
                 is_this_process(holder) ? "this process" : holder->application, known ? " (" : "",
                 pid, holder->host, label, known ? ")" : "", since, remaining);
  size_t used = strlen(message);
  (void)snprintf(message + used, sizeof error->message - used, ": %s", text);
  for (; *message; message++) /* a label may have any bytes */
    if ((unsigned char)*message < ' ') *message = ' ';
}

/* Adds to the message why the holders are not known: else none would seem to be in the way. */
static void say_unknown(hl_error *error, const hll_holders *found) {
  size_t used = strlen(error->message);
  (void)snprintf(error->message + used, sizeof error->message - used,
                 "; who is in the way is not known: %s", found->error.message);
}

int hll_acquire_failure(lua_State *L, hl_error *error, const hl_plan *plan,
                        const hll_holders *found) {
  /* When hierlock itself found the circle, the message is complete. So is a timeout's with a
     reason. */
  bool said = error->status == HL_DEADLOCK && !error->server_errno && !error->sqlstate[0];
  if (error->status == HL_TIMEOUT && error->reason[0]) said = true;
  if (found->n > 0 && !said)
    say_holder(error, found);
  else if (found->error.status && !said)
    say_unknown(error, found);
  (void)hll_failure(L, error, plan ? push_concerned(L, plan, error) : 0);
  if (found->n > 0) {
    hll_holders_list(L, found);
    lua_setfield(L, -2, "holders");
  }
  if (found->error.status) hll_set_text(L, "holders_unknown", found->error.message);
  return 2;
}

void hll_holders_find(hll_holders *self, hl_manager *manager, const hl_plan *plan) {
  hl_error error;
  if (hl_manager_blockers(manager, plan, hll_holders_add, self, &error)) self->error = error;
}

int hll_acquire_refused(lua_State *L, hl_error *error, const hl_plan *plan,
                        const hll_manager *manager) {
  hll_holders *found = hll_holders_push(L);
  if ((error->status == HL_TIMEOUT || error->status == HL_DEADLOCK) && manager->manager)
    hll_holders_find(found, manager->manager, plan);
  return hll_acquire_failure(L, error, plan, found);
}
