/*
 * board.c - tells others who holds what: one file for each process, mapped, in
 * which each session has a record. Writing a record costs no system call, and
 * nothing here can make an acquisition fail.
 *
 * The file is locked (byte 0) for as long as the process lives. It gets its name
 * only then, so whoever finds one that is not locked may remove it.
 */
#include "board.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Readers may have other page sizes, but chunks fit all. */
_Static_assert(sizeof(hl__board_record) == 768, "part of the format");
_Static_assert(sizeof(hl__board_header) <= HL__BOARD_CHUNK, "comes first");

/* A record, as this process sees it. */
struct hl__file_slot {
  struct hl__file_slot *next HL__GUARDED_BY(hl__file_board_mutex); /* free */
  hl__board_record *record;
};

typedef struct board_chunk {
  struct board_chunk *next;
  hl__board_record *records;
  struct hl__file_slot slots[HL__BOARD_CHUNK_RECORDS];
} board_chunk;

struct hl__file_board {
  const hl__file_directory *directory;
  char host[64];
  pthread_mutex_t mutex;
  /* -1 until the first record is needed */
  int fd HL__GUARDED_BY(hl__file_board_mutex);
  char name[HL__FILE_NAME_MAX];
  off_t size HL__GUARDED_BY(hl__file_board_mutex);
  board_chunk *chunks HL__GUARDED_BY(hl__file_board_mutex);
  struct hl__file_slot *free HL__GUARDED_BY(hl__file_board_mutex);
};

HL__MUTEX_FUNCTIONS(board, hl__file_board, mutex, hl__file_board_mutex)

/* ----------------------------------------------------------------- file */

/* Unchecked, as hl__file_board_free: nobody else has the board. */
HL__UNCHECKED
hl__file_board *hl__file_board_new(const hl__file_directory *directory, const char *host) {
  hl__file_board *board = calloc(1, sizeof *board);
  if (!board) return NULL;
  board->directory = directory;
  board->fd = -1;
  (void)snprintf(board->host, sizeof board->host, "%s", host ? host : "");
  (void)pthread_mutex_init(&board->mutex, NULL);
  return board;
}

HL__UNCHECKED void hl__file_board_free(hl__file_board *board, bool ours) {
  if (board->fd >= 0 && ours) {
    (void)unlinkat(board->directory->fd, board->name, 0);
    hl__file_close(board->fd);
  }
  for (board_chunk *chunk = board->chunks, *next; chunk; chunk = next) {
    next = chunk->next;
    (void)munmap(chunk->records, HL__BOARD_CHUNK);
    free(chunk);
  }
  (void)pthread_mutex_destroy(&board->mutex);
  free(board);
}

/* Made under another name, locked, then named. It may only be read, by our own
   user, too: a write to it, or `: >` by mistake, could only do harm. We have our
   descriptor. */
static bool board_create(hl__file_board *board) HL__REQUIRES(hl__file_board_mutex) {
  hl__board_header header = {
      .version = HL__BOARD_VERSION, .record_size = sizeof(hl__board_record), .pid = getpid()};
  struct flock life = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
  char temporary[HL__FILE_NAME_MAX];
  memcpy(header.magic, HL__BOARD_MAGIC, sizeof header.magic);
  memcpy(header.host, board->host, sizeof header.host);
  int fd = hl__file_temporary(board->directory, board->directory->file_mode & 0444, temporary);
  if (fd < 0) return false;
  (void)snprintf(board->name, sizeof board->name, HL__FILE_BOARD "%s",
                 temporary + strlen(HL__FILE_TEMPORARY));
  if (fcntl(fd, F_OFD_SETLK, &life) != 0 ||
      pwrite(fd, &header, sizeof header, 0) != (ssize_t)sizeof header ||
      renameat(board->directory->fd, temporary, board->directory->fd, board->name) != 0) {
    (void)unlinkat(board->directory->fd, temporary, 0);
    hl__file_close(fd);
    return false;
  }
  board->fd = fd;
  board->size = HL__BOARD_CHUNK;
  return true;
}

/* One more chunk of free records. Its space is taken first: a full file system
   would otherwise show as a signal at the first touch. */
static bool board_grow(hl__file_board *board) HL__REQUIRES(hl__file_board_mutex) {
  if (board->fd < 0 && !board_create(board)) return false;
  board_chunk *chunk = malloc(sizeof *chunk);
  if (!chunk) return false;
  void *mapping = MAP_FAILED;
  if (posix_fallocate(board->fd, board->size, HL__BOARD_CHUNK) == 0)
    mapping =
        mmap(NULL, HL__BOARD_CHUNK, PROT_READ | PROT_WRITE, MAP_SHARED, board->fd, board->size);
  if (mapping == MAP_FAILED) {
    free(chunk);
    return false;
  }
  board->size += HL__BOARD_CHUNK;
  chunk->records = mapping;
  chunk->next = board->chunks;
  board->chunks = chunk;
  for (uint32_t i = HL__BOARD_CHUNK_RECORDS; i-- > 0;) {
    chunk->slots[i].record = &chunk->records[i];
    chunk->slots[i].next = board->free;
    board->free = &chunk->slots[i];
  }
  return true;
}

