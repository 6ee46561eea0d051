/*
 * leases.c - the operations on records of leases (hl_lease_ops), except taking and converting,
 * which are in record.c.
 *
 * Each operation is one statement, which commits itself and finds its record by id. Presence
 * decides: a refresh finds the record or does not, and does not check the time. A session that
 * deletes an expired record checks the time in the statement that deletes. The server orders these
 * statements, and the later one sees the effect of the earlier.
 */
#include "postgresql_store.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static hl__pg_session *session_of(hl_session *session) { return (hl__pg_session *)(void *)session; }

static int gone_error(const hl_lease_terms *terms, hl_error *error) {
  return hl__record_check(&(hl__record){.again = terms->again}, error);
}

/* Prepares the session for a statement. HL__ABSENT: there are no tables. */
static int ready(hl__pg_session *session, int64_t deadline, hl_error *error) {
  session->limit = deadline;
  int status = hl__pg_settle(session, deadline, false, error);
  if (status == HL_TIMEOUT)
    return hl__error(error, HL_ECONNECTION, "the server has not answered what came before");
  if (status == HL_OK) status = hl__pg_tables(session, false, error);
  return status;
}

/* Like ready, for an operation that does not wait. */
static int begin(hl__pg_session *session, int64_t deadline, hl_error *error) {
  (void)hl__wakeup_interruption_take(&session->wakeup); /* it was for an earlier call */
  return ready(session, deadline, error);
}

/* How many rows the statement has changed or returned. */
static int count(const hl__pg_session *session) {
  PGresult *result = session->kept;
  if (!result) return 0;
  return PQresultStatus(result) == PGRES_TUPLES_OK ? PQntuples(result) : atoi(PQcmdTuples(result));
}

static int run(hl__pg_session *session, const hl__pg_part *part, int64_t deadline,
               hl_error *error) {
  return hl__pg_pipeline_run(session, part, 1, deadline, error);
}

/* -------------------------------------------------------------- one record */

static void text_take(const PGresult *result, int row, int column, char *out, size_t size,
                      bool raw) {
  const char *field = hl__pg_field(result, row, column);
  size_t n = 0;
  unsigned char *data = field ? PQunescapeBytea((const unsigned char *)field, &n) : NULL;
  out[0] = '\0';
  if (data && raw && n < size) {
    memcpy(out, data, n);
    out[n] = '\0';
  } else if (data) {
    (void)hl__escape(out, size, (const char *)data, n);
  }
  PQfreemem(data);
}

/* $1: the lease; $2: its holder. */
static void put_names(hl__pg_part *part, const hl_lease_terms *terms) {
  hl__pg_bytes(part, terms->id, 16);
  hl__pg_bytes(part, terms->holder, 16);
}

static bool is_true(const PGresult *result, int column) {
  const char *field = hl__pg_field(result, 0, column);
  return field && *field == 't';
}

/* Reads the record, and judges it. With a holder, for an import: then that is who has the lease;
   any will do. refresh: terms->turn counts. HL_OK, HL_ELOST, HL__ABSENT, HL_ECONNECTION. */
static int record_find(hl__pg_session *session, const hl_lease_terms *terms, char holder[40],
                       bool refresh, int64_t deadline, hl_error *error) {
  hl__pg_part part = {.number = -1,
                      .sql = "SELECT l.holder=$2::uuid,l.revoked IS NOT NULL,l.revoked_by,"
                             "l.reason,l.secret=sha256($3::bytea),l.holder::text,"
                             "l.turn>=$4::int8 FROM "
                             "public.hier_lock_leases l WHERE l.id=$1::uuid"};
  char turn[24], by[128], reason[256];
  put_names(&part, terms);
  hl__pg_bytes(&part, terms->secret, 16);
  hl__pg_number(&part, turn, (int64_t)terms->turn);
  int status = run(session, &part, deadline, error);
  if (status) return status;
  const PGresult *result = session->kept;
  const char *name = hl__pg_field(result, 0, 5);
  hl__record record = {.there = name != NULL,
                       .import = holder != NULL,
                       .secret = !holder || is_true(result, 4),
                       .holder = holder || is_true(result, 0),
                       .rows = true,
                       .revoked = is_true(result, 1),
                       .by = by,
                       .reason = reason,
                       .late = refresh && is_true(result, 6),
                       .again = terms->again};
  text_take(result, 0, 2, by, sizeof by, false);
  text_take(result, 0, 3, reason, sizeof reason, false);
  if (holder) (void)snprintf(holder, 40, "%s", name ? name : "");
  return hl__record_check(&record, error);
}

