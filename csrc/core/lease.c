/*
 * lease.c - see lease.h.
 */
#include "lease.h"

#include "clock.h"
#include "error.h"
#include "exit.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* An operation on a record takes a round trip. After this time its server hangs. */
#define ANSWER_MS 10000
/* For a drop whose caller does not wait. */
#define DROP_MS 1000
/* For the answer to a call on a lease that is almost over. */
#define LEAST_MS 170
/* From the end of a wait until its caller runs. */
#define RETURN_MS 20
/* For a release that must not block, before a worker takes it over. */
#define RELEASE_MS 20
/* The most records in one round trip, on a store with drop_all. */
#define DROPS_AT_ONCE 64u
/* A drop that failed is tried again after this pause. */
#define DROP_AGAIN_MS 500
/* A failed refresh is tried again after this part of the ttl, but no sooner than AGAIN_MS. */
#define AGAIN_PART 12
#define AGAIN_MS 20
/* The most workers of a manager that refresh leases. */
#define REFRESHERS_MAX 8u
/* While there are leases to refresh, the keeper takes a turn this often: its clock stands still
   while the machine sleeps. */
#define TURN_MS 1000

/* --------------------------------------------------------------- making */

bool hl__random_fill(void *data, size_t size) {
  char *at = data;
  while (size > 0) {
    ssize_t n = getrandom(at, size, 0);
    if (n < 0 && errno != EINTR) return false;
    if (n < 0) continue;
    at += n;
    size -= (size_t)n;
  }
  return true;
}

static int names_draw(hl_lease_terms *terms, bool imported, hl_error *error) {
  uint8_t random[48];
  if (!hl__random_fill(random, sizeof random))
    return hl__error_errno(error, HL_ESTORE, "there are no random numbers");
  memcpy(terms->holder, random + 32, 16);
  if (imported) return HL_OK;
  memcpy(terms->id, random, 16);
  terms->id[0] |= 1; /* hl__is_presence */
  memcpy(terms->secret, random + 16, 16);
  return HL_OK;
}

int hl__lease_redraw(hl__lease *lease, hl_error *error) {
  uint8_t before[16];
  memcpy(before, lease->terms.id, sizeof before);
  int status = names_draw(&lease->terms, lease->imported, error);
  if (status == HL_OK && !lease->imported) memcpy(lease->terms.former, before, sizeof before);
  return status;
}

/* Unchecked: no other thread has it yet. */
HL__UNCHECKED int hl__lease_new(hl_manager *manager, const hl_options *options, hl__lease **result,
                                hl_error *error) {
  hl_lease_terms terms = {.ttl = options->ttl, .turn = 1};
  *result = NULL;
  int status = names_draw(&terms, false, error);
  if (status) return status;
  hl__lease *lease = calloc(1, sizeof *lease);
  if (!lease) return hl__error_memory(error);
  atomic_init(&lease->references, 1u);
  lease->manager = manager;
  lease->refreshes = options->auto_refresh;
  lease->releases = options->auto_release;
  hl__list_init(&lease->node);
  lease->terms = terms;
  atomic_init(&lease->turn, terms.turn);
  const char *owner = options->owner ? options->owner : manager->config.application;
  memcpy(lease->owner, owner, strlen(owner) + 1); /* its length was checked */
  lease->terms.owner = lease->owner;
  *result = lease;
  return HL_OK;
}

void hl__lease_unref(hl__lease *lease) {
  if (!lease || atomic_fetch_sub(&lease->references, 1u) != 1) return;
#ifndef __clang_analyzer__ /* it does not count references, and takes each for the last */
  free(lease);
#endif
}

/* ----------------------------------------------------- on a connection */

typedef enum operation_kind { REFRESH, INSPECT, DROP, RECALL } operation_kind;

typedef struct operation {
  operation_kind kind;
  hl__lease *lease;
  hl_lease_terms terms;
  bool confirm;
  int64_t patience; /* ms; 0: the usual */
  int64_t ttl, deadline;
  int64_t sent_ms, left_ms; /* the store's answers */
  int64_t end;              /* no other request could take the rows before */
} operation;

/* If an earlier drop was not answered and the record is gone, that drop deleted it, provided that
   no other request could have done so. */
static int drop_run(hl_session *session, operation *self, hl_error *error) {
  const hl_lease_ops *ops = self->lease->manager->store->leases;
  int status = ops->drop(session, &self->terms, self->confirm, self->deadline, error);
  self->terms.again = true;
  if (status != HL__ABSENT) return status;
  if (!self->lease->imported && hl__boot_ms() < self->end) return HL_OK;
  return hl__error(error, HL_ECONNECTION,
                   "the lease is not there any more, but it is not known whether this release has "
                   "ended it: another program may have done so before");
}

