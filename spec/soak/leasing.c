/*
 * leasing.c - the rules of the checker (history.c) for leases beside its rules for all locks. soak.h
 * says what is known of a lease; docs/leases.md has the promises:
 *
 *   7. A holder that is told that its lease is lost has had it taken: it was revoked or imported, or its
 *      time was up and another wanted its nodes since, or the answer came when the new time was up, too.
 *   8. A holder that is told by whom its lease was revoked was revoked by that one. After a revocation by
 *      id that found the lease its holder is told so, and never that it is unbroken.
 *   9. When two import one text, the earlier is never told that its lease is unbroken once the later has it.
 *  10. No holder believes in a revoked lease for longer than the longest time that it was asked for.
 *  11. When a lease ends by its time, a waiter that has waited for it alone is granted within DELAY.
 *
 * Rule 1 says that no other gets its nodes before its end, whether or not its holder lives.
 */
#include "leasing.h"

#include <stdio.h>
#include <string.h>

/* hl_lock_remaining is in whole milliseconds, and may say up to one too much. */
#define REMAINING_NS MS
#define DELAY (1 * S)

uint64_t cut_believed, promises_checked, delays_checked, losses_checked;
int64_t longest_cut, longest_delay;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

int64_t lease_until(const record *r) {
  int64_t promised = r->promised > 0 && r->promised < INT64_MAX ? r->promised - REMAINING_NS : 0;
  int64_t yields = atomic_load(&r->yields);
  if (yields) promised = least(promised, yields);
  int64_t until = least(most(atomic_load(&r->held), promised), r->cut);
  return most(until, atomic_load(&r->sure));
}

int64_t lease_end(const record *r) {
  int64_t expires = atomic_load(&r->expires);
  return (expires ? expires : r->ended + (r->ttl_most + 1) * MS) + shared->lingers;
}

bool lease_matters(const record *r) {
  return r->lease && r->kind != CALL_REVOKE && (r->granted || r->kind == CALL_IMPORT);
}

/* ------------------------------------------------------ revocations and imports */

/* A revocation that matches one part of a lease revokes all its parts. */
static bool matches(const record *revocation, const record *r) {
  switch (revocation->filter) {
  case BY_OWNER: return revocation->owner == r->owner;
  case BY_ID: return revocation->handle == r->handle;
  case BY_TARGET: return r->parts > 1 || history_in_the_way(revocation, r);
  case FILTERS: break;
  }
  return false;
}

/* From its call on; INT64_MAX: it says nothing of that lease. An import that is under way, or was, at the same
   time as ours, may have come later. */
static int64_t cut_by(const record *event, const record *r) {
  int64_t from = r->leased ? r->leased : r->called;
  int64_t ended = event->granted ? event->granted : event->ended ? event->ended : INT64_MAX;
  if (event == r || ended <= from || event->called >= r->cut) return INT64_MAX;
  if (event->kind == CALL_IMPORT)
    return event->handle == r->handle && (event->pid != r->pid || event->called != r->called)
               ? most(event->called, r->called)
               : INT64_MAX;
  return matches(event, r) ? event->called : INT64_MAX;
}

static bool is_event(const record *r) { return r->kind == CALL_REVOKE || r->kind == CALL_IMPORT; }

static bool by_id(const record *event) {
  return event->kind == CALL_REVOKE && event->filter == BY_ID && event->status == HL_OK &&
         event->revoked == 1 && event->how != END_DIED;
}

/* All that there are: ended, and under way. */
static const record **events;
static size_t event_count, event_capacity;
static size_t event_old; /* so many of them have been compared with all that was kept before */

static void event_add(const record *r) {
  if (event_count == event_capacity) {
    event_capacity = event_capacity ? 2 * event_capacity : 256;
    events = realloc(events, event_capacity * sizeof *events);
    if (!events) abort();
  }
  events[event_count++] = r;
}

