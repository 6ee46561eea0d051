-- Grants a lease of all rows, or of none. A live holder blocks it, or an earlier waiter whose mode conflicts: so no
-- waiter is passed, and of two requests one is first, on all their nodes.
--
-- Answer: {1, token}; {0, ms}: look again when rung, or then; {2, ms}: nothing is granted until then, for amnesia;
-- {3}: this try was recalled.
local root, id, queues, channel = ARGV[2], ARGV[3], ARGV[4] == '1', ARGV[5]
local memory, run, start, durable, longest, seen =
  ARGV[6], ARGV[7], tonumber(ARGV[8]), ARGV[9] == '1', tonumber(ARGV[10]), ARGV[11] == '1'
local former, holder, secret, ttl = ARGV[12], ARGV[13], ARGV[14], tonumber(ARGV[15])
local owner, path, label, application, host, pid, mode = unpack(ARGV, 16, 22)
local roots, rows = ARGV[23], ARGV[24]
local now, now_us = clock()
local me = id .. '@' .. root

if redis.call('EXISTS', key(root, 'l', id)) == 1 then return { 3 } end
if former ~= '' then recall(root, former) end

local replication = redis.pcall('INFO', 'replication')
if type(replication) == 'string' and string.find(replication, 'role:slave', 1, true) then
  return redis.error_reply('READONLY this server has become a replica')
end
local till, least = remember(memory, run, place_of(replication), start, durable, longest, seen, now)
if not till then return redis.error_reply(FOREIGN) end
if till > now and not is_presence(id) then return { 2, till - now } end

local waiter = key(root, 'q', id)
local ticket = tonumber(redis.call('HGET', waiter, 'ticket') or nil)
local blocked, wait = false, 1000
-- Symfony wakes no waiter when it releases: a long waiter is late by a tenth of its wait, and never by more than 50 ms.
local since = tonumber(redis.call('HGET', waiter, 'since') or now)
local soon = math.max(5, math.min(50, math.floor((now - since) / 10)))
for row_mode, node, name in each_row(rows) do
  local ends
  if name and redis.call('TYPE', node).ok == 'string' then -- a lock of Symfony's before 5.2
    ends = now + soon
  else
    -- Symfony cuts the ms at which a time begins: its holder believes up to one longer.
    clean(node, row_mode, name and now - 1 or now)
    if row_mode == 'x' then
      ends = redis.call('ZRANGE', node, 0, 0, 'WITHSCORES')[2]
    else
      ends = redis.call('ZSCORE', node, '__write__')
    end
  end
  if ends then
    blocked = true
    wait = math.min(wait, tonumber(ends) - now + 1, name and soon or wait)
  elseif not name then
    local member, before = first(node, row_mode == 'x' and ':w' or ':x')
    if member and member ~= me and
       (not ticket or before < ticket or before == ticket and member < me) then blocked = true end
  end
  if blocked then break end
end

if blocked then
  if queues then
    if not ticket then
      ticket = number(roots, least, now_us)
      redis.call('HSET', waiter, 'ticket', text(ticket), 'channel', channel, 'owner', owner, 'path', path, 'label', label,
        'application', application, 'host', host, 'pid', pid, 'mode', mode, 'since', text(now))
    end
    redis.call('PEXPIRE', waiter, WAITER_MS)
    for row_mode, node, name in each_row(rows) do
      if name then break end
      redis.call('ZADD', node .. ':w', text(ticket), me)
      redis.call('PEXPIRE', node .. ':w', 10 * WAITER_MS)
      if row_mode == 'x' then
        redis.call('ZADD', node .. ':x', text(ticket), me)
        redis.call('PEXPIRE', node .. ':x', 10 * WAITER_MS)
      end
    end
  end
  return { 0, wait }
end

if ticket then
  for _, node, name in each_row(rows) do
    if name then break end
    redis.call('ZREM', node .. ':w', me)
    redis.call('ZREM', node .. ':x', me)
  end
  redis.call('DEL', waiter)
end
local token = number(roots, least, now_us)
set_end(root, id, rows, now + ttl + 1)
redis.call('HSET', key(root, 'l', id), 'holder', holder, 'secret', redis.sha1hex(secret), 'turn', '1', 'token', text(token),
  'rows', rows, 'owner', owner, 'path', path, 'label', label, 'application', application, 'host', host, 'pid', pid,
  'mode', mode, 'since', text(now))
longest_note(memory, id, ttl)
return { 1, token }