/* -------------------------------------------------------------- records */

static struct hl__file_slot *slot_take(hl__file_board *board) {
  board_lock(board);
  struct hl__file_slot *slot = NULL;
  if (board->free || board_grow(board)) {
    slot = board->free;
    board->free = slot->next;
  }
  board_unlock(board);
  return slot;
}

/* Sees to it that the session has `count` records. */
static bool slots_reserve(hl__file_session *session, size_t count) {
  if (count > session->slot_capacity) {
    size_t capacity = count < 4 ? 4 : 2 * count;
    struct hl__file_slot **grown = malloc(capacity * sizeof(struct hl__file_slot *));
    if (!grown) return false;
    /* Not realloc: a child that is born meanwhile frees what it finds here. */
    struct hl__file_slot **before = session->slots;
    if (before) memcpy(grown, before, session->slot_count * sizeof(struct hl__file_slot *));
    session->slots = grown;
    session->slot_capacity = capacity;
    free(before);
  }
  while (session->slot_count < count) {
    struct hl__file_slot *slot = slot_take(session->space->board);
    if (!slot) return false;
    session->slots[session->slot_count++] = slot;
  }
  return true;
}

/* Gives records back, all but the first `keep`. */
static void slots_return(hl__file_session *session, size_t keep) {
  hl__file_board *board = session->space->board;
  if (session->slot_count <= keep) return;
  board_lock(board);
  while (session->slot_count > keep) {
    struct hl__file_slot *slot = session->slots[--session->slot_count];
    slot->next = board->free;
    board->free = slot;
  }
  board_unlock(board);
}

static void text_copy(char *out, size_t size, const char *text) {
  size_t length = text ? strnlen(text, size - 1) : 0;
  if (length > 0) memcpy(out, text, length);
  out[length] = '\0';
}

/* Readers are in other processes, or read through the file: they see `sequence`
   odd, or changed, when they met a change. */
static void record_write(hl__board_record *record, const hl__file_session *session,
                         const hl_request *request, int64_t since_ms, enum hl__board_state state) {
  const hl_row *rows = request->rows;
  uint32_t sequence = atomic_load_explicit(&record->sequence, memory_order_relaxed) | 1u;
  /* An exchange, so that nothing below is done before it. */
  (void)atomic_exchange(&record->sequence, sequence);
  record->session = session->id;
  record->since_ms = since_ms;
  record->mode = (uint8_t)request->mode;
  record->row_count = (uint16_t)request->n;
  record->agent = request->agent;
  record->blocks = request->blocks;
  for (size_t i = 0; i < request->n; i++)
    record->rows[i] = (hl__board_row){
        .bucket = (uint32_t)rows[i].bucket, .level = rows[i].level, .mode = rows[i].mode};
  text_copy(record->application, sizeof record->application, hl__file_session_application(session));
  text_copy(record->path, sizeof record->path, request->path);
  if (request->label_size > 0)
    (void)hl__escape(record->label, sizeof record->label, request->label, request->label_size);
  else
    record->label[0] = '\0';
  atomic_store_explicit(&record->state, (uint8_t)state, memory_order_relaxed);
  atomic_store_explicit(&record->sequence, sequence + 1, memory_order_release);
}

void hl__file_board_show(hl__file_session *session, size_t first, const hl_request *request,
                         int64_t since_ms, enum hl__board_state state) {
  size_t count = (request->n + HL__BOARD_ROWS - 1) / HL__BOARD_ROWS;
  hl_request part = *request;
  if (!slots_reserve(session, first + count)) return;
  for (size_t i = 0; i < count; i++, part.rows += part.n) {
    size_t left = request->n - i * HL__BOARD_ROWS;
    part.n = left < HL__BOARD_ROWS ? left : HL__BOARD_ROWS;
    record_write(session->slots[first + i]->record, session, &part, since_ms, state);
  }
  session->slots_used = first + count;
}

static void record_convert(hl__board_record *record, const hl_request *request) {
  uint32_t sequence = atomic_load_explicit(&record->sequence, memory_order_relaxed) | 1u;
  (void)atomic_exchange(&record->sequence, sequence);
  record->mode = (uint8_t)request->mode;
  for (size_t i = 0; i < record->row_count; i++)
    for (size_t j = 0; j < request->n; j++)
      if (record->rows[i].bucket == request->rows[j].bucket &&
          record->rows[i].level == request->rows[j].level)
        record->rows[i].mode = request->rows[j].mode;
  atomic_store_explicit(&record->sequence, sequence + 1, memory_order_release);
}

void hl__file_board_convert(hl__file_session *session, const hl_request *request) {
  for (size_t i = 0; i < session->slots_used; i++)
    record_convert(session->slots[i]->record, request);
}

void hl__file_board_clear(hl__file_session *session, size_t first) {
  while (session->slots_used > first)
    atomic_store_explicit(&session->slots[--session->slots_used]->record->state,
                          (uint8_t)HL__BOARD_FREE, memory_order_relaxed);
  /* One is kept for the next call; a large request's are given to others. */
  slots_return(session, first > 0 ? first : 1);
}

void hl__file_board_leave(hl__file_session *session) {
  hl__file_board_clear(session, 0);
  slots_return(session, 0);
}
