--- Whether the stores of a quorum have the same leases. A lease of a program that names these stores comes to stand
-- at all of them that answer. A lease of a program that names others, or one store alone, stands only at the stores
-- that both name.

local hierlock = require "hierlock"
local uv = require "luv"

local alike = {}

local PATIENCE, PAUSE = 3, 0.2 -- s: a lease that was just granted, or given back, is soon everywhere
local SHOWN = 3

local CHECK = "one list"
local WHY = "Programs that name different lists of stores do not keep each other out: two would hold one node."
local MEND = {
  "stop the programs that name other stores than these, or one of these alone, and give all programs one list: docs/quorum.md",
  "nothing, if its process has died while it acquired it (it goes when its time is up), or if it was imported while a store was down",
}

local function list_of(indices) return (#indices == 1 and "store " or "stores ") .. table.concat(indices, ", ") end

-- Collects the leases of the stores that list them, by id: holder, and at[i] for each store that has it. Also
-- returns the numbers of these stores. managers[i]: false where no program has used the store yet.
local function look(managers)
  local leases, told = {}, {}
  for i, manager in pairs(managers) do
    local found = manager and manager:leases() or not manager and {}
    if found then
      told[#told + 1] = i
      for _, holder in ipairs(found) do
        local lease = leases[holder.id] or { holder = holder, at = {} }
        leases[holder.id], lease.at[i] = lease, true
      end
    end
  end
  table.sort(told)
  return leases, told
end

local function who(holder) return ("%s %s %s"):format(holder.host, holder.pid or "?", holder.path or "?") end

-- Returns the waiting programs. While a program waits at one store, its lease stands only at the stores before it.
local function waiters(managers)
  local waiting = {}
  for _, manager in pairs(managers) do
    for _, holder in ipairs(manager and manager:holders() or {}) do
      if holder.waiting then waiting[who(holder)] = true end
    end
  end
  return waiting
end

-- Returns the leases, of `before` (nil: of all), that some store lacks, by id.
local function astray(managers, before)
  local leases, told = look(managers)
  local partial, n = {}, 0
  for id, lease in pairs(leases) do
    n = n + 1
    for _, i in ipairs(told) do
      if not lease.at[i] and (not before or before[id]) then partial[id] = lease end
    end
  end
  if next(partial) then
    local waiting = waiters(managers)
    for id, lease in pairs(partial) do
      if waiting[who(lease.holder)] then partial[id] = nil end
    end
  end
  return partial, told, n
end

local function describe(lease, told)
  local at, missing = {}, {}
  for _, i in ipairs(told) do
    local list = lease.at[i] and at or missing
    list[#list + 1] = i
  end
  local holder = lease.holder
  return ("%s of %s (%s, process %s of %s) is at %s and not at %s"):format(holder.path or "a lease", holder.owner or "?",
    holder.application, holder.pid or "?", holder.host, list_of(at), list_of(missing))
end

local function report(found, partial, told, n, stores)
  local lines = {}
  for _, lease in pairs(partial) do lines[#lines + 1] = describe(lease, told) end
  table.sort(lines)
  local more = #lines > SHOWN and ("; and %d more"):format(#lines - SHOWN) or ""
  if #lines > 0 then
    found:add(CHECK, "warning", table.concat(lines, "; ", 1, math.min(#lines, SHOWN)) .. more, WHY, MEND)
  elseif #told < 2 then
    found:add(CHECK, "unseen", ("%d of %d stores list their leases now, and two are needed to compare them"):format(#told, stores), WHY)
  else
    found:add(CHECK, "ok", ("%d stores list their leases, and all have the same: %d"):format(#told, n), WHY)
  end
end

--- Adds its findings, and changes nothing.
-- @param subject the quorum, as hierlock.command.examine.subject has it
-- @param found findings
-- @param members its stores, in the same way; unused: no program has used it yet, and nothing else is wrong with it
function alike.examine(subject, found, members)
  local managers = {}
  for i, member in ipairs(members) do
    local options = { levels = subject.levels, buckets = subject.buckets, application = subject.application, pool_size = 1 }
    if member.unused then
      managers[i] = false -- to open it would settle its levels
    else
      managers[i] = hierlock.open(member.dsn, options)
    end
  end
  local deadline = uv.hrtime() + PATIENCE * 1e9
  local partial, told, n = astray(managers)
  while next(partial) and uv.hrtime() < deadline do
    uv.sleep(PAUSE * 1000)
    partial, told, n = astray(managers, partial)
  end
  report(found, partial, told, n, #members)
  for _, manager in pairs(managers) do
    if manager then manager:close() end
  end
end

return alike