static void events_find(size_t before) {
  size_t n;
  record **kept = history_kept(&n);
  event_count = event_old = 0;
  for (size_t i = 0; i < n; i++) {
    if (is_event(kept[i])) event_add(kept[i]);
    if (i + 1 == before) event_old = event_count;
  }
  for (int w = 0; w < shared->workers; w++)
    for (int t = 0; t < shared->threads; t++)
      for (int i = 0; i < RECORDS; i++) {
        const record *r = &shared->worker[w].records[t][i];
        if (atomic_load_explicit(&r->state, memory_order_acquire) != FREE && is_event(r))
          event_add(r);
      }
}

void leases_cut(size_t before) {
  size_t n;
  record **kept = history_kept(&n);
  events_find(before);
  for (size_t i = 0; i < n; i++) {
    record *r = kept[i];
    if (!lease_matters(r)) continue;
    for (size_t j = i < before ? event_old : 0; j < event_count; j++)
      r->cut = least(r->cut, cut_by(events[j], r));
    r->cut = least(r->cut,
                   faults_cut(r->since ? r->since : r->called, r->ended + (r->ttl_most + 1) * MS));
  }
}

/* ------------------------------------------------------------ rules 8, 9 and 10 */

static void check_event(const record *event, const record *r) {
  int64_t sure = atomic_load(&r->sure), held = atomic_load(&r->held);
  if (event == r || event->handle != r->handle) return;
  /* A member has a record of a quorum's try, too, and is believed when another member is silent:
     a later grant is another lease. */
  bool of_a_try =
      strncmp(shared->dsn, "quorum:", 7) == 0 && event->called < (r->since ? r->since : r->granted);
  if (by_id(event) && !of_a_try) {
    if (sure > event->ended && !history_told(r, event)) {
      violation("a lease was revoked at %.6f, and its holder was told at %.6f that it is unbroken",
                seconds_at(event->ended), seconds_at(sure));
      show_record("it", r);
      show_record("by", event);
    }
    if (held > event->ended + (r->ttl_most + 1) * MS && !history_told(r, event)) {
      violation("a lease was revoked at %.6f, and believed for %.3f ms, and its ttl was never more "
                "than %lld ms",
                seconds_at(event->ended), (double)(held - event->ended) / 1e6,
                (long long)r->ttl_most);
      show_record("it", r);
      show_record("by", event);
    }
  }
  if (event->kind == CALL_IMPORT && event->granted && r->granted && event->called > r->granted &&
      sure > event->granted && !history_told(r, event)) {
    violation("a lease was imported elsewhere at %.6f, and whoever had it before was told at %.6f "
              "that it is unbroken",
              seconds_at(event->granted), seconds_at(sure));
    show_record("it", r);
    show_record("by", event);
  }
}

/* The revocation of the lease before that call, for certain; NULL: none. */
static const record *revoked_before(const record *r) {
  int64_t from = r->leased ? r->leased : r->granted;
  for (size_t i = 0; i < event_count; i++)
    if (by_id(events[i]) && events[i]->handle == r->handle && events[i]->called > from &&
        events[i]->ended < r->lost_at)
      return events[i];
  return NULL;
}

static bool imported_by_another(const record *r) {
  for (size_t i = 0; i < event_count; i++)
    if (events[i]->kind == CALL_IMPORT && events[i]->handle == r->handle &&
        (events[i]->pid != r->pid || events[i]->called != r->called))
      return true;
  return false;
}

static void check_words(const record *r) {
  if (r->revocation) {
    for (size_t i = 0; i < event_count; i++)
      if (events[i]->kind == CALL_REVOKE && events[i]->revocation == r->revocation) {
        if (matches(events[i], r)) return;
        violation("a holder was told of a revocation that did not name his lease");
        show_record("it", r);
        show_record("by", events[i]);
        return;
      }
    if (r->kind == CALL_IMPORT) return; /* it may be long ago */
    violation("a holder was told of a revocation that nobody made");
    show_record("it", r);
    return;
  }
  const record *event =
      r->granted && !imported_by_another(r) && !faults_lose_leases(r->called, r->ended)
          ? revoked_before(r)
          : NULL;
  /* A wall clock that is set forward by more than an hour makes the account of a revocation old. */
  if (!event || shared->clock_jumps) return;
  violation("a lease was revoked at %.6f, and its holder was not told by whom",
            seconds_at(event->ended));
  show_record("it", r);
  show_record("by", event);
}

