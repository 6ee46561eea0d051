/*
 * tracer.c - a client under ptrace. Stops at the entry and the return of each system call of all
 * its threads, counts them, and can change what one returns. A table has the errors with which a
 * call may fail.
 */
#include "faults.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef __x86_64__
#error "what a system call returns is changed by registers of x86-64 only"
#endif

/* --------------------------------------------------------------- the table */

#define ERRNOS(...) ((const int[]){__VA_ARGS__, 0})

/* Errors of each call. Left out are errors that do not happen on a local file or a socket:
   munmap, fstat of an open file or the unlocking of a whole range do not fail; no signal
   interrupts open, a lock that is not waited for, a connect that does not wait, or the sending of a
   small packet. A socket or a file: see failures_of. */
static const int asked_by_name[] = {EIO, ENOMEM, 0};

static const struct {
  long call;
  const char *name;
  const int *failures;
} calls[] = {
    {SYS_openat, "openat", ERRNOS(EMFILE, ENFILE, ENOMEM, ENOSPC, EIO)},
    {SYS_mmap, "mmap", ERRNOS(ENOMEM)},
    {SYS_mprotect, "mprotect", ERRNOS(ENOMEM)},
    {SYS_brk, "brk", ERRNOS(ENOMEM)},
    {SYS_mremap, "mremap", ERRNOS(ENOMEM)},
    {SYS_madvise, "madvise", ERRNOS(ENOMEM)},
    {SYS_clone, "clone", ERRNOS(EAGAIN, ENOMEM)},
    {SYS_clone3, "clone3", ERRNOS(EAGAIN, ENOMEM)},
    {SYS_read, "read", NULL},
    {SYS_write, "write", NULL},
    {SYS_pread64, "pread64", ERRNOS(EIO, EINTR)},
    {SYS_pwrite64, "pwrite64", ERRNOS(ENOSPC, EIO, EINTR)},
    {SYS_writev, "writev", NULL},
    {SYS_readv, "readv", NULL},
    {SYS_close, "close", ERRNOS(EIO, EINTR)},
    {SYS_fstat, "fstat", NULL},
    {SYS_stat, "stat", ERRNOS(EIO, ENOMEM)},
    {SYS_newfstatat, "newfstatat", NULL},
    {SYS_statx, "statx", ERRNOS(EIO, ENOMEM)},
    {SYS_fstatfs, "fstatfs", ERRNOS(EIO, ENOMEM)},
    {SYS_statfs, "statfs", ERRNOS(EIO, ENOMEM)},
    {SYS_access, "access", ERRNOS(EIO, ENOMEM)},
    {SYS_readlink, "readlink", ERRNOS(EIO, ENOMEM)},
    {SYS_mkdir, "mkdir", ERRNOS(ENOSPC, EIO, ENOMEM)},
    {SYS_mkdirat, "mkdirat", ERRNOS(ENOSPC, EIO, ENOMEM)},
    {SYS_fchmod, "fchmod", ERRNOS(EIO, EPERM)},
    {SYS_fchown, "fchown", ERRNOS(EIO, EPERM)},
    {SYS_ftruncate, "ftruncate", ERRNOS(ENOSPC, EIO, EINTR)},
    {SYS_fdatasync, "fdatasync", ERRNOS(EIO, ENOSPC)},
    {SYS_fsync, "fsync", ERRNOS(EIO, ENOSPC)},
    {SYS_unlink, "unlink", ERRNOS(EIO, ENOMEM)},
    {SYS_fallocate, "fallocate", ERRNOS(ENOSPC, EIO, EINTR)},
    {SYS_renameat2, "renameat2", ERRNOS(ENOSPC, EIO, ENOMEM, EINVAL)},
    {SYS_renameat, "renameat", ERRNOS(ENOSPC, EIO, ENOMEM)},
    {SYS_linkat, "linkat", ERRNOS(ENOSPC, EIO, ENOMEM)},
    {SYS_unlinkat, "unlinkat", ERRNOS(EIO, ENOMEM)},
    {SYS_getdents64, "getdents64", ERRNOS(EIO, ENOMEM)},
    {SYS_lseek, "lseek", ERRNOS(EIO)},
    {SYS_fcntl, "fcntl", NULL},
    {SYS_ioctl, "ioctl", ERRNOS(ENOMEM)},
    {SYS_dup, "dup", ERRNOS(EMFILE)},
    {SYS_eventfd2, "eventfd2", ERRNOS(EMFILE, ENFILE, ENOMEM)},
    {SYS_pipe2, "pipe2", ERRNOS(EMFILE, ENFILE)},
    {SYS_poll, "poll", ERRNOS(EINTR, ENOMEM)},
    {SYS_ppoll, "ppoll", ERRNOS(EINTR, ENOMEM)},
    {SYS_select, "select", ERRNOS(EINTR, ENOMEM)},
    {SYS_futex, "futex", NULL},
    {SYS_clock_nanosleep, "clock_nanosleep", ERRNOS(EINTR)},
    {SYS_nanosleep, "nanosleep", ERRNOS(EINTR)},
    {SYS_getrandom, "getrandom", ERRNOS(EINTR, EAGAIN)},
    {SYS_prlimit64, "prlimit64", ERRNOS(EPERM)},
    {SYS_uname, "uname", ERRNOS(EFAULT)},
    {SYS_socket, "socket", ERRNOS(EMFILE, ENFILE, ENOMEM, ENOBUFS)},
    {SYS_connect, "connect", ERRNOS(ECONNREFUSED, ETIMEDOUT, ENETUNREACH)},
    {SYS_sendto, "sendto", ERRNOS(ECONNRESET, EPIPE, ENOMEM)},
    {SYS_sendmsg, "sendmsg", ERRNOS(ECONNRESET, EPIPE, ENOMEM)},
    {SYS_recvfrom, "recvfrom", ERRNOS(ECONNRESET, ETIMEDOUT, EINTR, ENOMEM)},
    {SYS_recvmsg, "recvmsg", ERRNOS(ECONNRESET, ETIMEDOUT, EINTR, ENOMEM)},
    {SYS_setsockopt, "setsockopt", ERRNOS(ENOMEM)},
    {SYS_getsockopt, "getsockopt", ERRNOS(ENOMEM)},
    {SYS_getsockname, "getsockname", ERRNOS(ENOBUFS)},
    {SYS_getpeername, "getpeername", ERRNOS(ENOTCONN)},
    {SYS_shutdown, "shutdown", ERRNOS(ENOTCONN)},
    {SYS_munmap, "munmap", NULL},
    {SYS_exit, "exit", NULL},
    {SYS_getpid, "getpid", NULL},
    {SYS_gettid, "gettid", NULL},
    {SYS_rseq, "rseq", NULL},
    {SYS_set_robust_list, "set_robust_list", NULL},
    {SYS_rt_sigprocmask, "rt_sigprocmask", NULL},
    {SYS_rt_sigaction, "rt_sigaction", NULL},
    {SYS_rt_sigpending, "rt_sigpending", NULL},
    {SYS_geteuid, "geteuid", NULL},
};

