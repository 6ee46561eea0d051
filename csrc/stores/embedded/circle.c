/*
 * circle.c - circles of waiters, over all processes of the table.
 *
 * A session that waits has published for which node its agent blocks, before it looks. It follows
 * the waits: from a node to the waiter before it and the holders in its way, to their agents, to
 * the nodes for which those block. A wait of less than a second is not published. One of an agent
 * that holds nothing is: others stand behind it. But that agent does not look. The wait that closes
 * a circle comes last, when all others stand; so its session sees all of it and gives way. Where
 * the last one does not look, another does so later.
 *
 * The first walk locks one partition at a time, and may see a circle that never was at one moment,
 * or that a dead process closes. So the dead are mended, and a second walk, with all partitions
 * locked in ascending order, must find the circle again. The session that finds it ends its wait
 * before it unlocks them. So of two that see the same circle one gives way.
 */
#include "embedded.h"

#include <stdlib.h>
#include <string.h>

/* Nodes that a walk visits. More waiters than these are looked at from another end. */
#define NODES_MAX 1024u
#define TABLE (2 * NODES_MAX)
#define STEPS_MAX (1u << 20)
/* How long a walk waits for partitions. */
#define PATIENCE_NS 20000000

typedef struct walk {
  hl__shm_space *space;
  uint32_t start, agent; /* the node; the record of its session's agent */
  bool found;
  uint32_t by; /* the record of the session that is in the way of the start */
  uint32_t n, todo[NODES_MAX];
  uint32_t known[TABLE]; /* the nodes of todo, by hash */
  uint32_t met[TABLE];   /* rows whose holders were met, with the mode of the waiter, by hash */
} walk;

/* Enters a number that is not 0. False: it is in the set already. */
static bool enter(uint32_t set[TABLE], uint32_t number) {
  uint32_t at = number * 0x9E3779B9u % TABLE;
  while (set[at] && set[at] != number) at = (at + 1) % TABLE;
  if (set[at]) return false;
  set[at] = number;
  return true;
}

static void visit(walk *self, uint32_t index) {
  if (self->n < NODES_MAX && enter(self->known, index)) self->todo[self->n++] = index;
}

static uint32_t agent_of(hl__shm_space *space, uint32_t session) {
  const hl__shm_record *record = hl__shm_record_at(space, session);
  return record ? atomic_load(&record->agent) : 0;
}

/* A session is in the way of the node. */
static void meet(walk *self, uint32_t from, uint32_t session) {
  const uint32_t agent = agent_of(self->space, session);
  const hl__shm_record *record = hl__shm_record_at(self->space, agent);
  const uint32_t waits = record ? atomic_load(&record->waits) : 0;
  /* The agent's own lock, right in its way, is the core's to judge (agent.h): a thread may be about
     to release it. */
  if (agent == self->agent && agent && from != self->start) self->found = true;
  if (waits) visit(self, waits);
  if (from == self->start && !self->by && waits && agent != self->agent) self->by = session;
}

/* A waiter is before the node in its queue. A wait that its session has not published ends soon, or
   is a pending's, which keeps no agent: its owner may wait for several and take the first. */
static void queue_behind(walk *self, uint32_t from, uint32_t ahead, uint32_t session) {
  const hl__shm_record *record = hl__shm_record_at(self->space, agent_of(self->space, session));
  if (!record || atomic_load(&record->waits) != ahead) return;
  visit(self, ahead);
  if (from == self->start && !self->by) self->by = session;
}

/* The partition of the node is locked. Of the waiters of a row the walk meets the holders once for
   each mode, or a crowd of waiters would cost its square. What a second one would meet beside them
   is the first one's own session, and that waits for the first. Only the start has holders of its
   own. */
