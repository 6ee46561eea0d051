/*
 * file.h - the inside of the embedded store. For the files of this room only.
 *
 *   space.c      one directory as this process uses it: the control file, the
 *                stripe files and their descriptors, and who shares them
 *   table.c      the rows that this process holds: taking one at once, giving
 *                it back
 *   queue.c      waiting for a row: the queue, going to sleep and being woken
 *   offset.h     which bytes of a stripe file stand for what
 *   board.c      telling others who holds what (board.h)
 *   holders.c    reading what others tell
 *   ledger.c     the file of the leases' records (ledger.h)
 *   record.c     the records in it
 *   leases.c     leases: looking for those in the way, and the operations on one
 *   file.c       sessions, and the hl_store_ops
 *
 * The lock directory itself and Symfony's lock files are in ../embedded.
 *
 * The kernel is the lock manager. A row is a byte of one of HL__FILE_STRIPES
 * empty files, locked with F_OFD_SETLK, so a process that dies, however it
 * dies, is unlocked by the kernel. Such locks belong to an open file, which all
 * threads of the process share. Therefore the process holds each row once, in
 * the strongest mode that any of its sessions needs, and its sessions settle
 * the rest among themselves in the table.
 *
 * The files in the directory, and what is in them:
 *
 *   control     mapped by everybody: format, layout, token counter, and for
 *               each stripe the words by which waiters are woken
 *   rows-NNNN   the stripes; never any data; two regions of offsets, see
 *               queue.c
 *   leases      the records of leases, mapped by those who use them
 *   who-...     one for each process: who holds what, for observers
 *   tmp-...     about to become one of the above
 *
 * Locks of this room, in the order in which they may be taken (they come after
 * those of the core, mutex.h):
 *
 *   1. a store's mutex    which space the store uses
 *   2. the registry       which spaces the process has (space.c)
 *   3. a stripe's mutex   its descriptor, entries and queues. Whoever holds
 *                         one may only *try* another one
 *   4. a session's guard  where the session sleeps (queue.c)
 *   5. the ledger's       its mapping, and who in this process has it (ledger.c)
 *   6. the board's mutex  its free records (board.c)
 *
 * Nothing blocks while one of them is held; F_OFD_SETLK returns at once.
 * See mutex.h for how that is written down for clang.
 */
#ifndef HIERLOCK_FILE_H
#define HIERLOCK_FILE_H

#include "clock.h"
#include "error.h"
#include "fork.h"
#include "mutex.h"
#include "record.h"
#include "store.h"

#include "../embedded/directory.h"
#include "../embedded/flock.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/types.h>

/* Part of the format of a directory: programs with another number of stripes
   would not meet, and are refused. The kernel walks the list of all locks of a
   file for each call: with ten thousand resources held, 30,000 rows, a cycle of
   lock and unlock took twice its usual time with 1,024 files, 1.6 times with
   2,048, 1.3 times with 4,096. Whoever holds less opens fewer. */
#define HL__FILE_STRIPES 4096u
/* Lists of entries in each stripe. */
#define HL__FILE_HEADS 16u

HL__MUTEX_CLASS(hl__file_store_mutex) HL__AFTER(hl__connection_mutex);
HL__MUTEX_CLASS(hl__file_registry) HL__AFTER(hl__file_store_mutex);
HL__MUTEX_CLASS(hl__file_stripe_mutex) HL__AFTER(hl__file_registry);
HL__MUTEX_CLASS(hl__file_guard) HL__AFTER(hl__file_stripe_mutex);
HL__MUTEX_CLASS(hl__file_ledger_mutex) HL__AFTER(hl__file_guard);
HL__MUTEX_CLASS(hl__file_board_mutex) HL__AFTER(hl__file_ledger_mutex) HL__BEFORE(hl__births);

/* What the names of files are, or begin with. */
#define HL__FILE_CONTROL "control"
#define HL__FILE_BOARD "who-"

