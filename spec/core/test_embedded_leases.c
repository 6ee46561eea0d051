/*
 * test_embedded_leases.c - the embedded store in shared memory, through its hl_store_ops: sessions
 * and leases, and what a process leaves behind that is killed at any instruction of a call.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "embedded_store.h"
#include "leftovers.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define SOON_MS 20000
/* Rows of a lease: more than one chunk of anything is made of. */
#define ROWS 3

/* -------------------------------------------------------------- helpers */

static int64_t soon(void) { return hl__now_ms() + SOON_MS; }

static hl_lease_terms terms_of(uint8_t name, int64_t ttl) {
  hl_lease_terms terms = {.ttl = ttl, .owner = "owner"};
  memset(terms.id, name, sizeof terms.id);
  memset(terms.secret, name + 1, sizeof terms.secret);
  memset(terms.holder, name + 2, sizeof terms.holder);
  return terms;
}

/* A request for rows of the deepest level from bucket `first` on. */
typedef struct wanted {
  hl_row rows[ROWS + 1];
  hl_request request;
  hl_grant grant;
} wanted;

static hl_request *want(wanted *it, uint32_t first, size_t n, hl_mode mode) {
  memset(it, 0, sizeof *it);
  for (size_t i = 0; i < n; i++)
    it->rows[i] = (hl_row){.level = 2, .bucket = first + i, .mode = (uint8_t)mode};
  it->request = (hl_request){.rows = it->rows,
                             .n = n,
                             .recorded = it->rows,
                             .recorded_n = n,
                             .try_once = true,
                             .deadline = soon(),
                             .path = "u1/a1",
                             .label = "a\nlabel",
                             .label_size = 7,
                             .mode = mode};
  return &it->request;
}

static int take_mode(hl_session *session, uint32_t first, size_t n, hl_mode mode) {
  wanted it;
  return ops->take(session, want(&it, first, n, mode), &it.grant, NULL);
}

static int take(hl_session *session, uint32_t first, size_t n) {
  return take_mode(session, first, n, HL_EXCLUSIVE);
}

static int lease_mode(hl_session *session, uint32_t first, size_t n, hl_mode mode,
                      hl_lease_terms *terms) {
  wanted it;
  want(&it, first, n, mode)->lease = terms;
  int status = ops->take(session, &it.request, &it.grant, NULL);
  if (status == HL_OK) terms->place = it.grant.place;
  if (status == HL_OK) terms->token = it.grant.token;
  return status;
}

static int lease(hl_session *session, uint32_t first, size_t n, hl_lease_terms *terms) {
  return lease_mode(session, first, n, HL_EXCLUSIVE, terms);
}

static void count(void *context, const hl_holder *holder) {
  (void)holder;
  ++*(unsigned *)context;
}

static unsigned leases(hl_session *session) {
  const hl_lease_filter all = {0};
  unsigned n = 0;
  assert_int_equal(session->store->leases->list(session, &all, count, &n, soon(), NULL), HL_OK);
  return n;
}

static int drop(hl_session *session, const hl_lease_terms *terms) {
  return session->store->leases->drop(session, terms, true, soon(), NULL);
}

static int refresh(hl_session *session, const hl_lease_terms *terms, int64_t ttl) {
  int64_t sent;
  return session->store->leases->refresh(session, terms, ttl, soon(), &sent, NULL);
}

static uint64_t end_by(hl_session *session, const uint8_t *id) {
  const hl_lease_filter filter = {.id = id, .by = "by", .reason = "why"};
  uint64_t n = 0;
  assert_int_equal(session->store->leases->revoke(session, &filter, soon(), &n, NULL), HL_OK);
  return n;
}

/* A store with two sessions, of which the second is another program's in all that counts. */
typedef struct fixture {
  hl_store *store;
  hl_session *a, *b;
} fixture;

static fixture begin(void) {
  fixture it = {.store = store_new()};
  it.a = session_new(it.store);
  it.b = session_new(it.store);
  return it;
}

static void end(fixture *it) {
  ops->session_close(it->a);
  ops->session_close(it->b);
  ops->close(it->store);
}

/* ------------------------------------------------------- leases and sessions */

static void leases_and_sessions_exclude(void **state) {
  (void)state;
  static const hl_mode modes[] = {HL_SHARED, HL_EXCLUSIVE};
  fixture f = begin();
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 2; j++) {
      hl_lease_terms one = terms_of(1, 60000), two = terms_of(5, 60000);
      int expected = modes[i] == HL_SHARED && modes[j] == HL_SHARED ? HL_OK : HL_TIMEOUT;
      assert_int_equal(lease_mode(f.a, 1, ROWS, modes[i], &one), HL_OK);
      assert_int_equal(take_mode(f.b, ROWS, 1, modes[j]), expected);
      give(f.b);
      int status = lease_mode(f.b, ROWS, 1, modes[j], &two);
      assert_int_equal(status, expected);
      assert_int_equal(take(f.b, ROWS + 1, 1), HL_OK);
      give(f.b);
      assert_int_equal(leases(f.b), status == HL_OK ? 2 : 1);
      if (status == HL_OK) assert_int_equal(drop(f.a, &two), HL_OK);
      assert_int_equal(drop(f.a, &one), HL_OK);
      assert_int_equal(drop(f.a, &one), HL_ELOST);
      assert_int_equal(take(f.b, 1, ROWS), HL_OK);
      assert_int_equal(lease(f.a, 1, 1, &one), HL_TIMEOUT);
      give(f.b);
    }
  assert_int_equal(leases(f.a), 0);
  end(&f);
}

