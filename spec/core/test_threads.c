/*
 * test_threads.c - many threads on one manager, and children born while they are at it: on the
 * embedded store, and on the servers that the environment names (see spec/support/servers.sh).
 * Errors show best under ThreadSanitizer: `make tsan`.
 */
#include "dsn.h"
#include "hierlock.h"
#include "clock.h"
#include "plan.h"
#include "provision.h"
#include "store.h"

#include <netinet/in.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "leftovers.h"

/* -------------------------------------------------------------- stores */

#define TABLE "hierlock_spec_threads"

enum { BUCKETS = 64, STORES_MAX = 4, DEADLINE_MS = 60000 };

static struct { char dsn[512]; } stores[STORES_MAX];
static size_t store_count;

static char directory[64] = "/dev/shm/hierlock-test-XXXXXX";

static int find_stores(void **state) {
  static const char *const servers[] = {"HIERLOCK_MYSQL_DSN", "HIERLOCK_MARIADB_DSN"};
  (void)state;
  if (!mkdtemp(directory)) return -1;
  (void)snprintf(stores[store_count++].dsn, sizeof stores->dsn, "file:%s", directory);
  for (int i = 0; i < 2; i++) {
    const char *dsn = getenv(servers[i]);
    if (!dsn) continue;
    provision(dsn, TABLE, BUCKETS);
    (void)snprintf(stores[store_count++].dsn, sizeof stores->dsn, "%s%ctable=" TABLE, dsn,
                   strchr(dsn, '?') ? '&' : '?');
  }
  const char *postgresql = getenv("HIERLOCK_POSTGRESQL_DSN");
  if (postgresql) (void)snprintf(stores[store_count++].dsn, sizeof stores->dsn, "%s", postgresql);
  return 0;
}

static int forget_stores(void **state) {
  char command[128];
  (void)state;
  (void)snprintf(command, sizeof command, "rm -rf %s", directory);
  return system(command);
}

static hl_manager *open_dsn(const char *dsn, unsigned pool_size, hl_error *error) {
  static const hl_store_ops *const ops[] = {&hl_store_mysql, &hl_store_postgresql, NULL};
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager = NULL;
  if (hl_layout_new(NULL, 0, BUCKETS, &config.layout, error)) return NULL;
  config.dsn = dsn;
  config.stores = ops;
  config.pool_size = pool_size;
  config.timeout = DEADLINE_MS;
  config.hold_timeout = 2000; /* so that the keeper has something to do */
  (void)hl_manager_open(&config, &manager, error);
  hl_layout_unref(config.layout);
  return manager;
}

static hl_manager *open_store(size_t store, unsigned pool_size) {
  hl_error error;
  hl_manager *manager = open_dsn(stores[store].dsn, pool_size, &error);
  if (!manager) (void)fprintf(stderr, "%s: %s\n", stores[store].dsn, error.message);
  return manager;
}

static int take(hl_manager *manager, const char *user, const char *account, hl_lock **lock,
                hl_error *error) {
  hl_id ids[2] = {{user, strlen(user)}, {account, account ? strlen(account) : 0}};
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  int status = hl_plan_add(plan, ids, account ? 2 : 1, HL_EXCLUSIVE, false, error);
  if (status == HL_OK) status = hl_acquire(manager, plan, NULL, lock, error);
  hl_plan_free(plan);
  return status;
}

/* ----------------------------------------------------- sharing a manager */

enum { THREADS = 6, USERS = 3, ROUNDS = 60 };

static struct {
  hl_manager *manager;
  long counters[USERS]; /* protected by the locks alone */
  atomic_int failures;
  atomic_bool stop;
} shared;

static const char *const users[USERS] = {"t0", "t1", "t2"};

static void failed(const char *what, const hl_error *error) {
  (void)fprintf(stderr, "%s: %s\n", what, error->message);
  (void)atomic_fetch_add(&shared.failures, 1);
}

static void nobody(void *context, const hl_holder *holder) { (void)context, (void)holder; }

static void use(hl_lock *lock, int round) {
  hl_error error;
  hl_stats stats;
  switch (round % 5) {
  case 0:
    if (!hl_lock_is_held(lock)) (void)atomic_fetch_add(&shared.failures, 1);
    break;
  case 1:
    if (hl_lock_check(lock, &error)) failed("check", &error);
    break;
  case 2:
    if (hl_lock_remaining(lock) == 0) (void)atomic_fetch_add(&shared.failures, 1);
    break;
  case 3: hl_manager_stats(shared.manager, &stats); break;
  default: (void)usleep(1000);
  }
}

