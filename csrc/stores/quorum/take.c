/*
 * take.c - acquires a lease at a quorum, and upgrades one.
 *
 *   1. The caller asks all members at once, to try once. Most requests end here.
 *   2. If no quorum has granted, the caller keeps the grants of the first members in order, and
 * gives the others back. Then he asks the members one by one, in order, and waits for each. All
 * callers have one order, and no caller waits for a member while he holds a later one. So two
 * callers never wait for each other.
 *   3. Meanwhile the caller tries the others again now and then. The member that he waits for may
 * have stopped, or have a record that its holder left behind; the others may make a quorum.
 *   4. The caller writes the highest token to a quorum, before he returns it.
 *
 * A try waits for a member for HL__QUORUM_ANSWER_MS. A wait may last longer. Then another question
 * says whether the member is alive. The caller refreshes his grants while he waits.
 *
 * An upgrade does the same at the members in the lease; to give back is to share again. Suppose it
 * waited for a member while it is exclusive at a later one. There a reader may wait for it whom it
 * waits for here.
 */
#include "quorum_store.h"

#include <string.h>

/* Until the others are tried again: ms; it doubles up to the second. */
#define AGAIN_MS 50
#define AGAIN_MAX_MS 1000
/* A try waits so long for a suspect member, if others have answered. */
#define GRACE_MS 50
/* Votes are split within so many ms; what takes longer has another reason. */
#define SPLIT_MS 100
/* Until a member is looked at again that still works on an earlier try. */
#define BUSY_MS 5
/* A call that has failed waits so long for its drops. */
#define BACK_MS 200

typedef struct taking {
  hl__quorum_session *session;
  hl__quorum_store *store;
  hl__quorum_lease *lease;
  const hl_request *request;
  hl__quorum_rows *rows;         /* to be locked, where those are not what the lease shows */
  hl__quorum_rows *shown, *back; /* an upgrade's: what the lease has then; what
                                    is given back; or NULL */
  int64_t deadline;
  hl__quorum_ask *ask[HL__QUORUM_MAX];  /* to take, or to give back */
  hl__quorum_ask *last[HL__QUORUM_MAX]; /* the last take that was answered */
  hl__quorum_ask *keep[HL__QUORUM_MAX]; /* to refresh a grant, or raise its token */
  bool failed[HL__QUORUM_MAX], refused[HL__QUORUM_MAX], raised[HL__QUORUM_MAX];
  bool unraised[HL__QUORUM_MAX]; /* it could not be told the token */
  int waits;                     /* the member that is waited for; -1: none */
  hl__quorum_ask *alive;         /* whether that is alive */
  bool trying;                   /* members are tried */
  bool again_asked;              /* the core asks once more: it has waited for all of them
                       already */
  bool behind;                   /* it is to stand behind an update lock */
  const hl_error *revoked;       /* what a member has said of it */
  bool freshened;                /* old grants have been refreshed, at the end */
  int64_t tried, again, pause;
  uint64_t token;
} taking;

static hl__quorum_part *part_of(const taking *self, unsigned i) { return &self->lease->at[i]; }

/* Whether that member has granted. */
static bool has(const taking *self, unsigned i) HL__REQUIRES(hl__quorum_mutex) {
  return part_of(self, i)->in && (!self->shown || part_of(self, i)->converted);
}

static unsigned granted_by(const taking *self) HL__REQUIRES(hl__quorum_mutex) {
  unsigned n = 0;
  for (unsigned i = 0; i < self->store->n; i++) n += has(self, i);
  return n;
}

static void last_set(taking *self, unsigned i, hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  hl__ask_clear(&self->last[i], false);
  self->last[i] = ask;
}

