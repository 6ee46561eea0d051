--- The loop of cqueues.

local cqueues = require "cqueues"

return function(pending)
  while not pending:done() do cqueues.poll(pending) end
end
