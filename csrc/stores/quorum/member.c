/*
 * member.c - asks a member: by threads of the quorum's, so that all members are
 * asked at once, and one that does not answer keeps nobody waiting. A thread
 * has a session of the member's store while it asks; what has ended is opened
 * again.
 *
 * Who leaves a question (hl__ask_leave) need not know what becomes of it. The
 * thread that asks gives back what was granted too late, and has a grant
 * recalled of which it does not know. Until it has done that, part->making
 * keeps others from making a record of the same id there.
 */
#include "quorum.h"

#include "exit.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Threads of a member: as many as callers ask at once; and while it is suspect.
 */
#define THREADS_MAX 4096u
#define SUSPECT_THREADS 2u
/* Questions that nobody waits for any more: a member with more of them is suspect, and so
   many stay in its queue then, to be asked when it goes on. */
#define STRAYS 16u
/* A thread without work stays so long: ms. */
#define IDLE_MS 10000
/* For the answer to what was sent before on a session. */
#define SETTLE_MS 250
#define STACK_BYTES ((size_t)256 * 1024)

/* ------------------------------------------------------------- the store */

/* Nobody has it any more. */
HL__UNCHECKED static void store_free(hl__quorum_store *store) {
  for (unsigned i = 0; i < store->n; i++) {
    hl__quorum_member *member = &store->members[i];
    while (member->idle_count > 0) member->ops->session_close(member->idle[--member->idle_count]);
    if (member->inner) member->ops->close(member->inner);
    (void)pthread_cond_destroy(&member->work);
    (void)pthread_cond_destroy(&member->opened);
    hl_dsn_dispose(&member->dsn);
  }
  for (size_t i = 0; i < HL__QUORUM_CHAINS; i++)
    while (store->leases[i]) hl__known_forget(store, store->leases[i]);
  if (store->awaited) hl__exit_await_end();
  (void)pthread_mutex_destroy(&store->mutex);
  hl_layout_unref(store->wanted);
  hl_layout_unref(store->base.layout);
  free(store);
}

void hl__quorum_unref(hl__quorum_store *store) {
  hl__quorum_mutex_lock(store);
  bool last = --store->references == 0;
  hl__quorum_mutex_unlock(store);
  if (last) store_free(store);
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

/* --------------------------------------------------------------- asking */

static void ask_unref(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
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
    ask->token = lease->at[member->number].token;
    hl__ask_rows(ask, NULL, lease->shown);
  }
  return ask;
}

void hl__ask_rows(hl__quorum_ask *ask, hl__quorum_rows *rows, hl__quorum_rows *shown) {
  if (rows) {
    rows->references++;
    hl__rows_unref(ask->rows);
    ask->rows = rows;
  }
  if (shown) {
    shown->references++;
    hl__rows_unref(ask->shown);
    ask->shown = shown;
  }
}

static bool thread_start(hl__quorum_member *member) HL__REQUIRES(hl__quorum_mutex);

static void suspect_end(hl__quorum_member *member) HL__REQUIRES(hl__quorum_mutex) {
  member->heard = hl__now_ms();
  member->silent = false;
  if (!member->suspect) return;
  member->suspect = false;
  for (unsigned i = member->idle_threads; i < member->queued; i++)
    if (!thread_start(member)) break;
  hl__known_flush(member);
}

void hl__member_suspect(hl__quorum_member *member) { member->suspect = true; }

static void ask_interrupt(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  if (ask->interrupted) return;
  ask->interrupted = true;
  if (ask->session) ask->member->ops->interrupt(ask->session);
}

/* Whether a record that came to be late is what the lease has now. */
static bool is_wanted(const hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  const hl__quorum_lease *lease = ask->lease;
  return lease->held && !lease->dropped && hl__boot_ms() < lease->end &&
         hl__rows_match(ask->shown, lease->shown);
}

/* The grant of one that nobody waits for. False: it has to be given back. */
static bool grant_keep(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_part *part = &ask->lease->at[ask->member->number];
  if (ask->unwanted || !is_wanted(ask)) return false;
  part->in = true;
  part->converted = false;
  part->place = ask->grant.place;
  part->token = ask->grant.token;
  hl__known_sent(part, ask->grant.sent_ms, ask->ttl);
  return true;
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
  ask_unref(ask);
}

