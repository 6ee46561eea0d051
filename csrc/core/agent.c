/*
 * agent.c - see agent.h.
 *
 * There is one list of waits for the process, under a lock of fork.h. A forked child starts with an
 * empty list. This lock comes before the mutex of a manager.
 */
#include "agent.h"

#include "error.h"
#include "fork.h"
#include "layout.h"
#include "lease.h"
#include "mode.h"
#include "order.h"
#include "plan.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

struct hl_agent {
  unsigned references; /* the owner's, and one for each lock and wait in its books */
  hl__list held;
  uint64_t number; /* random; 0: no random numbers were available */
};

hl_agent *hl_agent_new(void) {
  hl_agent *agent = calloc(1, sizeof *agent);
  if (!agent) return NULL;
  agent->references = 1;
  if (getrandom(&agent->number, sizeof agent->number, 0) != (ssize_t)sizeof agent->number)
    agent->number = 0;
  hl__list_init(&agent->held);
  return agent;
}

/* The number differs in each forked child: the child's copies hold nothing. */
uint64_t hl__agent_number(const hl_agent *agent) {
  uint64_t process = hl__fork_identity();
  if (!agent || !agent->number || !process) return 0;
  return agent->number ^ process;
}

hl_agent *hl_agent_ref(hl_agent *agent) {
  if (agent) agent->references++;
  return agent;
}

void hl_agent_unref(hl_agent *agent) {
  if (agent && --agent->references == 0) free(agent);
}

void hl__agent_keep(hl__held *held, hl_agent *agent) {
  if (!agent || held->agent) return;
  held->agent = hl_agent_ref(agent);
  hl__list_add(&agent->held, &held->node);
}

void hl__agent_forget(hl__held *held) {
  hl_agent *agent = held->agent;
  if (!agent) return;
  hl__list_remove(&held->node);
  held->agent = NULL;
  hl_agent_unref(agent);
}

/* -------------------------------------------------------------- all waits */

static atomic_uint lock_word;
static hl__list waits;
static unsigned waits_generation; /* of the list; 0: never initialised */
static unsigned marks;

static void books_lock(void) {
  unsigned mine = hl__fork_lock(&lock_word);
  if (waits_generation == mine) return;
  waits_generation = mine;
  hl__list_init(&waits); /* its entries are the parent's */
}

static void books_unlock(void) { hl__fork_unlock(&lock_word); }

/* ------------------------------------------------------------ in the way */

static bool same(const char *a, const char *b) { return a == b || (a && b && strcmp(a, b) == 0); }

/* Whether the two managers lock rows of the same space, as far as their DSNs tell. False if in
   doubt. */
static bool same_space(const hl_manager *a, const hl_manager *b) {
  const hl_dsn *x = &a->dsn, *y = &b->dsn;
  if (a == b) return true;
  if (a->ops != b->ops || !same(x->host, y->host) || x->port != y->port ||
      !same(x->socket, y->socket) || !same(x->user, y->user) || !same(x->database, y->database) ||
      !same(x->path, y->path) || x->param_count != y->param_count)
    return false;
  for (unsigned i = 0; i < x->param_count; i++)
    if (!same(x->params[i].name, y->params[i].name) ||
        !same(x->params[i].value, y->params[i].value))
      return false;
  return hl__layout_is_same(a->layout, b->layout);
}

/* Both plans are in locking order. Named rows come last, and add no conflict. */
static bool plans_conflict(const hl_plan *a, const hl_plan *b) {
  size_t n, m, i = 0, j = 0;
  const hl_row *x = hl__plan_rows(a, &n), *y = hl__plan_rows(b, &m);
  while (i < n && j < m && x[i].level != HL_LEVEL_NAMED && y[j].level != HL_LEVEL_NAMED) {
    int order = hl__row_compare(&x[i], &y[j]);
    if (order < 0)
      i++;
    else if (order > 0)
      j++;
    else if (hl__modes_conflict(x[i++].mode, y[j++].mode))
      return true;
  }
  return false;
}

/* A lock that `holder`'s agent or strand holds and that conflicts with `wait`; NULL: none. */
static hl__held *in_the_way(const hl__wait *wait, const hl__wait *holder, bool mine) {
  hl_agent *agent = holder->agent;
  for (hl__list *node = agent->held.next; node != &agent->held; node = node->next) {
    hl__held *held = HL__LIST_ENTRY(node, hl__held, node);
    if (held == wait->own ||
        !(holder->blocks || (holder->strand && held->strand == holder->strand)) ||
        !same_space(held->manager, wait->manager) || !plans_conflict(*held->plan, wait->plan))
      continue;
    if (held->stands(held, wait->timeout, mine)) return held;
  }
  return NULL;
}

typedef struct circle {
  const hl__wait *start, *end; /* `end` waits for `last`, which the agent of `start` holds */
  const hl__held *last;
} circle;

