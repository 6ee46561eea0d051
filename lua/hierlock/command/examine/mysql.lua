--- Checks a MySQL or MariaDB: its settings, as the server reports them; the tables of the space; the account's
-- rights. Asks with no more privileges than programs need, and names what these do not show.

local core = require "hierlock.core"
local progress = require "hierlock.command.progress"
local server = require "hierlock.command.server"
local space = require "hierlock.command.space"
local verify = require "hierlock.command.verify"

local mysql = {}

local LOOPBACK = { localhost = true, ["127.0.0.1"] = true, ["::1"] = true }
local IN_FILE = { tx_isolation = "transaction-isolation" }
-- The limits of an account: the names in error 1226, and those for ALTER USER.
local LIMITS = { max_questions = "MAX_QUERIES_PER_HOUR", max_updates = "MAX_UPDATES_PER_HOUR",
  max_connections_per_hour = "MAX_CONNECTIONS_PER_HOUR", max_user_connections = "MAX_USER_CONNECTIONS" }
local LONG_WAIT = 1 -- s, below which innodb_lock_wait_timeout disturbs programs that attach

-- ------------------------------------------------------------- asking

local function pairs_of(connection, what)
  local rows, err = connection:query("SHOW GLOBAL " .. what)
  if not rows then return nil, err end
  local found = {}
  for _, row in ipairs(rows) do found[row[1]] = row[2] end
  return found
end

local function value(connection, query, ...)
  local rows, err = connection:query(query:format(...))
  if not rows then return nil, err end
  return rows[1] and rows[1][1] or false
end

local function is_on(text) return text == "ON" or text == "1" end

local function bytes(n)
  if n >= 2 ^ 30 then return ("%.1f GiB"):format(n / 2 ^ 30) end
  return ("%.0f MiB"):format(math.ceil(n / 2 ^ 20))
end

-- 'user'@'host', as GRANT wants it.
local function account(text)
  local user, host = text:match "^(.*)@([^@]*)$"
  local function quoted(part) return "'" .. part:gsub("\\", "\\\\"):gsub("'", "''") .. "'" end
  return quoted(user or text) .. "@" .. quoted(host or "%")
end

-- SET as it lasts: MySQL keeps it itself. Some variables have one name there, and another in SQL.
local function set(self, name, to)
  if self.mariadb then
    return { ("SET GLOBAL %s = %s;"):format(name, to),
      ("and in my.cnf, below [mysqld], so that it lasts: %s = %s"):format(IN_FILE[name] or name, (to:gsub("'", ""))) }
  end
  return { ("SET PERSIST %s = %s;"):format(name, to) }
end

