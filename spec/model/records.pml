/*
 * records.pml - leases: who writes, changes and deletes the record of one, and how long its
 * holder believes in it. Programs want one node exclusively, as a session or as a lease, on
 * a server that keeps rows. Time passes in ticks, at any moment: so an answer may take as
 * long as it likes, and a program may be stopped.
 *
 * A Client is a program (csrc/core/lease.c, call.c; below it csrc/stores/mysql/record.c,
 * gate.c, leases.c). What it asks of the records runs in a Slot: a connection, and what the
 * server runs for it. A client that waits no longer leaves its slot and goes on with another
 * one; what it had asked for may still happen, at any time. The Janitor is gate_shut.
 *
 * The statements are those of READ COMMITTED: a plain read sees what is committed, a change
 * waits for whoever has changed the record and has not committed. Only one record can be
 * there; that a second one is never written is a claim (PRESENCE).
 *
 * A lease has a name, its id, and a handle has one, its holder. Instead of times there are
 * the ticks that are left, and ages, in ticks, of requests. All clocks go equally fast.
 */

/* For the messages of spin: which claim an assertion belongs to. Always false. */
hidden byte CLAIM_EXCLUSION, CLAIM_PRESENCE, CLAIM_UNBROKEN, CLAIM_GATE, CLAIM_NO_GHOST;
#ifndef CLIENTS
#define CLIENTS 2
#endif
#ifndef CALLS     /* of each client */
#define CALLS 2
#endif
#ifndef REFRESHES /* of each handle */
#define REFRESHES 1
#endif
#ifndef LOSSES    /* answers that nobody waits for */
#define LOSSES 0
#endif
#ifndef TTL
#define TTL 2
#endif
#ifdef ROLES /* the first takes leases, the others session locks; else both take both */
#define LEASES(i) ((i) == 0)
#define SESSIONS(i) ((i) != 0)
#else
#define LEASES(i) true
#define SESSIONS(i) true
#endif
#define SHORT 1   /* SHORTER: what a refresh or an import may set instead */
#define SLOTS (CLIENTS + LOSSES)
#define NONE 255
#define JANITOR 254
#define REVOKER 253
#define BIT(c) (1 << (c))
#define ALL (BIT(CLIENTS) - 1)
/* Names of leases and handles: the client's number, and its counter. */
#define NAMES 8
/* A handle's refreshes are numbered, and a late one changes nothing. Without losses none is
   late, and there are fewer states. */
#if LOSSES > 0 && !defined(BUG_LATE_REFRESH)
#define TURN(n) (n)
#define IN_TURN (turn < job_turn[s])
#else
#define TURN(n) 0
#define IN_TURN true
#endif
#define CLIENT_OF(name) ((name) / NAMES)

/* --- the server */
byte row = NONE;      /* who has locked the node's row: a slot */
bool gate;            /* hier_lock_gate.n */
byte gate_x = NONE;   /* who has locked the gate's row exclusively */
byte gate_s;          /* who shares it: bits */
/* The record as it is committed; id is NONE: there is none. */
byte id = NONE, holder = NONE, till;
byte turn;            /* of the holder's last refresh that was carried out */
/* What will be, when `writer` commits. */
byte writer = NONE, new_id = NONE, new_holder = NONE, new_till, new_turn;
bool inserted;

/* --- what is asked of the records */
mtype = { IDLE, ONCE, RECORD, REFRESH, DROP, ADOPT };
#define PENDING 2     /* else 1: a record was written, changed, deleted; 0: none was */
mtype job[SLOTS] = IDLE;
byte job_id[SLOTS], job_holder[SLOTS], job_ttl[SLOTS], job_turn[SLOTS], answer[SLOTS];
bool killed[SLOTS];   /* the server has been told to end it */
bool settled[SLOTS];  /* its client is sure that nothing comes of it any more */
byte losses;

/* --- the programs */
byte conn[CLIENTS];          /* the slot of each */
byte me[CLIENTS] = NONE;     /* the name of its handle */
byte lease[CLIENTS] = NONE;  /* the name of its lease: the same, unless it was imported */
byte left[CLIENTS];          /* for so long it believes in its lease */
byte asked[CLIENTS] = TTL;   /* age of the request */
byte session = NONE;         /* who believes to hold a session lock */
byte text = NONE;            /* the lease of an exported text that nobody uses */
/* Others have had the node since its record was written: bits. */
byte passed;
bool wants[CLIENTS];
bool stands[CLIENTS];        /* its handle is there */
#ifdef REVOKES
bool revoked[CLIENTS];       /* its belief does not count any more */
#define REVOKED(i) revoked[i]
#else
#define REVOKED(i) false
#endif

