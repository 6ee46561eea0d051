/*
 * take.c - sessions: rows taken in order, all or none, awaited, and given back.
 *
 * A session may have several claims of one row in different modes: an upgrade takes the row once
 * more, a downgrade gives that claim back. Each step leaves a legal state.
 */
#include "embedded.h"

#include <stdlib.h>
#include <string.h>

/* How long a try waits for a partition's lock, and until the dead are out of its way; how long the
   bell's thread, a release and a wait that has ended wait for a partition's lock. */
#define TRY_NS 10000000
#define MEND_NS 50000000
#define BELL_NS 1000000 /* also for leases in the way of one row */
#define RELEASE_NS 2000000
#define UNLINK_NS 200000
/* A sleeper looks again this often at leases in its way, and for circles. */
#define AGAIN_NS 500000000
/* Leases in the way of one try whose time is up. */
#define OVER_MAX 64

/* Whether what the session has can be given back: also where the name of the directory leads
   elsewhere. */
static bool is_usable(hl__shm_space *space) {
  return space->generation == hl__fork_generation() &&
         (hl__shm_check(space, false, NULL) == HL_OK || hl__shm_touchable(space));
}

/* -------------------------------------------------------------- sessions */

int hl__shm_begin(hl__shm_space *space, hl__shm_session **result, hl_error *error) {
  *result = NULL;
  int status = hl__shm_check(space, true, error);
  if (status) return status;
  hl__shm_session *session = calloc(1, sizeof *session);
  if (!session) return hl__error_memory(error);
  session->space = space;
  session->record = session->note = hl__shm_record_get(space);
  if (!session->record) {
    free(session);
    return hl__shm_full_error(space, error);
  }
  static hl__a32 numbers;
  atomic_store(&hl__shm_record_at(space, session->record)->number, atomic_fetch_add(&numbers, 1));
  hl__shm_space_ref(space);
  *result = session;
  return HL_OK;
}

void hl__shm_end(hl__shm_session *session) {
  hl__shm_space *space = session->space;
  hl__shm_give_back(session, 0);
  hl__shm_tell_no_more(session, 0);
  if (is_usable(space)) {
    hl__shm_cache_drop(session);
    if (session->agent) hl__shm_agent_put(space, session->agent);
    hl__shm_record_put(space, session->record);
  }
  free(session->held);
  free(session);
  hl__shm_space_unref(space);
}

/* A record of its own for each request of a session that holds something already. */
bool hl__shm_tell(hl__shm_session *session, const hl_request *request, const char *application) {
  uint32_t number = session->n ? hl__shm_record_get(session->space) : session->record;
  hl__shm_record *record = hl__shm_record_at(session->space, number);
  if (!record) return false;
  if (session->n) {
    record->next = session->notes;
    session->notes = number;
  }
  session->note = number;
  hl__shm_note *note = &record->note;
  (void)atomic_fetch_add(&note->turn, 1);
  atomic_store(&note->mode, (uint32_t)request->mode);
  atomic_store(&note->since_ms, (uint64_t)hl__unix_ms());
  hl__shm_text_set(note->application, sizeof note->application / 8, application,
                   strlen(application));
  hl__shm_text_set(note->label, sizeof note->label / 8, request->label, request->label_size);
  hl__shm_text_set(note->path, sizeof note->path / 8, request->path, strlen(request->path));
  (void)atomic_fetch_add(&note->turn, 1);
  return true;
}

void hl__shm_tell_mode(hl__shm_session *session, hl_mode mode) {
  uint32_t number = session->record;
  for (uint32_t next = session->notes; number; number = next) {
    hl__shm_record *record = hl__shm_record_at(session->space, number);
    if (!record) return;
    if (number != session->record) next = record->next;
    atomic_store(&record->note.mode, (uint32_t)mode);
  }
}

void hl__shm_tell_no_more(hl__shm_session *session, uint32_t keep) {
  if (!is_usable(session->space)) session->notes = keep;
  while (session->notes && session->notes != keep) {
    const uint32_t number = session->notes;
    hl__shm_record *record = hl__shm_record_at(session->space, number);
    session->notes = record ? record->next : 0;
    if (record) hl__shm_record_put(session->space, number);
  }
}

