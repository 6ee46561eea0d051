/*
 * test_embedded_directory.c - the directory of the embedded store: its rights and its owner; what
 * programs do once it is removed, renamed, replaced or cut; what hostile and careless users may do
 * there; and which descriptors lead into it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "embedded_processes.h"
#include "leftovers.h"

#include <errno.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#ifndef RENAME_EXCHANGE
#define RENAME_EXCHANGE (1 << 1)
#endif

/* -------------------------------------------------- what is there, and whose */

static void a_removed_directory_is_noticed(void **state) {
  (void)state;
  hl_store *store = store_new();
  hl_session *a = session_new(store), *b = session_new(store), *c;
  assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
  remove_directory();
  assert_int_equal(ops->check(a, NULL), HL_ECONNECTION);
  assert_int_equal(take1(b, 2, HL_EXCLUSIVE, 0), HL_ECONNECTION);
  /* A session that opens now, opens the same directory as all others that open now. */
  c = session_new(store);
  assert_int_equal(take1(c, 1, HL_EXCLUSIVE, 0), HL_OK);
  give(a);
  assert_int_equal(ops->check(c, NULL), HL_OK);
  assert_int_equal(take1(b, 1, HL_SHARED, 0), HL_TIMEOUT);
  pid_t pid = spawn(hold_until_stop, HL_SHARED);
  sleep_ms(STAYS_MS);
  assert_int_equal(atomic_load(&shared->step), 0);
  give(c);
  atomic_store(&shared->stop, 1);
  reap(pid);
  ops->session_close(a);
  ops->session_close(b);
  ops->session_close(c);
  ops->close(store);
}

static int open_status(const char *path, hl_layout *other) {
  hl_dsn where = {.store = "file", .path = path};
  hl_store_config c = config;
  hl_store *store;
  c.dsn = &where;
  if (other) c.layout = other;
  int status = ops->open(&c, &store, NULL);
  if (status == HL_OK) ops->close(store);
  return status;
}

static void what_is_wrong_is_refused(void **state) {
  (void)state;
  static const char *const names[] = {"user", "account"};
  char path[128];
  hl_layout *other;
  hl_store *store = store_new();
  ops->close(store);
  assert_int_equal(hl_layout_new(names, 2, 0, &other, NULL), HL_OK);
  assert_int_equal(open_status(directory, other), HL_EMISMATCH);
  hl_layout_unref(other);
  assert_int_equal(hl_layout_new(NULL, 0, 77, &other, NULL), HL_OK);
  assert_int_equal(open_status(directory, other), HL_EMISMATCH);
  hl_layout_unref(other);
  assert_int_equal(open_status(directory, NULL), HL_OK);

  (void)snprintf(path, sizeof path, "%s/control", directory);
  assert_int_equal(truncate(path, 10), 0);
  assert_int_equal(open_status(directory, NULL), HL_ESTORE);
  assert_int_equal(open_status(path, NULL), HL_ESTORE);
  (void)snprintf(path, sizeof path, "%s/not/there", directory);
  assert_int_equal(open_status(path, NULL), HL_ESTORE);

  hl_dsn odd;
  hl_error error;
  assert_int_equal(hl_dsn_parse("file:/there?shared=1", ops->parse, &odd, &error), HL_EDSN);
  assert_non_null(strstr(error.message, "shared"));
  hl_dsn_dispose(&odd);
}

static void files_have_the_directorys_rights(void **state) {
  (void)state;
  char path[128];
  struct stat st;
  assert_int_equal(mkdir(directory, 0700), 0);
  assert_int_equal(chmod(directory, 0770), 0);
  ops->close(store_new());
  (void)snprintf(path, sizeof path, "%s/control", directory);
  assert_int_equal(stat(path, &st), 0);
  assert_int_equal(st.st_mode & 0777, 0660);
}

