/*
 * take.c - acquiring. For each root of the request, in locking order:
 *
 *     1. Read the document.
 *     2. Look whether the earlier entries that conflict live. The dead are struck out by 3 or 4.
 *     3. All are dead: write the document with the grant. Another client has written it meanwhile:
 *        1.
 *     4. One lives: write the document with a place in its queue, once. Look at the first of them,
 *        often, until its liveness item is gone: 1.
 *
 * So waiters are served in the order in which they came, and none barges. The liveness item is
 * written in the same packet, before the document. A waiter's item lives for WAIT_S only, and is
 * kept alive: a waiter that dies blocks the entries behind it for no longer.
 *
 * A waiter may write its liveness item anew when it is gone. Another client may have struck the
 * waiter out meanwhile; then it finds itself nowhere in the document, and queues again. Once
 * granted it never writes the item anew.
 *
 * All requests take several roots in one order: no circle.
 *
 * An upgrade first writes that its rows are exclusive, so that no other request gets in any more,
 * not even a longer waiting one. Then it waits until the leases that share its rows have gone. From
 * then on it is exclusive. An upgrade that was not granted in time writes that its rows are shared
 * again. A write for a lease that was sent over a connection that has ended comes to nothing, as
 * each converting begins by writing the document: so a write that is read late can undo nothing
 * that is believed.
 */
#include "memcached_store.h"

#include "mode.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* How long a waiter lives of which nothing is heard, at most, and how often it is heard of. */
#define WAIT_S (1 + HL__MEMCACHED_EARLY)
#define WAIT_MS 1000
/* Between two looks: for who is next, and for who is behind another waiter. */
#define PAUSE_MS 25
#define QUEUED_MS 50
#define BLOCKERS_MAX 60
/* Others that are sample at, so that the dead do not pile up. */
#define OTHERS_MAX 4
/* How long a request that tries once writes anew after other clients' writes. */
#define TRY_MS 1000
/* For the answer to the deletion of what did not get its lock. */
#define UNDO_MS 300

/* The steps of a conversion, in the document of the lease's root. */
typedef enum step {
  MARK,   /* exclusive, for those who come */
  FINISH, /* exclusive, as no other lease shares it any more: with a new token */
  SHARE   /* shared */
} step;

typedef struct taking {
  hl__memcached_session *session;
  const hl_request *request;
  hl_grant *grant;
  hl__memcached_buffer live; /* the liveness item's value */
  char key[HL__MEMCACHED_KEY_MAX];
  uint64_t home;
  int64_t expiry;   /* of the lease, s */
  bool lives;       /* the item may be there */
  bool converts;    /* it is granted */
  int64_t heard;    /* when that was written last; ms */
  int64_t end;      /* until when it is written anew where others are sooner; hl__now_ms */
  int64_t patience; /* answers are awaited until then; hl__now_ms */
  uint64_t token;
  bool last; /* of enter_once: the root is the request's last one */
  step step; /* of convert_once */
} taking;

/* Until when an answer is awaited. */
static int64_t answer_by(const taking *self) {
  return hl__within_ms(HL__MEMCACHED_ANSWER_MS, self->patience);
}

static uint32_t draw(hl__memcached_session *session) {
  uint32_t x = session->random | 1; /* xorshift, Marsaglia */
  x ^= x << 13;
  x ^= x >> 17;
  x ^= x << 5;
  return session->random = x;
}

/* --------------------------------------------------------- who is in the way */

typedef struct sample {
  size_t entries[BLOCKERS_MAX + OTHERS_MAX];
  size_t n;
} sample;

static bool present_already(const sample *self, size_t i) {
  for (size_t k = 0; k < self->n; k++)
    if (self->entries[k] == i) return true;
  return false;
}

/* Chooses the entries before ours; behind it only granted ones, as only an upgrade makes those
   conflict. An upgrade waits for granted ones alone. */
static void blockers_choose(const taking *self, const hl__memcached_document *document, size_t own,
                            sample *chosen) {
  const hl_request *request = self->request;
  for (size_t i = 0; i < document->n && chosen->n < BLOCKERS_MAX; i++) {
    hl__memcached_entry *entry = &document->entries[i];
    bool waits = !entry->granted && (i > own || self->converts);
    if (entry->dead || i == own || waits) continue;
    if (memcmp(entry->id, request->lease->former, sizeof entry->id) == 0 ||
        hl__memcached_is_gone(self->session, entry))
      entry->dead = true;
    else if (hl__memcached_conflict(document, entry, request->rows, request->n))
      chosen->entries[chosen->n++] = i;
  }
}

