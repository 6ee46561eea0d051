/*
 * stock.c - what this process has in stock: free nodes, free records, the records of its agents;
 * and nodes that it gave up without the lock of their partition.
 */
#include "embedded.h"

#include <stdlib.h>
#include <string.h>

/* ----------------------------------------------------------------- nodes */

static void node_keep(hl__shm_space *space, uint32_t index) HL__REQUIRES(hl__shm_space_mutex) {
  hl__shm_node *node = hl__shm_node_at(space, index);
  if (!node) return;
  atomic_store(&node->chain, space->free_node);
  space->free_node = index;
}

static void nodes_add(hl__shm_space *space) HL__REQUIRES(hl__shm_space_mutex) {
  uint32_t chunk = hl__shm_chunk_get(space, HL__NODES, space->me);
  for (uint32_t i = HL__SHM_PER_CHUNK; chunk && i-- > 0;) {
    hl__shm_node *node = hl__shm_node_at(space, chunk * HL__SHM_PER_CHUNK + i);
    if (!node) return;
    atomic_store(&node->claim, 0);
    node_keep(space, chunk * HL__SHM_PER_CHUNK + i);
  }
}

uint32_t hl__shm_node_get(hl__shm_session *session) {
  hl__shm_space *space = session->space;
  if (session->cached == 0) {
    hl__shm_space_lock(space);
    while (session->cached < HL__SHM_CACHE / 4) {
      if (space->free_node == 0) nodes_add(space);
      hl__shm_node *node = hl__shm_node_at(space, space->free_node);
      if (!node) {
        space->free_node = 0;
        break;
      }
      session->cache[session->cached++] = space->free_node;
      space->free_node = atomic_load(&node->chain);
    }
    hl__shm_space_unlock(space);
    if (session->cached == 0) return 0;
  }
  return session->cache[--session->cached];
}

void hl__shm_node_put(hl__shm_session *session, uint32_t index) {
  if (session->cached < HL__SHM_CACHE) {
    session->cache[session->cached++] = index;
    return;
  }
  hl__shm_space_lock(session->space);
  node_keep(session->space, index);
  hl__shm_space_unlock(session->space);
}

void hl__shm_cache_drop(hl__shm_session *session) {
  hl__shm_space_lock(session->space);
  while (session->cached) node_keep(session->space, session->cache[--session->cached]);
  hl__shm_space_unlock(session->space);
}

/* ---------------------------------------------------- what is done later */

void hl__shm_late_add(hl__shm_space *space, uint32_t index) {
  hl__shm_space_lock(space);
  uint32_t n = atomic_load(&space->late_count);
  if (n == space->late_capacity) {
    uint32_t capacity = n ? 2 * n : 64;
    uint32_t *more = realloc(space->late, capacity * sizeof *more);
    if (more) {
      space->late = more;
      space->late_capacity = capacity;
    }
  }
  if (n < space->late_capacity) {
    space->late[n] = index;
    atomic_store(&space->late_count, n + 1);
  } /* else a mender finds it, once this process has ended */
  hl__shm_space_unlock(space);
}

void hl__shm_late_do(hl__shm_space *space) {
  hl__shm_space_lock(space);
  uint32_t kept = 0, n = atomic_load(&space->late_count);
  for (uint32_t i = 0; i < n; i++) {
    /* A deadline that has passed: it tries. A partition's lock is tried inside of the mutex here,
       and nowhere awaited. */
    if (hl__shm_claim_clear(space, space->late[i], 1, NULL) == HL_OK)
      node_keep(space, space->late[i]);
    else
      space->late[kept++] = space->late[i];
  }
  atomic_store(&space->late_count, kept);
  hl__shm_space_unlock(space);
}

/* --------------------------------------------------------------- records */

static uint32_t record_take(hl__shm_space *space) HL__REQUIRES(hl__shm_space_mutex) {
  if (space->free_record == 0) {
    uint32_t chunk = hl__shm_chunk_get(space, HL__RECORDS, space->me);
    for (uint32_t i = HL__SHM_PER_CHUNK; chunk && i > 0;) {
      i -= HL__SHM_RECORD_UNITS;
      hl__shm_record *record = hl__shm_record_at(space, chunk * HL__SHM_PER_CHUNK + i);
      if (!record) break;
      record->next = space->free_record;
      space->free_record = chunk * HL__SHM_PER_CHUNK + i;
    }
  }
  uint32_t index = space->free_record;
  hl__shm_record *record = hl__shm_record_at(space, index);
  space->free_record = record ? record->next : 0;
  if (!record) return 0;
  atomic_store(&record->agent, index);
  atomic_store(&record->waits, 0);
  atomic_store(&record->first, 0);
  atomic_store(&record->slot, space->me);
  return index;
}

static void record_keep(hl__shm_space *space, uint32_t index) HL__REQUIRES(hl__shm_space_mutex) {
  hl__shm_record *record = hl__shm_record_at(space, index);
  if (!record) return;
  record->next = space->free_record;
  space->free_record = index;
}

uint32_t hl__shm_record_get(hl__shm_space *space) {
  hl__shm_space_lock(space);
  uint32_t index = record_take(space);
  hl__shm_space_unlock(space);
  return index;
}

void hl__shm_record_put(hl__shm_space *space, uint32_t index) {
  hl__shm_space_lock(space);
  record_keep(space, index);
  hl__shm_space_unlock(space);
}

hl__shm_agent *hl__shm_agent_get(hl__shm_space *space, uint64_t number) {
  hl__shm_space_lock(space);
  hl__shm_agent **head = &space->agents[number % HL__SHM_AGENT_HEADS], *agent = *head;
  while (agent && agent->number != number) agent = agent->next;
  if (!agent && (agent = calloc(1, sizeof *agent))) {
    agent->number = number;
    agent->record = record_take(space);
    agent->next = *head;
    if (agent->record) {
      *head = agent;
    } else {
      free(agent);
      agent = NULL;
    }
  }
  if (agent) agent->sessions++;
  hl__shm_space_unlock(space);
  return agent;
}

void hl__shm_agent_put(hl__shm_space *space, hl__shm_agent *agent) {
  hl__shm_space_lock(space);
  if (--agent->sessions == 0) {
    hl__shm_agent **link = &space->agents[agent->number % HL__SHM_AGENT_HEADS];
    while (*link != agent) link = &(*link)->next;
    *link = agent->next;
    record_keep(space, agent->record);
    free(agent);
  }
  hl__shm_space_unlock(space);
}

bool hl__shm_stock_leave(hl__shm_space *space) {
  hl__shm_late_do(space);
  return hl__shm_chunks_leave(space, space->me);
}
