/*
 * wire.c - a session's connection: sending, waiting for an answer, reading it,
 * and what the client library's errors mean. Knows no locks.
 */
#include "mysql_store.h"

#include <errmsg.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* -------------------------------------------------------------- errors */

/* The client library's own numbers: no server has spoken. */
static bool is_client_error(unsigned number) {
#ifdef HL_CONNECTOR_C
  if (number >= 5000 && number < 6000) return true;
#endif
  return number >= CR_MIN_ERROR && number <= CR_MAX_ERROR;
}

int hl__mysql_error(hl__mysql_session *session, MYSQL_STMT *statement, const char *doing,
                    hl_error *error) {
  /* An error behind the first row of a prepared statement is the connection's, with
     Connector/C. */
  if (statement && mysql_stmt_errno(statement) == 0) statement = NULL;
  unsigned number = statement ? mysql_stmt_errno(statement) : mysql_errno(session->mysql);
  const char *said = statement ? mysql_stmt_error(statement) : mysql_error(session->mysql);
  char advice[HL__MYSQL_HINT_MAX] = "";
  int status = is_client_error(number)
                   ? HL_ECONNECTION
                   : hl__mysql_error_judge(number, said, false, advice, sizeof advice);
  if (!error) return status;
  char state[6] = "";
  const char *sqlstate =
      statement ? mysql_stmt_sqlstate(statement) : mysql_sqlstate(session->mysql);
  (void)snprintf(state, sizeof state, "%s", sqlstate);
  const char *hint = advice;
  if (number == CR_AUTH_PLUGIN_CANNOT_LOAD)
    hint = " (the client library that hierlock was built with cannot log in in this user's way)";
  (void)hl__error(error, status, "cannot %s: %s%s", doing, said, hint);
#ifdef CR_PLUGIN_NOT_ALLOWED
  /* Connector/C takes the plugin's name for this message from a buffer that it has used again
     since, for the log-in. */
  if (number == CR_PLUGIN_NOT_ALLOWED)
    (void)hl__error(error, status,
                    "cannot %s: the server asks for the password in a way that "
                    "is not allowed, as in clear text without TLS",
                    doing);
#endif
  if (status == HL_EUNSAFE_SERVER)
    (void)hl__error(error, status,
                    "the server is read-only: locks there protect nothing; connect to the primary");
  if (!is_client_error(number)) {
    error->server_errno = number;
    memcpy(error->sqlstate, state, sizeof state);
  }
  /* Wrong credentials stay wrong. */
  if (hl__mysql_error_is(number, HL__MYSQL_DENIED) || number == CR_AUTH_PLUGIN_CANNOT_LOAD)
    error->retryable = false;
#ifdef CR_PLUGIN_NOT_ALLOWED
  if (number == CR_PLUGIN_NOT_ALLOWED) error->retryable = false;
#endif
  return status;
}

hl__sigpipe hl__sigpipe_begin(const hl__mysql_session *session) {
  hl__sigpipe guard = {.guarded = session->tls};
  if (!guard.guarded) return guard;
  /* The end of a connection may leave an error in the thread's queue. OpenSSL would take it for
     an error of the next connection that has to wait. */
  if (ERR_clear_error) ERR_clear_error();
  sigset_t pipe, pending;
  (void)sigemptyset(&pipe);
  (void)sigaddset(&pipe, SIGPIPE);
  (void)pthread_sigmask(SIG_BLOCK, &pipe, &guard.before);
  guard.was_blocked = sigismember(&guard.before, SIGPIPE);
  if (guard.was_blocked) { /* else it cannot be pending here */
    (void)sigpending(&pending);
    guard.was_pending = sigismember(&pending, SIGPIPE);
  }
  return guard;
}

void hl__sigpipe_end(hl__sigpipe guard, bool failed) {
  if (!guard.guarded) return;
  sigset_t pipe, pending;
  if (failed && !guard.was_pending) {
    static const struct timespec at_once = {0, 0};
    (void)sigpending(&pending);
    (void)sigemptyset(&pipe);
    (void)sigaddset(&pipe, SIGPIPE);
    if (sigismember(&pending, SIGPIPE)) (void)sigtimedwait(&pipe, NULL, &at_once);
  }
  if (!guard.was_blocked) (void)pthread_sigmask(SIG_SETMASK, &guard.before, NULL);
}

/* ------------------------------------------- sending and reading answers */

bool hl__mysql_readable(const hl__mysql_session *session) {
  struct pollfd p = {.fd = session->fd, .events = POLLIN};
  return hl__poll(session->store->config, &p, 1, 0) > 0;
}

