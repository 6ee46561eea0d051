/*
 * leases.c - the operations on the records of a lease at a quorum. Each asks all members at once.
 * An operation ends as soon as a quorum has given one answer, or no quorum can.
 */
#include "quorum_store.h"

#include <stdlib.h>
#include <string.h>

typedef struct polling {
  hl__quorum_session *session;
  hl__quorum_store *store;
  hl__quorum_ask *ask[HL__QUORUM_MAX];
  int64_t begun;
  unsigned ok, over, lost, open; /* of those that were asked; over: its record's time is up */
  const hl_error *revoked;       /* what a member has said of it */
} polling;

static polling polling_of(hl_session *base) {
  return (polling){.session = (hl__quorum_session *)(void *)base,
                   .store = hl__quorum_store_of(base),
                   .begun = hl__now_ms()};
}

/* False: no memory. */
static hl__quorum_ask *ask_add(polling *self, unsigned i, hl__quorum_kind kind,
                               hl__quorum_lease *lease, hl__quorum_query *query)
    HL__REQUIRES(hl__quorum_mutex) {
  self->ask[i] = hl__ask_new(&self->store->members[i], kind, lease, query, self->session);
  return self->ask[i];
}

static void count(polling *self) HL__REQUIRES(hl__quorum_mutex) {
  self->ok = self->over = self->lost = self->open = 0;
  for (unsigned i = 0; i < self->store->n; i++) {
    const hl__quorum_ask *ask = self->ask[i];
    if (!ask) continue;
    if (ask->state != HL__ASK_DONE) {
      self->open++;
      continue;
    }
    bool over = ask->kind == HL__ASK_INSPECT && ask->status == HL_OK && ask->left_ms == 0;
    self->over += over;
    self->ok += ask->status == HL_OK && !over;
    self->lost += ask->status == HL_ELOST;
    if (hl__quorum_is_revoked(ask)) self->revoked = &ask->error;
  }
}

/* Waits until a quorum has given one answer, or none can. A member that has not answered within
   the time of a question is suspect. */
static void await(polling *self, int64_t deadline) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_store *store = self->store;
  int64_t patience = self->begun + HL__QUORUM_ANSWER_MS;
  int64_t end = deadline < patience ? deadline : patience;
  for (;;) {
    count(self);
    if (self->open == 0 || self->ok >= store->need || self->revoked ||
        self->lost > store->n - store->need ||
        (self->ok + self->open < store->need && self->lost + self->open <= store->n - store->need))
      return;
    if (hl__now_ms() >= end) break;
    hl__quorum_wait(self->session, end);
  }
  if (end == patience) hl__silent_suspect(store, self->ask);
}

/* Waits for all members that are not suspect, and for a quorum of answers: one member may know what
   another does not. */
static void await_all(polling *self) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_store *store = self->store;
  int64_t end = self->begun + HL__QUORUM_ANSWER_MS;
  for (;;) {
    count(self);
    unsigned awaited = 0;
    for (unsigned i = 0; i < store->n; i++)
      awaited +=
          hl__ask_is_open(self->ask[i]) && (!store->members[i].suspect || self->ok < store->need);
    if (awaited == 0 || hl__now_ms() >= end) break;
    hl__quorum_wait(self->session, end);
  }
  hl__silent_suspect(store, self->ask);
}

/* Leaves the questions. Open ones go on, unless they are unwanted. */
static void polling_end(polling *self, bool unwanted) HL__REQUIRES(hl__quorum_mutex) {
  hl__asks_leave(self->ask, unwanted);
}

/* The members have neither confirmed the lease nor lost it: fails. HL_TIMEOUT where the answers
   that have not come could still decide. */
static int unknown(polling *self, const char *what, hl_error *error)
    HL__REQUIRES(hl__quorum_mutex) {
  bool undecided = self->open > 0 && self->ok + self->open >= self->store->need;
  int status = undecided ? HL_TIMEOUT : hl__quorum_failure(self->store, self->ask);
  return hl__quorum_error(self->store, status, self->ask, what, error);
}

