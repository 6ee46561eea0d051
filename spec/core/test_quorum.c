/*
 * test_quorum.c - a quorum through its hl_store_ops, where the order of what its threads do is
 * what matters. Its members are embedded stores. Some are behind a gate: the test says when a call
 * to them goes on.
 */
#include "clock.h"
#include "error.h"
#include "hierlock.h"
#include "quorum_store.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "await.h"
#include "leftovers.h"

#include <ftw.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* For how long something must stay as it is before it is believed to stay. */
#define STAYS_MS 100
#define LONG_MS 60000
#define SHORT_MS 2000
/* So long stands a presence that is written while `brief`. */
#define BRIEF_MS 300
/* A lease is healed at least as often. */
#define HEALED_MS 3500
/* exit() waits longer for a thread that does not come. */
#define AWAITED_MS 2000
#define TRIES 10
#define CALLS 12
/* So many leases are had while a member hangs; so many questions may stay there meanwhile. */
#define LEASES 200
#define FEW 32

static const hl_store_ops *const ops = &hl_store_quorum;
static hl_layout *layout;
static char directory[64];

/* ------------------------------------------------------- a member behind a gate */

/* A closed gate stops the first call that comes, until it is opened. Later calls pass. */
typedef struct gate {
  atomic_bool shut, reached;
} gate;

static gate settles;      /* before a session is used again */
static gate begins;       /* before a presence is written */
static gate ends;         /* before it is dropped */
static gate opens;        /* before the store is opened */
static gate closes;       /* before it is closed */
static atomic_bool cuts;  /* the answer to that drop does not come */
static atomic_bool loses; /* nor is that drop carried out */
static gate looks;        /* before the presences at gated-b are looked at the second time */
static atomic_uint looked;
static atomic_bool brief;  /* presences end soon */
static atomic_bool blind;  /* no presences are seen */
static atomic_bool blinds; /* nor from the next use of a session on */
static hl_store_ops gated; /* the embedded store, in directories named gated-... */
static hl_lease_ops gated_leases;
static hl_store_ops absent;   /* it cannot be opened: absent-... */
static atomic_bool down;      /* no store can be opened */
static atomic_bool crowded;   /* the store has no room to be opened */
static atomic_uint turned;    /* so often it was tried meanwhile */
static atomic_bool leaseless; /* a store that is opened has no leases */
static atomic_uint left;      /* so many of these stores are open, or being opened */
static atomic_bool refuses;   /* no lease can be made */
static atomic_uint asked;     /* so many were asked for meanwhile */
static atomic_bool stuck;     /* no session can be used, nor opened */
static atomic_bool full;      /* the next drop of a lease at gated-c has no descriptor */
static gate retries;          /* before a later one there; gated-b waits for that one */
static gate answers;          /* the next drop there is carried out; its answer does not come */
static gate adopts;           /* before a grant of gated-a is refreshed for a caller that waits */
static atomic_bool mute;      /* a lease is refreshed at gated-..., without an answer */
static atomic_uint tried[2];  /* so often a lease was asked for at gated-b, and at gated-c */
static atomic_bool backed;    /* gated-b was told to drop a lease, */
static atomic_bool in_order;  /* before gated-c was asked for one the second time */
static atomic_bool severed;   /* no answer to such a drop comes */
static atomic_bool deaf;      /* gated-b and gated-c cannot be asked to drop a lease */

static atomic_bool lags;               /* each look at a lease takes longer than its ttl */
static atomic_bool hangs;              /* the next look is not answered in time */
static hl_session *_Atomic unanswered; /* on which that was: the answer may still come */
static atomic_uint confused;           /* so often it was used all the same */

/* Whether the call was stopped. */
static bool gate_pass(gate *self) {
  if (!atomic_load(&self->shut) || atomic_exchange(&self->reached, true)) return false;
  while (atomic_load(&self->shut)) sleep_ms(1);
  return true;
}

static void gate_close(gate *self) {
  atomic_store(&self->reached, false);
  atomic_store(&self->shut, true);
}

static void gate_open(gate *self) { atomic_store(&self->shut, false); }

/* gated-a and so on, of the last quorum */
static hl_store *_Atomic at_a, *_Atomic at_b, *_Atomic at_c;

static int gated_settle(hl_session *session, int64_t deadline, hl_error *error) {
  if (session == atomic_load(&unanswered)) atomic_fetch_add(&confused, 1u);
  if (atomic_load(&blinds)) atomic_store(&blind, true);
  gate_pass(&settles);
  while (atomic_load(&stuck)) sleep_ms(1);
  return hl_store_file.settle(session, deadline, error);
}

/* For one of `ttl`, which was sent at *sent_ms, and is recorded for BRIEF_MS. */
static void presence_shorten(int64_t ttl, int64_t *sent_ms) {
  *sent_ms += BRIEF_MS - (ttl - ttl / 100);
}

static int gated_take(hl_session *session, const hl_request *request, hl_grant *grant,
                      hl_error *error) {
  if (hl__is_presence(request->lease->id)) {
    gate_pass(&begins);
    if (atomic_load(&brief)) {
      hl_request shorter = *request;
      hl_lease_terms terms = *request->lease;
      shorter.lease = &terms;
      terms.ttl = BRIEF_MS;
      int status = hl_store_file.take(session, &shorter, grant, error);
      presence_shorten(request->lease->ttl, &grant->sent_ms);
      return status;
    }
  } else if (atomic_load(&refuses)) {
    atomic_fetch_add(&asked, 1u);
    return hl__error(error, HL_ESTORE, "it refuses");
  } else if (session->store == atomic_load(&at_b)) {
    atomic_fetch_add(&tried[0], 1u);
  } else if (session->store == atomic_load(&at_c) && atomic_fetch_add(&tried[1], 1u) == 1) {
    atomic_store(&in_order, atomic_load(&backed));
  }
  return hl_store_file.take(session, request, grant, error);
}

static int gated_session_open(hl_store *store, int64_t deadline, hl_session **session,
                              hl_error *error) {
  while (atomic_load(&stuck)) sleep_ms(1);
  return hl_store_file.session_open(store, deadline, session, error);
}

static void gated_session_close(hl_session *session) {
  hl_session *closed = session;
  (void)atomic_compare_exchange_strong(&unanswered, &closed, NULL);
  hl_store_file.session_close(session);
}

static void gated_close(hl_store *store) {
  gate_pass(&closes);
  hl_store_file.close(store);
  atomic_fetch_sub(&left, 1u);
}

static int (*file_list)(hl_session *, const hl_lease_filter *, hl_holder_fn, void *, int64_t,
                        hl_error *);
