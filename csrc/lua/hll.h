/*
 * hll.h - the Lua binding: one C file for each class, each in the order
 * methods, metamethods, tables of functions, push and check. The binding checks
 * arguments, makes userdata and calls the core; it decides nothing.
 *
 * Misuse raises (hll_misuse); everything else is `nil, err` (hll_failure).
 *
 * Allocate first, then check, then take a reference. Whatever Lua allocates may
 * raise for want of memory, and may run finalizers of the program's, which may call
 * us: close the manager, finalize the handle, empty the tables that were passed. So
 * a function first makes all that it will need of Lua (an empty handle, a plan, a
 * pending). Then it looks whether what it works on is still there, and reads
 * options and targets. Then it calls the core and fills in what it has made. From the
 * look on it allocates nothing in Lua, until it needs the pointers no more.
 * The same holds for whatever calls Lua: on_lost, a program's loop.
 */
#ifndef HIERLOCK_LUA_HLL_H
#define HIERLOCK_LUA_HLL_H

#include "compat.h"
#include "hierlock.h"

#define HLL_MANAGER "hierlock.manager"
#define HLL_HANDLE "hierlock.handle"
#define HLL_PLAN "hierlock.plan"
#define HLL_ERROR "hierlock.error"
#define HLL_HOLDERS "hierlock.holders"
#define HLL_STORE "hierlock.store"
#define HLL_PENDING "hierlock.pending"

/* ---- error.c */

/* Raises with the position of the first caller outside of this library. */
int hll_misuse(lua_State *L, const char *format, ...) __attribute__((noreturn));
/* Pushes nil, err and returns 2; raises what is misuse, or want of memory.
   target: stack index of a value for err.target, 0 where there is none. */
int hll_failure(lua_State *L, const hl_error *error, int target);
/* Pushes nil, err with a status and a message of the binding's own. */
int hll_fail(lua_State *L, int status, const char *message);
int hll_is_error(lua_State *L);
/* Where the program called, "file:line", for messages; "" where it is not known. Allocates
   nothing. */
void hll_where(lua_State *L, char where[HL_WHERE_SIZE]);
void hll_error_register(lua_State *L);

/* ---- options.c */

/* The string at index; NULL when it is none, or contains a NUL byte: C would take
   it for a shorter one. */
const char *hll_word(lua_State *L, int index);
/* `what` names the option or argument in messages. */
int64_t hll_milliseconds(lua_State *L, int index, const char *what);
/* The value on the top as a boolean, or as a string of 1 to `most` bytes; the value at index as a
   duration of a lease in ms. They raise where it is something else. */
bool hll_boolean(lua_State *L, const char *what);
const char *hll_text(lua_State *L, const char *what, size_t most);
int64_t hll_ttl(lua_State *L, int index);
/* Calls each(L, context) for the fields of the table at index (none or nil: no
   fields) with the value on the top and its name; each returns false for a
   name that it does not know, which raises. */
typedef int (*hll_option_fn)(lua_State *L, const char *name, void *context);
void hll_options(lua_State *L, int index, hll_option_fn each, void *context);
hl_mode hll_mode(lua_State *L, int index);
/* A layout from fields levels and buckets; see hll_layout_option. The names live
   as long as nothing allocates: see above. */
typedef struct hll_layout_options {
  const char *names[HL_LEVELS_MAX];
  unsigned levels; /* 0: the default */
  uint32_t buckets;
} hll_layout_options;
/* Takes the value on the top for options levels and buckets; returns false when
   name is neither. */
int hll_layout_option(lua_State *L, const char *name, hll_layout_options *options);
hl_layout *hll_layout_new(lua_State *L, const hll_layout_options *options);

/* ---- classes.c */

typedef struct hll_plan {
  hl_plan *plan; /* NULL before it is made, and after collection */
  char *sql;     /* on its way to Lua; NULL otherwise */
  size_t gates;  /* rows of its last statement beyond those of the plan */
} hll_plan;

