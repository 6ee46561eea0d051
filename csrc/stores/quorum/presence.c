/*
 * presence.c - programs that name different lists of stores do not keep each other out. So
 * each process has a record at each member, its presence, which says which list it names.
 * A process that finds another list there stops.
 *
 * A presence is a shared lease of a row of its own (HL__PRESENCE_BUCKET). The owner of that lease
 * is the *list*: a number, and the hashes of the members' names. The number is the hash of the
 * first program's list. A later program may call the members by other names; it takes the list over
 * if it finds it. A program may use a member where it finds the list, or whose name is in the list.
 * Anything else is a mismatch, which stops the whole store.
 *
 * A newcomer looks, writes, and looks again: of two at once one sees the other at least. So do the
 * threads of two members that are one store by two names, which would have two votes.
 *
 * A presence ends no earlier than the leases of its process. While it stands, its process renews
 * it, and does not look. So a program with another list cannot disturb the process.
 *
 * A process whose presence has ended, or was lost, is a newcomer at that member. The end of a
 * presence comes late where a member is slow, or has to be asked again. So it says which presence
 * it ends, and ends none that a later question needs.
 *
 * A process looks when it reaches a member first. Until then the member has granted nothing.
 */
#include "quorum_store.h"

#include "layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* A presence lasts so much longer than the longest lease: ms. */
#define SLACK_MS 30000
#define NUMBER_SIZE 16u /* of a list: hexadecimal digits; so many has a name: */
#define HASH_SIZE 7u

static const hl_row present = {
    .bucket = HL__PRESENCE_BUCKET, .mode = HL_SHARED, .root = HL__PRESENCE_BUCKET};
static const hl_row looked_for = {
    .bucket = HL__PRESENCE_BUCKET, .mode = HL_EXCLUSIVE, .root = HL__PRESENCE_BUCKET};
const hl_lease_filter hl__presences = {.rows = &looked_for, .n = 1};

/* ------------------------------------------------------------------- names */

static uint64_t hash_add(uint64_t hash, const char *text) {
  return hl__hash("\n", 1, text ? hl__hash(text, strlen(text), hash) : hash);
}

/* Hashes what leads to a member's space, without users and passwords. */
static void name_hash(hl__quorum_member *member) {
  const hl_dsn *dsn = &member->dsn;
  char port[16];
  (void)snprintf(port, sizeof port, "%u", dsn->port);
  const char *parts[] = {dsn->store, dsn->host, port, dsn->socket, dsn->path, dsn->database};
  uint64_t hash = HL__HASH_BEGIN;
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) hash = hash_add(hash, parts[i]);
  for (unsigned i = 0; i < dsn->param_count; i++)
    if (strcmp(dsn->params[i].name, "table") == 0 || strcmp(dsn->params[i].name, "prefix") == 0 ||
        strcmp(dsn->params[i].name, "service") == 0)
      hash = hash_add(hash, dsn->params[i].value);
  (void)snprintf(member->hash, sizeof member->hash, "%07x",
                 (unsigned)((hash ^ hash >> 32) & 0xfffffff));
}

static int hash_compare(const void *a, const void *b) { return memcmp(a, b, HASH_SIZE); }

void hl__presence_init(hl__quorum_store *store) {
  char hashes[HL__QUORUM_MAX * HASH_SIZE + 1] = "";
  size_t used = 0;
  for (unsigned i = 0; i < store->n; i++) {
    name_hash(&store->members[i]);
    memcpy(hashes + (size_t)i * HASH_SIZE, store->members[i].hash, HASH_SIZE + 1);
    if (used < sizeof store->shown)
      used += (size_t)snprintf(store->shown + used, sizeof store->shown - used, "%s%s",
                               i ? ", " : "", store->members[i].name);
  }
  qsort(hashes, store->n, HASH_SIZE, hash_compare); /* in any order */
  (void)snprintf(store->list, sizeof store->list, "%016llx%s",
                 (unsigned long long)hash_add(HL__HASH_BEGIN, hashes), hashes);
}

