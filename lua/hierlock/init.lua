--- Hierarchical locks: while I change this account, nobody touches the account
-- or anything in it; but others may work on other accounts.
--
-- Conventions. Misuse (a wrong type, an unknown option, an empty id, a closed
-- manager) raises, at the caller's position. Everything that can happen to a
-- correct program is returned as `nil, err`; `err` is a table with `code`,
-- `message`, `retryable`, and where they apply `errno`, `sqlstate`, `target`,
-- `holders`. Times are seconds; fractions count to the millisecond.
--
-- A manager and its handles belong to the Lua state that made them. After a
-- fork, a child's copy of a manager starts afresh, and its copies of handles are
-- dead.
--
-- @module hierlock

local core = require "hierlock.core"
local waiting = require "hierlock.waiting"

local hierlock = {
  _VERSION = "hierlock " .. core.version,
  plan = core.plan,
  is_error = core.is_error,
}

function hierlock.open(dsn, options)
  local loop = waiting.loop(type(options) == "table" and options.loop or nil)
  local manager, err = core.open(dsn, options)
  if not manager then return nil, err end
  core.set_loop(manager, loop)
  return manager
end

-- The methods that wait yield in a coroutine under a known loop. Those that
-- acquire are functions of the module, too, on a default manager.
for name, start in pairs(core.start) do
  local methods = core.handle_methods[name] and core.handle_methods or core.manager_methods
  methods[name] = waiting.wrap(methods[name], start)
  if methods == core.manager_methods then
    hierlock[name] = function(...)
      local manager, err = core.default(hierlock.open)
      if not manager then return nil, err end
      return manager[name](manager, ...)
    end
  end
end

-- What fn raised, with the traceback of where it did; errors that are no strings
-- are passed on as they are.
local function traceback(raised)
  if type(raised) == "string" then return debug.traceback(raised, 2) end
  return raised
end

-- Releases, then returns or raises as fn did. A lock that was lost while fn ran
-- is a failure even though fn returned: it did not run alone.
local function finish(handle, ok, ...)
  local released, err = handle:release()
  if not ok then error((...), 0) end
  if not released then return nil, err end
  return ...
end

local function with(manager, target, options, fn, ...)
  local handle, err = manager:acquire(target, options)
  if not handle then return nil, err end
  local arguments, n = {...}, select("#", ...)
  return finish(handle, xpcall(function()
    return fn(handle, (table.unpack or unpack)(arguments, 1, n))
  end, traceback))
end

local function with_arguments(manager, target, options, fn, ...)
  if not core.is_manager(manager) then
    core.misuse("self must be a manager, not " .. type(manager) .. "; call it with a colon")
  end
  if type(options) == "function" then
    return with(manager, target, nil, options, fn, ...)
  end
  if type(fn) ~= "function" then
    core.misuse("fn must be a function, not " .. type(fn))
  end
  return with(manager, target, options, fn, ...)
end

--- Runs fn while the target is locked, and releases it, whatever happens.
-- @function manager:with
-- @tparam table target
-- @tparam[opt] table options as for `acquire`
-- @tparam function fn called as `fn(handle, ...)`
-- @param ... passed to fn
-- @return[1] what fn returned
-- @return[2] nil
-- @return[2] err as from `acquire`; `lost` when the lock was lost while fn ran
-- @raise what fn raised, with its traceback when it is a string
core.manager_methods.with = with_arguments

core.manager_methods.start = core.start.acquire

function hierlock.holders(...)
  local manager, err = core.default(hierlock.open)
  if not manager then return nil, err end
  return manager:holders(...)
end

function hierlock.with(...)
  local manager, err = core.default(hierlock.open)
  if not manager then return nil, err end
  return with_arguments(manager, ...)
end

return hierlock