static int gone(polling *self, hl_error *error) HL__REQUIRES(hl__quorum_mutex) {
  if (self->revoked) {
    if (error) *error = *self->revoked;
    return HL_ELOST;
  }
  return hl__quorum_error(self->store, HL_ELOST, self->ask, "do not have the lease", error);
}

/* -------------------------------------------------------------- one lease */

/* Asks the members that are in it. */
static void refresh_ask(polling *self, hl__quorum_lease *lease, uint64_t turn, int64_t ttl)
    HL__REQUIRES(hl__quorum_mutex) {
  int64_t doubt = hl__deadline(hl__boot_ms(), ttl);
  if (doubt < lease->end) lease->end = doubt;
  for (unsigned i = 0; i < self->store->n; i++) {
    if (!lease->at[i].in) continue;
    hl__quorum_ask *ask = ask_add(self, i, HL__ASK_REFRESH, lease, NULL);
    if (!ask) continue;
    ask->terms.turn = turn;
    ask->ttl = ttl;
    hl__ask_give(ask);
  }
}

/* Reads the answers to a refresh. */
static int refreshed(polling *self, hl__quorum_lease *lease, int64_t ttl, int64_t *sent_ms,
                     hl_error *error) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_store *store = self->store;
  for (unsigned i = 0; i < store->n; i++) {
    const hl__quorum_ask *ask = self->ask[i];
    if (!ask || ask->state != HL__ASK_DONE) continue;
    if (ask->status == HL_OK) hl__known_sent(&lease->at[i], ask->sent_ms, ttl);
    if (ask->status == HL_ELOST) lease->at[i].in = false;
  }
  if (self->revoked || hl__known_in(store, lease) < store->need) {
    /* If a caller has released the lease meanwhile, members have dropped it for him. To a second
       drop they would answer that it is lost. */
    if (!lease->dropped) hl__quorum_abandon(store, lease);
    return gone(self, error);
  }
  if (self->ok < store->need) {
    int64_t till = hl__known_until(store, lease);
    if (till) *sent_ms = till - ttl;
    return unknown(self, "did not refresh", error);
  }
  *sent_ms = hl__known_since(store, lease, ttl);
  lease->held = !lease->dropped;
  lease->end = hl__deadline(*sent_ms, ttl);
  hl__quorum_heal(store, lease); /* only while a quorum has it for sure */
  return HL_OK;
}

static int lease_refresh(hl_session *base, const hl_lease_terms *terms, int64_t ttl,
                         int64_t deadline, int64_t *sent_ms, hl_error *error) {
  polling self = polling_of(base);
  hl__quorum_mutex_lock(self.store);
  hl__quorum_lease *lease = hl__known_make(self.store, terms, NULL);
  int status;
  if (lease) {
    refresh_ask(&self, lease, terms->turn, ttl);
    await(&self, deadline);
    status = refreshed(&self, lease, ttl, sent_ms, error);
  } else {
    status = hl__error_memory(error);
  }
  polling_end(&self, false);
  hl__known_unref(lease);
  hl__quorum_mutex_unlock(self.store);
  return status;
}

/* The `need`-th longest of the times; 0 where fewer members have the lease. */
static int64_t nth_left(const polling *self) HL__REQUIRES(hl__quorum_mutex) {
  int64_t times[HL__QUORUM_MAX];
  unsigned n = 0;
  for (unsigned i = 0; i < self->store->n; i++)
    if (hl__ask_is_ok(self->ask[i])) times[n++] = self->ask[i]->left_ms;
  return hl__nth_greatest(times, n, self->store->need);
}

/* Asks the members that are in it whether they have its record. Returns how many are asked. */
static unsigned inspect_ask(polling *self, hl__quorum_lease *lease) HL__REQUIRES(hl__quorum_mutex) {
  unsigned asked = 0;
  for (unsigned i = 0; i < self->store->n; i++) {
    if (!lease->at[i].in || !ask_add(self, i, HL__ASK_INSPECT, lease, NULL)) continue;
    hl__ask_give(self->ask[i]);
    asked++;
  }
  return asked;
}

