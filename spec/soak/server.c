/*
 * server.c - an administrator's connection to the server, in the main process.
 */
#include "soak.h"

#include "dsn.h"

#include <mysql.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TABLE "hierlock_soak"

static MYSQL *mysql;

static void fail(const char *sql) {
  (void)fprintf(stderr, "soak: %s: %s\n", sql, mysql_error(mysql));
  exit(2);
}

static void query(const char *sql) {
  if (mysql_query(mysql, sql)) fail(sql);
}

int server_open(const char *text) {
  hl_dsn dsn;
  hl_error error;
  if (hl_dsn_parse(text, &dsn, &error)) {
    (void)fprintf(stderr, "soak: %s\n", error.message);
    return 2;
  }
  mysql = mysql_init(NULL);
  if (!mysql_real_connect(mysql, dsn.host, dsn.user, dsn.password, NULL, dsn.port, NULL, 0))
    fail("connect");
  query("SET SESSION wait_timeout = 100000");
  hl_dsn_dispose(&dsn);
  return 0;
}

/* Into the database that the workers' DSN names. */
void server_provision(void) {
  static char sql[64 * 1024];
  hl_dsn dsn;
  if (hl_dsn_parse(shared->dsn, &dsn, NULL)) exit(2);
  if (mysql_select_db(mysql, dsn.database)) fail(dsn.database);
  hl_dsn_dispose(&dsn);
  query("CREATE TABLE IF NOT EXISTS " TABLE
        " (level TINYINT NOT NULL, bucket INT NOT NULL, PRIMARY KEY (level, bucket)) ENGINE=InnoDB");
  query("CREATE TABLE IF NOT EXISTS hier_lock_meta (table_name VARCHAR(64) NOT NULL PRIMARY KEY,"
        " buckets INT UNSIGNED NOT NULL, levels VARCHAR(1100) NOT NULL) ENGINE=InnoDB");
  for (int level = 0; level < 3; level++)
    for (int bucket = 0; bucket < BUCKETS;) {
      int used = snprintf(sql, sizeof sql, "INSERT IGNORE INTO " TABLE " VALUES (%d,%d)", level, bucket++);
      for (int i = 1; i < 1024 && bucket < BUCKETS; i++)
        used += snprintf(sql + used, sizeof sql - (size_t)used, ",(%d,%d)", level, bucket++);
      query(sql);
    }
  (void)snprintf(sql, sizeof sql, "REPLACE INTO hier_lock_meta VALUES ('" TABLE "', %d, 'user,account,resource')", BUCKETS);
  query(sql);
}

static long long number(const char *sql) {
  long long n = -1;
  if (mysql_query(mysql, sql)) return -1;
  MYSQL_RES *result = mysql_store_result(mysql);
  MYSQL_ROW row = result ? mysql_fetch_row(result) : NULL;
  if (row && row[0]) n = atoll(row[0]);
  mysql_free_result(result);
  return n;
}

/* The proxy connects from 127.0.0.2. Behind it a holder learns late that he was killed:
   so these are left alone. */
#define OURS "FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()"

bool server_kill(dice *d, bool only_query) {
  char sql[256];
  (void)snprintf(sql, sizeof sql, "SELECT id " OURS " AND host LIKE '127.0.0.1:%%' %s ORDER BY RAND(%u) LIMIT 1",
                 only_query ? "AND command <> 'Sleep'" : "", (unsigned)roll_below(d, 1 << 30));
  long long id = number(sql);
  if (id < 0) return false;
  (void)snprintf(sql, sizeof sql, "KILL %s %lld", only_query ? "QUERY" : "CONNECTION", id);
  return mysql_query(mysql, sql) == 0;
}

int server_transactions(void) {
  return (int)number("SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_rows_locked > 0"
                     " OR trx_lock_structs > 0");
}

int server_connections(void) { return (int)number("SELECT COUNT(*) " OURS); }

static void show(const char *what, const char *sql) {
  if (mysql_query(mysql, sql)) return;
  MYSQL_RES *result = mysql_store_result(mysql);
  for (MYSQL_ROW row; result && (row = mysql_fetch_row(result));)
    (void)printf("             %s %s\n", what, row[0]);
  mysql_free_result(result);
}

void server_show(void) {
  (void)printf("             (this is connection %lu)\n", mysql_thread_id(mysql));
  show("transaction of connection",
       "SELECT CONCAT_WS(' ', trx_mysql_thread_id, trx_state, 'since', trx_started, 'with', trx_rows_locked,"
       " 'rows:', LEFT(trx_query, 100)) FROM information_schema.innodb_trx");
  show("connection", "SELECT CONCAT_WS(' ', id, host, command, time, state, LEFT(info, 100)) FROM information_schema.processlist");
}
