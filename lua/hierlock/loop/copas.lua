--- The loop of copas.
--
-- Copas has no function that waits for a descriptor: it waits in copas.receive, for a
-- socket whose `receive` says "timeout". Sockets may be objects of others (LuaSec's
-- are), known by their methods, and LuaSocket's `select` asks them for `getfd` and
-- `dirty`. So this makes a socket of the pending. All of it is in the documented
-- interface of every version, which its queues are not. A thread that calls
-- copas.sleep again and again would wake too late, and for nothing.

local copas = require "copas"
local socket = require "socket"

return function(pending)
  local fd, err = pending:fd()
  if not fd then return nil, err end
  -- Refuse it here: `select` would raise in the main loop.
  if fd >= (socket._SETSIZE or math.huge) then
    error(("hierlock: descriptor %d is too large for LuaSocket's select"):format(fd), 0)
  end
  local waiter = {
    getfd = function() return fd end,
    dirty = function() return false end,
    -- Copas 1 closes what a thread has waited for last.
    close = function() end,
    receive = function()
      if not pending or pending:done() then return "done" end
      return nil, "timeout"
    end,
  }
  -- A time-out of copas's own ends only one turn: how long, the pending knows.
  while not pending:done() do copas.receive(waiter) end
  -- Copas remembers the last socket, and would keep the pending, and its manager.
  pending = nil
end
