/*
 * ask.c - a question to a member. A caller makes it, puts it into the member's queue, waits for
 * the answer, and leaves the question. An answer changes the entry of the lease (known.c).
 *
 * A caller who leaves a question (hl__ask_leave) does not learn the answer. Then the thread that
 * asks (member.c) gives back a late grant. Until then part->making keeps callers from making a
 * record of the same id there.
 */
#include "quorum_store.h"

#include "exit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A member with more questions than these without a listener is suspect. Then so many stay in its
   queue, to be asked when the member answers again. */
#define STRAYS 16u

/* --------------------------------------------------------------- a question */

bool hl__ask_makes(const hl__quorum_ask *ask) {
  return ask->kind == HL__ASK_TAKE || ask->kind == HL__ASK_ADOPT;
}

bool hl__ask_grants(const hl__quorum_ask *ask) {
  return ask->kind == HL__ASK_JOIN || hl__ask_makes(ask) || ask->kind == HL__ASK_REFRESH;
}

bool hl__ask_converts(const hl__quorum_ask *ask) {
  return ask->kind == HL__ASK_UPGRADE || ask->kind == HL__ASK_DOWNGRADE;
}

void hl__ask_unref(hl__quorum_ask *ask) {
  if (--ask->references > 0) return;
  hl__known_unref(ask->lease);
  if (ask->query && --ask->query->references == 0) free(ask->query);
  hl__rows_unref(ask->rows);
  hl__rows_unref(ask->shown);
  free(ask->found);
  free(ask);
}

hl__quorum_ask *hl__ask_new(hl__quorum_member *member, hl__quorum_kind kind,
                            hl__quorum_lease *lease, hl__quorum_query *query,
                            hl__quorum_session *listener) {
  hl__quorum_ask *ask = calloc(1, sizeof *ask);
  if (!ask) return NULL;
  ask->references = 1;
  ask->member = member;
  ask->kind = kind;
  ask->lease = lease;
  ask->query = query;
  ask->listener = listener;
  ask->begun = hl__now_ms();
  ask->deadline = ask->begun + HL__QUORUM_ANSWER_MS;
  if (query) query->references++;
  if (lease) {
    lease->references++;
    ask->terms = lease->terms;
    ask->terms.place = lease->at[member->number].place;
    ask->ttl = lease->terms.ttl;
    ask->terms.token = lease->at[member->number].token;
    ask->again = lease->at[member->number].told;
    hl__ask_rows(ask, NULL, lease->shown);
  }
  return ask;
}

void hl__ask_rows(hl__quorum_ask *ask, hl__quorum_rows *rows, hl__quorum_rows *shown) {
  if (rows) {
    rows->references++;
    ask->rows = rows;
  }
  if (shown) {
    shown->references++;
    hl__rows_unref(ask->shown);
    ask->shown = shown;
  }
}

void hl__ask_found(void *context, const hl_holder *holder) {
  hl__quorum_ask *ask = context;
  if (ask->found_n == ask->found_room) {
    size_t room = ask->found_room ? 2 * ask->found_room : 16;
    hl_holder *more = realloc(ask->found, room * sizeof *more);
    if (!more) return;
    ask->found = more;
    ask->found_room = room;
  }
  ask->found[ask->found_n++] = *holder;
}

/* ------------------------------------------------------ a queue of a member */

static void queue_remove(hl__quorum_member *member, hl__quorum_ask *ask)
    HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_ask **at = &member->first, *before = NULL;
  for (; *at && *at != ask; at = &(*at)->next) before = *at;
  if (!*at) return;
  *at = ask->next;
  if (member->last == ask) member->last = before;
  member->queued--;
}

hl__quorum_ask *hl__ask_next(hl__quorum_member *member) {
  hl__quorum_ask *ask = member->first;
  if (!ask) return NULL;
  queue_remove(member, ask);
  ask->next = NULL;
  ask->state = HL__ASK_RUNS;
  return ask;
}

/* ---------------------------------------------------------------- an answer */

/* Whether a late record is in the modes that the lease has now. */
static bool is_wanted(const hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  const hl__quorum_lease *lease = ask->lease;
  return lease->held && !lease->dropped && hl__boot_ms() < lease->end &&
         hl__rows_match(ask->shown, lease->shown);
}