static void others_choose(const taking *self, const hl__memcached_document *document, size_t own,
                          sample *chosen) {
  size_t start = document->n ? draw(self->session) % document->n : 0;
  for (size_t i = 0; i < document->n && i < OTHERS_MAX; i++) {
    size_t at = (start + i) % document->n;
    if (at != own && !document->entries[at].dead && !present_already(chosen, at))
      chosen->entries[chosen->n++] = at;
  }
}

/* Marks the entries that do not live as dead. */
static int sample_check(const taking *self, hl__memcached_document *document, const sample *chosen,
                        hl_error *error) {
  hl__memcached_session *session = self->session;
  int64_t deadline = answer_by(self);
  hl__memcached_link *links[BLOCKERS_MAX + OTHERS_MAX];
  int status = HL_OK;
  for (size_t i = 0; i < chosen->n && status == HL_OK; i++) {
    const hl__memcached_entry *entry = &document->entries[chosen->entries[i]];
    char key[HL__MEMCACHED_KEY_MAX];
    status = hl__memcached_link_of(session, entry->home, deadline, &links[i], error);
    if (status) return status;
    hl__memcached_addf(&links[i]->out, "mg %s\r\n",
                       hl__memcached_live_key(session, entry->id, entry->holder, key));
  }
  for (size_t i = 0; i < chosen->n && status == HL_OK; i++) {
    bool present;
    status = hl__memcached_presence(session, links[i], deadline, &present, error);
    if (status == HL_OK && !present) document->entries[chosen->entries[i]].dead = true;
  }
  return status;
}

/* The first before `own` that conflicts and lives; SIZE_MAX: none. */
static int blocker_find(const taking *self, hl__memcached_document *document, size_t own,
                        size_t *blocker, hl_error *error) {
  *blocker = SIZE_MAX;
  for (bool first = true;; first = false) {
    sample chosen = {.n = 0};
    blockers_choose(self, document, own, &chosen);
    size_t n = chosen.n;
    /* A trip is made for those who are in the way, or where the dead may pile up. */
    if (first && !self->converts && (n > 0 || document->n > OTHERS_MAX))
      others_choose(self, document, own, &chosen);
    if (chosen.n == 0) return HL_OK;
    int status = sample_check(self, document, &chosen, error);
    if (status) return status;
    for (size_t i = 0; i < n; i++) {
      if (document->entries[chosen.entries[i]].dead) continue;
      *blocker = chosen.entries[i];
      return HL_OK;
    }
    if (n == 0) return HL_OK;
  }
}

/* ----------------------------------------------------------------- writing */

static void live_put(taking *self, hl__memcached_link *link, int64_t expiry) {
  hl__memcached_put(link, "set", self->key, expiry, NULL, &self->live);
  self->heard = hl__now_ms();
  self->lives = true;
}

static int live_answer(const taking *self, hl__memcached_link *link, int64_t deadline,
                       hl_error *error) {
  const char *line;
  int status = hl__memcached_line(self->session, link, deadline, &line, error);
  if (status || strcmp(line, "STORED") == 0) return status;
  return hl__error(error, HL_ESTORE, "memcached does not store: %.60s", line);
}

/* Writes the liveness item, then the document. HL__AGAIN: another client has written the document
   meanwhile. */
static int submit(taking *self, const hl__memcached_document *document, int64_t expiry,
                  hl_error *error) {
  hl__memcached_link *link, *home;
  int64_t deadline = answer_by(self);
  int status = hl__memcached_link_of(self->session, document->root, deadline, &link, error);
  if (status == HL_OK)
    status = hl__memcached_link_of(self->session, self->home, deadline, &home, error);
  if (status) return status;
  self->grant->sent_ms = hl__boot_ms();
  live_put(self, home, expiry);
  /* On two servers: the one is there before the other says so. */
  if (home != link) status = live_answer(self, home, deadline, error);
  if (status) return status;
  status = hl__memcached_document_put(self->session, link, document, error);
  if (status == HL_OK && home == link) status = live_answer(self, home, deadline, error);
  if (status == HL_ESTORE && home == link) /* the other's answer comes, too */
    (void)hl__memcached_document_written(self->session, link, deadline, NULL);
  return status ? status : hl__memcached_document_written(self->session, link, deadline, error);
}

/* ----------------------------------------------------------------- waiting */

