/*
 * map.c - the file of a lock directory: making it, refusing what is none, mapping it, growing it by
 * chunks, and looking whether it is still the file. Knows nothing of claims.
 *
 * A file is made complete under a temporary name, then gets its name. So no process sees half of
 * one, and a file that is too short was cut: it is refused, never begun anew, as the processes that
 * still have it mapped would not exclude those that come now.
 *
 * Space comes from fallocate() before it is touched, so a full file system is an error here and no
 * SIGBUS later. If another program truncates the file, a process that touches it before its next
 * look, within 10 ms, ends by SIGBUS. (LMDB's users bear the same.)
 */
#include "embedded.h"
#include "layout.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

/* Whenever a process opens the directory, tokens go on from Unix seconds * 2^24 at least (56 bits
   in all, enough until the year 2106), fractions included. So they grow even when the directory was
   removed a moment ago, or a reboot has emptied it, unless more than 2^24 were given each second. A
   token has 8 zero bits below its counter, as the other stores'. */
#define TOKEN_SECOND_BITS 24
#define TOKEN_LOW_BITS 8
/* How old the file may seem while it is used: half a day. */
#define RENEWED_S 43200

int64_t hl__shm_now(void) {
  struct timespec t;
  (void)clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int64_t hl__shm_boot_ms(const hl__shm_space *space) { return hl__boot_ms() - space->shift_ms; }

/* ---------------------------------------------------------------- tokens */

uint64_t hl__shm_token(hl__shm_space *space) {
  hl__a64 *tokens = &space->table->header.tokens;
  return (atomic_fetch_add_explicit(tokens, 1, memory_order_relaxed) + 1) << TOKEN_LOW_BITS;
}

void hl__shm_token_raise(hl__shm_space *space, uint64_t token) {
  const uint64_t least = token >> TOKEN_LOW_BITS;
  uint64_t last = atomic_load(&space->table->header.tokens);
  while (last < least &&
         !atomic_compare_exchange_weak(&space->table->header.tokens, &last, least)) {}
}

static void tokens_begin(hl__shm_space *space) {
  struct timespec now;
  (void)clock_gettime(CLOCK_REALTIME, &now);
  hl__shm_token_raise(space, (((uint64_t)now.tv_sec << TOKEN_SECOND_BITS) +
                              ((uint64_t)now.tv_nsec << TOKEN_SECOND_BITS) / 1000000000u)
                                 << TOKEN_LOW_BITS);
}

/* ----------------------------------------------------------------- space */

/* How long this process' files may become; the kernel ends one that goes further by SIGXFSZ. */
static rlim_t size_limit(void) {
  struct rlimit limit;
  return getrlimit(RLIMIT_FSIZE, &limit) == 0 ? limit.rlim_cur : RLIM_INFINITY;
}

/* Has the file have space there. 0, or an errno. */
static int space_make(int fd, off_t from, off_t size) {
  struct stat st;
  const rlim_t limit = size_limit();
  if (limit != RLIM_INFINITY && (rlim_t)(from + size) > limit &&
      (fstat(fd, &st) != 0 || st.st_size < from + size))
    return EFBIG;
  int failed;
  do failed = posix_fallocate(fd, from, size);
  while (failed == EINTR);
  return failed;
}

int hl__shm_full_error(const hl__shm_space *space, hl_error *error) {
  const rlim_t limit = size_limit(), most = HL__SHM_MAPPED;
  if (limit < most)
    return hl__error(error, HL_ESTORE,
                     "no space is left in the lock directory %s, or none that this process may "
                     "use: its files may have %llu bytes at most (ulimit -f)",
                     space->directory.path, (unsigned long long)limit);
  return hl__error(error, HL_ESTORE, "no space is left in the lock directory %s",
                   space->directory.path);
}

/* ---------------------------------------------------------------- making */

/* A process whose clock is ahead may take a temporary file for an old one, and remove it before it
   has its name. */
#define SWEPT_TRIES 8

/* When a file was made; 0: that is not known. Old C libraries do not ask. */
static uint64_t file_born(int fd) {
#ifdef STATX_BTIME
  struct statx st;
  if (statx(fd, "", AT_EMPTY_PATH, STATX_BTIME, &st) == 0 && st.stx_mask & STATX_BTIME)
    return (uint64_t)st.stx_btime.tv_sec * 1000000000u + st.stx_btime.tv_nsec;
#else
  (void)fd;
#endif
  return 0;
}

static int header_write(int fd, const hl__shm_space *space, const hl_layout *layout,
                        const struct stat *st) {
  hl__shm_header *fresh = calloc(1, sizeof *fresh);
  uint64_t boot[2];
  int64_t ahead;
  if (!fresh) {
    errno = ENOMEM;
    return -1;
  }
  memcpy(fresh->magic, HL__SHM_MAGIC, sizeof fresh->magic);
  fresh->version = space->intentions > 0 ? HL__SHM_INTENTIONS : HL__SHM_VERSION;
  fresh->parts = HL__SHM_PARTS;
  fresh->heads = HL__SHM_HEADS;
  fresh->slots = HL__SHM_SLOTS;
  fresh->chunk = HL__SHM_CHUNK;
  fresh->chunks = HL__SHM_CHUNKS;
  fresh->inode = st->st_ino;
  fresh->born = file_born(fd);
  fresh->device = space->directory.lasts ? 0 : st->st_dev;
  fresh->buckets = hl_layout_buckets(layout);
  fresh->levels = hl_layout_levels(layout);
  for (unsigned i = 0; i < fresh->levels; i++)
    (void)snprintf(fresh->names[i], sizeof fresh->names[i], "%s", hl_layout_name(layout, i));
  (void)hl__machine_boot(boot, &ahead); /* zeroes: the first to open the file says it */
  atomic_init(&fresh->boot[0], boot[0]);
  atomic_init(&fresh->boot[1], boot[1]);
  atomic_init(&fresh->top, 1);
  atomic_init(&fresh->slots_top, 1);
  int written = hl__file_write(fd, fresh, sizeof *fresh);
  free(fresh);
  return written;
}

/* HL_OK: there is a file of that name now, made by this process or another. */
static int file_make(hl__shm_space *space, const hl_layout *layout, hl_error *error) {
  const hl__file_directory *directory = &space->directory;
  char temporary[HL__FILE_NAME_MAX];
  struct stat st;
  bool made = false;
  int fd = hl__file_temporary(directory, temporary);
  if (fd >= 0 && fstat(fd, &st) == 0) {
    errno = space_make(fd, 0, (off_t)(HL__SHM_FIXED + HL__SHM_CHUNK));
    made = errno == 0 && header_write(fd, space, layout, &st) == 0 &&
           hl__file_name(directory, temporary, HL__SHM_FILE) == 0;
    int saved = errno;
    if (!made) (void)unlinkat(directory->fd, temporary, 0);
    errno = saved;
  }
  hl__file_close(fd);
  if (made || errno == EEXIST) return HL_OK;
  /* ENOENT: the directory was removed as we opened it. */
  return hl__error_errno(error, errno == ENOENT ? HL_ECONNECTION : HL_ESTORE,
                         "cannot make %s/" HL__SHM_FILE, directory->path);
}

/* -------------------------------------------------------------- refusing */

/* Whether another file was made with these contents. */
static bool is_copy(const hl__shm_space *space, const hl__shm_header *header) {
  const uint64_t born = header->born ? file_born(space->fd) : 0;
  return header->inode != (uint64_t)space->inode || (born && born != header->born) ||
         (header->device && !space->directory.lasts && header->device != (uint64_t)space->device);
}

static int header_check(const hl__shm_space *space, const hl__shm_header *header, off_t size,
                        hl_error *error) {
  const char *path = space->directory.path;
  if (size < (off_t)offsetof(hl__shm_header, parts))
    return hl__error(error, HL_ESTORE,
                     "%s/" HL__SHM_FILE
                     " has only %lld bytes: it was truncated, or is not hierlock's; "
                     "remove the directory while no program uses it, or name one that is used for "
                     "nothing else",
                     path, (long long)size);
  if (memcmp(header->magic, HL__SHM_MAGIC, sizeof header->magic) != 0)
    return hl__error(error, HL_ESTORE,
                     "%s/" HL__SHM_FILE " is not hierlock's; name a directory that is used for "
                     "nothing else",
                     path);
  if (header->version != HL__SHM_VERSION && header->version != HL__SHM_INTENTIONS)
    return hl__error(error, HL_ESTORE,
                     "the lock directory %s was made by another version of hierlock (format %u, "
                     "and this one knows %u and %u): see Upgrading in docs/operations.md",
                     path, header->version, HL__SHM_VERSION, HL__SHM_INTENTIONS);
  if (header->parts != HL__SHM_PARTS || header->heads != HL__SHM_HEADS ||
      header->slots != HL__SHM_SLOTS || header->chunk != HL__SHM_CHUNK ||
      header->chunks != HL__SHM_CHUNKS)
    return hl__error(
        error, HL_ESTORE,
        "%s/" HL__SHM_FILE " is damaged; remove the directory while no program uses it", path);
  if (is_copy(space, header))
    return hl__error(error, HL_ESTORE,
                     "the lock directory %s is a copy of another one, or was restored from a "
                     "backup; remove it while no program uses it: nothing in it is worth keeping",
                     path);
  if (size < (off_t)(HL__SHM_FIXED + HL__SHM_CHUNK))
    return hl__error(error, HL_ESTORE,
                     "%s/" HL__SHM_FILE " has only %lld bytes: it was truncated; remove the "
                     "directory while no program uses it",
                     path, (long long)size);
  return HL_OK;
}

/* The header is read, not mapped, as the file may be too short, and by now shorter than *size. */
static int header_read(const hl__shm_space *space, hl__shm_header *header, off_t *size,
                       hl_error *error) {
  memset(header, 0, sizeof *header);
  const ssize_t n = hl__file_read(space->fd, header, sizeof *header);
  if (n < 0)
    return hl__error_errno(error, HL_ESTORE, "cannot read %s/" HL__SHM_FILE, space->directory.path);
  if (n < (ssize_t)sizeof *header) *size = n;
  return HL_OK;
}

/* Refuses a file to which a program that opens the directory outside would not come. */
static int mount_check(const hl__shm_space *space, hl_error *error) {
  char *path = hl__file_path(space->directory.path, HL__SHM_FILE);
  if (!path) return hl__error_memory(error);
  const int mounted = hl__is_mount_point(path);
  free(path);
  if (mounted < 0)
    return hl__error_errno(error, HL_ESTORE, "cannot look whether %s/" HL__SHM_FILE " is mounted",
                           space->directory.path);
  if (mounted)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "%s/" HL__SHM_FILE " is mounted by its own name, and programs outside "
                     "would come to another directory: mount the directory",
                     space->directory.path);
  return HL_OK;
}

