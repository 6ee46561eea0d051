/*
 * hll.h - the Lua binding: one C file for each class, each in the order
 * methods, metamethods, tables of functions, push and check. The binding checks
 * arguments, makes userdata and calls the core; it decides nothing.
 *
 * Misuse raises (hll_misuse). Every other failure is `nil, err` (hll_failure).
 *
 * Allocate first, then check, then take a reference. An allocation in Lua may raise for want of
 * memory. An allocation may also run a finalizer of the program's, and the finalizer may call the
 * binding: to close the manager, or to finalize the handle. The finalizer may also empty the tables
 * that the caller passed. So a function works in this order:
 *   1. make all that it will need of Lua: an empty handle, a plan, a pending;
 *   2. look whether its manager or handle is still there, and read options and targets;
 *   3. call the core, and fill in the handle, the plan or the pending.
 * From step 2 on the function allocates nothing in Lua, until it needs the pointers no more.
 * A call of Lua code has the same effects as an allocation: on_lost, a hook, a program's loop.
 */
#ifndef HIERLOCK_LUA_HLL_H
#define HIERLOCK_LUA_HLL_H

#include "compat.h"
#include "hierlock.h"

/* Names of classes. The core's own are told apart by their address; see hll_testudata. */
#define HLL_ERROR "hierlock.error"
#define HLL_STORE "hierlock.store"
extern const char HLL_MANAGER[], HLL_HANDLE[], HLL_PENDING[], HLL_PLAN[], HLL_HOLDERS[];

/* ---- error.c */

/* Raises with the position of the first caller outside of this library. */
int hll_misuse(lua_State *L, const char *format, ...) __attribute__((noreturn));
/* Sets a field of the table on the top, unless the value is "". */
void hll_set_text(lua_State *L, const char *name, const char *value);
/* Pushes nil, err and returns 2. Raises misuse and want of memory.
   target: stack index of a value for err.target, or 0. */
int hll_failure(lua_State *L, const hl_error *error, int target);
/* Pushes nil, err with the binding's own status and message. */
int hll_fail(lua_State *L, int status, const char *message);
int hll_is_error(lua_State *L);
/* Writes the line from which the program called, "file:line", for messages; nothing where it is not
   known. Allocates nothing. */
void hll_where(lua_State *L, char where[HL_WHERE_SIZE]);
void hll_error_register(lua_State *L);

/* ---- options.c */

/* Returns the string at index. Returns NULL for another type, and for a string with a NUL byte: C
   would take it for a shorter one. */
const char *hll_word(lua_State *L, int index);
/* Reads a number of seconds. `what` names the option or argument in messages. */
int64_t hll_milliseconds(lua_State *L, int index, const char *what);
/* Read the value on the top as a boolean, or as a string of 1 to `most` bytes, and the value at
   index as a lease's duration in ms. Each raises where the value is something else. */
bool hll_boolean(lua_State *L, const char *what);
const char *hll_text(lua_State *L, const char *what, size_t most);
int64_t hll_ttl(lua_State *L, int index);
/* Calls each(L, context) for each field of the table at index, with the value on the top and its
   name. None or nil has no fields. `each` returns false for a name that it does not know, and
   hll_options raises. */
typedef bool (*hll_option_fn)(lua_State *L, const char *name, void *context);
void hll_options(lua_State *L, int index, hll_option_fn each, void *context);
hl_mode hll_mode(lua_State *L, int index);
/* Reads the value on the top as a list of 1 to `most` strings without NUL bytes, and ends `words`
   with NULL. The list keeps the strings. `of` says in messages what the strings are. */
void hll_words(lua_State *L, const char *what, const char *of, size_t most, const char *words[]);
/* A layout from the fields levels and buckets; see hll_layout_option. The names live until the
   next allocation in Lua: see above. */
typedef struct hll_layout_options {
  const char *names[HL_LEVELS_MAX + 1];
  unsigned levels; /* 0: the default */
  uint32_t buckets;
} hll_layout_options;
/* Takes the value on the top for the option levels or buckets. Returns false for other names. */
bool hll_layout_option(lua_State *L, const char *name, hll_layout_options *options);
hl_layout *hll_layout_new(lua_State *L, const hll_layout_options *options);

/* ---- classes.c */

typedef struct hll_plan {
  hl_plan *plan; /* NULL before it is made, and after collection */
  char *sql;     /* on its way to Lua; NULL otherwise */
  size_t gates;  /* gate rows that its last statement adds to the plan's rows */
  bool borrowed; /* a call uses it, or has raised */
} hll_plan;

