/*
 * cluster.c - Redis Cluster: which node has a tree. All keys of a tree are in one slot, and each
 * step of the protocol is one script on the master of that slot. So a session has a connection of
 * its own (the face: any node, which tells the map), and one to each master that it has asked, made
 * when it is first needed.
 *
 * The map may be wrong at any time: a node runs no script for a slot that it does not serve. While
 * a slot is being moved, its old master refuses scripts that touch a key which is not there, be it
 * moved or new; so nothing is granted. We never send ASKING: with it the new master would run a
 * script though leases may still be at the old one, and two would hold them.
 */
#include "redis_store.h"

#include <stdlib.h>
#include <string.h>

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

static int link_make(hl__redis_session *session, const hl__redis_node *to, int64_t deadline,
                     hl__redis_session **result, hl_error *error) {
  hl__redis_store *store = session->store;
  hl__redis_session *link;
  deadline = hl__within_ms(store->connect_timeout, deadline);
  int status = hl__redis_dial(store, &to->address, NULL, deadline, &link, error);
  if (status == HL_OK) {
    link->face = session;
    status = hl__redis_verify(link, deadline, error);
  }
  if (status == HL_OK && (strcmp(link->node_id, to->id) != 0 || !link->master)) {
    status = hl__error(error, HL_ECONNECTION,
                       "another node of the cluster takes its place: the map is read again");
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

static int route_node(hl__redis_session *session, const hl__redis_node *to, int64_t deadline,
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
  hl__redis_node to = {.id = ""};
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
                  "no node of the cluster serves slot %u (CLUSTER INFO tells its state)", slot);
  if (error) error->retryable = true;
  return HL_ECONNECTION;
}

int hl__redis_route(hl__redis_session *session, uint32_t root, int64_t deadline,
                    hl__redis_session **at, hl_error *error) {
  *at = session;
  if (!session->store->cluster) return HL_OK;
  return route_slot(session, hl__redis_slot_of_root(root), deadline, at, error);
}

int hl__redis_route_key(hl__redis_session *session, const char *key, int64_t deadline,
                        hl__redis_session **at, hl_error *error) {
  *at = session;
  if (!session->store->cluster) return HL_OK;
  return route_slot(session, hl__redis_slot(key, strlen(key)), deadline, at, error);
}

int hl__redis_each_master(hl__redis_session *session, int64_t deadline,
                          int (*fn)(hl__redis_session *at, void *context, hl_error *error),
                          void *context, hl_error *error) {
  hl__redis_store *store = session->store;
  hl__redis_cluster *cluster = store->cluster;
  if (!cluster) return fn(session, context, error);
  int status = hl__redis_cluster_read(session, deadline, error);
  for (unsigned i = 0; status == HL_OK; i++) {
    hl__redis_node to;
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
