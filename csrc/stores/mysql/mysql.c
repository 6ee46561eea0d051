/*
 * mysql.c - the store's operations: the life of a session between lock and
 * ROLLBACK, and what errors mean. What is sent to lock rows is in statement.c.
 */
#include "mysql_store.h"

#include <errmsg.h>
#include <errno.h>
#include <mysqld_error.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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
  if (number == ER_TABLEACCESS_DENIED_ERROR)
    hint = " (MySQL wants SELECT and one of UPDATE, DELETE, LOCK TABLES)";
  else if (status == HL_ENOT_PROVISIONED)
    hint = "; run `hierlock provision`";
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
  if (number == ER_ACCESS_DENIED_ERROR || number == ER_DBACCESS_DENIED_ERROR)
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

/* Waits until the socket can be read: an answer, or the end of the connection.
   timeout in ms, HL_FOREVER without end. */
static bool readable(const hl__mysql_session *session, int64_t timeout) {
  struct pollfd p = {.fd = session->fd, .events = POLLIN};
  int64_t end = hl__deadline(hl__now_ms(), timeout);
  for (;;) {
    int64_t left = timeout ? hl__left_ms(end) : 0;
    int n = poll(&p, 1, left > INT32_MAX ? -1 : (int)left);
    if (n > 0) return true;
    if (n == 0 || errno != EINTR) return false;
  }
}

static int gone(hl_error *error) {
  return hl__error(error, HL_ECONNECTION,
                   "the connection has ended: it was killed, it did not hear "
                   "from us for hold_timeout, or the server or the network "
                   "went down");
}

static int send_query(hl__mysql_session *session, const char *sql, size_t size,
                      hl_error *error) {
  hl__sigpipe guard = hl__sigpipe_begin(session);
  bool failed =
      mysql_send_query(session->mysql, sql, (unsigned long)size) != 0;
  hl__sigpipe_end(guard);
  if (failed) return hl__mysql_error(session, NULL, "send to the server", error);
  session->outstanding = true;
  return HL_OK;
}

int hl__mysql_rollback_send(hl__mysql_session *session, hl_error *error) {
  return send_query(session, "ROLLBACK", 8, error);
}

int hl__mysql_settle(hl__mysql_session *session, int64_t deadline,
                     hl_error *error) {
  if (!session->outstanding) return HL_OK;
  if (!readable(session, deadline ? hl__left_ms(deadline) : 0))
    return hl__error(error, HL_TIMEOUT, "the server has not answered yet");
  hl__sigpipe guard = hl__sigpipe_begin(session);
  bool failed = mysql_read_query_result(session->mysql) != 0;
  hl__sigpipe_end(guard);
  session->outstanding = false;
  if (!failed) return HL_OK;
  /* Neither ROLLBACK nor a sign of life fails on a connection that stands. */
  (void)hl__mysql_error(session, NULL, "read the server's answer", error);
  if (error) error->status = HL_ECONNECTION;
  return HL_ECONNECTION;
}

int hl__mysql_query(hl__mysql_session *session, const char *sql, size_t size,
                    MYSQL_RES **result, hl_error *error) {
  hl__sigpipe guard = hl__sigpipe_begin(session);
  bool failed =
      mysql_real_query(session->mysql, sql, (unsigned long)size) != 0;
  *result = failed ? NULL : mysql_store_result(session->mysql);
  hl__sigpipe_end(guard);
  if (failed || (!*result && mysql_field_count(session->mysql)))
    return hl__mysql_error(session, NULL, "query the server", error);
  return HL_OK;
}

/* ---------------------------------------------------------- operations */

/* Whoever looks for holders has just waited in vain, and waits no longer for a
   server that hangs. */
#define LOOK_SETTLE_MS 250

static hl__mysql_session *session_of(hl_session *session) {
  return (hl__mysql_session *)session;
}

static void library_init(void) { (void)mysql_library_init(0, NULL, NULL); }

static int connect_verified(hl__mysql_store *store, int64_t deadline,
                            hl__mysql_session **session, hl_error *error) {
  int status = hl__mysql_connect(store, deadline, session, error);
  if (status == HL_OK) status = hl__mysql_verify(*session, error);
  if (status) {
    hl__mysql_disconnect(*session);
    *session = NULL;
  }
  return status;
}

static void store_forget(hl_store *base) {
  hl__mysql_store *store = (hl__mysql_store *)base;
  (void)pthread_mutex_destroy(&store->mutex);
  free(store);
}

static void store_close(hl_store *base) {
  hl__mysql_store *store = (hl__mysql_store *)base;
  hl__mysql_disconnect(store->spare);
  store_forget(base);
}

static int store_open(const hl_store_config *config, hl_store **result,
                      hl_error *error) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  (void)pthread_once(&once, library_init);
  hl__mysql_store *store = calloc(1, sizeof *store);
  if (!store) return hl__error_memory(error);
  store->base.ops = &hl_store_mysql;
  store->config = config;
  (void)pthread_mutex_init(&store->mutex, NULL);
  int status = hl__mysql_params(store, error);
  if (status == HL_OK)
    status = connect_verified(store, hl__now_ms() + store->connect_timeout,
                              &store->spare, error);
  if (status) {
    store_close(&store->base);
    return status;
  }
  *result = &store->base;
  return HL_OK;
}

