/*
 * test_embedded_file.c - the file of the embedded store's table of locks: removed, in a directory that
 * a process cannot reach any more, of another boot, full, or damaged.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "embedded_table.h"
#include "leftovers.h"
#include "machine.h"

#include <dlfcn.h>
#include <errno.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>

/* --------------------------------------------------------------- the file */

/* The test goes on in another space. */
static void move_to(hl__shm_space *other) {
  table_leave();
  space = other;
  sessions_begin();
}

static void a_removed_file_is_noticed(void **state) {
  (void)state;
  char path[96];
  hl__shm_space *other;
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
  waiter it = {.session = b, .row = row(2, 3, X), .ms = PATIENCE_MS};
  waiter_start(&it);
  (void)snprintf(path, sizeof path, "%s/" HL__SHM_FILE, directory);
  (void)unlink(path);
  assert_int_equal(waiter_end(&it), HL_ECONNECTION);
  assert_int_equal(hl__shm_session_check(a, true, &fault), HL_ECONNECTION);
  assert_non_null(strstr(fault.message, "removed"));
  other = space_open();
  assert_non_null(other);
  assert_ptr_not_equal(other, space);
  move_to(other);
}

/* The row is given back once it is known that the file was removed. */
static void what_is_granted_in_a_removed_file_is_refused(void **state) {
  (void)state;
  char path[96];
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
  waiter it = {.session = b, .row = row(2, 3, X), .ms = PATIENCE_MS};
  waiter_start(&it);
  (void)snprintf(path, sizeof path, "%s/" HL__SHM_FILE, directory);
  (void)unlink(path);
  assert_true(hl__shm_look(space));
  hl__shm_give_back(a, 0);
  assert_int_equal(waiter_end(&it), HL_ECONNECTION);
  assert_int_equal(b->n, 0);
  move_to(space_open());
}

static void a_directory_that_gets_its_name_back_has_no_stuck_locks(void **state) {
  (void)state;
  char other[80];
  hl__shm_space *again;
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
  assert_int_equal(take_one(c, row(2, 4, X), 0), HL_OK);
  waiter it = {.session = b, .row = row(2, 4, X), .ms = PATIENCE_MS};
  waiter_start(&it);
  (void)snprintf(other, sizeof other, "%s.moved", directory);
  assert_int_equal(rename(directory, other), 0);
  assert_int_equal(waiter_end(&it), HL_ECONNECTION);
  assert_int_equal(rename(other, directory), 0);
  again = space_open();
  assert_non_null(again);
  hl__shm_session *d = session_begin(again);
  assert_int_equal(take_one(d, row(2, 3, X), 0), HL_TIMEOUT);
  hl__shm_give_back(a, 0);
  assert_int_equal(take_one(d, row(2, 3, X), PATIENCE_MS), HL_OK);
  hl__shm_end(d);
  move_to(again);
  assert_int_equal(take_one(a, row(2, 4, X), PATIENCE_MS), HL_OK);
}

/* Makes the directories of a path below `root`. */
static void path_make(const char *root, const char *path) {
  char text[256];
  (void)snprintf(text, sizeof text, "%s%s", root, path);
  for (char *at = text + strlen(root) + 1; *at; at++) {
    if (*at != '/') continue;
    *at = '\0';
    (void)mkdir(text, 0755);
    *at = '/';
  }
  (void)mkdir(text, 0755);
}

/* In a child: what a process sees that has another root directory. 77: it may not. */
static int jailed(const char *jail) {
  hl__shm_space *own = space_open();
  hl__shm_session *session = session_begin(own);
  if (take_one(session, row(2, 3, X), 0) != HL_OK) return 1;
  if ((geteuid() && unshare(CLONE_NEWUSER) != 0) || chroot(jail) != 0 || chdir("/") != 0) return 77;
  if (hl__shm_session_check(session, true, &fault) != HL_OK) return 2;
  if (take_one(session, row(2, 4, X), 0) != HL_OK) return 3;
  /* A name that leads elsewhere by now is another directory's, not that of before. */
  hl__shm_space *other = space_open();
  if (!other || other == own || other->inode == own->inode) return 4;
  if (hl__shm_session_check(session, true, &fault) != HL_OK) return 5;
  atomic_store(&between->step, 1);
  while (atomic_load(&between->step) < 2) pause_ms(1); /* the directory is removed */
  return hl__shm_session_check(session, true, &fault) == HL_ECONNECTION ? 0 : 6;
}