/* After it there may be a record of this holder. */
static bool makes(const hl__quorum_ask *ask) {
  return ask->kind == HL__ASK_TAKE || ask->kind == HL__ASK_ADOPT;
}

static bool converts(const hl__quorum_ask *ask) {
  return ask->kind == HL__ASK_UPGRADE || ask->kind == HL__ASK_DOWNGRADE;
}

/* An upgrade that has come to nothing: the rows are shared again. */
static void upgrade_undo(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_rows *rows = hl__rows_shared(ask->rows->rows, ask->rows->n);
  hl__quorum_ask *back =
      rows ? hl__ask_new(ask->member, HL__ASK_DOWNGRADE, ask->lease, NULL, NULL) : NULL;
  if (back) {
    hl__ask_rows(back, rows, NULL);
    hl__ask_give(back);
    ask_unref(back);
  } else {
    hl__known_old(ask->member->store, ask->lease, ask->member->number);
  }
  hl__rows_unref(rows);
}

/* It has been carried out, and nobody listens any more. */
static void convert_late(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
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

/* What it says of the record counts from here on, not from when a listener
   reads it: the record may be lost meanwhile, and made anew as it was. */
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
    /* Nobody knows. */
    hl__known_old(ask->member->store, ask->lease, ask->member->number);
  }
}

/* It is answered; its thread has nothing to clean up. */
static void ask_done(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_part *part = ask->lease ? &ask->lease->at[ask->member->number] : NULL;
  ask->state = HL__ASK_DONE;
  if (ask->stray) ask->member->strays--;
  if (makes(ask)) part->making--;
  if (converts(ask)) convert_done(ask);
  if (ask->kind == HL__ASK_DROP) {
    bool gone = ask->status == HL_OK || ask->status == HL_ELOST;
    part->dropping--;
    if (gone) part->gone = part->gone || ask->status == HL_OK;
    part->leftover = !gone;
    part->spoiled = part->spoiled || (!gone && ask->sent);
    if (gone) part->in = false;
  }
  if (ask->listener) (void)pthread_cond_signal(&ask->listener->answered);
}

static void queue_remove(hl__quorum_member *member, hl__quorum_ask *ask)
    HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_ask **at = &member->first, *before = NULL;
  for (; *at && *at != ask; at = &(*at)->next) before = *at;
  if (!*at) return;
  *at = ask->next;
  if (member->last == ask) member->last = before;
  member->queued--;
}

/* Those who leave questions at a member that hangs do not fill the memory:
   beyond some nothing is left there. A refresh or a look counts as not
   answered; what was to be dropped is a leftover (hl__known_flush). Takes,
   imports and what converts stay: of each lease there is one at most. */
static bool is_too_many(const hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  return ask->member->suspect && ask->member->queued > STRAYS && !makes(ask) && !converts(ask) &&
         ask->kind != HL__ASK_OPEN;
}

void hl__ask_leave(hl__quorum_ask *ask, bool unwanted) {
  bool takes = makes(ask);
  if (ask->state == HL__ASK_QUEUED && is_too_many(ask)) unwanted = true;
  ask->unwanted = ask->unwanted || unwanted;
  if (ask->state == HL__ASK_DONE) {
    /* A grant, or the like, that its listener has not seen. */
    if (converts(ask) && ask->listener && ask->status == HL_OK) {
      ask->lease->at[ask->member->number].converted = false;
      convert_late(ask);
    }
    if (takes && ask->listener && ask->status == HL_OK && !ask->lease->at[ask->member->number].in &&
        !grant_keep(ask) && (ask->kind == HL__ASK_TAKE || ask->lease->dropped))
      hl__ask_drop(ask->member, ask->lease);
  } else if (unwanted && ask->state == HL__ASK_QUEUED) {
    queue_remove(ask->member, ask);
    ask->status = HL_CANCELLED;
    ask_done(ask);
    ask->references--; /* the queue's; the caller's is left */
  } else if (unwanted) {
    ask_interrupt(ask);
  } else if (!ask->stray) {
    ask->stray = true;
    if (++ask->member->strays > STRAYS) hl__member_suspect(ask->member);
  }
  ask->listener = NULL;
  ask_unref(ask);
}

