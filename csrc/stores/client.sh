#!/bin/sh
#
# Finds the client library of a store that needs but one, for the Makefile:
#
#   client.sh STORE cflags       what the compiler must be told; nothing when there is no library
#   client.sh STORE libs         the same for the linker
#
# It looks, in this order, at
#
#   STORE_INCDIR, STORE_LIBDIR     directories that the caller names, as SQLITE_INCDIR: those of the header, as it is
#                                  included, and of the library; where one is named, nothing else will do
#   pkg-config
#   directories                    of distributions and of Homebrew
#
# SYSROOT stands before the directories of the last step. MySQL's and PostgreSQL's have a client.sh of their own.

set -eu

case ${1:-} in
  redis) name=REDIS header=hiredis/hiredis.h library=hiredis module=hiredis formula=hiredis ;;
  sqlite) name=SQLITE header=sqlite3.h library=sqlite3 module=sqlite3 formula=sqlite ;;
  memcached) name=MEMCACHED header=libmemcached/memcached.h library=memcached module=libmemcached formula=libmemcached ;;
  *) echo "usage: client.sh redis|sqlite|memcached cflags|libs" >&2; exit 2 ;;
esac
what=${2:-}
case $what in cflags | libs) ;; *) echo "usage: client.sh $1 cflags|libs" >&2; exit 2 ;; esac
eval "named_incdir=\${${name}_INCDIR:-} named_libdir=\${${name}_LIBDIR:-}"

# Redis over TLS is OpenSSL's: found beside, or by pkg-config.
tls() { # INCDIR
  [ "$name" = REDIS ] || return 0
  if [ -e "$1/openssl/ssl.h" ]; then
    if [ "$what" = cflags ]; then echo " -DHL__REDIS_TLS"; else echo " -lssl -lcrypto"; fi
  elif ${PKG_CONFIG:-pkg-config} --exists openssl 2>/dev/null; then
    [ "$what" = libs ] || printf ' -DHL__REDIS_TLS'
    echo " $(${PKG_CONFIG:-pkg-config} "--$what" openssl)"
  fi
}

found() { # INCDIR LIBS: prints what was asked for and ends, if the header is there
  if [ -e "$1/$header" ]; then
    if [ "$what" = cflags ]; then echo "-I$1$(tls "$1")"; else echo "$2$(tls "$1")"; fi
    exit 0
  fi
}

if [ "$named_incdir$named_libdir" ]; then
  incdir=${named_incdir:-"${named_libdir%/lib*}/include"}
  libdir=${named_libdir:-${incdir%/include*}/lib}
  # Where the linker found it, the loader must find it, too.
  found "$incdir" "-L$libdir -Wl,-rpath,$libdir -l$library"
  echo "hierlock: no $header: ${name}_INCDIR='$named_incdir' ${name}_LIBDIR='$named_libdir'" >&2
  exit 1
fi

# Not what else it wants to be linked with: libmemcached's says so of SASL.
if prefix=$(${PKG_CONFIG:-pkg-config} --variable=prefix "$module" 2>/dev/null); then
  found "$prefix/include" "$(${PKG_CONFIG:-pkg-config} --libs-only-L "$module") -l$library"
fi

for prefix in /usr /usr/local "/opt/homebrew/opt/$formula" "/usr/local/opt/$formula"; do
  for lib in "${SYSROOT:-}$prefix"/lib "${SYSROOT:-}$prefix"/lib64 "${SYSROOT:-}$prefix"/lib/*-linux-*; do
    for file in "$lib/lib$library".so "$lib/lib$library".dylib "$lib/lib$library".a; do
      if [ -e "$file" ]; then found "${SYSROOT:-}$prefix/include" "-L$lib -l$library"; fi
    done
  done
done
