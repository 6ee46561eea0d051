/*
 * bell.c - the thread of a process that goes on with takes that were started, and do not block.
 *
 * A take that was started has an ear. Whoever grants its node writes the node into `rung` of the
 * slot, and rings the bell, a futex. The thread looks which of its ears that concerns. What is rung
 * is a hint: the claim says what is true. A take's deadline is in a heap. So a bell, a deadline and
 * a cancellation each cost a few steps, however many wait.
 *
 * Twice a second, while something waits, the thread looks whether the space is gone, and at its
 * ears, at 1,000 of them in turn: a lease that has come in the way ends, and nothing tells; a
 * grant's sender may have died or been stopped before it woke the thread. While nothing waits, the
 * thread sleeps.
 */
#include "embedded.h"

#include <errno.h>
#include <stdlib.h>

#define LOOK_NS INT64_C(500000000)
#define LOOK_MOST 1000u
#define HEADS 4096u

enum {
  AWAKE,
  ON_WORD, /* nothing waits; the thread's own word wakes it */
  ON_SLOT  /* the slot's bell wakes it */
};

typedef struct hl__shm_bell {
  pthread_t thread;
  pthread_mutex_t mutex;
  bool started HL__GUARDED_BY(hl__shm_bell_mutex);
  bool closing HL__GUARDED_BY(hl__shm_bell_mutex);  /* the space has no user any more */
  bool calls HL__GUARDED_BY(hl__shm_bell_mutex);    /* the thread has not come back from `done` */
  hl__list todo HL__GUARDED_BY(hl__shm_bell_mutex); /* ears */
  hl__a32 word;                                     /* a futex: how often it was called */
  hl__a32 sleeps;
  /* The thread's own. */
  bool orphaned; /* the space lost its last user during `done`: the thread ends it */
  bool watched;  /* the watch's thread watches for deaths */
  int64_t looked;
  uint32_t n;
  hl__list all;
  hl__heap *soonest;
  hl__shm_ear *heads[HEADS]; /* by node */
} hl__shm_bell;

HL__MUTEX_FUNCTIONS(hl__shm_bell, hl__shm_bell, mutex, hl__shm_bell_mutex)

HL__UNCHECKED int hl__shm_bell_new(hl__shm_space *space, hl_error *error) {
  hl__shm_bell *bell = calloc(1, sizeof *bell);
  if (!bell) return hl__error_memory(error);
  (void)pthread_mutex_init(&bell->mutex, NULL);
  hl__list_init(&bell->todo);
  hl__list_init(&bell->all);
  space->bell = bell;
  return HL_OK;
}

static hl__shm_slot *slot_of(hl__shm_space *space) { return &space->table->slot[space->me]; }

/* Wakes the thread. */
static void call(hl__shm_space *space) {
  hl__shm_bell *bell = space->bell;
  (void)atomic_fetch_add(&bell->word, 1);
  const uint32_t sleeps = atomic_load(&bell->sleeps);
  if (sleeps == ON_WORD) hl__futex_wake(&bell->word, 1);
  if (sleeps != ON_SLOT || atomic_load(&space->gone) != HL__SHM_HERE) return;
  hl__a32 *rung = &slot_of(space)->bell;
  (void)atomic_fetch_add(rung, 1);
  hl__futex_wake(rung, 1);
}

/* -------------------------------------------------------------- the ears */

static hl__shm_ear **chain_of(hl__shm_bell *bell, uint32_t node) {
  return &bell->heads[(node * 0x9E3779B9u >> 16) % HEADS];
}

static hl__shm_ear *ear_of(hl__shm_bell *bell, uint32_t node) {
  hl__shm_ear *ear = *chain_of(bell, node);
  while (ear && ear->chained != node) ear = ear->chain;
  return ear;
}

static void unchain(hl__shm_bell *bell, hl__shm_ear *ear) {
  if (!ear->chained) return;
  hl__shm_ear **link = chain_of(bell, ear->chained);
  while (*link != ear) link = &(*link)->chain;
  *link = ear->chain;
  ear->chained = 0;
}

/* The thread has come back from `done`. */
static void came_back(hl__shm_bell *bell) {
  hl__shm_bell_lock(bell);
  bell->calls = false;
  bell->orphaned = bell->closing;
  hl__shm_bell_unlock(bell);
}

