/*
 * test_memory.c - malloc fails at each of its calls, alone or with all that follow, in every
 * thread. Meanwhile a program opens a manager, locks in every way that there is, and closes it.
 * The test runs on the embedded store, and on the servers that the environment names (see
 * spec/support/servers.sh). Whatever a call returns then, the process goes on, and after the
 * manager is closed nothing is held, no descriptor is open and nothing has leaked.
 *
 * Redis, Memcached, SQLite, a quorum and null: nothing has leaked there, when no call fails.
 *
 * The allocator is this program's own, in front of the real one. spec/memory_spec.lua tests
 * Lua's allocator.
 *
 *   test_memory [[-]PATTERN...]      the tests with such names; -: all but these
 *
 * Parts: on_the_embedded_store on_mysql on_mariadb on_postgresql
 */
#include "hierlock.h"
#include "clock.h"
#include "provision.h"

#include <dlfcn.h>
#include <errno.h>
#include <fnmatch.h>
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

#include "leftovers.h"

/* ----------------------------------------------------------- the allocator */

/* Only where this program's own code allocates: Connector/C (3.3) does not look whether it
   has got memory for the server's version, say, and goes on with NULL. Nor does
   AddressSanitizer bear it. */
#if defined(__SANITIZE_ADDRESS__)
static bool own_only = true;
#else
static bool own_only;
#endif
extern const char __executable_start, etext; /* the linker's */

static bool all_that_follow;
static atomic_long calls;   /* so far, of those that may fail */
static atomic_long failing; /* the number of the failing call; 0: none */
static atomic_long blocks;  /* that are in use */

static bool fails(const void *caller) {
  long n = atomic_load(&failing);
  if (n == 0) return false;
  if (own_only && ((const char *)caller < &__executable_start || (const char *)caller >= &etext))
    return false;
  long call = atomic_fetch_add(&calls, 1) + 1;
  if (all_that_follow ? call < n : call != n) return false;
  errno = ENOMEM;
  return true;
}

/* dlsym allocates: from here, as long as the real ones are not known. */
static _Alignas(16) char first[65536];
static size_t first_used;

static bool is_first(const void *block) {
  return (const char *)block >= first && (const char *)block < first + sizeof first;
}

static void *first_take(size_t size) {
  size_t at = first_used;
  first_used += (size + 15) & ~(size_t)15;
  if (first_used > sizeof first) abort();
  return first + at;
}

static struct {
  void *(*malloc)(size_t);
  void *(*calloc)(size_t, size_t);
  void *(*realloc)(void *, size_t);
  void *(*aligned_alloc)(size_t, size_t);
  int (*posix_memalign)(void **, size_t, size_t);
  void (*free)(void *);
  bool looking;
} real;

static bool real_found(void) {
  if (real.free) return true;
  if (real.looking) return false;
  real.looking = true;
  *(void **)&real.malloc = dlsym(RTLD_NEXT, "malloc");
  *(void **)&real.calloc = dlsym(RTLD_NEXT, "calloc");
  *(void **)&real.realloc = dlsym(RTLD_NEXT, "realloc");
  *(void **)&real.aligned_alloc = dlsym(RTLD_NEXT, "aligned_alloc");
  *(void **)&real.posix_memalign = dlsym(RTLD_NEXT, "posix_memalign");
  *(void **)&real.free = dlsym(RTLD_NEXT, "free");
  return true;
}

static void *counted(void *block) {
  if (block) (void)atomic_fetch_add(&blocks, 1);
  return block;
}

__attribute__((visibility("default"))) void *malloc(size_t size) {
  if (!real_found()) return first_take(size);
  return fails(__builtin_return_address(0)) ? NULL : counted(real.malloc(size));
}

__attribute__((visibility("default"))) void *calloc(size_t n, size_t size) {
  if (!real_found()) return first_take(n * size); /* zero it is */
  return fails(__builtin_return_address(0)) ? NULL : counted(real.calloc(n, size));
}

