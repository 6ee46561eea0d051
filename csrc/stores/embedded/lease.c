/*
 * lease.c - leases of the embedded store: the hl_lease_ops, over records in the table. How the
 * claims of a lease are made, changed and ended is leased.c's.
 *
 * Presence decides: a lease is there while its `end` is not 0. An operation that depends on who has
 * the lease (refresh, drop, import, conversion, revocation) has the lease's word `busy` meanwhile,
 * so these exclude each other. A waiter that meets a lease whose time is up ends it without that
 * word, by a CAS of `end`. A refresh changes `end` by a CAS, too. So one of the two is first.
 */
#include "embedded_store.h"
#include "record.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A call without a deadline waits so long for `busy`, which a process keeps for microseconds. */
#define TAKE_MS 1000
/* Between two tries for it; how long it is kept before its owner may be dead. */
#define PAUSE_NS 20000
#define DEAD_NS 1000000
/* The note of a revoked lease stays so long beyond the lease's time. So does an expired lease that
   no caller has released, refreshed or wanted since. */
#define KEPT_MS 3600000

static hl__shm_space *space_of(hl_session *session) {
  return hl__embedded_session_of(session)->table->space;
}

static int64_t at_least(int64_t deadline) {
  int64_t least = hl__now_ms() + TAKE_MS;
  return deadline > least ? deadline : least;
}

static void id_set(hl__a64 words[2], const uint8_t id[16]) {
  uint64_t values[2];
  memcpy(values, id, sizeof values);
  atomic_store(&words[0], values[0]);
  atomic_store(&words[1], values[1]);
}

/* ------------------------------------------------------------------- busy */

/* A lease whose `busy` this thread has. */
typedef struct grip {
  hl__shm_space *space;
  hl__shm_lease *lease;
  uint32_t index;
  uint64_t stamp;
  uint64_t word; /* what `busy` is: like no other thread's, and no earlier one */
} grip;

/* As format.h says of `busy`. */
static uint64_t busy_word(const hl__shm_space *space) {
  static hl__a32 serial;
  uint32_t generation = atomic_load(&space->table->slot[space->me].generation);
  return (uint64_t)(space->me + 1) << 48 | (uint64_t)(generation & 0xFFFFu) << 32 |
         atomic_fetch_add(&serial, 1u);
}

static void grip_leave(const grip *self) {
  uint64_t word = self->word;
  /* If the record has become another lease's meanwhile, this changes nothing. */
  (void)atomic_compare_exchange_strong(&self->lease->busy, &word, 0);
}

/* Whether the record is the lease with that stamp, or the note that it was revoked. `used` comes
   first: if `busy` was set before, the record stays that lease's. */
static bool is_lease(hl__shm_lease *lease, uint64_t stamp) {
  const uint64_t used = atomic_load(&lease->base.used);
  return (used & HL__LEASE) != 0 && (used & HL__MAKES) == 0 && hl__shm_used_is(used, stamp) &&
         atomic_load(&lease->base.stamp) == stamp &&
         (atomic_load(&lease->base.end) != 0 || atomic_load(&lease->revoked) != 0);
}

/* HL_OK; HL__ABSENT: it is another lease, or none; HL_TIMEOUT. */
static int grip_take(hl__shm_space *space, uint32_t index, uint64_t stamp, int64_t deadline,
                     grip *self) {
  hl__shm_lease *lease = hl__shm_lease_at(space, index);
  if (!lease) return HL__ABSENT;
  *self = (grip){space, lease, index, stamp, busy_word(space)};
  static const struct timespec pause = {.tv_nsec = PAUSE_NS};
  uint64_t seen = 0, whose = 0;
  int64_t since = 0;
  while (!atomic_compare_exchange_strong(&lease->busy, &seen, self->word)) {
    if (hl__shm_is_left(space, seen)) {
      if (atomic_compare_exchange_strong(&lease->busy, &seen, self->word)) break;
    } else if (seen != whose) {
      whose = seen;
      since = hl__shm_now();
    } else if (hl__left_ms(deadline) == 0) {
      return HL_TIMEOUT;
    } else if (hl__shm_now() - since > DEAD_NS) {
      hl__shm_mend(space, (uint32_t)(seen >> 48) - 1, hl__shm_ns(deadline));
      since = hl__shm_now();
    }
    (void)nanosleep(&pause, NULL);
    seen = 0;
  }
  if (is_lease(lease, stamp)) return HL_OK;
  grip_leave(self);
  return HL__ABSENT;
}