static int (*file_drop)(hl_session *, const hl_lease_terms *, bool, int64_t, hl_error *);
static int (*file_adopt)(hl_session *, const hl_request *, hl_grant *, hl_error *);
static int (*file_inspect)(hl_session *, const hl_lease_terms *, int64_t, int64_t *, hl_error *);
static int (*file_refresh)(hl_session *, const hl_lease_terms *, int64_t, int64_t, int64_t *,
                           hl_error *);

static int gated_refresh(hl_session *session, const hl_lease_terms *terms, int64_t ttl,
                         int64_t deadline, int64_t *sent_ms, hl_error *error) {
  bool shorter = atomic_load(&brief) && hl__is_presence(terms->id);
  int status = file_refresh(session, terms, shorter ? BRIEF_MS : ttl, deadline, sent_ms, error);
  if (shorter) presence_shorten(ttl, sent_ms);
  if (atomic_load(&mute) && !hl__is_presence(terms->id))
    return hl__error(error, HL_ECONNECTION, "it is cut off");
  return status;
}

static int gated_adopt(hl_session *session, const hl_request *request, hl_grant *grant,
                       hl_error *error) {
  if (session->store == atomic_load(&at_a)) gate_pass(&adopts);
  return file_adopt(session, request, grant, error);
}

static int gated_inspect(hl_session *session, const hl_lease_terms *terms, int64_t deadline,
                         int64_t *left_ms, hl_error *error) {
  if (atomic_load(&lags)) sleep_ms((unsigned)terms->ttl + 1);
  return file_inspect(session, terms, deadline, left_ms, error);
}

static int lease_drop(hl_session *session, const hl_lease_terms *terms, bool confirm,
                      int64_t deadline, hl_error *error) {
  bool is_b = session->store == atomic_load(&at_b);
  if (atomic_load(&deaf) && (is_b || session->store == atomic_load(&at_c)))
    return hl__error(error, HL_ECONNECTION, "it is cut off");
  if (is_b) {
    while (atomic_load(&retries.shut) && !atomic_load(&retries.reached)) sleep_ms(1);
    int status = file_drop(session, terms, confirm, deadline, error);
    atomic_store(&backed, true);
    return atomic_load(&severed) ? hl__error(error, HL_ECONNECTION, "it is cut off") : status;
  }
  if (atomic_exchange(&full, false)) return hl__error(error, HL_ESTORE, "too many open files");
  (void)gate_pass(&retries);
  int status = file_drop(session, terms, confirm, deadline, error);
  if (gate_pass(&answers)) return hl__error(error, HL_ECONNECTION, "it is cut off");
  /* As servers answer, whose answers can be cut off. */
  return status == HL_ELOST && terms->again ? HL__ABSENT : status;
}

static int gated_drop(hl_session *session, const hl_lease_terms *terms, bool confirm,
                      int64_t deadline, hl_error *error) {
  if (!hl__is_presence(terms->id)) return lease_drop(session, terms, confirm, deadline, error);
  gate_pass(&ends);
  if (atomic_exchange(&loses, false)) return hl__error(error, HL_ECONNECTION, "it is cut off");
  int status = file_drop(session, terms, confirm, deadline, error);
  return atomic_exchange(&cuts, false) ? HL_ECONNECTION : status;
}

static int gated_list(hl_session *session, const hl_lease_filter *filter, hl_holder_fn fn,
                      void *context, int64_t deadline, hl_error *error) {
  if (session->store == atomic_load(&at_b) && atomic_fetch_add(&looked, 1u) == 1) gate_pass(&looks);
  if (atomic_load(&blind)) return hl__error(error, HL_ESTORE, "it shows nothing");
  if (atomic_exchange(&hangs, false)) {
    atomic_store(&unanswered, session);
    return hl__error(error, HL_ECONNECTION, "it does not answer");
  }
  return file_list(session, filter, fn, context, deadline, error);
}

/* Once: several stores may be opened at a time. */
static void leases_make(const hl_lease_ops *file) {
  static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  (void)pthread_mutex_lock(&mutex);
  if (!file_drop) {
    file_drop = file->drop;
    file_list = file->list;
    file_refresh = file->refresh;
    file_adopt = file->adopt;
    file_inspect = file->inspect;
    gated_leases = *file;
    gated_leases.adopt = gated_adopt;
    gated_leases.drop = gated_drop;
    gated_leases.inspect = gated_inspect;
    gated_leases.list = gated_list;
    gated_leases.refresh = gated_refresh;
  }
  (void)pthread_mutex_unlock(&mutex);
}

static int gated_open(const hl_store_config *config, hl_store **store, hl_error *error) {
  if (atomic_load(&down)) return hl__error(error, HL_ECONNECTION, "it is down");
  if (atomic_load(&crowded)) {
    atomic_fetch_add(&turned, 1u);
    return hl__error(error, HL_ESTORE, "too many open files");
  }
  atomic_fetch_add(&left, 1u);
  gate_pass(&opens);
  int status = hl_store_file.open(config, store, error);
  if (status) atomic_fetch_sub(&left, 1u);
  if (status) return status;
  if (strstr(config->dsn->path, "/gated-a")) atomic_store(&at_a, *store);
  if (strstr(config->dsn->path, "/gated-b")) atomic_store(&at_b, *store);
  if (strstr(config->dsn->path, "/gated-c")) atomic_store(&at_c, *store);
  leases_make((*store)->leases);
  (*store)->leases = atomic_load(&leaseless) ? NULL : &gated_leases;
  return HL_OK;
}

static int absent_open(const hl_store_config *config, hl_store **store, hl_error *error) {
  (void)config, (void)store;
  return hl__error(error, HL_ECONNECTION, "it is absent");
}

/* -------------------------------------------------------------------- a quorum */

static int find(const hl_store_config *config, const char *dsn, const hl_store_ops **found,
                hl_error *error) {
  (void)config, (void)error;
  *found = strstr(dsn, "/gated-") ? &gated : strstr(dsn, "/absent-") ? &absent : &hl_store_file;
  return HL_OK;
}

typedef struct opened {
  hl_dsn dsn;
  hl_store_config config;
  hl_store *store;
} opened;

/* list: the members' names. */
static int open_quorum(opened *self, const char *list, hl_error *error) {
  char dsn[512] = "quorum:majority", names[128], *rest = names;
  size_t used = strlen(dsn);
  (void)snprintf(names, sizeof names, "%s", list);
  for (char *name; (name = strtok_r(rest, " ", &rest));)
    used += (size_t)snprintf(dsn + used, sizeof dsn - used, ";file:%s/%s", directory, name);
  memset(self, 0, sizeof *self);
  assert_int_equal(hl_dsn_parse(dsn, ops->parse, &self->dsn, error), HL_OK);
  self->config = (hl_store_config){.dsn = &self->dsn,
                                   .layout = layout,
                                   .timeout = PATIENCE_MS,
                                   .hold_timeout = LONG_MS,
                                   .application = "test",
                                   .host = "here",
                                   .pid = getpid(),
                                   .find = find};
  int status = ops->open(&self->config, &self->store, error);
  if (status) hl_dsn_dispose(&self->dsn);
  if (status && status != HL_EMISMATCH) (void)fprintf(stderr, "open: %s\n", error->message);
  return status;
}

