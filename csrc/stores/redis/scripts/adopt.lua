-- A new holder, who knows the secret: {1, token}. The call names the holder that gives the lease away; where another
-- holds it the answer is {1, -1, holder}. So an import that was given up, and comes late, changes nothing.
local root, id, holder, secret, ttl, rows = ARGV[2], ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6]), ARGV[7]
local lease = key(root, 'l', id)
local found = redis.call('HMGET', lease, 'secret', 'rows', 'token', 'ends', 'holder')
if not found[1] or found[1] ~= redis.sha1hex(secret) then return { 0, 'gone' } end
local why = lost(root, id)
if why then return why end
if may_be_stale(ARGV[11], ARGV[12], tonumber(found[4])) then
  drop(root, id)
  return { 0, 'gone' }
end
if found[2] ~= rows then return { 0, 'mismatch' } end
if found[5] ~= ARGV[13] then return { 1, -1, found[5] } end
redis.call('PEXPIREAT', lease, text(clock() + ttl + GRACE)) -- first: see refresh.lua
redis.call('HSET', lease, 'holder', holder, 'turn', '0', 'application', ARGV[8], 'host', ARGV[9], 'pid', ARGV[10])
set_end(root, id, rows, (clock()) + ttl + 1)
longest_note(ARGV[11], id, ttl)
return { 1, tonumber(found[3]) }
