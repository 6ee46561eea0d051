/*
 * dsn.c - finds the store of a data source name, and parses the parts that the DSNs of several
 * stores have in common: URLs. Messages name the wrong part, and never quote the whole DSN, which
 * may contain a password.
 */
#include "dsn.h"

#include "error.h"

#include <ctype.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define PREFIX_MAX 64

char *hl__dsn_cut(char **text, const char *set) {
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

int hl__dsn_decode(char *part, const char *what, hl_error *error) {
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
      return hl__error(error, HL_EDSN, "the %s in the DSN has a NUL byte", what);
    *out++ = (char)(high * 16 + low);
    in += 2;
  }
  *out = '\0';
  return HL_OK;
}

int hl__dsn_port(const char *text, unsigned *port, hl_error *error) {
  unsigned long number = 0;
  size_t digits = strspn(text, "0123456789");
  if (digits >= 1 && digits <= 5 && !text[digits]) number = strtoul(text, NULL, 10);
  if (number < 1 || number > 65535)
    return hl__error(error, HL_EDSN,
                     "the port in the DSN must be a number from 1 to 65535; a user and password "
                     "end with '@', an IPv6 address stands in [ ]");
  *port = (unsigned)number;
  return HL_OK;
}

int hl__dsn_host(char *text, hl_dsn *dsn, hl_error *error) {
  char *port = NULL;
  if (*text == '[') {
    char *end = strchr(text, ']');
    if (!end || (end[1] && end[1] != ':'))
      return hl__error(error, HL_EDSN, "the host in the DSN has a '[' without its ']'");
    if (end[1]) port = end + 2;
    *end = '\0';
    text++;
  } else {
    port = strchr(text, ':');
    if (port) *port++ = '\0';
  }
  if (*text) dsn->host = text;
  int status = hl__dsn_decode(text, "host", error);
  if (status == HL_OK && port) status = hl__dsn_port(port, &dsn->port, error);
  return status;
}

int hl__dsn_param_add(hl_dsn *dsn, const char *name, const char *value, hl_error *error) {
  if (hl_dsn_param_get(dsn, name))
    return hl__error(error, HL_EDSN, "the parameter '%.40s' stands twice in the DSN", name);
  if (dsn->param_count == HL_DSN_PARAMS_MAX)
    return hl__error(error, HL_EDSN, "the DSN has more than %d parameters", HL_DSN_PARAMS_MAX);
  dsn->params[dsn->param_count++] = (hl_dsn_param){name, value};
  return HL_OK;
}

int hl__dsn_params(char *text, bool encoded, hl_dsn *dsn, hl_error *error) {
  while (text && *text) {
    char *rest = text;
    char *name = hl__dsn_cut(&rest, "&");
    if (!name) {
      name = text;
      rest = NULL;
    }
    text = rest;
    if (!*name) continue;
    char *value = name;
    name = hl__dsn_cut(&value, "=");
    if (!name) return hl__error(error, HL_EDSN, "a parameter in the DSN has no '='");
    int status = HL_OK;
    if (encoded || strchr(value, '%')) {
      status = hl__dsn_decode(name, "name of a parameter", error);
      if (status == HL_OK) status = hl__dsn_decode(value, "value of a parameter", error);
    }
    if (status == HL_OK) status = hl__dsn_param_add(dsn, name, value, error);
    if (status) return status;
  }
  return HL_OK;
}

int hl__dsn_account(char *text, char *at, hl_dsn *dsn, hl_error *error) {
  if (!at) return HL_OK;
  *at = '\0';
  char *password = strchr(text, ':');
  if (password) *password++ = '\0';
  if (*text) dsn->user = text;
  dsn->password = password;
  int status = hl__dsn_decode(text, "user", error);
  return status ? status : hl__dsn_decode(password, "password", error);
}