/* The session's record names its agent's, for circles. */
static bool agent_set(hl__shm_session *session, uint64_t number) {
  if (session->agent ? session->agent->number == number : number == 0) return true;
  hl__shm_agent *agent = number ? hl__shm_agent_get(session->space, number) : NULL;
  if (number && !agent) return false;
  hl__shm_record *record = hl__shm_record_at(session->space, session->record);
  atomic_store(&record->agent, agent ? agent->record : session->record);
  if (session->agent) hl__shm_agent_put(session->space, session->agent);
  session->agent = agent;
  return true;
}

int hl__shm_session_check(hl__shm_session *session, bool at_once, hl_error *error) {
  int status = hl__shm_check(session->space, at_once, error);
  if (status) return status;
  for (uint32_t k = 0; k < session->n; k++) {
    const hl__shm_node *node = hl__shm_node_at(session->space, session->held[k].node);
    if (!node || atomic_load(&node->claim) != session->held[k].claim)
      return hl__error(error, HL_ECONNECTION, "the table of locks in %s was overwritten",
                       session->space->directory.path);
  }
  return HL_OK;
}

/* -------------------------------------------------------------- giving back */

static uint64_t held_of(const hl_row *row) {
  return hl__shm_claim(hl__shm_row_key(row), row->mode, HL__HELD);
}

static bool held_reserve(hl__shm_session *session, size_t n) {
  size_t need = session->n + n;
  if (need <= session->capacity) return true;
  size_t capacity = need < 2 * (size_t)session->capacity ? 2 * (size_t)session->capacity : need;
  if (capacity > UINT32_MAX) return false;
  /* Not realloc: a child that is born meanwhile frees what it finds here. */
  hl__shm_held *grown = calloc(capacity, sizeof *grown), *before = session->held;
  if (!grown) return false;
  if (before) memcpy(grown, before, session->n * sizeof *grown);
  session->held = grown;
  session->capacity = (uint32_t)capacity;
  free(before);
  return true;
}

/* Until when a release waits for a partition: not again once something is late, or all rows of one
   partition would wait, one after the other. */
static int64_t release_end(hl__shm_space *space) {
  return hl__shm_now() + (atomic_load(&space->late_count) ? 0 : RELEASE_NS);
}

static void claim_give_back(hl__shm_session *session, const hl__shm_held *held) {
  hl__shm_space *space = session->space;
  const uint32_t part = hl__shm_claim_part(held->claim);
  hl__shm_node *node = hl__shm_node_at(space, held->node);
  hl__shm_wakes wakes = {0};
  if (!node) return;
  if (__builtin_expect(!hl__shm_part_try(space, part), 0) &&
      hl__shm_part_wait(space, part, release_end(space), NULL, NULL) != HL_OK) {
    /* A process was stopped inside. Others see that the row is free once they get in. */
    uint64_t claim = held->claim;
    if (!atomic_compare_exchange_strong(&node->claim, &claim, hl__shm_claim_as(claim, HL__LEFT)))
      return;
    hl__shm_late_add(space, held->node);
    hl__shm_watch_kick(space);
    return;
  }
  if (__builtin_expect(atomic_load_explicit(&node->claim, memory_order_relaxed) != held->claim,
                       0)) {
    hl__shm_part_unlock(space, part);
    return;
  }
  hl__shm_claim_end(space, held->node, &wakes);
  hl__shm_part_unlock(space, part);
  if (__builtin_expect(wakes.n != 0, 0)) hl__shm_wakes_send(&wakes);
  hl__shm_node_put(session, held->node);
}

void hl__shm_give_back(hl__shm_session *session, uint32_t keep) {
  const bool usable = is_usable(session->space);
  while (session->n > keep) {
    session->n--;
    if (usable) claim_give_back(session, &session->held[session->n]);
  }
}

bool hl__shm_give_back_row(hl__shm_session *session, const hl_row *row) {
  const uint64_t claim = held_of(row);
  for (uint32_t k = session->n; k-- > 0;) {
    const hl__shm_held held = session->held[k];
    if (held.claim != claim) continue;
    session->n--;
    memmove(&session->held[k], &session->held[k + 1], (session->n - k) * sizeof held);
    if (is_usable(session->space)) claim_give_back(session, &held);
    return true;
  }
  return false;
}

/* ---------------------------------------------------------------- waiting */

