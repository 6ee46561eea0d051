#!/usr/bin/env bash
#
# Checks the models in this directory with spin, and shows that each of them can fail: every planted bug
# must break the claim that stands beside it. Prints for each run how many states were looked at, and how
# long that took. MODEL=claims: that model only; LANES: how many runs at a time. UNTIL: a time (as of `date +%s`)
# after which no further run begins; then the runs come in random order, and those not begun are named.
#
#   run.sh check LINE    one line of the table below

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
self=$PWD/run.sh

# A model with the options of a scenario; the claim that must hold there, or, after "fails", the one that
# the planted bug must break. A name with a small letter first is a formula, checked with weak fairness.
table() {
  cat <<'RUNS'
acquire  CLIENTS=3 CALLS=1                        | EXCLUSION TRUTH NO_CIRCLE NO_ORPHAN ALL_END
acquire  CALLS=2 EXTENDS=1                        | EXCLUSION TRUTH NO_CIRCLE NO_ORPHAN ALL_END
acquire  CALLS=1 CANCELS=1 TIMEOUTS=1 EXTENDS=1   | EXCLUSION TRUTH NO_CIRCLE NO_ORPHAN ALL_END
acquire  CALLS=1 CANCELS=1 STAYS=1                | EXCLUSION TRUTH NO_CIRCLE NO_ORPHAN ALL_END
acquire  CALLS=1 CANCELS=1 RESTARTS=1 FEW_PLANS   | EXCLUSION TRUTH NO_INNOCENT NO_ORPHAN ALL_END
acquire  CALLS=2 KILLS=1 TIMEOUTS=1               | EXCLUSION TRUTH NO_CIRCLE NO_ORPHAN ALL_END
acquire  CALLS=2 BUG_UNSETTLED                    | fails EXCLUSION TRUTH
acquire  CALLS=2 BUG_ORDER                        | fails NO_CIRCLE
acquire  CALLS=1 CANCELS=1 STAYS=1 BUG_NO_KILL    | fails NO_ORPHAN
acquire  CALLS=1 CANCELS=1 RESTARTS=1 BUG_KILL_LIFE | fails NO_INNOCENT
acquire  CALLS=1 TIMEOUTS=1 STAYS=1 BUG_NO_ROLLBACK | fails NO_ORPHAN
acquire  CALLS=2 EXTENDS=1 BUG_VICTIM             | fails EXCLUSION TRUTH
lease                                             | BELIEF_FIRST EXCLUSION
lease    PROMPT                                   | RENEWED
lease    LEASE=3 DEATH LTL                        | vanished
lease    BUG_FROM_ANSWER                          | fails BELIEF_FIRST EXCLUSION
lease    BUG_ASKED_TWICE                          | fails BELIEF_FIRST EXCLUSION
lease    BUG_RELEASE_UNSETTLED                    | fails BELIEF_FIRST EXCLUSION
lease    BUG_EXTEND_ANSWER                        | fails BELIEF_FIRST EXCLUSION
lease    PROMPT BUG_RENEW_LATE                    | fails RENEWED
lease    PROMPT BUG_EXTEND_SILENT                 | fails RENEWED
line                                              | ONCE NO_ORPHAN
line     PENDINGS=2 TROUBLE CLOSE                 | ONCE NO_ORPHAN
line     LTL                                      | not_forgotten
line     FAILS=2 LTL                              | not_forgotten
line     STUCK LTL                                | not_forgotten
line     PENDINGS=2 TROUBLE BUG_FORGOTTEN         | fails NO_ORPHAN
line     PENDINGS=2 TROUBLE BUG_TWICE             | fails ONCE
line     LTL BUG_UNSENT                           | fails not_forgotten
line     FAILS=2 LTL BUG_SHORT_UNSEEN             | fails not_forgotten
records  CALLS=2                                  | EXCLUSION PRESENCE UNBROKEN GATE
records  CLIENTS=3 CALLS=1 ROLES                  | EXCLUSION PRESENCE UNBROKEN GATE
records  CALLS=2 ROLES TTL=3 REFRESHES=2          | EXCLUSION PRESENCE UNBROKEN GATE
records  CALLS=1 ROLES CONVERTS LOSSES=1          | EXCLUSION PRESENCE UNBROKEN GATE NO_GHOST
records  CALLS=2 ROLES EXPORTS                    | EXCLUSION PRESENCE UNBROKEN GATE
records  CALLS=2 ROLES EXPORTS REFRESHES=0 LOSSES=1 | EXCLUSION PRESENCE UNBROKEN GATE NO_GHOST
records  CALLS=2 ROLES REVOKES                    | EXCLUSION PRESENCE UNBROKEN GATE
records  CALLS=1 DEATH LTL                        | served
records  CALLS=1 ROLES LOSSES=1 REFRESHES=2 SHORTER | EXCLUSION PRESENCE UNBROKEN GATE NO_GHOST
records  CALLS=1 ROLES LOSSES=2 KILL_FAILS TWICE | EXCLUSION PRESENCE UNBROKEN GATE
records  CALLS=1 ROLES LOSSES=1 REFRESHES=2 SHORTER BUG_LATE_REFRESH | fails EXCLUSION
records  CALLS=1 ROLES LOSSES=1 KILL_FAILS BUG_SAME_NAME | fails UNBROKEN
records  CALLS=1 ROLES LOSSES=2 TWICE BUG_SAME_NAME | fails EXCLUSION
records  CALLS=2 BUG_SKIPPED                      | fails PRESENCE
records  CALLS=2 BUG_GATE_FIRST                   | fails PRESENCE
records  CALLS=2 BUG_GATE_UNOPENED                | fails GATE
records  CALLS=2 BUG_NO_SHARE                     | fails GATE
records  CALLS=2 BUG_LOOK_FIRST                   | fails GATE
records  CALLS=1 BUG_NO_LOOK                      | fails PRESENCE
records  CALLS=1 BUG_DELETE_BLIND                 | fails EXCLUSION
records  CALLS=1 BUG_DELETE_NO_WAIT               | fails PRESENCE
records  CALLS=1 BUG_FROM_ANSWER                  | fails EXCLUSION
records  CALLS=1 BUG_RECREATE                     | fails PRESENCE
records  CALLS=1 REFRESHES=2 LOSSES=1 SHORTER BUG_NO_DOUBT | fails EXCLUSION
records  CALLS=1 CONVERTS BUG_CONVERT_BELIEVED    | fails EXCLUSION
records  CALLS=1 LOSSES=1 BUG_NO_KILL             | fails NO_GHOST
records  CALLS=1 ROLES LOSSES=1 BUG_NO_RECALL     | fails NO_GHOST
records  CALLS=2 ROLES EXPORTS BUG_IMPORT_SILENT  | fails EXCLUSION
records  CALLS=2 ROLES EXPORTS REFRESHES=0 LOSSES=1 BUG_ONE_HOLDER | fails EXCLUSION
records  CALLS=1 ROLES DEATH BUG_NOT_DELETED LTL  | fails served
claims   PROGRAMS=2                               | EXCLUSION IN_ORDER KEPT MENDED AWAKE
claims   ROUNDS=1                                 | EXCLUSION IN_ORDER KEPT MENDED AWAKE
claims   PROGRAMS=2 SLEEP                         | EXCLUSION IN_ORDER KEPT MENDED AWAKE
claims   PROGRAMS=2 LATE                          | EXCLUSION IN_ORDER KEPT MENDED AWAKE
claims   PROGRAMS=2 UPGRADE                       | EXCLUSION IN_ORDER KEPT MENDED AWAKE
claims   PROGRAMS=2 INTENTIONS                    | EXCLUSION IN_ORDER KEPT MENDED AWAKE
claims   ROUNDS=1 INTENTIONS                      | EXCLUSION IN_ORDER KEPT MENDED AWAKE
claims   PROGRAMS=2 UPGRADE INTENTIONS            | EXCLUSION IN_ORDER KEPT MENDED AWAKE
claims   PROGRAMS=2 DEATHS=1 MENDERS=1 ROUNDS=1 INTENTIONS | EXCLUSION IN_ORDER KEPT MENDED AWAKE
claims   PROGRAMS=2 TWO                           | EXCLUSION IN_ORDER KEPT MENDED AWAKE
claims   PROGRAMS=2 DEATHS=1 MENDERS=1 ROUNDS=1   | EXCLUSION IN_ORDER KEPT MENDED AWAKE
claims   PROGRAMS=2 DEATHS=1 MENDERS=1 ROUNDS=1 UPGRADE | EXCLUSION IN_ORDER KEPT MENDED AWAKE
claims   PROGRAMS=2 DEATHS=1 MENDERS=1 ROUNDS=1 LATE | EXCLUSION IN_ORDER KEPT MENDED AWAKE
claims   PROGRAMS=2 DEATHS=1 MENDERS=1 ROUNDS=1 FEW PARTS=2 | EXCLUSION IN_ORDER KEPT MENDED AWAKE
claims   PROGRAMS=3 DEATHS=1 MENDERS=1 ROUNDS=1 FEW | EXCLUSION IN_ORDER KEPT MENDED AWAKE
claims   PROGRAMS=2 DEATHS=1 MENDERS=2 ROUNDS=1 FEW REUSE | EXCLUSION IN_ORDER KEPT MENDED AWAKE
claims   PROGRAMS=2 DEATHS=2 MENDERS=2 ROUNDS=1 FEW SUCCESSOR | EXCLUSION IN_ORDER KEPT MENDED AWAKE
claims   PROGRAMS=2 LTL                           | granted0
claims   PROGRAMS=2 UPGRADE LTL                   | granted1
claims   PROGRAMS=2 DEATHS=1 MENDERS=1 ROUNDS=1 FEW LTL | granted1
claims   ROUNDS=1 BUG_GRANT_BLIND                 | fails EXCLUSION
claims   ROUNDS=1 INTENTIONS BUG_TABLE            | fails EXCLUSION
claims   PROGRAMS=2 DEATHS=1 MENDERS=1 ROUNDS=1 INTENTIONS BUG_REBUILD_MODE | fails MENDED
claims   ROUNDS=1 BUG_FREE_LATE                   | fails EXCLUSION
claims   ROUNDS=1 BUG_PASS                        | fails IN_ORDER
claims   ROUNDS=1 BUG_WAKE_FIRST                  | fails AWAKE
claims   PROGRAMS=2 SLEEP BUG_UNLOCK_APART        | fails AWAKE
claims   PROGRAMS=2 LATE ROUNDS=1 TIMEOUTS=0 BUG_NO_LOOK | fails AWAKE
claims   PROGRAMS=2 DEATHS=1 MENDERS=1 ROUNDS=1 BUG_NO_REBUILD | fails MENDED
claims   PROGRAMS=2 DEATHS=1 MENDERS=1 ROUNDS=1 BUG_NO_POLL | fails AWAKE
claims   PROGRAMS=3 DEATHS=1 MENDERS=1 ROUNDS=1 FEW BUG_REBUILD_ORDER | fails IN_ORDER
claims   PROGRAMS=2 DEATHS=1 MENDERS=1 ROUNDS=1 FEW PARTS=2 BUG_APART | fails MENDED
claims   PROGRAMS=2 DEATHS=1 MENDERS=1 ROUNDS=1 UPGRADE BUG_HELD_FIRST | fails EXCLUSION
claims   PROGRAMS=2 DEATHS=1 MENDERS=2 ROUNDS=1 FEW REUSE BUG_TWO_MENDERS | fails KEPT
claims   PROGRAMS=2 DEATHS=1 MENDERS=2 ROUNDS=1 FEW REUSE BUG_REUSED | fails KEPT
claims   PROGRAMS=2 DEATHS=1 MENDERS=2 ROUNDS=1 FEW REUSE BUG_OPEN_UNGUARDED | fails KEPT
claims   PROGRAMS=2 DEATHS=2 MENDERS=2 ROUNDS=1 FEW SUCCESSOR BUG_MENDS_ONE | fails AWAKE
leased   CALLS=1 REFRESHES=2                      | EXCLUSION WHOLE KEPT AWAKE
leased   CALLS=2 REFRESHES=0                      | EXCLUSION WHOLE KEPT AWAKE
leased   CALLS=1 REVOKES=1                        | EXCLUSION WHOLE KEPT AWAKE
leased   CALLS=1 REFRESHES=0 DEATHS=1             | EXCLUSION WHOLE KEPT AWAKE
leased   CALLS=1 REFRESHES=0 DEATHS=1 RESTARTS=1  | EXCLUSION WHOLE KEPT AWAKE
leased   CALLS=1 BUG_EXPIRY_STORED                | fails EXCLUSION
leased   CALLS=1 BUG_BACK_FIRST                   | fails EXCLUSION
leased   CALLS=1 REVOKES=1 BUG_SAME_END           | fails EXCLUSION
leased   CALLS=2 REFRESHES=0 BUG_SAME_USED        | fails WHOLE
leased   CALLS=1 DEATHS=1 BUG_END_EARLY           | fails WHOLE
leased   CALLS=1 REFRESHES=0 DEATHS=1 BUG_END_FIRST | fails WHOLE
leased   CALLS=1 REFRESHES=0 DEATHS=1 BUG_CHAIN   | fails WHOLE
leased   CALLS=1 REFRESHES=0 DEATHS=1 BUG_RESERVED_FREED | fails KEPT
leased   CALLS=1 REFRESHES=0 DEATHS=1 BUG_OWNED   | fails AWAKE
update   CALLS=2                                  | EXCLUSION AWAKE
update   PROGRAMS=4                               | EXCLUSION AWAKE
update   BUG_BEHIND                               | fails AWAKE
update   BUG_KEEPS_ALL                            | fails AWAKE
update   BUG_KEEPS_NODE                           | fails AWAKE
update   BUG_NOT_LOOKED                           | fails EXCLUSION
RUNS
}

