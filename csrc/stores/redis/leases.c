/*
 * leases.c - the operations on records of leases (hl_lease_ops), but taking, which is
 * take.c's. Each is one script.
 */
#include "redis_store.h"

#include "mode.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Ready for a script. */
static int begin(hl__redis_session *session, int64_t deadline, hl_error *error) {
  int status = hl__redis_settle(session, deadline, error);
  if (status == HL_TIMEOUT)
    status = hl__error(error, HL_ECONNECTION, "the server has not answered what came before");
  return status;
}

/* Ready on the connection to the master of the tree. */
static int begin_at(hl_session *base, uint64_t place, int64_t deadline, hl__redis_session **at,
                    hl_error *error) {
  *at = hl__redis_session_of(base);
  int status = begin(*at, deadline, error);
  if (status == HL_OK) status = hl__redis_route(*at, (uint32_t)place, deadline, at, error);
  return status;
}

/* Runs it, disposes of it, and judges the answer, which is the caller's with HL_OK, unless reply
   is NULL. */
static int run(hl__redis_session *session, hl__redis_call *call, int64_t deadline,
               redisReply **reply, hl_error *error) {
  redisReply *unread;
  bool reads = reply != NULL;
  if (!reads) reply = &unread;
  *reply = NULL;
  int status = begin(session, deadline, error);
  if (status == HL_OK) status = hl__redis_call_run(session, call, deadline, false, reply, error);
  hl__redis_call_dispose(call);
  if (status) return status;
  status = hl__redis_judge(*reply, error);
  if (status == HL_OK && reads) return HL_OK;
  freeReplyObject(*reply);
  *reply = NULL;
  return status;
}

static void begin_call(hl__redis_call *call, const hl__redis_session *session,
                       hl__redis_script script, const hl_lease_terms *terms) {
  hl__redis_call_init(call, session->store, script, (uint32_t)terms->place);
  hl__redis_id(call, terms->id);
  hl__redis_id(call, terms->holder);
}

/* Adds the key of the server's memory, and the run id of the session's server: empty where the
   DSN wants no quarantine. */
static void memory_add(hl__redis_call *call, const hl__redis_session *session, uint64_t place) {
  const hl__redis_store *store = session->store;
  char memory[96];
  hl__redis_memory_key(store, (uint32_t)place, memory);
  hl__redis_text(call, memory);
  hl__redis_text(call, store->quarantine ? session->run : "");
}

static int lease_refresh(hl_session *base, const hl_lease_terms *terms, int64_t ttl,
                         int64_t deadline, int64_t *sent_ms, hl_error *error) {
  hl__redis_session *session;
  hl__redis_call call;
  int status = begin_at(base, terms->place, deadline, &session, error);
  if (status) return status;
  begin_call(&call, session, HL__REDIS_REFRESH, terms);
  hl__redis_number(&call, ttl);
  hl__redis_number(&call, (int64_t)terms->turn);
  memory_add(&call, session, terms->place);
  hl__redis_number(&call, (int64_t)(terms->token >> 8));
  status = run(session, &call, deadline, NULL, error);
  *sent_ms = call.sent_ms;
  if (status) return status;
  if (!hl__is_presence(terms->id)) hl__redis_longest_note(session->store, ttl);
  return hl__redis_replicated(session, deadline, error);
}

static int lease_inspect(hl_session *base, const hl_lease_terms *terms, int64_t deadline,
                         int64_t *left_ms, hl_error *error) {
  hl__redis_session *session;
  hl__redis_call call;
  redisReply *reply;
  int status = begin_at(base, terms->place, deadline, &session, error);
  if (status) return status;
  begin_call(&call, session, HL__REDIS_INSPECT, terms);
  hl__redis_number(&call, (int64_t)(terms->token >> 8));
  status = run(session, &call, deadline, &reply, error);
  if (status) return status;
  *left_ms = hl__redis_reply_number(reply, 1);
  freeReplyObject(reply);
  return HL_OK;
}

