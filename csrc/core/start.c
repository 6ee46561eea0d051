/*
 * start.c - see start.h.
 */
#include "start.h"

#include "error.h"
#include "export.h"
#include "pending.h"
#include "plan.h"

#include <string.h>

/* Enters the wait of a call that may wait in the books of its agent, if it counts there. own: what
   the agent holds of the call's own lock, or NULL. */
static int wait_begin(hl__wait *wait, const hl__call *call, const hl__held *own, hl_error *error) {
  hl_manager *manager = call->manager;
  const hl_options *options = &call->options;
  if (!hl__wait_counts(options, call->timeout) || manager->ops->traits.grants_all) return HL_OK;
  wait->agent = options->agent;
  wait->strand = options->strand;
  wait->manager = manager;
  wait->plan = call->extension ? call->extension->plan : call->lock->plan;
  wait->own = own;
  wait->where = options->where;
  wait->timeout = call->timeout;
  hl__manager_renew(manager);
  return hl__wait_begin(wait, error);
}

/* Runs wait_begin for a thread that blocks, and counts a call that is refused. */
static inline int thread_wait_begin(hl__wait *wait, const hl__call *call, const hl__held *own,
                                    hl_error *error) {
  int status = wait_begin(wait, call, own, error);
  if (status == HL_OK) return HL_OK;
  hl__manager_mutex_lock(call->manager);
  hl__manager_event(call->manager, HL__CALL_BEGINS, 0, 0);
  hl__manager_event(call->manager, HL__CALL_ENDS, status, 0);
  hl__manager_mutex_unlock(call->manager);
  return status;
}

/* -------------------------------------------------------------- acquiring */

/* An acquisition or an import, before its call. */
typedef struct acquisition {
  hl_manager *manager;
  hl_options options;
  hl_lock *lock; /* the new one; NULL: it could not be made */
} acquisition;

/* Makes the lock of an import, with the lease that it is to adopt. */
static int import_make(acquisition *self, const hl_id *text, const hl_options *given,
                       hl_error *error) {
  hl_options *options = &self->options;
  hl_lease_terms terms = {0};
  hl_plan *plan = NULL;
  int status = hl__options_take(given, options, error);
  if (status == HL_OK && options->ttl) status = hl__lease_options_check(options, error);
  if (status == HL_OK)
    status = hl__export_read(text->data, text->size, self->manager->layout, &terms, &plan, error);
  if (status) return status;
  options->timeout = 0;
  options->label_size = 0;
  options->owner = NULL; /* the record has it */
  if (!options->ttl) options->ttl = terms.ttl;
  status = hl__lock_new(self->manager, plan, options, &self->lock, error);
  if (status == HL_OK) {
    hl__lease *lease = self->lock->lease;
    memcpy(lease->terms.id, terms.id, sizeof terms.id);
    memcpy(lease->terms.secret, terms.secret, sizeof terms.secret);
    lease->terms.place = terms.place;
    lease->imported = true;
  }
  hl_plan_free(plan);
  return status;
}

/* Tries it where the store cannot block. True: it is granted. */
static bool try_at_once(const acquisition *self) {
  hl_manager *manager = self->manager;
  hl_error error;
  hl__call call;
  if (manager->ops->traits.blocks) return false;
  hl__call_init(&call, manager, HL__ACQUIRE, self->lock, &self->options);
  hl__manager_renew(manager);
  hl__manager_mutex_lock(manager);
  bool entered = !hl__line_would_follow(manager, self->lock->plan) &&
                 hl__manager_enter(manager, &error) == HL_OK;
  hl__manager_mutex_unlock(manager);
  bool granted = entered && hl__call_acquire(&call, 0, &error) == HL_OK;
  if (granted) {
    hl__manager_mutex_lock(manager);
    hl__manager_event(manager, HL__CALL_BEGINS, 0, 0);
    (void)hl__call_ends(&call, HL_OK);
    hl__manager_mutex_unlock(manager);
    hl__agent_keep(&self->lock->held, self->options.agent);
  }
  if (entered) hl__manager_leave(manager);
  return granted;
}

