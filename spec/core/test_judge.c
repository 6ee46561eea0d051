/*
 * test_judge.c - which servers are refused, with which words, and what an error of a server means:
 * by what a server may say of itself, without any server. The specs of the stores ask real ones.
 */
#include "error.h"
#include "hierlock.h"
#include "judge.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define FACTS 8

typedef struct server {
  hl__fact facts[FACTS + 1];
  int status;
  const char *message; /* the whole of it */
  const char *sqlstate;
} server;

static void judged(int (*judge)(const hl__fact *, hl_error *), const server *servers, size_t n) {
  for (size_t i = 0; i < n; i++) {
    hl_error error = {0};
    int status = judge(servers[i].facts, &error);
    if (status != servers[i].status) print_error("of the server %zu: %s\n", i, error.message);
    assert_int_equal(status, servers[i].status);
    assert_int_equal(judge(servers[i].facts, NULL), servers[i].status);
    assert_string_equal(error.message, servers[i].message ? servers[i].message : "");
    assert_string_equal(error.sqlstate, servers[i].sqlstate ? servers[i].sqlstate : "");
  }
}

#define JUDGED(judge, servers) judged(judge, servers, sizeof(servers) / sizeof *(servers))

/* ------------------------------------------------------- MySQL and MariaDB */

#define UNSAFE HL_EUNSAFE_SERVER
#define OLD(version)                                                                               \
  UNSAFE, "the server is too old (" version "): MySQL 8.0 or MariaDB 10.6 and later are supported"
#define READ_ONLY                                                                                  \
  UNSAFE, "the server is read-only, a replica perhaps: locks there protect nothing; connect to "   \
          "the primary"
#define STATEMENTS                                                                                 \
  UNSAFE, "the server logs statements (binlog_format=STATEMENT), which leases cannot be recorded " \
          "with; set it to ROW"
#define GROUP                                                                                      \
  UNSAFE, "the server belongs to a group with several primaries: its row locks do not hold on "    \
          "the others"
#define MY                                                                                         \
  { "version", "8.0.36" }
#define MARIA                                                                                      \
  { "version", "10.11.6-MariaDB" }
#define TABLE                                                                                      \
  {"database", "shop"}, { "table", "`buckets`" }

static void mysql_is_refused_for_what_it_says(void **state) {
  (void)state;
  static const server servers[] = {
      {{MY}, HL_OK, NULL, NULL},
      {{{"version", "9.7.0"}}, HL_OK, NULL, NULL},
      {{{"version", "7.9.9"}}, OLD("7.9.9"), NULL},
      {{{"version", "nothing"}}, OLD("nothing"), NULL},
      {{{"version", NULL}}, OLD(""), NULL},
      {{{NULL, NULL}}, OLD(""), NULL},
      {{MARIA}, HL_OK, NULL, NULL},
      {{{"version", "10.6.0-MariaDB"}}, HL_OK, NULL, NULL},
      {{{"version", "11.4.2-MariaDB"}}, HL_OK, NULL, NULL},
      {{{"version", "11.0.0-MariaDB"}}, HL_OK, NULL, NULL},
      {{{"version", "10.5.29-MariaDB"}}, OLD("10.5.29-MariaDB"), NULL},
      {{{"version", "9.9.9-MariaDB"}}, OLD("9.9.9-MariaDB"), NULL},
      {{{"version", "5.5.5-10.6.1-MariaDB"}}, HL_OK, NULL, NULL},
      {{{"version", "5.5.5-10.5.1-MariaDB"}}, OLD("10.5.1-MariaDB"), NULL},
      {{{"version", "5.5.6"}}, OLD("5.5.6"), NULL},
      /* Nothing that follows makes it a server of this time. */
      {{{"version", "7.9.9"}, {"leases", "1"}, {"table", "`buckets`"}, {"engine", "InnoDB"}},
       OLD("7.9.9"),
       NULL},
      {{{"version", "8.0.11-TiDB-v8"}},
       UNSAFE,
       "TiDB (8.0.11-TiDB-v8) takes no shared row locks",
       NULL},

      {{MY, {"read_only", "ON"}}, READ_ONLY, NULL},
      {{MY, {"read_only", "1"}}, READ_ONLY, NULL},
      {{MARIA, {"read_only", "NO_LOCK_NO_ADMIN"}}, READ_ONLY, NULL},
      {{MY, {"super_read_only", "ON"}}, READ_ONLY, NULL},
      {{MY, {"innodb_read_only", "ON"}}, READ_ONLY, NULL},
      {{MY, {"read_only", "OFF"}, {"super_read_only", "OFF"}, {"innodb_read_only", "OFF"}},
       HL_OK,
       NULL,
       NULL},
      {{MY, {"read_only", "0"}, {"super_read_only", "0"}, {"innodb_read_only", NULL}},
       HL_OK,
       NULL,
       NULL},
      {{MARIA, {"wsrep_on", "ON"}},
       UNSAFE,
       "the server is a node of a Galera cluster: its row locks do not hold on the other nodes",
       NULL},
      {{MARIA, {"wsrep_on", "OFF"}}, HL_OK, NULL, NULL},
      {{MY, {"group_replication_group_name", "g"}}, GROUP, NULL},
      {{MY,
        {"group_replication_group_name", "g"},
        {"group_replication_single_primary_mode", "OFF"}},
       GROUP,
       NULL},
      {{MY, {"group_replication_group_name", "g"}, {"group_replication_single_primary_mode", "ON"}},
       HL_OK,
       NULL,
       NULL},
      {{MY, {"group_replication_group_name", ""}, {"group_replication_single_primary_mode", "OFF"}},
       HL_OK,
       NULL,
       NULL},
  };
  JUDGED(hl__mysql_server_judge, servers);
}

