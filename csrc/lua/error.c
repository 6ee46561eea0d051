/*
 * error.c - the two ways in which a call of hierlock's goes wrong. Misuse raises. A failure that
 * can happen to a correct program is `nil, err`. An err is a plain table with a metatable.
 */
/*** @module hierlock */
#include "hll.h"

#include "error.h"

#include <stdarg.h>
#include <string.h>

/* ----------------------------------------------------------- functions */

/* Returns whether the running function at this level is in one of the library's own Lua files. The
   files' names end in hierlock/..., wherever they were loaded from. */
static bool is_ours(const lua_Debug *ar) {
  static const char *const files[] = {"waiting.lua", "init.lua", "loop/", "attach.lua",
                                      "attach/",     "rows.lua", "rows/", "prometheus.lua"};
  const char *at = ar->source;
  while ((at = strstr(at, "hierlock/"))) {
    bool whole = at > ar->source && (at[-1] == '/' || at[-1] == '@');
    at += strlen("hierlock/");
    for (size_t i = 0; whole && i < sizeof files / sizeof *files; i++)
      if (strncmp(at, files[i], strlen(files[i])) == 0) return ar->source[0] == '@';
  }
  return false;
}

/* Finds the first caller outside of this library; returns false where there is no such caller. */
static bool find_caller(lua_State *L, lua_Debug *ar) {
  for (int level = 1; lua_getstack(L, level, ar); level++) {
    (void)lua_getinfo(L, "S", ar);
    if (*ar->what == 'C' || is_ours(ar)) continue;
    (void)lua_getinfo(L, "l", ar);
    if (ar->currentline > 0) return true;
  }
  return false;
}

static void push_position(lua_State *L) {
  lua_Debug ar;
  if (find_caller(L, &ar))
    lua_pushfstring(L, "%s:%d: ", ar.short_src, ar.currentline);
  else
    lua_pushliteral(L, "");
}

/* Each acquisition calls it: so without printf, for speed. */
void hll_where(lua_State *L, char where[HL_WHERE_SIZE]) {
  lua_Debug ar;
  char digits[12], *digit = digits + sizeof digits;
  if (!find_caller(L, &ar)) return;
  *--digit = '\0';
  for (unsigned line = (unsigned)ar.currentline; line; line /= 10)
    *--digit = (char)('0' + line % 10);
  *--digit = ':';
  size_t size = strlen(ar.short_src); /* less than LUA_IDSIZE */
  memcpy(where, ar.short_src, size);
  memcpy(where + size, digit, strlen(digit) + 1);
}

int hll_misuse(lua_State *L, const char *format, ...) {
  va_list arguments;
  push_position(L);
  lua_pushliteral(L, "hierlock: ");
  va_start(arguments, format);
  (void)lua_pushvfstring(L, format, arguments);
  va_end(arguments);
  lua_concat(L, 3);
  (void)lua_error(L);
  __builtin_unreachable();
}

void hll_set_text(lua_State *L, const char *name, const char *value) {
  if (!value[0]) return;
  lua_pushstring(L, value);
  lua_setfield(L, -2, name);
}

int hll_failure(lua_State *L, const hl_error *error, int target) {
  if (error->status == HL_ENOMEM) return luaL_error(L, "not enough memory");
  if (error->status == HL_EMISUSE) return hll_misuse(L, "%s", error->message);
  if (target) target = hll_absindex(L, target);
  lua_pushnil(L);
  lua_createtable(L, 0, 6);
  hll_set_text(L, "code", hl_status_name(error->status));
  lua_pushstring(L, error->message);
  lua_setfield(L, -2, "message");
  lua_pushboolean(L, error->retryable);
  lua_setfield(L, -2, "retryable");
  if (error->server_errno) {
    lua_pushinteger(L, (lua_Integer)error->server_errno);
    lua_setfield(L, -2, "errno");
  }
  hll_set_text(L, "sqlstate", error->sqlstate);
  hll_set_text(L, "revoked_by", error->revoked_by);
  hll_set_text(L, "reason", error->reason);
  if (error->retry_after_ms) {
    lua_pushnumber(L, (lua_Number)error->retry_after_ms / 1000);
    lua_setfield(L, -2, "retry_after");
  }
  if (target) {
    lua_pushvalue(L, target);
    lua_setfield(L, -2, "target");
  }
  luaL_getmetatable(L, HLL_ERROR);
  lua_setmetatable(L, -2);
  return 2;
}

int hll_fail(lua_State *L, int status, const char *message) {
  hl_error error;
  (void)hl__error(&error, status, "%s", message);
  return hll_failure(L, &error, 0);
}

