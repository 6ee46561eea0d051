/*
 * hold.c - see hold.h.
 */
#include "hold.h"

#include "clock.h"
#include "error.h"

#include <stdlib.h>

/* The time for the answer to a confirmed release. */
#define CONFIRM_MS 10000
/* A worker reads the server's message as soon as it gets a processor. If it gets none for so long,
   the machine is so full that the lock counts as lost. */
#define READING_MS 100

/* ------------------------------------------------------- its connection */

int64_t hl__connection_left(const hl_manager *manager, const hl__connection *connection) {
  return hl__lease_left_ms(hl__deadline(connection->answered, manager->config.hold_timeout));
}

/* The deadline, or the end of the hold's certainty if that is earlier: no call on the hold waits
   longer for a store that hangs. */
static int64_t end_by(const hl_manager *manager, const hl__connection *connection,
                      int64_t deadline) {
  if (!manager->ops->traits.expires) return deadline;
  int64_t end = hl__deadline(hl__now_ms(), hl__connection_left(manager, connection));
  return end < deadline ? end : deadline;
}

int hl__hold_settle(hl_manager *manager, hl__connection *connection, int64_t deadline,
                    hl_error *error) {
  if (!connection->asked) return HL_OK;
  int64_t end = end_by(manager, connection, deadline);
  int status = manager->ops->settle(connection->session, end, error);
  if (status == HL_OK) connection->answered = connection->asked;
  connection->asked = 0;
  return status;
}

int hl__connection_check(hl_manager *manager, hl__connection *connection, hl_error *error) {
  const hl_store_ops *ops = manager->ops;
  if (connection->asked) {
    int status = ops->settle(connection->session, 0, error);
    if (status == HL_OK) {
      connection->answered = connection->asked;
      connection->asked = 0;
    } else if (status != HL_TIMEOUT) {
      return status;
    }
  }
  int status = ops->check(connection->session, error);
  if (status == HL_OK && ops->traits.expires && hl__connection_left(manager, connection) == 0)
    status = hl__error(error, HL_ECONNECTION,
                       "the server has not answered for hold_timeout, and may "
                       "have given the lock away");
  return status;
}

void hl__hold_end(hl_manager *manager, hl__connection *connection, bool lost) {
  if (connection->state != HL__HELD) return;
  hl__session_close(manager, connection->session);
  connection->session = NULL;
  hl__pool_unlink(manager, connection);
  connection->state = HL__ENDED;
  hl__manager_event(manager, lost ? HL__HOLD_LOST : HL__HOLD_RELEASED, 0, 0);
  hl__manager_held(manager, &connection->span);
  if (lost) atomic_fetch_add(&manager->losses, 1u);
}

/* ----------------------------------------------------------- beginning */

void hl__hold_begin(hl__hold *hold, hl__connection *connection, const hl_grant *grant,
                    pthread_t owner, unsigned level) {
  connection->state = HL__HELD;
  connection->owner = owner;
  connection->answered = grant->sent_ms;
  connection->asked = 0;
  hold->connection = connection;
  hold->token = grant->token;
  hold->span = connection->span = (hl__span){hl__now_us(), level};
  hl__manager_event(hold->manager, HL__HOLD_BEGINS, 0, 0);
}

/* ---------------------------------------------------------------- using */

/* Frees the ended connection. Another thread that looks whether the lock stands finds it by the
   hold, under the manager's mutex. */
static void connection_drop(hl__hold *hold) {
  hl__manager_mutex_lock(hold->manager);
  hl__connection *connection = hold->connection;
  hold->connection = hold->watched = NULL;
  hold->kept_until = 0;
  hl__manager_mutex_unlock(hold->manager);
  (void)pthread_mutex_destroy(&connection->mutex);
  free(connection);
}

int hl__hold_lose(hl__hold *hold, const hl_error *reason, hl_error *error) {
  hl_manager *manager = hold->manager;
  hl__manager_mutex_lock(manager);
  hl__connection_mutex_lock(hold->connection);
  hl__hold_end(manager, hold->connection, true);
  hl__connection_mutex_unlock(hold->connection);
  hl__manager_mutex_unlock(manager);
  connection_drop(hold);
  hold->lost = true;
  return hl__error(error, HL_ELOST, "the lock was lost: %s", reason->message);
}

static int lost_error(hl_error *error) {
  return hl__error(error, HL_ELOST, "the lock was lost while it was held");
}

