-- hierlock as a client of the bench: speaks with contest.lua as client.c does.
-- The client locks a resource: three rows. Usage:
--
--   loop.lua DSN [buckets [held [start|lease|sent|refresh|import|beside [interoperate]]]]
--
-- held: The client holds so many other locks.
-- start: The client starts acquisitions and waits for them.
-- lease: The locks are leases, of fifty users, and the client waits for their release.
-- sent: The locks are such leases, and the client does not wait for their release.
-- refresh: The client refreshes a lease.
-- import: The client exports and imports a lease.
-- beside: Another program holds a lease somewhere else.
local uv = require "luv"
local hierlock = require "hierlock"

local dsn, buckets, held = arg[1], tonumber(arg[2]), tonumber(arg[3] or 0)
local how, lease, confirmed = arg[4], { ttl = 60 }, { confirm = true }
local leases = how == "lease" or how == "sent"
local manager = assert(hierlock.open(dsn, { buckets = buckets, interoperate = arg[5] }))
local others = {}
local beside = how == "beside" and assert(manager:acquire({ "beside", "a", "r" }, { ttl = 3600 }))
local tried = 0
while #others < held do -- of 10,000 a few share a bucket with another
  tried = tried + 1
  others[#others + 1] = manager:acquire_resource("other" .. tried, "a", "r", { timeout = 0 })
end

-- The client makes the ids before it locks them, as a program does. No id shares
-- a bucket with a held lock.
local paths = {}
while #paths < 2000 do
  tried = tried + 1
  local path = { "user" .. (leases and tried % 50 or tried), "account" .. tried, "resource" .. tried }
  local handle = manager:acquire(path, { timeout = 0 })
  if handle then
    handle:release()
    paths[#paths + 1] = path
  end
end

local kept
local cycle = ({
  start = function(path) assert(manager:start(path)):wait():release() end,
  lease = function(path) assert(manager:acquire(path, lease)):release(confirmed) end,
  sent = function(path) assert(manager:acquire(path, lease)):release() end,
  refresh = function()
    kept = kept or assert(manager:acquire({ how, "a", "r" }, lease))
    assert(kept:refresh())
  end,
  import = function()
    kept = kept or assert(manager:acquire({ how, "a", "r" }, lease))
    kept = assert(manager:import(assert(kept:export())))
  end,
})[how] or function(path) assert(manager:acquire(path)):release() end

local function cycles(n)
  local start = uv.hrtime()
  for _ = 1, n do cycle(paths[math.random(2000)]) end
  return (uv.hrtime() - start) / 1e3 / n
end

math.randomseed(1)
local handed_over
for line in io.lines() do
  local began = uv.hrtime()
  if line == "take" then
    handed_over = assert(manager:acquire_resource("u", "a", "handover", leases and lease or nil))
    io.write(("%.0f %.0f\n"):format(began, uv.hrtime()))
  elseif line == "give" then
    handed_over:release()
    io.write(("%.0f\n"):format(began))
  else
    io.write(("%.2f\n"):format(cycles(assert(tonumber(line)))))
  end
  io.flush()
end
if beside then beside:release { confirm = true } end
manager:close()
