/*
 * bench.c - what taking and giving back costs on the embedded store's table, beside flock(2) on an
 * open file in the same run: nanoseconds of this thread's processor time, as a machine is never
 * quiet.
 */
#include "table.h"

#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>

enum {
  CYCLES = 200000,
  GUARDED = 2000, /* cycles with a guard, which take longer */
  HELD = 10000    /* locks of three rows, held meanwhile */
};

static int64_t cpu_ns(void) {
  struct timespec t;
  (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* The best of five: of a cycle, ns. */
static double best_of(void (*cycle)(hl__shm_session *session, uint32_t i), hl__shm_session *session,
                      uint32_t cycles) {
  int64_t best = INT64_MAX;
  for (int turn = 0; turn < 5; turn++) {
    int64_t begun = cpu_ns();
    for (uint32_t i = 0; i < cycles; i++) cycle(session, i);
    if (cpu_ns() - begun < best) best = cpu_ns() - begun;
  }
  return (double)best / cycles;
}

static void one_row(hl__shm_session *session, uint32_t i) {
  (void)i;
  (void)take_one(session, row(2, 1, X), 0);
  hl__shm_give_back(session, 0);
}

static void three_rows(hl__shm_session *session, uint32_t i) {
  (void)i;
  const hl_row rows[3] = {row(0, 1, S), row(1, 2, S), row(2, 3, X)};
  (void)take(session, rows, 3, 0);
  hl__shm_give_back(session, 0);
}

static void other_rows(hl__shm_session *session, uint32_t i) {
  const uint32_t bucket = i * 2654435761u >> 2;
  const hl_row rows[3] = {row(0, bucket, S), row(1, bucket + 1, S), row(2, bucket + 2, X)};
  (void)take(session, rows, 3, 0);
  hl__shm_give_back(session, 0);
}

static void writable(hl__shm_space *space, bool yes) {
  const size_t size = HL__SHM_FIXED + hl__shm_chunks(space) * HL__SHM_CHUNK;
  if (mprotect(space->table, size, yes ? PROT_READ | PROT_WRITE : PROT_READ)) abort();
}

/* The same, in a table that the process may write to only meanwhile: a wild pointer would end the
   program, and change no lock. The store does not do it, for it costs as much as this. */
static void guarded(hl__shm_session *session, uint32_t i) {
  writable(session->space, true);
  three_rows(session, i);
  writable(session->space, false);
}

static int flocked;
static void file_lock(hl__shm_session *session, uint32_t i) {
  (void)session;
  (void)i;
  (void)flock(flocked, LOCK_EX);
  (void)flock(flocked, LOCK_UN);
}

int main(void) {
  table_make();
  hl__shm_space *space = space_open();
  if (!space) return 1;
  hl__shm_session *session = session_begin(space), *holder = session_begin(space);
  char file[96];
  (void)snprintf(file, sizeof file, "%s/" HL__SHM_FILE, directory);
  flocked = open(file, O_RDWR | O_CLOEXEC);
  const double kernel = best_of(file_lock, session, CYCLES);
  (void)printf("flock(2): %.0f ns\n", kernel);
  for (int turn = 0; turn < 2; turn++) {
    const double one = best_of(one_row, session, CYCLES);
    const double three = best_of(three_rows, session, CYCLES);
    const double other = best_of(other_rows, session, CYCLES);
    (void)printf(
        "%s: one row %.0f ns, three rows %.0f ns (%.2f x flock), three others each time %.0f ns\n",
        turn ? "beside 10,000 locks held" : "nothing held", one, three, three / kernel, other);
    const double guard = best_of(guarded, session, GUARDED);
    writable(space, true);
    (void)printf("  with a guard against wild pointers: three rows %.0f ns\n", guard);
    for (uint32_t i = 0; i < HELD && turn == 0; i++) {
      const hl_row rows[3] = {row(0, 1, S), row(1, 1000000 + i, S), row(2, 2000000 + i, X)};
      if (take(holder, rows, 3, 0) != HL_OK) return 1;
    }
  }
  (void)printf("%.0f bytes of the file for each lock of three rows\n",
               (double)(hl__shm_chunks(space) * HL__SHM_CHUNK) / HELD);
  (void)close(flocked);
  hl__shm_end(session);
  hl__shm_end(holder);
  hl__shm_space_unref(space);
  table_remove();
  return 0;
}
