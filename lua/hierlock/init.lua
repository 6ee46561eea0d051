--- Hierarchical locks: while I change this account, no other caller touches the account or anything in it; but others
-- may work on other accounts.
--
-- Conventions. Misuse (a wrong type, an unknown option, an empty id, a closed
-- manager) raises, at the caller's position; so does want of memory. Everything that
-- can happen to a correct program is returned as `nil, err`, see `err`. Times are
-- seconds; fractions count to the millisecond. Where it says that it blocks, the thread
-- waits, with all coroutines of its Lua state.
--
-- Threads. Managers, handles and plans belong to the Lua state that made them, and
-- are used by one thread at a time, as the state itself is. A manager of a store with
-- connections has one thread of its own, from its first acquisition on; it calls no
-- Lua and handles no signals.
--
-- Forks. In a child, a manager's copy starts afresh at its first use (and may then fail with what `hierlock.open`
-- says). The child's copies of handles are dead; the parent keeps its locks.
--
-- @module hierlock
-- @usage
-- local hierlock = require "hierlock"
-- local manager = assert(hierlock.open("mysql://app:secret@db.example.com/shop"))
-- local handle, err = manager:acquire({ user = "u1", account = "a1" }, { timeout = 5 })
-- if not handle then return nil, err end
-- -- No other caller is in this account or anything in it.
-- handle:release()

-- core is compiled for one Lua. Another one cannot load it, and says which symbol it lacks;
-- or it can (LuaJIT that for Lua 5.1), and then calls would block that should yield.
local function load_core()
  local loaded, core = pcall(require, "hierlock.core")
  local built
  if loaded then
    built = core.built
  else
    local name = tostring(core):match("from file '([^'\n]*)'")
    local file = name and io.open(name, "rb")
    if file then
      built = file:read("*a"):match("hierlock%.core is built for [%w. ]+")
      file:close()
    end
  end
  built = built and built:match("for (.*)")
  local runs = rawget(_G, "jit") and "LuaJIT" or _VERSION
  if built and built ~= runs then
    error(("hierlock is built for %s, but this program runs on %s: run it on %s, or build hierlock by `make LUA=%s`"):format(
      built, runs, built, runs:lower():gsub(" ", "")), 0)
  elseif not loaded then
    error(core, 0)
  end
  return core
end

local core = load_core()
local waiting = require "hierlock.waiting"

local hierlock = {
  _VERSION = "hierlock " .. core.version,
  plan = core.plan,
  is_error = core.is_error,
}

function hierlock.open(dsn, options)
  local loop, anywhere = waiting.loop(type(options) == "table" and options.loop or nil)
  local manager, err = core.open(dsn, options)
  if not manager then return nil, err end
  return core.set_loop(manager, loop, anywhere)
end

-- The methods that wait yield in a coroutine under a known loop. The methods that acquire are functions of the
-- module, too, on a default manager.
for name in pairs(core.start) do
  local methods = core.handle_methods[name] and core.handle_methods or core.manager_methods
  methods[name] = waiting.wrap(name, methods[name], core.await[name])
  if methods == core.manager_methods then
    hierlock[name] = function(...)
      local manager, err = core.default(hierlock.open)
      if not manager then return nil, err end
      return manager[name](manager, ...)
    end
  end
end

local wait_any = waiting.wrap("acquire_any", core.any.block, core.any.await)

-- Where a try does not block, starting to wait is one. Elsewhere waiting costs a connection for each
-- target; so each is tried first, one after the other.
local function acquire_any(manager, targets, options)
  if not core.is_manager(manager) then
    core.misuse("self must be a manager, not " .. type(manager) .. "; call it with a colon")
  end
  if type(targets) ~= "table" or type(options) ~= "table" and options ~= nil or not core.any.tries_block(manager) then
    return wait_any(manager, targets, options)
  end
  core.any.check(manager, targets, options) -- as the tries will not
  local since, rest, err = core.now(), {}, nil
  for name, value in pairs(options or {}) do rest[name] = value end
  local timeout = rest.timeout
  rest.timeout = 0
  for i = 1, #targets do
    local handle
    handle, err = manager:acquire(targets[i], rest)
    if handle or err.code ~= "timeout" then return handle, err end
  end
  rest.timeout = timeout
  if type(timeout) == "number" and timeout >= 0 then
    -- wait_any says so if it is none.
    if timeout == 0 and err then return nil, err end
    rest.timeout = math.max(timeout - (core.now() - since), 0.001)
  end
  return wait_any(manager, targets, rest)