static int session_open(hl_store *base, int64_t deadline, hl_session **result,
                        hl_error *error) {
  hl__mysql_store *store = (hl__mysql_store *)base;
  (void)pthread_mutex_lock(&store->mutex);
  hl__mysql_session *session = store->spare;
  store->spare = NULL;
  (void)pthread_mutex_unlock(&store->mutex);
  if (session && readable(session, 0)) { /* it has ended meanwhile */
    hl__mysql_disconnect(session);
    session = NULL;
  }
  int status = HL_OK;
  if (!session) status = connect_verified(store, deadline, &session, error);
  *result = session ? &session->base : NULL;
  return status;
}

static void session_close(hl_session *session) {
  hl__mysql_disconnect(session_of(session));
}

/* The descriptor is closed already, and its number may be in use again: the
   library's part stays allocated. */
static void session_forget(hl_session *session) { free(session); }

/* A client that goes away does not end its wait: the server looks at the socket
   only afterwards, and the dead waiter keeps what it has got. So the thread that
   was interrupted tells the server on another connection. */
static void kill_remote(hl__mysql_session *session) {
  hl__mysql_session *other;
  char sql[64];
  if (hl__mysql_connect(session->store, hl__now_ms() + 1000, &other, NULL))
    return;
  int n = snprintf(sql, sizeof sql, "KILL %lu",
                   mysql_thread_id(session->mysql));
  MYSQL_RES *none;
  (void)hl__mysql_query(other, sql, (size_t)n, &none, NULL);
  hl__mysql_disconnect(other);
}

static int lock(hl_session *base, const hl_request *request, hl_grant *grant,
                hl_error *error) {
  hl__mysql_session *session = session_of(base);
  int status = hl__mysql_settle(session, request->deadline, error);
  /* The answer to the last release is so late that there is no time left, and
     the connection cannot be used before it. */
  if (status == HL_TIMEOUT && !request->try_once) return status;
  if (status == HL_TIMEOUT)
    status = hl__mysql_settle(session, hl__now_ms() + 1000, error);
  if (status == HL_OK)
    status = hl__mysql_lock_rows(session, request, grant, error);
  /* After the deadline the server has ended the wait, or hangs. */
  if (status == HL_ECONNECTION && atomic_load(&session->interrupted) &&
      hl__left_ms(request->deadline) > 0)
    kill_remote(session);
  return status;
}

static int unlock(hl_session *base, hl_error *error) {
  hl__mysql_session *session = session_of(base);
  int status = hl__mysql_settle(session, 0, error);
  if (status == HL_TIMEOUT)
    return hl__error(error, HL_BUSY, "an earlier answer has not come yet");
  if (status) return status;
  return hl__mysql_rollback_send(session, error);
}

static int renew(hl_session *base, int64_t *sent_ms, hl_error *error) {
  hl__mysql_session *session = session_of(base);
  *sent_ms = hl__now_ms();
  return send_query(session, "DO 0", 4, error);
}

static int settle(hl_session *session, int64_t deadline, hl_error *error) {
  return hl__mysql_settle(session_of(session), deadline, error);
}

/* A server that ends a connection writes to it or closes it; nothing else makes
   it readable while no answer is awaited. */
static int look(hl_session *base, hl_error *error) {
  hl__mysql_session *session = session_of(base);
  if (session->outstanding || !readable(session, 0)) return HL_OK;
  return gone(error);
}

static void interrupt(hl_session *base) {
  hl__mysql_session *session = session_of(base);
  atomic_store(&session->interrupted, true);
  (void)shutdown(session->fd, SHUT_RDWR);
}

static int holders(hl_session *base, const hl_row *rows, size_t n,
                   hl_holder_fn fn, void *context, hl_error *error) {
  hl__mysql_session *session = session_of(base);
  int status = hl__mysql_settle(session, hl__now_ms() + LOOK_SETTLE_MS, error);
  if (status) return status;
  status = hl__mysql_holders(session, rows, n, fn, context, error);
  if (status != HL_ECONNECTION) {
    /* Looking, too, began a transaction. */
    int sent = hl__mysql_rollback_send(session, NULL);
    if (sent && status == HL_OK) status = gone(error);
  }
  return status;
}

const hl_store_ops hl_store_mysql = {
    .abi = HL_STORE_ABI,
    .scheme = "mysql",
    .connects = true,
    .open = store_open,
    .close = store_close,
    .forget = store_forget,
    .session_open = session_open,
    .session_close = session_close,
    .session_forget = session_forget,
    .lock = lock,
    .unlock = unlock,
    .settle = settle,
    .renew = renew,
    .look = look,
    .interrupt = interrupt,
    .holders = holders,
};