static int operation_run(hl_session *session, void *context, hl_error *error) {
  operation *self = context;
  const hl_lease_ops *ops = self->lease->manager->store->leases;
  switch (self->kind) {
  case REFRESH:
    self->terms.turn = atomic_fetch_add(&self->lease->turn, 1u) + 1;
    return ops->refresh(session, &self->terms, self->ttl, self->deadline, &self->sent_ms, error);
  case INSPECT: return ops->inspect(session, &self->terms, self->deadline, &self->left_ms, error);
  case DROP: return drop_run(session, self, error);
  case RECALL: return ops->recall(session, &self->terms, self->deadline, error);
  }
  return HL_OK;
}

static void operation_begin(hl__lease *lease, operation *self) HL__REQUIRES(hl__manager_mutex) {
  self->lease = lease;
  self->terms = lease->terms;
  self->end = lease->end;
  if (!self->patience && !self->confirm) self->patience = DROP_MS;
  if (!self->patience) {
    /* A store that hangs must not keep the caller beyond the end of the lease. */
    int64_t left = lease->end - hl__boot_ms() - RETURN_MS;
    if (left > ANSWER_MS) left = ANSWER_MS;
    self->patience = left > LEAST_MS ? left : LEAST_MS;
  }
  self->deadline = hl__now_ms() + self->patience;
}

/* Runs the operation on a connection of the pool. Gives the mutex back meanwhile. */
static int operate(hl__lease *lease, operation *self, hl_error *error)
    HL__REQUIRES(hl__manager_mutex) {
  operation_begin(lease, self);
  return hl__pool_run(lease->manager, operation_run, self, self->deadline, error);
}

/* Like operate, but for a closed manager, which has no pool any more. */
static int operate_alone(hl__lease *lease, operation *self, hl_error *error)
    HL__REQUIRES(hl__manager_mutex) {
  operation_begin(lease, self);
  return hl__pool_run_alone(lease->manager, operation_run, self, self->deadline, error);
}

/* --------------------------------------------------------------- belief */

/* Has the keeper take a turn when the refresh is due, or sooner. */
static void hurry(const hl__lease *lease) HL__REQUIRES(hl__manager_mutex) {
  int64_t wait = lease->due - hl__boot_ms();
  if (!lease->refreshes) return;
  if (wait > TURN_MS) wait = TURN_MS;
  hl__manager_hurry(lease->manager, hl__now_ms() + (wait > 0 ? wait : 0));
}

static void end_watch(const hl__lease *lease) HL__REQUIRES(hl__manager_mutex) {
  if (lease->end < atomic_load(&lease->manager->leases_end))
    atomic_store(&lease->manager->leases_end, lease->end);
}

/* Believes the lease from now on, as a refresh sent at sent_ms was answered. */
static void believe(hl__lease *lease, int64_t sent_ms, int64_t ttl)
    HL__REQUIRES(hl__manager_mutex) {
  lease->end = hl__deadline(sent_ms, ttl);
  lease->due = hl__deadline(sent_ms, (ttl < lease->terms.ttl ? ttl : lease->terms.ttl) / 3);
  /* A lease with a longer ttl than usual needs no refresh soon. */
  if (ttl > lease->terms.ttl) lease->due = hl__deadline(lease->end, -(lease->terms.ttl / 3 * 2));
  lease->told = false;
  end_watch(lease);
  hurry(lease);
}

void hl__lease_until(hl__lease *lease, int64_t end) {
  if (end >= lease->end) return;
  lease->end = end;
  end_watch(lease);
}

/* Called before a refresh is sent. A shorter ttl counts at once: the store may apply it, and the
   holder does not know until the answer comes. */
static void doubt(hl__lease *lease, int64_t ttl) HL__REQUIRES(hl__manager_mutex) {
  hl__lease_until(lease, hl__deadline(hl__boot_ms(), ttl));
}

static int64_t left(const hl__lease *lease) HL__REQUIRES(hl__manager_mutex) {
  return lease->state == HL__LEASE_HELD ? hl__lease_left_ms(lease->end) : 0;
}

/* Ends a HELD lease, and counts `happened`. */
static void end(hl__lease *lease, hl__lease_state state, hl__event_kind happened)
    HL__REQUIRES(hl__manager_mutex) {
  lease->state = state;
  hl__list_remove(&lease->node);
  hl__manager_event(lease->manager, happened, 0, 0);
  hl__manager_held(lease->manager, &lease->span);
}

