/*
 * memcached_store.h - what the files of the Memcached store share.
 *
 * For efficiency, never for correctness. The dangers come first:
 *
 * - Memcached forgets. A restart, flush_all, or the eviction of one item, when memory is short,
 *   ends locks without a word. Others get them at once, and the holder hears of it at its next
 *   refresh or check, not before.
 * - Nothing is written to a disk or to a second server. There is no majority to ask.
 * - Its clock ticks once a second. A lease ends for others one to four seconds after its time. A
 *   server that was stopped for more than a second (SIGSTOP, a paused machine) counts from a clock
 *   that stands, until it ticks again: an item that is written before the tick may end too early.
 * - Several programs with different lists of servers would not exclude each other. Each server has
 *   a record of the list, and another list is refused (HL_EMISMATCH); but the record may be
 *   evicted, too.
 * - A server of the list that is down takes its share of the roots with it: HL_ECONNECTION. The
 *   roots never move to another server.
 * - Every client that reaches the port can read, end and forge every lock: there is no log-in here.
 *
 * There are no scripts and no steps on several keys. So each root has one item, the document: all
 * leases that are held or awaited in its tree, in the order in which they came. The document is
 * changed by compare-and-swap only. And each lease, held or awaited, has a liveness item: presence
 * = alive. The item is made before the document names it, and the item of a granted lease is never
 * made again. So a client that finds no item may strike the lease out of the document, by
 * compare-and-swap, and the lease never comes back from there. A release deletes the liveness item,
 * and leaves the document to the next client that writes it.
 *
 *     memcached.c   the store's operations: the life of a session
 *     dsn.c         a DSN, taken apart; which server has a root (libmemcached)
 *     wire.c        sending, answers, errors
 *     server.c      does this server exclude?
 *     connect.c     a connection to one server, made when it is first needed
 *     document.c    the document of a root
 *     record.c      the liveness item of a lease
 *     take.c        acquiring: stands in the document's queue; do earlier entries live?
 *     leases.c      the other operations on leases (hl_lease_ops)
 *
 * csrc/lua/memcached makes a Lua module of it.
 *
 * libmemcached distributes the roots over the servers (consistent hashing, ketama). We send the
 * bytes: libmemcached could neither send several commands at once, nor end a wait to the
 * millisecond, nor show its sockets to the code that must close them in a forked child.
 *
 * Source of the protocol: doc/protocol.txt of memcached 1.6.
 */
#ifndef HIERLOCK_MEMCACHED_STORE_H
#define HIERLOCK_MEMCACHED_STORE_H

#include "clock.h"
#include "error.h"
#include "fork.h"
#include "layout.h"
#include "record.h"
#include "socket.h"
#include "store.h"

#include <pthread.h>

#define HL__MEMCACHED_SERVERS_MAX 64
/* Roots are distributed in so many parts. */
#define HL__MEMCACHED_SLOTS 4096
/* For the answer of a server that has nothing else to do; ms. */
#define HL__MEMCACHED_ANSWER_MS 5000
/* Beyond that an expiry is a date for the server; s. */
#define HL__MEMCACHED_EXPIRY_MAX 2592000
#define HL__MEMCACHED_KEY_MAX 200
/* How much earlier than its expiry says an item may vanish; s. The server reads its clock once a
   second, in whole seconds, rounded down: its reading is up to two seconds old. (Its timer
   drifts, a little with each tick; so now and then two ticks fall into the first and the third
   of three seconds, and the clock jumps by two.) A third second, since a tick comes late where
   others want the processor. Source: clock_handler and realtime in memcached.c. */
#define HL__MEMCACHED_EARLY 3
/* A power of two: two bytes of an id choose a place among them. */
#define HL__MEMCACHED_GONE 1024

typedef struct hl__memcached_server {
  char host[256];
  unsigned port;
} hl__memcached_server;

HL__MUTEX_CLASS(hl__memcached_mutex) HL__AFTER(hl__connection_mutex) HL__BEFORE(hl__births);

typedef struct hl__memcached_session hl__memcached_session;

