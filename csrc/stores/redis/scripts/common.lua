-- Common to the scripts: it stands before each of them; before all but drop.lua and leave.lua, which are sent whole,
-- so does grants.lua. A script runs alone on its server, and its effects are there all or none: each is one step of
-- the protocol.
--
-- Names. P is the prefix, R the tag of a tree: the same for all its nodes, so Redis Cluster has them in one slot.
--
--   P:{R}:LEVEL:HASH      a node, in the layout of Symfony Lock: a sorted set of its holders, by the end of
--                         their time (ms of TIME); an exclusive holder has added __write__, with the same end
--   P:{R}:LEVEL:HASH:w    its waiters, by ticket; :x the exclusive ones
--   P:{R}:l:ID            a lease (hash); ID@R, of its home R, stands for it in its nodes. A lease may lock nodes of
--                         several trees, and has its home in the first
--   P:{R}:leases          the leases whose home is R, by their end
--   P:{R}:q:ID            a waiter (hash); it lives as long as it looks
--   P:{R}:c:N             the leases that revocation N has ended (hash), for a minute
--   P:{R}:n               the last ticket or token
--   P:memory              which server grants here: see amnesia.lua; in Redis Cluster P:{T}:memory for each slot, of which T is a tag
--   NAME                  a node by its name in Symfony Lock, where the program interoperates, beside the node of our
--                         own, behind which all of ours queue: it has no :w, :x
--
-- Members that are no ID@R are Symfony's tokens. Symfony's scripts delete any expired member (theirs, ours), by
-- TIME, too, and wake no waiter.
--
-- Presence decides. A lease is unbroken while its record and all its members are there, whatever its time; a request
-- that meets an expired one deletes all of it. So the keys outlive their time by GRACE (grants.lua).

local P = ARGV[1]

local function key(root, kind, id)
  return P .. ':{' .. root .. '}:' .. kind .. (id and ':' .. id or '')
end

local function split(member) return string.match(member, '^(%x+)@(%x+)$') end

-- The rows of a request or a lease: "xNODE\nsNODE\n", each with its mode. Rows by name follow all others:
-- "x~NAME\n", whose bytes may be %XX; the third result is the name as it is written.
local function each_row(rows)
  local step = string.gmatch(rows, '(%l)(~?)([^\n]*)\n')
  return function()
    local mode, by_name, node = step()
    if by_name ~= '~' then return mode, node end
    return mode, (string.gsub(node, '%%(%x%x)', function(hex) return string.char(tonumber(hex, 16)) end)), node
  end
end

-- nil also where another program has put something else in the place of a node that goes by name.
local function score(node, member)
  local found = redis.pcall('ZSCORE', node, member)
  return type(found) == 'string' and tonumber(found) or nil
end

-- Has a waiter look again. A waiter that may not publish, or hear it, looks each second.
local function ring(member)
  local id, root = split(member)
  local channel = id and redis.call('HGET', key(root, 'q', id), 'channel')
  if channel then redis.pcall('PUBLISH', channel, id) end
end

-- The first that lives, of a set of waiters for the node, and its ticket. The dead go.
local function first(node, set)
  while true do
    local head = redis.call('ZRANGE', node .. set, 0, 0, 'WITHSCORES')
    if not head[1] then return nil end
    local id, root = split(head[1])
    if id and redis.call('EXISTS', key(root, 'q', id)) == 1 then return head[1], tonumber(head[2]) end
    redis.call('ZREM', node .. ':w', head[1])
    redis.call('ZREM', node .. ':x', head[1])
  end
end

-- A holder of the node, or a waiter, has gone that was there in this mode. Where it was shared, only one who wants
-- it alone can have waited for that; else all up to the first such one.
local function ring_next(node, mode)
  local head = first(node, ':w')
  if not head then return end
  if redis.call('ZSCORE', node .. ':x', head) then
    ring(head)
  elseif mode == 'x' then
    for _, member in ipairs(redis.call('ZRANGE', node .. ':w', 0, 99)) do
      if redis.call('ZSCORE', node .. ':x', member) then break end
      ring(member)
    end
  end
end

-- Frees the nodes that a lease locks.
local function free(root, id)
  local rows = redis.call('HGET', key(root, 'l', id), 'rows')
  local member = id .. '@' .. root
  for mode, node, name in each_row(rows or '') do
    if redis.pcall('ZREM', node, member) == 1 and mode == 'x' then redis.call('ZREM', node, '__write__') end
    if not name then ring_next(node, mode) end
  end
  redis.call('ZREM', key(root, 'leases'), id)
end

local function drop(root, id)
  free(root, id)
  redis.call('DEL', key(root, 'l', id))
end

-- Says why that holder has no lease; nil: it has. It also has none where another program has deleted a part of it, or
-- where its holder knows of a later token: the server has forgotten the upgrade that gave it, so it may let readers in.
local function lost(root, id, holder, token)
  local lease = key(root, 'l', id)
  local found = redis.call('HMGET', lease, 'holder', 'revoked', 'by', 'reason', 'rows', 'token')
  if found[2] and (not holder or found[1] == holder) then return { 0, 'revoked', found[3] or '', found[4] or '' } end
  if not found[1] then return { 0, 'gone' } end
  if holder and found[1] ~= holder then return { 0, 'imported' } end
  if token and tonumber(found[6]) < token then
    drop(root, id)
    return { 0, 'gone' }
  end
  local member = id .. '@' .. root
  for mode, node in each_row(found[5] or '') do
    if not score(node, member) or mode == 'x' and not score(node, '__write__') then
      drop(root, id)
      return { 0, 'gone' }
    end
  end
  return nil
end
