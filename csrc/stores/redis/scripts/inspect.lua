-- How long it lasts: {1, ms}.
local root, id, holder, token = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local why = lost(root, id, holder, token)
if why then return why end
return { 1, math.max(0, tonumber(redis.call('HGET', key(root, 'l', id), 'ends')) - clock() - 1) }
