/*
 * stacks.c - see stacks.h.
 */
#include "stacks.h"

#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum { LINE = 380 };

static bool line_read(pid_t pid, const char *tid, const char *file, char *line, int size) {
  char name[80];
  (void)snprintf(name, sizeof name, "/proc/%d/task/%.16s/%s", (int)pid, tid, file);
  FILE *of = fopen(name, "r");
  bool did = of && fgets(line, size, of);
  if (of) (void)fclose(of);
  if (did) line[strcspn(line, "\n")] = '\0';
  return did;
}

void stacks_of_kernel(pid_t pid, stacks_fn *tell) {
  char name[64], call[200], where[64], line[LINE];
  (void)snprintf(name, sizeof name, "/proc/%d/task", (int)pid);
  DIR *directory = opendir(name);
  struct dirent *entry;
  while (directory && (entry = readdir(directory))) {
    if (entry->d_name[0] == '.' || !line_read(pid, entry->d_name, "syscall", call, sizeof call) ||
        !line_read(pid, entry->d_name, "wchan", where, sizeof where))
      continue;
    (void)snprintf(line, sizeof line, "its thread %.16s is in system call %.100s, %s",
                   entry->d_name, call, where);
    tell(line);
  }
  if (directory) (void)closedir(directory);
}

/* Adds what gdb says of a function: "#1  0x00007f12 in name (arguments) at file.c:12". */
static void stack_add(char stack[LINE], const char *line) {
  const char *name = line + strcspn(line, " ");
  name += strspn(name, " ");
  const char *in = strncmp(name, "0x", 2) == 0 ? strstr(name, " in ") : NULL;
  if (in) name = in + 4;
  const char *at = strstr(name, " at "), *number = at ? strrchr(at, ':') : NULL;
  size_t length = strlen(stack);
  (void)snprintf(stack + length, LINE - length, " < %.*s%s", (int)strcspn(name, " "), name,
                 number ? number : "");
}

void stacks_of(pid_t pid, stacks_fn *tell) {
  char line[1024], stack[LINE] = "";
  (void)snprintf(line, sizeof line,
                 "timeout 30 gdb -p %d -batch -ex 'thread apply all bt 30' 2>/dev/null", (int)pid);
  FILE *gdb = popen(line, "r");
  while (gdb && fgets(line, sizeof line, gdb)) {
    line[strcspn(line, "\n")] = '\0';
    if (line[0] == '#') stack_add(stack, line);
    if (line[0] != 'T') continue;
    if (stack[0]) tell(stack);
    (void)snprintf(stack, sizeof stack, "%.100s", line);
  }
  if (stack[0]) tell(stack);
  if (gdb) (void)pclose(gdb);
}
