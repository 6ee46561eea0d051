/*
 * test_core.c - the core without Lua: layouts, plans, DSNs, errors, and forked children. Also
 * managers and locks on the stores file: and null:, as a program in C uses them; and what MySQL's
 * does with signals.
 */
#include "agent.h"
#include "clock.h"
#include "dsn.h"
#include "hierlock.h"
#include "error.h"
#include "fork.h"
#include "layout.h"
#include "plan.h"
#include "record.h"
#include "store.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "leftovers.h"

static hl_id id(const char *text) { return (hl_id){text, strlen(text)}; }

static hl_layout *layout_of(const char *const *names, unsigned n, uint32_t buckets) {
  hl_layout *layout;
  assert_int_equal(hl_layout_new(names, n, buckets, &layout, NULL), HL_OK);
  return layout;
}

/* Adds user, account, resource; NULL ends. */
static void add(hl_plan *plan, const char *u, const char *a, const char *r, hl_mode mode) {
  hl_id ids[3] = {id(u), a ? id(a) : id(""), r ? id(r) : id("")};
  assert_int_equal(hl_plan_add(plan, ids, r ? 3 : a ? 2 : 1, mode, false, NULL), HL_OK);
}

/* -------------------------------------------------------------- layout */

static void layout_hashes_as_in_the_contract(void **state) {
  (void)state;
  static const uint32_t buckets[] = {3142546, 5156936, 185732};
  hl_layout *layout = layout_of(NULL, 0, 0);
  hl_id ids[3] = {id("u1"), id("a1"), id("r1")};
  for (unsigned n = 1; n <= 3; n++)
    assert_int_equal(hl_layout_bucket(layout, ids, n), buckets[n - 1]);
  ids[2] = id("r2");
  assert_int_equal(hl_layout_bucket(layout, ids, 3), 518589);
  assert_int_equal(hl_layout_levels(layout), 3);
  assert_int_equal(hl_layout_buckets(layout), HL_BUCKETS_DEFAULT);
  assert_string_equal(hl_layout_name(layout, 2), "resource");
  assert_null(hl_layout_name(layout, 3));
  hl_layout_unref(layout);
}

/* The numbers come from another implementation. */
static void layout_without_buckets_has_the_hash_itself(void **state) {
  (void)state;
  static const uint64_t buckets[] = {810262712412770932u, 301773293904552679u, 804619361403833793u,
                                     804622659938718424u};
  hl_layout *wanted = layout_of(NULL, 0, 7), *layout;
  hl_id ids[3] = {id("u1"), id("a1"), id("r1")};
  assert_int_equal(hl__layout_unbucketed(wanted, &layout, NULL), HL_OK);
  hl_layout_unref(wanted);
  assert_int_equal(hl_layout_buckets(layout), 0);
  assert_int_equal(hl_layout_levels(layout), 3);
  for (unsigned n = 1; n <= 3; n++) assert_true(hl_layout_bucket(layout, ids, n) == buckets[n - 1]);
  ids[2] = id("r2");
  assert_true(hl_layout_bucket(layout, ids, 3) == buckets[3]);
  hl_layout_unref(layout);
}

static void layout_refuses_bad_names_and_numbers(void **state) {
  (void)state;
  char long_name[HL_LEVEL_NAME_MAX + 2];
  memset(long_name, 'x', sizeof long_name - 1);
  long_name[sizeof long_name - 1] = '\0';
  const char *bad[] = {"", NULL, "a:b", "a,b", "a\n", long_name};
  hl_layout *layout;
  hl_error error;
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    assert_int_equal(hl_layout_new(&bad[i], 1, 1, &layout, &error), HL_EMISUSE);
    assert_null(layout);
  }
  const char *twice[] = {"a", "b", "a"}, *many[HL_LEVELS_MAX + 1];
  assert_int_equal(hl_layout_new(twice, 3, 1, &layout, &error), HL_EMISUSE);
  for (size_t i = 0; i <= HL_LEVELS_MAX; i++) many[i] = "a";
  assert_int_equal(hl_layout_new(many, HL_LEVELS_MAX + 1, 1, &layout, &error), HL_EMISUSE);
  assert_int_equal(hl_layout_new(many, 0, 1, &layout, &error), HL_EMISUSE);
  assert_int_equal(hl_layout_new(many, 1, 1u << 31, &layout, &error), HL_EMISUSE);
}

/* ---------------------------------------------------------------- plan */

static void plan_orders_and_keeps_the_strongest(void **state) {
  (void)state;
  hl_layout *layout = layout_of(NULL, 0, 0);
  hl_plan *plan = hl_plan_new(layout);
  size_t n;
  add(plan, "u1", "a1", "r2", HL_SHARED);
  add(plan, "u1", "a1", "r1", HL_EXCLUSIVE);
  add(plan, "u1", "a1", NULL, HL_SHARED); /* exclusive: not the deepest */
  add(plan, "u1", "a1", "r1", HL_SHARED);
  const hl_row *rows = hl_plan_rows(plan, &n);
  const hl_row expected[] = {{3142546, 0, HL_SHARED, 0},
                             {5156936, 1, HL_EXCLUSIVE, 0},
                             {185732, 2, HL_EXCLUSIVE, 0},
                             {518589, 2, HL_SHARED, 0}};
  assert_int_equal(n, 4);
  for (size_t i = 0; i < n; i++) {
    assert_int_equal(rows[i].bucket, expected[i].bucket);
    assert_int_equal(rows[i].level, expected[i].level);
    assert_int_equal(rows[i].mode, expected[i].mode);
  }
  assert_int_equal(hl_plan_target_count(plan), 4);
  assert_int_equal(hl_plan_mode(plan), HL_EXCLUSIVE);
  assert_int_equal(hl__plan_level(plan), 2);
  hl_plan_free(plan);
  hl_layout_unref(layout);
}

/* 1 for "u1", 2 for "u1/a1", as a hash that two others share with the latter. */
static uint64_t key_of(const char *name, size_t size) {
  return size == 2 ? 1 : memchr(name, 'r', size) ? 3 : 2;
}

