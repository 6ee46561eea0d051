/*
 * board.h - the format of the who-... files, which board.c writes and holders.c
 * reads. What is in them is for people; no lock depends on it.
 */
#ifndef HIERLOCK_BOARD_H
#define HIERLOCK_BOARD_H

#include "file.h"

#define HL__BOARD_MAGIC "hlwho\n\r"
#define HL__BOARD_VERSION 1u

/* A file is a header, then chunks, each a whole number of pages on any machine
   (64 KiB), in which records lie one after another. */
#define HL__BOARD_CHUNK 65536u
#define HL__BOARD_ROWS 32u

typedef struct hl__board_header {
  char magic[8];
  uint32_t version;
  uint32_t record_size;
  int64_t pid;
  char host[64];
} hl__board_header;

enum hl__board_state {
  HL__BOARD_FREE,
  HL__BOARD_WAITING,
  HL__BOARD_HELD
};

/* An hl_row, as it stands in the file. */
typedef struct hl__board_row {
  uint32_t bucket;
  uint8_t level;
  uint8_t mode; /* hl_mode */
} hl__board_row;

/* What a session has asked for in one call; several where it needs more rows.
   Written by the session's thread alone. */
typedef struct hl__board_record {
  _Alignas(64) _Atomic uint32_t sequence; /* odd while it is being changed */
  _Atomic uint8_t state;
  uint8_t mode; /* hl_mode, of the request's targets */
  uint16_t row_count;
  uint64_t session; /* a number of the board's own */
  int64_t since_ms; /* Unix time */
  char application[64];
  char label[128];
  char path[256];
  hl__board_row rows[HL__BOARD_ROWS];
  /* hl_request.agent and blocks; 0 in records of programs that do not know them, which is as large.
     */
  uint64_t agent;
  uint8_t blocks;
} hl__board_record;

#define HL__BOARD_CHUNK_RECORDS (HL__BOARD_CHUNK / (uint32_t)sizeof(hl__board_record))

typedef struct hl__file_board hl__file_board;

/* A board without a file yet; NULL when out of memory. */
hl__file_board *hl__file_board_new(const hl__file_directory *directory, const char *host);
/* Removes its file; not where the numbers of the descriptors may be others'. */
void hl__file_board_free(hl__file_board *board, bool ours);

/* Announces that the session awaits, or now holds, the request's rows, in its
   records from number `first` on. since_ms: Unix time of the request. Where
   there is no memory or no space for it, nothing is announced: observers see
   less, and locking goes on. */
void hl__file_board_show(hl__file_session *session, size_t first, const hl_request *request,
                         int64_t since_ms, enum hl__board_state state);
/* Rows that the session's records show as held are in another mode from now on. */
void hl__file_board_convert(hl__file_session *session, const hl_request *request);
/* What the records from number `first` on tell is over. */
void hl__file_board_clear(hl__file_session *session, size_t first);
/* Gives the session's records back, before it leaves the space. */
void hl__file_board_leave(hl__file_session *session);

/* Calls fn for whatever, on any board of the directory, conflicts; n is 0: for all. HL_OK,
   HL_ESTORE, HL_ENOMEM. */
int hl__file_board_read(const hl__file_directory *directory, const hl_row *rows, size_t n,
                        hl_holder_fn fn, void *context, hl_error *error);

/* Whether a copy of a record, at that place of the file, stays as it is; it is read again until
   it does. */
bool hl__file_record_settle(int fd, off_t offset, hl__board_record *record);

#endif
