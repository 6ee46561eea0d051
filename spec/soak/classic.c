/*
 * classic.c - the test that needs no theory: for each node there is a counter and a set, which a
 * holder of that node, if it is exclusive, reads, and writes anew a moment later. Now and then,
 * when all rest, they must be what all the updates together make of them. A missing update was
 * lost: two held at once.
 *
 * Once in memory. A lock may be lost while it is held, by a process that is stopped above
 * all, and who does not know it yet writes over what others wrote. So an update counts when
 * it was held both before the read and after the write, as is_held says, for then it was
 * held in between. A node on which another update was begun, which does not count (lost,
 * killed), is not looked at, and begins anew at the next rest.
 *
 * Once in a table of the database, by a connection of the worker's own, and fenced: a holder
 * first writes its token, unless a greater one is there, then reads, then writes if its token is
 * still there. So no write is ever lost, whatever the faults: that tests the tokens. A holder
 * that is refused, and is told afterwards that it still holds, is one of two holders.
 */
#include "soak.h"

#include "servers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ----------------------------------------------------------------- what fits */

/* Whether the counter and the set fit the known updates, and the unknown ones. */
static bool fits(const cell *self, uint64_t counter, uint64_t set) {
  uint64_t updates = atomic_load(&self->updates), unknown = atomic_load(&self->unknown);
  if (unknown) return counter >= updates && counter <= updates + unknown;
  return counter == updates && set == atomic_load(&self->elements);
}

static void lost_update(const char *where, int node, const cell *self, uint64_t counter,
                        uint64_t set) {
  char name[32];
  violation("an update was lost: %s, %s was changed %llu times under its lock (and %llu times "
            "perhaps), and is %llu; "
            "the set should be %016llx and is %016llx",
            where, node_show(node, name), (unsigned long long)atomic_load(&self->updates),
            (unsigned long long)atomic_load(&self->unknown), (unsigned long long)counter,
            (unsigned long long)atomic_load(&self->elements), (unsigned long long)set);
}

static void forget(cell *self) {
  atomic_store(&self->updates, 0);
  atomic_store(&self->elements, 0);
  atomic_store(&self->unknown, 0);
  self->counter = self->set = 0;
}

bool row_seen(int node, uint64_t counter, uint64_t set) {
  cell *self = &shared->rows[node];
  bool fit = fits(self, counter, set);
  if (!fit) lost_update("in the table", node, self, counter, set);
  return fit && !atomic_load(&self->unknown);
}

void row_begun_again(int node) { forget(&shared->rows[node]); }

void classic_check(void) {
  for (int node = 0; node < NODES; node++) {
    cell *self = &shared->cells[node];
    bool known = atomic_load(&self->unknown) == 0,
         fit = !known || fits(self, self->counter, self->set);
    if (!fit) lost_update("in memory", node, self, self->counter, self->set);
    if (!known || !fit) forget(self);
  }
  if (shared->server) server_rows();
}

/* -------------------------------------------------------------- in the table */

static _Thread_local sql *connection;
static _Thread_local int64_t next_try;

/* Connects as an administrator, so that it is not killed. Nothing may take long: this thread has
   other calls to look after. */
static bool connected(const server_kind *kind) {
  hl_dsn dsn;
  if (connection) return true;
  if (now_ns() < next_try || !server_dsn(kind, shared->admin_dsn, &dsn)) return false;
  connection = kind->connect(&dsn, NULL, 1, true);
  if (!connection) classic_close();
  hl_dsn_dispose(&dsn);
  return connection != NULL;
}

void classic_close(void) {
  if (connection) server_kind_of(shared->dsn)->close(connection);
  connection = NULL;
  next_try = now_ns() + 5 * S;
}

/* Rows that it found; -1: that is not known. */
static int update(const server_kind *kind, const char *text) {
  if (kind->run(connection, text, NULL, NULL)) return kind->changed(connection);
  classic_close();
  return -1;
}

typedef struct row {
  bool found;
  unsigned long long counter, set;
} row;

static void row_take(void *context, const char *const *fields) {
  *(row *)context = (row){true, strtoull(fields[0], NULL, 10), strtoull(fields[1], NULL, 10)};
}

int row_update(int node, uint64_t token, int element, int pause_us) {
  char text[320];
  unsigned long long bit = 1ULL << element, fence = token;
  cell *self = &shared->rows[node];
  row now = {false, 0, 0};
  const server_kind *kind = server_kind_of(shared->dsn);
  if (!connected(kind)) return -1;
  (void)snprintf(text, sizeof text, "UPDATE %s SET fence = %llu WHERE node = %d AND fence <= %llu",
                 shared->rows_table, fence, node, fence);
  int n = update(kind, text);
  if (n <= 0) return n;
  (void)snprintf(text, sizeof text, "SELECT counter, elements FROM %s WHERE node = %d",
                 shared->rows_table, node);
  if (!kind->run(connection, text, row_take, &now) || !now.found) {
    classic_close();
    return -1;
  }
  (void)usleep((unsigned)pause_us);
  (void)snprintf(text, sizeof text,
                 "UPDATE %s SET counter = %llu, elements = %llu WHERE node = %d AND fence = %llu",
                 shared->rows_table, now.counter + 1, now.set ^ bit, node, fence);
  (void)atomic_fetch_add(&self->unknown, 1u);
  n = update(kind, text);
  if (n < 0) return n;
  if (n > 0) {
    (void)atomic_fetch_add(&self->updates, 1u);
    (void)atomic_fetch_xor(&self->elements, (uint64_t)bit);
  }
  (void)atomic_fetch_sub(&self->unknown, 1u);
  return n;
}
