-- The compared locks: hierlock on each of its stores, and other locks on this
-- machine. To add a peer: an entry of MEANS, and one `add` below. A client in C
-- implements client.h (its libraries stand in the Makefile, BENCH_LIBRARIES); a
-- client in another language speaks as client.c says. Fields:
--
--   on        the heading: the server, or no server
--   name      the name of the lock
--   client    the language of the client
--   takes     the nodes that an operation locks
--   polls     milliseconds between two tries of a waiter, at most; absent, it is woken
--   varies    milliseconds by which the waits differ, at most, if not `polls`
--   command, args   how to run the client; args is a function
--   pid       the server's, to give it a CPU of its own
--   missing   why it can't run here; nil or false if it can

local uv = require "luv"
local servers = require "bench.mysql"
local symfony = require "bench.symfony"

local CLIENTS = os.getenv("BENCH_CLIENTS")
local FILES = os.getenv("BENCH_FILES")
local LUA = os.getenv("HIERLOCK_LUA") or "lua5.4"

-- For each kind of lock: its object, and when it ends by itself.
local LEASE = " s after it was taken or renewed, though its holder may still be at work"
local MEANS = {
  ["hierlock, embedded"] = "a path: ancestors shared, the node exclusive or shared; ends with the process",
  ["hierlock"] = "a path, as above; ends with the connection, or 30 s after the holder's machine vanished",
  ["hierlock, lease"] = "a path, as above; a record that ends when its time is up, also of a holder that is still at work; its release is sent, " ..
    "and not waited for",
  ["hierlock, lease on disk"] = "a lease; what was answered survives a power failure",
  ["hierlock, quorum"] = "a lease, granted by two of three stores at least (here three databases of one server)",
  ["hierlock, with Symfony"] = "a path, as above, and each node by Symfony's name for it; ends with the process or the connection",
  ["hierlock, lease, with Symfony"] = "a lease, and each node by Symfony's name for it",
  ["flock(2)"] = "a file, exclusive or shared; ends with the process",
  ["flock(1)"] = "the same, by a process for each lock, as in a shell script",
  ["GET_LOCK"] = "a name, exclusive; ends with the connection",
  ["sequence"] = "hierlock's rows by SET, START TRANSACTION, three SELECTs, ROLLBACK; ends with the connection",
  ["advisory lock"] = "a number, exclusive or shared; ends with the connection",
  ["SET NX"] = "a name, exclusive; ends 30" .. LEASE,
  ["redis-py Lock"] = "a name, exclusive; ends 30" .. LEASE,
  ["Symfony FlockStore"] = "a file, exclusive or shared; ends with the process",
  ["Symfony PdoStore"] = "a name, exclusive, by INSERT and DELETE of a row; ends 300" .. LEASE,
  ["Symfony PostgreSqlStore"] = "a number made of a name, exclusive or shared; ends with the connection",
  ["Symfony RedisStore"] = "a name, exclusive or shared; ends 300" .. LEASE,
  ["Symfony MemcachedStore"] = "a name, exclusive; ends 300" .. LEASE,
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

local function add_symfony(store, peer, extension, package)
  peer.name, peer.client, peer.takes, peer.command = "Symfony " .. store, "PHP", "1 name", "php"
  peer.missing = peer.missing or symfony.missing(extension, package)
  add(peer)
end

local function add_hierlock(name, peer)
  peer.name, peer.client, peer.takes, peer.command = name, "Lua", peer.takes or "3 rows", LUA
  add(peer)
end

local function loop(dsn, how, interoperate) return { "bench/loop.lua", dsn, "10000000", "0", how, interoperate } end

-- ------------------------------------------------------------- no server

local function without_server()
  local on = "no server"
  add_hierlock("hierlock, embedded", { on = on, args = function() return loop("file:" .. FILES .. "/hierlock") end })
  add_hierlock("hierlock, lease", { on = on, args = function() return loop("file:" .. FILES .. "/leases", "sent") end })
  add_hierlock("hierlock, with Symfony", { on = on, args = function()
    assert(uv.fs_mkdir(FILES .. "/flock", tonumber("700", 8)))
    return loop("flock://" .. FILES .. "/flock")
  end })
  add { on = on, name = "flock(2)", client = "C", takes = "1 file", command = CLIENTS .. "/flock",
        args = function() return { FILES } end }
  add { on = on, name = "flock(1)", client = "C", takes = "1 file", command = CLIENTS .. "/flock",
        missing = output("command -v flock") == "" and "needs util-linux",
        args = function() return { FILES, "command" } end }
  add_symfony("FlockStore", { on = on, args = function() return { "bench/symfony.php", "flock", FILES } end },
              "standard", "php-cli")
end

-- --------------------------------------------------------------- SQLite

-- On a disk, as in production, and without waiting for the disk.
local function on_sqlite()
  local on = "SQLite, a file"
  local lacks = lacks_client("sqlite", "libsqlite3-dev")
  local function path(name) return ("%s/%s-%d.db"):format(os.getenv "BENCH_SQLITE" or FILES, name, uv.os_getpid()) end
  local function lease(name, synchronous)
    add_hierlock(name, { on = on, missing = lacks, args = function()
      local dsn = "sqlite:" .. path(synchronous)
      assert(require("hierlock").open(dsn)):close()
      return loop(dsn .. "?synchronous=" .. synchronous, "sent")
    end })
  end
  lease("hierlock, lease", "normal")
  lease("hierlock, lease on disk", "full")
  add_symfony("PdoStore", { on = on, polls = 100, args = function() return { "bench/symfony.php", "pdo", "sqlite:" .. path "symfony" } end },
              "pdo_sqlite", "php-sqlite3")
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
  add_hierlock("hierlock, lease", { on = on, pid = pid, varies = 100, missing = lacks_library, args = function()
    server.lease()
    return server.leased("socket", "0", "sent")
  end })
  bare("getlock", "GET_LOCK", "1 name")
  bare("design", "sequence", "3 rows")
  add_symfony("PdoStore", { on = on, pid = pid, polls = 100, missing = none,
              args = function() return server.symfony() end }, "pdo_mysql", "php-mysql")
end

-- ----------------------------------------------------- PostgreSQL, redis

-- The servers that bench/servers.sh has started.
local function started(called)
  local variable = "BENCH_" .. called:upper()
  local where, version = os.getenv(variable), os.getenv(variable .. "_VERSION")
  return where, os.getenv(variable .. "_PID"), where and called .. " " .. version or called
end

-- Leases do not wait for the disk there: no other server does.
local function lease_database(directory)
  os.execute(("createdb -h %s -U bench peers && psql -q -h %s -U bench -c 'ALTER DATABASE peers SET synchronous_commit=off' peers")
             :format(directory, directory))
  local url = "postgresql://bench@/peers?host=" .. directory
  local connection = assert(require("hierlock.store.postgresql").connect(url, "bench"))
  assert(connection:query(require("hierlock.command.lease_tables").postgresql()))
  connection:close()
  return url
end

local function on_postgresql()
  local directory, pid, on = started "PostgreSQL"
  local lacks = not directory and "needs postgresql libpq-dev" or lacks_client("postgresql", "libpq-dev")
  local function hierlock(name, args, varies)
    add_hierlock(name, { on = on, pid = pid, varies = varies, takes = "3 numbers", missing = lacks, args = args })
  end
  hierlock("hierlock", function() return loop("postgresql://bench@/postgres?host=" .. directory) end)
  hierlock("hierlock, lease", function() return loop(lease_database(directory), "sent") end, 25)
  hierlock("hierlock, with Symfony", function()
    return loop(("pgsql+advisory:host=%s;dbname=postgres;user=bench"):format(directory))
  end)
  add { on = on, pid = pid, name = "advisory lock", client = "C", takes = "1 number", missing = lacks,
        command = CLIENTS .. "/postgresql",
        args = function() return { "lock", "host=" .. directory .. " user=bench dbname=postgres" } end }
  add_symfony("PostgreSqlStore", { on = on, pid = pid, missing = not directory and lacks, args = function()
    return { "bench/symfony.php", "pgsql", ("pgsql:host=%s;dbname=postgres"):format(directory), "bench" }
  end }, "pdo_pgsql", "php-pgsql")
end

-- ----------------------------------------------------- redis, memcached

-- The server has only just started, so no program had a lock before.
local function on_redis()
  local socket, pid, on = started "redis"
  local none = not socket and "needs redis-server libhiredis-dev"
  local lacks = none or lacks_client("redis", "libhiredis-dev")
  local function dsn(database) return ("redis+unix://%s?quarantine=0&database=%d"):format(socket, database) end
  add_hierlock("hierlock, lease", { on = on, pid = pid, missing = lacks, args = function() return loop(dsn(0), "sent") end })
  add_hierlock("hierlock, quorum", { on = on, pid = pid, missing = lacks, args = function()
    return loop(("quorum:majority;%s;%s;%s"):format(dsn(1), dsn(2), dsn(3)), "sent")
  end })
  add_hierlock("hierlock, lease, with Symfony", { on = on, pid = pid, missing = lacks, args = function()
    return loop(dsn(0), "sent", "symfony")
  end })
  add { on = on, pid = pid, name = "SET NX", client = "C", takes = "1 name", polls = 100, missing = lacks,
        command = CLIENTS .. "/redis", args = function() return { socket, "recipe" } end }
  add { on = on, pid = pid, name = "redis-py Lock", client = "Python", takes = "1 name", polls = 100, command = "/usr/bin/python3",
        missing = none or symfony.lacks_redis_py(), args = function() return { "bench/redis_lock.py", socket } end }
  add_symfony("RedisStore", { on = on, pid = pid, polls = 100, missing = none,
              args = function() return { "bench/symfony.php", "redis", socket } end }, "redis", "php-redis")
end

-- The server of spec/support/servers.sh, which has no socket: over TCP.
local function on_memcached()
  local dsn, pid = os.getenv "HIERLOCK_MEMCACHED_DSN", os.getenv "HIERLOCK_MEMCACHED_PID"
  local none = not dsn and "needs memcached"
  local on = none and "memcached" or "memcached " .. output("memcached --version"):match "[%d.]+" .. ", TCP"
  add_hierlock("hierlock, lease", { on = on, pid = pid, polls = 25, missing = none, args = function() return loop(dsn, "sent") end })
  add_symfony("MemcachedStore", { on = on, pid = pid, polls = 100, missing = none, args = function()
    return { "bench/symfony.php", "memcached", dsn:match "^memcached://([^:]+):(%d+)" }
  end }, "memcached", "php-memcached")
end

without_server()
on_sqlite()
on_mysql("mysql", "MySQL")
on_mysql("mariadb", "MariaDB")
on_postgresql()
on_redis()
on_memcached()
return peers
