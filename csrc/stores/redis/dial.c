/*
 * dial.c - reaches one server: socket, TLS, login. Never blocks: each wait is a poll() of ours,
 * with an end.
 */
#include "redis_store.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* No child is born with a socket that it does not close. (A name server that hangs is waited for
   in here.) */
static int socket_open(hl__redis_session *session, hl_error *error) {
  const hl__redis_address *address = &session->address;
  int status = HL_OK;
  hl__fork_forbid();
  session->context = *address->host ? redisConnectNonBlock(address->host, (int)address->port)
                                    : redisConnectUnixNonBlock(session->store->config->dsn->socket);
  if (!session->context) {
    status = hl__error_memory(error);
  } else if (session->context->err) {
    status = hl__error(error, HL_ECONNECTION, "cannot connect: %s", session->context->errstr);
  } else {
    session->fd = session->context->fd;
    session->ticket = hl__fork_watch(session->fd);
    if (!session->ticket) status = hl__error_memory(error);
  }
  hl__fork_allow();
  return status;
}

static int socket_await(const hl__redis_session *session, int64_t deadline, hl_error *error) {
  int status = hl__socket_await(session->store->config, session->fd, POLLOUT, NULL, deadline);
  if (status == HL_TIMEOUT)
    return hl__error(error, HL_ECONNECTION, "cannot connect: no answer in time");
  socklen_t size = sizeof errno;
  int failure = 0;
  if (getsockopt(session->fd, SOL_SOCKET, SO_ERROR, &failure, &size) != 0) failure = errno;
  errno = failure;
  if (failure) return hl__error_errno(error, HL_ECONNECTION, "cannot connect");
  const int on = 1;
  (void)setsockopt(session->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  /* The server may send nothing on the subscribed connection for long. */
  const int idle = 15;
  (void)setsockopt(session->fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  (void)setsockopt(session->fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  (void)setsockopt(session->fd, IPPROTO_TCP, TCP_KEEPINTVL, &idle, sizeof idle);
  return HL_OK;
}

static int log_in(hl__redis_session *session, const hl__redis_login *as, int64_t deadline,
                  hl_error *error) {
  const hl_dsn *dsn = session->store->config->dsn;
  /* Named as in redis-cli. */
  hl__redis_login own = {dsn->user, dsn->password ? dsn->password : getenv("REDISCLI_AUTH")};
  if (!as) as = &own;
  if (!as->password || !*as->password) return HL_OK;
  const char *words[] = {"AUTH", as->user ? as->user : as->password, as->password};
  return hl__redis_command(session, deadline, as->user ? 3 : 2, words, NULL, error);
}

int hl__redis_dial(hl__redis_store *store, const hl__redis_address *address,
                   const hl__redis_login *as, int64_t deadline, hl__redis_session **result,
                   hl_error *error) {
  *result = NULL;
  hl__redis_session *session = calloc(1, sizeof *session);
  if (!session) return hl__error_memory(error);
  session->base.store = &store->base;
  session->store = store;
  if (address) session->address = *address;
  session->fd = -1;
  hl__list_init(&session->node);
  hl__list_init(&session->links);
  session->face = session;
  int status = hl__wakeup_open(&session->wakeup, error);
  if (status == HL_OK) status = socket_open(session, error);
  if (status == HL_OK) status = socket_await(session, deadline, error);
  if (status == HL_OK) status = hl__redis_tls_start(session, deadline, error);
  if (status == HL_OK) status = log_in(session, as, deadline, error);
  if (status == HL_OK)
    *result = session;
  else
    hl__redis_disconnect(session);
  return status;
}

static void one_disconnect(hl__redis_session *session) {
  if (session->fd >= 0) hl__fork_unwatch(session->fd, session->ticket);
  hl__redis_tls_end(session);
  if (session->context) redisFree(session->context);
  free(session->out);
  hl__wakeup_close(&session->wakeup);
  free(session);
}

void hl__redis_disconnect(hl__redis_session *session) {
  if (!session) return;
  hl__list *next; /* a link to a cluster's master has no links */
  for (hl__list *node = session->links.next; node != &session->links; node = next) {
    next = node->next;
    one_disconnect(HL__LIST_ENTRY(node, hl__redis_session, links));
  }
  one_disconnect(session);
}