static void plan_has_names_behind_its_nodes(void **state) {
  (void)state;
  const char *const patterns[] = {"{user}", "{user}/{account}", "{resource} of {user}: {resource}",
                                  NULL};
  const hl_id ids[] = {id("u1"), id("a1"), id("r1")};
  hl_layout *plain = layout_of(NULL, 0, 0), *named;
  char name[64];
  for (int i = 0; i < 2; i++) {
    assert_int_equal(hl__layout_named(plain, key_of, i ? patterns : NULL, NULL, &named, NULL),
                     HL_OK);
    const char *expected = i ? "r1 of u1: r1" : "u1/a1/r1";
    assert_int_equal(hl__layout_node_name(named, ids, 3, NULL), strlen(expected));
    assert_int_equal(hl__layout_node_name(named, ids, 3, name), strlen(expected));
    assert_memory_equal(name, expected, strlen(expected));
    assert_int_equal(hl_layout_bucket(named, ids, 3), 185732);

    hl_plan *plan = hl_plan_new(named), *copy;
    add(plan, "u1", "a1", "r1", HL_SHARED);
    add(plan, "u1", "a1", NULL, HL_EXCLUSIVE);
    copy = hl_plan_copy(plan);
    size_t n;
    const hl_row *rows = hl__plan_rows(copy, &n);
    const hl_mode modes[] = {HL_SHARED, HL_EXCLUSIVE, HL_SHARED};
    assert_int_equal(n, 6);
    for (unsigned j = 0; j < 3; j++) {
      assert_int_equal(rows[j].level, j);
      assert_int_equal(rows[j].mode, modes[j]);
      assert_int_equal(rows[3 + j].level, HL_LEVEL_NAMED);
      assert_int_equal(rows[3 + j].mode, modes[j]);
      assert_int_equal(rows[3 + j].bucket, j + 1);
    }
    hl_request request = {.names = hl__plan_names(copy)};
    hl_id last = hl__request_name(&request, &rows[5]);
    assert_int_equal(last.size, strlen(expected));
    assert_memory_equal(last.data, expected, last.size);
    hl_plan_free(copy);
    hl_plan_free(plan);
    hl_layout_unref(named);
  }
  hl_layout_unref(plain);
}

static void names_are_not_those_of_the_store(void **state) {
  (void)state;
  const char *const patterns[] = {"{user}", "{account}:{user}", "{resource}:", NULL};
  hl_layout *plain = layout_of(NULL, 0, 0), *named;
  for (int i = 0; i < 2; i++) {
    hl_error error;
    size_t n, before;
    assert_int_equal(hl__layout_named(plain, key_of, i ? patterns : NULL, "own:", &named, NULL),
                     HL_OK);
    hl_plan *plan = hl_plan_new(named);
    add(plan, "own", "a", "r", HL_SHARED); /* "own/a/r", or "r:" */
    add(plan, "owner", NULL, NULL, HL_SHARED);
    (void)hl_plan_rows(plan, &before);
    hl_id ids[] = {id(i ? "u" : "own:"), id("own"), id("r")};
    assert_int_equal(hl_plan_add(plan, ids, 3, HL_SHARED, false, &error), HL_EMISUSE);
    assert_non_null(strstr(error.message, "'own:'"));
    assert_int_equal(hl_plan_target_count(plan), 2);
    (void)hl_plan_rows(plan, &n);
    assert_int_equal(n, before);
    hl_plan_free(plan);
    hl_layout_unref(named);
  }
  hl_layout_unref(plain);
}

static void names_need_their_own_level(void **state) {
  (void)state;
  static const char *const wrong[][5] = {
      {"{user}", "{account}", NULL},
      {"{user}", "{account}", "{resource}", "{resource}", NULL},
      {"{user}", "{account}", "r", NULL},
      {"{account}", "{account}", "{resource}", NULL},
      {"{user}", "{account", "{resource}", NULL},
      {"", "{account}", "{resource}", NULL},
  };
  hl_layout *plain = layout_of(NULL, 0, 0), *named;
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
    assert_int_equal(hl__layout_named(plain, key_of, wrong[i], NULL, &named, NULL), HL_EMISUSE);
  hl_layout_unref(plain);
}

static void plan_refuses_bad_ids_and_stays_as_it_was(void **state) {
  (void)state;
  static char large[HL_ID_MAX + 1];
  hl_layout *layout = layout_of(NULL, 0, 0);
  hl_plan *plan = hl_plan_new(layout);
  hl_id ids[4] = {id("u"), {large, sizeof large}, id("r"), id("x")};
  assert_int_equal(hl_plan_add(plan, ids, 0, HL_SHARED, false, NULL), HL_EMISUSE);
  assert_int_equal(hl_plan_add(plan, ids, 4, HL_SHARED, false, NULL), HL_EMISUSE);
  assert_int_equal(hl_plan_add(plan, ids, 2, HL_SHARED, false, NULL), HL_EMISUSE);
  ids[1] = id("");
  assert_int_equal(hl_plan_add(plan, ids, 2, HL_SHARED, false, NULL), HL_EMISUSE);
  assert_int_equal(hl_plan_target_count(plan), 0);
  ids[1] = (hl_id){large, HL_ID_MAX};
  assert_int_equal(hl_plan_add(plan, ids, 2, HL_SHARED, true, NULL), HL_OK);
  hl_id got[HL_LEVELS_MAX];
  hl_target target = hl_plan_target(plan, 0, got);
  assert_int_equal(target.level, 1);
  assert_true(target.mode_given);
  assert_int_equal(got[1].size, HL_ID_MAX);
  hl_plan_free(plan);
  hl_layout_unref(layout);
}

static void plan_says_which_rows_are_missing(void **state) {
  (void)state;
  hl_layout *layout = layout_of(NULL, 0, 0);
  hl_plan *held = hl_plan_new(layout), *more = hl_plan_new(layout);
  hl_row missing[16];
  add(held, "u1", "a1", "r1", HL_SHARED);
  add(more, "u1", "a1", "r1", HL_SHARED);
  assert_int_equal(hl__plan_missing(more, held, missing), 0);
  add(more, "u1", "a1", "r1", HL_EXCLUSIVE); /* held, but not so strongly */
  hl__plan_order(more);
  assert_int_equal(hl__plan_missing(more, held, missing), 1);
  assert_int_equal(missing[0].bucket, 185732);
  assert_int_equal(missing[0].mode, HL_EXCLUSIVE);
  add(more, "u1", "a1", "r2", HL_SHARED);
  add(more, "u1", NULL, NULL, HL_EXCLUSIVE);
  hl__plan_order(more);
  assert_int_equal(hl__plan_missing(more, held, missing), 3);
  assert_int_equal(missing[0].level, 0);
  assert_int_equal(hl__plan_missing(held, more, missing), 0);
  uint32_t root = more->rows[0].root;
  assert_true(hl__plan_append(held, more));
  for (size_t i = 0; i < held->row_count; i++) /* one tree's */
    assert_int_equal(held->rows[i].root, root);
  hl__plan_order(held);
  assert_int_equal(hl__plan_missing(more, held, missing), 0);
  assert_int_equal(hl_plan_target_count(held), 5);
  hl_plan_free(held), hl_plan_free(more);
  hl_layout_unref(layout);
}

