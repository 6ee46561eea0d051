/*
 * judge.c - see judge.h. Knows no client library: it takes the numbers from the servers'
 * manuals, as each server has numbers that the other's header does not name.
 */
#include "judge.h"

#include "error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The value of the fact; "" where it is unknown. */
static const char *fact(const hl__fact *facts, const char *name) {
  for (; facts->name; facts++)
    if (strcmp(facts->name, name) == 0) return facts->value ? facts->value : "";
  return "";
}

static bool fact_is(const hl__fact *facts, const char *name, const char *value) {
  return strcmp(fact(facts, name), value) == 0;
}

static bool is_on(const hl__fact *facts, const char *name) {
  return fact_is(facts, name, "ON") || fact_is(facts, name, "1") || fact_is(facts, name, "t");
}

/* ------------------------------------------------------- MySQL and MariaDB */

bool hl__mysql_logs_statements(const hl__fact *facts) {
  return is_on(facts, "log_bin") && fact_is(facts, "binlog_format", "STATEMENT");
}

int hl__mysql_version_judge(const char *version, hl_error *error) {
  int major = 0, minor = 0;
  if (strstr(version, "TiDB"))
    return hl__error(error, HL_EUNSAFE_SERVER, "TiDB (%.60s) takes no shared row locks", version);
  /* MariaDB puts this before its version, for clients of old. */
  const char *number = strncmp(version, "5.5.5-", 6) == 0 ? version + 6 : version;
  (void)sscanf(number, "%d.%d", &major, &minor);
  if (strstr(version, "MariaDB") ? major < 10 || (major == 10 && minor < 6) : major < 8)
    return hl__error(
        error, HL_EUNSAFE_SERVER,
        "the server is too old (%.60s): MySQL 8.0 or MariaDB 10.6 and later are supported", number);
  return HL_OK;
}

int hl__mysql_leases_judge(bool logs_statements, hl_error *error) {
  if (!logs_statements) return HL_OK;
  return hl__error(error, HL_EUNSAFE_SERVER,
                   "the server logs statements (binlog_format=STATEMENT), "
                   "which leases cannot be recorded with; set it to ROW");
}

int hl__mysql_table_judge(bool mariadb, const char *database, const char *table, const char *engine,
                          hl_error *error) {
  if (!engine)
    return hl__error(error, HL_ENOT_PROVISIONED,
                     "there is no table %s in database %.64s, or this account may not see it "
                     "(GRANT SELECT%s ON %.64s.%s); run `hierlock provision`",
                     table, database, mariadb ? "" : ", UPDATE", database, table);
  if (strcmp(engine, "InnoDB") != 0)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the table %s is of engine %.32s, which locks no rows; it must be InnoDB",
                     table, engine);
  return HL_OK;
}

int hl__mysql_server_judge(const hl__fact *facts, hl_error *error) {
  const char *read_only = fact(facts, "read_only"), *table = fact(facts, "table");
  const char *engine = fact(facts, "engine"), *version = fact(facts, "version");
  int status = hl__mysql_version_judge(version, error);
  if (status) return status;
  /* MariaDB 11 and later also know NO_LOCK and NO_LOCK_NO_ADMIN. */
  if ((*read_only && strcmp(read_only, "OFF") != 0 && strcmp(read_only, "0") != 0) ||
      is_on(facts, "super_read_only") || is_on(facts, "innodb_read_only"))
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the server is read-only, a replica perhaps: locks there "
                     "protect nothing; connect to the primary");
  if (is_on(facts, "wsrep_on"))
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the server is a node of a Galera cluster: its row locks "
                     "do not hold on the other nodes");
  if (*fact(facts, "group_replication_group_name") &&
      !is_on(facts, "group_replication_single_primary_mode"))
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the server belongs to a group with several primaries: "
                     "its row locks do not hold on the others");
  if (is_on(facts, "leases"))
    status = hl__mysql_leases_judge(hl__mysql_logs_statements(facts), error);
  if (status || !*table) return status;
  return hl__mysql_table_judge(strstr(version, "MariaDB"), fact(facts, "database"), table,
                               *engine ? engine : NULL, error);
}

/* ------------------------------------------------------------ its errors */