/* While only a part of an answer has come, the socket stays readable. Without a descriptor that
   tells of the next part, we look again after this time. */
#define PART_NS 2000000L

/* The size of the unit that begins with these bytes: a packet of the protocol, or a record of
   TLS. 0: its header is not complete. */
static size_t unit_size(const hl__mysql_session *session, const unsigned char *head, size_t n) {
  if (session->tls) return n < 5 ? 0 : 5 + ((size_t)head[3] << 8 | head[4]);
  size_t header = session->mysql->net.compress ? 7 : 4;
  return n < header ? 0 : header + ((size_t)head[2] << 16 | (size_t)head[1] << 8 | head[0]);
}

/* Whether the library can read the first packet of each outstanding answer without waiting. Both
   libraries read until they have a whole packet, and wait for the rest as long as the connection
   lasts. So we let them at a packet only when the socket's buffer has all of it. The libraries use
   up all that they have read: their buffers hold nothing of the next answer.

   Under TLS we cannot see packets, but we can see records, and the library decrypts whole
   records. A server writes a packet as small as the answer to ROLLBACK, or to a sign of life, as
   one record, and no machine on the way can take a record apart. (The other end of the TLS
   could. We trust it: it could as well grant everything to every client.) ended: the connection
   brings nothing more. */
#define PEEKED 1024
static bool answer_complete(const hl__mysql_session *session, bool ended) {
  unsigned char head[PEEKED];
  int waiting = 0;
  size_t peeked = session->answers > 1 ? sizeof head : 7;
  ssize_t n = recv(session->fd, head, peeked, MSG_PEEK | MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (n <= 0 || ended) return true; /* reading fails at once */
  bool plain = !session->tls && !session->mysql->net.compress;
  size_t at = 0;
  for (unsigned left = session->answers;; left--) {
    size_t size = at < (size_t)n ? unit_size(session, head + at, (size_t)n - at) : 0;
    if (size == 0) return false;
    /* Behind an error there are no more answers. */
    bool failed = plain && at + 4 < (size_t)n && head[at + 4] == 0xff;
    at += size;
    if (left <= 1 || failed) break;
  }
  return ioctl(session->fd, FIONREAD, &waiting) == 0 && (size_t)waiting >= at;
}

/* A descriptor that tells of each part that comes, as it is triggered by edges. -1: none. A
   forked child may keep the descriptor: it does not keep the connection open. */
static int parts_open(int fd) {
  struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET};
  int parts = epoll_create1(EPOLL_CLOEXEC);
  if (parts < 0 || epoll_ctl(parts, EPOLL_CTL_ADD, fd, &event) == 0) return parts;
  (void)close(parts);
  return -1;
}

/* Waits until the deadline (hl__now_ms; 0: not at all) for the first packet of an answer, or the
   end of the connection. True: the client library reads it without waiting. The answers to several
   statements come one by one, as those to a DELETE of a lease and to its COMMIT. So the wait for
   the next part must not last longer than the part takes. */
static bool answer_await(const hl__mysql_session *session, int64_t deadline) {
  struct pollfd p = {.fd = session->fd, .events = POLLIN | POLLRDHUP};
  int parts = -1;
  bool complete = false;
  while (hl__poll(session->store->config, &p, 1, deadline) > 0) {
    struct epoll_event event = {0};
    if (parts >= 0) (void)epoll_wait(parts, &event, 1, 0);
    bool ended = parts < 0 ? p.revents & ~POLLIN : (event.events & ~(uint32_t)EPOLLIN) != 0;
    complete = answer_complete(session, ended);
    if (complete || hl__left_ms(deadline) == 0) break;
    if (parts < 0) parts = parts_open(session->fd);
    if (parts >= 0) {
      p.fd = parts;
      continue;
    }
    const struct timespec part = {.tv_nsec = PART_NS};
    (void)nanosleep(&part, NULL);
  }
  if (parts >= 0) (void)close(parts);
  return complete;
}

int hl__mysql_gone(hl_error *error) {
  return hl__error(error, HL_ECONNECTION,
                   "the connection has ended: it was killed, it did not hear from us for "
                   "hold_timeout, or the server or the network went down");
}

int hl__mysql_send(hl__mysql_session *session, const char *sql, size_t size, hl_error *error) {
  hl__sigpipe guard = hl__sigpipe_begin(session);
  bool failed = mysql_send_query(session->mysql, sql, (unsigned long)size) != 0;
  hl__sigpipe_end(guard, failed);
  if (failed) return hl__mysql_error(session, NULL, "send to the server", error);
  session->outstanding = true;
  session->answers = 1;
  session->tells_transaction = session->holds;
  return HL_OK;
}

