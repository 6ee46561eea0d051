/*
 * worker.c - a worker process: threads that acquire random targets, look again and again whether
 * they hold, and end it in all the ways there are. The threads share a few managers. There are
 * three kinds:
 *
 *   blocking   one lock at a time, with hl_acquire and hl_lock_extend
 *   waiting    several at a time, with hl_start and its sisters, as a program with an
 *              event loop
 *   closing    with a manager of its own, which it closes whatever is under way
 *
 * Everything that a thread does stands in its records, before and after.
 */
#include "worker.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MANAGERS = 3 };

static int me;
static worker_area *area;
static hl_manager *managers[MANAGERS];

void count(int what) { (void)atomic_fetch_add(&area->counts[what], 1u); }

static bool proxied(void) { return shared->proxied_dsn[0] && me % 2 == 1; }

static hl_manager *manager_open(void) {
  static const struct hl_store_ops *const stores[] = {&hl_store_mysql,     &hl_store_postgresql,
                                                      &hl_store_sqlite,    &hl_store_redis,
                                                      &hl_store_memcached, NULL};
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager = NULL;
  hl_error error;
  if (hl_layout_new(NULL, 0, BUCKETS, &config.layout, NULL)) return NULL;
  config.dsn = proxied() ? shared->proxied_dsn : shared->dsn;
  config.hold_timeout = shared->hold_timeout;
  config.stores = stores;
  config.application = "soak";
  int64_t called = now_ns();
  int status = hl_manager_open(&config, &manager, &error);
  hl_layout_unref(config.layout);
  if (status && status != HL_ECONNECTION && !killed_query(error.server_errno, error.message) &&
      !fault_allows(status, called))
    complain("worker %d cannot open %s: %s", me, shared->server ? "the server" : shared->dsn,
             error.message);
  if (status == HL_OK) count(COUNT_OPENS);
  return manager;
}

/* Not for want of memory, which is a fault that ends. */
static hl_plan *plan_new(hl_manager *manager) {
  hl_plan *plan;
  while (!(plan = hl_plan_new(hl_manager_layout(manager)))) (void)usleep(1000);
  return plan;
}

record *record_new(thread *self, call_kind kind, uint64_t handle, int64_t timeout) {
  for (int i = 0; i < RECORDS; i++) {
    record *r = &self->records[self->next_record++ % RECORDS];
    if (atomic_load_explicit(&r->state, memory_order_acquire) != FREE) continue;
    record_clear(r);
    r->handle = handle;
    r->worker = me;
    r->thread = self->number;
    r->manager = self->manager_number;
    r->pid = getpid();
    r->kind = kind;
    r->proxied = proxied();
    r->timeout = timeout;
    return r;
  }
  return NULL;
}

uint64_t handle_new(void) { return atomic_fetch_add(&area->handles, 1u) * WORKERS + (uint64_t)me; }

void record_call(record *r) {
  r->stopped = atomic_load(&area->stopped);
  r->called = now_ns();
  atomic_store_explicit(&r->state, CALLED, memory_order_release);
}

static void record_grant(record *r, hl_lock *lock) {
  r->granted = now_ns();
  r->token = hl_lock_token(lock);
  if (r->kind == CALL_IMPORT) r->promised = 0; /* until now its exporter's */
  atomic_store(&area->granted_at, r->granted);
  atomic_store_explicit(&r->state, HELD, memory_order_release);
  count(COUNT_GRANTS);
  if (r->granted - r->called > 2 * MS) count(COUNT_WAITS);
}

void record_end(record *r, end_kind how, int64_t ending) {
  r->how = how;
  r->ending = ending;
  r->ended = now_ns();
  atomic_store_explicit(&r->state, ENDED, memory_order_release);
}

static void target_add(thread *self, record *r, int node, hl_mode mode) {
  node_name name;
  node_ids(node, &name);
  int status;
  while ((status = hl_plan_add(self->plan, name.ids, name.n, mode, true, NULL)) == HL_ENOMEM)
    (void)usleep(1000);
  if (status) abort();
  r->targets++;
  if (node < FIRST_RESOURCE) mode = HL_EXCLUSIVE;
  if (r->modes[node] < mode) r->modes[node] = (unsigned char)mode;
  for (int at = node_parent(node); at >= 0; at = node_parent(at))
    if (!r->modes[at]) r->modes[at] = HL_SHARED;
}