__attribute__((visibility("default"))) void *realloc(void *block, size_t size) {
  if (!real_found()) abort();
  if (!block || is_first(block)) {
    void *moved = fails(__builtin_return_address(0)) ? NULL : counted(real.malloc(size));
    if (moved && block) memcpy(moved, block, size);
    return moved;
  }
  if (size == 0) (void)atomic_fetch_sub(&blocks, 1);
  return size > 0 && fails(__builtin_return_address(0)) ? NULL : real.realloc(block, size);
}

__attribute__((visibility("default"))) void *aligned_alloc(size_t alignment, size_t size) {
  if (!real_found()) abort();
  return fails(__builtin_return_address(0)) ? NULL : counted(real.aligned_alloc(alignment, size));
}

__attribute__((visibility("default"))) int posix_memalign(void **block, size_t alignment,
                                                          size_t size) {
  if (!real_found()) abort();
  if (fails(__builtin_return_address(0))) return ENOMEM;
  int status = real.posix_memalign(block, alignment, size);
  if (status == 0) (void)counted(*block);
  return status;
}

__attribute__((visibility("default"))) void free(void *block) {
  if (!block || is_first(block)) return;
  (void)atomic_fetch_sub(&blocks, 1);
  real.free(block);
}

/* ---------------------------------------------------------------- a program */

#define TABLE "hierlock_spec_memory"
#define BUCKETS 64
#define SOON_MS 20000  /* on a busy machine */
#define MOMENT_MS 2000 /* before it is done once more, and then there is SOON_MS */

/* It has no leases. */
static bool grants_all(const char *dsn) { return strcmp(dsn, "null:") == 0; }

static hl_manager *open_manager(const char *dsn) {
  static const struct hl_store_ops *const stores[] = {&hl_store_mysql,
                                                      &hl_store_postgresql,
                                                      &hl_store_redis,
                                                      &hl_store_sqlite,
                                                      &hl_store_memcached,
                                                      &hl_store_quorum,
                                                      NULL};
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager = NULL;
  hl_error error;
  if (hl_layout_new(NULL, 0, BUCKETS, &config.layout, &error) != HL_OK) return NULL;
  config.dsn = dsn;
  config.stores = stores;
  config.timeout = 0;
  int status = hl_manager_open(&config, &manager, &error);
  assert_true((status == HL_OK) == (manager != NULL));
  if (status && !atomic_load(&failing)) (void)fprintf(stderr, "%s\n", error.message);
  hl_layout_unref(config.layout);
  return manager;
}

static hl_plan *plan_of(hl_manager *manager, const char *user, const char *account,
                        unsigned resources, hl_mode mode) {
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  char id[600];
  memset(id, 'r', sizeof id);
  hl_id ids[3] = {{user, strlen(user)}, {account, strlen(account)}, {id, 1}};
  if (!plan) return NULL;
  for (unsigned i = 0; i < (resources ? resources : 1); i++) {
    ids[2].size = 500 + i;
    if (hl_plan_add(plan, ids, resources ? 3 : 2, mode, false, NULL) == HL_OK) continue;
    hl_plan_free(plan);
    return NULL;
  }
  return plan;
}

static void holder_seen(void *context, const hl_holder *holder) {
  (void)holder;
  ++*(int *)context;
}

static void give_back(hl_lock *lock) {
  if (lock) (void)hl_lock_release(lock, true, NULL);
  hl_lock_free(lock);
}

static void use_lock(hl_lock *lock, const hl_plan *more) {
  hl_error error;
  hl_pending *pending = NULL;
  hl_lock *none = NULL;
  (void)hl_lock_is_held(lock);
  (void)hl_lock_check(lock, &error);
  (void)hl_lock_extend(lock, more, NULL, &error);
  if (hl_lock_start_check(lock, &pending, &error) == HL_OK && pending)
    (void)hl_pending_wait(pending, SOON_MS, &none, &error);
  hl_pending_free(pending);
  char text[300], *sql = hl_plan_sql((hl_plan *)(uintptr_t)hl_lock_plan(lock), HL_MYSQL, "t");
  (void)hl_plan_describe(hl_lock_plan(lock), text, sizeof text);
  free(sql);
}

