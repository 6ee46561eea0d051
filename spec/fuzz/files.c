/* files.c - a lock directory whose file was overwritten, before it was opened and while it is used:
   a program that opens it gets its lock, or an error in one line, in time. While the file is as
   hierlock made it, whatever lies beside it, a holder keeps others out. A directory without any
   files is as good as new. The input: damage to the present files, a zero, and damage to the files
   in use. See damage. */
#include "fuzz.h"

#include "../../csrc/stores/embedded/format.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define DAMAGES 8
#define WAIT_MS 1
#define IN_TIME_MS 30000 /* for all of it, on a busy machine */

static char dsn[80];
static int directory = -1;
static uint8_t *control; /* as it is in a healthy directory */
static size_t control_size;
static bool touched; /* it is another file than hierlock has made, or has other bytes */
static bool in_use;

static const hl_id user = {"u1", 2};

static void forget_all(void) {
  DIR *names = fdopendir(dup(directory));
  rewinddir(names);
  for (struct dirent *file; (file = readdir(names));)
    if (file->d_name[0] != '.' && unlinkat(directory, file->d_name, 0) != 0)
      CLAIM(unlinkat(directory, file->d_name, AT_REMOVEDIR) == 0);
  (void)closedir(names);
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

/* A place in the file that says something: of the header, a lock, a slot, the kinds of chunks, a
   chain, or the chunks that are used. */
static size_t place(size_t at) {
  const size_t used = control_size - HL__SHM_FIXED;
  switch (at % 6) {
  case 0: return at / 6 % sizeof(hl__shm_header);
  case 1: return offsetof(hl__shm_table, part) + at / 6 % sizeof(hl__shm_part[HL__SHM_PARTS]);
  case 2: return offsetof(hl__shm_table, slot) + at / 6 % (4 * sizeof(hl__shm_slot));
  case 3: return offsetof(hl__shm_table, dir) + at / 6 % 64;
  case 4: return offsetof(hl__shm_table, head) + at / 6 % (control_size / 4);
  default: return HL__SHM_FIXED + at / 6 * 4 % used;
  }
}

/* Does one damage: a kind, a place, a number of bytes, and the bytes. False at the end. */
static bool damage(input *in) {
  uint8_t kind = take_byte(in);
  if (kind == 0) return false;
  size_t at = take_number(in), size = take_byte(in);
  const uint8_t *bytes = take_bytes(in, &size);
  const char *const names[] = {"control", "control", "control", "tmp-1", "control.old"};
  const char *name = names[kind / 8 % 5];
  const char *other = names[at % 5];
  bool is_control = strcmp(name, "control") == 0;
  switch (kind % 8) {
  case 0: /* a part of the right contents, or all of them, and these bytes */
  case 1:
    write_at(name, control, kind % 8 ? at % (control_size + 1) : control_size, 0);
    write_at(name, bytes, size, at % control_size);
    break;
  case 2: /* these bytes where they matter */
  case 6: write_at(name, bytes, size, place(at)); break;
  case 3:
    (void)unlinkat(directory, name, 0);
    write_at(name, bytes, size, 0);
    break;
  case 4: { /* a file that is cut in use ends the program: see docs/embedded.md */
    int fd = in_use ? -1 : openat(directory, name, O_RDWR | O_NONBLOCK);
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
  default:
    (void)renameat(directory, name, directory, other);
    is_control = is_control || strcmp(other, "control") == 0;
  }
  touched = touched || is_control;
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

static void use(hl_manager *manager) {
  hl_error error;
  hl_lock *lock = NULL, *second = NULL;
  hl_plan *plan = plan_of_user(manager);
  int status = acquire(manager, plan, 0, &lock);
  CLAIM(touched || status == HL_OK);
  int looked = hl_manager_holders(manager, plan, holder_seen, NULL, &error);
  if (looked) claim_error(&error, looked);
  status = acquire(manager, plan, WAIT_MS, &second);
  CLAIM(touched || status == HL_TIMEOUT);
  hl_lock_free(second);
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
  control = read_file("control", &control_size);

  hl_lock_free(lock);
  hl_plan_free(plan);
  hl_manager_close(manager);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  input in = {data, size};
  hl_error error;
  hl_lock *lock;
  if (directory < 0) begin();
  forget_all();
  touched = in_use = false;
  int64_t start = now_ms();
  for (int i = 0; i < DAMAGES && damage(&in); i++) {}
  hl_manager *manager = open_manager(&error);
  if (manager) {
    in_use = true;
    use(manager);
    for (int i = 0; i < DAMAGES && damage(&in); i++) {}
    use(manager);
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