static void close_quorum(opened *self) {
  ops->close(self->store);
  hl_dsn_dispose(&self->dsn);
}

static hl_session *session_new(hl_store *store) {
  hl_session *session;
  assert_int_equal(ops->session_open(store, HL_FOREVER, &session, NULL), HL_OK);
  return session;
}

static hl_lease_terms lease_named(const char *name) {
  hl_lease_terms terms = {.ttl = LONG_MS, .turn = 1, .owner = "owner"};
  (void)snprintf((char *)terms.id, sizeof terms.id, "%s", name);
  (void)snprintf((char *)terms.holder, sizeof terms.holder, "%s", name);
  return terms;
}

static int make(hl_session *session, hl_lease_terms *terms, bool imports, hl_grant *grant) {
  const hl_row row = {.level = 0, .bucket = 7, .mode = HL_EXCLUSIVE, .root = 7};
  const hl_request request = {.rows = &row,
                              .n = 1,
                              .recorded = &row,
                              .recorded_n = 1,
                              .lease = terms,
                              .deadline = hl__now_ms() + PATIENCE_MS,
                              .path = "u1",
                              .mode = HL_EXCLUSIVE};
  hl_error error;
  int status = imports ? session->store->leases->adopt(session, &request, grant, &error)
                       : ops->take(session, &request, grant, &error);
  terms->place = grant->place;
  terms->token = grant->token;
  return status;
}

static int take(hl_session *session, hl_lease_terms *terms) {
  hl_grant grant = {0};
  return make(session, terms, false, &grant);
}

static int release(hl_session *session, const hl_lease_terms *terms, int64_t patience) {
  return session->store->leases->drop(session, terms, true, hl__now_ms() + patience, NULL);
}

static void drop(hl_session *session, const hl_lease_terms *terms) {
  assert_int_equal(release(session, terms, PATIENCE_MS), HL_OK);
  assert_int_equal(ops->settle(session, hl__now_ms() + PATIENCE_MS, NULL), HL_OK);
}

static void count(void *context, const hl_holder *holder) {
  (void)holder;
  ++*(unsigned *)context;
}

/* How many records the member has: of leases, or of presences. */
static unsigned records(const char *member, bool presences) {
  static const hl_row presence = {
      .bucket = HL__PRESENCE_BUCKET, .mode = HL_EXCLUSIVE, .root = HL__PRESENCE_BUCKET};
  static const hl_row row = {.level = 0, .bucket = 7, .mode = HL_EXCLUSIVE, .root = 7};
  const hl_lease_filter filter = {.rows = presences ? &presence : &row, .n = 1};
  char path[128], text[160];
  unsigned n = 0;
  hl_dsn dsn;
  hl_store *store;
  (void)snprintf(path, sizeof path, "%s/%s", directory, member);
  (void)snprintf(text, sizeof text, "file:%s", path);
  assert_int_equal(hl_dsn_parse(text, hl_store_file.parse, &dsn, NULL), HL_OK);
  hl_store_config config = {
      .dsn = &dsn, .layout = layout, .application = "test", .host = "here", .pid = getpid()};
  assert_int_equal(hl_store_file.open(&config, &store, NULL), HL_OK);
  hl_session *session;
  assert_int_equal(hl_store_file.session_open(store, HL_FOREVER, &session, NULL), HL_OK);
  assert_int_equal(
      store->leases->list(session, &filter, count, &n, hl__now_ms() + PATIENCE_MS, NULL), HL_OK);
  hl_store_file.session_close(session);
  hl_store_file.close(store);
  hl_dsn_dispose(&dsn);
  return n;
}

typedef struct seen {
  bool rests; /* its threads have done all, and given their sessions back */
  unsigned queued;
} seen;

/* What the quorum knows of a member. */
static seen look_at(hl_store *base, unsigned i) {
  hl__quorum_store *store = (hl__quorum_store *)(void *)base;
  hl__quorum_mutex_lock(store);
  const hl__quorum_member *member = &store->members[i];
  seen it = {.queued = member->queued};
  it.rests = it.queued == 0 && member->threads == member->idle_threads && member->idle_count > 0;
  hl__quorum_mutex_unlock(store);
  return it;
}

/* -------------------------------------------------------------------- presences */

/* The program has a lease at c again. A program with another list that has c must be refused. */
static void other_list_is_refused(void) {
  opened other;
  hl_error error;
  WAIT_UNTIL(records("gated-c", false) == 1);
  for (int64_t end = hl__now_ms() + STAYS_MS; hl__now_ms() < end; sleep_ms(5))
    assert_int_equal(records("gated-c", true), 1);
  assert_int_equal(open_quorum(&other, "gated-c d e", &error), HL_EMISMATCH);
}

/* Closes the last session, which ends the presences, and begins anew. */
static void an_end_that_waits_does_not_end_the_presence_of_a_newer_lease(void **state) {
  opened quorum;
  hl_error error;
  (void)state;
  assert_int_equal(open_quorum(&quorum, "a b gated-c", &error), HL_OK);
  hl_session *session = session_new(quorum.store);
  hl_lease_terms first = lease_named("first"), second = lease_named("second");
  assert_int_equal(take(session, &first), HL_OK);
  drop(session, &first);
  WAIT_UNTIL(records("gated-c", false) == 0);
  gate_close(&settles);
  ops->session_close(session);
  WAIT_UNTIL(atomic_load(&settles.reached));
  session = session_new(quorum.store);
  assert_int_equal(take(session, &second), HL_OK);
  WAIT_UNTIL(records("gated-c", false) == 1);
  gate_open(&settles);
  other_list_is_refused();
  drop(session, &second);
  ops->session_close(session);
  close_quorum(&quorum);
  WAIT_UNTIL(atomic_load(&left) == 0);
  assert_int_equal(records("gated-c", true), 0);
}

static void an_end_that_is_repeated_does_not_end_a_newer_presence(void **state) {
  opened quorum;
  hl_error error;
  (void)state;
  assert_int_equal(open_quorum(&quorum, "a b gated-c", &error), HL_OK);
  hl_session *session = session_new(quorum.store);
  hl_lease_terms first = lease_named("first"), second = lease_named("second");
  assert_int_equal(take(session, &first), HL_OK);
  drop(session, &first);
  WAIT_UNTIL(records("gated-c", false) == 0);
  gate_close(&ends);
  atomic_store(&cuts, true);
  ops->session_close(session);
  WAIT_UNTIL(atomic_load(&ends.reached));
  session = session_new(quorum.store);
  assert_int_equal(take(session, &second), HL_OK);
  WAIT_UNTIL(records("gated-c", false) == 1);
  gate_open(&ends);
  WAIT_UNTIL(!atomic_load(&cuts));
  WAIT_UNTIL(records("gated-c", true) <= 1);
  other_list_is_refused();
  drop(session, &second);
  ops->session_close(session);
  close_quorum(&quorum);
  WAIT_UNTIL(atomic_load(&left) == 0);
  assert_int_equal(records("gated-c", true), 0);
}