static void held_note(hl__shm_session *session, uint32_t index, uint64_t claim) {
  session->held[session->n++] = (hl__shm_held){index, claim};
}

/* Which node the agent blocks for; 0: none. */
static void waits_publish(hl__shm_session *session, uint32_t index) {
  hl__shm_record *own = hl__shm_record_at(session->space, session->record);
  hl__shm_record *agent = own ? hl__shm_record_at(session->space, atomic_load(&own->agent)) : NULL;
  if (agent) atomic_store(&agent->waits, index);
}

/* Ends a wait. True: it was granted just now after all. The word first, so that no process grants
   it any more; then, if the partition can be had, the rest. */
static bool wait_end(hl__shm_session *session, uint32_t index) {
  hl__shm_space *space = session->space;
  hl__shm_node *node = hl__shm_node_at(space, index);
  uint64_t claim = atomic_load(&node->claim);
  if (hl__shm_state_of(claim) == HL__WAIT)
    (void)atomic_compare_exchange_strong(&node->claim, &claim, hl__shm_claim_as(claim, HL__GONE));
  if (hl__shm_state_of(claim) == HL__HELD) return true;
  if (hl__shm_claim_clear(space, index, hl__shm_now() + UNLINK_NS, NULL) == HL_OK) {
    hl__shm_node_put(session, index);
  } else {
    hl__shm_late_add(space, index);
    hl__shm_watch_kick(space);
  }
  return false;
}

/* Until when a waiter sleeps that no process wakes; lease_ms: when a lease in its way ends. */
static int64_t sleep_until(const hl__shm_taking *self, int64_t lease_ms) {
  const int64_t now = hl__shm_now();
  int64_t until = self->session->ear ? INT64_MAX : now + (self->alone ? HL__SHM_POLL_NS : AGAIN_NS);
  int64_t left =
      lease_ms == INT64_MAX ? INT64_MAX : lease_ms - hl__shm_boot_ms(self->session->space);
  if (left < 0) left = 0;
  if (left < INT64_MAX / 2000000 && now + (left + 1) * 1000000 < until)
    until = now + (left + 1) * 1000000;
  /* A waiter's time is up behind its deadline, not at it. */
  return until <= self->deadline ? until : self->deadline + 1;
}

static bool is_waiting(const hl__shm_node *node) {
  return hl__shm_state_of(atomic_load(&node->claim)) == HL__WAIT;
}

/* Ends leases in the way of a node whose time is up, until `most`, and looks. HL_OK: it is granted,
   also where another status was about to come. HL__UNFREE: it waits, and looks again at *until. */
static int granted_look(const hl__shm_taking *self, uint32_t index, uint64_t key, int64_t most,
                        int64_t *until, hl_error *error) {
  hl__shm_session *session = self->session;
  const hl__shm_node *node = hl__shm_node_at(session->space, index);
  const unsigned mode = hl__shm_mode_of(atomic_load(&node->claim));
  int64_t lease_ms;
  if (!is_waiting(node)) return HL_OK;
  do lease_ms = hl__shm_leases_look(session->space, key, mode, most);
  while (lease_ms == 0 && hl__shm_now() < most && !atomic_load(&session->cancelled));
  if (!is_waiting(node)) return HL_OK;
  if (atomic_load(&session->cancelled))
    return hl__error(error, HL_CANCELLED, "the wait was cancelled");
  if (hl__shm_now() > self->deadline)
    return hl__error(error, HL_TIMEOUT, "the lock was not granted in time");
  *until = sleep_until(self, lease_ms);
  return HL__UNFREE;
}

/* Sleeps until the node is granted. */
static int granted_await(const hl__shm_taking *self, uint32_t index, uint64_t key,
                         hl_error *error) {
  hl__shm_space *space = self->session->space;
  hl__shm_node *node = hl__shm_node_at(space, index);
  int64_t circles = 0;
  for (;;) {
    int64_t until = self->deadline;
    const int64_t now = hl__shm_now();
    int status = HL_OK;
    if (self->request->blocks && self->request->holds && now >= circles) {
      status = hl__shm_circle(space, index, error);
      circles = now + AGAIN_NS;
    }
    if (status == HL_OK) status = granted_look(self, index, key, self->deadline, &until, error);
    if (status != HL__UNFREE) return status;
    hl__futex_wait(&node->wake, 0, until);
    if (!is_waiting(node)) return HL_OK;
    if (self->alone && !hl__shm_look(space))
      hl__shm_sweep(space, false, hl__shm_now() + HL__SHM_POLL_NS);
    if (atomic_load(&space->gone)) return hl__shm_gone_error(space, error);
    /* Only we do so: a grant changes the claim first. */
    atomic_store(&node->wake, 0);
  }
}

