/*
 * leases.c - leases in a space that has them: the operations on a record (hl_lease_ops). record.c
 * writes records; gate.c finds leases that are in the way.
 *
 * A lease has a row in the table `leases`, with its secret, its holder and its end, and rows in
 * the table `rows`, for the rows that it locks. The session that records a lease writes them in
 * the transaction that locks the rows of the buckets; a session that locks one of those later sees
 * them. The operations touch the records alone. Presence decides: a refresh finds the record or
 * does not, and does not look at the time. A waiter that finds a record whose time is up deletes
 * it, if its time is still up. Both lock the row in `leases`, so one of them is first.
 *
 * A revoked lease keeps its row in `leases`, so that its holder can ask why, and loses its rows in
 * `rows`, so that it keeps no waiter out.
 */
#include "record.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static hl__mysql_session *session_of(hl_session *session) { return (hl__mysql_session *)session; }

/* Ends the transaction that a plain read has begun. */
static int end(hl__mysql_session *session, int status, hl_error *error) {
  if (status == HL_ECONNECTION) return status;
  int sent = hl__mysql_rollback_send(session, NULL);
  return sent && status == HL_OK ? hl__mysql_gone(error) : status;
}

static int to_lease(hl_session *base, const hl_request *request, hl_grant *grant, hl_error *error) {
  return hl__mysql_record(session_of(base), request, true, grant, error);
}

/* -------------------------------------------------------------- one record */

static int gone_error(const hl_lease_terms *terms, hl_error *error) {
  return hl__record_check(&(hl__record){.again = terms->again}, error);
}

static bool is_one(const char *value) { return value && value[0] == '1'; }

/* Row: whether the lease is revoked; the revoker; the reason; whether the holder fits, or,
   by_secret, the secret; the time left, in us; the holder; whether terms->token is later; whether
   terms->turn is not. */
enum { REVOKED, BY, WHY, FITS, LEFT_US, HOLDER, BEHIND, LATE, FIELDS };
static int record_query(hl__mysql_session *session, const hl_lease_terms *terms, bool by_secret,
                        MYSQL_RES **result, hl_error *error) {
  hl__text t = {0};
  hl__text_put(&t, "SELECT l.revoked,l.revoked_by,l.reason,");
  if (by_secret)
    hl__mysql_put_secret(&t, "l.secret=", terms->secret);
  else
    hl__mysql_put_id(&t, "l.holder=", terms->holder);
  hl__text_put(&t,
               ",GREATEST(0,TIMESTAMPDIFF(MICROSECOND,UTC_TIMESTAMP(6),l.till)),"
               "HEX(l.holder),l.token DIV 256<%llu,l.turn>=%llu FROM %s l",
               (unsigned long long)(terms->token >> 8), (unsigned long long)terms->turn,
               session->store->leases);
  hl__mysql_put_id(&t, " WHERE l.id=", terms->id);
  return hl__mysql_ask(session, &t, result, error);
}

/* Judges a row of record_query, NULL if there is none; *record says what fits. */
static int row_judge(MYSQL_ROW row, const hl_lease_terms *terms, hl__record *record,
                     hl_error *error) {
  char by[64] = "", reason[128] = "";
  record->again = terms->again;
  record->there = row != NULL;
  if (row) {
    record->revoked = is_one(row[REVOKED]);
    hl__text_take(by, sizeof by, row[BY]);
    hl__text_take(reason, sizeof reason, row[WHY]);
  }
  record->by = by;
  record->reason = reason;
  int status = hl__record_check(record, error);
  record->by = record->reason = NULL;
  return status;
}

/* Whether the holder has the lease: HL_OK, and for how long; HL_ELOST, and why not. A server that
   has forgotten an upgrade has let readers in, maybe: it loses the lease. refresh: terms->turn
   counts. */
