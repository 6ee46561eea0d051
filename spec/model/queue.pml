/*
 * queue.pml - one row of the embedded store: who holds it, who waits for it, how a
 * sleeper is woken, and what is left of a process that is killed. See the proof at the
 * top of csrc/stores/file/queue.c, whose names W1 to W5 and R1 to R4 are used here.
 *
 * A Session is a thread with its session (table.c: hl__file_row_try, hl__file_row_wait,
 * hl__file_entry_grant, hl__file_row_release; queue.c: hl__file_queue_wait). What the
 * kernel does for one call, and each access to a shared word, is one step; between two
 * of them anything may happen, though in its own process only what needs no mutex.
 *
 * The words `events` and `wakes` would count for ever. Instead each reader has a bit
 * that says whether the word is still as he saw it; so have the readers of `waiters`.
 */

/* For the messages of spin: which claim an assertion belongs to. Always false. */
hidden byte CLAIM_EXCLUSION, CLAIM_IN_ORDER, CLAIM_COUNT, CLAIM_AS_STRONG;
#if defined(PAIR)       /* two processes of one session each, that want it exclusively */
#define SESSIONS 2
#define PROCESS(s) (s)
#define WANTS_ALL(s) true
#define CONVERTS(s) false
#elif defined(CONVERSION) /* the same; the first one shares, extends, and fails then */
#define SESSIONS 2
#define PROCESS(s) (s)
#define WANTS_ALL(s) ((s) == 1)
#define CONVERTS(s) ((s) == 0)
#else                   /* two sessions of one process, and one of another */
#define SESSIONS 3
#define PROCESS(s) ((s) == 2)
#define WANTS_ALL(s) ((s) != 1)
#define CONVERTS(s) false
#endif
#define PROCESSES 2
#define NONE 255
#ifdef OPPOSITE
#define TICKETS 4
#else
#define TICKETS 8 /* 2^26 in the code */
#endif
#define BIT(n) (1 << (n))

/* --- the kernel's locks: sets of processes, sets of tickets */
byte row_shared, row_exclusive;
byte locked[PROCESSES];
/* --- the control file */
byte tickets;
byte waiters;            /* the count */
bool counted[SESSIONS];  /* nobody has changed `waiters` since it was read */
bool changed[SESSIONS];  /* `events`, or `wakes`, since it was read */
bool asleep[SESSIONS];
/* --- a process: the stripe's mutex, the entry, its queue */
bool mutex[PROCESSES], dead[PROCESSES];
bool exclusive[PROCESSES];
byte shared[PROCESSES];
byte drawn[PROCESSES];   /* stripe->tickets */
byte first[PROCESSES] = NONE, second[PROCESSES] = NONE;
byte ticket[SESSIONS] = NONE, drew[SESSIONS] = NONE;
bool first_in[SESSIONS]; /* it sleeps on `events`, the others on their own word */
bool granted[SESSIONS], interrupted[SESSIONS];
/* --- for the claims */
bool waits[SESSIONS];       /* in the queue */
bool holds[SESSIONS], holds_all[SESSIONS];
byte older[SESSIONS];       /* who waited, for all to see, before it began */

#define P PROCESS(s)
#define LOCK_MUTEX atomic { !mutex[P] -> mutex[P] = true }
#define UNLOCK_MUTEX mutex[P] = false
#define DEAD (dead[P])

/* Whoever read `waiters` sees that it has changed: that is its version. */
inline touch() {
  k = 0;
  do
  :: k < SESSIONS -> counted[k] = false; k++
  :: else -> break
  od;
  k = 0
}

/* R3 and R4: those who sleep on `events`, in all processes. */
inline signal_all() {
  d_step {
    k = 0;
    do
    :: k < SESSIONS ->
       if
       :: first_in[k] -> changed[k] = true
       :: else
       fi;
       k++
    :: else -> break
    od;
    k = 0
  };
  d_step {
    k = 0;
    do
    :: k < SESSIONS ->
       if
       :: first_in[k] -> asleep[k] = false
       :: else
       fi;
       k++
    :: else -> break
    od;
    k = 0
  }
}

/* hl__file_queue_wake: R2. */
inline queue_wake() {
  if
  :: waiters != 0 -> signal_all()
  :: waiters == 0
  fi
}