/* Makes the call in this thread, and blocks. */
static inline int acquire(acquisition *self, hl_lock **result, hl_error *error) {
  hl_lock *lock = self->lock;
  hl__wait wait = {.blocks = true};
  hl__call call;
  hl__call_init(&call, self->manager, HL__ACQUIRE, lock, &self->options);
  /* Before it looks for circles among all that the thread holds, it asks whether it has to wait. */
  bool granted = hl__wait_counts(&self->options, call.timeout) && try_at_once(self);
  int status = granted ? HL_OK : thread_wait_begin(&wait, &call, NULL, error);
  if (status == HL_OK && !granted) {
    status = hl__call_make(&call, error);
    hl__wait_end(&wait);
    if (status == HL_OK) hl__agent_keep(&lock->held, self->options.agent);
  }
  if (status)
    hl_lock_free(lock);
  else
    *result = lock;
  return status;
}

int hl_acquire(hl_manager *manager, const hl_plan *plan, const hl_options *given, hl_lock **result,
               hl_error *error) {
  HL__UNCANCELLED;
  HL__NEEDS(manager && plan && result, error);
  acquisition self;
  self.manager = manager;
  *result = NULL;
  int status = hl__options_take(given, &self.options, error);
  if (status == HL_OK) status = hl__options_check(&self.options, manager, plan, error);
  if (status == HL_OK) status = hl__lock_new(manager, plan, &self.options, &self.lock, error);
  return status ? status : acquire(&self, result, error);
}

bool hl__acquire_at_once(hl_manager *manager, const hl_plan *plan, const hl_options *given,
                         hl_lock **result) {
  HL__UNCANCELLED;
  hl_error error;
  acquisition self;
  self.manager = manager;
  if (manager->ops->traits.blocks || hl__options_take(given, &self.options, &error) ||
      hl__options_check(&self.options, manager, plan, &error) ||
      hl__lock_new(manager, plan, &self.options, &self.lock, &error))
    return false;
  bool granted = try_at_once(&self);
  if (granted)
    *result = self.lock;
  else
    hl_lock_free(self.lock);
  return granted;
}

int hl_import(hl_manager *manager, const char *text, size_t size, const hl_options *given,
              hl_lock **result, hl_error *error) {
  HL__UNCANCELLED;
  HL__NEEDS(manager && text && result, error);
  acquisition self = {.manager = manager};
  *result = NULL;
  int status = import_make(&self, &(hl_id){text, size}, given, error);
  return status ? status : acquire(&self, result, error);
}

/* --------------------------------------------------- starting to acquire */

static bool is_over(hl__wait *wait) {
  return hl_pending_done(HL__LIST_ENTRY(wait, hl_pending, wait));
}

/* Ends a pending that no other thread has seen yet, as it would have waited for ever. */
static void refuse(hl_pending *pending, int status) {
  hl__manager_mutex_lock(pending->call.manager);
  hl__pending_finish(pending, status);
  hl__manager_mutex_unlock(pending->call.manager);
  hl_pending_free(pending);
}

/* Publishes the pending: a thread that ends one member of a group must find the others. */
static void publish(hl_pending *pending, hl_pending *whole, hl_pending **result) {
  hl_manager *manager = pending->call.manager;
  hl__manager_mutex_lock(manager);
  pending->whole = whole;
  *result = pending;
  hl__manager_mutex_unlock(manager);
}

