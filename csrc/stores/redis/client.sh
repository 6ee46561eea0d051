#!/bin/sh
#
# Finds hiredis for the Redis store, for the Makefile:
#
#   client.sh cflags       what the compiler must be told; nothing when there is no library
#   client.sh libs         the same for the linker
#
# It looks, in this order, at
#
#   REDIS_INCDIR, REDIS_LIBDIR               directories that the caller names: those of hiredis/hiredis.h and of the
#                                            library; where one is named, nothing else will do
#   pkg-config                               hiredis
#   directories                              of distributions and of Homebrew
#
# SYSROOT stands before the directories of the last step.

set -eu
: "${REDIS_INCDIR:=}" "${REDIS_LIBDIR:=}"

what=${1:-}
case $what in cflags | libs) ;; *) echo "usage: client.sh cflags|libs" >&2; exit 2 ;; esac

found() { # INCDIR LIBS: prints what was asked for and ends, if the header is there
  if [ -e "$1/hiredis/hiredis.h" ]; then
    if [ "$what" = cflags ]; then echo "-I$1"; else echo "$2"; fi
    exit 0
  fi
}

if [ "$REDIS_INCDIR$REDIS_LIBDIR" ]; then
  incdir=${REDIS_INCDIR:-"${REDIS_LIBDIR%/lib*}/include"}
  libdir=${REDIS_LIBDIR:-${incdir%/include*}/lib}
  # Where the linker found it, the loader must find it, too.
  found "$incdir" "-L$libdir -Wl,-rpath,$libdir -lhiredis"
  echo "hierlock: no hiredis/hiredis.h: REDIS_INCDIR='$REDIS_INCDIR' REDIS_LIBDIR='$REDIS_LIBDIR'" >&2
  exit 1
fi

if prefix=$(${PKG_CONFIG:-pkg-config} --variable=prefix hiredis 2>/dev/null); then
  found "$prefix/include" "$(${PKG_CONFIG:-pkg-config} --libs hiredis)"
fi

for prefix in /usr /usr/local /opt/homebrew/opt/hiredis /usr/local/opt/hiredis; do
  for lib in "${SYSROOT:-}$prefix"/lib "${SYSROOT:-}$prefix"/lib64 "${SYSROOT:-}$prefix"/lib/*-linux-*; do
    for file in "$lib/libhiredis".so "$lib/libhiredis".dylib "$lib/libhiredis".a; do
      if [ -e "$file" ]; then found "${SYSROOT:-}$prefix/include" "-L$lib -lhiredis"; fi
    done
  done
done