const char *call_name(long call, char out[32]) {
  for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
    if (calls[i].call == call) {
      (void)snprintf(out, 32, "%s", calls[i].name);
      return out;
    }
  (void)snprintf(out, 32, "system call %ld", call);
  return out;
}

static const int file_read[] = {EIO, EINTR, 0}, file_write[] = {ENOSPC, EIO, EINTR, 0};
static const int socket_read[] = {ECONNRESET, ETIMEDOUT, EINTR, 0},
                 socket_write[] = {ECONNRESET, EPIPE, 0};
static const int lock_taken[] = {ENOLCK, EIO, 0}, lock_asked[] = {ENOLCK, EIO, 0};
static const int interrupted[] = {EINTR, 0}, refused[] = {EPERM, 0};

static bool is_kind(pid_t pid, int fd, const char *kind) {
  char name[64], target[64];
  (void)snprintf(name, sizeof name, "/proc/%d/fd/%d", (int)pid, fd);
  ssize_t n = readlink(name, target, sizeof target - 1);
  target[n > 0 ? n : 0] = '\0';
  return strncmp(target, kind, strlen(kind)) == 0;
}

static bool unlocks(pid_t tid, unsigned long address) {
  struct flock range;
  errno = 0;
  long word = ptrace(PTRACE_PEEKDATA, tid, (void *)address, NULL);
  memcpy(&range, &word, sizeof word);
  return errno == 0 && range.l_type == F_UNLCK;
}