static void a_process_keeps_its_directory_behind_chroot(void **state) {
  (void)state;
  char jail[] = "/dev/shm/hierlock-jail-XXXXXX", path[96];
  int status = 0;
  assert_non_null(mkdtemp(jail));
  path_make(jail, directory);
  (void)snprintf(path, sizeof path, "%s/" HL__SHM_FILE, directory);
  atomic_store(&between->step, 0);
  pid_t pid = fork();
  if (pid == 0) _exit(jailed(jail));
  for (int i = 0; i < PATIENCE_MS && atomic_load(&between->step) < 1; i++) {
    if (waitpid(pid, &status, WNOHANG) == pid) break;
    pause_ms(1);
  }
  if (atomic_load(&between->step) == 1) {
    assert_int_equal(take_one(a, row(2, 3, X), 0), HL_TIMEOUT);
    assert_int_equal(take_one(a, row(2, 4, X), 0), HL_TIMEOUT);
    (void)unlink(path);
    atomic_store(&between->step, 2);
    (void)waitpid(pid, &status, 0);
  }
  if (fork() == 0) (void)execlp("rm", "rm", "-rf", jail, (char *)NULL);
  (void)wait(NULL);
  assert_true(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 77));
}

/* With another user's rights a process may not follow the name any more. */
static void a_process_keeps_its_directory_as_another_user(void **state) {
  (void)state;
  if (geteuid() != 0) return;
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
  assert_int_equal(seteuid(65534), 0);
  const int held = hl__shm_session_check(a, true, &fault);
  const int taken = take_one(a, row(2, 4, X), 0);
  assert_int_equal(seteuid(0), 0);
  assert_int_equal(held, HL_OK);
  assert_int_equal(taken, HL_OK);
}

static void the_dead_make_room_for_an_opener(void **state) {
  (void)state;
  sessions_end();
  /* All slots are those of dead processes; one has died with a partition locked, and so has one
     that made room. */
  for (uint32_t i = 1; i < HL__SHM_SLOTS - 1; i++)
    if (i != space->me) atomic_store(&space->table->slot[i].state, 1);
  atomic_store(&space->table->header.slots_top, HL__SHM_SLOTS - 1);
  atomic_store(&space->table->part[3].lock, 77 + 1);
  atomic_store(&space->table->part[4].lock, HL__SHM_SLOTS);
  uint32_t me = space->me;
  hl__shm_table *table = space->table;
  int fd = control_open();
  hl__shm_space_unref(space);
  table = mmap(NULL, sizeof *table, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  assert_true(table != MAP_FAILED);
  atomic_store(&table->slot[me].state, 1);
  (void)munmap(table, sizeof *table);
  (void)close(fd);
  table_enter();
}

static void another_boot_beside_the_living_is_refused(void **state) {
  (void)state;
  hl_row rows[1] = {row(2, 3, X)};
  table_leave();
  pid_t pid = holder_start(rows, 1, false);
  int fd = control_open();
  uint64_t boot, other = 77;
  assert_int_equal(pread(fd, &boot, sizeof boot, offsetof(hl__shm_header, boot)), sizeof boot);
  assert_int_equal(pwrite(fd, &other, sizeof other, offsetof(hl__shm_header, boot)), sizeof other);
  assert_null(space_open());
  assert_int_equal(fault.status, HL_EUNSAFE_SERVER);
  assert_int_equal(pwrite(fd, &boot, sizeof boot, offsetof(hl__shm_header, boot)), sizeof boot);
  (void)close(fd);
  table_enter();
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_TIMEOUT);
  holder_kill(pid);
  assert_int_equal(take_one(a, row(2, 3, X), PATIENCE_MS), HL_OK);
}

