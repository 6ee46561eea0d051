--- From a command line to a connection: the DSN argument, the password, and the
-- options that say what a table should be. No password may stand on a command
-- line, where `ps` shows it to everybody.

local core = require "hierlock.core"
local hierlock = require "hierlock"
local subject_of = require "hierlock.command.examine.subject"
local uv = require "luv"

local server = {}

--- Adds what provision and verify share.
function server.options(parser)
  parser:argument("dsn", "The server and database, as mysql://user@host:port/database; without one, $HIERLOCK_DSN.")
    :args "?"
  parser:flag("-p --ask-password", "Ask for the password on the terminal.")
  parser:option("--buckets", "Buckets of each level. Default: as recorded in hier_lock_meta, else 10000000.")
    :convert(tonumber):argname "N"
  parser:option("--levels", "Names of the levels, from root to leaf. Default: as recorded, else user,account,resource.")
    :argname "NAMES"
  parser:flag("-q --quiet", "Show no progress.")
end

local function failure(code, message)
  return nil, { code = code, message = message, retryable = false }
end

-- Signals that end or stop the question: the terminal shows typed text again before any of them acts.
local ENDING = { "sigint", "sigterm", "sighup", "sigquit" }

local function show_typed(shows) os.execute(("stty %secho </dev/tty"):format(shows and "" or "-")) end

local function ask_password()
  local fd = uv.fs_open("/dev/tty", "r+", 0)
  local terminal = fd and uv.new_tty(fd, true)
  if not terminal then return failure("dsn", "--ask-password needs a terminal") end
  local typed, ended, hit, handles = "", false, nil, { terminal }
  local function hear(name, fn)
    local signal = uv.new_signal()
    signal:start(name, fn)
    handles[#handles + 1] = signal
  end
  for _, name in ipairs(ENDING) do
    hear(name, function()
      hit = hit or name
      uv.stop()
    end)
  end
  hear("sigtstp", function()
    show_typed(true)
    uv.kill(uv.os_getpid(), "sigstop")
  end)
  hear("sigcont", function()
    show_typed(false)
    uv.fs_write(fd, "\nPassword: ")
  end)
  show_typed(false) -- before anybody can type
  uv.fs_write(fd, "Password: ")
  terminal:read_start(function(_, data)
    typed, ended = typed .. (data or ""), not data
    if ended or typed:find "\n" then uv.stop() end
  end)
  while not ended and not hit and not typed:find "\n" do uv.run() end
  show_typed(true)
  uv.fs_write(fd, "\n")
  for _, handle in ipairs(handles) do handle:close() end
  uv.run "nowait"
  if hit == "sigint" then error("interrupted!", 0) end
  if hit then uv.kill(uv.os_getpid(), hit) end -- ends this process, as nothing hears it any more
  return (typed:match "^[^\n]*")
end

--- The DSNs of a quorum's members, and its strategy.
function server.members(dsn)
  local strategy, list = dsn:match "^[^:]*:([^;]*);(.*)$"
  local members = {}
  for each in ((list or "") .. ";"):gmatch "([^;]+);" do members[#members + 1] = each:gsub("%%3[Bb]", ";"):gsub("%%25", "%%") end
  return members, strategy
end

--- Whether a DSN that core.dsn has understood has a password in it: its own, one of its members', or one of a parameter,
-- such as sentinel_password or sslpassword, however it is written.
function server.has_password(dsn, said)
  if said.password then return true end
  if said.store == "quorum" then
    for _, member in ipairs(server.members(dsn)) do
      local of_member = core.dsn(member)
      if of_member and server.has_password(member, of_member) then return true end
    end
    return false
  end
  if said.store == "file" or said.store == "sqlite" then return false end -- the rest is a path
  local decoded = dsn:gsub("%%(%x%x)", function(hex) return string.char(tonumber(hex, 16)) end):lower()
  return decoded:find "[?&%s][%w_]*password%s*=%s*[^%s&]" ~= nil
end

--- Reads the arguments: a table with dsn, password, where (for people), store, and buckets and levels where they were
-- given; nil, err.
function server.parse(arguments)
  local said, err = core.dsn(arguments.dsn)
  if not said then return nil, err end
  if arguments.dsn and server.has_password(arguments.dsn, said) then
    return failure("dsn", "a DSN with a password on the command line is shown to everybody by `ps`: put it into " ..
      "$HIERLOCK_DSN, or leave the password out and use --ask-password or an option file (my_cnf_group)")
  end
  local wanted = {
    dsn = arguments.dsn or os.getenv("HIERLOCK_DSN") or "file:",
    store = said.store,
    buckets = arguments.buckets,
  }
  if arguments.levels then
    wanted.levels = {}
    for name in (arguments.levels .. ","):gmatch("([^,]*),") do wanted.levels[#wanted.levels + 1] = name end
  end
  local ok, misuse = pcall(hierlock.plan, { { "x" } }, { buckets = wanted.buckets, levels = wanted.levels })
  if not ok then return failure("dsn", "--buckets, --levels: " .. misuse:gsub("^.*hierlock: ", "")) end
  if arguments.ask_password and said.store ~= "file" and said.store ~= "null" then
    wanted.password, err = ask_password()
    if not wanted.password then return nil, err end
    -- By the environment of this process, which libpq, or the Redis store, reads.
    if said.store == "postgresql" then uv.os_setenv("PGPASSWORD", wanted.password) end
    if said.store == "redis" then uv.os_setenv("REDISCLI_AUTH", wanted.password) end
  end
  -- Paths have no password in them.
  if said.store == "file" or said.store == "sqlite" then
    wanted.where = wanted.dsn
  elseif said.store == "mysql" or said.store == "postgresql" then
    wanted.where = ("%s on %s"):format(said.database or "the default database", said.socket or
      said.host and said.host .. (said.port ~= 0 and ":" .. said.port or "") or "the default server")
  else
    wanted.where = subject_of.place(said, nil, wanted.dsn)
  end
  return wanted
end

--- The DSN for hierlock.open, with the password that was asked for. The password stays in this process.
function server.with_password(wanted)
  -- libpq has got it already.
  if wanted.password and wanted.store == "mysql" then uv.os_setenv("MYSQL_PWD", wanted.password) end
  return wanted.dsn
end

--- So long, in seconds, an answer may take for which the server has little to do; and one for which it counts rows.
server.ANSWER, server.COUNT = 10, 60

--- A connection to a server of MySQL's kind or PostgreSQL | nil, err. The server's list of connections shows `what`,
-- its purpose. `within` limits each answer; nil sets no limit. `any` admits a server on which locks would not exclude.
function server.connect(wanted, what, within, any)
  local ok, store = pcall(require, "hierlock.store." .. wanted.store)
  if not ok then
    return failure("store", ("the %s store is not built or cannot be loaded: %s"):format(
      wanted.store == "mysql" and "MySQL" or "PostgreSQL", store))
  end
  local connection, err = store.connect(wanted.dsn, "hierlock " .. what, wanted.password, any)
  if connection and within then connection:answers_within(within) end
  return connection, err
end

return server
