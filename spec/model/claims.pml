/*
 * claims.pml - the table of locks in shared memory: claim words, the lock of a partition, the index
 * that is made of the claims, death at any step, and mending. csrc/stores/embedded/format.h has the
 * invariants, and says who may write what.
 *
 * For each row that a session holds or awaits there is one word: row, mode, state. The index (lists
 * of holders, counts by mode, queues) follows from the words, and is data that a process which dies
 * inside leaves wrong. A Program is one process with one session: csrc/stores/embedded/table.c,
 * take.c, lock.c. A Mender is another process, which waits for nothing itself: mend.c. One step of
 * the model is one load, store or CAS of a word that others read, or one change of the index, which
 * others do not read without the lock.
 *
 * Each process may be killed between any two steps (DEATHS), a Mender, too. A kill frees the bytes
 * LIFE and MEND of its slot, as the kernel does, and nothing else.
 *
 *   ROUNDS    how often each program takes something; else for ever
 *   UPGRADE   program 0 takes the row shared, and then exclusively beside that
 *   INTENTIONS   programs also take rows to write below them (csrc/core/mode.h), which keeps out who
 *             shares all of that, and not who does the same
 *   TWO       there are two rows, and program 0 takes both
 *   PARTS=2   the second row is in another partition
 *   LATE      a wait may end by time-out, and a release may find the partition's lock not to be had:
 *             the claim becomes GONE without the lock, and the rest is done later, or by others
 *   SLEEP     who wants the lock of a partition sleeps until it is woken; else it looks again
 *   REUSE     a process that was killed is begun again, in the same slot
 *   FEW       exclusive claims only, and program 0 or a Mender is killed
 *   SUCCESSOR the second Mender comes once the first is killed
 *
 * Which memory order each step needs, on machines that reorder (C11; the proof of the model is for
 * one order of all steps):
 *
 *   step                                  order     why
 *   lock: CAS 0 to own                    acquire   sees the index, and the claims, of the last section
 *   lock: exchange to 0                   release   its section is seen by the next
 *   lock: sleepers' bit, its reading      relaxed   the bit is in the word that is exchanged: one
 *                                                   location has one order, and the kernel compares
 *                                                   the word again before the thread sleeps
 *   lock: CAS of a dead slot's to own     acquire,  not enough alone: the dead process released
 *                                         behind a  nothing. Its stores are seen because it left its
 *                                         fence     CPU before its LIFE byte was free. So: look at
 *                                                   LIFE, then a seq_cst fence, then read claims
 *   claim to HELD, in a take              release   who reads the list without a lock sees the node's
 *                                                   session and note (written while it was FREE)
 *   claim WAIT to HELD, by the granter    acq_rel   what the last holder has done to the protected
 *                                                   data is seen by the new one
 *   claim, read by the waiter             acquire   the other side of that
 *   claim to FREE                         release   before the grant to the next: a reader without
 *                                                   a lock that acquires that grant cannot see both
 *   claim to GONE, by its owner           release   as for FREE: whoever unlinks it grants the next
 *   wake = 1, behind the grant            seq_cst   with the two below: the waiter stores wake = 0 and
 *   wake = 0, by the waiter               seq_cst   then reads the claim; the granter stores the claim
 *   claim, read behind wake = 0           seq_cst   and then wake = 1. With less the waiter may read
 *   claim WAIT to HELD                    seq_cst   WAIT and its 0 may still come last (on x86, too):
 *                                                   the wake-up is lost until the poll
 *   slot.state = 1, = 0                   release   a slot's fields, and its claims, are as they say
 *   slot.state, before a slot is used     acquire
 *   seq, tokens: fetch_add                relaxed   under the lock, or one location alone
 *   a node's other fields                 plain     written while FREE, read with the lock
 */

/* For the messages of spin: which claim an assertion belongs to. Always false. */
hidden byte CLAIM_EXCLUSION, CLAIM_IN_ORDER, CLAIM_KEPT, CLAIM_MENDED;
#ifndef PROGRAMS
#define PROGRAMS 3
#endif
#ifndef MENDERS
#define MENDERS 0
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#ifndef TIMEOUTS
#define TIMEOUTS 1
#endif
#ifndef PARTS
#define PARTS 1
#endif
#define SLOTS (PROGRAMS + MENDERS)
#define NONE 255
#define BIT(i) (1 << (i))

