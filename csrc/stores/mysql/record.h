/*
 * record.h - records of leases: writing and deleting one, and their SQL.
 */
#ifndef HIERLOCK_MYSQL_RECORD_H
#define HIERLOCK_MYSQL_RECORD_H

#include "mysql_store.h"

/* For the answers to what was sent before. */
#define HL__SETTLE_MS 1000
/* First in the text of those who record a lease, or delete many records. They wait for those who
   have the gate's row, gaps where the record goes, or one of the records: others who record, for a
   moment; transactions of hierlock.attach and of strangers, till they end. So each statement waits a
   second at most (the server's least), and what has waited in vain is tried again. The session's
   limits are unknown afterwards. */
#define HL__RECORD_LIMIT "SET SESSION innodb_lock_wait_timeout=1,lock_wait_timeout=1;"
/* So many microseconds from now, as SQL: a format. */
#define HL__END_AFTER "TIMESTAMPADD(MICROSECOND,%lld,UTC_TIMESTAMP(6))"
static inline long long hl__mysql_us(int64_t ms) { return (long long)ms * 1000; }

/* Nothing is outstanding, and the session waits until the deadline. */
int hl__mysql_begin(hl__mysql_session *session, int64_t deadline, hl_error *error);
/* As hl__mysql_commands; the last of them is COMMIT. When one fails, all are rolled back. */
int hl__mysql_changes(hl__mysql_session *session, hl__text *t, unsigned n, uint64_t *affected,
                      hl_error *error);
/* The same of a whole transaction, after hl__mysql_begin: when the server has chosen it as a deadlock's
   victim it is made again. */
int hl__mysql_whole(hl__mysql_session *session, hl__text *t, unsigned n, uint64_t *affected,
                    int64_t deadline, hl_error *error);
/* " AND l.id=" and the id */
void hl__mysql_put_id(hl__text *t, const char *column, const uint8_t id[16]);
/* The same of a secret, of which a hash is kept: who may read the table has no lease by it. */
void hl__mysql_put_secret(hl__text *t, const char *column, const uint8_t secret[16]);
void hl__mysql_put_string(hl__text *t, const char *text, size_t most);

/* The session holds the rows, and records. Commits. HL_ECONNECTION with grant->sent_ms: the
   record may be there. After any other failure nothing is. `kept`: the rows still are. */
int hl__mysql_record(hl__mysql_session *session, const hl_request *request, bool kept,
                     hl_grant *grant, hl_error *error);
/* The rows of the holder's record come to be in another mode, as hl_lease_ops.convert wants it.
   *changed: 0 when it is not there, or was so already. */
int hl__mysql_record_convert(hl__mysql_session *session, const hl_request *request, hl_grant *grant,
                             uint64_t *changed, hl_error *error);
/* The holder's record ends `ttl` from now, after hl__mysql_begin. *sent_ms: when that was sent. *changed: 0
   when it is not there, is revoked, or has seen a later turn. */
int hl__mysql_record_refresh(hl__mysql_session *session, const hl_lease_terms *terms, int64_t ttl,
                             int64_t *sent_ms, uint64_t *changed, hl_error *error);
/* The holder's. *deleted: more than 0 when it was there; with confirm. */
int hl__mysql_record_delete(hl__mysql_session *session, const hl_lease_terms *terms, bool confirm,
                            uint64_t *deleted, hl_error *error);

#endif