static int busy_error(hl_error *error) {
  return hl__error(error, HL_TIMEOUT,
                   "another process keeps the lease for itself: it may be stopped");
}

/* ---------------------------------------------------------------- finding */

static bool is_named_so(hl__shm_space *space, uint32_t index, const uint8_t id[16],
                        uint64_t *stamp) {
  hl__shm_lease *lease = hl__shm_lease_at(space, index);
  if (!lease) return false;
  *stamp = atomic_load(&lease->base.stamp);
  return is_lease(lease, *stamp) && hl__embedded_id_is(lease->id, id);
}

typedef struct search {
  hl__shm_space *space;
  const uint8_t *id;
  uint32_t index;
  uint64_t stamp;
} search;

static bool search_step(void *context, uint32_t index) {
  search *self = context;
  if (!is_named_so(self->space, index, self->id, &self->stamp)) return true;
  self->index = index;
  return false;
}

/* The lease of that id: where it was first, then everywhere. As grip_take. */
static int grip_find(hl__shm_space *space, const hl_lease_terms *terms, int64_t deadline,
                     grip *self) {
  search it = {space, terms->id, 0, 0};
  uint32_t hint = terms->place < UINT32_MAX ? (uint32_t)terms->place : 0;
  if (!hint || search_step(&it, hint)) hl__shm_each_lease(space, search_step, &it);
  if (!it.index) return HL__ABSENT;
  int status = grip_take(space, it.index, it.stamp, deadline, self);
  if (status || hl__embedded_id_is(self->lease->id, terms->id)) return status;
  grip_leave(self);
  return HL__ABSENT;
}

static int gone_error(hl_error *error) { return hl__record_check(&(hl__record){0}, error); }

/* Judges a lease; *record says what fits. */
static int judge(hl__shm_lease *lease, hl__record *record, hl_error *error) {
  char by[sizeof lease->by], reason[sizeof lease->reason];
  char shown_by[sizeof by], shown_reason[sizeof reason];
  hl__shm_text_get(by, lease->by, HL__SHM_TEXT(sizeof by));
  hl__shm_text_get(reason, lease->reason, HL__SHM_TEXT(sizeof reason));
  (void)hl__escape(shown_by, sizeof shown_by, by, strlen(by));
  (void)hl__escape(shown_reason, sizeof shown_reason, reason, strlen(reason));
  const bool over = atomic_load(&lease->base.end) == 0;
  record->revoked = over && atomic_load(&lease->revoked) != 0;
  record->there = !over || record->revoked; /* else a waiter has just ended it */
  record->by = shown_by;
  record->reason = shown_reason;
  int status = hl__record_check(record, error);
  record->by = record->reason = NULL;
  return status;
}

/* Says why a lease is over, for a caller that has its record. */
static int over_error(hl__shm_lease *lease, hl_error *error) {
  hl__record record = {HL__RECORD_FITS};
  return judge(lease, &record, error);
}

/* A revoked lease has been told of, or none will ask: its record is free. */
static void note_forget(const grip *self) {
  hl__shm_lease_forget(self->space, self->index, self->stamp);
}

/* Which of the two holders in the record counts. */
static hl__a64 *holder_of(hl__shm_lease *lease) {
  return atomic_load(&lease->turn) % 2 ? lease->heir : lease->holder;
}

/* The lease of that id, for the caller alone until it leaves. HL_OK, HL_ELOST, HL_TIMEOUT,
   HL_ECONNECTION. */
static int grip_named(hl_session *base, const hl_lease_terms *terms, int64_t deadline, grip *self,
                      hl_error *error) {
  hl__shm_space *space = space_of(base);
  int status = hl__shm_check(space, false, error);
  if (status) return status;
  status = grip_find(space, terms, deadline, self);
  if (status == HL__ABSENT) return gone_error(error);
  return status ? busy_error(error) : HL_OK;
}

