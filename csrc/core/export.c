/*
 * export.c - see export.h. The text is "hl1-" and bytes in the alphabet of RFC 4648, section 5
 * (URLs, file names, cookies), without padding. Numbers have their lowest byte first. The bytes:
 *
 *     id, secret              16 bytes each
 *     ttl, place              8 bytes each
 *     layout                  8 bytes: FNV-1a (64 bits) of its names and buckets
 *     number of targets       4 bytes
 *     for each target         a byte of its level; a byte of its mode, with 0x80 if the
 *                             mode was given, and 0x40 if it was requested in HL_UPDATE
 *                             and is exclusive; and for each id a size (2 bytes) and
 *                             the id
 *     check                   8 bytes: FNV-1a (64 bits) of everything before
 *
 * The check finds damage. A stranger can make a valid text only with the secret, which the store
 * compares.
 */
#include "export.h"

#include "error.h"
#include "layout.h"
#include "plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PREFIX "hl1-"
#define PREFIX_SIZE (sizeof PREFIX - 1)
#define GIVEN 0x80u
#define RAISED 0x40u
/* A longer text is not ours. */
#define TEXT_MAX ((size_t)64 << 20)

static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

static uint64_t layout_hash(const hl_layout *layout) {
  char names[HL__LAYOUT_NAMES_MAX], buckets[16];
  (void)hl__layout_names(layout, names);
  (void)snprintf(buckets, sizeof buckets, "/%lu", (unsigned long)hl_layout_buckets(layout));
  uint64_t h = hl__hash(names, strlen(names), HL__HASH_BEGIN);
  return hl__hash(buckets, strlen(buckets), h);
}

/* --------------------------------------------------------------- writing */

typedef struct buffer {
  uint8_t *data; /* NULL: only count */
  size_t size;
} buffer;

static void put(buffer *out, const void *data, size_t size) {
  if (out->data) memcpy(out->data + out->size, data, size);
  out->size += size;
}

static void put_number(buffer *out, uint64_t value, unsigned bytes) {
  for (unsigned i = 0; i < bytes; i++, value >>= 8) {
    uint8_t byte = (uint8_t)value;
    put(out, &byte, 1);
  }
}

static void put_all(buffer *out, const hl_lease_terms *terms, const hl_plan *plan) {
  size_t n = hl_plan_target_count(plan);
  put(out, terms->id, sizeof terms->id);
  put(out, terms->secret, sizeof terms->secret);
  put_number(out, (uint64_t)terms->ttl, 8);
  put_number(out, terms->place, 8);
  put_number(out, layout_hash(hl_plan_layout(plan)), 8);
  put_number(out, n, 4);
  for (size_t i = 0; i < n; i++) {
    hl_id ids[HL_LEVELS_MAX];
    hl_target target = hl_plan_target(plan, i, ids);
    put_number(out, target.level, 1);
    bool raised = target.updates && target.mode != HL_UPDATE;
    put_number(out,
               (unsigned)(target.updates ? HL_UPDATE : target.mode) |
                   (target.mode_given ? GIVEN : 0) | (raised ? RAISED : 0),
               1);
    for (unsigned j = 0; j <= target.level; j++) {
      put_number(out, ids[j].size, 2);
      put(out, ids[j].data, ids[j].size);
    }
  }
}

static char *encode(const uint8_t *data, size_t size) {
  char *text = malloc(PREFIX_SIZE + size / 3 * 4 + 5), *at = text;
  if (!text) return NULL;
  memcpy(at, PREFIX, PREFIX_SIZE);
  at += PREFIX_SIZE;
  for (size_t i = 0; i < size; i += 3) {
    size_t some = size - i < 3 ? size - i : 3;
    uint32_t bits = (uint32_t)data[i] << 16;
    if (some > 1) bits |= (uint32_t)data[i + 1] << 8;
    if (some > 2) bits |= data[i + 2];
    for (size_t j = 0; j <= some; j++) *at++ = alphabet[bits >> (18 - 6 * j) & 63];
  }
  *at = '\0';
  return text;
}

char *hl__export_write(const hl_lease_terms *terms, const hl_plan *plan) {
  buffer out = {NULL, 0};
  put_all(&out, terms, plan);
  uint8_t *data = malloc(out.size + 8);
  if (!data) return NULL;
  out = (buffer){data, 0};
  put_all(&out, terms, plan);
  put_number(&out, hl__hash(data, out.size, HL__HASH_BEGIN), 8);
  char *text = encode(data, out.size);
  free(data);
  return text;
}

/* --------------------------------------------------------------- reading */

typedef struct source {
  const uint8_t *data;
  size_t left;
} source;

/* False: there are fewer bytes. */
static bool get(source *in, void *data, size_t size) {
  if (in->left < size) return false;
  if (data) memcpy(data, in->data, size);
  in->data += size;
  in->left -= size;
  return true;
}

