/*
 * statement.c - the statements, each prepared once for a connection; and what
 * an error of SQLite's means.
 */
#include "sqlite_store.h"

#include <errno.h>
#include <string.h>

/* Statements name columns of records in this order: record.c, leases.c. */
#define RECORD                                                                                     \
  "number,id,secret,holder,boot,till,till_unix,rows,shared,owner,path,label,"                      \
  "application,host,pid,since,revoked,revoked_by,reason"

static const char *const texts[HL__SQLITE_STATEMENTS] = {
    [HL__SQLITE_BEGIN] = "BEGIN IMMEDIATE",
    [HL__SQLITE_COMMIT] = "COMMIT",
    [HL__SQLITE_ROLLBACK] = "ROLLBACK",
    [HL__SQLITE_STATE] = "SELECT counter,EXISTS(SELECT 1 FROM hierlock_waiters) FROM hierlock",
    [HL__SQLITE_PAGES] = "PRAGMA page_count",
    [HL__SQLITE_COUNT] = "UPDATE hierlock SET counter=?1",
    [HL__SQLITE_RAISE] = "UPDATE hierlock SET counter=?1 WHERE counter<?1",
    /* ?2: 0 where any lease conflicts, 1 where exclusive ones do; ?3: not this one. */
    [HL__SQLITE_BLOCKER] = "SELECT l.number,NULL,NULL,NULL,l.boot,l.till,l.till_unix,l.rows FROM "
                           "hierlock_rows r CROSS JOIN hierlock_leases l ON l.number=r.number "
                           "WHERE r.key=?1 AND r.exclusive>=?2 AND r.number<>?3 LIMIT 1",
    /* The first nine values of these two are of the same kinds: record.c. */
    [HL__SQLITE_ADD_LEASE] =
        "INSERT INTO hierlock_leases(" RECORD ") VALUES(?1,?10,?11,?12,?13,?14,"
        "?15,?2,?3,?16,?4,?5,?6,?7,?8,?9,0,NULL,NULL)",
    [HL__SQLITE_ADD_ROW] = "INSERT INTO hierlock_rows(key,exclusive,number) VALUES(?1,?2,?3)",
    /* A lease that was granted while it was cancelled has no known number, and an upgrade gives it
       another one. The second part reads all leases; it is not run where the first finds one. */
    [HL__SQLITE_GET_LEASE] =
        "SELECT " RECORD " FROM hierlock_leases WHERE number=?1 AND id=?2 UNION ALL SELECT " RECORD
        " FROM hierlock_leases WHERE id=?2 LIMIT 1",
    [HL__SQLITE_DELETE_LEASE] = "DELETE FROM hierlock_leases WHERE number=?1",
    [HL__SQLITE_DELETE_ROW] =
        "DELETE FROM hierlock_rows WHERE key=?1 AND exclusive=?2 AND number=?3",
    [HL__SQLITE_SET_END] = "UPDATE hierlock_leases SET "
                           "boot=?2,till=?3,till_unix=?4 WHERE number=?1",
    [HL__SQLITE_SET_HOLDER] = "UPDATE hierlock_leases SET boot=?2,till=?3,till_unix=?4,holder=?5,"
                              "application=?6,host=?7,pid=?8 WHERE number=?1",
    [HL__SQLITE_SET_ROWS] = "UPDATE hierlock_leases SET "
                            "rows=?2,shared=?3,number=?4 WHERE number=?1",
    [HL__SQLITE_SET_REVOKED] = "UPDATE hierlock_leases SET revoked=1,revoked_by=?2,reason=?3 WHERE "
                               "number=?1",
    [HL__SQLITE_LIST] = "SELECT " RECORD " FROM hierlock_leases ORDER BY number",
    [HL__SQLITE_LIST_AT] = "SELECT " RECORD " FROM hierlock_leases WHERE number IN (SELECT number "
                           "FROM hierlock_rows WHERE key=?1 AND exclusive>=?2) ORDER BY number",
    [HL__SQLITE_ADD_WAITER] = "INSERT INTO "
                              "hierlock_waiters(ticket,rows,shared,path,label,application,"
                              "host,pid,since) VALUES(?1,?2,?3,?4,?5,?6,?7,?8,?9)",
    [HL__SQLITE_ADD_WAIT] = "INSERT INTO hierlock_waits(key,exclusive,ticket) VALUES(?1,?2,?3)",
    [HL__SQLITE_GET_WAITER] = "SELECT ticket,rows FROM hierlock_waiters WHERE ticket=?1",
    [HL__SQLITE_DELETE_WAITER] = "DELETE FROM hierlock_waiters WHERE ticket=?1",
    [HL__SQLITE_DELETE_WAIT] = "DELETE FROM hierlock_waits WHERE key=?1 AND "
                               "exclusive=?2 AND ticket=?3",
    [HL__SQLITE_EARLIER] = "SELECT ticket FROM hierlock_waits WHERE key=?1 AND exclusive=?2 AND "
                           "ticket<?3 ORDER BY ticket LIMIT 1",
    [HL__SQLITE_LIST_WAITERS] =
        "SELECT ticket,rows,shared,path,label,application,host,pid,since FROM "
        "hierlock_waiters ORDER BY ticket",
};

