/*
 * line.c - decides which requests of this process may wait at the store, and which wait here; see
 * line.h for the rule. Knows no thread and no session.
 */
#include "manager.h"

#include "clock.h"
#include "mode.h"
#include "plan.h"

#include <stdlib.h>
#include <time.h>

/* When a waiter leaves, its followers search for another waiter to follow. SETTLE_SOME of them do
   so at once; the keeper does the rest, SETTLE_PIECE at a time. */
#define SETTLE_SOME 16
#define SETTLE_PIECE 256
/* The keeper ends EXPIRE_PIECE waiters at a time, then sleeps for GIVE_WAY_NS: a thread that takes
   a mutex again at once would starve the threads that wait for it. */
#define EXPIRE_PIECE 128
#define GIVE_WAY_NS 50000
/* So many go to the store in one piece, from a thread that is no keeper. */
#define GO_SOME 16
/* The pause before a thread is started again, after that failed. */
#define THREADS_AGAIN_MS 20
/* A request that is no member of a class searches it backwards for the last member that came before
   it. After BACK_MAX members it takes the first one. */
#define BACK_MAX 64

HL__UNCHECKED /* no field is read */
    static hl__waiter *
    waiter_of(hl__list *node) {
  return HL__LIST_ENTRY(node, hl__waiter, node);
}

/* ------------------------------------------------------------- deadlines */

static void heap_add(hl__line *line, hl__waiter *waiter) HL__REQUIRES(hl__manager_mutex) {
  if (waiter->timed.in || !waiter->ops || waiter->deadline == HL_FOREVER) return;
  waiter->timed.key = waiter->deadline;
  hl__heap_add(&line->soonest, &waiter->timed);
}

static void heap_remove(hl__line *line, hl__waiter *waiter) HL__REQUIRES(hl__manager_mutex) {
  hl__heap_remove(&line->soonest, &waiter->timed);
}

/* -------------------------------------------------------------- classes */

/* The kind of a class under a row is the mode in which its members take that row; or WHOLE: its
   members follow no request, take all their rows shared, and this row is the last. */
enum { WHOLE = 0 }; /* or an hl_mode */

/* Whether two requests that take the row like this can be granted together. */
static bool is_shareable(const hl_row *row) { return !hl__modes_conflict(row->mode, row->mode); }

static const hl_row *rows_of(const hl__waiter *waiter, size_t *n) {
  return hl__plan_rows(waiter->plan, n);
}

static const hl_row *last_row(const hl__member *member) {
  size_t n;
  return &rows_of(member->waiter, &n)[member->rows - 1];
}

static hl__member **head_of(hl__line *line, const hl_row *row) {
  uint32_t bucket = (uint32_t)(row->bucket ^ row->bucket >> 32);
  uint32_t hash = (bucket ^ (uint32_t)row->level << 28) * 2654435769u;
  return &line->heads[hash >> 20];
}
_Static_assert(HL__LINE_HEADS == 1u << 12, "12 bits of the hash");

static bool same_class(const hl__member *a, const hl__member *b) {
  size_t n;
  if (a->kind != b->kind || a->rows != b->rows) return false;
  const hl_row *rows = rows_of(a->waiter, &n), *others = rows_of(b->waiter, &n);
  for (size_t i = a->rows; i-- > 0;)
    if (hl__row_compare(&rows[i], &others[i]) != 0) return false;
  return true;
}

static void chain_add(hl__member **link, hl__member *head) {
  head->head = true;
  head->link = link;
  head->chain = *link;
  if (*link) (*link)->link = &head->chain;
  *link = head;
}

static void chain_remove(hl__member *head) {
  head->head = false;
  *head->link = head->chain;
  if (head->chain) head->chain->link = head->link;
}

/* Enters the member at the end of its class. Not under a row with too many classes: then no request
   finds it there. */
static void member_enter(hl__line *line, hl__member *member) {
  const hl_row *row = last_row(member);
  hl__member **link = head_of(line, row), *head = *link;
  unsigned seen = 0;
  for (; head && !same_class(head, member); head = head->chain)
    if (hl__row_compare(last_row(head), row) == 0 && ++seen == HL__LINE_CLASSES) return;
  if (head) {
    member->next = head;
    member->previous = head->previous;
    head->previous->next = member;
    head->previous = member;
  } else {
    member->next = member->previous = member;
    chain_add(link, member);
  }
}

static void member_remove(hl__member *member) {
  hl__member *next = member->next;
  if (member->head) {
    hl__member **link = member->link;
    chain_remove(member);
    if (next != member) chain_add(link, next);
  }
  next->previous = member->previous;
  member->previous->next = next;
  member->next = member->previous = NULL;
}