static void take_ask(taking *self, unsigned i, bool try_once) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_ask *ask =
      hl__ask_new(&self->store->members[i], self->shown ? HL__ASK_UPGRADE : HL__ASK_TAKE,
                  self->lease, NULL, self->session);
  self->refused[i] = false;
  if (!ask) {
    self->failed[i] = true;
    return;
  }
  hl__ask_rows(ask, self->rows, self->shown);
  ask->try_once = try_once;
  ask->gives_way = self->request->gives_way && !try_once;
  ask->deadline = try_once ? hl__now_ms() + HL__QUORUM_ANSWER_MS : self->deadline;
  self->ask[i] = ask;
  hl__ask_give(ask);
}

static bool is_taking(const taking *self, unsigned i) {
  return self->ask[i] &&
         (self->ask[i]->kind == HL__ASK_TAKE || self->ask[i]->kind == HL__ASK_UPGRADE);
}

static bool is_idle(const taking *self, unsigned i) HL__REQUIRES(hl__quorum_mutex) {
  const hl__quorum_part *part = part_of(self, i);
  if (self->shown)
    return part->in && !part->converted && !self->ask[i] && !part->making && !part->dropping &&
           !part->converting;
  return !part->in && !self->ask[i] && !part->making && !part->dropping && !part->leftover &&
         !part->spoiled;
}

static void try_all(taking *self) HL__REQUIRES(hl__quorum_mutex) {
  self->trying = true;
  self->tried = hl__now_ms();
  for (unsigned i = 0; i < self->store->n; i++)
    if (is_idle(self, i)) take_ask(self, i, true);
}

static void give_back(taking *self, unsigned i) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_ask *ask =
      hl__ask_new(&self->store->members[i], self->shown ? HL__ASK_DOWNGRADE : HL__ASK_DROP,
                  self->lease, NULL, self->session);
  if (!self->shown) part_of(self, i)->in = false;
  part_of(self, i)->converted = self->raised[i] = false;
  hl__ask_clear(&self->keep[i], true);
  if (!ask && self->shown) hl__known_old(self->store, self->lease, i);
  if (!ask) {
    part_of(self, i)->leftover = true;
    return;
  }
  hl__ask_rows(ask, self->back, NULL);
  hl__ask_give(ask);
  self->ask[i] = ask;
}

/* Reads the answer of a member to a take, or to a drop. */
static void answer_read(taking *self, unsigned i) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_ask *ask = self->ask[i];
  bool takes = is_taking(self, i);
  if (!ask || ask->state != HL__ASK_DONE) return;
  self->ask[i] = NULL;
  ask->listener = NULL;
  if (!takes) {
    hl__ask_leave(ask, false);
    return;
  }
  if (hl__quorum_is_revoked(ask)) self->revoked = &ask->error;
  self->behind = self->behind || ask->status == HL__BEHIND_UPDATE;
  self->failed[i] = ask->status != HL_OK && ask->status != HL_TIMEOUT;
  if (ask->status == HL_TIMEOUT) self->refused[i] = true;
  if (ask->status == HL_OK) {
    self->raised[i] = false;
    if (!self->shown) hl__known_granted(part_of(self, i), &ask->grant, ask->ttl);
  }
  last_set(self, i, ask);
}

static void keep_read(taking *self, unsigned i) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_ask *ask = self->keep[i];
  hl__quorum_part *part = part_of(self, i);
  if (!ask || ask->state != HL__ASK_DONE) return;
  self->keep[i] = NULL;
  if (ask->kind == HL__ASK_RAISE && ask->status == HL_OK)
    self->raised[i] = ask->token == self->token;
  else if (ask->kind == HL__ASK_RAISE && !has(self, i))
    self->unraised[i] = true;
  else if (part->in && ask->status == HL_OK)
    hl__known_sent(part, ask->grant.sent_ms, ask->ttl);
  else if (part->in && ask->status == HL_ELOST)
    part->in = false; /* it was too late */
  else if (part->in && ask->status != HL_OK) {
    self->failed[i] = true;
    give_back(self, i);
  }
  hl__ask_leave(ask, false);
}