-- Sets a variable that a session reads only at its beginning.
local function set_anew(self, name, to)
  local mends = set(self, name, to)
  mends[#mends + 1] = "then have the programs connect anew"
  return mends
end

-- A table as it is called from every database.
local function qualified(self, name)
  return ("`%s`.`%s`"):format(self.database:gsub("`", "``"), name)
end

-- ------------------------------------------------------------- the server

-- Asks the store's own judge about these variables and facts, of a server that is new enough: true value, or nil, err.
local function judge(self, names, facts)
  facts = facts or {}
  facts.version = self.mariadb and "10.6-MariaDB" or "8.0"
  for _, name in ipairs(names) do facts[name] = self.variables[name] end
  return core.judge("mysql", facts)
end

local function version(self, found)
  local new, err = core.judge("mysql", { version = self.variables.version })
  found:add("version", new and "ok" or "wrong", new and self.variables.version or err.message,
    "Older servers, and others that speak their protocol, take no such row locks.",
    "install MySQL 8.0 or MariaDB 10.6, or later")
  self.mariadb = self.variables.version:find "MariaDB" ~= nil
end

local function read_only(self, found)
  local why = "On a read-only server, a replica mostly, locks are granted, but exclude no other program."
  local mends, names = {}, {}
  for _, name in ipairs { "super_read_only", "read_only", "innodb_read_only" } do
    if not judge(self, { name }) then
      names[#names + 1] = name .. " = " .. self.variables[name]
      if name ~= "innodb_read_only" then
        for _, line in ipairs(set(self, name, "OFF")) do mends[#mends + 1] = line end
      else
        mends[#mends + 1] = "in my.cnf, below [mysqld]: innodb_read_only = OFF"
        mends[#mends + 1] = "then restart the server"
      end
    end
  end
  table.insert(mends, 1, "if it is a replica, name its primary in the DSN instead; if it is the primary:")
  found:add("read-only", names[1] and "wrong" or "ok", names[1] and table.concat(names, ", ") or "no", why, mends)
end

local function replica(self, found)
  local why = "Locks that are taken on a replica which can be written to are not seen on its primary."
  local mend = "name the primary in the DSN"
  local rows, err = self.connection:query(self.mariadb and "SHOW ALL REPLICAS STATUS" or "SHOW REPLICA STATUS")
  if not rows then
    found:add("replica", "unseen", err.message, why, ("GRANT %s ON *.* TO %s;"):format(
      self.mariadb and "REPLICA MONITOR" or "REPLICATION CLIENT", self.account))
  elseif #rows == 0 then
    found:add("replica", "ok", "no", why)
  else
    found:add("replica", "warning", "it follows another server", why, mend)
  end
end

local function cluster(self, found)
  local variables = self.variables
  local safe, err = judge(self, { "wsrep_on", "group_replication_group_name", "group_replication_single_primary_mode" })
  found:add("cluster", safe and "ok" or "wrong",
    not safe and err.message or (variables.group_replication_group_name or "") ~= "" and "a group with one primary" or "none",
    "In a cluster with several primaries, a row lock on one node does not hold on the others.",
    is_on(variables.wsrep_on) and "use a server outside of the cluster for the locks" or
      "SELECT group_replication_switch_to_single_primary_mode();")
end

local function binlog(self, found)
  local records = judge(self, { "log_bin", "binlog_format" }, { leases = true })
  local why = "A server that logs statements records no leases, and provisions slowly; session locks write nothing and do not mind."
  found:add("binlog format", records and "ok" or self.leased and "wrong" or "warning",
    is_on(self.variables.log_bin) and (self.variables.binlog_format or "unknown") or "no binary log", why,
    set_anew(self, "binlog_format", "'ROW'"))
end

local function isolation(self, found)
  local level = self.variables.transaction_isolation or self.variables.tx_isolation or "unknown"
  found:add("isolation", level == "SERIALIZABLE" and "warning" or "ok", level,
    "hierlock's own sessions set theirs; programs that lock in their own transactions (hierlock.attach) have this one, " ..
    "and in SERIALIZABLE mere reading locks.",
    set_anew(self, self.variables.transaction_isolation and "transaction_isolation" or "tx_isolation", "'READ-COMMITTED'"))
end

local function deadlocks(self, found)
  local off = self.variables.innodb_deadlock_detect and not is_on(self.variables.innodb_deadlock_detect)
  found:add("deadlock detection", off and "warning" or "ok", off and "off" or "on",
    "Only extend, and programs with other row locks in the same transaction, can deadlock: without it they wait until their timeout.",
    set(self, "innodb_deadlock_detect", "ON"))
end

local function timeouts(self, found)
  local ill, mends = {}, {}
  local wait = tonumber(self.variables.innodb_lock_wait_timeout) or 50
  if wait <= LONG_WAIT then
    ill[1], mends = ("innodb_lock_wait_timeout = %d s"):format(wait), set(self, "innodb_lock_wait_timeout", "50")
  end
  for _, name in ipairs { "idle_transaction_timeout", "idle_readonly_transaction_timeout", "idle_write_transaction_timeout" } do
    local limit = tonumber(self.variables[name]) or 0
    if limit > 0 then
      ill[#ill + 1] = ("%s = %d s"):format(name, limit)
      for _, line in ipairs(set(self, name, "0")) do mends[#mends + 1] = line end
    end
  end
  if ill[1] then mends[#mends + 1] = "then have the programs connect anew" end
  found:add("time-outs", ill[1] and "warning" or "ok", ill[1] and table.concat(ill, ", ") or ("locks wait %d s, idle transactions stay"):format(wait),
    "hierlock's own sessions set theirs; programs that attach lose locks, or their place in the queue, by these.", mends)
end

local function observed(self, found)
  local on = is_on(self.variables.performance_schema)
  found:add("performance_schema", on and "ok" or "warning", on and "on" or "off",
    "It is where others see who holds a lock: without it, timeouts and `holders` name no one.",
    { "in my.cnf, below [mysqld]: performance_schema = ON", "then restart the server" })
end

local function durability(self, found)
  if not self.leased then return end
  local flush, sync = self.variables.innodb_flush_log_at_trx_commit, self.variables.sync_binlog
  local ill, mend = {}, {}
  if flush ~= "1" then
    ill[1], mend = "innodb_flush_log_at_trx_commit = " .. flush, set(self, "innodb_flush_log_at_trx_commit", "1")
  end
  if is_on(self.variables.log_bin) and sync ~= "1" and not self.mariadb then
    ill[#ill + 1] = "sync_binlog = " .. sync
    for _, line in ipairs(set(self, "sync_binlog", "1")) do mend[#mend + 1] = line end
  end
  found:add("durability", ill[1] and "warning" or "ok", ill[1] and table.concat(ill, ", ") or "each commit is on the disk",
    "A lease that a crash of the server forgets is granted to another program while its holder believes in it.", mend)
end

local function connections(self, found)
  local most = tonumber(self.variables.max_connections)
  local used = tonumber(self.states.Threads_connected) or 1
  local wanted = self.subject.pool_size * self.subject.processes
  local room = most - used + 1 -- without this one
  local told = ("%d at most, %d of others now; %d pools of %d want %d"):format(most, used - 1, self.subject.processes,
    self.subject.pool_size, wanted)
  local why = "Each lock that is held or awaited has a connection; where none is left, acquiring fails."
  found:add("max_connections", wanted > most and "wrong" or wanted > room and "warning" or "ok", told, why,
    set(self, "max_connections", tostring(wanted + used + 10)))
  local own = tonumber((value(self.connection, "SELECT @@SESSION.max_user_connections"))) or 0
  if own > 0 then
    found:add("max_user_connections", wanted > own and "wrong" or "ok", ("%d for this account; %d are wanted"):format(own, wanted), why,
      tonumber(self.variables.max_user_connections) == own and set(self, "max_user_connections", "0")
        or ("ALTER USER %s WITH MAX_USER_CONNECTIONS 0;"):format(self.account))
  end
end

local function tls(self, found)
  local rows, err = self.connection:query "SHOW SESSION STATUS LIKE 'Ssl_cipher'"
  local why = "Without TLS, who is on the way reads the ids, and may take the connection over."
  if not rows then return found:add("TLS", "unseen", err.message, why) end
  local said = core.dsn(self.subject.dsn)
  local cipher = rows[1] and rows[1][2] or ""
  local near = said.socket or not said.host or LOOPBACK[said.host]
  local mend = "in the DSN: tls=verify-identity&tls_ca=/path/to/ca.pem"
  if cipher == "" then
    found:add("TLS", near and "ok" or "warning", near and "none, and the server is on this machine" or "none", why, mend)
  else
    local sure = near or self.subject.dsn:find "tls=verify%-"
    found:add("TLS", sure and "ok" or "warning", cipher .. (sure and "" or ", but the server's certificate is not checked: another could answer"), why, mend)
  end
end

-- Warns of statements that the server runs at the beginning of each connection.
local function greeting(self, found)
  local said = self.variables.init_connect or ""
  if said == "" then return end
  found:add("init_connect", "warning", said, "It is run at the beginning of each connection, and may change what hierlock relies on.",
    set_anew(self, "init_connect", "''"))
end

-- ------------------------------------------------------------- the space

local function layout(self, found)
  self.found:add("buckets and levels", "ok", ("%s buckets for each of %s%s"):format(progress.number(found.buckets),
    table.concat(found.levels, ","), found.recorded and "" or " (the defaults: hier_lock_meta does not say)"),
    "Programs with other buckets or levels lock other rows, and would exclude no one; they are refused.")
end

local function rows(self, found)
  local why = "A missing row locks nothing: who needs it is refused."
  if self.subject.quick then return end
  self.connection:answers_within(server.COUNT)
  local bar, ill = progress.new(found.buckets * #found.levels, self.subject.quiet), {}
  for level, name in ipairs(found.levels) do
    local missing, holes = verify.count_level(found, level - 1, bar)
    bar:clear()
    if not missing then return self.found:add("rows", "unseen", holes.message, why, self.grant) end
    if missing > 0 then
      ill[#ill + 1] = ("level %d (%s): %s"):format(level - 1, name, (verify.describe(missing, holes):gsub("…", "...")))
    end
  end
  self.found:add("rows", ill[1] and "wrong" or "ok", ill[1] and table.concat(ill, "; ") or
    ("all %s are there"):format(progress.number(found.buckets * #found.levels)), why, self.subject.command "provision")
  local surplus, err = self.space:surplus(found.buckets, #found.levels)
  if not surplus then return self.found:add("other rows", "unseen", err.message, why, self.grant) end
  if surplus[1] then
    local n, mends = 0, { "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED;" }
    for _, range in ipairs(surplus) do
      n, mends[#mends + 1] = n + range[2], ("DELETE FROM %s WHERE %s;"):format(qualified(self, self.space.table), range[1])
    end
    self.found:add("other rows", "warning", ("%s beyond these levels and buckets"):format(progress.number(n)),
      "The table was perhaps made for other levels or buckets, which others still use.", found.recorded and mends or
        "record for what the table was made: hierlock provision, with its --levels and --buckets")
  end
end

local function table_judge(self, name, engine)
  return judge(self, {}, { database = self.database, table = name, engine = engine or nil })
end

local function engines(self, found)
  local why = "Rows of another engine than InnoDB are not locked at all."
  local tables = { { self.space.table, "level, bucket" } }
  for _, each in ipairs(found.leased and self.space:lease_tables() or {}) do tables[#tables + 1] = each end
  local ill, mends, keys, key_mends = {}, {}, {}, {}
  for _, each in ipairs(tables) do
    local engine, err = self.space:engine(each[1])
    if engine == nil then return self.found:add("engine", "unseen", err.message, why) end
    local safe, refusal = table_judge(self, each[1], engine)
    if not safe then
      ill[#ill + 1] = refusal.message
      mends[#mends + 1] = engine and ("ALTER TABLE %s ENGINE = InnoDB;"):format(qualified(self, each[1]))
        or self.subject.command(found.leased and "provision --leases" or "provision")
    end
    local key
    key, err = self.space:key(each[1])
    if not key then return self.found:add("engine", "unseen", err.message, why) end
    if engine and key ~= each[2] then
      keys[#keys + 1] = each[1] .. (key == "" and " has no primary key" or " has the primary key " .. key)
      key_mends[#key_mends + 1] = ("ALTER TABLE %s %sADD PRIMARY KEY (%s);"):format(qualified(self, each[1]), key == "" and "" or "DROP PRIMARY KEY, ", each[2])
    end
  end
  self.found:add("primary keys", keys[1] and "wrong" or "ok", keys[1] and table.concat(keys, ", ") or "as they should be",
    "Without it, a look-up locks rows that were not asked for.", key_mends)
  self.found:add("engine", ill[1] and "wrong" or "ok", ill[1] and table.concat(ill, "; ") or "InnoDB", why, mends)
  return #ill == 0
end

local function gate(self, found)
  if not found.leased then return end
  local name, wanted = self.space.stem .. "_gate", space.GATES
  local n, err = self.space:rows(name)
  local why = "Who locks looks at the gate's row to see whether there are leases: a missing one is refused."
  if not n then return self.found:add("gate", "unseen", err.message, why, self.leases_grant) end
  self.found:add("gate", n == wanted and "ok" or "wrong", ("%s of %s rows"):format(progress.number(n), progress.number(wanted)), why,
    self.subject.command "provision --leases")
end

local function buffer(self)
  local size, err = value(self.connection, "SELECT DATA_LENGTH FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE() " ..
    "AND TABLE_NAME = '%s'", self.space.table)
  local why = "A row is read before it is locked: what is not in the buffer pool is read from the disk."
  if not size then return self.found:add("buffer pool", "unseen", err and err.message or "the table's size is not shown", why) end
  local pool = tonumber(self.variables.innodb_buffer_pool_size)
  size = tonumber(size) or 0
  self.found:add("buffer pool", size > pool and "warning" or "ok", ("%s; the table has %s"):format(bytes(pool), bytes(size)), why,
    set(self, "innodb_buffer_pool_size", ("%.0f"):format(math.ceil(size * 1.5 / 2 ^ 27) * 2 ^ 27)))
end

-- Prepares the GRANT statements for a trial that fails: the trial itself finds out what the account may do.
local function grants(self)
  local function on(name) return qualified(self, name) end
  local grant = { ("GRANT SELECT ON %s TO %s;"):format(on "hier_lock_meta", self.account),
    ("GRANT SELECT%s ON %s TO %s;"):format(self.mariadb and "" or ", UPDATE", on(self.space.table), self.account) }
  local leases = { grant[1], grant[2] }
  for _, suffix in ipairs { "_leases", "_leased", "_gate" } do
    leases[#leases + 1] = ("GRANT SELECT, INSERT, UPDATE, DELETE ON %s TO %s;"):format(on(self.space.stem .. suffix), self.account)
  end
  self.grant, self.leases_grant = grant, leases
  self.subject.lock_denied, self.subject.leases_denied = self.leased and leases or grant, leases
  self.subject.unopened = self.subject.lock_denied
  local observers = {}
  for _, name in ipairs(self.mariadb and { "threads", "user_variables_by_thread" } or
                        { "data_locks", "threads", "user_variables_by_thread", "session_connect_attrs" }) do
    observers[#observers + 1] = ("GRANT SELECT ON performance_schema.%s TO %s;"):format(name, self.account)
  end
  if self.mariadb then observers[#observers + 1] = ("GRANT PROCESS ON *.* TO %s;"):format(self.account) end
  self.subject.observers_blind = is_on(self.variables.performance_schema) and observers
    or "performance_schema = ON comes first, see above"
end

local function tables(self)
  local found, err = self.space:look(self.subject)
  local why = "The rows are what is locked."
  if not found then
    local denied = err.errno == 1142 or err.errno == 1044
    if err.mend then self.subject.unprovisioned = "mend the table first, as is said above" end
    return self.found:add("table", "wrong", err.message, why, denied and self.grant or err.mend or self.subject.command "provision")
  end
  self.leased = found.leased
  grants(self)
  binlog(self, self.found)
  durability(self, self.found)
  if not found.engine then
    local mends = { self.subject.command(found.leased and "provision --leases" or "provision"), "or, where it is there and hidden:" }
    for _, line in ipairs(found.leased and self.leases_grant or self.grant) do mends[#mends + 1] = line end
    return self.found:add("table", "wrong", select(2, table_judge(self, self.space.table)).message, why, mends)
  elseif found.unmoved then
    return self.found:add("table", "wrong", ("%s still has the name of a space without leases"):format(self.space.name), why,
      self.subject.command "provision --leases")
  end
  self.found:add("table", "ok", self.space.table .. (found.leased and ", with leases" or ""), why)
  if self.subject.leases_wanted and not found.leased then
    self.found:add("tables of leases", "wrong", "none", "Each lock of a quorum is a lease on its stores.", self.subject.command "provision --leases")
  end
  found.space, found.recorded = self.space, found.buckets ~= nil
  found.buckets, found.levels = found.buckets or space.DEFAULT_BUCKETS, found.levels or space.DEFAULT_LEVELS
  layout(self, found)
  if not engines(self, found) then return end
  rows(self, found)
  gate(self, found)
  buffer(self)
end

-- ------------------------------------------------------------- all of it

local WHY_REACHED = "Nothing can be locked on a server that cannot be reached."

local function unreached(err, subject)
  if err.errno == 1045 or err.errno == 1698 then
    return "check user and password in the DSN, and that the server has this user for this host"
  elseif err.errno == 1044 then
    local who, database = err.message:match "user ('.*'@'.*') to database '(.*)'"
    return who and ("GRANT SELECT ON `%s`.* TO %s;"):format(database:gsub("`", "``"), who) or "let the account use the database"
  elseif err.errno == 1049 then
    local database = err.message:match "Unknown database '(.*)'"
    return database and { ("CREATE DATABASE `%s`;"):format(database:gsub("`", "``")), subject.command "provision" } or
      "make the database that the DSN names"
  elseif err.errno == 1040 then
    return "SET GLOBAL max_connections = @@GLOBAL.max_connections + 100;"
  elseif err.errno == 1203 then -- the server's limit for each account
    return "SET GLOBAL max_user_connections = 0;"
  elseif err.errno == 1226 then -- the account's own limit
    local user, resource = err.message:match "User '(.*)' has exceeded the '(.-)' resource"
    local limit = LIMITS[resource] or "MAX_USER_CONNECTIONS"
    return ("ALTER USER %s WITH %s 0; -- HOST: as in mysql.user"):format(account((user or "USER") .. "@HOST"), limit)
  elseif err.message:find "not built" then
    return "install the client library (apt-get install libmariadb3), or build hierlock with it (apt-get install libmariadb-dev)"
  end
  return "start the server, or mend host, port or socket in the DSN"
end

--- Adds its findings, and tells the subject the mends for the trial that follows. False: there is no server to try.
function mysql.examine(subject, found)
  local connection, err = server.connect(subject, "doctor", server.ANSWER, true)
  if not connection then
    found:add("reached", "wrong", err.message, WHY_REACHED, unreached(err, subject))
    return false
  end
  local self = { connection = connection, subject = subject, found = found }
  local who, database
  self.variables, err = pairs_of(connection, "VARIABLES")
  if self.variables then self.states, err = pairs_of(connection, "STATUS") end
  if self.states then who, err = value(connection, "SELECT CURRENT_USER()") end
  if who then database, err = value(connection, "SELECT DATABASE()") end
  if err then
    found:add("reached", "wrong", err.message, WHY_REACHED, unreached(err, subject))
    connection:close()
    return false
  end
  self.account, self.database = account(who), database or ""
  self.space = space.new(connection)
  found:add("reached", "ok", subject.where .. ", as " .. who, WHY_REACHED)
  version(self, found)
  grants(self)
  read_only(self, found)
  replica(self, found)
  cluster(self, found)
  if database then
    tables(self)
  else
    found:add("database", "wrong", "the DSN names none", "The table is in a database.", "in the DSN, behind the host: /database")
  end
  isolation(self, found)
  deadlocks(self, found)
  timeouts(self, found)
  greeting(self, found)
  connections(self, found)
  tls(self, found)
  observed(self, found)
  local answers, silence = connection:query "SELECT 1"
  connection:close()
  if not answers then
    found:add("answers", "wrong", "it ceased to answer: " .. silence.message, "What was not answered above is not known, and programs wait likewise.",
      "look at the server itself: is its machine out of memory or disk, is it stopped?")
  end
  return answers ~= nil
end

return mysql
