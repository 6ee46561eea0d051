/*
 * flock.c - one file for each name, locked whole, by flock(2). The client opens
 * the file to take the lock, and closes it to give the lock back. Usage:
 *
 *   flock DIRECTORY             calls flock(2)
 *   flock DIRECTORY command     has flock(1) do it, as a shell script does:
 *                               exec 9>file; flock 9; ...; exec 9>&-
 */
#include "client.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static const char *directory;
static bool command;
static int file;

void client_open(int argc, char **argv) {
  if (argc < 1) client_die("flock", "which directory?");
  directory = argv[0];
  command = argc > 1;
}

/* flock(1) locks the description that it inherits, and leaves it locked. */
static void run_flock(void) {
  char *argv[] = {"flock", "9", NULL};
  posix_spawn_file_actions_t actions;
  pid_t pid;
  int status;

  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, file, 9);
  int error = posix_spawnp(&pid, "flock", &actions, NULL, argv, environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error) client_die("flock(1)", strerror(error));
  if (waitpid(pid, &status, 0) < 0 || status) client_die("flock(1)", "failed");
}

void client_take(unsigned name) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%u", directory, name);
  file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) client_die(path, strerror(errno));
  if (command)
    run_flock();
  else if (flock(file, LOCK_EX))
    client_die("flock(2)", strerror(errno));
}

void client_give(void) { close(file); }
