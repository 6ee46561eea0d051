-- Behind common.lua: the parts about time, granting, refreshing and recalling.

local GRACE = 3600000
local WAITER_MS = 3000

-- Whole ms, rounded down: so a lease of ttl ends ttl + 1 later, and never too early.
local function clock()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000),
         tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function text(number) return string.format('%.0f', number) end

-- The lease is not there, and a take that makes it, and is read after this, finds so.
local function recall(root, id)
  drop(root, id)
  redis.call('HSET', key(root, 'l', id), 'recalled', '1')
  redis.call('PEXPIRE', key(root, 'l', id), GRACE)
  redis.call('DEL', key(root, 'q', id))
end

-- Deletes expired members that conflict with this mode. Expired members that do not conflict may still be refreshed,
-- for GRACE.
local function clean(node, mode, now)
  if mode == 's' then
    local ends = redis.call('ZSCORE', node, '__write__')
    if not ends or tonumber(ends) > now then now = now - GRACE end
  end
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', node, '-inf', text(now))) do
    local id, root = split(member)
    if id then drop(root, id) end
  end
  redis.call('ZREMRANGEBYSCORE', node, '-inf', text(now))
end

local function outlive(set)
  local last = redis.call('ZREVRANGE', set, 0, 0, 'WITHSCORES')
  if last[2] then redis.call('PEXPIREAT', set, text(tonumber(last[2]) + GRACE)) end
end

-- The lease, whose members are there or may be made, ends at that time.
local function set_end(root, id, rows, ends)
  local member = id .. '@' .. root
  for mode, node in each_row(rows) do
    redis.call('ZADD', node, text(ends), member)
    if mode == 'x' then redis.call('ZADD', node, text(ends), '__write__') end
    outlive(node)
  end
  redis.call('HSET', key(root, 'l', id), 'ends', text(ends))
  redis.call('PEXPIREAT', key(root, 'l', id), text(ends + GRACE))
  redis.call('ZADD', key(root, 'leases'), text(ends), id)
  outlive(key(root, 'leases'))
end

-- A presence (store.h) locks nothing: none is missed where it was forgotten.
local function is_presence(id) return string.find(id, '^0000000000000000') end

-- Notes that leases of that time are in use: a server that has forgotten them grants nothing for so long.
local function longest_note(memory, id, ttl)
  if not is_presence(id) and ttl > tonumber(redis.call('HGET', memory, 'longest') or 0) then redis.call('HSET', memory, 'longest', text(ttl)) end
end

-- The number after all that these trees have given: it is taken from the clock, so it grows even where they have
-- forgotten the last; least: after that, too. Where it is ahead of the clock they keep it for so much longer.
local function number(roots, least, now_us)
  local n = math.max(now_us, least + 1)
  for tag in string.gmatch(roots, '%x+') do
    local before = tonumber(redis.call('GET', key(tag, 'n')) or 0)
    if before >= n then n = before + 1 end
  end
  local kept = 86400000 + math.ceil((n - now_us) / 1000)
  for tag in string.gmatch(roots, '%x+') do redis.call('SET', key(tag, 'n'), text(n), 'PX', text(kept)) end
  return n
end