#define DROP(and, bell)                                                                            \
  "WITH gone AS (DELETE FROM public.hier_lock_leases l WHERE id=$1::uuid AND "                     \
  "holder=$2::uuid AND revoked IS NULL" and                                                        \
      " RETURNING id" bell                                                                         \
      ") DELETE FROM public.hier_lock_lease_rows r USING gone WHERE r.id=gone.id"
#define BELL HL__PG_BELL("reason")

/* Says why. A server that has forgotten an upgrade has let readers in, maybe: it loses the
   lease. */
static int lost(hl__pg_session *session, const hl_lease_terms *terms, bool refresh,
                int64_t deadline, hl_error *error) {
  hl__pg_part part = {.number = -1, .sql = DROP(" AND token<$3::int8", "")};
  char token[24];
  put_names(&part, terms);
  hl__pg_number(&part, token, (int64_t)(terms->token >> 8));
  int status = run(session, &part, deadline, error);
  if (status) return status;
  if (count(session) == 0) status = record_find(session, terms, NULL, refresh, deadline, error);
  return status ? status : gone_error(terms, error);
}

static int lease_refresh(hl_session *base, const hl_lease_terms *terms, int64_t ttl,
                         int64_t deadline, int64_t *sent_ms, hl_error *error) {
  hl__pg_session *session = session_of(base);
  char number[24], turn[24], token[24];
  int status = begin(session, deadline, error);
  if (status) return status == HL__ABSENT ? gone_error(terms, error) : status;
  hl__pg_part part = {.number = HL__PG_REFRESH,
                      .sql = "UPDATE public.hier_lock_leases SET turn=$4::int8,"
                             "till=clock_timestamp()+$3::int8*interval '1 millisecond' WHERE "
                             "id=$1::uuid AND holder=$2::uuid AND revoked IS NULL AND "
                             "turn<$4::int8 AND token>=$5::int8"};
  put_names(&part, terms);
  hl__pg_number(&part, number, ttl);
  hl__pg_number(&part, turn, (int64_t)terms->turn);
  hl__pg_number(&part, token, (int64_t)(terms->token >> 8));
  *sent_ms = hl__boot_ms();
  status = run(session, &part, deadline, error);
  if (status) return status;
  return count(session) == 1 ? HL_OK : lost(session, terms, true, deadline, error);
}

static int lease_inspect(hl_session *base, const hl_lease_terms *terms, int64_t deadline,
                         int64_t *left_ms, hl_error *error) {
  hl__pg_session *session = session_of(base);
  char token[24];
  int status = begin(session, deadline, error);
  if (status) return status == HL__ABSENT ? gone_error(terms, error) : status;
  hl__pg_part part = {.number = -1,
                      .sql = "SELECT " HL__PG_LEFT
                             " FROM public.hier_lock_leases l WHERE l.id=$1::uuid AND "
                             "l.holder=$2::uuid AND l.revoked IS NULL AND l.token>=$3::int8"};
  put_names(&part, terms);
  hl__pg_number(&part, token, (int64_t)(terms->token >> 8));
  status = run(session, &part, deadline, error);
  if (status) return status;
  const char *left = hl__pg_field(session->kept, 0, 0);
  if (!left) return lost(session, terms, false, deadline, error);
  int64_t ms = strtoll(left, NULL, 10);
  *left_ms = ms > 0 ? ms : 0;
  return HL_OK;
}

static int lease_drop(hl_session *base, const hl_lease_terms *terms, bool confirm, int64_t deadline,
                      hl_error *error) {
  hl__pg_session *session = session_of(base);
  hl__pg_part part = {.number = -1, .sql = session->rings ? DROP("", BELL) : DROP("", "")};
  put_names(&part, terms);
  if (confirm) {
    int status = begin(session, deadline, error);
    if (status) return status == HL__ABSENT ? gone_error(terms, error) : status;
    part.number = HL__PG_DROP;
    status = run(session, &part, deadline, error);
    if (status) return status;
    return count(session) > 0 ? HL_OK : lost(session, terms, false, deadline, error);
  }
  int status = hl__pg_settle(session, deadline, false, error);
  if (status == HL_TIMEOUT)
    return hl__error(error, HL_ECONNECTION, "the server has not answered what came before");
  if (status) return status;
  return hl__pg_pipeline(session, &part, 1, error);
}

