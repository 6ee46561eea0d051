#!/usr/bin/env bash
#
# Plants bugs, one at a time, and says which check finds each. A bug is a patch, in the folder of the area whose files
# it changes (of several: the first). The first lines of the patch say which promise it breaks, and after "Check:" what
# is quickest to find it:
#
#   core:TEST NAME            of spec/core/TEST.c, the tests whose names match NAME
#   [LUA] spec/FILE PATTERN   of a spec file, the specs whose titles match that pattern of Lua's
#   stress:STORE SECONDS      `make stress` on that store for so long, with a SEED of 1
#
# All happens in copies of this tree, what is not committed included, which share its objects; so a bug costs the
# building of one file or two, and its check. First the checks run without any patch, and must pass; those that use
# servers run so once more at the end, for a bug may have left something behind. A check finds a bug when it fails,
# crashes, or still runs after LIMIT seconds (60) and says where it stands. Bugs that only the core's own tests are
# for go beside those that need servers.
#
#   run.sh [--list | --table] [BUG…]     all of them unless said. --list: what they break, and runs nothing;
#                                        --table: the result as rows of docs/planted*.md, too;
#                                        --mend: carries those that do not apply any more over what has changed
#                                        and which files have moved since they did; names those it cannot carry
#
# A BUG is the name of a patch, without .patch. The last line is `N found, N not found`; anything but 0 not found, and
# a patch that does not apply, is a failure. With servers in the environment (spec/support/servers.sh) those are used.

set -euo pipefail
self=$(realpath "${BASH_SOURCE[0]}")
bugs=$(dirname "$self")
cd "$bugs/../.."
LIMIT=${LIMIT:-60} lua=${LUA:-lua5.4}
make=("${MAKE:-make}" --no-print-directory -s)
# Memory that has been freed is filled, so that its use shows.
export MALLOC_PERTURB_=165 MAKEFLAGS='' SSL_CERT_FILE=/dev/null SSL_CERT_DIR=/nonexistent

