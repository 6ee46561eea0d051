/*
 * test_faulty.c - the core over a store that fails: what it claims of a lease is true, whichever
 * call of the store is refused, cut off from its answer, repeated, or carried out late. What a
 * store's author may expect of the core, and the core of a store: docs/adding-a-store.md.
 *
 * The store is the embedded one with faults around it. A second manager uses the embedded store as
 * it is: nothing is believed but what that one can have.
 */
#include "hierlock.h"
#include "clock.h"
#include "error.h"
#include "store.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "leftovers.h"

#include <stdlib.h>

/* ------------------------------------------------------------------ the store */

typedef enum primitive {
  TAKE,
  TO_LEASE,
  REFRESH,
  INSPECT,
  CONVERT,
  ADOPT,
  DROP,
  PRIMITIVES
} primitive;
static const char *const names[] = {"take",    "to_lease", "refresh", "inspect",
                                    "convert", "adopt",    "drop"};

typedef enum fault {
  NONE,
  REFUSED,  /* it is not carried out, and not answered */
  CUT,      /* it is carried out, and not answered */
  REPEATED, /* it is carried out twice; the first answer counts */
  LATE      /* it is not answered, and carried out when the program has gone on */
} fault;

#define ALWAYS 1000000

static struct {
  atomic_int which, how, left; /* so many calls of `which` fail, in this way */
  atomic_int met;              /* so many have failed */
  /* What was given up, and is under way still: a refresh (ttl > 0), or a drop. */
  atomic_bool is_late;
  hl_lease_terms late;
  int64_t late_ttl;
  atomic_ullong turn; /* of the last refresh that was carried out; others must be greater */
  hl_store *store;
} faulty;

static hl_lease_ops inner; /* of the embedded store */

static fault met(primitive which) {
  if (faulty.which != (int)which) return NONE;
  if (atomic_fetch_sub(&faulty.left, 1) <= 0) return NONE;
  atomic_fetch_add(&faulty.met, 1);
  return (fault)faulty.how;
}

static int cut(hl_error *error) { return hl__error(error, HL_ECONNECTION, "as it was told"); }

/* Carries out `call`, as `how` says. */
#define CARRY_OUT(how, call)                                                                       \
  do {                                                                                             \
    fault how_ = (how);                                                                            \
    if (how_ == REFUSED || how_ == LATE) return cut(error);                                        \
    int status = (call);                                                                           \
    if (how_ == REPEATED) (void)(call);                                                            \
    return how_ == CUT ? cut(error) : status;                                                      \
  } while (0)

static void put_off(const hl_lease_terms *terms, int64_t ttl) {
  if (faulty.is_late) return;
  faulty.late = *terms;
  faulty.late_ttl = ttl;
  faulty.is_late = true;
}

static int faulty_take(hl_session *self, const hl_request *request, hl_grant *grant,
                       hl_error *error) {
  if (!request->lease) return hl_store_file.take(self, request, grant, error);
  CARRY_OUT(met(TAKE), hl_store_file.take(self, request, grant, error));
}

static int faulty_to_lease(hl_session *self, const hl_request *request, hl_grant *grant,
                           hl_error *error) {
  CARRY_OUT(met(TO_LEASE), inner.to_lease(self, request, grant, error));
}

static int faulty_refresh(hl_session *self, const hl_lease_terms *terms, int64_t ttl,
                          int64_t deadline, int64_t *sent_ms, hl_error *error) {
  fault how = met(REFRESH);
  *sent_ms = hl__boot_ms();
  if (how == LATE) put_off(terms, ttl);
  if (how == REFUSED || how == LATE || terms->turn <= faulty.turn) return cut(error);
  faulty.turn = terms->turn;
  CARRY_OUT(how, inner.refresh(self, terms, ttl, deadline, sent_ms, error));
}

static int faulty_inspect(hl_session *self, const hl_lease_terms *terms, int64_t deadline,
                          int64_t *left_ms, hl_error *error) {
  CARRY_OUT(met(INSPECT), inner.inspect(self, terms, deadline, left_ms, error));
}

static int faulty_convert(hl_session *self, const hl_request *request, hl_grant *grant,
                          hl_error *error) {
  CARRY_OUT(met(CONVERT), inner.convert(self, request, grant, error));
}

static int faulty_adopt(hl_session *self, const hl_request *request, hl_grant *grant,
                        hl_error *error) {
  faulty.turn = 0;
  CARRY_OUT(met(ADOPT), inner.adopt(self, request, grant, error));
}

