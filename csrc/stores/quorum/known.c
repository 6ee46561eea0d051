/*
 * known.c - what this process knows of its leases: which members are in them, and the terms by
 * which a member can make a record again. Only the members know for certain. A process may know
 * nothing of a lease: another one has imported it, or the lease ended long ago. Then a refresh asks
 * all members, and no thread heals the lease.
 */
#include "quorum_store.h"

#include <stdlib.h>
#include <string.h>

/* The table keeps a lease that has ended for so long, for a late refresh: ms. */
#define KEPT_MS 3600000
#define SWEEP_MS 5000

static hl__quorum_lease **chain(hl__quorum_store *store, const uint8_t id[16]) {
  return &store->leases[id[0] % HL__QUORUM_CHAINS];
}

hl__quorum_rows *hl__rows_new(const hl_row *rows, size_t n, hl_mode mode) {
  hl__quorum_rows *made = malloc(sizeof *made + n * sizeof *rows);
  if (!made) return NULL;
  made->references = 1;
  made->mode = mode;
  made->n = n;
  if (n > 0) memcpy(made->rows, rows, n * sizeof *rows);
  return made;
}

hl__quorum_rows *hl__rows_shared(const hl_row *rows, size_t n) {
  hl__quorum_rows *made = hl__rows_new(rows, n, HL_SHARED);
  for (size_t i = 0; made && i < n; i++) made->rows[i].mode = HL_SHARED;
  return made;
}

bool hl__rows_match(const hl__quorum_rows *a, const hl__quorum_rows *b) {
  if (a == b) return true;
  if (!a || !b || a->n != b->n) return false;
  for (size_t i = 0; i < a->n; i++)
    if (a->rows[i].mode != b->rows[i].mode) return false;
  return true;
}

void hl__rows_unref(hl__quorum_rows *rows) {
  if (rows && --rows->references == 0) free(rows);
}

void hl__known_unref(hl__quorum_lease *lease) {
  if (!lease || --lease->references > 0) return;
  hl__rows_unref(lease->shown);
  free(lease->label);
  free(lease);
}

void hl__known_forget(hl__quorum_store *store, hl__quorum_lease *lease) {
  for (hl__quorum_lease **at = chain(store, lease->terms.id); *at; at = &(*at)->next) {
    if (*at != lease) continue;
    *at = lease->next;
    hl__known_unref(lease);
    return;
  }
}

bool hl__known_is_busy(const hl__quorum_part *part) {
  return part->making || part->dropping || part->converting;
}

static bool is_needed(const hl__quorum_store *store, const hl__quorum_lease *lease, int64_t now)
    HL__REQUIRES(hl__quorum_mutex) {
  for (unsigned i = 0; i < store->n; i++)
    if (hl__known_is_busy(&lease->at[i])) return true;
  if (lease->references > 1) return true; /* a caller has it */
  return hl__deadline(lease->end, lease->dropped ? 0 : KEPT_MS) > now;
}

static void sweep(hl__quorum_store *store) HL__REQUIRES(hl__quorum_mutex) {
  int64_t now = hl__boot_ms();
  if (hl__now_ms() - store->swept < SWEEP_MS) return;
  store->swept = hl__now_ms();
  for (size_t i = 0; i < HL__QUORUM_CHAINS; i++) {
    for (hl__quorum_lease **at = &store->leases[i]; *at;) {
      hl__quorum_lease *lease = *at;
      if (is_needed(store, lease, now)) {
        at = &lease->next;
        continue;
      }
      *at = lease->next;
      hl__known_unref(lease);
    }
  }
}

hl__quorum_lease *hl__known_find(hl__quorum_store *store, const hl_lease_terms *terms) {
  for (hl__quorum_lease *lease = *chain(store, terms->id); lease; lease = lease->next) {
    if (memcmp(lease->terms.id, terms->id, 16) != 0 ||
        memcmp(lease->terms.holder, terms->holder, 16) != 0)
      continue;
    lease->references++;
    return lease;
  }
  return NULL;
}

