/*
 * test_step.c - a process is killed behind its k-th instruction in an operation on the embedded
 * store's table, and then all must be well: what it held is free, others' locks stand, the index is
 * what the claims say, and a waiter gets what it waits for.
 *
 * A forked child is single-stepped through the operation (ptrace). STEPS=all: for each k; STEPS=n:
 * for n of them (12). A stride's offset is drawn, and said: OFFSET repeats it. `make step` is all
 * of them.
 *
 * The first child is stepped to the end, and leaves a trail: the address of each instruction. A
 * later child runs to a breakpoint shortly before its k, where there is one, and is stepped from
 * there: an opening has 45,000 instructions, of which most are those of a few loops.
 */
#include "../embedded/table.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <time.h>

#include <cmocka.h>

#include "leftovers.h"

enum {
  PATIENCE_MS = 5000, /* how long the parent waits for what is to come soon */
  LIMIT = 2000000     /* instructions; no operation has as many */
};

typedef struct shared {
  atomic_int done; /* the child has done it */
} shared;
static shared *between;

static hl__shm_space *space;
static hl__shm_session *live, *taker, *waiting;
/* What the child works on; what `live` holds all the time. */
static hl_row own[3], mine[2], awaited;
static long kills, wrongs;

/* --------------------------------------------------------------- the child */

typedef struct stepped {
  hl__shm_space *space;
  hl__shm_session *session;
  uint32_t lease;
} stepped;

static void lease_make(stepped *it, int64_t ms) {
  it->lease = hl__shm_lease_make(it->space);
  if (hl__shm_lease_claims(it->session, it->lease, INT64_MAX, &fault) != HL_OK) _exit(3);
  hl__shm_lease_publish(it->space, it->lease, hl__shm_boot_ms(it->space) + ms);
  hl__shm_give_back(it->session, 0);
}

static uint64_t stamp_of(hl__shm_space *in, uint32_t lease) {
  return atomic_load(&hl__shm_lease_at(in, lease)->base.stamp);
}

static void do_nothing(stepped *it) { (void)it; }
static void hold(stepped *it) { (void)take(it->session, own, 3, 0); }
static void give_back(stepped *it) { hl__shm_give_back(it->session, 0); }
static void wait_in_vain(stepped *it) { (void)take_one(it->session, row(2, 404, X), 2); }
static void be_cancelled(stepped *it) {
  hl__shm_cancel(it->session);
  (void)take_one(it->session, row(2, 404, X), PATIENCE_MS);
}
static void be_granted(stepped *it) { (void)take_one(it->session, own[2], PATIENCE_MS); }
static void share(stepped *it) {
  hl_row rows[2] = {own[0], row(1, 202, U)};
  (void)take(it->session, rows, 2, 0);
}
static void upgrade_and_back(stepped *it) {
  hl_row up = row(1, 202, X);
  (void)take(it->session, &up, 1, 0);
  (void)hl__shm_give_back_row(it->session, &up);
}
/* Intends to work below rows. */
static void intend(stepped *it) {
  const hl_row rows[3] = {row(0, 101, (hl_mode)HL__IS), row(1, 202, (hl_mode)HL__IX),
                          row(2, 303, (hl_mode)HL__IX)};
  (void)take(it->session, rows, 3, 0);
}
/* Shares what is below, too, so that it has SIX; and makes a lease of all that. */
static void share_beside(stepped *it) {
  (void)take_one(it->session, own[1], 0);
  lease_make(it, 1);
}
static void sweep(stepped *it) { hl__shm_sweep(it->space, true, INT64_MAX); }
static void to_lease(stepped *it) { lease_make(it, 1); }
static void hold_lease(stepped *it) {
  hold(it);
  lease_make(it, 1000000);
}
static void end_lease(stepped *it) {
  (void)hl__shm_lease_end(it->space, it->lease, stamp_of(it->space, it->lease), 0);
}
static void convert_lease(stepped *it) {
  hl_row up = row(1, 202, X), down = row(1, 202, S);
  const hl_request request = {.rows = &up, .n = 1, .try_once = true};
  (void)hl__shm_take(it->session, &request, stamp_of(it->space, it->lease), &fault);
  (void)hl__shm_lease_convert(it->space, it->lease, stamp_of(it->space, it->lease), &up, INT64_MAX,
                              &fault);
  hl__shm_give_back(it->session, 0);
  (void)hl__shm_lease_convert(it->space, it->lease, stamp_of(it->space, it->lease), &down,
                              INT64_MAX, &fault);
}
static void open_it(stepped *it) { it->space = space_open(); }
static void take_and_close(stepped *it) {
  hold(it);
  hl__shm_end(it->session);
  hl__shm_space_unref(it->space);
}

