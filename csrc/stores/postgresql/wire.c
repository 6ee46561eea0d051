/*
 * wire.c - a session's connection: sending, awaiting and reading answers, and the meaning of
 * errors. Knows no locks.
 *
 * The connection never blocks: libpq only reads data that has come, and we wait with poll() for the
 * socket and for the session's wake-up (an eventfd).
 */
#include "postgresql_store.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

/* -------------------------------------------------------------- errors */

/* What the SQLSTATEs mean that begin so: the first row that fits counts. */
static const struct state {
  const char *begins;
  int status;
  unsigned traits;
} states[] = {
    {"55P03", HL_TIMEOUT, 0},              /* lock_not_available */
    {"57014", HL_CANCELLED, 0},            /* query_canceled */
    {"40P01", HL_DEADLOCK, 0},             /* deadlock_detected */
    {"25006", HL_EUNSAFE_SERVER, 0},       /* read_only_sql_transaction */
    {"08", HL_ECONNECTION, 0},             /* connection_exception */
    {"25P02", HL_ECONNECTION, 0},          /* in_failed_sql_transaction: the locks are gone */
    {"25P03", HL_ECONNECTION, 0},          /* idle_in_transaction_session_timeout */
    {"25P04", HL_ECONNECTION, 0},          /* transaction_timeout */
    {"28", HL_ECONNECTION, HL__PG_DENIES}, /* refused credentials */
    {"53300", HL_ECONNECTION, 0},          /* too_many_connections */
    {"57P", HL_ECONNECTION, 0},            /* shutdown, and idle_session_timeout */
    {"42501", HL_ESTORE, HL__PG_DENIES | HL__PG_OBJECT}, /* insufficient_privilege */
    {"42", HL_ESTORE, HL__PG_OBJECT},  /* undefined and ambiguous objects, types */
    {"0A000", HL_ESTORE, HL__PG_PLAN}, /* the plan's result has other types */
    {"XX000", HL_ESTORE, HL__PG_PLAN}, /* what was planned for is not there */
    {"", HL_ESTORE, 0},
};

static const struct state *find(const char *state) {
  const struct state *row = states;
  while (strncmp(state, row->begins, strlen(row->begins)) != 0) row++;
  return row;
}

bool hl__pg_state_is(const char *state, unsigned traits) { return find(state)->traits & traits; }

int hl__pg_error_state(const char *state, const char *message, const char *doing, hl_error *error) {
  /* Without a state the error is libpq's own, not the server's. */
  int status = *state ? find(state)->status : HL_ECONNECTION;
  if (!error) return status;
  const char *hint = "";
  if (strcmp(state, "53200") == 0)
    hint = " (all sessions of the server share one table of locks: raise "
           "max_locks_per_transaction)";
  /* libpq ends its messages with a line feed. */
  int size = (int)strcspn(message, "\n");
  (void)hl__error(error, status, "cannot %s: %.*s%s", doing, size, message, hint);
  (void)snprintf(error->sqlstate, sizeof error->sqlstate, "%.5s", state);
  if (hl__pg_state_is(state, HL__PG_DENIES)) error->retryable = false;
  return status;
}

int hl__pg_error(const hl__pg_session *session, const PGresult *result, const char *doing,
                 hl_error *error) {
  const char *state = NULL, *message = NULL;
  if (result) {
    state = PQresultErrorField(result, PG_DIAG_SQLSTATE);
    message = PQresultErrorField(result, PG_DIAG_MESSAGE_PRIMARY);
    if (!message) message = PQresultErrorMessage(result);
  }
  if (!message || !*message) message = PQerrorMessage(session->connection);
  int status = hl__pg_error_state(state ? state : "", message, doing, error);
  /* The server has also ended the connection. */
  if (PQstatus(session->connection) == CONNECTION_BAD && status != HL_ECONNECTION) {
    if (error) error->retryable = true;
    status = hl__error_as(error, HL_ECONNECTION);
  }
  return status;
}

