/*
 * fault_server.c - faults of a server, in the process that does a large fault: of its processes,
 * and, by an administrator's statements, of its limits. Which statements: spec/servers.
 */
#include "fault.h"

#include "provision.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PROCESSES = 1024 };

static sql *administrator;
static hl_dsn clients;

static void connect_admin(void) {
  hl_dsn dsn;
  const server_kind *kind = server_kind_of(shared->dsn);
  server_table();
  if (!server_dsn(kind, shared->dsn, &clients) || !server_dsn(kind, shared->admin_dsn, &dsn))
    exit(2);
  FAULT_UNTIL((administrator = kind->connect(&dsn, clients.database, 20, false)));
  hl_dsn_dispose(&dsn);
}

/* ---------------------------------------------------------- its processes */

static void control(const char *verb) {
  char command[sizeof shared->control + 40];
  (void)snprintf(command, sizeof command, "%s %s >/dev/null 2>&1 </dev/null", shared->control,
                 verb);
  for (int n = 0; system(command); n++)
    if (n == 3) fault_fail(command);
}

static pid_t server_pid(void) {
  char command[sizeof shared->control + 40];
  int pid = 0;
  (void)snprintf(command, sizeof command, "%s pid", shared->control);
  FILE *pipe = popen(command, "r");
  if (!pipe || fscanf(pipe, "%d", &pid) != 1) fault_fail(command);
  (void)pclose(pipe);
  return pid;
}

/* Lists the processes that a server has for its connections, if it is not one process. */
static int children_of(pid_t pid, pid_t children[PROCESSES]) {
  char path[64];
  int n = 0;
  (void)snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)pid, (int)pid);
  FILE *file = fopen(path, "r");
  while (file && n < PROCESSES && fscanf(file, "%d", &children[n]) == 1) n++;
  if (file) (void)fclose(file);
  return n;
}

/* Kills one of the server's processes; the server ends the others and begins anew, by itself.
   The time of that is unknown, and others may have been granted something before we see it.
   True: it has such processes. */
static bool crash_of_one(void) {
  static pid_t children[PROCESSES];
  const server_kind *kind = server_kind_of(shared->dsn);
  int n = children_of(server_pid(), children);
  if (n == 0) return false;
  connect_admin();
  fault_what("one process");
  n = children_of(server_pid(), children);
  atomic_store(&fault_self->new_tokens, shared->tokens_repeat);
  atomic_store(&shared->crashed, now_ns());
  atomic_store(&fault_self->before, now_ns());
  (void)kill(children[roll_below(&fault_dice, n)], SIGKILL);
  FAULT_UNTIL(kind->ended(administrator));
  kind->close(administrator);
  connect_admin();
  atomic_store(&fault_self->lost, now_ns());
  return true;
}

/* The server's locks are gone with it, and their numbers are used again. */
void fault_crash(void) {
  if (fault_way(2) && crash_of_one()) return;
  fault_what("all of it");
  atomic_store(&shared->crashed, now_ns());
  control("kill"); /* until it has ended */
  atomic_store(&fault_self->lost, now_ns());
  fault_sleep_ms(roll_percent(&fault_dice, 50) ? 0 : roll_below(&fault_dice, 2000));
  control("start");
}

/* The parent first, so that none is born meanwhile. */
void fault_stop_server(void) {
  static pid_t children[PROCESSES];
  pid_t pid = server_pid();
  (void)kill(pid, SIGSTOP);
  int n = children_of(pid, children);
  for (int i = 0; i < n; i++) (void)kill(children[i], SIGSTOP);
  fault_sleep_ms(
      roll_below(&fault_dice, roll_percent(&fault_dice, 50) ? 500 : 3 * (int)shared->hold_timeout));
  for (int i = 0; i < n; i++) (void)kill(children[i], SIGCONT);
  (void)kill(pid, SIGCONT);
}

/* --------------------------------------------------------- by statements */

static bool all(const char *const *texts) {
  return sql_all(server_kind_of(shared->dsn), administrator, &clients, texts);
}

/* A statement may fail, as a wait took too long: then it is only taken back. */
static bool trouble_make(const trouble *t, int most_ms) {
  const server_kind *kind = server_kind_of(shared->dsn);
  fault_what(t->what);
  atomic_store(&fault_self->may, t->may);
  atomic_store(&fault_self->leases_may, t->leases_may);
  if (!all(t->begin)) {
    (void)all(t->end);
    return false;
  }
  atomic_store(&fault_self->extends, t->extends);
  if (t->shuts) fault_shut_begin();
  fault_sleep_ms(roll_below(&fault_dice, most_ms));
  if (t->shuts) fault_shut_end();
  if (t->provisions) FAULT_UNTIL(server_fill(kind, administrator, &clients));
  FAULT_UNTIL(all(t->end));
  return true;
}

static const trouble *trouble_choose(const trouble *list) {
  int n = 0;
  while (n < TROUBLES && list[n].what && !(list[n].unleased && shared->leases)) n++;
  return &list[fault_way(n)];
}

void fault_read_only(void) {
  const trouble *list = server_kind_of(shared->dsn)->read_only, *t = trouble_choose(list);
  connect_admin();
  if (!trouble_make(t, 1500) && t != list)
    (void)trouble_make(list, 1500); /* not every server knows the others */
}

void fault_alter(void) {
  connect_admin();
  (void)trouble_make(trouble_choose(server_kind_of(shared->dsn)->alter), 1500);
}

void fault_full(void) {
  connect_admin();
  (void)trouble_make(trouble_choose(server_kind_of(shared->dsn)->full), 3000);
}
