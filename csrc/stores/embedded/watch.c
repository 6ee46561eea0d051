/*
 * watch.c - the thread of a process that watches while one of its threads sleeps for a row, or
 * something was given back late. Otherwise the thread sleeps, and nothing wakes it.
 *
 * The thread has a pidfd of each process of the table whose pid is visible here. If one is not, it
 * looks every 5 ms. Of very many processes it watches those whose slots follow its own, as other
 * waiters watch the rest; it looks for those less often, the more they are. After a death it mends.
 * Every second it looks at the directory, for processes that have executed another program, and for
 * sleepers that were granted but not woken, as the process that granted them was killed or stopped
 * in between.
 */
#include "embedded.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define POLL_MS ((int)(HL__SHM_POLL_NS / 1000000))
#define LOOK_MS 1000
/* Descriptors are scarce: there is none for the processes beyond this number. */
#define WATCHED_MAX 128u
/* The pause between two looks grows by this with each process beyond that number. So many waiters
   do not keep the processors busy. */
#define CROWD_MS 40u
#define MEND_NS 100000000

typedef struct hl__shm_watch {
  pthread_t thread;
  int event; /* an eventfd; constant */
  bool started HL__GUARDED_BY(hl__shm_space_mutex);
  bool closing HL__GUARDED_BY(hl__shm_space_mutex);
  bool asleep HL__GUARDED_BY(hl__shm_space_mutex);       /* only `event` wakes it */
  hl__list sleepers HL__GUARDED_BY(hl__shm_space_mutex); /* sessions */
  bool bell HL__GUARDED_BY(hl__shm_space_mutex);         /* something waits for the bell (bell.c) */
  /* The thread's own. */
  bool blind; /* some process cannot be watched */
  bool poor;  /* for want of a descriptor: it tries again */
  hl__a32 opened;
  int64_t looked; /* when it looked at the sleepers last */
  unsigned n;
  unsigned beyond; /* processes that it leaves to the other waiters */
  uint32_t slot[WATCHED_MAX];
  struct pollfd fds[WATCHED_MAX + 1]; /* the last: event */
} hl__shm_watch;

HL__UNCHECKED int hl__shm_watch_new(hl__shm_space *space, hl_error *error) {
  hl__shm_watch *watch = calloc(1, sizeof *watch);
  if (!watch) return hl__error_memory(error);
  hl__list_init(&watch->sleepers);
  hl__fork_forbid();
  watch->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  bool watched = watch->event >= 0 && hl__fork_watch(watch->event);
  if (watch->event >= 0 && !watched) (void)close(watch->event);
  hl__fork_allow();
  if (!watched) {
    free(watch);
    return hl__error_errno(error, HL_ESTORE, "no descriptor is left for an eventfd");
  }
  space->watch = watch;
  return HL_OK;
}

static void kick(const hl__shm_watch *watch) {
  const uint64_t one = 1;
  (void)!write(watch->event, &one, sizeof one);
}

/* -------------------------------------------------------------- the thread */

static void watched_close(hl__shm_watch *watch) {
  while (watch->n > 0) hl__fork_close(watch->fds[--watch->n].fd);
}

/* A descriptor of the process that has the slot. -1: it cannot be seen, or there is none left. */
static int process_open(hl__shm_space *space, const hl__shm_slot *slot) {
  const pid_t pid = hl__shm_slot_pid(space, slot);
  if (pid == 0) return -1;
  hl__fork_forbid();
  int fd = (int)syscall(SYS_pidfd_open, pid, 0);
  if (fd < 0 && (errno == EMFILE || errno == ENFILE)) space->watch->poor = true;
  if (fd >= 0 && !hl__fork_watch(fd)) {
    (void)close(fd);
    fd = -1;
  }
  hl__fork_allow();
  return fd;
}

/* Watches all that have a slot now. One that has ended meanwhile, so that the pid may be another's:
   the sweep behind this finds it dead, or its slot is another's, and `opened` has changed. */
static void watched_open(hl__shm_space *space) {
  hl__shm_watch *watch = space->watch;
  watched_close(watch);
  atomic_store(&watch->opened, atomic_load(&space->table->header.opened));
  watch->blind = watch->poor = false;
  watch->beyond = 0;
  uint32_t top = atomic_load(&space->table->header.slots_top);
  if (top > HL__SHM_SLOTS) top = HL__SHM_SLOTS;
  for (uint32_t k = 1; k < top; k++) {
    const uint32_t i = (space->me + k - 1) % (top - 1) + 1; /* from the slot behind its own */
    const hl__shm_slot *slot = &space->table->slot[i];
    if (i == space->me || atomic_load(&slot->state) == 0) continue;
    if (watch->n == WATCHED_MAX) {
      watch->beyond++;
      continue;
    }
    int fd = process_open(space, slot);
    if (fd < 0) {
      watch->blind = true;
      continue;
    }
    watch->slot[watch->n] = i;
    watch->fds[watch->n++] = (struct pollfd){.fd = fd, .events = POLLIN};
  }
  hl__shm_sweep(space, true, hl__shm_now() + MEND_NS);
}

/* Wakes those that were granted, or all. The bell's thread looks by itself. */
static void sleepers_wake(hl__shm_space *space, bool all) {
  hl__shm_space_lock(space);
  const hl__list *sleepers = &space->watch->sleepers;
  for (hl__list *at = sleepers->next; at != sleepers; at = at->next) {
    hl__shm_session *session = HL__LIST_ENTRY(at, hl__shm_session, sleeper);
    hl__shm_node *node = hl__shm_node_at(space, atomic_load(&session->waits));
    if (!node || (!all && hl__shm_state_of(atomic_load(&node->claim)) == HL__WAIT)) continue;
    atomic_store(&node->wake, 1);
    hl__futex_wake(&node->wake, 1);
  }
  hl__shm_space_unlock(space);
}