/* What the program wants, as hl_layout.intentions. */
static int intends(const hl_store_config *config, const hl_layout *wanted) {
  return wanted->intentions ? wanted->intentions : hl_dsn_param_get(config->dsn, "intentions") != 0;
}

int hl__shm_agree(const hl__shm_space *space, const hl_store_config *config, hl_layout **layout,
                  hl_error *error) {
  const hl__shm_header *header = &space->table->header;
  hl_layout *wanted = *layout ? *layout : config->layout;
  const int ours = intends(config, wanted);
  if (ours && ours != space->intentions)
    return hl__error(error, HL_EMISMATCH,
                     ours < 0
                         ? "the lock directory %s was made anew, with intentions=on: open it anew"
                         : "the lock directory %s was made without intentions: leave out "
                           "intentions=on (shared inner nodes are exclusive there), or name a new "
                           "directory, or remove that one while no program uses it",
                     space->directory.path);
  char names[HL__LAYOUT_NAMES_MAX] = "", text[200];
  size_t used = 0;
  for (uint32_t i = 0; i < header->levels && i < HL_LEVELS_MAX; i++)
    used += (size_t)snprintf(names + used, sizeof names - used, "%s%.*s", i ? "," : "",
                             HL_LEVEL_NAME_MAX, header->names[i]);
  (void)snprintf(text, sizeof text, "the lock directory %.120s", space->directory.path);
  const hl__space found = {text, names, header->buckets, space->intentions,
                           "give this program a directory of its own (file:/path), or remove that "
                           "one while no program uses it"};
  return hl__layout_agree(wanted, &found, layout, error);
}

