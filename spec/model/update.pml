/*
 * update.pml - update locks on one node, for sessions and leases, where whoever waits for a
 * lease keeps the rows that he has locked: csrc/core/plan.c, call.c (acquire), csrc/core/mode.h;
 * csrc/stores/postgresql/statement.c (leases_await), gate.c, record.c (hl__pg_lease_convert). The
 * embedded store is the same row by row.
 *
 * The node has two rows, its own and its update row, each with a queue as the server has it: who
 * comes passes nobody with whom he conflicts, but for a session that holds the row shared and wants it
 * exclusively. A lease is a record, which keeps nothing locked. A Program locks the node some times,
 * each time in a mode that it chooses, as a session or as a lease. No wait has a time-out: so where all
 * wait, they do so for ever, and spin calls that an invalid end state (AWAKE).
 */

/* For the messages of spin: which claim an assertion belongs to. Always false. */
hidden byte CLAIM_EXCLUSION;
#ifndef PROGRAMS
#define PROGRAMS 3
#endif
#ifndef CALLS /* of each program */
#define CALLS 1
#endif
#define NONE 255
#define BIT(i) (1 << (i))
#define OTHERS(set) ((set) & ~BIT(me))

/* --- the rows: sets of programs */
#define NODE 0
#define UPDATE 1
byte shared[2];
byte exclusive[2];
byte waits[2], waits_exclusively[2];
typedef Queue { byte before[PROGRAMS] }; /* who had come before it did */
Queue queue[2];

/* --- the records: sets of programs whose lease has the node shared, for update, exclusively */
byte leased_shared, leased_update, leased_exclusive;

/* --- who believes what */
byte reads, updates, writes;

#define MAY_SHARE(row) (!OTHERS(exclusive[row]) && !(queue[row].before[me] & waits_exclusively[row]))
#define MAY_EXCLUDE(row) (!OTHERS(exclusive[row]) && !OTHERS(shared[row]) && !queue[row].before[me])

/* Of other programs' leases: what is in the way of each row. */
#define LEASES_EXCLUDE (OTHERS(leased_exclusive))
#define LEASES_SHARE (OTHERS(leased_shared | leased_update | leased_exclusive))
#define LEASES_UPDATE (OTHERS(leased_update | leased_exclusive))

inline enqueue(row, exclusively) {
  atomic {
    queue[row].before[me] = waits[row];
    waits[row] = waits[row] | BIT(me);
    waits_exclusively[row] = waits_exclusively[row] | (exclusively -> BIT(me) : 0)
  }
}

/* Nobody had come before it any more. */
inline dequeue(row) {
  waits[row] = OTHERS(waits[row]);
  waits_exclusively[row] = OTHERS(waits_exclusively[row]);
  queue[row].before[0] = OTHERS(queue[row].before[0]);
  queue[row].before[1] = OTHERS(queue[row].before[1]);
#if PROGRAMS > 2
  queue[row].before[2] = OTHERS(queue[row].before[2]);
#endif
#if PROGRAMS > 3
  queue[row].before[3] = OTHERS(queue[row].before[3]);
#endif
  queue[row].before[me] = 0
}

inline lock_shared(row) {
  enqueue(row, false);
  atomic {
    MAY_SHARE(row) ->
    atomic { dequeue(row); shared[row] = shared[row] | BIT(me) }
  }
}

inline lock_exclusively(row) {
  enqueue(row, true);
  atomic {
    MAY_EXCLUDE(row) ->
    atomic { dequeue(row); exclusive[row] = exclusive[row] | BIT(me) }
  }
}

/* It has the row shared, and passes those who wait for it. */
inline convert(row) {
  atomic {
    queue[row].before[me] = 0;
    waits[row] = waits[row] | BIT(me);
    waits_exclusively[row] = waits_exclusively[row] | BIT(me)
  }
  atomic {
    MAY_EXCLUDE(row) ->
    atomic { dequeue(row); exclusive[row] = exclusive[row] | BIT(me) }
  }
}

#define GIVE_BACK(row) \
  shared[row] = OTHERS(shared[row]); \
  exclusive[row] = OTHERS(exclusive[row])

inline give_back_all() {
  atomic { GIVE_BACK(NODE); GIVE_BACK(UPDATE) }
}

