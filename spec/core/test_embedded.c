/*
 * test_embedded.c - the embedded store's table of locks (csrc/stores/embedded): taking, waiting,
 * giving back, upgrades, leases' claims, deaths, damaged files. After each test the index must be
 * what the claims say. Other processes are real ones: a forked child opens the directory afresh.
 */
#include "../embedded/table.h"

#include <dlfcn.h>
#include <errno.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include <cmocka.h>

#include "leftovers.h"

enum {
  PATIENCE_MS = 20000, /* after that a condition that should come true has failed to */
  STAYS_MS = 60        /* for how long something stays before it is believed to stay */
};

static hl__shm_space *space;
static hl__shm_session *a, *b, *c;

static void pause_ms(int ms) {
  const struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
  (void)nanosleep(&t, NULL);
}

/* The index is what the claims say, as soon as no thread mends any more. */
static void assert_sound(void) {
  const char *wrong = verify(space);
  for (int i = 0; wrong && i < PATIENCE_MS; i++) {
    pause_ms(1);
    wrong = verify(space);
  }
  if (wrong) (void)fprintf(stderr, "verify: %s\n", wrong);
  assert_null(wrong);
}

static int setup(void **state) {
  (void)state;
  table_make();
  space = space_open();
  if (!space) (void)fprintf(stderr, "%s\n", fault.message);
  assert_non_null(space);
  a = session_begin(space);
  b = session_begin(space);
  c = session_begin(space);
  return 0;
}

static int teardown(void **state) {
  (void)state;
  assert_sound();
  hl__shm_end(a);
  hl__shm_end(b);
  hl__shm_end(c);
  assert_sound();
  hl__shm_space_unref(space);
  table_remove();
  return 0;
}

/* A thread that waits for one row. */
typedef struct waiter {
  pthread_t thread;
  hl__shm_session *session;
  hl_row row;
  int64_t ms;
  uint64_t agent;
  bool pending; /* its agent does not block */
  uint64_t exempt;
  int status;
  char reason[128]; /* of a time-out */
  atomic_int done;
} waiter;

static void *waiter_run(void *context) {
  waiter *self = context;
  const hl_request request = {.rows = &self->row,
                              .n = 1,
                              .deadline = hl__now_ms() + self->ms,
                              .agent = self->agent,
                              .blocks = self->agent != 0 && !self->pending};
  hl_error error;
  self->status = hl__shm_take(self->session, &request, self->exempt, &error);
  if (self->status) memcpy(self->reason, error.reason, sizeof self->reason);
  atomic_store(&self->done, 1);
  return NULL;
}

static void waiter_start(waiter *self) {
  uint64_t waits = atomic_load(&space->waits);
  assert_int_equal(pthread_create(&self->thread, NULL, waiter_run, self), 0);
  for (int i = 0; i < PATIENCE_MS && atomic_load(&space->waits) == waits; i++) pause_ms(1);
}

static int waiter_end(waiter *self) {
  (void)pthread_join(self->thread, NULL);
  return self->status;
}

/* ------------------------------------------------------------------ modes */

static void modes_conflict_as_the_table_says(void **state) {
  (void)state;
  static const char *const table[] = {
      [HL__SHM_IS] = "IS", [HL__SHM_IX] = "IX",   [HL__SHM_S] = "S",
      [HL__SHM_U] = "U",   [HL__SHM_SIX] = "SIX", [HL__SHM_X] = "X"};
  /* Symmetric; and all pairs that exclude each other. */
  static const uint8_t order[] = {HL__SHM_IS, HL__SHM_IX,  HL__SHM_S,
                                  HL__SHM_U,  HL__SHM_SIX, HL__SHM_X};
  static const char *const waits[] = {".....w", "..wwww", ".w..ww", ".w.www", ".wwwww", "wwwwww"};
  for (unsigned i = 0; i < 6; i++)
    for (unsigned j = 0; j < 6; j++) {
      assert_non_null(table[order[i]]);
      assert_int_equal(hl__shm_conflicts[order[i]] >> order[j] & 1, waits[i][j] == 'w');
      int first = take_one(a, row(0, 1, (hl_mode)order[i]), 0);
      int second = take_one(b, row(0, 1, (hl_mode)order[j]), 0);
      assert_int_equal(first, HL_OK);
      assert_int_equal(second, waits[i][j] == 'w' ? HL_TIMEOUT : HL_OK);
      hl__shm_give_back(a, 0);
      hl__shm_give_back(b, 0);
    }
}

/* ---------------------------------------------------------------- sessions */

static void all_rows_or_none(void **state) {
  (void)state;
  hl_row one[3] = {row(0, 1, S), row(1, 2, S), row(2, 3, X)};
  hl_row two[3] = {row(0, 1, S), row(1, 9, S), row(2, 3, X)};
  assert_int_equal(take(a, one, 3, 0), HL_OK);
  assert_int_equal(take(b, two, 3, 0), HL_TIMEOUT);
  assert_int_equal(fault.level, 2);
  assert_int_equal(fault.bucket, 3);
  assert_int_equal(b->n, 0);
  assert_int_equal(take_one(c, row(1, 9, X), 0), HL_OK);
  hl__shm_give_back(a, 0);
  assert_int_equal(take_one(b, row(2, 3, X), 0), HL_OK);
}

static void one_session_is_not_in_its_own_way(void **state) {
  (void)state;
  assert_int_equal(take_one(a, row(2, 5, S), 0), HL_OK);
  assert_int_equal(take_one(a, row(2, 5, X), 0), HL_OK);
  assert_int_equal(take_one(b, row(2, 5, S), 0), HL_TIMEOUT);
  hl_row it = row(2, 5, X);
  assert_true(hl__shm_give_back_row(a, &it));
  assert_false(hl__shm_give_back_row(a, &it));
  assert_int_equal(take_one(b, row(2, 5, S), 0), HL_OK);
  assert_int_equal(take_one(a, row(2, 5, X), 0), HL_TIMEOUT);
  assert_int_equal(a->n, 1);
}

static void an_upgrade_comes_before_others(void **state) {
  (void)state;
  assert_int_equal(take_one(a, row(2, 5, S), 0), HL_OK);
  assert_int_equal(take_one(b, row(2, 5, S), 0), HL_OK);
  waiter other = {.session = c, .row = row(2, 5, X), .ms = PATIENCE_MS};
  waiter up = {.session = a, .row = row(2, 5, X), .ms = PATIENCE_MS};
  waiter_start(&other);
  waiter_start(&up);
  hl__shm_give_back(b, 0);
  assert_int_equal(waiter_end(&up), HL_OK);
  assert_false(atomic_load(&other.done));
  assert_sound();
  hl__shm_give_back(a, 0);
  assert_int_equal(waiter_end(&other), HL_OK);
}

static void first_come_first_served(void **state) {
  (void)state;
  hl__shm_session *sessions[6];
  waiter waiters[6];
  assert_int_equal(take_one(a, row(2, 5, X), 0), HL_OK);
  for (int i = 0; i < 6; i++) {
    sessions[i] = session_begin(space);
    waiters[i] =
        (waiter){.session = sessions[i], .row = row(2, 5, i < 4 ? S : X), .ms = PATIENCE_MS};
    waiter_start(&waiters[i]);
  }
  assert_int_equal(take_one(b, row(2, 5, S), 0), HL_TIMEOUT);
  hl__shm_give_back(a, 0);
  for (int i = 0; i < 4; i++) assert_int_equal(waiter_end(&waiters[i]), HL_OK);
  /* Who comes now stands behind those that wait, though only sharers hold the row. */
  assert_int_equal(take_one(b, row(2, 5, S), 0), HL_TIMEOUT);
  for (int i = 0; i < 4; i++) hl__shm_give_back(sessions[i], 0);
  assert_int_equal(waiter_end(&waiters[4]), HL_OK);
  assert_false(atomic_load(&waiters[5].done));
  hl__shm_give_back(sessions[4], 0);
  assert_int_equal(waiter_end(&waiters[5]), HL_OK);
  for (int i = 0; i < 6; i++) hl__shm_end(sessions[i]);
}

static void a_wait_ends_in_time(void **state) {
  (void)state;
  assert_int_equal(take_one(a, row(2, 5, X), 0), HL_OK);
  for (int i = 0; i < 10; i++) {
    const int64_t begun = hl__shm_now();
    assert_int_equal(take_one(b, row(2, 5, S), 10), HL_TIMEOUT);
    assert_true(hl__shm_now() - begun >= 10 * INT64_C(1000000));
  }
  assert_sound();
  assert_int_equal(b->n, 0);
}

