/*
 * embedded.h - the embedded store in shared memory: the inside, for the files of this room only.
 *
 * format.h says what lies in the file, its invariants, and who may write what. The files, from the
 * bottom; each uses only those above it in this list:
 *
 *   directory.c  the lock directory (directory.h)
 *   flock.c      Symfony's files beside the table (flock.h)
 *   map.c        the file: made, refused, mapped, grown by chunks; whether it is still the file
 *   slot.c       a process' slot: its life, and which slots are dead
 *   lock.c       the lock of a partition
 *   partition.c  the index of a partition: rows, holders, queues; granting; making it anew
 *   leased.c     claims of leases: made beside a session's, changed, ended
 *   mend.c       cleaning up after a dead process
 *   stock.c      this process' free nodes and records, and what it gives back late
 *   watch.c      the thread that watches for deaths while something waits
 *   bell.c       the thread that goes on with takes that were started, and do not block
 *   circle.c     circles of waiters
 *   space.c      one directory as this process uses it
 *   take.c       sessions: taking rows and giving them back
 *
 * Time inside the room: nanoseconds of CLOCK_MONOTONIC (hl__shm_now), unless a name says `_ms`.
 *
 * Locks, in the order in which a thread takes them, after those of the core (mutex.h):
 *
 *   1. the registry        which spaces the process has (space.c)
 *   2. space->mending      one thread of the process mends; then the byte MEND + slot
 *   3. partitions          one at a time; circle.c: all, in ascending order
 *   4. space->mutex        free nodes and records, agents, sleepers
 *   5. the bell's          what its thread has to do
 *
 * Nothing blocks while a partition's lock is held; the only system call in it is the fallocate() of
 * a chunk of rows, once in 256 new rows.
 *
 * Forks: a child never touches the mapping, which it does not have (MADV_DONTFORK). It only forgets
 * sessions and spaces.
 */
#ifndef HIERLOCK_EMBEDDED_H
#define HIERLOCK_EMBEDDED_H

#include "clock.h"
#include "directory.h"
#include "error.h"
#include "exit.h"
#include "fork.h"
#include "format.h"
#include "heap.h"
#include "list.h"
#include "machine.h"
#include "mutex.h"
#include "store.h"

#include <pthread.h>

HL__MUTEX_CLASS(hl__shm_registry) HL__AFTER(hl__connection_mutex);
HL__MUTEX_CLASS(hl__shm_mending) HL__AFTER(hl__shm_registry);
HL__MUTEX_CLASS(hl__shm_space_mutex) HL__AFTER(hl__shm_mending) HL__BEFORE(hl__births);
HL__MUTEX_CLASS(hl__shm_bell_mutex) HL__AFTER(hl__shm_space_mutex) HL__BEFORE(hl__births);

/* How soon the directory is seen to be another one. */
#define HL__SHM_LOOK_NS 10000000
/* How often a process looks for what nothing tells it of: deaths that it cannot see otherwise, and
   what it gave back late. */
#define HL__SHM_POLL_NS 5000000

typedef struct hl__shm_space hl__shm_space;
typedef struct hl__shm_session hl__shm_session;
typedef struct hl__shm_ear hl__shm_ear;

/* Why a space cannot be used any more. */
enum hl__shm_gone {
  HL__SHM_HERE,
  HL__SHM_CLOSED,  /* a stranger has closed its descriptor, whose number may be another file's */
  HL__SHM_CUT,     /* the file was truncated: a touch of the mapping may be a SIGBUS */
  HL__SHM_REMOVED, /* its name leads to another file, or to none */
};

/* An agent's record, for circles; of this process. */
typedef struct hl__shm_agent {
  struct hl__shm_agent *next;
  uint64_t number;
  uint32_t record;
  unsigned sessions;
} hl__shm_agent;
#define HL__SHM_AGENT_HEADS 64u

