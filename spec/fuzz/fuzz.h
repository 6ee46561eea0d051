/*
 * fuzz.h - what the fuzzers share. Each is a program of libFuzzer, which calls
 * LLVMFuzzerTestOneInput with bytes that reach ever more of the code; a claim that
 * does not hold ends it, and so does AddressSanitizer, UBSan or a call that hangs.
 *
 *   dsn.c      data source names, and their parameters
 *   plan.c     targets, rows, texts
 *   files.c    the files of the embedded store, as anybody might have left them
 *   answers.c  what a server says, or something that says it is one
 *   values.c   values of Lua's, as arguments of every function
 *   command.c  command lines
 *   texts.c    exported leases
 *
 * `make fuzz` builds and runs them. corpus/TARGET.txt has the inputs that they begin with,
 * one a line. What a fuzzer has found is added there once it is mended:
 *
 *   spec/fuzz/run.sh --lines build/lua5.4-fuzz/fuzz/dsn/crashes/crash-… >>spec/fuzz/corpus/dsn.txt
 *
 * So are the inputs that reached new places in a long run, made few:
 *
 *   cd build/lua5.4-fuzz && mkdir NEW && ./fuzz_dsn -merge=1 NEW fuzz/dsn/given fuzz/dsn/corpus
 *   cd NEW && ../../../spec/fuzz/run.sh --lines * >../../../spec/fuzz/corpus/dsn.txt
 */
#ifndef FUZZ_H
#define FUZZ_H

#include "clock.h"
#include "error.h"
#include "fork.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define CLAIM(what)                                                                                \
  ((what) ? (void)0 : (fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #what), abort()))

/* The input, taken from the front; zeros when it has ended. */
typedef struct input {
  const uint8_t *data;
  size_t left;
} input;

static inline uint8_t take_byte(input *self) {
  if (self->left == 0) return 0;
  self->left--;
  return *self->data++;
}

static inline uint32_t take_number(input *self) {
  uint32_t n = 0;
  for (int i = 0; i < 4; i++) n = n << 8 | take_byte(self);
  return n;
}

/* So many bytes, or as many as there are. */
static inline const uint8_t *take_bytes(input *self, size_t *n) {
  const uint8_t *bytes = self->data;
  if (*n > self->left) *n = self->left;
  self->data += *n;
  self->left -= *n;
  return bytes;
}

/* Claims that a text is one line for people: it ends, and has no control bytes. */
static inline void claim_line(const char *text, size_t size) {
  size_t n = strnlen(text, size);
  CLAIM(n < size);
  for (size_t i = 0; i < n; i++) CLAIM((unsigned char)text[i] >= ' ' && text[i] != 127);
}

/* Claims that a text is one line, and UTF-8 without the control characters above it: terminals
   show it as it is. */
static inline void claim_text(const char *text, size_t size) {
  char again[2048];
  claim_line(text, size);
  CLAIM(hl__escape(again, sizeof again, text, strlen(text)) == strlen(text));
}

static inline void claim_error(const hl_error *error, int status) {
  CLAIM(error->status == status);
  CLAIM(error->message[0]);
  claim_line(error->message, sizeof error->message);
}

#endif
