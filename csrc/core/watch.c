/*
 * watch.c - what a manager tells about itself, and about the holders and waiters in its way.
 */
#include "lease.h"

#include "clock.h"
#include "error.h"
#include "plan.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* A query for holders costs the server more than a try does, and programs try in loops. */
#define QUERIES_EACH_SECOND 10
/* After a wait has failed, its caller wants to return. The caller waits CALLER_MS for the query
   that a worker makes; the query may wait BLOCKERS_MS for the store. The caller is told of at most
   BLOCKERS_MAX, of which at most half are waiters. */
#define CALLER_MS 40
#define BLOCKERS_MS 200
#define BLOCKERS_MAX 100
/* A limit for a query of a plan's holders, if the server does not end it sooner. */
#define QUERY_MS 1000
/* A limit for a list of all holders: a person waits for it. */
#define LIST_MS 10000

hl_layout *hl_manager_layout(const hl_manager *manager) { return manager ? manager->layout : NULL; }

void hl_manager_stats(hl_manager *manager, hl_stats *stats) {
  if (stats) *stats = (hl_stats){0};
  if (!manager || !stats) return;
  hl__manager_renew(manager);
  hl__manager_mutex_lock(manager);
  *stats = manager->stats;
  stats->connections = manager->ops->traits.scarce ? manager->pool.count : 0;
  hl__manager_mutex_unlock(manager);
}

void hl_manager_histograms(hl_manager *manager, unsigned level, hl_histogram *waits,
                           hl_histogram *holds) {
  if (waits) *waits = (hl_histogram){0};
  if (holds) *holds = (hl_histogram){0};
  if (!manager || !waits || !holds) return;
  if (level >= HL_LEVELS_MAX) return;
  hl__manager_renew(manager);
  hl__manager_mutex_lock(manager);
  *waits = manager->levels[level].waits;
  *holds = manager->levels[level].holds;
  hl__manager_mutex_unlock(manager);
}

uint64_t hl_manager_losses(hl_manager *manager) {
  if (!manager) return 0;
  int64_t end = atomic_load(&manager->leases_end);
  if (end != HL_FOREVER && end <= hl__boot_ms()) hl__leases_inspect(manager);
  return atomic_load(&manager->losses);
}

/* Passes holders on, but not presences. */
typedef struct telling {
  hl_holder_fn fn;
  void *context;
} telling;

static void tell(void *context, const hl_holder *holder) {
  static const char presence[] = "0000000000000000"; /* hl__is_presence */
  const telling *self = context;
  if (strncmp(holder->id, presence, sizeof presence - 1) != 0) self->fn(self->context, holder);
}

typedef struct query {
  const hl_manager *manager;
  hl_lease_filter filter;
  hl_holder_fn fn;
  void *context;
  int64_t ms;       /* for the query, without connecting */
  int64_t deadline; /* for both; the earlier one counts */
} query;

static int64_t query_end(const query *self) {
  int64_t end = hl__deadline(hl__now_ms(), self->ms);
  return end < self->deadline ? end : self->deadline;
}

static int query_send(hl_session *session, void *context, hl_error *error) {
  const query *self = context;
  telling told = {self->fn, self->context};
  return self->manager->ops->holders(session, &self->filter, tell, &told, query_end(self), error);
}

/* The filter asks for the rows of a copy of the plan, NULL if there is none. HL_OK, HL_ENOMEM. */
static int plan_take(const hl_plan *plan, hl_lease_filter *filter, hl_plan **copy,
                     hl_error *error) {
  *copy = plan ? hl_plan_copy(plan) : NULL;
  if (!plan) return HL_OK;
  if (!*copy) return hl__error_memory(error);
  filter->rows = hl__plan_rows(*copy, &filter->n);
  filter->names = hl__plan_names(*copy);
  return HL_OK;
}

/* Runs it on a connection of the pool. of_leases: HL_EUNSUPPORTED where the store has none. */
static int run(hl_manager *manager, bool of_leases,
               int (*fn)(hl_session *session, void *context, hl_error *error), void *context,
               int64_t end, hl_error *error) {
  hl__manager_renew(manager);
  hl__manager_mutex_lock(manager);
  int status = hl__manager_enter(manager, error);
  bool entered = status == HL_OK;
  if (entered && of_leases && !manager->store->leases)
    status = hl__lease_unsupported(manager, error);
  if (status == HL_OK && manager->ops->traits.expires) status = hl__keeper_start(manager, error);
  if (status == HL_OK && !of_leases) hl__pool_releases_await(manager);
  if (status == HL_OK) status = hl__pool_run(manager, fn, context, end, error);
  hl__manager_mutex_unlock(manager);
  if (entered) hl__manager_leave(manager);
  return status;
}