static int lose(hl__lease *lease, const hl_error *why) HL__REQUIRES(hl__manager_mutex) {
  end(lease, HL__LEASE_LOST, HL__HOLD_LOST);
  lease->loss = *why;
  atomic_fetch_add(&lease->manager->losses, 1u);
  return HL_ELOST;
}

/* The answer of a lease that is not HELD. */
static int not_held(const hl__lease *lease, hl_error *error) HL__REQUIRES(hl__manager_mutex) {
  if (lease->state != HL__LEASE_LOST)
    return hl__error(error, HL_ERELEASED, "the lock has been released");
  if (error) *error = lease->loss;
  return HL_ELOST;
}

static int over_error(hl_error *error) {
  return hl__error(error, HL_ELOST,
                   "the time of the lease is up; a refresh tells whether another "
                   "owner has had its nodes since");
}

int hl__lease_late_error(hl_error *error) {
  return hl__error(error, HL_ELOST,
                   "the time of the lease was up when the store had answered; it was given back");
}

int hl__lease_unsupported(const hl_manager *manager, hl_error *error) {
  if (manager->config.interoperates)
    return hl__error(error, HL_EUNSUPPORTED,
                     "a lease keeps out no program that uses Symfony Lock on "
                     "this store, whose locks end with their session: acquire "
                     "without a ttl, or open without `interoperate`");
  return hl__error(error, HL_EUNSUPPORTED,
                   "the store '%s' has no leases here; the embedded store "
                   "('file:'), SQLite and PostgreSQL have them, and MySQL and MariaDB "
                   "after `hierlock provision --leases`",
                   manager->ops->scheme);
}

bool hl__lease_begin(hl__lease *lease, const hl_grant *grant) {
  hl_manager *manager = lease->manager;
  lease->terms.token = grant->token;
  lease->terms.place = grant->place;
  believe(lease, grant->sent_ms, lease->terms.ttl);
  if (manager->closed || lease->end <= hl__boot_ms()) return false;
  lease->state = HL__LEASE_HELD;
  hl__list_add(&manager->leases, &lease->node);
  hl__manager_event(manager, HL__HOLD_BEGINS, 0, 0);
  return true;
}

static int take_back(hl__lease *lease, operation *self, hl_error *error)
    HL__REQUIRES(hl__manager_mutex) {
  hl__exit_give_back_begin();
  int status =
      lease->manager->closed ? operate_alone(lease, self, error) : operate(lease, self, error);
  hl__exit_give_back_end();
  return status;
}

void hl__lease_undo(hl__lease *lease) {
  operation drop = {.kind = DROP};
  (void)take_back(lease, &drop, NULL);
}

int64_t hl__lease_left(hl__lease *lease) {
  hl__manager_mutex_lock(lease->manager);
  int64_t ms = left(lease);
  hl__manager_mutex_unlock(lease->manager);
  return ms;
}

hl_lock_state hl__lease_inspect(hl__lease *lease) {
  hl_lock_state state = HL_RELEASED;
  hl__manager_mutex_lock(lease->manager);
  if (lease->state == HL__LEASE_HELD)
    state = left(lease) > 0 ? HL_HELD : HL_OVER;
  else if (lease->state == HL__LEASE_LOST)
    state = HL_LOST;
  hl__manager_mutex_unlock(lease->manager);
  return state;
}

void hl__lease_loss(hl__lease *lease, hl_error *error) {
  hl__manager_mutex_lock(lease->manager);
  if (lease->state == HL__LEASE_LOST)
    *error = lease->loss;
  else
    (void)over_error(error);
  hl__manager_mutex_unlock(lease->manager);
}

int hl__lease_use(hl__lease *lease, hl_error *error) {
  return lease->state == HL__LEASE_HELD ? HL_OK : not_held(lease, error);
}

int hl__lease_stands(hl__lease *lease, hl_error *error) {
  int status = hl__lease_use(lease, error);
  return status == HL_OK && left(lease) == 0 ? over_error(error) : status;
}

void hl__lease_lost(hl__lease *lease, const hl_error *why) {
  if (lease->state == HL__LEASE_HELD) (void)lose(lease, why);
}

/* ------------------------------------------------------------ refreshing */

/* Waits until no other refresh is running. If two overlapped, it would not be known which one
   the store applied last. */
static void await_turn(hl__lease *lease) HL__REQUIRES(hl__manager_mutex) {
  hl_manager *manager = lease->manager;
  while (lease->busy && lease->state == HL__LEASE_HELD)
    hl__manager_wait(&manager->done, manager, HL_FOREVER);
}

/* Refreshes at the store. Model: records.pml, held. Believes the store's answer; without an answer
   the belief does not grow. */
