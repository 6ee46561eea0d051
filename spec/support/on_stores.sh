#!/usr/bin/env bash
#
# on_stores.sh PROGRAM SEED STORES [OPTION…]: runs PROGRAM on all the stores, side by side; each line says of
# which. PROGRAM is given a DSN, --admin=DSN on a server, and --seed=SEED. In an OPTION, {store} stands for the
# store's name, and {control} for the command that stops and starts its server. Fails when one of them does.
# The servers are those that the environment names: see servers.sh.
set -uo pipefail
program=$1 seed=$2 stores=$3 status=0 running=()
shift 3

one() {                                 # STORE [OPTION…]
  local store=$1 dsn admin=() control='' directory='' name found=0
  shift
  case $store in
    file)
      directory=$(mktemp -d /dev/shm/hierlock-stores-XXXXXX)
      dsn=file:$directory/locks ;;
    sqlite)
      directory=$(mktemp -d /dev/shm/hierlock-stores-XXXXXX)
      dsn=sqlite:$directory/leases.db ;;
    folder)
      directory=$(mktemp -d /dev/shm/hierlock-stores-XXXXXX)
      dsn=store+folder:$directory/locks ;;
    # Of three, one of which can be cut off, stopped and restarted. There it shares no lease with the store redis, and
    # no list of stores with a quorum that was killed before.
    quorum)
      directory=$(mktemp -d /dev/shm/hierlock-stores-XXXXXX)
      dsn="quorum:majority;sqlite:$directory/1;sqlite:$directory/2"
      dsn+=";${HIERLOCK_REDIS_DSN%\?*}?quarantine=3&prefix=${directory##*-}"
      control=$HIERLOCK_REDIS_CONTROL ;;
    redis)                              # it grants nothing when it has forgotten, for longer than leases last here
      dsn="${HIERLOCK_REDIS_DSN%\?*}?quarantine=3" control=$HIERLOCK_REDIS_CONTROL ;;
    memcached) dsn=$HIERLOCK_MEMCACHED_DSN control=$HIERLOCK_MEMCACHED_CONTROL ;;
    mysql | mariadb | postgresql)
      name=HIERLOCK_${store^^}_DSN dsn=${!name}
      name=HIERLOCK_${store^^}_ROOT_DSN admin=(--admin="${!name}")
      name=HIERLOCK_${store^^}_CONTROL control=${!name:-} ;;
    *) echo "on_stores.sh: no store $store" >&2; return 2 ;;
  esac
  set -- "${@//\{store\}/$store}"
  "$program" "$dsn" "${admin[@]}" --seed="$seed" "${@//\{control\}/$control}" || found=$?
  [[ ! $directory ]] || rm -rf "$directory"
  return "$found"
}

for store in $stores; do
  { one "$store" "$@" 2>&1 | sed -u "s/^/$(printf '%-11s' "$store")/"; } &
  running+=($!)
done
for pid in "${running[@]}"; do wait "$pid" || status=1; done
exit $status
