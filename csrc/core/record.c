/*
 * record.c - whether a caller has the lease that a store has found, and the words that say why not.
 */
#include "record.h"

#include <string.h>

hl__verdict hl__record_judge(const hl__record *record) {
  if (!record->there || !record->secret) return HL__RECORD_GONE;
  /* A former holder hears that another handle has the lease, whatever became of it since. An
     import is of the lease itself. */
  if (record->revoked && (record->import || record->holder)) return HL__RECORD_REVOKED;
  if (!record->holder) return HL__RECORD_IMPORTED;
  if (record->behind) return HL__RECORD_GONE;
  if (record->late) return HL__RECORD_LATE;
  return record->rows ? HL__RECORD_OK : HL__RECORD_MISMATCH;
}

/* Copies up to size - 1 bytes, cut between two characters. */
static void text_cut(char *out, size_t size, const char *text) {
  size_t n = strlen(text);
  if (n >= size)
    for (n = size - 1; n > 0 && ((unsigned char)text[n] & 0xC0) == 0x80;) n--;
  memcpy(out, text, n);
  out[n] = '\0';
}

static int revoked(const hl__record *record, hl_error *error) {
  const char *by = record->by ? record->by : "", *reason = record->reason ? record->reason : "";
  (void)hl__error(error, HL_ELOST, "the lease was revoked%s%.63s%s%.127s", *by ? " by " : "", by,
                  *reason ? ": " : "", reason);
  if (error) {
    text_cut(error->revoked_by, sizeof error->revoked_by, by);
    text_cut(error->reason, sizeof error->reason, reason);
  }
  return HL_ELOST;
}

int hl__record_refuse(hl__verdict verdict, const hl__record *record, hl_error *error) {
  switch (verdict) {
  case HL__RECORD_OK: return HL_OK;
  case HL__RECORD_REVOKED: return revoked(record, error);
  case HL__RECORD_IMPORTED:
    return hl__error(error, HL_ELOST, "the lease was imported, and belongs to that handle now");
  case HL__RECORD_MISMATCH:
    return hl__error(error, HL_EMISMATCH, "the lease locks something else than its text says");
  case HL__RECORD_LATE:
    return hl__error(error, HL_ECONNECTION, "the server has read a later refresh before");
  case HL__RECORD_GONE: break;
  }
  if (record->again) return HL__ABSENT;
  return hl__error(error, HL_ELOST,
                   "the lease has ended: it was released, or another owner has taken its nodes "
                   "since%s",
                   record->forgets ? "; or the server has forgotten it" : "");
}
