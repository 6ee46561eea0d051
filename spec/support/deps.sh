#!/usr/bin/env bash
#
# Gets what hierlock needs on a Debian or Ubuntu machine and is not there yet:
#
#   deps.sh build [LUA…]     to build and to run it (LUA: lua5.4, lua5.1, luajit …)
#   deps.sh demo             to watch the demonstration, to run the bench
#   deps.sh test [LUA…]      to run the specs
#   deps.sh servers          throw-away servers for specs and bench
#   deps.sh bare             a private root of a bare Debian 12, to see what a fresh machine lacks
#   deps.sh libmysqlclient   a private root with Oracle's client library, to run the specs in
#   deps.sh packaging        to install it in every way, for every Lua
#   deps.sh browser          a browser, for the example of check-out
#   deps.sh lint             the linters
#   deps.sh docs [LUA…]      to make the reference
#   deps.sh fuzz             clang's libFuzzer and sanitizers, and what the command needs
#   deps.sh valgrind         valgrind
#   deps.sh model            spin, and what it needs
#   deps.sh packages NAME…   these packages
#
# KIND+KIND… gets all of these at once: deps.sh build+test+servers lua5.4.
#
# Says what it installs, how much that is and how to remove it, and asks for root only then. On another system
# it says what is missing and leaves the rest to you. It must install nothing that is there already, start no
# service, and leave none that the next boot starts: the specs have servers of their own.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

say() { echo "hierlock: $*" >&2; }
have() { command -v "$1" >/dev/null 2>&1; }
installed() { dpkg-query -W -f='${Status}' "$1" 2>/dev/null | grep -q 'ok installed'; }

wanted=()
want() {
  for package; do
    installed "$package" || wanted+=("$package")
  done
}

# The interpreter and the headers of a Lua. nginx's LuaJIT and Debian's exclude each other: either
# will do, but with Debian's there can be no nginx to test.
want_lua() {
  case $1 in
    luajit) if ! installed libluajit-5.1-dev; then want luajit2 libluajit2-5.1-dev; fi ;;
    lua5.1) want lua5.1 liblua5.1-0-dev ;;
    lua5.*) want "$1" "lib$1-dev" ;;
    *) say "unknown Lua: $1"; exit 2 ;;
  esac
}

# As root, PACKAGE…: policy-rc.d keeps services from being started; what was in its place comes back, also after a
# run that was killed.
export INSTALL='
policy=/usr/sbin/policy-rc.d
exec 9>/run/lock/hierlock-deps
flock 9
# No PostgreSQL server is made and started where its packages are.
if [[ " $* " == *" postgresql "* ]]; then
  mkdir -p /etc/postgresql-common
  echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.conf
fi
begun() { find /etc/rc[2-5].d /etc/systemd/system -type l \( -name "S*" -o -path "*.wants/*" \) 2>/dev/null | sort; }
put_back() { rm -f "$policy"; [[ ! -e $policy.kept && ! -L $policy.kept ]] || mv "$policy.kept" "$policy"; }
[[ ! -e $policy.kept ]] || put_back
[[ ! -e $policy && ! -L $policy ]] || mv "$policy" "$policy.kept"
trap put_back EXIT
trap "exit 130" INT; trap "exit 143" TERM; trap "exit 129" HUP
printf "#!/bin/sh\nexit 101\n" >"$policy"
chmod 755 "$policy"
before=$(begun)
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends -o Dpkg::Options::=--force-confold "$@"
comm -13 <(echo "$before") <(begun) | while read -r link; do
  name=$(basename "$link")
  case $link in
    /etc/rc*) update-rc.d "${name#S??}" disable ;;
    *) systemctl disable "$name" || rm -f "$link" ;;
  esac >/dev/null 2>&1 || true