static const int *failures_of(pid_t pid, pid_t tid, const struct __ptrace_syscall_info *info) {
  long call = (long)info->entry.nr;
  unsigned long first = info->entry.args[0], second = info->entry.args[1];
  bool writes = call == SYS_write || call == SYS_writev;
  switch (call) {
  case SYS_read:
  case SYS_readv:
  case SYS_write:
  case SYS_writev:
    if (is_kind(pid, (int)first, "socket:")) return writes ? socket_write : socket_read;
    if (is_kind(pid, (int)first, "/")) return writes ? file_write : file_read;
    return interrupted;
  case SYS_fcntl:
    if (second == F_OFD_SETLK || second == F_SETLK)
      return unlocks(tid, info->entry.args[2]) ? NULL : lock_taken;
    if (second == F_OFD_GETLK || second == F_GETLK) return lock_asked;
    return second == F_SETFD || second == F_GETFD ? NULL : refused;
  case SYS_newfstatat: return info->entry.args[3] & AT_EMPTY_PATH ? NULL : asked_by_name;
  case SYS_futex:
    /* glibc ends a process whose futex says anything else. */
    second &= (unsigned long)FUTEX_CMD_MASK;
    return second == FUTEX_WAIT || second == FUTEX_WAIT_BITSET ? interrupted : NULL;
  default:
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
      if (calls[i].call == call) return calls[i].failures;
    return NULL;
  }
}

/* -------------------------------------------------------------- one call */

static void registers(pid_t tid, struct user_regs_struct *r, bool set) {
  if (ptrace(set ? PTRACE_SETREGS : PTRACE_GETREGS, tid, NULL, r) && errno != ESRCH) abort();
}

/* The call is not made. close is, as Linux closes whatever it says then; and brk says where the end is, and not
   an error. */
static void call_prevent(tracer *self, pid_t tid, long call) {
  struct user_regs_struct r;
  self->failure = self->point->failure;
  if (call == SYS_unlinkat) self->area->dirty = true;
  if (call == SYS_close) return;
  registers(tid, &r, false);
  if (call == SYS_brk) {
    self->argument = r.rdi;
    r.rdi = 0;
  } else {
    r.orig_rax = (unsigned long long)-1;
  }
  registers(tid, &r, true);
}

static void call_returns(const tracer *self, pid_t tid) {
  struct user_regs_struct r;
  registers(tid, &r, false);
  if (self->call == SYS_brk)
    r.rdi = self->argument; /* the kernel keeps it */
  else
    r.rax = (unsigned long long)-(long long)self->failure;
  registers(tid, &r, true);
}

/* True: this is the point, and the thread shall stand. */
static bool call_enters(tracer *self, pid_t tid, const struct __ptrace_syscall_info *info) {
  int in = atomic_load(&self->area->stage);
  if (in == BETWEEN || self->passed) return false;
  int number = ++self->count[in];
  self->last[in] = (long)info->entry.nr;
  if (self->found && number < CALLS) {
    self->found->count[in] = number;
    self->found->call[in][number] = (long)info->entry.nr;
    self->found->failures[in][number] = failures_of(self->pid, tid, info);
  }
  const point *p = self->point;
  if (!p || (int)p->stage != in || p->number != number) return false;
  self->call = (long)info->entry.nr;
  if (p->mode == FAIL) {
    /* Another call than the census had here may not fail in this way. */
    const int *failures = failures_of(self->pid, tid, info);
    while (failures && *failures && *failures != p->failure) failures++;
    if (!failures || !*failures) return false;
    call_prevent(self, tid, (long)info->entry.nr);
    self->leaving = tid;
    return false;
  }
  if (!p->after) return true;
  self->leaving = tid;
  return false;
}