static int record_judge(hl__mysql_session *session, const hl_lease_terms *terms, bool refresh,
                        int64_t *left_ms, hl_error *error) {
  MYSQL_RES *result;
  uint64_t deleted;
  hl__record record = {HL__RECORD_FITS};
  int status = record_query(session, terms, false, &result, error);
  if (status == HL_OK) {
    MYSQL_ROW row = hl__mysql_row(result, FIELDS);
    record.holder = row && is_one(row[FITS]);
    record.behind = row && is_one(row[BEHIND]);
    record.late = row && refresh && is_one(row[LATE]);
    status = row_judge(row, terms, &record, error);
    if (status == HL_OK) *left_ms = row[LEFT_US] ? strtoll(row[LEFT_US], NULL, 10) / 1000 : 0;
  }
  mysql_free_result(result);
  if (record.behind && record.holder && !record.revoked) {
    int done = hl__mysql_record_delete(session, terms, true, &deleted, error);
    if (done) status = done;
  }
  return end(session, status, error);
}

static int lease_inspect(hl_session *base, const hl_lease_terms *terms, int64_t deadline,
                         int64_t *left_ms, hl_error *error) {
  hl__mysql_session *session = session_of(base);
  int status = hl__mysql_begin(session, deadline, error);
  return status ? status : record_judge(session, terms, false, left_ms, error);
}

/* Says why a change has changed nothing: the record is not there, or not this holder's. */
static int why(hl__mysql_session *session, const hl_lease_terms *terms, bool refresh,
               hl_error *error) {
  int64_t left;
  int status = record_judge(session, terms, refresh, &left, error);
  return status ? status : gone_error(terms, error);
}

static int lease_refresh(hl_session *base, const hl_lease_terms *terms, int64_t ttl,
                         int64_t deadline, int64_t *sent_ms, hl_error *error) {
  hl__mysql_session *session = session_of(base);
  uint64_t changed = 0;
  int status = hl__mysql_begin(session, deadline, error);
  if (status == HL_OK)
    status = hl__mysql_record_refresh(session, terms, ttl, sent_ms, &changed, error);
  if (status == HL_OK && changed == 0) status = why(session, terms, true, error);
  return status;
}

static int lease_drop(hl_session *base, const hl_lease_terms *terms, bool confirm, int64_t deadline,
                      hl_error *error) {
  hl__mysql_session *session = session_of(base);
  uint64_t deleted = 0;
  int status = hl__mysql_begin(session, confirm ? deadline : 0, error);
  if (status == HL_OK) status = hl__mysql_record_delete(session, terms, confirm, &deleted, error);
  if (status == HL_OK && confirm && deleted == 0) status = why(session, terms, false, error);
  return status;
}

/* Leaves a revoked record of the same id behind. The session that sent the recording has ended,
   and the server may still read what it sent, or be at it; so a deletion is not enough. This
   INSERT waits for one that is under way, and makes a later one fail. The tombstone is forgotten
   as others are. */
static int lease_recall(hl_session *base, const hl_lease_terms *terms, int64_t deadline,
                        hl_error *error) {
  hl__mysql_session *session = session_of(base);
  const hl__mysql_store *store = session->store;
  uint64_t affected[3];
  hl__text t = {0};
  int status = hl__mysql_begin(session, deadline, error);
  if (status) return status;
  hl__text_put(&t,
               "INSERT INTO %s (id,secret,holder,till,turn,since,token,mode,owner,"
               "label,path,application,host,pid,revoked) VALUES (",
               store->leases);
  hl__mysql_put_id(&t, "", terms->id);
  hl__mysql_put_id(&t, ",'',", terms->holder);
  hl__text_put(&t,
               ",UTC_TIMESTAMP(6),0,UTC_TIMESTAMP(6),0,0,'','','','','',0,1) "
               "ON DUPLICATE KEY UPDATE revoked=1;DELETE FROM %s",
               store->rows);
  hl__mysql_put_id(&t, " WHERE id=", terms->id);
  hl__text_put(&t, ";COMMIT");
  return hl__mysql_whole(session, &t, 3, affected, deadline, error);
}

