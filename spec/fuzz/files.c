/* files.c - a lock directory whose files were overwritten, before it was opened and while it is
   used: a program that opens it gets its lock, or an error in one line, in time. Whatever is in
   the files, a holder of a row's byte keeps others out. A directory without any files is as good
   as new. The input: damage to the present files, a zero, and damage to the files in use. See
   damage. */
#include "fuzz.h"

#include "board.h"
#include "offset.h"

#include <dirent.h>
#include <errno.h>
#include <time.h>
#include <unistd.h>

#define DAMAGES 8
#define WAIT_MS 1
#define IN_TIME_MS 30000 /* for all of it, on a busy machine */

static char dsn[80];
static int directory = -1;
static uint8_t *control, *board; /* as they are in a healthy directory */
static size_t control_size, board_size;
/* The board is shown only while a process has it locked. */
static int board_in_use = -1;
/* The stripe's file is another than it was: no program is let at it. */
static bool replaced;

static char usual_stripe[32];
static const hl_id user = {"u1", 2};

static void forget_all(void) {
  DIR *names = fdopendir(dup(directory));
  rewinddir(names);
  for (struct dirent *file; (file = readdir(names));)
    if (file->d_name[0] != '.' && unlinkat(directory, file->d_name, 0) != 0)
      CLAIM(unlinkat(directory, file->d_name, AT_REMOVEDIR) == 0);
  (void)closedir(names);
  if (board_in_use >= 0) (void)close(board_in_use);
  board_in_use = -1;
}

static void at_exit(void) {
  forget_all();
  (void)rmdir(dsn + strlen("file:"));
}

