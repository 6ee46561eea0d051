/*
 * record.h - records of leases: writing and deleting one, and their SQL.
 */
#ifndef HIERLOCK_MYSQL_RECORD_H
#define HIERLOCK_MYSQL_RECORD_H

#include "mysql_store.h"

/* The time for answers that are outstanding. */
#define HL__SETTLE_MS 1000
/* A time so many microseconds from now, in SQL: a format. */
#define HL__END_AFTER "TIMESTAMPADD(MICROSECOND,%lld,UTC_TIMESTAMP(6))"
static inline long long hl__mysql_us(int64_t ms) { return (long long)ms * 1000; }

/* Reads the outstanding answer; the session then waits until the deadline. */
int hl__mysql_begin(hl__mysql_session *session, int64_t deadline, hl_error *error);
/* hl__mysql_commands, of which the last is COMMIT. When one fails, the session rolls all back. */
int hl__mysql_changes(hl__mysql_session *session, hl__text *t, unsigned n, uint64_t *affected,
                      hl_error *error);
/* hl__mysql_changes for a whole transaction, after hl__mysql_begin: repeats it while the server
   chooses it as a deadlock's victim. Frees the text. */
int hl__mysql_whole(hl__mysql_session *session, hl__text *t, unsigned n, uint64_t *affected,
                    int64_t deadline, hl_error *error);
/* " AND l.id=" and the id */
void hl__mysql_put_id(hl__text *t, const char *column, const uint8_t id[16]);
/* Puts the hash of a secret. The table keeps the hash, so a reader of the table cannot import a
   lease. */
void hl__mysql_put_secret(hl__text *t, const char *column, const uint8_t secret[16]);
void hl__mysql_put_string(hl__text *t, const char *text, size_t most);

/* The session holds the rows; records the lease and commits. HL_ECONNECTION with grant->sent_ms:
   the record may be there. After any other failure there is no record. `kept`: the session still
   holds the rows then. */
int hl__mysql_record(hl__mysql_session *session, const hl_request *request, bool kept,
                     hl_grant *grant, hl_error *error);
/* Converts the rows of the holder's record to another mode, as hl_lease_ops.convert says.
   *changed is 0 when there is no such record, or its rows had that mode. */
int hl__mysql_record_convert(hl__mysql_session *session, const hl_request *request, hl_grant *grant,
                             uint64_t *changed, hl_error *error);
/* Lets the holder's record end `ttl` from now, after hl__mysql_begin. *sent_ms: when this was
   sent. *changed is 0 when there is no such record, or it is revoked, or has seen a later turn. */
int hl__mysql_record_refresh(hl__mysql_session *session, const hl_lease_terms *terms, int64_t ttl,
                             int64_t *sent_ms, uint64_t *changed, hl_error *error);
/* Deletes the holder's record. *deleted is more than 0 when there was one; with confirm. */
int hl__mysql_record_delete(hl__mysql_session *session, const hl_lease_terms *terms, bool confirm,
                            uint64_t *deleted, hl_error *error);

#endif
