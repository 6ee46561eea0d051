--- Row locks of a server while all goes well: the order in which rows are taken, timeouts, tokens over a crash, the
-- view of observers, and the settings of a session. Logging in is in mysql_connect_spec, round trips and writes in
-- mysql_cost_spec, trouble in mysql_trouble_spec.

local hierlock = require "hierlock"
local support = require "spec.support"

-- In the order that everybody keeps to.
local function plan_rows(store, targets)
  local rows = hierlock.plan(targets, { buckets = store.options.buckets }):rows()
  table.sort(rows, function(a, b)
    if a.level ~= b.level then return a.level < b.level end
    return a.bucket < b.bucket
  end)
  return rows
end

local function select_row(store, row, clause)
  return ("(SELECT level,bucket FROM %s WHERE level=%d AND bucket=%d %s)"):format(
    store.table, row.level, row.bucket, clause)
end

-- Which of the rows are locked: a list of booleans. Locks the free rows for the moment of one statement.
local function taken(store, rows)
  local parts, free, list = {}, {}, {}
  for i, row in ipairs(rows) do parts[i] = select_row(store, row, "FOR UPDATE SKIP LOCKED") end
  for _, row in ipairs(store.sql():query(table.concat(parts, " UNION ALL "))) do
    free[row[1] .. "." .. row[2]] = true
  end
  for i, row in ipairs(rows) do list[i] = not free[row.level .. "." .. row.bucket] end
  return list
end

-- The result of taken() when the first n rows, and no others, are locked.
local function first(n, rows)
  local list = {}
  for i = 1, #rows do list[i] = i <= n end
  return list
end

local function resources(n, prefix)
  local list = {}
  for i = 1, n do list[i] = (prefix or "r") .. i end
  return list
end

-- A fixed shuffle, the same on every Lua.
local function shuffled(list, seed)
  local copy = {}
  for i, value in ipairs(list) do copy[i] = value end
  for i = #copy, 2, -1 do
    seed = (seed * 16807) % 2147483647
    local j = seed % i + 1
    copy[i], copy[j] = copy[j], copy[i]
  end
  return copy
end