#if defined(TWO) || PARTS > 1
#define ROWS 2
#else
#define ROWS 1
#endif
#if PARTS > 1
#define PART(row) (row)
#else
#define PART(row) 0
#endif

/* Nodes: one for each program, two for program 0 where it needs two. */
#if defined(UPGRADE) || defined(TWO)
#define NODES (PROGRAMS + 1)
#define SESSION(n) ((n) < 2 -> 0 : (n) - 1)
#define NODE(i) ((i) == 0 -> 0 : (i) + 1)
#else
#define NODES PROGRAMS
#define SESSION(n) (n)
#define NODE(i) (i)
#endif

/* --- the claim words */
#define FREE 0
#define WAIT 1
#define HELD 2
#define GONE 3
#define LOOSE 4
#define S 0
#define X 1
#define IX 2
#define CLAIM(row, mode, state) ((state) | (mode) << 3 | (row) << 5)
#define STATE(word) ((word) & 7)
#define MODE(word) ((word) >> 3 & 3)
#define ROW(word) ((word) >> 5)
#define CONFLICT(one, other) ((one) == X || (one) != (other))
byte claim[NODES];

/* Of nodes; written while the claim is FREE. `before`: whose seq is less, of those that wait. */
byte own[NODES];    /* the modes that the session itself has: bits */
byte before[NODES];
bool wake[NODES];
bool asleep[NODES]; /* in the kernel */
bool late[NODES];   /* its process knows: it says GONE, or LOOSE */

/* --- the index, by row */
typedef Index { byte holders; byte shared; byte exclusive; byte intending; byte waiters; byte line[NODES] };
Index row[ROWS];

/* --- slots, and the lock of each partition: 0 or a slot + 1, and the sleepers' bit */
#define SLEEPERS 128
byte lock[PARTS];
bool state[SLOTS]; /* a process has it, or had it and is not mended */
bool lives[SLOTS]; /* LIFE */
byte mends[SLOTS]; /* MEND: who has the byte */
bool parked[SLOTS]; /* sleeps for the lock of a partition, in the kernel */

bool waits[PROGRAMS]; /* for the formulas */
byte timeouts;

hidden byte a, b, seen_s, seen_x, seen_ix;
hidden byte in_holders, in_line;

/* Claim EXCLUSION, of all claims, whoever lives. */
inline check_exclusion() {
  for (a : 0 .. NODES - 1) {
    for (b : 0 .. NODES - 1) {
      assert(SESSION(a) == SESSION(b) || STATE(claim[a]) != HELD || STATE(claim[b]) != HELD ||
             ROW(claim[a]) != ROW(claim[b]) || !CONFLICT(MODE(claim[a]), MODE(claim[b])) ||
             CLAIM_EXCLUSION)
    }
  }
  a = 0; b = 0
}

/* Claim IN_ORDER: nobody waits for the row who came before n. Who has the row already passes those
   who do not. */
inline check_order(n, earlier) {
  for (a : 0 .. NODES - 1) {
    assert(a == n || !((earlier) & BIT(a)) || STATE(claim[a]) != WAIT ||
           ROW(claim[a]) != ROW(claim[n]) || (own[n] && !own[a]) || CLAIM_IN_ORDER)
  }
  a = 0
}

#define LINE_HAS(at) (at < NODES && row[b].waiters > at && row[b].line[at % NODES] == a)

