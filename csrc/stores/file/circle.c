/*
 * circle.c - circles of waiters through several processes: found on their boards, by the waiters
 * themselves.
 *
 * An agent (a Lua state, see core/agent.h) that blocks in a request releases nothing that it holds.
 * So where A awaits a row that B holds, B one that C holds, and so on back to A, and each of them
 * blocks, none is ever granted. The records of the boards say who holds and who awaits what, for
 * which agent. They are read one after the other, while their owners change them. Therefore a
 * circle counts only when the next look, which begins after the first has ended, finds the very
 * same: the records bear sequence numbers, and a request that ends or a row that is given back
 * changes them. Then all of it was so at once, in the moment between. And a circle that once is
 * there stays, until one of the waits ends.
 *
 * Who gives way. All members see the same circle; the one whose request is the youngest does, so
 * that no two do. It looks first after a second, for most waits are over by then, and looking reads
 * what all processes have written. What is only awaited, though the store has locked a part of it
 * for the waiter, makes no circle here, nor do leases: such circles end by a time-out.
 */
#include "board.h"

#include "mode.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FIRST_MS 1000
#define CONFIRM_MS 100
#define AGAIN_MS 3000

/* What one look reads at most: room for some 20,000 sessions. */
#define READ_MAX (16u << 20)
#define RECORDS_MAX 20000u

typedef struct entry {
  hl__board_record record;
  int64_t pid;
  bool seen;       /* its agent, which waits, was come to: from there */
  size_t from;     /* the wait before; itself: the first */
  size_t obstacle; /* the lock of this one's agent that is in the way of the one before */
} entry;

typedef struct scan {
  entry *all;
  size_t n, capacity, may_read;
} scan;

void hl__file_circle_begin(hl__file_session *session, const hl_request *request) {
  bool looks = request->agent && request->blocks && !request->try_once;
  session->circle = (hl__file_circle){
      .agent = looks ? request->agent : 0,
      .next = looks ? hl__now_ms() + FIRST_MS : HL_FOREVER,
  };
}

static enum hl__board_state state_of(const hl__board_record *record) {
  return (enum hl__board_state)atomic_load_explicit(&record->state, memory_order_relaxed);
}

/* What a circle can be made of. */
static bool is_of_use(const hl__board_record *record) {
  return record->agent && record->row_count <= HL__BOARD_ROWS &&
         (state_of(record) == HL__BOARD_HELD ||
          (state_of(record) == HL__BOARD_WAITING && record->blocks));
}

static bool scan_add(scan *self, const hl__board_record *record, int64_t pid) {
  if (self->n == RECORDS_MAX) return false;
  if (self->n == self->capacity) {
    size_t capacity = self->capacity ? 2 * self->capacity : 64;
    entry *grown = aligned_alloc(_Alignof(entry), capacity * sizeof *grown);
    if (!grown) return false;
    if (self->n) memcpy(grown, self->all, self->n * sizeof *grown);
    free(self->all);
    self->all = grown;
    self->capacity = capacity;
  }
  self->all[self->n++] = (entry){.record = *record, .pid = pid};
  return true;
}

static void board_scan(scan *self, int fd, int64_t pid) {
  hl__board_record *chunk = aligned_alloc(_Alignof(hl__board_record), HL__BOARD_CHUNK);
  if (!chunk) return;
  for (off_t offset = HL__BOARD_CHUNK; self->may_read >= HL__BOARD_CHUNK &&
                                       pread(fd, chunk, HL__BOARD_CHUNK, offset) == HL__BOARD_CHUNK;
       offset += HL__BOARD_CHUNK) {
    self->may_read -= HL__BOARD_CHUNK;
    for (uint32_t i = 0; i < HL__BOARD_CHUNK_RECORDS; i++) {
      off_t at = offset + (off_t)(i * sizeof *chunk);
      if (is_of_use(&chunk[i]) && hl__file_record_settle(fd, at, &chunk[i]) &&
          is_of_use(&chunk[i]) && !scan_add(self, &chunk[i], pid))
        self->may_read = 0;
    }
  }
  free(chunk);
}

/* All that is on the boards of the directory and of use; what cannot be read is not there. */
static void boards_scan(scan *self, const hl__file_directory *directory) {
  struct dirent *file;
  DIR *names = hl__file_list(directory);
  if (!names) return;
  while (self->may_read > 0 && (file = readdir(names))) {
    hl__board_header header;
    if (strncmp(file->d_name, HL__FILE_BOARD, strlen(HL__FILE_BOARD)) != 0) continue;
    int fd = hl__file_open_to_read(directory, file->d_name);
    if (fd < 0) continue;
    if (!hl__file_is_dead(fd) && pread(fd, &header, sizeof header, 0) == (ssize_t)sizeof header &&
        memcmp(header.magic, HL__BOARD_MAGIC, sizeof header.magic) == 0 &&
        header.version == HL__BOARD_VERSION && header.record_size == sizeof(hl__board_record))
      board_scan(self, fd, header.pid);
    hl__file_close(fd);
  }
  hl__file_list_end(names);
}

