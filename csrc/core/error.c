/*
 * error.c - statuses, their names and texts. The only place that knows which
 * status has which name in the contract and which may be tried again.
 */
#include "internal.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const struct {
  int status;
  bool retryable;
  const char *name;
} statuses[] = {
    {HL_OK, false, "ok"},
    {HL_TIMEOUT, true, "timeout"},
    {HL_DEADLOCK, true, "deadlock"},
    {HL_CANCELLED, true, "cancelled"},
    {HL_BUSY, true, "busy"},
    {HL_ECONNECTION, true, "connection"},
    {HL_ELOST, true, "lost"},
    {HL_ERELEASED, false, "released"},
    {HL_ENOT_PROVISIONED, false, "not_provisioned"},
    {HL_EMISMATCH, false, "mismatch"},
    {HL_EUNSAFE_SERVER, false, "unsafe_server"},
    {HL_EDSN, false, "dsn"},
    {HL_ESTORE, false, "store"},
    {HL_EMISUSE, false, "misuse"},
    {HL_ENOMEM, false, "memory"},
};

static bool status_retryable(int status) {
  for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++)
    if (statuses[i].status == status) return statuses[i].retryable;
  return false;
}

const char *hl_status_name(int status) {
  for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++)
    if (statuses[i].status == status) return statuses[i].name;
  return "store";
}

int hl__status_named(const char *name) {
  for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++)
    if (strcmp(statuses[i].name, name) == 0) return statuses[i].status;
  return HL_ESTORE;
}

static void error_fill(hl_error *error, int status, const char *format,
                       va_list arguments) {
  memset(error, 0, sizeof *error);
  error->status = status;
  error->retryable = status_retryable(status);
  error->level = -1;
  /* One line: whatever a server or a path contained. */
  (void)vsnprintf(error->message, sizeof error->message, format, arguments);
  for (char *c = error->message; *c; c++)
    if ((unsigned char)*c < ' ') *c = ' ';
}

int hl__error(hl_error *error, int status, const char *format, ...) {
  if (error) {
    va_list arguments;
    va_start(arguments, format);
    error_fill(error, status, format, arguments);
    va_end(arguments);
  }
  return status;
}

int hl__error_errno(hl_error *error, int status, const char *format, ...) {
  int saved = errno;
  if (error) {
    va_list arguments;
    va_start(arguments, format);
    error_fill(error, status, format, arguments);
    va_end(arguments);
    size_t used = strlen(error->message);
    char text[128] = "";
#ifdef __GLIBC__ /* may leave text alone */
    const char *reason = strerror_r(saved, text, sizeof text);
#else /* as POSIX has it */
    const char *reason = text;
    (void)strerror_r(saved, text, sizeof text);
#endif
    (void)snprintf(error->message + used, sizeof error->message - used,
                   ": %s", reason);
  }
  return status;
}

int hl__error_memory(hl_error *error) {
  return hl__error(error, HL_ENOMEM, "not enough memory");
}

/* The length of the valid UTF-8 sequence at s (RFC 3629, section 4), 0 when
   there is none. */
static size_t utf8_length(const unsigned char *s, size_t n) {
  unsigned char lead = s[0];
  size_t length = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3
                  : lead < 0xF5 ? 4 : 0;
  if (length == 0 || length > n) return 0;
  if ((lead == 0xE0 && s[1] < 0xA0) || (lead == 0xED && s[1] > 0x9F) ||
      (lead == 0xF0 && s[1] < 0x90) || (lead == 0xF4 && s[1] > 0x8F))
    return 0;
  for (size_t i = 1; i < length; i++)
    if ((s[i] & 0xC0) != 0x80) return 0;
  return length;
}

size_t hl__escape(char *out, size_t size, const char *data, size_t n) {
  static const char hex[] = "0123456789abcdef";
  const unsigned char *s = (const unsigned char *)data;
  size_t used = 0;
  size_t cut = 0; /* where "..." still fits */
  size_t i = 0;
  if (size == 0) return 0;
  while (i < n) {
    size_t length = s[i] >= ' ' && s[i] < 0x7F ? 1 : utf8_length(s + i, n - i);
    size_t need = length ? length : 4;
    if (used + need >= size) {
      if (size > 3) {
        memcpy(out + cut, "...", 3);
        used = cut + 3;
      }
      break;
    }
    if (length) {
      memcpy(out + used, s + i, length);
    } else {
      out[used] = '\\';
      out[used + 1] = 'x';
      out[used + 2] = hex[s[i] >> 4];
      out[used + 3] = hex[s[i] & 15];
    }
    used += need;
    if (used + 3 < size) cut = used;
    i += length ? length : 1;
  }
  out[used] = '\0';
  return used;
}