int hl__pg_gone(const hl__pg_session *session, hl_error *error) {
  if (session->ended) {
    (void)hl__pg_error_state(session->ended_state, session->ended_message, "go on", error);
    return hl__error_as(error, HL_ECONNECTION);
  }
  return hl__error(error, HL_ECONNECTION,
                   "the connection has ended: it was ended by an administrator, it did not hear "
                   "from us for hold_timeout, or the server or the network went down");
}

/* Keeps why the server ends an idle connection. */
void hl__pg_notice(void *argument, const PGresult *result) {
  hl__pg_session *session = argument;
  const char *severity = PQresultErrorField(result, PG_DIAG_SEVERITY_NONLOCALIZED);
  const char *state = PQresultErrorField(result, PG_DIAG_SQLSTATE);
  const char *message = PQresultErrorField(result, PG_DIAG_MESSAGE_PRIMARY);
  if (!severity || (strcmp(severity, "FATAL") != 0 && strcmp(severity, "PANIC") != 0)) return;
  session->ended = true;
  (void)snprintf(session->ended_state, sizeof session->ended_state, "%.5s", state ? state : "");
  (void)snprintf(session->ended_message, sizeof session->ended_message, "%s",
                 message ? message : "");
}

/* ------------------------------------------------------------- waiting */

bool hl__pg_readable(const hl__pg_session *session) {
  struct pollfd p = {.fd = session->fd, .events = POLLIN};
  int n;
  do n = poll(&p, 1, 0);
  while (n < 0 && errno == EINTR);
  return n > 0;
}

/* A server may announce a changed setting at any time. The connection is gone only when the server
   ends it. */
bool hl__pg_stands(hl__pg_session *session) {
  PGconn *connection = session->connection;
  if (session->ended || PQstatus(connection) != CONNECTION_OK) return false;
  if (!hl__pg_readable(session)) return true;
  bool read = PQconsumeInput(connection) != 0;
  (void)PQisBusy(connection); /* parses the bytes */
  return read && !session->ended && PQstatus(connection) == CONNECTION_OK;
}

/* Waits for data (HL_OK), for the deadline, or for an interruption. */
static int wait_for_server(hl__pg_session *session, bool flushed, int64_t deadline,
                           bool interruptible) {
  atomic_store(&session->in_hand, false);
  int status = hl__socket_await(session->store->config, session->fd,
                                (short)(flushed ? POLLIN : POLLIN | POLLOUT),
                                interruptible ? &session->wakeup : NULL, deadline);
  if (status == HL_OK) atomic_store(&session->in_hand, true);
  return status;
}

/* How often to read on when an answer is late, as the rest of it may have come. */
#define LATE_READS 16

/* Whether to read on. While a server never stops sending, poll() never times out or reports the
   wake-up. */
static int lateness(const hl__pg_session *session, int64_t deadline, bool interruptible,
                    unsigned *reads) {
  bool rung = interruptible && atomic_load(&session->wakeup.interrupted);
  bool over = !deadline || hl__left_ms(deadline) == 0;
  if ((!rung && !over) || ++*reads <= LATE_READS) return HL_OK;
  return rung ? HL_CANCELLED : HL_TIMEOUT;
}

/* ------------------------------------------- sending and reading answers */

/* libpq leaves errno at 0 when a send succeeds. When a send fails and libpq drops the data, it
   reads, which sets errno. A send that was put off may set it, too; then something is left to
   flush, unless there is room again at this very moment. */
void hl__pg_sending(void) { errno = 0; }

bool hl__pg_sent(hl__pg_session *session) {
  int refused = errno;
  errno = 0;
  int left = PQflush(session->connection);
  /* Nothing is left to send, but the kernel did not take it. */
  bool dropped = left == 0 && (refused || errno);
  return left >= 0 && !dropped;
}

