/*
 * document.c - the document of a root: the holders and waiters in its tree, in the order in
 * which they came. Numbers are big-endian:
 *
 *     "HLD1"  last token: 8  entries: 4
 *     for each: id: 16  holder: 16  token: 8  home: 8  granted: 1  rows: 4
 *         for each, in locking order: level: 1  mode: 1  bucket: 8
 *
 * Programs of before there were update rows refuse a document with one: for them its levels are too
 * many.
 *
 * Any client may write to the server, so every field is checked before it is believed.
 */
#include "memcached_store.h"

#include "mode.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAGIC "HLD1"
#define ENTRY_SIZE 53u
#define ROW_SIZE 10u

/* ----------------------------------------------------------------- reading */

typedef struct reader {
  const uint8_t *at, *end;
  bool failed;
} reader;

static uint64_t number(reader *self, size_t size) {
  uint64_t value = 0;
  if ((size_t)(self->end - self->at) < size) {
    self->failed = true;
    return 0;
  }
  for (size_t i = 0; i < size; i++) value = value << 8 | *self->at++;
  return value;
}

static void bytes(reader *self, uint8_t *out, size_t size) {
  if ((size_t)(self->end - self->at) < size) {
    self->failed = true;
    return;
  }
  memcpy(out, self->at, size);
  self->at += size;
}

static void read_rows(reader *self, hl__memcached_document *document, hl__memcached_entry *entry) {
  entry->first = document->row_count;
  for (size_t i = 0; i < entry->n && !self->failed; i++) {
    hl_row *row = &document->rows[document->row_count++];
    *row = (hl_row){0};
    row->level = (uint8_t)number(self, 1);
    row->mode = (uint8_t)number(self, 1);
    row->bucket = number(self, 8);
    if ((row->level & ~HL_LEVEL_UPDATE) >= HL_LEVELS_MAX ||
        (row->mode != HL_SHARED && row->mode != HL_EXCLUSIVE) ||
        (i > 0 && hl__row_compare(row - 1, row) >= 0))
      self->failed = true;
  }
  const hl_row *roots = &document->rows[entry->first];
  if (!self->failed && hl__roots(&roots, entry->n) == 0)
    self->failed = true; /* each has its root */
}

/* HL_OK, HL_ENOMEM, HL_ESTORE. */
static int decode(hl__memcached_document *document, const hl__memcached_item *item,
                  hl_error *error) {
  reader self = {(const uint8_t *)item->data, (const uint8_t *)item->data + item->size, false};
  uint8_t magic[4] = {0};
  bytes(&self, magic, sizeof magic);
  document->token = number(&self, 8);
  uint64_t n = number(&self, 4);
  if (memcmp(magic, MAGIC, sizeof magic) != 0 || n > item->size / ENTRY_SIZE) self.failed = true;
  if (!self.failed) {
    /* Room for as many as there can be, and for one more. */
    document->entries = calloc((size_t)n + 1, sizeof *document->entries);
    document->rows = calloc(item->size / ROW_SIZE + 1, sizeof *document->rows);
    if (!document->entries || !document->rows) return hl__error_memory(error);
  }
  for (uint64_t i = 0; i < n && !self.failed; i++) {
    hl__memcached_entry *entry = &document->entries[document->n++];
    bytes(&self, entry->id, sizeof entry->id);
    bytes(&self, entry->holder, sizeof entry->holder);
    entry->token = number(&self, 8);
    entry->home = number(&self, 8);
    entry->granted = number(&self, 1) == 1;
    entry->n = (size_t)number(&self, 4);
    if (entry->n == 0 || entry->n > (size_t)(self.end - self.at) / ROW_SIZE)
      self.failed = true;
    else
      read_rows(&self, document, entry);
  }
  if (!self.failed && self.at == self.end) return HL_OK;
  if (memcmp(magic, MAGIC, 3) == 0) /* rows of a kind that is not known, perhaps */
    return hl__error(error, HL_ESTORE,
                     "what Memcached has of root %016llx was made by another version of hierlock, "
                     "or is damaged: see Upgrading in docs/operations.md",
                     (unsigned long long)document->root);
  return hl__error(error, HL_ESTORE,
                   "what Memcached has of root %016llx is not of hierlock's "
                   "making; delete it, and all locks below that root are gone",
                   (unsigned long long)document->root);
}

