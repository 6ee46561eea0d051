/*
 * space.c - one lock directory as this process uses it: the mapped control
 * file, the stripe files with their descriptors, and the registry by which all
 * stores of the process share them. Takes no lock on any row.
 *
 * It is shared because two open files of one stripe would keep each other out
 * although they are one process', and because descriptors are few: ten thousand
 * rows need at most one descriptor for each stripe.
 */
#include "board.h"
#include "file.h"
#include "layout.h"
#include "ledger.h"
#include "machine.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define CONTROL HL__FILE_CONTROL
#define CONTROL_MAGIC "hlctl\n\r"
/* Of everything that processes share: files, offsets, hash, words. */
#define CONTROL_VERSION 2u

/* Whenever a process opens the directory, tokens go on from Unix seconds * 2^24
   at least (56 bits in all, enough until the year 2106), fractions included. So they
   grow even when somebody has removed the directory a moment ago, a reboot has
   emptied it, or a power failure has undone the last writes to it; unless more than
   2^24 were given in each second. */
#define TOKEN_SECOND_BITS 24

#define COPIED                                                                                     \
  "the lock directory %s is a copy of another one, or was restored from a "                        \
  "backup; remove it while no program uses it: nothing in it is worth "                            \
  "keeping"

/* Stripes with nothing held stay open, up to this part of RLIMIT_NOFILE. */
#define IDLE_SHARE 4

_Static_assert(sizeof(off_t) == 8, "offsets of rows need 64 bits");
_Static_assert(sizeof(hl__file_signal) == 64, "a signal is one cache line");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "shared atomics must be lock-free");

/* ------------------------------------------------------------- registry */

/* All spaces of the process. Those of another generation are a parent's: they
   stay in the list untouched, so that their memory is not a leak. */
static hl__file_space *spaces HL__GUARDED_BY(hl__file_registry);

/* Guards the list. Not a pthread mutex, because a child may be born while a
   thread of its parent's holds it: the holder's generation + 1, 0 when free,
   so that a child recognises a holder who does not exist in it. */
static atomic_uint registry_holder;

static void registry_lock(void) HL__ACQUIRES(hl__file_registry) HL__UNCHECKED {
  unsigned self = hl__fork_generation() + 1;
  for (;;) {
    unsigned holder = atomic_load(&registry_holder);
    if (holder != self && atomic_compare_exchange_weak(&registry_holder, &holder, self)) return;
    /* Held while a directory is opened, at most. */
    const struct timespec moment = {.tv_nsec = 100000};
    (void)nanosleep(&moment, NULL);
  }
}

static void registry_unlock(void) HL__RELEASES(hl__file_registry) HL__UNCHECKED {
  atomic_store(&registry_holder, 0u);
}

/* ------------------------------------------------------------- control */

static hl__file_layout layout_of(const hl_layout *layout) {
  hl__file_layout result = {.buckets = hl_layout_buckets(layout),
                            .levels = hl_layout_levels(layout)};
  for (unsigned i = 0; i < result.levels; i++)
    (void)snprintf(result.names[i], sizeof result.names[i], "%s", hl_layout_name(layout, i));
  return result;
}

/* "user,account,resource" */
static void layout_names(char out[HL__LAYOUT_NAMES_MAX], const hl__file_layout *layout) {
  size_t used = 0;
  out[0] = '\0';
  for (uint32_t i = 0; i < layout->levels && i < HL_LEVELS_MAX; i++)
    used += (size_t)snprintf(out + used, HL__LAYOUT_NAMES_MAX - used, "%s%.*s", i ? "," : "",
                             HL_LEVEL_NAME_MAX, layout->names[i]);
}

/* The layout decides which bytes stand for a node: programs of different ones
   would not exclude each other. */
