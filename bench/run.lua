-- How fast and how small hierlock is, and how it compares. Usage:
--
--   make bench            everything
--   bench/run.lua NAME…   embedded, mysql, mariadb, postgresql, redis, sqlite, memcached: its goals (goals.lua)
--                         leases: of mysql and mariadb, only those of leases
--                         waiting: what it costs not to block (goals.lua)
--                         line: over a slow line, which is what users have (goals.lua)
--                         peers: the table and the picture (compare.lua, peers.lua)
--                         load: very many clients, locks, waiters (load.lua)
--                         versions: beside another version, which BEFORE names (versions.lua); only when asked for

local goals = require "bench.goals"

local run = { embedded = goals.embedded, mysql = goals.mysql, mariadb = goals.mariadb, waiting = goals.waiting, line = goals.line,
              postgresql = goals.postgresql, redis = goals.redis, sqlite = goals.sqlite, memcached = goals.memcached,
              leases = goals.leases,
              peers = function() require "bench.compare"() end, load = function() require "bench.load"() end,
              versions = function() require "bench.versions"() end }
local names = #arg > 0 and arg or
  { "embedded", "mysql", "mariadb", "postgresql", "redis", "sqlite", "memcached", "line", "waiting", "peers", "load" }
for _, name in ipairs(names) do
  assert(run[name], "unknown: " .. name)()
end