/* Has observers see which rows the request wants, while it waits for the first of them. Returns the
   record that says so; 0: there is no space. */
static uint32_t rows_tell(const hl__shm_taking *self) {
  hl__shm_space *space = self->session->space;
  hl__shm_record *note = hl__shm_record_at(space, self->session->note);
  uint32_t number = note ? hl__shm_record_get(space) : 0;
  hl__shm_record *record = hl__shm_record_at(space, number);
  if (!record) return 0;
  hl__a64 *words = record->note.application; /* and the texts behind it */
  uint32_t n = self->request->n < HL__SHM_WANTED ? (uint32_t)self->request->n : HL__SHM_WANTED;
  for (uint32_t i = 0; i < n; i++) {
    const hl_row *row = &self->request->rows[i];
    atomic_store(&words[i], hl__shm_claim(hl__shm_row_key(row), row->mode, HL__WAIT));
  }
  atomic_store(&record->note.mode, n);
  atomic_store(&note->first, number);
  return number;
}

static void rows_tell_no_more(const hl__shm_taking *self, uint32_t number) {
  hl__shm_record *note = hl__shm_record_at(self->session->space, self->session->note);
  if (!number || !note || !is_usable(self->session->space)) return;
  atomic_store(&note->first, 0);
  hl__shm_record_put(self->session->space, number);
}

/* The wait for the row has ended so; HL_OK: it was granted. Returns how the take goes on. */
static int row_waited(const hl__shm_taking *self, uint32_t index, const hl_row *row, uint32_t told,
                      int status, hl_error *error) {
  hl__shm_session *session = self->session;
  const uint64_t held = held_of(row);
  rows_tell_no_more(self, told);
  atomic_store(&session->waits, 0);
  if (!is_usable(session->space))
    return status ? status : hl__shm_gone_error(session->space, error);
  if (self->request->blocks) waits_publish(session, 0);
  const hl__shm_node *node = hl__shm_node_at(session->space, index);
  const uint64_t claim = atomic_load(&node->claim);
  if (status == HL_OK && claim != held)
    status = hl__error(error, HL_ESTORE, "the table of locks in %s was overwritten",
                       session->space->directory.path);
  if (status == HL_TIMEOUT) hl__shm_part_blame(session->space, hl__shm_claim_part(held), error);
  if (status && !wait_end(session, index)) return status;
  held_note(session, index, held);
  /* Granted in the last moment: that is no time-out, but it was cancelled. */
  return status == HL_TIMEOUT ? HL_OK : status;
}

static int row_wait(const hl__shm_taking *self, uint32_t index, const hl_row *row,
                    hl_error *error) {
  hl__shm_session *session = self->session;
  hl__shm_taking own = *self;
  own.alone = !hl__shm_watch_enter(session);
  const uint32_t told = rows_tell(&own);
  int status = granted_await(&own, index, hl__shm_row_key(row), error);
  if (!own.alone) hl__shm_watch_leave(session);
  return row_waited(&own, index, row, told, status, error);
}

/* ----------------------------------------------------------------- taking */

/* How many claims of the row the session has, by mode; 255 where it has more. */
static uint64_t own_counts(const hl__shm_taking *self, uint64_t key) {
  uint64_t own = 0;
  for (uint32_t k = 0; k < self->before; k++) {
    const uint64_t claim = self->session->held[k].claim;
    const unsigned shift = 8 * hl__shm_mode_of(claim);
    if (hl__shm_key_of(claim) == key && (own >> shift & 0xFF) < 0xFF) own += UINT64_C(1) << shift;
  }
  return own;
}

/* Behind those that wait already, unless nothing but these is in the way of a session that has the
   row. The partition is locked. */
static bool must_wait(hl__shm_space *space, hl__shm_row *row, const hl__shm_node *node,
                      unsigned mode, hl__shm_wakes *wakes) {
  if (hl__shm_blocked(space, row, node, mode) || row->first) hl__shm_row_purge(space, row, wakes);
  if (hl__shm_blocked(space, row, node, mode)) return true;
  const hl__shm_node *first = hl__shm_node_at(space, row->first);
  return first && !(node->flags & HL__CONVERTS && !(first->flags & HL__CONVERTS));
}