static void a_cancelled_wait_ends_at_once(void **state) {
  (void)state;
  assert_int_equal(take_one(a, row(2, 5, X), 0), HL_OK);
  waiter it = {.session = b, .row = row(2, 5, X), .ms = PATIENCE_MS};
  waiter_start(&it);
  int64_t begun = hl__now_ms();
  hl__shm_cancel(b);
  assert_int_equal(waiter_end(&it), HL_CANCELLED);
  assert_true(hl__now_ms() - begun < PATIENCE_MS / 2);
  /* Cancelled before: the next call that waits. */
  hl__shm_cancel(b);
  assert_int_equal(take_one(b, row(2, 5, X), PATIENCE_MS), HL_CANCELLED);
  hl__shm_give_back(a, 0);
  assert_int_equal(take_one(b, row(2, 5, X), PATIENCE_MS), HL_OK);
}

static void a_circle_is_refused(void **state) {
  (void)state;
  const hl_request first = {
      .rows = (hl_row[]){row(2, 1, X)}, .n = 1, .try_once = true, .agent = 11};
  const hl_request second = {
      .rows = (hl_row[]){row(2, 2, X)}, .n = 1, .try_once = true, .agent = 22};
  assert_int_equal(hl__shm_take(a, &first, 0, &fault), HL_OK);
  assert_int_equal(hl__shm_take(b, &second, 0, &fault), HL_OK);
  /* The waits are other sessions' of the same agents. */
  hl__shm_session *d = session_begin(space);
  waiter it = {.session = c, .row = row(2, 2, X), .ms = PATIENCE_MS, .agent = 11};
  waiter_start(&it);
  waiter closes = {.session = d, .row = row(2, 1, X), .ms = PATIENCE_MS, .agent = 22};
  waiter_start(&closes);
  /* The one that closes it; or the other, where the first look took too long. */
  while (!atomic_load(&it.done) && !atomic_load(&closes.done)) (void)usleep(1000);
  const bool last = atomic_load(&closes.done);
  assert_int_equal(waiter_end(last ? &closes : &it), HL_DEADLOCK);
  assert_false(atomic_load(last ? &it.done : &closes.done));
  hl__shm_give_back(last ? b : a, 0);
  assert_int_equal(waiter_end(last ? &it : &closes), HL_OK);
  hl__shm_end(d);
}

static void take_as(hl__shm_session *session, hl_row it, uint64_t agent) {
  const hl_request request = {.rows = &it, .n = 1, .try_once = true, .agent = agent};
  assert_int_equal(hl__shm_take(session, &request, 0, &fault), HL_OK);
}

/* Both see it before one of them has gone. */
static void one_of_two_gives_way_in_a_circle(void **state) {
  (void)state;
  hl__shm_session *d = session_begin(space), *sessions[2] = {c, d};
  uint32_t nodes[2];
  take_as(a, row(2, 1, X), 11);
  take_as(b, row(2, 2, X), 22);
  waiter one = {.session = c, .row = row(2, 2, X), .ms = PATIENCE_MS, .agent = 11, .pending = true};
  waiter two = {.session = d, .row = row(2, 1, X), .ms = PATIENCE_MS, .agent = 22, .pending = true};
  waiter_start(&one);
  waiter_start(&two);
  for (int i = 0; i < 2; i++) {
    nodes[i] = atomic_load(&sessions[i]->waits);
    atomic_store(&hl__shm_record_at(space, sessions[i]->agent->record)->waits, nodes[i]);
  }
  assert_int_equal(hl__shm_circle(space, nodes[0], &fault), HL_DEADLOCK);
  assert_int_equal(hl__shm_circle(space, nodes[1], &fault), HL_OK);
  assert_int_not_equal(waiter_end(&one), HL_OK);
  hl__shm_give_back(a, 0);
  assert_int_equal(waiter_end(&two), HL_OK);
  for (int i = 0; i < 2; i++)
    atomic_store(&hl__shm_record_at(space, sessions[i]->agent->record)->waits, 0);
  hl__shm_end(d);
}

static void tokens_grow(void **state) {
  (void)state;
  uint64_t one = hl__shm_token(space), two = hl__shm_token(space);
  assert_true(two > one);
  assert_int_equal(one & 0xFF, 0);
  hl__shm_token_raise(space, two + 4096);
  assert_true(hl__shm_token(space) > two + 4096);
  hl__shm_token_raise(space, two);
  assert_true(hl__shm_token(space) > two + 4096);
}

static void many_rows_and_sessions(void **state) {
  (void)state;
  enum {
    SESSIONS = 200,
    ROWS = 100
  };
  static hl__shm_session *sessions[SESSIONS];
  for (int turn = 0; turn < 2; turn++) {
    for (uint32_t i = 0; i < SESSIONS; i++) {
      hl_row rows[ROWS];
      sessions[i] = session_begin(space);
      rows[0] = row(0, 1, S);
      for (uint32_t k = 1; k < ROWS; k++) rows[k] = row(2, i * ROWS + k, X);
      assert_int_equal(take(sessions[i], rows, ROWS, 0), HL_OK);
    }
    assert_int_equal(take_one(a, row(0, 1, X), 0), HL_TIMEOUT);
    assert_sound();
    for (int i = 0; i < SESSIONS; i++) hl__shm_end(sessions[i]);
    assert_int_equal(take_one(a, row(0, 1, X), 0), HL_OK);
    hl__shm_give_back(a, 0);
  }
}

/* ------------------------------------------------------------------ leases */

static uint32_t lease_new(hl__shm_session *session, int64_t ms) {
  uint32_t lease = hl__shm_lease_make(space);
  assert_int_not_equal(lease, 0);
  assert_int_equal(hl__shm_lease_claims(session, lease, INT64_MAX, &fault), HL_OK);
  hl__shm_lease_publish(space, lease, hl__shm_boot_ms(space) + ms);
  hl__shm_give_back(session, 0);
  return lease;
}

static uint64_t stamp_of(uint32_t lease) {
  return atomic_load(&hl__shm_lease_at(space, lease)->base.stamp);
}

static bool count_lease(void *context, uint32_t lease) {
  (void)lease;
  ++*(int *)context;
  return true;
}

static int leases(void) {
  int n = 0;
  hl__shm_each_lease(space, count_lease, &n);
  return n;
}

static void a_lease_takes_over_what_its_session_held(void **state) {
  (void)state;
  hl_row rows[3] = {row(0, 1, S), row(1, 2, S), row(2, 3, S)};
  assert_int_equal(take(a, rows, 3, 0), HL_OK);
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
  uint32_t lease = lease_new(a, 1000000);
  assert_int_equal(take_one(b, row(2, 3, S), 0), HL_TIMEOUT);
  assert_int_equal(take_one(b, row(1, 2, X), 0), HL_TIMEOUT);
  assert_int_equal(take_one(b, row(1, 2, S), 0), HL_OK);
  assert_sound();
  uint64_t stamp = stamp_of(lease);
  assert_false(hl__shm_lease_end(space, lease, stamp + 1, 0));
  assert_false(hl__shm_lease_end(space, lease, stamp, 17));
  assert_true(hl__shm_lease_end(space, lease, stamp, 0));
  assert_false(hl__shm_lease_end(space, lease, stamp, 0));
  assert_false(hl__shm_lease_extend(space, lease, stamp, hl__shm_boot_ms(space) + 100));
  assert_int_equal(leases(), 0);
  assert_int_equal(take_one(b, row(2, 3, X), 0), HL_OK);
}

static void a_lease_ends_by_itself_for_a_waiter_and_a_try(void **state) {
  (void)state;
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
  uint32_t lease = lease_new(a, 40);
  assert_int_equal(take_one(b, row(2, 3, X), PATIENCE_MS), HL_OK);
  hl__shm_give_back(b, 0);
  assert_int_equal(take_one(a, row(2, 3, S), 0), HL_OK);
  lease = lease_new(a, -5);
  assert_int_equal(leases(), 1);
  assert_int_equal(take_one(b, row(2, 3, S), 0), HL_OK);
  hl__shm_give_back(b, 0);
  assert_int_equal(take_one(b, row(2, 3, X), 0), HL_OK);
  assert_int_equal(leases(), 0);
  (void)lease;
}

static void a_waiter_hears_of_a_new_end(void **state) {
  (void)state;
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
  waiter it = {.session = b, .row = row(2, 3, X), .ms = PATIENCE_MS};
  waiter_start(&it);
  uint32_t lease = lease_new(a, 60);
  assert_int_equal(waiter_end(&it), HL_OK);
  hl__shm_give_back(b, 0);
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
  lease = lease_new(a, 1000000);
  waiter_start(&it);
  assert_true(hl__shm_lease_extend(space, lease, stamp_of(lease), hl__shm_boot_ms(space) + 20));
  assert_int_equal(waiter_end(&it), HL_OK);
}