static void a_table_in_use_does_not_grow_old(void **state) {
  (void)state;
  const struct timespec old[2] = {{.tv_sec = time(NULL) - 3 * 86400}, {.tv_sec = 86400}};
  struct stat st;
  int fd = control_open(), locked = open(directory, O_RDONLY | O_CLOEXEC);
  assert_int_equal(futimens(fd, old), 0);
  assert_int_equal(hl__shm_check(space, true, &fault), HL_OK);
  assert_int_equal(fstat(fd, &st), 0);
  assert_true(st.st_atime > time(NULL) - 86400 && st.st_mtime > time(NULL) - 86400);
  assert_int_equal(flock(locked, LOCK_EX | LOCK_NB), -1); /* as systemd-tmpfiles tries */
  (void)close(fd);
  (void)close(locked);
}

/* In a child whose files may not grow any more. */
static int limited(void) {
  hl__shm_space *own = space_open();
  hl__shm_session *session = session_begin(own);
  struct stat st;
  if (fstat(own->fd, &st) != 0) return 1;
  const struct rlimit limit = {(rlim_t)st.st_size, (rlim_t)st.st_size};
  if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 2;
  uint32_t n = 0;
  int status = HL_OK;
  while (status == HL_OK && n < 100000) status = take_one(session, row(2, n++, X), 0);
  if (status != HL_ESTORE || !strstr(fault.message, "ulimit -f")) return 3;
  if (session->n != n - 1 || hl__shm_session_check(session, true, &fault) != HL_OK) return 4;
  hl__shm_end(session);
  hl__shm_space_unref(own);
  const struct rlimit less = {4096, 4096};
  if (setrlimit(RLIMIT_FSIZE, &less) != 0) return 2;
  directory[strlen(directory) - 1] ^= 1;
  own = space_open(); /* one that it would have to make */
  if (own || !strstr(fault.message, "too large")) return 5;
  return rmdir(directory) == 0 ? 0 : 6;
}

static void a_limit_of_file_sizes_is_an_error(void **state) {
  (void)state;
  int status;
  pid_t pid = fork();
  if (pid == 0) _exit(limited());
  (void)waitpid(pid, &status, 0);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), 0);
}

/* In a child without /proc. ThreadSanitizer names functions by what it reads there: without it no
   suppression applies. */
static int without_proc(const char *message) {
#ifdef __SANITIZE_THREAD__
  return 77;
#endif
  if (unshare(CLONE_NEWNS | (geteuid() ? CLONE_NEWUSER : 0)) != 0 ||
      mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
      mount("tmpfs", "/proc", "tmpfs", 0, NULL) != 0)
    return 77;
  hl__shm_space *own = space_open();
  if (message) return own || !strstr(fault.message, message) ? 1 : 0;
  if (!own) return 2;
  hl__shm_session *session = session_begin(own);
  if (take_one(session, row(2, 3, X), 0) != HL_TIMEOUT) return 3;
  if (take_one(session, row(2, 4, X), 0) != HL_OK) return 4;
  atomic_store(&between->step, 1);
  for (;;) (void)pause();
}

/* The child's pid once it holds its row; 0: it has ended, as it should. -1: it may not here. */
static pid_t without_proc_start(const char *message) {
  int status = 0;
  atomic_store(&between->step, 0);
  pid_t pid = fork();
  if (pid == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    _exit(without_proc(message));
  }
  for (int i = 0; i < PATIENCE_MS && atomic_load(&between->step) < 1; i++) {
    if (waitpid(pid, &status, WNOHANG) == pid) {
      assert_true(WIFEXITED(status));
      if (WEXITSTATUS(status) == 77) return -1;
      assert_int_equal(WEXITSTATUS(status), 0);
      return 0;
    }
    pause_ms(1);
  }
  return pid;
}

