/*
 * leases.c - the operations on leases (hl_lease_ops), except taking, which is in take.c.
 *
 * Presence of the liveness item decides. A refresh looks into the document, too: where the
 * server has forgotten it (an eviction), another request may have been let in.
 */
#include "memcached_store.h"

#include "mode.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The account of a revocation is kept so long beyond the lease's time; s. */
#define REVOKED_S 3600
/* Liveness items read in one batch. */
#define BATCH 64

/* ------------------------------------------------------------------ losses */

/* What is asked about one lease. */
typedef struct inquest {
  hl__memcached_session *session;
  const hl_lease_terms *terms;
  int64_t deadline;
  hl__memcached_link *link; /* to the server of the lease's place */
} inquest;

static int begin(inquest *self, uint64_t place, hl_error *error) {
  return hl__memcached_link_of(self->session, place, self->deadline, &self->link, error);
}

/* Reads the document of that root, and leaves the link with it. */
static int document_get(inquest *self, uint64_t root, hl__memcached_document *document,
                        hl_error *error) {
  return hl__memcached_document_get(self->session, root, self->deadline, &self->link, document,
                                    error);
}

/* HL__AGAIN: another client has written it meanwhile. */
static int document_put(const inquest *self, hl__memcached_document *document, hl_error *error) {
  return hl__memcached_document_write(self->session, self->link, self->deadline, document, error);
}

/* There is no liveness item, or none that counts. */
static int lost(const inquest *self, hl_error *error) {
  char key[HL__MEMCACHED_KEY_MAX];
  hl__memcached_item item;
  hl__memcached_addf(&self->link->out, "gets %s\r\n",
                     hl__memcached_id_key(self->session, "revoked", self->terms->id, key));
  int status = hl__memcached_gets(self->session, self->link, self->deadline, &item, error);
  if (status) return status;
  if (item.found) {
    const char *end = item.data + strlen(item.data);
    const hl__record record = {.by = item.data,
                               .reason = end < item.data + item.size ? end + 1 : ""};
    (void)hl__record_refuse(HL__RECORD_REVOKED, &record, error);
  } else {
    (void)hl__error(error, HL_ELOST,
                    "the lease has ended, or was imported, and belongs to that "
                    "handle now; or Memcached has forgotten it");
  }
  free(item.data);
  return HL_ELOST;
}

static int garbage(const uint8_t id[16], hl_error *error) {
  return hl__error(error, HL_ESTORE,
                   "what Memcached has of lease %02x%02x%02x%02x... was made by "
                   "another version of hierlock, or is damaged",
                   id[0], id[1], id[2], id[3]);
}

/* HL_OK: the document has the lease, granted. */
static int granted_check(const hl__memcached_document *document, const hl_lease_terms *terms,
                         hl_error *error) {
  const hl__memcached_entry *entry =
      hl__memcached_document_find(document, terms->id, terms->holder);
  if (entry && entry->granted) return HL_OK;
  return hl__error(error, HL_ELOST,
                   "Memcached has forgotten the lease: an item was evicted, or "
                   "the server restarted");
}

/* Checks the documents of a lease's other roots, too. */
static int others_check(const inquest *self, const hl__memcached_document *document,
                        hl_error *error) {
  const hl__memcached_entry *entry =
      hl__memcached_document_find(document, self->terms->id, self->terms->holder);
  const hl_row *rows = &document->rows[entry->first];
  size_t roots = hl__roots(&rows, entry->n);
  int status = HL_OK;
  for (size_t i = 0; i < roots && status == HL_OK; i++) {
    inquest there = *self;
    hl__memcached_document other;
    if (rows[i].bucket == document->root) continue;
    status = document_get(&there, rows[i].bucket, &other, error);
    if (status) return status;
    status = granted_check(&other, self->terms, error);
    hl__memcached_document_dispose(&other);
  }
  return status;
}

/* Reads a lease at the servers: its item, and its place in its documents. HL_ELOST: a part is
   missing; the item, if there is one, is deleted. The caller frees item->data. */
