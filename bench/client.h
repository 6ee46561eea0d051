/*
 * client.h - the functions of a client of the bench in C: it opens its lock,
 * takes it and gives it back. The loop, the clock and the conversation with
 * contest.lua are in client.c. A failure ends the program, with a message.
 */
#ifndef BENCH_CLIENT_H
#define BENCH_CLIENT_H

/* With the program's own arguments, without its name. */
void client_open(int argc, char **argv);
/* Waits until the client has the lock. A client never takes a second lock. */
void client_take(unsigned name);
void client_give(void);

_Noreturn void client_die(const char *what, const char *why);

#endif
