/*
 * dsn.h - data source names. dsn.c says which store a DSN asks for; that store
 * takes it apart (hl_store_ops.parse), with what is here for the parts that
 * URLs have in common.
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
   NUL-terminated, or are static, where a store says by another word what the DSN
   does; NULL where the DSN does not say. */
typedef struct hl_dsn {
  const char *store; /* "mysql", "file" ...: static */
  const char *user;
  const char *password;
  const char *host;
  unsigned port; /* 0 where the DSN does not say */
  const char *socket;
  const char *database;
  const char *path;         /* of file:; the manager makes it absolute */
  const char *interoperate; /* hl_config.interoperate, by the form of the DSN; static */
  hl_dsn_param params[HL_DSN_PARAMS_MAX];
  unsigned param_count;
  char *text;  /* the copy, and as much room behind it; malloc'ed */
  size_t size; /* of both */
} hl_dsn;

/* How a store takes its DSNs apart, in place: `text` is what stands behind the
   scheme, and the whole of a DSN without one (which those are, dsn.c says).
   Fills in dsn, whose `store` is set. Any thread. HL_OK; HL_EDSN, the message
   names the part, and shows nothing that may be of a password. */
typedef int (*hl_dsn_fn)(char *text, hl_dsn *dsn, hl_error *error);

/* Takes text apart, of which hl_dsn_store has said which store's `parse` it is.
   HL_OK, HL_EDSN, HL_ENOMEM. hl_dsn_dispose frees; it is safe on a zeroed
   structure and after any outcome of hl_dsn_parse. */
int hl_dsn_parse(const char *text, hl_dsn_fn parse, hl_dsn *dsn, hl_error *error);
void hl_dsn_dispose(hl_dsn *dsn);
/* The value of a parameter, NULL where it is absent. */
const char *hl_dsn_param_get(const hl_dsn *dsn, const char *name);

/* ---- for the stores; each in place, HL_OK or HL_EDSN */

/* Splits *text at the first character of `set`: ends the part there, moves
   *text behind it, and returns the part; NULL when none of `set` is found. */
char *hl__dsn_cut(char **text, const char *set);
/* Percent signs; `what` names the part in messages. NULL stays. */
int hl__dsn_decode(char *part, const char *what, hl_error *error);
int hl__dsn_port(const char *text, unsigned *port, hl_error *error);
/* host, host:port, [ipv6] or [ipv6]:port, into dsn->host and dsn->port. */
int hl__dsn_host(char *text, hl_dsn *dsn, hl_error *error);
/* name=value&..., decoded; but not encoded: only what has a percent sign in its
   value. NULL: none. */
int hl__dsn_params(char *text, bool encoded, hl_dsn *dsn, hl_error *error);
int hl__dsn_param_add(hl_dsn *dsn, const char *name, const char *value, hl_error *error);
/* Behind "mysql://": [user[:password]@][host][/database][?params]; host is taken
   apart by `host`, as hl__dsn_host does. */
int hl__dsn_url(char *text, hl_dsn_fn host, hl_dsn *dsn, hl_error *error);
/* Behind "file:": a directory, into dsn->path. */
int hl__dsn_path(char *text, hl_dsn *dsn, hl_error *error);

/* ---- what a store makes of the parameters */

typedef enum hl__dsn_kind {
  HL__DSN_TEXT,    /* const char *: as it stands */
  HL__DSN_PREFIX,  /* const char *: a part of keys, of patterns and of privileges */
  HL__DSN_SECONDS, /* int64_t: ms, up to `most` seconds, and rounded up */
  HL__DSN_NUMBER,  /* unsigned: 0 to `most` */
  HL__DSN_WORD,    /* an enum: one of `words` */
  HL__DSN_OTHER    /* somebody else's: nothing is made of it */
} hl__dsn_kind;

typedef struct hl__dsn_word {
  const char *word;
  unsigned value;
} hl__dsn_word;

/* A parameter that a store knows; a list of them ends with a name of NULL. */
typedef struct hl__dsn_known {
  const char *name;
  hl__dsn_kind kind;
  size_t offset; /* in the store's structure, of what it becomes */
  unsigned most;
  bool or_zero;              /* seconds may be 0 */
  const hl__dsn_word *words; /* the last has NULL for a word */
} hl__dsn_known;

#define HL__DSN_DAY 86400u /* seconds: the longest connect_timeout */

/* Puts each parameter of the DSN into the structure at `store`. Any thread. HL_OK or HL_EDSN. */
int hl__dsn_store(const hl_dsn *dsn, const hl__dsn_known *known, void *store, hl_error *error);
/* One value; `what` names it in messages. */
int hl__dsn_seconds(const char *value, const char *what, unsigned most, bool or_zero, int64_t *ms,
                    hl_error *error);
int hl__dsn_number(const char *value, const char *what, unsigned most, unsigned *number,
                   hl_error *error);

#endif
