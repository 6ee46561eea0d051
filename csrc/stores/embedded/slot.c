/*
 * slot.c - the slots of processes. A process lives as long as the lock on the byte of its slot
 * does. The kernel keeps that lock while the process has the file open or mapped, and frees it
 * after the last thread has left the memory. So no dead process writes any more, one that has
 * executed another program is dead, and one that has closed its descriptors is not. To judge takes
 * no descriptor, no /proc and no right.
 *
 * overlayfs maps another file than the one that was opened, and its locks end with the descriptors
 * (space->fragile). There each call looks whether its descriptor is still its own.
 */
#include "embedded.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Whether /proc has pids of this process' namespace, not those of another one. */
static bool proc_is_ours(void) {
  char self[24];
  ssize_t n = readlink("/proc/self", self, sizeof self - 1);
  self[n > 0 ? n : 0] = '\0';
  return strtol(self, NULL, 10) == (long)getpid();
}

/* The state of a process, as a letter of the kernel's; 0: this process cannot see it. */
static char process_state(pid_t pid) {
  char name[64], text[256];
  (void)snprintf(name, sizeof name, "/proc/%ld/stat", (long)pid);
  if (!proc_is_ours()) return '\0';
  hl__fork_forbid();
  int fd = open(name, O_RDONLY | O_CLOEXEC);
  ssize_t n = fd >= 0 ? hl__file_read(fd, text, sizeof text - 1) : 0;
  if (fd >= 0) (void)close(fd);
  hl__fork_allow();
  text[n > 0 ? n : 0] = '\0';
  /* The program's name stands in parentheses, and may contain some. */
  const char *rest = strrchr(text, ')');
  if (!rest || rest[1] != ' ') return '\0';
  return rest[2];
}

bool hl__shm_is_dead(hl__shm_space *space, uint32_t slot) {
  if (slot == space->me) return false;
  if (slot == 0 || slot >= HL__SHM_SLOTS) return true; /* a damaged word */
  /* Were the descriptor another file's by now, the byte would say nothing. */
  return hl__shm_byte_free(space, HL__SHM_LIFE + (off_t)slot) && hl__shm_is_open(space);
}

pid_t hl__shm_slot_pid(const hl__shm_space *space, const hl__shm_slot *slot) {
  return hl__shm_pid(space, atomic_load(&slot->pid), atomic_load(&slot->namespace));
}

bool hl__shm_is_stopped(const hl__shm_space *space, uint32_t slot) {
  if (slot >= HL__SHM_SLOTS) return false;
  const pid_t pid = hl__shm_slot_pid(space, &space->table->slot[slot]);
  if (!pid) return false;
  const char state = process_state(pid);
  return state == 'T' || state == 't';
}

void hl__shm_slot_name(hl__shm_space *space, uint32_t slot, char *text, size_t size) {
  if (slot >= HL__SHM_SLOTS) {
    (void)snprintf(text, size, "a process that does not exist");
    return;
  }
  const pid_t pid = hl__shm_slot_pid(space, &space->table->slot[slot]);
  if (pid == 0) {
    (void)snprintf(text, size, "a process of another pid namespace");
    return;
  }
  char state = process_state(pid);
  const char *what = !state                         ? ""
                     : state == 'T' || state == 't' ? " (stopped)"
                     : state == 'D' || state == 'S' ? " (asleep)"
                                                    : " (running)";
  (void)snprintf(text, size, "process %ld%s", (long)pid, what);
}

/* Takes the bytes of a free slot: the one that menders need first, until `state` says that the slot
   is used. Or else a mender that is at work on it for its last process, and was held up, would
   break the locks of this one. */
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
  if (stat("/proc/self/ns/pid", &st) == 0) space->namespace = st.st_ino;
  hl__shm_header *header = &space->table->header;
  for (uint32_t i = 1; i < HL__SHM_SLOTS - 1; i++) { /* the last: see space.c */
    hl__shm_slot *it = &space->table->slot[i];
    if (atomic_load(&it->state) || !slot_enter(space, i)) continue;
    space->me = i;
    atomic_store(&it->pid, (uint64_t)getpid());
    atomic_store(&it->namespace, space->namespace);
    hl__shm_text_set(it->host, sizeof it->host / sizeof *it->host, host, strlen(host));
    atomic_store(&it->asleep, 0);
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
  atomic_store(&it->pid, 0);
  if (free) atomic_store(&it->state, 0);
  /* Else the number is another file's, and the byte is freed with the mapping. */
  if (atomic_load(&space->gone) != HL__SHM_CLOSED)
    hl__shm_byte_unlock(space, HL__SHM_LIFE + (off_t)space->me);
}
