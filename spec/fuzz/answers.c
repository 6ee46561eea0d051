/* answers.c - a server, or a program that claims to be one, answers anything at all. A caller
   that connects, acquires, extends, looks and releases succeeds or gets an error in one line, in
   time. The input is a byte of choices, and then the packets that the server says. Each begins
   with two bytes: its size, and what else becomes of it (see below). The packets up to one that
   is the last of an answer are sent when the client has said something, or does not say
   anything; at the end the connection is closed.

   FUZZ_RECORD="port user password database file", and one run with any input: makes the same
   calls on a real server, and writes its answers to the file, as an input. */
#include "fuzz.h"

#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { LAST = 0x8000, RAW = 0x4000, NUMBERED_WRONG = 0x2000, END = 0x1000 };
#define SIZE_MAX_ 0x0FFF /* of a packet */

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);

enum { OVER_TCP = 1, TLS_PREFERRED = 2 };

/* A client that does not say anything for so long waits for more. */
#define SILENCE_MS 5
/* All together; on a busy machine. Each call has at most the time that connecting has. */
#define IN_TIME_MS 30000

static char directory[] = "/tmp/hierlock-fuzz-XXXXXX";
static char socket_path[64];
static int by_tcp, by_path; /* listening */
static unsigned port;
static int done[2]; /* a pipe: the client needs no server any more */

/* The real server. */
static int real_port;
static char real_user[64], real_password[64], real_database[64], real_file[256];
static FILE *record;

/* -------------------------------------------------------------- the server */

static bool wait_for(int fd, int ms) {
  struct pollfd p = {.fd = fd, .events = POLLIN};
  return poll(&p, 1, ms) > 0;
}

static bool read_all(int fd, uint8_t *data, size_t n) {
  return n == 0 || recv(fd, data, n, MSG_WAITALL) == (ssize_t)n;
}

/* Reads one command of the client's that wants an answer, and sets the number that the next
   packet has. False when no command comes in time. *ended: none will come. */
static bool command_read(int client, uint8_t *number, bool *ended) {
  static uint8_t said[1 << 16];
  for (;;) {
    uint8_t head[4];
    if (!wait_for(client, SILENCE_MS)) return false;
    *ended = true;
    if (!read_all(client, head, 4)) return false;
    size_t n = head[0] | (size_t)head[1] << 8 | (size_t)head[2] << 16;
    if (n > sizeof said || !read_all(client, said, n)) return false;
    *ended = false;
    *number = head[3] + 1;
    /* COM_STMT_CLOSE, COM_STMT_SEND_LONG_DATA; the answer to a greeting is longer. */
    if (n == 0 || head[3] > 0 || (said[0] != 0x19 && said[0] != 0x18)) return true;
  }
}

typedef struct answer {
  size_t n;
  uint8_t bytes[1 << 16];
} answer;

/* Adds one packet, or what there is room for. Returns its head. */
static unsigned packet_add(answer *self, input *in, uint8_t *number) {
  unsigned head = (unsigned)take_byte(in) << 8;
  head |= take_byte(in);
  size_t n = head & SIZE_MAX_;
  const uint8_t *payload = take_bytes(in, &n);
  if (head & NUMBERED_WRONG) ++*number;
  const uint8_t frame[4] = {(uint8_t)n, (uint8_t)(n >> 8), 0, *number};
  ++*number;
  if (self->n + sizeof frame + n > sizeof self->bytes) return head | LAST;
  if (!(head & RAW)) {
    memcpy(self->bytes + self->n, frame, sizeof frame);
    self->n += sizeof frame;
  }
  memcpy(self->bytes + self->n, payload, n);
  self->n += n;
  return head;
}

static void play(int client, input *in) {
  static answer next;
  uint8_t number = 0;
  bool ended = false;
  size_t sent = 0;
  while (!ended && in->left > 0) {
    unsigned head = 0;
    next.n = 0;
    while (in->left > 0 && !(head & (LAST | END))) head = packet_add(&next, in, &number);
    /* Connector/C 3.3 takes a greeting that is error 65535 for a report of progress, and
       looks for the version of the server, which it has not got: NULL. */
    if (sent < 6 && sent + next.n > 5) next.bytes[5 - sent] &= 0x7F;
    sent += next.n;
    if (send(client, next.bytes, next.n, MSG_NOSIGNAL) != (ssize_t)next.n || (head & END)) break;
    (void)command_read(client, &number, &ended);
  }
  (void)shutdown(client, SHUT_WR);
  uint8_t rest[4096];
  while (recv(client, rest, sizeof rest, 0) > 0) {}
}

