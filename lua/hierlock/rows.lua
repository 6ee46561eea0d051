--- Exclusive control of business data, on the program's own connection: the known ways, so that no update
-- is lost, no stock falls below zero, nothing is processed twice. Which way for what:
-- docs/exclusive-control.md.
--
-- For LuaSQL's drivers for MySQL, MariaDB, PostgreSQL and SQLite, for lua-resty-mysql and pgmoon. Values are
-- escaped by the driver, names are checked and quoted as they are stored. The rules are the same on every server:
--
-- - A version, a timestamp or old values are compared by the statement that writes.
-- - A lock needs `db:transaction`, and ends with it.
-- - An error is `nil, err`, as everywhere in hierlock, and misuse raises.
--
-- On SQLite each transaction has the whole database for writing (BEGIN IMMEDIATE) and is serializable. So a lock of
-- a row never waits, and there is nothing locked to skip: the transaction waits where it begins.
--
-- Beside the codes of hierlock's other errors there are these:
--
-- - `stale`: the row is not as it was read. `err.current` is what stands there now; `err.gone`: nothing does
-- - `refused`: the row does not fulfil the condition. `err.current` and `err.gone` likewise
-- - `unknown`: COMMIT was sent, or a write outside of a transaction, and no answer came: it was carried out, or not. hierlock does
--   not try again: look
-- - `forged`: a sealed text that was changed, or sealed for something else
--
-- `rows.null` stands for NULL in arguments, as Lua has no value for it; in results, NULL is nil.
--
-- A failed serialization (SQLSTATE 40001) is `deadlock`: nothing of the transaction stands, and it may be tried again. The
-- drivers for PostgreSQL tell no SQLSTATE: what its English messages say is understood.
--
-- After an error other than `stale` and `refused`, and than the `timeout` of a read, return the error from the
-- transaction's function. PostgreSQL can then only undo the transaction, and COMMIT is `lost`.
--
-- @module hierlock.rows
-- @usage
-- local rows = require "hierlock.rows"
-- local db = rows.luasql(connection, { tables = { product = { version = "version" } } })
-- -- Two customers, the last five packets: one of them gets `refused`.
-- local ok, err = db:update("product", 7, { stock = rows.expr("stock - ?", 5) }, { where = { "stock >= ?", 5 } })
-- -- A screen that was read a while ago: `stale`, and what stands there now.
-- ok, err = db:update("product", 7, { price = 12 }, { version = form.version })

require "hierlock" -- says so where core is built for another Lua
local core = require "hierlock.core"
local driver = require "hierlock.attach.driver"
local seal = require "hierlock.rows.seal"
local sql = require "hierlock.rows.sql"

local rows = {}

local unpack = table.unpack or unpack
local function pack(...) return { n = select("#", ...), ... } end

local DEFAULT_TIMEOUT = 50
-- "For ever", in ms: what all servers can say, 24 days.
local LONGEST = 2147483647
-- NOWAIT does not cover the wait for a metadata lock, in ms.
local TRY = 500
-- MariaDB's whole-second limits, a second net behind the exact one.
local NET = 2
-- Between two tries of a transaction, in s.
local BACKOFF_FIRST, BACKOFF_LONGEST = 0.01, 1

-- -------------------------------------------------------------- errors

-- Codes that the core has none of, and those that may be tried again as they are.
local function failure(code, message, errno, sqlstate)
  local _, err = core.failure(code, message, errno, sqlstate)
  if err.code ~= code then err.code, err.retryable = code, false end
  return nil, err
end

-- The server has decided against a COMMIT: certification, or SSI.
local NOT_COMMITTED = { [1213] = true, [3101] = true }

-- Messages of PostgreSQL and SQLite: text, code, sqlstate.
local MESSAGES = {
  { "deadlock detected", "deadlock", "40P01" },
  { "could not serialize access", "deadlock", "40001" },
  { "could not obtain lock", "timeout", "55P03" },
  { "due to lock timeout", "timeout", "55P03" },
  { "due to statement timeout", "timeout", "57014" },
  { "due to user request", "cancelled", "57014" },
  { "current transaction is aborted", "lost", "25P02" },
  { "database is locked", "timeout" },
  { "database table is locked", "timeout" },
  { "no transaction is active", "lost" },
  { "no such savepoint: hierlock_rows", "lost" },
}

-- Makes an err of the driver's message.
local function server_failure(self, message, errno, sqlstate)
  message = tostring(message)
  local code
  if self.dialect == "postgresql" or self.dialect == "sqlite" then
    for _, known in ipairs(MESSAGES) do
      if message:find(known[1], 1, true) then
        code, sqlstate = known[2], sqlstate or known[3]
        break
      end
    end
    if sqlstate == "08006" then code = "connection" end
    if not code and self.dialect == "postgresql" then
      local stands, said = self.query "SELECT 1"
      if not stands and not tostring(said):find("transaction", 1, true) then code = "connection" end
    end
    code = code or "store"
  elseif not errno then
    code = "connection"
  else
    code = core.judge_mysql_error(errno)
  end
  local _, err = failure(code, message, errno, sqlstate)
  if code == "connection" and self.transacted then self.transacted.broken = err end
  return nil, err
