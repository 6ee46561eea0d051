--- From a command line to a connection: the DSN argument, the password, and the
-- options that say what a table should be. No password may stand on a command
-- line, where `ps` shows it to everybody.

local core = require "hierlock.core"
local hierlock = require "hierlock"
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

local function ask_password()
  local terminal = io.open("/dev/tty", "r+")
  if not terminal then return failure("dsn", "--ask-password needs a terminal") end
  os.execute("stty -echo </dev/tty") -- before anybody can type
  terminal:write("Password: ")
  terminal:flush()
  local ok, password = pcall(terminal.read, terminal, "*l")
  os.execute("stty echo </dev/tty")
  terminal:write("\n")
  terminal:close()
  if not ok then error(password, 0) end
  return password or ""
end

--- What the arguments say: a table with dsn, password, where (for people),
-- store, and buckets and levels where they were given; nil, err.
function server.parse(arguments)
  local said, err = core.dsn(arguments.dsn)
  if not said then return nil, err end
  if arguments.dsn and said.password then
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
  wanted.where = ("%s on %s"):format(said.database or "the default database", said.socket or
    said.host and said.host .. (said.port ~= 0 and ":" .. said.port or "") or "the default server")
  return wanted
end

--- The DSN for hierlock.open, with the password that was asked for. It stays in this process.
function server.with_password(wanted)
  -- libpq has got it already.
  if wanted.password and wanted.store == "mysql" then uv.os_setenv("MYSQL_PWD", wanted.password) end
  return wanted.dsn
end

--- A connection | nil, err. What it is for is shown to those who look at the
-- server's list of connections.
function server.connect(wanted, what)
  local ok, store = pcall(require, "hierlock.store.mysql")
  if not ok then return failure("store", "the MySQL store is not built or cannot be loaded: " .. store) end
  return store.connect(wanted.dsn, "hierlock " .. what, wanted.password)
end

return server