sqlite3_stmt *hl__sqlite_statement(hl__sqlite_session *session, hl__sqlite_number number) {
  sqlite3_stmt **statement = &session->statements[number];
  if (*statement)
    (void)sqlite3_reset(*statement);
  else
    (void)sqlite3_prepare_v3(session->db, texts[number], -1, SQLITE_PREPARE_PERSISTENT, statement,
                             NULL);
  return *statement;
}

sqlite3_stmt *hl__sqlite_statement_of(hl__sqlite_session *session, hl__sqlite_number number,
                                      int64_t value) {
  sqlite3_stmt *it = hl__sqlite_statement(session, number);
  (void)sqlite3_bind_int64(it, 1, value);
  return it;
}

int hl__sqlite_step(hl__sqlite_session *session, sqlite3_stmt *statement) {
  return statement ? sqlite3_step(statement) : sqlite3_extended_errcode(session->db);
}

int hl__sqlite_run(hl__sqlite_session *session, sqlite3_stmt *statement) {
  int code = hl__sqlite_step(session, statement);
  if (statement) (void)sqlite3_clear_bindings(statement);
  return code == SQLITE_DONE ? SQLITE_OK : code;
}

int hl__sqlite_ask(hl__sqlite_session *session, sqlite3_stmt *statement, int64_t *value) {
  int code = hl__sqlite_step(session, statement);
  *value = code == SQLITE_ROW ? sqlite3_column_int64(statement, 0) : 0;
  return hl__sqlite_reset(statement, code);
}

int hl__sqlite_reset(sqlite3_stmt *statement, int code) {
  (void)sqlite3_reset(statement);
  return code == SQLITE_ROW || code == SQLITE_DONE ? SQLITE_OK : code;
}

int hl__sqlite_error(hl__sqlite_session *session, int code, const char *doing, hl_error *error) {
  bool told = session->db && (sqlite3_errcode(session->db) & 0xFF) == (code & 0xFF);
  const char *said = told ? sqlite3_errmsg(session->db) : sqlite3_errstr(code);
  int extended = told ? sqlite3_extended_errcode(session->db) : code;
  int status = HL_ESTORE;
  const char *hint = "";
  session->full = (code & 0xFF) == SQLITE_FULL || (code & 0xFF) == SQLITE_IOERR;
  switch (code & 0xFF) {
  case SQLITE_BUSY:
  case SQLITE_LOCKED:
  case SQLITE_PROTOCOL: status = HL_TIMEOUT; break;
  case SQLITE_NOMEM: return hl__error_memory(error);
  case SQLITE_FULL: hint = ": there is no space left for it"; break;
  case SQLITE_IOERR: /* a log that cannot grow says so */
    hint = ": there may be no space left for it";
    break;
  case SQLITE_READONLY:
    if (extended == SQLITE_READONLY_DBMOVED) return hl__sqlite_moved_error(session, error);
    hint = ": the file, or its directory, must not be read-only";
    break;
  case SQLITE_CANTOPEN:
    /* The system's own reason, where it is another one. */
    hint = session->db && (sqlite3_system_errno(session->db) == EMFILE ||
                           sqlite3_system_errno(session->db) == ENFILE)
               ? ": there are too many open files"
               : ": its directory, and the files of its name there, must be writable; chmod g+s a "
                 "directory that a group shares";
    break;
  case SQLITE_CORRUPT:
  case SQLITE_NOTADB: hint = ": it is damaged, cannot be read, or is no database"; break;
  default: break;
  }
  (void)hl__error(error, status, "cannot %s in %s: %s%s", doing, session->path, said, hint);
  if (error) error->server_errno = (unsigned)extended;
  return status;
}