end

-- Runs a statement: rows, or nil, err.
local function run(self, text, wait)
  local result, message, errno, sqlstate = self.query(text, wait)
  if result then return type(result) == "table" and result or {} end
  return server_failure(self, message, errno, sqlstate)
end

-- -------------------------------------------------------------- options

local function check_options(options, known)
  if options == nil then return {} end
  if type(options) ~= "table" then core.misuse("options must be a table, not " .. type(options)) end
  for name in pairs(options) do
    if not known[name] then core.misuse(("unknown option '%s'"):format(tostring(name))) end
  end
  return options
end

local function milliseconds(value, name)
  if type(value) ~= "number" or value < 0 or value ~= value then
    core.misuse(name .. " must be a number of seconds, and not negative")
  end
  return math.min(math.ceil(value * 1000 - 1e-6), LONGEST)
end

--- Made by `rows.luasql`, `rows.resty_mysql` and `rows.pgmoon`. Belongs to its connection: one request at a time.
-- @type db
local db = {}
local class = { __index = db, __name = "hierlock.rows" }

-- Character sets of MySQL's.
local BACKSLASH_IN_LETTERS = { big5 = true, cp932 = true, gb18030 = true, gbk = true, sjis = true }

-- A coroutine that was closed inside of a transaction has left it open: what comes next must not become part of it.
local function leave_abandoned(self)
  local thread = self.transacted and self.transacted.thread
  if type(thread) ~= "thread" or coroutine.status(thread) ~= "dead" then return true end
  self.transacted = nil
  return run(self, "ROLLBACK")
end

-- Every method begins with it. true, or nil, err.
local function ready(self)
  if getmetatable(self) ~= class then core.misuse("self must be a db, not " .. type(self) .. "; call it with a colon") end
  local left, reason = leave_abandoned(self)
  if not left then return nil, reason end
  if self.settled then return true end
  -- Without this SQLite would not wait at all.
  if self.dialect == "sqlite" and not self.query(("PRAGMA busy_timeout=%d"):format(self.timeout)) then
    return failure("connection", "SQLite does not answer")
  end
  if self.doubles_quotes then
    local result, message, errno, sqlstate = self.query "SELECT current_setting('standard_conforming_strings') AS mode"
    if not result then return server_failure(self, message, errno, sqlstate) end
    if tostring(result[1].mode) ~= "on" then
      return failure("unsupported", "pgmoon does not escape backslashes, and standard_conforming_strings is off")
    end
  end
  if not self.dialect then
    local result, message, errno, sqlstate = self.query "SELECT VERSION() AS version,@@sql_mode AS mode,@@character_set_client AS charset"
    if not result then return server_failure(self, message, errno, sqlstate) end
    -- lua-resty-mysql escapes by backslashes, whatever the session says.
    if self.backslashes and tostring(result[1].mode):find "NO_BACKSLASH_ESCAPES" then
      return failure("unsupported", "lua-resty-mysql escapes by backslashes, and sql_mode has NO_BACKSLASH_ESCAPES")
    end
    -- In these a backslash may be the second half of a letter.
    if self.backslashes and BACKSLASH_IN_LETTERS[tostring(result[1].charset)] then
      return failure("unsupported", "lua-resty-mysql cannot escape safely in the character set " .. tostring(result[1].charset))
    end
    self.dialect = tostring(result[1].version):find "MariaDB" and "mariadb" or "mysql"
  end
  self.settled = true
  return true
end

-- -------------------------------------------------------- transactions

local ISOLATIONS = {
  ["read uncommitted"] = true, ["read committed"] = true, ["repeatable read"] = true, ["serializable"] = true,
}
local TRANSACTION_OPTIONS = { isolation = true, retries = true }

local begun = 0 -- transactions on PostgreSQL

local function is_mysql(self) return self.dialect == "mysql" or self.dialect == "mariadb" end

-- The savepoint shows at COMMIT that it is still this transaction: MySQL ends one by a deadlock or by DDL, and what
-- comes after that is committed by itself. On PostgreSQL a setting of the transaction shows it: all would else be done in a
-- savepoint, in which an isolation level cannot be set.
local function begin(self, isolation)
  local statements
  local level = isolation and " ISOLATION LEVEL " .. isolation:upper() or ""
  if self.dialect == "sqlite" then
    statements = { "BEGIN IMMEDIATE", "SAVEPOINT hierlock_rows" }
  elseif self.dialect == "postgresql" then
    begun = begun + 1
    statements = { ("BEGIN%s;SET LOCAL hierlock.rows='%d'"):format(level, begun) }
  else
    statements = { "START TRANSACTION", "SAVEPOINT hierlock_rows" }
    if isolation then table.insert(statements, 1, "SET TRANSACTION" .. level) end
  end
  for i, text in ipairs(statements) do
    local ok, err = run(self, text, self.timeout)
    if not ok then
      if i == #statements and i > 1 then self.query "ROLLBACK" end
      return nil, err
    end
  end
  return true, begun
end

local function unanswered(message, errno, sqlstate)
  return failure("unknown", "what was sent had no answer, and it is not known whether it was committed: " .. tostring(message),
    errno, sqlstate)
