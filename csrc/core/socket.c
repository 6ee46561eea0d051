/*
 * socket.c - see socket.h.
 */
#include "socket.h"

#include "clock.h"
#include "error.h"
#include "fork.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

int hl__wakeup_open(hl__wakeup *wakeup, hl_error *error) {
  atomic_init(&wakeup->interrupted, false);
  hl__fork_forbid();
  wakeup->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  int failure = errno;
  wakeup->ticket = wakeup->fd < 0 ? 0 : hl__fork_watch(wakeup->fd);
  hl__fork_allow();
  errno = failure;
  if (wakeup->fd < 0) return hl__error_errno(error, HL_ECONNECTION, "cannot make an eventfd");
  return wakeup->ticket ? HL_OK : hl__error_memory(error);
}

void hl__wakeup_close(const hl__wakeup *wakeup) {
  if (wakeup->fd < 0) return;
  hl__fork_unwatch(wakeup->fd, wakeup->ticket);
  (void)close(wakeup->fd);
}

void hl__wake(const hl__wakeup *wakeup) {
  static const uint64_t one = 1;
  while (write(wakeup->fd, &one, sizeof one) < 0 && errno == EINTR) {}
}

void hl__wakeup_interrupt(hl__wakeup *wakeup) {
  if (!atomic_exchange(&wakeup->interrupted, true)) hl__wake(wakeup);
}

void hl__wakeup_clear(const hl__wakeup *wakeup) {
  uint64_t count;
  while (read(wakeup->fd, &count, sizeof count) < 0 && errno == EINTR) {}
}

bool hl__wakeup_interruption_take(hl__wakeup *wakeup) {
  bool interrupted = atomic_exchange(&wakeup->interrupted, false);
  if (interrupted) hl__wakeup_clear(wakeup);
  return interrupted;
}

void hl__server_wait_begin(const hl_store_config *config) {
  if (config->wait_begin) config->wait_begin();
}

void hl__server_wait_end(const hl_store_config *config) {
  int saved = errno;
  if (config->wait_end) config->wait_end();
  errno = saved;
}

int hl__poll(const hl_store_config *config, struct pollfd *p, nfds_t n, int64_t deadline) {
  for (;;) {
    int64_t left = hl__left_ms(deadline);
    if (left) hl__server_wait_begin(config);
    int ready = poll(p, n, left > INT32_MAX ? INT32_MAX : (int)left);
    if (left) hl__server_wait_end(config);
    if (ready > 0 || (ready < 0 && errno != EINTR) || (ready == 0 && !left)) return ready;
  }
}

int hl__socket_await(const hl_store_config *config, int fd, short events, const hl__wakeup *wakeup,
                     int64_t deadline) {
  struct pollfd p[2] = {{.fd = fd, .events = events}, {.events = POLLIN}};
  if (wakeup) p[1].fd = wakeup->fd;
  for (;;) {
    /* What has come by now counts more than an interruption. */
    bool interrupted = wakeup && atomic_load(&wakeup->interrupted);
    int n = hl__poll(config, p, wakeup ? 2 : 1, interrupted ? 0 : deadline);
    if (n < 0) return HL_ECONNECTION;
    if (n > 0 && p[0].revents) return HL_OK;
    if (wakeup && atomic_load(&wakeup->interrupted)) return HL_CANCELLED;
    if (n == 0) return HL_TIMEOUT;
    hl__wakeup_clear(wakeup); /* it came for another reason, which the sender has written down */
  }
}