/* A SELECT's WHERE: the holders' own records. The ids come first, as the server looks these up. */
static void put_held(hl__text *t, const hl_lease_terms *terms, size_t n) {
  hl__text_put(t, " WHERE l.id IN ");
  for (size_t i = 0; i < n; i++) hl__mysql_put_id(t, i ? "," : "(", terms[i].id);
  hl__text_put(t, ") AND (l.id,l.holder) IN (");
  for (size_t i = 0; i < n; i++) {
    hl__mysql_put_id(t, i ? "),(" : "(", terms[i].id);
    hl__mysql_put_id(t, ",", terms[i].holder);
  }
  hl__text_put(t, ")) AND l.revoked=0");
}

/* Deletes first the records that no other transaction keeps locked. So a program that ends does
   not wait for each locked record before it deletes the next. */
static int lease_drop_all(hl_session *base, const hl_lease_terms *terms, size_t n, int64_t deadline,
                          hl_error *error) {
  hl__mysql_session *session = session_of(base);
  const hl__mysql_store *store = session->store;
  uint64_t affected[5];
  hl__text t = {0};
  int status = hl__mysql_begin(session, deadline, error);
  if (status) return status;
  unsigned limits = hl__mysql_brief_begin(session, &t), statements = limits + 2;
  if (n > 1) {
    hl__text_put(&t, "DELETE d,r FROM (SELECT l.id FROM %s l", store->leases);
    put_held(&t, terms, n);
    hl__text_put(&t,
                 " FOR UPDATE SKIP LOCKED) f STRAIGHT_JOIN %s d ON d.id=f.id "
                 "LEFT JOIN %s r ON r.id=d.id;COMMIT;",
                 store->leases, store->rows);
    statements += 2;
  }
  hl__text_put(&t, "DELETE l,r FROM %s l LEFT JOIN %s r ON r.id=l.id", store->leases, store->rows);
  put_held(&t, terms, n);
  hl__text_put(&t, ";COMMIT");
  status = hl__mysql_whole(session, &t, statements, affected, deadline, error);
  hl__mysql_brief_end(session, status);
  /* The server counts the rows of both tables: it does not say how many of several were there. */
  return status == HL_OK && (n > 1 || affected[limits] == 0) ? HL__ABSENT : status;
}

/* A SELECT: 1 if the record locks just the request's rows. */
static void put_rows_fit(hl__text *t, const hl__mysql_store *store, const hl_request *request) {
  hl__text_put(t, "SELECT COUNT(*)=%zu AND SUM((r.level,r.bucket,r.x) IN (", request->n);
  for (size_t i = 0; i < request->n; i++)
    hl__text_put(t, "%s(%d,%" PRIu64 ",%d)", i ? "," : "", hl__sql_level(request->rows[i].level),
                 request->rows[i].bucket, request->rows[i].mode != HL_SHARED);
  hl__text_put(t, "))=%zu FROM %s r", request->n, store->rows);
  hl__mysql_put_id(t, " WHERE r.id=", request->lease->id);
}

/* Finds the handle that has the lease now: HL_OK, and its name in digits. HL_ELOST: why the
   importer cannot have it, though it knows the secret. */
static int holder_find(hl__mysql_session *session, const hl_lease_terms *terms, char holder[33],
                       hl_error *error) {
  MYSQL_RES *result;
  int status = record_query(session, terms, true, &result, error);
  if (status == HL_OK) {
    MYSQL_ROW row = hl__mysql_row(result, FIELDS);
    hl__record record = {HL__RECORD_FITS, .import = true};
    record.secret = row && is_one(row[FITS]);
    status = row_judge(row, terms, &record, error);
    if (status == HL_OK) (void)snprintf(holder, 33, "%.32s", row[HOLDER] ? row[HOLDER] : "");
  }
  mysql_free_result(result);
  return status;
}

/* Takes the lease over in one trip, from that holder alone, and only if the text fits the
   record; else HL__AGAIN. The first statement is a plain read. A SET would lock the rows of the
   lease before its record, and a session that deletes the record locks that first. */
