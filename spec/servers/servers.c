/*
 * servers.c - common to all servers: the kind of a DSN, and statements that are filled in.
 */
#include "servers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *sql_buckets = "hierlock_soak";

const server_kind *server_kind_of(const char *dsn) {
  static const char *const others[] = {"file:", "sqlite:", "redis:", "memcached:", "quorum:"};
  for (size_t i = 0; i < sizeof others / sizeof *others; i++)
    if (strncmp(dsn, others[i], strlen(others[i])) == 0) return NULL;
  return strncmp(dsn, "postgres", 8) == 0 ? &server_postgresql : &server_mysql;
}

bool server_dsn(const server_kind *kind, const char *text, hl_dsn *dsn) {
  hl_error error;
  if (hl_dsn_parse(text, kind->store->parse, dsn, &error) == HL_OK) return true;
  (void)fprintf(stderr, "%s: %s\n", kind->name, error.message);
  return false;
}

/* out: of 1,024 bytes. */
static void fill_in(const hl_dsn *clients, unsigned seed, const char *text, char *out) {
  char number[16];
  (void)snprintf(number, sizeof number, "%u", seed);
  const struct {
    const char *name, *value;
  } names[] = {{"{database}", clients ? clients->database : NULL},
               {"{user}", clients ? clients->user : NULL},
               {"{seed}", number},
               {"{buckets}", sql_buckets}};
  enum { NAMES = sizeof names / sizeof *names };
  size_t used = 0;
  while (*text) {
    size_t which = 0, n = 1;
    const char *piece = text;
    while (which < NAMES && (!names[which].value ||
                             strncmp(text, names[which].name, strlen(names[which].name)) != 0))
      which++;
    if (which < NAMES) {
      piece = names[which].value;
      n = strlen(piece);
      text += strlen(names[which].name);
    } else {
      text++;
    }
    if (used + n >= 1024) abort();
    memcpy(out + used, piece, n);
    used += n;
  }
  out[used] = '\0';
}

bool sql_run(const server_kind *kind, sql *self, const hl_dsn *clients, const char *text) {
  char filled[1024];
  fill_in(clients, 0, text, filled);
  return kind->run(self, filled, NULL, NULL);
}

bool sql_all(const server_kind *kind, sql *self, const hl_dsn *clients, const char *const *texts) {
  for (int i = 0; i < STATEMENTS && texts[i]; i++)
    if (!sql_run(kind, self, clients, texts[i])) return false;
  return true;
}

static void number_take(void *context, const char *const *fields) {
  long long *number = context;
  if (*number < 0 && fields[0]) *number = atoll(fields[0]);
}

long long sql_number(const server_kind *kind, sql *self, const hl_dsn *clients, unsigned seed,
                     const char *text) {
  char filled[1024];
  long long number = -1;
  fill_in(clients, seed, text, filled);
  return kind->run(self, filled, number_take, &number) ? number : -1;
}