static void a_process_without_proc_shares_the_boot(void **state) {
  (void)state;
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
  pid_t pid = without_proc_start(NULL);
  if (pid < 0) return;
  assert_int_equal(take_one(a, row(2, 4, X), 0), HL_TIMEOUT);
  /* The file is that process' alone; also if it has made it. */
  table_leave();
  for (int made = 0; made < 2; made++) {
    uint64_t none = 0;
    int fd = control_open();
    if (made)
      assert_int_equal(pwrite(fd, &none, sizeof none, offsetof(hl__shm_header, boot)), sizeof none);
    (void)close(fd);
    table_enter();
    assert_int_equal(take_one(a, row(2, 4, X), 0), HL_TIMEOUT);
    if (!made) table_leave();
  }
  assert_int_not_equal(atomic_load(&space->table->header.boot[0]), 0);
  holder_kill(pid);
  assert_int_equal(take_one(a, row(2, 4, X), PATIENCE_MS), HL_OK);
}

/* On a disk a file may be of an earlier boot. */
static void a_process_without_proc_guesses_no_boot(void **state) {
  (void)state;
  table_leave();
  table_remove();
  table_make();
  (void)rmdir(directory);
  (void)snprintf(directory, sizeof directory, "/var/tmp/hierlock-embedded-%ld", (long)getpid());
  assert_int_equal(mkdir(directory, 0700), 0);
  space = space_open();
  assert_non_null(space);
  const bool lasts = space->directory.lasts;
  hl__shm_space_unref(space);
  if (lasts) (void)without_proc_start("boot_id");
  table_enter();
  if (!lasts) return;
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
  pid_t pid = without_proc_start(NULL); /* others use it: it is of this boot */
  if (pid <= 0) return;
  assert_int_equal(take_one(a, row(2, 4, X), 0), HL_TIMEOUT);
  holder_kill(pid);
}

/* In a child that may open nothing more. */
static int without_descriptors(void) {
  struct rlimit limit;
  uint64_t boot[2];
  int64_t ahead;
  (void)close(0); /* as a daemon may; the next file gets its number */
  if (hl__machine_boot(boot, &ahead) != 0 || hl__boot_id(boot) != 0) return 1;
  if (fcntl(0, F_GETFD) != -1) return 6;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 2;
  limit.rlim_cur = 0;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return 2;
  if (hl__machine_boot(boot, &ahead) != -1 || errno != EMFILE) return 3;
  if (hl__boot_id(boot) != -1) return 4;
  return hl__is_mount_point("/") == -1 && errno == EMFILE ? 0 : 5;
}

/* A process that took zeroes for the id would write leases that end by the wall clock for all
   others, and would judge theirs by it. One that took a file for unmounted would lock beside those
   outside. */
static void want_of_descriptors_says_nothing_of_the_machine(void **state) {
  (void)state;
  int status;
  pid_t pid = fork();
  if (pid == 0) _exit(without_descriptors());
  (void)waitpid(pid, &status, 0);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), 0);
}

static void others_files_are_refused(void **state) {
  (void)state;
  static const struct {
    off_t at;
    uint32_t word;
    const char *message;
  } damages[] = {{0, 0x12345678, "is not hierlock's"},
                 {8, 2, "another version"},
                 {12, 77, "is damaged"},
                 {16, 77, "is damaged"},
                 {offsetof(hl__shm_header, inode), 77, "is a copy"},
                 {offsetof(hl__shm_header, born), 77, "is a copy"},
                 {offsetof(hl__shm_header, device), 77, "is a copy"}};
  table_leave();
  int fd = control_open();
  for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
    uint32_t before;
    assert_int_equal(pread(fd, &before, sizeof before, damages[i].at), sizeof before);
    if (!before) continue; /* the file system does not say it */
    assert_int_equal(pwrite(fd, &damages[i].word, sizeof before, damages[i].at), sizeof before);
    assert_null(space_open());
    assert_non_null(strstr(fault.message, damages[i].message));
    assert_int_equal(pwrite(fd, &before, sizeof before, damages[i].at), sizeof before);
  }
  off_t size = lseek(fd, 0, SEEK_END);
  assert_int_equal(ftruncate(fd, 8192), 0);
  assert_null(space_open());
  assert_non_null(strstr(fault.message, "truncated"));
  assert_int_equal(ftruncate(fd, 0), 0);
  assert_null(space_open());
  (void)size;
  (void)close(fd);
  table_remove();
  table_make();
  table_enter();
}

