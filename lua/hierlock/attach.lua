--- Locks inside the program's own transaction, on the connection of its own driver: they live and die together with
-- what the transaction writes. No guarantee is stronger: a program whose lock is lost (KILL, a cut network, a crash)
-- has lost its writes, too. So there is no handle to release, no lease to renew and no fencing token to compare.
-- COMMIT or ROLLBACK, the program's own, ends the locks.
--
-- The locks exclude, and are excluded by, the locks that `hierlock.open` takes on the same table. For MySQL 8.0+ and
-- MariaDB 10.6+; the object asks the server which of them it is.
--
-- Take locks first. In REPEATABLE READ, the servers' default, the first plain SELECT of a transaction fixes what all
-- later ones see. A SELECT before `acquire` would show, under the lock, the data from before it. (Locking reads and
-- UPDATE always see the present.) Acquiring fixes no view.
--
-- After an error, ROLLBACK. The servers keep the rows that a failed request had locked
-- already; single rows cannot be given back.
--
-- Two requests in one transaction may deadlock with another program's; name all
-- targets in one (`attached:acquire_all`), and nothing can.
--
-- Nothing of the session's settings is changed. Each request sends three statements: SAVEPOINT, the locking
-- statement, RELEASE SAVEPOINT. The savepoint, `hierlock`, shows that a transaction is open: outside of a
-- transaction the server has none to release. The first request of an object also checks that the server excludes
-- and that the table fits. A good result counts for ten seconds, for other objects of the Lua state, too.
--
-- On PostgreSQL the same is done with advisory locks, which need no table: the options `table` and `buckets` have no
-- effect there. The levels are the program's, or the default ones. After an error the transaction is as it was
-- before the request. PostgreSQL's drivers give no `errno` and no `sqlstate`; where the server speaks another
-- language than English (`lc_messages`), a `deadlock` is reported as `store`.
--
-- In a space with leases on MySQL and MariaDB, a conflicting lease fails the request with `timeout` at once,
-- whatever the time-out. Waiting would keep the lease's holder from releasing it. Roll back, and try again. Where
-- the transaction's view is older than the lease, MariaDB 11.6+ says `deadlock`. The server keeps other programs
-- from recording new leases below the same root until the transaction ends. Unless the transaction is READ
-- COMMITTED, it keeps them from that anywhere in the space. On PostgreSQL the request waits for the lease. A
-- transaction that is not READ COMMITTED cannot see the lease: the request fails with `store`.
--
-- Observers see such a holder as a program that does not use hierlock: on MySQL by its rows, on MariaDB not at all.
-- (A name that the session gave itself would outlive the transaction.)
--
-- @module hierlock.attach
-- @usage
-- local attach = require "hierlock.attach"
-- local locks = attach.luasql(connection)
-- connection:execute("START TRANSACTION")
-- local ok, err = locks:acquire({ "u1", "a1" }, { timeout = 5 })
-- if not ok then connection:execute("ROLLBACK") return nil, err end
-- connection:execute("UPDATE account SET balance = balance - 10 WHERE id = 'a1'")
-- connection:execute("COMMIT")

require "hierlock" -- says so where core is built for another Lua
local core = require "hierlock.core"
local driver = require "hierlock.attach.driver"
local leases = require "hierlock.attach.leases"
local postgresql = require "hierlock.attach.postgresql"

local attach = {}

local DEFAULT_LEVELS = { "user", "account", "resource" }
local DEFAULT_NAMES = table.concat(DEFAULT_LEVELS, ",")
local DEFAULT_BUCKETS = 10000000
local DEFAULT_TABLE = "hier_lock_buckets"
local DEFAULT_TIMEOUT = 50

-- "For ever", in ms: the most that MySQL's hint can say, 49 days.
local LONGEST = 4294967295
-- NOWAIT does not cover the wait for a metadata lock.
local TRY = 500
-- MariaDB's whole-second limits, a second net behind the exact one.
local NET = 2

-- -------------------------------------------------------------- errors