typedef struct hl__memcached_store {
  hl_store base;
  const hl_store_config *config;
  const char *prefix;
  int64_t connect_timeout; /* ms */
  hl__memcached_server servers[HL__MEMCACHED_SERVERS_MAX];
  unsigned server_count;
  char list[24];                      /* a digest of the servers' names, in any order */
  uint8_t slots[HL__MEMCACHED_SLOTS]; /* the server of each part */
  pthread_mutex_t mutex;
  /* Leases (id and holder) whose deletion was sent here of late: no session asks whether they
     live. The server need not have read the deletion yet: the holder no longer holds them. Each
     has the place that its id says, until another one's says the same. */
  uint8_t gone[HL__MEMCACHED_GONE][32] HL__GUARDED_BY(hl__memcached_mutex);
} hl__memcached_store;

HL__MUTEX_FUNCTIONS(hl__memcached_store, hl__memcached_store, mutex, hl__memcached_mutex)

/* Bytes that grow. */
typedef struct hl__memcached_buffer {
  char *data;
  size_t used, capacity;
  bool failed; /* out of memory */
} hl__memcached_buffer;

/* A connection to one server. */
typedef struct hl__memcached_link {
  int fd;          /* -1: not connected yet, or ended */
  uint64_t ticket; /* see hl__fork_watch */
  bool ended;
  unsigned outstanding; /* answers of one line that no caller awaits; they come first */
  hl__memcached_buffer in, out;
  size_t in_read, out_sent;
  const hl__memcached_server *server;
} hl__memcached_link;

struct hl__memcached_session {
  hl_session base;
  hl__memcached_store *store;
  hl__wakeup wakeup;
  bool interruptible; /* the present operation */
  uint32_t random;
  hl__memcached_link links[]; /* one for each server */
};

static inline hl__memcached_session *hl__memcached_session_of(hl_session *session) {
  return (hl__memcached_session *)(void *)session;
}

/* ---- dsn.c */

/* As hl_store_ops.parse. */
int hl__memcached_dsn(char *text, hl_dsn *dsn, hl_error *error);
/* Reads the DSN into the store, and distributes the roots. HL_OK, HL_EDSN, HL_ENOMEM. */
int hl__memcached_params(hl__memcached_store *store, hl_error *error);

/* ---- wire.c */

/* Closes, without waiting; it stays so. */
void hl__memcached_end(hl__memcached_link *link);
void hl__memcached_link_free(hl__memcached_link *link);
/* Ends the connection. HL_ECONNECTION, with the text of errno, or with why. */
int hl__memcached_broken(hl__memcached_link *link, hl_error *error);
int hl__memcached_ended(hl__memcached_link *link, const char *why, hl_error *error);
/* Waits until there is something to read, or room to write (POLLIN, POLLOUT). HL_OK, HL_TIMEOUT,
   HL_CANCELLED (interrupted, where the session is interruptible), HL_ECONNECTION. */
int hl__memcached_await(const hl__memcached_session *session, int fd, short events,
                        int64_t deadline);

/* Appends; the send reports want of memory. */
void hl__memcached_add(hl__memcached_buffer *buffer, const void *data, size_t size);
void hl__memcached_addf(hl__memcached_buffer *buffer, const char *format, ...) HL__PRINTF(2, 3);
/* A storage command with its data: `how` is "set", "add", or "cas" with the number of the item that
   it replaces; expiry in s, 0: never. */
void hl__memcached_put(hl__memcached_link *link, const char *how, const char *key, int64_t expiry,
                       const uint64_t *cas, const hl__memcached_buffer *value);
/* Sends what can be sent without blocking. HL_OK, HL_ECONNECTION. */
int hl__memcached_flush(hl__memcached_link *link, hl_error *error);
/* The next line of the answers, until the deadline; valid until the next call. An answer that is
   an error is one: HL_ESTORE. HL_ECONNECTION: the connection has ended, also as there was no
   answer, and it may have been done. */
int hl__memcached_line(hl__memcached_session *session, hl__memcached_link *link, int64_t deadline,
                       const char **line, hl_error *error);
