-- What is compared: hierlock on each of its stores, and what else people lock with
-- on this machine. To add a peer: an entry of MEANS, and one `add` below. A client
-- in C implements client.h (its libraries stand in the Makefile, BENCH_LIBRARIES);
-- one in another language speaks as client.c says.
--
--   on        what does the locking: a heading
--   name      what it is called
--   client    what its client is written in
--   takes     what one operation locks
--   polls     milliseconds between two tries of a waiter; absent, it is woken
--   command, args   how to run the client; args is a function
--   pid       of the server, to give it a CPU of its own
--   missing   why it can't run here; nil or false if it can

local uv = require "luv"
local servers = require "bench.mysql"

local CLIENTS = os.getenv("BENCH_CLIENTS")
local FILES = os.getenv("BENCH_FILES")
local LUA = os.getenv("HIERLOCK_LUA") or "lua5.4"

-- What a lock of it is, and when it ends by itself.
local LEASE = " s after it was taken or renewed, though its holder may still be at work"
local MEANS = {
  ["hierlock, embedded"] = "a path: ancestors shared, the node exclusive or shared; ends with the process",
  ["hierlock"] = "a path, as above; ends with the connection, or 30 s after the holder's machine vanished",
  ["flock(2)"] = "a file, exclusive or shared; ends with the process",
  ["flock(1)"] = "the same, by a process for each lock, as in a shell script",
  ["GET_LOCK"] = "a name, exclusive; ends with the connection",
  ["sequence"] = "hierlock's rows by SET, START TRANSACTION, three SELECTs, ROLLBACK; ends with the connection",
  ["advisory lock"] = "a number, exclusive or shared; ends with the connection",
  ["SET NX"] = "a name, exclusive; ends 30" .. LEASE,
  ["Symfony FlockStore"] = "a file, exclusive or shared; ends with the process",
  ["Symfony PdoStore"] = "a name, exclusive, by INSERT and DELETE of a row; ends 300" .. LEASE,
  ["Symfony RedisStore"] = "a name, exclusive or shared; ends 300" .. LEASE,
}

local peers = {}

local function add(peer)
  peer.means = assert(MEANS[peer.name], peer.name)
  peer.args = not peer.missing and peer.args()
  peers[#peers + 1] = peer
end

local function output(command)
  local pipe = io.popen(command .. " 2>/dev/null")
  local text = pipe:read("*a")
  pipe:close()
  return text
end

local function lacks_client(name, package)
  return not uv.fs_stat(CLIENTS .. "/" .. name) and "needs " .. package
end

-- An extension of PHP, or something that it comes with anyway.
local function lacks_php(extension, package)
  local lock, loaded = output("php -r '@include \"Symfony/Component/Lock/autoload.php\"; " ..
    "echo (int) class_exists(\"Symfony\\Component\\Lock\\LockFactory\"), (int) extension_loaded($argv[1]);' " ..
    extension):match("^(%d)(%d)$")
  return lock ~= "1" and "needs php-cli php-symfony-lock" or loaded ~= "1" and "needs " .. package
end

local function add_symfony(store, peer, extension, package)
  peer.name, peer.client, peer.takes, peer.command = "Symfony " .. store, "PHP", "1 name", "php"
  peer.missing = peer.missing or lacks_php(extension, package)
  add(peer)
end

-- ------------------------------------------------------------- no server

local function without_server()
  local on = "no server"
  add { on = on, name = "hierlock, embedded", client = "Lua", takes = "3 rows", command = LUA,
        args = function() return { "bench/loop.lua", "file:" .. FILES .. "/hierlock" } end }
  add { on = on, name = "flock(2)", client = "C", takes = "1 file", command = CLIENTS .. "/flock",
        args = function() return { FILES } end }
  add { on = on, name = "flock(1)", client = "C", takes = "1 file", command = CLIENTS .. "/flock",
        missing = output("command -v flock") == "" and "needs util-linux",
        args = function() return { FILES, "command" } end }
  add_symfony("FlockStore", { on = on, args = function() return { "bench/symfony.php", "flock", FILES } end },
              "standard", "php-cli")
end

-- -------------------------------------------------------- MySQL, MariaDB

local function on_mysql(kind, called)
  local server = servers[kind]
  local pid, none = server and server.pid, not server and "no server"
  local on = server and called .. " " .. server.version or called
  local lacks_library = none or lacks_client("bare", "libmariadb-dev")
  local function bare(mode, name, takes)
    add { on = on, pid = pid, name = name, client = "C", takes = takes, missing = lacks_library,
          command = CLIENTS .. "/bare", args = function() return server.bare(mode, "socket") end }
  end
  add { on = on, pid = pid, name = "hierlock", client = "Lua", takes = "3 rows", missing = lacks_library,
        command = LUA, args = function() return server.hierlock("socket") end }
  bare("getlock", "GET_LOCK", "1 name")
  bare("design", "sequence", "3 rows")
  add_symfony("PdoStore", { on = on, pid = pid, polls = 100, missing = none,
              args = function() return server.symfony() end }, "pdo_mysql", "php-mysql")
end

-- ----------------------------------------------------- PostgreSQL, redis

-- What bench/servers.sh has started.
local function started(called)
  local variable = "BENCH_" .. called:upper()
  local where, version = os.getenv(variable), os.getenv(variable .. "_VERSION")
  return where, os.getenv(variable .. "_PID"), where and called .. " " .. version or called
end

local function on_postgresql()
  local directory, pid, on = started "PostgreSQL"
  add { on = on, pid = pid, name = "advisory lock", client = "C", takes = "1 number",
        missing = not directory and "needs postgresql libpq-dev" or lacks_client("postgresql", "libpq-dev"),
        command = CLIENTS .. "/postgresql",
        args = function() return { "lock", "host=" .. directory .. " user=bench dbname=postgres" } end }
  add { on = on, pid = pid, name = "hierlock", client = "Lua", takes = "3 numbers",
        missing = not directory and "needs postgresql libpq-dev",
        command = LUA, args = function() return { "bench/loop.lua", "postgresql://bench@/postgres?host=" .. directory } end }
end

local function on_redis()
  local socket, pid, on = started "redis"
  local none = not socket and "needs redis-server libhiredis-dev"
  add { on = on, pid = pid, name = "SET NX", client = "C", takes = "1 name", polls = 100,
        missing = none or lacks_client("redis", "libhiredis-dev"),
        command = CLIENTS .. "/redis", args = function() return { socket } end }
  add_symfony("RedisStore", { on = on, pid = pid, polls = 100, missing = none,
              args = function() return { "bench/symfony.php", "redis", socket } end }, "redis", "php-redis")
end

without_server()
on_mysql("mysql", "MySQL")
on_mysql("mariadb", "MariaDB")
on_postgresql()
on_redis()
return peers
