/*
 * test_unload.c - a program may unload what brought the library, as soon as its managers are
 * closed: threads of the library that are just ending do not miss their code.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "leftovers.h"

#include <dlfcn.h>
#include <libgen.h>
#include <stdlib.h>

enum { ROUNDS = 40, WAITS = 6 };

static void code_stays_until_its_threads_have_ended(void **state) {
  (void)state;
  char self[4096], object[4200], directory[] = "/dev/shm/hierlock-unload-XXXXXX", dsn[64];
  ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
  assert_true(n > 0);
  self[n] = '\0';
  (void)snprintf(object, sizeof object, "%s/unloaded.so", dirname(self));
  assert_non_null(mkdtemp(directory));
  (void)snprintf(dsn, sizeof dsn, "file:%s", directory);
  for (int i = 0; i < ROUNDS; i++) {
    void *loaded = dlopen(object, RTLD_NOW | RTLD_LOCAL);
    if (!loaded) fail_msg("%s", dlerror());
    int (*use)(const char *, int);
    *(void **)&use = dlsym(loaded, "use");
    assert_non_null(use);
    assert_int_equal(use(dsn, WAITS), 0);
    assert_int_equal(dlclose(loaded), 0);
  }
  char command[128];
  (void)snprintf(command, sizeof command, "rm -rf %s", directory);
  assert_int_equal(system(command), 0);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(code_stays_until_its_threads_have_ended),
      cmocka_unit_test(nothing_is_left),
  };
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
