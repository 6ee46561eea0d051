/*
 * server.c - does this server exclude? An item, prefix:space, has what all its users must agree
 * on: the levels, and the list of servers.
 */
#include "memcached_store.h"

#include "../judge/judge.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The client's clock is ahead of the server's time by less, and behind it by no more, where both
   are right: us. The server counts whole seconds from its start, perhaps a second too many. */
#define AHEAD_US 4000000
#define BEHIND_US 3000000

/* Judges the server by the line that tells its version, or by whether it compares and swaps. */
static int server_judge(const hl__memcached_link *link, const char *line, const char *cas,
                        hl_error *error) {
  char at[288];
  (void)snprintf(at, sizeof at, "%s:%u", link->server->host, link->server->port);
  bool told = strncmp(line, "VERSION ", 8) == 0;
  const hl__fact facts[] = {
      {"at", at}, {"version", told ? line + 8 : ""}, {"cas_enabled", cas}, {0}};
  return hl__memcached_server_judge(facts, error);
}

static int version_check(hl__memcached_session *session, hl__memcached_link *link, int64_t deadline,
                         hl_error *error) {
  const char *line;
  int status = hl__memcached_line(session, link, deadline, &line, error);
  return status ? status : server_judge(link, line, NULL, error);
}

/* Levels that the program leaves open are taken from the item. */
static int levels_agree(hl__memcached_store *store, const char *found, const char *key,
                        hl_error *error) {
  const hl_layout *wanted = store->base.layout ? store->base.layout : store->config->layout;
  char names[HL__LAYOUT_NAMES_MAX];
  int status = hl__layout_settle(wanted, found, &store->base.layout, error);
  if (status == HL_EMISMATCH)
    (void)hl__error(error, status,
                    "the levels of this space are %.150s (%s); this program "
                    "wants %.150s: leave out `levels`, and it takes what is "
                    "there; or write another ?prefix= in the DSN",
                    found, key, hl__layout_names(wanted, names));
  return status;
}

static int space_agree(hl__memcached_session *session, const hl__memcached_link *link,
                       const hl__memcached_item *item, const char *key, hl_error *error) {
  char head[48];
  (void)snprintf(head, sizeof head, "hierlock1 %s ", session->store->list);
  if (!item->found)
    return hl__error(error, HL_ECONNECTION, "memcached at %s:%u does not keep what it is given",
                     link->server->host, link->server->port);
  if (item->cas == 0) return server_judge(link, "VERSION 1.6", "no", error);
  if (strncmp(item->data, "hierlock", 8) == 0 && strncmp(item->data, "hierlock1 ", 10) != 0)
    return hl__error(error, HL_EMISMATCH,
                     "the item %s on %s:%u was made by another version of "
                     "hierlock: see Upgrading in docs/operations.md",
                     key, link->server->host, link->server->port);
  if (strncmp(item->data, "hierlock1 ", 10) != 0)
    return hl__error(error, HL_EMISMATCH,
                     "the item %s on %s:%u is not of hierlock's making: write "
                     "another ?prefix= in the DSN",
                     key, link->server->host, link->server->port);
  if (strncmp(item->data, head, strlen(head)) != 0)
    return hl__error(error, HL_EMISMATCH,
                     "memcached at %s:%u was used with another list of servers, and those who "
                     "still use it would not be kept out. Name the same servers in the same way; "
                     "or stop all programs, and delete the item %s on each server",
                     link->server->host, link->server->port, key);
  return levels_agree(session->store, item->data + strlen(head), key, error);
}

int hl__memcached_verify(hl__memcached_session *session, hl__memcached_link *link, int64_t deadline,
                         hl_error *error) {
  hl__memcached_store *store = session->store;
  char key[HL__MEMCACHED_KEY_MAX], names[HL__LAYOUT_NAMES_MAX];
  const char *line;
  hl__memcached_buffer value = {0};
  hl__memcached_item item;
  hl__memcached_addf(&value, "hierlock1 %s ", store->list);
  (void)hl__layout_names(store->base.layout ? store->base.layout : store->config->layout, names);
  hl__memcached_add(&value, names, strlen(names));
  (void)snprintf(key, sizeof key, "%s:space", store->prefix);
  hl__memcached_addf(&link->out, "version\r\n");
  hl__memcached_put(link, "add", key, 0, NULL, &value);
  hl__memcached_addf(&link->out, "gets %s\r\n", key);
  free(value.data);
  int status = version_check(session, link, deadline, error);
  if (status == HL_OK) status = hl__memcached_line(session, link, deadline, &line, error);
  if (status) return status;
  status = hl__memcached_gets(session, link, deadline, &item, error);
  if (status == HL_OK) status = space_agree(session, link, &item, key, error);
  free(item.data);
  return status;
}

int hl__memcached_token(hl__memcached_session *session, hl__memcached_link *link, int64_t deadline,
                        uint64_t *token, hl_error *error) {
  const char *line;
  unsigned long long seconds = 0;
  hl__memcached_addf(&link->out, "stats\r\n");
  for (;;) {
    int status = hl__memcached_line(session, link, deadline, &line, error);
    if (status) return status;
    (void)sscanf(line, "STAT time %llu", &seconds);
    if (strncmp(line, "STAT ", 5) != 0) break;
  }
  if (!seconds)
    return hl__error(error, HL_ESTORE, "memcached at %s:%u does not tell the time",
                     link->server->host, link->server->port);
  int64_t ahead = hl__between_ms((int64_t)(seconds * 1000000), hl__unix_us());
  if (ahead < -BEHIND_US) ahead = -BEHIND_US;
  if (ahead >= AHEAD_US) ahead = AHEAD_US - 1;
  *token = seconds * 1000000 + (uint64_t)ahead;
  return HL_OK;
}
