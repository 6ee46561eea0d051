/*
 * leased.pml - leases on the table of locks in shared memory: records and claims of slot 0, which no
 * process owns, made and unmade by any of them; csrc/stores/embedded/leased.c, mend.c. What is done
 * under the lock of one partition is one step here: how that lock, and the index, survive a death is
 * the matter of claims.pml.
 *
 * A Program locks one row or two as a session, and perhaps makes a lease of that: it sets a record
 * aside, adds claims beside its session's, stores the lease's end, and gives its session's claims
 * back. Whoever meets a lease that is over ends and unmakes it. A program may be killed between any
 * two steps (DEATHS); the Mender then cleans up, and may be killed and begun again (RESTARTS). A
 * lease may be revoked by the other program (REVOKES); its holder's belief then counts as ended. Time
 * passes at any moment.
 *
 * Nobody owns the work of unmaking a lease: each step names the lease by its stamp, and is done by
 * whoever comes first. The words `used` and `end` carry the stamp, so that a CAS fails on a record
 * that is another lease's now. A node that is set aside (RESERVED) is its process' alone, whatever
 * record it names from before.
 *
 * Memory order: claims HELD, then `end`: release; the reader loads `used` (acquire), then `end`
 * (acquire): with `end` first, a lease that is published in between looks made and ended
 * (BUG_END_FIRST). `end` before the session's claims are FREE: release on both. The CASes of `used`
 * and `end`: acq_rel. Setting a node aside: acquire, and its freeing release.
 */

/* For the messages of spin: which claim an assertion belongs to. Always false. */
hidden byte CLAIM_EXCLUSION, CLAIM_WHOLE, CLAIM_KEPT;
#define PROGRAMS 2
#ifndef CALLS
#define CALLS 2
#endif
#ifndef REFRESHES
#define REFRESHES 1
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#ifndef RESTARTS
#define RESTARTS 0
#endif
#ifndef REVOKES
#define REVOKES 0
#endif
#ifndef TICKS
#define TICKS 1
#endif
#define RECORDS 2
#define NODES 2
#define ROWS 2
#define TTL 1
/* Where the Mender is killed, too, the program that it mends always makes a lease of both rows. */
#define SURE (RESTARTS && me == 0)
#define NONE 15
#define BIT(i) (1 << (i))

byte now = 1, revokes;
bool killed[PROGRAMS], mended[PROGRAMS];

/* --- sessions' claims: who holds the row */
byte session[ROWS] = NONE;

/* --- nodes of slot 0 */
#define FREE 0
#define RESERVED 1
#define HELD 2
byte claim[NODES];       /* with the row, or who has set it aside, in one word: << 2 */
byte node_record[NODES] = NONE;
byte node_stamp[NODES];
byte chain[NODES] = NONE;

/* --- records */
#define MAKES 1
#define MADE 2
#define UNMAKES 3
#define USED(stamp, who, how) ((how) | (who) << 2 | (stamp) << 6)
#define HOW(word) ((word) & 3)
#define WHO(word) ((word) >> 2 & 15)
#define STAMP(word) ((word) >> 6)
short used[RECORDS];
byte end[RECORDS]; /* with the stamp: << 4 */
byte first[RECORDS] = NONE;
byte stamps = 1;
#ifdef BUG_SAME_END
#define END(time, stamp) (time)
#define IS_OF(end, stamp) true
#else
#define END(time, stamp) ((time) | (stamp) << 4)
#define IS_OF(end, stamp) ((end) >> 4 == (stamp))
#endif
#ifdef BUG_OWNED
#define IS_MADE(word) (HOW(word) == MADE || HOW(word) == UNMAKES)
#else
#define IS_MADE(word) (HOW(word) == MADE)
#endif
#define TIME(word) ((word) & 15)

/* --- what the programs believe, and what a lease is of: sets of rows */
byte until[PROGRAMS], believed[PROGRAMS];
byte covers[RECORDS];

hidden byte a, b, c;

/* Claims EXCLUSION; WHOLE: a lease has a claim of each of its rows. */
inline check() {
  for (a : 0 .. ROWS - 1) {
    for (b : 0 .. PROGRAMS - 1) {
      assert(!(until[b] > now && (believed[b] & BIT(a))) || CLAIM_EXCLUSION ||
             ((session[a] == NONE || session[a] == b || killed[session[a] % PROGRAMS]) &&
              !(until[1 - b] > now && (believed[1 - b] & BIT(a)))))
    }
    for (b : 0 .. RECORDS - 1) {
      if
      :: TIME(end[b]) > now && (covers[b] & BIT(a)) ->
         c = 0;
         do
         :: c < NODES && !(claim[c] == (HELD | a << 2) && node_record[c] == b) -> c++
         :: else -> break
         od;
         assert(c < NODES || CLAIM_WHOLE)
      :: else
      fi
    }
  }
  a = 0; b = 0; c = 0
}

active proctype Clock() {
endclock:
  do
  :: d_step { now <= TICKS || TIME(end[0]) > now || TIME(end[1]) > now -> now++ }
  od
}