static int adopt_from(hl__mysql_session *session, const hl_request *request, const char *holder,
                      int64_t deadline, hl_grant *grant, hl_error *error) {
  const hl_lease_terms *terms = request->lease;
  const hl_store_config *config = session->store->config;
  hl__text t = {0};
  uint64_t affected[3] = {0, 0, 0};
  put_rows_fit(&t, session->store, request);
  hl__text_put(&t,
               " INTO @hierlock_fits;UPDATE %s SET token=LAST_INSERT_ID(token),till=" HL__END_AFTER
               ",turn=0",
               session->store->leases, hl__mysql_us(terms->ttl));
  hl__mysql_put_id(&t, ",holder=", terms->holder);
  hl__text_put(&t, ",application=");
  hl__mysql_put_string(&t, config->application, 255);
  hl__text_put(&t, ",host=");
  hl__mysql_put_string(&t, config->host, 255);
  hl__text_put(&t, ",pid=%lld", (long long)config->pid);
  hl__mysql_put_id(&t, " WHERE id=", terms->id);
  hl__text_put(&t, " AND holder=0x%s AND revoked=0 AND @hierlock_fits;COMMIT", holder);
  grant->sent_ms = hl__boot_ms();
  int status = hl__mysql_whole(session, &t, 3, affected, deadline, error);
  grant->token = session->number;
  return status == HL_OK && affected[1] == 0 ? HL__AGAIN : status;
}

/* A change that the server carries out late, after its caller has imported again, finds another
   holder than it names, and changes nothing. */
static int lease_adopt(hl_session *base, const hl_request *request, hl_grant *grant,
                       hl_error *error) {
  hl__mysql_session *session = session_of(base);
  char holder[33], before[33] = "";
  uint8_t found[16];
  int64_t deadline = hl__late_answer_by(request->deadline); /* an import does not wait */
  for (;;) {
    int status = hl__mysql_begin(session, deadline, error);
    if (status) return status;
    status = holder_find(session, request->lease, holder, error);
    if (status == HL_OK) hl__id_read(holder, found);
    if (status == HL_OK) {
      hl__record record = {HL__RECORD_FITS, .import = true};
      record.holder = hl__replaces(request->lease, found, grant);
      record.rows = strcmp(holder, before) != 0;
      status = hl__record_check(&record, error);
    }
    if (status) return end(session, status, error);
    status = adopt_from(session, request, holder, deadline, grant, error);
    if (status != HL__AGAIN) return status;
    memcpy(before, holder, sizeof before); /* or another handle has imported it since */
  }
}

/* A downgrade has changed nothing. Finds out whether the lease is there with another token than
   the downgrade named: an upgrade that was not answered gave it that token. */
static bool token_find(hl__mysql_session *session, const hl_lease_terms *terms, uint64_t *token,
                       int64_t deadline) {
  hl__text t = {0};
  MYSQL_RES *result;
  uint64_t named = *token >> 8;
  if (hl__mysql_begin(session, deadline, NULL) != HL_OK) return false;
  hl__text_put(&t, "SELECT l.token FROM %s l", session->store->leases);
  hl__mysql_put_id(&t, " WHERE l.id=", terms->id);
  hl__mysql_put_id(&t, " AND l.holder=", terms->holder);
  int status = hl__mysql_ask(session, &t, &result, NULL);
  MYSQL_ROW row = status == HL_OK ? hl__mysql_row(result, 1) : NULL;
  bool found = row && row[0];
  if (found) *token = strtoull(row[0], NULL, 10);
  mysql_free_result(result);
  return end(session, status, NULL) == HL_OK && found && *token >> 8 > named;
}