/* Pushes a userdata without a plan. */
hll_plan *hll_plan_push(lua_State *L);
hll_plan *hll_plan_test(lua_State *L, int index);
/* Pushes a userdata for a single call. hll_plan_begin gives it an empty plan, and allocates nothing
   in Lua. Calls are frequent, so a manager keeps one userdata in its shared table. A call that
   finds it borrowed puts another in its place. The call returns it by `borrowed = false`. */
hll_plan *hll_plan_borrow(lua_State *L, int shared);
hl_plan *hll_plan_begin(lua_State *L, hll_plan *self, hl_layout *layout);

typedef struct hll_report hll_report;

/* A manager's uservalue is a table that its handles share:
     [1] the manager itself, so that a handle keeps it alive
     [2] a plan to be borrowed, or nil
     [3] the metatable of handles: a look into the registry by name costs thrice as much
     on_lost, on_wait ...   the hooks that the program has set
     handles   with on_lost or a hook: the handles that are held, as weak keys
     events    with a hook other than on_lost: see hook.c
     warn_unreleased, check_order   functions, where these options are functions */
typedef struct hll_trace hll_trace;
typedef struct hll_manager {
  hl_manager *manager;                            /* NULL once closed */
  uint64_t losses;                                /* as many losses has on_lost heard of */
  unsigned acquired;                              /* calls so far, for hll_gc_account */
  bool hooks;                                     /* the program has set one beside on_lost */
  bool watches;                                   /* the shared table has `handles` */
  bool telling;                                   /* one of them runs */
  hll_trace *traces;                              /* see hook.c */
  hll_trace *ended;                               /* a hook is still to hear of these */
  hl_agent *agent;                                /* of the Lua state; NULL once closed */
  bool loops_anywhere;                            /* its loop needs no yield of Lua's */
  bool own_handles;                               /* each coroutine is a strand of the agent */
  bool warn_unreleased, check_order, check_units; /* report.c */
  bool prints_order;                              /* to stderr, and not to a function */
  bool raises_order;                              /* against the order of units */
  bool names_lines;                               /* a deadlock or a report may name its calls */
  hll_report *reports;                            /* still to be told */
} hll_manager;

hll_manager *hll_manager_test(lua_State *L, int index);

/* Ties a handle or a pending to a request of the program's host (nginx), which ends it. Both have
   one as the first member. All zero: it is tied to no request. */
typedef struct hll_tied hll_tied;
struct hll_tied {
  hll_tied *next, **at;
};

void hll_tie(hll_tied *tied, hll_tied **list);
void hll_untie(hll_tied *tied); /* does nothing when it is not tied */

typedef struct hll_handle {
  hll_tied tied;
  hl_lock *lock;                /* NULL before it is granted, and after collection */
  hll_manager *owner;           /* its shared table, which the handle has, keeps it */
  hll_trace *trace, *extending; /* of its acquisition, of an extend; or NULL */
} hll_handle;

hll_handle *hll_handle_test(lua_State *L, int index);
/* Pushes 16 hexadecimal digits. */
void hll_token_push(lua_State *L, uint64_t token);

typedef struct hll_pending {
  hll_tied tied;
  hl_pending *pending; /* NULL before it is started, and after collection */
  hll_trace *trace;    /* or NULL */
} hll_pending;

/* Pushes an empty pending. The call fills in the handle at index, or works on that
   handle. */
hll_pending *hll_pending_push(lua_State *L, int shared, int handle);
hll_pending *hll_pending_test(lua_State *L, int index);

/* ---- target.c */

/* Adds the target at index to the plan. mode: for a target without its own.
   Allocates nothing in Lua, unless it raises. */
void hll_target_add(lua_State *L, int index, hl_plan *plan, hl_mode mode);
void hll_targets_add(lua_State *L, int index, hl_plan *plan, hl_mode mode);
/* Returns the id at a stack index, for the level. The bytes live as long as the value,
   or in `room`. */
hl_id hll_id(lua_State *L, int index, const char *level, char room[24]);
/* Pushes a target of the plan as a table keyed by level. The second pushes the list of all. */
void hll_target_push(lua_State *L, const hl_plan *plan, size_t i);
void hll_targets_push(lua_State *L, const hl_plan *plan);

/* ---- plan.c */

int hll_plan_new(lua_State *L);
void hll_plan_register(lua_State *L);

/* ---- shared.c */

/* Returns the manager at stack index 1; raises when it is closed. Tells on_lost. */
hll_manager *hll_manager_check(lua_State *L);
/* Settles the stack to n values, the first a manager or a handle, and pushes the
   shared table, at n + 1. */
int hll_manager_shared(lua_State *L, int n);
/* Tells on_lost of each lost lock of the manager, unless the manager is closed. The manager or a
   handle of it is at 1. */
void hll_losses_tell(lua_State *L, hll_manager *self);
/* For the methods that acquire. The first counts a call. The second returns the core's manager; it
   raises where an allocation has run a finalizer that closed it. The third pushes an empty handle,
   of whose loss on_lost will hear. */
