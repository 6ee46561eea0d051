/*
 * bell.c - wakes an event loop from the library's threads. nginx lets Lua code poll only
 * sockets that this code has connected. So the process listens on a Unix socket, the loop
 * connects to it, and a thread that ends a pending writes the pending's number to the
 * other end: eight hexadecimal digits.
 *
 * The listening socket leaves no name in the file system, where it could stay behind or be
 * found by a stranger: the name is removed as soon as it is bound. The loop reaches the
 * socket through /proc/self/fd.
 *
 * Writing never blocks. When the socket is full because the loop is busy, the number is
 * dropped and `missed` is set: the reader then looks at all pendings. He will, since
 * a full socket has something to read.
 */
/*** @module hierlock */
#include "hll.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

/* One for each process. Its mutex is taken after all those of mutex.h. */
static struct {
  pthread_mutex_t mutex;
  pid_t process; /* that made it: a forked child makes its own */
  int listener;
  int place;  /* O_PATH: /proc/self/fd leads through it to the listener */
  int writer; /* our end of the loop's connection; -1: the loop has none */
  bool missed;
} bell = {PTHREAD_MUTEX_INITIALIZER, 0, -1, -1, -1, false};

static int failure(lua_State *L, const char *what) {
  lua_pushnil(L);
  lua_pushfstring(L, "%s: %s", what, strerror(errno));
  return 2;
}

static void discard(int *fd) {
  if (*fd >= 0) (void)close(*fd);
  *fd = -1;
}

/* Binds the socket in a new directory, opens the place, and removes both names. */
static bool bind_and_unlink(int fd, int *place) {
  static const char *const parents[] = {"/dev/shm", "/tmp", "/var/tmp"};
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  char directory[64];
  bool made = false;
  for (size_t i = 0; i < 3 && !made; i++) {
    (void)snprintf(directory, sizeof directory, "%s/hierlock-XXXXXX",
                   parents[i]);
    made = mkdtemp(directory) != NULL; /* mode 0700 */
  }
  if (!made) return false;
  (void)snprintf(address.sun_path, sizeof address.sun_path, "%s/bell",
                 directory);
  bool bound = bind(fd, (struct sockaddr *)&address, sizeof address) == 0;
  if (bound) *place = open(address.sun_path, O_PATH | O_CLOEXEC);
  int failed = errno;
  if (bound) (void)unlink(address.sun_path);
  (void)rmdir(directory);
  errno = failed;
  return bound && *place >= 0 && listen(fd, 8) == 0;
}

/***
The address to which the event loop is to connect; for hierlock's own Lua code, as
all functions of the bell.
@function core.bell_address
@local
@treturn[1] string
@return[2] nil
@treturn[2] string why not
*/
static int address(lua_State *L) {
  if (bell.process != getpid()) {
    pthread_mutex_lock(&bell.mutex);
    discard(&bell.listener);
    discard(&bell.place);
    discard(&bell.writer);
    bell.process = 0;
    pthread_mutex_unlock(&bell.mutex);
    bell.listener =
        socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (bell.listener < 0) return failure(L, "cannot make a socket");
    if (!bind_and_unlink(bell.listener, &bell.place)) {
      int values = failure(L, "cannot make a socket in /dev/shm or /tmp");
      discard(&bell.listener);
      discard(&bell.place);
      return values;
    }
    bell.process = getpid();
  }
  lua_pushfstring(L, "unix:/proc/self/fd/%d", bell.place);
  return 1;
}

/***
Accepts the loop's connection. An earlier one is closed.
@function core.bell_answer
@local
@treturn[1] boolean true
@return[2] nil
@treturn[2] string why not
*/
static int answer(lua_State *L) {
  for (;;) {
    int fd = accept4(bell.listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return failure(L, "cannot accept the bell's own connection");
    struct ucred peer = {0};
    socklen_t size = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 ||
        peer.pid != getpid()) {
      (void)close(fd); /* a stranger has come through our /proc */
      continue;
    }
    pthread_mutex_lock(&bell.mutex);
    discard(&bell.writer);
    bell.writer = fd;
    bell.missed = false;
    pthread_mutex_unlock(&bell.mutex);
    lua_pushboolean(L, 1);
    return 1;
  }
}

/***
Closes the loop's connection.
@function core.bell_end
@local
@return nothing
*/
static int end(lua_State *L) {
  (void)L;
  pthread_mutex_lock(&bell.mutex);
  discard(&bell.writer);
  pthread_mutex_unlock(&bell.mutex);
  return 0;
}

/***
Whether a number has been dropped since the last call.
@function core.bell_missed
@local
@treturn boolean
*/
static int missed(lua_State *L) {
  pthread_mutex_lock(&bell.mutex);
  lua_pushboolean(L, bell.missed);
  bell.missed = false;
  pthread_mutex_unlock(&bell.mutex);
  return 1;
}

/* Called by the thread that ends the pending. */
static void ring(uint64_t number) {
  char digits[9];
  (void)snprintf(digits, sizeof digits, "%08x", (unsigned)number);
  pthread_mutex_lock(&bell.mutex);
  if (bell.writer >= 0 && send(bell.writer, digits, 8, MSG_NOSIGNAL) != 8)
    bell.missed = true;
  pthread_mutex_unlock(&bell.mutex);
}

/***
Writes the number to the loop when the pending is done. While the loop is not connected
nothing is written: once connected, it looks at all pendings first.
@function core.bell_ring
@local
@param pending
@int number 1 to 2^32 - 1
@return nothing
*/
static int ring_when_done(lua_State *L) {
  hll_pending *pending = hll_pending_test(L, 1);
  lua_Number number = luaL_checknumber(L, 2);
  if (pending && pending->pending)
    hl_pending_notify(pending->pending, ring, (uint64_t)number);
  return 0;
}

void hll_bell_register(lua_State *L) {
  static const luaL_Reg functions[] = {
      {"bell_address", address}, {"bell_answer", answer},
      {"bell_end", end},         {"bell_missed", missed},
      {"bell_ring", ring_when_done}, {NULL, NULL}};
  hll_setfuncs(L, functions);
}
