/*
 * member.c - the threads of a member. Threads ask all members at once, so a silent member does not
 * keep callers waiting. While a thread asks, it has a session of the member's store. If the session
 * has ended, the thread opens another.
 *
 * A caller who leaves a question (hl__ask_leave) does not learn the answer. The thread gives back a
 * late grant. If the answer to a take is lost, the thread has the store recall the grant. Until
 * then part->making keeps callers from making a record of the same id there.
 */
#include "quorum_store.h"

#include "exit.h"
#include "layout.h"

#include <stdlib.h>
#include <string.h>

/* Threads of a member: at most; and while it is suspect. */
#define THREADS_MAX 4096u
#define SUSPECT_THREADS 2u
/* A thread without work stays so long: ms. */
#define IDLE_MS 10000
/* A thread waits so long for an outstanding answer on a session: ms. */
#define SETTLE_MS 250
#define STACK_BYTES ((size_t)256 * 1024)

/* Pauses between two tries to heal a lease, the first and the longest, or a
   sixth of its ttl; and between questions to a member that does not answer: ms. */
#define HEAL_MS 10
#define HEAL_MAX_MS 1000
#define PROBE_MS 1000

/* ------------------------------------------------------------- the store */

/* Unchecked: no thread refers to the store any more. */
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

/* --------------------------------------------------------------- healing */

/* Whether the member may have a record of a released lease, and is not asked to drop it. */
static bool is_left_over(const hl__quorum_member *member, const hl__quorum_lease *lease)
    HL__REQUIRES(hl__quorum_mutex) {
  const hl__quorum_part *part = &lease->at[member->number];
  return lease->dropped && part->leftover && !part->dropping && hl__boot_ms() < lease->end;
}

/* Has the member drop that record, which is left over until the answer: else a second release would
   take it for lost. */
static void leftover_drop(hl__quorum_member *member, hl__quorum_lease *lease)
    HL__REQUIRES(hl__quorum_mutex) {
  if (!lease->at[member->number].making) hl__ask_drop(member, lease);
}

/* Has the member drop the records of all released leases. */
static void flush(hl__quorum_member *member) HL__REQUIRES(hl__quorum_mutex) {
  for (size_t i = 0; i < HL__QUORUM_CHAINS; i++)
    for (hl__quorum_lease *lease = member->store->leases[i]; lease; lease = lease->next)
      if (is_left_over(member, lease)) leftover_drop(member, lease);
}

/* A member that does not answer is asked once a second, for whichever lease. */
static bool may_ask(hl__quorum_member *member) HL__REQUIRES(hl__quorum_mutex) {
  int64_t now = hl__now_ms();
  if (!member->suspect && !member->silent) return true;
  if (now < member->probe_at) return false;
  member->probe_at = now + PROBE_MS;
  return true;
}

static void heal_at(hl__quorum_member *member, hl__quorum_lease *lease)
    HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_part *part = &lease->at[member->number];
  if (hl__known_is_busy(part) || !may_ask(member)) return;
  hl__quorum_ask *ask = hl__ask_new(member, HL__ASK_TAKE, lease, NULL, NULL);
  if (!ask) return;
  /* The thread adopts the record that may be there, or drops it. */
  ask->old = part->old;
  ask->leftover = part->leftover;
  part->leftover = part->old = false;
  /* A record with another holder is a later import's. */
  ask->terms.replaces = lease->adopted ? lease->replaced : lease->terms.holder;
  ask->try_once = ask->heals = true;
  hl__ask_give(ask);
  hl__ask_leave(ask, false);
}