/* Whether `start` is stuck behind itself, along other waits. Searches breadth first, so it finds
   the shortest circle. */
static bool find(hl__wait *start, circle *found) {
  hl__wait *last = start;
  start->queue = NULL;
  for (hl__wait *at = start; at; at = at->queue) {
    const hl__held *held = at == start ? NULL : in_the_way(at, start, false);
    if (held) {
      *found = (circle){start, at, held};
      return true;
    }
    for (hl__list *node = waits.next; node != &waits; node = node->next) {
      hl__wait *other = HL__LIST_ENTRY(node, hl__wait, node);
      /* The books of an agent that still runs in another thread cannot be read. */
      if (other->mark == marks || (!other->blocks && other->agent != start->agent) ||
          (other->over && other->over(other)))
        continue;
      held = in_the_way(at, other, false);
      if (!held) continue;
      other->mark = marks;
      other->from = at;
      other->obstacle = held;
      other->queue = NULL;
      last->queue = other;
      last = other;
    }
  }
  return false;
}

static const char *where(const char *said) {
  return said && *said ? said : "a place that is not known";
}

static int self_error(hl_error *error, const hl__wait *wait, const hl__held *held) {
  char wanted[128], path[128];
  (void)hl__error(error, HL_DEADLOCK,
                  "%s would be waited for in vain: %s is held by this %s itself, which "
                  "acquired it at %s and cannot release it while it waits",
                  hl_plan_describe(wait->plan, wanted, sizeof wanted),
                  hl_plan_describe(*held->plan, path, sizeof path),
                  wait->blocks ? "thread" : "coroutine", where(held->where));
  if (error) error->retryable = false; /* not while it holds that lock */
  return HL_DEADLOCK;
}

static int circle_error(hl_error *error, const circle *found) {
  char wanted[128], first[96], last[96];
  const hl__wait *next = found->end; /* `next` becomes the wait whose agent holds what `start` waits
                                        for */
  while (next->from != found->start) next = next->from;
  return hl__error(
      error, HL_DEADLOCK,
      "%s would be waited for in a circle: %s is held by another %s, which acquired it at %s and "
      "waits at %s; that ends only when this one releases %s, acquired at %s",
      hl_plan_describe(found->start->plan, wanted, sizeof wanted),
      hl_plan_describe(*next->obstacle->plan, first, sizeof first),
      next->blocks ? "thread" : "coroutine", where(next->obstacle->where), where(next->where),
      hl_plan_describe(*found->last->plan, last, sizeof last), where(found->last->where));
}

/* ----------------------------------------------------------------- leases */

#define LEASES_MAX 16

/* The leases on which a circle depends. Their agents may go on while the stores are asked. */
typedef struct leases {
  size_t n;
  hl__lease *all[LEASES_MAX];
} leases;

static void leases_end(leases *self) {
  while (self->n > 0) {
    hl__lease *lease = self->all[--self->n];
    hl_manager *manager = lease->manager;
    hl__lease_unref(lease);
    hl__manager_leave(manager);
  }
}

static bool lease_add(leases *self, const hl__held *held) {
  hl__lease *lease = held->lease(held);
  if (!lease) return true;
  if (self->n == LEASES_MAX) return false;
  atomic_fetch_add(&lease->references, 1u);
  atomic_fetch_add(&lease->manager->references, 1u);
  self->all[self->n++] = lease;
  return true;
}

/* False: there are more than LEASES_MAX. */
static bool leases_of(leases *self, const circle *found) {
  bool all = lease_add(self, found->last);
  for (const hl__wait *at = found->end; all && at != found->start; at = at->from)
    all = lease_add(self, at->obstacle);
  return all;
}

static bool leases_within(const leases *self, const leases *known) {
  for (size_t i = 0, j; i < self->n; i++) {
    for (j = 0; j < known->n && known->all[j] != self->all[i]; j++) {}
    if (j == known->n) return false;
  }
  return true;
}

/* Asks the stores whether the leases stand. False: a store did not answer for one of them. A lost
   lease no longer stands. */
static bool leases_ask(const leases *self) {
  for (size_t i = 0; i < self->n; i++) {
    int status = hl__lease_check(self->all[i], NULL);
    if (status != HL_OK && status != HL_ELOST && status != HL_ERELEASED) return false;
  }
  return true;
}

/* ---------------------------------------------------------------- waiting */

bool hl__wait_lasts(const hl_options *options, int64_t timeout) {
  return options->agent && timeout >= HL__CIRCLE_LEAST_MS;
}

bool hl__wait_counts(const hl_options *options, int64_t timeout) {
  return hl__wait_lasts(options, timeout) && !hl__list_empty(&options->agent->held);
}