end

-- On COMMIT of a failed transaction PostgreSQL says ROLLBACK, which drivers do not tell; without a transaction it
-- only warns. So the transaction is checked before, in the same trip.
local COMMIT_POSTGRESQL = "SELECT CASE WHEN pg_catalog.current_setting('hierlock.rows',true)='%s' THEN 1 ELSE " ..
  "CAST('hierlock: the transaction had ended ' || pg_catalog.clock_timestamp()::text AS integer) END;COMMIT"
local ENDED = "the transaction had ended before its COMMIT; it was not carried out as a whole"

-- Commits: true; or nil, err, and nothing was committed; or nil, err with code `unknown`. mark: the result of
-- `begin`.
local function commit(self, mark)
  if self.dialect ~= "postgresql" then
    local ok, err = run(self, "RELEASE SAVEPOINT hierlock_rows")
    if not ok then
      self.query "ROLLBACK"
      if err.code == "lost" then err.message = ENDED end
      return nil, err
    end
  end
  local result, message, errno, sqlstate = self.query(self.dialect == "postgresql" and COMMIT_POSTGRESQL:format(mark) or "COMMIT")
  if result then return true end
  local told
  if is_mysql(self) then
    told = errno and NOT_COMMITTED[errno]
    if told then self.query "ROLLBACK" end
  else
    -- A server that still answers has answered the COMMIT, too.
    told = sqlstate ~= "08006" and self.query "ROLLBACK"
    -- SQLite has nothing to roll back where it has done so itself.
    if self.dialect == "sqlite" then told = true end
  end
  if not told then return unanswered(message, errno, sqlstate) end
  if message:find("hierlock: the transaction had ended", 1, true) then return failure("lost", ENDED) end
  return server_failure(self, message, errno, sqlstate)
end

local function traceback(raised)
  if type(raised) ~= "string" then return raised end
  return debug.traceback(raised, 2)
end

-- Whether what fn returned or raised is worth another try.
local function passing(err) return core.is_error(err) and (err.code == "deadlock" or err.code == "timeout") end

local function failed(results) return not results[1] or (results.n >= 3 and results[2] == nil and results[3] ~= nil) end

-- fn(db), begun and ended. results, as pcall's; whether it may be tried again.
local function attempt(self, isolation, fn)
  local ok, err = begin(self, isolation)
  if not ok then return pack(true, nil, err), passing(err) end
  local mark = err
  local state = { depth = 1, thread = coroutine.running() or "main" }
  self.transacted = state
  local results = pack(xpcall(function() return fn(self) end, traceback))
  self.transacted = nil
  local again = failed(results) and passing(results[1] and results[3] or results[2])
  if failed(results) or state.broken then
    -- ROLLBACK says nothing new where the connection is gone, and LuaSQL raises where the program has closed it.
    pcall(self.query, "ROLLBACK")
    if not failed(results) then results, again = pack(true, nil, state.broken), false end
  else
    ok, err = commit(self, mark)
    if not ok then results, again = pack(true, nil, err), passing(err) end
  end
  return results, again
end

-- The server sleeps for us, as it does under every loop of the program's. On SQLite, the next BEGIN waits.
local function back_off(self, try)
  if self.dialect == "sqlite" then return end
  local seconds = math.random() * math.min(BACKOFF_FIRST * 2 ^ try, BACKOFF_LONGEST)
  self.query((self.dialect == "postgresql" and "SELECT pg_sleep(%.4f)" or "SELECT SLEEP(%.4f)"):format(seconds))
end

local function nested(self, options, fn)
  local state = self.transacted
  if next(options) then core.misuse "options are for the outermost transaction" end
  if state.thread ~= (coroutine.running() or "main") then
    core.misuse "the connection is in a transaction of another coroutine"
  end
  local name = "hierlock_rows_" .. state.depth
  local ok, err = run(self, "SAVEPOINT " .. name)
  if not ok then return pack(true, nil, err) end
  state.depth = state.depth + 1
  local results = pack(xpcall(function() return fn(self) end, traceback))
  state.depth = state.depth - 1
  if failed(results) then
    if self.query("ROLLBACK TO SAVEPOINT " .. name) then self.query("RELEASE SAVEPOINT " .. name) end
  else
    ok, err = run(self, "RELEASE SAVEPOINT " .. name)
    if not ok then return pack(true, nil, err) end
  end
  return results
end

