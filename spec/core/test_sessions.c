/*
 * test_sessions.c - what the core makes of a store whose sessions are connections:
 * how long a lock is believed, what the keeper does, and what happens to a session
 * between its calls. The store is a script of this program: it answers when it is told
 * to, so each moment can be met exactly, and no server is needed.
 */
#include "hierlock.h"
#include "clock.h"
#include "error.h"
#include "lock.h"
#include "manager.h"
#include "store.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "leftovers.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* ------------------------------------------------------------- the store */

/* The store's behaviour, and the calls that it has had. */
static struct {
  atomic_int age;        /* ms: as if what locks had been sent so much earlier, */
  atomic_int sign_age;   /* and a sign of life */
  atomic_bool silent;    /* no answer comes */
  atomic_bool ended;     /* the connections have ended */
  atomic_bool told;      /* bytes have come that are not read yet */
  atomic_bool blocked;   /* a lock is not granted: its wait ends in time */
  atomic_bool circle;    /* and the server ends its wait, with all that the session has */
  atomic_bool dawdles;   /* the other threads, before they take a mutex */
  atomic_bool hangs;     /* nor does its wait end in time */
  atomic_bool deaf;      /* and it hears of no interruption */
  atomic_int early;      /* ms after which a wait ends, though its time is not up */
  atomic_bool asks;      /* who holds is not said as long as this */
  atomic_bool ends;      /* the connection ends right behind the answer to a sign of life */
  atomic_int connect_ms; /* how long the last connecting may have taken */
  atomic_int stores;     /* opened in this process and its parent */
  atomic_int opened, closed, locks, unlocks, renewals, looks, interrupts, asked;
  atomic_int behind;   /* renewals that were sent behind a release */
  atomic_int slow;     /* the close with this number takes a while: */
  atomic_bool reached; /* it has begun, */
  atomic_bool closing; /* and is going on */
  atomic_bool cut;     /* the next question who holds finds that its connection has ended */
} store;

/* A hanging call gives up at last, so that the test comes to its end. */
#define HANGS_MS 6000
/* A client library may take so long to close a connection. */
#define SLOW_US 300000

typedef struct session {
  hl_session base;
  bool outstanding, released; /* the unanswered statement is a release */
  atomic_bool interrupted;
} session;

static int fake_open(const hl_store_config *config, hl_store **result, hl_error *error) {
  (void)error;
  *result = calloc(1, sizeof **result);
  assert_non_null(*result);
  (*result)->layout = hl_layout_ref(config->layout);
  atomic_fetch_add(&store.stores, 1);
  return HL_OK;
}

static void fake_close(hl_store *self) {
  hl_layout_unref(self->layout);
  free(self);
}

static int fake_session_open(hl_store *self, int64_t deadline, hl_session **result,
                             hl_error *error) {
  (void)error;
  session *made = calloc(1, sizeof *made);
  assert_non_null(made);
  store.connect_ms = (int)hl__left_ms(deadline);
  made->base.store = self;
  atomic_fetch_add(&store.opened, 1);
  *result = &made->base;
  return HL_OK;
}

static void fake_session_close(hl_session *self) {
  bool slow = atomic_fetch_add(&store.closed, 1) + 1 == store.slow;
  if (slow) store.closing = store.reached = true;
  if (slow) (void)usleep(SLOW_US);
  if (slow) store.closing = false;
  free(self);
}

static int fake_take(hl_session *base, const hl_request *request, hl_grant *grant,
                     hl_error *error) {
  session *self = (session *)(void *)base;
  int64_t begun = hl__now_ms(), sent = hl__boot_ms();
  atomic_fetch_add(&store.locks, 1);
  while (store.blocked || store.hangs) {
    int64_t now = hl__now_ms();
    if ((self->interrupted && !store.deaf) || now - begun > HANGS_MS)
      return hl__error(error, HL_ECONNECTION, "the connection has ended");
    if (store.circle) return hl__error(error, HL_DEADLOCK, "a deadlock");
    if (!store.hangs && (request->try_once || now > request->deadline ||
                         (store.early && now - begun >= store.early))) {
      grant->sent_ms = now; /* it has answered that */
      return hl__error(error, HL_TIMEOUT, "not granted in time");
    }
    (void)usleep(500);
  }
  grant->token = (uint64_t)store.locks << 8;
  grant->sent_ms = sent - store.age;
  return HL_OK;
}

static int fake_give_back(hl_session *base, hl_error *error) {
  session *self = (session *)(void *)base;
  if (self->outstanding && store.silent)
    return hl__error(error, HL_BUSY, "an earlier answer has not come");
  self->outstanding = self->released = true;
  atomic_fetch_add(&store.unlocks, 1);
  return HL_OK;
}

static int fake_renew(hl_session *base, int64_t *sent_ms, hl_error *error) {
  session *self = (session *)(void *)base;
  (void)error;
  *sent_ms = hl__boot_ms() - store.sign_age;
  if (self->released) atomic_fetch_add(&store.behind, 1);
  self->outstanding = true;
  atomic_fetch_add(&store.renewals, 1);
  return HL_OK;
}