void hl__memcached_document_dispose(hl__memcached_document *document) {
  free(document->entries);
  free(document->rows);
  document->entries = NULL;
  document->rows = NULL;
  document->n = document->row_count = 0;
}

static void key_make(const hl__memcached_session *session, uint64_t root,
                     char out[HL__MEMCACHED_KEY_MAX]) {
  (void)snprintf(out, HL__MEMCACHED_KEY_MAX, "%s:root:%016llx", session->store->prefix,
                 (unsigned long long)root);
}

void hl__memcached_document_ask(const hl__memcached_session *session, hl__memcached_link *link,
                                uint64_t root) {
  char key[HL__MEMCACHED_KEY_MAX];
  key_make(session, root, key);
  hl__memcached_addf(&link->out, "gets %s\r\n", key);
}

int hl__memcached_document_read(hl__memcached_session *session, hl__memcached_link *link,
                                uint64_t root, int64_t deadline, hl__memcached_document *document,
                                hl_error *error) {
  hl__memcached_item item;
  *document = (hl__memcached_document){.root = root};
  int status = hl__memcached_gets(session, link, deadline, &item, error);
  if (status == HL_OK && item.found) {
    document->found = true;
    document->cas = item.cas;
    status = decode(document, &item, error);
  }
  free(item.data);
  if (status) hl__memcached_document_dispose(document);
  return status;
}

int hl__memcached_document_get(hl__memcached_session *session, uint64_t root, int64_t deadline,
                               hl__memcached_link **link, hl__memcached_document *document,
                               hl_error *error) {
  *document = (hl__memcached_document){.root = root};
  int status = hl__memcached_link_of(session, root, deadline, link, error);
  if (status) return status;
  hl__memcached_document_ask(session, *link, root);
  return hl__memcached_document_read(session, *link, root, deadline, document, error);
}

/* ----------------------------------------------------------------- writing */

static void put(hl__memcached_buffer *out, uint64_t value, size_t size) {
  uint8_t text[8];
  for (size_t i = 0; i < size; i++) text[i] = (uint8_t)(value >> 8 * (size - 1 - i));
  hl__memcached_add(out, text, size);
}

static void put_entry(hl__memcached_buffer *out, const hl__memcached_document *document,
                      const hl__memcached_entry *entry) {
  hl__memcached_add(out, entry->id, sizeof entry->id);
  hl__memcached_add(out, entry->holder, sizeof entry->holder);
  put(out, entry->token, 8);
  put(out, entry->home, 8);
  put(out, entry->granted, 1);
  put(out, entry->n, 4);
  for (size_t i = 0; i < entry->n; i++) {
    const hl_row *row = &document->rows[entry->first + i];
    put(out, row->level, 1);
    put(out, row->mode, 1);
    put(out, row->bucket, 8);
  }
}

int hl__memcached_document_put(const hl__memcached_session *session, hl__memcached_link *link,
                               const hl__memcached_document *document, hl_error *error) {
  char key[HL__MEMCACHED_KEY_MAX];
  hl__memcached_buffer value = {0};
  uint64_t alive = 0;
  for (size_t i = 0; i < document->n; i++) alive += !document->entries[i].dead;
  hl__memcached_add(&value, MAGIC, 4);
  put(&value, document->token, 8);
  put(&value, alive, 4);
  for (size_t i = 0; i < document->n; i++)
    if (!document->entries[i].dead) put_entry(&value, document, &document->entries[i]);
  key_make(session, document->root, key);
  if (document->found)
    hl__memcached_put(link, "cas", key, 0, &document->cas, &value);
  else
    hl__memcached_put(link, "add", key, 0, NULL, &value);
  free(value.data);
  return hl__memcached_flush(link, error);
}

