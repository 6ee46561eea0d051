/*
 * side.c - the file beside the database, `NAME-hierlock`: words of which all
 * processes have a mapping, and bytes that they lock. Nothing in it has to
 * survive anything: a new one is as good, for those who come later.
 *
 * Futexes. A waiter sleeps on the futex of the key where it was found to be blocked. A session that
 * frees a row rings its futex. No wake-up is lost:
 *
 *     who waits                        who frees a row
 *     W1  sleepers += 1                R1  COMMIT, or unlocks a ticket's byte
 *     W2  e = events                   R2  sleepers == 0? then nothing more
 *     W3  looks; is in somebody's way  R3  events += 1
 *     W4  sleeps if events == e        R4  wakes those who sleep on events
 *
 * A process that is killed between R1 and R4 rings no futex; so a waiter looks again by itself
 * now and then. A sleeper that is killed leaves `sleepers` too high: a futex then costs one
 * system call more.
 *
 * Bytes. A session locks the byte of its turn (turn.c) and of its ticket
 * (grant.c) while it has it: by that the others know that it is alive.
 *
 * Beats. The byte of a process that was stopped stays locked. So a session
 * writes, whenever it sleeps, the time to the word of its number, and passes a
 * number whose word is STOPPED_MS old. Numbers that are equal modulo
 * HL__SQLITE_BEATS share a word; a ticket is drawn so that its word is free.
 * An earlier version leaves the word at 0, and is not passed.
 */
#include "machine.h"
#include "sqlite_store.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SUFFIX "-hierlock"
#define SIZE 24576
/* A session at work sleeps for 50 ms at most. */
#define STOPPED_MS 3000
#define VERSION 1u
_Static_assert(sizeof(hl__sqlite_side) <= SIZE, "it is mapped as a whole");

/* Where the bytes of numbers begin: the file is never so long. */
static const off_t places[] = {
    [HL__SQLITE_TURNS] = (off_t)1 << 58,
    [HL__SQLITE_TICKETS] = (off_t)1 << 60,
};

/* ---------------------------------------------------------------- opening */

/* Births are forbidden. Never O_CREAT on an existing file: where fs.protected_regular is set
   that fails on another user's file in a directory such as /tmp. What root makes beside a user's
   database is the user's, as SQLite's own files are. */
static int side_descriptor(const char *path, const struct stat *database) {
  static const struct timespec pause = {.tv_nsec = 1000000};
  const int how = O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK;
  int64_t made = hl__now_ms() + HL__SQLITE_MAKING_MS;
  for (int i = 0; i < 3; i++) {
    int fd = open(path, how);
    if (fd < 0 && errno == EACCES && hl__left_ms(made) > 0) {
      i--; /* its maker may be about to give it its mode */
      (void)nanosleep(&pause, NULL);
      continue;
    }
    if (fd >= 0 || errno != ENOENT) return fd;
    fd = open(path, how | O_CREAT | O_EXCL, 0600);
    if (fd < 0 && errno == EEXIST) continue;
    if (fd < 0) return fd;
    int given = geteuid() == 0 ? fchown(fd, database->st_uid, database->st_gid) : 0;
    (void)given; /* where root may not, it stays root's */
    (void)fchmod(fd, (database->st_mode & 0666) | 0600);
    return fd;
  }
  return -1;
}

static int side_map(hl__sqlite_session *session, hl_error *error) {
  const char *path = session->side_path;
  struct stat *st = &session->side_stat;
  if (fstat(session->side_fd, st) != 0 || !S_ISREG(st->st_mode))
    return hl__error(error, HL_ESTORE, "%s is not a regular file", path);
  /* A full file system shows here, and not later as a signal. */
  errno = st->st_size < SIZE ? posix_fallocate(session->side_fd, 0, SIZE) : 0;
  if (errno) return hl__error_errno(error, HL_ESTORE, "there is no space for %s", path);
  void *mapping = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, session->side_fd, 0);
  if (mapping == MAP_FAILED) return hl__error_errno(error, HL_ESTORE, "cannot map %s", path);
  session->side = mapping;
  uint32_t version = 0;
  if (!atomic_compare_exchange_strong(&session->side->version, &version, VERSION) &&
      version != VERSION)
    return hl__error(
        error, HL_ESTORE,
        "%s was made by another version of hierlock: see Upgrading in docs/operations.md", path);
  return HL_OK;
}

int hl__sqlite_side_open(hl__sqlite_session *session, hl_error *error) {
  struct stat st;
  int status = HL_OK;
  if (asprintf(&session->side_path, "%s" SUFFIX, session->path) < 0) {
    session->side_path = NULL;
    return hl__error_memory(error);
  }
  if (stat(session->path, &st) != 0)
    st = (struct stat){.st_mode = 0600, .st_uid = geteuid(), .st_gid = getegid()};
  hl__fork_forbid();
  int fd = side_descriptor(session->side_path, &st);
  if (fd < 0)
    status = hl__error_errno(error, HL_ESTORE, "cannot open %s", session->side_path);
  else if (!hl__fork_watch(fd)) {
    (void)close(fd);
    status = hl__error_memory(error);
  } else
    session->side_fd = fd;
  hl__fork_allow();
  return status ? status : side_map(session, error);
}

void hl__sqlite_side_unmap(hl__sqlite_side *side) {
  if (side) (void)munmap(side, SIZE);
}

void hl__sqlite_side_close(hl__sqlite_session *session) {
  hl__sqlite_side_unmap(session->side);
  session->side = NULL;
  free(session->side_path);
  session->side_path = NULL;
  if (session->side_fd >= 0) hl__fork_close(session->side_fd);
  session->side_fd = -1;
}