static int refresh(hl__lease *lease, int64_t ttl, hl_error *error) HL__REQUIRES(hl__manager_mutex) {
  operation self = {.kind = REFRESH, .ttl = ttl, .confirm = true};
  hl_error reason = {0};
  lease->busy = true;
  doubt(lease, ttl);
  int status = operate(lease, &self, &reason);
  lease->busy = false;
  (void)pthread_cond_broadcast(&lease->manager->done);
  /* The lease was released meanwhile, or the manager was closed. */
  if (lease->state != HL__LEASE_HELD) return not_held(lease, error);
  if (status == HL_OK)
    believe(lease, self.sent_ms, ttl);
  else if (self.sent_ms)
    hl__lease_until(lease, hl__deadline(self.sent_ms, ttl));
  if (status == HL_ELOST) (void)lose(lease, &reason);
  if (status && error) *error = reason;
  return status;
}

int hl__lease_refresh(hl__lease *lease, int64_t ttl, hl_error *error) {
  hl_manager *manager = lease->manager;
  hl__manager_mutex_lock(manager);
  await_turn(lease);
  int status = lease->state == HL__LEASE_HELD ? refresh(lease, ttl ? ttl : lease->terms.ttl, error)
                                              : not_held(lease, error);
  if (status == HL_OK && left(lease) == 0) {
    hl_error late;
    status = hl__lease_late_error(&late);
    (void)lose(lease, &late);
    hl__lease_undo(lease);
    if (error) *error = late;
  }
  hl__manager_mutex_unlock(manager);
  return status;
}

int hl__lease_check(hl__lease *lease, hl_error *error) {
  hl_manager *manager = lease->manager;
  operation self = {.kind = INSPECT, .confirm = true};
  hl_error reason = {0};
  hl__manager_mutex_lock(manager);
  int status = HL_OK;
  if (lease->state == HL__LEASE_HELD) status = operate(lease, &self, &reason);
  if (lease->state != HL__LEASE_HELD) {
    status = not_held(lease, error); /* perhaps it was released meanwhile */
  } else if (status) {
    if (status == HL_ELOST) (void)lose(lease, &reason);
    if (error) *error = reason;
  } else if (self.left_ms == 0 || left(lease) == 0) {
    status = over_error(error);
  }
  hl__manager_mutex_unlock(manager);
  return status;
}

/* A refresh for the keeper; busy is set. */
static void refresh_due(hl__lease *lease) HL__REQUIRES(hl__manager_mutex) {
  int status = HL_OK;
  if (lease->state == HL__LEASE_HELD) status = refresh(lease, lease->terms.ttl, NULL);
  lease->busy = false;
  (void)pthread_cond_broadcast(&lease->manager->done);
  if (status) {
    int64_t again = lease->terms.ttl / AGAIN_PART;
    lease->due = hl__boot_ms() + (again > AGAIN_MS ? again : AGAIN_MS);
  }
}

static bool is_due(const hl__lease *lease, int64_t now) HL__REQUIRES(hl__manager_mutex) {
  return lease->refreshes && !lease->busy && lease->due <= now;
}

/* The next lease that is due for a refresh, searching after `behind`; NULL: none. */
static hl__lease *next_due(hl_manager *manager, hl__lease *behind) HL__REQUIRES(hl__manager_mutex) {
  int64_t now = hl__boot_ms();
  const hl__list *begin = behind->state == HL__LEASE_HELD ? &behind->node : &manager->leases;
  for (hl__list *node = begin->next; node != begin; node = node->next) {
    if (node == &manager->leases) continue;
    hl__lease *lease = HL__LIST_ENTRY(node, hl__lease, node);
    if (is_due(lease, now)) return lease;
  }
  return NULL;
}

/* Run by a worker, for the keeper: refreshes this lease, then all others that are due. */
static void refresh_task(hl__task *task) {
  hl__lease *lease = HL__LIST_ENTRY(task, hl__lease, refresh), *next;
  hl_manager *manager = lease->manager;
  hl__manager_mutex_lock(manager);
  for (;;) {
    refresh_due(lease);
    next = next_due(manager, lease);
    if (!next) break;
    next->busy = true;
    atomic_fetch_add(&next->references, 1u);
    hl__lease_unref(lease);
    lease = next;
  }
  manager->refreshers--;
  hl__manager_hurry(manager, hl__now_ms()); /* the keeper computes when the next one is due */
  hl__worker_comes(manager);
  hl__manager_mutex_unlock(manager);
  hl__lease_unref(lease);
  hl__manager_leave(manager);
}