static int layout_agree(const hl__file_space *space, hl_layout *wanted, hl_layout **agreed,
                        hl_error *error) {
  const hl__file_layout *theirs = &space->control->layout;
  char names[HL__LAYOUT_NAMES_MAX], text[200];
  layout_names(names, theirs);
  (void)snprintf(text, sizeof text, "the lock directory %.120s", space->directory.path);
  const hl__space found = {text, names, theirs->buckets,
                           "give this program a directory of its own (file:/path), or remove that "
                           "one while no program uses it"};
  return hl__layout_agree(wanted, &found, agreed, error);
}

static int control_make(hl__file_space *space, const hl_layout *layout, hl_error *error) {
  const hl__file_directory *directory = &space->directory;
  char temporary[HL__FILE_NAME_MAX];
  struct stat st;
  bool made = false;
  /* Written out, not left sparse: a full file system shows here, as an error,
     and not later as a signal at the first touch of the mapping. */
  hl__file_control *fresh = calloc(1, sizeof *fresh);
  if (!fresh) return hl__error_memory(error);
  memcpy(fresh->magic, CONTROL_MAGIC, sizeof fresh->magic);
  fresh->version = CONTROL_VERSION;
  fresh->stripes = HL__FILE_STRIPES;
  fresh->layout = layout_of(layout);
  int fd = hl__file_temporary(directory, directory->file_mode, temporary);
  if (fd >= 0 && fstat(fd, &st) == 0) {
    fresh->inode = st.st_ino;
    made = hl__file_write(fd, fresh, sizeof *fresh) == 0 &&
           hl__file_name(directory, temporary, CONTROL) == 0;
    int saved = errno;
    if (!made) (void)unlinkat(directory->fd, temporary, 0);
    errno = saved;
  }
  hl__file_close(fd);
  free(fresh);
  /* ENOENT: the directory was removed as we opened it. */
  if (!made && errno != EEXIST)
    return hl__error_errno(error, errno == ENOENT ? HL_ECONNECTION : HL_ESTORE,
                           "cannot make %s/" CONTROL, space->directory.path);
  return HL_OK;
}

void hl__file_tokens_raise(hl__file_control *control, uint64_t least) {
  uint64_t last = atomic_load(&control->tokens);
  while (last < least && !atomic_compare_exchange_weak(&control->tokens, &last, least)) {}
}

static void tokens_raise(hl__file_control *control) {
  struct timespec now;
  (void)clock_gettime(CLOCK_REALTIME, &now);
  uint64_t least = ((uint64_t)now.tv_sec << TOKEN_SECOND_BITS) +
                   ((uint64_t)now.tv_nsec << TOKEN_SECOND_BITS) / 1000000000u;
  hl__file_tokens_raise(control, least);
}

/* The rows would be others than those of who comes by the directory. */
static bool is_mounted_alone(const hl__file_space *space) {
  char *path;
  if (asprintf(&path, "%s/" CONTROL, space->directory.path) < 0) return false;
  bool mounted = hl__is_mount_point(path);
  free(path);
  return mounted;
}

/* Looked at before the size, which another version may have changed. */
static bool is_other_version(int fd, uint32_t *version) {
  struct {
    char magic[8];
    uint32_t version;
  } head;
  _Static_assert(offsetof(hl__file_control, version) == 8, "as above");
  if (pread(fd, &head, sizeof head, 0) != (ssize_t)sizeof head ||
      memcmp(head.magic, CONTROL_MAGIC, sizeof head.magic) != 0)
    return false;
  *version = head.version;
  return head.version != CONTROL_VERSION;
}

