/*
 * dsn.c - the DSNs of SQLite: sqlite:/path/to/file?synchronous=full
 */
#include "sqlite_store.h"

#include <string.h>

int hl__sqlite_dsn(char *text, hl_dsn *dsn, hl_error *error) {
  int status = hl__dsn_path(text, "file", dsn, error);
  if (status) return status;
  const char *path = dsn->path;
  if (!path || !*path || path[strlen(path) - 1] == '/')
    return hl__error(error, HL_EDSN, "the DSN names no file: write sqlite:/path/to/file");
  if (strcmp(path, ":memory:") == 0 || strcmp(path, "/:memory:") == 0)
    return hl__error(error, HL_EDSN,
                     "a database in memory is that of one connection, and keeps "
                     "nobody out: write sqlite:/path/to/file, or file:");
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
