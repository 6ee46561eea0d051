--- How a coroutine waits: calls that would block their thread start, yield by the
-- manager's loop until they are done, and then return as if they had blocked.
-- In the main thread, or without a loop, they block. Wraps the methods of
-- hierlock.core; internal.
--
-- A loop is a function `loop(pending)` that returns once `pending:done()`. The loop may yield as its event loop
-- wants; `pending:fd()` becomes readable. The modules hierlock.loop.NAME are such functions; or a table, whose
-- `call` does it all, where there is more to it than to yield. An error that a loop raises ends the wait, and so
-- does `nil, err` with an err of hierlock's; then nothing stays locked.

local core = require "hierlock.core"

local waiting = {}

local NAMES = { cqueues = true, luv = true, copas = true, ngx = true, tarantool = true }

-- In Lua 5.1, pcall cannot be yielded across: there, what the loop raises passes, and the
-- collector cancels.
local yields_across_pcall = _VERSION ~= "Lua 5.1" or rawget(_G, "jit") ~= nil

-- Without an option: cqueues says by itself whether it runs this coroutine. A coroutine that the program has made inside
-- a coroutine of cqueues' blocks. The program gets its yields, and may not know what to do with them.
local function notice()
  local cqueues = package.loaded.cqueues
  if type(cqueues) == "table" and cqueues.running then
    local controller, resumed = cqueues.running()
    if controller and resumed then return require "hierlock.loop.cqueues" end
  end
end

--- The value of the option `loop` as core.loop gives it back, and whether that loop needs no yield of Lua's, so that
-- it waits wherever it is called. Raises.
function waiting.loop(option)
  if option == nil or option == "auto" then
    local ngx = rawget(_G, "ngx")
    if not (ngx and ngx.get_phase) then return true end
    option = "ngx"
  end
  if option == "block" then return nil end
  if type(option) == "function" then return option end
  if type(option) == "table" and type(option.anywhere) == "function" and next(option, (next(option))) == nil then
    return option.anywhere, true
  end
  if type(option) ~= "string" or not NAMES[option] then
    core.misuse('loop must be "auto", "block", "cqueues", "luv", "copas", "ngx", "tarantool", a function or { anywhere = function }' ..
                (type(option) == "string" and (", not %q"):format(option) or ", not a " .. type(option)))
  end
  local ok, loop = pcall(require, "hierlock.loop." .. option)
  if not ok then core.misuse(("loop %q cannot be had: %s"):format(option, tostring(loop):match("^[^\n]*"))) end
  return loop, option == "tarantool" or type(loop) == "table"
end

--- An iterator with a single turn. In Lua 5.4 `for _ in once, nil, nil, value do … end` closes the value when the
-- loop is left, however it is left. Older Luas close nothing, but can read it; `local value <close>` they cannot
-- read.
function waiting.once(_, done)
  if not done then return true end
end

-- Cancels when it is closed. Not the pending itself: a loop may be polling its descriptor.
local guard_class = { __close = function(guard) guard.pending:cancel() end }

-- Returns the pending's result, and closes its descriptor at once.
local function take(pending)
  local result, err = pending:wait(0)
  core.close(pending)
  return result, err
end

local function wait_unguarded(loop, pending)
  local ok, raised, err = true
  if yields_across_pcall then
    ok, raised, err = pcall(loop, pending)
  else
    raised, err = loop(pending)
  end
  if not ok then
    pending:cancel()
    if core.is_error(raised) then return nil, raised end
    error(raised, 0)
  elseif raised == nil and core.is_error(err) then
    pending:cancel()
    return nil, err
  elseif not pending:done() then
    pending:cancel()
    core.misuse "the function given as loop returned before pending:done()"
  end
  return take(pending)
end

local function wait(loop, pending)
  -- If the coroutine is closed during the wait, no caller takes the result: the guard cancels.
  for _ in waiting.once, nil, nil, setmetatable({ pending = pending }, guard_class) do -- luacheck: ignore 512
    return wait_unguarded(loop, pending)
  end
end

--- The method of that name, yielding where it can. `blocking` and `start` are its two forms.
function waiting.wrap(name, blocking, start)
  local loop_of = core.loop
  return function(self, ...)
    local loop = loop_of(self)
    if not loop then return blocking(self, ...) end
    if loop == true then
      loop = notice()
      if not loop then return blocking(self, ...) end
    end
    if type(loop) == "table" then return loop.call(name, blocking, start, self, ...) end
    local pending, err = start(self, ...)
    if not core.is_pending(pending) then return pending, err end
    if pending:done() then return take(pending) end
    return wait(loop, pending)
  end
end

return waiting
