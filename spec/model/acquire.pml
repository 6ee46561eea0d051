/*
 * acquire.pml - acquire, extend, cancel, release and loss, between programs and a
 * server that keeps rows. Who sends what when, what is on its way meanwhile, and what
 * the server does with a client that has gone. No time passes here: see lease.pml.
 *
 * A Client is a program with one session (csrc/core/call.c, hold.c; below it
 * csrc/stores/mysql/mysql.c, kill.c, rows.c). A Connection is what the server runs for
 * one connection. Owner cancels calls (hl_pending_cancel), Fate ends connections.
 *
 * Each client makes CALLS calls, so every run ends; what shall hold "at last" is
 * asserted where no process can go on: in End.
 */

/* For the messages of spin: which claim an assertion belongs to. Always false. */
hidden byte CLAIM_EXCLUSION, CLAIM_TRUTH, CLAIM_NO_CIRCLE, CLAIM_NO_ORPHAN, CLAIM_ALL_END, CLAIM_NO_INNOCENT;
#ifndef CLIENTS
#define CLIENTS 2
#endif
#ifndef CALLS
#define CALLS 2
#endif
#ifndef CANCELS  /* calls that are cancelled */
#define CANCELS 0
#endif
#ifndef TIMEOUTS /* waits that the server ends because their time is up */
#define TIMEOUTS 0
#endif
#ifndef KILLS    /* connections that the server ends by itself */
#define KILLS 0
#endif
#ifndef RESTARTS
#define RESTARTS 0
#endif
#ifndef EXTENDS  /* of each client */
#define EXTENDS 0
#endif
#ifndef STAYS    /* 1: a holder may keep its lock for ever */
#define STAYS 0
#endif
/* A cancelled wait goes on at the server while its client connects anew. */
#define CONNECTIONS (CLIENTS + CANCELS)
#define NONE 255

mtype = { LOCK, ROLLBACK, OK, TIMEOUT, DEADLOCK };

/* Three rows in locking order: an account's, and those of two resources below it.
   A plan has two bits for each: 1 shared, 2 exclusive. */
#define SHARED 1
#define EXCLUSIVE 2
#define PLAN(a, b, c) ((a) | (b) << 2 | (c) << 4)
#define MODE(plan, row) ((plan) >> 2 * (row) & 3)
#define MEETS(a, b) ((a) && (b) && ((a) | (b)) >= EXCLUSIVE)
#define CONFLICT(p, q) (MEETS(MODE(p, 0), MODE(q, 0)) || \
                        MEETS(MODE(p, 1), MODE(q, 1)) || \
                        MEETS(MODE(p, 2), MODE(q, 2)))
#define BIT(c) (1 << (c))

/* --- the wire */
chan up[CONNECTIONS] = [2] of { mtype, byte };
chan down[CONNECTIONS] = [2] of { mtype };
bool cut[CONNECTIONS];    /* shut down by the client, which refers to it still */
bool closed[CONNECTIONS]; /* closed by the client */
bool gone[CONNECTIONS];   /* ended by the server: the client's socket shows it */
bool victim[CONNECTIONS]; /* the answer DEADLOCK is on its way, or is being read */

/* --- the server. Sets of connections are bits. */
bool open[CONNECTIONS];
byte number[CONNECTIONS];  /* unique in one life of the server */
byte born[CONNECTIONS];    /* in which life */
byte life, numbers;
byte request[CONNECTIONS]; /* rows of the running statement not yet taken; 0: none */
bool extending[CONNECTIONS];
byte shared[3], exclusive[3]; /* who holds a row how */
#define LOCKED (shared[0] | shared[1] | shared[2] | exclusive[0] | exclusive[1] | exclusive[2])
byte waiting, wants_all;      /* who waits; who of them wants its row exclusively */
byte ahead[CONNECTIONS];      /* who waited for the same row before it came */
byte timeouts;

#ifdef BUG_ORDER /* some take both resources the other way round */
#define FIRST(c) (request[c] & 3 -> 0 : \
                  ((request[c] & 48) && ((c) & 1) -> 2 : (request[c] & 12 -> 1 : 2)))
