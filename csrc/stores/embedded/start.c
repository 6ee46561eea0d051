/*
 * start.c - takes that do not block: the bell's thread goes on with them (bell.c). The table's rows
 * come first, then Symfony's files, which are tried again and again, as flock() tells nobody.
 */
#include "embedded_store.h"

#include <stdlib.h>
#include <string.h>

/* Between two tries of a file: as flock.c. */
#define NAP_FIRST_MS 1
#define NAP_MOST_MS 20

typedef struct hl__embedded_start {
  hl__shm_ear ear;
  hl__shm_taking taking;
  hl__embedded_session *session;
  hl_started *started;
  const hl_request *request;
  hl_request part; /* without the files */
  size_t file;     /* the row of the file that comes next */
  int64_t nap;
  bool begun;
} starting;

int hl__embedded_grant(hl__embedded_session *session, const hl_request *request, hl_grant *grant,
                       hl_error *error) {
  /* After the grant: so the later of two exclusive holders has the greater. */
  grant->token = hl__shm_token(session->table->space);
  grant->sent_ms = hl__boot_ms();
  if (!request->lease) return HL_OK;
  int status = hl__embedded_lease_write(session, request, grant, error);
  hl__embedded_session_clear(session);
  return status;
}

static int take_begin(starting *self, hl_error *error) {
  self->begun = true;
  int status = hl__embedded_take_begin(self->session, self->request, &self->part, error);
  self->part.blocks = false;
  self->file = self->part.n;
  return status ? status : hl__shm_take_begin(&self->taking, error);
}

/* The files. HL__UNFREE: one is locked. */
static int files_go(starting *self, hl_error *error) {
  const hl_request *request = self->request;
  int status = HL_OK;
  for (; self->file < request->n && status == HL_OK; self->file += status == HL_OK)
    status = hl__embedded_file_try(self->session, request, &request->rows[self->file], error);
  if (status != HL_TIMEOUT) return status;
  if (atomic_load(&self->session->table->cancelled))
    return hl__error(error, HL_CANCELLED, "the wait was cancelled");
  const int64_t now = hl__shm_now(), deadline = hl__shm_ns(request->deadline);
  if (now > deadline) return status;
  const int64_t again = now + self->nap * 1000000;
  self->ear.until = again <= deadline ? again : deadline + 1;
  if (self->nap < NAP_MOST_MS) self->nap += self->nap / 2 + 1;
  return HL__UNFREE;
}

/* hl__shm_ear.go */
static bool go(hl__shm_ear *ear) {
  starting *self = HL__LIST_ENTRY(ear, starting, ear);
  hl__embedded_session *session = self->session;
  hl_started *started = self->started;
  hl_error *error = &started->error;
  int status = self->begun ? HL_OK : take_begin(self, error);
  if (status == HL_OK) status = hl__shm_take_go(&self->taking, ear, error);
  if (status == HL_OK) status = files_go(self, error);
  if (status == HL__UNFREE) return true;
  if (status == HL_OK) {
    hl__embedded_session_holds(session);
    status = hl__embedded_grant(session, self->request, &started->grant, error);
  }
  if (status) hl__embedded_session_clear(session);
  hl__shm_bell_leave(session->table);
  session->start = NULL;
  atomic_store(&session->interrupted, false);
  atomic_store(&session->table->cancelled, false);
  free(self);
  started->done(started, status);
  return false;
}

int hl__embedded_start(hl_session *base, const hl_request *request, hl_started *started,
                       hl_error *error) {
  hl__embedded_session *session = hl__embedded_session_of(base);
  int status = hl__embedded_session_refresh(session, error);
  if (status) return status;
  starting *self = calloc(1, sizeof *self);
  if (!self) return hl__error_memory(error);
  self->session = session;
  self->started = started;
  self->request = request;
  self->nap = NAP_FIRST_MS;
  self->taking.session = session->table;
  self->taking.request = &self->part;
  self->ear.go = go;
  memset(&started->grant, 0, sizeof started->grant);
  started->error = (hl_error){.status = HL_OK};
  session->start = self;
  status = hl__shm_bell_enter(session->table, &self->ear, error);
  if (status) {
    session->start = NULL;
    free(self);
  }
  return status;
}
