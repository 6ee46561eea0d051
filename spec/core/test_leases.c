/*
 * test_leases.c - leases in two places. First the core's belief about a lease: the store is a
 * script of this program, which answers when it is told to. Then the records of the embedded
 * store: their state when a process is killed between any two instructions, or when another has
 * written in them.
 */
#include "hierlock.h"
#include "clock.h"
#include "error.h"
#include "record.h"
#include "store.h"

#include "../../csrc/stores/file/ledger.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "leftovers.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---------------------------------------------------------------- a script */

static struct {
  atomic_int grant_age;   /* ms: as if it had been sent so much earlier */
  atomic_int refresh_age; /* likewise */
  atomic_bool hangs;      /* a refresh is not answered as long as this */
  atomic_int fails;       /* the status of the next refresh; 0: it is done */
  atomic_int left;        /* what a look says */
  atomic_int refreshes, drops, converts, opened, stale;
  uint8_t refused[16];     /* the id of a lease that is not dropped */
  atomic_int unanswered;   /* so many grants are recorded, and not answered */
  hl_lease_terms asked[4]; /* of the grants */
  atomic_int takes;
  atomic_int unsettled; /* the status of a settle */
  atomic_ullong turn;   /* number of the last refresh; of one lease, where it matters */
  atomic_bool turns_fell;
} store;

static atomic_int stores; /* not closed: a worker of the manager's may be at them */

static int fake_open(const hl_store_config *config, hl_store **result, hl_error *error);

static void fake_close(hl_store *self) {
  atomic_fetch_sub(&stores, 1);
  hl_layout_unref(self->layout);
  free(self);
}

static int fake_session_open(hl_store *self, int64_t deadline, hl_session **result,
                             hl_error *error) {
  (void)deadline, (void)error;
  *result = calloc(1, sizeof **result);
  (*result)->store = self;
  atomic_fetch_add(&store.opened, 1);
  return HL_OK;
}

static void fake_session_close(hl_session *self) { free(self); }

static int fake_take(hl_session *self, const hl_request *request, hl_grant *grant,
                     hl_error *error) {
  (void)self;
  if (request->lease) store.asked[store.takes++ % 4] = *request->lease;
  grant->token = 256;
  grant->sent_ms = hl__boot_ms() - store.grant_age;
  if (store.unanswered == 0) return HL_OK;
  store.unanswered--;
  return hl__error(error, HL_ECONNECTION, "it was not answered");
}

static int fake_nothing(hl_session *self, hl_error *error) {
  (void)self, (void)error;
  return HL_OK;
}

static int fake_renew(hl_session *self, int64_t *sent_ms, hl_error *error) {
  (void)self, (void)error;
  *sent_ms = hl__boot_ms();
  return HL_OK;
}

static int fake_settle(hl_session *self, int64_t deadline, hl_error *error) {
  (void)self, (void)deadline, (void)error;
  return store.unsettled;
}

static void fake_interrupt(hl_session *self) { (void)self; }

static int fake_refresh(hl_session *self, const hl_lease_terms *terms, int64_t ttl,
                        int64_t deadline, int64_t *sent_ms, hl_error *error) {
  (void)self, (void)ttl, (void)deadline;
  int64_t sent = hl__boot_ms() - store.refresh_age;
  if (terms->turn <= store.turn) store.turns_fell = true;
  store.turn = terms->turn;
  atomic_fetch_add(&store.refreshes, 1);
  while (store.hangs) (void)usleep(500);
  int status = store.fails;
  store.fails = 0;
  const hl__record revoked = {HL__RECORD_FITS, .revoked = true, .by = "admin", .reason = "lunch"};
  if (status == HL_ELOST) return hl__record_check(&revoked, error);
  if (status) return hl__error(error, status, "as it was told");
  *sent_ms = sent;
  return HL_OK;
}

static int fake_inspect(hl_session *self, const hl_lease_terms *terms, int64_t deadline,
                        int64_t *left_ms, hl_error *error) {
  (void)self, (void)terms, (void)deadline, (void)error;
  *left_ms = store.left;
  return HL_OK;
}

static int fake_drop(hl_session *self, const hl_lease_terms *terms, bool confirm, int64_t deadline,
                     hl_error *error) {
  static const uint8_t nobody[16] = {0};
  (void)self, (void)confirm, (void)deadline;
  if (memcmp(store.refused, nobody, 16) != 0 && memcmp(terms->id, store.refused, 16) == 0)
    return hl__error(error, HL_ESTORE, "as it was told");
  atomic_fetch_add(&store.drops, 1);
  return HL_OK;
}

static int fake_to_lease(hl_session *self, const hl_request *request, hl_grant *grant,
                         hl_error *error) {
  (void)self, (void)request, (void)error;
  grant->sent_ms = hl__boot_ms();
  atomic_fetch_add(&store.converts, 1);
  while (store.hangs) (void)usleep(500);
  int status = store.fails;
  store.fails = 0;
  return status ? hl__error(error, status, "as it was told") : HL_OK;
}

static int fake_convert(hl_session *self, const hl_request *request, hl_grant *grant,
                        hl_error *error) {
  (void)self, (void)request, (void)grant;
  atomic_fetch_add(&store.converts, 1);
  while (store.hangs) (void)usleep(500);
  int status = store.fails;
  store.fails = 0;
  return status ? hl__error(error, status, "as it was told") : HL_OK;
}

static const hl_lease_ops fake_leases = {.refresh = fake_refresh,
                                         .inspect = fake_inspect,
                                         .drop = fake_drop,
                                         .convert = fake_convert,
                                         .to_lease = fake_to_lease};

static int fake_parse(char *text, hl_dsn *dsn, hl_error *error) {
  return hl__dsn_url(text, hl__dsn_host, dsn, error);
}

static hl_store_ops fake = {
    .abi = HL_STORE_ABI,
    .scheme = "mysql",
    .traits = {.scarce = true, .expires = true, .blocks = true},
    .parse = fake_parse,
    .open = fake_open,
    .close = fake_close,
    .forget = fake_close,
    .session_open = fake_session_open,
    .session_close = fake_session_close,
    .session_forget = fake_session_close,
    .take = fake_take,
    .give_back = fake_nothing,
    .renew = fake_renew,
    .settle = fake_settle,
    .check = fake_nothing,
    .interrupt = fake_interrupt,
};

static int fake_open(const hl_store_config *config, hl_store **result, hl_error *error) {
  (void)error;
  *result = calloc(1, sizeof **result);
  (*result)->ops = &fake;
  (*result)->layout = hl_layout_ref(config->layout);
  (*result)->leases = &fake_leases;
  atomic_fetch_add(&stores, 1);
  return HL_OK;
}

#define SOON_MS 10000

static hl_manager *open_with(int64_t hold_timeout) {
  static const hl_store_ops *const known[] = {&fake, NULL};
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager;
  /* A drop by the manager before this one is no drop of this one's. */
  int64_t end = hl__now_ms() + SOON_MS;
  while (stores > 0 && hl__now_ms() < end) (void)usleep(1000);
  assert_int_equal(stores, 0);
  memset(&store, 0, sizeof store);
  config.dsn = "mysql://nobody@nowhere/nothing";
  config.stores = known;
  config.hold_timeout = hold_timeout;
  assert_int_equal(hl_manager_open(&config, &manager, NULL), HL_OK);
  return manager;
}

static hl_manager *open_manager(void) {
  fake.traits.leases_only = fake.traits.drop_sends = false;
  return open_with(30000);
}

