/*
 * dsn.c - takes data source names apart: URLs, and the form of Go's MySQL
 * driver. Messages name the part that is wrong and never quote the whole, for
 * it may contain a password.
 */
#include "dsn.h"

#include "internal.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* Splits *text at the first character of `set`: ends the part there, moves
   *text behind it, and returns the part; NULL when none of `set` is found. */
static char *cut(char **text, const char *set) {
  char *end = *text + strcspn(*text, set);
  if (!*end) return NULL;
  char *part = *text;
  *end = '\0';
  *text = end + 1;
  return part;
}

static int hex_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

static int decode(char *part, const char *what, hl_error *error) {
  char *out = part;
  if (!part) return HL_OK;
  for (char *in = part; *in; in++) {
    if (*in != '%') {
      *out++ = *in;
      continue;
    }
    int high = hex_value(in[1]);
    int low = high < 0 ? -1 : hex_value(in[2]);
    if (low < 0)
      return hl__error(error, HL_EDSN,
                       "the %s in the DSN has a '%%' without two hexadecimal "
                       "digits; write a plain '%%' as '%%25'",
                       what);
    if (high == 0 && low == 0)
      return hl__error(error, HL_EDSN, "the %s in the DSN has a NUL byte",
                       what);
    *out++ = (char)(high * 16 + low);
    in += 2;
  }
  *out = '\0';
  return HL_OK;
}

static int parse_port(const char *text, unsigned *port, hl_error *error) {
  unsigned long number = 0;
  size_t digits = strspn(text, "0123456789");
  if (digits >= 1 && digits <= 5 && !text[digits])
    number = strtoul(text, NULL, 10);
  if (number < 1 || number > 65535)
    return hl__error(error, HL_EDSN,
                     "the port in the DSN must be a number from 1 to 65535; "
                     "a user and password end with '@', an IPv6 address "
                     "stands in [ ]");
  *port = (unsigned)number;
  return HL_OK;
}

/* host, host:port, [ipv6] or [ipv6]:port */
static int parse_host(char *text, hl_dsn *dsn, hl_error *error) {
  char *port = NULL;
  if (*text == '[') {
    char *end = strchr(text, ']');
    if (!end || (end[1] && end[1] != ':'))
      return hl__error(error, HL_EDSN,
                       "the host in the DSN has a '[' without its ']'");
    if (end[1]) port = end + 2;
    *end = '\0';
    text++;
  } else {
    port = strchr(text, ':');
    if (port) *port++ = '\0';
  }
  if (*text) dsn->host = text;
  int status = decode(text, "host", error);
  if (status == HL_OK && port) status = parse_port(port, &dsn->port, error);
  return status;
}

static int parse_params(char *text, bool encoded, hl_dsn *dsn,
                        hl_error *error) {
  while (text && *text) {
    char *rest = text;
    char *name = cut(&rest, "&");
    if (!name) {
      name = text;
      rest = NULL;
    }
    text = rest;
    if (!*name) continue;
    char *value = name;
    name = cut(&value, "=");
    if (!name)
      return hl__error(error, HL_EDSN, "a parameter in the DSN has no '='");
    if (encoded || strchr(value, '%')) {
      int status = decode(name, "name of a parameter", error);
      if (status == HL_OK) status = decode(value, "value of a parameter", error);
      if (status) return status;
    }
    if (hl_dsn_param_get(dsn, name))
      return hl__error(error, HL_EDSN,
                       "the parameter '%.40s' stands twice in the DSN", name);
    if (dsn->param_count == HL_DSN_PARAMS_MAX)
      return hl__error(error, HL_EDSN, "the DSN has more than %d parameters",
                       HL_DSN_PARAMS_MAX);
    dsn->params[dsn->param_count++] = (hl_dsn_param){name, value};
  }
  return HL_OK;
}

/* Behind "mysql://": [user[:password]@][host[:port]][/database][?params] */
static int parse_url(char *text, hl_dsn *dsn, hl_error *error) {
  /* The first '/' or '?' ends the address. An '@' behind it most likely belongs
     to the address, and what stands before it is half a password: nothing of it
     may be quoted, nor may it be taken for a host or a port. */
  if (strchr(text + strcspn(text, "/?"), '@'))
    return hl__error(error, HL_EDSN,
                     "the DSN has an '@' behind a '/' or '?'. In a user or "
                     "password write '@' as '%%40', ':' as '%%3A', '/' as "
                     "'%%2F', '?' as '%%3F', '#' as '%%23' and '%%' as '%%25'. "
                     "In a database or parameter write '@' as '%%40'");
  char *params = strchr(text, '?');
  if (params) *params++ = '\0';
  char *database = strchr(text, '/');
  if (database) *database++ = '\0';
  char *at = strrchr(text, '@');
  if (at) {
    *at = '\0';
    char *password = strchr(text, ':');
    if (password) *password++ = '\0';
    if (*text) dsn->user = text;
    dsn->password = password;
    int status = decode(text, "user", error);
    if (status == HL_OK) status = decode(password, "password", error);
    if (status) return status;
    text = at + 1;
  }
  int status = parse_host(text, dsn, error);
  if (status) return status;
  if (database && strchr(database, '/'))
    return hl__error(error, HL_EDSN,
                     "the database in the DSN has a '/'; write it as '%%2F'");
  if (database && *database) dsn->database = database;
  status = decode(database, "database", error);
  if (status) return status;
  status = parse_params(params, true, dsn, error);
  dsn->socket = hl_dsn_param_get(dsn, "socket");
  return status;
}