/* Between the client and the real server; what that says is written down. */
static void pass_on(int client) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)real_port)};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CLAIM(connect(server, (struct sockaddr *)&address, sizeof address) == 0);
  uint8_t answer[1 << 16], bytes[1 << 14];
  size_t n = 0;
  for (;;) {
    struct pollfd p[2] = {{.fd = client, .events = POLLIN}, {.fd = server, .events = POLLIN}};
    CLAIM(poll(p, 2, -1) > 0);
    if (p[0].revents) {
      /* The packets before are one answer. */
      for (size_t at = 0; at + 4 <= n;) {
        size_t size = answer[at] | (size_t)answer[at + 1] << 8;
        size_t head = size | (at + 4 + size == n ? LAST : 0);
        CLAIM(size <= SIZE_MAX_ && at + 4 + size <= n);
        (void)fprintf(record, "%c%c", (int)(head >> 8), (int)(head & 255));
        (void)fwrite(answer + at + 4, 1, size, record);
        at += 4 + size;
      }
      n = 0;
      ssize_t got = recv(client, bytes, sizeof bytes, 0);
      if (got <= 0) break;
      (void)send(server, bytes, (size_t)got, MSG_NOSIGNAL);
    }
    if (p[1].revents) {
      ssize_t got = recv(server, answer + n, sizeof answer - n, 0);
      if (got <= 0) break;
      (void)send(client, answer + n, (size_t)got, MSG_NOSIGNAL);
      n += (size_t)got;
    }
  }
  (void)close(server);
}

