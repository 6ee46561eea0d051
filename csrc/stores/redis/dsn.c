/*
 * dsn.c - the DSNs of Redis and Valkey:
 *
 *     redis://[user:password@]host[:port][/database][?parameters]
 *     rediss://…                     the same over TLS; valkey://, valkeys:// are other names of both
 *     redis+sentinel://[user:password@]host[:port][,host[:port]]...[/database]?service=name
 *                                    sentinels, which are asked for the master of that name; rediss+sentinel:// …
 *     redis+unix://[user:password@]/path/to.sock[?database=1]
 */
#include "redis_store.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define CONNECT_TIMEOUT_MS 10000
#define PREFIX_MAX 64

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
  if (at) {
    *at = '\0';
    char *password = strchr(text, ':');
    if (password) *password++ = '\0';
    if (*text) dsn->user = text;
    dsn->password = password;
    int status = hl__dsn_decode(text, "user", error);
    if (status == HL_OK) status = hl__dsn_decode(password, "password", error);
    if (status) return status;
  }
  if (!path || (!at && path != text) || (at && path != at + 1))
    return hl__error(error, HL_EDSN,
                     "write a socket in the DSN as redis+unix:///path/to.sock");
  dsn->socket = path;
  int status = hl__dsn_decode(path, "socket", error);
  return status ? status : hl__dsn_params(params, true, dsn, error);
}

static int parse_host(char *text, hl_dsn *dsn, hl_error *error) {
  if (by_sentinels(dsn)) { /* sentinel.c reads them */
    if (*text) dsn->host = text;
    return HL_OK;
  }
  if (!strchr(text, ',')) return hl__dsn_host(text, dsn, error);
  return hl__error(error, HL_EDSN, "the DSN names several hosts: write redis+sentinel:// for "
                   "sentinels");
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
  /* It would log in as nobody, or as somebody else. */
  if (status == HL_OK && dsn->user && !dsn->password && !getenv("REDISCLI_AUTH"))
    return hl__error(error, HL_EDSN,
                     "the DSN names a user and no password: write "
                     "redis://user:password@host, or redis://:password@host for "
                     "what Symfony writes as redis://password@host");
  return status;
}

/* ---------------------------------------------------------- parameters */

static int parse_seconds(const hl_dsn_param *param, double most, int64_t *ms,
                         hl_error *error) {
  char *end;
  double seconds = strtod(param->value, &end);
  if (end == param->value || *end || !(seconds >= 0 && seconds <= most))
    return hl__error(error, HL_EDSN,
                     "the parameter %s in the DSN must be a number of seconds",
                     param->name);
  *ms = (int64_t)(seconds * 1000 + 0.5);
  return HL_OK;
}

static int parse_number(const char *text, const char *what, unsigned most,
                        unsigned *number, hl_error *error) {
  char *end;
  unsigned long value = strtoul(text, &end, 10);
  if (*text < '0' || *text > '9' || *end || value > most)
    return hl__error(error, HL_EDSN, "the %s in the DSN must be a number, 0 to %u",
                     what, most);
  *number = (unsigned)value;
  return HL_OK;
}

/* It is a part of keys, of patterns and of privileges: nothing odd. */
static int parse_prefix(hl__redis_store *store, const char *value,
                        hl_error *error) {
  static const char good[] = "abcdefghijklmnopqrstuvwxyz"
                             "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.:-";
  size_t size = strlen(value);
  if (size < 1 || size > PREFIX_MAX || strspn(value, good) != size)
    return hl__error(error, HL_EDSN,
                     "the prefix in the DSN must have 1 to %d of the characters "
                     "A-Z a-z 0-9 _ . : -",
                     PREFIX_MAX);
  store->prefix = value;
  return HL_OK;
}