/* Else it would keep out programs with another list, until its time is up. */
static void an_end_that_was_not_carried_out_is_repeated(void **state) {
  opened quorum;
  hl_error error;
  (void)state;
  assert_int_equal(open_quorum(&quorum, "a b gated-c", &error), HL_OK);
  hl_session *session = session_new(quorum.store);
  hl_lease_terms first = lease_named("first");
  assert_int_equal(take(session, &first), HL_OK);
  drop(session, &first);
  WAIT_UNTIL(records("gated-c", false) == 0);
  WAIT_UNTIL(records("gated-c", true) == 1);
  WAIT_UNTIL(look_at(quorum.store, 2).rests); /* nothing is repeated on a session that is new */
  atomic_store(&loses, true);
  ops->session_close(session);
  close_quorum(&quorum);
  WAIT_UNTIL(atomic_load(&left) == 0);
  assert_false(atomic_load(&loses));
  assert_int_equal(records("gated-c", true), 0);
}

/* The member has not answered in time, so no other question waits for it. */
static void a_presence_that_is_written_at_the_end_goes_too(void **state) {
  opened quorum;
  hl_error error;
  (void)state;
  gate_close(&begins);
  /* On a busy machine it may not even be open in time. */
  for (bool reached = false; !reached;) {
    assert_int_equal(open_quorum(&quorum, "a b gated-c", &error), HL_OK);
    reached = atomic_load(&begins.reached);
    close_quorum(&quorum);
    if (reached) gate_open(&begins);
    WAIT_UNTIL(atomic_load(&left) == 0);
  }
  assert_int_equal(records("gated-c", true), 0);
}

typedef struct opening {
  opened quorum;
  int status;
  atomic_bool done;
} opening;

static void *open_beside(void *it) {
  opening *self = it;
  hl_error error;
  self->status = open_quorum(&self->quorum, "absent-a gated-b gated-c", &error);
  atomic_store(&self->done, true);
  return NULL;
}

/* A try to open finds the list of another program at c, has a presence of that list there, and is
   stopped at b. That presence ends late, and the next try does not see the other program. False: on
   a busy machine it went otherwise. */
static bool lists_meet(void) {
  opening self = {.status = HL_OK};
  pthread_t opener;
  atomic_store(&looked, 0u);
  gate_close(&looks);
  assert_int_equal(pthread_create(&opener, NULL, open_beside, &self), 0);
  WAIT_UNTIL(atomic_load(&looks.reached) || atomic_load(&self.done));
  WAIT_UNTIL(records("gated-c", true) == 2 || atomic_load(&self.done));
  sleep_ms(STAYS_MS); /* it looks once more */
  gate_close(&settles);
  atomic_store(&blinds, true);
  gate_open(&looks);
  for (int ms = 0; ms < LONG_MS / 6 && !atomic_load(&self.done); ms++) sleep_ms(1);
  bool met = atomic_load(&self.done);
  if (!met) gate_open(&settles); /* which has stopped what the opener waits for */
  assert_int_equal(pthread_join(opener, NULL), 0);
  atomic_store(&blinds, false);
  atomic_store(&blind, false);
  met = met && atomic_load(&settles.reached) && self.status == HL_OK;
  if (met) {
    hl_session *session = session_new(self.quorum.store);
    hl_lease_terms first = lease_named("first");
    assert_int_equal(take(session, &first), HL_EMISMATCH);
    ops->session_close(session);
  }
  gate_open(&settles);
  if (self.status == HL_OK) close_quorum(&self.quorum);
  return met;
}

static void a_presence_of_an_earlier_try_does_not_count(void **state) {
  opened other;
  hl_error error;
  (void)state;
  assert_int_equal(open_quorum(&other, "gated-c d e", &error), HL_OK);
  for (int i = 0; i < TRIES && !lists_meet(); i++) WAIT_UNTIL(atomic_load(&left) == 1);
  close_quorum(&other);
  WAIT_UNTIL(atomic_load(&left) == 0);
}

typedef struct waiter {
  opened quorum;
  hl_session *session;
  hl_lease_terms terms;
  int status;
} waiter;

static void *take_beside(void *it) {
  waiter *self = it;
  self->status = take(self->session, &self->terms);
  return NULL;
}

/* Has a program wait at gated-a for another to release a lock, for longer than its presence lasts
   there. Both members are needed. Meanwhile a third program comes, with another list: if `meets`. */
static void wait_for_longer_than_a_presence_lasts(bool meets) {
  waiter self = {.terms = lease_named("second")};
  hl_lease_terms terms = lease_named("first");
  opened holder, other;
  hl_error error;
  pthread_t thread;
  atomic_store(&brief, meets);
  assert_int_equal(open_quorum(&holder, "gated-a b absent-c", &error), HL_OK);
  hl_session *session = session_new(holder.store);
  assert_int_equal(take(session, &terms), HL_OK);
  WAIT_UNTIL(records("gated-a", false) == 1);
  atomic_store(&brief, true);
  assert_int_equal(open_quorum(&self.quorum, "gated-a b absent-c", &error), HL_OK);
  self.session = session_new(self.quorum.store);
  assert_int_equal(pthread_create(&thread, NULL, take_beside, &self), 0);
  sleep_ms(STAYS_MS);
  WAIT_UNTIL(records("gated-a", true) == (meets ? 0 : 1));
  atomic_store(&brief, false);
  if (meets) assert_int_equal(open_quorum(&other, "gated-a d e", &error), HL_OK);
  drop(session, &terms);
  assert_int_equal(pthread_join(thread, NULL), 0);
  assert_int_equal(self.status, meets ? HL_EMISMATCH : HL_OK);
  if (meets) WAIT_UNTIL(records("gated-a", false) == 0);
  if (!meets) assert_int_equal(records("gated-a", true), 2);
  if (!meets) drop(self.session, &self.terms);
  ops->session_close(self.session);
  ops->session_close(session);
  close_quorum(&self.quorum);
  close_quorum(&holder);
  if (meets) close_quorum(&other);
  WAIT_UNTIL(atomic_load(&left) == 0);
}

static void a_lock_that_is_waited_for_longer_than_a_presence_lasts_has_one(void **state) {
  (void)state;
  wait_for_longer_than_a_presence_lasts(false);
}

