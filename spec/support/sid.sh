#!/usr/bin/env bash
#
# Private roots of Debian unstable, for what Debian's stable does not have: MySQL, and its client
# library.  Each is made by mmdebstrap, in HIERLOCK_CACHE (by default ~/.cache/hierlock), once, and
# again when other packages are wanted; to have a newer one, remove it.  This script must not install anything outside of them unless called
# as "install", and leave no mount behind.
#
#   sid.sh install                    get what is missing to make one
#   sid.sh make NAME PACKAGE…         make the root NAME, with these packages
#   sid.sh run NAME COMMAND…          run COMMAND in it, in this directory, which is the same inside;
#                                     so are /tmp, /dev, /proc, the cache, processes and network
#
# The mounts are in a namespace of the command's own and gone with it.

set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
self=$(realpath "${BASH_SOURCE[0]}")
cache=$(realpath -m "${HIERLOCK_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hierlock}")
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
mode=root as=() enter=(unshare --mount)
((EUID == 0)) || mode=unshare as=(sudo) enter=(unshare --user --map-root-user --mount)

say() { echo "sid.sh: $*" >&2; }
die() { say "$*"; exit 1; }
usage() { sed -n 's/^#   sid\.sh/usage: sid.sh/p' "$self" >&2; exit 2; }

install() {
  local missing=()
  command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
  [[ -e $keyring ]] || missing+=(debian-archive-keyring)
  ((EUID == 0)) || command -v newuidmap >/dev/null || missing+=(uidmap)
  ((${#missing[@]})) || return 0
  say "installing packages: ${as[*]} apt-get install ${missing[*]}"
  "${as[@]}" apt-get update >&2
  "${as[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes "${missing[@]}" >&2
}

make_root() {                           # PACKAGE…: under another name, so never there by halves
  local mirror
  if [[ -e $root && "$*" == "$(cat "$root/packages" 2>/dev/null || echo "$*")" ]]; then return 0; fi
  command -v mmdebstrap >/dev/null || die "mmdebstrap is missing; get it by: $self install"
  [[ -e $keyring ]] || die "$keyring is missing; get it by: $self install"
  mirror=$(apt-get indextargets --format "\$(REPO_URI)" 'Created-By: Packages' 'Label: Debian' |
    sed -n 1p)
  [[ $mirror ]] || die "apt knows no Debian mirror (an apt-get update may help)"
  say "fetching $* from $mirror into $root (once)"
  rm -rf "$root.new"
  mkdir "$root.new"
  mmdebstrap --mode="$mode" --variant=apt --aptopt='Acquire::Check-Valid-Until "false"' \
    --include="$(IFS=,; echo "$*")" sid - \
    "deb [signed-by=$keyring check-valid-until=no] $mirror sid main" |
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

[[ $* != install ]] || { install; exit; }
(($# >= 3)) || usage
root=$cache/$2-sid
case $1 in
  make)
    mkdir -p "$cache"
    exec 9>"$cache/lock"
    flock 9
    make_root "${@:3}" ;;
  run)
    [[ -e $root ]] || die "there is no $root: make it first"
    inside "${@:3}" ;;
  *) usage ;;
esac