static int query_run(hl_manager *manager, const hl_plan *plan, query *self, hl_error *error) {
  hl_plan *copy;
  int status = plan_take(plan, &self->filter, &copy, error);
  if (status == HL_OK) status = run(manager, false, query_send, self, query_end(self), error);
  hl_plan_free(copy);
  return status;
}

int hl_manager_holders(hl_manager *manager, const hl_plan *plan, hl_holder_fn fn, void *context,
                       hl_error *error) {
  HL__UNCANCELLED;
  HL__NEEDS(manager && fn, error);
  query self = {.manager = manager,
                .fn = fn,
                .context = context,
                .ms = plan ? QUERY_MS : LIST_MS,
                .deadline = HL_FOREVER};
  return query_run(manager, plan, &self, error);
}

/* A query after a failed wait. A worker makes it, while the caller waits; it may come too late. */
typedef struct nearest {
  hl__task task;
  hl_manager *manager;
  query query;
  hl_plan *plan;  /* or NULL */
  size_t waiting; /* how many of `list` only wait; the worker's */
  bool done HL__GUARDED_BY(hl__manager_mutex);
  bool left HL__GUARDED_BY(hl__manager_mutex); /* the caller has left: the worker frees it */
  int status HL__GUARDED_BY(hl__manager_mutex);
  hl_error error HL__GUARDED_BY(hl__manager_mutex);
  /* Not guarded by the manager's mutex: a store may hold a mutex of its own when it calls
     nearest_add, and that one comes later in the order. */
  atomic_size_t n;              /* the worker counts up */
  hl_holder list[BLOCKERS_MAX]; /* entries below n do not change any more */
} nearest;

static void nearest_add(void *context, const hl_holder *holder) {
  nearest *self = context;
  if (holder->waiting && self->waiting == BLOCKERS_MAX / 2) return;
  self->waiting += holder->waiting;
  size_t n = atomic_load(&self->n);
  if (n == BLOCKERS_MAX) return;
  self->list[n] = *holder;
  atomic_store(&self->n, n + 1);
}

static void nearest_free(nearest *self) {
  hl_plan_free(self->plan);
  free(self);
}

/* Unchecked: no other thread has it yet. */
HL__UNCHECKED static nearest *nearest_new(hl_manager *manager, const hl_plan *plan) {
  nearest *self = malloc(sizeof *self);
  if (!self) return NULL;
  memset(self, 0, offsetof(nearest, list));
  self->manager = manager;
  self->query = (query){.manager = manager,
                        .filter.most = BLOCKERS_MAX,
                        .fn = nearest_add,
                        .context = self,
                        .ms = BLOCKERS_MS,
                        .deadline = hl__now_ms() + BLOCKERS_MS};
  self->plan = plan ? hl_plan_copy(plan) : NULL;
  if (!plan || self->plan) return self;
  free(self);
  return NULL;
}

static void nearest_query(nearest *self) HL__REQUIRES(hl__manager_mutex) {
  hl_error error = {.status = HL_OK};
  hl__manager_mutex_unlock(self->manager);
  int status = query_run(self->manager, self->plan, &self->query, &error);
  hl__manager_mutex_lock(self->manager);
  self->status = status;
  self->error = error;
  self->done = true;
}

static void nearest_run(hl__task *task) {
  nearest *self = HL__LIST_ENTRY(task, nearest, task);
  hl_manager *manager = self->manager;
  hl__manager_mutex_lock(manager);
  nearest_query(self);
  bool left = self->left;
  if (left) manager->queries_late--;
  hl__worker_comes(manager);
  (void)pthread_cond_broadcast(&manager->done);
  hl__manager_mutex_unlock(manager);
  if (left) nearest_free(self);
}

/* Waits for the query until `end`. *n: the holders that are known by then. */
static int nearest_get(nearest *self, int64_t end, size_t *n, hl_error *error)
    HL__REQUIRES(hl__manager_mutex) {
  hl_manager *manager = self->manager;
  self->task.run = nearest_run;
  if (!manager->ops->traits.blocks) {
    nearest_query(self);
  } else if (!hl__worker_give(manager, &self->task)) {
    self->done = true;
    self->status = hl__error(&self->error, HL_BUSY, "no thread can be started");
  }
  while (!self->done && hl__left_ms(end) > 0) hl__manager_wait(&manager->done, manager, end);
  *n = atomic_load(&self->n);
  if (!self->done) return hl__error(error, HL_TIMEOUT, "the store did not tell in time");
  if (self->status && error) *error = self->error;
  return self->status;
}

