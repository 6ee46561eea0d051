/*
 * file.c - the embedded store: locks between the processes and threads of one
 * machine, without a server. Here are its sessions: a request taken row by row,
 * all or nothing, and given back. Where locks live is in space.c, how a row is
 * taken in table.c, how it is waited for in queue.c; see file.h.
 *
 * A lease is taken as a session's rows are; then it is written down, and the rows are given
 * back (leases.c). So each row, once it is locked, is looked at for leases, too.
 *
 * Nothing is ever outstanding: whatever is done is done when the call returns.
 */
#include "board.h"
#include "file.h"
#include "mode.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Tokens are a counter of 56 bits above 8 zero bits, as the other stores'. */
#define TOKEN_LOW_BITS 8

/* Holdings that a session has memory for from the start. */
#define HOLDINGS_AT_FIRST 8

/* How often a call begins anew because the directory was removed under it. */
#define REOPEN_MAX 3

typedef struct file_store {
  hl_store base;
  const hl_store_config *config;
  pthread_mutex_t mutex;
  hl__file_space *space HL__GUARDED_BY(hl__file_store_mutex); /* a reference */
  /* The name that must lead to it; malloc'ed. */
  char *control HL__GUARDED_BY(hl__file_store_mutex);
  char *flocks; /* hl__flock_directory; NULL: they are not wanted. Constant */
} file_store;

HL__MUTEX_FUNCTIONS(store, file_store, mutex, hl__file_store_mutex)

static _Atomic uint64_t session_counter;

static file_store *store_of(const hl__file_session *session) {
  return (file_store *)(void *)session->base.store;
}

static hl__file_session *session_of(hl_session *session) {
  return (hl__file_session *)(void *)session;
}

const char *hl__file_session_application(const hl__file_session *session) {
  return store_of(session)->config->application;
}

const hl_store_config *hl__file_session_config(const hl__file_session *session) {
  return store_of(session)->config;
}

/* ----------------------------------------------------------------- store */

/* The space that the DSN's path leads to, the name by which it is checked, and the layout
   that it agrees on. */
static int space_open(const hl_store_config *config, hl_layout **layout, hl__file_space **space,
                      char **control, hl_error *error) {
  const char *path = config->dsn->path;
  *control = hl__file_path(path, HL__FILE_CONTROL);
  if (!*control) return hl__error_memory(error);
  int status = hl__file_space_open(path, config, layout, space, error);
  if (status) free(*control);
  return status;
}

/* Unchecked, as store_close: nobody else has the store. */
HL__UNCHECKED static int store_open(const hl_store_config *config, hl_store **result,
                                    hl_error *error) {
  const hl_dsn *dsn = config->dsn;
  *result = NULL;
  for (unsigned i = 0; i < dsn->param_count; i++)
    if (strcmp(dsn->params[i].name, "flock") != 0)
      return hl__error(error, HL_EDSN, "file: knows no parameter %s", dsn->params[i].name);
  file_store *store = calloc(1, sizeof *store);
  if (!store) return hl__error_memory(error);
  store->base.ops = &hl_store_file;
  store->base.leases = &hl__file_leases;
  store->config = config;
  int status = HL_OK;
  if (config->interoperates) status = hl__flock_directory(dsn, &store->flocks, error);
  if (status == HL_OK)
    status = space_open(config, &store->base.layout, &store->space, &store->control, error);
  if (status) {
    free(store->flocks);
    free(store);
    return status;
  }
  (void)pthread_mutex_init(&store->mutex, NULL);
  *result = &store->base;
  return HL_OK;
}

HL__UNCHECKED static void store_close(hl_store *base) {
  file_store *store = (file_store *)(void *)base;
  hl__file_space_unref(store->space);
  (void)pthread_mutex_destroy(&store->mutex);
  free(store->control);
  free(store->flocks);
  hl_layout_unref(base->layout);
  free(store);
}

/* The space is the parent's, and stays in the registry as it is: its mutexes
   may be held by threads that do not exist here, its descriptors are closed.
   Unchecked: nobody else has the store. */
HL__UNCHECKED static void store_forget(hl_store *base) {
  free(((file_store *)(void *)base)->control);
  free(((file_store *)(void *)base)->flocks);
  hl_layout_unref(base->layout);
  free(base);
}

