-- The lease is given back.
local root, id, holder = ARGV[2], ARGV[3], ARGV[4]
local why = lost(root, id, holder)
if why then return why end
drop(root, id)
return { 1 }
