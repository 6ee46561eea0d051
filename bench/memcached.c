/*
 * memcached.c - the cost of memcached and the wire, without hierlock: a lease of three nodes, as the store takes it
 * without contention. The client reads the document of the root. The client then writes, in one packet, the
 * liveness item and, by compare-and-swap, the document. At last it deletes the liveness item. Usage:
 *
 *   memcached HOST PORT lease   The client waits for the release, and reads the document once more.
 *   memcached HOST PORT sent    The release is a packet; the client reads its answer behind the next lock's.
 */
#include "client.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

/* The size of a document of three rows, see csrc/stores/memcached/document.c, and of a
 * usual liveness item, see record.c. */
enum { USERS = 50, DOCUMENT = 99, LIVE = 130 };

static int fd;
static bool sent;
static char in[8192], live[65], root[24], value[LIVE];
static size_t used;
static int unread; /* answers of releases */

static void say(const char *text, int size) {
  if (send(fd, text, (size_t)size, MSG_NOSIGNAL) != size) client_die("memcached", "cannot send");
}

/* Reads until the input ends so, and has at least so many bytes. */
static void hear(const char *end) {
  size_t size = strlen(end);
  while (used < size || memcmp(in + used - size, end, size) != 0) {
    ssize_t n = recv(fd, in + used, sizeof in - 1 - used, 0);
    if (n <= 0) client_die("memcached", "the connection has ended");
    used += (size_t)n;
  }
  in[used] = '\0';
}

static void expect(const char *answer) {
  hear(answer);
  if (strcmp(in, answer) != 0) client_die("memcached says", in);
  used = 0;
}

static void live_draw(void) {
  unsigned char random[48]; /* id, holder, secret */
  if (getrandom(random, sizeof random, 0) != sizeof random) client_die("getrandom", "no bytes");
  for (int i = 0; i < 32; i++) snprintf(live + 2 * i, 3, "%02x", random[i]);
  memcpy(value, random + 32, 16);
}

void client_take(unsigned name) {
  char out[1024], document[DOCUMENT] = {0};
  unsigned long long cas;
  snprintf(root, sizeof root, "%016x", name % USERS * 2654435761u);
  live_draw();
  say(out, snprintf(out, sizeof out, "gets bare:root:%s\r\n", root));
  hear("END\r\n");
  const char *found = in;
  for (; unread > 0; unread--) found += strlen("DELETED\r\n");
  bool there = sscanf(found, "VALUE %*s %*u %*u %llu", &cas) == 1;
  used = 0;
  int size = snprintf(out, sizeof out, "set bare:live:%s 0 61 %d\r\n", live, LIVE);
  memcpy(out + size, value, LIVE);
  size += LIVE;
  size += there ? sprintf(out + size, "\r\ncas bare:root:%s 0 0 %d %llu\r\n", root, DOCUMENT, cas)
                : sprintf(out + size, "\r\nset bare:root:%s 0 0 %d\r\n", root, DOCUMENT);
  memcpy(out + size, document, DOCUMENT);
  size += DOCUMENT;
  size += sprintf(out + size, "\r\n");
  say(out, size);
  expect("STORED\r\nSTORED\r\n");
}

void client_give(void) {
  char out[256];
  if (sent) {
    say(out, snprintf(out, sizeof out, "delete bare:live:%s\r\n", live));
    unread++;
    return;
  }
  say(out, snprintf(out, sizeof out, "gets bare:root:%s\r\ndelete bare:live:%s\r\n", root, live));
  hear("END\r\nDELETED\r\n");
  used = 0;
}

void client_open(int argc, char **argv) {
  struct sockaddr_in address = {.sin_family = AF_INET};
  int on = 1;
  if (argc != 3 || (strcmp(argv[2], "lease") && strcmp(argv[2], "sent")))
    client_die("usage", "memcached HOST PORT lease|sent");
  sent = !strcmp(argv[2], "sent");
  address.sin_port = htons((unsigned short)atoi(argv[1]));
  if (!inet_aton(argv[0], &address.sin_addr)) client_die(argv[0], "is no address");
  fd = socket(AF_INET, SOCK_STREAM, 0);
  if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address))
    client_die(argv[0], "cannot connect");
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}