static void run_ear(hl__shm_space *space, hl__shm_ear *ear) {
  hl__shm_bell *bell = space->bell;
  if (hl__list_empty(&ear->all)) {
    hl__list_add(&bell->all, &ear->all);
    bell->n++;
  }
  hl__heap_remove(&bell->soonest, &ear->timed);
  unchain(bell, ear);
  if (!ear->go(ear)) {
    came_back(bell);
    return;
  }
  if (ear->node) {
    hl__shm_ear **head = chain_of(bell, ear->node);
    ear->chained = ear->node;
    ear->chain = *head;
    *head = ear;
  }
  ear->timed.key = ear->until;
  if (ear->until != INT64_MAX) hl__heap_add(&bell->soonest, &ear->timed);
}

void hl__shm_bell_leave(hl__shm_session *session) {
  hl__shm_bell *bell = session->space->bell;
  hl__shm_ear *ear = session->ear;
  hl__shm_bell_lock(bell);
  hl__list_remove(&ear->todo);
  session->ear = NULL;
  bell->calls = true;
  hl__shm_bell_unlock(bell);
  hl__list_remove(&ear->all);
  bell->n--;
}

void hl__shm_bell_call(hl__shm_session *session) {
  hl__shm_space *space = session->space;
  hl__shm_bell_lock(space->bell);
  hl__shm_ear *ear = session->ear;
  if (ear && hl__list_empty(&ear->todo)) hl__list_add(&space->bell->todo, &ear->todo);
  if (ear) call(space);
  hl__shm_bell_unlock(space->bell);
}

/* ------------------------------------------------------------ the thread */

static hl__shm_ear *todo_next(hl__shm_bell *bell) {
  hl__shm_ear *ear = NULL;
  hl__shm_bell_lock(bell);
  if (!hl__list_empty(&bell->todo)) {
    ear = HL__LIST_ENTRY(bell->todo.next, hl__shm_ear, todo);
    hl__list_remove(&ear->todo);
  }
  hl__shm_bell_unlock(bell);
  return ear;
}

/* The next `n` ears, in turn; granted: only those that were. */
static void some_run(hl__shm_space *space, uint32_t n, bool granted) {
  hl__shm_bell *bell = space->bell;
  for (; n > 0 && !hl__list_empty(&bell->all); n--) {
    hl__list *first = bell->all.next;
    hl__shm_ear *ear = HL__LIST_ENTRY(first, hl__shm_ear, all);
    const hl__shm_node *node = hl__shm_node_at(space, ear->node);
    hl__list_remove(first);
    hl__list_add(&bell->all, first);
    if (!granted || !node || hl__shm_state_of(atomic_load(&node->claim)) != HL__WAIT)
      run_ear(space, ear);
  }
}

static void rung_run(hl__shm_space *space) {
  hl__shm_bell *bell = space->bell;
  hl__shm_slot *slot = slot_of(space);
  uint32_t rung[HL__SHM_RUNG];
  const uint32_t missed = atomic_exchange(&slot->missed, 0);
  for (uint32_t i = 0; i < HL__SHM_RUNG; i++)
    rung[i] = atomic_load(&slot->rung[i]) ? atomic_exchange(&slot->rung[i], 0) : 0;
  for (uint32_t i = 0; i < HL__SHM_RUNG; i++) {
    hl__shm_ear *ear = rung[i] ? ear_of(bell, rung[i]) : NULL;
    if (ear) run_ear(space, ear);
  }
  if (missed) some_run(space, bell->n, true);
}

/* Looks, if it is time. */
static void look(hl__shm_space *space, bool gone) {
  hl__shm_bell *bell = space->bell;
  const int64_t now = hl__shm_now();
  if (bell->n == 0) {
    if (bell->watched) (void)hl__shm_watch_bell(space, false);
    bell->watched = false;
    return;
  }
  if (gone) {
    some_run(space, bell->n, false);
    return;
  }
  if (!bell->watched || now - bell->looked >= LOOK_NS) {
    bell->watched = hl__shm_watch_bell(space, true);
    if (!bell->watched && !hl__shm_look(space)) hl__shm_sweep(space, false, now + HL__SHM_POLL_NS);
  }
  if (now - bell->looked < LOOK_NS) return;
  bell->looked = now;
  some_run(space, bell->n < LOOK_MOST ? bell->n : LOOK_MOST, false);
}