static void start(hl_manager *manager, const hl_plan *plan, bool cancels) {
  hl_pending *pending = NULL;
  hl_lock *lock = NULL;
  hl_error error;
  hl_options options = HL_OPTIONS_INIT;
  options.timeout = cancels ? SOON_MS : 0;
  if (hl_start(manager, plan, &options, &pending, &error) != HL_OK) return;
  (void)hl_pending_fd(pending, &error);
  if (cancels) hl_pending_cancel(pending);
  (void)hl_pending_wait(pending, SOON_MS, &lock, &error);
  assert_true(hl_pending_done(pending));
  hl_pending_free(pending);
  give_back(lock);
}

/* Where the store has leases. A lease that could not be given back for want of memory ends by
   itself. */
static void leases(hl_manager *manager, const hl_plan *plan) {
  int seen = 0;
  char *text = NULL;
  hl_error error;
  hl_lock *lock = NULL;
  hl_pending *pending = NULL;
  hl_options options = HL_OPTIONS_INIT;
  options.timeout = 0;
  options.ttl = 400;
  options.auto_refresh = true;
  int status = hl_acquire(manager, plan, &options, &lock, &error);
  assert_true((status == HL_OK) == (lock != NULL));
  if (!lock) return;
  (void)hl_lock_refresh(lock, 400, &error);
  (void)hl_lock_check(lock, &error);
  if (hl_lock_start_refresh(lock, 400, &pending, &error) == HL_OK && pending) {
    hl_lock *none;
    (void)hl_pending_wait(pending, SOON_MS, &none, &error);
  }
  hl_pending_free(pending);
  pending = NULL;
  (void)hl_manager_leases(manager, NULL, holder_seen, &seen, &error);
  if (hl_lock_export(lock, &text, &error) == HL_OK) {
    hl_lock_free(lock);
    lock = NULL;
    if (hl_import(manager, text, strlen(text), NULL, &lock, &error) == HL_OK) hl_lock_free(lock);
    lock = NULL;
    (void)hl_start_import(manager, text, strlen(text), NULL, &pending, &error);
    if (pending) (void)hl_pending_wait(pending, SOON_MS, &lock, &error);
    hl_pending_free(pending);
    free(text);
  }
  give_back(lock);
  lock = NULL;
  if (hl_acquire(manager, plan, NULL, &lock, &error) == HL_OK)
    (void)hl_lock_to_lease(lock, &options, &error);
  give_back(lock);
}

/* Changes the mode of an update lock to and fro; ttl: 0 for a session. The lock has a plan,
   whatever fails. */
static void convert(hl_manager *manager, const hl_plan *plan, int64_t ttl) {
  hl_error error;
  hl_lock *lock = NULL, *none = NULL;
  hl_options options = HL_OPTIONS_INIT;
  options.ttl = ttl;
  if (hl_acquire(manager, plan, &options, &lock, &error) != HL_OK) return;
  for (int i = 0; i < 2; i++) {
    hl_pending *pending = NULL;
    (void)hl_lock_upgrade(lock, NULL, &error);
    (void)hl_lock_downgrade(lock, &error);
    assert_non_null(hl_lock_plan(lock));
    if (hl_lock_start_upgrade(lock, NULL, &pending, &error) == HL_OK && pending)
      (void)hl_pending_wait(pending, SOON_MS, &none, &error);
    hl_pending_free(pending);
    if (hl_lock_start_downgrade(lock, &pending, &error) == HL_OK && pending)
      (void)hl_pending_wait(pending, SOON_MS, &none, &error);
    hl_pending_free(pending);
    assert_non_null(hl_lock_plan(lock));
  }
  give_back(lock);
}

