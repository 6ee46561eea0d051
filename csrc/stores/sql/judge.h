/*
 * judge.h - judges a server by its settings and its errors: does it exclude, is it to be asked
 * again? The same judge serves the stores, and programs that lock on connections of their own
 * (hierlock.attach). Any thread.
 */
#ifndef HIERLOCK_JUDGE_H
#define HIERLOCK_JUDGE_H

#include "hierlock.h"

/* Converts a level to its form in a column of type TINYINT: the levels of update rows are below
   0. */
static inline int hl__sql_level(uint8_t level) { return (int8_t)level; }

/* So many rows has the gate of a space with leases (MySQL, MariaDB). A root's gate stands in one
   of them; roots that are neighbours share it. See ../mysql/gate.c. */
#define HL__SQL_GATES 65536u
static inline unsigned hl__sql_gate(uint64_t bucket, uint64_t buckets) {
  return (unsigned)(buckets <= HL__SQL_GATES ? bucket : bucket * HL__SQL_GATES / buckets);
}

/* The facts that a MySQL or MariaDB reports about itself. Begins as zeroes. */
typedef struct hl__mysql_server {
  char version[64];
  bool mariadb;
  bool read_only; /* by any of the three variables */
  bool galera;
  bool group, group_single_primary;
  bool log_bin, statement_format;
} hl__mysql_server;

/* The variables that tell it, as a condition for SHOW GLOBAL VARIABLES: not every server
   has all. */
#define HL__MYSQL_VARIABLES                                                                        \
  "Variable_name IN ('version','read_only','super_read_only',"                                     \
  "'innodb_read_only','wsrep_on','log_bin','binlog_format',"                                       \
  "'group_replication_group_name','group_replication_single_primary_mode')"

/* Notes one of them; others are left out. */
void hl__mysql_server_note(hl__mysql_server *server, const char *name, const char *value);
/* HL_OK, or HL_EUNSAFE_SERVER: it is too old, or takes no row locks. */
int hl__mysql_version_judge(const char *version, hl_error *error);
/* HL_OK, or HL_EUNSAFE_SERVER: its version, or a lock there protects nothing. */
int hl__mysql_server_judge(const hl__mysql_server *server, hl_error *error);
/* HL_OK, or HL_EUNSAFE_SERVER: it cannot record leases. */
int hl__mysql_leases_judge(bool logs_statements, hl_error *error);
/* HL_OK; HL_EUNSAFE_SERVER: its engine locks no rows; HL_ENOT_PROVISIONED: engine is NULL, there is
   no such table. */
int hl__mysql_table_judge(bool mariadb, const char *database, const char *table, const char *engine,
                          hl_error *error);

/* The status that an error number of the server's stands for, and in *hint what a person
   could do about it, to be put behind the server's message. program: on a connection of a program's
   own, in a transaction of its own. */
#define HL__MYSQL_HINT_MAX 160
int hl__mysql_error_judge(unsigned number, const char *message, bool program, char *hint,
                          size_t size);

enum {
  HL__MYSQL_CUT = 1,    /* a statement was ended, and not its transaction */
  HL__MYSQL_DENIED = 2, /* to this account, and that lasts */
  HL__MYSQL_FULL = 4,   /* no connection is left, for a while */
  HL__MYSQL_PROGRAM = 8 /* means something on a program's own connection only */
};
/* Whether the error number has one of these traits. */
bool hl__mysql_error_is(unsigned number, unsigned traits);

/* The facts that a PostgreSQL reports about itself. */
typedef struct hl__pg_server {
  const char *version; /* version() */
  int number;          /* server_version_num */
  bool standby;        /* pg_is_in_recovery() */
  bool multiple;       /* HL__PG_MULTIPLE */
} hl__pg_server;

/* Whether it belongs to a group with several primaries, as an SQL expression. */
#define HL__PG_MULTIPLE                                                                            \
  "EXISTS(SELECT FROM pg_catalog.pg_extension WHERE extname IN "                                   \
  "('bdr','spock'))"

/* Whether there may be leases, to be evaluated behind the locks, in their statement: 2: there
   may be; 1 or 0: there are none; `unseen`: the role may not know, as the gate has no value, or
   was dropped alone. See ../postgresql/gate.c. */
#define HL__PG_GATE_NAME "pg_catalog.to_regclass('public.hier_lock_gate')"
#define HL__PG_GATE_ROWS "pg_catalog.to_regclass('public.hier_lock_lease_rows')"
#define HL__PG_GATE_VALUE(unseen)                                                                  \
  "CASE WHEN pg_catalog.pg_relation_is_updatable(1259,false) IS NULL THEN " unseen                 \
  " ELSE coalesce(pg_catalog.pg_sequence_last_value(" HL__PG_GATE_NAME                             \
  "),CASE WHEN " HL__PG_GATE_NAME " IS NULL AND " HL__PG_GATE_ROWS " IS NULL THEN 0 ELSE " unseen  \
  " END) END"

/* HL_OK, or HL_EUNSAFE_SERVER: it is too old, or a lock there protects nothing. */
int hl__pg_server_judge(const hl__pg_server *server, hl_error *error);

#endif
