--- The loop of luv: libuv's, for coroutines that its callbacks resume.

local uv = require "luv"

return function(pending)
  local thread = coroutine.running()
  local fd, err = pending:fd()
  if not fd then return nil, err end
  local poll = assert(uv.new_poll(fd))
  -- The poll handle keeps the pending, and with it the descriptor, for as long as it is open.
  local started, why = poll:start("r", function()
    poll:close()
    -- A coroutine that was closed meanwhile wants no lock any more.
    if coroutine.status(thread) ~= "suspended" then return pending:cancel() end
    local ok, raised = coroutine.resume(thread)
    if ok then return end
    -- luv prints it, and ends the process, as it does for any callback.
    if type(raised) == "string" then raised = debug.traceback(thread, raised) end
    error(raised, 0)
  end)
  if not started then
    poll:close()
    error(why, 0)
  end
  while not pending:done() do coroutine.yield() end
  if not poll:is_closing() then poll:close() end
end
