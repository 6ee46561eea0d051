/*
 * server.c - does this server exclude, and is its table the right one? A lock on
 * a replica, in a multi-primary cluster or on a table of another engine succeeds
 * and protects nothing; so it is refused here, on every new connection: after a
 * fail-over the next one may lead to another server.
 */
#include "mysql_store.h"

#include <mysqld_error.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* What is asked of SHOW GLOBAL VARIABLES: not every server has all. */
typedef struct server {
  char version[64];
  bool read_only, super_read_only, innodb_read_only;
  bool galera;
  bool group, group_single_primary;
} server;

/* A connection's number means something only to the server that gave it, and only
   until that ends: then it counts from one again. So it is remembered with the
   server's name and the second at which it was started. Both servers count Uptime
   by the clock that NOW() shows, so the difference stays the same even when the
   clock is set. No session is used within the second of the server's start (see
   tokens_wait), so no two lives begin in the same second. */
int hl__mysql_identify(hl__mysql_session *session, hl_error *error) {
  static const char mysql[] =
      "SELECT CONCAT_WS(' ',UNIX_TIMESTAMP()-CAST(VARIABLE_VALUE AS SIGNED),"
      "@@server_uuid,@@hostname,@@port) "
      "FROM performance_schema.global_status WHERE VARIABLE_NAME='Uptime'";
  static const char mariadb[] =
      "SELECT CONCAT_WS(' ',UNIX_TIMESTAMP()-CAST(VARIABLE_VALUE AS SIGNED),"
      "@@server_id,@@hostname,@@port) "
      "FROM information_schema.GLOBAL_STATUS WHERE VARIABLE_NAME='UPTIME'";
  bool is_mariadb = session->dialect == HL_MARIADB;
  MYSQL_RES *result;
  int status = hl__mysql_query(session, is_mariadb ? mariadb : mysql,
                               is_mariadb ? sizeof mariadb - 1 : sizeof mysql - 1,
                               &result, error);
  if (status) return status;
  MYSQL_ROW row = result ? mysql_fetch_row(result) : NULL;
  session->id = mysql_thread_id(session->mysql);
  (void)snprintf(session->server, sizeof session->server, "%s",
                 row && row[0] ? row[0] : "");
  mysql_free_result(result);
  return HL_OK;
}

static bool is_on(const char *value) {
  return strcmp(value, "ON") == 0 || strcmp(value, "1") == 0;
}

static int server_ask(hl__mysql_session *session, server *found,
                      hl_error *error) {
  static const char sql[] =
      "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version','read_only',"
      "'super_read_only','innodb_read_only','wsrep_on',"
      "'group_replication_group_name','group_replication_single_primary_mode')";
  MYSQL_RES *result;
  MYSQL_ROW row;
  memset(found, 0, sizeof *found);
  int status = hl__mysql_query(session, sql, sizeof sql - 1, &result, error);
  if (status) return status;
  while (result && (row = mysql_fetch_row(result))) {
    const char *name = row[0], *value = row[1] ? row[1] : "";
    if (strcmp(name, "version") == 0)
      (void)snprintf(found->version, sizeof found->version, "%s", value);
    else if (strcmp(name, "read_only") == 0)
      /* MariaDB 11 and later also know NO_LOCK and NO_LOCK_NO_ADMIN. */
      found->read_only = strcmp(value, "OFF") != 0 && strcmp(value, "0") != 0;
    else if (strcmp(name, "super_read_only") == 0)
      found->super_read_only = is_on(value);
    else if (strcmp(name, "innodb_read_only") == 0)
      found->innodb_read_only = is_on(value);
    else if (strcmp(name, "wsrep_on") == 0)
      found->galera = is_on(value);
    else if (strcmp(name, "group_replication_group_name") == 0)
      found->group = *value;
    else if (strcmp(name, "group_replication_single_primary_mode") == 0)
      found->group_single_primary = is_on(value);
  }
  mysql_free_result(result);
  return HL_OK;
}

