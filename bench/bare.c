/*
 * bare.c - the cost of the server and the wire, without hierlock. Takes and
 * releases three row locks (shared, shared, exclusive), or GET_LOCK's. Usage:
 *
 *   bare mode=rows host=127.0.0.1 port=3306 user=app password=pw db=test
 *        table=hier_lock_buckets buckets=10000 [socket=/path] [tls=1]
 *
 * mode=rows     One prepared statement (MySQL: a join, MariaDB: a UNION ALL of look-ups). ROLLBACK is sent;
 *               the session's next use reads the answer. Two sessions in turn (mode=rows1: one session).
 * mode=getlock  GET_LOCK + RELEASE_LOCK, both prepared; the client waits for both answers.
 * mode=design   SET innodb_lock_wait_timeout, START TRANSACTION, three prepared SELECTs, ROLLBACK;
 *               the client waits for each answer.
 * mode=lease    A lease of three rows, as the store takes it where there were leases before. The locks, an INSERT
 *               which looks whether another lease is in the way, and COMMIT go in one packet. Then comes a DELETE,
 *               whose answer the client waits for. `table` is the beginning of the tables' names.
 *
 * The table must hold (level 0..2) x (bucket 0..buckets-1).
 */
#include "client.h"

#include <mysql.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LEVELS = 3, SESSIONS = 2 };

static struct {
  const char *mode, *host, *socket, *user, *password, *db, *table;
  int port, buckets, tls;
} opt = {"rows", "127.0.0.1", NULL, "app", "pw", "test", "hier_lock_buckets", 3306, 10000, 0};

struct session {
  MYSQL *conn;
  MYSQL_STMT *stmt[LEVELS];
  int bucket[LEVELS];
  char name[64]; /* of the GET_LOCK */
  unsigned long name_length;
  bool answer_pending; /* ROLLBACK is sent, its answer not yet read */
};

static void query(struct session *s, const char *sql) {
  if (mysql_query(s->conn, sql)) client_die(sql, mysql_error(s->conn));
}

