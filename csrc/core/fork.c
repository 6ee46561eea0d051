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
/* Guards the table; taken by fork() itself, so that no child is born while a
   descriptor is half entered. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int *watched;
static size_t watched_count, watched_capacity;
static atomic_uint generation;

/* Shared by those who forbid births, exclusive while a child is born; before the
   mutex. fork() goes first, or it would starve behind many who connect. */
#ifdef PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP
#define BIRTHS_INIT PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP
#else
#define BIRTHS_INIT PTHREAD_RWLOCK_INITIALIZER
#endif
static pthread_rwlock_t births = BIRTHS_INIT;

static void before_fork(void) {
  (void)pthread_rwlock_wrlock(&births);
  (void)pthread_mutex_lock(&mutex);
}

static void after_fork_in_parent(void) {
  (void)pthread_mutex_unlock(&mutex);
  (void)pthread_rwlock_unlock(&births);
}

/* Only what is safe in the child of a process with threads: close, stores. */
static void after_fork_in_child(void) {
  for (size_t i = 0; i < watched_count; i++) (void)close(watched[i]);
  watched_count = 0;
  atomic_fetch_add(&generation, 1u);
  (void)pthread_mutex_unlock(&mutex);
  /* It was locked by a thread of another number, as whom we cannot unlock it. */
  births = (pthread_rwlock_t)BIRTHS_INIT;
}

static void install(void) {
  (void)pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

int hl__fork_watch(int fd) {
  int status = HL_OK;
  (void)pthread_once(&once, install);
  (void)pthread_mutex_lock(&mutex);
  if (watched_count == watched_capacity) {
    size_t capacity = watched_capacity ? 2 * watched_capacity : 64;
    int *grown = realloc(watched, capacity * sizeof *grown);
    if (grown) {
      watched = grown;
      watched_capacity = capacity;
    } else {
      status = HL_ENOMEM;
    }
  }
  if (status == HL_OK) watched[watched_count++] = fd;
  (void)pthread_mutex_unlock(&mutex);
  return status;
}

void hl__fork_unwatch(int fd) {
  (void)pthread_mutex_lock(&mutex);
  for (size_t i = watched_count; i-- > 0;)
    if (watched[i] == fd) {
      watched[i] = watched[--watched_count];
      break;
    }
  (void)pthread_mutex_unlock(&mutex);
}

void hl__fork_forbid(void) {
  (void)pthread_once(&once, install);
  (void)pthread_rwlock_rdlock(&births);
}

void hl__fork_allow(void) { (void)pthread_rwlock_unlock(&births); }

unsigned hl__fork_generation(void) {
  (void)pthread_once(&once, install);
  return atomic_load_explicit(&generation, memory_order_relaxed);
}
