/*
 * sql.c - the statements of a plan, for programs that lock in a transaction of their own, on a
 * connection of their own driver. The stores build the statements that they send themselves.
 */
#include "hierlock.h"
#include "layout.h"
#include "mode.h"

#include "../judge/judge.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Makes a plan with the same targets, but without intentions, which no server knows, and perhaps
   without buckets; NULL when out of memory. */
static hl_plan *plan_plain(const hl_plan *plan, bool buckets) {
  hl_layout *layout = NULL, *of = hl_plan_layout(plan);
  if ((buckets ? hl__layout_plain : hl__layout_unbucketed)(of, &layout, NULL) != HL_OK) return NULL;
  hl_plan *made = hl_plan_new(layout);
  hl_layout_unref(layout);
  for (size_t i = 0; made && i < hl_plan_target_count(plan); i++) {
    hl_id ids[HL_LEVELS_MAX];
    hl_target target = hl_plan_target(plan, i, ids);
    if (hl_plan_add(made, ids, target.level + 1, target.mode, target.mode_given, NULL) != HL_OK) {
      hl_plan_free(made);
      return NULL;
    }
  }
  return made;
}

/* Each row has a SELECT of its own, as a select list may only have so many columns; so each row
   returns a row. The server executes them in their order, and leaves none out. The last one
   looks, behind its lock, whether there may be leases (csrc/stores/postgresql/gate.c). Whether
   they are in the way it cannot know: then its row does not come back. The schema is named, as a
   function of another author in the program's search_path may fit the literal better. */
static char *postgresql_sql(hl_plan *plan) {
  static const char format[] = "%sSELECT pg_catalog.pg_advisory_xact_lock%s('%" PRId64 "')";
  static const char before[] = "SELECT l FROM (",
                    behind[] = " AS l," HL__PG_GATE_VALUE("2") " AS gate OFFSET 0) last WHERE gate "
                                                               "OPERATOR(pg_catalog.<) 2";
  size_t n, used = 0, each = sizeof format + 64;
  const hl_row *rows = hl_plan_rows(plan, &n);
  each += sizeof before;
  char *sql = n < SIZE_MAX / each - sizeof behind ? malloc(n * each + sizeof behind) : NULL;
  if (sql) sql[0] = '\0';
  for (size_t i = 0; sql && i < n; i++) {
    if (i == n - 1) used += (size_t)sprintf(sql + used, "%s%s", i ? " UNION ALL " : "", before);
    used += (size_t)snprintf(sql + used, each, format, i && i < n - 1 ? " UNION ALL " : "",
                             rows[i].mode == HL_SHARED ? "_shared" : "",
                             hl__row_key(rows[i].level, rows[i].bucket));
  }
  if (sql && n > 0) (void)strcpy(sql + used, behind);
  return sql;
}

static bool has_tables(hl_dialect dialect) { return dialect == HL_MYSQL || dialect == HL_MARIADB; }

static char *rows_sql(hl_plan *plan, hl_dialect dialect, const char *table) {
  static const char format[] =
      "%s(SELECT level,bucket FROM %s WHERE level=%d AND bucket=%" PRIu64 " %s)";
  const char *shared = dialect == HL_MARIADB ? "LOCK IN SHARE MODE" : "FOR SHARE";
  size_t n;
  const hl_row *rows = hl_plan_rows(plan, &n);
  /* Room for the text, the longest numbers, and " UNION ALL ". */
  size_t each = sizeof format + strlen(table) + 64;
  char *sql = n < SIZE_MAX / each ? malloc(n * each + 1) : NULL;
  if (!sql) return NULL;
  size_t used = 0;
  sql[0] = '\0';
  for (size_t i = 0; i < n; i++)
    used += (size_t)snprintf(sql + used, each, format, i ? " UNION ALL " : "", table,
                             hl__sql_level(rows[i].level), rows[i].bucket,
                             rows[i].mode == HL_SHARED ? shared : "FOR UPDATE");
  return sql;
}

char *hl_plan_sql(hl_plan *plan, hl_dialect dialect, const char *table) {
  bool buckets = has_tables(dialect);
  if (!plan || (buckets ? !table : dialect != HL_POSTGRESQL)) return NULL;
  hl_plan *own = plan_plain(plan, buckets);
  char *sql = !own ? NULL : buckets ? rows_sql(own, dialect, table) : postgresql_sql(own);
  hl_plan_free(own);
  return sql;
}

char *hl_plan_sql_leased(hl_plan *plan, hl_dialect dialect, const char *table, size_t *gates) {
  static const char suffix[] = "_buckets";
  static const char format[] = " UNION ALL (SELECT -1,g FROM %.*s_gate WHERE g=%u AND n=0 %s)";
  const size_t end = sizeof suffix - 1;
  if (gates) *gates = 0;
  if (!plan || !table || !gates || !has_tables(dialect)) return NULL;
  uint64_t buckets = hl_layout_buckets(hl_plan_layout(plan));
  size_t n, stem = strlen(table);
  if (stem > end && strcmp(table + stem - end, suffix) == 0) stem -= end;
  char *nodes;
  if (asprintf(&nodes, "%.*s_nodes", (int)stem, table) < 0) return NULL;
  char *sql = hl_plan_sql(plan, dialect, nodes);
  free(nodes);
  if (!sql) return NULL;
  const hl_row *rows = hl_plan_rows(plan, &n);
  size_t roots = hl__roots(&rows, n), used = strlen(sql), each = sizeof format + stem + 64;
  char *longer = realloc(sql, used + roots * each + 1);
  if (!longer) {
    free(sql);
    return NULL;
  }
  for (size_t i = 0; i < roots; i++) {
    unsigned gate = hl__sql_gate(rows[i].bucket, buckets);
    if (i > 0 && hl__sql_gate(rows[i - 1].bucket, buckets) == gate) continue;
    used += (size_t)snprintf(longer + used, each, format, (int)stem, table, gate,
                             dialect == HL_MARIADB ? "LOCK IN SHARE MODE" : "FOR SHARE");
    (*gates)++;
  }
  return longer;
}