int hl__dsn_url(char *text, hl_dsn_fn host, hl_dsn *dsn, hl_error *error) {
  /* The first '/' or '?' ends the address. An '@' after it most likely belongs to the address, and
     the text before it is half a password: do not quote it, or take it for a host or a port. */
  if (strchr(text + strcspn(text, "/?"), '@'))
    return hl__error(error, HL_EDSN,
                     "the DSN has an '@' behind a '/' or '?'. In a user or password write '@' as "
                     "'%%40', ':' as '%%3A', '/' as '%%2F', '?' as '%%3F', '#' as '%%23' and '%%' "
                     "as '%%25'. In a database or parameter write '@' as '%%40'");
  char *params = strchr(text, '?');
  if (params) *params++ = '\0';
  char *database = strchr(text, '/');
  if (database) *database++ = '\0';
  char *at = strrchr(text, '@');
  int status = hl__dsn_account(text, at, dsn, error);
  if (status == HL_OK) status = host(at ? at + 1 : text, dsn, error);
  if (status) return status;
  if (database && strchr(database, '/'))
    return hl__error(error, HL_EDSN, "the database in the DSN has a '/'; write it as '%%2F'");
  if (database && *database) dsn->database = database;
  status = hl__dsn_decode(database, "database", error);
  if (status) return status;
  return hl__dsn_params(params, true, dsn, error);
}

int hl__dsn_path(char *text, const char *what, hl_dsn *dsn, hl_error *error) {
  char *params = strchr(text, '?');
  if (params) *params++ = '\0';
  if (strncmp(text, "//", 2) == 0) {
    text += 2;
    if (*text && *text != '/')
      return hl__error(error, HL_EDSN,
                       "write the %s of a %s: DSN as %s:/absolute or %s:relative, without a host",
                       what, dsn->store, dsn->store, dsn->store);
  }
  if (*text) dsn->path = text;
  int status = hl__dsn_decode(text, what, error);
  return status ? status : hl__dsn_params(params, true, dsn, error);
}

/* ---------------------------------------------------------- parameters */

int hl__dsn_seconds(const char *value, const char *what, unsigned most, bool or_zero, int64_t *ms,
                    hl_error *error) {
  char *end;
  double seconds = strtod(value, &end);
  if (end == value || *end || !(seconds >= 0 && seconds <= most) || (seconds == 0 && !or_zero))
    return hl__error(error, HL_EDSN, "%s must be a number of seconds, %s %u", what,
                     or_zero ? "0 to" : "at most", most);
  *ms = (int64_t)(seconds * 1000 + 0.999);
  if (seconds > 0 && *ms < 1) *ms = 1;
  return HL_OK;
}

int hl__dsn_number(const char *value, const char *what, unsigned most, unsigned *number,
                   hl_error *error) {
  char *end;
  unsigned long said = strtoul(value, &end, 10);
  if (*value < '0' || *value > '9' || *end || said > most)
    return hl__error(error, HL_EDSN, "%s must be a number, 0 to %u", what, most);
  *number = (unsigned)said;
  return HL_OK;
}

static int prefix_read(const char *value, const char **prefix, hl_error *error) {
  static const char good[] = "abcdefghijklmnopqrstuvwxyz"
                             "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.:-";
  size_t size = strlen(value);
  if (size < 1 || size > PREFIX_MAX || strspn(value, good) != size)
    return hl__error(error, HL_EDSN,
                     "the prefix in the DSN must have 1 to %d of the characters "
                     "A-Z a-z 0-9 _ . : -",
                     PREFIX_MAX);
  *prefix = value;
  return HL_OK;
}

static void list_add(char *list, size_t size, const char *word) {
  size_t used = strlen(list);
  (void)snprintf(list + used, size - used, "%s%s", used ? ", " : "", word);
}

static int word_read(const char *value, const char *what, const hl__dsn_word *words,
                     unsigned *found, hl_error *error) {
  char list[100] = "";
  for (; words->word; words++) {
    if (strcasecmp(words->word, value) == 0) {
      *found = words->value;
      return HL_OK;
    }
    list_add(list, sizeof list, words->word);
  }
  return hl__error(error, HL_EDSN, "%s must be one of %s", what, list);
}