static int64_t now_ms(void) {
  struct timespec t;
  (void)clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static hl_manager *open_manager(hl_error *error) {
  hl_config config = HL_CONFIG_INIT;
  hl_manager *manager = NULL;
  config.dsn = dsn;
  config.application = "fuzz";
  int status = hl_manager_open(&config, &manager, error);
  if (status) claim_error(error, status);
  CLAIM((status == HL_OK) == (manager != NULL));
  return manager;
}

static hl_plan *plan_of_user(hl_manager *manager) {
  hl_plan *plan = hl_plan_new(hl_manager_layout(manager));
  CLAIM(hl_plan_add(plan, &user, 1, HL_EXCLUSIVE, false, NULL) == HL_OK);
  return plan;
}

static int acquire(hl_manager *manager, const hl_plan *plan, int64_t timeout, hl_lock **lock) {
  hl_options options = HL_OPTIONS_INIT;
  hl_error error;
  options.timeout = timeout;
  options.label = "label";
  options.label_size = 5;
  int status = hl_acquire(manager, plan, &options, lock, &error);
  if (status) claim_error(&error, status);
  CLAIM((status == HL_OK) == (*lock != NULL));
  return status;
}

/* ---------------------------------------------------------------- damage */

static uint8_t *read_file(const char *name, size_t *size) {
  struct stat st;
  int fd = openat(directory, name, O_RDONLY);
  CLAIM(fd >= 0 && fstat(fd, &st) == 0);
  *size = (size_t)st.st_size;
  uint8_t *bytes = malloc(*size);
  CLAIM(bytes && read(fd, bytes, *size) == st.st_size);
  (void)close(fd);
  return bytes;
}

static void write_at(const char *name, const void *data, size_t size, size_t at) {
  int fd = openat(directory, name, O_WRONLY | O_CREAT | O_NONBLOCK, 0600);
  if (fd < 0) return; /* it is no file by now */
  (void)!pwrite(fd, data, size, (off_t)at);
  (void)close(fd);
}

static const char *stripe_name(hl_manager *manager, char name[32]) {
  size_t n;
  hl_plan *plan = plan_of_user(manager);
  const hl_row *row = hl_plan_rows(plan, &n);
  CLAIM(n == 1);
  (void)snprintf(name, 32, "rows-%04u", hl__file_stripe_of(hl__file_hash(row->level, row->bucket)));
  hl_plan_free(plan);
  return name;
}

/* Does one damage: a kind, a place, a number of bytes, and the bytes. False at the end. */
static bool damage(input *in, const char *stripe) {
  uint8_t kind = take_byte(in);
  if (kind == 0) return false;
  size_t at = take_number(in), size = take_byte(in);
  const uint8_t *bytes = take_bytes(in, &size);
  const char *const names[] = {"control", stripe, "who-1", "tmp-1", "who-2"};
  const char *name = names[kind / 8 % 5];
  const char *other = names[at % 5];
  bool is_board = name == names[2];
  switch (kind % 8) {
  case 0: /* a part of the right contents, or all of them, and these bytes */
  case 1: {
    const uint8_t *right = is_board ? board : control;
    size_t right_size = is_board ? board_size : control_size;
    write_at(name, right, kind % 8 ? at % (right_size + 1) : right_size, 0);
    write_at(name, bytes, size, at % right_size);
    break;
  }
  case 2: /* these bytes where they matter: of the header, or the first records */
    write_at(name, bytes, size,
             is_board && at % 2 ? HL__BOARD_CHUNK + at / 2 % 4096 : at / 2 % 2048);
    break;
  case 3:
    (void)unlinkat(directory, name, 0);
    write_at(name, bytes, size, 0);
    break;
  case 4: {
    int fd = openat(directory, name, O_RDWR | O_NONBLOCK);
    if (fd < 0) break;
    (void)!ftruncate(fd, (off_t)(at % (control_size * 2)));
    (void)close(fd);
    break;
  }
  case 5:
    (void)unlinkat(directory, name, 0);
    if (at % 4 == 0) (void)mkdirat(directory, name, 0700);
    if (at % 4 == 1) (void)mkfifoat(directory, name, 0600);
    if (at % 4 == 2) (void)symlinkat("control", directory, name);
    break;
  case 6: /* of the stripe in use: the words by which waiters are woken */
    if (sscanf(stripe, "rows-%zu", &at) == 1)
      write_at("control", bytes, size < 32 ? size : 32,
               offsetof(hl__file_control, signals) + at * sizeof(hl__file_signal));
    break;
  default: (void)renameat(directory, name, directory, other); replaced |= other == stripe;
  }
  if (kind % 8 == 3 || kind % 8 == 5 || kind % 8 == 7) replaced |= name == stripe;
  if (is_board && board_in_use < 0 &&
      (board_in_use = openat(directory, name, O_RDWR | O_NONBLOCK)) >= 0) {
    struct flock life = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
    (void)fcntl(board_in_use, F_OFD_SETLK, &life);
  }
  return in->left > 0;
}

/* -------------------------------------------------------------------- use */

static void holder_seen(void *context, const hl_holder *holder) {
  (void)context;
  claim_text(holder->application, sizeof holder->application);
  claim_text(holder->host, sizeof holder->host);
  claim_text(holder->label, sizeof holder->label);
  claim_text(holder->path, sizeof holder->path);
  CLAIM(holder->mode == HL_SHARED || holder->mode == HL_EXCLUSIVE);
}

/* Another program that has the row, for the kernel: -1 when there is no such file. */
static int row_lock(const char *stripe, const hl_row *row) {
  const hl__file_entry entry = {.bucket = (uint32_t)row->bucket, .level = row->level};
  struct flock range = hl__file_row_range(&entry);
  int fd = openat(directory, stripe, O_RDWR | O_NOFOLLOW | O_NONBLOCK);
  range.l_type = F_WRLCK;
  if (fd >= 0 && fcntl(fd, F_OFD_SETLK, &range) != 0) {
    (void)close(fd);
    fd = -1;
  }
  return fd;
}

static void use(hl_manager *manager, const char *stripe) {
  hl_error error;
  hl_lock *lock = NULL;
  size_t n;
  hl_plan *plan = plan_of_user(manager);
  int status = acquire(manager, plan, 0, &lock);
  int looked = hl_manager_holders(manager, plan, holder_seen, NULL, &error);
  if (looked) claim_error(&error, looked);
  const hl_row *row = hl_plan_rows(plan, &n);
  int other = row_lock(stripe, row);
  /* A holder that knows of its lock has it for all others, too. */
  if (lock && hl_lock_is_held(lock)) CLAIM(other < 0 || replaced);
  hl_lock_free(lock);
  if (other < 0) other = row_lock(stripe, row);
  if (other >= 0) {
    status = acquire(manager, plan, WAIT_MS, &lock);
    CLAIM(status != HL_OK || replaced);
    hl_lock_free(lock);
    (void)close(other);
  }
  status = acquire(manager, plan, WAIT_MS, &lock);
  hl_lock_free(lock);
  hl_plan_free(plan);
}

/* The files when all is well. */
static void begin(void) {
  hl_error error;
  hl_lock *lock;
  (void)snprintf(dsn, sizeof dsn, "file:/dev/shm/hierlock-fuzz-XXXXXX");
  CLAIM(mkdtemp(dsn + strlen("file:")));
  directory = open(dsn + strlen("file:"), O_RDONLY | O_DIRECTORY);
  (void)atexit(at_exit);
  hl_manager *manager = open_manager(&error);
  hl_plan *plan = plan_of_user(manager);
  CLAIM(acquire(manager, plan, 0, &lock) == HL_OK);
  (void)stripe_name(manager, usual_stripe);
  control = read_file("control", &control_size);
  memset(control + offsetof(hl__file_control, inode), 0, sizeof(uint64_t));
  DIR *names = fdopendir(dup(directory));
  for (struct dirent *file; (file = readdir(names));)
    if (strncmp(file->d_name, "who-", 4) == 0) board = read_file(file->d_name, &board_size);
  CLAIM(board);
  (void)closedir(names);
  hl_lock_free(lock);
  hl_plan_free(plan);
  hl_manager_close(manager);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  input in = {data, size};
  hl_error error;
  hl_lock *lock;
  char stripe[32];
  if (directory < 0) begin();
  strcpy(stripe, usual_stripe);
  forget_all();
  replaced = false;
  int64_t start = now_ms();
  for (int i = 0; i < DAMAGES && damage(&in, stripe); i++) {}
  hl_manager *manager = open_manager(&error);
  if (manager) {
    use(manager, stripe_name(manager, stripe));
    replaced = false;
    for (int i = 0; i < DAMAGES && damage(&in, stripe); i++) {}
    use(manager, stripe);
    hl_manager_close(manager);
  }
  CLAIM(now_ms() - start < IN_TIME_MS);
  forget_all();
  if (size % 8) return 0; /* it takes as long as all of the above */
  manager = open_manager(&error);
  CLAIM(manager);
  hl_plan *plan = plan_of_user(manager);
  CLAIM(acquire(manager, plan, 0, &lock) == HL_OK);
  hl_lock_free(lock);
  hl_plan_free(plan);
  hl_manager_close(manager);
  return 0;
}