/* False: no thread can be started now. */
static bool task_give(hl__lease *lease, hl__task *task, void (*run)(hl__task *task))
    HL__REQUIRES(hl__manager_mutex) {
  hl_manager *manager = lease->manager;
  task->run = run;
  atomic_fetch_add(&lease->references, 1u);
  atomic_fetch_add(&manager->references, 1u);
  if (hl__worker_give(manager, task)) return true;
  atomic_fetch_sub(&manager->references, 1u); /* not the last one: the caller has one */
  atomic_fetch_sub(&lease->references, 1u);
  return false;
}

int64_t hl__leases_keep(hl_manager *manager) {
  int64_t now = hl__boot_ms(), wait = HL_FOREVER;
  if (manager->closed) return HL_FOREVER;
  for (hl__list *node = manager->leases.next; node != &manager->leases; node = node->next) {
    hl__lease *lease = HL__LIST_ENTRY(node, hl__lease, node);
    if (!lease->refreshes || lease->busy) continue;
    if (is_due(lease, now)) {
      /* The workers that refresh leases find it. */
      if (manager->refreshers == REFRESHERS_MAX) continue;
      lease->busy = task_give(lease, &lease->refresh, refresh_task);
      manager->refreshers += lease->busy;
      if (lease->busy) continue;
      lease->due = now + AGAIN_MS;
      if (manager->refreshers == 0 && !hl__library_closed()) {
        /* No thread can be had: the keeper itself waits for the store, or the lease would end. */
        atomic_fetch_add(&lease->references, 1u);
        refresh_due(lease);
        hl__lease_unref(lease);
        return hl__now_ms();
      }
    }
    if (lease->due - now < wait) wait = lease->due - now;
    if (wait > TURN_MS) wait = TURN_MS;
  }
  return hl__deadline(hl__now_ms(), wait);
}

void hl__leases_inspect(hl_manager *manager) {
  hl__manager_renew(manager);
  hl__manager_mutex_lock(manager);
  int64_t now = hl__boot_ms(), next = HL_FOREVER;
  for (hl__list *node = manager->leases.next; node != &manager->leases; node = node->next) {
    hl__lease *lease = HL__LIST_ENTRY(node, hl__lease, node);
    if (lease->told) continue;
    if (lease->end <= now) {
      lease->told = true;
      atomic_fetch_add(&manager->losses, 1u);
    } else if (lease->end < next) {
      next = lease->end;
    }
  }
  atomic_store(&manager->leases_end, next);
  hl__manager_mutex_unlock(manager);
}

/* ---------------------------------------------------------- giving back */

static operation recall_of(const hl__lease *lease, int64_t patience) {
  bool can = lease->manager->store->leases->recall;
  return (operation){.kind = can ? RECALL : DROP, .confirm = true, .patience = patience};
}

/* The first of the drops, and those after it that go in the same trip. All stay in the list
   until they are gone. */
typedef struct batch {
  hl_manager *manager;
  bool recalls; /* a recall, alone */
  bool lost;    /* each was lost before, as the store says; else HL_ELOST may not say so of all */
  size_t n;
  int64_t deadline;
  hl_lease_terms terms[DROPS_AT_ONCE];
} batch;

static void batch_fill(batch *self, hl_manager *manager, size_t most)
    HL__REQUIRES(hl__manager_mutex) {
  const hl__list *node = manager->drops.next;
  self->manager = manager;
  self->recalls = HL__LIST_ENTRY(node, hl__lease, node)->recalls;
  self->lost = false;
  self->deadline = hl__now_ms() + ANSWER_MS;
  if (self->recalls || !manager->store->leases->drop_all) most = 1;
  for (self->n = 0; self->n < most && node != &manager->drops; node = node->next) {
    hl__lease *lease = HL__LIST_ENTRY(node, hl__lease, node);
    if (lease->recalls != self->recalls) break;
    self->terms[self->n++] = lease->terms;
    lease->terms.again = true; /* for the next call */
  }
}

static int batch_run(hl_session *session, void *context, hl_error *error) {
  batch *self = context;
  const hl_lease_ops *ops = self->manager->store->leases;
  int status = HL__ABSENT;
  if (self->recalls && ops->recall) return ops->recall(session, self->terms, self->deadline, error);
  /* Also for one record: drop_all does not wait for a session that keeps the record locked. */
  if (!self->recalls && ops->drop_all)
    status = ops->drop_all(session, self->terms, self->n, self->deadline, error);
  if (status == HL__ABSENT && self->n == 1)
    status = ops->drop(session, self->terms, true, self->deadline, error);
  self->lost = status == HL_ELOST;
  self->terms->again = true; /* the core repeats a call whose connection has ended */
  return status == HL__ABSENT ? HL_ELOST : status;
}

