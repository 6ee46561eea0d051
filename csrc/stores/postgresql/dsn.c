/*
 * dsn.c - the DSNs of PostgreSQL: URLs and lists of key=value, both in libpq's form. Whatever a DSN
 * does not say, libpq takes from its environment (PGHOST ...), service files and ~/.pgpass.
 * Parameters are libpq's own, and go to it.
 */
#include "postgresql_store.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CONNECT_TIMEOUT_MS 10000

/* Parses host[:port] or [ipv6][:port], or several, separated by commas. libpq uses the first that
   answers and fits target_session_attrs. libpq needs a list of hosts, made in place, and a
   list of ports, made in the room behind the copy. */
static int parse_hosts(char *text, hl_dsn *dsn, hl_error *error) {
  if (!strchr(text, ',')) return hl__dsn_host(text, dsn, error);
  char *hosts = text, *host = text;
  char *ports = dsn->text + dsn->size / 2, *port = ports;
  for (char *rest = text; rest;) {
    hl_dsn one = {0};
    char *piece = rest;
    if (!hl__dsn_cut(&rest, ",")) rest = NULL;
    int status = hl__dsn_host(piece, &one, error);
    if (status) return status;
    if (one.host) {
      size_t size = strlen(one.host);
      memmove(host, one.host, size);
      host += size;
    }
    if (one.port) port += sprintf(port, "%u", one.port);
    *host++ = *port++ = ',';
  }
  host[-1] = port[-1] = '\0';
  dsn->host = hosts;
  return hl__dsn_param_add(dsn, "port", ports, error);
}

/* Parses one value of a list of key=value at *text: between ' ', or up to the next space; \ takes
   the next character literally. Moves *text behind it. NULL: a ' is not closed. */
static char *parse_value(char **text) {
  char *in = *text, *value = in, *out = in;
  bool quoted = *in == '\'';
  if (quoted) in++;
  while (*in && (quoted ? *in != '\'' : !strchr(" \t\n\r\f\v", *in))) {
    if (*in == '\\' && in[1]) in++;
    *out++ = *in++;
  }
  if (quoted && !*in) return NULL;
  if (*in) in++;
  *out = '\0';
  *text = in;
  return value;
}

static int parse_list(char *text, hl_dsn *dsn, hl_error *error) {
  static const char spaces[] = " \t\n\r\f\v";
  for (;;) {
    text += strspn(text, spaces);
    if (!*text) return HL_OK;
    char *name = text;
    text += strspn(text, "abcdefghijklmnopqrstuvwxyz"
                         "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_");
    char *end = text;
    text += strspn(text, spaces);
    if (end == name || *text != '=')
      return hl__error(error, HL_EDSN,
                       "a part of the DSN is not of the form key=value; put "
                       "values with spaces between ' '");
    text++;
    *end = '\0';
    text += strspn(text, spaces);
    char *value = parse_value(&text);
    if (!value)
      return hl__error(error, HL_EDSN, "the value of '%.40s' in the DSN has a ' without its end",
                       name);
    int status = hl__dsn_param_add(dsn, name, value, error);
    if (status) return status;
  }
}

/* Translates a parameter of URLs (JDBC's spelling) into libpq's. */
static void param_translate(hl_dsn_param *param) {
  if (strcmp(param->name, "ssl") == 0 && strcmp(param->value, "true") == 0)
    *param = (hl_dsn_param){"sslmode", "require"};
}

/* Drops the parameters of Doctrine's URLs that only Doctrine reads. */
static void params_drop(hl_dsn *dsn) {
  unsigned kept = 0;
  for (unsigned i = 0; i < dsn->param_count; i++)
    if (strcmp(dsn->params[i].name, "serverVersion") != 0 &&
        strcmp(dsn->params[i].name, "charset") != 0)
      dsn->params[kept++] = dsn->params[i];
  dsn->param_count = kept;
}

/* Parses a list of libpq, or of PDO, which separates its parts with ';'. */
static int parse_whole(char *text, hl_dsn *dsn, hl_error *error) {
  for (char *at = text; text != dsn->text && *at; at++)
    if (*at == ';') *at = ' ';
  return parse_list(text, dsn, error);
}

int hl__pg_dsn(char *text, hl_dsn *dsn, hl_error *error) {
  bool url = text != dsn->text && text[-1] == '/';
  int status = url ? hl__dsn_url(text, parse_hosts, dsn, error) : parse_whole(text, dsn, error);
  if (status) return status;
  if (dsn->interoperate) params_drop(dsn);
  for (unsigned i = 0; i < dsn->param_count; i++) {
    hl_dsn_param *param = &dsn->params[i];
    param_translate(param);
    /* A list, or a parameter of a URL, overrides the URL, as in libpq. */
    if (strcmp(param->name, "user") == 0) dsn->user = param->value;
    if (strcmp(param->name, "password") == 0) dsn->password = param->value;
    if (strcmp(param->name, "host") == 0) dsn->host = param->value;
    if (strcmp(param->name, "dbname") == 0) dsn->database = param->value;
  }
  return HL_OK;
}

/* ---------------------------------------------------------- parameters */

static bool is_known(const PQconninfoOption *known, const char *name) {
  for (; known->keyword; known++)
    if (strcmp(known->keyword, name) == 0) return true;
  return false;
}

int hl__pg_params(hl__pg_store *store, hl_error *error) {
  const hl_dsn *dsn = store->config->dsn;
  int status = HL_OK;
  PQconninfoOption *known = PQconninfoParse("", NULL);
  if (!known) return hl__error_memory(error);
  for (unsigned i = 0; i < dsn->param_count && status == HL_OK; i++)
    if (!is_known(known, dsn->params[i].name))
      status = hl__error(error, HL_EDSN,
                         "unknown parameter '%.40s' in the DSN: libpq has none of that name",
                         dsn->params[i].name);
  PQconninfoFree(known);
  if (status) return status;
  store->connect_timeout = CONNECT_TIMEOUT_MS;
  const char *said = hl_dsn_param_get(dsn, "connect_timeout");
  if (said)
    return hl__dsn_seconds(said, "the parameter connect_timeout in the DSN", HL__DSN_DAY, false,
                           &store->connect_timeout, error);
  said = getenv("PGCONNECT_TIMEOUT");
  /* 0 is no limit for libpq. We always have one. */
  if (said && *said && strcmp(said, "0") != 0)
    return hl__dsn_seconds(said, "PGCONNECT_TIMEOUT", HL__DSN_DAY, false, &store->connect_timeout,
                           error);
  return HL_OK;
}