static int known_read(const hl__dsn_known *known, const char *value, void *store, hl_error *error) {
  char what[60];
  void *into = (char *)store + known->offset;
  (void)snprintf(what, sizeof what, "the parameter %s in the DSN", known->name);
  switch (known->kind) {
  case HL__DSN_TEXT: *(const char **)into = value; return HL_OK;
  case HL__DSN_PREFIX: return prefix_read(value, into, error);
  case HL__DSN_SECONDS:
    return hl__dsn_seconds(value, what, known->most, known->or_zero, into, error);
  case HL__DSN_NUMBER: return hl__dsn_number(value, what, known->most, into, error);
  case HL__DSN_WORD: return word_read(value, what, known->words, into, error);
  case HL__DSN_OTHER: return HL_OK;
  }
  return HL_OK;
}

static int unknown(const char *name, const hl__dsn_known *known, hl_error *error) {
  char list[200] = "";
  for (; known->name; known++)
    if (known->kind != HL__DSN_OTHER) list_add(list, sizeof list, known->name);
  return hl__error(error, HL_EDSN, "unknown parameter '%.40s' in the DSN: there are %s", name,
                   *list ? list : "none");
}

int hl__dsn_store(const hl_dsn *dsn, const hl__dsn_known *known, void *store, hl_error *error) {
  for (unsigned i = 0; i < dsn->param_count; i++) {
    const hl_dsn_param *param = &dsn->params[i];
    const hl__dsn_known *each = known;
    while (each->name && strcmp(each->name, param->name) != 0) each++;
    int status = each->name ? known_read(each, param->value, store, error)
                            : unknown(param->name, known, error);
    if (status) return status;
  }
  return HL_OK;
}

/* ---------------------------------------------------- schemes and stores */

/* The only list of our own schemes: a store may be a module that is not loaded yet. An entry
   without a ':' is a whole DSN. symfony: a scheme of Symfony Lock whose locks we can share, see
   hl_dsn.interoperate. */
static const struct {
  const char *prefix;
  const char *store;
  bool symfony;
} schemes[] = {
    {"mysql://", "mysql", false},
    {"mariadb://", "mysql", false},
    {"postgresql://", "postgresql", false},
    {"postgres://", "postgresql", false},
    {"redis://", "redis", false},
    {"rediss://", "redis", false},
    {"redis+unix://", "redis", false},
    {"redis+sentinel://", "redis", false},
    {"rediss+sentinel://", "redis", false},
    {"valkey+sentinel://", "redis", false},
    {"valkeys+sentinel://", "redis", false},
    {"valkey://", "redis", false},
    {"valkeys://", "redis", false},
    {"sqlite:", "sqlite", false},
    {"memcached://", "memcached", false},
    {"file:", "file", false},
    {"null:", "null", false},
    {"null", "null", false},
    {"quorum:", "quorum", false},
    {"flock://", "file", true},
    {"flock", "file", true},
    {"pgsql+advisory://", "postgresql", true},
    {"postgres+advisory://", "postgresql", true},
    {"postgresql+advisory://", "postgresql", true},
    {"pgsql+advisory:", "postgresql", true},
};

/* Symfony Lock's other schemes: what to write instead. An entry that ends with ':' is a prefix; any
   other is a whole DSN. */
#define JOINABLE                                                                                   \
  "what Symfony Lock keeps in tables (lock_keys) cannot be shared; write "                         \
  "pgsql+advisory:... or flock:///directory, which can, or "
#define ONE_SERVER                                                                                 \
  "a list of hosts is not understood; for sentinels write "                                        \
  "redis+sentinel://host:26379,host:26379?service=name, and where all is on "                      \
  "one server, "
