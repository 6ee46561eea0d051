/*
 * plan.c - class hierlock.plan: the rows that targets need, and the SQL that
 * locks them in a transaction of the caller's own.
 */
/*** @module hierlock */
#include "hll.h"

#include "layout.h"
#include "mode.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static hll_plan *plan_check(lua_State *L) {
  hll_plan *self = hll_testudata(L, 1, HLL_PLAN);
  if (!self || !self->plan) hll_misuse(L, "self must be a plan");
  return self;
}

/* ------------------------------------------------------------- methods */

/***
Made by `hierlock.plan`. Touches no store, and never blocks.
`tostring(plan)` shows its targets.
@type plan
*/

/***
Lists the rows in locking order, each once, in the strongest mode that any target needs.
@function plan:rows
@treturn {table,...} for each row its `level`, `bucket` and `mode`:
  `{{level=0, bucket=3142546, mode="shared"}, ...}`. The root's level is 0. An update row's level
  is 128 more than its node's. In a plan of `manager:plan`, on a store without buckets,
  `bucket` is a hash of 60 bits, which may be too large for a number of this Lua. So each row has it
  in two strings, too: `key` is the decimal number of PostgreSQL's advisory locks and SQLite's rows.
  `node` is the end of Redis' keys. Where the manager's space knows intentions, the rows of
  ancestors are `"shared"`, and `intention` says what for: `"IS"`, `"IX"`, `"SIX"`
*/
static int plan_rows(lua_State *L) {
  static const char *const intentions[] = {"IS", "IX", "SIX"};
  size_t n;
  (void)hl_plan_rows(plan_check(L)->plan, &n);
  lua_createtable(L, (int)n, 0);
  bool unbucketed = hl_layout_buckets(hl_plan_layout(plan_check(L)->plan)) == 0;
  for (size_t i = 0; i < n; i++) {
    char key[48];
    lua_createtable(L, 0, 4);
    const hl_row row = hl_plan_rows(plan_check(L)->plan, &n)[i];
    lua_pushinteger(L, row.level);
    lua_setfield(L, -2, "level");
    lua_pushinteger(L, (lua_Integer)row.bucket);
    lua_setfield(L, -2, "bucket");
    hll_set_text(L, "mode", hl_mode_name(row.mode > HL_UPDATE ? HL_SHARED : (hl_mode)row.mode));
    if (row.mode > HL_UPDATE) hll_set_text(L, "intention", intentions[row.mode - HL__IS]);
    if (unbucketed) {
      (void)snprintf(key, sizeof key, "%" PRId64, hl__row_key(row.level, row.bucket));
      hll_set_text(L, "key", key);
      (void)snprintf(key, sizeof key, "{%08" PRIx32 "}:%u:%015" PRIx64, row.root,
                     (unsigned)row.level, row.bucket);
      hll_set_text(L, "node", key);
    }
    lua_rawseti(L, -2, (int)i + 1);
  }
  return 1;
}

/***
Describes the tree to which the plan's nodes belong.
@function plan:layout
@treturn table `levels`, their names from the root, and `buckets` of each level. Without `buckets`
  each node has a key of its own
*/
static int plan_layout(lua_State *L) {
  hl_layout *layout = hl_plan_layout(plan_check(L)->plan);
  unsigned levels = hl_layout_levels(layout);
  lua_createtable(L, 0, 2);
  lua_createtable(L, (int)levels, 0);
  for (unsigned i = 0; i < levels; i++) {
    lua_pushstring(L, hl_layout_name(layout, i));
    lua_rawseti(L, -2, (int)i + 1);
  }
  lua_setfield(L, -2, "levels");
  if (hl_layout_buckets(layout) > 0) {
    lua_pushinteger(L, (lua_Integer)hl_layout_buckets(layout));
    lua_setfield(L, -2, "buckets");
  }
  return 1;
}

static bool is_identifier(const char *s) {
  static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_$";
  size_t n = strlen(s);
  return n >= 1 && n <= 64 && strspn(s, allowed) == n;
}