/* Claim MENDED: who gets the lock finds the index that follows from the claims. */
inline check_index(p) {
  for (b : 0 .. ROWS - 1) {
    if
    :: PART(b) == (p) ->
       seen_s = 0; seen_x = 0; seen_ix = 0;
       for (a : 0 .. NODES - 1) {
         in_holders = (row[b].holders & BIT(a)) != 0;
         in_line = (LINE_HAS(0) || LINE_HAS(1) || LINE_HAS(2) || LINE_HAS(3));
         if
         :: in_holders && MODE(claim[a]) == S -> seen_s++
         :: in_holders && MODE(claim[a]) == X -> seen_x++
         :: in_holders && MODE(claim[a]) == IX -> seen_ix++
         :: else
         fi;
         if
         :: STATE(claim[a]) == HELD && ROW(claim[a]) == b ->
            assert((in_holders && !in_line) || CLAIM_MENDED)
         :: STATE(claim[a]) == WAIT && ROW(claim[a]) == b ->
            assert((!in_holders && in_line) || CLAIM_MENDED)
         :: STATE(claim[a]) == GONE && ROW(claim[a]) == b ->
            assert(in_holders != in_line || CLAIM_MENDED)
         :: else -> assert((!in_holders && !in_line) || CLAIM_MENDED)
         fi
       }
       assert((seen_s == row[b].shared && seen_x == row[b].exclusive &&
               seen_ix == row[b].intending) || CLAIM_MENDED)
    :: else
    fi
  }
  a = 0; b = 0; seen_s = 0; seen_x = 0; seen_ix = 0; in_holders = false; in_line = false
}

/* --- lock.c */

#ifdef SLEEP
inline part_lock(p) {
  do
  :: atomic { lock[p] == 0 -> lock[p] = me + 1 + (slept -> SLEEPERS : 0); slept = false;
              d_step { check_index(p) }; break }
  :: atomic { lock[p] != 0 && !(lock[p] & SLEEPERS) -> lock[p] = lock[p] | SLEEPERS } /* CAS */
  :: atomic { lock[p] & SLEEPERS -> parked[me] = true; slept = true }; /* the kernel compares */
     !parked[me]
  od
}
#define PARK(i) if :: parked[i] -> parked[i] = false; woken = true :: else fi
inline part_unlock(p) {
#ifdef BUG_UNLOCK_APART
  word = lock[p];
  lock[p] = 0;
#else
  d_step { word = lock[p]; lock[p] = 0 };
#endif
  if
  :: atomic { word & SLEEPERS ->
       if
       :: parked[0] -> parked[0] = false
       :: parked[1] -> parked[1] = false
#if SLOTS > 2
       :: parked[2] -> parked[2] = false
#endif
       :: else
       fi
     }
  :: else
  fi;
  word = 0
}
#else
inline part_lock(p) {
  atomic { lock[p] == 0 -> lock[p] = me + 1; d_step { check_index(p) } }
}
inline part_unlock(p) { lock[p] = 0 }
#endif

/* --- table.c; the lock of the row's partition is held */

#ifdef BUG_TABLE
#define KEEPS_OUT(mode, held) ((mode) == X)
#else
#define KEEPS_OUT(mode, held) CONFLICT(mode, held)
#endif
#define BLOCKED(r, mode, mine) \
  (row[r].exclusive > ((mine) >> X & 1) || \
   (KEEPS_OUT(mode, S) && row[r].shared > ((mine) >> S & 1)) || \
   (KEEPS_OUT(mode, IX) && row[r].intending > ((mine) >> IX & 1)))

inline hold_link(r, n, mode) {
  d_step {
    row[r].holders = row[r].holders | BIT(n);
    if
    :: (mode) == S -> row[r].shared++
    :: (mode) == IX -> row[r].intending++
    :: else -> row[r].exclusive++
    fi
  }
}

inline hold_unlink(r, n, mode) {
  d_step {
    row[r].holders = row[r].holders & ~BIT(n);
    if
    :: (mode) == S -> row[r].shared--
    :: (mode) == IX -> row[r].intending--
    :: else -> row[r].exclusive--
    fi
  }
}

/* Behind all; who has the row already, behind those who do. */
inline queue_link(r, n) {
  d_step {
    a = row[r].waiters;
    do
    :: a > 0 && own[n] && !own[row[r].line[a - 1]] -> row[r].line[a] = row[r].line[a - 1]; a--
    :: else -> break
    od;
    row[r].line[a] = n;
    row[r].waiters++;
    a = 0
  }
}

inline queue_unlink(r, n) {
  d_step {
    a = 0; b = 0;
    do
    :: a == row[r].waiters -> break
    :: else ->
       if
       :: row[r].line[a] == n
       :: else -> row[r].line[b] = row[r].line[a]; b++
       fi;
       a++
    od;
    if
    :: b < row[r].waiters -> row[r].waiters = b; row[r].line[b] = 0
    :: else
    fi;
    a = 0; b = 0
  }
}

