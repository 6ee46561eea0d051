/*
 * clients.c - blocking clients, on the public header: threads that take and release
 * an account again and again, each time at random out of `accounts`. Usage:
 *
 *   clients THREADS ACCOUNTS SECONDS BUCKETS        on $HIERLOCK_DSN
 *
 * Prints the critical sections per second of all threads together.
 */
#include <hierlock.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern const struct hl_store_ops hl_store_mysql;

static hl_manager *manager;
static unsigned accounts;
static atomic_bool stop;
static atomic_ulong sections;

static void die(const hl_error *error) {
  fprintf(stderr, "clients: %s\n", error->message);
  exit(1);
}

static void *client(void *argument) {
  unsigned seed = (unsigned)(size_t)argument;
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  hl_error error;
  hl_lock *lock;
  while (!atomic_load(&stop)) {
    char account[16];
    int size = snprintf(account, sizeof account, "a%u", (unsigned)rand_r(&seed) % accounts);
    hl_id ids[] = {{"u", 1}, {account, (size_t)size}};
    hl_plan_clear(plan);
    if (hl_plan_add(plan, ids, 2, HL_EXCLUSIVE, false, &error)) die(&error);
    if (hl_acquire(manager, plan, NULL, &lock, &error)) die(&error);
    atomic_fetch_add(&sections, 1ul);
    (void)hl_lock_release(lock, false, NULL);
    hl_lock_free(lock);
  }
  hl_plan_free(plan);
  return NULL;
}

int main(int argc, char **argv) {
  if (argc != 5) return 2;
  const struct hl_store_ops *stores[] = {&hl_store_mysql, NULL};
  unsigned threads = (unsigned)atoi(argv[1]), seconds = (unsigned)atoi(argv[3]);
  accounts = (unsigned)atoi(argv[2]);
  hl_config config = HL_CONFIG_INIT;
  hl_error error;
  config.stores = stores;
  if (hl_layout_new(NULL, 0, (uint32_t)atoi(argv[4]), &config.layout, &error) ||
      hl_manager_open(&config, &manager, &error))
    die(&error);
  pthread_t *ids = calloc(threads, sizeof *ids);
  for (unsigned i = 0; i < threads; i++)
    pthread_create(&ids[i], NULL, client, (void *)(size_t)(getpid() * 1000 + (int)i));
  sleep(1); /* connecting */
  unsigned long before = atomic_load(&sections);
  sleep(seconds);
  printf("%.0f\n", (double)(atomic_load(&sections) - before) / seconds);
  atomic_store(&stop, true);
  for (unsigned i = 0; i < threads; i++) pthread_join(ids[i], NULL);
  hl_manager_close(manager);
  return 0;
}