#define BELIEVES(i) (left[i] > 0 || session == (i))
#if CLIENTS == 2
#define OTHERS_BELIEVE(i) BELIEVES(1 - (i))
#define ANY_LEFT (left[0] || left[1])
#define ANY_YOUNG (asked[0] < TTL || asked[1] < TTL)
#else
#define OTHERS_BELIEVE(i) (((i) != 0 && BELIEVES(0)) || ((i) != 1 && BELIEVES(1)) || \
                           ((i) != 2 && BELIEVES(2)))
#define ANY_LEFT (left[0] || left[1] || left[2])
#define ANY_YOUNG (asked[0] < TTL || asked[1] < TTL || asked[2] < TTL)
#endif

#define YOUNGER(time) time = (time > 0 -> time - 1 : 0)
#define OLDER(age) age = (age < TTL -> age + 1 : TTL)

/* Only while it changes something. */
active proctype Clock() {
end:
  do
  :: d_step {
       till || new_till || ANY_LEFT || ANY_YOUNG ->
       YOUNGER(till); YOUNGER(new_till);
       YOUNGER(left[0]); YOUNGER(left[1]);
       OLDER(asked[0]); OLDER(asked[1])
#if CLIENTS > 2
       ; YOUNGER(left[2]); OLDER(asked[2])
#endif
     }
  od
}

/* Claim GATE: it is never shut while a record is there. */
inline gate_check() { assert(id == NONE || gate || CLAIM_GATE) }

/* UTC_TIMESTAMP is that of a statement's beginning, so the ttl counts from there. */
inline change(an_id, a_holder, ttl, a_turn) {
  writer = s;
  new_id = an_id;
  new_holder = (an_id == NONE -> NONE : a_holder);
  new_till = (an_id == NONE -> 0 : ttl);
  new_turn = (an_id == NONE -> 0 : a_turn);
  hit = true
}

/* Claim PRESENCE, of those who write a record. */
inline insert() {
  assert(id == NONE || CLAIM_PRESENCE);
  change(job_id[s], job_holder[s], job_ttl[s], 0);
  inserted = true
}

inline give_back(s) {
  row = (row == s -> NONE : row);
  gate_x = (gate_x == s -> NONE : gate_x);
  gate_s = gate_s & ~BIT(s);
  if
  :: writer == s ->
     writer = NONE; new_id = NONE; new_holder = NONE; new_till = 0; new_turn = 0; inserted = false
  :: else
  fi
}

inline finish(said) {
  give_back(s);
  job[s] = IDLE;
  job_id[s] = 0; job_holder[s] = 0; job_ttl[s] = 0; job_turn[s] = 0;
  answer[s] = said;
  hit = false
}

/* Claim NO_GHOST: nothing is written for a client that was told that nothing is. Claim
   UNBROKEN: what a refresh or a release finds, nobody else has had in between. */
inline commit() {
  if
  :: gate_x == s -> gate = true
  :: else
  fi;
  if
  :: writer == s ->
     id = new_id; holder = new_holder; till = new_till; turn = new_turn;
     if
     :: inserted ->
        assert(!settled[s] || CLAIM_NO_GHOST);
        /* For whoever still waits for the answer the count begins here. */
        passed = passed | (ALL & ~BIT(CLIENT_OF(holder)));
        passed = (conn[CLIENT_OF(holder)] == s -> passed & ~BIT(CLIENT_OF(holder)) : passed)
     :: (job[s] == REFRESH || job[s] == DROP) && stands[CLIENT_OF(job_holder[s])] &&
        me[CLIENT_OF(job_holder[s])] == job_holder[s] ->
        assert(!(passed & BIT(CLIENT_OF(job_holder[s]))) || CLAIM_UNBROKEN)
     :: job[s] == ADOPT && conn[CLIENT_OF(holder)] == s -> passed = passed & ~BIT(CLIENT_OF(holder))
     :: else
     fi
  :: else
  fi;
  gate_check()
}

