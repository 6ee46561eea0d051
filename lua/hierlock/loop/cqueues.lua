--- The loop of cqueues.

local cqueues = require "cqueues"

return function(pending)
  -- cqueues would poll a pending without a descriptor for ever.
  local fd, err = pending:fd()
  if not fd then return nil, err end
  while not pending:done() do cqueues.poll(pending) end
end
