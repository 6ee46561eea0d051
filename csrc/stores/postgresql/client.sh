#!/bin/sh
#
# Finds libpq for the PostgreSQL store, for the Makefile:
#
#   client.sh cflags       what the compiler must be told; nothing when there is no library
#   client.sh libs         the same for the linker
#
# It looks, in this order, at
#
#   POSTGRESQL_INCDIR, POSTGRESQL_LIBDIR     directories that the caller names
#   PG_CONFIG                                a pg_config that the caller names; where it is one of these that is
#                                            named, nothing else will do
#   pkg-config                               libpq
#   pg_config                                on PATH
#   directories                              of distributions and of Homebrew
#
# SYSROOT stands before the directories of the last step.

set -eu
: "${POSTGRESQL_INCDIR:=}" "${POSTGRESQL_LIBDIR:=}"

what=${1:-}
case $what in cflags | libs) ;; *) echo "usage: client.sh cflags|libs" >&2; exit 2 ;; esac

found() { # INCDIR LIBS: prints what was asked for and ends, if the header is there
  if [ -e "$1/libpq-fe.h" ]; then
    if [ "$what" = cflags ]; then echo "-I$1"; else echo "$2"; fi
    exit 0
  fi
}

if [ "$POSTGRESQL_INCDIR$POSTGRESQL_LIBDIR" ]; then
  prefix=${POSTGRESQL_LIBDIR%/lib*}
  for incdir in ${POSTGRESQL_INCDIR:-"$prefix/include" "$prefix/include/postgresql"}; do
    libdir=${POSTGRESQL_LIBDIR:-${incdir%/include*}/lib}
    # Where the linker found it, the loader must find it, too.
    found "$incdir" "-L$libdir -Wl,-rpath,$libdir -lpq"
  done
  echo "hierlock: no libpq-fe.h: POSTGRESQL_INCDIR='$POSTGRESQL_INCDIR' POSTGRESQL_LIBDIR='$POSTGRESQL_LIBDIR'" >&2
  exit 1
fi

if [ "${PG_CONFIG:-}" ]; then
  found "$("$PG_CONFIG" --includedir)" "-L$("$PG_CONFIG" --libdir) -lpq"
  echo "hierlock: no libpq-fe.h where PG_CONFIG='$PG_CONFIG' says" >&2
  exit 1
fi

if incdir=$(${PKG_CONFIG:-pkg-config} --variable=includedir libpq 2>/dev/null); then
  found "$incdir" "$(${PKG_CONFIG:-pkg-config} --libs libpq)"
fi

if command -v pg_config >/dev/null 2>&1; then
  found "$(pg_config --includedir)" "-L$(pg_config --libdir) -lpq"
fi

for prefix in /usr /usr/local /opt/homebrew/opt/libpq /usr/local/opt/libpq; do
  for incdir in "${SYSROOT:-}$prefix"/include "${SYSROOT:-}$prefix"/include/postgresql; do
    for lib in "${SYSROOT:-}$prefix"/lib "${SYSROOT:-}$prefix"/lib64 "${SYSROOT:-}$prefix"/lib/*-linux-*; do
      for file in "$lib/libpq".so "$lib/libpq".dylib "$lib/libpq".a; do
        if [ -e "$file" ]; then found "$incdir" "-L$lib -lpq"; fi
      done
    done
  done
done