/* Wakes a thread, to look when healing is due. A busy thread looks once it is idle. */
static void heal_later(hl__quorum_store *store, hl__quorum_lease *lease)
    HL__REQUIRES(hl__quorum_mutex) {
  int64_t most = lease->terms.ttl / 6;
  lease->heal_at = hl__now_ms() + lease->heal_pause;
  lease->heal_pause *= 2;
  if (most < HEAL_MAX_MS) most = HEAL_MAX_MS;
  if (lease->heal_pause > most) lease->heal_pause = most;
  if (lease->heal_at >= store->heal_at) return;
  store->heal_at = lease->heal_at;
  for (unsigned i = 0; i < store->n; i++) {
    if (store->members[i].idle_threads == 0) continue;
    (void)pthread_cond_signal(&store->members[i].work);
    return;
  }
}

static void heal(hl__quorum_store *store, hl__quorum_lease *lease) HL__REQUIRES(hl__quorum_mutex) {
  bool whole = true, heals = lease->shown && lease->held && !lease->left && !lease->dropped &&
                             hl__boot_ms() < lease->end;
  lease->heal_at = HL_FOREVER;
  for (unsigned i = 0; i < store->n; i++) {
    hl__quorum_member *member = &store->members[i];
    bool left_over = is_left_over(member, lease);
    if (!left_over && (!heals || lease->at[i].in || lease->at[i].spoiled)) continue;
    whole = false;
    if (!left_over)
      heal_at(member, lease);
    else if (may_ask(member))
      leftover_drop(member, lease);
  }
  if (!whole) heal_later(store, lease);
}

void hl__quorum_heal(hl__quorum_store *store, hl__quorum_lease *lease) {
  lease->heal_pause = HEAL_MS;
  heal(store, lease);
}

/* Has a thread ask the member again to drop a record, as it has not. */
static void leftover_later(hl__quorum_member *member, hl__quorum_lease *lease)
    HL__REQUIRES(hl__quorum_mutex) {
  if (!is_left_over(member, lease) || lease->heal_at != HL_FOREVER) return;
  lease->heal_pause = HEAL_MS;
  heal_later(member->store, lease);
}

static void heal_due(hl__quorum_store *store) HL__REQUIRES(hl__quorum_mutex) {
  int64_t now = hl__now_ms(), next = HL_FOREVER;
  for (size_t i = 0; i < HL__QUORUM_CHAINS; i++)
    for (hl__quorum_lease *lease = store->leases[i]; lease; lease = lease->next) {
      if (lease->heal_at <= now) heal(store, lease);
      if (lease->heal_at < next) next = lease->heal_at;
    }
  /* Many leases are healed together. */
  store->heal_at = next > now + HEAL_MS ? next : now + HEAL_MS;
}

/* ------------------------------------------------------- a thread's part */

/* Whether a member stays refused, as trying again would not help. A store that reports trouble of
   its own, or has no room, may be opened later. */
static bool is_lasting(int status) { return status < 0 && status != HL_ESTORE; }

/* Opens the store of the member, or waits until another thread has. */
static int inner_open(hl__quorum_member *member, hl_error *error) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_store *store = member->store;
  while (member->opens) hl__cond_wait(&member->opened, &store->mutex, HL_FOREVER);
  if (member->inner) return HL_OK;
  if (is_lasting(member->refusal)) {
    *error = member->reason;
    return member->refusal;
  }
  hl_store *inner = NULL;
  member->opens = true;
  hl__quorum_mutex_unlock(store);
  int status = hl__exit_watched_open(member->ops, &member->config, &inner, error);
  if (status == HL_OK && !inner->leases)
    status = hl__error(error, HL_EUNSUPPORTED, "it has no leases here");
  if (status == HL_OK && inner->layout->intentions > 0)
    status = hl__error(error, HL_EMISMATCH,
                       "its programs know intentions, a quorum's requests have none: name another");
  hl__quorum_mutex_lock(store);
  if (status == HL_OK) {
    hl_layout *ours = store->base.layout;
    if (!ours)
      store->base.layout = hl_layout_ref(inner->layout);
    else if (!hl__layout_is_same(ours, inner->layout))
      status = hl__error(error, HL_EMISMATCH,
                         "it has other levels or buckets than the stores before it");
  }
  if (status == HL_OK) member->inner = inner;
  if (status != HL_OK && status != HL_ECONNECTION && status != HL_ENOMEM) {
    member->refusal = status;
    member->reason = *error;
  }
  member->opens = false;
  (void)pthread_cond_broadcast(&member->opened);
  if (status != HL_OK && inner) {
    /* A store may wait for threads of its own to end. */
    hl__quorum_mutex_unlock(store);
    member->ops->close(inner);
    hl__quorum_mutex_lock(store);
  }
  return status;
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
    if (status == HL_OK) status = ops->check(old, NULL);
    if (status) ops->session_close(old);
    hl__quorum_mutex_lock(member->store);
    if (status) continue;
    *session = old;
    *used = true;
    return HL_OK;
  }
  *used = false;
  hl__quorum_mutex_unlock(member->store);
  status =
      hl__session_open(ops, member->inner, hl__now_ms() + HL__QUORUM_ANSWER_MS, session, error);
  hl__quorum_mutex_lock(member->store);
  return status;
}