/* Whether the request, whose row i is the last row of the class, needs all rows of the class. If
   the class is WHOLE, whether it can share all of them, and waits where that class would. */
static bool has_rows(const hl_row *rows, size_t i, const hl__member *head) {
  size_t n;
  const hl_row *wanted = rows_of(head->waiter, &n);
  for (size_t j = head->rows; j-- > 0; i--) {
    /* Rows are in order, so row j of the class is at or below the place of row j + 1. */
    size_t low = j, high = i + 1;
    while (low < high) {
      size_t middle = low + (high - low) / 2;
      if (hl__row_compare(&rows[middle], &wanted[j]) < 0)
        low = middle + 1;
      else
        high = middle;
    }
    if (low > i || hl__row_compare(&rows[low], &wanted[j]) != 0) return false;
    if (head->kind == WHOLE && (!hl__mode_covers(rows[low].mode, wanted[j].mode) ||
                                hl__modes_conflict(rows[low].mode, wanted[j].mode)))
      return false;
    i = low;
  }
  return true;
}

/* The last member of the class that came before the request. The request follows the class by its
   row i. NULL: all came later. */
static hl__member *last_before(hl__member *head, uint64_t arrival, const hl__waiter *waiter,
                               size_t i) HL__REQUIRES(hl__manager_mutex) {
  hl__member *member = head->previous;
  if (member->waiter->arrival < arrival) return member;
  if (head->waiter->arrival >= arrival) return NULL;
  if (waiter && head->rows == i + 1 && i < waiter->member_count && waiter->members[i].next &&
      same_class(&waiter->members[i], head))
    return waiter->members[i].previous;
  for (int back = 0; back < BACK_MAX; back++) {
    member = member->previous;
    if (member->waiter->arrival < arrival) return member;
  }
  return head;
}

/* The member that a request with that arrival follows; of several, the last to come. NULL: none.
   waiter: the request, or NULL if it is not in line yet. conflicts: consider only members that
   conflict with it. */
static hl__member *find(hl__line *line, const hl_plan *plan, uint64_t arrival,
                        const hl__waiter *waiter, bool conflicts) HL__REQUIRES(hl__manager_mutex) {
  size_t n;
  const hl_row *rows = hl__plan_rows(plan, &n);
  hl__member *nearest = NULL;
  for (size_t i = 0; i < n; i++) {
    unsigned seen = 0;
    hl__member *head = *head_of(line, &rows[i]);
    for (; head && seen < HL__LINE_CLASSES; head = head->chain) {
      if (hl__row_compare(last_row(head), &rows[i]) != 0) continue;
      seen++;
      if (head->kind == WHOLE ? conflicts : !hl__modes_conflict(rows[i].mode, head->kind)) continue;
      if (!has_rows(rows, i, head)) continue;
      hl__member *member = head->kind == WHOLE ? head : last_before(head, arrival, waiter, i);
      if (member && (!nearest || member->waiter->arrival > nearest->waiter->arrival))
        nearest = member;
    }
  }
  return nearest;
}

/* Enters a newcomer into its classes, except WHOLE. Without memory for all, into the first ones. */
static void classes_enter(hl__line *line, hl__waiter *waiter) HL__REQUIRES(hl__manager_mutex) {
  size_t n, count = 0;
  const hl_row *rows = rows_of(waiter, &n);
  while (count < n && count < HL__LINE_DEPTH && (count == 0 || is_shareable(&rows[count - 1])))
    count++;
  waiter->shares = true;
  for (size_t i = 0; i < n && waiter->shares; i++) waiter->shares = is_shareable(&rows[i]);
  size_t all = count + waiter->shares;
  waiter->members = waiter->inside;
  if (all > HL__MEMBERS_INSIDE) waiter->members = malloc(all * sizeof *waiter->members);
  if (!waiter->members) {
    waiter->members = waiter->inside;
    all = count = HL__MEMBERS_INSIDE;
    waiter->shares = false;
  }
  waiter->member_count = (unsigned)all;
  for (size_t i = 0; i < all; i++) {
    hl__member *member = &waiter->members[i];
    *member = (hl__member){
        .waiter = waiter, .rows = i < count ? i + 1 : n, .kind = i < count ? rows[i].mode : WHOLE};
    hl__list_init(&member->followers);
    if (i < count) member_enter(line, member);
  }
}

void hl__line_forget(hl__waiter *waiter) HL__UNCHECKED {
  if (waiter->members != waiter->inside) free(waiter->members);
  waiter->members = NULL;
}

/* ----------------------------------------------------------- the line */

/* The waiter follows no request any more. A thread goes to the store by itself; a pending is sent
   when there is room. */