support.each_server(function(store)
  local opened, blocker

  before_each(function() opened = {} end)
  after_each(function()
    if blocker then blocker:close() end
    for _, manager in ipairs(opened) do manager:close() end
    support.close_peers()
    blocker = nil
  end)

  local function open(...)
    local manager = support.open(store, ...)
    opened[#opened + 1] = manager
    return manager
  end

  local function block(row)
    blocker = blocker or support.sql_connection(store.bare_dsn)
    blocker:query("START TRANSACTION")
    blocker:query(select_row(store, row, "FOR UPDATE"))
  end

  local function is_waiting() return store.waiting() == 1 end

  -- A session prepares a statement for each shape of a request that it sees again; the mode belongs to the shape.
  it("a session that has locked a node in one mode, locks it in the other one next", function()
    local manager, other = open { pool_size = 1 }, open()
    local modes = { "shared", "exclusive" }
    for one = 1, 2 do
      for try_once = 0, 1 do
        local node = { "mode" .. one, "a" .. try_once, "r" }
        local options = { timeout = try_once == 0 and 30 or 0 }
        for _ = 1, 4 do
          options.mode = modes[one]
          assert(manager:acquire(node, options)):release()
        end
        options.mode = modes[3 - one]
        local handle = assert(manager:acquire(node, options))
        local shared, err = other:acquire(node, { mode = "shared", timeout = 0 })
        assert.equal(one == 2, shared ~= nil, tostring(err))
        assert.is_nil((other:acquire(node, { timeout = 0 })))
        if shared then shared:release() end
        handle:release { confirm = true }
      end
    end
  end)

  describe("the order in which rows are locked", function()
    local mixtures = {
      { "two resources", { { "u1", "a1", "r1" }, { "u1", "a1", "r2" } } },
      { "a resource and an account", { { "u2", "a1", "r1" }, { "u1", "a1" } } },
      { "a user, an account and a resource", { { "u3", "a1", "r1" }, { "u2", "a1" }, { "u1" } } },
      { "shared and exclusive resources",
        { { "u1", "a2", "r1", mode = "shared" }, { "u1", "a1", "r1" } } },
    }
    for _, mixture in ipairs(mixtures) do
      local title, targets = mixture[1], mixture[2]
      it("is by level and bucket, for " .. title .. ", whichever row is blocked", function()
        local rows = plan_rows(store, targets)
        local peer = support.process(store)
        for i, row in ipairs(rows) do
          block(row)
          peer:acquire("h", "acquire_all", targets)
          support.wait_until(is_waiting, "the waiter")
          assert.same(first(i, rows), taken(store, rows))
          blocker:query("ROLLBACK")
          assert.is_true(peer:result())
          peer:release("h")
        end
      end)
    end

    it("does not depend on the order in which many targets are given", function()
      local ids = resources(60)
      local rows = plan_rows(store, { { user = "u1", account = "a1", resources = ids } })
      local peer = support.process(store)
      for _, seed in ipairs { 1, 2, 3 } do
        block(rows[20 * seed])
        peer:acquire("h", "acquire_resources", "u1", "a1", shuffled(ids, seed))
        support.wait_until(is_waiting, "the waiter")
        assert.same(first(20 * seed, rows), taken(store, rows))
        blocker:query("ROLLBACK")
        assert.is_true(peer:result())
        peer:release("h")
      end
    end)
  end)

  describe("many rows in one call", function()
    for _, n in ipairs { 300, 1000 } do
      it("are locked and released together: " .. n .. " resources", function()
        local ids = shuffled(resources(n), n)
        local manager = open()
        local rows = plan_rows(store, { { user = "u1", account = "a1", resources = ids } })
        local some = { rows[#rows] }
        for i = 1, #rows - 1, 97 do some[#some + 1] = rows[i] end

        local handle = assert(manager:acquire_resources("u1", "a1", ids))
        assert.same(first(#some, some), taken(store, some))
        assert.is_true(handle:release { confirm = true })
        assert.same(first(0, some), taken(store, some))
      end)
    end

    it("are taken in order, and none is kept by who gives up", function()
      local ids = shuffled(resources(1000), 7)
      local peer = support.process(store)
      local rows = plan_rows(store, { { user = "u1", account = "a1", resources = ids } })
      local blocked = #rows - 20 -- in the last statement, should there be several
      local around = {} -- ten before it, itself, ten behind it, and the first of all
      for i = 1, 21 do around[i] = rows[blocked - 11 + i] end
      table.insert(around, 1, rows[1])
      block(rows[blocked])
      peer:acquire("h", "acquire_resources", "u1", "a1", ids, { timeout = 5 })
      support.wait_until(is_waiting, "the waiter")
      assert.same(first(12, around), taken(store, around))
      local granted, code = peer:result()
      assert.same({ nil, "timeout" }, { granted, code })
      support.wait_until(function() return not taken(store, { rows[1] })[1] end, "the rollback")
      blocker:query("ROLLBACK")
      assert.same(first(0, around), taken(store, around))
    end)
  end)

  describe("timeouts that change from call to call", function()
    it("are kept, each by its own call", function()
      local manager = open()
      local row = plan_rows(store, { { "u1", "a1", "r1" } })[3]
      block(row)
      for _ = 1, 4 do assert(manager:acquire({ "u2" }, { timeout = 12 })):release() end
      for _, timeout in ipairs { 0.05, 0.4, 0, 0.15, 0.05 } do
        local begun = support.now()
        local handle, err = manager:acquire({ "u1", "a1", "r1" }, { timeout = timeout })
        local took = support.now() - begun
        assert.is_nil(handle)
        assert.equal("timeout", err.code)
        assert.is_true(took > timeout - 0.01, took .. " s instead of " .. timeout)
        assert.is_true(took < timeout + 1.5, took .. " s instead of " .. timeout)
      end
      blocker:query("ROLLBACK")
      assert(manager:acquire({ "u1", "a1", "r1" }, { timeout = 1 })):release()
    end)
  end)

  describe("trying in a loop", function()
    it("leaves nothing locked, however often it fails", function()
      local manager = open()
      local rows = plan_rows(store, { { "u1", "a1", "r1" } })
      block(rows[3])
      for _ = 1, 30 do
        local handle, err = manager:acquire({ "u1", "a1", "r1" }, { timeout = 0 })
        assert.is_nil(handle)
        assert.equal("timeout", err.code)
      end
      support.wait_until(function() return not taken(store, { rows[1] })[1] end, "the rollback")
      assert.same({ false, false, true }, taken(store, rows))
    end)
  end)

  describe("what observers see", function()
    local function shown(text)
      local rows = store.sql():query([[
        SELECT COUNT(*) FROM performance_schema.user_variables_by_thread
        WHERE VARIABLE_NAME='hierlock' AND LOCATE('%s', VARIABLE_VALUE) > 0]], text)
      return tonumber(rows[1][1])
    end

    it("is the label, while the lock is held, and while it is awaited", function()
      local holder, waiter = open { application = "billing" }, support.process(store)
      for round = 1, 3 do -- as text, then prepared
        local handle = assert(holder:acquire({ "u1", "a1", "r1" }, { label = "held, " .. round }))
        assert.equal(1, shown("held, " .. round))
        waiter:acquire("h", "acquire", { "u1", "a1", "r1" }, { label = "awaited, " .. round })
        support.wait_until(is_waiting, "the waiter")
        assert.equal(1, shown("awaited, " .. round))
        assert.is_true(shown("billing") >= 1)
        handle:release()
        assert.is_true(waiter:result())
        waiter:release("h")
      end
    end)

    -- The last ones have what stands between the fields of what observers read, and rows of their own.
    it("is any label, whatever bytes it has, and it is shown as one", function()
      local manager, observer = open(), open()
      for label, seen in pairs {
        ["it's \"quoted\" \\ and; DROP TABLE x"] = "it's \"quoted\" \\ and; DROP TABLE x", [""] = "", ["%s%n"] = "%s%n",
        [("x"):rep(5000)] = ("x"):rep(124) .. "...",
        ["a\31b\0c\n"] = "a\\x1fb\\x00c\\x0a", ["\0310.1x,\31"] = "\\x1f0.1x,\\x1f",
      } do
        local handle = assert(manager:acquire({ "u1", "a1", "r1" }, { label = label }))
        if store.dialect == "mariadb" then support.sleep(0.11) end -- its picture may be so old
        local holders = assert(observer:holders { "u1", "a1", "r1" })
        assert.equal(1, #holders)
        assert.equal(seen, holders[1].label or "")
        assert.is_true(handle:release { confirm = true })
      end
    end)

    -- Every client that can log in can set @hierlock. Nothing of it reaches a terminal as it is, and whatever the
    -- rows look like, they end.
    it("of another's making is shown as text", function()
      local manager, stranger = open(), support.sql_connection(store.bare_dsn)
      local row = plan_rows(store, { { "u1" } })[1]
      for rows, shown_rows in pairs { [("15.1x,0.%dx,"):format(row.bucket)] = true, ["0.1x"] = false, ["0.1x,0"] = false } do
        stranger:query("SET @hierlock = CONCAT_WS(CHAR(31), '2', '0', CONCAT(CHAR(27), '[31mred'), 'a\127', '1', 'x', " ..
          "_utf8mb4 X'C29B', CONCAT('l', CHAR(10)), '%s')", rows)
        stranger:query "BEGIN"
        stranger:query(select_row(store, row, "FOR UPDATE"))
        if store.dialect == "mariadb" then support.sleep(0.11) end
        local holders = assert(manager:holders { "u1" })
        if shown_rows or store.dialect == "mysql" then -- which says itself who holds which row
          assert.equal(1, #holders)
          local holder = holders[1]
          assert.same({ "\\x1b[31mred", "a\\x7f", "\\xc2\\x9b", "l\\x0a" },
            { holder.application, holder.host, holder.path, holder.label })
        else
          assert.equal(0, #holders)
        end
        stranger:query "ROLLBACK"
      end
      stranger:close()
    end)
  end)

  describe("a session", function()
    -- Lists the transactions of our sessions; fails unless there are n. The servers show an old picture to those who
    -- look more often than every 100 ms.
    local function transactions(n)
      return support.wait_until(function()
        support.sleep(0.11)
        local rows = store.sql():query([[
          SELECT trx_mysql_thread_id, trx_isolation_level FROM information_schema.INNODB_TRX
          WHERE trx_mysql_thread_id <> CONNECTION_ID()]])
        return #rows == n and rows
      end, n .. " transactions")
    end

    it("is READ COMMITTED, and one transaction from acquiring to releasing", function()
      local manager = open()
      local handle = assert(manager:acquire { "u1", "a1", "r1" })
      assert.equal("READ COMMITTED", transactions(1)[1][2])
      handle:release { confirm = true }
      transactions(0)
    end)

    it("locks rows and no gaps: others may insert between them", function()
      local manager = open()
      local handle = assert(manager:acquire { "u1", "a1", "r1" })
      local row = plan_rows(store, { { "u1", "a1", "r1" } })[3]
      store.sql():query("SET SESSION innodb_lock_wait_timeout=1")
      store.sql():query("INSERT INTO %s VALUES (2,%d),(2,-1)", store.table, store.options.buckets)
      store.sql():query("DELETE FROM %s WHERE level=2 AND bucket IN (%d,-1)", store.table,
                        store.options.buckets)
      assert.same({ true }, taken(store, { row }))
      handle:release { confirm = true }
    end)

    it("tells the server to free its locks after hold_timeout", function()
      local manager = open { hold_timeout = 7.2 }
      local handle = assert(manager:acquire { "u1", "a1", "r1" })
      local left = handle:remaining()
      assert.is_true(left <= 7.2 and left > 5, left .. " s")
      if store.dialect == "mysql" then -- MariaDB shows nobody else's variables
        local values = store.sql():query([[
          SELECT v.VARIABLE_NAME, v.VARIABLE_VALUE FROM performance_schema.variables_by_thread v
          JOIN performance_schema.threads t USING (THREAD_ID)
          WHERE t.PROCESSLIST_ID = %d AND v.VARIABLE_NAME IN
            ('wait_timeout','autocommit','transaction_isolation','transaction_read_only')
          ORDER BY 1]], transactions(1)[1][1])
        assert.same({ { "autocommit", "OFF" }, { "transaction_isolation", "READ-COMMITTED" },
                      { "transaction_read_only", "OFF" }, { "wait_timeout", "8" } }, values)
      end
      handle:release()
    end)

    -- Settings that an administrator may have made for all sessions; MariaDB's names second.
    local defaults = {
      ["usual nuisances"] = {
        { "completion_type", "2" }, { "autocommit", "OFF" }, { "wait_timeout", "1" },
        { "innodb_lock_wait_timeout", "1" }, { "lock_wait_timeout", "1" },
        { "sql_mode", "'ANSI,NO_BACKSLASH_ESCAPES'" },
        { "transaction_isolation", "'SERIALIZABLE'", "tx_isolation" },
        { "transaction_read_only", "1", "tx_read_only" },
        { "max_execution_time", "5", "max_statement_time" },
      },
      ["short results"] = { { "sql_select_limit", "1" }, { "max_join_size", "1" } },
    }
    for title, settings in pairs(defaults) do
      it("excludes in spite of the administrator's defaults: " .. title, function()
        local root = store.root() or pending("no administrator here")
        local restore = {}
        finally(function()
          for _, query in ipairs(restore) do root:query(query) end
        end)
        for i, setting in ipairs(settings) do
          local name, value = setting[1], setting[2]
          if store.dialect == "mariadb" and setting[3] then
            name, value = setting[3], value == "5" and "0.005" or value
          end
          local before = root:query("SELECT @@GLOBAL." .. name)[1][1]
          if not tonumber(before) then before = "'" .. before .. "'" end
          restore[i] = "SET GLOBAL " .. name .. "=" .. before
          root:query("SET GLOBAL " .. name .. "=" .. value)
        end
        local holder, waiter = open { hold_timeout = 30 }, support.process(store)
        for _ = 1, 3 do
          local handle = assert(holder:acquire { "u1", "a1", "r1" })
          waiter:acquire("h", "acquire", { "u1", "a1", "r1" }, { timeout = 10 })
          assert.is_true(waiter:stays_blocked())
          assert.is_true(handle:release())
          assert.is_true(waiter:result())
          assert.is_true(waiter:release("h"))
        end
      end)
    end
  end)

  describe("tokens", function()
    -- The number's top byte is the server's id: with that, a server whose id is lowered would give lesser tokens
    -- than before.
    it("are the server's own number, whatever its id, and leave the last byte free", function()
      local function number()
        return store.sql():query("SELECT LPAD(HEX(UUID_SHORT() & 0xFFFFFFFFFFFFFF), 14, '0')")[1][1]:lower()
      end
      local manager = open()
      for _ = 1, 3 do -- as text, and prepared
        local before = number()
        local token = assert(manager:acquire { "u1", "a1", "r1" }).token
        local after = number()
        assert.equal("00", token:sub(15))
        assert.is_true(before < token:sub(1, 14) and token:sub(1, 14) < after, before .. " " .. token .. " " .. after)
        collectgarbage()
      end
    end)
  end)
end)
