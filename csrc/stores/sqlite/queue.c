/*
 * queue.c - tickets: the rows that each waiter waits for, their order, and which waiters are
 * alive.
 *
 * A ticket is a number, lower than all that are drawn later; the session that has it keeps the
 * byte of that number locked. If the byte is not locked, its process has died, or its wait has
 * ended: a waiter writes nothing only to say that it gives up. Such a ticket blocks no request,
 * nor does the ticket of a stopped session: the next write transaction that meets it deletes it.
 */
#include "sqlite_store.h"

/* So many tickets are looked at by one who draws one. */
#define SWEEP 16

/* Deletes a dead one that was met at a row; the row, too, where it belongs to no ticket: not what
   we write. */
static int ticket_clear(hl__sqlite_session *session, int64_t ticket, int64_t key, bool exclusive) {
  int code = hl__sqlite_ticket_delete(session, ticket);
  if (code != SQLITE_OK) return code;
  return hl__sqlite_row_run(session, HL__SQLITE_DELETE_WAIT, key, exclusive, ticket);
}

/* Finds a ticket before `before` at a row. *ticket: 0, no ticket. */
static int earlier_at(hl__sqlite_session *session, int64_t key, bool exclusive, int64_t before,
                      int64_t *ticket) {
  sqlite3_stmt *it = hl__sqlite_statement_of(session, HL__SQLITE_EARLIER, key);
  (void)sqlite3_bind_int(it, 2, exclusive);
  (void)sqlite3_bind_int64(it, 3, before ? before : INT64_MAX);
  return hl__sqlite_ask(session, it, ticket);
}

int hl__sqlite_earlier(hl__sqlite_session *session, const hl_request *request, int64_t ticket,
                       hl__sqlite_blocker *blocker) {
  for (size_t i = 0; i < request->n; i++) {
    const hl_row *row = &request->rows[i];
    int64_t key = hl__sqlite_key(row);
    const int least = row->mode == HL_SHARED ? 1 : 0;
    for (int exclusive = 1; exclusive >= least;) {
      int64_t other = 0;
      int code = earlier_at(session, key, exclusive, ticket, &other);
      if (code != SQLITE_OK) return code;
      if (other == 0) {
        exclusive--;
        continue;
      }
      if (hl__sqlite_is_alive(session, other)) {
        *blocker = (hl__sqlite_blocker){key, other, HL_FOREVER};
        return SQLITE_ROW;
      }
      if (sqlite3_get_autocommit(session->db)) return SQLITE_EMPTY;
      int changes = sqlite3_total_changes(session->db);
      code = ticket_clear(session, other, key, exclusive);
      if (code != SQLITE_OK) return code;
      /* The loop would meet it for ever: it is not a row that we write. */
      if (sqlite3_total_changes(session->db) == changes) return SQLITE_CORRUPT;
    }
  }
  return SQLITE_OK;
}

int hl__sqlite_tickets_sweep(hl__sqlite_session *session) {
  int code = SQLITE_OK;
  sqlite3_stmt *it = hl__sqlite_statement(session, HL__SQLITE_LIST_WAITERS);
  for (int i = 0; i < SWEEP && code == SQLITE_OK; i++) {
    code = hl__sqlite_step(session, it);
    if (code != SQLITE_ROW) break;
    int64_t ticket = sqlite3_column_int64(it, 0);
    code = hl__sqlite_is_alive(session, ticket) ? SQLITE_OK
                                                : hl__sqlite_ticket_delete(session, ticket);
  }
  return hl__sqlite_reset(it, code);
}