end

core.manager_methods.acquire_any = acquire_any
core.manager_methods.start_any = core.any.start

-- Adds to the string that fn raised the traceback of where it did. Errors that are no strings, or that have a
-- traceback of an inner call, are passed on as they are.
local function traceback(raised)
  if type(raised) == "string" and not raised:find("\nstack traceback:\n", 1, true) then return debug.traceback(raised, 2) end
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
  -- The loop closes the handle even when the coroutine is closed while fn yields.
  for _ in waiting.once, nil, nil, handle do -- luacheck: ignore 512
    return finish(handle, xpcall(function()
      return fn(handle, (table.unpack or unpack)(arguments, 1, n))
    end, traceback))
  end
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

--- @type manager

--- Runs fn while the target is locked, and releases it, whatever happens; in Lua 5.4 also
-- when the coroutine is closed while fn yields. Blocks as `manager:acquire` does; the
-- release is not waited for.
-- @function manager:with
-- @tparam table target as for `manager:acquire`
-- @tparam[opt] table options as for `manager:acquire`
-- @tparam function fn called as `fn(handle, ...)`
-- @param ... passed to fn
-- @return[1] what fn returned
-- @return[2] nil
-- @return[2] err as from `manager:acquire`; `lost` when the lock was lost while fn ran
-- @raise what fn raised, with its traceback when it is a string
core.manager_methods.with = with_arguments

--- Starts what `acquire` does, and does not wait for it.
-- @function manager:start
-- @tparam table target
-- @tparam[opt] table options as for `manager:acquire`
-- @treturn[1] pending to be asked, waited for, polled or cancelled; when it is collected
--   it is cancelled, and a lock that it had got is released
-- @return[2] nil
-- @return[2] err
core.manager_methods.start = core.start.acquire

--- Acquires the first free target of the list. When none is free, waits in every queue, and takes the first grant.
-- `handle.targets` says which it is. A second grant at the same moment goes back at once. Blocks as
-- `manager:acquire` does.
-- @function manager:acquire_any
-- @tparam {table,...} targets 1 to 1000, each as for `manager:acquire`
-- @tparam[opt] table options as for `manager:acquire`
-- @treturn[1] handle
-- @return[2] nil
-- @return[2] err as from `manager:acquire`; `timeout`: no target was granted in time. Any other failure ends
--   all waits

--- Starts what `acquire_any` does, and does not wait for it; see `manager:start`.
-- @function manager:start_any
-- @tparam {table,...} targets
-- @tparam[opt] table options
-- @treturn[1] pending
-- @return[2] nil
-- @return[2] err

--- @section end

--- Calls `manager:acquire` on the default manager: one for each Lua state, opened at first
-- use as `hierlock.open()` does, and again once it was closed. So it may also
-- fail with what `hierlock.open` says.
-- @function hierlock.acquire
-- @tparam table target
-- @tparam[opt] table options as for `manager:acquire`
-- @treturn[1] handle
-- @return[2] nil
-- @return[2] err as from `manager:acquire` and `hierlock.open`

--- Calls `manager:acquire_user` on the default manager.
-- @function hierlock.acquire_user
-- @tparam string|integer user
-- @tparam[opt] table options as for `manager:acquire`
-- @treturn[1] handle
-- @return[2] nil
-- @return[2] err as from `hierlock.acquire`