#define GRANT \
  d_step { claim[g] = CLAIM(r, MODE(word), HELD); check_exclusion(); check_order(g, before[g]) }; \
  queue_unlink(r, g); \
  hold_link(r, g, MODE(word))

/* Hands the row on: the first in the queue, as long as nothing is in its way. */
inline grant(r) {
  do
  :: row[r].waiters == 0 -> break
  :: else ->
     d_step { g = row[r].line[0]; word = claim[g] };
     if
     :: STATE(word) == WAIT ->
#ifndef BUG_GRANT_BLIND
        if
        :: BLOCKED(r, MODE(word), own[g]) -> g = 0; word = 0; break
        :: else
        fi;
#endif
#ifdef BUG_WAKE_FIRST
        d_step { wake[g] = true; asleep[g] = false };
#endif
        if
        :: atomic { claim[g] == word -> GRANT } /* by CAS */
        :: claim[g] != word
        fi;
#ifndef BUG_WAKE_FIRST
        if
        :: atomic { STATE(claim[g]) == HELD -> wake[g] = true; rung = rung | BIT(g) }
        :: else
        fi
#endif
     :: else -> /* its owner has given up, and could not have the lock */
        atomic { queue_unlink(r, g); claim[g] = CLAIM(r, MODE(word), LOOSE) }
     fi
  od
}

#define RING(n) \
  d_step { rung & BIT(n) -> rung = rung & ~BIT(n); asleep[n % NODES] = false }

/* What was granted is told once the lock is given up. */
inline wakes_send() {
  do
  :: RING(0)
  :: RING(1)
  :: RING(2)
  :: RING(3)
  :: rung == 0 -> break
  od
}

/* Claim KEPT: nobody takes from a living process what it holds. */
inline store_free(n) {
  d_step {
    assert(STATE(claim[n]) != HELD || SESSION(n) == me || !lives[SESSION(n)] || CLAIM_KEPT);
    claim[n] = FREE;
    late[n] = false;
    for (a : 0 .. NODES - 1) { before[a] = before[a] & ~BIT(n) }
    before[n] = 0;
    a = 0
  }
}

/* Takes a claim away, whatever its state: out of its list, then its word, and then the grant. */
inline claim_end(n) {
  was = claim[n];
  if
  :: STATE(was) == FREE || STATE(was) == LOOSE -> store_free(n)
  :: else ->
     if
     :: row[ROW(was)].holders & BIT(n) -> hold_unlink(ROW(was), n, MODE(was))
     :: else -> queue_unlink(ROW(was), n)
     fi;
#ifndef BUG_FREE_LATE
     store_free(n);
#endif
     grant(ROW(was));
#ifdef BUG_FREE_LATE
     store_free(n)
#endif
  fi;
  was = 0
}

/* Only with the lock. Changes no claim but GONE to LOOSE, before it grants. */
inline rebuild(p) {
#ifdef BUG_NO_REBUILD
  skip
#else
  d_step {
    for (a : 0 .. ROWS - 1) {
      if
      :: PART(a) == (p) ->
         row[a].holders = 0; row[a].shared = 0; row[a].exclusive = 0; row[a].intending = 0;
         do
         :: row[a].waiters > 0 -> row[a].waiters--; row[a].line[row[a].waiters] = 0
         :: else -> break
         od
      :: else
      fi
    }
    a = 0;
    k = 0
  };
  do
  :: atomic { k < NODES ->
#ifdef BUG_APART
       was = ROW(claim[k])
     };
     atomic {
       was = CLAIM(was, MODE(claim[k]), STATE(claim[k]));
#else
       was = claim[k];
#endif
       if
#ifdef BUG_REBUILD_MODE
       :: PART(ROW(was)) == (p) && STATE(was) == HELD -> hold_link(ROW(was), k, MODE(was) & X)
#else
       :: PART(ROW(was)) == (p) && STATE(was) == HELD -> hold_link(ROW(was), k, MODE(was))
#endif
       :: PART(ROW(was)) == (p) && STATE(was) == GONE -> claim[k] = CLAIM(ROW(was), MODE(was), LOOSE)
       :: PART(ROW(was)) == (p) && STATE(was) == WAIT -> found = found | BIT(k)
       :: else
       fi;
       was = 0;
       k++
     }
  :: k == NODES -> break
  od;
  atomic {
    do
    :: found == 0 -> break
    :: else -> /* in the order of seq */
       k = 0;
       do
       :: !(found & BIT(k)) -> k++
#ifndef BUG_REBUILD_ORDER
       :: (found & BIT(k)) && (found & before[k]) -> k++
#endif
       :: else -> break
       od;
       found = found & ~BIT(k);
       queue_link(ROW(claim[k]), k)
    od
  };
  for (k : 0 .. ROWS - 1) {
    if
    :: PART(k) == (p) -> grant(k)
    :: else
    fi
  }
  k = 0
#endif
}

