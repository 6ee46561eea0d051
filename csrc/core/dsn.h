/*
 * dsn.h - data source names. dsn.c finds the store of a DSN. The store parses it
 * (hl_store_ops.parse) with these functions for the parts that URLs have in common.
 */
#ifndef HIERLOCK_DSN_H
#define HIERLOCK_DSN_H

#include "hierlock.h"

#define HL_DSN_PARAMS_MAX 32

typedef struct hl_dsn_param {
  const char *name;
  const char *value;
} hl_dsn_param;

/* All strings point into the structure's own copy, percent-decoded and NUL-terminated, or are
   static. NULL: the DSN does not say. */
typedef struct hl_dsn {
  const char *store; /* "mysql", "file" ...: static */
  const char *user;
  const char *password;
  const char *host;
  unsigned port; /* 0: the DSN does not say */
  const char *socket;
  const char *database;
  const char *path;         /* of file:; the manager makes it absolute */
  const char *interoperate; /* hl_config.interoperate, if the form of the DSN implies it; static */
  hl_dsn_param params[HL_DSN_PARAMS_MAX];
  unsigned param_count;
  char *text;  /* the copy, and as much room after it; from malloc */
  size_t size; /* of both */
} hl_dsn;

/* How a store parses its DSNs, in place. text: what follows the scheme, or the whole DSN if it has
   no scheme (dsn.c says when). Fills in dsn, whose `store` is set. Any thread. HL_OK; HL_EDSN: the
   message names the part, and shows nothing that may belong to a password. */
typedef int (*hl_dsn_fn)(char *text, hl_dsn *dsn, hl_error *error);

/* Parses text with `parse`, of the store that hl_dsn_store has named. HL_OK, HL_EDSN, HL_ENOMEM.
   hl_dsn_dispose frees a DSN; it is safe on a zeroed structure, and after any outcome of
   hl_dsn_parse. */
int hl_dsn_parse(const char *text, hl_dsn_fn parse, hl_dsn *dsn, hl_error *error);
void hl_dsn_dispose(hl_dsn *dsn);
/* The value of a parameter; NULL: absent. */
const char *hl_dsn_param_get(const hl_dsn *dsn, const char *name);

/* ---- for the stores; each in place, HL_OK or HL_EDSN */

/* Splits *text at the first character of `set`: ends the part there, moves *text behind it, and
   returns the part. NULL: there is no such character. */
char *hl__dsn_cut(char **text, const char *set);
/* Decodes percent signs in place; `what` names the part in messages. NULL stays NULL. */
int hl__dsn_decode(char *part, const char *what, hl_error *error);
int hl__dsn_port(const char *text, unsigned *port, hl_error *error);
/* Parses host, host:port, [ipv6] or [ipv6]:port into dsn->host and dsn->port. */
int hl__dsn_host(char *text, hl_dsn *dsn, hl_error *error);
/* Adds the parameters name=value&... to dsn, percent-decoded; with encoded false, only those with a
   percent sign in the value are decoded. text NULL: does nothing. */
int hl__dsn_params(char *text, bool encoded, hl_dsn *dsn, hl_error *error);
int hl__dsn_param_add(hl_dsn *dsn, const char *name, const char *value, hl_error *error);
/* Parses user[:password] before the '@' at `at`; NULL: there is none. Ends the text there. */
int hl__dsn_account(char *text, char *at, hl_dsn *dsn, hl_error *error);
/* Parses what follows "mysql://": [user[:password]@][host][/database][?params]. `host` parses the
   host, as hl__dsn_host does. */
int hl__dsn_url(char *text, hl_dsn_fn host, hl_dsn *dsn, hl_error *error);
/* Parses what follows "file:", or another such scheme: a path, which messages call `what`, into
   dsn->path. */
int hl__dsn_path(char *text, const char *what, hl_dsn *dsn, hl_error *error);

/* ---- parameters of the stores */

typedef enum hl__dsn_kind {
  HL__DSN_TEXT,    /* const char *: as it stands */
  HL__DSN_PREFIX,  /* const char *: part of keys, patterns and privileges */
  HL__DSN_SECONDS, /* int64_t, ms: up to `most` seconds, rounded up */
  HL__DSN_NUMBER,  /* unsigned: 0 to `most` */
  HL__DSN_WORD,    /* an enum: one of `words` */
  HL__DSN_OTHER    /* ignored here: another function reads it */
} hl__dsn_kind;

typedef struct hl__dsn_word {
  const char *word;
  unsigned value;
} hl__dsn_word;

/* A parameter that a store knows. A list of them ends with a NULL name. */
typedef struct hl__dsn_known {
  const char *name;
  hl__dsn_kind kind;
  size_t offset; /* of the value, in the store's structure */
  unsigned most;
  bool or_zero;              /* seconds may be 0 */
  const hl__dsn_word *words; /* ends with a NULL word */
} hl__dsn_known;

#define HL__DSN_DAY 86400u /* seconds: the longest connect_timeout */

/* Writes each parameter of the DSN into the structure at `store`. Any thread. HL_OK or HL_EDSN. */
int hl__dsn_store(const hl_dsn *dsn, const hl__dsn_known *known, void *store, hl_error *error);
/* Parses one value; `what` names it in messages. */
int hl__dsn_seconds(const char *value, const char *what, unsigned most, bool or_zero, int64_t *ms,
                    hl_error *error);
int hl__dsn_number(const char *value, const char *what, unsigned most, unsigned *number,
                   hl_error *error);

#endif