static void keep_ask(taking *self, unsigned i, hl__quorum_kind kind)
    HL__REQUIRES(hl__quorum_mutex) {
  if (self->keep[i]) return;
  hl__quorum_ask *ask =
      hl__ask_new(&self->store->members[i], kind, self->lease, NULL, self->session);
  if (!ask) return;
  ask->token = self->token;
  self->keep[i] = ask;
  hl__ask_give(ask);
}

/* Refreshes old grants. True: all are fresh enough. */
static bool refresh_old(taking *self, int64_t part_of_ttl) HL__REQUIRES(hl__quorum_mutex) {
  int64_t now = hl__boot_ms();
  bool fresh = true;
  if (self->shown) return fresh; /* its holder refreshes the lease */
  for (unsigned i = 0; i < self->store->n; i++) {
    if (!part_of(self, i)->in ||
        now - part_of(self, i)->sent_ms <= self->lease->terms.ttl / part_of_ttl)
      continue;
    fresh = false;
    keep_ask(self, i, HL__ASK_ADOPT);
  }
  return fresh;
}

/* The member has not answered for too long. */
static void leave_behind(taking *self, unsigned i) HL__REQUIRES(hl__quorum_mutex) {
  self->store->members[i].suspect = true;
  self->failed[i] = true;
  if (self->waits == (int)i) self->waits = -1;
  if (is_taking(self, i)) {
    self->ask[i]->references++;
    last_set(self, i, self->ask[i]);
  }
  hl__ask_clear(&self->ask[i], is_taking(self, i));
}

/* Whether it can be said what the try has made. */
static bool try_is_over(taking *self) HL__REQUIRES(hl__quorum_mutex) {
  int64_t now = hl__now_ms();
  unsigned open = 0, suspect = 0, refused = 0;
  for (unsigned i = 0; i < self->store->n; i++) {
    refused += self->refused[i];
    if (!is_taking(self, i) || self->waits == (int)i) continue;
    open++;
    suspect += self->store->members[i].suspect;
  }
  if (open == 0) return true;
  if (granted_by(self) + open < self->store->need) return true;
  bool late = now >= self->tried + HL__QUORUM_ANSWER_MS;
  if (!late &&
      (open > suspect || (refused == 0 && !self->again_asked) || now < self->tried + GRACE_MS))
    return false;
  for (unsigned i = 0; i < self->store->n; i++)
    if (is_taking(self, i) && self->waits != (int)i) leave_behind(self, i);
  return true;
}

/* The try has made no quorum. Gives back the grants of the members from `first` on; earlier ones
   are in no caller's way. */
static void try_end(taking *self, unsigned first) HL__REQUIRES(hl__quorum_mutex) {
  self->trying = false;
  self->again = hl__now_ms() + self->pause;
  self->pause = 2 * self->pause < AGAIN_MAX_MS ? 2 * self->pause : AGAIN_MAX_MS;
  for (unsigned i = first; i < self->store->n; i++) {
    /* The try does not need the answer any more. */
    if (is_taking(self, i) && self->waits != (int)i) hl__ask_clear(&self->ask[i], true);
    if (has(self, i)) give_back(self, i);
  }
}

/* Whether the member still works on a try that this call has left, so that it cannot be asked again
   yet. It has failed if that lasts longer than an answer may. */
static bool is_busy(const taking *self, unsigned i) HL__REQUIRES(hl__quorum_mutex) {
  const hl__quorum_part *part = part_of(self, i);
  return !self->request->try_once && !self->ask[i] && !self->store->members[i].suspect &&
         (part->making || part->converting) && hl__now_ms() < self->again + HL__QUORUM_ANSWER_MS;
}

/* The first member that is to be waited for; store->n: none. */
static unsigned first_open(const taking *self) HL__REQUIRES(hl__quorum_mutex) {
  for (unsigned i = 0; i < self->store->n; i++)
    if (!has(self, i) && !self->failed[i] && !(self->request->try_once && self->refused[i]) &&
        !is_busy(self, i))
      return i;
  return self->store->n;
}