#define DROP_ALL(bell)                                                                             \
  "WITH gone AS (DELETE FROM public.hier_lock_leases l USING "                                     \
  "unnest($1::uuid[],$2::uuid[]) u(id,holder) WHERE l.id=u.id AND "                                \
  "l.holder=u.holder AND l.revoked IS NULL RETURNING l.id" bell "),freed AS (DELETE FROM "         \
  "public.hier_lock_lease_rows r USING gone WHERE r.id=gone.id) SELECT id FROM gone"

static int lease_drop_all(hl_session *base, const hl_lease_terms *terms, size_t n, int64_t deadline,
                          hl_error *error) {
  hl__pg_session *session = session_of(base);
  hl__pg_part part = {.number = -1, .sql = session->rings ? DROP_ALL(BELL) : DROP_ALL("")};
  int status = begin(session, deadline, error);
  if (status) return status == HL__ABSENT ? gone_error(terms, error) : status;
  char *ids = malloc(2 * (n * 33 + 2));
  if (!ids) return hl__error_memory(error);
  char *holders = ids + n * 33 + 2, *id = ids, *holder = holders;
  for (size_t i = 0; i < n; i++) {
    *id++ = *holder++ = i ? ',' : '{';
    id = hl__hex(id, terms[i].id, 16);
    holder = hl__hex(holder, terms[i].holder, 16);
  }
  strcpy(id, "}");
  strcpy(holder, "}");
  hl__pg_value(&part, ids);
  hl__pg_value(&part, holders);
  status = run(session, &part, deadline, error);
  free(ids);
  return status == HL_OK && (size_t)count(session) < n ? HL__ABSENT : status;
}

/* The server may still read, or be running, a grant sent on a connection that has ended here. So
   deleting the record is not enough. RECALL leaves a revoked record with the same id: its INSERT
   waits for a grant that is running, and a later grant fails. The sweep removes it like others. The
   second statement sees what the first has waited for. */
#define RECALL                                                                                     \
  "INSERT INTO public.hier_lock_leases AS l (id,holder,secret,till,token,"                         \
  "shared,owner,path,label,application,host,pid,since,revoked) SELECT "                            \
  "$1::uuid,$2::uuid,'',t,0,false,'','','','','',0,t,t FROM "                                      \
  "clock_timestamp() t ON CONFLICT (id) DO UPDATE SET "                                            \
  "revoked=coalesce(l.revoked,excluded.revoked)"

static int lease_recall(hl_session *base, const hl_lease_terms *terms, int64_t deadline,
                        hl_error *error) {
  hl__pg_session *session = session_of(base);
  hl__pg_part parts[2] = {
      {.number = -1, .sql = RECALL},
      {.number = -1, .sql = "DELETE FROM public.hier_lock_lease_rows WHERE id=$1::uuid"}};
  put_names(&parts[0], terms);
  hl__pg_bytes(&parts[1], terms->id, 16);
  int status = begin(session, deadline, error);
  if (status) return status == HL__ABSENT ? HL_OK : status;
  return hl__pg_pipeline_run(session, parts, 2, deadline, error);
}

/* $5: keys; $6: keys locked exclusively; $7: number of keys; $11: the holder so far. */
#define ADOPT                                                                                      \
  "UPDATE public.hier_lock_leases l SET holder=$2::uuid,turn=0,"                                   \
  "till=clock_timestamp()+$4::int8*interval '1 millisecond',"                                      \
  "application=$8::bytea,host=$9::bytea,pid=$10::int8 WHERE l.id=$1::uuid "                        \
  "AND l.secret=sha256($3::bytea) AND l.holder=$11::uuid AND l.revoked IS NULL AND "               \
  "(SELECT count(*)=$7::int8 AND bool_and(r.key=ANY($5::int8[]) AND "                              \
  "r.exclusive=(r.key=ANY($6::int8[]))) FROM public.hier_lock_lease_rows r "                       \
  "WHERE r.id=$1::uuid) RETURNING l.token"

