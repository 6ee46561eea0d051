/*
 * test_leases.c - the core's belief about a lease: the store is a script of this program, which
 * answers when it is told to.
 */
#include "hierlock.h"
#include "clock.h"
#include "error.h"
#include "record.h"
#include "store.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "leftovers.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---------------------------------------------------------------- a script */

static struct {
  atomic_int grant_age;   /* ms: as if it had been sent so much earlier */
  atomic_int refresh_age; /* likewise */
  atomic_bool hangs;      /* a refresh is not answered as long as this */
  atomic_int fails;       /* the status of the next refresh; 0: it is done */
  atomic_int repeats;     /* how many more conversions fail so */
  atomic_int left;        /* what a look says */
  atomic_bool gone;       /* a drop finds no record */
  atomic_bool keeps;      /* a drop is not answered as long as this */
  atomic_int kept;        /* so many drops were not answered at once */
  atomic_bool cut;        /* the next drop is carried out, and not answered */
  atomic_bool stuck;      /* the next drop is carried out, and answered by an interruption alone */
  atomic_int refreshes, drops, converts, opened, closed, stale;
  atomic_llong drop_by[2]; /* the deadlines of the first drops */
  uint8_t refused[16];     /* the id of a lease that is not dropped */
  atomic_int unanswered;   /* so many grants are recorded, and not answered */
  hl_lease_terms asked[4]; /* of the grants */
  hl_lease_terms convert;  /* of the last conversion; the next fields are what it says of a grant */
  hl_grant grant_before, grant_after;
  atomic_int takes, looks;
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

static void fake_session_close(hl_session *self) {
  atomic_fetch_add(&store.closed, 1);
  free(self);
}

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

static void fake_interrupt(hl_session *self) {
  (void)self;
  store.stuck = false;
}

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
  (void)self, (void)confirm;
  int nth = atomic_load(&store.drops);
  if (nth < 2) atomic_store(&store.drop_by[nth], deadline);
  if (memcmp(store.refused, nobody, 16) != 0 && memcmp(terms->id, store.refused, 16) == 0)
    return hl__error(error, HL_ESTORE, "as it was told");
  if (store.keeps) store.kept++;
  while (store.keeps) (void)usleep(500);
  bool stuck = store.stuck;
  atomic_fetch_add(&store.drops, 1);
  if (store.cut) {
    store.cut = false;
    store.gone = true;
    return hl__error(error, HL_ECONNECTION, "it was not answered");
  }
  if (stuck) {
    while (store.stuck) (void)usleep(500);
    store.gone = true;
    return hl__error(error, HL_CANCELLED, "it was interrupted");
  }
  return store.gone ? hl__record_check(&(hl__record){.again = terms->again}, error) : HL_OK;
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
  (void)self;
  store.convert = *request->lease;
  store.grant_before = *grant;
  if (store.grant_after.token) *grant = store.grant_after;
  atomic_fetch_add(&store.converts, 1);
  while (store.hangs) (void)usleep(500);
  int status = store.fails;
  if (store.repeats > 0)
    store.repeats--;
  else
    store.fails = 0;
  return status ? hl__error(error, status, "as it was told") : HL_OK;
}

static int fake_adopt(hl_session *self, const hl_request *request, hl_grant *grant,
                      hl_error *error) {
  (void)self, (void)request, (void)grant;
  return hl__error(error, store.fails, "as it was told");
}

static int fake_holders(hl_session *self, const hl_lease_filter *filter, hl_holder_fn fn,
                        void *context, int64_t deadline, hl_error *error) {
  (void)self, (void)filter, (void)fn, (void)context, (void)deadline, (void)error;
  atomic_fetch_add(&store.looks, 1);
  return HL_OK;
}

static const hl_lease_ops fake_leases = {.refresh = fake_refresh,
                                         .adopt = fake_adopt,
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
    .session_open = fake_session_open,
    .session_close = fake_session_close,
    .take = fake_take,
    .give_back = fake_nothing,
    .renew = fake_renew,
    .settle = fake_settle,
    .check = fake_nothing,
    .interrupt = fake_interrupt,
    .holders = fake_holders,
};

