/*
 * history.c - reads the workers' records and decides whether they fit the rules:
 *
 *   1. Two handles that hold a node at once both hold it shared: see soak.h for
 *      what counts as holding.
 *   2. Of two exclusive holders of a node the later one's token is greater.
 *   3. A time-out comes neither early nor later than LATE; a failed connection than three times that.
 *   4. No call outlives its time-out by HANG.
 *   5. No call is told `timeout` when no other held or wanted its nodes in all that time (of
 *      FREE_WAIT or longer).
 *   6. Without faults no session is lost.
 *
 * And the rules of leasing.c for leases.
 *
 * Nothing is looked at before it is final. A record that ended at t can only meet records that were
 * granted before t. A record granted later than the beginning of this sweep cannot meet it. So it can
 * be forgotten once no call or lock that is under way began before t.
 */
#include "leasing.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LATE (5 * S)
#define HANG (30 * S)
#define FREE_WAIT (3 * S)
/* How long after an end a lock may still block others. After a release, the release is on its
   way; after a failure or a death the server may need as long as a wait or a lease. */
#define TRAIL (500 * MS)
#define TRAIL_AFTER_FAILURE (12 * S)
/* So long another thread may import a lease, or be told of its end. */
#define LEASES_REMEMBERED (10 * S)

enum { SHOWN = 30 };

/* Times are for a machine that has room. A machine on which many more threads want to run than
   can is slower by so much. A machine that has just kept main itself from running keeps others
   as well, each of the several that a call needs. */
static int64_t lateness, lateness_at;

void history_late(int64_t by, int64_t now) {
  if (by <= lateness && now - lateness_at < 60 * S) return;
  lateness = by;
  lateness_at = now;
}

int64_t patience(int64_t time) {
  static double load, room;
  static int64_t looked_at; /* the kernel's figure changes every five seconds */
  int64_t now = now_ns();
  if (now - looked_at > S) {
    room = 2.0 * (double)sysconf(_SC_NPROCESSORS_ONLN);
    if (getloadavg(&load, 1) != 1) load = 0;
    looked_at = now;
  }
  if (load > room) time = (int64_t)((double)time * load / room);
  return time + 10 * lateness;
}

unsigned violations;
int64_t longest_wait, latest_timeout, longest_overlap;
uint64_t grants_checked;

static bool faults_expected, kills_expected;
static int64_t began;

static record **kept;
static size_t kept_count, kept_capacity;
/* For each node: the greatest token of the forgotten records. */
static uint64_t last_token[NODES];
static int64_t last_token_at[NODES];

void history_expect(bool faults, bool kills) {
  faults_expected = faults;
  kills_expected = kills;
  began = now_ns();
}

double seconds_at(int64_t when) { return (double)(when - began) / 1e9; }

void say(const char *format, ...) {
  va_list arguments;
  (void)printf("%9.3f  ", seconds_at(now_ns()));
  va_start(arguments, format);
  (void)vprintf(format, arguments);
  va_end(arguments);
  (void)printf("\n");
  (void)fflush(stdout);
}

void violation(const char *format, ...) {
  char text[2 * MESSAGE];
  va_list arguments;
  violations++;
  if (violations > SHOWN) return;
  va_start(arguments, format);
  (void)vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  (void)printf("%9.3f  VIOLATION %u: %s\n", seconds_at(now_ns()), violations, text);
  report_violation(text);
  if (violations == SHOWN) (void)printf("(further ones are only counted)\n");
  (void)fflush(stdout);
}

static const char *const kinds[] = {"acquire",      "start",  "extend",
                                    "start_extend", "import", "revoke"};
static const char *const endings[] = {"released",
                                      "freed",
                                      "closed its manager",
                                      "was told of the loss",
                                      "was not granted",
                                      "cancelled",
                                      "died",
                                      "exported it",
                                      "left it"};
static const char *const filters[] = {"owner", "id", "target", ""};

const char *history_kind(const record *r) { return kinds[r->kind]; }
const char *history_end(const record *r) { return endings[r->how]; }

