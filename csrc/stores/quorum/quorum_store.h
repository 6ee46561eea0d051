/*
 * quorum_store.h - the inside of a quorum. A quorum has several stores, its members; each makes its
 * own grants. A lease is held when so many members have a record of it. Two majorities meet in a
 * member, and the member refuses the second holder.
 *
 *   quorum.c    opens and closes; the operations of a store
 *   leases.c    the operations on records
 *   convert.c   what a lease has in another mode
 *   take.c      acquires, and upgrades
 *   member.c    the threads of a member, which ask it, and heal leases
 *   presence.c  that all programs name the same members
 *   ask.c       a question to a member: given, answered, left
 *   known.c     what is known of a lease: which members have its record
 *
 * Each file uses only those below it. ask.c has a thread started by a function
 * that member.c gave it: store->thread_start.
 *
 * All members have a lease's id, secret and holder. A member is *in* a lease when it has said that
 * its record is there, while the holder believed in the lease. Only members in the lease count in a
 * refresh: a record that a member made late, or again, proves nothing of the time before. So all
 * the time of an unbroken lease a majority had its record. When a lease changes its mode
 * (convert.c), only members whose record is in the new mode stay in it.
 *
 * Mutexes: store->mutex guards everything that is not marked as constant or as a thread's. A thread
 * gives the mutex back while it asks a member.
 */
#ifndef HIERLOCK_QUORUM_STORE_H
#define HIERLOCK_QUORUM_STORE_H

#include "clock.h"
#include "error.h"
#include "mutex.h"
#include "store.h"

#include <stdbool.h>

#define HL__QUORUM_IDLE 8    /* sessions that a member keeps */
#define HL__QUORUM_CHAINS 64 /* of the leases that are known */
#define HL__QUORUM_MAX 15
/* A caller waits so long for a member: ms. */
#define HL__QUORUM_ANSWER_MS 1000

HL__MUTEX_CLASS(hl__quorum_mutex) HL__AFTER(hl__connection_mutex);

typedef struct hl__quorum_store hl__quorum_store;
typedef struct hl__quorum_member hl__quorum_member;
typedef struct hl__quorum_session hl__quorum_session;
typedef struct hl__quorum_ask hl__quorum_ask;

/* Rows, which do not change; shared, and counted. */
typedef struct hl__quorum_rows {
  unsigned references;
  hl_mode mode; /* of the targets */
  size_t n;
  hl_row rows[];
} hl__quorum_rows;

/* A lease at a member. */
typedef struct hl__quorum_part {
  bool in;           /* it has the record: see above */
  bool converted;    /* it is so since this upgrade began */
  bool old;          /* its record may be in an older mode */
  bool leftover;     /* the member may have an unwanted record, to be dropped */
  bool gone;         /* it has dropped the record since the lease was released */
  bool told;         /* it was sent a drop since then, and has not answered: a record that is
                    not there any more was dropped */
  bool spoiled;      /* a grant was recalled, or a drop not answered, which may still
                    be carried out: no other can be had by the same id */
  unsigned making;   /* takes that are not answered */
  unsigned dropping; /* drops that are not */
  unsigned converting;
  uint64_t place, token;
  int64_t sent_ms; /* of the last grant or refresh: hl__boot_ms */
  int64_t till;    /* and until when it has the record, by that; the same */
} hl__quorum_part;

typedef struct hl__quorum_lease {
  struct hl__quorum_lease *next; /* in the store's table */
  unsigned references;           /* the table's, each ask's, each caller's */
  bool held;                     /* granted, and not dropped: late grants are welcome until `end` */
  bool adopted;         /* by its text, which does not tell owner and label: so it is never made
                           anew where its record is gone */
  uint8_t replaced[16]; /* by an adopted one: the holder that a member named */
  bool left;            /* handed over as a text: its new holder heals it */
  bool dropped;         /* released, or lost */
  int64_t end;          /* until when it is believed to be held; hl__boot_ms */
  int64_t heal_at;      /* when members that are out of it are asked again; hl__now_ms */
  int64_t heal_pause;
  hl__quorum_part at[HL__QUORUM_MAX];
  hl__quorum_rows *shown; /* what it has; NULL: that is not known */
  /* Constant. */
  hl_lease_terms terms;
  char *label;
  size_t label_size;
  char path[256];
  char owner[HL_OWNER_MAX + 1];
} hl__quorum_lease;