typedef struct operation {
  void (*before)(stepped *it);
  void (*run)(stepped *it);
  bool opens;   /* the child has not opened the directory */
  bool waited;  /* a thread of the parent waits for own[2], if it only intends, shared ... */
  bool rings;   /* ... or the bell does */
  bool granted; /* the parent holds own[2], and gives it back meanwhile */
  bool mends;   /* a third process has died inside */
  bool waits;   /* so another thread of the child may come to a breakpoint */
} operation;

static _Noreturn void child(const operation *what) {
  stepped it = {0};
  if (!what->opens) {
    it.space = space_open();
    if (!it.space) _exit(1);
    it.session = session_begin(it.space);
    (void)take(it.session, own, 3, 0); /* whatever is needed only once is there */
    hl__shm_give_back(it.session, 0);
    if (what->run == wait_in_vain || what->granted) wait_in_vain(&it);
    what->before(&it);
  }
  (void)ptrace(PTRACE_TRACEME, 0, NULL, NULL);
  (void)raise(SIGSTOP);
  what->run(&it);
  atomic_store(&between->done, 1);
  for (;;) (void)raise(SIGSTOP);
}

/* Takes five rows, and dies with the lock of a partition in which there are claims. */
static void die_inside(long k) {
  pid_t pid = fork();
  if (pid == 0) {
    hl__shm_space *inside = space_open();
    hl__shm_session *session = session_begin(inside);
    hl_row more[2] = {row(1, 1, X), row(2, 2, S)};
    (void)take(session, own, 3, 0);
    (void)take(session, more, 2, 0);
    uint64_t key = hl__shm_key(k % 2 ? 404 : 303, 2);
    (void)hl__shm_part_lock(inside, hl__shm_part_of(hl__shm_hash(key)), INT64_MAX, NULL);
    (void)raise(SIGKILL);
  }
  (void)waitpid(pid, NULL, 0);
}

/* -------------------------------------------------------------- the parent */

static void wrong(const char *what, long k) {
  if (wrongs++ < 10) (void)fprintf(stderr, "k=%ld: %s (%s)\n", k, what, fault.message);
}

static int waiter_status;
static atomic_int waiter_told;
static hl__shm_taking taking;
static hl_error ear_fault;

/* hl__shm_ear.go */
static bool ear_go(hl__shm_ear *ear) {
  int status = hl__shm_take_go(&taking, ear, &ear_fault);
  if (status == HL__UNFREE) return true;
  hl__shm_bell_leave(waiting);
  waiter_status = status;
  atomic_store(&waiter_told, 1);
  return false;
}

/* Waits for own[2]; with `context` as a take does that does not block. */
static void *waiter_run(void *context) {
  hl_error error;
  const hl_request request = {.rows = &awaited, .n = 1, .deadline = hl__now_ms() + PATIENCE_MS};
  if (context) {
    hl__shm_ear ear = {.go = ear_go};
    taking = (hl__shm_taking){.session = waiting, .request = &request};
    atomic_store(&waiter_told, 0);
    if (hl__shm_take_begin(&taking, &error) != HL_OK ||
        hl__shm_bell_enter(waiting, &ear, &error) != HL_OK)
      abort();
    while (!atomic_load(&waiter_told)) (void)usleep(50);
    return NULL;
  }
  waiter_status = hl__shm_take(waiting, &request, 0, &error);
  return NULL;
}

static bool strayed; /* the last child went another way, and came to its end */