bool hl__sqlite_side_stands(const hl__sqlite_session *session) {
  struct stat st;
  return stat(session->side_path, &st) == 0 && st.st_dev == session->side_stat.st_dev &&
         st.st_ino == session->side_stat.st_ino && st.st_size >= SIZE;
}

/* ------------------------------------------------------------------ bytes */

static struct flock byte_range(hl__sqlite_range range, uint64_t first, uint64_t n, short type) {
  return (struct flock){.l_type = type,
                        .l_whence = SEEK_SET,
                        .l_start = places[range] + (off_t)first,
                        .l_len = (off_t)n};
}

static _Atomic uint32_t *beat_of(const hl__sqlite_session *session, hl__sqlite_range range,
                                 uint64_t number) {
  return &session->side->beats[range][number % HL__SQLITE_BEATS];
}

static uint32_t beat_now(void) { return (uint32_t)hl__now_ms() | 1u; }

/* Not over what another one has written: the number was passed. */
static void beat(hl__sqlite_session *session, hl__sqlite_range range) {
  uint32_t now = beat_now();
  uint32_t seen = atomic_load(session->beats[range]);
  if ((seen == 0 || seen == session->beaten[range]) &&
      atomic_compare_exchange_strong(session->beats[range], &seen, now))
    session->beaten[range] = now;
}

bool hl__sqlite_byte_lock(hl__sqlite_session *session, hl__sqlite_range range, uint64_t number) {
  struct flock lock = byte_range(range, number, 1, F_WRLCK);
  if (fcntl(session->side_fd, F_OFD_SETLK, &lock) != 0) return false;
  session->beats[range] = beat_of(session, range, number);
  session->beaten[range] = beat_now();
  atomic_store(session->beats[range], session->beaten[range]);
  return true;
}

void hl__sqlite_byte_unlock(hl__sqlite_session *session, hl__sqlite_range range, uint64_t number) {
  struct flock lock = byte_range(range, number, 1, F_UNLCK);
  if (!session->beats[range]) return;
  uint32_t ours = session->beaten[range];
  (void)atomic_compare_exchange_strong(session->beats[range], &ours, 0u);
  session->beats[range] = NULL;
  (void)fcntl(session->side_fd, F_OFD_SETLK, &lock);
}

bool hl__sqlite_bytes_locked(const hl__sqlite_session *session, hl__sqlite_range range,
                             uint64_t first, uint64_t n, uint64_t *which) {
  struct flock lock = byte_range(range, first, n, F_WRLCK);
  if (n == 0) return false; /* it would mean: to the end */
  if (fcntl(session->side_fd, F_OFD_GETLK, &lock) != 0 || lock.l_type == F_UNLCK) return false;
  if (which) *which = (uint64_t)(lock.l_start - places[range]);
  return true;
}

bool hl__sqlite_is_stopped(const hl__sqlite_session *session, hl__sqlite_range range,
                           uint64_t number) {
  uint32_t beat = atomic_load(beat_of(session, range, number));
  return beat != 0 && (int32_t)(beat_now() - beat) > STOPPED_MS;
}

bool hl__sqlite_is_alive(const hl__sqlite_session *session, int64_t ticket) {
  return hl__sqlite_bytes_locked(session, HL__SQLITE_TICKETS, (uint64_t)ticket, 1, NULL) &&
         !hl__sqlite_is_stopped(session, HL__SQLITE_TICKETS, (uint64_t)ticket);
}

int64_t hl__sqlite_beat_free(const hl__sqlite_session *session, int64_t number) {
  for (unsigned i = 0; i < HL__SQLITE_BEATS; i++)
    if (atomic_load(beat_of(session, HL__SQLITE_TICKETS, (uint64_t)number + i)) == 0)
      return number + i;
  return number;
}

void hl__sqlite_beat_clear(const hl__sqlite_session *session, int64_t ticket) {
  atomic_store(beat_of(session, HL__SQLITE_TICKETS, (uint64_t)ticket), 0u);
}

/* ------------------------------------------------------------------ futexes */

hl__sqlite_futex *hl__sqlite_futex_of(const hl__sqlite_session *session, int64_t key) {
  return &session->side->futexes[(uint64_t)key % HL__SQLITE_FUTEXES];
}

static void futex_wake(hl__sqlite_futex *futex) {
  (void)atomic_fetch_add(&futex->events, 1u);
  hl__futex_wake(&futex->events, INT_MAX);
}

void hl__sqlite_wake(hl__sqlite_futex *futex) {
  if (atomic_load(&futex->sleepers) != 0) futex_wake(futex);
}

void hl__sqlite_sleep(hl__sqlite_session *session, hl__sqlite_futex *futex, uint32_t seen,
                      int64_t until) {
  const hl_store_config *config = session->store->config;
  for (int range = 0; range < HL__SQLITE_RANGES; range++)
    if (session->beats[range]) beat(session, (hl__sqlite_range)range);
  if (config->wait_begin) config->wait_begin();
  hl__futex_wait(&futex->events, seen, until < INT64_MAX / 1000000 ? until * 1000000 : INT64_MAX);
  if (config->wait_end) config->wait_end();
}

void hl__sqlite_interrupt(hl__sqlite_session *session) {
  atomic_store(&session->interrupted, true);
  hl__sqlite_futex *futex = atomic_load(&session->asleep);
  if (futex) futex_wake(futex);
}