int hl__memcached_document_written(hl__memcached_session *session, hl__memcached_link *link,
                                   int64_t deadline, hl_error *error) {
  const char *line;
  int status = hl__memcached_line(session, link, deadline, &line, error);
  return status || strcmp(line, "STORED") == 0 ? status : HL__AGAIN;
}

int hl__memcached_document_write(hl__memcached_session *session, hl__memcached_link *link,
                                 int64_t deadline, const hl__memcached_document *document,
                                 hl_error *error) {
  int status = hl__memcached_document_put(session, link, document, error);
  return status ? status : hl__memcached_document_written(session, link, deadline, error);
}

hl__memcached_entry *hl__memcached_document_add(hl__memcached_document *document,
                                                const hl_lease_terms *terms, const hl_row *rows,
                                                size_t n, uint64_t home) {
  hl__memcached_entry *entries = realloc(document->entries, (document->n + 1) * sizeof *entries);
  if (!entries) return NULL;
  document->entries = entries;
  hl_row *all = realloc(document->rows, (document->row_count + n) * sizeof *all);
  if (!all) return NULL;
  document->rows = all;
  hl__memcached_entry *entry = &entries[document->n++];
  *entry = (hl__memcached_entry){.home = home, .first = document->row_count, .n = n};
  memcpy(entry->id, terms->id, sizeof entry->id);
  memcpy(entry->holder, terms->holder, sizeof entry->holder);
  memcpy(all + document->row_count, rows, n * sizeof *all);
  document->row_count += n;
  return entry;
}

/* ------------------------------------------------------------------- looking */

hl__memcached_entry *hl__memcached_document_find(const hl__memcached_document *document,
                                                 const uint8_t id[16], const uint8_t *holder) {
  for (size_t i = 0; i < document->n; i++) {
    hl__memcached_entry *entry = &document->entries[i];
    if (!entry->dead && memcmp(entry->id, id, sizeof entry->id) == 0 &&
        (!holder || memcmp(entry->holder, holder, sizeof entry->holder) == 0))
      return entry;
  }
  return NULL;
}

/* Both in locking order. */
bool hl__memcached_conflict(const hl__memcached_document *document,
                            const hl__memcached_entry *entry, const hl_row *rows, size_t n) {
  const hl_row *theirs = &document->rows[entry->first];
  for (size_t i = 0, k = 0; i < n && k < entry->n;) {
    int which = hl__row_compare(&rows[i], &theirs[k]);
    if (which == 0 && (rows[i].mode == HL_EXCLUSIVE || theirs[k].mode == HL_EXCLUSIVE)) return true;
    if (which <= 0) i++;
    if (which >= 0) k++;
  }
  return false;
}

bool hl__memcached_has_updates(const hl__memcached_document *document,
                               const hl__memcached_entry *entry) {
  return hl__update_rows(&document->rows[entry->first], entry->n) > 0;
}

hl_row *hl__memcached_row_of(const hl__memcached_document *document,
                             const hl__memcached_entry *entry, const hl_row *row) {
  for (size_t i = 0; i < entry->n; i++)
    if (hl__row_compare(&document->rows[entry->first + i], row) == 0)
      return &document->rows[entry->first + i];
  return NULL;
}

bool hl__memcached_is_upgraded(const hl__memcached_document *document,
                               const hl__memcached_entry *entry) {
  hl_row row = document->rows[entry->first];
  if (!hl__is_update_row(&row)) return false;
  row.level &= (uint8_t)~HL_LEVEL_UPDATE;
  const hl_row *own = hl__memcached_row_of(document, entry, &row);
  return own && own->mode == HL_EXCLUSIVE;
}