--- Runs fn(db) between BEGIN and COMMIT. ROLLBACK when it raises, or returns nil and an err. A call inside of fn is a
-- savepoint: when the inner call fails, only its own work is undone.
--
-- The program must not begin, commit or roll back by itself meanwhile, nor have a transaction open before. A
-- coroutine that is closed inside of fn leaves the transaction open: the next call of the db rolls it back first.
-- Where the transaction had ended though fn reports success, COMMIT is `lost`. The earlier work was undone, or
-- committed by a statement such as CREATE TABLE; on MySQL and MariaDB the work after it stands.
-- @function db:transaction
-- @tparam[opt] table options an unknown name raises; an inner call takes no options
-- @string[opt] options.isolation `"read uncommitted"`, `"read committed"`, `"repeatable read"` or `"serializable"`; by default
--   the session's. On SQLite all are serializable
-- @int[opt=0] options.retries how often fn is called again after a deadlock, a time-out or a failed serialization,
--   each time in a new transaction, after a while by chance, the longer the more often. Never after `unknown`. Work of
--   fn outside of the database may be done several times
-- @tparam function fn called as fn(db)
-- @return[1] what fn returned
-- @return[2] nil
-- @return[2] err what fn returned, or the error of BEGIN or COMMIT: `unknown`, `lost`, `connection`, `deadlock`, `timeout` …
-- @raise what fn raised, with its traceback when it is a string
function db.transaction(self, options, fn)
  local ok, err = ready(self)
  if not ok then return nil, err end
  if fn == nil then options, fn = nil, options end
  if type(fn) ~= "function" then core.misuse("fn must be a function, not " .. type(fn)) end
  options = check_options(options, TRANSACTION_OPTIONS)
  if options.isolation ~= nil and not ISOLATIONS[options.isolation] then
    core.misuse 'isolation must be "read uncommitted", "read committed", "repeatable read" or "serializable"'
  end
  local retries = options.retries or 0
  if type(retries) ~= "number" or retries < 0 or retries ~= math.floor(retries) then
    core.misuse "retries must be a whole number, and not negative"
  end
  local results, again
  if self.transacted then
    results = nested(self, options, fn)
  else
    for try = 0, retries do
      if try > 0 then back_off(self, try) end
      results, again = attempt(self, options.isolation, fn)
      if not again then break end
    end
  end
  if not results[1] then error(results[2], 0) end
  return unpack(results, 2, results.n)
end

-- ---------------------------------------------------------------- reading

-- Without what stands for NULL in a driver's rows.
local function plain(row)
  for name, value in pairs(row) do
    if sql.is_null(value) then row[name] = nil end
  end
  return row
end

-- A SELECT on PostgreSQL that ends in time: behind a savepoint, so that its failure is not the transaction's.
local function limited_postgresql(self, text, ms)
  local before, err = run(self, "SAVEPOINT hierlock_read;SELECT current_setting('statement_timeout') AS before")
  if not before then return nil, err end
  local started = core.now()
  local found, message, errno, sqlstate = self.query(
    ms > 0 and ("SET LOCAL statement_timeout=%d;%s"):format(ms, text) or text, ms)
  if found then
    local ok
    ok, err = run(self, ms > 0 and ("SET LOCAL statement_timeout='%s';RELEASE SAVEPOINT hierlock_read"):format(before[1].before)
      or "RELEASE SAVEPOINT hierlock_read")
    if not ok then return nil, err end
    return found
  end
  local late = ms > 0 and (core.now() - started) * 1000 >= ms
  local undone = self.query "ROLLBACK TO SAVEPOINT hierlock_read;RELEASE SAVEPOINT hierlock_read"
  if late and undone then return failure("timeout", message, errno, sqlstate or "57014") end
  return server_failure(self, message, errno, sqlstate)
end

-- A SELECT that locks, with a limit to its wait, in ms.
local function locking(self, text, ms, seconds)
  if self.dialect == "sqlite" then return run(self, text) end
  if self.dialect == "postgresql" then return limited_postgresql(self, text, seconds == 0 and 0 or ms) end
  if seconds == 0 then ms = TRY end
  if self.dialect == "mysql" then
    text = text:gsub("SELECT", ("SELECT /*+ MAX_EXECUTION_TIME(%d) */"):format(ms), 1)
  else
    local net = math.ceil(ms / 1000) + NET
    text = ("SET STATEMENT max_statement_time=%d.%03d,innodb_lock_wait_timeout=%d,lock_wait_timeout=%d FOR %s"):format(
      math.floor(ms / 1000), ms % 1000, net, net, text)
  end
  return run(self, text, ms)
end

-- Looks at the options of a lock, and gives its limit in ms.
local function check_lock(self, options)
  if options.lock == nil then
    if options.wait ~= nil or options.skip_locked ~= nil then core.misuse "wait and skip_locked are those of a lock" end
    return
  end
  if options.lock ~= "update" and options.lock ~= "share" then core.misuse 'lock must be "update" or "share"' end
  if not self.transacted then core.misuse "a lock ends with its transaction: call it inside of db:transaction" end
  if options.wait ~= nil and options.skip_locked then core.misuse "skip_locked does not wait" end
  return options.wait == nil and self.timeout or milliseconds(options.wait, "wait")
end

local READ_OPTIONS = { lock = true, wait = true, skip_locked = true, columns = true }

