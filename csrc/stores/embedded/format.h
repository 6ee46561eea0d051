/*
 * format.h - the table of locks that all processes of a lock directory share: the file `control`
 * of the third format, as it lies in memory.
 *
 *     header         4 KiB
 *     parts          the locks of the partitions, and their free rows
 *     slots          one for each process that has the file open
 *     dir            what each chunk is, and whose
 *     heads          the hash chains of rows, by partition
 *     chunks         16 KiB each: 256 units of 64 bytes
 *
 * The truth is the claim words. For each row that a session holds or awaits there is one aligned
 * word of 64 bits, which says which row, in which mode, and whether it is held. A lock is held if,
 * and only if, its claim says HELD. A claim changes by one store. All else in a partition (chains,
 * rows, counts, lists of holders, queues) follows from the claims, and is made anew from them when
 * a process died inside (mend.c). So there is no half-done state that a reader must know of.
 *
 * Invariants:
 *
 *   1. Exclusion. Of two claims of one row that are HELD by different sessions the modes do not
 *      conflict. At every instruction of every process.
 *   2. A claim begins to count (FREE to HELD or WAIT, WAIT to HELD) only under the lock of its
 *      partition. Its key, its mode and its state are one word.
 *   3. A node's seq, own, session, note and flags are written while its claim is FREE, and stay
 *      while it is not.
 *   4. Only the process that owns a chunk of nodes takes nodes of it and makes claims of them. Slot
 *      0 is the leases': any process may set a node of it aside (RESERVED), by a CAS that names it.
 *   5. One process at a time mends a dead slot: it holds the byte MEND + slot. No process gets a
 *      slot before it is mended (`state` is 0).
 *   6. While no process has the lock of a partition, its index is what its claims say. verify.c, of
 *      the tests, checks that.
 *   7. A process that gives back takes the node out of its list, stores FREE, and only then grants
 *      what that claim kept out. So no list has a node that another process may set aside.
 *   8. A granted node has `wake` 1, or its process' bell is rung, before the lock is given up.
 *      Where the sender dies or stops before it has woken the waiter, the waiter's process finds
 *      the grant when it looks next.
 *   9. A chunk keeps its kind for ever. So what is read as a claim was never text.
 *  10. A lease is there while its `end` is not 0. Refresh, drop and expiry are CASes on that word,
 *      so that one of them is first. It and `used` say whose record it is (HL__STAMP_BITS), and
 *      `used` is read before `end`: so no process takes a later lease for the one it has seen.
 *  11. A record becomes another lease's only while its `busy` is 0, or was left by a dead process;
 *      `busy` counts only if `used` says, after it was set, that the record is still that lease's.
 *  12. Any number of processes may take the claims of a lease away that is over. Each frees a claim
 *      only with the lock, and only if it is HELD and its stamp is the lease's. The first goes
 *      along the chain, the others look at all nodes. One frees the record, by a CAS of what it
 *      saw.
 *
 * Who may write what, and when:
 *
 *     claim: FREE to HELD or WAIT      its owner, with the lock
 *     claim: WAIT to HELD              a process that gives back, or mends, with the lock, by CAS
 *     claim: WAIT to GONE, HELD to LEFT its owner, at any time, by CAS
 *     claim: GONE or LEFT to LOOSE     any process, with the lock
 *     claim: to FREE                   its owner, or the mender of its slot, with the lock
 *     rows, heads, links, free rows    any process, with the lock
 *     lock: 0 to slot + 1, and to 0    that process
 *     lock: of a dead slot to own      who holds MEND of that slot
 *     dir: FREE to owner, and back     the owner, or its mender, by CAS
 *     slot                             its process; bell, missed, turn, rung: any process, with
 *                                      the lock of the node's partition
 *     record: used, end                by CAS; the rest: who made it `used`
 *
 * Memory order, for processors that reorder, as ARM's. An atomic operation that names no order is
 * sequentially consistent. The others are one of these (the names are of litmus tests: Alglave,
 * Maranget and Tautschnig, "Herding Cats", 2014):
 *
 *     MP by the lock    Links, rows and a node's plain fields are read only with the lock, which is
 *                       taken with acquire and given up with release. A process reuses a node that
 *                       it has freed: it writes to it behind its own acquire, so behind the
 *                       release of each process that has read the fields of before.
 *     MP by the claim   HELD and FREE are stored with release. The CAS that grants comes behind
 *                       FREE: a thread that has read the new HELD reads no old one any more. It
 *                       has also acquired what the last holder did outside of the table.
 *     CoRR, CoWW        Tokens are drawn relaxed, by additions to one word. A later holder has
 *                       acquired what the earlier one released, so its addition is the later one.
 *     SB at a futex     The waiter stores WAIT, and the kernel compares `wake` before the thread
 *                       sleeps; the granter stores `wake` and calls the kernel. Both have the
 *                       kernel's full barrier (futex(2)).
 *     hints             limit, looked, gone, late_count, texts and what only counts: it does not
 *                       matter when they are seen, or they are read again with order.
 *
 * A process that is killed has executed a prefix of its instructions, and the kernel has its stores
 * seen before a mender can find its byte free.
 *
 * What is read here was written by others: each index is compared with what there is before it is
 * used (hl__shm_unit), and each list is followed for a bounded number of steps.
 *
 * Only fixed sizes, in the machine's byte order: programs of 32 and of 64 bits share the file.
 */
