#!/usr/bin/env bash
#
# Throw-away MySQL, MariaDB, PostgreSQL, Redis and Memcached servers for the test suite, on loopback ports that are free at the
# time.  Everything of a server (data, log, socket, certificates) lives below DIR; what is slow to
# make (MySQL's files, initialised data directories) is kept in HIERLOCK_CACHE, by default
# ~/.cache/hierlock.  This script must never touch a server that it did not start, listen on
# anything but 127.0.0.1, leave a mount or a process behind, or install a package unless called as
# "install".  The servers trade durability for speed and have well-known passwords: they are for
# tests and for nothing else.
#
#   servers.sh start DIR [KIND…]                   start them (default: all that there are) and write DIR/env
#   servers.sh stop DIR [KIND…]                    stop them and discard their data; the logs stay
#   servers.sh run DIR [KIND…] -- COMMAND…         start, run COMMAND with DIR/env, always stop
#   servers.sh restart DIR KIND                    stop and start one: same port, same data
#   servers.sh kill DIR KIND                       SIGKILL, as a crash
#   servers.sh start-again DIR KIND                start a stopped or killed one: same port and data
#   servers.sh control DIR KIND stop|start|restart|kill|pid      as one command
#   servers.sh install                             get what is missing: packages, MySQL's files
#   servers.sh missing                             say which packages these are
#
# KIND: mysql, mariadb, postgresql, redis, memcached. The last three are left out by default where they are not installed.
# HIERLOCK_SERVER_OPTIONS: more options for a server that is started, without spaces inside them.
# HIERLOCK_REDIS_SERVER: what is started as redis; valkey-server, say.
#
# MySQL is in Debian unstable only, so it runs chrooted in a small private root of that, made by root.sh.
# DIR is bind-mounted on that root's /srv in a mount namespace of the server's own, gone with it.
#
# PostgreSQL does not run as root. Called by root, it runs as the user postgres, who may also read what is root's:
# DIR is below directories that are closed to others.