/* Its unmaker can do so no more. */
#define STRANDED(x) (HOW(used[x]) == UNMAKES && (WHO(used[x]) == me || (WHO(used[x]) < PROGRAMS && killed[WHO(used[x]) % PROGRAMS])))

/* hl__shm_lease_unmake: of the lease with the stamp s in the record x. */
inline unmake() {
#ifdef BUG_OWNED
  /* One process at a time does it, and may give up. */
  if
  :: d_step { (HOW(used[x]) == MADE && STAMP(used[x]) == s) || (STRANDED(x) && STAMP(used[x]) == s) -> used[x] = USED(s, me, UNMAKES) };
     if
     :: true
     :: d_step {
          for (a : 0 .. NODES - 1) {
            claim[a] = ((claim[a] & HELD) && node_record[a] == x && node_stamp[a] == STAMP(used[x]) -> FREE : claim[a])
          }
          used[x] = 0; covers[x] = 0; first[x] = NONE; a = 0
        }
     fi
  :: else
  fi;
#else
#ifdef BUG_CHAIN
  k = first[x];
  do
  :: k == NONE || node_record[k % NODES] != x || node_stamp[k % NODES] != s -> break
  :: else ->
     d_step {
       claim[k] = (claim[k] & HELD -> FREE : claim[k]);
       check();
       k = chain[k]
     }
  od;
#else
  k = 0;
  do
  :: k == NODES -> break
  :: else ->
     d_step {
       if
#ifdef BUG_RESERVED_FREED
       :: claim[k] != FREE && node_record[k] == x ->
#elif defined(BUG_SAME_USED)
       :: (claim[k] & HELD) && node_record[k] == x ->
#else
       :: (claim[k] & HELD) && node_record[k] == x && node_stamp[k] == s ->
#endif
          claim[k] = FREE;
          check()
       :: else
       fi;
       k++
     }
  od;
#endif
  k = 0;
  d_step {
    if
    :: HOW(used[x]) == MADE && STAMP(used[x]) == s ->
       used[x] = 0;
       for (a : 0 .. NODES - 1) {
         assert(!(claim[a] & HELD) || node_record[a] != x || CLAIM_WHOLE)
       }
       covers[x] = 0; first[x] = NONE; a = 0
    :: else
    fi
  };
#endif
  skip
}

/* Whose claim is in the way of row r: if that lease is over, it is ended. */
inline look(r) {
  x = NONE;
  d_step {
    for (a : 0 .. NODES - 1) {
      if
      :: claim[a] == (HELD | (r) << 2) -> x = node_record[a]
      :: else
      fi
    }
    a = 0
  };
  if
  :: x == NONE
  :: else ->
#ifdef BUG_END_FIRST
     e = end[x];
     word = used[x];
#else
     word = used[x];
     e = end[x];
#endif
     s = STAMP(word);
     if
     :: !IS_MADE(word) || TIME(e) > now || (e != 0 && !IS_OF(e, s))
     :: else ->
#ifdef BUG_EXPIRY_STORED
        end[x] = 0;
        unmake()
#else
        if
        :: e == 0 -> unmake()
        :: d_step { e != 0 && end[x] == e -> end[x] = 0 }; unmake()
        :: e != 0 && end[x] != e
        fi
#endif
     fi
  fi;
  d_step { x = 0; s = 0; e = 0; word = 0 }
}

#define LEASED(r) (claim[0] == (HELD | (r) << 2) || claim[1] == (HELD | (r) << 2))

#define IS_OVER(k, r) \
  (claim[k] == (HELD | (r) << 2) && TIME(end[node_record[k] % RECORDS]) <= now && \
   (HOW(used[node_record[k] % RECORDS]) == MADE || STRANDED(node_record[k] % RECORDS)))

/* Looks once as it comes, and then when a lease is over. */
inline take(r) {
  early = true;
  do
  :: d_step { session[r] == NONE && !LEASED(r) -> session[r] = me; early = false; check() }; break
  :: d_step { early && LEASED(r) -> early = false }; look(r)
  :: session[r] == NONE && (IS_OVER(0, r) || IS_OVER(1, r)) -> look(r)
  od
}

/* hl__shm_lease_claims. */
inline lease_claim(r) {
  if
  :: d_step { claim[0] == FREE -> claim[0] = RESERVED | me << 2; k = 0 }
  :: d_step { claim[0] != FREE && claim[1] == FREE -> claim[1] = RESERVED | me << 2; k = 1 }
  fi;
  d_step { node_record[k] = x; node_stamp[k] = s; chain[k] = first[x]; first[x] = k };
  d_step {
    assert(claim[k] == (RESERVED | me << 2) || CLAIM_KEPT);
    claim[k] = HELD | (r) << 2;
    k = 0
  }
}

