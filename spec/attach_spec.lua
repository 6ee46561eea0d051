--- Locks inside the program's own transaction. They exclude the locks of other processes, and are excluded by them;
-- they live and die with the transaction's writes. Unlockable requests are refused, and the session is left as it
-- was.

local attach = require "hierlock.attach"
local hierlock = require "hierlock"
local support = require "spec.support"

local TABLE = "hierlock_spec_attach"
local DATA = "hierlock_spec_attach_data"
local BUCKETS = 1000
local R1, R2 = { "u1", "a1", "r1" }, { "u1", "a1", "r2" }

-- A table of bucket rows, and one of data: one row for the programs to write.
local function make_tables(store)
  local sql = store.sql()
  sql:query("DROP TABLE IF EXISTS %s, %s", TABLE, DATA)
  support.provision(sql, TABLE, BUCKETS)
  sql:query("CREATE TABLE %s (id INT PRIMARY KEY, value INT) ENGINE=InnoDB", DATA)
  sql:query("INSERT INTO %s VALUES (1, 0)", DATA)
end

local function drop_tables(store)
  store.sql():query("DROP TABLE IF EXISTS %s, %s", TABLE, DATA)
  store.sql():query("DELETE FROM hier_lock_meta WHERE table_name='%s'", TABLE)
end

