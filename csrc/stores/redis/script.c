/*
 * script.c - the scripts, and their arguments. A server keeps scripts by their digests until
 * it is restarted or told to forget them (SCRIPT FLUSH): then it gets the text again.
 */
#include "hmac.h"
#include "mode.h"
#include "redis_store.h"

#include "scripts.h" /* made of scripts/ by the Makefile */

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static const char *const bodies[HL__REDIS_SCRIPTS] = {
    [HL__REDIS_TAKE] = hl__redis_lua_take,       [HL__REDIS_LEAVE] = hl__redis_lua_leave,
    [HL__REDIS_REFRESH] = hl__redis_lua_refresh, [HL__REDIS_INSPECT] = hl__redis_lua_inspect,
    [HL__REDIS_DROP] = hl__redis_lua_drop,       [HL__REDIS_RECALL] = hl__redis_lua_recall,
    [HL__REDIS_ADOPT] = hl__redis_lua_adopt,     [HL__REDIS_CONVERT] = hl__redis_lua_convert,
    [HL__REDIS_LIST] = hl__redis_lua_list,       [HL__REDIS_RAISE] = hl__redis_lua_raise,
};

/* The whole text; the caller frees it. Scripts that are sent whole, drop and leave, do without
   grants.lua: the server digests all of a text before it runs it. */
static char *script_text(hl__redis_script script) {
  bool grants = script != HL__REDIS_DROP && script != HL__REDIS_LEAVE;
  bool remembers = script == HL__REDIS_TAKE || script == HL__REDIS_REFRESH ||
                   script == HL__REDIS_ADOPT || script == HL__REDIS_CONVERT;
  const char *more = grants ? hl__redis_lua_grants : "";
  const char *memory = remembers ? hl__redis_lua_amnesia : "";
  size_t size =
      strlen(hl__redis_lua_common) + strlen(more) + strlen(memory) + strlen(bodies[script]) + 1;
  char *text = malloc(size);
  if (text) {
    strcpy(text, hl__redis_lua_common);
    strcat(text, more);
    strcat(text, memory);
    strcat(text, bodies[script]);
  }
  return text;
}

/* --------------------------------------------------------------- words */

static char *room(hl__redis_call *call, size_t size) {
  if (call->failed || call->n == sizeof call->words / sizeof *call->words) {
    call->failed = true;
    return NULL;
  }
  if (call->used + size > call->capacity) {
    size_t capacity = (call->used + size) * 2;
    char *grown = malloc(capacity);
    if (!grown) {
      call->failed = true;
      return NULL;
    }
    memcpy(grown, call->bytes, call->used);
    if (call->bytes != call->inside) free(call->bytes);
    call->bytes = grown;
    call->capacity = capacity;
  }
  call->words[call->n].at = call->used;
  call->words[call->n++].size = size;
  call->used += size;
  return call->bytes + call->used - size;
}

static void bytes_add(hl__redis_call *call, const void *data, size_t size) {
  char *at = room(call, size);
  if (at && size) memcpy(at, data, size);
}

void hl__redis_text(hl__redis_call *call, const char *text) {
  bytes_add(call, text, text ? strlen(text) : 0);
}

void hl__redis_number(hl__redis_call *call, int64_t number) {
  char digits[24];
  (void)snprintf(digits, sizeof digits, "%" PRId64, number);
  hl__redis_text(call, digits);
}

void hl__redis_id(hl__redis_call *call, const uint8_t id[16]) {
  static const uint8_t none[16] = {0};
  char digits[33] = "";
  if (memcmp(id, none, 16) != 0) (void)hl__hex(digits, id, 16);
  hl__redis_text(call, digits);
}

/* "xPREFIX:{ROOT}:LEVEL:HASH\n" */
#define ROW_MAX 128

/* "x~NAME\n": on one line, and fit to be shown, as its bytes may be any. */
static size_t name_write(char *out, char mode, hl_id name) {
  static const char digits[] = "0123456789ABCDEF";
  const unsigned char *bytes = (const unsigned char *)name.data;
  char *at = out;
  *at++ = mode;
  *at++ = '~';
  for (size_t i = 0; i < name.size; i++) {
    if (bytes[i] > ' ' && bytes[i] < 0x7f && bytes[i] != '%') {
      *at++ = (char)bytes[i];
      continue;
    }
    *at++ = '%';
    *at++ = digits[bytes[i] >> 4];
    *at++ = digits[bytes[i] & 15];
  }
  *at++ = '\n';
  return (size_t)(at - out);
}

uint64_t hl__redis_name_key(const char *name, size_t size) {
  uint8_t digest[HL__HMAC_SIZE];
  uint64_t key;
  hl__sha256(name, size, digest);
  memcpy(&key, digest, sizeof key);
  return key;
}

/* As hl__request_name. */
static hl_id name_of(const char *names, const hl_row *row) {
  const hl_request request = {.names = names};
  return hl__request_name(&request, row);
}