/* Looks once at the blocker; keeps our own waiter alive, where it is not granted. */
static int peek(taking *self, const hl__memcached_entry *blocker, bool *present, hl_error *error) {
  hl__memcached_session *session = self->session;
  hl__memcached_link *link, *home;
  char key[HL__MEMCACHED_KEY_MAX];
  int64_t deadline = answer_by(self);
  int status = hl__memcached_link_of(session, blocker->home, deadline, &link, error);
  if (status == HL_OK) status = hl__memcached_link_of(session, self->home, deadline, &home, error);
  if (status) return status;
  bool touches = !self->converts && hl__now_ms() - self->heard >= WAIT_MS;
  if (touches) live_put(self, home, WAIT_S);
  hl__memcached_addf(&link->out, "mg %s\r\n",
                     hl__memcached_live_key(session, blocker->id, blocker->holder, key));
  if (touches) status = live_answer(self, home, deadline, error);
  if (status) return status;
  return hl__memcached_presence(session, link, deadline, present, error);
}

/* Waits until the blocker is gone; for a while only, where it may be downgraded. */
static int await(taking *self, const hl__memcached_entry *blocker, bool downgrades,
                 hl_error *error) {
  const hl_request *request = self->request;
  uint32_t longest = blocker->granted ? PAUSE_MS : QUEUED_MS, pause = 1;
  for (;;) {
    bool present;
    int64_t until = hl__now_ms() + 1 + draw(self->session) % pause;
    if (request->deadline < until) until = request->deadline;
    if (hl__memcached_sleep(self->session, until) == HL_CANCELLED)
      return hl__error(error, HL_CANCELLED, "the wait was cancelled");
    bool over = hl__left_ms(request->deadline) == 0;
    int status = peek(self, blocker, &present, error);
    if (status || !present) return status;
    if (over) return hl__error(error, HL_TIMEOUT, "the lock is not free");
    if (downgrades && pause >= longest) return HL_OK;
    if (pause < longest) pause += pause / 2 + 1;
  }
}

/* ----------------------------------------------------------------- one root */

static int token_begin(taking *self, hl__memcached_document *document, hl__memcached_link *link,
                       hl_error *error) {
  if (!document->found) {
    int status = hl__memcached_token(self->session, link, answer_by(self), &document->token, error);
    if (status) return status;
  }
  if (document->token < self->token) document->token = self->token;
  document->token++;
  return HL_OK;
}

static size_t own_find(const taking *self, const hl__memcached_document *document) {
  const hl__memcached_entry *entry =
      hl__memcached_document_find(document, self->request->lease->id, self->request->lease->holder);
  return entry ? (size_t)(entry - document->entries) : document->n;
}

/* Appends ours where it is missing. */
static int own_make(const taking *self, hl__memcached_document *document, size_t own,
                    hl__memcached_entry **entry, hl_error *error) {
  *entry = own < document->n
               ? &document->entries[own]
               : hl__memcached_document_add(document, self->request->lease, self->request->rows,
                                            self->request->n, self->home);
  return *entry ? HL_OK : hl__error_memory(error);
}

/* One round. HL_OK: granted. */
static int enter_once(taking *self, hl__memcached_link *link, hl__memcached_document *document,
                      hl_error *error) {
  const hl_request *request = self->request;
  hl__memcached_entry *entry;
  size_t own = own_find(self, document), blocker;
  int status = blocker_find(self, document, own, &blocker, error);
  if (status) return status;
  if (blocker == SIZE_MAX) {
    status = token_begin(self, document, link, error);
    if (status == HL_OK) status = own_make(self, document, own, &entry, error);
    if (status) return status;
    entry->granted = true;
    entry->token = document->token;
    status = submit(self, document, self->last ? self->expiry : WAIT_S, error);
    if (status == HL_OK) self->token = document->token;
    return status;
  }
  if (request->try_once || hl__left_ms(request->deadline) == 0)
    return hl__error(error, HL_TIMEOUT, "the lock is not free");
  if (own == document->n) {
    status = own_make(self, document, own, &entry, error);
    if (status == HL_OK) status = submit(self, document, WAIT_S, error);
    if (status) return status;
  }
  status = await(self, &document->entries[blocker],
                 hl__memcached_has_updates(document, &document->entries[blocker]), error);
  return status ? status : HL__AGAIN;
}

