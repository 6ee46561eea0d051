/*
 * tag.c - writes and reads the comment before a statement, which tells observers who waits or
 * holds.
 *
 *     (slash)*hierlock1|since|pid|mode|application|host|label|path*(slash)
 *
 * The comment is ASCII: all other bytes, and characters with a meaning here, are written as %XX.
 * The mode is "s", "u" or "x"; then "w" while the session has its rows and waits for a lease.
 */
#include "mode.h"
#include "postgresql_store.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BEGINNING "/*hierlock1|"
#define FIELDS 7
/* The most bytes of the encoded fields; with numbers and separators, less than HL__PG_TAG_MAX. */
#define NAME_MAX_BYTES 120
#define LABEL_MAX_BYTES 220
#define PATH_MAX_BYTES 400

/* -------------------------------------------------------------- the tag */

static bool is_plain(unsigned char c) {
  return c >= ' ' && c < 0x7F && c != '%' && c != '|' && c != '*';
}

/* Encodes by hand, as each acquisition needs it. Writes at most `size` bytes, and only whole
   characters. */
static char *put_field(char *at, size_t size, const char *text) {
  static const char digits[] = "0123456789ABCDEF";
  char *end = at + size, *whole = at;
  for (; *text; text++) {
    unsigned char c = (unsigned char)*text;
    if ((c & 0xC0) != 0x80) whole = at; /* else it continues a character */
    if (at + (is_plain(c) ? 1 : 3) > end) return whole;
    if (is_plain(c)) {
      *at++ = (char)c;
    } else {
      *at++ = '%';
      *at++ = digits[c >> 4];
      *at++ = digits[c & 15];
    }
  }
  return at;
}

void hl__pg_tag(const hl__pg_session *session, const hl_request *request,
                char tag[HL__PG_TAG_MAX]) {
  const hl_store_config *config = session->store->config;
  char label[128];
  (void)hl__escape(label, sizeof label, request->label, request->label_size);
  char *at = stpcpy(tag, BEGINNING);
  at = hl__put_number(at, (uint64_t)hl__unix_ms());
  *at++ = '|';
  at = hl__put_number(at, (uint64_t)config->pid);
  *at++ = '|';
  *at++ = hl__mode_letter(request->mode);
  *at++ = '|';
  at = put_field(at, NAME_MAX_BYTES, config->application);
  *at++ = '|';
  at = put_field(at, NAME_MAX_BYTES, config->host);
  *at++ = '|';
  at = put_field(at, LABEL_MAX_BYTES, label);
  *at++ = '|';
  at = put_field(at, PATH_MAX_BYTES, request->path);
  (void)stpcpy(at, "*/");
}

void hl__pg_tag_waits(char tag[HL__PG_TAG_MAX]) {
  char *mode = strchr(strchr(tag + strlen(BEGINNING), '|') + 1, '|') + 1;
  size_t rest = strlen(mode + 1) + 1;
  if (mode + 2 + rest > tag + HL__PG_TAG_MAX) return;
  memmove(mode + 2, mode + 1, rest);
  mode[1] = 'w';
}

static int hex_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

/* Takes a field, decoding it in place, and escapes it: any client may write anything there. */
static void field_take(char *out, size_t size, char *field) {
  char *end = field;
  for (const char *in = field; *in; in++) {
    int high = *in == '%' ? hex_value(in[1]) : -1;
    int low = high < 0 ? -1 : hex_value(in[2]);
    if (low < 0) {
      *end++ = *in;
    } else {
      *end++ = (char)(unsigned char)(high * 16 + low);
      in += 2;
    }
  }
  (void)hl__escape(out, size, field, (size_t)(end - field));
}

bool hl__pg_tag_read(const char *query, hl_holder *holder) {
  char text[2048], *fields[FIELDS];
  if (!query || strncmp(query, BEGINNING, strlen(BEGINNING)) != 0) return false;
  (void)snprintf(text, sizeof text, "%s", query + strlen(BEGINNING));
  char *end = strstr(text, "*/"), *rest = text;
  if (end) *end = '\0';
  for (int i = 0; i < FIELDS; i++) {
    fields[i] = rest ? strsep(&rest, "|") : text + strlen(text);
  }
  memset(holder, 0, sizeof *holder);
  holder->since_ms = strtoll(fields[0], NULL, 10);
  holder->pid = strtoll(fields[1], NULL, 10);
  holder->mode = hl__mode_of_letter(*fields[2]);
  holder->waiting = *fields[2] && fields[2][1] == 'w';
  field_take(holder->application, sizeof holder->application, fields[3]);
  field_take(holder->host, sizeof holder->host, fields[4]);
  field_take(holder->label, sizeof holder->label, fields[5]);
  field_take(holder->path, sizeof holder->path, fields[6]);
  return true;
}