static int lease_drop(hl_session *base, const hl_lease_terms *terms, bool confirm, int64_t deadline,
                      hl_error *error) {
  hl__redis_session *session;
  hl__redis_call call;
  redisReply *reply;
  int status = begin_at(base, terms->place, deadline, &session, error);
  if (status) return status;
  begin_call(&call, session, HL__REDIS_DROP, terms);
  hl__redis_text(&call, terms->again ? "1" : "0");
  if (confirm) {
    status = run(session, &call, deadline, &reply, error);
    if (status) return status;
    bool gone = strcmp(hl__redis_reply_text(reply, 1), "gone") == 0;
    freeReplyObject(reply);
    return gone ? HL__ABSENT : HL_OK;
  }
  status = hl__redis_call_send(session, &call, error);
  hl__redis_call_dispose(&call);
  return status;
}

static int lease_recall(hl_session *base, const hl_lease_terms *terms, int64_t deadline,
                        hl_error *error) {
  hl__redis_session *session;
  hl__redis_call call;
  int status = begin_at(base, terms->place, deadline, &session, error);
  if (status) return status;
  hl__redis_call_init(&call, session->store, HL__REDIS_RECALL, (uint32_t)terms->place);
  hl__redis_id(&call, terms->id);
  return run(session, &call, deadline, NULL, error);
}

/* From that holder alone. *reply: {1, token}; {1, -1, holder}, where another one has it. */
static int adopt_from(hl__redis_session *session, const hl_request *request, const char *holder,
                      hl_grant *grant, redisReply **reply, hl_error *error) {
  const hl_store_config *config = session->store->config;
  hl_lease_terms terms = *request->lease;
  hl__redis_call call;
  terms.place = grant->place;
  begin_call(&call, session, HL__REDIS_ADOPT, &terms);
  hl__redis_id(&call, terms.secret);
  hl__redis_number(&call, terms.ttl);
  hl__redis_rows(&call, session->store, request->rows, request->n, request->names);
  hl__redis_text(&call, config->application);
  hl__redis_text(&call, config->host);
  hl__redis_number(&call, config->pid);
  memory_add(&call, session, terms.place);
  hl__redis_text(&call, holder);
  int status = run(session, &call, hl__redis_answer_by(session), reply, error);
  grant->sent_ms = call.sent_ms;
  return status;
}

static int lease_adopt(hl_session *base, const hl_request *request, hl_grant *grant,
                       hl_error *error) {
  hl__redis_session *session = hl__redis_session_of(base);
  int64_t token = -1;
  uint8_t found[16];
  char holder[33] = "";
  redisReply *reply;
  grant->place = request->rows[0].root;
  session->patience = hl__late_answer_by(request->deadline);
  int status = hl__redis_one_root(session->store, request->rows, request->n, error);
  if (status == HL_OK)
    status = begin_at(base, grant->place, hl__redis_answer_by(session), &session, error);
  while (status == HL_OK && token < 0) {
    status = adopt_from(session, request, holder, grant, &reply, error);
    if (status) break;
    token = hl__redis_reply_number(reply, 1);
    (void)snprintf(holder, sizeof holder, "%s", hl__redis_reply_text(reply, 2));
    freeReplyObject(reply);
    /* The lease may be a later import's. */
    if (token < 0 && atomic_load(&session->face->wakeup.interrupted))
      status = hl__error(error, HL_CANCELLED, "the import was interrupted");
    hl__id_read(holder, found);
    if (status == HL_OK && token < 0 && !hl__replaces(request->lease, found, grant))
      status = hl__record_refuse(HL__RECORD_IMPORTED, &(hl__record){HL__RECORD_FITS}, error);
  }
  if (status) return status;
  grant->token = (uint64_t)token << 8;
  hl__redis_longest_note(session->store, request->lease->ttl);
  return hl__redis_replicated(session, hl__redis_answer_by(session), error);
}

/* ------------------------------------------------------------ many records */

/* The questions for list.lua, beside the tree. */
typedef struct inquiry {
  hl_lease_filter filter;
  bool waits, revokes;
  const char *node; /* "": all that is said above; else only those who wait for this root */
  hl_holder_fn fn;
  void *context;
  int64_t deadline;
  uint64_t count;
} inquiry;

static void copy(char *out, size_t size, const char *text) {
  (void)snprintf(out, size, "%s", text);
}