/* One name of a directory, as one process uses it; shared by its stores and sessions. */
struct hl__shm_space {
  hl__shm_space *next HL__GUARDED_BY(hl__shm_registry);
  unsigned references HL__GUARDED_BY(hl__shm_registry);
  unsigned generation;          /* of the process; constant */
  hl__file_directory directory; /* constant */
  char *name;                   /* of the file, by which programs find it; constant */
  int fd;                       /* constant */
  dev_t device;                 /* of the file; constant */
  ino_t inode;
  hl__shm_table *table; /* the mapping; constant */
  uint32_t me;          /* the slot; constant */
  uint64_t namespace;   /* of pids; 0: not known. Constant */
  bool fragile;         /* hl__shm_is_fragile; constant */
  int intentions;       /* as hl_layout.intentions; constant once it is mapped */
  int64_t shift_ms;     /* by which a time namespace shifts CLOCK_BOOTTIME. Constant */
  hl__a32 limit;        /* units that may be touched */
  hl__a32 hint;         /* where a free chunk was found last */
  hl__a32 hints[2];     /* where a free record, and a free node, of slot 0 was found last */
  atomic_int gone;      /* enum hl__shm_gone; never HERE again */
  _Atomic int64_t looked;
  hl__a32 holding; /* sessions of stores that hold something */
  /* hl__shm_break; for lock.c, which is below it. */
  void (*break_locks)(hl__shm_space *space, uint32_t slot);
  pthread_mutex_t mending;                        /* recursive: see hl__shm_break */
  uint32_t mends HL__GUARDED_BY(hl__shm_mending); /* the slot; 0: none */
  pthread_mutex_t mutex;
  uint32_t free_node HL__GUARDED_BY(hl__shm_space_mutex);
  uint32_t free_record HL__GUARDED_BY(hl__shm_space_mutex);
  hl__shm_agent *agents[HL__SHM_AGENT_HEADS] HL__GUARDED_BY(hl__shm_space_mutex);
  /* Nodes that say GONE or LEFT, and may still be linked. */
  uint32_t *late HL__GUARDED_BY(hl__shm_space_mutex);
  uint32_t late_capacity HL__GUARDED_BY(hl__shm_space_mutex);
  hl__a32 late_count;
  struct hl__shm_watch *watch;       /* constant */
  struct hl__shm_bell *bell;         /* constant */
  void (*end)(hl__shm_space *space); /* frees it; for bell.c, which is below space.c */
  hl__a64 waits, handed;             /* counters, for tests */
};

HL__MUTEX_FUNCTIONS(hl__shm_space, hl__shm_space, mutex, hl__shm_space_mutex)

/* A claim that a session has. */
typedef struct hl__shm_held {
  uint32_t node;
  uint64_t claim; /* HELD */
} hl__shm_held;
#define HL__SHM_CACHE 16u

/* One thread at a time uses a session; hl__shm_cancel: any thread. */
struct hl__shm_session {
  hl__shm_space *space; /* a reference */
  uint32_t record;      /* its own */
  uint32_t note;        /* the record that tells observers of the request under way, or the last */
  uint32_t notes;       /* records of its later requests, by record.next: the last one first */
  hl__shm_agent *agent; /* whose record its record names; NULL: its own */
  hl__shm_held *held;   /* in the order in which they were taken */
  uint32_t n, capacity;
  uint32_t cache[HL__SHM_CACHE], cached; /* free nodes */
  atomic_bool cancelled;                 /* until the take under way ends, or settle */
  hl__a32 waits;                         /* the node for which it waits; 0 */
  /* Of a take that was started, until it ends; NULL. Its own thread sets it before the bell has it,
     and reads it without the mutex. */
  hl__shm_ear *ear;
  hl__list sleeper HL__GUARDED_BY(hl__shm_space_mutex); /* watch.c; while it sleeps */
};

/* A take that was started, for the bell's thread. It is in the memory of who has started it. */
struct hl__shm_ear {
  hl__shm_session *session;
  /* Called on the bell's thread, without a lock, when the node is granted, when `until` has come,
     after hl__shm_cancel, and now and then. True: it waits on, for `node` and until `until`. False:
     it has ended: hl__shm_bell_leave was called, and its memory may be another's. */
  bool (*go)(hl__shm_ear *ear);
  uint32_t node; /* 0: it waits for none */
  int64_t until; /* ns */
  /* bell.c's */
  hl__list todo;      /* with the bell's mutex */
  hl__list all;       /* in it once `go` was called */
  hl__heap timed;     /* by `until` */
  hl__shm_ear *chain; /* by node */
  uint32_t chained;   /* the node, while it is in a chain */
};