static int control_open(hl__file_space *space, const hl_layout *layout, hl_error *error) {
  struct stat st;
  uint32_t version;
  space->control_fd = hl__file_open(&space->directory, CONTROL, &st);
  if (space->control_fd < 0 && errno == ENOENT) {
    int status = control_make(space, layout, error);
    if (status) return status;
    space->control_fd = hl__file_open(&space->directory, CONTROL, &st);
  }
  if (space->control_fd < 0)
    return hl__error_errno(error, HL_ESTORE, "cannot open %s/" CONTROL, space->directory.path);
  space->control_device = st.st_dev;
  space->control_inode = st.st_ino;
  if (is_mounted_alone(space))
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "%s/" CONTROL " is mounted by its own name, and the other "
                     "files would not be those of programs outside: mount the "
                     "directory",
                     space->directory.path);
  if (is_other_version(space->control_fd, &version))
    return hl__error(error, HL_ESTORE,
                     "the lock directory %s was made by another version of "
                     "hierlock (format %u, and this one knows %u): see Upgrading "
                     "in docs/operations.md",
                     space->directory.path, version, CONTROL_VERSION);
  if (st.st_size < (off_t)sizeof *space->control)
    return hl__error(error, HL_ESTORE,
                     "%s/" CONTROL " has %lld bytes instead of %zu: it was "
                     "truncated, or is not hierlock's; remove the directory "
                     "while no program uses it, or name one that is used for "
                     "nothing else",
                     space->directory.path, (long long)st.st_size, sizeof *space->control);
  void *mapping =
      mmap(NULL, sizeof *space->control, PROT_READ | PROT_WRITE, MAP_SHARED, space->control_fd, 0);
  if (mapping == MAP_FAILED)
    return hl__error_errno(error, HL_ESTORE, "cannot map %s/" CONTROL, space->directory.path);
  space->control = mapping;
  if (memcmp(space->control->magic, CONTROL_MAGIC, 8) != 0 ||
      space->control->stripes != HL__FILE_STRIPES)
    return hl__error(error, HL_ESTORE,
                     "%s/" CONTROL " is not hierlock's; name a directory that "
                     "is used for nothing else",
                     space->directory.path);
  if (space->control->inode && space->control->inode != (uint64_t)st.st_ino)
    return hl__error(error, HL_ESTORE, COPIED, space->directory.path);
  tokens_raise(space->control);
  return HL_OK;
}

/* --------------------------------------------------------------- spaces */

/* Unchecked, as space_new: nobody else has the space. */
HL__UNCHECKED static void space_free(hl__file_space *space) {
  /* Looked at now, as another space of ours may get the numbers later. */
  bool ours = space->control_fd < 0 || !hl__file_space_gone(space) ||
              atomic_load(&space->gone) != HL__FILE_CLOSED;
  for (uint32_t i = 0; i < HL__FILE_STRIPES; i++) {
    if (ours) hl__file_close(space->stripes[i].fd);
    (void)pthread_mutex_destroy(&space->stripes[i].mutex);
  }
  hl__file_table_free(space);
  if (space->board) hl__file_board_free(space->board, ours);
  if (space->ledger) hl__ledger_free(space->ledger, ours);
  if (space->control) (void)munmap(space->control, sizeof *space->control);
  if (ours) hl__file_close(space->control_fd);
  if (!ours) space->directory.fd = -1;
  hl__file_directory_close(&space->directory);
  free(space);
}

/* Takes over the directory, whatever becomes of it. */
HL__UNCHECKED static int space_new(hl__file_directory *directory, const hl_store_config *config,
                                   hl__file_space **result, hl_error *error) {
  int status;
  hl__file_space *space = aligned_alloc(_Alignof(hl__file_space), sizeof *space);
  if (!space) {
    hl__file_directory_close(directory);
    return hl__error_memory(error);
  }
  memset(space, 0, sizeof *space);
  atomic_init(&space->references, 1u);
  space->generation = hl__fork_generation();
  space->control_fd = -1;
  space->directory = *directory;
  for (uint32_t i = 0; i < HL__FILE_STRIPES; i++) {
    space->stripes[i].fd = -1;
    (void)pthread_mutex_init(&space->stripes[i].mutex, NULL);
  }
  status = control_open(space, config->layout, error);
  if (status == HL_OK) {
    hl__file_sweep(&space->directory, HL__FILE_BOARD);
    space->board = hl__file_board_new(&space->directory, config->host);
    space->ledger = hl__ledger_new(space);
    if (!space->board || !space->ledger) status = hl__error_memory(error);
    if (status == HL_OK) hl__ledger_begin(space->ledger);
  }
  if (status) {
    space_free(space);
    return status;
  }
  *result = space;
  return HL_OK;
}

