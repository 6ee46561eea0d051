-- Gives the lease back. {1, 'gone'}: an earlier script was sent, and the lease is not there.
local root, id, holder, again = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
if again == '1' and redis.call('EXISTS', key(root, 'l', id)) == 0 then return { 1, 'gone' } end
local why = lost(root, id, holder)
if why then return why end
drop(root, id)
return { 1 }