static int adopt_from(hl__pg_session *session, const hl_request *request, const char *holder,
                      int64_t deadline, hl_grant *grant, hl_error *error) {
  const hl_lease_terms *terms = request->lease;
  const hl_store_config *config = session->store->config;
  char ttl[24], n[24], pid[24];
  char *keys = hl__pg_keys(request->rows, request->n, false);
  char *exclusive = hl__pg_keys(request->rows, request->n, true);
  hl__pg_part part = {.number = HL__PG_ADOPT, .sql = ADOPT};
  int status = HL_OK;
  if (keys && exclusive) {
    put_names(&part, terms);
    hl__pg_bytes(&part, terms->secret, 16);
    hl__pg_number(&part, ttl, terms->ttl);
    hl__pg_value(&part, keys);
    hl__pg_value(&part, exclusive);
    hl__pg_number(&part, n, (int64_t)request->n);
    hl__pg_bytes(&part, config->application, strlen(config->application));
    hl__pg_bytes(&part, config->host, strlen(config->host));
    hl__pg_number(&part, pid, config->pid);
    hl__pg_value(&part, holder);
    grant->sent_ms = hl__boot_ms();
    status = run(session, &part, deadline, error);
  } else {
    status = hl__error_memory(error);
  }
  free(keys);
  free(exclusive);
  return status;
}

/* An import that is carried out late, after its caller has given up and imported again, finds
   another holder than it names, and changes nothing. */
static int lease_adopt(hl_session *base, const hl_request *request, hl_grant *grant,
                       hl_error *error) {
  hl__pg_session *session = session_of(base);
  char holder[40], before[40] = "";
  uint8_t found[16];
  const char *token = NULL;
  int64_t deadline = hl__late_answer_by(request->deadline); /* an import does not wait for locks */
  int status = ready(session, deadline, error); /* settle forgets earlier interruptions */
  if (status) return status == HL__ABSENT ? gone_error(request->lease, error) : status;
  while (!token) {
    status = record_find(session, request->lease, holder, false, deadline, error);
    if (status) return status;
    if (atomic_load(&session->wakeup.interrupted)) /* that holder may be a later import */
      return hl__error(error, HL_CANCELLED, "the import was interrupted");
    hl__id_read(holder, found);
    hl__record record = {HL__RECORD_FITS, .import = true};
    record.holder = hl__replaces(request->lease, found, grant);
    record.rows = strcmp(holder, before) != 0;
    status = hl__record_check(&record, error);
    if (status) return status;
    status = adopt_from(session, request, holder, deadline, grant, error);
    if (status) return status;
    token = hl__pg_field(session->kept, 0, 0);
    memcpy(before, holder, sizeof before); /* if that fails, the lease was imported meanwhile */
  }
  grant->token = strtoull(token, NULL, 10) << 8;
  return HL_OK;
}

/* Called when a downgrade has changed nothing. Whether the lease exists with another token than
   *token, because an unanswered upgrade was carried out; then *token is that one. */
static bool token_find(hl__pg_session *session, const hl_lease_terms *terms, uint64_t *token,
                       int64_t deadline) {
  hl__pg_part part = {.number = -1,
                      .sql = "SELECT l.token FROM public.hier_lock_leases l WHERE "
                             "l.id=$1::uuid AND l.holder=$2::uuid AND l.revoked IS NULL"};
  put_names(&part, terms);
  if (run(session, &part, deadline, NULL) != HL_OK) return false;
  const char *found = hl__pg_field(session->kept, 0, 0);
  uint64_t named = *token >> 8;
  if (found) *token = strtoull(found, NULL, 10) << 8;
  return found && *token >> 8 > named;
}

static int lease_convert(hl_session *base, const hl_request *request, hl_grant *grant,
                         hl_error *error) {
  hl__pg_session *session = session_of(base);
  const hl_lease_terms *terms = request->lease;
  int64_t left, limit = hl__late_answer_by(request->deadline);
  hl_error reason;
  int status = ready(session, limit, error);
  if (status) return status == HL__ABSENT ? gone_error(terms, error) : status;
  do {
    status = hl__pg_lease_convert(session, request, grant, error);
  } while (status == HL_ELOST && !request->upgrade &&
           token_find(session, terms, &grant->token, limit));
  if (status == HL_ELOST) return lost(session, terms, false, limit, error);
  /* settle forgets a later one. */
  (void)hl__wakeup_interruption_take(&session->wakeup);
  /* The rows may be locked because the lease has ended. */
  if (status == HL_TIMEOUT && lease_inspect(base, terms, limit, &left, &reason) == HL_ELOST) {
    if (error) *error = reason;
    return HL_ELOST;
  }
  return status;
}

