/*
 * database.c - a connection of SQLite's: opened, set up, closed; and the
 * tables.
 */
#include "sqlite_store.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* In the header of the file: whose it is ("hier"), and the version of the
 * tables. */
#define APPLICATION_ID 0x68696572
#define VERSION 1

/* The log is not longer than so many bytes for long. */
#define LOG_MAX "4194304"

/* Another process may be making the tables, or recover the log. */
#define PAUSE_NS 1000000
#define PAUSE_MAX_NS 32000000

/* A number is never given twice: it names a lease, or is a ticket, and leases'
   numbers are their tokens. Rows are found by key, so a WITHOUT ROWID table is
   its own index. */
static const char schema[] =
    "CREATE TABLE hierlock(levels TEXT NOT NULL,counter INTEGER NOT NULL);"
    "CREATE TABLE hierlock_leases(number INTEGER PRIMARY KEY,id BLOB NOT NULL,"
    "secret BLOB NOT NULL,holder BLOB NOT NULL,boot BLOB NOT NULL,till INTEGER NOT NULL,"
    "till_unix INTEGER NOT NULL,rows BLOB NOT NULL,shared INTEGER NOT NULL,owner TEXT NOT NULL,"
    "path TEXT NOT NULL,label TEXT NOT NULL,application TEXT NOT NULL,host TEXT NOT NULL,"
    "pid INTEGER NOT NULL,since INTEGER NOT NULL,revoked INTEGER NOT NULL,revoked_by TEXT,"
    "reason TEXT);"
    "CREATE TABLE hierlock_rows(key INTEGER NOT NULL,exclusive INTEGER NOT NULL,"
    "number INTEGER NOT NULL,PRIMARY KEY(key,exclusive,number)) WITHOUT ROWID;"
    "CREATE TABLE hierlock_waiters(ticket INTEGER PRIMARY KEY,rows BLOB NOT NULL,"
    "shared INTEGER NOT NULL,path TEXT NOT NULL,label TEXT NOT NULL,application TEXT NOT NULL,"
    "host TEXT NOT NULL,pid INTEGER NOT NULL,since INTEGER NOT NULL);"
    "CREATE TABLE hierlock_waits(key INTEGER NOT NULL,exclusive INTEGER NOT NULL,"
    "ticket INTEGER NOT NULL,PRIMARY KEY(key,exclusive,ticket)) WITHOUT ROWID;"
    "PRAGMA application_id=1751737714;PRAGMA user_version=1";
_Static_assert(APPLICATION_ID == 1751737714, "as in the schema");
_Static_assert(VERSION == 1, "as in the schema");

/* ------------------------------------------------------------- statements */

/* Runs SQL whose first answer, if any, is copied to out. SQLite's code. */
static int ask(sqlite3 *db, const char *sql, char *out, size_t size) {
  sqlite3_stmt *statement = NULL;
  int code = sqlite3_prepare_v2(db, sql, -1, &statement, NULL);
  if (size > 0) out[0] = '\0';
  if (code == SQLITE_OK) {
    code = sqlite3_step(statement);
    const unsigned char *text = code == SQLITE_ROW ? sqlite3_column_text(statement, 0) : NULL;
    if (text && size > 0) (void)snprintf(out, size, "%s", (const char *)text);
    if (code == SQLITE_ROW || code == SQLITE_DONE) code = SQLITE_OK;
  }
  int ended = sqlite3_finalize(statement);
  return code == SQLITE_OK ? ended : code;
}

static int ask_number(sqlite3 *db, const char *sql, long long *number) {
  char text[32];
  int code = ask(db, sql, text, sizeof text);
  *number = strtoll(text, NULL, 10);
  return code;
}

/* ------------------------------------------------------------- the tables */

/* SQLite's code; *status says more where the file is not for us. In a
 *transaction, or not; empty: there is nothing in it. */
static int whose(hl__sqlite_session *session, bool *empty, int *status, hl_error *error) {
  long long tables, application, version;
  /* Ask this first: other processes may be making the tables, with all that is asked below, at
   * one stroke. */
  int code = ask_number(session->db, "SELECT count(*) FROM sqlite_master", &tables);
  if (code == SQLITE_OK) code = ask_number(session->db, "PRAGMA application_id", &application);
  if (code == SQLITE_OK) code = ask_number(session->db, "PRAGMA user_version", &version);
  if (code != SQLITE_OK) return code;
  *empty = tables == 0;
  if (!*empty && application != APPLICATION_ID)
    *status = hl__error(error, HL_ESTORE,
                        "%s is a database of something else; name a file of its own for hierlock",
                        session->path);
  else if (!*empty && version != VERSION)
    *status = hl__error(error, HL_ESTORE,
                        "%s was made by another version of hierlock (format %lld, and "
                        "this one knows %d): see Upgrading in docs/operations.md",
                        session->path, version, VERSION);
  return SQLITE_OK;
}

/* Makes the tables, unless another process is first. */
static int tables_make(hl__sqlite_session *session, int *status, hl_error *error) {
  char names[HL__LAYOUT_NAMES_MAX];
  bool empty = false;
  (void)hl__layout_names(session->store->config->layout, names);
  int code = ask(session->db, "BEGIN IMMEDIATE", NULL, 0);
  if (code != SQLITE_OK) return code;
  code = whose(session, &empty, status, error);
  if (code == SQLITE_OK && empty) {
    char *sql = sqlite3_mprintf("%s;INSERT INTO hierlock VALUES(%Q,0)", schema, names);
    code = sql ? sqlite3_exec(session->db, sql, NULL, NULL, NULL) : SQLITE_NOMEM;
    sqlite3_free(sql);
  }
  if (code == SQLITE_OK) code = ask(session->db, "COMMIT", NULL, 0);
  if (code != SQLITE_OK) (void)ask(session->db, "ROLLBACK", NULL, 0);
  return code;
}