/* Enters a claim of the row. HL_OK: it is held; HL__UNFREE: it is not free, and if *waits, the node
   is in the queue; else as hl__shm_take. */
static int row_enter(const hl__shm_taking *self, const hl_row *want, uint32_t *waits,
                     hl_error *error) {
  hl__shm_session *session = self->session;
  hl__shm_space *space = session->space;
  const uint64_t key = hl__shm_row_key(want);
  const uint64_t own = self->before ? own_counts(self, key) : 0;
  const uint32_t part = hl__shm_claim_part(key), index = hl__shm_node_get(session);
  const bool try_once = self->request->try_once;
  hl__shm_node *node = hl__shm_node_at(space, index);
  hl__shm_wakes wakes = {0};
  if (!node) goto full;
  node->own = self->exempt ? self->exempt : own;
  node->flags = (own || self->exempt ? HL__CONVERTS : 0u) | (self->exempt ? HL__EXEMPTS : 0u) |
                (session->ear ? HL__RINGS : 0u);
  atomic_store_explicit(&node->session, session->record, memory_order_relaxed);
  atomic_store_explicit(&node->note, session->note, memory_order_relaxed);
  int status = HL_OK;
  if (!hl__shm_part_try(space, part)) {
    const int64_t most = try_once ? TRY_NS : session->ear ? BELL_NS : 0;
    status = hl__shm_part_wait(space, part, most ? hl__shm_now() + most : self->deadline,
                               &session->cancelled, error);
  }
  if (status) {
    hl__shm_node_put(session, index);
    return status;
  }
  hl__shm_row *row = hl__shm_row_find(space, key, true, &node->row);
  if (!row) {
    hl__shm_part_unlock(space, part);
    hl__shm_node_put(session, index);
    goto full;
  }
  if (!must_wait(space, row, node, want->mode, &wakes)) {
    const uint64_t claim = hl__shm_claim(key, want->mode, HL__HELD);
    hl__shm_hold_link(space, row, index, want->mode);
    atomic_store_explicit(&node->claim, claim, memory_order_release); /* now it counts */
    hl__shm_part_unlock(space, part);
    held_note(session, index, claim);
    if (__builtin_expect(wakes.n != 0, 0)) hl__shm_wakes_send(&wakes);
    return HL_OK;
  }
  if (!try_once) {
    node->seq = atomic_fetch_add(&space->table->header.seq, 1);
    atomic_store(&node->wake, 0);
    hl__shm_queue_link(space, row, index);
    atomic_store(&session->waits, index);
    if (self->request->blocks) waits_publish(session, index);
    atomic_store(&node->claim, hl__shm_claim(key, want->mode, HL__WAIT));
    *waits = index;
    (void)atomic_fetch_add_explicit(&space->waits, 1, memory_order_relaxed);
  } else {
    hl__shm_row_drop(space, row, node->row);
  }
  hl__shm_part_unlock(space, part);
  hl__shm_wakes_send(&wakes);
  if (try_once) hl__shm_node_put(session, index);
  return HL__UNFREE;
full:
  return hl__shm_full_error(space, error);
}

/* Tries once more, after the dead and the leases whose time is up are out of the way. */
static int row_retry(const hl__shm_taking *self, const hl_row *want, hl_error *error) {
  hl__shm_space *space = self->session->space;
  const uint64_t key = hl__shm_row_key(want);
  uint32_t waits;
  hl__shm_sweep_out(space, hl__shm_now() + MEND_NS);
  for (int ended = 0; ended < OVER_MAX; ended++)
    if (hl__shm_leases_look(space, key, want->mode, hl__shm_now() + TRY_NS) != 0) break;
  int status = row_enter(self, want, &waits, error);
  if (status != HL__UNFREE) return status;
  return hl__error(error, HL_TIMEOUT, "the lock was not granted in time");
}

