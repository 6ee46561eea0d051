#!/bin/sh
#
# Finds libsqlite3 for the SQLite store, for the Makefile:
#
#   client.sh cflags       what the compiler must be told; nothing when there is no library
#   client.sh libs         the same for the linker
#
# It looks, in this order, at
#
#   SQLITE_INCDIR, SQLITE_LIBDIR     directories that the caller names; where one of these is
#                                    named, nothing else will do
#   pkg-config                       sqlite3
#   directories                      of distributions and of Homebrew
#
# SYSROOT stands before the directories of the last step.

set -eu
: "${SQLITE_INCDIR:=}" "${SQLITE_LIBDIR:=}"

what=${1:-}
case $what in cflags | libs) ;; *) echo "usage: client.sh cflags|libs" >&2; exit 2 ;; esac

found() { # INCDIR LIBS: prints what was asked for and ends, if the header is there
  if [ -e "$1/sqlite3.h" ]; then
    if [ "$what" = cflags ]; then echo "-I$1"; else echo "$2"; fi
    exit 0
  fi
}

if [ "$SQLITE_INCDIR$SQLITE_LIBDIR" ]; then
  incdir=${SQLITE_INCDIR:-"${SQLITE_LIBDIR%/lib*}/include"}
  libdir=${SQLITE_LIBDIR:-${incdir%/include*}/lib}
  # Where the linker found it, the loader must find it, too.
  found "$incdir" "-L$libdir -Wl,-rpath,$libdir -lsqlite3"
  echo "hierlock: no sqlite3.h: SQLITE_INCDIR='$SQLITE_INCDIR' SQLITE_LIBDIR='$SQLITE_LIBDIR'" >&2
  exit 1
fi

if incdir=$(${PKG_CONFIG:-pkg-config} --variable=includedir sqlite3 2>/dev/null); then
  found "$incdir" "$(${PKG_CONFIG:-pkg-config} --libs sqlite3)"
fi

for prefix in /usr /usr/local /opt/homebrew/opt/sqlite /usr/local/opt/sqlite; do
  incdir=${SYSROOT:-}$prefix/include
  for lib in "${SYSROOT:-}$prefix"/lib "${SYSROOT:-}$prefix"/lib64 "${SYSROOT:-}$prefix"/lib/*-linux-*; do
    for file in "$lib/libsqlite3".so "$lib/libsqlite3".dylib "$lib/libsqlite3".a; do
      if [ -e "$file" ]; then found "$incdir" "-L$lib -lsqlite3"; fi
    done
  done
done
