/*
 * line.pml - the calls of one manager of the embedded store that wait: line, pendings and keeper,
 * the store that calls back, and who releases what was granted to a call that nobody wants any
 * more (csrc/core/line.c, pending.c, keeper.c, call.c).
 *
 * What the code does under the manager's mutex is one atomic step here. In between,
 * at the store, anything may happen. Rows 0 and 2 are held by another process for
 * ever, row 1 until it gives it back. A thread that sends pendings sends one at a time. FAILS: so
 * often the store's thread cannot be started.
 */

/* For the messages of spin: which claim an assertion belongs to. Always false. */
hidden byte CLAIM_ONCE, CLAIM_NO_ORPHAN;
#ifndef PENDINGS
#define PENDINGS 3
#endif
#ifdef TROUBLE /* both want row 1; each may be cancelled, dropped, or too late */
#define ROW(p) 1
#define GIVES_UP(p) true
#define LIMITED(p) true
#elif defined(STUCK) /* two that cannot be granted came before one that can */
#define ROW(p) ((p) == 0 -> 0 : ((p) == 1 -> 2 : 1))
#define GIVES_UP(p) false
#define LIMITED(p) false
#else /* one that cannot be granted, and two that want row 1 */
#define ROW(p) ((p) > 0)
#define GIVES_UP(p) false
#define LIMITED(p) false
#endif
#ifndef FAILS
#define FAILS 0
#endif
#define MOST 1
#define NONE 255
#define STRANGER 254

mtype = { ABSENT, BEHIND, LOOSE, READY, AT_STORE, LEFT };
mtype = { WAITING, OK, TIMEOUT, CANCELLED };

/* --- the store */
byte owner[3] = STRANGER;
bool interrupted[PENDINGS], started[PENDINGS];
byte fails = FAILS;
/* --- the manager */
mtype place[PENDINGS] = ABSENT;
chan ready = [PENDINGS] of { byte };
byte arrived[PENDINGS];  /* how many came before it */
byte arrivals, going;
bool short_of_threads, closed, hurry;
/* --- a pending */
mtype status[PENDINGS] = WAITING;
bool done[PENDINGS], given_up[PENDINGS], taken[PENDINGS], at_store[PENDINGS];
bool has_lock[PENDINGS];  /* pending->lock is HELD */
byte released[PENDINGS];

#define IN_LINE(p) (place[p] == BEHIND || place[p] == LOOSE || place[p] == READY)
#define IDLE (len(ready) > 0 && going == 0 && !short_of_threads && !closed)

/* -------------------------------------------------------------- line.c */

inline find(p) {
  f = 0;
  g = false;
  do
  :: f < PENDINGS ->
     g = g || (f != p && ROW(f) == ROW(p) && arrived[f] < arrived[p] &&
               place[f] != ABSENT && place[f] != LEFT);
     f++
  :: else -> break
  od;
  if
  :: g -> place[p] = BEHIND
  :: else -> place[p] = READY; ready!p
  fi;
  f = 0; g = false
}

/* Some of the loose ones settle now; what is left is the keeper's. */
inline settle() {
  e = 0;
  do
  :: e < PENDINGS && place[e] == LOOSE -> find(e); e++
  :: e < PENDINGS && place[e] == LOOSE && settle_less -> e++;
     hurry = true
  :: e < PENDINGS && place[e] != LOOSE -> e++
  :: e >= PENDINGS -> break
  od;
  e = 0
}

/* hl__line_advance, where the store calls back */
inline advance() {
  if
  :: closed
  :: !closed ->
     settle();
     hurry = hurry || IDLE
  fi
}

/* hl__line_leave */
inline line_leave(p) {
  if
  :: ready??[eval(p)] -> ready??eval(p)
  :: else
  fi;
  place[p] = LEFT;
  e = 0;
  do
  :: e < PENDINGS ->
     if
     :: place[e] == BEHIND && ROW(e) == ROW(p) -> place[e] = LOOSE
     :: else
     fi;
     e++
  :: else -> break
  od;
  e = 0;
  advance()
}

/* hl__line_go, with send_started and hl__call_start: gives the mutex back in between. */
inline line_go() {
  atomic { going++; sent = 0 };
  do
  :: atomic { sent < MOST && !closed && !short_of_threads && len(ready) > 0 ->
       ready?h; place[h] = AT_STORE; sent++ };
     atomic {
       if
       :: given_up[h] || closed -> line_leave(h); wanted = !given_up[h];
          if
          :: wanted -> finish(h, CANCELLED)
          :: else
          fi
       :: !(given_up[h] || closed) && fails > 0 -> /* HL_BUSY */
          fails--;
          place[h] = READY;
          ready!h;
          short_of_threads = true;
#ifndef BUG_SHORT_UNSEEN
          hurry = true
#endif
       :: else -> at_store[h] = true; started[h] = true
       fi;
       h = NONE
     }
  :: atomic { else ->
       going--;
       hurry = hurry || IDLE;
       sent = 0; wanted = false;
       break }
  od
}

/* ----------------------------------------------------------- pending.c */

inline finish(p, how) {
  done[p] = true;
  status[p] = how
}

/* give_up: wherever it is. */
inline give_up(p) {
  if
  :: IN_LINE(p) -> line_leave(p); finish(p, CANCELLED)
  :: else ->
     given_up[p] = true;
     if
     :: at_store[p] -> interrupted[p] = true
     :: else
     fi;
     finish(p, CANCELLED)
  fi
}

