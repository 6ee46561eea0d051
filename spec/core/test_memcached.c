/*
 * test_memcached.c - which server of a list has a root, and how it is connected to, without any
 * server. Programs that name the same servers in another order must ask the same server, or two of
 * them hold one node.
 */
#include "dsn.h"
#include "hierlock.h"
#include "memcached_store.h"

#include <netdb.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include <cmocka.h>

#include "leftovers.h"

typedef struct list {
  hl_dsn dsn;
  hl_store_config config;
  hl__memcached_store *store;
} list;

static void list_read(list *self, const char *dsn) {
  *self = (list){.store = calloc(1, sizeof *self->store)};
  assert_non_null(self->store);
  assert_int_equal(hl_dsn_parse(dsn, hl_store_memcached.parse, &self->dsn, NULL), HL_OK);
  self->config.dsn = &self->dsn;
  self->store->config = &self->config;
  assert_int_equal(hl__memcached_params(self->store, NULL), HL_OK);
}

static void list_free(list *self) {
  hl_dsn_dispose(&self->dsn);
  free(self->store);
}

static void name_of(const list *self, unsigned slot, char name[300]) {
  unsigned server = self->store->slots[slot];
  assert_true(server < self->store->server_count);
  (void)snprintf(name, 300, "%s:%u", self->store->servers[server].host,
                 self->store->servers[server].port);
}

static void each_slot_has_one_server_whatever_the_order(void **state) {
  static const char *const orders[] = {
      "memcached://a:1,b:2,c:3", "memcached://a:1,c:3,b:2", "memcached://b:2,a:1,c:3",
      "memcached://b:2,c:3,a:1", "memcached://c:3,a:1,b:2", "memcached://C:3,B:2,A:1",
  };
  (void)state;
  list first;
  list_read(&first, orders[0]);
  unsigned slots[3] = {0};
  for (unsigned slot = 0; slot < HL__MEMCACHED_SLOTS; slot++) slots[first.store->slots[slot]]++;
  for (size_t i = 0; i < 3; i++)
    assert_in_range(slots[i], HL__MEMCACHED_SLOTS / 6, HL__MEMCACHED_SLOTS / 2);
  for (size_t i = 1; i < sizeof orders / sizeof *orders; i++) {
    list other;
    list_read(&other, orders[i]);
    assert_string_equal(other.store->list, first.store->list);
    for (unsigned slot = 0; slot < HL__MEMCACHED_SLOTS; slot++) {
      char here[300], there[300];
      name_of(&first, slot, here);
      name_of(&other, slot, there);
      assert_string_equal(here, there);
    }
    list_free(&other);
  }
  list_free(&first);
}

/* A server refuses those who name another list: what they say of it must differ. */
static void another_list_has_another_digest(void **state) {
  static const char *const lists[] = {
      "memcached://a:1,b:2,c:3", "memcached://a:1,b:2",     "memcached://a:1,b:2,c:4",
      "memcached://a:1,b:2,d:3", "memcached://a:2,b:1,c:3", "memcached://a:1",
  };
  enum { LISTS = sizeof lists / sizeof *lists };
  (void)state;
  list all[LISTS];
  for (size_t i = 0; i < LISTS; i++) list_read(&all[i], lists[i]);
  for (size_t i = 0; i < LISTS; i++)
    for (size_t j = 0; j < i; j++) assert_string_not_equal(all[i].store->list, all[j].store->list);
  assert_string_equal(all[0].store->list, "3-dcb41e4b24ec1567"); /* stands at servers, for ever */
  assert_string_equal(all[LISTS - 1].store->list, "1");
  for (size_t i = 0; i < LISTS; i++) list_free(&all[i]);
}

static void a_single_server_has_all_under_any_name(void **state) {
  (void)state;
  list one, other;
  list_read(&one, "memcached://a:1");
  list_read(&other, "memcached://another:2");
  assert_string_equal(one.store->list, other.store->list);
  for (unsigned slot = 0; slot < HL__MEMCACHED_SLOTS; slot++)
    assert_int_equal(one.store->slots[slot], 0);
  list_free(&one);
  list_free(&other);
}

/* What every name here means: an address that refuses, and one where this program listens. */
static struct sockaddr_in addresses[2];
static struct addrinfo answers[2];

int getaddrinfo(const char *name, const char *service, const struct addrinfo *wanted,
                struct addrinfo **found) {
  (void)name, (void)service, (void)wanted;
  *found = answers;
  return 0;
}

void freeaddrinfo(struct addrinfo *found) { (void)found; }

static void a_name_of_several_addresses_leaves_none_of_them_connected(void **state) {
  static const struct hl_store_ops *const stores[] = {&hl_store_memcached, NULL};
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager = NULL;
  hl_error error;
  socklen_t size = sizeof addresses[1];
  (void)state;
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  for (size_t i = 0; i < 2; i++) {
    addresses[i] = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(i == 0)};
    addresses[i].sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    answers[i] = (struct addrinfo){.ai_family = AF_INET,
                                   .ai_socktype = SOCK_STREAM,
                                   .ai_addr = (struct sockaddr *)&addresses[i],
                                   .ai_addrlen = sizeof addresses[i],
                                   .ai_next = i == 0 ? &answers[1] : NULL};
  }
  assert_int_equal(bind(listener, answers[1].ai_addr, sizeof addresses[1]), 0);
  assert_int_equal(getsockname(listener, answers[1].ai_addr, &size), 0);
  assert_int_equal(listen(listener, 1), 0);
  config.dsn = "memcached://several:1?connect_timeout=0.2";
  config.stores = stores;
  int before = entries_of("/proc/self/fd");
  assert_int_equal(hl_manager_open(&config, &manager, &error), HL_ECONNECTION);
  assert_int_equal(entries_of("/proc/self/fd"), before);
  int connected = accept(listener, NULL, NULL);
  assert_true(connected >= 0);
  assert_int_equal(close(connected) + close(listener), 0);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(each_slot_has_one_server_whatever_the_order),
      cmocka_unit_test(another_list_has_another_digest),
      cmocka_unit_test(a_single_server_has_all_under_any_name),
      cmocka_unit_test(a_name_of_several_addresses_leaves_none_of_them_connected),
      cmocka_unit_test(nothing_is_left),
  };
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