static int lease_inspect(hl_session *base, const hl_lease_terms *terms, int64_t deadline,
                         int64_t *left_ms, hl_error *error) {
  polling self = polling_of(base);
  int status = HL_OK;
  hl__quorum_mutex_lock(self.store);
  hl__quorum_lease *lease = hl__known_make(self.store, terms, NULL);
  unsigned asked = lease ? inspect_ask(&self, lease) : 0;
  await(&self, deadline);
  if (!lease)
    status = hl__error_memory(error);
  else if (self.revoked || asked - self.lost < self.store->need)
    status = gone(&self, error);
  else if (self.ok < self.store->need && asked - self.lost - self.over >= self.store->need)
    status = unknown(&self, "could not be asked", error);
  else
    *left_ms = nth_left(&self);
  polling_end(&self, true);
  hl__known_unref(lease);
  hl__quorum_mutex_unlock(self.store);
  return status;
}

/* ---------------------------------------------------------------- dropping */

static void drop_ask(polling *self, hl__quorum_lease *lease) HL__REQUIRES(hl__quorum_mutex) {
  /* An acquisition may have given a part back. That drop does not count here. */
  for (unsigned i = 0; !lease->dropped && i < self->store->n; i++)
    lease->at[i].gone = lease->at[i].told = false;
  lease->dropped = true;
  lease->held = false;
  for (unsigned i = 0; i < self->store->n; i++) {
    hl__quorum_part *part = &lease->at[i];
    hl__ask_takes_end(&self->store->members[i], lease);
    if (!part->in && !part->leftover) continue; /* a late grant is given back at once */
    if (!ask_add(self, i, HL__ASK_DROP, lease, NULL)) continue;
    part->leftover = true; /* until it is answered */
    hl__ask_give(self->ask[i]);
  }
}

static int drop_confirmed(polling *self, hl__quorum_lease *lease, int64_t deadline, hl_error *error)
    HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_store *store = self->store;
  int64_t patience = self->begun + HL__QUORUM_ANSWER_MS;
  int64_t end = deadline < patience ? deadline : patience;
  unsigned done = 0, open = 0;
  for (;;) {
    done = open = 0;
    count(self);
    for (unsigned i = 0; i < store->n; i++) {
      const hl__quorum_part *part = &lease->at[i];
      done += part->gone;
      open += !part->gone && (part->in || part->leftover || part->making > 0);
    }
    if (done >= store->need || done + open < store->need || self->open == 0 || hl__now_ms() >= end)
      break;
    hl__quorum_wait(self->session, end);
  }
  if (done >= store->need) return HL_OK;
  if (end == patience && self->open) hl__silent_suspect(store, self->ask);
  if (self->revoked || done + open < store->need) return gone(self, error);
  return unknown(self, "did not release", error);
}

void hl__quorum_drops_leave(hl__quorum_session *session) {
  hl__asks_leave(session->drops, false);
  hl__known_unref(session->dropped);
  session->dropped = NULL;
}

/* Without confirm, tells all members and waits for none: settle does. */
static int lease_drop(hl_session *base, const hl_lease_terms *terms, bool confirm, int64_t deadline,
                      hl_error *error) {
  polling self = polling_of(base);
  int status = HL_OK;
  hl__quorum_mutex_lock(self.store);
  hl__quorum_lease *lease = hl__known_make(self.store, terms, NULL);
  if (!lease) {
    status = hl__error_memory(error);
  } else {
    drop_ask(&self, lease);
    if (confirm) {
      status = drop_confirmed(&self, lease, deadline, error);
      polling_end(&self, false);
    } else {
      hl__quorum_drops_leave(self.session);
      self.session->dropped = lease;
      self.session->told = self.begun;
      lease->references++;
      memcpy(self.session->drops, self.ask, sizeof self.ask);
    }
  }
  hl__known_unref(lease);
  hl__quorum_mutex_unlock(self.store);
  return status;
}

/* --------------------------------------------------------------- adopting */