/* What pread() does here, which the linker prefers: fails with these, one after the other, and gives
   no more bytes than this. */
static int reads_fail[3];
static size_t read_most = SIZE_MAX;

ssize_t pread(int fd, void *data, size_t size, off_t at) {
  ssize_t (*real)(int, void *, size_t, off_t);
  for (size_t i = 0; i < sizeof reads_fail / sizeof *reads_fail; i++)
    if (reads_fail[i]) {
      errno = reads_fail[i];
      reads_fail[i] = 0;
      return -1;
    }
  *(void **)&real = dlsym(RTLD_NEXT, sizeof(off_t) > sizeof(long) ? "pread64" : "pread");
  return real(fd, data, size < read_most ? size : read_most, at);
}

/* How the locking of a byte fails here, once. */
static atomic_int lock_fails;

int fcntl(int fd, int command, ...) {
  int (*real)(int, int, void *);
  va_list arguments;
  va_start(arguments, command);
  void *argument = va_arg(arguments, void *);
  va_end(arguments);
  int failure = command == F_OFD_SETLK ? atomic_exchange(&lock_fails, 0) : 0;
  if (failure) {
    errno = failure;
    return -1;
  }
  *(void **)&real = dlsym(RTLD_NEXT, sizeof(off_t) > sizeof(long) ? "fcntl64" : "fcntl");
  return real(fd, command, argument);
}

static void a_failed_lock_is_not_another_process(void **state) {
  (void)state;
  table_leave();
  atomic_store(&lock_fails, ENOLCK);
  assert_null(space_open());
  assert_int_equal(fault.status, HL_ESTORE);
  assert_non_null(strstr(fault.message, strerror(ENOLCK)));
  assert_null(strstr(fault.message, "another process"));
  table_enter();
}

static void what_a_failed_read_says_is_not_of_the_file(void **state) {
  (void)state;
  table_leave();
  reads_fail[0] = EIO;
  assert_null(space_open());
  assert_int_equal(reads_fail[0], 0);
  assert_int_equal(fault.status, HL_ESTORE);
  assert_non_null(strstr(fault.message, "cannot read "));
  assert_non_null(strstr(fault.message, strerror(EIO)));

  reads_fail[0] = reads_fail[1] = EINTR; /* the file is read nevertheless, */
  read_most = 100;                       /* in pieces */
  table_enter();
  read_most = SIZE_MAX;
  assert_int_equal(reads_fail[1], 0);
}

/* What is done while a thread looks where the directory's name leads, and how that look fails;
   once. */
static void (*_Atomic while_it_looks)(void);
static atomic_int look_fails;

int stat(const char *path, struct stat *st) {
  int (*real)(const char *, struct stat *);
  void (*act)(void) = atomic_exchange(&while_it_looks, NULL);
  if (act) act();
  int failure = atomic_exchange(&look_fails, 0);
  if (failure) {
    errno = failure;
    return -1;
  }
  *(void **)&real = dlsym(RTLD_NEXT, sizeof(off_t) > sizeof(long) ? "stat64" : "stat");
  return real(path, st);
}

static int meanwhile;

static void another_checks(void) { meanwhile = hl__shm_check(space, false, &fault); }

