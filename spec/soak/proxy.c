/*
 * proxy.c - a TCP proxy that makes a bad network: two threads for each connection,
 * one for each direction. From time to time a connection
 *
 *   is slow     its bytes are passed on after up to 0.2 s, byte by byte at times
 *   is cut      nothing is passed on any more, in either direction; both ends stay open,
 *               and all bytes sent are taken
 *   is reset    both ends are closed
 *   is halved   one of the two directions is closed
 *
 * Of each three connections one passes everything on in single bytes, all the time.
 *
 * Now and then all connections are cut at once: then some hold for long.
 *
 * The proxy connects from 127.0.0.2, so that an administrator can tell its connections.
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
  bool bytes; /* one by one */
  /* Closed after so many packets; 0: not. To the server only while it is logged in to:
     later the holder of a lock would hear of the loss when others have it. */
  int half_up, half_down;
} connection;

typedef struct direction {
  connection *both;
  int from, to;
  dice dice;
} direction;

/* The most bytes of an arrival that go singly; more would take too long. */
#define BYTES_MOST 600

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
  for (int passed = 0; n > 0; passed++) {
    size_t piece = in_pieces ? 1 + (size_t)roll_below(&self->dice, 40) : (size_t)n;
    if (self->both->bytes && passed < BYTES_MOST && !atomic_load(&shared->proxy_harmless))
      piece = 1;
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
  int half_after = self->from == both->client ? both->half_up : both->half_down, packets = 0;
  bool halved = false;
  for (;;) {
    ssize_t n = recv(self->from, data, sizeof data, 0);
    if (n <= 0) break;
    if (halved || atomic_load(&both->cut)) continue;
    if (++packets == half_after && !atomic_load(&shared->proxy_harmless)) {
      (void)atomic_fetch_add(&shared->halves, 1u);
      (void)shutdown(self->to, SHUT_WR);
      halved = true;
      continue;
    }
    int kind = roll_below(&self->dice, 5000);
    bool in_pieces = false;
    if (atomic_load(&shared->proxy_harmless)) kind = 4999;
    if (kind < 4 || both->began < atomic_load(&shared->partition)) {
      atomic_store(&both->cut, true);
      (void)atomic_fetch_add(&shared->cuts, 1u);
      /* Half of these with the first bytes of an answer. */
      if (kind < 2)
        (void)send(self->to, data, 1 + (size_t)roll_below(&self->dice, n > 8 ? 8 : (int)n),
                   MSG_NOSIGNAL);
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
  /* The client first: it should know before the server frees anything. Not the client of a cut
     connection: no side learns anything. */
  if (!atomic_load(&both->cut) || self->from == both->client ||
      both->began < atomic_load(&shared->crashed)) {
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

static void start(void *(*function)(void *), void *argument) {
  pthread_attr_t detached;
  pthread_t id;
  (void)pthread_attr_init(&detached);
  (void)pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  if (pthread_create(&id, &detached, function, argument)) abort();
  (void)pthread_attr_destroy(&detached);
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
  start(direction_main, down);
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
    dice d = dice_of(both->seed, 0);
    int kind = roll_below(&d, 12);
    both->bytes = kind % 3 == 0;
    both->half_up = kind == 1 ? 1 + roll_below(&d, 3) : 0;
    both->half_down = kind == 2 ? 2 + roll_below(&d, 300) : 0;
    start(accept_main, both);
  }
}