/* status: what making the lock came to. Gives back the reference of enter. */
static int begin(const acquisition *self, int status, hl_pending *whole, hl_pending **result,
                 hl_error *error) {
  hl_manager *manager = self->manager;
  const hl_options *options = &self->options;
  hl_pending *pending =
      self->lock ? hl__pending_new(manager, HL__ACQUIRE, self->lock, options) : NULL;
  if (!pending) {
    hl_lock_free(self->lock);
    if (status == HL_OK) status = hl__error_memory(error);
    hl__manager_mutex_lock(manager);
    hl__manager_event(manager, HL__CALL_ENDS, status, 0);
    hl__manager_mutex_unlock(manager);
    hl__manager_leave(manager);
    return status;
  }
  pending->agent = hl_agent_ref(options->agent);
  /* The store looks for circles, and must know what the agent of the whole holds. The wait is the
     whole's. */
  if (whole) pending->call.agent = hl__agent_number(whole->agent);
  if (options->awaited && options->strand) {
    pending->wait.over = is_over;
    status = wait_begin(&pending->wait, &pending->call, NULL, error);
  }
  if (status) {
    refuse(pending, status);
  } else {
    publish(pending, whole, result);
    hl__pending_acquire(pending);
  }
  hl__manager_leave(manager);
  return status;
}

static int enter(hl_manager *manager, hl_error *error) {
  hl__manager_renew(manager);
  hl__manager_mutex_lock(manager);
  int status = hl__manager_enter(manager, error);
  if (status == HL_OK) hl__manager_event(manager, HL__CALL_BEGINS, 0, 0);
  hl__manager_mutex_unlock(manager);
  return status;
}

int hl__start(hl_manager *manager, const hl_plan *plan, const hl_options *given, hl_pending *whole,
              hl_pending **result, hl_error *error) {
  acquisition self = {.manager = manager, .options = *given};
  int status = hl__options_check(&self.options, manager, plan, error);
  if (status == HL_OK) status = enter(manager, error);
  if (status) return status;
  status = hl__lock_new(manager, plan, &self.options, &self.lock, error);
  return begin(&self, status, whole, result, error);
}

int hl_start(hl_manager *manager, const hl_plan *plan, const hl_options *given, hl_pending **result,
             hl_error *error) {
  HL__UNCANCELLED;
  HL__NEEDS(manager && plan && result, error);
  hl_options options;
  *result = NULL;
  int status = hl__options_take(given, &options, error);
  return status ? status : hl__start(manager, plan, &options, NULL, result, error);
}

int hl_start_import(hl_manager *manager, const char *text, size_t size, const hl_options *given,
                    hl_pending **result, hl_error *error) {
  HL__UNCANCELLED;
  HL__NEEDS(manager && text && result, error);
  acquisition self = {.manager = manager};
  *result = NULL;
  int status = enter(manager, error);
  if (status) return status;
  status = import_make(&self, &(hl_id){text, size}, given, error);
  return begin(&self, status, NULL, result, error);
}

/* ---------------------------------------------------- on a lock that is held */

/* Whether the lock and the arguments allow the call. Makes *options of those that the kind
   takes. */
static int wish_check(hl_lock *lock, const hl__wish *wish, hl_options *options, hl_error *error) {
  int status = HL_OK;
  switch (wish->kind) {
  case HL__EXTEND:
    status = hl__lock_usable(lock, error);
    if (status == HL_OK && lock->lease)
      status = hl__error(error, HL_EUNSUPPORTED,
                         "a lease cannot be extended by more targets; acquire all of them at once");
    if (status == HL_OK) status = hl__options_take(wish->options, options, error);
    return status ? status : hl__options_check(options, lock->hold.manager, wish->plan, error);
  case HL__UPGRADE:
  case HL__DOWNGRADE:
    status = hl__lock_usable(lock, error);
    if (status == HL_OK && !hl__plan_updates(lock->plan))
      status =
          hl__error(error, HL_EMISUSE, "the lock is none for update: acquire it with that mode");
    if (status == HL_OK) status = hl__options_take(wish->options, options, error);
    options->label = lock->label;
    options->label_size = lock->label_size;
    return status;
  case HL__REFRESH:
    if (wish->ttl < 0 || wish->ttl > HL_TTL_MAX)
      return hl__error(error, HL_EMISUSE, "ttl must be 0.001 to 315360000 seconds");
    return hl__lock_usable_lease(lock, error);
  case HL__TO_LEASE:
    status = hl__options_take(wish->options, options, error);
    if (status == HL_OK) status = hl__lease_options_check(options, error);
    return status ? status : hl__lock_usable(lock, error);
  case HL__CHECK: return hl__lock_usable(lock, error);
  default: return HL_OK;
  }
}

