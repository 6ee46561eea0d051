/*
 * sqlite.c - the cost of SQLite and the disk, without hierlock. Usage:
 *
 *   sqlite FILE full|normal   A lease of three rows, as the store takes it. A transaction looks whether another lease
 *                             is in the way, and inserts the lease and its rows. A second transaction reads and
 *                             deletes them. The database is made by hierlock.
 */
#include "client.h"

#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LEVELS = 3 };

enum { BEGIN, COMMIT, STATE, BLOCKER, COUNT, ADD, ADD_ROW, GET, DELETE_ROW, DELETE, STATEMENTS };

static const char *const texts[STATEMENTS] = {
    "BEGIN IMMEDIATE",
    "COMMIT",
    "SELECT counter,EXISTS(SELECT 1 FROM hierlock_waiters) FROM hierlock",
    "SELECT l.number,l.boot,l.till,l.till_unix,l.rows FROM hierlock_rows r CROSS JOIN "
    "hierlock_leases l ON "
    "l.number=r.number WHERE r.key=?1 AND r.exclusive>=?2 LIMIT 1",
    "UPDATE hierlock SET counter=?1",
    "INSERT INTO "
    "hierlock_leases(number,id,secret,holder,boot,till,till_unix,rows,shared,owner,path,label,"
    "application,"
    "host,pid,since,revoked,revoked_by,reason) VALUES(?1,?2,?2,?2,?2,1,1,?3,0,'the "
    "owner','user1/account1/resource1','',"
    "'the application','the host',1,1,0,NULL,NULL)",
    "INSERT INTO hierlock_rows(key,exclusive,number) VALUES(?1,?2,?3)",
    "SELECT "
    "number,id,secret,holder,boot,till,till_unix,rows,shared,owner,path,label,application,host,pid,"
    "since,revoked,"
    "revoked_by,reason FROM hierlock_leases WHERE number=?1",
    "DELETE FROM hierlock_rows WHERE key=?1 AND exclusive=?2 AND number=?3",
    "DELETE FROM hierlock_leases WHERE number=?1",
};

static sqlite3 *db;
static sqlite3_stmt *statements[STATEMENTS];
static sqlite3_int64 number, key[LEVELS];

static void check(int code, int expected, const char *what) {
  if (code != expected) client_die(what, sqlite3_errmsg(db));
}

void client_open(int argc, char **argv) {
  char pragma[64];
  if (argc != 2) client_die("usage", "sqlite FILE full|normal");
  check(sqlite3_open_v2(argv[0], &db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX, NULL), SQLITE_OK,
        argv[0]);
  snprintf(pragma, sizeof pragma, "PRAGMA synchronous=%s", argv[1]);
  check(sqlite3_exec(db, pragma, NULL, NULL, NULL), SQLITE_OK, pragma);
  for (int i = 0; i < STATEMENTS; i++)
    check(sqlite3_prepare_v3(db, texts[i], -1, SQLITE_PREPARE_PERSISTENT, &statements[i], NULL),
          SQLITE_OK, texts[i]);
}

/* Runs the statement; if it has a row, leaves it at that row. */
static void run(int which, int expected) {
  check(sqlite3_step(statements[which]), expected, texts[which]);
  if (expected == SQLITE_DONE) sqlite3_reset(statements[which]);
}

static void run_row(int which, int level) {
  sqlite3_bind_int64(statements[which], 1, key[level]);
  sqlite3_bind_int(statements[which], 2,
                   which == BLOCKER ? level < LEVELS - 1 : level == LEVELS - 1);
  if (which != BLOCKER) sqlite3_bind_int64(statements[which], 3, number);
  run(which, SQLITE_DONE);
}

void client_take(unsigned name) {
  unsigned char id[16] = {1}, rows[9 * LEVELS] = {1};
  key[0] = name % 50;
  for (int i = 1; i < LEVELS; i++)
    key[i] = (sqlite3_int64)((sqlite3_uint64)i << 60 | (name * 2654435761u % 1000000007u));
  run(BEGIN, SQLITE_DONE);
  run(STATE, SQLITE_ROW);
  number = sqlite3_column_int64(statements[STATE], 0) + 1;
  sqlite3_reset(statements[STATE]);
  for (int i = 0; i < LEVELS; i++) run_row(BLOCKER, i);
  sqlite3_bind_int64(statements[COUNT], 1, number);
  run(COUNT, SQLITE_DONE);
  sqlite3_bind_int64(statements[ADD], 1, number);
  sqlite3_bind_blob(statements[ADD], 2, id, sizeof id, SQLITE_STATIC);
  sqlite3_bind_blob(statements[ADD], 3, rows, sizeof rows, SQLITE_STATIC);
  run(ADD, SQLITE_DONE);
  for (int i = 0; i < LEVELS; i++) run_row(ADD_ROW, i);
  run(COMMIT, SQLITE_DONE);
}

void client_give(void) {
  run(BEGIN, SQLITE_DONE);
  sqlite3_bind_int64(statements[GET], 1, number);
  run(GET, SQLITE_ROW);
  sqlite3_reset(statements[GET]);
  for (int i = 0; i < LEVELS; i++) run_row(DELETE_ROW, i);
  sqlite3_bind_int64(statements[DELETE], 1, number);
  run(DELETE, SQLITE_DONE);
  run(COMMIT, SQLITE_DONE);
}