static void let_go(hl__line *line, hl__waiter *waiter) HL__REQUIRES(hl__manager_mutex) {
  if (waiter->shares) member_enter(line, &waiter->members[waiter->member_count - 1]);
  if (waiter->ops) {
    waiter->place = HL__READY;
    hl__list_add(&line->ready, &waiter->node);
  } else {
    waiter->place = HL__AT_STORE;
    if (waiter->turn) (void)pthread_cond_signal(waiter->turn);
  }
}

/* Puts the waiter behind the member; NULL: lets it go. */
static void stand(hl__line *line, hl__waiter *waiter, hl__member *behind)
    HL__REQUIRES(hl__manager_mutex) {
  if (behind) {
    waiter->place = HL__BEHIND;
    hl__list_add(&behind->followers, &waiter->node);
  } else {
    let_go(line, waiter);
  }
}

/* Finds for each loose waiter, up to `most`, the waiter that it follows now. */
static void settle(hl__line *line, unsigned most) HL__REQUIRES(hl__manager_mutex) {
  for (; most > 0; most--) {
    bool together = !hl__list_empty(&line->together);
    hl__list *list = together ? &line->together : &line->loose;
    if (hl__list_empty(list)) return;
    hl__waiter *waiter = waiter_of(list->next);
    hl__list_remove(&waiter->node);
    stand(line, waiter, find(line, waiter->plan, waiter->arrival, waiter, together));
  }
}

static bool has_loose(const hl__line *line) {
  return !hl__list_empty(&line->together) || !hl__list_empty(&line->loose);
}

void hl__line_join(hl_manager *manager, hl__waiter *waiter) {
  hl__line *line = &manager->line;
  waiter->turn = NULL;
  waiter->timed.in = false;
  waiter->arrival = ++line->arrivals;
  hl__list_init(&waiter->node);
  hl__member *behind = find(line, waiter->plan, waiter->arrival, NULL, false);
  classes_enter(line, waiter);
  hl__list_add(&line->all, &waiter->all);
  heap_add(line, waiter);
  stand(line, waiter, behind);
}

/* The last member of a WHOLE leaves without a grant. A follower takes its place if it
   follows no other request. */
static void succeed(hl__line *line, hl__member *gone) HL__REQUIRES(hl__manager_mutex) {
  for (int i = 0; i < SETTLE_SOME && !hl__list_empty(&gone->followers); i++) {
    hl__waiter *waiter = waiter_of(gone->followers.next);
    hl__list_remove(&waiter->node);
    stand(line, waiter, find(line, waiter->plan, waiter->arrival, waiter, false));
    if (waiter->place == HL__BEHIND) continue;
    hl__member *whole = &waiter->members[waiter->member_count - 1];
    if (waiter->shares && whole->next && same_class(whole, gone))
      hl__list_move(&whole->followers, &gone->followers);
    break;
  }
  hl__list_move(&line->loose, &gone->followers);
}

/* The member's followers now follow the member before it, which they followed as well. Without
   one, they search for another. */
static void member_leave(hl__line *line, hl__member *member, bool granted)
    HL__REQUIRES(hl__manager_mutex) {
  hl__member *before = member->previous;
  bool head = member->head;
  member_remove(member);
  if (member->kind != WHOLE)
    hl__list_move(head ? &line->loose : &before->followers, &member->followers);
  else if (granted)
    hl__list_move(&line->together, &member->followers);
  else if (before != member)
    hl__list_move(&before->followers, &member->followers);
  else
    succeed(line, member);
}

void hl__line_leave(hl_manager *manager, hl__waiter *waiter, bool granted) {
  hl__line *line = &manager->line;
  hl__list_remove(&waiter->all);
  heap_remove(line, waiter);
  hl__list_remove(&waiter->node);
  for (unsigned i = 0; i < waiter->member_count; i++)
    if (waiter->members[i].next) member_leave(line, &waiter->members[i], granted);
  waiter->member_count = 0;
  hl__line_forget(waiter);
  hl__line_advance(manager);
}