/* The space that the store uses now, with a reference, and a copy of its name;
   opened again when its files are not there any more. */
static int store_space(file_store *store, hl__file_space **space, char **control, hl_error *error) {
  int status = HL_OK;
  store_lock(store);
  if (hl__file_space_gone(store->space) || !hl__file_space_shown(store->space, store->control)) {
    hl__file_space *fresh = NULL;
    hl_layout *layout = NULL;
    char *name = NULL;
    status = space_open(store->config, &layout, &fresh, &name, error);
    if (status == HL_OK) {
      hl_layout_unref(layout); /* the one it was: nothing was left open */
      hl__file_space_unref(store->space);
      char *before = store->control; /* as in session_refresh */
      store->space = fresh;
      store->control = name;
      free(before);
    }
  }
  if (status == HL_OK) {
    *control = strdup(store->control);
    if (!*control) status = hl__error_memory(error);
  }
  if (status == HL_OK) {
    hl__file_space_ref(store->space);
    *space = store->space;
  }
  store_unlock(store);
  return status;
}

/* -------------------------------------------------------------- sessions */

static int session_open(hl_store *base, int64_t deadline, hl_session **result, hl_error *error) {
  (void)deadline; /* opening waits for nobody */
  *result = NULL;
  hl__file_session *session = calloc(1, sizeof *session);
  if (!session) return hl__error_memory(error);
  session->base.store = base;
  session->id = atomic_fetch_add(&session_counter, 1u);
  session->capacity = HOLDINGS_AT_FIRST;
  session->holdings = malloc(session->capacity * sizeof *session->holdings);
  int status = session->holdings ? store_space((file_store *)(void *)base, &session->space,
                                               &session->control, error)
                                 : hl__error_memory(error);
  if (status) {
    free(session->holdings);
    free(session);
    return status;
  }
  (void)pthread_mutex_init(&session->guard, NULL);
  *result = &session->base;
  return HL_OK;
}

static bool is_named(const hl_row *row) { return row->level == HL_LEVEL_NAMED; }

int hl__file_session_check(hl__file_session *session, hl_error *error) {
  if (!hl__file_space_gone(session->space) &&
      hl__file_space_shown(session->space, session->control))
    return HL_OK;
  session->stale = true;
  return hl__file_space_gone_error(session->space, error);
}

/* Before a call on a session that holds nothing: a space that its path does not
   lead to any more is left for the store's new one. Not while other sessions hold
   rows in it: they shall notice first that these are lost, before this process
   shares with itself. HL_ECONNECTION; a session that is opened now has the new
   space. */
static int session_refresh(hl__file_session *session, hl_error *error) {
  hl__file_space *space;
  char *control;
  if (!session->stale && !atomic_load(&session->space->gone)) return HL_OK;
  if (!hl__file_table_empty(session->space))
    return hl__file_space_gone_error(session->space, error);
  int status = store_space(store_of(session), &space, &control, error);
  if (status) return status;
  hl__file_board_leave(session);
  hl__file_space_unref(session->space);
  char *before = session->control; /* a child that is born meanwhile frees what it finds */
  session->space = space;
  session->control = control;
  free(before);
  session->stale = false;
  return HL_OK;
}

/* Gives back all holdings but the first `keep`, the last taken first, and makes
   the remaining ones what they were before the call. Tells those who wait when
   all is done, so that the mapping is looked at and touched at once. */
static void session_release(hl__file_session *session, size_t keep) {
  hl__file_space *space = session->space;
  const size_t before = session->held;
  bool changed = before > keep;
  while (session->held > keep) {
    const hl__file_holding *holding = &session->holdings[--session->held];
    if (is_named(&holding->row))
      hl__flock_release(&holding->flock);
    else
      hl__file_row_release(space, holding);
  }
  for (size_t i = 0; i < keep; i++) {
    hl__file_holding *holding = &session->holdings[i];
    if (!holding->converted) continue;
    hl__file_row_downgrade(space, holding);
    holding->row.mode = HL_SHARED;
    changed = true;
  }
  bool wake = changed && !hl__file_space_gone(space);
  for (size_t i = 0; i < before; i++) {
    hl__file_holding *holding = &session->holdings[i];
    if (wake && (i >= keep || holding->converted) && !is_named(&holding->row))
      hl__file_queue_wake(space, holding->hash);
    holding->converted = false;
  }
}

