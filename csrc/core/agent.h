/*
 * agent.h - refuses a request that would close a circle of waiters inside this process. For that
 * it keeps books of agents, their locks and their waits. A server sees one connection
 * per lock, so it sees no circle through a thread that has two connections.
 *
 * An agent (a Lua state, say) promises two things: it does one thing at a time, and it alone
 * releases its locks. So while it blocks in a request, it releases nothing. Several
 * strands (coroutines) may take turns in an agent. A strand with a number promises the same for
 * itself, against the other strands.
 *
 * Refusals. A wait W is stuck behind a wait V if V's agent (or only its strand, if only the strand
 * waits) holds a row in a mode that conflicts with W's request. A request is refused if it would be
 * stuck behind itself: directly, because its own agent is in its way, or along other waits. Then no
 * member of the circle can release what the member before it waits for. That lasts until one of the
 * waits times out or an outsider ends a lock (an administrator, the loss of a connection). A
 * request is not refused:
 *
 *   - if it may wait for less than HL__CIRCLE_LEAST_MS, nor because of such a wait: such a
 *     wait soon ends by itself;
 *   - because of a lease that ends by itself before the request's time is up;
 *   - because of a lock that a started call is using: that call may release it;
 *   - because of a wait for the first of several (hl_start_any): the books leave it out;
 *   - because of a place in the store's queue: stores differ in who passes whom;
 *   - on a store that grants everything (null).
 *
 * The books compare rows, as the store knows only rows: two nodes that share a row block each
 * other.
 *
 * Costs. An agent that holds nothing is in no circle, so its requests skip all of this.
 */
#ifndef HIERLOCK_AGENT_H
#define HIERLOCK_AGENT_H

#include "manager.h"

#define HL__CIRCLE_LEAST_MS 1000

/* An entry in the books of the agent that holds a lock; a member of that lock. Only the agent's
   thread uses it, except while the agent is blocked in a wait that is in the books: then other
   threads may read it. */
typedef struct hl__held hl__held;
struct hl__held {
  hl__list node;
  hl_agent *agent;              /* NULL: not in the books */
  uint64_t strand, task, kinds; /* as in hl_options */
  hl_manager *manager;
  const _Atomic(const hl_plan *) *plan; /* the lock's */
  const char *where;                    /* hl_options.where; "": not said */
  /* Whether the lock stands, and will for `ms` more unless it is released. `mine`: the caller is
     the agent's own thread. */
  bool (*stands)(hl__held *held, int64_t ms, bool mine);
  /* The lock's lease; NULL if it has none. Only the lease's store knows whether it was revoked. */
  struct hl__lease *(*lease)(const hl__held *held);
};

/* A request that waits, or is about to. */
typedef struct hl__wait hl__wait;
struct hl__wait {
  hl__list node;
  hl_agent *agent; /* NULL: not in the books */
  uint64_t strand;
  bool blocks; /* it blocks the whole agent; else only its strand */
  hl_manager *manager;
  const hl_plan *plan;
  const hl__held *own; /* of an extend: the lock that is to grow */
  const char *where;
  int64_t timeout;
  unsigned generation;
  /* Left by the last search that reached this wait: its mark, the next wait in its queue, the wait
     from which it came, and the lock of this agent that stands in that wait's way. */
  unsigned mark;
  hl__wait *queue;
  const hl__wait *from;
  const hl__held *obstacle;
  /* Whether the wait has ended, though the books do not say so yet. NULL: it never has. */
  bool (*over)(hl__wait *wait);
};

/* Enters a granted lock into the agent's books. Takes a reference to the agent. NULL: does
   nothing. */
void hl__agent_keep(hl__held *held, hl_agent *agent);
/* Removes the lock from the books, when it is released; does nothing if it was never entered. Call
   it on the agent's thread. */
void hl__agent_forget(hl__held *held);

/* The number for hl_request.agent; 0 for NULL. */
uint64_t hl__agent_number(const hl_agent *agent);

/* Whether the wait can be part of a circle at all, if only as one that others stand behind. */
bool hl__wait_lasts(const hl_options *options, int64_t timeout);
/* Whether its agent holds something, too, and may close a circle. Cheap. */
bool hl__wait_counts(const hl_options *options, int64_t timeout);
/* Whether a lock of the wait's own agent or strand stands in its way. The wait is not in the
   books. */
bool hl__wait_is_vain(const hl__wait *wait);
/* Enters the wait into the books until hl__wait_end. HL_OK; HL_DEADLOCK: it would wait for ever,
   and is not entered. Hold no mutex. */
int hl__wait_begin(hl__wait *wait, hl_error *error);
void hl__wait_end(hl__wait *wait); /* does nothing if the wait is not in the books */

#endif