/***
Returns the statement that locks the rows, for a transaction of the caller's own in READ
COMMITTED. Count the rows that the statement returns, and call `plan:verify`: a missing row locks
nothing. After an error other than 1213 the first rows may be locked: roll back. The plan does not
check that the server excludes (no replica, no cluster).
@function plan:sql
@string dialect `"mysql"`, `"mariadb"` or `"postgresql"`. PostgreSQL has no table and
  no buckets: there the statement takes advisory locks. The targets alone decide the keys, and no
  row can be missing
@string[opt="hier_lock_buckets"] table a plain name
@bool[opt=false] leases whether the space has leases (MySQL, MariaDB). The statement then locks the
  roots' gates, too. The statement cannot look at leases. So `plan:verify` fails where a gate shows
  that there may be leases below its root
@treturn string a SELECT with a row for each row of the plan, and with `leases` for each gate
*/
static int plan_sql(lua_State *L) {
  (void)plan_check(L);
  const char *name = hll_word(L, 2);
  hl_dialect dialect = HL_MYSQL;
  if (name && strcmp(name, "mariadb") == 0)
    dialect = HL_MARIADB;
  else if (name && strcmp(name, "postgresql") == 0)
    dialect = HL_POSTGRESQL;
  else if (!name || strcmp(name, "mysql") != 0)
    hll_misuse(L, "dialect must be \"mysql\", \"mariadb\" or \"postgresql\"");
  const char *table = "hier_lock_buckets";
  if (!lua_isnoneornil(L, 3)) {
    table = hll_word(L, 3);
    if (!table || !is_identifier(table)) hll_misuse(L, "table must be the plain name of a table");
  }
  bool leased = lua_toboolean(L, 4);
  if (!lua_isnoneornil(L, 4) && !lua_isboolean(L, 4))
    hll_misuse(L, "leases must be a boolean, not %s", luaL_typename(L, 4));
  if (leased && dialect == HL_POSTGRESQL)
    hll_misuse(L, "leases are looked at on MySQL and MariaDB only");
  hll_plan *text = hll_plan_push(L); /* its finalizer frees the text if Lua raises */
  hll_plan *self = plan_check(L);
  self->gates = 0;
  text->sql = leased ? hl_plan_sql_leased(self->plan, dialect, table, &self->gates)
                     : hl_plan_sql(self->plan, dialect, table);
  if (!text->sql) return luaL_error(L, "not enough memory");
  lua_pushstring(L, text->sql);
  free(text->sql);
  text->sql = NULL;
  return 1;
}

/***
Says whether the statement returned all rows that it should lock.
@function plan:verify
@int n number of rows that the statement returned
@treturn[1] boolean true
@return[2] nil
@return[2] err `not_provisioned`
*/
static int plan_verify(lua_State *L) {
  hll_plan *self = plan_check(L);
  size_t rows;
  (void)hl_plan_rows(self->plan, &rows);
  rows += self->gates;
  if (lua_type(L, 2) != LUA_TNUMBER)
    hll_misuse(L, "n must be the number of rows, not %s", luaL_typename(L, 2));
  if (lua_tonumber(L, 2) == (lua_Number)rows) {
    lua_pushboolean(L, 1);
    return 1;
  }
  char message[300];
  (void)snprintf(message, sizeof message,
                 "%.0f of %zu bucket rows came back; a missing row locks "
                 "nothing: roll back, and %s",
                 (double)lua_tonumber(L, 2), rows,
                 self->gates > 0 ? "look for leases, or run `hierlock provision`"
                                 : "run `hierlock provision`; on PostgreSQL: there may be leases, "
                                   "at which the statement of a plan cannot look");
  return hll_fail(L, HL_ENOT_PROVISIONED, message);
}

/* --------------------------------------------------------- metamethods */

static int plan_gc(lua_State *L) {
  hll_plan *self = hll_testudata(L, 1, HLL_PLAN);
  if (self) {
    hl_plan_free(self->plan);
    free(self->sql);
    self->plan = NULL;
    self->sql = NULL;
  }
  return 0;
}

static int plan_tostring(lua_State *L) {
  char text[512];
  hll_plan *self = hll_testudata(L, 1, HLL_PLAN);
  lua_pushfstring(L, "hierlock.plan (%s)",
                  self && self->plan ? hl_plan_describe(self->plan, text, sizeof text)
                                     : "collected");
  return 1;
}

static const luaL_Reg methods[] = {
    {"layout", plan_layout}, {"rows", plan_rows}, {"sql", plan_sql},
    {"verify", plan_verify}, {NULL, NULL},
};

static const luaL_Reg metamethods[] = {
    {"__gc", plan_gc},
    {"__tostring", plan_tostring},
    {NULL, NULL},
};

typedef struct plan_options {
  hll_layout_options layout;
  hl_mode mode;
} plan_options;

static bool plan_option(lua_State *L, const char *name, void *context) {
  plan_options *options = context;
  if (strcmp(name, "mode") == 0) {
    options->mode = hll_mode(L, -1);
    return true;
  }
  return hll_layout_option(L, name, &options->layout);
}

/***
@section end
*/

/***
Makes a plan: the rows that targets need, without any store. Programs use it to lock
the rows in a transaction of their own.
@function hierlock.plan
@tparam {table,...} targets at least one, each as for `manager:acquire`
@tparam[opt] table options an unknown name raises
@string[opt="exclusive"] options.mode for targets without their own
@tparam[opt] {string,...} options.levels as for `hierlock.open`
@int[opt=10000000] options.buckets as for `hierlock.open`
@treturn plan
*/
int hll_plan_new(lua_State *L) {
  plan_options options = {.mode = HL_EXCLUSIVE};
  lua_settop(L, 2);
  hll_plan *self = hll_plan_push(L);
  hll_options(L, 2, plan_option, &options);
  hl_layout *layout = hll_layout_new(L, &options.layout);
  self->plan = hl_plan_new(layout);
  hl_layout_unref(layout);
  if (!self->plan) return luaL_error(L, "not enough memory");
  hll_targets_add(L, 1, self->plan, options.mode);
  return 1;
}

void hll_plan_register(lua_State *L) {
  hll_class_new(L, HLL_PLAN, metamethods, methods);
  lua_pop(L, 2);
}