static const struct {
  unsigned number;
  int status;
  unsigned traits;
  const char *hint;
} mysql_errors[] = {
    {1205, HL_TIMEOUT, 0, ""},             /* lock wait timeout; MariaDB: NOWAIT */
    {1969, HL_TIMEOUT, HL__MYSQL_CUT, ""}, /* MariaDB: max_statement_time */
    {3024, HL_TIMEOUT, 0, ""},             /* MySQL: max_execution_time */
    {3572, HL_TIMEOUT, 0, ""},             /* MySQL: NOWAIT */
    {1213, HL_DEADLOCK, 0, ""},
    {1317, HL_CANCELLED, HL__MYSQL_CUT, ""},                      /* KILL QUERY */
    {1146, HL_ENOT_PROVISIONED, 0, "; run `hierlock provision`"}, /* no table */
    {1290, HL_EUNSAFE_SERVER, 0, ""},             /* an option of the server: read_only */
    {1040, HL_ECONNECTION, HL__MYSQL_FULL, ""},   /* too many connections */
    {1203, HL_ECONNECTION, HL__MYSQL_FULL, ""},   /* too many connections of the user's */
    {1226, HL_ECONNECTION, HL__MYSQL_FULL, ""},   /* a limit of the account's */
    {1044, HL_ECONNECTION, HL__MYSQL_DENIED, ""}, /* access denied, to a database */
    {1045, HL_ECONNECTION, HL__MYSQL_DENIED, ""}, /* access denied */
    {1698, HL_ECONNECTION, HL__MYSQL_DENIED, /* access denied: a plugin that takes no password */
     "; where it logs in by the server's socket, say so in the DSN: "
     "?socket=/run/mysqld/mysqld.sock"},
    {1053, HL_ECONNECTION, 0, ""}, /* shutdown */
    {1077, HL_ECONNECTION, 0, ""}, /* normal shutdown: MariaDB */
    {1129, HL_ECONNECTION, 0, ""}, /* the host is blocked */
    {1130, HL_ECONNECTION, 0, ""}, /* the host may not connect */
    {1158, HL_ECONNECTION, 0, ""}, /* network: reading */
    {1159, HL_ECONNECTION, 0, ""}, /* reading took too long */
    {1160, HL_ECONNECTION, 0, ""}, /* writing */
    {1161, HL_ECONNECTION, 0, ""}, /* writing took too long */
    {1927, HL_ECONNECTION, 0, ""}, /* MariaDB: killed */
    {4031, HL_ECONNECTION, 0, ""}, /* MySQL: wait_timeout */
    /* MariaDB with innodb_snapshot_isolation, the default from 11.6 on: the view is too old, and
       the server has rolled the transaction back */
    {1020, HL_DEADLOCK, HL__MYSQL_PROGRAM, ""},
    /* no savepoint: the transaction in which it was set has ended */
    {1305, HL_ELOST, HL__MYSQL_PROGRAM, ""},
};

#define MYSQL_ERRORS (sizeof mysql_errors / sizeof *mysql_errors)

bool hl__mysql_error_is(unsigned number, unsigned traits) {
  for (size_t i = 0; i < MYSQL_ERRORS; i++)
    if (mysql_errors[i].number == number) return mysql_errors[i].traits & traits;
  return false;
}

/* MariaDB: "SELECT command denied to user 'a'@'h' for table `d`.`t`"; MySQL quotes the table in
   its own way, without the database, and calls a lock "SELECT with locking clause". The
   account's host is another one than the message has. */
static void denied_hint(const char *message, char *hint, size_t size) {
  static const char denied[] = " command denied to user ", table[] = " for table ";
  const char *end = strstr(message, denied);
  const char *on = end ? strstr(end, table) : NULL;
  if (!on) return;
  on += sizeof table - 1;
  bool locks = strncmp(message, "SELECT with lock", 16) == 0;
  size_t n = strlen(on), quoted = *on == '\'' && n > 2;
  (void)snprintf(hint, size, "; GRANT %.*s ON %.*s to it", locks ? 6 : (int)(end - message),
                 locks ? "UPDATE" : message, (int)(n - 2 * quoted), on + quoted);
}