/* Another client has written the document. HL_OK: it may be tried again. */
static int again(taking *self, uint32_t tries, hl_error *error) {
  if (self->session->interruptible && atomic_load(&self->session->wakeup.interrupted))
    return hl__error(error, HL_CANCELLED, "the wait was cancelled");
  if (hl__left_ms(self->end) == 0)
    return hl__error(error, HL_TIMEOUT, "the lock is not free, or too many write below its root");
  /* Many write the same document: apart from each other, in the end one gets through. */
  if (tries > 2) {
    int64_t until = hl__now_ms() + draw(self->session) % (tries < 10 ? tries : 10);
    (void)hl__memcached_sleep(self->session, until < self->end ? until : self->end);
  }
  return HL_OK;
}

/* Later grants below that root have greater tokens than one of several roots. */
static int token_raise_once(taking *self, hl__memcached_link *link,
                            hl__memcached_document *document, hl_error *error) {
  size_t own = own_find(self, document);
  if (own == document->n)
    return hl__error(error, HL_ECONNECTION, "the server has forgotten what it has granted");
  document->entries[own].token = self->token;
  if (document->token < self->token) document->token = self->token;
  return hl__memcached_document_write(self->session, link, answer_by(self), document, error);
}

/* Reads the document of that root, and does with it what `once` does, until that is not
   HL__AGAIN. */
static int at_root(taking *self, uint64_t root,
                   int (*once)(taking *, hl__memcached_link *, hl__memcached_document *,
                               hl_error *),
                   hl_error *error) {
  for (uint32_t tries = 0;; tries++) {
    hl__memcached_link *link;
    hl__memcached_document document;
    int status =
        hl__memcached_document_get(self->session, root, answer_by(self), &link, &document, error);
    if (status) return status;
    status = once(self, link, &document, error);
    hl__memcached_document_dispose(&document);
    if (status != HL__AGAIN) return status;
    status = again(self, tries, error);
    if (status) return status;
  }
}

/* ----------------------------------------------------------------- all of it */

static int enter_all(taking *self, hl_error *error) {
  const hl_row *rows = self->request->rows;
  size_t n = hl__roots(&rows, self->request->n);
  int status = HL_OK;
  for (size_t i = 0; i < n && status == HL_OK; i++) {
    self->last = i + 1 == n;
    status = at_root(self, rows[i].bucket, enter_once, error);
  }
  for (size_t i = 0; i + 1 < n && status == HL_OK; i++)
    status = at_root(self, rows[i].bucket, token_raise_once, error);
  return status;
}

/* Without its liveness item, whatever a document has of it counts for nothing. */
static int undo(const taking *self, int status, hl_error *error) {
  hl__memcached_link *link;
  hl_error reason;
  int64_t deadline = hl__now_ms() + UNDO_MS;
  int undone = hl__memcached_link_of(self->session, self->home, deadline, &link, &reason);
  if (undone == HL_OK) {
    hl__memcached_addf(&link->out, "delete %s\r\n", self->key);
    undone = hl__memcached_flush(link, &reason);
    link->outstanding++;
  }
  /* The core, or a quorum, may try once more under the same name. */
  if (undone == HL_OK && (status == HL_TIMEOUT || status == HL_CANCELLED))
    undone = hl__memcached_settle(self->session, deadline, &reason);
  return undone ? hl__error(error, HL_ECONNECTION, "%s", reason.message) : status;
}

static int refuse(const hl_request *request, hl_error *error) {
  if (request->lease) return HL_OK;
  return hl__error(error, HL_EUNSUPPORTED, "Memcached has only leases");
}

int hl__memcached_take(hl_session *base, const hl_request *request, hl_grant *grant,
                       hl_error *error) {
  hl__memcached_session *session = hl__memcached_session_of(base);
  hl__memcached_record record;
  taking self = {.session = session, .request = request, .grant = grant};
  int status = refuse(request, error);
  if (status == HL_OK) status = hl__memcached_expiry(request->lease->ttl, &self.expiry, error);
  if (status) return status;
  self.patience = hl__answer_by(request->deadline);
  self.end = request->try_once ? self.patience : request->deadline;
  const hl_row *roots = request->rows;
  (void)hl__roots(&roots, request->n);
  self.home = grant->place = roots->bucket;
  grant->sent_ms = 0;
  hl__memcached_record_of(session, request, &record);
  hl__memcached_record_write(&record, &self.live);
  (void)hl__memcached_live_key(session, request->lease->id, request->lease->holder, self.key);
  session->interruptible = true;
  status = enter_all(&self, error);
  session->interruptible = false;
  grant->token = self.token;
  if (status && status != HL_ECONNECTION && self.lives) status = undo(&self, status, error);
  if (status && status != HL_ECONNECTION) grant->sent_ms = 0;
  free(self.live.data);
  return status; /* settle forgets a late interruption */
}

