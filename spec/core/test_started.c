/*
 * test_started.c - takes of the embedded store that do not block (hl_store_ops.start): granted,
 * timed out, cancelled, beside takes that block, of other processes, too; very many of them,
 * without a thread for each.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "embedded_store.h"
#include "leftovers.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
  PATIENCE_MS = 20000, /* after that a condition that should come true has failed to */
  ORDER_MS = 6000,     /* for MANY, one after the other; it takes 100 */
  SOON_MS = 4000,      /* soon, where a look at MANY, 1,000 of them twice a second, takes 10 s */
  STAYS_MS = 60,       /* for how long something stays before it is believed to stay */
  WAITS = -1           /* hl_store's statuses are not negative */
};

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define MANY 2000
#else
#define MANY 20000
#endif

static hl_store *store;
static hl_session *holder;

/* -------------------------------------------------------------- helpers */

static void pause_us(long us) {
  const struct timespec t = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000};
  (void)nanosleep(&t, NULL);
}

/* A take, started or not, of one row or two. */
typedef struct wanted {
  hl_started base;
  hl_session *session;
  hl_row rows[2];
  hl_request request;
  atomic_int status;
  uint64_t number; /* the how many-th that was done */
  int64_t done_ms;
  void (*then)(struct wanted *it); /* called in `done` */
} wanted;

static atomic_uint_fast64_t dones;

static void done(hl_started *base, int status) {
  wanted *it = (wanted *)(void *)base;
  it->number = atomic_fetch_add(&dones, 1);
  it->done_ms = hl__now_ms();
  void (*then)(wanted *) = it->then;
  if (then) then(it);
  atomic_store(&it->status, status);
}

static hl_request *want(wanted *it, uint32_t bucket, hl_mode mode, int64_t ms) {
  memset(it, 0, sizeof *it);
  it->base.done = done;
  it->rows[0] = (hl_row){.level = 2, .bucket = bucket, .mode = (uint8_t)mode};
  it->request = (hl_request){.rows = it->rows,
                             .n = 1,
                             .recorded = it->rows,
                             .recorded_n = 1,
                             .try_once = ms == 0,
                             .deadline = hl__deadline(hl__now_ms(), ms),
                             .path = "u1/a1",
                             .label = "label",
                             .label_size = 5,
                             .mode = mode};
  atomic_store(&it->status, WAITS);
  return &it->request;
}

static void start(wanted *it) {
  if (!it->session) it->session = session_new(store);
  assert_int_equal(ops->start(it->session, &it->request, &it->base, NULL), HL_OK);
}

static void start_one(wanted *it, uint32_t bucket, hl_mode mode, int64_t ms) {
  (void)want(it, bucket, mode, ms);
  start(it);
}

static int status_of(wanted *it) { return atomic_load(&it->status); }

static int await(wanted *it) {
  int64_t end = hl__now_ms() + PATIENCE_MS;
  while (status_of(it) == WAITS && hl__now_ms() < end) pause_us(50);
  return status_of(it);
}

static void stays(wanted *it) {
  pause_us(STAYS_MS * 1000L);
  assert_int_equal(status_of(it), WAITS);
}

static int take_ms(hl_session *session, uint32_t bucket, hl_mode mode, int64_t ms) {
  wanted it;
  hl_grant grant = {0};
  return ops->take(session, want(&it, bucket, mode, ms), &grant, NULL);
}
static int take(hl_session *session, uint32_t bucket) {
  return take_ms(session, bucket, HL_EXCLUSIVE, 0);
}

static int setup(void **state) {
  (void)state;
  store = store_new();
  holder = session_new(store);
  return 0;
}

static int teardown(void **state) {
  (void)state;
  ops->session_close(holder);
  ops->close(store);
  return 0;
}

/* So many wait at the store. */
static void waiting_await(hl_session *session, uint64_t n) {
  hl__shm_space *space = hl__embedded_session_of(session)->table->space;
  int64_t end = hl__now_ms() + PATIENCE_MS;
  while (atomic_load(&space->waits) < n && hl__now_ms() < end) pause_us(50);
  assert_true(atomic_load(&space->waits) >= n);
}
static uint64_t waits(hl_session *session) {
  return atomic_load(&hl__embedded_session_of(session)->table->space->waits);
}

/* ---------------------------------------------------------------- one */

static void a_free_row_is_granted(void **state) {
  (void)state;
  wanted it;
  start_one(&it, 7, HL_EXCLUSIVE, PATIENCE_MS);
  assert_int_equal(await(&it), HL_OK);
  assert_true(it.base.grant.token > 0);
  assert_int_equal(take(holder, 7), HL_TIMEOUT);
  give(it.session);
  assert_int_equal(take(holder, 7), HL_OK);
  ops->session_close(it.session);
}

