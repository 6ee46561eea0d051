/*
 * space.c - one name of a lock directory as this process uses it, and the registry by which all
 * stores of the process share it: one mapping, one slot, one thread that watches.
 */
#include "embedded.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* How long an opener waits for another that opens the directory at this moment. */
#define OPEN_NS 2000000000
#define SWEEP_NS 1000000000

/* All spaces of the process. Those of another generation are a parent's: they stay in the list
   untouched, so that their memory is not a leak. */
static hl__shm_space *spaces HL__GUARDED_BY(hl__shm_registry);

/* Guards the list. Not a pthread mutex, because a child may be born while a thread of its parent's
   holds it: the holder's generation + 1, 0 when free, so that a child recognises a holder who does
   not exist in it. */
static atomic_uint registry_holder;

static void pause_for(long ns) {
  const struct timespec moment = {.tv_nsec = ns};
  (void)nanosleep(&moment, NULL);
}

static void registry_lock(void) HL__ACQUIRES(hl__shm_registry) HL__UNCHECKED {
  unsigned self = hl__fork_generation() + 1;
  for (;;) {
    unsigned holder = atomic_load(&registry_holder);
    if (holder != self && atomic_compare_exchange_weak(&registry_holder, &holder, self)) return;
    pause_for(100000); /* held while a directory is opened, at most */
  }
}

static void registry_unlock(void) HL__RELEASES(hl__shm_registry) HL__UNCHECKED {
  atomic_store(&registry_holder, 0u);
}

/* Unchecked, as space_new: no other thread has the space. */
HL__UNCHECKED static void space_free(hl__shm_space *space) {
  if (!hl__shm_bell_stop(space)) return;
  hl__shm_bell_free(space);
  hl__shm_watch_free(space);
  if (space->table && space->me && hl__shm_touchable(space))
    hl__shm_slot_leave(space, hl__shm_stock_leave(space));
  if (space->table) (void)munmap(space->table, HL__SHM_MAPPED);
  if (atomic_load(&space->gone) != HL__SHM_CLOSED) hl__file_close(space->fd);
  hl__file_directory_close(&space->directory);
  (void)pthread_mutex_destroy(&space->mutex);
  (void)pthread_mutex_destroy(&space->mending);
  free(space->late);
  free(space->name);
  free(space);
}

static int byte_await(hl__shm_space *space, off_t at, int64_t deadline, hl_error *error) {
  while (!hl__shm_byte_lock(space, at)) {
    if (errno != EAGAIN && errno != EACCES)
      return hl__error_errno(error, HL_ESTORE, "cannot lock %s/" HL__SHM_FILE,
                             space->directory.path);
    if (hl__shm_now() > deadline)
      return hl__error(error, HL_ESTORE,
                       "another process keeps the lock directory %s for itself: it may be stopped",
                       space->directory.path);
    pause_for(500000);
  }
  return HL_OK;
}

static bool is_used(hl__shm_space *space) {
  for (uint32_t i = 1; i < HL__SHM_SLOTS; i++)
    if (!hl__shm_byte_free(space, HL__SHM_LIFE + (off_t)i)) return true;
  return false;
}

/* Without an id of both (a process without /proc is told none) a file is of this boot only if it
   does not outlive one, or a process uses it: its first user in this boot was told the id. */
static int boot_guess(hl__shm_space *space, const uint64_t boot[2], hl_error *error) {
  hl__shm_header *header = &space->table->header;
  if (is_used(space) || !space->directory.lasts) {
    if (boot[0] == 0) return HL_OK;
    atomic_store(&header->boot[1], boot[1]);
    atomic_store(&header->boot[0], boot[0]);
    return HL_OK;
  }
  if (boot[0] == 0)
    return hl__error(error, HL_ESTORE,
                     "cannot read /proc/sys/kernel/random/boot_id, so it is not known whether the "
                     "machine was started anew since the lock directory %s was used: mount /proc, "
                     "or name a directory on tmpfs",
                     space->directory.path);
  hl__shm_reboot(space, boot);
  return HL_OK;
}

/* The first process of a boot finds nothing alive. If it does, two machines share the file, or one
   of them is told another boot's id. HL_EUNSAFE_SERVER. */
static int boot_begin(hl__shm_space *space, const uint64_t boot[2], hl_error *error) {
  const hl__shm_header *header = &space->table->header;
  const uint64_t last[2] = {atomic_load(&header->boot[0]), atomic_load(&header->boot[1])};
  if (boot[0] == 0 || last[0] == 0) return boot_guess(space, boot, error);
  if (last[0] == boot[0] && last[1] == boot[1]) return HL_OK;
  if (is_used(space))
    return hl__error(error, HL_EUNSAFE_SERVER,
                     "programs that have another boot id use the lock directory %s: name one that "
                     "this machine has for itself",
                     space->directory.path);
  hl__shm_reboot(space, boot);
  return HL_OK;
}

/* Mends the dead while no slot is free. A process that locks partitions must have a slot, or others
   would break its locks. The last slot is for this: one process at a time has it, as it has the
   lock on INIT. An earlier one may have died with it; this process holds the byte that a mender
   needs. */