inline reads_now() {
  reads = reads | BIT(me);
  assert(!OTHERS(writes) || CLAIM_EXCLUSION)
}
inline updates_now() {
  updates = updates | BIT(me);
  assert((!OTHERS(writes) && !OTHERS(updates)) || CLAIM_EXCLUSION)
}
inline writes_now() {
  writes = writes | BIT(me);
  assert((!OTHERS(writes) && !OTHERS(updates) && !OTHERS(reads)) || CLAIM_EXCLUSION)
}
inline believes_nothing() {
  reads = OTHERS(reads);
  updates = OTHERS(updates);
  writes = OTHERS(writes)
}

/* Shared: keeps the row while it waits for a lease. */
inline take_to_read() {
  lock_shared(NODE);
  !LEASES_EXCLUDE
}

/* Both rows at once; where a lease is in the way of them, the update row first. */
inline take_for_update() {
#ifdef BUG_BEHIND
  lock_shared(NODE);
  lock_exclusively(UPDATE);
#else
  lock_exclusively(UPDATE);
  lock_shared(NODE);
#endif
#ifdef BUG_KEEPS_ALL
  !LEASES_UPDATE && !LEASES_EXCLUDE;
#else
  if
  :: !LEASES_UPDATE && !LEASES_EXCLUDE
  :: else ->
     give_back_all();
     lock_exclusively(UPDATE);
     !LEASES_UPDATE;
     lock_shared(NODE);
     !LEASES_EXCLUDE
  fi
#endif
}

/* Gives way to a lease that is for update, and comes again behind the update row. */
inline take_to_write() {
  lock_exclusively(NODE);
  if
  :: !LEASES_SHARE
#ifndef BUG_KEEPS_NODE
  :: LEASES_UPDATE ->
     give_back_all();
     lock_exclusively(UPDATE);
     !LEASES_UPDATE;
     lock_exclusively(NODE);
     !LEASES_SHARE
#endif
  fi
}

proctype Program(byte me) {
  byte calls = CALLS;
  do
  :: calls > 0 ->
     calls--;
     if
     :: /* a session that reads */
        take_to_read();
        atomic { reads_now() }
        atomic { believes_nothing(); GIVE_BACK(NODE) }
     :: /* a session that writes */
        take_to_write();
        atomic { writes_now() }
        atomic { believes_nothing(); GIVE_BACK(NODE); GIVE_BACK(UPDATE) }
     :: /* a session for update */
        take_for_update();
        atomic { updates_now() }
        if
        :: true ->
           convert(NODE);
           !LEASES_SHARE;
           atomic { writes_now() }
        :: true
        fi;
        atomic { believes_nothing(); GIVE_BACK(NODE); GIVE_BACK(UPDATE) }
     :: /* a lease that reads */
        take_to_read();
        atomic { leased_shared = leased_shared | BIT(me); GIVE_BACK(NODE); reads_now() }
        atomic { believes_nothing(); leased_shared = OTHERS(leased_shared) }
     :: /* a lease for update */
        take_for_update();
        atomic { leased_update = leased_update | BIT(me); GIVE_BACK(NODE); GIVE_BACK(UPDATE); updates_now() }
        if
        :: true ->
           lock_exclusively(NODE);
#ifndef BUG_NOT_LOOKED
           !LEASES_SHARE;
#endif
           atomic {
             leased_update = OTHERS(leased_update);
             leased_exclusive = leased_exclusive | BIT(me);
             GIVE_BACK(NODE);
             writes_now()
           }
           if
           :: true -> /* a downgrade, and perhaps once more */
              atomic {
                believes_nothing();
                updates_now();
                leased_exclusive = OTHERS(leased_exclusive);
                leased_update = leased_update | BIT(me)
              }
              if
              :: true ->
                 lock_exclusively(NODE);
                 !LEASES_SHARE;
                 atomic {
                   leased_update = OTHERS(leased_update);
                   leased_exclusive = leased_exclusive | BIT(me);
                   GIVE_BACK(NODE);
                   writes_now()
                 }
              :: true
              fi
           :: true
           fi
        :: true
        fi;
        atomic {
          believes_nothing();
          leased_update = OTHERS(leased_update);
          leased_exclusive = OTHERS(leased_exclusive)
        }
     fi
  :: else -> break
  od
}

init {
  byte i;
  atomic {
    for (i : 0 .. PROGRAMS - 1) { run Program(i) }
  }
}
