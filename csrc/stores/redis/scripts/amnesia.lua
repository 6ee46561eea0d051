-- Stands between grants.lua and the scripts that grant or refresh: take.lua, refresh.lua and adopt.lua.
--
-- Amnesia. A server may have forgotten leases that their holders believe in: it was restarted without its last data,
-- emptied, or a replica that lagged took over. Only the server or a client can know. So P:memory says which server
-- granted here last: `run`, its run id, and `place`, when it became master if it had been a replica. A request that finds
-- another server there, or none, begins a quarantine: nothing is granted from then on for the longest ttl that the request
-- or the memory knows of. The forgotten leases had been granted before, for no longer, so they are over then.
--
--   from, until   of the quarantine. A request that comes while it lasts, and knows of a longer ttl, makes it longer
--   longest       ttl that was granted or refreshed here; never less, as long as the memory is there
--   format        of all keys of the prefix; absent: 1. With another format nothing is granted: FOREIGN
--   durable       1: as far as any request saw, this run wrote all to the disk before it answered (appendfsync always)
--
-- The request found        Forgotten leases                    Quarantine from
--   another run            whatever came after the memory      now
--    both durable          nothing                             a quarantine that lasts goes on; none begins
--   the run, other place   what a master between had granted,  now
--                          or this one, which that one lacked
--   nothing, and it has    all                                 now
--    been a replica, was emptied, or this program has been granted something before
--   nothing, else          all that was before its start       its start: most often nothing ever was here
--
-- While it lasts, and before any request has looked, a lease is refreshed or imported only if its time is not up: a lease
-- granted after that may be forgotten. docs/redis.md lists the losses that no program notices.
local FORMAT = '1'
local FOREIGN = 'OTHERVERSION'

local function place_of(replication)
  if type(replication) ~= 'string' then return '' end
  local id = string.match(replication, 'master_replid2:(%x+)')
  local offset = string.match(replication, 'second_repl_offset:(%-?%d+)')
  if not id or not offset or string.find(id, '^0+$') then return '' end
  return string.sub(id, 1, 16) .. offset
end

-- A server that has had no replicas for an hour forgets what its place was. An earlier version of hierlock wrote the run
-- id without the database: it would write its own mark over each of ours, so the mark stays as it is.
local function same_server(known, run, place)
  return (known[1] == run or known[1] == string.match(run, '^%x+')) and (place == '' or known[2] == place)
end

local function emptied()
  local stats = redis.pcall('INFO', 'commandstats')
  if type(stats) ~= 'string' then return true end
  return string.find(stats, 'cmdstat_flush', 1, true) or string.find(stats, 'cmdstat_swapdb', 1, true)
end

-- Whether a lease that ended then may have come back, though another has had its nodes since.
local function may_be_stale(memory, run, ends)
  local now = clock()
  if ends > now or run == '' then return false end
  local known = redis.call('HMGET', memory, 'run', 'place', 'until')
  return not same_server(known, run, place_of(redis.pcall('INFO', 'replication'))) or tonumber(known[3] or 0) > now
end

-- Until when nothing is granted, and what raise.lua has written. `longest` is what the program knows of; 0: it wants to
-- know nothing of it, and must not tell others. nil: another version of hierlock uses the prefix.
local function remember(memory, run, place, start, durable, longest, seen, now)
  local known = redis.call('HMGET', memory, 'run', 'place', 'from', 'until', 'longest', 'durable', 'least', 'format')
  if (known[8] or FORMAT) ~= FORMAT then return nil end
  local till, used = tonumber(known[4] or 0), tonumber(known[5] or 0)
  local least = tonumber(known[7] or 0)
  if not same_server(known, run, place) then
    if longest == 0 then
      till = 0
    else
      local from, last = now, math.max(longest, used)
      if known[1] and durable and known[6] == '1' and not emptied() then
        from, till = tonumber(known[3] or 0), math.min(till, now + last + 1)
      else
        if not known[1] and start and not seen and not emptied() then from = start end
        till = from + last + 1
      end
      redis.call('HSET', memory, 'run', run, 'place', place, 'from', text(from), 'until', text(till),
        'longest', text(till > now and last or used), 'durable', durable and '1' or '0', 'format', FORMAT)
    end
  else
    if till > now and longest > used then -- somebody else was first, who had shorter ones
      till = math.max(till, tonumber(known[3] or 0) + longest + 1)
      redis.call('HSET', memory, 'until', text(till), 'longest', text(longest))
    end
    if known[6] == '1' and not durable then redis.call('HSET', memory, 'durable', '0') end
  end
  return till, least
end