/* Claim ONCE: the lock of a pending is released once. */
inline release(p) {
  d_step {
    assert((owner[ROW(p)] == p && released[p] == 0) || CLAIM_ONCE);
    released[p]++;
    has_lock[p] = false;
    owner[ROW(p)] = NONE
  }
}

/* hl_lock_release: hl_manager_close may have come before. */
inline release_held(p) {
  atomic {
    if
#ifdef BUG_TWICE
    :: true -> release(p)
#else
    :: has_lock[p] -> release(p)
    :: else
#endif
    fi
  }
}

/* call.c, acquire: unless nobody wants it any more; then the store has it back. */
inline hold(p, result) {
  atomic {
    at_store[p] = false;
    if
    :: closed || given_up[p] ->
       owner[ROW(p)] = NONE; result = CANCELLED
    :: else -> has_lock[p] = true; result = OK
    fi
  }
}

/* A call at the store, and the store's thread that calls back: call.c, flight_done; pending.c,
   ended. */
proctype Flight(byte p) {
  byte e, f, h = NONE, sent;
  bool g, wanted, settle_less = true;
  mtype said = WAITING;

end:
  started[p];
end_wait:
  atomic {
    if
    :: owner[ROW(p)] == NONE -> owner[ROW(p)] = p; said = OK
    :: interrupted[p] || LIMITED(p) -> said = TIMEOUT
    fi
  };
  if
  :: said == OK -> hold(p, said)
  :: else -> atomic { at_store[p] = false; interrupted[p] = false }
  fi;
  atomic { going++; line_leave(p) };
  atomic {
    wanted = !given_up[p];
    if
    :: wanted -> finish(p, said)
    :: else
    fi
  };
  /* What it got after all goes back. */
#ifdef BUG_FORGOTTEN
  wanted = true;
#endif
  if
  :: !wanted && said == OK -> release_held(p)
  :: else
  fi;
  atomic { going--; wanted = false };
#ifndef BUG_UNSENT
  line_go()
#endif
}

/* keeper.c: line.c, keep. */
active proctype Keeper() {
  byte e, f, h = NONE, p, sent;
  bool g, wanted, settle_less = false;
end:
  do
  :: atomic {
       hurry ->
       hurry = false;
       if
       :: closed
       :: else ->
          do
          :: p < PENDINGS ->
             if
             :: LIMITED(p) && IN_LINE(p) -> line_leave(p); finish(p, TIMEOUT)
             :: true
             fi;
             p++
          :: else -> break
          od;
          p = 0;
          short_of_threads = false;
          advance()
       fi
     };
     line_go()
  od
}

/* Who started a pending. */
proctype Owner(byte p) {
  byte e, f, h = NONE, sent;
  bool g, granted, wanted, settle_less = true;
  atomic { /* hl_start: hl__line_join, hl__line_advance */
    going++;
    if
    :: closed -> finish(p, CANCELLED)
    :: else ->
       arrived[p] = arrivals;
       arrivals++;
       find(p);
       advance();
       if
       :: LIMITED(p) -> hurry = true
       :: else
       fi
    fi;
    going--
  };
  line_go();
end_wait:
  if
  :: GIVES_UP(p) -> skip
  :: done[p] ->
     /* hl_pending_wait, and then hl_lock_release. */
     atomic { taken[p] = true; granted = status[p] == OK && has_lock[p] };
     if
     :: granted -> release_held(p)
     :: else
     fi;
     goto end
  fi;
  /* hl_pending_cancel, as hl_pending_free does too. */
  atomic {
    if
    :: done[p] ->
       granted = !taken[p] && status[p] == OK;
       if
       :: granted -> status[p] = CANCELLED
       :: else
       fi
    :: else -> give_up(p)
    fi
  };
#ifdef BUG_TWICE
  granted = granted || (given_up[p] && has_lock[p]);
#endif
  if
  :: granted -> release_held(p)
  :: else
  fi;
end:
  skip
}

/* The other process that has row 1. */
active proctype Stranger() {
  owner[1] = NONE
}

#ifdef CLOSE
/* hl_manager_close: what is held is released, who waits ends. */
active proctype Close() {
  byte e, f, h = NONE, p;
  bool g, settle_less = true;
  atomic {
    closed = true;
    do
    :: p < PENDINGS ->
       if
       :: has_lock[p] -> release(p)
       :: else
       fi;
       if
       :: at_store[p] -> interrupted[p] = true
       :: else
       fi;
       if
       :: place[p] != ABSENT && place[p] != LEFT && !done[p] -> give_up(p)
       :: else
       fi;
       p++
    :: else -> break
    od
  }
}
#endif

#ifdef LTL
/* Claim NOT_FORGOTTEN: row 1 is given back by whoever has it, so all who want it end,
   though one waits for row 0 for ever. */
#ifdef STUCK
ltl not_forgotten { <> done[2] }
#else
ltl not_forgotten { <> (done[1] && done[2]) }
#endif
#endif

#ifndef LTL
/* Claim NO_ORPHAN: at last no row is held for a pending that nobody has. */
active proctype End() {
  byte p;
  timeout ->
  d_step {
    assert(owner[1] == NONE || CLAIM_NO_ORPHAN);
    do
    :: p < PENDINGS -> assert(!has_lock[p] || CLAIM_NO_ORPHAN); p++
    :: else -> break
    od
  }
}
#endif

init {
  byte k;
  atomic {
    do
    :: k < PENDINGS -> run Flight(k); run Owner(k); k++
    :: else -> break
    od;
    k = 0
  }
}
