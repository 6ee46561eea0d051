/*
 * servers.h - what soak and faults need of a server as its administrators: one interface, and one file for each
 * client library. Whoever uses it knows neither library, and asks no server what it is: what differs stands in a
 * server_kind, as functions and as statements.
 *
 *   servers.c      finds the kind of a DSN; fills statements in, runs several
 *   mysql.c        libmysqlclient and MariaDB Connector/C: MySQL, MariaDB
 *   postgresql.c   libpq: PostgreSQL
 *
 * In a statement, {database} and {user} stand for those of the clients, which are under test; {seed} for a number;
 * {buckets} for sql_buckets.
 */
#ifndef SERVERS_H
#define SERVERS_H

#include "hierlock.h"

#include "dsn.h"
#include "store.h"

typedef struct sql sql; /* a connection */

/* The fields of a row, as texts; NULL where one is NULL. */
typedef void row_fn(void *context, const char *const *fields);

enum { STATEMENTS = 6 };

/* A trouble that an administrator makes and takes back. */
typedef struct trouble {
  const char *what;
  const char *begin[STATEMENTS], *end[STATEMENTS]; /* NULL behind the last */
  bool provisions; /* before its end, the table of the locks is filled again */
  bool shuts;      /* nothing is granted from its beginning to its end, */
  bool extends;    /* but the first extend of each transaction that is open */
  bool unleased;   /* not in a space with leases: seen late there. The last of a list */
  unsigned
      may; /* STATUS_BIT: what a call may come to by it, beside a time-out and a failed connection */
  unsigned leases_may; /* the same, of leases */
} trouble;

#define STATUS_BIT(status) (1u << ((status) + 10))

enum { TROUBLES = 8 };

typedef struct server_kind {
  const char *name;
  const struct hl_store_ops *store;
  bool buckets; /* the store's rows are hash buckets: nodes may share one */

  /* ---- the client library */

  /* Connects to a database of the clients, NULL: to the DSN's; within so many seconds.
     impatient: no statement takes more than a second. Without a limit of the server's on its
     silence. NULL: it could not. */
  sql *(*connect)(const hl_dsn *dsn, const char *database, int seconds, bool impatient);
  void (*close)(sql *self); /* NULL is fine */
  /* Runs a statement; fn, if it is not NULL, is called for each row. False: it failed. */
  bool (*run)(sql *self, const char *text, row_fn *fn, void *context);
  /* Rows that the last statement has found and changed. */
  int (*changed)(const sql *self);
  const char *(*error)(const sql *self);
  /* Whether the server has ended it, without asking. */
  bool (*ended)(sql *self);

  /* ---- what the clients' DSN has behind its ? */

  const char *plain, *secure; /* without TLS, with it */
  const char *soak;           /* without, with soak's table of locks */

  /* ---- statements */

  /* Makes the table of the locks in a database and fills it, where there is such a table.
     Existing rows stay. variant: the store has tokens of another source, where it has two.
     leases: the space has them; user: may use them. */
  bool (*provision)(sql *self, const char *database, const char *table, int buckets, bool variant,
                    bool leases, const char *user);
  /* Soak's space, of both kinds. */
  const char *space_drop[STATEMENTS];
  const char *database_make[STATEMENTS], *database_drop[STATEMENTS];
  /* Soak's table of counters: its name, and the type of a number of 64 bits. */
  const char *rows_table, *number;
  /* Limits that soon end what a cut network has left behind. */
  trouble limits;
  /* Find a client that does not come by the proxy, chosen by the seed; and one that is busy. And
     what ends its connection or its statement. */
  const char *victim, *victim_busy, *kill, *interrupt;
  /* Count the connections of clients; and the transactions with locks, of all accounts. */
  const char *connections, *transactions;
  /* For people: who is there. */
  const char *show[STATEMENTS];
  /* The large faults of soak; NULL behind the last `what`. */
  trouble read_only[TROUBLES], alter[TROUBLES], full[TROUBLES];
} server_kind;

extern const server_kind server_mysql, server_postgresql;

/* NULL: it is no server's. */
const server_kind *server_kind_of(const char *dsn);

/* Where there is a table of buckets, its name in soak's space: another one where that has leases. */
extern const char *sql_buckets;

/* ---- servers.c. In all of them, clients: who they are. */

/* Takes apart; false, with a message: it is none. */
bool server_dsn(const server_kind *kind, const char *text, hl_dsn *dsn);
/* Runs a statement, filled in. */
bool sql_run(const server_kind *kind, sql *self, const hl_dsn *clients, const char *text);
/* All, up to the first that fails. */
bool sql_all(const server_kind *kind, sql *self, const hl_dsn *clients, const char *const *texts);
/* The number in the first field of the first row; -1: no row. */
long long sql_number(const server_kind *kind, sql *self, const hl_dsn *clients, unsigned seed,
                     const char *text);

#endif
