/*
 * statement.h - the statement that locks rows, for those who lock all rows of a request.
 */
#ifndef HIERLOCK_MYSQL_STATEMENT_H
#define HIERLOCK_MYSQL_STATEMENT_H

#include "mysql_store.h"

/* Rows of one statement. Several statements lock more, in the same order. */
#define HL__STATEMENT_ROWS_MAX 256
/* On MySQL, NOWAIT does not cover the wait for a metadata lock. This limit ends that wait before
   the caller's time is up (hl__late_answer_by). */
#define HL__TRY_MS 500

/* The rows of one statement. */
typedef struct hl__part {
  const hl_row *rows;
  size_t n;
  bool nowait;
  /* In a space with leases: the statement reads the row `gate` of the gate's table, last of all. */
  bool gated;
  uint32_t gate;
  /* The statements behind it, which record a lease, or NULL. With a tail the statement keeps the
     gate shared, and the token in @hierlock_token. */
  hl__tail *tail;
} hl__part;

/* Locks the rows of a part (at most HL__STATEMENT_ROWS_MAX) by one statement. *count: rows that
   came back; session->token, gate. */
int hl__mysql_execute(hl__mysql_session *session, const hl_request *request, hl__part *p,
                      size_t *count, hl_error *error);
/* Whether the next statement asks for the table's engine, too. */
bool hl__mysql_check_is_due(const hl__mysql_session *session);
/* Makes room for the request's tag. Prepared statements know the old place, so they are prepared
   anew. False: out of memory. */
bool hl__mysql_tag_reserve(hl__mysql_session *session, size_t room);

#endif
