/*
 * pool.c - the sessions of a manager, reused. A session whose release is still
 * on its way lies in the pool, too: the next acquisition takes one whose
 * answer has come, so that it need not wait for it.
 */
#include "internal.h"
#include "pending.h"

#include <errno.h>
#include <stdlib.h>

/* A program that acquires and releases in turn never waits for an answer when
   it has two sessions. With more, it would only keep connections busy. */
#define POOL_PAIR 2

/* How long to wait for a connection beyond the time that is left, so that a
   try (timeout 0) can still connect. */
#define CONNECT_AT_LEAST_MS 1000

static void all_insert(hl_manager *manager, hl__slot *slot)
    HL__REQUIRES(hl__manager_mutex) {
  slot->next = manager->slots;
  slot->previous = NULL;
  if (manager->slots) manager->slots->previous = slot;
  manager->slots = slot;
  manager->slot_count++;
}

static void all_remove(hl_manager *manager, hl__slot *slot)
    HL__REQUIRES(hl__manager_mutex) {
  if (slot->previous)
    slot->previous->next = slot->next;
  else
    manager->slots = slot->next;
  if (slot->next) slot->next->previous = slot->previous;
  manager->slot_count--;
}

static void idle_insert(hl_manager *manager, hl__slot *slot)
    HL__REQUIRES(hl__manager_mutex) {
  slot->newer = NULL;
  slot->older = manager->newest;
  if (manager->newest)
    manager->newest->newer = slot;
  else
    manager->oldest = slot;
  manager->newest = slot;
  manager->idle_count++;
}

static void idle_remove(hl_manager *manager, hl__slot *slot)
    HL__REQUIRES(hl__manager_mutex) {
  if (slot->newer)
    slot->newer->older = slot->older;
  else
    manager->newest = slot->older;
  if (slot->older)
    slot->older->newer = slot->newer;
  else
    manager->oldest = slot->newer;
  slot->newer = slot->older = NULL;
  manager->idle_count--;
}

void hl__pool_idle(hl_manager *manager, hl__slot *slot) {
  slot->state = HL__IDLE;
  slot->idle_since = hl__now_ms();
  slot->asked = 0;
  idle_insert(manager, slot);
  (void)pthread_cond_signal(&manager->freed);
  hl__line_advance(manager);
}

void hl__pool_unlink(hl_manager *manager, hl__slot *slot) {
  if (slot->state == HL__IDLE) idle_remove(manager, slot);
  all_remove(manager, slot);
  (void)pthread_cond_signal(&manager->freed);
  hl__line_advance(manager);
}

bool hl__pool_has_room(const hl_manager *manager) {
  return !manager->ops->connects ||
         manager->slot_count - manager->idle_count + manager->reserved <
             manager->pool_size;
}

int hl__pool_busy_error(const hl_manager *manager, hl_error *error) {
  return hl__error(error, HL_BUSY,
                   "all %u connections of the pool are in use; wait longer, or "
                   "raise pool_size",
                   manager->pool_size);
}

void hl__pool_bury(hl_manager *manager, hl__slot *slot, hl__slot **dead) {
  hl__pool_unlink(manager, slot);
  slot->next = *dead;
  *dead = slot;
}

/* Of a slot in no list of the manager's. */
static void slot_free(hl_manager *manager, hl__slot *slot) {
  if (slot->session) manager->ops->session_close(slot->session);
  (void)pthread_mutex_destroy(&slot->mutex);
  free(slot);
}

/* Unchecked: nobody else has the list. */
HL__UNCHECKED void hl__pool_free(hl_manager *manager, hl__slot *dead) {
  while (dead) {
    hl__slot *next = dead->next;
    slot_free(manager, dead);
    dead = next;
  }
}

void hl__pool_put(hl_manager *manager, hl__slot *slot) {
  hl__manager_lock(manager);
  bool keep = !manager->closed && !slot->overrun;
  if (keep)
    hl__pool_idle(manager, slot);
  else
    hl__pool_unlink(manager, slot);
  hl__manager_unlock(manager);
  if (!keep) slot_free(manager, slot);
}