#ifndef HIERLOCK_EMBEDDED_FORMAT_H
#define HIERLOCK_EMBEDDED_FORMAT_H

#include "mode.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* That of the older formats, so that each program finds a version that it does not know, and
   refuses the other's directory. */
#define HL__SHM_MAGIC "hlctl\n\r"
#define HL__SHM_VERSION 3u
/* The same, but that all programs have ancestors' rows in modes of intentions. */
#define HL__SHM_INTENTIONS 4u
#define HL__SHM_FILE "control"

#define HL__SHM_PARTS 128u
#define HL__SHM_HEADS 2048u
#define HL__SHM_SLOTS 1024u /* 0: the leases'; the last: of a process that makes room (space.c) */
#define HL__SHM_CHUNK 16384u
#define HL__SHM_UNIT 64u
#define HL__SHM_PER_CHUNK (HL__SHM_CHUNK / HL__SHM_UNIT)
/* 512 MiB, which a program of 32 bits can map, too: some 700,000 locks of three rows. */
#define HL__SHM_CHUNKS 32768u

/* Bytes of the file that are locked (F_OFD_SETLK), not written: that slot's process lives; one
   process mends the slot; one process opens the file; it tries what becomes of a lock. */
#define HL__SHM_LIFE 0x40000000
#define HL__SHM_MEND 0x40010000
#define HL__SHM_INIT 0x40020000
#define HL__SHM_PROBE 0x40020001

typedef _Atomic uint32_t hl__a32;
typedef _Atomic uint64_t hl__a64;

/* --------------------------------------------------------------- claims */

/* bucket:32 | level:8 | mode:8 (mode.h) | state:16 */
enum hl__shm_state {
  HL__FREE,     /* the word is 0 */
  HL__WAIT,     /* in the queue of its row */
  HL__HELD,     /* it counts */
  HL__GONE,     /* was WAIT; its owner has given up; perhaps still in the queue */
  HL__LEFT,     /* was HELD; its owner has given up; perhaps still among the holders */
  HL__LOOSE,    /* was one of these, and another process has taken it out of its list */
  HL__RESERVED, /* of slot 0; the key is the slot of the process that has set it aside */
  HL__ROW = 15  /* of a row: so that no reader takes its key for a claim */
};