static void a_row_is_granted_once_it_is_free(void **state) {
  (void)state;
  wanted it;
  assert_int_equal(take(holder, 7), HL_OK);
  start_one(&it, 7, HL_EXCLUSIVE, PATIENCE_MS);
  stays(&it);
  give(holder);
  assert_int_equal(await(&it), HL_OK);
  assert_int_equal(take(holder, 7), HL_TIMEOUT);
  ops->session_close(it.session);
}

/* Rows come one after the other, and all or none. */
static void all_rows_or_none(void **state) {
  (void)state;
  wanted it;
  hl_session *other = session_new(store);
  assert_int_equal(take(holder, 7), HL_OK);
  assert_int_equal(take(other, 8), HL_OK);
  (void)want(&it, 7, HL_EXCLUSIVE, PATIENCE_MS);
  it.rows[1] = (hl_row){.level = 2, .bucket = 8, .mode = HL_EXCLUSIVE};
  it.request.n = it.request.recorded_n = 2;
  start(&it);
  stays(&it);
  give(holder);
  stays(&it);
  give(other);
  assert_int_equal(await(&it), HL_OK);
  give(it.session);

  assert_int_equal(take(other, 8), HL_OK);
  it.request.deadline = hl__now_ms() + STAYS_MS;
  atomic_store(&it.status, WAITS);
  start(&it);
  assert_int_equal(await(&it), HL_TIMEOUT);
  assert_int_equal(it.base.error.bucket, 8);
  assert_int_equal(take(holder, 7), HL_OK);
  ops->session_close(it.session);
  ops->session_close(other);
}

static void a_wait_ends_in_time(void **state) {
  (void)state;
  enum { WAITERS = 40 };
  wanted them[WAITERS];
  assert_int_equal(take(holder, 7), HL_OK);
  for (int i = 0; i < WAITERS; i++) start_one(&them[i], 7, HL_EXCLUSIVE, 20 + i * 7 % WAITERS * 5);
  for (int i = 0; i < WAITERS; i++) {
    assert_int_equal(await(&them[i]), HL_TIMEOUT);
    assert_true(them[i].done_ms >= them[i].request.deadline); /* never early */
    assert_true(them[i].done_ms < them[i].request.deadline + 2000);
    ops->session_close(them[i].session);
  }
}

static void a_cancelled_wait_ends_at_once(void **state) {
  (void)state;
  wanted it;
  assert_int_equal(take(holder, 7), HL_OK);
  for (int i = 0; i < 2; i++) { /* as soon as it was started, and when it waits */
    uint64_t before = waits(holder);
    start_one(&it, 7, HL_EXCLUSIVE, PATIENCE_MS);
    if (i) waiting_await(holder, before + 1);
    ops->interrupt(it.session);
    assert_int_equal(await(&it), HL_CANCELLED);
    assert_int_equal(ops->settle(it.session, 0, NULL), HL_OK);
    assert_int_equal(take_ms(it.session, 7, HL_EXCLUSIVE, 20), HL_TIMEOUT);
    ops->session_close(it.session);
  }
}

static void a_lease_is_granted(void **state) {
  (void)state;
  wanted it;
  hl_lease_terms terms = {.ttl = 150, .owner = "owner"};
  memset(terms.id, 5, sizeof terms.id);
  memset(terms.holder, 6, sizeof terms.holder);
  assert_int_equal(take(holder, 7), HL_OK);
  (void)want(&it, 7, HL_EXCLUSIVE, PATIENCE_MS);
  it.request.lease = &terms;
  start(&it);
  stays(&it);
  give(holder);
  assert_int_equal(await(&it), HL_OK);
  int64_t granted = hl__now_ms();
  assert_int_equal(take(holder, 7), HL_TIMEOUT);
  /* The next one gets it once the lease's time is up. */
  wanted next;
  start_one(&next, 7, HL_EXCLUSIVE, PATIENCE_MS);
  assert_int_equal(await(&next), HL_OK);
  assert_true(next.done_ms >= granted + 150 - 50);
  ops->session_close(it.session);
  ops->session_close(next.session);
}

/* -------------------------------------------------------- beside others */

typedef struct blocking {
  pthread_t thread;
  hl_session *session;
  uint64_t number;
} blocking;

static void *block(void *context) {
  blocking *self = context;
  if (take_ms(self->session, 7, HL_EXCLUSIVE, PATIENCE_MS) == HL_OK)
    self->number = atomic_fetch_add(&dones, 1);
  give(self->session);
  return NULL;
}

static void give_then(wanted *it) { give(it->session); }

