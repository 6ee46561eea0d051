/*
 * test_embedded_others.c - the embedded store's table of locks and other processes: those that are
 * killed or stopped, that execute another program, that fork, and that lose their descriptors.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "embedded_table.h"
#include "leftovers.h"

#include <sched.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>

/* ------------------------------------------------------------------ others */

static void a_killed_holder_is_noticed(void **state) {
  (void)state;
  hl_row rows[2] = {row(0, 1, S), row(2, 3, X)};
  for (int inside = 0; inside < 2; inside++) {
    pid_t pid = holder_start(rows, 2, inside);
    waiter it = {.session = a, .row = row(2, 3, X), .ms = PATIENCE_MS};
    if (!inside) waiter_start(&it);
    if (!inside) assert_int_equal(take_one(b, row(0, 1, X), 0), HL_TIMEOUT);
    holder_kill(pid);
    if (inside) waiter_start(&it);
    int64_t begun = hl__now_ms();
    assert_int_equal(waiter_end(&it), HL_OK);
    assert_true(hl__now_ms() - begun < PATIENCE_MS / 4);
    assert_sound();
    hl__shm_give_back(a, 0);
    /* A try that comes just behind a death is not refused. */
    pid = holder_start(rows, 2, inside);
    holder_kill(pid);
    assert_int_equal(take_one(a, row(0, 1, X), 0), HL_OK);
    hl__shm_give_back(a, 0);
    pid = holder_start(rows, 2, inside);
    holder_kill(pid);
    assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK); /* nor one in its partition */
    hl__shm_give_back(a, 0);
  }
}

/* Two processes have the row; one dies inside, and what the other has is rebuilt. */
static void a_rebuilt_row_is_in_the_mode_it_was_in(void **state) {
  (void)state;
  const hl_row weakest = row(2, 3, (hl_mode)HL__IS);
  for (unsigned mode = HL_SHARED; mode <= HL__SIX; mode++) {
    if (mode == HL_EXCLUSIVE) continue;
    waiter it = {.session = c, .row = row(2, 3, X), .ms = PATIENCE_MS};
    assert_int_equal(take_one(a, row(2, 3, (hl_mode)mode), 0), HL_OK);
    pid_t pid = holder_start(&weakest, 1, true);
    holder_kill(pid);
    for (unsigned wanted = HL_SHARED; wanted <= HL__SIX; wanted++) {
      const int expected = hl__modes_conflict(mode, wanted) ? HL_TIMEOUT : HL_OK;
      assert_int_equal(take_one(b, row(2, 3, (hl_mode)wanted), 0), expected);
      hl__shm_give_back(b, 0);
    }
    assert_sound();
    waiter_start(&it); /* what waits is rebuilt in its mode, too */
    pid = fork();
    if (pid == 0) {
      hl__shm_space *own = space_open();
      (void)hl__shm_part_lock(own, hl__shm_claim_part(hl__shm_key(3, 2)), INT64_MAX, NULL);
      (void)raise(SIGKILL);
    }
    (void)waitpid(pid, NULL, 0);
    assert_int_equal(take_one(b, weakest, 0), HL_TIMEOUT); /* it comes behind */
    hl__shm_give_back(a, 0);
    assert_int_equal(waiter_end(&it), HL_OK);
    assert_int_equal(take_one(b, weakest, 0), HL_TIMEOUT);
    assert_sound();
    hl__shm_give_back(c, 0);
  }
}

static long switches(void) {
  struct rusage used;
  assert_int_equal(getrusage(RUSAGE_SELF, &used), 0);
  return used.ru_nvcsw;
}

/* Threads of a sanitizer's wake up, too: hence compared. */
static void a_waiter_hardly_wakes_up(void **state) {
  (void)state;
  enum { SECONDS = 3 };
  hl_row rows[1] = {row(2, 3, X)};
  pid_t pid = holder_start(rows, 1, false);
  waiter it = {.session = a, .row = row(2, 3, X), .ms = PATIENCE_MS};
  long idle = switches();
  pause_ms(SECONDS * 1000);
  idle = switches() - idle;
  waiter_start(&it);
  long waits = switches();
  pause_ms(SECONDS * 1000);
  waits = switches() - waits;
  holder_kill(pid); /* it is told at once, not when it looks next */
  assert_int_equal(waiter_end(&it), HL_OK);
  assert_true(waits - idle < 8 * SECONDS);
}