#else
#define FIRST(c) (request[c] & 3 -> 0 : (request[c] & 12 -> 1 : 2))
#endif
#define WANTED(c) MODE(request[c], FIRST(c))
#define HOLDERS(c) ((WANTED(c) == EXCLUSIVE -> shared[FIRST(c)] | exclusive[FIRST(c)] : \
                     exclusive[FIRST(c)]) & ~BIT(c))
#define BLOCKERS(c) (HOLDERS(c) | (ahead[c] & (WANTED(c) == EXCLUSIVE -> 255 : wants_all)))

/* --- clients */
byte conn[CLIENTS];     /* its connection; NONE */
byte believed[CLIENTS]; /* the rows of its handle; 0: it has none */
bool busy[CLIENTS];     /* a call waits at the store, and can be cancelled */
bool given_up[CLIENTS]; /* hl_pending.given_up */
byte killer[CLIENTS];   /* the life of the server that its killer is connected to */
bool stays[CLIENTS], ended[CLIENTS];

/* What is_held says: the handle is there, and neither the socket nor an answer tells
   of a loss. (For the moment in which that comes, only the token helps.) */
#define TOLD(c) (gone[c] || cut[c] || victim[c])
#define BELIEVES(i) (believed[i] && !TOLD(conn[i]))

/* ------------------------------------------------------------- the server */

inline leave_queue(c) {
  waiting = waiting & ~BIT(c);
  wants_all = wants_all & ~BIT(c);
  k = 0;
  do
  :: k < CONNECTIONS -> ahead[k] = ahead[k] & ~BIT(c); k++
  :: else -> break
  od;
  ahead[c] = 0;
  k = 0
}

inline free_rows(c) {
  k = 0;
  do
  :: k < 3 ->
     shared[k] = shared[k] & ~BIT(c);
     exclusive[k] = exclusive[k] & ~BIT(c);
     k++
  :: else -> break
  od;
  k = 0
}

/* The server ends a connection: gives its rows back, and closes the socket. */
inline end_connection(c) {
  do
  :: nempty(up[c]) -> up[c]?_,_
  :: empty(up[c]) -> break
  od;
  free_rows(c);
  leave_queue(c);
  request[c] = 0;
  extending[c] = false;
  open[c] = false;
  gone[c] = true
}

/* All whom c waits for, whom those wait for, and so on. */
inline reach(c, set) {
  set = BLOCKERS(c);
  j = 0;
  do
  :: j < CONNECTIONS ->
     k = 0;
     do
     :: k < CONNECTIONS ->
        if
        :: (set & BIT(k)) && (waiting & BIT(k)) -> set = set | BLOCKERS(k)
        :: else
        fi;
        k++
     :: else -> break
     od;
     j++
  :: else -> break
  od;
  j = 0; k = 0
}

/* c has just begun to wait. Claim NO_CIRCLE: whoever waits in a circle, one of them
   extends. The server rolls back one of the circle, and looks again. */
inline look_for_circle(c) {
  do
  :: waiting & BIT(c) ->
     d_step {
       reach(c, set);
       members = 0;
       if
       :: set & BIT(c) ->
          members = BIT(c);
          extender = extending[c];
          m = 0;
          do
          :: m < CONNECTIONS ->
             if
             :: m != c && (set & BIT(m)) && (waiting & BIT(m)) ->
                reach(m, other);
                if
                :: other & BIT(c) ->
                   members = members | BIT(m);
                   extender = extender || extending[m]
                :: else
                fi
             :: else
             fi;
             m++
          :: else -> break
          od;
          assert(extender || CLAIM_NO_CIRCLE)
       :: else
       fi;
       set = 0; other = 0; extender = false; m = 0
     };
     if
     :: members == 0 -> break
     :: else ->
        if
        :: members & BIT(0) -> m = 0
        :: members & BIT(1) -> m = 1
   #if CONNECTIONS > 2
        :: members & BIT(2) -> m = 2
   #endif
   #if CONNECTIONS > 3
        :: members & BIT(3) -> m = 3
   #endif
        fi;
        d_step {
          free_rows(m);
          leave_queue(m);
          request[m] = 0;
          extending[m] = false;
          victim[m] = true;
          down[m]!DEADLOCK;
          m = 0; members = 0
        }
     fi
  :: else -> break
  od
}