static void a_lease_is_over_when_its_time_is_up(void **state) {
  (void)state;
  fixture f = begin();
  hl_lease_terms one = terms_of(1, 100), two = terms_of(5, 60000);
  wanted it;
  int64_t begun = hl__now_ms(), left;
  assert_int_equal(lease(f.a, 1, ROWS, &one), HL_OK);
  want(&it, 2, 1, HL_EXCLUSIVE)->try_once = false;
  assert_int_equal(ops->take(f.b, &it.request, &it.grant, NULL), HL_OK);
  assert_in_range(hl__now_ms() - begun, 100, 2000);
  give(f.b);
  assert_int_equal(refresh(f.a, &one, 60000), HL_ELOST);
  /* None has wanted it meanwhile. */
  one = terms_of(1, 1);
  assert_int_equal(lease(f.a, 1, ROWS, &one), HL_OK);
  (void)usleep(5000);
  assert_int_equal(leases(f.a), 0);
  assert_int_equal(f.store->leases->inspect(f.a, &one, soon(), &left, NULL), HL_OK);
  assert_int_equal(left, 0);
  assert_int_equal(refresh(f.a, &one, 60000), HL_OK);
  assert_int_equal(f.store->leases->inspect(f.a, &one, soon(), &left, NULL), HL_OK);
  assert_in_range(left, 50000, 60000);
  assert_int_equal(lease(f.b, 1, 1, &two), HL_TIMEOUT);
  assert_int_equal(drop(f.a, &one), HL_OK);
  end(&f);
}

/* Its holder may refresh it again, though another lock on the row kept a caller out. */
static void a_lease_that_is_over_is_left_where_it_is_in_no_way(void **state) {
  (void)state;
  fixture f = begin();
  hl_lease_terms one = terms_of(1, 1);
  assert_int_equal(lease_mode(f.a, 1, ROWS, HL_SHARED, &one), HL_OK);
  (void)usleep(5000);
  assert_int_equal(take_mode(f.b, 2, 1, HL_UPDATE), HL_OK);
  assert_int_equal(take_mode(f.a, 2, 1, HL_UPDATE), HL_TIMEOUT);
  assert_int_equal(refresh(f.a, &one, 60000), HL_OK);
  give(f.b);
  assert_int_equal(take(f.b, 2, 1), HL_TIMEOUT);
  assert_int_equal(drop(f.a, &one), HL_OK);
  end(&f);
}

/* Records until the table has grown much: the next one takes away those that were over long ago. */
static void grow(hl_session *session) {
  hl__shm_space *space = ((hl__embedded_session *)(void *)session)->table->space;
  static uint32_t bucket = 100;
  const uint32_t much = 2 * hl__shm_chunks(space);
  for (bool grown = false; !grown; bucket++) {
    grown = hl__shm_chunks(space) > much;
    hl_lease_terms other = terms_of(0, 60000);
    memcpy(other.id, &bucket, sizeof bucket);
    assert_int_equal(lease(session, bucket, 1, &other), HL_OK);
  }
}

/* No process sets the machine's clock of its boot. */
static void a_lease_that_is_over_stays_for_an_hour_whatever_the_wall_clock_says(void **state) {
  (void)state;
  fixture f = begin();
  hl__shm_space *space = ((hl__embedded_session *)(void *)f.a)->table->space;
  const int64_t hours = 7200000;
  hl_lease_terms one = terms_of(1, 1);
  assert_int_equal(lease(f.a, 1, ROWS, &one), HL_OK);
  atomic_store(&hl__shm_lease_at(space, (uint32_t)one.place)->end_unix,
               (uint64_t)(hl__unix_ms() - hours));
  (void)usleep(5000);
  grow(f.b);
  assert_int_equal(refresh(f.a, &one, 1), HL_OK);
  space->shift_ms -= hours;
  grow(f.b);
  assert_int_equal(refresh(f.a, &one, 1), HL_ELOST);
  end(&f);
}

static void a_revocation_is_told(void **state) {
  (void)state;
  fixture f = begin();
  hl_lease_terms one = terms_of(1, 60000), two = terms_of(5, 60000);
  hl_error error;
  int64_t sent;
  assert_int_equal(lease(f.a, 1, ROWS, &one), HL_OK);
  assert_int_equal(lease(f.a, 11, ROWS, &two), HL_OK);
  assert_int_equal(end_by(f.b, one.id), 1);
  assert_int_equal(end_by(f.b, one.id), 0);
  assert_int_equal(leases(f.b), 1);
  assert_int_equal(take(f.b, 1, ROWS), HL_OK);
  give(f.b);
  assert_int_equal(f.store->leases->refresh(f.a, &one, 60000, soon(), &sent, &error), HL_ELOST);
  assert_string_equal(error.revoked_by, "by");
  assert_string_equal(error.reason, "why");
  assert_int_equal(drop(f.a, &two), HL_OK);
  end(&f);
}

