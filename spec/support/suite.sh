#!/usr/bin/env bash
#
# Runs spec files and C tests side by side, in LANES lanes (by default three for each core), and says at the end
# what failed, what was pending and what was slow. Each lane has servers of its own, and runs one file at a time: so a
# file may stop its servers, set global variables and count everybody's connections. One more lane for each core has no
# servers, and runs what needs none.
# With MYSQL_DSN there is one lane, on that server.
#
#   suite.sh LUA:FILE…       FILE: a spec, run with that Lua, or a C test, as `make` runs them
#
# A long spec file is run in parts, which lanes share: its line "-- Parts: WORD…" names them. FILE@WORD runs the specs
# whose titles have that word, with `_` for a space, and none of the words before it; FILE@rest runs all others. The
# word "stores" stands for the names of the stores that the file comes to: FILE@redis. The words of a C test are names
# of its tests.
#
# Files that measure how exact time-outs are, or how soon something is sent, run at the end, and no more of them at a
# time than there are cores, for beside others they would measure the machine.
#
# Those that took longest in the last run begin first: the cache has their seconds; not with UNTIL. The order of the
# other files, and of the specs within one, is random: it follows from SEED, which is printed. LIMIT: the seconds after
# which a file that still runs is ended and counts as failed. UNTIL: a time (as of `date +%s`) after which no further
# file begins; the report names those that did not. What failed beside others runs again even then.

set -euo pipefail
self=$(realpath "${BASH_SOURCE[0]}")
cd "$(dirname "$self")/../.."
export LANES=${LANES:-$(($(nproc) * 3))} SEED=${SEED:-$((RANDOM % 10000))} LIMIT=${LIMIT:-600}
make=("${MAKE:-make}" --no-print-directory -s)
seconds=${HIERLOCK_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hierlock}/seconds
exact='(/.*_cost_spec\.lua(@.*)?|/with_spec\.lua|@gives_up)$'
# What needs no server. HIERLOCK_REQUIRE says so if that is wrong.
light='(@(embedded|sqlite|quorum)|/(check|command_completion|deadlock_random|error|finalizer|misuse|plan|quorum_tables|structure)_spec\.lua(@.*)?|/test_(cancel|core|embedded_directory|embedded_store|leases|misuse|memory@on_the_embedded_store|sessions|unload))$'
# What takes longest begins first: the others go on beside it. Here, until a run has said what that is.
long='/(test_memory(@.*)?|test_started|(attach|command_(doctor[a-z_]*|kill|leases|many|run)|command|exit|leases|loop|matrix|memcached|memory|mysql_leases|mysql_silence|mysql_trouble|postgresql_leases|postgresql_security|quorum|quorum_list|quorum_tables|redis|redis_cluster|redis_sentinel|rows[a-z_]*|scenarios|server|storm|update)_spec\.lua(@.*)?)$'

# --- Parts of files ----------------------------------------------------------------------------

mapfile -t stores < <(basename -s .lua spec/support/stores/*.lua)

text_of() {                             # FILE: where it is written
  if [[ $1 == *.lua ]]; then echo "$1"; else echo "spec/core/${1##*/}.c"; fi
}

words() {                               # FILE: the names of its parts, without "rest"
  local word
  for word in $(sed -nE 's/^(--| \*) Parts: //p' "$(text_of "$1")"); do
    [[ $word == stores ]] || { echo "$word"; continue; }
    if grep -q 'each_leasing_store(' "$1"; then
      printf '%s\n' "${stores[@]}"
    elif grep -q 'each_store(' "$1"; then
      for word in "${stores[@]}"; do grep -q 'leases_only = true' "spec/support/stores/$word.lua" || echo "$word"; done
    else                                # on some servers, or on all with sessions
      printf '%s\n' mariadb mysql
      ! grep -q 'each_connection(' "$1" || echo postgresql
    fi
  done
}

title() {                               # WORD: what busted looks for
  if [[ " ${stores[*]} " == *" $1 "* ]]; then echo "on.$1:"; else echo "${1//_/.}"; fi
}

