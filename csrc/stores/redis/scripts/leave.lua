-- A waiter waits no longer.
local root, id, rows = ARGV[2], ARGV[3], ARGV[4]
local me = id .. '@' .. root
redis.call('DEL', key(root, 'q', id))
for mode, node, name in each_row(rows) do
  if name then break end
  redis.call('ZREM', node .. ':x', me)
  if redis.call('ZREM', node .. ':w', me) == 1 then ring_next(node, mode) end
end
return { 1 }