#if defined(__x86_64__)
/* What the child is about to execute behind each step, and how often it was there before. */
static struct trail {
  unsigned long at;
  uint32_t before;
} trail[LIMIT];
static long trail_end;

static unsigned long where(pid_t pid) {
  return (unsigned long)ptrace(PTRACE_PEEKUSER, pid, offsetof(struct user, regs.rip), NULL);
}

/* Notes where the child is, behind its first i steps. */
static void trail_add(pid_t pid, long i) {
  static struct trail seen[1 << 16]; /* by address; `before` counts */
  const unsigned long at = where(pid);
  size_t slot = at * 0x9E3779B97F4A7C15u >> 48;
  if (i == 0) memset(seen, 0, sizeof seen);
  while (seen[slot].at && seen[slot].at != at) slot = (slot + 1) & 0xFFFF;
  seen[slot].at = at;
  trail[i] = (struct trail){at, seen[slot].before++};
  trail_end = i + 1;
}

/* The last of the first k steps behind which a breakpoint leads the child with the fewest stops. */
static long breakpoint_for(long k) {
  long best = 0, least = k;
  for (long i = 1; i <= k && i < trail_end; i++) {
    long stops = k - i + 4 * ((long)trail[i].before + 1);
    if (stops <= least) {
      least = stops;
      best = i;
    }
  }
  return best;
}

static bool resume(pid_t pid, int how) {
  int status;
  return ptrace((enum __ptrace_request)how, pid, NULL, NULL) == 0 &&
         waitpid(pid, &status, 0) == pid && WIFSTOPPED(status) && !atomic_load(&between->done);
}

/* Lets the child run to the i-th place of the trail. False: it has come to its end. */
static bool run_to(pid_t pid, long i) {
  unsigned char *place = (unsigned char *)(trail[i].at & ~7ul);
  long code = ptrace(PTRACE_PEEKTEXT, pid, place, NULL);
  long shift = 8 * (long)(trail[i].at & 7);
  long trap = (long)(((unsigned long)code & ~(0xFFul << shift)) | 0xCCul << shift);
  for (uint32_t n = 0;; n++) {
    if (ptrace(PTRACE_POKETEXT, pid, place, trap) != 0) break;
    if (!resume(pid, PTRACE_CONT)) return false;
    if (where(pid) != trail[i].at + 1) return false; /* it was killed by something else */
    (void)ptrace(PTRACE_POKETEXT, pid, place, code);
    (void)ptrace(PTRACE_POKEUSER, pid, offsetof(struct user, regs.rip), trail[i].at);
    if (n == trail[i].before) return true;
    if (!resume(pid, PTRACE_SINGLESTEP)) return false;
  }
  wrong("there is no breakpoint", i);
  return false;
}
#else
static void trail_add(pid_t pid, long i) { (void)pid, (void)i; }
static long breakpoint_for(long k) { return k * 0; }
static bool run_to(pid_t pid, long i) { return (void)pid, i == 0; }
#endif

/* Steps the child k times, or until it is done or has strayed. How often; `giver` gives its row
   back behind the step `give`, or where the child sleeps. */
static long step_on(const operation *what, pid_t pid, long k, hl__shm_session *giver) {
  const long give = k / 2 + 1;
  long i = k < LIMIT && !what->waits && !strayed ? breakpoint_for(k) : 0;
  strayed = i > 0 && !run_to(pid, i);
  if (strayed) return i;
  for (; i < k && !atomic_load(&between->done); i++) {
    int status;
    if (k == LIMIT) trail_add(pid, i);
    if (i == give && giver) hl__shm_give_back(giver, 0);
    if (ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL) != 0) break;
    int64_t begun = hl__shm_now();
    while (waitpid(pid, &status, giver ? WNOHANG : 0) == 0)
      if (hl__shm_now() - begun > 1000000) hl__shm_give_back(giver, 0);
    if (!WIFSTOPPED(status)) break;
  }
  return i;
}

typedef struct tally {
  int held, awaited;
} tally;

static bool count_claim(void *context, const hl__shm_claim_seen *seen) {
  tally *it = context;
  ++*(hl__shm_state_of(seen->claim) == HL__HELD ? &it->held : &it->awaited);
  return true;
}