static int fake_settle(hl_session *base, int64_t deadline, hl_error *error) {
  session *self = (session *)(void *)base;
  while (self->outstanding && store.silent) {
    if (hl__left_ms(deadline) == 0) return hl__error(error, HL_TIMEOUT, "no answer yet");
    (void)usleep(500);
  }
  self->outstanding = self->released = false;
  if (store.ends) store.ended = true;
  return HL_OK;
}

static int fake_check(hl_session *self, hl_error *error) {
  (void)self;
  atomic_fetch_add(&store.looks, 1);
  return store.ended ? hl__error(error, HL_ECONNECTION, "the connection has ended") : HL_OK;
}

static bool fake_told(hl_session *self) {
  (void)self;
  return store.told;
}

static void fake_interrupt(hl_session *self) {
  ((session *)(void *)self)->interrupted = true;
  atomic_fetch_add(&store.interrupts, 1);
}

static int fake_holders(hl_session *self, const hl_lease_filter *filter, hl_holder_fn fn,
                        void *context, int64_t deadline, hl_error *error) {
  (void)self, (void)filter;
  (void)fn, (void)context, (void)deadline;
  atomic_fetch_add(&store.asked, 1);
  if (atomic_exchange(&store.cut, false))
    return hl__error(error, HL_ECONNECTION, "the connection has ended");
  while (store.asks) (void)usleep(500);
  return HL_OK;
}

static int fake_parse(char *text, hl_dsn *dsn, hl_error *error) {
  return hl__dsn_url(text, hl__dsn_host, dsn, error);
}

static const hl_store_ops fake = {
    .abi = HL_STORE_ABI,
    .scheme = "mysql",
    .traits = {.scarce = true, .expires = true, .blocks = true, .updates = true},
    .parse = fake_parse,
    .open = fake_open,
    .close = fake_close,
    .session_open = fake_session_open,
    .session_close = fake_session_close,
    .take = fake_take,
    .give_back = fake_give_back,
    .renew = fake_renew,
    .settle = fake_settle,
    .check = fake_check,
    .told = fake_told,
    .interrupt = fake_interrupt,
    .holders = fake_holders,
};

/* --------------------------------------------------------------- helpers */

#define SOON_MS 10000 /* for what must happen on a busy machine */

static hl_manager *open_at(const char *dsn, int64_t hold_timeout, unsigned pool_size) {
  static const hl_store_ops *const stores[] = {&fake, NULL};
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager;
  memset(&store, 0, sizeof store);
  config.dsn = dsn;
  config.stores = stores;
  config.hold_timeout = hold_timeout;
  if (pool_size) config.pool_size = pool_size;
  assert_int_equal(hl_manager_open(&config, &manager, NULL), HL_OK);
  return manager;
}

static hl_manager *open_manager(int64_t hold_timeout, unsigned pool_size) {
  return open_at("mysql://nobody@nowhere/nothing", hold_timeout, pool_size);
}

static hl_plan *plan_of(hl_manager *manager, const char *user) {
  hl_id id = {user, strlen(user)};
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  assert_int_equal(hl_plan_add(plan, &id, 1, HL_EXCLUSIVE, false, NULL), HL_OK);
  return plan;
}

static int try_acquire(hl_manager *manager, const char *user, int64_t timeout, hl_lock **lock) {
  hl_options options = HL_OPTIONS_INIT;
  hl_plan *plan = plan_of(manager, user);
  options.timeout = timeout;
  int status = hl_acquire(manager, plan, &options, lock, NULL);
  hl_plan_free(plan);
  return status;
}

static hl_lock *acquire(hl_manager *manager, const char *user) {
  hl_lock *lock = NULL;
  assert_int_equal(try_acquire(manager, user, SOON_MS, &lock), HL_OK);
  return lock;
}

/* Waits until the counter has come to n; how long that took, in ms. */
static int64_t await(const atomic_int *counter, int n) {
  int64_t begun = hl__now_ms();
  while (*counter < n && hl__now_ms() - begun < SOON_MS) (void)usleep(500);
  assert_true(*counter >= n);
  return hl__now_ms() - begun;
}

/* Returns when the keeper has just looked at a lock that is held: it does so again in a second
   at the earliest. No other thread looks meanwhile. */
static void await_keeper(void) { (void)await(&store.looks, store.looks + 1); }

/* ------------------------------------------------- how long it is believed */

/* The store's time runs from some moment after the request was sent; that moment is unknown. So
   it is counted from the sending, however late the answer comes. */