/* poll() fails where RLIMIT_NOFILE is lower by now than their number. */
static int events_await(struct pollfd *fds, unsigned n, int ms) {
  const struct timespec moment = {.tv_nsec = HL__SHM_POLL_NS};
  const int ready = poll(fds, n, ms);
  if (ready < 0 && errno != EINTR) (void)nanosleep(&moment, NULL);
  return ready;
}

/* How long it sleeps when nothing happens. */
static int pause_ms(const hl__shm_watch *watch, bool late) {
  if (late || watch->blind) return POLL_MS;
  return watch->beyond && watch->beyond < LOOK_MS / CROWD_MS ? (int)(watch->beyond * CROWD_MS)
                                                             : LOOK_MS;
}

/* Sleeps until a process dies, or for a moment; then looks. */
static void turn(hl__shm_space *space) {
  hl__shm_watch *watch = space->watch;
  const bool late = atomic_load(&space->late_count) != 0;
  if (atomic_load(&watch->opened) != atomic_load(&space->table->header.opened)) watched_open(space);
  watch->fds[watch->n] = (struct pollfd){.fd = watch->event, .events = POLLIN};
  int ready = events_await(watch->fds, watch->n + 1, pause_ms(watch, late));
  const int64_t now = hl__shm_now();
  const bool gone = hl__shm_look(space), due = now - watch->looked >= LOOK_MS * INT64_C(1000000);
  bool died = false;
  if (!gone) {
    for (unsigned i = watch->n; i-- > 0 && ready > 0;) {
      if (!watch->fds[i].revents) continue;
      died = true;
      /* Its byte may be held by a child that it has made by clone(): then it is looked at again. */
      watch->blind = true;
      hl__fork_close(watch->fds[i].fd);
      watch->fds[i] = watch->fds[--watch->n];
    }
    /* A process that executes another program ends no pidfd. */
    if (died || due || watch->blind || watch->beyond) hl__shm_sweep(space, died, now + MEND_NS);
    if (died || (due && watch->poor))
      atomic_store(&watch->opened, atomic_load(&space->table->header.opened) - 1);
    if (late) hl__shm_late_do(space);
  }
  if (due) watch->looked = now;
  if (gone || died || due || watch->blind) sleepers_wake(space, gone);
}

static void *run(void *context) {
  hl__shm_space *space = context;
  hl__shm_watch *watch = space->watch;
  for (;;) {
    uint64_t events;
    (void)!read(watch->event, &events, sizeof events);
    hl__shm_space_lock(space);
    bool closing = watch->closing;
    watch->asleep = hl__list_empty(&watch->sleepers) && !watch->bell &&
                    (atomic_load(&space->late_count) == 0 || atomic_load(&space->gone));
    bool asleep = watch->asleep;
    hl__shm_space_unlock(space);
    if (closing) break;
    if (asleep) {
      struct pollfd event = {.fd = watch->event, .events = POLLIN};
      (void)events_await(&event, 1, -1);
    } else {
      turn(space);
    }
  }
  watched_close(watch);
  return NULL;
}

/* False: the system gives us no thread now. */
static bool thread_start(hl__shm_space *space) HL__REQUIRES(hl__shm_space_mutex) {
  hl__shm_watch *watch = space->watch;
  if (!watch->started) watch->started = hl__thread_start(&watch->thread, 0, run, space) == 0;
  return watch->started;
}

/* Has the thread watch, where it sleeps, or does not watch a process that has come since. */
static void attend(hl__shm_space *space) HL__REQUIRES(hl__shm_space_mutex) {
  hl__shm_watch *watch = space->watch;
  if (!watch->asleep && atomic_load(&watch->opened) == atomic_load(&space->table->header.opened))
    return;
  watch->asleep = false;
  kick(watch);
}

bool hl__shm_watch_enter(hl__shm_session *session) {
  hl__shm_space *space = session->space;
  hl__shm_watch *watch = space->watch;
  hl__shm_space_lock(space);
  const bool watched = thread_start(space);
  if (watched) {
    hl__list_add(&watch->sleepers, &session->sleeper);
    attend(space);
  }
  hl__shm_space_unlock(space);
  return watched;
}

void hl__shm_watch_leave(hl__shm_session *session) {
  hl__shm_space_lock(session->space);
  hl__list_remove(&session->sleeper);
  hl__shm_space_unlock(session->space);
}

bool hl__shm_watch_bell(hl__shm_space *space, bool waits) {
  hl__shm_space_lock(space);
  const bool watched = !waits || thread_start(space);
  space->watch->bell = waits && watched;
  if (space->watch->bell) attend(space);
  hl__shm_space_unlock(space);
  return watched;
}

void hl__shm_watch_kick(hl__shm_space *space) {
  hl__shm_space_lock(space);
  if (thread_start(space) && space->watch->asleep) {
    space->watch->asleep = false;
    kick(space->watch);
  }
  hl__shm_space_unlock(space);
}

HL__UNCHECKED void hl__shm_watch_free(hl__shm_space *space) {
  hl__shm_watch *watch = space->watch;
  if (!watch) return;
  hl__shm_space_lock(space);
  watch->closing = true;
  bool started = watch->started;
  kick(watch);
  hl__shm_space_unlock(space);
  if (started) (void)pthread_join(watch->thread, NULL);
  hl__fork_close(watch->event);
  free(watch);
  space->watch = NULL;
}