void hl__redis_rows(hl__redis_call *call, const hl__redis_store *store, const hl_row *rows,
                    size_t n, const char *names) {
  size_t used = 0, size = n * ROW_MAX + 1;
  for (size_t i = 0; names && i < n; i++)
    if (rows[i].level == HL_LEVEL_NAMED) size += 3 * name_of(names, &rows[i]).size;
  char *text = malloc(size);
  if (!text) {
    call->failed = true;
    return;
  }
  for (size_t i = 0; i < n; i++) {
    char mode = rows[i].mode == HL_SHARED ? 's' : 'x';
    if (rows[i].level != HL_LEVEL_NAMED)
      used += (size_t)snprintf(text + used, ROW_MAX, "%c%s:{%08" PRIx32 "}:%u:%015" PRIx64 "\n",
                               mode, store->prefix, rows[i].root, rows[i].level, rows[i].bucket);
    else if (names)
      used += name_write(text + used, mode, name_of(names, &rows[i]));
  }
  bytes_add(call, text, used);
  free(text);
}

void hl__redis_roots(hl__redis_call *call, const hl_row *rows, size_t n) {
  size_t count = hl__roots(&rows, n);
  char *at = room(call, count * 9);
  char tag[10];
  for (size_t i = 0; at && i < count; i++) {
    (void)snprintf(tag, sizeof tag, "%08" PRIx32 " ", rows[i].root);
    memcpy(at + i * 9, tag, 9);
  }
}

void hl__redis_call_init(hl__redis_call *call, const hl__redis_store *store,
                         hl__redis_script script, uint32_t root) {
  char key[96], tag[9];
  call->script = script;
  call->sent_ms = 0;
  call->n = call->used = 0;
  call->bytes = call->inside;
  call->capacity = sizeof call->inside;
  call->failed = false;
  (void)snprintf(tag, sizeof tag, "%08" PRIx32, root);
  /* For Redis Cluster: where it is. */
  (void)snprintf(key, sizeof key, "%s:{%s}:n", store->prefix, tag);
  hl__redis_text(call, "1");
  hl__redis_text(call, key);
  hl__redis_text(call, store->prefix);
  hl__redis_text(call, tag);
}

void hl__redis_call_dispose(hl__redis_call *call) {
  if (call->bytes != call->inside) free(call->bytes);
  call->bytes = call->inside;
}

/* ------------------------------------------------------------- running */

static int queue(hl__redis_session *session, hl__redis_call *call, const char *command,
                 const char *script, hl_error *error) {
  const char *words[66] = {command, script};
  size_t sizes[66] = {strlen(command), strlen(script)};
  if (call->failed) return hl__error_memory(error);
  for (size_t i = 0; i < call->n; i++) {
    words[i + 2] = call->bytes + call->words[i].at;
    sizes[i + 2] = call->words[i].size;
  }
  return hl__redis_queue(session, call->n + 2, words, sizes, error);
}

/* By its digest: the server may answer that it does not know it. */
static int send_digest(hl__redis_session *session, hl__redis_call *call, hl_error *error) {
  char digest[41];
  hl__redis_store *store = session->store;
  hl__redis_store_lock(store);
  strcpy(digest, store->digests[call->script]);
  hl__redis_store_unlock(store);
  int status = queue(session, call, "EVALSHA", digest, error);
  if (status == HL_OK) status = hl__redis_flush(session, error);
  return status;
}

/* Sends the script whole: no caller reads the answer soon and could send it once more. */
int hl__redis_call_send(hl__redis_session *session, hl__redis_call *call, hl_error *error) {
  char *text = script_text(call->script);
  int status = text ? queue(session, call, "EVAL", text, error) : hl__error_memory(error);
  free(text);
  return status ? status : hl__redis_unawaited(session, error);
}

/* An interruption leaves the server so long to answer. */
#define LAST_WORD_MS 500

static int run(hl__redis_session *session, int64_t deadline, bool interruptible, redisReply **reply,
               hl_error *error) {
  int status = hl__redis_await(session, deadline, interruptible, reply, error);
  if (status != HL_CANCELLED) return status;
  return hl__redis_await(session, hl__now_ms() + LAST_WORD_MS, false, reply, error);
}

int hl__redis_call_run(hl__redis_session *session, hl__redis_call *call, int64_t deadline,
                       bool interruptible, redisReply **reply, hl_error *error) {
  call->sent_ms = hl__boot_ms();
  *reply = NULL;
  session->moving = false;
  int status = send_digest(session, call, error);
  if (status == HL_OK) status = run(session, deadline, interruptible, reply, error);
  if (status == HL_OK && (*reply)->type == REDIS_REPLY_ERROR &&
      strncmp((*reply)->str, "NOSCRIPT", 8) == 0) {
    char *text = script_text(call->script);
    freeReplyObject(*reply);
    *reply = NULL;
    call->sent_ms = hl__boot_ms();
    status = text ? queue(session, call, "EVAL", text, error) : hl__error_memory(error);
    free(text);
    if (status == HL_OK) status = run(session, deadline, interruptible, reply, error);
  }
  bool refused = status == HL_OK && (*reply)->type == REDIS_REPLY_ERROR;
  if (refused) call->sent_ms = 0;
  /* The answer may still come, and must not be taken for another's. */
  if (status == HL_TIMEOUT) status = hl__error(error, HL_ECONNECTION, "the server does not answer");
  if (status || !refused) return status;
  status = hl__redis_error(session, (*reply)->str, error);
  freeReplyObject(*reply);
  *reply = NULL;
  return status;
}

