-- This tree beside another of hierlock, which is built already: BEFORE=DIRECTORY make bench BENCH=versions.
-- Both acquire and release on the same servers, in turn, each in tables, keys or files of its own.

local contest = require "bench.contest"
local uv = require "luv"

local LUA = os.getenv "HIERLOCK_LUA"
local BUILT = assert(os.getenv "BENCH_CLIENTS", "run it by `make bench`"):match "build/[^/]+"
local HERE = uv.cwd()

-- The program's arguments, run with the modules of that tree. env: further NAME=VALUE.
local function arguments(tree, env, ...)
  return { "LUA_PATH=" .. ("%s/lua/?.lua;%s/lua/?/init.lua;;"):format(tree, tree),
           "LUA_CPATH=" .. ("%s/%s/?.so;;"):format(tree, BUILT), env, LUA, ... }
end

local function run(command, args)
  local status
  uv.spawn(command, { args = args, stdio = { nil, nil, 2 } }, function(code) status = code end)
  while not status do uv.run "once" end
  assert(status == 0, table.concat(args, " "))
end

local function provision(tree, dsn)
  run("env", arguments(tree, "HIERLOCK_DSN=" .. dsn, tree .. "/lua/hierlock/command/main.lua", "provision", "--leases", "--quiet",
                       "--buckets", "10000"))
end

-- What a client of `tree` is told on that store; name: "before" or "now". nil: the store is not there.
local stores = {
  { "null", function() return "null:" end },
  { "file", function(name) return ("file:%s/%s"):format(os.getenv "BENCH_FILES", name) end, leases = true },
  { "sqlite", function(name) return ("sqlite:%s/%s.db"):format(os.getenv "BENCH_SQLITE", name) end, leases = "only" },
  { "redis", function(name)
    local socket = os.getenv "BENCH_REDIS"
    return socket and ("redis+unix://%s?quarantine=0&prefix=%s_"):format(socket, name)
  end, leases = "only" },
  { "memcached", function(name)
    local dsn = os.getenv "HIERLOCK_MEMCACHED_DSN"
    return dsn and ("%s?prefix=%s_"):format(dsn, name)
  end, leases = "only" },
  { "postgresql", function(name, tree)
    local directory = os.getenv "BENCH_POSTGRESQL"
    if not directory then return nil end
    local dsn = ("postgresql://bench@/%s?host=%s"):format(name, directory)
    run("createdb", { "-h", directory, "-U", "bench", name })
    provision(tree, dsn)
    return dsn
  end, leases = true },
}
for _, server in ipairs { "mysql", "mariadb" } do
  stores[#stores + 1] = { server, function(name, tree)
    local prefix = "HIERLOCK_" .. server:upper()
    local dsn = os.getenv(prefix .. "_DSN")
    if not dsn then return nil end
    local table_of = ("?table=version_%s_buckets"):format(name)
    provision(tree, os.getenv(prefix .. "_ROOT_DSN"):gsub("/[^/]*$", dsn:match "/[^/]*$") .. table_of)
    return dsn .. table_of .. "&tls=off"
  end, leases = true }
end

local function compare(title, dsns, trees, how)
  local clients = {}
  for i, tree in ipairs(trees) do
    clients[i] = contest.client(title, "env", arguments(tree, "TREE=" .. tree, HERE .. "/bench/loop.lua", dsns[i], "10000", "0", how))
  end
  contest.alternate(clients, nil, 100)
  for _, client in ipairs(clients) do client.close() end
  local before, now = contest.median(clients[1].results), contest.median(clients[2].results)
  print(("  %-20s %9.2f us before %9.2f us now  x%.2f"):format(title, before, now, now / before))
end

return function()
  local trees = { assert(os.getenv "BEFORE", "BEFORE names the directory of another version, built by make"), HERE }
  print "\nacquire + release of a resource, from Lua, before and now"
  for _, store in ipairs(stores) do
    local name, dsn_of = store[1], store[2]
    local dsns = { dsn_of("before", trees[1]), dsn_of("now", trees[2]) }
    if not dsns[2] then
      print(name .. ": no server; left out")
    else
      if store.leases ~= "only" then compare(name, dsns, trees, "lock") end
      if store.leases then compare(name .. ", lease", dsns, trees, "lease") end
    end
  end
end
