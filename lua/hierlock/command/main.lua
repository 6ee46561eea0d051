#!/usr/bin/env lua
--- The command `hierlock`: parses the command line, calls the subcommand, and
-- says by the exit status how it went (see hierlock(1)).
--
-- A subcommand is a module hierlock.command.NAME, listed below, with
--   summary            one line for --help
--   description        a paragraph for its own --help
--   options(parser)    adds its arguments and options to an argparse parser
--   tail               the name of what stands behind "--", where that is a command line
--   run(arguments)     does it; returns an exit status, or nil, err
-- and it lets errors pass: an interruption is one.

local SUBCOMMANDS = { "provision", "verify", "run", "leases", "revoke", "ps", "top", "explain", "graph", "kill", "doctor", "matrix", "bench" }

-- The numbers come from <sysexits.h>, so that 1 stays free for "no".
local USAGE, UNAVAILABLE, SOFTWARE, OUTPUT, NO_PERMISSION, CONFIGURATION, INTERRUPTED = 64, 69, 70, 74, 77, 78, 130
local STATUS = {
  dsn = USAGE,
  connection = UNAVAILABLE,
  timeout = UNAVAILABLE,
  deadlock = UNAVAILABLE,
  output = OUTPUT,
  mismatch = CONFIGURATION,
  unsafe_server = CONFIGURATION,
  not_provisioned = CONFIGURATION,
  unsupported = CONFIGURATION,
  privilege = NO_PERMISSION,
}
-- A privilege that is missing, whatever came of it: MySQL's for a table, a column, a routine, and any; PostgreSQL's.
local DENIED = { [1044] = true, [1142] = true, [1143] = true, [1227] = true, [1370] = true, ["42501"] = true }

local function leave(status, message)
  if message then io.stderr:write("hierlock: ", message, "\n") end
  os.exit(status, true)
end

-- Works as pcall(require, module); but Ctrl-C, which Lua makes an error of, ends the command here as it does later.
local function load(module)
  local ok, loaded = pcall(require, module)
  if not ok and tostring(loaded):find "interrupted!" then leave(INTERRUPTED) end
  return ok, loaded
end

local function own(module)
  local ok, loaded = load(module)
  return ok and loaded or error(loaded, 0)
end

local function need(module, package)
  local ok, loaded = load(module)
  if ok then return loaded end
  -- Not where it was looked for, which is a long list.
  if loaded:find("^module '" .. module .. "' not found:") then loaded = "it is not installed for " .. _VERSION end
  leave(SOFTWARE, ("the command needs the Lua module %s: luarocks install %s, or apt-get install lua-%s (%s)")
    :format(module, package, package, loaded))
end

-- The next file opened would take the number of a closed standard descriptor: a socket, into which messages then go,
-- or the loop's own, with which libuv aborts. So each gets a file that fails as a closed one does.
local NO_ENTRY = 2 -- ENOENT
local kept = {}
-- A file that LuaRocks' loader opened and left to the collector may have such a number, and would lose it later.
collectgarbage()
for fd = 0, 2 do
  -- There: it is no directory, or it is one, and is opened. In order, as the least that is free is taken.
  local file, _, number = io.open(("/proc/self/fd/%d/."):format(fd))
  if file then file:close() end
  if number == NO_ENTRY then kept[#kept + 1] = io.open("/dev/null", fd == 0 and "w" or "r") end
end

-- A signal is told to Lua by a hook, which compiled code would not heed.
if jit then jit.off() end

local argparse = need("argparse", "argparse")
need("luv", "luv")
local hierlock = own "hierlock"
local terminal = own "hierlock.command.terminal"

-- argparse writes --help and the like, and leaves with 0, whether or not they could be written.
local unwritten
local function write(...)
  local _, err = terminal.write(...)
  unwritten = unwritten or err
end
local exit = os.exit
-- luacheck: push ignore 121 122
function print(text) write(text, "\n") end
io.write = write
function os.exit(status, close)
  if status ~= 0 or not unwritten then exit(status, close) end
  io.stderr:write("hierlock: ", unwritten.message, "\n")
  exit(OUTPUT, close)
end
-- luacheck: pop

local parser = argparse("hierlock", "Hierarchical locks: runs commands under them, looks after their table on MySQL and MariaDB, lists leases and ends them.")
  :epilog "hierlock COMMAND --help tells more; so does hierlock(1)."
  :command_target "command"
parser:flag("-v --version", "Show the version and exit."):action(function()
  print(hierlock._VERSION)
  os.exit(0, true)
end)
parser:add_complete "--completion"
function parser:error(message)
  io.stderr:write(self:get_usage(), "\n")
  leave(USAGE, message)
end

-- The one that is named, which is the first word; all of them for what looks at all, as an error does.
local named_alone = {}
for _, name in ipairs(SUBCOMMANDS) do if name == arg[1] then named_alone[1] = name end end
for _, word in ipairs(arg) do if word:find "^%-%-completion" then named_alone[1] = nil end end

local subcommands = {}
for _, name in ipairs(named_alone[1] and named_alone or SUBCOMMANDS) do
  local subcommand = own("hierlock.command." .. name)
  local subparser = parser:command(name, subcommand.description):summary(subcommand.summary)
  function subparser:error(message) return parser.error(self, message) end
  subcommand.options(subparser)
  subcommands[name] = subcommand
end

local function traceback(raised)
  if tostring(raised):find("interrupted!$") then return INTERRUPTED end
  return debug.traceback(tostring(raised), 2)
end

-- Splits the command line into its own words and, if the subcommand takes a command line, the words behind "--".
local function split()
  local words, tail = {}, nil
  local subcommand = subcommands[arg[1]]
  for _, word in ipairs(arg) do
    if tail then
      tail[#tail + 1] = word
    elseif word == "--" and subcommand and subcommand.tail then
      tail = {}
    else
      words[#words + 1] = word
    end
  end
  return words, tail or {}
end

local words, tail = split()
local arguments = parser:parse(words)
local named = subcommands[arguments.command]
if named.tail then arguments[named.tail] = tail end
local ok, status, err = xpcall(function() return named.run(arguments) end, traceback)
if not ok then leave(status == INTERRUPTED and status or SOFTWARE, status ~= INTERRUPTED and status or nil) end
if not status then
  local refused = err.code == "connection" and not err.retryable or DENIED[err.errno] or DENIED[err.sqlstate] or
    err.message:find "NOPERM" or -- Redis
    err.message:find "Permission denied" or err.message:find "closed to user" -- files
  leave(refused and NO_PERMISSION or STATUS[err.code] or SOFTWARE, err.message)
end
leave(status)
