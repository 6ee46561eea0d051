--- From a command line to the nodes and leases that it names: what `hierlock leases`, `revoke` and `run`
-- share. No password may stand on a command line: see server.lua.

local hierlock = require "hierlock"
local server = require "hierlock.command.server"

local lookup = {}

local OWNER_MAX = 127 -- bytes

--- Adds what says which store.
function lookup.store_options(parser)
  parser:option("--dsn", "The store, as mysql://user@host:port/database or file:/directory; without one, $HIERLOCK_DSN.")
    :argname "DSN"
  parser:option("--levels", "Names of the levels, from root to leaf. Default: as recorded, else user,account,resource.")
    :argname "NAMES"
  parser:flag("-p --ask-password", "Ask for the password on the terminal.")
end

--- Adds the one node that it may be about.
function lookup.target_option(parser)
  parser:argument("target", "A node, as u1/a1/r1; %2F stands for a slash in an id, %25 for a %."):args "?"
end

--- Adds that, and what says which leases.
function lookup.options(parser)
  lookup.target_option(parser)
  parser:option("--owner", "Only those of this owner."):argname "OWNER"
  lookup.store_options(parser)
end

--- For argparse: a number of seconds from `least` on; "inf" only where it may be.
function lookup.seconds(option, least, infinite)
  return function(given)
    if given == "inf" and infinite then return math.huge end
    local value = tonumber(given) -- Lua 5.1 knows "inf", too
    if value and value >= least and value < math.huge then return value end
    return nil, ("%s must be a number of seconds, %s or more"):format(option, least > 0 and tostring(least) or "0")
  end
end

--- For argparse: a whole number from `least` on.
function lookup.whole(option, least)
  return function(given)
    local value = tonumber(given)
    if value and value >= least and value < 2 ^ 53 and value % 1 == 0 then return value end
    return nil, ("%s must be a whole number, %d or more"):format(option, least)
  end
end

--- Answers a wrong command line: nil, and an err with the code `dsn`.
function lookup.usage(message, ...)
  if select("#", ...) > 0 then message = message:format(...) end
  return nil, { code = "dsn", message = message, retryable = false }
end

--- "u1/a%2Fb" as its ids, {"u1", "a/b"}; nil, err.
function lookup.target(argument)
  local ids = {}
  for part in (argument .. "/"):gmatch "([^/]*)/" do
    if part == "" then
      return lookup.usage("the target has an empty id; it must be like u1/a1/r1")
    elseif part:gsub("%%%x%x", ""):find "%%" then
      return lookup.usage("in the target, a %% must be followed by two hexadecimal digits; %%25 stands for the %% itself")
    end
    ids[#ids + 1] = part:gsub("%%(%x%x)", function(hex) return string.char(tonumber(hex, 16)) end)
  end
  return ids
end

--- The filter that the arguments say, for manager:leases; nil, err.
function lookup.filter(arguments)
  local filter, err = { owner = arguments.owner, id = arguments.id and arguments.id:lower() }
  if arguments.target then
    filter.target, err = lookup.target(arguments.target)
    if not filter.target then return nil, err end
  end
  if filter.owner and (filter.owner == "" or #filter.owner > OWNER_MAX) then
    return lookup.usage("--owner must have 1 to %d bytes", OWNER_MAX)
  elseif filter.id and not filter.id:find("^" .. ("%x"):rep(32) .. "$") then
    return lookup.usage "--id must have 32 hexadecimal digits, as `hierlock leases` shows them"
  end
  return filter
end

--- A manager on the store, and what server.parse says of that; nil, err. what: for those who look who is connected.
-- options: more of them.
function lookup.open(arguments, what, options)
  local wanted, err = server.parse(arguments)
  if not wanted then return nil, err end
  local all = { levels = wanted.levels, application = "hierlock " .. what, pool_size = 2 }
  for name, value in pairs(options or {}) do all[name] = value end
  local manager
  manager, err = hierlock.open(server.with_password(wanted), all)
  if not manager then return nil, err end
  return manager, wanted
end

--- Turns a raised misuse into nil, err: only the store, which has other levels, knows that the target is wrong.
-- Raises anything else again.
function lookup.misuse(raised)
  local misuse = tostring(raised):match "hierlock: (.*)$"
  if misuse then return lookup.usage("%s", misuse) end
  error(raised, 0)
end

-- Parents before their children, those before the parents' next sisters.
local function place(lease) return (lease.path:gsub("/", "\0")) end

-- Orders entries by place, then holders before waiters, then by time.
local function before(a, b)
  if a.place ~= b.place then return a.place < b.place end
  if a.waiting ~= b.waiting then return not a.waiting end
  if a.since ~= b.since then return (a.since or 0) < (b.since or 0) end
  if a.pid ~= b.pid then return (a.pid or 0) < (b.pid or 0) end
  return (a.id or a.session or "") < (b.id or b.session or "")
end

local function sorted(ok, found, err)
  if not ok then return lookup.misuse(found) end
  found = found or err.holders
  if not found then return nil, err end
  for _, lease in ipairs(found) do lease.place = place(lease) end
  table.sort(found, before)
  return found, err
end

--- The leases that the filter lets through, sorted by target; nil, err.
function lookup.find(manager, filter) return sorted(pcall(manager.leases, manager, filter)) end

--- Lists the holders and waiters that keep others from the target, or from anything where it is nil; sorted likewise;
-- nil, err. Where the store shows only some of them: these, and the err that says why.
function lookup.holders(manager, target)
  local found, err
  if target then
    found, err = sorted(pcall(manager.holders, manager, target))
  else
    found, err = sorted(true, manager:holders())
  end
  for _, holder in ipairs(found or {}) do
    holder.mode = holder.mode or "unknown"
    -- A waiter has no lease yet, though some stores know its id already.
    if holder.waiting then holder.kind, holder.id, holder.remaining = nil, nil, nil end
  end
  return found, err
end

return lookup