say() { printf '%s\n' "$*"; }
die() { say "planted: $*" >&2; exit 1; }
usage() { sed -n '3,/^$/s/^# \{0,1\}//p' "$self"; }
patch_of() { echo "$bugs"/*/"$1.patch"; }  # BUG: where its patch is; names are unique
promise() { sed '/^Check: /,$d' "$(patch_of "$1")"; }
checks() { sed -n 's/^Check: //p' "$(patch_of "$1")"; }
clock() { echo "${EPOCHREALTIME/[.,]/}"; }
seconds() { awk -v us="$(($(clock) - $1))" 'BEGIN { printf "%.1f", us / 1e6 }'; }

# --- One check ---------------------------------------------------------------------------------

split() {                               # CHECK: sets $with, $file and $filter
  with=$lua file=${1%% *} filter=${1#* }
  [[ $1 == core:* || $1 == spec/* || $1 == stress:* ]] || { with=$file file=${filter%% *} filter=${filter#* }; }
}

build() {                               # CHECK, in the tree where we are
  local target with file filter
  split "$1"
  target=spec-built
  [[ $file != core:* ]] || target=build/$with/${file#core:}
  [[ $file != stress:* ]] || target=build/$with/stress
  "${make[@]}" -j "$(nproc)" "LUA=$with" "$target"
}

check() {                               # CHECK: what it says goes to $log
  local with file filter status=0 command
  split "$1"
  command=("build/$with/${file#core:}" "$filter")
  [[ $file != spec/* ]] || command=(env HIERLOCK_REQUIRE='mysql mariadb postgresql redis memcached nginx php' "${make[@]}"
    spec "LUA=$with" "SPECS=$file" REPORT=--output=gtest "BUSTED_FLAGS=--filter='${filter//\'/.}'")
  [[ $file != stress:* ]] || command=("${make[@]}" suite-stress "LUA=$with" "STORE=${file#stress:}" "SECONDS=$filter" SEED=1)
  # In a process group of its own, which is ended as a whole; in the background, so that a signal to us acts at once.
  timeout --kill-after=5 "$LIMIT" "${command[@]}" </dev/null >"$log" 2>&1 &
  child=$!
  wait "$child" || status=$?
  child=''
  return "$status"
}

stood() {                               # where a check that was ended stood, or failed
  awk '/^\[ RUN      \] / { at = substr($0, 14) } /^\[       OK \] / { at = "" } END { print at }' "$log"
}

ran() {                                 # whether there was anything to run
  grep -qE '^\[=+\] (.*Running [1-9][0-9]* test|[1-9][0-9]* tests? from )|^[a-z]+ +[1-9][0-9]* intervals' "$log"
}

clean() {                               # WORD CHECK…: each must pass; WORD: for the line
  local one status start word=$1
  cd "$work/clean"
  for one in "${@:2}"; do
    status=0
    start=$(clock)
    check "$one" || status=$?
    if ((status)) || ! ran; then
      tail -n 40 "$log" >&2
      die "without a bug this check does not pass: $one"
    fi
    printf '%-10s %6s s  %-28s %s\n' "$word" "$(seconds "$start")" '' "$one"
  done
}

# --- One bug -----------------------------------------------------------------------------------

# A check that was ended may have left a server stopped, or down.
servers_up() {
  local kind control
  for kind in MYSQL MARIADB POSTGRESQL REDIS MEMCACHED; do
    control=HIERLOCK_${kind}_CONTROL
    [[ ${!control:-} ]] || continue
    # shellcheck disable=SC2086  # a command with arguments
    { kill -s CONT "$(${!control} pid)" || ${!control} start; } >/dev/null 2>&1 || true
  done
}

plant() {                               # BUG: sets $by and $took; false: nothing has found it
  local one status start tree=$work/$lane
  by='' took=''
  rm -rf "$tree"
  cp -a --reflink=auto "$work/clean" "$tree"
  cd "$tree"
  if ! patch -s -p1 -F0 --dry-run <"$(patch_of "$1")" >"$log" 2>&1; then
    cat "$log" >&2
    die "the patch $1 does not apply any more"
  fi
  patch -s -p1 -F0 <"$(patch_of "$1")"
  while read -r one; do
    build "$one" >"$log" 2>&1 || { cat "$log" >&2; die "with the patch $1 it does not build"; }
    status=0
    start=$(clock)
    check "$one" || status=$?
    took=$(seconds "$start")
    [[ ! -v HIERLOCK_MARIADB_CONTROL || $lane == alone ]] || servers_up
    # What hangs must say where.
    ((status == 0)) || [[ $status == 124 && ! $(stood) ]] || { by=$one; break; }
  done < <(checks "$1")
  [[ $by ]]
}

# --- Carried on --------------------------------------------------------------------------------

mend() {                                # BUG; false: not carried
  local patch file now commit files found='' was=$work/was with=$work/with
  patch=$(patch_of "$1")
  ! patch -s -p1 -F0 --dry-run <"$patch" >/dev/null 2>&1 || return 0
  mapfile -t files < <(sed -n 's|^+++ b/||p' "$patch")
  for commit in $(git log --format=%H -- "${files[@]}"); do
    rm -rf "$was" "$with"
    mkdir "$was"
    git archive "$commit" -- "${files[@]}" 2>/dev/null | tar -x -C "$was" 2>/dev/null || continue
    cp -a "$was" "$with"
    if patch -s -p1 -F0 -d "$with" <"$patch" >/dev/null 2>&1; then found=$commit; break; fi
  done
  [[ $found ]] || { say "$1: applies to no commit"; return 1; }
  sed '/^--- a\//,$d' "$patch" | cat -s >"$work/patch"
  for file in "${files[@]}"; do
    now=$(git diff -M --name-status --diff-filter=R "$found" | awk -F'\t' -v file="$file" '$2 == file { print $3 }')
    now=${now:-$file}
    [[ -e $now ]] || { say "$1: $file is gone"; return 1; }
    cp "$now" "$work/merged"
    git merge-file -q "$work/merged" "$was/$file" "$with/$file" || { say "$1: $now has changed there"; return 1; }
    diff -u --label "a/$now" --label "b/$now" "$now" "$work/merged" >>"$work/patch" || true
  done
  cp "$work/patch" "$patch"
  say "$1: carried on"
}

# --- All of them -------------------------------------------------------------------------------

copy() {                                # this tree, with the objects that it has, to $work/clean
  local kept
  mkdir "$work/clean"
  git ls-files -z --cached --others --exclude-standard | xargs -0 cp -a --parents --target-directory="$work/clean"
  for kept in build/"$lua" build/luajit; do
    [[ ! -d $kept/obj ]] || { mkdir -p "$work/clean/build" && cp -a "$kept" "$work/clean/build"; }
  done
}

all_checks() { for bug; do checks "$bug"; done | sort -u; }

# Those of BUG… that need servers (yes), or none (no). Some of the core's own tests use those that the environment names.
serving() {
  local bug using
  using=$(grep -l 'HIERLOCK_[A-Z]*_DSN' spec/core/test_*.c | sed 's|.*/\(.*\)\.c|\1|' | paste -s -d '|')
  for bug in "${@:2}"; do
    if checks "$bug" | grep -Eqv '^(core:|stress:(file|sqlite) )' || checks "$bug" | grep -Eq "^core:($using) "; then echo "yes $bug"; else echo "no $bug"; fi
  done | sed -n "s/^$1 //p"
}