static void a_stopped_process_inside_is_named(void **state) {
  (void)state;
  hl_row rows[1] = {row(2, 3, X)};
  char name[64];
  assert_int_equal(take_one(b, row(2, 3, S), 0), HL_OK);
  hl__shm_give_back(b, 0);
  pid_t pid = holder_start(rows, 1, true);
  (void)kill(pid, SIGSTOP);
  int64_t begun = hl__now_ms();
  assert_int_equal(take_one(a, row(2, 3, X), 100), HL_TIMEOUT);
  assert_true(hl__now_ms() - begun < 2000);
  (void)snprintf(name, sizeof name, "process %d (stopped)", (int)pid);
  assert_non_null(strstr(fault.message, name));
  assert_non_null(strstr(fault.reason, name)); /* for the core's message */
  holder_kill(pid);
  assert_int_equal(take_one(a, row(2, 3, X), PATIENCE_MS), HL_OK);
}

static void a_stopped_process_is_named_to_those_that_wait(void **state) {
  (void)state;
  char name[64];
  const uint32_t part = hl__shm_part_of(hl__shm_hash(hl__shm_key(3, 2)));
  assert_int_equal(take_one(b, row(2, 3, S), 0), HL_OK);
  waiter it = {.session = a, .row = row(2, 3, X), .ms = 1000};
  waiter_start(&it);
  pid_t pid = fork();
  if (pid == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    hl__shm_space *own = space_open();
    (void)hl__shm_part_lock(own, part, INT64_MAX, NULL);
    (void)raise(SIGSTOP);
    _exit(0);
  }
  (void)waitpid(pid, NULL, WUNTRACED);
  hl__shm_give_back(b, 0); /* the waiter is not granted: no process comes in */
  assert_int_equal(waiter_end(&it), HL_TIMEOUT);
  (void)snprintf(name, sizeof name, "process %d (stopped)", (int)pid);
  assert_non_null(strstr(it.reason, name));
  holder_kill(pid);
  assert_int_equal(take_one(a, row(2, 3, X), PATIENCE_MS), HL_OK);
}

/* A damaged word names no process: no message may blame one, and the next to come in repairs it. */
static void a_damaged_lock_of_a_partition_blames_no_process(void **state) {
  (void)state;
  const uint32_t part = hl__shm_part_of(hl__shm_hash(hl__shm_key(3, 2)));
  assert_int_equal(take_one(b, row(2, 3, S), 0), HL_OK);
  waiter it = {.session = a, .row = row(2, 3, X), .ms = 300};
  waiter_start(&it);
  assert_int_equal(hl__shm_part_lock(space, part, INT64_MAX, NULL), HL_OK);
  atomic_store(&space->table->part[part].lock, HL__SHM_SLOTS + 1);
  assert_int_equal(waiter_end(&it), HL_TIMEOUT);
  assert_string_equal(it.reason, "");
  hl__shm_give_back(b, 0);
  assert_int_equal(take_one(a, row(2, 3, X), PATIENCE_MS), HL_OK);
}

static void a_call_that_waits_for_a_stopped_process_is_cancelled(void **state) {
  (void)state;
  hl_row rows[1] = {row(2, 3, S)};
  pid_t pid = holder_start(rows, 1, true);
  (void)kill(pid, SIGSTOP);
  waiter it = {.session = a, .row = row(2, 3, S), .ms = PATIENCE_MS};
  assert_int_equal(pthread_create(&it.thread, NULL, waiter_run, &it), 0);
  pause_ms(STAYS_MS);
  assert_false(atomic_load(&it.done));
  int64_t begun = hl__now_ms();
  hl__shm_cancel(a);
  assert_int_equal(waiter_end(&it), HL_CANCELLED);
  assert_true(hl__now_ms() - begun < PATIENCE_MS / 4);
  holder_kill(pid);
  assert_int_equal(take_one(a, row(2, 3, S), PATIENCE_MS), HL_OK); /* it was forgotten */
}

static void a_release_does_not_wait_for_a_stopped_process(void **state) {
  (void)state;
  hl_row rows[2] = {row(2, 3, S), row(2, 3, S)};
  assert_int_equal(take_one(a, row(2, 3, S), 0), HL_OK);
  pid_t pid = holder_start(rows, 1, true);
  (void)kill(pid, SIGSTOP);
  int64_t begun = hl__now_ms();
  hl__shm_give_back(a, 0);
  assert_true(hl__now_ms() - begun < 1000);
  assert_int_equal(atomic_load(&space->late_count), 1);
  holder_kill(pid);
  assert_int_equal(take_one(b, row(2, 3, X), PATIENCE_MS), HL_OK);
  for (int i = 0; i < PATIENCE_MS && atomic_load(&space->late_count); i++) pause_ms(1);
  assert_int_equal(atomic_load(&space->late_count), 0);
}

