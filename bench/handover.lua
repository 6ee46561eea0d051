-- The waiter of the hand-over bench: for each line that it reads, it waits for
-- the lock, and prints the nanoseconds of the clock when it came back.
local uv = require "luv"
local manager = assert(require "hierlock".open(arg[1]))
for _ in io.lines() do
  local handle = assert(manager:acquire_resource("u", "a", "handover"))
  local now = uv.hrtime()
  handle:release()
  io.write(("%d\n"):format(now))
  io.flush()
end
