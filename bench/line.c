/*
 * line.c - a slow line: forwards TCP connections to a server and delivers each byte
 * so many microseconds after it came, in both directions. Bytes do not wait for
 * each other: the line has latency, and no limit of its width. Usage:
 *
 *   line HOST PORT MICROSECONDS
 *
 * The program listens on a port of its own, prints the port, and ends with its
 * standard input.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { ENDS_MAX = 256, CHUNKS = 64, CHUNK = 16384 };

/* Bytes that came, and the time to deliver them. */
struct chunk {
  int64_t due;
  size_t size;
  char data[CHUNK];
};

/* An end of a connection: its input goes to the other end. */
struct end {
  int fd;
  struct end *other;
  struct chunk *ring;
  unsigned first, count;
  bool closing; /* it has ended; the last chunks are under way */
};

static struct end ends[ENDS_MAX];
static int64_t delay_ns;

static void die(const char *what) {
  perror(what);
  exit(1);
}

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void no_delay(int fd) {
  int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

static struct end *end_new(int fd) {
  for (int i = 0; i < ENDS_MAX; i++)
    if (ends[i].fd < 0) {
      ends[i] = (struct end){.fd = fd, .ring = malloc(CHUNKS * sizeof(struct chunk))};
      if (!ends[i].ring) die("malloc");
      no_delay(fd);
      return &ends[i];
    }
  fprintf(stderr, "line: too many connections\n");
  exit(1);
}

static void end_free(struct end *e) {
  close(e->fd);
  free(e->ring);
  e->fd = -1;
}

static void accept_one(int listener, const struct sockaddr *server, socklen_t size) {
  int client = accept(listener, NULL, NULL), fd = socket(AF_INET, SOCK_STREAM, 0);
  if (client < 0 || fd < 0 || connect(fd, server, size)) die("connect");
  struct end *a = end_new(client), *b = end_new(fd);
  a->other = b;
  b->other = a;
}

static void read_some(struct end *e) {
  struct chunk *c = &e->ring[(e->first + e->count) % CHUNKS];
  ssize_t n = read(e->fd, c->data, sizeof c->data);
  c->due = now() + delay_ns;
  if (n <= 0) e->closing = true;
  c->size = n > 0 ? (size_t)n : 0;
  e->count++;
}

/* Delivers the bytes that are due; returns when the next bytes are due, or `next`. A chunk without bytes is the
   end of the connection. */
static int64_t deliver(struct end *e, int64_t next) {
  for (; e->fd >= 0 && e->count; e->first = (e->first + 1) % CHUNKS, e->count--) {
    struct chunk *c = &e->ring[e->first];
    if (c->due > now()) return c->due < next ? c->due : next;
    size_t done = 0;
    while (done < c->size) {
      ssize_t n = write(e->other->fd, c->data + done, c->size - done);
      if (n <= 0 && errno != EINTR) break;
      done += n > 0 ? (size_t)n : 0;
    }
    if (c->size == 0 || done < c->size) {
      end_free(e->other);
      end_free(e);
      return next;
    }
  }
  return next;
}

int main(int argc, char **argv) {
  struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM}, *server;
  struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof own;
  if (argc != 4 || getaddrinfo(argv[1], argv[2], &hints, &server)) {
    fprintf(stderr, "usage: line HOST PORT MICROSECONDS\n");
    return 2;
  }
  delay_ns = atoll(argv[3]) * 1000;
  signal(SIGPIPE, SIG_IGN);
  prctl(PR_SET_TIMERSLACK, 1);
  int listener = socket(AF_INET, SOCK_STREAM, 0);
  if (listener < 0 || bind(listener, (struct sockaddr *)&own, sizeof own) || listen(listener, 64) ||
      getsockname(listener, (struct sockaddr *)&own, &size))
    die("listen");
  printf("%d\n", ntohs(own.sin_port));
  fflush(stdout);
  for (int i = 0; i < ENDS_MAX; i++) ends[i].fd = -1;
  for (;;) {
    struct pollfd polled[ENDS_MAX + 2] = {{.fd = listener, .events = POLLIN},
                                          {.fd = 0, .events = POLLIN}};
    int64_t next = now() + 1000000000;
    for (int i = 0; i < ENDS_MAX; i++) next = deliver(&ends[i], next);
    for (int i = 0; i < ENDS_MAX; i++) {
      bool reads = ends[i].fd >= 0 && !ends[i].closing && ends[i].count < CHUNKS;
      polled[i + 2] = (struct pollfd){.fd = reads ? ends[i].fd : -1, .events = POLLIN};
    }
    int64_t left = next - now();
    struct timespec wait = {left > 0 ? left / 1000000000 : 0, left > 0 ? left % 1000000000 : 0};
    if (ppoll(polled, ENDS_MAX + 2, &wait, NULL) < 0 && errno != EINTR) die("ppoll");
    if (polled[1].revents) return 0;
    for (int i = 0; i < ENDS_MAX; i++)
      if (polled[i + 2].revents && ends[i].fd >= 0) read_some(&ends[i]);
    if (polled[0].revents) accept_one(listener, server->ai_addr, server->ai_addrlen);
  }
}