/* Chooses targets, in random order, some of them twice. MIXED requests are mostly in one
   account. LARGE ones share, and meet a few small exclusive ones, and thieves. NARROW requests
   are few resources of one user. */
void targets_choose(thread *self, record *r, bool few) {
  dice *d = &self->dice;
  int now = atomic_load(&shared->mood), kind = roll_below(d, 100);
  int n = kind < 50   ? 1 + roll_below(d, 3)
          : kind < 96 ? 2 + roll_below(d, 19)
          : kind < 98 ? 1 + roll_below(d, 200)
                      : 200;
  int shared_percent = roll_percent(d, 50) ? 80 : 30;
  int inner_percent = 8, elsewhere_percent = n > 20 ? 3 : 10;
  int account = roll_below(d, USERS * ACCOUNTS);
  if (now == LARGE) {
    bool small = kind >= 88 || (self->follows && shared->server);
    n = small ? 1 + roll_below(d, 3) : kind < 70 ? 60 + roll_below(d, 141) : 1 + roll_below(d, 200);
    shared_percent = kind < 88 ? 100 : 0;
    inner_percent = 0;
    elsewhere_percent = 50;
  }
  if (now == NARROW) account = roll_below(d, ACCOUNTS);
  if (few || now == NARROW) n = 1 + roll_below(d, 3);
  hl_plan_clear(self->plan);
  for (int i = 0; i < n; i++) {
    hl_mode mode = roll_percent(d, shared_percent) ? HL_SHARED : HL_EXCLUSIVE;
    int level = roll_below(d, 100 + 3 * n);
    if (now != NARROW && roll_percent(d, elsewhere_percent))
      account = roll_below(d, USERS * ACCOUNTS);
    int resource = roll_below(d, now == NARROW ? 6 : RESOURCES);
    int node = FIRST_RESOURCE + account * RESOURCES + resource;
    if (level < inner_percent / 4)
      node = roll_below(d, now == NARROW ? 1 : USERS);
    else if (level < inner_percent)
      node = FIRST_ACCOUNT + account;
    target_add(self, r, node, mode);
  }
}

/* A thief: a resource that another thread holds just now, exclusive. When a large request has
   got all but one of its rows, only a request for that one sees it. False: no such resource. */
static bool target_steal(thread *self, record *r) {
  dice *d = &self->dice;
  for (int tries = 0; tries < 200; tries++) {
    const record *other =
        &shared->worker[roll_below(d, shared->workers)].records[roll_below(d, shared->threads)][0];
    int i = roll_below(d, RECORDS), node = FIRST_RESOURCE;
    for (int j = 0; j < RECORDS && atomic_load(&other[i].state) != HELD; j++) i = (i + 1) % RECORDS;
    if (atomic_load(&other[i].state) != HELD) continue;
    node += roll_below(d, NODES - FIRST_RESOURCE);
    for (int j = FIRST_RESOURCE; j < NODES && !other[i].modes[node]; j++)
      node = node + 1 < NODES ? node + 1 : FIRST_RESOURCE;
    if (!other[i].modes[node]) continue;
    hl_plan_clear(self->plan);
    target_add(self, r, node, HL_EXCLUSIVE);
    return true;
  }
  return false;
}

static int64_t timeout_choose(dice *d) {
  int kind = roll_below(d, 100);
  return kind < 10   ? 0
         : kind < 30 ? 1 + roll_below(d, 50)
         : kind < 60 ? 50 + roll_below(d, 450)
                     : 500 + roll_below(d, 4500);
}

static int64_t hold_choose(dice *d) {
  int kind = roll_below(d, 1000);
  /* So long that a lease ends, where the network may be cut meanwhile. */
  if (proxied() && kind < 50) return roll_below(d, 3 * (int)shared->hold_timeout) * MS;
  if (atomic_load(&shared->mood) == LARGE)
    return roll_below(d, kind < 700 ? 400 : 20000) * INT64_C(1000);
  int64_t us = kind < 800            ? roll_below(d, 500)
               : kind < 980          ? roll_below(d, 5000)
               : kind < 999          ? roll_below(d, 100000)
               : roll_percent(d, 50) ? roll_below(d, 300000)
                                     : roll_below(d, 6000000);
  return us * 1000;
}

