--- The store that grants everything.

local null = {}

--- Works like the function of hierlock.command.examine.mysql. There is nothing to try.
function null.examine(_, found)
  found:add("store", "warning", "it grants everything at once", "It is for tests of the calling program: it excludes no one.",
    "another DSN, file: say, where a lock is to exclude")
  return false
end

return null