static uint32_t part_of(hl_row it) {
  return hl__shm_part_of(hl__shm_hash(hl__shm_key((uint32_t)it.bucket, it.level)));
}

static void many_releases_do_not_wait_for_a_stopped_process(void **state) {
  (void)state;
  enum { ROWS = 1000 };
  hl_row rows[ROWS], beside[1] = {row(1, 1, X)};
  uint32_t bucket = 0;
  for (int i = 0; i < ROWS; i++) {
    do rows[i] = row(2, ++bucket, X);
    while (part_of(rows[i]) != part_of(beside[0]));
  }
  assert_int_equal(take(a, rows, ROWS, 0), HL_OK);
  pid_t pid = holder_start(beside, 1, true);
  (void)kill(pid, SIGSTOP);
  int64_t begun = hl__now_ms();
  hl__shm_give_back(a, 0);
  assert_true(hl__now_ms() - begun < ROWS);
  holder_kill(pid);
  assert_int_equal(take(b, rows, ROWS, PATIENCE_MS), HL_OK);
}

/* The first has a claim in a partition in which the second has died. */
static void one_of_the_dead_is_in_the_way_of_another_s_mender(void **state) {
  (void)state;
  hl_row first[1] = {row(2, 3, X)}, second[1] = {row(2, 4, X)};
  while (part_of(second[0]) != part_of(first[0])) second[0].bucket++;
  pid_t one = holder_start(first, 1, false), two = holder_start(second, 1, true);
  holder_kill(one);
  holder_kill(two);
  int64_t begun = hl__now_ms();
  hl__shm_sweep(space, true, hl__shm_now() + PATIENCE_MS * INT64_C(1000000));
  assert_true(hl__now_ms() - begun < PATIENCE_MS / 4);
  assert_int_equal(take_one(a, first[0], 0), HL_OK);
  assert_int_equal(take_one(b, second[0], 0), HL_OK);
}

/* A dead process held rows in several partitions, and another is stopped inside of one of them. */
static void a_stopped_process_is_in_the_way_of_one_partition_alone(void **state) {
  (void)state;
  enum { ROWS = 3 };
  hl_row rows[ROWS] = {row(2, 3, X), row(2, 4, X), row(2, 5, X)};
  while (part_of(rows[1]) == part_of(rows[0])) rows[1].bucket++;
  while (part_of(rows[2]) == part_of(rows[0]) || part_of(rows[2]) == part_of(rows[1]))
    rows[2].bucket++;
  for (int k = 0; k < ROWS; k++) {
    hl_row beside[1] = {row(2, 1000, X)};
    while (part_of(beside[0]) != part_of(rows[k])) beside[0].bucket++;
    pid_t dead = holder_start(rows, ROWS, false), stopped = holder_start(beside, 1, true);
    (void)kill(stopped, SIGSTOP);
    holder_kill(dead);
    for (int i = 0; i < ROWS; i++)
      if (i != k) assert_int_equal(take_one(a, rows[i], PATIENCE_MS / 4), HL_OK);
    holder_kill(stopped);
    assert_int_equal(take_one(b, rows[k], PATIENCE_MS), HL_OK);
    hl__shm_give_back(a, 0);
    hl__shm_give_back(b, 0);
  }
}

/* Another thread of this process is mending, for some slot. */
static void *mend_elsewhere(void *context) {
  (void)pthread_mutex_lock(&space->mending);
  atomic_store((atomic_bool *)context, true);
  pause_ms(10);
  (void)pthread_mutex_unlock(&space->mending);
  return NULL;
}

/* The try waits for some time only; so of many one must succeed on a busy machine, too. */
static void a_try_waits_for_a_mender(void **state) {
  (void)state;
  enum { TRIES = 20 };
  const hl_row it = row(2, 3, X);
  int status = HL_TIMEOUT;
  for (int i = 0; i < TRIES && status; i++) {
    atomic_bool mends = false;
    pthread_t thread;
    holder_kill(holder_start(&it, 1, false));
    assert_int_equal(pthread_create(&thread, NULL, mend_elsewhere, &mends), 0);
    while (!atomic_load(&mends)) pause_ms(1);
    status = take_one(a, it, 0);
    (void)pthread_join(thread, NULL);
    hl__shm_sweep(space, true, INT64_MAX);
  }
  assert_int_equal(status, HL_OK);
}