void call_returned(record *r, int status, hl_lock *lock, const hl_error *error, bool cancelled) {
  r->status = status;
  if (status == HL_OK) {
    record_grant(r, lock);
    return;
  }
  (void)snprintf(r->why, sizeof r->why, "%.119s", error->message);
  switch (status) {
  case HL_TIMEOUT: count(COUNT_TIMEOUTS); break;
  case HL_CANCELLED: count(COUNT_CANCELS); break;
  case HL_DEADLOCK: count(COUNT_DEADLOCKS); break;
  case HL_BUSY: count(COUNT_BUSY); break;
  case HL_ELOST: count(COUNT_LOST); break;
  case HL_ECONNECTION: count(COUNT_FAILED); break;
  case HL_ERELEASED: break;
  default:
    if (r->lease ? fault_allows_lease(status, r->called) : fault_allows(status, r->called)) {
      count(COUNT_FAILED);
      break;
    }
    complain("worker %d thread %d: a call failed with %s: %s", r->worker, r->thread,
             hl_status_name(status), error->message);
  }
  /* A statement that an administrator kills is `cancelled`, too. */
  if (status == HL_CANCELLED && !cancelled && !killed_query(error->server_errno, error->message))
    complain("worker %d thread %d: `cancelled`, and nobody did: %s", r->worker, r->thread,
             error->message);
  if (status == HL_ELOST && r->kind == CALL_IMPORT) {
    r->revocation = revocation_of(error->revoked_by);
    r->lost_at = r->called;
    if (r->revocation) count(COUNT_TOLD);
  }
  record_end(r, cancelled ? END_CANCELLED : END_NO_GRANT, now_ns());
}

/* ------------------------------------------------------------------- a lane */

static void believe(lane *self, int64_t when) {
  for (int i = 0; i < self->n; i++) {
    record *r = self->records[i];
    if (r && atomic_load(&r->state) == HELD)
      atomic_store_explicit(&r->held, when, memory_order_release);
  }
}

/* Asks whether it holds. False: it does not any more, and its records end. While an extend
   waits, the server may end a deadlock at its cost, and grants the other one before it says so.
   So belief during the extend counts only once it is known that this did not happen; of an
   extend that was cancelled, and is still under way, the outcome will stay unknown. */
bool lane_sample(lane *self) {
  int64_t before = now_ns();
  if (self->cancelled && hl_lock_look(self->lock) != HL_IN_USE) self->cancelled = false;
  bool held = hl_lock_is_held(self->lock);
  count(COUNT_SAMPLES);
  if (held && self->state == LANE_EXTENDING)
    self->meanwhile = before;
  else if (held && !self->cancelled)
    believe(self, before);
  return held;
}

/* Another belief: what remaining() says. Only before a time at which the lease
   ends without us, so it is asked for now and then, and first. */
void lane_promise(lane *self) {
  int64_t before = now_ns(), left = hl_lock_remaining(self->lock);
  if (left <= 0) return;
  for (int i = 0; i < self->n; i++) {
    record *r = self->records[i];
    if (r && atomic_load(&r->state) == HELD)
      r->promised = left == HL_FOREVER ? INT64_MAX : before + left * MS;
  }
}

