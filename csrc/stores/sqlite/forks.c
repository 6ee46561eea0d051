/*
 * forks.c - see hl__sqlite_enter in sqlite_store.h.
 *
 * SQLite keeps for each file, and for the whole process, which locks the
 * process has on it, and believes that. A child inherits the belief, and not
 * the locks: a database that it opened anew would be found among the parent's,
 * and be used without a lock. So there must be no connection at the moment of a
 * fork. Closing the last one of a database has SQLite take its log apart;
 * database.c forbids that.
 */
#include "sqlite_store.h"

/* Shared by those who are between enter and leave, exclusive while a child is
   born. fork() goes first. */
#ifdef PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP
#define FORKS_INIT PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP
#else
#define FORKS_INIT PTHREAD_RWLOCK_INITIALIZER
#endif
static pthread_rwlock_t forks = FORKS_INIT;

/* All sessions of the process, with or without a connection. A thread that forks has the lock
   exclusively, and needs no mutex. */
static pthread_mutex_t sessions_mutex = PTHREAD_MUTEX_INITIALIZER;
static hl__list sessions = {&sessions, &sessions};

static void before_fork(void) {
  (void)pthread_rwlock_wrlock(&forks);
  for (hl__list *at = sessions.next; at != &sessions; at = at->next)
    hl__sqlite_close(HL__LIST_ENTRY(at, hl__sqlite_session, node));
}

static void after_fork_in_parent(void) { (void)pthread_rwlock_unlock(&forks); }

static void after_fork_in_child(void) {
  hl__list_init(&sessions); /* they are the parent's */
  forks = (pthread_rwlock_t)FORKS_INIT;
}

static void install(void) {
  (void)pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

void hl__sqlite_forks_init(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  (void)pthread_once(&once, install);
}

int hl__sqlite_enter(hl__sqlite_session *session, hl_error *error) {
  (void)pthread_rwlock_rdlock(&forks);
  if (session->db) return HL_OK;
  int status = hl__sqlite_place_stands(session)
                   ? hl__sqlite_open(session, hl__now_ms() + 1000, error)
                   : hl__sqlite_moved_error(session, error);
  if (status) hl__sqlite_leave();
  return status;
}

void hl__sqlite_leave(void) { (void)pthread_rwlock_unlock(&forks); }

/* No fork may meet a half-made list. */
void hl__sqlite_forks_add(hl__sqlite_session *session) {
  (void)pthread_rwlock_rdlock(&forks);
  (void)pthread_mutex_lock(&sessions_mutex);
  hl__list_add(&sessions, &session->node);
  (void)pthread_mutex_unlock(&sessions_mutex);
  (void)pthread_rwlock_unlock(&forks);
}

void hl__sqlite_forks_remove(hl__sqlite_session *session) {
  (void)pthread_rwlock_rdlock(&forks);
  (void)pthread_mutex_lock(&sessions_mutex);
  hl__list_remove(&session->node);
  (void)pthread_mutex_unlock(&sessions_mutex);
  hl__sqlite_close(session);
  (void)pthread_rwlock_unlock(&forks);
}
