-- Transfers between accounts in the program's own transaction, on its own connection.
--
-- Shows: the transaction that moves the money takes the locks, on the connection of
-- LuaSQL. Locks and writes end together: if a process is killed in the middle, or its
-- connection is cut, it holds no lock any more and has written nothing. No fencing token
-- is needed. After an error the program rolls the transaction back, and does retryable
-- work again from the beginning.
--
-- Not to be copied blindly: the pattern that takes the DSN apart, as LuaSQL wants its
-- parts; ids in SQL without escaping, as this file has made them. A lock on a whole
-- account is more than two rows need: it also covers everything else of the account.
--
-- Run it: on MySQL, MariaDB or PostgreSQL ($HIERLOCK_DSN, as a URL). Four processes make 100 transfers each; the
-- three balances sum to 300.
--
--     lua examples/attached.lua open
--     for i in 1 2 3 4; do lua examples/attached.lua transfer 100 & done; wait
--     lua examples/attached.lua close

local attach = require "hierlock.attach"

local command, count = arg[1], tonumber(arg[2])
local dsn = os.getenv("HIERLOCK_DSN") or ""
local user, password, host, port, database = dsn:match("^%a+://([^:]*):([^@]*)@([^:/]*):?(%d*)/([^?]*)")
if not user then error("$HIERLOCK_DSN must be mysql:// or postgresql://user:password@host:port/database") end

local driver, standard = "mysql", 3306
if dsn:find "^postgres" then driver, standard = "postgres", 5432 end
local environment = require("luasql." .. driver)[driver]()
local connection = assert(environment:connect(database, user, password, host, tonumber(port) or standard))
local locks = attach.luasql(connection, { table = dsn:match("[?&]table=([%w_]+)"), timeout = 10 })

local function execute(statement, ...) return assert(connection:execute(statement:format(...))) end

local function balance_of(account)
  local cursor = execute("SELECT balance FROM example_account WHERE id='%s'", table.concat(account, "/"))
  local balance = cursor:fetch()
  cursor:close()
  return tonumber(balance)
end

local function add(account, amount)
  execute("UPDATE example_account SET balance=balance+(%d) WHERE id='%s'", amount, table.concat(account, "/"))
end

-- true, or nil and why not; raises what cannot be mended here. Locks first: the first SELECT
-- decides what the transaction sees.
local function transfer(from, to, amount)
  execute "START TRANSACTION"
  local ok, err = locks:acquire_all { from, to }
  if not ok then
    connection:execute "ROLLBACK"
    return nil, err
  end
  if balance_of(from) < amount then
    execute "ROLLBACK"
    return nil, "not enough money"
  end
  add(from, -amount)
  add(to, amount)
  execute "COMMIT" -- and unlocks
  return true
end

local accounts = { { "u1", "a1" }, { "u1", "a2" }, { "u2", "a1" } }
if command == "open" then
  execute "CREATE TABLE example_account (id VARCHAR(20) PRIMARY KEY, balance INT NOT NULL)"
  for _, account in ipairs(accounts) do
    execute("INSERT INTO example_account VALUES ('%s', 100)", table.concat(account, "/"))
  end
elseif command == "transfer" then
  local done = 0
  for i = 1, count do
    -- To the next account and back to the one before, in turn.
    local from, to = accounts[i % 3 + 1], accounts[(i + 1 + i % 2) % 3 + 1]
    local ok, err = transfer(from, to, i % 7 + 1)
    if ok then done = done + 1 else io.stderr:write(tostring(err), "\n") end
  end
  print(("%d of %d transfers done"):format(done, count))
elseif command == "close" then
  for _, account in ipairs(accounts) do print(table.concat(account, "/"), balance_of(account)) end
  execute "DROP TABLE example_account"
end
connection:close() -- but not the environment: see docs/waiting.md, "OS threads"
