/*
 * flock.h - the files by which Symfony's FlockStore locks, taken beside our own rows (flock.c).
 */
#ifndef HIERLOCK_FLOCK_H
#define HIERLOCK_FLOCK_H

#include "dsn.h"
#include "hierlock.h"

/* A file that is locked. */
typedef struct hl__flock {
  int fd;
  uint64_t ticket; /* hl__fork_watch */
} hl__flock;

/* How a request takes one. */
typedef struct hl__flock_wait {
  const char *directory; /* where the files are */
  int64_t deadline;      /* hl__now_ms */
  /* Sleeps until `until` (hl__now_ms), or less. False: the request was interrupted. NULL: it tries
     once. */
  bool (*nap)(void *context, int64_t until);
  void *context;
} hl__flock_wait;

/* hl_store_ops.name_key */
uint64_t hl__file_name_key(const char *name, size_t size);
/* hl_store_ops.parse */
int hl__file_dsn(char *text, hl_dsn *dsn, hl_error *error);
/* The directory of the files: of the DSN (flock:///directory, file:?flock=/directory), else that
   for temporary files. Makes it if need be. *path: malloc'ed. HL_OK, HL_EDSN, HL_ESTORE,
   HL_ENOMEM. */
int hl__flock_directory(const hl_dsn *dsn, char **path, hl_error *error);
/* Locks the file of a name. HL_OK, HL_TIMEOUT, HL_CANCELLED, HL_ENOMEM; HL_ESTORE, with errno. */
int hl__flock_take(const hl__flock_wait *how, hl_id name, hl_mode mode, hl__flock *file,
                   hl_error *error);
void hl__flock_release(const hl__flock *file);
/* Whether the file is still locked by us, and has a name. */
bool hl__flock_stands(const hl__flock *file);

#endif