static void a_caller_without_the_secret_takes_nothing_over(void **state) {
  (void)state;
  fixture f = begin();
  hl_lease_terms one = terms_of(1, 60000), forged;
  wanted it;
  assert_int_equal(lease(f.a, 1, 1, &one), HL_OK);
  forged = one;
  memset(forged.holder, 33, sizeof forged.holder);
  forged.secret[15] ^= 1;
  want(&it, 1, 1, HL_EXCLUSIVE)->lease = &forged;
  assert_int_equal(f.store->leases->adopt(f.b, &it.request, &it.grant, NULL), HL_ELOST);
  forged.secret[15] ^= 1;
  it.rows[1] = (hl_row){.level = 2, .bucket = 2, .mode = HL_EXCLUSIVE};
  it.request.n = 2; /* nor does a caller that knows it get rows that it does not lock */
  assert_int_equal(f.store->leases->adopt(f.b, &it.request, &it.grant, NULL), HL_EMISMATCH);
  it.request.n = 1;
  it.rows[0].mode = HL_SHARED;
  assert_int_equal(f.store->leases->adopt(f.b, &it.request, &it.grant, NULL), HL_EMISMATCH);
  it.rows[0].mode = HL_EXCLUSIVE;
  uint8_t stranger[16] = {9};
  forged.replaces = stranger;
  assert_int_equal(f.store->leases->adopt(f.b, &it.request, &it.grant, NULL), HL_ELOST);
  forged.replaces = one.holder;
  assert_int_equal(f.store->leases->adopt(f.b, &it.request, &it.grant, NULL), HL_OK);
  assert_memory_equal(it.grant.replaced, one.holder, 16);
  assert_true(it.grant.token == one.token);
  assert_int_equal(drop(f.a, &one), HL_ELOST);
  assert_int_equal(drop(f.b, &forged), HL_OK);
  end(&f);
}

static void a_session_lock_becomes_a_lease(void **state) {
  (void)state;
  fixture f = begin();
  hl_lease_terms one = terms_of(1, 60000);
  wanted it;
  assert_int_equal(ops->take(f.a, want(&it, 1, ROWS, HL_EXCLUSIVE), &it.grant, NULL), HL_OK);
  uint64_t token = it.grant.token;
  it.request.lease = &one;
  assert_int_equal(f.store->leases->to_lease(f.a, &it.request, &it.grant, NULL), HL_OK);
  one.place = it.grant.place;
  assert_int_equal(take(f.b, 2, 1), HL_TIMEOUT);
  /* The session holds nothing any more. */
  assert_int_equal(take(f.a, 2, 1), HL_TIMEOUT);
  assert_int_equal(take(f.a, ROWS + 1, 1), HL_OK);
  give(f.a);
  assert_true(it.grant.token == token);
  assert_int_equal(drop(f.b, &one), HL_OK);
  assert_int_equal(take(f.a, 1, ROWS), HL_OK);
  end(&f);
}

/* A lease for update is its node's row, shared, and its update row. */
static void update_lease(hl_session *session, hl_lease_terms *terms) {
  wanted it;
  want(&it, 1, 2, HL_SHARED)->lease = terms;
  it.rows[0] = (hl_row){.level = 2 | HL_LEVEL_UPDATE, .bucket = 1, .mode = HL_EXCLUSIVE};
  it.rows[1] = (hl_row){.level = 2, .bucket = 1, .mode = HL_SHARED};
  it.request.mode = HL_UPDATE;
  assert_int_equal(ops->take(session, &it.request, &it.grant, NULL), HL_OK);
  terms->place = it.grant.place;
  terms->token = it.grant.token;
}

static int convert(hl_session *session, const hl_lease_terms *terms, bool up, uint64_t *token) {
  wanted it;
  want(&it, 1, 1, up ? HL_EXCLUSIVE : HL_SHARED)->lease = terms;
  it.request.upgrade = up;
  it.request.mode = up ? HL_EXCLUSIVE : HL_UPDATE;
  it.grant.token = *token;
  int status = session->store->leases->convert(session, &it.request, &it.grant, NULL);
  if (status == HL_OK && up) *token = it.grant.token;
  return status;
}

static void a_lease_is_converted(void **state) {
  (void)state;
  fixture f = begin();
  hl_lease_terms one = terms_of(1, 60000);
  update_lease(f.a, &one);
  uint64_t token = one.token;
  assert_int_equal(take_mode(f.b, 1, 1, HL_SHARED), HL_OK);
  assert_int_equal(convert(f.a, &one, true, &token), HL_TIMEOUT);
  give(f.b);
  assert_int_equal(convert(f.a, &one, true, &token), HL_OK);
  assert_true(token > one.token);
  assert_int_equal(take_mode(f.b, 1, 1, HL_SHARED), HL_TIMEOUT);
  assert_int_equal(take(f.a, 2, 1), HL_OK); /* the session holds nothing */
  give(f.a);
  assert_int_equal(convert(f.a, &one, false, &token), HL_OK);
  assert_int_equal(take_mode(f.b, 1, 1, HL_SHARED), HL_OK);
  give(f.b);
  assert_int_equal(take(f.b, 1, 1), HL_TIMEOUT);
  assert_int_equal(convert(f.a, &one, true, &token), HL_OK);
  assert_int_equal(drop(f.a, &one), HL_OK);
  assert_int_equal(take(f.b, 1, 1), HL_OK);
  end(&f);
}

/* The file does not grow for leases that have ended. */
static void records_are_used_again(void **state) {
  (void)state;
  fixture f = begin();
  struct stat st[2];
  char path[128];
  (void)snprintf(path, sizeof path, "%s/control", directory);
  for (int i = 0; i < 2000; i++) {
    hl_lease_terms one = terms_of(1, i % 3 ? 60000 : 1);
    assert_int_equal(lease(f.a, 1, ROWS, &one), HL_OK);
    if (i % 3 == 1) assert_int_equal(drop(f.a, &one), HL_OK);
    if (i % 3 == 2) assert_int_equal(end_by(f.a, one.id), 1);
    if (i % 3 == 2) assert_int_equal(drop(f.a, &one), HL_ELOST);
    if (i % 3 == 0) (void)usleep(1500);
    if (i == 100) assert_int_equal(stat(path, &st[0]), 0);
  }
  assert_int_equal(stat(path, &st[1]), 0);
  assert_true(st[0].st_size == st[1].st_size);
  end(&f);
}

