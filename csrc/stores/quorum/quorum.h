/*
 * quorum.h - the inside of a quorum: several stores, its members, each of which
 * makes its own grants; a lease is held when so many of them have a record of
 * it. Two majorities meet in a member, which refuses the second.
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
 * Each member has the same id, secret and holder. A member is *in* a lease when
 * it has said, while the lease was believed to be held, that its record is
 * there. Only those count in a refresh. So a record that was made late, or
 * again, proves nothing of the time before: at each moment of a lease that is
 * unbroken a majority had its record all the time. What a lease has can come to
 * be in another mode (convert.c): then only those are in it whose record is in
 * that mode.
 *
 * Mutexes: store->mutex guards everything but what is said to be constant, or a
 * thread's. It is not held while a member is asked.
 */
#ifndef HIERLOCK_QUORUM_H
#define HIERLOCK_QUORUM_H

#include "clock.h"
#include "error.h"
#include "mutex.h"
#include "store.h"

#include <stdbool.h>

#define HL__QUORUM_IDLE 8    /* sessions that a member keeps */
#define HL__QUORUM_CHAINS 64 /* of the leases that are known */
#define HL__QUORUM_MAX 15
/* A member that has not answered for so long is left behind: ms. */
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

/* What is known of a lease at a member. */
typedef struct hl__quorum_part {
  bool in;           /* it has the record: see above */
  bool converted;    /* it has said so since the upgrade that is under way began */
  bool old;          /* what is left over there may be in a mode of before */
  bool leftover;     /* it may have one that nobody wants: to be dropped */
  bool gone;         /* it has said that it dropped it, since the lease is dropped */
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
  bool adopted;    /* by its text, which does not tell owner and label: so it is never made
                   anew where its record is gone */
  bool left;       /* handed over as a text: its new holder heals it */
  bool dropped;    /* nobody wants it any more */
  int64_t end;     /* until when it is believed to be held; hl__boot_ms */
  int64_t heal_at; /* when members that are out of it are asked again; hl__now_ms */
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
  HL__ASK_PART, /* is not any more */
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

/* Which leases; shared by the asks of one call. */
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
  bool again;                   /* it was sent before, and was not answered */
  hl__quorum_session *listener; /* who waits for the answer; NULL: nobody does */
  enum {
    HL__ASK_QUEUED,
    HL__ASK_RUNS,
    HL__ASK_DONE
  } state;
  bool unwanted; /* a grant that comes is given back */
  bool interrupted;
  bool stray;          /* nobody waits for it any more, and it goes on */
  bool sent;           /* the member may have it */
  hl_session *session; /* while it runs */
  int64_t begun;       /* hl__now_ms */
  /* Constant. */
  hl_lease_terms terms;
  int64_t ttl, deadline;
  uint64_t token;
  hl__quorum_rows *rows;  /* to be locked, or to be converted; NULL: those shown */
  hl__quorum_rows *shown; /* what the record has then */
  bool try_once, gives_way;
  bool heals; /* where the record is there still, it is adopted */
  bool old;   /* it is dropped instead: the thread's, too */
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
  int refusal; /* why it will not be opened: HL_OK, or a status that stays */
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

/* A caller; nothing is held between its calls. */
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
/* Those rows, instead of what the lease has; either may be NULL: the same. */
void hl__ask_rows(hl__quorum_ask *ask, hl__quorum_rows *rows, hl__quorum_rows *shown)
    HL__REQUIRES(hl__quorum_mutex);
/* Asks it. */
void hl__ask_give(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex);
/* The caller listens no more, and gives his reference back. unwanted: the
   member is to stop, and what it has granted, or will grant, goes. */
void hl__ask_leave(hl__quorum_ask *ask, bool unwanted) HL__REQUIRES(hl__quorum_mutex);
/* An hl_holder_fn: keeps it in the ask. */
void hl__ask_found(void *ask, const hl_holder *holder);
/* Nobody waits for the answer; drops a lease there. */
void hl__ask_drop(hl__quorum_member *member, hl__quorum_lease *lease)
    HL__REQUIRES(hl__quorum_mutex);
/* It has not answered in time. */
void hl__member_suspect(hl__quorum_member *member) HL__REQUIRES(hl__quorum_mutex);
/* Waits, without the mutex, until something was answered, or interrupted, or
 * the time. */
void hl__quorum_wait(hl__quorum_session *session, int64_t until) HL__REQUIRES(hl__quorum_mutex);
/* For the thread that asks: the first in the queue, which runs from now on, with the queue's
   reference; NULL: there is none. */
hl__quorum_ask *hl__ask_next(hl__quorum_member *member) HL__REQUIRES(hl__quorum_mutex);
void hl__ask_unref(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex);
/* It is answered; its thread has nothing to clean up. */
void hl__ask_done(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex);
/* After it there may be a record of this holder. */
bool hl__ask_makes(const hl__quorum_ask *ask);
/* It puts the record into another mode. */
bool hl__ask_converts(const hl__quorum_ask *ask);
/* The grant of one that nobody waits for. False: it has to be given back. */
bool hl__ask_keep(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex);
/* It has been carried out, and nobody listens any more. */
void hl__ask_convert_late(hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex);
/* Says what the asks have been answered: "2 of 3 stores ...: file:/a: ...".
   `what`: "could not be asked". Those with HL_OK, or of another status than
   `only` (0: any), are left out. */
int hl__quorum_error(const hl__quorum_store *store, int status, hl__quorum_ask *const *asks,
                     const char *what, hl_error *error) HL__REQUIRES(hl__quorum_mutex);
/* What a failure of so many members amounts to: that of the first that will not
   pass, else HL_ECONNECTION. */
int hl__quorum_failure(const hl__quorum_store *store, hl__quorum_ask *const *asks)
    HL__REQUIRES(hl__quorum_mutex);

/* It cannot be had again: what is left of it goes. */
void hl__quorum_abandon(hl__quorum_store *store, hl__quorum_lease *lease)
    HL__REQUIRES(hl__quorum_mutex);
/* A member has said that it was revoked. */
bool hl__quorum_is_revoked(const hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex);

/* ---- member.c; with the mutex, unless it says otherwise */

/* Starts a thread of the member. False: it has as many as it may, or there is none to be had. */
bool hl__member_start(hl__quorum_member *member) HL__REQUIRES(hl__quorum_mutex);
/* Makes the members that are out of it take it, and does not wait for them.
   They are asked again, after pauses that grow, until all are in it, or it is
   over. */
void hl__quorum_heal(hl__quorum_store *store, hl__quorum_lease *lease)
    HL__REQUIRES(hl__quorum_mutex);
/* Without the mutex. Frees the store with the last reference. */
void hl__quorum_unref(hl__quorum_store *store);

/* ---- known.c; with the mutex */

/* What is known of that lease, with a reference; NULL: nothing. */
hl__quorum_lease *hl__known_find(hl__quorum_store *store, const hl_lease_terms *terms)
    HL__REQUIRES(hl__quorum_mutex);
/* The same; made, where nothing is known. request: NULL where its rows are not
   known. NULL: no memory. */
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
/* Whether a lease may be held that nobody has given back. */
bool hl__known_goes_on(const hl__quorum_store *store) HL__REQUIRES(hl__quorum_mutex);
/* A record was there, or came to last for ttl ms, by what was asked for then.
 */
void hl__known_sent(hl__quorum_part *part, int64_t sent_ms, int64_t ttl)
    HL__REQUIRES(hl__quorum_mutex);
/* Its record may be in another mode than the lease: it counts no more, as long
   as a quorum is left without it, and is made anew when the lease is healed. */
void hl__known_old(const hl__quorum_store *store, hl__quorum_lease *lease, unsigned i)
    HL__REQUIRES(hl__quorum_mutex);
/* Nothing is to be known of it any more. */
void hl__known_forget(hl__quorum_store *store, hl__quorum_lease *lease)
    HL__REQUIRES(hl__quorum_mutex);
/* So many members are in it. */
unsigned hl__known_in(const hl__quorum_store *store, const hl__quorum_lease *lease)
    HL__REQUIRES(hl__quorum_mutex);
/* From when on a quorum of those that are in it counts: the time at which the
   record of the `need`-th newest was asked for, less what clocks may differ in
   ttl ms. */
int64_t hl__known_since(const hl__quorum_store *store, const hl__quorum_lease *lease, int64_t ttl)
    HL__REQUIRES(hl__quorum_mutex);
/* Until when a quorum of those that are in it has it; hl__boot_ms. */
int64_t hl__known_till(const hl__quorum_store *store, const hl__quorum_lease *lease)
    HL__REQUIRES(hl__quorum_mutex);
/* ---- presence.c; with the mutex, which is given back while a member is asked */

/* Those of all processes at a member. */
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
/* Once such an ask is answered: whether the presence is to be renewed, while nobody waits. */
bool hl__presence_is_due(const hl__quorum_ask *ask) HL__REQUIRES(hl__quorum_mutex);
int hl__presence_renew(hl__quorum_ask *ask, hl_session *session) HL__REQUIRES(hl__quorum_mutex);

/* ---- take.c, convert.c, leases.c; without the mutex, unless they say otherwise */

/* What was released, and is not answered, goes on. With the mutex. */
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
