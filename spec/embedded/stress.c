/*
 * stress.c - processes that lock at random on the embedded store's table, and are killed and
 * stopped; and a checker that knows only the rule. `fuzz`: random bytes go into the file meanwhile;
 * then nothing may crash or hang, and two holders are no bug.
 *
 * stress SECONDS [fuzz] [SEED]
 */
#include "table.h"

#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

enum {
  KIDS = 8,
  ROWS = 12,
  REVIVE = 400 /* a lease that its process has not ended; ms */
};

typedef struct shared {
  /* What a process believes to hold: a mode, from behind the grant until before the release. */
  atomic_int holds[ROWS][KIDS], killed[KIDS];
  _Atomic uint64_t token[ROWS];
  _Atomic uint64_t grants, timeouts, deadlocks, leases, others, late_us, violations, fallen;
} shared;
static shared *all;

static bool excludes(int a, int b) {
  return a && b && hl__modes_conflict((unsigned)a, (unsigned)b);
}

/* The process has the row in that mode, and looks at what the others believe. */
static void believe(int me, const hl_row *it, uint64_t token) {
  /* It may have it in another mode already. */
  const int had = atomic_load(&all->holds[it->bucket][me]);
  atomic_store(&all->holds[it->bucket][me],
               (int)(had ? hl__mode_supremum((unsigned)had, it->mode) : (hl_mode)it->mode));
  for (int k = 0; k < KIDS; k++)
    for (int again = 0; k != me; again++) {
      if (!excludes(it->mode, atomic_load(&all->holds[it->bucket][k])) ||
          atomic_load(&all->killed[k]) || atomic_load(&all->killed[me]))
        break;
      if (again == 2) {
        (void)atomic_fetch_add(&all->violations, 1);
        break;
      }
      (void)usleep(0); /* it may have been killed just now, before that was noted */
    }
  if (it->mode != HL_EXCLUSIVE) return;
  if (token <= atomic_exchange(&all->token[it->bucket], token))
    (void)atomic_fetch_add(&all->fallen, 1);
}

static void believe_nothing(int me) {
  for (int r = 0; r < ROWS; r++) atomic_store(&all->holds[r][me], 0);
}

static void tell(int status) {
  if (status == HL_TIMEOUT)
    (void)atomic_fetch_add(&all->timeouts, 1);
  else if (status == HL_DEADLOCK)
    (void)atomic_fetch_add(&all->deadlocks, 1);
  else if (status == HL_OK)
    (void)atomic_fetch_add(&all->grants, 1);
  else
    (void)atomic_fetch_add(&all->others, 1);
}

/* Has a lease hold what the session does, for a moment. */
static void lease_for_a_moment(hl__shm_session *session, int me, unsigned *seed) {
  hl__shm_space *space = session->space;
  uint32_t lease = hl__shm_lease_make(space);
  if (!lease) return;
  uint64_t stamp = atomic_load(&hl__shm_lease_at(space, lease)->base.stamp);
  if (hl__shm_lease_claims(session, lease, hl__shm_now() + 100000000, &fault) != HL_OK) {
    hl__shm_lease_unmake(space, lease, hl__shm_now() + 100000000);
    return;
  }
  hl__shm_lease_publish(space, lease, hl__shm_boot_ms(space) + REVIVE);
  hl__shm_give_back(session, 0);
  (void)atomic_fetch_add(&all->leases, 1);
  (void)usleep((unsigned)rand_r(seed) % 300);
  /* A stop may have lasted until the lease's end: then its rows are another's, and were believed
     for too long. Stops are shorter. */
  believe_nothing(me);
  (void)hl__shm_lease_end(space, lease, stamp, 0);
}

static hl_mode random_mode(unsigned *seed) { return (hl_mode)(HL_SHARED + rand_r(seed) % HL__SIX); }

