/*
 * server.c - does this server exclude, and is its table the right one? A lock on
 * a replica, in a multi-primary cluster or on a table of another engine succeeds
 * and protects nothing; so it is refused here, on every new connection: after a
 * fail-over the next one may lead to another server.
 */
#include "mysql_store.h"

#include "layout.h"

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
  bool log_bin, statement_log;
} server;

static bool is_on(const char *value) {
  return strcmp(value, "ON") == 0 || strcmp(value, "1") == 0;
}

static const char variables_sql[] =
    "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version','read_only',"
    "'super_read_only','innodb_read_only','wsrep_on','log_bin','binlog_format',"
    "'group_replication_group_name','group_replication_single_primary_mode')";

static void variables_read(MYSQL_RES *result, server *found) {
  MYSQL_ROW row;
  memset(found, 0, sizeof *found);
  while ((row = mysql_fetch_row(result))) {
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
    else if (strcmp(name, "log_bin") == 0)
      found->log_bin = is_on(value);
    else if (strcmp(name, "binlog_format") == 0)
      found->statement_log = strcmp(value, "STATEMENT") == 0;
    else if (strcmp(name, "group_replication_group_name") == 0)
      found->group = *value;
    else if (strcmp(name, "group_replication_single_primary_mode") == 0)
      found->group_single_primary = is_on(value);
  }
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
static const char connection_sql[] = "SELECT 0+CONNECTION_ID()";

static int proxy_refuse(const hl__mysql_session *session, MYSQL_RES *result,
                        hl_error *error) {
  MYSQL_ROW row = mysql_fetch_row(result);
  if (row && row[0] &&
      strtoul(row[0], NULL, 10) == mysql_thread_id(session->mysql))
    return HL_OK;
  return hl__error(error, HL_EUNSAFE_SERVER,
                   "a proxy stands before the server, and may send locks "
                   "elsewhere: connect to the server itself");
}

/* It has a limit of its own: the session's may be that of a very short wait. */
int hl__mysql_table_sql(const hl__mysql_session *session, char *out,
                        size_t size) {
  bool mariadb = session->dialect == HL_MARIADB;
  return snprintf(out, size,
                  "%sSELECT%s DATABASE(),(SELECT ENGINE FROM "
                  "information_schema.TABLES WHERE TABLE_SCHEMA=DATABASE() "
                  "AND TABLE_NAME='%s' AND TABLE_TYPE='BASE TABLE')",
                  mariadb ? "SET STATEMENT max_statement_time=1 FOR " : "",
                  mariadb ? "" : " /*+ MAX_EXECUTION_TIME(1000) */",
                  session->store->table);
}

/* Rows of any engine but InnoDB are not locked at all. */
int hl__mysql_table_refuse(hl__mysql_session *session, MYSQL_RES *result,
                           hl_error *error) {
  const char *table = session->store->table;
  MYSQL_ROW row = mysql_fetch_row(result);
  if (!row || !row[0])
    return hl__error(error, HL_EDSN, "the DSN names no database");
  if (!row[1])
    return hl__error(error, HL_ENOT_PROVISIONED,
                     "there is no table %s in database %.64s (or no "
                     "privilege to see it); run `hierlock provision`",
                     table, row[0]);
  if (strcmp(row[1], "InnoDB") != 0)
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "the table %s is of engine %.32s, which locks no rows; "
                     "it must be InnoDB",
                     table, row[1]);
  session->looked = hl__lease_ms();
  return HL_OK;
}

int hl__mysql_table_check(hl__mysql_session *session, hl_error *error) {
  char sql[HL__MYSQL_TABLE_SQL];
  MYSQL_RES *result;
  int n = hl__mysql_table_sql(session, sql, sizeof sql);
  int status = hl__mysql_query(session, sql, (size_t)n, &result, error);
  if (status) return status;
  status = hl__mysql_table_refuse(session, result, error);
  mysql_free_result(result);
  return status;
}

/* Last of all, as there may be no such table. */
static int layout_sql(const hl__mysql_session *session, char *out,
                      size_t size) {
  return snprintf(out, size,
                  "SELECT buckets,levels FROM hier_lock_meta WHERE "
                  "table_name='%s'",
                  session->store->table);
}

/* Compares with what the table was provisioned for; without a record, with the
   defaults, so that tables made by others keep working. result: NULL where there
   is no hier_lock_meta. The first session settles what the program has left open;
   nobody else has the store then. */