static int lease_read(const inquest *self, bool meta, hl__memcached_item *item, hl_error *error) {
  hl__memcached_session *session = self->session;
  hl__memcached_link *link = self->link;
  const hl_lease_terms *terms = self->terms;
  hl__memcached_document document;
  char key[HL__MEMCACHED_KEY_MAX];
  hl__memcached_addf(&link->out, meta ? "mg %s t v\r\n" : "gets %s\r\n",
                     hl__memcached_live_key(session, terms->id, terms->holder, key));
  hl__memcached_document_ask(session, link, terms->place);
  int status = meta ? hl__memcached_meta(session, link, self->deadline, item, error)
                    : hl__memcached_gets(session, link, self->deadline, item, error);
  if (status) return status;
  status =
      hl__memcached_document_read(session, link, terms->place, self->deadline, &document, error);
  if (status) return status;
  if (!item->found) {
    status = lost(self, error);
  } else {
    status = granted_check(&document, terms, error);
    if (status == HL_OK) status = others_check(self, &document, error);
    if (status == HL_ELOST &&
        hl__memcached_live_delete(session, link, terms->id, terms->holder, NULL) == HL_OK)
      link->outstanding++;
  }
  hl__memcached_document_dispose(&document);
  return status;
}

/* ------------------------------------------------------------ one lease */

/* One try. HL__AGAIN: another client has written the item meanwhile. */
static int refresh_once(const inquest *self, int64_t expiry, int64_t *sent_ms, hl_error *error) {
  hl__memcached_link *link = self->link;
  const hl_lease_terms *terms = self->terms;
  hl__memcached_item item = {0};
  hl__memcached_record record;
  hl__memcached_buffer value = {0};
  char key[HL__MEMCACHED_KEY_MAX];
  const char *line;
  int status = lease_read(self, false, &item, error);
  bool known = status == HL_OK && hl__memcached_record_read(&item, &record);
  free(item.data);
  if (status) return status;
  if (!known) return garbage(terms->id, error);
  if (record.turn >= terms->turn)
    return hl__error(error, HL_ECONNECTION, "the server has read a later refresh before");
  record.turn = terms->turn;
  hl__memcached_record_write(&record, &value);
  (void)hl__memcached_live_key(self->session, terms->id, terms->holder, key);
  *sent_ms = hl__boot_ms();
  hl__memcached_put(link, "cas", key, expiry, &item.cas, &value);
  free(value.data);
  status = hl__memcached_line(self->session, link, self->deadline, &line, error);
  if (status) return status;
  if (strcmp(line, "STORED") == 0) return HL_OK;
  if (strcmp(line, "EXISTS") == 0) return HL__AGAIN;
  return lost(self, error);
}

static int lease_refresh(hl_session *base, const hl_lease_terms *terms, int64_t ttl,
                         int64_t deadline, int64_t *sent_ms, hl_error *error) {
  inquest self = {hl__memcached_session_of(base), terms, deadline, NULL};
  int64_t expiry;
  int status = hl__memcached_expiry(ttl, &expiry, error);
  if (status == HL_OK) status = begin(&self, terms->place, error);
  if (status) return status;
  do status = refresh_once(&self, expiry, sent_ms, error);
  while (status == HL__AGAIN);
  return status;
}

/* The time that the item has left, at least. */
static int64_t left_ms(const hl__memcached_item *item) {
  int64_t seconds = item->left - HL__MEMCACHED_EARLY;
  return seconds > 0 ? seconds * 1000 : 1;
}

static int lease_inspect(hl_session *base, const hl_lease_terms *terms, int64_t deadline,
                         int64_t *left, hl_error *error) {
  inquest self = {hl__memcached_session_of(base), terms, deadline, NULL};
  hl__memcached_item item = {0};
  int status = begin(&self, terms->place, error);
  if (status == HL_OK) status = lease_read(&self, true, &item, error);
  if (status == HL_OK) *left = left_ms(&item);
  free(item.data);
  return status;
}