static void round_of(hl__shm_session *session, int me, unsigned *seed) {
  hl_row rows[5];
  const size_t n = 1 + (size_t)(rand_r(seed) % 3);
  uint32_t at = 0;
  for (size_t i = 0; i < n; i++) {
    at += (uint32_t)rand_r(seed) % 4 + (i > 0);
    rows[i] = row(1, at, random_mode(seed));
  }
  hl_request request = {
      .rows = rows, .n = n, .agent = (uint64_t)me + 1, .blocks = true, .holds = true};
  const int64_t limit = rand_r(seed) % 5 ? 20 : 1, begun = hl__shm_now();
  request.deadline = hl__now_ms() + limit;
  request.try_once = rand_r(seed) % 8 == 0;
  int status = hl__shm_take(session, &request, 0, &fault);
  tell(status);
  if (status != HL_OK) {
    uint64_t late = (uint64_t)(hl__shm_now() - begun - limit * 1000000) / 1000;
    if (status == HL_TIMEOUT && late < 100000000 && late > atomic_load(&all->late_us))
      atomic_store(&all->late_us, late);
    return;
  }
  const uint64_t token = hl__shm_token(session->space);
  for (size_t i = 0; i < n; i++) believe(me, &rows[i], token);
  if (rand_r(seed) % 8 == 0) { /* another mode, an upgrade, or another row */
    hl_row more =
        row(1, rand_r(seed) % 2 ? (uint32_t)rows[n - 1].bucket : (uint32_t)rand_r(seed) % ROWS,
            rand_r(seed) % 2 ? X : random_mode(seed));
    request.rows = &more;
    request.n = 1;
    request.deadline = hl__now_ms() + 20;
    status = hl__shm_take(session, &request, 0, &fault);
    tell(status);
    if (status == HL_OK) {
      believe(me, &more, hl__shm_token(session->space));
      if (more.bucket == rows[n - 1].bucket && rand_r(seed) % 2) { /* and down again */
        atomic_store(&all->holds[more.bucket][me], (int)rows[n - 1].mode);
        (void)hl__shm_give_back_row(session, &more);
      }
    }
  }
  if (rand_r(seed) % 4 == 0) (void)usleep((unsigned)rand_r(seed) % 300);
  if (rand_r(seed) % 8 == 0) lease_for_a_moment(session, me, seed);
  believe_nothing(me);
  hl__shm_give_back(session, 0);
}

static _Noreturn void kid(int me, int64_t end) {
  unsigned seed = (unsigned)hl__now_us() ^ (unsigned)getpid();
  hl__shm_space *space = NULL;
  while (!(space = space_open()) && hl__now_ms() < end) (void)usleep(10000);
  hl__shm_session *session;
  if (!space || hl__shm_begin(space, &session, &fault) != HL_OK) _exit(0);
  while (hl__now_ms() < end) {
    round_of(session, me, &seed);
    if (atomic_load(&space->gone)) _exit(0);
  }
  _exit(0);
}

static void spoil(int fd, unsigned *seed) {
  const off_t size = lseek(fd, 0, SEEK_END), fixed = (off_t)HL__SHM_FIXED;
  for (int i = 0; i < 30; i++) {
    const uint64_t junk = (uint64_t)rand_r(seed) << 32 ^ (uint64_t)rand_r(seed);
    off_t at = rand_r(seed) % 3 ? fixed + rand_r(seed) % (size > fixed ? size - fixed : 1)
                                : 4096 + rand_r(seed) % (fixed - 4096);
    (void)!pwrite(fd, &junk, 1 + (size_t)(rand_r(seed) % 8), at);
  }
}

static pid_t kids[KIDS];
static int64_t stopped[KIDS]; /* until when; 0: it runs */

static void kid_start(int k, int64_t end) {
  for (int r = 0; r < ROWS; r++) atomic_store(&all->holds[r][k], 0);
  stopped[k] = 0;
  atomic_store(&all->killed[k], 0);
  if ((kids[k] = fork()) == 0) kid(k, end);
}

static void kids_continue(int64_t now) {
  for (int j = 0; j < KIDS; j++) {
    if (!stopped[j] || now <= stopped[j]) continue;
    (void)kill(kids[j], SIGCONT);
    stopped[j] = 0;
  }
}