int hl__mysql_rollback_send(hl__mysql_session *session, hl_error *error) {
  session->holds = false;
  return hl__mysql_send(session, "ROLLBACK", 8, error);
}

/* Reads the answer, which has come. */
static bool answer_read(hl__mysql_session *session) {
  hl__sigpipe guard = hl__sigpipe_begin(session);
  bool failed = mysql_read_query_result(session->mysql) != 0;
  while (!failed && mysql_more_results(session->mysql))
    failed = mysql_next_result(session->mysql) > 0;
  hl__sigpipe_end(guard, failed);
  session->outstanding = false;
  return !failed;
}

int hl__mysql_settle(hl__mysql_session *session, int64_t deadline, hl_error *error) {
  if (!session->outstanding) return HL_OK;
  bool read = true;
  while (session->outstanding) {
    if (!answer_await(session, deadline))
      return hl__error(error, HL_TIMEOUT, "the server has not answered yet");
    read = answer_read(session);
    unsigned number = read ? 0 : mysql_errno(session->mysql);
    if (!hl__mysql_error_is(number, HL__MYSQL_CUT)) continue;
    /* A KILL QUERY, or on MariaDB the limit that a very short wait has left, ends a statement
       and not the transaction. So we send again: a sign of life, or the ROLLBACK. */
    int status = session->holds ? hl__mysql_send(session, "DO 0", 4, error)
                                : hl__mysql_rollback_send(session, error);
    if (status) return status;
    read = true;
  }
  if (!read) {
    /* ROLLBACK and signs of life do not fail on a connection that stands. */
    (void)hl__mysql_error(session, NULL, "read the server's answer", error);
    return hl__error_as(error, HL_ECONNECTION);
  }
  /* Some errors end the whole transaction (MariaDB with
     innodb_rollback_on_timeout, a full lock table), and others may. */
  if (session->tells_transaction && !(session->mysql->server_status & SERVER_STATUS_IN_TRANS))
    return hl__error(error, HL_ECONNECTION, "the server has rolled the transaction back");
  return HL_OK;
}

int hl__mysql_settle_late(hl__mysql_session *session, int64_t deadline, const char *late,
                          hl_error *error) {
  int status = hl__mysql_settle(session, deadline, error);
  return status == HL_TIMEOUT ? hl__error(error, HL_ECONNECTION, "%s", late) : status;
}

/* Frees the text. */
static int text_send(hl__mysql_session *session, hl__text *t, hl_error *error) {
  int status =
      t->failed ? hl__error_memory(error) : hl__mysql_send(session, t->data, t->used, error);
  free(t->data);
  return status;
}

/* A SELECT with a limit of its own: see hl__mysql_query. */
static int query_send(hl__mysql_session *session, const char *sql, size_t size, hl_error *error) {
  static const char select[] = "SELECT";
  size_t verb = sizeof select - 1;
  hl__text t = {0};
  if (size < verb || memcmp(sql, select, verb) != 0)
    return hl__mysql_send(session, sql, size, error);
  long long left = hl__left_ms(session->patience);
  left = left / 2 > HL__MYSQL_ANSWER_MS ? left - HL__MYSQL_ANSWER_MS : left / 2 + 1;
  if (session->dialect == HL_MARIADB) {
    hl__text_put(&t, "SET STATEMENT max_statement_time=%lld.%03lld FOR ", left / 1000, left % 1000);
    verb = 0;
  } else {
    hl__text_put(&t, "SELECT /*+ MAX_EXECUTION_TIME(%lld) */", left);
  }
  hl__text_add(&t, sql + verb, size - verb);
  return text_send(session, &t, error);
}

int hl__mysql_query(hl__mysql_session *session, const char *sql, size_t size, MYSQL_RES **result,
                    hl_error *error) {
  *result = NULL;
  int status = query_send(session, sql, size, error);
  if (status) return status;
  if (!answer_await(session, session->patience))
    return hl__error(error, HL_ECONNECTION, HL__MYSQL_LATE);
  session->outstanding = false;
  hl__sigpipe guard = hl__sigpipe_begin(session);
  bool failed = mysql_read_query_result(session->mysql) != 0;
  *result = failed ? NULL : mysql_store_result(session->mysql);
  hl__sigpipe_end(guard, failed || !*result);
  if (failed || (!*result && mysql_field_count(session->mysql)))
    return hl__mysql_error(session, NULL, "query the server", error);
  return HL_OK;
}