static void plan_of_ten_thousand_targets(void **state) {
  (void)state;
  enum { N = 10000 };
  hl_layout *layout = layout_of(NULL, 0, 1000000);
  hl_plan *plan = hl_plan_new(layout);
  char text[32];
  size_t n, copied;
  for (int i = N; i > 0; i--) {
    (void)snprintf(text, sizeof text, "r%d", i);
    add(plan, "u1", "a1", text, i % 2 ? HL_SHARED : HL_EXCLUSIVE);
  }
  const hl_plan *copy = hl_plan_copy(plan);
  const hl_row *rows = hl_plan_rows(plan, &n);
  assert_true(n > N - 200 && n <= N + 2);
  for (size_t i = 1; i < n; i++)
    assert_true(rows[i - 1].level < rows[i].level ||
                (rows[i - 1].level == rows[i].level && rows[i - 1].bucket < rows[i].bucket));
  const hl_row *same = hl__plan_rows(copy, &copied);
  assert_int_equal(copied, n);
  for (size_t i = 0; i < n; i++)
    assert_true(same[i].level == rows[i].level && same[i].bucket == rows[i].bucket &&
                same[i].mode == rows[i].mode);
  for (int i = 0; i < N; i += 777) {
    hl_id ids[HL_LEVELS_MAX];
    (void)hl_plan_target(copy, (size_t)i, ids);
    (void)snprintf(text, sizeof text, "r%d", N - i);
    assert_int_equal(ids[2].size, strlen(text));
    assert_memory_equal(ids[2].data, text, strlen(text));
  }
  char *sql = hl_plan_sql(plan, HL_MARIADB, "t");
  assert_non_null(sql);
  size_t parts = 0;
  for (const char *at = sql; (at = strstr(at, "SELECT ")); at++) parts++;
  assert_int_equal(parts, n);
  free(sql);
  hl_plan_free(plan), hl_plan_free(copy);
  hl_layout_unref(layout);
}

static void plan_describes_itself_in_any_room(void **state) {
  (void)state;
  hl_layout *layout = layout_of(NULL, 0, 0);
  hl_plan *plan = hl_plan_new(layout);
  char text[200];
  assert_string_equal(hl_plan_describe(plan, text, sizeof text), "");
  hl_id ids[2] = {id("u\n"), {"a\0\xff\xc3\xa4/%", 7}};
  assert_int_equal(hl_plan_add(plan, ids, 2, HL_SHARED, false, NULL), HL_OK);
  add(plan, "u2", NULL, NULL, HL_SHARED);
  assert_string_equal(hl_plan_describe(plan, text, sizeof text), "u%0A/a%00%FF\xc3\xa4%2F%25, u2");
  for (size_t size = 0; size < 40; size++) {
    memset(text, '#', sizeof text);
    (void)hl_plan_describe(plan, text, size);
    if (size) assert_true(strlen(text) < size);
    for (size_t i = size; i < sizeof text; i++) assert_int_equal(text[i], '#');
  }
  hl_plan_free(plan);
  hl_layout_unref(layout);
}

/* ----------------------------------------------------------------- DSN */

static void same(const char *a, const char *b) {
  if (!b)
    assert_null(a);
  else {
    assert_non_null(a);
    assert_string_equal(a, b);
  }
}

/* By the store that it asks for. */
static int dsn_parse(const char *text, hl_dsn *dsn, hl_error *error) {
  static const hl_store_ops *const stores[] = {&hl_store_mysql, &hl_store_file, &hl_store_null};
  const char *store = hl_dsn_store(text, error);
  memset(dsn, 0, sizeof *dsn);
  for (size_t i = 0; store && i < sizeof stores / sizeof *stores; i++)
    if (strcmp(stores[i]->scheme, store) == 0)
      return hl_dsn_parse(text, stores[i]->parse, dsn, error);
  return HL_EDSN;
}