/* A take under way (take.c). */
typedef struct hl__shm_taking {
  hl__shm_session *session;
  const hl_request *request;
  uint64_t exempt;
  uint32_t before; /* what the session had */
  int64_t deadline;
  bool alone;    /* no thread watches for it: there is none to be had */
  size_t i;      /* of a started one: the row that comes next */
  uint32_t told; /* of a started one that waits: the record that tells of its rows */
} hl__shm_taking;

/* --------------------------------------------------------------- space.c */

/* The space of the directory of a DSN (path NULL: the default one), made or shared, with a
   reference for the caller. *layout: what is wanted, NULL: config->layout; then a reference to what
   is agreed on.
   HL_OK, HL_EMISMATCH, HL_EUNSAFE_SERVER, HL_ESTORE, HL_ENOMEM. */
int hl__shm_space_open(const hl_store_config *config, const char *path, hl_layout **layout,
                       hl__shm_space **space, hl_error *error);
void hl__shm_space_ref(hl__shm_space *space);
/* NULL is fine. With the last reference the slot is given up. */
void hl__shm_space_unref(hl__shm_space *space);

/* Whether a thread may touch the mapping, and whether its locks keep out whoever opens the
   directory now: looks at the file and its name if that was not done in the last 10 ms (at_once: in
   any case). HL_OK; HL_ECONNECTION, saying why. Any thread; 5 ns where nothing is looked at. */
int hl__shm_check(hl__shm_space *space, bool at_once, hl_error *error);

/* -------------------------------------------------- sessions: take.c */

/* A session that holds nothing. HL_OK, HL_ECONNECTION, HL_ESTORE (no space), HL_ENOMEM. */
int hl__shm_begin(hl__shm_space *space, hl__shm_session **session, hl_error *error);
/* Gives back what it holds, and frees it. */
void hl__shm_end(hl__shm_session *session);
/* Has observers see this of the session's next rows. False: no space is left. */
bool hl__shm_tell(hl__shm_session *session, const hl_request *request, const char *application);
/* Has them see all that it holds in another mode. */
void hl__shm_tell_mode(hl__shm_session *session, hl_mode mode);
/* Has them see nothing of requests that came after session->notes was `keep` (0: of later ones):
   the session has given their rows back. */
void hl__shm_tell_no_more(hl__shm_session *session, uint32_t keep);

/* Takes the request's rows in their order, all or none; the session may hold rows, also the same in
   another mode (an upgrade: it then has two claims of the row). Rows of HL_LEVEL_NAMED are not for
   this function. Of the request count rows, n, deadline, try_once, agent, blocks, holds.
   `exempt`: the stamp of a lease that is not in the way; 0: none.

   HL_OK; HL_TIMEOUT: another session holds a row, or its process is stopped while it has the
   partition's lock, which *error says; HL_DEADLOCK; HL_CANCELLED; HL_ECONNECTION; HL_ESTORE: no
   space is left, or the table is damaged; HL_ENOMEM. *error names level and bucket of the row. */
int hl__shm_take(hl__shm_session *session, const hl_request *request, uint64_t exempt,
                 hl_error *error);
/* As hl__shm_take, but it never blocks: for the thread of the bell. begin: HL_OK; else as
   hl__shm_take. go: HL__UNFREE: it waits, as `ear` says; call it again when the ear hears
   something. Else the take has ended, as hl__shm_take. */
int hl__shm_take_begin(hl__shm_taking *self, hl_error *error);
int hl__shm_take_go(hl__shm_taking *self, hl__shm_ear *ear, hl_error *error);
/* Gives back all that the session took after its first `keep` claims (session->n says how many it
   has), the last first. Never blocks for more than 2 ms. */
