--- Tests what no setting tells: really takes a lock on the store, in a tree that no other program uses. Checks that
-- the lock keeps another connection out, that observers see it, and that it is given back.

local hierlock = require "hierlock"
local uv = require "luv"

local trial = {}

local PATIENCE = 5   -- s
local ROUNDS = 20    -- whose median is shown
local SLOW = 0.05    -- s, from which on a lock is slow for what it is
local TTL = 10       -- s; Memcached has whole ones

local WHY_OPEN = "Programs open the store in the same way: what it refuses here, it refuses there."
local WHY_EXCLUDE = "Taken on one connection and refused to another: what the store is for."
local WHY_LEASES = "A lease outlives its connection and its process; session locks and leases exclude each other."
local WHY_OBSERVERS = "A program whose wait fails, and an operator, are told who is in the way."
local WHY_SPEED = "What a program pays for each lock: round trips to the server, mostly."

local function now() return uv.hrtime() / 1e9 end

local function words(err)
  return err.code .. ": " .. err.message
end

--- The mend for a failure, where its code says enough; else the caller's words.
local function way_out(subject, err, else_mend)
  if err.code == "not_provisioned" then return subject.unprovisioned or subject.command "provision" end
  if err.code == "mismatch" then return subject.mismatched or "leave out --levels and --buckets, or name another space in the DSN" end
  if err.retry_after then return ("wait %.0f s, and ask again"):format(math.ceil(err.retry_after)) end
  if err.code == "timeout" then return "see who holds it: " .. subject.command "leases" end
  return err.code ~= "unsafe_server" and else_mend or "mend what is found above first; docs/troubleshooting.md says more of each error"
end

local function seen(manager, target, application)
  local holders, err = manager:holders(target)
  if not holders then return nil, err end
  for _, holder in ipairs(holders) do
    if holder.application == application and not holder.waiting then return true end
  end
  return false
end

-- Medians, in seconds, of acquiring and releasing; nil, err.
local function speed(manager, target)
  local times = {}
  for i = 1, ROUNDS do
    local start = now()
    local handle, err = manager:acquire(target, { timeout = PATIENCE })
    local ok
    if handle then ok, err = handle:release { confirm = true } end
    if not ok then return nil, err end
    times[i] = now() - start
  end
  table.sort(times)
  return times[math.ceil(ROUNDS / 2)]
end

local function time(seconds)
  if seconds < 0.001 then return ("%.0f us"):format(seconds * 1e6) end
  return ("%.1f ms"):format(seconds * 1e3)
end

--- Whether the second manager is refused the lock that the first one's handle holds; and the err that it got.
local function excludes(second, target, options)
  local other, err = second:acquire(target, options)
  if other then other:release() end
  return not other and err.code == "timeout", err
end

local function try_leases(subject, found, first, second, target)
  local handle, err = first:acquire(target, { timeout = PATIENCE, ttl = TTL })
  if not handle then
    if err.code == "unsupported" then
      return found:add("leases", "ok", "none here: session locks only", WHY_LEASES)
    end
    return found:add("leases", "wrong", words(err), WHY_LEASES, way_out(subject, err, subject.leases_denied))
  end
  local well, other = excludes(second, target, { timeout = 0 })
  local ok
  ok, err = handle:release { confirm = true }
  if not well then
    found:add("leases", "wrong", other and words(other) or "another connection was granted what a lease holds", WHY_LEASES,
      "connect to the server itself, without a proxy")
  elseif not ok then
    found:add("leases", "wrong", words(err), WHY_LEASES, subject.leases_denied)
  else
    found:add("leases", "ok", "taken, seen to exclude, given back", WHY_LEASES)
  end
end

-- With two managers that are open.
local function try(subject, found, first, second, target)
  local handle, err = first:acquire(target, { timeout = 0 })
  if not handle and err.code == "timeout" and not err.retry_after then
    handle, err = first:acquire(target, { timeout = PATIENCE })
  end
  if not handle then
    return found:add("a lock", err.retry_after and "warning" or "wrong", words(err), WHY_EXCLUDE, way_out(subject, err, subject.lock_denied))
  end
  local well, other = excludes(second, target, { timeout = 0 })
  local visible, blind = seen(second, target, subject.application)
  local ok
  ok, err = handle:release { confirm = true }
  if not well then
    found:add("a lock", "wrong", other and words(other) or "another connection was granted the same node at the same time",
      WHY_EXCLUDE, "connect to the server itself, without a proxy")
    return
  elseif not ok then
    found:add("a lock", "wrong", words(err), WHY_EXCLUDE, way_out(subject, err))
    return
  end
  found:add("a lock", "ok", "taken, seen to exclude, given back", WHY_EXCLUDE)
  if visible then
    found:add("observers", "ok", "see who holds it", WHY_OBSERVERS)
  else
    found:add("observers", "warning", blind and words(blind) or "do not see by name who holds it", WHY_OBSERVERS, subject.observers_blind)
  end
  local median
  median, err = speed(first, target)
  if not median then
    found:add("speed", "wrong", words(err), WHY_SPEED, way_out(subject, err))
  elseif median > SLOW then
    found:add("speed", "warning", time(median) .. " for a lock and its release, in the middle of " .. ROUNDS, WHY_SPEED,
      "put program and server side by side; hierlock bench shows more")
  else
    found:add("speed", "ok", time(median) .. " for a lock and its release, in the middle of " .. ROUNDS, WHY_SPEED)
  end
  if subject.leases_tried ~= false then try_leases(subject, found, first, second, target) end
end

--- Tries a store of any kind. Its subject has the mends for denials: `lock_denied`, `leases_denied`, `observers_blind`,
-- for `not_provisioned` where that is not `hierlock provision`: `unprovisioned`, and for another list: `mismatched`.
-- `leases_tried` is false where no lease can be tried, or the lock is one. `unsettled`: no program has used the store
-- yet, and the first to open it settles its levels.
function trial.run(subject, found)
  if subject.unsettled and not subject.levels then
    return found:add("opens", "unseen", "no program has used the store yet; the first one decides its levels", WHY_OPEN,
      subject.command "doctor --levels user,account,resource")
  end
  local options = { levels = subject.levels, buckets = subject.buckets, application = subject.application, pool_size = 4 }
  local first, err = hierlock.open(subject.dsn, options)
  if not first then
    local status = found.counts.wrong > 0 and "the same: " or ""
    found:add("opens", "wrong", status .. words(err), WHY_OPEN, way_out(subject, err, subject.unopened))
    return
  end
  found:add("opens", "ok", "as programs open it", WHY_OPEN)
  local second
  second, err = hierlock.open(subject.dsn, options)
  if second then
    local target = { ("hierlock doctor %s %d %.0f"):format(uv.os_gethostname(), uv.os_getpid(), uv.hrtime()) }
    try(subject, found, first, second, target)
    second:close()
  else
    found:add("a second one", "wrong", words(err), WHY_OPEN, way_out(subject, err, subject.unopened))
  end
  first:close()
end

return trial