/* Sleeps until it is called or rung, or until there is something to do. */
static void sleep_until_called(hl__shm_space *space, uint32_t called, uint32_t rung, bool on_slot) {
  hl__shm_bell *bell = space->bell;
  hl__shm_slot *slot = slot_of(space);
  int64_t until = bell->n == 0    ? INT64_MAX
                  : bell->watched ? bell->looked + LOOK_NS
                                  : hl__shm_now() + HL__SHM_POLL_NS;
  if (bell->soonest && bell->soonest->key < until) until = bell->soonest->key;
  atomic_store(&bell->sleeps, on_slot ? ON_SLOT : ON_WORD);
  if (on_slot) atomic_store(&slot->asleep, 1);
  if (atomic_load(&bell->word) == called) {
    if (on_slot)
      hl__futex_wait(&slot->bell, rung, until);
    else
      hl__futex_wait(&bell->word, called, until);
  }
  atomic_store(&bell->sleeps, AWAKE);
  if (on_slot && atomic_load(&space->gone) == HL__SHM_HERE) atomic_store(&slot->asleep, 0);
}

static bool is_closing(hl__shm_bell *bell) {
  hl__shm_bell_lock(bell);
  bool closing = bell->closing;
  hl__shm_bell_unlock(bell);
  return closing;
}

static void *run(void *context) {
  hl__shm_space *space = context;
  hl__shm_bell *bell = space->bell;
  for (;;) {
    /* Before all that a call may be about, the closing too: a call behind this ends the sleep. */
    const uint32_t called = atomic_load(&bell->word);
    if (bell->orphaned || is_closing(bell)) break;
    const bool gone = atomic_load(&space->gone) != HL__SHM_HERE;
    const bool on_slot = bell->n > 0 && !gone;
    const uint32_t rung = on_slot ? atomic_load(&slot_of(space)->bell) : 0;
    for (hl__shm_ear *ear; !bell->orphaned && (ear = todo_next(bell));) run_ear(space, ear);
    if (on_slot) rung_run(space);
    /* One at a time: those that a stopped process keeps out of a partition may come again, each
       after a moment, sooner than all have had their turn. */
    if (bell->soonest && bell->soonest->key <= hl__shm_now())
      run_ear(space, HL__LIST_ENTRY(bell->soonest, hl__shm_ear, timed));
    look(space, gone);
    /* If the first one waits only now, its grant may have been rung already. */
    if (bell->orphaned || on_slot != (bell->n > 0 && !gone)) continue;
    sleep_until_called(space, called, rung, on_slot);
  }
  if (bell->orphaned) {
    (void)pthread_detach(pthread_self());
    space->end(space);
  }
  return NULL;
}

static int thread_start(hl__shm_space *space, hl_error *error) HL__REQUIRES(hl__shm_bell_mutex) {
  hl__shm_bell *bell = space->bell;
  errno = bell->started ? 0 : hl__thread_start(&bell->thread, 0, run, space);
  bell->started = errno == 0;
  return bell->started ? HL_OK : hl__error_errno(error, HL_BUSY, "cannot start a thread");
}

int hl__shm_bell_enter(hl__shm_session *session, hl__shm_ear *ear, hl_error *error) {
  hl__shm_space *space = session->space;
  hl__shm_bell *bell = space->bell;
  ear->session = session;
  ear->node = ear->chained = 0;
  ear->until = INT64_MAX;
  ear->timed.in = false;
  hl__list_init(&ear->todo);
  hl__list_init(&ear->all);
  hl__shm_bell_lock(bell);
  int status = thread_start(space, error);
  if (status == HL_OK) {
    session->ear = ear;
    hl__list_add(&bell->todo, &ear->todo);
    call(space); /* once the mutex is free, the space may be gone */
  }
  hl__shm_bell_unlock(bell);
  return status;
}

HL__UNCHECKED bool hl__shm_bell_stop(hl__shm_space *space) {
  hl__shm_bell *bell = space->bell;
  if (!bell) return true;
  hl__shm_bell_lock(bell);
  bell->closing = true;
  const bool joins = bell->started && !bell->orphaned, calls = bell->calls;
  hl__shm_bell_unlock(bell);
  /* It may want a mutex that the caller has. After this call of `done` there is no other. */
  if (calls) return false;
  if (joins) {
    call(space);
    (void)pthread_join(bell->thread, NULL);
  }
  return true;
}

HL__UNCHECKED void hl__shm_bell_free(hl__shm_space *space) {
  if (space->bell) (void)pthread_mutex_destroy(&space->bell->mutex);
  free(space->bell);
  space->bell = NULL;
}
