/*
 * queue.c - waiting for a row. Knows who comes before whom, how a sleeper is
 * woken, and when it looks again by itself. Grants nothing itself: that is
 * hl__file_entry_grant's.
 *
 * Who comes first. The sessions of one process that await a row stand in the
 * entry's queue. The first of them stands for the process in the kernel's queue
 * of the row: it draws a ticket from the stripe's counter and locks the byte of
 * that number, so that a waiter which dies leaves the queue by the kernel's
 * hand. It may take the row when no other process has an older ticket. Whoever
 * comes new and finds a ticket of another process joins the queue, though the
 * row's mode may admit it. So
 *
 *   - neither do exclusive requests starve behind a stream of shared ones, nor
 *     the other way round, within a process and between processes;
 *   - requests of one process are granted in the order of their arrival, shared
 *     ones that follow each other together; those of several processes in the
 *     order in which they came to the head of their process' queue, so each
 *     process gets its turn, however many threads another one has;
 *   - a session that holds the row shared and wants it exclusively (extend) goes
 *     before all others, who would have to wait for it in any case. Two of them
 *     wait for each other until one gives up.
 *
 * Order is a matter of fairness only. It may be upset for a moment (between the
 * drawing of a ticket and the locking of its byte, say); two who exclude each
 * other are kept apart by the row's lock alone. A stopped process (SIGSTOP) keeps
 * its place as it keeps its locks.
 *
 * Sleeping. The first in a process sleeps on the stripe's `events` word, which
 * all processes share; those behind it on a word of their own, until they are
 * first. The word `waiters` counts the tickets in the stripe, so that giving a
 * row back costs no system call more where nobody waits.
 *
 * No wake-up is lost. All accesses to events and waiters are sequentially
 * consistent, and the kernel orders the operations on one file.
 *
 *     who waits                        who gives back
 *     W1  locks its ticket's byte      R1  unlocks (the row, or a ticket)
 *     W2  waiters += 1                 R2  waiters == 0? then nothing more
 *     W3  e = events                   R3  events += 1
 *     W4  tries; is refused            R4  wakes those who sleep on events
 *     W5  sleeps if events == e
 *
 * Suppose that W4 was refused because of what R1 gives back. Then W4 came before
 * R1 (the kernel, or the stripe's mutex, orders them), hence W2 before R2, and R2
 * sees the waiter. And W3 came before R3: either R3 comes before W5, which then
 * does not sleep, or W5 before R4, which wakes it. What the first sees after it
 * drew its ticket, it sees in W4; so a waiter that becomes first late misses
 * nothing either.
 *
 * Whoever has locked a row on which a lease stands waits for its end in the same way; see
 * the end of this file.
 *
 * spec/model/queue.pml goes through all orders of these steps.
 *
 * A process that is killed gives back without R2 to R4. Therefore a first one
 * looks again by itself every POLL_MS; nobody else polls. So does one that
 * could draw no ticket, which nobody who gives back knows of; it tries for a ticket
 * again, and for the row when it has one.
 */
#include "file.h"
#include "offset.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* How soon it is noticed that a holder was killed. */
#define POLL_MS 50

/* How many tickets a waiter draws before it goes without. That one is another's
   happens after 2^26 tickets; that all are, only where somebody who uses the files
   for other things has locked whole regions. */
#define TICKET_TRIES 4

/* `waiters`: how many below, and above a version that every change raises, so
   that a stale count can be told from a changed one (see stale_heal). */
#define WAITERS_VERSION (UINT64_C(1) << 32)
#define WAITERS_COUNT (WAITERS_VERSION - 1)

/* --------------------------------------------------------------- futexes */

/* Until `until` (hl__now_ms; HL_FOREVER) at most, or sooner for no reason. A
   word that a set of bits was given for is woken for these bits only. */
static void futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t until, bool shared,
                       uint32_t bits) {
  struct timespec end = {.tv_sec = (time_t)(until / 1000),
                         .tv_nsec = (long)(until % 1000) * 1000000};
  (void)syscall(SYS_futex, word, FUTEX_WAIT_BITSET | (shared ? 0 : FUTEX_PRIVATE_FLAG), seen,
                until == HL_FOREVER ? NULL : &end, NULL, bits);
}

static void futex_wake(_Atomic uint32_t *word, bool shared, uint32_t bits) {
  (void)syscall(SYS_futex, word, FUTEX_WAKE_BITSET | (shared ? 0 : FUTEX_PRIVATE_FLAG), INT_MAX,
                NULL, NULL, bits);
}