bool hl__ask_keep(hl__quorum_ask *ask) {
  hl__quorum_part *part = &ask->lease->at[ask->member->number];
  if (ask->unwanted || !is_wanted(ask)) return false;
  part->converted = false;
  hl__known_granted(part, &ask->grant, ask->ttl);
  return true;
}

/* The upgrade has failed elsewhere: asks the member to share the rows again. */
static void upgrade_undo(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_rows *rows = hl__rows_shared(ask->rows->rows, ask->rows->n);
  hl__quorum_ask *back =
      rows ? hl__ask_new(ask->member, HL__ASK_DOWNGRADE, ask->lease, NULL, NULL) : NULL;
  if (back) {
    hl__ask_rows(back, rows, NULL);
    hl__ask_give(back);
    hl__ask_unref(back);
  } else {
    hl__known_old(ask->member->store, ask->lease, ask->member->number);
  }
  hl__rows_unref(rows);
}

void hl__ask_convert_late(hl__quorum_ask *ask) {
  hl__quorum_lease *lease = ask->lease;
  hl__quorum_part *part = &lease->at[ask->member->number];
  if (lease->dropped) return;
  if (is_wanted(ask)) {
    part->in = true;
    part->old = part->leftover = false;
  } else if (ask->kind == HL__ASK_UPGRADE) {
    upgrade_undo(ask);
  } else {
    hl__known_old(ask->member->store, lease, ask->member->number);
  }
}

/* The answer counts from now on, not from the listener's reading: meanwhile the member may lose
   the record, and a thread may make it anew in the old mode. */
static void convert_done(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_part *part = &ask->lease->at[ask->member->number];
  bool upgrades = ask->kind == HL__ASK_UPGRADE;
  part->converting--;
  if (ask->status == HL_OK) {
    part->place = ask->grant.place;
    if (upgrades) part->token = ask->grant.token;
    if (ask->listener) part->converted = upgrades && part->in;
    if (ask->listener && part->in) part->old = false;
  } else if (ask->status == HL_ELOST) {
    part->in = false;
  } else if (!upgrades || (ask->status == HL_ECONNECTION && ask->sent)) {
    /* The member may have done it or not. */
    hl__known_old(ask->member->store, ask->lease, ask->member->number);
  }
}

void hl__ask_done(hl__quorum_ask *ask) {
  hl__quorum_part *part = ask->lease ? &ask->lease->at[ask->member->number] : NULL;
  ask->state = HL__ASK_DONE;
  if (ask->stray) ask->member->strays--;
  if (hl__ask_makes(ask)) part->making--;
  /* Healing in vain leaves the record there. */
  if (ask->leftover && ask->status != HL_OK && ask->status != HL_ELOST) part->leftover = true;
  if (hl__ask_converts(ask)) convert_done(ask);
  if (ask->kind == HL__ASK_DROP) {
    bool answered = ask->status == HL_OK || ask->status == HL_ELOST;
    part->dropping--;
    part->gone = part->gone || ask->status == HL_OK;
    part->told = part->told || (!answered && ask->sent);
    part->spoiled = part->spoiled || part->told;
    /* Another drop, which is not answered yet, may have ended the record that this one misses. */
    part->leftover = !answered || (ask->status == HL_ELOST && part->dropping > 0);
    if (!part->leftover) part->in = false;
  }
  if (ask->listener) (void)pthread_cond_signal(&ask->listener->answered);
}

/* ----------------------------------------------------------- given and left */

/* What the program has released, or does not want, must not stay at a member because the process
   ends. So exit() waits for such questions, unless the member has not answered others. */
static void exit_awaits(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  if (ask->awaited || ask->member->suspect) return;
  ask->awaited = true;
  hl__exit_await(1);
}

void hl__ask_end(hl__quorum_ask *ask) {
  if (ask->awaited) hl__exit_await_end();
  ask->awaited = false;
}

/* Takes a question out of the queue, whose reference is the caller's now. */
static void cancel(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  queue_remove(ask->member, ask);
  ask->status = HL_CANCELLED;
  hl__ask_done(ask);
  hl__ask_end(ask);
}

