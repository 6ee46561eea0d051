/*
 * stacks.h - where the threads of a process that hangs are, for what soak, stress and faults say of it.
 */
#ifndef STACKS_H
#define STACKS_H

#include <sys/types.h>

/* Is told a line without its end. */
typedef void stacks_fn(const char *line);

/* The system call that each thread is in, and the kernel's function. */
void stacks_of_kernel(pid_t pid, stacks_fn *tell);
/* The functions that each thread is in, the innermost first, where there is a gdb. Nothing may
   trace the process. A thread has one line, as the end of CI's log has few. */
void stacks_of(pid_t pid, stacks_fn *tell);

#endif