/* ------------------------------------------------------- a thread's part */

static bool is_same_layout(const hl_layout *a, const hl_layout *b) {
  unsigned levels = hl_layout_levels(a);
  if (levels != hl_layout_levels(b) || hl_layout_buckets(a) != hl_layout_buckets(b)) return false;
  for (unsigned i = 0; i < levels; i++)
    if (strcmp(hl_layout_name(a, i), hl_layout_name(b, i)) != 0) return false;
  return true;
}

/* Opens the store of the member, or waits until another thread has. */
static int inner_open(hl__quorum_member *member, hl_error *error) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_store *store = member->store;
  while (member->opens) hl__cond_wait(&member->opened, &store->mutex, HL_FOREVER);
  if (member->inner) return HL_OK;
  if (member->refusal) {
    *error = member->reason;
    return member->refusal;
  }
  hl_store *inner = NULL;
  member->opens = true;
  hl__quorum_mutex_unlock(store);
  int status = member->ops->open(&member->config, &inner, error);
  hl__exit_watch(member->ops); /* its library is initialised now */
  if (status == HL_OK && !inner->leases)
    status = hl__error(error, HL_EUNSUPPORTED, "it has no leases here");
  hl__quorum_mutex_lock(store);
  if (status == HL_OK) {
    hl_layout *ours = store->base.layout;
    if (!ours)
      store->base.layout = hl_layout_ref(inner->layout);
    else if (!is_same_layout(ours, inner->layout))
      status = hl__error(error, HL_EMISMATCH,
                         "it has other levels or buckets than the stores before "
                         "it");
  }
  if (status == HL_OK)
    member->inner = inner;
  else if (inner)
    member->ops->close(inner);
  /* What does not pass. */
  if (status != HL_OK && status != HL_ECONNECTION && status != HL_ENOMEM) {
    member->refusal = status;
    member->reason = *error;
  }
  member->opens = false;
  (void)pthread_cond_broadcast(&member->opened);
  return status;
}

static void session_close(hl__quorum_member *member, hl_session *session)
    HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_mutex_unlock(member->store);
  member->ops->session_close(session);
  hl__quorum_mutex_lock(member->store);
}

/* A session on which nothing is outstanding. *used: it was used before. */
static int session_get(hl__quorum_member *member, hl_session **session, bool *used, hl_error *error)
    HL__REQUIRES(hl__quorum_mutex) {
  const hl_store_ops *ops = member->ops;
  int status = inner_open(member, error);
  if (status) return status;
  while (member->idle_count > 0) {
    hl_session *old = member->idle[--member->idle_count];
    hl__quorum_mutex_unlock(member->store);
    status = ops->settle(old, 0, NULL);
    if (status == HL_TIMEOUT) status = ops->settle(old, hl__now_ms() + SETTLE_MS, NULL);
    if (status == HL_OK) status = ops->look(old, NULL);
    if (status) ops->session_close(old);
    hl__quorum_mutex_lock(member->store);
    if (status) continue;
    *session = old;
    *used = true;
    return HL_OK;
  }
  *used = false;
  hl__quorum_mutex_unlock(member->store);
  status = ops->session_open(member->inner, hl__now_ms() + HL__QUORUM_ANSWER_MS, session, error);
  hl__quorum_mutex_lock(member->store);
  return status;
}

