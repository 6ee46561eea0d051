-- Grants a lease of all rows, or of none. Blocked by a live holder, or by an earlier waiter that wants what
-- excludes: so nobody is passed by, and of two requests one is first, on all their nodes.
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

-- Whether leases that somebody believes in may have been forgotten. Of what a server has forgotten, only it or a client
-- can know: its run id has changed since it was last written here, or there is nothing and there should be.
local known = redis.call('HMGET', memory, 'run', 'until', 'longest', 'least')
local least = tonumber(known[4] or 0) -- see raise.lua
if known[1] ~= run and longest > 0 then -- 0: the program wants to know nothing of it, and must not tell others
  local last = math.max(longest, tonumber(known[3] or 0))
  local till = 0
  if known[1] then
    if not durable then till = (start or now) + last + 1 end
  else
    local stats = redis.pcall('INFO', 'commandstats')
    local emptied = type(stats) == 'string' and
      (string.find(stats, 'cmdstat_flushall:', 1, true) or string.find(stats, 'cmdstat_flushdb:', 1, true))
    till = ((seen or emptied) and now or start or now) + last + 1
    if till <= now then last = 0 end
  end
  redis.call('HSET', memory, 'run', run, 'until', text(till), 'longest', text(last))
  known = { run, till, last }
end
local till = known[1] == run and tonumber(known[2] or 0) or 0
if till > now then return { 2, till - now } end

-- The number after all that these trees have given: it is taken from the clock, so it grows even where they have
-- forgotten the last. Where it is ahead of the clock they keep it for so much longer.
local function number()
  local n = math.max(now_us, least + 1)
  for tag in string.gmatch(roots, '%x+') do
    local before = tonumber(redis.call('GET', key(tag, 'n')) or 0)
    if before >= n then n = before + 1 end
  end
  local kept = 86400000 + math.ceil((n - now_us) / 1000)
  for tag in string.gmatch(roots, '%x+') do redis.call('SET', key(tag, 'n'), text(n), 'PX', text(kept)) end
  return n
end

local waiter = key(root, 'q', id)
local ticket = tonumber(redis.call('HGET', waiter, 'ticket') or nil)
local blocked, wait = false, 1000
for row_mode, node in each_row(rows) do
  clean(node, row_mode, now)
  local ends
  if row_mode == 'x' then
    ends = redis.call('ZRANGE', node, 0, 0, 'WITHSCORES')[2]
  else
    ends = redis.call('ZSCORE', node, '__write__')
  end
  if ends then
    blocked = true
    wait = math.min(wait, tonumber(ends) - now + 1)
  else
    local member, before = first(node, row_mode == 'x' and ':w' or ':x')
    if member and member ~= me and
       (not ticket or before < ticket or before == ticket and member < me) then blocked = true end
  end
  if blocked then break end
end

if blocked then
  if queues then
    if not ticket then
      ticket = number()
      redis.call('HSET', waiter, 'ticket', text(ticket), 'channel', channel, 'owner', owner, 'path', path, 'label', label,
        'application', application, 'host', host, 'pid', pid, 'mode', mode, 'since', text(now))
    end
    redis.call('PEXPIRE', waiter, WAITER_MS)
    for row_mode, node in each_row(rows) do
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
  for _, node in each_row(rows) do
    redis.call('ZREM', node .. ':w', me)
    redis.call('ZREM', node .. ':x', me)
  end
  redis.call('DEL', waiter)
end
local token = number()
set_end(root, id, rows, now + ttl + 1)
redis.call('HSET', key(root, 'l', id), 'holder', holder, 'secret', redis.sha1hex(secret), 'turn', '1', 'token', text(token),
  'rows', rows, 'owner', owner, 'path', path, 'label', label, 'application', application, 'host', host, 'pid', pid,
  'mode', mode, 'since', text(now))
longest_note(memory, ttl)
return { 1, token }
