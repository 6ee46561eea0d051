#!/usr/bin/env bash
#
# run.sh PROGRAM SEED STORES [OPTION…]: soak runs on all the stores, side by side; each line says
# of which. Fails when one of them does.
set -uo pipefail
program=$1 seed=$2 stores=$3 status=0 running=()
shift 3

one() {                                 # STORE [OPTION…]
  local store=$1 directory found=0
  shift
  case $store in
    file)
      directory=$(mktemp -d /dev/shm/hierlock-soak-XXXXXX)
      "$program" "file:$directory/locks" --seed="$seed" "$@" || found=$?
      rm -rf "$directory"
      return "$found" ;;
    mysql) "$program" "$HIERLOCK_MYSQL_DSN" --admin="$HIERLOCK_MYSQL_ROOT_DSN" --seed="$seed" "$@" ;;
    mariadb) "$program" "$HIERLOCK_MARIADB_DSN" --admin="$HIERLOCK_MARIADB_ROOT_DSN" --seed="$seed" "$@" ;;
    *) echo "run.sh: no store $store" >&2; return 2 ;;
  esac
}

for store in $stores; do
  { one "$store" "$@" 2>&1 | sed -u "s/^/$(printf '%-8s' "$store")/"; } &
  running+=($!)
done
for pid in "${running[@]}"; do wait "$pid" || status=1; done
exit $status
