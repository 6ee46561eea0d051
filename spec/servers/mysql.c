/*
 * mysql.c - MySQL and MariaDB, by libmysqlclient or MariaDB Connector/C.
 */
#include "servers.h"

#include <mysql.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>

static MYSQL *of(const sql *self) { return (MYSQL *)(uintptr_t)self; }

static void disconnect(sql *self) {
  if (self) mysql_close(of(self));
}

static bool run(sql *self, const char *text, row_fn *fn, void *context) {
  if (mysql_query(of(self), text)) return false;
  MYSQL_RES *result = mysql_store_result(of(self));
  if (!result) return mysql_field_count(of(self)) == 0;
  for (MYSQL_ROW row; fn && (row = mysql_fetch_row(result));) fn(context, (const char *const *)row);
  mysql_free_result(result);
  return true;
}

static sql *log_in(const hl_dsn *dsn, const char *database, int seconds, bool impatient) {
  unsigned limit = (unsigned)seconds, one = 1;
  MYSQL *mysql = mysql_init(NULL);
  if (!mysql) abort();
  (void)database; /* each statement names it: by their database the clients are told from us */
  (void)mysql_options(mysql, MYSQL_OPT_CONNECT_TIMEOUT, &limit);
  if (impatient) {
    (void)mysql_options(mysql, MYSQL_OPT_READ_TIMEOUT, &one);
    (void)mysql_options(mysql, MYSQL_OPT_WRITE_TIMEOUT, &one);
  }
  if (mysql_real_connect(mysql, dsn->host, dsn->user, dsn->password, NULL, dsn->port, NULL,
                         CLIENT_FOUND_ROWS) &&
      mysql_query(mysql, "SET SESSION wait_timeout = 1000000, lock_wait_timeout = 3, "
                         "innodb_lock_wait_timeout = 3") == 0)
    return (sql *)mysql;
  mysql_close(mysql);
  return NULL;
}

static int changed(const sql *self) { return (int)mysql_affected_rows(of(self)); }

static const char *error(const sql *self) { return mysql_error(of(self)); }

static bool ended(sql *self) {
  char byte;
#ifdef MARIADB_PACKAGE_VERSION
  int fd = (int)mysql_get_socket(of(self));
#else
  int fd = (int)of(self)->net.fd;
#endif
  return recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0; /* it should be nothing to read */
}

static bool put(sql *self, const char *database, const char *table, int level, int from, int to) {
  char text[8 * 1024];
  int used = snprintf(text, sizeof text, "INSERT IGNORE INTO %s.%s VALUES (%d,%d)", database, table,
                      level, from);
  for (int bucket = from + 1; bucket < to; bucket++)
    used += snprintf(text + used, sizeof text - (size_t)used, ",(%d,%d)", level, bucket);
  return run(self, text, NULL, NULL);
}

static void see(void *context, const char *const *fields) { *(bool *)context = fields[0] != NULL; }

/* The tables of sql/leases.sql. */
static bool lease(sql *self, const char *database, const char *space) {
  static const char *const tables[] = {
      "CREATE TABLE IF NOT EXISTS %s.%s_leases (id BINARY(16) NOT NULL PRIMARY KEY, secret "
      "BINARY(16) NOT NULL, holder BINARY(16) NOT NULL,"
      " till DATETIME(6) NOT NULL, turn BIGINT UNSIGNED NOT NULL, since DATETIME(6) NOT NULL, "
      "token BIGINT UNSIGNED NOT NULL,"
      " mode TINYINT NOT NULL, owner VARBINARY(127) NOT NULL, label VARBINARY(255) NOT NULL, path "
      "VARBINARY(255) NOT NULL,"
      " application VARBINARY(255) NOT NULL, host VARBINARY(255) NOT NULL, pid BIGINT NOT NULL, "
      "revoked TINYINT NOT NULL,"
      " revoked_by VARBINARY(63) NULL, reason VARBINARY(127) NULL, KEY (owner), KEY (till)) "
      "ENGINE=InnoDB",
      "CREATE TABLE IF NOT EXISTS %s.%s_leased (level TINYINT NOT NULL, bucket INT NOT NULL, x "
      "TINYINT NOT NULL, id BINARY(16) NOT NULL,"
      " PRIMARY KEY (level, bucket, x, id), KEY (id)) ENGINE=InnoDB",
      "CREATE TABLE IF NOT EXISTS %s.%s_gate (g SMALLINT UNSIGNED NOT NULL PRIMARY KEY, n TINYINT "
      "NOT NULL) ENGINE=InnoDB"};
  char text[1024];
  for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
    (void)snprintf(text, sizeof text, tables[i], database, space);
    if (!run(self, text, NULL, NULL)) return false;
  }
  (void)snprintf(text, sizeof text,
                 "INSERT IGNORE INTO %s.%s_gate (g, n) WITH RECURSIVE digit (n) AS"
                 " (SELECT 0 UNION ALL SELECT n + 1 FROM digit WHERE n < 255)"
                 " SELECT high.n * 256 + low.n AS g, 0 FROM digit AS high, digit AS low ORDER BY g",
                 database, space);
  return run(self, text, NULL, NULL);
}