void hl__presence_adopt(hl__quorum_store *store, hl__quorum_ask *const *asks) {
  const hl_holder *first = NULL;
  for (unsigned i = 0; i < store->n; i++) {
    const hl__quorum_ask *ask = asks[i];
    for (size_t j = 0; ask && ask->state == HL__ASK_DONE && j < ask->found_n; j++) {
      if (strcmp(ask->found[j].owner, store->list) == 0) return;
      if (!first && strlen(ask->found[j].owner) == strlen(store->list)) first = &ask->found[j];
    }
  }
  if (!first) return;
  memcpy(store->list, first->owner, sizeof store->list);
  memcpy(store->shown, first->path, sizeof store->shown);
}

/* ---------------------------------------------------------------- judging */

static const char mend[] =
    "all programs have to name the same stores; to change the list, see docs/quorum.md, One list";

/* The member to whose presence this id belongs; NULL: it is no presence of this store's. */
static const hl__quorum_member *member_of(const hl__quorum_store *store, const char *id) {
  char own[HL_LEASE_ID_SIZE];
  for (const hl__quorum_member *it = store->members; it < store->members + store->n; it++) {
    (void)hl__hex(own, it->presence.id, sizeof it->presence.id);
    if (it->presence.turn && strcmp(own, id) == 0) return it;
  }
  return NULL;
}

/* Judges the presences that a thread found at a member. */
static int judge(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_store *store = ask->member->store;
  hl_error *error = &store->stopped;
  bool known = false;
  for (size_t i = 0; i < ask->found_n && !error->status; i++) {
    const hl_holder *other = &ask->found[i];
    const hl__quorum_member *member = member_of(store, other->id);
    if (member && member != ask->member)
      (void)hl__error(error, HL_EMISMATCH,
                      "%.60s and %.60s are one store, or one is a copy of the other: name each "
                      "store once",
                      member->name, ask->member->name);
    else if (strcmp(other->owner, store->list) == 0)
      known = true;
    else
      (void)hl__error(error, HL_EMISMATCH,
                      "%.60s is used with another list of stores by %.40s (process %lld "
                      "on %.40s): %.160s; %s",
                      ask->member->name, other->application, (long long)other->pid, other->host,
                      other->path, mend);
  }
  for (const char *at = store->list + NUMBER_SIZE; *at; at += HASH_SIZE)
    known = known || memcmp(at, ask->member->hash, HASH_SIZE) == 0;
  if (!known && !error->status)
    (void)hl__error(error, HL_EMISMATCH,
                    "%.60s is not in the list of the programs that use the other "
                    "stores: %.160s; %s",
                    ask->member->name, store->shown, mend);
  return error->status;
}

int hl__quorum_stopped(const hl__quorum_store *store, hl_error *error) {
  if (store->stopped.status && error) *error = store->stopped;
  return store->stopped.status;
}

/* ---------------------------------------------------- at a member: its thread */

static int presences_list(hl__quorum_ask *ask, hl_session *session, int64_t deadline)
    HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_member *member = ask->member;
  ask->found_n = 0;
  hl__quorum_mutex_unlock(member->store);
  int status = member->inner->leases->list(session, &hl__presences, hl__ask_found, ask, deadline,
                                           &ask->error);
  hl__quorum_mutex_lock(member->store);
  return status ? status : judge(ask);
}