void hl__shm_give_back(hl__shm_session *session, uint32_t keep);
/* Gives back one claim of that row in that mode. False: it has none. */
bool hl__shm_give_back_row(hl__shm_session *session, const hl_row *row);
/* Ends the take under way with HL_CANCELLED, or else the next one. Any thread. */
void hl__shm_cancel(hl__shm_session *session);
/* Whether each claim that the session has is in the table as it wrote it. HL_OK; HL_ECONNECTION:
   the space is gone (see hl__shm_check), or the table was overwritten. */
int hl__shm_session_check(hl__shm_session *session, bool at_once, hl_error *error);

/* ------------------------------------------------------- leases: leased.c */

/* The life of a lease's record: hl__shm_lease_make sets it aside (HL__MAKES); the caller writes
   what the lease is; hl__shm_lease_claims adds the rows that a session holds, beside the session's
   own claims; hl__shm_lease_publish stores its end, and now there is a lease. The session then
   gives its rows back. Where the process dies before it has published, the mender takes all of it
   away. Whoever brings `end` to 0 by a CAS ends the lease, and calls hl__shm_lease_unmake. */

/* Sets aside a record, all zeros but for its stamp. 0: no space is left. */
uint32_t hl__shm_lease_make(hl__shm_space *space);
/* Makes claims of the lease of all rows that the session holds; of several claims of one row one,
   in a mode that covers them. HL_OK; HL_TIMEOUT, HL_ESTORE: the caller then abandons the lease. */
int hl__shm_lease_claims(hl__shm_session *session, uint32_t lease, int64_t deadline,
                         hl_error *error);
/* The lease ends at end_ms (hl__shm_boot_ms). */
void hl__shm_lease_publish(hl__shm_space *space, uint32_t lease, int64_t end_ms);
/* Gives the lease another end, if it has not ended (`stamp`: nor become another lease). False: it
   has. */
bool hl__shm_lease_extend(hl__shm_space *space, uint32_t lease, uint64_t stamp, int64_t end_ms);
/* Ends the lease: brings `end` to 0, but only if the word is still `seen` (0: whatever it is), and
   takes its claims away. True: this call has ended it. */
bool hl__shm_lease_end(hl__shm_space *space, uint32_t lease, uint64_t stamp, uint64_t seen);
/* Takes away a lease that the caller is making, and has not published. */
void hl__shm_lease_abandon(hl__shm_space *space, uint32_t lease, int64_t deadline);
/* Takes away the claims of a lease that has ended, and frees the record unless lease->revoked is
   set. Stopped processes may hold it up until the deadline; then a waiter in its way, or a mender,
   goes on. Any number of threads may be at it. */
void hl__shm_lease_unmake(hl__shm_space *space, uint32_t lease, int64_t deadline);
/* Frees the record of a lease that is over and was kept. */
void hl__shm_lease_forget(hl__shm_space *space, uint32_t lease, uint64_t stamp);
/* For a request in the mode: ends a lease that is in its way on the row of that key and whose time
   is up: 0, and it looks again. Else: when the next one in its way ends (hl__shm_boot_ms;
   INT64_MAX: there is none). */
int64_t hl__shm_leases_look(hl__shm_space *space, uint64_t key, unsigned mode, int64_t deadline);
/* Changes the mode of the claim of a row that the lease with that stamp has, in one step. From a
   weaker to a stronger mode only while the caller's session holds the row in that mode. HL_OK;
   HL_ELOST: the lease has no such row, or has ended; HL_TIMEOUT. */
int hl__shm_lease_convert(hl__shm_space *space, uint32_t lease, uint64_t stamp, const hl_row *row,
                          int64_t deadline, hl_error *error);
/* Whether the process is gone that wrote such a word into `busy` of a lease. */
bool hl__shm_is_left(const hl__shm_space *space, uint64_t word);

/* ------------------------------------------------- who has what: leased.c */

typedef struct hl__shm_claim_seen {
  uint32_t node;
  uint64_t claim;
  uint32_t session; /* index of the record: of a session, or of a lease */
  uint32_t note;    /* of the record that tells of its request */
  uint32_t slot;    /* 0: it is a lease's */
} hl__shm_claim_seen;

/* Calls fn for each claim that is HELD or WAIT, without any lock; each was so at a moment during
   the call. fn returns false to end it. */