/* Calls everything in hierlock.h. Leaves a failed part out, and does the rest. */
static void program(const char *dsn) {
  int seen = 0;
  hl_error error;
  hl_options options = HL_OPTIONS_INIT;
  options.label = "label";
  options.label_size = 5;
  hl_manager *manager = open_manager(dsn);
  if (!manager) return;
  hl_plan *plan = plan_of(manager, "u1", "a1", 0, HL_EXCLUSIVE);
  hl_plan *more = plan_of(manager, "u2", "a2", 9, HL_EXCLUSIVE);
  hl_plan *read = plan_of(manager, "u2", "a2", 9, HL_SHARED);
  hl_plan *update = plan_of(manager, "u2", "a2", 1, HL_UPDATE);
  if (!plan || !more || !read || !update) goto out;
  for (int i = 0; i < 2; i++) { /* the second is prepared */
    hl_lock *lock = NULL, *other = NULL;
    int status = hl_acquire(manager, plan, &options, &lock, &error);
    assert_true((status == HL_OK) == (lock != NULL));
    if (lock) {
      status = hl_acquire(manager, plan, &options, &other, &error);
      assert_true((status != HL_OK || grants_all(dsn)) && (status == HL_OK) == (other != NULL));
      give_back(other);
      (void)hl_manager_holders(manager, plan, holder_seen, &seen, &error);
      use_lock(lock, more);
    }
    give_back(lock);
  }
  start(manager, plan, false);
  start(manager, more, false);
  start(manager, plan, true);
  start(manager, more, true);
  leases(manager, plan);
  convert(manager, update, 0);
  convert(manager, update, 400);
  hl_lock *reader = NULL;
  options.timeout = SOON_MS;
  (void)hl_acquire(manager, read, &options, &reader, &error);
  give_back(reader);
out:
  hl_plan_free(update);
  hl_plan_free(read);
  hl_plan_free(plan);
  hl_plan_free(more);
  hl_manager_close(manager);
}

/* ------------------------------------------------------------------- tests */

static int descriptors(void) { return entries_of("/proc/self/fd"); }

/* Threads of a closed manager end soon, and servers give back what a lost connection
   held. */
static bool within(int64_t ms, bool (*so)(void *), void *context) {
  int64_t end = hl__now_ms() + ms;
  while (!so(context)) {
    if (hl__now_ms() > end) return false;
    (void)usleep(1000);
  }
  return true;
}

static bool soon(bool (*so)(void *), void *context) { return within(SOON_MS, so, context); }

static hl_error in_the_way; /* why it is not so */
static bool nothing_held(void *observer) {
  hl_lock *lock = NULL;
  hl_plan *plan = plan_of(observer, "u1", "a1", 0, HL_EXCLUSIVE);
  hl_plan *more = plan_of(observer, "u2", "a2", 9, HL_EXCLUSIVE);
  bool free_ = hl_acquire(observer, plan, NULL, &lock, &in_the_way) == HL_OK;
  give_back(lock);
  lock = NULL;
  free_ = free_ && hl_acquire(observer, more, NULL, &lock, &in_the_way) == HL_OK;
  give_back(lock);
  hl_plan_free(plan);
  hl_plan_free(more);
  return free_;
}

static int descriptors_idle;
static bool descriptors_closed(void *none) {
  (void)none;
  return descriptors() <= descriptors_idle;
}

static long blocks_before;
static bool blocks_freed(void *none) {
  (void)none;
  return atomic_load(&blocks) <= blocks_before;
}

/* The program, in which the n-th allocation fails, and all that follow if need be. How many
   there were. */
static long run(const char *dsn, long n, bool stays) {
  atomic_store(&calls, 0);
  all_that_follow = stays;
  atomic_store(&failing, n);
  program(dsn);
  atomic_store(&failing, 0);
  return atomic_load(&calls);
}

