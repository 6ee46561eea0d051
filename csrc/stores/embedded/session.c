/*
 * session.c - sessions of the embedded store: a request's rows are taken in the table, then those
 * that are Symfony's files, all or none. See embedded_store.h.
 */
#include "embedded_store.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A wait that ends sooner is no part of a circle. */
#define CIRCLE_LEAST_MS 1000
/* How soon after the directory was removed a look at the lock tells so. */
#define CHECK_NS 1000000

/* ----------------------------------------------------------------- spaces */

/* The space that the store uses now, with a reference; opened again when the directory leads to
   another one. */
static int store_space(hl__embedded_store *store, hl__shm_space **space, hl_error *error) {
  int status = HL_OK;
  hl__embedded_store_lock(store);
  if (hl__shm_check(store->space, true, NULL) != HL_OK) {
    const char *path = store->config->dsn->path;
    hl__shm_space *fresh = NULL;
    hl_layout *layout = store->base.layout;
    status = hl__file_again(&store->space->directory, path, error);
    if (status == HL_OK) status = hl__shm_space_open(store->config, path, &layout, &fresh, error);
    if (status == HL_OK) {
      hl_layout_unref(layout); /* the one it was: nothing was left open */
      hl__shm_space *before = store->space;
      store->space = fresh;
      hl__shm_space_unref(before);
    }
  }
  if (status == HL_OK) {
    hl__shm_space_ref(store->space);
    *space = store->space;
  }
  hl__embedded_store_unlock(store);
  return status;
}

/* A session of the table in the store's space of now. */
static int table_begin(hl__embedded_store *store, hl__shm_session **table, hl_error *error) {
  hl__shm_space *space;
  int status = store_space(store, &space, error);
  if (status) return status;
  status = hl__shm_begin(space, table, error);
  hl__shm_space_unref(space);
  return status;
}

int hl__embedded_session_open(hl_store *base, int64_t deadline, hl_session **result,
                              hl_error *error) {
  (void)deadline; /* opening does not wait */
  *result = NULL;
  hl__embedded_session *session = calloc(1, sizeof *session);
  if (!session) return hl__error_memory(error);
  session->base.store = base;
  int status = table_begin((hl__embedded_store *)(void *)base, &session->table, error);
  if (status) {
    free(session);
    return status;
  }
  (void)pthread_mutex_init(&session->guard, NULL);
  *result = &session->base;
  return HL_OK;
}

void hl__embedded_session_close(hl_session *base) {
  hl__embedded_session *session = hl__embedded_session_of(base);
  hl__embedded_session_clear(session);
  hl__shm_end(session->table);
  (void)pthread_mutex_destroy(&session->guard);
  free(session->files);
  free(session);
}

/* Not while other sessions of this process hold rows in the old space: they shall notice first that
   these are lost, before this process shares with itself. */
int hl__embedded_session_refresh(hl__embedded_session *session, hl_error *error) {
  hl__shm_space *space = session->table->space;
  hl__shm_session *fresh;
  int status = hl__shm_check(space, false, error);
  if (status == HL_OK || atomic_load(&space->holding) > 0) return status;
  status = table_begin(hl__embedded_store_of(session), &fresh, error);
  if (status) return status;
  hl__embedded_guard_lock(session);
  hl__shm_session *before = session->table;
  session->table = fresh;
  if (atomic_load(&session->interrupted)) hl__shm_cancel(fresh); /* it has met the one before */
  hl__embedded_guard_unlock(session);
  hl__shm_end(before);
  return HL_OK;
}

int hl__embedded_session_check(hl__embedded_session *session, hl_error *error) {
  for (size_t i = 0; i < session->file_count; i++)
    if (!hl__flock_stands(&session->files[i].flock))
      return hl__error(error, HL_ECONNECTION, "a lock file in %s was removed",
                       hl__embedded_store_of(session)->flocks);
  int64_t now = hl__shm_now();
  bool late = now - session->checked > CHECK_NS;
  if (late) session->checked = now;
  return hl__shm_session_check(session->table, late, error);
}

/* ------------------------------------------------------------ giving back */

static void session_release(hl__embedded_session *session, uint32_t rows, size_t files) {
  hl__shm_session *table = session->table;
  while (session->file_count > files)
    hl__flock_release(&session->files[--session->file_count].flock);
  if (table->n > rows) hl__shm_give_back(table, rows);
  if (table->n == 0) hl__shm_tell_no_more(table, 0);
  bool holds = table->n > 0 || session->file_count > 0;
  if (session->holds && !holds) (void)atomic_fetch_sub(&table->space->holding, 1u);
  session->holds = holds;
}

void hl__embedded_session_clear(hl__embedded_session *session) { session_release(session, 0, 0); }

/* ---------------------------------------------------------- Symfony's files */

/* flock() cannot be woken: the naps between two tries are short. */
static bool session_nap(void *context, int64_t until) {
  const hl__embedded_session *session = context;
  int64_t left = hl__left_ms(until);
  const struct timespec nap = {.tv_sec = (time_t)(left / 1000),
                               .tv_nsec = (long)(left % 1000) * 1000000};
  if (atomic_load(&session->interrupted)) return false;
  (void)nanosleep(&nap, NULL);
  return true;
}

