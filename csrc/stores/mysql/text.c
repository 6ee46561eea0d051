/*
 * text.c - SQL, put together by callers that have reserved the room for it.
 */
#include "mysql_store.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool hl__text_new(hl__text *text, size_t capacity) {
  text->used = 0;
  text->capacity = capacity;
  text->data = malloc(capacity);
  return text->data != NULL;
}

void hl__text_put(hl__text *text, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int n = vsnprintf(text->data + text->used, text->capacity - text->used, format, arguments);
  va_end(arguments);
  if (n > 0) text->used += (size_t)n;
}

void hl__text_hex(hl__text *text, const void *data, size_t n) {
  if (n == 0) {
    hl__text_put(text, "X''"); /* '' may be NULL: EMPTY_STRING_IS_NULL */
    return;
  }
  hl__text_put(text, "0x");
  text->used = (size_t)(hl__hex(text->data + text->used, data, n) - text->data);
}

void hl__text_take(char *out, size_t size, const char *text) {
  (void)hl__escape(out, size, text ? text : "", text ? strlen(text) : 0);
}