static const struct {
  const char *prefix;
  const char *instead;
} refused[] = {
    {"mysql:", JOINABLE "mysql://user:password@host/database for locks among "
                        "programs with hierlock"},
    {"mysql2:", JOINABLE "mysql://user:password@host/database for locks "
                         "among programs with hierlock"},
    {"pgsql:", JOINABLE "postgresql://user:password@host/database for locks "
                        "among programs with hierlock"},
    {"postgres+advisory:", "write it as pgsql+advisory:host=...;dbname=..."},
    {"postgresql+advisory:", "write it as pgsql+advisory:host=...;dbname=..."},
    {"flock:", "write flock:///directory, or flock for the directory of temporary files"},
    {"redis:", ONE_SERVER "redis://host:6379 with interoperate = \"symfony\""},
    {"rediss:", ONE_SERVER "rediss://host:6379 with interoperate = \"symfony\""},
    {"valkey:", ONE_SERVER "valkey://host:6379 with interoperate = \"symfony\""},
    {"valkeys:", ONE_SERVER "valkeys://host:6379 with interoperate = \"symfony\""},
    {"memcached:", "several servers share the names out there, by a rule of that client; write "
                   "memcached://host:11211 for locks among programs with hierlock"},
    {"sqlite3:", JOINABLE "sqlite:/path for locks among programs with hierlock"},
    {"semaphore", "there is no store of semaphores; write flock, which keeps "
                  "out Symfony's FlockStore, or file:"},
    {"in-memory", "locks that end at the process' border are not kept; write "
                  "file:, which holds within a process, too"},
    {"mongodb:", "there is no store on MongoDB; write postgresql://..., mysql://... or file:"},
    {"mongodb+srv:", "there is no store on MongoDB; write postgresql://..., mysql://... or file:"},
    {"zookeeper:", "there is no store on ZooKeeper; write postgresql://... or mysql://..."},
    {"dynamodb:", "there is no store on DynamoDB; write postgresql://... or mysql://..."},
    {"mssql:", "there is no store on SQL Server; write postgresql://... or mysql://..."},
    {"sqlsrv:", "there is no store on SQL Server; write postgresql://... or mysql://..."},
    {"oci:", "there is no store on Oracle; write postgresql://... or mysql://..."},
    {"oci8:", "there is no store on Oracle; write postgresql://... or mysql://..."},
    {"pdo_oci:", "there is no store on Oracle; write postgresql://... or mysql://..."},
};

/* HL_OK: the DSN has none of those schemes. */
static int refuse(const char *text, hl_error *error) {
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
    const char *prefix = refused[i].prefix;
    size_t n = strlen(prefix);
    if (strncasecmp(text, prefix, n) != 0) continue;
    /* With an '@' it may be the Go form with a user of that name. */
    bool ours =
        prefix[n - 1] == ':' ? strncmp(text + n, "//", 2) == 0 || !strchr(text + n, '@') : !text[n];
    if (!ours) continue;
    return hl__error(error, HL_EDSN, "the DSN '%s' of Symfony Lock: %s", prefix,
                     refused[i].instead);
  }
  return HL_OK;
}

/* Whether the text begins like a list of libpq, key=value, with a key that names a server, a
   database or a login. */
static bool is_libpq_list(const char *text) {
  static const char *const keys[] = {"host",
                                     "hostaddr",
                                     "port",
                                     "dbname",
                                     "user",
                                     "password",
                                     "passfile",
                                     "service",
                                     "connect_timeout",
                                     "sslmode",
                                     "application_name",
                                     "target_session_attrs",
                                     NULL};
  static const char spaces[] = " \t\n\r\f\v";
  text += strspn(text, spaces);
  size_t n = strcspn(text, " \t\n\r\f\v=");
  if (text[n + strspn(text + n, spaces)] != '=') return false;
  for (const char *const *key = keys; *key; key++)
    if (strlen(*key) == n && strncmp(text, *key, n) == 0) return true;
  return false;
}

/* Stores of other makers: store+NAME:rest. A process knows so many of them, at most. */
#define OTHERS "store+"
#define OTHERS_MAX 16
#define OTHER_NAME_MAX 40

