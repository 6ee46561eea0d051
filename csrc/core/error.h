/*
 * error.h - fills in an hl_error, and escapes text that people may see. Uses nothing of the rest of
 * the core: a store that is a module of its own has its own copy.
 */
#ifndef HIERLOCK_ERROR_H
#define HIERLOCK_ERROR_H

#include "hierlock.h"

#if defined(__GNUC__)
#define HL__PRINTF(f, a) __attribute__((format(printf, f, a)))
#else
#define HL__PRINTF(f, a)
#endif

/* Statuses that functions within hierlock return besides the public ones. Each caller of such a
   function handles the step itself: no step reaches a program, or has a text in an hl_error. */
enum hl__step {
  HL__ABSENT = 1000, /* the thing is not there, and the caller did not want it made */
  HL__AGAIN,         /* another session was faster, or it is undecided: begin again */
  HL__IN_STEPS,      /* one request cannot decide this: ask in several */
  HL__UNFREE,        /* a row was not free at this moment */
  HL__BEHIND_UPDATE, /* see hl_request.gives_way */
  HL__TABLES_LOCKED  /* the rows are free, but another session has locked the tables of leases */
};
static inline bool hl__is_step(int status) { return status >= HL__ABSENT; }

/* Fills in *error (unless NULL) with the status, its usual retryability and a message; clears the
   rest. Returns status, so that a caller can write `return hl__error(error, HL_ESTORE, "...")`. */
int hl__error(hl_error *error, int status, const char *format, ...) HL__PRINTF(3, 4);
/* Like hl__error, but appends the text of errno, as it was at the call. */
int hl__error_errno(hl_error *error, int status, const char *format, ...) HL__PRINTF(3, 4);
/* Gives an error that is filled in another status, and leaves the rest. Returns the status. */
static inline int hl__error_as(hl_error *error, int status) {
  if (error) error->status = status;
  return status;
}
int hl__error_memory(hl_error *error);
int hl__error_null(hl_error *error, const char *function);
/* Each public function with a status begins with this. */
#define HL__NEEDS(given, error)                                                                    \
  do {                                                                                             \
    if (!(given)) return hl__error_null((error), __func__);                                        \
  } while (0)
/* Writes n bytes in hexadecimal digits, and a NUL; returns where that is. */
char *hl__hex(char *out, const void *data, size_t n);
/* Reads 16 bytes from hexadecimal digits, with dashes between them or not. */
void hl__id_read(const char *digits, uint8_t id[16]);
/* The status of that name in the contract; HL_ESTORE for an unknown name. */
int hl__status_named(const char *name);

/* Writes a number, without a NUL; returns its end. By hand, as each acquisition writes some: printf
   took a tenth of the client's time. */
char *hl__put_number(char *at, uint64_t number);
/* Escapes bytes for people: control characters, characters that turn the direction of writing, and
   invalid UTF-8 become \xNN; "..." marks where the text was cut. Always NUL-terminated; returns the
   length written. */
size_t hl__escape(char *out, size_t size, const char *data, size_t n);
/* Like hl__escape, but for an id in a path: such bytes, '/', ',' and '%' become %NN, so that a
   reader can tell the ids of the path apart. */
size_t hl__escape_id(char *out, size_t size, const char *data, size_t n);

#endif