static void every_allocation(const char *dsn) {
  hl_manager *observer = open_manager(dsn);
  assert_non_null(observer);
  for (int i = 0; i < 4; i++) { /* there is what libraries keep, and the observer */
    (void)run(dsn, LONG_MAX, false);
    if (!soon(nothing_held, observer)) fail_msg("something is held: %s", in_the_way.message);
  }
  descriptors_idle = descriptors();
  blocks_before = atomic_load(&blocks);
  long last = run(dsn, LONG_MAX, false);
  assert_true(last > 50);
  for (int stays = 0; stays < 2; stays++)
    for (long n = 1; n <= last; n++) {
      (void)run(dsn, n, stays);
      if (!soon(nothing_held, observer))
        fail_msg("allocation %ld of %ld: something is held: %s", n, last, in_the_way.message);
      if (!within(MOMENT_MS, descriptors_closed, NULL)) {
        /* On a busy machine the observer may have got a second connection, and keeps it. */
        hl_manager_close(observer);
        observer = open_manager(dsn);
        assert_non_null(observer);
        assert_true(soon(nothing_held, observer));
      }
      if (!soon(descriptors_closed, NULL))
        fail_msg("allocation %ld of %ld: %d descriptors, and %d before", n, last, descriptors(),
                 descriptors_idle);
      if (within(MOMENT_MS, blocks_freed, NULL)) continue;
      /* Libraries keep something now and then. A real leak leaks again. */
      blocks_before = atomic_load(&blocks);
      (void)run(dsn, n, stays);
      if (!soon(blocks_freed, NULL))
        fail_msg("allocation %ld of %ld: %ld blocks, and %ld before", n, last, atomic_load(&blocks),
                 blocks_before);
    }
  hl_manager_close(observer);
}

static void on_the_embedded_store(void **state) {
  char dsn[] = "file:/dev/shm/hierlock-test-XXXXXX", command[80];
  (void)state;
  assert_non_null(mkdtemp(dsn + 5));
  every_allocation(dsn);
  (void)snprintf(command, sizeof command, "rm -rf %s", dsn + 5);
  assert_int_equal(system(command), 0);
}

static void on_a_server(const char *variable) {
  char dsn[512];
  const char *server = getenv(variable);
  if (!server) skip();
  provision(server, TABLE, BUCKETS);
  (void)snprintf(dsn, sizeof dsn, "%s%ctls=off&table=" TABLE, server,
                 strchr(server, '?') ? '&' : '?');
  own_only = true;
  every_allocation(dsn);
}

static void on_mysql(void **state) {
  (void)state;
  on_a_server("HIERLOCK_MYSQL_DSN");
}

static void on_mariadb(void **state) {
  (void)state;
  on_a_server("HIERLOCK_MARIADB_DSN");
}

/* Without a table. */
static void on_postgresql(void **state) {
  char dsn[512];
  const char *server = getenv("HIERLOCK_POSTGRESQL_DSN");
  (void)state;
  if (!server) skip();
  (void)snprintf(dsn, sizeof dsn, "%s%csslmode=disable", server, strchr(server, '?') ? '&' : '?');
  own_only = true;
  every_allocation(dsn);
}

/* A request that is refused may have taken the first rows. Whatever allocation fails then,
   they go back at once, though its connection lives on. */
static void a_refused_request_on_postgresql(void **state) {
  const char *dsn = getenv("HIERLOCK_POSTGRESQL_DSN");
  (void)state;
  if (!dsn) skip();
  own_only = true;
  all_that_follow = false;
  hl_manager *holder = open_manager(dsn), *waiter = open_manager(dsn);
  assert_true(holder && waiter);
  hl_plan *plan = plan_of(holder, "u1", "a1", 0, HL_EXCLUSIVE);
  hl_plan *same = plan_of(waiter, "u1", "a1", 0, HL_EXCLUSIVE);
  hl_id id = {"u1", 2};
  hl_plan *user = hl_plan_new(hl_manager_layout(holder));
  assert_int_equal(hl_plan_add(user, &id, 1, HL_EXCLUSIVE, false, NULL), HL_OK);
  hl_options options = HL_OPTIONS_INIT;
  for (long n = 1, last = 1; n <= last; n++) {
    hl_lock *lock = NULL, *none = NULL;
    assert_int_equal(hl_acquire(holder, plan, NULL, &lock, NULL), HL_OK);
    atomic_store(&calls, 0);
    atomic_store(&failing, n == 1 ? LONG_MAX : n - 1);
    options.timeout = 30;
    assert_int_not_equal(hl_acquire(waiter, same, &options, &none, NULL), HL_OK);
    atomic_store(&failing, 0);
    if (n == 1) last = atomic_load(&calls) + 1;
    give_back(lock);
    lock = NULL;
    options.timeout = SOON_MS;
    if (hl_acquire(holder, user, &options, &lock, NULL) != HL_OK)
      fail_msg("allocation %ld of %ld: something is held", n - 1, last - 1);
    give_back(lock);
  }
  hl_plan_free(user);
  hl_plan_free(same);
  hl_plan_free(plan);
  hl_manager_close(waiter);
  hl_manager_close(holder);
}

