/*
 * lease.c - what a worker's threads do with leases: see worker.h. Beside the records of soak.h nothing is noted; the
 * checker decides. Where an answer can be wrong by itself (a token that an import changes, a lease that is `released`
 * while it is had), the thread complains at once.
 *
 * Times to live are short, so that many end: most leases are given back long before, some are
 * held to their last moment, some beyond it. A holder whose lease is over waits for a while, or
 * not, and then refreshes, releases or forgets it.
 */
#include "worker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* An import and a revocation have no time-out; the library gives up after that. */
#define ANSWER_MS 10000
/* No thread imports a text that was put so long ago. */
#define TEXT_OLD (8 * S)

static int64_t ttl_choose(dice *d) {
  int kind = roll_below(d, 100);
  return kind < 60   ? 50 + roll_below(d, 250)
         : kind < 90 ? 300 + roll_below(d, 700)
                     : 1000 + roll_below(d, TTL_MOST - 999);
}

static void owner_name(char out[24], int owner) { (void)snprintf(out, 24, "o%d", owner); }

/* Many are held for a moment only, as sessions are; the others to their end, or beyond, or renewed. */
static int64_t hold_lease(dice *d, int64_t ttl, int64_t short_one) {
  int kind = roll_below(d, 100);
  if (kind < 80) return short_one;
  return roll_below(d, (int)(kind < 94 ? 2 * ttl : 4 * ttl)) * MS;
}

/* When it is refreshed next, after a grant or a refresh: too late, in the last moment, or before. */
static void plan_refresh(thread *self, lane *l) {
  dice *d = &self->dice;
  int kind = roll_below(d, 100);
  l->late_at = l->heard_at = 0;
  l->refresh_at = kind < 40   ? INT64_MAX
                  : kind < 65 ? 0
                              : now_ns() + roll_below(d, (int)l->ttl) * MS;
}

void lease_choose(thread *self, lane *l, record *r, hl_options *options, char *label, char *owner) {
  dice *d = &self->dice;
  int number = roll_below(d, OWNERS);
  options->ttl = l->ttl = ttl_choose(d);
  options->auto_refresh = roll_percent(d, 25);
  options->auto_release = roll_percent(d, 90);
  record_leases(r, l->ttl, number, options->auto_refresh, !options->auto_release);
  owner_name(owner, number);
  options->owner = owner;
  options->label_size = (size_t)snprintf(label, 24, "%llu", (unsigned long long)r->handle);
  options->label = label;
  l->lease = true;
}

/* --------------------------------------------------- all the records of a lane */

static void each_sure(lane *l, int64_t when) {
  for (int i = 0; i < l->n; i++) atomic_store(&l->records[i]->sure, when);
}

static void each_yields(lane *l) {
  for (int i = 0; i < l->n; i++) record_yields(l->records[i]);
}

/* A refresh is sent: its end is unknown before it is answered, and it may be an earlier one. */
static void each_asks(lane *l, int64_t ttl) {
  for (int i = 0; i < l->n; i++) {
    record *r = l->records[i];
    if (r->ttl_most < ttl) r->ttl_most = ttl;
    atomic_store(&r->expires, 0);
    if (r->promised > l->asked_at + ttl * MS) r->promised = l->asked_at + ttl * MS;
  }
}

/* The lease was refreshed, for so long at most. */
static void each_expires(lane *l, int64_t ttl) {
  for (int i = 0; i < l->n; i++)
    if (!l->records[i]->refreshes) atomic_store(&l->records[i]->expires, now_ns() + (ttl + 1) * MS);
  lane_promise(l);
}

void lease_held(thread *self, lane *l) {
  record *r = l->records[0];
  count(COUNT_LEASES);
  l->until = now_ns() + hold_lease(&self->dice, l->ttl, l->until - now_ns());
  if (r->kind == CALL_IMPORT) {
    count(COUNT_IMPORTS);
    each_sure(l, r->called);
    if (r->token != r->before)
      complain(
          "worker %d thread %d: an import changes the token of lease %llu from %016llx to %016llx",
          r->worker, r->thread, (unsigned long long)r->handle, (unsigned long long)r->before,
          (unsigned long long)r->token);
  }
  plan_refresh(self, l);
  each_expires(l, l->ttl);
}

/* ------------------------------------------------------------------- endings */

static void lease_free(lane *l) {
  if (l->pending) hl_pending_free(l->pending);
  hl_lock_free(l->lock);
  l->pending = NULL;
  l->lock = NULL;
}