static void a_lock_is_not_granted_where_another_list_came_meanwhile(void **state) {
  (void)state;
  wait_for_longer_than_a_presence_lasts(true);
}

/* ----------------------------------------------------------------- what is left of a lease */

static void path_of(char path[128], const char *member, const char *end) {
  (void)snprintf(path, 128, "%s/%s%s", directory, member, end);
}

static void empty(const char *member) {
  static unsigned n;
  char path[128], gone[128], end[16];
  (void)snprintf(end, sizeof end, "-gone%u", n++);
  path_of(path, member, "");
  path_of(gone, member, end);
  assert_true(rename(path, gone) == 0);
}

/* A file stands where the directory was. */
static void spoil(const char *member) {
  char path[128];
  path_of(path, member, "");
  FILE *file = fopen(path, "w");
  assert_non_null(file);
  (void)fclose(file);
}

static int refresh(hl_session *session, hl_lease_terms *terms, int64_t *sent_ms) {
  hl_error error;
  *sent_ms = 0;
  terms->turn++;
  return session->store->leases->refresh(session, terms, LONG_MS, hl__now_ms() + PATIENCE_MS,
                                         sent_ms, &error);
}

/* After a failure, too, the holder must hear for how long a quorum has it. */
static int64_t until_after_a_conversion(hl_session *session, hl_lease_terms *terms, hl_mode mode) {
  const hl_row row = {.level = 0, .bucket = 7, .mode = mode, .root = 7};
  const hl_request request = {.rows = &row,
                              .n = 1,
                              .recorded = &row,
                              .recorded_n = 1,
                              .lease = terms,
                              .deadline = hl__now_ms() + SHORT_MS,
                              .path = "u1",
                              .mode = mode,
                              .upgrade = mode == HL_EXCLUSIVE};
  hl_grant grant = {.place = terms->place, .token = terms->token};
  hl_error error;
  assert_int_not_equal(session->store->leases->convert(session, &request, &grant, &error), HL_OK);
  return grant.until_ms;
}

/* Three of five members have it for long. One of them has lost it, so the next has it for a short
   time only. */
static void a_lease_is_healed_for_no_longer_than_a_quorum_has_it(void **state) {
  opened quorum;
  hl_error error;
  int64_t sent;
  (void)state;
  assert_int_equal(open_quorum(&quorum, "gated-a b c d absent-e", &error), HL_OK);
  hl_session *session = session_new(quorum.store);
  hl_lease_terms first = lease_named("first");
  first.ttl = SHORT_MS;
  assert_int_equal(take(session, &first), HL_OK);
  WAIT_UNTIL(records("gated-a", false) + records("b", false) + records("c", false) +
                 records("d", false) ==
             4);
  int64_t end = hl__boot_ms() + SHORT_MS;
  atomic_store(&refuses, true);
  empty("d");
  spoil("d");
  sleep_ms(STAYS_MS); /* a store looks after its directory every 10 ms */
  WAIT_UNTIL(refresh(session, &first, &sent) == HL_OK);

  for (const char *const *member = (const char *const[]){"b", "c", "gated-a", NULL}; *member;
       member++)
    empty(*member);
  spoil("b");
  spoil("c");
  sleep_ms(STAYS_MS);
  WAIT_UNTIL(refresh(session, &first, &sent) != HL_OK && sent && sent + LONG_MS <= end);
  for (hl_mode mode = HL_SHARED;; mode = HL_EXCLUSIVE) {
    int64_t until = until_after_a_conversion(session, &first, mode);
    assert_true(until && until <= end);
    if (mode == HL_EXCLUSIVE) break;
  }
  unsigned before;
  do {
    before = atomic_load(&asked);
    sleep_ms(HEALED_MS);
    assert_true(hl__boot_ms() < end + PATIENCE_MS);
  } while (atomic_load(&asked) != before || hl__boot_ms() < end + HEALED_MS);
  atomic_store(&refuses, false);
  ops->session_close(session);
  close_quorum(&quorum);
  WAIT_UNTIL(atomic_load(&left) == 0);
}

static int64_t end_of(hl_store *base, const hl_lease_terms *terms) {
  hl__quorum_store *store = (hl__quorum_store *)(void *)base;
  hl__quorum_mutex_lock(store);
  hl__quorum_lease *lease = hl__known_find(store, terms);
  int64_t end = lease ? lease->end : 0;
  hl__known_unref(lease);
  hl__quorum_mutex_unlock(store);
  return end;
}

/* The members have it for the shorter time. From its end on they may grant the lock to another. */
static void a_lease_is_healed_for_no_longer_than_a_refresh_that_is_not_answered(void **state) {
  opened quorum;
  hl_error error;
  int64_t sent = 0;
  (void)state;
  assert_int_equal(open_quorum(&quorum, "gated-a gated-b gated-c", &error), HL_OK);
  hl_session *session = session_new(quorum.store);
  hl_lease_terms first = lease_named("first");
  assert_int_equal(take(session, &first), HL_OK);
  assert_true(end_of(quorum.store, &first) > hl__boot_ms() + SHORT_MS);
  atomic_store(&mute, true);
  first.turn++;
  assert_int_not_equal(quorum.store->leases->refresh(session, &first, SHORT_MS,
                                                     hl__now_ms() + PATIENCE_MS, &sent, &error),
                       HL_OK);
  atomic_store(&mute, false);
  assert_in_range(end_of(quorum.store, &first), 1, hl__boot_ms() + SHORT_MS);
  drop(session, &first);
  ops->session_close(session);
  close_quorum(&quorum);
  WAIT_UNTIL(atomic_load(&left) == 0);
}

/* A thread asks c again while the caller waits for b: c neither has answered nor has lost it. */
static void a_release_is_not_lost_while_a_member_is_asked_again(void **state) {
  opened quorum;
  hl_error error;
  (void)state;
  assert_int_equal(open_quorum(&quorum, "absent-a gated-b gated-c", &error), HL_OK);
  hl_session *session = session_new(quorum.store);
  hl_lease_terms first = lease_named("first");
  assert_int_equal(take(session, &first), HL_OK);
  atomic_store(&full, true);
  gate_close(&retries);
  assert_int_not_equal(release(session, &first, PATIENCE_MS), HL_ELOST);
  WAIT_UNTIL(atomic_load(&retries.reached));
  assert_int_equal(records("gated-c", false), 1);
  gate_open(&retries);
  WAIT_UNTIL(release(session, &first, PATIENCE_MS) == HL_OK);
  assert_int_equal(records("gated-c", false), 0);
  ops->session_close(session);
  close_quorum(&quorum);
  WAIT_UNTIL(atomic_load(&left) == 0);
}