/* A later import of the same text must not lose a member that it has counted. So an import leaves
   no question open: a member that has not answered is not asked any more, and what it carries out
   late names the holder that the import replaced (hl_lease_ops.adopt). Healing, too, takes a record
   only from that holder.

   Of two imports at once, each may replace the other at another member. So once the members have
   answered, an import asks them again, and counts only those that still name its holder. Two
   imports that have counted a quorum have asked a common member again. The import that asked there
   later took the lease over after the earlier one had asked, and so after the earlier one had taken
   over all that it ever does. When the later import asks its other members again, the earlier one
   can replace it at none of them. */

/* Notes what the members have handed over. Returns the highest token. */
static uint64_t adopted(const polling *self, hl__quorum_lease *lease)
    HL__REQUIRES(hl__quorum_mutex) {
  uint64_t highest = 0;
  const uint8_t *replaced = NULL;
  for (unsigned i = 0; i < self->store->n; i++) {
    const hl__quorum_ask *ask = self->ask[i];
    if (!hl__ask_is_ok(ask)) continue;
    /* If members name several, each may be an import's that has counted others. */
    bool same = !replaced || memcmp(replaced, ask->grant.replaced, 16) == 0;
    replaced = same ? ask->grant.replaced : lease->terms.holder;
    hl__known_granted(&lease->at[i], &ask->grant, ask->ttl);
    if (ask->grant.token > highest) highest = ask->grant.token;
  }
  if (replaced) memcpy(lease->replaced, replaced, 16);
  return highest;
}

/* Asks the members again. Those that do not name this holder leave the lease. */
static int adopted_still(const polling *taken, hl__quorum_lease *lease, hl_error *error)
    HL__REQUIRES(hl__quorum_mutex) {
  polling self = {.session = taken->session, .store = taken->store, .begun = hl__now_ms()};
  int status = HL_OK;
  unsigned asked = inspect_ask(&self, lease);
  await_all(&self);
  for (unsigned i = 0; i < self.store->n; i++) lease->at[i].in = hl__ask_is_ok(self.ask[i]);
  if (self.revoked || asked - self.lost < self.store->need)
    status = gone(&self, error);
  else if (self.ok + self.over < self.store->need)
    status = unknown(&self, "could not be asked", error);
  polling_end(&self, true);
  return status;
}

static int adopt(polling *self, hl__quorum_lease *lease, hl_grant *grant, hl_error *error)
    HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_store *store = self->store;
  unsigned mismatch = 0;
  for (unsigned i = 0; i < store->n; i++) {
    if (!ask_add(self, i, HL__ASK_ADOPT, lease, NULL)) continue;
    self->ask[i]->terms.place = 0; /* it is a token here */
    hl__ask_give(self->ask[i]);
  }
  await_all(self);
  uint64_t highest = adopted(self, lease);
  if (self->ok >= store->need) {
    int status = adopted_still(self, lease, error);
    if (status) return status;
    grant->sent_ms = hl__known_since(store, lease, lease->terms.ttl);
    grant->token = lease->terms.place ? lease->terms.place : highest;
    grant->place = grant->token;
    lease->held = lease->adopted = true;
    lease->end = hl__deadline(grant->sent_ms, lease->terms.ttl);
    hl__quorum_heal(store, lease);
    return HL_OK;
  }
  for (unsigned i = 0; i < store->n; i++)
    mismatch +=
        self->ask[i] && self->ask[i]->state == HL__ASK_DONE && self->ask[i]->status == HL_EMISMATCH;
  if (mismatch > store->n - store->need)
    return hl__quorum_error(store, HL_EMISMATCH, self->ask, "refused", error);
  if (self->revoked || self->lost > store->n - store->need) return gone(self, error);
  return unknown(self, "did not hand it over", error);
}

static int lease_adopt(hl_session *base, const hl_request *request, hl_grant *grant,
                       hl_error *error) {
  polling self = polling_of(base);
  hl__quorum_mutex_lock(self.store);
  hl__quorum_lease *lease = hl__known_make(self.store, request->lease, request);
  int status = lease ? adopt(&self, lease, grant, error) : hl__error_memory(error);
  polling_end(&self, true);
  if (lease && status) hl__known_forget(self.store, lease);
  hl__known_unref(lease);
  hl__quorum_mutex_unlock(self.store);
  return status;
}

