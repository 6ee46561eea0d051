/*
 * cluster.c - Redis Cluster: which node has a tree. All keys of a tree are in one slot, and each step of the
 * protocol is one script on the master of that slot. So a session has a connection of its own (the face: any
 * node, which tells the map), and one to each master that it has asked, made when it is first needed.
 *
 * The map may be wrong at any time: a node runs no script for a slot that it does not serve. While a slot is
 * being moved, its old master refuses scripts that touch a key which is not there, be it moved or new;
 * so nothing is granted. We never send ASKING: with it the new master would run a script though
 * leases may still be at the old one, and two would hold them.
 */
#include "mode.h"
#include "redis_store.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define SLOTS HL__REDIS_SLOTS
#define NODES 255
#define NOBODY 255

typedef struct node {
  char id[41];
  hl__redis_address address;
} node;

struct hl__redis_cluster {
  atomic_bool stale; /* a node has said so */
  atomic_bool seen[SLOTS];
  /* The masters, so many. This and what follows: under the store's mutex. */
  unsigned n;
  node nodes[NODES];
  uint8_t owner[SLOTS]; /* index, or NOBODY */
  /* A number, in hexadecimal a tag of that slot. Never changed. */
  uint32_t tags[SLOTS];
};

/* CRC16 of the cluster's specification (XMODEM). */
static unsigned slot_of(const char *text, size_t size) {
  unsigned crc = 0;
  for (size_t i = 0; i < size; i++) {
    crc ^= (unsigned)(unsigned char)text[i] << 8;
    for (int bit = 0; bit < 8; bit++) crc = crc & 0x8000 ? (crc << 1 ^ 0x1021) & 0xffff : crc << 1;
  }
  return crc % SLOTS;
}

static unsigned slot_of_root(uint32_t root) {
  char tag[9];
  (void)snprintf(tag, sizeof tag, "%08" PRIx32, root);
  return slot_of(tag, 8);
}

static int cluster_make(hl__redis_store *store, hl_error *error) {
  hl__redis_cluster *cluster = calloc(1, sizeof *cluster);
  if (!cluster) return hl__error_memory(error);
  memset(cluster->owner, NOBODY, sizeof cluster->owner);
  unsigned found = 0;
  for (uint32_t number = 1; found < SLOTS; number++) {
    char tag[9];
    int size = snprintf(tag, sizeof tag, "%" PRIx32, number);
    unsigned slot = slot_of(tag, (size_t)size);
    if (cluster->tags[slot]) continue;
    cluster->tags[slot] = number;
    found++;
  }
  store->cluster = cluster;
  return HL_OK;
}

void hl__redis_memory_key(const hl__redis_store *store, uint32_t root, char out[96]) {
  if (store->cluster)
    (void)snprintf(out, 96, "%s:{%" PRIx32 "}:memory", store->prefix,
                   store->cluster->tags[slot_of_root(root)]);
  else
    (void)snprintf(out, 96, "%s:memory", store->prefix);
}

bool hl__redis_memory_seen(hl__redis_store *store, uint32_t root) {
  return atomic_load(store->cluster ? &store->cluster->seen[slot_of_root(root)] : &store->seen);
}

void hl__redis_memory_see(hl__redis_store *store, uint32_t root) {
  atomic_store(&store->seen, true);
  if (store->cluster) atomic_store(&store->cluster->seen[slot_of_root(root)], true);
}

/* ------------------------------------------------------------------ the map */

