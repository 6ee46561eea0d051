--- The command `hierlock` as a user runs it: a process of its own, on a terminal where it matters.

local uv = require "luv"
local assert = require "luassert"
local support = require "spec.support"

local command = {}

local PROGRAM = "lua/hierlock/command/main.lua"
command.interpreter = os.getenv "HIERLOCK_LUA" or "lua"

local function environment(dsn)
  local list = {}
  for name, value in pairs(uv.os_environ()) do
    if name ~= "HIERLOCK_DSN" then list[#list + 1] = name .. "=" .. value end
  end
  if dsn then list[#list + 1] = "HIERLOCK_DSN=" .. dsn end
  return list
end

local running = {}

-- Starts a program; self.out and self.err grow as they are read.
local function spawn(program, arguments, variables, input)
  local self = { out = "", err = "" }
  local out, err = uv.new_pipe(false), uv.new_pipe(false)
  self.handle, self.pid = assert(uv.spawn(program, {
    args = arguments, env = variables, stdio = { input, out, err },
  }, function(status, signal) self.status, self.signal = status, signal end))
  out:read_start(function(_, data) self.out = self.out .. (data or "") if not data then out:close() end end)
  err:read_start(function(_, data) self.err = self.err .. (data or "") if not data then err:close() end end)
  function self.until_true(condition, what)
    return support.wait_until(function() uv.run("nowait") return condition() end, what)
  end
  function self.join()
    local function ended() return self.status and out:is_closing() and err:is_closing() end
    if not support.run_until(support.DEADLINE, ended) then
      error("gave up waiting for the end of the command; it said: " .. self.out .. self.err, 2)
    end
    if input and not input:is_closing() then input:close() end
    if not self.handle:is_closing() then self.handle:close() end
    uv.run("nowait")
    return self
  end
  running[#running + 1] = self
  return self
end

--- Starts it, with $HIERLOCK_DSN and arguments; self.out and self.err grow as they are read.
function command.start(dsn, ...) return spawn(command.interpreter, { PROGRAM, ... }, environment(dsn)) end

--- Runs it to its end.
function command.run(...) return command.start(...).join() end

--- Runs a line that the command has printed, in a shell that knows it as `hierlock`.
function command.run_line(dsn, line)
  return spawn("sh", { "-c", ('hierlock() { %s %s "$@"; }\n'):format(command.interpreter, PROGRAM) .. line }, environment(dsn)).join()
end

local function quoted(word) return "'" .. word:gsub("'", [['\'']]) .. "'" end

--- Starts a shell's command line on a terminal of its own, by script(1); self.out is what that shows. self.type(text)
-- types, self.hang_up() ends the input.
function command.line_on_terminal(dsn, columns, line)
  local variables = environment(dsn)
  variables[#variables + 1], variables[#variables + 2] = "TERM=xterm", "LC_ALL=C.UTF-8"
  local input = uv.new_pipe(false)
  local self = spawn("script", { "-qec", ("stty cols %d rows 40; "):format(columns) .. line, "/dev/null" }, variables, input)
  function self.type(text) input:write(text) end
  function self.hang_up() input:close() end
  function self.shows(text)
    return self.until_true(function() return self.out:find(text, 1, true) end, text .. " in: " .. self.out)
  end
  return self
end

--- Starts the command so.
function command.on_terminal(dsn, columns, ...)
  local words = { "exec", command.interpreter, PROGRAM }
  for i = 1, select("#", ...) do words[#words + 1] = quoted((select(i, ...))) end
  return command.line_on_terminal(dsn, columns, table.concat(words, " "))
end

function command.assert_status(expected, ended)
  assert.equal(expected, ended.status, ended.out .. ended.err)
  return ended
end

--- Ends what a spec has left; for after_each.
function command.close()
  for _, one in ipairs(running) do
    if not one.status then uv.kill(one.pid, "sigkill") end
    one.join()
  end
  running = {}
end

return command