/* Cancels what no caller listens for. */
static void cancel_all(hl__quorum_member *member, hl__quorum_kind kind,
                       const hl__quorum_lease *lease) HL__REQUIRES(hl__quorum_mutex) {
  for (hl__quorum_ask *ask = member->first, *next; ask; ask = next) {
    next = ask->next;
    if (ask->kind != kind || ask->lease != lease || ask->listener) continue;
    cancel(ask);
    hl__ask_unref(ask);
  }
}

void hl__ask_takes_end(hl__quorum_member *member, const hl__quorum_lease *lease) {
  if (lease->at[member->number].making > 0) cancel_all(member, HL__ASK_TAKE, lease);
}

void hl__ask_give(hl__quorum_ask *ask) {
  hl__quorum_member *member = ask->member;
  /* An earlier end of the presence does no more than this one. */
  if (ask->kind == HL__ASK_PART) cancel_all(member, ask->kind, NULL);
  if (hl__ask_grants(ask)) member->needed++;
  ask->number = member->needed;
  if (hl__ask_makes(ask)) ask->lease->at[member->number].making++;
  if (ask->kind == HL__ASK_DROP) {
    ask->lease->at[member->number].dropping++;
    exit_awaits(ask);
  }
  if (hl__ask_converts(ask)) ask->lease->at[member->number].converting++;
  ask->references++;
  ask->state = HL__ASK_QUEUED;
  ask->next = NULL;
  if (member->last)
    member->last->next = ask;
  else
    member->first = ask;
  member->last = ask;
  member->queued++;
  if (member->idle_threads >= member->queued) {
    (void)pthread_cond_signal(&member->work);
  } else if (!member->store->thread_start(member) && member->threads == 0) {
    queue_remove(member, ask);
    ask->status = hl__error(&ask->error, HL_BUSY, "cannot start a thread");
    hl__ask_done(ask);
    hl__ask_end(ask);
    ask->references--;
  }
}

static void ask_interrupt(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  if (ask->interrupted) return;
  ask->interrupted = true;
  if (ask->session) ask->member->ops->interrupt(ask->session);
}

/* Callers must not fill the memory with questions to a member that hangs: beyond some a question
   is not left there. A refresh or a look counts as not answered. A drop makes a leftover, see flush
   in member.c. Takes, imports and conversions stay: a lease has one of them at most, and no take
   once it was released. The end of the presence stays: a member has one. */
static bool is_too_many(const hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  return ask->member->suspect && ask->member->queued > STRAYS && !hl__ask_makes(ask) &&
         !hl__ask_converts(ask) && ask->kind != HL__ASK_OPEN && ask->kind != HL__ASK_PART;
}

void hl__silent_suspect(hl__quorum_store *store, hl__quorum_ask *const *asks) {
  for (unsigned i = 0; i < store->n; i++)
    if (hl__ask_is_open(asks[i])) store->members[i].suspect = true;
}

void hl__ask_leave(hl__quorum_ask *ask, bool unwanted) {
  bool takes = hl__ask_makes(ask);
  if (takes && ask->state != HL__ASK_DONE)
    exit_awaits(ask); /* the thread may give the grant back */
  if (ask->state == HL__ASK_QUEUED && is_too_many(ask)) unwanted = true;
  ask->unwanted = ask->unwanted || unwanted;
  if (ask->state == HL__ASK_DONE) {
    /* The listener has not seen the grant, or the conversion. */
    if (hl__ask_converts(ask) && ask->listener && ask->status == HL_OK) {
      ask->lease->at[ask->member->number].converted = false;
      hl__ask_convert_late(ask);
    }
    if (takes && ask->listener && ask->status == HL_OK && !ask->lease->at[ask->member->number].in &&
        !hl__ask_keep(ask) && (ask->kind == HL__ASK_TAKE || ask->lease->dropped))
      hl__ask_drop(ask->member, ask->lease);
  } else if (unwanted && ask->state == HL__ASK_QUEUED) {
    cancel(ask);
    ask->references--; /* the queue's; the caller's is left */
  } else if (unwanted) {
    ask_interrupt(ask);
  } else if (!ask->stray) {
    ask->stray = true;
    if (++ask->member->strays > STRAYS) ask->member->suspect = true;
  }
  ask->listener = NULL;
  hl__ask_unref(ask);
}

