--- Installing: with make, with LuaRocks for every Lua, as a C library; with the
-- client libraries where distributions put them, and without one; and the servers
-- of docker-compose.yml. Real builds of a copy of the source tree.
--
-- Run by `make test-packaging`: once, and on no particular Lua.

local support = require "spec.support"
local lyaml = require "lyaml"

local LUAS = {
  { name = "lua5.1", version = "5.1", includes = "/usr/include/lua5.1" },
  { name = "lua5.2", version = "5.2", includes = "/usr/include/lua5.2" },
  { name = "lua5.3", version = "5.3", includes = "/usr/include/lua5.3" },
  { name = "lua5.4", version = "5.4", includes = "/usr/include/lua5.4" },
  { name = "luajit", version = "5.1", includes = "/usr/include/luajit-2.1" },
}

local directory, source, headers, library

--- Runs a shell command without the variables that `make spec` sets for its children; returns its output, on both
-- streams, and its exit status.
local function sh(command, ...)
  if select("#", ...) > 0 then command = command:format(...) end
  local pipe = assert(io.popen(("env -i PATH=\"$PATH\" HOME=%s MAKEFLAGS=-j2 bash -c '%s' 2>&1; echo \"=$?\""):format(
    directory or "/", (command:gsub("'", [['\'']])))))
  local text = pipe:read("*a")
  pipe:close()
  local output, status = text:match("^(.*)=(%d+)\n$")
  return output, tonumber(status)
end

--- Runs a shell command that must succeed.
local function must(command, ...)
  local output, status = sh(command, ...)
  if status ~= 0 then error(("%s\nexits with %d:\n%s"):format(command:format(...), status, output), 2) end
  return output
end

--- make in the copy of the source tree; build: a name.
local function make(build, words)
  return must("make -s -C %s BUILD=%s/%s CFLAGS=-O0 %s", source, directory, build, words)
end

local function write_file(name, text, mode)
  must("mkdir -p \"$(dirname %s)\"", name)
  local file = assert(io.open(name, "w"))
  file:write(text)
  file:close()
  if mode then must("chmod %s %s", mode, name) end
end

local function read_file(name)
  local file = assert(io.open(name))
  local text = file:read("*a")
  file:close()
  return text
end

local function exists(name)
  local file = io.open(name)
  if file then file:close() end
  return file ~= nil
end