/* Changes the counter and the set of a node that it holds exclusively: see classic.c. */
void lane_update(thread *self, lane *l) {
  dice *d = &self->dice;
  const record *r = l->records[roll_below(d, l->n)];
  int node = roll_below(d, NODES), tries = 0;
  if (!r || atomic_load(&r->state) != HELD) return;
  for (; tries < NODES && r->modes[node] != HL_EXCLUSIVE; tries++) node = (node + 1) % NODES;
  if (tries == NODES || !lane_sample(l)) return;
  int element = roll_below(d, 64),
      pause_us = roll_percent(d, 90) ? roll_below(d, 100) : roll_below(d, 3000);
  if (shared->server && roll_percent(d, 40)) {
    int done = row_update(node, hl_lock_token(l->lock), element, pause_us);
    if (done >= 0) count(done ? COUNT_ROWS : COUNT_REFUSED);
    if (done == 0 && lane_sample(l) && (!l->lease || lease_confirm(l)))
      complain("worker %d thread %d: a greater token than %016llx has been there, and handle %llu "
               "still holds node %d",
               me, self->number, (unsigned long long)hl_lock_token(l->lock),
               (unsigned long long)r->handle, node);
    return;
  }
  cell_change change;
  cell_read(node, element, &change);
  (void)usleep((unsigned)pause_us);
  cell_write(&change);
  count(COUNT_UPDATES);
  if (lane_sample(l) && (!l->lease || lease_confirm(l))) cell_confirm(&change);
}

void lane_end(lane *self, end_kind how, int64_t ending) {
  for (int i = 0; i < self->n; i++) {
    record *r = self->records[i];
    if (r && (atomic_load(&r->state) == HELD || atomic_load(&r->state) == CALLED))
      record_end(r, how, ending);
    self->records[i] = NULL;
  }
  self->n = 0;
  self->lease = self->cancelled = false;
  self->state = LANE_FREE;
}

static void lane_drop(thread *self, lane *l) {
  dice *d = &self->dice;
  int64_t ending = now_ns();
  ending = now_ns();
  int how = roll_below(d, 10);
  if (l->lease && l->state != LANE_STARTED) {
    lease_drop(self, l);
    return;
  }
  if (l->state == LANE_STARTED) {
    hl_pending_cancel(l->pending);
    count(COUNT_CANCELS);
    hl_pending_free(l->pending);
    lane_end(l, END_CANCELLED, ending);
    return;
  }
  if (l->state == LANE_EXTENDING && how < 5) {
    hl_pending_free(l->pending);
    l->pending = NULL;
  }
  hl_error error;
  int status = HL_OK;
  bool extending = l->state == LANE_EXTENDING; /* giving the extend up may lose the lock */
  if (l->state == LANE_ASKING) {               /* it may be a lease by now */
    lease_drop(self, l);
    return;
  }
  if (how < 8) status = hl_lock_release(l->lock, how == 0, &error);
  hl_lock_free(l->lock);
  if (l->pending) hl_pending_free(l->pending);
  l->pending = NULL;
  l->lock = NULL;
  if (status == HL_ELOST) count(COUNT_LOST);
  lane_end(l, status && !extending ? END_LOST : how < 8 ? END_RELEASED : END_FREED, ending);
}

static void lane_lost(lane *l) {
  int64_t ending = now_ns();
  if (l->pending) hl_pending_free(l->pending);
  l->pending = NULL;
  hl_lock_free(l->lock);
  l->lock = NULL;
  count(COUNT_LOST);
  lane_end(l, END_LOST, ending);
}

void lane_held(thread *self, lane *l) {
  l->state = LANE_HELD;
  l->until = now_ns() + hold_choose(&self->dice);
  if (l->lease) lease_held(self, l);
  (void)lane_sample(l);
}

/* Begins an acquisition: blocking, or as a pending. */
static void lane_begin(thread *self, lane *l, bool block) {
  int64_t timeout = timeout_choose(&self->dice);
  record *r = record_new(self, block ? CALL_ACQUIRE : CALL_START, handle_new(), timeout);
  if (!r) return;
  bool large = atomic_load(&shared->mood) == LARGE;
  int steal_percent = !large || (shared->server && !block) ? 10 : block ? 20 : 60;
  if (!roll_percent(&self->dice, steal_percent) || !target_steal(self, r))
    targets_choose(self, r, false);
  else if (large)
    r->timeout = timeout = 0;
  hl_options options = HL_OPTIONS_INIT;
  hl_error error;
  char label[24], owner[24];
  options.timeout = timeout;
  l->lease = false;
  if (shared->leases && (shared->leases_only || roll_percent(&self->dice, 50)))
    lease_choose(self, l, r, &options, label, owner);
  l->records[0] = r;
  l->n = 1;
  count(COUNT_CALLS);
  record_call(r);
  if (block) {
    int status = hl_acquire(self->manager, self->plan, &options, &l->lock, &error);
    call_returned(r, status, l->lock, &error, false);
    if (status == HL_OK)
      lane_held(self, l);
    else
      l->n = 0, l->lease = false;
    return;
  }
  int status = hl_start(self->manager, self->plan, &options, &l->pending, &error);
  if (status) {
    call_returned(r, status, NULL, &error, false);
    l->n = 0;
    l->lease = false;
    return;
  }
  l->state = LANE_STARTED;
  l->cancel_at =
      roll_percent(&self->dice, 5) ? now_ns() + roll_below(&self->dice, 200000) * INT64_C(1000) : 0;
}

