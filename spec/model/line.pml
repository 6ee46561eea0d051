/*
 * line.pml - the calls of one manager of the embedded store that wait: line, pendings,
 * workers and keeper, and who releases what was granted to a call that nobody wants any
 * more (csrc/core/line.c, pending.c, worker.c, keeper.c, call.c).
 *
 * What the code does under the manager's mutex is one atomic step here. In between,
 * at the store, anything may happen. Rows 0 and 2 are held by another process for
 * ever, row 1 until it gives it back. Pool size 1: one pending may wait at the store.
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
#ifndef THREADS /* so many can be had */
#define THREADS 2
#endif
#define POOL_SIZE 1
#define NONE 255
#define STRANGER 254

mtype = { ABSENT, BEHIND, LOOSE, READY, PARKED, TRIED, AT_STORE, LEFT };
mtype = { WAITING, OK, TIMEOUT, CANCELLED, PARKED_AGAIN };

/* --- the store */
byte owner[3] = STRANGER;
byte queue[3]; /* how many wait there for a row */
bool interrupted[PENDINGS];
/* --- the manager */
mtype place[PENDINGS] = ABSENT;
chan ready = [PENDINGS] of { byte };
chan parked = [PENDINGS] of { byte };
chan tasks = [PENDINGS] of { byte };
byte arrived[PENDINGS];  /* how many came before it */
byte arrivals, next_asked;
byte trying, waiting, asks;
byte idle_workers, coming_workers, workers;
bool short_of_threads, closed, hurry;
/* --- a pending */
mtype status[PENDINGS] = WAITING;
bool done[PENDINGS], given_up[PENDINGS], taken[PENDINGS], at_store[PENDINGS];
bool has_lock[PENDINGS];  /* pending->lock is HELD */
byte released[PENDINGS];

#define IN_LINE(p) (place[p] == BEHIND || place[p] == LOOSE || place[p] == READY || \
                    place[p] == PARKED)

/* ------------------------------------------------------------ worker.c */

/* hl__worker_spare */
inline worker_spare(result) {
  if
  :: idle_workers + coming_workers > len(tasks) -> result = true
  :: idle_workers + coming_workers <= len(tasks) && workers < THREADS ->
     workers++; coming_workers++; result = true
  :: else -> result = false
  fi
}

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
#ifndef BUG_NO_HURRY
     hurry = true
#endif
  :: e < PENDINGS && place[e] != LOOSE -> e++
  :: e >= PENDINGS -> break
  od;
  e = 0
}

/* next_to_go and send, until nobody goes. */
inline advance() {
  if
  :: closed
  :: !closed ->
     settle();
     do
     :: trying > 0 -> break
     :: trying == 0 ->
        h = NONE;
        if
        :: len(parked) > 0 && waiting < POOL_SIZE && !short_of_threads -> parked?<h>
        :: !(len(parked) > 0 && waiting < POOL_SIZE && !short_of_threads) && len(ready) > 0 ->
           ready?<h>
        :: !(len(parked) > 0 && waiting < POOL_SIZE && !short_of_threads) && len(ready) == 0 &&
           len(parked) > 0 && asks > 0 ->
           asks--;
#ifdef BUG_FIRST_ONLY
           parked?<h>
#else
           /* In turn: whoever is asked goes to the end. */
           h = next_asked;
           do
           :: parked??[eval(h)] -> break
           :: !parked??[eval(h)] -> h = (h + 1) % PENDINGS
           od;
           next_asked = (h + 1) % PENDINGS
#endif
        :: else
        fi;
        if
        :: h == NONE -> break
        :: h != NONE ->
           worker_spare(spare);
           if
           :: !spare -> short_of_threads = true; hurry = true; h = NONE; break
           :: spare ->
              if
              :: place[h] == READY -> ready??eval(h)
              :: place[h] != READY
              fi;
              place[h] = TRIED;
              tasks!h;
              trying++;
              h = NONE
           fi
        fi
     od;
     h = NONE; spare = false
  fi
}