/* The holder hears that the lease is lost, and perhaps who revoked it. */
static void lease_told(lane *l, const hl_error *error, int64_t asked_at, int64_t asked_ttl) {
  int64_t ending = now_ns();
  for (int i = 0; i < l->n; i++) {
    record *r = l->records[i];
    r->status = HL_ELOST;
    r->lost_at = asked_at;
    r->asked_ttl = asked_ttl;
    r->revocation = revocation_of(error->revoked_by);
    (void)snprintf(r->why, sizeof r->why, "%.119s", error->message);
  }
  count(COUNT_LOST);
  if (error->revoked_by[0]) count(COUNT_TOLD);
  lease_free(l);
  lane_end(l, END_LOST, ending);
}

/* Puts the text where another thread may find it. */
static void text_put(const lane *l, const char *text, dice *d) {
  text_slot *slot = &shared->texts[roll_below(d, TEXTS)];
  const record *first = l->records[0];
  int nobody = 0;
  if (strlen(text) >= TEXT_MOST ||
      !atomic_compare_exchange_strong(&slot->busy, &nobody, first->worker + 1))
    return;
  slot->there = true;
  (void)strcpy(slot->text, text);
  slot->handle = first->handle;
  slot->token = hl_lock_token(l->lock);
  slot->owner = first->owner;
  slot->targets = 0;
  slot->since = 0;
  slot->promised = first->promised;
  slot->put = now_ns();
  slot->ttl = l->ttl;
  slot->ttl_most = first->ttl_most;
  memset(slot->modes, 0, sizeof slot->modes);
  for (int i = 0; i < l->n; i++) {
    const record *r = l->records[i];
    int64_t since = r->since ? r->since : r->granted;
    if (slot->since < since) slot->since = since;
    slot->targets += r->targets;
    for (int node = 0; node < NODES; node++)
      if (slot->modes[node] < r->modes[node]) slot->modes[node] = r->modes[node];
  }
  atomic_store(&slot->busy, 0);
}

static void lease_export(thread *self, lane *l) {
  hl_error error;
  char *text = NULL;
  int64_t ending = now_ns();
  int status = hl_lock_export(l->lock, &text, &error);
  if (status == HL_ELOST) {
    lease_told(l, &error, atomic_load(&l->records[0]->held), 0);
    return;
  }
  if (status && !fault_allows_lease(status, ending))
    complain("worker %d thread %d: an export failed with %s: %s", l->records[0]->worker,
             self->number, hl_status_name(status), error.message);
  if (status == HL_OK) {
    count(COUNT_EXPORTS);
    if (hl_lock_is_held(l->lock))
      complain("worker %d thread %d: is_held after an export", l->records[0]->worker, self->number);
    text_put(l, text, &self->dice);
    free(text);
  } else if (!l->records[0]->stays) {
    each_yields(l);
  }
  lease_free(l);
  lane_end(l, status ? END_LEFT : END_EXPORTED, ending);
}

static void lease_release(thread *self, lane *l, bool confirm) {
  hl_error error;
  bool asking = l->state == LANE_ASKING, refreshing = asking && l->question == ASK_REFRESH;
  int64_t ending = now_ns();
  each_yields(l);
  int status = hl_lock_release(l->lock, confirm, &error);
  if (status == HL_ELOST && l->lease) {
    lease_told(l, &error, refreshing ? l->asked_at : ending, refreshing ? l->asked_ttl : 0);
    return;
  }
  if (status == HL_OK && confirm && l->lease) each_sure(l, ending);
  lease_free(l);
  if (status == HL_ELOST) count(COUNT_LOST);
  bool left = status || (asking && !confirm); /* it follows the question's end */
  lane_end(l, status == HL_ELOST ? END_LOST : left ? END_LEFT : END_RELEASED, ending);
  (void)self;
}

void lease_drop(thread *self, lane *l) {
  /* More are left behind when all are to rest: see probe_main. */
  int how = roll_below(&self->dice, atomic_load(&shared->pause) ? 10 : 40);
  bool stays = l->lease && l->records[0]->stays, pending = l->pending != NULL;
  if (pending && how % 2) {
    hl_pending_free(l->pending);
    l->pending = NULL;
  }
  if (how < 5 || how >= 16) {
    lease_release(self, l, how < 2 || how >= 28);
  } else if (how < 8 && !pending && l->lease) {
    lease_export(self, l);
  } else {
    int64_t ending = now_ns();
    if (!stays)
      each_yields(l);
    else
      count(COUNT_LEFT);
    lease_free(l);
    lane_end(l, stays || pending ? END_LEFT : END_FREED, ending);
  }
}

void lease_closing(lane *l) {
  if (l->n && !l->records[0]->stays) each_yields(l);
}