void hll_manager_account(lua_State *L, hll_manager *self);
hl_manager *hll_manager_still_open(lua_State *L, const hll_manager *self);
hll_handle *hll_handle_push(lua_State *L, hll_manager *owner, int shared);
/* For the handle's methods: returns the handle at 1. A collected handle has no lock: other
   finalizers may still see it after its own. The second tells on_lost. */
hll_handle *hll_handle_self(lua_State *L);
hll_handle *hll_handle_check(lua_State *L);
/* Pushes the answer of a collected handle, nil, err, and returns 2. */
int hll_handle_collected(lua_State *L);
/* Makes the call on the handle at 1, the last step of a method, and pushes what the method returns.
   place: see hll_handle_pending. */
struct hl__wish;
int hll_handle_call(lua_State *L, const hll_handle *self, int place, const struct hl__wish *wish);
int hll_push_true(lua_State *L);
/* Notes that the handle at index is held, perhaps again: on_lost hears of its next loss. */
void hll_handle_rewatch(lua_State *L, int index);

/* ---- asker.c */

/* Which options a call takes. */
enum {
  HLL_TIMEOUT = 1,
  HLL_MODE = 2,
  HLL_LABEL = 4,
  HLL_OWNER = 8,
  HLL_TTL = 16, /* and auto_refresh, auto_release */
  HLL_ALL = 31
};
/* The options of a call, and its asker. Label and owner live until the next allocation in Lua: see
   above. */
typedef struct hll_call_options {
  unsigned takes; /* HLL_TIMEOUT ... */
  hl_options core;
  hl_mode mode;
  uint64_t strand; /* the running coroutine's number, where the manager wants it, else 0 */
  char where[HL_WHERE_SIZE]; /* the program's line; core points to it */
} hll_call_options;
/* Finds who asks for a call that takes such options. May allocate. */
void hll_call_options_begin(lua_State *L, const hll_manager *self, unsigned takes,
                            hll_call_options *options);
/* Reads the options from the table at index. Once more after a hook, which may have changed them;
   what hl_order_check has set then stays. */
void hll_call_options_read(lua_State *L, int index, const hll_manager *self,
                           hll_call_options *options);

/* ---- blockers.c */

/* Holders and waiters in a request's way. The userdata has no methods; its finalizer frees the
   list. The core fills it in, and no error of Lua's may leave the core. */
typedef struct hll_holders {
  hl_holder *list;
  size_t n, capacity;
  hl_error error; /* why there may be others; HL_OK: the list has all */
} hll_holders;

hll_holders *hll_holders_push(lua_State *L);
/* An hl_holder_fn; context: hll_holders. */
void hll_holders_add(void *context, const hl_holder *holder);
/* Finds the holders and waiters that were in the way of a request that has just failed, as far as
   the store tells in time. */
void hll_holders_find(hll_holders *self, hl_manager *manager, const hl_plan *plan);
/* Pushes the holders as a list of tables. */
void hll_holders_list(lua_State *L, const hll_holders *self);
/* Pushes nil, err for a request that was not granted, and returns 2. Sets err.target, where one
   target is concerned, and err.holders; the message names one holder. Only the caller may have the
   plan. */
int hll_acquire_failure(lua_State *L, hl_error *error, const hl_plan *plan,
                        const hll_holders *found);
/* Finds the holders itself, for a request that the manager has just refused, and does the same. */
int hll_acquire_refused(lua_State *L, hl_error *error, const hl_plan *plan,
                        const hll_manager *manager);
/* manager:holders(target), in acquire.c */
int hll_manager_holders(lua_State *L);
void hll_holders_register(lua_State *L);

/* ---- manager.c */

/* Returns the store of that name (hl_dsn_store), and loads its module. May leave values on the
   stack. Returns NULL where the module cannot be loaded; the message is then on the top. */
const struct hl_store_ops *hll_store_load(lua_State *L, const char *name);
int hll_manager_open(lua_State *L);
/* manager:unit */
int hll_manager_unit(lua_State *L);
int hll_manager_plan(lua_State *L);
void hll_manager_register(lua_State *L);

/* ---- hook.c: owner is where a handle or a pending has its trace, or NULL. An error that a hook
   raises comes out of the function that called it. */

bool hll_hook_named(const char *name);
/* Copies the hooks from the table of options into the shared table. */
void hll_hooks_set(lua_State *L, int options, int shared);
/* Calls on_wait: a call begins, with its options below the shared table. plan: NULL where it is not
   known yet. Does nothing without hooks. The caller then looks whether its manager or handle is
   still there. */