/* Shows a record that the last violation is about; the node: or -1. */
static void show(const char *name, const record *r, int node) {
  if (violations > SHOWN) return;
  int shared_nodes = 0, exclusive_nodes = 0;
  char *text = NULL;
  size_t size;
  FILE *to = open_memstream(&text, &size);
  if (!to) abort();
  for (int i = 0; i < NODES; i++) {
    shared_nodes += r->modes[i] == HL_SHARED;
    exclusive_nodes += r->modes[i] == HL_EXCLUSIVE;
  }
  (void)fprintf(to,
                "%s: worker %d (pid %d) thread %d manager %d handle %llu: %s of %d targets "
                "(%d nodes exclusive, %d shared), time-out %lld ms%s\n",
                name, r->worker, (int)r->pid, r->thread, r->manager, (unsigned long long)r->handle,
                kinds[r->kind], r->targets, exclusive_nodes, shared_nodes, (long long)r->timeout,
                r->proxied ? ", through the proxy" : "");
  (void)fprintf(to, "                called %.6f", seconds_at(r->called));
  if (r->since) (void)fprintf(to, ", a lease since %.6f", seconds_at(r->since));
  if (r->asked) (void)fprintf(to, ", not done %.6f", seconds_at(r->asked));
  if (r->granted)
    (void)fprintf(to, ", granted %.6f, token %016llx", seconds_at(r->granted),
                  (unsigned long long)r->token);
  if (r->held) (void)fprintf(to, ", held for sure until %.6f", seconds_at(r->held));
  if (r->granted && r->promised == INT64_MAX)
    (void)fprintf(to, ", promised for ever");
  else if (r->granted && r->promised)
    (void)fprintf(to, ", promised until %.6f", seconds_at(r->promised));
  if (r->ended)
    (void)fprintf(to, ", %s %.6f to %.6f", endings[r->how], seconds_at(r->ending),
                  seconds_at(r->ended));
  if (r->lease) {
    (void)fprintf(to, "\n                lease of owner o%d, ttl at most %lld ms%s%s", r->owner,
                  (long long)r->ttl_most, r->refreshes ? ", auto_refresh" : "",
                  r->stays ? ", no auto_release" : "");
    if (r->leased) (void)fprintf(to, ", converted %.6f", seconds_at(r->leased));
    if (r->sure) (void)fprintf(to, ", unbroken at %.6f", seconds_at(r->sure));
    if (r->yields)
      (void)fprintf(to, ", may have ended it itself from %.6f on", seconds_at(r->yields));
    if (r->cut < INT64_MAX) (void)fprintf(to, ", taken away perhaps at %.6f", seconds_at(r->cut));
    if (r->lost_at)
      (void)fprintf(to, ", told of the loss by a call of %.6f", seconds_at(r->lost_at));
    if (r->revocation) (void)fprintf(to, ", by soak-%llu", (unsigned long long)r->revocation);
  }
  if (r->kind == CALL_REVOKE)
    (void)fprintf(to, "\n                soak-%llu by %s (owner o%d): %llu leases",
                  (unsigned long long)r->revocation, filters[r->filter], r->owner,
                  (unsigned long long)r->revoked);
  if (r->status) (void)fprintf(to, ", status %s: %s", hl_status_name(r->status), r->why);
  (void)fclose(to);
  (void)printf("             %s\n", text);
  (void)fflush(stdout);
  report_about(name, r, node, text);
  free(text);
}

void show_record(const char *name, const record *r) { show(name, r, -1); }

/* ------------------------------------------------------------ single records */

/* How long a call took, as far as it is known not to have ended before. */
static int64_t took_at_least(const record *r) {
  if (r->asked) return r->asked - r->called;
  return (r->granted ? r->granted : r->ended) - r->called;
}

/* A new connection may take three times as long as the last one took (docs/limits.md): on a busy
   machine that is seconds, also where the network is cut meanwhile. */
static int64_t lateness_of(const record *r) {
  return r->status == HL_ECONNECTION ? 3 * LATE : LATE;
}

static void check_times(const record *r) {
  int64_t stopped = atomic_load(&shared->worker[r->worker].stopped) - r->stopped;
  int64_t took = r->ended - r->called, timeout = r->timeout * MS, known = took_at_least(r);
  int64_t late = lateness_of(r);
  if (r->granted) took = r->granted - r->called;
  if (r->how == END_DIED && !r->granted) return;
  if (r->kind == CALL_IMPORT || r->kind == CALL_REVOKE) {
    if (took > timeout + stopped + late && took > timeout + stopped + patience(late)) {
      violation("a call took %.3f s", (double)took / 1e9);
      show("it", r, -1);
    }
    return;
  }
  if (took > longest_wait) longest_wait = took;
  if (r->status == HL_TIMEOUT) {
    if (took < timeout) {
      violation("a time-out came early, by %.3f ms", (double)(timeout - took) / 1e6);
      show("it", r, -1);
    }
    if (known - timeout - stopped > latest_timeout) latest_timeout = known - timeout - stopped;
  }
  if (known > timeout + stopped + late && known > timeout + stopped + patience(late)) {
    violation("a call took %.3f s, and its time-out is %.3f s", (double)known / 1e9,
              (double)timeout / 1e9);
    show("it", r, -1);
  }
  if (r->how == END_LOST && !faults_expected && !r->lease) {
    violation("a lock was lost, and nothing was done to it");
    show("it", r, -1);
  }
}

