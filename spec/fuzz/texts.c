/* texts.c - any text as an exported lease: it is understood or refused in one line; an
   understood text can be written again, and is the same then. Behind an odd first byte the input
   is the text's contents: it gets the right check and layout, as no fuzzer would hit upon these. */
#include "fuzz.h"

#include "export.h"
#include "layout.h"

#define LAYOUT_AT 48 /* behind id, secret, ttl and place */

static uint64_t check_of(const uint8_t *data, size_t size) {
  uint64_t h = UINT64_C(0xCBF29CE484222325);
  for (size_t i = 0; i < size; i++) h = (h ^ data[i]) * UINT64_C(0x100000001B3);
  return h;
}

static int digit_of(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  return c == '-' ? 62 : 63;
}

static char *encode(const uint8_t *data, size_t size) {
  static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  size_t bits = size * 8, n = (bits + 5) / 6;
  char *text = malloc(4 + n + 1);
  memcpy(text, "hl1-", 4);
  for (size_t i = 0; i < n; i++) {
    unsigned value = 0;
    for (size_t bit = i * 6; bit < i * 6 + 6; bit++)
      value = value << 1 | (bit < bits ? data[bit / 8] >> (7 - bit % 8) & 1u : 0);
    text[4 + i] = digits[value];
  }
  text[4 + n] = '\0';
  return text;
}

/* The layout's eight bytes, as a real text has them. */
static void layout_take(hl_layout *layout, uint8_t out[8]) {
  hl_lease_terms terms = {.ttl = 1};
  hl_id id = {"u", 1};
  hl_plan *plan = hl_plan_new(layout);
  CLAIM(hl_plan_add(plan, &id, 1, HL_EXCLUSIVE, true, NULL) == HL_OK);
  char *text = hl__export_write(&terms, plan);
  for (size_t i = 0; i < 8; i++) {
    unsigned value = 0;
    for (size_t bit = (LAYOUT_AT + i) * 8; bit < (LAYOUT_AT + i + 1) * 8; bit++)
      value = value << 1 | ((unsigned)digit_of(text[4 + bit / 6]) >> (5 - bit % 6) & 1u);
    out[i] = (uint8_t)value;
  }
  free(text);
  hl_plan_free(plan);
}

static char *text_of(hl_layout *layout, const uint8_t *data, size_t size) {
  uint8_t *body = malloc(size + 8);
  memcpy(body, data, size);
  if (size >= LAYOUT_AT + 8) layout_take(layout, body + LAYOUT_AT);
  uint64_t check = check_of(body, size);
  for (int i = 0; i < 8; i++, check >>= 8) body[size + (size_t)i] = (uint8_t)check;
  char *text = encode(body, size + 8);
  free(body);
  return text;
}

/* Writes again a text that was read. */
static char *written(const char *text, size_t size, hl_layout *layout) {
  hl_lease_terms terms = {0};
  hl_plan *plan;
  hl_error error;
  int status = hl__export_read(text, size, layout, &terms, &plan, &error);
  if (status) {
    CLAIM(status == HL_EMISMATCH && !plan);
    claim_error(&error, status);
    return NULL;
  }
  CLAIM(terms.ttl >= 1 && terms.ttl <= HL_TTL_MAX);
  CLAIM(hl_plan_target_count(plan) >= 1);
  char *again = hl__export_write(&terms, plan);
  hl_plan_free(plan);
  return again;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static hl_layout *layout;
  if (!layout) CLAIM(hl_layout_new(NULL, 0, 10000, &layout, NULL) == HL_OK);
  if (size == 0) return 0;
  bool meant = data[0] & 1u;
  size--, data++;
  char *text = meant ? text_of(layout, data, size) : malloc(size + 1);
  if (!meant) memcpy(text, data, size);
  char *one = written(text, meant ? strlen(text) : size, layout);
  if (one) {
    char *two = written(one, strlen(one), layout);
    CLAIM(two && strcmp(one, two) == 0);
    free(two);
  }
  free(one);
  free(text);
  return 0;
}