/* Asks for more. A short time-out, as it may be a deadlock, which the embedded store
   does not look for. */
static void lane_extend(thread *self, lane *l, bool block) {
  /* A call that was cancelled may still be under way. */
  if (l->n == LANE_RECORDS || hl_lock_look(l->lock) != HL_HELD) return;
  int64_t timeout = roll_percent(&self->dice, 20) ? 0
                    : roll_percent(&self->dice, 20)
                        ? roll_below(&self->dice, 2 * (int)shared->hold_timeout)
                        : roll_below(&self->dice, 400);
  record *r =
      record_new(self, block ? CALL_EXTEND : CALL_START_EXTEND, l->records[0]->handle, timeout);
  if (!r) return;
  targets_choose(self, r, atomic_load(&shared->mood) != LARGE || roll_percent(&self->dice, 90));
  hl_options options = HL_OPTIONS_INIT;
  hl_error error;
  options.timeout = timeout;
  r->before = hl_lock_token(l->lock);
  count(COUNT_EXTENDS);
  l->records[l->n++] = r;
  record_call(r);
  int status;
  if (block) {
    status = hl_lock_extend(l->lock, self->plan, &options, &error);
  } else {
    status = hl_lock_start_extend(l->lock, self->plan, &options, &l->pending, &error);
    if (status == HL_OK && l->pending) {
      l->state = LANE_EXTENDING;
      l->meanwhile = 0;
      l->cancel_at = roll_percent(&self->dice, 30)
                         ? now_ns() + roll_below(&self->dice, 100000) * INT64_C(1000)
                         : 0;
      return;
    }
  }
  call_returned(r, status, l->lock, &error, false);
  if (!lane_sample(l)) lane_lost(l);
}

/* Takes a pending's result when it is there, or cancels it when it is time. */
static void lane_turn(thread *self, lane *l) {
  hl_error error;
  hl_lock *lock = NULL;
  bool extending = l->state == LANE_EXTENDING;
  record *r = l->records[l->n - 1];
  if (l->cancel_at && now_ns() > l->cancel_at) {
    /* A result may have come, and goes with it: an extension that was granted stays granted, but
       the caller was not told. */
    int64_t ending = now_ns();
    hl_pending_cancel(l->pending);
    count(COUNT_CANCELS);
    hl_pending_free(l->pending);
    l->pending = NULL;
    r->status = HL_CANCELLED;
    if (extending) {
      record_end(r, END_CANCELLED, ending);
      l->records[--l->n] = NULL;
      l->state = LANE_HELD;
      l->cancelled = true;
      if (!lane_sample(l)) lane_lost(l);
    } else {
      lane_end(l, END_CANCELLED, ending);
    }
    return;
  }
  int64_t asked = now_ns();
  if (!hl_pending_done(l->pending)) {
    r->asked = asked;
    return;
  }
  int status = hl_pending_wait(l->pending, 0, &lock, &error);
  hl_pending_free(l->pending);
  l->pending = NULL;
  if (!extending) l->lock = lock;
  call_returned(r, status, l->lock, &error, false);
  if (extending) {
    l->state = LANE_HELD;
    if (status) l->records[--l->n] = NULL;
    if (l->meanwhile && status != HL_DEADLOCK) believe(l, l->meanwhile);
    if (!lane_sample(l)) lane_lost(l);
  } else if (status == HL_OK) {
    lane_held(self, l);
  } else {
    l->n = 0;
    l->lease = false;
    l->state = LANE_FREE;
  }
}