static bool end_any(void *context, uint32_t lease) {
  (void)context;
  (void)hl__shm_lease_end(space, lease, stamp_of(space, lease), 0);
  return true;
}

/* How many records of leases are used, once those that stand are ended. */
static int leases_left(void) {
  int n = 0;
  hl__shm_each_lease(space, end_any, NULL);
  for (uint32_t chunk = 1; chunk < hl__shm_chunks(space); chunk++)
    for (uint32_t i = 0; atomic_load(&space->table->dir[chunk]) == (uint32_t)HL__LEASES << 24 &&
                         i < HL__SHM_PER_CHUNK;
         i += HL__SHM_LEASE_UNITS)
      n += atomic_load(&hl__shm_lease_at(space, chunk * HL__SHM_PER_CHUNK + i)->base.used) != 0;
  return n;
}

/* The child is dead. */
static void all_is_well(const operation *what, long k) {
  const hl_row free_rows[3] = {row(1, 202, X), row(2, 303, X), row(2, 909, X)};
  const char *said;
  tally n = {0};
  if (take_one(taker, row(2, 404, S), 0) == HL_OK) wrong("what a live process holds was free", k);
  if (what->before == hold_lease) (void)leases_left();
  for (int i = 0; i < 3; i++) {
    if (take_one(taker, free_rows[i], PATIENCE_MS) != HL_OK) wrong("a row was not to be had", k);
    hl__shm_give_back(taker, 0);
  }
  if (take_one(taker, row(0, 101, X), 0) == HL_OK) wrong("what a live process shares was free", k);
  hl__shm_give_back(taker, 0);
  if (hl__shm_session_check(live, true, &fault) != HL_OK)
    wrong("a live process' claim is another", k);
  /* Another thread of this process may be mending at this moment. */
  const int64_t patience = hl__now_ms() + PATIENCE_MS;
  int leases;
  do {
    n = (tally){0};
    hl__shm_sweep(space, true, INT64_MAX);
    leases = leases_left();
    hl__shm_each_claim(space, count_claim, &n);
  } while ((n.held != 2 || n.awaited != 0 || leases != 0) && hl__now_ms() < patience);
  if (n.held != 2 || n.awaited != 0) wrong("claims are left", k);
  if (leases != 0) wrong("a lease's record is left", k);
  if ((said = verify(space))) wrong(said, k);
}

/* One kill. How many instructions the child had executed. */
static long kill_behind(const operation *what, long k) {
  hl__shm_session *giver = what->granted ? session_begin(space) : NULL;
  pthread_t thread;
  int status;
  atomic_store(&between->done, 0);
  awaited = own[2];
  if (what->before == intend) awaited.mode = S;
  pid_t pid = fork();
  if (pid == 0) child(what);
  if (waitpid(pid, &status, 0) != pid || !WIFSTOPPED(status)) {
    wrong("the child did not begin", k);
    return LIMIT;
  }
  if (what->mends) die_inside(k);
  if (what->waited) {
    uint64_t waits = atomic_load(&space->waits);
    (void)pthread_create(&thread, NULL, waiter_run, what->rings ? &taking : NULL);
    while (atomic_load(&space->waits) == waits) (void)usleep(50);
  }
  if (giver && take_one(giver, own[2], 0) != HL_OK) wrong("the giver got nothing", k);
  long steps = step_on(what, pid, k, giver);
  (void)kill(pid, SIGKILL);
  while (waitpid(pid, &status, 0) > 0 && !WIFSIGNALED(status)) {}
  if (giver) hl__shm_end(giver);
  if (what->waited) {
    (void)pthread_join(thread, NULL);
    if (waiter_status != HL_OK) wrong("the waiter got nothing", k);
    if (take_one(taker, own[2], 0) == HL_OK) wrong("two have a row", k);
    hl__shm_give_back(taker, 0);
    hl__shm_give_back(waiting, 0);
  }
  all_is_well(what, k);
  kills++;
  return steps;
}