static void *share(void *argument) {
  int first = (int)(intptr_t)argument;
  for (int round = 0; round < ROUNDS; round++) {
    int which = (first + round) % USERS;
    hl_error error;
    hl_lock *lock;
    if (take(shared.manager, users[which], NULL, &lock, &error)) {
      failed("acquire", &error);
      continue;
    }
    long seen = shared.counters[which];
    use(lock, round + first);
    shared.counters[which] = seen + 1;
    if (hl_lock_release(lock, round % 2, &error)) failed("release", &error);
    hl_lock_free(lock);
  }
  return NULL;
}

static void *observe(void *argument) {
  hl_plan *plan = hl_plan_new(hl_manager_layout(shared.manager));
  hl_id id = {"t0", 2};
  hl_error error;
  (void)argument;
  (void)hl_plan_add(plan, &id, 1, HL_EXCLUSIVE, false, NULL);
  while (!atomic_load(&shared.stop)) {
    int status = hl_manager_holders(shared.manager, plan, nobody, NULL, &error);
    /* A look gives up soon where the server is busy. */
    if (status < 0 && status != HL_ECONNECTION) failed("holders", &error);
    (void)hl_manager_losses(shared.manager);
    (void)usleep(20000);
  }
  hl_plan_free(plan);
  return NULL;
}

static void threads_share_a_manager(void **state) {
  (void)state;
  for (size_t store = 0; store < store_count; store++) {
    pthread_t threads[THREADS], observer;
    hl_stats stats;
    memset(&shared, 0, sizeof shared);
    /* Fewer connections than threads, so that some wait for one. */
    shared.manager = open_store(store, THREADS - 2);
    assert_non_null(shared.manager);
    assert_int_equal(pthread_create(&observer, NULL, observe, NULL), 0);
    for (intptr_t i = 0; i < THREADS; i++)
      assert_int_equal(pthread_create(&threads[i], NULL, share, (void *)i), 0);
    for (int i = 0; i < THREADS; i++) (void)pthread_join(threads[i], NULL);
    atomic_store(&shared.stop, true);
    (void)pthread_join(observer, NULL);
    assert_int_equal(atomic_load(&shared.failures), 0);
    assert_int_equal(shared.counters[0] + shared.counters[1] + shared.counters[2],
                     THREADS * ROUNDS);
    hl_manager_stats(shared.manager, &stats);
    assert_int_equal(stats.acquired, THREADS * ROUNDS);
    assert_int_equal(stats.held, 0);
    assert_int_equal(stats.waiting, 0);
    hl_manager_close(shared.manager);
  }
}

/* --------------------------------------------------------- many targets */

/* Calls with so many targets that putting them in order takes a while, begun at one moment: a
   caller in line reads the plans of the callers before it. */
enum { RESOURCES = 400, ASKED = 200, SORTERS = 4, SORTINGS = 200 };

static struct {
  hl_manager *manager;
  pthread_barrier_t together;
  atomic_int failures, wrong;
} crowd;

/* Whether the lock took the rows that the plan says, each once, in order. */
static bool took(const hl_lock *lock, hl_plan *plan) {
  size_t n, m;
  const hl_row *rows = hl__plan_rows(hl_lock_plan(lock), &n);
  const hl_row *said = hl_plan_rows(plan, &m);
  bool same = n == m;
  for (size_t i = 0; same && i < n; i++)
    same = rows[i].level == said[i].level && rows[i].bucket == said[i].bucket &&
           rows[i].mode == said[i].mode;
  return same;
}

static void *acquire_many(void *argument) {
  unsigned seed = (unsigned)(intptr_t)argument;
  for (int round = 0; round < SORTINGS; round++) {
    hl_error error;
    hl_lock *lock;
    hl_plan *plan = hl_plan_new(hl_manager_layout(crowd.manager));
    for (int i = 0, next = rand_r(&seed) % RESOURCES; i < ASKED; i++) {
      char name[16];
      /* Not in order, and each once: 7 and RESOURCES have no common divisor. */
      next = (next + 7) % RESOURCES;
      (void)snprintf(name, sizeof name, "r%d", next);
      hl_id ids[3] = {{"m", 1}, {"a", 1}, {name, strlen(name)}};
      (void)hl_plan_add(plan, ids, 3, HL_EXCLUSIVE, false, NULL);
    }
    (void)pthread_barrier_wait(&crowd.together);
    if (hl_acquire(crowd.manager, plan, NULL, &lock, &error) == HL_OK) {
      if (!took(lock, plan)) (void)atomic_fetch_add(&crowd.wrong, 1);
      hl_lock_free(lock);
    } else {
      (void)fprintf(stderr, "many targets: %s\n", error.message);
      (void)atomic_fetch_add(&crowd.failures, 1);
    }
    hl_plan_free(plan);
  }
  return NULL;
}