typedef enum hl__quorum_kind {
  HL__ASK_OPEN, /* connects, and looks who is there */
  HL__ASK_JOIN, /* presence.c: is there from now on */
  HL__ASK_PART, /* is not any more, unless a later question needs the presence */
  HL__ASK_TAKE,
  HL__ASK_ADOPT,
  HL__ASK_REFRESH,
  HL__ASK_INSPECT,
  HL__ASK_DROP,
  HL__ASK_UPGRADE,
  HL__ASK_DOWNGRADE,
  HL__ASK_RAISE,
  HL__ASK_LIST,
  HL__ASK_REVOKE,
  HL__ASK_HOLDERS
} hl__quorum_kind;

/* A filter; the asks of one call share it. */
typedef struct hl__quorum_query {
  unsigned references;
  hl_lease_filter filter; /* into what follows */
  uint8_t id[16];
  char owner[HL_OWNER_MAX + 1];
  char by[128], reason[256];
  hl_row rows[];
} hl__quorum_query;

/* A question to one member. */
struct hl__quorum_ask {
  unsigned references;  /* who asked; the queue or the thread that runs it */
  hl__quorum_ask *next; /* in the queue */
  hl__quorum_member *member;
  hl__quorum_kind kind;
  hl__quorum_lease *lease;      /* or NULL */
  hl__quorum_query *query;      /* or NULL */
  bool again;                   /* it, or another drop, was sent before, and was not answered */
  hl__quorum_session *listener; /* the caller who waits for the answer; or NULL */
  enum { HL__ASK_QUEUED, HL__ASK_RUNS, HL__ASK_DONE } state;
  bool unwanted; /* a grant that comes is given back */
  bool interrupted;
  bool stray;          /* its caller has left it, and it goes on */
  bool sent;           /* the member may have it */
  bool bare;           /* it was granted, but the presence is refused by now: not wanted */
  bool awaited;        /* exit() waits for it, until hl__ask_end */
  hl_session *session; /* while it runs */
  int64_t begun;       /* hl__now_ms */
  /* Constant. */
  hl_lease_terms terms;
  int64_t ttl, deadline;
  uint64_t token;
  uint64_t number;        /* of the member, when it was given: see `needed` */
  hl__quorum_rows *rows;  /* to be locked, or to be converted; NULL: those shown */
  hl__quorum_rows *shown; /* what the record has then */
  bool try_once, gives_way;
  bool heals;    /* where the record is there still, it is adopted */
  bool old;      /* it is dropped instead: the thread's, too */
  bool leftover; /* the record that is there was to be dropped before */
  /* The thread's, until DONE. */
  int status;
  hl_error error;
  hl_grant grant;
  int64_t sent_ms, left_ms;
  uint64_t count;
  hl_holder *found;
  size_t found_n, found_room;
};

struct hl__quorum_member {
  /* Constant. */
  hl__quorum_store *store;
  unsigned number; /* from 0 on */
  hl_dsn dsn;
  const hl_store_ops *ops;
  hl_store_config config;
  char name[128]; /* for people; nothing that may be secret */
  char hash[8];   /* of its name: presence.c */
  /* Guarded by the store's mutex. */
  hl_store *inner; /* NULL until it was opened; then constant */
  bool opens;
  int refusal; /* why it was not opened, unless it was only not reached; or HL_OK */
  hl_error reason;
  pthread_cond_t work, opened;
  hl__quorum_ask *first, *last; /* the queue */
  unsigned queued, threads, idle_threads, strays;
  hl_session *idle[HL__QUORUM_IDLE];
  unsigned idle_count;
  bool suspect;            /* has left a question without an answer */
  bool silent;             /* the last try to heal a lease there has failed */
  int64_t probe_at;        /* until then no lease is healed there while it is one of
                       these; hl__now_ms */
  int64_t heard;           /* when it answered last: hl__now_ms */
  hl_lease_terms presence; /* turn is 0: there is none */
  int64_t present_till;    /* so long it stands; hl__boot_ms; 0: not */
  bool joins;              /* a thread looks, or writes it */
  uint64_t needed;         /* so many questions were given that need it */
};

