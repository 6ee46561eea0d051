/*
 * test_sessions.c - what the core makes of a store whose sessions are connections:
 * how long a lock is believed, what the keeper does, and what happens to a session
 * between its calls. The store is a script of this program: it answers when it is told
 * to, so each moment can be met exactly, and no server is needed.
 */
#include "hierlock.h"
#include "internal.h"
#include "store.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ------------------------------------------------------------- the store */

/* What it does, and what was asked of it. */
static struct {
  atomic_int age;      /* ms: as if what locks had been sent so much earlier, */
  atomic_int sign_age; /* and a sign of life */
  atomic_bool silent;  /* no answer comes */
  atomic_bool ended;   /* the connections have ended */
  atomic_bool told;    /* something has come that nobody has read */
  atomic_bool blocked; /* a lock is not granted: its wait ends in time */
  atomic_bool hangs;   /* nor does its wait end in time */
  atomic_int early;    /* ms after which a wait ends, though its time is not up */
  atomic_int opened, closed, locks, unlocks, renewals, looks, interrupts;
} store;

/* A hanging call gives up at last, so that the test comes to its end. */
#define HANGS_MS 6000

typedef struct session {
  hl_session base;
  bool outstanding;
  atomic_bool interrupted;
} session;

static int fake_open(const hl_store_config *config, hl_store **result,
                     hl_error *error) {
  (void)error;
  *result = calloc(1, sizeof **result);
  assert_non_null(*result);
  (*result)->layout = hl_layout_ref(config->layout);
  return HL_OK;
}

static void fake_close(hl_store *self) {
  hl_layout_unref(self->layout);
  free(self);
}

static int fake_session_open(hl_store *self, int64_t deadline,
                             hl_session **result, hl_error *error) {
  (void)deadline, (void)error;
  session *made = calloc(1, sizeof *made);
  assert_non_null(made);
  made->base.store = self;
  atomic_fetch_add(&store.opened, 1);
  *result = &made->base;
  return HL_OK;
}

static void fake_session_close(hl_session *self) {
  atomic_fetch_add(&store.closed, 1);
  free(self);
}

static int fake_lock(hl_session *base, const hl_request *request,
                     hl_grant *grant, hl_error *error) {
  session *self = (session *)(void *)base;
  int64_t begun = hl__now_ms(), sent = hl__lease_ms();
  atomic_fetch_add(&store.locks, 1);
  while (store.blocked || store.hangs) {
    int64_t now = hl__now_ms();
    if (self->interrupted || now - begun > HANGS_MS)
      return hl__error(error, HL_ECONNECTION, "the connection has ended");
    if (!store.hangs &&
        (request->try_once || now > request->deadline ||
         (store.early && now - begun >= store.early)))
      return hl__error(error, HL_TIMEOUT, "not granted in time");
    (void)usleep(500);
  }
  grant->token = (uint64_t)store.locks << 8;
  grant->sent_ms = sent - store.age;
  return HL_OK;
}

static int fake_unlock(hl_session *base, hl_error *error) {
  session *self = (session *)(void *)base;
  if (self->outstanding && store.silent)
    return hl__error(error, HL_BUSY, "an earlier answer has not come");
  self->outstanding = true;
  atomic_fetch_add(&store.unlocks, 1);
  return HL_OK;
}

static int fake_renew(hl_session *base, int64_t *sent_ms, hl_error *error) {
  session *self = (session *)(void *)base;
  (void)error;
  *sent_ms = hl__lease_ms() - store.sign_age;
  self->outstanding = true;
  atomic_fetch_add(&store.renewals, 1);
  return HL_OK;
}

static int fake_settle(hl_session *base, int64_t deadline, hl_error *error) {
  session *self = (session *)(void *)base;
  while (self->outstanding && store.silent) {
    if (hl__left_ms(deadline) == 0)
      return hl__error(error, HL_TIMEOUT, "no answer yet");
    (void)usleep(500);
  }
  self->outstanding = false;
  return HL_OK;
}

static int fake_look(hl_session *self, hl_error *error) {
  (void)self;
  atomic_fetch_add(&store.looks, 1);
  return store.ended
             ? hl__error(error, HL_ECONNECTION, "the connection has ended")
             : HL_OK;
}

static bool fake_told(hl_session *self) {
  (void)self;
  return store.told;
}

static void fake_interrupt(hl_session *self) {
  ((session *)(void *)self)->interrupted = true;
  atomic_fetch_add(&store.interrupts, 1);
}

