/*
 * folder.c - a store of hierlock's that is not part of it: leases in a folder of one machine.
 * docs/adding-a-store.md walks through it. It needs a hierlock that is installed:
 *
 *     make -C examples/store LUA=lua5.4
 *
 * makes examples/store/build/hierlock/store/folder.so, which a Lua program finds by LUA_CPATH, and
 * its DSN by name: hierlock.open "store+folder:/dev/shm/mine".
 *
 * All leases, and all who wait for one, are entries of one file, in the order in which they came.
 * Each operation has the folder to itself (flock), reads the file, and, if it changes anything,
 * writes another file and renames it. So an operation is done or not done wherever its process is
 * killed, and the kernel unlocks the folder. All that is done is done when the function returns:
 * no packet comes late, or twice.
 *
 * What it does not give. The folder must be on tmpfs, which no other machine shares and no reboot
 * leaves. A process that is stopped while it has the folder, for less than a millisecond each time,
 * stops all others until it goes on or dies. Each operation reads all entries: it is made for
 * hundreds, not for thousands. Waiters ask again every 20 ms. There are no session locks and no
 * update locks. Who may write to the folder can forge and end every lease. Who deletes its file
 * ends all leases, and their holders hear of it when they ask.
 */
#include <hierlock/error.h>
#include <hierlock/fork.h>
#include <hierlock/layout.h>
#include <hierlock/mode.h>
#include <hierlock/record.h>
#include <hierlock/socket.h>
#include <hierlock/store.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define MAGIC "HLFOLD1"
#define TMPFS 0x01021994
#define WAITER_MS 2000  /* a waiter that was not heard of for so long is dead, or stopped */
#define PAUSE_MS 20     /* between two looks of a waiter, at most */
#define KEPT_MS 3600000 /* an entry that ended so long ago goes */

extern const hl_store_ops hl_store_folder;

typedef enum state { WAITS, HELD, REVOKED } state;

typedef struct entry {
  size_t size; /* with its rows: a multiple of 8 */
  uint8_t id[16], secret[16], holder[16];
  uint64_t token;
  int64_t end; /* hl__boot_ms, which all processes of the machine share; of a waiter, too */
  uint64_t state, n;
  char by[64], reason[128]; /* of a revocation */
  hl_holder shown;
  hl_row rows[];
} entry;

typedef struct head {
  char magic[8];
  uint64_t entry_size; /* another version of hierlock may have another */
  uint64_t token;      /* the last one */
  char levels[HL__LAYOUT_NAMES_MAX];
} head;

typedef struct folder_session {
  hl_session base;
  const hl_store_config *config;
  hl__wakeup wakeup;
} folder_session;

typedef struct folder_store {
  hl_store base;
  const hl_store_config *config;
} folder_store;

static folder_session *session_of(hl_session *base) { return (folder_session *)(void *)base; }

/* The file, as one operation has it: a head, and entries behind it. */
typedef struct table {
  folder_session *session;
  int fd; /* of the folder, locked */
  char *data;
  size_t size;
  bool changed;
} table;

static bool same(const uint8_t a[16], const uint8_t b[16]) { return memcmp(a, b, 16) == 0; }

/* ---------------------------------------------------------------- the entries */

static head *head_of(const table *self) { return (head *)(void *)self->data; }

/* The entry at that place; NULL: the place is the end. */
static entry *at(const table *self, size_t place) {
  return place < self->size ? (entry *)(void *)(self->data + place) : NULL;
}
static entry *first(const table *self) { return at(self, sizeof(head)); }
static entry *next(const table *self, const entry *e) {
  return at(self, (size_t)((const char *)e - self->data) + e->size);
}

static entry *find(const table *self, const uint8_t id[16]) {
  for (entry *e = first(self); e; e = next(self, e))
    if (same(e->id, id)) return e;
  return NULL;
}

/* Returns what is now in its place. */
static entry *erase(table *self, entry *e) {
  size_t place = (size_t)((char *)e - self->data), size = e->size;
  memmove(e, (char *)e + size, self->size - place - size);
  self->size -= size;
  self->changed = true;
  return at(self, place);
}

