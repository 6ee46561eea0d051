/*
 * notifier.c - wakes an event loop from the library's threads. nginx lets Lua code poll only
 * sockets that this code has connected. So the process listens on a Unix socket, the loop
 * connects to it, and a thread that ends a pending writes the pending's number to the
 * other end: eight hexadecimal digits.
 *
 * The listening socket has a name in a directory of mode 0700, until the loop has
 * connected. Then the notifier removes both.
 *
 * Each Lua state has a notifier of its own: with `lua_code_cache off` nginx makes a state for each
 * request.
 *
 * Writing never blocks. When the socket is full because the loop is busy, the thread drops
 * the number and sets `missed`. A full socket has something to read, so the loop reads, and then
 * looks at all pendings.
 */
/*** @module hierlock */
#include "hll.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

typedef struct notifier notifier;
struct notifier {
  notifier *next;
  uint32_t id;
  pid_t process; /* that made it: a forked child makes its own */
  int listener;
  int writer; /* this end of the loop's connection; -1: the loop has none */
  bool missed;
  struct sockaddr_un address; /* of the listener; "" once its name is removed */
};

/* A thread locks this mutex after the mutexes of mutex.h. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static notifier *notifiers;
static uint32_t last_id;
static const char key; /* of a state's notifier in its registry */

/* A thread that the child does not have may have locked it. The list is whole all the same, as a
   thread changes it by one store. */
static void in_child(void) { mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; }

static void forks_begin(void) { (void)pthread_atfork(NULL, NULL, in_child); }

static int failure(lua_State *L, const char *what) {
  lua_pushnil(L);
  lua_pushfstring(L, "%s: %s", what, strerror(errno));
  return 2;
}

static void discard(int *fd) {
  if (*fd >= 0) (void)close(*fd);
  *fd = -1;
}

static void writer_set(notifier *self, int fd) {
  pthread_mutex_lock(&mutex);
  discard(&self->writer);
  self->writer = fd;
  self->missed = false;
  pthread_mutex_unlock(&mutex);
}

static void name_remove(notifier *self) {
  char *path = self->address.sun_path, *end = strrchr(path, '/');
  if (!end) return;
  (void)unlink(path);
  *end = '\0';
  (void)rmdir(path);
  path[0] = '\0';
}

/* Closes the listener, and removes its name. A child leaves its parent's name alone. */
static void listener_end(notifier *self) {
  discard(&self->listener);
  if (self->process == getpid()) name_remove(self);
  self->address.sun_path[0] = '\0';
}

/* Binds the socket in a new directory. */
static bool listener_begin(notifier *self) {
  static const char *const parents[] = {"/dev/shm", "/tmp", "/var/tmp"};
  struct sockaddr_un *address = &self->address;
  char directory[64];
  bool made = false;
  self->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (self->listener < 0) return false;
  for (size_t i = 0; i < 3 && !made; i++) {
    (void)snprintf(directory, sizeof directory, "%s/hierlock-XXXXXX", parents[i]);
    made = mkdtemp(directory) != NULL; /* mode 0700 */
  }
  if (!made) return false;
  address->sun_family = AF_UNIX;
  (void)snprintf(address->sun_path, sizeof address->sun_path, "%s/notifier", directory);
  return bind(self->listener, (struct sockaddr *)address, sizeof *address) == 0 &&
         listen(self->listener, 8) == 0;
}

static int notifier_gc(lua_State *L) {
  notifier *self = lua_touserdata(L, 1);
  pthread_mutex_lock(&mutex);
  notifier **at = &notifiers;
  while (*at && *at != self) at = &(*at)->next;
  if (*at) *at = self->next;
  pthread_mutex_unlock(&mutex);
  listener_end(self);
  discard(&self->writer);
  return 0;
}