static int version_refuse(const hl__mysql_session *session,
                          const char *version, hl_error *error) {
  int major = 0, minor = 0;
  if (strstr(version, "TiDB"))
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "TiDB (%.60s) takes no shared row locks", version);
  /* MariaDB puts this before its version, for clients of old. */
  const char *number =
      strncmp(version, "5.5.5-", 6) == 0 ? version + 6 : version;
  (void)sscanf(number, "%d.%d", &major, &minor);
  bool mariadb = session->dialect == HL_MARIADB;
  if (mariadb ? major < 10 || (major == 10 && minor < 6) : major < 8)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the server is too old (%.60s): MySQL 8.0 or MariaDB 10.6 "
                     "and later are supported",
                     number);
  return HL_OK;
}

static int server_refuse(const server *found, hl_error *error) {
  if (found->read_only || found->super_read_only || found->innodb_read_only)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the server is read-only, a replica perhaps: locks there "
                     "protect nothing; connect to the primary");
  if (found->galera)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the server is a node of a Galera cluster: its row locks "
                     "do not hold on the other nodes");
  if (found->group && !found->group_single_primary)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the server belongs to a group with several primaries: "
                     "its row locks do not hold on the others");
  return HL_OK;
}

/* A proxy may send a locking SELECT to a replica, or two statements of one
   transaction to two servers. ProxySQL answers the text SELECT CONNECTION_ID(),
   and no other, by itself, with the number of its greeting (handler of COM_QUERY in
   its MySQL_Session.cpp); so it is asked in other words. */
static int proxy_refuse(hl__mysql_session *session, hl_error *error) {
  MYSQL_RES *result;
  static const char sql[] = "SELECT 0+CONNECTION_ID()";
  int status = hl__mysql_query(session, sql, sizeof sql - 1, &result, error);
  if (status) return status;
  MYSQL_ROW row = mysql_fetch_row(result);
  bool same = row && row[0] &&
              strtoul(row[0], NULL, 10) == mysql_thread_id(session->mysql);
  mysql_free_result(result);
  if (same) return HL_OK;
  return hl__error(error, HL_EUNSAFE_SERVER,
                   "a proxy stands before the server, and may send locks "
                   "elsewhere: connect to the server itself");
}

/* Rows of any engine but InnoDB are not locked at all. */
static int table_check(hl__mysql_session *session, hl_error *error) {
  const char *table = session->store->table;
  char sql[256];
  MYSQL_RES *result;
  int n = snprintf(sql, sizeof sql,
                   "SELECT DATABASE(),(SELECT ENGINE FROM "
                   "information_schema.TABLES WHERE TABLE_SCHEMA=DATABASE() "
                   "AND TABLE_NAME='%s' AND TABLE_TYPE='BASE TABLE')",
                   table);
  int status = hl__mysql_query(session, sql, (size_t)n, &result, error);
  if (status) return status;
  MYSQL_ROW row = mysql_fetch_row(result);
  if (!row || !row[0])
    status = hl__error(error, HL_EDSN, "the DSN names no database");
  else if (!row[1])
    status = hl__error(error, HL_ENOT_PROVISIONED,
                       "there is no table %s in database %.64s (or no "
                       "privilege to see it); run `hierlock provision`",
                       table, row[0]);
  else if (strcmp(row[1], "InnoDB") != 0)
    status = hl__error(error, HL_EUNSAFE_SERVER,
                       "the table %s is of engine %.32s, which locks no rows; "
                       "it must be InnoDB",
                       table, row[1]);
  mysql_free_result(result);
  return status;
}

/* Compares with what the table was provisioned for; without a record, with the
   defaults, so that tables made by others keep working. */
static int layout_check(hl__mysql_session *session, hl_error *error) {
  const hl_layout *layout = session->store->config->layout;
  char sql[256];
  char levels[HL_LEVELS_MAX * (HL_LEVEL_NAME_MAX + 1)] = "";
  MYSQL_RES *result = NULL;
  int n = snprintf(sql, sizeof sql,
                   "SELECT buckets,levels FROM hier_lock_meta WHERE "
                   "table_name='%s'",
                   session->store->table);
  int status = hl__mysql_query(session, sql, (size_t)n, &result, error);
  if (status == HL_ENOT_PROVISIONED) status = HL_OK; /* no such table */
  if (status) return status;
  MYSQL_ROW row = result ? mysql_fetch_row(result) : NULL;
  bool recorded = row && row[0] && row[1];
  unsigned long buckets =
      recorded ? strtoul(row[0], NULL, 10) : HL_BUCKETS_DEFAULT;
  const char *recorded_levels = recorded ? row[1] : "user,account,resource";
  for (unsigned i = 0; i < hl_layout_levels(layout); i++) {
    if (i) strcat(levels, ",");
    strcat(levels, hl_layout_name(layout, i));
  }
  if (buckets != hl_layout_buckets(layout) ||
      strcmp(recorded_levels, levels) != 0)
    status = hl__error(
        error, HL_EMISMATCH,
        "the table %s has %lu buckets for each of the levels %.80s%s; this "
        "program wants %u for %.80s",
        session->store->table, buckets, recorded_levels,
        recorded ? "" : " (the defaults: hier_lock_meta does not say)",
        hl_layout_buckets(layout), levels);
  if (result) mysql_free_result(result);
  return status;
}