static inline uint64_t hl__shm_key(uint32_t bucket, uint8_t level) {
  return bucket | (uint64_t)level << 32;
}
static inline uint64_t hl__shm_claim(uint64_t key, unsigned mode, unsigned state) {
  return key | (uint64_t)mode << 40 | (uint64_t)state << 48;
}
static inline uint64_t hl__shm_key_of(uint64_t claim) { return claim & 0xFFFFFFFFFFu; }
static inline unsigned hl__shm_mode_of(uint64_t claim) { return (unsigned)(claim >> 40) & 7u; }
static inline unsigned hl__shm_state_of(uint64_t claim) { return (unsigned)(claim >> 48); }
/* The same claim in another state. */
static inline uint64_t hl__shm_claim_as(uint64_t claim, unsigned state) {
  return hl__shm_claim(hl__shm_key_of(claim), hl__shm_mode_of(claim), state);
}
/* Of a row that a request wants. */
static inline uint64_t hl__shm_row_key(const hl_row *row) {
  return hl__shm_key((uint32_t)row->bucket, row->level);
}

/* Part of the format: all processes must look for a row in one place. */
static inline uint32_t hl__shm_hash(uint64_t key) {
  uint32_t hash = (uint32_t)key + (uint32_t)(key >> 32) * 0x9E3779B9u;
  hash ^= hash >> 16;
  hash *= 0x85EBCA6Bu;
  hash ^= hash >> 13;
  hash *= 0xC2B2AE35u;
  return hash ^ hash >> 16;
}
static inline uint32_t hl__shm_part_of(uint32_t hash) { return hash % HL__SHM_PARTS; }
static inline uint32_t hl__shm_head_of(uint32_t hash) {
  return hash / HL__SHM_PARTS % HL__SHM_HEADS;
}
/* The partition of a claim, or of a key. */
static inline uint32_t hl__shm_claim_part(uint64_t claim) {
  return hl__shm_part_of(hl__shm_hash(hl__shm_key_of(claim)));
}

/* ---------------------------------------------------------------- units */

/* What a chunk has, for ever. */
enum hl__shm_kind {
  HL__NO_KIND,
  HL__ROWS,    /* the owner is a partition */
  HL__NODES,   /* the owner is a slot; 0: of leases */
  HL__RECORDS, /* of sessions; the owner is a slot */
  HL__LEASES   /* records of leases; the owner is slot 0 */
};
/* In dir: kind << 24 | owner. */
#define HL__SHM_UNOWNED 0xFFFFFFu

/* A row that is held or awaited. Written with the lock of its partition. */
typedef struct hl__shm_row {
  uint64_t key; /* a word that says HL__ROW */
  uint32_t next;
  uint32_t holders;     /* the first of the list */
  uint32_t first, last; /* of the queue */
  uint32_t count[8];    /* of holders, by mode */
  uint32_t room[2];
} hl__shm_row;

enum hl__shm_flag {
  HL__CONVERTS = 1, /* its session, or the lease that it exempts, holds the row: it queues first */
  HL__LEASED = 2,   /* of a lease: `session` is the lease's record, `own` its stamp */
  HL__EXEMPTS = 4,  /* the lease with the stamp `own` is not in its way */
  HL__RINGS = 8,    /* no thread sleeps for it: its process' bell tells that it is granted */
};

typedef struct hl__shm_node {
  hl__a64 claim;
  uint64_t seq; /* when it began to wait: the order of the queue */
  /* How many claims of the row its session holds itself, by mode, 8 bits each: they are not in its
     way. But see HL__LEASED, HL__EXEMPTS. */
  uint64_t own;
  uint32_t row;
  uint32_t next, prev; /* in the list of holders, or the queue */
  hl__a32 session;     /* the record */
  hl__a32 note;        /* the record that tells observers of its request */
  hl__a32 wake;        /* a futex: 1 once it is granted, or to look again */
  uint32_t flags;
  hl__a32 chain; /* of a lease: the next of its nodes; else in the list of free nodes */
  uint32_t room[2];
} hl__shm_node;

/* record.used of a lease: 0, or these with the slot that makes or unmakes it. */
#define HL__LEASE (1ull << 40)
#define HL__MAKES (1ull << 41)
#define HL__UNMAKES (1ull << 42)
#define HL__KEPT (1ull << 43) /* it is over, and has no claims: only for its holder to read */
/* A record is used again, and in the same way. So the last bits of a lease's stamp are in the words
   that others change by a CAS: above 44 bits of `used`, and below 44 bits of milliseconds of
   `end`. */