/* The new holder heals it. A record that a member makes late stays. */
static void lease_leave(hl_store *base, const hl_lease_terms *terms) {
  hl__quorum_store *store = (hl__quorum_store *)(void *)base;
  hl__quorum_mutex_lock(store);
  hl__quorum_lease *lease = hl__known_find(store, terms);
  if (lease) lease->left = true;
  hl__known_unref(lease);
  hl__quorum_mutex_unlock(store);
}

/* ------------------------------------------------------------- many leases */

static void text_copy(char *out, size_t size, const char *text) {
  size_t n = text ? strnlen(text, size - 1) : 0;
  if (n > 0) memcpy(out, text, n);
  out[n] = '\0';
}

static hl__quorum_query *query_new(const hl_lease_filter *filter) {
  hl__quorum_query *query = calloc(1, sizeof *query + filter->n * sizeof *filter->rows);
  if (!query) return NULL;
  query->references = 1;
  query->filter.over = filter->over;
  query->filter.call = filter->call;
  if (filter->owner) {
    text_copy(query->owner, sizeof query->owner, filter->owner);
    query->filter.owner = query->owner;
  }
  if (filter->id) {
    memcpy(query->id, filter->id, 16);
    query->filter.id = query->id;
  }
  if (filter->n) {
    memcpy(query->rows, filter->rows, filter->n * sizeof *filter->rows);
    query->filter.rows = query->rows;
    query->filter.n = filter->n;
  }
  text_copy(query->by, sizeof query->by, filter->by);
  query->filter.by = query->by;
  text_copy(query->reason, sizeof query->reason, filter->reason);
  query->filter.reason = query->reason;
  return query;
}

/* Asks all members. HL_OK: a quorum has answered. */
static int query_all(polling *self, hl__quorum_kind kind, const hl_lease_filter *filter,
                     hl_error *error) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_store *store = self->store;
  hl__quorum_query *query = query_new(filter);
  if (!query) return hl__error_memory(error);
  for (unsigned i = 0; i < store->n; i++)
    if (ask_add(self, i, kind, NULL, query)) hl__ask_give(self->ask[i]);
  if (--query->references == 0) free(query);
  await_all(self);
  return self->ok >= store->need ? HL_OK : unknown(self, "could not be asked", error);
}

/* The lease in a member's answer, or NULL. */
static const hl_holder *found(const hl__quorum_ask *ask, const char *id) {
  for (size_t i = 0; hl__ask_is_ok(ask) && i < ask->found_n; i++)
    if (!ask->found[i].waiting && strcmp(ask->found[i].id, id) == 0) return &ask->found[i];
  return NULL;
}

static bool is_same_process(const hl_holder *a, const hl_holder *b) {
  return a->pid == b->pid && strcmp(a->host, b->host) == 0 &&
         strcmp(a->application, b->application) == 0;
}

/* Counts the members that know of the lease. *holder comes to be what a quorum of them says. An
   import, or an upgrade, may not have reached the others. Where no quorum names one process, the
   record that ends last is shown, as an import begins a time anew. */
static unsigned seen(const polling *self, hl_holder *holder) HL__REQUIRES(hl__quorum_mutex) {
  const hl_holder *all[HL__QUORUM_MAX];
  int64_t times[HL__QUORUM_MAX];
  unsigned known = 0, modes[HL_UPDATE + 1] = {0}, need = self->store->need;
  for (unsigned i = 0; i < self->store->n; i++) {
    const hl_holder *each = found(self->ask[i], holder->id);
    if (each) all[known++] = each;
  }
  if (known == 0) return 0;
  const hl_holder *shown = all[0];
  hl_mode mode = 0;
  bool settled = false;
  for (unsigned i = 0; i < known; i++) {
    unsigned alike = 0;
    times[i] = all[i]->remaining_ms;
    for (unsigned j = 0; j < known; j++) alike += is_same_process(all[i], all[j]);
    if (alike >= need || (!settled && all[i]->remaining_ms > shown->remaining_ms)) shown = all[i];
    settled = settled || alike >= need;
    /* A member's answer may be damaged. */
    if (all[i]->mode <= HL_UPDATE && ++modes[all[i]->mode] == need) mode = all[i]->mode;
  }
  *holder = *shown;
  if (mode) holder->mode = mode;
  holder->remaining_ms = hl__nth_greatest(times, known, known < need ? known : need);
  return known;
}