/* Makes a copy of the name, once, which stays. HL_OK, HL_ENOMEM, HL_EDSN. */
static int name_keep(const char *name, size_t size, const char **kept, hl_error *error) {
  static _Atomic(char *) names[OTHERS_MAX];
  for (size_t i = 0; i < OTHERS_MAX; i++) {
    char *there = atomic_load(&names[i]);
    if (!there) {
      char *own = strndup(name, size);
      if (!own) return hl__error_memory(error);
      if (atomic_compare_exchange_strong(&names[i], &there, own))
        there = own;
      else
        free(own);
    }
    *kept = there;
    if (strlen(there) == size && memcmp(there, name, size) == 0) return HL_OK;
  }
  return hl__error(error, HL_EDSN, "this process has used %d stores of other makers, and no more",
                   OTHERS_MAX);
}

static int other_find(const char *text, const char **store, const char **rest, hl_error *error) {
  const char *name = text + strlen(OTHERS);
  size_t size = strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_");
  if (!size || size > OTHER_NAME_MAX || name[size] != ':')
    return hl__error(error, HL_EDSN,
                     "the DSN names no store behind '" OTHERS "': write " OTHERS
                     "NAME:..., a name of small letters, digits and '_'");
  *rest = name + size + 1;
  return name_keep(text, strlen(OTHERS) + size, store, error);
}

/* Finds the store of a DSN. *rest: what follows its scheme, or the whole text. */
static int store_find(const char *text, const char **store, const char **interoperate,
                      const char **rest, hl_error *error) {
  *interoperate = NULL;
  if (!*text) return hl__error(error, HL_EDSN, "the DSN is empty");
  for (size_t i = 0; i < sizeof schemes / sizeof *schemes; i++) {
    const char *prefix = schemes[i].prefix;
    size_t n = strlen(prefix);
    if (strncasecmp(text, prefix, n) != 0 || (!strchr(prefix, ':') && text[n])) continue;
    *store = schemes[i].store;
    if (schemes[i].symfony) *interoperate = "symfony";
    *rest = text + n;
    return HL_OK;
  }
  if (strncmp(text, OTHERS, strlen(OTHERS)) == 0) return other_find(text, store, rest, error);
  if (refuse(text, error)) return HL_EDSN;

  *rest = text;
  if (is_libpq_list(text)) {
    *store = "postgresql";
    return HL_OK;
  }
  /* A word before "://" is a scheme; otherwise it is the Go form. */
  size_t word = 0;
  while (isalnum((unsigned char)text[word]) || text[word] == '+' || text[word] == '-' ||
         text[word] == '.')
    word++;
  if (word && strncmp(text + word, "://", 3) == 0)
    return hl__error(error, HL_EDSN,
                     "unknown scheme '%.*s' in the DSN: mysql, mariadb, postgresql, postgres, "
                     "redis, rediss, redis+unix, redis+sentinel, valkey, valkeys, sqlite, "
                     "memcached, file, null and quorum are known",
                     (int)(word < 40 ? word : 40), text);
  if (!strchr(text, '/'))
    return hl__error(error, HL_EDSN,
                     "the DSN has no scheme: write mysql://..., file:... or "
                     "user:password@tcp(host:3306)/database");
  *store = "mysql";
  return HL_OK;
}

const char *hl_dsn_store(const char *dsn, hl_error *error) {
  const char *store, *interoperate, *rest;
  if (!dsn) {
    (void)hl__error_null(error, __func__);
    return NULL;
  }
  return store_find(dsn, &store, &interoperate, &rest, error) == HL_OK ? store : NULL;
}

int hl_dsn_parse(const char *text, hl_dsn_fn parse, hl_dsn *dsn, hl_error *error) {
  const char *rest = text;
  memset(dsn, 0, sizeof *dsn);
  int status = store_find(text, &dsn->store, &dsn->interoperate, &rest, error);
  if (status) return status;
  size_t size = strlen(text);
  dsn->text = calloc(2, size + 1);
  if (!dsn->text) return hl__error_memory(error);
  dsn->size = 2 * (size + 1);
  memcpy(dsn->text, text, size);
  return parse(dsn->text + (rest - text), dsn, error);
}

void hl_dsn_dispose(hl_dsn *dsn) {
  if (dsn->text) {
    /* No password stays behind in freed memory. */
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