static int queries_count(hl_manager *manager, int64_t now, hl_error *error)
    HL__REQUIRES(hl__manager_mutex) {
  if (now - manager->queries_since >= 1000) {
    manager->queries_since = now;
    manager->queries = 0;
  }
  if (manager->queries_late > 0)
    return hl__error(error, HL_BUSY, "the store has not answered the last look yet");
  if (manager->queries == QUERIES_EACH_SECOND)
    return hl__error(error, HL_BUSY, "more than %d queries in a second", QUERIES_EACH_SECOND);
  manager->queries++;
  return HL_OK;
}

int hl_manager_blockers(hl_manager *manager, const hl_plan *plan, hl_holder_fn fn, void *context,
                        hl_error *error) {
  HL__UNCANCELLED;
  HL__NEEDS(manager && fn, error);
  int64_t now = hl__now_ms();
  size_t n = 0;
  hl__manager_renew(manager);
  hl__manager_mutex_lock(manager);
  int status = queries_count(manager, now, error);
  if (status == HL_OK) status = hl__manager_enter(manager, error);
  hl__manager_mutex_unlock(manager);
  if (status) return status;
  nearest *self = nearest_new(manager, plan);
  if (self) {
    hl__manager_mutex_lock(manager);
    status = nearest_get(self, now + CALLER_MS, &n, error);
    hl__manager_mutex_unlock(manager);
    for (size_t i = 0; i < n; i++) fn(context, &self->list[i]);
    hl__manager_mutex_lock(manager);
    bool done = self->done;
    self->left = true;
    if (!done) manager->queries_late++;
    hl__manager_mutex_unlock(manager);
    if (done) nearest_free(self);
  } else {
    status = hl__error_memory(error);
  }
  hl__manager_leave(manager);
  return status;
}

/* --------------------------------------------------------------- leases */

typedef struct request {
  const hl_manager *manager;
  hl_lease_filter filter;
  int64_t deadline;
  hl_holder_fn fn; /* NULL: revoke them */
  void *context;
  uint64_t count;
} request;

static int request_run(hl_session *session, void *context, hl_error *error) {
  request *self = context;
  telling told = {self->fn, self->context};
  const hl_lease_ops *ops = self->manager->store->leases;
  if (self->fn) return ops->list(session, &self->filter, tell, &told, self->deadline, error);
  int status = ops->revoke(session, &self->filter, self->deadline, &self->count, error);
  self->filter.again = true;
  return status;
}

/* False: the text is no id. */
static bool id_read(const char *text, uint8_t id[16]) {
  const size_t size = HL_LEASE_ID_SIZE - 1;
  if (strlen(text) != size || strspn(text, "0123456789abcdefABCDEF") != size) return false;
  hl__id_read(text, id);
  return true;
}

static int request_make(hl_manager *manager, const hl_filter *given, request *self,
                        hl_error *error) {
  hl_filter filter = HL_FILTER_INIT;
  hl_plan *copy;
  uint8_t id[16];
  int status = HL_OK;
  if (given)
    status = hl__struct_take(&filter, sizeof filter, sizeof filter, given, "hl_filter", error);
  if (status) return status;
  if (!self->fn && !filter.owner && !filter.id && !filter.plan)
    return hl__error(error, HL_EMISUSE, "which leases are to be revoked?");
  if (filter.id && !id_read(filter.id, id))
    return hl__error(error, HL_EMISUSE,
                     "id must be 32 hexadecimal digits, as a list of leases shows it");
  if (filter.plan && hl_plan_layout(filter.plan) != manager->layout)
    return hl__error(error, HL_EMISUSE, "the plan is of another layout");
  self->manager = manager;
  self->filter.owner = filter.owner;
  self->filter.id = filter.id ? id : NULL;
  self->filter.over = filter.over;
  if (!hl__random_fill(&self->filter.call, sizeof self->filter.call))
    return hl__error_errno(error, HL_ESTORE, "there are no random numbers");
  self->filter.call >>= 1;
  self->deadline = hl__now_ms() + LIST_MS;
  status = plan_take(filter.plan, &self->filter, &copy, error);
  if (status == HL_OK) status = run(manager, true, request_run, self, self->deadline, error);
  hl_plan_free(copy);
  return status;
}

int hl_manager_leases(hl_manager *manager, const hl_filter *filter, hl_holder_fn fn, void *context,
                      hl_error *error) {
  HL__UNCANCELLED;
  HL__NEEDS(manager && fn, error); /* without fn it would revoke */
  request self = {.fn = fn, .context = context};
  return request_make(manager, filter, &self, error);
}

int hl_manager_revoke(hl_manager *manager, const hl_filter *filter, const char *by,
                      const char *reason, uint64_t *count, hl_error *error) {
  HL__UNCANCELLED;
  HL__NEEDS(manager && filter && count, error);
  request self = {.filter = {.by = by ? by : "", .reason = reason ? reason : ""}};
  int status = request_make(manager, filter, &self, error);
  *count = self.count;
  return status;
}