static int fake_open(const hl_store_config *config, hl_store **result, hl_error *error) {
  (void)error;
  *result = calloc(1, sizeof **result);
  (*result)->layout = hl_layout_ref(config->layout);
  (*result)->leases = &fake_leases;
  atomic_fetch_add(&stores, 1);
  return HL_OK;
}

#define SOON_MS 10000

static hl_manager *open_with(int64_t hold_timeout, bool only) {
  static const hl_store_ops *const known[] = {&fake, NULL};
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager;
  /* A drop by the manager before this one is no drop of this one's. */
  int64_t end = hl__now_ms() + SOON_MS;
  while (stores > 0 && hl__now_ms() < end) (void)usleep(1000);
  assert_int_equal(stores, 0);
  /* Nor does a worker of that manager look any more. */
  fake.traits.leases_only = fake.traits.drop_sends = only;
  memset(&store, 0, sizeof store);
  config.dsn = "mysql://nobody@nowhere/nothing";
  config.stores = known;
  config.hold_timeout = hold_timeout;
  assert_int_equal(hl_manager_open(&config, &manager, NULL), HL_OK);
  return manager;
}

static hl_manager *open_manager(void) { return open_with(30000, false); }

/* The script has only leases, and sends releases. */
static hl_manager *open_only(int64_t hold_timeout) { return open_with(hold_timeout, true); }

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
  assert_int_equal(hl_lock_refresh(lock, HL_TTL_MAX, NULL), HL_OK);
  assert_int_equal(hl_lock_refresh(lock, HL_TTL_MAX + 1, NULL), HL_EMISUSE);
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

static void *close_in_the_drop(void *manager) {
  while (store.drops == 0) (void)usleep(500);
  (void)usleep(20000);
  hl_manager_close(manager);
  return NULL;
}

static void a_confirmed_release_that_the_close_cuts_off_asks_again(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *lock;
  pthread_t closer;
  assert_int_equal(acquire(manager, 60000, false, false, &lock), HL_OK);
  store.stuck = true;
  assert_int_equal(pthread_create(&closer, NULL, close_in_the_drop, manager), 0);
  assert_int_equal(hl_lock_release(lock, true, NULL), HL_OK);
  assert_int_equal(store.drops, 2);
  /* Both together take no longer than one may. */
  assert_true(store.drop_by[1] <= store.drop_by[0] + 1);
  assert_int_equal(pthread_join(closer, NULL), 0);
  hl_lock_free(lock);
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

static void *close_main(void *manager) {
  hl_manager_close(manager);
  return NULL;
}

static int released; /* what the release said */

static void *release_main(void *lock) {
  released = hl_lock_release(lock, true, NULL);
  return NULL;
}

/* Closes the manager, whose drop of a lease the store keeps; meanwhile releases the lock with
   confirm. Then the store answers: whether it had the record. */
static int release_beside_close(hl_manager *manager, hl_lock *lock, bool had) {
  pthread_t closes, releases;
  store.gone = !had;
  store.keeps = true;
  assert_int_equal(pthread_create(&closes, NULL, close_main, manager), 0);
  WAIT_UNTIL(store.kept == 1);
  assert_int_equal(pthread_create(&releases, NULL, release_main, lock), 0);
  (void)usleep(50000); /* an untrue answer would be here by now */
  store.keeps = false;
  (void)pthread_join(releases, NULL);
  (void)pthread_join(closes, NULL);
  return released;
}

/* While the close waits for the store, it has ended all leases already. */
static void a_confirmed_release_beside_a_close_says_what_the_store_says(void **state) {
  (void)state;
  for (int i = 0; i < 4; i++) {
    bool had = i & 1, own = i & 2; /* the lease that the close releases, or one that it leaves */
    hl_manager *manager = open_manager();
    hl_lock *one, *left;
    assert_int_equal(acquire(manager, 60000, false, true, &one), HL_OK);
    assert_int_equal(acquire(manager, 60000, false, false, &left), HL_OK);
    assert_int_equal(release_beside_close(manager, own ? one : left, had), had ? HL_OK : HL_ELOST);
    assert_int_equal(store.drops, own ? 1 : 2);
    assert_int_equal(hl_lock_look(own ? one : left), HL_RELEASED);
    hl_lock_free(one);
    hl_lock_free(left);
  }
}

/* The store may have carried out a drop whose answer was cut off. */
static void what_a_close_has_dropped_unanswered_is_not_lost(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *lock = lease(manager, 60000);
  store.cut = true;
  hl_manager_close(manager);
  assert_true(store.drops > 1);
  assert_int_equal(hl_lock_look(lock), HL_RELEASED);
  assert_int_equal(hl_lock_release(lock, true, NULL), HL_OK);
  hl_lock_free(lock);
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

/* In a process that can have no thread from the grant on. */
static int drops_without_a_worker(void) {
  hl_manager *manager = open_manager();
  hl_lock *held = lease(manager, 30000);
  if (geteuid() == 0 && setuid(54321) != 0) return -1;
  const struct rlimit none = {.rlim_cur = 1, .rlim_max = 1};
  if (setrlimit(RLIMIT_NPROC, &none) != 0) return -1;
  if (hl_lock_release(held, false, NULL) != HL_OK) return -1;
  return store.drops; /* by this thread */
}

static void a_release_needs_no_worker(void **state) {
  (void)state;
  int status;
  pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) _exit(drops_without_a_worker());
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), 1);
}

