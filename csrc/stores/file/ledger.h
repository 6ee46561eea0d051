/*
 * ledger.h - the file `leases` of a lock directory: the records of its leases. ledger.c
 * keeps the file, record.c what is in it; leases.c says what a lease is made of it.
 *
 * The file is a header of one chunk, then chunks of records. It is made by whoever takes the
 * first lease in the directory, and mapped by all who use leases. It grows by chunks, and
 * never becomes smaller.
 *
 * One at a time. Whoever reads or changes it holds the ledger: a mutex within the process,
 * and the kernel's lock on the file's first byte between processes, which the kernel
 * frees when a process dies.
 *
 * Killed between any two writes. A lease is what its first record says, and that is valid
 * once its last word, `state`, is written; a lease of more rows than a record has room for
 * has its other records written before. All else (the chains by which a row's leases are
 * found, the list of free records, the counts in the control file) follows from the
 * records. Whoever changes it says so first: `changing`. Whoever finds that word set makes
 * all of it anew.
 *
 * Counts. The word `leases` of a stripe's signal counts the rows of leases in the stripe, by
 * mode. It is raised before a record is valid, and lowered after it has ceased to be; so it
 * may be too high, and is never too low. Who has locked a row, and finds it 0, knows that no
 * lease is on the row: whoever recorded one had locked the row himself before.
 *
 * What is read here was written by others. Each number is compared with what there is
 * before it is used; a chain or a list that leads nowhere, or in a circle, is made anew.
 */
#ifndef HIERLOCK_LEDGER_H
#define HIERLOCK_LEDGER_H

#include "file.h"

#define HL__FILE_LEDGER "leases"
#define HL__LEDGER_MAGIC "hlleas\n"
/* The second, from the first update row on: programs that know of none refuse it. */
#define HL__LEDGER_VERSION 1u
#define HL__LEDGER_VERSION_UPDATES 2u
#define HL__LEDGER_CHUNK 65536u
#define HL__LEDGER_ROWS 64u
/* A GiB of records. */
#define HL__LEDGER_MAX (1u << 19)
/* No record, or no row. */
#define HL__LEDGER_NONE UINT32_MAX

typedef struct hl__ledger_header {
  char magic[8];
  uint32_t version;
  uint32_t record_size;
  uint32_t stripes;
  _Atomic uint32_t changing; /* what follows from the records is not to be relied upon */
  _Atomic uint32_t records;  /* so many are made; the file may be longer */
  _Atomic uint32_t free;     /* the first free one */
  /* For each stripe and mode the first row of a lease: record * HL__LEDGER_ROWS + place.
     Who wants to share looks at the exclusive ones only, however many share. */
  _Atomic uint32_t heads[HL__FILE_STRIPES][2];
  /* In which boot all that follows from the records was made anew last. A power failure may
     have kept the one file newer than the other, with counts too low. */
  uint64_t boot[2];
} hl__ledger_header;

enum hl__ledger_state {
  HL__LEDGER_FREE,
  HL__LEDGER_LIVE,   /* a lease */
  HL__LEDGER_REST,   /* more rows of the lease `first` */
  HL__LEDGER_REVOKED /* what is left of one, for its holder to read */
};

typedef struct hl__ledger_row {
  uint32_t bucket;
  uint8_t level;
  uint8_t mode; /* hl_mode */
  uint16_t nothing;
  uint32_t next, previous; /* in its chain */
} hl__ledger_row;

/* Times: ms. Within one page, so that a file system writes it as a whole. */
typedef struct hl__ledger_record {
  _Alignas(64) _Atomic uint32_t state;
  uint32_t next;  /* the next free one; the next with more rows of the lease */
  uint32_t first; /* REST: whose rows they are */
  uint8_t mode;   /* hl_mode, of its targets */
  uint8_t nothing;
  uint16_t row_count; /* here */
  uint8_t id[16];     /* REST: too */
  uint8_t secret[16];
  uint8_t holder[16];
  /* When it ends. `end` is of the clock of boot time, and means something only in the boot
     with that id; after another boot it is `end_unix` that counts. */
  _Atomic uint64_t boot[2];
  _Atomic int64_t end;
  _Atomic int64_t end_unix;
  int64_t since_unix;
  uint64_t token;
  int64_t pid;
  char owner[HL_OWNER_MAX + 1];
  char application[64];
  char host[64];
  char label[128];
  char path[256];
  char by[64]; /* REVOKED */
  char reason[128];
  uint8_t room[64];
  hl__ledger_row rows[HL__LEDGER_ROWS];
} hl__ledger_record;

#define HL__LEDGER_CHUNK_RECORDS (HL__LEDGER_CHUNK / (uint32_t)sizeof(hl__ledger_record))