int hl__mysql_ask(hl__mysql_session *session, hl__text *t, MYSQL_RES **result, hl_error *error) {
  *result = NULL;
  int status = t->failed ? hl__error_memory(error)
                         : hl__mysql_query(session, t->data, t->used, result, error);
  free(t->data);
  return status;
}

/* The limits in whole seconds are a second net behind the exact one. */
#define NET_SECONDS 2

int hl__mysql_limits(const hl__mysql_session *session, int64_t wait, char *out, size_t size) {
  long long ms = wait, seconds = (wait + 999) / 1000 + NET_SECONDS;
  char exact[64];
  if (session->dialect == HL_MARIADB)
    (void)snprintf(exact, sizeof exact, "max_statement_time=%lld.%03lld", ms / 1000, ms % 1000);
  else
    (void)snprintf(exact, sizeof exact, "max_execution_time=%lld", ms);
  return snprintf(out, size, "%s,innodb_lock_wait_timeout=%lld,lock_wait_timeout=%lld", exact,
                  seconds, seconds);
}

/* A limit left from a short wait would end any statement on MariaDB, and a SELECT among the
   commands on MySQL. */
#define COMMAND_MS 10000
#define SELECT_MS 1000
static bool limits_do(const hl__mysql_session *session) {
  return session->wait >= (session->dialect == HL_MARIADB ? COMMAND_MS : SELECT_MS) &&
         (session->briefly || !session->brief);
}

unsigned hl__mysql_brief_begin(hl__mysql_session *session, hl__text *t) {
  session->briefly = true;
  if (session->brief && limits_do(session)) return 0;
  hl__text_put(t, "SET SESSION innodb_lock_wait_timeout=1,lock_wait_timeout=1;");
  return 1;
}

void hl__mysql_brief_end(hl__mysql_session *session, int status) {
  session->briefly = false;
  session->brief = status == HL_OK;
  if (status) session->wait = 0; /* not known */
}

static int commands_send(hl__mysql_session *session, const char *sql, size_t size, unsigned *n,
                         hl_error *error) {
  if (limits_do(session)) return hl__mysql_send(session, sql, size, error);
  hl__text t = {0};
  char limits[160];
  (void)hl__mysql_limits(session, COMMAND_MS, limits, sizeof limits);
  hl__text_put(&t, "SET SESSION %s;", limits);
  hl__text_add(&t, sql, size);
  (*n)++;
  session->wait = 0; /* not known, until it has succeeded */
  return text_send(session, &t, error);
}

int hl__mysql_commands_send(hl__mysql_session *session, hl__text *t, unsigned n, hl_error *error) {
  int status =
      t->failed ? hl__error_memory(error) : commands_send(session, t->data, t->used, &n, error);
  if (status == HL_OK) session->answers = n;
  free(t->data);
  return status;
}

int hl__mysql_commands(hl__mysql_session *session, const char *sql, size_t size, unsigned n,
                       uint64_t *affected, hl_error *error) {
  MYSQL *mysql = session->mysql;
  /* Where we cannot tell an error from an answer, we wait for the first answer only. */
  bool plain = !session->tls && !mysql->net.compress;
  unsigned sent = n;
  session->number = 0;
  int status = commands_send(session, sql, size, &sent, error);
  if (status) return status;
  if (plain) session->answers = sent;
  if (!answer_await(session, session->patience))
    return hl__error(error, HL_ECONNECTION, HL__MYSQL_LATE);
  session->outstanding = false;
  hl__sigpipe guard = hl__sigpipe_begin(session);
  bool failed = mysql_read_query_result(mysql) != 0;
  if (!failed && sent > n) {
    session->wait = COMMAND_MS;
    session->brief = false;
    failed = mysql_next_result(mysql) != 0;
  }
  for (unsigned i = 0; !failed; i++) {
    affected[i] = mysql_affected_rows(mysql);
    uint64_t number = mysql_insert_id(mysql);
    if (number) session->number = number;
    if (i + 1 == n) break;
    failed = mysql_next_result(mysql) != 0;
  }
  hl__sigpipe_end(guard, failed);
  if (failed && mysql_errno(mysql) == 0) /* a KILL QUERY between two of them */
    return hl__error(error, HL_CANCELLED, "an administrator has ended the request");
  return failed ? hl__mysql_error(session, NULL, "query the server", error) : HL_OK;
}

MYSQL_ROW hl__mysql_row(MYSQL_RES *result, unsigned columns) {
  return result && mysql_num_fields(result) >= columns ? mysql_fetch_row(result) : NULL;
}
