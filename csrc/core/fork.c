/*
 * fork.c - what a forked child must not keep. A descriptor that parent and
 * child share would keep a dead parent's locks for as long as the child lives,
 * and bytes that the child wrote on it would reach the parent's server. So the
 * child closes every watched descriptor before fork() returns to it, and all
 * that was made before then is recognised by its generation.
 */
#include "internal.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
/* Taken by fork() itself, so that no child is born while a descriptor is half
   entered. */
struct table {
  pthread_mutex_t mutex;
  int *fds HL__GUARDED_BY(hl__fork_mutex);
  size_t count HL__GUARDED_BY(hl__fork_mutex);
  size_t capacity HL__GUARDED_BY(hl__fork_mutex);
};
HL__MUTEX_FUNCTIONS(table, struct table, mutex, hl__fork_mutex)
static struct table watched = {.mutex = PTHREAD_MUTEX_INITIALIZER};
static atomic_uint generation;

/* Shared by those who forbid births, exclusive while a child is born; before the
   mutex. fork() goes first, or it would starve behind many who connect. */
#ifdef PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP
#define BIRTHS_INIT PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP
#else
#define BIRTHS_INIT PTHREAD_RWLOCK_INITIALIZER
#endif
static pthread_rwlock_t births = BIRTHS_INIT;

static void before_fork(void) HL__ACQUIRES(hl__fork_mutex) {
  (void)pthread_rwlock_wrlock(&births);
  table_lock(&watched);
}

static void after_fork_in_parent(void) HL__RELEASES(hl__fork_mutex) {
  table_unlock(&watched);
  (void)pthread_rwlock_unlock(&births);
}

/* Only what is safe in the child of a process with threads: close, stores. */
static void after_fork_in_child(void) HL__RELEASES(hl__fork_mutex) {
  for (size_t i = 0; i < watched.count; i++) (void)close(watched.fds[i]);
  watched.count = 0;
  atomic_fetch_add(&generation, 1u);
  table_unlock(&watched);
  /* It was locked by a thread of another number, as whom we cannot unlock it. */
  births = (pthread_rwlock_t)BIRTHS_INIT;
}

static void install(void) {
  (void)pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

int hl__fork_watch(int fd) {
  int status = HL_OK;
  (void)pthread_once(&once, install);
  table_lock(&watched);
  if (watched.count == watched.capacity) {
    size_t capacity = watched.capacity ? 2 * watched.capacity : 64;
    int *grown = realloc(watched.fds, capacity * sizeof *grown);
    if (grown) {
      watched.fds = grown;
      watched.capacity = capacity;
    } else {
      status = HL_ENOMEM;
    }
  }
  if (status == HL_OK) watched.fds[watched.count++] = fd;
  table_unlock(&watched);
  return status;
}

void hl__fork_unwatch(int fd) {
  table_lock(&watched);
  for (size_t i = watched.count; i-- > 0;)
    if (watched.fds[i] == fd) {
      watched.fds[i] = watched.fds[--watched.count];
      break;
    }
  table_unlock(&watched);
}

HL__UNCHECKED void hl__fork_forbid(void) {
  (void)pthread_once(&once, install);
  (void)pthread_rwlock_rdlock(&births);
}

HL__UNCHECKED void hl__fork_allow(void) {
  (void)pthread_rwlock_unlock(&births);
}

unsigned hl__fork_generation(void) {
  (void)pthread_once(&once, install);
  return atomic_load_explicit(&generation, memory_order_relaxed);
}
