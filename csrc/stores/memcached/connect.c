/*
 * connect.c - a connection to one server, made when it is first needed.
 */
#include "memcached_store.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>

static int connect_to(hl__memcached_session *session, hl__memcached_link *link,
                      const struct addrinfo *address, int64_t deadline, hl_error *error) {
  hl__fork_forbid();
  link->fd = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  int failure = errno;
  if (link->fd >= 0) link->ticket = hl__fork_watch(link->fd);
  hl__fork_allow();
  errno = failure;
  if (link->fd < 0) return hl__memcached_broken(link, error);
  const int on = 1;
  (void)setsockopt(link->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (connect(link->fd, address->ai_addr, address->ai_addrlen) == 0) return HL_OK;
  if (errno != EINPROGRESS) return hl__memcached_broken(link, error);
  int status = hl__memcached_await(session, link->fd, POLLOUT, deadline);
  if (status == HL_TIMEOUT)
    return hl__memcached_ended(link, "cannot connect: no answer in time", error);
  if (status) return hl__memcached_ended(link, "cannot connect: it was interrupted", error);
  socklen_t size = sizeof failure;
  if (getsockopt(link->fd, SOL_SOCKET, SO_ERROR, &failure, &size) != 0) failure = errno;
  errno = failure;
  return failure ? hl__memcached_broken(link, error) : HL_OK;
}

int hl__memcached_connect(hl__memcached_session *session, hl__memcached_link *link,
                          int64_t deadline, hl_error *error) {
  struct addrinfo wanted = {.ai_socktype = SOCK_STREAM}, *found = NULL;
  char port[8];
  deadline = hl__within_ms(session->store->connect_timeout, deadline);
  (void)snprintf(port, sizeof port, "%u", link->server->port);
  int failure = getaddrinfo(link->server->host, port, &wanted, &found);
  if (failure) return hl__memcached_ended(link, gai_strerror(failure), error);
  int status = HL_ECONNECTION;
  for (const struct addrinfo *one = found; one && status; one = one->ai_next) {
    link->ended = false;
    status = connect_to(session, link, one, deadline, error);
  }
  freeaddrinfo(found);
  if (status == HL_OK) status = hl__memcached_verify(session, link, deadline, error);
  if (status) hl__memcached_end(link);
  return status;
}

int hl__memcached_link_of(hl__memcached_session *session, uint64_t root, int64_t deadline,
                          hl__memcached_link **link, hl_error *error) {
  const hl__memcached_store *store = session->store;
  *link = &session->links[store->slots[root % HL__MEMCACHED_SLOTS]];
  if ((*link)->ended) return hl__error(error, HL_ECONNECTION, "the connection has ended");
  if ((*link)->fd >= 0) return HL_OK;
  return hl__memcached_connect(session, *link, deadline, error);
}