static void *answer_main(void *unused) {
  (void)unused;
  (void)usleep(50000);
  store.hangs = false;
  return NULL;
}

/* A refresh of the lock that the store answers only when it is told to. */
static hl_pending *refresh_that_hangs(hl_lock *lock) {
  hl_pending *pending;
  int before = store.refreshes;
  store.hangs = true;
  assert_int_equal(hl_lock_start_refresh(lock, 0, &pending, NULL), HL_OK);
  WAIT_UNTIL(store.refreshes > before);
  return pending;
}

static void a_confirmed_release_asks_behind_a_call_that_was_given_up(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  for (int gone = 0; gone < 2; gone++) {
    hl_lock *lock = lease(manager, 60000);
    hl_pending *pending = refresh_that_hangs(lock);
    pthread_t answers;
    store.gone = gone;
    if (gone) hl_pending_free(pending); /* or the release gives it up */
    assert_int_equal(pthread_create(&answers, NULL, answer_main, NULL), 0);
    assert_int_equal(hl_lock_release(lock, true, NULL), gone ? HL_ELOST : HL_OK);
    assert_int_equal(store.drops, gone + 1);
    (void)pthread_join(answers, NULL);
    if (!gone) hl_pending_free(pending);
    hl_lock_free(lock);
    assert_int_equal(store.drops, gone + 1);
  }
  hl_manager_close(manager);
}

static void a_confirmed_release_asks_behind_a_call_whose_result_waits(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_pending *pending, *releasing;
  hl_lock *first = lease(manager, 60000), *second = lease(manager, 60000), *none;
  store.gone = true;
  assert_int_equal(hl_lock_start_refresh(first, 0, &pending, NULL), HL_OK);
  WAIT_UNTIL(hl_pending_done(pending));
  assert_int_equal(hl_lock_release(first, true, NULL), HL_ELOST);
  hl_pending_free(pending);
  assert_int_equal(hl_lock_start_refresh(second, 0, &pending, NULL), HL_OK);
  WAIT_UNTIL(hl_pending_done(pending));
  assert_int_equal(hl_lock_start_release(second, &releasing, NULL), HL_OK);
  assert_int_equal(hl_pending_wait(releasing, SOON_MS, &none, &(hl_error){0}), HL_ELOST);
  assert_int_equal(store.drops, 2);
  hl_pending_free(releasing);
  hl_pending_free(pending);
  hl_lock_free(first);
  hl_lock_free(second);
  hl_manager_close(manager);
}