static void files_are_for_writers_alone(void **state) {
  (void)state;
  static const struct {
    mode_t directory, file;
  } cases[] = {{0700, 0600}, {0755, 0600}, {0750, 0600}, {0770, 0660}, {0775, 0660}, {01777, 0666}};
  struct stat st;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    assert_int_equal(mkdir(directory, 0700), 0);
    assert_int_equal(chmod(directory, cases[i].directory), 0);
    hl_store *store = store_new();
    hl_session *a = session_new(store);
    assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
    assert_int_equal(stat(path_of("control"), &st), 0);
    assert_int_equal(st.st_mode & 0777, cases[i].file);
    ops->session_close(a);
    ops->close(store);

    /* A file that more users may read than the directory says. */
    assert_int_equal(chmod(path_of("control"), 0644), 0);
    store = store_new();
    a = session_new(store);
    assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
    assert_int_equal(stat(path_of("control"), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0644 & cases[i].file);
    ops->session_close(a);
    ops->close(store);
    remove_directory();
  }
}

static void what_root_makes_is_the_directorys_owners(void **state) {
  (void)state;
  enum { OWNER = 54321, GROUP = 54322 };
  if (geteuid() != 0) skip();
  assert_int_equal(mkdir(directory, 0700), 0);
  assert_int_equal(chown(directory, OWNER, GROUP), 0);
  hl_store *store = store_new();
  hl_session *a = session_new(store);
  assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
  int n = 0;
  DIR *names = opendir(directory);
  for (struct dirent *file; (file = readdir(names));) {
    struct stat st;
    assert_int_equal(stat(path_of(file->d_name), &st), 0);
    if (!S_ISREG(st.st_mode)) continue;
    assert_int_equal(st.st_uid, OWNER);
    assert_int_equal(st.st_gid, GROUP);
    n++;
  }
  (void)closedir(names);
  assert_int_equal(n, 1);
  ops->session_close(a);
  ops->close(store);
}

/* ----------------------------------------- renamed, replaced, truncated */

/* A session that opens the path afterwards is kept out by no earlier session, and no earlier
   session believes that it still holds. */
static void what_the_path_does_not_show_is_lost(int how) {
  hl_store *store = store_new(), *fresh;
  hl_session *a = session_new(store), *b = session_new(store), *c = session_new(store), *d;
  assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
  assert_int_equal(take1(c, 2, HL_EXCLUSIVE, 0), HL_OK);
  switch (how) {
  case 0: assert_int_equal(rename(directory, path_of("-x")), 0); break;
  case 1: assert_int_equal(rename(path_of("control"), path_of("other")), 0); break;
  case 2: /* as a kill between link and unlink left it */
    assert_int_equal(link(path_of("control"), path_of("tmp-1-2")), 0);
    assert_int_equal(unlink(path_of("control")), 0);
    break;
  default:;
  }
  assert_int_equal(ops->check(a, NULL), HL_ECONNECTION);
  assert_int_equal(take1(b, 3, HL_SHARED, 0), HL_ECONNECTION);
  fresh = store_new();
  d = session_new(fresh);
  if (how == 0) assert_int_equal(take1(d, 1, HL_EXCLUSIVE, 0), HL_OK);
  assert_int_equal(ops->check(c, NULL), HL_ECONNECTION);
  give(a);
  give(c);
  if (how == 0) {
    assert_int_equal(take1(a, 1, HL_SHARED, 0), HL_TIMEOUT);
    assert_int_equal(take1(b, 1, HL_SHARED, 0), HL_TIMEOUT);
    assert_int_equal(ops->check(d, NULL), HL_OK);
    give(d);
  }
  assert_int_equal(take1(b, 1, HL_EXCLUSIVE, 0), HL_OK);
  assert_int_equal(take1(d, 1, HL_EXCLUSIVE, 0), HL_TIMEOUT);
  ops->session_close(a);
  ops->session_close(b);
  ops->session_close(c);
  ops->session_close(d);
  ops->close(store);
  ops->close(fresh);
}

static void a_renamed_directory_is_noticed(void **state) {
  (void)state;
  what_the_path_does_not_show_is_lost(0);
}

static void a_replaced_control_file_is_noticed(void **state) {
  (void)state;
  what_the_path_does_not_show_is_lost(1);
  what_the_path_does_not_show_is_lost(2);
}