local function lines(text)
  local list = {}
  for line in text:gmatch("[^\n]+") do list[#list + 1] = line end
  return list
end

local function files(where) return lines(must("cd %s && find . -type f -printf '%%P\\n' | LC_ALL=C sort", where)) end

local function sorted(list)
  table.sort(list)
  return list
end

--- The output of a Lua that has only these directories and Debian's own.
local function run_lua(lua, luadir, libdir, chunk)
  write_file(directory .. "/chunk.lua", chunk)
  return sh("cd / && LUA_PATH='%s/?.lua;%s/?/init.lua;;' LUA_CPATH='%s/?.so;;' %s %s/chunk.lua",
            luadir, luadir, libdir, lua, directory)
end

local function lua_files()
  return lines(must("cd %s/lua && find . -name '*.lua' -printf '%%P\\n'", source))
end

-- The files that make install puts below PREFIX.
local function expected(version)
  local list = {
    "bin/hierlock", "include/hierlock.h", "lib/libhierlock.a", "lib/pkgconfig/hierlock.pc",
    "lib/lua/" .. version .. "/hierlock/core.so", "lib/lua/" .. version .. "/hierlock/store/mysql.so",
    "lib/lua/" .. version .. "/hierlock/store/postgresql.so", "lib/lua/" .. version .. "/hierlock/store/sqlite.so",
    "lib/lua/" .. version .. "/hierlock/store/memcached.so",
    "lib/lua/" .. version .. "/hierlock/store/redis.so",
    "include/hierlock/clock.h", "include/hierlock/dsn.h", "include/hierlock/error.h", "include/hierlock/fork.h",
    "include/hierlock/layout.h", "include/hierlock/mode.h", "include/hierlock/mutex.h", "include/hierlock/record.h",
    "include/hierlock/socket.h", "include/hierlock/store.h",
    "share/bash-completion/completions/hierlock", "share/zsh/site-functions/_hierlock",
    "share/hierlock/sql/leases.sql", "share/hierlock/sql/postgresql.sql", "share/hierlock/sql/postgresql_leases.sql",
    "share/hierlock/sql/provision.sql", "share/hierlock/sql/schema.sql",
  }
  for _, name in ipairs(lua_files()) do list[#list + 1] = "share/lua/" .. version .. "/" .. name end
  if exists("docs/hierlock.1") then list[#list + 1] = "share/man/man1/hierlock.1" end
  return sorted(list)
end

-- What keeps a bug from being an exploit: tables that cannot be written to, no stack that can be run, no code that is
-- changed when it is loaded, and a stack whose returns are watched. optimised: and calls that know the size of what they
-- write to.
local function assert_hardened(module, optimised)
  local segments, dynamic = must("readelf -lW %s", module), must("readelf -dW %s", module)
  local symbols = must("nm -D %s", module)
  assert.is_truthy(segments:find("GNU_RELRO", 1, true), module)
  assert.is_truthy(segments:match "GNU_STACK[^\n]* RW ", module)
  assert.is_truthy(dynamic:find("BIND_NOW", 1, true), module)
  assert.is_nil(dynamic:find("TEXTREL", 1, true), module)
  assert.is_truthy(symbols:find("__stack_chk_fail", 1, true), module)
  if optimised then assert.is_truthy(symbols:find "__%l+_chk[@\n]", module) end
end

setup(function()
  directory = must("mktemp -d"):match("[^\n]+")
  source = directory .. "/source"
  must("mkdir %s && tar -c --exclude=./build --exclude=./.git . | tar -x -C %s", source, source)
  make("build", "LUA=lua5.4")
  headers = must("csrc/stores/mysql/client.sh cflags"):match("%-I(%S+)")
  library = must("ldd %s/build/hierlock/store/mysql.so", directory):match("(/%S+/lib%a+.so%S*)")
  for path in must("ldd %s/build/hierlock/store/mysql.so", directory):gmatch("/%S+") do
    if path:find("libmariadb") or path:find("libmysqlclient") then library = path end
  end
end)

teardown(function() must("rm -rf %s", directory) end)

local OPEN_FILE = [[
  local hierlock = require "hierlock"
  local manager = assert(hierlock.open("file:%s/locks"))
  print(assert(manager:acquire { "u1" }))
  print(hierlock._VERSION)
  print(require("hierlock.store.mysql"))
]]

describe("make install", function()
  local root

  before_each(function() root = must("mktemp -d -p %s", directory):match("[^\n]+") end)

  it("puts these files below DESTDIR and PREFIX, and no others", function()
    make("build", "install LUA=lua5.4 PREFIX=/opt/h DESTDIR=" .. root)
    assert.are.same(expected("5.4"), files(root .. "/opt/h"))
    assert.are.equal(#expected("5.4"), #files(root))
    assert.are.equal("", must("find %s -name '*.so' ! -perm 755", root))
    assert.are.equal("", must("grep -rIl %s %s || true", root, root)) -- DESTDIR is not remembered
  end)

  it("goes to /usr/local by itself, and elsewhere when told", function()
    make("build", "install LUA=lua5.4 DESTDIR=" .. root)
    assert.are.same(expected("5.4"), files(root .. "/usr/local"))
    must("rm -r %s/*", root)
    make("build", "install LUA=lua5.4 PREFIX=/usr INST_LIBDIR=/x/lib INST_LUADIR=/x/lua INST_BINDIR=/x/bin " ..
         "INST_CLIBDIR=/x/clib DESTDIR=" .. root)
    local found = table.concat(files(root), "\n")
    for _, name in ipairs { "x/lib/hierlock/core.so", "x/lua/hierlock/init.lua", "x/bin/hierlock",
                            "x/clib/libhierlock.a", "x/clib/pkgconfig/hierlock.pc", "usr/include/hierlock.h" } do
      assert.is_truthy(found:find(name, 1, true), name .. " in\n" .. found)
    end
    assert.is_nil(found:find("usr/lib/", 1, true))
  end)

  it("counts LuaJIT as 5.1", function()
    make("luajit", "LUA=luajit")
    make("luajit", "install LUA=luajit PREFIX=/opt/h DESTDIR=" .. root)
    assert.are.same(expected("5.1"), files(root .. "/opt/h"))
    assert.is_truthy(read_file(root .. "/opt/h/bin/hierlock"):find("^#!/usr/bin/luajit\n"))
  end)

  it("builds nothing, and touches nothing in the source tree", function()
    write_file(directory .. "/now", "")
    make("build", "install LUA=lua5.4 DESTDIR=" .. root)
    assert.are.equal("", must("find %s %s/build -newer %s/now", source, directory, directory))
    local output, status = sh("make -C %s BUILD=%s/none install DESTDIR=%s/x", source, directory, root)
    assert.are_not.equal(0, status)
    assert.is_truthy(output:find("run make first", 1, true), output)
    assert.is_false(exists(root .. "/x"))
  end)

  it("is undone by make uninstall, which leaves what others put there", function()
    local where = "LUA=lua5.4 PREFIX=/opt/h DESTDIR=" .. root
    must("mkdir -p %s/opt/h/lib/pkgconfig", root)
    make("build", "install " .. where)
    write_file(root .. "/opt/h/lib/lua/5.4/hierlock/store/foreign.so", "")
    write_file(root .. "/opt/h/share/lua/5.4/foreign.lua", "")
    make("build", "uninstall " .. where)
    assert.are.same({ "lib/lua/5.4/hierlock/store/foreign.so", "share/lua/5.4/foreign.lua" }, files(root .. "/opt/h"))
    for _, shared in ipairs { "bin", "include", "lib/pkgconfig", "share/lua/5.4" } do
      assert.is_true(exists(root .. "/opt/h/" .. shared), shared)
    end
    for _, own in ipairs { "share/lua/5.4/hierlock", "share/hierlock", "include/hierlock" } do
      assert.is_false(exists(root .. "/opt/h/" .. own), own)
    end
  end)
end)

describe("make", function()
  -- The message of make, in one line, before it compiles anything.
  local function says(words, ...)
    local root = must("mktemp -d -p %s", directory):match("[^\n]+")
    local output, status = sh("cd %s && MAKEFLAGS= make BUILD=%s/build %s", source, root, words)
    assert.are_not.equal(0, status)
    assert.is_truthy(output:find("^hierlock: [^\n]+\nmake: [^\n]+\n$"), output)
    for _, text in ipairs { ... } do assert.is_truthy(output:find(text, 1, true), output) end
    assert.are.same({}, files(root))
  end

  it("names each store that it leaves out", function()
    for name, needs in pairs { postgresql = "libpq", redis = "libhiredis", sqlite = "libsqlite3", memcached = "libmemcached" } do
      local output = must("cd %s && MAKEFLAGS= make -n BUILD=%s/left-out LUA=lua5.4 %s_LIBS=", source, directory, name:upper())
      assert.is_truthy(output:find(("no %s found: the store for %s: is not built"):format(needs, name), 1, true), output)
    end
  end)

  it("makes the same bytes in whatever directory", function()
    local sums = {}
    for i, name in ipairs { "a", "of/another/name" } do
      must("mkdir -p %s/%s && cp -r %s/. %s/%s && rm -rf %s/%s/build", directory, name, source, directory, name, directory, name)
      sums[i] = must("cd %s/%s && MAKEFLAGS= make -s -j2 LUA=lua5.4 CFLAGS='-O0 -g' build/lua5.4/hierlock/core.so && " ..
        "find build -name '*.o' -o -name '*.so' | sort | xargs sha256sum", directory, name):match "%x+  build.*"
    end
    assert.are.equal(sums[1], sums[2])
  end)

  it("hardens what it makes by default", function()
    local modules = ("%s/hardened/hierlock/core.so %s/hardened/hierlock/store/sqlite.so"):format(directory, directory)
    must("make -s -C %s BUILD=%s/hardened LUA=lua5.4 %s", source, directory, modules)
    for module in modules:gmatch "%S+" do assert_hardened(module, true) end
  end)

  -- The record that a process keeps in a shared file is laid out in the same way by both.
  it("makes programs of 32 bits, which exclude those of 64, and sleep while they wait", function()
    write_file(directory .. "/small.c", "#include <stdio.h>\nint main(void) { return 0; }\n")
    if select(2, sh("gcc -m32 -o %s/small %s/small.c", directory, directory)) ~= 0 then
      pending "there is no gcc-multilib here"
    end
    -- Debian has some headers in a directory of the machine's own kind; they are the same.
    local words = "CC='gcc -m32' LUA=lua5.4 CPPFLAGS=\"-idirafter /usr/include/$(gcc -print-multiarch)\""
    must("make -s -C %s BUILD=%s/small-build CFLAGS='-O0 -Werror -Wno-psabi' %s %s/small-build/libhierlock.a %s/small-build/hierlock/core.so",
         source, directory, words, directory, directory)
    for name, build in pairs { small = "small-build", large = "build" } do
      must("cc %s -I%s/csrc/core -o %s/locked-%s %s/examples/locked.c %s/%s/libhierlock.a -lm -pthread",
           name == "small" and "-m32" or "", source, directory, name, source, directory, build)
    end
    for holder, other in pairs { small = "large", large = "small" } do
      local said, status = sh("HIERLOCK_DSN=file:%s/mixed %s/locked-%s u1/a1 2.5 %s/locked-%s u1 0 echo both",
                              directory, directory, holder, directory, other)
      assert.are.equal(75, status, said)
      assert.is_truthy(said:find("u1/a1 is held by locked", 1, true), said)
    end
    -- A time_t of 64 bits is not what the kernel reads there. A waiter that it wakes at each full second would go
    -- round in a circle from then on, half a second long in one of these calls.
    must("make -s -C %s BUILD=%s/time-build CFLAGS='-O0 -Werror -Wno-psabi -D_TIME_BITS=64' %s %s/time-build/libhierlock.a",
         source, directory, words, directory)
    must("cc -m32 -D_TIME_BITS=64 -D_FILE_OFFSET_BITS=64 -I%s/csrc/core -o %s/locked-time %s/examples/locked.c " ..
         "%s/time-build/libhierlock.a -lm -pthread", source, directory, source, directory)
    write_file(directory .. "/twice", ("for i in 1 2; do %s/locked-time u1 0.5 echo both; done\ntimes\n"):format(directory))
    local said = must("HIERLOCK_DSN=file:%s/mixed %s/locked-large u1/a1 2.5 sh %s/twice", directory, directory, directory)
    local user, system = said:match "0m([%d.]+)s 0m([%d.]+)s\n*$" -- of the children
    assert.is_true(user + system < 0.25, said)
  end)

  it("names the package whose headers of Lua are missing", function()
    local packages = { ["lua5.1"] = "liblua5.1-0-dev", luajit = "libluajit2-5.1-dev" }
    for _, lua in ipairs(LUAS) do
      says("PKG_CONFIG=false LUA=" .. lua.name, "no lauxlib.h for LUA=" .. lua.name, "apt-get install",
           packages[lua.name] or "lib" .. lua.name .. "-dev", "LUA_INCDIR")
    end
  end)

  it("refuses the headers of another Lua", function()
    says("LUA=lua5.1 LUA_INCDIR=/usr/include/lua5.4", "headers are those of Lua 5.4, not of LUA=lua5.1")
    says("LUA=luajit LUA_INCDIR=/usr/include/lua5.1", "headers are those of Lua 5.1, not of LUA=luajit")
    says("LUA=lua5.3 LUA_INCDIR=/usr/include/luajit-2.1", "headers are those of LuaJIT, not of LUA=lua5.3")
  end)

  it("says that there is no such Lua, or no compiler", function()
    says("LUA=nolua", "LUA=nolua does not run")
    says("LUA=lua5.4 CC=nocc", "no C compiler nocc", "apt-get install gcc libc6-dev")
  end)
end)

describe("the modules of one Lua", function()
  it("are refused by every other one, in a line that names both", function()
    local names = { luajit = "LuaJIT" }
    for _, lua in ipairs(LUAS) do make("for-" .. lua.name, "LUA=" .. lua.name) end
    for _, built in ipairs(LUAS) do
      for _, runs in ipairs(LUAS) do
        for _, entry in ipairs { "hierlock", "hierlock.attach", "hierlock.rows" } do
          local output, status = run_lua(runs.name, source .. "/lua", directory .. "/for-" .. built.name,
                                         ("require %q"):format(entry))
          if built == runs then
            assert.are.equal(0, status, output)
          else
            assert.are_not.equal(0, status)
            local line = ("hierlock is built for %s, but this program runs on %s: run it on %s, or build hierlock by `make LUA=%s`"):format(
              names[built.name] or "Lua " .. built.version, names[runs.name] or "Lua " .. runs.version,
              names[built.name] or "Lua " .. built.version, runs.name)
            assert.are.equal(runs.name .. ": " .. line, output:match("^[^\n]*"))
          end
        end
      end
    end
  end)

  it("are not to be found by a Lua that has none, as Lua says it", function()
    local output, status = run_lua("lua5.4", source .. "/lua", directory .. "/nowhere", 'require "hierlock"')
    assert.are_not.equal(0, status)
    assert.is_truthy(output:find("module 'hierlock.core' not found:", 1, true), output)
  end)
end)

describe("what make installs", function()
  local prefix

  setup(function()
    prefix = directory .. "/prefix"
    make("build", "install LUA=lua5.4 PREFIX=" .. prefix)
  end)

  it("is found by a Lua that knows its directories", function()
    local output, status = run_lua("lua5.4", prefix .. "/share/lua/5.4", prefix .. "/lib/lua/5.4", OPEN_FILE:format(directory))
    assert.are.equal(0, status, output)
    assert.is_truthy(output:find("u1", 1, true), output)
  end)

  it("has the command, which finds the modules by itself", function()
    local version = must("sed -n 's/#define HL_VERSION \"\\(.*\\)\"/\\1/p' csrc/core/hierlock.h")
    assert.are.equal("hierlock " .. version, must("cd / && %s/bin/hierlock --version", prefix))
    local _, status = sh("cd / && %s/bin/hierlock nonsense", prefix)
    assert.are.equal(64, status)
  end)

  it("has the command, which says in one line what it needs", function()
    local output, status = sh([[cd / && LUA_INIT="package.path, package.cpath = '', ''" %s/bin/hierlock --version]], prefix)
    assert.are.equal(70, status)
    assert.is_truthy(output:find("^hierlock: the command needs the Lua module argparse: [^\n]*apt%-get install lua%-argparse[^\n]*\n$"), output)
  end)

  local PROGRAM = [[
    #include <hierlock.h>
    #include <stdio.h>
    int main(int argc, char **argv) {
      hl_config config = HL_CONFIG_INIT;
    #ifdef WITH_MYSQL
      const struct hl_store_ops *const stores[] = {&hl_store_mysql, NULL};
      config.stores = stores;
    #endif
      config.dsn = argv[argc - 1];
      hl_manager *manager = NULL;
      hl_error error;
      int status = hl_manager_open(&config, &manager, &error);
      printf("%s%s\n", hl_status_name(status), status ? error.message : "");
      if (!status) hl_manager_close(manager);
      return status != HL_OK;
    }
  ]]

  before_each(function() write_file(directory .. "/program.c", PROGRAM) end)

  local function compile(name, flags, static)
    must("cd %s && cc -std=c11 -Wall -Werror %s -o %s program.c $(PKG_CONFIG_PATH=%s/lib/pkgconfig pkg-config %s --cflags --libs hierlock)",
         directory, flags, name, prefix, static)
  end

  it("is a C library, without the client library for those who do not name its store", function()
    compile("plain", "", "")
    assert.are.equal("ok\n", must("%s/plain file:%s/locks", directory, directory))
    local linked = must("ldd %s/plain", directory)
    assert.is_nil(linked:find("mariadb") or linked:find("mysql"), linked)
    local flags = must("PKG_CONFIG_PATH=%s/lib/pkgconfig pkg-config --libs hierlock", prefix)
    assert.is_nil(flags:find("mariadb") or flags:find("mysql"), flags)
    assert.matches("the program has not given the store .mysql.", (sh("%s/plain mysql://u@127.0.0.1/d", directory)))
  end)

  -- As its Makefile prints it; what it needs is what is installed.
  it("has what a store of another maker's needs, which Lua and C find by the DSN", function()
    must("rm -rf %s/store && cp -r %s/examples/store %s/store", directory, source, directory)
    local command = read_file(directory .. "/store/Makefile"):match("\n#     (make [^\n]+)\n")
    assert.are.equal("", (must("cd %s/store && PKG_CONFIG_PATH=%s/lib/pkgconfig %s -s CFLAGS='-O2 -g -Werror'",
                               directory, prefix, command)))
    local output, status = run_lua("lua5.4", prefix .. "/share/lua/5.4",
      ("%s/lib/lua/5.4/?.so;%s/store/build"):format(prefix, directory), ([[
        local hierlock = require "hierlock"
        local dsn = "store+folder:%s/other-maker"
        local one, other = assert(hierlock.open(dsn)), assert(hierlock.open(dsn))
        local lock = assert(one:acquire({ "u1" }, { ttl = 60 }))
        print(select(2, other:acquire({ "u1" }, { timeout = 0 })).code, lock.kind, lock:check())
        assert(lock:release { confirm = true })
        assert(other:acquire({ "u1" }, { timeout = 0 }):release { confirm = true })
        print(select(2, hierlock.open "store+nothing:x").message)
      ]]):format(os.getenv "HIERLOCK_SPEC_DIRECTORY"))
    assert.are.equal(0, status, output)
    assert.is_truthy(output:find("^timeout\tlease\ttrue\n"), output)
    assert.is_truthy(output:find("store+nothing", 1, true), output)
  end)

  support.each_server(function(store)
    it("is a C library with the MySQL store, by pkg-config --static", function()
      compile("mysql", "-DWITH_MYSQL", "--static")
      assert.are.equal("ok\n", must("%s/mysql '%s'", directory, store.dsn))
    end)
  end)

  it("can be built on musl, too", function()
    make("musl", ("%s/musl/libhierlock.a CC=musl-gcc CFLAGS='-O0 -Werror' MYSQL_LIBS= " ..
                  "CPPFLAGS='-idirafter /usr/include -idirafter /usr/include/x86_64-linux-gnu'"):format(directory))
    must("cd %s && musl-gcc -I%s/include -static -o musl-program program.c musl/libhierlock.a", directory, prefix)
    assert.are.equal("ok\n", must("%s/musl-program file:%s/locks", directory, directory))
    assert.is_truthy(sh("%s/musl-program file:/dev/null/locks", directory):find(": Not a directory\n$"))
  end)
end)

describe("luarocks make", function()
  it("takes the rockspec for a sound one", function() must("luarocks lint rockspec/*.rockspec") end)

  -- Debian's packages are told to LuaRocks, which would look for them on the net.
  local PROVIDED = 'rocks_provided = { argparse = "0.7.1-1", luv = "1.44.2-0", dkjson = "2.6-1" }\n'
  local LUAJIT = 'lua_interpreter = "luajit"\nvariables = { LUA_INCDIR = "/usr/include/luajit-2.1" }\n'

  it("has a rockspec to be published, by which LuaRocks fetches the tag of the version", function()
    local checkout, tree, config = directory .. "/checkout", directory .. "/fetched", directory .. "/fetched.config"
    local _, status = sh("make -s -C %s rockspec", source)
    assert.are_not.equal(0, status)
    local strange = "git+https://example.org/get?of=a&as=b|c" -- which sed would take for its own
    local written = must("make -s -C %s rockspec URL='%s'", source, strange):match "[^\n]+"
    assert.truthy(must("cat %s/%s", source, written):find(('  url = "%s",\n'):format(strange), 1, true))
    must("mkdir %s && tar -c --exclude=./build -C %s . | tar -x -C %s", checkout, source, checkout)
    must("cd %s && git init -q && git add -A && git -c user.name=a -c user.email=a@b commit -qm a && " ..
         "git tag v$(sed -n 's/#define HL_VERSION \"\\(.*\\)\"/\\1/p' csrc/core/hierlock.h)", checkout)
    local name = must("cd %s && make -s rockspec URL=git+file://%s", checkout, checkout):match "[^\n]+"
    write_file(config, PROVIDED)
    must("cd / && PKG_CONFIG=false LUAROCKS_CONFIG=%s luarocks --lua-version=5.4 --tree=%s install %s/%s CFLAGS='-O0 -fPIC'",
         config, tree, checkout, name)
    local output
    output, status = run_lua("lua5.4", tree .. "/share/lua/5.4", tree .. "/lib/lua/5.4", OPEN_FILE:format(directory))
    assert.are.equal(0, status, output)
  end)

  for _, lua in ipairs(LUAS) do
    it("installs for " .. lua.name, function()
      local tree = directory .. "/tree-" .. lua.name
      local config = directory .. "/" .. lua.name .. ".config"
      write_file(config, PROVIDED .. (lua.name == "luajit" and LUAJIT or ""))
      -- LuaRocks knows where lua.h is; pkg-config is not to be needed.
      must("cd %s && PKG_CONFIG=false LUAROCKS_CONFIG=%s luarocks --lua-version=%s --tree=%s make rockspec/*.rockspec CFLAGS='-O0 -fPIC'",
           source, config, lua.version, tree)

      local list = {}
      for _, name in ipairs { "core", "store/mysql", "store/postgresql", "store/redis", "store/sqlite", "store/memcached" } do
        list[#list + 1] = ("lib/lua/%s/hierlock/%s.so"):format(lua.version, name)
      end
      for _, name in ipairs(lua_files()) do list[#list + 1] = "share/lua/" .. lua.version .. "/" .. name end
      local found = {}
      for _, name in ipairs(files(tree)) do
        if name:find("^%a+/lua/") then found[#found + 1] = name end
      end
      assert.are.same(sorted(list), found)
      for _, name in ipairs(list) do
        if name:find "%.so$" then assert_hardened(tree .. "/" .. name, false) end
      end

      local output, status = run_lua(lua.name, tree .. "/share/lua/" .. lua.version, tree .. "/lib/lua/" .. lua.version,
                                     OPEN_FILE:format(directory))
      assert.are.equal(0, status, output)
      -- Compiled for this Lua, not another one of the same number.
      local built = must("cat %s/build/%s-luarocks/obj/lua/core.d", source, lua.name)
      assert.is_truthy(built:find(lua.includes .. "/lua.h", 1, true), built)

      -- The rock's pages link only to files in the rock.
      local rock = ("%s/lib/luarocks/rocks-%s/hierlock"):format(tree, lua.version)
      rock = rock .. "/" .. must("ls %s", rock):match("%S+")
      for _, page in ipairs(lines(must("cd %s && find . -name '*.md'", rock))) do
        local folder = rock .. "/" .. page:match("^(.*/)")
        for target in read_file(rock .. "/" .. page):gsub("```.-```", ""):gmatch("%]%(([^)%s#]+)") do
          assert.is_true(target:find("^%a+:") ~= nil or exists(folder .. target), page .. ": " .. target)
        end
      end

      assert.are.equal(must("%s/prefix/bin/hierlock --version", directory), must("cd / && %s/bin/hierlock --version", tree))
      assert.is_truthy(read_file(tree .. "/bin/hierlock"):find("/usr/bin/" .. lua.name, 1, true))
    end)
  end
end)

describe("a client library", function()
  -- The tools that a build needs, and no others.
  local function tools(where)
    must("mkdir -p %s/bin", where)
    must([[for tool in make bash sh sed find mkdir rm ar cc gcc as ld install rmdir dirname grep cat lua5.4; do
             ln -s "$(command -v $tool)" %s/bin/; done]], where)
    return where .. "/bin"
  end

  -- program: its name; flags: its output for each question.
  local function stub(where, program, flags)
    local cases = {}
    for question, answer in pairs(flags) do cases[#cases + 1] = ("  '%s') echo '%s' ;;\n"):format(question, answer) end
    write_file(("%s/bin/%s"):format(where, program),
               "#!/bin/sh\ncase \"$*\" in\n" .. table.concat(cases) .. "  *) exit 1 ;;\nesac\n", "755")
  end

  local function put(root, include, lib, name, suffix)
    must("mkdir -p %s%s %s%s && cp -rL %s/. %s%s", root, include, root, lib, headers, root, include)
    must("ln -s %s %s%s/lib%s%s", library, root, lib, name, suffix or ".so")
    -- The file that tells the kinds of headers apart.
    must("cd %s%s && [ -e mariadb_version.h ] || touch mariadb_version.h", root, include)
    if name == "mysqlclient" then
      must("cd %s%s && mkdir other && mv *.h other && for file in mysql mysqld_error errmsg; do " ..
           "echo \"#include <other/$file.h>\" >$file.h; done", root, include)
    end
  end

  -- Tells a program's flags from flags that were found without it.
  local SAID = " -DSAID"

  local function config(program, include, lib, name)
    return { include = include, lib = lib, name = name, said = SAID, stub = function(root)
      stub(root, program, { ["--include"] = "-I" .. root .. include .. SAID, ["--libs"] = "-L" .. root .. lib .. " -l" .. name })
    end }
  end

  local function pkg_config(module, include, lib, name)
    return { include = include, lib = lib, name = name, said = SAID, stub = function(root)
      stub(root, "pkg-config", { ["--cflags " .. module] = "-I" .. root .. include .. SAID,
                                 ["--libs " .. module] = "-L" .. root .. lib .. " -l" .. name })
    end }
  end

  local function plain(include, lib, name, suffix)
    return { include = include, lib = lib, name = name, suffix = suffix }
  end

  local MULTIARCH = "/usr/lib/x86_64-linux-gnu"
  local layouts = {
    ["libmariadb-dev of Debian"] = config("mariadb_config", "/usr/include/mariadb", MULTIARCH, "mariadb"),
    ["libmysqlclient-dev of Debian, Ubuntu"] = config("mysql_config", "/usr/include/mysql", MULTIARCH, "mysqlclient"),
    ["mariadb-connector-c-devel of Fedora"] = config("mariadb_config", "/usr/include/mysql", "/usr/lib64", "mariadb"),
    ["mysql-devel of Fedora"] = config("mysql_config", "/usr/include/mysql", "/usr/lib64/mysql", "mysqlclient"),
    ["mariadb-connector-c-dev of Alpine"] = config("mariadb_config", "/usr/include/mysql", "/usr/lib", "mariadb"),
    ["pkg-config mysqlclient"] = pkg_config("mysqlclient", "/usr/include/mysql", "/usr/lib64/mysql", "mysqlclient"),
    ["pkg-config libmariadb"] = pkg_config("libmariadb", "/usr/include/mariadb", "/usr/lib64", "mariadb"),
    ["pkg-config mariadb"] = pkg_config("mariadb", "/usr/include/mysql", "/usr/lib64", "mariadb"),
    ["no program: Debian's MariaDB"] = plain("/usr/include/mariadb", MULTIARCH, "mariadb"),
    ["no program: Debian's MySQL"] = plain("/usr/include/mysql", MULTIARCH, "mysqlclient"),
    ["no program: Fedora's MySQL"] = plain("/usr/include/mysql", "/usr/lib64/mysql", "mysqlclient"),
    ["no program: Fedora's MariaDB"] = plain("/usr/include/mysql", "/usr/lib64", "mariadb"),
    ["no program: Alpine's"] = plain("/usr/include/mysql", "/usr/lib", "mariadb"),
    ["no program: /usr/local/mysql"] = plain("/usr/local/mysql/include", "/usr/local/mysql/lib", "mysqlclient"),
  }
  -- Homebrew keeps both off PATH. Found only, not linked: there is no compiler for macOS here.
  for _, brew in ipairs { "/opt/homebrew/opt", "/usr/local/opt" } do
    local mysql, mariadb = brew .. "/mysql-client", brew .. "/mariadb-connector-c"
    layouts["Homebrew's mysql-client in " .. brew] = plain(mysql .. "/include/mysql", mysql .. "/lib", "mysqlclient", ".dylib")
    layouts["Homebrew's mariadb-connector-c in " .. brew] =
      plain(mariadb .. "/include/mariadb", mariadb .. "/lib", "mariadb", ".dylib")
  end

  for title, layout in pairs(layouts) do
    it("is found: " .. title, function()
      local root = must("mktemp -d -p %s", directory):match("[^\n]+")
      local path = tools(root)
      put(root, layout.include, layout.lib, layout.name, layout.suffix)
      if layout.stub then layout.stub(root) end
      local environment = ("PATH=%s SYSROOT=%s"):format(path, root)
      assert.are.equal(("-I%s%s%s\n-L%s%s -l%s\n"):format(root, layout.include, layout.said or "", root, layout.lib, layout.name),
                       must("cd %s && %s; export PATH SYSROOT; csrc/stores/mysql/client.sh cflags && csrc/stores/mysql/client.sh libs",
                            source, environment))
      if layout.suffix then return end
      local output = must("%s; export PATH SYSROOT; make -s -C %s BUILD=%s/build %s/build/hierlock/store/mysql.so " ..
                          "LUA_INCDIR=/usr/include/lua5.4 CFLAGS=-O0 LDFLAGS=-Wl,--trace",
                          environment, source, root, root)
      assert.is_truthy(output:find(("%s%s/lib%s.so"):format(root, layout.lib, layout.name), 1, true), output)
      local depends = must("cat %s/build/obj/stores/mysql/mysql.d", root)
      assert.is_truthy(depends:find(root .. layout.include .. "/mysql.h", 1, true), depends)
    end)
  end

  it("is taken from where the caller says, and from nowhere else", function()
    local root = must("mktemp -d -p %s", directory):match("[^\n]+")
    put(root, "/a/include/mysql", "/a/lib", "mysqlclient")
    put(root, "/b/include", "/b/lib64", "mariadb")
    local function client(variables, what) return must("%s %s/csrc/stores/mysql/client.sh %s", variables, source, what) end
    local a = "MYSQL_LIBDIR=" .. root .. "/a/lib"
    assert.are.equal(("-I%s/a/include/mysql\n"):format(root), client(a, "cflags"))
    local b = "MYSQL_INCDIR=" .. root .. "/b/include"
    assert.are.equal(("-L%s/b/lib64 -Wl,-rpath,%s/b/lib64 -lmariadb\n"):format(root, root), client(b, "libs"))
    local both = ("MYSQL_INCDIR=%s/a/include/mysql MYSQL_LIBDIR=%s/a/lib"):format(root, root)
    assert.are.equal(("-L%s/a/lib -Wl,-rpath,%s/a/lib -lmysqlclient\n"):format(root, root), client(both, "libs"))

    local output, status = sh("make -C %s BUILD=%s/build MYSQL_INCDIR=/nowhere", source, root)
    assert.are_not.equal(0, status)
    assert.is_truthy(output:find("no mysql.h with its library: MYSQL_INCDIR='/nowhere'", 1, true), output)
    assert.are_not.equal(0, (select(2, sh("make -C %s BUILD=%s/build MYSQL_CONFIG=/bin/false", source, root))))
  end)

  it("is not needed: everything but the MySQL store is built, and said so", function()
    local root = must("mktemp -d -p %s", directory):match("[^\n]+")
    local build = ("PATH=%s SYSROOT=%s make -s -C %s BUILD=%s/build CFLAGS=-O0 PKG_CONFIG=false LUA_INCDIR=/usr/include/lua5.4 "):format(
      tools(root), root, source, root)
    local output = must(build)
    assert.is_truthy(output:find("no libmysqlclient and no MariaDB Connector/C found: the store for mysql: is not built", 1, true), output)
    must(build .. "install PREFIX=%s/prefix", root)
    local without = {}
    for _, name in ipairs(expected("5.4")) do
      if not name:find("/store/", 1, true) then without[#without + 1] = name end
    end
    assert.are.same(without, files(root .. "/prefix"))

    local ran, status = run_lua("lua5.4", root .. "/prefix/share/lua/5.4", root .. "/prefix/lib/lua/5.4", ([[
      local hierlock = require "hierlock"
      print(assert(assert(hierlock.open("file:%s/locks")):acquire { "u1" }))
      local manager, err = hierlock.open("mysql://app:secret@127.0.0.1/shop")
      print(manager, err.code, err.message)
    ]]):format(root))
    assert.are.equal(0, status, ran)
    assert.is_truthy(ran:find("nil\tstore\tthe mysql store is not built or cannot be loaded (it needs " ..
                              "libmysqlclient or MariaDB Connector/C): module 'hierlock.store.mysql' not found\n", 1, true), ran)
    -- A store that cannot be loaded: the loader's message.
    write_file(root .. "/prefix/lib/lua/5.4/hierlock/store/mysql.so", "")
    ran = run_lua("lua5.4", root .. "/prefix/share/lua/5.4", root .. "/prefix/lib/lua/5.4",
                  [[print(require("hierlock").open("mysql://app:secret@127.0.0.1/shop"))]])
    assert.is_truthy(ran:find("MariaDB Connector/C%): [^\n]*/mysql.so: file too short\n"), ran)
  end)
end)

describe("the version", function()
  it("is one: of the header, the rockspec, the changelog, the library", function()
    local version = read_file("csrc/core/hierlock.h"):match('#define HL_VERSION "(%d+%.%d+%.%d+)"')
    local rockspecs = lines(must("ls rockspec"))
    assert.are.same({ "hierlock-" .. version .. "-1.rockspec" }, rockspecs)
    assert.is_truthy(read_file("rockspec/" .. rockspecs[1]):find('version = "' .. version .. '-1"', 1, true))
    assert.are.equal(version, must("PKG_CONFIG_PATH=%s/prefix/lib/pkgconfig pkg-config --modversion hierlock", directory):match("%S+"))
    -- The changelog's newest; until there is one, all of it is unreleased.
    local newest = read_file("CHANGELOG.md"):match("\n## %[?(%d+%.%d+%.%d+)")
    assert.is_truthy(newest == version or not newest and read_file("CHANGELOG.md"):find("\n## %[?Unreleased"), newest)
  end)
end)

describe("docker-compose.yml", function()
  local DATABASE = "hierlock_compose"
  local composed = lyaml.load(read_file("docker-compose.yml")).services

  support.each_server(function(store)
    it("provisions a table for the tests' user, by SQL that the server takes", function()
      local service = composed[store.dialect]
      local mounted = {}
      for _, volume in ipairs(service.volumes) do
        local file, name = volume:match("^%./(.+):/docker%-entrypoint%-initdb%.d/(.+%.sql):ro$")
        mounted[#mounted + 1] = { name = name, file = file }
      end
      table.sort(mounted, function(a, b) return a.name < b.name end)
      assert.are.equal(4, #mounted)

      local root = store.root()
      root:query("DROP DATABASE IF EXISTS " .. DATABASE)
      root:query("CREATE DATABASE " .. DATABASE)
      root:query("GRANT ALL ON " .. DATABASE .. ".* TO testuser@'%'")
      finally(function()
        root:query("REVOKE ALL ON " .. DATABASE .. ".* FROM testuser@'%'")
        root:query("DROP DATABASE " .. DATABASE)
      end)
      -- Run each as the images' entry point does: by the server's administrator, with the client.
      local user, password, host, port = store.root_dsn:match("//(.-):(.-)@(.-):(%d+)/")
      for _, script in ipairs(mounted) do
        must("MYSQL_PWD=%s mariadb --no-defaults --host=%s --port=%s --user=%s %s <%s",
             password, host, port, user, DATABASE, script.file)
      end

      local dsn = store.bare_dsn:gsub("/[^/]*$", "/" .. DATABASE)
      assert.is_truthy(dsn:find("testuser:testpassword", 1, true))
      assert.are.equal(service.environment.MYSQL_USER .. ":" .. service.environment.MYSQL_PASSWORD, "testuser:testpassword")
      local manager = assert(require("hierlock").open(dsn, { buckets = 10000 }))
      local handle = assert(manager:acquire({ "u1", "a1", "r1" }, { label = "seen" }))
      local other = assert(require("hierlock").open(dsn, { buckets = 10000 }))
      local holders = assert(other:holders { "u1" })
      assert.are.equal("seen", holders[1].label)
      handle:release()
      manager:close()
      other:close()
    end)
  end)

  it("listens on loopback, and tells the specs no other names than they use", function()
    for name, port in pairs { mysql = "3306", mariadb = "3307" } do
      assert.are.same({ "127.0.0.1:" .. port .. ":3306" }, composed[name].ports)
      assert.are.equal("mgl_test", composed[name].environment.MYSQL_DATABASE)
    end
  end)
end)

describe(".github/workflows/test.yml", function()
  local jobs = lyaml.load(read_file(".github/workflows/test.yml")).jobs

  it("runs the specs on every server on every Lua", function()
    local matrix = jobs.suite.strategy.matrix
    assert.are.same({ "mysql:8.0", "mysql:8.4", "mysql:9", "mariadb:10.6", "mariadb:10.11", "mariadb:11" }, matrix.server)
    local luas = {}
    for i, lua in ipairs(LUAS) do luas[i] = lua.name end
    assert.are.same(luas, matrix.lua)
    assert.is_nil(matrix.exclude)
  end)

  it("makes what the Makefile can make", function()
    local makefile = read_file("Makefile") .. read_file("spec/Makefile")
    for _, target in ipairs(jobs.checks.strategy.matrix.target) do
      assert.is_truthy(makefile:find("\n" .. target:gsub("%-", "%%-") .. ":"), target)
    end
  end)
end)