/* All that the server's administrator may have changed and that we rely on.
   After `wait_timeout` of silence the server frees our locks: the lease. */
static int session_set(hl__mysql_session *session, hl_error *error) {
  const hl_store_config *config = session->store->config;
  char sql[768], limits[160];
  MYSQL_RES *result;
  static const char isolation[] =
      "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE";
  int status =
      hl__mysql_query(session, isolation, sizeof isolation - 1, &result, error);
  if (status) return status;
  /* As statement.c will want it for a wait of the usual length. */
  session->wait = 1 + (config->timeout > HL__MYSQL_WAIT_MAX ? HL__MYSQL_WAIT_MAX
                                                            : config->timeout);
  (void)hl__mysql_limits(session, session->wait, limits, sizeof limits);
  int64_t lease = (config->hold_timeout + 999) / 1000;
  int n = snprintf(sql, sizeof sql,
                   "SET SESSION autocommit=0,completion_type=0,"
                   "sql_select_limit=18446744073709551615,"
                   "sql_big_selects=1,wait_timeout=%lld,"
                   "%s%s",
                   (long long)lease, limits,
                   session->dialect == HL_MARIADB
                       ? ",idle_transaction_timeout=0,"
                         "idle_readonly_transaction_timeout=0,"
                         "idle_write_transaction_timeout=0"
                       : "");
  return hl__mysql_query(session, sql, (size_t)n, &result, error);
}

/* Tokens begin with the second of the server's start. One that was killed and
   started again within a second would give the same ones again; so no session is
   used before the second after the start. */
static int tokens_wait(hl__mysql_session *session, hl_error *error) {
  static const char uptime[] = "SHOW GLOBAL STATUS LIKE 'Uptime'";
  MYSQL_RES *result;
  for (;;) {
    int status =
        hl__mysql_query(session, uptime, sizeof uptime - 1, &result, error);
    if (status) return status;
    MYSQL_ROW row = result ? mysql_fetch_row(result) : NULL;
    bool young = row && row[1] && strcmp(row[1], "0") == 0;
    mysql_free_result(result);
    if (!young) return HL_OK;
    const struct timespec moment = {.tv_nsec = 50000000};
    (void)nanosleep(&moment, NULL);
  }
}

/* Looking began a transaction, and the server's defaults may have begun one
   before: neither may be the first lock's. */
static int session_begin(hl__mysql_session *session, hl_error *error) {
  MYSQL_RES *result;
  return hl__mysql_query(session, "ROLLBACK", 8, &result, error);
}

int hl__mysql_verify_server(hl__mysql_session *session, hl_error *error) {
  server found;
  int status = server_ask(session, &found, error);
  if (status == HL_OK) status = version_refuse(session, found.version, error);
  if (status == HL_OK) status = server_refuse(&found, error);
  if (status == HL_OK) status = proxy_refuse(session, error);
  return status;
}

int hl__mysql_verify(hl__mysql_session *session, hl_error *error) {
  /* By its greeting, as an old one would not understand what is asked next; and
     later by what it says itself, as a proxy may have greeted us. */
  int status =
      version_refuse(session, mysql_get_server_info(session->mysql), error);
  if (status == HL_OK) status = session_set(session, error);
  if (status == HL_OK) status = hl__mysql_verify_server(session, error);
  if (status == HL_OK) status = table_check(session, error);
  if (status == HL_OK) status = layout_check(session, error);
  if (status == HL_OK) status = tokens_wait(session, error);
  if (status == HL_OK) status = session_begin(session, error);
  return status;
}