#ifdef BUG_ONE_HOLDER /* an import changes no holder */
#define OURS true
#else
#define OURS (holder == job_holder[s])
#endif

/* Every statement begins with a look whether the connection has been killed. */
#define STOPPED killed[s] -> goto undo
#define RUNS(x) !killed[s] && (x)

proctype Slot(byte s) {
  bool hit;
end:
begin:
  if
  :: job[s] == ONCE -> goto lock
  :: job[s] == RECORD -> goto open
  :: job[s] == REFRESH || job[s] == DROP || job[s] == ADOPT -> goto alter
  fi;

  /* put_record_at_once: the row, the gate FOR SHARE NOWAIT, and a record if it says 1 and
     none is there. */
lock:
  if
  :: atomic { STOPPED }
  :: atomic { RUNS(row == NONE) -> row = s }
  fi;
#ifndef BUG_NO_SHARE
  if
  :: atomic { STOPPED }
  :: atomic { RUNS(gate_x == NONE) -> gate_s = gate_s | BIT(s) }
  :: atomic { RUNS(gate_x != NONE) -> goto undo }
  fi;
#endif
  if
  :: atomic { STOPPED }
#ifdef BUG_NO_LOOK
  :: atomic { RUNS(writer == NONE && gate) -> insert(); goto end_it }
#else
  :: atomic { RUNS(writer == NONE && gate && id == NONE) -> insert(); goto end_it }
  :: atomic { RUNS(gate && id != NONE) -> goto undo }
#endif
  :: atomic { RUNS(!gate) -> goto undo }
  fi;

  /* put_record, of one who has the row and has looked. */
open:
#ifdef BUG_GATE_UNOPENED
  skip;
#else
  if
  :: atomic { STOPPED }
  :: atomic { RUNS(gate_x == NONE && gate_s == 0) -> gate_x = s }
  fi;
#endif
  if
  :: atomic { STOPPED }
  :: atomic { RUNS(writer == NONE) -> insert(); goto end_it }
  fi;

  /* lease_refresh, lease_drop, lease_adopt: one statement. */
alter:
  if
  :: atomic { STOPPED }
  :: atomic {
       RUNS(writer == NONE) ->
       if
#ifdef BUG_RECREATE
       :: job[s] == REFRESH && id == NONE -> gate = true; change(job_id[s], job_holder[s], job_ttl[s], 0)
#endif
       :: job[s] == REFRESH && id == job_id[s] && OURS && IN_TURN ->
          change(id, holder, job_ttl[s], job_turn[s])
       :: job[s] == DROP && id == job_id[s] && OURS -> change(NONE, NONE, 0, 0)
       :: job[s] == ADOPT && id == job_id[s] ->
#ifdef BUG_IMPORT_SILENT
          change(id, job_holder[s], till, 0)
#else
          change(id, job_holder[s], job_ttl[s], 0)
#endif
       :: else
       fi
     }
  fi;

end_it:
  if
  :: atomic { STOPPED }
  :: atomic { !killed[s] -> commit(); finish(hit); goto begin }
  fi;

undo:
  atomic { finish(false); goto begin }
}

/* gate.c, gate_shut: in a transaction of a connection of its own. */
active proctype Janitor() {
  bool none;
end:
  do
  :: atomic {
#ifdef BUG_LOOK_FIRST
       gate -> none = (id == NONE)
     };
     atomic {
       gate_x == NONE && gate_s == 0 -> gate_x = JANITOR
     }
#else
       gate && gate_x == NONE && gate_s == 0 -> gate_x = JANITOR
     };
     none = (id == NONE);
#endif
     atomic { gate = !none; gate_x = NONE; none = false; gate_check() }
  od
}

#ifdef REVOKES
/* leases.c, revoke_one. The holder does not know it yet, and the token alone protects what
   he writes. */
active proctype Revoker() {
end:
  atomic { id != NONE && till > 0 && writer == NONE -> writer = REVOKER };
  atomic {
    revoked[CLIENT_OF(holder)] = (me[CLIENT_OF(holder)] == holder);
    left[CLIENT_OF(holder)] = (me[CLIENT_OF(holder)] == holder -> 0 : left[CLIENT_OF(holder)]);
    id = NONE; holder = NONE; till = 0; turn = 0; writer = NONE
  }
}
#endif