int hl__line_wait(hl_manager *manager, hl__waiter *waiter) {
  if (waiter->place == HL__AT_STORE) return HL_OK;
  pthread_cond_t turn;
  hl__cond_init(&turn);
  waiter->turn = &turn;
  int status = HL_OK;
  while (waiter->place != HL__AT_STORE && status == HL_OK) {
    if (manager->cancelled)
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

/* -------------------------------------------------------- to the store */

/* The waiter that goes next; NULL: none may. Model: line.pml, advance. */
static hl__waiter *next_to_go(hl_manager *manager) HL__REQUIRES(hl__manager_mutex) {
  const hl__line *line = &manager->line;
  if (manager->closed || hl__list_empty(&line->ready) || !hl__pool_has_room(manager)) return NULL;
  return waiter_of(line->ready.next);
}

/* False: no thread can be started now. */
static bool send(hl_manager *manager, hl__waiter *waiter) HL__REQUIRES(hl__manager_mutex) {
  hl__line *line = &manager->line;
  hl__list_remove(&waiter->node);
  heap_remove(line, waiter);
  waiter->place = HL__AT_STORE;
  if (waiter->ops->send(waiter)) return true;
  waiter->place = HL__READY;
  hl__list_add(line->ready.next, &waiter->node); /* the first again */
  heap_add(line, waiter);
  line->short_of_threads = true;
  hl__manager_hurry(manager, hl__now_ms() + THREADS_AGAIN_MS);
  return false;
}

/* Whether waiters may go that no thread is about to send. */
static bool has_idle(hl_manager *manager) HL__REQUIRES(hl__manager_mutex) {
  return manager->line.going == 0 && !manager->line.short_of_threads && next_to_go(manager);
}

static void advance(hl_manager *manager, unsigned most) HL__REQUIRES(hl__manager_mutex) {
  hl__line *line = &manager->line;
  if (manager->closed) return;
  settle(line, most);
  if (has_loose(line)) hl__manager_hurry(manager, 0);
  if (manager->ops->start) {
    if (has_idle(manager)) hl__manager_hurry(manager, 0);
    return;
  }
  hl__waiter *waiter;
  while ((waiter = next_to_go(manager)) && send(manager, waiter)) continue;
}

void hl__line_advance(hl_manager *manager) {
  /* Without a keeper only threads wait. */
  advance(manager, manager->keeper.runs ? SETTLE_SOME : UINT32_MAX);
}

static void go(hl_manager *manager, unsigned most) HL__REQUIRES(hl__manager_mutex) {
  hl__line *line = &manager->line;
  hl__waiter *waiter;
  if (!manager->ops->start) return;
  line->going++;
  for (; most > 0 && !line->short_of_threads && (waiter = next_to_go(manager)); most--)
    if (!send(manager, waiter)) break;
  line->going--;
  if (has_idle(manager)) hl__manager_hurry(manager, 0);
}

void hl__line_go(hl_manager *manager) { go(manager, GO_SOME); }

/* ---------------------------------------------------------- the keeper's */

/* Ends waiters whose time is up. True: there are more. */
static bool expire(hl_manager *manager, int64_t now) HL__REQUIRES(hl__manager_mutex) {
  hl__line *line = &manager->line;
  for (int i = 0; i < EXPIRE_PIECE; i++) {
    if (!line->soonest || line->soonest->key > now) return false;
    hl__waiter *waiter = HL__LIST_ENTRY(line->soonest, hl__waiter, timed);
    heap_remove(line, waiter);
    waiter->ops->expire(waiter);
  }
  return true;
}

/* Does one piece. Returns when to call it next; 0: at once. */
static int64_t keep(hl_manager *manager) HL__REQUIRES(hl__manager_mutex) {
  hl__line *line = &manager->line;
  int64_t now = hl__now_ms(), next = HL_FOREVER;
  if (manager->closed) return HL_FOREVER;
  bool more = expire(manager, now);
  line->short_of_threads = false;
  advance(manager, SETTLE_PIECE);
  go(manager, SETTLE_PIECE);
  if (more || has_loose(line) || has_idle(manager)) return 0;
  if (line->soonest) next = line->soonest->key;
  if (line->short_of_threads && now + THREADS_AGAIN_MS < next) next = now + THREADS_AGAIN_MS;
  return next;
}

/* Unchecked: clang cannot see that the keeper holds this very mutex. */
HL__UNCHECKED int64_t hl__line_keep(hl_manager *manager) {
  static const struct timespec way = {0, GIVE_WAY_NS};
  for (;;) {
    int64_t next = keep(manager);
    if (next > 0) return next;
    hl__manager_mutex_unlock(manager);
    (void)nanosleep(&way, NULL);
    hl__manager_mutex_lock(manager);
  }
}

void hl__line_close(hl_manager *manager) {
  hl__list *all = &manager->line.all, *next;
  for (hl__list *node = all->next; node != all; node = next) {
    hl__waiter *waiter = HL__LIST_ENTRY(node, hl__waiter, all);
    next = node->next; /* no waiter goes to the store of a closed manager */
    if (waiter->ops)
      waiter->ops->close(waiter);
    else if (waiter->turn)
      (void)pthread_cond_signal(waiter->turn);
  }
}

bool hl__line_would_follow(hl_manager *manager, const hl_plan *plan) {
  return find(&manager->line, plan, UINT64_MAX, NULL, false) != NULL;
}
