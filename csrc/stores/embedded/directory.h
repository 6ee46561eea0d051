/*
 * directory.h - the lock directory (directory.c): which one, whether locks in it can be trusted,
 * and how a file in it is made so that no program sees half of one. This file does not know what
 * the files contain.
 */
#ifndef HIERLOCK_DIRECTORY_H
#define HIERLOCK_DIRECTORY_H

#include "clock.h"
#include "error.h"
#include "fork.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>

#define HL__FILE_NAME_MAX 64

/* What a name means for this process: with another root directory, in another mount namespace, or
   (the default directory) as another user it may lead to another directory. */
typedef struct hl__file_view {
  dev_t device;
  ino_t root, mounts; /* mounts 0: not known */
  uid_t user;
} hl__file_view;

typedef struct hl__file_directory {
  int fd;     /* -1 when closed */
  char *path; /* absolute, without links; malloc'ed */
  dev_t device;
  ino_t inode;
  uid_t owner;
  gid_t group;
  bool lasts;         /* its files outlive a reboot */
  mode_t file_mode;   /* of the files in it */
  hl__file_view view; /* when it was opened */
} hl__file_directory;

/* Opens the directory of a DSN (NULL: the default one), making it if need be.
   HL_OK, HL_ESTORE, HL_EUNSAFE_SERVER, HL_ENOMEM. */
int hl__file_directory_open(const char *path, hl__file_directory *directory, hl_error *error);
/* Whether names lead this process where they led it when it opened the directory. */
bool hl__file_sees(const hl__file_directory *directory);
/* Whether a name (NULL: of the default directory) may be followed anew where this directory was
   opened by it. HL_OK; HL_ESTORE: only this process has changed, so that it may lead to
   another one. */
int hl__file_again(const hl__file_directory *directory, const char *path, hl_error *error);
/* Safe on a zeroed structure whose fd is -1. */
void hl__file_directory_close(hl__file_directory *directory);
/* The path of a file in it; malloc'ed. NULL: out of memory. */
char *hl__file_path(const char *directory, const char *name);

/* Makes an empty file with a name of its own ("tmp-..."). Until it is closed, its lock shows that a
   process uses it. A descriptor that is watched, or -1 with errno. */
int hl__file_temporary(const hl__file_directory *directory, char name[HL__FILE_NAME_MAX]);
/* Gives a temporary file its name, unless something has it: EEXIST. 0, or -1
   with errno. */
int hl__file_name(const hl__file_directory *directory, const char *temporary, const char *name);
/* Opens a file for reading and writing; it must be a regular one. A descriptor
   that is watched, or -1 with errno. */
int hl__file_open(const hl__file_directory *directory, const char *name, struct stat *st);
/* Reads from the beginning, as far as the file goes: how many bytes, or -1 with errno. */
ssize_t hl__file_read(int fd, void *data, size_t size);
int hl__file_write(int fd, const void *data, size_t size); /* all of it */
/* Closes a watched descriptor, if it is still ours; -1 is fine. Leaves errno
   alone. */
void hl__file_close(int fd);

/* Removes the temporary files of processes that were killed. */
void hl__file_sweep(const hl__file_directory *directory);

#endif