/* c has dropped the record for the first of two calls, and finds none for the second. */
static void a_release_is_not_lost_while_an_earlier_drop_is_not_answered(void **state) {
  opened quorum;
  hl_error error;
  (void)state;
  assert_int_equal(open_quorum(&quorum, "absent-a gated-b gated-c", &error), HL_OK);
  hl_session *session = session_new(quorum.store);
  hl_lease_terms first = lease_named("first");
  assert_int_equal(take(session, &first), HL_OK);
  gate_close(&answers);
  assert_int_equal(release(session, &first, STAYS_MS), HL_TIMEOUT);
  WAIT_UNTIL(atomic_load(&answers.reached));
  assert_int_not_equal(release(session, &first, PATIENCE_MS), HL_ELOST);
  gate_open(&answers);
  WAIT_UNTIL(release(session, &first, PATIENCE_MS) == HL_OK);
  ops->session_close(session);
  close_quorum(&quorum);
  WAIT_UNTIL(atomic_load(&left) == 0);
}

/* Else the released lease could refuse the next try on the session. */
static void a_release_without_confirmation_is_waited_for_a_while(void **state) {
  opened quorum;
  hl_error error;
  (void)state;
  assert_int_equal(open_quorum(&quorum, "a gated-b gated-c", &error), HL_OK);
  hl_session *session = session_new(quorum.store);
  hl_lease_terms first = lease_named("first");
  assert_int_equal(take(session, &first), HL_OK);
  gate_close(&retries);
  assert_int_equal(quorum.store->leases->drop(session, &first, false, 0, &error), HL_OK);
  assert_int_equal(ops->settle(session, hl__now_ms() + PATIENCE_MS, &error), HL_OK);
  gate_open(&retries);
  WAIT_UNTIL(records("a", false) + records("gated-b", false) + records("gated-c", false) == 0);
  ops->session_close(session);
  close_quorum(&quorum);
  WAIT_UNTIL(atomic_load(&left) == 0);
}

/* ------------------------------------------------------- what a caller has while it waits */

/* A program waits for another, which has the lock at two of three members: at all but `where`. */
typedef struct meeting {
  opened holder;
  hl_session *session;
  hl_lease_terms terms;
  waiter waiter;
  pthread_t thread;
} meeting;

static void meeting_begin(meeting *self, const char *where, int64_t ttl) {
  static const char *const list = "gated-a gated-b gated-c";
  hl_error error;
  *self = (meeting){.terms = lease_named("first"), .waiter = {.terms = lease_named("second")}};
  self->waiter.terms.ttl = ttl;
  assert_int_equal(open_quorum(&self->holder, list, &error), HL_OK);
  self->session = session_new(self->holder.store);
  assert_int_equal(take(self->session, &self->terms), HL_OK);
  WAIT_UNTIL(records("gated-a", false) + records("gated-b", false) + records("gated-c", false) ==
             3);
  empty(where);
  assert_int_equal(open_quorum(&self->waiter.quorum, list, &error), HL_OK);
  self->waiter.session = session_new(self->waiter.quorum.store);
  for (int i = 0; i < 2; i++) atomic_store(&tried[i], 0u);
  atomic_store(&backed, false);
  assert_int_equal(pthread_create(&self->thread, NULL, take_beside, &self->waiter), 0);
}

/* The waiter has the lock from now on. */
static void meeting_passes(meeting *self) {
  drop(self->session, &self->terms);
  assert_int_equal(pthread_join(self->thread, NULL), 0);
  assert_int_equal(self->waiter.status, HL_OK);
}

static void meeting_end(meeting *self) {
  drop(self->waiter.session, &self->waiter.terms);
  ops->session_close(self->waiter.session);
  ops->session_close(self->session);
  close_quorum(&self->waiter.quorum);
  close_quorum(&self->holder);
  WAIT_UNTIL(atomic_load(&left) == 0);
}

/* Else two callers may wait for each other: the one for a while it has b, the other for b. On a busy
   machine b may carry that out late. */
static void a_caller_that_waits_for_a_member_has_no_later_one(void **state) {
  (void)state;
  for (int i = 0; i < TRIES && !atomic_load(&in_order); i++) {
    meeting self;
    meeting_begin(&self, "gated-b", LONG_MS);
    WAIT_UNTIL(atomic_load(&tried[1]) >= 2);
    meeting_passes(&self);
    meeting_end(&self);
  }
  assert_true(atomic_load(&in_order));
}

/* b may carry the drop out still, and would end what it has granted meanwhile: while the caller waits,
   or after it, to heal the lease. */
static void a_member_that_has_not_answered_a_drop_grants_the_lease_no_more(void **state) {
  meeting self;
  (void)state;
  atomic_store(&severed, true);
  meeting_begin(&self, "gated-b", LONG_MS);
  WAIT_UNTIL(atomic_load(&backed));
  unsigned enough = atomic_load(&tried[1]) + 2;
  WAIT_UNTIL(atomic_load(&tried[1]) >= enough);
  meeting_passes(&self);
  sleep_ms(STAYS_MS);
  assert_int_equal(atomic_load(&tried[0]), 1);
  atomic_store(&severed, false);
  meeting_end(&self);
}

/* a does not answer in time, and its thread has the question still. */
static void a_grant_that_is_not_refreshed_in_time_is_given_back(void **state) {
  meeting self;
  (void)state;
  gate_close(&adopts);
  meeting_begin(&self, "gated-a", 2 * SHORT_MS);
  WAIT_UNTIL(atomic_load(&adopts.reached));
  WAIT_UNTIL(records("gated-a", false) == 0);
  gate_open(&adopts);
  meeting_passes(&self);
  meeting_end(&self);
  assert_int_equal(records("gated-a", false), 0);
}

/* ------------------------------------------------------------------------- opening */

static void *open_plainly(void *unused) {
  static const hl_store_ops *const stores[] = {&gated, NULL};
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager;
  char dsn[160];
  (void)snprintf(dsn, sizeof dsn, "file:%s/a", directory);
  config.dsn = dsn;
  config.stores = stores;
  if (hl_manager_open(&config, &manager, NULL) != HL_OK) return unused;
  hl_manager_close(manager);
  return NULL;
}

/* In a process that has started no thread of the library: forks while another thread opens. Exits
   with 0 if a child has ended at once; a busy machine may need some tries. */
static void fork_beside_an_open(void) {
  pthread_t opener;
  void *failed;
  int status;
  bool prompt = false;
  gate_close(&opens);
  if (pthread_create(&opener, NULL, open_plainly, &status) != 0) _exit(2);
  WAIT_UNTIL(atomic_load(&opens.reached));
  for (int tries = 0; !prompt && tries < TRIES; tries++) {
    int64_t begun = hl__now_ms();
    pid_t child = fork();
    if (child == 0) exit(0);
    if (waitpid(child, &status, 0) != child || status != 0) _exit(3);
    prompt = hl__now_ms() - begun < AWAITED_MS;
  }
  gate_open(&opens);
  if (pthread_join(opener, &failed) != 0 || failed) _exit(4);
  _exit(prompt ? 0 : 1);
}

