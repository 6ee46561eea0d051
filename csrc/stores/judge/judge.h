/*
 * judge.h - judges a server by its settings and its errors: does it exclude, is it to be asked
 * again? The same judge serves the stores, programs that lock on connections of their own
 * (hierlock.attach), and `hierlock doctor`. Any thread.
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

/* What a server says of itself: names and values, up to a name that is NULL. A value that is NULL,
   or absent, is unknown, and speaks for the server. A boolean is ON, 1 or t. */
typedef struct hl__fact {
  const char *name, *value;
} hl__fact;
#define HL__FACTS_MAX 16 /* without the end */

/* Whether a lock there protects something: HL_OK, or HL_EUNSAFE_SERVER; other statuses are said.

   MySQL and MariaDB: HL__MYSQL_VARIABLES; `leases`: whether it is to record them; `database`,
   `table`, `engine`: as hl__mysql_table_judge. */
int hl__mysql_server_judge(const hl__fact *facts, hl_error *error);
/* PostgreSQL: `version` (of version(), or the greeting's), `standby`, `multiple`
   (HL__PG_MULTIPLE); `sequence`, `sequence_usable`: whether there is one for tokens, and the role
   may use it (HL_ESTORE); `gate`: m, where it is missing and leases are there, u, where the role
   may not read it (HL_ENOT_PROVISIONED). */
int hl__pg_server_judge(const hl__fact *facts, hl_error *error);
/* Redis and Valkey: `redis_version`, `role`, `maxmemory_policy`, of INFO. */
int hl__redis_server_judge(const hl__fact *facts, hl_error *error);
/* Memcached: `at`, for the message; `version`; `cas_enabled`. */
int hl__memcached_server_judge(const hl__fact *facts, hl_error *error);

/* The variables that tell it, as a condition for SHOW GLOBAL VARIABLES: not every server
   has all. */
#define HL__MYSQL_VARIABLES                                                                        \
  "Variable_name IN ('version','read_only','super_read_only',"                                     \
  "'innodb_read_only','wsrep_on','log_bin','binlog_format',"                                       \
  "'group_replication_group_name','group_replication_single_primary_mode')"

/* HL_OK, or HL_EUNSAFE_SERVER: it is too old, or takes no row locks. */
int hl__mysql_version_judge(const char *version, hl_error *error);
/* Whether the binary log gets statements. */
bool hl__mysql_logs_statements(const hl__fact *facts);
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

/* Gives *error the SQLSTATE of a missing privilege, which a catalog has shown. Returns status. */
int hl__pg_denied(int status, hl_error *error);
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

#endif
