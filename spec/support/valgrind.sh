#!/usr/bin/env bash
#
# Runs a program under valgrind's memcheck. Fails when the program does, when it makes an error or
# leaks something, or when a child that it forked makes an error. What such a child leaks does not
# count: it has its parent's memory, and ends by _exit. Programs that it starts run without valgrind.
#
# A child does not look for leaks at all. After exit_group() valgrind would search all memory that it
# believes to be mapped, and take a signal for each eight bytes that it cannot read. It does not know
# MADV_DONTFORK: a child lacks the embedded store's mapping of 512 MiB, so valgrind would take 67
# million signals. It would take as many where a child leaves a manager open, as the mapping is longer
# than its file.

set -uo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT

# ld.so compares eight bytes at a time, beyond the end of a library's run path, too.
cat >"$directory/suppressions" <<'END'
{
  run_path
  Memcheck:Addr8
  ...
  fun:is_dst
}
END

"${CC:-cc}" -O2 -shared -fPIC -o "$directory/child.so" -x c - <<'END' || exit
#include <pthread.h>
#include <stdlib.h>
#include <valgrind/valgrind.h>

static void in_child(void) { VALGRIND_CLO_CHANGE("--leak-check=no"); }

__attribute__((constructor)) static void start(void) {
  if (!RUNNING_ON_VALGRIND) return; /* the shell that valgrind is */
  (void)unsetenv("LD_PRELOAD");     /* for the programs that this one starts */
  (void)pthread_atfork(NULL, NULL, in_child);
}
END

export HIERLOCK_SLOWER=50
LD_PRELOAD="$directory/child.so" valgrind -q --suppressions="$directory/suppressions" --fair-sched=yes --leak-check=full --show-leak-kinds=definite \
  --errors-for-leak-kinds=definite --num-callers=30 --log-file="$directory/%p" "$@" &
program=$!
wait "$program"
status=$?

# Lines with -- are about a system call that valgrind does not know, as pidfd_open.
mapfile -t reports < <(
  grep -lE '== (Invalid|Mismatched|Conditional|Use of|Syscall|Source and|Argument|Process)' "$directory"/*
  grep -q '^==' "$directory/$program" && echo "$directory/$program"
)
if ((${#reports[@]})); then
  sort -u <<<"$(printf '%s\n' "${reports[@]}")" | xargs cat
  ((status)) || status=99
fi
exit "$status"
