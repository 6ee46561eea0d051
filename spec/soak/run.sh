#!/usr/bin/env bash
#
# run.sh PROGRAM SEED STORES [OPTION…]: a soak run on each store, one after the other, all of them
# whatever one finds.
set -uo pipefail
program=$1 seed=$2 stores=$3 status=0
shift 3
for store in $stores; do
  case $store in
    file)
      directory=$(mktemp -d /dev/shm/hierlock-soak-XXXXXX)
      "$program" "file:$directory/locks" --seed="$seed" "$@" || status=1
      rm -rf "$directory" ;;
    mysql) "$program" "$HIERLOCK_MYSQL_DSN" --admin="$HIERLOCK_MYSQL_ROOT_DSN" --seed="$seed" "$@" || status=1 ;;
    mariadb) "$program" "$HIERLOCK_MARIADB_DSN" --admin="$HIERLOCK_MARIADB_ROOT_DSN" --seed="$seed" "$@" || status=1 ;;
    *) echo "run.sh: no store $store" >&2; exit 2 ;;
  esac
done
exit $status