done
'
install() {                             # PACKAGE…
  local root=() size
  if ((EUID != 0)); then
    have sudo || { say "please install as root: apt-get install $*"; exit 1; }
    root=(sudo)
  fi
  "${root[@]}" apt-get update -qq >&2
  size=$(LC_ALL=C apt-get install --no-install-recommends --assume-no "$@" 2>/dev/null |
    sed -n 's/^Need to get \(.*\) of archives.$/\1 to fetch, /p; s/^After this operation, \(.*\) of additional.*/\1 on the disk, /p' | tr -d '\n' || true)
  say "installing (${size:-}a few minutes at most; to remove it: apt-get purge --auto-remove $*)"
  "${root[@]}" bash -euc "$INSTALL" bash "$@" >&2
}

kinds=${1:?build, demo, test, servers, lint, docs, model or valgrind} after=()
shift
[[ $kinds != packages ]] || { install "$@"; exit; }
(($#)) || set -- lua5.4

if ! have dpkg-query; then
  missing=()
  for tool in cc make pkg-config; do have "$tool" || missing+=("$tool"); done
  ((${#missing[@]} == 0)) || { say "please install ${missing[*]}"; exit 1; }
  exit 0
fi

specs=(lua-busted lua-luv lua-cqueues lua-copas lua-socket lua-sql-mysql lua-sql-postgres lua-sql-sqlite3 lua-argparse lua-dkjson libcmocka-dev procps iproute2 sqlite3 zsh lua-ldoc patch graphviz
  php-cli php-symfony-lock php-pgsql php-redis tmux prometheus)

for kind in ${kinds//+/ }; do
  case $kind in
    build)
      want gcc libc6-dev make pkg-config
      for lua; do want_lua "$lua"; done
      # Either client library will do. The demonstration needs none.
      if [[ -z ${HIERLOCK_WITHOUT_CLIENTS:-} ]]; then
        if ! have mysql_config && ! have mariadb_config; then want libmariadb-dev; fi
        want libpq-dev libhiredis-dev libsqlite3-dev libmemcached-dev
      fi
      ;;
    demo)
      want lua-luv
      ;;
    test)
      want "${specs[@]}"
      for lua; do
        if [[ $lua == luajit ]] && ! installed libluajit-5.1-2; then
          want nginx libnginx-mod-http-lua lua-resty-core lua-http # which the shop's load script asks by
        fi
      done
      ;;
    servers)
      read -ra missing <<<"$(spec/support/servers.sh missing)"
      wanted+=("${missing[@]}") after+=('spec/support/servers.sh install')
      ;;
    valgrind)
      want valgrind
      ;;
    bare)
      # make, to begin with: as README.md says.
      spec/support/root.sh install
      exec spec/support/root.sh make bare bookworm make
      ;;
    libmysqlclient)
      spec/support/servers.sh install
      # Servers are started inside, too; PostgreSQL and libpq are the newest there.
      exec spec/support/root.sh make libmysqlclient sid libmysqlclient-dev gcc libc6-dev make pkg-config \
        lua5.4 liblua5.4-dev lua5.5 liblua5.5-dev "${specs[@]}" mariadb-server-core mariadb-client-core galera-4 openssl mount bsdutils \
        libpq-dev libsqlite3-dev libhiredis-dev libmemcached-dev postgresql redis-server valkey-server memcached
      ;;
    packaging)
      want luarocks git musl-tools lua-yaml lua-argparse lua-luv mariadb-client-core
      [[ $(dpkg --print-architecture) != amd64 ]] || want gcc-multilib # to build for 32 bits
      ;;
    browser)
      want chromium fonts-dejavu-core
      ;;
    lint)
      want lua-check cppcheck clang clang-format clang-tidy git mandoc
      ;;
    model)
      want spin gcc libc6-dev
      ;;
    fuzz)
      want clang libclang-rt-dev lua-argparse lua-dkjson # clang only recommends its own libraries
      ;;
    docs)
      for lua; do want_lua "$lua"; done
      want lua-ldoc
      ;;
  esac
done

((!${#wanted[@]})) || install "${wanted[@]}"
for command in "${after[@]}"; do $command; done