static bool provision(sql *self, const char *database, const char *space, int buckets, bool variant,
                      bool leases, const char *user) {
  char text[512], table[80];
  bool there = false;
  (void)variant, (void)user;
  (void)snprintf(table, sizeof table, "%s%s", space, leases ? "_nodes" : "");
  (void)snprintf(text, sizeof text,
                 "CREATE TABLE IF NOT EXISTS %s.%s (level TINYINT NOT NULL, bucket INT NOT NULL,"
                 " PRIMARY KEY (level, bucket)) ENGINE=InnoDB",
                 database, table);
  if (!run(self, text, NULL, NULL)) return false;
  (void)snprintf(
      text, sizeof text,
      "CREATE TABLE IF NOT EXISTS %s.hier_lock_meta (table_name VARCHAR(64) NOT NULL PRIMARY KEY,"
      " buckets INT UNSIGNED NOT NULL, levels VARCHAR(1100) NOT NULL) ENGINE=InnoDB",
      database);
  if (!run(self, text, NULL, NULL)) return false;
  for (int level = 0; level < 3; level++)
    for (int from = 0; from < buckets; from += 512)
      if (!put(self, database, table, level, from, from + 512 < buckets ? from + 512 : buckets))
        return false;
  (void)snprintf(text, sizeof text,
                 "SELECT 1 FROM information_schema.tables WHERE table_schema = '%s' AND table_name "
                 "= '%s_gate'",
                 database, space);
  if (!run(self, text, see, &there) || (leases && !there && !lease(self, database, space)))
    return false;
  (void)snprintf(text, sizeof text,
                 "REPLACE INTO %s.hier_lock_meta VALUES ('%s', %d, '%suser,account,resource')",
                 database, space, buckets, leases ? "leases:" : "");
  return run(self, text, NULL, NULL);
}

#define TABLE "{database}.{buckets}"
#define CLIENTS "FROM information_schema.processlist WHERE db = '{database}' AND user = '{user}'"
/* The proxy connects from 127.0.0.2. Behind it a holder learns late that he was killed: so these are left alone. */
#define VICTIM "SELECT id " CLIENTS " AND host LIKE '127.0.0.1:%'"
#define CHOSEN " ORDER BY RAND({seed}) LIMIT 1"
#define UNSAFE STATUS_BIT(HL_EUNSAFE_SERVER)
#define TABLE_MAY (UNSAFE | STATUS_BIT(HL_ENOT_PROVISIONED))