/* exit() waits for threads that connect; the child of a fork has none of them. The first test: no
   thread was started yet. */
static void a_child_does_not_wait_for_what_its_parent_opens(void **state) {
  int status;
  (void)state;
  (void)fflush(NULL); /* the child's exit() writes it, too */
  pid_t child = fork();
  if (child == 0) fork_beside_an_open();
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_int_equal(status, 0);
}

static void *closes_open(void *unused) {
  int64_t end = hl__now_ms() + PATIENCE_MS;
  while (atomic_load(&closes.shut) && hl__now_ms() < end) sleep_ms(1);
  bool late = atomic_load(&closes.shut);
  gate_open(&closes);
  return late ? unused : NULL;
}

/* Its close may wait for a thread, as the store of a table in memory does. */
static void a_refused_member_is_closed_while_no_one_waits_for_that(void **state) {
  opened quorum;
  hl_error error;
  pthread_t opener;
  void *late;
  (void)state;
  atomic_store(&leaseless, true);
  gate_close(&closes);
  assert_int_equal(pthread_create(&opener, NULL, closes_open, &quorum), 0);
  assert_int_equal(open_quorum(&quorum, "a b gated-c", &error), HL_EUNSUPPORTED);
  gate_open(&closes);
  assert_int_equal(pthread_join(opener, &late), 0);
  atomic_store(&leaseless, false);
  assert_null(late);
  WAIT_UNTIL(atomic_load(&left) == 0);
}

/* Else the next question on it would be told the answer to this one, and the next lock be granted by
   the answer to an earlier request. */
static void a_session_whose_look_was_not_answered_is_closed(void **state) {
  opened quorum;
  hl_error error;
  (void)state;
  atomic_store(&hangs, true);
  assert_int_equal(open_quorum(&quorum, "a b gated-c", &error), HL_OK);
  WAIT_UNTIL(!atomic_load(&hangs));
  hl_session *session = session_new(quorum.store);
  hl_lease_terms terms = lease_named("lease");
  assert_int_equal(take(session, &terms), HL_OK);
  WAIT_UNTIL(records("gated-c", false) == 1);
  assert_int_equal(atomic_load(&confused), 0);
  assert_null(atomic_load(&unanswered));
  drop(session, &terms);
  ops->session_close(session);
  close_quorum(&quorum);
}

/* The members have it, though its time is up: no member could not be asked. The core tells by the
   time of the sending that it is late, and gives it back. */
static void an_import_whose_time_is_up_at_the_second_look_is_late(void **state) {
  opened quorum;
  hl_error error;
  hl_grant grant = {0};
  (void)state;
  assert_int_equal(open_quorum(&quorum, "gated-a gated-b gated-c", &error), HL_OK);
  hl_session *session = session_new(quorum.store);
  hl_lease_terms terms = lease_named("lease");
  assert_int_equal(take(session, &terms), HL_OK);
  terms.ttl = STAYS_MS;
  (void)snprintf((char *)terms.holder, sizeof terms.holder, "heir");
  atomic_store(&lags, true);
  assert_int_equal(make(session, &terms, true, &grant), HL_OK);
  assert_true(grant.sent_ms + terms.ttl <= hl__boot_ms());
  atomic_store(&lags, false);
  drop(session, &terms);
  ops->session_close(session);
  close_quorum(&quorum);
}

/* It may have another list, so the first call waits for it. Later ones would wait in vain, too. */
static void a_member_that_is_opened_for_long_is_waited_for_once(void **state) {
  opened quorum;
  hl_error error;
  (void)state;
  atomic_store(&down, true);
  assert_int_equal(open_quorum(&quorum, "a b gated-c", &error), HL_OK);
  atomic_store(&down, false);
  gate_close(&opens);
  hl_session *session = session_new(quorum.store);
  int64_t begun = hl__now_ms();
  for (int i = 0; i < CALLS; i++) {
    char name[24];
    (void)snprintf(name, sizeof name, "lease %d", i);
    hl_lease_terms terms = lease_named(name);
    assert_int_equal(take(session, &terms), HL_OK);
    drop(session, &terms);
  }
  assert_true(hl__now_ms() - begun < CALLS * HL__QUORUM_ANSWER_MS / 2);
  gate_open(&opens);
  ops->session_close(session);
  close_quorum(&quorum);
  WAIT_UNTIL(atomic_load(&left) == 0);
}

/* A member that was down comes back while the process has too many files open. */
static void a_member_that_has_no_room_for_a_while_is_opened_later(void **state) {
  opened quorum;
  hl_error error;
  (void)state;
  atomic_store(&down, true);
  assert_int_equal(open_quorum(&quorum, "a b gated-c", &error), HL_OK);
  atomic_store(&crowded, true);
  atomic_store(&down, false);
  hl_session *session = session_new(quorum.store);
  hl_lease_terms terms = lease_named("lease");
  assert_int_equal(take(session, &terms), HL_OK);
  WAIT_UNTIL(atomic_load(&turned) > 0);
  atomic_store(&crowded, false);
  WAIT_UNTIL(records("gated-c", false) == 1);
  drop(session, &terms);
  ops->session_close(session);
  close_quorum(&quorum);
  WAIT_UNTIL(atomic_load(&left) == 0);
}

/* ------------------------------------------------------------------------ closing */

static hl_manager *manager_open(const char *dsn) {
  static const hl_store_ops *const stores[] = {&gated, NULL};
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager;
  config.dsn = dsn;
  config.stores = stores;
  assert_int_equal(hl_manager_open(&config, &manager, NULL), HL_OK);
  return manager;
}

static unsigned leases_at_a(void) {
  char dsn[128];
  unsigned n = 0;
  (void)snprintf(dsn, sizeof dsn, "file:%s/a", directory);
  hl_manager *manager = manager_open(dsn);
  assert_int_equal(hl_manager_leases(manager, NULL, count, &n, NULL), HL_OK);
  hl_manager_close(manager);
  return n;
}

static hl_lock *acquire(hl_manager *manager, unsigned number) {
  hl_lock *lock;
  hl_options options = HL_OPTIONS_INIT;
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  hl_id id = {(const char *)&number, sizeof number};
  options.ttl = LONG_MS;
  assert_int_equal(hl_plan_add(plan, &id, 1, HL_EXCLUSIVE, false, NULL), HL_OK);
  assert_int_equal(hl_acquire(manager, plan, &options, &lock, NULL), HL_OK);
  hl_plan_free(plan);
  return lock;
}

