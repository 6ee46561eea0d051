--- The loop of luv: libuv's, for coroutines that its callbacks resume.

local uv = require "luv"

return function(pending)
  local thread = coroutine.running()
  local fd, err = pending:fd()
  if not fd then error(err, 0) end
  local poll = assert(uv.new_poll(fd))
  poll:start("r", function()
    poll:close()
    local ok, raised = coroutine.resume(thread)
    if not ok then error(raised, 0) end
  end)
  while not pending:done() do coroutine.yield() end
  if not poll:is_closing() then poll:close() end
end