struct hl__quorum_store {
  hl_store base;
  /* Constant. */
  unsigned n, need;
  bool all; /* the strategy */
  hl_layout *wanted;
  char application[64], host[64];
  void (*wait_begin)(void);
  void (*wait_end)(void);
  bool (*thread_start)(hl__quorum_member *member); /* hl__member_start */
  hl__quorum_member members[HL__QUORUM_MAX];
  pthread_mutex_t mutex;
  /* Guarded by it. */
  unsigned references; /* the core's, each thread's */
  bool closing, awaited;
  unsigned sessions;
  hl__quorum_lease *leases[HL__QUORUM_CHAINS];
  int64_t swept;                           /* hl__now_ms */
  int64_t heal_at;                         /* the first of its leases'; HL_FOREVER: none */
  char list[HL_OWNER_MAX + 1], shown[256]; /* the list: presence.c; for people */
  int64_t longest;                         /* ttl that was asked for */
  hl_error stopped;                        /* status: HL_EMISMATCH, for ever; or HL_OK */
};

/* A caller. Between its calls it holds nothing. */
struct hl__quorum_session {
  hl_session base;
  pthread_cond_t answered;
  bool interrupted;
  /* An unconfirmed release: see settle. */
  hl__quorum_lease *dropped; /* or NULL */
  int64_t told;              /* when; hl__now_ms */
  hl__quorum_ask *drops[HL__QUORUM_MAX];
};

static inline hl__quorum_store *hl__quorum_store_of(hl_session *session) {
  return (hl__quorum_store *)(void *)session->store;
}

HL__MUTEX_FUNCTIONS(hl__quorum_mutex, hl__quorum_store, mutex, hl__quorum_mutex)

/* ---- ask.c; with the mutex, unless it says otherwise */

/* A new question; `lease` and `query` may be NULL. With a reference for the
   caller. NULL: no memory. */
hl__quorum_ask *hl__ask_new(hl__quorum_member *member, hl__quorum_kind kind,
                            hl__quorum_lease *lease, hl__quorum_query *query,
                            hl__quorum_session *listener) HL__REQUIRES(hl__quorum_mutex);
/* Asks for these rows instead of the lease's, once; NULL: does not change them. */
void hl__ask_rows(hl__quorum_ask *ask, hl__quorum_rows *rows, hl__quorum_rows *shown)
    HL__REQUIRES(hl__quorum_mutex);
/* Asks it. */
void hl__ask_give(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex);
/* The caller listens no more, and gives his reference back. unwanted: the member is to stop; a
   thread gives its grant back. */
void hl__ask_leave(hl__quorum_ask *ask, bool unwanted) HL__REQUIRES(hl__quorum_mutex);
/* Leaves the question at that place, if there is one, and empties the place. */
void hl__ask_clear(hl__quorum_ask **place, bool unwanted) HL__REQUIRES(hl__quorum_mutex);
/* Leaves the questions to all members. */
void hl__asks_leave(hl__quorum_ask *asks[HL__QUORUM_MAX], bool unwanted)
    HL__REQUIRES(hl__quorum_mutex);
/* Whether the question is not answered yet; whether the answer is HL_OK. NULL: neither. */
static inline bool hl__ask_is_open(const hl__quorum_ask *ask) {
  return ask && ask->state != HL__ASK_DONE;
}
static inline bool hl__ask_is_ok(const hl__quorum_ask *ask) {
  return ask && ask->state == HL__ASK_DONE && ask->status == HL_OK;
}
/* An hl_holder_fn: keeps it in the ask. */
void hl__ask_found(void *ask, const hl_holder *holder);
/* Has the member drop a lease, and does not wait. */
void hl__ask_drop(hl__quorum_member *member, hl__quorum_lease *lease)
    HL__REQUIRES(hl__quorum_mutex);
/* The lease was released, or is lost: what was to make it leaves the queue. */
void hl__ask_takes_end(hl__quorum_member *member, const hl__quorum_lease *lease)
    HL__REQUIRES(hl__quorum_mutex);
/* The members whose questions are open have not answered in time. */
void hl__silent_suspect(hl__quorum_store *store, hl__quorum_ask *const *asks)
    HL__REQUIRES(hl__quorum_mutex);