/* Unchecked: clang cannot follow a function that returns with a mutex only sometimes. */
HL__UNCHECKED int hl__hold_use(hl__hold *hold, hl_error *error) {
  hl_manager *manager = hold->manager;
  hl__connection *connection = hold->connection;
  if (hold->lost) return lost_error(error);
  if (!connection) return hl__error(error, HL_ERELEASED, "the lock has been released");

  hl_error reason;
  hl__connection_mutex_lock(connection);
  if (connection->session) {
    if (hl__connection_check(manager, connection, &reason) == HL_OK) return HL_OK;
    hl__connection_mutex_unlock(connection);
    return hl__hold_lose(hold, &reason, error);
  }
  /* The keeper or hl_manager_close has ended it. */
  hl__connection_mutex_unlock(connection);
  connection_drop(hold);
  hl__manager_mutex_lock(manager);
  hold->lost = !manager->closed;
  hl__manager_mutex_unlock(manager);
  return hold->lost ? lost_error(error)
                    : hl__error(error, HL_ERELEASED,
                                "the lock was released when its manager was "
                                "closed");
}

int64_t hl__hold_left(hl__hold *hold) {
  if (hl__hold_use(hold, NULL)) return 0;
  int64_t left = hold->manager->ops->traits.expires
                     ? hl__connection_left(hold->manager, hold->connection)
                     : HL_FOREVER;
  hl__connection_mutex_unlock(hold->connection);
  return left;
}

int64_t hl__hold_left_busy(hl__hold *hold) {
  static const struct timespec moment = {.tv_nsec = 100000};
  hl_manager *manager = hold->manager;
  const hl_store_ops *ops = manager->ops;
  int64_t patience = hl__now_ms() + READING_MS;
  for (;;) {
    hl__manager_mutex_lock(manager);
    bool busy = hold->busy;
    int64_t end = hold->kept_until;
    const hl__connection *watched = hold->watched;
    bool overrun = busy && watched && watched->overrun;
    if (manager->closed || overrun) end = 0;
    bool told =
        busy && end && watched && watched->session && ops->told && ops->told(watched->session);
    hl__manager_mutex_unlock(manager);
    if (!busy) return hl__hold_left(hold);
    if (told && ops->traits.expires && hl__left_ms(patience) > 0) {
      (void)nanosleep(&moment, NULL);
      continue;
    }
    if (told) end = 0; /* the lock may be lost */
    return hl__lease_left_ms(end);
  }
}

int hl__hold_check(hl__hold *hold, hl_error *error) {
  int status = hl__hold_use(hold, error);
  if (status) return status;
  hl_manager *manager = hold->manager;
  const hl_store_ops *ops = manager->ops;
  hl__connection *connection = hold->connection;
  hl_error reason;
  int64_t sent = 0;
  status = hl__hold_settle(manager, connection, HL_FOREVER, &reason);
  if (status == HL_OK) status = ops->renew(connection->session, &sent, &reason);
  if (status == HL_OK) {
    connection->asked = sent;
    status = hl__hold_settle(manager, connection, HL_FOREVER, &reason);
  }
  if (status == HL_OK) status = hl__connection_check(manager, connection, &reason);
  hl__connection_mutex_unlock(connection);
  return status == HL_OK ? HL_OK : hl__hold_lose(hold, &reason, error);
}

/* ----------------------------------------------------------- giving back */

/* Sends the release; with confirm, waits for its answer. HL_BUSY: it cannot be sent before an
   earlier answer has come. */
static int send_release(hl_manager *manager, hl__connection *connection, bool confirm,
                        hl_error *error) HL__REQUIRES(hl__connection_mutex) {
  const hl_store_ops *ops = manager->ops;
  if (!confirm) return ops->give_back(connection->session, error);
  int64_t end = end_by(manager, connection, hl__now_ms() + CONFIRM_MS);
  int status = hl__hold_settle(manager, connection, end, error);
  if (status == HL_OK) status = ops->give_back(connection->session, error);
  return status == HL_OK ? ops->settle(connection->session, end, error) : status;
}

/* The confirmed release of a lock that has ended: by a deadlock; or hl_manager_close has sent the
   release to a server, and ended the session without its answer. */