static bool files_reserve(hl__embedded_session *session, size_t n) {
  if (session->file_count + n <= session->file_capacity) return true;
  size_t capacity = session->file_capacity + (n < 8 ? 8 : n);
  hl__embedded_file *grown = calloc(capacity, sizeof *grown);
  if (!grown) return false;
  /* Not realloc: a child that is forked meanwhile frees the array it finds here. */
  hl__embedded_file *before = session->files;
  if (before) memcpy(grown, before, session->file_count * sizeof *grown);
  session->files = grown;
  session->file_capacity = capacity;
  free(before);
  return true;
}

static int file_take(hl__embedded_session *session, const hl_request *request, const hl_row *row,
                     hl_error *error) {
  for (size_t i = 0; i < session->file_count; i++) {
    const hl_row *held = &session->files[i].row;
    if (hl__row_compare(held, row) != 0) continue;
    if (hl__mode_covers(held->mode, row->mode)) return HL_OK;
    /* flock() would release the shared lock before it waits for the exclusive one. */
    return hl__error(error, HL_EUNSUPPORTED,
                     "a lock that Symfony's FlockStore shares cannot be made "
                     "exclusive while it is held: acquire it exclusively");
  }
  const hl__flock_wait how = {hl__embedded_store_of(session)->flocks, request->deadline,
                              request->try_once ? NULL : session_nap, session};
  hl__embedded_file *file = &session->files[session->file_count];
  file->row = *row;
  int status =
      hl__flock_take(&how, hl__request_name(request, row), (hl_mode)row->mode, &file->flock, error);
  if (status == HL_OK) session->file_count++;
  if (status == HL_TIMEOUT) (void)hl__error(error, status, "the lock was not granted in time");
  if (status == HL_CANCELLED) (void)hl__error(error, status, "the wait was cancelled");
  return status;
}

int hl__embedded_file_try(hl__embedded_session *session, const hl_request *request,
                          const hl_row *row, hl_error *error) {
  hl_request once = *request;
  once.try_once = true;
  return file_take(session, &once, row, error);
}

/* ----------------------------------------------------------------- taking */

void hl__embedded_session_holds(hl__embedded_session *session) {
  if (session->holds) return;
  (void)atomic_fetch_add(&session->table->space->holding, 1u);
  session->holds = true;
}

/* Whether the session holds the row in modes that suffice together. */
static bool is_covered(const hl__shm_session *table, const hl_row *row) {
  uint8_t kept_out = 0;
  for (uint32_t i = 0; i < table->n; i++)
    if (hl__shm_key_of(table->held[i].claim) == hl__shm_row_key(row))
      kept_out |= hl__mode_conflicts[hl__shm_mode_of(table->held[i].claim)];
  return (hl__mode_conflicts[row->mode & 7u] & ~kept_out) == 0;
}

/* Copies the rows of an extension that the session does not hold yet. */
static int rows_missing(const hl__shm_session *table, hl_request *part, hl_row **rows,
                        hl_error *error) {
  size_t n = 0;
  *rows = malloc((part->n ? part->n : 1) * sizeof **rows);
  if (!*rows) return hl__error_memory(error);
  for (size_t i = 0; i < part->n; i++)
    if (!is_covered(table, &part->rows[i])) (*rows)[n++] = part->rows[i];
  part->rows = *rows;
  part->n = n;
  return HL_OK;
}

int hl__embedded_take_begin(hl__embedded_session *session, const hl_request *request,
                            hl_request *part, hl_error *error) {
  const hl__embedded_store *store = hl__embedded_store_of(session);
  hl__shm_space *space = session->table->space;
  *part = *request;
  while (part->n > 0 && part->rows[part->n - 1].level == HL_LEVEL_NAMED) part->n--;
  const size_t files = request->n - part->n;
  if (files > 0 && !files_reserve(session, files)) return hl__error_memory(error);
  int status = hl__shm_check(space, false, error);
  if (status == HL_OK && files > 0)
    status = hl__file_again(&space->directory, store->flocks, error);
  if (status) return status;
  return hl__shm_tell(session->table, request, store->config->application)
             ? HL_OK
             : hl__shm_full_error(space, error);
}

int hl__embedded_session_take(hl__embedded_session *session, const hl_request *request,
                              uint64_t exempt, hl_error *error) {
  hl__shm_session *table = session->table;
  const uint32_t before = table->n;
  const size_t files = session->file_count;
  const uint32_t notes = table->notes;
  hl_row *missing = NULL;
  hl_request part;
  int status = hl__embedded_take_begin(session, request, &part, error);
  const size_t first = part.n;
  part.blocks =
      part.agent && part.blocks && !part.try_once && hl__left_ms(part.deadline) >= CIRCLE_LEAST_MS;
  if (status == HL_OK && before > 0) status = rows_missing(table, &part, &missing, error);
  if (status == HL_OK) status = hl__shm_take(table, &part, exempt, error);
  for (size_t i = first; i < request->n && status == HL_OK; i++)
    status = file_take(session, request, &request->rows[i], error);
  free(missing);
  if (status) {
    /* A victim of a deadlock also loses the rows that it wanted to extend. */
    bool victim = status == HL_DEADLOCK;
    session_release(session, victim ? 0 : before, victim ? 0 : files);
    if (!victim) hl__shm_tell_no_more(table, notes);
    return status;
  }
  if (request->upgrade) hl__shm_tell_mode(table, request->mode);
  if (request->n > 0) hl__embedded_session_holds(session);
  return HL_OK;
}