/* -------------------------------------------------------------- space.c */

/* A stripe as all processes see it. One cache line. */
typedef struct hl__file_signal {
  _Alignas(64) _Atomic uint32_t events; /* futex; grows when it is worth a look */
  _Atomic uint32_t tickets;             /* the next place in a queue */
  _Atomic uint64_t waiters;             /* see queue.c */
  _Atomic uint64_t inode;               /* of rows-NNNN; 0 before it is first made */
  /* Rows of leases: those that share below, the exclusive ones above 32 bits. See
     ledger.h. */
  _Atomic uint64_t leases;
  _Atomic uint32_t lease_waiters; /* who wait for one to end, at least; see queue.c */
} hl__file_signal;

/* Which tree the locks are of; names are padded with zeros. */
typedef struct hl__file_layout {
  uint32_t buckets;
  uint32_t levels;
  char names[HL_LEVELS_MAX][HL_LEVEL_NAME_MAX + 1];
} hl__file_layout;

/* The control file. Only fixed sizes: 32-bit and 64-bit programs share it. */
typedef struct hl__file_control {
  char magic[8];
  uint32_t version;
  uint32_t stripes;
  hl__file_layout layout;
  _Alignas(64) _Atomic uint64_t tokens; /* the last one's counter, 56 bits */
  /* Of this file itself; 0: unknown, an earlier version made it. In a copy it is
     another file's. */
  uint64_t inode;
  _Atomic uint64_t ledger;      /* the inode of `leases`; 0 before it is first made */
  _Atomic uint32_t ledger_made; /* it has its header */
  hl__file_signal signals[HL__FILE_STRIPES];
} hl__file_control;

struct hl__file_waiter;

/* A row that sessions of this process hold or await.
   Invariants: exclusive implies shared == 0. The kernel's lock on the row is
   exclusive, shared or absent exactly as the holders here need it. An entry
   without holders and waiters is on the free list. */
typedef struct hl__file_entry {
  struct hl__file_entry *next; /* in its head's list, or the free list */
  uint32_t bucket;
  uint8_t level;
  /* One session holds it so; how many hold it so. */
  bool exclusive HL__GUARDED_BY(hl__file_stripe_mutex);
  uint32_t shared HL__GUARDED_BY(hl__file_stripe_mutex);
  /* The queue. */
  struct hl__file_waiter *first HL__GUARDED_BY(hl__file_stripe_mutex);
  struct hl__file_waiter *last HL__GUARDED_BY(hl__file_stripe_mutex);
} hl__file_entry;

/* A stripe as this process uses it. Entries and waiters are guarded as it is. */
typedef struct hl__file_stripe {
  _Alignas(64) pthread_mutex_t mutex;
  /* -1 while closed; open while entries > 0 */
  int fd HL__GUARDED_BY(hl__file_stripe_mutex);
  /* in use */
  uint32_t entries HL__GUARDED_BY(hl__file_stripe_mutex);
  /* places in queues that this process has */
  uint32_t tickets HL__GUARDED_BY(hl__file_stripe_mutex);
  /* used since the hand went by (space.c) */
  bool recent HL__GUARDED_BY(hl__file_stripe_mutex);
  hl__file_entry *free HL__GUARDED_BY(hl__file_stripe_mutex);
  hl__file_entry *heads[HL__FILE_HEADS] HL__GUARDED_BY(hl__file_stripe_mutex);
} hl__file_stripe;

HL__MUTEX_FUNCTIONS(hl__file_stripe, hl__file_stripe, mutex, hl__file_stripe_mutex)

struct hl__file_board;
struct hl__ledger;

/* Why a space cannot be used any more. */
enum hl__file_gone {
  HL__FILE_HERE,
  HL__FILE_CLOSED,  /* a stranger has closed its descriptors: their numbers may
                       be of other files, and are left alone */
  HL__FILE_CUT,     /* the control file was truncated: a touch of the mapping
                       would be a SIGBUS */
  HL__FILE_REMOVED, /* the control file has no name any more */
};