/***
Tells hierlock's errors from other tables, and from everything else.
@function hierlock.is_error
@param value anything
@treturn boolean
*/
int hll_is_error(lua_State *L) {
  int is = 0;
  if (lua_istable(L, 1) && lua_getmetatable(L, 1)) {
    luaL_getmetatable(L, HLL_ERROR);
    is = lua_rawequal(L, -1, -2);
  }
  lua_pushboolean(L, is);
  return 1;
}

/* --------------------------------------------------------- metamethods */

/***
A failed call returns `nil, err`, when the failure can happen to a correct program. The err is a
plain table: the program may keep, change or raise it. `tostring(err)` is `code: message`, and `..`
works with strings, numbers and other errors.

Codes, and whether the same call may succeed later:
<table>
<tr><td>`timeout`</td><td>yes</td><td>not granted in time</td></tr>
<tr><td>`deadlock`</td><td>yes, unless the thread waits for itself</td><td>chosen as the victim; the
  call's handle holds nothing</td></tr>
<tr><td>`cancelled`</td><td>yes</td><td>the program or an administrator ended the wait</td></tr>
<tr><td>`busy`</td><td>yes</td><td>all `pool_size` connections are in use: at once when they
  hold locks of this very thread, else at the end of the timeout; or no thread
  can be started</td></tr>
<tr><td>`connection`</td><td>yes, unless the server refused user or
  password</td><td>the store cannot be reached or logged in to</td></tr>
<tr><td>`lost`</td><td>yes</td><td>the lock was lost while it was held. A lease is lost when its
  time is up. Another program's import or revocation loses it, too</td></tr>
<tr><td>`released`</td><td>no</td><td>the handle holds nothing any more</td></tr>
<tr><td>`not_provisioned`</td><td>no</td><td>the table, or a row of it, is missing</td></tr>
<tr><td>`mismatch`</td><td>no</td><td>the table or directory has other buckets or
  levels; or an exported lease is of another tree, or its text is damaged</td></tr>
<tr><td>`unsafe_server`</td><td>no</td><td>a server or file system on which locks would not
  exclude</td></tr>
<tr><td>`dsn`</td><td>no</td><td>the DSN cannot be understood</td></tr>
<tr><td>`unsupported`</td><td>no</td><td>the store, or this kind of lock, cannot do
  that</td></tr>
<tr><td>`store`</td><td>no</td><td>anything else that the store reported</td></tr>
</table>

@table err
@tfield string code from the table above
@tfield string message a line for people. Another version may word it differently. The message
  of `timeout` and `deadlock` names a holder, where the store shows one. "Held by this
  process" means that the program holds the lock itself: locks are not re-entrant
@tfield boolean retryable whether the same call may succeed later
@tfield[opt] integer errno the server's error number (1205, 1213 ...)
@tfield[opt] string sqlstate the server's SQLSTATE
@tfield[opt] table target the node concerned, where there is only one
@tfield[opt] {table,...} holders of `timeout` and `deadlock`. The list has the holders in the way,
  as from `manager:holders`: a hundred at most. The store must tell them within 50 ms of the end of
  the wait. Absent: no holder is known
@tfield[opt] string holders_unknown of `timeout` and `deadlock`. Says why `holders` may be
  incomplete. The store did not tell in time, does not show them, or was asked ten times in this
  second. Absent: the store was asked, and `holders` is its answer
@tfield[opt] number retry_after of `timeout`: seconds before which no retry can succeed. Only a
  Redis that has forgotten its grants tells this
@tfield[opt] string revoked_by of `lost`: the name of the program or person that revoked the lease
@tfield[opt] string reason of `lost`: why the lease was revoked. A `timeout` has a reason where
  something else than other locks caused it
*/

static void push_text(lua_State *L, int index) {
  if (lua_istable(L, index)) {
    lua_getfield(L, index, "code");
    lua_pushliteral(L, ": ");
    lua_getfield(L, index, "message");
    if (lua_isstring(L, -1) && lua_isstring(L, -3)) {
      lua_concat(L, 3);
      return;
    }
    lua_pop(L, 3);
  } else if (lua_isstring(L, index)) {
    lua_pushvalue(L, index);
    return;
  }
  lua_pushstring(L, luaL_typename(L, index));
}

static int error_tostring(lua_State *L) {
  lua_settop(L, 1);
  push_text(L, 1);
  return 1;
}

static int error_concat(lua_State *L) {
  lua_settop(L, 2);
  push_text(L, 1);
  push_text(L, 2);
  lua_concat(L, 2);
  return 1;
}

static const luaL_Reg metamethods[] = {
    {"__tostring", error_tostring},
    {"__concat", error_concat},
    {NULL, NULL},
};

void hll_error_register(lua_State *L) {
  (void)luaL_newmetatable(L, HLL_ERROR);
  hll_setfuncs(L, metamethods);
  hll_set_text(L, "__name", HLL_ERROR);
  lua_pop(L, 1);
}
