#!/usr/bin/env bash
#
# Runs a program under valgrind's memcheck. Fails when the program does, when it makes an error or
# leaks something, or when a child that it forked makes an error. What such a child leaks does not
# count: it has its parent's memory, and ends by _exit. Programs that it starts run without valgrind.

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

export HIERLOCK_SLOWER=50
valgrind -q --suppressions="$directory/suppressions" --fair-sched=yes --leak-check=full --show-leak-kinds=definite \
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
