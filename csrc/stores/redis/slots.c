/*
 * slots.c - Redis Cluster: which slot a tree is in, and which node has the slot, as far as this
 * process knows.
 */
#include "mode.h"
#include "redis_store.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* CRC16 of the cluster's specification (XMODEM). */
unsigned hl__redis_slot(const char *text, size_t size) {
  unsigned crc = 0;
  for (size_t i = 0; i < size; i++) {
    crc ^= (unsigned)(unsigned char)text[i] << 8;
    for (int bit = 0; bit < 8; bit++) crc = crc & 0x8000 ? (crc << 1 ^ 0x1021) & 0xffff : crc << 1;
  }
  return crc % HL__REDIS_SLOTS;
}

unsigned hl__redis_slot_of_root(uint32_t root) {
  char tag[9];
  (void)snprintf(tag, sizeof tag, "%08" PRIx32, root);
  return hl__redis_slot(tag, 8);
}

/* "MOVED SLOT HOST:PORT": it is that node's from now on, if we know it; else the map is read again.
   */
static void hint(hl__redis_session *session, const char *said) {
  hl__redis_store *store = session->store;
  hl__redis_cluster *cluster = store->cluster;
  unsigned slot;
  int at = 0;
  if (strncmp(said, "MOVED ", 6) != 0) return;
  atomic_store(&cluster->stale, true);
  if (sscanf(said, "MOVED %u %n", &slot, &at) != 1 || !at || slot >= HL__REDIS_SLOTS) return;
  hl__redis_store_lock(store);
  for (unsigned i = 0; i < cluster->n; i++) {
    char name[300];
    (void)snprintf(name, sizeof name, "%s:%u", cluster->nodes[i].address.host,
                   cluster->nodes[i].address.port);
    if (strcmp(name, said + at) != 0) continue;
    cluster->owner[slot] = (uint8_t)i;
    atomic_store(&cluster->stale, false);
  }
  hl__redis_store_unlock(store);
}

static int cluster_make(hl__redis_store *store, hl_error *error) {
  hl__redis_cluster *cluster = calloc(1, sizeof *cluster);
  if (!cluster) return hl__error_memory(error);
  memset(cluster->owner, HL__REDIS_NO_NODE, sizeof cluster->owner);
  unsigned found = 0;
  for (uint32_t number = 1; found < HL__REDIS_SLOTS; number++) {
    char tag[9];
    int size = snprintf(tag, sizeof tag, "%" PRIx32, number);
    unsigned slot = hl__redis_slot(tag, (size_t)size);
    if (cluster->tags[slot]) continue;
    cluster->tags[slot] = number;
    found++;
  }
  store->hint = hint;
  store->cluster = cluster;
  return HL_OK;
}

void hl__redis_memory_key(const hl__redis_store *store, uint32_t root, char out[96]) {
  if (store->cluster)
    (void)snprintf(out, 96, "%s:{%" PRIx32 "}:memory", store->prefix,
                   store->cluster->tags[hl__redis_slot_of_root(root)]);
  else
    (void)snprintf(out, 96, "%s:memory", store->prefix);
}

bool hl__redis_memory_seen(hl__redis_store *store, uint32_t root) {
  return atomic_load(store->cluster ? &store->cluster->seen[hl__redis_slot_of_root(root)]
                                    : &store->seen);
}

void hl__redis_memory_see(hl__redis_store *store, uint32_t root) {
  atomic_store(&store->seen, true);
  if (store->cluster) atomic_store(&store->cluster->seen[hl__redis_slot_of_root(root)], true);
}

/* ------------------------------------------------------------------ the map */

