/*
 * error.c - statuses, their names and texts. The only place that knows which status has which name
 * in the contract and which may be tried again.
 */
#include "error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* A new field uses reserved room, as programs compiled with an earlier header have only that
   much. */
_Static_assert(sizeof(void *) < 8 || sizeof(hl_error) == 872, "hl_error has its size for ever");
_Static_assert(sizeof(hl_stats) == 256, "hl_stats has its size for ever");

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
    {HL_EUNSUPPORTED, false, "unsupported"},
};

static bool status_retryable(int status) {
  for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++)
    if (statuses[i].status == status) return statuses[i].retryable;
  return false;
}

const char *hl_version(void) { return HL_VERSION; }

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

/* Whether the character is one of U+0080 to U+009F: terminals obey some of them as they obey
   Escape. */
static bool is_c1(const char *text) {
  return (unsigned char)text[0] == 0xC2 && ((unsigned char)text[1] & 0xE0) == 0x80;
}

static void error_fill(hl_error *error, int status, const char *format, va_list arguments) {
  memset(error, 0, sizeof *error);
  error->status = status;
  error->retryable = status_retryable(status);
  error->level = -1;
  /* The message becomes one line without control characters, which a server or a path may
     contain. */
  (void)vsnprintf(error->message, sizeof error->message, format, arguments);
  for (char *c = error->message; *c; c++)
    if (is_c1(c))
      *c = c[1] = ' ';
    else if ((unsigned char)*c < ' ' || *c == 0x7F)
      *c = ' ';
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
#else /* as POSIX defines it */
    const char *reason = text;
    (void)strerror_r(saved, text, sizeof text);
#endif
    (void)snprintf(error->message + used, sizeof error->message - used, ": %s", reason);
  }
  return status;
}

int hl__error_null(hl_error *error, const char *function) {
  return hl__error(error, HL_EMISUSE, "%s: an argument is NULL that must not be", function);
}

char *hl__hex(char *out, const void *data, size_t n) {
  static const char digits[] = "0123456789abcdef";
  const uint8_t *bytes = data;
  for (size_t i = 0; i < n; i++) {
    *out++ = digits[bytes[i] >> 4];
    *out++ = digits[bytes[i] & 15];
  }
  *out = '\0';
  return out;
}

void hl__id_read(const char *digits, uint8_t id[16]) {
  memset(id, 0, 16);
  for (size_t n = 0; *digits && n < 32; digits++) {
    if (*digits == '-') continue;
    int digit = *digits <= '9' ? *digits - '0' : (*digits | 32) - 'a' + 10;
    id[n / 2] = (uint8_t)(id[n / 2] << 4 | (digit & 15));
    n++;
  }
}

int hl__error_memory(hl_error *error) { return hl__error(error, HL_ENOMEM, "not enough memory"); }

/* Whether the valid sequence at s turns the direction of writing, so that a text differs from
   its looks, or ends a line: U+061C, U+200E, U+200F, U+2028 to U+202E, U+2066 to U+2069. */
static bool turns(const unsigned char *s) {
  if (s[0] == 0xD8) return s[1] == 0x9C;
  if (s[0] != 0xE2) return false;
  if (s[1] == 0x81) return s[2] >= 0xA6 && s[2] <= 0xA9;
  return s[1] == 0x80 && (s[2] == 0x8E || s[2] == 0x8F || (s[2] >= 0xA8 && s[2] <= 0xAE));
}

/* The length of the valid UTF-8 sequence at s (RFC 3629, section 4); 0: not valid, or to be
   escaped. */
static size_t utf8_length(const unsigned char *s, size_t n) {
  unsigned char lead = s[0];
  size_t length = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
  if (length == 0 || length > n) return 0;
  if ((lead == 0xC2 && s[1] < 0xA0) || (lead == 0xE0 && s[1] < 0xA0) ||
      (lead == 0xED && s[1] > 0x9F) || (lead == 0xF0 && s[1] < 0x90) ||
      (lead == 0xF4 && s[1] > 0x8F))
    return 0;
  for (size_t i = 1; i < length; i++)
    if ((s[i] & 0xC0) != 0x80) return 0;
  return turns(s) ? 0 : length;
}

/* The characters before the two digits of an escaped byte. */
typedef enum escape_style { BACKSLASH, PERCENT } escape_style;

static size_t escape(char *out, size_t size, const char *data, size_t n, escape_style style) {
  const char *hex = style == PERCENT ? "0123456789ABCDEF" : "0123456789abcdef";
  const unsigned char *s = (const unsigned char *)data;
  const char *before = style == PERCENT ? "%" : "\\x";
  size_t digits = strlen(before);
  size_t used = 0;
  size_t cut = 0; /* the last place where "..." still fits */
  size_t i = 0;
  if (size == 0) return 0;
  while (i < n) {
    size_t length = s[i] >= ' ' && s[i] < 0x7F ? 1 : utf8_length(s + i, n - i);
    if (style == PERCENT && (s[i] == '/' || s[i] == ',' || s[i] == '%')) length = 0;
    size_t need = length ? length : digits + 2;
    if (used + need >= size) {
      if (size > 3) {
        memcpy(out + cut, "...", 3);
        used = cut + 3;
      }
      break;
    }
    if (length == 1) {
      out[used] = data[i];
    } else if (length) {
      memcpy(out + used, s + i, length);
    } else {
      memcpy(out + used, before, digits);
      out[used + digits] = hex[s[i] >> 4];
      out[used + digits + 1] = hex[s[i] & 15];
    }
    used += need;
    if (used + 3 < size) cut = used;
    i += length ? length : 1;
  }
  out[used] = '\0';
  return used;
}

char *hl__put_number(char *at, uint64_t number) {
  char digits[20];
  int n = 0;
  do digits[n++] = (char)('0' + number % 10);
  while (number /= 10);
  while (n > 0) *at++ = digits[--n];
  return at;
}

size_t hl__escape(char *out, size_t size, const char *data, size_t n) {
  return escape(out, size, data, n, BACKSLASH);
}

size_t hl__escape_id(char *out, size_t size, const char *data, size_t n) {
  return escape(out, size, data, n, PERCENT);
}