/* What a child has of a row. */
typedef struct upgrade_seen {
  uint32_t held, waits;
} upgrade_seen;

static bool upgrade_see(void *context, const hl__shm_claim_seen *seen) {
  upgrade_seen *it = context;
  if (seen->slot == space->me) return true;
  *(hl__shm_state_of(seen->claim) == HL__HELD ? &it->held : &it->waits) = seen->node;
  return true;
}

/* It shares the row with a living session, and waits for it exclusively. Its mender comes upon the
   claim that it holds before the one that waits. */
static void a_dead_waiter_is_granted_nothing_by_its_mender(void **state) {
  (void)state;
  upgrade_seen it = {0};
  assert_int_equal(take_one(b, row(2, 3, S), 0), HL_OK);
  pid_t pid = fork();
  if (pid == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    hl__shm_session *own = session_begin(space_open());
    hl_row rows[2] = {row(2, 8, S), row(2, 9, S)};
    (void)take(own, rows, 2, 0);
    (void)hl__shm_give_back_row(own, &rows[0]); /* so that the next nodes are in this order */
    hl__shm_give_back(own, 0);
    (void)take_one(own, row(2, 3, S), 0);
    (void)take_one(own, row(2, 3, X), PATIENCE_MS);
    _exit(1);
  }
  for (int i = 0; i < PATIENCE_MS && !it.waits; i++) {
    pause_ms(1);
    hl__shm_each_claim(space, upgrade_see, &it);
  }
  assert_true(it.held && it.held < it.waits);
  holder_kill(pid);
  uint64_t handed = atomic_load(&space->handed);
  hl__shm_sweep(space, true, INT64_MAX);
  assert_true(atomic_load(&space->handed) == handed);
  assert_int_equal(take_one(a, row(2, 3, S), 0), HL_OK);
}

/* A mender that was held up may still be about to break the locks of the last process of a slot. */
static void a_slot_is_not_taken_while_it_is_mended(void **state) {
  (void)state;
  uint32_t slot[2], lowest = 1;
  while (atomic_load(&space->table->slot[lowest].state)) lowest++;
  for (int turn = 0; turn < 2; turn++) {
    if (turn == 0) assert_true(hl__shm_byte_lock(space, HL__SHM_MEND + (off_t)lowest));
    atomic_store(&between->step, 0);
    pid_t pid = fork();
    if (pid == 0) {
      hl__shm_space *own = space_open();
      atomic_store(&between->step, own ? (int)own->me : -1);
      hl__shm_space_unref(own);
      _exit(0);
    }
    (void)waitpid(pid, NULL, 0);
    slot[turn] = (uint32_t)atomic_load(&between->step);
    hl__shm_byte_unlock(space, HL__SHM_MEND + (off_t)lowest);
  }
  assert_int_not_equal(slot[0], lowest);
  assert_int_equal(slot[1], lowest);
}

/* A child that holds a row, and then does something with its descriptors, as `step` grows to 2. */
static pid_t holder_that(void (*then)(void)) {
  hl_row it = row(2, 3, X);
  atomic_store(&between->step, 0);
  pid_t pid = fork();
  if (pid == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    hl__shm_space *own = space_open();
    if (!own || take(session_begin(own), &it, 1, 0) != HL_OK) _exit(1);
    atomic_store(&between->step, 1);
    while (atomic_load(&between->step) < 2) pause_ms(1);
    then();
    atomic_store(&between->step, 3);
    for (;;) (void)pause();
  }
  step_await(1);
  return pid;
}

static void close_all(void) { (void)close_range(3, ~0u, 0); }
static void execute_another(void) {
  (void)execl("/bin/sleep", "sleep", "1000", (char *)NULL);
  _exit(1);
}

static void a_program_without_descriptors_keeps_its_locks(void **state) {
  (void)state;
  pid_t pid = holder_that(close_all);
  atomic_store(&between->step, 2);
  step_await(3);
  assert_int_equal(take_one(a, row(2, 3, X), 4 * STAYS_MS), HL_TIMEOUT);
  holder_kill(pid);
  assert_int_equal(take_one(a, row(2, 3, X), PATIENCE_MS), HL_OK);
}