static int room_make(hl__shm_space *space, const char *host, int64_t deadline, hl_error *error) {
  const uint32_t last = HL__SHM_SLOTS - 1;
  const off_t life = HL__SHM_LIFE + (off_t)last, mend = HL__SHM_MEND + (off_t)last;
  int status = byte_await(space, life, deadline, error);
  if (status == HL_OK) status = byte_await(space, mend, deadline, error);
  if (status) return status;
  space->me = last;
  hl__shm_parts_break(space, last);
  hl__shm_sweep(space, true, deadline);
  space->me = 0;
  hl__shm_byte_unlock(space, mend);
  hl__shm_byte_unlock(space, life);
  return hl__shm_slot_take(space, host, error);
}

/* The lock on INIT makes a process the first. */
static int slot_begin(hl__shm_space *space, const char *host, hl_error *error) {
  uint64_t boot[2];
  int64_t ahead;
  if (hl__machine_boot(boot, &ahead) != 0)
    return hl__error_errno(error, HL_ESTORE, "cannot read the id of this boot in /proc");
  space->shift_ms = ahead / 1000000;
  int status = byte_await(space, HL__SHM_INIT, hl__shm_now() + OPEN_NS, error);
  if (status) return status;
  space->fragile = hl__shm_is_fragile(space);
  status = boot_begin(space, boot, error); /* before it has a slot */
  if (status == HL_OK) {
    status = hl__shm_slot_take(space, host, error);
    if (status) status = room_make(space, host, hl__shm_now() + OPEN_NS, error);
  }
  hl__shm_byte_unlock(space, HL__SHM_INIT);
  if (status == HL_OK) hl__shm_sweep(space, true, hl__shm_now() + SWEEP_NS);
  return status;
}

/* Takes over the directory and the name, whatever becomes of them. */
HL__UNCHECKED static int space_new(hl__file_directory *directory, char *name,
                                   const hl_store_config *config, hl__shm_space **result,
                                   hl_error *error) {
  hl__shm_space *space = calloc(1, sizeof *space);
  if (!space) {
    hl__file_directory_close(directory);
    free(name);
    return hl__error_memory(error);
  }
  space->references = 1;
  space->generation = hl__fork_generation();
  space->fd = -1;
  space->directory = *directory;
  space->name = name;
  space->break_locks = hl__shm_break;
  space->end = space_free;
  (void)pthread_mutex_init(&space->mutex, NULL);
  pthread_mutexattr_t again;
  (void)pthread_mutexattr_init(&again);
  (void)pthread_mutexattr_settype(&again, PTHREAD_MUTEX_RECURSIVE);
  (void)pthread_mutex_init(&space->mending, &again);
  (void)pthread_mutexattr_destroy(&again);
  int status = hl__shm_map(space, config, error);
  if (status == HL_OK) status = slot_begin(space, config->host, error);
  if (status == HL_OK) status = hl__shm_watch_new(space, error);
  if (status == HL_OK) status = hl__shm_bell_new(space, error);
  if (status) {
    space_free(space);
    return status;
  }
  hl__file_sweep(&space->directory);
  *result = space;
  return HL_OK;
}

/* The process' own space of that name, with a reference for the caller. The name may have led to
   another directory when the space was made, if the process has another root directory by now. */
static hl__shm_space *space_find(const char *name, const hl__file_directory *directory)
    HL__REQUIRES(hl__shm_registry) {
  for (hl__shm_space *space = spaces; space; space = space->next) {
    if (space->generation != hl__fork_generation() || space->references == 0 ||
        strcmp(space->name, name) != 0 || hl__shm_look(space) ||
        space->directory.inode != directory->inode || space->directory.device != directory->device)
      continue;
    space->references++;
    return space;
  }
  return NULL;
}

int hl__shm_space_open(const hl_store_config *config, const char *path, hl_layout **layout,
                       hl__shm_space **result, hl_error *error) {
  hl__file_directory directory;
  *result = NULL;
  int status = hl__file_directory_open(path, &directory, error);
  if (status) return status;
  char *name = hl__file_path(path && *path ? path : directory.path, HL__SHM_FILE);
  if (!name) {
    hl__file_directory_close(&directory);
    return hl__error_memory(error);
  }
  registry_lock();
  hl__shm_space *space = space_find(name, &directory);
  if (space) {
    hl__file_directory_close(&directory);
    free(name);
  } else {
    status = space_new(&directory, name, config, &space, error);
    if (status == HL_OK) {
      space->next = spaces;
      spaces = space;
    }
  }
  registry_unlock();
  if (status == HL_OK) status = hl__shm_agree(space, config, layout, error);
  if (status) {
    hl__shm_space_unref(space);
    return status;
  }
  *result = space;
  return HL_OK;
}

void hl__shm_space_ref(hl__shm_space *space) {
  registry_lock();
  space->references++;
  registry_unlock();
}

void hl__shm_space_unref(hl__shm_space *space) {
  if (!space) return;
  registry_lock();
  bool last = --space->references == 0;
  if (last) {
    hl__shm_space **link = &spaces;
    while (*link != space) link = &(*link)->next;
    *link = space->next;
  }
  registry_unlock();
  if (last) space_free(space);
}
