/*
 * directory.c - see directory.h.
 *
 * Two programs exclude each other only if they use the same directory. So the default directory
 * depends on the user alone. If something is wrong with it, hierlock refuses it, and uses no other.
 */
#include "directory.h"
#include "machine.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <linux/fs.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

/* Every process of the user finds this one. $XDG_RUNTIME_DIR is absent under cron, and /tmp may be
   private to a service. */
#define DEFAULT_DIRECTORY "/dev/shm/hierlock-%lu"

/* ------------------------------------------------------------ finding it */

static int default_open(hl__file_directory *directory, hl_error *error) {
  char path[64];
  struct stat st;
  (void)snprintf(path, sizeof path, DEFAULT_DIRECTORY, (unsigned long)geteuid());
  if (mkdir(path, 0700) != 0 && errno != EEXIST)
    return hl__error_errno(error, HL_ESTORE,
                           "cannot make the lock directory %s; name another "
                           "one, as in file:/var/lib/mine/locks",
                           path);
  /* Any user may write in /dev/shm, and so may have made the directory first. */
  directory->fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (directory->fd < 0 && (errno == ELOOP || errno == ENOTDIR))
    return hl__error(error, HL_ESTORE,
                     "the lock directory %s is not a directory but something "
                     "else, or a symbolic link; remove it",
                     path);
  if (directory->fd < 0 || fstat(directory->fd, &st) != 0)
    return hl__error_errno(error, HL_ESTORE, "cannot open the lock directory %s", path);
  if (st.st_uid != geteuid())
    return hl__error(error, HL_ESTORE,
                     "the lock directory %s belongs to user %lu, not to user "
                     "%lu; have it removed, or name another one",
                     path, (unsigned long)st.st_uid, (unsigned long)geteuid());
  if (st.st_mode & (S_IWGRP | S_IWOTH))
    return hl__error(error, HL_ESTORE,
                     "others may write in the lock directory %s (mode %04o); "
                     "chmod 0700 it, or name a directory that is to be shared",
                     path, (unsigned)(st.st_mode & 07777));
  directory->path = strdup(path);
  return directory->path ? HL_OK : hl__error_memory(error);
}

static int named_open(const char *name, hl__file_directory *directory, hl_error *error) {
  struct stat st;
  int status = HL_OK;
  size_t length = strlen(name);
  while (length > 1 && name[length - 1] == '/') length--;
  char *path = strndup(name, length);
  if (!path) return hl__error_memory(error);

  /* Links further up are as trustworthy as the directories that they are in;
     the last one may lie in a directory where everybody may write. */
  if (lstat(path, &st) == 0 && S_ISLNK(st.st_mode) && st.st_uid != geteuid() && st.st_uid != 0) {
    status = hl__error(error, HL_ESTORE, "the lock directory %s is a symbolic link of user %lu's",
                       path, (unsigned long)st.st_uid);
    goto out;
  }
  directory->path = realpath(path, NULL);
  if (!directory->path && errno == ENOENT) {
    if (mkdir(path, 0700) != 0 && errno != EEXIST) {
      status = hl__error_errno(error, HL_ESTORE,
                               errno == ENOENT ? "cannot find the parent of the lock directory %s"
                                               : "cannot make the lock directory %s",
                               path);
      goto out;
    }
    directory->path = realpath(path, NULL);
  }
  if (directory->path) directory->fd = open(directory->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory->fd < 0 && errno == EACCES && stat(path, &st) == 0)
    status =
        hl__error(error, HL_ESTORE,
                  "the lock directory %s is closed to user %lu: it belongs to user %lu and group "
                  "%lu, with mode %04o; several users share one with their group and mode 2770",
                  path, (unsigned long)geteuid(), (unsigned long)st.st_uid,
                  (unsigned long)st.st_gid, (unsigned)st.st_mode & 07777);
  else if (directory->fd < 0)
    status = hl__error_errno(error, HL_ESTORE, "cannot open the lock directory %s", path);
out:
  free(path);
  return status;
}

/* Invariant 4: a place where locks might not exclude is refused. */
static int kind_check(hl__file_directory *directory, hl_error *error) {
  struct statfs fs;
  if (fstatfs(directory->fd, &fs) != 0)
    return hl__error_errno(error, HL_ESTORE, "cannot look what file system %s is on",
                           directory->path);
  const char *remote = hl__remote_kind((unsigned long)fs.f_type);
  if (remote)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the lock directory %s is on %s, where other machines "
                     "would not be kept out; name a local one",
                     directory->path, remote);
  directory->lasts = !hl__is_volatile((unsigned long)fs.f_type);
  return HL_OK;
}