/* A thread that is stopped in its look has not seen yet that the directory is gone. */
static void no_thread_relies_on_a_look_that_is_not_made(void **state) {
  char away[sizeof directory + 8];
  (void)state;
  (void)snprintf(away, sizeof away, "%s.away", directory);
  assert_int_equal(hl__shm_check(space, true, &fault), HL_OK);
  assert_int_equal(rename(directory, away), 0);
  pause_ms(100); /* the last look is too old */
  meanwhile = HL_OK;
  while_it_looks = another_checks;
  assert_int_equal(hl__shm_check(space, false, &fault), HL_ECONNECTION);
  assert_null(while_it_looks);
  assert_int_equal(meanwhile, HL_ECONNECTION);
  assert_int_equal(rename(away, directory), 0);
  table_leave();
  table_enter();
}

/* A process that has no memory for a look has not seen its directory removed, and keeps its locks. */
static void what_a_failed_look_says_is_not_of_the_name(void **state) {
  static const int causes[] = {ENOMEM, EIO};
  char path[96];
  (void)state;
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
  for (size_t i = 0; i < sizeof causes / sizeof *causes; i++) {
    atomic_store(&look_fails, causes[i]);
    assert_int_equal(hl__shm_session_check(a, true, &fault), HL_OK);
    assert_int_equal(atomic_load(&look_fails), 0);
    assert_int_equal(hl__shm_session_check(a, true, &fault), HL_OK);
  }

  (void)snprintf(path, sizeof path, "%s/" HL__SHM_FILE, directory);
  assert_int_equal(unlink(path), 0);
  atomic_store(&look_fails, EIO);
  assert_int_equal(hl__shm_session_check(a, true, &fault), HL_ECONNECTION);
  table_leave();
  table_enter();
}

/* Index words that lead nowhere, or in a circle: calls end, and the partition can be made anew. */
static void a_damaged_index_is_survived(void **state) {
  (void)state;
  const uint64_t key = hl__shm_key(5, 2);
  const uint32_t part = hl__shm_part_of(hl__shm_hash(key));
  for (int damage = 0; damage < 10; damage++) {
    assert_int_equal(take_one(a, row(2, 5, X), 0), HL_OK);
    waiter it = {.session = b, .row = row(2, 5, S), .ms = 300};
    waiter_start(&it);
    assert_int_equal(hl__shm_part_lock(space, part, INT64_MAX, NULL), HL_OK);
    uint32_t index, held = a->held[0].node, waits = atomic_load(&b->waits);
    hl__shm_row *entry = hl__shm_row_find(space, key, false, &index);
    hl__shm_node *holder = hl__shm_node_at(space, held), *node = hl__shm_node_at(space, waits);
    assert_non_null(entry);
    if (damage == 0) node->prev = waits, node->next = waits;
    if (damage == 1) node->prev = held, node->next = held;
    if (damage == 2) entry->first = 0xFFFFFFFF;
    if (damage == 3) entry->last = 0xFFFFFFFF;
    if (damage == 4) entry->holders = waits;
    if (damage == 5) holder->next = holder->prev = held;
    if (damage == 6) entry->next = index;
    if (damage == 7) space->table->head[part][hl__shm_head_of(hl__shm_hash(key))] = 0xFFFFFF00;
    if (damage == 8) holder->row = node->row = 0x7FFFFFFF;
    if (damage == 9) holder->row = node->row = held;
    hl__shm_part_unlock(space, part);
    /* Another row of the same chain. */
    uint32_t other = 6;
    while (hl__shm_part_of(hl__shm_hash(hl__shm_key(other, 2))) != part ||
           hl__shm_head_of(hl__shm_hash(hl__shm_key(other, 2))) !=
               hl__shm_head_of(hl__shm_hash(key)))
      other++;
    (void)take_one(c, row(2, other, X), 10);
    hl__shm_give_back(a, 0);
    (void)waiter_end(&it);
    hl__shm_give_back(b, 0);
    hl__shm_give_back(c, 0);
    assert_int_equal(hl__shm_part_lock(space, part, INT64_MAX, NULL), HL_OK);
    hl__shm_rebuild(space, part);
    hl__shm_part_unlock(space, part);
    assert_sound();
    assert_int_equal(take_one(a, row(2, 5, X), 0), HL_OK);
    hl__shm_give_back(a, 0);
  }
}