/* How many members have granted, or still may. */
static unsigned within_reach(const taking *self) HL__REQUIRES(hl__quorum_mutex) {
  unsigned n = 0;
  for (unsigned i = 0; i < self->store->n; i++)
    n += has(self, i) || (!self->failed[i] && !(self->request->try_once && self->refused[i]));
  return n;
}

static unsigned failures(const taking *self) HL__REQUIRES(hl__quorum_mutex) {
  unsigned n = 0;
  for (unsigned i = 0; i < self->store->n; i++) n += self->failed[i] && !has(self, i);
  return n;
}

/* Waits for one member after the other. HL_OK: nothing is to be said yet. */
static int one_by_one(taking *self) HL__REQUIRES(hl__quorum_mutex) {
  int64_t now = hl__now_ms();
  bool over = !self->request->try_once && now > self->deadline;
  if (over) return HL_TIMEOUT;
  if (self->store->n - failures(self) < self->store->need) return HL_ECONNECTION;
  if (within_reach(self) < self->store->need) return HL_TIMEOUT;
  if (self->waits >= 0 && !self->ask[self->waits]) {
    hl__ask_clear(&self->alive, true);
    self->waits = -1; /* it has answered */
  }
  unsigned first = first_open(self);
  if (self->waits < 0 && first < self->store->n) {
    if (!self->trying) try_end(self, first + 1);
    if (is_idle(self, first)) {
      self->waits = (int)first;
      self->store->members[first].heard = now;
      take_ask(self, first, self->request->try_once);
    } else if (!self->ask[first]) {
      self->failed[first] = true; /* a record of ours may be there: see member.c */
    } else if (self->ask[first]->begun + HL__QUORUM_ANSWER_MS < now) {
      leave_behind(self, first);
    }
  }
  if (self->waits < 0) return HL_OK;
  hl__quorum_member *member = &self->store->members[self->waits];
  if (self->alive && self->alive->state == HL__ASK_DONE) hl__ask_clear(&self->alive, false);
  if (self->alive && now >= self->alive->begun + HL__QUORUM_ANSWER_MS) {
    hl__ask_clear(&self->alive, true);
    leave_behind(self, (unsigned)self->waits);
    return HL_OK;
  }
  if (!self->alive && now >= member->heard + HL__QUORUM_ANSWER_MS) {
    self->alive = hl__ask_new(member, HL__ASK_INSPECT, self->lease, NULL, self->session);
    if (self->alive) hl__ask_give(self->alive);
  }
  if (!self->trying && !self->request->try_once && now >= self->again) try_all(self);
  return HL_OK;
}

/* Whether the member can be told a token. Then a minority of such members may forget it. */
static bool is_raisable(const taking *self, unsigned i) HL__REQUIRES(hl__quorum_mutex) {
  const hl_store *inner = self->store->members[i].inner;
  return inner && inner->leases->raise && !self->unraised[i];
}

/* Writes the token to members, those that have granted or the others. How many
   have it; in *open, how many have not answered. */
static unsigned token_write(taking *self, bool granted, unsigned *open)
    HL__REQUIRES(hl__quorum_mutex) {
  unsigned written = 0;
  for (unsigned i = 0; i < self->store->n; i++) {
    if (has(self, i) != granted || !is_raisable(self, i)) continue;
    if (!granted && self->store->members[i].suspect) continue;
    if (granted && part_of(self, i)->token >= self->token) self->raised[i] = true;
    if (!self->raised[i]) keep_ask(self, i, HL__ASK_RAISE);
    written += self->raised[i];
    *open += !self->raised[i];
  }
  return written;
}

/* Whether a quorum has the token. Where too few of those that have granted can be
   told it, the others are, too. Only where that is not enough does the word of
   members count that make tokens of their own, and may forget them. */