static int layout_refuse(const hl__mysql_session *session, MYSQL_RES *result,
                         hl_error *error) {
  hl__mysql_store *store = session->store;
  char space[200];
  hl_layout *agreed;
  MYSQL_ROW row = result ? mysql_fetch_row(result) : NULL;
  bool recorded = row && row[0] && row[1];
  (void)snprintf(space, sizeof space, "the table %s%s", store->table,
                 recorded ? "" : " (as hier_lock_meta does not say)");
  int status = hl__layout_agree(
      store->base.layout ? store->base.layout : store->config->layout,
      recorded ? row[1] : "user,account,resource",
      recorded ? (uint32_t)strtoul(row[0], NULL, 10) : HL_BUCKETS_DEFAULT,
      space, "name another table (?table=), made by `hierlock provision`",
      &agreed, error);
  if (status) return status;
  if (store->base.layout)
    hl_layout_unref(agreed);
  else
    store->base.layout = agreed;
  return HL_OK;
}

/* A connection's number means something only to the server that gave it, and only
   until that ends: then it counts from one again. So it is remembered with the
   server's name and the second at which it was started. Both servers count Uptime
   by the clock that NOW() shows, so the difference stays the same even when the
   clock is set. */
static const char *identity_sql(const hl__mysql_session *session) {
  if (session->dialect == HL_MARIADB)
    return "SELECT CONCAT_WS(' ',UNIX_TIMESTAMP()-CAST(VARIABLE_VALUE AS "
           "SIGNED),@@server_id,@@hostname,@@port),VARIABLE_VALUE "
           "FROM information_schema.GLOBAL_STATUS WHERE VARIABLE_NAME='UPTIME'";
  return "SELECT CONCAT_WS(' ',UNIX_TIMESTAMP()-CAST(VARIABLE_VALUE AS "
         "SIGNED),@@server_uuid,@@hostname,@@port),VARIABLE_VALUE "
         "FROM performance_schema.global_status WHERE VARIABLE_NAME='Uptime'";
}

/* Returns whether this is the second of the server's start. Tokens begin with that
   second. A server that was killed and started again within a second would give the
   same ones again, and have the same identity; so no session is used before the
   second after the start. */
static bool identity_read(hl__mysql_session *session, MYSQL_RES *result) {
  MYSQL_ROW row = result ? mysql_fetch_row(result) : NULL;
  session->id = mysql_thread_id(session->mysql);
  (void)snprintf(session->server, sizeof session->server, "%s",
                 row && row[0] ? row[0] : "");
  return row && row[1] && strcmp(row[1], "0") == 0;
}

static int identify(hl__mysql_session *session, bool *young, hl_error *error) {
  const char *sql = identity_sql(session);
  MYSQL_RES *result;
  int status = hl__mysql_query(session, sql, strlen(sql), &result, error);
  if (status) return status;
  *young = identity_read(session, result);
  mysql_free_result(result);
  return HL_OK;
}

int hl__mysql_identify(hl__mysql_session *session, hl_error *error) {
  bool young;
  hl__mysql_waits_bound(session, true);
  int status = identify(session, &young, error);
  hl__mysql_waits_bound(session, false);
  return status;
}

static int tokens_wait(hl__mysql_session *session, hl_error *error) {
  static const struct timespec moment = {.tv_nsec = 50000000};
  int status = HL_OK;
  for (bool young = true; young && status == HL_OK;) {
    (void)nanosleep(&moment, NULL);
    status = identify(session, &young, error);
  }
  return status;
}

/* The assignments of all that the server's administrator may have changed and that
   we rely on; but for those that statement.c sends with the first lock. After
   `wait_timeout` of silence the server frees our locks: the lease. */
static void session_sql(hl__mysql_session *session, char *out, size_t size) {
  const hl_store_config *config = session->store->config;
  char limits[160];
  /* As statement.c will want it for a wait of the usual length. */
  session->wait = 1 + (config->timeout > HL__MYSQL_WAIT_MAX ? HL__MYSQL_WAIT_MAX
                                                            : config->timeout);
  (void)hl__mysql_limits(session, session->wait, limits, sizeof limits);
  int64_t lease = (config->hold_timeout + 999) / 1000;
  (void)snprintf(out, size,
                 "SET SESSION autocommit=1,completion_type=0,"
                 "sql_select_limit=18446744073709551615,"
                 "sql_big_selects=1,wait_timeout=%lld,"
                 "%s%s",
                 (long long)lease, limits,
                 session->dialect == HL_MARIADB
                     ? ",idle_transaction_timeout=0,"
                       "idle_readonly_transaction_timeout=0,"
                       "idle_write_transaction_timeout=0"
                     : "");
}

