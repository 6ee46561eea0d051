/*
 * event.c - counts what happens.
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
  case HL__CALL_BEGINS:
    stats->waiting++;
    break;
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
  case HL__HOLD_BEGINS:
    stats->held++;
    break;
  case HL__HOLD_GIVEN_UP:
    stats->acquired++;
    break;
  case HL__HOLD_RELEASED:
    stats->held--;
    stats->released++;
    break;
  case HL__HOLD_LOST:
    stats->held--;
    stats->lost++;
    break;
  case HL__HOLD_ENDS:
    stats->held--;
    break;
  case HL__CONNECTION_REPAIRED:
    stats->reconnects++;
    break;
  }
}
