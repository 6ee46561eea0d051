/*
 * embedded_processes.h - processes and threads that take rows of one lock directory, by the embedded
 * store's hl_store_ops: for test_embedded_store.c and test_embedded_directory.c. Other processes are
 * real ones: a forked child opens the store afresh, as another program would.
 *
 * Include behind <cmocka.h>; once in a program.
 */
#ifndef EMBEDDED_PROCESSES_H
#define EMBEDDED_PROCESSES_H

#include "await.h"
#include "embedded_store.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

/* For how long something must stay as it is before it is believed to stay. */
#define STAYS_MS 60

/* Shared by a test's processes; zero when the test begins. */
static struct shared {
  atomic_int step, stop, holders[16], writers[16], wrong, grants[16];
  _Atomic uint64_t token;
} * shared;

static inline hl_row row(unsigned level, uint32_t bucket, hl_mode mode) {
  return (hl_row){.level = (uint8_t)level, .bucket = bucket, .mode = (uint8_t)mode};
}

/* timeout: ms; 0 tries once. */
static inline int take(hl_session *session, const hl_row *rows, size_t n, int64_t timeout,
                       bool extend, hl_error *error) {
  hl_request request = {.rows = rows,
                        .n = n,
                        .extend = extend,
                        .try_once = timeout == 0,
                        .deadline = hl__deadline(hl__now_ms(), timeout),
                        .path = "u1/a1",
                        .label = "a\nlabel",
                        .label_size = 7,
                        .mode = HL_EXCLUSIVE};
  hl_grant grant;
  int status = ops->take(session, &request, &grant, error);
  if (status == HL_OK) atomic_store(&shared->token, grant.token);
  return status;
}

static inline int take1(hl_session *session, uint32_t bucket, hl_mode mode, int64_t timeout) {
  hl_row r = row(2, bucket, mode);
  return take(session, &r, 1, timeout, false, NULL);
}

static inline int extend1(hl_session *session, uint32_t bucket, hl_mode mode, int64_t timeout) {
  hl_row r = row(2, bucket, mode);
  return take(session, &r, 1, timeout, true, NULL);
}

/* Runs fn in another process, which ends with it. */
static inline pid_t spawn(void (*fn)(intptr_t), intptr_t argument) {
  pid_t pid = fork();
  if (pid == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* also where a test fails */
    fn(argument);
    _exit(0);
  }
  assert_true(pid > 0);
  return pid;
}

static inline void reap(pid_t pid) {
  int status;
  assert_int_equal(waitpid(pid, &status, 0), pid);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), 0);
}

static inline void murder(pid_t pid) {
  assert_int_equal(kill(pid, SIGKILL), 0);
  assert_int_equal(waitpid(pid, NULL, 0), pid);
}

static inline int count_files(const char *path, const char *prefix) {
  DIR *names = opendir(path);
  int n = 0;
  assert_non_null(names);
  for (struct dirent *file; (file = readdir(names));)
    n += strncmp(file->d_name, prefix, strlen(prefix)) == 0;
  (void)closedir(names);
  return n;
}

static inline void remove_path(const char *path) {
  DIR *names = opendir(path);
  if (!names) return;
  for (struct dirent *file; (file = readdir(names));) (void)unlinkat(dirfd(names), file->d_name, 0);
  (void)closedir(names);
  (void)rmdir(path);
}

static inline void remove_directory(void) { remove_path(directory); }

/* A name in the directory, or beside it ("-x"); valid until the next call. */
static const char *path_of(const char *name) {
  static char path[2][400];
  static int turn;
  turn = !turn;
  (void)snprintf(path[turn], sizeof path[turn], "%s%s%s", directory, *name == '-' ? "" : "/", name);
  return path[turn];
}

static inline int set_up(void **state) {
  (void)state;
  memset(shared, 0, sizeof *shared);
  (void)alarm(600); /* a test that hangs ends; valgrind is slow */
  return 0;
}

static inline int tear_down(void **state) {
  (void)state;
  (void)alarm(0);
  remove_directory();
  remove_path(path_of("-x"));
  (void)unlink(path_of("-link"));
  return 0;
}

