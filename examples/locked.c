/*
 * Runs a command under a lock, as flock(1) does, but on nodes of a tree.
 *
 * Shows: the C interface, from hl_manager_open to hl_manager_close; how errors
 * come back; the holders in the way, when the lock was not granted in time.
 *
 * Not to be copied blindly: the command is another process. When this program is
 * killed outright, its lock is free at once, and the command runs on without it.
 * And the program notices a lost lock only after the command: work that must
 * stop then has to ask hl_lock_is_held as it goes.
 *
 * Run it, from a checkout, after `make`:
 *
 *     cc -Wall -Icsrc/core -o build/locked examples/locked.c build/lua5.4/libhierlock.a \
 *       -lm -pthread
 *     build/locked u1/a1 2.5 echo 'nobody else is in u1/a1 now'
 *
 * Installed (for MySQL: cc -DWITH_MYSQL, pkg-config --static):
 *
 *     cc -Wall -o locked examples/locked.c $(pkg-config --cflags --libs hierlock)
 *
 * With MySQL, too ($HIERLOCK_DSN begins with mysql:), from a checkout, with the
 * client library that `make` found:
 *
 *     cc -Wall -DWITH_MYSQL -Icsrc/core -o build/locked examples/locked.c \
 *       build/lua5.4/libhierlock.a $(mariadb_config --libs) -lm -pthread
 *
 * With PostgreSQL, too:
 *
 *     cc -Wall -DWITH_POSTGRESQL -Icsrc/core -o build/locked examples/locked.c \
 *       build/lua5.4/libhierlock.a $(pkg-config --cflags --libs libpq) -lm -pthread
 *
 * The exit status is the command's; 75 when the lock was not granted in time, 70
 * when it was lost meanwhile, 69 for other errors (see sysexits.h).
 */
#include <hierlock.h>

#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <sysexits.h>

extern char **environ;

/* Stores that need a client library are linked only if this array names them.
 * */
static const struct hl_store_ops *const stores[] = {
#ifdef WITH_MYSQL
    &hl_store_mysql,
#endif
#ifdef WITH_POSTGRESQL
    &hl_store_postgresql,
#endif
    NULL};

static void print_holder(void *context, const hl_holder *holder) {
  (void)context;
  if (!holder->waiting)
    fprintf(stderr, "locked: %s is held by %s (%s), process %lld on %s\n", holder->path,
            holder->application, holder->label, (long long)holder->pid, holder->host);
}

/* Adds the node "u1/a1/r1". Passes on an id too many, for hl_plan_add to refuse.
 * */
static int plan_add(hl_plan *plan, const char *path, hl_error *error) {
  hl_id ids[HL_LEVELS_MAX + 1];
  unsigned n = 0;
  for (bool last = false; !last && n <= HL_LEVELS_MAX; n++) {
    ids[n].data = path;
    ids[n].size = strcspn(path, "/");
    last = path[ids[n].size] == '\0';
    path += ids[n].size + 1;
  }
  return hl_plan_add(plan, ids, n, HL_EXCLUSIVE, false, error);
}

static int run(char **command) {
  pid_t pid;
  int status;
  int failed = posix_spawnp(&pid, command[0], NULL, NULL, command, environ);
  if (failed) {
    fprintf(stderr, "locked: %s: %s\n", command[0], strerror(failed));
    return 127;
  }
  while (waitpid(pid, &status, 0) < 0) continue; /* EINTR */
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int main(int argc, char **argv) {
  hl_config config = HL_CONFIG_INIT;
  hl_options options = HL_OPTIONS_INIT;
  hl_manager *manager = NULL;
  hl_plan *plan = NULL;
  hl_lock *lock = NULL;
  hl_error error = {0};
  int result = EX_UNAVAILABLE;
  char *end = "";
  double seconds = argc > 2 ? strtod(argv[2], &end) : 0;

  if (argc < 4 || *end || !(seconds >= 0 && seconds < 1e9)) {
    fprintf(stderr, "usage: locked USER[/ACCOUNT[/RESOURCE]] SECONDS "
                    "COMMAND [ARGUMENT ...]\n");
    return EX_USAGE;
  }
  config.stores = stores;
  config.application = "locked";
  options.timeout = (int64_t)(seconds * 1000);
  options.label = argv[3];
  options.label_size = strlen(argv[3]);

  if (hl_manager_open(&config, &manager, &error)) goto out;
  plan = hl_plan_new(hl_manager_layout(manager));
  if (!plan) error.status = HL_ENOMEM;
  if (!plan || plan_add(plan, argv[1], &error)) goto out;
  if (hl_acquire(manager, plan, &options, &lock, &error)) {
    if (error.status == HL_TIMEOUT) {
      hl_error why;
      result = EX_TEMPFAIL;
      if (hl_manager_blockers(manager, plan, print_holder, NULL, &why))
        fprintf(stderr, "who else is in the way is not known: %s\n", why.message);
    }
    goto out;
  }
  result = run(argv + 3);
  if (hl_lock_release(lock, false, &error)) result = EX_SOFTWARE;

out:
  if (error.status)
    fprintf(stderr, "locked: %s: %s\n", hl_status_name(error.status), error.message);
  hl_lock_free(lock);
  hl_plan_free(plan);
  if (manager) hl_manager_close(manager);
  return result;
}
