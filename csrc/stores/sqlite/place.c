/*
 * place.c - which file it is, and whether leases in it exclude. The file is
 * never opened here: when a process closes any descriptor of a database, it
 * loses all locks that SQLite has on it for that process.
 */
#include "machine.h"
#include "sqlite_store.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

/* Invariant 4: a place where leases might not exclude is refused. */
static int place_check(const char *path, const struct stat *st, hl_error *error) {
  struct statfs fs;
  const int mounted = hl__is_mount_point(path);
  if (mounted < 0)
    return hl__error_errno(error, HL_ESTORE, "cannot look whether %s is mounted", path);
  if (!S_ISREG(st->st_mode)) return hl__error(error, HL_ESTORE, "%s is not a regular file", path);
  /* SQLite names its log after the name by which it has opened the file. */
  if (st->st_nlink > 1)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "%s has several names (hard links), and programs that use "
                     "another one would not be kept out",
                     path);
  if (mounted)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the file %s is mounted by its own name, and its log would "
                     "not be the log of those outside: mount its directory",
                     path);
  if (statfs(path, &fs) != 0)
    return hl__error_errno(error, HL_ESTORE, "cannot look what file system %s is on", path);
  const char *remote = hl__remote_kind((unsigned long)fs.f_type);
  if (remote)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "%s is on %s, where other machines would not be kept out; name a local file",
                     path, remote);
  return HL_OK;
}

int hl__sqlite_place(hl__sqlite_session *session, const char *path, hl_error *error) {
  struct stat st;
  /* For its owner alone, as there are secrets in it; SQLite, and we, give the files beside it
     the same mode. An operator who wants to share the file makes it, or changes its mode. */
  if (mknod(path, S_IFREG | 0600, 0) != 0 && errno != EEXIST)
    return hl__error_errno(error, HL_ESTORE, "cannot make the file %s", path);
  session->path = realpath(path, NULL);
  if (!session->path || stat(session->path, &st) != 0)
    return hl__error_errno(error, HL_ESTORE, "cannot find the file %s", path);
  session->device = st.st_dev;
  session->inode = st.st_ino;
  return place_check(session->path, &st, error);
}

bool hl__sqlite_place_stands(hl__sqlite_session *session) {
  struct stat st;
  if (stat(session->path, &st) != 0 || st.st_dev != session->device || st.st_ino != session->inode)
    return false;
  session->file_size = st.st_size;
  return true;
}

int hl__sqlite_moved_error(const hl__sqlite_session *session, hl_error *error) {
  return hl__error(error, HL_ECONNECTION,
                   "the file %s was removed, renamed or replaced while it was used", session->path);
}