static int lease_drop(hl_session *base, const hl_lease_terms *terms, bool confirm, int64_t deadline,
                      hl_error *error) {
  hl__memcached_session *session = hl__memcached_session_of(base);
  hl__memcached_link *link =
      &session->links[session->store->slots[terms->place % HL__MEMCACHED_SLOTS]];
  inquest self = {session, terms, deadline, NULL};
  hl__memcached_document document;
  const char *line;
  if (!confirm && link->fd < 0) /* it must not block */
    return hl__error(error, HL_ECONNECTION, "there is no connection");
  int status = begin(&self, terms->place, error);
  if (status) return status;
  if (!confirm) {
    status = hl__memcached_live_delete(session, link, terms->id, terms->holder, error);
    if (status == HL_OK) link->outstanding++;
    return status;
  }
  /* Ask before the deletion: after it a waiter may strike the lease out at once. So waiters of
     this manager hear of the deletion once the document has been read. */
  hl__memcached_document_ask(session, link, terms->place);
  hl__memcached_live_delete_add(session, link, terms->id, terms->holder);
  status = hl__memcached_document_read(session, link, terms->place, deadline, &document, error);
  hl__memcached_gone_note(session, terms->id, terms->holder);
  if (status) {
    if (link->fd >= 0) link->outstanding++;
    return status;
  }
  status = hl__memcached_line(session, link, deadline, &line, error);
  if (status) {
    hl__memcached_document_dispose(&document);
    return status;
  }
  bool deleted = strcmp(line, "DELETED") == 0;
  const hl__memcached_entry *entry = hl__memcached_document_find(&document, terms->id, NULL);
  bool elsewhere = entry && !hl__memcached_document_find(&document, terms->id, terms->holder);
  hl_error reason = {0};
  status = deleted ? granted_check(&document, terms, &reason) : lost(&self, &reason);
  if (terms->again && !deleted && !elsewhere && status == HL_ELOST && !*reason.revoked_by)
    status = HL__ABSENT;
  if (error) *error = reason;
  hl__memcached_document_dispose(&document);
  return status;
}

/* Strikes the lease out of a root's document; imports: gives it to the terms' holder there. Writes
   the document that it strikes the lease out of in any case: so a write that was sent before, and
   may be read late, comes to nothing. */
static int entry_change(inquest there, uint64_t root, bool imports, hl_error *error) {
  int status;
  do {
    hl__memcached_document document;
    status = document_get(&there, root, &document, error);
    if (status) return status;
    hl__memcached_entry *entry = hl__memcached_document_find(&document, there.terms->id, NULL);
    if (imports && !entry)
      status = hl__error(error, HL_ELOST, "Memcached has forgotten the lease");
    else if (!document.found)
      status =
          hl__memcached_token(there.session, there.link, there.deadline, &document.token, error);
    if (entry && imports)
      memcpy(entry->holder, there.terms->holder, sizeof entry->holder);
    else if (entry)
      entry->dead = true;
    if (status == HL_OK) status = document_put(&there, &document, error);
    hl__memcached_document_dispose(&document);
  } while (status == HL__AGAIN);
  return status;
}

static int lease_recall(hl_session *base, const hl_lease_terms *terms, int64_t deadline,
                        hl_error *error) {
  inquest self = {hl__memcached_session_of(base), terms, deadline, NULL};
  hl__memcached_document document;
  const char *line;
  int status = document_get(&self, terms->place, &document, error);
  if (status) return status;
  /* Of several roots the first, the lease's place, was written first. */
  const hl__memcached_entry *entry = hl__memcached_document_find(&document, terms->id, NULL);
  if (entry) {
    const hl_row *rows = &document.rows[entry->first];
    size_t roots = hl__roots(&rows, entry->n);
    for (size_t i = 0; i < roots && status == HL_OK; i++)
      if (rows[i].bucket != terms->place) status = entry_change(self, rows[i].bucket, false, error);
  }
  hl__memcached_document_dispose(&document);
  if (status == HL_OK) status = entry_change(self, terms->place, false, error);
  if (status == HL_OK)
    status = hl__memcached_live_delete(self.session, self.link, terms->id, terms->holder, error);
  if (status == HL_OK) status = hl__memcached_line(self.session, self.link, deadline, &line, error);
  return status;
}