static void a_program_that_executes_another_holds_nothing(void **state) {
  (void)state;
  pid_t pid = holder_that(execute_another);
  waiter it = {.session = a, .row = row(2, 3, X), .ms = PATIENCE_MS};
  waiter_start(&it);
  atomic_store(&between->step, 2);
  assert_int_equal(waiter_end(&it), HL_OK);
  assert_int_equal(waitpid(pid, NULL, WNOHANG), 0);
  holder_kill(pid);
}

/* Judging takes no descriptor. */
static void the_dead_are_found_without_descriptors(void **state) {
  (void)state;
  struct rlimit before, none;
  assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
  int next = dup(0);
  assert_true(next > 0);
  (void)close(next);
  none = (struct rlimit){.rlim_cur = (rlim_t)next, .rlim_max = before.rlim_max};
  for (int executes = 0; executes < 2; executes++) {
    pid_t pid = holder_that(execute_another);
    assert_int_equal(take_one(a, row(2, 3, X), 0), HL_TIMEOUT);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    int living = take_one(a, row(2, 3, X), 0);
    if (!executes) holder_kill(pid);
    atomic_store(&between->step, 2);
    int dead = take_one(a, row(2, 3, X), PATIENCE_MS);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    if (executes) holder_kill(pid);
    assert_int_equal(living, HL_TIMEOUT);
    assert_int_equal(dead, HL_OK);
    hl__shm_give_back(a, 0);
  }
}