static void check_under_way(const record *r, int64_t now) {
  static int64_t told[WORKERS][THREADS];
  int64_t stopped = atomic_load(&shared->worker[r->worker].stopped) - r->stopped;
  if (now - r->called < r->timeout * MS + stopped + HANG ||
      now - r->called < r->timeout * MS + stopped + patience(HANG) ||
      told[r->worker][r->thread] == r->called)
    return;
  told[r->worker][r->thread] = r->called;
  violation("a call hangs, for %.1f s now", (double)(now - r->called) / 1e9);
  show("it", r, -1);
}

/* ------------------------------------------------------------------- reading */

static void keep(record *r) {
  if (kept_count == kept_capacity) {
    kept_capacity = kept_capacity ? 2 * kept_capacity : 1024;
    kept = realloc(kept, kept_capacity * sizeof *kept);
    if (!kept) abort();
  }
  record *copy = malloc(sizeof *copy);
  if (!copy) abort();
  memcpy(copy, r, sizeof *copy);
  kept[kept_count++] = copy;
  report_record(copy);
  check_times(copy);
  faults_check(copy);
  if (copy->granted) grants_checked++;
}

void history_died(int worker, int64_t now) {
  for (int t = 0; t < shared->threads; t++)
    for (int i = 0; i < RECORDS; i++) {
      record *r = &shared->worker[worker].records[t][i];
      int state = atomic_load(&r->state);
      if (state != CALLED && state != HELD) continue;
      r->how = END_DIED;
      r->ending = r->ended = now;
      atomic_store(&r->state, ENDED);
    }
}

/* The end of a granted holding, for comparisons. A holding that was never confirmed is none. */
static int64_t held_until(const record *r) {
  if (r->lease) return lease_until(r);
  int64_t until = atomic_load(&r->held);
  if (faults_unseen(r)) return 0;
  /* Nothing but a loss that was done to it ends the promise, or its own end. */
  if (r->granted && until && !kills_expected && r->how == END_LOST) {
    int64_t promised = r->promised < r->ended ? r->promised : r->ended;
    if (promised > until) until = promised;
  }
  return until;
}

/* ----------------------------------------------------- rules about two of them */

typedef struct entry {
  record *record;
  int64_t from, until;
} entry;

static int by_grant(const void *left, const void *right) {
  const entry *a = left, *b = right;
  return a->from < b->from ? -1 : a->from > b->from;
}

/* A pair is told once: its later record remembers the earlier one's handle. */
static bool told_already(const record *a, const record *b) {
  static struct { uint64_t a, b; } told[256];
  static unsigned next;
  for (int i = 0; i < 256; i++)
    if (told[i].a == a->handle && told[i].b == b->handle) return true;
  told[next % 256].a = a->handle;
  told[next++ % 256].b = b->handle;
  return false;
}

static void two_holders(int node, const entry *a, const entry *b) {
  char name[32];
  int64_t until = a->until < b->until ? a->until : b->until;
  if (told_already(a->record, b->record)) return;
  if (until - b->from > longest_overlap) longest_overlap = until - b->from;
  violation("two holders of %s at once, for %.3f ms: %s and %s", node_show(node, name),
            (double)(until - b->from) / 1e6,
            a->record->modes[node] == HL_SHARED ? "shared" : "exclusive",
            b->record->modes[node] == HL_SHARED ? "shared" : "exclusive");
  show("A", a->record, node);
  show("B", b->record, node);
}

/* The two entries that hold longest, of different handles. */
typedef struct longest {
  const entry *first, *second;
} longest;

static void longest_add(longest *self, const entry *e) {
  if (!self->first || e->until > self->first->until) {
    if (self->first && self->first->record->handle != e->record->handle) self->second = self->first;
    self->first = e;
  } else if (e->record->handle != self->first->record->handle &&
             (!self->second || e->until > self->second->until)) {
    self->second = e;
  }
}

