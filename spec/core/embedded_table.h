/*
 * embedded_table.h - what the tests of the embedded store's table of locks share: a space with three
 * sessions, which each test has anew, threads that wait for a row, leases, and processes that hold
 * rows. After each test the index must be what the claims say. Other processes are real ones: a
 * forked child opens the directory afresh.
 *
 * Include behind <cmocka.h>; once in a program.
 */
#ifndef EMBEDDED_TABLE_H
#define EMBEDDED_TABLE_H

#include "../embedded/table.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>

enum {
  PATIENCE_MS = 20000, /* after that a condition that should come true has failed to */
  STAYS_MS = 60        /* for how long something stays before it is believed to stay */
};

static hl__shm_space *space;
static hl__shm_session *a, *b, *c;

static inline void pause_ms(int ms) {
  const struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
  (void)nanosleep(&t, NULL);
}

/* The index is what the claims say, as soon as no thread mends any more. */
static inline void assert_sound(void) {
  const char *wrong = verify(space);
  for (int i = 0; wrong && i < PATIENCE_MS; i++) {
    pause_ms(1);
    wrong = verify(space);
  }
  if (wrong) (void)fprintf(stderr, "verify: %s\n", wrong);
  assert_null(wrong);
}

static inline void sessions_begin(void) {
  a = session_begin(space);
  b = session_begin(space);
  c = session_begin(space);
}

static inline void sessions_end(void) {
  hl__shm_end(a);
  hl__shm_end(b);
  hl__shm_end(c);
}

/* Between these the test's process does not use the table. */
static inline void table_leave(void) {
  sessions_end();
  hl__shm_space_unref(space);
}

static inline void table_enter(void) {
  space = space_open();
  if (!space) (void)fprintf(stderr, "%s\n", fault.message);
  assert_non_null(space);
  sessions_begin();
}

static inline int setup(void **state) {
  (void)state;
  table_make();
  table_enter();
  return 0;
}

static inline int teardown(void **state) {
  (void)state;
  assert_sound();
  sessions_end();
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

static inline void *waiter_run(void *context) {
  waiter *self = context;
  const hl_request request = {.rows = &self->row,
                              .n = 1,
                              .deadline = hl__now_ms() + self->ms,
                              .agent = self->agent,
                              .blocks = self->agent != 0 && !self->pending,
                              .holds = true};
  hl_error error;
  self->status = hl__shm_take(self->session, &request, self->exempt, &error);
  if (self->status) memcpy(self->reason, error.reason, sizeof self->reason);
  atomic_store(&self->done, 1);
  return NULL;
}

static inline void waiter_start(waiter *self) {
  uint64_t waits = atomic_load(&space->waits);
  assert_int_equal(pthread_create(&self->thread, NULL, waiter_run, self), 0);
  for (int i = 0; i < PATIENCE_MS && atomic_load(&space->waits) == waits; i++) pause_ms(1);
}

static inline int waiter_end(waiter *self) {
  (void)pthread_join(self->thread, NULL);
  return self->status;
}

typedef struct shared {
  atomic_int step;
} shared;
static shared *between;

static inline uint32_t lease_new(hl__shm_session *session, int64_t ms) {
  uint32_t lease = hl__shm_lease_make(space);
  assert_int_not_equal(lease, 0);
  assert_int_equal(hl__shm_lease_claims(session, lease, INT64_MAX, &fault), HL_OK);
  hl__shm_lease_publish(space, lease, hl__shm_boot_ms(space) + ms);
  hl__shm_give_back(session, 0);
  return lease;
}

static inline uint64_t stamp_of(uint32_t lease) {
  hl__shm_lease *it = hl__shm_lease_at(space, lease);
  if (!it) abort();
  return atomic_load(&it->base.stamp);
}

static inline bool count_lease(void *context, uint32_t lease) {
  (void)lease;
  ++*(int *)context;
  return true;
}

static inline int leases(void) {
  int n = 0;
  hl__shm_each_lease(space, count_lease, &n);
  return n;
}

static inline void step_await(int step) {
  for (int i = 0; i < PATIENCE_MS && atomic_load(&between->step) < step; i++) pause_ms(1);
  assert_true(atomic_load(&between->step) >= step);
}

/* A child that holds rows until it is killed. `inside`: it also has the partition of the last one.
   */
static inline pid_t holder_start(const hl_row *rows, size_t n, bool inside) {
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

static inline void holder_kill(pid_t pid) {
  (void)kill(pid, SIGKILL);
  (void)waitpid(pid, NULL, 0);
}

static inline int control_open(void) {
  char path[96];
  (void)snprintf(path, sizeof path, "%s/" HL__SHM_FILE, directory);
  return open(path, O_RDWR | O_CLOEXEC);
}

static inline bool between_begin(void) {
  between = mmap(NULL, sizeof *between, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return between != MAP_FAILED;
}

#define IT(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

#endif