void hl__ask_clear(hl__quorum_ask **place, bool unwanted) {
  hl__quorum_ask *ask = *place;
  *place = NULL;
  if (ask) hl__ask_leave(ask, unwanted);
}

void hl__asks_leave(hl__quorum_ask *asks[HL__QUORUM_MAX], bool unwanted) {
  for (unsigned i = 0; i < HL__QUORUM_MAX; i++) hl__ask_clear(&asks[i], unwanted);
}

void hl__ask_drop(hl__quorum_member *member, hl__quorum_lease *lease) {
  hl__quorum_ask *ask =
      member->suspect ? NULL : hl__ask_new(member, HL__ASK_DROP, lease, NULL, NULL);
  lease->at[member->number].in = false;
  if (!ask) {
    lease->at[member->number].leftover = true;
    return;
  }
  hl__ask_give(ask);
  hl__ask_unref(ask);
}

void hl__quorum_abandon(hl__quorum_store *store, hl__quorum_lease *lease) {
  lease->dropped = true;
  lease->held = false;
  for (unsigned i = 0; i < store->n; i++) {
    hl__ask_takes_end(&store->members[i], lease);
    if (lease->at[i].in || lease->at[i].old) hl__ask_drop(&store->members[i], lease);
  }
}

void hl__quorum_wait(hl__quorum_session *session, int64_t until) {
  hl__quorum_store *store = hl__quorum_store_of(&session->base);
  if (store->wait_begin) store->wait_begin();
  hl__cond_wait(&session->answered, &store->mutex, until);
  if (!hl__library_is_inside()) return;
  hl__quorum_mutex_unlock(store);
  store->wait_end();
  hl__quorum_mutex_lock(store);
}

/* -------------------------------------------------------------- the answers */

bool hl__quorum_is_revoked(const hl__quorum_ask *ask) {
  return ask->status == HL_ELOST && (ask->error.revoked_by[0] || ask->error.reason[0] ||
                                     strstr(ask->error.message, "revoked"));
}

int hl__quorum_failure(const hl__quorum_store *store, hl__quorum_ask *const *asks) {
  int status = HL_ECONNECTION;
  for (unsigned i = 0; i < store->n; i++) {
    const hl__quorum_ask *ask = asks[i];
    if (!ask || ask->state != HL__ASK_DONE) continue;
    if (ask->status != HL_OK && ask->status != HL_ECONNECTION && ask->status != HL_TIMEOUT &&
        ask->status != HL_CANCELLED && ask->status != HL_ELOST && ask->status != HL_BUSY)
      status = ask->status;
  }
  return status;
}

int hl__quorum_error(const hl__quorum_store *store, int status, hl__quorum_ask *const *asks,
                     const char *what, hl_error *error) {
  char text[400] = "";
  size_t used = 0;
  unsigned count = 0;
  const hl_error *first = NULL;
  for (unsigned i = 0; i < store->n; i++) {
    const hl__quorum_ask *ask = asks[i];
    if (!ask || hl__ask_is_ok(ask)) continue;
    const char *said = "it has not answered";
    if (ask->state == HL__ASK_DONE && ask->status == HL_TIMEOUT &&
        (ask->kind == HL__ASK_TAKE || ask->kind == HL__ASK_UPGRADE))
      said = "locked by another";
    else if (ask->state == HL__ASK_DONE && ask->status != HL_CANCELLED && ask->error.message[0])
      said = ask->error.message;
    count++;
    if (ask->state == HL__ASK_DONE && ask->status == status && !first) first = &ask->error;
    if (used < sizeof text - 1)
      used += (size_t)snprintf(text + used, sizeof text - used, "%s%s: %.160s", used ? "; " : "",
                               store->members[i].name, said);
  }
  hl_error own = first ? *first : (hl_error){.level = -1};
  status = hl__error(error, status, "%u of %u stores %s: %s", count, store->n, what, text);
  if (error && first) {
    error->server_errno = own.server_errno;
    memcpy(error->sqlstate, own.sqlstate, sizeof error->sqlstate);
    error->level = own.level;
    error->bucket = own.bucket;
    memcpy(error->revoked_by, own.revoked_by, sizeof error->revoked_by);
    memcpy(error->reason, own.reason, sizeof error->reason);
  }
  return status;
}