static void a_lease_is_converted_in_one_step(void **state) {
  (void)state;
  hl_row rows[2] = {row(0, 1, S), row(2, 3, S)}, up = row(2, 3, X), down = row(2, 3, S);
  assert_int_equal(take(a, rows, 2, 0), HL_OK);
  uint32_t lease = lease_new(a, 1000000);
  uint64_t stamp = stamp_of(lease);
  /* Another session shares the row; the lease itself is not in the way. */
  assert_int_equal(take_one(b, row(2, 3, S), 0), HL_OK);
  waiter it = {.session = a, .row = up, .ms = PATIENCE_MS, .exempt = stamp};
  waiter_start(&it);
  pause_ms(STAYS_MS);
  assert_false(atomic_load(&it.done));
  hl__shm_give_back(b, 0);
  assert_int_equal(waiter_end(&it), HL_OK);
  assert_int_equal(hl__shm_lease_convert(space, lease, stamp, &up, INT64_MAX, &fault), HL_OK);
  hl__shm_give_back(a, 0);
  assert_int_equal(take_one(b, row(2, 3, S), 0), HL_TIMEOUT);
  waiter sharer = {.session = b, .row = down, .ms = PATIENCE_MS};
  waiter_start(&sharer);
  assert_int_equal(hl__shm_lease_convert(space, lease, stamp, &down, INT64_MAX, &fault), HL_OK);
  assert_int_equal(waiter_end(&sharer), HL_OK);
  hl__shm_give_back(b, 0);
  hl_row none = row(1, 77, S);
  assert_int_equal(hl__shm_lease_convert(space, lease, stamp, &none, INT64_MAX, &fault), HL_ELOST);
  assert_true(hl__shm_lease_end(space, lease, stamp, 0));
}

static void an_exemption_ends_with_its_lease(void **state) {
  (void)state;
  assert_int_equal(take_one(a, row(2, 3, S), 0), HL_OK);
  uint32_t lease = lease_new(a, 1000000);
  uint64_t stamp = stamp_of(lease);
  assert_int_equal(take_one(b, row(2, 3, S), 0), HL_OK);
  waiter it = {.session = a, .row = row(2, 3, X), .ms = 300, .exempt = stamp};
  waiter_start(&it);
  /* The lease ends, and another session has the row in its place. */
  assert_true(hl__shm_lease_end(space, lease, stamp, 0));
  assert_false(atomic_load(&it.done));
  assert_int_equal(waiter_end(&it), HL_TIMEOUT);
}

static void a_revoked_record_stays_until_it_is_read(void **state) {
  (void)state;
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
  uint32_t lease = lease_new(a, 1000000);
  uint64_t stamp = stamp_of(lease);
  atomic_store(&hl__shm_lease_at(space, lease)->revoked, 1);
  assert_true(hl__shm_lease_end(space, lease, stamp, 0));
  assert_int_equal(take_one(b, row(2, 3, X), 0), HL_OK);
  assert_int_equal(leases(), 1);
  hl__shm_lease_forget(space, lease, stamp + 1);
  assert_int_equal(leases(), 1);
  hl__shm_lease_forget(space, lease, stamp);
  assert_int_equal(leases(), 0);
}

/* As a power failure may leave it: the row becomes free all the same. */
static void a_claim_of_a_lease_without_a_record_is_in_no_way(void **state) {
  (void)state;
  for (int turn = 0; turn < 3; turn++) {
    assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
    uint32_t lease = lease_new(a, 1000000);
    hl__shm_record *record = &hl__shm_lease_at(space, lease)->base;
    if (turn == 0) atomic_store(&record->stamp, 12345);
    if (turn > 0) atomic_store(&record->used, 0);
    if (turn == 2) atomic_store(&record->end, 0);
    assert_int_equal(take_one(b, row(2, 3, X), turn ? PATIENCE_MS : 0), HL_OK);
    hl__shm_give_back(b, 0);
    atomic_store(&record->used, 0);
  }
}

/* ------------------------------------------------------------------ others */

typedef struct shared {
  atomic_int step;
} shared;
static shared *between;

static void step_await(int step) {
  for (int i = 0; i < PATIENCE_MS && atomic_load(&between->step) < step; i++) pause_ms(1);
  assert_true(atomic_load(&between->step) >= step);
}

/* A child that holds rows until it is killed. `inside`: it also has the partition of the last one.
   */
static pid_t holder_start(const hl_row *rows, size_t n, bool inside) {
  atomic_store(&between->step, 0);
  pid_t pid = fork();
  if (pid) {
    step_await(1);
    return pid;
  }
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* also where a test fails */
  hl__shm_space *own = space_open();
  if (!own || take(session_begin(own), rows, n, 0) != HL_OK) _exit(1);
  if (inside)
    (void)hl__shm_part_lock(
        own,
        hl__shm_part_of(hl__shm_hash(hl__shm_key((uint32_t)rows[n - 1].bucket, rows[n - 1].level))),
        INT64_MAX, NULL);
  atomic_store(&between->step, 1);
  for (;;) (void)pause();
}

static void holder_kill(pid_t pid) {
  (void)kill(pid, SIGKILL);
  (void)waitpid(pid, NULL, 0);
}

static void a_killed_holder_is_noticed(void **state) {
  (void)state;
  hl_row rows[2] = {row(0, 1, S), row(2, 3, X)};
  for (int inside = 0; inside < 2; inside++) {
    pid_t pid = holder_start(rows, 2, inside);
    waiter it = {.session = a, .row = row(2, 3, X), .ms = PATIENCE_MS};
    if (!inside) waiter_start(&it);
    if (!inside) assert_int_equal(take_one(b, row(0, 1, X), 0), HL_TIMEOUT);
    holder_kill(pid);
    if (inside) waiter_start(&it);
    int64_t begun = hl__now_ms();
    assert_int_equal(waiter_end(&it), HL_OK);
    assert_true(hl__now_ms() - begun < PATIENCE_MS / 4);
    assert_sound();
    hl__shm_give_back(a, 0);
    /* A try that comes just behind a death is not refused. */
    pid = holder_start(rows, 2, inside);
    holder_kill(pid);
    assert_int_equal(take_one(a, row(0, 1, X), 0), HL_OK);
    hl__shm_give_back(a, 0);
    pid = holder_start(rows, 2, inside);
    holder_kill(pid);
    assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK); /* nor one in its partition */
    hl__shm_give_back(a, 0);
  }
}

static long switches(void) {
  struct rusage used;
  assert_int_equal(getrusage(RUSAGE_SELF, &used), 0);
  return used.ru_nvcsw;
}

/* Threads of a sanitizer's wake up, too: hence compared. */
static void a_waiter_hardly_wakes_up(void **state) {
  (void)state;
  enum {
    SECONDS = 3
  };
  hl_row rows[1] = {row(2, 3, X)};
  pid_t pid = holder_start(rows, 1, false);
  waiter it = {.session = a, .row = row(2, 3, X), .ms = PATIENCE_MS};
  long idle = switches();
  pause_ms(SECONDS * 1000);
  idle = switches() - idle;
  waiter_start(&it);
  long waits = switches();
  pause_ms(SECONDS * 1000);
  waits = switches() - waits;
  holder_kill(pid); /* it is told at once, not when it looks next */
  assert_int_equal(waiter_end(&it), HL_OK);
  assert_true(waits - idle < 8 * SECONDS);
}

static void a_stopped_process_inside_is_named(void **state) {
  (void)state;
  hl_row rows[1] = {row(2, 3, X)};
  char name[64];
  assert_int_equal(take_one(b, row(2, 3, S), 0), HL_OK);
  hl__shm_give_back(b, 0);
  pid_t pid = holder_start(rows, 1, true);
  (void)kill(pid, SIGSTOP);
  int64_t begun = hl__now_ms();
  assert_int_equal(take_one(a, row(2, 3, X), 100), HL_TIMEOUT);
  assert_true(hl__now_ms() - begun < 2000);
  (void)snprintf(name, sizeof name, "process %d (stopped)", (int)pid);
  assert_non_null(strstr(fault.message, name));
  assert_non_null(strstr(fault.reason, name)); /* for the core's message */
  holder_kill(pid);
  assert_int_equal(take_one(a, row(2, 3, X), PATIENCE_MS), HL_OK);
}

