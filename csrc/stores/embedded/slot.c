/*
 * slot.c - the slots of processes. A process lives as long as it holds the lock on the byte of its
 * slot; the kernel frees that lock after the last thread of the process has left its memory. So no
 * dead process writes any more.
 *
 * A program may also close all its descriptors, and go on. Such a program keeps its locks while it
 * has the file mapped, if its pid can be seen here. In another pid namespace it counts as dead.
 */
#include "embedded.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A file of /proc; births are forbidden until it is closed, if it is there: hence unchecked.
   *known: it is there, or the kernel says that it is not; false where this process has no
   descriptor or no right. */
HL__UNCHECKED static FILE *process_file(uint64_t pid, const char *what, bool *known) {
  char name[64];
  (void)snprintf(name, sizeof name, "/proc/%llu/%s", (unsigned long long)pid, what);
  hl__fork_forbid();
  FILE *file = fopen(name, "re");
  *known = file || errno == ENOENT || errno == ESRCH;
  if (!file) hl__fork_allow();
  return file;
}

HL__UNCHECKED static void process_file_close(FILE *file) {
  (void)fclose(file);
  hl__fork_allow();
}

/* When a process of that pid was started, in the kernel's ticks, and its state, as a letter. 0:
   there is none. UNKNOWN: this process cannot look. */
#define UNKNOWN UINT64_MAX
static uint64_t process_start(uint64_t pid, char *state) {
  char text[1024];
  unsigned long long start = 0;
  bool known;
  FILE *file = process_file(pid, "stat", &known);
  if (!file) return known ? 0 : UNKNOWN;
  size_t n = fread(text, 1, sizeof text - 1, file);
  process_file_close(file);
  text[n] = '\0';
  /* The program's name stands in parentheses, and may contain some. */
  const char *rest = strrchr(text, ')');
  if (!rest ||
      sscanf(rest + 1,
             " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
             state, &start) != 2)
    return 0;
  return start;
}

/* Whether the process may have the file mapped. A process that has executed another program is the
   same one for the kernel, and has not. */
static bool process_maps(uint64_t pid, uint64_t inode) {
  char *line = NULL;
  size_t size = 0;
  bool known, found = false;
  FILE *file = process_file(pid, "maps", &known);
  if (!file) return !known; /* the process has ended meanwhile; or it is another user's */
  while (!found && getline(&line, &size, file) > 0) {
    unsigned long long number;
    found = sscanf(line, "%*s %*s %*s %*s %llu", &number) == 1 && number == inode;
  }
  found = found || ferror(file);
  process_file_close(file);
  free(line);
  return found;
}

bool hl__shm_is_dead(hl__shm_space *space, uint32_t slot) {
  char state = 0;
  if (slot == space->me) return false;
  if (slot == 0 || slot >= HL__SHM_SLOTS) return true; /* a damaged word */
  if (!hl__shm_byte_free(space, HL__SHM_LIFE + (off_t)slot)) return false;
  const hl__shm_slot *it = &space->table->slot[slot];
  if (atomic_load(&it->state) == 0) return true;
  if (atomic_load(&it->namespace) != space->namespace || space->namespace == 0) return true;
  const uint64_t pid = atomic_load(&it->pid), start = process_start(pid, &state);
  if (start == UNKNOWN) return false;
  return start == 0 || start != atomic_load(&it->start) || state == 'Z' || state == 'X' ||
         !process_maps(pid, space->inode);
}

void hl__shm_slot_name(hl__shm_space *space, uint32_t slot, char *text, size_t size) {
  if (slot >= HL__SHM_SLOTS) {
    (void)snprintf(text, size, "a process that does not exist");
    return;
  }
  const hl__shm_slot *it = &space->table->slot[slot];
  unsigned long long pid = atomic_load(&it->pid);
  char state = 0;
  bool seen = atomic_load(&it->namespace) == space->namespace && process_start(pid, &state) != 0;
  const char *what = !seen                          ? ""
                     : state == 'T' || state == 't' ? " (stopped)"
                     : state == 'D' || state == 'S' ? " (asleep)"
                                                    : " (running)";
  (void)snprintf(text, size, "process %llu%s", pid, what);
}

/* Takes the bytes of a free slot: the one that menders need first, until `state` says that the slot
   is used. Or else a mender that is at work on it for its last process, and was held up, would break
   the locks of this one. */
static bool slot_enter(hl__shm_space *space, uint32_t slot) {
  const off_t life = HL__SHM_LIFE + (off_t)slot, mend = HL__SHM_MEND + (off_t)slot;
  if (!hl__shm_byte_lock(space, mend)) return false;
  if (hl__shm_byte_lock(space, life)) {
    if (atomic_load(&space->table->slot[slot].state) == 0) return true;
    hl__shm_byte_unlock(space, life); /* another process has lived and died here meanwhile */
  }
  hl__shm_byte_unlock(space, mend);
  return false;
}

int hl__shm_slot_take(hl__shm_space *space, const char *host, hl_error *error) {
  struct stat st;
  char state;
  uint64_t start = process_start((uint64_t)getpid(), &state);
  if (start && start != UNKNOWN && stat("/proc/self/ns/pid", &st) == 0)
    space->namespace = st.st_ino;
  hl__shm_header *header = &space->table->header;
  for (uint32_t i = 1; i < HL__SHM_SLOTS - 1; i++) { /* the last: see space.c */
    hl__shm_slot *it = &space->table->slot[i];
    if (atomic_load(&it->state) || !slot_enter(space, i)) continue;
    space->me = i;
    atomic_store(&it->pid, (uint64_t)getpid());
    atomic_store(&it->start, start);
    atomic_store(&it->namespace, space->namespace);
    hl__shm_text_set(it->host, sizeof it->host / sizeof *it->host, host, strlen(host));
    (void)atomic_fetch_add(&it->generation, 1);
    uint32_t top = atomic_load(&header->slots_top);
    while (top <= i && !atomic_compare_exchange_weak(&header->slots_top, &top, i + 1)) {}
    atomic_store(&it->state, 1);
    hl__shm_byte_unlock(space, HL__SHM_MEND + (off_t)i);
    (void)atomic_fetch_add(&header->opened, 1);
    return HL_OK;
  }
  return hl__error(error, HL_ESTORE,
                   "%u programs use the lock directory %s: it has no room for more",
                   HL__SHM_SLOTS - 2, space->directory.path);
}

void hl__shm_slot_leave(hl__shm_space *space, bool free) {
  hl__shm_slot *it = &space->table->slot[space->me];
  /* No process has the pid 0: the slot is dead once its byte is free, though this process may go
     on, and have the file mapped for another space. */
  atomic_store(&it->pid, 0);
  if (free) atomic_store(&it->state, 0);
  hl__shm_byte_unlock(space, HL__SHM_LIFE + (off_t)space->me);
}