/* The same, if this holder has it. */
static int enter(hl_session *base, const hl_lease_terms *terms, int64_t deadline, grip *self,
                 hl_error *error) {
  int status = grip_named(base, terms, deadline, self, error);
  if (status) return status;
  hl__record record = {HL__RECORD_FITS};
  record.holder = hl__embedded_id_is(holder_of(self->lease), terms->holder);
  status = judge(self->lease, &record, error);
  if (record.holder && record.revoked) note_forget(self);
  if (status) grip_leave(self);
  return status;
}

/* ---------------------------------------------------------------- recording */

/* An hour and more after their time leases and notes are taken away; over_ms: how long after. */
typedef struct sweep {
  hl__shm_space *space;
  int64_t over_ms;
  unsigned ended;
} sweep;

/* For how long the lease's time has been up; less than 0: it is not up. The wall clock may be set
   at any time, so it counts only for a note, which has no other end any more. */
static int64_t over_for(hl__shm_space *space, hl__shm_lease *lease, uint64_t end) {
  if (end) return hl__between_ms(hl__shm_end_ms(end), hl__shm_boot_ms(space));
  return hl__between_ms((int64_t)atomic_load(&lease->end_unix), hl__unix_ms());
}

static bool sweep_step(void *context, uint32_t index) {
  sweep *self = context;
  hl__shm_lease *lease = hl__shm_lease_at(self->space, index);
  if (!lease) return true;
  const uint64_t stamp = atomic_load(&lease->base.stamp);
  if (!is_lease(lease, stamp)) {
    /* A process died after it had ended the lease, before it took its claims away. */
    hl__shm_lease_forget(self->space, index, stamp);
    return true;
  }
  const uint64_t end = atomic_load(&lease->base.end);
  grip it = {0};
  if (over_for(self->space, lease, end) < self->over_ms ||
      grip_take(self->space, index, stamp, 0, &it) != HL_OK)
    return true;
  if (end == 0)
    note_forget(&it);
  else
    (void)hl__shm_lease_end(self->space, index, stamp, end);
  grip_leave(&it);
  self->ended++;
  return true;
}

/* A record. Before the table grows much, leases and notes go whose time was up long ago. */
static uint32_t record_make(hl__shm_space *space) {
  static hl__a32 looked_at;
  uint32_t chunks = hl__shm_chunks(space), last = atomic_load(&looked_at);
  sweep it = {space, KEPT_MS, 0};
  if (chunks > last + last / 8 || chunks < last) {
    atomic_store(&looked_at, chunks);
    hl__shm_each_lease(space, sweep_step, &it);
  }
  uint32_t index = hl__shm_lease_make(space);
  if (index) return index;
  /* There is no space: then nothing stays that is over. */
  it.over_ms = 0;
  hl__shm_each_lease(space, sweep_step, &it);
  return it.ended > 0 ? hl__shm_lease_make(space) : 0;
}

static void text_set(hl__a64 *words, size_t bytes, const char *text) {
  hl__shm_text_set(words, HL__SHM_TEXT(bytes), text, text ? strlen(text) : 0);
}

/* Writes for observers which process has the lease. */
static void whose(hl__embedded_session *session, hl__shm_lease *lease) {
  const hl_store_config *config = hl__embedded_store_of(session)->config;
  hl__shm_note *note = &lease->base.note;
  atomic_store(&note->turn, atomic_load(&note->turn) | 1u);
  text_set(note->application, sizeof note->application, config->application);
  text_set(lease->host, sizeof lease->host, config->host);
  atomic_store(&lease->pid, session->table->space->namespace << 32 | (uint32_t)config->pid);
  (void)atomic_fetch_add(&note->turn, 1u);
}

static void record_fill(hl__embedded_session *session, const hl_request *request, uint64_t token,
                        hl__shm_lease *lease) {
  const hl_lease_terms *terms = request->lease;
  hl__shm_note *note = &lease->base.note;
  char label[sizeof note->label];
  id_set(lease->id, terms->id);
  id_set(lease->secret, terms->secret);
  id_set(lease->holder, terms->holder);
  atomic_store(&lease->token, token);
  text_set(lease->owner, sizeof lease->owner, terms->owner);
  (void)hl__escape(label, sizeof label, request->label, request->label_size);
  text_set(note->label, sizeof note->label, label);
  text_set(note->path, sizeof note->path, request->path);
  atomic_store(&note->since_ms, (uint64_t)hl__unix_ms());
  atomic_store(&note->mode, (uint32_t)request->mode);
  whose(session, lease);
}

