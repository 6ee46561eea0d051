/*
 * judge.c - see judge.h. Knows no client library: it takes the numbers from the servers'
 * manuals, as each server has numbers that the other's header does not name.
 */
#include "judge.h"

#include "error.h"

#include <stdio.h>
#include <string.h>

/* ------------------------------------------------------------ the server */

static bool is_on(const char *value) { return strcmp(value, "ON") == 0 || strcmp(value, "1") == 0; }

void hl__mysql_server_note(hl__mysql_server *server, const char *name, const char *value) {
  if (strcmp(name, "version") == 0) {
    (void)snprintf(server->version, sizeof server->version, "%s", value);
    server->mariadb = strstr(value, "MariaDB");
  } else if (strcmp(name, "read_only") == 0) {
    /* MariaDB 11 and later also know NO_LOCK and NO_LOCK_NO_ADMIN. */
    server->read_only |= strcmp(value, "OFF") != 0 && strcmp(value, "0") != 0;
  } else if (strcmp(name, "super_read_only") == 0 || strcmp(name, "innodb_read_only") == 0) {
    server->read_only |= is_on(value);
  } else if (strcmp(name, "wsrep_on") == 0) {
    server->galera = is_on(value);
  } else if (strcmp(name, "log_bin") == 0) {
    server->log_bin = is_on(value);
  } else if (strcmp(name, "binlog_format") == 0) {
    server->statement_format = strcmp(value, "STATEMENT") == 0;
  } else if (strcmp(name, "group_replication_group_name") == 0) {
    server->group = *value;
  } else if (strcmp(name, "group_replication_single_primary_mode") == 0) {
    server->group_single_primary = is_on(value);
  }
}

int hl__mysql_version_judge(const char *version, hl_error *error) {
  int major = 0, minor = 0;
  if (strstr(version, "TiDB"))
    return hl__error(error, HL_EUNSAFE_SERVER, "TiDB (%.60s) takes no shared row locks", version);
  /* MariaDB puts this before its version, for clients of old. */
  const char *number = strncmp(version, "5.5.5-", 6) == 0 ? version + 6 : version;
  (void)sscanf(number, "%d.%d", &major, &minor);
  if (strstr(version, "MariaDB") ? major < 10 || (major == 10 && minor < 6) : major < 8)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the server is too old (%.60s): MySQL 8.0 or MariaDB 10.6 "
                     "and later are supported",
                     number);
  return HL_OK;
}

int hl__mysql_server_judge(const hl__mysql_server *server, hl_error *error) {
  int status = hl__mysql_version_judge(server->version, error);
  if (status) return status;
  if (server->read_only)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the server is read-only, a replica perhaps: locks there "
                     "protect nothing; connect to the primary");
  if (server->galera)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the server is a node of a Galera cluster: its row locks "
                     "do not hold on the other nodes");
  if (server->group && !server->group_single_primary)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the server belongs to a group with several primaries: "
                     "its row locks do not hold on the others");
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
                     "there is no table %s in database %.64s, or this account may "
                     "not see it (GRANT SELECT%s ON %.64s.%s); run `hierlock "
                     "provision`",
                     table, database, mariadb ? "" : ", UPDATE", database, table);
  if (strcmp(engine, "InnoDB") != 0)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the table %s is of engine %.32s, which locks no rows; "
                     "it must be InnoDB",
                     table, engine);
  return HL_OK;
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
    /* MariaDB with innodb_snapshot_isolation, the default from 11.6 on: the view is too old, and the
       server has rolled the transaction back */
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

#define PG_NUMBER_MIN 130000

int hl__pg_server_judge(const hl__pg_server *server, hl_error *error) {
  const char *version = server->version;
  if (strstr(version, "-YB-") || strstr(version, "CockroachDB") || strstr(version, "Redshift"))
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the server is not PostgreSQL (%.60s): its advisory locks "
                     "are other ones, or none",
                     version);
  if (server->number < PG_NUMBER_MIN)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the server is too old (%.60s): PostgreSQL 13 and later "
                     "are supported",
                     version);
  if (server->standby)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the server is a standby: locks there protect nothing; "
                     "connect to the primary (target_session_attrs=primary)");
  if (server->multiple)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the server belongs to a group with several primaries "
                     "(bdr, spock): its locks do not hold on the others");
  return HL_OK;
}
