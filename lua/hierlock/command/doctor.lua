--- hierlock doctor: all that can be wrong with a store, looked at, and how it is mended. Changes nothing but a
-- lock of its own, which it takes and gives back.

local encoders = require "hierlock.command.json"
local files = require "hierlock.command.examine.files"
local findings = require "hierlock.command.findings"
local lookup = require "hierlock.command.lookup"
local server = require "hierlock.command.server"
local subject_of = require "hierlock.command.examine.subject"
local terminal = require "hierlock.command.terminal"
local trial = require "hierlock.command.examine.trial"

local doctor = {
  summary = "Look for faults of a store, and say what mends them.",
  description = "Looks for faults of a store: in its version and settings, tables and rows, the privileges of this account. Also takes " ..
    "a lock in a tree of its own. Each check is ok, a warning, wrong or unseen, and says why it matters, and which command " ..
    "or statement mends it. The exit status is 1 when something is wrong.",
}

local WRONG = 1
local POOL_SIZE = 64

function doctor.options(parser)
  server.options(parser)
  parser:option("--pool-size", "Connections of a program, as given to hierlock.open."):convert(tonumber):default(tostring(POOL_SIZE))
    :argname "N"
  parser:option("--processes", "How many such programs there are."):convert(tonumber):default "1":argname "N"
  parser:flag("--quick", "Do not count the rows.")
  parser:flag("--json", "Print a JSON object.")
end

-- The command line of another subcommand on this store. Does not repeat the environment's DSN: there may be a
-- password in it.
local OF_LEASES = { leases = true }
local function command_on(dsn)
  return function(words)
    if not dsn then return "hierlock " .. words end
    local option = OF_LEASES[words] and "--dsn " or ""
    return ("hierlock %s %s%s"):format(words, option, files.word(dsn))
  end
end

local function count(arguments, name)
  local n = arguments[name]
  return n and n >= 1 and n < 2 ^ 31 and n == math.floor(n)
end

function doctor.run(arguments)
  if not count(arguments, "pool_size") then return lookup.usage "--pool-size must be a whole number of 1 or more" end
  if not count(arguments, "processes") then return lookup.usage "--processes must be a whole number of 1 or more" end
  local json, subject, ok, err
  if arguments.json then
    json, err = encoders.encoder()
    if not json then return nil, err end
  end
  local wanted
  wanted, err = server.parse(arguments)
  if not wanted then return nil, err end
  wanted.dsn = server.with_password(wanted)
  subject = subject_of.new(wanted)
  subject.application = "hierlock doctor"
  subject.command = command_on(arguments.dsn)
  subject.pool_size, subject.processes = arguments.pool_size, arguments.processes
  subject.quick, subject.quiet = arguments.quick, arguments.quiet
  local found = findings.new()
  if require("hierlock.command.examine." .. subject.said.store).examine(subject, found) then trial.run(subject, found) end
  if json then
    ok, err = terminal.write(found:json(json, subject.said.store, subject.where))
  elseif terminal.shows() then
    ok, err = terminal.write(found:lines(terminal.width(), not terminal.takes_utf8(), terminal.takes_colours(), arguments.quiet))
  else
    ok, err = terminal.write(found:lines(nil, true, false, arguments.quiet))
  end
  if not ok then return nil, err end
  return found.counts.wrong > 0 and WRONG or 0
end

return doctor