static void session_put(hl__quorum_member *member, hl_session *session)
    HL__REQUIRES(hl__quorum_mutex) {
  if (member->idle_count < HL__QUORUM_IDLE)
    member->idle[member->idle_count++] = session;
  else
    session_close(member, session);
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

/* What is asked, on a session; without the mutex. */
static int ask_send(hl__quorum_ask *ask, hl_session *session) {
  const hl_store_ops *ops = ask->member->ops;
  const hl_lease_ops *leases = ask->member->inner->leases;
  const hl__quorum_lease *lease = ask->lease;
  hl_error *error = &ask->error;
  hl_request request = {.lease = &ask->terms, .deadline = ask->deadline};
  hl_lease_filter filter;
  if (ask->shown) {
    const hl__quorum_rows *rows = ask->rows ? ask->rows : ask->shown;
    request.rows = rows->rows;
    request.n = rows->n;
    request.recorded = ask->shown->rows;
    request.recorded_n = ask->shown->n;
    request.try_once = ask->try_once;
    request.gives_way = ask->gives_way;
    request.cancellable = true;
    request.path = lease->path;
    request.label = lease->label;
    request.label_size = lease->label_size;
    request.mode = ask->shown->mode;
  }
  int status = HL_ELOST;
  switch (ask->kind) {
  case HL__ASK_OPEN:
    /* What hinders the look hinders the presence, too, and is told then. */
    (void)leases->list(session, &hl__presences, hl__ask_found, ask, ask->deadline, NULL);
    return HL_OK;
  case HL__ASK_JOIN: return HL_OK;
  case HL__ASK_PART: return leases->drop(session, &ask->terms, true, ask->deadline, error);
  case HL__ASK_TAKE:
    /* Of a grant, what another holder has made of it. */
    if (ask->old) status = leases->drop(session, &ask->terms, true, ask->deadline, error);
    if (ask->old && status != HL_OK && status != HL_ELOST) return status;
    if (ask->old)
      status = HL_ELOST;
    else if (ask->heals)
      status = leases->adopt(session, &request, &ask->grant, error);
    ask->old = false;
    if (status != HL_ELOST || lease->adopted) return status;
    memset(&ask->grant, 0, sizeof ask->grant);
    return ops->take(session, &request, &ask->grant, error);
  case HL__ASK_ADOPT: return leases->adopt(session, &request, &ask->grant, error);
  case HL__ASK_REFRESH:
    return leases->refresh(session, &ask->terms, ask->ttl, ask->deadline, &ask->sent_ms, error);
  case HL__ASK_LOOK: return leases->look(session, &ask->terms, ask->deadline, &ask->left_ms, error);
  case HL__ASK_DROP:
    ask->terms.again = ask->again;
    status = leases->drop(session, &ask->terms, true, ask->deadline, error);
    return status == HL__ABSENT ? HL_OK : status;
  case HL__ASK_UPGRADE:
  case HL__ASK_DOWNGRADE:
    request.extend = true;
    request.upgrade = ask->kind == HL__ASK_UPGRADE;
    ask->grant = (hl_grant){.place = ask->terms.place, .token = ask->token};
    return leases->convert(session, &request, &ask->grant, error);
  case HL__ASK_RAISE: return leases->raise(session, ask->token, ask->deadline, error);
  case HL__ASK_LIST:
    return leases->list(session, &ask->query->filter, hl__ask_found, ask, ask->deadline, error);
  case HL__ASK_REVOKE:
    filter = ask->query->filter;
    filter.again = ask->again;
    return leases->revoke(session, &filter, ask->query->by, ask->query->reason, ask->deadline,
                          &ask->count, error);
  case HL__ASK_HOLDERS:
    status = ops->holders(session, &ask->query->filter, hl__ask_found, ask, ask->deadline, error);
    if (status != HL_EUNSUPPORTED) return status;
    /* The quorum has leases only: a server that does not show its sessions shows these. */
    ask->found_n = 0;
    return leases->list(session, &ask->query->filter, hl__ask_found, ask, ask->deadline, error);
  }
  return status;
}

/* Whether it may be asked again when the session had ended before: it changes
   nothing, or the second time nothing more. */
static bool is_repeatable(const hl__quorum_ask *ask) {
  return ask->kind == HL__ASK_TAKE ? ask->grant.sent_ms == 0 && !ask->old
                                   : ask->kind != HL__ASK_REFRESH && ask->kind != HL__ASK_ADOPT;
}

static int ask_once(hl__quorum_ask *ask, bool *again) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_member *member = ask->member;
  hl_session *session = NULL;
  bool used = false;
  *again = false;
  ask->found_n = 0;
  int status = session_get(member, &session, &used, &ask->error);
  if (status) return status;
  status = hl__presence_keep(ask, session, used);
  if (status == HL_OK && ask->interrupted) status = HL_CANCELLED;
  bool sends = status == HL_OK;
  if (sends) {
    ask->session = session;
    ask->sent = true;
    hl__quorum_mutex_unlock(member->store);
    status = ask_send(ask, session);
    hl__quorum_mutex_lock(member->store);
  }
  ask->session = NULL;
  /* A hint of the interruption may still be on it. */
  if (status == HL_ECONNECTION || (sends && ask->interrupted))
    session_close(member, session);
  else
    session_put(member, session);
  *again = status == HL_ECONNECTION && used && !ask->interrupted && (!sends || is_repeatable(ask));
  return status;
}

