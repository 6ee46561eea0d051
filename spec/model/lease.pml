/*
 * lease.pml - how long a lock is believed, and how long a server keeps it. Two
 * programs want one row exclusively. Time passes in ticks, at any moment: so a message
 * may take as long as it likes, a program may be stopped, the network may be cut.
 *
 * A Client is the owner of a handle together with its keeper (csrc/core/hold.c:
 * hl__connection_left, _look, _release; keeper.c: held_turn, releasing_turn;
 * call.c: the pieces of a wait; csrc/stores/mysql/rows.c: keep_alive_begin). It
 * never sees the server close its connection: the clock alone must do.
 *
 * Instead of times there are ages, in ticks; they stop at TOP, when they are too old
 * to matter. The two clocks go equally fast.
 */

/* For the messages of spin: which claim an assertion belongs to. Always false. */
hidden byte CLAIM_BELIEF_FIRST, CLAIM_EXCLUSION, CLAIM_RENEWED;
#ifndef LEASE
#define LEASE 6 /* hold_timeout; the server's wait_timeout is no shorter */
#endif
#define TOP (LEASE + 1)
#define NONE 255

#ifdef BUG_RENEW_LATE
#define RENEW (LEASE - 1)
#else
#define RENEW (LEASE / 3)
#endif

mtype = { LOCK, SIGN, EXTEND, ROLLBACK };                 /* to the server */
mtype = { FREE, LOCKING, BEGINNING, HELD, EXTENDING, SETTLING, RELEASING, LOST };

chan up[2] = [2] of { mtype };
chan down[2] = [2] of { bit };

mtype state[2] = FREE;
byte answered[2] = TOP; /* connection->answered: age of its sending */
byte asked[2] = NONE;   /* connection->asked, or of the request under way */
bool outstanding[2];    /* a ROLLBACK's answer is unread */
bool dead[2];           /* it has lost its power */

/* The server. */
byte owner = NONE;
bool waiting[2], extending[2];
byte idle[2] = NONE;    /* since it answered; NONE: a statement runs */
bool over[2];           /* it has ended the connection, and answers nothing any more */

/* hold.c: hl__connection_check, and hl__hold_left during an extend. */
#define BELIEVES(i) ((state[i] == HELD || state[i] == EXTENDING || state[i] == SETTLING) && \
                     answered[i] < LEASE)

#define OLDER(age) age = (age == NONE || age == TOP -> age : age + 1)

#ifdef PROMPT
/* A sign of life and its answer take less than a third of the lease, the pieces of an
   extend half of it, what follows a piece less than a sixth; and the keeper has its
   turns. Then nothing is ever lost. */
#define READY(i) (dead[i] || state[i] == FREE || state[i] == LOST || \
                  (empty(down[i]) && empty(up[i]) && \
                   (state[i] == LOCKING || \
                    (state[i] == HELD && asked[i] == NONE && answered[i] < RENEW) || \
                    (state[i] == EXTENDING && asked[i] < LEASE / 2))) || \
                  ((state[i] == HELD || state[i] == BEGINNING || state[i] == RELEASING) && \
                   asked[i] != NONE && asked[i] < LEASE / 3))
#define LOSS ; assert(CLAIM_RENEWED)
#else
#define LOSS
#define READY(i) true
#endif

/* Only while it changes something. */
active proctype Clock() {
end:
  do
  :: d_step {
       READY(0) && READY(1) ->
       OLDER(answered[0]); OLDER(answered[1]);
       OLDER(asked[0]); OLDER(asked[1]);
       OLDER(idle[0]); OLDER(idle[1])
     }
  od
}

/* Claim BELIEF_FIRST: the holder stops to believe before the server gives the lock
   away. Claim RENEWED (PROMPT): it never does. */
inline ended(i) {
  idle[i] = NONE;
  over[i] = true;
  assert(!BELIEVES(i) || CLAIM_BELIEF_FIRST);
#ifdef PROMPT
  assert(dead[i] || state[i] == FREE || CLAIM_RENEWED)
#endif
}

active proctype Server() {
end:
  do
  :: atomic { !over[0] && up[0]?[LOCK] -> up[0]?LOCK; waiting[0] = true; idle[0] = NONE }
  :: atomic { !over[1] && up[1]?[LOCK] -> up[1]?LOCK; waiting[1] = true; idle[1] = NONE }
  :: atomic { waiting[0] && owner == NONE -> waiting[0] = false; owner = 0; idle[0] = 0; down[0]!1 }
  :: atomic { waiting[1] && owner == NONE -> waiting[1] = false; owner = 1; idle[1] = 0; down[1]!1 }
  :: atomic { !over[0] && up[0]?[SIGN] -> up[0]?SIGN; idle[0] = 0; down[0]!1 }
  :: atomic { !over[1] && up[1]?[SIGN] -> up[1]?SIGN; idle[1] = 0; down[1]!1 }
  :: atomic { !over[0] && up[0]?[EXTEND] -> up[0]?EXTEND; extending[0] = true; idle[0] = NONE }
  :: atomic { !over[1] && up[1]?[EXTEND] -> up[1]?EXTEND; extending[1] = true; idle[1] = NONE }
  /* Granted, or the piece has ended. */
  :: atomic { extending[0] -> extending[0] = false; idle[0] = 0; down[0]!1 }
  :: atomic { extending[1] -> extending[1] = false; idle[1] = 0; down[1]!1 }
  :: atomic { !over[0] && up[0]?[ROLLBACK] -> up[0]?ROLLBACK; owner = (owner == 0 -> NONE : owner); idle[0] = NONE; down[0]!1 }
  :: atomic { !over[1] && up[1]?[ROLLBACK] -> up[1]?ROLLBACK; owner = (owner == 1 -> NONE : owner); idle[1] = NONE; down[1]!1 }
  /* wait_timeout */
  :: d_step { owner == 0 && idle[0] != NONE && idle[0] >= LEASE -> owner = NONE; ended(0) }
  :: d_step { owner == 1 && idle[1] != NONE && idle[1] >= LEASE -> owner = NONE; ended(1) }
  od
}