/* Only a server with leases is refused for its log, and only where it writes the log. */
static void mysql_that_logs_statements_records_no_leases(void **state) {
  (void)state;
#define LOGS(log, format)                                                                          \
  {"log_bin", log}, { "binlog_format", format }
  static const server servers[] = {
      {{MY, LOGS("ON", "STATEMENT"), {"leases", "1"}}, STATEMENTS, NULL},
      {{MY, LOGS("1", "STATEMENT"), {"leases", "1"}, TABLE}, STATEMENTS, NULL},
      {{MY, LOGS("ON", "STATEMENT")}, HL_OK, NULL, NULL},
      {{MY, LOGS("ON", "STATEMENT"), {"leases", "0"}}, HL_OK, NULL, NULL},
      {{MY, LOGS("OFF", "STATEMENT"), {"leases", "1"}}, HL_OK, NULL, NULL},
      {{MY, LOGS("ON", "ROW"), {"leases", "1"}}, HL_OK, NULL, NULL},
      {{MY, LOGS("ON", "MIXED"), {"leases", "1"}}, HL_OK, NULL, NULL},
  };
  JUDGED(hl__mysql_server_judge, servers);
  for (size_t i = 0; i < sizeof servers / sizeof *servers; i++)
    assert_int_equal(hl__mysql_logs_statements(servers[i].facts), i < 4);
}

static void mysql_needs_a_table_that_locks_rows(void **state) {
  (void)state;
  static const server servers[] = {
      {{MY, TABLE, {"engine", "InnoDB"}}, HL_OK, NULL, NULL},
      {{MY, TABLE, {"engine", "MyISAM"}},
       UNSAFE,
       "the table `buckets` is of engine MyISAM, which locks no rows; it must be InnoDB",
       NULL},
      {{MY, TABLE},
       HL_ENOT_PROVISIONED,
       "there is no table `buckets` in database shop, or this account may not see it (GRANT "
       "SELECT, UPDATE ON shop.`buckets`); run `hierlock provision`",
       NULL},
      {{MARIA, TABLE},
       HL_ENOT_PROVISIONED,
       "there is no table `buckets` in database shop, or this account may not see it (GRANT "
       "SELECT ON shop.`buckets`); run `hierlock provision`",
       NULL},
      {{MY, {"table", NULL}, {"engine", "MyISAM"}}, HL_OK, NULL, NULL},
  };
  JUDGED(hl__mysql_server_judge, servers);
}