const server_kind server_mysql = {
    .name = "mysql",
    .store = &hl_store_mysql,
    .buckets = true,
    .connect = log_in,
    .close = disconnect,
    .run = run,
    .changed = changed,
    .error = error,
    .ended = ended,
    .plain = "tls=off",
    .secure = "tls=required",
    .soak = "tls=off&table=hierlock_soak",
    .provision = provision,
    .space_drop = {"DROP TABLE IF EXISTS {database}.hierlock_soak, {database}.hierlock_soak_nodes, "
                   "{database}.hierlock_soak_leases,"
                   " {database}.hierlock_soak_leased, {database}.hierlock_soak_gate"},
    /* On a busy machine a client's log-in by TLS may stand for longer than the ten seconds after which the
       server ends it; PostgreSQL waits for a minute. */
    .database_make = {"DROP DATABASE IF EXISTS {database}", "CREATE DATABASE {database}",
                      "GRANT ALL ON {database}.* TO '{user}'@'%'",
                      "SET GLOBAL connect_timeout = 60"},
    .database_drop = {"DROP DATABASE {database}", "SET GLOBAL connect_timeout = DEFAULT"},
    .rows_table = "{database}.hierlock_soak_rows",
    .number = "BIGINT UNSIGNED",
    /* A connection that the proxy cuts before its session has set a wait_timeout of its own would stay for eight
       hours: in an hour of cuts they use the server up. */
    .limits = {.begin = {"SET @wait = @@GLOBAL.wait_timeout, @connect = @@GLOBAL.connect_timeout",
                         "SET GLOBAL wait_timeout = 10", "SET GLOBAL connect_timeout = 10"},
               .end = {"SET GLOBAL wait_timeout = @wait", "SET GLOBAL connect_timeout = @connect"}},
    .victim = VICTIM CHOSEN,
    .victim_busy = VICTIM " AND command <> 'Sleep'" CHOSEN,
    .kill = "KILL CONNECTION %lld",
    .interrupt = "KILL QUERY %lld",
    .connections = "SELECT COUNT(*) " CLIENTS,
    .transactions = "SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_rows_locked > 0 "
                    "OR trx_lock_structs > 0",
    .show = {"SELECT CONCAT_WS(' ', 'transaction of connection', trx_mysql_thread_id, trx_state, "
             "'since', trx_started, 'with',"
             " trx_rows_locked, 'rows:', LEFT(trx_query, 100)) FROM information_schema.innodb_trx",
             "SELECT CONCAT_WS(' ', 'connection', id, host, command, time, state, LEFT(info, 100))"
             " FROM information_schema.processlist"},
    .read_only = {{.what = "read_only",
                   .shuts = true,
                   .may = UNSAFE,
                   .begin = {"SET GLOBAL read_only = 1"},
                   .end = {"SET GLOBAL read_only = 0"}},
                  {.what = "super_read_only",
                   .shuts = true,
                   .may = UNSAFE, /* MariaDB knows none: nothing happens there */
                   .begin = {"SET GLOBAL super_read_only = 1"},
                   .end = {"SET GLOBAL read_only = 0"}}},
    .alter = {{.what = "ALTER TABLE FORCE",
               .may = TABLE_MAY,
               .begin = {"ALTER TABLE " TABLE " FORCE"}},
              {.what = "RENAME TABLE",
               .shuts = true,
               .may = TABLE_MAY,
               .begin = {"RENAME TABLE " TABLE " TO " TABLE "_away"},
               .end = {"RENAME TABLE " TABLE "_away TO " TABLE}},
              {.what = "FLUSH TABLES WITH READ LOCK",
               .may = TABLE_MAY,
               .begin = {"FLUSH TABLES WITH READ LOCK"},
               .end = {"UNLOCK TABLES"}},
              {.what = "DELETE of users",
               .shuts = true,
               .may = TABLE_MAY,
               .provisions = true,
               .begin = {"DELETE FROM " TABLE " WHERE level = 0"}},
              /* A user can be had without rows of accounts. */
              {.what = "DELETE of accounts",
               .may = TABLE_MAY,
               .provisions = true,
               .begin = {"DELETE FROM " TABLE " WHERE level = 1"}},
              {.what = "TRUNCATE TABLE",
               .shuts = true,
               .may = TABLE_MAY,
               .provisions = true,
               .begin = {"TRUNCATE TABLE " TABLE}},
              {.what = "ENGINE=MyISAM",
               .shuts = true,
               .unleased = true, /* the gate's table begins a transaction: see docs/failover.md */
               .may = TABLE_MAY,
               .begin = {"ALTER TABLE " TABLE " ENGINE=MyISAM"},
               .end = {"ALTER TABLE " TABLE " ENGINE=InnoDB"}}},
    .full = {{.what = "max_connections",
              .begin = {"SET @limit = @@GLOBAL.max_connections",
                        "SET @now = (SELECT COUNT(*) FROM information_schema.processlist)",
                        "SET GLOBAL max_connections = GREATEST(@now, 10)"},
              .end = {"SET GLOBAL max_connections = @limit"}}},
};