/* Waits, without the mutex, for an answer, an interruption, or the time. */
void hl__quorum_wait(hl__quorum_session *session, int64_t until) HL__REQUIRES(hl__quorum_mutex);
/* For the thread that asks: the first in the queue, which runs from now on, with the queue's
   reference; NULL: the queue is empty. */
hl__quorum_ask *hl__ask_next(hl__quorum_member *member) HL__REQUIRES(hl__quorum_mutex);
void hl__ask_unref(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex);
/* The thread has the answer, and has cleaned up. */
void hl__ask_done(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex);
/* Nothing of the question is left to do. */
void hl__ask_end(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex);
/* Whether the question makes a record. */
bool hl__ask_makes(const hl__quorum_ask *ask);
/* Whether the question may grant or prolong something: it needs the presence. */
bool hl__ask_grants(const hl__quorum_ask *ask);
/* Whether the question changes the mode of a record. */
bool hl__ask_converts(const hl__quorum_ask *ask);
/* Keeps a grant without a listener. False: the thread has to give it back. */
bool hl__ask_keep(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex);
/* The member has changed the mode, and no caller listens. */
void hl__ask_convert_late(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex);
/* Says what members have answered, but for HL_OK: "2 of 3 stores ...: file:/a: ...". `what` is
   "could not be asked", say. */
int hl__quorum_error(const hl__quorum_store *store, int status, hl__quorum_ask *const *asks,
                     const char *what, hl_error *error) HL__REQUIRES(hl__quorum_mutex);
/* The status of a failed call: the last member's whose failure will not pass, else
   HL_ECONNECTION. */
int hl__quorum_failure(const hl__quorum_store *store, hl__quorum_ask *const *asks)
    HL__REQUIRES(hl__quorum_mutex);

/* The lease is lost: has all members drop their records. */
void hl__quorum_abandon(hl__quorum_store *store, hl__quorum_lease *lease)
    HL__REQUIRES(hl__quorum_mutex);
/* A member has said that it was revoked. */
bool hl__quorum_is_revoked(const hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex);

/* ---- member.c; with the mutex, unless it says otherwise */

/* Starts a thread of the member. False: the member has enough, or the system has none. */
bool hl__member_start(hl__quorum_member *member) HL__REQUIRES(hl__quorum_mutex);
/* Has the members that are out of the lease take it, and does not wait. Threads ask again, after
   pauses that grow, until all members are in it, or it ends. */
void hl__quorum_heal(hl__quorum_store *store, hl__quorum_lease *lease)
    HL__REQUIRES(hl__quorum_mutex);
/* Without the mutex. Frees the store with the last reference. */
void hl__quorum_unref(hl__quorum_store *store);

/* ---- known.c; with the mutex */

/* Finds the lease, with a reference; or NULL. */
hl__quorum_lease *hl__known_find(hl__quorum_store *store, const hl_lease_terms *terms)
    HL__REQUIRES(hl__quorum_mutex);
/* The same; makes an entry if there is none. request: NULL if the caller does not know the rows.
   NULL: no memory. */
hl__quorum_lease *hl__known_make(hl__quorum_store *store, const hl_lease_terms *terms,
                                 const hl_request *request) HL__REQUIRES(hl__quorum_mutex);
void hl__known_unref(hl__quorum_lease *lease) HL__REQUIRES(hl__quorum_mutex);
/* With a reference for the caller. NULL: no memory. */
hl__quorum_rows *hl__rows_new(const hl_row *rows, size_t n, hl_mode mode);
/* The same, each shared. */
hl__quorum_rows *hl__rows_shared(const hl_row *rows, size_t n);
/* Whether they are in the same modes; they are of the same lease. */
bool hl__rows_match(const hl__quorum_rows *a, const hl__quorum_rows *b);
void hl__rows_unref(hl__quorum_rows *rows) HL__REQUIRES(hl__quorum_mutex);
/* Has those rows from now on, and the reference. */
void hl__known_show(hl__quorum_lease *lease, hl__quorum_rows *shown) HL__REQUIRES(hl__quorum_mutex);
/* Whether a question that makes or ends a record there is not answered yet. */
bool hl__known_is_busy(const hl__quorum_part *part) HL__REQUIRES(hl__quorum_mutex);
/* Whether a lease may be held that was not released. */
bool hl__known_goes_on(const hl__quorum_store *store) HL__REQUIRES(hl__quorum_mutex);
/* The member has the record for ttl ms from sent_ms on. */
void hl__known_sent(hl__quorum_part *part, int64_t sent_ms, int64_t ttl)
    HL__REQUIRES(hl__quorum_mutex);