void hl__pool_discard(hl_manager *manager, hl__slot *slot) {
  hl__manager_lock(manager);
  hl__pool_unlink(manager, slot);
  hl__manager_unlock(manager);
  slot_free(manager, slot);
}

int hl__pool_settle(hl_manager *manager, hl__slot *slot) {
  int status = manager->ops->settle(slot->session, 0, NULL);
  if (status == HL_OK) {
    if (slot->asked) slot->answered = slot->asked;
    slot->asked = 0;
  } else if (status == HL_TIMEOUT) {
    int64_t age = slot->asked ? hl__lease_ms() - slot->asked
                              : hl__now_ms() - slot->idle_since;
    if (age > HL__ANSWER_MS) status = HL_ECONNECTION;
  }
  return status;
}

/* Whether the slot can be used at once. One that is still waiting for an answer
   becomes *pending; one that has ended is moved to *dead. */
static bool idle_try(hl_manager *manager, hl__slot *slot, hl__slot **pending,
                     hl__slot **dead) HL__REQUIRES(hl__manager_mutex) {
  int status = hl__pool_settle(manager, slot);
  if (status == HL_OK && manager->ops->connects)
    status = manager->ops->look(slot->session, NULL);
  if (status == HL_OK) return true;
  if (status == HL_TIMEOUT) {
    *pending = slot;
  } else {
    hl__pool_bury(manager, slot, dead);
  }
  return false;
}

/* An idle slot whose answer has come, one of the newest: its statements are
   prepared and its memory is warm. The newest of all is tried after the next
   one: it has only just been released. NULL with *pending: all are still waiting
   for an answer. */
static hl__slot *idle_find(hl_manager *manager, hl__slot **pending,
                           hl__slot **dead) HL__REQUIRES(hl__manager_mutex) {
  hl__slot *newest = manager->newest;
  *pending = NULL;
  if (!newest) return NULL;
  hl__slot *slot = newest->older;
  hl__slot *rest = slot ? slot->older : NULL;
  if (slot && idle_try(manager, slot, pending, dead)) return slot;
  if (idle_try(manager, newest, pending, dead)) return newest;
  for (slot = rest; slot; slot = rest) {
    rest = slot->older;
    if (idle_try(manager, slot, pending, dead)) return slot;
  }
  return NULL;
}

/* A try must not be refused by a lock that this process has given back: it waits
   for the answers to the releases that have just been sent: a round trip, in all.
   It waits without the mutex; so meanwhile each slot is BUSY, and its own. */
#define RELEASES_MS 100

static hl__slot *releases_next(hl_manager *manager)
    HL__REQUIRES(hl__manager_mutex) {
  int64_t since = hl__now_ms() - RELEASES_MS;
  for (hl__slot *slot = manager->newest; slot; slot = slot->older)
    if (slot->idle_since > since &&
        hl__pool_settle(manager, slot) == HL_TIMEOUT)
      return slot;
  return NULL;
}

static void releases_await(hl_manager *manager, hl__slot **dead)
    HL__REQUIRES(hl__manager_mutex) {
  for (hl__slot *slot; (slot = releases_next(manager));) {
    int64_t end = slot->idle_since + RELEASES_MS;
    idle_remove(manager, slot);
    slot->state = HL__BUSY;
    slot->owner = pthread_self();
    slot->due = HL_FOREVER;
    manager->settling++;
    hl__manager_unlock(manager);
    int status = manager->ops->settle(slot->session, end, NULL);
    hl__manager_lock(manager);
    manager->settling--;
    if (manager->closed || (status != HL_OK && status != HL_TIMEOUT)) {
      hl__pool_bury(manager, slot, dead);
    } else {
      slot->state = HL__IDLE; /* for as long as before */
      idle_insert(manager, slot);
      hl__line_advance(manager);
    }
    (void)pthread_cond_broadcast(&manager->freed);
  }
}

/* Whether everything in use is held by this very thread, so that waiting for
   it would be waiting for ourselves. */
static bool all_ours(hl_manager *manager) HL__REQUIRES(hl__manager_mutex) {
  for (hl__slot *slot = manager->slots; slot; slot = slot->next)
    if (slot->state != HL__HELD ||
        !pthread_equal(slot->owner, pthread_self()))
      return false;
  return true;
}