/* ended: it is of no use any more. */
static void session_put(hl__quorum_member *member, hl_session *session, bool ended)
    HL__REQUIRES(hl__quorum_mutex) {
  if (!ended && member->idle_count < HL__QUORUM_IDLE) {
    member->idle[member->idle_count++] = session;
    return;
  }
  hl__quorum_mutex_unlock(member->store);
  member->ops->session_close(session);
  hl__quorum_mutex_lock(member->store);
}

/* Fills in the request to the member's store. */
static hl_request request_of(hl__quorum_ask *ask) {
  hl_request request = {.lease = &ask->terms, .deadline = ask->deadline};
  const hl__quorum_lease *lease = ask->lease;
  const hl__quorum_rows *shown = ask->shown, *rows = ask->rows ? ask->rows : shown;
  if (!shown) return request;
  request.rows = rows->rows;
  request.n = rows->n;
  request.recorded = shown->rows;
  request.recorded_n = shown->n;
  request.mode = shown->mode;
  request.try_once = ask->try_once;
  request.gives_way = ask->gives_way;
  request.cancellable = true;
  request.path = lease->path;
  request.label = lease->label;
  request.label_size = lease->label_size;
  return request;
}

/* Has the member make a record. To heal, the thread adopts a record that is there still, or drops
   it first where it may be in an older mode. */
static int take_send(hl__quorum_ask *ask, hl_session *session, const hl_request *request) {
  const hl_lease_ops *leases = ask->member->inner->leases;
  int status = HL_ELOST;
  if (ask->old) {
    status = leases->drop(session, &ask->terms, true, ask->deadline, &ask->error);
    if (status != HL_OK && status != HL_ELOST) return status;
    ask->old = false;
    status = HL_ELOST;
  } else if (ask->heals) {
    status = leases->adopt(session, request, &ask->grant, &ask->error);
  }
  if (status != HL_ELOST || ask->lease->adopted) return status;
  memset(&ask->grant, 0, sizeof ask->grant);
  return ask->member->ops->take(session, request, &ask->grant, &ask->error);
}