static void see(void *context, const hl_holder *holder) { *(hl_holder *)context = *holder; }

static void holders_are_shown(void **state) {
  (void)state;
  fixture f = begin();
  hl_lease_terms one = terms_of(1, 60000);
  hl_row row = {.level = 2, .bucket = 1, .mode = HL_EXCLUSIVE};
  hl_lease_filter filter = {.rows = &row, .n = 1};
  hl_holder seen = {0};
  assert_int_equal(take(f.a, 1, 1), HL_OK);
  assert_int_equal(ops->holders(f.b, &filter, see, &seen, soon(), NULL), HL_OK);
  assert_string_equal(seen.application, "test");
  assert_string_equal(seen.path, "u1/a1");
  assert_string_equal(seen.label, "a\\x0alabel");
  assert_int_equal(seen.pid, getpid());
  assert_int_equal(seen.mode, HL_EXCLUSIVE);
  assert_int_equal(seen.kind, HL_SESSION);
  assert_false(seen.waiting);
  assert_true(strlen(seen.session) > 0);
  give(f.a);
  memset(&seen, 0, sizeof seen);
  assert_int_equal(ops->holders(f.b, &filter, see, &seen, soon(), NULL), HL_OK);
  assert_int_equal(seen.pid, 0);
  assert_int_equal(lease(f.a, 1, 1, &one), HL_OK);
  assert_int_equal(ops->holders(f.b, &filter, see, &seen, soon(), NULL), HL_OK);
  assert_int_equal(seen.kind, HL_LEASE);
  assert_string_equal(seen.owner, "owner");
  assert_in_range(seen.remaining_ms, 50000, 60000);
  row.bucket = 2;
  memset(&seen, 0, sizeof seen);
  assert_int_equal(ops->holders(f.b, &filter, see, &seen, soon(), NULL), HL_OK);
  assert_int_equal(seen.pid, 0);
  end(&f);
}

static void remove_directory(void) {
  char command[128];
  (void)snprintf(command, sizeof command, "rm -rf %s", directory);
  assert_int_equal(system(command), 0);
}

/* Any bytes in the table cause no crash and no hang. */
/* What `see` was told last of another process' session, and of its lease. */
static void others_seen(hl_session *session, hl_holder *held, hl_holder *leased) {
  const hl_row one = {.level = 2, .bucket = 1, .mode = HL_EXCLUSIVE};
  const hl_row ten = {.level = 2, .bucket = 10, .mode = HL_EXCLUSIVE};
  const hl_lease_filter filters[2] = {{.rows = &one, .n = 1}, {.rows = &ten, .n = 1}};
  memset(held, 0, sizeof *held);
  memset(leased, 0, sizeof *leased);
  assert_int_equal(ops->holders(session, &filters[0], see, held, soon(), NULL), HL_OK);
  assert_int_equal(ops->holders(session, &filters[1], see, leased, soon(), NULL), HL_OK);
}

static void pids_of_other_namespaces_are_not_shown(void **state) {
  (void)state;
  fixture f = begin();
  hl_holder held, leased;
  int pipes[2];
  char done;
  assert_int_equal(pipe(pipes), 0);
  pid_t pid = fork();
  if (pid == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    hl_session *own = session_new(store_new());
    hl_session *other = session_new(own->store);
    hl_lease_terms terms = terms_of(1, 600000);
    if (take(own, 1, 1) == HL_OK && lease(other, 10, 1, &terms) == HL_OK)
      (void)!write(pipes[1], "x", 1);
    for (;;) (void)pause();
  }
  assert_int_equal(read(pipes[0], &done, 1), 1);
  others_seen(f.a, &held, &leased);
  assert_int_equal(held.pid, pid);
  assert_int_equal(strtol(held.session, NULL, 10), pid);
  assert_int_equal(leased.pid, pid);
  /* As if this process were in another namespace. */
  hl__shm_space *space = ((hl__embedded_session *)(void *)f.a)->table->space;
  space->namespace ^= 1;
  others_seen(f.a, &held, &leased);
  char name[64];
  for (uint32_t i = 1; i < 4; i++)
    if (atomic_load(&space->table->slot[i].pid) == (uint64_t)pid)
      hl__shm_slot_name(space, i, name, sizeof name);
  space->namespace ^= 1;
  assert_int_equal(held.pid, 0);
  assert_string_equal(held.session, "");
  assert_int_equal(leased.pid, 0);
  assert_string_equal(name, "a process of another pid namespace");
  (void)kill(pid, SIGKILL);
  (void)waitpid(pid, NULL, 0);
  (void)close(pipes[0]);
  (void)close(pipes[1]);
  end(&f);
}