--- Reads a row, and may lock it until the transaction ends.
--
-- After a `timeout` the transaction goes on; its earlier locks stay.
-- @function db:read
-- @string table_name may name its schema, `schema.table`
-- @param key the value of the key column, `id` unless `options.tables` of the db says otherwise; or {column = value, …}. A
--   number or a string, compared as what the column is; a boolean only on PostgreSQL
-- @tparam[opt] table options an unknown name raises
-- @string[opt] options.lock `"update"`: for writing; `"share"`: others may read it likewise, and none may write
-- @number[opt] options.wait seconds, to the millisecond; `0` does not wait; by default the db's `timeout`. On MySQL the
--   session's `innodb_lock_wait_timeout` (50 s) may end the wait before
-- @bool[opt] options.skip_locked skips a row that another transaction has locked
-- @tparam[opt] {string,...} options.columns by default all
-- @treturn[1] table the row; NULL is nil. false when there is no row
-- @return[2] nil
-- @return[2] err `timeout`, `deadlock`, `connection`, `store` …
function db.read(self, table_name, key, options)
  local ok, err = ready(self)
  if not ok then return nil, err end
  options = check_options(options, READ_OPTIONS)
  local ms = check_lock(self, options)
  local columns = sql.columns(self, options.columns)
  if self.dialect == "sqlite" then columns = columns .. ",1 AS hierlock_found" end -- see driver.lua, luasql_run
  local text = ("SELECT %s FROM %s WHERE %s%s"):format(columns, sql.name(self, table_name, "table"),
    sql.key(self, table_name, key), sql.lock(self, options))
  local found
  if ms then found, err = locking(self, text, ms, options.wait) else found, err = run(self, text) end
  if not found then return nil, err end
  local row = found[1]
  if not row then return false end
  row.hierlock_found = nil
  return plain(row)
end

-- ---------------------------------------------------------------- writing

local WRITE_OPTIONS = { version = true, timestamp = true, old = true, columns = true, where = true }

-- The column that a version or a timestamp is in: of the options, as the table was described, or the usual one. And whether it
-- is this program's rule to change it with every write.
local function marked(self, table_name, kind)
  local described = (self.tables[table_name] or {})[kind]
  return described or (kind == "version" and "version" or "updated_at"), described ~= nil
end