static void holder_read(const redisReply *reply, hl_holder *holder) {
  enum { ID, OWNER, PATH, LABEL, APPLICATION, HOST, PID, MODE, SINCE, LEFT };
  *holder = (hl_holder){.pid = hl__redis_reply_number(reply, PID),
                        .since_ms = hl__redis_reply_number(reply, SINCE),
                        .mode = hl__mode_of_letter(*hl__redis_reply_text(reply, MODE)),
                        .kind = HL_LEASE};
  int64_t left = hl__redis_reply_number(reply, LEFT);
  holder->waiting = left < 0; /* it has no lease yet */
  if (holder->waiting) holder->kind = HL_SESSION;
  copy(holder->path, sizeof holder->path, hl__redis_reply_text(reply, PATH));
  copy(holder->label, sizeof holder->label, hl__redis_reply_text(reply, LABEL));
  copy(holder->application, sizeof holder->application, hl__redis_reply_text(reply, APPLICATION));
  copy(holder->host, sizeof holder->host, hl__redis_reply_text(reply, HOST));
  copy(holder->owner, sizeof holder->owner, hl__redis_reply_text(reply, OWNER));
  if (holder->waiting) return;
  holder->remaining_ms = left;
  copy(holder->id, sizeof holder->id, hl__redis_reply_text(reply, ID));
}

static int inquire_tree(hl__redis_session *session, inquiry *self, uint32_t root, hl_error *error) {
  static const uint8_t any[16] = {0};
  hl__redis_call call;
  redisReply *reply;
  hl__redis_call_init(&call, session->store, HL__REDIS_LIST, root);
  const hl_lease_filter *filter = &self->filter;
  char revocation[24] = ""; /* the number of the call that ends them */
  if (self->revokes)
    (void)snprintf(revocation, sizeof revocation, "%llx", (unsigned long long)filter->call);
  hl__redis_rows(&call, session->store, filter->rows, filter->n, filter->names);
  hl__redis_text(&call, filter->owner);
  hl__redis_id(&call, filter->id ? filter->id : any);
  hl__redis_text(&call, self->waits ? "1" : "0");
  hl__redis_text(&call, filter->over ? "1" : "0");
  hl__redis_text(&call, self->revokes ? "1" : "0");
  hl__redis_text(&call, filter->by);
  hl__redis_text(&call, filter->reason);
  hl__redis_text(&call, self->node);
  hl__redis_text(&call, revocation);
  hl__redis_number(&call, (int64_t)filter->most);
  int status = hl__redis_call_run(session, &call, self->deadline, false, &reply, error);
  hl__redis_call_dispose(&call);
  if (status) return status;
  if (self->revokes) self->count += (uint64_t)hl__redis_reply_number(reply, 0);
  for (size_t i = 0;
       !self->revokes && reply->type == REDIS_REPLY_ARRAY && i < (size_t)reply->elements; i++) {
    hl_holder holder;
    holder_read(reply->element[i], &holder);
    self->fn(self->context, &holder);
  }
  freeReplyObject(reply);
  return HL_OK;
}

/* Reads the keys of one step of SCAN: the leases of a tree, and the waiters of a root. SCAN may
   return a key twice, which *seen sees to. */
static int inquire_page(hl__redis_session *session, inquiry *self, const redisReply *keys,
                        uint64_t **seen, size_t *count, hl_error *error) {
  static const char leases[] = "leases", waiters[] = ":w";
  int status = HL_OK;
  for (size_t i = 0; i < (size_t)keys->elements && status == HL_OK; i++) {
    char node[128];
    const char *key = hl__redis_reply_text(keys, i), *kind;
    size_t size = strlen(key);
    const char *tag_at = strchr(key, '{');
    if (!tag_at || !(kind = strstr(tag_at, "}:"))) continue;
    uint32_t tag = (uint32_t)strtoul(tag_at + 1, NULL, 16);
    uint64_t name = tag;
    bool waits = strcmp(kind += 2, leases) != 0;
    if (waits) {
      /* "0:HASH:w" */
      if (!self->waits || strncmp(kind, "0:", 2) != 0 || size >= sizeof node ||
          strcmp(key + size - (sizeof waiters - 1), waiters) != 0)
        continue;
      name = strtoull(kind + 2, NULL, 16) | UINT64_C(1) << 63;
      (void)snprintf(node, sizeof node, "%.*s", (int)(size - (sizeof waiters - 1)), key);
    }
    bool known = false;
    for (size_t j = 0; j < *count; j++) known = known || (*seen)[j] == name;
    if (known) continue;
    uint64_t *grown = realloc(*seen, (*count + 1) * sizeof *grown);
    if (!grown) return hl__error_memory(error);
    *seen = grown;
    grown[(*count)++] = name;
    self->node = waits ? node : "";
    status = inquire_tree(session, self, tag, error);
    self->node = "";
  }
  return status;
}