static bool is_done(int status) { return status == HL_OK || status == HL_ELOST; }

/* Removes the first n: they are gone, as the store says, or given up. lost: why they were gone
   before; NULL: not known. */
static void drops_end(hl_manager *manager, size_t n, int status, const hl_error *lost)
    HL__REQUIRES(hl__manager_mutex) {
  for (; n > 0 && !hl__list_empty(&manager->drops); n--) {
    hl__lease *lease = HL__LIST_ENTRY(manager->drops.next, hl__lease, node);
    if (lease->state == HL__LEASE_CLOSED && status == HL_OK) lease->state = HL__LEASE_ENDED;
    if (lease->state == HL__LEASE_CLOSED && lost) {
      lease->state = HL__LEASE_LOST;
      lease->loss = *lost;
    }
    hl__list_remove(&lease->node);
    hl__lease_unref(lease);
    manager->drops_gone++;
  }
  (void)pthread_cond_broadcast(&manager->done);
}

/* Moves the first n, whose drop failed, to the end, or removes those whose time is up. */
static void drops_turn(hl_manager *manager, size_t n) HL__REQUIRES(hl__manager_mutex) {
  for (; n > 0; n--) {
    hl__lease *lease = HL__LIST_ENTRY(manager->drops.next, hl__lease, node);
    if (hl__boot_ms() >= lease->end) {
      drops_end(manager, 1, HL_TIMEOUT, NULL);
      continue;
    }
    hl__list_remove(&lease->node);
    hl__list_add(&manager->drops, &lease->node);
  }
  manager->drops_failed++;
  (void)pthread_cond_broadcast(&manager->done);
}

/* Waits before the next try, once each drop was tried. Meanwhile exit() does not wait for these
   failed drops. */
static void drops_pause(hl_manager *manager) HL__REQUIRES(hl__manager_mutex) {
  const hl__list *first = manager->drops.next;
  if (first == &manager->drops || !HL__LIST_ENTRY(first, hl__lease, node)->terms.again) return;
  int64_t end = hl__now_ms() + DROP_AGAIN_MS;
  uint64_t put = manager->drops_put;
  hl__exit_give_back_end();
  while (!manager->closed && manager->drops_put == put && hl__left_ms(end) > 0)
    hl__manager_wait(&manager->done, manager, end);
  hl__exit_give_back_begin();
}

/* How many drops go one by one from now on: the drops of a batch that the store refused or rolled
   back. Perhaps only one record caused that, as when a stranger has locked it. */
static size_t alone_next(size_t alone, const batch *some, int status) {
  if (some->n > 1 && !is_done(status)) return some->n;
  return alone > 0 ? alone - 1 : 0;
}

/* Whether the other drops would fail, too. */
static bool is_cut_off(const hl_manager *manager, int status) {
  return status == HL_ECONNECTION && !manager->ops->traits.several;
}

/* Deletes all remaining records of a closed manager, on one session. */
static int rest_run(hl_session *session, void *context, hl_error *error) {
  hl_manager *manager = context;
  int64_t end = hl__now_ms() + ANSWER_MS;
  size_t alone = 0;
  int status = HL_OK;
  (void)error;
  hl__manager_mutex_lock(manager);
  while (!hl__list_empty(&manager->drops) && !is_cut_off(manager, status) && hl__left_ms(end) > 0) {
    batch some;
    batch_fill(&some, manager, alone > 0 ? 1 : DROPS_AT_ONCE);
    hl__manager_mutex_unlock(manager);
    hl_error why;
    status = batch_run(session, &some, &why);
    hl__manager_mutex_lock(manager);
    alone = alone_next(alone, &some, status);
    if (some.n == 1 || is_done(status)) drops_end(manager, some.n, status, some.lost ? &why : NULL);
  }
  hl__manager_mutex_unlock(manager);
  return status;
}

/* Deletes the records in `drops`, many per trip, for as long as the store keeps them, even if its
   server is down meanwhile. A record that the store refuses to delete does not hold up the others.
   once: the manager is about to be closed; then, and when the program ends, each is tried once more
   at most, and only as long as the store answers. */
