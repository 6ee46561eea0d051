/*
 * server.c - does this server exclude, and is its table the right one? A lock on a replica, in a
 * multi-primary cluster or on a table of another engine succeeds and protects nothing; so it is
 * refused here. Each new connection asks: after a fail-over the next one may lead to another
 * server.
 */
#include "mysql_store.h"

#include "layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char variables_sql[] = "SHOW GLOBAL VARIABLES WHERE " HL__MYSQL_VARIABLES;

/* A proxy may send a locking SELECT to a replica, or two statements of a transaction to two
   servers. ProxySQL answers the text SELECT CONNECTION_ID() by itself, and no other text, with
   the number of its greeting (handler of COM_QUERY in its MySQL_Session.cpp). So we ask in other
   words. */
static const char connection_sql[] = "SELECT 0+CONNECTION_ID()";

static int proxy_refuse(const hl__mysql_session *session, MYSQL_RES *result, hl_error *error) {
  MYSQL_ROW row = hl__mysql_row(result, 1);
  if (row && row[0] && strtoul(row[0], NULL, 10) == mysql_thread_id(session->mysql)) return HL_OK;
  return hl__error(error, HL_EUNSAFE_SERVER,
                   "a proxy stands before the server, and may send locks "
                   "elsewhere: connect to the server itself");
}

/* The statement has its own limit: the session's may be left from a very short wait. */
int hl__mysql_table_sql(const hl__mysql_session *session, char *out, size_t size) {
  bool mariadb = session->dialect == HL_MARIADB;
  return snprintf(out, size,
                  "%sSELECT%s DATABASE(),(SELECT ENGINE FROM information_schema.TABLES WHERE "
                  "TABLE_SCHEMA=DATABASE() AND TABLE_NAME='%s' AND TABLE_TYPE='BASE TABLE')",
                  mariadb ? "SET STATEMENT max_statement_time=1 FOR " : "",
                  mariadb ? "" : " /*+ MAX_EXECUTION_TIME(1000) */", session->store->table);
}

int hl__mysql_table_refuse(hl__mysql_session *session, MYSQL_RES *result, hl_error *error) {
  const char *table = session->store->table;
  MYSQL_ROW row = hl__mysql_row(result, 2);
  if (!row || !row[0]) return hl__error(error, HL_EDSN, "the DSN names no database");
  /* When the time is up, MariaDB shows the table as absent, with a warning. */
  if (!row[1] && mysql_warning_count(session->mysql) > 0)
    return hl__error(error, HL_TIMEOUT, "the server could not look at the table %s in time", table);
  int status = hl__mysql_table_judge(session->dialect == HL_MARIADB, row[0], table, row[1], error);
  if (status == HL_OK) session->checked = hl__boot_ms();
  return status;
}

int hl__mysql_table_check(hl__mysql_session *session, hl_error *error) {
  char sql[HL__MYSQL_TABLE_SQL];
  MYSQL_RES *result;
  int n = hl__mysql_table_sql(session, sql, sizeof sql);
  int status = hl__mysql_query(session, sql, (size_t)n, &result, error);
  if (status) return status;
  status = hl__mysql_table_refuse(session, result, error);
  mysql_free_result(result);
  return status;
}

/* On MariaDB, a KILL QUERY that hits this check makes the table seem absent, without an error or
   a warning. So a check that sees no table is repeated. */
static int absence_confirm(hl__mysql_session *session, hl_error *error) {
  int status = HL_ENOT_PROVISIONED;
  for (int looks = 0; status == HL_ENOT_PROVISIONED && looks < 2; looks++)
    status = hl__mysql_table_check(session, error);
  return status;
}

/* The last question, as there may be no such table. */
static int layout_sql(const hl__mysql_session *session, char *out, size_t size) {
  return snprintf(out, size, "SELECT buckets,levels FROM hier_lock_meta WHERE table_name='%s'",
                  session->store->space);
}

/* A space with leases has this before the levels in its record, so that programs which know of
   no leases refuse it: no name of a level has a colon. */
static const char leased_mark[] = "leases:";

/* Names the tables of a space with leases: see sql/leases.sql. */
static int leased_names(hl__mysql_store *store, hl_error *error) {
  static const char suffix[] = "_buckets";
  size_t n = strlen(store->space), m = sizeof suffix - 1;
  if (n > m && strcmp(store->space + n - m, suffix) == 0) n -= m;
  if (n + 7 > HL__MYSQL_NAME_MAX)
    return hl__error(error, HL_EDSN, "the name %s is too long for leases", store->space);
  const struct {
    char *name;
    const char *suffix;
  } names[] = {{store->table, "_nodes"},
               {store->leases, "_leases"},
               {store->rows, "_leased"},
               {store->gate, "_gate"}};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    (void)snprintf(names[i].name, HL__MYSQL_NAME_MAX + 1, "%.*s%s", (int)n, store->space,
                   names[i].suffix);
  return HL_OK;
}