/* The longest holder before e must have ended before e was granted. */
static void check_overlap(int node, const longest *before, const entry *e) {
  const entry *a = before->first;
  if (a && a->record->handle == e->record->handle) a = before->second;
  if (a && a->until > e->from) two_holders(node, a, e);
}

static void check_node(int node, entry *entries, size_t n) {
  char name[32];
  longest all = {NULL, NULL}, exclusive = {NULL, NULL};
  const record *before = NULL;
  qsort(entries, n, sizeof *entries, by_grant);
  for (size_t i = 0; i < n; i++) {
    const entry *e = &entries[i];
    const record *r = e->record;
    if (r->modes[node] == HL_SHARED) {
      check_overlap(node, &exclusive, e);
      longest_add(&all, e);
      continue;
    }
    check_overlap(node, &all, e);
    longest_add(&all, e);
    longest_add(&exclusive, e);
    if (before && before->handle != r->handle && before->token >= r->token &&
        !faults_new_tokens(before->granted, r->granted) && !told_already(before, r)) {
      violation("tokens of %s do not grow", node_show(node, name));
      show("A", before, node);
      show("B", r, node);
    }
    if (last_token_at[node] < r->granted && last_token[node] > r->token &&
        !faults_new_tokens(last_token_at[node], r->granted) && !told_already(r, r)) {
      violation("tokens of %s do not grow: one of %.6f was %016llx", node_show(node, name),
                seconds_at(last_token_at[node]), (unsigned long long)last_token[node]);
      show("B", r, node);
    }
    before = r;
  }
}

/* Whether the record counts as a holder; a lease that was taken away before its grant was heard
   does not. */
static bool holds(const record *r) {
  if (r->lease) return r->granted && lease_until(r) > (r->since ? r->since : r->granted);
  return r->granted && r->held;
}

static void check_nodes(void) {
  static entry *entries;
  static size_t capacity;
  size_t first[NODES + 1] = {0}, at[NODES];
  for (size_t i = 0; i < kept_count; i++)
    if (holds(kept[i]))
      for (int node = 0; node < NODES; node++) first[node + 1] += kept[i]->modes[node] != 0;
  for (int node = 0; node < NODES; node++) first[node + 1] += first[node];
  if (first[NODES] > capacity) {
    capacity = 2 * first[NODES];
    free(entries);
    entries = malloc(capacity * sizeof *entries);
    if (!entries) abort();
  }
  memcpy(at, first, sizeof at);
  for (size_t i = 0; i < kept_count; i++)
    if (holds(kept[i])) {
      int64_t from = kept[i]->since ? kept[i]->since : kept[i]->granted,
              until = held_until(kept[i]);
      for (int node = 0; node < NODES; node++)
        if (kept[i]->modes[node]) entries[at[node]++] = (entry){kept[i], from, until};
    }
  for (int node = 0; node < NODES; node++)
    check_node(node, entries + first[node], first[node + 1] - first[node]);
}

/* Nodes in one bucket are in each other's way. */
static int bucket_mates[NODES];

static void find_bucket_mates(void) {
  hl_layout *layout;
  uint64_t buckets[NODES];
  node_name name;
  (void)hl_layout_new(NULL, 0, BUCKETS, &layout, NULL);
  for (int i = 0; i < NODES; i++) {
    node_ids(i, &name);
    buckets[i] = hl_layout_bucket(layout, name.ids, name.n) * 4 + name.n;
    bucket_mates[i] = i;
    for (int j = 0; j < i && (shared->buckets || (!shared->server && !shared->leases_only)); j++)
      if (buckets[j] == buckets[i]) bucket_mates[i] = bucket_mates[j];
  }
  hl_layout_unref(layout);
}

bool history_in_the_way(const record *a, const record *b) {
  unsigned char modes[NODES] = {0};
  if (!bucket_mates[NODES - 1]) find_bucket_mates();
  for (int i = 0; i < NODES; i++)
    if (a->modes[i] > modes[bucket_mates[i]]) modes[bucket_mates[i]] = a->modes[i];
  for (int i = 0; i < NODES; i++)
    if (b->modes[i] && modes[bucket_mates[i]] &&
        (b->modes[i] == HL_EXCLUSIVE || modes[bucket_mates[i]] == HL_EXCLUSIVE))
      return true;
  return false;
}

