/*
 * line.c - who of this process may wait at the store, and who waits here; see
 * line.h for the rule. Knows no thread and no session.
 */
#include "line.h"

#include "internal.h"
#include "pending.h"
#include "plan.h"

#include <time.h>

/* ------------------------------------------------------------- the rule */

static int row_compare(const hl_row *a, const hl_row *b) {
  if (a->level != b->level) return a->level < b->level ? -1 : 1;
  if (a->bucket != b->bucket) return a->bucket < b->bucket ? -1 : 1;
  return 0;
}

/* Whether a request for plan stands behind the earlier waiter. */
static bool follows(const hl_plan *plan, const hl__waiter *earlier)
    HL__REQUIRES(hl__manager_mutex) {
  size_t n, earlier_n, i = 0;
  const hl_row *rows = hl__plan_rows(plan, &n);
  const hl_row *others = hl__plan_rows(earlier->plan, &earlier_n);
  for (size_t j = 0; j < earlier_n; j++) {
    while (i < n && row_compare(&rows[i], &others[j]) < 0) i++;
    if (i == n || row_compare(&rows[i], &others[j]) != 0) return false;
    if (hl__modes_conflict((hl_mode)rows[i].mode, (hl_mode)others[j].mode))
      return true;
  }
  return earlier->place != HL__BEHIND;
}

/* The nearest of those before `from` (it included) whom a request follows. When
   that one goes, the next nearest is looked for: so it follows them all. */
static hl__waiter *find_behind(const hl_plan *plan, hl__waiter *from)
    HL__REQUIRES(hl__manager_mutex) {
  while (from && !follows(plan, from)) from = from->previous;
  return from;
}

/* ----------------------------------------------------------- the line */

/* Nobody is before it any more. A thread goes by itself; a pending is sent when
   there is room. */
static void let_go(hl_manager *manager, hl__waiter *waiter)
    HL__REQUIRES(hl__manager_mutex) {
  if (waiter->pending) {
    waiter->place = HL__READY;
    manager->ready++;
  } else {
    waiter->place = HL__AT_STORE;
    if (waiter->turn) (void)pthread_cond_signal(waiter->turn);
  }
}

void hl__line_join(hl_manager *manager, hl__waiter *waiter) {
  waiter->place = HL__BEHIND;
  waiter->behind = find_behind(waiter->plan, manager->last);
  waiter->turn = NULL;
  waiter->next = NULL;
  waiter->previous = manager->last;
  if (manager->last)
    manager->last->next = waiter;
  else
    manager->first = waiter;
  manager->last = waiter;
  if (!waiter->behind) let_go(manager, waiter);
}

/* Whether they would be granted together. */
static bool share(const hl__waiter *a, const hl__waiter *b) {
  size_t n, m, i = 0, j = 0;
  const hl_row *rows = hl__plan_rows(a->plan, &n);
  const hl_row *others = hl__plan_rows(b->plan, &m);
  while (i < n && j < m) {
    int order = row_compare(&rows[i], &others[j]);
    if (order == 0 && hl__modes_conflict((hl_mode)rows[i].mode,
                                         (hl_mode)others[j].mode))
      return false;
    if (order <= 0) i++;
    if (order >= 0) j++;
  }
  return true;
}

void hl__line_leave(hl_manager *manager, hl__waiter *waiter, bool granted) {
  hl__waiter *after = waiter->next;
  if (waiter->place == HL__READY) manager->ready--;
  if (after)
    after->previous = waiter->previous;
  else
    manager->last = waiter->previous;
  if (waiter->previous)
    waiter->previous->next = after;
  else
    manager->first = after;

  /* In order, so that of a crowd that will share, and now has nobody before it, the
     first goes alone. When he is granted, all the others go: whom they follow is
     settled for all of them before any is on its way. */
  for (hl__waiter *other = after; other; other = other->next) {
    if (other->place != HL__BEHIND || other->behind != waiter) continue;
    other->behind = find_behind(other->plan, other->previous);
    if (!other->behind && !(granted && share(waiter, other)))
      let_go(manager, other);
  }
  for (hl__waiter *other = after; other; other = other->next)
    if (other->place == HL__BEHIND && !other->behind) let_go(manager, other);
  hl__line_advance(manager);
}

int hl__line_wait(hl_manager *manager, hl__waiter *waiter) {
  if (waiter->place == HL__AT_STORE) return HL_OK;
  pthread_cond_t turn;
  pthread_condattr_t monotonic;
  (void)pthread_condattr_init(&monotonic);
  (void)pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  (void)pthread_cond_init(&turn, &monotonic);
  (void)pthread_condattr_destroy(&monotonic);
  waiter->turn = &turn;
  int status = HL_OK;
  while (waiter->place != HL__AT_STORE && status == HL_OK) {
    if (manager->closed)
      status = HL_CANCELLED;
    else if (hl__left_ms(waiter->deadline) == 0)
      status = HL_TIMEOUT;
    else
      hl__cond_wait(&turn, &manager->mutex, waiter->deadline);
  }
  waiter->turn = NULL;
  (void)pthread_cond_destroy(&turn);
  return status;
}

void hl__line_advance(hl_manager *manager) {
  hl__waiter *waiter = manager->first;
  while (waiter && manager->ready && !manager->closed &&
         hl__pool_has_room(manager)) {
    if (waiter->place != HL__READY) {
      waiter = waiter->next;
      continue;
    }
    waiter->place = HL__AT_STORE;
    manager->ready--;
    hl__pending_send(waiter->pending);
    waiter = manager->first; /* where no thread can be had, the line changes */
  }
}

int64_t hl__line_expire(hl_manager *manager, int64_t now) {
  int64_t next = HL_FOREVER;
  hl__waiter *waiter = manager->first;
  while (waiter) {
    if (!waiter->pending || waiter->place == HL__AT_STORE) {
      waiter = waiter->next;
    } else if (waiter->deadline <= now) {
      hl__pending_expire(waiter->pending);
      waiter = manager->first; /* the line has changed */
    } else {
      if (waiter->deadline < next) next = waiter->deadline;
      waiter = waiter->next;
    }
  }
  return next;
}

void hl__line_close(hl_manager *manager) {
  hl__waiter *waiter = manager->first, *next;
  for (; waiter; waiter = next) {
    next = waiter->next; /* nobody goes to the store of a closed manager */
    if (waiter->pending)
      hl__pending_close(waiter->pending);
    else if (waiter->turn)
      (void)pthread_cond_signal(waiter->turn);
  }
}

bool hl__line_would_follow(hl_manager *manager, const hl_plan *plan) {
  return find_behind(plan, manager->last) != NULL;
}