static int lease_convert(hl_session *base, const hl_request *request, hl_grant *grant,
                         hl_error *error) {
  hl__memcached_session *session = hl__memcached_session_of(base);
  inquest self = {session, request->lease, hl__now_ms() + HL__MEMCACHED_ANSWER_MS, NULL};
  int status = hl__memcached_convert(session, request, grant, error);
  grant->place = request->lease->place;
  if (status != HL_ELOST) return status;
  status = begin(&self, grant->place, error);
  return status ? status : lost(&self, error);
}

/* ----------------------------------------------------------------- importing */

static bool rows_are(const hl__memcached_document *document, const hl__memcached_entry *entry,
                     const hl_request *request) {
  const hl_row *rows = &document->rows[entry->first];
  if (entry->n != request->n) return false;
  for (size_t i = 0; i < entry->n; i++)
    if (rows[i].level != request->rows[i].level || rows[i].bucket != request->rows[i].bucket ||
        rows[i].mode != request->rows[i].mode)
      return false;
  return true;
}

static void live_set(const inquest *self, hl__memcached_record *record, int64_t expiry) {
  const hl_store_config *config = self->session->store->config;
  hl__memcached_buffer value = {0};
  char key[HL__MEMCACHED_KEY_MAX];
  hl_holder *holder = &record->holder;
  record->turn = 0;
  holder->pid = config->pid;
  (void)snprintf(holder->application, sizeof holder->application, "%s", config->application);
  (void)snprintf(holder->host, sizeof holder->host, "%s", config->host);
  hl__memcached_record_write(record, &value);
  (void)hl__memcached_live_key(self->session, self->terms->id, self->terms->holder, key);
  hl__memcached_put(self->link, "set", key, expiry, NULL, &value);
  free(value.data);
}

/* The entry of the document is the request's, and its holder lives and knows the secret. HL_OK:
   *record. */
static int adopt_check(const inquest *self, const hl__memcached_document *document,
                       const hl__memcached_entry *entry, const hl_request *request,
                       hl__memcached_record *record, hl_error *error) {
  hl__memcached_item item;
  char key[HL__MEMCACHED_KEY_MAX];
  if (!entry || !entry->granted) return lost(self, error);
  hl__memcached_addf(&self->link->out, "gets %s\r\n",
                     hl__memcached_live_key(self->session, entry->id, entry->holder, key));
  int status = hl__memcached_gets(self->session, self->link, self->deadline, &item, error);
  if (status) return status;
  bool known = item.found && hl__memcached_record_read(&item, record);
  free(item.data);
  if (!item.found) return lost(self, error);
  if (!known) return garbage(self->terms->id, error);
  hl__record seen = {HL__RECORD_FITS, .import = true, .forgets = true};
  seen.secret = memcmp(record->secret, self->terms->secret, sizeof record->secret) == 0;
  seen.rows = rows_are(document, entry, request);
  return hl__record_check(&seen, error);
}

/* One try. HL__AGAIN: another client has written the document meanwhile. */
static int adopt_once(inquest *self, const hl_request *request, int64_t expiry, hl_grant *grant,
                      hl_error *error) {
  hl__memcached_session *session = self->session;
  hl__memcached_document document;
  hl__memcached_record record;
  const char *line;
  int status = document_get(self, grant->place, &document, error);
  if (status) return status;
  hl__memcached_link *link = self->link;
  hl__memcached_entry *entry = hl__memcached_document_find(&document, self->terms->id, NULL);
  status = adopt_check(self, &document, entry, request, &record, error);
  /* The lease may be a later import's. */
  if (status == HL_OK && atomic_load(&session->wakeup.interrupted))
    status = hl__error(error, HL_CANCELLED, "the import was interrupted");
  if (status == HL_OK && !hl__replaces(self->terms, entry->holder, grant))
    status = hl__record_refuse(HL__RECORD_IMPORTED, &(hl__record){HL__RECORD_FITS}, error);
  if (status == HL_OK) {
    memcpy(entry->holder, self->terms->holder, sizeof entry->holder);
    grant->token = entry->token;
    grant->sent_ms = hl__boot_ms();
    live_set(self, &record, expiry);
    status = hl__memcached_document_put(session, link, &document, error);
  }
  hl__memcached_document_dispose(&document);
  if (status) return status;
  status = hl__memcached_line(session, link, self->deadline, &line, error);
  if (status == HL_OK)
    status = hl__memcached_document_written(session, link, self->deadline, error);
  const hl_row *rows = request->rows;
  size_t roots = hl__roots(&rows, request->n);
  for (size_t i = 1; i < roots && status == HL_OK; i++)
    status = entry_change(*self, rows[i].bucket, true, error);
  /* A quorum has the holder adopt its own lease, to refresh or to heal it: its item stays. */
  if (status || memcmp(grant->replaced, self->terms->holder, 16) == 0) return status;
  status = hl__memcached_live_delete(session, link, self->terms->id, grant->replaced, error);
  if (status == HL_OK) status = hl__memcached_line(session, link, self->deadline, &line, error);
  return status;
}