--- Calls `manager:acquire_account` on the default manager.
-- @function hierlock.acquire_account
-- @tparam string|integer user
-- @tparam string|integer account
-- @tparam[opt] table options as for `manager:acquire`
-- @treturn[1] handle
-- @return[2] nil
-- @return[2] err as from `hierlock.acquire`

--- Calls `manager:acquire_resource` on the default manager.
-- @function hierlock.acquire_resource
-- @tparam string|integer user
-- @tparam string|integer account
-- @tparam string|integer resource
-- @tparam[opt] table options as for `manager:acquire`
-- @treturn[1] handle
-- @return[2] nil
-- @return[2] err as from `hierlock.acquire`

--- Calls `manager:acquire_resources` on the default manager.
-- @function hierlock.acquire_resources
-- @tparam string|integer user
-- @tparam string|integer account
-- @tparam {string|integer,...} resources
-- @tparam[opt] table options as for `manager:acquire`
-- @treturn[1] handle
-- @return[2] nil
-- @return[2] err as from `hierlock.acquire`

--- Calls `manager:acquire_all` on the default manager.
-- @function hierlock.acquire_all
-- @tparam {table,...} targets
-- @tparam[opt] table options as for `manager:acquire`
-- @treturn[1] handle
-- @return[2] nil
-- @return[2] err as from `hierlock.acquire`

--- Calls `manager:acquire_any` on the default manager.
-- @function hierlock.acquire_any
-- @tparam {table,...} targets
-- @tparam[opt] table options as for `manager:acquire`
-- @treturn[1] handle
-- @return[2] nil
-- @return[2] err as from `hierlock.acquire`
function hierlock.acquire_any(...)
  local manager, err = core.default(hierlock.open)
  if not manager then return nil, err end
  return manager:acquire_any(...)
end

--- Calls `manager:import` on the default manager.
-- @function hierlock.import
-- @string text
-- @tparam[opt] table options as for `manager:import`
-- @treturn[1] handle
-- @return[2] nil
-- @return[2] err as from `manager:import` and `hierlock.open`

--- Calls `manager:holders` on the default manager.
-- @function hierlock.holders
-- @tparam[opt] table target
-- @treturn[1] {table,...} as from `manager:holders`
-- @return[2] nil
-- @return[2] err as from `manager:holders` and `hierlock.open`
function hierlock.holders(...)
  local manager, err = core.default(hierlock.open)
  if not manager then return nil, err end
  return manager:holders(...)
end

--- Writes the counts of managers for Prometheus: a text of its exposition format 0.0.4, which goes by HTTP as
-- `text/plain; version=0.0.4`. docs/observability.md has the table of metrics. Does not block, and asks no store.
-- @function hierlock.prometheus
-- @tparam[opt] manager|{manager|string,...} source a manager; or a list of managers and of texts that this function
--   has made, perhaps in another process: series that are the same are added up; by default the default manager
-- @tparam[opt] table options an unknown name raises
-- @string[opt="hierlock"] options.prefix of the metrics' names, before `_`; texts in the list keep theirs
-- @tparam[opt] table options.labels labels to add to each series, `{worker = "1"}`: name to string or number; not `level` or
--   `le`; texts in the list keep theirs
-- @treturn[1] string
-- @return[2] nil
-- @return[2] err of the default manager, as from `hierlock.open`
function hierlock.prometheus(source, options)
  local err
  if source == nil then
    source, err = core.default(hierlock.open)
    if not source then return nil, err end
  end
  return require("hierlock.prometheus").text(source, options)
end

--- Calls `manager:with` on the default manager.
-- @function hierlock.with
-- @tparam table target
-- @tparam[opt] table options as for `manager:acquire`
-- @tparam function fn called as `fn(handle, ...)`
-- @param ... passed to fn
-- @return[1] what fn returned
-- @return[2] nil
-- @return[2] err as from `manager:with` and `hierlock.open`
-- @raise what fn raised, with its traceback when it is a string
function hierlock.with(...)
  local manager, err = core.default(hierlock.open)
  if not manager then return nil, err end
  return with_arguments(manager, ...)
end

return hierlock
