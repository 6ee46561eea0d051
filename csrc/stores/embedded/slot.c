/*
 * slot.c - the slots of processes. A process lives as long as it holds the lock on the byte of its
 * slot; the kernel frees that lock after the last thread of the process has left its memory. So no
 * dead process writes any more.
 */
#include "embedded.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* When a process of that pid was started, in the kernel's ticks, and its state, as a letter. 0:
   there is none, or it cannot be seen. */
static uint64_t process_start(uint64_t pid, char *state) {
  char text[1024];
  unsigned long long start = 0;
  (void)snprintf(text, sizeof text, "/proc/%llu/stat", (unsigned long long)pid);
  hl__fork_forbid();
  int fd = open(text, O_RDONLY | O_CLOEXEC);
  ssize_t n = fd >= 0 ? read(fd, text, sizeof text - 1) : 0;
  if (fd >= 0) (void)close(fd);
  hl__fork_allow();
  text[n > 0 ? n : 0] = '\0';
  /* The program's name stands in parentheses, and may contain some. */
  const char *rest = strrchr(text, ')');
  if (!rest ||
      sscanf(rest + 1,
             " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
             state, &start) != 2)
    return 0;
  return start;
}

bool hl__shm_is_dead(hl__shm_space *space, uint32_t slot) {
  char state = 0;
  if (slot == space->me) return false;
  if (slot == 0 || slot >= HL__SHM_SLOTS) return true; /* a damaged word */
  if (!hl__shm_byte_free(space, HL__SHM_LIFE + (off_t)slot)) return false;
  const hl__shm_slot *it = &space->table->slot[slot];
  if (atomic_load(&it->state) == 0) return true;
  if (atomic_load(&it->namespace) != space->namespace || space->namespace == 0) return true;
  uint64_t start = process_start(atomic_load(&it->pid), &state);
  return start == 0 || start != atomic_load(&it->start) || state == 'Z' || state == 'X';
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

int hl__shm_slot_take(hl__shm_space *space, const char *host, hl_error *error) {
  struct stat st;
  char state;
  uint64_t start = process_start((uint64_t)getpid(), &state);
  if (start && stat("/proc/self/ns/pid", &st) == 0) space->namespace = st.st_ino;
  hl__shm_header *header = &space->table->header;
  for (uint32_t i = 1; i < HL__SHM_SLOTS; i++) {
    hl__shm_slot *it = &space->table->slot[i];
    if (atomic_load(&it->state) || !hl__shm_byte_lock(space, HL__SHM_LIFE + (off_t)i)) continue;
    if (atomic_load(&it->state)) { /* another process has lived and died here meanwhile */
      hl__shm_byte_unlock(space, HL__SHM_LIFE + (off_t)i);
      continue;
    }
    space->me = i;
    atomic_store(&it->pid, (uint64_t)getpid());
    atomic_store(&it->start, start);
    atomic_store(&it->namespace, space->namespace);
    hl__shm_text_set(it->host, sizeof it->host / sizeof *it->host, host, strlen(host));
    atomic_store(&it->rung, 0);
    (void)atomic_fetch_add(&it->generation, 1);
    uint32_t top = atomic_load(&header->slots_top);
    while (top <= i && !atomic_compare_exchange_weak(&header->slots_top, &top, i + 1)) {}
    atomic_store(&it->state, 1);
    (void)atomic_fetch_add(&header->opened, 1);
    return HL_OK;
  }
  return hl__error(error, HL_ESTORE,
                   "%u programs use the lock directory %s: it has no room for more",
                   HL__SHM_SLOTS - 1, space->directory.path);
}

void hl__shm_slot_leave(hl__shm_space *space, bool free) {
  if (free) atomic_store(&space->table->slot[space->me].state, 0);
  hl__shm_byte_unlock(space, HL__SHM_LIFE + (off_t)space->me);
}
