/*
 * dsn.c - the DSNs of SQLite: sqlite:/path/to/file?synchronous=full
 */
#include "sqlite_store.h"

#include <string.h>
#include <strings.h>

int hl__sqlite_dsn(char *text, hl_dsn *dsn, hl_error *error) {
  char *params = strchr(text, '?');
  if (params) *params++ = '\0';
  if (strncmp(text, "//", 2) == 0) {
    text += 2;
    if (*text && *text != '/')
      return hl__error(error, HL_EDSN,
                       "write the file of a sqlite: DSN as sqlite:/absolute or "
                       "sqlite:relative, without a host");
  }
  int status = hl__dsn_decode(text, "file", error);
  if (status == HL_OK) status = hl__dsn_params(params, true, dsn, error);
  if (status) return status;
  size_t size = strlen(text);
  if (size == 0 || text[size - 1] == '/')
    return hl__error(error, HL_EDSN,
                     "the DSN names no file: write sqlite:/path/to/file");
  if (strcmp(text, ":memory:") == 0 || strcmp(text, "/:memory:") == 0)
    return hl__error(error, HL_EDSN,
                     "a database in memory is that of one connection, and keeps "
                     "nobody out: write sqlite:/path/to/file, or file:");
  dsn->path = text;
  return HL_OK;
}

int hl__sqlite_params(hl__sqlite_store *store, hl_error *error) {
  const hl_dsn *dsn = store->config->dsn;
  store->lasts = true;
  for (unsigned i = 0; i < dsn->param_count; i++) {
    if (strcmp(dsn->params[i].name, "synchronous") != 0)
      return hl__error(error, HL_EDSN,
                       "unknown parameter '%.40s' in the DSN: sqlite: knows "
                       "synchronous",
                       dsn->params[i].name);
    if (strcasecmp(dsn->params[i].value, "normal") == 0)
      store->lasts = false;
    else if (strcasecmp(dsn->params[i].value, "full") != 0)
      return hl__error(
          error, HL_EDSN,
          "the parameter synchronous in the DSN is full or normal");
  }
  return HL_OK;
}