hl__quorum_lease *hl__known_make(hl__quorum_store *store, const hl_lease_terms *terms,
                                 const hl_request *request) {
  sweep(store);
  hl__quorum_lease *lease = hl__known_find(store, terms);
  if (lease) return lease;
  lease = calloc(1, sizeof *lease);
  if (!lease) return NULL;
  lease->terms = *terms;
  (void)strncpy(lease->owner, terms->owner ? terms->owner : "", HL_OWNER_MAX);
  lease->terms.owner = lease->owner;
  lease->end = hl__deadline(hl__boot_ms(), terms->ttl);
  lease->heal_at = HL_FOREVER;
  lease->references = 1;
  if (request) {
    lease->shown = hl__rows_new(request->recorded, request->recorded_n, request->mode);
    lease->label = malloc(request->label_size + 1);
    if (!lease->shown || !lease->label) {
      hl__known_unref(lease);
      return NULL;
    }
    if (request->label_size) memcpy(lease->label, request->label, request->label_size);
    lease->label_size = request->label_size;
    (void)strncpy(lease->path, request->path ? request->path : "", sizeof lease->path - 1);
  } else {
    /* Any member may have it. */
    for (unsigned i = 0; i < store->n; i++) lease->at[i].in = true;
  }
  hl__quorum_lease **at = chain(store, terms->id);
  lease->next = *at;
  *at = lease;
  lease->references++;
  return lease;
}

void hl__known_show(hl__quorum_lease *lease, hl__quorum_rows *shown) {
  hl__rows_unref(lease->shown);
  lease->shown = shown;
}

bool hl__known_goes_on(const hl__quorum_store *store) {
  for (size_t i = 0; i < HL__QUORUM_CHAINS; i++)
    for (const hl__quorum_lease *lease = store->leases[i]; lease; lease = lease->next)
      if (!lease->dropped && hl__boot_ms() < lease->end) return true;
  return false;
}

/* Clocks may differ by so much in ttl ms. */
static int64_t drift(int64_t ttl) { return ttl / 100 + 2; }

void hl__known_sent(hl__quorum_part *part, int64_t sent_ms, int64_t ttl) {
  part->sent_ms = sent_ms;
  part->till = hl__deadline(sent_ms, ttl - drift(ttl));
}

void hl__known_granted(hl__quorum_part *part, const hl_grant *grant, int64_t ttl) {
  part->in = true;
  part->place = grant->place;
  part->token = grant->token;
  hl__known_sent(part, grant->sent_ms, ttl);
}

void hl__known_old(const hl__quorum_store *store, hl__quorum_lease *lease, unsigned i) {
  hl__quorum_part *part = &lease->at[i];
  part->old = part->leftover = true;
  if (hl__known_in(store, lease) > store->need) part->in = false;
}

unsigned hl__known_in(const hl__quorum_store *store, const hl__quorum_lease *lease) {
  unsigned in = 0;
  for (unsigned i = 0; i < store->n; i++) in += lease->at[i].in;
  return in;
}

int64_t hl__nth_greatest(int64_t *numbers, unsigned n, unsigned nth) {
  for (unsigned i = 1; i < n; i++) {
    int64_t number = numbers[i];
    unsigned at = i;
    for (; at > 0 && numbers[at - 1] < number; at--) numbers[at] = numbers[at - 1];
    numbers[at] = number;
  }
  return n < nth ? 0 : numbers[nth - 1];
}

int64_t hl__known_since(const hl__quorum_store *store, const hl__quorum_lease *lease, int64_t ttl) {
  int64_t sent[HL__QUORUM_MAX] = {0};
  unsigned n = 0;
  for (unsigned i = 0; i < store->n; i++)
    if (lease->at[i].in) sent[n++] = lease->at[i].sent_ms;
  int64_t since = hl__nth_greatest(sent, n, store->need);
  return since ? since - drift(ttl) : 0;
}

int64_t hl__known_until(const hl__quorum_store *store, hl__quorum_lease *lease) {
  int64_t till[HL__QUORUM_MAX] = {0};
  unsigned n = 0;
  for (unsigned i = 0; i < store->n; i++)
    if (lease->at[i].in) till[n++] = lease->at[i].till;
  int64_t until = hl__nth_greatest(till, n, store->need);
  if (until && until < lease->end) lease->end = until;
  return until;
}
