/*
 * redis.c - redis' recipe for a lock: SET a random token if the name is not set,
 * for 30 s; to give it back, a script deletes it if it still has that token.
 * Nobody is told that a name has become free: who waits asks again every 100 ms,
 * as redis-py does by default.
 *
 *   redis SOCKET
 */
#include "client.h"

#include <hiredis.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

enum { LEASE_MS = 30000, POLL_US = 100000, TOKEN_BYTES = 20 };

static redisContext *connection;
static char script[64], key[32], token[2 * TOKEN_BYTES + 1];

static redisReply *answer(void *reply)
{
    redisReply *it = reply;
    if (!it)
        client_die("redis", connection->errstr);
    if (it->type == REDIS_REPLY_ERROR)
        client_die("redis", it->str);
    return it;
}

void client_open(int argc, char **argv)
{
    if (argc < 1)
        client_die("redis", "which socket?");
    connection = redisConnectUnix(argv[0]);
    if (!connection || connection->err)
        client_die(argv[0], connection ? connection->errstr : "no memory");
    redisReply *reply = answer(redisCommand(connection, "SCRIPT LOAD %s",
        "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end"));
    snprintf(script, sizeof script, "%s", reply->str);
    freeReplyObject(reply);
}

static void new_token(void)
{
    unsigned char bytes[TOKEN_BYTES];
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes)
        client_die("getrandom", "no bytes");
    for (int i = 0; i < TOKEN_BYTES; i++)
        snprintf(token + 2 * i, 3, "%02x", bytes[i]);
}

void client_take(unsigned name)
{
    bool taken = false;
    snprintf(key, sizeof key, "lock:%u", name);
    new_token();
    for (;;) {
        redisReply *reply = answer(redisCommand(connection, "SET %s %s NX PX %d", key, token, LEASE_MS));
        taken = reply->type == REDIS_REPLY_STATUS;        /* else nil */
        freeReplyObject(reply);
        if (taken)
            return;
        usleep(POLL_US);
    }
}

void client_give(void)
{
    redisReply *reply = answer(redisCommand(connection, "EVALSHA %s 1 %s %s", script, key, token));
    if (reply->integer != 1)
        client_die("redis", "the lock was lost");
    freeReplyObject(reply);
}