/* One directory as one process uses it; shared by its stores and sessions. */
typedef struct hl__file_space {
  struct hl__file_space *next HL__GUARDED_BY(hl__file_registry);
  atomic_uint references;       /* stores and sessions */
  unsigned generation;          /* of the process; constant */
  hl__file_directory directory; /* constant */
  int control_fd;               /* constant */
  ino_t control_inode;          /* constant */
  dev_t control_device;         /* constant */
  /* The mapping; constant. Touched soon after hl__file_space_gone has denied:
     that is how little time is left for somebody to cut the file. */
  hl__file_control *control;
  struct hl__file_board *board; /* constant */
  struct hl__ledger *ledger;    /* constant */
  atomic_int gone;              /* enum hl__file_gone; never HERE again */
  atomic_uint open_stripes;
  atomic_uint hand; /* which idle stripe to close next */
  hl__file_stripe stripes[HL__FILE_STRIPES];
} hl__file_space;

/* The space of a directory, made or shared, with a reference for the caller.
   HL_OK, HL_EMISMATCH, HL_EUNSAFE_SERVER, HL_ESTORE, HL_ENOMEM. */
/* *layout: a reference to what it and config->layout have agreed on. */
int hl__file_space_open(const char *path, const hl_store_config *config, hl_layout **layout,
                        hl__file_space **space, hl_error *error);
void hl__file_space_ref(hl__file_space *space);
void hl__file_space_unref(hl__file_space *space); /* NULL is fine */
/* Whether it cannot be used any more, as its locks keep nobody out or its mapping
   must not be touched. One fstat. */
bool hl__file_space_gone(hl__file_space *space);
/* Whether `control` (hl__file_path) still leads to the space. Whoever
   opens that path now would otherwise come to another space, and not be kept out
   by this one. One stat. */
bool hl__file_space_shown(const hl__file_space *space, const char *control);
/* HL_ECONNECTION, saying why. */
int hl__file_space_gone_error(const hl__file_space *space, hl_error *error);
/* Closes the file of a stripe that nobody needs now, where there is no descriptor left. False:
   there is none. No stripe's mutex is held. */
bool hl__file_stripe_spare(hl__file_space *space);
/* Opens a stripe's file. HL_OK, HL_ECONNECTION (removed), HL_ESTORE,
   HL_ENOMEM. */
int hl__file_stripe_open(hl__file_space *space, uint32_t index, hl_error *error)
    HL__REQUIRES(hl__file_stripe_mutex);

/* -------------------------------------------------------------- file.c */

/* A row that a session holds. */
typedef struct hl__file_holding {
  hl__file_entry *entry;
  uint32_t hash; /* hl__file_hash of the row */
  hl_row row;
  bool converted;  /* shared -> exclusive by the call under way */
  hl__flock flock; /* of a row of HL_LEVEL_NAMED, which has no entry */
} hl__file_holding;

/* A session's place in the queue of one row; it waits for one at a time. */
typedef struct hl__file_waiter {
  struct hl__file_waiter *next HL__GUARDED_BY(hl__file_stripe_mutex);
  struct hl__file_waiter *previous HL__GUARDED_BY(hl__file_stripe_mutex);
  hl_mode mode HL__GUARDED_BY(hl__file_stripe_mutex);
  /* It holds the row shared and wants it exclusively. */
  bool conversion HL__GUARDED_BY(hl__file_stripe_mutex);
  /* By another session's thread; it has left the queue. */
  bool granted HL__GUARDED_BY(hl__file_stripe_mutex);
  /* It has the place `ticket` in the kernel's queue. */
  bool ticketed HL__GUARDED_BY(hl__file_stripe_mutex);
  uint32_t ticket HL__GUARDED_BY(hl__file_stripe_mutex);
  _Atomic uint32_t wakes; /* private futex */
} hl__file_waiter;