/* The script has only leases, and sends releases. */
static hl_manager *open_only(int64_t hold_timeout) {
  fake.traits.leases_only = fake.traits.drop_sends = true;
  return open_with(hold_timeout);
}

static int acquire(hl_manager *manager, int64_t ttl, bool refreshes, bool releases,
                   hl_lock **lock) {
  hl_id id = {"u1", 2};
  hl_options options = HL_OPTIONS_INIT;
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  assert_int_equal(hl_plan_add(plan, &id, 1, HL_EXCLUSIVE, false, NULL), HL_OK);
  options.ttl = ttl;
  options.auto_refresh = refreshes;
  options.auto_release = releases;
  int status = hl_acquire(manager, plan, &options, lock, NULL);
  hl_plan_free(plan);
  return status;
}

static hl_lock *lease(hl_manager *manager, int64_t ttl) {
  hl_lock *lock;
  assert_int_equal(acquire(manager, ttl, false, true, &lock), HL_OK);
  return lock;
}

#define WAIT_UNTIL(condition)                                                                      \
  do {                                                                                             \
    int64_t end_ = hl__now_ms() + SOON_MS;                                                         \
    while (!(condition) && hl__now_ms() < end_) (void)usleep(1000);                                \
    assert_true(condition);                                                                        \
  } while (0)

