/*
 * machine.c - see machine.h.
 */
#include "machine.h"

#include "error.h"
#include "fork.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* File systems of which another machine may have a part, on which either its locks or its
   futexes would not reach us. FUSE does not say which file system is behind it (sshfs keeps
   locks on this side), so it is refused as a whole. */
static const struct {
  unsigned long magic; /* statfs(2) */
  const char *name;
} remote_kinds[] = {
    {0x6969, "NFS"},        {0x517B, "SMB"},
    {0xFF534D42, "CIFS"},   {0xFE534D42, "SMB"},
    {0x5346414F, "AFS"},    {0x6B414653, "AFS"},
    {0x01021997, "9p"},     {0x00C36400, "Ceph"},
    {0x0BD00BD0, "Lustre"}, {0x65735546, "FUSE"},
    {0x73757245, "Coda"},   {0x564C, "NCP"},
    {0x01161970, "GFS2"},   {0x7461636F, "OCFS2"},
    {0x47504653, "GPFS"},   {0x786F4256, "a VirtualBox folder"},
    {0x19830326, "BeeGFS"}, {0xAAD7AAEA, "PanFS"},
};

const char *hl__remote_kind(unsigned long magic) {
  magic &= 0xFFFFFFFFul; /* signed on some machines, and 32 bits wide on others */
  for (size_t i = 0; i < sizeof remote_kinds / sizeof *remote_kinds; i++)
    if (magic == remote_kinds[i].magic) return remote_kinds[i].name;
  return NULL;
}

bool hl__is_volatile(unsigned long magic) {
  magic &= 0xFFFFFFFFul;
  return magic == 0x01021994ul || magic == 0x858458F6ul;
}

/* Whether the process has no descriptor or no memory left just now. */
static bool is_want(int cause) { return cause == EMFILE || cause == ENFILE || cause == ENOMEM; }

/* Reads the beginning of a file of the kernel's; "" where the kernel has none for this process.
   0; or -1 and errno: see is_want. */
static int kernel_says(const char *name, char *text, size_t size) {
  hl__fork_forbid();
  int fd = open(name, O_RDONLY | O_CLOEXEC);
  ssize_t n = fd >= 0 ? read(fd, text, size - 1) : -1;
  int saved = n < 0 ? errno : 0;
  if (fd >= 0) (void)close(fd);
  hl__fork_allow();
  text[n > 0 ? n : 0] = '\0';
  errno = saved;
  return is_want(saved) ? -1 : 0;
}

int hl__machine_boot(uint64_t boot[2], int64_t *ahead) {
  char text[256];
  uint8_t id[16];
  *ahead = 0;
  boot[0] = boot[1] = 0;
  if (kernel_says("/proc/sys/kernel/random/boot_id", text, sizeof text) != 0) return -1;
  hl__id_read(text, id);
  memcpy(boot, id, 16);

  if (kernel_says("/proc/self/timens_offsets", text, sizeof text) != 0) return -1;
  const char *line = strstr(text, "boottime");
  if (!line) return 0;
  char *behind;
  int64_t seconds = strtoll(line + strlen("boottime"), &behind, 10);
  *ahead = seconds * 1000000000 + strtoll(behind, NULL, 10);
  return 0;
}

int hl__boot_id(uint64_t boot[2]) {
  int64_t ahead;
  if (hl__machine_boot(boot, &ahead) != 0) return -1;
  boot[1] ^= (uint64_t)ahead;
  return 0;
}

/* In /proc/PID/mountinfo a space, a tab, a newline and a backslash of a path are
   written as three octal digits behind a backslash. */
static void octal_decode(char *text) {
  char *to = text;
  for (const char *from = text; *from; to++) {
    unsigned byte = 0, digits = 0;
    while (*from == '\\' && digits < 3 && from[1 + digits] >= '0' && from[1 + digits] <= '7')
      byte = byte * 8 + (unsigned)(from[1 + digits++] - '0');
    if (digits == 3)
      *to = (char)byte;
    else
      *to = *from;
    from += digits == 3 ? 4 : 1;
  }
  *to = '\0';
}

int hl__is_mount_point(const char *path) {
  bool found = false;
  char *line = NULL;
  size_t size = 0;
  hl__fork_forbid();
  errno = 0;
  FILE *mounts = fopen("/proc/self/mountinfo", "re");
  while (mounts && !found && getline(&line, &size, mounts) > 0) {
    /* Id, parent, device, what of the file system is mounted, where. */
    char *rest = line, *field = NULL;
    for (int i = 0; i < 5; i++) field = strsep(&rest, " ");
    if (field) octal_decode(field);
    found = field && strcmp(field, path) == 0;
  }
  const int saved = errno;
  if (mounts) (void)fclose(mounts);
  hl__fork_allow();
  free(line);
  errno = saved;
  return found ? 1 : is_want(saved) ? -1 : 0;
}

void hl__futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t until) {
  if (until < 0) until = 0;
  /* SYS_futex reads two longs, also where the C library's time_t is longer. */
  const long end[] = {(long)(until / 1000000000), (long)(until % 1000000000)};
  (void)syscall(SYS_futex, word, FUTEX_WAIT_BITSET, seen, until == INT64_MAX ? NULL : end, NULL,
                FUTEX_BITSET_MATCH_ANY);
}

void hl__futex_wake(_Atomic uint32_t *word, int n) {
  (void)syscall(SYS_futex, word, FUTEX_WAKE, n, NULL, NULL, 0);
}