/* Says who has the lease now. */
static void sign(const table *self, entry *e, const hl_lease_terms *terms) {
  const hl_store_config *config = self->session->config;
  memcpy(e->holder, terms->holder, 16);
  e->shown.pid = config->pid;
  (void)snprintf(e->shown.application, sizeof e->shown.application, "%s", config->application);
  (void)snprintf(e->shown.host, sizeof e->shown.host, "%s", config->host);
}

/* Appends a waiter. NULL: out of memory. */
static entry *append(table *self, const hl_request *request) {
  size_t size = sizeof(entry) + request->recorded_n * sizeof(hl_row);
  char *data = realloc(self->data, self->size + size);
  if (!data) return NULL;
  self->data = data;
  entry *e = (entry *)(void *)(data + self->size);
  memset(e, 0, size);
  self->size += size;
  e->size = size;
  e->n = request->recorded_n;
  for (size_t i = 0; i < e->n; i++) {
    e->rows[i].bucket = request->recorded[i].bucket;
    e->rows[i].level = request->recorded[i].level;
    e->rows[i].mode = request->recorded[i].mode;
  }
  memcpy(e->id, request->lease->id, 16);
  memcpy(e->secret, request->lease->secret, 16);
  sign(self, e, request->lease);
  hl_holder *shown = &e->shown;
  shown->mode = request->mode;
  shown->kind = HL_LEASE;
  shown->since_ms = hl__unix_ms(); /* for people: never compared */
  (void)snprintf(shown->owner, sizeof shown->owner, "%s", request->lease->owner);
  (void)snprintf(shown->path, sizeof shown->path, "%s", request->path ? request->path : "");
  (void)hl__escape(shown->label, sizeof shown->label, request->label, request->label_size);
  (void)hl__hex(shown->id, e->id, 16);
  return e;
}

/* Both are in locking order. */
static bool conflicts(const entry *e, const hl_row *rows, size_t n) {
  for (size_t i = 0, k = 0; i < n && k < e->n;) {
    int which = hl__row_compare(&rows[i], &e->rows[k]);
    if (which == 0 && hl__modes_conflict((hl_mode)rows[i].mode, (hl_mode)e->rows[k].mode))
      return true;
    if (which <= 0) i++;
    if (which >= 0) k++;
  }
  return false;
}

static bool has_rows(const entry *e, const hl_row *rows, size_t n) {
  bool equal = e->n == n;
  for (size_t i = 0; i < n && equal; i++)
    equal = hl__row_compare(&rows[i], &e->rows[i]) == 0 && rows[i].mode == e->rows[i].mode;
  return equal;
}

/* ------------------------------------------------------------------- the file */

/* Whether what begins there is an entry: any process that may write to the folder may have written
   it. Ends its texts. */
static bool is_entry(entry *e, size_t left) {
  if (left < sizeof *e || e->size > left || e->n > left / sizeof(hl_row) ||
      e->size != sizeof *e + e->n * sizeof(hl_row))
    return false;
  for (size_t i = 0; i < e->n; i++)
    if (e->rows[i].mode != HL_SHARED && e->rows[i].mode != HL_EXCLUSIVE) return false;
  hl_holder *shown = &e->shown;
  e->by[sizeof e->by - 1] = e->reason[sizeof e->reason - 1] = '\0';
  shown->application[sizeof shown->application - 1] = shown->host[sizeof shown->host - 1] = '\0';
  shown->label[sizeof shown->label - 1] = shown->path[sizeof shown->path - 1] = '\0';
  shown->owner[sizeof shown->owner - 1] = shown->id[sizeof shown->id - 1] = '\0';
  return true;
}

static bool is_sound(const table *self) {
  const head *h = head_of(self);
  size_t place = sizeof *h;
  bool sound = self->size >= place && memcmp(h->magic, MAGIC, sizeof h->magic) == 0 &&
               h->entry_size == sizeof(entry) && memchr(h->levels, '\0', sizeof h->levels);
  while (sound && place < self->size) {
    sound = is_entry(at(self, place), self->size - place);
    if (sound) place += at(self, place)->size;
  }
  return sound;
}