static void mysql_errors_have_a_status_and_a_hint(void **state) {
  (void)state;
  static const struct {
    unsigned number, traits;
    const char *message;
    int status, own; /* own: on a connection of the program's */
    const char *hint;
  } errors[] = {
      {1205, 0, "", HL_TIMEOUT, HL_TIMEOUT, ""},
      {1969, HL__MYSQL_CUT, "", HL_TIMEOUT, HL_TIMEOUT, ""},
      {3024, 0, "", HL_TIMEOUT, HL_TIMEOUT, ""},
      {3572, 0, "", HL_TIMEOUT, HL_TIMEOUT, ""},
      {1213, 0, "", HL_DEADLOCK, HL_DEADLOCK, ""},
      {1317, HL__MYSQL_CUT, "", HL_CANCELLED, HL_CANCELLED, ""},
      {1146, 0, "", HL_ENOT_PROVISIONED, HL_ENOT_PROVISIONED, "; run `hierlock provision`"},
      {1290, 0, "", HL_EUNSAFE_SERVER, HL_EUNSAFE_SERVER, ""},
      {1040, HL__MYSQL_FULL, "", HL_ECONNECTION, HL_ECONNECTION, ""},
      {1203, HL__MYSQL_FULL, "", HL_ECONNECTION, HL_ECONNECTION, ""},
      {1226, HL__MYSQL_FULL, "", HL_ECONNECTION, HL_ECONNECTION, ""},
      {1044, HL__MYSQL_DENIED, "", HL_ECONNECTION, HL_ECONNECTION, ""},
      {1045, HL__MYSQL_DENIED, "", HL_ECONNECTION, HL_ECONNECTION, ""},
      {1698, HL__MYSQL_DENIED, "", HL_ECONNECTION, HL_ECONNECTION,
       "; where it logs in by the server's socket, say so in the DSN: "
       "?socket=/run/mysqld/mysqld.sock"},
      {1053, 0, "", HL_ECONNECTION, HL_ECONNECTION, ""},
      {1077, 0, "", HL_ECONNECTION, HL_ECONNECTION, ""},
      {1129, 0, "", HL_ECONNECTION, HL_ECONNECTION, ""},
      {1130, 0, "", HL_ECONNECTION, HL_ECONNECTION, ""},
      {1158, 0, "", HL_ECONNECTION, HL_ECONNECTION, ""},
      {1159, 0, "", HL_ECONNECTION, HL_ECONNECTION, ""},
      {1160, 0, "", HL_ECONNECTION, HL_ECONNECTION, ""},
      {1161, 0, "", HL_ECONNECTION, HL_ECONNECTION, ""},
      {1927, 0, "", HL_ECONNECTION, HL_ECONNECTION, ""},
      {4031, 0, "", HL_ECONNECTION, HL_ECONNECTION, ""},
      {1020, HL__MYSQL_PROGRAM, "", HL_ESTORE, HL_DEADLOCK, ""},
      {1305, HL__MYSQL_PROGRAM, "", HL_ESTORE, HL_ELOST, ""},
      {1064, 0, "", HL_ESTORE, HL_ESTORE, ""},
      {1142, 0, "SELECT command denied to user 'a'@'h' for table `d`.`t`", HL_ESTORE, HL_ESTORE,
       "; GRANT SELECT ON `d`.`t` to it"},
      {1142, 0, "SELECT with locking clause command denied to user 'a'@'h' for table 't'",
       HL_ESTORE, HL_ESTORE, "; GRANT UPDATE ON t to it"},
      {1142, 0, "DELETE command denied to user 'a'@'h' for table 't'", HL_ESTORE, HL_ESTORE,
       "; GRANT DELETE ON t to it"},
      {1142, 0, "SELECT command denied to user 'a'@'h'", HL_ESTORE, HL_ESTORE, ""},
      {1142, 0, "no", HL_ESTORE, HL_ESTORE, ""},
      {1143, 0, "SELECT command denied to user 'a'@'h' for table 't'", HL_ESTORE, HL_ESTORE, ""},
  };
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
    char hint[HL__MYSQL_HINT_MAX] = "of an earlier one";
    unsigned number = errors[i].number;
    assert_int_equal(hl__mysql_error_judge(number, errors[i].message, false, hint, sizeof hint),
                     errors[i].status);
    assert_string_equal(hint, errors[i].hint);
    assert_int_equal(hl__mysql_error_judge(number, errors[i].message, true, hint, sizeof hint),
                     errors[i].own);
    assert_string_equal(hint, errors[i].hint);
    for (unsigned trait = HL__MYSQL_CUT; trait <= HL__MYSQL_PROGRAM; trait *= 2)
      assert_int_equal(hl__mysql_error_is(number, trait), errors[i].traits == trait);
    assert_int_equal(hl__mysql_error_is(number, HL__MYSQL_DENIED | HL__MYSQL_FULL),
                     (errors[i].traits & (HL__MYSQL_DENIED | HL__MYSQL_FULL)) != 0);
  }
}