check() {
  if [[ ${UNTIL:-} ]] && ((EPOCHSECONDS >= UNTIL)); then
    echo "Not begun, for want of time: ${1%%|*}"
    return
  fi
  local options claims formula='' option flags=() expected=holds
  read -r model options <<<"${1%%|*}"
  claims=${1#*| }
  [[ $claims != fails* ]] || { expected=fails; claims=${claims#fails }; }
  [[ $claims == [A-Z]* ]] || formula=$claims
  directory=$(mktemp -d)
  trap 'rm -rf "$directory"' EXIT
  for option in $options; do flags+=("-D$option"); done
  [[ -z $formula ]] || flags+=(-DLTL)
  cp "$model.pml" "$directory" && cd "$directory"
  spin "${flags[@]}" -a "$model.pml" >spin.out 2>&1 || { cat spin.out; echo "FAILED  $1"; return 1; }
  # Planted bugs are found soon: there the compiler would take the most time.
  local limits=(-w -O1 -DMEMLIM=1800) found=nothing ok=FAILED
  [[ $expected == holds ]] || limits+=(-O0)
  if [[ $formula ]]; then
    cc "${limits[@]}" -DNFAIR=3 -o pan pan.c && { ./pan -a -f -m4000000 -N "$formula" >out 2>&1 || true; }
  else
    cc "${limits[@]}" -DSAFETY -o pan pan.c && { ./pan -m4000000 >out 2>&1 || true; }
  fi
  if grep -q 'acceptance cycle' out; then found=$formula
  elif grep -q 'invalid end state (' out; then found=AWAKE
  elif grep -q 'assertion violated' out; then
    found=$(sed -n 's/^pan:1: assertion violated.*CLAIM_\([A-Z_]*\).*/\1/p' out)
  elif ! grep -q 'errors: 0' out || grep -qE 'max search depth too small|not completed|out of memory|reached -DMEMLIM' out; then
    found=unfinished
  fi
  if [[ $expected == holds && $found == nothing ]]; then ok=ok
  elif [[ $expected == fails && " $claims " == *" $found "* ]]; then ok=ok; fi
  local states seconds
  states=$(sed -n 's/^ *\([0-9]*\) states, stored.*/\1/p' out)
  seconds=$(sed -n 's/.*elapsed time \([0-9.]*\) seconds.*/\1/p' out)
  if [[ $expected == holds ]]; then
    printf '%-6s %-8s %-56s %9s states %6s s  %s\n' "$ok" "$model" "$options" "$states" "$seconds" "$claims"
  else
    printf '%-6s %-8s %-56s %9s states %6s s  breaks %s\n' "$ok" "$model" "$options" "$states" "$seconds" "$found"
  fi
  [[ $ok == ok ]] || { echo "  expected: $1"; grep -E '^pan:|errors:' out | head -5; return 1; }
}

if [[ ${1:-} == check ]]; then
  check "$2"
  exit
fi

begun=$SECONDS
log=$(mktemp)
trap 'rm -f "$log"' EXIT
total=$(table | grep -c "^${MODEL:-}")
if [[ ${UNTIL:-} ]]; then order=(shuf); else order=(cat); fi
table | grep "^${MODEL:-}" | "${order[@]}" | tr '\n' '\0' |
  xargs -0 -P "${LANES:-$(nproc)}" -I LINE "$self" check LINE | tee "$log" || true
passed=$(grep -c '^ok ' "$log") || true
late=$(grep -c '^Not begun' "$log") || true
echo "$passed successes / $((total - passed - late)) failures / 0 errors / 0 pending : $((SECONDS - begun)) seconds"
((passed + late == total))