/* A process that takes bucket 1, says so (step 1), and gives it back when told
   to (stop). */
static inline void hold_until_stop(intptr_t mode) {
  hl_session *session = session_new(store_new());
  if (take1(session, 1, (hl_mode)mode, HL_FOREVER) != HL_OK) _exit(1);
  atomic_store(&shared->step, 1);
  WAIT_UNTIL(atomic_load(&shared->stop));
  (void)ops->give_back(session, NULL);
}

static inline void take_a_token(intptr_t unused) {
  (void)unused;
  hl_session *session = session_new(store_new());
  if (take1(session, 1, HL_EXCLUSIVE, 0) != HL_OK) _exit(1);
  /* Opening raises them to the time; the next one has only the counter. */
  uint64_t first = atomic_load(&shared->token);
  if (ops->give_back(session, NULL) != HL_OK) _exit(2);
  if (take1(session, 1, HL_EXCLUSIVE, 0) != HL_OK) _exit(3);
  if (atomic_load(&shared->token) <= first) _exit(4);
}

typedef struct waiting {
  pthread_t thread;
  hl_session *session;
  hl_row row;
  int64_t timeout;
  bool extend;
  atomic_int status; /* 99: not yet */
  int order;
} waiting;

static atomic_int granted_count;

static inline void *waiting_run(void *argument) {
  waiting *w = argument;
  int status = take(w->session, &w->row, 1, w->timeout, w->extend, NULL);
  w->order = atomic_fetch_add(&granted_count, 1);
  atomic_store(&w->status, status);
  return NULL;
}

/* Starts a thread that takes bucket 1; it is in the queue, or done, on return. */
static inline void waiting_start(waiting *w, hl_session *session, hl_mode mode, int64_t timeout,
                                 bool extend) {
  *w = (waiting){.session = session, .row = row(2, 1, mode), .timeout = timeout, .extend = extend};
  atomic_init(&w->status, 99);
  assert_int_equal(pthread_create(&w->thread, NULL, waiting_run, w), 0);
  hl__embedded_session *s = hl__embedded_session_of(session);
  int64_t end = hl__now_ms() + PATIENCE_MS;
  for (bool there = false; !there && hl__now_ms() < end; sleep_ms(1)) {
    (void)pthread_mutex_lock(&s->guard);
    there = atomic_load(&s->table->waits) || atomic_load(&w->status) != 99;
    (void)pthread_mutex_unlock(&s->guard);
  }
}

static inline int waiting_end(waiting *w) {
  assert_int_equal(pthread_join(w->thread, NULL), 0);
  return atomic_load(&w->status);
}

/* An observer's view. */
typedef struct seen {
  int held, waiting;
  hl_holder last;
} seen;

static inline void see(void *context, const hl_holder *holder) {
  seen *s = context;
  *(holder->waiting ? &s->waiting : &s->held) += 1;
  s->last = *holder;
}

static inline int holders(hl_session *session, const hl_row *rows, size_t n, hl_holder_fn fn,
                          void *context) {
  const hl_lease_filter filter = {.rows = rows, .n = n};
  return ops->holders(session, &filter, fn, context, HL_FOREVER, NULL);
}

static inline seen look_for(hl_session *session, uint32_t bucket, hl_mode mode) {
  seen s = {0};
  hl_row r = row(2, bucket, mode);
  assert_int_equal(holders(session, &r, 1, see, &s), HL_OK);
  return s;
}

/* Before and after all tests of a program: where the directory is. A process runs only one of these programs. */
static inline int processes_begin(void **state) {
  (void)state;
  (void)snprintf(directory, sizeof directory, "/dev/shm/hierlock-test-%ld", (long)getpid());
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return shared == MAP_FAILED || hl_layout_new(NULL, 0, 0, &layout, NULL) != HL_OK;
}

static inline int processes_end(void **state) {
  (void)state;
  hl_layout_unref(layout);
  return munmap(shared, sizeof *shared);
}

#endif
