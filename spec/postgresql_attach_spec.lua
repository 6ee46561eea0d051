-- Locks in the program's own transaction, on PostgreSQL; and what the command says of it.

local attach = require "hierlock.attach"
local core = require "hierlock.core"
local hierlock = require "hierlock"
local support = require "spec.support"

local R1, R2 = { "u1", "a1", "r1" }, { "u1", "a1", "r2" }

-- How a program that has this driver connects, sends SQL and attaches. execute: returns the driver's result, or nil,
-- message; value: of the only column of the only row.
local drivers = {
  luasql = {
    connect = function(user, password, host, port, database)
      return support.luasql_postgresql():connect(database, user, password, host, tonumber(port))
    end,
    execute = function(connection, sql) return connection:execute(sql) end,
    value = function(connection, sql)
      local cursor = assert(connection:execute(sql))
      local row = cursor:fetch({}, "n")
      cursor:close()
      return row[1]
    end,
    attach = attach.luasql,
    close = function(connection) connection:close() end,
  },
  pgmoon = {
    connect = function(user, password, host, port, database)
      local db = require "pgmoon".new { user = user, password = password, host = host, port = port, database = database }
      assert(db:connect())
      return db
    end,
    execute = function(db, sql) return db:query(sql) end,
    value = function(db, sql)
      local _, value = next(assert(db:query(sql))[1])
      return tostring(value)
    end,
    attach = attach.pgmoon,
    close = function(db) db:disconnect() end,
    needs = { "pgmoon", "openssl.rand" }, -- the latter for logging in, outside of nginx
  },
}