static bool is_control(const hl__file_space *space, const struct stat *st) {
  return st->st_ino == space->control_inode && st->st_dev == space->control_device;
}

/* The process' own space of the directory, with a reference for the caller.
   One without references is about to be freed. One whose control file was taken
   away from the directory would not keep out whoever opens it now. */
static hl__file_space *space_find(const hl__file_directory *directory)
    HL__REQUIRES(hl__file_registry) {
  struct stat st;
  if (fstatat(directory->fd, CONTROL, &st, AT_SYMLINK_NOFOLLOW) != 0)
    st = (struct stat){.st_ino = 0};
  for (hl__file_space *space = spaces; space; space = space->next) {
    if (space->generation != hl__fork_generation() ||
        space->directory.device != directory->device ||
        space->directory.inode != directory->inode || hl__file_space_gone(space) ||
        !is_control(space, &st))
      continue;
    unsigned references = atomic_load(&space->references);
    while (references > 0)
      if (atomic_compare_exchange_weak(&space->references, &references, references + 1))
        return space;
  }
  return NULL;
}

int hl__file_space_open(const char *path, const hl_store_config *config, hl_layout **layout,
                        hl__file_space **result, hl_error *error) {
  hl__file_directory directory;
  *result = NULL;
  int status = hl__file_directory_open(path, &directory, error);
  if (status) return status;

  registry_lock();
  hl__file_space *space = space_find(&directory);
  if (space) {
    hl__file_directory_close(&directory);
  } else {
    status = space_new(&directory, config, &space, error);
    if (status == HL_OK) {
      space->next = spaces;
      spaces = space;
    }
  }
  registry_unlock();

  if (status == HL_OK) status = layout_agree(space, config->layout, layout, error);
  if (status) {
    hl__file_space_unref(space);
    return status;
  }
  *result = space;
  return HL_OK;
}

void hl__file_space_ref(hl__file_space *space) { (void)atomic_fetch_add(&space->references, 1u); }

void hl__file_space_unref(hl__file_space *space) {
  if (!space || atomic_fetch_sub(&space->references, 1u) != 1) return;
  registry_lock();
  hl__file_space **link = &spaces;
  while (*link != space) link = &(*link)->next;
  *link = space->next;
  registry_unlock();
  space_free(space);
}

bool hl__file_space_gone(hl__file_space *space) {
  struct stat st;
  int gone = HL__FILE_HERE;
  if (atomic_load(&space->gone)) return true;
  if (fstat(space->control_fd, &st) != 0 || !is_control(space, &st))
    gone = HL__FILE_CLOSED;
  else if (st.st_size < (off_t)sizeof *space->control)
    gone = HL__FILE_CUT;
  else if (st.st_nlink == 0)
    gone = HL__FILE_REMOVED;
  if (gone) atomic_store(&space->gone, gone);
  return gone != HL__FILE_HERE;
}

bool hl__file_space_shown(const hl__file_space *space, const char *control) {
  struct stat st;
  return stat(control, &st) == 0 && is_control(space, &st) &&
         st.st_size >= (off_t)sizeof *space->control;
}

int hl__file_space_gone_error(const hl__file_space *space, hl_error *error) {
  const char *path = space->directory.path;
  switch (atomic_load(&space->gone)) {
  case HL__FILE_CLOSED:
    return hl__error(error, HL_ECONNECTION,
                     "the descriptors of the lock directory %s were closed, "
                     "though not by hierlock; others are not kept out any "
                     "more",
                     path);
  case HL__FILE_CUT:
    return hl__error(error, HL_ECONNECTION,
                     "%s/" CONTROL " was truncated while it was in use; remove "
                     "the directory while no program uses it",
                     path);
  default:
    return hl__error(error, HL_ECONNECTION,
                     "the lock directory %s was removed, renamed or replaced "
                     "while it was in use; others are not kept out any more",
                     path);
  }
}

/* --------------------------------------------------------- descriptors */

