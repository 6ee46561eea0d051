/*
 * fork.c - what a forked child must not keep. A descriptor that parent and child share would keep a
 * dead parent's locks for as long as the child lives, and bytes that the child wrote on it would
 * reach the parent's server. So the child closes every watched descriptor before fork() returns in
 * it, and everything made earlier is recognised by its generation.
 *
 * A host may close all descriptors that it does not know, and open its own under their numbers. So
 * a number is closed only while it is the same file as when it was watched.
 */
#include "fork.h"

#include "error.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
struct file {
  uint64_t ticket; /* 0: not watched */
  dev_t device;
  ino_t inode;
};
struct table {
  /* Taken by fork() itself, so that no child is born while a descriptor is half
     entered. */
  pthread_mutex_t mutex;
  struct file *files HL__GUARDED_BY(hl__fork_mutex); /* by descriptor */
  size_t capacity HL__GUARDED_BY(hl__fork_mutex);
  uint64_t tickets HL__GUARDED_BY(hl__fork_mutex); /* given so far */
};
HL__MUTEX_FUNCTIONS(table, struct table, mutex, hl__fork_mutex)
static struct table watched = {.mutex = PTHREAD_MUTEX_INITIALIZER};
static atomic_uint generation;
/* Random; of this process alone. 0: there were no random numbers. */
static uint64_t identity;

/* Shared by threads that forbid births, exclusive while a child is born; taken before the mutex.
   fork() goes first, or it would starve behind many threads that connect. */
#ifdef PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP
#define BIRTHS_INIT PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP
#else
#define BIRTHS_INIT PTHREAD_RWLOCK_INITIALIZER
#endif
static pthread_rwlock_t births = BIRTHS_INIT;

/* Whether the descriptor is watched, and still the same file. */
static bool is_ours(int fd) HL__REQUIRES(hl__fork_mutex) {
  struct stat st;
  if (fd < 0 || (size_t)fd >= watched.capacity) return false;
  const struct file *file = &watched.files[fd];
  return file->ticket && fstat(fd, &st) == 0 && st.st_dev == file->device &&
         st.st_ino == file->inode;
}

static void before_fork(void) HL__ACQUIRES(hl__fork_mutex) {
  (void)pthread_rwlock_wrlock(&births);
  table_lock(&watched);
}

static void after_fork_in_parent(void) HL__RELEASES(hl__fork_mutex) {
  table_unlock(&watched);
  (void)pthread_rwlock_unlock(&births);
}

static void identity_draw(void) {
  identity = 0;
  if (getrandom(&identity, sizeof identity, GRND_NONBLOCK) != (ssize_t)sizeof identity)
    identity = 0;
}

/* Calls only functions that are safe in the child of a process with threads: fstat, close,
   stores. */
static void after_fork_in_child(void) HL__RELEASES(hl__fork_mutex) {
  int saved = errno;
  for (size_t fd = 0; fd < watched.capacity; fd++) {
    if (is_ours((int)fd)) (void)close((int)fd);
    watched.files[fd].ticket = 0;
  }
  errno = saved;
  atomic_fetch_add(&generation, 1u);
  identity_draw(); /* a system call */
  errno = saved;
  table_unlock(&watched);
  /* A thread with another number locked it, for which we cannot unlock it. */
  births = (pthread_rwlock_t)BIRTHS_INIT;
}

static void install(void) {
  identity_draw();
  (void)pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

uint64_t hl__fork_watch(int fd) {
  uint64_t ticket = 0;
  struct stat st;
  (void)pthread_once(&once, install);
  if (fd < 0 || fstat(fd, &st) != 0) return 0;
  table_lock(&watched);
  if ((size_t)fd >= watched.capacity) {
    size_t capacity = watched.capacity ? watched.capacity : 64;
    while (capacity <= (size_t)fd) capacity *= 2;
    struct file *grown = realloc(watched.files, capacity * sizeof *grown);
    if (grown) {
      memset(grown + watched.capacity, 0, (capacity - watched.capacity) * sizeof *grown);
      watched.files = grown;
      watched.capacity = capacity;
    }
  }
  if ((size_t)fd < watched.capacity) {
    ticket = ++watched.tickets;
    watched.files[fd] = (struct file){ticket, st.st_dev, st.st_ino};
  }
  table_unlock(&watched);
  return ticket;
}

void hl__fork_unwatch(int fd, uint64_t ticket) {
  table_lock(&watched);
  if (fd >= 0 && (size_t)fd < watched.capacity && (!ticket || watched.files[fd].ticket == ticket))
    watched.files[fd].ticket = 0;
  table_unlock(&watched);
}

bool hl__fork_watches(int fd, uint64_t ticket) {
  table_lock(&watched);
  bool ours = is_ours(fd) && watched.files[fd].ticket == ticket;
  table_unlock(&watched);
  return ours;
}

void hl__fork_close(int fd) {
  int saved = errno;
  hl__fork_forbid();
  table_lock(&watched);
  bool ours = is_ours(fd);
  if (ours) watched.files[fd].ticket = 0;
  table_unlock(&watched);
  if (ours) (void)close(fd);
  hl__fork_allow();
  errno = saved;
}

HL__UNCHECKED void hl__fork_forbid(void) {
  (void)pthread_once(&once, install);
  (void)pthread_rwlock_rdlock(&births);
}

HL__UNCHECKED void hl__fork_allow(void) { (void)pthread_rwlock_unlock(&births); }

unsigned hl__fork_generation(void) {
  (void)pthread_once(&once, install);
  return atomic_load_explicit(&generation, memory_order_relaxed);
}

uint64_t hl__fork_identity(void) {
  (void)pthread_once(&once, install);
  return identity;
}

unsigned hl__fork_lock(atomic_uint *word) {
  unsigned mine = hl__fork_generation() + 1;
  for (;;) {
    unsigned seen = atomic_load(word);
    if (seen == mine)
      (void)sched_yield();
    else if (atomic_compare_exchange_weak(word, &seen, mine))
      return mine;
  }
}

void hl__fork_unlock(atomic_uint *word) { atomic_store(word, 0u); }