/* Makes an extend or an upgrade. The victim of a circle holds nothing any more, whether the store
   has found the circle or the books. */
static int extend(hl__call *call, hl_error *error) {
  hl__wait wait = {.blocks = true};
  hl_lock *lock = call->lock;
  int status = thread_wait_begin(&wait, call, &lock->held, error);
  if (status == HL_DEADLOCK) {
    hl__agent_forget(&lock->held);
    (void)hl__lock_release(lock, false, NULL);
  }
  if (status) return status;
  status = hl__lock_run(call, error);
  hl__wait_end(&wait);
  if (status == HL_OK) lock->held.kinds |= call->options.kinds;
  return status;
}

/* Makes the call in this thread, and blocks. */
static int make(hl_lock *lock, const hl__wish *wish, const hl_options *options, hl_error *error) {
  hl__call call;
  hl__call_init(&call, lock->hold.manager, wish->kind, lock, options);
  int status = hl__call_prepare(&call, wish->plan, error);
  if (status == HL_OK) {
    status = wish->kind <= HL__UPGRADE ? extend(&call, error) : hl__lock_run(&call, error);
    if (hl__call_commits(&call, status)) hl__call_commit(&call);
  }
  hl__call_dispose(&call);
  return status;
}

/* Until when (hl__boot_ms) the owner believes in the lock while the call occupies it. */
static int64_t kept_until(hl_lock *lock, const hl__wish *wish, const hl_options *options) {
  int64_t now = hl__boot_ms(), until = hl__deadline(now, hl_lock_remaining(lock));
  if (wish->kind == HL__RELEASE) return 0;
  /* The lock may become a lease before this process hears of it, and that lease may end. */
  if (wish->kind == HL__TO_LEASE && until > hl__deadline(now, options->ttl))
    return hl__deadline(now, options->ttl);
  return until;
}

/* Starts the call, which occupies the lock. */
static int start(hl_lock *lock, const hl__wish *wish, hl_options *options, hl_pending **result,
                 hl_error *error) {
  if (wish->kind > HL__TO_LEASE) { /* it takes none */
    *options = (hl_options)HL_OPTIONS_INIT;
    options->ttl = wish->ttl;
  }
  hl_pending *pending = hl__pending_new(lock->hold.manager, wish->kind, lock, options);
  if (!pending) return hl__error_memory(error);
  int status = hl__call_prepare(&pending->call, wish->plan, error);
  if (status) {
    hl__pending_unref(pending);
    return status;
  }
  int64_t until = kept_until(lock, wish, options);
  if (wish->kind == HL__RELEASE) {
    lock->released = true;
    hl__agent_forget(&lock->held);
  }
  hl__pending_occupy(pending, until);
  *result = pending;
  return HL_OK;
}

/* Whether the store has to be asked. Otherwise the call says at once what is the matter with the
   lock. */
static bool asks_store(hl_lock *lock, hl__call_kind kind) {
  if (hl__lock_is_occupied(lock)) return false;
  if (kind != HL__REFRESH) return hl_lock_is_held(lock);
  hl_lock_state state = hl_lock_look(lock);
  return state == HL_HELD || state == HL_OVER;
}

int hl__lock_call(hl_lock *lock, const hl__wish *wish, hl_pending **pending, hl_error *error) {
  HL__UNCANCELLED;
  hl_options options;
  if (pending) *pending = NULL;
  int status = wish_check(lock, wish, &options, error);
  if (status) return status;
  if (pending && wish->kind == HL__RELEASE && !lock->released && !hl__lock_vacate(lock, 0))
    return hl__lock_unconfirmed_error(error);
  if (pending && asks_store(lock, wish->kind)) return start(lock, wish, &options, pending, error);
  if (wish->kind == HL__REFRESH) return hl__lease_refresh(lock->lease, wish->ttl, error);
  if (wish->kind == HL__CHECK) return hl__lock_check(lock, error);
  if (wish->kind == HL__RELEASE) return hl_lock_release(lock, true, error);
  return make(lock, wish, &options, error);
}

