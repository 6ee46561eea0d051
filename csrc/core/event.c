/*
 * event.c - counts what happens, and how long it took.
 */
#include "event.h"

static void count_outcome(hl_stats *stats, int status, int64_t ms) {
  switch (status) {
  case HL_OK:
    stats->acquired++;
    if (ms >= HL_WAITED_MS) stats->waited++;
    break;
  case HL_TIMEOUT: stats->timeouts++; break;
  case HL_DEADLOCK: stats->deadlocks++; break;
  case HL_CANCELLED: stats->cancelled++; break;
  case HL_BUSY: stats->busy++; break;
  default: stats->errors++; break;
  }
}

void hl__event(hl_stats *stats, hl__event_kind kind, int status, int64_t ms) {
  switch (kind) {
  case HL__CALL_BEGINS: stats->waiting++; break;
  case HL__CALL_ENDS:
    stats->waiting--;
    stats->wait_ms += (uint64_t)ms;
    count_outcome(stats, status, ms);
    break;
  case HL__EXTEND_ENDS:
    stats->waiting--;
    if (status == HL_TIMEOUT) stats->timeouts++;
    if (status == HL_DEADLOCK) stats->deadlocks++;
    break;
  case HL__HOLD_BEGINS: stats->held++; break;
  case HL__HOLD_GIVEN_UP: stats->acquired++; break;
  case HL__HOLD_RELEASED:
    stats->held--;
    stats->released++;
    break;
  case HL__HOLD_LOST:
    stats->held--;
    stats->lost++;
    break;
  case HL__HOLD_ENDS: stats->held--; break;
  case HL__CONNECTION_REPAIRED: stats->reconnects++; break;
  }
}

static const int64_t bounds_us[HL_HISTOGRAM_BOUNDS] = {
    100,      200,      500,       1000,      2000,      5000,       10000,      20000,
    50000,    100000,   200000,    500000,    1000000,   2000000,    5000000,    10000000,
    20000000, 50000000, 100000000, 200000000, 500000000, 1000000000, 2000000000, 5000000000};

int64_t hl_histogram_bound_us(unsigned i) {
  return i < HL_HISTOGRAM_BOUNDS ? bounds_us[i] : INT64_MAX;
}

/* Searches from the shortest on, as most durations are short. */
void hl__histogram_add(hl_histogram *histogram, int64_t us) {
  unsigned i = 0;
  while (i < HL_HISTOGRAM_BOUNDS && us > bounds_us[i]) i++;
  histogram->buckets[i]++;
  histogram->count++;
  histogram->sum_us += (uint64_t)us;
}
