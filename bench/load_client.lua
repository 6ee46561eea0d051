-- A client of many that want the same account: speaks with contest.lua as client.c
-- does. Usage:
--
--   load_client.lua DSN BUCKETS
--
-- The line "AT UNTIL" has nanoseconds of the machine's clock. From AT to UNTIL the client takes and
-- releases the account again and again. The client answers with its waits, in
-- microseconds.
local uv = require "luv"
local hierlock = require "hierlock"

local manager = assert(hierlock.open(arg[1], { buckets = tonumber(arg[2]), timeout = 60 }))
manager:acquire({ "user", "of " .. uv.os_getpid() }):release() -- connected
for line in io.lines() do
  local at, until_ = line:match("(%d+) (%d+)")
  local waits = {}
  repeat uv.sleep(1) until uv.hrtime() >= tonumber(at)
  while uv.hrtime() < tonumber(until_) do
    local began = uv.hrtime()
    local handle = assert(manager:acquire { "user", "account" })
    waits[#waits + 1] = ("%.0f"):format((uv.hrtime() - began) / 1e3)
    handle:release()
  end
  io.write(table.concat(waits, " "), "\n")
  io.flush()
end
manager:close()