/* ------------------------------------------------------------- converting */

/* Writes the request's rows of the entry in that mode. HL__AGAIN: another client has written the
   document meanwhile. */
static int mode_write(const taking *self, hl__memcached_link *link,
                      hl__memcached_document *document, size_t own, hl_mode mode, hl_error *error) {
  const hl_request *request = self->request;
  for (size_t i = 0; i < request->n; i++) {
    hl_row *row = hl__memcached_row_of(document, &document->entries[own], &request->rows[i]);
    if (!row) return hl__error(error, HL_ELOST, "the lease locks something else");
    row->mode = (uint8_t)mode;
  }
  self->grant->sent_ms = hl__boot_ms();
  return hl__memcached_document_write(self->session, link, answer_by(self), document, error);
}

/* Whether the liveness item is there still: then no client has struck the lease out, nor will. */
static int alive_check(const taking *self, hl_error *error) {
  hl__memcached_link *link;
  bool present;
  int64_t deadline = answer_by(self);
  int status = hl__memcached_link_of(self->session, self->home, deadline, &link, error);
  if (status) return status;
  hl__memcached_addf(&link->out, "mg %s\r\n", self->key);
  status = hl__memcached_presence(self->session, link, deadline, &present, error);
  if (status || present) return status;
  return hl__error(error, HL_ELOST, "the lease is over");
}

/* One round. HL_OK: the step is done. HL__AGAIN. */
static int convert_once(taking *self, hl__memcached_link *link, hl__memcached_document *document,
                        hl_error *error) {
  const hl_request *request = self->request;
  size_t own = own_find(self, document), sharer = SIZE_MAX;
  if (own == document->n || !document->entries[own].granted)
    return hl__error(error, HL_ELOST, "Memcached has no such lease any more");
  const hl_row *roots = &document->rows[document->entries[own].first];
  if (hl__roots(&roots, document->entries[own].n) > 1)
    return hl__error(error, HL_EUNSUPPORTED,
                     "Memcached upgrades no lease of several users (roots): "
                     "take one lease for each of them");
  int status = HL_OK;
  if (self->step == FINISH || (self->step == MARK && request->try_once))
    status = blocker_find(self, document, own, &sharer, error);
  if (status) return status;
  if (sharer != SIZE_MAX) {
    if (request->try_once || hl__left_ms(request->deadline) == 0)
      return hl__error(error, HL_TIMEOUT, "the lock is not free");
    status = await(self, &document->entries[sharer], true, error);
    return status ? status : HL__AGAIN;
  }
  if (self->step == FINISH) {
    document->entries[own].token = ++document->token;
    self->token = document->token;
  }
  hl_mode mode = self->step == SHARE ? HL_SHARED : HL_EXCLUSIVE;
  status = mode_write(self, link, document, own, mode, error);
  return status || self->step == MARK ? status : alive_check(self, error);
}

static int convert(taking *self, step next, int64_t end, hl_error *error) {
  self->step = next;
  self->end = end;
  return at_root(self, self->home, convert_once, error);
}

int hl__memcached_convert(hl__memcached_session *session, const hl_request *request,
                          hl_grant *grant, hl_error *error) {
  taking self = {.session = session,
                 .request = request,
                 .grant = grant,
                 .home = request->lease->place,
                 .patience = hl__answer_by(request->deadline),
                 .converts = true};
  int64_t answer = hl__now_ms() + TRY_MS, end = request->try_once ? answer : request->deadline;
  (void)hl__memcached_live_key(session, request->lease->id, request->lease->holder, self.key);
  if (!request->upgrade) return convert(&self, SHARE, answer, error);
  session->interruptible = true;
  int status = convert(&self, MARK, end, error);
  if (status == HL_OK) status = convert(&self, FINISH, end, error);
  session->interruptible = false;
  if (status == HL_OK) grant->token = self.token;
  if (status != HL_TIMEOUT && status != HL_CANCELLED) return status;
  self.patience = hl__answer_by(request->deadline);
  hl_error reason;
  int undone = convert(&self, SHARE, hl__now_ms() + TRY_MS, &reason);
  if (undone == HL_OK) return status;
  if (error) *error = reason;
  return undone == HL_TIMEOUT ? hl__error(error, HL_ECONNECTION, "%s", reason.message) : undone;
}
