/*
 * holders.c - reads the boards of all processes (board.c), to say who stands in
 * the way of an acquisition. Everything read here was written by others and may
 * change or be nonsense: it is copied, compared and cut to size before use.
 */
#include "board.h"

#include "mode.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What one look reads at most, of all boards, and tells at most. Room for 100,000
   sessions; a file that somebody has blown up keeps nobody for long. */
#define READ_MAX (128u << 20)
#define BOARDS_MAX 20000u
#define FINDINGS_MAX 10000u

/* How often a record that changes under our eyes is read again. A session that
   is so busy does not hold anything for long. */
#define ATTEMPTS 4

typedef struct finding {
  uint64_t session;
  hl_holder holder;
} finding;

/* What has been found on one board. */
typedef struct findings {
  finding *all;
  size_t count, capacity;
  size_t may_read; /* bytes, of this board and the next ones */
  size_t may_find;
} findings;

static int row_compare(const void *a, const void *b) {
  const hl__board_row *x = a;
  const hl_row *y = b;
  return hl__row_order(x->level, x->bucket, y->level, y->bucket);
}

/* rows: in locking order; none: whatever it tells. */
static bool record_conflicts(const hl__board_record *record, const hl_row *rows, size_t n) {
  uint8_t state = atomic_load_explicit(&record->state, memory_order_relaxed);
  if (state != HL__BOARD_HELD && state != HL__BOARD_WAITING) return false;
  if (n == 0) return true;
  for (size_t i = 0; i < record->row_count && i < HL__BOARD_ROWS; i++) {
    const hl_row *row = bsearch(&record->rows[i], rows, n, sizeof *rows, row_compare);
    /* Another process writes it: any byte. */
    hl_mode theirs = record->rows[i].mode == HL_SHARED ? HL_SHARED : HL_EXCLUSIVE;
    if (row && hl__modes_conflict((hl_mode)row->mode, theirs)) return true;
  }
  return false;
}

static uint32_t record_sequence(const hl__board_record *record) {
  return atomic_load_explicit(&record->sequence, memory_order_relaxed);
}

/* A copy that was read twice alike was not being changed. */
bool hl__file_record_settle(int fd, off_t offset, hl__board_record *record) {
  const ssize_t size = (ssize_t)sizeof *record;
  for (int i = 0; i < ATTEMPTS; i++) {
    hl__board_record again;
    if (pread(fd, &again, sizeof again, offset) != size) return false;
    if (record_sequence(&again) % 2 == 0 &&
        memcmp(&again, record, sizeof again) == 0) // NOLINT: bytes are meant
      return true;
    memcpy(record, &again, sizeof again);
  }
  return false;
}

static void text_take(char *out, size_t size, const char *text) {
  (void)hl__escape(out, size, text, strnlen(text, size - 1));
}

static bool findings_add(findings *found, const hl__board_header *header,
                         const hl__board_record *record) {
  if (found->count == found->capacity) {
    size_t capacity = found->capacity ? 2 * found->capacity : 16;
    finding *grown = realloc(found->all, capacity * sizeof *grown);
    if (!grown) return false;
    found->all = grown;
    found->capacity = capacity;
  }
  finding *f = &found->all[found->count++];
  found->may_find--;
  hl_holder *holder = &f->holder;
  memset(holder, 0, sizeof *holder); /* it is no lease */
  f->session = record->session;
  text_take(holder->application, sizeof holder->application, record->application);
  text_take(holder->host, sizeof holder->host, header->host);
  text_take(holder->label, sizeof holder->label, record->label);
  text_take(holder->path, sizeof holder->path, record->path);
  holder->pid = header->pid;
  /* The sessions of each process have numbers from 0 on. */
  (void)snprintf(holder->session, sizeof holder->session, "%" PRId64 ".%" PRIu64, holder->pid,
                 record->session);
  holder->since_ms = record->since_ms;
  holder->mode = hl__mode_read(record->mode);
  holder->waiting = atomic_load_explicit(&record->state, memory_order_relaxed) != HL__BOARD_HELD;
  return true;
}