static void a_stopped_process_is_named_to_those_that_wait(void **state) {
  (void)state;
  char name[64];
  const uint32_t part = hl__shm_part_of(hl__shm_hash(hl__shm_key(3, 2)));
  assert_int_equal(take_one(b, row(2, 3, S), 0), HL_OK);
  waiter it = {.session = a, .row = row(2, 3, X), .ms = 1000};
  waiter_start(&it);
  pid_t pid = fork();
  if (pid == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    hl__shm_space *own = space_open();
    (void)hl__shm_part_lock(own, part, INT64_MAX, NULL);
    (void)raise(SIGSTOP);
    _exit(0);
  }
  (void)waitpid(pid, NULL, WUNTRACED);
  hl__shm_give_back(b, 0); /* the waiter is not granted: no process comes in */
  assert_int_equal(waiter_end(&it), HL_TIMEOUT);
  (void)snprintf(name, sizeof name, "process %d (stopped)", (int)pid);
  assert_non_null(strstr(it.reason, name));
  holder_kill(pid);
  assert_int_equal(take_one(a, row(2, 3, X), PATIENCE_MS), HL_OK);
}

static void a_call_that_waits_for_a_stopped_process_is_cancelled(void **state) {
  (void)state;
  hl_row rows[1] = {row(2, 3, S)};
  pid_t pid = holder_start(rows, 1, true);
  (void)kill(pid, SIGSTOP);
  waiter it = {.session = a, .row = row(2, 3, S), .ms = PATIENCE_MS};
  assert_int_equal(pthread_create(&it.thread, NULL, waiter_run, &it), 0);
  pause_ms(STAYS_MS);
  assert_false(atomic_load(&it.done));
  int64_t begun = hl__now_ms();
  hl__shm_cancel(a);
  assert_int_equal(waiter_end(&it), HL_CANCELLED);
  assert_true(hl__now_ms() - begun < PATIENCE_MS / 4);
  holder_kill(pid);
  assert_int_equal(take_one(a, row(2, 3, S), PATIENCE_MS), HL_OK); /* it was forgotten */
}

static void a_release_does_not_wait_for_a_stopped_process(void **state) {
  (void)state;
  hl_row rows[2] = {row(2, 3, S), row(2, 3, S)};
  assert_int_equal(take_one(a, row(2, 3, S), 0), HL_OK);
  pid_t pid = holder_start(rows, 1, true);
  (void)kill(pid, SIGSTOP);
  int64_t begun = hl__now_ms();
  hl__shm_give_back(a, 0);
  assert_true(hl__now_ms() - begun < 1000);
  assert_int_equal(atomic_load(&space->late_count), 1);
  holder_kill(pid);
  assert_int_equal(take_one(b, row(2, 3, X), PATIENCE_MS), HL_OK);
  for (int i = 0; i < PATIENCE_MS && atomic_load(&space->late_count); i++) pause_ms(1);
  assert_int_equal(atomic_load(&space->late_count), 0);
}

static uint32_t part_of(hl_row it) {
  return hl__shm_part_of(hl__shm_hash(hl__shm_key((uint32_t)it.bucket, it.level)));
}

static void many_releases_do_not_wait_for_a_stopped_process(void **state) {
  (void)state;
  enum {
    ROWS = 1000
  };
  hl_row rows[ROWS], beside[1] = {row(1, 1, X)};
  uint32_t bucket = 0;
  for (int i = 0; i < ROWS; i++) {
    do rows[i] = row(2, ++bucket, X);
    while (part_of(rows[i]) != part_of(beside[0]));
  }
  assert_int_equal(take(a, rows, ROWS, 0), HL_OK);
  pid_t pid = holder_start(beside, 1, true);
  (void)kill(pid, SIGSTOP);
  int64_t begun = hl__now_ms();
  hl__shm_give_back(a, 0);
  assert_true(hl__now_ms() - begun < ROWS);
  holder_kill(pid);
  assert_int_equal(take(b, rows, ROWS, PATIENCE_MS), HL_OK);
}

/* The first has a claim in a partition in which the second has died. */
static void one_of_the_dead_is_in_the_way_of_another_s_mender(void **state) {
  (void)state;
  hl_row first[1] = {row(2, 3, X)}, second[1] = {row(2, 4, X)};
  while (part_of(second[0]) != part_of(first[0])) second[0].bucket++;
  pid_t one = holder_start(first, 1, false), two = holder_start(second, 1, true);
  holder_kill(one);
  holder_kill(two);
  int64_t begun = hl__now_ms();
  hl__shm_sweep(space, true, hl__shm_now() + PATIENCE_MS * INT64_C(1000000));
  assert_true(hl__now_ms() - begun < PATIENCE_MS / 4);
  assert_int_equal(take_one(a, first[0], 0), HL_OK);
  assert_int_equal(take_one(b, second[0], 0), HL_OK);
}

/* A dead process held rows in several partitions, and another is stopped inside of one of them. */
static void a_stopped_process_is_in_the_way_of_one_partition_alone(void **state) {
  (void)state;
  enum {
    ROWS = 3
  };
  hl_row rows[ROWS] = {row(2, 3, X), row(2, 4, X), row(2, 5, X)};
  while (part_of(rows[1]) == part_of(rows[0])) rows[1].bucket++;
  while (part_of(rows[2]) == part_of(rows[0]) || part_of(rows[2]) == part_of(rows[1]))
    rows[2].bucket++;
  for (int k = 0; k < ROWS; k++) {
    hl_row beside[1] = {row(2, 1000, X)};
    while (part_of(beside[0]) != part_of(rows[k])) beside[0].bucket++;
    pid_t dead = holder_start(rows, ROWS, false), stopped = holder_start(beside, 1, true);
    (void)kill(stopped, SIGSTOP);
    holder_kill(dead);
    for (int i = 0; i < ROWS; i++)
      if (i != k) assert_int_equal(take_one(a, rows[i], PATIENCE_MS / 4), HL_OK);
    holder_kill(stopped);
    assert_int_equal(take_one(b, rows[k], PATIENCE_MS), HL_OK);
    hl__shm_give_back(a, 0);
    hl__shm_give_back(b, 0);
  }
}

/* Another thread of this process is mending, for some slot. */
static void *mend_elsewhere(void *context) {
  (void)pthread_mutex_lock(&space->mending);
  atomic_store((atomic_bool *)context, true);
  pause_ms(10);
  (void)pthread_mutex_unlock(&space->mending);
  return NULL;
}

/* The try waits for some time only; so of many one must succeed on a busy machine, too. */
static void a_try_waits_for_a_mender(void **state) {
  (void)state;
  enum {
    TRIES = 20
  };
  const hl_row it = row(2, 3, X);
  int status = HL_TIMEOUT;
  for (int i = 0; i < TRIES && status; i++) {
    atomic_bool mends = false;
    pthread_t thread;
    holder_kill(holder_start(&it, 1, false));
    assert_int_equal(pthread_create(&thread, NULL, mend_elsewhere, &mends), 0);
    while (!atomic_load(&mends)) pause_ms(1);
    status = take_one(a, it, 0);
    (void)pthread_join(thread, NULL);
    hl__shm_sweep(space, true, INT64_MAX);
  }
  assert_int_equal(status, HL_OK);
}

/* What a child has of a row. */
typedef struct upgrade_seen {
  uint32_t held, waits;
} upgrade_seen;

static bool upgrade_see(void *context, const hl__shm_claim_seen *seen) {
  upgrade_seen *it = context;
  if (seen->slot == space->me) return true;
  *(hl__shm_state_of(seen->claim) == HL__HELD ? &it->held : &it->waits) = seen->node;
  return true;
}

/* It shares the row with a living session, and waits for it exclusively. Its mender comes upon the
   claim that it holds before the one that waits. */
static void a_dead_waiter_is_granted_nothing_by_its_mender(void **state) {
  (void)state;
  upgrade_seen it = {0};
  assert_int_equal(take_one(b, row(2, 3, S), 0), HL_OK);
  pid_t pid = fork();
  if (pid == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    hl__shm_session *own = session_begin(space_open());
    hl_row rows[2] = {row(2, 8, S), row(2, 9, S)};
    (void)take(own, rows, 2, 0);
    (void)hl__shm_give_back_row(own, &rows[0]); /* so that the next nodes are in this order */
    hl__shm_give_back(own, 0);
    (void)take_one(own, row(2, 3, S), 0);
    (void)take_one(own, row(2, 3, X), PATIENCE_MS);
    _exit(1);
  }
  for (int i = 0; i < PATIENCE_MS && !it.waits; i++) {
    pause_ms(1);
    hl__shm_each_claim(space, upgrade_see, &it);
  }
  assert_true(it.held && it.held < it.waits);
  holder_kill(pid);
  uint64_t handed = atomic_load(&space->handed);
  hl__shm_sweep(space, true, INT64_MAX);
  assert_true(atomic_load(&space->handed) == handed);
  assert_int_equal(take_one(a, row(2, 3, S), 0), HL_OK);
}