/* The embedded store leaves no call unanswered, and does not look at `again`. */
static int drop(hl_session *self, const hl_lease_terms *terms, bool confirm, int64_t deadline,
                hl_error *error) {
  int status = inner.drop(self, terms, confirm, deadline, error);
  return status == HL_ELOST && terms->again ? HL__ABSENT : status;
}

static int faulty_drop(hl_session *self, const hl_lease_terms *terms, bool confirm,
                       int64_t deadline, hl_error *error) {
  fault how = met(DROP);
  if (how == LATE) put_off(terms, 0);
  CARRY_OUT(how, drop(self, terms, confirm, deadline, error));
}

static hl_store_ops ops;
static hl_lease_ops leases;

static int faulty_open(const hl_store_config *config, hl_store **result, hl_error *error) {
  int status = hl_store_file.open(config, result, error);
  if (status) return status;
  inner = leases = *(*result)->leases;
  leases.refresh = faulty_refresh;
  leases.inspect = faulty_inspect;
  leases.drop = faulty_drop;
  leases.convert = faulty_convert;
  leases.adopt = faulty_adopt;
  leases.to_lease = faulty_to_lease;
  (*result)->leases = &leases;
  faulty.store = *result;
  return HL_OK;
}

/* What is under way arrives. The store compares the turn, as store.h has it. */
static void late_arrives(void) {
  hl_session *session;
  int64_t sent, deadline = hl__now_ms() + 20000;
  if (!faulty.is_late) return;
  hl_lease_terms terms = faulty.late;
  int64_t ttl = faulty.late_ttl;
  faulty.is_late = false;
  if (ttl > 0 && terms.turn <= faulty.turn) return;
  assert_int_equal(hl_store_file.session_open(faulty.store, deadline, &session, NULL), HL_OK);
  if (ttl > 0)
    (void)inner.refresh(session, &terms, ttl, deadline, &sent, NULL);
  else
    (void)inner.drop(session, &terms, true, deadline, NULL);
  hl_store_file.session_close(session);
}

/* ------------------------------------------------------------------ the claims */

#define TTL_MS 60000 /* what the core gives back is free much sooner */

static char directory[] = "/tmp/hierlock-faulty-XXXXXX", dsn[64];

static hl_manager *open_manager(const hl_store_ops *const *stores) {
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager;
  config.dsn = dsn;
  config.stores = stores;
  assert_int_equal(hl_manager_open(&config, &manager, NULL), HL_OK);
  return manager;
}

static int acquire(hl_manager *manager, hl_mode mode, int64_t ttl, int64_t timeout,
                   hl_lock **lock) {
  const hl_id ids[] = {{"u1", 2}, {"a1", 2}, {"r1", 2}};
  hl_options options = HL_OPTIONS_INIT;
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  assert_int_equal(hl_plan_add(plan, ids, 3, mode, true, NULL), HL_OK);
  options.ttl = ttl;
  options.timeout = timeout;
  *lock = NULL;
  int status = hl_acquire(manager, plan, &options, lock, NULL);
  hl_plan_free(plan);
  return status;
}

/* The other has it, and gives it back. `lock` must not claim to be held then, nor before. */
static bool is_free(hl_manager *other, hl_lock *lock) {
  hl_lock *own;
  int status = acquire(other, HL_EXCLUSIVE, TTL_MS, 0, &own);
  assert_true(status == HL_OK || status == HL_TIMEOUT);
  if (status) return false;
  assert_false(lock && hl_lock_is_held(lock)); /* two holders at once */
  assert_int_equal(hl_lock_release(own, true, NULL), HL_OK);
  hl_lock_free(own);
  return true;
}

static void left_note(void *context, const hl_holder *holder) {
  *(int64_t *)context = holder->remaining_ms;
}

/* A call on the lock has ended so. Only a session is lost, with its connection, as no other caller
   has had the lease. What is held is not free, and its record does not end before the belief in it
   does. */
static void claims_hold(hl_manager *other, hl_lock *lock, int status) {
  int64_t before = hl__boot_ms(), claimed = hl_lock_remaining(lock), recorded = 0;
  assert_int_equal(hl_manager_leases(other, NULL, left_note, &recorded, NULL), HL_OK);
  if (claimed) assert_true(hl__boot_ms() + recorded >= before + claimed);
  bool is_held = hl_lock_is_held(lock), free = is_free(other, lock);
  if (status == HL_ELOST) assert_true(faulty.which == TO_LEASE && free);
  if (is_held && hl_lock_remaining(lock)) assert_false(free);
}