/* The first session settles whether the space has leases. When the space gets them later, this
   program's table is gone; a later session that sees another kind of space than the first is
   refused. */
static int leased_agree(const hl__mysql_session *session, bool leased, hl_error *error) {
  hl__mysql_store *store = session->store;
  if (store->base.layout && store->leased != leased)
    return hl__error(error, HL_EMISMATCH,
                     "the space %s was provisioned anew, with leases or without: open it again",
                     store->space);
  if (!leased || store->leased) return HL_OK;
  int status = leased_names(store, error);
  if (status == HL_OK) store->leased = true;
  return status;
}

/* Compares the layout with the record of the table. A table without a record, as other tools
   make it, is taken to have the default layout. row is NULL without a record, or without
   hier_lock_meta. The first session settles what the program has left open; no other thread has
   the store then. */
static int layout_refuse(const hl__mysql_session *session, MYSQL_ROW row, hl_error *error) {
  hl__mysql_store *store = session->store;
  char space[200];
  hl_layout *agreed;
  bool recorded = row && row[0] && row[1];
  const char *levels = recorded ? row[1] : "user,account,resource";
  size_t mark = sizeof leased_mark - 1;
  bool leased = strncmp(levels, leased_mark, mark) == 0;
  if (leased) levels += mark;
  int status = leased_agree(session, leased, error);
  if (status) return status;
  (void)snprintf(space, sizeof space, "the table %s%s", store->space,
                 recorded ? "" : " (as hier_lock_meta does not say)");
  const hl__space found = {space, levels,
                           recorded ? (uint32_t)strtoul(row[0], NULL, 10) : HL_BUCKETS_DEFAULT, 0,
                           "name another table (?table=), made by `hierlock provision`"};
  status = hl__layout_agree(store->base.layout ? store->base.layout : store->config->layout, &found,
                            &agreed, error);
  if (status) return status;
  if (store->base.layout)
    hl_layout_unref(agreed);
  else
    store->base.layout = agreed;
  return HL_OK;
}

/* A session that took the defaults although there is a record would lock other rows than all
   others. A KILL QUERY may have cut the answer that shows no record, so we ask again. */
static int layout_confirm(hl__mysql_session *session, const char *sql, hl_error *error) {
  MYSQL_RES *result;
  int status = hl__mysql_query(session, sql, strlen(sql), &result, error);
  if (status == HL_OK || status == HL_ENOT_PROVISIONED)
    status = layout_refuse(session, hl__mysql_row(result, 2), error);
  mysql_free_result(result);
  return status;
}

/* A connection's number means something only to the server that gave it, and only until that
   server ends: the next life counts from one again. So the number is kept with the server's name
   and the second of its start. Both servers count Uptime by the clock that NOW() shows, so the
   difference stays the same even when the clock is set. */
static const char *identity_sql(const hl__mysql_session *session) {
  if (session->dialect == HL_MARIADB)
    return "SELECT CONCAT_WS(' ',UNIX_TIMESTAMP()-CAST(VARIABLE_VALUE AS "
           "SIGNED),@@server_id,@@hostname,@@port),VARIABLE_VALUE "
           "FROM information_schema.GLOBAL_STATUS WHERE VARIABLE_NAME='UPTIME'";
  return "SELECT CONCAT_WS(' ',UNIX_TIMESTAMP()-CAST(VARIABLE_VALUE AS "
         "SIGNED),@@server_uuid,@@hostname,@@port),VARIABLE_VALUE "
         "FROM performance_schema.global_status WHERE VARIABLE_NAME='Uptime'";
}

/* Returns whether this is the second of the server's start. Tokens begin with that second. A
   server that is killed and starts again within it would give the same tokens again, and have
   the same identity. So no session is used before the next second. */
static bool identity_read(hl__mysql_session *session, MYSQL_RES *result) {
  MYSQL_ROW row = hl__mysql_row(result, 2);
  session->id = mysql_thread_id(session->mysql);
  (void)snprintf(session->server, sizeof session->server, "%s", row && row[0] ? row[0] : "");
  return row && row[1] && strcmp(row[1], "0") == 0;
}

static int identify(hl__mysql_session *session, bool *young, hl_error *error) {
  const char *sql = identity_sql(session);
  MYSQL_RES *result;
  int status = hl__mysql_query(session, sql, strlen(sql), &result, error);
  if (status) return status;
  *young = identity_read(session, result);
  mysql_free_result(result);
  return HL_OK;
}

int hl__mysql_identify(hl__mysql_session *session, hl_error *error) {
  bool young;
  hl__mysql_waits_bound(session, true);
  int status = identify(session, &young, error);
  hl__mysql_waits_bound(session, false);
  return status;
}