/* The call that was given up goes on at the store, and the release follows it. */
static void a_release_that_the_store_has_not_confirmed_says_so(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_error error;
  for (int started = 0; started < 2; started++) {
    hl_lock *lock = lease(manager, started ? 60000 : 2000);
    hl_pending *pending = refresh_that_hangs(lock), *none;
    int status =
        started ? hl_lock_start_release(lock, &none, &error) : hl_lock_release(lock, true, &error);
    assert_int_equal(status, HL_ECONNECTION);
    assert_non_null(strstr(error.message, "released behind it"));
    assert_int_equal(hl_lock_look(lock), HL_RELEASED);
    assert_false(hl_lock_is_held(lock));
    assert_int_equal(store.drops, started);
    store.hangs = false;
    WAIT_UNTIL(store.drops == started + 1);
    assert_int_equal(hl_lock_release(lock, true, NULL), HL_OK); /* the second one does nothing */
    hl_pending_free(pending);
    hl_lock_free(lock);
  }
  hl_manager_close(manager);
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
  enum { LOCKS = 200 };
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

static void no_holder(void *context, const hl_holder *holder) {
  (void)context, (void)holder;
  fail();
}

/* An import waits for no other holder, so its caller is told of none, and the store is not
   asked. */
static void an_import_that_is_not_answered_says_what_the_store_says(void **state) {
  (void)state;
  hl_manager *manager = open_manager();
  hl_lock *lock = lease(manager, 60000), *none;
  hl_options options = HL_OPTIONS_INIT;
  hl_error error;
  char *text;
  options.ttl = 60000;
  assert_int_equal(hl_lock_export(lock, &text, NULL), HL_OK);
  hl_lock_free(lock);
  store.fails = HL_TIMEOUT;
  assert_int_equal(hl_import(manager, text, strlen(text), &options, &none, &error), HL_TIMEOUT);
  assert_string_equal(error.message, "as it was told");

  hl_pending *pending;
  assert_int_equal(hl_start_import(manager, text, strlen(text), &options, &pending, NULL), HL_OK);
  assert_int_equal(hl_pending_wait(pending, SOON_MS, &none, &error), HL_TIMEOUT);
  assert_string_equal(error.message, "as it was told");
  assert_int_equal(hl_pending_holders(pending, no_holder, NULL, &error), HL_OK);
  assert_int_equal(store.looks, 0);
  hl_pending_free(pending);
  free(text);
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

/* The store makes the conversion while the lease is there, and answers when its time is up: another
   program may have its nodes. A refresh tells, and then the store is asked for the mode again. */
static void what_is_converted_too_late_is_lost(void **state) {
  (void)state;
  fake.traits.updates = fake.traits.leases_update = true;
  hl_manager *manager = open_manager();
  hl_lock *lock = update_lease(manager);
  for (int downgrades = 0; downgrades < 2; downgrades++) {
    store.grant_after = (hl_grant){.token = 512, .until_ms = hl__boot_ms()};
    assert_int_equal(downgrades ? hl_lock_downgrade(lock, NULL) : hl_lock_upgrade(lock, NULL, NULL),
                     HL_ELOST);
    assert_int_equal(hl_lock_look(lock), HL_OVER);
    assert_int_equal(hl_lock_refresh(lock, 0, NULL), HL_OK);
    assert_int_equal(hl_lock_mode(lock), HL_UPDATE);
    store.grant_after.until_ms = 0;
    assert_int_equal(hl_lock_downgrade(lock, NULL), HL_OK);
    assert_int_equal(store.converts, downgrades ? 5 : 2);
    if (!downgrades) assert_int_equal(hl_lock_upgrade(lock, NULL, NULL), HL_OK);
  }
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* The place and the token that the store gives are what it is asked with from then on. One that
   changes nothing is not asked for. */
static void what_an_upgrade_is_granted_is_the_lease_s(void **state) {
  (void)state;
  fake.traits.updates = fake.traits.leases_update = true;
  hl_manager *manager = open_manager();
  hl_lock *lock = update_lease(manager);
  uint64_t token = hl_lock_token(lock);
  int opened = store.opened;
  store.grant_after = (hl_grant){.token = 512, .place = 77};
  assert_int_equal(hl_lock_upgrade(lock, NULL, NULL), HL_OK);
  assert_int_equal(hl_lock_upgrade(lock, NULL, NULL), HL_OK);
  assert_int_equal(store.converts, 1);
  assert_int_equal(store.grant_before.token, token);
  assert_int_equal(hl_lock_token(lock), 512);
  /* A downgrade, which does not change the token, may end the lease sooner. */
  store.grant_after.until_ms = hl__boot_ms() + 20000;
  assert_int_equal(hl_lock_downgrade(lock, NULL), HL_OK);
  assert_int_equal(store.convert.place, 77);
  assert_int_equal(store.convert.token, 512);
  assert_in_range(hl_lock_remaining(lock), 1, 20000);
  assert_int_equal(store.opened, opened);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* A store that has no time is asked again as long as there is time. One whose answer was cut off is
   asked once more, on a connection that is made for that. */
static void an_upgrade_is_tried_again(void **state) {
  (void)state;
  hl_error error;
  fake.traits.updates = fake.traits.leases_update = true;
  hl_manager *manager = open_manager();
  hl_lock *lock = update_lease(manager);
  store.fails = HL_TIMEOUT;
  store.repeats = 3;
  assert_int_equal(hl_lock_upgrade(lock, NULL, NULL), HL_OK);
  assert_int_equal(store.converts, 5);
  assert_int_equal(hl_lock_downgrade(lock, NULL), HL_OK);
  int opened = store.opened, closed = store.closed;
  store.fails = HL_ECONNECTION;
  assert_int_equal(hl_lock_upgrade(lock, NULL, NULL), HL_OK);
  assert_int_equal(store.converts, 8);
  assert_true(store.opened > opened);
  assert_true(store.closed > closed); /* that connection */
  assert_int_equal(hl_lock_downgrade(lock, NULL), HL_OK);
  store.fails = HL_ECONNECTION;
  store.repeats = 1;
  assert_int_equal(hl_lock_upgrade(lock, NULL, &error), HL_ECONNECTION);
  assert_string_equal(error.message, "as it was told");
  assert_int_equal(store.converts, 11);
  assert_int_equal(hl_lock_mode(lock), HL_UPDATE);
  assert_true(hl_lock_is_held(lock));
  /* The store may have made the upgrade, so a downgrade asks. */
  assert_int_equal(hl_lock_downgrade(lock, NULL), HL_OK);
  assert_int_equal(store.converts, 12);
  store.fails = HL_ELOST;
  assert_int_equal(hl_lock_upgrade(lock, NULL, NULL), HL_ELOST);
  assert_int_equal(hl_lock_look(lock), HL_LOST);
  assert_int_equal(hl_lock_upgrade(lock, NULL, NULL), HL_ELOST);
  assert_int_equal(store.converts, 13);
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

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_lease_is_counted_from_the_sending),
      cmocka_unit_test(what_was_over_when_it_was_answered_is_given_back),
      cmocka_unit_test(a_confirmed_release_that_the_close_cuts_off_asks_again),
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
      cmocka_unit_test(a_release_needs_no_worker),
      cmocka_unit_test(a_confirmed_release_asks_behind_a_call_that_was_given_up),
      cmocka_unit_test(a_confirmed_release_asks_behind_a_call_whose_result_waits),
      cmocka_unit_test(a_release_that_the_store_has_not_confirmed_says_so),
      cmocka_unit_test(a_release_whose_connection_ends_is_made_again),
      cmocka_unit_test(the_end_of_a_manager_releases_what_is_to_be_released),
      cmocka_unit_test(a_confirmed_release_beside_a_close_says_what_the_store_says),
      cmocka_unit_test(what_a_close_has_dropped_unanswered_is_not_lost),
      cmocka_unit_test(a_shorter_time_counts_before_it_is_answered),
      cmocka_unit_test(the_keeper_keeps_to_the_shorter_time),
      cmocka_unit_test(a_few_workers_refresh_many),
      cmocka_unit_test(what_becomes_a_lease_is_believed_no_longer_than_one),
      cmocka_unit_test(a_failed_downgrade_is_made_again),
      cmocka_unit_test(an_import_that_is_not_answered_says_what_the_store_says),
      cmocka_unit_test(what_is_converted_too_late_is_lost),
      cmocka_unit_test(what_an_upgrade_is_granted_is_the_lease_s),
      cmocka_unit_test(an_upgrade_is_tried_again),
      cmocka_unit_test(a_cancelled_downgrade_claims_no_more),
      cmocka_unit_test(a_downgrade_after_a_cancelled_upgrade_asks),
      cmocka_unit_test(a_started_refresh_that_the_store_has_no_time_for_is_a_timeout),
      cmocka_unit_test(what_was_to_become_a_lease_and_was_given_up_is_a_session),
      cmocka_unit_test(what_becomes_a_lease_as_its_manager_ends_is_released),
      cmocka_unit_test(options_without_leases_ask_for_a_session),
      cmocka_unit_test(nothing_is_left),
  };
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