/* Which sleepers on a stripe's word a row concerns; bits of the hash that have
   no part in the choice of the stripe. */
static uint32_t wake_bits(uint32_t hash) { return 1u << (hash >> 27); }

static void signal_all(hl__file_signal *signal, uint32_t bits) {
  (void)atomic_fetch_add(&signal->events, 1u);
  futex_wake(&signal->events, true, bits);
}

void hl__file_queue_wake(hl__file_space *space, uint32_t hash) {
  hl__file_signal *signal = &space->control->signals[hl__file_stripe_of(hash)];
  if ((atomic_load(&signal->waiters) & WAITERS_COUNT) != 0) signal_all(signal, wake_bits(hash));
}

/* A waiter of this process shall look again. */
static void waiter_wake(hl__file_waiter *waiter) {
  (void)atomic_fetch_add(&waiter->wakes, 1u);
  futex_wake(&waiter->wakes, false, FUTEX_BITSET_MATCH_ANY);
}

void hl__file_queue_interrupt(hl__file_session *session) {
  atomic_store(&session->interrupted, true);
  waiter_wake(&session->waiter);
  hl__file_guard_lock(session);
  /* While it is asleep it keeps its space. */
  if (session->asleep && !hl__file_space_gone(session->space))
    signal_all(session->asleep, FUTEX_BITSET_MATCH_ANY);
  hl__file_guard_unlock(session);
}

/* A process that is killed may have counted itself: the word is too high then, and a lease
   that ends costs a call of the kernel more. */
void hl__file_futex_wake(hl__file_space *space, uint32_t hash) {
  hl__file_signal *signal = &space->control->signals[hl__file_stripe_of(hash)];
  if (atomic_load(&signal->lease_waiters) != 0) signal_all(signal, wake_bits(hash));
}

/* From now on hl__file_queue_interrupt finds the session's stripe. */
static void asleep_set(hl__file_session *session, hl__file_signal *signal) {
  hl__file_guard_lock(session);
  session->asleep = signal;
  hl__file_guard_unlock(session);
}

/* --------------------------------------------------------------- tickets */

/* A row's queue, or part of it, is in another process' hands. What is locked
   first there goes to *where. */
static bool range_taken(int fd, struct flock range, off_t *where) {
  if (range.l_len == 0) return false; /* it would mean: to the end */
  if (fcntl(fd, F_OFD_GETLK, &range) != 0 || range.l_type == F_UNLCK) return false;
  *where = range.l_start;
  return true;
}

/* HL_TIMEOUT: none can be had now. Model: queue.pml, ticket_take. */
static int ticket_take(hl__file_stripe *stripe, hl__file_signal *signal,
                       const hl__file_entry *entry, hl__file_waiter *waiter, hl_error *error)
    HL__REQUIRES(hl__file_stripe_mutex) {
  if (waiter->ticketed) return HL_OK;
  for (int i = 0; i < TICKET_TRIES; i++) {
    waiter->ticket = atomic_fetch_add(&signal->tickets, 1u) % HL__FILE_TICKETS;
    struct flock range = hl__file_queue_range(entry, waiter->ticket, 1);
    if (fcntl(stripe->fd, F_OFD_SETLK, &range) == 0) {
      (void)atomic_fetch_add(&signal->waiters, WAITERS_VERSION + 1);
      waiter->ticketed = true;
      stripe->tickets++;
      return HL_OK;
    }
    if (errno != EAGAIN && errno != EACCES)
      return hl__error_errno(error, HL_ESTORE, "the kernel refuses a lock on a file");
  }
  return HL_TIMEOUT;
}

/* Counted down while the byte is still locked: see stale_heal. Model: queue.pml,
   ticket_drop. */
static void ticket_drop(hl__file_space *space, hl__file_stripe *stripe, hl__file_signal *signal,
                        const hl__file_entry *entry, hl__file_waiter *waiter)
    HL__REQUIRES(hl__file_stripe_mutex) {
  if (!waiter->ticketed) return;
  struct flock range = hl__file_queue_range(entry, waiter->ticket, 1);
  range.l_type = F_UNLCK;
  if (!hl__file_space_gone(space)) (void)atomic_fetch_add(&signal->waiters, WAITERS_VERSION - 1);
  if (atomic_load(&space->gone) != HL__FILE_CLOSED) (void)fcntl(stripe->fd, F_OFD_SETLK, &range);
  waiter->ticketed = false;
  stripe->tickets--;
}

/* Whether another process has an older ticket. Tickets run in a circle; those
   in the half of it before ours are older. The far end of that half belongs to
   neither: of two tickets that lie opposite, each would be older than the other. */