static bool is_token_written(taking *self) HL__REQUIRES(hl__quorum_mutex) {
  unsigned open = 0, mute = 0;
  unsigned written = token_write(self, true, &open);
  if (written + open < self->store->need) written += token_write(self, false, &open);
  if (written >= self->store->need) return true;
  for (unsigned i = 0; i < self->store->n; i++) mute += has(self, i) && !is_raisable(self, i);
  return open == 0 && written + mute >= self->store->need;
}

/* A quorum has granted. True: the caller may be told. */
static bool is_settled(taking *self) HL__REQUIRES(hl__quorum_mutex) {
  if (!self->freshened) {
    self->freshened = true;
    (void)refresh_old(self, 4);
  }
  for (unsigned i = 0; i < self->store->n; i++)
    if (self->keep[i] && self->keep[i]->kind == HL__ASK_ADOPT) return false;
  uint64_t highest = 0;
  for (unsigned i = 0; i < self->store->n; i++)
    if (has(self, i) && part_of(self, i)->token > highest) highest = part_of(self, i)->token;
  if (highest > self->token) {
    self->token = highest;
    memset(self->raised, 0, sizeof self->raised);
  }
  return is_token_written(self);
}

/* When to look again, if nothing is answered before. */
static int64_t next_poll(const taking *self) HL__REQUIRES(hl__quorum_mutex) {
  int64_t now = hl__now_ms(), next = now + HL__QUORUM_ANSWER_MS;
  int64_t third = self->lease->terms.ttl / 6 + 1;
  int64_t over = hl__deadline(self->deadline, 1);
  if (!self->request->try_once && over < next) next = over;
  if (now + third < next) next = now + third;
  if (self->trying) {
    int64_t grace = self->tried + GRACE_MS;
    int64_t end = self->tried + HL__QUORUM_ANSWER_MS;
    if (now < grace && grace < next) next = grace;
    if (end < next) next = end;
  } else if (self->waits < 0) {
    next = now + BUSY_MS;
  } else if (self->again < next) {
    next = self->again;
  }
  return next > now ? next : now + 1;
}

static void keeps_overdue(taking *self) HL__REQUIRES(hl__quorum_mutex) {
  for (unsigned i = 0; i < self->store->n; i++) {
    hl__quorum_ask *ask = self->keep[i];
    if (!ask || hl__now_ms() < ask->begun + HL__QUORUM_ANSWER_MS) continue;
    hl__ask_clear(&self->keep[i], true);
    self->store->members[i].suspect = true;
    if (!has(self, i)) continue; /* it was only told the token */
    self->failed[i] = true;
    give_back(self, i);
  }
}

/* Whether no member may still say that another list is in use. A member that has not said so in
   time is suspect: else each call would wait for it as long. */
static bool is_judged(taking *self) HL__REQUIRES(hl__quorum_mutex) {
  bool judged = true;
  for (unsigned i = 0; i < self->store->n; i++) {
    const hl__quorum_member *member = &self->store->members[i];
    if (!is_taking(self, i) || member->suspect || hl__presence_stands(member)) continue;
    if (hl__now_ms() < self->ask[i]->begun + HL__QUORUM_ANSWER_MS)
      judged = false;
    else
      self->store->members[i].suspect = true;
  }
  return judged;
}

/* Whether a quorum does not have the lease any more, which the caller upgrades. */
static bool is_gone(const taking *self) HL__REQUIRES(hl__quorum_mutex) {
  return self->shown && (self->revoked || self->lease->dropped ||
                         hl__known_in(self->store, self->lease) < self->store->need);
}

