-- How fast and how small hierlock is, and how it compares.
--
--   make bench            everything
--   bench/run.lua NAME…   embedded, mysql, mariadb: its goals (goals.lua)
--                         waiting: what it costs not to block (goals.lua)
--                         peers: the table and the picture (compare.lua, peers.lua)

local goals = require "bench.goals"

local run = { embedded = goals.embedded, mysql = goals.mysql, mariadb = goals.mariadb, waiting = goals.waiting,
              peers = function() require "bench.compare"() end }
local names = #arg > 0 and arg or { "embedded", "mysql", "mariadb", "waiting", "peers" }
for _, name in ipairs(names) do
  assert(run[name], "unknown: " .. name)()
end