static void each_call_takes_the_rows_of_its_plan(void **state) {
  pthread_t threads[SORTERS];
  char dsn[96];
  hl_config config = HL_CONFIG_INIT;
  (void)state;
  memset(&crowd, 0, sizeof crowd);
  (void)snprintf(dsn, sizeof dsn, "file:%s/many", directory);
  config.dsn = dsn;
  assert_int_equal(hl_manager_open(&config, &crowd.manager, NULL), HL_OK);
  assert_int_equal(pthread_barrier_init(&crowd.together, NULL, SORTERS), 0);
  for (intptr_t i = 0; i < SORTERS; i++)
    assert_int_equal(pthread_create(&threads[i], NULL, acquire_many, (void *)i), 0);
  for (int i = 0; i < SORTERS; i++) (void)pthread_join(threads[i], NULL);
  (void)pthread_barrier_destroy(&crowd.together);
  assert_int_equal(atomic_load(&crowd.failures), 0);
  assert_int_equal(atomic_load(&crowd.wrong), 0);
  hl_manager_close(crowd.manager);
}

/* -------------------------------------------------------------- closing */

/* Holds one node and looks at it until it is lost to the closing. */
static void *check_until_closed(void *argument) {
  hl_lock *lock = argument;
  hl_error error;
  int status;
  while ((status = hl_lock_check(lock, &error)) == HL_OK) {}
  /* The connection may have been cut under the check's hands. */
  if (status != HL_ERELEASED && status != HL_ELOST) failed("check", &error);
  hl_lock_free(lock);
  return NULL;
}

static void *wait_until_closed(void *argument) {
  hl_error error;
  hl_lock *lock;
  int status = take(shared.manager, argument, NULL, &lock, &error);
  if (status != HL_CANCELLED) failed("a wait that was to be cancelled", &error);
  return NULL;
}

/* Of two waiters for a node, one is at the store, and the other stands behind it. */
static void closing_meets_other_threads(void **state) {
  static char names[THREADS / 2][16];
  (void)state;
  for (size_t store = 0; store < store_count; store++)
    for (int round = 0; round < 5; round++) {
      pthread_t threads[THREADS];
      hl_stats stats;
      hl_lock *lock;
      memset(&shared, 0, sizeof shared);
      shared.manager = open_store(store, THREADS);
      assert_non_null(shared.manager);
      for (int i = 0; i < THREADS / 2; i++) {
        (void)snprintf(names[i], sizeof names[i], "c%d", i);
        assert_int_equal(take(shared.manager, names[i], NULL, &lock, NULL), HL_OK);
        assert_int_equal(pthread_create(&threads[2 * i], NULL, check_until_closed, lock), 0);
        assert_int_equal(pthread_create(&threads[2 * i + 1], NULL, wait_until_closed, names[i / 2]),
                         0);
      }
      do {
        hl_manager_stats(shared.manager, &stats);
        (void)usleep(1000);
      } while (stats.waiting < THREADS / 2);
      hl_manager_close(shared.manager);
      for (int i = 0; i < THREADS; i++) (void)pthread_join(threads[i], NULL);
      assert_int_equal(atomic_load(&shared.failures), 0);
    }
}

static void hold_for_ever(int done) {
  char name[16];
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  hl_lock *lock;
  hl_manager *manager = open_store(0, THREADS);
  for (int i = 0; manager && i < THREADS; i++) {
    (void)snprintf(name, sizeof name, "m%d", i);
    if (take(manager, name, NULL, &lock, NULL)) _exit(1);
  }
  if (!manager || write(done, "", 1) != 1) _exit(1);
  for (;;) (void)pause();
}

