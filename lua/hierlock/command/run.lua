--- hierlock run: takes locks, runs a command while they are held, releases them. The command is told before another
-- caller can hold its locks, and its exit status is passed on.

local uv = require "luv"
local core = require "hierlock.core"
local lookup = require "hierlock.command.lookup"
local subject_of = require "hierlock.command.examine.subject"

local unpack = table.unpack or unpack -- luacheck: ignore

local run = {
  summary = "Run a command while locks are held.",
  description = "Takes the locks on all targets, in one call that cannot deadlock. Then runs the command, releases the locks, and " ..
    "exits with the command's status. Passes signals on to the command. Ends the command if the locks are lost.",
  -- Behind "--" there is another program's command line.
  tail = "command",
}

-- Rarely used by commands; of <sysexits.h>: EX_TEMPFAIL, EX_PROTOCOL. And the shells' for a signal.
local NOT_ACQUIRED, LOST, SIGNALLED = 75, 76, 128
local GRACE, HOLD_TIMEOUT = 5, 30 -- s
local TIMEOUT, PAUSE_MS = 50, 200 -- s; between two tries to reach a store
local LOOK_MS = 100 -- between two looks whether the locks are held
-- Signals that cannot be passed on are missing: the other stop signals stop us together with the command, or only
-- us.
local PASSED = { "sighup", "sigint", "sigquit", "sigterm", "sigusr1", "sigusr2", "sigalrm", "sigwinch", "sigcont" }
-- The terminal sends these to the command, too.
local OF_TERMINAL = { sigint = true, sigquit = true, sigwinch = true }
-- So long before the end of the locks the command is gone: s.
local MARGIN = 0.1

-- The script that becomes the command. First it tells the guard its number, as this process can die at any moment.
-- It does so on a descriptor that the command has no use for. The first word: signals that it ignores, as this process
-- does.
local BEGIN = [[echo "$$" >&%d; exec %d>&-; [ -z "$1" ] || trap "" $1; shift; exec "$@"]]
-- The guard. The guard reads the command's number, and then a word that the command has ended. If the pipe is closed
-- at every writer before that word, this process has died. Then the guard ends the command within the grace: a lease
-- has no more time left. A single sleep covers all of the grace, as on a busy machine many short ones take longer.
-- Where sleep takes no fractions, sooner.
local GUARD = [[
read -r pid || exit
read -r word && exit
kill -TERM "$pid" || exit
sleep "$2" & grace=$!
while kill -0 "$pid" && kill -0 "$grace"; do sleep "$1"; done
kill -KILL "$pid"
kill "$grace"
]]

local function status(given)
  local value = tonumber(given)
  if value and value >= 0 and value <= 255 and value % 1 == 0 then return value end
  return nil, "-E must be a number from 0 to 255"
end

function run.options(parser)
  parser:argument("targets", "Nodes, as u1/a1/r1; %2F stands for a slash in an id, %25 for a %."):args "+":argname "TARGET"
  parser:option("-t --timeout", "Seconds to wait for the locks; 0: not at all; inf: for ever. Default: 50.")
    :argname "SECONDS":convert(lookup.seconds("--timeout", 0, true))
  parser:option("--ttl", "Take a lease of so many seconds, refreshed while the command runs; it outlives this process by that time at most.")
    :argname "SECONDS":convert(lookup.seconds("--ttl", 0.001))
  parser:flag("--keep-dsn", "Leave $HIERLOCK_DSN, which may have a password, to the command.")
  parser:flag("--shared", "Lock for readers: other readers may hold the same node.")
  parser:option("--label", "The text that lists of holders show. Default: the command's name."):argname "TEXT"
  parser:option("--grace", "Seconds between SIGTERM and SIGKILL when the locks are lost. Default: 5, or a third of the lease's time.")
    :argname "SECONDS":convert(lookup.seconds("--grace", 0))
  parser:option("-E --conflict-exit-code", "Exit with this when the locks were not granted in time. Default: 75.")
    :argname "CODE":convert(status)
  lookup.store_options(parser)
end

-- Every byte that means something to a shell, or in a target, as %NN.
local function encoded(id)
  return (tostring(id):gsub("[^%w._~-]", function(c) return ("%%%02X"):format(c:byte()) end))
end

-- The value that the command finds in $HIERLOCK_DSN. Without any it would lock in `file:`, where it excludes no
-- other machine; with this a program that takes its store from there says that it cannot.
local WITHHELD = "withheld-by-hierlock-run://"