static void a_lease_is_counted_from_the_sending(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  store.grant_age = 25000;
  hl_lock *lock = lease(manager, 60000);
  assert_in_range(hl_lock_remaining(lock), 30000, 35000);
  store.refresh_age = 9000;
  assert_int_equal(hl_lock_refresh(lock, 0, NULL), HL_OK);
  assert_in_range(hl_lock_remaining(lock), 45000, 51000);
  assert_int_equal(hl_lock_refresh(lock, 20000, NULL), HL_OK);
  assert_in_range(hl_lock_remaining(lock), 5000, 11000);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

static void what_was_over_when_it_was_answered_is_given_back(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *lock;
  hl_error error;
  store.grant_age = 1000;
  assert_int_equal(acquire(manager, 1000, false, true, &lock), HL_ELOST);
  assert_null(lock);
  assert_int_equal(store.drops, 1);
  store.grant_age = 0;
  lock = lease(manager, 60000);
  store.refresh_age = 60000;
  assert_int_equal(hl_lock_refresh(lock, 0, &error), HL_ELOST);
  assert_non_null(strstr(error.message, "given back"));
  assert_int_equal(store.drops, 2);
  assert_int_equal(hl_lock_look(lock), HL_LOST);
  assert_int_equal(hl_lock_release(lock, true, NULL), HL_ELOST);
  assert_int_equal(store.drops, 2);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

static void a_refresh_without_an_answer_changes_nothing(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *lock = lease(manager, 60000);
  assert_int_equal(hl_lock_refresh(lock, 2000, NULL), HL_OK);
  store.fails = HL_ESTORE;
  assert_int_equal(hl_lock_refresh(lock, 60000, NULL), HL_ESTORE);
  assert_in_range(hl_lock_remaining(lock), 1, 2000);
  /* A connection that had gone stale is not the store's answer. */
  store.fails = HL_ECONNECTION;
  assert_int_equal(hl_lock_refresh(lock, 60000, NULL), HL_OK);
  assert_in_range(hl_lock_remaining(lock), 50000, 60000);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* The keeper's, too: it has all the time until the end to try again. */
static void a_refresh_that_has_failed_is_made_again_in_time(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *lock;
  assert_int_equal(acquire(manager, 3000, true, true, &lock), HL_OK);
  store.fails = HL_ESTORE;
  while (store.refreshes < 2) {
    assert_true(hl_lock_is_held(lock));
    (void)usleep(1000);
  }
  WAIT_UNTIL(hl_lock_remaining(lock) > 2000);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

static void each_refresh_and_each_try_of_a_grant_is_another(void **state) {
  static const uint8_t none[16] = {0};
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *lock = lease(manager, 60000), *second;
  const hl_lease_terms *asked = store.asked;
  assert_int_equal(hl_lock_refresh(lock, 0, NULL), HL_OK);
  assert_true(store.turn > asked[0].turn);
  store.fails = HL_ECONNECTION;
  assert_int_equal(hl_lock_refresh(lock, 0, NULL), HL_OK);
  assert_int_equal(store.refreshes, 3);
  assert_false(store.turns_fell);
  store.unanswered = 1;
  second = lease(manager, 60000);
  assert_int_equal(store.takes, 3);
  assert_memory_equal(asked[1].former, none, 16);
  assert_memory_equal(asked[2].former, asked[1].id, 16);
  assert_memory_not_equal(asked[2].id, asked[1].id, 16);
  assert_memory_not_equal(asked[2].secret, asked[1].secret, 16);
  assert_memory_not_equal(asked[2].holder, asked[1].holder, 16);
  assert_int_equal(store.drops, 1); /* of the first try's record */
  hl_lock_free(second);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

static void a_release_that_is_refused_keeps_none_behind_it(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *first = lease(manager, 60000), *second = lease(manager, 60000);
  memcpy(store.refused, store.asked[0].id, 16);
  hl_lock_free(first);
  hl_lock_free(second);
  WAIT_UNTIL(store.drops == 1);
  memset(store.refused, 0, 16);
  WAIT_UNTIL(store.drops == 2);
  hl_manager_close(manager);
}

static void a_late_refresh_restores_it(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  store.grant_age = 59950;
  hl_lock *lock = lease(manager, 60000);
  uint64_t losses = hl_manager_losses(manager);
  (void)usleep(80000);
  assert_int_equal(hl_lock_remaining(lock), 0);
  assert_int_equal(hl_lock_look(lock), HL_OVER);
  assert_int_equal(hl_manager_losses(manager), losses + 1);
  assert_int_equal(hl_manager_losses(manager), losses + 1);
  store.left = 0;
  assert_int_equal(hl_lock_check(lock, NULL), HL_ELOST);
  assert_int_equal(hl_lock_refresh(lock, 0, NULL), HL_OK);
  assert_int_equal(hl_lock_look(lock), HL_HELD);
  store.left = 100;
  assert_int_equal(hl_lock_check(lock, NULL), HL_OK);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

static void the_store_says_who_revoked_it(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *lock = lease(manager, 60000);
  hl_error error;
  store.fails = HL_ELOST;
  assert_int_equal(hl_lock_refresh(lock, 0, &error), HL_ELOST);
  assert_string_equal(error.revoked_by, "admin");
  assert_string_equal(error.reason, "lunch");
  hl_lock_loss(lock, &error);
  assert_string_equal(error.revoked_by, "admin");
  assert_int_equal(hl_lock_check(lock, &error), HL_ELOST);
  assert_string_equal(error.reason, "lunch");
  assert_int_equal(hl_lock_release(lock, false, &error), HL_ELOST);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* The worker waits for the store; only callers that want a refresh wait for the worker. */
static void a_refresh_that_hangs_keeps_nobody_waiting(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *lock, *other;
  store.hangs = true;
  assert_int_equal(acquire(manager, 2000, true, true, &lock), HL_OK);
  WAIT_UNTIL(store.refreshes == 1);
  assert_true(hl_lock_is_held(lock));
  assert_int_equal(acquire(manager, 60000, false, true, &other), HL_OK);
  assert_int_equal(hl_lock_release(other, false, NULL), HL_OK);
  WAIT_UNTIL(hl_lock_look(lock) == HL_OVER);
  assert_int_equal(store.refreshes, 1);
  store.hangs = false; /* its answer is too old by now, the next is not */
  WAIT_UNTIL(hl_lock_look(lock) == HL_HELD);
  int64_t end = hl__now_ms() + 3000;
  while (hl__now_ms() < end) {
    assert_true(hl_lock_is_held(lock));
    (void)usleep(5000);
  }
  assert_true(store.refreshes >= 4);
  hl_lock_free(lock);
  hl_lock_free(other);
  hl_manager_close(manager);
}

static void the_end_of_a_manager_releases_what_is_to_be_released(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *one, *two, *three;
  assert_int_equal(acquire(manager, 60000, false, true, &one), HL_OK);
  assert_int_equal(acquire(manager, 60000, false, false, &two), HL_OK);
  assert_int_equal(acquire(manager, 60000, false, false, &three), HL_OK);
  hl_lock_free(three);
  assert_int_equal(store.drops, 0);
  hl_manager_close(manager);
  assert_int_equal(store.drops, 1);
  assert_int_equal(hl_lock_look(one), HL_RELEASED);
  assert_int_equal(hl_lock_look(two), HL_RELEASED);
  hl_lock_free(one);
  hl_lock_free(two);
  assert_int_equal(store.drops, 1);
}

/* ---- stores that only have leases */

static void without_a_ttl_it_is_a_lease_that_is_refreshed(void **state) {
  (void)state;
  hl_manager *manager = open_only(1000);
  hl_lock *lock, *none;
  hl_pending *pending;
  hl_options options = HL_OPTIONS_INIT;
  assert_int_equal(acquire(manager, 0, false, true, &lock), HL_OK);
  assert_int_equal(hl_lock_kind(lock), HL_LEASE);
  assert_int_equal(store.asked[0].ttl, 1000);
  assert_in_range(hl_lock_remaining(lock), 1, 1000);
  WAIT_UNTIL(store.refreshes >= 2);
  assert_true(hl_lock_is_held(lock));
  assert_int_equal(hl_lock_extend(lock, hl_lock_plan(lock), NULL, NULL), HL_EUNSUPPORTED);
  options.ttl = 5000;
  assert_int_equal(hl_lock_to_lease(lock, &options, NULL), HL_EUNSUPPORTED);
  assert_int_equal(hl_lock_release(lock, true, NULL), HL_OK);
  assert_int_equal(store.drops, 1);
  assert_int_equal(hl_start(manager, hl_lock_plan(lock), NULL, &pending, NULL), HL_OK);
  hl_lock_free(lock);
  assert_int_equal(hl_pending_wait(pending, SOON_MS, &lock, &(hl_error){0}), HL_OK);
  assert_int_equal(hl_lock_kind(lock), HL_LEASE);
  assert_int_equal(hl_pending_wait(pending, 0, &none, NULL), HL_EMISUSE);
  hl_pending_free(pending);
  hl_manager_close(manager);
  assert_int_equal(store.drops, 2);
  hl_lock_free(lock);
}

/* Also where no connection is idle: then a worker makes one. */
static void closing_releases_without_a_connection(void **state) {
  (void)state;
  hl_manager *manager = open_only(30000);
  hl_lock *lock, *other;
  assert_int_equal(acquire(manager, 0, false, true, &lock), HL_OK);
  store.unanswered = 2; /* both sessions of this one end */
  assert_int_equal(acquire(manager, 0, false, true, &other), HL_ECONNECTION);
  int opened = store.opened, drops = store.drops;
  hl_manager_close(manager);
  WAIT_UNTIL(store.drops == drops + 1);
  assert_true(store.opened >= opened);
  hl_lock_free(lock);
}

static void a_release_is_sent_at_once(void **state) {
  (void)state;
  hl_manager *manager = open_only(30000);
  hl_lock *lock;
  assert_int_equal(acquire(manager, 0, false, true, &lock), HL_OK);
  assert_int_equal(hl_lock_release(lock, false, NULL), HL_OK);
  assert_int_equal(store.drops, 1); /* by this thread */
  hl_lock_free(lock);
  assert_int_equal(acquire(manager, 0, false, true, &lock), HL_OK);
  hl_lock_free(lock);
  assert_int_equal(store.drops, 2);
  assert_int_equal(store.opened, 1);
  hl_manager_close(manager);
  assert_int_equal(store.drops, 2);
}

static void a_release_whose_connection_ends_is_made_again(void **state) {
  (void)state;
  hl_manager *manager = open_only(1000);
  hl_lock *lock;
  assert_int_equal(acquire(manager, 0, false, true, &lock), HL_OK);
  assert_int_equal(hl_lock_release(lock, false, NULL), HL_OK);
  assert_int_equal(store.drops, 1);
  store.unsettled = HL_ECONNECTION; /* the keeper finds it */
  WAIT_UNTIL(store.drops == 2);
  store.unsettled = HL_OK;
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* The store may have read it at once, and this is unknown before it has answered. */
static void a_shorter_time_counts_before_it_is_answered(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *lock = lease(manager, 60000), *none;
  hl_pending *pending;
  store.hangs = true;
  assert_int_equal(hl_lock_start_refresh(lock, 100, &pending, NULL), HL_OK);
  WAIT_UNTIL(store.refreshes == 1);
  assert_true(hl_lock_remaining(lock) <= 100);
  (void)usleep(150000);
  assert_false(hl_lock_is_held(lock));
  store.fails = HL_ESTORE;
  store.hangs = false;
  assert_int_equal(hl_pending_wait(pending, SOON_MS, &none, NULL), HL_ESTORE);
  assert_false(hl_lock_is_held(lock));
  hl_pending_free(pending);
  assert_int_equal(hl_lock_refresh(lock, 0, NULL), HL_OK);
  assert_true(hl_lock_remaining(lock) > 50000);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* A lease that must be refreshed soon is refreshed sooner. */
static void the_keeper_keeps_to_the_shorter_time(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *lock;
  assert_int_equal(acquire(manager, 60000, true, true, &lock), HL_OK);
  assert_int_equal(hl_lock_refresh(lock, 600, NULL), HL_OK);
  WAIT_UNTIL(store.refreshes >= 2 || hl_lock_look(lock) != HL_HELD);
  assert_int_equal(hl_lock_look(lock), HL_HELD);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* However many are due at once. */
static void a_few_workers_refresh_many(void **state) {
  enum {
    LOCKS = 200
  };
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *locks[LOCKS];
  store.hangs = true;
  for (int i = 0; i < LOCKS; i++)
    assert_int_equal(acquire(manager, 6000, true, true, &locks[i]), HL_OK);
  WAIT_UNTIL(store.refreshes > 0);
  (void)usleep(500000); /* by then all are due */
  assert_in_range(store.refreshes, 1, 16);
  store.hangs = false;
  WAIT_UNTIL(store.refreshes >= LOCKS);
  for (int i = 0; i < LOCKS; i++) {
    assert_true(hl_lock_is_held(locks[i]));
    hl_lock_free(locks[i]);
  }
  hl_manager_close(manager);
}

static hl_lock *session_lock(hl_manager *manager) {
  hl_lock *lock;
  assert_int_equal(acquire(manager, 0, false, true, &lock), HL_OK);
  return lock;
}

static void to_lease(hl_lock *lock, int64_t ttl, hl_pending **pending) {
  hl_options options = HL_OPTIONS_INIT;
  options.ttl = ttl;
  store.hangs = true;
  assert_int_equal(hl_lock_start_to_lease(lock, &options, pending, NULL), HL_OK);
  WAIT_UNTIL(store.converts == 1);
}

/* The lock may be a lease already, and end. */
static void what_becomes_a_lease_is_believed_no_longer_than_one(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *lock = session_lock(manager), *none;
  hl_pending *pending;
  to_lease(lock, 100, &pending);
  (void)usleep(150000);
  assert_false(hl_lock_is_held(lock));
  store.fails = HL_ESTORE; /* it is the session lock that it was */
  store.hangs = false;
  assert_int_equal(hl_pending_wait(pending, SOON_MS, &none, NULL), HL_ESTORE);
  hl_pending_free(pending);
  assert_true(hl_lock_remaining(lock) > 10000);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* A lease of a resource for update. */
static hl_lock *update_lease(hl_manager *manager) {
  hl_id ids[3] = {{"u1", 2}, {"a1", 2}, {"r1", 2}};
  hl_options options = HL_OPTIONS_INIT;
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  hl_lock *lock;
  assert_int_equal(hl_plan_add(plan, ids, 3, HL_UPDATE, false, NULL), HL_OK);
  options.ttl = 60000;
  assert_int_equal(hl_acquire(manager, plan, &options, &lock, NULL), HL_OK);
  hl_plan_free(plan);
  return lock;
}

/* The store may have made a downgrade that failed there, so the next one asks again. A downgrade
   that has not come to the store changes nothing. */
static void a_failed_downgrade_is_made_again(void **state) {
  (void)state;
  fake.traits.updates = fake.traits.leases_update = true;
  hl_manager *manager = open_manager();
  hl_lock *lock = update_lease(manager);
  assert_int_equal(hl_lock_upgrade(lock, NULL, NULL), HL_OK);
  store.fails = HL_ESTORE;
  assert_int_equal(hl_lock_downgrade(lock, NULL), HL_ESTORE);
  assert_int_equal(hl_lock_mode(lock), HL_UPDATE);
  assert_int_equal(hl_lock_downgrade(lock, NULL), HL_OK);
  assert_int_equal(store.converts, 3);
  hl_lock_free(lock);
  lock = update_lease(manager);
  assert_int_equal(hl_lock_upgrade(lock, NULL, NULL), HL_OK);
  hl_manager_cancel(manager);
  assert_int_equal(hl_lock_downgrade(lock, NULL), HL_CANCELLED);
  assert_int_equal(hl_lock_mode(lock), HL_EXCLUSIVE);
  assert_int_equal(store.converts, 4);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* The store may make an upgrade that was given up while it was there. */
static void a_downgrade_after_a_cancelled_upgrade_asks(void **state) {
  (void)state;
  hl_pending *pending;
  fake.traits.updates = fake.traits.leases_update = true;
  hl_manager *manager = open_manager();
  hl_lock *lock = update_lease(manager);
  store.hangs = true;
  assert_int_equal(hl_lock_start_upgrade(lock, NULL, &pending, NULL), HL_OK);
  WAIT_UNTIL(store.converts == 1);
  hl_pending_cancel(pending);
  hl_pending_free(pending);
  store.hangs = false;
  WAIT_UNTIL(hl_lock_look(lock) != HL_IN_USE);
  assert_int_equal(hl_lock_mode(lock), HL_UPDATE);
  assert_int_equal(hl_lock_downgrade(lock, NULL), HL_OK);
  assert_int_equal(store.converts, 2);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* The store has made the downgrade, so the lock must not say that it is exclusive. */
static void a_cancelled_downgrade_claims_no_more(void **state) {
  (void)state;
  hl_pending *pending;
  fake.traits.updates = fake.traits.leases_update = true;
  hl_manager *manager = open_manager();
  hl_lock *lock = update_lease(manager);
  assert_int_equal(hl_lock_upgrade(lock, NULL, NULL), HL_OK);
  store.hangs = true;
  assert_int_equal(hl_lock_start_downgrade(lock, &pending, NULL), HL_OK);
  WAIT_UNTIL(store.converts == 2);
  hl_pending_cancel(pending);
  hl_pending_free(pending);
  /* The owner may read the lock, and keep its plan, while the worker commits. */
  const hl_plan *before = hl_lock_plan(lock);
  assert_int_equal(hl_lock_mode(lock), HL_EXCLUSIVE);
  store.hangs = false;
  WAIT_UNTIL(hl_lock_mode(lock) == HL_UPDATE);
  assert_int_equal(hl_plan_mode(before), HL_EXCLUSIVE);
  WAIT_UNTIL(hl_lock_look(lock) != HL_IN_USE);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* The store is not asked for the blockers. */
static void a_started_refresh_that_the_store_has_no_time_for_is_a_timeout(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *lock, *none;
  hl_pending *pending;
  assert_int_equal(acquire(manager, 60000, false, true, &lock), HL_OK);
  store.fails = HL_TIMEOUT;
  assert_int_equal(hl_lock_start_refresh(lock, 0, &pending, NULL), HL_OK);
  assert_int_equal(hl_pending_wait(pending, SOON_MS, &none, NULL), HL_TIMEOUT);
  assert_true(hl_pending_done(pending));
  hl_pending_free(pending);
  assert_true(hl_lock_is_held(lock));
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* Whether it was given up before a worker had come to it, as it is nearly always. */
static bool give_up_to_lease(hl_manager *manager, bool freed) {
  hl_options options = HL_OPTIONS_INIT;
  hl_lock *lock = session_lock(manager);
  hl_pending *pending;
  options.ttl = 60000;
  store.converts = 0;
  assert_int_equal(hl_lock_start_to_lease(lock, &options, &pending, NULL), HL_OK);
  if (freed) {
    hl_lock_free(lock);
    hl_pending_free(pending);
  } else {
    hl_pending_cancel(pending);
    hl_pending_free(pending);
    WAIT_UNTIL(hl_lock_look(lock) != HL_IN_USE);
    if (store.converts == 0) assert_int_equal(hl_lock_kind(lock), HL_SESSION);
    assert_int_equal(hl_lock_look(lock), HL_HELD);
    hl_lock_free(lock);
  }
  hl_stats stats;
  WAIT_UNTIL((hl_manager_stats(manager, &stats), stats.held == 0));
  return store.converts == 0;
}

static void what_was_to_become_a_lease_and_was_given_up_is_a_session(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  for (int freed = 0; freed < 2; freed++) {
    int tries = 0;
    while (!give_up_to_lease(manager, freed)) assert_true(++tries < 1000);
  }
  hl_manager_close(manager);
}

static void *answer_soon(void *nothing) {
  (void)usleep(300000);
  store.hangs = false;
  return nothing;
}

static void what_becomes_a_lease_as_its_manager_ends_is_released(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *lock = session_lock(manager), *none;
  hl_pending *pending;
  pthread_t thread;
  to_lease(lock, 60000, &pending);
  assert_int_equal(pthread_create(&thread, NULL, answer_soon, NULL), 0);
  hl_manager_close(manager); /* waits for the answer */
  /* Or HL_OK, on a machine so busy that it was answered before. */
  (void)hl_pending_wait(pending, SOON_MS, &none, NULL);
  (void)pthread_join(thread, NULL);
  assert_int_equal(store.drops, 1);
  hl_pending_free(pending);
  assert_int_equal(hl_lock_look(lock), HL_RELEASED);
  hl_lock_free(lock);
}

/* Options as a program passes them that was compiled before there were leases. */
static void options_without_leases_ask_for_a_session(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  struct {
    size_t size;
    int64_t timeout;
    const char *label;
    size_t label_size;
  } before = {sizeof before, 0, NULL, 0};
  hl_id id = {"u1", 2};
  hl_lock *lock;
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  assert_int_equal(hl_plan_add(plan, &id, 1, HL_EXCLUSIVE, false, NULL), HL_OK);
  assert_int_equal(hl_acquire(manager, plan, (const hl_options *)(void *)&before, &lock, NULL),
                   HL_OK);
  assert_int_equal(hl_lock_kind(lock), HL_SESSION);
  hl_lock_free(lock);
  hl_plan_free(plan);
  hl_manager_close(manager);
}

/* ------------------------------------------------------------- the records */

static char directory[64];
static hl_layout *layout;
static hl_dsn dsn;
static hl_store_config config;
static const hl_store_ops *const file = &hl_store_file;

static hl_store *file_new(void) {
  hl_store *made;
  config.pid = getpid();
  assert_int_equal(file->open(&config, &made, NULL), HL_OK);
  return made;
}

static hl_session *session_new(hl_store *from) {
  hl_session *made;
  assert_int_equal(file->session_open(from, HL_FOREVER, &made, NULL), HL_OK);
  return made;
}

static hl_lease_terms terms_of(uint8_t name, int64_t ttl) {
  hl_lease_terms terms = {.ttl = ttl, .owner = "owner"};
  memset(terms.id, name, sizeof terms.id);
  memset(terms.secret, name + 1, sizeof terms.secret);
  memset(terms.holder, name + 2, sizeof terms.holder);
  return terms;
}

/* Rows: three records. A sanitizer's code has ten times as many instructions. ThreadSanitizer's
   code has more, and here it has nothing to find: there is one thread. */
#if defined(__SANITIZE_THREAD__)
#define TRACES 0
#else
#define TRACES 1
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum {
  MANY = 66
};
#else
enum {
  MANY = 130
};
#endif

/* terms: NULL for a session. */
static int take_rows(hl_session *session, uint32_t first, size_t n, const hl_lease_terms *terms) {
  hl_row rows[MANY];
  hl_grant grant = {0};
  for (size_t i = 0; i < n; i++)
    rows[i] = (hl_row){.level = 2, .bucket = first + i, .mode = HL_EXCLUSIVE};
  hl_request request = {.rows = rows,
                        .n = n,
                        .recorded = rows,
                        .recorded_n = n,
                        .try_once = true,
                        .path = "u1/a1",
                        .mode = HL_EXCLUSIVE,
                        .lease = terms};
  return file->take(session, &request, &grant, NULL);
}

static void count(void *context, const hl_holder *holder) {
  (void)holder;
  ++*(unsigned *)context;
}

static unsigned leases(hl_session *session) {
  const hl_lease_filter all = {0};
  unsigned n = 0;
  assert_int_equal(session->store->leases->list(session, &all, count, &n, 0, NULL), HL_OK);
  return n;
}

static int64_t soon(void) { return hl__now_ms() + SOON_MS; }

static int drop(hl_session *session, const hl_lease_terms *terms) {
  return session->store->leases->drop(session, terms, true, soon(), NULL);
}

/* Checks the values that follow from the records: chains, counts, the free ones. */
HL__UNCHECKED static void check_ledger(hl_session *session) {
  hl__ledger *ledger = ((hl__file_session *)(void *)session)->space->ledger;
  uint64_t counts[HL__FILE_STRIPES] = {0};
  uint32_t rows = 0, found = 0, free_ones = 0, not_free = 0;
  assert_int_equal(hl__ledger_take(ledger, true, soon(), NULL), HL_OK);
  for (uint32_t i = 0; i < ledger->records; i++) {
    const hl__ledger_record *record = hl__ledger_record_at(ledger, i);
    uint32_t is = atomic_load(&record->state);
    if (is != HL__LEDGER_FREE) not_free++;
    if (is != HL__LEDGER_LIVE && is != HL__LEDGER_REST) continue;
    rows += record->row_count;
    for (uint32_t j = 0; j < record->row_count; j++)
      counts[hl__file_stripe_of(hl__file_hash(record->rows[j].level, record->rows[j].bucket))] +=
          record->rows[j].mode == HL_SHARED ? 1 : UINT64_C(1) << 32;
  }
  for (uint32_t i = 0; i < HL__FILE_STRIPES; i++) {
    assert_int_equal(atomic_load(&ledger->space->control->signals[i].leases), counts[i]);
    for (int mode = HL_SHARED; mode <= HL_EXCLUSIVE; mode++)
      for (uint32_t row = hl__ledger_chain(ledger, i, (hl_mode)mode); row != HL__LEDGER_NONE;
           row = hl__ledger_chain_next(ledger, row)) {
        uint32_t number;
        assert_non_null(hl__ledger_row_at(ledger, row, &number));
        found++;
        assert_true(found <= rows);
      }
  }
  assert_int_equal(found, rows);
  for (uint32_t i = atomic_load(&ledger->header->free); i != HL__LEDGER_NONE;
       i = hl__ledger_record_at(ledger, i)->next) {
    assert_int_equal(atomic_load(&hl__ledger_record_at(ledger, i)->state), HL__LEDGER_FREE);
    free_ones++;
    assert_true(free_ones <= ledger->records);
  }
  assert_int_equal(free_ones + not_free, ledger->records);
  hl__ledger_give(ledger);
}

/* ------------------------------------------------- killed between two writes */

static hl_session *victim;
static hl_lease_terms subject;

static void do_take(void) { (void)take_rows(victim, 1, MANY, &subject); }
static void do_drop(void) { (void)drop(victim, &subject); }
static void do_refresh(void) {
  int64_t sent;
  (void)victim->store->leases->refresh(victim, &subject, 50000, soon(), &sent, NULL);
}
static void do_revoke(void) {
  const hl_lease_filter filter = {.id = subject.id, .by = "by", .reason = "why"};
  uint64_t n = 0;
  (void)victim->store->leases->revoke(victim, &filter, soon(), &n, NULL);
}
static void do_adopt(void) {
  hl_row rows[MANY];
  hl_grant grant;
  for (size_t i = 0; i < MANY; i++)
    rows[i] = (hl_row){.level = 2, .bucket = 1 + i, .mode = HL_EXCLUSIVE};
  hl_lease_terms other = subject;
  memset(other.holder, 77, sizeof other.holder);
  hl_request request = {.rows = rows, .n = MANY, .lease = &other, .deadline = soon()};
  (void)victim->store->leases->adopt(victim, &request, &grant, NULL);
}

static void do_convert(void) {
  hl_row rows[MANY];
  hl_grant grant = {0};
  for (size_t i = 0; i < MANY; i++)
    rows[i] = (hl_row){.level = 2, .bucket = 1 + i, .mode = HL_SHARED};
  hl_request request = {
      .rows = rows, .n = MANY, .lease = &subject, .mode = HL_UPDATE, .deadline = soon()};
  (void)victim->store->leases->convert(victim, &request, &grant, NULL);
}

/* The part of the records that processes share: where it is mapped here, its contents before the
   action, and its former contents. */
typedef struct region {
  uint8_t *data, *begin, *shadow;
  size_t size;
} region;

/* A changed line of a region. */
typedef struct change {
  uint8_t *at;
  uint8_t line[64];
} change;

static change *changes;
static size_t change_count;

/* Notes the changes since the call before. Returns how many lines. */
static size_t note(region *it) {
  size_t before = change_count;
  if (memcmp(it->data, it->shadow, it->size) == 0) return 0;
  for (size_t i = 0; i < it->size; i += 64) {
    if (memcmp(it->data + i, it->shadow + i, 64) == 0) continue;
    changes = realloc(changes, (change_count + 1) * sizeof *changes);
    assert_non_null(changes);
    changes[change_count].at = it->data + i;
    memcpy(changes[change_count++].line, it->data + i, 64);
    memcpy(it->shadow + i, it->data + i, 64);
  }
  return change_count - before;
}

/* Does it in another process, one instruction after the other, and notes each change. That process
   opens the files of all rows before: each instruction that it is watched at takes 40 us. */
static void watch(void (*action)(void), region *regions) {
  int status;
  pid_t pid = fork();
  assert_true(pid >= 0);
  if (pid == 0) {
    victim = session_new(file_new());
    if (take_rows(victim, 1, MANY, NULL) == HL_OK) (void)file->give_back(victim, NULL);
    (void)ptrace(PTRACE_TRACEME, 0, NULL, NULL);
    (void)raise(SIGSTOP);
    action();
    (void)raise(SIGSTOP);
    _exit(0);
  }
  assert_int_equal(waitpid(pid, &status, 0), pid);
  for (int i = 0; i < 2; i++) {
    memcpy(regions[i].begin, regions[i].data, regions[i].size);
    memcpy(regions[i].shadow, regions[i].data, regions[i].size);
  }
  change_count = 0;
  do {
    assert_true(WIFSTOPPED(status));
    size_t n = note(&regions[0]) + note(&regions[1]);
    assert_true(n <= 2); /* one instruction writes no more */
    assert_int_equal(ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
  } while (WIFSTOPPED(status) && WSTOPSIG(status) == SIGTRAP);
  assert_int_equal(kill(pid, SIGKILL), 0);
  assert_int_equal(waitpid(pid, &status, 0), pid);
}

/* Tests what a process leaves behind that is killed in the action: once behind each of its
   writes. */
HL__UNCHECKED static void killed_anywhere(void (*action)(void), bool before, bool may_go) {
  if (!TRACES) skip();
  hl_store *own = file_new();
  hl_session *session = session_new(own);
  hl__file_space *space = ((hl__file_session *)(void *)session)->space;
  hl_lease_terms other = terms_of(9, 100000);
  /* So that there is a ledger, and room in it. */
  subject = terms_of(1, 100000);
  assert_int_equal(take_rows(session, 1, MANY, &subject), HL_OK);
  if (!before) assert_int_equal(drop(session, &subject), HL_OK);
  region regions[] = {{(uint8_t *)space->ledger->header, NULL, NULL, space->ledger->size},
                      {(uint8_t *)space->control, NULL, NULL, sizeof *space->control}};
  for (int i = 0; i < 2; i++) {
    regions[i].begin = malloc(regions[i].size);
    regions[i].shadow = malloc(regions[i].size);
    assert_true(regions[i].begin && regions[i].shadow);
  }
  watch(action, regions);
  assert_true(change_count > 0);
  for (size_t n = 0; n <= change_count; n++) {
    for (int i = 0; i < 2; i++) memcpy(regions[i].data, regions[i].begin, regions[i].size);
    for (size_t i = 0; i < n; i++) memcpy(changes[i].at, changes[i].line, 64);
    check_ledger(session);
    unsigned there = leases(session);
    assert_true(there == 1 || (may_go && there == 0));
    int status = take_rows(session, MANY, 1, &other);
    assert_int_equal(status, there ? HL_TIMEOUT : HL_OK);
    if (there) {
      uint64_t revoked = 0;
      const hl_lease_filter filter = {.id = subject.id, .by = "x", .reason = ""};
      assert_int_equal(own->leases->revoke(session, &filter, soon(), &revoked, NULL), HL_OK);
      assert_int_equal(revoked, 1);
      assert_int_equal(drop(session, &subject), HL_ELOST);
      status = take_rows(session, 1, MANY, &other);
    }
    assert_int_equal(status, HL_OK);
    assert_int_equal(drop(session, &other), HL_OK);
    check_ledger(session);
  }
  for (int i = 0; i < 2; i++) free(regions[i].begin), free(regions[i].shadow);
  free(changes);
  changes = NULL;
  change_count = 0;
  file->session_close(session);
  file->close(own);
}

static void a_process_killed_while_it_takes_one_leaves_it_whole_or_not(void **s) {
  (void)s;
  killed_anywhere(do_take, false, true);
}
static void a_process_killed_while_it_drops_one_leaves_it_whole_or_not(void **s) {
  (void)s;
  killed_anywhere(do_drop, true, true);
}
static void a_process_killed_while_it_revokes_one_leaves_it_whole_or_not(void **s) {
  (void)s;
  killed_anywhere(do_revoke, true, true);
}
static void a_process_killed_while_it_refreshes_one_leaves_it(void **s) {
  (void)s;
  killed_anywhere(do_refresh, true, false);
}
static void a_process_killed_while_it_adopts_one_leaves_it(void **s) {
  (void)s;
  killed_anywhere(do_adopt, true, false);
}

static void a_process_killed_while_it_shares_one_leaves_it(void **s) {
  (void)s;
  killed_anywhere(do_convert, true, false);
}

/* --------------------------------------------------------- other times, others */

static hl__ledger *ledger_of(hl_session *session) {
  return ((hl__file_session *)(void *)session)->space->ledger;
}

HL__UNCHECKED static hl__ledger_record *first_record(hl_session *session) {
  hl__ledger *ledger = ((hl__file_session *)(void *)session)->space->ledger;
  for (uint32_t i = 0; i < ledger->records; i++)
    if (atomic_load(&hl__ledger_record_at(ledger, i)->state) == HL__LEDGER_LIVE)
      return hl__ledger_record_at(ledger, i);
  return NULL;
}

/* A lease's end by the clock of one boot means nothing in another boot. */
static void after_a_reboot_the_wall_clock_counts(void **state) {
  (void)state;
  hl_store *own = file_new();
  hl_session *session = session_new(own);
  hl_lease_terms one = terms_of(1, 100000), two = terms_of(5, 100000);
  int64_t sent;
  assert_int_equal(take_rows(session, 1, 1, &one), HL_OK);
  hl__ledger_record *record = first_record(session);
  atomic_store(&record->boot[0], 1u);
  atomic_store(&record->end, 0);
  assert_int_equal(take_rows(session, 1, 1, &two), HL_TIMEOUT);
  assert_int_equal(leases(session), 1);
  /* Over, but there: it is its holder's, and of this boot again. */
  atomic_store(&record->end_unix, hl__unix_ms() - 1);
  atomic_store(&record->end, INT64_MAX);
  assert_int_equal(leases(session), 0);
  assert_int_equal(own->leases->refresh(session, &one, 100000, soon(), &sent, NULL), HL_OK);
  atomic_store(&record->end_unix, 0);
  assert_int_equal(take_rows(session, 1, 1, &two), HL_TIMEOUT);
  atomic_store(&record->boot[1], 7u);
  assert_int_equal(take_rows(session, 1, 1, &two), HL_OK);
  assert_int_equal(drop(session, &one), HL_ELOST);
  assert_int_equal(drop(session, &two), HL_OK);
  file->session_close(session);
  file->close(own);
}

/* A power failure may have kept one of the two files as it was then, and the other as it was
   before. */
HL__UNCHECKED static void after_a_reboot_the_counts_are_made_anew(void **state) {
  (void)state;
  hl_store *own = file_new();
  hl_session *session = session_new(own);
  hl_lease_terms one = terms_of(1, 100000);
  assert_int_equal(take_rows(session, 1, 1, &one), HL_OK);
  hl__file_space *space = ((hl__file_session *)(void *)session)->space;
  first_record(session)->boot[0] = 1;
  for (uint32_t i = 0; i < HL__FILE_STRIPES; i++)
    atomic_store(&space->control->signals[i].leases, 0u);
  memset(ledger_of(session)->header->boot, 1, 16);
  file->session_close(session);
  file->close(own);
  own = file_new();
  session = session_new(own);
  assert_int_equal(take_rows(session, 1, 1, NULL), HL_TIMEOUT);
  check_ledger(session);
  file->session_close(session);
  file->close(own);
}

static void who_does_not_know_the_secret_takes_nothing_over(void **state) {
  (void)state;
  hl_store *own = file_new();
  hl_session *session = session_new(own);
  hl_lease_terms one = terms_of(1, 100000), forged = one;
  hl_row rows[2] = {{.level = 2, .bucket = 1, .mode = HL_EXCLUSIVE},
                    {.level = 2, .bucket = 2, .mode = HL_EXCLUSIVE}};
  hl_grant grant;
  hl_request request = {.rows = rows, .n = 1, .lease = &forged, .deadline = soon()};
  assert_int_equal(take_rows(session, 1, 1, &one), HL_OK);
  memset(forged.holder, 33, sizeof forged.holder);
  forged.secret[15] ^= 1;
  assert_int_equal(own->leases->adopt(session, &request, &grant, NULL), HL_ELOST);
  forged.secret[15] ^= 1;
  request.n = 2; /* nor does a caller that knows it get rows that it does not lock */
  assert_int_equal(own->leases->adopt(session, &request, &grant, NULL), HL_EMISMATCH);
  request.n = 1;
  rows[0].mode = HL_SHARED;
  assert_int_equal(own->leases->adopt(session, &request, &grant, NULL), HL_EMISMATCH);
  rows[0].mode = HL_EXCLUSIVE;
  assert_int_equal(own->leases->adopt(session, &request, &grant, NULL), HL_OK);
  assert_int_equal(drop(session, &one), HL_ELOST);
  assert_int_equal(drop(session, &forged), HL_OK);
  file->session_close(session);
  file->close(own);
}

/* Any bytes in it cause no crash and no hang; a record that is no lease keeps no request out. */
HL__UNCHECKED static void nonsense_in_the_file_is_not_believed(void **state) {
  (void)state;
  srand(4711);
  for (int round = 0; round < 300; round++) {
    hl_store *own = file_new();
    hl_session *session = session_new(own);
    hl__ledger *ledger = ((hl__file_session *)(void *)session)->space->ledger;
    hl_lease_terms one = terms_of(1, 100000), two = terms_of(5, 100000);
    (void)take_rows(session, 1, MANY, &one);
    if (ledger->header) {
      for (int i = 0; i < 40; i++) {
        size_t at = offsetof(hl__ledger_header, changing) +
                    (size_t)rand() % (ledger->size - offsetof(hl__ledger_header, changing) - 8);
        if (round % 2)
          at = HL__LEDGER_CHUNK + (size_t)rand() % (ledger->size - HL__LEDGER_CHUNK - 8);
        uint32_t value = rand() % 3 ? (uint32_t)rand() % 200 : (uint32_t)rand();
        if (at / 4 * 4 == offsetof(hl__ledger_header, records)) continue;
        memcpy((char *)ledger->header + at / 4 * 4, &value, 4);
      }
      (void)take_rows(session, 1, 3, &two);
      (void)take_rows(session, 60, MANY / 2, &two);
      (void)leases(session);
      (void)drop(session, &two);
      (void)drop(session, &one);
      uint64_t n = 0;
      const hl_lease_filter all = {.by = "x", .reason = "y"};
      (void)own->leases->revoke(session, &all, soon(), &n, NULL);
      assert_int_equal(hl__ledger_take(ledger, false, soon(), NULL), HL_OK);
      for (uint32_t i = 0; i < ledger->records; i++)
        atomic_store(&hl__ledger_record_at(ledger, i)->state, HL__LEDGER_FREE);
      hl__ledger_mend(ledger);
      hl__ledger_give(ledger);
      check_ledger(session);
      assert_int_equal(take_rows(session, 1, MANY, &two), HL_OK);
      assert_int_equal(drop(session, &two), HL_OK);
    }
    file->session_close(session);
    file->close(own);
  }
}

static void a_file_that_was_cut_or_removed_is_an_error(void **state) {
  (void)state;
  char name[128], command[256];
  hl_error error;
  hl_lease_terms one = terms_of(1, 100000), two = terms_of(5, 100000);
  (void)snprintf(name, sizeof name, "%s/" HL__FILE_LEDGER, directory);
  for (int i = 0; i < 3; i++) {
    hl_store *own = file_new();
    hl_session *session = session_new(own);
    assert_int_equal(take_rows(session, 1, 1, &one), HL_OK);
    if (i == 0) assert_int_equal(truncate(name, 70000), 0);
    if (i == 1) assert_int_equal(truncate(name, 10), 0);
    if (i == 2) assert_int_equal(unlink(name), 0);
    /* Rows on which there is no lease are as they were. */
    assert_int_equal(take_rows(session, 70000, 1, NULL), HL_OK);
    assert_int_equal(file->give_back(session, NULL), HL_OK);
    assert_int_equal(own->leases->drop(session, &one, true, soon(), &error), HL_ESTORE);
    assert_non_null(strstr(error.message, HL__FILE_LEDGER));
    assert_int_equal(take_rows(session, 1, 1, NULL), HL_ESTORE);
    assert_int_equal(take_rows(session, 80000, 1, &two), HL_ESTORE);
    file->session_close(session);
    file->close(own);
    own = file_new();
    session = session_new(own);
    assert_int_equal(take_rows(session, 1, 1, NULL), HL_ESTORE);
    file->session_close(session);
    file->close(own);
    (void)snprintf(command, sizeof command, "rm -rf %s", directory);
    assert_int_equal(system(command), 0);
  }
}

/* The rest of a revoked lease does not stay for ever; nor does the file grow for released ones. */
static void records_are_used_again(void **state) {
  (void)state;
  hl_store *own = file_new();
  hl_session *session = session_new(own);
  hl__ledger *ledger = ((hl__file_session *)(void *)session)->space->ledger;
  for (int i = 0; i < 500; i++) {
    hl_lease_terms one = terms_of(1, 100000);
    assert_int_equal(take_rows(session, 1, MANY, &one), HL_OK);
    if (i % 2) {
      uint64_t n = 0;
      const hl_lease_filter filter = {.id = one.id, .by = "", .reason = ""};
      hl__ledger_record *record = first_record(session);
      assert_int_equal(own->leases->revoke(session, &filter, soon(), &n, NULL), HL_OK);
      atomic_store(&record->boot[0], 1u);
      atomic_store(&record->end_unix, 1);
      memset(record->id, 99, sizeof record->id);
    } else {
      assert_int_equal(drop(session, &one), HL_OK);
    }
  }
  assert_true(ledger->size <= HL__LEDGER_CHUNK * 2);
  check_ledger(session);
  file->session_close(session);
  file->close(own);
}

/* Leases that no caller refreshes, releases or wants do not fill the disk. */
HL__UNCHECKED static void records_of_what_was_over_long_ago_are_used_again(void **state) {
  (void)state;
  hl_store *own = file_new();
  hl_session *session = session_new(own);
  hl__ledger *ledger = ((hl__file_session *)(void *)session)->space->ledger;
  for (unsigned i = 0; i < 500; i++) {
    hl_lease_terms one = terms_of(1, 100000);
    assert_int_equal(take_rows(session, 1 + i * MANY, MANY, &one), HL_OK);
    for (uint32_t j = 0; j < ledger->records; j++) {
      hl__ledger_record *record = hl__ledger_record_at(ledger, j);
      if (atomic_load(&record->state) != HL__LEDGER_LIVE ||
          atomic_exchange(&record->boot[0], 1u) == 1)
        continue;
      /* A lease whose time has been up for a moment stays, as does a lease that is not over. */
      int64_t ends = i == 3 ? hl__unix_ms() - 1 : i == 5 ? INT64_MAX : 1;
      atomic_store(&record->end_unix, ends);
      if (i == 3) memset(record->id, 77, sizeof record->id);
    }
  }
  hl_lease_terms kept = terms_of(1, 100000);
  int64_t sent;
  memset(kept.id, 77, sizeof kept.id);
  assert_int_equal(own->leases->refresh(session, &kept, 100000, soon(), &sent, NULL), HL_OK);
  assert_true(ledger->size <= HL__LEDGER_CHUNK * 3);
  check_ledger(session);
  assert_int_equal(take_rows(session, 1 + 5 * MANY, MANY, NULL), HL_TIMEOUT);
  file->session_close(session);
  file->close(own);
}

/* Another process has the ledger, and is stopped. The collector does not wait for it, and
   released locks are not kept until their time is up. */
static void what_is_released_meanwhile_is_free_afterwards(void **state) {
  enum {
    LOCKS = 30
  };
  (void)state;
  char name[128];
  hl_config own = HL_CONFIG_INIT;
  hl_manager *manager;
  hl_lock *locks[LOCKS];
  hl_options options = HL_OPTIONS_INIT;
  (void)snprintf(name, sizeof name, "file:%s", directory);
  own.dsn = name;
  assert_int_equal(hl_manager_open(&own, &manager, NULL), HL_OK);
  options.ttl = HL_TTL_MAX;
  options.auto_release = true;
  hl_plan *plans[LOCKS];
  for (int i = 0; i < LOCKS; i++) {
    char text[8];
    hl_id id = {text, (size_t)snprintf(text, sizeof text, "u%d", i)};
    plans[i] = hl_plan_new(hl_manager_layout(manager));
    assert_int_equal(hl_plan_add(plans[i], &id, 1, HL_EXCLUSIVE, false, NULL), HL_OK);
    assert_int_equal(hl_acquire(manager, plans[i], &options, &locks[i], NULL), HL_OK);
  }
  char path[160];
  (void)snprintf(path, sizeof path, "%s/" HL__FILE_LEDGER, directory);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  struct flock range = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
  assert_int_equal(fcntl(fd, F_OFD_SETLK, &range), 0);
  int64_t begin = hl__now_ms();
  for (int i = 0; i < LOCKS - 1; i++) hl_lock_free(locks[i]);
  assert_true(hl__now_ms() - begin < 2000);
  assert_int_equal(hl_lock_release(locks[LOCKS - 1], false, NULL), HL_OK);
  (void)usleep(1500000);
  (void)close(fd);
  options.timeout = SOON_MS;
  for (int i = 0; i < LOCKS; i++) {
    hl_lock *again;
    assert_int_equal(hl_acquire(manager, plans[i], &options, &again, NULL), HL_OK);
    hl_lock_free(again);
    hl_plan_free(plans[i]);
  }
  hl_lock_free(locks[LOCKS - 1]);
  hl_manager_close(manager);
}

static int file_begins(void **state) {
  (void)state;
  (void)snprintf(directory, sizeof directory, "/dev/shm/hierlock-leases-%ld", (long)getpid());
  dsn = (hl_dsn){.path = directory};
  if (hl_layout_new(NULL, 0, 100000, &layout, NULL)) return -1;
  config = (hl_store_config){.dsn = &dsn, .layout = layout, .application = "test", .host = "here"};
  return 0;
}

static int file_ends(void **state) {
  char command[128];
  (void)state;
  (void)snprintf(command, sizeof command, "rm -rf %s", directory);
  hl_layout_unref(layout);
  return system(command);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_lease_is_counted_from_the_sending),
      cmocka_unit_test(what_was_over_when_it_was_answered_is_given_back),
      cmocka_unit_test(a_refresh_without_an_answer_changes_nothing),
      cmocka_unit_test(a_refresh_that_has_failed_is_made_again_in_time),
      cmocka_unit_test(each_refresh_and_each_try_of_a_grant_is_another),
      cmocka_unit_test(a_release_that_is_refused_keeps_none_behind_it),
      cmocka_unit_test(a_late_refresh_restores_it),
      cmocka_unit_test(the_store_says_who_revoked_it),
      cmocka_unit_test(a_refresh_that_hangs_keeps_nobody_waiting),
      cmocka_unit_test(without_a_ttl_it_is_a_lease_that_is_refreshed),
      cmocka_unit_test(closing_releases_without_a_connection),
      cmocka_unit_test(a_release_is_sent_at_once),
      cmocka_unit_test(a_release_whose_connection_ends_is_made_again),
      cmocka_unit_test(the_end_of_a_manager_releases_what_is_to_be_released),
      cmocka_unit_test(a_shorter_time_counts_before_it_is_answered),
      cmocka_unit_test(the_keeper_keeps_to_the_shorter_time),
      cmocka_unit_test(a_few_workers_refresh_many),
      cmocka_unit_test(what_becomes_a_lease_is_believed_no_longer_than_one),
      cmocka_unit_test(a_failed_downgrade_is_made_again),
      cmocka_unit_test(a_cancelled_downgrade_claims_no_more),
      cmocka_unit_test(a_downgrade_after_a_cancelled_upgrade_asks),
      cmocka_unit_test(a_started_refresh_that_the_store_has_no_time_for_is_a_timeout),
      cmocka_unit_test(what_was_to_become_a_lease_and_was_given_up_is_a_session),
      cmocka_unit_test(what_becomes_a_lease_as_its_manager_ends_is_released),
      cmocka_unit_test(options_without_leases_ask_for_a_session),
#define RECORDS(test) cmocka_unit_test_setup_teardown(test, file_begins, file_ends)
      RECORDS(a_process_killed_while_it_takes_one_leaves_it_whole_or_not),
      RECORDS(a_process_killed_while_it_drops_one_leaves_it_whole_or_not),
      RECORDS(a_process_killed_while_it_revokes_one_leaves_it_whole_or_not),
      RECORDS(a_process_killed_while_it_refreshes_one_leaves_it),
      RECORDS(a_process_killed_while_it_adopts_one_leaves_it),
      RECORDS(a_process_killed_while_it_shares_one_leaves_it),
      RECORDS(after_a_reboot_the_wall_clock_counts),
      RECORDS(after_a_reboot_the_counts_are_made_anew),
      RECORDS(who_does_not_know_the_secret_takes_nothing_over),
      RECORDS(nonsense_in_the_file_is_not_believed),
      RECORDS(a_file_that_was_cut_or_removed_is_an_error),
      RECORDS(records_are_used_again),
      RECORDS(records_of_what_was_over_long_ago_are_used_again),
      RECORDS(what_is_released_meanwhile_is_free_afterwards),
      cmocka_unit_test(nothing_is_left),
  };
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