/* --- take.c */

/* Which are taken out are LOOSE: their owner makes them FREE. */
inline look_gone(r) {
  part_lock(PART(r));
  for (k : 0 .. NODES - 1) {
    if
    :: (row[r].holders & BIT(k)) && STATE(claim[k]) == GONE ->
       atomic { hold_unlink(r, k, MODE(claim[k])); claim[k] = CLAIM(r, MODE(claim[k]), LOOSE) }
    :: else
    fi
  }
  k = 0;
  grant(r);
  part_unlock(PART(r));
  wakes_send()
}

#define GONE_HOLDS(n) (STATE(claim[n]) == GONE && (row[r].holders & BIT(n)))
#if NODES > 3
#define GONE_HOLDER (GONE_HOLDS(0) || GONE_HOLDS(1) || GONE_HOLDS(2) || GONE_HOLDS(3))
#elif NODES > 2
#define GONE_HOLDER (GONE_HOLDS(0) || GONE_HOLDS(1) || GONE_HOLDS(2))
#else
#define GONE_HOLDER (GONE_HOLDS(0) || GONE_HOLDS(1))
#endif

/* got: the row is held. */
inline take(n, mode, mine) {
  part_lock(PART(r));
  own[n] = mine; /* before the lock, in the code */
  if
  :: !BLOCKED(r, mode, own[n]) &&
     (row[r].waiters == 0 || (own[n] && !own[row[r].line[0]])
#ifdef BUG_PASS
      || true
#endif
     ) ->
     hold_link(r, n, mode);
     d_step {
       claim[n] = CLAIM(r, mode, HELD);
       check_exclusion();
       check_order(n, 255)
     };
     part_unlock(PART(r));
     got = true
  :: else ->
     d_step {
       wake[n] = false;
       before[n] = 0;
       for (a : 0 .. NODES - 1) { before[n] = before[n] | (a != n && STATE(claim[a]) == WAIT -> BIT(a) : 0) }
       a = 0
     };
     queue_link(r, n);
     d_step { claim[n] = CLAIM(r, mode, WAIT); waits[me] = true };
     part_unlock(PART(r));
     do
     :: STATE(claim[n]) != WAIT -> got = true; break
     :: atomic { STATE(claim[n]) == WAIT -> wake[n] = false };
        if
        :: STATE(claim[n]) != WAIT -> got = true; break
        :: STATE(claim[n]) == WAIT
        fi;
        d_step { asleep[n] = !wake[n] }; /* the kernel compares */
        if
        :: !asleep[n]
#if DEATHS
#ifndef BUG_NO_POLL
        :: asleep[n] && STATE(claim[n]) != WAIT -> asleep[n] = false
#endif
#endif
#ifdef LATE
#ifndef BUG_NO_LOOK
        :: asleep[n] && GONE_HOLDER -> asleep[n] = false; look_gone(r)
#endif
        :: asleep[n] && timeouts < TIMEOUTS ->
           asleep[n] = false;
           timeouts++;
           if
           :: d_step { STATE(claim[n]) == WAIT -> claim[n] = CLAIM(r, mode, GONE); late[n] = true }; break
           :: STATE(claim[n]) != WAIT -> got = true; break
           fi
#endif
        fi
     od;
     atomic { waits[me] = false };
     assert(!got || claim[n] == CLAIM(r, mode, HELD) || CLAIM_KEPT)
  fi
}