void lease_closed(lane *l, int64_t ending) {
  lane_end(l, l->records[0]->stays && l->state != LANE_STARTED ? END_LEFT : END_CLOSED, ending);
}

/* ------------------------------------------------------------------ questions */

/* Notes the failure of a call on the lock, which need not be lost by it. */
static void lease_failed(const lane *l, const char *what, int status, const hl_error *error) {
  const record *r = l->records[0];
  count(COUNT_FAILED);
  if (status == HL_ECONNECTION || status == HL_TIMEOUT || status == HL_BUSY ||
      fault_allows_lease(status, l->asked_at) || killed_query(error->server_errno, error->message))
    return;
  complain("worker %d thread %d: %s failed with %s: %s", r->worker, r->thread, what,
           hl_status_name(status), error->message);
}

static void answered(thread *self, lane *l, int status, const hl_error *error) {
  static const char *const names[] = {"a refresh", "a check", "to_lease"};
  l->state = LANE_HELD;
  if (status == HL_OK) {
    each_sure(l, l->asked_at);
    if (l->question == ASK_CONVERT) {
      count(COUNT_CONVERTED);
      l->lease = true;
      l->ttl = l->asked_ttl;
      l->until =
          now_ns() + hold_lease(&self->dice, l->ttl, roll_below(&self->dice, 3000) * INT64_C(1000));
      if (hl_lock_kind(l->lock) != HL_LEASE)
        complain("worker %d: to_lease has left a session", l->records[0]->worker);
    }
    if (l->question == ASK_CHECK) return;
    if (l->question == ASK_REFRESH) count(COUNT_REFRESHES);
    if (l->question == ASK_REFRESH && l->was_over) count(COUNT_RESTORED);
    plan_refresh(self, l);
    each_expires(l, l->asked_ttl);
    return;
  }
  if (status == HL_ELOST && l->question == ASK_REFRESH) {
    lease_told(l, error, l->asked_at, l->asked_ttl);
  } else if (status == HL_ELOST && l->question == ASK_CHECK) {
    /* Or only its time is up. */
    if (hl_lock_look(l->lock) == HL_LOST) lease_told(l, error, l->asked_at, 0);
  } else if (status == HL_ELOST) {
    count(COUNT_LOST);
    int64_t ending = now_ns();
    lease_free(l);
    lane_end(l, END_LOST, ending);
  } else {
    lease_failed(l, names[l->question], status, error);
    if (l->question == ASK_CONVERT)
      for (int i = 0; i < l->n; i++) l->records[i]->lease = false; /* it is a session again */
  }
}

static void ask(thread *self, lane *l, lane_question question, int64_t ttl,
                const hl_options *options) {
  hl_error error;
  int status;
  bool block = self->kind == BLOCKING || roll_percent(&self->dice, 50);
  l->question = question;
  l->asked_at = now_ns();
  l->asked_ttl = ttl ? ttl : l->ttl;
  if (question != ASK_CHECK) each_asks(l, l->asked_ttl);
  switch (question) {
  case ASK_REFRESH:
    status = block ? hl_lock_refresh(l->lock, ttl, &error)
                   : hl_lock_start_refresh(l->lock, ttl, &l->pending, &error);
    break;
  case ASK_CHECK:
    status =
        block ? hl_lock_check(l->lock, &error) : hl_lock_start_check(l->lock, &l->pending, &error);
    break;
  default:
    status = block ? hl_lock_to_lease(l->lock, options, &error)
                   : hl_lock_start_to_lease(l->lock, options, &l->pending, &error);
  }
  if (status == HL_OK && l->pending)
    l->state = LANE_ASKING;
  else
    answered(self, l, status, &error);
}

void lease_answer(thread *self, lane *l) {
  hl_error error;
  hl_lock *none;
  if (!hl_pending_done(l->pending)) return;
  int status = hl_pending_wait(l->pending, 0, &none, &error);
  hl_pending_free(l->pending);
  l->pending = NULL;
  answered(self, l, status, &error);
}

void lease_convert(thread *self, lane *l) {
  dice *d = &self->dice;
  hl_options options = HL_OPTIONS_INIT;
  char owner[24], label[24];
  int number = roll_below(d, OWNERS);
  if (hl_lock_look(l->lock) != HL_HELD) return;
  int64_t now = now_ns();
  options.ttl = ttl_choose(d);
  options.auto_refresh = roll_percent(d, 25);
  options.auto_release = roll_percent(d, 90);
  owner_name(owner, number);
  options.owner = owner;
  options.label_size =
      (size_t)snprintf(label, sizeof label, "%llu", (unsigned long long)l->records[0]->handle);
  options.label = label;
  for (int i = 0; i < l->n; i++) {
    record *r = l->records[i];
    r->promised = 0; /* the session's promise */
    r->leased = now;
    r->parts = l->n;
    record_leases(r, options.ttl, number, options.auto_refresh, !options.auto_release);
  }
  l->was_over = false;
  ask(self, l, ASK_CONVERT, options.ttl, &options);
}