/* ---------------------------------------------------------- other activities */

static void nobody(void *context, const hl_holder *holder) { (void)context, (void)holder; }

/* A child's copies are dead, and their end leaves the parent's lock alone. The rest
   of what the child does is of no interest: some live on for a while, with whatever
   descriptors they have got. */
static void fork_sometimes(thread *self) {
  if (!shared->forks || roll_below(&self->dice, 800)) return;
  int sleep_ms = roll_percent(&self->dice, 30) ? 3000 : roll_below(&self->dice, 50);
  count(COUNT_FORKS);
  pid_t pid = fork();
  if (pid == 0) {
    for (int i = 0; i < self->lane_count; i++) {
      lane *l = &self->lanes[i];
      if (!l->lock) continue;
      if (hl_lock_is_held(l->lock)) complain("worker %d: a forked child is told that it holds", me);
      if (i % 2) (void)hl_lock_release(l->lock, false, NULL);
      hl_lock_free(l->lock);
    }
    (void)usleep((unsigned)sleep_ms * 1000);
    _exit(0);
  }
}

static void observe_sometimes(thread *self) {
  if (roll_below(&self->dice, 300)) return;
  hl_stats stats;
  hl_manager_stats(self->manager, &stats);
  hl_id id = {"u1", 2};
  hl_plan_clear(self->plan);
  (void)hl_plan_add(self->plan, &id, 1, HL_EXCLUSIVE, false, NULL);
  (void)hl_manager_holders(self->manager, self->plan, nobody, NULL, NULL);
}

/* Held locks and started calls end with the manager. */
static void close_and_open(thread *self) {
  int64_t ending = now_ns();
  hl_manager *closing = self->manager;
  self->manager = NULL;
  for (int i = 0; i < self->lane_count; i++)
    if (self->lanes[i].lease) lease_closing(&self->lanes[i]);
  hl_manager_close(closing);
  for (int i = 0; i < self->lane_count; i++) {
    lane *l = &self->lanes[i];
    if (l->state == LANE_FREE) continue;
    if (l->lock && hl_lock_is_held(l->lock))
      complain("worker %d: is_held after hl_manager_close", me);
    if (l->pending) hl_pending_free(l->pending);
    hl_lock_free(l->lock);
    l->lock = NULL;
    l->pending = NULL;
    if (l->lease)
      lease_closed(l, ending);
    else
      lane_end(l, END_CLOSED, ending);
  }
}

/* ------------------------------------------------------------------- threads */

static void thread_rest(thread *self) {
  for (int i = 0; i < self->lane_count; i++)
    if (self->lanes[i].state != LANE_FREE) lane_drop(self, &self->lanes[i]);
  (void)atomic_fetch_add(&area->threads_at_rest, 1);
  while (atomic_load(&shared->pause) && !atomic_load(&shared->stop)) (void)usleep(2000);
  (void)atomic_fetch_sub(&area->threads_at_rest, 1);
}

static int free_lanes(const thread *self) {
  int n = 0;
  for (int i = 0; i < self->lane_count; i++) n += self->lanes[i].state == LANE_FREE;
  return n;
}

/* LARGE requests begin all at once or not: no others must be before them. */
static bool begins(thread *self) {
  int n = free_lanes(self);
  if (self->kind != BLOCKING && atomic_load(&shared->mood) == LARGE) return n == self->lane_count;
  return n > 0 && (self->kind == BLOCKING || roll_percent(&self->dice, 60));
}

static void begin_some(thread *self) {
  bool all = atomic_load(&shared->mood) == LARGE || roll_percent(&self->dice, 5);
  for (int i = 0; i < self->lane_count; i++)
    if (self->lanes[i].state == LANE_FREE) {
      if (shared->leases && roll_percent(&self->dice, 12)) lease_import(self, &self->lanes[i]);
      if (self->lanes[i].state == LANE_FREE)
        lane_begin(self, &self->lanes[i], self->kind == BLOCKING);
      if (!all) break;
      /* The first is on its way, in a thread of the library's: the others come in
         any moment of that. */
      self->follows = true;
      int64_t end = now_ns() + roll_below(&self->dice, 100000);
      while (now_ns() < end) {}
    }
  self->follows = false;
}