static void after_a_reboot_only_leases_are_left(void **state) {
  (void)state;
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_OK);
  uint32_t lease = lease_new(a, hl__shm_boot_ms(space) + 10000000);
  atomic_store(&hl__shm_lease_at(space, lease)->end_unix, (uint64_t)hl__unix_ms() + 5000000);
  /* The clock was set back meanwhile. */
  assert_int_equal(take_one(a, row(2, 5, X), 0), HL_OK);
  uint32_t capped = lease_new(a, 3000000);
  atomic_store(&hl__shm_lease_at(space, capped)->ttl, (uint64_t)hl__shm_boot_ms(space) + 3000000);
  atomic_store(&hl__shm_lease_at(space, capped)->end_unix, (uint64_t)hl__unix_ms() + 5000000000);
  /* A node that a process has set aside, which then ended in order. */
  const uint32_t aside = atomic_load(&hl__shm_lease_at(space, lease)->base.first) + 100;
  atomic_store(&hl__shm_node_at(space, aside)->claim, hl__shm_claim(77, 0, HL__RESERVED));
  table_leave();
  /* A process that held and awaited something when the power failed; its pid is ours now. */
  hl_row rows[1] = {row(2, 4, X)};
  pid_t pid = holder_start(rows, 1, true);
  holder_kill(pid);
  int fd = control_open();
  uint64_t other = 77;
  assert_int_equal(pwrite(fd, &other, sizeof other, offsetof(hl__shm_header, boot)), sizeof other);
  (void)close(fd);
  table_enter();
  assert_sound();
  assert_true(atomic_load(&hl__shm_node_at(space, aside)->claim) == 0);
  assert_int_equal(take_one(a, row(2, 4, X), 0), HL_OK);
  assert_int_equal(take_one(a, row(2, 3, X), 0), HL_TIMEOUT);
  int64_t left = hl__shm_end_ms(atomic_load(&hl__shm_lease_at(space, lease)->base.end)) -
                 hl__shm_boot_ms(space);
  assert_true(left > 4000000 && left <= 5000000);
  assert_true(hl__shm_lease_end(space, lease, stamp_of(lease), 0));
  left = hl__shm_end_ms(atomic_load(&hl__shm_lease_at(space, capped)->base.end)) -
         hl__shm_boot_ms(space);
  assert_true(left > 2000000 && left <= 3000000);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      IT(a_removed_file_is_noticed),
      IT(what_is_granted_in_a_removed_file_is_refused),
      IT(a_directory_that_gets_its_name_back_has_no_stuck_locks),
      IT(a_process_keeps_its_directory_behind_chroot),
      IT(a_process_keeps_its_directory_as_another_user),
      IT(the_dead_make_room_for_an_opener),
      IT(another_boot_beside_the_living_is_refused),
      IT(a_table_in_use_does_not_grow_old),
      IT(a_limit_of_file_sizes_is_an_error),
      IT(a_process_without_proc_shares_the_boot),
      IT(a_process_without_proc_guesses_no_boot),
      IT(want_of_descriptors_says_nothing_of_the_machine),
      IT(others_files_are_refused),
      IT(a_failed_lock_is_not_another_process),
      IT(what_a_failed_read_says_is_not_of_the_file),
      IT(no_thread_relies_on_a_look_that_is_not_made),
      IT(what_a_failed_look_says_is_not_of_the_name),
      IT(a_damaged_index_is_survived),
      IT(after_a_reboot_only_leases_are_left),
      cmocka_unit_test(nothing_is_left),
  };
  if (!between_begin()) return 1;
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
