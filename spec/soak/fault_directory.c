/*
 * fault_directory.c - faults of the lock directory of the embedded store, its files and its
 * disk, in the process that does a large fault.
 */
#include "fault.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char directory[256];

static void directory_find(void) {
  (void)snprintf(directory, sizeof directory, "%s", shared->dsn + strlen("file:"));
}

static const char *in_directory(const char *name) {
  static char path[2][600];
  static int turn;
  turn = !turn;
  (void)snprintf(path[turn], sizeof path[turn], "%s/%s", directory, name);
  return path[turn];
}

/* Tokens of the next directory begin with the time, so they follow where the clock
   does not jump. */
static void lose_next(void) {
  if (shared->clock_jumps) atomic_store(&fault_self->new_tokens, true);
}

/* From now on no worker holds anything there, nor gets it, until it is removed. */
static void all_lost(void) {
  lose_next();
  atomic_store(&fault_self->lost, now_ns());
  fault_shut_begin();
}

/* Does it to the files whose names begin so, each with that probability. */
static void each_file(const char *begins, int percent, void (*act)(const char *path)) {
  DIR *names = opendir(directory);
  struct dirent *file;
  while (names && (file = readdir(names)))
    if (file->d_name[0] != '.' && strncmp(file->d_name, begins, strlen(begins)) == 0 &&
        roll_percent(&fault_dice, percent))
      act(in_directory(file->d_name));
  if (names) (void)closedir(names);
}

static void file_remove(const char *path) { (void)unlink(path); }

static void file_cut(const char *path) {
  if (truncate(path, 0)) {}
}