static void id_seen(void *context, const hl_holder *holder) {
  memcpy(context, holder->id, sizeof holder->id);
}

/* A lease with a label, which another program finds by its id, and ends. */
static void revoked_meanwhile(hl_manager *manager) {
  uint64_t count = 0;
  int seen = 0;
  char id[HL_LEASE_ID_SIZE];
  hl_error error;
  hl_lock *lock = NULL;
  hl_filter filter = HL_FILTER_INIT;
  hl_options options = HL_OPTIONS_INIT;
  options.ttl = SOON_MS;
  options.label = "label";
  options.label_size = 5;
  hl_plan *plan = plan_of(manager, "u3", "a3", 0, HL_EXCLUSIVE);
  filter.plan = plan;
  assert_int_equal(hl_acquire(manager, plan, &options, &lock, &error), HL_OK);
  assert_int_equal(hl_manager_leases(manager, &filter, id_seen, id, &error), HL_OK);
  filter.plan = NULL;
  filter.id = id;
  assert_int_equal(hl_manager_leases(manager, &filter, holder_seen, &seen, &error), HL_OK);
  assert_int_equal(seen, 1);
  filter.id = NULL;
  filter.plan = plan;
  assert_int_equal(hl_manager_revoke(manager, &filter, "by", "reason", &count, &error), HL_OK);
  assert_int_equal(count, 1);
  assert_int_equal(hl_lock_check(lock, &error), HL_ELOST);
  give_back(lock);
  hl_plan_free(plan);
}

/* The first of two plans is locked, and keeps a third program out. */
static void first_of_several(hl_manager *manager, bool excludes) {
  int seen = 0;
  hl_error error;
  hl_lock *lock = NULL, *none = NULL;
  hl_pending *pending = NULL, *vain = NULL;
  hl_options options = HL_OPTIONS_INIT;
  hl_plan *one = plan_of(manager, "u4", "a4", 0, HL_EXCLUSIVE);
  hl_plan *two = plan_of(manager, "u5", "a5", 2, HL_EXCLUSIVE);
  const hl_plan *const both[] = {one, two};
  options.timeout = SOON_MS;
  assert_int_equal(hl_start_any(manager, both, 2, &options, &pending, &error), HL_OK);
  assert_int_equal(hl_pending_wait(pending, SOON_MS, &lock, &error), HL_OK);
  hl_pending_free(pending);
  options.timeout = 0;
  const hl_plan *const same[] = {hl_lock_plan(lock)};
  assert_int_equal(hl_start_any(manager, same, 1, &options, &vain, &error), HL_OK);
  assert_true((hl_pending_wait(vain, SOON_MS, &none, &error) != HL_OK) == excludes);
  (void)hl_pending_holders(vain, holder_seen, &seen, &error);
  hl_pending_free(vain);
  give_back(none);
  (void)hl_manager_blockers(manager, same[0], holder_seen, &seen, &error);
  pending = NULL; /* only session locks grow */
  if (hl_lock_start_extend(lock, two, &options, &pending, &error) == HL_OK)
    assert_int_equal(hl_pending_wait(pending, SOON_MS, &none, &error), HL_OK);
  hl_pending_free(pending);
  assert_int_equal(hl_lock_start_release(lock, &pending, &error), HL_OK);
  assert_int_equal(hl_pending_wait(pending, SOON_MS, &none, &error), HL_OK);
  hl_pending_free(pending);
  hl_lock_free(lock);
  hl_plan_free(one);
  hl_plan_free(two);
}