static int take(taking *self) HL__REQUIRES(hl__quorum_mutex) {
  try_all(self);
  for (;;) {
    for (unsigned i = 0; i < self->store->n; i++) {
      answer_read(self, i);
      keep_read(self, i);
    }
    keeps_overdue(self);
    if (self->session->interrupted) return HL_CANCELLED;
    if (is_gone(self)) return HL_ELOST;
    if (self->behind) return HL__BEHIND_UPDATE;
    if (self->store->stopped.status) return HL_EMISMATCH;
    if (granted_by(self) >= self->store->need) {
      if (is_settled(self) && is_judged(self)) return HL_OK;
      if (!self->request->try_once &&
          hl__now_ms() > hl__deadline(self->deadline, HL__QUORUM_ANSWER_MS))
        return HL_TIMEOUT;
    } else {
      (void)refresh_old(self, 3);
      if (self->trying && try_is_over(self)) {
        if (self->waits >= 0) {
          try_end(self, (unsigned)self->waits + 1);
        } else {
          /* Tries once more, in order: then two callers do not split the votes again. */
          if (self->request->try_once &&
              (granted_by(self) == 0 || hl__now_ms() > self->tried + SPLIT_MS) &&
              within_reach(self) < self->store->need)
            return failures(self) > self->store->n - self->store->need ? HL_ECONNECTION
                                                                       : HL_TIMEOUT;
          memset(self->refused, 0, sizeof self->refused);
          self->trying = false;
        }
      }
      if (!self->trying || self->waits >= 0) {
        int status = one_by_one(self);
        if (status) return status;
      }
    }
    hl__quorum_wait(self->session, next_poll(self));
  }
}

static void rest_leave(taking *self) HL__REQUIRES(hl__quorum_mutex) {
  for (unsigned i = 0; i < self->store->n; i++) hl__ask_clear(&self->ask[i], self->waits == (int)i);
}

/* The members that have granted are in the lease. Late grants are welcome while it is held. The
   wait for one member ends. */
static void granted(taking *self, hl_grant *grant) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_lease *lease = self->lease;
  int64_t since = hl__known_since(self->store, lease, lease->terms.ttl);
  grant->sent_ms = since;
  grant->token = self->token;
  grant->place = self->token; /* an import learns it by that */
  lease->held = true;
  lease->end = hl__deadline(since, lease->terms.ttl);
  rest_leave(self);
  hl__quorum_heal(self->store, lease);
}

/* The members that have upgraded are in the lease. The others leave it, or upgrade late. */
static void upgraded(taking *self, hl_grant *grant) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_lease *lease = self->lease;
  hl__known_show(lease, self->shown);
  self->shown->references++;
  for (unsigned i = 0; i < self->store->n; i++)
    if (lease->at[i].in && !lease->at[i].converted) hl__known_old(self->store, lease, i);
  grant->token = grant->place = self->token;
  rest_leave(self);
  hl__quorum_heal(self->store, lease);
}

/* The call has failed. Gives the grants back, and waits a moment for that. */
static void give_up(taking *self) HL__REQUIRES(hl__quorum_mutex) {
  int64_t end = hl__now_ms() + BACK_MS;
  if (!self->shown) {
    self->lease->dropped = true;
    self->lease->end = hl__deadline(hl__boot_ms(), self->lease->terms.ttl); /* refreshed till now */
  }
  for (unsigned i = 0; i < self->store->n; i++) {
    if (is_taking(self, i)) hl__ask_clear(&self->ask[i], true);
    if (has(self, i)) give_back(self, i);
  }
  for (bool open = true; open && hl__left_ms(end) > 0;) {
    open = false;
    for (unsigned i = 0; i < self->store->n; i++) {
      answer_read(self, i);
      open = open ||
             ((part_of(self, i)->making || part_of(self, i)->converting) &&
              !self->store->members[i].suspect) ||
             (self->ask[i] && !self->store->members[i].suspect);
    }
    if (open) hl__quorum_wait(self->session, hl__now_ms() + 5);
  }
}

static void taking_end(taking *self) HL__REQUIRES(hl__quorum_mutex) {
  hl__ask_clear(&self->alive, true);
  hl__asks_leave(self->ask, false);
  hl__asks_leave(self->last, false);
  hl__asks_leave(self->keep, false);
  hl__rows_unref(self->rows);
  hl__rows_unref(self->shown);
  hl__rows_unref(self->back);
}