void hll_trace_begin(lua_State *L, int shared, hll_manager *self, const char *call,
                     const hl_plan *plan, hll_trace **owner);
/* Calls on_grant: the handle has the lock. Releases the lock when the hook raises. */
void hll_trace_granted(lua_State *L, int shared, hll_trace **owner, int handle);
/* Calls on_grant for an extend, and ends the trace. */
void hll_trace_extended(lua_State *L, int shared, hll_trace **owner, int handle);
/* Calls on_timeout or on_error: the store did not grant the call. */
void hll_trace_failed(lua_State *L, int shared, hll_trace **owner, int err);
/* Ends the trace, and calls on_release if its call was granted, else on_error. `by` says what ended
   the lock. */
void hll_trace_end(lua_State *L, int shared, hll_trace *trace, const char *by);
/* Ends the trace too, but a later call tells the hook. Calls no Lua. */
void hll_trace_queue(hll_trace *trace, const char *by);
/* Pushes the trace's event. Allocates nothing. */
void hll_trace_push(lua_State *L, int shared, hll_trace *trace);
void hll_trace_move(hll_trace **from, hll_trace **owner);
/* The first tells the hooks of the traces that are queued. The second queues and tells all, when
   the manager is closed. The third tells nothing, when the manager is collected. */
void hll_traces_tell(lua_State *L, int shared, hll_manager *self);
void hll_traces_close(lua_State *L, int shared, hll_manager *self);
void hll_traces_drop(hll_manager *self);
/* ---- report.c */

/* Takes the value on the top for one of the two options, and returns whether it wants reports.
   raises: "raise" is a value, too. */
bool hll_report_option(lua_State *L, const char *name, bool raises);
/* Returns the default of both options: HIERLOCK_CHECK. */
bool hll_report_default(void);
/* Notes that the collector has found a handle that was not released. For finalizers. */
void hll_unreleased_report(hll_manager *self, const hl_lock *lock);
/* Calls hl_units_check and hl_order_check, where the program wants these, before a request for the
   plan and before its hooks. Allocates nothing in Lua, unless it raises. */
void hll_order_check(lua_State *L, hll_manager *self, const hl_plan *plan, hl_options *options);
/* Tells the reports that were noted; the shared table is at index. An error that the program's
   function raises comes out; the next call tells the rest. */
void hll_reports_tell(lua_State *L, int shared, hll_manager *self);
/* Ends the manager's reports: writes the rest to stderr, as far as stderr takes it at once. */
void hll_reports_end(hll_manager *self);

/* ---- acquire.c */

/* The methods that acquire, for the manager's class. */
extern const luaL_Reg hll_acquire_methods[];
/* Adds the table `any` to the table on the top. */
void hll_any_register(lua_State *L);
/* ---- lease.c */

int hll_manager_leases(lua_State *L);
int hll_manager_revoke(lua_State *L);
int hll_handle_refresh(lua_State *L);
int hll_handle_to_lease(lua_State *L);
int hll_handle_export(lua_State *L);

/* ---- request.c */

/* Adds functions to the table on the top. */
void hll_request_register(lua_State *L);

/* ---- notifier.c */

/* Adds functions to the table on the top. */
void hll_notifier_register(lua_State *L);

/* ---- pending.c */

/* Where the upvalue with this index is true, a method that waits starts its call
   instead, and returns a pending. */
#define HLL_STARTS 2
/* Where this one is true, too, the caller's coroutine waits for the pending, and does nothing
   else. */
#define HLL_AWAITS 3
/* Where this one is true, the method neither starts nor waits: it only checks its order. */
#define HLL_CHECKS 4
bool hll_starts(lua_State *L);
bool hll_awaits(lua_State *L);
/* Pushes an empty pending for a call on the handle at 1, and returns its stack index; 0: the method
   waits. */
int hll_handle_pending(lua_State *L);
/* Returns where the core puts the pending at that index; NULL for 0, so that the call blocks. */
static inline hl_pending **hll_pending_at(lua_State *L, int place) {
  return place ? &hll_pending_test(L, place)->pending : NULL;
}
/* Pushes what the method returns: nil, err; the pending, if the call was started; else true. */
static inline int hll_handle_answer(lua_State *L, int place, int status, const hl_error *error) {
  if (status) return hll_failure(L, error, 0);
  if (place && *hll_pending_at(L, place))
    lua_pushvalue(L, place);
  else
    lua_pushboolean(L, 1);
  return 1;
}
/* pending:wait */
int hll_pending_wait(lua_State *L);
/* __close, __gc */
int hll_pending_close(lua_State *L);
void hll_pending_register(lua_State *L);

/* ---- handle.c */

/* The methods that wait for the store. */
extern const luaL_Reg hll_handle_calls[];
void hll_handle_register(lua_State *L);

#endif
