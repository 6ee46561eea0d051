--- The loop of Tarantool, for its fibers. A fiber is no coroutine that Lua could yield: each has a C stack of its
-- own, so socket.iowait lets the others run from wherever it is called.

local socket = require "socket"

return function(pending)
  local fd, err = pending:fd()
  if not fd then return nil, err end
  while not pending:done() do socket.iowait(fd, "R") end
end
