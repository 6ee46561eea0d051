/*
 * slow_send.c - for LD_PRELOAD: each send() makes the file that the environment names, if it does, and
 * goes on when another process or thread has removed it.
 */
#include <dlfcn.h>
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
  *(void **)&real = dlsym(RTLD_NEXT, "send");
  return real(fd, data, size, flags);
}