int hl__embedded_lease_write(hl__embedded_session *session, const hl_request *request,
                             hl_grant *grant, hl_error *error) {
  hl__shm_space *space = session->table->space;
  int64_t deadline = hl__shm_ns(hl__now_ms() + TAKE_MS);
  int status = hl__shm_check(space, false, error);
  if (status) return status;
  uint32_t index = record_make(space);
  hl__shm_lease *lease = index ? hl__shm_lease_at(space, index) : NULL;
  if (!lease)
    return hl__error(error, HL_ESTORE, "there is no space for a lease in %s",
                     space->directory.path);
  record_fill(session, request, grant->token, lease);
  status = hl__shm_lease_claims(session->table, index, deadline, error);
  if (status) {
    hl__shm_lease_abandon(space, index, deadline);
    return status;
  }
  /* The time counts from here: no waiter has met the lease yet. */
  grant->sent_ms = hl__boot_ms();
  grant->place = index;
  atomic_store(&lease->end_unix, (uint64_t)hl__deadline(hl__unix_ms(), request->lease->ttl));
  hl__shm_lease_publish(space, index, hl__deadline(hl__shm_boot_ms(space), request->lease->ttl));
  return HL_OK;
}

static int to_lease(hl_session *base, const hl_request *request, hl_grant *grant, hl_error *error) {
  hl__embedded_session *session = hl__embedded_session_of(base);
  int status = hl__embedded_lease_write(session, request, grant, error);
  if (status == HL_OK) hl__embedded_session_clear(session);
  return status;
}

/* -------------------------------------------------------------- one record */

/* Has the lease end `ttl` from now. False: it has ended. */
static bool extend(const grip *self, int64_t ttl, int64_t *sent_ms) {
  *sent_ms = hl__boot_ms();
  atomic_store(&self->lease->end_unix, (uint64_t)hl__deadline(hl__unix_ms(), ttl));
  return hl__shm_lease_extend(self->space, self->index, self->stamp,
                              hl__deadline(hl__shm_boot_ms(self->space), ttl));
}

static int lease_refresh(hl_session *base, const hl_lease_terms *terms, int64_t ttl,
                         int64_t deadline, int64_t *sent_ms, hl_error *error) {
  grip it = {0};
  int status = hl__shm_check(space_of(base), true, error);
  if (!status) status = enter(base, terms, at_least(deadline), &it, error);
  if (status) return status;
  if (!extend(&it, ttl, sent_ms)) status = over_error(it.lease, error);
  grip_leave(&it);
  return status;
}

static int lease_inspect(hl_session *base, const hl_lease_terms *terms, int64_t deadline,
                         int64_t *left_ms, hl_error *error) {
  grip it = {0};
  int status = hl__shm_check(space_of(base), true, error);
  if (!status) status = enter(base, terms, at_least(deadline), &it, error);
  if (status) return status;
  const uint64_t last = atomic_load(&it.lease->base.end);
  *left_ms = hl__embedded_left(it.space, last);
  if (last == 0) status = over_error(it.lease, error); /* just now */
  grip_leave(&it);
  return status;
}

static int lease_drop(hl_session *base, const hl_lease_terms *terms, bool confirm, int64_t deadline,
                      hl_error *error) {
  grip it = {0};
  int status = enter(base, terms, confirm ? at_least(deadline) : deadline, &it, error);
  if (status) return status;
  if (!hl__shm_lease_end(it.space, it.index, it.stamp, 0)) status = over_error(it.lease, error);
  grip_leave(&it);
  return status;
}

/* ------------------------------------------------------------- conversion */

/* All rows of the request, or as far as it comes. */
static int rows_convert(const grip *self, const hl_request *request, hl_mode mode,
                        hl_error *error) {
  int64_t deadline = hl__shm_ns(at_least(request->deadline));
  int status = HL_OK;
  for (size_t i = 0; i < request->n && status == HL_OK; i++) {
    hl_row row = request->rows[i];
    row.mode = (uint8_t)mode;
    status = hl__shm_lease_convert(self->space, self->index, self->stamp, &row, deadline, error);
  }
  return status;
}

