/*
 * flock.c - the files by which Symfony's FlockStore locks, taken beside our own rows where a
 * manager interoperates: for each node sf.NAME.HASH.lock in a directory, by flock(). A request
 * takes them after all rows (plan.c). So only the first hierlock request in the queue of a node
 * waits for a PHP program.
 *
 * PHP programs wake no hierlock waiter, and only a signal could cancel a flock() that sleeps. So a
 * waiter tries again every few milliseconds. A PHP program that sleeps in flock() gets the file
 * before it.
 *
 * A file is never removed, neither by Symfony nor here. If a program (a cleaner of /tmp) removes
 * one, programs that have it open and later ones do not exclude each other. hierlock notices that
 * before a grant, and at each check.
 */
#include "flock.h"
#include "clock.h"
#include "error.h"
#include "fork.h"
#include "hmac.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* Between two tries; ms. At first so, then half longer each time. */
#define NAP_FIRST_MS 1
#define NAP_MOST_MS 20

/* How often a file is opened anew because it was removed meanwhile. */
#define OPEN_TRIES 10

/* Bytes of the name in a file's name; characters of base64 of its hash. */
#define SHOWN_BYTES 50
#define HASH_CHARS 7
#define FILE_NAME_MAX_BYTES (sizeof "sf...lock" + SHOWN_BYTES + HASH_CHARS)

/* ---------------------------------------------------------------- names */

/* The first 64 bits. */
static uint64_t hash_of(const char *data, size_t size) {
  uint8_t digest[HL__HMAC_SIZE];
  uint64_t hash = 0;
  hl__sha256(data, size, digest);
  for (size_t i = 0; i < sizeof hash; i++) hash = hash << 8 | digest[i];
  return hash;
}

static bool is_shown(unsigned char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
         c == '_' || c == '-';
}

/* As FlockStore::lock() does: replaces bytes that are not plain by one '-', and cuts the name. */
static void file_name(const char *name, size_t size, char out[FILE_NAME_MAX_BYTES]) {
  static const char base64[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuv"
                               "wxyz0123456789+_"; /* '/' is written as '_' */
  char *at = stpcpy(out, "sf."), *end = at + SHOWN_BYTES;
  for (size_t i = 0; i < size && at < end;) {
    if (is_shown((unsigned char)name[i])) {
      *at++ = name[i++];
      continue;
    }
    *at++ = '-';
    while (i < size && !is_shown((unsigned char)name[i])) i++;
  }
  *at++ = '.';
  uint64_t hash = hash_of(name, size);
  for (int i = 0; i < HASH_CHARS; i++) *at++ = base64[hash >> (58 - 6 * i) & 63];
  strcpy(at, ".lock");
}

/* Hashes the file's name: two names that lead to one file are one row. */
uint64_t hl__file_name_key(const char *name, size_t size) {
  char file[FILE_NAME_MAX_BYTES];
  file_name(name, size, file);
  return hash_of(file, strlen(file));
}

/* ------------------------------------------------------------- directory */

int hl__file_dsn(char *text, hl_dsn *dsn, hl_error *error) {
  static const hl__dsn_word on[] = {{"on", 1}, {.word = NULL}};
  static const hl__dsn_known known[] = {{"flock", HL__DSN_OTHER, .offset = 0},
                                        {"intentions", HL__DSN_WORD, .offset = 0, .words = on},
                                        {.name = NULL}};
  unsigned checked;
  int status = hl__dsn_path(text, "directory", dsn, error);
  if (status == HL_OK && !dsn->interoperate) status = hl__dsn_store(dsn, known, &checked, error);
  if (status || !dsn->interoperate) {
    if (hl_dsn_param_get(dsn, "flock")) dsn->interoperate = "symfony";
    return status;
  }
  /* flock:///directory: it is Symfony's, and ours is the usual one. */
  if (dsn->param_count) return hl__error(error, HL_EDSN, "flock: takes no parameters");
  if (!dsn->path) return HL_OK;
  status = hl__dsn_param_add(dsn, "flock", dsn->path, error);
  dsn->path = NULL;
  return status;
}

/* mkdir -p; path is put back as it was. */
static int directory_make(char *path) {
  for (char *at = path + 1; (at = strchr(at, '/')); at++) {
    *at = '\0';
    int made = mkdir(path, 0777);
    *at = '/';
    if (made != 0 && errno != EEXIST) return -1;
  }
  return mkdir(path, 0777);
}

int hl__flock_directory(const hl_dsn *dsn, char **path, hl_error *error) {
  const char *wanted = hl_dsn_param_get(dsn, "flock");
  struct stat st;
  if (wanted && *wanted != '/')
    return hl__error(error, HL_EDSN,
                     "the directory of Symfony's lock files must be absolute: flock:///directory");
  /* PHP's sys_get_temp_dir() does the same. */
  if (!wanted) wanted = getenv("TMPDIR");
  if (!wanted || !*wanted) wanted = "/tmp";
  *path = strdup(wanted);
  if (!*path) return hl__error_memory(error);
  size_t size = strlen(*path);
  if (size > 1 && (*path)[size - 1] == '/') (*path)[size - 1] = '\0';
  if (stat(*path, &st) != 0 && directory_make(*path) != 0 && errno != EEXIST)
    return hl__error_errno(error, HL_ESTORE,
                           "the directory of Symfony's lock files cannot be made");
  if (stat(*path, &st) != 0 || !S_ISDIR(st.st_mode) || access(*path, W_OK | X_OK) != 0)
    return hl__error_errno(
        error, HL_ESTORE, "the directory of Symfony's lock files is no directory, or closed to us");
  return HL_OK;
}

/* ----------------------------------------------------------------- files */

/* Opens as FlockStore::lock() does: the file is for all users, and O_CREAT is never used on an
   existing file, which the kernel refuses in a directory like /tmp. Follows no link: any user who
   may write there could plant one. -1 with errno. */
static int file_open(const char *path) {
  const int flags = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY;
  int fd = -1;
  for (int i = 0; i < OPEN_TRIES && fd < 0; i++) {
    fd = open(path, O_RDWR | flags);
    if (fd < 0 && errno == EACCES) fd = open(path, O_RDONLY | flags);
    if (fd >= 0 || errno != ENOENT) break;
    fd = open(path, O_RDWR | O_CREAT | O_EXCL | flags, 0666);
    if (fd >= 0)
      (void)fchmod(fd, 0666);
    else if (errno != EEXIST)
      break;
  }
  struct stat st;
  if (fd >= 0 && (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode))) {
    (void)close(fd);
    errno = EINVAL;
    return -1;
  }
  return fd;
}