/* The latest time from which the session blocks no other. */
static int64_t session_gone_at(const record *r) {
  switch (r->how) {
  case END_RELEASED:
  case END_FREED:
  case END_CLOSED: return r->ended + patience(r->proxied ? TRAIL_AFTER_FAILURE : TRAIL);
  case END_NO_GRANT:
    return r->ended +
           patience(r->status == HL_TIMEOUT && !r->proxied ? TRAIL : TRAIL_AFTER_FAILURE);
  case END_CANCELLED:
  case END_LOST:
  case END_DIED:
  case END_EXPORTED:
  case END_LEFT: break;
  }
  return r->ended + patience(TRAIL_AFTER_FAILURE);
}

/* A lease that could not be given back is there until its time is up. */
static int64_t gone_at(const record *r) {
  int64_t gone = session_gone_at(r);
  bool given_back = r->how == END_RELEASED || r->how == END_FREED || r->how == END_CLOSED ||
                    (r->how == END_NO_GRANT && r->status == HL_TIMEOUT);
  if (!r->ttl_most || (given_back && !shared->server && !shared->leases_only)) return gone;
  int64_t over = lease_end(r) + patience(TRAIL);
  return over > gone ? over : gone;
}

record **history_kept(size_t *n) {
  *n = kept_count;
  return kept;
}

int64_t history_gone_at(const record *r) { return gone_at(r); }

bool history_told(const record *a, const record *b) { return told_already(a, b); }

static void check_free_timeout(const record *r, int64_t now) {
  if (r->status != HL_TIMEOUT || (r->kind != CALL_ACQUIRE && r->kind != CALL_START) ||
      r->timeout * MS < patience(FREE_WAIT))
    return;
  if (atomic_load(&shared->worker[r->worker].stopped) != r->stopped) return;
  if (faults_excuse(r->called, r->ended)) return;
  for (size_t i = 0; i < kept_count; i++)
    if (kept[i] != r && kept[i]->kind != CALL_REVOKE && kept[i]->called < r->ended &&
        gone_at(kept[i]) > r->called && history_in_the_way(kept[i], r))
      return;
  /* A lock or call under way, a stopped holder above all, blocks, too. */
  for (int w = 0; w < shared->workers; w++)
    for (int t = 0; t < shared->threads; t++)
      for (int i = 0; i < RECORDS; i++) {
        record *other = &shared->worker[w].records[t][i];
        if (atomic_load(&other->state) != FREE && other->kind != CALL_REVOKE &&
            other->called < r->ended && history_in_the_way(other, r))
          return;
      }
  violation("`timeout` after %.3f s, and nobody held or wanted any of it",
            (double)(r->ended - r->called) / 1e9);
  show("it", r, -1);
  (void)now;
}

/* ------------------------------------------------------------------- sweeping */

static int64_t matters_until(const record *r) {
  int64_t held = held_until(r), gone = gone_at(r);
  if (lease_matters(r) || r->kind == CALL_REVOKE) gone += LEASES_REMEMBERED;
  return held > gone ? held : gone;
}

void history_sweep(int64_t now) {
  int64_t horizon = now;
  size_t before = kept_count;
  for (int w = 0; w < shared->workers; w++)
    for (int t = 0; t < shared->threads; t++)
      for (int i = 0; i < RECORDS; i++) {
        record *r = &shared->worker[w].records[t][i];
        int state = atomic_load_explicit(&r->state, memory_order_acquire);
        if (state == CALLED || state == HELD) {
          if (r->called < horizon) horizon = r->called;
          if (state == CALLED) check_under_way(r, now);
        } else if (state == ENDED) {
          keep(r);
          atomic_store_explicit(&r->state, FREE, memory_order_release);
        }
      }
  if (shared->leases) leases_cut(before);
  check_nodes();
  if (shared->leases) leases_check(before);
  for (size_t i = before; i < kept_count; i++) check_free_timeout(kept[i], now);

  size_t left = 0;
  for (size_t i = 0; i < kept_count; i++) {
    record *r = kept[i];
    if (matters_until(r) >= horizon) {
      kept[left++] = r;
      continue;
    }
    if (holds(r))
      for (int node = 0; node < NODES; node++)
        if (r->modes[node] == HL_EXCLUSIVE &&
            (r->token > last_token[node] || faults_new_tokens(last_token_at[node], r->granted))) {
          last_token[node] = r->token;
          last_token_at[node] = r->granted;
        }
    free(r);
  }
  kept_count = left;
}