static int tokens_wait(hl__mysql_session *session, hl_error *error) {
  static const struct timespec moment = {.tv_nsec = 50000000};
  int status = HL_OK;
  for (bool young = true; young && status == HL_OK;) {
    (void)nanosleep(&moment, NULL);
    status = identify(session, &young, error);
  }
  return status;
}

/* The least limit, for the questions in the same trip, even if a program waits for no lock. */
#define WAIT_LEAST_MS 1000

/* Sets all session variables that we rely on and that an administrator may have changed, but for
   those that statement.c sets with the first lock. After `wait_timeout` of silence the server
   ends the session, and frees its locks. */
static void session_sql(hl__mysql_session *session, char *out, size_t size) {
  const hl_store_config *config = session->store->config;
  char limits[160];
  /* statement.c wants this limit for a wait of the usual length */
  session->wait = 1 + (config->timeout > HL__MYSQL_WAIT_MAX ? HL__MYSQL_WAIT_MAX : config->timeout);
  if (session->wait < WAIT_LEAST_MS) session->wait = WAIT_LEAST_MS;
  (void)hl__mysql_limits(session, session->wait, limits, sizeof limits);
  int64_t lease = (config->hold_timeout + 999) / 1000;
  (void)snprintf(out, size,
                 "SET SESSION autocommit=1,completion_type=0,sql_select_limit=18446744073709551615,"
                 "sql_big_selects=1,wait_timeout=%lld,%s%s",
                 (long long)lease, limits,
                 session->dialect == HL_MARIADB ? ",idle_transaction_timeout=0,"
                                                  "idle_readonly_transaction_timeout=0,"
                                                  "idle_write_transaction_timeout=0"
                                                : "");
}

/* Judges the version of the greeting, as an old server would not understand the next questions.
   A proxy may have greeted us, so variables_refuse judges the server's own version later. */
static int greeting_refuse(const hl__mysql_session *session, hl_error *error) {
  return hl__mysql_version_judge(mysql_get_server_info(session->mysql), error);
}

static int variables_refuse(hl__mysql_session *session, MYSQL_RES *result, hl_error *error) {
  hl__fact facts[HL__FACTS_MAX + 1] = {{0}};
  MYSQL_ROW row;
  for (int n = 0; n < HL__FACTS_MAX && (row = hl__mysql_row(result, 2)); n++)
    facts[n] = (hl__fact){row[0] ? row[0] : "", row[1]};
  session->repeatable = hl__mysql_logs_statements(facts);
  return hl__mysql_server_judge(facts, error);
}

int hl__mysql_verify_server(hl__mysql_session *session, hl_error *error) {
  MYSQL_RES *result = NULL;
  int status = greeting_refuse(session, error);
  if (status) return status;
  status = hl__mysql_query(session, variables_sql, sizeof variables_sql - 1, &result, error);
  if (status == HL_OK) status = variables_refuse(session, result, error);
  mysql_free_result(result);
  if (status) return status;
  status = hl__mysql_query(session, connection_sql, sizeof connection_sql - 1, &result, error);
  if (status == HL_OK) status = proxy_refuse(session, result, error);
  mysql_free_result(result);
  return status;
}

enum { SET, VARIABLES, CONNECTION, IDENTITY, TABLE, LAYOUT, QUESTIONS };

/* The first questions go in one trip, as connecting over a slow line takes long enough. A
   library that does not tell us when it waits bounds its wait for the first answer only. There
   the last question has a trip of its own: a transaction that locks hier_lock_meta keeps its
   answer back. */
#ifdef HL__BOUNDS_WAITS
enum { TOGETHER = QUESTIONS };
#else
enum { TOGETHER = LAYOUT };
#endif

/* Asks the i-th question. *result is NULL where the question has none, or no answer came. */
static int ask(hl__mysql_session *session, const char *const *questions, int i, MYSQL_RES **result,
               hl_error *error) {
  char together[4096];
  const char *sql = questions[i];
  if (i == 0) {
    size_t n = 0;
    for (int k = 0; k < TOGETHER; k++)
      n += (size_t)snprintf(together + n, sizeof together - n, "%s%s", k ? ";" : "", questions[k]);
    sql = together;
  }
  if (i == 0 || i >= TOGETHER) return hl__mysql_query(session, sql, strlen(sql), result, error);
  *result = NULL;
  hl__sigpipe guard = hl__sigpipe_begin(session);
  int next = mysql_next_result(session->mysql); /* -1: no more results */
  if (next == 0) *result = mysql_store_result(session->mysql);
  hl__sigpipe_end(guard, !*result);
  if (next > 0 || (next == 0 && !*result && mysql_field_count(session->mysql)))
    return hl__mysql_error(session, NULL, "query the server", error);
  return HL_OK;
}