static void *thread_main(void *argument) {
  thread *self = argument;
  while (!self->manager && !atomic_load(&shared->stop)) {
    if (self->kind == CLOSING) self->manager = manager_open();
    if (!self->manager) (void)usleep(100000);
  }
  if (!self->manager) return NULL;
  self->plan = plan_new(self->manager);
  int64_t close_at = now_ns() + roll_below(&self->dice, 2000) * MS;
  while (!atomic_load(&shared->stop)) {
    if (atomic_load(&shared->pause)) thread_rest(self);
    bool idle = true;
    for (int i = 0; i < self->lane_count; i++) {
      lane *l = &self->lanes[i];
      if (l->state == LANE_FREE) continue;
      if (l->state == LANE_STARTED || l->state == LANE_EXTENDING) {
        lane_turn(self, l);
        if (l->state == LANE_HELD || l->state == LANE_FREE) idle = false;
      }
      if (l->state == LANE_ASKING) {
        lease_answer(self, l);
        if (l->state == LANE_FREE) idle = false;
      }
      if (l->lease && (l->state == LANE_HELD || l->state == LANE_ASKING)) {
        lease_turn(self, l);
        if (l->state == LANE_FREE) idle = false;
      } else if (l->state == LANE_HELD || l->state == LANE_EXTENDING || l->state == LANE_ASKING) {
        if (roll_percent(&self->dice, 5)) lane_promise(l);
        if (l->state == LANE_HELD && roll_percent(&self->dice, 20)) lane_update(self, l);
        if (!lane_sample(l)) {
          if (l->state == LANE_HELD || roll_percent(&self->dice, 5)) lane_lost(l);
        } else if (now_ns() > l->until) {
          lane_drop(self, l);
          idle = false;
        } else if (l->state == LANE_HELD && shared->extends && roll_below(&self->dice, 100) < 4) {
          lane_extend(self, l, self->kind == BLOCKING && self->lane_count == 1);
        } else if (l->state == LANE_HELD && shared->leases && roll_percent(&self->dice, 4)) {
          lease_convert(self, l);
        }
      }
    }
    if (begins(self)) {
      begin_some(self);
      idle = false;
    }
    fork_sometimes(self);
    if (shared->leases) lease_revoke_sometimes(self);
    if (self->kind == CLOSING && now_ns() > close_at) {
      close_and_open(self);
      while (!self->manager && !atomic_load(&shared->stop)) {
        if (atomic_load(&shared->pause)) thread_rest(self);
        self->manager = manager_open();
        if (!self->manager) (void)usleep(50000);
      }
      if (!self->manager) break;
      hl_plan_free(self->plan);
      self->plan = plan_new(self->manager);
      close_at = now_ns() + roll_below(&self->dice, 2000) * MS;
    }
    observe_sometimes(self);
    if (idle) (void)usleep(300);
  }
  for (int i = 0; i < self->lane_count; i++)
    if (self->lanes[i].state != LANE_FREE) lane_drop(self, &self->lanes[i]);
  if (self->kind == CLOSING && self->manager) hl_manager_close(self->manager);
  hl_plan_free(self->plan);
  classic_close();
  return NULL;
}