static void connect_session(struct session *s) {
  s->conn = mysql_init(NULL);
  if (!s->conn) client_die("mysql_init", "no memory");
#ifdef MARIADB_PACKAGE_VERSION
  my_bool tls = opt.tls != 0;
  mysql_options(s->conn, MYSQL_OPT_SSL_ENFORCE, &tls);
#else
  unsigned int tls = opt.tls ? SSL_MODE_REQUIRED : SSL_MODE_DISABLED;
  bool fetch_key = true; /* caching_sha2_password without TLS */
  mysql_options(s->conn, MYSQL_OPT_SSL_MODE, &tls);
  mysql_options(s->conn, MYSQL_OPT_GET_SERVER_PUBLIC_KEY, &fetch_key);
#endif
  if (!mysql_real_connect(s->conn, opt.socket ? "localhost" : opt.host, opt.user, opt.password,
                          opt.db, (unsigned int)opt.port, opt.socket, CLIENT_MULTI_STATEMENTS))
    client_die("connect", mysql_error(s->conn));
  if (opt.tls && !mysql_get_ssl_cipher(s->conn)) /* Connector/C 3.3 falls back to plain text */
    client_die("connect", "the server offers no TLS");
  query(s, "SET autocommit=0");
  query(s, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED");
}

static bool is_mariadb(struct session *s) {
  return strstr(mysql_get_server_info(s->conn), "MariaDB") != NULL;
}

static MYSQL_STMT *prepare(struct session *s, const char *sql, MYSQL_BIND *parameters) {
  MYSQL_STMT *stmt = mysql_stmt_init(s->conn);
  if (!stmt) client_die("mysql_stmt_init", mysql_error(s->conn));
  if (mysql_stmt_prepare(stmt, sql, (unsigned long)strlen(sql)) ||
      mysql_stmt_bind_param(stmt, parameters))
    client_die(sql, mysql_stmt_error(stmt));
  return stmt;
}

static void bind_buckets(struct session *s, MYSQL_BIND bind[LEVELS]) {
  memset(bind, 0, LEVELS * sizeof *bind);
  for (int i = 0; i < LEVELS; i++) {
    bind[i].buffer_type = MYSQL_TYPE_LONG;
    bind[i].buffer = &s->bucket[i];
  }
}

static void lock_clauses(struct session *s, const char *clause[LEVELS]) {
  clause[0] = clause[1] = is_mariadb(s) ? "LOCK IN SHARE MODE" : "FOR SHARE";
  clause[2] = "FOR UPDATE";
}

/* Executes and reads everything; returns the number of rows. */
static int execute(MYSQL_STMT *stmt) {
  if (mysql_stmt_execute(stmt) || mysql_stmt_store_result(stmt))
    client_die("execute", mysql_stmt_error(stmt));
  int rows = (int)mysql_stmt_num_rows(stmt);
  mysql_stmt_free_result(stmt);
  return rows;
}

/* A name's buckets: scattered, and the same in every process. */
static void choose_buckets(struct session *s, unsigned name) {
  unsigned long long x = name + 1;
  for (int i = 0; i < LEVELS; i++) {
    x *= 6364136223846793005ull;
    s->bucket[i] = (int)((x >> 33) % (unsigned)opt.buckets);
  }
}

/* mode=rows */

static void rows_prepare(struct session *s) {
  MYSQL_BIND bind[LEVELS];
  const char *lock[LEVELS];
  char sql[1024];
  bind_buckets(s, bind);
  lock_clauses(s, lock);
  if (is_mariadb(s))
    snprintf(sql, sizeof sql,
             "(SELECT 1 FROM %s WHERE level=0 AND bucket=? %s) UNION ALL "
             "(SELECT 1 FROM %s WHERE level=1 AND bucket=? %s) UNION ALL "
             "(SELECT 1 FROM %s WHERE level=2 AND bucket=? %s)",
             opt.table, lock[0], opt.table, lock[1], opt.table, lock[2]);
  else
    snprintf(
        sql, sizeof sql,
        "SELECT 1 FROM %s a STRAIGHT_JOIN %s b STRAIGHT_JOIN %s c WHERE a.level=0 AND a.bucket=? "
        "AND b.level=1 AND b.bucket=? AND c.level=2 AND c.bucket=? FOR SHARE OF a, b FOR UPDATE OF "
        "c",
        opt.table, opt.table, opt.table);
  s->stmt[0] = prepare(s, sql, bind);
}

static void read_rollback_answer(struct session *s) {
  if (s->answer_pending && mysql_read_query_result(s->conn))
    client_die("ROLLBACK", mysql_error(s->conn));
  s->answer_pending = false;
}

static void rows_take(struct session *s) {
  read_rollback_answer(s);
  if (execute(s->stmt[0]) != (is_mariadb(s) ? LEVELS : 1)) client_die("rows", "a row is missing");
}

static void rows_give(struct session *s) {
  if (mysql_send_query(s->conn, "ROLLBACK", 8)) client_die("ROLLBACK", mysql_error(s->conn));
  s->answer_pending = true;
}

/* mode=getlock */

static void getlock_prepare(struct session *s) {
  MYSQL_BIND bind;
  memset(&bind, 0, sizeof bind);
  bind.buffer_type = MYSQL_TYPE_STRING;
  bind.buffer = s->name;
  bind.buffer_length = sizeof s->name;
  bind.length = &s->name_length;
  s->stmt[0] = prepare(s, "SELECT GET_LOCK(?,10)", &bind);
  s->stmt[1] = prepare(s, "SELECT RELEASE_LOCK(?)", &bind);
}

static void getlock_take(struct session *s) {
  s->name_length = (unsigned long)snprintf(s->name, sizeof s->name, "hier.2.%d", s->bucket[2]);
  if (execute(s->stmt[0]) != 1) client_die("GET_LOCK", "no answer");
}

static void getlock_give(struct session *s) {
  if (execute(s->stmt[1]) != 1) client_die("RELEASE_LOCK", "no answer");
}

/* mode=design */

static void design_prepare(struct session *s) {
  MYSQL_BIND bind[LEVELS];
  const char *lock[LEVELS];
  char sql[512];
  bind_buckets(s, bind);
  lock_clauses(s, lock);
  for (int i = 0; i < LEVELS; i++) {
    snprintf(sql, sizeof sql, "SELECT level,bucket FROM %s WHERE level=%d AND bucket=? %s",
             opt.table, i, lock[i]);
    s->stmt[i] = prepare(s, sql, &bind[i]);
  }
}

static void design_take(struct session *s) {
  query(s, "SET SESSION innodb_lock_wait_timeout=5");
  query(s, "START TRANSACTION");
  for (int i = 0; i < LEVELS; i++)
    if (execute(s->stmt[i]) != 1) client_die("design", "a row is missing");
}

static void design_give(struct session *s) { query(s, "ROLLBACK"); }

/* mode=lease: what csrc/stores/mysql/record.c and leases.c send */

/* Reads the answers of so many statements; the rows that the last one but one changed. */
static unsigned long long send_all(struct session *s, const char *sql, int statements) {
  unsigned long long changed = 0;
  query(s, sql);
  for (int i = 0; i < statements; i++) {
    MYSQL_RES *result = mysql_store_result(s->conn);
    mysql_free_result(result);
    if (i == statements - 2) changed = mysql_affected_rows(s->conn);
    if (i + 1 < statements && mysql_next_result(s->conn)) client_die("lease", mysql_error(s->conn));
  }
  return changed;
}

static void lease_prepare(struct session *s) {
  char sql[256];
  snprintf(sql, sizeof sql, "UPDATE %s_gate SET n=1;COMMIT", opt.table);
  send_all(s, sql, 2);
}

static char lease[33]; /* its id, hexadecimal */

static void lease_take(struct session *s) {
  static unsigned long long serial;
  const char *clause = is_mariadb(s) ? "LOCK IN SHARE MODE NOWAIT" : "FOR SHARE NOWAIT";
  const char *hint = is_mariadb(s) ? "" : "/*+ MAX_EXECUTION_TIME(500) */ ";
  const int *b = s->bucket;
  char sql[4096];
  snprintf(lease, sizeof lease, "%016lx%016llx", mysql_thread_id(s->conn), ++serial);
  snprintf(
      sql, sizeof sql,
      "(SELECT %sCAST(0 AS UNSIGNED) t,0 r FROM %s_nodes WHERE level=0 AND bucket=%d AND "
      "(@hierlock:='what observers see, "
      "some hundred bytes of it, as who it is that locks these rows, and which rows these are') IS "
      "NOT NULL %s) UNION ALL "
      "(SELECT CAST(0 AS UNSIGNED) t,0 r FROM %s_nodes WHERE level=1 AND bucket=%d %s) UNION ALL "
      "(SELECT @hierlock_token:=UUID_SHORT(),CONCAT(@@global.read_only) NOT IN ('0','OFF') FROM "
      "%s_nodes WHERE level=2 "
      "AND bucket=%d FOR UPDATE NOWAIT) UNION ALL (SELECT n,2 FROM %s_gate WHERE g=%d %s);"
      "INSERT INTO %s_leases "
      "(id,secret,holder,till,turn,since,token,mode,owner,label,path,application,host,pid,revoked) "
      "SELECT "
      "0x%s,LEFT(UNHEX(SHA2(0x%s,256)),16),0x%s,TIMESTAMPADD(MICROSECOND,60000000,UTC_TIMESTAMP(6))"
      ",0,UTC_TIMESTAMP(6),"
      "@hierlock_token<<8,0,0x6c7561352e34,'',0x75312f61312f7232,0x6c7561352e34,0x766d,17852,0 "
      "FROM %s_gate g WHERE "
      "g.g=%d AND g.n=1 AND NOT EXISTS (SELECT 1 FROM %s_leased r WHERE ((r.level=0 AND "
      "r.bucket=%d AND r.x=1) OR "
      "(r.level=1 AND r.bucket=%d AND r.x=1) OR (r.level=2 AND r.bucket=%d)));"
      "INSERT INTO %s_leased (level,bucket,x,id) SELECT r.a,r.b,r.c,l.id FROM (SELECT 0 a,%d b,0 c "
      "UNION ALL SELECT 1,%d,0 "
      "UNION ALL SELECT 2,%d,1) r JOIN %s_leases l ON l.id=0x%s;COMMIT",
      hint, opt.table, b[0], clause, opt.table, b[1], clause, opt.table, b[2], opt.table, b[0],
      clause, opt.table, lease, lease, lease, opt.table, b[0], opt.table, b[0], b[1], b[2],
      opt.table, b[0], b[1], b[2], opt.table, lease);
  if (send_all(s, sql, 4) != LEVELS) client_die("lease", "it was not recorded");
}

static void lease_give(struct session *s) {
  char sql[512];
  snprintf(sql, sizeof sql,
           "DELETE l,r FROM %s_leases l LEFT JOIN %s_leased r ON r.id=l.id WHERE l.id=0x%s AND "
           "l.holder=0x%s "
           "AND l.revoked=0;COMMIT",
           opt.table, opt.table, lease, lease);
  if (send_all(s, sql, 2) != LEVELS + 1) client_die("lease", "it was not there");
}

static const struct mode {
  const char *name;
  int sessions;
  void (*prepare)(struct session *);
  void (*take)(struct session *);
  void (*give)(struct session *);
} modes[] = {
    {"rows", 2, rows_prepare, rows_take, rows_give},
    {"rows1", 1, rows_prepare, rows_take, rows_give},
    {"getlock", 1, getlock_prepare, getlock_take, getlock_give},
    {"design", 1, design_prepare, design_take, design_give},
    {"lease", 1, lease_prepare, lease_take, lease_give},
};

static const struct mode *mode;
static struct session session[SESSIONS];
static int turn; /* whose session it is */

static void parse(const char *arg) {
  static const struct {
    const char *name;
    const char **text;
    int *number;
  } known[] = {
      {"mode", &opt.mode, NULL},         {"host", &opt.host, NULL},
      {"socket", &opt.socket, NULL},     {"user", &opt.user, NULL},
      {"password", &opt.password, NULL}, {"db", &opt.db, NULL},
      {"table", &opt.table, NULL},       {"port", NULL, &opt.port},
      {"buckets", NULL, &opt.buckets},   {"tls", NULL, &opt.tls},
  };
  for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
    size_t n = strlen(known[i].name);
    if (strncmp(arg, known[i].name, n) || arg[n] != '=') continue;
    if (known[i].text)
      *known[i].text = arg + n + 1;
    else
      *known[i].number = atoi(arg + n + 1);
    return;
  }
  client_die("unknown argument", arg);
}

void client_open(int argc, char **argv) {
  for (int i = 0; i < argc; i++) parse(argv[i]);
  for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
    if (!strcmp(modes[i].name, opt.mode)) mode = &modes[i];
  if (!mode || opt.buckets < 1)
    client_die("arguments", "mode is rows, rows1, getlock, design or lease; buckets at least 1");
  for (int i = 0; i < mode->sessions; i++) {
    connect_session(&session[i]);
    mode->prepare(&session[i]);
  }
}

void client_take(unsigned name) {
  turn = (turn + 1) % mode->sessions;
  choose_buckets(&session[turn], name);
  mode->take(&session[turn]);
}

void client_give(void) { mode->give(&session[turn]); }