set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
# Specs call this hundreds of times: what leads to the command itself starts no other program.
absolute() { [[ $1 == /* ]] && path=$1 || path=$PWD/$1; }
absolute "${BASH_SOURCE[0]}"; self=$path
absolute "${HIERLOCK_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hierlock}"; cache=$path
root=$cache/mysql-sid
roots=${self%/*}/root.sh grants=${self%/*}/grants.sql
guard='' child='' up='' fresh='' silent='' redis=${HIERLOCK_REDIS_SERVER:-redis-server}
pg_bin='' pg_as=() newest=0
for each in /usr/lib/postgresql/*/bin; do
  version=${each#/usr/lib/postgresql/} version=${version%%[./]*}
  if [[ -x $each/postgres ]] && ((version > newest)); then pg_bin=$each newest=$version; fi
done
if ((EUID == 0)); then
  pg_as=(setpriv --reuid=postgres --regid=postgres --clear-groups --inh-caps=+dac_read_search
    --ambient-caps=+dac_read_search)
fi
as=() enter=(unshare --mount)
((EUID == 0)) || as=(sudo) enter=(unshare --user --map-root-user --mount)
# shellcheck disable=SC2016  # expanded by the inner shell
enter+=(sh -ec 'mount --rbind "$1" "$2/srv"; shift; exec chroot "$@"' sh)

say() { echo "servers.sh: $*" >&2; }
die() { say "$*"; exit 1; }
failed() { tail -n 30 "$dir/$1/log" >&2; die "$1 does not come up; its log is $dir/$1/log"; }
need() { command -v "$1" >/dev/null || die "$1 is missing; get it by: $self install"; }
usage() { sed -n 's/^#   servers\.sh/usage: servers.sh/p' "$self" >&2; exit 2; }
in_root() { "${enter[@]}" "$1" "$root" "${@:2}"; }
get_root() { "$roots" make mysql sid mysql-server-core mysql-client-core; }
locked() (mkdir -p "$cache"; exec 9>"$cache/lock"; flock 9; "$@")

# --- What is cached: made under the lock and under another name, so never there by halves --------

initialise() {                          # KIND HOME: makes HOME/data
  cat - "$grants" >"$2/setup.sql" <<'SQL'
FLUSH PRIVILEGES;
ALTER USER root@localhost IDENTIFIED BY 'rootpassword';
CREATE USER root@'127.0.0.1' IDENTIFIED BY 'rootpassword';
GRANT ALL ON *.* TO root@'127.0.0.1' WITH GRANT OPTION;
CREATE DATABASE mgl_test;
CREATE USER testuser@'%' IDENTIFIED BY 'testpassword';
GRANT ALL ON mgl_test.* TO testuser@'%';
SQL
  if [[ $1 == postgresql ]]; then
    mkdir -m 700 "$2/data"
    ((EUID)) || chown postgres: "$2/data"
    echo rootpassword >"$2/password"
    "${pg_as[@]}" "$pg_bin/initdb" --pgdata="$2/data" --username=root --pwfile="$2/password" --auth=scram-sha-256 \
      --encoding=UTF8 --locale=C.UTF-8 --wal-segsize=1 --no-sync
    # Proxies of tests connect from other addresses of this machine.
    sed -i 's|127.0.0.1/32|127.0.0.0/8 |' "$2/data/pg_hba.conf"
    # A connection for each lock that is held or waited for, and room for the locks of a large request. In the file, so
    # that ALTER SYSTEM changes it: what the command line sets it does not.
    cat >>"$2/data/postgresql.conf" <<'CONF'
max_connections = 500
shared_buffers = 16MB
max_wal_size = 64MB
fsync = off
full_page_writes = off
autovacuum = off
log_min_messages = log
CONF
    # The same passwords, but hashed once instead of 4,096 times: each log-in costs a client 7 ms of a processor less.
    "${pg_as[@]}" "$pg_bin/postgres" --single -D "$2/data" -F postgres <<'SQL'
CREATE ROLE testuser LOGIN PASSWORD 'SCRAM-SHA-256$1:aGllcmxvY2sncyBzcGVjcw==$yuj7Eot9M9woZX0fGnJWCBANGX4g4hfslMer29nLHGw=:2nEYnL0ILuUGnshgU7L1C/uo3MVq62tqIhuq4fz30RI='
ALTER ROLE root PASSWORD 'SCRAM-SHA-256$1:aGllcmxvY2sncyBzcGVjcw==$Exbl2q1zHLIXYrhcNRbyxp1XU29EFiJZcoXSOffUZ9g=:KnTbQAjGRnhGKcXgNc0RapZj3ST4Y8HvkiZAWFR4Vds='
CREATE DATABASE mgl_test
SQL
  elif [[ $1 == mysql ]]; then
    in_root "$2" mysqld --no-defaults --user=root --initialize-insecure --datadir=/srv/data \
      --tmpdir=/srv --init-file=/srv/setup.sql --innodb-redo-log-capacity=48M &&
      rm "$2/data/auto.cnf"             # the server's UUID
  else
    # --force: without /etc/hosts, say, it would not look further.
    mariadb-install-db --no-defaults --force --skip-name-resolve --user="$(id -un)" \
      --datadir="$2/data" --tmpdir="$2" \
      --skip-test-db --extra-file="$2/setup.sql" --innodb-log-file-size=48M
  fi
}

fresh_data() {                          # KIND: a copy of initialised data
  [[ $1 != memcached ]] || { mkdir "$dir/memcached/data"; return; }
  [[ $1 != redis ]] || { mkdir "$dir/redis/data"; return; }
  local version=(mariadbd --no-defaults --version) made
  [[ $1 != mysql ]] || version=(in_root "$dir" mysqld --no-defaults --version)
  [[ $1 != postgresql ]] || version=("$pg_bin/postgres" --version)
  made=$({ "${version[@]}"; declare -f initialise; cat "$grants"; } | sha256sum)
  made=$cache/$1-data-${made:0:16}
  if [[ ! -e $made ]]; then
    say "initialising data for $1 (once)"
    rm -rf "$cache/$1-data-"*
    mkdir "$made.new"
    initialise "$1" "$made.new" >"$dir/$1/log" 2>&1 || failed "$1"
    mv -T "$made.new" "$made"
  fi
  cp -a --reflink=auto "$made/data" "$dir/$1/data"
}

# --- One server: DIR/KIND with port, pid (and when that process began), log, data, tmp, sock -----

began() {                               # PID: sets $began to when; false if it has ended, even unreaped
  local stat
  began=''
  { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
  read -ra stat <<<"${stat##*) }"
  [[ ${stat[0]} != Z || ${stat[17]} -gt 1 ]] && began=${stat[19]}
}

noted() {                               # KIND PID: it has just been launched
  began "$2" || true
  echo "$2 $began" >"$dir/$1/pid"
  disown
}

# Another program that sleeps would cost as much as many of the looks that it separates. Servers must not inherit what
# says nothing here.
pause() {                               # SECONDS
  [[ $silent ]] || exec {silent}<> <(:)
  read -r -t "$1" -u "$silent" || true
}

no_pause() {
  [[ ! $silent ]] || exec {silent}>&-
  silent=''
}

alive() {                               # KIND; sets $pid
  local when
  pid=''
  [[ -s $dir/$1/pid ]] || return 1
  read -r pid when <"$dir/$1/pid"
  [[ $when ]] && began "$pid" && [[ $began == "$when" ]]
}

launch_postgresql() {
  local home=$dir/postgresql server
  server=("${pg_as[@]}" "$pg_bin/postgres" -D "$home/data" --listen-addresses=127.0.0.1 --port="$(<"$home/port")"
    --unix-socket-directories="$home/tmp" --ssl=on --ssl-cert-file="$dir/tls/cert.pem"
    --ssl-key-file="$dir/tls/key.pem")
  # shellcheck disable=SC2206  # several words
  server+=(${HIERLOCK_SERVER_OPTIONS:-})
  ((EUID)) || chown postgres: "$home/tmp"
  # One that was killed, and that nobody has reaped yet, would count as a server that runs.
  rm -f "$home/data/postmaster.pid" "$home/tmp/.s."*
  # Not in a directory that it may not read.
  (cd / && exec setsid "${server[@]}" </dev/null >>"$home/log" 2>&1) &
  noted postgresql $!
}

launch_memcached() {
  # shellcheck disable=SC2086  # several words
  setsid memcached -u "$(id -un)" -l 127.0.0.1 -p "$(<"$dir/memcached/port")" -U 0 -t 2 -m 32 \
    ${HIERLOCK_SERVER_OPTIONS:-} </dev/null >>"$dir/memcached/log" 2>&1 &
  noted memcached $!
}

launch_redis() {
  local home=$dir/redis
  cat >"$home/redis.conf" <<CONF
bind 127.0.0.1
port $(<"$home/port")
unixsocket $home/sock
dir $home/data
save ""
requirepass rootpassword
user testuser on >testpassword ~* &* +@all
CONF
  # shellcheck disable=SC2086  # several words
  setsid "$redis" "$home/redis.conf" ${HIERLOCK_SERVER_OPTIONS:-} </dev/null >>"$home/log" 2>&1 &
  noted redis $!
}

launch() {                              # KIND
  local base=$dir server
  no_pause
  [[ $1 != memcached ]] || { launch_memcached; return; }
  [[ $1 != redis ]] || { launch_redis; return; }
  [[ $1 != postgresql ]] || { launch_postgresql; return; }
  server=(mariadbd --no-defaults --user="$(id -un)" --secure-file-priv="$dir/mariadb/tmp"
    --innodb-log-file-size=48M)
  if [[ $1 == mysql ]]; then
    base=/srv
    server=("${enter[@]}" "$dir" "$root" mysqld --no-defaults --user=root --secure-file-priv=NULL
      --innodb-redo-log-capacity=48M --mysqlx=OFF --performance-schema-error-size=0)
  fi
  server+=(--bind-address=127.0.0.1 --port="$(<"$dir/$1/port")" --socket="$base/$1/sock"
    --datadir="$base/$1/data" --tmpdir="$base/$1/tmp" --pid-file="$base/$1/data/pid"
    --ssl-ca="$base/tls/ca.pem" --ssl-cert="$base/tls/cert.pem" --ssl-key="$base/tls/key.pem"
    --skip-name-resolve --max-connections=500 --open-files-limit=8192 --performance-schema=ON
    --innodb-buffer-pool-size=64M --innodb-flush-log-at-trx-commit=2 --innodb-doublewrite=OFF
    --sync-binlog=0 --disable-log-bin
    # Specs restart it often: what follows halves what a start costs.
    --innodb-flush-method=nosync --innodb-use-native-aio=OFF --innodb-log-buffer-size=2M
    --innodb-buffer-pool-dump-at-shutdown=OFF --innodb-buffer-pool-load-at-startup=OFF
    --performance-schema-digests-size=200 --performance-schema-events-statements-history-long-size=10)
  # shellcheck disable=SC2206  # several words
  server+=(${HIERLOCK_SERVER_OPTIONS:-})
  rm -f "$dir/$1/sock"*
  setsid "${server[@]}" </dev/null >>"$dir/$1/log" 2>&1 &
  noted "$1" $!
}

memcached_version() (                   # PORT
  exec 9<>"/dev/tcp/127.0.0.1/$1" && printf 'version\r\n' >&9 && read -r -t 5 _ version <&9 && echo "${version%$'\r'}"
)

redis_version() (                       # PORT: 1 while it does not serve
  local name value version='' serves=''
  exec 9<>"/dev/tcp/127.0.0.1/$1" && printf '%s\r\n' 'AUTH rootpassword' 'INFO server' 'INFO persistence' QUIT >&9
  while IFS=: read -r -t 5 name value <&9; do
    case $name in redis_version) version=${value%$'\r'} ;; loading) serves=${value%$'\r'} ;; esac
  done
  echo "$version"
  [[ $serves == 0 ]]
)

listens() {                             # KIND: perhaps; a client costs more than this look
  local said=()
  case $1 in
    mysql | mariadb | redis) [[ -S $dir/$1/sock ]] ;;
    postgresql)
      { mapfile -t said <"$dir/postgresql/data/postmaster.pid"; } 2>/dev/null || return 1
      [[ ${said[7]:-} == ready* ]] ;;
  esac
}

answers() {                             # KIND: waits until it does; asks as root, so that
                                        # MySQL has not cached the password of the tests' user
  local deadline=$((SECONDS + 60)) version
  local client=(mariadb --no-defaults --skip-ssl --socket="$dir/$1/sock" --user=root --skip-column-names --batch
    --execute='SELECT VERSION()' mgl_test)
  [[ $1 != postgresql ]] || client=("$pg_bin/psql" -XAtqw -h 127.0.0.1 -p "$(<"$dir/$1/port")" -U root
    -c 'SHOW server_version' mgl_test)
  # pgmoon refuses a password that is hashed less than 4,096 times.
  [[ $1 != postgresql || ! ${HIERLOCK_DRIVERS:-} ]] || client+=(-c "ALTER ROLE testuser PASSWORD 'testpassword'")
  [[ $1 != memcached ]] || client=(memcached_version "$(<"$dir/memcached/port")")
  [[ $1 != redis ]] || client=(redis_version "$(<"$dir/redis/port")")
  until listens "$1" && version=$(MYSQL_PWD=rootpassword PGPASSWORD=rootpassword "${client[@]}" 2>/dev/null) && alive "$1"; do
    if [[ $fresh ]] && ! alive "$1" && grep -q 'Address already in use' "$dir/$1/log"; then
      : >"$dir/$1/log"                  # another run's server has got the port meanwhile
      choose_port "$1"
      launch "$1"
      answers "$1"
      return
    fi
    if ! alive "$1" || ((SECONDS > deadline)); then failed "$1"; fi
    pause 0.02
  done
  echo "$1 $version answers on 127.0.0.1:$(<"$dir/$1/port"), pid $pid"
}

end() {                                 # SIGNAL KIND…: returns when they have ended
  local kind deadline=$((SECONDS + 20)) signal others=() ended=()
  for kind in "${@:2}"; do
    alive "$kind" || continue
    signal=$1 others=()
    # PostgreSQL waits at a SIGTERM until its clients have gone; and its processes must not outlive it, for the next
    # one would know nothing of what they hold. Stopped, it bears no more of them.
    if [[ $kind == postgresql && $1 == TERM ]]; then signal=INT; fi
    if [[ $kind == postgresql && $1 == KILL ]]; then
      kill -s STOP "$pid" || true
      mapfile -t others < <(pgrep -P "$pid")
      ended+=("${others[@]}")
    fi
    kill -s "$signal" "$pid" "${others[@]}" || true
  done
  for pid in "${ended[@]}"; do
    while began "$pid" && ((SECONDS <= deadline)); do pause 0.01; done
  done
  for kind in "${@:2}"; do
    while alive "$kind"; do
      ((SECONDS <= deadline)) || kill -s KILL "$pid" || true
      pause 0.02
    done
    rm -f "$dir/$kind/pid"
  done
}

control() {                             # KIND VERB
  [[ -d $dir/$1/data ]] || die "there is no $1 in $dir"
  case $2 in
    pid) alive "$1" || die "$1 does not run"; echo "$pid"; return ;;
    stop) end TERM "$1"; return ;;
    kill) end KILL "$1"; return ;;
    restart) end TERM "$1" ;;
    start) ! alive "$1" || die "$1 runs already" ;;
    *) usage ;;
  esac
  launch "$1"
  answers "$1"
  write_env
}