static int lease_convert(hl_session *base, const hl_request *request, hl_grant *grant,
                         hl_error *error) {
  hl__mysql_session *session = session_of(base);
  uint64_t changed = 0;
  int64_t left;
  hl_error reason;
  int status;
  do {
    status = hl__mysql_record_convert(session, request, grant, &changed, error);
  } while (
      status == HL_OK && changed == 0 && !request->upgrade &&
      token_find(session, request->lease, &grant->token, hl__late_answer_by(request->deadline)));
  /* After the deadline the server has ended the wait, or hangs. */
  if (status == HL_ECONNECTION && atomic_load(&session->interrupted) &&
      hl__left_ms(request->deadline) > 0)
    hl__mysql_kill(session, request->deadline);
  bool unsure = status == HL_TIMEOUT || (status == HL_OK && changed == 0);
  if (!unsure) return status;
  int seen =
      lease_inspect(base, request->lease, hl__late_answer_by(request->deadline), &left, &reason);
  if (seen == HL_OK) return status;
  if (status == HL_TIMEOUT && seen != HL_ELOST) return status;
  if (error) *error = reason;
  return seen;
}

/* ------------------------------------------------------------ many records */

/* SELECT columns FROM the leases that match. over: also those whose time is up. */
static hl__text filter_sql(const hl__mysql_store *store, const hl_lease_filter *filter,
                           const char *columns, bool over) {
  hl__text t = {0};
  hl__text_put(&t, "SELECT %s FROM ", columns);
  if (filter->n > 0) {
    hl__text_put(&t, "(SELECT DISTINCT r.id FROM %s r WHERE", store->rows);
    hl__mysql_put_conflicts(&t, filter->rows, filter->n);
    hl__text_put(&t, ") c STRAIGHT_JOIN ");
  }
  hl__text_put(&t, "%s l%s WHERE l.revoked=0%s", store->leases,
               filter->n > 0 ? " ON l.id=c.id" : "", over ? "" : " AND l.till>UTC_TIMESTAMP(6)");
  if (filter->id) hl__mysql_put_id(&t, " AND l.id=", filter->id);
  if (filter->owner) {
    hl__text_put(&t, " AND l.owner=");
    hl__mysql_put_string(&t, filter->owner, HL_OWNER_MAX);
  }
  return t;
}

static void holder_read(MYSQL_ROW row, hl_holder *holder) {
  *holder = (hl_holder){.kind = HL_LEASE,
                        .mode = !is_one(row[4])   ? HL_EXCLUSIVE
                                : is_one(row[10]) ? HL_UPDATE
                                                  : HL_SHARED,
                        .pid = row[7] ? strtoll(row[7], NULL, 10) : 0,
                        .since_ms = row[8] ? strtoll(row[8], NULL, 10) : 0,
                        .remaining_ms = row[9] ? strtoll(row[9], NULL, 10) : 0};
  hl__text_take(holder->id, sizeof holder->id, row[0]);
  (void)snprintf(holder->owner, sizeof holder->owner, "%s", row[1] ? row[1] : "");
  hl__text_take(holder->label, sizeof holder->label, row[2]);
  hl__text_take(holder->path, sizeof holder->path, row[3]);
  hl__text_take(holder->application, sizeof holder->application, row[5]);
  hl__text_take(holder->host, sizeof holder->host, row[6]);
}

int hl__mysql_leases_list(hl__mysql_session *session, const hl_lease_filter *filter,
                          hl_holder_fn fn, void *context, hl_error *error) {
  char columns[512];
  (void)snprintf(columns, sizeof columns,
                 "LOWER(HEX(l.id)),l.owner,l.label,l.path,l.mode,l.application,l.host,l.pid,"
                 "TIMESTAMPDIFF(MICROSECOND,'1970-01-01',l.since) DIV 1000,"
                 "GREATEST(0,TIMESTAMPDIFF(MICROSECOND,UTC_TIMESTAMP(6),l.till)) DIV 1000,"
                 "EXISTS(SELECT 1 FROM %s u WHERE u.id=l.id AND u.level<0)",
                 session->store->rows);
  hl__text t = filter_sql(session->store, filter, columns, filter->over);
  MYSQL_RES *result;
  MYSQL_ROW row;
  if (filter->most) hl__text_put(&t, " LIMIT %zu", filter->most);
  int status = hl__mysql_ask(session, &t, &result, error);
  while (status == HL_OK && (row = hl__mysql_row(result, 11))) {
    hl_holder holder;
    holder_read(row, &holder);
    fn(context, &holder);
  }
  mysql_free_result(result);
  return status;
}