/* Two names lead to one directory; then one of them leads elsewhere. */
static void a_changed_link_is_noticed(void **state) {
  (void)state;
  char link_path[400];
  (void)snprintf(link_path, sizeof link_path, "%s", path_of("-link"));
  hl_dsn by_link = {.store = "file", .path = link_path};
  hl_store_config c = config;
  hl_store *store = store_new(), *linked;
  assert_int_equal(symlink(directory, link_path), 0);
  c.dsn = &by_link;
  assert_int_equal(ops->open(&c, &linked, NULL), HL_OK);
  hl_session *a = session_new(store), *b = session_new(linked), *d;
  assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
  assert_int_equal(take1(b, 1, HL_EXCLUSIVE, 0), HL_TIMEOUT);
  assert_int_equal(take1(b, 2, HL_EXCLUSIVE, 0), HL_OK);
  assert_int_equal(mkdir(path_of("-x"), 0700), 0);
  assert_int_equal(unlink(link_path), 0);
  assert_int_equal(symlink(path_of("-x"), link_path), 0);
  assert_int_equal(ops->check(b, NULL), HL_ECONNECTION);
  assert_int_equal(ops->check(a, NULL), HL_OK);
  d = session_new(linked);
  assert_int_equal(take1(d, 2, HL_EXCLUSIVE, 0), HL_OK);
  give(a);
  assert_int_equal(take1(a, 3, HL_EXCLUSIVE, 0), HL_OK);
  ops->session_close(a);
  ops->session_close(b);
  ops->session_close(d);
  ops->close(store);
  ops->close(linked);
}

/* A waiter in it goes on in the present directory. */
static void a_waiter_leaves_a_renamed_directory(void **state) {
  (void)state;
  pid_t pid = spawn(hold_until_stop, HL_EXCLUSIVE);
  WAIT_UNTIL(atomic_load(&shared->step));
  hl_store *store = store_new();
  hl_session *a = session_new(store);
  waiting w;
  waiting_start(&w, a, HL_EXCLUSIVE, HL_FOREVER, false);
  assert_int_equal(rename(directory, path_of("-x")), 0);
  assert_int_equal(waiting_end(&w), HL_OK);
  assert_int_equal(ops->check(a, NULL), HL_OK);
  assert_int_equal(access(path_of("control"), F_OK), 0);
  atomic_store(&shared->stop, 1);
  reap(pid);
  ops->session_close(a);
  ops->close(store);
}

static void hold_beside(intptr_t mode) {
  char path[400];
  (void)snprintf(path, sizeof path, "%s", path_of("-x"));
  dsn.path = path;
  hold_until_stop(mode);
}

/* It goes on in the present directory, where the row is held, too. Who interrupts it does so once.
   before: its take has not begun yet. */
static void a_waiter_is_interrupted_in_a_renamed_directory(bool before) {
  pid_t pids[2];
  pids[0] = spawn(hold_until_stop, HL_EXCLUSIVE);
  WAIT_UNTIL(atomic_load(&shared->step));
  atomic_store(&shared->step, 0);
  pids[1] = spawn(hold_beside, HL_EXCLUSIVE);
  WAIT_UNTIL(atomic_load(&shared->step));
  hl_store *store = store_new();
  hl_session *a = session_new(store), *b = session_new(store);
  waiting w;
  if (!before) waiting_start(&w, a, HL_EXCLUSIVE, PATIENCE_MS, false);
  assert_int_equal(
      syscall(SYS_renameat2, AT_FDCWD, directory, AT_FDCWD, path_of("-x"), RENAME_EXCHANGE), 0);
  assert_int_equal(ops->check(b, NULL), HL_ECONNECTION);
  ops->interrupt(a);
  if (before) waiting_start(&w, a, HL_EXCLUSIVE, PATIENCE_MS, false);
  int status = waiting_end(&w);
  assert_true(status == HL_CANCELLED || status == HL_ECONNECTION);
  assert_int_equal(take1(a, 2, HL_EXCLUSIVE, PATIENCE_MS), HL_OK); /* it is forgotten */
  atomic_store(&shared->stop, 1);
  reap(pids[0]);
  reap(pids[1]);
  ops->session_close(a);
  ops->session_close(b);
  ops->close(store);
}