/* waiter_wake: of this process. */
inline waiter_wake(w) {
  d_step {
    if
    :: w != NONE && !first_in[w] -> changed[w] = true; asleep[w] = false
    :: else
    fi
  }
}

/* table.c, hl__file_entry_grant. */
inline grant(all, conversion) {
  d_step {
    got = false;
    if
    :: exclusive[P] || (all && shared[P] > conversion)
    :: else ->
       if
       :: all && !((row_shared | row_exclusive) & ~BIT(P)) ->
          row_exclusive = BIT(P);
          row_shared = 0;
          got = true
       :: !all && (shared[P] > 0 || !(row_exclusive & ~BIT(P))) ->
          row_shared = row_shared | BIT(P);
          got = true
       :: else
       fi
    fi;
    if
    :: got && all -> exclusive[P] = true; shared[P] = shared[P] - conversion
    :: got && !all -> shared[P]++
    :: else
    fi
  }
}

/* Claim EXCLUSION. Claim IN_ORDER: whoever waited with a ticket before this one began
   has had the row, or has left. */
inline hold(all, order) {
  d_step {
    holds[s] = true;
    waits[s] = false;
    holds_all[s] = all;
    k = 0;
    do
    :: k < SESSIONS ->
       assert(k == s || !holds[k] || (!holds_all[k] && !all) || CLAIM_EXCLUSION);
#ifndef OPPOSITE
       assert(!order || !(older[s] & BIT(k)) || !waits[k] || CLAIM_IN_ORDER);
#endif
       older[k] = older[k] & ~BIT(s);
       k++
    :: else -> break
    od;
    k = 0;
    older[s] = 0
  }
}

/* queue.c, ticket_older: another process has an older ticket. */
#define HALF (TICKETS / 2)
#ifdef BUG_CIRCLE
#define OLDER HALF
#else
#define OLDER (HALF - 1)  /* of two that lie opposite, none is older */
#endif
#define HALF_BITS (BIT(OLDER) - 1)
#define FROM(t) (((t) + TICKETS - OLDER) % TICKETS)
#define HALF_BEFORE(t) ((HALF_BITS << FROM(t) | HALF_BITS >> TICKETS - FROM(t)) & \
                        (BIT(TICKETS) - 1))
#define AHEAD(p) (p != P && (locked[p] & HALF_BEFORE(ticket[s])))
#define TICKET_OLDER (AHEAD(0) || AHEAD(1))
#define ELSEWHERE ((P != 0 && locked[0]) || (P != 1 && locked[1]))

/* Assumed: between the drawing of a ticket and the grant, fewer than half the circle
   are drawn, which is 2^25. So nobody begins while an old one is about. OPPOSITE: half
   of it may be; then the order is lost, and nothing else. */
#define BEHIND(k) (drew[k] != NONE && (tickets + TICKETS - drew[k]) % TICKETS >= 2)

/* W1 and W2. */
inline ticket_take() {
  if
  :: ticket[s] == NONE ->
     d_step { drew[s] = tickets; tickets = (tickets + 1) % TICKETS };
     d_step { locked[P] = locked[P] | BIT(drew[s]) };
#ifndef BUG_COUNT_LATE
     d_step { ticket[s] = drew[s]; drawn[P]++; waiters++; touch() }
#else
     d_step { ticket[s] = drew[s]; drawn[P]++ }
#endif
  :: else
  fi
}

/* Counted down while the byte is still locked: see stale_heal. */
inline ticket_drop(w) {
  if
  :: ticket[w] != NONE ->
#ifdef BUG_DROP_ORDER
     d_step { locked[P] = locked[P] & ~BIT(ticket[w]) };
#endif
     d_step { assert(waiters > 0 || CLAIM_COUNT); waiters--; touch() };
     d_step {
       locked[P] = locked[P] & ~BIT(ticket[w]);
       ticket[w] = NONE;
       drew[w] = NONE;
       drawn[P]--;
       /* For the model only: numbers begin anew when nobody waits. */
       if
       :: first[0] == NONE && first[1] == NONE -> tickets = 0
       :: else
       fi
     }
  :: else
  fi
}

/* queue_enter: who converts goes before all others but those who convert. */
inline queue_enter() {
  d_step {
    if
    :: first[P] == NONE -> first[P] = s
    :: first[P] != NONE && converts && !CONVERTS(first[P]) -> second[P] = first[P]; first[P] = s
    :: else -> second[P] = s
    fi
  }
}