/* ------------------------------------------------------------ PostgreSQL */

#define PG                                                                                         \
  { "version", "PostgreSQL 16.2 on x86_64-pc-linux-gnu" }
#define NO_POSTGRESQL(version)                                                                     \
  UNSAFE, "the server is not PostgreSQL (" version "): its advisory locks are other ones, or none"

static void postgresql_is_refused_for_what_it_says(void **state) {
  (void)state;
  static const server servers[] = {
      {{PG}, HL_OK, NULL, NULL},
      {{{"version", "13.0"}}, HL_OK, NULL, NULL},
      {{{"version", "PostgreSQL 12.19"}},
       UNSAFE,
       "the server is too old (PostgreSQL 12.19): PostgreSQL 13 and later are supported",
       NULL},
      {{{"version", NULL}},
       UNSAFE,
       "the server is too old (): PostgreSQL 13 and later are supported",
       NULL},
      {{{"version", "PostgreSQL 15.2-YB-2.25"}}, NO_POSTGRESQL("PostgreSQL 15.2-YB-2.25"), NULL},
      {{{"version", "CockroachDB CCL v23.1"}}, NO_POSTGRESQL("CockroachDB CCL v23.1"), NULL},
      {{{"version", "PostgreSQL 8.0.2, Redshift 1"}},
       NO_POSTGRESQL("PostgreSQL 8.0.2, Redshift 1"),
       NULL},
      {{PG, {"standby", "t"}},
       UNSAFE,
       "the server is a standby: locks there protect nothing; connect to the primary "
       "(target_session_attrs=primary)",
       NULL},
      {{PG, {"standby", "f"}, {"multiple", "f"}}, HL_OK, NULL, NULL},
      {{PG, {"multiple", "t"}},
       UNSAFE,
       "the server belongs to a group with several primaries (bdr, spock): its locks do not hold "
       "on the others",
       NULL},
  };
  JUDGED(hl__pg_server_judge, servers);
}

static void postgresql_says_which_privilege_is_missing(void **state) {
  (void)state;
  static const server servers[] = {
      {{PG, {"sequence", "x"}},
       HL_ESTORE,
       "there is a sequence public.hier_lock_token, and no privilege to use it: GRANT USAGE ON "
       "SEQUENCE public.hier_lock_token",
       "42501"},
      {{PG, {"sequence", "x"}, {"sequence_usable", "f"}},
       HL_ESTORE,
       "there is a sequence public.hier_lock_token, and no privilege to use it: GRANT USAGE ON "
       "SEQUENCE public.hier_lock_token",
       "42501"},
      {{PG, {"sequence", "x"}, {"sequence_usable", "t"}}, HL_OK, NULL, NULL},
      {{PG, {"sequence", NULL}, {"sequence_usable", NULL}}, HL_OK, NULL, NULL},
      {{PG, {"gate", "m"}},
       HL_ENOT_PROVISIONED,
       "the sequence public.hier_lock_gate is missing, but public.hier_lock_lease_rows is there: "
       "hierlock provision --leases mends it",
       NULL},
      {{PG, {"gate", "u"}},
       HL_ENOT_PROVISIONED,
       "there are leases in this database, and no privilege to see them: GRANT SELECT ON "
       "SEQUENCE public.hier_lock_gate, and SELECT, DELETE, UPDATE ON public.hier_lock_leases, "
       "public.hier_lock_lease_rows",
       "42501"},
      {{PG, {"gate", "2"}}, HL_OK, NULL, NULL},
      {{PG, {"gate", NULL}}, HL_OK, NULL, NULL},
  };
  JUDGED(hl__pg_server_judge, servers);
}