/* Asks, on that session; without the mutex. */
static int ask_send(hl__quorum_ask *ask, hl_session *session) {
  const hl_store_ops *ops = ask->member->ops;
  const hl_lease_ops *leases = ask->member->inner->leases;
  hl_error *error = &ask->error;
  hl_request request = request_of(ask);
  hl_lease_filter filter;
  int status = HL_ELOST;
  switch (ask->kind) {
  case HL__ASK_OPEN:
    return leases->list(session, &hl__presences, hl__ask_found, ask, ask->deadline, error);
  case HL__ASK_JOIN: return HL_OK;
  case HL__ASK_PART: return leases->drop(session, &ask->terms, true, ask->deadline, error);
  case HL__ASK_TAKE: return take_send(ask, session, &request);
  case HL__ASK_ADOPT: return leases->adopt(session, &request, &ask->grant, error);
  case HL__ASK_REFRESH:
    return leases->refresh(session, &ask->terms, ask->ttl, ask->deadline, &ask->sent_ms, error);
  case HL__ASK_INSPECT:
    return leases->inspect(session, &ask->terms, ask->deadline, &ask->left_ms, error);
  case HL__ASK_DROP:
    ask->terms.again = ask->again;
    status = leases->drop(session, &ask->terms, true, ask->deadline, error);
    return status == HL__ABSENT ? HL_OK : status;
  case HL__ASK_UPGRADE:
  case HL__ASK_DOWNGRADE:
    request.extend = true;
    request.upgrade = ask->kind == HL__ASK_UPGRADE;
    ask->grant = (hl_grant){.place = ask->terms.place, .token = ask->terms.token};
    return leases->convert(session, &request, &ask->grant, error);
  case HL__ASK_RAISE: return leases->raise(session, ask->token, ask->deadline, error);
  case HL__ASK_LIST:
    return leases->list(session, &ask->query->filter, hl__ask_found, ask, ask->deadline, error);
  case HL__ASK_REVOKE:
    filter = ask->query->filter;
    filter.again = ask->again;
    return leases->revoke(session, &filter, ask->deadline, &ask->count, error);
  case HL__ASK_HOLDERS:
    status = ops->holders(session, &ask->query->filter, hl__ask_found, ask, ask->deadline, error);
    if (status != HL_EUNSUPPORTED) return status;
    /* The quorum has leases only: a server that does not show its sessions shows these. */
    ask->found_n = 0;
    return leases->list(session, &ask->query->filter, hl__ask_found, ask, ask->deadline, error);
  }
  return status;
}

/* Whether a thread may ask again, on a new session: asking twice does what asking once does. */
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
    /* A take may have waited for longer than the presence lasts. */
    if (status == HL_OK && hl__ask_makes(ask)) {
      status = hl__presence_keep(ask, session, true);
      ask->bare = status != HL_OK;
    }
  }
  ask->session = NULL;
  /* A hint of the interruption may still be on it. */
  session_put(member, session, status == HL_ECONNECTION || (sends && ask->interrupted));
  *again = status == HL_ECONNECTION && used && !ask->interrupted && (!sends || is_repeatable(ask));
  /* If the look fails, so does the presence, which tells the error. */
  return sends && ask->kind == HL__ASK_OPEN ? HL_OK : status;
}

/* Has the member drop an unwanted record. False: the record may stay, or go at any time, so no
   record of that id counts at the member any more. */
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
  if (recalls) ask->lease->at[member->number].spoiled = true;
  hl__quorum_mutex_unlock(member->store);
  status = recalls ? leases->recall(session, &terms, deadline, NULL)
                   : leases->drop(session, &terms, true, deadline, NULL);
  hl__quorum_mutex_lock(member->store);
  session_put(member, session, status == HL_ECONNECTION);
  return status == HL_OK || status == HL_ELOST;
}

/* The caller did without this member's answer to a refresh. Heals the lease if the member has lost
   it. If it was revoked, the next refresh hears that. */
static void refresh_late(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_lease *lease = ask->lease;
  hl__quorum_part *part = &lease->at[ask->member->number];
  if (ask->status == HL_OK && part->in && part->sent_ms < ask->sent_ms)
    hl__known_sent(part, ask->sent_ms, ask->ttl);
  if (ask->status != HL_ELOST || hl__quorum_is_revoked(ask)) return;
  part->in = false;
  hl__quorum_heal(ask->member->store, lease);
}

static void presence_renew(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_member *member = ask->member;
  hl_session *session;
  bool used;
  if (!hl__presence_is_due(ask) || session_get(member, &session, &used, NULL)) return;
  /* Meanwhile another thread may have renewed it, or the end of the presence came. */
  bool ended = hl__presence_is_due(ask) && hl__presence_renew(ask, session) == HL_ECONNECTION;
  session_put(member, session, ended);
}

