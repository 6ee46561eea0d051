/*
 * null.c - the store that grants everything at once. For tests of programs that use hierlock:
 * they run without a server and without waiting. Never use it as a lock: it keeps no program out
 * of anything.
 */
#include "clock.h"
#include "error.h"
#include "store.h"

#include <stdatomic.h>
#include <stdlib.h>

/* Fencing tokens have 56 bits of counter above 8 zero bits, as in the other stores. Unix seconds
   in the counter's upper 32 bits let tokens grow from one run of a program to the next. */
#define TOKEN_SECOND_BITS 24
#define TOKEN_LOW_BITS 8

/* The last token's counter, of the whole process; 0 before the first. */
static _Atomic uint64_t token_counter;

static uint64_t token_next(void) {
  uint64_t never = 0;
  uint64_t seed = (uint64_t)(hl__unix_ms() / 1000) << TOKEN_SECOND_BITS;
  (void)atomic_compare_exchange_strong(&token_counter, &never, seed);
  return (atomic_fetch_add(&token_counter, 1u) + 1) << TOKEN_LOW_BITS;
}

static int null_parse(char *text, hl_dsn *dsn, hl_error *error) {
  static const hl__dsn_known none[] = {{.name = NULL}};
  if (*text && *text != '?')
    return hl__error(error, HL_EDSN, "nothing may follow 'null:' in a DSN");
  int status = hl__dsn_path(text, "directory", dsn, error);
  return status ? status : hl__dsn_store(dsn, none, NULL, error);
}

static int null_open(const hl_store_config *config, hl_store **store, hl_error *error) {
  *store = calloc(1, sizeof **store);
  if (!*store) return hl__error_memory(error);
  (*store)->layout = hl_layout_ref(config->layout);
  return HL_OK;
}

static void null_close(hl_store *store) {
  hl_layout_unref(store->layout);
  free(store);
}

static int null_session_open(hl_store *store, int64_t deadline, hl_session **session,
                             hl_error *error) {
  (void)deadline;
  *session = calloc(1, sizeof **session);
  if (!*session) return hl__error_memory(error);
  (*session)->store = store;
  return HL_OK;
}

static void null_session_close(hl_session *session) { free(session); }

static int null_take(hl_session *session, const hl_request *request, hl_grant *grant,
                     hl_error *error) {
  (void)session, (void)request, (void)error;
  grant->token = token_next();
  grant->sent_ms = hl__boot_ms();
  return HL_OK;
}

static int null_downgrade(hl_session *session, const hl_request *request, int64_t *sent_ms,
                          hl_error *error) {
  (void)request;
  return hl__session_renewed(session, sent_ms, error);
}

static int null_settle(hl_session *session, int64_t deadline, hl_error *error) {
  (void)session, (void)deadline, (void)error;
  return HL_OK;
}

static void null_interrupt(hl_session *session) { (void)session; }

static int null_holders(hl_session *session, const hl_lease_filter *filter, hl_holder_fn fn,
                        void *context, int64_t deadline, hl_error *error) {
  (void)session, (void)filter, (void)fn;
  (void)context, (void)deadline, (void)error;
  return HL_OK;
}

const hl_store_ops hl_store_null = {
    .abi = HL_STORE_ABI,
    .scheme = "null",
    .traits = {.grants_all = true, .updates = true},
    .parse = null_parse,
    .open = null_open,
    .close = null_close,
    .session_open = null_session_open,
    .session_close = null_session_close,
    .take = null_take,
    .downgrade = null_downgrade,
    .give_back = hl__session_rests,
    .renew = hl__session_renewed,
    .settle = null_settle,
    .check = hl__session_rests,
    .interrupt = null_interrupt,
    .holders = null_holders,
};