static int lease_adopt(hl_session *base, const hl_request *request, hl_grant *grant,
                       hl_error *error) {
  inquest self = {hl__memcached_session_of(base), request->lease,
                  hl__late_answer_by(request->deadline), NULL};
  int64_t expiry;
  const hl_row *roots = request->rows;
  (void)hl__roots(&roots, request->n);
  grant->place = roots->bucket;
  int status = hl__memcached_expiry(self.terms->ttl, &expiry, error);
  if (status) return status;
  do status = adopt_once(&self, request, expiry, grant, error);
  while (status == HL__AGAIN);
  return status;
}

/* ------------------------------------------------------------ many leases */

typedef struct inquiry {
  hl__memcached_session *session;
  const hl_lease_filter *filter;
  bool waits; /* those who wait, too */
  bool revokes;
  hl_holder_fn fn;
  void *context;
  int64_t deadline;
  uint64_t count;
} inquiry;

/* An id does not show its root; so the root of an id is noted before a caller sees the id. */
static uint64_t id_place(const uint8_t id[16]) {
  uint64_t place = 0;
  for (int i = 0; i < 8; i++) place = place << 8 | id[i];
  return place;
}

/* Stores a note on the server of that place, and frees it. The answer comes with the answers to
   others. */
static int note_put(const inquiry *self, uint64_t place, const char *key, int64_t expiry,
                    hl__memcached_buffer *note, hl_error *error) {
  hl__memcached_link *link;
  int status = hl__memcached_link_of(self->session, place, self->deadline, &link, error);
  if (status == HL_OK) {
    hl__memcached_put(link, "set", key, expiry, NULL, note);
    status = hl__memcached_flush(link, error);
  }
  if (status == HL_OK) link->outstanding++;
  free(note->data);
  return status;
}

static int id_note(const inquiry *self, const hl__memcached_entry *entry, hl_error *error) {
  hl__memcached_buffer note = {0};
  char key[HL__MEMCACHED_KEY_MAX];
  hl__memcached_addf(&note, "%016llx", (unsigned long long)entry->home);
  (void)hl__memcached_id_key(self->session, "id", entry->id, key);
  return note_put(self, id_place(entry->id), key, HL__MEMCACHED_EXPIRY_MAX, &note, error);
}

static int id_find(const inquiry *self, uint64_t *root, bool *found, hl_error *error) {
  hl__memcached_link *link;
  hl__memcached_item item;
  char key[HL__MEMCACHED_KEY_MAX], *end;
  int status = hl__memcached_link_of(self->session, id_place(self->filter->id), self->deadline,
                                     &link, error);
  if (status) return status;
  hl__memcached_addf(&link->out, "gets %s\r\n",
                     hl__memcached_id_key(self->session, "id", self->filter->id, key));
  status = hl__memcached_gets(self->session, link, self->deadline, &item, error);
  if (status) return status;
  *found = item.found;
  *root = item.found ? strtoull(item.data, &end, 16) : 0;
  if (item.found && *end) status = garbage(self->filter->id, error);
  free(item.data);
  return status;
}