static void dsn_is_taken_apart(void **state) {
  (void)state;
  static const struct {
    const char *dsn, *store, *user, *password, *host;
    unsigned port;
    const char *socket, *database, *path, *name, *value;
  } cases[] = {
      {"mysql://u:p@h:33/d?table=t", "mysql", "u", "p", "h", 33, NULL, "d", NULL, "table", "t"},
      {"mariadb://h/d", "mysql", NULL, NULL, "h", 0, NULL, "d", NULL, NULL, NULL},
      {"mysql://u@/d", "mysql", "u", NULL, NULL, 0, NULL, "d", NULL, NULL, NULL},
      {"mysql://u:@[::1]:5/d", "mysql", "u", "", "::1", 5, NULL, "d", NULL, NULL, NULL},
      {"mysql://[fe80::1%25eth0]/d", "mysql", NULL, NULL, "fe80::1%eth0", 0, NULL, "d", NULL, NULL,
       NULL},
      {"mysql://%75%3a:%40%2f%3F%25:x@y@h/%64%2f", "mysql", "u:", "@/?%:x@y", "h", 0, NULL, "d/",
       NULL, NULL, NULL},
      {"mysql://u:p@/d?socket=%2frun%2fs&tls=off", "mysql", "u", "p", NULL, 0, "/run/s", "d", NULL,
       "tls", "off"},
      {"mysql://", "mysql", NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL},
      {"u:p@tcp(h:33)/d?loc=Europe%2FBerlin", "mysql", "u", "p", "h", 33, NULL, "d", NULL, "loc",
       "Europe/Berlin"},
      {"u:p:/@?%zz@tcp(h)/d", "mysql", "u", "p:/@?%zz", "h", 0, NULL, "d", NULL, NULL, NULL},
      {"u:@tcp(x)/y@tcp([::1]:3)/d", "mysql", "u", "@tcp(x)/y", "::1", 3, NULL, "d", NULL, NULL,
       NULL},
      {"u@unix(/run/a b)/d", "mysql", "u", NULL, NULL, 0, "/run/a b", "d", NULL, NULL, NULL},
      {"u:p@tcp/d", "mysql", "u", "p", NULL, 0, NULL, "d", NULL, NULL, NULL},
      {"/d", "mysql", NULL, NULL, NULL, 0, NULL, "d", NULL, NULL, NULL},
      {"file:", "file", NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL},
      {"FILE:/a%20b", "file", NULL, NULL, NULL, 0, NULL, NULL, "/a b", NULL, NULL},
      {"file:///a", "file", NULL, NULL, NULL, 0, NULL, NULL, "/a", NULL, NULL},
      {"file:a/b", "file", NULL, NULL, NULL, 0, NULL, NULL, "a/b", NULL, NULL},
      {"null:", "null", NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    hl_dsn dsn;
    hl_error error = {0};
    if (dsn_parse(cases[i].dsn, &dsn, &error) != HL_OK)
      fail_msg("%s: %s", cases[i].dsn, error.message);
    same(dsn.store, cases[i].store);
    same(dsn.user, cases[i].user);
    same(dsn.password, cases[i].password);
    same(dsn.host, cases[i].host);
    assert_int_equal(dsn.port, cases[i].port);
    same(dsn.socket, cases[i].socket);
    same(dsn.database, cases[i].database);
    same(dsn.path, cases[i].path);
    if (cases[i].name) same(hl_dsn_param_get(&dsn, cases[i].name), cases[i].value);
    same(hl_dsn_param_get(&dsn, "absent"), NULL);
    hl_dsn_dispose(&dsn);
    hl_dsn_dispose(&dsn);
  }
}

static void dsn_has_a_limited_number_of_parameters(void **state) {
  (void)state;
  char text[1024] = "mysql://h/d?";
  hl_dsn dsn;
  for (int i = 0; i < HL_DSN_PARAMS_MAX; i++) (void)sprintf(text + strlen(text), "p%d=%d&", i, i);
  assert_int_equal(dsn_parse(text, &dsn, NULL), HL_OK);
  assert_int_equal(dsn.param_count, HL_DSN_PARAMS_MAX);
  hl_dsn_dispose(&dsn);
  strcat(text, "last=1");
  assert_int_equal(dsn_parse(text, &dsn, NULL), HL_EDSN);
  hl_dsn_dispose(&dsn);
}

static void dsn_of_random_pieces_is_taken_apart_or_refused(void **state) {
  (void)state;
  static const char *const pieces[] = {
      "mysql://", "file:", "null:", "tcp(", "unix(", ")", "/", "@", ":",    "?",    "&",
      "=",        "%",     "%41",   "%00",  "[",     "]", "a", "1", "\xff", "\x01", "//"};
  uint32_t random = 1;
  for (int i = 0; i < 300000; i++) {
    char text[256] = "";
    random = random * 1664525u + 1013904223u;
    for (unsigned n = random >> 28; n > 0; n--) {
      random = random * 1664525u + 1013904223u;
      strcat(text, pieces[(random >> 16) % (sizeof pieces / sizeof *pieces)]);
    }
    hl_dsn dsn;
    hl_error error = {0};
    int status = dsn_parse(text, &dsn, &error);
    if (status != HL_OK) {
      assert_int_equal(status, HL_EDSN);
      assert_true(error.message[0]);
    }
    hl_dsn_dispose(&dsn);
  }
}

/* -------------------------------------------------------------- errors */

static void errors_are_one_line_and_never_too_long(void **state) {
  (void)state;
  char large[2000];
  hl_error error;
  memset(large, 'x', sizeof large - 1);
  large[sizeof large - 1] = '\0';
  assert_int_equal(hl__error(&error, HL_ESTORE, "a\nb\t%s", large), HL_ESTORE);
  assert_memory_equal(error.message, "a b x", 5);
  /* Nor does a terminal obey them: DEL, U+009B, which is CSI; but U+00A0 is shown. */
  (void)hl__error(&error, HL_ESTORE, "%s",
                  "a\x7f\xc2\x9b"
                  "b\xc2\xa0\x1b");
  assert_string_equal(error.message, "a   b\xc2\xa0 ");
  (void)hl__error(&error, HL_ESTORE, "a\nb\t%s", large);
  assert_int_equal(strlen(error.message), sizeof error.message - 1);
  assert_int_equal(error.level, -1);
  assert_false(error.retryable);
  errno = ENOENT;
  (void)hl__error_errno(&error, HL_ECONNECTION, "x");
  assert_string_equal(error.message, "x: No such file or directory");
  assert_true(error.retryable);
  errno = ENOENT;
  (void)hl__error_errno(&error, HL_ESTORE, "%s", large);
  assert_int_equal(strlen(error.message), sizeof error.message - 1);
  assert_int_equal(hl__error(NULL, HL_EDSN, "nobody listens"), HL_EDSN);
  assert_int_equal(hl__error_memory(NULL), HL_ENOMEM);
}

static void statuses_have_the_names_of_the_contract(void **state) {
  (void)state;
  static const struct {
    int status;
    const char *name;
    bool retryable;
  } table[] = {{HL_TIMEOUT, "timeout", true},
               {HL_DEADLOCK, "deadlock", true},
               {HL_CANCELLED, "cancelled", true},
               {HL_BUSY, "busy", true},
               {HL_ECONNECTION, "connection", true},
               {HL_ELOST, "lost", true},
               {HL_ERELEASED, "released", false},
               {HL_ENOT_PROVISIONED, "not_provisioned", false},
               {HL_EMISMATCH, "mismatch", false},
               {HL_EUNSAFE_SERVER, "unsafe_server", false},
               {HL_EDSN, "dsn", false},
               {HL_ESTORE, "store", false}};
  for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
    hl_error error;
    assert_string_equal(hl_status_name(table[i].status), table[i].name);
    (void)hl__error(&error, table[i].status, "x");
    assert_int_equal(error.retryable, table[i].retryable);
  }
  assert_string_equal(hl_status_name(-99), "store");
}

static void escaping_keeps_utf8_and_nothing_else_odd(void **state) {
  (void)state;
  static const struct {
    const char *in;
    size_t n;
    const char *out;
  } cases[] = {
      {"abc", 3, "abc"},
      {"a\0b", 3, "a\\x00b"},
      {"\x7f\x1b", 2, "\\x7f\\x1b"},
      {"\xc2\x9b\xc2\xa0", 4, "\\xc2\\x9b\xc2\xa0"}, /* a terminal's CSI */
      {"\xc3\xa4\xe2\x82\xac\xf0\x9f\x94\x92", 9, "\xc3\xa4\xe2\x82\xac\xf0\x9f\x94\x92"},
      /* Characters that turn the direction of writing (U+202E, U+2066, U+061C), or end a line
         (U+2028); their neighbours U+200D and U+2030 do not. */
      {"\xe2\x80\xae\xe2\x81\xa6", 6, "\\xe2\\x80\\xae\\xe2\\x81\\xa6"},
      {"\xd8\x9c\xe2\x80\xa8", 5, "\\xd8\\x9c\\xe2\\x80\\xa8"},
      {"\xe2\x80\x8d\xe2\x80\xb0\xd8\x9b", 8, "\xe2\x80\x8d\xe2\x80\xb0\xd8\x9b"},
      {"\xc3", 1, "\\xc3"},          /* cut */
      {"\xc0\xaf", 2, "\\xc0\\xaf"}, /* too long */
      {"\xe0\x80\xaf", 3, "\\xe0\\x80\\xaf"},
      {"\xed\xa0\x80", 3, "\\xed\\xa0\\x80"},          /* a surrogate */
      {"\xf4\x90\x80\x80", 4, "\\xf4\\x90\\x80\\x80"}, /* above 10FFFF */
      {"\xf0\x8f\xbf\xbf", 4, "\\xf0\\x8f\\xbf\\xbf"},
      {"\xff\xfe", 2, "\\xff\\xfe"},
      {"", 0, ""},
  };
  char out[64];
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    size_t n = hl__escape(out, sizeof out, cases[i].in, cases[i].n);
    assert_string_equal(out, cases[i].out);
    assert_int_equal(n, strlen(out));
  }
}