bool lease_confirm(lane *l) {
  if (l->state != LANE_HELD) return false;
  int64_t before = now_ns();
  int status = hl_lock_check(l->lock, NULL);
  if (status == HL_ELOST) l->heard_at = before;
  if (status) return false;
  each_sure(l, before);
  return true;
}

static int64_t refresh_ttl(dice *d) { return roll_percent(d, 60) ? 0 : ttl_choose(d); }

/* The lease's time is up: does nothing for a while. */
static void over(thread *self, lane *l) {
  dice *d = &self->dice;
  if (!l->late_at) {
    count(COUNT_OVER);
    l->late_at = now_ns() + roll_below(d, roll_percent(d, 50) ? 30000 : 600000) * INT64_C(1000);
    return;
  }
  if (now_ns() < l->late_at) return;
  if (roll_percent(d, 80)) {
    l->was_over = true;
    ask(self, l, ASK_REFRESH, refresh_ttl(d), NULL);
  } else {
    lease_drop(self, l);
  }
}

void lease_turn(thread *self, lane *l) {
  dice *d = &self->dice;
  bool held = lane_sample(l);
  if (l->state == LANE_ASKING) { /* the question may be given up */
    if (roll_percent(d, 2)) lease_drop(self, l);
    return;
  }
  if (!held && hl_lock_look(l->lock) == HL_LOST) {
    /* The keeper, which refreshes it for us, has heard it. */
    hl_error error;
    hl_lock_loss(l->lock, &error);
    if (!l->records[0]->refreshes && !l->heard_at)
      complain("worker %d thread %d: lease %llu is lost, and nobody has asked: %s",
               l->records[0]->worker, self->number, (unsigned long long)l->records[0]->handle,
               error.message);
    lease_told(l, &error, l->heard_at ? l->heard_at : atomic_load(&l->records[0]->held), 0);
    return;
  }
  if (!held) {
    over(self, l);
    return;
  }
  l->late_at = 0; /* who refreshes it for us was late */
  if (roll_percent(d, 20)) lane_promise(l);
  if (roll_percent(d, 15)) {
    lane_update(self, l);
    return;
  }
  int64_t left = hl_lock_remaining(l->lock);
  l->was_over = false;
  if (now_ns() > l->until) {
    lease_drop(self, l);
  } else if (now_ns() > l->refresh_at && (l->refresh_at || left <= 2)) {
    ask(self, l, ASK_REFRESH, refresh_ttl(d), NULL);
  } else if (roll_below(d, 200) == 0) {
    ask(self, l, ASK_CHECK, 0, NULL);
  } else if (roll_below(d, 300) == 0) {
    int status = hl_lock_extend(l->lock, self->plan, NULL, NULL);
    if (status != HL_EUNSUPPORTED && status != HL_ELOST && status != HL_EMISUSE)
      complain("worker %d thread %d: extend of a lease is %s", l->records[0]->worker, self->number,
               hl_status_name(status));
  }
}

/* --------------------------------------------------------------------- texts */

/* A text of which one character is another one is none. */
static void import_damaged(thread *self, char *text) {
  hl_error error;
  hl_lock *lock = NULL;
  size_t size = strlen(text), at = (size_t)roll_below(&self->dice, (int)size);
  text[at] = text[at] == 'A' ? 'B' : 'A';
  int64_t before = now_ns();
  int status = hl_import(self->manager, text, size, NULL, &lock, &error);
  if (status == HL_OK)
    complain("worker %d thread %d: a damaged text was imported", self->records->worker,
             self->number);
  else if (status != HL_EMISMATCH && status != HL_ELOST && status != HL_ECONNECTION &&
           !fault_allows_lease(status, before))
    complain("worker %d thread %d: a damaged text is %s: %s", self->records->worker, self->number,
             hl_status_name(status), error.message);
  hl_lock_free(lock);
}