#define HL__STAMP_BITS 20
#define HL__STAMP_MASK ((1ull << HL__STAMP_BITS) - 1)
static inline uint64_t hl__shm_used_stamp(uint64_t stamp) { return stamp << (64 - HL__STAMP_BITS); }
static inline bool hl__shm_used_is(uint64_t used, uint64_t stamp) {
  return used >> (64 - HL__STAMP_BITS) == (stamp & HL__STAMP_MASK);
}
static inline uint64_t hl__shm_end_word(int64_t ms, uint64_t stamp) {
  const int64_t most = INT64_MAX >> HL__STAMP_BITS;
  return (uint64_t)(ms < 1      ? 1
                    : ms < most ? ms
                                : most)
             << HL__STAMP_BITS |
         (stamp & HL__STAMP_MASK);
}
static inline int64_t hl__shm_end_ms(uint64_t end) { return (int64_t)(end >> HL__STAMP_BITS); }

/* Words of text that one process writes and others read meanwhile: hl__shm_text_set, _get. */
#define HL__SHM_TEXT(bytes) ((bytes) / sizeof(uint64_t))

/* What observers see of a request. */
typedef struct hl__shm_note {
  hl__a32 turn;     /* odd while it is being written */
  hl__a32 mode;     /* hl_mode, of its targets */
  hl__a64 since_ms; /* Unix time; of the request */
  hl__a64 application[HL__SHM_TEXT(64)];
  hl__a64 label[HL__SHM_TEXT(128)];
  hl__a64 path[HL__SHM_TEXT(256)];
} hl__shm_note;

/* Of a session, of an agent, of a request; of a lease, with more behind it. */
typedef struct hl__shm_record {
  hl__a64 used;  /* of a lease: HL__LEASE ... */
  hl__a64 end;   /* of a lease: hl__shm_end_word; 0: it is over */
  hl__a64 stamp; /* of a lease: a number that no other has had */
  hl__a32 agent; /* the record of the session's agent, which may be itself */
  hl__a32 waits; /* of an agent: the node for which it blocks */
  hl__a32 slot;  /* whose process it is; of a lease, whose it was */
  /* Of a lease: its nodes, by `chain`. Of a request that waits: a record that has the rows that it
     wants, as claims, where texts are in others; note.mode is their number. */
  hl__a32 first;
  uint32_t next;  /* in its process' list of free records */
  hl__a32 number; /* of a session: for observers */
  hl__shm_note note;
} hl__shm_record;

/* Times: ms. */
typedef struct hl__shm_lease {
  hl__shm_record base;
  /* The rest is written by who makes it (HL__MAKES), later only with the lease's word `busy`. */
  hl__a64 end_unix; /* after a reboot `end` is made of it, and of this: */
  hl__a64 ttl;      /* the longest time for which it was given */
  hl__a64 token;
  hl__a64 pid; /* 32 bits; above it the inode of its namespace */
  /* 0; or slot + 1:16, the low 16 bits of that slot's generation, and a serial number:32, of the
     thread that changes what is below. No other lease gets the record meanwhile. */
  hl__a64 busy;
  hl__a64 id[2];
  hl__a64 secret[2];
  hl__a64 holder[2];
  hl__a64 turn; /* of its last refresh */
  /* 0; Unix ms: once it is over, its record stays, so that its holder may read by whom and why. */
  hl__a64 revoked;
  hl__a64 owner[HL__SHM_TEXT(HL_OWNER_MAX + 1)];
  hl__a64 host[HL__SHM_TEXT(64)];
  hl__a64 by[HL__SHM_TEXT(64)];
  hl__a64 reason[HL__SHM_TEXT(128)];
  hl__a64 heir[2]; /* its holder where `turn` is odd; else `holder` is */
} hl__shm_lease;

#define HL__SHM_WANTED HL__SHM_TEXT(64 + 128 + 256)
#define HL__SHM_RECORD_UNITS 8u
#define HL__SHM_LEASE_UNITS 16u
static inline uint32_t hl__shm_units(enum hl__shm_kind kind) {
  return kind == HL__LEASES ? HL__SHM_LEASE_UNITS : kind == HL__RECORDS ? HL__SHM_RECORD_UNITS : 1;
}