/* In a child whose root directory changes. 77: it may not. */
static int jailed(void) {
  hl_store *store = store_new();
  hl_session *session = session_new(store);
  wanted it;
  hl_error error;
  struct stat st;
  int outside = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  char jail[sizeof directory + 8], within[sizeof directory + 8];
  if (take(session, 1, ROWS) != HL_OK || ops->give_back(session, NULL) != HL_OK) return 1;
  (void)snprintf(jail, sizeof jail, "%s/jail", directory);
  if (mkdir(jail, 0700) != 0) return 2;
  if ((geteuid() && unshare(CLONE_NEWUSER) != 0) || chroot(jail) != 0 || chdir("/") != 0) return 77;
  if (mkdir("/dev", 0700) != 0 || mkdir("/dev/shm", 0700) != 0) return 3;
  if (take(session, 1, ROWS) != HL_OK || ops->give_back(session, NULL) != HL_OK) return 4;
  if (unlinkat(outside, HL__SHM_FILE, 0) != 0) return 5;
  /* It would come to a directory that the processes outside do not use. It notices soon. */
  int status = HL_OK;
  for (int64_t until = soon(); status == HL_OK && hl__now_ms() < until;) {
    status = ops->take(session, want(&it, 1, ROWS, HL_EXCLUSIVE), &it.grant, &error);
    if (status == HL_OK) (void)ops->give_back(session, NULL);
  }
  if (status != HL_ESTORE) return 6;
  if (!strstr(error.message, "has changed its")) return 7;
  (void)snprintf(within, sizeof within, "%s", directory);
  return stat(within, &st) == 0 ? 8 : 0;
}

static void a_process_with_another_root_locks_nowhere_else(void **state) {
  (void)state;
  int status;
  pid_t pid = fork();
  if (pid == 0) _exit(jailed());
  (void)waitpid(pid, &status, 0);
  assert_true(WIFEXITED(status));
  if (WEXITSTATUS(status) != 77) assert_int_equal(WEXITSTATUS(status), 0);
}

static void nonsense_in_the_table_is_survived(void **state) {
  (void)state;
  srand(4711);
  for (int round = 0; round < 150; round++) {
    fixture f = begin();
    hl_lease_terms one = terms_of(1, 60000), two = terms_of(5, 60000);
    hl__shm_space *space = ((hl__embedded_session *)(void *)f.a)->table->space;
    assert_int_equal(lease(f.a, 1, ROWS, &one), HL_OK);
    assert_int_equal(take(f.a, 11, ROWS), HL_OK);
    give(f.a);
    uint32_t *words = (uint32_t *)(void *)((char *)space->table + HL__SHM_FIXED + HL__SHM_CHUNK);
    size_t count = (size_t)(hl__shm_chunks(space) - 1) * HL__SHM_CHUNK / sizeof *words;
    for (int i = 0; i < 400; i++)
      words[(size_t)rand() % count] = rand() % 3 ? (uint32_t)rand() % 2000 : (uint32_t)rand();
    int64_t begun = hl__now_ms();
    (void)lease(f.b, 1, 1, &two);
    (void)refresh(f.a, &one, 60000);
    (void)take(f.b, 2, ROWS);
    (void)ops->give_back(f.b, NULL);
    (void)leases(f.b);
    hl_holder seen;
    const hl_lease_filter all = {.by = "x", .reason = "y"};
    (void)ops->holders(f.b, &all, see, &seen, soon(), NULL);
    (void)drop(f.a, &one);
    uint64_t n = 0;
    (void)f.store->leases->revoke(f.a, &all, soon(), &n, NULL);
    (void)leases(f.b);
    assert_true(hl__now_ms() - begun < SOON_MS);
    end(&f);
    remove_directory();
  }
}

/* ------------------------------------------------ killed at any instruction */

/* A sanitizer's code has ten times as many instructions, and a tracer of its own. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TRACES 0
#else
#define TRACES 1
#endif

static hl_session *victim;
static hl_lease_terms subject;
static long outcome; /* of an import, in the process that does it */

static void do_lease(void) { (void)lease(victim, 1, ROWS, &subject); }
static void do_drop(void) { (void)drop(victim, &subject); }
static void do_refresh(void) { (void)refresh(victim, &subject, 50000); }
static void do_revoke(void) { (void)end_by(victim, subject.id); }
static void do_adopt(void) {
  wanted it;
  hl_lease_terms other = subject;
  memset(other.holder, 77, sizeof other.holder);
  want(&it, 1, ROWS, HL_EXCLUSIVE)->lease = &other;
  outcome = victim->store->leases->adopt(victim, &it.request, &it.grant, NULL);
}
static void do_to_lease(void) {
  wanted it;
  (void)ops->take(victim, want(&it, 1, ROWS, HL_EXCLUSIVE), &it.grant, NULL);
  it.request.lease = &subject;
  (void)victim->store->leases->to_lease(victim, &it.request, &it.grant, NULL);
}
static void do_up_and_down(void) {
  uint64_t token = subject.token;
  (void)convert(victim, &subject, true, &token);
  (void)convert(victim, &subject, false, &token);
}

/* Another process is about to do it, and stands still. */
static pid_t stopped_before(void (*action)(void)) {
  int status;
  pid_t pid = fork();
  assert_true(pid >= 0);
  if (pid == 0) {
    /* What it will use again is made before. */
    hl_lease_terms other = terms_of(20, 60000);
    victim = session_new(store_new());
    (void)lease(victim, 100, ROWS, &other);
    (void)drop(victim, &other);
    (void)ptrace(PTRACE_TRACEME, 0, NULL, NULL);
    (void)raise(SIGSTOP);
    action();
    (void)raise(SIGSTOP);
    _exit(0);
  }
  assert_int_equal(waitpid(pid, &status, 0), pid);
  return pid;
}

/* It executes one instruction more. False: it had done it. */
static bool step(pid_t pid) {
  int status;
  assert_int_equal(ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL), 0);
  assert_int_equal(waitpid(pid, &status, 0), pid);
  return WIFSTOPPED(status) && WSTOPSIG(status) == SIGTRAP;
}

