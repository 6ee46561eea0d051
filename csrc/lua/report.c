/*
 * report.c - a manager's reports on its program: handles that only the collector has released, and
 * locks that the program takes in changing orders. A function that finds a fault, perhaps a
 * finalizer, notes a report. The next call into hierlock writes it to stderr, or passes it to a
 * function of the program's. A report on order that goes to stderr does not wait for the next call.
 */
#include "hll.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A manager keeps at most so many reports, as its program may never call hierlock again. */
#define REPORTS_MAX 1000

struct hll_report {
  hll_report *next;
  bool order;
  char text[];
};

static const char *option_of(bool order) { return order ? "check_order" : "warn_unreleased"; }

static void report_print(const char *text) { (void)fprintf(stderr, "hierlock: %s\n", text); }

/* Notes a report, for the next call. Allocates nothing in Lua. */
static void report_add(hll_manager *self, bool order, const char *text) {
  size_t size = strlen(text) + 1;
  hll_report *report = malloc(sizeof *report + size);
  unsigned n = 0;
  hll_report **end = &self->reports;
  for (; *end && n < REPORTS_MAX; n++) end = &(*end)->next;
  if (!report || *end) {
    free(report);
    return;
  }
  report->next = NULL;
  report->order = order;
  memcpy(report->text, text, size);
  *end = report;
}

void hll_unreleased_report(hll_manager *self, const hl_lock *lock) {
  char path[256], text[512];
  const char *where = hl_lock_where(lock);
  (void)snprintf(text, sizeof text,
                 "%s, acquired at %s, was not released until the collector found "
                 "its handle: release it, or use `with`",
                 hl_plan_describe(hl_lock_plan(lock), path, sizeof path),
                 *where ? where : "a place that is not known");
  report_add(self, false, text);
}

void hll_order_check(lua_State *L, hll_manager *self, const hl_plan *plan, hl_options *options) {
  char report[HL_REPORT_SIZE];
  bool first = false;
  if (self->check_units && hl_units_check(self->manager, plan, options, &first, report)) {
    if (self->raises_order) hll_misuse(L, "%s", report);
    if (!first) return;
  } else if (!self->check_order || !hl_order_check(self->manager, plan, options, report)) {
    return;
  }
  /* Prints at once, as this runs no Lua: this very call may be about to wait. */
  if (self->prints_order)
    report_print(report);
  else
    report_add(self, true, report);
}

void hll_reports_tell(lua_State *L, int shared, hll_manager *self) {
  while (self->reports) {
    hll_report *report = self->reports;
    lua_getfield(L, shared, option_of(report->order));
    lua_pushstring(L, report->text);
    self->reports = report->next;
    free(report);
    if (lua_isfunction(L, -2)) {
      lua_call(L, 1, 0);
    } else {
      report_print(lua_tostring(L, -1));
      lua_pop(L, 2);
    }
  }
}

void hll_reports_end(hll_manager *self) {
  /* No call will follow, and this one waits for nothing. */
  struct pollfd out = {.fd = STDERR_FILENO, .events = POLLOUT};
  while (self->reports) {
    hll_report *report = self->reports;
    self->reports = report->next;
    if (poll(&out, 1, 0) == 1 && (out.revents & POLLOUT)) report_print(report->text);
    free(report);
  }
}

bool hll_report_option(lua_State *L, const char *name, bool raises) {
  const char *word = raises ? hll_word(L, -1) : NULL;
  bool raise = word && strcmp(word, "raise") == 0;
  if (!lua_isboolean(L, -1) && !lua_isfunction(L, -1) && !raise)
    hll_misuse(L, "%s must be a boolean%s or a function, not %s", name, raises ? ", \"raise\"" : "",
               lua_type(L, -1) == LUA_TSTRING ? "another string" : luaL_typename(L, -1));
  return lua_toboolean(L, -1);
}

bool hll_report_default(void) {
  const char *value = getenv("HIERLOCK_CHECK");
  return value && *value && strcmp(value, "0") != 0;
}
