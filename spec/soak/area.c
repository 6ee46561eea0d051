/*
 * area.c - what workers of both kinds, and main, use of the shared area: the tree, complaints, the
 * cells of classic.c.
 */
#include "soak.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

shared_area *shared;

bool area_attach(const char *name) {
  int fd = shm_open(name, O_RDWR, 0);
  if (fd < 0) return false;
  void *at = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  (void)close(fd);
  if (at == MAP_FAILED) return false;
  shared = at;
  return true;
}

/* ---------------------------------------------------------------- the tree */

int node_parent(int node) {
  if (node >= FIRST_RESOURCE) return FIRST_ACCOUNT + (node - FIRST_RESOURCE) / RESOURCES;
  if (node >= FIRST_ACCOUNT) return (node - FIRST_ACCOUNT) / ACCOUNTS;
  return -1;
}

void node_ids(int node, node_name *name) {
  int path[3], n = 0;
  for (int at = node; at >= 0; at = node_parent(at)) path[n++] = at;
  name->n = (unsigned)n;
  for (int i = 0; i < n; i++) {
    (void)snprintf(name->text[i], sizeof name->text[i], "%c%d", "uar"[i], path[n - 1 - i]);
    name->ids[i] = (hl_id){name->text[i], strlen(name->text[i])};
  }
}

const char *node_show(int node, char out[32]) {
  node_name name;
  node_ids(node, &name);
  (void)snprintf(out, 32, "%s%s%s%s%s", name.text[0], name.n > 1 ? "/" : "",
                 name.n > 1 ? name.text[1] : "", name.n > 2 ? "/" : "",
                 name.n > 2 ? name.text[2] : "");
  return out;
}

void complain(const char *format, ...) {
  va_list arguments;
  unsigned i = atomic_fetch_add(&shared->complaints, 1u);
  if (i >= 64) return;
  va_start(arguments, format);
  (void)vsnprintf(shared->complaint[i], MESSAGE, format, arguments);
  va_end(arguments);
}

/* ------------------------------------------------------------------- records */

void record_clear(record *r) {
  r->how = END_DIED;
  r->asked = r->granted = r->promised = r->ending = r->ended = 0;
  atomic_store(&r->held, 0);
  r->status = r->targets = 0;
  r->why[0] = '\0';
  r->token = r->before = 0;
  r->lease = r->refreshes = r->stays = false;
  r->owner = r->parts = 0;
  r->since = r->leased = r->ttl_most = r->asked_ttl = r->lost_at = 0;
  atomic_store(&r->sure, 0);
  atomic_store(&r->yields, 0);
  atomic_store(&r->expires, 0);
  r->revocation = r->revoked = 0;
  r->cut = INT64_MAX;
  r->filter = FILTERS;
  memset(r->modes, 0, sizeof r->modes);
}

void record_leases(record *r, int64_t ttl, int owner, bool refreshes, bool stays) {
  r->owner = owner;
  r->ttl_most = ttl;
  r->refreshes = refreshes;
  r->stays = stays;
  r->lease = true;
}

void record_yields(record *r) {
  int64_t not_yet = 0;
  (void)atomic_compare_exchange_strong(&r->yields, &not_yet, now_ns());
}

uint64_t revocation_of(const char *by) {
  return strncmp(by, "soak-", 5) == 0 ? strtoull(by + 5, NULL, 10) : 0;
}

/* --------------------------------------------------------------------- cells */

void cell_read(int node, int element, cell_change *change) {
  cell *self = &shared->cells[node];
  (void)atomic_fetch_add(&self->unknown, 1u);
  *change = (cell_change){node, UINT64_C(1) << element, self->counter, self->set};
}

void cell_write(const cell_change *change) {
  cell *self = &shared->cells[change->node];
  self->counter = change->counter + 1;
  self->set = change->set ^ change->element;
}

void cell_confirm(const cell_change *change) {
  cell *self = &shared->cells[change->node];
  (void)atomic_fetch_add(&self->updates, 1u);
  (void)atomic_fetch_xor(&self->elements, change->element);
  (void)atomic_fetch_sub(&self->unknown, 1u);
}

/* MySQL and MariaDB give a number, or hierlock has seen the cause by itself. PostgreSQL gives
   the same code for a time-out, and says it in words. */
bool killed_query(unsigned number, const char *message) {
  return shared->queries && (number == 1317 || strstr(message, "an administrator has ended") ||
                             strstr(message, "due to user request"));
}

/* --------------------------------------------------------- the large faults */

/* A worker's results may still come of a fault that has ended so long ago: a connection was
   begun before. */
#define ECHO_NS (3 * S)

unsigned fault_first(void) {
  unsigned count = atomic_load(&shared->window_count);
  return count > WINDOWS / 2 ? count - WINDOWS / 2 : 0;
}

bool fault_meets(const fault_window *w, int64_t from, int64_t to, int64_t echo) {
  int64_t ended = atomic_load(&w->ended);
  return atomic_load(&w->began) < to && (!ended || ended + echo > from);
}

/* Besides a time-out and a failed connection, which are always possible. */
static bool allows(const fault_window *w, int status) {
  int kind = w->kind;
  if (atomic_load(&w->may) & (1u << (status + 10))) return true;
  switch (status) {
  case HL_ESTORE: return kind == HOSTILE || kind == DISK || kind == LIMITS;
  case HL_EMISMATCH: return kind == HOSTILE;
  case HL_ENOMEM: return kind == LIMITS;
  default: return false;
  }
}

static bool any_allows(int status, int64_t called, bool lease) {
  for (unsigned i = fault_first(); i < atomic_load(&shared->window_count); i++) {
    const fault_window *w = &shared->windows[i % WINDOWS];
    bool may = allows(w, status) ||
               (lease && atomic_load(&w->leases_may) & (1u << (status + 10))) ||
               (lease && status == HL_ESTORE &&
                w->kind == STOPSERVER); /* a record that is kept, with the fault that it met */
    if (may && fault_meets(w, called, now_ns(), ECHO_NS)) return true;
  }
  return false;
}

bool fault_allows(int status, int64_t called) { return any_allows(status, called, false); }

bool fault_allows_lease(int status, int64_t called) { return any_allows(status, called, true); }