/* Serves one connection after the other. */
static void *serve(void *context) {
  for (;;) {
    struct pollfd p[3] = {{.fd = by_tcp, .events = POLLIN},
                          {.fd = by_path, .events = POLLIN},
                          {.fd = done[0], .events = POLLIN}};
    CLAIM(poll(p, 3, -1) > 0);
    int listener = p[0].revents ? by_tcp : by_path;
    if (!p[0].revents && !p[1].revents) break;
    int client = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (client < 0) continue;
    if (record)
      pass_on(client);
    else
      play(client, context);
    /* No TIME_WAIT: there are more connections than ports. */
    struct linger now = {.l_onoff = 1};
    (void)setsockopt(client, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    (void)close(client);
  }
  char byte;
  CLAIM(read(done[0], &byte, 1) == 1);
  return NULL;
}

static void at_exit(void) {
  (void)unlink(socket_path);
  (void)rmdir(directory);
}

static void begin(void) {
  struct sockaddr_in address = {.sin_family = AF_INET};
  struct sockaddr_un path = {.sun_family = AF_UNIX};
  socklen_t size = sizeof address;
  CLAIM(mkdtemp(directory));
  (void)snprintf(socket_path, sizeof socket_path, "%s/socket", directory);
  strcpy(path.sun_path, socket_path);
  (void)atexit(at_exit);
  by_path = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CLAIM(bind(by_path, (struct sockaddr *)&path, sizeof path) == 0);
  CLAIM(listen(by_path, 64) == 0);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  by_tcp = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CLAIM(bind(by_tcp, (struct sockaddr *)&address, size) == 0);
  CLAIM(listen(by_tcp, 64) == 0);
  CLAIM(getsockname(by_tcp, (struct sockaddr *)&address, &size) == 0);
  port = ntohs(address.sin_port);
  CLAIM(pipe(done) == 0);
  const char *real = getenv("FUZZ_RECORD");
  if (!real) return;
  CLAIM(sscanf(real, "%d %63s %63s %63s %255s", &real_port, real_user, real_password, real_database,
               real_file) == 5);
  record = fopen(real_file, "w");
  CLAIM(record && fputc(OVER_TCP, record) == OVER_TCP);
}

/* -------------------------------------------------------------- the client */

static int64_t now_ms(void) {
  struct timespec t;
  (void)clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void holder_seen(void *context, const hl_holder *holder) {
  (void)context;
  claim_text(holder->application, sizeof holder->application);
  claim_text(holder->host, sizeof holder->host);
  claim_text(holder->label, sizeof holder->label);
  claim_text(holder->path, sizeof holder->path);
  CLAIM(holder->mode == HL_SHARED || holder->mode == HL_EXCLUSIVE);
}

static hl_plan *plan_of(hl_manager *manager, const char *user, const char *account) {
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  hl_id ids[] = {{user, strlen(user)}, {account, strlen(account)}};
  unsigned n = hl_layout_levels(hl_manager_layout(manager)) > 1 ? 2 : 1;
  CLAIM(hl_plan_add(plan, ids, n, HL_EXCLUSIVE, false, NULL) == HL_OK);
  return plan;
}

static void claim_outcome(int status, const hl_error *error) {
  if (status) claim_error(error, status);
}

/* Acquires and gives back, three times, for the third time it is prepared; and what else
   can be done with a lock. */
static void use(hl_manager *manager) {
  hl_error error;
  hl_plan *plan = plan_of(manager, "u1", "a1"), *more = plan_of(manager, "u2", "a");
  hl_options options = HL_OPTIONS_INIT;
  options.timeout = 0;
  options.label = "\x1b[1mlabel";
  options.label_size = 9;
  claim_outcome(hl_manager_holders(manager, plan, holder_seen, NULL, &error), &error);
  for (int i = 0; i < 4; i++) {
    hl_lock *lock = NULL;
    int status = hl_acquire(manager, plan, &options, &lock, &error);
    claim_outcome(status, &error);
    CLAIM((status == HL_OK) == (lock != NULL));
    if (!lock) continue;
    claim_outcome(hl_lock_check(lock, &error), &error);
    if (i == 0) claim_outcome(hl_lock_extend(lock, more, &options, &error), &error);
    /* The lock may be lost in between. */
    bool held = hl_lock_remaining(lock) > 0;
    CLAIM(held || !hl_lock_is_held(lock));
    claim_outcome(hl_lock_release(lock, true, &error), &error);
    CLAIM(!hl_lock_is_held(lock));
    hl_lock_free(lock);
  }
  claim_outcome(hl_manager_holders(manager, plan, holder_seen, NULL, &error), &error);
  hl_pending *pending = NULL;
  claim_outcome(hl_start(manager, plan, &options, &pending, &error), &error);
  if (pending) {
    hl_lock *lock = NULL;
    claim_outcome(hl_pending_wait(pending, IN_TIME_MS, &lock, &error), &error);
    CLAIM(hl_pending_done(pending));
    (void)hl_pending_holders(pending, holder_seen, NULL, NULL);
    hl_pending_free(pending);
    hl_lock_free(lock);
  }
  hl_plan_free(plan);
  hl_plan_free(more);
}

/* ------------------------------------------------------------- the mutator */

/* Without this most changed inputs are no answers any more: one packet is changed, left out or
   said twice, as often as anything is. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
  static uint8_t packet[SIZE_MAX_ + 1];
  size_t at[1024], n = 0;
  for (size_t i = 1; i + 2 <= size && n < 1023;) {
    at[n++] = i;
    i += 2 + ((size_t)data[i] << 8 | data[i + 1]) % (SIZE_MAX_ + 1);
  }
  if (n == 0 || seed % 8 < 3) return LLVMFuzzerMutate(data, size, max_size);
  size_t i = seed / 8 % n, begins = at[i];
  size_t ends = i + 1 < n ? at[i + 1] : size;
  if (ends > size || ends < begins + 2) return LLVMFuzzerMutate(data, size, max_size);
  size_t rest = size - ends, payload = ends - begins - 2;
  uint8_t flags = data[begins] & 0xF0;
  switch (seed % 8) {
  case 3: memmove(data + begins, data + ends, rest); return begins + rest;
  case 4:
    if (size + payload + 2 > max_size) return size;
    memmove(data + ends + payload + 2, data + ends, rest);
    memcpy(data + ends, data + begins, payload + 2);
    return size + payload + 2;
  case 5: data[begins] ^= (uint8_t)(0x10 << seed / 8 / 1024 % 4); return size;
  default: {
    size_t most = max_size - begins - 2 - rest;
    memcpy(packet, data + begins + 2, payload);
    if (most > SIZE_MAX_) most = SIZE_MAX_;
    if (payload > most) return size;
    payload = LLVMFuzzerMutate(packet, payload, most);
    memmove(data + begins + 2 + payload, data + ends, rest);
    memcpy(data + begins + 2, packet, payload);
    data[begins] = flags | (uint8_t)(payload >> 8);
    data[begins + 1] = (uint8_t)payload;
    return begins + 2 + payload + rest;
  }
  }
}

/* Connector/C leaks the part that it has read of a result whose columns need more memory than
   there is. spec/core/test_memory.c checks that every result is freed. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void) { return "leak:libmariadb.so\n"; }

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const struct hl_store_ops *const stores[] = {&hl_store_mysql, NULL};
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager = NULL;
  hl_error error;
  pthread_t server;
  char dsn[400], path[80] = "";
  if (port == 0) begin();
  input in = {data, size};
  uint8_t choices = record ? OVER_TCP : take_byte(&in);
  if (!(choices & OVER_TCP)) (void)snprintf(path, sizeof path, "&socket=%s", socket_path);
  (void)snprintf(dsn, sizeof dsn, "mysql://%s:%s@127.0.0.1:%u/%s?connect_timeout=1&tls=%s%s",
                 record ? real_user : "user", record ? real_password : "password", port,
                 record ? real_database : "db", choices & TLS_PREFERRED ? "preferred" : "off",
                 path);
  CLAIM(pthread_create(&server, NULL, serve, &in) == 0);
  config.dsn = dsn;
  config.stores = stores;
  config.application = "fuzz";
  int64_t start = now_ms();
  int status = hl_manager_open(&config, &manager, &error);
  claim_outcome(status, &error);
  CLAIM((status == HL_OK) == (manager != NULL));
  if (record) fprintf(stderr, "%s\n", manager ? "opened" : error.message);
  if (manager) {
    use(manager);
    hl_manager_close(manager);
  }
  CLAIM(now_ms() - start < IN_TIME_MS);
  CLAIM(write(done[1], "", 1) == 1);
  CLAIM(pthread_join(server, NULL) == 0);
  if (record) _exit(fclose(record));
  return 0;
}