/* A mender that was held up may still be about to break the locks of the last process of a slot. */
static void a_slot_is_not_taken_while_it_is_mended(void **state) {
  (void)state;
  uint32_t slot[2], lowest = 1;
  while (atomic_load(&space->table->slot[lowest].state)) lowest++;
  for (int turn = 0; turn < 2; turn++) {
    if (turn == 0) assert_true(hl__shm_byte_lock(space, HL__SHM_MEND + (off_t)lowest));
    atomic_store(&between->step, 0);
    pid_t pid = fork();
    if (pid == 0) {
      hl__shm_space *own = space_open();
      atomic_store(&between->step, own ? (int)own->me : -1);
      hl__shm_space_unref(own);
      _exit(0);
    }
    (void)waitpid(pid, NULL, 0);
    slot[turn] = (uint32_t)atomic_load(&between->step);
    hl__shm_byte_unlock(space, HL__SHM_MEND + (off_t)lowest);
  }
  assert_int_not_equal(slot[0], lowest);
  assert_int_equal(slot[1], lowest);
}

/* A child that holds a row, and then does something with its descriptors, as `step` grows to 2. */
static pid_t holder_that(void (*then)(void)) {
  hl_row it = row(2, 3, X);
  atomic_store(&between->step, 0);
  pid_t pid = fork();
  if (pid == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    hl__shm_space *own = space_open();
    if (!own || take(session_begin(own), &it, 1, 0) != HL_OK) _exit(1);
    atomic_store(&between->step, 1);
    while (atomic_load(&between->step) < 2) pause_ms(1);
    then();
    atomic_store(&between->step, 3);
    for (;;) (void)pause();
  }
  step_await(1);
  return pid;
}

static int control_open(void) {
  char path[96];
  (void)snprintf(path, sizeof path, "%s/" HL__SHM_FILE, directory);
  return open(path, O_RDWR | O_CLOEXEC);
}

static void close_all(void) { (void)close_range(3, ~0u, 0); }
static void execute_another(void) {
  (void)execl("/bin/sleep", "sleep", "1000", (char *)NULL);
  _exit(1);
}

static void a_program_without_descriptors_keeps_its_locks(void **state) {
  (void)state;
  pid_t pid = holder_that(close_all);
  atomic_store(&between->step, 2);
  step_await(3);
  assert_int_equal(take_one(a, row(2, 3, X), 4 * STAYS_MS), HL_TIMEOUT);
  holder_kill(pid);
  assert_int_equal(take_one(a, row(2, 3, X), PATIENCE_MS), HL_OK);
}

static void a_program_that_executes_another_holds_nothing(void **state) {
  (void)state;
  pid_t pid = holder_that(execute_another);
  waiter it = {.session = a, .row = row(2, 3, X), .ms = PATIENCE_MS};
  waiter_start(&it);
  atomic_store(&between->step, 2);
  assert_int_equal(waiter_end(&it), HL_OK);
  assert_int_equal(waitpid(pid, NULL, WNOHANG), 0);
  holder_kill(pid);
}

/* Judging takes no descriptor. */
static void the_dead_are_found_without_descriptors(void **state) {
  (void)state;
  struct rlimit before, none;
  assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
  int next = dup(0);
  assert_true(next > 0);
  (void)close(next);
  none = (struct rlimit){.rlim_cur = (rlim_t)next, .rlim_max = before.rlim_max};
  for (int executes = 0; executes < 2; executes++) {
    pid_t pid = holder_that(execute_another);
    assert_int_equal(take_one(a, row(2, 3, X), 0), HL_TIMEOUT);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    int living = take_one(a, row(2, 3, X), 0);
    if (!executes) holder_kill(pid);
    atomic_store(&between->step, 2);
    int dead = take_one(a, row(2, 3, X), PATIENCE_MS);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    if (executes) holder_kill(pid);
    assert_int_equal(living, HL_TIMEOUT);
    assert_int_equal(dead, HL_OK);
    hl__shm_give_back(a, 0);
  }
}