support.each_server(function(store)
  local connections, managers, restore, held
  local connection, locks -- of this program

  setup(function() make_tables(store) end)
  teardown(function() drop_tables(store) end)

  -- Connects with the parts of the store's DSN that LuaSQL wants.
  local function connect()
    local user, password, host, port, database = store.bare_dsn:match("^%a+://(.-):(.-)@(.-):(%d+)/([^?]*)")
    local new = assert(support.luasql():connect(database, user, password, host, tonumber(port)))
    connections[#connections + 1] = new
    return new
  end

  local function options(more)
    local all = { table = TABLE, buckets = BUCKETS, timeout = 15 }
    for k, v in pairs(more or {}) do all[k] = v end
    return all
  end

  before_each(function()
    connections, managers, restore = {}, {}, {}
    connection = connect()
    locks = attach.luasql(connection, options())
  end)
  after_each(function()
    support.close_peers()
    for _, manager in ipairs(managers) do manager:close() end
    held = nil
    for _, each in ipairs(connections) do each:close() end
    for _, fn in ipairs(restore) do fn() end
  end)

  local function run(query, ...)
    local cursor = assert(connection:execute(query:format(...)))
    if type(cursor) == "number" then return cursor end
    local rows = {}
    for row in function() return cursor:fetch({}, "n") end do rows[#rows + 1] = row end
    cursor:close()
    return rows
  end

  local function value(query, ...) return run(query, ...)[1][1] end

  local function begin() run "START TRANSACTION" end

  local function dsn() return store.bare_dsn .. "?table=" .. TABLE end

  local function open()
    local manager = assert(hierlock.open(dsn(), { buckets = BUCKETS, timeout = 15 }))
    managers[#managers + 1] = manager
    return manager
  end

  -- By a manager of this process, until it is released or the spec ends.
  local function hold(target)
    held = assert(open():acquire(target))
    return held
  end

  -- Another program, in another process, that uses hierlock.
  local function other() return support.process(nil, { buckets = BUCKETS, timeout = 15 }, dsn()) end

  -- Another program that attaches: begins a transaction; acquire does not wait.
  local function other_attached()
    local peer = support.process(nil)
    peer.id = peer:call([[
      local dsn, options = ...
      handles.sql = support.sql_connection(dsn)
      local raw = { execute = function(_, query) return handles.sql:try(query) end }
      handles.locks = require("hierlock.attach").luasql(raw, options)
      handles.sql:query("START TRANSACTION")
      return tonumber(handles.sql:query("SELECT CONNECTION_ID()")[1][1])
    ]], store.bare_dsn, options())
    function peer.acquire(_, target, acquire_options)
      return peer:start([[
        local ok, err = handles.locks:acquire(...)
        if not ok then return nil, err.code, err.errno end
        return ok
      ]], target, acquire_options)
    end
    function peer.query(_, query) return peer:call("return handles.sql:query(...)", query) end
    return peer
  end

  local function assert_fails(code, ok, err)
    assert.is_nil(ok)
    assert.is_true(hierlock.is_error(err))
    assert.equal(code, err.code, tostring(err))
    return err
  end

  local function assert_free(target)
    local manager = open()
    assert(manager:acquire(target, { timeout = 5 })):release { confirm = true }
  end

  local function assert_locked(target)
    assert_fails("timeout", open():acquire(target, { timeout = 0 }))
  end

  describe("an attached lock", function()
    for _, finish in ipairs { "COMMIT", "ROLLBACK" } do
      it("keeps another program out until " .. finish, function()
        local peer = other()
        begin()
        assert.is_true(locks:acquire { "u1", "a1" })
        peer:acquire("lock", "acquire", R1)
        support.wait_for_waiters(store)
        assert.is_true(peer:stays_blocked())
        run(finish)
        assert.is_true(peer:result())
      end)

      it("waits for another program, and is there for the next one until " .. finish, function()
        local manager, peer = open(), other_attached()
        local handle = assert(manager:acquire(R1))
        peer:acquire { "u1", "a1" }
        support.wait_for_waiters(store)
        handle:release()
        assert.is_true(peer:result())
        assert_locked(R1)
        peer:query(finish)
        assert_free(R1)
      end)
    end

    it("is under autocommit=0 as good as after START TRANSACTION", function()
      run "SET autocommit=0"
      assert.is_true(locks:acquire(R1))
      assert_locked(R1)
      run "COMMIT"
      assert_free(R1)
    end)

    it("admits those who are in nobody's way", function()
      begin()
      assert.is_true(locks:acquire(R1))
      assert_free(R2)
      assert_free { "u2" }
    end)

    it("is shared where it is asked for so", function()
      begin()
      assert.is_true(locks:acquire(R1, { mode = "shared" }))
      local handle = assert(open():acquire(R1, { mode = "shared", timeout = 5 }))
      assert_locked(R1)
      handle:release()
    end)

    it("is granted again to the transaction that holds it", function()
      begin()
      assert.is_true(locks:acquire { "u1", "a1" })
      for _, target in ipairs { { "u1", "a1" }, R1, { "u1" } } do
        assert.is_true(locks:acquire(target, { timeout = 0 }))
      end
      assert_locked { "u1", "a2" }
    end)

    it("is taken under each name, on several targets and in several modes", function()
      begin()
      assert.is_true(locks:acquire_all { { "u1", "a1" }, { "u2", "a9", "r1", mode = "shared" } })
      assert_locked(R1)
      assert_locked { "u2", "a9", "r1" }
      assert(open():acquire({ "u2", "a9", "r1" }, { mode = "shared", timeout = 5 })):release { confirm = true }
      run "COMMIT"
      local cases = {
        { "acquire_user", { "u1" }, { "u1", "a7" } },
        { "acquire_account", { "u1", "a1" }, R1 },
        { "acquire_resource", { "u1", "a1", "r1" }, R1 },
        { "acquire_resources", { "u1", "a1", { "r2", "r1", "r2" } }, R2 },
      }
      for _, case in ipairs(cases) do
        begin()
        local arguments = case[2]
        arguments[#arguments + 1] = { timeout = 5 }
        assert.is_true(locks[case[1]](locks, (table.unpack or unpack)(arguments))) -- luacheck: ignore
        assert_locked(case[3])
        assert_free { "u3" }
        run "ROLLBACK"
        assert_free(case[3])
      end
    end)

    it("dies with what the transaction wrote", function()
      local peer = other_attached()
      peer:acquire(R1)
      assert.is_true(peer:result())
      peer:query("UPDATE " .. DATA .. " SET value=value+1 WHERE id=1")
      local before = value("SELECT value FROM %s", DATA)
      assert_locked(R1)
      peer:signal("sigkill")
      assert_free(R1)
      -- The row that it wrote is free, too.
      run("UPDATE %s SET value=value WHERE id=1", DATA)
      assert.equal(before, value("SELECT value FROM %s", DATA))
    end)

    it("loses no update of two programs", function()
      run("UPDATE %s SET value=0", DATA)
      local peer = other_attached()
      peer:start([[
        for i = 1, 100 do
          assert(handles.locks:acquire { "u1", "a1" })
          local value = handles.sql:query("SELECT value FROM %s", ...)[1][1]
          handles.sql:query("UPDATE %s SET value=%d", ..., value + 1)
          handles.sql:query("COMMIT")
          handles.sql:query("START TRANSACTION")
        end
      ]], DATA)
      for _ = 1, 100 do
        begin()
        assert(locks:acquire { "u1", "a1" })
        run("UPDATE %s SET value=%d", DATA, value("SELECT value FROM %s", DATA) + 1)
        run "COMMIT"
      end
      peer:result()
      assert.equal(200, tonumber(value("SELECT value FROM %s", DATA)))
    end)

    it("is shown as that of a program which says nothing of itself, if the server tells", function()
      local peer = other_attached()
      peer:acquire(R1)
      assert.is_true(peer:result())
      local holders = assert(open():holders(R1))
      assert.equal(store.dialect == "mysql" and 1 or 0, #holders)
      if holders[1] then assert.equal(peer.pid, holders[1].pid) end
    end)
  end)

  describe("a wait", function()
    it("ends at its timeout, to the millisecond and never early", function()
      hold(R1)
      begin()
      for _, seconds in ipairs { 0.05, 0.3 } do
        support.ends_in_time(store, seconds, 0.01, function()
          local before = support.now()
          local err = assert_fails("timeout", locks:acquire(R1, { timeout = seconds }))
          local waited = support.now() - before
          assert.is_true(err.retryable)
          assert.equal(store.dialect == "mysql" and 3024 or 1969, err.errno)
          assert.equal(store.dialect == "mysql" and "HY000" or "70100", err.sqlstate)
          assert.same({ user = "u1", account = "a1", resource = "r1" }, err.target)
          assert.matches("^u1/a1/r1 was not granted within 0.%d+ s; roll back$", err.message)
          assert.is_nil(value "SELECT @hierlock_errno")
          return waited
        end)
      end
    end)

    it("tries once with a timeout of 0", function()
      hold(R1)
      begin()
      local before = support.now()
      local err = assert_fails("timeout", locks:acquire(R1, { timeout = 0 }))
      assert(support.now() - before < 0.3)
      assert.equal(store.dialect == "mysql" and 3572 or 1205, err.errno)
      run "ROLLBACK"
      begin()
      assert.is_true(locks:acquire(R2, { timeout = 0 }))
    end)

    it("leaves nothing once the program has rolled back", function()
      local handle = hold(R1)
      begin()
      assert_fails("timeout", locks:acquire(R1, { timeout = 0.05 }))
      assert_locked { "u1" } -- its ancestors
      run "ROLLBACK"
      handle:release { confirm = true }
      assert_free { "u1" }
    end)

    it("may be longer than the session's innodb_lock_wait_timeout", function()
      local handle = hold(R1)
      begin()
      run "SET innodb_lock_wait_timeout=1"
      local before = support.now()
      assert_fails("timeout", locks:acquire(R1, { timeout = 2.6 }))
      local waited = support.now() - before
      assert(waited >= 2.6 and waited < 4, waited)
      run "ROLLBACK"
      begin()
      handle:release()
      assert.is_true(locks:acquire(R1, { timeout = math.huge }))
      assert.equal("1", value "SELECT @@innodb_lock_wait_timeout")
    end)

    if store.name == "mysql" then
      it("does not go on where innodb_rollback_on_timeout has ended the transaction", function()
        if not store.control then pending("the server is not ours to start") end
        restore[1] = function() store.command("restart") end
        for _, each in ipairs(connections) do each:close() end
        connections = {}
        store.command("restart", "--innodb-rollback-on-timeout=ON")
        hold(R1)
        local peer = other_attached()
        peer:query("SET innodb_lock_wait_timeout=1")
        peer:acquire(R1)
        local ok, code = peer:result()
        assert.is_nil(ok)
        assert.equal("lost", code)
      end)
    end

    it("is ended by the server when two wait for each other", function()
      local peer = other_attached()
      begin()
      assert.is_true(locks:acquire(R1))
      peer:acquire(R2)
      assert.is_true(peer:result())
      peer:acquire(R1)
      support.wait_for_waiters(store)
      local ok, err = locks:acquire(R2)
      if ok then -- the other one is the victim
        local _, code, errno = peer:result()
        assert.same({ "deadlock", 1213 }, { code, errno })
      else
        assert_fails("deadlock", ok, err)
        assert.same({ 1213, "40001", true }, { err.errno, err.sqlstate, err.retryable })
        assert.matches("the server has rolled the transaction back$", err.message)
        assert.is_true(peer:result())
      end
    end)

    it("is ended with its connection", function()
      hold(R1)
      local peer = other_attached()
      peer:acquire(R1)
      support.wait_for_waiters(store)
      store.sql():query("KILL %d", peer.id)
      local _, code = peer:result()
      assert.equal("connection", code)
    end)

    it("is ended by KILL QUERY", function()
      hold(R1)
      local peer = other_attached()
      peer:acquire(R1)
      support.wait_for_waiters(store)
      store.sql():query("KILL QUERY %d", peer.id)
      local _, code, errno = peer:result()
      assert.same({ "cancelled", 1317 }, { code, errno })
    end)
  end)

  describe("the transaction's view", function()
    it("is not fixed by acquiring: what the holder before wrote is seen", function()
      local handle = hold(R1)
      local peer = other_attached() -- in REPEATABLE READ
      local isolation = store.dialect == "mysql" and "transaction_isolation" or "tx_isolation"
      assert.equal("REPEATABLE-READ", peer:query("SELECT @@" .. isolation)[1][1])
      peer:acquire { "u9" } -- its first request, which looks at the server
      assert.is_true(peer:result())
      peer:acquire(R1)
      support.wait_for_waiters(store)
      run("UPDATE %s SET value=4711", DATA)
      handle:release()
      assert.is_true(peer:result())
      assert.equal("4711", peer:query("SELECT value FROM " .. DATA)[1][1])
    end)

    it("is fixed by a SELECT before: then the lock shows old data", function()
      run("UPDATE %s SET value=1", DATA)
      local peer = other_attached()
      peer:query("SELECT value FROM " .. DATA)
      run("UPDATE %s SET value=2", DATA)
      peer:acquire(R1)
      assert.is_true(peer:result())
      assert.equal("1", peer:query("SELECT value FROM " .. DATA)[1][1])
      -- MariaDB 11.6 and later refuse that (1020), unless innodb_snapshot_isolation is off.
      local read, rows = pcall(peer.query, peer, "SELECT value FROM " .. DATA .. " FOR UPDATE")
      if read then
        assert.equal("2", rows[1][1])
      else
        assert.matches("Record has changed", rows)
      end
    end)
  end)

  it("leaves the session's settings alone, whatever comes out", function()
    hold(R1)
    local function settings()
      local all = {}
      for _, row in ipairs(run "SHOW SESSION VARIABLES") do all[row[1]] = row[2] end
      -- Variables that change by themselves.
      for _, name in ipairs { "timestamp", "rand_seed1", "rand_seed2", "warning_count", "error_count", "in_transaction",
                              "last_gtid", "gtid_executed", "statement_id", "pseudo_thread_id" } do
        all[name] = nil
      end
      return all
    end
    run "SET SESSION lock_wait_timeout=77, innodb_lock_wait_timeout=3"
    local before = settings()
    begin()
    assert.is_true(locks:acquire { "u2" })
    run "COMMIT"
    assert.same(before, settings())
    for _, seconds in ipairs { 0, 0.05 } do
      begin()
      assert_fails("timeout", locks:acquire(R1, { timeout = seconds }))
      run "ROLLBACK"
      assert.same(before, settings())
    end
  end)

  it("looks at the table again after ten seconds", function()
    begin()
    assert.is_true(locks:acquire(R1))
    run "COMMIT"
    local again = attach.luasql(connection, options())
    store.sql():query("ALTER TABLE %s ENGINE=MyISAM", TABLE)
    restore[1] = function() store.sql():query("ALTER TABLE %s ENGINE=InnoDB", TABLE) end
    support.sleep(10.1)
    for _, object in ipairs { locks, again } do
      begin()
      assert.matches("MyISAM", assert_fails("unsafe_server", object:acquire(R1)).message)
      run "ROLLBACK"
    end
  end)

  it("looks at the server once, however often a program attaches", function()
    local asked
    local counting = { execute = function(_, query)
      asked = asked + 1
      return connection:execute(query)
    end }
    for _ = 1, 2 do
      asked = 0
      begin()
      local again = attach.luasql(counting, options())
      assert.is_true(again:acquire(R1))
      run "COMMIT"
    end
    assert.equal(6, asked) -- is there a transaction, which server is it, and what locks
    begin()
    local same = attach.luasql(counting, options())
    assert.is_true(same:acquire(R1))
    asked = 0
    assert.is_true(same:acquire(R2))
    assert.equal(3, asked)
  end)

  describe("with the privileges of docs/operations.md, and no more", function()
    it("locks", function()
      local root = store.root() or pending("no administrator here")
      local database = store.bare_dsn:match("/([^/?]*)$")
      restore[1] = function() root:query("DROP USER hierlock_least@'%'") end
      root:query("CREATE USER hierlock_least@'%' IDENTIFIED BY 'secret'")
      root:query("GRANT SELECT ON %s.hier_lock_meta TO hierlock_least@'%%'", database)
      root:query("GRANT %s ON %s.%s TO hierlock_least@'%%'", store.dialect == "mysql" and "SELECT, UPDATE" or "SELECT",
                 database, TABLE)
      local peer = support.process(nil)
      -- A Lua state of its own, which has verified nothing yet.
      assert.is_true(peer:call([[
        local socket_or_host, port, database, options = ...
        handles.environment = require("luasql.mysql").mysql()
        handles.connection = assert(handles.environment:connect(database, "hierlock_least", "secret", socket_or_host, port))
        handles.connection:execute("START TRANSACTION")
        return assert(require("hierlock.attach").luasql(handles.connection, options):acquire { "u1", "a1", "r1" })
      ]], "127.0.0.1", tonumber(store.bare_dsn:match(":(%d+)/")), database, options()))
      assert_locked(R1)
    end)
  end)

  describe("without a transaction", function()
    local function assert_raises(...)
      local ok, message = pcall(...)
      assert.is_false(ok)
      assert.matches("^spec/attach_spec.lua:%d+: hierlock: no transaction is open", message)
    end

    it("the first request raises, at once", function()
      hold(R1)
      assert_raises(function() return (locks:acquire(R1)) end)
    end)

    it("any later one raises, too", function()
      begin()
      assert.is_true(locks:acquire(R1))
      run "COMMIT"
      assert_raises(function() return (locks:acquire(R1)) end)
      assert_raises(function() return (locks:acquire(R1, { timeout = 0, mode = "shared" })) end)
      assert_free(R1)
      begin()
      assert.is_true(locks:acquire(R1))
    end)
  end)

  describe("refuses", function()
    it("a missing row", function()
      local row = hierlock.plan({ R1 }, { buckets = BUCKETS }):rows()[2]
      store.sql():query("DELETE FROM %s WHERE level=1 AND bucket=%d", TABLE, row.bucket)
      restore[1] = function() store.sql():query("INSERT INTO %s VALUES (1, %d)", TABLE, row.bucket) end
      begin()
      local err = assert_fails("not_provisioned", locks:acquire(R1))
      assert.matches("2 of 3 bucket rows came back.*roll back.*hierlock provision", err.message)
      assert.same({ user = "u1", account = "a1", resource = "r1" }, err.target)
      assert.is_false(err.retryable)
      run "ROLLBACK"
      assert_free { "u1" }
    end)

    it("other buckets and levels", function()
      begin()
      for _, wrong in ipairs { { buckets = 999 }, { levels = { "user", "account", "thing" } }, { levels = { "user" } } } do
        local err = assert_fails("mismatch", attach.luasql(connection, options(wrong)):acquire { "u1" })
        assert.matches("has 1000 buckets for each of the levels user,account,resource; this program wants ", err.message)
      end
      run "ROLLBACK"
      -- An option that is left out is as recorded, also for the next object.
      begin()
      for _ = 1, 2 do
        local open_one = attach.luasql(connection, { table = TABLE })
        assert(open_one:acquire_resource("u1", "a1", "r1"))
        assert_locked { "u1", "a1", "r1" }
      end
      run "ROLLBACK"
      -- A table of which nothing is recorded is one for the defaults.
      run("CREATE TABLE %s_bare LIKE %s", TABLE, TABLE)
      restore[1] = function()
        store.sql():query("DROP TABLE %s_bare", TABLE)
        store.sql():query("DELETE FROM hier_lock_meta WHERE table_name='%s_bare'", TABLE)
      end
      begin()
      local err = assert_fails("mismatch", attach.luasql(connection, options { table = TABLE .. "_bare" }):acquire { "u1" })
      assert.matches("as hier_lock_meta does not say%) has 10000000 buckets ", err.message)
      assert.matches("leave out `buckets` and `levels`.* or name another table", err.message)
      run "ROLLBACK"
      store.sql():query("INSERT INTO hier_lock_meta (table_name,buckets,levels) VALUES ('%s_bare',%d,'warehouse,shelf')", TABLE, BUCKETS)
      begin()
      err = assert_fails("mismatch", attach.luasql(connection, options { table = TABLE .. "_bare", levels = { "user" } }):acquire { "u1" })
      assert.matches("has 1000 buckets for each of the levels warehouse,shelf; this program wants 1000 for user:", err.message)
      run "ROLLBACK"
    end)

    it("a table that is none", function()
      local name = TABLE .. "_wrong"
      local cases = {
        { "SELECT 1", "not_provisioned", 1146 },
        { "CREATE VIEW %s AS SELECT level, bucket FROM " .. TABLE, "not_provisioned" },
        { "CREATE TABLE %s (level TINYINT, bucket INT) ENGINE=MyISAM", "unsafe_server" },
        { "CREATE TEMPORARY TABLE %s (level TINYINT, bucket INT) ENGINE=InnoDB", "not_provisioned" },
      }
      for _, case in ipairs(cases) do
        run(case[1], name)
        begin()
        local err = assert_fails(case[2], attach.luasql(connection, options { table = name }):acquire { "u1" })
        assert.equal(case[3], err.errno)
        run "ROLLBACK"
        run("DROP VIEW IF EXISTS %s", name)
        run("DROP TABLE IF EXISTS %s", name)
      end
    end)

    it("a read-only server", function()
      local root = store.root() or pending("no administrator here")
      restore[1] = function() root:query("SET GLOBAL read_only=OFF") end
      begin()
      assert.is_true(locks:acquire(R1)) -- it was found right a moment ago
      run "ROLLBACK"
      root:query("SET GLOBAL read_only=ON")
      -- Shared locks the server would grant; exclusive ones it refuses by itself, at any time.
      begin()
      local anew = attach.luasql(connection, options())
      local shared = { mode = "shared" }
      assert.matches("read%-only", assert_fails("unsafe_server", anew:acquire(R1, shared)).message)
      run "ROLLBACK"
      begin()
      assert.equal(1290, assert_fails("unsafe_server", locks:acquire(R1)).errno)
      run "ROLLBACK"
      root:query("SET GLOBAL read_only=OFF")
      begin()
      assert.is_true(locks:acquire(R1))
    end)

    -- Servers are known by what they report; mysql_refusals_spec.lua has real ones.
    it("servers that would not exclude", function()
      local cases = {
        { { version = "8.0.11-TiDB-v7.5.0" }, "TiDB" },
        { { version = "5.7.44" }, "too old" },
        { { version = "5.5.5-10.5.27-MariaDB" }, "too old" },
        { { wsrep_on = "ON" }, "Galera" },
        { { group_replication_group_name = "g", group_replication_single_primary_mode = "OFF" }, "several primaries" },
        { { innodb_read_only = "ON" }, "read%-only" },
        { { super_read_only = "ON" }, "read%-only" },
        { { read_only = "NO_LOCK" }, "read%-only" },
      }
      for _, case in ipairs(cases) do
        local changed = { execute = function(_, query)
          if query:find("AS identity", 1, true) then return connection:execute("SELECT 'another one' AS identity") end
          if not query:find("^SHOW GLOBAL VARIABLES") then return connection:execute(query) end
          local selected = {}
          for name, said in pairs(case[1]) do selected[#selected + 1] = ("SELECT '%s', '%s'"):format(name, said) end
          if not case[1].version then selected[#selected + 1] = "SELECT 'version', VERSION()" end
          return connection:execute(table.concat(selected, " UNION "))
        end }
        begin()
        assert.matches(case[2], assert_fails("unsafe_server", attach.luasql(changed, options()):acquire(R1)).message)
        run "ROLLBACK"
      end
    end)

    it("what is misused, at the caller's line", function()
      local function assert_raises(text, ...)
        local ok, message = pcall(...)
        assert.is_false(ok)
        assert.matches("^spec/attach_spec.lua:%d+: hierlock: " .. text, message)
      end
      begin()
      assert_raises("unknown option 'time_out'", function() return (locks:acquire(R1, { time_out = 1 })) end)
      assert_raises("unknown option 'label'", function() return (locks:acquire(R1, { label = "x" })) end)
      assert_raises("timeout must not be negative or NaN", function() return (locks:acquire(R1, { timeout = -1 })) end)
      assert_raises("timeout must not be negative or NaN", function() return (locks:acquire(R1, { timeout = 0 / 0 })) end)
      assert_raises("mode must be", function() return (locks:acquire(R1, { mode = "read" })) end)
      assert_raises("user is missing", function() return (locks:acquire_user()) end)
      assert_raises("account is missing", function() return (locks:acquire_account("u1")) end)
      assert_raises("resource is missing", function() return (locks:acquire_resource("u1", "a1")) end)
      assert_raises("resources is missing", function() return (locks:acquire_resources("u1", "a1")) end)
      assert_raises("targets must be a list", function() return (locks:acquire_all()) end)
      assert_raises("target must be a table", function() return (locks:acquire()) end)
      assert_raises("self must be an attached object", function() return (locks.acquire(R1)) end)
      assert_raises("dialect", function() return (attach.luasql(connection, "oracle")) end)
      assert.is_true(attach.luasql(connection, store.dialect, options()):acquire { "u1" })
      assert_raises("unknown option 'pool_size'", function() return (attach.luasql(connection, { pool_size = 1 })) end)
      assert_raises("table must be", function() return (attach.luasql(connection, { table = "a b" })) end)
      assert_raises("buckets must be", function() return (attach.luasql(connection, { buckets = 0 })) end)
      assert_raises("connection must be LuaSQL's", function() return (attach.luasql("mysql://")) end)
      assert_raises("db must be", function() return (attach.resty_mysql(connection)) end)
      local deep = attach.luasql(connection, options { levels = { "shop", "shelf" } })
      assert_raises("there is no level 'user'", function() return (deep:acquire_user("u1")) end)
    end)
  end)
end)