/* Pushes one without a plan. */
hll_plan *hll_plan_push(lua_State *L);
hll_plan *hll_plan_test(lua_State *L, int index);
/* Pushes one for a single call; hll_plan_begin makes it an empty plan, and allocates
   nothing in Lua. A manager keeps one in its shared table, for calls come often; while
   it is in use, and when a call raised, there is none, and another is made. */
hll_plan *hll_plan_borrow(lua_State *L, int shared);
hl_plan *hll_plan_begin(lua_State *L, hll_plan *self, hl_layout *layout);
/* Gives back the plan at stack index `plan`. Does not raise once a plan has been
   borrowed: its place in the table is there. */
void hll_plan_return(lua_State *L, int shared, int plan);

typedef struct hll_report hll_report;

/* A manager's uservalue is a table that its handles share:
     [1] the manager itself, so that a handle keeps it alive
     [2] a plan to be borrowed; false or nil while it is in use
     on_lost, on_wait ...   the hooks, where there are any
     handles   then: the handles that are held, as weak keys
     events    then, unless on_lost is all: see hook.c
     warn_unreleased, check_order   functions, where these options are such */
typedef struct hll_trace hll_trace;
typedef struct hll_manager {
  hl_manager *manager;                            /* NULL once closed */
  uint64_t losses;                                /* as many have been told to on_lost */
  unsigned acquired;                              /* calls so far, for hll_gc_account */
  bool hooks;                                     /* it has some beside on_lost */
  bool telling;                                   /* one of them runs */
  hll_trace *traces;                              /* see hook.c */
  hll_trace *ended;                               /* those of which a hook is still to be told */
  hl_agent *agent;                                /* of the Lua state; NULL once closed */
  bool own_handles;                               /* each coroutine is a strand of it */
  bool warn_unreleased, check_order, check_units; /* report.c */
  bool prints_order;                              /* to stderr, and not to a function */
  bool raises_order;                              /* that of units */
  hll_report *reports;                            /* still to be told */
} hll_manager;

hll_manager *hll_manager_test(lua_State *L, int index);

/* What lives as long as a request of the program's host (nginx): a member of a handle or
   a pending. All zero: it is tied to none. */
typedef struct hll_tied hll_tied;
struct hll_tied {
  hll_tied *next, **at;
  void (*end)(hll_tied *tied);
};

/* end must not call Lua. */
void hll_tie(hll_tied *tied, hll_tied **list, void (*end)(hll_tied *tied));
void hll_untie(hll_tied *tied); /* does nothing when it is not tied */

typedef struct hll_handle {
  hl_lock *lock; /* NULL before it is granted, and after collection */
  hll_tied tied;
  hll_trace *trace, *extending; /* of its acquisition, of an extend; or NULL */
} hll_handle;

/* Pushes an empty handle that shares the table at index. */
hll_handle *hll_handle_push(lua_State *L, int shared);
hll_handle *hll_handle_test(lua_State *L, int index);
/* Pushes 16 hexadecimal digits. */
void hll_token_push(lua_State *L, uint64_t token);

typedef struct hll_pending {
  hl_pending *pending; /* NULL before it is started, and after collection */
  hll_tied tied;
  hll_trace *trace; /* or NULL */
} hll_pending;

/* Pushes an empty pending that will fill in the handle at index, or uses it. */
hll_pending *hll_pending_push(lua_State *L, int shared, int handle);
hll_pending *hll_pending_test(lua_State *L, int index);

/* ---- target.c */

/* Adds the target at index to the plan. mode: for a target without its own.
   Allocates nothing in Lua, unless it raises. */
void hll_target_add(lua_State *L, int index, hl_plan *plan, hl_mode mode);
void hll_targets_add(lua_State *L, int index, hl_plan *plan, hl_mode mode);
/* An id at a stack index, for the level; the bytes live as long as the value,
   or in `room`. */
hl_id hll_id(lua_State *L, int index, const char *level, char room[24]);
/* Pushes a target of the plan as a table keyed by level. */
void hll_target_push(lua_State *L, const hl_plan *plan, size_t i);