int hl__pg_send_error(const hl__pg_session *session, hl_error *error) {
  if (session->ended) return hl__pg_gone(session, error);
  const char *why = PQerrorMessage(session->connection);
  (void)hl__pg_error_state("", *why ? why : "the system has not taken what was to be sent",
                           "send to the server", error);
  return HL_ECONNECTION;
}

void hl__pg_results_clear(hl__pg_session *session) {
  PQclear(session->kept);
  PQclear(session->second);
  session->kept = session->second = NULL;
}

int hl__pg_send(hl__pg_session *session, const char *sql, hl_error *error) {
  hl__pg_results_clear(session);
  session->releases = false;
  hl__pg_sending();
  if (!PQsendQuery(session->connection, sql) || !hl__pg_sent(session))
    return hl__pg_send_error(session, error);
  session->outstanding = true;
  session->tells_transaction = session->holds;
  return HL_OK;
}

int hl__pg_rollback_send(hl__pg_session *session, hl_error *error) {
  session->holds = session->savepoint = false;
  int status = hl__pg_send(session, "ROLLBACK", error);
  session->releases = true;
  return status;
}

/* Keeps the first error; else the last rows; else the last result. In a pipeline: the first rows,
   and the second. */
static void keep(hl__pg_session *session, PGresult *result) {
  PGresult *drop = result;
  if (session->pipelined && PQresultStatus(result) == PGRES_TUPLES_OK && session->kept &&
      PQresultStatus(session->kept) == PGRES_TUPLES_OK) {
    PQclear(session->second);
    session->second = result;
    return;
  }
  bool failed = session->kept && PQresultStatus(session->kept) == PGRES_FATAL_ERROR;
  ExecStatusType status = PQresultStatus(result);
  bool rows = session->kept && PQresultStatus(session->kept) == PGRES_TUPLES_OK;
  if (!failed && (status == PGRES_FATAL_ERROR || status == PGRES_TUPLES_OK || !rows)) {
    drop = session->kept;
    session->kept = result;
  }
  PQclear(drop);
}

/* Whether the result belongs to a statement. A pipeline gives NULL after each statement, and at the
   end the result of the sync. Results after a failed statement say so. */
static bool is_ours(ExecStatusType status) {
  return status == PGRES_TUPLES_OK || status == PGRES_COMMAND_OK || status == PGRES_EMPTY_QUERY ||
         status == PGRES_FATAL_ERROR;
}

/* Reads the answer so far. False: more will come. *stranger: the server sent an unrequested one. */
static bool answer_read(hl__pg_session *session, bool *stranger) {
  PGconn *connection = session->connection;
  unsigned ends = 0; /* consecutive NULLs */
  while (!PQisBusy(connection)) {
    PGresult *result = PQgetResult(connection);
    if (!result && !session->pipelined) {
      session->outstanding = false;
      return true;
    }
    /* All statements are answered, but not the sync: it will never come. */
    *stranger = !result && ++ends > 1;
    if (*stranger) return true;
    if (!result) continue;
    ends = 0;
    ExecStatusType status = PQresultStatus(result);
#ifdef LIBPQ_HAS_PIPELINING
    if (session->pipelined && (status == PGRES_PIPELINE_SYNC || status == PGRES_PIPELINE_ABORTED)) {
      PQclear(result);
      if (status == PGRES_PIPELINE_ABORTED) continue;
      session->outstanding = session->pipelined = false;
      *stranger = !PQexitPipelineMode(connection);
      return true;
    }
#endif
    *stranger = !is_ours(status);
    keep(session, result);
    if (*stranger) return true;
  }
  return false;
}

/* Reads what the server or libpq says about the end of the connection. */
static void last_words(hl__pg_session *session) {
  PGresult *result;
  for (int i = 0; i < 100 && (result = PQgetResult(session->connection)); i++)
    keep(session, result);
  session->outstanding = false;
}