/* A child that holds a row, and loses its descriptor: it notices, gives back, and stays. */
static void a_program_that_lost_its_descriptor_gives_back(void **state) {
  (void)state;
  /* Closed; now another one of the same file; of another file. */
  for (int replaced = 0; replaced < 3; replaced++) {
    atomic_store(&between->step, 0);
    pid_t pid = fork();
    if (pid == 0) {
      hl_row it = row(2, 3, X);
      (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
      hl__shm_space *own = space_open();
      hl__shm_session *session = session_begin(own);
      if (take(session, &it, 1, 0) != HL_OK) _exit(1);
      atomic_store(&between->step, 1);
      while (atomic_load(&between->step) < 2) pause_ms(1);
      int fd = replaced == 1 ? control_open() : open("/dev/null", O_RDWR | O_CLOEXEC);
      if (replaced ? dup2(fd, own->fd) < 0 : close_range(3, ~0u, 0) != 0) _exit(2);
      if (hl__shm_is_dead(own, space->me)) _exit(3); /* it cannot know */
      if (hl__shm_session_check(session, true, &fault) != HL_ECONNECTION) _exit(4);
      if (!strstr(fault.message, "was closed")) _exit(5);
      atomic_store(&between->step, 3);
      while (atomic_load(&between->step) < 4) pause_ms(1);
      hl__shm_give_back(session, 0);
      for (;;) (void)pause();
    }
    step_await(1);
    atomic_store(&between->step, 2);
    step_await(3);
    assert_int_equal(take_one(a, row(2, 3, X), 4 * STAYS_MS), HL_TIMEOUT);
    atomic_store(&between->step, 4);
    assert_int_equal(take_one(a, row(2, 3, X), PATIENCE_MS), HL_OK);
    assert_int_equal(waitpid(pid, NULL, WNOHANG), 0);
    holder_kill(pid);
    hl__shm_give_back(a, 0);
  }
}

/* overlayfs, in a mount namespace of a child's. 0: noticed at once; 77: no mount here. */
static int overlay_try(void) {
  char under[96], options[512], path[sizeof directory];
  (void)snprintf(under, sizeof under, "%s/overlay", directory);
  if (unshare(CLONE_NEWNS | (geteuid() ? CLONE_NEWUSER : 0)) != 0 || mkdir(under, 0700) != 0 ||
      mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
      mount("tmpfs", under, "tmpfs", 0, NULL) != 0)
    return 77;
  static const char *const parts[] = {"lower", "upper", "work", "merged"};
  for (int i = 0; i < 4; i++) {
    if (snprintf(path, sizeof path, "%s/%s", under, parts[i]) >= (int)sizeof path) return 77;
    if (mkdir(path, 0700) != 0) return 77;
  }
  (void)snprintf(options, sizeof options, "lowerdir=%s/lower,upperdir=%s/upper,workdir=%s/work",
                 under, under, under);
  if (mount("overlay", path, "overlay", 0, options) != 0) return 77;
  memcpy(directory, path, sizeof directory);
  hl__shm_space *own = space_open();
  if (!own || !own->fragile) return 1;
  hl__shm_session *session = session_begin(own);
  if (take_one(session, row(2, 3, X), 0) != HL_OK) return 2;
  close_all();
  if (take_one(session, row(2, 4, X), 0) != HL_ECONNECTION) return 3;
  return hl__shm_touchable(own) ? 4 : 0;
}

static void where_a_mapping_keeps_no_locks_each_call_looks(void **state) {
  (void)state;
  int status = 0;
  char under[96];
  assert_false(space->fragile);
  pid_t pid = fork();
  if (pid == 0) _exit(overlay_try());
  (void)waitpid(pid, &status, 0);
  (void)snprintf(under, sizeof under, "%s/overlay", directory);
  (void)rmdir(under);
  assert_true(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) return; /* no right to mount, or no overlayfs */
  assert_int_equal(WEXITSTATUS(status), 0);
}

static void a_lease_outlives_its_process(void **state) {
  (void)state;
  atomic_store(&between->step, 0);
  pid_t pid = fork();
  if (pid == 0) {
    space = space_open();
    hl__shm_session *own = session_begin(space);
    if (take_one(own, row(2, 3, X), 0) != HL_OK) _exit(1);
    atomic_store(&between->step, (int)lease_new(own, 1000000));
    /* Another that is not finished when it dies. */
    if (take_one(own, row(2, 4, X), 0) != HL_OK) _exit(1);
    if (hl__shm_lease_claims(own, hl__shm_lease_make(space), INT64_MAX, &fault) != HL_OK) _exit(1);
    (void)raise(SIGKILL);
  }
  (void)waitpid(pid, NULL, 0);
  uint32_t lease = (uint32_t)atomic_load(&between->step);
  assert_int_not_equal(lease, 0);
  assert_int_equal(take_one(a, row(2, 4, X), 0), HL_OK);
  assert_int_equal(leases(), 1);
  assert_int_equal(take_one(b, row(2, 3, X), 0), HL_TIMEOUT);
  assert_true(hl__shm_lease_end(space, lease, stamp_of(lease), 0));
  assert_int_equal(take_one(b, row(2, 3, X), 0), HL_OK);
}

static void a_forked_child_has_nothing(void **state) {
  (void)state;
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
  pid_t pid = fork();
  if (pid == 0) {
    bool fine = hl__shm_session_check(a, true, &fault) == HL_ECONNECTION &&
                take_one(b, row(2, 9, X), 0) == HL_ECONNECTION;
    hl__shm_forget(a);
    hl__shm_space *own = space_open();
    fine = fine && own && own != space;
    fine = fine && take_one(session_begin(own), row(2, 3, X), 0) == HL_TIMEOUT;
    _exit(!fine);
  }
  int status;
  (void)waitpid(pid, &status, 0);
  assert_int_equal(status, 0);
  assert_int_equal(hl__shm_session_check(a, true, &fault), HL_OK);
}

/* --------------------------------------------------------------- the file */

/* The test goes on in another space. */
static void move_to(hl__shm_space *other) {
  hl__shm_end(a);
  hl__shm_end(b);
  hl__shm_end(c);
  hl__shm_space_unref(space);
  space = other;
  a = session_begin(space);
  b = session_begin(space);
  c = session_begin(space);
}

static void a_removed_file_is_noticed(void **state) {
  (void)state;
  char path[96];
  hl__shm_space *other;
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
  waiter it = {.session = b, .row = row(2, 3, X), .ms = PATIENCE_MS};
  waiter_start(&it);
  (void)snprintf(path, sizeof path, "%s/" HL__SHM_FILE, directory);
  (void)unlink(path);
  assert_int_equal(waiter_end(&it), HL_ECONNECTION);
  assert_int_equal(hl__shm_session_check(a, true, &fault), HL_ECONNECTION);
  assert_non_null(strstr(fault.message, "removed"));
  other = space_open();
  assert_non_null(other);
  assert_ptr_not_equal(other, space);
  move_to(other);
}

/* The row is given back once it is known that the file was removed. */
static void what_is_granted_in_a_removed_file_is_refused(void **state) {
  (void)state;
  char path[96];
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
  waiter it = {.session = b, .row = row(2, 3, X), .ms = PATIENCE_MS};
  waiter_start(&it);
  (void)snprintf(path, sizeof path, "%s/" HL__SHM_FILE, directory);
  (void)unlink(path);
  assert_true(hl__shm_look(space));
  hl__shm_give_back(a, 0);
  assert_int_equal(waiter_end(&it), HL_ECONNECTION);
  assert_int_equal(b->n, 0);
  move_to(space_open());
}

static void a_directory_that_gets_its_name_back_has_no_stuck_locks(void **state) {
  (void)state;
  char other[80];
  hl__shm_space *again;
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
  assert_int_equal(take_one(c, row(2, 4, X), 0), HL_OK);
  waiter it = {.session = b, .row = row(2, 4, X), .ms = PATIENCE_MS};
  waiter_start(&it);
  (void)snprintf(other, sizeof other, "%s.moved", directory);
  assert_int_equal(rename(directory, other), 0);
  assert_int_equal(waiter_end(&it), HL_ECONNECTION);
  assert_int_equal(rename(other, directory), 0);
  again = space_open();
  assert_non_null(again);
  hl__shm_session *d = session_begin(again);
  assert_int_equal(take_one(d, row(2, 3, X), 0), HL_TIMEOUT);
  hl__shm_give_back(a, 0);
  assert_int_equal(take_one(d, row(2, 3, X), PATIENCE_MS), HL_OK);
  hl__shm_end(d);
  move_to(again);
  assert_int_equal(take_one(a, row(2, 4, X), PATIENCE_MS), HL_OK);
}

/* Makes the directories of a path below `root`. */
static void path_make(const char *root, const char *path) {
  char text[256];
  (void)snprintf(text, sizeof text, "%s%s", root, path);
  for (char *at = text + strlen(root) + 1; *at; at++) {
    if (*at != '/') continue;
    *at = '\0';
    (void)mkdir(text, 0755);
    *at = '/';
  }
  (void)mkdir(text, 0755);
}

/* In a child: what a process sees that has another root directory. 77: it may not. */
static int jailed(const char *jail) {
  hl__shm_space *own = space_open();
  hl__shm_session *session = session_begin(own);
  if (take_one(session, row(2, 3, X), 0) != HL_OK) return 1;
  if ((geteuid() && unshare(CLONE_NEWUSER) != 0) || chroot(jail) != 0 || chdir("/") != 0) return 77;
  if (hl__shm_session_check(session, true, &fault) != HL_OK) return 2;
  if (take_one(session, row(2, 4, X), 0) != HL_OK) return 3;
  /* A name that leads elsewhere by now is another directory's, not that of before. */
  hl__shm_space *other = space_open();
  if (!other || other == own || other->inode == own->inode) return 4;
  if (hl__shm_session_check(session, true, &fault) != HL_OK) return 5;
  atomic_store(&between->step, 1);
  while (atomic_load(&between->step) < 2) pause_ms(1); /* the directory is removed */
  return hl__shm_session_check(session, true, &fault) == HL_ECONNECTION ? 0 : 6;
}

static void a_process_keeps_its_directory_behind_chroot(void **state) {
  (void)state;
  char jail[] = "/dev/shm/hierlock-jail-XXXXXX", path[96];
  int status = 0;
  assert_non_null(mkdtemp(jail));
  path_make(jail, directory);
  (void)snprintf(path, sizeof path, "%s/" HL__SHM_FILE, directory);
  atomic_store(&between->step, 0);
  pid_t pid = fork();
  if (pid == 0) _exit(jailed(jail));
  for (int i = 0; i < PATIENCE_MS && atomic_load(&between->step) < 1; i++) {
    if (waitpid(pid, &status, WNOHANG) == pid) break;
    pause_ms(1);
  }
  if (atomic_load(&between->step) == 1) {
    assert_int_equal(take_one(a, row(2, 3, X), 0), HL_TIMEOUT);
    assert_int_equal(take_one(a, row(2, 4, X), 0), HL_TIMEOUT);
    (void)unlink(path);
    atomic_store(&between->step, 2);
    (void)waitpid(pid, &status, 0);
  }
  if (fork() == 0) (void)execlp("rm", "rm", "-rf", jail, (char *)NULL);
  (void)wait(NULL);
  assert_true(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 77));
}

/* With another user's rights a process may not follow the name any more. */
static void a_process_keeps_its_directory_as_another_user(void **state) {
  (void)state;
  if (geteuid() != 0) return;
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
  assert_int_equal(seteuid(65534), 0);
  const int held = hl__shm_session_check(a, true, &fault);
  const int taken = take_one(a, row(2, 4, X), 0);
  assert_int_equal(seteuid(0), 0);
  assert_int_equal(held, HL_OK);
  assert_int_equal(taken, HL_OK);
}

static void the_dead_make_room_for_an_opener(void **state) {
  (void)state;
  hl__shm_end(a);
  hl__shm_end(b);
  hl__shm_end(c);
  /* All slots are those of dead processes; one has died with a partition locked, and so has one
     that made room. */
  for (uint32_t i = 1; i < HL__SHM_SLOTS - 1; i++)
    if (i != space->me) atomic_store(&space->table->slot[i].state, 1);
  atomic_store(&space->table->header.slots_top, HL__SHM_SLOTS - 1);
  atomic_store(&space->table->part[3].lock, 77 + 1);
  atomic_store(&space->table->part[4].lock, HL__SHM_SLOTS);
  uint32_t me = space->me;
  hl__shm_table *table = space->table;
  int fd = control_open();
  hl__shm_space_unref(space);
  table = mmap(NULL, sizeof *table, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  assert_true(table != MAP_FAILED);
  atomic_store(&table->slot[me].state, 1);
  (void)munmap(table, sizeof *table);
  (void)close(fd);
  space = space_open();
  assert_non_null(space);
  a = session_begin(space);
  b = session_begin(space);
  c = session_begin(space);
}

static void another_boot_beside_the_living_is_refused(void **state) {
  (void)state;
  hl_row rows[1] = {row(2, 3, X)};
  hl__shm_end(a);
  hl__shm_end(b);
  hl__shm_end(c);
  hl__shm_space_unref(space);
  pid_t pid = holder_start(rows, 1, false);
  int fd = control_open();
  uint64_t boot, other = 77;
  assert_int_equal(pread(fd, &boot, sizeof boot, offsetof(hl__shm_header, boot)), sizeof boot);
  assert_int_equal(pwrite(fd, &other, sizeof other, offsetof(hl__shm_header, boot)), sizeof other);
  assert_null(space_open());
  assert_int_equal(fault.status, HL_EUNSAFE_SERVER);
  assert_int_equal(pwrite(fd, &boot, sizeof boot, offsetof(hl__shm_header, boot)), sizeof boot);
  (void)close(fd);
  space = space_open();
  assert_non_null(space);
  a = session_begin(space);
  b = session_begin(space);
  c = session_begin(space);
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_TIMEOUT);
  holder_kill(pid);
  assert_int_equal(take_one(a, row(2, 3, X), PATIENCE_MS), HL_OK);
}

