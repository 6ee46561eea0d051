/*
 * record.c - the liveness item of a lease: it is there as long as the lease is unbroken, or its
 * waiter alive. The item's value has what people want to know of the lease, and what a refresh
 * and an import need: `turn` and the secret. All fields are "size:bytes", in the order of
 * record_write.
 */
#include "memcached_store.h"

#include "mode.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VERSION "HLL1"

static void copy(char *out, size_t size, const char *text) {
  (void)snprintf(out, size, "%s", text);
}

void hl__memcached_record_of(const hl__memcached_session *session, const hl_request *request,
                             hl__memcached_record *record) {
  const hl_store_config *config = session->store->config;
  *record = (hl__memcached_record){
      .holder = {.pid = config->pid,
                 .mode = request->mode,
                 .since_ms = hl__unix_ms()}}; /* for people, never compared */
  memcpy(record->secret, request->lease->secret, sizeof record->secret);
  hl_holder *holder = &record->holder;
  copy(holder->owner, sizeof holder->owner, request->lease->owner);
  copy(holder->application, sizeof holder->application, config->application);
  copy(holder->host, sizeof holder->host, config->host);
  copy(holder->path, sizeof holder->path, request->path ? request->path : "");
  (void)hl__escape(holder->label, sizeof holder->label, request->label, request->label_size);
}

static void write_bytes(hl__memcached_buffer *out, const void *data, size_t size) {
  hl__memcached_addf(out, "%zu:", size);
  hl__memcached_add(out, data, size);
}

static void write_text(hl__memcached_buffer *out, const char *text) {
  write_bytes(out, text, strlen(text));
}

static void write_number(hl__memcached_buffer *out, int64_t number) {
  char text[24];
  (void)snprintf(text, sizeof text, "%lld", (long long)number);
  write_text(out, text);
}

void hl__memcached_record_write(const hl__memcached_record *record, hl__memcached_buffer *out) {
  const hl_holder *holder = &record->holder;
  write_text(out, VERSION);
  write_number(out, (int64_t)record->turn);
  write_bytes(out, record->secret, sizeof record->secret);
  write_number(out, holder->mode);
  write_number(out, holder->pid);
  write_number(out, holder->since_ms);
  write_text(out, holder->owner);
  write_text(out, holder->application);
  write_text(out, holder->host);
  write_text(out, holder->path);
  write_text(out, holder->label);
}

typedef struct reader {
  const char *at, *end;
  bool failed;
} reader;

/* The next field. */
static const char *field(reader *self, size_t *size) {
  *size = 0;
  while (!self->failed && self->at < self->end && *self->at >= '0' && *self->at <= '9' &&
         *size < 100000)
    *size = *size * 10 + (size_t)(*self->at++ - '0');
  if (self->failed || self->at == self->end || *self->at != ':' ||
      (size_t)(self->end - self->at) - 1 < *size) {
    self->failed = true;
    *size = 0;
    return "";
  }
  const char *from = self->at + 1;
  self->at = from + *size;
  return from;
}

static void read_text(reader *self, char *out, size_t capacity) {
  size_t size;
  const char *from = field(self, &size);
  if (size >= capacity || memchr(from, '\0', size)) {
    self->failed = true;
    size = 0;
  }
  memcpy(out, from, size);
  out[size] = '\0';
}

static int64_t read_number(reader *self) {
  char text[24], *end;
  read_text(self, text, sizeof text);
  int64_t number = strtoll(text, &end, 10);
  if (!*text || *end) self->failed = true;
  return number;
}

bool hl__memcached_record_read(const hl__memcached_item *item, hl__memcached_record *record) {
  reader self = {item->data, item->data + item->size, !item->found};
  char version[8];
  size_t size;
  *record = (hl__memcached_record){0};
  hl_holder *holder = &record->holder;
  read_text(&self, version, sizeof version);
  if (strcmp(version, VERSION) != 0) return false;
  record->turn = (uint64_t)read_number(&self);
  const char *secret = field(&self, &size);
  if (size != sizeof record->secret) return false;
  memcpy(record->secret, secret, size);
  int64_t mode = read_number(&self);
  holder->mode = hl__mode_read((unsigned)mode);
  holder->pid = read_number(&self);
  holder->since_ms = read_number(&self);
  read_text(&self, holder->owner, sizeof holder->owner);
  read_text(&self, holder->application, sizeof holder->application);
  read_text(&self, holder->host, sizeof holder->host);
  read_text(&self, holder->path, sizeof holder->path);
  read_text(&self, holder->label, sizeof holder->label);
  return !self.failed && self.at == self.end;
}

/* -------------------------------------------------------------------- keys */

const char *hl__memcached_id_key(const hl__memcached_session *session, const char *kind,
                                 const uint8_t id[16], char *out) {
  int used = snprintf(out, HL__MEMCACHED_KEY_MAX, "%s:%s:", session->store->prefix, kind);
  (void)hl__hex(out + used, id, 16);
  return out;
}

const char *hl__memcached_live_key(const hl__memcached_session *session, const uint8_t id[16],
                                   const uint8_t holder[16], char *out) {
  int used = snprintf(out, HL__MEMCACHED_KEY_MAX, "%s:live:", session->store->prefix);
  (void)hl__hex(hl__hex(out + used, id, 16), holder, 16);
  return out;
}

int hl__memcached_expiry(int64_t ttl, int64_t *seconds, hl_error *error) {
  *seconds = (ttl + 999) / 1000 + HL__MEMCACHED_EARLY;
  if (*seconds <= HL__MEMCACHED_EXPIRY_MAX) return HL_OK;
  return hl__error(error, HL_EUNSUPPORTED,
                   "Memcached has no leases of more than 30 days less three seconds; MySQL, "
                   "MariaDB, PostgreSQL and the embedded store have");
}

/* ------------------------------------------------------------------- deleting */

static uint8_t *gone_place(hl__memcached_store *store, const uint8_t id[16])
    HL__REQUIRES(hl__memcached_mutex) {
  return store->gone[((unsigned)id[0] << 8 | id[1]) % HL__MEMCACHED_GONE];
}

void hl__memcached_gone_note(const hl__memcached_session *session, const uint8_t id[16],
                             const uint8_t holder[16]) {
  hl__memcached_store *store = session->store;
  hl__memcached_store_lock(store);
  uint8_t *gone = gone_place(store, id);
  memcpy(gone, id, 16);
  memcpy(gone + 16, holder, 16);
  hl__memcached_store_unlock(store);
}

void hl__memcached_live_delete_add(const hl__memcached_session *session, hl__memcached_link *link,
                                   const uint8_t id[16], const uint8_t holder[16]) {
  char key[HL__MEMCACHED_KEY_MAX];
  hl__memcached_addf(&link->out, "delete %s\r\n", hl__memcached_live_key(session, id, holder, key));
}

int hl__memcached_live_delete(hl__memcached_session *session, hl__memcached_link *link,
                              const uint8_t id[16], const uint8_t holder[16], hl_error *error) {
  hl__memcached_live_delete_add(session, link, id, holder);
  int status = hl__memcached_flush(link, error);
  if (status == HL_OK) hl__memcached_gone_note(session, id, holder);
  return status;
}

bool hl__memcached_is_gone(const hl__memcached_session *session, const hl__memcached_entry *entry) {
  hl__memcached_store *store = session->store;
  hl__memcached_store_lock(store);
  const uint8_t *gone = gone_place(store, entry->id);
  bool found = memcmp(gone, entry->id, 16) == 0 && memcmp(gone + 16, entry->holder, 16) == 0;
  hl__memcached_store_unlock(store);
  return found;
}