-- Builds the SQL that a row must fulfil: as it was read, and as the condition says. nil for a part that the caller
-- left out.
local function conditions(self, table_name, options)
  local same = {}
  for _, kind in ipairs { "version", "timestamp" } do
    local value = options[kind]
    if value ~= nil then
      if type(value) ~= "string" and type(value) ~= "number" then core.misuse(kind .. " must be what was read, not " .. type(value)) end
      same[#same + 1] = sql.same(self, marked(self, table_name, kind), value)
    end
  end
  if (options.old == nil) ~= (options.columns == nil) then core.misuse "old and columns go together" end
  if options.old ~= nil then
    if type(options.old) ~= "table" then core.misuse("old must be a row, not " .. type(options.old)) end
    sql.columns(self, options.columns)
    for _, column in ipairs(options.columns) do
      local value = options.old[column]
      if value == nil then value = sql.null end
      same[#same + 1] = sql.same(self, column, value)
    end
  end
  local where = options.where ~= nil and sql.fill(self, sql.condition(options.where, "where")) or nil
  return same[1] and table.concat(same, " AND "), where
end

-- The changes, and the marks that every write changes; in the order of their names, as MySQL computes one after
-- the other. So an expression may use only what no other one has changed.
local function assignments(self, table_name, changes, options, force)
  if type(changes) ~= "table" then core.misuse("changes must be a table, not " .. type(changes)) end
  local parts, all = {}, {}
  for column, value in pairs(changes) do all[column] = value end
  for _, kind in ipairs { "version", "timestamp" } do
    local column, described = marked(self, table_name, kind)
    if described or options[kind] ~= nil or force == kind then
      if all[column] ~= nil then core.misuse(("%s is changed by hierlock.rows itself"):format(column)) end
      all[column] = sql.expr(kind == "version" and { sql.name(self, column) .. "+1" }
        or { sql.later(self, column, options[kind]) }, 1)
    end
  end
  local names = sql.sorted(all)
  for i, column in ipairs(names) do
    local value = all[column]
    for _, other in ipairs(sql.is_expression(value) and names or {}) do
      if other ~= column and value[1]:find("%f[%w_]" .. other .. "%f[^%w_]") then
        core.misuse(("the expression for %s uses %s, which is changed, too: servers compute it differently"):format(column, other))
      end
    end
    parts[i] = sql.name(self, column) .. "=" .. sql.value(self, value)
  end
  if not parts[1] then core.misuse "there is nothing to change" end
  return table.concat(parts, ",")
end

local function is_one(value) return tonumber(value) == 1 end

-- Finds out why a statement wrote nothing: nil, err; or true, when the row is as it must be. In a transaction on
-- servers of MySQL's kind, the row is locked from then on, and the look sees the present.
local function explain(self, table_name, key, same, where, lock)
  local text = ("SELECT *,CASE WHEN %s THEN 1 ELSE 0 END AS hierlock_same,CASE WHEN %s THEN 1 ELSE 0 END AS hierlock_fits FROM %s " ..
    "WHERE %s%s"):format(same or "1=1", where and "(" .. where .. ")" or "1=1", table_name, key, lock)
  local found, err = run(self, text)
  if not found then return nil, err end
  local row = found[1] and plain(found[1])
  local code, message
  if not row then
    code, message = where and not same and "refused" or "stale", "the row is gone"
  else
    local is_same, fits = is_one(row.hierlock_same), is_one(row.hierlock_fits)
    row.hierlock_same, row.hierlock_fits = nil, nil
    if is_same and fits then return true end
    code, message = "refused", "the row does not fulfil the condition"
    if not is_same then code, message = "stale", "the row is not as it was read" end
  end
  local _, reason = failure(code, message)
  reason.current, reason.gone = row, not row or nil
  return nil, reason
end

-- How often a row may change to fit between a statement and the look at why it wrote nothing.
local LOOKS = 10

-- Runs a statement on one row until its effect is known. text: up to its WHERE.
local function write(self, text, table_name, key, same, where)
  local full = text .. " WHERE " .. key .. (same and " AND " .. same or "") .. (where and " AND (" .. where .. ")" or "")
  for _ = 1, LOOKS do
    local result, err = run(self, full)
    if not result then
      -- Alone it is its own COMMIT.
      if err.code == "connection" and not self.transacted then return unanswered(err.message, err.errno, err.sqlstate) end
      return nil, err
    end
    local n = tonumber(result.affected_rows) or 0
    if n > 0 then return n end
    if is_mysql(self) then
      -- MySQL and MariaDB count changed rows, unless the connection says otherwise: none, where all values were
      -- there already. Under the lock the same again is decided.
      return self:transaction(function()
        local fits, reason = explain(self, table_name, key, same, where, " FOR UPDATE")
        if not fits then return nil, reason end
        local again, failed_again = run(self, full)
        if not again then return nil, failed_again end
        return 1
      end)
    end
    -- The other servers count matched rows. Where the row fits now, another program has changed it in between.
    local fits, reason = explain(self, table_name, key, same, where, "")
    if not fits then return nil, reason end
  end
  return failure("refused", "the row is as it must be, and the server does not write it: a trigger, or row-level security")
end

-- Empty options probably mean that a version was nil.
local function check_write(self, options, needed)
  if options ~= nil and type(options) == "table" and next(options) == nil then
    core.misuse "options are empty: was the version nil?"
  end
  local checked = check_options(options, WRITE_OPTIONS)
  if needed and options == nil and not self.transacted then
    core.misuse "nothing says what the row must be like: name a version, old values or where, or lock it in a transaction"
  end
  return checked
end

--- Changes a row: if it still is as it was read, or if it fulfils a condition.
--
-- The version is one more, and the timestamp later, after each update of a row of a table that `options.tables` describes with
-- one, and of all that are given one here. Other programs that write the table must do so, too; old values need nothing of them.
-- An update that changes nothing else is still 1.
--
-- Without any of these options it needs a transaction, in which the row was locked.
-- @function db:update
-- @string table_name as for `db:read`
-- @param key as for `db:read`; it must be unique
-- @tparam table changes {column = value, …}; `rows.null` for NULL, `rows.expr` for what the server computes. An expression
--   may use no other column that is changed
-- @tparam[opt] table options an unknown name raises, and so does an empty table
-- @param[opt] options.version the value read of column `version`, or of the column that `options.tables` names: a whole number
-- @param[opt] options.timestamp likewise of `updated_at`. On SQLite, text as strftime writes it. The text
--   sets the resolution; where it is whole seconds the time runs ahead of the clock when a row is changed more often
-- @tparam[opt] table options.old a row that was read, and `columns`: which ones of it are compared. Text is compared by every
--   letter, NULL is equal to NULL. Not for BLOB, JSON nor, on MySQL and MariaDB, FLOAT columns
-- @tparam[opt] {string,...} options.columns columns of `old`; a column that the row does not have counts as NULL
-- @tparam[opt] table options.where {sql, value, …}, a `?` for each value
-- @treturn[1] number of rows: 1
-- @return[2] nil
-- @return[2] err `stale`, `refused`, or as from `db:read`
function db.update(self, table_name, key, changes, options)
  local ok, err = ready(self)
  if not ok then return nil, err end
  options = check_write(self, options, true)
  local name, at = sql.name(self, table_name, "table"), sql.key(self, table_name, key)
  local same, where = conditions(self, table_name, options)
  return write(self, ("UPDATE %s SET %s"):format(name, assignments(self, table_name, changes, options)), name, at, same, where)
end

--- Makes the version one more, or the timestamp later, and changes nothing else: of the root of an aggregate, for instance, whose
-- parts are changed in the same transaction.
-- @function db:touch
-- @string table_name as for `db:read`
-- @param key as for `db:read`
-- @tparam[opt] table options as for `db:update`
-- @treturn[1] number of rows: 1
-- @return[2] nil
-- @return[2] err `stale`, `refused`, or as from `db:read`
function db.touch(self, table_name, key, options)
  local ok, err = ready(self)
  if not ok then return nil, err end
  options = check_write(self, options)
  local described = self.tables[table_name] or {}
  local kind = (options.timestamp ~= nil or (described.timestamp and not described.version)) and "timestamp" or "version"
  local name, at = sql.name(self, table_name, "table"), sql.key(self, table_name, key)
  local same, where = conditions(self, table_name, options)
  return write(self, ("UPDATE %s SET %s"):format(name, assignments(self, table_name, {}, options, kind)), name, at, same, where)
end

--- Deletes a row: if it still is as it was read, or if it fulfils a condition.
-- @function db:delete
-- @string table_name as for `db:read`
-- @param key as for `db:read`
-- @tparam[opt] table options as for `db:update`
-- @treturn[1] number of rows: 1
-- @return[2] nil
-- @return[2] err `stale`, `refused`, or as from `db:read`
function db.delete(self, table_name, key, options)
  local ok, err = ready(self)
  if not ok then return nil, err end
  options = check_write(self, options, true)
  local name, at = sql.name(self, table_name, "table"), sql.key(self, table_name, key)
  local same, where = conditions(self, table_name, options)
  return write(self, "DELETE FROM " .. name, name, at, same, where)
end

-- ----------------------------------------------------------------- claims

--- Made by `db:claim`. `rows`: the claimed rows, perhaps none.
-- @type claim
local claim = {}
local claim_class = { __index = claim, __name = "hierlock.claim" }

local CLAIM_OPTIONS = { where = true, order = true, limit = true, columns = true }

local function key_of(self, row)
  if type(row) ~= "table" then core.misuse("row must be one of claim.rows, not " .. type(row)) end
  local key = {}
  for _, column in ipairs(sql.key_columns(self.db, self.table_name)) do key[column] = row[column] end
  return key
end

local function claim_check(self)
  if getmetatable(self) ~= claim_class then core.misuse("self must be a claim, not " .. type(self) .. "; call it with a colon") end
end

--- Writes that a row has been processed, in the transaction that claimed it.
-- @function claim:done
-- @tparam table row of `claim.rows`
-- @tparam table changes as for `db:update`; after them the row should not fulfil the claim's condition
-- @treturn[1] number of rows: 1
-- @return[2] nil
-- @return[2] err as from `db:update`
function claim.done(self, row, changes)
  claim_check(self)
  if self.db.transacted ~= self.transacted then core.misuse "the transaction that claimed the row has ended" end
  return self.db:update(self.table_name, key_of(self, row), changes, { where = self.where })
end

--- Writes that processing a row has failed: after the claim's transaction, which was rolled back, in one of its own, and only
-- if the row is still unprocessed. So what another batch has done well in between is never marked bad.
-- @function claim:fail
-- @tparam table row of `claim.rows`
-- @tparam table changes as for `db:update`, as in `{ attempts = rows.expr("attempts + 1") }`
-- @treturn[1] number of rows: 1
-- @return[2] nil
-- @return[2] err `refused`: another one has processed it; or as from `db:update`
function claim.fail(self, row, changes)
  claim_check(self)
  if self.db.transacted then core.misuse "a failure is counted after the transaction, whose ROLLBACK would undo it" end
  return self.db:update(self.table_name, key_of(self, row), changes, { where = self.where })
end

--- @type db

--- Claims unprocessed rows that no other batch has claimed, until the transaction ends; for batches that run side by
-- side. Their condition is checked under the lock. On SQLite the transaction has kept all others out anyway.
--
-- In a transaction of `read committed` only these rows are locked. At higher levels MySQL and MariaDB lock every row
-- that they look at, and other batches find fewer. Process few rows in one transaction: one, where each takes a
-- while.
-- @function db:claim
-- @string table_name as for `db:read`
-- @tparam table options an unknown name raises
-- @tparam table options.where {sql, value, …}: which are unprocessed
-- @param[opt] options.order a column, `"column DESC"`, or a list of them
-- @int[opt=1] options.limit how many
-- @tparam[opt] {string,...} options.columns by default all; those of the key are there anyway
-- @treturn[1] claim
-- @return[2] nil
-- @return[2] err as from `db:read`
function db.claim(self, table_name, options)
  local ok, err = ready(self)
  if not ok then return nil, err end
  options = check_options(options, CLAIM_OPTIONS)
  if not self.transacted then core.misuse "a claim ends with its transaction: call it inside of db:transaction" end
  local where, limit = sql.condition(options.where, "where"), options.limit or 1
  if type(limit) ~= "number" or limit < 1 or limit ~= math.floor(limit) then core.misuse "limit must be a whole number above 0" end
  local columns
  if options.columns ~= nil then
    local there = {}
    columns = {}
    for i, column in ipairs(options.columns) do columns[i], there[column] = column, true end
    for _, column in ipairs(sql.key_columns(self, table_name)) do
      if not there[column] then columns[#columns + 1] = column end
    end
  end
  local found
  found, err = locking(self, ("SELECT %s FROM %s WHERE (%s)%s LIMIT %d%s"):format(sql.columns(self, columns),
    sql.name(self, table_name, "table"), sql.fill(self, where), sql.order(self, options.order), limit,
    sql.lock(self, { lock = "update", skip_locked = true })), self.timeout)
  if not found then return nil, err end
  local list = {}
  for i, row in ipairs(found) do list[i] = plain(row) end
  return setmetatable({ db = self, table_name = table_name, where = where, rows = list, transacted = self.transacted }, claim_class)
end

--- @section end

-- ------------------------------------------------------------- the module

-- In nginx `ngx.null` is as good.
rows.null = sql.null

--- An expression that the server computes, for the changes of `db:update`.
-- @function rows.expr
-- @string text SQL, of the program, never of its users; a `?` for each value
-- @param ... the values
-- @return expression
function rows.expr(...) return sql.expr({ ... }, select("#", ...)) end

--- A text of values that a form carries to a user and back: the user can read it, and not change it. So a version
-- survives from the request that shows a screen to the request that saves the changes.
-- @function rows.seal
-- @string secret the program's own, at least 16 bytes, that users cannot guess
-- @string purpose its use, as in "product 7": this is in the signature, not in the text
-- @tparam table values {name = value, …}: strings, numbers, booleans, `rows.null`
-- @treturn string for forms, URLs and cookies as it is, but for what HTML wants of `&`
function rows.seal(secret, purpose, values) return seal.seal(secret, purpose, values) end

--- Opens a sealed text.
-- @function rows.open
-- @string secret
-- @string purpose the same as when it was sealed
-- @string sealed what came back; anything else does no harm
-- @treturn[1] table the values
-- @return[2] nil
-- @return[2] err `forged`
function rows.open(secret, purpose, sealed) return seal.open(secret, purpose, sealed) end

local OPTIONS = { tables = true, timeout = true }
local SOCKET_OPTIONS = { tables = true, timeout = true, socket_timeout = true }
local TABLE_OPTIONS = { key = true, version = true, timestamp = true }

local function new(query, quote, dialect, options)
  local tables = {}
  if options.tables ~= nil and type(options.tables) ~= "table" then core.misuse "tables must be a table" end
  for name, described in pairs(options.tables or {}) do
    tables[name] = check_options(described, TABLE_OPTIONS)
  end
  return setmetatable({
    query = query, quote = quote, dialect = dialect, tables = tables,
    timeout = milliseconds(options.timeout == nil and DEFAULT_TIMEOUT or options.timeout, "timeout"),
  }, class)
end

local function socket_timeout(options)
  local limit = options.socket_timeout
  if limit ~= nil and not (type(limit) == "number" and limit > 0) then
    core.misuse "socket_timeout must be a positive number of seconds"
  end
  return limit
end

--- For a connection of LuaSQL's drivers, with autocommit as it is by default.
-- @function rows.luasql
-- @param connection of `luasql.mysql`, `luasql.postgres` or `luasql.sqlite3`
-- @tparam[opt] table options an unknown name raises
-- @tparam[opt] table options.tables name = {key = column or list of columns (`id`), version = column, timestamp = column}: for tables
--   whose rows have such a column each update changes it
-- @number[opt=50] options.timeout seconds that a lock is waited for, unless its `wait` says; on SQLite, a transaction. The
--   session limits how long an UPDATE waits (`innodb_lock_wait_timeout`, `lock_timeout`)
-- @treturn db
function rows.luasql(connection, options)
  local ok, execute = pcall(function() return connection.execute end)
  if not ok or type(execute) ~= "function" then core.misuse("connection must be LuaSQL's, not " .. type(connection)) end
  options = check_options(options, OPTIONS)
  local function quote(text)
    local escaped, message = connection:escape(text)
    if not escaped then core.misuse("a text is not one in the connection's character set: " .. tostring(message)) end
    return "'" .. escaped .. "'"
  end
  local shown = tostring(connection)
  if shown:find "^PostgreSQL" then return new(driver.luasql_postgresql(connection, "a"), quote, "postgresql", options) end
  if shown:find "^SQLite3" then return new(driver.luasql_sqlite(connection, "a"), quote, "sqlite", options) end
  return new(driver.luasql_mysql(connection, "a"), quote, nil, options)
end

--- For a connection of lua-resty-mysql, in nginx. Waiting yields, as every query of the driver does.
-- @function rows.resty_mysql
-- @tparam table connection connected; not `compact_arrays`
-- @tparam[opt] table options as for `rows.luasql`, and:
-- @number[opt] options.socket_timeout seconds (!), as for `attach.resty_mysql`
-- @treturn db
function rows.resty_mysql(connection, options)
  if type(connection) ~= "table" or type(connection.query) ~= "function" then
    core.misuse("connection must be an object of lua-resty-mysql, not " .. type(connection))
  end
  options = check_options(options, SOCKET_OPTIONS)
  local self = new(driver.resty_mysql(connection, socket_timeout(options)), function(text) return ngx.quote_sql_str(text) end, -- luacheck: ignore 113
    nil, options)
  self.backslashes = true
  return self
end

--- For a connection of pgmoon to PostgreSQL, in nginx or elsewhere.
-- @function rows.pgmoon
-- @tparam table connection connected
-- @tparam[opt] table options as for `rows.resty_mysql`
-- @treturn db
function rows.pgmoon(connection, options)
  if type(connection) ~= "table" or type(connection.query) ~= "function" or type(connection.escape_literal) ~= "function" then
    core.misuse("connection must be an object of pgmoon, not " .. type(connection))
  end
  options = check_options(options, SOCKET_OPTIONS)
  local self = new(driver.pgmoon(connection, socket_timeout(options)), function(text) return connection:escape_literal(text) end,
    "postgresql", options)
  self.doubles_quotes = true
  return self
end

return rows