/* The member has granted it, for ttl ms from grant->sent_ms on. */
void hl__known_granted(hl__quorum_part *part, const hl_grant *grant, int64_t ttl)
    HL__REQUIRES(hl__quorum_mutex);
/* The member's record may be in an older mode. The record does not count, as long as a quorum is
   left without it. Healing makes it anew. */
void hl__known_old(const hl__quorum_store *store, hl__quorum_lease *lease, unsigned i)
    HL__REQUIRES(hl__quorum_mutex);
/* Takes the lease out of the table. */
void hl__known_forget(hl__quorum_store *store, hl__quorum_lease *lease)
    HL__REQUIRES(hl__quorum_mutex);
/* The nth greatest of n numbers, which it sorts; 0: there are fewer. */
int64_t hl__nth_greatest(int64_t *numbers, unsigned n, unsigned nth);
/* How many members are in the lease. */
unsigned hl__known_in(const hl__quorum_store *store, const hl__quorum_lease *lease)
    HL__REQUIRES(hl__quorum_mutex);
/* From when on a quorum of the members in the lease counts: when the `need`-th newest record was
   asked for, less the difference of clocks in ttl ms. */
int64_t hl__known_since(const hl__quorum_store *store, const hl__quorum_lease *lease, int64_t ttl)
    HL__REQUIRES(hl__quorum_mutex);
/* Until when a quorum of the members in the lease has it; hl__boot_ms. If one has left it, that may
   be sooner than its holder believes. From now on the lease is believed, and healed, for no longer.
   0: that is not known. */
int64_t hl__known_until(const hl__quorum_store *store, hl__quorum_lease *lease)
    HL__REQUIRES(hl__quorum_mutex);
/* ---- presence.c; with the mutex, which is given back while a member is asked */

/* The presences of all processes at a member. */
extern const hl_lease_filter hl__presences;
/* The list as this program names it. */
void hl__presence_init(hl__quorum_store *store) HL__REQUIRES(hl__quorum_mutex);
/* By what asks to OPEN have found: the list of those who came before, should they have as many
   members. */
void hl__presence_adopt(hl__quorum_store *store, hl__quorum_ask *const *asks)
    HL__REQUIRES(hl__quorum_mutex);
/* HL_OK; HL_EMISMATCH: another list was found, and nothing is granted any more. */
int hl__quorum_stopped(const hl__quorum_store *store, hl_error *error)
    HL__REQUIRES(hl__quorum_mutex);
/* Before the ask is sent on that session: where it may grant or prolong something, the presence is
   there, for at least as long. HL_OK; HL_EMISMATCH; or why it could not be made. */
int hl__presence_keep(hl__quorum_ask *ask, hl_session *session, bool used)
    HL__REQUIRES(hl__quorum_mutex);
bool hl__presence_stands(const hl__quorum_member *member) HL__REQUIRES(hl__quorum_mutex);
/* After the answer to such an ask: whether the thread has to renew the presence now. */
bool hl__presence_is_due(const hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex);
int hl__presence_renew(hl__quorum_ask *ask, hl_session *session) HL__REQUIRES(hl__quorum_mutex);

/* ---- take.c, convert.c, leases.c; without the mutex, unless they say otherwise */

/* The session leaves its drops, which go on. With the mutex. */
void hl__quorum_drops_leave(hl__quorum_session *session) HL__REQUIRES(hl__quorum_mutex);

int hl__quorum_take(hl_session *session, const hl_request *request, hl_grant *grant,
                    hl_error *error);
/* hl_lease_ops.convert; the first one to exclusive rows only */
int hl__quorum_upgrade(hl_session *session, const hl_request *request, hl_grant *grant,
                       hl_error *error);
int hl__quorum_convert(hl_session *session, const hl_request *request, hl_grant *grant,
                       hl_error *error);
int hl__quorum_holders(hl_session *session, const hl_lease_filter *filter, hl_holder_fn fn,
                       void *context, int64_t deadline, hl_error *error);
extern const hl_lease_ops hl__quorum_leases;

#endif
