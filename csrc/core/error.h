/*
 * error.h - how an hl_error is filled in, and text that may be shown to people. Free
 * of the rest of the core: a store that is a module of its own has its own copy.
 */
#ifndef HIERLOCK_ERROR_H
#define HIERLOCK_ERROR_H

#include "hierlock.h"

#if defined(__GNUC__)
#define HL__PRINTF(f, a) __attribute__((format(printf, f, a)))
#else
#define HL__PRINTF(f, a)
#endif

/* What functions within hierlock tell each other besides the public statuses. Each caller of such a
   function handles the step itself: no step reaches a program, and none has a text in an hl_error. */
enum hl__step {
  HL__ABSENT = 1000, /* what was asked for is not there, and was not to be made */
  HL__AGAIN,         /* somebody else was faster, or it is undecided: begin anew */
  HL__IN_STEPS,      /* one request cannot decide this: ask in several */
  HL__UNFREE,        /* a row was not free at this moment */
  HL__BEHIND_UPDATE, /* see hl_request.gives_way */
  HL__TABLES_LOCKED  /* the rows are free, but somebody keeps the tables of leases locked */
};
static inline bool hl__is_step(int status) { return status >= HL__ABSENT; }

/* Fills in *error (unless NULL) with a status, its usual retryability and a
   message; clears the rest. Returns status, so that a caller can write
   `return hl__error(error, HL_ESTORE, "...")`. */
int hl__error(hl_error *error, int status, const char *format, ...) HL__PRINTF(3, 4);
/* The same with the text of errno (taken at the call) appended. */
int hl__error_errno(hl_error *error, int status, const char *format, ...) HL__PRINTF(3, 4);
int hl__error_memory(hl_error *error);
int hl__error_null(hl_error *error, const char *function);
/* A public function with a status begins with it. */
#define HL__NEEDS(given, error)                                                                    \
  do {                                                                                             \
    if (!(given)) return hl__error_null((error), __func__);                                        \
  } while (0)
/* HL_ELOST: somebody has revoked the lease. NULL or "": nobody knows who, or why. Cut to
   what an hl_error has room for. */
int hl__error_revoked(hl_error *error, const char *by, const char *reason);
/* The status of that name in the contract; HL_ESTORE when there is none. */
int hl__status_named(const char *name);

/* Escapes bytes for people: control characters, what turns the direction of writing,
   and invalid UTF-8 as \xNN; "..." where the text was cut. Always NUL-terminated;
   returns the length written. */
size_t hl__escape(char *out, size_t size, const char *data, size_t n);
/* The same for an id in a path: these bytes, '/' and '%' as %NN. So whoever reads the
   path knows the ids. */
size_t hl__escape_id(char *out, size_t size, const char *data, size_t n);

#endif