inline take_row(c) {
  if
  :: WANTED(c) == EXCLUSIVE ->
     exclusive[FIRST(c)] = exclusive[FIRST(c)] | BIT(c);
     shared[FIRST(c)] = shared[FIRST(c)] & ~BIT(c)
  :: else -> shared[FIRST(c)] = shared[FIRST(c)] | BIT(c)
  fi;
  request[c] = request[c] & ~(3 << 2 * FIRST(c));
  if
  :: request[c] == 0 -> extending[c] = false; down[c]!OK
  :: request[c]
  fi
}

proctype Connection(byte c) {
  byte k, j, m, set, other, members;
  mtype word;
  byte plan;
  bool extender;
end:
  do
  /* A statement or a ROLLBACK arrives. */
  :: atomic {
       open[c] && request[c] == 0 && nempty(up[c]) ->
       up[c]?word,plan;
       if
       :: word == LOCK ->
          extending[c] = (LOCKED & BIT(c)) != 0;
          request[c] = plan
       :: word == ROLLBACK -> free_rows(c); down[c]!OK
       fi;
       word = 0; plan = 0
     }
  /* The next row is free, or has a queue, at whose end it waits. */
  :: atomic {
       request[c] && !(waiting & BIT(c)) ->
       d_step {
         k = 0;
         do
         :: k < CONNECTIONS ->
            if
            :: (waiting & BIT(k)) && FIRST(k) == FIRST(c) -> ahead[c] = ahead[c] | BIT(k)
            :: else
            fi;
            k++
         :: else -> break
         od;
         k = 0
       };
       if
       :: BLOCKERS(c) == 0 -> d_step { ahead[c] = 0; take_row(c) }
       :: else ->
          waiting = waiting | BIT(c);
          if
          :: WANTED(c) == EXCLUSIVE -> wants_all = wants_all | BIT(c)
          :: else
          fi;
          look_for_circle(c)
       fi
     }
  /* Its turn has come. */
  :: d_step { (waiting & BIT(c)) && BLOCKERS(c) == 0 -> leave_queue(c); take_row(c) }
  /* Its time is up: the rows that it has got stay locked. */
  :: d_step {
       (waiting & BIT(c)) && timeouts < TIMEOUTS ->
       timeouts++;
       leave_queue(c);
       request[c] = 0;
       extending[c] = false;
       down[c]!TIMEOUT
     }
  /* The client has gone. That is seen only when no statement runs. */
  :: d_step {
       open[c] && request[c] == 0 && empty(up[c]) && (cut[c] || closed[c]) ->
       end_connection(c)
     }
  od
}

/* ------------------------------------------------------------ the clients */

inline close_connection() {
  closed[c] = true;
  c = NONE;
  conn[i] = NONE
}

/* pool.c, hl__pool_take: a session whose connection stands, or a new one. */
inline take_session() {
  atomic {
    if
    :: c != NONE && gone[c] -> outstanding = false; close_connection()
    :: else
    fi;
    if
    :: c == NONE ->
       if
       :: !open[0] && closed[0] -> c = 0
       :: !open[1] && closed[1] -> c = 1
#if CONNECTIONS > 2
       :: !open[2] && closed[2] -> c = 2
#endif
#if CONNECTIONS > 3
       :: !open[3] && closed[3] -> c = 3
#endif
       fi;
       d_step {
         do
         :: nempty(down[c]) -> down[c]?_
         :: empty(down[c]) -> break
         od;
         do
         :: nempty(up[c]) -> up[c]?_,_
         :: empty(up[c]) -> break
         od;
         closed[c] = false; cut[c] = false; gone[c] = false; victim[c] = false;
         open[c] = true;
#if RESTARTS
         number[c] = numbers;
         numbers++;
#endif
         born[c] = life;
         conn[i] = c
       }
    :: else
    fi
  }
}

/* wire.c, hl__mysql_settle: the answer to the last ROLLBACK is read before anything
   is sent. */
inline settle() {
#ifndef BUG_UNSETTLED
  if
  :: outstanding ->
     if
     :: down[c]?_ -> outstanding = false
     :: atomic { gone[c] && empty(down[c]) -> outstanding = false }
     fi
  :: else
  fi
#else
  skip
#endif
}