/* ---- plan.c */

int hll_plan_new(lua_State *L);
void hll_plan_register(lua_State *L);

/* ---- shared.c */

/* The manager at stack index 1; raises when it is closed. Tells on_lost. */
hll_manager *hll_manager_check(lua_State *L);
/* Settles the stack to n values, the first a manager or a handle, and pushes the
   shared table, at n + 1. */
int hll_manager_shared(lua_State *L, int n);
/* Tells on_lost what has been lost; the shared table is at index. */
void hll_losses_tell(lua_State *L, int shared);
/* For what acquires, in acquire.c and lease.c. Counts a call; the manager, which an allocation
   may have closed: raises then; an empty handle, of whose loss on_lost will hear. */
void hll_manager_account(lua_State *L, hll_manager *self);
hl_manager *hll_manager_still_open(lua_State *L, const hll_manager *self);
hll_handle *hll_handle_watch(lua_State *L, int shared);
/* For its methods. The handle at 1; one that was collected has no lock: its finalizer may be
   followed by others that still see it. */
hll_handle *hll_handle_check(lua_State *L);
/* What such a one answers: nil, err. */
int hll_handle_collected(lua_State *L);
int hll_push_true(lua_State *L);
/* Tells on_lost. */
void hll_handle_losses(lua_State *L);
/* The handle at that index is held, perhaps again: on_lost hears of its next loss. */
void hll_handle_rewatch(lua_State *L, int index);

/* ---- asker.c */

/* Options of an acquisition: timeout, mode, label, and those of a lease. The label lives as long as
   nothing allocates: see above. */
typedef struct hll_acquire_options {
  hl_options core;
  hl_mode mode;
} hll_acquire_options;
void hll_acquire_options_read(lua_State *L, int index, hll_acquire_options *options);
/* After a hook, which may have changed them; who asks stays. */
void hll_acquire_options_again(lua_State *L, int index, hll_acquire_options *options);
/* The number of the running coroutine, where the manager wants it, else 0. May allocate. */
uint64_t hll_strand(lua_State *L, const hll_manager *self);
/* Fills in the asker's fields of options. where: room for hl_options.where. The caller calls hll_strand before,
   as that may allocate. */
void hll_asker_add(lua_State *L, const hll_manager *self, uint64_t strand,
                   char where[HL_WHERE_SIZE], hl_options *options);
/* Takes the value on the top for ttl, owner, auto_refresh or auto_release; returns false
   when name is none of them. The owner lives as long as nothing allocates. */
int hll_lease_option(lua_State *L, const char *name, hl_options *options);

/* ---- blockers.c */

/* Those who are in the way; a userdata without methods, which frees them. Filled in
   by the core, which must not be left by an error of Lua's. */
typedef struct hll_holders {
  hl_holder *list;
  size_t n, capacity;
  hl_error error; /* why there may be others; HL_OK: these are all */
} hll_holders;

hll_holders *hll_holders_push(lua_State *L);
/* An hl_holder_fn; context: hll_holders. */
void hll_holders_add(void *context, const hl_holder *holder);
/* Those whom a request that has just failed had in its way, as far as can be told in time. */
void hll_holders_find(hll_holders *self, hl_manager *manager, const hl_plan *plan);
/* Pushes the list of them as tables. */
void hll_holders_list(lua_State *L, const hll_holders *self);
/* Pushes nil, err of a request that was not granted, and returns 2: with err.target,
   where there is one in the plan, and err.holders, whose first one the message
   names. The plan is the caller's alone. */
int hll_acquire_failure(lua_State *L, hl_error *error, const hl_plan *plan,
                        const hll_holders *found);
/* The same for one that the manager has just refused: looks for the holders itself. */
int hll_acquire_refused(lua_State *L, hl_error *error, const hl_plan *plan,
                        const hll_manager *manager);