static void escaping_is_cut_between_characters(void **state) {
  (void)state;
  static const char in[] = "ab\xc3\xa4\x01\xe2\x82\xac"
                           "cd";
  for (size_t size = 0; size <= 20; size++) {
    char out[32];
    memset(out, '#', sizeof out);
    size_t n = hl__escape(out, size, in, sizeof in - 1);
    assert_int_equal(out[size], '#');
    if (size == 0) {
      assert_int_equal(n, 0);
      continue;
    }
    assert_true(n < size);
    assert_int_equal(out[n], '\0');
    assert_int_equal(strlen(out), n);
    char again[64]; /* valid UTF-8: escaping it again changes nothing */
    (void)hl__escape(again, sizeof again, out, n);
    assert_string_equal(again, out);
    if (size > 3 && size < 14) assert_string_equal(out + n - 3, "...");
  }
}

/* ---------------------------------------------------------------- fork */

static int in_child(void (*fn)(void *), void *context) {
  int status;
  pid_t pid = fork();
  if (pid == 0) {
    fn(context);
    _exit(99);
  }
  assert_int_equal(waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void count_open(void *context) {
  const int *fds = context;
  int open = 0;
  for (int i = 0; i < 3; i++) open += fcntl(fds[i], F_GETFD) >= 0;
  _exit(open * 10 + (int)hl__fork_generation());
}

static void a_forked_child_closes_what_is_watched(void **state) {
  (void)state;
  int fds[3];
  uint64_t tickets[3];
  unsigned generation = hl__fork_generation();
  /* Any number: a program may have closed its standard input. */
  int input = fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 100);
  (void)close(STDIN_FILENO);
  for (int i = 0; i < 3; i++) {
    fds[i] = open("/dev/null", O_RDONLY);
    assert_true(fds[i] >= 0);
    tickets[i] = hl__fork_watch(fds[i]);
    assert_true(tickets[i] != 0);
  }
  hl__fork_unwatch(fds[1], tickets[1]);
  hl__fork_unwatch(12345, 0); /* never watched */
  assert_int_equal(in_child(count_open, fds), 10 + (int)generation + 1);
  assert_int_equal(hl__fork_generation(), generation);
  for (int i = 0; i < 3; i++) {
    assert_true(fcntl(fds[i], F_GETFD) >= 0);
    hl__fork_unwatch(fds[i], 0);
    (void)close(fds[i]);
  }
  if (input < 0) return;
  (void)dup2(input, STDIN_FILENO);
  (void)close(input);
}

/* A library has closed it, and by now the number belongs to another descriptor. */
static void a_descriptor_is_unwatched_by_its_own_ticket(void **state) {
  (void)state;
  int fds[3];
  for (int i = 0; i < 3; i++) fds[i] = open("/dev/null", O_RDONLY);
  uint64_t first = hl__fork_watch(fds[0]), second = hl__fork_watch(fds[0]);
  assert_true(first != 0 && second != 0 && first != second);
  assert_false(hl__fork_watches(fds[0], first));
  assert_true(hl__fork_watches(fds[0], second));
  hl__fork_unwatch(fds[0], first);
  assert_int_equal(in_child(count_open, fds), 20 + (int)hl__fork_generation() + 1);
  hl__fork_unwatch(fds[0], second);
  assert_false(hl__fork_watches(fds[0], second));
  assert_int_equal(in_child(count_open, fds), 30 + (int)hl__fork_generation() + 1);
  for (int i = 0; i < 3; i++) (void)close(fds[i]);
}

/* ------------------------------------------------------------- manager */

static char directory[64] = "file:/dev/shm/hierlock-test-XXXXXX";

static int make_directory(void **state) {
  (void)state;
  return mkdtemp(directory + strlen("file:")) ? 0 : -1;
}

static int remove_directory(void **state) {
  char command[128];
  (void)state;
  (void)snprintf(command, sizeof command, "rm -rf %s", directory + 5);
  return system(command);
}

static hl_manager *open_dsn(const char *dsn) {
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager;
  hl_error error;
  config.dsn = dsn;
  config.timeout = 10000;
  if (hl_manager_open(&config, &manager, &error) != HL_OK) fail_msg("%s: %s", dsn, error.message);
  return manager;
}

static hl_plan *plan_for(hl_manager *manager, const char *u, const char *a, const char *r,
                         hl_mode mode) {
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  add(plan, u, a, r, mode);
  return plan;
}

static int take(hl_manager *manager, const char *u, const char *a, const char *r, hl_mode mode,
                int64_t timeout, hl_lock **lock) {
  hl_options options = HL_OPTIONS_INIT;
  options.timeout = timeout;
  hl_plan *plan = plan_for(manager, u, a, r, mode);
  int status = hl_acquire(manager, plan, &options, lock, NULL);
  hl_plan_free(plan);
  return status;
}

static void a_lock_goes_through_its_life(void **state) {
  const char *dsns[] = {directory, "null:"};
  (void)state;
  for (int i = 0; i < 2; i++) {
    bool excludes = i == 0;
    hl_manager *manager = open_dsn(dsns[i]);
    hl_lock *lock, *other;
    hl_stats stats;
    assert_int_equal(take(manager, "u", "a", NULL, HL_EXCLUSIVE, 0, &lock), HL_OK);
    assert_int_equal(take(manager, "u", NULL, NULL, HL_EXCLUSIVE, 0, &other),
                     excludes ? HL_TIMEOUT : HL_OK);
    if (excludes) assert_null(other);
    hl_lock_free(other);
    assert_true(hl_lock_is_held(lock));
    assert_int_equal(hl_lock_look(lock), HL_HELD);
    assert_int_equal(hl_lock_check(lock, NULL), HL_OK);
    assert_true(hl_lock_remaining(lock) == HL_FOREVER);
    assert_true(hl_lock_token(lock) > 0);
    assert_int_equal(hl_lock_mode(lock), HL_EXCLUSIVE);
    assert_int_equal(hl_lock_level(lock), 1);

    hl_plan *more = plan_for(manager, "u", "a", "r", HL_EXCLUSIVE);
    assert_int_equal(hl_lock_extend(lock, more, NULL, NULL), HL_OK);
    assert_int_equal(hl_lock_level(lock), 2);
    assert_int_equal(hl_plan_target_count(hl_lock_plan(lock)), 2);

    hl_manager_stats(manager, &stats);
    assert_int_equal(stats.held, 1);
    assert_int_equal(stats.timeouts, excludes);
    assert_int_equal(hl_lock_release(lock, true, NULL), HL_OK);
    assert_int_equal(hl_lock_release(lock, false, NULL), HL_OK);
    assert_false(hl_lock_is_held(lock));
    assert_int_equal(hl_lock_remaining(lock), 0);
    assert_int_equal(hl_lock_look(lock), HL_RELEASED);
    assert_int_equal(hl_lock_check(lock, NULL), HL_ERELEASED);
    assert_int_equal(hl_lock_extend(lock, more, NULL, NULL), HL_ERELEASED);
    hl_plan_free(more);
    hl_lock_free(lock);
    hl_manager_stats(manager, &stats);
    assert_int_equal(stats.held, 0);
    hl_manager_close(manager);
  }
}

static void misuse_of_acquire_is_named(void **state) {
  (void)state;
  hl_manager *manager = open_dsn("null:"), *other = open_dsn("null:");
  hl_plan *empty = hl_plan_new(hl_manager_layout(manager));
  hl_plan *foreign = plan_for(other, "u", NULL, NULL, HL_EXCLUSIVE);
  hl_options options = HL_OPTIONS_INIT;
  options.label_size = 3;
  hl_error error;
  hl_lock *lock;
  assert_int_equal(hl_acquire(manager, empty, NULL, &lock, &error), HL_EMISUSE);
  assert_non_null(strstr(error.message, "target"));
  assert_int_equal(hl_acquire(manager, foreign, NULL, &lock, &error), HL_EMISUSE);
  assert_non_null(strstr(error.message, "layout"));
  assert_int_equal(hl_acquire(other, foreign, &options, &lock, &error), HL_EMISUSE);
  assert_non_null(strstr(error.message, "label"));
  hl_plan_free(empty), hl_plan_free(foreign);
  hl_manager_close(manager), hl_manager_close(other);
}

/* Structures as a program passes them that was compiled with another version. */
static void structures_of_other_sizes(void **state) {
  (void)state;
  struct {
    hl_config config;
    int64_t later;
  } longer = {HL_CONFIG_INIT, 0};
  struct {
    hl_options options;
    int64_t later;
  } longer_options = {HL_OPTIONS_INIT, 0};
  hl_manager *manager;
  hl_lock *lock;
  hl_pending *pending;
  hl_error error;
  longer.config.dsn = "null:";
  longer.config.size = sizeof longer;
  longer_options.options.size = sizeof longer_options;
  longer.later = 1;
  assert_int_equal(hl_manager_open(&longer.config, &manager, &error), HL_EMISUSE);
  assert_non_null(strstr(error.message, "does not know"));
  longer.later = 0;
  assert_int_equal(hl_manager_open(&longer.config, &manager, &error), HL_OK);
  hl_plan *plan = plan_for(manager, "u", NULL, NULL, HL_EXCLUSIVE);
  const hl_options *options = &longer_options.options;
  assert_int_equal(hl_acquire(manager, plan, options, &lock, &error), HL_OK);
  assert_int_equal(hl_lock_extend(lock, plan, options, &error), HL_OK);
  for (int i = 0; i < 2; i++) {
    if (i == 0) longer_options.later = 1;
    if (i == 1) longer_options.options.size = 0;
    hl_lock *other;
    assert_int_equal(hl_acquire(manager, plan, options, &other, &error), HL_EMISUSE);
    assert_int_equal(hl_lock_extend(lock, plan, options, &error), HL_EMISUSE);
    assert_int_equal(hl_start(manager, plan, options, &pending, &error), HL_EMISUSE);
    assert_int_equal(hl_lock_start_extend(lock, plan, options, &pending, &error), HL_EMISUSE);
  }
  longer.config.size = 0;
  hl_manager *none;
  assert_int_equal(hl_manager_open(&longer.config, &none, &error), HL_EMISUSE);
  assert_non_null(strstr(error.message, "_INIT"));
  hl_lock_free(lock);
  hl_plan_free(plan);
  hl_manager_close(manager);
}

static void bad_configurations_are_refused(void **state) {
  (void)state;
  hl_manager *manager;
  hl_config config = HL_CONFIG_INIT;
  config.dsn = "null:";
  config.timeout = -1;
  assert_int_equal(hl_manager_open(&config, &manager, NULL), HL_EMISUSE);
  config.timeout = HL_FOREVER;
  config.hold_timeout = 999;
  assert_int_equal(hl_manager_open(&config, &manager, NULL), HL_EMISUSE);
  config.hold_timeout = 1000;
  config.pool_size = 0;
  assert_int_equal(hl_manager_open(&config, &manager, NULL), HL_EMISUSE);
  config.pool_size = 1;
  config.dsn = "mysql://h/d"; /* no such store was given */
  assert_int_equal(hl_manager_open(&config, &manager, NULL), HL_ESTORE);
  assert_null(manager);
  config.dsn = "";
  assert_int_equal(hl_manager_open(&config, &manager, NULL), HL_EDSN);
  if (manager) hl_manager_close(manager);
}

static void a_closed_manager_leaves_locks_that_hold_nothing(void **state) {
  (void)state;
  hl_manager *manager = open_dsn(directory), *other = open_dsn(directory);
  hl_lock *lock, *second;
  assert_int_equal(take(manager, "u", NULL, NULL, HL_EXCLUSIVE, 0, &lock), HL_OK);
  hl_plan *plan = plan_for(manager, "v", NULL, NULL, HL_EXCLUSIVE);
  hl_manager_close(manager);
  assert_int_equal(take(other, "u", NULL, NULL, HL_EXCLUSIVE, 0, &second), HL_OK);
  assert_false(hl_lock_is_held(lock));
  assert_int_equal(hl_lock_look(lock), HL_RELEASED);
  assert_int_equal(hl_lock_check(lock, NULL), HL_ERELEASED);
  assert_int_equal(hl_lock_extend(lock, plan, NULL, NULL), HL_ERELEASED);
  assert_int_equal(hl_lock_release(lock, true, NULL), HL_OK);
  hl_lock_free(lock); /* the lock takes the manager with it */
  hl_plan_free(plan);
  assert_true(hl_lock_is_held(second));
  hl_manager_close(other);
  hl_lock_free(second);
}

static void try_in_child(void *context) {
  hl_manager *manager = ((void **)context)[0];
  hl_lock *lock = ((void **)context)[1], *own;
  if (hl_lock_look(lock) != HL_FOREIGN || hl_lock_is_held(lock)) _exit(1);
  if (hl_lock_release(lock, true, NULL) != HL_ERELEASED) _exit(2);
  hl_lock_free(lock);
  if (take(manager, "u", NULL, NULL, HL_EXCLUSIVE, 0, &own) != HL_TIMEOUT) _exit(3);
  if (take(manager, "other", NULL, NULL, HL_EXCLUSIVE, 0, &own) != HL_OK) _exit(4);
  hl_lock_free(own);
  hl_manager_close(manager);
  _exit(0);
}

static void a_forked_child_has_no_lock_of_its_parents(void **state) {
  (void)state;
  hl_manager *manager = open_dsn(directory);
  hl_lock *lock;
  assert_int_equal(take(manager, "u", NULL, NULL, HL_EXCLUSIVE, 0, &lock), HL_OK);
  void *context[] = {manager, lock};
  assert_int_equal(in_child(try_in_child, context), 0);
  assert_true(hl_lock_is_held(lock));
  assert_int_equal(hl_lock_check(lock, NULL), HL_OK);
  hl_lock_free(lock);
  hl_manager_close(manager);
}

/* What a store is told of a waiter: the children of one process have as many forks before them. */
static void each_forked_child_is_another_agent(void **state) {
  (void)state;
  hl_agent *agent = hl_agent_new();
  uint64_t numbers[3] = {hl__agent_number(agent)};
  int ends[2];
  assert_non_null(agent);
  assert_int_equal(pipe(ends), 0);
  for (int i = 1; i < 3; i++) {
    pid_t pid = fork();
    if (pid == 0) {
      uint64_t number = hl__agent_number(agent);
      _exit(write(ends[1], &number, sizeof number) == sizeof number ? 0 : 1);
    }
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_int_equal(read(ends[0], &numbers[i], sizeof numbers[i]), sizeof numbers[i]);
  }
  assert_true(numbers[0] != 0 && numbers[1] != 0 && numbers[2] != 0);
  assert_true(numbers[0] != numbers[1] && numbers[0] != numbers[2] && numbers[1] != numbers[2]);
  assert_int_equal(close(ends[0]) | close(ends[1]), 0);
  hl_agent_unref(agent);
}

/* Threads share a manager; the counters are protected by the locks alone. */
static struct {
  hl_manager *manager;
  long counters[3];
  atomic_int failures;
} shared;

enum { THREADS = 8, ROUNDS = 400 };

static void *count_up(void *argument) {
  static const char *const users[] = {"t0", "t1", "t2"};
  for (int i = 0; i < ROUNDS; i++) {
    hl_lock *lock;
    int which = (int)((i + (intptr_t)argument) % 3);
    if (take(shared.manager, users[which], NULL, NULL, HL_EXCLUSIVE, -1, &lock) != HL_OK) {
      atomic_fetch_add(&shared.failures, 1);
      continue;
    }
    long seen = shared.counters[which];
    if (i % 64 == 0) (void)usleep(50);
    shared.counters[which] = seen + 1;
    hl_lock_free(lock);
  }
  return NULL;
}

static void threads_exclude_each_other(void **state) {
  (void)state;
  pthread_t threads[THREADS];
  hl_stats stats;
  shared.manager = open_dsn(directory);
  for (intptr_t i = 0; i < THREADS; i++)
    assert_int_equal(pthread_create(&threads[i], NULL, count_up, (void *)i), 0);
  for (int i = 0; i < THREADS; i++) (void)pthread_join(threads[i], NULL);
  assert_int_equal(atomic_load(&shared.failures), 0);
  assert_int_equal(shared.counters[0] + shared.counters[1] + shared.counters[2], THREADS * ROUNDS);
  hl_manager_stats(shared.manager, &stats);
  assert_int_equal(stats.acquired, THREADS * ROUNDS);
  assert_int_equal(stats.held, 0);
  assert_int_equal(stats.waiting, 0);
  hl_manager_close(shared.manager);
}

static void *wait_for_u(void *argument) {
  hl_lock *lock;
  (void)argument;
  return (void *)(intptr_t)take(shared.manager, "u", NULL, NULL, HL_EXCLUSIVE, HL_FOREVER, &lock);
}

static void closing_ends_the_waits_of_other_threads(void **state) {
  (void)state;
  pthread_t thread;
  hl_stats stats;
  hl_lock *lock;
  void *result;
  hl_manager *other = open_dsn(directory);
  shared.manager = open_dsn(directory);
  assert_int_equal(take(other, "u", NULL, NULL, HL_EXCLUSIVE, 0, &lock), HL_OK);
  assert_int_equal(pthread_create(&thread, NULL, wait_for_u, NULL), 0);
  for (int i = 0; i < 5000; i++) {
    hl_manager_stats(shared.manager, &stats);
    if (stats.waiting) break;
    (void)usleep(1000);
  }
  assert_int_equal(stats.waiting, 1);
  hl_manager_close(shared.manager);
  (void)pthread_join(thread, &result);
  assert_int_equal((intptr_t)result, HL_CANCELLED);
  hl_lock_free(lock);
  hl_manager_close(other);
}

/* -------------------------------------------------------------- time */

static void sums_of_times_saturate(void **state) {
  (void)state;
  static const int64_t times[] = {INT64_MIN, INT64_MIN + 1, -86400000,     -1,       0, 1,
                                  5000,      HL_TTL_MAX,    INT64_MAX - 1, INT64_MAX};
  const size_t n = sizeof times / sizeof *times;
  for (size_t i = 0; i < n; i++)
    for (size_t j = 0; j < n; j++) {
      __extension__ typedef __int128 wide;
      wide sum = (wide)times[i] + times[j], between = (wide)times[j] - times[i];
      if (times[i] == HL_FOREVER || times[j] == HL_FOREVER || sum > INT64_MAX) sum = HL_FOREVER;
      if (sum < INT64_MIN) sum = INT64_MIN;
      if (between > INT64_MAX) between = INT64_MAX;
      if (between < INT64_MIN) between = INT64_MIN;
      assert_true(hl__deadline(times[i], times[j]) == (int64_t)sum);
      assert_true(hl__between_ms(times[i], times[j]) == (int64_t)between);
    }
  /* A lock that is granted when the machine has just been started is over in time. */
  assert_int_equal(hl__deadline(-6048002, 604800000), 598751998);
}

static void what_is_left_is_never_too_long(void **state) {
  (void)state;
  assert_true(hl__left_ms(HL_FOREVER) == HL_FOREVER);
  assert_true(hl__lease_left_ms(HL_FOREVER) == HL_FOREVER);
  assert_int_equal(hl__left_ms(INT64_MIN), 0);
  assert_int_equal(hl__lease_left_ms(INT64_MIN), 0);
  int64_t now = hl__boot_ms(), left = hl__lease_left_ms(now + 1000);
  assert_in_range(left, 1, 999);
}

/* -------------------------------------------------------------- records */

static void a_record_is_judged_for_all_stores(void **state) {
  (void)state;
  static const struct {
    hl__record record;
    int status;
    const char *message;
  } cases[] = {
      {{HL__RECORD_FITS}, HL_OK, NULL},
      {{HL__RECORD_FITS, .import = true}, HL_OK, NULL},
      {{.holder = true, .secret = true}, HL_ELOST, "the lease has ended: it was released, or "},
      {{.forgets = true},
       HL_ELOST,
       "the lease has ended: it was released, or another owner has "
       "taken its nodes since; or the server has forgotten it"},
      {{.again = true}, HL__ABSENT, NULL},
      {{.there = true, .secret = true}, HL_ELOST, "the lease was imported, and belongs to that h"},
      /* A former holder, of what was revoked since. */
      {{.there = true, .secret = true, .revoked = true, .again = true},
       HL_ELOST,
       "the lease was imported, and belongs to that handle now"},
      {{HL__RECORD_FITS, .revoked = true, .by = "anna", .reason = "night", .behind = true},
       HL_ELOST,
       "the lease was revoked by anna: night"},
      {{.there = true, .secret = true, .import = true, .revoked = true},
       HL_ELOST,
       "the lease was revoked"},
      /* The caller does not know the secret: it hears nothing of the lease. */
      {{.there = true, .import = true, .holder = true, .rows = true, .revoked = true},
       HL_ELOST,
       "the lease has ended: "},
      {{HL__RECORD_FITS, .behind = true, .late = true}, HL_ELOST, "the lease has ended: "},
      {{HL__RECORD_FITS, .late = true}, HL_ECONNECTION, "the server has read a later refresh "},
      {{.there = true, .import = true, .secret = true}, HL_ELOST, "the lease was imported, "},
      {{.there = true, .import = true, .secret = true, .holder = true},
       HL_EMISMATCH,
       "the lease locks something else than its text says"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    hl_error error = {0};
    assert_int_equal(hl__record_check(&cases[i].record, &error), cases[i].status);
    assert_int_equal(hl__record_check(&cases[i].record, NULL), cases[i].status);
    if (!cases[i].message) continue;
    assert_int_equal(error.status, cases[i].status);
    assert_memory_equal(error.message, cases[i].message, strlen(cases[i].message));
    assert_string_equal(error.revoked_by, cases[i].record.by ? cases[i].record.by : "");
    assert_string_equal(error.reason, cases[i].record.reason ? cases[i].record.reason : "");
  }
}

/* A thread that waits for a signal has it blocked, perhaps pending. The signals of a connection that
   has ended go, and none that was there before. No server is at that port. */
static void a_connection_leaves_the_signals_of_the_program(void **state) {
  static const hl_store_ops *const stores[] = {&hl_store_mysql, NULL};
  static const struct timespec at_once = {0, 0};
  sigset_t pipe, usual, now;
  hl_config config = HL_CONFIG_INIT;
  (void)state;
  config.dsn = "mysql://u@127.0.0.1:1/d";
  config.stores = stores;
  assert_int_equal(sigemptyset(&pipe) | sigaddset(&pipe, SIGPIPE), 0);
  for (int blocked = 0; blocked < 2; blocked++) { /* the first time the library begins, too */
    hl_manager *manager = NULL;
    assert_int_equal(pthread_sigmask(blocked ? SIG_BLOCK : SIG_UNBLOCK, &pipe, &usual), 0);
    if (blocked) assert_int_equal(raise(SIGPIPE), 0);
    assert_int_equal(hl_manager_open(&config, &manager, NULL), HL_ECONNECTION);
    assert_int_equal(sigpending(&now), 0);
    assert_int_equal(sigismember(&now, SIGPIPE), blocked);
    assert_int_equal(pthread_sigmask(SIG_BLOCK, NULL, &now), 0);
    assert_int_equal(sigismember(&now, SIGPIPE), blocked);
    if (blocked) assert_int_equal(sigtimedwait(&pipe, NULL, &at_once), SIGPIPE);
    assert_int_equal(pthread_sigmask(SIG_SETMASK, &usual, NULL), 0);
  }
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(layout_hashes_as_in_the_contract),
      cmocka_unit_test(layout_without_buckets_has_the_hash_itself),
      cmocka_unit_test(layout_refuses_bad_names_and_numbers),
      cmocka_unit_test(plan_orders_and_keeps_the_strongest),
      cmocka_unit_test(plan_has_names_behind_its_nodes),
      cmocka_unit_test(names_are_not_those_of_the_store),
      cmocka_unit_test(names_need_their_own_level),
      cmocka_unit_test(plan_refuses_bad_ids_and_stays_as_it_was),
      cmocka_unit_test(plan_says_which_rows_are_missing),
      cmocka_unit_test(plan_of_ten_thousand_targets),
      cmocka_unit_test(plan_describes_itself_in_any_room),
      cmocka_unit_test(dsn_is_taken_apart),
      cmocka_unit_test(dsn_has_a_limited_number_of_parameters),
      cmocka_unit_test(dsn_of_random_pieces_is_taken_apart_or_refused),
      cmocka_unit_test(errors_are_one_line_and_never_too_long),
      cmocka_unit_test(statuses_have_the_names_of_the_contract),
      cmocka_unit_test(escaping_keeps_utf8_and_nothing_else_odd),
      cmocka_unit_test(escaping_is_cut_between_characters),
      cmocka_unit_test(a_forked_child_closes_what_is_watched),
      cmocka_unit_test(a_descriptor_is_unwatched_by_its_own_ticket),
      cmocka_unit_test(a_lock_goes_through_its_life),
      cmocka_unit_test(misuse_of_acquire_is_named),
      cmocka_unit_test(structures_of_other_sizes),
      cmocka_unit_test(bad_configurations_are_refused),
      cmocka_unit_test(a_closed_manager_leaves_locks_that_hold_nothing),
      cmocka_unit_test(a_forked_child_has_no_lock_of_its_parents),
      cmocka_unit_test(each_forked_child_is_another_agent),
      cmocka_unit_test(threads_exclude_each_other),
      cmocka_unit_test(closing_ends_the_waits_of_other_threads),
      cmocka_unit_test(sums_of_times_saturate),
      cmocka_unit_test(what_is_left_is_never_too_long),
      cmocka_unit_test(a_record_is_judged_for_all_stores),
      cmocka_unit_test(a_connection_leaves_the_signals_of_the_program),
      cmocka_unit_test(nothing_is_left),
  };
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