/* With the lock, or without it, later. */
inline give_back(n) {
  if
  :: part_lock(PART(ROW(claim[n])));
     atomic { assert(STATE(claim[n]) == HELD || late[n] || CLAIM_KEPT); p = PART(ROW(claim[n])) };
     claim_end(n);
     part_unlock(p);
     p = 0;
     wakes_send()
#ifdef LATE
  :: d_step { STATE(claim[n]) == HELD ->
       claim[n] = CLAIM(ROW(claim[n]), MODE(claim[n]), GONE);
       late[n] = true
     }
#endif
  fi
}

proctype Program(byte me) {
  byte r, rounds, was, word, g, k, p, rung;
  byte mode;
  bool got, slept, fresh;
  do
  ::
#ifdef REUSE
     /* slot.c: the byte MEND first, so that no mender is at work on the slot when it is taken. */
     if
     :: lives[me]
#ifdef BUG_REUSED
     :: d_step { !lives[me] -> lives[me] = true };
#elif defined(BUG_OPEN_UNGUARDED)
     :: d_step { !lives[me] && !state[me] -> lives[me] = true };
#else
     :: d_step { !lives[me] && !state[me] && mends[me] == NONE -> mends[me] = me; lives[me] = true };
#endif
        fresh = true
     fi;
#endif
     {
       if
       :: atomic { fresh -> fresh = false };
          state[me] = true;
          d_step {
            mends[me] = (mends[me] == me -> NONE : mends[me]);
            for (a : 0 .. NODES - 1) { claim[a] = (SESSION(a) == me -> FREE : claim[a]) }
            a = 0
          }
       :: else
       fi;
       do
       :: late[NODE(me)] -> give_back(NODE(me))
#ifdef ROUNDS
       :: late[NODE(me)] && rounds == ROUNDS -> goto endidle /* it does not come back soon */
#endif
       :: !late[NODE(me)] ->
#ifdef ROUNDS
          if
          :: rounds == ROUNDS -> goto endidle
          :: else -> rounds++
          fi;
#endif
          if
#ifndef FEW
          :: mode = S
#endif
          :: mode = X
#ifdef INTENTIONS
          :: mode = IX
#endif
          fi;
#if ROWS > 1
          if
          :: r = 0
          :: r = 1
          fi;
#endif
          take(NODE(me), mode, 0);
#if defined(UPGRADE) || defined(TWO)
          if
          :: got && me == 0 && r == 0 ->
             got = false;
#ifdef UPGRADE
             take(1, X, BIT(mode));
#else
             r = 1;
             take(1, mode, 0);
             r = 0;
#endif
             if
             :: got -> got = false; give_back(1)
             :: else
             fi;
             do
             :: late[1] -> give_back(1)
             :: else -> break
             od;
             got = true
          :: else
          fi;
#endif
          if
          :: got -> got = false; give_back(NODE(me))
          :: else
          fi;
          atomic { r = 0; mode = 0 }
       od;
endidle: false
     } unless {
       !lives[me];
       d_step { r = 0; rounds = 0; was = 0; word = 0; g = 0; k = 0; p = 0; rung = 0; got = false; slept = false; mode = 0; fresh = false }
     };
#ifdef REUSE
     skip
#else
     break
#endif
  od
}

#if MENDERS
/* lock.c, mend.c: where the lock is a dead slot's, too, it is taken over, and the partition rebuilt. */
inline dead_lock(p) {
  do
  :: part_lock(p); break
#ifndef BUG_MENDS_ONE
  :: atomic { lock[p] != 0 && !lives[(lock[p] & ~SLEEPERS) - 1] -> e = (lock[p] & ~SLEEPERS) - 1 };
     if
     :: d_step { mends[e] == NONE -> mends[e] = me };
        if
        :: d_step { (lock[p] & ~SLEEPERS) == e + 1 && !lives[e] -> lock[p] = me + 1 | SLEEPERS };
           rebuild(p);
           atomic { mends[e] = NONE; e = 0 };
           break
        :: else -> atomic { mends[e] = NONE; e = 0 }
        fi
     :: mends[e] != NONE -> e = 0
     fi
#endif
  od
}