static void view_take(hl__file_view *view) {
  struct stat st;
  *view = (hl__file_view){.user = geteuid()};
  if (stat("/", &st) == 0) {
    view->device = st.st_dev;
    view->root = st.st_ino;
  }
  if (stat("/proc/self/ns/mnt", &st) == 0) view->mounts = st.st_ino;
}

bool hl__file_sees(const hl__file_directory *directory) {
  const hl__file_view *then = &directory->view;
  hl__file_view now;
  view_take(&now);
  return now.device == then->device && now.root == then->root &&
         (now.mounts == then->mounts || then->mounts == 0);
}

int hl__file_again(const hl__file_directory *directory, const char *path, hl_error *error) {
  const bool named = path && *path;
  if (hl__file_sees(directory) && (named || geteuid() == directory->view.user)) return HL_OK;
  return hl__error(error, HL_ESTORE,
                   "this process has changed its user, its root directory or its mounts since it "
                   "opened the lock directory %s, and would come to another one now; make a new "
                   "manager behind such a change",
                   directory->path);
}

int hl__file_directory_open(const char *path, hl__file_directory *directory, hl_error *error) {
  struct stat st;
  *directory = (hl__file_directory){.fd = -1};
  hl__fork_forbid();
  int status = path && *path ? named_open(path, directory, error) : default_open(directory, error);
  if (status == HL_OK) status = kind_check(directory, error);
  if (status == HL_OK && fstat(directory->fd, &st) != 0)
    status = hl__error_errno(error, HL_ESTORE, "cannot look at %s", directory->path);
  if (status == HL_OK && !hl__fork_watch(directory->fd)) status = hl__error_memory(error);
  if (status && directory->fd >= 0) {
    (void)close(directory->fd);
    directory->fd = -1;
  }
  hl__fork_allow();
  if (status) {
    hl__file_directory_close(directory);
    return status;
  }
  directory->device = st.st_dev;
  directory->inode = st.st_ino;
  directory->owner = st.st_uid;
  directory->group = st.st_gid;
  view_take(&directory->view);
  /* Users who may write in the directory may read and write its files; other users may not even
     read them. A reader could lock every byte, shared, for ever. */
  mode_t writers = st.st_mode & 0222;
  directory->file_mode = 0600 | writers | writers << 1;
  return HL_OK;
}

char *hl__file_path(const char *directory, const char *name) {
  char *path;
  return asprintf(&path, "%s/%s", directory, name) < 0 ? NULL : path;
}

void hl__file_directory_close(hl__file_directory *directory) {
  hl__file_close(directory->fd);
  directory->fd = -1;
  free(directory->path);
  directory->path = NULL;
}

/* ---------------------------------------------------------- files in it */

/* Temporary files, which soon get another name, have names that begin so. The process that has one
   locks its first bytes. */
#define TEMPORARY "tmp-"

/* While births are forbidden: the descriptor, watched; or closed, and -1. */
static int watched(int fd) {
  if (fd < 0 || hl__fork_watch(fd)) return fd;
  (void)close(fd);
  errno = ENOMEM;
  return -1;
}

void hl__file_close(int fd) {
  if (fd >= 0) hl__fork_close(fd);
}

/* Gives a new file to those who share the directory. A file that root makes in a user's directory
   becomes the user's, or the user could not open it. */
static int file_share(const hl__file_directory *directory, int fd) {
  mode_t mode = directory->file_mode;
  int given = 0;
  if (geteuid() == 0 && directory->owner != 0) given = fchown(fd, directory->owner, (gid_t)-1);
  (void)given; /* where root may not, it stays root's */
  if (fchown(fd, (uid_t)-1, directory->group) != 0)
    /* The file keeps a group of this process, which has no rights of its own in the directory. */
    mode = (mode & ~(mode_t)0070) | (mode & 0007) << 3;
  return fchmod(fd, mode);
}