/* By session; what it holds before what it awaits. */
static int finding_compare(const void *a, const void *b) {
  const finding *x = a, *y = b;
  if (x->session != y->session) return x->session < y->session ? -1 : 1;
  return (int)x->holder.waiting - (int)y->holder.waiting;
}

/* Each session once, though it may have several records; of all that there is, also what
   it awaits beside what it holds. */
static void findings_tell(findings *found, bool all, hl_holder_fn fn, void *context) {
  if (found->count > 0) qsort(found->all, found->count, sizeof *found->all, finding_compare);
  for (size_t i = 0; i < found->count; i++) {
    const finding *f = &found->all[i];
    if (i == 0 || f->session != f[-1].session || (all && f->holder.waiting != f[-1].holder.waiting))
      fn(context, &f->holder);
  }
}

/* All conflicting records of a board whose header has been read. */
static int board_scan(int fd, const hl__board_header *header, const hl_row *rows, size_t n,
                      findings *found) {
  int status = HL_OK;
  hl__board_record *chunk = aligned_alloc(_Alignof(hl__board_record), HL__BOARD_CHUNK);
  if (!chunk) return HL_ENOMEM;
  off_t offset = HL__BOARD_CHUNK;
  while (status == HL_OK && found->may_read >= HL__BOARD_CHUNK && found->may_find > 0 &&
         pread(fd, chunk, HL__BOARD_CHUNK, offset) == HL__BOARD_CHUNK) {
    found->may_read -= HL__BOARD_CHUNK;
    for (uint32_t i = 0; i < HL__BOARD_CHUNK_RECORDS && found->may_find > 0; i++) {
      if (!record_conflicts(&chunk[i], rows, n) ||
          !hl__file_record_settle(fd, offset + (off_t)(i * sizeof *chunk), &chunk[i]) ||
          !record_conflicts(&chunk[i], rows, n))
        continue;
      if (!findings_add(found, header, &chunk[i])) {
        status = HL_ENOMEM;
        break;
      }
    }
    offset += HL__BOARD_CHUNK;
  }
  free(chunk);
  return status;
}

/* Reads one board, or removes it when its process has gone. */
static int board_read(const hl__file_directory *directory, const char *name, const hl_row *rows,
                      size_t n, findings *found) {
  hl__board_header header;
  int status = HL_OK;
  int fd = hl__file_open_to_read(directory, name);
  if (fd < 0) return HL_OK;
  found->count = 0;
  if (hl__file_is_dead(fd)) {
    (void)unlinkat(directory->fd, name, 0);
    goto out;
  }
  if (pread(fd, &header, sizeof header, 0) == (ssize_t)sizeof header &&
      memcmp(header.magic, HL__BOARD_MAGIC, sizeof header.magic) == 0 &&
      header.version == HL__BOARD_VERSION && header.record_size == sizeof(hl__board_record))
    status = board_scan(fd, &header, rows, n, found);
out:
  hl__file_close(fd);
  return status;
}

int hl__file_board_read(const hl__file_directory *directory, const hl_row *rows, size_t n,
                        hl_holder_fn fn, void *context, hl_error *error) {
  findings found = {.may_read = READ_MAX, .may_find = FINDINGS_MAX};
  int status = HL_OK;
  struct dirent *file;
  DIR *names = hl__file_list(directory);
  if (!names) return hl__error_errno(error, HL_ESTORE, "cannot read %s", directory->path);
  unsigned boards = 0;
  while (status == HL_OK && boards < BOARDS_MAX && (file = readdir(names))) {
    if (strncmp(file->d_name, HL__FILE_BOARD, strlen(HL__FILE_BOARD)) != 0) continue;
    boards++;
    status = board_read(directory, file->d_name, rows, n, &found);
    if (status == HL_OK)
      findings_tell(&found, n == 0, fn, context);
    else
      status = hl__error_memory(error);
  }
  hl__file_list_end(names);
  free(found.all);
  return status;
}
