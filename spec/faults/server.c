/*
 * server.c - an administrator's connection to the server: one database for each lane, so that a
 * lane sees its own client's leftovers. Each process has a connection of its own. spec/servers
 * has the differences between servers.
 */
#include "faults.h"

#include "servers.h"

#include <stdio.h>
#include <stdlib.h>

static const server_kind *kind;
static sql *administrator;

static void must(bool did) {
  if (did) return;
  (void)fprintf(stderr, "faults: %s\n", kind->error(administrator));
  exit(2);
}

static sql *log_in(const char *admin, const char *database) {
  hl_dsn dsn;
  kind = server_kind_of(admin);
  if (!server_dsn(kind, admin, &dsn)) exit(2);
  sql *connection = kind->connect(&dsn, database, 10, false);
  hl_dsn_dispose(&dsn);
  if (connection) return connection;
  (void)fprintf(stderr, "faults: cannot connect as an administrator\n");
  exit(2);
}

void server_connect(const char *admin) { administrator = log_in(admin, NULL); }

/* The account of a lane's clients. */
static hl_dsn clients_of(int lane, const char *user, char name[64]) {
  (void)snprintf(name, 64, DATABASE, (int)shared->pid, lane);
  return (hl_dsn){.database = name, .user = user};
}

void server_provision(const char *admin, int lane) {
  char name[64];
  hl_dsn clients = clients_of(lane, shared->user, name);
  must(sql_all(kind, administrator, &clients, kind->database_make));
  sql *inside = log_in(admin, name);
  must(kind->provision(inside, name, TABLE, BUCKETS, shared->seed % 2, shared->with_leases,
                       shared->user));
  kind->close(inside);
}

void server_remove(int lane) {
  char name[64];
  hl_dsn clients = clients_of(lane, shared->user, name);
  must(sql_all(kind, administrator, &clients, kind->database_drop));
}

static int number(const hl_dsn *clients, const char *text) {
  long long n = sql_number(kind, administrator, clients, 0, text);
  must(n >= 0);
  return (int)n;
}

int server_connections(int lane) {
  char name[64];
  hl_dsn clients = clients_of(lane, shared->user, name);
  return number(&clients, kind->connections);
}

int server_transactions(void) { return number(NULL, kind->transactions); }