-- Makes an err of the driver's message, errno and sqlstate.
local function fail(message, errno, sqlstate, target)
  local code, hint = "connection", ""
  if errno then code, hint = core.judge_mysql_error(errno, tostring(message)) end
  local advice = "; roll back"
  if code == "deadlock" or code == "lost" then
    advice = "; the server has rolled the transaction back"
  elseif code == "connection" then
    advice = "; the transaction is gone with the connection"
  end
  return core.failure(code, tostring(message) .. hint .. advice, errno, sqlstate, target)
end

-- ------------------------------------------------------- statements

-- A SELECT with a limit to its wait, in ms.
local function limited(self, sql, ms)
  if self.dialect == "mysql" then
    return (sql:gsub("SELECT", ("SELECT /*+ MAX_EXECUTION_TIME(%d) */"):format(ms), 1))
  end
  local net = math.ceil(ms / 1000) + NET
  return ("SET STATEMENT max_statement_time=%d.%03d,innodb_lock_wait_timeout=%d,lock_wait_timeout=%d FOR ")
    :format(math.floor(ms / 1000), ms % 1000, net, net) .. sql
end

-- Locks; tries once where ms is 0. On MySQL the session's innodb_lock_wait_timeout may end the wait early. The rows
-- locked so far stay locked, and the same statement, sent again, waits on. But the server may have rolled back
-- everything (innodb_rollback_on_timeout), savepoint included.
local function lock(self, sql, ms)
  if ms == 0 then
    local nowait = sql:gsub("(FOR %u+)%)", "%1 NOWAIT)"):gsub("(LOCK IN SHARE MODE)%)", "%1 NOWAIT)")
    return self.query(limited(self, nowait, TRY), TRY)
  end
  local deadline = core.now() + ms / 1000
  local left = ms
  while true do
    local rows, message, errno, sqlstate = self.query(limited(self, sql, left), left)
    left = math.ceil((deadline - core.now()) * 1000 - 1e-3)
    if rows or errno ~= 1205 or left <= 0 or self.dialect ~= "mysql" then
      return rows, message, errno, sqlstate
    end
    rows, message, errno, sqlstate = self.query("ROLLBACK TO SAVEPOINT hierlock")
    if not rows then return nil, message, errno, sqlstate end
  end
end

-- -------------------------------------------------- looking at the server

-- Rows come as lists, or as tables by name.
local function field(row, position, name)
  local value = row[position]
  if value == nil then value = row[name] end
  return value
end

local function check_server(self)
  local rows, message, errno, sqlstate = self.query(core.mysql_variables)
  if not rows then return fail(message, errno, sqlstate) end
  local variables = {}
  for _, row in ipairs(rows) do
    local value = field(row, 2, "Value")
    variables[field(row, 1, "Variable_name")] = type(value) == "number" and tostring(value) or value
  end
  local safe, err = core.judge("mysql", variables)
  if not safe then return nil, err end
  self.dialect = variables.version:find("MariaDB", 1, true) and "mariadb" or "mysql"
  return true
end

-- Rows of any engine but InnoDB are not locked at all. Not by information_schema: to
-- look there fixes the transaction's view on MySQL. (MariaDB leaves the engine out in
-- some SQL modes.)
local function check_table(self)
  local sql = "SHOW CREATE TABLE " .. self.rows
  if self.dialect == "mariadb" then sql = "SET STATEMENT sql_mode='' FOR " .. sql end
  local rows, message, errno, sqlstate = self.query(sql)
  if not rows then return fail(message, errno, sqlstate) end
  local text = rows[1] and field(rows[1], 2, "Create Table")
  local engine = type(text) == "string" and text:match("^CREATE TABLE .*\n%) ENGINE=(%w+)")
  if not engine then
    return core.failure("not_provisioned",
      ("%s is no table of rows to lock; run `hierlock provision`"):format(self.rows))
  elseif engine ~= "InnoDB" then
    return core.failure("unsafe_server",
      ("the table %s is of engine %s, which locks no rows; it must be InnoDB"):format(self.rows, engine))
  end
  return true
end

