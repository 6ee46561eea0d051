-- The lease ends ttl from now. Makes nothing: where a part of it is missing, it is lost. A refresh that was sent
-- before another one but is read after it does nothing.
local root, id, holder, ttl, turn = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local why = lost(root, id, holder, tonumber(ARGV[9]))
if why then return why end
local lease = key(root, 'l', id)
if may_be_stale(ARGV[7], ARGV[8], tonumber(redis.call('HGET', lease, 'ends'))) then
  drop(root, id)
  return { 0, 'gone' }
end
if turn <= tonumber(redis.call('HGET', lease, 'turn')) then return { 0, 'late' } end
-- A server whose memory is full (OOM) carries out all of a script that has begun with what needs none: so it refreshes.
redis.call('PEXPIREAT', lease, text(clock() + ttl + GRACE))
redis.call('HSET', lease, 'turn', text(turn))
set_end(root, id, redis.call('HGET', lease, 'rows'), (clock()) + ttl + 1)
longest_note(ARGV[7], id, ttl)
return { 1 }