int hl_lock_extend(hl_lock *lock, const hl_plan *plan, const hl_options *given, hl_error *error) {
  HL__NEEDS(lock && plan, error);
  return hl__lock_call(lock, &(hl__wish){.kind = HL__EXTEND, .plan = plan, .options = given}, NULL,
                       error);
}

int hl_lock_start_extend(hl_lock *lock, const hl_plan *plan, const hl_options *given,
                         hl_pending **result, hl_error *error) {
  HL__NEEDS(lock && plan && result, error);
  return hl__lock_call(lock, &(hl__wish){.kind = HL__EXTEND, .plan = plan, .options = given},
                       result, error);
}

int hl_lock_upgrade(hl_lock *lock, const hl_options *given, hl_error *error) {
  HL__NEEDS(lock, error);
  return hl__lock_call(lock, &(hl__wish){.kind = HL__UPGRADE, .options = given}, NULL, error);
}

int hl_lock_start_upgrade(hl_lock *lock, const hl_options *given, hl_pending **result,
                          hl_error *error) {
  HL__NEEDS(lock && result, error);
  return hl__lock_call(lock, &(hl__wish){.kind = HL__UPGRADE, .options = given}, result, error);
}

int hl_lock_downgrade(hl_lock *lock, hl_error *error) {
  HL__NEEDS(lock, error);
  return hl__lock_call(lock, &(hl__wish){.kind = HL__DOWNGRADE}, NULL, error);
}

int hl_lock_start_downgrade(hl_lock *lock, hl_pending **result, hl_error *error) {
  HL__NEEDS(lock && result, error);
  return hl__lock_call(lock, &(hl__wish){.kind = HL__DOWNGRADE}, result, error);
}

int hl_lock_check(hl_lock *lock, hl_error *error) {
  HL__NEEDS(lock, error);
  return hl__lock_call(lock, &(hl__wish){.kind = HL__CHECK}, NULL, error);
}

int hl_lock_start_check(hl_lock *lock, hl_pending **result, hl_error *error) {
  HL__NEEDS(lock && result, error);
  return hl__lock_call(lock, &(hl__wish){.kind = HL__CHECK}, result, error);
}

int hl_lock_refresh(hl_lock *lock, int64_t ttl, hl_error *error) {
  HL__NEEDS(lock, error);
  return hl__lock_call(lock, &(hl__wish){.kind = HL__REFRESH, .ttl = ttl}, NULL, error);
}

int hl_lock_start_refresh(hl_lock *lock, int64_t ttl, hl_pending **result, hl_error *error) {
  HL__NEEDS(lock && result, error);
  return hl__lock_call(lock, &(hl__wish){.kind = HL__REFRESH, .ttl = ttl}, result, error);
}

int hl_lock_to_lease(hl_lock *lock, const hl_options *given, hl_error *error) {
  HL__NEEDS(lock && given, error);
  return hl__lock_call(lock, &(hl__wish){.kind = HL__TO_LEASE, .options = given}, NULL, error);
}

int hl_lock_start_to_lease(hl_lock *lock, const hl_options *given, hl_pending **result,
                           hl_error *error) {
  HL__NEEDS(lock && given && result, error);
  return hl__lock_call(lock, &(hl__wish){.kind = HL__TO_LEASE, .options = given}, result, error);
}

int hl_lock_start_release(hl_lock *lock, hl_pending **result, hl_error *error) {
  HL__NEEDS(lock && result, error);
  return hl__lock_call(lock, &(hl__wish){.kind = HL__RELEASE}, result, error);
}
