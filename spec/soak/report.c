/*
 * report.c - the page for people after a run: one HTML file without scripts, with the summary,
 * throughput and waiting over time, and the faults on the same axis. Each of the first
 * violations has its lanes: the threads that called, held and believed, each on a row of its
 * own.
 *
 * The history tells it of every record that it has read, main of every fault. The report
 * remembers the last MEMORY records; the lanes of a violation are copied from there a moment
 * later, when its other side has ended, too.
 */
#include "soak.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  MEMORY = 16384, /* records */
  DRAWN = 20,     /* violations with lanes */
  LANES_DRAWN = 60,
  WIDTH = 1180,
  LEFT = 150, /* of the labels */
  PLOT = WIDTH - LEFT - 20,
  ROW = 22,
  COLUMNS = 340 /* of the plots over time, at most */
};
#define AROUND (20 * MS)    /* shown beside a violation, at least */
#define AROUND_MOST (2 * S) /* and at most */
#define SETTLED (2 * S)     /* lanes are copied so long after they end */

/* ------------------------------------------------------------- what happened */

typedef struct fault {
  const char *what; /* a literal */
  int worker;       /* -1: not one of them */
  int64_t from, to; /* the same: a moment */
} fault;

static fault *fault_list;
static size_t fault_count, fault_capacity;

typedef struct sample {
  int64_t at;
  int mood;
  bool pause;
  int waiting, held;
  uint64_t counts[COUNTS]; /* since the one before */
  int64_t longest, total;  /* waits of what ended since the one before */
  int waits;
} sample;

static sample *samples;
static size_t sample_count, sample_capacity;
static int64_t longest, total;
static int waits;

static record *memory;
static size_t remembered; /* all that there were */

typedef struct about {
  char name[8], text[700];
  record record;
} about;

typedef struct incident {
  int64_t at; /* told */
  char text[400];
  about abouts[2];
  int about_count, node;
  bool drawn;       /* it has lanes, or there can be none */
  int64_t from, to; /* what matters most */
  int64_t left, right;
  record *lanes;
  int lane_count;
} incident;

static incident incidents[DRAWN];
static unsigned incident_count;
static bool changed; /* since the file was written last */

static void *grown(void *list, size_t count, size_t *capacity, size_t size) {
  if (count < *capacity) return list;
  *capacity = *capacity ? 2 * *capacity : 256;
  list = realloc(list, *capacity * size);
  if (!list) abort();
  return list;
}

void report_fault(const char *what, int worker, int64_t from, int64_t to) {
  fault_list = grown(fault_list, fault_count, &fault_capacity, sizeof *fault_list);
  fault_list[fault_count++] = (fault){what, worker, from, to > from ? to : from};
}

void report_record(const record *r) {
  if (!memory) memory = calloc(MEMORY, sizeof *memory);
  if (!memory) abort();
  memcpy(&memory[remembered++ % MEMORY], r, sizeof *r);
  int64_t took = (r->granted ? r->granted : r->ended) - r->called;
  if (took > longest) longest = took;
  total += took;
  waits++;
}

void report_violation(const char *text) {
  if (incident_count == DRAWN) return;
  incident *self = &incidents[incident_count++];
  self->at = now_ns();
  self->node = -1;
  (void)snprintf(self->text, sizeof self->text, "%s", text);
  changed = true;
}

static int64_t last_of(const record *r) {
  int64_t held = atomic_load(&r->held), at = r->ended ? r->ended : now_ns();
  return held > at ? held : at;
}

void report_about(const char *name, const record *r, int node, const char *text) {
  incident *self = &incidents[incident_count - 1];
  if (!incident_count || self->about_count == 2) return;
  about *a = &self->abouts[self->about_count];
  (void)snprintf(a->name, sizeof a->name, "%s", name);
  (void)snprintf(a->text, sizeof a->text, "%s", text);
  memcpy(&a->record, r, sizeof *r);
  self->about_count++;
  self->node = node;
  int64_t until = atomic_load(&r->held);
  if (r->promised < r->ended && r->promised > until) until = r->promised;
  if (self->about_count == 1) { /* the earlier one, or the only one */
    self->left = r->called;
    self->right = last_of(r);
    self->from = r->granted && node < 0 ? r->granted : r->called;
    self->to = node < 0 ? r->ended : until;
    return;
  }
  if (r->called < self->left) self->left = r->called;
  if (last_of(r) > self->right) self->right = last_of(r);
  self->from = r->granted;
  if (until && until < self->to) self->to = until;
}