/* What the store says: OK, TIMEOUT, DEADLOCK; 0 when the connection has ended. */
inline await() {
  if
  :: down[c]?said
  :: cut[c] -> said = 0
  :: atomic { gone[c] && empty(down[c]) -> said = 0 }
  fi
}

/* kill.c, kill_remote: ends the wait at the server by KILL on another connection,
   which must be to the server, and in the life of it, that gave this one its number. */
inline kill_remote() {
#ifndef BUG_NO_KILL
#ifndef BUG_KILL_LIFE
  if
  :: killer[i] == born[c] /* it seems */
  :: else -> killer[i] = life /* connected anew, and asked who it is */
  fi;
  if
  :: killer[i] == born[c] ->
#else
  killer[i] = life;
  if
  :: true ->
#endif
     d_step {
       if
       :: killer[i] == life ->
          do
          :: k < CONNECTIONS ->
             if
             :: open[k] && number[k] == number[c] && (RESTARTS || k == c) ->
                assert(k == c || CLAIM_NO_INNOCENT);
                end_connection2(k)
             :: else
             fi;
             k++
          :: else -> break
          od;
          k = 0
       :: else /* restarted: the killer's connection has ended, too */
       fi
     }
  :: else
  fi
#else
  skip
#endif
}

/* end_connection, with another counter. */
inline end_connection2(d) {
  n = d;
  end_connection(n);
  k = n;
  n = 0
}

/* Claim EXCLUSION: nobody begins to believe while another one believes who conflicts.
   Claim TRUTH: whoever begins to believe holds the rows at the server. */
inline look_at_belief() {
  d_step {
    k = 0;
    do
    :: k < CLIENTS ->
       assert(k == i || !BELIEVES(i) || !BELIEVES(k) ||
              !CONFLICT(believed[i], believed[k]) || CLAIM_EXCLUSION);
       k++
    :: else -> break
    od;
    k = 0;
    do
    :: k < 3 ->
       assert(TOLD(c) || MODE(believed[i], k) == 0 || (exclusive[k] & BIT(c)) ||
              (MODE(believed[i], k) == SHARED && (shared[k] & BIT(c))) || CLAIM_TRUTH);
       k++
    :: else -> break
    od;
    k = 0
  }
}

proctype Client(byte i) {
  byte c = NONE, plan, calls, extends, k, n, j;
  bool outstanding;
  mtype said;

next:
  if
  :: calls == CALLS -> goto last
  :: else -> calls++
  fi;
take:
  take_session();
  settle();
  if
  :: gone[c] -> goto take /* it had gone stale; nothing was held */
  :: else
  fi;
  if
  :: plan = PLAN(SHARED, EXCLUSIVE, 0)
#ifndef FEW_PLANS
  :: plan = PLAN(SHARED, EXCLUSIVE, EXCLUSIVE)
  :: plan = PLAN(EXCLUSIVE, 0, 0)
#endif
  fi;
  /* call.c, piece_begin: from now on it can be interrupted. */
  busy[i] = true;
  if
  :: gone[c] /* it cannot be sent */
  :: up[c]!LOCK(plan)
  fi;
end_wait:
  await();
#ifdef BUG_UNSETTLED
  outstanding = false;
#endif
  /* Interrupted: the wait must end at the server, too (mysql.c, take). */
  if
  :: said == 0 && cut[c] -> kill_remote()
  :: else
  fi;
  /* call.c, acquire: under the manager's mutex. */
  atomic {
    busy[i] = false;
    if
    :: given_up[i] ->
       given_up[i] = false;
       close_connection(); /* hl__pool_discard */
       goto dropped
    :: else
    fi;
    if
    :: said == OK -> believed[i] = plan; look_at_belief()
    :: said == DEADLOCK -> victim[c] = false /* the server has given back everything */
    :: said == TIMEOUT ->
       /* rows.c, undo: the first rows are still locked. */
#ifndef BUG_NO_ROLLBACK
       up[c]!ROLLBACK(0);
       outstanding = true
#endif
    :: said == 0 -> close_connection()
    fi
  };
dropped:
  said = 0; plan = 0;
  if
  :: !believed[i] -> goto next
  :: else
  fi;

held:
  if
  :: atomic { STAYS && !gone[c] -> stays[i] = true; goto last }
  :: atomic {
       extends < EXTENDS && !gone[c] ->
       extends++;
       /* extend.c, hl__extension_init: what is missing. */
       if
       :: believed[i] == PLAN(SHARED, EXCLUSIVE, 0) -> plan = PLAN(0, 0, EXCLUSIVE)
       :: believed[i] == PLAN(SHARED, 0, EXCLUSIVE) -> plan = PLAN(0, EXCLUSIVE, 0)
       :: MODE(believed[i], 0) == SHARED -> plan = PLAN(EXCLUSIVE, 0, 0)
       :: else -> goto held
       fi;
       busy[i] = true
     }
     if
     :: gone[c]
     :: up[c]!LOCK(plan)
     fi;
end_extend:
     await();
     if
     :: said == 0 && cut[c] -> kill_remote()
     :: else
     fi;
     atomic {
       busy[i] = false;
       if
       :: said == OK && !cut[c] ->
          believed[i] = (believed[i] | plan) & (MODE(plan, 0) == EXCLUSIVE -> ~SHARED : 255);
          look_at_belief()
       :: said == DEADLOCK ->
          victim[c] = false;
#ifndef BUG_VICTIM
          believed[i] = 0
#endif
       :: said == TIMEOUT && !cut[c] -> skip /* what is held stays held */
       :: said == 0 || cut[c] -> believed[i] = 0; close_connection() /* hl__lock_lose */
       fi;
       given_up[i] = false;
       said = 0; plan = 0;
       if
       :: believed[i] -> goto held
       :: else -> goto next
       fi
     }
  /* hold.c, hl__hold_release: sent, and not waited for; unless the loss is known. */
  :: atomic {
       believed[i] = 0;
       if
       :: gone[c] -> close_connection()
       :: !gone[c] -> up[c]!ROLLBACK(0); outstanding = true
       fi;
       goto next
     }
  fi;
last: /* Its session stays in the pool. */
  ended[i] = true
}

