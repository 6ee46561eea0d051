/*
 * exit.c - see exit.h. The state here belongs to the process, not to a manager.
 */
#include "exit.h"

#include "clock.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* How long exit() waits for threads on their way out. A server that hangs does not keep the program
   longer. */
#define AWAIT_MS 2500
/* How long exit() waits for threads in the client library. These threads compute rather than wait:
   each login reads all certificates of the system, one login after the other. Only a name server
   can delay them longer. */
#define INSIDE_MS 5000
/* More stores than exist. */
#define LIBRARIES_MAX 32

static atomic_uint awaited; /* threads on their way out */
static atomic_bool exiting;
/* The thread that called exit() and runs its handlers; set before `exiting`. */
static pthread_t exiter;

static atomic_bool library_closed;
static atomic_uint inside;
static _Thread_local bool is_inside;
static _Thread_local unsigned gives_back;

static bool is_exiter(void) {
  return atomic_load(&exiting) && pthread_equal(exiter, pthread_self());
}

/* Blocks until the process ends. */
static void stay(void) {
  if (is_inside) atomic_fetch_sub(&inside, 1u);
  for (;;) (void)pause();
}

static void wait_for_none(const atomic_uint *count, int64_t ms) {
  static const struct timespec moment = {0, 1000000};
  for (int64_t end = hl__now_ms() + ms; atomic_load(count) > 0 && hl__left_ms(end) > 0;)
    (void)nanosleep(&moment, NULL);
}

static void before_exit(void) {
  if (atomic_load(&exiting)) return; /* the first handler has done all this */
  exiter = pthread_self();
  atomic_store(&exiting, true);
  wait_for_none(&awaited, AWAIT_MS);
  atomic_store(&library_closed, true);
  wait_for_none(&inside, INSIDE_MS);
}

/* A child has only the thread that forked. Unless that thread called exit(), the child is not in
   exit(). */
static void in_child(void) {
  if (!is_exiter()) {
    atomic_store(&library_closed, false);
    atomic_store(&exiting, false);
  }
  atomic_store(&awaited, 0u);
  atomic_store(&inside, 0u);
}

/* A program may unload our shared object once it has closed its managers. But threads of ours may
   still be in it: a server that hangs keeps them, and no thread can be awaited to its last
   instruction. So the shared object stays loaded. */
static void stay_loaded(void) {
  static const char here = 0;
  Dl_info object;
  if (dladdr(&here, &object) && object.dli_fname)
    (void)dlopen(object.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

static void forks_begin(void) { (void)pthread_atfork(NULL, NULL, in_child); }

/* Before a thread is counted: the child would count it, too, and wait for it at its end. */
static void forks_watch(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  (void)pthread_once(&once, forks_begin);
}

void hl__exit_begin(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  forks_watch();
  (void)pthread_once(&once, stay_loaded);
}

int hl__thread_start(pthread_t *thread, size_t stack, void *(*run)(void *context), void *context) {
  sigset_t all, before;
  pthread_attr_t attributes;
  (void)pthread_attr_init(&attributes);
  if (stack) {
    (void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    (void)pthread_attr_setstacksize(&attributes, stack);
  }
  (void)sigfillset(&all);
  (void)pthread_sigmask(SIG_SETMASK, &all, &before);
  int failure = pthread_create(thread, &attributes, run, context);
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
  (void)pthread_attr_destroy(&attributes);
  return failure;
}

/* Once for each client library. */
static void watch(const hl_store_ops *ops) {
  static _Atomic(const hl_store_ops *) watched[LIBRARIES_MAX];
  for (unsigned i = 0; i < LIBRARIES_MAX; i++) {
    const hl_store_ops *there = NULL;
    if (atomic_compare_exchange_strong(&watched[i], &there, ops)) (void)atexit(before_exit);
    if (!there || there == ops) return;
  }
}

int hl__exit_watched_open(const hl_store_ops *ops, const hl_store_config *config, hl_store **store,
                          hl_error *error) {
  forks_watch();
  if (ops->library_init) ops->library_init();
  if (ops->traits.blocks) watch(ops);
  hl__exit_await(1);
  hl__exit_check(1);
  int status = ops->open(config, store, error);
  hl__exit_await_end();
  return status;
}

void hl__exit_await(unsigned n) { atomic_fetch_add(&awaited, n); }

void hl__exit_await_end(void) { atomic_fetch_sub(&awaited, 1u); }

/* Whether the caller's work comes too late. The program's own handlers may go on; only exit() waits
   for them. */
static bool is_late(void) { return atomic_load(&exiting) && !is_exiter() && !gives_back; }

void hl__exit_check(unsigned n) {
  if (!is_late()) return;
  atomic_fetch_sub(&awaited, n);
  stay();
}

bool hl__exit_try_await(void) {
  hl__exit_await(1);
  if (!is_late()) return true;
  hl__exit_await_end();
  return false;
}

void hl__exit_give_back_begin(void) {
  gives_back++;
  hl__exit_await(1);
}

void hl__exit_give_back_end(void) {
  gives_back--;
  hl__exit_await_end();
}

bool hl__exit_begun(void) { return atomic_load(&exiting); }

bool hl__library_closed(void) { return atomic_load(&library_closed); }

bool hl__library_is_inside(void) { return is_inside; }

void hl__library_enter(void) {
  is_inside = true;
  atomic_fetch_add(&inside, 1u); /* before the check: exit() closes, then counts */
  if (atomic_load(&library_closed) && !is_exiter()) stay();
}

void hl__library_leave(void) {
  is_inside = false;
  atomic_fetch_sub(&inside, 1u);
}

void hl__library_wait_begin(void) {
  if (is_inside) atomic_fetch_sub(&inside, 1u);
}

void hl__library_wait_end(void) {
  if (is_inside) atomic_fetch_add(&inside, 1u);
  if (atomic_load(&library_closed) && !is_exiter()) stay();
}