/* By its greeting, as an old server would not understand what is asked next; and
   later by what it says itself, as a proxy may have greeted us. */
static int greeting_refuse(const hl__mysql_session *session, hl_error *error) {
  return version_refuse(session, mysql_get_server_info(session->mysql), error);
}

static int variables_refuse(hl__mysql_session *session, MYSQL_RES *result,
                            hl_error *error) {
  server found;
  variables_read(result, &found);
  session->repeatable = found.log_bin && found.statement_log;
  int status = version_refuse(session, found.version, error);
  return status ? status : server_refuse(&found, error);
}

int hl__mysql_verify_server(hl__mysql_session *session, hl_error *error) {
  MYSQL_RES *result = NULL;
  int status = greeting_refuse(session, error);
  if (status) return status;
  status = hl__mysql_query(session, variables_sql, sizeof variables_sql - 1,
                           &result, error);
  if (status == HL_OK) status = variables_refuse(session, result, error);
  mysql_free_result(result);
  if (status) return status;
  status = hl__mysql_query(session, connection_sql, sizeof connection_sql - 1,
                           &result, error);
  if (status == HL_OK) status = proxy_refuse(session, result, error);
  mysql_free_result(result);
  return status;
}

enum { SET, VARIABLES, CONNECTION, IDENTITY, TABLE, LAYOUT, QUESTIONS };

/* Those that are asked in one trip, as connecting over a slow line takes long enough.
   A library that does not tell us when it waits does so without bounds for all answers
   but the first; so the last one has a trip of its own there: whoever has locked
   hier_lock_meta keeps its answer back. */
#ifdef HL__BOUNDS_WAITS
enum { TOGETHER = QUESTIONS };
#else
enum { TOGETHER = LAYOUT };
#endif

/* Asks the i-th question; result: NULL where it has none. */
static int ask(hl__mysql_session *session, const char *const *questions, int i,
               MYSQL_RES **result, hl_error *error) {
  char together[4096];
  const char *sql = questions[i];
  if (i == 0) {
    size_t n = 0;
    for (int k = 0; k < TOGETHER; k++)
      n += (size_t)snprintf(together + n, sizeof together - n, "%s%s",
                            k ? ";" : "", questions[k]);
    sql = together;
  }
  if (i == 0 || i >= TOGETHER)
    return hl__mysql_query(session, sql, strlen(sql), result, error);
  *result = NULL;
  hl__sigpipe guard = hl__sigpipe_begin(session);
  bool failed = mysql_next_result(session->mysql) != 0;
  if (!failed) *result = mysql_store_result(session->mysql);
  hl__sigpipe_end(guard);
  if (failed || (!*result && mysql_field_count(session->mysql)))
    return hl__mysql_error(session, NULL, "query the server", error);
  return HL_OK;
}

/* Autocommit is on till the first lock, so that looking leaves no transaction. */
int hl__mysql_verify(hl__mysql_session *session, hl_error *error) {
  char set[512], table[HL__MYSQL_TABLE_SQL], layout[192];
  const char *questions[QUESTIONS] = {
      set, variables_sql, connection_sql, identity_sql(session), table, layout};
  bool young = false;
  int status = greeting_refuse(session, error);
  if (status) return status;
  session_sql(session, set, sizeof set);
  (void)hl__mysql_table_sql(session, table, sizeof table);
  (void)layout_sql(session, layout, sizeof layout);
  hl__mysql_waits_bound(session, true);
  for (int i = SET; i < QUESTIONS && status == HL_OK; i++) {
    MYSQL_RES *result = NULL;
    status = ask(session, questions, i, &result, error);
    if (status == HL_ENOT_PROVISIONED && i == LAYOUT) status = HL_OK;
    if (status == HL_OK && !result && i != SET && i != LAYOUT)
      status = hl__error(error, HL_ECONNECTION,
                         "the server's answer broke off while connecting");
    if (status == HL_OK) switch (i) {
      case VARIABLES:
        status = variables_refuse(session, result, error);
        break;
      case CONNECTION:
        status = proxy_refuse(session, result, error);
        break;
      case IDENTITY:
        young = identity_read(session, result);
        break;
      case TABLE:
        status = hl__mysql_table_refuse(session, result, error);
        break;
      case LAYOUT:
        status = layout_refuse(session, result, error);
        break;
      default:
        break;
      }
    mysql_free_result(result);
  }
  if (status == HL_OK && young) status = tokens_wait(session, error);
  hl__mysql_waits_bound(session, false);
  return status;
}