/* Those that block and those that do not stand in one queue. */
static void first_come_first_served(void **state) {
  (void)state;
  enum { PAIRS = 10 };
  wanted them[PAIRS];
  blocking threads[PAIRS];
  assert_int_equal(take(holder, 7), HL_OK);
  uint64_t before = waits(holder);
  for (uint64_t i = 0; i < PAIRS; i++) {
    (void)want(&them[i], 7, HL_EXCLUSIVE, PATIENCE_MS);
    them[i].then = give_then;
    start(&them[i]);
    waiting_await(holder, before + 2 * i + 1);
    threads[i].session = session_new(store);
    assert_int_equal(pthread_create(&threads[i].thread, NULL, block, &threads[i]), 0);
    waiting_await(holder, before + 2 * i + 2);
  }
  uint64_t first = atomic_load(&dones);
  give(holder);
  for (uint64_t i = 0; i < PAIRS; i++) {
    assert_int_equal(await(&them[i]), HL_OK);
    (void)pthread_join(threads[i].thread, NULL);
    assert_int_equal(them[i].number, first + 2 * i);
    assert_int_equal(threads[i].number, first + 2 * i + 1);
    ops->session_close(them[i].session);
    ops->session_close(threads[i].session);
  }
}

typedef struct shared {
  atomic_int step;
  atomic_uint_fast64_t order, other[8];
} shared;
static shared *between;

static void step_await(int step) {
  int64_t end = hl__now_ms() + PATIENCE_MS;
  while (atomic_load(&between->step) < step && hl__now_ms() < end) pause_us(100);
  assert_true(atomic_load(&between->step) >= step);
}

/* A child that has the row, and then does it. */
static pid_t child_start(void (*run)(hl_session *session)) {
  atomic_store(&between->step, 0);
  pid_t pid = fork();
  if (pid) {
    if (run) step_await(1);
    return pid;
  }
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  hl_session *session = session_new(store_new());
  if (take_ms(session, 7, HL_EXCLUSIVE, PATIENCE_MS) != HL_OK) _exit(1);
  atomic_store(&between->step, 1);
  run(session);
  _exit(0);
}