/* Threads of a closed manager may still free something. How many blocks there are when none has
   come or gone for a while. */
static long blocks_settled(void) {
  long now = atomic_load(&blocks);
  for (int same = 0; same < 5; same++) {
    long before = now;
    (void)usleep(20000);
    now = atomic_load(&blocks);
    if (now != before) same = 0;
  }
  return now;
}

/* Without a failing call. Where a number ends the DSN, the space is new each time. Libraries keep
   something now and then; a real leak leaks again. */
static void leaks_nothing(const char *dsn_or_stem, bool numbered) {
  char dsn[600], number[16] = "";
  for (int i = 0; i < 8; i++) {
    blocks_before = blocks_settled();
    if (numbered) (void)snprintf(number, sizeof number, "%d", i);
    (void)snprintf(dsn, sizeof dsn, "%s%s", dsn_or_stem, number);
    hl_manager *opened = open_manager(dsn);
    assert_non_null(opened);
    if (!grants_all(dsn)) revoked_meanwhile(opened);
    first_of_several(opened, !grants_all(dsn));
    program(dsn);
    hl_manager_close(opened);
    if (i > 1 && within(i < 7 ? MOMENT_MS : SOON_MS, blocks_freed, NULL)) return;
  }
  fail_msg("%s: %ld blocks, and %ld before", dsn, atomic_load(&blocks), blocks_before);
}

static void nothing_leaks_on_a_server(const char *variable) {
  char stem[512];
  const char *server = getenv(variable);
  if (!server) skip();
  (void)snprintf(stem, sizeof stem, "%s%cprefix=hierlock_memory_%d_", server,
                 strchr(server, '?') ? '&' : '?', (int)getpid());
  leaks_nothing(stem, true);
}

static void nothing_leaks_on_redis(void **state) {
  (void)state;
  nothing_leaks_on_a_server("HIERLOCK_REDIS_DSN");
}

static void nothing_leaks_on_memcached(void **state) {
  (void)state;
  nothing_leaks_on_a_server("HIERLOCK_MEMCACHED_DSN");
}

static void nothing_leaks_without_a_server(void **state) {
  static const char *const stems[] = {
      "file:%s/f", "sqlite:%s/s", "quorum:majority;sqlite:%s/1;sqlite:%s/2;sqlite:%s/3", "null:"};
  (void)state;
  for (size_t i = 0; i < sizeof stems / sizeof *stems; i++) {
    char directory[] = "/dev/shm/hierlock-test-XXXXXX", stem[300], command[80];
    assert_non_null(mkdtemp(directory));
    (void)snprintf(stem, sizeof stem, stems[i], directory, directory, directory);
    leaks_nothing(stem, i < 2); /* a quorum's list stays as it is */
    (void)snprintf(command, sizeof command, "rm -rf %s", directory);
    assert_int_equal(system(command), 0);
  }
}

/* The lease is there, and is what its text says. */
static void imports_without_memory(const char *dsn) {
  hl_manager *manager = open_manager(dsn);
  assert_non_null(manager);
  for (long n = 1, last = 1; n <= last; n++) {
    char user[24], *text;
    (void)snprintf(user, sizeof user, "u%ld", n);
    hl_plan *plan = plan_of(manager, user, "a", 3, HL_EXCLUSIVE);
    hl_options options = HL_OPTIONS_INIT;
    hl_lock *lock = NULL;
    options.ttl = SOON_MS;
    assert_int_equal(hl_acquire(manager, plan, &options, &lock, NULL), HL_OK);
    assert_int_equal(hl_lock_export(lock, &text, NULL), HL_OK);
    hl_lock_free(lock);
    atomic_store(&calls, 0);
    atomic_store(&failing, n == 1 ? LONG_MAX : n - 1);
    int status = hl_import(manager, text, strlen(text), NULL, &lock, NULL);
    if (n == 1) last = atomic_load(&calls) + 1;
    atomic_store(&failing, 0);
    if (status != HL_OK && status != HL_ENOMEM && status != HL_ESTORE)
      fail_msg("%s: import says %d when call %ld fails", dsn, status, n - 1);
    /* A worker that still released it would keep the next import from writing. */
    if (lock) assert_int_equal(hl_lock_release(lock, true, NULL), HL_OK);
    hl_lock_free(lock);
    hl_plan_free(plan);
    free(text);
  }
  hl_manager_close(manager);
}

