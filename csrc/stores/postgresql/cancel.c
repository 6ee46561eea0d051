/*
 * cancel.c - ends a wait at the server. If a client only went away, its wait would go on for a
 * while, and a dead waiter keeps the locks that it has.
 *
 * A cancel request is a connection of its own. The server closes it once it has sent the signal. A
 * signal that finds the session idle does nothing. So if that connection is closed before the
 * session sends anything else, the signal hits nothing else. If it is not closed in time, the
 * session is given up.
 *
 * A cancel request does not count against the server's limit of connections, and needs no login.
 */
#include "postgresql_store.h"

#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

static int cancel_error(hl_error *error) {
  return hl__error(error, HL_ECONNECTION, "the server could not be told in time to end the wait");
}

#ifdef LIBPQ_HAS_ASYNC_CANCEL /* libpq 17 */

/* Does one step of the request, after which its socket may be another one. No child is born
   meanwhile: see log_in in connect.c. A socket that cannot be watched stays open in a child. */
static PostgresPollingStatusType step(PGcancelConn *request, bool first, int *fd,
                                      uint64_t *ticket) {
  PostgresPollingStatusType next = PGRES_POLLING_FAILED;
  hl__fork_forbid();
  if (!first)
    next = PQcancelPoll(request);
  else if (PQcancelStart(request))
    next = PGRES_POLLING_WRITING;
  int now = PQcancelSocket(request);
  if (now != *fd || !hl__fork_watches(now, *ticket)) {
    if (*ticket) hl__fork_unwatch(*fd, *ticket);
    *fd = now;
    *ticket = now >= 0 ? hl__fork_watch(now) : 0;
  }
  hl__fork_allow();
  return next;
}

static void finish(PGcancelConn *request, int fd, uint64_t ticket) {
  hl__fork_forbid();
  if (ticket) hl__fork_unwatch(fd, ticket);
  PQcancelFinish(request);
  hl__fork_allow();
}

int hl__pg_cancel(hl__pg_session *session, int64_t deadline, hl_error *error) {
  int fd = -1;
  uint64_t ticket = 0;
  PGcancelConn *request = PQcancelCreate(session->connection);
  if (!request) return cancel_error(error); /* out of memory: the wait goes on */
  PostgresPollingStatusType next = step(request, true, &fd, &ticket);
  while (next != PGRES_POLLING_OK && next != PGRES_POLLING_FAILED) {
    short events = next == PGRES_POLLING_WRITING ? POLLOUT : POLLIN;
    if (hl__socket_await(session->store->config, fd, events, NULL, deadline)) break;
    next = step(request, false, &fd, &ticket);
  }
  finish(request, fd, ticket);
  return next == PGRES_POLLING_OK ? HL_OK : cancel_error(error);
}

#else

/* PQcancel waits without a limit, so a thread of its own runs it. The thread only talks to the
   kernel, so it may go on while exit() takes libraries apart. */
typedef struct request {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  PGcancel *cancel;
  bool done, sent;
  bool left; /* the caller has left: the thread frees it */
} request;

static void request_free(request *self) {
  (void)pthread_cond_destroy(&self->changed);
  (void)pthread_mutex_destroy(&self->mutex);
  PQfreeCancel(self->cancel);
  free(self);
}

static void *request_main(void *argument) {
  request *self = argument;
  char reason[256];
  bool sent = PQcancel(self->cancel, reason, sizeof reason) != 0;
  (void)pthread_mutex_lock(&self->mutex);
  self->done = true;
  self->sent = sent;
  bool left = self->left;
  (void)pthread_cond_signal(&self->changed);
  (void)pthread_mutex_unlock(&self->mutex);
  if (left) request_free(self);
  return NULL;
}

static request *request_new(hl__pg_session *session) {
  request *self = calloc(1, sizeof *self);
  if (!self) return NULL;
  self->cancel = PQgetCancel(session->connection);
  (void)pthread_mutex_init(&self->mutex, NULL);
  hl__cond_init(&self->changed);
  if (self->cancel) return self;
  request_free(self);
  return NULL;
}

/* Starts the thread, which blocks all signals, as all threads of the library do. */
static bool request_start(request *self) {
  sigset_t all, before;
  pthread_attr_t attributes;
  pthread_t thread;
  (void)pthread_attr_init(&attributes);
  (void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  (void)pthread_attr_setstacksize(&attributes, (size_t)128 * 1024);
  (void)sigfillset(&all);
  (void)pthread_sigmask(SIG_SETMASK, &all, &before);
  int failure = pthread_create(&thread, &attributes, request_main, self);
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
  (void)pthread_attr_destroy(&attributes);
  return failure == 0;
}

int hl__pg_cancel(hl__pg_session *session, int64_t deadline, hl_error *error) {
  request *self = request_new(session);
  if (!self) return cancel_error(error);
  if (!request_start(self)) {
    request_free(self);
    return cancel_error(error);
  }
  hl__server_wait_begin(session->store->config);
  (void)pthread_mutex_lock(&self->mutex);
  while (!self->done && hl__left_ms(deadline) > 0)
    hl__cond_wait(&self->changed, &self->mutex, deadline);
  bool done = self->done, sent = self->sent;
  self->left = true;
  (void)pthread_mutex_unlock(&self->mutex);
  hl__server_wait_end(session->store->config);
  if (done) request_free(self);
  return done && sent ? HL_OK : cancel_error(error);
}

#endif