/* A child that holds a row, and loses its descriptor: it notices, gives back, and stays. */
static void a_program_that_lost_its_descriptor_gives_back(void **state) {
  (void)state;
  /* Closed; now another one of the same file; of another file. */
  for (int replaced = 0; replaced < 3; replaced++) {
    atomic_store(&between->step, 0);
    pid_t pid = fork();
    if (pid == 0) {
      hl_row it = row(2, 3, X);
      (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
      hl__shm_space *own = space_open();
      hl__shm_session *session = session_begin(own);
      if (take(session, &it, 1, 0) != HL_OK) _exit(1);
      atomic_store(&between->step, 1);
      while (atomic_load(&between->step) < 2) pause_ms(1);
      int fd = replaced == 1 ? control_open() : open("/dev/null", O_RDWR | O_CLOEXEC);
      if (replaced ? dup2(fd, own->fd) < 0 : close_range(3, ~0u, 0) != 0) _exit(2);
      if (hl__shm_is_dead(own, space->me)) _exit(3); /* it cannot know */
      if (hl__shm_session_check(session, true, &fault) != HL_ECONNECTION) _exit(4);
      if (!strstr(fault.message, "was closed")) _exit(5);
      atomic_store(&between->step, 3);
      while (atomic_load(&between->step) < 4) pause_ms(1);
      hl__shm_give_back(session, 0);
      for (;;) (void)pause();
    }
    step_await(1);
    atomic_store(&between->step, 2);
    step_await(3);
    assert_int_equal(take_one(a, row(2, 3, X), 4 * STAYS_MS), HL_TIMEOUT);
    atomic_store(&between->step, 4);
    assert_int_equal(take_one(a, row(2, 3, X), PATIENCE_MS), HL_OK);
    assert_int_equal(waitpid(pid, NULL, WNOHANG), 0);
    holder_kill(pid);
    hl__shm_give_back(a, 0);
  }
}

/* overlayfs, in a mount namespace of a child's. 0: noticed at once; 77: no mount here. */
static int overlay_try(void) {
  char under[96], options[512], path[sizeof directory];
  (void)snprintf(under, sizeof under, "%s/overlay", directory);
  if (unshare(CLONE_NEWNS | (geteuid() ? CLONE_NEWUSER : 0)) != 0 || mkdir(under, 0700) != 0 ||
      mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
      mount("tmpfs", under, "tmpfs", 0, NULL) != 0)
    return 77;
  static const char *const parts[] = {"lower", "upper", "work", "merged"};
  for (int i = 0; i < 4; i++) {
    if (snprintf(path, sizeof path, "%s/%s", under, parts[i]) >= (int)sizeof path) return 77;
    if (mkdir(path, 0700) != 0) return 77;
  }
  (void)snprintf(options, sizeof options, "lowerdir=%s/lower,upperdir=%s/upper,workdir=%s/work",
                 under, under, under);
  if (mount("overlay", path, "overlay", 0, options) != 0) return 77;
  memcpy(directory, path, sizeof directory);
  hl__shm_space *own = space_open();
  if (!own || !own->fragile) return 1;
  hl__shm_session *session = session_begin(own);
  if (take_one(session, row(2, 3, X), 0) != HL_OK) return 2;
  close_all();
  if (take_one(session, row(2, 4, X), 0) != HL_ECONNECTION) return 3;
  return hl__shm_touchable(own) ? 4 : 0;
}

static void where_a_mapping_keeps_no_locks_each_call_looks(void **state) {
  (void)state;
  int status = 0;
  char under[96];
  assert_false(space->fragile);
  pid_t pid = fork();
  if (pid == 0) _exit(overlay_try());
  (void)waitpid(pid, &status, 0);
  (void)snprintf(under, sizeof under, "%s/overlay", directory);
  (void)rmdir(under);
  assert_true(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) return; /* no right to mount, or no overlayfs */
  assert_int_equal(WEXITSTATUS(status), 0);
}

static void a_lease_outlives_its_process(void **state) {
  (void)state;
  atomic_store(&between->step, 0);
  pid_t pid = fork();
  if (pid == 0) {
    space = space_open();
    hl__shm_session *own = session_begin(space);
    if (take_one(own, row(2, 3, X), 0) != HL_OK) _exit(1);
    atomic_store(&between->step, (int)lease_new(own, 1000000));
    /* Another that is not finished when it dies. */
    if (take_one(own, row(2, 4, X), 0) != HL_OK) _exit(1);
    if (hl__shm_lease_claims(own, hl__shm_lease_make(space), INT64_MAX, &fault) != HL_OK) _exit(1);
    (void)raise(SIGKILL);
  }
  (void)waitpid(pid, NULL, 0);
  uint32_t lease = (uint32_t)atomic_load(&between->step);
  assert_int_not_equal(lease, 0);
  assert_int_equal(take_one(a, row(2, 4, X), 0), HL_OK);
  assert_int_equal(leases(), 1);
  assert_int_equal(take_one(b, row(2, 3, X), 0), HL_TIMEOUT);
  assert_true(hl__shm_lease_end(space, lease, stamp_of(lease), 0));
  assert_int_equal(take_one(b, row(2, 3, X), 0), HL_OK);
}

static void a_forked_child_has_nothing(void **state) {
  (void)state;
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
  pid_t pid = fork();
  if (pid == 0) {
    bool fine = hl__shm_session_check(a, true, &fault) == HL_ECONNECTION &&
                take_one(b, row(2, 9, X), 0) == HL_ECONNECTION;
    hl__shm_space *own = space_open();
    fine = fine && own && own != space;
    fine = fine && take_one(session_begin(own), row(2, 3, X), 0) == HL_TIMEOUT;
    _exit(!fine);
  }
  int status;
  (void)waitpid(pid, &status, 0);
  assert_int_equal(status, 0);
  assert_int_equal(hl__shm_session_check(a, true, &fault), HL_OK);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      IT(a_killed_holder_is_noticed),
      IT(a_rebuilt_row_is_in_the_mode_it_was_in),
      IT(a_waiter_hardly_wakes_up),
      IT(a_stopped_process_inside_is_named),
      IT(a_stopped_process_is_named_to_those_that_wait),
      IT(a_damaged_lock_of_a_partition_blames_no_process),
      IT(a_call_that_waits_for_a_stopped_process_is_cancelled),
      IT(a_release_does_not_wait_for_a_stopped_process),
      IT(many_releases_do_not_wait_for_a_stopped_process),
      IT(one_of_the_dead_is_in_the_way_of_another_s_mender),
      IT(a_stopped_process_is_in_the_way_of_one_partition_alone),
      IT(a_try_waits_for_a_mender),
      IT(a_dead_waiter_is_granted_nothing_by_its_mender),
      IT(a_slot_is_not_taken_while_it_is_mended),
      IT(a_program_without_descriptors_keeps_its_locks),
      IT(a_program_that_executes_another_holds_nothing),
      IT(the_dead_are_found_without_descriptors),
      IT(a_program_that_lost_its_descriptor_gives_back),
      IT(where_a_mapping_keeps_no_locks_each_call_looks),
      IT(a_lease_outlives_its_process),
      IT(a_forked_child_has_nothing),
      cmocka_unit_test(nothing_is_left),
  };
  if (!between_begin()) return 1;
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