inline queue_leave(w) {
  d_step {
    waits[w] = false;
    k = 0;
    do
    :: k < SESSIONS -> older[k] = older[k] & ~BIT(w); k++
    :: else -> break
    od;
    k = 0;
    if
    :: first[P] == w -> first[P] = second[P]; second[P] = NONE
    :: second[P] == w -> second[P] = NONE
    :: else
    fi
  }
}

/* hl__file_queue_elsewhere, and stale_heal. */
inline look_elsewhere() {
  d_step { seen = waiters; counted[s] = true };
  if
  :: seen == 0 -> elsewhere = false
  :: else ->
     if
     :: ELSEWHERE -> elsewhere = true
     :: !ELSEWHERE ->
        elsewhere = false;
        if
        :: drawn[P] == 0 ->
#ifdef BUG_HEAL
           d_step { waiters = 0; touch() }
#else
           d_step {
             if
             :: counted[s] -> waiters = 0; touch()
             :: else
             fi
           }
#endif
        :: else
        fi
     fi
  fi;
  seen = 0
}

proctype Session(byte s) {
  byte k, seen, w, rounds;
  bool got, elsewhere, queue, crowded, all, converts, order;

  {
    skip;
idle:
#ifdef ROUNDS
    if
    :: rounds == ROUNDS -> goto end
    :: else -> rounds++
    fi;
#endif
    !BEHIND(0) && !BEHIND(1) && !BEHIND(SESSIONS - 1);
    /* file.c, rows_crowded. */
    d_step {
      crowded = waiters != 0;
      order = true;
      k = 0;
      older[s] = 0;
      do
      :: k < SESSIONS ->
         if
         :: waits[k] && ticket[k] != NONE && PROCESS(k) != P -> older[s] = older[s] | BIT(k)
         :: else
         fi;
         k++
      :: else -> break
      od;
      k = 0;
      all = WANTS_ALL(s) && !CONVERTS(s);
      converts = false
    };
again:
    /* table.c, hl__file_row_try. */
    skip;
    LOCK_MUTEX;
#ifdef BUG_PASS
    queue = first[P] != NONE && !converts;
#else
    if
    :: converts -> queue = first[P] != NONE && CONVERTS(first[P]) && holds[first[P]]
    :: else ->
       queue = first[P] != NONE;
       if
       :: !queue && crowded -> look_elsewhere(); queue = elsewhere; elsewhere = false
       :: else
       fi
    fi;
#endif
    got = false;
    if
    :: !queue -> grant(all, converts)
    :: else
    fi;
    queue = false;
    if
    :: got -> hold(all, !converts); UNLOCK_MUTEX; goto held
    :: else
    fi;
    UNLOCK_MUTEX;
    crowded = false;

    /* queue.c, hl__file_queue_wait. */
    LOCK_MUTEX;
    queue_enter();
    atomic { granted[s] = false; waits[s] = true };
    do
    :: granted[s] -> break
    :: else ->
       got = false;
       if
       :: first[P] == s ->
          ticket_take();
#ifdef BUG_SEEN_LATE
          if
          :: !converts && TICKET_OLDER
          :: else -> grant(all, converts)
          fi;
#endif
          d_step { first_in[s] = true; changed[s] = false }; /* W3 */
#ifndef BUG_SEEN_LATE
          if                                                 /* W4 */
          :: !converts && TICKET_OLDER
          :: else -> grant(all, converts)
          fi;
#endif
#ifdef BUG_COUNT_LATE
          if
          :: !got -> d_step { waiters++; touch() }
          :: else -> d_step { waiters++; touch() }
          fi;
#endif
          if
          :: got -> break
          :: else
          fi
       :: else -> d_step { first_in[s] = false; changed[s] = false }
       fi;
       if
       :: interrupted[s] -> break
       :: !interrupted[s]
       fi;
       UNLOCK_MUTEX;
       d_step { /* W5 */
         if
         :: !changed[s] -> asleep[s] = true
         :: else
         fi
       };
       if
       :: !asleep[s]
#ifdef DEATHS
#ifndef BUG_NO_LOOK
       :: first_in[s] && asleep[s] -> asleep[s] = false /* LOOK_AGAIN_MS */
#endif
#endif
       fi;
       LOCK_MUTEX
    od;

    if
    :: granted[s] -> hold(false, false); UNLOCK_MUTEX; goto held
    :: else
    fi;
    if
    :: got -> hold(all, !converts)
    :: else
    fi;
    queue_leave(s);
    ticket_drop(s);
    first_in[s] = false;
    if
    :: got && !all ->
       /* followers_grant */
       do
       :: first[P] != NONE && !WANTS_ALL(first[P]) ->
          w = first[P];
          queue_leave(w);
          ticket_drop(w);
          d_step { shared[P]++; granted[w] = true };
          waiter_wake(w)
       :: else -> break
       od;
       w = 0
    :: else
    fi;
#ifndef BUG_NEXT
    waiter_wake(first[P]);
#endif
#ifndef BUG_LEAVE_SILENTLY
    if
    :: !got || !all -> queue_wake()
    :: else
    fi;
#endif
    UNLOCK_MUTEX;
    if
    :: got -> goto held
    :: else
    fi;
    /* Interrupted: a session that has the row shared keeps it so. */
    interrupted[s] = false;
    if
    :: holds[s] -> goto give_back
    :: else -> goto idle
    fi;

held:
    got = false;
    d_step { granted[s] = false; first_in[s] = false };
    if
    :: CONVERTS(s) && !holds_all[s] -> all = true; converts = true; crowded = true; goto again
    :: CONVERTS(s) && holds_all[s] && converts ->
       /* The extend fails at a later row: hl__file_row_downgrade. */
       LOCK_MUTEX;
       d_step {
#ifndef BUG_NOT_UNDONE
         row_exclusive = row_exclusive & ~BIT(P);
         row_shared = row_shared | BIT(P);
         exclusive[P] = false;
         shared[P] = 1;
#endif
         holds_all[s] = false
       };
       UNLOCK_MUTEX;
       queue_wake();
       converts = false
    :: else
    fi;
give_back:
    /* table.c, hl__file_row_release, then hl__file_queue_wake. */
#ifdef BUG_WAKE_FIRST
    queue_wake();
#endif
    LOCK_MUTEX;
    d_step {
      assert(holds_all[s] == exclusive[P] || CLAIM_AS_STRONG);
      holds[s] = false;
      holds_all[s] = false;
      if
      :: exclusive[P] -> exclusive[P] = false
      :: else -> shared[P]--
      fi;
      if
      :: shared[P] == 0 -> /* R1 */
         row_exclusive = row_exclusive & ~BIT(P);
         row_shared = row_shared & ~BIT(P)
      :: else
      fi
    };
    UNLOCK_MUTEX;
#ifndef BUG_WAKE_FIRST
    queue_wake();
#endif
    goto idle
  } unless { DEAD };
end: skip
}

