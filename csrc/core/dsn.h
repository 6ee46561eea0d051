/*
 * dsn.h - data source names, taken apart. Says which store a DSN asks for and
 * what it gives it; what a parameter means is the store's business.
 */
#ifndef HIERLOCK_DSN_H
#define HIERLOCK_DSN_H

#include "hierlock.h"

#define HL_DSN_PARAMS_MAX 32

typedef struct hl_dsn_param {
  const char *name;
  const char *value;
} hl_dsn_param;

/* All strings point into the structure's own copy, percent-decoded and
   NUL-terminated; NULL where the DSN does not say. */
typedef struct hl_dsn {
  const char *store; /* "mysql", "file", "null": static */
  const char *user;
  const char *password;
  const char *host;
  unsigned port; /* 0 where the DSN does not say */
  const char *socket;
  const char *database;
  const char *path; /* of file:; the manager makes it absolute */
  hl_dsn_param params[HL_DSN_PARAMS_MAX];
  unsigned param_count;
  char *text; /* the copy; malloc'ed */
  size_t size;
} hl_dsn;

/* Takes text apart. HL_OK, HL_EDSN (the message names the part, and never
   shows the password), HL_ENOMEM. hl_dsn_dispose frees; it is safe on a
   zeroed structure and after any outcome of hl_dsn_parse. */
int hl_dsn_parse(const char *text, hl_dsn *dsn, hl_error *error);
void hl_dsn_dispose(hl_dsn *dsn);
/* The value of a parameter, NULL where it is absent. */
const char *hl_dsn_param_get(const hl_dsn *dsn, const char *name);

#endif