void hl__shm_each_claim(hl__shm_space *space, bool (*fn)(void *context, const hl__shm_claim_seen *),
                        void *context);
/* Calls fn for the index of each record of a lease that is used. */
void hl__shm_each_lease(hl__shm_space *space, bool (*fn)(void *context, uint32_t lease),
                        void *context);
/* ----------------------------------------------------------------- map.c */

int64_t hl__shm_now(void); /* ns */
/* Milliseconds of CLOCK_BOOTTIME, as all time namespaces of the machine count them. */
int64_t hl__shm_boot_ms(const hl__shm_space *space);
/* ns of a deadline in ms, which may be HL_FOREVER: when that ms is over. The deadline was made of
   the present ms, of which a part had passed; so no wait is shorter than its time-out. */
static inline int64_t hl__shm_ns(int64_t ms) {
  return ms >= INT64_MAX / 1000000 ? INT64_MAX : ms * 1000000 + 999999;
}

/* Opens the file `control` of space->directory, making it if need be, and maps it; agrees on the
   layout. Sets fd, device, inode, table, limit. HL_OK, HL_EMISMATCH, HL_EUNSAFE_SERVER, HL_ESTORE,
   HL_ECONNECTION (the directory was removed meanwhile), HL_ENOMEM. */
int hl__shm_map(hl__shm_space *space, const hl_store_config *config, hl_error *error);
/* Whether locks on bytes end with the descriptor, though the file is mapped. The caller has the
   lock on INIT. */
bool hl__shm_is_fragile(hl__shm_space *space);
/* Whether the layout of the file is the wanted one; *layout: as for hl__shm_space_open. */
int hl__shm_agree(const hl__shm_space *space, const hl_store_config *config, hl_layout **layout,
                  hl_error *error);
/* A token greater than all that were drawn before: a counter of 56 bits above 8 zero bits. Drawn
   after the last row was granted, and before any is given back. */
uint64_t hl__shm_token(hl__shm_space *space);
/* Makes later tokens greater than this one. */
void hl__shm_token_raise(hl__shm_space *space, uint64_t token);
/* HL_ESTORE, saying why there is no space. */
int hl__shm_full_error(const hl__shm_space *space, hl_error *error);
/* HL_ECONNECTION, saying why the space is gone. */
int hl__shm_gone_error(const hl__shm_space *space, hl_error *error);
/* Looks at the file and its name now; whether the space is gone. */
bool hl__shm_look(hl__shm_space *space);
/* Whether the descriptor is still the space's own. */
bool hl__shm_is_open(hl__shm_space *space);
/* Whether the mapping may be touched, even though its name leads elsewhere, or its descriptor was
   closed: the space gives back all the same, as others may find the directory. */
bool hl__shm_touchable(hl__shm_space *space);

/* A unit by its number, and for `units` of them; NULL: it is not there. Reads the size of the file
   only where it has grown. */
void *hl__shm_unit_behind(hl__shm_space *space, uint32_t unit, uint32_t units);
static inline void *hl__shm_unit(hl__shm_space *space, uint32_t unit, uint32_t units) {
  uint32_t limit = atomic_load_explicit(&space->limit, memory_order_relaxed);
  if (unit == 0) return NULL; /* the end of a list */
  if (__builtin_expect(unit > limit || limit - unit < units, 0))
    return hl__shm_unit_behind(space, unit, units);
  return (char *)space->table + HL__SHM_FIXED + (size_t)unit * HL__SHM_UNIT;
}
static inline hl__shm_node *hl__shm_node_at(hl__shm_space *space, uint32_t unit) {
  return hl__shm_unit(space, unit, 1);
}
static inline hl__shm_row *hl__shm_row_at(hl__shm_space *space, uint32_t unit) {
  return hl__shm_unit(space, unit, 1);
}
static inline hl__shm_record *hl__shm_record_at(hl__shm_space *space, uint32_t unit) {
  return unit % HL__SHM_RECORD_UNITS ? NULL : hl__shm_unit(space, unit, HL__SHM_RECORD_UNITS);
}
/* A look at `used` and `stamp` says whether it is (still) that of a lease. */
static inline hl__shm_lease *hl__shm_lease_at(hl__shm_space *space, uint32_t unit) {
  return unit % HL__SHM_LEASE_UNITS ? NULL : hl__shm_unit(space, unit, HL__SHM_LEASE_UNITS);
}
/* Texts in the table: cut to what there is room for, and always terminated once read. Other
   processes may write what this one reads; the reader compares note.turn. */