/* Starts those again that have ended; how many of them have crashed. */
static unsigned kids_reap(int64_t end) {
  unsigned crashes = 0;
  int status;
  for (int j = 0; j < KIDS; j++) {
    if (waitpid(kids[j], &status, WNOHANG) != kids[j]) continue;
    crashes += WIFSIGNALED(status);
    kid_start(j, end);
  }
  return crashes;
}

/* How many did not end in time. */
static int kids_end(int64_t end) {
  int status;
  int hung = 0;
  for (int j = 0; j < KIDS; j++) (void)kill(kids[j], SIGCONT);
  for (int j = 0; j < KIDS; j++) {
    while (waitpid(kids[j], &status, WNOHANG) == 0 && hl__now_ms() < end + 5000) (void)usleep(1000);
    if (hl__now_ms() < end + 5000) continue;
    hung++;
    (void)kill(kids[j], SIGKILL);
    (void)waitpid(kids[j], NULL, 0);
  }
  return hung;
}

int main(int argc, char **argv) {
  const bool fuzz = argc > 2 && strcmp(argv[2], "fuzz") == 0;
  const int64_t end = hl__now_ms() + (argc > 1 ? atol(argv[1]) : 10) * 1000;
  unsigned seed = (unsigned)(argc > 2 + fuzz ? atol(argv[2 + fuzz]) : 1), kills = 0, stops = 0,
           crashes = 0;
  uint64_t last = 0;
  int64_t quiet = 0, since = hl__now_ms();
  table_make();
  all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  for (int k = 0; k < KIDS; k++) kid_start(k, end);
  char file[96];
  (void)snprintf(file, sizeof file, "%s/" HL__SHM_FILE, directory);
  int fd = -1;
  while (fd < 0) fd = open(file, O_RDWR | O_CLOEXEC);
  while (hl__now_ms() < end) {
    (void)usleep(1000 + (unsigned)rand_r(&seed) % 3000);
    const int k = rand_r(&seed) % KIDS, what = rand_r(&seed) % 10;
    const int64_t now = hl__now_ms();
    if (fuzz) spoil(fd, &seed);
    if (atomic_load(&all->grants) != last) {
      last = atomic_load(&all->grants);
      since = now;
    } else if (now - since > quiet) {
      quiet = now - since;
    }
    kids_continue(now);
    if (what < 3) {
      atomic_store(&all->killed[k], 1);
      (void)kill(kids[k], SIGKILL);
      (void)waitpid(kids[k], NULL, 0);
      kills++;
      kid_start(k, end);
    } else if (what < 5 && !stopped[k]) {
      (void)kill(kids[k], SIGSTOP);
      stopped[k] = now + rand_r(&seed) % 60;
      stops++;
    }
    crashes += kids_reap(end);
  }
  const int hung = kids_end(end);
  hl__shm_space *space = fuzz ? NULL : space_open();
  if (space) hl__shm_sweep(space, true, INT64_MAX);
  const char *wrong = space ? verify(space) : fuzz ? NULL : fault.message;
  (void)printf(
      "%llu grants, %llu leases, %u kills, %u stops, %llu time-outs (%.1f ms late at most), %llu "
      "circles, %llu other failures; no grant for %lld ms at most; violations %llu, tokens "
      "fallen %llu, crashes %u, hung %d, verify: %s\n",
      (unsigned long long)all->grants, (unsigned long long)all->leases, kills, stops,
      (unsigned long long)all->timeouts, (double)all->late_us / 1e3,
      (unsigned long long)all->deadlocks, (unsigned long long)all->others, (long long)quiet,
      (unsigned long long)all->violations, (unsigned long long)all->fallen, crashes, hung,
      wrong ? wrong : "well");
  if (space) hl__shm_space_unref(space);
  table_remove();
  return crashes || hung || wrong || (!fuzz && (all->violations || all->fallen));
}
