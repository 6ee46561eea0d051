-- Leases whose time is not up: {ID, owner, path, label, application, host, pid, mode, since, ms left} each; of waiters
-- instead of the last, -1. Or ends them, and says how many. With `overs` also those whose time is up, as long as there
-- is a record.
--
-- Which: the leases of the tree, or the leases that exclude one of the rows; of that owner, of that id, where they
-- are given. With `awaited`, the node of a root: only those who wait for it, and have their home in the tree. At
-- most `most`; 0: all.
local root, rows, owner, wanted, waits, overs, revokes, by, reason, awaited, revocation, most = unpack(ARGV, 2, 13)
-- The count includes leases that an earlier try of this call has ended, though its answer was cut off.
local before = 0
if revokes == '1' then before = tonumber(redis.call('HGET', key(root, 'c', revocation), 'count') or 0) end
local now = clock()
local chosen, order, foreign = {}, {}, {}

local function choose(member)
  if chosen[member] or not split(member) then return end
  chosen[member] = true
  order[#order + 1] = member
end

-- Locks of Symfony's programs by this name: their holders are unknown.
local function choose_foreign(node, name, mode)
  if owner ~= '' or wanted ~= '' or redis.call('TYPE', node).ok ~= 'zset' then return end
  local writes = score(node, '__write__')
  if mode == 's' and not writes then return end
  for _, member in ipairs(redis.call('ZRANGE', node, 0, -1)) do
    local ends = score(node, member)
    if not split(member) and member ~= '__write__' and (ends > now or revokes == '1') then
      foreign[#foreign + 1] =
        { '', '', name, '', 'Symfony Lock', '', '0', writes and 'x' or 's', '0', math.max(ends - now, 0) }
      if revokes == '1' then redis.call('ZREM', node, member, '__write__') end
    end
  end
end

if awaited == '' and rows == '' then
  for _, id in ipairs(redis.call('ZRANGE', key(root, 'leases'), 0, -1)) do choose(id .. '@' .. root) end
elseif awaited == '' then
  for mode, node, name in each_row(rows) do
    if name then
      choose_foreign(node, name, mode)
    elseif mode == 'x' or redis.call('ZSCORE', node, '__write__') then
      for _, member in ipairs(redis.call('ZRANGE', node, 0, -1)) do choose(member) end
    end
  end
end

local function describe(kind, member, left)
  local id, home = split(member)
  local f = redis.call('HMGET', key(home, kind, id), 'owner', 'path', 'label', 'application', 'host', 'pid', 'mode', 'since')
  for i = 1, 8 do f[i] = f[i] or '' end
  return { id, f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], left }
end

local result = {}
most = most == '0' and math.huge or tonumber(most)
for _, member in ipairs(order) do
  if #result >= most then break end
  local id, home = split(member)
  local found = redis.call('HMGET', key(home, 'l', id), 'ends', 'owner', 'revoked')
  local ends = tonumber(found[1] or 0)
  if ends > 0 and (ends > now or overs == '1') and not found[3] and (owner == '' or owner == found[2]) and (wanted == '' or wanted == id) then
    result[#result + 1] = describe('l', member, math.max(ends - now - 1, 0))
    if revokes == '1' then
      free(home, id)
      redis.call('HSET', key(home, 'l', id), 'revoked', '1', 'by', by, 'reason', reason)
      redis.call('PEXPIREAT', key(home, 'l', id), text(ends + GRACE))
    end
  end
end
if revokes == '1' then
  local count = before + #result + #foreign
  if count > before then
    redis.call('HSET', key(root, 'c', revocation), 'count', text(count))
    redis.call('PEXPIRE', key(root, 'c', revocation), 60000)
  end
  return count
end
for _, holder in ipairs(foreign) do result[#result + 1] = holder end

if waits == '1' then
  local seen = {}
  for mode, node, name in each_row(awaited ~= '' and 'x' .. awaited .. '\n' or rows) do
    if name then break end -- all of ours wait for the nodes before it
    for _, member in ipairs(redis.call('ZRANGE', node .. (mode == 'x' and ':w' or ':x'), 0, -1)) do
      local id, home = split(member)
      if #result >= most then break end
      if id and not seen[member] and (awaited == '' or home == root) and redis.call('EXISTS', key(home, 'q', id)) == 1 then
        seen[member] = true
        result[#result + 1] = describe('q', member, -1)
      end
    end
  end
end
return result