static int ended_release(hl_manager *manager, hl_error *error) {
  hl__manager_mutex_lock(manager);
  bool closed = manager->closed;
  hl__manager_mutex_unlock(manager);
  if (!closed || !manager->ops->traits.expires) return HL_OK;
  return hl__error(error, HL_ECONNECTION,
                   "the release is not confirmed: the lock was released when its manager was "
                   "closed, which does not wait for the answer");
}

int hl__hold_release(hl__hold *hold, bool confirm, hl_error *error) {
  hl_manager *manager = hold->manager;
  int status = hl__hold_use(hold, error);
  if (status == HL_ERELEASED) return confirm ? ended_release(manager, error) : HL_OK;
  if (status) return status;

  hl__connection *connection = hold->connection;
  hl_error reason;
  status = send_release(manager, connection, confirm, &reason);
  /* If the keeper comes first, it must send no sign of life behind the release. */
  if (status == HL_OK) connection->answered = hl__boot_ms();
  hl__connection_mutex_unlock(connection);
  if (status != HL_OK && status != HL_BUSY) return hl__hold_lose(hold, &reason, error);

  hl__manager_mutex_lock(manager);
  bool held = connection->state == HL__HELD;
  hold->watched = NULL;
  if (held) {
    hold->connection = NULL;
    hl__manager_event(manager, HL__HOLD_RELEASED, 0, 0);
    hl__manager_held(manager, &connection->span);
    if (status == HL_OK) {
      hl__pool_idle(manager, connection);
    } else {
      connection->answered = hl__boot_ms();
      connection->state = HL__RELEASING;
      connection->idle_since = hl__now_ms();
      (void)pthread_cond_signal(&manager->keeper.wakeup);
    }
  }
  hl__manager_mutex_unlock(manager);
  if (!held) connection_drop(hold); /* hl_manager_close came between */
  return HL_OK;
}

int hl__hold_downgrade(hl__hold *hold, const hl_request *request, hl_error *error) {
  hl_manager *manager = hold->manager;
  int status = hl__hold_use(hold, error);
  if (status) return status;
  hl__connection *connection = hold->connection;
  hl_error reason;
  int64_t sent = 0;
  hl_request own = *request;
  status = hl__hold_settle(manager, connection, HL_FOREVER, &reason);
  own.deadline = end_by(manager, connection, hl__late_answer_by(request->deadline));
  if (status)
    status = HL_ECONNECTION;
  else if (request->n > 0 && !manager->ops->downgrade)
    status = hl__error(&reason, HL_EUNSUPPORTED,
                       "a transaction of the store '%s' gives back no single "
                       "lock that an upgrade may have taken: release all, or keep it",
                       manager->ops->scheme);
  else if (request->n > 0)
    status = manager->ops->downgrade(connection->session, &own, &sent, &reason);
  if (sent > connection->answered) connection->answered = sent;
  hl__connection_mutex_unlock(connection);
  if (status == HL_ECONNECTION) return hl__hold_lose(hold, &reason, error);
  if (status && error) *error = reason;
  return status;
}

int hl__hold_to_lease(hl__hold *hold, const hl_request *request, hl_grant *grant, hl_error *error) {
  hl_manager *manager = hold->manager;
  int status = hl__hold_use(hold, error);
  if (status) return status;
  hl__connection *connection = hold->connection;
  hl_error reason;
  status = hl__hold_settle(manager, connection, HL_FOREVER, &reason);
  if (status) {
    hl__connection_mutex_unlock(connection);
    return hl__hold_lose(hold, &reason, error);
  }
  hl_request own = *request;
  own.deadline = end_by(manager, connection, hl__late_answer_by(request->deadline));
  status = manager->store->leases->to_lease(connection->session, &own, grant, &reason);
  if (status == HL_OK) connection->answered = hl__boot_ms();
  hl__connection_mutex_unlock(connection);
  if (status == HL_ECONNECTION) return hl__hold_lose(hold, &reason, error);
  if (status) {
    if (error) *error = reason;
    return status;
  }
  hl__manager_mutex_lock(manager);
  bool held = connection->state == HL__HELD;
  hold->watched = NULL;
  if (held) {
    hold->connection = NULL;
    hl__manager_event(manager, HL__HOLD_ENDS, 0, 0);
    hl__pool_idle(manager, connection);
  }
  hl__manager_mutex_unlock(manager);
  if (!held) connection_drop(hold); /* hl_manager_close came between */
  return HL_OK;
}