-- The environment of the command: what this process was given, without a password that it was told since.
local function environment(handle, targets, given)
  local list, names = {}, {}
  for i, ids in ipairs(targets) do
    local parts = {}
    for k, id in ipairs(ids) do parts[k] = encoded(id) end
    names[i] = table.concat(parts, "/")
  end
  local ours = { HIERLOCK_TOKEN = handle.token or "", HIERLOCK_TARGET = table.concat(names, " ") }
  for name, value in pairs(given) do
    if not ours[name] then list[#list + 1] = name .. "=" .. value end
  end
  for name, value in pairs(ours) do list[#list + 1] = name .. "=" .. value end
  return list
end

-- Which signals this process was started to ignore, as by nohup, or by a shell that has put it in the background: a set.
local function ignored_signals()
  local ignored = {}
  local file = io.open "/proc/self/status"
  local mask = file and tonumber(file:read("*a"):match "SigIgn:%s*%x*(%x%x%x%x%x%x%x%x)\n", 16) or 0
  if file then file:close() end
  for _, name in ipairs(PASSED) do
    ignored[name] = math.floor(mask / 2 ^ (uv.constants[name:upper()] - 1)) % 2 == 1 or nil
  end
  return ignored
end

-- Hears signals from now on: signals.hear(name) is called with each that is to be passed on. None of them ends this
-- process, nor does a pipe whose other end is closed. signals.ignored: the numbers of those that are ignored, as text.
local function hear_signals()
  local signals, handles, ignored, numbers = {}, { uv.new_signal() }, ignored_signals(), {}
  handles[1]:start("sigpipe", function() end)
  for _, name in ipairs(PASSED) do
    if ignored[name] then
      numbers[#numbers + 1] = uv.constants[name:upper()]
    else
      local handle = uv.new_signal()
      handle:start(name, function() signals.hear(name) end)
      handles[#handles + 1] = handle
    end
  end
  signals.ignored = table.concat(numbers, " ")
  function signals.close()
    for _, handle in ipairs(handles) do handle:close() end
    uv.run "nowait"
  end
  return signals
end

-- Takes the locks: the handle; nil, err; nil, nil, the name of the signal that came first.
local function acquire(manager, targets, options, signals)
  local handle, err, signal
  local waits = false -- a loop that is told to stop before it runs keeps what was closed: luv then crashes
  function signals.hear(name)
    if name == "sigcont" or name == "sigwinch" then return end
    signal = signal or name
    uv.stop()
  end
  coroutine.wrap(function()
    handle, err = manager:acquire_all(targets, options)
    if waits then uv.stop() end
  end)()
  waits = true
  while not handle and not err and not signal do uv.run() end
  if not signal then return handle, err end
  return nil, nil, signal
end

-- A descriptor of one digit, as not every shell knows more, that this process was not given for the command; the last
-- one, where it was given all of them.
local LAST, CLOSES = 9, 2 ^ 19 -- O_CLOEXEC: the descriptor is this process's own
local function spare()
  for number = 3, LAST - 1 do
    local file = io.open("/proc/self/fdinfo/" .. number)
    local flags = file and tonumber(file:read("*a"):match "flags:%s*(%d+)", 8)
    if file then file:close() end
    if not flags or math.floor(flags / CLOSES) % 2 == 1 then return number end
  end
  return LAST
end

-- Starts a shell with a script, or raises.
local function shell(script, words, options, on_exit)
  options.args = { "-c", script, "hierlock", unpack(words) }
  local process, err = uv.spawn("/bin/sh", options, on_exit)
  return process or error("cannot run /bin/sh: " .. err, 0)
end

-- Runs the command while the locks are held: its exit status, and whether they were lost.
local function hold(arguments, handle, targets, grace, signals, given)
  local ended, told
  local pipe = assert(uv.pipe())
  -- No signal of a terminal reaches it.
  local guard = shell(GUARD, { ("%.3f"):format(grace / 50), ("%.3f"):format(grace) }, { stdio = { pipe.read }, detached = true }, function() end)
  local number = spare()
  local stdio = {}
  for each = 0, number - 1 do stdio[each + 1] = each end
  stdio[number + 1] = pipe.write
  local child = shell(BEGIN:format(number, number), { signals.ignored, unpack(arguments.command) },
    { stdio = stdio, env = environment(handle, targets, given) },
    function(code, signal)
      ended = signal > 0 and SIGNALLED + signal or code
      uv.stop()
    end)
  uv.fs_close(pipe.read)
  local terminal = io.open("/dev/tty", "r")
  if terminal then terminal:close() end
  local refused = {}
  local function tell(name) -- a command that runs as another user, as by sudo, may not be told
    local ok, why, code = child:kill(name)
    if ok or code == "ESRCH" or refused[name] then return end
    refused[name] = true
    io.stderr:write(("hierlock: cannot send the command %s: %s\n"):format(name:upper(), why))
  end
  function signals.hear(name)
    if not (terminal and OF_TERMINAL[name]) then tell(name) end
  end
  local timer = uv.new_timer()
  timer:start(0, LOOK_MS, function()
    local held, left = handle:is_held(), handle:remaining()
    if not told and (not held or left < grace + MARGIN) then
      told = uv.now()
      io.stderr:write "hierlock: the locks are lost: ending the command\n"
      tell "sigterm"
      child:kill "sigcont" -- a stopped one hears nothing else
    end
    -- A lock that is still held ends after `left`.
    if told and (uv.now() - told >= grace * 1000 or (held and left < MARGIN)) then tell "sigkill" end
  end)
  while not ended do uv.run() end
  timer:close()
  child:close()
  guard:close()
  uv.fs_write(pipe.write, "ended\n")
  uv.fs_close(pipe.write)
  uv.run "nowait"
  return ended, told ~= nil
end

-- Takes the locks, also where the server goes and is back in time: as acquire.
local function persist(manager, targets, options, signals)
  local last, told, pause = uv.now() + options.timeout * 1000, false, uv.new_timer()
  while true do
    local handle, err, signal = acquire(manager, targets, options, signals)
    local left = last - uv.now() - PAUSE_MS
    if handle or signal or err.code ~= "connection" or not err.retryable or left <= 0 then
      pause:close()
      return handle, err, signal
    end
    if not told then io.stderr:write("hierlock: ", err.message, ": trying again\n") end
    told, options.timeout = true, left / 1000
    local over
    function signals.hear(name) if name ~= "sigcont" and name ~= "sigwinch" then signal, over = name, true end end
    pause:start(PAUSE_MS, 0, function() over = true end)
    while not over do uv.run "once" end
    if signal then
      pause:close()
      return nil, nil, signal
    end
  end
end

-- With a manager: an exit status; nil, err.
local function locked(manager, arguments, targets, grace, signals, given)
  local ttl = arguments.ttl
  local handle, err, signal = persist(manager, targets, {
    timeout = arguments.timeout or TIMEOUT, ttl = ttl, auto_refresh = ttl and true, mode = arguments.shared and "shared" or nil,
    label = arguments.label or arguments.command[1]:match "[^/]+$",
  }, signals)
  if signal then return SIGNALLED + uv.constants[signal:upper()] end
  if not handle then
    if err.code ~= "timeout" then return nil, err end
    io.stderr:write("hierlock: ", err.message, "\n")
    return arguments.conflict_exit_code or NOT_ACQUIRED
  end
  local code, lost = hold(arguments, handle, targets, grace, signals, given)
  local ok, why = handle:release { confirm = not lost } -- a store that is not heard of would not confirm it
  if ok and not lost then return code end
  if not ok then io.stderr:write("hierlock: ", why.message, "\n") end
  return LOST
end

function run.run(arguments)
  local targets, ttl, err = {}, arguments.ttl
  if #arguments.command == 0 then return lookup.usage "the command is missing: hierlock run TARGET... -- COMMAND..." end
  for i, argument in ipairs(arguments.targets) do
    targets[i], err = lookup.target(argument)
    if not targets[i] then return nil, err end
  end
  local grace = arguments.grace or ttl and math.min(GRACE, ttl / 3) or GRACE
  -- A third of it goes by between two refreshes, and some time more before one is answered.
  if ttl and grace + MARGIN > 0.6 * ttl then
    return lookup.usage("--grace and %.1f seconds must be at most 0.6 of --ttl", MARGIN)
  end
  local given = uv.os_environ()
  if given.HIERLOCK_DSN and not arguments.keep_dsn then given.HIERLOCK_DSN = WITHHELD end
  local manager, wanted = lookup.open(arguments, "run", { loop = "luv", hold_timeout = math.max(HOLD_TIMEOUT, grace * 3) })
  if not manager then return nil, wanted end
  local own = subject_of.user() == 0 and subject_of.own_directory(core.dsn(wanted.dsn))
  if own then
    io.stderr:write(("hierlock: the locks are root's alone, in %s: programs of other users have others. To share them, name a directory: "
      .. "--dsn file:/run/shop-locks\n"):format(own))
  end
  local signals = hear_signals()
  local ok, result, failure = pcall(locked, manager, arguments, targets, grace, signals, given)
  signals.close()
  manager:close()
  if not ok then return lookup.misuse(result) end
  return result, failure
end

return run