/* ----------------------------------------------------------------- the lanes */

/* A violation that is about no node shows its own record in the mode HL_EXCLUSIVE. */
static int mode_in(const incident *self, const record *r) {
  if (self->node >= 0) return r->modes[self->node];
  const record *it = &self->abouts[0].record;
  return r->handle == it->handle ? HL_EXCLUSIVE : history_in_the_way(it, r) ? HL_SHARED : 0;
}

static int64_t focus;

static int64_t distance(const record *r) {
  int64_t end = last_of(r);
  return r->called > focus ? r->called - focus : end < focus ? focus - end : 0;
}

static int by_distance(const void *left, const void *right) {
  int64_t a = distance(left), b = distance(right);
  return a < b ? -1 : a > b;
}

static const incident *sorted;

static int about_of(const incident *v, const record *r) {
  for (int i = 0; i < v->about_count; i++)
    if (v->abouts[i].record.handle == r->handle) return i;
  return DRAWN;
}

/* The violation's own records come on top. */
static int by_lane(const void *left, const void *right) {
  const record *a = left, *b = right;
  int first = about_of(sorted, a), second = about_of(sorted, b);
  if (first != second) return first - second;
  if (a->worker != b->worker) return a->worker - b->worker;
  if (a->thread != b->thread) return a->thread - b->thread;
  return a->called < b->called ? -1 : a->called > b->called;
}

static void lane_add(incident *self, const record *r, size_t *capacity) {
  if (r->called > self->right || last_of(r) < self->left) return;
  if (!mode_in(self, r)) return;
  self->lanes = grown(self->lanes, (size_t)self->lane_count, capacity, sizeof *self->lanes);
  memcpy(&self->lanes[self->lane_count++], r, sizeof *r);
}

/* Copies the records, remembered or under way, that touched it. */
static void lanes_copy(incident *self) {
  size_t capacity = 0, known = remembered < MEMORY ? remembered : MEMORY;
  self->drawn = true;
  if (!self->about_count) return;
  int64_t around = (self->right - self->left) / 10;
  around = around < AROUND ? AROUND : around > AROUND_MOST ? AROUND_MOST : around;
  if (self->left < self->from - AROUND_MOST) self->left = self->from - AROUND_MOST;
  if (self->right > self->to + AROUND_MOST) self->right = self->to + AROUND_MOST;
  self->left -= around;
  self->right += around;
  for (size_t i = 0; i < known; i++) lane_add(self, &memory[i], &capacity);
  for (int w = 0; w < WORKERS; w++)
    for (int t = 0; t < THREADS; t++)
      for (int i = 0; i < RECORDS; i++) {
        const record *r = &shared->worker[w].records[t][i];
        int state = atomic_load(&r->state);
        if (state == CALLED || state == HELD) lane_add(self, r, &capacity);
      }
  if (!self->lane_count) return;
  focus = self->from;
  qsort(self->lanes, (size_t)self->lane_count, sizeof *self->lanes, by_distance);
  if (self->lane_count > LANES_DRAWN) self->lane_count = LANES_DRAWN;
  sorted = self;
  qsort(self->lanes, (size_t)self->lane_count, sizeof *self->lanes, by_lane);
}

/* ------------------------------------------------------------------ sampling */

static void take_sample(int64_t now) {
  static uint64_t before[COUNTS];
  samples = grown(samples, sample_count, &sample_capacity, sizeof *samples);
  sample *s = &samples[sample_count++];
  memset(s, 0, sizeof *s);
  s->at = now;
  s->mood = atomic_load(&shared->mood);
  s->pause = atomic_load(&shared->pause);
  for (int what = 0; what < COUNTS; what++) {
    uint64_t n = 0;
    for (int w = 0; w < WORKERS; w++) n += atomic_load(&shared->worker[w].counts[what]);
    s->counts[what] = n - before[what];
    before[what] = n;
  }
  for (int w = 0; w < shared->workers; w++)
    for (int t = 0; t < THREADS; t++)
      for (int i = 0; i < RECORDS; i++) {
        int state = atomic_load(&shared->worker[w].records[t][i].state);
        s->waiting += state == CALLED;
        s->held += state == HELD;
      }
  s->longest = longest;
  s->total = total;
  s->waits = waits;
  longest = total = waits = 0;
}

