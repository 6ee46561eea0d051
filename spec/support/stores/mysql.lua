--- MySQL, and MariaDB beside it: session locks, and leases in a space that has them (mysql.leased).

local sql = require "spec.support.sql"

local BUCKETS = 10000
local TABLE = "hierlock_spec_buckets"

local mysql = {
  server = true, table = TABLE,
  themes = {
    hang = true, restart = { keeps = true }, forget = "it keeps its tables",
    cut = { quit = "\1\0\0\0\1", recall = "INSERT INTO" },
  },
}

-- The DSN of a table. A log-in costs twice as much with TLS. So specs come to our own MySQL without it, to MariaDB with
-- it, and by the same library. A spec that looks at TLS says so.
local function dsn_of(store, name)
  local dsn = sql.with_param(store.bare_dsn, "table=" .. name)
  return store.name == "mysql" and store.control and sql.with_param(dsn, "tls=off") or dsn
end

local function read_file(name)
  local file = assert(io.open(name, "rb"))
  local text = file:read("*a")
  file:close()
  return text
end

--- Makes and fills a table, by the files of sql/, under a name of its own.
-- levels: a list of names, by default the usual three.
function mysql.provision(connection, table_name, buckets, levels)
  local script = (read_file("sql/schema.sql") .. read_file("sql/provision.sql"))
    :gsub("%-%-[^\n]*", ""):gsub("hier_lock_buckets", table_name)
  local statements, procedure = script:match("^(.*)DELIMITER //(.*)//%s*DELIMITER ;%s*$")
  for statement in statements:gmatch("[^;]+") do
    if statement:find("%S") then connection:query(statement) end
  end
  connection:query(procedure)
  connection:query("CALL hier_lock_provision(%d, '%s', 50000)", buckets,
                   table.concat(levels or { "user", "account", "resource" }, ","))
end

--- Like mysql.provision, with leases, by the statements of `hierlock provision --leases`.
function mysql.provision_leases(connection, table_name, buckets, levels)
  local wanted = {
    table = function() return table_name end,
    query = function(_, statement) return connection:query(statement) end,
  }
  local space = require("hierlock.command.space").new(wanted)
  local found = space:look()
  if not found.leased then
    connection:query(space:schema()[2])
    space:lease()
    for _, statement in ipairs(space:lease_schema()) do connection:query(statement) end
    connection:query(space:schema()[1])
    connection:query(space:fill_gate())
    connection:query(space:record(buckets, levels or { "user", "account", "resource" }))
  end
  for level = 0, #(levels or { 1, 2, 3 }) - 1 do
    for first = 0, buckets - 1, 50000 do
      local last = math.min(first + 50000, buckets) - 1
      if space:count(level, first, last) <= last - first then connection:query(space:fill(level, first, last, true)) end
    end
  end
  return space
end

function mysql.make(store, support)
  store.dsn = dsn_of(store, TABLE)
  store.silenced_by("FLUSH TABLES WITH READ LOCK", "UNLOCK TABLES")
  store.silenced_by(("LOCK TABLES %s.%s_leasing_leases WRITE"):format(store.bare_dsn:match "/([%w_]+)$", TABLE), "UNLOCK TABLES")
  --- Numbers of sessions: of the tests' user, but our own; `busy`: only those that execute something.
  function store.sessions(busy)
    return sql.column(store.sql():query(
      "SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID() AND user = SUBSTRING_INDEX(USER(), '@', 1)" ..
      (busy and " AND command NOT IN ('Sleep', 'Daemon')" or "")))
  end
  --- The sessions with an open transaction, as an administrator sees them; `waiting`: only sessions that wait for a
  -- row.
  function store.transactions(waiting)
    -- Both servers show an old picture to those who look more often.
    support.sleep(waiting and 0.15 or 0.11)
    return sql.column(store.root():query(
      "SELECT trx_mysql_thread_id FROM information_schema.INNODB_TRX" .. (waiting and " WHERE trx_state='LOCK WAIT'" or "")))
  end
  --- Ends a session; it may have ended by itself.
  function store.kill(id)
    local connection = store.root() or store.sql()
    pcall(connection.query, connection, "KILL " .. id)
  end
  --- Lets the server take one connection more than it has. Returns what takes that back.
  function store.limit_connections()
    local root = store.root()
    local before = root:query("SELECT @@GLOBAL.max_connections")[1][1]
    local connected = root:query("SHOW GLOBAL STATUS LIKE 'Threads_connected'")[1][2]
    root:query("SET GLOBAL max_connections=" .. connected + 1)
    return function() root:query("SET GLOBAL max_connections=" .. before) end
  end
  --- How many requests wait for a row now. MariaDB shows an old picture to those
  -- who look more often than every 100 ms.
  function store.waiting()
    if store.dialect == "mariadb" then support.sleep(0.11) end
    return tonumber(store.sql():query(store.dialect == "mariadb"
      and "SELECT COUNT(*) FROM information_schema.INNODB_TRX WHERE trx_state='LOCK WAIT'"
      or "SELECT COUNT(*) FROM performance_schema.data_locks WHERE LOCK_STATUS='WAITING'")[1][1])
  end
  function store.prepare()
    if store.prepared then return end
    store.prepared = true
    local version = store.sql():query("SELECT VERSION()")[1][1]
    store.dialect = version:find("MariaDB") and "mariadb" or "mysql"
    mysql.provision(store.sql(), TABLE, BUCKETS)
  end
end

--- Returns the server with a space that has update rows, and leases, if `leases`; `store` itself where that needs
-- nothing of its own.
function mysql.updated(store, leases)
  if not store.table then return leases and mysql.leased(store) or store end
  local made = setmetatable({}, { __index = leases and mysql.leased(store) or store })
  local stem = TABLE .. (leases and "_update_leasing" or "_update")
  made.table, made.stem = stem .. "_buckets", stem
  made.dsn = dsn_of(store, made.table)
  function made.prepare()
    store.prepare()
    local connection = store.sql()
    if leases then
      mysql.provision_leases(connection, made.table, BUCKETS)
    else
      mysql.provision(connection, made.table, BUCKETS)
    end
    local space = require("hierlock.command.space").new {
      table = function() return leases and stem .. "_nodes" or made.table end,
      query = function(_, statement) return connection:query(statement) end,
    }
    if space:count(-126, 0, BUCKETS - 1) == 0 then connection:query(space:fill(-126, 0, BUCKETS - 1)) end
  end
  return made
end

--- Returns the server with a space that has leases; `store` itself where that needs nothing of its own.
function mysql.leased(store)
  if not store.table then return store end
  if store.with_leases then return store.with_leases end
  local leased = setmetatable({}, { __index = store })
  store.with_leases = leased
  leased.table, leased.stem = TABLE .. "_leasing_buckets", TABLE .. "_leasing"
  leased.dsn = dsn_of(store, leased.table)
  function leased.prepare()
    if leased.provisioned then return end
    leased.provisioned = true
    store.prepare()
    mysql.provision_leases(store.sql(), leased.table, BUCKETS)
  end
  --- Waiters that look at a lease wait for no row.
  function leased.waiting(target)
    local support = require "spec.support"
    if store.dialect == "mariadb" then support.sleep(0.11) end
    return support.waiting(leased, target)
  end
  return leased
end

return mysql