/* Renews the presence, or makes a new one: *anew. */
static int write(hl__quorum_member *member, hl_session *session, int64_t deadline, bool *anew,
                 hl_error *error) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_store *store = member->store;
  hl_lease_terms terms = member->presence;
  hl_request request = {.rows = &present,
                        .n = 1,
                        .recorded = &present,
                        .recorded_n = 1,
                        .lease = &terms,
                        .deadline = deadline,
                        .try_once = true,
                        .mode = HL_SHARED};
  char owner[sizeof store->list], path[sizeof store->shown];
  hl_grant grant = {.place = terms.place};
  int status = HL_ELOST;
  memcpy(owner, store->list, sizeof owner);
  memcpy(path, store->shown, sizeof path);
  terms.owner = owner;
  request.path = path;
  terms.ttl = store->longest + store->longest / 50 + SLACK_MS;
  if (terms.ttl > HL_TTL_MAX) terms.ttl = HL_TTL_MAX;
  terms.turn++;
  *anew = terms.turn == 1;
  hl__quorum_mutex_unlock(store);
  if (!*anew)
    status =
        member->inner->leases->refresh(session, &terms, terms.ttl, deadline, &grant.sent_ms, error);
  if (status == HL_ELOST) {
    *anew = true;
    terms.turn = 1;
    if (getrandom(terms.id + 8, 8, 0) != 8 || getrandom(terms.holder, 16, 0) != 16)
      status = hl__error(error, HL_ESTORE, "there are no random numbers");
    else
      status = member->ops->take(session, &request, &grant, error);
  }
  hl__quorum_mutex_lock(store);
  terms.place = grant.place;
  member->presence = terms;
  if (status == HL_OK)
    member->present_till = hl__deadline(grant.sent_ms, terms.ttl - terms.ttl / 100);
  return status;
}

/* anew: a process with another list may have come. */
static int join(hl__quorum_ask *ask, hl_session *session, bool anew)
    HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_member *member = ask->member;
  int64_t deadline = hl__now_ms() + HL__QUORUM_ANSWER_MS;
  bool made = false;
  member->joins = true;
  int status = anew ? presences_list(ask, session, deadline) : HL_OK;
  if (status == HL_OK) status = write(member, session, deadline, &made, &ask->error);
  if (status == HL_OK && (anew || made)) {
    int64_t till = member->present_till;
    member->present_till = 0;
    status = presences_list(ask, session, deadline);
    if (status == HL_OK) member->present_till = till;
  }
  member->joins = false;
  (void)pthread_cond_broadcast(&member->opened);
  if (status == HL_EMISMATCH) (void)hl__quorum_stopped(member->store, &ask->error);
  return status;
}

bool hl__presence_stands(const hl__quorum_member *member) {
  return member->present_till > hl__boot_ms();
}

/* HL_OK: the ask names the presence, which this process does without from now on. HL_CANCELLED:
   there is none, or a later question needs it, and would grant a lease beside none. */
static int part(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex) {
  hl__quorum_member *member = ask->member;
  if (ask->terms.turn) return HL_OK; /* it is asked again: a newer one may be there */
  if (ask->number != member->needed) return HL_CANCELLED;
  ask->terms = member->presence;
  member->presence.turn = 0;
  member->present_till = 0;
  return ask->terms.turn ? HL_OK : HL_CANCELLED;
}

int hl__presence_keep(hl__quorum_ask *ask, hl_session *session, bool used) {
  hl__quorum_member *member = ask->member;
  hl__quorum_store *store = member->store;
  if (!hl__ask_grants(ask) && ask->kind != HL__ASK_PART) return HL_OK;
  while (member->joins) hl__cond_wait(&member->opened, &store->mutex, HL_FOREVER);
  if (ask->kind == HL__ASK_PART) return part(ask);
  bool stands = hl__presence_stands(member);
  int status = hl__quorum_stopped(store, &ask->error);
  if (status || store->closing) return status;
  if (ask->ttl > store->longest) store->longest = ask->ttl;
  /* A new session may reach a server that was emptied, or another one. */
  if (stands && used && member->present_till - hl__boot_ms() >= ask->ttl) return HL_OK;
  status = join(ask, session, !stands);
  if (status == HL_OK) memset(&ask->error, 0, sizeof ask->error);
  return status;
}

bool hl__presence_is_due(const hl__quorum_ask *ask) {
  const hl__quorum_member *member = ask->member;
  return hl__ask_grants(ask) && !member->joins && !member->store->closing &&
         hl__presence_stands(member) &&
         member->present_till - hl__boot_ms() < member->store->longest + SLACK_MS / 2;
}

int hl__presence_renew(hl__quorum_ask *ask, hl_session *session) {
  return join(ask, session, false);
}
