--- Does the work of hierlock.attach on a connection to PostgreSQL: advisory locks of the program's own transaction,
-- with the keys of `hierlock.open`. Internal.
--
-- An error would end the transaction, so the locks are asked for behind a savepoint. After a failed request the
-- transaction is as it was before.

local core = require "hierlock.core"

local postgresql = {}

-- Longer than any other wait, in ms: what statement_timeout can say, 24 days.
local LONGEST = 2147483647

-- The drivers give messages only, and no SQLSTATE. The messages are in the server's language (lc_messages): a
-- message that is not understood is a `store`. A time-out is known by the time that has passed.
local CODES = {
  ["deadlock detected"] = "deadlock",
  ["canceling statement due to user request"] = "cancelled",
  ["canceling statement due to lock timeout"] = "timeout",
  ["canceling statement due to statement timeout"] = "timeout",
  ["out of shared memory"] = "store",
}
local HINTS = {
  ["out of shared memory"] = " (all sessions of the server share one table of locks: raise max_locks_per_transaction)",
}

local NO_TRANSACTION = "no transaction is open, and a lock ends with its transaction: BEGIN first"

-- The SQLSTATE of a driver that has had no answer, and has closed the connection.
local GONE = "08006"

-- Makes an err of the driver's message; code: where the caller knows it better. `sqlstate` is 08006 where the driver
-- has closed the connection, whatever the message.
local function fail(message, target, code, sqlstate)
  local hint = ""
  if sqlstate == GONE then
    return core.failure("connection", message .. "; the transaction is gone with the connection", nil, nil, target)
  end
  for text, known in pairs(CODES) do
    if message:find(text, 1, true) then
      code, hint = code or known, HINTS[text] or ""
    end
  end
  return core.failure(code or "store", message .. hint .. "; roll back", nil, nil, target)
end

-- Rows come as lists, or as tables by name.
local function column(row, n)
  local value = row[n]
  if value == nil then value = row["c" .. n] end
  return value
end

-- Drivers give a boolean as the server sent it, or as a boolean of Lua.
local function is_true(value) return value == true or value == "t" end

-- The schema is named: the program's search_path may have functions of the same names, by another author. c6: the
-- question's number, which tells its answer from another's.
local LOOK = "SAVEPOINT hierlock;SELECT pg_catalog.current_setting('statement_timeout') AS c1," ..
  "pg_catalog.current_setting('lock_timeout') AS c2,pg_catalog.pg_is_in_recovery() AS c3," ..
  "pg_catalog.version() AS c4," .. core.postgresql_multiple .. " AS c5,%d AS c6"
local UNDO = "ROLLBACK TO SAVEPOINT hierlock;RELEASE SAVEPOINT hierlock"

local asked = 0

-- Begins the savepoint. Returns the session's limits, or nil, err.
local function begin(run, drop)
  asked = asked + 1
  local rows, message, _, sqlstate = run(LOOK:format(asked))
  if not rows then
    if sqlstate == GONE then return fail(message, nil, nil, sqlstate) end
    -- 25P01, and 25P02, which says so itself
    if message:find("SAVEPOINT", 1, true) then core.misuse(NO_TRANSACTION) end
    -- The server quotes a word that begins no statement, in a failed transaction, too.
    local quoted = "hierlock_question_" .. asked
    local _, said = run(quoted)
    if tostring(said):find(quoted, 1, true) then return fail(message) end
    drop()
    return fail(message, nil, nil, GONE)
  end
  local row = type(rows) == "table" and rows[1]
  if type(row) ~= "table" or tonumber(column(row, 6)) ~= asked then
    drop()
    return fail("the answer is that to an earlier question, and the connection was closed", nil, nil, GONE)
  end
  local safe, err = core.judge("postgresql", {
    version = column(row, 4), standby = is_true(column(row, 3)), multiple = is_true(column(row, 5)),
  })
  if safe then return { column(row, 1), column(row, 2) } end
  run(UNDO)
  return nil, err
end

-- Whether there may be leases, as csrc/stores/postgresql/gate.c looks; behind the locks, and in a
-- statement of its own.
local GATE = core.postgresql_gate .. " AS c2,pg_catalog.current_setting('transaction_isolation') AS c3"
local HIDDEN = "pg_catalog.row_security_active('public.hier_lock_lease_rows'::pg_catalog.text) OR " ..
  "pg_catalog.row_security_active('public.hier_lock_leases'::pg_catalog.text)"
local OF_LEASES = "SELECT 1 AS c1 FROM public.hier_lock_lease_rows r JOIN public.hier_lock_leases l ON l.id OPERATOR(pg_catalog.=) r.id " ..
  "WHERE r.key OPERATOR(pg_catalog.=) ANY('{%s}'::pg_catalog.int8[])"