typedef struct hl__ledger {
  pthread_mutex_t mutex;
  hl__file_space *space;
  int fd HL__GUARDED_BY(hl__file_ledger_mutex); /* -1 until it is needed */
  ino_t inode HL__GUARDED_BY(hl__file_ledger_mutex);
  dev_t device HL__GUARDED_BY(hl__file_ledger_mutex);
  hl__ledger_header *header HL__GUARDED_BY(hl__file_ledger_mutex); /* the mapping */
  size_t size HL__GUARDED_BY(hl__file_ledger_mutex);               /* of it */
  uint32_t records HL__GUARDED_BY(hl__file_ledger_mutex);          /* in it, and made */
  uint64_t boot[2];                                                /* this one's id */
} hl__ledger;

HL__MUTEX_FUNCTIONS(hl__ledger_mutex, hl__ledger, mutex, hl__file_ledger_mutex)

hl__ledger *hl__ledger_new(hl__file_space *space); /* NULL: out of memory */
/* `ours`: the descriptors are. */
void hl__ledger_free(hl__ledger *ledger, bool ours);

/* Takes it; waits until the deadline for others to give it back, who have it for a moment.
   `make`: makes the file where there is none; else that is HL__ABSENT, and it is not taken.
   HL_OK; HL_TIMEOUT; HL_ECONNECTION: it was removed; HL_ESTORE, HL_ENOMEM. Whoever takes it
   does nothing that blocks until he gives it back. The space was found not to be gone. */
int hl__ledger_take(hl__ledger *ledger, bool make, int64_t deadline, hl_error *error)
    HL__ACQUIRES_IF_0(hl__file_ledger_mutex);
void hl__ledger_give(hl__ledger *ledger) HL__RELEASES(hl__file_ledger_mutex);
/* Before anybody relies on the counts: has them made anew after a reboot. Whoever has the
   ledger at that moment has done so. */
void hl__ledger_begin(hl__ledger *ledger);

/* Room for so many records. HL_OK, HL_ESTORE: there is no space. */
int hl__ledger_extend(hl__ledger *ledger, uint32_t records, hl_error *error)
    HL__REQUIRES(hl__file_ledger_mutex);
/* HL_ESTORE: it is not what it should be. */
int hl__ledger_strange_error(const hl__ledger *ledger, hl_error *error);

/* A record by its number; NULL when there is none. */
hl__ledger_record *hl__ledger_record_at(hl__ledger *ledger, uint32_t number)
    HL__REQUIRES(hl__file_ledger_mutex);
/* The rows of a stripe's chain, as numbers: the first one, the one behind; HL__LEDGER_NONE at
   the end. */
uint32_t hl__ledger_chain(hl__ledger *ledger, uint32_t stripe, hl_mode mode)
    HL__REQUIRES(hl__file_ledger_mutex);
uint32_t hl__ledger_chain_next(hl__ledger *ledger, uint32_t row)
    HL__REQUIRES(hl__file_ledger_mutex);
/* The row, and the number of the first record of its lease. NULL: it is none. */
const hl__ledger_row *hl__ledger_row_at(hl__ledger *ledger, uint32_t row, uint32_t *number)
    HL__REQUIRES(hl__file_ledger_mutex);
/* Makes anew what follows from the records. */
void hl__ledger_mend(hl__ledger *ledger) HL__REQUIRES(hl__file_ledger_mutex);

/* Enters a lease: `model`, which is copied, has all but state, next, first, rows. *number: its
   first record. HL_OK, HL_ESTORE (no space is left). */
int hl__ledger_add(hl__ledger *ledger, const hl__ledger_record *model, const hl_row *rows, size_t n,
                   uint32_t *number, hl_error *error) HL__REQUIRES(hl__file_ledger_mutex);
/* These rows of one, in locking order, are in another mode from now on, as is the lease. Wakes
   those who wait for them. */
void hl__ledger_convert(hl__ledger *ledger, uint32_t number, const hl_row *rows, size_t n,
                        hl_mode mode) HL__REQUIRES(hl__file_ledger_mutex);
/* Ends one; its first record becomes FREE or REVOKED. Wakes those who wait for its rows. */
void hl__ledger_remove(hl__ledger *ledger, uint32_t number, enum hl__ledger_state state)
    HL__REQUIRES(hl__file_ledger_mutex);
/* A REVOKED one has been read. */
void hl__ledger_forget(hl__ledger *ledger, uint32_t number) HL__REQUIRES(hl__file_ledger_mutex);

/* Milliseconds until it ends; 0 or less: its time is up. */
int64_t hl__ledger_left(const hl__ledger *ledger, const hl__ledger_record *record);
/* It ends so long after `now` (hl__boot_ms). */
void hl__ledger_until(const hl__ledger *ledger, hl__ledger_record *record, int64_t now,
                      int64_t ttl);

#endif