/* manager:holders(target) */
int hll_manager_holders(lua_State *L);
void hll_holders_register(lua_State *L);

/* ---- manager.c */

/* The store of that name (hl_dsn_store), its module loaded; pushes what it needs. NULL:
   it is not there, and the message is on the top. */
const struct hl_store_ops *hll_store_load(lua_State *L, const char *name);
int hll_manager_open(lua_State *L);
/* manager:unit */
int hll_manager_unit(lua_State *L);
int hll_manager_plan(lua_State *L);
void hll_manager_register(lua_State *L);

/* ---- hook.c: owner is where a handle or a pending has its trace, or NULL. What a hook raises is
   raised. */

bool hll_hook_named(const char *name);
/* From the table of options into the shared one. */
void hll_hooks_set(lua_State *L, int options, int shared);
/* on_wait: a call begins, whose options are at that index. plan: NULL where it is not known yet.
   Does nothing where there are no hooks. Afterwards look whether what it works on is still
   there. */
void hll_trace_begin(lua_State *L, int shared, hll_manager *self, const char *call, int options,
                     const hl_plan *plan, hll_trace **owner);
/* on_grant: the handle has it. When the hook raises it is released. */
void hll_trace_granted(lua_State *L, int shared, hll_trace **owner, int handle);
/* The same of an extend, which has ended with that. */
void hll_trace_extended(lua_State *L, int shared, hll_trace **owner, int handle);
/* on_timeout, on_error: it was not granted. */
void hll_trace_failed(lua_State *L, int shared, hll_trace **owner, int err);
/* on_release, or on_error of what was not granted: it is over, by that. */
void hll_trace_end(lua_State *L, int shared, hll_trace *trace, const char *by);
/* The same, told by a later call. Calls no Lua. */
void hll_trace_queue(hll_trace *trace, const char *by);
/* Pushes its event. Allocates nothing. */
void hll_trace_push(lua_State *L, int shared, hll_trace *trace);
void hll_trace_move(hll_trace **from, hll_trace **owner);
/* Tells what was queued; of all when the manager is closed; nothing, when it is collected. */
void hll_traces_tell(lua_State *L, int shared, hll_manager *self);
void hll_traces_close(lua_State *L, int shared, hll_manager *self);
void hll_traces_drop(hll_manager *self);
/* ---- report.c */

/* The value on the top for one of the two options. raises: NULL where it cannot. */
void hll_report_option(lua_State *L, const char *name, bool *wanted, bool *prints, bool *raises);
/* What they are without: HIERLOCK_CHECK. */
bool hll_report_default(void);
/* A handle is collected that was not released. For finalizers. */
void hll_unreleased_report(hll_manager *self, const hl_lock *lock);
/* Before a request for the plan, and before its hooks: hl_units_check and hl_order_check, where these
   are wanted. Allocates nothing in Lua, unless it raises. */
void hll_order_check(lua_State *L, hll_manager *self, const hl_plan *plan, hl_options *options);
/* Tells what was noted; the shared table is at index. What a function of the program's raises
   comes out; what was not told yet is told next. */
void hll_reports_tell(lua_State *L, int shared, hll_manager *self);
/* The manager ends: what nobody was told goes to stderr, as far as that takes it at once. */
void hll_reports_end(hll_manager *self);

/* ---- acquire.c */

/* The methods that acquire, for the manager's class. */
extern const luaL_Reg hll_acquire_methods[];
/* Adds the table `any` to the table on the top. */
void hll_any_register(lua_State *L);
/* ---- lease.c */

int hll_manager_import(lua_State *L);
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
/* The same, and its coroutine waits for the pending, and does nothing else. */
#define HLL_AWAITS 3
/* It does neither, and only checks its order. */
#define HLL_CHECKS 4
bool hll_starts(lua_State *L);
/* Pushes an empty pending for a call on the handle at 1, and returns its stack index; 0: the method waits. */
int hll_handle_pending(lua_State *L);
/* Where the core puts the pending at that index; NULL for 0, so that the call blocks. */
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