/* All trees: a caller that asks for so much waits for a look at all keys. Every waiter waits for
   a root, at least shared. */
static int inquire_all(hl__redis_session *session, void *context, hl_error *error) {
  inquiry *self = context;
  char pattern[96], cursor[32] = "0";
  uint64_t *seen = NULL;
  size_t count = 0;
  int status;
  (void)snprintf(pattern, sizeof pattern, "%s:{*}:%s", session->store->prefix,
                 self->waits ? "[l0]*[sw]" : "leases");
  do {
    const char *words[] = {"SCAN", cursor, "MATCH", pattern, "COUNT", "1000"};
    redisReply *reply;
    status = hl__redis_command(session, self->deadline, 6, words, &reply, error);
    if (status) break;
    if (reply->type == REDIS_REPLY_ARRAY && reply->elements == 2 &&
        reply->element[1]->type == REDIS_REPLY_ARRAY) {
      copy(cursor, sizeof cursor, hl__redis_reply_text(reply, 0));
      status = inquire_page(session, self, reply->element[1], &seen, &count, error);
    } else {
      status = hl__error(error, HL_ESTORE, "the server answers what was not asked");
    }
    freeReplyObject(reply);
  } while (status == HL_OK && strcmp(cursor, "0") != 0);
  free(seen);
  return status;
}

static int inquire(hl_session *base, inquiry *self, hl_error *error) {
  hl__redis_session *session = hl__redis_session_of(base);
  int status = hl__redis_one_root(session->store, self->filter.rows, self->filter.n, error);
  if (status == HL_OK) status = begin(session, self->deadline, error);
  if (status) return status;
  if (!self->filter.n)
    return hl__redis_each_master(session, self->deadline, inquire_all, self, error);
  uint32_t root = self->filter.rows[0].root;
  status = hl__redis_route(session, root, self->deadline, &session, error);
  return status ? status : inquire_tree(session, self, root, error);
}

static int lease_list(hl_session *base, const hl_lease_filter *filter, hl_holder_fn fn,
                      void *context, int64_t deadline, hl_error *error) {
  inquiry self = {
      .filter = *filter, .node = "", .fn = fn, .context = context, .deadline = deadline};
  return inquire(base, &self, error);
}

static int lease_revoke(hl_session *base, const hl_lease_filter *filter, int64_t deadline,
                        uint64_t *count, hl_error *error) {
  inquiry self = {.filter = *filter, .revokes = true, .node = "", .deadline = deadline};
  self.filter.over = true; /* they may be refreshed */
  int status = inquire(base, &self, error);
  *count = self.count;
  return status;
}

int hl__redis_holders(hl_session *base, const hl_lease_filter *filter, hl_holder_fn fn,
                      void *context, int64_t deadline, hl_error *error) {
  inquiry self = {.filter = *filter,
                  .waits = true,
                  .node = "",
                  .fn = fn,
                  .context = context,
                  .deadline = deadline};
  return inquire(base, &self, error);
}

/* Raises the tokens of all trees: the number is kept beside them, for as long as the server
   keeps anything. */
static int lease_raise(hl_session *base, uint64_t token, int64_t deadline, hl_error *error) {
  hl__redis_session *session = hl__redis_session_of(base);
  hl__redis_call call;
  if (session->store->cluster)
    return hl__error(error, HL_EUNSUPPORTED,
                     "a quorum needs servers that raise the tokens of all trees at "
                     "once: Redis Cluster does not");
  hl__redis_call_init(&call, session->store, HL__REDIS_RAISE, 0);
  hl__redis_number(&call, (int64_t)(token >> 8));
  memory_add(&call, session, 0);
  int status = run(session, &call, deadline, NULL, error);
  return status ? status : hl__redis_replicated(session, deadline, error);
}

const hl_lease_ops hl__redis_leases = {.refresh = lease_refresh,
                                       .inspect = lease_inspect,
                                       .drop = lease_drop,
                                       .recall = lease_recall,
                                       .convert = hl__redis_convert,
                                       .adopt = lease_adopt,
                                       .list = lease_list,
                                       .revoke = lease_revoke,
                                       .raise = lease_raise};
