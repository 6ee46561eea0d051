/*
 * wire.c - sending, answers, errors. hiredis formats and parses; all waiting is a poll() of
 * ours on its socket, which does not block. We send ourselves, as hiredis would have a program
 * killed by SIGPIPE whose server has closed the connection.
 */
#include "redis_store.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

int hl__redis_gone(const hl__redis_session *session, hl_error *error) {
  const redisContext *context = session->context;
  return hl__error(error, HL_ECONNECTION, "the connection has ended: %s",
                   context->err ? context->errstr : "the server has closed it");
}

static bool begins(const char *text, const char *word) {
  return strncmp(text, word, strlen(word)) == 0;
}

/* Messages that say that another connection, or a later try, may succeed. */
static bool is_of_connection(const char *said) {
  return begins(said, "READONLY") || begins(said, "LOADING") || begins(said, "MASTERDOWN") ||
         begins(said, "CLUSTERDOWN") || begins(said, "UNBLOCKED") || begins(said, "BUSY ") ||
         begins(said, "ERR max number of clients");
}

/* Redis 6.2 says first which script it was: "ERR Error running script (...): ...: -OOM ...". */
static const char *word_of(const char *said) {
  const char *at = begins(said, "ERR Error running script") ? strstr(said, ": -") : NULL;
  return at ? at + 3 : said;
}

/* The slot is being moved, or was. */
static bool is_of_move(const char *said) {
  return begins(said, "MOVED") || begins(said, "ASK") || begins(said, "TRYAGAIN") ||
         strstr(said, "non local key");
}

int hl__redis_error(hl__redis_session *session, const char *text, hl_error *error) {
  const char *said = word_of(text);
  bool moves = is_of_move(said);
  session->moving = moves && session->store->cluster;
  if (session->store->hint) session->store->hint(session, said);
  if (strstr(said, "OTHERVERSION")) /* amnesia.lua */
    return hl__error(error, HL_ESTORE,
                     "the keys of this prefix were made by another version of "
                     "hierlock: see Upgrading in docs/operations.md");
  int status = HL_ESTORE;
  const char *hint = moves ? " (the slot is being moved, or was)" : "";
  bool retryable = false;
  if (moves || is_of_connection(said)) {
    status = HL_ECONNECTION;
    retryable = true;
  } else if (begins(said, "NOAUTH") || begins(said, "WRONGPASS") ||
             begins(said, "ERR invalid password") || begins(said, "ERR AUTH") ||
             begins(said, "ERR Client sent AUTH")) {
    status = HL_ECONNECTION;
  } else if (strstr(said, "NOPERM") || strstr(said, "ACL failure") ||
             strstr(said, "can't run this command")) {
    hint = " (docs/security.md lists what the user must be allowed)";
  } else if (begins(said, "OOM")) {
    hint = " (its memory is full: raise its maxmemory)";
    retryable = true;
  } else if (begins(said, "MISCONF") || begins(said, "NOREPLICAS")) {
    retryable = true;
  }
  (void)hl__error(error, status, "the server says: %.300s%s", said, hint);
  if (error) error->retryable = retryable;
  return status;
}

int hl__redis_queue(hl__redis_session *session, size_t n, const char *const *words,
                    const size_t *sizes, hl_error *error) {
  char *command = NULL;
  int size = (int)redisFormatCommandArgv(&command, (int)n, (const char **)words, sizes);
  char *grown = size > 0 ? realloc(session->out, session->out_size + (size_t)size) : NULL;
  if (grown) {
    memcpy(grown + session->out_size, command, (size_t)size);
    session->out = grown;
    session->out_size += (size_t)size;
  }
  if (size > 0) redisFreeCommand(command);
  return grown ? HL_OK : hl__error_memory(error);
}