static bool is_asked_for(const inquiry *self, const hl__memcached_document *document,
                         const hl__memcached_entry *entry) {
  if (!entry->granted && !self->waits) return false;
  if (self->filter->id && memcmp(self->filter->id, entry->id, sizeof entry->id) != 0) return false;
  if (!self->filter->n) return true;
  if (!hl__memcached_conflict(document, entry, self->filter->rows, self->filter->n)) return false;
  /* A lease with several roots is shown once: at the first root that the caller asks for. */
  const hl_row *rows = self->filter->rows;
  size_t roots = hl__roots(&rows, self->filter->n);
  for (size_t i = 0; i < roots; i++) {
    if (rows[i].bucket == document->root) break;
    if (hl__memcached_row_of(document, entry, &rows[i])) return false;
  }
  return true;
}

/* The liveness item has the mode that the request asked for. For an upgrade, the document has
   the present one. */
static void holder_fill(const hl__memcached_document *document, const hl__memcached_entry *entry,
                        const hl__memcached_item *item, hl_holder *holder) {
  holder->kind = HL_LEASE;
  if (holder->mode == HL_UPDATE && hl__memcached_is_upgraded(document, entry))
    holder->mode = HL_EXCLUSIVE;
  holder->waiting = !entry->granted;
  if (entry->granted) holder->remaining_ms = left_ms(item);
  (void)hl__hex(holder->id, entry->id, sizeof entry->id);
}

/* Writes the account of a revocation before the lease ends. */
static int revocation_put(const inquiry *self, const hl__memcached_entry *entry, int64_t left,
                          hl_error *error) {
  hl__memcached_buffer account = {0};
  char key[HL__MEMCACHED_KEY_MAX];
  int64_t expiry = left + REVOKED_S;
  if (left < 0 || expiry > HL__MEMCACHED_EXPIRY_MAX) expiry = HL__MEMCACHED_EXPIRY_MAX;
  hl__memcached_add(&account, self->filter->by, strlen(self->filter->by) + 1);
  hl__memcached_add(&account, self->filter->reason, strlen(self->filter->reason));
  (void)hl__memcached_id_key(self->session, "revoked", entry->id, key);
  return note_put(self, entry->home, key, expiry, &account, error);
}

/* Handles the item of a lease that the inquiry asks for. */
static int meet(inquiry *self, const hl__memcached_document *document, hl__memcached_entry *entry,
                const hl__memcached_item *item, hl_error *error) {
  hl__memcached_record record;
  if (!item->found) return HL_OK;
  if (!hl__memcached_record_read(item, &record)) return garbage(entry->id, error);
  if (self->filter->owner && strcmp(self->filter->owner, record.holder.owner) != 0) return HL_OK;
  if (self->revokes) {
    entry->dead = true;
    return revocation_put(self, entry, item->left, error);
  }
  holder_fill(document, entry, item, &record.holder);
  self->fn(self->context, &record.holder);
  return entry->granted ? id_note(self, entry, error) : HL_OK;
}

/* So many entries from there on; *next: where to go on. */
static int meet_batch(inquiry *self, hl__memcached_document *document, size_t *next,
                      hl_error *error) {
  hl__memcached_entry *asked[BATCH];
  hl__memcached_link *links[BATCH];
  size_t n = 0;
  int status = HL_OK;
  for (; *next < document->n && n < BATCH && status == HL_OK; ++*next) {
    hl__memcached_entry *entry = &document->entries[*next];
    char key[HL__MEMCACHED_KEY_MAX];
    if (!is_asked_for(self, document, entry)) continue;
    asked[n] = entry;
    status = hl__memcached_link_of(self->session, entry->home, self->deadline, &links[n], error);
    if (status) return status;
    hl__memcached_addf(&links[n]->out, "mg %s t v\r\n",
                       hl__memcached_live_key(self->session, entry->id, entry->holder, key));
    n++;
  }
  /* All answers are read before anything else is sent. */
  hl__memcached_item items[BATCH];
  size_t have = 0;
  while (have < n && status == HL_OK) {
    status = hl__memcached_meta(self->session, links[have], self->deadline, &items[have], error);
    if (status == HL_OK) have++;
  }
  for (size_t i = 0; i < have; i++) {
    if (status == HL_OK) status = meet(self, document, asked[i], &items[i], error);
    free(items[i].data);
  }
  return status;
}