struct hl__file_slot;

/* Of a request that waits: when it looks next whether it stands in a circle of waiters, and what it
   has seen; see circle.c. */
typedef struct hl__file_circle {
  uint64_t agent; /* 0: it does not look */
  int64_t next;   /* hl__now_ms */
  uint64_t seen;  /* the circle of the last look, as a number; 0: none */
} hl__file_circle;

typedef struct hl__file_session {
  hl_session base;
  uint64_t id;                /* for observers */
  hl__file_space *space;      /* a reference */
  char *control;              /* the name that must lead to the space; malloc'ed */
  bool stale;                 /* it does not, or the space is gone */
  hl__file_holding *holdings; /* the first `held`, in locking order */
  size_t held, capacity;
  struct hl__file_slot **slots; /* its records on the board */
  size_t slot_count, slot_capacity;
  size_t slots_used; /* the first ones tell of something */
  hl__file_waiter waiter;
  hl__file_circle circle;  /* of the request under way */
  atomic_bool interrupted; /* until the call under way ends, or settle */
  pthread_mutex_t guard;
  /* Which stripe's event it may sleep on. */
  hl__file_signal *asleep HL__GUARDED_BY(hl__file_guard);
} hl__file_session;

HL__MUTEX_FUNCTIONS(hl__file_guard, hl__file_session, guard, hl__file_guard)

/* The name of the session's program, for observers. */
const char *hl__file_session_application(const hl__file_session *session);
/* Makes tokens go on from that counter, or a greater one. Any thread. */
void hl__file_tokens_raise(hl__file_control *control, uint64_t least);

/* Whether its locks keep out whoever opens its path now. HL_OK, HL_ECONNECTION.
   An fstat and a stat. */
int hl__file_session_check(hl__file_session *session, hl_error *error);
/* What the session belongs to: host and process, for observers. */
const hl_store_config *hl__file_session_config(const hl__file_session *session);
/* At the beginning of a request; now and then while it waits, without a mutex. look: HL_OK;
   HL_DEADLOCK: it is the one of a circle that has to give way. (circle.c) */
void hl__file_circle_begin(hl__file_session *session, const hl_request *request);
int hl__file_circle_scan(hl__file_session *session, hl_error *error);
/* Gives back all that it holds, and wakes those who wait. */
void hl__file_session_clear(hl__file_session *session);

/* -------------------------------------------------------------- table.c */

uint32_t hl__file_hash(uint32_t level, uint64_t bucket);
static inline uint32_t hl__file_stripe_of(uint32_t hash) { return hash % HL__FILE_STRIPES; }

/* Takes a row at once, or not: HL_OK with want->entry set, HL_TIMEOUT (another session
   holds or awaits it), HL_ECONNECTION, HL_ESTORE, HL_ENOMEM. With `conversion`
   the session holds it shared, and the entry is given. With `crowded` it looks
   whether another process awaits the row. */
int hl__file_row_try(hl__file_session *session, hl__file_holding *want, bool conversion,
                     bool crowded, hl_error *error);
/* Like hl__file_row_try, but waits until the deadline; also HL_CANCELLED. */
int hl__file_row_wait(hl__file_session *session, hl__file_holding *want, bool conversion,
                      int64_t deadline, hl_error *error);
/* Gives a row back, or back to shared. Cannot fail. Those who wait for it are not
   told: hl__file_queue_wake. */
void hl__file_row_release(hl__file_space *space, const hl__file_holding *holding);
void hl__file_row_downgrade(hl__file_space *space, const hl__file_holding *holding);
/* Whether no session holds or awaits anything. */
bool hl__file_table_empty(hl__file_space *space);
void hl__file_table_free(hl__file_space *space);

/* For queue.c. */