/* Closes one stripe that nothing is held in, and that has not been used since
   the hand last passed it. The caller holds the mutex of stripe `self`; hence
   unchecked: it takes another one of that class. */
HL__UNCHECKED static bool hand_turn(hl__file_space *space, uint32_t self) {
  for (uint32_t n = 0; n < 2 * HL__FILE_STRIPES; n++) {
    uint32_t i = atomic_fetch_add(&space->hand, 1u) % HL__FILE_STRIPES;
    hl__file_stripe *stripe = &space->stripes[i];
    bool closed = false;
    if (i == self || pthread_mutex_trylock(&stripe->mutex) != 0) continue;
    if (stripe->fd >= 0 && stripe->entries == 0) {
      closed = !stripe->recent;
      stripe->recent = false;
    }
    if (closed) {
      hl__file_close(stripe->fd);
      stripe->fd = -1;
      (void)atomic_fetch_sub(&space->open_stripes, 1u);
    }
    hl__file_stripe_unlock(stripe);
    if (closed) return true;
  }
  return false;
}

bool hl__file_stripe_spare(hl__file_space *space) { return hand_turn(space, HL__FILE_STRIPES); }

static bool too_many_open(hl__file_space *space) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return false;
  return atomic_load(&space->open_stripes) > limit.rlim_cur / IDLE_SHARE;
}

/* rows-NNNN, made by whoever needs it first. Its inode is kept in the control
   file: where the file is missing later, somebody removes the directory while
   it is in use, and a new file must not take the place of one in which others
   still hold locks. -1 with errno; ESTALE when the file is another one. */
static int rows_open(hl__file_space *space, uint32_t index) {
  _Atomic uint64_t *known = &space->control->signals[index].inode;
  uint64_t inode = 0;
  struct stat st;
  char name[HL__FILE_NAME_MAX];
  (void)snprintf(name, sizeof name, "rows-%04u", index);

  /* Before the file is looked for: it may be made, and known, meanwhile. */
  bool made = atomic_load(known) != 0;
  int fd = hl__file_open(&space->directory, name, &st);
  if (fd < 0 && errno == ENOENT) {
    if (made) {
      errno = ESTALE;
      return -1;
    }
    if (hl__file_make(&space->directory, name) != 0) return -1;
    fd = hl__file_open(&space->directory, name, &st);
  }
  if (fd < 0) return -1;
  if (!atomic_compare_exchange_strong(known, &inode, (uint64_t)st.st_ino) &&
      inode != (uint64_t)st.st_ino) {
    hl__file_close(fd);
    errno = ESTALE;
    return -1;
  }
  return fd;
}

int hl__file_stripe_open(hl__file_space *space, uint32_t index, hl_error *error) {
  hl__file_stripe *stripe = &space->stripes[index];
  int fd;
  do {
    fd = rows_open(space, index);
  } while (fd < 0 && (errno == EMFILE || errno == ENFILE) && hand_turn(space, index));
  if (fd >= 0) {
    stripe->fd = fd;
    (void)atomic_fetch_add(&space->open_stripes, 1u);
    if (too_many_open(space)) (void)hand_turn(space, index);
    return HL_OK;
  }
  int reason = errno;
  if (hl__file_space_gone(space)) return hl__file_space_gone_error(space, error);
  switch (reason) {
  case EMFILE:
  case ENFILE:
    errno = reason;
    return hl__error_errno(error, HL_ESTORE,
                           "no descriptor is left for a lock file; raise "
                           "RLIMIT_NOFILE (ulimit -n): %u are needed at most",
                           HL__FILE_STRIPES + 8);
  case ESTALE:
    return hl__error(error, HL_ESTORE,
                     "%s/rows-%04u is missing or another file than it was: it "
                     "was removed while the directory was in use, or the "
                     "directory was copied or restored from a backup; remove "
                     "the whole directory while no program uses it",
                     space->directory.path, index);
  default:
    errno = reason;
    return hl__error_errno(error, HL_ESTORE, "cannot open %s/rows-%04u", space->directory.path,
                           index);
  }
}
