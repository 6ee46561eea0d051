-- From a checkout, with any Lua that LuaRocks runs for:
--
--     luarocks make rockspec/hierlock-0.1.0-1.rockspec
--     luarocks --lua-version=5.1 make rockspec/hierlock-0.1.0-1.rockspec \
--       LUA=/usr/bin/luajit LUA_INCDIR=/usr/include/luajit-2.1
--
-- The client libraries of the stores are found by themselves (client.sh in csrc/stores and below it), or where MYSQL_INCDIR=...
-- MYSQL_LIBDIR=... and the same of POSTGRESQL, REDIS, SQLITE and MEMCACHED say. Without one, everything but that store is built: the
-- build says so.
rockspec_format = "3.0"
package = "hierlock"
version = "0.1.0-1"
-- `luarocks make` takes the checkout as it is, and does not look here. `make rockspec URL=git+https://…` writes the file to
-- be published: with the address of a public repository, and the tag of this version.
source = {
  url = "git+file://.",
}
description = {
  summary = "Hierarchical locks on MySQL, MariaDB, PostgreSQL, Redis, SQLite, Memcached or one machine",
  detailed = [[
While I change this account, nobody touches the account or anything in it; but others may work on
other accounts. The locks live in the MySQL, MariaDB, PostgreSQL or Redis that runs already, or, with
nothing to set up, belong to the processes and threads of one machine.]],
  license = "MIT",
  labels = { "locking", "mysql", "mariadb", "postgresql", "redis" },
}
supported_platforms = { "linux" }
dependencies = {
  "lua >= 5.1, < 5.6",
  -- Of the command `hierlock` only.
  "argparse",
  "luv",
  "dkjson",
}
build = {
  type = "make",
  build_variables = {
    CC = "$(CC)",
    CFLAGS = "$(CFLAGS)",
    LIBFLAG = "$(LIBFLAG)",
    LUA = "$(LUA)",
    LUA_INCDIR = "$(LUA_INCDIR)",
    MYSQL_INCDIR = "$(MYSQL_INCDIR)",
    MYSQL_LIBDIR = "$(MYSQL_LIBDIR)",
    POSTGRESQL_INCDIR = "$(POSTGRESQL_INCDIR)",
    POSTGRESQL_LIBDIR = "$(POSTGRESQL_LIBDIR)",
    REDIS_INCDIR = "$(REDIS_INCDIR)",
    REDIS_LIBDIR = "$(REDIS_LIBDIR)",
    SQLITE_INCDIR = "$(SQLITE_INCDIR)",
    SQLITE_LIBDIR = "$(SQLITE_LIBDIR)",
    MEMCACHED_INCDIR = "$(MEMCACHED_INCDIR)",
    MEMCACHED_LIBDIR = "$(MEMCACHED_LIBDIR)",
    VARIANT = "luarocks",
  },
  install_target = "install-lua",
  install_variables = {
    LUA = "$(LUA)",
    INST_LUADIR = "$(LUADIR)",
    INST_LIBDIR = "$(LIBDIR)",
    VARIANT = "luarocks",
  },
  install = {
    bin = { hierlock = "lua/hierlock/command/main.lua" },
  },
  -- What the pages in docs/ link to, spec/packaging_spec.lua sees to that.
  copy_directories = { "docs", "sql", "examples", "csrc" },
}