static void a_table_in_use_does_not_grow_old(void **state) {
  (void)state;
  const struct timespec old[2] = {{.tv_sec = time(NULL) - 3 * 86400}, {.tv_sec = 86400}};
  struct stat st;
  int fd = control_open(), locked = open(directory, O_RDONLY | O_CLOEXEC);
  assert_int_equal(futimens(fd, old), 0);
  assert_int_equal(hl__shm_check(space, true, &fault), HL_OK);
  assert_int_equal(fstat(fd, &st), 0);
  assert_true(st.st_atime > time(NULL) - 86400 && st.st_mtime > time(NULL) - 86400);
  assert_int_equal(flock(locked, LOCK_EX | LOCK_NB), -1); /* as systemd-tmpfiles tries */
  (void)close(fd);
  (void)close(locked);
}

/* In a child whose files may not grow any more. */
static int limited(void) {
  hl__shm_space *own = space_open();
  hl__shm_session *session = session_begin(own);
  struct stat st;
  if (fstat(own->fd, &st) != 0) return 1;
  const struct rlimit limit = {(rlim_t)st.st_size, (rlim_t)st.st_size};
  if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 2;
  uint32_t n = 0;
  int status = HL_OK;
  while (status == HL_OK && n < 100000) status = take_one(session, row(2, n++, X), 0);
  if (status != HL_ESTORE || !strstr(fault.message, "ulimit -f")) return 3;
  if (session->n != n - 1 || hl__shm_session_check(session, true, &fault) != HL_OK) return 4;
  hl__shm_end(session);
  hl__shm_space_unref(own);
  const struct rlimit less = {4096, 4096};
  if (setrlimit(RLIMIT_FSIZE, &less) != 0) return 2;
  directory[strlen(directory) - 1] ^= 1;
  own = space_open(); /* one that it would have to make */
  if (own || !strstr(fault.message, "too large")) return 5;
  return rmdir(directory) == 0 ? 0 : 6;
}

static void a_limit_of_file_sizes_is_an_error(void **state) {
  (void)state;
  int status;
  pid_t pid = fork();
  if (pid == 0) _exit(limited());
  (void)waitpid(pid, &status, 0);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), 0);
}

/* In a child without /proc. ThreadSanitizer names functions by what it reads there: without it no
   suppression applies. */
static int without_proc(const char *message) {
#ifdef __SANITIZE_THREAD__
  return 77;
#endif
  if (unshare(CLONE_NEWNS | (geteuid() ? CLONE_NEWUSER : 0)) != 0 ||
      mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
      mount("tmpfs", "/proc", "tmpfs", 0, NULL) != 0)
    return 77;
  hl__shm_space *own = space_open();
  if (message) return own || !strstr(fault.message, message) ? 1 : 0;
  if (!own) return 2;
  hl__shm_session *session = session_begin(own);
  if (take_one(session, row(2, 3, X), 0) != HL_TIMEOUT) return 3;
  if (take_one(session, row(2, 4, X), 0) != HL_OK) return 4;
  atomic_store(&between->step, 1);
  for (;;) (void)pause();
}

/* The child's pid once it holds its row; 0: it has ended, as it should. -1: it may not here. */
static pid_t without_proc_start(const char *message) {
  int status = 0;
  atomic_store(&between->step, 0);
  pid_t pid = fork();
  if (pid == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    _exit(without_proc(message));
  }
  for (int i = 0; i < PATIENCE_MS && atomic_load(&between->step) < 1; i++) {
    if (waitpid(pid, &status, WNOHANG) == pid) {
      assert_true(WIFEXITED(status));
      if (WEXITSTATUS(status) == 77) return -1;
      assert_int_equal(WEXITSTATUS(status), 0);
      return 0;
    }
    pause_ms(1);
  }
  return pid;
}

static void others_begin(void) {
  hl__shm_end(a);
  hl__shm_end(b);
  hl__shm_end(c);
  hl__shm_space_unref(space);
}

static void others_end(void) {
  space = space_open();
  assert_non_null(space);
  a = session_begin(space);
  b = session_begin(space);
  c = session_begin(space);
}

static void a_process_without_proc_shares_the_boot(void **state) {
  (void)state;
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
  pid_t pid = without_proc_start(NULL);
  if (pid < 0) return;
  assert_int_equal(take_one(a, row(2, 4, X), 0), HL_TIMEOUT);
  /* The file is that process' alone; also if it has made it. */
  others_begin();
  for (int made = 0; made < 2; made++) {
    uint64_t none = 0;
    int fd = control_open();
    if (made)
      assert_int_equal(pwrite(fd, &none, sizeof none, offsetof(hl__shm_header, boot)), sizeof none);
    (void)close(fd);
    others_end();
    assert_int_equal(take_one(a, row(2, 4, X), 0), HL_TIMEOUT);
    if (!made) others_begin();
  }
  assert_int_not_equal(atomic_load(&space->table->header.boot[0]), 0);
  holder_kill(pid);
  assert_int_equal(take_one(a, row(2, 4, X), PATIENCE_MS), HL_OK);
}

/* On a disk a file may be of an earlier boot. */
static void a_process_without_proc_guesses_no_boot(void **state) {
  (void)state;
  others_begin();
  table_remove();
  table_make();
  (void)rmdir(directory);
  (void)snprintf(directory, sizeof directory, "/var/tmp/hierlock-embedded-%ld", (long)getpid());
  assert_int_equal(mkdir(directory, 0700), 0);
  space = space_open();
  assert_non_null(space);
  const bool lasts = space->directory.lasts;
  hl__shm_space_unref(space);
  if (lasts) (void)without_proc_start("boot_id");
  others_end();
  if (!lasts) return;
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
  pid_t pid = without_proc_start(NULL); /* others use it: it is of this boot */
  if (pid <= 0) return;
  assert_int_equal(take_one(a, row(2, 4, X), 0), HL_TIMEOUT);
  holder_kill(pid);
}

static void others_files_are_refused(void **state) {
  (void)state;
  static const struct {
    off_t at;
    uint32_t word;
    const char *message;
  } damages[] = {{0, 0x12345678, "is not hierlock's"},
                 {8, 2, "another version"},
                 {12, 77, "is damaged"},
                 {16, 77, "is damaged"},
                 {offsetof(hl__shm_header, inode), 77, "is a copy"},
                 {offsetof(hl__shm_header, born), 77, "is a copy"},
                 {offsetof(hl__shm_header, device), 77, "is a copy"}};
  hl__shm_end(a);
  hl__shm_end(b);
  hl__shm_end(c);
  hl__shm_space_unref(space);
  int fd = control_open();
  for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
    uint32_t before;
    assert_int_equal(pread(fd, &before, sizeof before, damages[i].at), sizeof before);
    if (!before) continue; /* the file system does not say it */
    assert_int_equal(pwrite(fd, &damages[i].word, sizeof before, damages[i].at), sizeof before);
    assert_null(space_open());
    assert_non_null(strstr(fault.message, damages[i].message));
    assert_int_equal(pwrite(fd, &before, sizeof before, damages[i].at), sizeof before);
  }
  off_t size = lseek(fd, 0, SEEK_END);
  assert_int_equal(ftruncate(fd, 8192), 0);
  assert_null(space_open());
  assert_non_null(strstr(fault.message, "truncated"));
  assert_int_equal(ftruncate(fd, 0), 0);
  assert_null(space_open());
  (void)size;
  (void)close(fd);
  table_remove();
  table_make();
  space = space_open();
  a = session_begin(space);
  b = session_begin(space);
  c = session_begin(space);
}

/* What pread() does here, which the linker prefers: fails with these, one after the other, and gives
   no more bytes than this. */
static int reads_fail[3];
static size_t read_most = SIZE_MAX;

ssize_t pread(int fd, void *data, size_t size, off_t at) {
  ssize_t (*real)(int, void *, size_t, off_t);
  for (size_t i = 0; i < sizeof reads_fail / sizeof *reads_fail; i++)
    if (reads_fail[i]) {
      errno = reads_fail[i];
      reads_fail[i] = 0;
      return -1;
    }
  *(void **)&real = dlsym(RTLD_NEXT, sizeof(off_t) > sizeof(long) ? "pread64" : "pread");
  return real(fd, data, size < read_most ? size : read_most, at);
}