static void a_lock_is_counted_from_the_sending(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  store.age = 25000;
  store.sign_age = 9000;
  store.silent = true;
  hl_lock *lock = acquire(manager, "u1");
  assert_in_range(hl_lock_remaining(lock), 1, 35000);
  /* A sign of life that the keeper has sent, and whose answer is read by a look. */
  (void)await(&store.renewals, 1);
  store.silent = false;
  assert_in_range(hl_lock_remaining(lock), 35001, 51000);
  /* A check that waits for its answer. */
  store.sign_age = 5000;
  assert_int_equal(hl_lock_check(lock, NULL), HL_OK);
  assert_in_range(hl_lock_remaining(lock), 51001, 55000);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

static void a_lock_is_lost_when_its_time_is_up(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  hl_stats stats;
  store.silent = true;
  store.age = 59990;
  hl_lock *lock = acquire(manager, "u1");
  (void)usleep(20000);
  assert_false(hl_lock_is_held(lock));
  assert_int_equal(hl_lock_remaining(lock), 0);
  assert_int_equal(hl_lock_release(lock, false, NULL), HL_ELOST);
  hl_lock_free(lock);
  hl_manager_stats(manager, &stats);
  assert_int_equal(stats.lost, 1);
  hl_manager_close(manager);
}

static void the_keeper_renews_what_is_held(void **state) {
  (void)state;
  hl_manager *manager = open_manager(1500, 0);
  hl_lock *lock = acquire(manager, "u1");
  int64_t end = hl__now_ms() + 2000;
  while (hl__now_ms() < end) {
    assert_true(hl_lock_is_held(lock));
    (void)usleep(20000);
  }
  assert_true(store.renewals >= 2);
  assert_int_equal(hl_lock_release(lock, true, NULL), HL_OK);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* While an extend waits, only the extend reads the server's messages. */
static void what_came_during_a_call_may_be_its_loss(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  hl_lock *lock = acquire(manager, "u1"), *none;
  hl_plan *plan = plan_of(manager, "u2");
  hl_pending *pending;
  store.blocked = true;
  assert_int_equal(hl_lock_start_extend(lock, plan, NULL, &pending, NULL), HL_OK);
  (void)await(&store.locks, 2);
  assert_true(hl_lock_is_held(lock));
  store.told = true;
  assert_false(hl_lock_is_held(lock));
  store.told = store.blocked = false;
  assert_int_equal(hl_pending_wait(pending, SOON_MS, &none, NULL), HL_OK);
  assert_true(hl_lock_is_held(lock));
  hl_pending_free(pending);
  hl_plan_free(plan);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* The store may have released the lock before the check is answered: a process may be stopped between the
   question and the answer. */
static void a_check_whose_answer_comes_too_late_is_lost(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  hl_lock *lock = acquire(manager, "u1");
  store.sign_age = 60000;
  assert_int_equal(hl_lock_check(lock, NULL), HL_ELOST);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* A message behind the answer to a check counts: the server says that it ends the connection,
   say. */
static void a_check_looks_once_more_behind_the_answer(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  hl_lock *lock = acquire(manager, "u1");
  store.ends = true;
  assert_int_equal(hl_lock_check(lock, NULL), HL_ELOST);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* The server has given everything back by then: others may have it before the extend is done. */
static void a_lock_that_a_deadlock_ended_is_believed_no_more(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  hl_lock *lock = acquire(manager, "u1"), *none;
  hl_plan *plan = plan_of(manager, "u2");
  hl_pending *pending;
  hl_stats stats;
  store.blocked = true;
  assert_int_equal(hl_lock_start_extend(lock, plan, NULL, &pending, NULL), HL_OK);
  (void)await(&store.locks, 2);
  assert_true(hl_lock_is_held(lock));
  store.dawdles = store.circle = true;
  do {
    (void)usleep(500);
    hl_manager_stats(manager, &stats);
  } while (stats.held > 0);
  assert_false(hl_lock_is_held(lock));
  store.dawdles = false;
  assert_int_equal(hl_pending_wait(pending, SOON_MS, &none, NULL), HL_DEADLOCK);
  assert_false(hl_lock_is_held(lock));
  assert_int_equal(hl_lock_release(lock, true, NULL), HL_OK);
  hl_pending_free(pending);
  hl_plan_free(plan);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* The extend has ended, and is not done: it asks who was in the way. */
static void a_lock_is_looked_at_while_holders_are_asked_for(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  hl_lock *lock = acquire(manager, "u1"), *none;
  hl_plan *plan = plan_of(manager, "u2");
  hl_options options = HL_OPTIONS_INIT;
  hl_pending *pending;
  options.timeout = 1;
  store.blocked = store.asks = true;
  assert_int_equal(hl_lock_start_extend(lock, plan, &options, &pending, NULL), HL_OK);
  (void)await(&store.asked, 1);
  assert_true(hl_lock_is_held(lock));
  assert_true(hl_lock_remaining(lock) > 0);
  store.ended = true;
  assert_false(hl_lock_is_held(lock));
  assert_int_equal(hl_lock_remaining(lock), 0);
  store.asks = false;
  assert_int_equal(hl_pending_wait(pending, SOON_MS, &none, NULL), HL_TIMEOUT);
  assert_false(hl_lock_is_held(lock));
  hl_pending_free(pending);
  hl_plan_free(plan);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* The sign of life was sent when the extend began, and its answer came before the extend's. */
static void a_sign_of_life_before_an_extend_is_not_awaited_after_it(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  hl_lock *lock = acquire(manager, "u1"), *none;
  hl_plan *plan = plan_of(manager, "u2");
  hl_pending *pending;
  store.blocked = true;
  assert_int_equal(hl_lock_start_extend(lock, plan, NULL, &pending, NULL), HL_OK);
  (void)await(&store.locks, 2);
  hl__manager_mutex_lock(manager);
  lock->hold.connection->asked = hl__boot_ms() - 60000;
  hl__manager_mutex_unlock(manager);
  store.blocked = false;
  assert_int_equal(hl_pending_wait(pending, SOON_MS, &none, NULL), HL_OK);
  assert_true(hl_lock_is_held(lock));
  hl_pending_free(pending);
  hl_plan_free(plan);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* Each answer to it, a refusal, too, says that the lock is kept. */
static void an_extend_in_vain_keeps_the_lock(void **state) {
  (void)state;
  hl_manager *manager = open_manager(1000, 0);
  hl_lock *lock = acquire(manager, "u1"), *none;
  hl_plan *plan = plan_of(manager, "u2");
  hl_options options = HL_OPTIONS_INIT;
  hl_pending *pending;
  options.timeout = 1500;
  store.blocked = true;
  assert_int_equal(hl_lock_start_extend(lock, plan, &options, &pending, NULL), HL_OK);
  assert_int_equal(hl_pending_wait(pending, SOON_MS, &none, NULL), HL_TIMEOUT);
  assert_true(hl_lock_is_held(lock));
  hl_pending_free(pending);
  hl_plan_free(plan);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* The store has it exclusive, and gives no single row back. */
static void an_upgrade_that_is_granted_though_it_was_cancelled_shows(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  const hl_id ids[] = {{"u1", 2}, {"a1", 2}, {"r1", 2}};
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  hl_lock *lock;
  hl_pending *pending;
  assert_int_equal(hl_plan_add(plan, ids, 3, HL_UPDATE, false, NULL), HL_OK);
  assert_int_equal(hl_acquire(manager, plan, NULL, &lock, NULL), HL_OK);
  uint64_t token = hl_lock_token(lock);
  store.hangs = store.deaf = true;
  assert_int_equal(hl_lock_start_upgrade(lock, NULL, &pending, NULL), HL_OK);
  (void)await(&store.locks, 2);
  hl_pending_cancel(pending);
  hl_pending_free(pending);
  store.hangs = false;
  while (hl_lock_look(lock) == HL_IN_USE) (void)usleep(500);
  assert_int_equal(hl_lock_mode(lock), HL_EXCLUSIVE);
  assert_true(hl_lock_token(lock) > token);
  assert_int_equal(hl_lock_downgrade(lock, NULL), HL_EUNSUPPORTED);
  hl_plan_free(plan);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

static unsigned reserved(hl_manager *manager) {
  hl__manager_mutex_lock(manager);
  unsigned n = manager->pool.reserved;
  hl__manager_mutex_unlock(manager);
  return n;
}

/* A thread may take the connection that was kept for a pending. When the pending is then
   given up, its worker waits no longer. */
static void a_call_that_is_given_up_waits_for_no_connection(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 1);
  hl_plan *plan = plan_of(manager, "u2"), *other = plan_of(manager, "u3");
  hl_options forever = HL_OPTIONS_INIT, once = HL_OPTIONS_INIT;
  int met = 0; /* its worker waits, most likely */
  int64_t end = hl__now_ms() + 3 * SOON_MS;
  forever.timeout = HL_FOREVER;
  once.timeout = 0;
  while (met < 5 && hl__left_ms(end) > 0) {
    hl_pending *pending;
    hl_lock *lock = NULL;
    assert_int_equal(hl_start(manager, plan, &forever, &pending, NULL), HL_OK);
    (void)hl_acquire(manager, other, &once, &lock, NULL);
    if (lock) (void)usleep(20000);
    if (lock && !hl_pending_done(pending)) met++;
    hl_pending_free(pending);
    int64_t soon = hl__now_ms() + SOON_MS;
    while (reserved(manager) > 0 && hl__left_ms(soon) > 0) (void)usleep(500);
    assert_int_equal(reserved(manager), 0);
    hl_lock_free(lock);
  }
  assert_int_equal(met, 5);
  hl_plan_free(plan);
  hl_plan_free(other);
  hl_manager_close(manager);
}

/* ---------------------------------------------------------------- mutexes */

/* How often this thread takes a mutex of the core's; counted in ours, which the
   linker prefers. */
static _Thread_local int mutexes_taken;

int pthread_mutex_lock(pthread_mutex_t *mutex) {
  static _Atomic(int (*)(pthread_mutex_t *)) real;
  if (!atomic_load(&real)) {
    int (*found)(pthread_mutex_t *);
    *(void **)&found = dlsym(RTLD_NEXT, "pthread_mutex_lock");
    atomic_store(&real, found);
  }
  mutexes_taken++;
  if (store.dawdles && gettid() != getpid()) (void)usleep(SLOW_US);
  return atomic_load(&real)(mutex);
}

/* Each is a cache line that all threads want. */
static void an_acquisition_takes_the_mutex_at_most_thrice(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  hl_lock_free(acquire(manager, "u1"));
  hl_lock_free(acquire(manager, "u1"));
  int before = mutexes_taken;
  hl_lock *lock = acquire(manager, "u1");
  assert_in_range(mutexes_taken - before, 1, 3);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* -------------------------------------------------------------- releasing */

/* The caller asked to be told, and then does not want to know any more. */
static void a_release_that_is_given_up_releases(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  for (int round = 0; round < 50; round++) {
    int unlocks = store.unlocks;
    hl_lock *lock = acquire(manager, "u1");
    hl_pending *pending;
    assert_int_equal(hl_lock_start_release(lock, &pending, NULL), HL_OK);
    hl_pending_cancel(pending);
    hl_pending_free(pending);
    (void)await(&store.unlocks, unlocks + 1);
    hl_lock_free(lock);
  }
  hl_manager_close(manager);
}

static void *release_main(void *argument) {
  (void)hl_lock_release(argument, false, NULL);
  return NULL;
}

/* The sign's answer would be taken for the answer to the session's next statement. */
static void no_sign_of_life_is_sent_behind_a_release(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  for (int round = 0; round < 200 && store.behind == 0; round++) {
    int unlocks = store.unlocks;
    hl_lock *lock = acquire(manager, "u1");
    pthread_t releaser;
    hl__manager_mutex_lock(manager);
    lock->hold.connection->answered -= 30000; /* the keeper has something to do, */
    (void)pthread_cond_broadcast(&manager->keeper.wakeup);
    (void)usleep(500); /* and comes first */
    assert_int_equal(pthread_create(&releaser, NULL, release_main, lock), 0);
    (void)await(&store.unlocks, unlocks + 1);
    (void)usleep(200);
    hl__manager_mutex_unlock(manager);
    (void)pthread_join(releaser, NULL);
    hl_lock_free(lock);
  }
  assert_int_equal(store.behind, 0);
  hl_manager_close(manager);
}

static void a_lock_is_released_once(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  hl_lock *first = acquire(manager, "u1");
  assert_int_equal(hl_lock_release(first, false, NULL), HL_OK);
  assert_int_equal(store.unlocks, 1);
  /* On the same session. */
  hl_lock *second = acquire(manager, "u2");
  assert_int_equal(store.opened, 1);
  assert_int_equal(hl_lock_release(first, false, NULL), HL_OK);
  assert_int_equal(hl_lock_release(first, true, NULL), HL_OK);
  hl_lock_free(first);
  assert_int_equal(store.unlocks, 1);
  assert_true(hl_lock_is_held(second));
  hl_lock_free(second);
  assert_int_equal(store.unlocks, 2);
  hl_manager_close(manager);
  assert_int_equal(store.unlocks, 2);
}

/* A release that has to wait for an answer goes out as soon as that has come, and not
   when the keeper would look next. */
static void a_deferred_release_goes_with_the_answer(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  int64_t best = SOON_MS;
  for (int i = 0; i < 3 && best > 500; i++) {
    int renewals = store.renewals, unlocks = store.unlocks;
    store.age = 25000; /* so that it is renewed at once */
    hl_lock *lock = acquire(manager, "u1");
    store.silent = true;
    (void)await(&store.renewals, renewals + 1);
    assert_int_equal(hl_lock_release(lock, false, NULL), HL_OK);
    hl_lock_free(lock);
    bool deferred = store.unlocks == unlocks;
    store.silent = false;
    if (!deferred) continue; /* the keeper was at it before we could be silent */
    int64_t took = await(&store.unlocks, unlocks + 1);
    if (took < best) best = took;
  }
  assert_true(best <= 500);
  hl_manager_close(manager);
}

/* The held lock goes back although the extend waits for a lock that it cannot get; and not only
   when its time is up. */
static void a_release_ends_the_extend_that_waits(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  hl_lock *lock = acquire(manager, "u1"), *none;
  hl_plan *plan = plan_of(manager, "u2");
  hl_pending *pending;
  store.blocked = true;
  assert_int_equal(hl_lock_start_extend(lock, plan, NULL, &pending, NULL), HL_OK);
  (void)await(&store.locks, 2);
  assert_int_equal(hl_lock_release(lock, false, NULL), HL_OK);
  assert_int_equal(store.interrupts, 1);
  assert_int_equal(hl_pending_wait(pending, SOON_MS, &none, NULL), HL_ERELEASED);
  assert_false(hl_lock_is_held(lock));
  /* The end of its session gives everything back. */
  (void)await(&store.closed, 1);
  hl_pending_free(pending);
  hl_plan_free(plan);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* ---------------------------------------------------------------- waiting */

static void a_wait_that_ends_early_goes_on(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  hl_lock *lock;
  store.blocked = true;
  store.early = 20;
  int64_t begun = hl__now_ms();
  assert_int_equal(try_acquire(manager, "u1", 200, &lock), HL_TIMEOUT);
  assert_true(hl__now_ms() - begun >= 200);
  assert_true(store.locks >= 2);
  assert_null(lock);
  hl_manager_close(manager);
}

static void a_call_that_hangs_is_ended(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  hl_lock *lock;
  store.hangs = true;
  assert_int_equal(try_acquire(manager, "u1", 100, &lock), HL_ECONNECTION);
  assert_int_equal(store.interrupts, 1);
  assert_int_equal(store.closed, 1);
  hl_manager_close(manager);
}

static void no_holder(void *context, const hl_holder *holder) { (void)context, (void)holder; }

static void *ask_main(void *manager) {
  hl_plan *plan = plan_of(manager, "u1");
  (void)hl_manager_holders(manager, plan, no_holder, NULL, NULL);
  hl_plan_free(plan);
  return NULL;
}

/* The wait's answer has come after all. The message that tells the next call to end is still in
   the session. */
static void a_session_that_was_ended_is_used_by_nobody_else(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  pthread_t asker;
  hl_lock_free(acquire(manager, "u2")); /* from now on the keeper watches */
  store.asks = true;
  assert_int_equal(pthread_create(&asker, NULL, ask_main, manager), 0);
  (void)await(&store.interrupts, 1);
  store.asks = false;
  assert_int_equal(pthread_join(asker, NULL), 0);
  assert_int_equal(store.closed, 1);
  hl_lock_free(acquire(manager, "u1"));
  hl_manager_close(manager);
}

/* A try waits for no lock; but where no connection is idle, it has to make one. */
static void a_try_has_time_to_connect(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  hl_lock *first = acquire(manager, "u1"), *second;
  store.connect_ms = 0;
  assert_int_equal(try_acquire(manager, "u2", 0, &second), HL_OK);
  assert_int_equal(store.opened, 2);
  assert_in_range(store.connect_ms, 500, 1000);
  hl_lock_free(first);
  hl_lock_free(second);
  hl_manager_close(manager);
}

/* A refused try is followed by a look who holds, which may take longer than its caller waits. */
static void a_query_takes_no_call_s_connection(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 1);
  hl_lock *lock;
  pthread_t asker;
  hl_lock_free(acquire(manager, "u2"));
  store.asks = true;
  int asked = store.asked;
  assert_int_equal(pthread_create(&asker, NULL, ask_main, manager), 0);
  (void)await(&store.asked, asked + 1);
  int status = try_acquire(manager, "u2", 0, &lock);
  store.asks = false;
  assert_int_equal(pthread_join(asker, NULL), 0);
  assert_int_equal(status, HL_OK);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* The connection that the first look has made is idle afterwards. A call must not take it: it may
   wait for long, and no lease could be refreshed meanwhile. */
static void a_call_takes_no_query_s_connection(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 1);
  hl_plan *plan = plan_of(manager, "u1");
  hl_lock *lock = acquire(manager, "u1"), *more = NULL;
  for (int i = 0; i < 2; i++) {
    assert_int_equal(hl_manager_holders(manager, plan, no_holder, NULL, NULL), HL_OK);
    assert_int_equal(try_acquire(manager, "u2", SOON_MS, &more), HL_BUSY);
  }
  hl_lock_free(lock);
  hl_lock_free(acquire(manager, "u2"));
  hl_plan_free(plan);
  hl_manager_close(manager);
}

static void *acquire_main(void *manager) {
  hl_lock *lock = NULL;
  if (try_acquire(manager, "u2", SOON_MS, &lock) != HL_OK) return NULL;
  hl_lock_free(lock);
  return manager;
}

static void *ask_all(void *manager) {
  return hl_manager_holders(manager, NULL, no_holder, NULL, NULL) == HL_OK ? manager : NULL;
}

/* The store is slow for the first of them. A call that waits, too, cannot go on with what they leave. */
static void queries_take_turns_on_their_connection(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 1);
  hl_lock *lock = acquire(manager, "u1");
  pthread_t threads[5];
  store.asks = true;
  for (int i = 0; i < 5; i++) {
    assert_int_equal(pthread_create(&threads[i], NULL, i == 1 ? acquire_main : ask_all, manager),
                     0);
    (void)await(&store.asked, 1);
    (void)usleep(5000);
  }
  int64_t begun = hl__now_ms();
  store.asks = false;
  for (int i = 0; i < 5; i++) {
    void *answered;
    if (i == 4) hl_lock_free(lock);
    assert_int_equal(pthread_join(threads[(i + 2) % 5], &answered), 0);
    assert_non_null(answered);
  }
  assert_true(hl__now_ms() - begun < SOON_MS / 2); /* and not when their time was up */
  assert_int_equal(store.opened, 2);
  hl_manager_close(manager);
}

static int acquire_beside(const char *dsn, const char *other) {
  hl_manager *one = open_at(dsn, 60000, 0), *two = open_at(other, 60000, 0);
  hl_plan *plan = plan_of(one, "u1"), *same = plan_of(two, "u1");
  hl_options options = HL_OPTIONS_INIT;
  hl_lock *first, *second;
  options.agent = hl_agent_new();
  assert_int_equal(hl_acquire(one, plan, &options, &first, NULL), HL_OK);
  int status = hl_acquire(two, same, &options, &second, NULL);
  hl_lock_free(first);
  hl_lock_free(second);
  hl_plan_free(plan);
  hl_plan_free(same);
  hl_agent_unref(options.agent);
  hl_manager_close(one);
  hl_manager_close(two);
  return status;
}

/* An agent that holds a node at one server, and wants the same node at another, waits for no
   agent. */
static void no_agent_waits_for_itself_at_another_server(void **state) {
  static const char *const others[] = {"mysql://me@host:3308/base", "mysql://me@other:3307/base",
                                       "mysql://you@host:3307/base", "mysql://me@host:3307/other"};
  (void)state;
  const char *dsn = "mysql://me@host:3307/base";
  assert_int_equal(acquire_beside(dsn, dsn), HL_DEADLOCK);
  for (size_t i = 0; i < sizeof others / sizeof *others; i++)
    assert_int_equal(acquire_beside(dsn, others[i]), HL_OK);
}

/* A caller that waits for room in the pool goes on as soon as there is some, even when the loss
   of a lock made it. */
static void a_lost_lock_leaves_room(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 1);
  int64_t best = SOON_MS;
  for (int i = 0; i < 3 && best > 500; i++) {
    hl_options options = HL_OPTIONS_INIT;
    hl_pending *pending;
    hl_lock *lock = acquire(manager, "u1"), *next = NULL;
    hl_plan *plan = plan_of(manager, "u2");
    options.timeout = SOON_MS;
    assert_int_equal(hl_start(manager, plan, &options, &pending, NULL), HL_OK);
    await_keeper();
    assert_false(hl_pending_done(pending));
    store.ended = true;
    int64_t begun = hl__now_ms();
    assert_false(hl_lock_is_held(lock));
    store.ended = false;
    assert_int_equal(hl_pending_wait(pending, SOON_MS, &next, NULL), HL_OK);
    if (hl__now_ms() - begun < best) best = hl__now_ms() - begun;
    hl_pending_free(pending);
    hl_plan_free(plan);
    hl_lock_free(lock);
    hl_lock_free(next);
  }
  assert_true(best <= 500);
  hl_manager_close(manager);
}

static void a_lost_lock_leaves_room_for_a_thread(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 1);
  hl_lock *lock = acquire(manager, "u1");
  pthread_t waiter;
  void *granted;
  assert_int_equal(pthread_create(&waiter, NULL, acquire_main, manager), 0);
  await_keeper();
  store.ended = true;
  assert_false(hl_lock_is_held(lock));
  store.ended = false;
  int64_t begun = hl__now_ms();
  assert_int_equal(pthread_join(waiter, &granted), 0);
  assert_non_null(granted);
  assert_true(hl__now_ms() - begun < SOON_MS / 2); /* and not when its time was up */
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* ------------------------------------------------------------------- idle */

/* A connection that does not answer is no connection. */
static void an_idle_session_without_an_answer_is_closed(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  hl_lock *lock = acquire(manager, "u1");
  store.silent = true;
  assert_int_equal(hl_lock_release(lock, false, NULL), HL_OK);
  hl_lock_free(lock);
  (void)await(&store.closed, 1);
  store.silent = false;
  hl_lock_free(acquire(manager, "u1"));
  assert_int_equal(store.opened, 2);
  hl_manager_close(manager);
}

/* ------------------------------------------------------- seen by other threads */

#define LOSSES 100

static _Atomic(hl_lock *) looked_at;

static void *look_on(void *unused) {
  for (hl_lock *lock; (lock = atomic_load(&looked_at)) != NULL;)
    (void)lock->held.stands(&lock->held, 0, false);
  return unused;
}

/* A thread that searches for circles of waiters looks at the locks of others. */
static void a_lock_is_looked_at_while_it_is_lost(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  for (int i = 0; i < LOSSES; i++) {
    pthread_t thread;
    hl_lock *lock = acquire(manager, "u1");
    atomic_store(&looked_at, lock);
    assert_int_equal(pthread_create(&thread, NULL, look_on, NULL), 0);
    (void)usleep(500);
    store.ended = true;
    assert_int_equal(hl_lock_check(lock, NULL), HL_ELOST);
    (void)usleep(500);
    atomic_store(&looked_at, NULL);
    assert_int_equal(pthread_join(thread, NULL), 0);
    hl_lock_free(lock);
    store.ended = false;
  }
  hl_manager_close(manager);
}

/* ---------------------------------------------------------------- at exit() */

/* Behind the library's handler, as it was registered before: here exit() takes apart what a client
   library uses. */
static void taken_apart(void) {
  if (store.closing) _exit(9);
}

static void *find_lost(void *lock) {
  (void)hl_lock_check(lock, NULL);
  return NULL;
}

static void ignore(void *context, const hl_holder *holder) { (void)context, (void)holder; }

static void *ask_again(void *manager) {
  (void)hl_manager_holders(manager, NULL, ignore, NULL, NULL);
  return NULL;
}

static void exit_beside(void *(*fn)(void *), void *argument) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, fn, argument) != 0 || pthread_detach(thread) != 0) _exit(8);
  int64_t end = hl__now_ms() + SOON_MS;
  while (!store.reached && hl__left_ms(end) > 0) (void)usleep(500);
  if (!store.reached) _exit(7);
  exit(0);
}

static void exit_beside_a_loss(void) {
  hl_manager *manager = open_manager(60000, 0);
  hl_lock *lock = acquire(manager, "u1");
  store.slow = 1;
  store.ended = true;
  exit_beside(find_lost, lock);
}

/* The pool is full. The one connection has ended, and the other is taken for as old. */
static void exit_beside_a_stale_connection(void) {
  hl_manager *manager = open_manager(60000, 1);
  hl_lock *lock = acquire(manager, "u1");
  (void)ask_again(manager);
  assert_int_equal(store.opened, 2);
  hl_lock_free(lock);
  store.slow = 2;
  store.cut = true;
  exit_beside(ask_again, manager);
}

/* In processes of their own, before this one starts a thread. */
static void exit_awaits_the_close_of_a_connection(void **state) {
  static void (*const all[])(void) = {exit_beside_a_loss, exit_beside_a_stale_connection};
  (void)state;
  (void)fflush(NULL); /* a child's exit() writes it, too */
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    int status;
    pid_t child = fork();
    if (child == 0) all[i]();
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
  }
}

/* A thread of the parent may have the mutex of the parent's store, or wait there, at the fork. No thread does here. */
static void a_forked_child_opens_the_store_anew(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  int status;
  pid_t child = fork();
  if (child == 0) {
    hl_lock *lock;
    status = try_acquire(manager, "u1", SOON_MS, &lock);
    _exit(status == HL_OK && store.stores == 2 ? 0 : 1);
  }
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_int_equal(status, 0);
  hl_manager_close(manager);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(exit_awaits_the_close_of_a_connection),
      cmocka_unit_test(a_forked_child_opens_the_store_anew),
      cmocka_unit_test(a_lock_is_counted_from_the_sending),
      cmocka_unit_test(a_lock_is_lost_when_its_time_is_up),
      cmocka_unit_test(the_keeper_renews_what_is_held),
      cmocka_unit_test(what_came_during_a_call_may_be_its_loss),
      cmocka_unit_test(a_lock_that_a_deadlock_ended_is_believed_no_more),
      cmocka_unit_test(a_lock_is_looked_at_while_holders_are_asked_for),
      cmocka_unit_test(a_sign_of_life_before_an_extend_is_not_awaited_after_it),
      cmocka_unit_test(no_sign_of_life_is_sent_behind_a_release),
      cmocka_unit_test(an_extend_in_vain_keeps_the_lock),
      cmocka_unit_test(an_upgrade_that_is_granted_though_it_was_cancelled_shows),
      cmocka_unit_test(a_call_that_is_given_up_waits_for_no_connection),
      cmocka_unit_test(an_acquisition_takes_the_mutex_at_most_thrice),
      cmocka_unit_test(a_release_that_is_given_up_releases),
      cmocka_unit_test(a_lock_is_released_once),
      cmocka_unit_test(a_deferred_release_goes_with_the_answer),
      cmocka_unit_test(a_release_ends_the_extend_that_waits),
      cmocka_unit_test(a_wait_that_ends_early_goes_on),
      cmocka_unit_test(a_call_that_hangs_is_ended),
      cmocka_unit_test(a_check_whose_answer_comes_too_late_is_lost),
      cmocka_unit_test(a_check_looks_once_more_behind_the_answer),
      cmocka_unit_test(a_session_that_was_ended_is_used_by_nobody_else),
      cmocka_unit_test(a_query_takes_no_call_s_connection),
      cmocka_unit_test(a_call_takes_no_query_s_connection),
      cmocka_unit_test(queries_take_turns_on_their_connection),
      cmocka_unit_test(a_try_has_time_to_connect),
      cmocka_unit_test(no_agent_waits_for_itself_at_another_server),
      cmocka_unit_test(a_lost_lock_leaves_room),
      cmocka_unit_test(a_lost_lock_leaves_room_for_a_thread),
      cmocka_unit_test(an_idle_session_without_an_answer_is_closed),
      cmocka_unit_test(a_lock_is_looked_at_while_it_is_lost),
      cmocka_unit_test(nothing_is_left),
  };
  if (atexit(taken_apart) != 0) return 1;
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