/* Index of the node; NOBODY: too many. */
static unsigned node_put(hl__redis_cluster *map, const hl__redis_session *from,
                         const redisReply *reply) {
  const char *host = hl__redis_reply_text(reply, 0);
  const char *id = hl__redis_reply_text(reply, 2);
  unsigned i = 0;
  while (i < map->n && strcmp(map->nodes[i].id, id) != 0) i++;
  if (i == NODES || strlen(id) != 40) return NOBODY;
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
    for (; slot >= 0 && slot <= last && slot < SLOTS; slot++) map->owner[slot] = (uint8_t)owner;
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
  memset(map->owner, NOBODY, sizeof map->owner);
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

/* "MOVED SLOT HOST:PORT": it is that node's from now on, if we know it; else the map is read again. */
void hl__redis_cluster_hint(hl__redis_session *session, const char *said) {
  hl__redis_store *store = session->store;
  hl__redis_cluster *cluster = store->cluster;
  unsigned slot;
  int at = 0;
  if (!cluster || strncmp(said, "MOVED ", 6) != 0) return;
  atomic_store(&cluster->stale, true);
  if (sscanf(said, "MOVED %u %n", &slot, &at) != 1 || !at || slot >= SLOTS) return;
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

/* Where a new session connects to: the DSN's address, or, after that has failed, the others.
   False: no such address. */
bool hl__redis_cluster_seed(hl__redis_store *store, unsigned i, hl__redis_address *address) {
  bool found = false;
  if (!store->cluster || i == 0) return false;
  hl__redis_store_lock(store);
  unsigned n = store->cluster->n + 1;
  if (i % n) {
    *address = store->cluster->nodes[i % n - 1].address;
    found = true;
  }
  hl__redis_store_unlock(store);
  return found;
}

unsigned hl__redis_cluster_size(hl__redis_store *store) {
  if (!store->cluster) return 0;
  hl__redis_store_lock(store);
  unsigned n = store->cluster->n;
  hl__redis_store_unlock(store);
  return n;
}

/* ------------------------------------------------------------- connections */

static hl__redis_session *link_find(hl__redis_session *session, const char *id) {
  for (hl__list *at = session->links.next; at != &session->links; at = at->next) {
    hl__redis_session *link = HL__LIST_ENTRY(at, hl__redis_session, links);
    if (strcmp(link->node_id, id) != 0) continue;
    if (link->outstanding || hl__redis_stands(link)) return link;
    hl__list_remove(&link->links);
    hl__redis_disconnect(link);
    break;
  }
  return NULL;
}

static int link_make(hl__redis_session *session, const node *to, int64_t deadline,
                     hl__redis_session **result, hl_error *error) {
  hl__redis_store *store = session->store;
  const hl_dsn *dsn = store->config->dsn;
  const char *password = dsn->password ? dsn->password : getenv("REDISCLI_AUTH");
  int64_t patience = hl__now_ms() + store->connect_timeout;
  hl__redis_session *link;
  if (patience < deadline) deadline = patience;
  int status = hl__redis_dial(store, &to->address, dsn->user, password, deadline, &link, error);
  if (status == HL_OK) {
    link->face = session;
    status = hl__redis_verify(link, deadline, error);
  }
  if (status == HL_OK && (strcmp(link->node_id, to->id) != 0 || !link->master)) {
    status = hl__error(error, HL_ECONNECTION,
                       "another node of the cluster takes its place: the map is "
                       "read again");
    if (error) error->retryable = true;
  }
  if (status == HL_OK) {
    hl__list_add(&session->links, &link->links);
    *result = link;
    return HL_OK;
  }
  hl__redis_disconnect(link);
  atomic_store(&store->cluster->stale, true);
  atomic_fetch_add(&store->seed, 1u); /* who told of it may not know */
  return status;
}

static int route_node(hl__redis_session *session, const node *to, int64_t deadline,
                      hl__redis_session **at, hl_error *error) {
  if (strcmp(session->node_id, to->id) == 0 && session->master) {
    *at = session;
    return HL_OK;
  }
  *at = link_find(session, to->id);
  if (*at) return HL_OK;
  if (hl__left_ms(deadline) == 0)
    return hl__error(error, HL_TIMEOUT, "there is no connection to the node yet");
  return link_make(session, to, deadline, at, error);
}

static int route_slot(hl__redis_session *session, unsigned slot, int64_t deadline,
                      hl__redis_session **at, hl_error *error) {
  hl__redis_store *store = session->store;
  hl__redis_cluster *cluster = store->cluster;
  node to = {.id = ""};
  for (int i = 0;; i++) {
    if (atomic_load(&cluster->stale) && hl__left_ms(deadline) > 0) {
      int status = hl__redis_cluster_read(session, deadline, error);
      if (status) return status;
    }
    hl__redis_store_lock(store);
    bool owned = cluster->owner[slot] < cluster->n;
    if (owned) to = cluster->nodes[cluster->owner[slot]];
    hl__redis_store_unlock(store);
    if (owned) return route_node(session, &to, deadline, at, error);
    if (i || hl__left_ms(deadline) == 0) break;
    atomic_store(&cluster->stale, true);
  }
  (void)hl__error(error, HL_ECONNECTION,
                  "no node of the cluster serves slot %u (CLUSTER INFO tells its "
                  "state)",
                  slot);
  if (error) error->retryable = true;
  return HL_ECONNECTION;
}

int hl__redis_route(hl__redis_session *session, uint32_t root, int64_t deadline,
                    hl__redis_session **at, hl_error *error) {
  *at = session;
  if (!session->store->cluster) return HL_OK;
  return route_slot(session, slot_of_root(root), deadline, at, error);
}

int hl__redis_route_key(hl__redis_session *session, const char *key, int64_t deadline,
                        hl__redis_session **at, hl_error *error) {
  *at = session;
  if (!session->store->cluster) return HL_OK;
  return route_slot(session, slot_of(key, strlen(key)), deadline, at, error);
}

int hl__redis_each_master(hl__redis_session *session, int64_t deadline,
                          int (*fn)(hl__redis_session *at, void *context, hl_error *error),
                          void *context, hl_error *error) {
  hl__redis_store *store = session->store;
  hl__redis_cluster *cluster = store->cluster;
  if (!cluster) return fn(session, context, error);
  int status = hl__redis_cluster_read(session, deadline, error);
  for (unsigned i = 0; status == HL_OK; i++) {
    node to;
    hl__redis_session *at;
    hl__redis_store_lock(store);
    bool more = i < cluster->n;
    if (more) to = cluster->nodes[i];
    hl__redis_store_unlock(store);
    if (!more) break;
    status = route_node(session, &to, deadline, &at, error);
    if (status == HL_OK) status = fn(at, context, error);
  }
  return status;
}

int hl__redis_one_root(const hl__redis_store *store, const hl_row *rows, size_t n,
                       hl_error *error) {
  size_t roots = 0, updates = hl__update_rows(rows, n);
  rows += updates;
  n -= updates;
  while (roots < n && rows[roots].level == 0) roots++;
  if (!store->cluster || roots < 2) return HL_OK;
  return hl__error(error, HL_EUNSUPPORTED,
                   "the call is over %zu roots: in Redis Cluster each has a slot "
                   "of its own, and no step is over two; call once for each",
                   roots);
}
