/*
 * provision.h - a table of buckets on a server, for C tests: as small as it may be.
 */
#ifndef PROVISION_H
#define PROVISION_H

#include "dsn.h"
#include "store.h"

#include <mysql.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

__attribute__((format(printf, 2, 3))) static inline void query(MYSQL *mysql, const char *format,
                                                               ...) {
  char sql[512];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(sql, sizeof sql, format, arguments);
  va_end(arguments);
  if (mysql_query(mysql, sql)) {
    (void)fprintf(stderr, "%s: %s\n", sql, mysql_error(mysql));
    exit(1);
  }
}

static inline void provision(const char *text, const char *table, int buckets) {
  hl_dsn dsn;
  if (hl_dsn_parse(text, hl_store_mysql.parse, &dsn, NULL) != HL_OK) exit(1);
  MYSQL *mysql = mysql_init(NULL);
  if (!mysql_real_connect(mysql, dsn.host, dsn.user, dsn.password, dsn.database, dsn.port, NULL,
                          0)) {
    (void)fprintf(stderr, "%s\n", mysql_error(mysql));
    exit(1);
  }
  query(mysql,
        "CREATE TABLE IF NOT EXISTS %s"
        " (level TINYINT NOT NULL, bucket INT NOT NULL,"
        " PRIMARY KEY (level, bucket)) ENGINE=InnoDB",
        table);
  query(mysql, "CREATE TABLE IF NOT EXISTS hier_lock_meta"
               " (table_name VARCHAR(64) NOT NULL PRIMARY KEY,"
               " buckets INT UNSIGNED NOT NULL,"
               " levels VARCHAR(1100) NOT NULL) ENGINE=InnoDB");
  query(mysql, "BEGIN");
  for (int i = 0; i < 3 * buckets; i++)
    query(mysql, "INSERT IGNORE INTO %s VALUES (%d, %d)", table, i % 3, i / 3);
  query(mysql, "REPLACE INTO hier_lock_meta VALUES ('%s', %d, 'user,account,resource')", table,
        buckets);
  query(mysql, "COMMIT");
  mysql_close(mysql);
  hl_dsn_dispose(&dsn);
}

#endif