static void a_take_is_interrupted_in_a_renamed_directory(void **state) {
  (void)state;
  a_waiter_is_interrupted_in_a_renamed_directory(true);
}

static void a_wait_is_interrupted_in_a_renamed_directory(void **state) {
  (void)state;
  a_waiter_is_interrupted_in_a_renamed_directory(false);
}

/* In a process of its own, which SIGBUS may end if it touches the table before its next look at the
   file, within 10 ms. */
static void go_on_with_a_cut_file(intptr_t waits) {
  (void)signal(SIGBUS, SIG_DFL); /* not as a failure of the test, which cmocka makes of it */
  hl_store *store = store_new();
  hl_session *a = session_new(store), *b = session_new(store), *c = session_new(store);
  waiting w;
  hl_row r = row(2, 1, HL_EXCLUSIVE);
  seen s = {0};
  if (take1(a, 1, HL_EXCLUSIVE, 0) != HL_OK) _exit(1);
  if (take1(b, 2, HL_SHARED, 0) != HL_OK) _exit(1);
  if (waits) waiting_start(&w, c, HL_EXCLUSIVE, PATIENCE_MS, false);
  if (truncate(path_of("control"), 0) != 0) _exit(2);
  sleep_ms(STAYS_MS);
  if (extend1(b, 2, HL_EXCLUSIVE, 0) != HL_ECONNECTION) _exit(3);
  if (ops->check(a, NULL) != HL_ECONNECTION) _exit(4);
  if (waits && waiting_end(&w) == HL_OK) _exit(5);
  (void)ops->give_back(a, NULL);
  (void)ops->give_back(b, NULL);
  if (holders(a, &r, 1, see, &s) == HL_OK) _exit(6);
  if (take1(a, 1, HL_EXCLUSIVE, 30) == HL_OK) _exit(7);
  ops->session_close(a);
  ops->session_close(b);
  ops->session_close(c);
  ops->close(store);
}

static void a_truncated_control_file_is_never_begun_anew(void **state) {
  (void)state;
  hl_error error;
  hl_store *store;
  for (int waits = 0; waits < 2; waits++) {
    int status;
    pid_t pid = spawn(go_on_with_a_cut_file, waits);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    /* A sanitizer makes a status of the signal. */
    if (!(waits && (WIFSIGNALED(status) || WEXITSTATUS(status) > 7))) assert_int_equal(status, 0);
    assert_int_equal(ops->open(&config, &store, &error), HL_ESTORE);
    assert_non_null(strstr(error.message, "truncated"));
    remove_directory();
  }
}

static void a_copied_directory_is_refused(void **state) {
  (void)state;
  char command[600];
  hl_store *store = store_new();
  hl_session *a = session_new(store);
  hl_error error;
  assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
  (void)snprintf(command, sizeof command, "cp -r %s %s", directory, path_of("-x"));
  assert_int_equal(system(command), 0); // NOLINT: a path of our own
  hl_dsn where = {.store = "file", .path = path_of("-x")};
  hl_store_config c = config;
  hl_store *other;
  c.dsn = &where;
  assert_int_equal(ops->open(&c, &other, &error), HL_ESTORE);
  assert_non_null(strstr(error.message, "copy"));
  ops->session_close(a);
  ops->close(store);
}

/* ------------------------------------------------- hostile, and careless */

/* A process that may write the file can lock all of it. It keeps new programs out; those that have
   the directory open go on. */
static void a_program_that_locks_all_bytes_stops_openers_alone(void **state) {
  (void)state;
  hl_store *store = store_new(), *other;
  hl_session *a = session_new(store), *b = session_new(store);
  struct flock mend = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = HL__SHM_MEND};
  hl_error error;
  waiting w;
  assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
  int fd = open(path_of("control"), O_RDONLY | O_CLOEXEC);
  assert_true(fd >= 0);
  /* All that is not locked: by whom it is mended and opened. */
  assert_int_equal(fcntl(fd, F_OFD_SETLK, &mend), 0);
  waiting_start(&w, b, HL_EXCLUSIVE, HL_FOREVER, false);
  give(a);
  assert_int_equal(waiting_end(&w), HL_OK);
  pid_t pid = fork();
  if (pid == 0) _exit(ops->open(&config, &other, &error) != HL_ESTORE);
  reap(pid);
  (void)close(fd);
  give(b);
  reap(spawn(take_a_token, 0));
  ops->session_close(a);
  ops->session_close(b);
  ops->close(store);
}

