/*
 * record.c - records of sessions and leases by their number, and texts in them.
 */
#include "embedded.h"

#include <string.h>

hl__shm_record *hl__shm_record_at(hl__shm_space *space, uint32_t index) {
  return index % HL__SHM_RECORD_UNITS ? NULL : hl__shm_unit(space, index, HL__SHM_RECORD_UNITS);
}

hl__shm_lease *hl__shm_lease_at(hl__shm_space *space, uint32_t index) {
  return index % HL__SHM_LEASE_UNITS ? NULL : hl__shm_unit(space, index, HL__SHM_LEASE_UNITS);
}

void hl__shm_text_set(hl__a64 *words, size_t count, const char *text, size_t size) {
  if (size >= count * sizeof(uint64_t)) size = count * sizeof(uint64_t) - 1;
  /* To the word with the NUL: what is behind it does not count. */
  for (size_t i = 0; i <= size / sizeof(uint64_t); i++) {
    uint64_t word = 0;
    size_t from = i * sizeof word, n = size - from < sizeof word ? size - from : sizeof word;
    if (n > 0) memcpy(&word, text + from, n); /* an empty text may be NULL */
    atomic_store_explicit(&words[i], word, memory_order_relaxed);
  }
}

void hl__shm_text_get(char *text, const hl__a64 *words, size_t count) {
  for (size_t i = 0; i < count; i++) {
    uint64_t word = atomic_load_explicit(&words[i], memory_order_relaxed);
    memcpy(text + i * sizeof word, &word, sizeof word);
  }
  text[count * sizeof(uint64_t) - 1] = '\0';
}

int64_t hl__shm_boot_ms(const hl__shm_space *space) { return hl__boot_ms() - space->shift_ms; }
