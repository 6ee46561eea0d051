/*
 * server.c - an administrator's connection to the server, in the main process. spec/servers has
 * the differences between servers.
 */
#include "soak.h"

#include "provision.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const server_kind *kind;
static sql *administrator;
static hl_dsn admin_dsn, clients;

static void must(bool did, const char *what) {
  if (did) return;
  (void)fprintf(stderr, "soak: %s: %s\n", what, kind->error(administrator));
  exit(2);
}

static void query(const char *text) { must(sql_run(kind, administrator, &clients, text), text); }

static void limits_set(void) {
  must(sql_all(kind, administrator, &clients, kind->limits.begin), "set limits");
}

void server_restore(void) {
  must(sql_all(kind, administrator, &clients, kind->limits.end), "restore limits");
}

static sql *connect_admin(void) { return kind->connect(&admin_dsn, clients.database, 10, false); }

/* The bystanders' numbers are as low as the workers' were, before a crash: a kill that is meant
   for a session of that time hits one of them, or a worker. */
enum { BYSTANDERS = 12 };
static sql *bystanders[BYSTANDERS];

static void bystanders_open(void) {
  for (int i = 0; i < BYSTANDERS; i++) {
    kind->close(bystanders[i]);
    bystanders[i] = connect_admin();
  }
}

int server_bystanders_lost(void) {
  int lost = 0;
  for (int i = 0; i < BYSTANDERS; i++) {
    if (!bystanders[i] || !kind->ended(bystanders[i])) continue;
    kind->close(bystanders[i]);
    bystanders[i] = NULL;
    lost++;
  }
  return lost;
}

void server_table(void) { sql_buckets = shared->leases ? SOAK_TABLE "_nodes" : SOAK_TABLE; }

int server_open(void) {
  kind = server_kind_of(shared->dsn);
  server_table();
  if (!server_dsn(kind, shared->dsn, &clients) || !server_dsn(kind, shared->admin_dsn, &admin_dsn))
    return 2;
  administrator = connect_admin();
  if (!administrator) {
    (void)fprintf(stderr, "soak: cannot connect as an administrator\n");
    return 2;
  }
  limits_set();
  bystanders_open();
  return 0;
}

bool server_open_again(void) {
  sql *fresh = connect_admin();
  if (!fresh) return false;
  kind->close(administrator);
  administrator = fresh;
  limits_set();
  bystanders_open();
  return true;
}

static void rows_make(void) {
  static char text[64 * 1024];
  char sql_text[512];
  (void)snprintf(sql_text, sizeof sql_text, "DROP TABLE IF EXISTS %s", kind->rows_table);
  query(sql_text);
  (void)snprintf(sql_text, sizeof sql_text,
                 "CREATE TABLE %s (node INT NOT NULL PRIMARY KEY, fence %s NOT NULL DEFAULT 0,"
                 " counter %s NOT NULL DEFAULT 0, elements %s NOT NULL DEFAULT 0)",
                 kind->rows_table, kind->number, kind->number, kind->number);
  query(sql_text);
  int used = snprintf(text, sizeof text, "INSERT INTO %s (node) VALUES (0)", shared->rows_table);
  for (int node = 1; node < NODES; node++)
    used += snprintf(text + used, sizeof text - (size_t)used, ",(%d)", node);
  must(kind->run(administrator, text, NULL, NULL), "INSERT");
}

bool server_fill(const server_kind *store, sql *self, const hl_dsn *users) {
  return store->provision(self, users->database, SOAK_TABLE, BUCKETS, shared->seed % 2,
                          shared->leases, users->user);
}

void server_provision(void) {
  const char *name = strstr(kind->rows_table, "{database}");
  (void)snprintf(shared->rows_table, sizeof shared->rows_table, "%s%s",
                 name ? clients.database : "",
                 name ? name + strlen("{database}") : kind->rows_table);
  shared->buckets = kind->buckets;
  shared->tokens_repeat = shared->seed % 2; /* of a sequence, after the crash of a process */
  rows_make();
  must(sql_all(kind, administrator, &clients, kind->space_drop), "drop the space");
  must(server_fill(kind, administrator, &clients), "provision");
}

bool server_kill(dice *d, bool only_query) {
  char text[100];
  long long id = sql_number(kind, administrator, &clients, (unsigned)roll_below(d, 1 << 30),
                            only_query ? kind->victim_busy : kind->victim);
  if (id < 0) return false;
  (void)snprintf(text, sizeof text, only_query ? kind->interrupt : kind->kill, id);
  return kind->run(administrator, text, NULL, NULL);
}

/* Seen first, then written: the connection has one result at a time. */
static bool begins_anew[NODES];

static void row_look(void *context, const char *const *fields) {
  int node = atoi(fields[0]);
  (void)context;
  begins_anew[node] = !row_seen(node, strtoull(fields[1], NULL, 10), strtoull(fields[2], NULL, 10));
}

void server_rows(void) {
  char text[256];
  memset(begins_anew, 0, sizeof begins_anew);
  (void)snprintf(text, sizeof text, "SELECT node, counter, elements FROM %s", shared->rows_table);
  if (!kind->run(administrator, text, row_look, NULL)) return;
  for (int node = 0; node < NODES; node++) {
    if (!begins_anew[node]) continue;
    (void)snprintf(text, sizeof text,
                   "UPDATE %s SET fence = fence + 1, counter = 0, elements = 0 WHERE node = %d",
                   shared->rows_table, node);
    if (kind->run(administrator, text, NULL, NULL)) row_begun_again(node);
  }
}

int server_transactions(void) {
  return (int)sql_number(kind, administrator, &clients, 0, kind->transactions);
}

int server_connections(void) {
  return (int)sql_number(kind, administrator, &clients, 0, kind->connections);
}

static void show_row(void *context, const char *const *fields) {
  (void)context;
  (void)printf("             %s\n", fields[0]);
}

void server_show(void) {
  for (int i = 0; i < STATEMENTS && kind->show[i]; i++)
    (void)kind->run(administrator, kind->show[i], show_row, NULL);
}