void hl__file_session_clear(hl__file_session *session) {
  session_release(session, 0);
  hl__file_board_clear(session, 0);
}

static int session_give_back(hl_session *base, hl_error *error) {
  (void)error;
  hl__file_session_clear(session_of(base));
  return HL_OK;
}

static void session_forget(hl_session *base) {
  hl__file_session *session = session_of(base);
  free(session->holdings);
  free(session->slots);
  free(session->control);
  free(session);
}

static void session_close(hl_session *base) {
  hl__file_session *session = session_of(base);
  (void)session_give_back(base, NULL);
  hl__file_board_leave(session);
  hl__file_space_unref(session->space);
  (void)pthread_mutex_destroy(&session->guard);
  session_forget(base);
}

/* --------------------------------------------------------------- locking */

static bool holdings_reserve(hl__file_session *session, size_t n) {
  size_t need = session->held + n;
  if (need <= session->capacity) return true;
  size_t capacity = need < 2 * session->capacity ? 2 * session->capacity : need;
  hl__file_holding *grown = malloc(capacity * sizeof *grown);
  if (!grown) return false;
  /* Not realloc: a child that is born meanwhile frees what it finds here. */
  hl__file_holding *before = session->holdings;
  memcpy(grown, before, session->held * sizeof *grown);
  session->holdings = grown;
  session->capacity = capacity;
  free(before);
  return true;
}

static int holding_compare(const void *a, const void *b) {
  const hl_row *x = &((const hl__file_holding *)a)->row;
  const hl_row *y = &((const hl__file_holding *)b)->row;
  return hl__row_compare(x, y);
}

/* A call that takes rows. slots: the slots of the board that its session used before. */
typedef struct taking {
  const hl_request *request;
  size_t slots;
  int64_t since_ms;
  bool crowded; /* others may wait for its rows */
} taking;

/* Shows once that the call waits, if it does. */
static void wait_show(hl__file_session *session, const taking *self) {
  if (session->slots_used == self->slots && !self->request->try_once)
    hl__file_board_show(session, self->slots, self->request, self->since_ms, HL__BOARD_WAITING);
}

/* Takes one row and enters it as a holding, for which there is room. `held`: of
   the row itself, where the session has it already in a lesser mode, else NULL. */
static int row_take(hl__file_session *session, taking *self, const hl_row *row, uint32_t hash,
                    hl__file_holding *held, hl_error *error) {
  const hl_request *request = self->request;
  hl__file_holding want = {.entry = held ? held->entry : NULL, .hash = hash, .row = *row};
  int status = hl__file_row_try(session, &want, held, self->crowded, error);
  if (status == HL_TIMEOUT && !request->try_once) {
    self->crowded = true; /* by now others may wait for the rest */
    wait_show(session, self);
    want.entry = held ? held->entry : NULL;
    status = hl__file_row_wait(session, &want, held, request->deadline, error);
  }
  if (status) return status;
  if (held) {
    held->row.mode = HL_EXCLUSIVE;
    held->converted = true;
  } else {
    session->holdings[session->held++] = want;
  }
  /* It is locked: no lease can come on it any more that is in its way. */
  if (!hl__file_leased(session->space, hash, (hl_mode)row->mode)) return HL_OK;
  wait_show(session, self);
  return hl__file_lease_await(session, request, row, hash, error);
}

static bool session_nap(void *context, int64_t until) {
  hl__file_session *session = context;
  uint32_t seen = hl__file_nap_seen(session);
  if (atomic_load(&session->interrupted)) return false;
  hl__file_nap(session, seen, until);
  return true;
}

static int flock_take(const hl__flock_wait *how, hl_id name, hl__file_holding *holding,
                      hl_error *error) {
  const hl__file_session *session = how->context;
  int status;
  do {
    status = hl__flock_take(how, name, (hl_mode)holding->row.mode, &holding->flock, error);
  } while (status == HL_ESTORE && (errno == EMFILE || errno == ENFILE) &&
           hl__file_stripe_spare(session->space));
  return status;
}