static void look(walk *self, uint32_t index, uint64_t claim) {
  hl__shm_space *space = self->space;
  const hl__shm_node *node = hl__shm_node_at(space, index);
  const hl__shm_row *row = node ? hl__shm_row_of(space, node) : NULL;
  if (!row || atomic_load(&node->claim) != claim) return;
  const uint32_t session = atomic_load(&node->session);
  uint32_t before = node->prev, steps = 0;
  for (const hl__shm_node *ahead; (ahead = hl__shm_node_at(space, before)) && steps < STEPS_MAX;
       steps++) {
    if (hl__shm_state_of(atomic_load(&ahead->claim)) == HL__WAIT) {
      queue_behind(self, index, before, atomic_load(&ahead->session));
      break;
    }
    before = ahead->prev;
  }
  if (index != self->start && !enter(self->met, node->row << 3 | hl__shm_mode_of(claim))) return;
  for (uint32_t i = row->holders; i && steps < STEPS_MAX && !self->found; steps++) {
    const hl__shm_node *holder = hl__shm_node_at(space, i);
    if (!holder) break;
    const uint64_t theirs = atomic_load(&holder->claim);
    if (atomic_load(&holder->session) != session && hl__shm_state_of(theirs) == HL__HELD &&
        hl__modes_conflict(hl__shm_mode_of(claim), hl__shm_mode_of(theirs)))
      meet(self, index, atomic_load(&holder->session));
    i = holder->next;
  }
}

static bool walk_from(walk *self, bool locked, int64_t deadline) {
  self->found = false;
  self->by = self->n = 0;
  memset(self->known, 0, sizeof self->known);
  memset(self->met, 0, sizeof self->met);
  visit(self, self->start);
  for (uint32_t k = 0; k < self->n && !self->found; k++) {
    const hl__shm_node *node = hl__shm_node_at(self->space, self->todo[k]);
    const uint64_t claim = node ? atomic_load(&node->claim) : 0;
    const uint32_t part = hl__shm_claim_part(claim);
    if (hl__shm_state_of(claim) != HL__WAIT) continue;
    if (!locked && hl__shm_part_lock(self->space, part, deadline, NULL) != HL_OK) return false;
    look(self, self->todo[k], claim);
    if (!locked) hl__shm_part_unlock(self->space, part);
  }
  return self->found;
}

/* Ends the wait for the node: no session meets it any more. All partitions are locked. */
static bool give_way(hl__shm_space *space, uint32_t index) {
  hl__shm_node *node = hl__shm_node_at(space, index);
  uint64_t claim = atomic_load(&node->claim);
  return hl__shm_state_of(claim) == HL__WAIT &&
         atomic_compare_exchange_strong(&node->claim, &claim, hl__shm_claim_as(claim, HL__GONE));
}

int hl__shm_circle(hl__shm_space *space, uint32_t index, hl_error *error) {
  const int64_t deadline = hl__shm_now() + PATIENCE_NS;
  const hl__shm_node *node = hl__shm_node_at(space, index);
  walk *self = node ? malloc(sizeof *self) : NULL;
  if (!self) return HL_OK; /* then the wait ends by its time-out */
  self->space = space;
  self->start = index;
  self->agent = agent_of(space, atomic_load(&node->session));
  bool found = walk_from(self, false, deadline);
  if (found) {
    uint32_t p = 0;
    hl__shm_sweep_out(space, deadline);
    while (p < HL__SHM_PARTS && hl__shm_part_lock(space, p, deadline, NULL) == HL_OK) p++;
    found = p == HL__SHM_PARTS && walk_from(self, true, deadline) && give_way(space, index);
    while (p-- > 0) hl__shm_part_unlock(space, p);
  }
  const hl__shm_record *by = found ? hl__shm_record_at(space, self->by) : NULL;
  char name[64];
  free(self);
  if (!found) return HL_OK;
  hl__shm_slot_name(space, by ? atomic_load(&by->slot) : HL__SHM_SLOTS, name, sizeof name);
  return hl__error(error, HL_DEADLOCK, "it would wait in a circle, first for a lock of %s", name);
}
