--- Finds the holders that each waiter waits for. Compares the rows that this tree has for each holder's and each
-- waiter's request. So the result is the same on every store, and includes false conflicts, too. A server knows more
-- of its own queue.

local lookup = require "hierlock.command.lookup"

local waits = {}

--- So many are named for each waiter; the rest is counted.
waits.NAMED = 10

-- What a row's mode, or its intention, keeps out.
local KEEPS_OUT = {
  IS = { "exclusive" },
  IX = { "shared", "SIX", "exclusive" },
  shared = { "IX", "SIX", "exclusive" },
  SIX = { "IX", "shared", "SIX", "exclusive" },
  exclusive = { "IS", "IX", "shared", "SIX", "exclusive" },
}

-- The modes that a row of a plan keeps out.
local function keeps_out(row) return KEEPS_OUT[row.intention or row.mode] or KEEPS_OUT.shared end

--- Whether two requests for one row, each with such a row of its plan, exclude each other.
function waits.conflict(a, b)
  for _, mode in ipairs(keeps_out(a)) do
    if mode == (b.intention or b.mode) then return true end
  end
  return false
end

-- "u1/a1/r1, u1/a1/r2" as targets. A target that was cut off at the end is missing.
local function targets(path)
  local list = {}
  for part in (path .. ", "):gmatch "(.-), " do list[#list + 1] = part end
  if path:find "%.%.%.$" then list[#list] = nil end
  for i, part in ipairs(list) do list[i] = lookup.target(part) end
  return list
end

-- The names of its rows, and their modes. A holder can report any path; where it makes no plan, there are no rows.
local function rows_of(manager, entry)
  -- Entries that do not say who they are have such paths.
  local level, bucket = entry.path:match "^bucket %((%d+), (%d+)%)$"
  local key = entry.path:match "^advisory lock (%-?%d+) of the server's process %d+$"
  if level then return { { name = level .. "." .. bucket, mode = entry.mode } } end
  if key then return { { name = key, mode = entry.mode } } end
  local ok, rows = pcall(function() return manager:plan(targets(entry.path), { mode = entry.mode }):rows() end)
  if not ok then return {} end
  for _, row in ipairs(rows) do row.name = row.key or ("%d.%.0f"):format(row.level, row.bucket) end
  return rows
end

--- Whether two entries belong to the same session, which holds something and waits for more.
function waits.same_session(a, b)
  return a.session ~= nil and a.session == b.session and a.pid == b.pid and a.host == b.host
end
local same_session = waits.same_session

-- By row and mode: who holds, and who waits.
local function index(entries)
  local by = { holds = {}, waits = {} }
  for _, entry in ipairs(entries) do
    local all = by[entry.waiting and "waits" or "holds"]
    for _, row in ipairs(entry.rows) do
      local there, mode = all[row.name] or {}, row.intention or row.mode
      all[row.name], there[mode] = there, there[mode] or {}
      table.insert(there[mode], entry)
    end
  end
  return by
end

-- Lists the entries in `all` that conflict with a row of the entry and that `counts` lets through; and their number.
local function in_the_way(entry, all, counts)
  local found, seen, n = {}, {}, 0
  for _, row in ipairs(entry.rows) do
    local there = all[row.name]
    for _, mode in ipairs(keeps_out(row)) do
      for _, other in ipairs(there and there[mode] or {}) do
        if not seen[other] and other ~= entry and not same_session(entry, other) and (not counts or counts(other)) then
          seen[other], n = true, n + 1
          if n <= waits.NAMED then found[n] = other end
        end
      end
    end
  end
  return found, n
end

--- Gives each waiter `waits_for`, a list of entries, and `waits_for_count`. The entries are the holders of its rows. Where
-- no entry holds any, they are the waiters for its rows: the longer waiting ones, or else all.
-- @param manager on the space
-- @tparam {table,...} entries as from lookup.holders
function waits.find(manager, entries)
  for _, entry in ipairs(entries) do entry.rows = rows_of(manager, entry) end
  local by = index(entries)
  for _, entry in ipairs(entries) do
    if entry.waiting then
      local found, n = in_the_way(entry, by.holds)
      if n == 0 then
        found, n = in_the_way(entry, by.waits, function(other) return (other.since or 0) < (entry.since or 0) end)
      end
      if n == 0 then found, n = in_the_way(entry, by.waits) end
      entry.waits_for, entry.waits_for_count = found, n
    end
  end
  return entries
end

--- Names an entry as people do: "billing 4711@db3", or with the lease's owner "anna, billing 4711@db3".
function waits.name(entry)
  local name = entry.owner and entry.owner ~= entry.application and entry.owner .. ", " or ""
  name = name .. entry.application
  if entry.pid then name = name .. (" %d"):format(entry.pid) end
  if entry.host ~= "" then name = name .. (entry.pid and "@" or " on ") .. entry.host end
  return name
end

--- Says in a few words what a waiter waits for: the first holder, and how many more.
function waits.first(entry)
  local first = entry.waits_for[1]
  if not first then return "?" end
  return waits.name(first) .. (entry.waits_for_count > 1 and (" and %d more"):format(entry.waits_for_count - 1) or "")
end

return waits