static void child_end(pid_t pid) {
  int status;
  assert_int_equal(waitpid(pid, &status, 0), pid);
  assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void stay(hl_session *session) {
  (void)session;
  for (;;) (void)pause();
}

static void hand_over(hl_session *session) {
  while (atomic_load(&between->step) < 2) pause_us(100);
  give(session);
  stay(session);
}

static void another_process_grants(void **state) {
  (void)state;
  pid_t pid = child_start(hand_over);
  wanted it;
  start_one(&it, 7, HL_EXCLUSIVE, PATIENCE_MS);
  stays(&it);
  atomic_store(&between->step, 2);
  assert_int_equal(await(&it), HL_OK);
  (void)kill(pid, SIGKILL);
  (void)waitpid(pid, NULL, 0);
  ops->session_close(it.session);
}

static void a_killed_holder_is_noticed(void **state) {
  (void)state;
  pid_t pid = child_start(stay);
  wanted it;
  start_one(&it, 7, HL_EXCLUSIVE, PATIENCE_MS);
  stays(&it);
  (void)kill(pid, SIGKILL);
  assert_int_equal(await(&it), HL_OK);
  (void)waitpid(pid, NULL, 0);
  ops->session_close(it.session);
}

/* Grants the row to the first that waits, and rings no bell; as a process does that is killed, or
   stopped, in between. */
static void grant_silently(hl_session *session, int signal) {
  hl__shm_space *space = hl__embedded_session_of(session)->table->space;
  const uint64_t key = hl__shm_key(7, 2);
  uint32_t index;
  while (atomic_load(&between->step) < 2) pause_us(100);
  if (hl__shm_part_lock(space, hl__shm_part_of(hl__shm_hash(key)), INT64_MAX, NULL)) _exit(4);
  const hl__shm_row *row = hl__shm_row_find(space, key, false, &index);
  hl__shm_node *mine = hl__shm_node_at(space, row->holders);
  hl__shm_node *next = hl__shm_node_at(space, row->first);
  atomic_store(&mine->claim, 0);
  atomic_store(&next->claim, hl__shm_claim(key, HL_EXCLUSIVE, HL__HELD));
  (void)raise(signal);
  stay(session);
}
static void die_silent(hl_session *session) { grant_silently(session, SIGKILL); }
static void stop_silent(hl_session *session) { grant_silently(session, SIGSTOP); }

static void granted_silently(void (*run)(hl_session *session)) {
  pid_t pid = child_start(run);
  wanted it;
  start_one(&it, 7, HL_EXCLUSIVE, 10 * PATIENCE_MS);
  stays(&it);
  atomic_store(&between->step, 2);
  assert_int_equal(await(&it), HL_OK);
  (void)kill(pid, SIGKILL);
  (void)waitpid(pid, NULL, 0);
  give(it.session);
  assert_int_equal(take_ms(holder, 7, HL_EXCLUSIVE, PATIENCE_MS), HL_OK);
  ops->session_close(it.session);
}

static void a_granter_dies_before_it_rings(void **state) {
  (void)state;
  granted_silently(die_silent);
}

static void a_granter_stops_before_it_rings(void **state) {
  (void)state;
  granted_silently(stop_silent);
}

static void take_turns(hl_session *session) {
  for (int i = 0; i < 200; i++) {
    give(session);
    if (take_ms(session, 7, HL_EXCLUSIVE, PATIENCE_MS) != HL_OK) _exit(2);
    if (atomic_fetch_add(&between->order, 1) % 2) _exit(3);
    (void)atomic_fetch_add(&between->order, 1);
  }
}

/* Two of another process that block, and two here that do not, take turns. */
static void processes_take_turns(void **state) {
  (void)state;
  wanted them[2];
  pid_t pid;
  atomic_store(&between->order, 0);
  pid = child_start(take_turns);
  for (int i = 0; i < 2; i++) start_one(&them[i], 7, HL_EXCLUSIVE, PATIENCE_MS);
  for (int n = 0; n < 400; n++) {
    wanted *it = &them[n % 2];
    assert_int_equal(await(it), HL_OK);
    assert_int_equal(atomic_fetch_add(&between->order, 1) % 2, 0);
    (void)atomic_fetch_add(&between->order, 1);
    hl_session *session = it->session;
    give(session);
    (void)want(it, 7, HL_EXCLUSIVE, PATIENCE_MS);
    it->session = session;
    start(it);
  }
  child_end(pid);
  for (int i = 0; i < 2; i++) {
    ops->interrupt(them[i].session);
    (void)await(&them[i]);
    ops->session_close(them[i].session);
  }
}

static void a_forked_child_leaves_it_alone(void **state) {
  (void)state;
  wanted it;
  assert_int_equal(take(holder, 7), HL_OK);
  start_one(&it, 7, HL_EXCLUSIVE, PATIENCE_MS);
  stays(&it);
  pid_t pid = fork();
  if (pid == 0) {
    hl_store *own = store_new();
    hl_session *session = session_new(own);
    int status = take(session, 7) == HL_TIMEOUT && take(session, 8) == HL_OK ? 0 : 1;
    ops->session_close(session);
    ops->close(own);
    _exit(status);
  }
  child_end(pid);
  stays(&it);
  give(holder);
  assert_int_equal(await(&it), HL_OK);
  ops->session_close(it.session);
}

/* exit() in the midst of grants: the rows are free afterwards. */
static void exit_amidst(hl_session *session) {
  static wanted them[50];
  store = session->store;
  for (int i = 0; i < 50; i++) {
    (void)want(&them[i], 7, HL_EXCLUSIVE, PATIENCE_MS);
    them[i].then = give_then;
    start(&them[i]);
  }
  give(session);
  exit(0); /* NOLINT: that is the test */
}

static void exit_frees(void **state) {
  (void)state;
  for (int i = 0; i < 20; i++) {
    pid_t pid = child_start(exit_amidst);
    child_end(pid);
    assert_int_equal(take_ms(holder, 7, HL_EXCLUSIVE, PATIENCE_MS), HL_OK);
    give(holder);
  }
}

/* ------------------------------------------------------- few threads, another root */

static int64_t cpu_ms(void) {
  struct timespec t;
  (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* In a child: it can have one thread, the bell's, which so watches itself. */
static int watchless(void) {
  const struct rlimit two = {2, 2};
  wanted it;
  hl_store *own = store_new();
  hl_session *first = session_new(own);
  (void)want(&it, 7, HL_EXCLUSIVE, PATIENCE_MS);
  it.session = session_new(own);
  if (take(first, 7) != HL_OK) return 1;
  if (setuid(54321 + (uid_t)getpid() % 10000) != 0 || setrlimit(RLIMIT_NPROC, &two) != 0) return 77;
  start(&it);
  pause_us(200000);
  if (entries_of("/proc/self/task") - 2 != 2) return 77;
  int64_t began = cpu_ms();
  pause_us(1000000);
  int64_t took = cpu_ms() - began;
  print_message("without a thread that watches: %lld ms of CPU in a second\n", (long long)took);
  if (took > 250) return 3;
  give(first);
  return await(&it) == HL_OK ? 0 : 4;
}

/* In a child: behind chroot() the name of Symfony's file leads to another file. */
static int jailed(void) {
  char jail[96], path[256], names[8] = {0};
  const uint32_t size = 1;
  wanted it;
  memcpy(names, &size, sizeof size);
  names[4] = 'n';
  if (setenv("TMPDIR", directory, 1) != 0) return 1;
  config.interoperates = true;
  hl_store *own = store_new();
  (void)want(&it, 7, HL_EXCLUSIVE, PATIENCE_MS);
  it.session = session_new(own);
  it.rows[0] = (hl_row){.level = HL_LEVEL_NAMED, .bucket = 7, .mode = HL_EXCLUSIVE};
  it.request.names = names;
  start(&it);
  if (await(&it) != HL_OK) return 2;
  give(it.session);
  (void)snprintf(jail, sizeof jail, "%s/jail", directory);
  (void)snprintf(path, sizeof path, "mkdir -p %s%s", jail, directory);
  if (system(path) != 0) return 3;
  if (chroot(jail) != 0 || chdir("/") != 0) return 77;
  atomic_store(&it.status, WAITS);
  start(&it);
  return await(&it) == HL_ESTORE && strstr(it.base.error.message, "root directory") ? 0 : 4;
}

static void in_child(int (*run)(void)) {
  int status;
  pid_t pid = fork();
  if (pid == 0) _exit(run());
  assert_int_equal(waitpid(pid, &status, 0), pid);
  assert_true(WIFEXITED(status));
  if (WEXITSTATUS(status) != 77) assert_int_equal(WEXITSTATUS(status), 0);
}

/* Only the superuser has another user's limits; ThreadSanitizer has a thread itself. */
static void it_sleeps_where_no_thread_can_watch(void **state) {
  (void)state;
  if (geteuid() == 0 && THREADS_OF_TOOLS == 0) in_child(watchless);
}

static void a_file_below_another_root_is_refused(void **state) {
  (void)state;
  if (geteuid() == 0) in_child(jailed);
}

/* ------------------------------------------------------------ the store's end */

static void close_then(wanted *it) {
  hl_store *own = it->session->store;
  ops->session_close(it->session);
  ops->close(own);
}

/* The callback may close the session, and the last store of the directory. */
static void a_callback_closes_the_store(void **state) {
  (void)state;
  for (int i = 0; i < 50; i++) {
    wanted it;
    hl_store *own = store_new();
    (void)want(&it, 7, HL_EXCLUSIVE, PATIENCE_MS);
    it.session = session_new(own);
    it.then = close_then;
    start(&it);
    assert_int_equal(await(&it), HL_OK);
  }
}

static atomic_int dawdles_us; /* every thread but the caller, once it has given a mutex back */

int pthread_mutex_unlock(pthread_mutex_t *mutex) {
  static int (*real)(pthread_mutex_t *);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pthread_mutex_unlock");
  int failure = real(mutex);
  const int us = atomic_load(&dawdles_us);
  if (us > 0 && gettid() != getpid()) pause_us(us);
  return failure;
}

/* The close ends the store's thread wherever that is: also between its look whether the store is
   closed and its sleep. The thread takes that way once its last take waits no longer. */
static void a_close_ends_the_thread(void **state) {
  (void)state;
  (void)alarm(PATIENCE_MS / 1000);
  atomic_store(&dawdles_us, 300);
  for (int i = 0; i < 60; i++) {
    wanted it;
    hl_store *own = store_new();
    hl_session *other = session_new(own);
    assert_int_equal(take(other, 7), HL_OK);
    uint64_t before = waits(other);
    (void)want(&it, 7, HL_EXCLUSIVE, PATIENCE_MS);
    it.session = session_new(own);
    start(&it);
    waiting_await(other, before + 1);
    pause_us(5000); /* so that the thread sleeps */
    give(other);
    assert_int_equal(await(&it), HL_OK);
    ops->session_close(it.session);
    ops->session_close(other);
    pause_us(i * 20L);
    ops->close(own);
  }
  atomic_store(&dawdles_us, 0);
  (void)alarm(0);
}

static atomic_bool is_closed;

static void outlast_then(wanted *it) {
  int64_t end = hl__now_ms() + PATIENCE_MS;
  ops->session_close(it->session);
  atomic_store(&it->status, HL_BUSY);
  while (!atomic_load(&is_closed) && hl__now_ms() < end) pause_us(50);
  it->session = NULL;
  if (!atomic_load(&is_closed)) it->number = UINT64_MAX;
}

/* The callback may wait for the thread that closes the last store of the directory: as the core's,
   for a mutex that this thread has. */
static void a_callback_outlasts_the_store(void **state) {
  (void)state;
  wanted it;
  hl_store *own = store_new();
  (void)want(&it, 7, HL_EXCLUSIVE, PATIENCE_MS);
  it.session = session_new(own);
  it.then = outlast_then;
  start(&it);
  while (status_of(&it) == WAITS) pause_us(50);
  ops->close(own);
  atomic_store(&is_closed, true);
  int64_t end = hl__now_ms() + PATIENCE_MS;
  while (status_of(&it) == HL_BUSY && hl__now_ms() < end) pause_us(50);
  assert_int_equal(status_of(&it), HL_OK);
  assert_true(it.number != UINT64_MAX);
}

static wanted next_one;

static void start_then(wanted *it) {
  give(it->session);
  next_one.session = it->session;
  start(&next_one);
}

/* The callback may start the next take, whatever the thread was about to do. */
static void a_callback_starts_the_next(void **state) {
  (void)state;
  for (int i = 0; i < 300; i++) {
    wanted it;
    hl_store *own = store_new();
    hl_session *other = session_new(own);
    assert_int_equal(take(other, 7), HL_OK);
    uint64_t before = waits(other);
    (void)want(&next_one, 7, HL_EXCLUSIVE, PATIENCE_MS);
    (void)want(&it, 7, HL_EXCLUSIVE, PATIENCE_MS);
    it.session = session_new(own);
    it.then = start_then;
    start(&it);
    while (waits(other) == before) {}
    give(other);
    assert_int_equal(await(&it), HL_OK);
    assert_int_equal(await(&next_one), HL_OK);
    ops->session_close(it.session);
    ops->session_close(other);
    ops->close(own);
  }
}

static void a_removed_file_is_noticed(void **state) {
  (void)state;
  wanted it;
  char name[96];
  (void)snprintf(name, sizeof name, "%s/" HL__SHM_FILE, directory);
  assert_int_equal(take(holder, 7), HL_OK);
  start_one(&it, 7, HL_EXCLUSIVE, PATIENCE_MS);
  stays(&it);
  assert_int_equal(unlink(name), 0);
  assert_int_equal(await(&it), HL_ECONNECTION);
  give(holder);
  ops->session_close(it.session);
}

static uint32_t part_of(uint32_t bucket) {
  return hl__shm_part_of(hl__shm_hash(hl__shm_key(bucket, 2)));
}

static void stop_inside(hl_session *session) {
  hl__shm_space *space = hl__embedded_session_of(session)->table->space;
  if (hl__shm_part_lock(space, part_of(7), INT64_MAX, NULL)) _exit(4);
  atomic_store(&between->step, 2);
  (void)raise(SIGSTOP);
  stay(session);
}

/* Many want rows of the partition of which a process is stopped inside; one a row of another. */
static void those_a_stopped_process_keeps_out_keep_no_other(void **state) {
  (void)state;
  enum { STUCK = 50 };
  wanted other, them[STUCK];
  uint32_t free = 8, stuck = 7;
  while (part_of(free) == part_of(stuck)) free++;
  assert_int_equal(take(holder, free), HL_OK);
  start_one(&other, free, HL_EXCLUSIVE, 10 * PATIENCE_MS);
  stays(&other);
  pid_t pid = child_start(stop_inside);
  step_await(2);
  for (int i = 0; i < STUCK; i++) {
    do stuck++;
    while (part_of(stuck) != part_of(7));
    start_one(&them[i], stuck, HL_EXCLUSIVE, 10 * PATIENCE_MS);
  }
  stays(&them[STUCK - 1]);
  give(holder);
  assert_int_equal(await(&other), HL_OK);
  (void)kill(pid, SIGKILL);
  (void)waitpid(pid, NULL, 0);
  for (int i = 0; i < STUCK; i++) {
    assert_int_equal(await(&them[i]), HL_OK);
    ops->session_close(them[i].session);
  }
  ops->session_close(other.session);
}

/* ------------------------------------------------------------- very many */

static int threads_now(void) { return entries_of("/proc/self/task") - 2; }

static wanted *many_start(uint32_t step, hl_mode mode, int64_t ms, void (*then)(wanted *)) {
  wanted *them = calloc(MANY, sizeof *them);
  assert_non_null(them);
  uint64_t before = waits(holder);
  for (uint32_t i = 0; i < MANY; i++) {
    (void)want(&them[i], 7 + i * step, mode, ms);
    them[i].then = then;
    start(&them[i]);
  }
  waiting_await(holder, before + MANY);
  assert_true(threads_now() <= 3 + THREADS_OF_TOOLS); /* this one, the bell's, the watch's */
  return them;
}

static void many_end(wanted *them, int status) {
  for (int i = 0; i < MANY; i++) {
    assert_int_equal(await(&them[i]), status);
    ops->session_close(them[i].session);
  }
  free(them);
}

static double ms_since(int64_t ns) { return (double)(hl__shm_now() - ns) / 1e6; }

static void many_share(void **state) {
  (void)state;
  assert_int_equal(take(holder, 7), HL_OK);
  wanted *them = many_start(0, HL_SHARED, 10 * PATIENCE_MS, NULL);
  int64_t began = hl__shm_now();
  give(holder);
  for (int i = 0; i < MANY; i++) assert_int_equal(await(&them[i]), HL_OK);
  print_message("%d share: %.1f ms\n", MANY, ms_since(began));
  many_end(them, HL_OK);
}

static void many_in_order(void **state) {
  (void)state;
  assert_int_equal(take(holder, 7), HL_OK);
  wanted *them = many_start(0, HL_EXCLUSIVE, 10 * PATIENCE_MS, give_then);
  uint64_t first = atomic_load(&dones);
  int64_t began = hl__shm_now();
  give(holder);
  assert_int_equal(await(&them[MANY - 1]), HL_OK);
  double took = ms_since(began);
  print_message("%d in order: %.1f ms\n", MANY, took);
  assert_true(took < ORDER_MS);
  for (uint64_t i = 0; i < MANY; i++) assert_int_equal(them[i].number, first + i);
  many_end(them, HL_OK);
}

/* Each for a row of its own, all of them held by one. */
static void many_rows(void **state) {
  (void)state;
  hl_row *rows = calloc(MANY, sizeof *rows);
  assert_non_null(rows);
  for (uint32_t i = 0; i < MANY; i++)
    rows[i] = (hl_row){.level = 2, .bucket = 7 + i, .mode = HL_EXCLUSIVE};
  const hl_request all = {.rows = rows, .n = MANY, .try_once = true, .path = "", .label = ""};
  hl_grant grant;
  assert_int_equal(ops->take(holder, &all, &grant, NULL), HL_OK);
  wanted *them = many_start(1, HL_EXCLUSIVE, 10 * PATIENCE_MS, NULL);
  struct timespec before, after;
  (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
  pause_us(1000000);
  (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
  print_message("%d wait: %.2f ms of CPU in a second\n", MANY,
                (double)(after.tv_sec - before.tv_sec) * 1e3 +
                    (double)(after.tv_nsec - before.tv_nsec) / 1e6);
  int64_t began = hl__shm_now();
  give(holder);
  for (int i = 0; i < MANY; i++) assert_int_equal(await(&them[i]), HL_OK);
  print_message("%d rows: %.1f ms\n", MANY, ms_since(began));
  many_end(them, HL_OK);
  free(rows);
}

static void many_expire(void **state) {
  (void)state;
  assert_int_equal(take(holder, 7), HL_OK);
  wanted *them = many_start(0, HL_EXCLUSIVE, 3000, NULL);
  for (int i = 0; i < MANY; i++) {
    assert_int_equal(await(&them[i]), HL_TIMEOUT);
    assert_true(them[i].done_ms >= them[i].request.deadline);
  }
  many_end(them, HL_TIMEOUT);
}

static void many_cancelled(void **state) {
  (void)state;
  assert_int_equal(take(holder, 7), HL_OK);
  wanted *them = many_start(0, HL_EXCLUSIVE, 10 * PATIENCE_MS, NULL);
  int64_t began = hl__shm_now();
  for (int i = MANY; i-- > 0;) ops->interrupt(them[i].session);
  for (int i = 0; i < MANY; i++) assert_int_equal(await(&them[i]), HL_CANCELLED);
  print_message("%d cancelled: %.1f ms\n", MANY, ms_since(began));
  many_end(them, HL_CANCELLED);
}

/* However many wait, the one in whose way a lease is hears at once that the lease ends sooner. */
static void a_lease_is_shortened_for_one_of_many(void **state) {
  (void)state;
  hl_session *other = session_new(store);
  hl_lease_terms terms = {.ttl = 20 * PATIENCE_MS, .owner = "owner", .turn = 1};
  hl_grant grant = {0};
  int64_t sent;
  wanted it;
  memset(terms.id, 5, sizeof terms.id);
  memset(terms.holder, 6, sizeof terms.holder);
  (void)want(&it, 8, HL_EXCLUSIVE, 0);
  it.request.lease = &terms;
  assert_int_equal(ops->take(other, &it.request, &grant, NULL), HL_OK);
  terms.place = grant.place;
  assert_int_equal(take(holder, 7), HL_OK);
  wanted *them = many_start(0, HL_EXCLUSIVE, 10 * PATIENCE_MS, NULL);
  uint64_t before = waits(holder);
  start_one(&it, 8, HL_EXCLUSIVE, PATIENCE_MS);
  waiting_await(holder, before + 1);
  int64_t began = hl__now_ms();
  assert_int_equal(
      store->leases->refresh(other, &terms, 100, hl__now_ms() + PATIENCE_MS, &sent, NULL), HL_OK);
  assert_int_equal(await(&it), HL_OK);
  print_message("of %d: %lld ms\n", MANY, (long long)(it.done_ms - began));
  assert_true(it.done_ms < began + SOON_MS);
  for (int i = 0; i < MANY; i++) ops->interrupt(them[i].session);
  many_end(them, HL_CANCELLED);
  ops->session_close(it.session);
  ops->session_close(other);
}

/* ---------------------------------------------------------------- a crowd */

#define THREADS 4
#define ROUNDS 300

static atomic_int held[3], overlaps;

static void hold(uint32_t bucket, hl_session *session, unsigned *seed) {
  if (atomic_fetch_add(&held[bucket], 1) > 0) (void)atomic_fetch_add(&overlaps, 1);
  if (rand_r(seed) % 4 == 0) pause_us(rand_r(seed) % 200);
  (void)atomic_fetch_sub(&held[bucket], 1);
  give(session);
}

/* Started, cancelled, timed out and blocking takes, with grants at every moment of them. */
static void *crowd(void *context) {
  unsigned seed = (unsigned)(uintptr_t)context;
  hl_session *sessions[8];
  for (int i = 0; i < 8; i++) sessions[i] = session_new(store);
  for (int round = 0; round < ROUNDS; round++) {
    wanted them[8];
    int n = 1 + rand_r(&seed) % 8;
    for (int i = 0; i < n; i++) {
      (void)want(&them[i], (uint32_t)rand_r(&seed) % 3, HL_EXCLUSIVE, rand_r(&seed) % 20);
      them[i].request.try_once = false;
      them[i].session = sessions[i];
      start(&them[i]);
    }
    for (int i = 0; i < n; i++) {
      if (rand_r(&seed) % 4 == 0) ops->interrupt(sessions[i]);
      if (await(&them[i]) == HL_OK) hold((uint32_t)them[i].rows[0].bucket, sessions[i], &seed);
      assert_int_equal(ops->settle(sessions[i], 0, NULL), HL_OK);
    }
    uint32_t bucket = (uint32_t)rand_r(&seed) % 3;
    if (take_ms(sessions[0], bucket, HL_EXCLUSIVE, 5) == HL_OK) hold(bucket, sessions[0], &seed);
  }
  for (int i = 0; i < 8; i++) ops->session_close(sessions[i]);
  return NULL;
}

static void a_crowd(void **state) {
  (void)state;
  pthread_t threads[THREADS];
  for (uintptr_t i = 0; i < THREADS; i++)
    assert_int_equal(pthread_create(&threads[i], NULL, crowd, (void *)(i + 1)), 0);
  for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_join(threads[i], NULL), 0);
  assert_int_equal(atomic_load(&overlaps), 0);
  for (uint32_t i = 0; i < 3; i++) assert_int_equal(take(holder, i), HL_OK);
}

#define IT(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      IT(a_free_row_is_granted),
      IT(a_row_is_granted_once_it_is_free),
      IT(all_rows_or_none),
      IT(a_wait_ends_in_time),
      IT(a_cancelled_wait_ends_at_once),
      IT(a_lease_is_granted),
      IT(first_come_first_served),
      IT(another_process_grants),
      IT(a_killed_holder_is_noticed),
      IT(a_granter_dies_before_it_rings),
      IT(a_granter_stops_before_it_rings),
      IT(those_a_stopped_process_keeps_out_keep_no_other),
      IT(processes_take_turns),
      IT(a_forked_child_leaves_it_alone),
      IT(exit_frees),
      cmocka_unit_test(it_sleeps_where_no_thread_can_watch),
      cmocka_unit_test(a_file_below_another_root_is_refused),
      cmocka_unit_test(a_callback_closes_the_store),
      cmocka_unit_test(a_close_ends_the_thread),
      cmocka_unit_test(a_callback_outlasts_the_store),
      cmocka_unit_test(a_callback_starts_the_next),
      IT(a_removed_file_is_noticed),
      IT(many_share),
      IT(many_in_order),
      IT(many_rows),
      IT(many_expire),
      IT(many_cancelled),
      IT(a_lease_is_shortened_for_one_of_many),
      IT(a_crowd),
      cmocka_unit_test(nothing_is_left),
  };
  (void)snprintf(directory, sizeof directory, "/dev/shm/hierlock-started-XXXXXX");
  between = mmap(NULL, sizeof *between, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (!mkdtemp(directory) || between == MAP_FAILED) return 1;
  if (hl_layout_new(NULL, 0, 1u << 30, &layout, NULL) != HL_OK) return 1;
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  int failures = cmocka_run_group_tests_name("started", tests, NULL, NULL);
  char command[96];
  (void)snprintf(command, sizeof command, "rm -rf %s", directory);
  if (system(command) != 0) failures++;
  hl_layout_unref(layout);
  (void)munmap(between, sizeof *between);
  return failures > 0;
}
