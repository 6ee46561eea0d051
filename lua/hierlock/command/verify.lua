--- hierlock verify: counts the rows of each level, and names the missing ones. The command changes nothing and locks
-- nothing.

local core = require "hierlock.core"
local hierlock = require "hierlock"
local leases = require "hierlock.command.lease_tables"
local progress = require "hierlock.command.progress"
local server = require "hierlock.command.server"
local space = require "hierlock.command.space"
local subject = require "hierlock.command.examine.subject"
local terminal = require "hierlock.command.terminal"

local verify = {
  summary = "Count the buckets of each level, and name missing ones.",
  description = "Counts the buckets of each level, and names missing ones. Changes nothing and locks nothing. " ..
    "Its exit status is 1 when the table is not as it should be.",
}

local CHUNK = 1000000  -- rows counted at once
local NAMED = 10       -- ranges of missing buckets that are named, for each level

local INCOMPLETE = 1

function verify.options(parser) server.options(parser) end

local number = progress.number

local unwritten -- why a line could not be written

local function say(line)
  local ok, err = terminal.write(line, "\n")
  if not ok then unwritten = unwritten or err end
end

--- Counts a level: how many rows are missing, and their first ranges; nil, err. level: from 0; beyond the deepest,
-- the level of the update rows.
function verify.count_level(found, at, bar)
  local level = at < #found.levels and at or space.update_level(#found.levels)
  local missing, holes = 0, {}
  for first = 0, found.buckets - 1, CHUNK do
    local last = math.min(first + CHUNK, found.buckets) - 1
    local there, err = found.space:count(level, first, last)
    if not there then return nil, err end
    if there <= last - first then
      missing = missing + last - first + 1 - there
      if #holes < NAMED then
        local more
        more, err = found.space:holes(level, first, last, NAMED - #holes)
        if not more then return nil, err end
        for _, range in ipairs(more) do
          local previous = holes[#holes]
          if previous and previous[2] + 1 == range[1] then previous[2] = range[2] else holes[#holes + 1] = range end
        end
      end
    end
    bar:update(at * found.buckets + last + 1, found.levels[at + 1] or "updates")
  end
  return missing, holes
end

--- Says the result of verify.count_level in words.
function verify.describe(missing, holes)
  if missing == 0 then return "complete" end
  local ranges = {}
  for i, range in ipairs(holes) do
    missing = missing - (range[2] - range[1] + 1)
    ranges[i] = range[1] == range[2] and tostring(range[1]) or range[1] .. "-" .. range[2]
  end
  if missing > 0 then ranges[#ranges + 1] = "…" end
  return "missing: " .. table.concat(ranges, ", ")
end

-- The tables of leases: whether they are there, lock rows, and the gate is complete; nil, err.
local function report_leases(found)
  local well = true
  for _, each in ipairs(found.space:lease_tables()) do
    local name, wanted = each[1], each[3]
    local engine, err = found.space:engine(name)
    local said, n = engine
    if engine == nil then return nil, err end
    if engine == "InnoDB" and wanted then
      n, err = found.space:rows(name)
      if not n then return nil, err end
      said = n == wanted and "complete" or ("missing: %s rows"):format(number(wanted - n))
      well = well and n == wanted
    elseif engine ~= "InnoDB" then
      said, well = engine and ("of engine %s, which locks no rows"):format(engine) or "missing", false
    end
    say(("  leases   %-28s %s"):format(name, said))
  end
  return well
end

--- The update rows: none is well, and so are all; nil, err.
function verify.report_updates(found, bar)
  local some, err = found.space:count(space.update_level(#found.levels), 0, found.buckets - 1)
  if not some then return nil, err end
  if some == 0 then return true end
  local missing, holes = verify.count_level(found, #found.levels, bar)
  if not missing then return nil, holes end
  bar:clear()
  say(("  updates  %-12s %14s rows  %s"):format(found.levels[#found.levels], number(found.buckets - missing),
    verify.describe(missing, holes)))
  return missing == 0
end

-- Prints the findings; returns whether all is well; nil, err.
local function report(found, bar)
  local well = true
  say(("%s in %s: %s buckets for each of the levels %s%s"):format(found.space.table, found.where,
    number(found.buckets), table.concat(found.levels, ","),
    found.recorded and "" or " (the defaults: hier_lock_meta does not say)"))
  for level, name in ipairs(found.levels) do
    local missing, holes = verify.count_level(found, level - 1, bar)
    if not missing then return nil, holes end
    bar:clear()
    say(("  level %d  %-12s %14s rows  %s"):format(level - 1, name, number(found.buckets - missing),
      verify.describe(missing, holes)))
    well = well and missing == 0
  end
  local updates, err = verify.report_updates(found, bar)
  if updates == nil then return nil, err end
  well = well and updates
  local surplus
  surplus, err = found.space:surplus(found.buckets, #found.levels)
  if not surplus then return nil, err end
  local more = 0
  for _, range in ipairs(surplus) do more = more + range[2] end
  if more > 0 then
    say(("  %s rows more, beyond these levels and buckets: was the table made for others?"):format(number(more)))
  end
  if found.leased then
    local provided
    provided, err = report_leases(found)
    if provided == nil then return nil, err end
    well = well and provided
  end
  if not well then
    say("Programs that need a missing row are refused. To mend it: hierlock provision" .. (updates and "" or " --updates"))
  end
  return well and more == 0
end

local function look(connection, wanted)
  local self = space.new(connection)
  local found, err = self:look()
  if not found then return nil, err end
  found.space, found.where, found.recorded = self, wanted.where, found.buckets ~= nil
  if not found.engine then
    say(("there is no table %s in %s; to make it: hierlock provision"):format(found.space.table, wanted.where))
    return false
  end
  if found.engine ~= "InnoDB" then
    return nil, { code = "unsafe_server", message = ("the table %s is of engine %s, which locks no rows")
      :format(found.space.table, found.engine) }
  end
  found.buckets = found.buckets or space.DEFAULT_BUCKETS
  found.levels = found.levels or space.DEFAULT_LEVELS
  local levels = table.concat(found.levels, ",")
  if (wanted.buckets or found.buckets) ~= found.buckets or
     table.concat(wanted.levels or found.levels, ",") ~= levels then
    say(("%s in %s is for %s buckets of each of the levels %s, and not for what was asked"):format(
      found.space.table, wanted.where, number(found.buckets), levels))
    return false
  end
  return found
end

local function examine(arguments)
  local wanted, err = server.parse(arguments)
  if not wanted then return nil, err end
  if wanted.store == "postgresql" then
    local manager
    manager, err = hierlock.open(wanted.dsn, { levels = wanted.levels, application = "hierlock verify" })
    if not manager then return nil, err end
    manager:close()
    say(("postgresql: locks in %s exclude; it needs no provisioning"):format(wanted.where))
    local well
    well, err = leases.verify(wanted, say)
    if well == nil then return nil, err end
    return well and 0 or INCOMPLETE
  elseif wanted.store == "redis" or wanted.store == "sqlite" then
    local manager
    manager, err = hierlock.open(server.with_password(wanted), { levels = wanted.levels, application = "hierlock verify" })
    if not manager then return nil, err end
    manager:close()
    say(wanted.store .. ": locks there exclude; it needs no provisioning")
    return 0
  elseif wanted.store ~= "mysql" then
    local own = subject.own_directory(core.dsn(wanted.dsn))
    say(wanted.store .. ": needs no provisioning" .. (own and
      ("; the locks in %s are those of user %d alone. Programs of several users name one directory: file:/run/shop-locks"):format(own,
        subject.user()) or ""))
    return 0
  end
  local connection
  connection, err = server.connect(wanted, "verify", server.COUNT)
  if not connection then return nil, err end
  local found, well
  found, err = look(connection, wanted)
  if found then
    well, err = report(found, progress.new(found.buckets * #found.levels, arguments.quiet))
  else
    well = found
  end
  connection:close()
  if well == nil then return nil, err end
  return well and 0 or INCOMPLETE
end

function verify.run(arguments)
  local status, err = examine(arguments)
  if status and unwritten then return nil, unwritten end
  return status, err
end

return verify