/* ------------------------------------------------------------- the file */

typedef struct hl__shm_part {
  _Alignas(64) hl__a32 lock; /* a futex: 0, or slot + 1; bit 31: a process sleeps on it */
  uint32_t free_row;
} hl__shm_part;
#define HL__SHM_CONTENDED 0x80000000u

/* Nodes that were granted since the bell's thread looked last. Only hints: the thread looks at the
   claim. A process that grants a node that RINGS writes it here, then rings the bell, and only then
   gives the lock up. If it dies before, the rebuilding rings once more. */
#define HL__SHM_RUNG 32u

typedef struct hl__shm_slot {
  _Alignas(64) hl__a32 state; /* 0: free; 1: a process has it, or had it and is not mended */
  hl__a32 generation;         /* how many processes have had it */
  hl__a64 pid;
  hl__a64 namespace; /* the inode of its pid namespace; 0: not known */
  hl__a64 host[HL__SHM_TEXT(64)];
  hl__a32 bell;   /* a futex: how often it was rung */
  hl__a32 asleep; /* the bell's thread sleeps, or is about to */
  hl__a32 missed; /* `rung` had no room: there are more */
  hl__a32 turn;   /* of `rung` */
  hl__a32 rung[HL__SHM_RUNG];
  hl__a64 rest[3];
} hl__shm_slot;

typedef struct hl__shm_header {
  char magic[8];
  uint32_t version;
  uint32_t parts, heads, slots, chunk, chunks;
  /* Of this file: in a copy they are another one's. Inode numbers of small file systems are the
     same by chance. */
  uint64_t inode;
  uint64_t born;   /* ns, Unix time; 0: the file system does not say */
  uint64_t device; /* 0: a boot may give it another number */
  /* Which tree the locks are of; names are padded with zeros. */
  uint32_t buckets, levels;
  char names[HL_LEVELS_MAX][HL_LEVEL_NAME_MAX + 1];
  hl__a64 boot[2];             /* the boot in which the file was opened last; 0: not known */
  _Alignas(64) hl__a64 tokens; /* the last one's counter, 56 bits */
  _Alignas(64) hl__a64 seq;    /* of waits, and stamps of leases */
  _Alignas(64) hl__a64 swept;  /* when the dead were looked for last; ns */
  hl__a32 top;                 /* so many chunks exist */
  hl__a32 slots_top;           /* no slot from here on was ever used */
  hl__a32 opened;              /* how often the file was opened */
} hl__shm_header;

typedef struct hl__shm_table {
  hl__shm_header header;
  _Alignas(4096) hl__shm_part part[HL__SHM_PARTS];
  hl__shm_slot slot[HL__SHM_SLOTS];
  hl__a32 dir[HL__SHM_CHUNKS];
  uint32_t head[HL__SHM_PARTS][HL__SHM_HEADS];
} hl__shm_table;

/* Where chunks begin. Chunk 0 is never used, so that no unit has the number 0. */
#define HL__SHM_FIXED ((sizeof(hl__shm_table) + HL__SHM_CHUNK - 1) / HL__SHM_CHUNK * HL__SHM_CHUNK)
#define HL__SHM_MAPPED (HL__SHM_FIXED + (size_t)HL__SHM_CHUNKS * HL__SHM_CHUNK)

_Static_assert(sizeof(hl__shm_row) == HL__SHM_UNIT, "a row is a unit");
_Static_assert(sizeof(hl__shm_node) == HL__SHM_UNIT, "a node is a unit");
_Static_assert(sizeof(hl__shm_record) <= HL__SHM_RECORD_UNITS * HL__SHM_UNIT, "record");
_Static_assert(sizeof(hl__shm_lease) <= HL__SHM_LEASE_UNITS * HL__SHM_UNIT, "format");
_Static_assert(sizeof(hl__shm_slot) == 256, "format");
_Static_assert(sizeof(hl__shm_header) <= 4096, "format");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "shared atomics must be lock-free");

#endif