static bool call_leaves(tracer *self, pid_t tid) {
  if (self->leaving != tid) return false;
  self->leaving = 0;
  if (self->failure) call_returns(self, tid);
  return true;
}

/* ------------------------------------------------------------------ the run */

static void go(const tracer *self, pid_t tid, int signal_number) {
  (void)ptrace(self->passed ? PTRACE_CONT : PTRACE_SYSCALL, tid, NULL, (void *)(long)signal_number);
}

void trace_start(tracer *self, lane_area *area, const point *p, census *found) {
  int status;
  *self = (tracer){.area = area, .point = p, .found = found};
  (void)fflush(stdout);
  self->pid = fork();
  if (self->pid < 0) abort();
  if (self->pid == 0) client_main(area);
  while (waitpid(self->pid, &status, 0) < 0)
    if (errno != EINTR) abort();
  if (!WIFSTOPPED(status)) abort();
  (void)ptrace(PTRACE_SETOPTIONS, self->pid, NULL,
               (void *)(PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL));
  go(self, self->pid, 0);
}

/* Handles a thread that has stopped. True: at the point. */
static bool stopped(tracer *self, pid_t tid, int status) {
  int signal_number = WSTOPSIG(status);
  if (signal_number == (SIGTRAP | 0x80)) {
    struct __ptrace_syscall_info info;
    bool here = false;
    if (ptrace(PTRACE_GET_SYSCALL_INFO, tid, (void *)sizeof info, &info) > 0) {
      if (info.op == PTRACE_SYSCALL_INFO_ENTRY) here = call_enters(self, tid, &info);
      if (info.op == PTRACE_SYSCALL_INFO_EXIT) here = call_leaves(self, tid);
    }
    if (here) {
      self->at = tid;
      self->passed = true;
      return true;
    }
    signal_number = 0;
  } else if (status >> 16 || signal_number == SIGSTOP) {
    signal_number = 0; /* a thread is born */
  }
  go(self, tid, signal_number);
  return false;
}

/* The caller has a timer, whose signal ends a wait. */
trace_event trace_run(tracer *self, int64_t deadline) {
  for (;;) {
    int status;
    pid_t tid = waitpid(-1, &status, __WALL);
    if (tid < 0 && errno != EINTR) abort();
    if (tid > 0 && WIFSTOPPED(status)) {
      if (stopped(self, tid, status)) return TRACE_POINT;
    } else if (tid == self->pid) {
      self->status = status;
      return TRACE_END;
    } else if (tid > 0 && tid == atomic_load(&self->area->peer)) {
      peer_ended(self->area, status);
    }
    if (now_ns() > deadline) return TRACE_LATE;
  }
}

void trace_continue(tracer *self) { go(self, self->at, 0); }

void trace_detach(tracer *self) {
  char name[64];
  (void)snprintf(name, sizeof name, "/proc/%d/task", (int)self->pid);
  DIR *directory = opendir(name);
  struct dirent *entry;
  while (directory && (entry = readdir(directory))) {
    int status, tid = atoi(entry->d_name);
    int64_t end = now_ns() + S;
    if (tid <= 0 || tgkill(self->pid, tid, SIGSTOP)) continue;
    while (waitpid(tid, &status, __WALL) < 0 && errno == EINTR && now_ns() < end) {}
    (void)ptrace(PTRACE_DETACH, tid, NULL, NULL);
  }
  if (directory) (void)closedir(directory);
}