static void *wait_for_the_new_one(void *argument) {
  hl_error error;
  hl_lock *lock;
  if (take(shared.manager, argument, NULL, &lock, &error))
    failed("a wait in a renamed directory", &error);
  else
    hl_lock_free(lock);
  return NULL;
}

static void who_waits_in_a_renamed_directory_goes_on_in_a_new_one(void **state) {
  static char names[THREADS][16];
  pthread_t threads[THREADS];
  hl_stats stats;
  char away[sizeof directory + 8], byte;
  int done[2];
  (void)state;
#ifdef __SANITIZE_THREAD__
  skip(); /* ThreadSanitizer does not know threads that such a child starts */
#endif
  memset(&shared, 0, sizeof shared);
  assert_int_equal(pipe(done), 0);
  pid_t pid = fork();
  assert_true(pid >= 0);
  if (pid == 0) hold_for_ever(done[1]);
  assert_int_equal(read(done[0], &byte, 1), 1);
  shared.manager = open_store(0, THREADS);
  assert_non_null(shared.manager);
  for (int i = 0; i < THREADS; i++) {
    (void)snprintf(names[i], sizeof names[i], "m%d", i);
    assert_int_equal(pthread_create(&threads[i], NULL, wait_for_the_new_one, names[i]), 0);
  }
  do {
    hl_manager_stats(shared.manager, &stats);
    (void)usleep(1000);
  } while (stats.waiting < THREADS);
  (void)snprintf(away, sizeof away, "%s.away", directory);
  assert_int_equal(rename(directory, away), 0);
  for (int i = 0; i < THREADS; i++) (void)pthread_join(threads[i], NULL);
  assert_int_equal(atomic_load(&shared.failures), 0);
  hl_manager_close(shared.manager);
  (void)kill(pid, SIGKILL);
  (void)waitpid(pid, NULL, 0);
  (void)close(done[0]), (void)close(done[1]);
  char command[sizeof away + 8];
  (void)snprintf(command, sizeof command, "rm -rf %s", away);
  assert_int_equal(system(command), 0);
}

/* ----------------------------------------------------------------- fork */

enum { CHILDREN = 15, CONNECTING = 3 };

/* Connects, and goes away again. */
static void *connect_and_close(void *argument) {
  size_t store = *(const size_t *)argument;
  while (!atomic_load(&shared.stop)) {
    hl_manager *manager = open_store(store, 1);
    if (!manager) {
      (void)atomic_fetch_add(&shared.failures, 1);
      break;
    }
    hl_manager_close(manager);
  }
  return NULL;
}

/* The work of a child of a program with threads: it acquires for itself. */
static void acquire_in_child(size_t store) {
  hl_lock *lock;
  hl_manager *manager = open_store(store, 1);
  if (!manager) _exit(1);
  if (take(manager, "child", NULL, &lock, NULL)) _exit(2);
  hl_lock_free(lock);
  hl_manager_close(manager);
  _exit(0);
}

/* The child's exit status; kills it when it hangs. */
static int child_ends(pid_t pid) {
  int status;
  for (int64_t end = hl__now_ms() + DEADLINE_MS; hl__now_ms() < end;) {
    if (waitpid(pid, &status, WNOHANG) == pid)
      return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    (void)usleep(1000);
  }
  (void)kill(pid, SIGKILL);
  (void)waitpid(pid, &status, 0);
  return -SIGKILL;
}

static void a_child_born_while_others_connect_acquires(void **state) {
  (void)state;
#ifdef __SANITIZE_THREAD__
  skip(); /* ThreadSanitizer does not know threads that such a child starts */
#endif
  for (size_t store = 0; store < store_count; store++) {
    pthread_t threads[CONNECTING];
    memset(&shared, 0, sizeof shared);
    for (int i = 0; i < CONNECTING; i++)
      assert_int_equal(pthread_create(&threads[i], NULL, connect_and_close, &store), 0);
    int status = 0;
    for (int i = 0; i < CHILDREN && status == 0; i++) {
      (void)usleep(1000 + 700 * (unsigned)i % 5000);
      pid_t pid = fork();
      assert_true(pid >= 0);
      if (pid == 0) acquire_in_child(store);
      status = child_ends(pid);
    }
    atomic_store(&shared.stop, true);
    for (int i = 0; i < CONNECTING; i++) (void)pthread_join(threads[i], NULL);
    assert_int_equal(status, 0);
    assert_int_equal(atomic_load(&shared.failures), 0);
  }
}

