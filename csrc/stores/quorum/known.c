/*
 * known.c - what this process knows of its leases: which members are in them,
 * and what it takes to have a record made again. It is no truth of its own:
 * where nothing is known (another process has imported the lease, or it was
 * over for long), a refresh asks all members, and none is healed.
 */
#include "quorum.h"

#include <stdlib.h>
#include <string.h>

/* What is over is kept so long, for a refresh that comes late. */
#define KEPT_MS 3600000
#define SWEEP_MS 5000

static hl__quorum_lease **chain(hl__quorum_store *store, const uint8_t id[16]) {
  return &store->leases[id[0] % HL__QUORUM_CHAINS];
}

void hl__known_unref(hl__quorum_lease *lease) {
  if (!lease || --lease->references > 0) return;
  free(lease->rows);
  free(lease->label);
  free(lease);
}

void hl__known_forget(hl__quorum_store *store, hl__quorum_lease *lease) {
  for (hl__quorum_lease **at = chain(store, lease->terms.id); *at;
       at = &(*at)->next) {
    if (*at != lease) continue;
    *at = lease->next;
    hl__known_unref(lease);
    return;
  }
}

static bool is_needed(const hl__quorum_store *store,
                      const hl__quorum_lease *lease, int64_t now) {
  for (unsigned i = 0; i < store->n; i++)
    if (lease->at[i].making || lease->at[i].dropping) return true;
  if (lease->references > 1) return true; /* somebody asks for it now */
  return lease->end + (lease->dropped ? 0 : KEPT_MS) > now;
}

static void sweep(hl__quorum_store *store) HL__REQUIRES(hl__quorum_mutex) {
  int64_t now = hl__lease_ms();
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

hl__quorum_lease *hl__known_find(hl__quorum_store *store,
                                 const hl_lease_terms *terms) {
  for (hl__quorum_lease *lease = *chain(store, terms->id); lease;
       lease = lease->next) {
    if (memcmp(lease->terms.id, terms->id, 16) != 0 ||
        memcmp(lease->terms.holder, terms->holder, 16) != 0)
      continue;
    lease->references++;
    return lease;
  }
  return NULL;
}

hl__quorum_lease *hl__known_make(hl__quorum_store *store,
                                 const hl_lease_terms *terms,
                                 const hl_request *request) {
  sweep(store);
  hl__quorum_lease *lease = hl__known_find(store, terms);
  if (lease) return lease;
  lease = calloc(1, sizeof *lease);
  if (!lease) return NULL;
  lease->terms = *terms;
  (void)strncpy(lease->owner, terms->owner ? terms->owner : "", HL_OWNER_MAX);
  lease->terms.owner = lease->owner;
  lease->end = hl__deadline(hl__lease_ms(), terms->ttl);
  lease->references = 1;
  if (request) {
    lease->rows = malloc((request->n + 1) * sizeof *lease->rows);
    lease->label = malloc(request->label_size + 1);
    if (!lease->rows || !lease->label) {
      hl__known_unref(lease);
      return NULL;
    }
    memcpy(lease->rows, request->rows, request->n * sizeof *lease->rows);
    lease->n = request->n;
    if (request->label_size)
      memcpy(lease->label, request->label, request->label_size);
    lease->label_size = request->label_size;
    lease->mode = request->mode;
    (void)strncpy(lease->path, request->path ? request->path : "",
                  sizeof lease->path - 1);
  } else {
    /* Nobody knows: all may have it. */
    for (unsigned i = 0; i < store->n; i++) {
      lease->at[i].in = true;
      lease->at[i].sent_ms = 0;
    }
  }
  hl__quorum_lease **at = chain(store, terms->id);
  lease->next = *at;
  *at = lease;
  lease->references++;
  return lease;
}

void hl__known_flush(hl__quorum_member *member) {
  hl__quorum_store *store = member->store;
  int64_t now = hl__lease_ms();
  for (size_t i = 0; i < HL__QUORUM_CHAINS; i++)
    for (hl__quorum_lease *lease = store->leases[i]; lease;
         lease = lease->next) {
      hl__quorum_part *part = &lease->at[member->number];
      if (!lease->dropped || !part->leftover || part->making ||
          part->dropping || now >= lease->end)
        continue;
      part->leftover = false;
      hl__ask_drop(member, lease);
    }
}

unsigned hl__known_in(const hl__quorum_store *store,
                      const hl__quorum_lease *lease) {
  unsigned in = 0;
  for (unsigned i = 0; i < store->n; i++)
    in += lease->at[i].in;
  return in;
}

int64_t hl__known_since(const hl__quorum_store *store,
                        const hl__quorum_lease *lease, int64_t ttl) {
  int64_t sent[HL__QUORUM_MAX] = {0};
  unsigned n = 0;
  for (unsigned i = 0; i < store->n; i++) {
    if (!lease->at[i].in) continue;
    unsigned at = n++; /* the newest first */
    for (; at > 0 && sent[at - 1] < lease->at[i].sent_ms; at--)
      sent[at] = sent[at - 1];
    sent[at] = lease->at[i].sent_ms;
  }
  return n < store->need ? 0 : sent[store->need - 1] - ttl / 100 - 2;
}

void hl__known_heal(hl__quorum_store *store, hl__quorum_lease *lease) {
  if (!lease->rows || !lease->held || lease->dropped) return;
  for (unsigned i = 0; i < store->n; i++) {
    hl__quorum_part *part = &lease->at[i];
    if (part->in || part->making || part->dropping || part->spoiled) continue;
    part->leftover = false; /* what may be there is adopted */
    hl__quorum_ask *ask =
        hl__ask_new(&store->members[i], HL__ASK_TAKE, lease, NULL, NULL);
    if (!ask) return;
    ask->try_once = ask->heals = true;
    ask->deadline = hl__now_ms() + HL__QUORUM_ANSWER_MS;
    hl__ask_give(ask);
    hl__ask_leave(ask, false);
  }
}