/* ------------------------------------------------------------- the levels */

static int layout_agree(hl__sqlite_session *session, const char *names, hl_error *error) {
  hl__sqlite_store *store = session->store;
  const hl_layout *wanted = store->base.layout ? store->base.layout : store->config->layout;
  char ours[HL__LAYOUT_NAMES_MAX];
  int status = hl__layout_settle(wanted, names, &store->base.layout, error);
  if (status != HL_EMISMATCH) return status;
  return hl__error(error, HL_EMISMATCH,
                   "%s has the levels %.130s; this program wants %.90s: leave out `levels`, and it "
                   "uses the existing ones; or name another file",
                   session->path, names, hl__layout_names(wanted, ours));
}

/* ---------------------------------------------------------------- opening */

/* Sets up a new connection. SQLite's code. */
static int set_up(hl__sqlite_session *session, int *status, hl_error *error) {
  sqlite3 *db = session->db;
  char said[HL__LAYOUT_NAMES_MAX];
  bool empty = false;
  /* Before anything is changed. */
  int code = whose(session, &empty, status, error);
  if (code != SQLITE_OK || *status) return code;
  code = ask(db, "PRAGMA journal_mode=WAL", said, sizeof said);
  if (code != SQLITE_OK) return code;
  if (strcmp(said, "wal") != 0) {
    *status = hl__error(error, HL_EUNSAFE_SERVER,
                        "SQLite cannot keep %s with a write-ahead log (it says '%.20s')",
                        session->path, said);
    return SQLITE_OK;
  }
  code = ask(db, session->store->lasts ? "PRAGMA synchronous=FULL" : "PRAGMA synchronous=NORMAL",
             NULL, 0);
  if (code == SQLITE_OK) code = ask(db, "PRAGMA journal_size_limit=" LOG_MAX, NULL, 0);
  long long size;
  if (code == SQLITE_OK) code = ask_number(db, "PRAGMA page_size", &size);
  if (code == SQLITE_OK) session->page_size = size;
  /* Files of others' making must not make us run their code. */
  if (code == SQLITE_OK) code = ask(db, "PRAGMA trusted_schema=OFF", NULL, 0);
  if (code == SQLITE_OK && empty) code = tables_make(session, status, error);
  if (code != SQLITE_OK || *status) return code;
  code = ask(db, "SELECT levels FROM hierlock", said, sizeof said);
  if (code == SQLITE_OK) *status = layout_agree(session, said, error);
  return code;
}

/* SQLite's code. */
static int open_once(hl__sqlite_session *session, int *status, hl_error *error) {
  int code = sqlite3_open_v2(session->path, &session->db,
                             SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX, NULL);
  if (code != SQLITE_OK) return code;
  if (sqlite3_db_readonly(session->db, "main") == 1) return SQLITE_READONLY;
  /* The log would be taken apart by the last to close, which takes its time. */
  (void)sqlite3_db_config(session->db, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1, NULL);
  int chunk = HL__SQLITE_CHUNK;
  (void)sqlite3_file_control(session->db, "main", SQLITE_FCNTL_CHUNK_SIZE, &chunk);
  return set_up(session, status, error);
}

/* A program makes the log and its index with a mode that its umask cuts, and gives them the
   database's mode a moment later. Until then another user's program may not write them. */
static bool may_be_in_the_making(const hl__sqlite_session *session, int code) {
  return ((code & 0xff) == SQLITE_READONLY || (code & 0xff) == SQLITE_CANTOPEN) &&
         eaccess(session->path, R_OK | W_OK) == 0;
}

int hl__sqlite_open(hl__sqlite_session *session, int64_t deadline, hl_error *error) {
  struct timespec pause = {.tv_nsec = PAUSE_NS};
  int64_t made = hl__now_ms() + HL__SQLITE_MAKING_MS;
  int status = HL_OK;
  int code;
  while ((code = open_once(session, &status, error)) != SQLITE_OK) {
    int64_t end = may_be_in_the_making(session, code) ? made : deadline;
    if (hl__left_ms(end) == 0 || (end == deadline && code != SQLITE_BUSY)) break;
    hl__sqlite_close(session);
    (void)nanosleep(&pause, NULL);
    if (pause.tv_nsec < PAUSE_MAX_NS) pause.tv_nsec *= 2;
  }
  if (code != SQLITE_OK) {
    status = hl__sqlite_error(session, code, "open the database", error);
    if (status == HL_TIMEOUT)
      status = hl__error(error, HL_ECONNECTION, "another program keeps %s locked", session->path);
  }
  if (status == HL_OK && !hl__sqlite_place_stands(session))
    status = hl__sqlite_moved_error(session, error);
  if (status) hl__sqlite_close(session);
  return status;
}

void hl__sqlite_close(hl__sqlite_session *session) {
  for (int i = 0; i < HL__SQLITE_STATEMENTS; i++) {
    (void)sqlite3_finalize(session->statements[i]);
    session->statements[i] = NULL;
  }
  (void)sqlite3_close_v2(session->db);
  session->db = NULL;
  session->relaxed = false;
}
