--- Shared by the specs: the stores that they run on, peers that hold or await locks in other processes and threads,
-- and waiting for conditions.
--
-- Stores come from the environment, as spec/support/servers.sh sets it; MYSQL_DSN
-- names a server of the user's instead. A store that cannot be had is reported
-- as pending, with the reason; where HIERLOCK_REQUIRE names it, that is a failure.

local uv = require "luv"
local hierlock = require "hierlock"

local support = {}

-- For showing that something *stays* blocked, where nothing can be looked at.
support.STAYS_BLOCKED = 0.15
-- For what must happen, on a busy machine; nothing waits for as long as this.
support.DEADLINE = 20

function support.now() return uv.hrtime() / 1e9 end
-- luv takes a negative time for weeks.
function support.sleep(seconds) uv.sleep(math.max(math.floor(seconds * 1000 + 0.5), 0)) end

--- Collects all that the program cannot reach any more. Compiled code of LuaJIT goes first: a loop that was compiled
-- for one function keeps that function, and its upvalues.
function support.collect()
  local jit = rawget(_G, "jit")
  if jit then jit.flush() end
  for _ = 1, 3 do collectgarbage() end
end

--- Waits until condition() is true, and returns its result; fails after so many seconds, or DEADLINE.
function support.wait_until(condition, what, patience)
  local deadline, pause = support.now() + (patience or support.DEADLINE), 0.002
  repeat
    local result = condition()
    if result then return result end
    support.sleep(pause)
    pause = math.min(pause * 1.2, 0.01) -- looking costs a server something
  until support.now() > deadline
  error("gave up waiting for " .. (what or "a condition"), 2)
end

-- How many tries, and for how long, a wait has to end in time, see ends_in_time.
local TRIES, PATIENCE = 40, 30

--- Fails unless a try ends so many seconds after its time, at most. The machine may be busy, so the best try counts,
-- less the best lateness of the mere sleeps beside them. Fails at once when a single try ends early: that has no
-- excuse. wait(seconds): waits without success, checks how the wait ended, and returns how long it took. store:
-- where the time runs, on a server or here.
function support.ends_in_time(store, seconds, late, wait)
  local control = support.process(nil)
  control:call("handles.sql = ... and support.sql_connection(...)", store.bare_dsn)
  local patience = support.now() + PATIENCE
  local best, machine, tries = math.huge, math.huge, 0
  repeat
    control:start([[
      local seconds = ...
      local start = support.now()
      if handles.sql then
        handles.sql:query(handles.sql.postgresql and "SELECT pg_sleep(%.6f)" or "SELECT SLEEP(%.6f)", seconds)
      else
        support.sleep(seconds)
      end
      return support.now() - start - seconds
    ]], seconds)
    local elapsed = wait(seconds)
    assert(elapsed >= seconds, ("%.6f s is too early"):format(elapsed))
    best = math.min(best, elapsed - seconds)
    machine = math.min(machine, math.max(control:result(), 0))
    tries = tries + 1
    if best <= late + machine then return control:close() end
  until tries == TRIES or support.now() > patience
  error(("%.6f s is too late, the best of %d tries; the machine itself was %.6f s late"):format(
    best, tries, machine), 2)
end

-- --------------------------------------------------------------- servers

local BUCKETS = 10000
local TABLE = "hierlock_spec_buckets"
-- For acquisitions without a time-out of their own: less than DEADLINE, so that a peer whose wait fails says so.
local TIMEOUT = 15

local function read_file(name)
  local file = assert(io.open(name, "rb"))
  local text = file:read("*a")
  file:close()
  return text
end

-- The parts of a DSN, either form, that LuaSQL wants.
local function dsn_parts(dsn)
  local user, password, host, port, database =
    dsn:match("^%a+://([^:@]*):?([^@]*)@([^:/]*):?(%d*)/([^?]*)")
  if not user then
    user, password, host, port, database = dsn:match("^([^:@]*):?(.-)@tcp%(([^:)]*):?(%d*)%)/([^?]*)")
  end
  assert(user, "the specs need a DSN with user, password, host and port")
  if dsn:find("^%a+://") then
    password = password:gsub("%%(%x%x)", function(hex) return string.char(tonumber(hex, 16)) end)
  end
  return database, user, password, host, tonumber(port) or 3306
end

--- The first column of rows.
function support.column(rows)
  local values = {}
  for i, row in ipairs(rows) do values[i] = row[1] end
  return values
end

local luasql, luasql_postgresql