bool hl__wait_is_vain(const hl__wait *wait) { return in_the_way(wait, wait, true) != NULL; }

/* Registers the wait, or refuses it. HL__AGAIN: undecided, as the wait closes a circle unless one
   of `these` leases was revoked. Then the caller asks their stores and calls again. known: the
   leases whose stores were asked. asks false: the stores cannot be asked, and such a circle counts
   as none. */
static int enter(hl__wait *wait, leases *these, bool asks, const leases *known, hl_error *error) {
  circle found;
  int status = HL_OK;
  books_lock();
  wait->mark = ++marks;
  if (find(wait, &found)) {
    bool all = leases_of(these, &found);
    bool sure = these->n == 0 || leases_within(these, known);
    if (all && asks)
      status = sure ? circle_error(error, &found) : HL__AGAIN;
    else if (all && these->n == 0)
      status = circle_error(error, &found);
  }
  if (status == HL_OK) {
    wait->agent->references++;
    hl__list_add(&waits, &wait->node);
  }
  books_unlock();
  if (status != HL__AGAIN) leases_end(these);
  return status;
}

int hl__wait_begin(hl__wait *wait, hl_error *error) {
  /* The agent's own thread asks, without the lock, as `stands` may ask the store. */
  hl_agent *agent = wait->agent;
  wait->agent = NULL;
  hl__wait probe = *wait;
  probe.agent = agent;
  const hl__held *held = in_the_way(&probe, &probe, true);
  if (held) return self_error(error, &probe, held);

  /* The leases of the last circle found. Their stores were asked. */
  leases known = {0};
  int status;
  wait->agent = agent;
  wait->generation = hl__fork_generation();
  for (bool asks = true;;) {
    leases these = {0};
    status = enter(wait, &these, asks, &known, error);
    leases_end(&known);
    if (status != HL__AGAIN) break;
    asks = leases_ask(&these);
    known = these;
  }
  if (status) wait->agent = NULL;
  return status;
}

void hl__wait_end(hl__wait *wait) {
  hl_agent *agent = wait->agent;
  if (!agent) return;
  if (wait->generation == hl__fork_generation()) {
    books_lock(); /* other threads read the wait until then */
    hl__list_remove(&wait->node);
    books_unlock();
  }
  wait->agent = NULL;
  hl_agent_unref(agent);
}

/* ----------------------------------------------------------------- orders */

static bool tries_once(const hl_manager *manager, const hl_options *options) {
  return options->timeout == 0 || (options->timeout < 0 && manager->config.timeout == 0);
}

/* False for a lock of a forked child's parent, and if a call under way may release the lock. */
static bool task_holds(hl__held *held, const hl_options *options) {
  return held->task == options->task && held->stands(held, 0, false);
}

/* The agent that asks. NULL: none was given, or another argument is missing; also for hl_options of
   an older program that end before `kinds`. */
static const hl_agent *checkable(const hl_manager *manager, const hl_plan *plan,
                                 const hl_options *options, const char *report) {
  const size_t least = offsetof(hl_options, kinds) + sizeof options->kinds;
  bool given = manager && plan && options && report && options->size >= least;
  return given ? options->agent : NULL;
}

bool hl_order_check(const hl_manager *manager, const hl_plan *plan, hl_options *options,
                    char report[HL_REPORT_SIZE]) {
  const hl_agent *agent = checkable(manager, plan, options, report);
  bool found = false;
  if (!agent) return false;
  options->kinds = hl__order_kinds(manager->units, plan, options->label, options->label_size);
  if (tries_once(manager, options)) return false;
  const hl__order_step taken = {plan, options->kinds, options->where};
  for (hl__list *node = agent->held.next; node != &agent->held && !found; node = node->next) {
    hl__held *held = HL__LIST_ENTRY(node, hl__held, node);
    const hl__order_step before = {*held->plan, held->kinds, held->where};
    if (held->kinds && task_holds(held, options))
      found = hl__order_learn(&before, &taken, report, HL_REPORT_SIZE);
  }
  return found;
}

bool hl_units_check(const hl_manager *manager, const hl_plan *plan, const hl_options *options,
                    bool *first, char report[HL_REPORT_SIZE]) {
  const hl_agent *agent = checkable(manager, plan, options, report);
  bool broken = false;
  if (first) *first = false;
  if (!agent || !first || !manager->units || tries_once(manager, options)) return false;
  const hl__order_step taken = {plan, 0, options->where};
  for (hl__list *node = agent->held.next; node != &agent->held && !broken; node = node->next) {
    hl__held *held = HL__LIST_ENTRY(node, hl__held, node);
    const hl__order_step before = {*held->plan, 0, held->where};
    if (held->manager->units && task_holds(held, options))
      broken = hl__order_units(manager->units, &before, &taken, first, report, HL_REPORT_SIZE);
  }
  return broken;
}
