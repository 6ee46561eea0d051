/*
 * ledger.c - the file: making, mapping and taking it. See ledger.h.
 */
#include "ledger.h"
#include "machine.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

_Static_assert(sizeof(hl__ledger_header) <= HL__LEDGER_CHUNK, "comes first");

/* Between the first two tries to take it from another process; and between two, at most. */
#define PAUSE_NS 20000
#define PAUSE_MAX_NS 2000000

/* Unchecked, as hl__ledger_free: nobody else has it. */
HL__UNCHECKED hl__ledger *hl__ledger_new(hl__file_space *space) {
  hl__ledger *ledger = calloc(1, sizeof *ledger);
  if (!ledger) return NULL;
  ledger->space = space;
  ledger->fd = -1;
  (void)pthread_mutex_init(&ledger->mutex, NULL);
  hl__boot_id(ledger->boot);
  return ledger;
}

HL__UNCHECKED void hl__ledger_free(hl__ledger *ledger, bool ours) {
  if (ledger->header) (void)munmap(ledger->header, ledger->size);
  if (ours) hl__file_close(ledger->fd);
  (void)pthread_mutex_destroy(&ledger->mutex);
  free(ledger);
}

/* -------------------------------------------------------------- the file */

static const char *directory_path(const hl__ledger *ledger) {
  return ledger->space->directory.path;
}

int hl__ledger_strange_error(const hl__ledger *ledger, hl_error *error) {
  return hl__error(error, HL_ESTORE,
                   "%s/" HL__FILE_LEDGER " was truncated, removed, or is not "
                   "hierlock's; remove the whole directory while no program uses it",
                   directory_path(ledger));
}

static int ledger_version_error(const hl__ledger *ledger, hl_error *error)
    HL__REQUIRES(hl__file_ledger_mutex) {
  return hl__error(error, HL_ESTORE,
                   "%s/" HL__FILE_LEDGER " was made by another version of "
                   "hierlock (format %u, and this one knows %u): see Upgrading in "
                   "docs/operations.md",
                   directory_path(ledger), ledger->header->version, HL__LEDGER_VERSION_UPDATES);
}

/* The file, made if need be; and its inode is known to all from now on. */
static int ledger_open(hl__ledger *ledger, bool make, hl_error *error)
    HL__REQUIRES(hl__file_ledger_mutex) {
  hl__file_space *space = ledger->space;
  _Atomic uint64_t *known = &space->control->ledger;
  uint64_t inode = 0;
  struct stat st;
  /* As with rows-NNNN: a new file must not take the place of one that others use. */
  bool made = atomic_load(known) != 0;
  if (!made && !make) return HL__ABSENT;
  int fd = hl__file_open(&space->directory, HL__FILE_LEDGER, &st);
  if (fd < 0 && errno == ENOENT && !made) {
    if (hl__file_make(&space->directory, HL__FILE_LEDGER) == 0)
      fd = hl__file_open(&space->directory, HL__FILE_LEDGER, &st);
  } else if (fd < 0 && errno == ENOENT) {
    return hl__ledger_strange_error(ledger, error);
  }
  if (fd < 0)
    return hl__error_errno(error, HL_ESTORE, "cannot open %s/" HL__FILE_LEDGER,
                           directory_path(ledger));
  if (!atomic_compare_exchange_strong(known, &inode, (uint64_t)st.st_ino) &&
      inode != (uint64_t)st.st_ino) {
    hl__file_close(fd);
    return hl__ledger_strange_error(ledger, error);
  }
  ledger->fd = fd;
  ledger->inode = st.st_ino;
  ledger->device = st.st_dev;
  return HL_OK;
}

/* The bytes of the file from one place to another are there: a full file system shows here,
   as an error, and not later as a signal. */
static int file_reserve(hl__ledger *ledger, size_t from, size_t to, hl_error *error)
    HL__REQUIRES(hl__file_ledger_mutex) {
  errno = posix_fallocate(ledger->fd, (off_t)from, (off_t)(to - from));
  if (errno)
    return hl__error_errno(error, HL_ESTORE, "there is no space for a lease in %s",
                           directory_path(ledger));
  return HL_OK;
}

static int ledger_map(hl__ledger *ledger, size_t size, hl_error *error)
    HL__REQUIRES(hl__file_ledger_mutex) {
  void *mapping = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, ledger->fd, 0);
  if (mapping == MAP_FAILED)
    return hl__error_errno(error, HL_ESTORE, "cannot map %s/" HL__FILE_LEDGER,
                           directory_path(ledger));
  if (ledger->header) (void)munmap(ledger->header, ledger->size);
  ledger->header = mapping;
  ledger->size = size;
  return HL_OK;
}

static size_t size_for(uint32_t records) {
  return HL__LEDGER_CHUNK + (size_t)records * sizeof(hl__ledger_record);
}

/* In a new file; the magic comes last. */
static int header_make(hl__ledger *ledger, hl_error *error) HL__REQUIRES(hl__file_ledger_mutex) {
  int status = file_reserve(ledger, 0, HL__LEDGER_CHUNK, error);
  if (status == HL_OK) status = ledger_map(ledger, HL__LEDGER_CHUNK, error);
  if (status) return status;
  hl__ledger_header *header = ledger->header;
  ledger->records = 0;
  header->version = HL__LEDGER_VERSION;
  header->record_size = sizeof(hl__ledger_record);
  header->stripes = HL__FILE_STRIPES;
  atomic_store(&header->records, 0u);
  hl__ledger_mend(ledger);
  memcpy(header->boot, ledger->boot, sizeof header->boot);
  memcpy(header->magic, HL__LEDGER_MAGIC, sizeof header->magic);
  atomic_store(&ledger->space->control->ledger_made, 1u);
  return HL_OK;
}

