/*
 * wire.c - a session's connection: sending, waiting for an answer, reading it,
 * and what the client library's errors mean. Knows no locks.
 */
#include "mysql_store.h"

#include <errmsg.h>
#include <errno.h>
#include <mysqld_error.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>

/* -------------------------------------------------------------- errors */

/* Numbers that one of the two headers does not name. */
enum {
  NUMBER_NORMAL_SHUTDOWN = 1077,   /* until MySQL 5.7, MariaDB */
  NUMBER_STATEMENT_TIMEOUT = 1969, /* MariaDB: max_statement_time */
  NUMBER_QUERY_TIMEOUT = 3024,     /* MySQL: max_execution_time */
  NUMBER_NOWAIT = 3572,            /* MySQL: NOWAIT */
  NUMBER_CONNECTION_KILLED = 1927, /* MariaDB */
  NUMBER_IDLE_CLOSED = 4031,       /* MySQL: wait_timeout */
  NUMBER_READ_ONLY = 1290,         /* ER_OPTION_PREVENTS_STATEMENT */
};

/* The client library's own numbers: no server has spoken. */
static bool is_client_error(unsigned number) {
#ifdef HL_CONNECTOR_C
  if (number >= 5000 && number < 6000) return true;
#endif
  return number >= CR_MIN_ERROR && number <= CR_MAX_ERROR;
}

static int status_of(unsigned number) {
  if (is_client_error(number)) return HL_ECONNECTION;
  switch (number) {
  case ER_LOCK_WAIT_TIMEOUT:
  case NUMBER_QUERY_TIMEOUT:
  case NUMBER_STATEMENT_TIMEOUT:
  case NUMBER_NOWAIT:
    return HL_TIMEOUT;
  case ER_QUERY_INTERRUPTED:
    return HL_CANCELLED;
  case ER_LOCK_DEADLOCK:
    return HL_DEADLOCK;
  case ER_NO_SUCH_TABLE:
    return HL_ENOT_PROVISIONED;
  case NUMBER_READ_ONLY:
    return HL_EUNSAFE_SERVER;
  case ER_ACCESS_DENIED_ERROR:
  case ER_DBACCESS_DENIED_ERROR:
  case ER_CON_COUNT_ERROR:
  case ER_TOO_MANY_USER_CONNECTIONS:
  case ER_HOST_IS_BLOCKED:
  case ER_HOST_NOT_PRIVILEGED:
  case ER_SERVER_SHUTDOWN:
  case NUMBER_NORMAL_SHUTDOWN:
  case ER_NET_READ_ERROR:
  case ER_NET_READ_INTERRUPTED:
  case ER_NET_ERROR_ON_WRITE:
  case NUMBER_CONNECTION_KILLED:
  case NUMBER_IDLE_CLOSED:
    return HL_ECONNECTION;
  default:
    return HL_ESTORE;
  }
}

int hl__mysql_error(hl__mysql_session *session, MYSQL_STMT *statement,
                    const char *doing, hl_error *error) {
  unsigned number =
      statement ? mysql_stmt_errno(statement) : mysql_errno(session->mysql);
  int status = status_of(number);
  if (!error) return status;
  char state[6] = "";
  const char *sqlstate = statement ? mysql_stmt_sqlstate(statement)
                                   : mysql_sqlstate(session->mysql);
  (void)snprintf(state, sizeof state, "%s", sqlstate);
  const char *hint = "";
  /* Without a layout it takes no locks: connection.c. */
  if (number == ER_TABLEACCESS_DENIED_ERROR && session->store->config->layout)
    hint = " (MySQL wants SELECT and one of UPDATE, DELETE, LOCK TABLES)";
  else if (status == HL_ENOT_PROVISIONED)
    hint = "; run `hierlock provision`";
  else if (number == CR_AUTH_PLUGIN_CANNOT_LOAD)
    hint = " (the client library that hierlock was built with cannot log in "
           "in this user's way)";
  (void)hl__error(error, status, "cannot %s: %s%s", doing,
                  statement ? mysql_stmt_error(statement)
                            : mysql_error(session->mysql),
                  hint);
  if (status == HL_EUNSAFE_SERVER)
    (void)hl__error(error, status,
                    "the server is read-only: locks there protect nothing; "
                    "connect to the primary");
  if (!is_client_error(number)) {
    error->server_errno = number;
    memcpy(error->sqlstate, state, sizeof state);
  }
  /* Wrong credentials stay wrong. */
  if (number == ER_ACCESS_DENIED_ERROR || number == ER_DBACCESS_DENIED_ERROR ||
      number == CR_AUTH_PLUGIN_CANNOT_LOAD)
    error->retryable = false;
  return status;
}