filters() {                             # FILE@WORD: what busted is told
  local word of=${1#*@}
  printf ' --lazy'                      # nothing is set up that no spec of the part uses
  for word in $(words "${1%@*}"); do
    [[ $word != "$of" ]] || { printf " --filter='%s'" "$(title "$word")"; return; }
    printf " --filter-out='%s'" "$(title "$word")"
  done
}

names() {                               # FILE@WORD: the same for a C test
  local word of=${1#*@}
  [[ $1 == *@rest ]] || { echo "$of"; return; }
  for word in $(words "${1%@*}"); do printf -- '-%s ' "$word"; done
}

in_parts() {                            # LUA:FILE…: one a line, each in its parts
  local item part
  for item; do
    part=''
    [[ -e ${item#*:} ]] || { echo "$item"; continue; }
    for part in $(words "${item#*:}"); do echo "$item@$part"; done
    if [[ ${part:-} ]]; then echo "$item@rest"; else echo "$item"; fi
  done
}

# --- The order ----------------------------------------------------------------------------------

in_order() {                            # stdin: items; those that took 5 s first
  awk -v seed="$SEED" -v long="$long" 'BEGIN { srand(seed) }
    !items { seconds[$2] = $1; next }
    { took = ($0 in seconds) ? seconds[$0] : ($0 ~ long) ? 1000 + rand() : 0
      print (took >= 5 ? -took : rand()) "\t" $0 }
  ' "$([[ ! ${UNTIL:-} && -e $seconds ]] && echo "$seconds" || echo /dev/null)" items=1 - | sort -g | cut -f 2-
}

remember() {                            # what each took, for the next run
  local result
  [[ ! ${UNTIL:-} ]] || return 0        # which has another order each time
  mkdir -p "${seconds%/*}"
  touch "$seconds"
  { for result in "$work"/*.result; do [[ ! -e $result || -e ${result%.result}.first ]] || cat "$result"; done
    sed 's/^/0 0 /' "$seconds"
  } | awk '!$1 && !seen[$NF]++ && NR < 2000 { print (NF > 3 ? $3 : $2 / 10), $NF }' >"$seconds.$$"
  mv "$seconds.$$" "$seconds"
}

# --- One lane: takes files from the queue until there are none ---------------------------------

take() {                                # QUEUE: sets $item; false: there is none left
  exec 9>"$work/lock"
  flock 9
  while
    item=$(head -n 1 "$work/$1")
    sed -i 1d "$work/$1"
    [[ $item && ${UNTIL:-} && ! -e $work/${item//[:\/]/_}.log.first ]] && ((EPOCHSECONDS >= UNTIL))
  do
    echo "$item" >>"$work/late"
  done
  exec 9>&-
  [[ $item ]]
}

stood() {                               # what the file's processes do now; with gdb, where
  local pid
  echo "Still running after $LIMIT s:"
  [[ $item == *.lua* ]] || cat "$file.log"
  ps -e -o pgid,pid,ppid,stat,wchan:24,args | awk -v group="$child" 'NR == 1 || $1 == group'
  command -v gdb >/dev/null || return 0
  for pid in $(ps -e -o pgid=,pid=,comm= | awk -v group="$child" '$1 == group && $3 ~ /^(lua|test_)/ { print $2 }'); do
    timeout 20 gdb -p "$pid" -batch -ex 'thread apply all backtrace 25' 2>&1 | grep -E '^(Thread|#)' || true
  done
}

ended() {                               # STATUS: how, and in which spec
  local how="status $1" last
  ((($1) <= 128)) || how="status $1, as by SIG$(kill -l $(($1 - 128)))"
  last=$(sed -n 's/^\[ RUN      \] //p' "$log" | tail -n 1)
  echo "with $how, in: ${last:-nothing that is known}"
}

run_item() {                            # sets $status; the output is in $log
  local clock first file=${item#*:} command
  command=("${make[@]}" test-core "CORE_TESTS=${file%@*}" LIMIT=0)
  if [[ $item != *.lua* && $file == *@* ]]; then command+=("CORE_PART=@${file#*@}" "CORE_NAMES=$(names "$file")"); fi
  if [[ $item == *.lua* ]]; then
    command=(bash -c "$(<"$work/spec-$(basename "${item%%:*}")") --output=gtest")
    # The specs of packaging follow what is installed and uninstalled.
    [[ $item == *packaging_spec.lua ]] || command[-1]+=" --shuffle-tests --seed=$SEED"
    if [[ -s $log.only ]]; then command[-1]+=" --config-file=$log.only"; elif [[ $file == *@* ]]; then command[-1]+=$(filters "$file"); fi
    command[-1]+=" ${file%@*}"
  fi
  set -m                                # a process group of its own, to be ended as a whole
  "${command[@]}" </dev/null >"$log" 2>&1 7>&- 8>&- &
  child=$!
  set +m
  sleep "$LIMIT" 7>&- 8>&- &
  clock=$!
  status=0
  wait -n -p first "$child" "$clock" || status=$?
  if [[ $first == "$clock" ]]; then
    status=124
    stood >>"$log" 2>&1
    kill -s TERM -- "-$child" || true
    sleep 1
    kill -s KILL -- "-$child" || true
    wait "$child" || true
  else
    kill "$clock"
    # One that a tool has ended leaves its peers behind, and with them the connections that they have inherited.
    kill -s KILL -- "-$child" || true
    if ! grep -q '^\[  PASSED  \]' "$log"; then
      echo "It ended without a report, $(ended "$status")" >>"$log"
      status=$((status ? status : 1))
    elif ((status)) && ! grep -qE '^\[  (FAILED|ERROR) ' "$log"; then
      echo "It ended badly behind a report without failures, with status $status." >>"$log"
    fi
  fi
  child=''
} 2>/dev/null

# A machine that is too busy for a spec does not show what the spec is about. So the specs of a file that failed beside
# others are run once more, alone, and the report says so; but not what crashed or hung, what a sanitizer complained
# of, or what saw two holders. TOOL_ENDS: what ended without a report, or badly behind a good one, is run again, too, as
# a tool is known to end programs, and once more if it does so again.
again() {
  ((status != 124)) || return 1
  if [[ -e $log.first ]]; then
    [[ ${TOOL_ENDS:-} && ! -e $log.twice ]] && grep -q '^It ended ' "$log" || return 1
    : >"$log.twice"
  fi
  ! grep -qE 'Sanitizer|runtime error|ERROR SUMMARY: [1-9]|Segmentation|Aborted|Alarm clock|overlap' "$log" || return 1
  [[ ${TOOL_ENDS:-} ]] || ! grep -q '^It ended ' "$log" || return 1
  cat "$log" >>"$log.first"
  sed -nE '/, listed below:$/,$ s/^\[  (FAILED|ERROR) +\] //p' "$log.first" | grep -v ', listed below:$' | sort -u >"$log.failed" || true
  # A configuration of busted's. What is no spec of its own, as a setup, has the whole file run; so do specs that follow
  # one another.
  if [[ -s $log.failed && $item != *packaging_spec.lua ]] && ! grep -qvE '^spec/[a-z0-9_]+\.lua( @ |:)[0-9]+: ' "$log.failed"; then
    { echo 'return { default = { filter = {'
      LC_ALL=C sed -E 's/^spec[^:@]+( @ |:)[0-9]+: //; s/[^[:alnum:]]/%&/g; s/.*/[==[^&$]==],/' "$log.failed"
      echo '} } }'; } >"$log.only"
  fi
  { flock 9; echo "$item" >>"$work/alone"; } 9>"$work/lock"
  echo "        again alone, later  $item"
}

lane() {                                # NUMBER, or light
  local log status start light='' number=0
  if [[ $1 == light ]]; then light=1; else number=$1; fi
  child=''
  trap '[[ ! $child ]] || kill -s KILL -- "-$child"' EXIT
  trap 'exit 130' INT; trap 'exit 143' TERM; trap 'exit 129' HUP
  # A lane shares the first lock while it runs one beside others, and needs it once to itself to know that they are
  # over. It shares the second while it runs an exact one, and has it to itself while it runs one alone.
  exec 7>>"$work/beside" 8>>"$work/running"
  while
    flock --shared 7
    { [[ ! $light ]] && take queue; } || take light || {
      [[ ! $light ]] && flock 7 && flock --unlock 7 && {
        { ((number <= $(nproc))) && flock --shared 8 && take exact; } || { flock 8 && take alone; }
      }
    }
  do
    log=$work/${item//[:\/]/_}.log
    start=${EPOCHREALTIME/./}
    if [[ -s $log.only ]]; then
      run_item
      if ((!status)) && (($(grep -c '^\[       OK \]' "$log") < $(wc -l <"$log.failed"))); then rm "$log.only"; fi
    fi
    if [[ -s $log.only ]]; then
      awk '/^\[  PASSED  \]/ { summary = 1 } summary && /^\[ (SKIPPED| PASSED)/' "$log.first" >>"$log"
    else
      run_item
    fi
    if ((status)) && again; then continue; fi
    printf '%d %d %s\n' "$status" $(((${EPOCHREALTIME/./} - start) / 100000)) "$item" >"$log.result"
    [[ ! -e $work/ended ]] || return 0
    # shellcheck disable=SC2012  # the names are ours
    awk -v n="$(ls "$work"/*.result | wc -l)" -v all="$(<"$work/count")" '
      /^\[  PASSED  \] [0-9]+ test/ { passed = $4 }
      FILENAME ~ /result$/ { printf "%4d/%d  %-6s %5.1f s  %4d passed  %s\n", n, all, $1 ? "FAILED" : "ok", $2 / 10, passed, $3 }
    ' "$log" "$log.result"
  done
}

# --- The report ---------------------------------------------------------------------------------

report() {
  local files=() result first
  for first in "$work"/*.first; do
    [[ -e $first ]] || continue
    printf '\n=== Failed beside others, run again alone: %s\n' "$(basename "$first" .log.first)"
    grep -A4 -E '^(Random seed|Expected|It ended )|_spec.lua:[0-9]+: |^\[  (FAILED|ERROR) ' "$first" | grep -vE '^(--|Random seed)' | head -n 40 || true
  done
  for result in "$work"/*.result; do [[ ! -e $result ]] || files+=("$result" "${result%.result}"); done
  echo
  awk -v seed="$SEED" -v began="$began" -v now="$(date +%s)" -v late="$([[ ! -e $work/late ]] || echo 1)" '
    function finish() {
      if (file == "") return
      listed = bad
      if (code && !bad) { bad = 1; failures++ }             # it crashed, hung, was ended, or what ran it complains
      if (code) {
        printf "=== FAILED: %s (%.1f s)%s\n", file, time / 10, code == 124 ? ", which hung in: " (running ? running : "nothing that is known") : ""
        printf "%s", (listed && code != 124) ? shown outcome : (after != "" && code != 124) ? after : tail()
        print ""
      }
      file = ""
    }
    function tail(  i, text) {
      text = (n > 60) ? "...\n" : ""
      for (i = (n > 60) ? n - 59 : 1; i <= n; i++) text = text lines[i] "\n"
      return text
    }
    FILENAME ~ /result$/ {
      finish()
      file = $3; code = $1; time = $2; bad = 0; summary = 0; running = ""; shown = ""; outcome = ""; inside = ""; after = ""; n = 0; kept = 0; section = ""
      times[++files] = sprintf("%8.1f s  %s", time / 10, file)
      next
    }
    /^make(\[[0-9]+\])?: / { next }
    { lines[++n] = line = $0 }
    line ~ /^\[ RUN      \] / { running = substr(line, 14); inside = ""; next }
    line ~ /^\[( SKIPPED |       OK) *\] / && !summary { running = ""; next }
    line ~ /^\[  (FAILED|ERROR) +\] [^-]/ && !summary {
      shown = shown "--- " running "\n" inside
      running = ""; next
    }
    line ~ /^\[  PASSED  \] [0-9]+ test/ { passed += $4; summary = 1; section = ""; next }
    summary && line ~ /^\[ SKIPPED  \] [0-9]+ tests?, listed below/ { pending += $4; section = "pending"; next }
    summary && line ~ /^\[  FAILED  \] [0-9]+ test/ { failures += $4; bad = 1; section = "failed"; next }
    summary && line ~ /^\[  ERROR   \] [0-9]+ errors?, listed below/ { errors += $4; bad = 1; section = "failed"; next }
    section == "pending" && line ~ /^\[ SKIPPED/ { waiting = waiting "Pending: " substr(line, 14) "\n" }
    summary && section != "failed" && line !~ /^(\[|$)/ && ++kept <= 60 { after = after line "\n" }
    section == "failed" && line ~ /^\[/ { outcome = outcome line "\n" }
    !summary && running != "" { inside = inside line "\n" }
    !summary && running == "" && line !~ /^(\[|Note: |$)/ { shown = shown line "\n" }
    END {
      finish()
      if (waiting != "") print waiting
      print "The slowest:"
      for (i = 1; i <= files; i++) print times[i] | "sort -rn | head -n 8"
      close("sort -rn | head -n 8")
      printf "\n%d successes / %d failures / %d errors / %d pending : %d files, %d s, SEED=%d\n", passed, failures, errors, pending, files, now - began, seed
      exit failures + errors > 0 || (passed == 0 && !late)
    }' "${files[@]:-/dev/null}"
}

# --- All lanes ----------------------------------------------------------------------------------

if [[ ${1:-} == --lane ]]; then work=$2; lane "${@:3}"; exit; fi
(($#)) || { sed -n 's/^#   suite\.sh/usage: suite.sh/p' "$self" >&2; exit 2; }

work=$(mktemp -d "${TMPDIR:-/tmp}/hierlock-XXXXXX")
began=$(date +%s) lanes=() status=0
finish() {
  status=$?
  trap '' INT TERM HUP
  : >"$work/ended"
  ((!${#lanes[@]})) || kill -s TERM "${lanes[@]}" 2>/dev/null || true
  wait
  rm -rf "$work"
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT; trap 'exit 143' TERM; trap 'exit 129' HUP

in_parts "$@" | in_order >"$work/all"
grep -Ev "$exact" "$work/all" | grep -Ev "$light" >"$work/queue" || true
grep -Ev "$exact" "$work/all" | grep -E "$light" >"$work/light" || true
grep -E "$exact" "$work/all" >"$work/exact" || true
: >"$work/alone"
for lua in $(printf '%s\n' "$@" | sed -n 's/:.*\.lua$//p' | sort -u); do
  "${make[@]}" spec-built "LUA=$lua" >&2
  "${make[@]}" says-spec "LUA=$lua" >"$work/spec-$(basename "$lua")"
done
count=$(wc -l <"$work/all")
echo "$count" >"$work/count"
more=$(nproc)
[[ ! ${MYSQL_DSN:-} ]] || LANES=1 more=0
((LANES <= count)) || LANES=$count
((LANES > 1 && more <= $(wc -l <"$work/light"))) || more=0
echo "$# files, in $count parts and $((LANES + more)) lanes, SEED=$SEED; first the servers of each lane start"
for ((i = 1; i <= LANES + more; i++)); do
  lane=("$self" --lane "$work")
  if ((i > LANES)); then lane+=(light); else lane+=("$i"); fi
  if ((i <= LANES)) && [[ ! ${MYSQL_DSN:-} ]]; then lane=(spec/support/servers.sh run "$work/$i" -- "${lane[@]}"); fi
  "${lane[@]}" 2>"$work/lane$i" &
  lanes+=($!)
done
for i in "${!lanes[@]}"; do
  wait "${lanes[i]}" || { status=$?; echo "=== FAILED: lane $((i + 1)), which ended with $status"; tail -n 14 "$work/lane$((i + 1))"; status=1; }
done
lanes=()
cat "$work/light" "$work/exact" "$work/alone" >>"$work/queue"
[[ ! -s $work/queue ]] || { status=1; echo "Not run:"; cat "$work/queue"; }
remember
report || status=1
[[ ! -e $work/late ]] || sort "$work/late" | sed 's/^/Not begun, for want of time: /'
exit "$status"