/* A program has leases at all members. Then b and c fail, so that no release is confirmed. */
static hl_manager *leases_had(hl_lock *locks[CALLS]) {
  char dsn[320];
  (void)snprintf(dsn, sizeof dsn, "quorum:majority;file:%s/a;file:%s/gated-b;file:%s/gated-c",
                 directory, directory, directory);
  hl_manager *manager = manager_open(dsn);
  for (unsigned i = 0; i < CALLS; i++) locks[i] = acquire(manager, i);
  WAIT_UNTIL(leases_at_a() == CALLS);
  atomic_store(&deaf, true);
  return manager;
}

static void released(hl_lock *locks[CALLS], unsigned n) {
  for (unsigned i = 0; i < n; i++) assert_int_equal(hl_lock_release(locks[i], false, NULL), HL_OK);
}

/* Each lease is dropped at a all the same: of released handles, and those that the close releases. */
static void a_close_gives_up_no_lease_for_another(void **state) {
  hl_lock *locks[CALLS];
  (void)state;
  hl_manager *manager = leases_had(locks);
  released(locks, CALLS / 2);
  hl_manager_close(manager);
  for (unsigned i = 0; i < CALLS; i++) hl_lock_free(locks[i]);
  WAIT_UNTIL(atomic_load(&left) == 0);
  atomic_store(&deaf, false);
  assert_int_equal(leases_at_a(), 0);
}

/* Before another test has started a thread. */
static void an_exit_gives_up_no_lease_for_another(void **state) {
  int status;
  (void)state;
  (void)fflush(NULL); /* the child's exit() writes it, too */
  pid_t child = fork();
  if (child == 0) {
    hl_lock *locks[CALLS];
    (void)leases_had(locks);
    released(locks, CALLS);
    sleep_ms(STAYS_MS); /* a worker has failed to drop one, and pauses */
    exit(0);
  }
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_int_equal(status, 0);
  assert_int_equal(leases_at_a(), 0);
}

/* ---------------------------------------------------------------- a member that hangs */

static void lose(hl_session *session, hl_lease_terms *terms) {
  const hl_lease_filter filter = {.id = terms->id, .by = "test", .reason = "test"};
  int64_t deadline = hl__now_ms() + PATIENCE_MS, sent;
  uint64_t revoked;
  assert_int_equal(session->store->leases->revoke(session, &filter, deadline, &revoked, NULL),
                   HL_OK);
  assert_int_equal(refresh(session, terms, &sent), HL_ELOST);
}

/* Else its questions fill the memory: the takes of leases that were released or lost by now, and
   the ends of the presence, one for each last session that was closed. */
static void a_member_that_hangs_has_few_questions(void **state) {
  opened quorum;
  hl_error error;
  (void)state;
  assert_int_equal(open_quorum(&quorum, "a b gated-c", &error), HL_OK);
  atomic_store(&stuck, true);
  for (int i = 0; i < LEASES; i++) {
    char name[24];
    (void)snprintf(name, sizeof name, "lease %d", i);
    hl_lease_terms terms = lease_named(name);
    hl_session *session = session_new(quorum.store);
    assert_int_equal(take(session, &terms), HL_OK);
    if (i % 2)
      drop(session, &terms);
    else
      lose(session, &terms);
    ops->session_close(session);
  }
  unsigned queued = look_at(quorum.store, 2).queued;
  atomic_store(&stuck, false);
  close_quorum(&quorum);
  WAIT_UNTIL(atomic_load(&left) == 0);
  assert_in_range(queued, 0, FEW);
  assert_int_equal(records("gated-c", false), 0);
  assert_int_equal(records("gated-c", true), 0);
}

/* ------------------------------------------------------------------------ begin */

static int entry_remove(const char *path, const struct stat *st, int kind, struct FTW *ftw) {
  (void)st, (void)kind, (void)ftw;
  return remove(path);
}

static int test_begin(void **state) {
  (void)state;
  (void)snprintf(directory, sizeof directory, "/tmp/hierlock-quorum-XXXXXX");
  return mkdtemp(directory) ? 0 : -1;
}

/* A member that is no longer used may still be closed, and remove files, too. */
static int test_end(void **state) {
  int64_t end = hl__now_ms() + PATIENCE_MS;
  (void)state;
  while (nftw(directory, entry_remove, 16, FTW_DEPTH | FTW_PHYS) != 0 &&
         access(directory, F_OK) == 0 && hl__now_ms() < end)
    sleep_ms(1);
  return access(directory, F_OK) == 0 ? -1 : 0;
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, test_begin, test_end)

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      TEST(a_child_does_not_wait_for_what_its_parent_opens),
      TEST(an_exit_gives_up_no_lease_for_another),
      TEST(an_end_that_waits_does_not_end_the_presence_of_a_newer_lease),
      TEST(an_end_that_is_repeated_does_not_end_a_newer_presence),
      TEST(an_end_that_was_not_carried_out_is_repeated),
      TEST(a_presence_that_is_written_at_the_end_goes_too),
      TEST(a_presence_of_an_earlier_try_does_not_count),
      TEST(a_lock_that_is_waited_for_longer_than_a_presence_lasts_has_one),
      TEST(a_lock_is_not_granted_where_another_list_came_meanwhile),
      TEST(a_lease_is_healed_for_no_longer_than_a_quorum_has_it),
      TEST(a_release_is_not_lost_while_a_member_is_asked_again),
      TEST(a_release_is_not_lost_while_an_earlier_drop_is_not_answered),
      TEST(a_release_without_confirmation_is_waited_for_a_while),
      TEST(a_lease_is_healed_for_no_longer_than_a_refresh_that_is_not_answered),
      TEST(a_caller_that_waits_for_a_member_has_no_later_one),
      TEST(a_member_that_has_not_answered_a_drop_grants_the_lease_no_more),
      TEST(a_grant_that_is_not_refreshed_in_time_is_given_back),
      TEST(an_import_whose_time_is_up_at_the_second_look_is_late),
      TEST(a_session_whose_look_was_not_answered_is_closed),
      TEST(a_refused_member_is_closed_while_no_one_waits_for_that),
      TEST(a_member_that_is_opened_for_long_is_waited_for_once),
      TEST(a_member_that_has_no_room_for_a_while_is_opened_later),
      TEST(a_close_gives_up_no_lease_for_another),
      TEST(a_member_that_hangs_has_few_questions),
      cmocka_unit_test(nothing_is_left),
  };
  if (hl_layout_new(NULL, 0, 0, &layout, NULL) != HL_OK) return 1;
  gated = hl_store_file;
  gated.open = gated_open;
  gated.traits.blocks = true; /* as the clients of servers do */
  gated.close = gated_close;
  gated.session_open = gated_session_open;
  gated.session_close = gated_session_close;
  gated.settle = gated_settle;
  gated.take = gated_take;
  absent = gated;
  absent.open = absent_open;
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  int failed = cmocka_run_group_tests_name("the quorum", tests, NULL, NULL);
  hl_layout_unref(layout);
  return failed;
}
