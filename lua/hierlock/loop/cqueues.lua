--- The loop of cqueues.

local cqueues = require "cqueues"

return function(pending)
  -- One without a descriptor would be polled for ever.
  local fd, err = pending:fd()
  if not fd then return nil, err end
  while not pending:done() do cqueues.poll(pending) end
end