int hl__file_temporary(const hl__file_directory *directory, char name[HL__FILE_NAME_MAX]) {
  struct flock life = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 2};
  int fd;
  hl__fork_forbid();
  do {
    uint64_t random = 0;
    if (getrandom(&random, sizeof random, GRND_NONBLOCK) < 0) {
      static _Atomic uint64_t count;
      random = (uint64_t)hl__unix_ms() << 20 | atomic_fetch_add(&count, 1u);
    }
    (void)snprintf(name, HL__FILE_NAME_MAX, TEMPORARY "%ld-%016llx", (long)getpid(),
                   (unsigned long long)random);
    fd = openat(directory->fd, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  } while (fd < 0 && errno == EEXIST);
  fd = watched(fd);
  hl__fork_allow();
  if (fd < 0) return -1;
  if (fcntl(fd, F_OFD_SETLK, &life) == 0 && file_share(directory, fd) == 0) return fd;
  int saved = errno;
  (void)unlinkat(directory->fd, name, 0);
  hl__file_close(fd);
  errno = saved;
  return -1;
}

/* An earlier version made its files readable for every user who may read the directory. Root leaves
   files in a user's directory alone: the user may have linked any file there. */
static void mode_mend(const hl__file_directory *directory, int fd, const struct stat *st) {
  mode_t extra = st->st_mode & 0777 & ~directory->file_mode;
  if (extra && st->st_uid == geteuid() && directory->owner == st->st_uid && st->st_nlink == 1)
    (void)fchmod(fd, st->st_mode & 07777 & ~extra);
}

/* Opens without O_CREAT: with fs.protected_regular the kernel refuses O_CREAT on another user's
   file in a directory such as /tmp. */
static int file_open(const hl__file_directory *directory, const char *name, int how,
                     struct stat *st) {
  hl__fork_forbid();
  int fd = openat(directory->fd, name, how | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  if (fd >= 0 && (fstat(fd, st) != 0 || !S_ISREG(st->st_mode))) {
    (void)close(fd);
    fd = -1;
    errno = EINVAL;
  }
  fd = watched(fd);
  hl__fork_allow();
  return fd;
}

int hl__file_open(const hl__file_directory *directory, const char *name, struct stat *st) {
  int fd = file_open(directory, name, O_RDWR, st);
  if (fd >= 0) mode_mend(directory, fd, st);
  return fd;
}

ssize_t hl__file_read(int fd, void *data, size_t size) {
  char *into = data;
  size_t done = 0;
  while (done < size) {
    ssize_t n = pread(fd, into + done, size - done, (off_t)done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return -1;
    if (n == 0) break;
    done += (size_t)n;
  }
  return (ssize_t)done;
}

int hl__file_write(int fd, const void *data, size_t size) {
  const char *from = data;
  while (size > 0) {
    ssize_t n = write(fd, from, size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return -1;
    from += n;
    size -= (size_t)n;
  }
  return 0;
}

int hl__file_name(const hl__file_directory *directory, const char *temporary, const char *name) {
  int at = directory->fd;
  long result = syscall(SYS_renameat2, at, temporary, at, name, RENAME_NOREPLACE);
  if (result != 0 && (errno == EINVAL || errno == ENOSYS))
    /* A file system that cannot. The second name is removed below. */
    result = linkat(at, temporary, at, name, 0) == 0 ? unlinkat(at, temporary, 0) : -1;
  return (int)result;
}

/* ------------------------------------------------------------- sweeping */

/* A file is not locked for a moment after it was made. */
#define YOUNG_S 60

/* A sweep looks at so many names at most: it ends soon in a directory with very many files. */
#define SWEEP_MAX 20000u

static void file_sweep(const hl__file_directory *directory, const char *name) {
  struct stat st;
  struct flock life = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 2};
  int fd = file_open(directory, name, O_RDONLY, &st);
  if (fd < 0) return;
  if (fcntl(fd, F_OFD_GETLK, &life) == 0 && life.l_type == F_UNLCK &&
      time(NULL) - st.st_mtime > YOUNG_S)
    (void)unlinkat(directory->fd, name, 0);
  hl__file_close(fd);
}

void hl__file_sweep(const hl__file_directory *directory) {
  struct dirent *file;
  hl__fork_forbid();
  int fd = watched(openat(directory->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  hl__fork_allow();
  DIR *names = fd >= 0 ? fdopendir(fd) : NULL;
  if (!names) {
    hl__file_close(fd);
    return;
  }
  for (unsigned n = 0; n < SWEEP_MAX && (file = readdir(names)); n++)
    if (strncmp(file->d_name, TEMPORARY, strlen(TEMPORARY)) == 0)
      file_sweep(directory, file->d_name);
  hl__fork_forbid();
  hl__fork_unwatch(fd, 0);
  (void)closedir(names);
  hl__fork_allow();
}