void hl__shm_text_set(hl__a64 *words, size_t count, const char *text, size_t size);
void hl__shm_text_get(char *text, const hl__a64 *words, size_t count);
/* How many chunks there are to look at; the first is number 1. */
uint32_t hl__shm_chunks(const hl__shm_space *space);
/* The next chunk of that kind and owner (HL__SHM_ANY: of any, or of none). 0: there is no other. */
#define HL__SHM_ANY UINT32_MAX
uint32_t hl__shm_chunk_next(const hl__shm_space *space, enum hl__shm_kind kind, uint32_t owner,
                            uint32_t chunk);
/* Goes on to the next unit of all such chunks; *at: 0 before the first. False: no other is left. */
static inline bool hl__shm_unit_next(const hl__shm_space *space, enum hl__shm_kind kind,
                                     uint32_t owner, uint32_t *at) {
  const uint32_t next = *at + hl__shm_units(kind);
  *at = *at && next % HL__SHM_PER_CHUNK
            ? next
            : hl__shm_chunk_next(space, kind, owner, *at / HL__SHM_PER_CHUNK) * HL__SHM_PER_CHUNK;
  return *at != 0;
}
/* Whose chunk the unit is in. */
static inline uint32_t hl__shm_owner_of(const hl__shm_space *space, uint32_t unit) {
  return atomic_load(&space->table->dir[unit / HL__SHM_PER_CHUNK]) & HL__SHM_UNOWNED;
}
/* A chunk for an owner: a free one of that kind, or a new one, for which there is space. 0: no
   space. */
uint32_t hl__shm_chunk_get(hl__shm_space *space, enum hl__shm_kind kind, uint32_t owner);

/* -------------------------------------------------------------- slot.c */

/* Takes a free slot for this process: space->me. HL_OK; HL_ESTORE: there is none. */
int hl__shm_slot_take(hl__shm_space *space, const char *host, hl_error *error);
/* Frees it, once no chunk is this process' any more; else says that it is dead, for a mender. */
void hl__shm_slot_leave(hl__shm_space *space, bool free);
/* Whether the process that has, or had, the slot is dead: it holds its byte no longer. False where
   this process' own descriptor was closed, so that it cannot know. A slot that does not exist is a
   dead one's, a free slot, too. */
bool hl__shm_is_dead(hl__shm_space *space, uint32_t slot);
/* A pid of a pid namespace, as this process counts them. 0: the namespace is another one, or not
   known for want of /proc. */
static inline pid_t hl__shm_pid(const hl__shm_space *space, uint64_t pid, uint64_t namespace) {
  return namespace != 0 && namespace == space->namespace ? (pid_t)pid : 0;
}
pid_t hl__shm_slot_pid(const hl__shm_space *space, const hl__shm_slot *slot);
/* Whether it is known that a slot's process is stopped: by a signal, or a debugger. */
bool hl__shm_is_stopped(const hl__shm_space *space, uint32_t slot);
/* "process 17 (stopped)", for messages. */
void hl__shm_slot_name(hl__shm_space *space, uint32_t slot, char *text, size_t size);

/* -------------------------------------------------------------- lock.c */

/* Takes a partition's lock after a first try has failed. HL_OK; HL_TIMEOUT: *error says which
   process is inside, and for how long; HL_CANCELLED: *cancelled (NULL: never) has become true;
   HL_ECONNECTION. */
int hl__shm_part_wait(hl__shm_space *space, uint32_t part, int64_t deadline,
                      const atomic_bool *cancelled, hl_error *error);
/* Has a HL_TIMEOUT name the process that has the lock, if that one is stopped: for a waiter, who
   may have been given the row but for that. */