static int lease_list(hl_session *base, const hl_lease_filter *filter, hl_holder_fn fn,
                      void *context, int64_t deadline, hl_error *error) {
  hl__mysql_session *session = session_of(base);
  int status = hl__mysql_begin(session, deadline, error);
  if (status) return status;
  status = hl__mysql_leases_list(session, filter, fn, context, error);
  return end(session, status, error);
}

/* Revokes a lease, unless it was released or deleted since the filter found it. Also when its
   time is up: as long as the record is there, its holder may refresh it. The record's turn,
   which no refresh needs any more, keeps the number of the call that has ended it. */
static int revoke_one(hl__mysql_session *session, const char *id, const hl_lease_filter *filter,
                      int64_t deadline, uint64_t *count, hl_error *error) {
  const hl__mysql_store *store = session->store;
  hl__text t = {0};
  uint64_t affected[3] = {0, 0, 0};
  hl__text_put(&t, "UPDATE %s SET revoked=1,turn=%llu,revoked_by=", store->leases,
               (unsigned long long)filter->call);
  hl__mysql_put_string(&t, filter->by, 63);
  hl__text_put(&t, ",reason=");
  hl__mysql_put_string(&t, filter->reason, 127);
  hl__text_put(&t,
               " WHERE id=0x%.32s AND revoked=0;DELETE r FROM %s l JOIN %s r ON r.id=l.id WHERE "
               "l.id=0x%.32s AND l.revoked=1;COMMIT",
               id, store->leases, store->rows, id);
  int status = hl__mysql_whole(session, &t, 3, affected, deadline, error);
  if (status == HL_OK) *count += affected[0];
  return status;
}

/* Counts the leases that the call has ended, in an earlier try, too. */
static int revoked_count(hl__mysql_session *session, const hl_lease_filter *filter,
                         int64_t deadline, uint64_t *count, hl_error *error) {
  char sql[256];
  MYSQL_RES *result;
  int n = snprintf(sql, sizeof sql, "SELECT COUNT(*) FROM %s WHERE revoked=1 AND turn=%llu",
                   session->store->leases, (unsigned long long)filter->call);
  int status = hl__mysql_begin(session, deadline, error);
  if (status == HL_OK) status = hl__mysql_query(session, sql, (size_t)n, &result, error);
  if (status) return status;
  MYSQL_ROW row = hl__mysql_row(result, 1);
  if (row && row[0]) *count = strtoull(row[0], NULL, 10);
  mysql_free_result(result);
  return end(session, HL_OK, error);
}

static int lease_revoke(hl_session *base, const hl_lease_filter *filter, int64_t deadline,
                        uint64_t *count, hl_error *error) {
  hl__mysql_session *session = session_of(base);
  int status = hl__mysql_begin(session, deadline, error);
  if (status) return status;
  hl__text t = filter_sql(session->store, filter, "HEX(l.id)", true);
  MYSQL_RES *result;
  MYSQL_ROW row;
  status = hl__mysql_ask(session, &t, &result, error);
  status = end(session, status, error);
  while (status == HL_OK && (row = hl__mysql_row(result, 1))) {
    status = hl__mysql_begin(session, deadline, error);
    if (status == HL_OK && row[0])
      status = revoke_one(session, row[0], filter, deadline, count, error);
  }
  mysql_free_result(result);
  return status == HL_OK && filter->again ? revoked_count(session, filter, deadline, count, error)
                                          : status;
}

const hl_lease_ops hl__mysql_leases = {
    .refresh = lease_refresh,
    .inspect = lease_inspect,
    .drop = lease_drop,
    .drop_all = lease_drop_all,
    .recall = lease_recall,
    .convert = lease_convert,
    .adopt = lease_adopt,
    .to_lease = to_lease,
    .list = lease_list,
    .revoke = lease_revoke,
};