hl__sigpipe hl__sigpipe_begin(const hl__mysql_session *session) {
  hl__sigpipe guard = {.guarded = session->tls};
  if (guard.guarded) {
    sigset_t pipe, pending;
    (void)sigpending(&pending);
    guard.was_pending = sigismember(&pending, SIGPIPE);
    (void)sigemptyset(&pipe);
    (void)sigaddset(&pipe, SIGPIPE);
    (void)pthread_sigmask(SIG_BLOCK, &pipe, &guard.before);
  }
  return guard;
}

void hl__sigpipe_end(hl__sigpipe guard) {
  if (!guard.guarded) return;
  sigset_t pipe, pending;
  (void)sigpending(&pending);
  if (sigismember(&pending, SIGPIPE) && !guard.was_pending) {
    static const struct timespec at_once = {0, 0};
    (void)sigemptyset(&pipe);
    (void)sigaddset(&pipe, SIGPIPE);
    (void)sigtimedwait(&pipe, NULL, &at_once);
  }
  (void)pthread_sigmask(SIG_SETMASK, &guard.before, NULL);
}

/* ------------------------------------------- sending and reading answers */

bool hl__mysql_readable(const hl__mysql_session *session) {
  struct pollfd p = {.fd = session->fd, .events = POLLIN};
  int n;
  do
    n = poll(&p, 1, 0);
  while (n < 0 && errno == EINTR);
  return n > 0;
}

/* While only a part of an answer has come, the socket is readable all the time:
   it is looked at again after so long. */
#define PART_NS 2000000L

/* How many bytes the unit that begins with these has: a packet of the protocol, or a
   record of TLS. 0: its header is not complete. */
static size_t unit_size(const hl__mysql_session *session,
                        const unsigned char *head, size_t n) {
  if (session->tls)
    return n < 5 ? 0 : 5 + ((size_t)head[3] << 8 | head[4]);
  size_t header = session->mysql->net.compress ? 7 : 4;
  return n < header
             ? 0
             : header + ((size_t)head[2] << 16 | (size_t)head[1] << 8 | head[0]);
}

/* Whether the library can read an answer's first packet and need not wait. Both
   libraries read until they have a whole packet, and wait for the rest of it for
   as long as the connection lasts; so they are only let at a packet that is in the
   socket's buffer as a whole. What they have read they have used up: nothing of
   the next answer is in a buffer of theirs.
   Under TLS the packet cannot be seen, but a record can, and the library
   decrypts whole records. Servers write a packet that is as small as the answers
   to ROLLBACK and to signs of life as one record, and nobody on the way can take
   a record apart. (The other end of the TLS could. It is trusted: it could as well
   grant everything to everybody.)
   ended: nothing more will come. */
