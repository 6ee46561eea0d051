/*
 * export.h - a lease as a text that passes from process to process: which one it is, the
 * secret that makes its holder the owner, and what it locks.
 */
#ifndef HIERLOCK_EXPORT_H
#define HIERLOCK_EXPORT_H

#include "store.h"

/* NULL: out of memory. The caller frees it. */
char *hl__export_write(const hl_lease_terms *terms, const hl_plan *plan);
/* What such a text says: id, secret, ttl, place, and a plan of that layout, which the caller
   frees. HL_EMISMATCH: it is damaged, or of another layout; HL_ENOMEM. */
int hl__export_read(const char *text, size_t size, hl_layout *layout, hl_lease_terms *terms,
                    hl_plan **plan, hl_error *error);

#endif