/* One that nobody wants goes: on the session, or another one. False: it may stay, or
   go at any time, so no record of that id counts at the member any more. */
static bool record_undo(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_member *member = ask->member;
  hl_session *session = NULL;
  bool used;
  int status = session_get(member, &session, &used, NULL);
  if (status) return false;
  const hl_lease_ops *leases = member->inner->leases;
  bool recalls = ask->status == HL_ECONNECTION && leases->recall;
  int64_t deadline = hl__now_ms() + HL__QUORUM_ANSWER_MS;
  hl_lease_terms terms = ask->terms;
  terms.place = ask->grant.place;
  hl__quorum_mutex_unlock(member->store);
  if (recalls) {
    hl__quorum_mutex_lock(member->store);
    ask->lease->at[member->number].spoiled = true;
    hl__quorum_mutex_unlock(member->store);
  }
  status = recalls ? leases->recall(session, &terms, deadline, NULL)
                   : leases->drop(session, &terms, true, deadline, NULL);
  hl__quorum_mutex_lock(member->store);
  if (status == HL_ECONNECTION)
    session_close(member, session);
  else
    session_put(member, session);
  return status == HL_OK || status == HL_ELOST;
}

/* Others have made the refresh; it may have been lost here. One that was
   revoked stays, for the next refresh to hear it. */
static void refresh_late(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_lease *lease = ask->lease;
  hl__quorum_part *part = &lease->at[ask->member->number];
  if (ask->status == HL_OK && part->in && part->sent_ms < ask->sent_ms)
    hl__known_sent(part, ask->sent_ms, ask->ttl);
  if (ask->status != HL_ELOST || hl__quorum_is_revoked(ask)) return;
  part->in = false;
  hl__known_heal(ask->member->store, lease);
}

static void presence_renew(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_member *member = ask->member;
  hl_session *session;
  bool used;
  if (!hl__presence_is_due(ask) || session_get(member, &session, &used, NULL)) return;
  if (hl__presence_renew(ask, session) == HL_ECONNECTION)
    session_close(member, session);
  else
    session_put(member, session);
}

static void ask_run(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_member *member = ask->member;
  bool again;
  if (ask->kind == HL__ASK_TAKE && (ask->lease->dropped || (ask->heals && ask->lease->left))) {
    ask->status = HL_CANCELLED;
    ask_done(ask);
    if (ask->old) hl__ask_drop(member, ask->lease);
    return;
  }
  ask->status = ask_once(ask, &again);
  ask->again = again;
  if (again) ask->status = ask_once(ask, &again);
  if (ask->status != HL_ECONNECTION && ask->status != HL_CANCELLED &&
      !(ask->status == HL_TIMEOUT && ask->kind != HL__ASK_TAKE))
    suspect_end(member);
  else if (ask->status == HL_ECONNECTION && !ask->interrupted && member->inner)
    member->heard = hl__now_ms(); /* nobody waits for it in vain */
  if (ask->heals && ask->status != HL_OK && ask->status != HL_TIMEOUT && ask->status != HL_ELOST)
    member->silent = true; /* the next lease would be told the same */
  if (ask->kind == HL__ASK_REFRESH && !ask->listener) refresh_late(ask);
  if (makes(ask)) {
    bool take = ask->kind == HL__ASK_TAKE;
    bool unsure = take && ask->status == HL_ECONNECTION && ask->grant.sent_ms;
    bool late = ask->status == HL_OK && !ask->listener && !grant_keep(ask);
    /* An import that has failed leaves the lease to whose text it was. */
    if (!take && !ask->lease->dropped) late = false;
    if ((unsure || late) && !record_undo(ask)) {
      ask->lease->at[member->number].leftover = true;
      ask->lease->at[member->number].spoiled = true;
    }
    if (late) ask->status = HL_CANCELLED;
  }
  if (ask->kind == HL__ASK_TAKE && ask->old) {
    hl__quorum_part *part = &ask->lease->at[member->number];
    part->old = part->leftover = true;
    part->spoiled = part->spoiled || ask->status == HL_ECONNECTION;
  }
  ask_done(ask);
  if (converts(ask) && !ask->listener && ask->status == HL_OK) convert_late(ask);
}

