/*
 * machine.h - facts for the stores of this machine. Which boot is this? Is a file on a file
 * system that another machine may share? Was it mounted by its own name? And the
 * sleep on a word that processes share. A store that is a module of its own has its own copy.
 */
#ifndef HIERLOCK_MACHINE_H
#define HIERLOCK_MACHINE_H

#include <stdbool.h>
#include <stdint.h>

/* The id of this boot, as the kernel says it; zeroes where it says none. *ahead: by how many
   nanoseconds the time namespace of this process shifts CLOCK_BOOTTIME: less that, it is the same
   for all programs of the machine. 0; or -1 and errno: the process has no descriptor or no memory
   left to read them just now. Then nothing is known of the boot, and zeroes must not stand for it:
   a lease would end by the wall clock. Any thread; not while births are forbidden (fork.h). */
int hl__machine_boot(uint64_t boot[2], int64_t *ahead);
/* The same, but in such a namespace the second half is another one: for times that are not
   corrected, and so cannot be compared with those outside. */
int hl__boot_id(uint64_t boot[2]);

/* The usual name of a file system that other machines may share, by its number in statfs(2):
   "NFS" ...; NULL: it is a local one, as far as we know. Static. */
const char *hl__remote_kind(unsigned long magic);

/* Whether files of such a file system end with the boot at the latest: tmpfs, ramfs. */
bool hl__is_volatile(unsigned long magic);

/* Whether something is mounted at this very path, which has no symbolic links: 1 or 0. 0, too,
   where there is no /proc. -1 and errno: as hl__machine_boot. Any thread; not while births are
   forbidden. */
int hl__is_mount_point(const char *path);

/* Sleeps while *word is `seen`, in memory that processes may share, until hl__futex_wake or until
   CLOCK_MONOTONIC shows `until` (ns; INT64_MAX: without end). It may return early. Any thread. */
void hl__futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t until);
/* Wakes at most n threads that sleep on the word. Any thread. */
void hl__futex_wake(_Atomic uint32_t *word, int n);

#endif