/* An account that may write in the directory can make any name first: a link to a file of the
   victim's, a second name of it, a FIFO at which an open would hang. */
static void planted_names_are_not_followed(void **state) {
  (void)state;
  enum { LINK, SECOND_NAME, FIFO, DIRECTORY, KINDS };
  static const char *const names[] = {"control", "tmp-0-0"};
  static const struct timespec old[] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
  static const char text[] = "precious";
  char victim[128], content[sizeof text] = "";
  (void)snprintf(victim, sizeof victim, "%s", path_of("-x"));
  for (int kind = 0; kind < KINDS; kind++)
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
      const char *path = path_of(names[i]);
      char planted[128];
      struct stat before, after;
      hl_store *store = NULL;
      hl_error error;
      (void)snprintf(planted, sizeof planted, "%s", path);
      assert_int_equal(mkdir(directory, 0700), 0);
      assert_int_equal(chmod(directory, 01777), 0);
      int fd = open(victim, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0640);
      assert_true(fd >= 0);
      assert_int_equal(write(fd, text, sizeof text), sizeof text);
      assert_int_equal(futimens(fd, old), 0);
      assert_int_equal(fstat(fd, &before), 0);
      if (kind == LINK) assert_int_equal(symlink(victim, planted), 0);
      if (kind == SECOND_NAME) assert_int_equal(link(victim, planted), 0);
      if (kind == FIFO) assert_int_equal(mkfifo(planted, 0666), 0);
      if (kind == DIRECTORY) assert_int_equal(mkdir(planted, 0777), 0);

      int status = ops->open(&config, &store, &error);
      if (i == 0) assert_int_equal(status, HL_ESTORE);
      if (i != 0) assert_int_equal(status, HL_OK);
      if (status == HL_OK) {
        hl_session *a = session_new(store);
        assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
        (void)look_for(a, 1, HL_EXCLUSIVE);
        ops->session_close(a);
        ops->close(store);
      }
      assert_int_equal(fstat(fd, &after), 0);
      assert_int_equal(after.st_mode, before.st_mode);
      assert_int_equal(after.st_uid, before.st_uid);
      assert_int_equal(after.st_size, before.st_size);
      assert_int_equal(after.st_mtim.tv_sec, before.st_mtim.tv_sec);
      assert_true(after.st_nlink >= 1);
      assert_int_equal(pread(fd, content, sizeof content, 0), sizeof content);
      assert_string_equal(content, text);
      (void)close(fd);
      assert_int_equal(unlink(victim), 0);
      (void)rmdir(planted);
      remove_directory();
    }
}

static void see_text(void *context, const hl_holder *holder) {
  (void)snprintf(context, 600, "%s|%s|%s|%s", holder->application, holder->host, holder->label,
                 holder->path);
}

/* Other users of the directory can write what they like about themselves. */
static void what_others_say_of_themselves_is_escaped_and_cut(void **state) {
  (void)state;
  char text[600] = "";
  hl_row r = row(2, 1, HL_EXCLUSIVE);
  hl_store *store = store_new();
  hl_session *a = session_new(store);
  assert_int_equal(take1(a, 1, HL_EXCLUSIVE, 0), HL_OK);
  hl__shm_session *own = hl__embedded_session_of(a)->table;
  hl__shm_note *note = &hl__shm_record_at(own->space, own->note)->note;
  memset(own->space->table->slot[own->space->me].host, '\x1b',
         sizeof own->space->table->slot[0].host);
  memset(note->application, 'x', sizeof note->application);
  memcpy(note->label, "a\n\x1b]0;b\a\x7f\xff", 10);
  memset(note->path, '\r', sizeof note->path);
  assert_int_equal(holders(a, &r, 1, see_text, text), HL_OK);
  assert_non_null(strstr(text, "a\\x0a\\x1b]0;b\\x07\\x7f\\xff"));
  assert_non_null(strstr(text, "xxx|"));
  for (const char *c = text; *c; c++) assert_in_range(*c, ' ', 0x7E);
  ops->session_close(a);
  ops->close(store);
}