static void file_fill(const char *path) {
  char noise[4096];
  struct stat st;
  int fd = open(path, O_WRONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return;
  off_t size = fstat(fd, &st) == 0 && st.st_size > 4096 ? st.st_size : 4096;
  for (off_t at = 0; at < size; at += (off_t)sizeof noise) {
    for (size_t i = 0; i < sizeof noise; i++) noise[i] = (char)roll(&fault_dice);
    size_t n = size - at < (off_t)sizeof noise ? (size_t)(size - at) : sizeof noise;
    if (pwrite(fd, noise, n, at) < 0) break;
  }
  (void)close(fd);
}

/* Another file of that name and with that in it. */
static void file_replace(const char *path) {
  char other[700], data[8192];
  (void)snprintf(other, sizeof other, "%s.other", path);
  int from = open(path, O_RDONLY | O_CLOEXEC),
      to = open(other, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  for (ssize_t n; from >= 0 && to >= 0 && (n = read(from, data, sizeof data)) > 0;)
    if (write(to, data, (size_t)n) != n) break;
  (void)close(from);
  (void)close(to);
  if (rename(other, path)) (void)unlink(other);
}

static void file_shut(const char *path) { (void)chmod(path, 0); }
static void file_open(const char *path) { (void)chmod(path, 0600); }

static void directory_remove(void) {
  lose_next();
  bool shut = atomic_load(&fault_self->shut);
  if (shut) fault_shut_end(); /* before others can make a new one */
  (void)unlink(in_directory("control"));
  if (!shut) atomic_store(&fault_self->lost, now_ns());
  (void)rmdir(directory); /* or another process has made a new control file by now */
}

static void directory_drop(const char *path) {
  char kept[sizeof directory];
  (void)snprintf(kept, sizeof kept, "%s", directory);
  (void)snprintf(directory, sizeof directory, "%s", path);
  each_file("", 100, file_remove);
  (void)rmdir(directory);
  (void)snprintf(directory, sizeof directory, "%s", kept);
}

static void directory_rename(void) {
  char away[sizeof directory + 8];
  (void)snprintf(away, sizeof away, "%s.away", directory);
  lose_next();
  if (rename(directory, away)) fault_fail("rename");
  int64_t gone = now_ns();
  if (roll_percent(&fault_dice, 50)) fault_sleep_ms(roll_below(&fault_dice, 100));
  /* Back again, or others have made a new one and meet there. */
  if (rename(away, directory) == 0) return;
  atomic_store(&fault_self->lost, gone);
  fault_sleep_ms(roll_below(&fault_dice, 300));
  directory_drop(away);
}

static const char *const junk[] = {"fifo-1",      "tmp-fifo-1", "table",    "\n",
                                   "\xff\xfe",    "tmp-",       "tmp-link", "tmp-directory",
                                   "control.old", "link"};

static void junk_make(void) {
  for (size_t i = 0; i < sizeof junk / sizeof *junk; i++) {
    const char *path = in_directory(junk[i]);
    int fd;
    switch (strstr(junk[i], "fifo")        ? 0
            : strstr(junk[i], "link")      ? 1
            : strstr(junk[i], "directory") ? 2
                                           : 3) {
    case 0: (void)mkfifo(path, 0600); break;
    case 1:
      if (symlink(roll_percent(&fault_dice, 50) ? "control" : "/dev/zero", path)) {}
      break;
    case 2: (void)mkdir(path, 0700); break;
    default:
      fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
      if (fd < 0) break;
      (void)close(fd);
      file_fill(path);
    }
  }
}

static void junk_remove(void) {
  for (size_t i = 0; i < sizeof junk / sizeof *junk; i++) {
    const char *path = in_directory(junk[i]);
    if (unlink(path) && errno != ENOENT) (void)rmdir(path);
  }
}

void fault_hostile(void) {
  directory_find();
  int ms = roll_below(&fault_dice, 400);
  switch (fault_way(7)) {
  case 0:
    fault_what("renamed");
    directory_rename();
    break;
  case 1:
    fault_what("removed");
    directory_remove();
    break;
  case 2:
    fault_what("control replaced");
    file_replace(in_directory("control"));
    all_lost();
    fault_sleep_ms(ms);
    directory_remove();
    break;
  case 3:
    fault_what("control cut");
    atomic_store(&fault_self->may_end, true);
    file_cut(in_directory("control"));
    all_lost();
    fault_sleep_ms(ms);
    directory_remove();
    break;
  case 4:
    fault_what("control filled");
    atomic_store(&fault_self->new_tokens, true);
    /* What is in it is the locks. A holder can see that its own is gone when the file is full. */
    atomic_store(&fault_self->before, now_ns());
    file_fill(in_directory("control"));
    all_lost();
    fault_sleep_ms(ms);
    directory_remove();
    break;
  case 5:
    fault_what("rights changed");
    each_file("", 50, file_shut);
    (void)chmod(directory, 0);
    fault_sleep_ms(ms);
    (void)chmod(directory, 0700);
    each_file("", 100, file_open);
    break;
  default:
    fault_what("strange files");
    junk_make();
    fault_sleep_ms(ms);
    junk_remove();
    break;
  }
}

/* --------------------------------------------------------- things used up */

void fault_disk(void) {
  char filler[300], block[4096];
  int how = fault_way(4);
  bool removes = how % 2, names = how >= 2;
  directory_find();
  memset(block, 1, sizeof block);
  fault_what(names     ? removes ? "no inodes, removed" : "no inodes"
             : removes ? "no space, removed"
                       : "no space");
  (void)snprintf(filler, sizeof filler, "%.240s.filler", directory);
  (void)mkdir(filler, 0700);
  char name[340];
  for (int i = 0;; i++) {
    (void)snprintf(name, sizeof name, "%s/%d", filler, i);
    int fd = open(name, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) break;
    bool full = false;
    while (!names && !full) full = write(fd, block, sizeof block) < (ssize_t)sizeof block;
    (void)close(fd);
    if (full) break;
  }
  if (removes) directory_remove();
  fault_sleep_ms(roll_below(&fault_dice, 1500));
  directory_drop(filler);
}