/* Ends the leases that were struck out of the document. */
static int end_struck(inquiry *self, const hl__memcached_document *document, hl_error *error) {
  for (size_t i = 0; i < document->n; i++) {
    const hl__memcached_entry *entry = &document->entries[i];
    hl__memcached_link *link;
    const char *line;
    if (!entry->dead) continue;
    int status = hl__memcached_link_of(self->session, entry->home, self->deadline, &link, error);
    if (status == HL_OK)
      status = hl__memcached_live_delete(self->session, link, entry->id, entry->holder, error);
    if (status == HL_OK)
      status = hl__memcached_line(self->session, link, self->deadline, &line, error);
    if (status) return status;
    self->count += strcmp(line, "DELETED") == 0;
  }
  return HL_OK;
}

/* One try. HL__AGAIN: another client has written the document meanwhile. */
static int inquire_once(inquiry *self, uint64_t root, hl_error *error) {
  hl__memcached_link *link;
  hl__memcached_document document;
  int status =
      hl__memcached_document_get(self->session, root, self->deadline, &link, &document, error);
  for (size_t next = 0; status == HL_OK && next < document.n;)
    status = meet_batch(self, &document, &next, error);
  bool strikes = false;
  for (size_t i = 0; status == HL_OK && i < document.n; i++)
    strikes = strikes || document.entries[i].dead;
  if (strikes) {
    status = hl__memcached_document_write(self->session, link, self->deadline, &document, error);
    if (status == HL_OK) status = end_struck(self, &document, error);
  }
  hl__memcached_document_dispose(&document);
  return status;
}

static int inquire_root(inquiry *self, uint64_t root, hl_error *error) {
  int status;
  do status = inquire_once(self, root, error);
  while (status == HL__AGAIN);
  return status;
}

static int inquire(inquiry *self, hl_error *error) {
  const hl_row *rows = self->filter->rows;
  size_t roots = hl__roots(&rows, self->filter->n);
  int status = HL_OK;
  if (self->filter->n == 0) {
    uint64_t root = 0;
    bool found = false;
    if (!self->filter->id)
      return hl__error(error, HL_EUNSUPPORTED,
                       "Memcached cannot list its leases: name a target, or the id of one that was "
                       "listed; Redis, PostgreSQL, MySQL, MariaDB and the embedded store can");
    status = id_find(self, &root, &found, error);
    if (status || found) return status ? status : inquire_root(self, root, error);
  }
  for (size_t i = 0; i < roots && status == HL_OK; i++)
    status = inquire_root(self, rows[i].bucket, error);
  return status;
}

static int lease_list(hl_session *base, const hl_lease_filter *filter, hl_holder_fn fn,
                      void *context, int64_t deadline, hl_error *error) {
  inquiry self = {.session = hl__memcached_session_of(base),
                  .filter = filter,
                  .fn = fn,
                  .context = context,
                  .deadline = deadline};
  int status = inquire(&self, error);
  /* Note the ids before a caller sees them. */
  if (status == HL_OK) status = hl__memcached_settle(self.session, deadline, error);
  return status == HL_TIMEOUT ? hl__error_as(error, HL_ECONNECTION) : status;
}

static int lease_revoke(hl_session *base, const hl_lease_filter *filter, int64_t deadline,
                        uint64_t *count, hl_error *error) {
  inquiry self = {.session = hl__memcached_session_of(base),
                  .filter = filter,
                  .revokes = true,
                  .deadline = deadline};
  int status = inquire(&self, error);
  *count = self.count;
  return status;
}

int hl__memcached_holders(hl_session *base, const hl_lease_filter *filter, hl_holder_fn fn,
                          void *context, int64_t deadline, hl_error *error) {
  inquiry self = {.session = hl__memcached_session_of(base),
                  .filter = filter,
                  .waits = true,
                  .fn = fn,
                  .context = context,
                  .deadline = deadline};
  return inquire(&self, error);
}

const hl_lease_ops hl__memcached_leases = {.refresh = lease_refresh,
                                           .inspect = lease_inspect,
                                           .drop = lease_drop,
                                           .recall = lease_recall,
                                           .convert = lease_convert,
                                           .adopt = lease_adopt,
                                           .list = lease_list,
                                           .revoke = lease_revoke};
