#!/usr/bin/env bash
#
# Private roots of a Debian suite: unstable, for what Debian's stable does not have (MySQL, and its client
# library), and a bare one, to see what happens on a fresh machine.  Each is made by mmdebstrap, in
# HIERLOCK_CACHE (by default ~/.cache/hierlock), once, and again when other packages are wanted; to have
# a newer one, remove it.  This script must not install anything outside of them unless called as
# "install", and leave no mount and no process behind.
#
#   root.sh install                        get what is missing to make one
#   root.sh missing                        say which packages these are
#   root.sh make NAME SUITE PACKAGE…       make the root NAME of a suite, with these packages
#   root.sh run NAME SUITE COMMAND…        run COMMAND in it, in this directory, which is the same inside;
#                                          so are /tmp, /dev, /proc, the cache, processes and network
#   root.sh alone NAME SUITE COMMAND…      run COMMAND in a copy of it, in a clone of this repository, and throw
#                                          both away. Of this machine it has the kernel, the network, and the
#                                          packages that apt downloaded the last time, nothing else
#
# The mounts are in a namespace of the command's own and gone with it.

set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
self=$(realpath "${BASH_SOURCE[0]}")
cache=$(realpath -m "${HIERLOCK_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hierlock}")
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
mode=root as=() enter=(unshare --mount)
((EUID == 0)) || mode=unshare as=(sudo) enter=(unshare --user --map-root-user --mount)

say() { echo "root.sh: $*" >&2; }
die() { say "$*"; exit 1; }
usage() { sed -n 's/^#   root\.sh/usage: root.sh/p' "$self" >&2; exit 2; }

missing() {                             # the packages that are not there, on one line
  local missing=()
  command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
  [[ -e $keyring ]] || missing+=(debian-archive-keyring)
  ((EUID == 0)) || command -v newuidmap >/dev/null || missing+=(uidmap)
  echo "${missing[*]}"
}

install() {
  local missing
  read -ra missing <<<"$(missing)"
  ((!${#missing[@]})) || "$(dirname "$self")/deps.sh" packages "${missing[@]}"
}

make_root() {                           # PACKAGE…: under another name, so never there by halves
  local mirror
  if [[ -e $root && "$*" == "$(cat "$root/packages" 2>/dev/null || echo "$*")" ]]; then return 0; fi
  command -v mmdebstrap >/dev/null || die "mmdebstrap is missing; get it by: $self install"
  [[ -e $keyring ]] || die "$keyring is missing; get it by: $self install"
  mirror=$(apt-get indextargets --format "\$(REPO_URI)" 'Created-By: Packages' 'Label: Debian' |
    sed -n 1p)
  [[ $mirror ]] || die "apt knows no Debian mirror (an apt-get update may help)"
  say "fetching $* from $mirror into $root (once; some minutes, some hundred MB; to remove it: rm -r $cache)"
  rm -rf "$root.new"
  mkdir "$root.new"
  mmdebstrap --mode="$mode" --variant=apt --aptopt='Acquire::Check-Valid-Until "false"' \
    --include="$(IFS=,; echo "$*")" "$suite" - \
    "deb [signed-by=$keyring check-valid-until=no] $mirror $suite main" |
    tar -x -C "$root.new" --exclude='./dev/*' ||
    die "that failed (without root it needs user namespaces, uidmap, an entry in /etc/subuid)"
  echo "$*" >"$root.new/packages"
  rm -rf "$root"
  mv -T "$root.new" "$root"
}

inside() {                              # COMMAND…
  local shared=(/dev /proc /sys /tmp "$cache" "$PWD") file
  for file in /etc/hosts /etc/resolv.conf; do
    if [[ -e $file ]]; then touch "$root$file"; shared+=("$file"); fi
  done
  # shellcheck disable=SC2016  # expanded by the inner shells
  HIERLOCK_CACHE=$cache exec "${enter[@]}" bash -euc 'root=$1; shift
    mount --bind "$root" "$root"        # a mount point, so that unshare works inside
    until [[ $1 == -- ]]; do
      [[ ! -d $1 ]] || mkdir -p "$root$1"
      mount --rbind "$1" "$root$1"
      shift
    done
    exec chroot "$root" sh -c '\''cd "$0" && exec "$@"'\'' "$PWD" "${@:2}"' bash "$root" "${shared[@]}" -- "$@"
}

alone() {                               # COMMAND…
  local status=0 file child='' archives=$cache/$suite-archives
  ((EUID == 0)) || die "alone needs to be root"
  copy=$(mktemp -d "${TMPDIR:-/tmp}/hierlock-root-XXXXXX")
  trap '[[ ! $child ]] || kill -s KILL "$child"; wait; rm -rf "$copy"' EXIT
  trap 'exit 130' INT; trap 'exit 143' TERM; trap 'exit 129' HUP
  cp -a --reflink=auto "$root/." "$copy"
  for file in /etc/hosts /etc/resolv.conf; do
    [[ ! -e $file ]] || cp -L --remove-destination "$file" "$copy$file"
  done
  [[ -z $(git -c safe.directory='*' status --porcelain) ]] || say "what is not committed is not in the clone"
  git -c safe.directory='*' clone --quiet --no-hardlinks . "$copy/root/hierlock"
  # Who comes second downloads by itself, as apt locks the directory.
  mkdir -p "$archives"
  exec 8>"$archives.lock"
  flock --nonblock 8 || archives=''
  # Process 1 is a shell, which reaps what others leave; whatever still runs ends with it.
  # shellcheck disable=SC2016  # expanded by the inner shells
  unshare --mount --pid --fork --kill-child bash -euc 'root=$1 archives=$2; shift 2
    mount --bind "$root" "$root"
    mount --rbind /dev "$root/dev"
    mount --rbind /sys "$root/sys"
    mount -t tmpfs tmpfs "$root/dev/shm"
    mount -t proc proc "$root/proc"
    [[ ! $archives ]] || mount --bind "$archives" "$root/var/cache/apt/archives"
    status=0
    env -i HOME=/root LANG=C.UTF-8 TERM="${TERM:-dumb}" \
      PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
      chroot "$root" sh -c '\''cd /root/hierlock && exec "$@"'\'' sh "$@" 8>&- || status=$?
    exit "$status"' bash "$copy" "$archives" "$@" </dev/null &
  child=$!
  wait "$child" || status=$?
  child=''
  exit "$status"
}

[[ $* != missing ]] || { missing; exit; }
[[ $* != install ]] || { install; exit; }
(($# >= 4)) || usage
name=$2 suite=$3
root=$cache/$name-$suite
case $1 in
  make)
    mkdir -p "$cache"
    exec 9>"$cache/lock"
    flock 9
    make_root "${@:4}" ;;
  run | alone)
    [[ -e $root ]] || die "there is no $root: make it first"
    if [[ $1 == run ]]; then inside "${@:4}"; else alone "${@:4}"; fi ;;
  *) usage ;;
esac
