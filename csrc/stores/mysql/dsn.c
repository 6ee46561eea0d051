/*
 * dsn.c - the DSNs of MySQL and MariaDB: URLs, and the form of Go's driver. connect.c knows the
 * parameters.
 */
#include "mysql_store.h"

#include <string.h>

/* Takes [user[:password]@][tcp[(host:port)]|unix(/path)]/database[?params] apart as
   github.com/go-sql-driver/mysql does. The database begins at the last '/', the address at the
   last '@' before that, so that a password may have either. */
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
  int status = hl__dsn_decode(database, "database", error);
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
    status = hl__dsn_host(address + 4, dsn, error);
    if (status) return status;
  } else if (*address && strcmp(address, "tcp") != 0) {
    return hl__error(error, HL_EDSN,
                     "the address in the DSN must be tcp(host:port) or "
                     "unix(/path/to.sock); in a parameter write '/' as '%%2F'");
  }
  return hl__dsn_params(params, false, dsn, error);
}

/* A DSN of Go's form has no scheme, and is all there. */
int hl__mysql_dsn(char *text, hl_dsn *dsn, hl_error *error) {
  if (text == dsn->text) return parse_go(text, dsn, error);
  int status = hl__dsn_url(text, hl__dsn_host, dsn, error);
  dsn->socket = hl_dsn_param_get(dsn, "socket");
  return status;
}