int worker_main(int worker, uint64_t round) {
  static thread threads[THREADS];
  me = worker;
  area = &shared->worker[worker];
  atomic_store(&area->attached, true);
  signal(SIGCHLD, SIG_IGN); /* forked children need no care */
  for (int i = 0; i < MANAGERS; i++)
    while (!managers[i] && !atomic_load(&shared->stop)) {
      managers[i] = manager_open();
      if (!managers[i]) (void)usleep(100000);
    }
  if (!managers[MANAGERS - 1]) return 0;
  for (int i = 0; i < shared->threads; i++) {
    thread *self = &threads[i];
    self->number = i;
    self->kind = i == shared->threads - 1 ? CLOSING : i % 2 ? WAITING : BLOCKING;
    self->manager_number = self->kind == CLOSING    ? MANAGERS
                           : self->kind == BLOCKING ? (i / 2) % 2
                                                    : (i / 2 + 1) % MANAGERS;
    self->manager = self->kind == CLOSING ? NULL : managers[self->manager_number];
    self->lane_count = self->kind == BLOCKING ? 1 : shared->server ? LANES / 2 : LANES;
    self->dice =
        dice_of(shared->seed, (round * WORKERS + (uint64_t)worker) * THREADS + (uint64_t)i);
    self->records = area->records[i];
    /* Memory may be short: see limits() in faults.c. */
    while (pthread_create(&self->id, NULL, thread_main, self)) (void)usleep(10000);
  }
  for (int i = 0; i < shared->threads; i++) (void)pthread_join(threads[i].id, NULL);
  for (int i = 0; i < MANAGERS; i++) hl_manager_close(managers[i]);
  return 0;
}

/* --------------------------------------------------------------- the probe */

static void show_holder(void *context, const hl_holder *holder) {
  char *at = context;
  size_t used = strlen(at);
  (void)snprintf(at + used, MESSAGE - used, "; %s by pid %lld %s",
                 holder->waiting ? "awaited" : "held", (long long)holder->pid, holder->path);
  used = strlen(at);
  if (holder->kind == HL_LEASE)
    (void)snprintf(at + used, MESSAGE - used, ", lease %s of %s for %lld ms", holder->label,
                   holder->owner, (long long)holder->remaining_ms);
}

/* While worker 0 rests its records are ours: so the checker sees when we were granted what a lease had been left
   on. NULL: it has not read enough of them yet. */
static record *probe_record(int user, int64_t timeout) {
  for (int i = 0; i < RECORDS; i++) {
    record *r = &shared->worker[0].records[0][i];
    if (atomic_load_explicit(&r->state, memory_order_acquire) != FREE) continue;
    record_clear(r);
    r->handle = atomic_fetch_add(&shared->worker[0].handles, 1u) * WORKERS;
    r->worker = r->thread = 0;
    r->manager = MANAGERS;
    r->pid = getpid();
    r->kind = CALL_ACQUIRE;
    r->proxied = false;
    r->timeout = timeout;
    r->targets = 1;
    r->modes[user] = HL_EXCLUSIVE;
    r->stopped = atomic_load(&shared->worker[0].stopped);
    r->called = now_ns();
    atomic_store_explicit(&r->state, CALLED, memory_order_release);
    return r;
  }
  return NULL;
}

int probe_main(int64_t timeout) {
  int failures = 0;
  me = 0;
  area = &shared->worker[WORKERS - 1];
  hl_manager *manager = manager_open();
  for (int tries = 0; !manager && tries < 50; tries++) {
    (void)usleep(100000);
    manager = manager_open();
  }
  if (!manager) return 1;
  for (int user = 0; user < USERS; user++) {
    node_name name;
    hl_error error;
    hl_lock *lock;
    hl_options options = HL_OPTIONS_INIT;
    options.timeout = timeout;
    hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
    node_ids(user, &name);
    (void)hl_plan_add(plan, name.ids, name.n, HL_EXCLUSIVE, true, NULL);
    record *r = probe_record(user, timeout);
    int status = hl_acquire(manager, plan, &options, &lock, &error);
    /* A starved server ends a connection; then nothing is known of the user. */
    for (int tries = 0; status == HL_ECONNECTION && tries < 3; tries++)
      status = hl_acquire(manager, plan, &options, &lock, &error);
    if (r && status == HL_OK) {
      r->granted = now_ns();
      r->token = hl_lock_token(lock);
      atomic_store(&r->held, r->granted);
    }
    if (r) {
      r->status = status;
      record_end(r, status ? END_NO_GRANT : END_FREED, now_ns());
    }
    if (status) {
      char who[MESSAGE] = "";
      (void)hl_manager_holders(manager, plan, show_holder, who, NULL);
      complain("while all rest, u%d is not to be had: %s%s", user, error.message, who);
      failures++;
    } else {
      hl_lock_free(lock);
    }
    hl_plan_free(plan);
  }
  hl_manager_close(manager);
  return failures > 0;
}