/* HL_ECONNECTION: of so many failures. */
static int failure(taking *self, int status, hl_error *error) HL__REQUIRES(hl__quorum_mutex) {
  if (status == HL_ECONNECTION) status = hl__quorum_failure(self->store, self->last);
  if (status == HL__BEHIND_UPDATE) return status;
  if (status == HL_EMISMATCH && hl__quorum_stopped(self->store, error)) return status;
  if (status == HL_CANCELLED) return hl__error(error, status, "the wait was interrupted");
  if (status == HL_ELOST && self->revoked) {
    if (error) *error = *self->revoked;
    return status;
  }
  return hl__quorum_error(self->store, status, self->last,
                          status == HL_ELOST ? "do not have the lease"
                          : self->shown      ? "did not upgrade"
                                             : "did not grant",
                          error);
}

int hl__quorum_take(hl_session *base, const hl_request *request, hl_grant *grant, hl_error *error) {
  hl__quorum_session *session = (hl__quorum_session *)(void *)base;
  hl__quorum_store *store = hl__quorum_store_of(base);
  taking self = {.session = session,
                 .store = store,
                 .request = request,
                 .deadline = request->deadline,
                 .waits = -1,
                 .pause = AGAIN_MS};
  int status;
  hl__quorum_mutex_lock(store);
  if (request->rows != request->recorded)
    self.rows = hl__rows_new(request->rows, request->n, request->mode);
  if (self.rows || request->rows == request->recorded)
    self.lease = hl__known_make(store, request->lease, request);
  if (self.lease) {
    self.lease->dropped = false;
    for (size_t i = 0; i < sizeof request->lease->former; i++)
      self.again_asked = self.again_asked || request->lease->former[i];
    status = take(&self);
    if (status == HL_OK) {
      granted(&self, grant);
    } else {
      give_up(&self);
      status = failure(&self, status, error);
    }
    hl__known_unref(self.lease);
  } else {
    status = hl__error_memory(error);
  }
  taking_end(&self);
  session->interrupted = false;
  hl__quorum_mutex_unlock(store);
  return status;
}

int hl__quorum_upgrade(hl_session *base, const hl_request *request, hl_grant *grant,
                       hl_error *error) {
  hl__quorum_session *session = (hl__quorum_session *)(void *)base;
  hl__quorum_store *store = hl__quorum_store_of(base);
  taking self = {.session = session,
                 .store = store,
                 .request = request,
                 .token = grant->token,
                 .deadline = request->deadline,
                 .waits = -1,
                 .freshened = true,
                 .pause = AGAIN_MS};
  int status = HL_ELOST;
  hl__quorum_mutex_lock(store);
  self.lease = hl__known_find(store, request->lease);
  self.rows = hl__rows_new(request->rows, request->n, request->mode);
  self.shown = hl__rows_new(request->recorded, request->recorded_n, request->mode);
  self.back = hl__rows_shared(request->rows, request->n);
  if (!self.rows || !self.shown || !self.back) {
    status = hl__error_memory(error);
  } else if (!self.lease || self.lease->dropped) {
    (void)hl__error(error, status, "nothing is known of the lease any more");
  } else {
    for (unsigned i = 0; i < store->n; i++) {
      part_of(&self, i)->converted = false;
      self.failed[i] = !part_of(&self, i)->in;
    }
    status = take(&self);
    if (status == HL_OK)
      upgraded(&self, grant);
    else
      give_up(&self);
    if (status) status = failure(&self, status, error);
    if (status == HL_ELOST && !self.lease->dropped) hl__quorum_abandon(store, self.lease);
    if (!self.lease->dropped) grant->until_ms = hl__known_until(store, self.lease);
  }
  taking_end(&self);
  hl__known_unref(self.lease);
  session->interrupted = false;
  hl__quorum_mutex_unlock(store);
  return status;
}
