/*
 * proxy.c - a TCP proxy that makes a bad network: two threads for each connection,
 * one for each direction. From time to time a connection
 *
 *   is slow     what comes is passed on after up to 0.2 s, byte by byte at times
 *   is cut      nothing is passed on any more, in either direction; both ends stay open,
 *               and whatever is sent is taken
 *   is reset    both ends are closed
 *
 * Now and then all that there are are cut at once: then some hold for long.
 *
 * It connects from 127.0.0.2, so that an administrator can tell its connections.
 */
#include "soak.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

typedef struct connection {
  int client, server;
  _Atomic bool cut;
  _Atomic int references;
  uint64_t seed;
  int64_t began;
} connection;

typedef struct direction {
  connection *both;
  int from, to;
  dice dice;
} direction;

static int server_port;

static int connect_server(void) {
  struct sockaddr_in from = {.sin_family = AF_INET}, to = {.sin_family = AF_INET};
  int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  from.sin_addr.s_addr = htonl(0x7f000002);
  to.sin_addr.s_addr = htonl(0x7f000001);
  to.sin_port = htons((uint16_t)server_port);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  if (bind(fd, (struct sockaddr *)&from, sizeof from) == 0 &&
      connect(fd, (struct sockaddr *)&to, sizeof to) == 0)
    return fd;
  (void)close(fd);
  return -1;
}

static bool pass_on(direction *self, const char *data, ssize_t n, bool in_pieces) {
  while (n > 0) {
    size_t piece = in_pieces ? 1 + (size_t)roll_below(&self->dice, 40) : (size_t)n;
    if (piece > (size_t)n) piece = (size_t)n;
    ssize_t sent = send(self->to, data, piece, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    data += sent;
    n -= sent;
    if (in_pieces) (void)usleep((unsigned)roll_below(&self->dice, 5000));
    if (atomic_load(&self->both->cut)) return true;
  }
  return true;
}

static void *direction_main(void *argument) {
  direction *self = argument;
  char data[16 * 1024];
  connection *both = self->both;
  for (;;) {
    ssize_t n = recv(self->from, data, sizeof data, 0);
    if (n <= 0) break;
    if (atomic_load(&both->cut)) continue;
    int kind = roll_below(&self->dice, 5000);
    bool in_pieces = false;
    if (atomic_load(&shared->proxy_harmless)) kind = 4999;
    if (kind < 4 || both->began < atomic_load(&shared->partition)) {
      atomic_store(&both->cut, true);
      (void)atomic_fetch_add(&shared->cuts, 1u);
      /* Half of these with the first bytes of an answer. */
      if (kind < 2) (void)send(self->to, data, 1 + (size_t)roll_below(&self->dice, n > 8 ? 8 : (int)n), MSG_NOSIGNAL);
      continue;
    }
    if (kind < 8) {
      (void)atomic_fetch_add(&shared->resets, 1u);
      break;
    }
    if (kind < 40) {
      (void)atomic_fetch_add(&shared->delays, 1u);
      (void)usleep((unsigned)roll_below(&self->dice, 200000));
      in_pieces = kind < 14;
    }
    if (!pass_on(self, data, n, in_pieces)) break;
  }
  /* The client first: it should know before the server frees anything. Not of a cut
     connection: nobody learns anything. */
  if (!atomic_load(&both->cut) || self->from == both->client) {
    (void)shutdown(both->client, SHUT_RDWR);
    if (!atomic_load(&both->cut)) (void)shutdown(both->server, SHUT_RDWR);
  }
  if (atomic_fetch_sub(&both->references, 1) == 1) {
    (void)close(both->client);
    (void)close(both->server);
    free(both);
  }
  free(self);
  return NULL;
}

static void *accept_main(void *argument) {
  connection *both = argument;
  both->server = connect_server();
  if (both->server < 0) {
    (void)close(both->client);
    free(both);
    return NULL;
  }
  atomic_store(&both->references, 2);
  direction *up = calloc(1, sizeof *up), *down = calloc(1, sizeof *down);
  if (!up || !down) abort();
  *up = (direction){both, both->client, both->server, dice_of(both->seed, 1)};
  *down = (direction){both, both->server, both->client, dice_of(both->seed, 2)};
  pthread_t id;
  if (pthread_create(&id, NULL, direction_main, down)) abort();
  (void)pthread_detach(id);
  return direction_main(up);
}

int proxy_main(int listener, int port, uint64_t seed) {
  server_port = port;
  for (uint64_t n = 0;; n++) {
    int one = 1, client = accept(listener, NULL, NULL);
    if (client < 0) continue;
    (void)setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    connection *both = calloc(1, sizeof *both);
    if (!both) abort();
    both->client = client;
    both->seed = seed + n;
    both->began = now_ns();
    pthread_t id;
    if (pthread_create(&id, NULL, accept_main, both)) abort();
    (void)pthread_detach(id);
  }
}