/* Takes a row that is a file of Symfony's: see flock.c. */
static int named_row_take(hl__file_session *session, const taking *self, const hl_row *row,
                          const hl__file_holding *held, hl_error *error) {
  /* flock() would give up what it has, and then perhaps not get the other. */
  if (held)
    return hl__error(error, HL_EUNSUPPORTED,
                     "a lock that Symfony's FlockStore shares cannot be made "
                     "exclusive while it is held: acquire it exclusively");
  hl__file_holding *holding = &session->holdings[session->held];
  *holding = (hl__file_holding){.row = *row};
  hl__flock_wait how = {store_of(session)->flocks, self->request->deadline, NULL, session};
  int status = flock_take(&how, hl__request_name(self->request, row), holding, error);
  if (status == HL_TIMEOUT && !self->request->try_once) {
    wait_show(session, self);
    how.nap = session_nap;
    status = flock_take(&how, hl__request_name(self->request, row), holding, error);
  }
  if (status == HL_OK) session->held++;
  return status;
}

/* Says which row a call came to its end at. */
static void row_blame(int status, const hl_row *row, hl_error *error) {
  if (status == HL_TIMEOUT) (void)hl__error(error, status, "the lock was not granted in time");
  if (status == HL_CANCELLED) (void)hl__error(error, status, "the wait was cancelled");
  if (error && (status == HL_TIMEOUT || status == HL_CANCELLED) && !is_named(row)) {
    error->level = row->level;
    error->bucket = (uint32_t)row->bucket;
  }
}

/* Whether anybody waits near any of the rows. All words are read at once, right
   after the space was looked at: see hl__file_space.control. The hashes of the rows stay in
   the room for their holdings, which are never ahead of them. */
static bool rows_crowded(hl__file_session *session, const hl_request *request) {
  hl__file_holding *room = session->holdings + session->held;
  bool crowded = false;
  for (size_t i = 0; i < request->n && !is_named(&request->rows[i]); i++) {
    room[i].hash = hl__file_hash(request->rows[i].level, request->rows[i].bucket);
    crowded |= hl__file_queue_crowded(session->space, room[i].hash);
  }
  return crowded;
}

/* All rows of the request, or none. HL_ECONNECTION: the directory was removed;
   nothing that this call took is held. */
static int rows_take(hl__file_session *session, const hl_request *request, hl_grant *grant,
                     hl_error *error) {
  const size_t before = session->held;
  taking self = {request, session->slots_used, hl__unix_ms(), false};
  int status = HL_OK;
  if (!holdings_reserve(session, request->n)) return hl__error_memory(error);
  if (hl__file_space_gone(session->space)) return hl__file_space_gone_error(session->space, error);
  self.crowded = rows_crowded(session, request);
  hl__file_circle_begin(session, request);

  for (size_t i = 0; i < request->n && status == HL_OK; i++) {
    const hl__file_holding key = {.row = request->rows[i]};
    hl__file_holding *held =
        before > 0 ? bsearch(&key, session->holdings, before, sizeof key, holding_compare) : NULL;
    if (held && hl__mode_covers((hl_mode)held->row.mode, (hl_mode)key.row.mode)) continue;
    if (is_named(&request->rows[i]))
      status = named_row_take(session, &self, &request->rows[i], held, error);
    else
      status = row_take(session, &self, &request->rows[i], session->holdings[before + i].hash, held,
                        error);
    if (status) row_blame(status, &request->rows[i], error);
  }
  /* Looked at last: whoever opens the path from now on comes to these files, or
     hl_store_ops.check tells. The descriptors were looked at first. */
  if (status == HL_OK && !hl__file_space_shown(session->space, session->control)) {
    session->stale = true;
    status = hl__file_space_gone_error(session->space, error);
  }
  if (status) {
    /* A victim keeps nothing, what it extends included. */
    bool victim = status == HL_DEADLOCK;
    session_release(session, victim ? 0 : before);
    hl__file_board_clear(session, victim ? 0 : self.slots);
    return status;
  }

  /* After the grant: so the later of two exclusive holders has the greater. */
  grant->token = (atomic_fetch_add(&session->space->control->tokens, 1u) + 1) << TOKEN_LOW_BITS;
  if (request->lease) {
    status = hl__file_lease_write(session, request, grant, error);
    hl__file_session_clear(session);
    return status;
  }
  for (size_t i = 0; i < before; i++) session->holdings[i].converted = false;
  if (before > 0)
    qsort(session->holdings, session->held, sizeof *session->holdings, holding_compare);
  if (request->upgrade) {
    hl__file_board_clear(session, self.slots); /* that it waited */
    hl__file_board_convert(session, request);
  } else {
    hl__file_board_show(session, self.slots, request, self.since_ms, HL__BOARD_HELD);
  }
  grant->sent_ms = hl__boot_ms();
  return HL_OK;
}