/* An item, as gets (cas) and mg with t and v (left) tell. */
typedef struct hl__memcached_item {
  bool found;
  char *data; /* malloc'ed, with a NUL behind it; the caller frees it */
  size_t size;
  uint64_t cas;
  int64_t left; /* s; -1: for ever */
} hl__memcached_item;
int hl__memcached_gets(hl__memcached_session *session, hl__memcached_link *link, int64_t deadline,
                       hl__memcached_item *item, hl_error *error);
int hl__memcached_meta(hl__memcached_session *session, hl__memcached_link *link, int64_t deadline,
                       hl__memcached_item *item, hl_error *error);
/* The answer to `mg key`, without a value. */
int hl__memcached_presence(hl__memcached_session *session, hl__memcached_link *link,
                           int64_t deadline, bool *present, hl_error *error);
/* Reads the answers that no caller awaits. HL_OK, HL_TIMEOUT (they have not come),
   HL_ECONNECTION. */
int hl__memcached_settle(hl__memcached_session *session, int64_t deadline, hl_error *error);
/* Whether no connection has ended, without a round trip. */
bool hl__memcached_stands(hl__memcached_session *session);
/* Sleeps until then: HL_TIMEOUT; or until an interruptible session is interrupted: HL_CANCELLED. */
int hl__memcached_sleep(const hl__memcached_session *session, int64_t until);

/* ---- server.c */

/* Looks whether leases on this server exclude; the first settles the store's layout. HL_OK,
   HL_EUNSAFE_SERVER, HL_EMISMATCH, or what wire.c says. */
int hl__memcached_verify(hl__memcached_session *session, hl__memcached_link *link, int64_t deadline,
                         hl_error *error);
/* The token of a document that is not there. The first grant needs it, or the server has forgotten
   everything: it is beyond all earlier tokens, as long as there was at most one in each
   microsecond. It is the time in us: the seconds are the server's, and what is left is the
   client's, as the server may come back within a second. */
int hl__memcached_token(hl__memcached_session *session, hl__memcached_link *link, int64_t deadline,
                        uint64_t *token, hl_error *error);

/* ---- connect.c */

/* Finds the connection to that root's server; makes a missing one. HL_OK, HL_ECONNECTION, or
   what hl__memcached_verify says. */
int hl__memcached_link_of(hl__memcached_session *session, uint64_t root, int64_t deadline,
                          hl__memcached_link **link, hl_error *error);
int hl__memcached_connect(hl__memcached_session *session, hl__memcached_link *link,
                          int64_t deadline, hl_error *error);

/* ---- document.c */

typedef struct hl__memcached_entry {
  uint8_t id[16], holder[16];
  uint64_t token;
  uint64_t home; /* the root on whose server the liveness item is */
  bool granted;
  bool dead;       /* not to be written any more */
  size_t first, n; /* of the document's rows */
} hl__memcached_entry;

typedef struct hl__memcached_document {
  uint64_t root;
  bool found;
  uint64_t cas;
  uint64_t token;               /* the last one */
  hl__memcached_entry *entries; /* in the order in which they came */
  size_t n;
  hl_row *rows; /* of all entries */
  size_t row_count;
} hl__memcached_document;

void hl__memcached_document_dispose(hl__memcached_document *document);
/* Asks for it, and reads it. The caller disposes of the document after any outcome. HL_ESTORE:
   the item is no document. */
void hl__memcached_document_ask(const hl__memcached_session *session, hl__memcached_link *link,
                                uint64_t root);
int hl__memcached_document_read(hl__memcached_session *session, hl__memcached_link *link,
                                uint64_t root, int64_t deadline, hl__memcached_document *document,
                                hl_error *error);
/* Both, on the connection to its server: *link. */
int hl__memcached_document_get(hl__memcached_session *session, uint64_t root, int64_t deadline,
                               hl__memcached_link **link, hl__memcached_document *document,
                               hl_error *error);
/* Sends the document, without its dead entries; the server takes it unless another client has
   written it since. Then the answer is HL__AGAIN: hl__memcached_document_written. */
int hl__memcached_document_put(const hl__memcached_session *session, hl__memcached_link *link,
                               const hl__memcached_document *document, hl_error *error);