void report_turn(int64_t now, const char *path) {
  static int64_t sample_at;
  static uint64_t cuts, resets;
  uint64_t cuts_now = atomic_load(&shared->cuts), resets_now = atomic_load(&shared->resets);
  if (cuts_now != cuts) report_fault("cut", -1, now, now);
  if (resets_now != resets) report_fault("reset", -1, now, now);
  cuts = cuts_now;
  resets = resets_now;
  if (now > sample_at) {
    take_sample(now);
    sample_at = now + S;
  }
  bool ready = changed;
  for (unsigned i = 0; i < incident_count; i++) {
    if (!incidents[i].drawn && now > incidents[i].at + SETTLED) lanes_copy(&incidents[i]);
    ready = ready && incidents[i].drawn;
  }
  if (ready && path) (void)report_write(path, NULL);
}

/* ------------------------------------------------------------------- writing */

static FILE *out;

static void put(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void put(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  (void)vfprintf(out, format, arguments);
  va_end(arguments);
}

static void put_text(const char *text, size_t n) {
  for (size_t i = 0; i < n && text[i]; i++) switch (text[i]) {
    case '<': put("&lt;"); break;
    case '>': put("&gt;"); break;
    case '&': put("&amp;"); break;
    default: (void)fputc(text[i], out);
    }
}

static const char style[] =
    ":root{color-scheme:light "
    "dark;--bg:#fff;--fg:#1f2328;--dim:#656d76;--grid:#d8dee4;--panel:#f6f8fa;"
    "--ex:#d9622b;--sh:#3572b0;--bad:#cf222e;--fault:#8250df;--good:#2da44e;--mood:#eaeef2}"
    "@media(prefers-color-scheme:dark){:root{--bg:#0d1117;--fg:#e6edf3;--dim:#8d96a0;--grid:#"
    "30363d;--panel:#161b22;"
    "--ex:#f0883e;--sh:#58a6ff;--bad:#ff6b63;--fault:#bc8cff;--good:#3fb950;--mood:#21262d}}"
    "body{background:var(--bg);color:var(--fg);font:14px/1.45 "
    "system-ui,sans-serif;max-width:1200px;margin:24px auto;padding:0 16px}"
    "h1{font-size:22px}h2{font-size:18px;margin-top:36px}h3{font-size:15px;margin:28px 0 6px}"
    "table{border-collapse:collapse}td{padding:2px 18px 2px 0;border-bottom:1px solid "
    "var(--grid)}td+td{text-align:right;font-variant-numeric:tabular-nums}"
    ".sum{columns:2;max-width:900px}.bad{color:var(--bad)}.dim{color:var(--dim)}.about{font:12px/"
    "1.5 ui-monospace,monospace;white-space:pre-wrap;"
    "background:var(--panel);padding:6px 10px;margin:4px "
    "0;border-radius:6px}svg{display:block;max-width:100%;height:auto;margin:8px 0}"
    "svg text{font:11px system-ui,sans-serif;fill:var(--fg)}svg .dim{fill:var(--dim)}svg "
    ".mark{font-weight:600;fill:var(--bad)}"
    ".grid{stroke:var(--grid)}.ex{fill:var(--ex)}.sh{fill:var(--sh)}.call{fill-opacity:.25}.end{"
    "fill-opacity:.55}"
    ".hex{fill:url(#hex)}.hsh{fill:url(#hsh)}.lex{stroke:var(--ex)}.lsh{stroke:var(--sh)}.fault{"
    "fill:var(--fault);stroke:var(--fault)}"
    ".over{fill:var(--bad);fill-opacity:.16;stroke:var(--bad);stroke-opacity:.6}.row{fill:var(--"
    "panel)}.line{fill:none;stroke-width:1.6}"
    ".mood{fill:var(--mood)}.badline{stroke:var(--bad);stroke-width:1.5}.on{font-size:10px!"
    "important;fill:#fff!important;font-weight:600!important}"
    ".legend span{display:inline-block;margin-right:16px}.legend "
    "i{display:inline-block;width:26px;height:10px;margin-right:5px}";

/* ---- axes */

typedef struct axis {
  int64_t from, to, zero; /* labels count from zero */
} axis;

static double x_at(const axis *self, int64_t at) {
  if (at < self->from) at = self->from;
  if (at > self->to) at = self->to;
  return LEFT + PLOT * ((double)(at - self->from) / (double)(self->to - self->from));
}

static int64_t step_for(int64_t span, int most) {
  static const int64_t steps[] = {1, 2, 5};
  int64_t unit = 1000;
  for (;; unit *= 10)
    for (int i = 0; i < 3; i++)
      if (span / (unit * steps[i]) < most) return unit * steps[i];
}

static void put_axis(const axis *self, double top, double bottom) {
  int64_t step = step_for(self->to - self->from, 11);
  bool ms = step < S / 10;
  int digits = 0;
  for (int64_t one = ms ? MS : S; one > step; one /= 10) digits++;
  int64_t first = (self->from - self->zero) / step * step;
  for (int64_t at = first; at <= self->to - self->zero; at += step) {
    if (at + self->zero < self->from) continue;
    double x = x_at(self, at + self->zero);
    put("<line class=grid x1='%.1f' x2='%.1f' y1='%.1f' y2='%.1f'/><text class=dim x='%.1f' "
        "y='%.1f' text-anchor='middle'>%.*f %s</text>",
        x, x, top, bottom, x, bottom + 14, digits, (double)at / (double)(ms ? MS : S),
        ms ? "ms" : "s");
  }
}

/* ---- one violation */

static const char *end_mark(const record *r) {
  if (r->status == HL_TIMEOUT) return "timed out";
  if (r->status == HL_DEADLOCK) return "deadlock";
  if (!r->ended) return "";
  switch (r->how) {
  case END_RELEASED: return "";
  case END_FREED: return "freed";
  case END_CLOSED: return "closed";
  case END_LOST: return "lost";
  case END_NO_GRANT: return "refused";
  case END_CANCELLED: return "cancelled";
  case END_DIED: return "died";
  case END_EXPORTED: return "exported";
  case END_LEFT: return "left";
  }
  return "";
}

static void put_bar(const axis *a, const char *class, int64_t from, int64_t to, double y,
                    double height) {
  if (!from || to < a->from || from > a->to || to < from) return;
  double x = x_at(a, from), width = x_at(a, to) - x;
  put("<rect class='%s' x='%.2f' y='%.1f' width='%.2f' height='%.1f'/>", class, x, y,
      width < 0.8 ? 0.8 : width, height);
}

static void put_record(const incident *v, const axis *a, const record *r, int mode, double y) {
  const char *class = mode == HL_SHARED ? "sh" : "ex", *mark = end_mark(r);
  char name[32];
  int64_t ended = r->ended ? r->ended : a->to;
  int64_t held = atomic_load(&r->held);
  int which = about_of(v, r);
  bool granted = r->granted != 0;
  if (held < r->granted) held = r->granted;
  put("<g><title>");
  put("worker %d (pid %d), thread %d, manager %d, handle %llu: %s of %d targets, time-out %lld "
      "ms%s%s&#10;called %.6f s",
      r->worker, (int)r->pid, r->thread, r->manager, (unsigned long long)r->handle, history_kind(r),
      r->targets, (long long)r->timeout,
      v->node >= 0 ? mode == HL_SHARED ? ", shared" : ", exclusive" : "",
      r->proxied ? ", through the proxy" : "", seconds_at(r->called));
  if (granted)
    put("&#10;granted %.6f s, token %016llx&#10;held for sure until %.6f s", seconds_at(r->granted),
        (unsigned long long)r->token, seconds_at(held));
  if (granted && r->promised == INT64_MAX)
    put("&#10;promised for ever");
  else if (granted && r->promised)
    put("&#10;promised until %.6f s", seconds_at(r->promised));
  if (r->lease) put("&#10;a lease, at most %lld ms", (long long)r->ttl_most);
  if (r->lease && r->cut < INT64_MAX) put(", taken away perhaps at %.6f s", seconds_at(r->cut));
  if (r->ended)
    put("&#10;%s, %.6f to %.6f s", history_end(r), seconds_at(r->ending), seconds_at(r->ended));
  if (r->why[0]) put("&#10;"), put_text(r->why, sizeof r->why);
  put("</title>");
  (void)snprintf(name, sizeof name, "%s call", class);
  put_bar(a, name, r->called, granted ? r->granted : ended, y + 4, ROW - 8);
  if (granted) {
    int64_t promised = r->promised;
    if (r->how == END_RELEASED || r->how == END_FREED || r->how == END_CLOSED)
      if (r->ended && promised > r->ending) promised = r->ending;
    (void)snprintf(name, sizeof name, "h%s", class);
    put_bar(a, name, held, promised, y + 4, ROW - 8);
    put_bar(a, class, r->granted, held, y + 2, ROW - 4);
    (void)snprintf(name, sizeof name, "%s end", class);
    if (r->ended) put_bar(a, name, r->ending, ended, y + 8, ROW - 16);
    double x = x_at(a, r->granted), width = x_at(a, held) - x;
    if (held > a->from && r->granted < a->to && width > 34) {
      put("<text class=on x='%.1f' y='%.1f'>", x + 4, y + ROW - 7);
      if (which < DRAWN) put("%s ", v->abouts[which].name);
      if (width > 145)
        put("token %llx", (unsigned long long)r->token);
      else if (width > 75)
        put("…%llx", (unsigned long long)(r->token & 0xffffff));
      put("</text>");
    }
  }
  if (*mark && ended <= a->to && ended >= a->from)
    put("<text class='%s' x='%.1f' y='%.1f'>%s</text>",
        r->how == END_LOST || r->how == END_DIED ? "mark" : "dim", x_at(a, ended) + 3, y + ROW - 7,
        mark);
  put("</g>");
}

/* Rows: one for what a thread did one after the other. Close up, only of those who held, or said so. */
static void put_lanes(const incident *v, const axis *a, bool close_up) {
  int row_of[LANES_DRAWN], rows = 0;
  int64_t free_at[LANES_DRAWN] = {0};
  int worker_of[LANES_DRAWN] = {0}, thread_of[LANES_DRAWN] = {0};
  char who[LANES_DRAWN][24];
  int64_t gap = (a->to - a->from) / 14;
  for (int i = 0; i < v->lane_count; i++) {
    const record *r = &v->lanes[i];
    int row = 0;
    row_of[i] = -1;
    if (r->called > a->to || last_of(r) < a->from) continue;
    if (close_up && (!r->granted || r->granted > a->to) && about_of(v, r) == DRAWN) continue;
    while (row < rows &&
           (worker_of[row] != r->worker || thread_of[row] != r->thread || free_at[row] > r->called))
      row++;
    if (row == rows) {
      worker_of[row] = r->worker;
      thread_of[row] = r->thread;
      who[row][0] = '\0';
      rows++;
    }
    row_of[i] = row;
    free_at[row] = last_of(r) + (*end_mark(r) ? gap : 0);
    int which = about_of(v, r);
    if (which < DRAWN) (void)snprintf(who[row], sizeof who[row], "%s  ", v->abouts[which].name);
  }
  double top = 30, bottom = top + rows * ROW;
  put("<svg viewBox='0 0 %d %.0f' width='%d' height='%.0f' xmlns='http://www.w3.org/2000/svg'>",
      WIDTH, bottom + 22, WIDTH, bottom + 22);
  for (int row = 0; row < rows; row += 2)
    put("<rect class=row x='%d' y='%.0f' width='%d' height='%d'/>", 0, top + row * ROW, WIDTH, ROW);
  put_axis(a, top, bottom);
  double x = x_at(a, v->from), width = x_at(a, v->to) - x;
  put("<rect class=over x='%.2f' y='%.0f' width='%.2f' height='%.0f'><title>the violation: %.6f to "
      "%.6f s</title></rect>",
      x, top - 4, width < 1 ? 1 : width, bottom - top + 4, seconds_at(v->from), seconds_at(v->to));
  for (int row = 0; row < rows; row++) {
    put("<text x='%d' y='%.0f' text-anchor='end'>", LEFT - 8, top + row * ROW + ROW - 7);
    if (who[row][0]) put("<tspan class=mark>%s</tspan>", who[row]);
    put("worker %d thread %d</text>", worker_of[row], thread_of[row]);
  }
  for (int i = 0; i < v->lane_count; i++)
    if (row_of[i] >= 0)
      put_record(v, a, &v->lanes[i], mode_in(v, &v->lanes[i]), top + row_of[i] * ROW);
  double last = -100;
  for (size_t i = 0; i < fault_count; i++) {
    const fault *f = &fault_list[i];
    if (f->to < a->from || f->from > a->to) continue;
    double at = x_at(a, f->from), wide = x_at(a, f->to) - at;
    put("<g class=fault><title>%s", f->what);
    if (f->worker >= 0) put(" of worker %d", f->worker);
    put(", %.3f s</title>", seconds_at(f->from));
    if (f->to > f->from && f->worker >= 0)
      for (int row = 0; row < rows; row++)
        if (worker_of[row] == f->worker)
          put("<rect x='%.1f' y='%.1f' width='%.1f' height='%d' fill-opacity='.25' stroke='none'/>",
              at, top + row * ROW, wide, ROW);
    if (f->from >= a->from)
      put("<line x1='%.1f' x2='%.1f' y1='18' y2='%.0f' stroke-dasharray='3 3'/>", at, at, bottom);
    put("</g>");
    if (at > last + 70) {
      put("<text x='%.1f' y='13' text-anchor='middle'>%s", at, f->what);
      if (f->worker >= 0) put(" %d", f->worker);
      put("</text>");
      last = at;
    }
  }
  put("</svg>\n");
}

static void put_incident(unsigned n) {
  const incident *v = &incidents[n];
  char node[32];
  put("<h3 id=v%u><span class=bad>Violation %u</span>, told at %.3f s: ", n + 1, n + 1,
      seconds_at(v->at));
  put_text(v->text, sizeof v->text);
  put("</h3>\n");
  for (int i = 0; i < v->about_count; i++) {
    put("<div class=about>");
    put_text(v->abouts[i].text, sizeof v->abouts[i].text);
    put("</div>\n");
  }
  if (!v->lane_count) return;
  if (v->node >= 0)
    put("<p class=dim>Who called for %s or held it; seconds since the run began:</p>",
        node_show(v->node, node));
  else
    put("<p class=dim>Who was in its way or wanted any of it (blue); itself (orange):</p>");
  put_lanes(v, &(axis){v->left, v->right, v->left - (int64_t)(seconds_at(v->left) * 1e9)}, false);
  int64_t span = v->to - v->from;
  if (span < 20000) span = 20000;
  if (span < (v->right - v->left) / 15 && v->about_count == 2) {
    put("<p class=dim>Close up, those who held; 0 is when B was granted:</p>");
    put_lanes(v, &(axis){v->from - 2 * span, v->from + 4 * span, v->from}, true);
  }
}

/* ---- over time */

typedef struct column {
  double granted, timed_out, lost, waiting, held, longest, mean;
} column;

static void put_line(const char *color, const column *columns, int n, size_t field, double most,
                     double top, double height) {
  put("<polyline class=line style='stroke:var(--%s)' points='", color);
  for (int i = 0; i < n; i++) {
    double value;
    memcpy(&value, (const char *)&columns[i] + field, sizeof value);
    put("%.1f,%.1f ", LEFT + PLOT * ((double)i + 0.5) / n,
        top + height - (most > 0 ? value / most * height : 0));
  }
  put("'/>");
}

static double most_of(const column *columns, int n, size_t field) {
  double most = 0, value;
  for (int i = 0; i < n; i++) {
    memcpy(&value, (const char *)&columns[i] + field, sizeof value);
    if (value > most) most = value;
  }
  return most;
}

typedef struct curve {
  const char *name, *color;
  size_t field;
} curve;

static void put_plot(const axis *a, const column *columns, int n, const char *title,
                     const char *unit, const curve *curves, int curve_count, double top,
                     double height) {
  double most = 0;
  for (int i = 0; i < curve_count; i++) {
    double one = most_of(columns, n, curves[i].field);
    if (one > most) most = one;
  }
  put_axis(a, top, top + height);
  put("<text x='0' y='%.0f' style='font-weight:600'>%s</text>", top + 10, title);
  for (int i = 0; i < curve_count; i++)
    put("<text x='14' y='%.0f'>%s</text><line x1='0' x2='10' y1='%.0f' y2='%.0f' "
        "style='stroke:var(--%s);stroke-width:3'/>",
        top + 28 + 16 * i, curves[i].name, top + 24 + 16 * i, top + 24 + 16 * i, curves[i].color);
  put("<text class=dim x='%d' y='%.0f' text-anchor='end'>%.3g %s</text>", LEFT - 6,
      top + height + 4 - height, most, unit);
  put("<line class=grid x1='%d' x2='%d' y1='%.0f' y2='%.0f'/><line class=grid x1='%d' x2='%d' "
      "y1='%.0f' y2='%.0f'/>",
      LEFT, LEFT + PLOT, top, top, LEFT, LEFT + PLOT, top + height, top + height);
  for (int i = 0; i < curve_count; i++)
    put_line(curves[i].color, columns, n, curves[i].field, most, top, height);
}

static void put_time(void) {
  static const char *const moods[MOODS] = {"mixed", "large", "narrow"};
  enum { KINDS = 24, HEIGHT = 130 };
  if (sample_count < 3) return;
  axis a = {samples[0].at, samples[sample_count - 1].at,
            samples[0].at - (int64_t)(seconds_at(samples[0].at) * 1e9)};
  int n = sample_count - 1 < COLUMNS ? (int)sample_count - 1 : COLUMNS;
  column *columns = calloc((size_t)n, sizeof *columns);
  const char *kinds[KINDS];
  int kind_count = 0;
  if (!columns) abort();
  for (int i = 0; i < n; i++) {
    column *c = &columns[i];
    size_t first = 1 + (size_t)i * (sample_count - 1) / (size_t)n,
           end = 1 + (size_t)(i + 1) * (sample_count - 1) / (size_t)n;
    double seconds = (double)(samples[end - 1].at - samples[first - 1].at) / 1e9, sum = 0;
    int ended = 0;
    for (size_t j = first; j < end; j++) {
      const sample *s = &samples[j];
      c->granted += (double)s->counts[COUNT_GRANTS] / seconds;
      c->timed_out += (double)s->counts[COUNT_TIMEOUTS] / seconds;
      c->lost += (double)s->counts[COUNT_LOST] / seconds;
      c->waiting += s->waiting / (double)(end - first);
      c->held += s->held / (double)(end - first);
      if ((double)s->longest / 1e9 > c->longest) c->longest = (double)s->longest / 1e9;
      sum += (double)s->total / 1e9;
      ended += s->waits;
    }
    c->mean = ended ? sum / ended : 0;
  }
  for (size_t i = 0; i < fault_count; i++) {
    int k = 0;
    while (k < kind_count && strcmp(kinds[k], fault_list[i].what) != 0) k++;
    if (k == kind_count && k < KINDS) kinds[kind_count++] = fault_list[i].what;
  }
  double top = 24, faults_top = top + 3 * (HEIGHT + 34), bottom = faults_top + kind_count * 16 + 20;
  put("<svg viewBox='0 0 %d %.0f' width='%d' height='%.0f' xmlns='http://www.w3.org/2000/svg'>",
      WIDTH, bottom, WIDTH, bottom);
  for (size_t i = 1, from = 0; i <= sample_count; i++) {
    if (i < sample_count && samples[i].mood == samples[from].mood) continue;
    double x = x_at(&a, samples[from].at),
           width = x_at(&a, samples[i < sample_count ? i : i - 1].at) - x;
    if (samples[from].mood % 2)
      put("<rect class=mood x='%.1f' y='%.0f' width='%.1f' height='%.0f'/>", x, top - 16, width,
          faults_top - top);
    if (width > 40)
      put("<text class=dim x='%.1f' y='%.0f'>%s</text>", x + 3, top - 5,
          moods[samples[from].mood % MOODS]);
    from = i;
  }
  put_plot(&a, columns, n, "Calls that ended", "/s",
           (const curve[]){{"granted", "good", offsetof(column, granted)},
                           {"timed out", "sh", offsetof(column, timed_out)},
                           {"lost", "bad", offsetof(column, lost)}},
           3, top, HEIGHT);
  put_plot(&a, columns, n, "Calls under way", "",
           (const curve[]){{"waiting", "sh", offsetof(column, waiting)},
                           {"held", "ex", offsetof(column, held)}},
           2, top + HEIGHT + 34, HEIGHT);
  put_plot(&a, columns, n, "Until they ended", "s",
           (const curve[]){{"longest", "ex", offsetof(column, longest)},
                           {"mean", "sh", offsetof(column, mean)}},
           2, top + 2 * (HEIGHT + 34), HEIGHT);
  for (int k = 0; k < kind_count; k++) {
    double y = faults_top + k * 16;
    int n_of = 0, last = -1;
    for (size_t i = 0; i < fault_count; i++) {
      if (strcmp(fault_list[i].what, kinds[k]) != 0) continue;
      double x = x_at(&a, fault_list[i].from), width = x_at(&a, fault_list[i].to) - x;
      n_of++;
      if ((int)x == last) continue;
      last = (int)x;
      put("<rect class=fault stroke='none' fill-opacity='.8' x='%.1f' y='%.0f' width='%.1f' "
          "height='11'><title>%s",
          x, y, width < 2 ? 2 : width, kinds[k]);
      if (fault_list[i].worker >= 0) put(" of worker %d", fault_list[i].worker);
      put(", %.3f s</title></rect>", seconds_at(fault_list[i].from));
    }
    put("<text x='%d' y='%.0f' text-anchor='end'>%s <tspan class=dim>(%d)</tspan></text>", LEFT - 8,
        y + 10, kinds[k], n_of);
  }
  double numbered = 0;
  for (unsigned i = 0; i < incident_count; i++) {
    double x = x_at(&a, incidents[i].from ? incidents[i].from : incidents[i].at);
    put("<a href='#v%u'><line class=badline x1='%.1f' x2='%.1f' y1='%.0f' "
        "y2='%.0f'><title>violation %u</title></line>",
        i + 1, x, x, top - 4, bottom - 14, i + 1);
    if (x > numbered + 14) {
      put("<text class=mark x='%.1f' y='%.0f' text-anchor='middle'>%u</text>", x, bottom - 2,
          i + 1);
      numbered = x;
    }
    put("</a>");
  }
  put("</svg>\n");
  free(columns);
}

/* Lines of two spaces, a name of 24 characters, a value. */
static void put_summary(const char *text) {
  put("<table class=sum>");
  for (const char *line = text, *end; line && *line; line = end ? end + 1 : NULL) {
    end = strchr(line, '\n');
    size_t n = end ? (size_t)(end - line) : strlen(line), name = n > 26 ? 26 : n;
    if (n < 3 || line[0] != ' ') continue;
    while (name > 2 && line[name - 1] == ' ') name--;
    put("<tr><td>");
    put_text(line + 2, name - 2);
    put("<td>");
    if (n > 26) put_text(line + 26, n - 26);
  }
  put("</table>\n");
}

int report_write(const char *path, const char *summary) {
  int64_t now = now_ns();
  for (unsigned i = 0; i < incident_count; i++)
    if (!incidents[i].drawn) lanes_copy(&incidents[i]);
  out = fopen(path, "we");
  if (!out) return -1;
  put("<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport "
      "content='width=device-width'><title>soak, seed %llu</title><style>%s</style>\n",
      (unsigned long long)shared->seed, style);
  put("<h1>soak of hierlock: %.*s, %.0f s, seed %llu: <span class='%s'>%u "
      "violation%s</span></h1>\n",
      (int)strcspn(shared->dsn, ":"), shared->dsn, seconds_at(now),
      (unsigned long long)shared->seed, violations ? "bad" : "", violations,
      violations == 1 ? "" : "s");
  if (!summary) put("<p class=dim>The run goes on; this is how it stood then.</p>");
  put("<h2>Over time</h2>\n");
  put_time();
  if (incident_count) {
    put("<h2>Violations%s</h2>\n", violations > DRAWN ? ": the first ones" : "");
    put("<svg width='0' height='0' style='position:absolute'><defs>"
        "<pattern id=hex width='5' height='5' patternUnits='userSpaceOnUse' "
        "patternTransform='rotate(45)'><line class=lex x1='0' y1='0' x2='0' y2='5' "
        "stroke-width='2.4'/></pattern>"
        "<pattern id=hsh width='5' height='5' patternUnits='userSpaceOnUse' "
        "patternTransform='rotate(45)'><line class=lsh x1='0' y1='0' x2='0' y2='5' "
        "stroke-width='2.4'/></pattern></defs></svg>");
    put("<p class='legend dim'><span><i style='background:var(--ex)'></i>exclusive, as it "
        "believed</span><span><i style='background:var(--sh)'></i>shared</span>"
        "<span><i style='background:var(--ex);opacity:.25'></i>the call waits</span>"
        "<span><i style='background:repeating-linear-gradient(45deg,var(--ex) 0 2px,transparent "
        "2px 5px)'></i>promised by remaining()</span>"
        "<span><i style='background:var(--fault);opacity:.4'></i>fault</span><span><i "
        "style='background:var(--bad);opacity:.3'></i>the violation</span>"
        "More is told by the mouse.</p>\n");
  }
  for (unsigned i = 0; i < incident_count; i++) put_incident(i);
  if (summary) {
    put("<h2>Summary</h2>\n");
    put_summary(summary);
  }
  put("</html>\n");
  changed = false;
  return fclose(out);
}