/* So that a child that is born closes it at once. */
static int file_open_watched(const char *path, uint64_t *ticket) {
  hl__fork_forbid();
  int fd = file_open(path), failure = errno;
  *ticket = fd >= 0 ? hl__fork_watch(fd) : 0;
  hl__fork_allow();
  if (fd >= 0 && !*ticket) {
    (void)close(fd);
    failure = ENOMEM;
    fd = -1;
  }
  errno = failure;
  return fd;
}

/* Whether the file that is open is the one of that name. */
static bool is_named_so(int fd, const char *path) {
  struct stat ours, there;
  return fstat(fd, &ours) == 0 && lstat(path, &there) == 0 && ours.st_ino == there.st_ino &&
         ours.st_dev == there.st_dev;
}

/* Between half of `most` and all of it. */
static int64_t jittered(int64_t most, uint32_t *noise) {
  *noise = *noise * 1664525u + 1013904223u;
  return most - (int64_t)((*noise >> 16) % (uint32_t)(most / 2 + 1));
}

/* Tries until it is ours, and waits in between. */
static int file_lock(const hl__flock_wait *how, int fd, int mode, hl_error *error) {
  int64_t nap = NAP_FIRST_MS;
  uint32_t noise = (uint32_t)hl__now_ms() ^ (uint32_t)((uintptr_t)how->context >> 4);
  for (;;) {
    if (flock(fd, mode | LOCK_NB) == 0) return HL_OK;
    if (errno != EWOULDBLOCK && errno != EINTR)
      return hl__error_errno(error, HL_ESTORE, "the kernel refuses a lock on a file");
    if (!how->nap) return HL_TIMEOUT;
    /* Never early: the millisecond of the deadline is waited for, too. */
    int64_t now = hl__now_ms();
    if (now > how->deadline) return HL_TIMEOUT;
    int64_t end = hl__deadline(how->deadline, 1), next = now + jittered(nap, &noise);
    if (!how->nap(how->context, next < end ? next : end)) return HL_CANCELLED;
    if (nap < NAP_MOST_MS) nap += nap / 2 + 1;
  }
}

int hl__flock_take(const hl__flock_wait *how, hl_id name, hl_mode mode, hl__flock *file,
                   hl_error *error) {
  size_t size = strlen(how->directory) + 1 + FILE_NAME_MAX_BYTES;
  char shown[FILE_NAME_MAX_BYTES], *path = malloc(size);
  if (!path) return hl__error_memory(error);
  file_name(name.data, name.size, shown);
  (void)snprintf(path, size, "%s/%s", how->directory, shown);

  int status = HL_OK, tries = 0, failure = 0;
  do {
    file->fd = file_open_watched(path, &file->ticket);
    failure = file->fd < 0 ? errno : 0;
    if (file->fd < 0) {
      status = hl__error_errno(error, HL_ESTORE, "cannot open the lock file of Symfony's");
      break;
    }
    status = file_lock(how, file->fd, mode == HL_SHARED ? LOCK_SH : LOCK_EX, error);
    if (status == HL_OK && is_named_so(file->fd, path)) break;
    hl__flock_release(file);
    if (status == HL_OK && ++tries == OPEN_TRIES)
      status = hl__error(error, HL_ESTORE, "the lock file of Symfony's is removed again and again");
  } while (status == HL_OK);
  free(path);
  errno = failure;
  return status;
}

/* By hand, as a child that is just being born may still have it open, too. */
void hl__flock_release(const hl__flock *file) {
  if (!hl__fork_watches(file->fd, file->ticket)) return;
  (void)flock(file->fd, LOCK_UN);
  hl__fork_close(file->fd);
}

bool hl__flock_stands(const hl__flock *file) {
  struct stat st;
  return hl__fork_watches(file->fd, file->ticket) && fstat(file->fd, &st) == 0 && st.st_nlink > 0;
}
