--- Serves `hierlock matrix` and `hierlock bench`: a tree that no other program uses, on the store that the arguments
-- name, and managers that open it.

local hierlock = require "hierlock"
local server = require "hierlock.command.server"
local subject_of = require "hierlock.command.examine.subject"
local uv = require "luv"

local trials = {}

local LEVELS_MAX = 16

--- Adds what says which store.
function trials.options(parser)
  parser:argument("dsn", "The store, as mysql://user@host:port/database or file:/directory; without one, $HIERLOCK_DSN."):args "?"
  parser:flag("-p --ask-password", "Ask for the password on the terminal.")
  parser:option("--levels", "Names of the levels, from root to leaf. Default: as recorded, else user,account,resource."):argname "NAMES"
end

--- Describes the store: where (for people), said, open(options) (a manager | nil, err), root (an id that no other
-- program uses); nil, err.
function trials.store(arguments, what)
  local wanted, err = server.parse(arguments)
  if not wanted then return nil, err end
  wanted.dsn = server.with_password(wanted)
  local self = subject_of.new(wanted)
  self.root = ("hierlock %s %s %d %.0f"):format(what, uv.os_gethostname(), uv.os_getpid(), uv.hrtime())
  function self.open(options)
    local all = { levels = wanted.levels, application = "hierlock " .. what }
    for name, value in pairs(options or {}) do all[name] = value end
    return hierlock.open(wanted.dsn, all)
  end
  return self
end

--- The names of a manager's levels, from root to leaf; nil, err. Only the manager knows them, and it refuses a target
-- that is too deep.
function trials.levels(manager, root)
  for n = LEVELS_MAX, 1, -1 do
    local ids, place = { root }, { [root] = 1 }
    for i = 2, n do
      ids[i] = tostring(i)
      place[ids[i]] = i
    end
    local ok, handle, err = pcall(manager.acquire, manager, ids, { timeout = 5 })
    if ok and not handle then return nil, err end
    if ok then
      local names = {}
      for name, id in pairs(handle.targets[1]) do names[place[id]] = name end
      ok, err = handle:release { confirm = true }
      if not ok then return nil, err end
      return names
    elseif not tostring(handle):find("position that is none", 1, true) then
      error(handle, 0)
    end
  end
end

return trials