-- Fixes the buckets and levels. Later requests must count in the same way, as the program may hold locks by then.
local function settle(self, buckets, levels, leased)
  self.leased = leased
  self.wanted_buckets, self.wanted_levels = buckets, levels
  self.buckets, self.levels = buckets, {}
  for name in levels:gmatch("[^,]+") do self.levels[#self.levels + 1] = name end
end

-- Takes what the table was provisioned for, and compares it with what the program wants;
-- without a record, the defaults. A locking read, so as not to fix the transaction's view.
local function check_layout(self, wait)
  local sql = ("SELECT buckets,levels FROM hier_lock_meta WHERE table_name='%s' %s"):format(
    self.table, self.dialect == "mariadb" and "LOCK IN SHARE MODE" or "FOR SHARE")
  local rows, message, errno, sqlstate = self.query(limited(self, sql, wait), wait)
  if not rows and errno ~= 1146 then return fail(message, errno, sqlstate) end
  local row = rows and rows[1]
  local buckets = row and tonumber(field(row, 1, "buckets")) or DEFAULT_BUCKETS
  local levels, leased = leases.read(row and field(row, 2, "levels") or DEFAULT_NAMES)
  self.rows = leases.rows(self.table, leased)
  if (self.wanted_buckets or buckets) ~= buckets or (self.wanted_levels or levels) ~= levels then
    return core.failure("mismatch",
      ("the table %s%s has %d buckets for each of the levels %s; this program wants %d for %s: leave out `buckets` and " ..
       "`levels`, and it uses the existing ones; or name another table, made by `hierlock provision`"):format(
        self.table, row and "" or " (as hier_lock_meta does not say)", buckets, levels,
        self.wanted_buckets or buckets, self.wanted_levels or levels))
  end
  settle(self, buckets, levels, leased)
  return true
end

local NO_TRANSACTION = "no transaction is open, and a lock ends with its transaction: START TRANSACTION first"

-- Whether the savepoint that was set is still there; nil, err, or nil alone.
local function release_savepoint(self)
  local rows, message, errno, sqlstate = self.query("RELEASE SAVEPOINT hierlock")
  if rows then return true end
  local _, err = fail(message, errno, sqlstate)
  return nil, err.code ~= "lost" and err or nil
end

local function savepoint(self)
  local rows, message, errno, sqlstate = self.query("SAVEPOINT hierlock")
  if rows then return true end
  return fail(message, errno, sqlstate)
end

-- Spaces found right, for a while: key -> { dialect, buckets, levels, expires }. A program that attaches anew for
-- each request, as in nginx, checks once, and then only asks which server it is.
local verified = {}
local VERIFIED_FOR = 10 -- seconds

-- A server that has become read-only is another one.
local IDENTITY = "SELECT CONCAT_WS(' ',VERSION(),@@hostname,@@port,@@server_id,@@datadir," ..
                 "@@global.read_only,DATABASE()) AS identity"

local function check_all(self, wait)
  local rows, message, errno, sqlstate = self.query(IDENTITY)
  if not rows then return fail(message, errno, sqlstate) end
  local key = table.concat({ field(rows[1], 1, "identity"), self.table, self.wanted_buckets or "any",
                             self.wanted_levels or "any" }, " ")
  local found = verified[key]
  if found and core.now() < found.expires then
    self.dialect, self.checked_until = found.dialect, found.expires
    settle(self, found.buckets, found.levels, found.leased)
    self.rows = leases.rows(self.table, found.leased)
    return true
  end
  local ok, err = check_server(self)
  if not ok then return nil, err end
  local fits, unfit = check_layout(self, wait)
  if not fits and unfit.code ~= "mismatch" then return nil, unfit end
  ok, err = check_table(self) -- what it was made for, does not matter where there is none
  if ok then ok, err = fits, unfit end
  if not ok then return nil, err end
  self.checked_until = core.now() + VERIFIED_FOR
  verified[key] = { dialect = self.dialect, buckets = self.wanted_buckets, levels = self.wanted_levels, leased = self.leased,
                    expires = self.checked_until }
  return true
end

local function check(self, wait)
  local ok, err = savepoint(self)
  if ok then
    ok, err = release_savepoint(self)
    if not ok and not err then core.misuse(NO_TRANSACTION) end
  end
  if ok then ok, err = check_all(self, wait) end
  return ok, err
end

-- -------------------------------------------------------------- options

local function milliseconds(value)
  if type(value) ~= "number" then
    core.misuse("timeout must be a number of seconds, not " .. type(value))
  elseif value < 0 or value ~= value then
    core.misuse("timeout must not be negative or NaN")
  end
  return math.min(math.ceil(value * 1000 - 1e-6), LONGEST)
end

local function each_option(options, known)
  if options == nil then return {} end
  if type(options) ~= "table" then core.misuse("options must be a table, not " .. type(options)) end
  for name in pairs(options) do
    if type(name) ~= "string" then core.misuse("options has a key that is no string") end
    if not known[name] then core.misuse(("unknown option '%s'"):format(name)) end
  end
  return options
end

-- ------------------------------------------------------------- acquiring

--- Made by `attach.luasql`, `attach.resty_mysql` and `attach.pgmoon`. Belongs to its connection: one request at a
-- time. Keeps no state of a transaction.
-- @type attached
local attached = {}
local class = { __index = attached, __name = "hierlock.attached" }

local ACQUIRE_OPTIONS = { timeout = true, mode = true }

-- The node that an error is about, where it is one.
local function node(self, targets)
  local target = targets[1]
  if targets[2] or target[self.levels[#self.levels] .. "s"] then return nil end
  local named = { mode = target.mode }
  for i, level in ipairs(self.levels) do
    local id = target[i] or target[level]
    named[level] = type(id) == "number" and ("%d"):format(id) or id
  end
  return named
end

local function attached_check(self)
  if getmetatable(self) ~= class then
    core.misuse("self must be an attached object, not " .. type(self) .. "; call it with a colon")
  end
end

-- keys: of a method that names the default levels, like acquire_account; else nil. levels: nil while they are
-- unknown.
local function check_keys(keys, levels)
  for i in ipairs(levels and keys or {}) do
    if levels[i] ~= DEFAULT_LEVELS[i] then
      core.misuse(("there is no level '%s' at its place; use acquire"):format(DEFAULT_LEVELS[i]))
    end
  end
end

local function take(self, targets, options, keys)
  options = each_option(options, ACQUIRE_OPTIONS)
  local ms = options.timeout == nil and self.timeout or milliseconds(options.timeout)
  check_keys(keys, self.levels)
  if self.run then -- PostgreSQL's driver
    local plan = core.plan(targets, { mode = options.mode, levels = self.levels })
    return postgresql.take(self, plan, ms, tostring(plan):match("%((.*)%)$"), node(self, targets))
  end
  local ok, err = true, nil
  if core.now() >= self.checked_until then ok, err = check(self, ms == 0 and TRY or ms) end
  if not ok then return nil, err end

  check_keys(keys, self.levels)
  local plan = core.plan(targets, { mode = options.mode, levels = self.levels, buckets = self.buckets })
  local target = node(self, targets)
  ok, err = savepoint(self)
  if not ok then return nil, err end

  local sql = plan:sql(self.dialect, self.table, self.leased)
  local rows, message, errno, sqlstate = lock(self, sql, ms)
  if not rows then
    if errno and core.judge_mysql_error(errno) == "timeout" then
      local what = tostring(plan):match("%((.*)%)$")
      message = ms == 0 and what .. " is locked; tried once"
        or ("%s was not granted within %.3f s"):format(what, ms / 1000)
    end
    return fail(message, errno, sqlstate, target)
  end
  ok, err = plan:verify(#rows)
  if not ok and not (self.leased and leases.possible(rows, plan, field)) then
    err.target = target
    return nil, err
  elseif not ok then
    ok, message, errno, sqlstate = leases.pass(self, sql, self.query, field)
    if ok == nil then return fail(message, errno, sqlstate, target) end
    if not ok then return core.failure("timeout", "a lease is in the way; roll back", nil, nil, target) end
  end
  ok, err = release_savepoint(self)
  if not ok and not err then core.misuse(NO_TRANSACTION) end
  return ok, err
end

--- Locks a target until the transaction ends, as `manager:acquire` does, all or nothing; blocks
-- as the driver does. Raises when no transaction is open (autocommit).
--
-- On MySQL a wait for longer than the session's `innodb_lock_wait_timeout` (50 s, unless set)
-- begins anew each time that passes, at the end of the queue.
-- @function attached:acquire
-- @tparam table target as for `manager:acquire`
-- @tparam[opt] table options an unknown name raises
-- @number[opt] options.timeout seconds; `0` tries once; by default the object's. The longest
--   is 49 days
-- @string[opt="exclusive"] options.mode as for `manager:acquire`
-- @treturn[1] boolean true: it is locked
-- @return[2] nil
-- @return[2] err `timeout`, `deadlock`, `cancelled`, `not_provisioned`, `mismatch`,
--   `unsafe_server`, `connection`, `lost` (the server has rolled the transaction back) or `store`.
--   After any error: ROLLBACK; where it is `retryable`, begin again with the first statement.
--   `errno` and `sqlstate` are the server's
function attached.acquire(self, target, options)
  attached_check(self)
  if type(target) ~= "table" then core.misuse("target must be a table, not " .. type(target)) end
  return take(self, { target }, options)
end

--- Locks several targets, on whichever levels and in whatever modes, free of deadlock.
-- @function attached:acquire_all
-- @tparam {table,...} targets as for `manager:acquire_all`
-- @tparam[opt] table options as for `attached:acquire`
-- @treturn[1] boolean true
-- @return[2] nil
-- @return[2] err as from `attached:acquire`
function attached.acquire_all(self, targets, options)
  attached_check(self)
  return take(self, targets, options)
end

-- The sisters name the default levels. An id for each key.
local function take_ids(self, options, keys, ...)
  attached_check(self)
  local target = {}
  for i, key in ipairs(keys) do
    target[key] = select(i, ...)
    if target[key] == nil then core.misuse(key .. " is missing") end
  end
  return take(self, { target }, options, keys)
end

local USER, ACCOUNT, RESOURCE = { "user" }, { "user", "account" }, DEFAULT_LEVELS
local RESOURCES = { "user", "account", "resources" }

--- Locks a user: everything below it is kept out.
-- @function attached:acquire_user
-- @tparam string|integer user
-- @tparam[opt] table options as for `attached:acquire`
-- @treturn[1] boolean true
-- @return[2] nil
-- @return[2] err as from `attached:acquire`
function attached.acquire_user(self, user, options)
  return take_ids(self, options, USER, user)
end

--- Locks an account.
-- @function attached:acquire_account
-- @tparam string|integer user
-- @tparam string|integer account
-- @tparam[opt] table options as for `attached:acquire`
-- @treturn[1] boolean true
-- @return[2] nil
-- @return[2] err as from `attached:acquire`
function attached.acquire_account(self, user, account, options)
  return take_ids(self, options, ACCOUNT, user, account)
end

--- Locks a resource.
-- @function attached:acquire_resource
-- @tparam string|integer user
-- @tparam string|integer account
-- @tparam string|integer resource
-- @tparam[opt] table options as for `attached:acquire`
-- @treturn[1] boolean true
-- @return[2] nil
-- @return[2] err as from `attached:acquire`
function attached.acquire_resource(self, user, account, resource, options)
  return take_ids(self, options, RESOURCE, user, account, resource)
end

--- Locks several resources in one account, in any order, free of deadlock.
-- @function attached:acquire_resources
-- @tparam string|integer user
-- @tparam string|integer account
-- @tparam {string|integer,...} resources
-- @tparam[opt] table options as for `attached:acquire`
-- @treturn[1] boolean true
-- @return[2] nil
-- @return[2] err as from `attached:acquire`
function attached.acquire_resources(self, user, account, resources, options)
  return take_ids(self, options, RESOURCES, user, account, resources)
end

--- @section end

-- ------------------------------------------------------------- attaching

local OPTIONS = { levels = true, buckets = true, table = true, timeout = true }
local SOCKET_OPTIONS = { levels = true, buckets = true, table = true, timeout = true, socket_timeout = true }

local function new(query, options)
  local self = {
    query = query,
    table = options.table or DEFAULT_TABLE,
    wanted_buckets = options.buckets,
    checked_until = -math.huge, -- core.now()
    timeout = milliseconds(options.timeout == nil and DEFAULT_TIMEOUT or options.timeout),
  }
  -- Raises for a wrong one of these.
  core.plan({ { "any" } }, { levels = options.levels, buckets = options.buckets }):sql("mysql", options.table)
  if options.levels then
    self.wanted_levels, self.levels = table.concat(options.levels, ","), {}
    for i, name in ipairs(options.levels) do self.levels[i] = name end
  end
  return setmetatable(self, class)
end

local function socket_timeout(options)
  local limit = options.socket_timeout
  if limit ~= nil and not (type(limit) == "number" and limit > 0) then
    core.misuse("socket_timeout must be a positive number of seconds")
  end
  return limit
end

--- Attaches to a connection of LuaSQL's drivers for MySQL and MariaDB, or for PostgreSQL. Sends no
-- statement yet.
-- @function attach.luasql
-- @param connection of `luasql.mysql` or `luasql.postgres`
-- @string[opt] dialect `"mysql"`, `"mariadb"` or `"postgresql"`; need not be said, as the server, or
--   the connection, is asked
-- @tparam[opt] table options an unknown name raises
-- @tparam[opt] {string,...} options.levels as for `hierlock.open`: by default those of the table
-- @int[opt] options.buckets likewise
-- @string[opt="hier_lock_buckets"] options.table a plain name, in the connection's database
-- @number[opt=50] options.timeout seconds, of requests that say nothing else
-- @treturn attached
function attach.luasql(connection, dialect, options)
  if type(dialect) ~= "string" then
    options = dialect
  elseif dialect ~= "mysql" and dialect ~= "mariadb" and dialect ~= "postgresql" then
    core.misuse('dialect must be "mysql", "mariadb" or "postgresql"')
  end
  local ok, execute = pcall(function() return connection.execute end)
  if not ok or type(execute) ~= "function" then
    core.misuse("connection must be LuaSQL's, not " .. type(connection))
  end
  local self = new(driver.luasql_mysql(connection), each_option(options, OPTIONS))
  if dialect == "postgresql" or tostring(connection):find("^PostgreSQL") then
    self.run, self.levels = driver.luasql_postgresql(connection), self.levels or DEFAULT_LEVELS
    self.drop = function() end -- libpq waits for each answer
  end
  return self
end

--- Attaches to a connection of lua-resty-mysql, in nginx. Waiting for a lock yields, as every
-- query of the driver does. Asks the server nothing yet.
--
-- The driver ends every wait after what `db:set_timeout` was given (60 s in nginx, unless set), and the
-- connection with it; the error is `connection`. So let that be longer than `timeout`, or name it
-- here.
-- @function attach.resty_mysql
-- @tparam table db connected
-- @tparam[opt] table options as for `attach.luasql`, and:
-- @number[opt] options.socket_timeout seconds (!): what the program has given `db:set_timeout`. The
--   limit is then longer during a wait, and this again afterwards
-- @treturn attached
function attach.resty_mysql(db, options)
  if type(db) ~= "table" or type(db.query) ~= "function" then
    core.misuse("db must be an object of lua-resty-mysql, not " .. type(db))
  end
  options = each_option(options, SOCKET_OPTIONS)
  return new(driver.resty_mysql(db, socket_timeout(options)), options)
end

--- Attaches to a connection of pgmoon to PostgreSQL, in nginx (waiting for a lock yields there, as every
-- query of the driver does) or elsewhere. Asks the server nothing yet.
--
-- In nginx the driver ends every wait after what `db:settimeout` was given (60 s, unless set), and the
-- connection with it; the error is `connection`. So let that be longer than `timeout`, or name it
-- here.
-- @function attach.pgmoon
-- @tparam table db connected
-- @tparam[opt] table options as for `attach.luasql`, and:
-- @number[opt] options.socket_timeout seconds (!): what the program has given `db:settimeout`. The
--   limit is then longer during a wait, and this again afterwards
-- @treturn attached
function attach.pgmoon(db, options)
  if type(db) ~= "table" or type(db.query) ~= "function" or type(db.settimeout) ~= "function" then
    core.misuse("db must be an object of pgmoon, not " .. type(db))
  end
  options = each_option(options, SOCKET_OPTIONS)
  local self = new(nil, options)
  self.run, self.drop = driver.pgmoon(db, socket_timeout(options))
  self.levels = self.levels or DEFAULT_LEVELS
  return self
end

return attach