proctype Program(byte me) {
  byte calls, rows, x, s, e, k, refreshes, mine;
  bool early;
  short word;
  {
    do
    :: calls == CALLS -> break
    :: atomic { calls < CALLS -> calls++ };
       if
       :: !SURE -> rows = 1
       :: rows = 3
       fi;
#if REVOKES
       if
       :: true
       :: d_step { revokes < REVOKES && HOW(used[0]) == MADE && end[0] != 0 ->
            revokes++;
            s = STAMP(used[0]);
            end[0] = 0;
            until[WHO(used[0]) % PROGRAMS] = 0;
            believed[WHO(used[0]) % PROGRAMS] = 0
          };
          unmake()
       fi;
#endif
       take(0);
       if
       :: rows == 3 -> take(1)
       :: else
       fi;
       if
       :: !SURE
       :: now <= TICKS || SURE ->
          /* to_lease: a record is set aside, with a stamp that no other lease has had. */
          if
          :: d_step { used[0] == 0 -> x = 0; s = stamps; stamps++; used[x] = USED(s, me, MAKES) }
          :: d_step { used[0] != 0 && used[1] == 0 -> x = 1; s = stamps; stamps++; used[x] = USED(s, me, MAKES) }
          fi;
#ifdef BUG_END_EARLY
          d_step { covers[x] = rows; mine = END(now + TTL, s); end[x] = mine; check() };
#endif
#ifdef BUG_BACK_FIRST
          d_step { session[0] = NONE; session[1] = (session[1] == me -> NONE : session[1]) };
#endif
          lease_claim(0);
          if
          :: rows == 3 -> lease_claim(1)
          :: else
          fi;
          /* hl__shm_lease_publish. */
#ifndef BUG_END_EARLY
          d_step { covers[x] = rows; mine = END(now + TTL, s); end[x] = mine; check() };
#endif
          d_step { until[me] = TIME(mine); believed[me] = rows; check() };
          d_step { used[x] = USED(s, me, MADE) };
          d_step { session[0] = (session[0] == me -> NONE : session[0]) };
          d_step { session[1] = (session[1] == me -> NONE : session[1]) };
          refreshes = 0;
          do
          :: refreshes < REFRESHES && now <= TICKS ->
             refreshes++;
             e = end[x];
             word = STAMP(used[x]);
             if
             :: d_step { e != 0 && word == s && IS_OF(e, s) && end[x] == e ->
                  mine = END(now + TTL, s); end[x] = mine; until[me] = TIME(mine); believed[me] = rows; check() }
             :: else -> d_step { until[me] = 0; believed[me] = 0 }; break
             fi
          :: true ->
             /* hl__shm_lease_end. */
             d_step { until[me] = 0; believed[me] = 0 };
             e = mine;
             if
             :: d_step { end[x] == e && e != 0 -> end[x] = 0 }; unmake()
             :: else
             fi;
             break
          od
       fi;
       x = 0;
       d_step { session[0] = (session[0] == me -> NONE : session[0]) };
       d_step { session[1] = (session[1] == me -> NONE : session[1]) };
       atomic { rows = 0; x = 0; s = 0; e = 0; mine = 0; word = 0; refreshes = 0 }
    od
  } unless { killed[me] }
}

#if DEATHS
bool restart;
byte restarts;
#define SET_ASIDE(i) \
  d_step { claim[i] == (RESERVED | d << 2) -> claim[i] = FREE }

/* mend.c: what the dead program was making, and its session's claims. */
active proctype Mender() {
  byte d, x, s, k;
  short word;
  byte me = PROGRAMS;
endmender:
  do
  :: d_step { killed[0] && !mended[0] -> d = 0; x = 0 };
     {
       do
       :: x == RECORDS -> break
       :: x < RECORDS ->
          word = used[x];
          if
          :: HOW(word) == MAKES && WHO(word) == d ->
             /* Published or not: it is made, and where its end is 0, it is over. */
             d_step { used[x] = USED(STAMP(word), d, MADE) };
             if
             :: end[x] == 0 -> s = STAMP(word); unmake()
             :: else
             fi
          :: HOW(word) == MADE && end[x] == 0 -> s = STAMP(word); unmake()
          :: else
          fi;
          atomic { x++; s = 0; word = 0 }
       od;
       do
       :: SET_ASIDE(0)
       :: SET_ASIDE(1)
            :: else -> break
       od;
       x = 0;
       d_step { session[0] = (session[0] == d -> NONE : session[0]) };
       d_step { session[1] = (session[1] == d -> NONE : session[1]) };
       d_step { mended[d] = true; x = 0 }
     } unless { d_step { restart -> restart = false; x = 0; s = 0; k = 0; word = 0 } }
  od
}

active proctype Fate() {
  byte deaths;
endfate:
  do
  :: d_step { deaths < DEATHS && !killed[0] -> killed[0] = true; until[0] = 0; believed[0] = 0; deaths++ }
#if RESTARTS
  :: d_step { restarts < RESTARTS && !restart && killed[0] && !mended[0] -> restart = true; restarts++ }
#endif
  od
}
#endif

init {
  atomic { run Program(0); run Program(1) }
}