/* The questions that remain when all answers are there. */
typedef struct asked_later {
  bool young;      /* see identity_read */
  bool absent;     /* no table was seen */
  bool unrecorded; /* no record of its layout was seen */
} asked_later;

/* Judges the server by the answer to the i-th question. */
static int judge(hl__mysql_session *session, int i, MYSQL_RES *result, asked_later *later,
                 hl_error *error) {
  int status;
  MYSQL_ROW row;
  switch (i) {
  case VARIABLES: return variables_refuse(session, result, error);
  case CONNECTION: return proxy_refuse(session, result, error);
  case IDENTITY: later->young = identity_read(session, result); return HL_OK;
  case TABLE:
    status = hl__mysql_table_refuse(session, result, error);
    later->absent = status == HL_ENOT_PROVISIONED;
    return later->absent ? HL_OK : status;
  case LAYOUT:
    row = hl__mysql_row(result, 2);
    later->unrecorded = !row;
    return row ? layout_refuse(session, row, error) : HL_OK;
  default: return HL_OK;
  }
}

/* The session writes records in READ COMMITTED, which locks no gaps; also before its first lock.
   A server that logs statements writes nothing in READ COMMITTED. */
static int leased_begin(hl__mysql_session *session, bool first, hl_error *error) {
  static const char sql[] = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE";
  uint64_t none;
  int status = hl__mysql_leases_judge(session->repeatable, error);
  if (status == HL_OK && first) status = absence_confirm(session, error);
  return status ? status : hl__mysql_commands(session, sql, sizeof sql - 1, 1, &none, error);
}

/* Autocommit is on until the first lock, so the checks leave no transaction. */
static int verify(hl__mysql_session *session, hl_error *error) {
  char set[512], table[HL__MYSQL_TABLE_SQL], layout[192];
  const char *questions[QUESTIONS] = {set,   variables_sql, connection_sql, identity_sql(session),
                                      table, layout};
  asked_later later = {.young = false};
  bool first = !session->store->base.layout;
  int status = greeting_refuse(session, error);
  if (status) return status;
  session_sql(session, set, sizeof set);
  /* The first session does not know yet whether there are leases: see leased_agree. */
  if (first) strcpy(session->store->table, session->store->space);
  (void)hl__mysql_table_sql(session, table, sizeof table);
  (void)layout_sql(session, layout, sizeof layout);
  hl__mysql_waits_bound(session, true);
  for (int i = SET; i < QUESTIONS && status == HL_OK; i++) {
    MYSQL_RES *result = NULL;
    status = ask(session, questions, i, &result, error);
    if (status == HL_OK && !result && i != SET)
      status = hl__error(error, HL_ECONNECTION, "the server's answer broke off while connecting");
    if (status == HL_ENOT_PROVISIONED && i == LAYOUT) status = HL_OK;
    if (status == HL_OK) status = judge(session, i, result, &later, error);
    mysql_free_result(result);
  }
  if (status == HL_OK && later.unrecorded) status = layout_confirm(session, layout, error);
  if (status == HL_OK && session->store->leased) {
    status = leased_begin(session, first, error);
    later.absent = false;
  }
  if (later.absent && (status == HL_OK || status == HL_EMISMATCH)) {
    int absent = absence_confirm(session, error);
    if (absent) status = absent; /* the table is missing, so its layout does not matter */
  }
  if (status == HL_OK && later.young) status = tokens_wait(session, error);
  hl__mysql_waits_bound(session, false);
  return status;
}

/* Gives a connection thrice the time that the last one took, even when the caller's wait is
   shorter: else no short wait over a slow line would ever get one. A connection that was given
   up does not count: with a server that hangs, each call would take longer than the one before.
   An administrator may lock the tables that we look at. So no connection counts for more than
   thrice the time of its log-in, which waits for no table. */
int hl__mysql_connect_verified(hl__mysql_store *store, int64_t deadline,
                               hl__mysql_session **session, hl_error *error) {
  int64_t begun = hl__now_ms();
  int64_t usual = hl__deadline(begun, 3 * atomic_load(&store->connecting));
  if (deadline < usual) deadline = usual;
  int status = hl__mysql_connect(store, deadline, session, error);
  int64_t most = 3 * (hl__now_ms() - begun);
  if (status == HL_OK) {
    status = verify(*session, error);
    bool late = status == HL_ECONNECTION && hl__left_ms((*session)->patience) == 0;
    if (status == HL_TIMEOUT || late)
      status = hl__error(error, HL_ECONNECTION,
                         "the server let us log in, but did not answer in time: it hangs, or an "
                         "administrator has locked its tables (LOCK TABLES)");
  }
  if (status) {
    hl__mysql_disconnect(*session);
    *session = NULL;
  } else {
    int64_t took = hl__now_ms() - begun;
    atomic_store(&store->connecting, took < most ? took : most);
  }
  return status;
}