/* On tmpfs a read is whole, and so is a write, unless the process dies or memory is short. */
static int table_read(table *self, hl_error *error) {
  const char *path = self->session->config->dsn->path;
  hl_store *store = self->session->base.store;
  const hl_layout *wanted = store->layout ? store->layout : self->session->config->layout;
  struct stat st = {.st_size = sizeof(head)};
  int fd = openat(self->fd, "leases", O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  bool fresh = fd < 0 && errno == ENOENT, read_all = fresh || (fd >= 0 && fstat(fd, &st) == 0);
  self->size = (size_t)st.st_size;
  self->data = calloc(1, self->size + sizeof(head));
  if (self->data && fd >= 0) read_all = read(fd, self->data, self->size) == st.st_size;
  if (fd >= 0) (void)close(fd);
  if (!self->data) return hl__error_memory(error);
  if (!read_all) return hl__error_errno(error, HL_ESTORE, "cannot read %s/leases", path);
  if (fresh) { /* tokens grow from one file to the next, by the time: 2^14 in a millisecond */
    memcpy(head_of(self)->magic, MAGIC, sizeof MAGIC);
    head_of(self)->entry_size = sizeof(entry);
    head_of(self)->token = (uint64_t)hl__unix_ms() << 14;
    (void)hl__layout_names(wanted, head_of(self)->levels);
  }
  if (!is_sound(self))
    return hl__error(error, HL_ESTORE, "%s/leases is damaged, or another version's", path);
  int status = hl__layout_settle(wanted, head_of(self)->levels, &store->layout, error);
  if (status != HL_EMISMATCH) return status;
  return hl__error(error, HL_EMISMATCH, "%s has the levels %.200s", path, head_of(self)->levels);
}

static int table_write(const table *self, hl_error *error) {
  struct stat st;
  (void)unlinkat(self->fd, "new", 0); /* of a process that was killed */
  int fd = openat(self->fd, "new", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  /* Who may write to the folder may read the file, too. */
  bool ok = fd >= 0 && fstat(self->fd, &st) == 0 && fchmod(fd, st.st_mode & 0666) == 0 &&
            write(fd, self->data, self->size) == (ssize_t)self->size;
  if (ok) ok = renameat(self->fd, "new", self->fd, "leases") == 0;
  int status = ok ? HL_OK
                  : hl__error_errno(error, HL_ESTORE, "cannot write to %s",
                                    self->session->config->dsn->path);
  if (fd >= 0) (void)close(fd);
  return status;
}

/* ------------------------------------------------------------ one operation */

/* Whether the path still names the folder that is locked. */
static bool stands(const table *self) {
  struct stat ours, named;
  return fstat(self->fd, &ours) == 0 && stat(self->session->config->dsn->path, &named) == 0 &&
         ours.st_dev == named.st_dev && ours.st_ino == named.st_ino;
}

/* Ends an operation with that status. After a failure nothing has changed, unless it is
   HL_ECONNECTION. */
static int leave(table *self, int status, hl_error *error) {
  if (self->changed) {
    int written = table_write(self, error);
    if (written) status = written;
  }
  if (self->data && !stands(self))
    status = hl__error(error, HL_ECONNECTION, "%s was replaced", self->session->config->dsn->path);
  if (self->fd >= 0) (void)close(self->fd);
  hl__fork_allow();
  free(self->data);
  return status;
}

/* Begins an operation: locks the folder. A child that is born meanwhile would keep it locked, so
   fork() has to wait. HL_OK: leave ends it. */
static int enter(hl_session *base, const hl__wakeup *wakeup, int64_t deadline, table *self,
                 hl_error *error) {
  struct statfs fs;
  *self = (table){.session = session_of(base)};
  const char *path = self->session->config->dsn->path;
  for (;;) {
    (void)mkdir(path, 0700); /* where it was removed: without it, no lease stands */
    hl__fork_forbid();
    self->fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (self->fd < 0 || fstatfs(self->fd, &fs) != 0)
      return leave(self, hl__error_errno(error, HL_ECONNECTION, "cannot open %s", path), error);
    if (fs.f_type != TMPFS)
      return leave(self, hl__error(error, HL_EUNSAFE_SERVER, "%s is not on tmpfs", path), error);
    if (flock(self->fd, LOCK_EX | LOCK_NB) == 0) break;
    (void)leave(self, HL_OK, error);
    if (hl__left_ms(deadline) == 0)
      return hl__error(error, HL_TIMEOUT, "another process has %s to itself", path);
    if (hl__socket_await(self->session->config, -1, 0, wakeup, hl__now_ms() + 1) == HL_CANCELLED)
      return hl__error(error, HL_CANCELLED, "the wait was cancelled");
  }
  int status = table_read(self, error);
  if (status == HL_OK && wakeup && atomic_load(&wakeup->interrupted))
    status = hl__error(error, HL_CANCELLED, "the wait was cancelled");
  return status ? leave(self, status, error) : HL_OK;
}

/* For all but taking: as long as a busy machine may need, though the caller's time is up. */
static int enter_soon(hl_session *base, int64_t deadline, table *self, hl_error *error) {
  int64_t least = hl__answer_by(0);
  return enter(base, NULL, deadline > least ? deadline : least, self, error);
}

/* ----------------------------------------------------------------------- take */

/* Whether somebody is in the way. Those in the way whose time is up go; so does what is old. A
   lease whose time is up, and in nobody's way, stays: a refresh may have it back. */
static bool is_blocked(table *self, const hl_request *request, int64_t now) {
  bool blocked = false, is_earlier = true;
  for (entry *e = first(self); e;) {
    bool own = same(e->id, request->lease->id);
    bool counts = !own && (e->state == HELD || (e->state == WAITS && is_earlier));
    bool meets = counts && conflicts(e, request->rows, request->n);
    bool old = e->end <= now - (e->state == WAITS ? 0 : KEPT_MS);
    if (own) is_earlier = false;
    if ((!own && old) || (meets && e->end <= now) || same(e->id, request->lease->former)) {
      e = erase(self, e);
      continue;
    }
    blocked = blocked || meets;
    e = next(self, e);
  }
  return blocked;
}

/* One look. HL__AGAIN: the caller waits, and is in the queue. */
static int look(hl_session *base, const hl_request *request, hl_grant *grant, hl_error *error) {
  const hl_lease_terms *terms = request->lease;
  int64_t deadline = request->try_once ? 0 : request->deadline;
  table self;
  int status = enter(base, &session_of(base)->wakeup, hl__answer_by(deadline), &self, error);
  if (status) return status;
  int64_t now = hl__boot_ms();
  bool blocked = is_blocked(&self, request, now);
  entry *own = find(&self, terms->id);
  if (blocked && hl__left_ms(deadline) == 0) {
    if (own) (void)erase(&self, own);
    return leave(&self, hl__error(error, HL_TIMEOUT, "the lock is not free"), error);
  }
  if (!own) own = append(&self, request);
  if (!own) return leave(&self, hl__error_memory(error), error);
  if (blocked && own->end - now > WAITER_MS / 2) return leave(&self, HL__AGAIN, error);
  self.changed = true;
  own->end = hl__deadline(now, blocked ? WAITER_MS : terms->ttl);
  if (blocked) return leave(&self, HL__AGAIN, error);
  own->state = HELD;
  own->token = grant->token = ++head_of(&self)->token << 8;
  grant->sent_ms = now; /* its holder believes in it no longer than the entry says */
  return leave(&self, HL_OK, error);
}

static int take(hl_session *base, const hl_request *request, hl_grant *grant, hl_error *error) {
  folder_session *session = session_of(base);
  table self;
  int status;
  if (!request->lease) return hl__error(error, HL_EUNSUPPORTED, "a folder has only leases");
  grant->sent_ms = 0;
  for (int64_t pause = 1; (status = look(base, request, grant, error)) == HL__AGAIN;) {
    int64_t until = hl__now_ms() + pause;
    if (until > request->deadline) until = request->deadline;
    status = hl__socket_await(session->config, -1, 0, &session->wakeup, until);
    if (status == HL_CANCELLED) break;
    pause = pause < PAUSE_MS / 2 ? 2 * pause : PAUSE_MS;
  }
  (void)hl__wakeup_interruption_take(&session->wakeup); /* one that came too late */
  if (status != HL_CANCELLED) return status;
  if (enter_soon(base, 0, &self, NULL) == HL_OK) { /* else its waiter ends after WAITER_MS */
    entry *own = find(&self, request->lease->id);
    if (own) (void)erase(&self, own);
    (void)leave(&self, HL_OK, NULL);
  }
  return hl__error(error, HL_CANCELLED, "the wait was cancelled");
}

/* ------------------------------------------------------------------ one lease */

/* Whether the caller has the lease: presence decides, not the time. */
static int judge(const entry *e, hl__record record, hl_error *error) {
  record.there = e && e->state != WAITS;
  record.revoked = e && e->state == REVOKED;
  record.by = e ? e->by : NULL;
  record.reason = e ? e->reason : NULL;
  return hl__record_check(&record, error);
}

/* Begins an operation on a lease that the caller has. HL_OK: *e is its entry. */
static int enter_held(hl_session *base, const hl_lease_terms *terms, bool again, int64_t deadline,
                      table *self, entry **e, hl_error *error) {
  int status = enter_soon(base, deadline, self, error);
  if (status) return status;
  *e = find(self, terms->id);
  hl__record record = {.secret = true, .rows = true, .again = again};
  record.holder = *e && same((*e)->holder, terms->holder);
  status = judge(*e, record, error);
  return status ? leave(self, status, error) : HL_OK;
}

static int refresh(hl_session *base, const hl_lease_terms *terms, int64_t ttl, int64_t deadline,
                   int64_t *sent_ms, hl_error *error) {
  table self;
  entry *e;
  int status = enter_held(base, terms, false, deadline, &self, &e, error);
  if (status) return status;
  *sent_ms = hl__boot_ms();
  e->end = hl__deadline(*sent_ms, ttl);
  self.changed = true;
  return leave(&self, HL_OK, error);
}

static int inspect(hl_session *base, const hl_lease_terms *terms, int64_t deadline,
                   int64_t *left_ms, hl_error *error) {
  table self;
  entry *e;
  int status = enter_held(base, terms, false, deadline, &self, &e, error);
  if (status) return status;
  *left_ms = hl__lease_left_ms(e->end);
  return leave(&self, HL_OK, error);
}

static int drop(hl_session *base, const hl_lease_terms *terms, bool confirm, int64_t deadline,
                hl_error *error) {
  table self;
  entry *e;
  (void)confirm; /* it is done when this returns */
  int status = enter_held(base, terms, terms->again, deadline, &self, &e, error);
  if (status) return status;
  (void)erase(&self, e);
  return leave(&self, HL_OK, error);
}

static int adopt(hl_session *base, const hl_request *request, hl_grant *grant, hl_error *error) {
  const hl_lease_terms *terms = request->lease;
  hl__record record = {.import = true};
  table self;
  /* An import that was given up must not take the lease from a later one. */
  int status =
      enter(base, &session_of(base)->wakeup, hl__answer_by(request->deadline), &self, error);
  if (status) return status;
  entry *e = find(&self, terms->id);
  if (e) {
    record.secret = same(e->secret, terms->secret);
    record.holder = hl__replaces(terms, e->holder, grant);
    record.rows = has_rows(e, request->rows, request->n);
  }
  status = judge(e, record, error);
  if (status) return leave(&self, status, error);
  grant->sent_ms = hl__boot_ms();
  grant->token = e->token;
  e->end = hl__deadline(grant->sent_ms, terms->ttl);
  sign(&self, e, terms);
  self.changed = true;
  return leave(&self, HL_OK, error);
}

/* ---------------------------------------------------------------- many leases */

static bool is_wanted(const entry *e, const hl_lease_filter *filter, bool over) {
  return (over || e->end > hl__boot_ms()) && (!filter->id || same(e->id, filter->id)) &&
         (!filter->owner || strcmp(e->shown.owner, filter->owner) == 0) &&
         (!filter->n || conflicts(e, filter->rows, filter->n));
}

static int show(hl_session *base, const hl_lease_filter *filter, bool waiters, hl_holder_fn fn,
                void *context, int64_t deadline, hl_error *error) {
  table self;
  int status = enter_soon(base, deadline, &self, error);
  if (status) return status;
  for (entry *e = first(&self); e; e = next(&self, e)) {
    bool waits = e->state == WAITS;
    if (e->state == REVOKED || (waits && !waiters) || !is_wanted(e, filter, filter->over && !waits))
      continue;
    hl_holder shown = e->shown;
    shown.waiting = waits;
    shown.remaining_ms = waits ? 0 : hl__lease_left_ms(e->end);
    fn(context, &shown);
  }
  return leave(&self, HL_OK, error);
}

static int list(hl_session *base, const hl_lease_filter *filter, hl_holder_fn fn, void *context,
                int64_t deadline, hl_error *error) {
  return show(base, filter, false, fn, context, deadline, error);
}

static int holders(hl_session *base, const hl_lease_filter *filter, hl_holder_fn fn, void *context,
                   int64_t deadline, hl_error *error) {
  return show(base, filter, true, fn, context, deadline, error);
}

static int lease_revoke(hl_session *base, const hl_lease_filter *filter, int64_t deadline,
                        uint64_t *count, hl_error *error) {
  table self;
  uint64_t revoked = 0;
  int status = enter_soon(base, deadline, &self, error);
  if (status) return status;
  for (entry *e = first(&self); e; e = next(&self, e)) {
    if (e->state != HELD || !is_wanted(e, filter, true)) continue;
    e->state = REVOKED; /* its holder hears by whom, and why */
    (void)snprintf(e->by, sizeof e->by, "%s", filter->by);
    (void)snprintf(e->reason, sizeof e->reason, "%s", filter->reason);
    self.changed = true;
    revoked++;
  }
  status = leave(&self, HL_OK, error);
  if (status == HL_OK) *count += revoked;
  return status;
}

/* --------------------------------------------------------- sessions, the store */

static void session_close(hl_session *base) {
  hl__wakeup_close(&session_of(base)->wakeup);
  free(base);
}

static int session_open(hl_store *store, int64_t deadline, hl_session **result, hl_error *error) {
  (void)deadline; /* there is no server */
  folder_session *session = calloc(1, sizeof *session);
  if (!session) return hl__error_memory(error);
  session->base.store = store;
  session->config = ((folder_store *)(void *)store)->config;
  int status = hl__wakeup_open(&session->wakeup, error);
  *result = &session->base;
  if (status) session_close(&session->base);
  return status;
}

static int settle(hl_session *base, int64_t deadline, hl_error *error) {
  (void)deadline, (void)error; /* no answer is ever outstanding */
  (void)hl__wakeup_interruption_take(&session_of(base)->wakeup);
  return HL_OK;
}

static void interrupt(hl_session *base) { hl__wakeup_interrupt(&session_of(base)->wakeup); }

static int parse(char *text, hl_dsn *dsn, hl_error *error) {
  static const hl__dsn_known none[] = {{.name = NULL}};
  int status = hl__dsn_path(text, "folder", dsn, error);
  if (status == HL_OK && !dsn->path)
    status = hl__error(error, HL_EDSN, "the DSN names no folder: write store+folder:/path");
  return status ? status : hl__dsn_store(dsn, none, NULL, error);
}

static void store_close(hl_store *store) {
  hl_layout_unref(store->layout);
  free(store);
}

static const hl_lease_ops leases = {.refresh = refresh,
                                    .inspect = inspect,
                                    .drop = drop,
                                    .adopt = adopt,
                                    .list = list,
                                    .revoke = lease_revoke};

/* Begins and ends an operation, to see whether there can be any, and what levels there are. */
static int store_open(const hl_store_config *config, hl_store **result, hl_error *error) {
  hl_session *session = NULL;
  table self;
  folder_store *store = calloc(1, sizeof *store);
  if (!store) return hl__error_memory(error);
  store->base.leases = &leases;
  store->config = config;
  int status = session_open(&store->base, 0, &session, error);
  if (status == HL_OK) {
    status = enter_soon(session, hl__now_ms() + config->timeout, &self, error);
    if (status == HL_OK) status = leave(&self, HL_OK, error);
    session_close(session);
  }
  if (status == HL_OK)
    *result = &store->base;
  else
    store_close(&store->base);
  return status;
}

const hl_store_ops hl_store_folder = {
    .abi = HL_STORE_ABI,
    .scheme = "store+folder",
    .traits = {.blocks = true, .leases_only = true},
    .parse = parse,
    .open = store_open,
    .close = store_close,
    .session_open = session_open,
    .session_close = session_close,
    .take = take,
    .give_back = hl__session_rests,
    .renew = hl__session_renewed,
    .settle = settle,
    .check = hl__session_rests,
    .interrupt = interrupt,
    .holders = holders,
};