static bool get_number(source *in, uint64_t *value, unsigned bytes) {
  uint8_t raw[8];
  if (!get(in, raw, bytes)) return false;
  *value = 0;
  for (unsigned i = bytes; i-- > 0;) *value = *value << 8 | raw[i];
  return true;
}

static int damaged(hl_error *error) {
  return hl__error(error, HL_EMISMATCH, "the text is no exported lease, or it is damaged");
}

static int get_target(source *in, hl_plan *plan, hl_error *error) {
  hl_id ids[HL_LEVELS_MAX];
  uint64_t level, bits, size;
  if (!get_number(in, &level, 1) || !get_number(in, &bits, 1) ||
      level >= hl_layout_levels(hl_plan_layout(plan)))
    return damaged(error);
  const bool raised = (bits & RAISED) != 0;
  hl_mode mode = (hl_mode)(bits & ~(GIVEN | RAISED));
  hl_target target = {(unsigned)level, raised ? HL_EXCLUSIVE : mode, (bits & GIVEN) != 0,
                      mode == HL_UPDATE};
  if (mode < HL_SHARED || mode > HL_UPDATE || (raised && mode != HL_UPDATE)) return damaged(error);
  for (unsigned i = 0; i <= level; i++) {
    if (!get_number(in, &size, 2) || size < 1 || size > HL_ID_MAX || in->left < size)
      return damaged(error);
    ids[i] = (hl_id){(const char *)in->data, (size_t)size};
    (void)get(in, NULL, (size_t)size);
  }
  int status = hl__plan_add(plan, ids, target, error);
  if (status != HL_EMISUSE) return status;
  /* In the process that wrote the text, nodes have no names, or other names. */
  return hl__error_as(error, HL_EMISMATCH);
}

static int get_all(source *in, hl_layout *layout, hl_lease_terms *terms, hl_plan *plan,
                   hl_error *error) {
  uint64_t ttl, tree, n, check;
  const uint8_t *begin = in->data;
  size_t whole = in->left;
  if (whole < 8) return damaged(error);
  source last = {begin + whole - 8, 8};
  (void)get_number(&last, &check, 8);
  in->left -= 8;
  if (hl__hash(begin, in->left, HL__HASH_BEGIN) != check || !get(in, terms->id, sizeof terms->id) ||
      !get(in, terms->secret, sizeof terms->secret) || !get_number(in, &ttl, 8) ||
      !get_number(in, &terms->place, 8) || !get_number(in, &tree, 8) || !get_number(in, &n, 4) ||
      ttl < 1 || ttl > (uint64_t)HL_TTL_MAX || n < 1)
    return damaged(error);
  if (tree != layout_hash(layout))
    return hl__error(error, HL_EMISMATCH, "the lease is of a space with other levels or buckets");
  terms->ttl = (int64_t)ttl;
  int status = HL_OK;
  while (n-- > 0 && status == HL_OK) status = get_target(in, plan, error);
  if (status == HL_OK && in->left > 0) status = damaged(error);
  return status;
}

/* The decoded bytes of the text. NULL: HL_ENOMEM, or *bad. */
static uint8_t *decode(const char *text, size_t size, size_t *decoded, bool *bad) {
  *bad = size < PREFIX_SIZE || size > TEXT_MAX || memcmp(text, PREFIX, PREFIX_SIZE) != 0 ||
         (size - PREFIX_SIZE) % 4 == 1;
  if (*bad) return NULL;
  text += PREFIX_SIZE;
  size -= PREFIX_SIZE;
  uint8_t *data = malloc(size / 4 * 3 + 3), *at = data;
  if (!data) return NULL;
  for (size_t i = 0; i < size; i += 4) {
    size_t some = size - i < 4 ? size - i : 4;
    uint32_t bits = 0;
    for (size_t j = 0; j < some; j++) {
      const char *digit = text[i + j] ? strchr(alphabet, text[i + j]) : NULL;
      *bad = *bad || !digit;
      if (digit) bits |= (uint32_t)(digit - alphabet) << (18 - 6 * j);
    }
    for (size_t j = 1; j < some; j++) *at++ = (uint8_t)(bits >> (24 - 8 * j));
    /* Spare bits are zero, so the same bytes have only one text. */
    if (bits & (0xFFFFFFu >> (8 * (some - 1)))) *bad = true;
  }
  if (*bad) {
    free(data);
    return NULL;
  }
  *decoded = (size_t)(at - data);
  return data;
}

int hl__export_read(const char *text, size_t size, hl_layout *layout, hl_lease_terms *terms,
                    hl_plan **result, hl_error *error) {
  bool bad;
  size_t decoded = 0;
  *result = NULL;
  uint8_t *data = decode(text, size, &decoded, &bad);
  if (!data) return bad ? damaged(error) : hl__error_memory(error);
  hl_plan *plan = hl_plan_new(layout);
  source in = {data, decoded};
  int status = plan ? get_all(&in, layout, terms, plan, error) : hl__error_memory(error);
  free(data);
  if (status)
    hl_plan_free(plan);
  else
    *result = plan;
  return status;
}