static bool answer_complete(const hl__mysql_session *session, bool ended) {
  unsigned char head[7];
  int waiting = 0;
  ssize_t n = recv(session->fd, head, sizeof head, MSG_PEEK | MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (n <= 0 || ended) return true; /* reading fails at once */
  size_t size = unit_size(session, head, (size_t)n);
  return size > 0 && ioctl(session->fd, FIONREAD, &waiting) == 0 &&
         (size_t)waiting >= size;
}

void hl__mysql_wait_begin(const hl__mysql_store *store) {
  if (store->config->wait_begin) store->config->wait_begin();
}

void hl__mysql_wait_end(const hl__mysql_store *store) {
  if (store->config->wait_end) store->config->wait_end();
}

bool hl__mysql_answer_await(const hl__mysql_session *session,
                            int64_t deadline) {
  struct pollfd p = {.fd = session->fd, .events = POLLIN | POLLRDHUP};
  for (;;) {
    int64_t left = deadline ? hl__left_ms(deadline) : 0;
    /* Without a wait it may be called with a mutex. */
    if (left) hl__mysql_wait_begin(session->store);
    int n = poll(&p, 1, left > INT32_MAX ? -1 : (int)left);
    int failure = errno;
    if (left) hl__mysql_wait_end(session->store);
    if (n < 0 && failure == EINTR) continue;
    if (n <= 0) return false;
    if (answer_complete(session, p.revents & ~POLLIN)) return true;
    if (left == 0) return false;
    const struct timespec part = {.tv_nsec = PART_NS};
    (void)nanosleep(&part, NULL);
  }
}

int hl__mysql_gone(hl_error *error) {
  return hl__error(error, HL_ECONNECTION,
                   "the connection has ended: it was killed, it did not hear "
                   "from us for hold_timeout, or the server or the network "
                   "went down");
}

int hl__mysql_send(hl__mysql_session *session, const char *sql, size_t size,
                   hl_error *error) {
  hl__sigpipe guard = hl__sigpipe_begin(session);
  bool failed =
      mysql_send_query(session->mysql, sql, (unsigned long)size) != 0;
  hl__sigpipe_end(guard);
  if (failed) return hl__mysql_error(session, NULL, "send to the server", error);
  session->outstanding = true;
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
  hl__sigpipe_end(guard);
  session->outstanding = false;
  return !failed;
}

int hl__mysql_settle(hl__mysql_session *session, int64_t deadline,
                     hl_error *error) {
  if (!session->outstanding) return HL_OK;
  bool read = true;
  while (session->outstanding) {
    if (!hl__mysql_answer_await(session, deadline))
      return hl__error(error, HL_TIMEOUT, "the server has not answered yet");
    read = answer_read(session);
    unsigned number = read ? 0 : mysql_errno(session->mysql);
    if (number != ER_QUERY_INTERRUPTED && number != NUMBER_STATEMENT_TIMEOUT)
      continue;
    /* Somebody's KILL QUERY, or on MariaDB the limit that a very short wait has left;
       they end a statement and not the transaction. So it
       is said again: a sign of life, or what gives everything back. */
    int status = session->holds
                     ? hl__mysql_send(session, "DO 0", 4, error)
                     : hl__mysql_rollback_send(session, error);
    if (status) return status;
    read = true;
  }
  if (!read) {
    /* Neither ROLLBACK nor a sign of life fails on a connection that stands. */
    (void)hl__mysql_error(session, NULL, "read the server's answer", error);
    if (error) error->status = HL_ECONNECTION;
    return HL_ECONNECTION;
  }
  /* Some errors end the whole transaction (MariaDB with
     innodb_rollback_on_timeout, a full lock table), and others may. */
  if (session->tells_transaction &&
      !(session->mysql->server_status & SERVER_STATUS_IN_TRANS))
    return hl__error(error, HL_ECONNECTION,
                     "the server has rolled the transaction back");
  return HL_OK;
}

int hl__mysql_query(hl__mysql_session *session, const char *sql, size_t size,
                    MYSQL_RES **result, hl_error *error) {
  *result = NULL;
  int status = hl__mysql_send(session, sql, size, error);
  if (status) return status;
  if (!hl__mysql_answer_await(session, session->patience))
    return hl__error(error, HL_ECONNECTION,
                     "the server did not answer in time");
  session->outstanding = false;
  hl__sigpipe guard = hl__sigpipe_begin(session);
  bool failed = mysql_read_query_result(session->mysql) != 0;
  *result = failed ? NULL : mysql_store_result(session->mysql);
  hl__sigpipe_end(guard);
  if (failed || (!*result && mysql_field_count(session->mysql)))
    return hl__mysql_error(session, NULL, "query the server", error);
  return HL_OK;
}