/* Whether it is still the file, and the mapping lies within it. */
static bool file_check(const hl__ledger *ledger, struct stat *st)
    HL__REQUIRES(hl__file_ledger_mutex) {
  return fstat(ledger->fd, st) == 0 && st->st_ino == ledger->inode &&
         st->st_dev == ledger->device && st->st_nlink > 0 && st->st_size >= (off_t)ledger->size;
}

/* The mapping has all that others have made. The kernel's lock is held. */
static int ledger_refresh(hl__ledger *ledger, hl_error *error) HL__REQUIRES(hl__file_ledger_mutex) {
  struct stat st;
  int status = HL_OK;
  if (!file_check(ledger, &st)) return hl__ledger_strange_error(ledger, error);
  bool made = atomic_load(&ledger->space->control->ledger_made) != 0;
  if (!ledger->header || !made) {
    if (made && st.st_size < (off_t)HL__LEDGER_CHUNK)
      return hl__ledger_strange_error(ledger, error);
    if (st.st_size >= (off_t)HL__LEDGER_CHUNK) status = ledger_map(ledger, HL__LEDGER_CHUNK, error);
    /* Whoever made it was killed before he had done. */
    if (status == HL_OK && !made) status = header_make(ledger, error);
    if (status) return status;
    if (!file_check(ledger, &st)) return hl__ledger_strange_error(ledger, error);
  }
  const hl__ledger_header *header = ledger->header;
  uint32_t records = atomic_load(&header->records);
  if (memcmp(header->magic, HL__LEDGER_MAGIC, sizeof header->magic) != 0)
    return hl__ledger_strange_error(ledger, error);
  if (header->version != HL__LEDGER_VERSION && header->version != HL__LEDGER_VERSION_UPDATES)
    return ledger_version_error(ledger, error);
  if (header->record_size != sizeof(hl__ledger_record) || header->stripes != HL__FILE_STRIPES ||
      records > HL__LEDGER_MAX || st.st_size < (off_t)size_for(records))
    return hl__ledger_strange_error(ledger, error);
  if (ledger->size < size_for(records)) status = ledger_map(ledger, size_for(records), error);
  if (status) return status;
  ledger->records = records;
  /* Where the kernel says no id nobody knows. */
  bool rebooted = ledger->boot[0] && ledger->header->boot[0] != ledger->boot[0];
  if (atomic_load(&ledger->header->changing) || rebooted) hl__ledger_mend(ledger);
  if (rebooted) memcpy(ledger->header->boot, ledger->boot, sizeof ledger->boot);
  return HL_OK;
}

static struct flock ledger_range(short type) {
  return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_len = 1};
}

/* HL_TIMEOUT: another process has it. */
static int ledger_lock(hl__ledger *ledger, bool make, hl_error *error)
    HL__REQUIRES(hl__file_ledger_mutex) {
  struct flock range = ledger_range(F_WRLCK);
  int status = HL_OK;
  if (ledger->fd < 0) status = ledger_open(ledger, make, error);
  if (status) return status;
  if (fcntl(ledger->fd, F_OFD_SETLK, &range) != 0) {
    if (errno == EAGAIN || errno == EACCES) return HL_TIMEOUT;
    return hl__error_errno(error, HL_ESTORE, "the kernel refuses a lock on a file");
  }
  status = ledger_refresh(ledger, error);
  if (status) {
    range = ledger_range(F_UNLCK);
    (void)fcntl(ledger->fd, F_OFD_SETLK, &range);
  }
  return status;
}

/* Unchecked: clang cannot follow a function that returns sometimes with a mutex. */
HL__UNCHECKED int hl__ledger_take(hl__ledger *ledger, bool make, int64_t deadline,
                                  hl_error *error) {
  struct timespec pause = {.tv_nsec = PAUSE_NS};
  for (;;) {
    /* Tried only: whoever has it in this process may wait for another one. */
    if (pthread_mutex_trylock(&ledger->mutex) == 0) {
      int status = ledger_lock(ledger, make, error);
      if (status == HL_OK) return HL_OK;
      hl__ledger_mutex_unlock(ledger);
      if (status != HL_TIMEOUT) return status;
    }
    if (hl__left_ms(deadline) == 0)
      return hl__error(error, HL_TIMEOUT,
                       "another process keeps %s/" HL__FILE_LEDGER " for itself: it may be stopped",
                       directory_path(ledger));
    (void)nanosleep(&pause, NULL);
    /* The process that has it may be stopped for long. So a waiter looks the less often, the longer
       it has waited; it is late by a quarter of its wait, at most. */
    if (pause.tv_nsec < PAUSE_MAX_NS) pause.tv_nsec += pause.tv_nsec / 4;
  }
}

HL__UNCHECKED void hl__ledger_begin(hl__ledger *ledger) {
  if (atomic_load(&ledger->space->control->ledger) != 0 &&
      hl__ledger_take(ledger, false, 0, NULL) == HL_OK)
    hl__ledger_give(ledger);
}

void hl__ledger_give(hl__ledger *ledger) {
  struct flock range = ledger_range(F_UNLCK);
  (void)fcntl(ledger->fd, F_OFD_SETLK, &range);
  hl__ledger_mutex_unlock(ledger);
}

int hl__ledger_extend(hl__ledger *ledger, uint32_t records, hl_error *error) {
  int status = file_reserve(ledger, size_for(ledger->records), size_for(records), error);
  if (status == HL_OK) status = ledger_map(ledger, size_for(records), error);
  if (status == HL_OK) ledger->records = records;
  return status;
}
