/*
 * dsn.c - the DSNs of SQLite: sqlite:/path/to/file?synchronous=full
 */
#include "sqlite_store.h"

#include <string.h>

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
    return hl__error(error, HL_EDSN, "the DSN names no file: write sqlite:/path/to/file");
  if (strcmp(text, ":memory:") == 0 || strcmp(text, "/:memory:") == 0)
    return hl__error(error, HL_EDSN,
                     "a database in memory is that of one connection, and keeps "
                     "nobody out: write sqlite:/path/to/file, or file:");
  dsn->path = text;
  return HL_OK;
}

int hl__sqlite_params(hl__sqlite_store *store, hl_error *error) {
  static const hl__dsn_word words[] = {{"full", true}, {"normal", false}, {.word = NULL}};
  unsigned lasts = true;
  static const hl__dsn_known params[] = {{"synchronous", HL__DSN_WORD, .words = words},
                                         {.name = NULL}};
  int status = hl__dsn_store(store->config->dsn, params, &lasts, error);
  store->lasts = lasts;
  return status;
}