static hl__slot *slot_new(hl_manager *manager)
    HL__REQUIRES(hl__manager_mutex) {
  hl__slot *slot = calloc(1, sizeof *slot);
  if (!slot) return NULL;
  (void)pthread_mutex_init(&slot->mutex, NULL);
  slot->state = HL__BUSY;
  slot->owner = pthread_self();
  slot->due = HL_FOREVER; /* the store bounds its own connecting */
  slot->fresh = true;
  all_insert(manager, slot);
  return slot;
}

static int slot_open(hl_manager *manager, hl__slot *slot, int64_t deadline,
                     hl_error *error) {
  int64_t least = hl__now_ms() + CONNECT_AT_LEAST_MS;
  int64_t sent = hl__lease_ms();
  hl_session *session = NULL;
  hl__leave_begin(1);
  hl__exit_check(1);
  int status = manager->ops->session_open(
      manager->store, deadline > least ? deadline : least, &session, error);
  hl__leave_end();
  hl__manager_lock(manager);
  slot->session = session;
  slot->answered = sent;
  hl__manager_unlock(manager);
  return status;
}

int hl__pool_take(hl_manager *manager, hl__take how, int64_t deadline,
                  bool try_once, hl_pending *for_pending, hl__slot **taken,
                  hl_error *error) {
  hl__slot *slot = NULL, *dead = NULL, *pending = NULL;
  int status = HL_OK;
  bool made = false;
  unsigned limit = !manager->ops->connects ? UINT32_MAX
                   : manager->pool_size + (how == HL__TAKE_EXTRA);

  hl__manager_lock(manager);
  for (;;) {
    if (manager->closed) {
      status = hl__error(error, HL_CANCELLED, "the manager was closed");
      break;
    }
    if (manager->ops->connects) {
      status = hl__keeper_start(manager, error);
      if (status) break;
    }
    if (try_once && how == HL__TAKE_ANY && manager->ops->connects)
      releases_await(manager, &dead);
    if (how != HL__TAKE_FRESH) slot = idle_find(manager, &pending, &dead);
    if (slot) break;
    /* A look rather waits for an answer than for a connection. */
    if (manager->slot_count < limit &&
        (!pending ||
         (manager->slot_count < POOL_PAIR && how != HL__TAKE_EXTRA))) {
      slot = slot_new(manager);
      made = slot != NULL;
      if (!made) status = hl__error_memory(error);
      break;
    }
    /* Nothing is free at once, but an answer must come soon. */
    slot = pending ? pending : manager->oldest;
    if (slot) break;
    bool ours = all_ours(manager);
    bool settling = manager->settling > 0;
    if (ours || (!settling && (try_once || hl__left_ms(deadline) == 0))) {
      status = !ours ? hl__pool_busy_error(manager, error)
                     : hl__error(error, HL_BUSY,
                                 "all %u connections of the pool hold locks of "
                                 "this thread; release some, or raise pool_size",
                                 manager->pool_size);
      break;
    }
    hl__wait_unlocked(&manager->freed, manager,
                      settling ? hl__now_ms() + RELEASES_MS : deadline);
  }
  if (slot && for_pending) hl__pending_unreserve(for_pending);
  hl_session *stale = NULL;
  if (slot && !made) {
    idle_remove(manager, slot);
    slot->state = HL__BUSY;
    slot->owner = pthread_self();
    slot->due = HL_FOREVER;
    slot->fresh = how == HL__TAKE_FRESH;
    if (slot->fresh) {
      /* The pool is full of sessions that may be as stale as the last one. */
      stale = slot->session;
      slot->session = NULL;
      made = true;
    }
  }
  hl__manager_unlock(manager);

  hl__pool_free(manager, dead);
  if (stale) manager->ops->session_close(stale);
  if (slot && made) {
    status = slot_open(manager, slot, deadline, error);
    if (status) {
      hl__pool_discard(manager, slot);
      slot = NULL;
    }
  }
  *taken = slot;
  return status;
}