void lease_import(thread *self, lane *l) {
  dice *d = &self->dice;
  text_slot *slot = &shared->texts[roll_below(d, TEXTS)];
  char text[TEXT_MOST];
  int nobody = 0;
  hl_options options = HL_OPTIONS_INIT;
  hl_error error;
  record *r = record_new(self, CALL_IMPORT, 0, ANSWER_MS);
  if (!r || !atomic_compare_exchange_strong(&slot->busy, &nobody, r->worker + 1)) return;
  bool there = slot->there && now_ns() - slot->put < TEXT_OLD;
  if (there) {
    (void)strcpy(text, slot->text);
    options.ttl = roll_percent(d, 30) ? 0 : ttl_choose(d);
    options.auto_refresh = roll_percent(d, 25);
    options.auto_release = roll_percent(d, 90);
    l->ttl = options.ttl ? options.ttl : slot->ttl;
    r->handle = slot->handle;
    record_leases(r, slot->ttl_most > l->ttl ? slot->ttl_most : l->ttl, slot->owner,
                  options.auto_refresh, !options.auto_release);
    r->since = slot->since;
    r->promised = slot->promised;
    r->before = slot->token;
    r->asked_ttl = l->ttl;
    r->targets = slot->targets;
    memcpy(r->modes, slot->modes, sizeof r->modes);
  }
  /* Otherwise the text stays for another import: the later one has the lease. */
  if (roll_percent(d, 40)) slot->there = false;
  atomic_store(&slot->busy, 0);
  if (!there) return;
  if (roll_percent(d, 5)) {
    import_damaged(self, text);
    return;
  }
  l->lease = true;
  l->records[0] = r;
  l->n = 1;
  count(COUNT_CALLS);
  record_call(r);
  bool block = self->kind == BLOCKING;
  int status =
      block ? hl_import(self->manager, text, strlen(text), &options, &l->lock, &error)
            : hl_start_import(self->manager, text, strlen(text), &options, &l->pending, &error);
  if (status == HL_OK && !block) {
    l->state = LANE_STARTED;
    l->cancel_at = roll_percent(d, 5) ? now_ns() + roll_below(d, 2000) * INT64_C(1000) : 0;
    return;
  }
  call_returned(r, status, l->lock, &error, false);
  if (status == HL_OK)
    lane_held(self, l);
  else
    l->n = 0, l->lease = false;
}

/* ------------------------------------------------------------------ revoking */

typedef struct choice {
  dice *dice;
  int seen;
  hl_holder holder;
} choice;

static void choose_one(void *context, const hl_holder *holder) {
  choice *self = context;
  if (roll_below(self->dice, ++self->seen) == 0) self->holder = *holder;
}

void lease_revoke_sometimes(thread *self) {
  dice *d = &self->dice;
  char by[32], owner[24];
  choice found = {.dice = d};
  hl_filter filter = HL_FILTER_INIT;
  hl_error error;
  if (roll_below(d, 3000)) return;
  record *r = record_new(self, CALL_REVOKE, 0, ANSWER_MS);
  if (!r) return;
  revoke_filter how = (revoke_filter)roll_below(d, FILTERS);
  if (how == BY_ID) {
    if (hl_manager_leases(self->manager, NULL, choose_one, &found, NULL) || !found.seen) return;
    if (found.holder.kind != HL_LEASE || found.holder.remaining_ms > TTL_MOST)
      complain("worker %d: `leases` tells of one that has %lld ms", r->worker,
               (long long)found.holder.remaining_ms);
    r->handle = strtoull(found.holder.label, NULL, 10);
    filter.id = found.holder.id;
  } else if (how == BY_OWNER) {
    if (strncmp(shared->dsn, "memcached:", 10) == 0)
      return; /* unsupported: it finds leases by their nodes alone */
    r->owner = roll_below(d, OWNERS);
    owner_name(owner, r->owner);
    filter.owner = owner;
  } else {
    targets_choose(self, r, true);
    filter.plan = self->plan;
  }
  r->filter = how;
  r->revocation = handle_new() + 1;
  (void)snprintf(by, sizeof by, "soak-%llu", (unsigned long long)r->revocation);
  record_call(r);
  r->status = hl_manager_revoke(self->manager, &filter, by, "at random", &r->revoked, &error);
  if (r->status == HL_OK && r->revoked) count(COUNT_REVOKES);
  if (r->status == HL_OK && how == BY_ID && r->revoked > 1)
    complain("worker %d: one id is %llu leases", r->worker, (unsigned long long)r->revoked);
  if (r->status && r->status != HL_ECONNECTION && r->status != HL_TIMEOUT && r->status != HL_BUSY &&
      !fault_allows_lease(r->status, r->called) && !killed_query(error.server_errno, error.message))
    complain("worker %d: a revocation failed with %s: %s", r->worker, hl_status_name(r->status),
             error.message);
  record_end(r, END_NO_GRANT, r->called);
}
