-- Rows of a lease come to be in another mode: all of `rows`, or none; `whole`: all that it has, as they then are.
-- Made exclusive: when no other lease holds them. The waiters for them wait for this lease, so it passes them: its
-- ticket is before all others. Made shared: at once.
--
-- A repeated call changes nothing more. But an upgrade of exclusive rows gives a new token: an earlier downgrade,
-- whose answer no caller awaits any more, may be read late, and knows only the old token.
--
-- Answers like take.lua; or says why there is no such lease.
local root, id, holder, queues, channel = ARGV[2], ARGV[3], ARGV[4], ARGV[5] == '1', ARGV[6]
local memory, run, start, durable, longest, seen =
  ARGV[7], ARGV[8], tonumber(ARGV[9]), ARGV[10] == '1', tonumber(ARGV[11]), ARGV[12] == '1'
local path, label, application, host, pid, mode = unpack(ARGV, 13, 18)
local roots, rows, whole, token = ARGV[19], ARGV[20], ARGV[21], tonumber(ARGV[22])
local now, now_us = clock()
local me = id .. '@' .. root
local lease, waiter = key(root, 'l', id), key(root, 'q', id)

local why = lost(root, id, holder, token)
if why then return why end
local found = redis.call('HMGET', lease, 'ends', 'rows', 'token')
local ends = tonumber(found[1])
-- A take that meets an expired lease deletes it. So does this, as others may have had the nodes since.
if ends <= now then
  drop(root, id)
  return { 0, 'gone' }
end
local upgrades, already = string.sub(rows, 1, 1) == 'x', found[2] == whole
if not upgrades then
  if already then return { 1, tonumber(found[3]) } end
  -- The downgrade was sent before an upgrade, and is read behind it: no caller awaits the answer.
  if tonumber(found[3]) ~= token then return { 1, tonumber(found[3]) } end
  -- In this order: see refresh.lua.
  for _, node in each_row(rows) do
    redis.call('ZREM', node, '__write__')
    ring_next(node, 'x')
  end
  redis.call('HSET', lease, 'rows', whole, 'mode', mode)
  return { 1, tonumber(found[3]) }
end

local replication = redis.pcall('INFO', 'replication')
if type(replication) == 'string' and string.find(replication, 'role:slave', 1, true) then
  return redis.error_reply('READONLY this server has become a replica')
end
-- The server may have forgotten leases that share it.
local till, least = remember(memory, run, place_of(replication), start, durable, longest, seen, now)
if not till then return redis.error_reply(FOREIGN) end
if till > now then return { 2, till - now } end

local blocked, wait = false, 1000
for _, node in each_row(rows) do
  clean(node, 'x', now)
  for _, member in ipairs(redis.call('ZRANGE', node, 0, 1)) do
    if member ~= me and not already then
      blocked = true
      wait = math.min(wait, score(node, member) - now + 1)
    end
  end
end

if blocked then
  if queues then
    if redis.call('EXISTS', waiter) == 0 then
      redis.call('HSET', waiter, 'ticket', '0', 'channel', channel, 'owner', '', 'path', path, 'label', label,
        'application', application, 'host', host, 'pid', pid, 'mode', mode, 'since', text(now))
    end
    redis.call('PEXPIRE', waiter, WAITER_MS)
    for _, node in each_row(rows) do
      for _, set in ipairs { ':w', ':x' } do
        redis.call('ZADD', node .. set, '0', me) -- the first: whoever gives the node back rings it
        redis.call('PEXPIRE', node .. set, 10 * WAITER_MS)
      end
    end
  end
  return { 0, wait }
end

for _, node in each_row(rows) do
  redis.call('ZREM', node .. ':w', me)
  redis.call('ZREM', node .. ':x', me)
end
redis.call('DEL', waiter)
token = number(roots, least, now_us)
for _, node in each_row(rows) do
  redis.call('ZADD', node, text(ends), '__write__')
  outlive(node)
end
redis.call('HSET', lease, 'rows', whole, 'mode', mode, 'token', text(token))
return { 1, token }