int hl__mysql_error_judge(unsigned number, const char *message, bool program, char *hint,
                          size_t size) {
  *hint = '\0';
  if (number == 1142) denied_hint(message, hint, size); /* a table's privileges */
  for (size_t i = 0; i < MYSQL_ERRORS; i++)
    if (mysql_errors[i].number == number &&
        (program || mysql_errors[i].traits != HL__MYSQL_PROGRAM)) {
      if (*mysql_errors[i].hint) (void)snprintf(hint, size, "%s", mysql_errors[i].hint);
      return mysql_errors[i].status;
    }
  return HL_ESTORE;
}

/* ------------------------------------------------------------ PostgreSQL */

#define PG_OLDEST 13

int hl__pg_denied(int status, hl_error *error) {
  if (error) memcpy(error->sqlstate, "42501", sizeof error->sqlstate);
  return status;
}

int hl__pg_server_judge(const hl__fact *facts, hl_error *error) {
  const char *version = fact(facts, "version");
  const char *number = version + strcspn(version, "0123456789");
  if (strstr(version, "-YB-") || strstr(version, "CockroachDB") || strstr(version, "Redshift"))
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the server is not PostgreSQL (%.60s): its advisory locks "
                     "are other ones, or none",
                     version);
  if (strtol(number, NULL, 10) < PG_OLDEST)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the server is too old (%.60s): PostgreSQL 13 and later are supported",
                     version);
  if (is_on(facts, "standby"))
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the server is a standby: locks there protect nothing; "
                     "connect to the primary (target_session_attrs=primary)");
  if (is_on(facts, "multiple"))
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the server belongs to a group with several primaries "
                     "(bdr, spock): its locks do not hold on the others");
  /* If an administrator has made a sequence for tokens, all programs must use it. */
  if (*fact(facts, "sequence") && !is_on(facts, "sequence_usable"))
    return hl__pg_denied(hl__error(error, HL_ESTORE,
                                   "there is a sequence public.hier_lock_token, and no privilege "
                                   "to use it: GRANT USAGE ON SEQUENCE public.hier_lock_token"),
                         error);
  if (fact_is(facts, "gate", "m"))
    return hl__error(error, HL_ENOT_PROVISIONED,
                     "the sequence public.hier_lock_gate is missing, but "
                     "public.hier_lock_lease_rows is there: hierlock provision --leases mends it");
  if (fact_is(facts, "gate", "u"))
    return hl__pg_denied(hl__error(error, HL_ENOT_PROVISIONED,
                                   "there are leases in this database, and no privilege to see "
                                   "them: GRANT SELECT ON SEQUENCE public.hier_lock_gate, and "
                                   "SELECT, DELETE, UPDATE ON public.hier_lock_leases, "
                                   "public.hier_lock_lease_rows"),
                         error);
  return HL_OK;
}

/* -------------------------------------------------- Redis and Memcached */

/* TIME in scripts that write, HSET of many fields, SET PX: 6.2 is the oldest that is tried. */
#define REDIS_OLDEST 602

int hl__redis_server_judge(const hl__fact *facts, hl_error *error) {
  const char *version = fact(facts, "redis_version"), *policy = fact(facts, "maxmemory_policy");
  unsigned major = 0, minor = 0;
  if (sscanf(version, "%u.%u", &major, &minor) != 2 || major * 100 + minor < REDIS_OLDEST)
    return hl__error(error, HL_EUNSAFE_SERVER, "the server is Redis %s; 6.2 or later is needed",
                     version);
  if (!fact_is(facts, "role", "master"))
    return hl__error(error, HL_EUNSAFE_SERVER, "the server is a replica: connect to its master");
  if (strcmp(policy, "noeviction") != 0)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the server may evict locks when its memory is full (maxmemory-policy %s): "
                     "CONFIG SET maxmemory-policy noeviction",
                     policy);
  return HL_OK;
}

int hl__memcached_server_judge(const hl__fact *facts, hl_error *error) {
  const char *at = fact(facts, "at");
  unsigned major = 0, minor = 0;
  if (sscanf(fact(facts, "version"), "%u.%u", &major, &minor) != 2)
    return hl__error(error, HL_EUNSAFE_SERVER, "what answers at %s is no Memcached", at);
  if (major * 100 + minor < 106)
    return hl__error(error, HL_EUNSAFE_SERVER, "memcached at %s is %u.%u; 1.6 or later is needed",
                     at, major, minor);
  if (fact_is(facts, "cas_enabled", "no"))
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "memcached at %s cannot compare and swap (option -C)", at);
  return HL_OK;
}