/* The next claim of the dead slot; those that wait first. */
inline next_claim() {
  d_step {
    i = 0;
    do
    :: i < NODES && (SESSION(i) != d || STATE(claim[i]) != WAIT) -> i++
    :: else -> break
    od;
#ifdef BUG_HELD_FIRST
    i = NODES;
#endif
    if
    :: i == NODES ->
       i = 0;
       do
       :: i < NODES && (SESSION(i) != d || STATE(claim[i]) == FREE) -> i++
       :: else -> break
       od
    :: else
    fi
  }
}

#ifdef SUCCESSOR
#define READY (me == PROGRAMS || !lives[PROGRAMS])
#else
#define READY true
#endif
#define DEAD(i) d_step { READY && d == NONE && state[i] && !lives[i] -> d = i }

proctype Mender(byte me) {
  byte d = NONE, e, i, was, word, g, k, p, rung, found;
  bool slept;
  {
enddead:
    do
    :: DEAD(0)
    :: DEAD(1)
#if SLOTS > 2
    :: DEAD(2)
#endif
#if SLOTS > 3
    :: DEAD(3)
#endif
    :: atomic { d != NONE -> skip };
       if
#ifdef BUG_TWO_MENDERS
       :: true
#else
       :: d_step { mends[d] == NONE -> mends[d] = me }
#endif
       fi;
       if
#ifdef BUG_OPEN_UNGUARDED
       :: !lives[d] ->
#else
       :: state[d] && !lives[d] ->
#endif
          for (i : 0 .. PARTS - 1) {
            if
            :: d_step { (lock[i] & ~SLEEPERS) == d + 1 -> lock[i] = me + 1 | SLEEPERS };
               rebuild(i);
               part_unlock(i);
               wakes_send()
            :: (lock[i] & ~SLEEPERS) != d + 1
            fi
          }
          do
          :: next_claim();
             if
             :: i == NODES -> break
             :: else ->
                p = PART(ROW(claim[i]));
                dead_lock(p);
                claim_end(i);
                part_unlock(p);
                p = 0;
                wakes_send()
             fi
          od;
          i = 0;
          state[d] = false
       :: else
       fi;
       d_step { mends[d] = (mends[d] == me -> NONE : mends[d]); d = NONE }
    od
  } unless { !lives[me] }
}
#endif

#if DEATHS
#ifdef SUCCESSOR
#define MAY_DIE(i) ((i) < PROGRAMS || !lives[0]) /* a Mender that is at work */
#else
#define MAY_DIE(i) true
#endif

/* A process is killed: the kernel frees its bytes. */
inline kill(i) {
  d_step {
    deaths < DEATHS && lives[i] && MAY_DIE(i) ->
    lives[i] = false;
    deaths++;
    parked[i] = false;
    for (a : 0 .. SLOTS - 1) { mends[a] = (mends[a] == i -> NONE : mends[a]) }
    for (a : 0 .. NODES - 1) {
      if
      :: SESSION(a) == i -> asleep[a] = false; late[a] = false
      :: else
      fi
    }
    if
    :: i < PROGRAMS -> waits[i % PROGRAMS] = false
    :: else
    fi;
    a = 0
  }
}

active proctype Fate() {
  byte deaths;
endfate:
  do /* FEW: of two alike, one */
  :: kill(0)
#ifndef FEW
  :: kill(1)
#endif
#if SLOTS > 2 && (PROGRAMS == 2 || !defined(FEW))
  :: kill(2)
#endif
#if SLOTS > 3 && !defined(FEW)
  :: kill(3)
#endif
  od
}
#endif

#ifdef LTL
/* With weak fairness: whoever waits is granted it, or leaves. */
ltl granted0 { [] (waits[0] -> <> !waits[0]) }
ltl granted1 { [] (waits[1] -> <> !waits[1]) }
#endif

init {
  atomic {
    byte i;
    for (i : 0 .. SLOTS - 1) { lives[i] = true; state[i] = true; mends[i] = NONE }
    for (i : 0 .. PROGRAMS - 1) { run Program(i) }
#if MENDERS
    for (i : PROGRAMS .. SLOTS - 1) { run Mender(i) }
#endif
    i = 0
  }
}