/* Until there is work for the thread, or it has had none for long. The last one
   of a member stays as long as a lease is to be healed. */
static void idle(hl__quorum_member *member) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_store *store = member->store;
  int64_t end = hl__now_ms() + IDLE_MS;
  while (!member->first && !store->closing) {
    if (hl__left_ms(store->heal_at) == 0) {
      hl__known_heal_due(store);
      continue;
    }
    bool stays = member->threads == 1 && store->heal_at != HL_FOREVER;
    if (hl__left_ms(end) == 0 && !stays) break;
    int64_t until = hl__left_ms(end) == 0 ? HL_FOREVER : end;
    hl__cond_wait(&member->work, &store->mutex, until < store->heal_at ? until : store->heal_at);
  }
}

static void *thread_main(void *argument) {
  hl__quorum_member *member = argument;
  hl__quorum_store *store = member->store;
  bool uses_library = member->ops->traits.blocks;
  hl__quorum_mutex_lock(store);
  for (;;) {
    hl__quorum_ask *ask = member->first;
    bool spare = member->suspect && member->threads - member->idle_threads > SUSPECT_THREADS;
    if (spare) break;
    if (ask) {
      queue_remove(member, ask);
      ask->next = NULL;
      ask->state = HL__ASK_RUNS; /* the reference is ours: see hl__ask_leave */
      if (uses_library) {
        hl__quorum_mutex_unlock(store);
        hl__library_enter();
        hl__quorum_mutex_lock(store);
      }
      ask_run(ask);
      presence_renew(ask);
      ask_unref(ask);
      if (uses_library) hl__library_leave();
      continue;
    }
    if (store->closing) break;
    member->idle_threads++;
    idle(member);
    member->idle_threads--;
    if (!member->first) break;
  }
  member->threads--;
  hl__quorum_mutex_unlock(store);
  /* Sessions may end with the store: of any member. */
  hl__library_enter();
  const hl_store_ops *ops = member->ops;
  hl__quorum_unref(store);
  if (ops->thread_end) ops->thread_end();
  hl__library_leave();
  return NULL;
}

static bool thread_start(hl__quorum_member *member) HL__REQUIRES(hl__quorum_mutex) {
  sigset_t all, before;
  pthread_t thread;
  pthread_attr_t detached;
  hl__exit_watch(member->store->base.ops);
  (void)pthread_attr_init(&detached);
  (void)pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  (void)pthread_attr_setstacksize(&detached, STACK_BYTES);
  (void)sigfillset(&all);
  (void)pthread_sigmask(SIG_SETMASK, &all, &before);
  int failure = pthread_create(&thread, &detached, thread_main, member);
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
  (void)pthread_attr_destroy(&detached);
  if (failure) return false;
  member->threads++;
  member->store->references++;
  return true;
}

void hl__ask_give(hl__quorum_ask *ask) {
  hl__quorum_member *member = ask->member;
  if (makes(ask)) ask->lease->at[member->number].making++;
  if (ask->kind == HL__ASK_DROP) ask->lease->at[member->number].dropping++;
  if (converts(ask)) ask->lease->at[member->number].converting++;
  ask->references++;
  ask->state = HL__ASK_QUEUED;
  ask->next = NULL;
  if (member->last)
    member->last->next = ask;
  else
    member->first = ask;
  member->last = ask;
  if (!member->first) member->first = ask;
  member->queued++;
  unsigned most = member->suspect ? SUSPECT_THREADS : THREADS_MAX;
  if (member->idle_threads >= member->queued) {
    (void)pthread_cond_signal(&member->work);
  } else if ((member->threads >= most || !thread_start(member)) && member->threads == 0) {
    queue_remove(member, ask);
    ask->status = hl__error(&ask->error, HL_BUSY, "cannot start a thread");
    ask_done(ask);
    ask->references--;
  }
}

/* ---------------------------------------------------------------- errors */

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
    if (ask && ask->state == HL__ASK_DONE && ask->status == HL_OK) continue;
    if (!ask) continue;
    const char *said = "it did not answer in time";
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