/* The mode in the record comes last going up, and first going down: where a process dies in
   between, the lease has more than it says, and an import takes that back. */
static int record_convert(const grip *self, const hl_request *request, hl_error *error) {
  hl__shm_note *note = &self->lease->base.note;
  if (!request->upgrade) {
    atomic_store(&note->mode, (uint32_t)request->mode);
    return rows_convert(self, request, HL_SHARED, error);
  }
  int status = rows_convert(self, request, HL_EXCLUSIVE, error);
  if (status == HL_OK)
    atomic_store(&note->mode, (uint32_t)request->mode);
  else
    (void)rows_convert(self, request, HL_SHARED, NULL);
  return status;
}

/* The session takes the rows as any other session would, but the lease is not in its way. So it
   waits before all other waiters, as a session does that holds the row already. Once it is granted,
   the lease and the session hold the rows alone. */
static int lease_convert(hl_session *base, const hl_request *request, hl_grant *grant,
                         hl_error *error) {
  hl__embedded_session *session = hl__embedded_session_of(base);
  grip it = {0};
  uint64_t token = 0;
  int status = enter(base, request->lease, at_least(request->deadline), &it, error);
  if (status) return status;
  if (request->upgrade) {
    const hl_request own = hl__upgrade_request(request);
    grip_leave(&it); /* it waits */
    status = hl__embedded_session_take(session, &own, it.stamp, error);
    atomic_store(&session->interrupted, false);
    if (status) return status;
    token = hl__shm_token(it.space);
    const uint64_t stamp = it.stamp; /* which was not in the session's way */
    status = enter(base, request->lease, at_least(request->deadline), &it, error);
    if (status == HL_OK && it.stamp != stamp) {
      status = gone_error(error);
      grip_leave(&it);
    }
  }
  if (status == HL_OK) {
    status = record_convert(&it, request, error);
    /* An upgraded lease has its rows alone, if it is there while the session still has them. */
    if (status == HL_OK && atomic_load(&it.lease->base.end) == 0)
      status = over_error(it.lease, error);
    if (status == HL_OK && request->upgrade) {
      atomic_store(&it.lease->token, token);
      grant->token = token;
    }
    grant->place = it.index;
    grip_leave(&it);
  }
  hl__embedded_session_clear(session);
  return status;
}

/* ----------------------------------------------------------------- import */

/* Whether the lease has the rows that its text says. If a process died in an upgrade, some rows may
   be exclusive that the text calls shared: they become shared again. */
static int rows_compare(const grip *self, const hl_request *request, hl_error *error) {
  const bool exclusive = atomic_load(&self->lease->base.note.mode) == HL_EXCLUSIVE;
  size_t met = 0;
  hl_request stronger = {.n = 1, .deadline = request->deadline};
  uint32_t at = atomic_load(&self->lease->base.first);
  for (size_t steps = 0; at && steps <= request->n; steps++) {
    hl__shm_node *node = hl__shm_node_at(self->space, at);
    if (!node || atomic_load(&node->session) != self->index) break;
    uint64_t claim = atomic_load(&node->claim);
    const hl_row *row = NULL;
    for (size_t i = 0; i < request->n && !row; i++)
      if (hl__shm_row_key(&request->rows[i]) == hl__shm_key_of(claim)) row = &request->rows[i];
    if (!row || hl__shm_state_of(claim) != HL__HELD) break;
    if (row->mode != hl__shm_mode_of(claim)) {
      if (exclusive || row->mode != HL_SHARED) break;
      stronger.rows = row;
      int status = rows_convert(self, &stronger, HL_SHARED, error);
      if (status) return status;
    }
    met++;
    at = node->chain;
  }
  if (!at && met == request->n) return HL_OK;
  if (atomic_load(&self->lease->base.end) == 0) return over_error(self->lease, error);
  return hl__record_refuse(HL__RECORD_MISMATCH, &(hl__record){HL__RECORD_FITS}, error);
}

