/*
 * fault.h - the process that does one large fault: see faults.c for what is expected of each.
 *
 *   fault_main.c        the process; what is used up of a worker
 *   fault_server.c      what is done to a server
 *   fault_directory.c   what is done to the embedded store's directory
 */
#ifndef FAULT_H
#define FAULT_H

#include "soak.h"

/* The present fault, with its times; its random choices. */
extern fault_window *fault_self;
extern dice fault_dice;

/* Chooses one of n ways, each in its turn; the seed says with which they begin. */
int fault_way(int n);
void fault_what(const char *text);
void fault_sleep_ms(int ms);
/* The fault could not be done or undone: ends the process. */
_Noreturn void fault_fail(const char *text);
/* From now on nothing is granted, and until now. */
void fault_shut_begin(void);
void fault_shut_end(void);

/* Repeats until the condition is true, as it must be sooner or later. */
#define FAULT_UNTIL(did)                                                                           \
  do {                                                                                             \
    for (int tries = 0; !(did); tries++) {                                                         \
      if (tries == 200) fault_fail(#did);                                                          \
      fault_sleep_ms(100);                                                                         \
    }                                                                                              \
  } while (0)

void fault_crash(void);
void fault_stop_server(void);
void fault_read_only(void);
void fault_alter(void);
void fault_full(void);
void fault_hostile(void);
void fault_disk(void);

#endif