static void an_import_says_that_there_is_no_memory(void **state) {
  static const char *const stems[] = {"file:%s/f", "sqlite:%s/s"};
  (void)state;
  for (size_t i = 0; i < sizeof stems / sizeof *stems; i++) {
    char directory[] = "/dev/shm/hierlock-test-XXXXXX", dsn[80], command[80];
    assert_non_null(mkdtemp(directory));
    (void)snprintf(dsn, sizeof dsn, stems[i], directory);
    imports_without_memory(dsn);
    (void)snprintf(command, sizeof command, "rm -rf %s", directory);
    assert_int_equal(system(command), 0);
  }
}

/* At no port of them is a server; then the process has no descriptor for any. MySQL and
   PostgreSQL: see every_allocation. */
static void nothing_leaks_where_open_fails(void **state) {
  static const char *const dsns[] = {
      "redis://127.0.0.1:1",
      "redis+cluster://127.0.0.1:1,127.0.0.1:2",
      "redis+sentinel://127.0.0.1:1,127.0.0.1:2?service=s&sentinel_password=p",
      "memcached://127.0.0.1:1,127.0.0.1:2",
      "sqlite:/dev/null/s",
      "file:/dev/null/f",
      "quorum:majority;redis://127.0.0.1:1;redis://127.0.0.1:2;redis://127.0.0.1:3",
  };
  const size_t n = sizeof dsns / sizeof *dsns;
  struct rlimit usual, none;
  (void)state;
  assert_int_equal(getrlimit(RLIMIT_NOFILE, &usual), 0);
  for (size_t i = 0; i < 2 * n; i++) {
    int lowest = dup(2); /* which is free */
    assert_int_equal(close(lowest), 0);
    none = (struct rlimit){(rlim_t)lowest, usual.rlim_max};
    if (i >= n) assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    atomic_store(&failing, LONG_MAX); /* no message */
    for (int tries = 0;; tries++) {
      blocks_before = blocks_settled();
      assert_null(open_manager(dsns[i % n]));
      if (tries > 1 && within(tries < 8 ? MOMENT_MS : SOON_MS, blocks_freed, NULL)) break;
      if (tries == 8)
        fail_msg("%s: %ld blocks, and %ld before", dsns[i % n], atomic_load(&blocks),
                 blocks_before);
    }
    atomic_store(&failing, 0);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &usual), 0);
  }
}

static bool is_wanted(const char *name, char **patterns) {
  bool wanted = !*patterns || **patterns == '-';
  for (; *patterns; patterns++) {
    bool without = **patterns == '-';
    if (fnmatch(*patterns + without, name, 0) == 0) wanted = !without;
  }
  return wanted;
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(on_the_embedded_store),
      cmocka_unit_test(on_mysql),
      cmocka_unit_test(on_mariadb),
      cmocka_unit_test(on_postgresql),
      cmocka_unit_test(a_refused_request_on_postgresql),
      cmocka_unit_test(nothing_leaks_on_redis),
      cmocka_unit_test(nothing_leaks_on_memcached),
      cmocka_unit_test(nothing_leaks_without_a_server),
      cmocka_unit_test(an_import_says_that_there_is_no_memory),
      cmocka_unit_test(nothing_leaks_where_open_fails),
  };
  const struct CMUnitTest last = cmocka_unit_test(nothing_is_left);
  struct CMUnitTest chosen[sizeof tests / sizeof *tests + 1];
  size_t n = 0;
  (void)argc;
  for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
    if (is_wanted(tests[i].name, argv + 1)) chosen[n++] = tests[i];
  chosen[n++] = last;
  return _cmocka_run_group_tests("tests", chosen, n, NULL, NULL);
}