static int adopt(hl__embedded_session *session, const grip *self, const hl_request *request,
                 hl_grant *grant, hl_error *error) {
  const hl_lease_terms *terms = request->lease;
  hl__shm_lease *lease = self->lease;
  uint8_t found[16];
  /* The caller gave up while this thread waited for the lease. Another import may have come. */
  if (atomic_load(&session->interrupted))
    return hl__error(error, HL_CANCELLED, "the import was interrupted");
  hl__record record = {HL__RECORD_FITS, .import = true};
  record.secret = hl__embedded_id_is(lease->secret, terms->secret);
  hl__embedded_id_get(found, holder_of(lease));
  record.holder = hl__replaces(terms, found, grant);
  int status = judge(lease, &record, error);
  if (status == HL_OK) status = rows_compare(self, request, error);
  if (status) return status;
  whose(session, lease);
  uint64_t turn = atomic_load(&lease->turn);
  id_set(turn % 2 ? lease->holder : lease->heir, terms->holder);
  atomic_store(&lease->turn, turn + 1); /* now it is the new holder's */
  grant->token = atomic_load(&lease->token);
  grant->place = self->index;
  return extend(self, terms->ttl, &grant->sent_ms) ? HL_OK : over_error(lease, error);
}

static int lease_adopt(hl_session *base, const hl_request *request, hl_grant *grant,
                       hl_error *error) {
  grip it = {0};
  int status = grip_named(base, request->lease, at_least(request->deadline), &it, error);
  if (status) return status;
  status = adopt(hl__embedded_session_of(base), &it, request, grant, error);
  grip_leave(&it);
  return status;
}

/* ------------------------------------------------------------ many records */

static int lease_list(hl_session *base, const hl_lease_filter *filter, hl_holder_fn fn,
                      void *context, int64_t deadline, hl_error *error) {
  hl__shm_space *space = space_of(base);
  (void)deadline; /* it does not wait */
  int status = hl__shm_check(space, false, error);
  if (status == HL_OK) hl__embedded_leases_list(space, filter, fn, context);
  return status;
}

typedef struct revocation {
  hl__shm_space *space;
  const hl_lease_filter *filter;
  int64_t deadline;
  uint64_t last, count; /* last: the greatest stamp of the leases that were there at its begin */
  int status;
} revocation;

static bool revoke_step(void *context, uint32_t index) {
  revocation *self = context;
  hl__shm_lease *lease = hl__shm_lease_at(self->space, index);
  uint64_t stamp = lease ? atomic_load(&lease->base.stamp) : UINT64_MAX;
  grip it = {0};
  if (stamp > self->last || !hl__embedded_lease_matches(self->space, index, self->filter))
    return true;
  self->status = grip_take(self->space, index, stamp, self->deadline, &it);
  if (self->status) {
    if (self->status != HL__ABSENT) return false;
    self->status = HL_OK;
    return true;
  }
  text_set(lease->by, sizeof lease->by, self->filter->by);
  text_set(lease->reason, sizeof lease->reason, self->filter->reason);
  atomic_store(&lease->revoked, (uint64_t)hl__unix_ms());
  const bool ended = hl__shm_lease_end(self->space, index, stamp, 0);
  self->count += ended;
  if (!ended) note_forget(&it); /* before */
  grip_leave(&it);
  return true;
}

/* Ends expired leases, too, which a refresh could revive, but none of a waiter that it lets in. */
static int lease_revoke(hl_session *base, const hl_lease_filter *filter, int64_t deadline,
                        uint64_t *count, hl_error *error) {
  hl__shm_space *space = space_of(base);
  int status = hl__shm_check(space, false, error);
  if (status) return status;
  uint64_t last = atomic_load(&space->table->header.seq);
  revocation self = {space, filter, at_least(deadline), last, 0, HL_OK};
  hl__shm_each_lease(space, revoke_step, &self);
  *count += self.count;
  return self.status ? busy_error(error) : HL_OK;
}

/* The counter is the directory's, in the table of all who use it. */
static int lease_raise(hl_session *base, uint64_t token, int64_t deadline, hl_error *error) {
  hl__shm_space *space = space_of(base);
  (void)deadline;
  int status = hl__shm_check(space, false, error);
  if (status == HL_OK) hl__shm_token_raise(space, token);
  return status;
}

const hl_lease_ops hl__embedded_leases = {
    .refresh = lease_refresh,
    .inspect = lease_inspect,
    .drop = lease_drop,
    .convert = lease_convert,
    .adopt = lease_adopt,
    .to_lease = to_lease,
    .list = lease_list,
    .revoke = lease_revoke,
    .raise = lease_raise,
};