/* --------------------------------------------------------------- opening */

static int file_open(hl__shm_space *space, const hl_layout *layout, struct stat *st,
                     hl_error *error) {
  space->fd = hl__file_open(&space->directory, HL__SHM_FILE, st);
  if (space->fd < 0 && errno == ENOENT) {
    int status, tries = 0;
    do status = file_make(space, layout, error);
    while (status == HL_ECONNECTION && ++tries < SWEPT_TRIES);
    if (status) return status;
    space->fd = hl__file_open(&space->directory, HL__SHM_FILE, st);
  }
  if (space->fd < 0)
    return hl__error_errno(error, HL_ESTORE, "cannot open %s/" HL__SHM_FILE, space->directory.path);
  space->device = st->st_dev;
  space->inode = st->st_ino;
  return HL_OK;
}

/* A mapping that no child has, nor one that is born in between: it would have the file, and with
   that the locks on its bytes, so that its dead parent would seem to live. */
static void *file_map(int fd, size_t size, int protection) {
  hl__fork_forbid();
  void *mapping = mmap(NULL, size, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (mapping != MAP_FAILED) (void)madvise(mapping, size, MADV_DONTFORK);
  hl__fork_allow();
  return mapping;
}

int hl__shm_map(hl__shm_space *space, const hl_store_config *config, hl_error *error) {
  struct stat st;
  hl__shm_header header;
  space->intentions = intends(config, config->layout);
  int status = file_open(space, config->layout, &st, error);
  if (status) return status;
  status = mount_check(space, error);
  if (status) return status;
  status = header_read(space, &header, &st.st_size, error);
  if (status) return status;
  status = header_check(space, &header, st.st_size, error);
  if (status) return status;
  space->intentions = header.version == HL__SHM_INTENTIONS ? 1 : -1;
  void *mapping = file_map(space->fd, HL__SHM_MAPPED, PROT_READ | PROT_WRITE);
  if (mapping == MAP_FAILED)
    return hl__error_errno(error, HL_ESTORE, "cannot map %s/" HL__SHM_FILE, space->directory.path);
  space->table = mapping;
  tokens_begin(space);
  /* systemd-tmpfiles leaves a locked directory alone, even if its user sleeps for weeks. */
  (void)flock(space->directory.fd, LOCK_SH | LOCK_NB);
  return HL_OK;
}

/* --------------------------------------------- is it still the directory's? */

static bool is_file(const hl__shm_space *space, const struct stat *st) {
  return st->st_ino == space->inode && st->st_dev == space->device;
}

static bool is_whole(const struct stat *st) {
  return st->st_size >= (off_t)(HL__SHM_FIXED + HL__SHM_CHUNK);
}

/* A program that cleans up in /tmp removes files of some age, and a mapping that is written to does
   not grow younger everywhere. */
static void file_renew(const hl__shm_space *space, const struct stat *st) {
  const int64_t now = time(NULL), changed = st->st_mtime;
  if (changed > now - RENEWED_S && changed < now + RENEWED_S) return;
  (void)futimens(space->fd, NULL);
  (void)flock(space->directory.fd, LOCK_SH | LOCK_NB);
}

/* What the descriptor says. If its number is that of another descriptor of the same file, this
   process' own lock is in the way there. */
static int file_look(hl__shm_space *space) {
  struct stat st;
  struct flock life = {.l_type = F_WRLCK,
                       .l_whence = SEEK_SET,
                       .l_start = HL__SHM_LIFE + (off_t)space->me,
                       .l_len = 1};
  if (fstat(space->fd, &st) != 0 || !is_file(space, &st) ||
      (space->me && fcntl(space->fd, F_OFD_GETLK, &life) == 0 && life.l_type != F_UNLCK))
    return HL__SHM_CLOSED;
  file_renew(space, &st);
  return is_whole(&st) ? HL__SHM_HERE : HL__SHM_CUT;
}

/* The same; once it is closed or cut, it stays so. */
static int file_state(hl__shm_space *space) {
  int gone = atomic_load(&space->gone);
  if (gone == HL__SHM_CLOSED || gone == HL__SHM_CUT) return gone;
  gone = file_look(space);
  if (gone) atomic_store(&space->gone, gone);
  return gone;
}

bool hl__shm_is_open(hl__shm_space *space) { return file_state(space) != HL__SHM_CLOSED; }

bool hl__shm_touchable(hl__shm_space *space) {
  struct stat name;
  const int gone = file_state(space);
  if (gone != HL__SHM_CLOSED) return gone == HL__SHM_HERE;
  /* The mapping keeps the slot this process', so it gives back what it has lost. */
  return !space->fragile && stat(space->name, &name) == 0 && is_file(space, &name) &&
         is_whole(&name);
}

/* Whether the file has a name that only this process cannot follow: it has another root directory
   or other mounts by now, or is another user, or had no memory or no answer from the disk just now.
   The directory stays the process'. */
static bool is_out_of_sight(const hl__shm_space *space, int cause) {
  struct stat st;
  return (cause == EACCES || cause == ENOMEM || cause == EIO ||
          !hl__file_sees(&space->directory)) &&
         fstat(space->fd, &st) == 0 && st.st_nlink > 0;
}

bool hl__shm_look(hl__shm_space *space) {
  struct stat name;
  if (atomic_load(&space->gone)) return true;
  int gone = file_state(space);
  if (gone) return true;
  int cause = stat(space->name, &name) == 0 ? 0 : errno;
  if ((cause || !is_file(space, &name)) && !is_out_of_sight(space, cause)) gone = HL__SHM_REMOVED;
  if (gone) atomic_store(&space->gone, gone);
  return gone != HL__SHM_HERE;
}

int hl__shm_gone_error(const hl__shm_space *space, hl_error *error) {
  static const char *const reasons[] = {
      [HL__SHM_CLOSED] = "the descriptor of the lock directory %s was closed, though not by "
                         "hierlock; the locks that this process has there are lost",
      [HL__SHM_CUT] = "a file of the lock directory %s was truncated while it was in use; remove "
                      "the directory while no program uses it",
      [HL__SHM_REMOVED] = "the lock directory %s was removed, renamed or replaced while it was in "
                          "use; others are not kept out any more",
  };
  int gone = atomic_load(&space->gone);
  char text[512];
  (void)snprintf(text, sizeof text, reasons[gone ? gone : HL__SHM_REMOVED], space->directory.path);
  return hl__error(error, HL_ECONNECTION, "%s", text);
}

int hl__shm_check(hl__shm_space *space, bool at_once, hl_error *error) {
  struct timespec t;
  if (__builtin_expect(space->generation != hl__fork_generation(), 0))
    return hl__error(error, HL_ECONNECTION, "the session belongs to the parent process");
  (void)clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
  int64_t now = (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
  if (__builtin_expect(at_once || space->fragile ||
                           now - atomic_load_explicit(&space->looked, memory_order_acquire) >
                               HL__SHM_LOOK_NS,
                       0)) {
    (void)hl__shm_look(space);
    /* Not before: other threads rely on a look that has been made. */
    atomic_store_explicit(&space->looked, now, memory_order_release);
  }
  if (__builtin_expect(atomic_load_explicit(&space->gone, memory_order_relaxed), 0))
    return hl__shm_gone_error(space, error);
  return HL_OK;
}

/* ---------------------------------------------------------------- chunks */

uint32_t hl__shm_chunks(const hl__shm_space *space) {
  uint32_t top = atomic_load(&space->table->header.top);
  return top < HL__SHM_CHUNKS ? top : HL__SHM_CHUNKS;
}

uint32_t hl__shm_chunk_next(const hl__shm_space *space, enum hl__shm_kind kind, uint32_t owner,
                            uint32_t chunk) {
  const uint32_t chunks = hl__shm_chunks(space);
  while (++chunk < chunks) {
    const uint32_t word = atomic_load(&space->table->dir[chunk]);
    if (word >> 24 == kind && (owner == HL__SHM_ANY || (word & HL__SHM_UNOWNED) == owner))
      return chunk;
  }
  return 0;
}

void *hl__shm_unit_behind(hl__shm_space *space, uint32_t unit, uint32_t units) {
  struct stat st;
  uint32_t top = hl__shm_chunks(space);
  if (unit == 0 || unit > top * HL__SHM_PER_CHUNK || top * HL__SHM_PER_CHUNK - unit < units)
    return NULL;
  if ((fstat(space->fd, &st) != 0 || !is_file(space, &st)) &&
      (stat(space->name, &st) != 0 || !is_file(space, &st))) /* the descriptor was closed */
    return NULL;
  if (st.st_size < (off_t)(HL__SHM_FIXED + (size_t)top * HL__SHM_CHUNK)) return NULL;
  atomic_store(&space->limit, top * HL__SHM_PER_CHUNK);
  return (char *)space->table + HL__SHM_FIXED + (size_t)unit * HL__SHM_UNIT;
}

/* A process gets a chunk by one CAS, then raises `top`. If it dies between the two, the next
   process raises it. */
uint32_t hl__shm_chunk_get(hl__shm_space *space, enum hl__shm_kind kind, uint32_t owner) {
  hl__shm_table *table = space->table;
  uint32_t top = hl__shm_chunks(space), hint = atomic_load(&space->hint);
  const uint32_t mine = (uint32_t)kind << 24 | owner;
  for (uint32_t i = 0; i < top; i++) {
    uint32_t at = (hint + i) % top, word = (uint32_t)kind << 24 | HL__SHM_UNOWNED;
    if (atomic_load_explicit(&table->dir[at], memory_order_relaxed) != word || at == 0) continue;
    if (!atomic_compare_exchange_strong(&table->dir[at], &word, mine)) continue;
    atomic_store(&space->hint, at);
    return at;
  }
  for (;;) {
    top = hl__shm_chunks(space);
    if (top == 0 || top == HL__SHM_CHUNKS ||
        space_make(space->fd, (off_t)(HL__SHM_FIXED + (size_t)top * HL__SHM_CHUNK),
                   HL__SHM_CHUNK) != 0)
      return 0;
    uint32_t none = 0, seen = top;
    bool got = atomic_compare_exchange_strong(&table->dir[top], &none, mine);
    (void)atomic_compare_exchange_strong(&table->header.top, &seen, top + 1);
    if (got) return top;
  }
}

/* ----------------------------------------------------------------- texts */

void hl__shm_text_set(hl__a64 *words, size_t count, const char *text, size_t size) {
  if (size >= count * sizeof(uint64_t)) size = count * sizeof(uint64_t) - 1;
  /* To the word with the NUL: what is behind it does not count. */
  for (size_t i = 0; i <= size / sizeof(uint64_t); i++) {
    uint64_t word = 0;
    size_t from = i * sizeof word, n = size - from < sizeof word ? size - from : sizeof word;
    if (n > 0) memcpy(&word, text + from, n); /* an empty text may be NULL */
    atomic_store_explicit(&words[i], word, memory_order_relaxed);
  }
}

void hl__shm_text_get(char *text, const hl__a64 *words, size_t count) {
  for (size_t i = 0; i < count; i++) {
    uint64_t word = atomic_load_explicit(&words[i], memory_order_relaxed);
    memcpy(text + i * sizeof word, &word, sizeof word);
  }
  text[count * sizeof(uint64_t) - 1] = '\0';
}

/* ----------------------------------------------------------------- bytes */

static bool byte_set(hl__shm_space *space, off_t at, short type) {
  struct flock byte = {.l_type = type, .l_whence = SEEK_SET, .l_start = at, .l_len = 1};
  return fcntl(space->fd, F_OFD_SETLK, &byte) == 0;
}

bool hl__shm_byte_lock(hl__shm_space *space, off_t at) { return byte_set(space, at, F_WRLCK); }

void hl__shm_byte_unlock(hl__shm_space *space, off_t at) { (void)byte_set(space, at, F_UNLCK); }

bool hl__shm_byte_free(hl__shm_space *space, off_t at) {
  struct flock byte = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = at, .l_len = 1};
  return fcntl(space->fd, F_OFD_GETLK, &byte) == 0 && byte.l_type == F_UNLCK;
}

bool hl__shm_is_fragile(hl__shm_space *space) {
  struct stat st;
  struct flock byte = {
      .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = HL__SHM_PROBE, .l_len = 1};
  int fd = hl__file_open(&space->directory, HL__SHM_FILE, &st);
  void *page = MAP_FAILED;
  if (fd >= 0 && is_file(space, &st) && fcntl(fd, F_OFD_SETLK, &byte) == 0)
    page = file_map(fd, 4096, PROT_READ);
  hl__file_close(fd);
  if (page == MAP_FAILED) return true;
  bool fragile = hl__shm_byte_free(space, HL__SHM_PROBE);
  (void)munmap(page, 4096);
  return fragile;
}