/* Cancels calls, at any moment: pending.c, give_up. */
#if CANCELS
active proctype Owner() {
  byte left = CANCELS;
end:
  do
  :: atomic { left > 0 && busy[0] && !given_up[0] -> given_up[0] = true; cut[conn[0]] = true; left-- }
  :: atomic { left > 0 && busy[1] && !given_up[1] -> given_up[1] = true; cut[conn[1]] = true; left-- }
  od
}
#endif

#if KILLS || RESTARTS
active proctype Fate() {
  byte k, c, kills, restarts;
end:
  do
  :: d_step { kills < KILLS && open[0] -> kills++; end_connection(0) }
  :: d_step { kills < KILLS && open[1] -> kills++; end_connection(1) }
  :: d_step {
       restarts < RESTARTS ->
       restarts++;
       c = 0;
       do
       :: c < CONNECTIONS && open[c] -> end_connection(c); c++
       :: c < CONNECTIONS && !open[c] -> c++
       :: else -> break
       od;
       c = 0;
       life++;
       numbers = 0
     }
  od
}
#endif

/* Where nothing more can happen. Claim NO_ORPHAN: whatever is locked, or waits, belongs
   to a handle, or to a call that waits. Claim ALL_END: unless somebody keeps a lock for
   ever, every call has come to its end. */
proctype End() {
  byte c, i;
  bool stay, owned;
  timeout ->
  d_step {
    do
    :: i < CLIENTS -> stay = stay || stays[i]; i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < CLIENTS -> assert(stay || ended[i] || CLAIM_ALL_END); i++
    :: else -> break
    od;
    do
    :: c < CONNECTIONS ->
       owned = false;
       i = 0;
       do
       :: i < CLIENTS -> owned = owned || (conn[i] == c && (believed[i] || busy[i])); i++
       :: else -> break
       od;
       assert(!((LOCKED | waiting) & BIT(c)) || owned || CLAIM_NO_ORPHAN);
       c++
    :: else -> break
    od
  }
}

init {
  byte k;
  atomic {
    do
    :: k < CONNECTIONS -> closed[k] = true; run Connection(k); k++
    :: else -> break
    od;
    k = 0;
    do
    :: k < CLIENTS -> conn[k] = NONE; run Client(k); k++
    :: else -> break
    od;
    k = 0;
    run End()
  }
}