void hl__shm_part_blame(hl__shm_space *space, uint32_t part, hl_error *error);
static inline bool hl__shm_part_try(hl__shm_space *space, uint32_t part) {
  uint32_t none = 0;
  return atomic_compare_exchange_strong_explicit(&space->table->part[part].lock, &none,
                                                 space->me + 1, memory_order_acquire,
                                                 memory_order_relaxed);
}
static inline int hl__shm_part_lock(hl__shm_space *space, uint32_t part, int64_t deadline,
                                    hl_error *error) {
  if (__builtin_expect(hl__shm_part_try(space, part), 1)) return HL_OK;
  return hl__shm_part_wait(space, part, deadline, NULL, error);
}
static inline void hl__shm_part_unlock(hl__shm_space *space, uint32_t part) {
  hl__a32 *lock = &space->table->part[part].lock;
  const uint32_t word = atomic_exchange_explicit(lock, 0, memory_order_release);
  if (__builtin_expect((word & HL__SHM_CONTENDED) != 0, 0)) hl__futex_wake(lock, 1);
}

/* --------------------------------------------------------- partition.c */

/* The functions here are for a thread that has the partition's lock, unless they say otherwise. */

/* Whom to wake once the lock is given up. */
typedef struct hl__shm_wakes {
  uint32_t n;
  hl__a32 *word[32];
} hl__shm_wakes;
void hl__shm_wakes_send(hl__shm_wakes *wakes);
/* Has the process of a node that waits, or did until now, look at it again. */
void hl__shm_waiter_wake(hl__shm_space *space, uint32_t index, hl__shm_wakes *wakes);

/* The row of that key, found or (make) made; *index: its number. NULL: there is none, or no space
   for one, or the file is damaged. */
hl__shm_row *hl__shm_row_find(hl__shm_space *space, uint64_t key, bool make, uint32_t *index);
/* The row of a node's claim; NULL: the file is damaged. */
hl__shm_row *hl__shm_row_of(hl__shm_space *space, const hl__shm_node *node);
/* Frees a row that is neither held nor awaited. */
void hl__shm_row_drop(hl__shm_space *space, hl__shm_row *row, uint32_t index);
/* Whether holders are in the way of a claim in that mode, made of that node. */
bool hl__shm_blocked(hl__shm_space *space, const hl__shm_row *row, const hl__shm_node *node,
                     unsigned mode);
void hl__shm_hold_link(hl__shm_space *space, hl__shm_row *row, uint32_t index, unsigned mode);
void hl__shm_queue_link(hl__shm_space *space, hl__shm_row *row, uint32_t index);
/* Takes out holders that were given back without the lock; grants what they kept out. */
void hl__shm_row_purge(hl__shm_space *space, hl__shm_row *row, hl__shm_wakes *wakes);
/* Grants the first ones of the queue that no holder is in the way of. */
void hl__shm_grant(hl__shm_space *space, hl__shm_row *row, hl__shm_wakes *wakes);
/* Frees a claim in whatever state, and grants what it kept out. */
void hl__shm_claim_end(hl__shm_space *space, uint32_t index, hl__shm_wakes *wakes);
/* The same for a thread that has no lock. HL_OK, HL_TIMEOUT, HL_ECONNECTION. */
int hl__shm_claim_clear(hl__shm_space *space, uint32_t index, int64_t deadline, hl_error *error);
/* Makes the partition anew from the claims. */
void hl__shm_rebuild(hl__shm_space *space, uint32_t part);

/* --------------------------------------------------------------- mend.c */

/* Cleans up after a slot whose process is dead, if no other thread or process does so now. A
   stopped process may hold it up until the deadline; the next call goes on. */
void hl__shm_mend(hl__shm_space *space, uint32_t slot, int64_t deadline);
/* Only breaks the locks of partitions that the dead process of a slot had, and makes their index
   anew. Never waits. A thread that mends another slot may call it, or what is in its way would be
   there for ever. */