/* Without blocking. *done: all is sent. */
static int write_some(hl__redis_session *session, bool *done, hl_error *error) {
  if (session->tls) {
    int status = hl__redis_tls_write(session, done, error);
    if (status == HL_OK) session->out_sent = session->out_size = 0;
    return status;
  }
  while (session->out_sent < session->out_size) {
    ssize_t n = send(session->fd, session->out + session->out_sent,
                     session->out_size - session->out_sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (n < 0) return hl__error_errno(error, HL_ECONNECTION, "the connection has ended");
    session->out_sent += (size_t)n;
  }
  *done = session->out_sent == session->out_size;
  if (*done) session->out_sent = session->out_size = 0;
  return HL_OK;
}

int hl__redis_flush(hl__redis_session *session, hl_error *error) {
  bool done;
  return write_some(session, &done, error);
}

int hl__redis_unawaited(hl__redis_session *session, hl_error *error) {
  session->outstanding++;
  return hl__redis_flush(session, error);
}

/* Has hiredis parse the received bytes, without blocking. */
static bool read_some(hl__redis_session *session) {
  return session->tls ? hl__redis_tls_read(session) : redisBufferRead(session->context) == REDIS_OK;
}

/* The next answer that has come; NULL: none yet. False: the connection has ended. */
static bool reply_next(hl__redis_session *session, void **reply) {
  if (redisGetReplyFromReader(session->context, reply) != REDIS_OK) return false;
  if (*reply) return true;
  /* Bytes that came before the end count. */
  bool open = read_some(session);
  if (redisGetReplyFromReader(session->context, reply) != REDIS_OK) return false;
  return open || *reply;
}

int hl__redis_await(hl__redis_session *session, int64_t deadline, bool interruptible,
                    redisReply **reply, hl_error *error) {
  bool done = false;
  *reply = NULL;
  for (;;) {
    void *found = NULL;
    if (!done) {
      int status = write_some(session, &done, error);
      if (status) return status;
    }
    if (!reply_next(session, &found)) return hl__redis_gone(session, error);
    if (found) {
      *reply = found;
      return HL_OK;
    }
    int status = hl__socket_await(session->store->config, session->fd,
                                  (short)(done ? POLLIN : POLLIN | POLLOUT),
                                  interruptible ? &session->face->wakeup : NULL, deadline);
    if (status == HL_TIMEOUT) return hl__error(error, status, "the server has not answered yet");
    if (status == HL_CANCELLED) return hl__error(error, status, "the wait was cancelled");
    if (status) return hl__redis_gone(session, error);
  }
}

int hl__redis_command(hl__redis_session *session, int64_t deadline, size_t n,
                      const char *const *words, redisReply **reply, hl_error *error) {
  size_t sizes[8];
  redisReply *unread;
  bool reads = reply != NULL;
  if (!reads) reply = &unread;
  *reply = NULL;
  for (size_t i = 0; i < n; i++) sizes[i] = strlen(words[i]);
  int status = hl__redis_queue(session, n, words, sizes, error);
  if (status == HL_OK) status = hl__redis_await(session, deadline, false, reply, error);
  if (status == HL_TIMEOUT) status = hl__error(error, HL_ECONNECTION, "the server does not answer");
  if (status) return status;
  if ((*reply)->type == REDIS_REPLY_ERROR)
    status = hl__redis_error(session, (*reply)->str, error);
  else if (reads)
    return HL_OK;
  freeReplyObject(*reply);
  *reply = NULL;
  return status;
}

static int settle_one(hl__redis_session *session, int64_t deadline, hl_error *error) {
  while (session->outstanding > 0) {
    redisReply *reply;
    int status = hl__redis_await(session, deadline, false, &reply, error);
    if (status) return status;
    session->outstanding--;
    bool refused = reply->type == REDIS_REPLY_ERROR;
    if (refused) (void)hl__redis_error(session, reply->str, error);
    freeReplyObject(reply);
    /* The caller sends it again, on another connection. */
    if (refused) return hl__error_as(error, HL_ECONNECTION);
  }
  return HL_OK;
}

int hl__redis_settle(hl__redis_session *session, int64_t deadline, hl_error *error) {
  int status = settle_one(session, deadline, error);
  for (hl__list *at = session->links.next; status == HL_OK && at != &session->links; at = at->next)
    status = settle_one(HL__LIST_ENTRY(at, hl__redis_session, links), deadline, error);
  return status;
}

bool hl__redis_stands(hl__redis_session *session) {
  void *found = NULL;
  if (!read_some(session) || redisGetReplyFromReader(session->context, &found) != REDIS_OK)
    return false;
  if (!found) return true;
  freeReplyObject(found); /* nothing was asked: it says good-bye */
  return false;
}