/* ------------------------------------------------------------ many records */

enum { ID, OWNER, PATH, LABEL, APPLICATION, HOST, PID, SHARED, UPDATE, SINCE, LEFT, COLUMNS };

/* $1: owner; $2: id; $3: keys; $4: keys wanted exclusively; NULL: any. */
#define MATCHES                                                                                    \
  "l.revoked IS NULL AND "                                                                         \
  "($1::bytea IS NULL OR l.owner=$1) AND ($2::uuid IS NULL OR l.id=$2) AND "                       \
  "($3::int8[] IS NULL OR l.id IN (SELECT id FROM "                                                \
  "public.hier_lock_lease_rows WHERE exclusive AND key=ANY($3) UNION ALL "                         \
  "SELECT id FROM public.hier_lock_lease_rows WHERE key=ANY($4::int8[])))"

/* Appends the parameters of MATCHES. The caller frees *keys and *exclusive. */
static int filter_fill(hl__pg_part *part, const hl_lease_filter *filter, char **keys,
                       char **exclusive, hl_error *error) {
  *keys = filter->n ? hl__pg_keys(filter->rows, filter->n, false) : NULL;
  *exclusive = filter->n ? hl__pg_keys(filter->rows, filter->n, true) : NULL;
  if (filter->n && (!*keys || !*exclusive)) return hl__error_memory(error);
  if (filter->owner)
    hl__pg_bytes(part, filter->owner, strlen(filter->owner));
  else
    hl__pg_value(part, NULL);
  if (filter->id)
    hl__pg_bytes(part, filter->id, 16);
  else
    hl__pg_value(part, NULL);
  hl__pg_value(part, *keys);
  hl__pg_value(part, *exclusive);
  return HL_OK;
}

static void holder_read(const PGresult *result, int row, hl_holder *holder) {
  const char *id = hl__pg_field(result, row, ID);
  const char *pid = hl__pg_field(result, row, PID);
  const char *shared = hl__pg_field(result, row, SHARED);
  const char *update = hl__pg_field(result, row, UPDATE);
  const char *since = hl__pg_field(result, row, SINCE);
  const char *left = hl__pg_field(result, row, LEFT);
  *holder = (hl_holder){.kind = HL_LEASE,
                        .pid = pid ? strtoll(pid, NULL, 10) : 0,
                        .since_ms = since ? strtoll(since, NULL, 10) : 0,
                        .mode = !shared || *shared != 't'  ? HL_EXCLUSIVE
                                : update && *update == 't' ? HL_UPDATE
                                                           : HL_SHARED,
                        .remaining_ms = left ? strtoll(left, NULL, 10) : 0};
  if (holder->remaining_ms < 0) holder->remaining_ms = 0;
  text_take(result, row, OWNER, holder->owner, sizeof holder->owner, true);
  text_take(result, row, PATH, holder->path, sizeof holder->path, false);
  text_take(result, row, LABEL, holder->label, sizeof holder->label, false);
  text_take(result, row, APPLICATION, holder->application, sizeof holder->application, false);
  text_take(result, row, HOST, holder->host, sizeof holder->host, false);
  char *at = holder->id;
  for (; id && *id && at < holder->id + sizeof holder->id - 1; id++)
    if (*id != '-') *at++ = *id;
}

static int list(hl__pg_session *session, const hl_lease_filter *filter, hl_holder_fn fn,
                void *context, int64_t deadline, hl_error *error) {
  char *keys, *exclusive, most[24];
  hl__pg_part part = {
      .number = -1,
      .sql = "SELECT * FROM (SELECT l.id,l.owner,l.path,l.label,l.application,l.host,l.pid,"
             "l.shared,EXISTS(SELECT FROM public.hier_lock_lease_rows u WHERE "
             "u.id=l.id AND u.key<0),(extract(epoch FROM l.since)*1000)::int8 AS since," HL__PG_LEFT
             " FROM public.hier_lock_leases l WHERE " MATCHES
             " AND ($5::boolean OR l.till>clock_timestamp()) LIMIT $6::int8) "
             "found ORDER BY since,id"};
  int status = filter_fill(&part, filter, &keys, &exclusive, error);
  hl__pg_value(&part, filter->over ? "t" : "f");
  if (filter->most)
    hl__pg_number(&part, most, (int64_t)filter->most);
  else
    hl__pg_value(&part, NULL);
  if (status == HL_OK) status = run(session, &part, deadline, error);
  free(keys);
  free(exclusive);
  if (status) return status;
  for (int i = 0; i < PQntuples(session->kept); i++) {
    hl_holder holder;
    holder_read(session->kept, i, &holder);
    fn(context, &holder);
  }
  return HL_OK;
}

