/*
 * text.c - SQL, put together.
 */
#include "mysql_store.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Makes room for n bytes more, and a NUL. */
static bool reserve(hl__text *text, size_t n) {
  if (text->used + n < text->capacity) return true;
  size_t capacity = 2 * (text->used + n) + 512;
  char *data = text->failed ? NULL : realloc(text->data, capacity);
  text->failed = !data;
  if (!data) return false;
  text->data = data;
  text->capacity = capacity;
  return true;
}

void hl__text_put(hl__text *text, const char *format, ...) {
  for (;;) {
    size_t room = text->capacity - text->used;
    va_list arguments;
    va_start(arguments, format);
    size_t n = (size_t)vsnprintf(room ? text->data + text->used : NULL, room, format, arguments);
    va_end(arguments);
    if (n < room) text->used += n;
    if (n < room || !reserve(text, n)) return;
  }
}

void hl__text_add(hl__text *text, const void *data, size_t n) {
  if (!reserve(text, n)) return;
  memcpy(text->data + text->used, data, n);
  text->used += n;
}

void hl__text_hex(hl__text *text, const void *data, size_t n) {
  if (n == 0) {
    hl__text_put(text, "X''"); /* '' may be NULL: EMPTY_STRING_IS_NULL */
    return;
  }
  hl__text_put(text, "0x");
  if (!reserve(text, 2 * n)) return;
  text->used = (size_t)(hl__hex(text->data + text->used, data, n) - text->data);
}

void hl__text_take(char *out, size_t size, const char *text) {
  (void)hl__escape(out, size, text ? text : "", text ? strlen(text) : 0);
}
