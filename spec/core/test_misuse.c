/*
 * test_misuse.c - errors that a program in C may make, and calls by a program that was compiled
 * with another version's header: none crashes, and none is mistaken for something else.
 */
#include "hierlock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "leftovers.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static hl_manager *open_null(void) {
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager;
  config.dsn = "null:";
  assert_int_equal(hl_manager_open(&config, &manager, NULL), HL_OK);
  return manager;
}

static hl_plan *plan_of(hl_manager *manager, const char *user) {
  hl_id id = {user, strlen(user)};
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  assert_int_equal(hl_plan_add(plan, &id, 1, HL_EXCLUSIVE, false, NULL), HL_OK);
  return plan;
}

static void nobody(void *context, const hl_holder *holder) { (void)context, (void)holder; }

static void no_news(uint64_t tag) { (void)tag; }

/* ------------------------------------------------------------------ NULL */

typedef struct outcome {
  const char *call;
  bool good;
} outcome;

#define REFUSED(call)                                                                              \
  { #call, (call) == HL_EMISUSE }
/* For the NULL, and for nothing else that may be wrong with the call. */
#define REFUSED_NULL(call)                                                                         \
  { #call, (call) == HL_EMISUSE &&strstr(error.message, "NULL") }
#define NOTHING(call)                                                                              \
  { #call, !(call) }
#define EMPTY(call)                                                                                \
  { #call, strcmp(call, "") == 0 }
#define ALLOWED(call)                                                                              \
  { #call, ((call), true) }

static void all_good(const outcome *outcomes, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (!outcomes[i].good) fail_msg("%s", outcomes[i].call);
}

/* Each function of hierlock.h with NULL for each of its pointers (spec/structure_spec.lua looks
   whether one is missing). */
static void a_null_that_must_not_be_is_refused(void **state) {
  (void)state;
  hl_manager *manager = open_null(), *other;
  hl_layout *layout = hl_manager_layout(manager), *made;
  hl_plan *plan = plan_of(manager, "u");
  const hl_plan *plans[] = {plan, NULL};
  hl_id ids[HL_LEVELS_MAX] = {{"u", 1}}, no_id = {NULL, 1};
  hl_options options = HL_OPTIONS_INIT;
  hl_filter filter = HL_FILTER_INIT;
  hl_error error;
  hl_lock *lock, *second;
  hl_pending *pending, *none;
  hl_histogram times;
  hl_config config = HL_CONFIG_INIT;
  hl_mode mode;
  size_t n;
  uint64_t count;
  bool first;
  char report[HL_REPORT_SIZE], *text;
  options.agent = hl_agent_new();
  filter.owner = "somebody";
  assert_int_equal(hl_acquire(manager, plan, NULL, &lock, NULL), HL_OK);
  assert_int_equal(hl_start(manager, plan, NULL, &pending, NULL), HL_OK);

  const outcome refused[] = {
      REFUSED_NULL(hl_layout_new(NULL, 0, 0, NULL, &error)),
      REFUSED(hl_layout_new(&(const char *){NULL}, 1, 0, &made, &error)),
      REFUSED_NULL(hl_plan_add(NULL, ids, 1, HL_SHARED, false, &error)),
      REFUSED_NULL(hl_plan_add(plan, NULL, 1, HL_SHARED, false, &error)),
      REFUSED(hl_plan_add(plan, &no_id, 1, HL_SHARED, false, &error)),
      REFUSED_NULL(hl_manager_open(NULL, &other, &error)),
      REFUSED_NULL(hl_manager_open(&config, NULL, &error)),
      REFUSED_NULL(hl_manager_holders(NULL, plan, nobody, NULL, &error)),
      REFUSED_NULL(hl_manager_holders(manager, plan, NULL, NULL, &error)),
      REFUSED_NULL(hl_manager_blockers(NULL, plan, nobody, NULL, &error)),
      REFUSED_NULL(hl_manager_blockers(manager, plan, NULL, NULL, &error)),
      REFUSED_NULL(hl_manager_leases(NULL, &filter, nobody, NULL, &error)),
      REFUSED_NULL(hl_manager_leases(manager, &filter, NULL, NULL, &error)),
      REFUSED_NULL(hl_manager_revoke(NULL, &filter, "", "", &count, &error)),
      REFUSED_NULL(hl_manager_revoke(manager, NULL, "", "", &count, &error)),
      REFUSED_NULL(hl_manager_revoke(manager, &filter, "", "", NULL, &error)),
      REFUSED_NULL(hl_acquire(NULL, plan, NULL, &second, &error)),
      REFUSED_NULL(hl_acquire(manager, NULL, NULL, &second, &error)),
      REFUSED_NULL(hl_acquire(manager, plan, NULL, NULL, &error)),
      REFUSED_NULL(hl_lock_extend(NULL, plan, NULL, &error)),
      REFUSED_NULL(hl_lock_extend(lock, NULL, NULL, &error)),
      REFUSED_NULL(hl_lock_upgrade(NULL, NULL, &error)),
      REFUSED_NULL(hl_lock_downgrade(NULL, &error)),
      REFUSED_NULL(hl_lock_release(NULL, true, &error)),
      REFUSED_NULL(hl_lock_close(NULL, &error)),
      REFUSED_NULL(hl_lock_refresh(NULL, 0, &error)),
      REFUSED_NULL(hl_lock_to_lease(NULL, &options, &error)),
      REFUSED_NULL(hl_lock_to_lease(lock, NULL, &error)),
      REFUSED_NULL(hl_lock_export(NULL, &text, &error)),
      REFUSED_NULL(hl_lock_text(NULL, &text, &error)),
      REFUSED_NULL(hl_lock_text(lock, NULL, &error)),
      REFUSED_NULL(hl_import(NULL, "hl1-", 4, NULL, &second, &error)),
      REFUSED_NULL(hl_import(manager, NULL, 4, NULL, &second, &error)),
      REFUSED_NULL(hl_import(manager, "hl1-", 4, NULL, NULL, &error)),
      REFUSED_NULL(hl_lock_check(NULL, &error)),
      REFUSED_NULL(hl_start(NULL, plan, NULL, &none, &error)),
      REFUSED_NULL(hl_start(manager, NULL, NULL, &none, &error)),
      REFUSED_NULL(hl_start(manager, plan, NULL, NULL, &error)),
      REFUSED_NULL(hl_start_any(NULL, plans, 1, NULL, &none, &error)),
      REFUSED_NULL(hl_start_any(manager, NULL, 1, NULL, &none, &error)),
      REFUSED_NULL(hl_start_any(manager, plans, 2, NULL, &none, &error)),
      REFUSED_NULL(hl_start_any(manager, plans, 1, NULL, NULL, &error)),
      REFUSED_NULL(hl_start_import(NULL, "hl1-", 4, NULL, &none, &error)),
      REFUSED_NULL(hl_start_import(manager, NULL, 4, NULL, &none, &error)),
      REFUSED_NULL(hl_start_import(manager, "hl1-", 4, NULL, NULL, &error)),
      REFUSED_NULL(hl_lock_start_extend(NULL, plan, NULL, &none, &error)),
      REFUSED_NULL(hl_lock_start_extend(lock, NULL, NULL, &none, &error)),
      REFUSED_NULL(hl_lock_start_extend(lock, plan, NULL, NULL, &error)),
      REFUSED_NULL(hl_lock_start_upgrade(NULL, NULL, &none, &error)),
      REFUSED_NULL(hl_lock_start_upgrade(lock, NULL, NULL, &error)),
      REFUSED_NULL(hl_lock_start_downgrade(NULL, &none, &error)),
      REFUSED_NULL(hl_lock_start_downgrade(lock, NULL, &error)),
      REFUSED_NULL(hl_lock_start_check(NULL, &none, &error)),
      REFUSED_NULL(hl_lock_start_check(lock, NULL, &error)),
      REFUSED_NULL(hl_lock_start_release(NULL, &none, &error)),
      REFUSED_NULL(hl_lock_start_release(lock, NULL, &error)),
      REFUSED_NULL(hl_lock_start_refresh(NULL, 0, &none, &error)),
      REFUSED_NULL(hl_lock_start_refresh(lock, 0, NULL, &error)),
      REFUSED_NULL(hl_lock_start_to_lease(NULL, &options, &none, &error)),
      REFUSED_NULL(hl_lock_start_to_lease(lock, NULL, &none, &error)),
      REFUSED_NULL(hl_lock_start_to_lease(lock, &options, NULL, &error)),
      REFUSED_NULL(hl_pending_fd(NULL, &error)),
      REFUSED_NULL(hl_pending_holders(NULL, nobody, NULL, &error)),
      REFUSED_NULL(hl_pending_holders(pending, NULL, NULL, &error)),
      REFUSED_NULL(hl_pending_wait(NULL, 0, &second, &error)),
      REFUSED_NULL(hl_pending_wait(pending, 0, NULL, &error)),
      REFUSED_NULL((hl_lock_loss(NULL, &error), error.status)),
      REFUSED_NULL((hl_dsn_store(NULL, &error), error.status)),
  };
  all_good(refused, sizeof refused / sizeof *refused);

  const outcome nothing[] = {
      NOTHING(hl_mode_named(NULL, &mode)),
      NOTHING(hl_mode_named("shared", NULL)),
      NOTHING(hl_layout_ref(NULL)),
      NOTHING(hl_layout_levels(NULL)),
      NOTHING(hl_layout_buckets(NULL)),
      NOTHING(hl_layout_name(NULL, 0)),
      NOTHING(hl_layout_bucket(NULL, ids, 1)),
      NOTHING(hl_layout_bucket(layout, NULL, 1)),
      NOTHING(hl_plan_new(NULL)),
      NOTHING(hl_plan_copy(NULL)),
      NOTHING(hl_plan_layout(NULL)),
      NOTHING(hl_plan_target_count(NULL)),
      NOTHING(hl_plan_target(NULL, 0, ids).mode),
      NOTHING(hl_plan_target(plan, 0, NULL).mode),
      NOTHING(hl_plan_rows(NULL, &n)),
      NOTHING(hl_plan_rows(plan, NULL)),
      NOTHING(hl_plan_mode(NULL)),
      NOTHING(hl_plan_describe(plan, NULL, 10)),
      EMPTY(hl_plan_describe(NULL, report, sizeof report)),
      NOTHING(hl_plan_sql(NULL, HL_MYSQL, "t")),
      NOTHING(hl_plan_sql(plan, HL_MYSQL, NULL)),
      NOTHING(hl_plan_sql(NULL, HL_POSTGRESQL, NULL)),
      NOTHING(hl_plan_sql_leased(NULL, HL_MYSQL, "t", &n)),
      NOTHING(hl_plan_sql_leased(plan, HL_MYSQL, NULL, &n)),
      NOTHING(hl_plan_sql_leased(plan, HL_MYSQL, "t", NULL)),
      NOTHING(hl_dsn_store(NULL, NULL)),
      NOTHING(hl_manager_layout(NULL)),
      NOTHING(hl_manager_has_unit(NULL, "u", 1)),
      NOTHING(hl_manager_has_unit(manager, NULL, 1)),
      NOTHING(hl_manager_losses(NULL)),
      NOTHING(hl_manager_blocks(NULL)),
      NOTHING(hl_order_check(NULL, plan, &options, report)),
      NOTHING(hl_order_check(manager, NULL, &options, report)),
      NOTHING(hl_order_check(manager, plan, NULL, report)),
      NOTHING(hl_order_check(manager, plan, &options, NULL)),
      NOTHING(hl_units_check(NULL, plan, &options, &first, report)),
      NOTHING(hl_units_check(manager, NULL, &options, &first, report)),
      NOTHING(hl_units_check(manager, plan, NULL, &first, report)),
      NOTHING(hl_units_check(manager, plan, &options, NULL, report)),
      NOTHING(hl_units_check(manager, plan, &options, &first, NULL)),
      NOTHING(hl_lock_is_held(NULL)),
      NOTHING(hl_lock_remaining(NULL)),
      NOTHING(hl_lock_look(NULL) != HL_RELEASED),
      NOTHING(hl_lock_kind(NULL)),
      NOTHING(hl_lock_mode(NULL)),
      NOTHING(hl_lock_level(NULL)),
      NOTHING(hl_lock_waited(NULL)),
      NOTHING(hl_lock_token(NULL)),
      NOTHING(hl_lock_plan(NULL)),
      NOTHING(hl_lock_auto_releases(NULL)),
      EMPTY(hl_lock_where(NULL)),
      NOTHING(hl_pending_done(NULL)),
      NOTHING(hl_pending_plan(NULL)),
      NOTHING(hl_agent_ref(NULL)),
      ALLOWED(hl_plan_clear(NULL)),
      ALLOWED(hl_manager_cancel(NULL)),
      ALLOWED(hl_manager_stats(manager, NULL)),
      ALLOWED(hl_manager_stats(NULL, &(hl_stats){.held = 1})),
      ALLOWED(hl_manager_histograms(NULL, 0, &times, &times)),
      ALLOWED(hl_manager_histograms(manager, 0, NULL, &times)),
      ALLOWED(hl_manager_histograms(manager, 0, &times, NULL)),
      ALLOWED(hl_pending_notify(NULL, no_news, 0)),
      ALLOWED(hl_pending_notify(pending, NULL, 0)),
      ALLOWED(hl_pending_cancel(NULL)),
  };
  all_good(nothing, sizeof nothing / sizeof *nothing);

  /* Calls that the header allows. */
  hl_layout_unref(NULL);
  hl_plan_free(NULL);
  hl_manager_close(NULL);
  hl_agent_unref(NULL);
  hl_lock_free(NULL);
  hl_pending_free(NULL);
  hl_lock_loss(lock, NULL);
  assert_string_equal(hl_dsn_default("null:"), "null:");
  assert_non_null(hl_dsn_default(NULL));
  text = hl_plan_sql(plan, HL_POSTGRESQL, NULL);
  assert_non_null(text);
  free(text);
  assert_int_equal(hl_manager_holders(manager, NULL, nobody, NULL, NULL), HL_OK);
  assert_int_equal(hl_manager_blockers(manager, NULL, nobody, NULL, NULL), HL_OK);
  assert_int_equal(hl_lock_export(lock, NULL, NULL), HL_EUNSUPPORTED);

  /* Nothing of all this has changed anything. */
  assert_true(hl_lock_is_held(lock));
  assert_int_equal(hl_plan_target_count(plan), 1);
  assert_int_equal(hl_pending_wait(pending, 1000, &second, &error), HL_OK);
  hl_lock_free(second);
  hl_lock_free(lock);
  hl_pending_free(pending);
  hl_agent_unref(options.agent);
  hl_plan_free(plan);
  hl_manager_close(manager);
}

/* --------------------------------------------------------------- numbers */

static void what_is_no_mode_dialect_or_bound_is_refused(void **state) {
  static const int no_modes[] = {0, 4, 7, 130, 259, -1, INT_MAX, INT_MIN};
  (void)state;
  hl_manager *manager = open_null();
  hl_layout *layout = hl_manager_layout(manager);
  hl_plan *plan = plan_of(manager, "u");
  hl_id ids[HL_LEVELS_MAX + 1] = {{"v", 1}, {"w", 1}, {"x", 1}, {"y", 1}};
  hl_error error;
  size_t gates;
  for (size_t i = 0; i < sizeof no_modes / sizeof *no_modes; i++) {
    hl_mode mode = (hl_mode)no_modes[i];
    assert_int_equal(hl_plan_add(plan, ids, 1, mode, false, &error), HL_EMISUSE);
    assert_non_null(strstr(error.message, "no mode"));
    assert_string_equal(hl_mode_name(mode), "");
  }
  assert_int_equal(hl_plan_target_count(plan), 1);
  for (int mode = HL_SHARED; mode <= HL_UPDATE; mode++) {
    hl_mode found;
    assert_true(hl_mode_named(hl_mode_name((hl_mode)mode), &found));
    assert_int_equal(found, mode);
  }
  for (int dialect = -1; dialect < 10; dialect++) {
    bool known = dialect >= HL_MYSQL && dialect <= HL_POSTGRESQL;
    char *sql = hl_plan_sql(plan, (hl_dialect)dialect, "t");
    assert_int_equal(sql != NULL, known);
    free(sql);
    sql = hl_plan_sql_leased(plan, (hl_dialect)dialect, "t", &gates);
    assert_int_equal(sql != NULL, known && dialect != HL_POSTGRESQL);
    assert_int_equal(gates, sql != NULL);
    free(sql);
  }
  assert_int_equal(hl_histogram_bound_us(0), 100);
  for (unsigned i = 1; i < HL_HISTOGRAM_BOUNDS; i++)
    assert_true(hl_histogram_bound_us(i) > hl_histogram_bound_us(i - 1));
  assert_true(hl_histogram_bound_us(HL_HISTOGRAM_BOUNDS) == INT64_MAX);
  assert_true(hl_histogram_bound_us(UINT_MAX) == INT64_MAX);
  assert_int_equal(hl_layout_bucket(layout, ids, 0), 0);
  assert_int_equal(hl_layout_bucket(layout, ids, 4), 0);
  assert_int_equal(hl_plan_target(plan, 1, ids).mode, 0);
  assert_string_equal(hl_version(), HL_VERSION);
  hl_plan_free(plan);
  hl_manager_close(manager);
}

/* ----------------------------------------------------------------- sizes */

#define MORE 64 /* bytes that a later version might have */

/* A size that ends in the middle of a pointer would have half of it read. */
static void a_size_that_no_version_has_is_refused(void **state) {
  (void)state;
  union {
    hl_config config;
    hl_options options;
    hl_filter filter;
    char bytes[sizeof(hl_options) + sizeof(hl_config) + MORE];
  } given;
  hl_manager *manager = open_null(), *other;
  hl_plan *plan = plan_of(manager, "u");
  hl_lock *lock;
  for (size_t size = 0; size <= sizeof given; size++) {
    bool whole = size % sizeof(void *) == 0;
    memset(&given, 0, sizeof given);
    given.config = (hl_config)HL_CONFIG_INIT;
    given.config.dsn = "null:";
    given.config.size = size;
    bool good = whole && size >= offsetof(hl_config, interoperate);
    assert_int_equal(hl_manager_open(&given.config, &other, NULL), good ? HL_OK : HL_EMISUSE);
    hl_manager_close(other);

    memset(&given, 0, sizeof given);
    given.options = (hl_options)HL_OPTIONS_INIT;
    given.options.size = size;
    good = whole && size >= offsetof(hl_options, ttl);
    assert_int_equal(hl_acquire(manager, plan, &given.options, &lock, NULL),
                     good ? HL_OK : HL_EMISUSE);
    hl_lock_free(lock);

    memset(&given, 0, sizeof given);
    given.filter = (hl_filter)HL_FILTER_INIT;
    given.filter.size = size;
    good = whole && size >= sizeof(hl_filter);
    assert_int_equal(hl_manager_leases(manager, &given.filter, nobody, NULL, NULL),
                     good ? HL_EUNSUPPORTED : HL_EMISUSE);
  }
  given.options = (hl_options)HL_OPTIONS_INIT;
  given.options.size = SIZE_MAX - sizeof(void *) + 1;
  assert_int_equal(hl_acquire(manager, plan, &given.options, &lock, NULL), HL_EMISUSE);
  hl_plan_free(plan);
  hl_manager_close(manager);
}

/* A program with options that end before what a check asks for does not have it written. */
static void options_of_before_ask_for_no_check(void **state) {
  (void)state;
  hl_manager *manager = open_null();
  hl_plan *plan = plan_of(manager, "u");
  hl_options options = HL_OPTIONS_INIT;
  char report[HL_REPORT_SIZE];
  bool first = true;
  options.agent = hl_agent_new();
  options.size = offsetof(hl_options, kinds);
  assert_false(hl_order_check(manager, plan, &options, report));
  assert_false(hl_units_check(manager, plan, &options, &first, report));
  assert_false(first);
  assert_int_equal(options.kinds, 0);
  options.size = sizeof options;
  assert_false(hl_order_check(manager, plan, &options, report));
  assert_true(options.kinds != 0);
  hl_agent_unref(options.agent);
  hl_plan_free(plan);
  hl_manager_close(manager);
}

/* A later version's fields are there, and 0. */
static void what_is_reserved_is_zero(void **state) {
  (void)state;
  static const uint64_t none[32] = {0};
  hl_manager *manager = open_null();
  hl_error error;
  hl_stats stats;
  memset(&error, 0xA5, sizeof error);
  memset(&stats, 0xA5, sizeof stats);
  assert_int_equal(hl_acquire(NULL, NULL, NULL, NULL, &error), HL_EMISUSE);
  assert_non_null(strstr(error.message, "hl_acquire"));
  assert_memory_equal(error.reserved, none, sizeof error.reserved);
  hl_manager_stats(manager, &stats);
  assert_memory_equal(stats.reserved, none, sizeof stats.reserved);
  hl_manager_close(manager);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_null_that_must_not_be_is_refused),
      cmocka_unit_test(what_is_no_mode_dialect_or_bound_is_refused),
      cmocka_unit_test(a_size_that_no_version_has_is_refused),
      cmocka_unit_test(options_of_before_ask_for_no_check),
      cmocka_unit_test(what_is_reserved_is_zero),
      cmocka_unit_test(nothing_is_left),
  };
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