static void drops_give_back(hl_manager *manager, bool once) HL__REQUIRES(hl__manager_mutex) {
  int64_t end = hl__now_ms() + ANSWER_MS;
  size_t alone = 0;
  while (!hl__list_empty(&manager->drops)) {
    if (manager->closed) {
      (void)hl__pool_run_alone(manager, rest_run, manager, hl__now_ms() + ANSWER_MS, NULL);
      drops_end(manager, SIZE_MAX, HL_TIMEOUT, NULL);
      continue;
    }
    bool last = once || hl__exit_begun();
    batch some;
    if (!last) end = hl__now_ms() + ANSWER_MS;
    batch_fill(&some, manager, alone > 0 ? 1 : DROPS_AT_ONCE);
    hl_error why;
    int status = hl__pool_run(manager, batch_run, &some, some.deadline, &why);
    alone = alone_next(alone, &some, status);
    if (is_done(status)) {
      drops_end(manager, some.n, status, some.lost ? &why : NULL);
    } else if (last && (is_cut_off(manager, status) || hl__left_ms(end) == 0)) {
      drops_end(manager, SIZE_MAX, status, NULL);
    } else if (last) {
      if (some.n == 1) drops_end(manager, 1, status, NULL);
    } else if (!manager->closed) {
      drops_turn(manager, some.n);
      if (some.n == 1 && status != HL_TIMEOUT) drops_pause(manager);
    }
  }
}

/* Run by a worker. */
static void drop_task(hl__task *task) {
  hl__lease *first = HL__LIST_ENTRY(task, hl__lease, drop);
  hl_manager *manager = first->manager;
  hl__exit_give_back_begin();
  hl__exit_await_end(); /* drop_later's */
  hl__manager_mutex_lock(manager);
  drops_give_back(manager, false);
  manager->drops_begun = false;
  hl__worker_comes(manager);
  hl__manager_mutex_unlock(manager);
  hl__exit_give_back_end();
  hl__lease_unref(first);
  hl__manager_leave(manager);
}

static void drop_put(hl__lease *lease) HL__REQUIRES(hl__manager_mutex) {
  atomic_fetch_add(&lease->references, 1u);
  hl__list_add(&lease->manager->drops, &lease->node);
  lease->manager->drops_put++;
  (void)pthread_cond_broadcast(&lease->manager->done);
}

/* Hands the drop to a worker. False: no thread can be started, and the record ends by itself. */
static bool drop_later(hl__lease *lease) HL__REQUIRES(hl__manager_mutex) {
  hl_manager *manager = lease->manager;
  if (!manager->drops_begun && !task_give(lease, &lease->drop, drop_task)) return false;
  if (!manager->drops_begun) hl__exit_await(1); /* until the worker has begun */
  manager->drops_begun = true;
  drop_put(lease);
  return true;
}

int hl__lease_recall(hl__lease *lease, int64_t deadline) {
  int64_t left = hl__left_ms(deadline);
  operation recall = recall_of(lease, left < DROP_MS ? left : DROP_MS);
  int status = left > 0 ? take_back(lease, &recall, NULL) : HL_TIMEOUT;
  if (status == HL_OK || status == HL_ELOST) return HL_OK;
  if (lease->manager->closed) return status;
  lease->recalls = true;
  lease->end = hl__deadline(hl__boot_ms(), lease->terms.ttl);
  (void)drop_later(lease);
  return status;
}

void hl__leases_drops_await(hl_manager *manager, uint64_t put, int64_t deadline) {
  int64_t usual = hl__now_ms() + DROP_MS;
  if (usual < deadline) deadline = usual;
  uint64_t failed = manager->drops_failed;
  while (manager->drops_gone < put && manager->drops_failed == failed && !manager->closed &&
         hl__left_ms(deadline) > 0)
    hl__manager_wait(&manager->done, manager, deadline);
}

/* Without an answer the server may not have read the release: a worker repeats it. */
static void release_answered(hl__sent *sent, bool answered) HL__REQUIRES(hl__manager_mutex) {
  hl__lease *lease = HL__LIST_ENTRY(sent, hl__lease, sent);
  if (!answered && !lease->manager->closed) (void)drop_later(lease);
  hl__lease_unref(lease);
}

/* Sends the release on an idle connection. False: not possible; release in another way. A
   connection on which it was not sent is closed: some of it may be sent with the next request. */
static bool release_send(hl__lease *lease) HL__REQUIRES(hl__manager_mutex) {
  hl_manager *manager = lease->manager;
  if (!manager->ops->traits.drop_sends || manager->drops_begun) return false;
  hl__connection *connection = hl__pool_quiet(manager);
  if (!connection) return false;
  if (manager->store->leases->drop(connection->session, &lease->terms, false, hl__now_ms(), NULL)) {
    hl__pool_discard(manager, connection);
    return false;
  }
  lease->sent.end = release_answered;
  atomic_fetch_add(&lease->references, 1u);
  hl__pool_sent(connection, &lease->sent);
  return true;
}

/* The close waits for the store no longer than a second, and leaves a lease without auto_release to
   itself. */
