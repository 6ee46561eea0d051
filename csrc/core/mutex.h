/*
 * mutex.h - says which mutex guards what, and in which order threads take mutexes, in annotations
 * that clang checks (-Wthread-safety, -Wthread-safety-beta: `make lint`). Other compilers ignore
 * them.
 *
 * In C, clang cannot name the mutex that is a field beside the guarded one. So annotations name
 * classes of mutexes: HL__GUARDED_BY(hl__manager_mutex) is a field that a thread touches only with
 * the mutex of a manager. Readers must see that it is the right manager. The order:
 *
 *     1. hl__manager_mutex      manager.h
 *     2. hl__connection_mutex   pool.h
 *     3. the stores' mutexes    mysql_store.h, file.h
 *     4. hl__births             fork.h; fork() itself takes it, and nothing of
 *                               1 to 3
 *     5. hl__fork_mutex         fork.c
 *
 * A thread that holds one may take those below it.
 */
#ifndef HIERLOCK_MUTEX_H
#define HIERLOCK_MUTEX_H

#include <pthread.h>

#if defined(__clang__)
#define HL__ANNOTATE(what) __attribute__((what))
#else
#define HL__ANNOTATE(what)
#endif

/* Never defined: only annotations name it. */
typedef struct HL__ANNOTATE(capability("mutex")) hl__mutex_class {
  char nothing;
} hl__mutex_class;
#define HL__MUTEX_CLASS(class) extern hl__mutex_class class
#define HL__AFTER(...) HL__ANNOTATE(acquired_after(__VA_ARGS__))
#define HL__BEFORE(...) HL__ANNOTATE(acquired_before(__VA_ARGS__))

HL__MUTEX_CLASS(hl__manager_mutex);
HL__MUTEX_CLASS(hl__connection_mutex) HL__AFTER(hl__manager_mutex);
HL__MUTEX_CLASS(hl__births) HL__AFTER(hl__connection_mutex);
HL__MUTEX_CLASS(hl__fork_mutex) HL__AFTER(hl__births);

/* For fields and variables. */
#define HL__GUARDED_BY(class) HL__ANNOTATE(guarded_by(class))

/* For functions. REQUIRES: the caller holds the mutex. ACQUIRES, RELEASES: the function returns
   with it, or without it. ACQUIRES_IF_0: it returns 0 with the mutex, and else without. */
#define HL__REQUIRES(...) HL__ANNOTATE(requires_capability(__VA_ARGS__))
#define HL__REQUIRES_SHARED(...) HL__ANNOTATE(requires_shared_capability(__VA_ARGS__))
#define HL__ACQUIRES(...) HL__ANNOTATE(acquire_capability(__VA_ARGS__))
#define HL__ACQUIRES_SHARED(...) HL__ANNOTATE(acquire_shared_capability(__VA_ARGS__))
#define HL__RELEASES(...) HL__ANNOTATE(release_capability(__VA_ARGS__))
#define HL__RELEASES_SHARED(...) HL__ANNOTATE(release_shared_capability(__VA_ARGS__))
#define HL__ACQUIRES_IF_0(...) HL__ANNOTATE(try_acquire_capability(0, __VA_ARGS__))
/* For functions during which no other thread can have the mutex, or that clang cannot follow; each
   says why. */
#define HL__UNCHECKED HL__ANNOTATE(no_thread_safety_analysis)

/* Begins a function during which pthread_cancel() does not end the thread, but only once it
   returns. Otherwise the thread would leave a mutex, a connection and a place in line behind. */
static inline int hl__uncancelled_begin(void) {
  int before = PTHREAD_CANCEL_ENABLE;
  (void)pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
  return before;
}
static inline void hl__uncancelled_end(const int *before) {
  (void)pthread_setcancelstate(*before, NULL);
}
#define HL__UNCANCELLED                                                                            \
  __attribute__((cleanup(hl__uncancelled_end), unused)) const int uncancelled =                    \
      hl__uncancelled_begin()

/* Defines name_lock and name_unlock for the mutex in `field` of the type. */
#define HL__MUTEX_FUNCTIONS(name, type, field, class)                                              \
  static inline void name##_lock(type *it) HL__ACQUIRES(class) HL__UNCHECKED {                     \
    (void)pthread_mutex_lock(&it->field);                                                          \
  }                                                                                                \
  static inline void name##_unlock(type *it) HL__RELEASES(class) HL__UNCHECKED {                   \
    (void)pthread_mutex_unlock(&it->field);                                                        \
  }

#endif