void hl__shm_break(hl__shm_space *space, uint32_t slot);
/* The same for a caller that has the byte MEND + slot. */
void hl__shm_parts_break(hl__shm_space *space, uint32_t dead);
/* Makes the chunks of a slot free, unless a claim is left in them: then false. */
bool hl__shm_chunks_leave(hl__shm_space *space, uint32_t slot);
/* Looks for dead slots, and mends them, unless some process has just done so (force: always). */
void hl__shm_sweep(hl__shm_space *space, bool force, int64_t deadline);
/* The same for a caller whose answer depends on it: where another thread or process is mending, the
   caller waits for the end of that. */
void hl__shm_sweep_out(hl__shm_space *space, int64_t deadline);
/* Once after each boot, before any other process uses the table: nothing of before is alive, and a
   power failure may have torn what was written last. */
void hl__shm_reboot(hl__shm_space *space, const uint64_t boot[2]);

/* -------------------------------------------------------------- stock.c */

/* A free node of this process. 0: no space is left. */
uint32_t hl__shm_node_get(hl__shm_session *session);
void hl__shm_node_put(hl__shm_session *session, uint32_t node);
/* Gives back the session's free nodes. */
void hl__shm_cache_drop(hl__shm_session *session);
/* A free record of this process, used from now on. 0: no space is left. */
uint32_t hl__shm_record_get(hl__shm_space *space);
void hl__shm_record_put(hl__shm_space *space, uint32_t record);
/* The record of an agent, shared by its sessions, with a reference. NULL: no memory or space. */
hl__shm_agent *hl__shm_agent_get(hl__shm_space *space, uint64_t number);
void hl__shm_agent_put(hl__shm_space *space, hl__shm_agent *agent);
/* Notes a node that says GONE or LEFT, and may still be linked, as the lock was not to be had; does
   what was noted. */
void hl__shm_late_add(hl__shm_space *space, uint32_t node);
void hl__shm_late_do(hl__shm_space *space);
/* Makes this process' chunks free. False: something is late, and a mender does it. */
bool hl__shm_stock_leave(hl__shm_space *space);

/* -------------------------------------------------------------- watch.c */

/* HL_OK, HL_ENOMEM, HL_ESTORE: no descriptor. */
int hl__shm_watch_new(hl__shm_space *space, hl_error *error);
void hl__shm_watch_free(hl__shm_space *space);
/* From now on the session sleeps for session->waits, until it leaves: the thread wakes it if it is
   granted and was not told, or if the space is gone. False: no thread can be started. */
bool hl__shm_watch_enter(hl__shm_session *session);
void hl__shm_watch_leave(hl__shm_session *session);
/* Something is late. */
void hl__shm_watch_kick(hl__shm_space *space);
/* Whether something waits for the bell: then the thread watches. False: no thread can start. */
bool hl__shm_watch_bell(hl__shm_space *space, bool waits);

/* --------------------------------------------------------------- bell.c */

/* HL_OK, HL_ENOMEM. */
int hl__shm_bell_new(hl__shm_space *space, hl_error *error);
/* Ends the thread, once the space has no user any more. False: it is in `done` of a take, and ends
   the space (space->end) behind that. */
bool hl__shm_bell_stop(hl__shm_space *space);
void hl__shm_bell_free(hl__shm_space *space);
/* Hands the ear of a session to the thread, which calls ear->go soon. HL_OK; HL_BUSY: no thread can
   be started. */
int hl__shm_bell_enter(hl__shm_session *session, hl__shm_ear *ear, hl_error *error);
/* On the bell's thread: the session's take has ended, and `done` comes next. */
void hl__shm_bell_leave(hl__shm_session *session);
/* Has the session's ear called soon, if it has one. Any thread. */
void hl__shm_bell_call(hl__shm_session *session);

/* ------------------------------------------------------------- circle.c */

/* Whether a session that waits for the node stands in a circle of agents that block. It must have
   published its wait before. HL_OK; HL_DEADLOCK. */
int hl__shm_circle(hl__shm_space *space, uint32_t node, hl_error *error);

/* ---------------------------------------------------------------- map.c */

/* The lock on one byte of the file, for this process. False: another process has it. */
bool hl__shm_byte_lock(hl__shm_space *space, off_t at);
void hl__shm_byte_unlock(hl__shm_space *space, off_t at);
/* Whether no process has it. */
bool hl__shm_byte_free(hl__shm_space *space, off_t at);

#endif