static void step_through(const char *name, const operation *what) {
  const char *steps = getenv("STEPS"), *given = getenv("OFFSET");
  kills = wrongs = 0;
  strayed = false;
  long all = kill_behind(what, LIMIT);
  long n = !steps ? 12 : strcmp(steps, "all") == 0 ? all : atol(steps);
  long stride = n >= all ? 1 : all / (n > 0 ? n : 1);
  long offset = given ? atol(given) : (long)(hl__now_us() % stride);
  for (long k = offset; k < all + stride && wrongs == 0; k += stride) {
    (void)kill_behind(what, k);
    if (strayed) (void)kill_behind(what, k); /* stepped from the start */
  }
  (void)fprintf(stderr, "%s: %ld instructions, %ld kills from OFFSET=%ld on, %ld wrong\n", name,
                all, kills, offset, wrongs);
  assert_int_equal(wrongs, 0);
}

static int setup(void **state) {
  (void)state;
  own[0] = row(0, 101, S);
  own[1] = row(1, 202, S);
  own[2] = row(2, 303, X);
  mine[0] = row(0, 101, S);
  mine[1] = row(2, 404, X);
  table_make();
  space = space_open();
  assert_non_null(space);
  live = session_begin(space);
  taker = session_begin(space);
  waiting = session_begin(space);
  assert_int_equal(take(live, mine, 2, 0), HL_OK);
  return 0;
}

static int teardown(void **state) {
  (void)state;
  hl__shm_end(live);
  hl__shm_end(taker);
  hl__shm_end(waiting);
  hl__shm_space_unref(space);
  table_remove();
  return 0;
}

#define STEP(name, ...)                                                                            \
  static void name(void **state) {                                                                 \
    static const operation what = {__VA_ARGS__};                                                   \
    (void)state;                                                                                   \
    step_through(#name, &what);                                                                    \
  }
STEP(a_take, .before = do_nothing, .run = hold)
STEP(a_release, .before = hold, .run = give_back)
STEP(a_release_to_a_waiter, .before = hold, .run = give_back, .waited = true)
STEP(a_release_to_a_bell, .before = hold, .run = give_back, .waited = true, .rings = true)
STEP(an_intention, .before = do_nothing, .run = intend)
STEP(an_intention_given_back_to_a_sharer, .before = intend, .run = give_back, .waited = true)
STEP(an_intention_beside_sharing, .before = intend, .run = share_beside)
STEP(a_wait_in_vain, .before = do_nothing, .run = wait_in_vain, .waits = true)
STEP(a_cancelled_wait, .before = do_nothing, .run = be_cancelled, .waits = true)
STEP(a_wait_that_is_granted, .before = do_nothing, .run = be_granted, .granted = true,
     .waits = true)
STEP(an_upgrade_and_a_downgrade, .before = share, .run = upgrade_and_back)
STEP(an_extension, .before = share, .run = be_granted)
STEP(a_lease, .before = hold, .run = to_lease)
STEP(the_end_of_a_lease, .before = hold_lease, .run = end_lease)
STEP(the_conversions_of_a_lease, .before = hold_lease, .run = convert_lease)
STEP(an_opening, .before = do_nothing, .run = open_it, .opens = true)
STEP(a_close, .before = do_nothing, .run = take_and_close)
STEP(a_mending, .before = do_nothing, .run = sweep, .mends = true)

int main(int argc, char **argv) {
#define IT(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
  const struct CMUnitTest tests[] = {
      IT(a_take),
      IT(a_release),
      IT(a_release_to_a_waiter),
      IT(a_release_to_a_bell),
      IT(an_intention),
      IT(an_intention_given_back_to_a_sharer),
      IT(an_intention_beside_sharing),
      IT(a_wait_in_vain),
      IT(a_cancelled_wait),
      IT(a_wait_that_is_granted),
      IT(an_upgrade_and_a_downgrade),
      IT(an_extension),
      IT(a_lease),
      IT(the_end_of_a_lease),
      IT(the_conversions_of_a_lease),
      IT(an_opening),
      IT(a_close),
      IT(a_mending),
      cmocka_unit_test(nothing_is_left),
  };
  between = mmap(NULL, sizeof *between, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (between == MAP_FAILED) return 1;
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