/* Index of the node; HL__REDIS_NO_NODE: too many. */
static unsigned node_put(hl__redis_cluster *map, const hl__redis_session *from,
                         const redisReply *reply) {
  const char *host = hl__redis_reply_text(reply, 0);
  const char *id = hl__redis_reply_text(reply, 2);
  unsigned i = 0;
  while (i < map->n && strcmp(map->nodes[i].id, id) != 0) i++;
  if (i == HL__REDIS_NODES || strlen(id) != 40) return HL__REDIS_NO_NODE;
  if (i < map->n) return i;
  /* A node that knows no address of its own leaves it out. */
  if (!*host || strcmp(host, "?") == 0) host = from->address.host;
  (void)snprintf(map->nodes[i].id, sizeof map->nodes[i].id, "%s", id);
  (void)snprintf(map->nodes[i].address.host, sizeof map->nodes[i].address.host, "%s", host);
  map->nodes[i].address.port = (unsigned)hl__redis_reply_number(reply, 1);
  return map->n++;
}

static void map_read(hl__redis_cluster *map, const hl__redis_session *from,
                     const redisReply *reply) {
  for (size_t i = 0; i < (size_t)reply->elements; i++) {
    const redisReply *range = reply->element[i];
    if (range->type != REDIS_REPLY_ARRAY || range->elements < 3) continue;
    int64_t slot = hl__redis_reply_number(range, 0);
    int64_t last = hl__redis_reply_number(range, 1);
    unsigned owner = node_put(map, from, range->element[2]);
    for (; slot >= 0 && slot <= last && slot < HL__REDIS_SLOTS; slot++)
      map->owner[slot] = (uint8_t)owner;
  }
}

int hl__redis_cluster_read(hl__redis_session *session, int64_t deadline, hl_error *error) {
  hl__redis_store *store = session->store;
  const char *words[] = {"CLUSTER", "SLOTS"}, *who[] = {"CLUSTER", "MYID"};
  redisReply *reply;
  int status = store->cluster ? HL_OK : cluster_make(store, error);
  if (status) return status;
  status = hl__redis_command(session, deadline, 2, who, &reply, error);
  if (status) return status;
  (void)snprintf(session->node_id, sizeof session->node_id, "%s",
                 reply->type == REDIS_REPLY_STRING ? reply->str : "");
  freeReplyObject(reply);
  if (session->face != session) return HL_OK;
  hl__redis_cluster *map = calloc(1, sizeof *map);
  if (!map) return hl__error_memory(error);
  atomic_store(&store->cluster->stale, false);
  memset(map->owner, HL__REDIS_NO_NODE, sizeof map->owner);
  status = hl__redis_command(session, deadline, 2, words, &reply, error);
  if (status == HL_OK && reply->type == REDIS_REPLY_ARRAY) map_read(map, session, reply);
  if (status == HL_OK) freeReplyObject(reply);
  if (status == HL_OK && map->n) {
    hl__redis_store_lock(store);
    store->cluster->n = map->n;
    memcpy(store->cluster->nodes, map->nodes, sizeof map->nodes);
    memcpy(store->cluster->owner, map->owner, sizeof map->owner);
    hl__redis_store_unlock(store);
  }
  free(map);
  return status;
}

/* Where a new session connects to: the DSN's address, or, after that has failed, the others.
   False: no such address. */
bool hl__redis_cluster_seed(hl__redis_store *store, unsigned i, hl__redis_address *address) {
  if (!store->cluster) return false;
  hl__redis_store_lock(store);
  unsigned at = i % (store->cluster->n + 1);
  if (at) *address = store->cluster->nodes[at - 1].address;
  hl__redis_store_unlock(store);
  return at != 0;
}

unsigned hl__redis_cluster_size(hl__redis_store *store) {
  if (!store->cluster) return 0;
  hl__redis_store_lock(store);
  unsigned n = store->cluster->n;
  hl__redis_store_unlock(store);
  return n;
}

int hl__redis_one_root(const hl__redis_store *store, const hl_row *rows, size_t n,
                       hl_error *error) {
  size_t roots = hl__roots(&rows, n);
  if (!store->cluster || roots < 2) return HL_OK;
  return hl__error(error, HL_EUNSUPPORTED,
                   "the call is over %zu roots: in Redis Cluster each has a slot "
                   "of its own, and no step is over two; call once for each",
                   roots);
}