static int lease_list(hl_session *base, const hl_lease_filter *filter, hl_holder_fn fn,
                      void *context, int64_t deadline, hl_error *error) {
  hl__pg_session *session = session_of(base);
  int status = begin(session, deadline, error);
  if (status == HL_OK) status = hl__pg_sweep(session, error);
  if (status) return status == HL__ABSENT ? HL_OK : status;
  return list(session, filter, fn, context, deadline, error);
}

int hl__pg_lease_holders(hl__pg_session *session, const hl_lease_filter *filter, hl_holder_fn fn,
                         void *context, hl_error *error) {
  /* The state of the gate when this session last locked something: a lease in its way was there
     then. */
  if (session->gate != HL__PG_GATE_OPEN && !session->gated && !session->ready) return HL_OK;
#ifdef LIBPQ_HAS_PIPELINING
  int status = hl__pg_tables(session, false, error);
  if (status) return status == HL__ABSENT ? HL_OK : status;
  return list(session, filter, fn, context, session->patience, error);
#else
  (void)filter, (void)fn, (void)context, (void)error;
  return HL_OK;
#endif
}

/* Locks the records in the order of their ids, so that two calls do not deadlock. Includes expired
   ones: a refresh can revive them while the record exists. `turn`, which no refresh needs any more,
   says which call has ended a record ($7). */
#define REVOKE(bell)                                                                               \
  "WITH found AS (SELECT l.id,l.reason AS bell FROM public.hier_lock_leases l WHERE " MATCHES      \
  " ORDER BY l.id FOR UPDATE),ended AS (UPDATE public.hier_lock_leases l SET "                     \
  "revoked=clock_timestamp(),revoked_by=$5::bytea,reason=$6::bytea,turn=$7::int8 FROM "            \
  "found WHERE l.id=found.id RETURNING l.id" bell "),freed AS (DELETE FROM "                       \
  "public.hier_lock_lease_rows r USING ended WHERE r.id=ended.id) "                                \
  "SELECT count(*) FROM ended"

/* Counts also the leases that an earlier try of the call has ended. */
static int revoked_count(hl__pg_session *session, const char *call, int64_t deadline,
                         hl_error *error) {
  hl__pg_part part = {.number = -1,
                      .sql = "SELECT count(*) FROM public.hier_lock_leases WHERE "
                             "revoked IS NOT NULL AND turn=$1::int8"};
  hl__pg_value(&part, call);
  return run(session, &part, deadline, error);
}

static int lease_revoke(hl_session *base, const hl_lease_filter *filter, int64_t deadline,
                        uint64_t *number, hl_error *error) {
  hl__pg_session *session = session_of(base);
  char *keys, *exclusive, call[24];
  hl__pg_part part = {.number = -1,
                      .sql = session->rings ? REVOKE(HL__PG_BELL("found.bell")) : REVOKE("")};
  int status = begin(session, deadline, error);
  if (status) return status == HL__ABSENT ? HL_OK : status;
  status = filter_fill(&part, filter, &keys, &exclusive, error);
  hl__pg_bytes(&part, filter->by, strlen(filter->by));
  hl__pg_bytes(&part, filter->reason, strlen(filter->reason));
  hl__pg_number(&part, call, (int64_t)filter->call);
  if (status == HL_OK) status = run(session, &part, deadline, error);
  free(keys);
  free(exclusive);
  if (status == HL_OK && filter->again) status = revoked_count(session, call, deadline, error);
  if (status) return status;
  const char *text = hl__pg_field(session->kept, 0, 0);
  *number = text ? strtoull(text, NULL, 10) : 0;
  return HL_OK;
}

const hl_lease_ops hl__pg_leases = {
    .refresh = lease_refresh,
    .inspect = lease_inspect,
    .drop = lease_drop,
    .drop_all = lease_drop_all,
    .recall = lease_recall,
    .convert = lease_convert,
    .adopt = lease_adopt,
    .to_lease = hl__pg_to_lease,
    .list = lease_list,
    .revoke = lease_revoke,
};