/* Another process does it, and stands still before its instruction number `at`. *done: it had done
   it. */
static pid_t stopped_at(void (*action)(void), unsigned long at, bool *done) {
  pid_t pid = stopped_before(action);
  *done = false;
  for (unsigned long i = 0; i <= at && !*done; i++) *done = !step(pid);
  return pid;
}

static void murder(pid_t pid) {
  assert_int_equal(kill(pid, SIGKILL), 0);
  assert_int_equal(waitpid(pid, NULL, 0), pid);
}

/* Only some instructions are tried, others each time; HIERLOCK_STEP=1: all. */
static unsigned long stride(void) {
  const char *given = getenv("HIERLOCK_STEP");
  return given ? strtoul(given, NULL, 10) : 331;
}

/* What is left: one lease or none, whole. `held`: there is one before the action, which makes it no
   less unless it `ends` it. */
static void killed_anywhere(void (*action)(void), void (*before)(hl_session *), bool ends) {
  if (!TRACES) skip();
  fixture f = begin();
  bool done = false;
  const unsigned long every = stride();
  for (unsigned long at = (unsigned long)getpid() % every; !done; at += every) {
    hl_lease_terms other = terms_of(9, 60000);
    subject = terms_of(1, 60000);
    if (before) before(f.a);
    murder(stopped_at(action, at, &done));
    /* Until what the dead process has left is mended: there is a lease, or the row is free. */
    wanted it;
    int64_t patience = soon();
    int status;
    unsigned there;
    do {
      want(&it, 1, 1, HL_EXCLUSIVE)->try_once = false;
      it.request.deadline = hl__now_ms() + 30;
      it.request.lease = &other;
      status = ops->take(f.b, &it.request, &it.grant, NULL);
      there = leases(f.b);
    } while (status == HL_TIMEOUT && there == 0 && hl__now_ms() < patience);
    if (status == HL_OK) {
      assert_int_equal(there, 1);
      assert_true(ends);
      assert_int_equal(drop(f.b, &other), HL_OK);
    } else {
      assert_int_equal(status, HL_TIMEOUT);
      assert_int_equal(there, 1);
      assert_int_equal(end_by(f.b, subject.id), 1);
    }
    /* Its holder reads the note of a revocation; or else nothing is left to read. */
    assert_int_equal(drop(f.b, &subject), HL_ELOST);
    assert_int_equal(leases(f.b), 0);
    want(&it, 1, ROWS, HL_EXCLUSIVE)->try_once = false;
    assert_int_equal(ops->take(f.b, &it.request, &it.grant, NULL), HL_OK);
    give(f.b);
  }
  end(&f);
}

static void exclusive_before(hl_session *session) {
  assert_int_equal(lease(session, 1, ROWS, &subject), HL_OK);
}
static void update_before(hl_session *session) { update_lease(session, &subject); }

static int adopt_update(hl_session *session, hl_lease_terms *terms, hl_mode mode) {
  wanted it;
  want(&it, 1, 2, HL_SHARED)->lease = terms;
  it.rows[0] = (hl_row){.level = 2 | HL_LEVEL_UPDATE, .bucket = 1, .mode = HL_EXCLUSIVE};
  it.rows[1] = (hl_row){.level = 2, .bucket = 1, .mode = (uint8_t)mode};
  return session->store->leases->adopt(session, &it.request, &it.grant, NULL);
}

/* An import finds the lease in the one mode or in the other, and afterwards its claims are so. */
static void what_a_killed_conversion_leaves_is_imported(void **state) {
  (void)state;
  if (!TRACES) skip();
  fixture f = begin();
  bool done = false;
  const unsigned long every = stride();
  for (unsigned long at = (unsigned long)getpid() % every; !done; at += every) {
    subject = terms_of(1, 60000);
    update_lease(f.a, &subject);
    murder(stopped_at(do_up_and_down, at, &done));
    /* The claims of the dead are taken away: another row of theirs is waited for. */
    wanted it;
    want(&it, 100, ROWS, HL_EXCLUSIVE)->try_once = false;
    assert_int_equal(ops->take(f.b, &it.request, &it.grant, NULL), HL_OK);
    give(f.b);
    hl_lease_terms heir = subject;
    memset(heir.holder, 50, sizeof heir.holder);
    int status = adopt_update(f.b, &heir, HL_SHARED);
    if (status == HL_EMISMATCH)
      assert_int_equal(adopt_update(f.b, &heir, HL_EXCLUSIVE), HL_OK);
    else
      assert_int_equal(status, HL_OK);
    want(&it, 1, 1, HL_SHARED)->try_once = false;
    it.request.deadline = hl__now_ms() + (status == HL_OK ? SOON_MS : 20);
    assert_int_equal(ops->take(f.a, &it.request, &it.grant, NULL),
                     status == HL_OK ? HL_OK : HL_TIMEOUT);
    give(f.a);
    assert_int_equal(drop(f.a, &subject), HL_ELOST);
    assert_int_equal(drop(f.b, &heir), HL_OK);
  }
  end(&f);
}

/* A process that stands still while it takes a lease away that is over keeps the others from its
   rows only while it has the lock of a partition. */
