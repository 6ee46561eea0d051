/*
 * table.h - what the tests of the embedded store's table share: a directory, spaces, sessions, and
 * short ways to take rows.
 */
#ifndef HIERLOCK_SPEC_EMBEDDED_TABLE_H
#define HIERLOCK_SPEC_EMBEDDED_TABLE_H

#include "verify.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define S HL_SHARED
#define X HL_EXCLUSIVE
#define U HL_UPDATE

static char directory[64];
static hl_layout *table_layout;
static hl_error fault; /* of this process' last call */

static inline hl_row row(unsigned level, uint32_t bucket, hl_mode mode) {
  return (hl_row){.level = (uint8_t)level, .bucket = bucket, .mode = (uint8_t)mode};
}

static inline void table_make(void) {
  (void)snprintf(directory, sizeof directory, "/dev/shm/hierlock-embedded-XXXXXX");
  if (!mkdtemp(directory)) abort();
  if (hl_layout_new(NULL, 0, 1u << 30, &table_layout, NULL) != HL_OK) abort();
}

static inline void table_remove(void) {
  char file[96];
  (void)snprintf(file, sizeof file, "%s/" HL__SHM_FILE, directory);
  (void)unlink(file);
  (void)rmdir(directory);
  hl_layout_unref(table_layout);
}

/* NULL, and `fault` says why. */
static inline hl__shm_space *space_open(void) {
  static hl_dsn dsn;
  hl_store_config config = {
      .dsn = &dsn, .layout = table_layout, .application = "test", .host = "here"};
  hl_layout *agreed = NULL;
  hl__shm_space *space;
  if (hl__shm_space_open(&config, directory, &agreed, &space, &fault) != HL_OK) return NULL;
  hl_layout_unref(agreed);
  return space;
}

static inline hl__shm_session *session_begin(hl__shm_space *space) {
  hl__shm_session *session;
  if (hl__shm_begin(space, &session, &fault) == HL_OK) return session;
  (void)fprintf(stderr, "begin: %s\n", fault.message);
  abort();
}

/* Waits for `ms`; 0: tries. */
static inline int take(hl__shm_session *session, const hl_row *rows, size_t n, int64_t ms) {
  const hl_request request = {
      .rows = rows, .n = n, .try_once = ms == 0, .deadline = hl__now_ms() + ms};
  return hl__shm_take(session, &request, 0, &fault);
}

static inline int take_one(hl__shm_session *session, hl_row it, int64_t ms) {
  return take(session, &it, 1, ms);
}

#endif