static int row_take(const hl__shm_taking *self, const hl_row *want, hl_error *error) {
  uint32_t waits = 0;
  int status = row_enter(self, want, &waits, error);
  /* A try does not wait so long for a partition that it would break the lock of a dead process. */
  if (__builtin_expect(status == HL_TIMEOUT && self->request->try_once, 0)) status = HL__UNFREE;
  if (__builtin_expect(status == HL__UNFREE, 0))
    status = waits ? row_wait(self, waits, want, error) : row_retry(self, want, error);
  if (__builtin_expect(status != HL_OK, 0) && error) {
    error->level = want->level;
    error->bucket = (uint32_t)want->bucket;
  }
  return status;
}

int hl__shm_take_begin(hl__shm_taking *self, hl_error *error) {
  hl__shm_session *session = self->session;
  hl__shm_space *space = session->space;
  self->before = session->n;
  self->deadline = hl__shm_ns(self->request->deadline);
  int status = hl__shm_check(space, false, error);
  if (status) return status;
  if (__builtin_expect(atomic_load_explicit(&space->late_count, memory_order_relaxed) != 0, 0))
    hl__shm_late_do(space);
  if (!held_reserve(session, self->request->n) || !agent_set(session, self->request->agent))
    return hl__error_memory(error);
  return HL_OK;
}

static int take_end(const hl__shm_taking *self, int status, hl_error *error) {
  hl__shm_space *space = self->session->space;
  /* It has become known meanwhile that the rows keep no newcomer out. */
  if (status == HL_OK && __builtin_expect(atomic_load(&space->gone), 0))
    status = hl__shm_gone_error(space, error);
  if (status) hl__shm_give_back(self->session, self->before);
  return status;
}

int hl__shm_take(hl__shm_session *session, const hl_request *request, uint64_t exempt,
                 hl_error *error) {
  hl__shm_taking self = {.session = session, .request = request, .exempt = exempt};
  int status = hl__shm_take_begin(&self, error);
  if (status) return status;
  for (size_t i = 0; i < request->n && status == HL_OK; i++)
    status = row_take(&self, &request->rows[i], error);
  status = take_end(&self, status, error);
  atomic_store_explicit(&session->cancelled, false, memory_order_relaxed);
  return status;
}

/* ------------------------------------------------------------ not blocking */

/* The next row. HL__UNFREE: it waits for it. */
static int row_go(hl__shm_taking *self, hl__shm_ear *ear, hl_error *error) {
  const hl_row *row = &self->request->rows[self->i];
  int status = HL__UNFREE;
  if (!ear->node) {
    status = row_enter(self, row, &ear->node, error);
    /* A process is stopped inside: the ear comes again. */
    const int64_t now = hl__shm_now();
    if (status == HL_TIMEOUT && now <= self->deadline && !atomic_load(&self->session->cancelled)) {
      const int64_t again = now + HL__SHM_POLL_NS;
      ear->until = again <= self->deadline ? again : self->deadline + 1;
      return HL__UNFREE;
    }
    if (status == HL__UNFREE) self->told = rows_tell(self);
  }
  if (status == HL__UNFREE) {
    hl__shm_space *space = self->session->space;
    status = atomic_load(&space->gone) ? hl__shm_gone_error(space, error)
                                       : granted_look(self, ear->node, hl__shm_row_key(row),
                                                      hl__shm_now() + BELL_NS, &ear->until, error);
    if (status == HL__UNFREE) return status;
    const uint32_t node = ear->node;
    ear->node = 0;
    status = row_waited(self, node, row, self->told, status, error);
    self->told = 0;
  }
  if (status && error) {
    error->level = row->level;
    error->bucket = (uint32_t)row->bucket;
  }
  return status;
}

int hl__shm_take_go(hl__shm_taking *self, hl__shm_ear *ear, hl_error *error) {
  int status = HL_OK;
  while (status == HL_OK && self->i < self->request->n) {
    status = row_go(self, ear, error);
    if (status == HL_OK) self->i++;
  }
  return status == HL__UNFREE ? status : take_end(self, status, error);
}

void hl__shm_cancel(hl__shm_session *session) {
  atomic_store(&session->cancelled, true);
  hl__shm_bell_call(session);
  hl__shm_space *space = session->space;
  if (hl__shm_check(space, false, NULL) != HL_OK) return;
  hl__shm_node *node = hl__shm_node_at(space, atomic_load(&session->waits));
  if (!node) return;
  atomic_store(&node->wake, 1);
  hl__futex_wake(&node->wake, 1);
}