int hl__pg_await(hl__pg_session *session, int64_t deadline, bool interruptible, hl_error *error) {
  PGconn *connection = session->connection;
  bool stranger = false;
  unsigned late = 0;
  while (session->outstanding) {
    hl__pg_sending();
    int flushed = PQflush(connection);
    if (flushed == 0 && errno) flushed = -1; /* as in hl__pg_sent */
    if (answer_read(session, &stranger)) break;
    int status = flushed < 0 ? HL_ECONNECTION
                             : wait_for_server(session, flushed == 0, deadline, interruptible);
    if (status == HL_OK) status = lateness(session, deadline, interruptible, &late);
    if (status == HL_TIMEOUT) return hl__error(error, status, "the server has not answered yet");
    if (status == HL_CANCELLED) return hl__error(error, status, "the wait was cancelled");
    /* The server may have said why it ended the connection. */
    if (status == HL_ECONNECTION || !PQconsumeInput(connection)) {
      if (PQstatus(connection) == CONNECTION_BAD) last_words(session);
      break;
    }
  }
  if (stranger) return hl__error(error, HL_ECONNECTION, "the server answers what was not asked");
  if (!session->outstanding && PQstatus(connection) != CONNECTION_BAD) return HL_OK;
  if (session->kept && PQresultStatus(session->kept) == PGRES_FATAL_ERROR) {
    (void)hl__pg_error(session, session->kept, "read the server's answer", error);
    return HL_ECONNECTION;
  }
  return hl__pg_gone(session, error);
}

/* Judges the answer to a ROLLBACK or a sign of life. */
static int answer_judge(hl__pg_session *session, hl_error *error) {
  PGTransactionStatusType now = PQtransactionStatus(session->connection);
  if (session->kept && PQresultStatus(session->kept) == PGRES_FATAL_ERROR) {
    (void)hl__pg_error(session, session->kept, "read the server's answer", error);
    return hl__error_as(error, HL_ECONNECTION);
  }
  if (session->tells_transaction && now != PQTRANS_INTRANS)
    return hl__error(error, HL_ECONNECTION, "the server has rolled the transaction back");
  return HL_OK;
}

int hl__pg_settle(hl__pg_session *session, int64_t deadline, bool interruptible, hl_error *error) {
  if (!session->outstanding) return HL_OK;
  for (;;) {
    int status = hl__pg_await(session, deadline, interruptible, error);
    if (status) return status;
    /* A cancel request of another session has hit the ROLLBACK. The rows are given back, but the
       server still expects a ROLLBACK: send it again. */
    bool again = session->releases && session->kept &&
                 PQresultStatus(session->kept) == PGRES_FATAL_ERROR &&
                 PQtransactionStatus(session->connection) == PQTRANS_INERROR;
    if (!again) return answer_judge(session, error);
    status = hl__pg_rollback_send(session, error);
    if (status) return status;
  }
}

int hl__pg_query(hl__pg_session *session, const char *sql, int columns, PGresult **result,
                 hl_error *error) {
  if (result) *result = NULL;
  int status = hl__pg_send(session, sql, error);
  if (status == HL_OK) status = hl__pg_await(session, session->patience, true, error);
  if (status == HL_TIMEOUT || status == HL_CANCELLED)
    status = hl__error(error, HL_ECONNECTION, "the server did not answer in time");
  if (status) return status;
  if (session->kept && PQresultStatus(session->kept) == PGRES_FATAL_ERROR)
    return hl__pg_error(session, session->kept, "query the server", error);
  if (columns > 0 && (!session->kept || PQnfields(session->kept) < columns))
    return hl__error(error, HL_ECONNECTION, "the server answers what was not asked");
  if (result)
    *result = session->kept;
  else
    PQclear(session->kept);
  session->kept = NULL;
  return HL_OK;
}

const char *hl__pg_field(const PGresult *result, int row, int column) {
  if (!result || row >= PQntuples(result) || column >= PQnfields(result) ||
      PQgetisnull(result, row, column))
    return NULL;
  return PQgetvalue(result, row, column);
}
