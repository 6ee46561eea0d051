/*
 * record.h - judges what a store has found of a lease: may the caller have it, and if not, why?
 * Each store compares in its own way, in its own step. What follows from the comparison is decided,
 * and said, here alone. Any thread.
 */
#ifndef HIERLOCK_RECORD_H
#define HIERLOCK_RECORD_H

#include "error.h"
#include "store.h"

/* A record beside the terms of a call. What a call does not compare is true or false as in
   HL__RECORD_FITS. */
typedef struct hl__record {
  bool there;   /* a record of that id; else nothing but `again` and `forgets` counts */
  bool import;  /* the call is an import: it knows the secret, and no holder */
  bool secret;  /* the call's secret is the record's */
  bool holder;  /* the record's holder is the caller's, or one whom an import may replace */
  bool rows;    /* the record locks the rows that an import's text says */
  bool revoked; /* by whom, why: as people may see it; NULL: not known */
  const char *by, *reason;
  bool behind;  /* the caller knows of an upgrade that the record lacks: readers may have come in */
  bool late;    /* a later refresh was carried out before this one */
  bool again;   /* an earlier call, sent and not answered, may have deleted the record */
  bool forgets; /* the store may have lost the record by itself */
} hl__record;
#define HL__RECORD_FITS .there = true, .secret = true, .holder = true, .rows = true

typedef enum hl__verdict {
  HL__RECORD_OK,
  HL__RECORD_GONE, /* or it never was, as far as the caller may know */
  HL__RECORD_IMPORTED,
  HL__RECORD_REVOKED,
  HL__RECORD_MISMATCH,
  HL__RECORD_LATE
} hl__verdict;

hl__verdict hl__record_judge(const hl__record *record);
/* Fills in *error for a verdict. HL_OK; HL_ELOST, HL_EMISMATCH; HL_ECONNECTION (late: the lease
   stands, and the core asks again); HL__ABSENT (gone, and `again`). */
int hl__record_refuse(hl__verdict verdict, const hl__record *record, hl_error *error);
/* Judges, and refuses. */
static inline int hl__record_check(const hl__record *record, hl_error *error) {
  return hl__record_refuse(hl__record_judge(record), record, error);
}

#endif