static void hold_and_be_killed(intptr_t unused) {
  (void)unused;
  hold_until_stop(HL_EXCLUSIVE);
}

static void what_the_killed_left_is_swept(void **state) {
  (void)state;
  static const struct timespec old[] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
  pid_t pid = spawn(hold_and_be_killed, 0);
  WAIT_UNTIL(atomic_load(&shared->step));
  murder(pid);
  memset(shared, 0, sizeof *shared);
  pid = spawn(hold_until_stop, HL_EXCLUSIVE);
  WAIT_UNTIL(atomic_load(&shared->step));
  for (int i = 0; i < 2; i++) {
    int fd = open(path_of(i ? "tmp-1-old" : "tmp-1-young"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    if (i) assert_int_equal(futimens(fd, old), 0);
    (void)close(fd);
  }
  ops->close(store_new());
  assert_int_equal(count_files(directory, "tmp-1-old"), 0);
  assert_int_equal(count_files(directory, "tmp-"), 1);
  atomic_store(&shared->stop, 1);
  reap(pid);
}

/* Fewer than the tries of a process that makes a file. */
#define SWEEPS 5

/* Sweeps like processes whose clocks are ahead: every new file looks old to them. Each sweeps once,
   when it opens. */
static void sweep_what_is_new(intptr_t unused) {
  (void)unused;
  atomic_store(&shared->holders[0], 1);
  while (!atomic_load(&shared->stop)) {
    DIR *names = opendir(directory);
    if (!names) _exit(1);
    for (struct dirent *file; (file = readdir(names));)
      if (atomic_load(&shared->step) < SWEEPS && strncmp(file->d_name, "tmp-", 4) == 0 &&
          unlinkat(dirfd(names), file->d_name, 0) == 0)
        (void)atomic_fetch_add(&shared->step, 1);
    (void)closedir(names);
  }
}

static void a_clock_that_is_ahead_costs_nothing(void **state) {
  (void)state;
  assert_int_equal(mkdir(directory, 0700), 0);
  pid_t pid = spawn(sweep_what_is_new, 0);
  WAIT_UNTIL(atomic_load(&shared->holders[0]));
  for (int i = 0; i < 2000 && atomic_load(&shared->step) < SWEEPS; i++) {
    ops->close(store_new());
    (void)unlink(path_of("control"));
  }
  assert_true(atomic_load(&shared->step) > 0);
  atomic_store(&shared->stop, 1);
  reap(pid);
}

/* How many descriptors of the process lead into the directory. In a child of a process
   with threads, so without malloc: a sanitizer's may be locked for ever there. */
static int descriptors_into(void) {
  enum { MOST = 1024 };
  int n = 0;
  for (int fd = 0; fd < MOST; fd++) {
    char name[32], target[200];
    (void)snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(name, target, sizeof target - 1);
    target[length > 0 ? length : 0] = '\0';
    n += strncmp(target, directory, strlen(directory)) == 0;
  }
  return n;
}

/* Whether the process has mapped a file of the directory. As descriptors_into. */
static bool maps_into(void) {
  enum { MOST = 1 << 20 };
  static char maps[MOST];
  size_t size = 0;
  int fd = open("/proc/self/maps", O_RDONLY);
  ssize_t n;
  while (fd >= 0 && (n = read(fd, maps + size, MOST - size)) > 0) size += (size_t)n;
  (void)close(fd);
  return memmem(maps, size, directory, strlen(directory)) != NULL;
}

static void *spaces_come_and_go(void *unused) {
  (void)unused;
  while (!atomic_load(&shared->stop)) {
    hl_store *store = store_new();
    hl_session *session = session_new(store);
    for (uint32_t i = 0; i < 200; i++) {
      if (take1(session, i, HL_EXCLUSIVE, 0) != HL_OK) abort();
      (void)ops->give_back(session, NULL);
    }
    ops->session_close(session);
    ops->close(store);
  }
  return NULL;
}

static void a_child_keeps_no_descriptor(void **state) {
  (void)state;
  pthread_t thread;
  int kept = 0;
  assert_int_equal(pthread_create(&thread, NULL, spaces_come_and_go, NULL), 0);
  int64_t end = hl__now_ms() + 5000; /* enough, also where forks are slow */
  for (int i = 0; i < 600 && (i < 30 || hl__now_ms() < end); i++) {
    int status;
    pid_t pid = fork();
    if (pid == 0) _exit(descriptors_into() > 0 || maps_into());
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    kept += WEXITSTATUS(status);
  }
  atomic_store(&shared->stop, 1);
  assert_int_equal(pthread_join(thread, NULL), 0);
  assert_int_equal(kept, 0);
}

/* Acts like a program that becomes a daemon. */
static void close_all_and_open_others(intptr_t unused) {
  (void)unused;
  enum { LAST = 40 };
  struct stat st;
  hl_store *store = store_new();
  hl_session *a = session_new(store), *b = session_new(store), *c;
  if (take1(a, 1, HL_EXCLUSIVE, 0) != HL_OK) _exit(1);
  for (int fd = 3; fd < LAST; fd++) (void)close(fd);
  for (int fd = 3; fd < LAST; fd++)
    if (open("/dev/zero", O_RDONLY | O_CLOEXEC) != fd) _exit(2);
  if (ops->check(a, NULL) != HL_ECONNECTION) _exit(3);
  c = session_new(store); /* opened anew */
  if (take1(c, 2, HL_EXCLUSIVE, PATIENCE_MS) != HL_OK) _exit(4);
  (void)ops->give_back(a, NULL);
  ops->session_close(a);
  ops->session_close(b);
  pid_t pid = fork();
  if (pid != 0) {
    int status;
    if (waitpid(pid, &status, 0) != pid || status != 0) _exit(5);
  }
  for (int fd = 3; fd < LAST; fd++)
    if (fstat(fd, &st) != 0 || !S_ISCHR(st.st_mode)) _exit(6);
  if (pid == 0) _exit(descriptors_into() > 0);
  if (ops->check(c, NULL) != HL_OK) _exit(7);
  ops->session_close(c);
  ops->close(store);
}

static void descriptors_of_the_host_are_left_alone(void **state) {
  (void)state;
  reap(spawn(close_all_and_open_others, 0));
}

/* test_embedded_directory [PATTERN]: which tests. */
int main(int argc, char **argv) {
#define SPEC(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)
  const struct CMUnitTest specs[] = {
      SPEC(a_removed_directory_is_noticed),
      SPEC(what_is_wrong_is_refused),
      SPEC(files_have_the_directorys_rights),
      SPEC(files_are_for_writers_alone),
      SPEC(what_root_makes_is_the_directorys_owners),
      SPEC(a_renamed_directory_is_noticed),
      SPEC(a_replaced_control_file_is_noticed),
      SPEC(a_changed_link_is_noticed),
      SPEC(a_waiter_leaves_a_renamed_directory),
      SPEC(a_take_is_interrupted_in_a_renamed_directory),
      SPEC(a_wait_is_interrupted_in_a_renamed_directory),
      SPEC(a_truncated_control_file_is_never_begun_anew),
      SPEC(a_copied_directory_is_refused),
      SPEC(a_program_that_locks_all_bytes_stops_openers_alone),
      SPEC(planted_names_are_not_followed),
      SPEC(what_others_say_of_themselves_is_escaped_and_cut),
      SPEC(what_the_killed_left_is_swept),
      SPEC(a_clock_that_is_ahead_costs_nothing),
      SPEC(a_child_keeps_no_descriptor),
      SPEC(descriptors_of_the_host_are_left_alone),
      cmocka_unit_test(nothing_is_left),
  };
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests(specs, processes_begin, processes_end);
}