--- LuaSQL's environment: one for the process, never closed. The environment's close() ends the client library
-- (mysql_library_end), while threads of ours may be in it.
function support.luasql()
  luasql = luasql or require("luasql.mysql").mysql()
  return luasql
end

--- Like support.luasql, for its driver for PostgreSQL.
function support.luasql_postgresql()
  luasql_postgresql = luasql_postgresql or require("luasql.postgres").postgres()
  return luasql_postgresql
end

--- A connection of LuaSQL's, for looking and for administration:
-- sql(query, ...) returns a list of rows, each a list; the arguments are put in
-- by string.format.
function support.sql_connection(dsn)
  local self = { postgresql = dsn:find("^postgres") ~= nil }
  local environment = self.postgresql and support.luasql_postgresql() or support.luasql()
  local connection = assert(environment:connect(dsn_parts(dsn)))
  function self.query(_, query, ...)
    if select("#", ...) > 0 then query = query:format(...) end
    local cursor = assert(connection:execute(query))
    if type(cursor) == "number" then return cursor end
    local rows = {}
    while true do
      local row = cursor:fetch({}, "n")
      if not row then break end
      rows[#rows + 1] = row
    end
    cursor:close()
    return rows
  end
  function self.try(_, query) return connection:execute(query) end
  function self.close(_) connection:close() end
  return self
end

--- Makes and fills a table, by the files of sql/, under a name of its own.
-- levels: a list of names, by default the usual three.
function support.provision(connection, table_name, buckets, levels)
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

--- Like support.provision, with leases, by the statements of `hierlock provision --leases`.
function support.provision_leases(connection, table_name, buckets, levels)
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

--- Makes the tables of leases on PostgreSQL, as `hierlock provision --leases` does, for all.
function support.lease_tables(root)
  root:query((require("hierlock.command.lease_tables").postgresql("PUBLIC")))
end

-- ---------------------------------------------------------------- stores

local function with_param(dsn, param) return dsn .. (dsn:find("?", 1, true) and "&" or "?") .. param end

-- Common to the servers; `command` ends a session, `queries` list them.
local function server_store(name, dsn, root_dsn, control)
  local store = {
    name = name,
    server = true,
    bare_dsn = dsn,
    root_dsn = root_dsn,
    control = control,
    dsn = dsn,
    options = { buckets = BUCKETS, timeout = TIMEOUT },
  }
  --- For looking, and for a table of the spec's own; as the tests' user.
  function store.sql()
    if not store.connection then store.connection = support.sql_connection(dsn) end
    return store.connection
  end
  --- For what only an administrator may do; nil on a server of the user's.
  function store.root()
    if root_dsn and not store.root_connection then
      store.root_connection = support.sql_connection(root_dsn)
    end
    return store.root_connection
  end
  function store.close_connections()
    if store.connection then store.connection:close() end
    if store.root_connection then store.root_connection:close() end
    store.connection, store.root_connection = nil, nil
  end
  --- stop, start, restart, kill; a server that is started gets the options, too,
  -- words without spaces.
  function store.command(verb, options)
    -- A sanitizer is preloaded for us, and not for the server.
    local ok = os.execute(("unset LD_PRELOAD; HIERLOCK_SERVER_OPTIONS='%s' %s %s >/dev/null 2>&1"):format(
      options or "", control, verb))
    assert(ok == true or ok == 0, "the server did not " .. verb)
    store.close_connections()
  end
  return store
end

-- MySQL or MariaDB.
local function mysql_store(...)
  local store = server_store(...)
  store.table = TABLE
  store.dsn = with_param(store.bare_dsn, "table=" .. TABLE)
  --- Numbers of sessions: of the tests' user, but our own; `busy`: only those that execute something.
  function store.sessions(busy)
    return support.column(store.sql():query(
      "SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID() AND user = SUBSTRING_INDEX(USER(), '@', 1)" ..
      (busy and " AND command NOT IN ('Sleep', 'Daemon')" or "")))
  end
  --- The sessions with an open transaction, as an administrator sees them; `waiting`: only sessions that wait for a
  -- row.
  function store.transactions(waiting)
    -- Both servers show an old picture to those who look more often.
    support.sleep(waiting and 0.15 or 0.11)
    return support.column(store.root():query(
      "SELECT trx_mysql_thread_id FROM information_schema.INNODB_TRX" .. (waiting and " WHERE trx_state='LOCK WAIT'" or "")))
  end
  --- Ends a session; it may have ended by itself.
  function store.kill(id)
    local sql = store.root() or store.sql()
    pcall(sql.query, sql, "KILL " .. id)
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
    support.provision(store.sql(), TABLE, BUCKETS)
  end
  return store
end

--- Returns the server with a space that has update rows, and leases, if `leases`; `store` itself where that needs
-- nothing of its own.
function support.updated(store, leases)
  if not store.table then return leases and support.leased(store) or store end
  local made = setmetatable({}, { __index = leases and support.leased(store) or store })
  local stem = TABLE .. (leases and "_update_leasing" or "_update")
  made.table, made.stem = stem .. "_buckets", stem
  made.dsn = with_param(store.bare_dsn, "table=" .. made.table)
  function made.prepare()
    store.prepare()
    local connection = store.sql()
    if leases then
      support.provision_leases(connection, made.table, BUCKETS)
    else
      support.provision(connection, made.table, BUCKETS)
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
function support.leased(store)
  if not store.table then return store end
  if store.with_leases then return store.with_leases end
  local leased = setmetatable({}, { __index = store })
  store.with_leases = leased
  leased.table, leased.stem = TABLE .. "_leasing_buckets", TABLE .. "_leasing"
  leased.dsn = with_param(store.bare_dsn, "table=" .. leased.table)
  function leased.prepare()
    if leased.provisioned then return end
    leased.provisioned = true
    store.prepare()
    support.provision_leases(store.sql(), leased.table, BUCKETS)
  end
  --- Waiters that look at a lease wait for no row.
  function leased.waiting(target)
    if store.dialect == "mariadb" then support.sleep(0.11) end
    local n, observer = 0, support.open(leased)
    for _, holder in ipairs(assert(observer:holders(target))) do
      if holder.waiting then n = n + 1 end
    end
    observer:close()
    return n
  end
  return leased
end

local function postgresql_store(...)
  local store = server_store(...)
  store.dialect = "postgresql"
  store.unbucketed = true -- each node has a row of its own
  -- Sessions, as in mysql_store.
  local SESSIONS = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
  function store.sessions(busy)
    return support.column(store.sql():query(SESSIONS .. " AND usename = current_user" .. (busy and " AND state = 'active'" or "")))
  end
  function store.transactions(waiting)
    return support.column(store.root():query(SESSIONS .. " AND usename = 'testuser'" ..
      (waiting and " AND wait_event_type = 'Lock'" or " AND xact_start IS NOT NULL")))
  end
  function store.kill(id) (store.root() or store.sql()):query("SELECT pg_terminate_backend(%s)", id) end
  -- `more`: so many more connections; else one.
  function store.limit_connections(more)
    local root = store.root()
    root:query("ALTER ROLE testuser CONNECTION LIMIT %d",
               root:query("SELECT COUNT(*) FROM pg_stat_activity WHERE usename = 'testuser'")[1][1] + (more or 1))
    return function() root:query "ALTER ROLE testuser CONNECTION LIMIT -1" end
  end
  function store.waiting()
    -- Waiters that have their locks and wait for a lease say so.
    return tonumber(store.sql():query("SELECT (SELECT COUNT(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted) + " ..
      "(SELECT COUNT(*) FROM pg_stat_activity WHERE query ~ '^/[*]hierlock1[|][0-9]+[|][0-9]+[|][sx]w[|]' AND NOT EXISTS " ..
      "(SELECT FROM pg_locks l WHERE l.pid = pg_stat_activity.pid AND NOT l.granted))")[1][1])
  end
  function store.prepare()
    if store.prepared then return end
    store.prepared = true
    if store.root() then support.lease_tables(store.root()) end
  end
  return store
end

-- Memcached: it has only leases, of whole seconds, and lists them by root.
local function memcached_store(name, dsn, root_dsn, control)
  local store = server_store(name, dsn, root_dsn, control)
  store.leases_only, store.unbucketed, store.whole_seconds, store.lists_by_root = true, true, true, true
  store.host, store.port = dsn:match "//([^:/]+):(%d+)"
  function store.sql() error "Memcached has no SQL" end
  --- The server's answer to a command of the text protocol (all of what comes at once).
  function store.say(command)
    local socket = assert(require("socket").connect(store.host, tonumber(store.port)))
    socket:settimeout(5)
    local dumps = command:find "metadump" -- another thread answers, and takes nothing meanwhile
    assert(socket:send(command .. (dumps and "\r\n" or "\r\nmn\r\n")))
    local lines = {}
    for line in function() return (assert(socket:receive "*l")) end do
      if line == (dumps and "END" or "MN") then break end
      lines[#lines + 1] = line
    end
    socket:close()
    return table.concat(lines, "\n")
  end
  function store.waiting(target)
    local n, observer = 0, support.open(store)
    for _, holder in ipairs(assert(observer:holders(target))) do
      if holder.waiting then n = n + 1 end
    end
    observer:close()
    return n
  end
  function store.prepare() end
  return store
end

-- Redis or Valkey: it has only leases.
local function redis_store(name, dsn, root_dsn, control)
  local store = server_store(name, dsn, root_dsn, control)
  store.leases_only, store.unbucketed = true, true
  store.host, store.port = dsn:match "@([^:/]+):(%d+)"
  function store.sql() error "Redis has no SQL" end
  function store.root() end
  --- The output of redis-cli, as the administrator.
  function store.cli(...)
    local words = {}
    for i, word in ipairs { ... } do words[i] = "'" .. tostring(word):gsub("'", "'\\''") .. "'" end
    local pipe = io.popen(("unset LD_PRELOAD; REDISCLI_AUTH=rootpassword redis-cli -h %s -p %s %s 2>&1"):format(
      store.host, store.port, table.concat(words, " ")))
    local text = pipe:read "*a"
    pipe:close()
    return (text:gsub("\n$", ""))
  end
  function store.waiting(target)
    local n, observer = 0, support.open(store)
    for _, holder in ipairs(assert(observer:holders(target))) do
      if holder.waiting then n = n + 1 end
    end
    observer:close()
    return n
  end
  function store.prepare() end
  return store
end

local function embedded_store()
  local directory = assert(os.getenv("HIERLOCK_SPEC_DIRECTORY"), "run the specs by `make spec`")
  local store = {
    name = "embedded",
    directory = directory,
    dsn = "file:" .. directory,
    options = { buckets = BUCKETS, timeout = TIMEOUT },
    prepare = function() end,
  }
  function store.waiting(target)
    store.observer = store.observer or support.open(store)
    local n = 0
    for _, holder in ipairs(assert(store.observer:holders(target))) do
      if holder.waiting then n = n + 1 end
    end
    return n
  end
  return store
end

-- In a database file of its own; where this Lua has the module.
local function sqlite_store()
  if not pcall(require, "hierlock.store.sqlite") then
    return { name = "sqlite", missing = "the SQLite store is not built" }
  end
  local store = {
    name = "sqlite",
    leases_only = true,
    unbucketed = true,
    directory = assert(os.getenv("HIERLOCK_SPEC_DIRECTORY")) .. "/sqlite",
    options = { timeout = TIMEOUT },
  }
  store.dsn = "sqlite:" .. store.directory .. "/leases.db?synchronous=normal"
  function store.prepare() uv.fs_mkdir(store.directory, 448) end
  --- Requests that wait for the target.
  function store.waiting(target)
    store.observer = store.observer or support.open(store)
    local n = 0
    for _, holder in ipairs(assert(store.observer:holders(target))) do
      if holder.waiting then n = n + 1 end
    end
    return n
  end
  return store
end

-- A quorum of three embedded stores.
local function quorum_store()
  local embedded = support.stores[1]
  local store = {
    name = "quorum",
    leases_only = true,
    directories = {},
    options = { buckets = BUCKETS, timeout = TIMEOUT },
    prepare = function() end,
    waiting = function(target)
      local n, observer = 0, support.open(support.quorum)
      for _, holder in ipairs(assert(observer:holders(target))) do
        if holder.waiting then n = n + 1 end
      end
      observer:close()
      return n
    end,
  }
  for i = 1, 3 do store.directories[i] = embedded.directory .. "/quorum" .. i end
  store.dsn = "quorum:majority;file:" .. table.concat(store.directories, ";file:")
  support.quorum = store
  return store
end

local function missing_store(name)
  return { name = name, missing = name .. " cannot be had here: " ..
           "no server was started (see spec/support/servers.sh) and MYSQL_DSN is not set" }
end

-- A server of those that spec/support/servers.sh has started.
local function started_store(name, make)
  local prefix = "HIERLOCK_" .. name:upper()
  local dsn = os.getenv(prefix .. "_DSN")
  return dsn and make(name, dsn, os.getenv(prefix .. "_ROOT_DSN"), os.getenv(prefix .. "_CONTROL")) or missing_store(name)
end

--- Every store, embedded, mysql, mariadb, postgresql and redis; those that cannot be had have a
-- reason in `missing`.
support.stores = { embedded_store() }
if os.getenv("MYSQL_DSN") then
  -- Makes a URL of a DSN in any form: some specs change its parts.
  local function encoded(text)
    return (text:gsub("[^%w_.~-]", function(c) return ("%%%02X"):format(c:byte()) end))
  end
  local database, user, password, host, port = dsn_parts(os.getenv("MYSQL_DSN"))
  -- Specs for one of the two servers go by the name.
  local connection = support.sql_connection(os.getenv("MYSQL_DSN"))
  local name = connection:query("SELECT VERSION()")[1][1]:find("MariaDB") and "mariadb" or "mysql"
  connection:close()
  support.stores[2] = mysql_store(name, ("%s://%s:%s@%s:%d/%s"):format(
    name, encoded(user), encoded(password), host, port, encoded(database)))
else
  for _, name in ipairs { "mysql", "mariadb" } do
    support.stores[#support.stores + 1] = started_store(name, mysql_store)
  end
end
if not os.getenv("MYSQL_DSN") or os.getenv("HIERLOCK_POSTGRESQL_DSN") then
  support.stores[#support.stores + 1] = started_store("postgresql", postgresql_store)
end

--- Stores that only have leases.
support.leases_only = { sqlite_store(), quorum_store() }
if not os.getenv("MYSQL_DSN") or os.getenv("HIERLOCK_REDIS_DSN") then
  support.leases_only[#support.leases_only + 1] = started_store("redis", redis_store)
end
if not os.getenv("MYSQL_DSN") or os.getenv("HIERLOCK_MEMCACHED_DSN") then
  support.leases_only[#support.leases_only + 1] = started_store("memcached", memcached_store)
end

-- busted gives describe, it ... to spec files only, as their environment.
local function environment_of(fn)
  if getfenv then return getfenv(fn) end -- luacheck: ignore
  for i = 1, 255 do
    local name, value = debug.getupvalue(fn, i)
    if name == "_ENV" then return value end
  end
end

local function unless_missing(busted, missing, name, fn)
  if not missing then return fn() end
  local required = " " .. (os.getenv("HIERLOCK_REQUIRE") or "") .. " "
  if required:find(" " .. name .. " ", 1, true) then
    busted.it("is there", function() error(missing) end)
  else
    busted.pending(missing)
  end
end

--- Calls fn, which declares specs that need something of this machine. missing: why it cannot be had, or nil; then they
-- are pending, or fail where HIERLOCK_REQUIRE has that name.
function support.unless_missing(missing, name, fn) unless_missing(environment_of(fn), missing, name, fn) end

local function each(stores, fn)
  local busted = environment_of(fn)
  for _, store in ipairs(stores) do
    busted.describe("on " .. store.name .. ":", function()
      unless_missing(busted, store.missing, store.name, function()
        busted.setup(store.prepare)
        fn(store)
      end)
    end)
  end
end

--- Calls fn(store) within a `describe` for every store; the embedded one last, as it keeps
-- many descriptors open, and LuaSocket's select takes none above 1,023.
function support.each_store(fn)
  local stores = {}
  for i = 2, #support.stores do stores[i - 1] = support.stores[i] end
  stores[#stores + 1] = support.stores[1]
  each(stores, fn)
end

--- Like each_store, for every store that has leases, or might have, including stores that have nothing else.
function support.each_leasing_store(fn)
  each(support.leases_only, fn)
  support.each_store(fn)
end

-- Runs fn on a store that only has leases.
local function on_leases_only(name, fn)
  local stores = {}
  for _, store in ipairs(support.leases_only) do
    if store.name == name then stores[#stores + 1] = store end
  end
  each(stores, fn)
end

--- For SQLite only.
function support.on_sqlite(fn) on_leases_only("sqlite", fn) end

--- For Memcached only.
function support.on_memcached(fn) on_leases_only("memcached", fn) end

--- For Redis only.
function support.on_redis(fn) on_leases_only("redis", fn) end

local function servers_of(wanted)
  local servers = {}
  for _, store in ipairs(support.stores) do
    if (store.server or store.missing) and not store.leases_only and wanted(store.name) then servers[#servers + 1] = store end
  end
  return servers
end

--- Runs fn on each server of MySQL's kind only.
function support.each_server(fn) each(servers_of(function(name) return name ~= "postgresql" end), fn) end

--- For PostgreSQL only.
function support.on_postgresql(fn) each(servers_of(function(name) return name == "postgresql" end), fn) end

--- For all servers.
function support.each_connection(fn) each(servers_of(function() return true end), fn) end

--- Waits until n requests (1 unless said) wait for rows of the target.
function support.wait_for_waiters(store, target, n)
  return support.wait_until(function() return store.waiting(target) >= (n or 1) end, "a waiter")
end

--- Opens a manager on the store; its options, with others added.
function support.open(store, options, dsn_params)
  local all = {}
  for k, v in pairs(store.options) do all[k] = v end
  for k, v in pairs(options or {}) do all[k] = v end
  local dsn = dsn_params and with_param(store.dsn, dsn_params) or store.dsn
  return assert(hierlock.open(dsn, all))
end

-- ----------------------------------------------------------------- peers

--- A value as Lua source, on one line.
local function encode(value)
  if type(value) == "table" then
    local fields = {}
    for k, v in pairs(value) do
      fields[#fields + 1] = "[" .. encode(k) .. "]=" .. encode(v)
    end
    return "{" .. table.concat(fields, ",") .. "}"
  elseif type(value) == "string" then
    return (("%q"):format(value):gsub("\\\n", "\\n"):gsub("\r", "\\r"):gsub("%z", "\\0"))
  elseif value == math.huge then
    return "math.huge"
  end
  return tostring(value)
end
support.encode = encode

local function encode_all(...)
  local values = { "n=" .. select("#", ...) }
  for i = 1, select("#", ...) do
    values[#values + 1] = "[" .. i .. "]=" .. encode((select(i, ...)))
  end
  return "{" .. table.concat(values, ",") .. "}"
end

local unpack = table.unpack or unpack

local function decode_all(line)
  local values = assert((loadstring or load)("return " .. line))()
  return unpack(values, 1, values.n)
end

-- The environment of a peer's chunks: `manager`, `hierlock`, `support` and a table `handles` to keep things in.
local function environment_for(dsn, options)
  return setmetatable({
    hierlock = hierlock,
    support = support,
    manager = dsn and assert(hierlock.open(dsn, options)),
    handles = {},
  }, { __index = _G })
end

local function load_chunk(text, environment)
  if not setfenv then return load(text, "=peer", "t", environment) end -- luacheck: ignore
  local chunk, err = loadstring(text, "=peer") -- luacheck: ignore
  if chunk then setfenv(chunk, environment) end -- luacheck: ignore
  return chunk, err
end

--- The work of a peer, in its own process or thread: reads requests, each a chunk and its arguments, and writes the
-- chunk's results.
function support.serve(read_line, write_line, dsn, options)
  local environment = environment_for(dsn, options)
  for line in read_line do
    local request = (loadstring or load)("return " .. line)()
    local chunk, err = load_chunk(request[1], environment)
    if chunk then
      write_line(encode_all(pcall(chunk, unpack(request, 2, request.n))))
    else
      write_line(encode_all(false, err))
    end
  end
  if environment.manager then environment.manager:close() end
end

local peer_methods = {}
peer_methods.__index = peer_methods

-- Calls whose result has not come yet.
peer_methods.unanswered = 0

--- No more calls come. Only a process can be told before it is closed.
function peer_methods.finish() end

--- Sends a chunk to be run with the arguments; does not wait.
function peer_methods:start(chunk, ...)
  self.unanswered = self.unanswered + 1
  self:write(encode_all(chunk, ...))
  return self
end

local function checked(ok, ...)
  if not ok then error("in the peer: " .. tostring((...)), 0) end
  return ...
end

--- Waits for the results of the last chunk; raises its error.
function peer_methods:result()
  return checked(decode_all(self:read(support.DEADLINE) or error("the peer does not answer", 2)))
end

--- Whether the last chunk has not returned, also after STAYS_BLOCKED.
function peer_methods:stays_blocked()
  self.line = self.line or self:read(support.STAYS_BLOCKED)
  return self.line == nil
end

function peer_methods:call(chunk, ...) return self:start(chunk, ...):result() end

--- Starts to acquire under the name; the result is true, or nil and the code.
function peer_methods:acquire(name, method, ...)
  return self:start([[
    local name, method = ...
    local handle, err = manager[method](manager, select(3, ...))
    handles[name] = handle
    if not handle then return nil, err.code, err.message end
    return true, handle.token, handle.waited
  ]], name, method, ...)
end

function peer_methods:release(name)
  return self:call([[ local h = handles[...]; handles[...] = nil; return h:release { confirm = true } ]], name)
end

local live = {}

local kept = {}
--- A handle that the spec does not look at again: until close_peers the collector
-- leaves it alone, which would release it.
function support.keep(handle)
  kept[#kept + 1] = handle
  return handle
end

-- Takes one line out of self.buffer.
local function take_line(self)
  local line, rest = self.buffer:match("^([^\n]*)\n(.*)$")
  if line then self.buffer = rest end
  return line
end

--- Starts a peer in another process. command: a list to run instead of our own peer; it is not waited for.
function support.process(store, options, dsn, command)
  local self = setmetatable({ buffer = "", exited = false, unanswered = (store or dsn) and 1 or 0 }, peer_methods)
  local all = {}
  for k, v in pairs(store and store.options or {}) do all[k] = v end
  for k, v in pairs(options or {}) do all[k] = v end
  local input, output = uv.new_pipe(false), uv.new_pipe(false)
  local interpreter = os.getenv("HIERLOCK_LUA") or arg[-1] or "lua"
  local run = command or { interpreter, "spec/support/peer.lua", dsn or store and store.dsn or "", encode(all) }
  self.handle, self.pid = assert(uv.spawn(run[1], {
    args = { unpack(run, 2) },
    stdio = { input, output, 2 },
  }, function() self.exited = true end))
  output:read_start(function(_, data)
    if not data then return end
    self.buffer = self.buffer .. data
    self.unanswered = self.unanswered - select(2, data:gsub("\n", ""))
  end)

  function self:write(line) input:write(line .. "\n") end
  function self:read(seconds)
    if self.line then
      local line = self.line
      self.line = nil
      return line
    end
    local deadline = support.now() + seconds
    local line = take_line(self)
    while not line and support.now() < deadline and not (self.exited and self.buffer == "") do
      uv.run("nowait")
      line = take_line(self)
      if not line then uv.sleep(1) end
    end
    return line
  end
  --- Sends a signal ("sigkill", "sigstop" ...); waits for the end after sigkill.
  function self:signal(signal)
    uv.kill(self.pid, signal)
    if signal == "sigkill" then self:join() end
  end
  function self:join()
    support.wait_until(function() uv.run("nowait") return self.exited end, "the peer's end")
  end
  function self:finish()
    if not input:is_closing() then input:close() end
  end
  --- Ends the peer in the ordinary way; a peer that still waits for a lock is killed.
  function self:close()
    live[self] = nil
    self:finish()
    local start = support.now()
    while not self.exited and support.now() - start < (self.unanswered > 0 and 0.2 or 2) do
      uv.run("nowait")
      uv.sleep(1)
    end
    if not self.exited then self:signal("sigkill") end
    -- luv crashes at the end of a state that has open handles.
    if not output:is_closing() then output:close() end
    if not self.handle:is_closing() then self.handle:close() end
    uv.run("nowait")
  end
  live[self] = true
  if store or dsn then assert(self:result() == true) end
  return self
end

--- A program that knows nothing of hierlock: a process with a connection of LuaSQL's. send(query) does not wait;
-- result() is then the rows (or the number of rows), or nil, the server's error number and its message. query(...)
-- does both. `id` is the connection's.
function support.foreign(store)
  local self = support.process(nil)
  function self:send(query, ...)
    if select("#", ...) > 0 then query = query:format(...) end
    return self:start("return support.try_query(handles.sql, ...)", query)
  end
  function self:query(...) return self:send(...):result() end
  self.id = self:call([[
    handles.sql = support.sql_connection(...)
    return tonumber(handles.sql:query(handles.sql.postgresql and "SELECT pg_backend_pid()" or "SELECT CONNECTION_ID()")[1][1])
  ]], store.bare_dsn)
  return self
end

--- Runs a query as a foreign program does: rows, or nil, number, message.
function support.try_query(connection, query)
  local cursor, message = connection:try(query)
  if not cursor then
    local shown = not connection.postgresql and connection:try("SHOW ERRORS")
    local row = shown and shown:fetch({}, "n")
    if shown then shown:close() end
    return nil, row and tonumber(row[2]), message
  end
  if type(cursor) == "number" then return cursor end
  local rows = {}
  for row in function() return cursor:fetch({}, "n") end do rows[#rows + 1] = row end
  cursor:close()
  return rows
end

--- A peer in another thread of this process, with a Lua state of its own.
function support.thread(store, options)
  local self = setmetatable({}, peer_methods)
  local all = {}
  for k, v in pairs(store.options) do all[k] = v end
  for k, v in pairs(options or {}) do all[k] = v end
  local thread, connection = require("cqueues.thread").start(function(socket, path, cpath, dsn, encoded)
    package.path, package.cpath = path, cpath
    local shared = require "spec.support"
    local opened, err = pcall(shared.serve, function() return socket:read("*l") end,
      function(line) socket:write(line, "\n") socket:flush() end,
      dsn, (loadstring or load)("return " .. encoded)())
    if not opened then socket:write("{n=2,false,", ("%q"):format(tostring(err)), "}\n") end
  end, package.path, package.cpath, store.dsn, encode(all))
  connection:setmode("b", "bl")
  function self:write(line)
    connection:write(line, "\n")
    connection:flush()
  end
  function self:read(seconds)
    if self.line then
      local line = self.line
      self.line = nil
      return line
    end
    connection:settimeout(seconds)
    local line = connection:read("*l")
    if not line then connection:clearerr() end
    return line
  end
  function self:close()
    live[self] = nil
    connection:shutdown("w")
    thread:join()
    connection:close()
  end
  live[self] = true
  assert(self:call("return true"))
  return self
end

--- A peer in this thread, with a manager of its own: each of its chunks runs in a
-- coroutine of the loop (a name of spec/support/loops.lua), and yields where it waits.
function support.coroutine(store, options, name)
  local self = setmetatable({}, peer_methods)
  local loop = require("spec.support.loops")[name]()
  local all = { loop = loop.option }
  for k, v in pairs(store.options) do all[k] = v end
  for k, v in pairs(options or {}) do all[k] = v end
  local environment = environment_for(store.dsn, all)
  self.step = loop.step
  function self:start(text, ...)
    local chunk = assert(load_chunk(text, environment))
    -- Copied, as they are for the other peers.
    loop.spawn(function(...) self.line = encode_all(true, chunk(...)) end, decode_all(encode_all(...)))
    return self
  end
  function self:read(seconds)
    local deadline = support.now() + seconds
    while not self.line and support.now() < deadline do
      for peer in pairs(live) do -- it may be waiting for another one of them
        if peer.step then peer.step(0.001) end
      end
    end
    local line = self.line
    self.line = nil
    return line
  end
  function self:close()
    live[self] = nil
    environment.manager:close()
    loop.close()
  end
  live[self] = true
  return self
end

--- The kinds of peers: their names, and how to make each on a store.
support.peer_kinds = { { "process", support.process }, { "thread", support.thread } }
for _, name in ipairs(require("spec.support.loops").names) do
  support.peer_kinds[#support.peer_kinds + 1] =
    { "coroutine of " .. name, function(store, options) return support.coroutine(store, options, name) end }
end

--- Runs a chunk in a Lua process of its own; returns its output, on both streams, and its exit status as a shell says
-- it (128 + n: ended by signal n). before: shell commands and words in front of the interpreter's name.
function support.run(chunk, before)
  local pipe = assert(io.popen(("{ %s %s -e '%s' ; } 2>&1; echo \"=$?\""):format(
    before or "", os.getenv("HIERLOCK_LUA") or "lua", (chunk:gsub("'", [['\'']])))))
  local text = pipe:read("*a")
  pipe:close()
  local output, status = text:match("^(.*)=(%d+)\n$")
  return output, tonumber(status)
end

local tells
--- Why this client library cannot do what wants to know when it waits; nil: it can.
function support.does_not_tell_waits()
  tells = tells or support.run [[
    require "hierlock.store.mysql"
    io.write(io.open("/proc/self/maps"):read("*a"):match("libmysqlclient") or "")
  ]]
  return tells ~= "" and "libmysqlclient does not tell when it waits" or nil
end

--- `it` of what needs a client library that tells when it waits; elsewhere it is pending, and says why.
function support.it_where_waits_are_told(name, fn)
  local busted, reason = environment_of(fn), support.does_not_tell_waits()
  if reason then busted.pending(name .. ": " .. reason) else busted.it(name, fn) end
end

--- Ends the peers, and forgets the handles, that a spec has left; for after_each.
function support.close_peers()
  kept = {}
  -- All at once: a peer that waits for another's lock ends as soon as that one has.
  for peer in pairs(live) do peer:finish() end
  for peer in pairs(live) do peer:close() end
  -- The embedded store's descriptors go with its last manager.
  for _, store in ipairs { support.stores[1], support.leases_only[1] } do
    if store.observer then store.observer:close() end
    store.observer = nil
  end
end

return support
