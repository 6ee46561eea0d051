/*
 * agent.h - who asks, what it holds and what it waits for: the books by which a request
 * is refused that would close a circle of waiters inside this process. A server sees a
 * connection for each lock, and so no circle that goes through a thread which has two.
 *
 * An agent (a Lua state, say) promises two things: it does one thing at a time, and nobody
 * but it releases what was granted to it. So as long as it blocks in a request, it
 * releases nothing. Several strands (coroutines) may take turns in an agent; a strand that
 * has a number promises the same for itself, against the other strands.
 *
 * What is refused. A wait W is stuck behind a wait V when V's agent (or strand, where only
 * that waits) holds a row in a mode that conflicts with what W asks for. A request is
 * refused when it would be stuck behind itself: at once, when its own agent is in its
 * way, or along others that wait. Then nobody of the circle can release what the
 * one before waits for, until a time-out ends one of the waits or somebody outside ends a lock (an
 * administrator, the loss of a connection). So it is not refused:
 *
 *   - a request that may wait for less than HL__CIRCLE_LEAST_MS, and none is refused because
 *     of its wait: it ends by itself;
 *   - because of a lease that ends by itself before the request's time is up;
 *   - because of a lock that is in use by a call that was started: that may release it;
 *   - because of a wait for one of several (hl_start_any), which is in no books;
 *   - because of a place in the store's queue: stores differ in who passes whom;
 *   - where a store grants everything (null).
 *
 * Rows count, as the store knows only these: two nodes that share a row block each other.
 *
 * Costs. An agent that holds nothing is in no circle: a request of its takes no part.
 */
#ifndef HIERLOCK_AGENT_H
#define HIERLOCK_AGENT_H

#include "manager.h"

#define HL__CIRCLE_LEAST_MS 1000

/* A lock in the books of the agent that holds it: a member of the lock. The thread of the
   agent uses it; another one only while that is blocked, in a wait that is in the books. */
typedef struct hl__held hl__held;
struct hl__held {
  hl__list node;
  hl_agent *agent;              /* NULL: it is in no books */
  uint64_t strand, task, kinds; /* as in hl_options */
  hl_manager *manager;
  const hl_plan *const *plan; /* of the lock */
  char where[HL_WHERE_SIZE];  /* hl_options.where; "": not said */
  /* Whether the lock stands, and will for that long (ms) unless it is released. `mine`:
     asked by its own thread. */
  bool (*stands)(hl__held *held, int64_t ms, bool mine);
  /* The lease that the lock is; NULL: it is none. Only its store knows whether
     somebody has revoked it. */
  struct hl__lease *(*lease)(const hl__held *held);
};

/* A request that waits, or is about to. */
typedef struct hl__wait hl__wait;
struct hl__wait {
  hl__list node;
  hl_agent *agent; /* NULL: it is in no books */
  uint64_t strand;
  bool blocks; /* the whole agent; else its strand */
  hl_manager *manager;
  const hl_plan *plan;
  const hl__held *own; /* of an extend: the lock that is to grow */
  const char *where;
  int64_t timeout;
  unsigned generation;
  /* Of the search that has come here last: its mark; who is looked at next; the
     wait from which it has come, and the lock of this one's agent that is in
     the way of that. */
  unsigned mark;
  hl__wait *queue;
  const hl__wait *from;
  const hl__held *obstacle;
  /* Whether it has ended, and only its books do not say so yet; NULL: it has not. */
  bool (*over)(hl__wait *wait);
};

/* The lock was granted. Takes a reference to the agent; NULL: none. */
void hl__agent_keep(hl__held *held, hl_agent *agent);
/* It is released, or was never kept. By the agent's thread. */
void hl__agent_forget(hl__held *held);

/* hl_request.agent; NULL is fine. */
uint64_t hl__agent_number(const hl_agent *agent);

/* Whether the wait is to be looked at at all. Cheap. */
bool hl__wait_counts(const hl_options *options, int64_t timeout);
/* Whether a lock of the wait's own agent or strand is in its way. It is not in the books. */
bool hl__wait_is_vain(const hl__wait *wait);
/* HL_OK: it is in the books until hl__wait_end. HL_DEADLOCK: it would wait for ever. No mutex
   is held. */
int hl__wait_begin(hl__wait *wait, hl_error *error);
void hl__wait_end(hl__wait *wait); /* does nothing when it is in no books */

#endif