local function attached(store, name)
  local driver = drivers[name]
  local connections, manager, connection, locks

  local function missing()
    for _, needed in ipairs(driver.needs or {}) do
      if not pcall(require, needed) then return needed end
    end
  end

  local function connect()
    local new = assert(driver.connect(store.bare_dsn:match("^%a+://(.-):(.-)@(.-):(%d+)/([^?]*)")))
    connections[#connections + 1] = new
    return new
  end
  local execute, value = driver.execute, driver.value

  describe("an attached connection of " .. name, function()
    if missing() then
      return pending(("an attached connection of %s: %s is not on the package path (HIERLOCK_DRIVERS)"):format(name, missing()))
    end
    before_each(function()
      connections, manager = {}, support.open(store)
      connection = connect()
      locks = driver.attach(connection, { timeout = 15 })
    end)
    after_each(function()
      support.close_peers()
      manager:close()
      for _, each in ipairs(connections) do driver.close(each) end
    end)

    it("excludes those of a manager, and is excluded by them, until its transaction ends", function()
      for _, ending in ipairs { "COMMIT", "ROLLBACK" } do
        assert(execute(connection, "BEGIN"))
        assert.is_true(locks:acquire(R1))
        assert.equal("timeout", select(2, manager:acquire(R1, { timeout = 0 })).code)
        assert(manager:acquire(R2, { timeout = 0 })):release { confirm = true }
        assert(execute(connection, ending))
        local handle = assert(manager:acquire(R1, { timeout = 0 }))
        assert(execute(connection, "BEGIN"))
        for _, timeout in ipairs { 0, 0.2 } do
          local ok, err = locks:acquire_resource("u1", "a1", "r1", { timeout = timeout })
          assert.is_nil(ok)
          assert.equal("timeout", err.code)
          assert.is_true(err.retryable)
          assert.same({ user = "u1", account = "a1", resource = "r1" }, err.target)
        end
        assert(execute(connection, "ROLLBACK"))
        handle:release { confirm = true }
      end
    end)

    it("leaves the transaction what it was after a request that failed, limits included", function()
      local handle = assert(manager:acquire(R2))
      assert(execute(connection, "BEGIN"))
      assert(execute(connection, "SET LOCAL statement_timeout='7s'"))
      assert(execute(connection, "SET LOCAL lock_timeout='3s'"))
      assert.is_true(locks:acquire(R1, { timeout = 0 }))
      assert.equal("timeout", select(2, locks:acquire_all({ R2, { "u2" } }, { timeout = 0.1 })).code)
      assert.equal("timeout", select(2, locks:acquire_all({ { "u2" }, R2 }, { timeout = 0 })).code)
      assert.equal("1", value(connection, "SELECT 1"))
      assert.is_true(locks:acquire({ "u1", "a1", "r3" }, { timeout = 5 }))
      assert.equal("7s", value(connection, "SHOW statement_timeout"))
      assert.equal("3s", value(connection, "SHOW lock_timeout"))
      assert(manager:acquire({ "u2" }, { timeout = 0 })):release { confirm = true }
      assert.equal("timeout", select(2, manager:acquire(R1, { timeout = 0 })).code)
      assert(execute(connection, "ROLLBACK"))
      handle:release { confirm = true }
    end)

    it("waits as long as it is told, and no longer", function()
      local handle = assert(manager:acquire(R1))
      assert(execute(connection, "BEGIN"))
      local start = support.now()
      local _, err = locks:acquire(R1, { timeout = 0.3 })
      local took = support.now() - start
      assert.matches("^u1/a1/r1 was not granted within 0.300 s", err.message)
      assert.is_true(took >= 0.3 and took < 1.3, took)
      assert(execute(connection, "ROLLBACK"))
      handle:release { confirm = true }
    end)

    it("raises where no transaction is open", function()
      assert.has_error(function() locks:acquire(R1) end,
        "hierlock: no transaction is open, and a lock ends with its transaction: BEGIN first")
    end)

    it("gives way in a deadlock, and says so", function()
      local peer = support.process(store)
      assert.is_true(peer:acquire("lock", "acquire", R2):result())
      assert(execute(connection, "BEGIN"))
      assert.is_true(locks:acquire(R1))
      peer:start("local ok, err = handles.lock:extend(...); return ok, err and err.code", R1)
      support.wait_for_waiters(store, R1)
      local ok, err = locks:acquire(R2)
      if not ok then assert.equal("deadlock", err.code) end
      assert(execute(connection, "ROLLBACK"))
      local other, code = peer:result()
      assert.is_true((ok and code == "deadlock") or other)
    end)

    it("says that its connection has ended", function()
      assert(execute(connection, "BEGIN"))
      store.kill(value(connection, "SELECT pg_backend_pid()"))
      support.wait_until(function() return #store.sessions() == 1 end, "its end")
      local ok, err = locks:acquire(R1)
      assert.is_nil(ok)
      assert.equal("connection", err.code)
    end)

    it("is refused, as a manager is, on a server of a group with several primaries", function()
      local root = store.root()
      if not root then return pending("the server is not ours") end
      root:query("INSERT INTO pg_extension VALUES (4711, 'spock', 10, 11, false, '1', NULL, NULL)")
      finally(function() root:query("DELETE FROM pg_extension WHERE oid = 4711") end)
      assert(execute(connection, "BEGIN"))
      local ok, err = locks:acquire(R1)
      assert.is_nil(ok)
      assert.equal("unsafe_server", err.code)
      assert.matches("group with several primaries", err.message)
      assert.equal("1", value(connection, "SELECT 1")) -- the transaction goes on
      assert.equal(err.message, select(2, hierlock.open(store.dsn)).message)
    end)

    if name == "luasql" then
      it("is refused on a standby, which has locks of its own", function()
        local standby = { execute = function(_, sql)
          return execute(connection, (sql:gsub("pg_catalog%.pg_is_in_recovery%(%)", "true")))
        end }
        assert(execute(connection, "BEGIN"))
        local ok, err = attach.luasql(standby, "postgresql"):acquire(R1)
        assert.is_nil(ok)
        assert.equal("unsafe_server", err.code, err.message)
        assert.matches("standby", err.message)
      end)

      -- Only a message in English says by itself that it is the limit's.
      it("says timeout in any language, from a millisecond before its own clock does", function()
        local now, passed, lasts = core.now, 0, nil
        core.now = function() return passed end
        finally(function() core.now = now end)
        local german = { execute = function(_, sql)
          if not sql:find "statement_timeout=%d" then return execute(connection, sql) end
          passed = passed + lasts
          assert(not execute(connection, "SELECT 1 / 0"))
          return nil, "LuaSQL: error executing statement. PostgreSQL: FEHLER:  storniere Anfrage wegen Zeitüberschreitung der Anfrage\n"
        end }
        for code, seconds in pairs { timeout = 0.9985, store = 0.9975 } do
          lasts = seconds
          assert(execute(connection, "BEGIN"))
          local ok, err = attach.luasql(german, "postgresql"):acquire(R1, { timeout = 1 })
          assert.is_nil(ok)
          assert.equal(code, err.code, err.message)
          assert(execute(connection, "ROLLBACK"))
        end
      end)
    end

    if name == "pgmoon" then
      it("waits longer than the driver would, if it knows its limit", function()
        local handle = assert(manager:acquire(R1))
        connection:settimeout(100)
        locks = attach.pgmoon(connection, { socket_timeout = 0.1 })
        assert(execute(connection, "BEGIN"))
        local _, err = locks:acquire(R1, { timeout = 0.5 })
        assert.equal("timeout", err.code)
        assert(execute(connection, "ROLLBACK"))
        assert.is_nil((execute(connection, "SELECT pg_sleep(0.5)"))) -- its limit is the old one again
        handle:release { confirm = true }
      end)

      -- The answer still comes. The next query on this connection would get it.
      it("closes the connection where the driver has given an answer up", function()
        local handle = assert(manager:acquire(R1))
        connection:settimeout(100)
        assert(execute(connection, "BEGIN"))
        local ok, err = locks:acquire(R1, { timeout = 0.5 })
        assert.is_nil(ok)
        assert.equal("connection", err.code, err.message)
        assert.is_true(err.retryable)
        support.sleep(0.6)
        assert.is_nil((execute(connection, "SELECT 1")))
        assert.equal("connection", select(2, locks:acquire(R1)).code)
        handle:release { confirm = true }
        assert(manager:acquire(R1, { timeout = 5 })):release()
      end)

      it("closes the connection where the answer is that to an earlier question of the program's", function()
        for _, earlier in ipairs { "SELECT pg_sleep(0.3)", "SELECT 1 / length(pg_sleep(0.3)::text)" } do -- an error comes as late
          connection = connect()
          locks = attach.pgmoon(connection, { timeout = 15 })
          assert(execute(connection, "BEGIN"))
          connection:settimeout(1)
          assert.is_nil((execute(connection, earlier)))
          connection:settimeout(5000)
          local sock = connection.sock
          local send = sock.send
          function sock.send(...)
            local sent, why = send(...)
            support.sleep(0.5) -- so that LuaSocket reads both answers at once
            return sent, why
          end
          local ok, err = locks:acquire(R1)
          assert.is_nil(ok)
          assert.equal("connection", err.code, err.message)
          assert.is_nil((execute(connection, "SELECT 1")))
        end
      end)

      it("raises where it is misused", function()
        for word, wrong in pairs {
          ["db must be an object of pgmoon"] = function() attach.pgmoon({}) end,
          ["unknown option 'pool_size'"] = function() attach.pgmoon(connection, { pool_size = 1 }) end,
          ["socket_timeout must be a positive number"] = function() attach.pgmoon(connection, { socket_timeout = 0 }) end,
        } do
          local ok, message = pcall(wrong)
          assert.is_false(ok)
          assert.matches(word, message, 1, true)
        end
      end)
    end
  end)
end

support.on_postgresql(function(store)
  attached(store, "luasql")
  attached(store, "pgmoon")

  describe("the command", function()
    local function command(arguments, before)
      return support.run([[
        arg = { [0] = "hierlock", ]] .. arguments .. [[ }
        require "hierlock.command.main"
      ]], before)
    end

    it("has nothing to provision, and looks whether the server excludes", function()
      local environment = "HIERLOCK_DSN='" .. store.dsn .. "'"
      local output, status = command('"provision"', environment)
      assert.equal("postgresql: needs no provisioning\n", output)
      assert.equal(0, status)
      output, status = command('"verify"', environment)
      assert.matches("^postgresql: locks in mgl_test on 127.0.0.1:%d+ exclude; it needs no provisioning\npostgresql: it has tables for leases\n$", output)
      assert.equal(0, status)
      output, status = command('"verify"', "HIERLOCK_DSN='postgresql://u:p@127.0.0.1:1/d'")
      assert.matches("connection", output)
      assert.equal(69, status)
    end)
  end)
end)