/* A server that takes connections, and says nothing. */
static int listen_silently(unsigned *port) {
  struct sockaddr_in address = {.sin_family = AF_INET};
  socklen_t size = sizeof address;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (fd < 0 || bind(fd, (struct sockaddr *)&address, size) != 0 || listen(fd, 1) != 0 ||
      getsockname(fd, (struct sockaddr *)&address, &size) != 0)
    return -1;
  *port = ntohs(address.sin_port);
  return fd;
}

static void *connect_in_vain(void *argument) {
  hl_error error;
  char dsn[64];
  (void)snprintf(dsn, sizeof dsn, "mysql://u:p@127.0.0.1:%u/d?connect_timeout=3",
                 *(const unsigned *)argument);
  if (open_dsn(dsn, 1, &error)) (void)atomic_fetch_add(&shared.failures, 1);
  return NULL;
}

/* How many sockets of this process have that peer. */
static int count_sockets(unsigned port) {
  int n = 0;
  for (int fd = 0; fd < 1024; fd++) {
    struct sockaddr_in peer = {0};
    socklen_t size = sizeof peer;
    if (getpeername(fd, (struct sockaddr *)&peer, &size) == 0 && peer.sin_family == AF_INET &&
        ntohs(peer.sin_port) == port)
      n++;
  }
  return n;
}

static void a_child_gets_no_connection_in_the_making(void **state) {
  pthread_t thread;
  unsigned port = 0;
  (void)state;
  memset(&shared, 0, sizeof shared);
  int server = listen_silently(&port);
  assert_true(server >= 0);
  assert_int_equal(pthread_create(&thread, NULL, connect_in_vain, &port), 0);
  int peer = accept(server, NULL, NULL);
  assert_true(peer >= 0);
  (void)usleep(100000); /* in which nothing happens */
  assert_int_equal(count_sockets(port), 1);
  int64_t start = hl__now_ms();
  pid_t pid = fork();
  assert_true(pid >= 0);
  if (pid == 0) _exit(count_sockets(port));
  int64_t taken = hl__now_ms() - start;
  assert_int_equal(child_ends(pid), 0);
#ifdef MARIADB_PACKAGE_VERSION
  assert_int_equal(count_sockets(port), 1);
  assert_true(taken < 1000); /* Oracle's library keeps fork() waiting */
#endif
  (void)pthread_join(thread, NULL);
  (void)close(peer), (void)close(server);
  (void)taken;
  assert_int_equal(atomic_load(&shared.failures), 0);
}

/* ----------------------------------------------------------------- exit */

static hl_manager *until_exit;

static void acquire_at_exit(void) {
  hl_lock *lock;
  if (take(until_exit, "exit", NULL, &lock, NULL)) _exit(1);
  hl_lock_free(lock);
  _exit(0);
}

/* A handler of the program's own, which runs after ours, may still acquire. */
static void a_handler_of_exit_acquires(void **state) {
  (void)state;
#ifdef __SANITIZE_THREAD__
  skip(); /* ThreadSanitizer does not know threads that such a child starts */
#endif
  for (size_t store = 0; store < store_count; store++) {
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
      hl_pending *pending;
      hl_lock *lock, *blocker;
      (void)atexit(acquire_at_exit);
      until_exit = open_store(store, 4);
      if (!until_exit || take(until_exit, "busy", NULL, &blocker, NULL)) _exit(2);
      /* Needs a worker, whose start has exit() watched. */
      hl_plan *plan = hl_plan_copy(hl_lock_plan(blocker));
      if (hl_start(until_exit, plan, NULL, &pending, NULL)) _exit(3);
      hl_lock_free(blocker);
      if (hl_pending_wait(pending, DEADLINE_MS, &lock, NULL)) _exit(4);
      exit(5);
    }
    assert_int_equal(child_ends(pid), 0);
  }
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(threads_share_a_manager),
      cmocka_unit_test(each_call_takes_the_rows_of_its_plan),
      cmocka_unit_test(closing_meets_other_threads),
      cmocka_unit_test(who_waits_in_a_renamed_directory_goes_on_in_a_new_one),
      cmocka_unit_test(a_child_born_while_others_connect_acquires),
      cmocka_unit_test(a_child_gets_no_connection_in_the_making),
      cmocka_unit_test(a_handler_of_exit_acquires),
      cmocka_unit_test(nothing_is_left),
  };
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests(tests, find_stores, forget_stores);
}