/* ------------------------------------------------------------------- rule 7 */

/* What is asked of all records about the loss of a lease, of which r tells; and about a part of it. */
typedef struct question {
  const record *r, *part;
} question;

/* Whether it is so of any record, ended or under way. */
static bool any(bool (*is)(const record *other, const question *about), const question *about) {
  size_t n;
  record **kept = history_kept(&n);
  for (size_t i = 0; i < n; i++)
    if (is(kept[i], about)) return true;
  for (int w = 0; w < shared->workers; w++)
    for (int t = 0; t < shared->threads; t++)
      for (int i = 0; i < RECORDS; i++) {
        const record *other = &shared->worker[w].records[t][i];
        if (atomic_load_explicit(&other->state, memory_order_acquire) != FREE && is(other, about))
          return true;
      }
  return false;
}

/* Whether another asked for a node of that part when the lease's time may have been up. */
static bool wanted(const record *other, const question *about) {
  const record *r = about->r;
  if (other->handle == r->handle || other->kind == CALL_REVOKE || other->called >= r->ended)
    return false;
  int state = atomic_load(&other->state);
  int64_t gone = state == ENDED ? history_gone_at(other) : INT64_MAX;
  return gone > r->promised - REMAINING_NS && history_in_the_way(other, about->part);
}

/* Whether the record names nodes of the lease, and another asked for one of them. A session that was extended and then
   converted has a record for each of its calls, and its lease all their nodes: it is lost as a whole. An extend that
   was cancelled may have been granted. */
static bool wanted_part(const record *part, const question *about) {
  const record *r = about->r;
  bool is_part = part == r || (part->handle == r->handle && part->kind != CALL_REVOKE &&
                               (part->parts > 1 || part->how == END_CANCELLED));
  return is_part && any(wanted, &(question){r, part});
}

/* The answer may have come when the new time was up: then the library gives it back. */
static bool answered_late(const record *r) {
  return r->asked_ttl && r->ended - r->lost_at >= r->asked_ttl * MS;
}

/* Whether another handle that had it has given it back. */
static bool gives_back(const record *other, const question *about) {
  return other != about->r && other->handle == about->r->handle && other->lease &&
         (atomic_load(&other->yields) || (other->lost_at && answered_late(other)));
}

/* An earlier holder may have heard of a revocation: then no later one is told who revoked it. */
static bool revoked_since(const record *r) {
  for (size_t i = 0; i < event_count; i++)
    if (events[i]->kind == CALL_REVOKE && (!events[i]->ended || events[i]->ended > r->since) &&
        matches(events[i], r))
      return true;
  return false;
}

/* All others that say something of that lease. */
static void show_others(const record *r) {
  size_t n;
  record **kept = history_kept(&n);
  for (size_t i = 0; i < n; i++)
    if (kept[i] != r && kept[i]->handle == r->handle) show_record("see", kept[i]);
  for (int w = 0; w < shared->workers; w++)
    for (int t = 0; t < shared->threads; t++)
      for (int i = 0; i < RECORDS; i++) {
        const record *other = &shared->worker[w].records[t][i];
        if (atomic_load_explicit(&other->state, memory_order_acquire) != FREE && other != r &&
            other->handle == r->handle)
          show_record("see", other);
      }
}

/* The directory may have been removed while the lease was granted, behind the store's look. */
#define GRANTING_NS (500 * MS)