static int release_closed(hl__lease *lease, bool confirm, hl_error *error)
    HL__REQUIRES(hl__manager_mutex) {
  hl_manager *manager = lease->manager;
  operation drop = {.kind = DROP, .confirm = confirm};
  if (!confirm && lease->releases) return HL_OK;
  operation_begin(lease, &drop);
  /* In another thread, the close may be about to drop it. */
  while (!manager->closed && !hl__list_empty(&lease->node) && hl__left_ms(drop.deadline) > 0)
    hl__manager_wait(&manager->done, manager, drop.deadline);
  drop.patience = hl__left_ms(drop.deadline) + 1; /* not 0, which is the usual */
  if (lease->state == HL__LEASE_LOST) return not_held(lease, error);
  if (lease->state == HL__LEASE_ENDED) return HL_OK;
  lease->state = HL__LEASE_ENDED;
  if (!confirm && manager->ops->traits.blocks && drop_later(lease)) return HL_OK;
  return take_back(lease, &drop, error);
}

int hl__lease_release(hl__lease *lease, bool confirm, hl_error *error) {
  hl_manager *manager = lease->manager;
  operation drop = {.kind = DROP, .confirm = confirm};
  int status = HL_OK;
  if (!confirm) drop.patience = RELEASE_MS;
  hl__manager_mutex_lock(manager);
  if (lease->state == HL__LEASE_HELD) {
    end(lease, HL__LEASE_ENDED, HL__HOLD_RELEASED);
    bool sent = !confirm && release_send(lease);
    bool later = !confirm && !sent && (manager->ops->traits.blocks || manager->drops_begun);
    if (!(later && drop_later(lease)) && !sent) {
      status = operate(lease, &drop, error);
      if (confirm && manager->closed && !is_done(status)) {
        /* The close has cut it off, before it was sent or behind that. */
        lease->terms.again = true;
        drop.patience = hl__left_ms(drop.deadline) + 1; /* not 0, which is the usual */
        status = take_back(lease, &drop, error);
      }
      if (!is_done(status) && drop_later(lease) && !confirm) status = HL_OK;
    }
  } else if (lease->state == HL__LEASE_LOST) {
    status = not_held(lease, error);
  } else if (lease->state == HL__LEASE_CLOSED) {
    status = release_closed(lease, confirm, error);
  }
  hl__manager_mutex_unlock(manager);
  return status;
}

int hl__lease_leave(hl__lease *lease, hl_error *error) {
  hl__manager_mutex_lock(lease->manager);
  hl_store *store = lease->manager->store;
  int status = HL_OK;
  if (lease->state == HL__LEASE_HELD) {
    end(lease, HL__LEASE_ENDED, HL__HOLD_ENDS);
    if (store->leases->leave) store->leases->leave(store, &lease->terms);
  } else {
    status = not_held(lease, error);
  }
  hl__manager_mutex_unlock(lease->manager);
  return status;
}

/* Ends all leases. False: records are left to delete, and no worker does it. */
static bool leases_end(hl_manager *manager) HL__REQUIRES(hl__manager_mutex) {
  /* When the program ends, a new worker would only block. */
  bool has_worker = manager->ops->traits.blocks && !hl__library_closed();
  while (!hl__list_empty(&manager->leases)) {
    hl__lease *lease = HL__LIST_ENTRY(manager->leases.next, hl__lease, node);
    end(lease, HL__LEASE_CLOSED, lease->releases ? HL__HOLD_RELEASED : HL__HOLD_ENDS);
    if (!lease->releases) continue;
    has_worker = has_worker && drop_later(lease);
    if (!has_worker) drop_put(lease);
  }
  return hl__list_empty(&manager->drops) || (manager->drops_begun && !hl__library_closed());
}

/* A server may pass over what it has not read when a connection ends, as Redis does while it is
   paused (CLIENT PAUSE). So a worker repeats the releases that are not answered. */
static void releases_repeat(hl_manager *manager, bool waits) HL__REQUIRES(hl__manager_mutex) {
  if (!manager->ops->traits.drop_sends || hl__library_closed()) return;
  if (waits) hl__pool_releases_await(manager);
  hl__pool_sent_end(manager);
}

void hl__leases_close(hl_manager *manager, bool waits) {
  while (!leases_end(manager)) drops_give_back(manager, true);
  releases_repeat(manager, waits);
  if (waits) hl__leases_drops_await(manager, manager->drops_put, HL_FOREVER);
  while (!leases_end(manager)) /* leases granted meanwhile */
    drops_give_back(manager, true);
  releases_repeat(manager, false);
}