/* Whether an earlier member than `before` has named it. */
static bool is_named(const polling *self, unsigned before, const char *id)
    HL__REQUIRES(hl__quorum_mutex) {
  for (unsigned i = 0; i < before; i++)
    if (found(self->ask[i], id)) return true;
  return false;
}

/* Tells each lease once that a quorum knows, or may know, as some members have not answered. Tells
   locks without a name as the first member does. Tells all waiters: a request waits for one member
   at a time, which may be any. */
static void tell(const polling *self, hl_holder_fn fn, void *context)
    HL__REQUIRES(hl__quorum_mutex) {
  bool first = true;
  for (unsigned i = 0; i < self->store->n; i++) {
    const hl__quorum_ask *ask = self->ask[i];
    if (!hl__ask_is_ok(ask)) continue;
    for (size_t j = 0; j < ask->found_n; j++) {
      hl_holder holder = ask->found[j];
      bool named = holder.id[0] && !holder.waiting;
      if (named ? !is_named(self, i, holder.id) &&
                      seen(self, &holder) + (self->store->n - self->ok) >= self->store->need
                : first || holder.waiting)
        fn(context, &holder);
    }
    first = false;
  }
}

static int list(hl_session *base, hl__quorum_kind kind, const hl_lease_filter *filter,
                hl_holder_fn fn, void *context, hl_error *error) {
  polling self = polling_of(base);
  hl__quorum_mutex_lock(self.store);
  int status = query_all(&self, kind, filter, error);
  if (status == HL_OK) tell(&self, fn, context);
  polling_end(&self, true);
  hl__quorum_mutex_unlock(self.store);
  return status;
}

static int lease_list(hl_session *base, const hl_lease_filter *filter, hl_holder_fn fn,
                      void *context, int64_t deadline, hl_error *error) {
  (void)deadline;
  return list(base, HL__ASK_LIST, filter, fn, context, error);
}

int hl__quorum_holders(hl_session *base, const hl_lease_filter *filter, hl_holder_fn fn,
                       void *context, int64_t deadline, hl_error *error) {
  (void)deadline;
  return list(base, HL__ASK_HOLDERS, filter, fn, context, error);
}

/* How many leases of a quorum the members have revoked, supposing that silent members have revoked
   as many. A single member's number would include records of waiters, which are no leases yet. */
static uint64_t revoked_count(const polling *self) HL__REQUIRES(hl__quorum_mutex) {
  int64_t counts[HL__QUORUM_MAX];
  unsigned n = 0, silent = self->store->n - self->ok;
  for (unsigned i = 0; i < self->store->n; i++)
    if (hl__ask_is_ok(self->ask[i])) counts[n++] = (int64_t)self->ask[i]->count;
  unsigned nth = self->store->need > silent ? self->store->need - silent : 1;
  return (uint64_t)hl__nth_greatest(counts, n, nth);
}

/* A member that could not be asked keeps its record, which makes no quorum. The other members tell
   the holder that the lease was revoked. */
static int lease_revoke(hl_session *base, const hl_lease_filter *filter, int64_t deadline,
                        uint64_t *revoked, hl_error *error) {
  polling self = polling_of(base);
  (void)deadline;
  hl__quorum_mutex_lock(self.store);
  int status = query_all(&self, HL__ASK_REVOKE, filter, error);
  *revoked = revoked_count(&self);
  polling_end(&self, false);
  hl__quorum_mutex_unlock(self.store);
  return status;
}

const hl_lease_ops hl__quorum_leases = {
    .refresh = lease_refresh,
    .inspect = lease_inspect,
    .drop = lease_drop,
    .convert = hl__quorum_convert,
    .adopt = lease_adopt,
    .list = lease_list,
    .revoke = lease_revoke,
    .leave = lease_leave,
};