static int session_take(hl_session *base, const hl_request *request, hl_grant *grant,
                        hl_error *error) {
  hl__file_session *session = session_of(base);
  int status;
  int tries = 0;
  do {
    status = request->extend ? HL_OK : session_refresh(session, error);
    if (status) break;
    status = rows_take(session, request, grant, error);
  } while (status == HL_ECONNECTION && !request->extend && ++tries < REOPEN_MAX);
  /* One that comes later is forgotten by settle. */
  atomic_store(&session->interrupted, false);
  return status;
}

/* No lease can be in the way of who shares: one that was would have kept it from being
   exclusive. */
static int session_downgrade(hl_session *base, const hl_request *request, int64_t *sent_ms,
                             hl_error *error) {
  hl__file_session *session = session_of(base);
  int status = hl__file_session_check(session, error);
  if (status) return status;
  for (size_t i = 0; i < request->n; i++) {
    const hl__file_holding key = {.row = request->rows[i]};
    hl__file_holding *held =
        bsearch(&key, session->holdings, session->held, sizeof key, holding_compare);
    if (!held || held->row.mode == HL_SHARED) continue;
    hl__file_row_downgrade(session->space, held);
    held->row.mode = HL_SHARED;
    if (!hl__file_space_gone(session->space)) hl__file_queue_wake(session->space, held->hash);
  }
  hl__file_board_convert(session, request);
  *sent_ms = hl__boot_ms();
  return HL_OK;
}

/* ------------------------------------------------------------ the rest */

static int session_check(hl_session *base, hl_error *error) {
  hl__file_session *session = session_of(base);
  for (size_t i = session->held; i-- > 0;) {
    const hl__file_holding *holding = &session->holdings[i];
    if (!is_named(&holding->row)) break; /* they come last */
    if (!hl__flock_stands(&holding->flock))
      return hl__error(error, HL_ECONNECTION, "a lock file in %s was removed",
                       store_of(session)->flocks);
  }
  return hl__file_session_check(session, error);
}

static int session_renew(hl_session *base, int64_t *sent_ms, hl_error *error) {
  *sent_ms = hl__boot_ms();
  return session_check(base, error);
}

/* Nothing is outstanding but an interruption that came when the call for which it
   was meant had ended. */
static int session_settle(hl_session *base, int64_t deadline, hl_error *error) {
  (void)deadline, (void)error;
  atomic_store(&session_of(base)->interrupted, false);
  return HL_OK;
}

/* While another thread waits for more rows. The session holds some, so it stays in the
   space in which it is. */
static bool session_told(hl_session *base) {
  const hl__file_session *session = session_of(base);
  return hl__file_space_gone(session->space) ||
         !hl__file_space_shown(session->space, session->control);
}

static void session_interrupt(hl_session *base) { hl__file_queue_interrupt(session_of(base)); }

static int session_holders(hl_session *base, const hl_lease_filter *filter, hl_holder_fn fn,
                           void *context, int64_t deadline, hl_error *error) {
  hl__file_session *session = session_of(base);
  (void)deadline; /* names are left out: no process tells who has a file */
  if (hl__file_session_check(session, NULL) != HL_OK) {
    int status = session_refresh(session, error);
    if (status) return status;
  }
  int status = hl__file_lease_holders(session, filter, fn, context, error);
  if (status) return status;
  return hl__file_board_read(&session->space->directory, filter->rows, filter->n, fn, context,
                             error);
}

const hl_store_ops hl_store_file = {
    .abi = HL_STORE_ABI,
    .scheme = "file",
    .traits = {.updates = true, .leases_update = true},
    .parse = hl__file_dsn,
    .name_key = hl__file_name_key,
    .open = store_open,
    .close = store_close,
    .forget = store_forget,
    .session_open = session_open,
    .session_close = session_close,
    .session_forget = session_forget,
    .take = session_take,
    .downgrade = session_downgrade,
    .give_back = session_give_back,
    .renew = session_renew,
    .settle = session_settle,
    .check = session_check,
    .told = session_told,
    .interrupt = session_interrupt,
    .holders = session_holders,
};
