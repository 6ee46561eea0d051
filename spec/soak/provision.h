/*
 * provision.h - soak's space on a server, for main and for the process that does a large fault.
 */
#ifndef PROVISION_H
#define PROVISION_H

#include "soak.h"

#include "servers.h"

/* Which table statements mean: of each process, before the first one. */
void server_table(void);
/* Makes the tables and fills them; existing rows stay. */
bool server_fill(const server_kind *store, sql *self, const hl_dsn *users);

#endif
