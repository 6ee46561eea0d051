/*
 * leasing.h - between history.c, which keeps what the workers wrote, and leasing.c, which knows leases.
 */
#ifndef LEASING_H
#define LEASING_H

#include "soak.h"

#include <stdlib.h>

/* ------------------------------------------------------------ in history.c */

/* What has ended and can still matter. */
record **history_kept(size_t *n);
/* When it is in nobody's way any more, at the latest. */
int64_t history_gone_at(const record *r);
/* Whether of these two something was said already; from now on it was. */
bool history_told(const record *a, const record *b);

/* ------------------------------------------------------------ in leasing.c */

/* Until then nobody else may hold any of it. */
int64_t lease_until(const record *r);
/* When its time is up for others at the latest, if nobody ends it before. */
int64_t lease_end(const record *r);
/* Whose belief does not count from when on. Before pairs are compared. */
void leases_cut(size_t before);
/* It was granted, or is an import. */
bool lease_matters(const record *r);
/* The rules; those from `before` on are new. */
void leases_check(size_t before);

#endif