static bool conflict(const hl__board_record *a, const hl__board_record *b) {
  for (size_t i = 0; i < a->row_count; i++)
    for (size_t j = 0; j < b->row_count; j++)
      if (a->rows[i].bucket == b->rows[j].bucket && a->rows[i].level == b->rows[j].level &&
          (a->rows[i].mode != HL_SHARED || b->rows[j].mode != HL_SHARED))
        return true;
  return false;
}

/* Another session's lock in the way of a wait, of that agent; n: none. */
static size_t obstacle_of(const scan *self, const hl__board_record *wait, uint64_t agent) {
  for (size_t i = 0; i < self->n; i++) {
    const hl__board_record *held = &self->all[i].record;
    bool own = held->agent == wait->agent && held->session == wait->session;
    if (state_of(held) == HL__BOARD_HELD && held->agent == agent && !own && conflict(wait, held))
      return i;
  }
  return self->n;
}

/* The wait that closes the circle back to `start`, which is a wait's index; n: there is none. Each
   wait on the way is come to once. */
static size_t circle_find(scan *self, size_t start) {
  size_t *queue = malloc(self->n * sizeof *queue), first = 0, last = 0;
  size_t found = self->n;
  if (!queue) return found;
  self->all[start].seen = true;
  self->all[start].from = start;
  queue[last++] = start;
  while (first < last && found == self->n) {
    size_t at = queue[first++];
    const hl__board_record *wait = &self->all[at].record;
    for (size_t i = 0; i < self->n; i++) {
      entry *other = &self->all[i];
      if (state_of(&other->record) != HL__BOARD_WAITING || (other->seen && i != start)) continue;
      size_t obstacle = obstacle_of(self, wait, other->record.agent);
      if (obstacle == self->n) continue;
      other->obstacle = obstacle;
      if (i == start) {
        found = at;
        break;
      }
      other->seen = true;
      other->from = at;
      queue[last++] = i;
    }
  }
  free(queue);
  return found;
}

static uint64_t mix(uint64_t h, uint64_t value) {
  return (h ^ value) * UINT64_C(1099511628211) + (h >> 29);
}

static uint64_t record_number(uint64_t h, const hl__board_record *record) {
  h = mix(h, record->agent);
  h = mix(h, record->session);
  return mix(h, atomic_load_explicit(&record->sequence, memory_order_relaxed));
}

/* The circle as a number, whoever looks: 0 is none. *youngest: the wait that gives way. */
static uint64_t circle_number(const scan *self, size_t start, size_t last, size_t *youngest) {
  uint64_t sum = 0;
  size_t at = last;
  *youngest = start;
  for (;;) {
    const entry *it = &self->all[at], *best = &self->all[*youngest];
    sum += record_number(record_number(UINT64_C(14695981039346656037), &it->record),
                         &self->all[it->obstacle].record);
    if (it->record.since_ms > best->record.since_ms ||
        (it->record.since_ms == best->record.since_ms && it->record.agent > best->record.agent))
      *youngest = at;
    if (at == start) break;
    at = it->from;
  }
  return sum ? sum : 1;
}

static int circle_error(const scan *self, size_t start, size_t last, hl_error *error) {
  size_t next = last; /* who holds what this one awaits */
  while (self->all[next].from != start) next = self->all[next].from;
  const entry *own = &self->all[start], *other = &self->all[next];
  char wanted[96], held[96], awaited[96], had[96];
  const struct {
    char *to;
    const char *from;
  } texts[] = {{wanted, own->record.path},
               {held, self->all[other->obstacle].record.path},
               {awaited, other->record.path},
               {had, self->all[own->obstacle].record.path}};
  for (size_t i = 0; i < 4; i++)
    (void)hl__escape(texts[i].to, sizeof wanted, texts[i].from,
                     strnlen(texts[i].from, sizeof wanted - 1));
  return hl__error(error, HL_DEADLOCK,
                   "%s would be waited for in a circle: %s is held by pid %lld, "
                   "which waits for %s; that ends only when this process "
                   "releases %s",
                   wanted, held, (long long)other->pid, awaited, had);
}

int hl__file_circle_scan(hl__file_session *session, hl_error *error) {
  hl__file_circle *circle = &session->circle;
  if (hl__now_ms() < circle->next) return HL_OK;
  scan self = {.may_read = READ_MAX};
  int status = HL_OK;
  uint64_t seen = 0;
  bool mine = false;
  boards_scan(&self, &session->space->directory);
  for (size_t i = 0; i < self.n && !seen; i++) {
    const hl__board_record *record = &self.all[i].record;
    if (record->agent != circle->agent || record->session != session->id ||
        state_of(record) != HL__BOARD_WAITING)
      continue;
    size_t last = circle_find(&self, i), youngest = i;
    if (last == self.n || last == i) continue;
    seen = circle_number(&self, i, last, &youngest);
    mine = youngest == i;
    if (mine && seen == circle->seen) status = circle_error(&self, i, last, error);
  }
  free(self.all);
  circle->next = hl__now_ms() + (seen && mine ? CONFIRM_MS : AGAIN_MS);
  circle->seen = seen;
  return status;
}
