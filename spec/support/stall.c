/*
 * stall.c - for specs: this process stands still in the embedded store's table, as far as others
 * can see. It has the locks of all partitions, and works on all leases.
 */
#include "../../csrc/stores/embedded/format.h"

#include <fcntl.h>
#include <lauxlib.h>
#include <limits.h>
#include <linux/futex.h>
#include <lua.h>
#include <sched.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static hl__shm_table *table_map(const char *path, size_t *size) {
  struct stat st;
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return NULL;
  void *table = MAP_FAILED;
  if (fstat(fd, &st) == 0 && st.st_size > 0) {
    *size = (size_t)st.st_size;
    table = mmap(NULL, *size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  (void)close(fd);
  return table == MAP_FAILED ? NULL : table;
}

/* The slot of this process; 0: it has none. */
static uint32_t slot_of(hl__shm_table *table) {
  for (uint32_t i = 1; i < HL__SHM_SLOTS; i++)
    if (atomic_load(&table->slot[i].state) &&
        atomic_load(&table->slot[i].pid) == (uint64_t)getpid())
      return i;
  return 0;
}

/* Writes to the word `busy` of each lease, if it is `before`. */
static void leases_set(hl__shm_table *table, size_t size, uint64_t before, uint64_t after) {
  for (uint32_t chunk = 1; chunk < HL__SHM_CHUNKS; chunk++) {
    const size_t at = HL__SHM_FIXED + (size_t)chunk * HL__SHM_CHUNK;
    if (at + HL__SHM_CHUNK > size) return;
    if (atomic_load(&table->dir[chunk]) >> 24 != HL__LEASES) continue;
    for (uint32_t i = 0; i < HL__SHM_PER_CHUNK; i += HL__SHM_LEASE_UNITS) {
      hl__shm_lease *lease = (void *)((char *)table + at + (size_t)i * HL__SHM_UNIT);
      uint64_t seen = before;
      (void)atomic_compare_exchange_strong(&lease->busy, &seen, after);
    }
  }
}

/* Sets them to this process' words, or from these to 0. */
static int table_set(lua_State *L, bool stands) {
  size_t size = 0;
  hl__shm_table *table = table_map(luaL_checkstring(L, 1), &size);
  if (!table) return luaL_error(L, "no table");
  const uint32_t slot = slot_of(table);
  if (!slot) return luaL_error(L, "this process does not use the directory");
  const uint64_t word = (uint64_t)(slot + 1) << 48 |
                        (uint64_t)(atomic_load(&table->slot[slot].generation) & 0xFFFFu) << 32 |
                        UINT32_MAX;
  for (unsigned i = 0; i < HL__SHM_PARTS; i++) {
    hl__a32 *lock = &table->part[i].lock;
    if (!stands) {
      if (atomic_exchange(lock, 0) & HL__SHM_CONTENDED)
        (void)syscall(SYS_futex, lock, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
      continue;
    }
    for (uint32_t none = 0; !atomic_compare_exchange_strong(lock, &none, slot + 1); none = 0)
      (void)sched_yield();
  }
  leases_set(table, size, stands ? 0 : word, stands ? word : 0);
  (void)munmap(table, size);
  return 0;
}

/* begin(path): of the file `control` of a directory that this process uses. */
static int l_begin(lua_State *L) { return table_set(L, true); }
static int l_end(lua_State *L) { return table_set(L, false); }

int luaopen_hierlock_spec_stall(lua_State *L);

int luaopen_hierlock_spec_stall(lua_State *L) {
  lua_newtable(L);
  lua_pushcfunction(L, l_begin);
  lua_setfield(L, -2, "begin");
  lua_pushcfunction(L, l_end);
  lua_setfield(L, -2, "finish");
  return 1;
}