/* Returns the state's notifier, and makes it at first use. */
static notifier *notifier_of(lua_State *L) {
  lua_pushlightuserdata(L, (void *)&key);
  lua_rawget(L, LUA_REGISTRYINDEX);
  notifier *self = lua_touserdata(L, -1);
  if (!self) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, forks_begin);
    self = lua_newuserdata(L, sizeof *self); /* only the registry has it */
    *self = (notifier){.listener = -1, .writer = -1};
    lua_createtable(L, 0, 1);
    lua_pushcfunction(L, notifier_gc);
    lua_setfield(L, -2, "__gc");
    lua_setmetatable(L, -2);
    lua_pushlightuserdata(L, (void *)&key);
    lua_pushvalue(L, -2);
    lua_rawset(L, LUA_REGISTRYINDEX);
    pthread_mutex_lock(&mutex);
    self->id = ++last_id;
    self->next = notifiers;
    notifiers = self;
    pthread_mutex_unlock(&mutex);
  }
  if (self->process != getpid()) {
    listener_end(self);
    writer_set(self, -1);
    self->process = getpid();
  }
  return self;
}

/***
Returns the address to which the event loop is to connect. For hierlock's own Lua code, as
all functions of the notifier.
@function core.notifier_address
@local
@treturn[1] string
@return[2] nil
@treturn[2] string why not
*/
static int address(lua_State *L) {
  notifier *self = notifier_of(L);
  listener_end(self);
  if (!listener_begin(self)) {
    int values = failure(L, "cannot make a socket in /dev/shm or /tmp");
    listener_end(self);
    return values;
  }
  lua_pushfstring(L, "unix:%s", self->address.sun_path);
  return 1;
}

/***
Accepts the loop's connection, and closes an earlier one.
@function core.notifier_answer
@local
@treturn[1] boolean true
@return[2] nil
@treturn[2] string why not
*/
static int answer(lua_State *L) {
  notifier *self = notifier_of(L);
  for (;;) {
    int fd = accept4(self->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return failure(L, "cannot accept the notifier's own connection");
    struct ucred peer = {0};
    socklen_t size = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.pid != getpid()) {
      (void)close(fd); /* a stranger */
      continue;
    }
    listener_end(self);
    writer_set(self, fd);
    lua_pushboolean(L, 1);
    return 1;
  }
}

/***
Closes the loop's connection.
@function core.notifier_end
@local
@return nothing
*/
static int end(lua_State *L) {
  notifier *self = notifier_of(L);
  listener_end(self);
  writer_set(self, -1);
  return 0;
}

/***
Says whether a thread has dropped a number since the last call.
@function core.notifier_missed
@local
@treturn boolean
*/
static int missed(lua_State *L) {
  notifier *self = notifier_of(L);
  pthread_mutex_lock(&mutex);
  bool before = self->missed;
  self->missed = false;
  pthread_mutex_unlock(&mutex);
  lua_pushboolean(L, before);
  return 1;
}

/* The thread that ends the pending calls it. The number's upper half is the notifier's id; its
   state may have ended. */
static void ring(uint64_t number) {
  char digits[9];
  (void)snprintf(digits, sizeof digits, "%08x", (unsigned)number);
  pthread_mutex_lock(&mutex);
  notifier *self = notifiers;
  while (self && self->id != number >> 32) self = self->next;
  if (self && self->writer >= 0 && send(self->writer, digits, 8, MSG_NOSIGNAL) != 8)
    self->missed = true;
  pthread_mutex_unlock(&mutex);
}

/***
Writes the number to the loop when the pending is done. While the loop is not connected
the thread writes nothing. Once connected, the loop first looks at all pendings.
@function core.notifier_watch
@local
@param pending
@int number 1 to 2^32 - 1
@return nothing
*/
static int ring_when_done(lua_State *L) {
  hll_pending *pending = hll_pending_test(L, 1);
  lua_Number number = luaL_checknumber(L, 2);
  if (pending && pending->pending)
    hl_pending_notify(pending->pending, ring,
                      (uint64_t)notifier_of(L)->id << 32 | (uint32_t)number);
  return 0;
}

void hll_notifier_register(lua_State *L) {
  static const luaL_Reg functions[] = {
      {"notifier_address", address}, {"notifier_answer", answer},        {"notifier_end", end},
      {"notifier_missed", missed},   {"notifier_watch", ring_when_done}, {NULL, NULL}};
  hll_setfuncs(L, functions);
}
