/*
 * embedded_store.h - what the tests of the embedded store's hl_store_ops share: its sessions, in a
 * lock directory of the program's own.
 *
 * Include behind <cmocka.h>; once in a program, which says where the directory is, and makes the
 * layout.
 */
#ifndef SPEC_EMBEDDED_STORE_H
#define SPEC_EMBEDDED_STORE_H

#include "../../csrc/stores/embedded/embedded_store.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static const hl_store_ops *const ops = &hl_store_file;
static hl_layout *layout;
static char directory[64];
static hl_dsn dsn = {.store = "file", .path = directory};
static hl_store_config config = {.dsn = &dsn, .application = "test", .host = "here"};

static inline hl_store *store_new(void) {
  hl_store *store;
  hl_error error;
  config.pid = getpid();
  config.layout = layout;
  if (ops->open(&config, &store, &error) != HL_OK) {
    (void)fprintf(stderr, "open: %s\n", error.message);
    abort();
  }
  return store;
}

static inline hl_session *session_new(hl_store *store) {
  hl_session *session;
  if (ops->session_open(store, HL_FOREVER, &session, NULL) != HL_OK) abort();
  return session;
}

static inline void give(hl_session *session) {
  assert_int_equal(ops->give_back(session, NULL), HL_OK);
}

#endif