lane() {                                # NAME BUG…
  local bug distinct
  lane=$1 log=$work/$1.log child=''
  trap '[[ ! $child ]] || kill "$child" || true' EXIT
  trap 'exit 143' TERM
  shift
  mapfile -t distinct < <(all_checks "$@")
  clean passes "${distinct[@]}"
  for bug; do
    if plant "$bug"; then
      printf 'found      %6s s  %-28s %s\n' "$took" "$bug" "$by"
      row "$bug" "$by" "$took"
    else
      printf 'NOT FOUND  %6s s  %-28s %s\n' "$took" "$bug" "$(checks "$bug" | paste -s -d ';')"
      row "$bug" 'NOT FOUND' "$took"
    fi
  done
  [[ $lane != served ]] || clean passes "${distinct[@]}"
}

all() {                                 # BUG…
  local bug one number status=0 found missed began alone served distinct
  began=$(date +%s)
  log=$work/log
  mapfile -t alone < <(serving no "$@")
  mapfile -t served < <(serving yes "$@")
  mapfile -t distinct < <(all_checks "$@")
  copy
  cd "$work/clean"
  for one in "${distinct[@]}"; do
    build "$one" >"$log" 2>&1 || { cat "$log" >&2; die "it does not build"; }
  done
  echo "$# bugs; first their ${#distinct[@]} checks without any"
  : >"$work/rows"
  ((!${#alone[@]})) || { lane alone "${alone[@]}" & lanes+=($!); }
  ((!${#served[@]})) || { lane served "${served[@]}" & lanes+=($!); }
  for number in "${!lanes[@]}"; do
    wait "${lanes[number]}" || status=1
    unset "lanes[number]"
    # One that has failed fails all.
    ((!status || !${#lanes[@]})) || { kill "${lanes[@]}"; wait; break; }
  done
  [[ ! $table ]] || { echo; sort "$work/rows"; }
  found=$(grep -vc 'NOT FOUND' "$work/rows" || true)
  missed=$(($# - found))
  printf '\n%d found, %d not found : %d s\n' "$found" "$missed" "$(($(date +%s) - began))"
  ((status == 0 && missed == 0))
}

row() {                                 # BUG CHECK SECONDS
  local text
  text=$(promise "$1" | paste -s -d ' ')
  # shellcheck disable=SC2016  # Markdown
  printf '| `%s` | %s | `%s` | %s |\n' "$1" "${text% }" "$2" "$3" >>"$work/rows"
}

table='' list='' mend=''
while [[ ${1:-} == -* ]]; do
  case $1 in
    --help) usage; exit ;;
    --list) list=1 ;;
    --table) table=1 ;;
    --mend) mend=1 ;;
    *) usage >&2; exit 2 ;;
  esac
  shift
done
if ((!$#)); then
  for bug in "$bugs"/*/*.patch; do set -- "$@" "$(basename "$bug" .patch)"; done
fi
for bug; do
  [[ -e $(patch_of "$bug") ]] || die "there is no bug $bug; see --list"
  [[ $(checks "$bug") ]] || die "no check is named in $(patch_of "$bug")"
done
if [[ $list ]]; then
  for bug; do printf '%s\n' "$bug"; { promise "$bug"; checks "$bug"; } | sed 's/^./    &/'; done
  exit
fi

# Servers only where a check needs them, and once for all.
if [[ ! $mend && ! ${HIERLOCK_MARIADB_DSN:-} && $(serving yes "$@") ]]; then
  directory=$(mktemp -d "${TMPDIR:-/tmp}/hierlock-XXXXXX")
  trap 'rm -rf "$directory"' EXIT
  spec/support/servers.sh run "$directory" -- "$self" ${table:+--table} "$@"
  exit
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/hierlock-XXXXXX") lanes=()
finish() {
  trap '' INT TERM HUP
  ((!${#lanes[@]})) || kill "${lanes[@]}" 2>/dev/null || true
  wait
  cd / && rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT; trap 'exit 143' TERM; trap 'exit 129' HUP
if [[ $mend ]]; then
  status=0
  for bug; do mend "$bug" || status=1; done
  exit "$status"
fi
all "$@"