static bool ticket_older(const hl__file_stripe *stripe, const hl__file_entry *entry,
                         uint32_t ticket) HL__REQUIRES(hl__file_stripe_mutex) {
  const uint32_t half = HL__FILE_TICKETS / 2;
  off_t where;
  if (ticket >= half)
    return range_taken(stripe->fd, hl__file_queue_range(entry, ticket - half + 1, half - 1),
                       &where);
  return range_taken(stripe->fd, hl__file_queue_range(entry, 0, ticket), &where) ||
         range_taken(stripe->fd, hl__file_queue_range(entry, ticket + half + 1, half - 1 - ticket),
                     &where);
}

/* Waiters that were killed are still counted in `seen`, and nobody has a ticket
   in the stripe: sets the count to 0. Every change of the count happens while a
   ticket's byte is locked, so none is under way; one that comes meanwhile raises
   the version, and we do nothing. */
static void stale_heal(hl__file_signal *signal, uint64_t seen) {
  uint64_t healed = (seen & ~WAITERS_COUNT) + WAITERS_VERSION;
  (void)atomic_compare_exchange_strong(&signal->waiters, &seen, healed);
}

bool hl__file_queue_crowded(hl__file_space *space, uint32_t hash) {
  const hl__file_signal *signal = &space->control->signals[hl__file_stripe_of(hash)];
  return (atomic_load(&signal->waiters) & WAITERS_COUNT) != 0;
}

bool hl__file_queue_elsewhere(hl__file_space *space, uint32_t index, const hl__file_entry *entry) {
  hl__file_stripe *stripe = &space->stripes[index];
  hl__file_signal *signal = &space->control->signals[index];
  uint64_t seen = atomic_load(&signal->waiters);
  if ((seen & WAITERS_COUNT) == 0) return false;

  struct flock all = {.l_type = F_WRLCK,
                      .l_whence = SEEK_SET,
                      .l_start = HL__FILE_QUEUES,
                      .l_len = 3 * HL__FILE_QUEUES}; /* all that is behind */
  struct flock ours = hl__file_queue_range(entry, 0, HL__FILE_TICKETS);
  off_t where;
  if (!range_taken(stripe->fd, all, &where)) {
    if (stripe->tickets == 0) stale_heal(signal, seen);
    return false;
  }
  if (where >= ours.l_start && where < ours.l_start + ours.l_len) return true;
  return range_taken(stripe->fd, ours, &where);
}

/* ----------------------------------------------------------------- queue */

static void queue_enter(hl__file_entry *entry, hl__file_waiter *waiter)
    HL__REQUIRES(hl__file_stripe_mutex) {
  hl__file_waiter *before = NULL; /* NULL: at the end */
  if (waiter->conversion) {
    before = entry->first;
    while (before && before->conversion) before = before->next;
  }
  waiter->next = before;
  waiter->previous = before ? before->previous : entry->last;
  *(waiter->previous ? &waiter->previous->next : &entry->first) = waiter;
  *(before ? &before->previous : &entry->last) = waiter;
}

static void queue_leave(hl__file_entry *entry, hl__file_waiter *waiter)
    HL__REQUIRES(hl__file_stripe_mutex) {
  *(waiter->previous ? &waiter->previous->next : &entry->first) = waiter->next;
  *(waiter->next ? &waiter->next->previous : &entry->last) = waiter->previous;
}

/* The first of the queue tries. HL_TIMEOUT: not yet. */
static int first_try(hl__file_stripe *stripe, hl__file_entry *entry, const hl__file_waiter *waiter,
                     hl_error *error) HL__REQUIRES(hl__file_stripe_mutex) {
  if (!waiter->conversion && ticket_older(stripe, entry, waiter->ticket)) return HL_TIMEOUT;
  return hl__file_entry_grant(stripe, entry, waiter->mode, waiter->conversion, error);
}

/* A shared request has been granted: so are those who stand right behind it, as
   the process has the kernel's lock now. They came before it was granted, so
   whoever waits elsewhere waits for no more than these. */
static void followers_grant(hl__file_space *space, hl__file_stripe *stripe, hl__file_signal *signal,
                            hl__file_entry *entry) HL__REQUIRES(hl__file_stripe_mutex) {
  hl__file_waiter *waiter;
  while ((waiter = entry->first) && waiter->mode == HL_SHARED) {
    queue_leave(entry, waiter);
    ticket_drop(space, stripe, signal, entry, waiter);
    entry->shared++;
    waiter->granted = true;
    waiter_wake(waiter);
  }
}

