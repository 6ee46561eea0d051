#!/usr/bin/env bash
#
# Throw-away redis and PostgreSQL servers for the bench, as far as the machine has the programs:
#
#   servers.sh COMMAND…      start them, run COMMAND, always stop them and discard their data
#
# COMMAND is told by BENCH_REDIS (a socket), BENCH_POSTGRESQL (the directory of a socket), and
# BENCH_REDIS_PID, BENCH_REDIS_VERSION and so on; those of a server that could not be are not set. The
# servers listen on no port, only on a socket in a directory that nobody else may enter. This script
# must never touch a server that it did not start, install a package, or leave a process behind:
# should it be killed outright, the kernel tells the servers to end, and only files stay.

set -euo pipefail
unset "${!BENCH_REDIS@}" "${!BENCH_POSTGRESQL@}"
dir=$(mktemp -d /tmp/hierlock-bench-XXXXXX)
pids=() child=''

say() { echo "bench/servers.sh: $*" >&2; }
failed() { tail -n 30 "$dir/$1.log" >&2; say "$1 does not come up"; exit 1; }

# shellcheck disable=SC2317  # called by the trap
end() {                                 # SIGNAL PID…: returns when they have ended
  local pid
  for pid in "${@:2}"; do kill -s "$1" "$pid" || true; done
  for pid in "${@:2}"; do
    timeout 10 tail --pid="$pid" -s 0.05 -f /dev/null || kill -s KILL "$pid" || true
  done
}

# shellcheck disable=SC2317
finish() {
  local status=$?
  trap '' INT TERM HUP
  [[ ! $child ]] || end TERM "$child"
  end INT "${pids[@]}"
  rm -rf "$dir"
  exit "$status"
} 2>/dev/null
trap finish EXIT
trap 'exit 130' INT; trap 'exit 143' TERM; trap 'exit 129' HUP

# NAME SERVER… -- QUESTION…: starts it, by setpriv; returns when it answers. Sets $pid.
launch() {
  local name=$1 server=() deadline=$((SECONDS + 30))
  while shift; [[ $1 != -- ]]; do server+=("$1"); done
  shift
  setsid env --chdir="$dir/$name" setpriv "${server[@]}" </dev/null >>"$dir/$name.log" 2>&1 &
  pid=$!
  pids+=("$pid")
  until "$@" >/dev/null 2>&1; do
    if ! kill -s 0 "$pid" 2>/dev/null || ((SECONDS > deadline)); then failed "$name"; fi
    sleep 0.05
  done
}

redis() {
  mkdir -m 0700 "$dir/redis"
  launch redis --pdeathsig=INT redis-server --port 0 --unixsocket "$dir/redis/sock" --save '' --appendonly no -- \
    redis-cli -s "$dir/redis/sock" ping
  version=$(redis-server --version)     # Redis server v=7.0.15 sha=…
  version=${version#*v=}
  export BENCH_REDIS=$dir/redis/sock BENCH_REDIS_PID=$pid BENCH_REDIS_VERSION=${version%% *}
}

postgresql() {                          # AS…: setpriv's options
  local home=$dir/postgresql
  env --chdir="$home" setpriv "$@" "$programs/initdb" --no-sync --auth=trust --username=bench \
    --encoding=UTF8 --locale=C "$home/data" >"$home.log" 2>&1 || failed postgresql
  launch postgresql "$@" --pdeathsig=INT "$programs/postgres" -D "$home/data" -k "$home" \
    -c listen_addresses='' -c unix_socket_permissions=0700 -- "$programs/pg_isready" -h "$home"
  version=$("$programs/postgres" --version)   # postgres (PostgreSQL) 15.20 (…
  version=${version#*) }
  export BENCH_POSTGRESQL=$home BENCH_POSTGRESQL_PID=$pid BENCH_POSTGRESQL_VERSION=${version%% *}
}

run() {                                 # COMMAND…: in the background, so that traps act at once
  local status=0
  env --default-signal=INT,QUIT "$@" <&0 &
  child=$!
  wait "$child" || status=$?
  child=''
  exit "$status"
}

! command -v redis-server >/dev/null || redis

# Debian keeps PostgreSQL's programs from PATH. It refuses to run as root: then it runs as the user
# that its package has made.
programs=$(compgen -G '/usr/lib/postgresql/*/bin/initdb' | sort -V | tail -n 1) ||
  programs=$(command -v initdb) || true
programs=${programs%/initdb}
if [[ $programs ]]; then
  mkdir -m 0700 "$dir/postgresql"
  if ((EUID != 0)); then
    postgresql
  elif id postgres >/dev/null 2>&1; then
    chmod 0711 "$dir"
    chown postgres: "$dir/postgresql"
    postgresql --reuid=postgres --regid=postgres --clear-groups
  fi
fi

run "$@"
