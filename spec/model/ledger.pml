/*
 * ledger.pml - the records of leases of the embedded store: a file that all processes have
 * mapped, and a lock of the kernel's around whatever is done with it. Programs want one row
 * exclusively, as a session or as a lease; one of them may be killed between any two
 * instructions, and the kernel then gives its locks back. Time passes at any moment.
 *
 * A Program is csrc/stores/file/leases.c, record.c, ledger.c; file.c, row_take. How a row is
 * waited for is the matter of queue.pml, and so is the sleep of those whom a lease keeps out.
 *
 * The count (hl__file_signal.leases) is read without the lock, by all who have locked the
 * row: with 0 they look no further.
 */

/* For the messages of spin: which claim an assertion belongs to. Always false. */
hidden byte CLAIM_EXCLUSION, CLAIM_PRESENCE, CLAIM_UNBROKEN, CLAIM_COUNTED, CLAIM_MENDED;
#ifndef PROGRAMS
#define PROGRAMS 2
#endif
#ifndef CALLS     /* of each program */
#define CALLS 2
#endif
#ifndef REFRESHES /* of each handle */
#define REFRESHES 1
#endif
#define TTL 2
#define NONE 255
#define ALL ((1 << PROGRAMS) - 1)
#define BIT(i) (1 << (i))

/* --- the kernel */
byte row = NONE, ledger = NONE; /* who has them */

/* --- the file */
bool changing;
bool live;            /* the record's state; there is one for each lease */
bool linked;          /* it is in the chain of its row */
byte holder = NONE;   /* its id and its holder */
byte till;
byte count;

/* --- the programs */
byte left[PROGRAMS];  /* for so long each believes in its lease */
byte asked[PROGRAMS] = TTL; /* age of the time that it took the end from */
byte session = NONE;  /* who believes to hold a session lock */
byte passed;          /* others have had the row since its record was written: bits */
bool killed[PROGRAMS];

#define BELIEVES(i) (left[i] > 0 || session == (i))
#if PROGRAMS == 2
#define OTHERS_BELIEVE(i) BELIEVES(1 - (i))
#define ANY (left[0] || left[1] || asked[0] < TTL || asked[1] < TTL)
#else
#define OTHERS_BELIEVE(i) (((i) != 0 && BELIEVES(0)) || ((i) != 1 && BELIEVES(1)) || \
                           ((i) != 2 && BELIEVES(2)))
#define ANY (left[0] || left[1] || left[2] || asked[0] < TTL || asked[1] < TTL || asked[2] < TTL)
#endif

#define YOUNGER(time) time = (time > 0 -> time - 1 : 0)
#define OLDER(age) age = (age < TTL -> age + 1 : TTL)

/* Only while it changes something. */
active proctype Clock() {
end:
  do
  :: d_step {
       till || ANY ->
       YOUNGER(till);
       YOUNGER(left[0]); YOUNGER(left[1]);
       OLDER(asked[0]); OLDER(asked[1])
#if PROGRAMS > 2
       ; YOUNGER(left[2]); OLDER(asked[2])
#endif
     }
  od
}

/* Claim COUNTED: who reads the count sees a record that is there. */
#define CHECK assert(!live || count > 0 || CLAIM_COUNTED)

/* hl__ledger_mend. */
inline mend() {
#ifndef BUG_NOT_MENDED
  linked = live;
  atomic { count = live; CHECK };
#endif
  changing = false
}

/* hl__ledger_take, ledger_refresh: what was left in the middle is made anew. Claim MENDED:
   then the record is whole, or none. */
inline take() {
  atomic { ledger == NONE -> ledger = i };
  if
  :: changing -> mend()
  :: !changing
  fi;
  assert((linked == live && count == live) || CLAIM_MENDED)
}

inline give() { ledger = NONE }

/* lease_add: it counts and is found before it is valid. Claim PRESENCE. */
inline add() {
  changing = true;
  holder = i;
#ifdef BUG_COUNT_LATE
  atomic { assert(!live || CLAIM_PRESENCE); live = true; passed = ALL & ~BIT(i); CHECK };
  linked = true;
  count++;
#else
  count++;
  linked = true;
  atomic { assert(!live || CLAIM_PRESENCE); live = true; passed = ALL & ~BIT(i); CHECK };
#endif
  changing = false
}

/* hl__ledger_remove: it has ceased to be valid before it is found no more. */
inline remove() {
  changing = true;
#ifdef BUG_UNCOUNTED_FIRST
  linked = false;
  atomic { count--; CHECK };
  live = false;
#else
  live = false;
  linked = false;
  count--;
#endif
  changing = false
}

/* hl__ledger_until, and lease.c: belief counts from the same moment. */
inline renew() {
  d_step { asked[i] = 0; till = TTL }
}

/* Claim EXCLUSION. */
inline believe() {
  atomic {
    left[i] = TTL - asked[i];
    asked[i] = TTL;
    assert(!left[i] || !OTHERS_BELIEVE(i) || CLAIM_EXCLUSION)
  }
}

#define MINE (live && holder == i)

/* row_take, with hl__file_lease_await: the row, and nothing in its way. */
inline get() {
  atomic { row == NONE -> row = i };
  if
  :: count == 0
  :: count > 0 ->
     do
     ::
#ifdef BUG_TIME_FIRST
        over = (till == 0);
        take();
#else
        take();
        over = (till == 0);
#endif
        if
        :: !live -> give(); break
        :: live && over ->
#ifdef BUG_SKIPPED
           give(); break
#else
           remove();
           give()
#endif
        :: live && !over ->
           give();
           (!live || till == 0) /* it sleeps */
        fi
     od
  fi
}

proctype Program(byte i) {
  byte calls, refreshes;
  bool over;
  {
    do
    :: calls == CALLS -> break
    :: atomic { calls < CALLS -> calls++ };
       get();
       if
       :: atomic {
            assert(!live || CLAIM_PRESENCE);
            passed = passed | (ALL & ~BIT(i));
            session = i;
            assert(!OTHERS_BELIEVE(i) || CLAIM_EXCLUSION)
          };
          atomic { session = NONE; row = NONE };
       :: skip;
          /* record_write. */
#ifdef BUG_ROW_GIVEN
          row = NONE;
#endif
          take();
          renew();
          add();
          give();
#ifndef BUG_ROW_GIVEN
          row = NONE;
#endif
          believe();
          refreshes = 0;
          do
          :: refreshes < REFRESHES ->
             refreshes++;
             /* lease_refresh. Claim UNBROKEN: nobody has had it in between. */
#ifdef BUG_REFRESH_UNLOCKED
             if
             :: MINE -> renew()
             :: !MINE -> left[i] = 0; break
             fi;
#else
             take();
             if
             :: atomic { MINE -> assert(!(passed & BIT(i)) || CLAIM_UNBROKEN) };
                renew();
                give()
             :: !MINE -> left[i] = 0; give(); break
             fi;
#endif
             believe()
          :: left[i] = 0;
             /* lease_drop. */
             take();
             if
             :: MINE -> remove()
             :: !MINE
             fi;
             give();
             break
          od
       fi
    od
  } unless {
    atomic {
      killed[i] ->
      left[i] = 0; asked[i] = TTL;
      session = (session == i -> NONE : session);
      row = (row == i -> NONE : row);
      ledger = (ledger == i -> NONE : ledger)
    }
  }
}

#ifdef DEATHS
active proctype Fate() {
  atomic { killed[0] = true }
}
#endif

init {
  atomic {
    byte n;
    for (n : 0 .. PROGRAMS - 1) { run Program(n) }
    n = 0
  }
}