inline ask(what, ttl) {
  job_turn[conn[i]] = mine;
  job_id[conn[i]] = lease[i];
  job_holder[conn[i]] = me[i];
  job_ttl[conn[i]] = ttl;
  answer[conn[i]] = PENDING;
  asked[i] = 0;
  job[conn[i]] = what
}

#define ANSWERED (answer[conn[i]] != PENDING)
#define YES (answer[conn[i]] == 1)
#define NO (answer[conn[i]] == 0)
#define UNANSWERED (losses < LOSSES && answer[conn[i]] == PENDING)

/* The connection is left alone, with what it may still do. */
inline leave() {
  old = conn[i];
  conn[i] = CLIENTS + losses;
  losses++
}

inline name_take() {
  names++;
  me[i] = i * NAMES + names;
  lease[i] = me[i]
}

/* lease.c, believe. Claim EXCLUSION. */
inline believe(ttl) {
#ifdef BUG_FROM_ANSWER
  left[i] = ttl;
#else
  left[i] = (asked[i] < ttl -> ttl - asked[i] : 0);
#endif
  left[i] = (REVOKED(i) -> 0 : left[i]);
  asked[i] = TTL;
  assert(!left[i] || !OTHERS_BELIEVE(i) || CLAIM_EXCLUSION)
}

inline ended() {
  left[i] = 0;
  asked[i] = TTL;
  wants[i] = false
}

