#!/usr/bin/env bash
#
# run.sh BUILD SECONDS TARGET…: lets each fuzzer run so long, one after the other. FUZZ: more of libFuzzer's options.
# INPUT: a file that each is to be given, instead. Says of what was found how to repeat it.
#
# run.sh --lines FILE…: the inputs in these files as the lines of corpus/TARGET.txt. There, an input is a line, with
# the escapes of C that `printf %b` knows: \\ \n \r \t \0 \xHH.

set -euo pipefail

# lines FILE…: sorted, each once
lines() {
  local file
  for file; do
    od -An -v -w1 -tu1 "$file" | awk '
      BEGIN {
        for (byte = 32; byte < 127; byte++) plain[byte] = sprintf("%c", byte)
        plain[9] = "\\t"; plain[10] = "\\n"; plain[13] = "\\r"; plain[92] = "\\\\"
      }
      { bytes[NR] = $1 + 0 }
      END {
        for (i = 1; i <= NR; i++) {
          byte = bytes[i]
          digit = i < NR && bytes[i + 1] >= 48 && bytes[i + 1] <= 55           # \0 would take it
          text = text ((byte in plain) && !(byte == 32 && i == NR) ? plain[byte] : \
                       (byte == 0 && !digit) ? "\\0" : sprintf("\\x%02x", byte))
        }
        print text
      }'
  done | LC_ALL=C sort -u
}

if [[ $1 == --lines ]]; then lines "${@:2}"; exit; fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

build=$1 seconds=$2
shift 2

# So long may one input take, in seconds, and so much memory, in MiB.
limits=(-timeout=60 -rss_limit_mb=1500 -malloc_limit_mb=100000)
# A server can claim anything of the size of what it will say: there is not so much memory then.
export ASAN_OPTIONS=quarantine_size_mb=16:allocator_may_return_null=1:max_allocation_size_mb=600
export UBSAN_OPTIONS=print_stacktrace=1

# unpack TARGET DIRECTORY: each line of its corpus becomes a file
unpack() {
  local line n=0
  rm -rf "$2"
  mkdir -p "$2"
  while IFS= read -r line; do printf '%b' "$line" >"$2/$((++n))"; done <"spec/fuzz/corpus/$1.txt"
}

# fuzz TARGET: 0 when nothing was found
fuzz() {
  local target=$1 found=$build/fuzz/$1 options=()
  mkdir -p "$found/corpus" "$found/crashes"
  read -ra options <<<"${FUZZ:-}"
  if [[ -n ${INPUT:-} ]]; then
    "$build/fuzz_$target" "${limits[@]}" "${options[@]}" "$INPUT"
    return
  fi
  local log=$found/log crash
  unpack "$target" "$found/given"
  touch "$found/begun"
  if "$build/fuzz_$target" "${limits[@]}" -max_total_time="$seconds" -print_final_stats=1 -close_fd_mask=1 \
       -artifact_prefix="$found/crashes/" "${options[@]}" "$found/corpus" "$found/given" >"$log" 2>&1; then
    awk -v target="$target" '
      / cov: / { for (i = 1; i < NF; i++) if ($i == "cov:") reached = $(i + 1) }
      /^stat::number_of_executed_units/ { n = $2 }
      END { printf "%s: %d inputs, %d places reached, nothing found\n", target, n, reached }' "$log"
    return
  fi
  tail -n 60 "$log"
  while read -r crash; do
    echo "$target: found $crash"
    od -Ax -v -tx1z "$crash" | head -n 64
    echo "$target: to repeat it: make fuzz TARGET=$target INPUT=$crash"
  done < <(find "$found/crashes" -type f -newer "$found/begun")
  return 1
}

status=0
for target; do fuzz "$target" || status=1; done
exit "$status"