/* call.c, acquire: the handle is there. Claim EXCLUSION. */
inline hold() {
  state[i] = HELD;
  answered[i] = asked[i];
#ifdef BUG_FROM_ANSWER
  answered[i] = 0;
#endif
  asked[i] = NONE;
  assert(!(BELIEVES(0) && BELIEVES(1)) || CLAIM_EXCLUSION)
}

/* An answer has come to what was asked: it counts from when that was sent. */
inline count() {
  answered[i] = asked[i];
  asked[i] = NONE
}

proctype Client(bit i) {
end:
  do
  :: dead[i] -> break
  :: else ->
     if
     :: atomic { !dead[i] && state[i] == FREE && outstanding[i] -> down[i]?_; outstanding[i] = false }
     :: atomic { !dead[i] && state[i] == FREE && !outstanding[i] -> up[i]!LOCK; asked[i] = 0; state[i] = LOCKING }
     /* keep_alive_begin: after a long wait a sign of life tells a later time. */
     :: atomic {
          state[i] == LOCKING && nempty(down[i]) ->
          down[i]?_;
          if
          :: asked[i] == 0 -> hold() /* less than a quarter of the lease */
          :: else -> up[i]!SIGN; asked[i] = 0; state[i] = BEGINNING
          fi
        }
     :: atomic { state[i] == BEGINNING && nempty(down[i]) -> down[i]?_; hold() }
     :: atomic { state[i] == HELD && asked[i] != NONE && nempty(down[i]) -> down[i]?_; count() }
     /* keeper.c, renew_if_due. */
     :: atomic {
          state[i] == HELD && answered[i] >= RENEW && answered[i] < LEASE &&
#ifdef BUG_ASKED_TWICE
          (asked[i] == NONE || asked[i] >= 2) && nfull(up[i]) ->
#else
          asked[i] == NONE ->
#endif
          up[i]!SIGN; asked[i] = 0
        }
     :: atomic {
          state[i] == HELD && answered[i] >= LEASE -> state[i] = LOST LOSS
        }
     :: atomic {
          BELIEVES(i) && state[i] == HELD ->
          if
          :: asked[i] == NONE -> up[i]!ROLLBACK; outstanding[i] = true; state[i] = FREE
          :: asked[i] != NONE -> /* HL_BUSY: it cannot be sent yet */
#ifdef BUG_RELEASE_UNSETTLED
             up[i]!ROLLBACK; outstanding[i] = true; asked[i] = NONE; state[i] = FREE
#else
             state[i] = RELEASING
#endif
          fi
        }
     :: atomic {
          state[i] == RELEASING && nempty(down[i]) ->
          down[i]?_; asked[i] = NONE;
          up[i]!ROLLBACK; outstanding[i] = true; state[i] = FREE
        }
     /* call.c, extend: settled first; the keeper leaves it alone meanwhile. */
     :: atomic { BELIEVES(i) && state[i] == HELD && asked[i] == NONE -> up[i]!EXTEND; asked[i] = 0; state[i] = EXTENDING }
     /* rows.c: keep_alive_begin when it was granted, extend_undo when not. */
     :: atomic {
          state[i] == EXTENDING && nempty(down[i]) ->
          down[i]?_;
#ifdef BUG_EXTEND_ANSWER
          answered[i] = 0;
#endif
#ifdef BUG_EXTEND_SILENT
          count(); state[i] = HELD
#else
          up[i]!SIGN; asked[i] = 0; state[i] = SETTLING
#endif
        }
     :: atomic { state[i] == SETTLING && nempty(down[i]) -> down[i]?_; count(); state[i] = HELD }
     :: atomic { (state[i] == EXTENDING || state[i] == SETTLING) && answered[i] >= LEASE -> state[i] = LOST LOSS }
     :: dead[i] || state[i] == LOST || over[i] && !BELIEVES(i) -> break
     fi
  od
}

#ifdef DEATH
/* The power fails, at any moment. */
active proctype Fate() {
  atomic { dead[0] = true; state[0] = LOST }
}

/* Whoever has vanished without a word holds nothing at last; neither has the other
   one, who wants it, waited in vain. */
ltl vanished { [] (dead[0] -> <> (owner != 0)) }
#endif

init { atomic { run Client(0); run Client(1) } }
