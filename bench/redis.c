/*
 * redis.c - the cost of redis and the wire, without hierlock. Usage:
 *
 *   redis SOCKET recipe   Redis' own recipe for a lock: SET a random token if the name is not set, for 30 s. To
 *                         give the lock back, a script deletes the name if it still has that token. Redis wakes no
 *                         waiter; a waiter asks again every 100 ms, as redis-py does by default.
 *   redis SOCKET lease    A lease of three nodes by hierlock's own scripts, each by its digest, with the arguments
 *                         that the store sends. The client waits for both answers.
 *   redis SOCKET sent     As lease; the client reads the answer to the release behind the next lock's.
 */
#include "client.h"

#include <hiredis.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "scripts.h" /* as the store has them: the Makefile makes it */

enum { LEASE_MS = 30000, POLL_US = 100000, TOKEN_BYTES = 20, USERS = 50, WORDS = 32 };

static redisContext *connection;
static enum { RECIPE, LEASE, SENT } mode;

static redisReply *answer(void *reply) {
  redisReply *it = reply;
  if (!it) client_die("redis", connection->errstr);
  if (it->type == REDIS_REPLY_ERROR) client_die("redis", it->str);
  return it;
}

static redisReply *next_answer(void) {
  void *reply = NULL;
  redisGetReply(connection, &reply);
  return answer(reply);
}

/* The text is in parts, as script.c has them. */
static void script_load(char digest[64], const char *common, const char *grants,
                        const char *amnesia, const char *body) {
  char whole[32768];
  if (snprintf(whole, sizeof whole, "%s%s%s%s", common, grants, amnesia, body) >= (int)sizeof whole)
    client_die("redis", "the script is too long");
  redisReply *reply = answer(redisCommand(connection, "SCRIPT LOAD %s", whole));
  snprintf(digest, 64, "%s", reply->str);
  freeReplyObject(reply);
}

static void random_text(char *text, int bytes) {
  unsigned char random[TOKEN_BYTES];
  if (getrandom(random, (size_t)bytes, 0) != bytes) client_die("getrandom", "no bytes");
  for (int i = 0; i < bytes; i++) snprintf(text + 2 * i, 3, "%02x", random[i]);
}

/* ---------------------------------------------------------------- the recipe */

static char recipe[64], key[32], token[2 * TOKEN_BYTES + 1];

static void recipe_take(unsigned name) {
  bool taken = false;
  snprintf(key, sizeof key, "lock:%u", name);
  random_text(token, TOKEN_BYTES);
  for (;;) {
    redisReply *reply =
        answer(redisCommand(connection, "SET %s %s NX PX %d", key, token, LEASE_MS));
    taken = reply->type == REDIS_REPLY_STATUS; /* else nil */
    freeReplyObject(reply);
    if (taken) return;
    usleep(POLL_US);
  }
}

static void recipe_give(void) {
  redisReply *reply = answer(redisCommand(connection, "EVALSHA %s 1 %s %s", recipe, key, token));
  if (reply->integer != 1) client_die("redis", "the lock was lost");
  freeReplyObject(reply);
}

/* ------------------------------------------------------------------- a lease */

static char take[64], drop[64], tag[9], first_key[32], id[33], holder[33], secret[33];
static int unread; /* answers of releases */

static void append(const char *const *words, int n) {
  redisAppendCommandArgv(connection, n, (const char **)words, NULL);
}

static void lease_take(unsigned name) {
  char rows[160], roots[16], path[64];
  snprintf(tag, sizeof tag, "%08x", name % USERS * 2654435761u);
  snprintf(first_key, sizeof first_key, "bare:{%s}:n", tag);
  snprintf(roots, sizeof roots, "%s ", tag);
  random_text(id, 16);
  random_text(holder, 16);
  random_text(secret, 16);
  snprintf(path, sizeof path, "user%u/account%u/resource%u", name % USERS, name, name);
  snprintf(rows, sizeof rows, "sbare:{%s}:0:%015x\nsbare:{%s}:1:%015x\nxbare:{%s}:2:%015x\n", tag,
           name % USERS, tag, name, tag, name);
  const char *const words[] = {"EVALSHA",
                               take,
                               "1",
                               first_key,
                               "bare",
                               tag,
                               id,
                               "0",
                               "bare:bell:0123456789abcdef",
                               "bare:memory",
                               "0123456789012345678901234567890123456789",
                               "",
                               "0",
                               "0",
                               "1",
                               "",
                               holder,
                               secret,
                               "60000",
                               "lua5.4",
                               path,
                               "",
                               "lua5.4",
                               "host",
                               "12345",
                               "x",
                               roots,
                               rows};
  append(words, sizeof words / sizeof *words);
  for (; unread > 0; unread--) freeReplyObject(next_answer());
  redisReply *reply = next_answer();
  if (reply->elements != 2 || reply->element[0]->integer != 1)
    client_die("redis", "the lease was not granted");
  freeReplyObject(reply);
}

static void lease_give(void) {
  const char *const words[] = {"EVALSHA", drop, "1", first_key, "bare", tag, id, holder};
  append(words, sizeof words / sizeof *words);
  if (mode == SENT) {
    int done = 0;
    while (!done)
      if (redisBufferWrite(connection, &done) != REDIS_OK) client_die("redis", connection->errstr);
    unread++;
    return;
  }
  redisReply *reply = next_answer();
  if (reply->elements < 1 || reply->element[0]->integer != 1)
    client_die("redis", "the lease was lost");
  freeReplyObject(reply);
}

/* ----------------------------------------------------------------- a client */

void client_open(int argc, char **argv) {
  if (argc != 2 ||
      (strcmp(argv[1], "recipe") && strcmp(argv[1], "lease") && strcmp(argv[1], "sent")))
    client_die("usage", "redis SOCKET recipe|lease|sent");
  mode = !strcmp(argv[1], "lease") ? LEASE : !strcmp(argv[1], "sent") ? SENT : RECIPE;
  connection = redisConnectUnix(argv[0]);
  if (!connection || connection->err)
    client_die(argv[0], connection ? connection->errstr : "no memory");
  script_load(recipe,
              "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) "
              "else return 0 end",
              "", "", "");
  script_load(take, hl__redis_lua_common, hl__redis_lua_grants, hl__redis_lua_amnesia,
              hl__redis_lua_take);
  script_load(drop, hl__redis_lua_common, "", "", hl__redis_lua_drop);
}

void client_take(unsigned name) {
  if (mode == RECIPE)
    recipe_take(name);
  else
    lease_take(name);
}

void client_give(void) {
  if (mode == RECIPE)
    recipe_give();
  else
    lease_give();
}