/* The words that MySQL's DSNs have. */
static int parse_tls(hl__redis_store *store, const char *value,
                     hl_error *error) {
  static const char *const modes[] = {
      [HL__REDIS_TLS_REQUIRED] = "required",
      [HL__REDIS_TLS_VERIFY_CA] = "verify-ca",
      [HL__REDIS_TLS_VERIFY_IDENTITY] = "verify-identity"};
  for (unsigned i = 1; i < sizeof modes / sizeof *modes; i++) {
    if (strcmp(value, modes[i]) != 0) continue;
    store->tls = (hl__redis_tls_mode)i;
    return HL_OK;
  }
  return hl__error(error, HL_EDSN,
                   "the parameter tls in the DSN must be required, verify-ca or "
                   "verify-identity");
}

static const char **text_of(hl__redis_store *store, const char *name) {
  if (by_sentinels(store->config->dsn)) {
    if (strcmp(name, "service") == 0) return &store->service;
    if (strcmp(name, "sentinel_user") == 0) return &store->sentinel_user;
    if (strcmp(name, "sentinel_password") == 0) return &store->sentinel_password;
  }
  if (strcmp(name, "tls_ca") == 0) return &store->tls_ca;
  if (strcmp(name, "tls_cert") == 0) return &store->tls_cert;
  if (strcmp(name, "tls_key") == 0) return &store->tls_key;
  return NULL;
}

static int parse_param(hl__redis_store *store, const hl_dsn_param *param,
                       hl_error *error) {
  if (strcmp(param->name, "prefix") == 0)
    return parse_prefix(store, param->value, error);
  if (strcmp(param->name, "database") == 0)
    return parse_number(param->value, "database", 65535, &store->database,
                        error);
  if (strcmp(param->name, "wait_replicas") == 0)
    return parse_number(param->value, "parameter wait_replicas", 100,
                        &store->wait_replicas, error);
  if (strcmp(param->name, "connect_timeout") == 0) {
    int status = parse_seconds(param, 86400, &store->connect_timeout, error);
    if (status == HL_OK && store->connect_timeout < 1) store->connect_timeout = 1;
    return status;
  }
  if (strcmp(param->name, "quarantine") == 0)
    return parse_seconds(param, 315360000, &store->quarantine, error);
  if (strcmp(param->name, "tls") == 0) return parse_tls(store, param->value, error);
  const char **text = text_of(store, param->name);
  if (text) {
    *text = param->value;
    return HL_OK;
  }
  return hl__error(error, HL_EDSN,
                   "unknown parameter '%.40s' in the DSN: prefix, database, "
                   "wait_replicas, connect_timeout, quarantine, tls, tls_ca, "
                   "tls_cert and tls_key are known%s",
                   param->name,
                   by_sentinels(store->config->dsn)
                       ? ", and service, sentinel_user and sentinel_password"
                       : "");
}

int hl__redis_params(hl__redis_store *store, hl_error *error) {
  const hl_dsn *dsn = store->config->dsn;
  int status = HL_OK;
  store->prefix = "hierlock";
  store->connect_timeout = CONNECT_TIMEOUT_MS;
  store->quarantine = store->config->hold_timeout;
  bool encrypts = scheme_is(dsn, "rediss:") || scheme_is(dsn, "valkeys:") ||
                  scheme_is(dsn, "rediss+sentinel:") ||
                  scheme_is(dsn, "valkeys+sentinel:");
  if (encrypts) store->tls = HL__REDIS_TLS_VERIFY_IDENTITY;
  if (dsn->database)
    status = parse_number(dsn->database, "database", 65535, &store->database,
                          error);
  for (unsigned i = 0; i < dsn->param_count && status == HL_OK; i++)
    status = parse_param(store, &dsn->params[i], error);
  (void)snprintf(store->own_names, sizeof store->own_names, "%s:", store->prefix);
  store->base.own_names = store->own_names;
  if (status == HL_OK && !encrypts && (store->tls || store->tls_ca || store->tls_cert || store->tls_key))
    status = hl__error(error, HL_EDSN,
                       "the DSN has parameters of TLS: write rediss:// for it");
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
