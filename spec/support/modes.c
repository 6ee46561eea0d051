/*
 * modes.c - for LD_PRELOAD: a file that the process makes has the mode that its umask leaves for
 * 5 ms, and then the mode that the process gives it.
 */
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

int fchmod(int fd, mode_t mode) {
  (void)usleep(5000);
  return (int)syscall(SYS_fchmod, fd, mode);
}