/* The life of a lease, through all primitives. */
static hl_lock *live(hl_manager *manager, hl_manager *other, hl_lock *lock) {
  char *text = NULL;
  const int64_t ttls[] = {2 * TTL_MS, TTL_MS / 2};
  for (int i = 0; i < 2; i++) {
    claims_hold(other, lock, hl_lock_refresh(lock, ttls[i], NULL));
    late_arrives();
    claims_hold(other, lock, HL_OK);
  }
  claims_hold(other, lock, hl_lock_check(lock, NULL));
  claims_hold(other, lock, hl_lock_upgrade(lock, NULL, NULL));
  claims_hold(other, lock, hl_lock_downgrade(lock, NULL));
  if (faulty.which != ADOPT) return lock; /* so that the release knows whose drop it was */
  assert_int_equal(hl_lock_export(lock, &text, NULL), HL_OK);
  hl_lock_free(lock);
  lock = NULL;
  int status = hl_import(manager, text, strlen(text), NULL, &lock, NULL);
  claims_hold(other, lock, status);
  if (status) { /* the text is good still */
    faulty.left = 0;
    assert_int_equal(hl_import(manager, text, strlen(text), NULL, &lock, NULL), HL_OK);
    claims_hold(other, lock, HL_OK);
  }
  free(text);
  return lock;
}

static void lives_through(primitive which, fault how, int n) {
  static const hl_store_ops *const stores[] = {&ops, NULL};
  hl_manager *manager = open_manager(stores), *other = open_manager(NULL);
  hl_lock *lock, *last;
  (void)printf("%s, fault %d, %d times\n", names[which], (int)how, n);
  faulty.which = (int)which;
  faulty.how = (int)how;
  faulty.met = 0;
  faulty.turn = 0;
  faulty.left = n;
  hl_options options = HL_OPTIONS_INIT;
  options.ttl = TTL_MS;
  int status = acquire(manager, HL_UPDATE, which == TO_LEASE ? 0 : TTL_MS, 0, &lock);
  if (lock && which == TO_LEASE) status = hl_lock_to_lease(lock, &options, NULL);
  claims_hold(other, lock, lock ? status : HL_OK);
  if (lock && status == HL_OK) lock = live(manager, other, lock);
  if (lock) {
    status = hl_lock_release(lock, true, NULL);
    claims_hold(other, lock, status);
    if (status == HL_OK) assert_true(is_free(other, lock));
  }
  assert_true(faulty.met > 0);
  faulty.left = 0;
  /* Somebody gets it, and keeps it: whatever arrives late is another's. */
  assert_int_equal(acquire(other, HL_EXCLUSIVE, TTL_MS, 20000, &last), HL_OK);
  late_arrives();
  hl_lock_free(lock);
  hl_manager_close(manager);
  assert_int_equal(hl_lock_check(last, NULL), HL_OK);
  assert_int_equal(hl_lock_release(last, true, NULL), HL_OK);
  hl_lock_free(last);
  hl_manager_close(other);
}

static void what_the_core_claims_is_true(void **state) {
  static const int times[] = {1, 2, ALWAYS};
  (void)state;
  for (primitive which = 0; which < PRIMITIVES; which++) {
    for (size_t i = 0; i < sizeof times / sizeof *times; i++) {
      lives_through(which, REFUSED, times[i]);
      lives_through(which, CUT, times[i]);
      if (which == REFRESH || which == DROP) lives_through(which, LATE, times[i]);
    }
    if (which == REFRESH || which == DROP || which == ADOPT || which == INSPECT)
      lives_through(which, REPEATED, ALWAYS);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(what_the_core_claims_is_true),
                                     cmocka_unit_test(nothing_is_left)};
  if (!mkdtemp(directory)) return 1;
  (void)snprintf(dsn, sizeof dsn, "file:%s/locks", directory);
  ops = hl_store_file;
  ops.traits.scarce = ops.traits.blocks = true; /* as a server's */
  ops.start = NULL;
  ops.open = faulty_open;
  ops.take = faulty_take;
  int status = cmocka_run_group_tests(tests, NULL, NULL);
  char command[80];
  (void)snprintf(command, sizeof command, "rm -rf %s", directory);
  return system(command) != 0 ? 1 : status;
}