/* hl__file_queue_interrupt, once. */
#ifdef CANCELS
active proctype Owner() {
  byte k, s = CANCELS;
  atomic { waits[s] -> interrupted[s] = true };
  waiter_wake(s);
  signal_all();
}
#endif

#ifdef DEATHS
/* A process is killed at any step: its threads are no more, and the kernel gives back
   its locks. Nobody is told. */
active proctype Fate() {
  byte k;
  d_step {
    dead[1] = true;
    row_shared = row_shared & ~BIT(1);
    row_exclusive = row_exclusive & ~BIT(1);
    locked[1] = 0;
    do
    :: k < SESSIONS ->
       if
       :: PROCESS(k) == 1 ->
          holds[k] = false; holds_all[k] = false; waits[k] = false; ticket[k] = NONE;
          drew[k] = NONE
       :: else
       fi;
       k++
    :: else -> break
    od
  }
}
#endif

#ifdef LTL
/* Claim GRANTED (with weak fairness): whoever waits gets the row, or leaves. */
ltl granted0 { [] (waits[0] -> <> !waits[0]) }
ltl granted1 { [] (waits[1] -> <> !waits[1]) }
ltl granted2 { [] (waits[SESSIONS - 1] -> <> !waits[SESSIONS - 1]) }
#endif

init {
  byte k;
  atomic {
    do
    :: k < SESSIONS -> run Session(k); k++
    :: else -> break
    od;
    k = 0
  }
}