static void what_a_failed_read_says_is_not_of_the_file(void **state) {
  (void)state;
  others_begin();
  reads_fail[0] = EIO;
  assert_null(space_open());
  assert_int_equal(reads_fail[0], 0);
  assert_int_equal(fault.status, HL_ESTORE);
  assert_non_null(strstr(fault.message, "cannot read "));
  assert_non_null(strstr(fault.message, strerror(EIO)));

  reads_fail[0] = reads_fail[1] = EINTR; /* the file is read nevertheless, */
  read_most = 100;                       /* in pieces */
  others_end();
  read_most = SIZE_MAX;
  assert_int_equal(reads_fail[1], 0);
}

/* Index words that lead nowhere, or in a circle: calls end, and the partition can be made anew. */
static void a_damaged_index_is_survived(void **state) {
  (void)state;
  const uint64_t key = hl__shm_key(5, 2);
  const uint32_t part = hl__shm_part_of(hl__shm_hash(key));
  for (int damage = 0; damage < 10; damage++) {
    assert_int_equal(take_one(a, row(2, 5, X), 0), HL_OK);
    waiter it = {.session = b, .row = row(2, 5, S), .ms = 300};
    waiter_start(&it);
    assert_int_equal(hl__shm_part_lock(space, part, INT64_MAX, NULL), HL_OK);
    uint32_t index, held = a->held[0].node, waits = atomic_load(&b->waits);
    hl__shm_row *entry = hl__shm_row_find(space, key, false, &index);
    hl__shm_node *holder = hl__shm_node_at(space, held), *node = hl__shm_node_at(space, waits);
    assert_non_null(entry);
    if (damage == 0) node->prev = waits, node->next = waits;
    if (damage == 1) node->prev = held, node->next = held;
    if (damage == 2) entry->first = 0xFFFFFFFF;
    if (damage == 3) entry->last = 0xFFFFFFFF;
    if (damage == 4) entry->holders = waits;
    if (damage == 5) holder->next = holder->prev = held;
    if (damage == 6) entry->next = index;
    if (damage == 7) space->table->head[part][hl__shm_head_of(hl__shm_hash(key))] = 0xFFFFFF00;
    if (damage == 8) holder->row = node->row = 0x7FFFFFFF;
    if (damage == 9) holder->row = node->row = held;
    hl__shm_part_unlock(space, part);
    /* Another row of the same chain. */
    uint32_t other = 6;
    while (hl__shm_part_of(hl__shm_hash(hl__shm_key(other, 2))) != part ||
           hl__shm_head_of(hl__shm_hash(hl__shm_key(other, 2))) !=
               hl__shm_head_of(hl__shm_hash(key)))
      other++;
    (void)take_one(c, row(2, other, X), 10);
    hl__shm_give_back(a, 0);
    (void)waiter_end(&it);
    hl__shm_give_back(b, 0);
    hl__shm_give_back(c, 0);
    assert_int_equal(hl__shm_part_lock(space, part, INT64_MAX, NULL), HL_OK);
    hl__shm_rebuild(space, part);
    hl__shm_part_unlock(space, part);
    assert_sound();
    assert_int_equal(take_one(a, row(2, 5, X), 0), HL_OK);
    hl__shm_give_back(a, 0);
  }
}

static void after_a_reboot_only_leases_are_left(void **state) {
  (void)state;
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
  uint32_t lease = lease_new(a, hl__shm_boot_ms(space) + 10000000);
  atomic_store(&hl__shm_lease_at(space, lease)->end_unix, (uint64_t)hl__unix_ms() + 5000000);
  /* The clock was set back meanwhile. */
  assert_int_equal(take_one(a, row(2, 5, X), 0), HL_OK);
  uint32_t capped = lease_new(a, 3000000);
  atomic_store(&hl__shm_lease_at(space, capped)->ttl, (uint64_t)hl__shm_boot_ms(space) + 3000000);
  atomic_store(&hl__shm_lease_at(space, capped)->end_unix, (uint64_t)hl__unix_ms() + 5000000000);
  /* A node that a process has set aside, which then ended in order. */
  const uint32_t aside = atomic_load(&hl__shm_lease_at(space, lease)->base.first) + 100;
  atomic_store(&hl__shm_node_at(space, aside)->claim, hl__shm_claim(77, 0, HL__RESERVED));
  hl__shm_end(a);
  hl__shm_end(b);
  hl__shm_end(c);
  hl__shm_space_unref(space);
  /* A process that held and awaited something when the power failed; its pid is ours now. */
  hl_row rows[1] = {row(2, 4, X)};
  pid_t pid = holder_start(rows, 1, true);
  holder_kill(pid);
  int fd = control_open();
  uint64_t other = 77;
  assert_int_equal(pwrite(fd, &other, sizeof other, offsetof(hl__shm_header, boot)), sizeof other);
  (void)close(fd);
  space = space_open();
  assert_non_null(space);
  a = session_begin(space);
  b = session_begin(space);
  c = session_begin(space);
  assert_sound();
  assert_true(atomic_load(&hl__shm_node_at(space, aside)->claim) == 0);
  assert_int_equal(take_one(a, row(2, 4, X), 0), HL_OK);
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_TIMEOUT);
  int64_t left = hl__shm_end_ms(atomic_load(&hl__shm_lease_at(space, lease)->base.end)) -
                 hl__shm_boot_ms(space);
  assert_true(left > 4000000 && left <= 5000000);
  assert_true(hl__shm_lease_end(space, lease, stamp_of(lease), 0));
  left = hl__shm_end_ms(atomic_load(&hl__shm_lease_at(space, capped)->base.end)) -
         hl__shm_boot_ms(space);
  assert_true(left > 2000000 && left <= 3000000);
}

int main(int argc, char **argv) {
#define IT(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
  const struct CMUnitTest tests[] = {
      IT(modes_conflict_as_the_table_says),
      IT(all_rows_or_none),
      IT(one_session_is_not_in_its_own_way),
      IT(an_upgrade_comes_before_others),
      IT(first_come_first_served),
      IT(a_wait_ends_in_time),
      IT(a_cancelled_wait_ends_at_once),
      IT(a_circle_is_refused),
      IT(one_of_two_gives_way_in_a_circle),
      IT(tokens_grow),
      IT(many_rows_and_sessions),
      IT(a_lease_takes_over_what_its_session_held),
      IT(a_lease_ends_by_itself_for_a_waiter_and_a_try),
      IT(a_waiter_hears_of_a_new_end),
      IT(a_lease_is_converted_in_one_step),
      IT(an_exemption_ends_with_its_lease),
      IT(a_revoked_record_stays_until_it_is_read),
      IT(a_claim_of_a_lease_without_a_record_is_in_no_way),
      IT(a_killed_holder_is_noticed),
      IT(a_waiter_hardly_wakes_up),
      IT(a_stopped_process_inside_is_named),
      IT(a_stopped_process_is_named_to_those_that_wait),
      IT(a_call_that_waits_for_a_stopped_process_is_cancelled),
      IT(a_release_does_not_wait_for_a_stopped_process),
      IT(many_releases_do_not_wait_for_a_stopped_process),
      IT(one_of_the_dead_is_in_the_way_of_another_s_mender),
      IT(a_stopped_process_is_in_the_way_of_one_partition_alone),
      IT(a_try_waits_for_a_mender),
      IT(a_dead_waiter_is_granted_nothing_by_its_mender),
      IT(a_slot_is_not_taken_while_it_is_mended),
      IT(a_program_without_descriptors_keeps_its_locks),
      IT(a_program_that_executes_another_holds_nothing),
      IT(the_dead_are_found_without_descriptors),
      IT(a_program_that_lost_its_descriptor_gives_back),
      IT(where_a_mapping_keeps_no_locks_each_call_looks),
      IT(a_lease_outlives_its_process),
      IT(a_forked_child_has_nothing),
      IT(a_removed_file_is_noticed),
      IT(what_is_granted_in_a_removed_file_is_refused),
      IT(a_directory_that_gets_its_name_back_has_no_stuck_locks),
      IT(a_process_keeps_its_directory_behind_chroot),
      IT(a_process_keeps_its_directory_as_another_user),
      IT(the_dead_make_room_for_an_opener),
      IT(another_boot_beside_the_living_is_refused),
      IT(a_table_in_use_does_not_grow_old),
      IT(a_limit_of_file_sizes_is_an_error),
      IT(a_process_without_proc_shares_the_boot),
      IT(a_process_without_proc_guesses_no_boot),
      IT(others_files_are_refused),
      IT(what_a_failed_read_says_is_not_of_the_file),
      IT(a_damaged_index_is_survived),
      IT(after_a_reboot_only_leases_are_left),
      cmocka_unit_test(nothing_is_left),
  };
  between = mmap(NULL, sizeof *between, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (between == MAP_FAILED) return 1;
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
