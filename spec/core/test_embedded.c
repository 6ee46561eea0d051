/*
 * test_embedded.c - the embedded store's table of locks (csrc/stores/embedded): taking, waiting,
 * giving back, upgrades, leases' claims. Other processes: test_embedded_others.c; its file:
 * test_embedded_file.c.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "embedded_table.h"
#include "leftovers.h"

/* ------------------------------------------------------------------ modes */

static void modes_conflict_as_the_table_says(void **state) {
  (void)state;
  static const char *const table[] = {[HL__IS] = "IS",   [HL__IX] = "IX",   [HL_SHARED] = "S",
                                      [HL_UPDATE] = "U", [HL__SIX] = "SIX", [HL_EXCLUSIVE] = "X"};
  /* Symmetric; and all pairs that exclude each other. */
  static const uint8_t order[] = {HL__IS, HL__IX, HL_SHARED, HL_UPDATE, HL__SIX, HL_EXCLUSIVE};
  static const char *const waits[] = {".....w", "..wwww", ".w..ww", ".w.www", ".wwwww", "wwwwww"};
  for (unsigned i = 0; i < 6; i++)
    for (unsigned j = 0; j < 6; j++) {
      assert_non_null(table[order[i]]);
      assert_int_equal(hl__modes_conflict(order[i], order[j]), waits[i][j] == 'w');
      int first = take_one(a, row(0, 1, (hl_mode)order[i]), 0);
      int second = take_one(b, row(0, 1, (hl_mode)order[j]), 0);
      assert_int_equal(first, HL_OK);
      assert_int_equal(second, waits[i][j] == 'w' ? HL_TIMEOUT : HL_OK);
      hl__shm_give_back(a, 0);
      hl__shm_give_back(b, 0);
    }
}

/* The join of two modes keeps out what either does, and nothing else. */
static void modes_are_joined(void **state) {
  (void)state;
  for (unsigned i = HL_SHARED; i <= HL__SIX; i++)
    for (unsigned j = HL_SHARED; j <= HL__SIX; j++) {
      const unsigned joined = hl__mode_supremum(i, j);
      assert_int_equal(joined, hl__mode_supremum(j, i));
      assert_int_equal(hl__mode_covers(i, j), joined == i);
      for (unsigned k = HL_SHARED; k <= HL__SIX; k++)
        assert_int_equal(hl__modes_conflict(joined, k),
                         hl__modes_conflict(i, k) || hl__modes_conflict(j, k));
    }
  assert_int_equal(hl__mode_supremum(HL_SHARED, HL__IX), HL__SIX);
  assert_int_equal(hl__mode_supremum(HL_SHARED, HL__IS), HL_SHARED);
  assert_int_equal(hl__mode_supremum(HL__SIX, HL_EXCLUSIVE), HL_EXCLUSIVE);
}

static void assert_free_for(hl_mode granted, hl_mode refused) {
  assert_int_equal(take_one(c, row(1, 5, granted), 0), HL_OK);
  hl__shm_give_back(c, 0);
  assert_int_equal(take_one(c, row(1, 5, refused), 0), HL_TIMEOUT);
}

/* A session that shares a subtree, and works in it, keeps out what either keeps out; so does its
   lease. */
static void two_modes_of_one_row_count_together(void **state) {
  (void)state;
  const hl_row intended = row(1, 5, (hl_mode)HL__IX);
  assert_int_equal(take_one(a, row(1, 5, S), 0), HL_OK);
  assert_free_for(S, (hl_mode)HL__IX);
  assert_int_equal(take_one(a, intended, 0), HL_OK);
  assert_free_for((hl_mode)HL__IS, S);
  assert_free_for((hl_mode)HL__IS, (hl_mode)HL__IX);
  uint32_t lease = lease_new(a, 1000000);
  assert_free_for((hl_mode)HL__IS, S);
  assert_free_for((hl_mode)HL__IS, (hl_mode)HL__IX);
  assert_true(hl__shm_lease_end(space, lease, stamp_of(lease), 0));
  assert_int_equal(take_one(a, row(1, 5, S), 0), HL_OK);
  assert_int_equal(take_one(a, intended, 0), HL_OK);
  assert_true(hl__shm_give_back_row(a, &intended));
  assert_free_for(S, (hl_mode)HL__IX);
}

/* Writers below do not pass one who waits to share all of it; nor do they starve it. */
static void an_intention_stands_in_the_queue(void **state) {
  (void)state;
  assert_int_equal(take_one(a, row(1, 5, (hl_mode)HL__IX), 0), HL_OK);
  waiter it = {.session = b, .row = row(1, 5, S), .ms = PATIENCE_MS};
  waiter_start(&it);
  assert_int_equal(take_one(c, row(1, 5, (hl_mode)HL__IX), 0), HL_TIMEOUT);
  hl__shm_give_back(a, 0);
  assert_int_equal(waiter_end(&it), HL_OK);
  assert_free_for(S, (hl_mode)HL__IX);
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

static void circle_of(hl_mode held, hl_mode wanted) {
  const hl_row own[2] = {row(1, 1, held), row(1, 2, wanted)};
  hl__shm_session *sessions[2] = {a, b};
  waiter waiters[2];
  for (int i = 0; i < 2; i++) assert_int_equal(take_one(sessions[i], own[i], 0), HL_OK);
  for (int i = 0; i < 2; i++) {
    hl_row other = own[1 - i];
    other.mode = own[i].mode;
    waiters[i] = (waiter){
        .session = sessions[i], .row = other, .ms = PATIENCE_MS, .agent = 11 * (uint64_t)(i + 1)};
    waiter_start(&waiters[i]);
  }
  while (!atomic_load(&waiters[0].done) && !atomic_load(&waiters[1].done)) (void)usleep(1000);
  const int victim = atomic_load(&waiters[1].done);
  assert_int_equal(waiter_end(&waiters[victim]), HL_DEADLOCK);
  hl__shm_give_back(sessions[victim], 0);
  assert_int_equal(waiter_end(&waiters[1 - victim]), HL_OK);
  hl__shm_give_back(sessions[1 - victim], 0);
}

/* One shares a subtree and waits to share another, whose writer wants to write in the first. */
static void a_circle_of_intentions_is_refused(void **state) {
  (void)state;
  circle_of(S, (hl_mode)HL__IX);
  circle_of((hl_mode)HL__IX, (hl_mode)HL__SIX);
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
  enum { SESSIONS = 200, ROWS = 100 };
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

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      IT(modes_conflict_as_the_table_says),
      IT(modes_are_joined),
      IT(two_modes_of_one_row_count_together),
      IT(an_intention_stands_in_the_queue),
      IT(a_circle_of_intentions_is_refused),
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
      cmocka_unit_test(nothing_is_left),
  };
  if (!between_begin()) return 1;
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