int hl__memcached_document_written(hl__memcached_session *session, hl__memcached_link *link,
                                   int64_t deadline, hl_error *error);
/* Both. */
int hl__memcached_document_write(hl__memcached_session *session, hl__memcached_link *link,
                                 int64_t deadline, const hl__memcached_document *document,
                                 hl_error *error);
/* Appends an entry of these rows. NULL: out of memory. */
hl__memcached_entry *hl__memcached_document_add(hl__memcached_document *document,
                                                const hl_lease_terms *terms, const hl_row *rows,
                                                size_t n, uint64_t home);
/* The entry of that lease; NULL: none. holder NULL: any. */
hl__memcached_entry *hl__memcached_document_find(const hl__memcached_document *document,
                                                 const uint8_t id[16], const uint8_t *holder);
bool hl__memcached_conflict(const hl__memcached_document *document,
                            const hl__memcached_entry *entry, const hl_row *rows, size_t n);
/* Whether it is for update, or was before its upgrade. */
bool hl__memcached_has_updates(const hl__memcached_document *document,
                               const hl__memcached_entry *entry);
/* Finds an entry's row of that level and bucket; NULL: it has none. */
hl_row *hl__memcached_row_of(const hl__memcached_document *document,
                             const hl__memcached_entry *entry, const hl_row *row);
/* Whether the entry's rows for update are exclusive, or about to be. */
bool hl__memcached_is_upgraded(const hl__memcached_document *document,
                               const hl__memcached_entry *entry);

/* ---- record.c */

/* The contents of a liveness item. */
typedef struct hl__memcached_record {
  uint64_t turn;
  uint8_t secret[16];
  hl_holder holder; /* all but what the document has */
} hl__memcached_record;

void hl__memcached_record_of(const hl__memcached_session *session, const hl_request *request,
                             hl__memcached_record *record);
void hl__memcached_record_write(const hl__memcached_record *record, hl__memcached_buffer *out);
/* False: it is no record. */
bool hl__memcached_record_read(const hl__memcached_item *item, hl__memcached_record *record);
/* Keys; each fits in HL__MEMCACHED_KEY_MAX. Returns out. */
const char *hl__memcached_live_key(const hl__memcached_session *session, const uint8_t id[16],
                                   const uint8_t holder[16], char *out);
const char *hl__memcached_id_key(const hl__memcached_session *session, const char *kind,
                                 const uint8_t id[16], char *out);
/* Seconds of expiry after which a lease of ttl ms is over for others: whole ones, rounded up, and
   as many more as the server's clock may be late. HL_OK, HL_EUNSUPPORTED: longer than the server
   takes. */
int hl__memcached_expiry(int64_t ttl, int64_t *seconds, hl_error *error);
/* Sends the deletion of a liveness item that will never be there again, and does not wait. */
int hl__memcached_live_delete(hl__memcached_session *session, hl__memcached_link *link,
                              const uint8_t id[16], const uint8_t holder[16], hl_error *error);
/* The two halves of it. The first appends the deletion to the next packet; after the second no
   session here asks whether the lease lives. */
void hl__memcached_live_delete_add(const hl__memcached_session *session, hl__memcached_link *link,
                                   const uint8_t id[16], const uint8_t holder[16]);
void hl__memcached_gone_note(const hl__memcached_session *session, const uint8_t id[16],
                             const uint8_t holder[16]);
/* Whether that was sent here, of late. */
bool hl__memcached_is_gone(const hl__memcached_session *session, const hl__memcached_entry *entry);

/* ---- take.c */

/* As hl_store_ops.take. */
int hl__memcached_take(hl_session *base, const hl_request *request, hl_grant *grant,
                       hl_error *error);
/* As hl_lease_ops.convert; HL_ELOST does not say why. */
int hl__memcached_convert(hl__memcached_session *session, const hl_request *request,
                          hl_grant *grant, hl_error *error);

/* ---- leases.c */

extern const hl_lease_ops hl__memcached_leases;
/* As hl_store_ops.holders. */
int hl__memcached_holders(hl_session *base, const hl_lease_filter *filter, hl_holder_fn fn,
                          void *context, int64_t deadline, hl_error *error);

#endif
