/*
 * leasing.h - between history.c, which keeps what the workers wrote, and leasing.c, which knows leases.
 */
#ifndef LEASING_H
#define LEASING_H

#include "soak.h"

#include <stdlib.h>

/* ------------------------------------------------------------ in history.c */

/* The records that have ended and can still matter. */
record **history_kept(size_t *n);
/* The latest time from which the record blocks no other. */
int64_t history_gone_at(const record *r);
/* Whether of these two something was said already; from now on it was. */
bool history_told(const record *a, const record *b);

/* ------------------------------------------------------------ in leasing.c */

/* Until then no other may hold any of it. */
int64_t lease_until(const record *r);
/* The latest time at which its time is up for others, if no call ends it before. */
int64_t lease_end(const record *r);
/* Cuts each holder's belief at the time from which it does not count. Before pairs are compared. */
void leases_cut(size_t before);
/* Whether it was granted, or is an import. */
bool lease_matters(const record *r);
/* The rules; those from `before` on are new. */
void leases_check(size_t before);

#endif