static void a_process_stopped_while_it_drops_one_keeps_no_row(void **state) {
  (void)state;
  if (!TRACES) skip();
  fixture f = begin();
  const hl__shm_table *table = ((hl__embedded_session *)(void *)f.a)->table->space->table;
  bool done = false;
  const unsigned long every = stride();
  unsigned long free_ones = 0;
  for (unsigned long at = (unsigned long)getpid() % every; !done; at += every) {
    wanted it;
    subject = terms_of(1, 60000);
    exclusive_before(f.a);
    pid_t pid = stopped_at(do_drop, at, &done);
    bool inside = false;
    for (unsigned part = 0; part < HL__SHM_PARTS; part++)
      if (atomic_load(&table->part[part].lock)) inside = true;
    if (!inside && leases(f.b) == 0) {
      want(&it, 1, ROWS, HL_EXCLUSIVE)->try_once = false;
      assert_int_equal(ops->take(f.b, &it.request, &it.grant, NULL), HL_OK);
      give(f.b);
      free_ones++;
    }
    murder(pid);
    if (leases(f.b) == 1) assert_int_equal(drop(f.b, &subject), HL_OK);
    want(&it, 1, ROWS, HL_EXCLUSIVE)->try_once = false;
    assert_int_equal(ops->take(f.b, &it.request, &it.grant, NULL), HL_OK);
    give(f.b);
  }
  assert_true(free_ones > 0);
  end(&f);
}

static void go_on(pid_t pid) {
  int status;
  assert_int_equal(ptrace(PTRACE_CONT, pid, NULL, NULL), 0);
  assert_int_equal(waitpid(pid, &status, 0), pid);
  assert_true(WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP);
}

/* A lease ends while a process works on it, and another lease takes the row. What that process does
   then is not done to the other lease. */
static void another_lease_is_left_alone(void (*action)(void), void (*before)(hl_session *)) {
  if (!TRACES) skip();
  fixture f = begin();
  hl__shm_space *space = ((hl__embedded_session *)(void *)f.a)->table->space;
  bool done = false;
  const unsigned long every = stride();
  unsigned long others = 0;
  for (unsigned long at = (unsigned long)getpid() % every; !done; at += every) {
    hl_lease_terms other = terms_of(9, 2000000);
    subject = terms_of(1, 60000);
    before(f.a);
    const uint32_t place = (uint32_t)subject.place;
    hl__shm_lease *record = hl__shm_lease_at(space, place);
    pid_t pid = stopped_at(action, at, &done);
    const bool busy = atomic_load(&record->busy) != 0;
    (void)hl__shm_lease_end(space, place, atomic_load(&record->base.stamp), 0);
    /* Not where the process stands in a partition, or holds the row. */
    if (lease(f.b, 1, 1, &other) == HL_OK) {
      int64_t left;
      if (busy) assert_true(other.place != place);
      if (!done) go_on(pid);
      assert_int_equal(take_mode(f.a, 1, 1, HL_SHARED), HL_TIMEOUT);
      assert_int_equal(f.store->leases->inspect(f.b, &other, soon(), &left, NULL), HL_OK);
      assert_in_range(left, 1000000, 2000000);
      assert_int_equal(drop(f.b, &other), HL_OK);
      others += busy;
    }
    murder(pid);
    wanted it;
    want(&it, 1, ROWS, HL_EXCLUSIVE)->try_once = false;
    assert_int_equal(ops->take(f.b, &it.request, &it.grant, NULL), HL_OK);
    give(f.b);
  }
  assert_true(others > 0);
  end(&f);
}

static void what_converts_a_lease_that_ends_leaves_another_alone(void **state) {
  (void)state;
  another_lease_is_left_alone(do_up_and_down, update_before);
}

static void what_imports_a_lease_that_ends_leaves_another_alone(void **state) {
  (void)state;
  another_lease_is_left_alone(do_adopt, exclusive_before);
}

/* Not that it locks something else than its text says. */
static void a_lease_that_ends_during_its_import_is_lost(void **state) {
  (void)state;
  if (!TRACES) skip();
  fixture f = begin();
  hl__shm_space *space = ((hl__embedded_session *)(void *)f.a)->table->space;
  unsigned lost = 0;
  bool done = false;
  for (unsigned behind = 0; !done; behind += 20) {
    subject = terms_of(1, 60000);
    exclusive_before(f.a);
    hl__shm_lease *record = hl__shm_lease_at(space, (uint32_t)subject.place);
    const uint64_t stamp = atomic_load(&record->base.stamp);
    pid_t pid = stopped_before(do_adopt);
    while (atomic_load(&record->busy) == 0) assert_true(step(pid));
    /* It may end sooner than the last one: reading a clock takes more instructions where the kernel
       sets that clock meanwhile. */
    bool ended = false;
    for (unsigned i = 0; i < behind && !ended; i++) ended = !step(pid);
    done = ended || atomic_load(&record->busy) == 0;
    assert_true(hl__shm_lease_end(space, (uint32_t)subject.place, stamp, 0));
    if (!ended) go_on(pid);
    const long told = ptrace(PTRACE_PEEKDATA, pid, &outcome, NULL);
    assert_true(told == HL_OK || told == HL_ELOST);
    lost += told == HL_ELOST;
    murder(pid);
  }
  assert_true(lost > 0);
  end(&f);
}