# --- The servers of DIR -------------------------------------------------------------------------

certificates() (
  mkdir -p "$dir/tls"
  cd "$dir/tls"
  new=(openssl req -x509 -days 30 -noenc -newkey ec -pkeyopt ec_paramgen_curve:prime256v1)
  "${new[@]}" -subj '/CN=hierlock test CA' -keyout ca-key.pem -out ca.pem
  "${new[@]}" -subj /CN=localhost -keyout key.pem -out cert.pem -CA ca.pem -CAkey ca-key.pem \
    -addext basicConstraints=critical,CA:FALSE -addext extendedKeyUsage=serverAuth \
    -addext subjectAltName=IP:127.0.0.1,DNS:localhost
)

write_env() {
  local kind at control pair value database socket
  local -A root_user=([redis]=default)
  for kind in mysql mariadb postgresql redis memcached; do
    [[ -d $dir/$kind/data ]] || continue
    alive "$kind" || pid=''
    at=127.0.0.1:$(<"$dir/$kind/port")
    printf -v control '%q control %q %s' "$self" "$dir" "$kind"
    if [[ $kind == memcached ]]; then   # no user, no database, no TLS
      printf "export HIERLOCK_MEMCACHED_%s=%q\n" DSN "memcached://$at" PID "$pid" CONTROL "$control"
      continue
    fi
    database='' socket=$dir/$kind/sock
    [[ $kind != postgresql ]] || database=mgl_test socket=$dir/$kind/tmp
    # One that has just been started has forgotten nothing that matters.
    [[ $kind != redis ]] || database='0?quarantine=0'
    for pair in "DSN=$kind://testuser:testpassword@$at/${database:-mgl_test}" \
      "ROOT_DSN=$kind://${root_user[$kind]:-root}:rootpassword@$at/$database" "SOCKET=$socket" "CA=$dir/tls/ca.pem" \
      "PID=$pid" "CONTROL=$control"; do
      value=${pair#*=}
      echo "export HIERLOCK_${kind^^}_${pair%%=*}=${value@Q}"
    done
  done >"$dir/env.$$"
  mv "$dir/env.$$" "$dir/env"
}

discard() {                             # KIND…
  local kind orderly=() at_once=()
  # Their data go with them. PostgreSQL must give back what it shares with its processes.
  for kind; do if [[ $kind == postgresql ]]; then orderly+=("$kind"); else at_once+=("$kind"); fi; done
  end KILL "${at_once[@]}"
  end TERM "${orderly[@]}"
  for kind; do rm -rf "$dir/$kind/"{data,tmp,sock*}; done
  if alive mysql || alive mariadb || alive postgresql || alive redis || alive memcached; then write_env; else rm -rf "$dir/tls" "$dir/env"; fi
}

finish() {                              # on exit: nothing goes on
  local status=$?
  set +e
  trap '' INT TERM HUP
  if [[ $child ]]; then
    ((status == 130)) || kill -s TERM "$child"          # a Ctrl-C went to it as well
    timeout -s KILL 10 tail --pid="$child" -s 0.1 -f /dev/null || kill -s KILL "$child"
  fi
  [[ ! $guard ]] || kill -- "-$guard" "$guard"
  [[ $up ]] || end KILL "${kinds[@]}"   # a server that still starts may miss a SIGTERM
  discard "${kinds[@]}"
  exit "$status"
} 2>/dev/null

choose_port() {                         # KIND
  local port
  while port=$(shuf -n 1 -i 20000-31999); do
    (: <>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || break
  done
  echo "$port" >"$dir/$1/port"
}

begin() {                               # KIND…: from then on an exit of the script stops them
  local kind fresh=1                     # it may have any port
  need openssl
  for kind; do
    [[ $kind != mariadb ]] || need mariadbd
    [[ $kind != memcached ]] || need memcached
    [[ $kind != redis ]] || need "$redis"
    [[ $kind != postgresql || $pg_bin ]] || die "PostgreSQL is missing; get it by: $self install"
    ! alive "$kind" || die "$kind runs in $dir already"
    [[ ! -e $dir/$kind || -e $dir/$kind/port ]] || die "$dir/$kind is not of this script's making"
  done
  trap finish EXIT
  trap 'exit 130' INT; trap 'exit 143' TERM; trap 'exit 129' HUP
  if [[ $verb == run ]]; then           # stops the servers should this shell be killed outright
    # shellcheck disable=SC2016  # expanded by the inner shell
    setsid sh -c 'tail --pid="$1" -f /dev/null; exec "$2" stop "$3"' sh $$ "$self" "$dir" \
      </dev/null >/dev/null 2>&1 &
    guard=$!
  fi
  for kind; do
    rm -rf "$dir/$kind/data"
    mkdir -p "$dir/$kind/tmp"
    : >"$dir/$kind/log"
    choose_port "$kind"
    [[ $kind != mysql ]] || get_root
    locked fresh_data "$kind"
  done
  alive mysql || alive mariadb || alive postgresql || alive redis || alive memcached || certificates 2>"$dir/openssl.log"
  for kind; do launch "$kind"; done
  for kind; do answers "$kind"; done
  write_env
  up=1
}

run() {                                 # COMMAND…: in the background, so that traps act at once
  local status=0
  # shellcheck source=/dev/null
  . "$dir/env"
  env --default-signal=INT,QUIT "$@" <&0 &
  child=$!
  wait "$child" || status=$?
  child=''
  exit "$status"
}

missing() {                             # the packages that are not there, on one line
  local missing=()
  command -v mariadbd >/dev/null || missing+=(mariadb-server-core mariadb-client-core)
  ls /usr/lib/galera/libgalera_smm.so >/dev/null 2>&1 || missing+=(galera-4)
  command -v openssl >/dev/null || missing+=(openssl)
  command -v mount >/dev/null || missing+=(mount)
  [[ $pg_bin ]] || missing+=(postgresql)
  command -v memcached >/dev/null || missing+=(memcached)
  command -v redis-server >/dev/null || missing+=(redis-server)
  echo "${missing[*]}" "$("$roots" missing)"
}

install() {
  local missing
  read -ra missing <<<"$(missing)"
  ((!${#missing[@]})) || "$(dirname "$self")/deps.sh" packages "${missing[@]}"
  get_root
}

[[ $* != missing ]] || { missing; exit; }
[[ $* != install ]] || { install; exit; }
[[ $# -ge 2 && $2 ]] || usage
verb=$1
absolute "$2"; dir=$path
shift 2
((${#dir} <= 76)) || die "$dir is too long a name: its sockets would be out of reach"
kinds=()
while [[ ${1:-} == mysql || ${1:-} == mariadb || ${1:-} == postgresql || ${1:-} == redis || ${1:-} == memcached ]]; do kinds+=("$1"); shift; done
case "$verb ${#kinds[@]}" in
  "stop 0") kinds=(mysql mariadb postgresql redis memcached) ;;
  "start 0" | "run 0")
    kinds=(mysql mariadb)
    [[ ! $pg_bin ]] || kinds+=(postgresql)
    ! command -v "$redis" >/dev/null || kinds+=(redis)
    ! command -v memcached >/dev/null || kinds+=(memcached) ;;
esac
case "$verb ${#kinds[@]} ${1:+more}" in
  "stop "*" ") discard "${kinds[@]}" ;;
  "restart 1 " | "kill 1 " | "start-again 1 ") control "${kinds[0]}" "${verb%-again}" ;;
  "control 1 more") control "${kinds[0]}" "$1" ;;
  "start "*" ")
    begin "${kinds[@]}"
    trap - EXIT INT TERM HUP ;;
  "run "*" more")
    [[ $1 == -- && $# -ge 2 ]] || usage
    begin "${kinds[@]}" >&2
    run "${@:2}" ;;
  *) usage ;;
esac