static void check_loss(const record *r) {
  if (answered_late(r)) return;
  const question about = {r, NULL};
  losses_checked++;
  if (r->revocation || (r->since && revoked_since(r))) return;
  if (r->cut < r->ended || any(gives_back, &about) ||
      faults_lose_leases(r->since ? r->since - GRANTING_NS : r->called, r->ended))
    return;
  /* Another import may have cut short the promise to its exporter. */
  if (r->kind == CALL_IMPORT && imported_by_another(r)) return;
  if (r->promised - REMAINING_NS > r->ended) {
    violation("a lease is lost %.3f ms before its end, and nobody has revoked or imported it",
              (double)(r->promised - r->ended) / 1e6);
    show_record("it", r);
    show_others(r);
  } else if (!shared->lingers && !any(wanted_part, &about)) {
    violation("a lease is lost whose time was up, and nobody wanted any of it since");
    show_record("it", r);
    show_others(r);
  }
}

/* ------------------------------------------------------------------ rule 11 */

typedef struct last_one {
  int64_t at; /* when its nodes were free, at the latest */
  bool by_time, unknown;
} last_one;

static void last_add(last_one *self, const record *other, const record *r) {
  if (other == r || other->handle == r->handle || other->kind == CALL_REVOKE ||
      other->called >= r->granted || self->unknown)
    return;
  bool ended = atomic_load(&other->state) == ENDED;
  bool by_time = other->lease &&
                 (other->how == END_DIED || other->how == END_EXPORTED || other->how == END_LEFT);
  int64_t at = by_time ? lease_end(other) : other->ended;
  /* A server may need a while to notice that a client is gone. */
  if (ended && ((shared->server || shared->leases_only) && !by_time ? history_gone_at(other) : at) <
                   r->called)
    return;
  if (!history_in_the_way(other, r)) return;
  /* Another waiter may be before it, or keep others back. */
  if (!ended || !other->granted || other->granted > r->granted ||
      ((shared->server || shared->leases_only) && !by_time && at < r->called)) {
    self->unknown = true;
    return;
  }
  if (at <= self->at) return;
  self->at = at;
  self->by_time = by_time;
}

static void check_delay(const record *r) {
  size_t n;
  record **kept = history_kept(&n);
  last_one last = {0, false, false};
  if (!r->granted || r->granted - r->called < 2 * MS ||
      (r->kind != CALL_ACQUIRE && r->kind != CALL_START))
    return;
  if (faults_meet(r->called, r->granted)) return;
  for (size_t i = 0; i < n; i++) last_add(&last, kept[i], r);
  for (int w = 0; w < shared->workers && !last.unknown; w++)
    for (int t = 0; t < shared->threads; t++)
      for (int i = 0; i < RECORDS; i++) {
        const record *other = &shared->worker[w].records[t][i];
        if (atomic_load_explicit(&other->state, memory_order_acquire) != FREE)
          last_add(&last, other, r);
      }
  if (last.unknown || !last.by_time || last.at <= r->called) return;
  int64_t stopped = atomic_load(&shared->worker[r->worker].stopped) - r->stopped,
          delay = r->granted - last.at - stopped;
  delays_checked++;
  longest_delay = most(longest_delay, delay);
  if (delay <= patience(DELAY)) return;
  violation("granted %.3f s after the end of the last lease in its way", (double)delay / 1e9);
  show_record("it", r);
}

/* ---------------------------------------------------------------------- all */

void leases_check(size_t before) {
  size_t n;
  record **kept = history_kept(&n);
  for (size_t i = 0; i < n; i++) {
    const record *r = kept[i];
    if (!lease_matters(r)) continue;
    for (size_t j = 0; j < event_count; j++) check_event(events[j], r);
    if (i < before) continue;
    if (r->lost_at) check_words(r);
    if (r->lost_at) check_loss(r);
    int64_t held = atomic_load(&r->held);
    if (r->cut < held) {
      cut_believed++;
      longest_cut = most(longest_cut, held - r->cut);
    }
    if (r->granted && lease_until(r) > most(held, atomic_load(&r->sure))) promises_checked++;
  }
  for (size_t i = before; i < n; i++) check_delay(kept[i]);
}