int hl__redis_scripts_load(hl__redis_session *session, int64_t deadline, hl_error *error) {
  hl__redis_store *store = session->store;
  for (unsigned i = 0; i < HL__REDIS_SCRIPTS; i++) {
    char *text = script_text(i);
    if (!text) return hl__error_memory(error);
    const char *words[] = {"SCRIPT", "LOAD", text};
    redisReply *reply;
    int status = hl__redis_command(session, deadline, 3, words, &reply, error);
    free(text);
    if (status) return status;
    bool good = reply->type == REDIS_REPLY_STRING && reply->len == 40;
    hl__redis_store_lock(store);
    if (good) memcpy(store->digests[i], reply->str, 41);
    hl__redis_store_unlock(store);
    freeReplyObject(reply);
    if (!good) return hl__error(error, HL_ESTORE, "the server answers what was not asked");
  }
  return HL_OK;
}

int64_t hl__redis_reply_number(const redisReply *reply, size_t i) {
  if (reply->type == REDIS_REPLY_INTEGER && i == 0) return reply->integer;
  if (reply->type != REDIS_REPLY_ARRAY || i >= (size_t)reply->elements) return 0;
  const redisReply *element = reply->element[i];
  if (element->type == REDIS_REPLY_INTEGER) return element->integer;
  return element->type == REDIS_REPLY_STRING ? strtoll(element->str, NULL, 10) : 0;
}

const char *hl__redis_reply_text(const redisReply *reply, size_t i) {
  if (reply->type != REDIS_REPLY_ARRAY || i >= (size_t)reply->elements) return "";
  const redisReply *element = reply->element[i];
  return element->type == REDIS_REPLY_STRING ? element->str : "";
}

void hl__redis_longest_note(hl__redis_store *store, int64_t ttl) {
  int_fast64_t before = atomic_load(&store->longest);
  while (before < ttl && !atomic_compare_exchange_weak(&store->longest, &before, ttl)) {}
}

/* How long replicas are waited for, and the answer that says so. */
#define REPLICATED_MS 500
#define REPLICATED_ANSWER_MS 50

int hl__redis_replicated(hl__redis_session *session, int64_t deadline, hl_error *error) {
  char count[24], wait[24];
  const char *words[] = {"WAIT", count, wait};
  int64_t left = hl__left_ms(deadline) - REPLICATED_ANSWER_MS;
  unsigned wanted = session->store->wait_replicas;
  redisReply *reply;
  if (!wanted) return HL_OK;
  (void)snprintf(count, sizeof count, "%u", wanted);
  if (left > REPLICATED_MS) left = REPLICATED_MS;
  (void)snprintf(wait, sizeof wait, "%lld", (long long)(left > 1 ? left : 1));
  int status = hl__redis_command(session, hl__answer_by(deadline), 3, words, &reply, error);
  if (status) return status;
  int64_t have = reply->type == REDIS_REPLY_INTEGER ? reply->integer : 0;
  freeReplyObject(reply);
  if (have >= (int64_t)wanted) return HL_OK;
  (void)hl__error(error, HL_ESTORE, "%lld of the %u replicas have it that wait_replicas wants",
                  (long long)have, wanted);
  if (error) error->retryable = true;
  return HL_ESTORE;
}

/* {1, ...}: HL_OK. {0, why, by, reason}: there is no record of that holder; the script has judged
   as hl__record_judge does. */
int hl__redis_judge(const redisReply *reply, hl_error *error) {
  static const struct {
    const char *why;
    hl__verdict verdict;
  } verdicts[] = {{"revoked", HL__RECORD_REVOKED},
                  {"imported", HL__RECORD_IMPORTED},
                  {"mismatch", HL__RECORD_MISMATCH},
                  {"late", HL__RECORD_LATE}};
  const hl__record record = {.by = hl__redis_reply_text(reply, 2),
                             .reason = hl__redis_reply_text(reply, 3),
                             .forgets = true};
  const char *why = hl__redis_reply_text(reply, 1);
  hl__verdict verdict = HL__RECORD_GONE;
  if (hl__redis_reply_number(reply, 0) == 1) return HL_OK;
  for (size_t i = 0; i < sizeof verdicts / sizeof *verdicts; i++)
    if (strcmp(why, verdicts[i].why) == 0) verdict = verdicts[i].verdict;
  return hl__record_refuse(verdict, &record, error);
}