/* [user[:password]@][tcp[(host:port)]|unix(/path)]/database[?params], taken apart
   as github.com/go-sql-driver/mysql does: the database begins at the last '/',
   the address at the last '@' before that, so that a password may have either. */
static int parse_go(char *text, hl_dsn *dsn, hl_error *error) {
  char *slash = strrchr(text, '/');
  if (!slash)
    return hl__error(error, HL_EDSN,
                     "the DSN has no '/' before its database, as in "
                     "user:password@tcp(host:3306)/database");
  char *database = slash + 1;
  *slash = '\0';
  char *params = strchr(database, '?');
  if (params) *params++ = '\0';
  if (*database) dsn->database = database;
  int status = decode(database, "database", error);
  if (status) return status;

  char *address = text;
  char *at = strrchr(text, '@');
  if (at) {
    *at = '\0';
    address = at + 1;
    char *password = strchr(text, ':');
    if (password) *password++ = '\0';
    if (*text) dsn->user = text;
    dsn->password = password;
  }
  size_t size = strlen(address);
  if (strncmp(address, "unix(/", 6) == 0 && address[size - 1] == ')') {
    address[size - 1] = '\0';
    dsn->socket = address + 5;
  } else if (strncmp(address, "tcp(", 4) == 0 && address[size - 1] == ')') {
    address[size - 1] = '\0';
    status = parse_host(address + 4, dsn, error);
    if (status) return status;
  } else if (*address && strcmp(address, "tcp") != 0) {
    return hl__error(error, HL_EDSN,
                     "the address in the DSN must be tcp(host:port) or "
                     "unix(/path/to.sock); in a parameter write '/' as '%%2F'");
  }
  return parse_params(params, false, dsn, error);
}

static const struct {
  const char *prefix;
  const char *store;
  int (*parse)(char *text, hl_dsn *dsn, hl_error *error);
} schemes[] = {
    {"mysql://", "mysql", parse_url},
    {"mariadb://", "mysql", parse_url},
    {"file:", "file", NULL},
    {"null:", "null", NULL},
};

static int parse_path(char *text, hl_dsn *dsn, hl_error *error) {
  char *params = strchr(text, '?');
  if (params) *params++ = '\0';
  if (strcmp(dsn->store, "null") == 0 && *text)
    return hl__error(error, HL_EDSN, "nothing may follow 'null:' in a DSN");
  if (strncmp(text, "//", 2) == 0) {
    text += 2;
    if (*text && *text != '/')
      return hl__error(error, HL_EDSN,
                       "write the directory of a file: DSN as "
                       "file:/absolute or file:relative, without a host");
  }
  if (*text) dsn->path = text;
  int status = decode(text, "directory", error);
  if (status == HL_OK) status = parse_params(params, true, dsn, error);
  if (status == HL_OK && dsn->param_count)
    status = hl__error(error, HL_EDSN,
                       "unknown parameter '%.40s' in the DSN: %s: takes none",
                       dsn->params[0].name, dsn->store);
  return status;
}

int hl_dsn_parse(const char *text, hl_dsn *dsn, hl_error *error) {
  memset(dsn, 0, sizeof *dsn);
  if (!*text) return hl__error(error, HL_EDSN, "the DSN is empty");
  dsn->size = strlen(text);
  dsn->text = strdup(text);
  if (!dsn->text) return hl__error_memory(error);

  for (size_t i = 0; i < sizeof schemes / sizeof *schemes; i++) {
    size_t n = strlen(schemes[i].prefix);
    if (strncasecmp(text, schemes[i].prefix, n) != 0) continue;
    dsn->store = schemes[i].store;
    return schemes[i].parse ? schemes[i].parse(dsn->text + n, dsn, error)
                            : parse_path(dsn->text + n, dsn, error);
  }

  /* A word before "://" is a scheme; else it is taken for the Go form. */
  size_t word = 0;
  while (isalnum((unsigned char)text[word]) || text[word] == '+' ||
         text[word] == '-' || text[word] == '.')
    word++;
  if (word && strncmp(text + word, "://", 3) == 0)
    return hl__error(error, HL_EDSN,
                     "unknown scheme '%.*s' in the DSN: mysql, mariadb, file "
                     "and null are known",
                     (int)(word < 40 ? word : 40), text);
  if (!strchr(text, '/'))
    return hl__error(error, HL_EDSN,
                     "the DSN has no scheme: write mysql://..., file:... or "
                     "user:password@tcp(host:3306)/database");
  dsn->store = "mysql";
  return parse_go(dsn->text, dsn, error);
}

void hl_dsn_dispose(hl_dsn *dsn) {
  if (dsn->text) {
    /* Passwords do not stay behind in freed memory. */
    explicit_bzero(dsn->text, dsn->size);
    free(dsn->text);
  }
  memset(dsn, 0, sizeof *dsn);
}

const char *hl_dsn_param_get(const hl_dsn *dsn, const char *name) {
  for (unsigned i = 0; i < dsn->param_count; i++)
    if (strcmp(dsn->params[i].name, name) == 0) return dsn->params[i].value;
  return NULL;
}

const char *hl_dsn_default(const char *dsn) {
  if (!dsn) dsn = getenv("HIERLOCK_DSN");
  return dsn ? dsn : "file:";
}

const char *hl_dsn_store(const char *dsn, hl_error *error) {
  hl_dsn parsed;
  const char *store =
      hl_dsn_parse(dsn, &parsed, error) == HL_OK ? parsed.store : NULL;
  hl_dsn_dispose(&parsed);
  return store;
}
