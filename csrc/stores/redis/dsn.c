/*
 * dsn.c - the DSNs of Redis and Valkey:
 *
 *     redis://[user:password@]host[:port][/database][?parameters]
 *     rediss://…                     over TLS; valkey:// and valkeys:// are other names of both
 *     redis+sentinel://[user:password@]host[:port][,host[:port]]...[/database]?service=name
 *                                    asks the sentinels for the master of that name;
 *                                    rediss+sentinel://… over TLS
 *     redis+unix://[user:password@]/path/to.sock[?database=1]
 */
#include "redis_store.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define CONNECT_TIMEOUT_MS 10000
#define DATABASE_MAX 65535

static bool scheme_is(const hl_dsn *dsn, const char *scheme) {
  return strncasecmp(dsn->text, scheme, strlen(scheme)) == 0;
}

static bool by_sentinels(const hl_dsn *dsn) {
  return scheme_is(dsn, "redis+sentinel:") || scheme_is(dsn, "rediss+sentinel:") ||
         scheme_is(dsn, "valkey+sentinel:") || scheme_is(dsn, "valkeys+sentinel:");
}

static int parse_socket(char *text, hl_dsn *dsn, hl_error *error) {
  char *params = strchr(text, '?');
  if (params) *params++ = '\0';
  char *path = strchr(text, '/'), *at = strrchr(text, '@');
  if (at && path && at > path) at = NULL; /* of the path */
  int status = hl__dsn_account(text, at, dsn, error);
  if (status) return status;
  if (!path || (!at && path != text) || (at && path != at + 1))
    return hl__error(error, HL_EDSN, "write a socket in the DSN as redis+unix:///path/to.sock");
  dsn->socket = path;
  status = hl__dsn_decode(path, "socket", error);
  return status ? status : hl__dsn_params(params, true, dsn, error);
}

static int parse_host(char *text, hl_dsn *dsn, hl_error *error) {
  if (by_sentinels(dsn)) { /* sentinel.c reads them */
    if (*text) dsn->host = text;
    return HL_OK;
  }
  if (!strchr(text, ',')) return hl__dsn_host(text, dsn, error);
  return hl__error(error, HL_EDSN,
                   "the DSN names several hosts: write redis+sentinel:// for sentinels");
}

/* redis:///path/to.sock, where a database is only a number; other clients write so, with a
   password before it, perhaps. */
static bool is_socket(const char *text) {
  const char *path = strchr(text, '/');
  if (!path || (path != text && path[-1] != '@')) return false;
  size_t digits = strspn(path + 1, "0123456789");
  return path[1 + digits] && path[1 + digits] != '?';
}

int hl__redis_dsn(char *text, hl_dsn *dsn, hl_error *error) {
  if (scheme_is(dsn, "redis+unix:")) return parse_socket(text, dsn, error);
  if (is_socket(text))
    return hl__error(error, HL_EDSN,
                     "the DSN names no host: write a socket as "
                     "redis+unix://[:password@]/path/to.sock[?database=1]");
  int status = hl__dsn_url(text, parse_host, dsn, error);
  /* The login would be as no user, or as another. */
  if (status == HL_OK && dsn->user && !dsn->password && !getenv("REDISCLI_AUTH"))
    return hl__error(error, HL_EDSN,
                     "the DSN names a user and no password: write redis://user:password@host, or "
                     "redis://:password@host for what Symfony writes as redis://password@host");
  return status;
}

/* ---------------------------------------------------------- parameters */

/* The words that MySQL's DSNs have. */
static const hl__dsn_word tls_words[] = {{"required", HL__REDIS_TLS_REQUIRED},
                                         {"verify-ca", HL__REDIS_TLS_VERIFY_CA},
                                         {"verify-identity", HL__REDIS_TLS_VERIFY_IDENTITY},
                                         {.word = NULL}};

#define AT(field) .offset = offsetof(hl__redis_store, field)
static const hl__dsn_known params[] = {
    {"service", HL__DSN_TEXT, AT(service)},
    {"sentinel_user", HL__DSN_TEXT, AT(sentinel_login.user)},
    {"sentinel_password", HL__DSN_TEXT, AT(sentinel_login.password)},
#define OF_SENTINELS 3
    {"prefix", HL__DSN_PREFIX, AT(prefix)},
    {"database", HL__DSN_NUMBER, AT(database), .most = DATABASE_MAX},
    {"wait_replicas", HL__DSN_NUMBER, AT(wait_replicas), .most = 100},
    {"connect_timeout", HL__DSN_SECONDS, AT(connect_timeout), .most = HL__DSN_DAY},
    {"quarantine", HL__DSN_SECONDS, AT(quarantine), .most = 315360000, .or_zero = true},
    {"tls", HL__DSN_WORD, AT(tls), .words = tls_words},
    {"tls_ca", HL__DSN_TEXT, AT(tls_ca)},
    {"tls_cert", HL__DSN_TEXT, AT(tls_cert)},
    {"tls_key", HL__DSN_TEXT, AT(tls_key)},
    {.name = NULL}};
#undef AT

int hl__redis_params(hl__redis_store *store, hl_error *error) {
  const hl_dsn *dsn = store->config->dsn;
  int status = HL_OK;
  store->prefix = "hierlock";
  store->connect_timeout = CONNECT_TIMEOUT_MS;
  store->quarantine = store->config->hold_timeout;
  bool encrypts = scheme_is(dsn, "rediss:") || scheme_is(dsn, "valkeys:") ||
                  scheme_is(dsn, "rediss+sentinel:") || scheme_is(dsn, "valkeys+sentinel:");
  if (encrypts) store->tls = HL__REDIS_TLS_VERIFY_IDENTITY;
  if (dsn->database)
    status = hl__dsn_number(dsn->database, "the database in the DSN", DATABASE_MAX,
                            &store->database, error);
  if (status == HL_OK)
    status = hl__dsn_store(dsn, by_sentinels(dsn) ? params : params + OF_SENTINELS, store, error);
  (void)snprintf(store->own_names, sizeof store->own_names, "%s:", store->prefix);
  store->base.own_names = store->own_names;
  if (status == HL_OK && !encrypts &&
      (store->tls || store->tls_ca || store->tls_cert || store->tls_key))
    status = hl__error(error, HL_EDSN, "the DSN has parameters of TLS: write rediss:// for it");
  if (status == HL_OK && store->tls_key && !store->tls_cert)
    status = hl__error(error, HL_EDSN, "the DSN has tls_key without tls_cert");
  if (status == HL_OK && by_sentinels(dsn)) {
    if (!store->service || !*store->service)
      return hl__error(error, HL_EDSN,
                       "the DSN names sentinels: add ?service= with the name "
                       "of the master that they watch");
    status = hl__redis_sentinels_read(store, error);
  }
  return status;
}