/* hl__line_leave */
inline line_leave(p) {
  if
  :: place[p] == TRIED -> trying--
  :: place[p] == AT_STORE ->
     waiting--;
     short_of_threads = false
  :: else
  fi;
  if
  :: ready??[eval(p)] -> ready??eval(p)
  :: parked??[eval(p)] -> parked??eval(p)
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

/* ----------------------------------------------------------- pending.c */

inline finish(p, how) {
  done[p] = true;
  status[p] = how
}

/* give_up: wherever it is. */
inline give_up(p) {
  if
  :: IN_LINE(p) -> line_leave(p); finish(p, CANCELLED)
  :: !IN_LINE(p) && tasks??[eval(p)] -> /* hl__worker_take_back */
     tasks??eval(p);
     line_leave(p);
     finish(p, CANCELLED)
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

/* A thread of worker.c, with hl__pending_run and try_and_wait. A thread that is not
   started yet waits for `coming`. */
proctype Worker() {
  byte e, f, h = NONE, p;
  bool g, spare, wanted, settle_less = true;
  mtype said;

end:
  do
  :: atomic {
       nempty(tasks) && idle_workers + coming_workers > 0 ->
       if
       :: coming_workers > 0 -> coming_workers--
       :: else -> idle_workers--
       fi;
       tasks?p;
       said = WAITING;
       if
       :: given_up[p] -> said = CANCELLED
       :: else
       fi
     };
     if
     :: said == CANCELLED
     :: else ->
        /* A try, hl__piece first. */
        atomic {
          if
          :: given_up[p] || closed -> said = CANCELLED
          :: else -> at_store[p] = true
          fi
        };
        if
        :: said == CANCELLED
        :: else ->
           atomic {
             if
             :: owner[ROW(p)] == NONE && queue[ROW(p)] == 0 -> owner[ROW(p)] = p; said = OK
             :: else -> said = TIMEOUT
             fi
           };
           if
           :: said == OK -> hold(p, said)
           :: else ->
              atomic {
                at_store[p] = false;
                interrupted[p] = false;
                if
                :: given_up[p] || closed -> said = CANCELLED
                :: else
                fi
              }
           fi
        fi;
        /* Refused: hl__line_refused. */
        if
        :: said == TIMEOUT ->
           atomic {
             wanted = false;
             if
             :: given_up[p] || closed -> said = CANCELLED
             :: else ->
                trying--;
                spare = false;
                if
                :: waiting < POOL_SIZE && (len(parked) == 0 || parked?[eval(p)]) ->
                   worker_spare(spare);
                   short_of_threads = short_of_threads || !spare
                :: else
                fi;
                if
                :: spare ->
                   if
                   :: parked??[eval(p)] -> parked??eval(p)
                   :: else
                   fi;
                   place[p] = AT_STORE;
                   waiting++;
                   wanted = true
                :: else ->
                   coming_workers++;
                   place[p] = PARKED;
                   said = PARKED_AGAIN;
                   if
                   :: parked??[eval(p)]
                   :: else -> parked!p
                   fi;
#ifndef BUG_PARKED_UNSEEN
                   hurry = true
#endif
                fi;
                spare = false;
                advance()
             fi
           };
           if
           :: wanted ->
              /* The wait at the store. */
              atomic {
                said = WAITING;
                if
                :: given_up[p] || closed -> said = CANCELLED
                :: else -> at_store[p] = true; queue[ROW(p)]++
                fi
              };
              if
              :: said == CANCELLED
              :: else ->
end_wait:
                 atomic {
                   if
                   :: owner[ROW(p)] == NONE -> owner[ROW(p)] = p; said = OK
                   :: interrupted[p] || (LIMITED(p) && !interrupted[p]) -> said = TIMEOUT
                   fi;
                   queue[ROW(p)]--
                 };
                 if
                 :: said == OK -> hold(p, said)
                 :: else -> atomic { at_store[p] = false; interrupted[p] = false }
                 fi
              fi
           :: else
           fi
        :: else
        fi
     fi;
     if
     :: said == PARKED_AGAIN
     :: else ->
        atomic {
          coming_workers++;
          line_leave(p)
        };
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
        fi
     fi;
     /* It looks for another task, or becomes idle. */
     atomic {
       said = WAITING; wanted = false; p = 0;
       if
       :: empty(tasks) && coming_workers > 0 -> coming_workers--; idle_workers++
       :: nempty(tasks) || coming_workers == 0
       fi
     }
  od
}

/* keeper.c: line.c, keep. */
active proctype Keeper() {
  byte e, f, h = NONE, p;
  bool g, spare, settle_less = false;
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
          asks = 1;
          short_of_threads = false;
          advance();
          /* When it wants to be called next. */
#ifdef BUG_PARKED_UNSEEN
          hurry = false
#else
          hurry = len(parked) > 0 || short_of_threads
#endif
       fi
     }
  od
}

/* Who started a pending. */
proctype Owner(byte p) {
  byte e, f, h = NONE;
  bool g, spare, granted, settle_less = true;
  atomic { /* hl_start: hl__line_join, hl__line_advance */
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
    fi
  };
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
  bool g, spare, settle_less = true;
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
   though one waits for row 0 for ever, and has the only place. */
#ifdef STUCK
ltl not_forgotten { <> done[2] }
#else
ltl not_forgotten { <> (done[1] && done[2]) }
#endif
#endif

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

init {
  byte k;
  atomic {
    do
    :: k < THREADS -> run Worker(); k++
    :: else -> break
    od;
    k = 0;
    do
    :: k < PENDINGS -> run Owner(k); k++
    :: else -> break
    od;
    k = 0
  }
}
