--- The event loops that the specs run coroutines on: cqueues, luv, copas, and one
-- written here, as a program would that has a loop of its own. Each has
--
--     option          for hierlock.open
--     spawn(fn, ...)  runs fn in a coroutine
--     sleep(seconds)  in such a coroutine
--     step()          goes on with what can go on; waits for some milliseconds at most
--     close()         ends it, whatever waits still
--
-- What a coroutine raises comes out of step().

local uv = require "luv"

local loops = {}

local STEP = 0.005

local function now() return uv.hrtime() / 1e9 end

local function checked(thread, ok, raised)
  if not ok then error(type(raised) == "string" and debug.traceback(thread, raised) or raised, 0) end
  return raised
end

-- --------------------------------------------------------------- cqueues

function loops.cqueues()
  local cqueues = require "cqueues"
  local self, controller = { name = "cqueues", option = "cqueues" }, cqueues.new()
  function self.spawn(fn, ...)
    controller:wrap(fn, ...)
    self.step(0)
  end
  self.sleep = cqueues.sleep
  function self.step(seconds)
    local ok, raised = controller:step(seconds or STEP)
    if not ok then error(raised, 0) end
  end
  function self.close() controller:close() end
  return self
end

-- ------------------------------------------------------------------- luv

function loops.luv()
  local self, failed = { name = "luv", option = "luv" }, nil
  local function resume(thread, ...)
    local ok, raised = coroutine.resume(thread, ...)
    if not ok then failed = failed or { thread, ok, raised } end
  end
  function self.spawn(fn, ...) resume(coroutine.create(fn), ...) self.check() end
  function self.sleep(seconds)
    local thread, timer = coroutine.running(), uv.new_timer()
    timer:start(math.ceil(seconds * 1000), 0, function()
      timer:close()
      resume(thread)
    end)
    coroutine.yield()
  end
  function self.check()
    local what = failed
    failed = nil
    if what then checked(what[1], what[2], what[3]) end
  end
  local tick = uv.new_timer()
  function self.step(seconds)
    -- Again and again: it may go off before libuv waits.
    local ms = math.max(1, math.ceil((seconds or STEP) * 1000))
    tick:start(ms, ms, function() end)
    uv.run "once"
    tick:stop()
    self.check()
  end
  function self.close()
    uv.walk(function(handle)
      local kind = uv.handle_get_type(handle)
      if (kind == "poll" or kind == "timer") and not handle:is_closing() then handle:close() end
    end)
    uv.run "nowait"
  end
  return self
end

-- ----------------------------------------------------------------- copas

-- Debian has it for Lua 5.1 and 5.2 only, though it runs on every one.
local function require_copas()
  local path = package.path
  package.path = path .. ";/usr/share/lua/5.1/?.lua"
  local ok, copas = pcall(require, "copas")
  package.path = path
  return ok and copas or error(copas, 0)
end

function loops.copas()
  local copas, socket = require_copas(), require "socket"
  local self, failed = { name = "copas", option = "copas" }, nil
  function self.spawn(fn, ...)
    local arguments, n = { ... }, select("#", ...) -- version 1 puts a nil before them
    copas.addthread(function()
      copas.setErrorHandler(function(raised, thread) failed = failed or { thread, false, raised } end)
      fn((table.unpack or unpack)(arguments, 1, n))
    end)
    self.check()
  end
  self.check = function()
    local what = failed
    failed = nil
    if what then checked(what[1], what[2], what[3]) end
  end
  -- Version 1 has no sleep: here a socket that is always readable, and says no
  -- until it is time.
  local always = assert(socket.udp())
  assert(always:setsockname("127.0.0.1", 0))
  assert(always:setpeername(always:getsockname()))
  assert(always:send "x")
  function self.sleep(seconds)
    local till = now() + seconds
    copas.receive {
      getfd = function() return always:getfd() end,
      dirty = function() return false end,
      close = function() end,
      receive = function()
        if now() >= till then return "now" end
        uv.sleep(1)
        return nil, "timeout"
      end,
    }
  end
  function self.step(seconds)
    copas.step(seconds or STEP)
    self.check()
  end
  function self.close() always:close() end -- its threads stay: there is one set of them for the whole state
  return self
end

-- -------------------------------------------------------- one of our own

--- A loop of 30 lines on select(2), and what hierlock needs to know of it: `option`.
loops["a function"] = function()
  local select = require("socket").select
  local self = { name = "a function" }
  local wanted, times = {}, {} -- thread -> descriptor, or the time to wake up

  -- The option that tells hierlock about this loop.
  function self.option(pending)
    while not pending:done() do coroutine.yield("read", pending:fd()) end
  end

  local function resume(thread, ...)
    wanted[thread], times[thread] = nil, nil
    local ok, what, value = coroutine.resume(thread, ...)
    checked(thread, ok, what)
    if what == "read" then wanted[thread] = value end
    if what == "sleep" then times[thread] = now() + value end
  end
  function self.spawn(fn, ...) resume(coroutine.create(fn), ...) end
  function self.sleep(seconds) coroutine.yield("sleep", seconds) end
  function self.step(seconds)
    local list, ready = {}, {}
    for thread, fd in pairs(wanted) do
      list[#list + 1] = { thread = thread, getfd = function() return fd end, dirty = function() return false end }
    end
    for _, one in ipairs((select(list, nil, seconds or STEP))) do ready[#ready + 1] = one.thread end
    for thread, time in pairs(times) do
      if now() >= time then ready[#ready + 1] = thread end
    end
    for _, thread in ipairs(ready) do resume(thread) end
  end
  function self.close() wanted, times = {}, {} end
  return self
end

--- The names, in order. copas may be installed without its own needs, as in a Debian without binaryheap: then
-- `missing` says why, and loop_spec tells.
loops.names = { "cqueues", "luv", "copas", "a function" }
local loaded, why = pcall(require_copas)
if not loaded then
  table.remove(loops.names, 3)
  loops.missing = "copas cannot be loaded here: " .. tostring(why):match("^[^\n]*")
end

return loops
