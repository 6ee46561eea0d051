/*
 * export.h - a lease as a text that passes from process to process: its id, the secret that lets
 * its reader take it over, and its targets.
 */
#ifndef HIERLOCK_EXPORT_H
#define HIERLOCK_EXPORT_H

#include "store.h"

/* The text of a lease; the caller frees it. NULL: out of memory. */
char *hl__export_write(const hl_lease_terms *terms, const hl_plan *plan);
/* Reads such a text: id, secret, ttl and place into terms, and a plan of that layout, which the
   caller frees. HL_OK; HL_EMISMATCH: the text is damaged, or of another layout; HL_ENOMEM. */
int hl__export_read(const char *text, size_t size, hl_layout *layout, hl_lease_terms *terms,
                    hl_plan **plan, hl_error *error);

#endif
