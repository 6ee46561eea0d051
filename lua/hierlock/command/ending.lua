--- Serves `hierlock revoke` and `kill`: names the operator who ends locks, and the owners of the locks that were
-- ended.

local uv = require "luv"
local lookup = require "hierlock.command.lookup"
local terminal = require "hierlock.command.terminal"
local text = require "hierlock.command.text"

local ending = {}

local BY_MAX, REASON_MAX = 63, 127 -- bytes
local OWNERS_SHOWN = 5

--- Adds what says in whose name, why, and that no question is asked.
function ending.options(parser)
  parser:option("--by", "Who ends them, for their holders. Default: the name by which you have logged in."):argname "NAME"
  parser:option("--reason", "Why, for their holders."):argname "TEXT"
  parser:flag("-y --yes", "Do not ask.")
end

--- Whether that can be done; nil, err.
function ending.check(arguments)
  for name, most in pairs { by = BY_MAX, reason = REASON_MAX } do
    local value = arguments[name]
    if value and (value == "" or #value > most) then return lookup.usage("--%s must have 1 to %d bytes", name, most) end
  end
  if not arguments.yes and not terminal.answers() then
    return lookup.usage "there is no terminal to ask on: say --yes to end them without a question"
  end
  return true
end

--- The user who has logged in here, even after su or sudo. Otherwise, as under cron or in a container, the user of this
-- process.
function ending.operator()
  local pipe = io.popen "logname 2>/dev/null"
  local name = pipe and pipe:read "*l"
  if pipe then pipe:close() end
  if not name or name == "" then
    local ok, user = pcall(uv.os_get_passwd)
    name = ok and user and user.username or ("uid %d"):format(uv.getuid())
  end
  return name:sub(1, BY_MAX)
end

--- "of anna", or "2 of anna, 1 of bob and 3 of others"
function ending.whose(leases, name)
  local names, counts, ascii = {}, {}, not (terminal.shows() and terminal.takes_utf8())
  for _, lease in ipairs(leases) do
    local owner = name and name(lease) or lease.owner
    if not counts[owner] then names[#names + 1] = owner end
    counts[owner] = (counts[owner] or 0) + 1
  end
  if #names == 1 then return "of " .. text.safe(names[1], ascii) end
  table.sort(names, function(a, b)
    if counts[a] ~= counts[b] then return counts[a] > counts[b] end
    return a < b
  end)
  local parts, rest = {}, 0
  for i, owner in ipairs(names) do
    if i <= OWNERS_SHOWN then
      parts[i] = ("%d of %s"):format(counts[owner], text.safe(owner, ascii))
    else
      rest = rest + counts[owner]
    end
  end
  if rest > 0 then parts[#parts + 1] = ("%d of others"):format(rest) end
  return table.concat(parts, ", ")
end

return ending
