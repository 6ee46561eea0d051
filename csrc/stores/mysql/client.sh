#!/bin/sh
#
# Finds a client library for the MySQL store, for the Makefile:
#
#   client.sh cflags       what the compiler must be told; nothing when there is no library
#   client.sh libs         the same for the linker
#
# It looks, in this order, at
#
#   MYSQL_INCDIR, MYSQL_LIBDIR     directories that the caller names
#   MYSQL_CONFIG                   a mysql_config that the caller names; where it is one of these that is
#                                  named, nothing else will do
#   mysql_config, mariadb_config   on PATH: Debian, Fedora, Alpine, MySQL's own packages
#   pkg-config                     mysqlclient, libmariadb, mariadb
#   directories                    of distributions and of Homebrew, which puts neither on PATH
#
# Headers and library must be of one kind: Oracle's libmysqlclient, or MariaDB Connector/C.
# SYSROOT stands before the directories of the last step.

set -eu
: "${MYSQL_INCDIR:=}" "${MYSQL_LIBDIR:=}"

what=${1:-}
case $what in cflags | libs) ;; *) echo "usage: client.sh cflags|libs" >&2; exit 2 ;; esac

found() { # CFLAGS LIBS: prints what was asked for and ends, if the headers are there
  for flag in $1; do
    if [ -e "${flag#-I}/mysql.h" ]; then
      if [ "$what" = cflags ]; then echo "$1"; else echo "$2"; fi
      exit 0
    fi
  done
}

library() { # INCDIR LIBDIR…: sets $directory and $name
  names=mysqlclient
  if [ -e "$1/mariadb_version.h" ]; then names='mariadb mysqlclient'; fi
  shift
  for directory; do
    for name in $names; do
      for file in "$directory/lib$name".so "$directory/lib$name".dylib "$directory/lib$name".a; do
        if [ -e "$file" ]; then return 0; fi
      done
    done
  done
  return 1
}

library_of() { # INCDIR: the library in the same prefix
  prefix=${1%/include*}
  for lib in "$prefix"/lib "$prefix"/lib64 "$prefix"/lib/*-linux-*; do
    if library "$1" "$lib" "$lib/mysql" "$lib/mariadb"; then return 0; fi
  done
  return 1
}

if [ "$MYSQL_INCDIR$MYSQL_LIBDIR" ]; then
  prefix=${MYSQL_LIBDIR%/lib*}
  for incdir in ${MYSQL_INCDIR:-"$prefix/include/mysql" "$prefix/include/mariadb"}; do
    if [ "$MYSQL_LIBDIR" ]; then library "$incdir" "$MYSQL_LIBDIR"; else library_of "$incdir"; fi || continue
    # Where the linker found it, the loader must find it, too.
    found "-I$incdir" "-L$directory -Wl,-rpath,$directory -l$name"
  done
  echo "hierlock: no mysql.h with its library: MYSQL_INCDIR='$MYSQL_INCDIR' MYSQL_LIBDIR='$MYSQL_LIBDIR'" >&2
  exit 1
fi

if [ "${MYSQL_CONFIG:-}" ]; then
  found "$("$MYSQL_CONFIG" --include)" "$("$MYSQL_CONFIG" --libs)"
  echo "hierlock: no mysql.h where MYSQL_CONFIG='$MYSQL_CONFIG' says" >&2
  exit 1
fi

for config in mysql_config mariadb_config; do
  if command -v "$config" >/dev/null 2>&1; then
    found "$("$config" --include)" "$("$config" --libs)"
  fi
done

for module in mysqlclient libmariadb mariadb; do
  if cflags=$(${PKG_CONFIG:-pkg-config} --cflags "$module" 2>/dev/null); then
    found "$cflags" "$(${PKG_CONFIG:-pkg-config} --libs "$module")"
  fi
done

for prefix in /usr /usr/local /opt/homebrew/opt/mysql-client /opt/homebrew/opt/mariadb-connector-c \
  /usr/local/opt/mysql-client /usr/local/opt/mariadb-connector-c /usr/local/mysql; do
  for incdir in "${SYSROOT:-}$prefix"/include/mysql "${SYSROOT:-}$prefix"/include/mariadb "${SYSROOT:-}$prefix"/include; do
    if [ -e "$incdir/mysql.h" ] && library_of "$incdir"; then
      found "-I$incdir" "-L$directory -l$name"
    fi
  done
done