/* -------------------------------------------------- Redis and Memcached */

#define REDIS(version, is, evicts)                                                                 \
  {                                                                                                \
    {"redis_version", version}, {"role", is}, { "maxmemory_policy", evicts }                       \
  }
#define REFUSED(version) UNSAFE, "the server is Redis " version "; 6.2 or later is needed"
#define REPLICA UNSAFE, "the server is a replica: connect to its master"
#define EVICTS(policy)                                                                             \
  UNSAFE, "the server may evict locks when its memory is full (maxmemory-policy " policy           \
          "): CONFIG SET maxmemory-policy noeviction"

static void redis_is_refused_for_what_it_says(void **state) {
  (void)state;
  static const server servers[] = {
      {REDIS("6.2.0", "master", "noeviction"), HL_OK, NULL, NULL},
      {REDIS("7.0.15", "master", "noeviction"), HL_OK, NULL, NULL},
      {REDIS("6.1.9", "master", "noeviction"), REFUSED("6.1.9"), NULL},
      {REDIS("5.9.0", "master", "noeviction"), REFUSED("5.9.0"), NULL},
      {REDIS("7", "master", "noeviction"), REFUSED("7"), NULL},
      {REDIS(NULL, "master", "noeviction"), REFUSED(""), NULL},
      {REDIS("7.0.15", "slave", "noeviction"), REPLICA, NULL},
      {REDIS("7.0.15", NULL, "noeviction"), REPLICA, NULL},
      {REDIS("7.0.15", "master", "allkeys-lru"), EVICTS("allkeys-lru"), NULL},
      {REDIS("7.0.15", "master", "volatile-ttl"), EVICTS("volatile-ttl"), NULL},
  };
  JUDGED(hl__redis_server_judge, servers);
}

static void memcached_is_refused_for_what_it_says(void **state) {
  (void)state;
#define AT                                                                                         \
  { "at", "h:1" }
  static const server servers[] = {
      {{AT, {"version", "1.6.0"}}, HL_OK, NULL, NULL},
      {{AT, {"version", "2.0.1"}, {"cas_enabled", "yes"}}, HL_OK, NULL, NULL},
      {{AT, {"version", "1.5.22"}},
       UNSAFE,
       "memcached at h:1 is 1.5; 1.6 or later is needed",
       NULL},
      {{AT, {"version", "0.9"}}, UNSAFE, "memcached at h:1 is 0.9; 1.6 or later is needed", NULL},
      {{AT, {"version", "1"}}, UNSAFE, "what answers at h:1 is no Memcached", NULL},
      {{AT}, UNSAFE, "what answers at h:1 is no Memcached", NULL},
      {{AT, {"version", "1.6.38"}, {"cas_enabled", "no"}},
       UNSAFE,
       "memcached at h:1 cannot compare and swap (option -C)",
       NULL},
  };
  JUDGED(hl__memcached_server_judge, servers);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(mysql_is_refused_for_what_it_says),
      cmocka_unit_test(mysql_that_logs_statements_records_no_leases),
      cmocka_unit_test(mysql_needs_a_table_that_locks_rows),
      cmocka_unit_test(mysql_errors_have_a_status_and_a_hint),
      cmocka_unit_test(postgresql_is_refused_for_what_it_says),
      cmocka_unit_test(postgresql_says_which_privilege_is_missing),
      cmocka_unit_test(redis_is_refused_for_what_it_says),
      cmocka_unit_test(memcached_is_refused_for_what_it_says),
  };
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