static void suspect_end(hl__quorum_member *member) HL__REQUIRES(hl__quorum_mutex) {
  bool suspect = member->suspect, silent = member->silent;
  member->heard = hl__now_ms();
  member->suspect = member->silent = false;
  for (unsigned i = member->idle_threads; suspect && i < member->queued; i++)
    if (!hl__member_start(member)) break;
  if (suspect || silent) flush(member);
}

static void ask_run(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_member *member = ask->member;
  bool again;
  if (ask->kind == HL__ASK_TAKE && (ask->lease->dropped || (ask->heals && ask->lease->left))) {
    ask->status = HL_CANCELLED;
    hl__ask_done(ask);
    if (ask->old || ask->leftover) hl__ask_drop(member, ask->lease);
    return;
  }
  ask->status = ask_once(ask, &again);
  ask->again = ask->again || again;
  if (again) ask->status = ask_once(ask, &again);
  if (ask->status != HL_ECONNECTION && ask->status != HL_CANCELLED &&
      !(ask->status == HL_TIMEOUT && ask->kind != HL__ASK_TAKE))
    suspect_end(member);
  else if (ask->status == HL_ECONNECTION && !ask->interrupted && member->inner)
    member->heard = hl__now_ms(); /* its callers get an answer */
  if ((ask->heals && ask->status != HL_OK && ask->status != HL_TIMEOUT &&
       ask->status != HL_ELOST) ||
      (ask->kind == HL__ASK_DROP && ask->status == HL_ECONNECTION))
    member->silent = true; /* the next lease would be told the same */
  if (ask->kind == HL__ASK_REFRESH && !ask->listener) refresh_late(ask);
  if (hl__ask_makes(ask)) {
    bool take = ask->kind == HL__ASK_TAKE;
    /* A drop looks there, also if no listener reads the answer. */
    if (ask->grant.place) ask->lease->at[member->number].place = ask->grant.place;
    bool unsure = take && ask->status == HL_ECONNECTION && ask->grant.sent_ms;
    bool late = ask->status == HL_OK && !ask->listener && !hl__ask_keep(ask);
    /* After a failed import the lease stays, for the next import of its text. */
    if (!take && !ask->lease->dropped) late = false;
    bool bare = take && ask->bare && !unsure;
    if ((unsure || late || bare) && !record_undo(ask)) {
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
  hl__ask_done(ask);
  if (hl__ask_converts(ask) && !ask->listener && ask->status == HL_OK) hl__ask_convert_late(ask);
  if (ask->lease) leftover_later(member, ask->lease);
}

/* Waits until there is work, or the thread has had none for long. The last thread of a member stays
   as long as a lease is to be healed. */
static void idle(hl__quorum_member *member) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_store *store = member->store;
  int64_t end = hl__now_ms() + IDLE_MS;
  while (!member->first && !store->closing) {
    if (hl__left_ms(store->heal_at) == 0) {
      heal_due(store);
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
    bool spare = member->suspect && member->threads - member->idle_threads > SUSPECT_THREADS;
    if (spare) break;
    hl__quorum_ask *ask = hl__ask_next(member);
    if (ask) {
      if (uses_library) {
        hl__quorum_mutex_unlock(store);
        hl__library_enter();
        hl__quorum_mutex_lock(store);
      }
      ask_run(ask);
      hl__ask_end(ask);
      presence_renew(ask);
      hl__ask_unref(ask);
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

bool hl__member_start(hl__quorum_member *member) {
  pthread_t thread;
  if (member->threads >= (member->suspect ? SUSPECT_THREADS : THREADS_MAX)) return false;
  hl__exit_begin();
  if (hl__thread_start(&thread, STACK_BYTES, thread_main, member) != 0) return false;
  member->threads++;
  member->store->references++;
  return true;
}
