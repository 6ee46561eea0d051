#!/bin/sh
#
# Finds libmemcached for the Memcached store, for the Makefile:
#
#   client.sh cflags       what the compiler must be told; nothing when there is no library
#   client.sh libs         the same for the linker
#
# It looks, in this order, at
#
#   MEMCACHED_INCDIR, MEMCACHED_LIBDIR       directories that the caller names: those of libmemcached/memcached.h and of
#                                            the library; where one is named, nothing else will do
#   pkg-config                               libmemcached
#   directories                              of distributions and of Homebrew
#
# SYSROOT stands before the directories of the last step.

set -eu
: "${MEMCACHED_INCDIR:=}" "${MEMCACHED_LIBDIR:=}"

what=${1:-}
case $what in cflags | libs) ;; *) echo "usage: client.sh cflags|libs" >&2; exit 2 ;; esac

found() { # INCDIR LIBS: prints what was asked for and ends, if the header is there
  if [ -e "$1/libmemcached/memcached.h" ]; then
    if [ "$what" = cflags ]; then echo "-I$1"; else echo "$2"; fi
    exit 0
  fi
}

if [ "$MEMCACHED_INCDIR$MEMCACHED_LIBDIR" ]; then
  incdir=${MEMCACHED_INCDIR:-"${MEMCACHED_LIBDIR%/lib*}/include"}
  libdir=${MEMCACHED_LIBDIR:-${incdir%/include*}/lib}
  # Where the linker found it, the loader must find it, too.
  found "$incdir" "-L$libdir -Wl,-rpath,$libdir -lmemcached"
  echo "hierlock: no libmemcached/memcached.h: MEMCACHED_INCDIR='$MEMCACHED_INCDIR' MEMCACHED_LIBDIR='$MEMCACHED_LIBDIR'" >&2
  exit 1
fi

if prefix=$(${PKG_CONFIG:-pkg-config} --variable=prefix libmemcached 2>/dev/null); then
  found "$prefix/include" "$(${PKG_CONFIG:-pkg-config} --libs-only-L libmemcached) -lmemcached"
fi

for prefix in /usr /usr/local /opt/homebrew/opt/libmemcached /usr/local/opt/libmemcached; do
  for lib in "${SYSROOT:-}$prefix"/lib "${SYSROOT:-}$prefix"/lib64 "${SYSROOT:-}$prefix"/lib/*-linux-*; do
    for file in "$lib/libmemcached".so "$lib/libmemcached".dylib "$lib/libmemcached".a; do
      if [ -e "$file" ]; then found "${SYSROOT:-}$prefix/include" "-L$lib -lmemcached"; fi
    done
  done
done