/* Enters a session as a holder, taking or upgrading the kernel's lock if the
   process has not got it. HL_OK, HL_TIMEOUT (a holder, here or elsewhere, is in
   the way), HL_ESTORE. */
int hl__file_entry_grant(hl__file_stripe *stripe, hl__file_entry *entry, hl_mode mode,
                         bool conversion, hl_error *error) HL__REQUIRES(hl__file_stripe_mutex);

/* -------------------------------------------------------------- queue.c */

/* Waits in the entry's queue, giving up the stripe's mutex while asleep. HL_OK,
   HL_TIMEOUT, HL_CANCELLED, HL_ECONNECTION, HL_ESTORE. */
int hl__file_queue_wait(hl__file_session *session, const hl__file_holding *want, bool conversion,
                        int64_t deadline, hl_error *error) HL__REQUIRES(hl__file_stripe_mutex);
/* Whether anybody at all awaits any row of the stripe. */
bool hl__file_queue_crowded(hl__file_space *space, uint32_t hash);
/* Whether another process awaits the row. */
bool hl__file_queue_elsewhere(hl__file_space *space, uint32_t index, const hl__file_entry *entry)
    HL__REQUIRES(hl__file_stripe_mutex);
/* Lets those look again who wait for a row of this hash, in whatever process.
   To be called after something has been given back and the space was found not
   to be gone; no mutex need be held. */
void hl__file_queue_wake(hl__file_space *space, uint32_t hash);
/* From any thread: ends the session's wait. */
void hl__file_queue_interrupt(hl__file_session *session);

/* Those who wait for a lease to end, on a row that they have locked: they sleep on the
   stripe's word, too, and are counted by a word of their own. A sleep ends when the futex was
   woken after `seen` was returned, at `until` (hl__now_ms), after POLL_MS, or when the
   session is interrupted. */
void hl__file_futex_enter(hl__file_session *session, uint32_t hash);
uint32_t hl__file_futex_seen(const hl__file_session *session, uint32_t hash);
void hl__file_futex_sleep(const hl__file_session *session, uint32_t hash, uint32_t seen,
                          int64_t until);
void hl__file_futex_leave(hl__file_session *session, uint32_t hash);
/* A lease on such a row has ended. */
void hl__file_futex_wake(hl__file_space *space, uint32_t hash);

/* Where such a wait is none for a stripe: what is seen before the session looks whether it was
   interrupted, or may go on; and a sleep until `until` (hl__now_ms) that ends with that. */
uint32_t hl__file_nap_seen(const hl__file_session *session);
void hl__file_nap(hl__file_session *session, uint32_t seen, int64_t until);

/* -------------------------------------------------------------- leases.c */

extern const hl_lease_ops hl__file_leases;

/* Whether a lease may be in the way of a row that the session has locked. Whoever took the
   first lease of the directory had made the ledger before he recorded it. */
static inline bool hl__file_leased(const hl__file_space *space, uint32_t hash, hl_mode mode) {
  if (atomic_load(&space->control->ledger) == 0) return false;
  uint64_t rows = atomic_load(&space->control->signals[hl__file_stripe_of(hash)].leases);
  return (mode == HL_SHARED ? rows >> 32 : rows) != 0;
}

/* Waits until no lease is in the way of a row that the session has locked; deletes those whose time
   is up. HL_OK, HL_TIMEOUT, HL_CANCELLED, HL_ECONNECTION, HL_ESTORE; HL__BEHIND_UPDATE. */
int hl__file_lease_await(hl__file_session *session, const hl_request *request, const hl_row *row,
                         uint32_t hash, hl_error *error);
/* Records the lease of a request whose rows the session has locked. */
int hl__file_lease_write(hl__file_session *session, const hl_request *request, hl_grant *grant,
                         hl_error *error);
/* Calls fn for those that conflict with the rows. */
int hl__file_lease_holders(hl__file_session *session, const hl_lease_filter *filter,
                           hl_holder_fn fn, void *context, hl_error *error);

#endif