static int fake_holders(hl_session *self, const hl_row *rows, size_t n,
                        hl_holder_fn fn, void *context, hl_error *error) {
  (void)self, (void)rows, (void)n, (void)fn, (void)context, (void)error;
  return HL_OK;
}

static const hl_store_ops fake = {
    .abi = HL_STORE_ABI,
    .scheme = "mysql",
    .connects = true,
    .open = fake_open,
    .close = fake_close,
    .forget = fake_close,
    .session_open = fake_session_open,
    .session_close = fake_session_close,
    .session_forget = fake_session_close,
    .lock = fake_lock,
    .unlock = fake_unlock,
    .renew = fake_renew,
    .settle = fake_settle,
    .look = fake_look,
    .told = fake_told,
    .interrupt = fake_interrupt,
    .holders = fake_holders,
};

/* --------------------------------------------------------------- helpers */

#define SOON_MS 10000 /* for what must happen on a busy machine */

static hl_manager *open_manager(int64_t hold_timeout, unsigned pool_size) {
  static const hl_store_ops *const stores[] = {&fake, NULL};
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager;
  memset(&store, 0, sizeof store);
  config.dsn = "mysql://nobody@nowhere/nothing";
  config.stores = stores;
  config.hold_timeout = hold_timeout;
  if (pool_size) config.pool_size = pool_size;
  assert_int_equal(hl_manager_open(&config, &manager, NULL), HL_OK);
  return manager;
}

static hl_plan *plan_of(hl_manager *manager, const char *user) {
  hl_id id = {user, strlen(user)};
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  assert_int_equal(hl_plan_add(plan, &id, 1, HL_EXCLUSIVE, false, NULL), HL_OK);
  return plan;
}

static int try_acquire(hl_manager *manager, const char *user, int64_t timeout,
                       hl_lock **lock) {
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

/* Returns when the keeper has just looked at a lock that is held: it does so again in a
   second at the earliest. Nobody else looks meanwhile. */
static void await_keeper(void) { (void)await(&store.looks, store.looks + 1); }

/* ------------------------------------------------- how long it is believed */

/* The store's time runs from some moment after the request was sent, and nobody knows
   which. So it is counted from the sending, however late the answer comes. */
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
  /* One whose answer is waited for. */
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

/* While an extend waits, nobody but it reads what the server says. */
static void what_came_during_a_call_may_be_its_loss(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  hl_lock *lock = acquire(manager, "u1"), *none;
  hl_plan *plan = plan_of(manager, "u2");
  hl_pending *pending;
  store.blocked = true;
  assert_int_equal(hl_lock_start_extend(lock, plan, NULL, &pending, NULL),
                   HL_OK);
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

/* -------------------------------------------------------------- releasing */

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

/* What was held goes back although the extend waits for something that is not to be
   had; and not when its time is up. */
static void a_release_ends_the_extend_that_waits(void **state) {
  (void)state;
  hl_manager *manager = open_manager(60000, 0);
  hl_lock *lock = acquire(manager, "u1"), *none;
  hl_plan *plan = plan_of(manager, "u2");
  hl_pending *pending;
  store.blocked = true;
  assert_int_equal(hl_lock_start_extend(lock, plan, NULL, &pending, NULL),
                   HL_OK);
  (void)await(&store.locks, 2);
  assert_int_equal(hl_lock_release(lock, false, NULL), HL_OK);
  assert_int_equal(store.interrupts, 1);
  assert_int_equal(hl_pending_wait(pending, SOON_MS, &none, NULL),
                   HL_ERELEASED);
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

/* Who waits for room in the pool goes on as soon as there is some: also when it was made
   by the loss of a lock. */
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

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_lock_is_counted_from_the_sending),
      cmocka_unit_test(a_lock_is_lost_when_its_time_is_up),
      cmocka_unit_test(the_keeper_renews_what_is_held),
      cmocka_unit_test(what_came_during_a_call_may_be_its_loss),
      cmocka_unit_test(a_lock_is_released_once),
      cmocka_unit_test(a_deferred_release_goes_with_the_answer),
      cmocka_unit_test(a_release_ends_the_extend_that_waits),
      cmocka_unit_test(a_wait_that_ends_early_goes_on),
      cmocka_unit_test(a_call_that_hangs_is_ended),
      cmocka_unit_test(a_lost_lock_leaves_room),
      cmocka_unit_test(an_idle_session_without_an_answer_is_closed),
  };
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