int hl__file_queue_wait(hl__file_session *session, const hl__file_holding *want, bool conversion,
                        int64_t deadline, hl_error *error) {
  hl__file_space *space = session->space;
  hl__file_entry *entry = want->entry;
  uint32_t index = hl__file_stripe_of(want->hash);
  hl__file_stripe *stripe = &space->stripes[index];
  hl__file_signal *signal = &space->control->signals[index];
  hl__file_waiter *waiter = &session->waiter;
  int status = HL_OK;
  waiter->mode = (hl_mode)want->row.mode;
  waiter->conversion = conversion;
  waiter->granted = waiter->ticketed = false;
  queue_enter(entry, waiter);
  asleep_set(session, signal);

  while (!waiter->granted) {
    bool first = entry->first == waiter;
    uint32_t seen;
    if (first) {
      /* Before the mapping is touched; and whoever waits in a directory that was
         renamed would wait for nobody. */
      status = hl__file_session_check(session, error);
      if (status) break;
      status = ticket_take(stripe, signal, entry, waiter, error);
      seen = atomic_load(&signal->events);
      if (status == HL_OK) status = first_try(stripe, entry, waiter, error);
      if (status != HL_TIMEOUT) break;
    } else {
      seen = atomic_load(&waiter->wakes);
      status = HL_TIMEOUT;
    }
    if (atomic_load(&session->interrupted)) {
      status = HL_CANCELLED;
      break;
    }
    /* Never early: the millisecond of the deadline is waited for, too. */
    int64_t now = hl__now_ms();
    if (now > deadline) break;
    int64_t end = hl__deadline(deadline, 1);
    if (session->circle.next < end) end = session->circle.next;
    hl__file_stripe_unlock(stripe);
    if (first)
      futex_wait(&signal->events, seen, end < now + POLL_MS ? end : now + POLL_MS, true,
                 wake_bits(want->hash));
    else
      futex_wait(&waiter->wakes, seen, end, false, FUTEX_BITSET_MATCH_ANY);
    int circle = hl__file_circle_scan(session, error);
    hl__file_stripe_lock(stripe);
    if (circle && !waiter->granted) {
      status = circle;
      break;
    }
  }

  asleep_set(session, NULL);
  if (waiter->granted) return HL_OK;
  queue_leave(entry, waiter);
  ticket_drop(space, stripe, signal, entry, waiter);
  if (status == HL_OK && waiter->mode == HL_SHARED) followers_grant(space, stripe, signal, entry);
  if (entry->first) waiter_wake(entry->first);
  /* Those who waited only for us. Behind an exclusive holder nobody can be
     granted anything before it gives the row back. */
  if ((status != HL_OK || waiter->mode == HL_SHARED) && !hl__file_space_gone(space))
    hl__file_queue_wake(space, want->hash);
  return status;
}

uint32_t hl__file_nap_seen(const hl__file_session *session) {
  return atomic_load(&session->waiter.wakes);
}

void hl__file_nap(hl__file_session *session, uint32_t seen, int64_t until) {
  futex_wait(&session->waiter.wakes, seen, until, false, FUTEX_BITSET_MATCH_ANY);
}

/* ------------------------------------------------------ waiting for a lease */

/* The proof above holds here, too: to enter is W2, hl__file_futex_seen is W3, to look at the
   ledger W4; R1 is to remove the record from the ledger, which one at a time has. */

static hl__file_signal *signal_of(const hl__file_session *session, uint32_t hash) {
  return &session->space->control->signals[hl__file_stripe_of(hash)];
}

void hl__file_futex_enter(hl__file_session *session, uint32_t hash) {
  hl__file_signal *signal = signal_of(session, hash);
  (void)atomic_fetch_add(&signal->lease_waiters, 1u);
  asleep_set(session, signal);
}

uint32_t hl__file_futex_seen(const hl__file_session *session, uint32_t hash) {
  return atomic_load(&signal_of(session, hash)->events);
}

void hl__file_futex_sleep(const hl__file_session *session, uint32_t hash, uint32_t seen,
                          int64_t until) {
  int64_t again = hl__now_ms() + POLL_MS;
  futex_wait(&signal_of(session, hash)->events, seen, until < again ? until : again, true,
             wake_bits(hash));
}

void hl__file_futex_leave(hl__file_session *session, uint32_t hash) {
  asleep_set(session, NULL);
  if (!hl__file_space_gone(session->space))
    (void)atomic_fetch_sub(&signal_of(session, hash)->lease_waiters, 1u);
}