proctype Client(byte i) {
  byte calls, names, refreshes, tries, old, seen, ttl, mine;
  bool leased, by_session, converts;
idle:
  atomic {
#ifdef EXPORTS
    /* Its text is as good as it was. */
    text = (me[i] != lease[i] -> lease[i] : text);
#endif
#ifdef REVOKES
    revoked[i] = false;
#endif
    me[i] = NONE; lease[i] = NONE; refreshes = 0; tries = 0; old = 0; seen = 0; ttl = 0; mine = 0;
    leased = false; by_session = false; converts = false; wants[i] = false; stands[i] = false; asked[i] = TTL
  };
  if
  :: calls == CALLS -> goto done
  :: atomic { calls < CALLS && LEASES(i) -> calls++; wants[i] = true; name_take(); goto at_once }
  :: atomic { calls < CALLS && LEASES(i) -> calls++; wants[i] = true; name_take(); goto steps }
  :: atomic { calls < CALLS && SESSIONS(i) -> calls++; wants[i] = true; by_session = true; goto steps }
#ifdef EXPORTS
  :: atomic {
       calls < CALLS && text != NONE ->
       calls++; name_take(); lease[i] = text; text = NONE; ttl = TTL;
#ifdef SHORTER
       if
       :: ttl = TTL
       :: ttl = SHORT
       fi;
#endif
       ask(ADOPT, ttl);
       goto import
     }
#endif
  fi;

at_once:
  atomic { ttl = TTL; ask(ONCE, ttl) };
  if
  :: atomic { ANSWERED && YES -> goto granted }
  :: atomic { ANSWERED && NO -> goto steps }
  :: atomic { UNANSWERED -> leave(); goto lost }
  fi;

  /* take_in_steps; and each session. */
steps:
#ifdef BUG_GATE_FIRST
  leased = gate;
  atomic { row == NONE -> row = conn[i] };
#else
  atomic { row == NONE -> row = conn[i] };
  leased = gate;
#endif
  if
  :: leased
  :: !leased -> goto free
  fi;
look:
  if
  :: atomic { id == NONE -> goto free }
#ifdef BUG_SKIPPED
  :: atomic { id != NONE && till == 0 -> goto free }
#else
#ifndef BUG_NOT_DELETED
  :: atomic { id != NONE && till == 0 -> seen = id }
#endif
#endif
#ifdef TIMEOUTS
  :: atomic { id != NONE && till > 0 -> row = NONE; goto idle }
#endif
  fi;
  /* expired_delete: on another connection, one statement. */
  atomic {
#ifdef BUG_DELETE_NO_WAIT
    if
    :: id == seen && till == 0 -> id = NONE; holder = NONE; turn = 0
    :: else
    fi;
#else
    writer == NONE ->
    if
#ifdef BUG_DELETE_BLIND
    :: id == seen -> id = NONE; holder = NONE; till = 0; turn = 0
#else
    :: id == seen && till == 0 -> id = NONE; holder = NONE; turn = 0
#endif
    :: else
    fi;
#endif
    seen = 0;
    goto look
  };

free:
  if
  :: atomic {
       by_session ->
       assert(id == NONE || CLAIM_PRESENCE);
       passed = passed | (ALL & ~BIT(i));
       session = i;
       wants[i] = false;
       assert(!OTHERS_BELIEVE(i) || CLAIM_EXCLUSION)
     }
  :: atomic { !by_session -> goto record }
  fi;
  if
  :: atomic { session = NONE; row = NONE; goto idle }
#ifdef CONVERTS
  /* The session's rows go with the commit. From now on it may be a lease that ends, before
     its owner hears of it (pending.c, occupy). */
  :: atomic {
       converts = true; name_take();
#ifndef BUG_CONVERT_BELIEVED
       session = NONE; left[i] = TTL;
#endif
       goto record
     }
#endif
  fi;

record:
  atomic { ttl = TTL; ask(RECORD, ttl) };
  if
  :: atomic { ANSWERED && YES -> session = (session == i -> NONE : session); goto granted }
  :: atomic { UNANSWERED -> session = (session == i -> NONE : session); left[i] = 0; leave(); goto lost }
  fi;

granted:
  atomic { believe(ttl); stands[i] = true; wants[i] = false };
held:
  if
  :: atomic {
       refreshes < REFRESHES ->
       refreshes++;
       ttl = TTL;
#ifdef SHORTER
       if
       :: ttl = TTL
       :: ttl = SHORT
       fi;
#endif
#ifndef BUG_NO_DOUBT
       left[i] = (ttl < left[i] -> ttl : left[i]);
#endif
       mine = TURN(mine + 1);
       ask(REFRESH, ttl)
     }
  :: atomic { ended(); goto drop }
#ifdef EXPORTS
  :: atomic { ended(); me[i] = NONE; goto idle }
#endif
#ifdef DEATH
  :: atomic { i == 0 -> ended(); goto done }
#endif
  fi;
  if
  :: atomic {
       ANSWERED && YES ->
       believe(ttl);
       if
       :: left[i] == 0 -> goto drop /* hl__lease_refresh: late */
       :: else -> goto held
       fi
     }
  :: atomic { ANSWERED && NO -> ended(); goto idle }
  :: atomic { UNANSWERED -> leave(); old = 0; asked[i] = TTL; goto held }
  fi;

  /* hl__lease_release, _undo. */
drop:
  atomic { ask(DROP, 0) };
  if
  :: atomic { ANSWERED -> goto idle }
  :: atomic { UNANSWERED -> leave(); goto idle }
  fi;

#ifdef EXPORTS
import:
  if
  :: atomic { ANSWERED && YES -> goto granted }
  :: atomic { ANSWERED && NO -> goto idle }
  :: atomic { UNANSWERED -> leave(); goto idle }
  fi;
#endif

  /* call.c, acquire, to_lease: the record may be there. hl__lease_recall. */
lost:
#ifndef BUG_NO_KILL
  if
  :: killed[old] = true
#ifdef KILL_FAILS
  :: skip
#endif
  fi;
#endif
#ifndef BUG_NO_RECALL
recall:
  atomic { ask(DROP, 0) };
  if
  :: ANSWERED
#ifdef TWICE
  /* hl__pool_run asks again, once, on a fresh connection. */
  :: atomic { UNANSWERED && losses + 1 == LOSSES -> ttl = old; leave(); old = ttl; ttl = 0; goto recall }
#endif
  :: atomic { UNANSWERED -> leave(); goto idle }
  fi;
#endif
  atomic {
#ifndef KILL_FAILS
    settled[old] = true;
    assert(id == NONE || id != lease[i] || CLAIM_NO_GHOST);
#endif
    old = 0;
    if
    :: !converts && tries == 0 ->
       tries = 1;
#ifndef BUG_SAME_NAME
       name_take();
#endif
       goto at_once
    :: goto idle
    fi
  };

done:
  wants[i] = false
}

#ifdef LTL
/* Whoever wants the node gets it, or gives up; also if a holder has gone without a word. */
ltl served { [] (wants[1] -> <> !wants[1]) }
#endif

init {
  atomic {
    byte n;
    for (n : 0 .. CLIENTS - 1) { conn[n] = n }
    for (n : 0 .. SLOTS - 1) { run Slot(n) }
    for (n : 0 .. CLIENTS - 1) { run Client(n) }
    n = 0
  }
}