/* Any process may set a node aside that a lease has given up. So no list has one. */
static void a_node_is_free_once_it_is_in_no_list(void **state) {
  (void)state;
  if (!TRACES) skip();
  fixture f = begin();
  hl__shm_space *space = ((hl__embedded_session *)(void *)f.a)->table->space;
  uint32_t index;
  subject = terms_of(1, 60000);
  assert_int_equal(take_mode(f.b, 1, 1, HL_SHARED), HL_OK); /* so the row stays */
  assert_int_equal(lease_mode(f.a, 1, 1, HL_SHARED, &subject), HL_OK);
  const hl__shm_row *row = hl__shm_row_find(space, hl__shm_key(1, 2), false, &index);
  assert_non_null(row);
  pid_t pid = stopped_before(do_drop);
  while (step(pid)) {
    const hl__shm_node *node = hl__shm_node_at(space, row->holders);
    for (int i = 0; node && i < 4; i++, node = hl__shm_node_at(space, node->next))
      assert_int_not_equal(hl__shm_state_of(atomic_load(&node->claim)), HL__FREE);
  }
  murder(pid);
  assert_int_equal(leases(f.b), 0);
  end(&f);
}

#define KILLED(name, action, before, ends)                                                         \
  static void a_process_killed_while_it_##name(void **state) {                                     \
    (void)state;                                                                                   \
    killed_anywhere(action, before, ends);                                                         \
  }
KILLED(takes_a_lease, do_lease, NULL, true)
KILLED(makes_a_lease_of_a_session_lock, do_to_lease, NULL, true)
KILLED(drops_one, do_drop, exclusive_before, true)
KILLED(revokes_one, do_revoke, exclusive_before, true)
KILLED(refreshes_one, do_refresh, exclusive_before, false)
KILLED(adopts_one, do_adopt, exclusive_before, false)
KILLED(converts_one, do_up_and_down, update_before, false)

/* ------------------------------------------------------ many at one time */

#define MAKERS 16
#define MADE 600

/* MAKERS threads take MADE leases each, beside each other, and keep them. */
static void *leases_make(void *argument) {
  const fixture *it = argument;
  static atomic_uint numbers;
  const unsigned number = atomic_fetch_add(&numbers, 1);
  hl_session *session = session_new(it->store);
  uintptr_t failed = 0;
  for (uint32_t i = 0; i < MADE && !failed; i++) {
    hl_lease_terms terms = terms_of((uint8_t)number, 600000);
    memcpy(terms.id + 1, &i, sizeof i);
    /* A thread that is kept from running has a partition locked meanwhile: that is no want of room. */
    do failed = (uintptr_t)lease(session, (number * MADE + i) * ROWS, ROWS, &terms);
    while (failed == HL_TIMEOUT);
  }
  ops->session_close(session);
  return (void *)failed; /* NOLINT(performance-no-int-to-ptr) */
}

/* A thread that is slow to take the first record of a new chunk finds that others have taken all of
   them. That was told as a full disk once. */
static void many_threads_make_leases(void **state) {
  (void)state;
  fixture it = begin();
  pthread_t thread[MAKERS];
  for (int i = 0; i < MAKERS; i++)
    assert_int_equal(pthread_create(&thread[i], NULL, leases_make, &it), 0);
  for (int i = 0; i < MAKERS; i++) {
    void *failed;
    assert_int_equal(pthread_join(thread[i], &failed), 0);
    assert_null(failed);
  }
  assert_int_equal(leases(it.a), MAKERS * MADE);
  assert_int_equal(end_by(it.a, NULL), MAKERS * MADE);
  end(&it);
}

/* ----------------------------------------------------------------- the tests */

static int directory_begins(void **state) {
  (void)state;
  (void)alarm(600);
  (void)snprintf(directory, sizeof directory, "/dev/shm/hierlock-embedded-%ld", (long)getpid());
  if (hl_layout_new(NULL, 0, 100000, &layout, NULL)) return -1;
  return 0;
}

static int directory_ends(void **state) {
  char command[128];
  (void)state;
  (void)alarm(0);
  (void)snprintf(command, sizeof command, "rm -rf %s", directory);
  hl_layout_unref(layout);
  return system(command);
}

int main(int argc, char **argv) {
#define TEST(test) cmocka_unit_test_setup_teardown(test, directory_begins, directory_ends)
  const struct CMUnitTest tests[] = {
      TEST(leases_and_sessions_exclude),
      TEST(a_lease_is_over_when_its_time_is_up),
      TEST(a_lease_that_is_over_is_left_where_it_is_in_no_way),
      TEST(a_lease_that_is_over_stays_for_an_hour_whatever_the_wall_clock_says),
      TEST(a_revocation_is_told),
      TEST(a_caller_without_the_secret_takes_nothing_over),
      TEST(a_session_lock_becomes_a_lease),
      TEST(a_lease_is_converted),
      TEST(records_are_used_again),
      TEST(holders_are_shown),
      TEST(pids_of_other_namespaces_are_not_shown),
      TEST(a_process_with_another_root_locks_nowhere_else),
      TEST(nonsense_in_the_table_is_survived),
      TEST(a_process_killed_while_it_takes_a_lease),
      TEST(a_process_killed_while_it_makes_a_lease_of_a_session_lock),
      TEST(a_process_killed_while_it_drops_one),
      TEST(a_process_killed_while_it_revokes_one),
      TEST(a_process_killed_while_it_refreshes_one),
      TEST(a_process_killed_while_it_adopts_one),
      TEST(a_process_killed_while_it_converts_one),
      TEST(what_a_killed_conversion_leaves_is_imported),
      TEST(a_process_stopped_while_it_drops_one_keeps_no_row),
      TEST(what_converts_a_lease_that_ends_leaves_another_alone),
      TEST(what_imports_a_lease_that_ends_leaves_another_alone),
      TEST(a_lease_that_ends_during_its_import_is_lost),
      TEST(a_node_is_free_once_it_is_in_no_list),
      TEST(many_threads_make_leases),
      cmocka_unit_test(nothing_is_left),
  };
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
