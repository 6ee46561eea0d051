/*
 * tag.c - the tag by which observers know a session: written and read. The session keeps it in its
 * user variable @hierlock, which others see in performance_schema:
 *
 *     2 SEP since SEP application SEP host SEP pid SEP mode SEP path SEP label
 *     SEP rows
 *
 * SEP is the byte 0x1F, and rows are such as "0.3142546s,2.185732x,". A "w" behind them says that
 * the session waits for a lease, and has only locked the rows meanwhile.
 */
#include "mysql_store.h"

#include <stdlib.h>
#include <string.h>

#define SEPARATOR "\x1f"
#define FIELDS 9
#define LABEL_MAX 128
#define ROW_MAX 16     /* "15.2147483647x," */
#define NUMBERS_MAX 64 /* time, pid, mode and separators */

size_t hl__mysql_tag_room(const hl__mysql_session *session, const hl_request *request) {
  const hl_store_config *config = session->store->config;
  size_t room = NUMBERS_MAX + strlen(config->application) + strlen(config->host) +
                strlen(request->path) + LABEL_MAX;
  if (request->recorded_n > (HL__TAG_MAX - room) / ROW_MAX) return HL__TAG_MAX;
  return room + request->recorded_n * ROW_MAX;
}

void hl__mysql_tag(hl__mysql_session *session, const hl_request *request) {
  const hl_store_config *config = session->store->config;
  char *at = stpcpy(session->tag, "2" SEPARATOR);
  at = hl__put_number(at, (uint64_t)hl__unix_ms());
  *at++ = SEPARATOR[0];
  at = stpcpy(at, config->application);
  *at++ = SEPARATOR[0];
  at = stpcpy(at, config->host);
  *at++ = SEPARATOR[0];
  at = hl__put_number(at, (uint64_t)config->pid);
  *at++ = SEPARATOR[0];
  *at++ = hl__mode_letter(request->mode);
  *at++ = SEPARATOR[0];
  at = stpcpy(at, request->path);
  *at++ = SEPARATOR[0];
  at += hl__escape(at, LABEL_MAX, request->label, request->label_size);
  *at++ = SEPARATOR[0];
  const char *end = session->tag + session->tag_capacity - ROW_MAX;
  for (size_t i = 0; i < request->recorded_n && at <= end; i++) {
    at = hl__put_number(at, request->recorded[i].level);
    *at++ = '.';
    at = hl__put_number(at, request->recorded[i].bucket);
    *at++ = hl__mode_letter((hl_mode)request->recorded[i].mode);
    *at++ = ',';
  }
  session->tag_size = (unsigned long)(at - session->tag);
}

void hl__mysql_put_tag(hl__text *t, const hl__mysql_session *session, bool waiting) {
  hl__text_hex(t, session->tag, session->tag_size);
  if (waiting) hl__text_put(t, "77");
}

bool hl__mysql_tag_read(char *text, hl_holder *holder, char **rows) {
  char *fields[FIELDS];
  for (int i = 0; i < FIELDS; i++) {
    if (!text) return false;
    fields[i] = text;
    text = strchr(text, SEPARATOR[0]);
    if (text) *text++ = '\0';
  }
  if (strcmp(fields[0], "2") != 0) return false;
  memset(holder, 0, sizeof *holder);
  holder->since_ms = strtoll(fields[1], NULL, 10);
  hl__text_take(holder->application, sizeof holder->application, fields[2]);
  hl__text_take(holder->host, sizeof holder->host, fields[3]);
  holder->pid = strtoll(fields[4], NULL, 10);
  holder->mode = hl__mode_of_letter(fields[5][0]);
  hl__text_take(holder->path, sizeof holder->path, fields[6]);
  hl__text_take(holder->label, sizeof holder->label, fields[7]);
  *rows = fields[8];
  size_t n = strlen(*rows);
  holder->waiting = n > 0 && (*rows)[n - 1] == 'w';
  return true;
}