local LEASE = OF_LEASES .. " AND r.exclusive UNION ALL " .. OF_LEASES .. " LIMIT 1"
local PAUSE = 0.02 -- s between two looks

-- The keys of a plan's statement, and those that it takes exclusively.
local function keys_of(sql)
  local all, exclusive = {}, {}
  for mode, key in sql:gmatch "pg_advisory_xact_lock([_a-z]*)%('(-?%d+)'%)" do
    all[#all + 1] = key
    if mode == "" then exclusive[#exclusive + 1] = key end
  end
  return table.concat(all, ","), table.concat(exclusive, ",")
end

-- Waits until no lease is in the way, with the rows locked. True; false: a lease is in the way; nil, message. A
-- lease that is over stays in the way until a manager has deleted it. A deletion here would end, or not, with the
-- caller's transaction.
local function await_leases(run, sql, gate, isolation, deadline)
  if gate == 0 or gate == 1 then return true end
  if gate ~= 2 then return nil, "there are leases in this database, and no privilege to see them" end
  if isolation ~= "read committed" then
    return nil, "there are leases in this database: a transaction that does not read what was committed last " ..
      "(" .. isolation .. ") cannot see them"
  end
  local look = LEASE:format(keys_of(sql))
  local rows, message = run("SELECT " .. HIDDEN .. " AS c1")
  if not rows then return nil, message end
  if is_true(column(rows[1], 1)) then return nil, "row-level security may hide leases from this role" end
  while true do
    rows, message = run(look)
    if not rows then return nil, message end
    if #rows == 0 then return true end
    if core.now() >= deadline then return false end
    rows, message = run(("SELECT pg_catalog.pg_sleep(%.3f)"):format(math.min(PAUSE, math.max(deadline - core.now(), 0.001))))
    if not rows then return nil, message end
  end
end

-- Tries the locks one after the other, up to the first that is not free.
local function try_sql(sql)
  local list = {}
  for call in sql:gmatch "pg_advisory_xact_lock[^)]*%)" do
    list[#list + 1] = " WHEN NOT pg_catalog." .. call:gsub("^pg_", "pg_try_") .. " THEN 1"
  end
  return "SELECT CASE" .. table.concat(list) .. " ELSE 0 END AS c1," .. GATE
end

-- Undoes a request that failed, whatever of it is locked, and says why.
local function refuse(run, outcome, describe, target)
  -- The server's clock counts by its own milliseconds.
  local ms, took = outcome.ms, math.ceil((core.now() - outcome.started) * 1000) + 1
  if not run(UNDO) then return fail(outcome.message or "the transaction is gone", target, "connection") end
  if ms == 0 and outcome.rows then
    return core.failure("timeout", describe .. " is locked; tried once; roll back", nil, nil, target)
  elseif ms > 0 and (took >= ms or outcome.leased) then
    return core.failure("timeout", ("%s was not granted within %.3f s; roll back"):format(describe, ms / 1000),
      nil, nil, target)
  end
  return fail(outcome.message, target)
end

--- Locks the rows of a plan until the transaction ends. ms: the longest wait; 0: tries once. describe: names the
-- target for people. driver: `run`, and `drop`, which closes the connection. Returns true, or nil, err. Once the
-- driver has had no answer, nothing more is asked.
function postgresql.take(driver, plan, ms, describe, target)
  local before, err = begin(driver.run, driver.drop)
  if not before then return nil, err end
  local gone
  local function run(text, wait)
    local rows, message, _, sqlstate = driver.run(text, wait)
    if sqlstate == GONE then gone = sqlstate end
    return rows, message
  end
  ms = math.min(ms, LONGEST)
  local sql = plan:sql "postgresql"
  local started = core.now()
  local rows, message = run(ms == 0 and try_sql(sql) or
    ("SET LOCAL statement_timeout=%d;SET LOCAL lock_timeout=0;%s;SELECT 0 AS c1,%s"):format(ms, sql, GATE), ms)
  local row = rows and rows[1]
  local free, leased = row and tonumber(column(row, 1)) == 0, false
  if free then
    free, message = await_leases(run, sql, tonumber(column(row, 2)), column(row, 3), started + ms / 1000)
    leased = free == false
    if free == nil then rows = nil end
  end
  if free then
    rows, message = run(ms == 0 and "RELEASE SAVEPOINT hierlock" or
      ("SET LOCAL statement_timeout='%s';SET LOCAL lock_timeout='%s';RELEASE SAVEPOINT hierlock"):format(
        before[1], before[2]))
    if rows then return true end
    return fail(message, target, "lost", gone)
  end
  if gone then return fail(message, target, nil, gone) end
  return refuse(run, { rows = rows, message = message, leased = leased, ms = ms, started = started }, describe, target)
end

return postgresql
