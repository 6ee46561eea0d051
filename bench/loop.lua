-- What bare.c does, through hierlock: reads numbers from standard input; for
-- each it runs as many cycles of acquire + release of a resource, and prints the
-- microseconds of one.
--
--   loop.lua DSN [buckets [held]]       held: so many other locks are held
local uv = require "luv"
local hierlock = require "hierlock"

local dsn, buckets, held = arg[1], tonumber(arg[2]), tonumber(arg[3] or 0)
local manager = assert(hierlock.open(dsn, { buckets = buckets }))
local others = {}
local tried = 0
while #others < held do -- of 10,000 a few share a bucket with another
  tried = tried + 1
  others[#others + 1] = manager:acquire_resource("other" .. tried, "a", "r", { timeout = 0 })
end

-- Ids as a program has them: made before they are locked; none shares a bucket
-- with what is held.
local paths = {}
while #paths < 2000 do
  tried = tried + 1
  local path = { "user" .. tried, "account" .. tried, "resource" .. tried }
  local handle = manager:acquire(path, { timeout = 0 })
  if handle then
    handle:release()
    paths[#paths + 1] = path
  end
end

math.randomseed(1)
for line in io.lines() do
  local n = tonumber(line)
  if not n or n < 1 then break end
  local start = uv.hrtime()
  for _ = 1, n do
    local path = paths[math.random(2000)]
    local handle = assert(manager:acquire_resource(path[1], path[2], path[3]))
    handle:release()
  end
  io.write(("%.2f\n"):format((uv.hrtime() - start) / 1e3 / n))
  io.flush()
end
manager:close()
