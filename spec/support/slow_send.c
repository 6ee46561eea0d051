/*
 * slow_send.c - for LD_PRELOAD: each send() makes the file that the environment names as HIERLOCK_SPEC_SEND, if it
 * does, and goes on when another process or thread has removed it. If there is a file HIERLOCK_SPEC_REFUSE, it is
 * removed, and nothing is sent: the system has no memory for that.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

ssize_t send(int fd, const void *data, size_t size, int flags) {
  ssize_t (*real)(int, const void *, size_t, int);
  const char *path = getenv("HIERLOCK_SPEC_SEND");
  if (path) {
    (void)close(open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    while (access(path, F_OK) == 0) (void)usleep(1000);
  }
  const char *refuses = getenv("HIERLOCK_SPEC_REFUSE");
  if (refuses && unlink(refuses) == 0) {
    errno = ENOMEM;
    return -1;
  }
  *(void **)&real = dlsym(RTLD_NEXT, "send");
  return real(fd, data, size, flags);
}
