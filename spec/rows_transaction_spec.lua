--- Transactions of hierlock.rows, their locks and claims, by real programs side by side, on every server.

local core = require "hierlock.core"
local rows = require "hierlock.rows"
local support = require "spec.support"
local with = require "spec.support.rows"
local tables = require "spec.support.rows_tables"

local PRODUCT, MESSAGE, SENT, TABLES = tables.PRODUCT, tables.MESSAGE, tables.SENT, tables.TABLES

tables.each(function(self)
  local kind, dsn, by, connect = self.kind, self.dsn, self.by, self.connect
  local query, value, program, assert_fails = self.query, self.value, self.program, self.assert_fails
  local is_mysql = kind == "mysql" or kind == "mariadb"
  local db, connection
  before_each(function() db, connection = self.db, self.connection end)

  -- -------------------------------------------------------- transactions

  describe("a transaction", function()
    local function set(stock) return db:update(PRODUCT, 1, { stock = stock }) end

    it("commits what fn did, and passes its results on", function()
      assert.same({ 1, nil, "x" }, { db:transaction(function() assert(set(9)) return 1, nil, "x" end) })
      assert.equal(9, value "stock")
      assert.same({}, { db:transaction(function() assert(set(8)) end) })
      assert.equal(8, value "stock")
    end)

    it("is undone where fn fails or raises, and what it raised goes on", function()
      local ok, err = db:transaction(function() assert(set(9)) return nil, "no" end)
      assert.same({ nil, "no" }, { ok, err })
      local raised = { "mine" }
      local _, same = pcall(db.transaction, db, function() assert(set(9)) error(raised) end)
      assert.equal(raised, same)
      local _, text = pcall(db.transaction, db, function() assert(set(9)) error "broken" end)
      assert.truthy(text:find("broken", 1, true) and text:find "traceback")
      assert.equal(5, value "stock")
    end)

    it("undoes only an inner call that fails", function()
      assert.is_true(db:transaction(function()
        assert(set(6))
        assert_fails("stale", db:transaction(function()
          assert(db:update(PRODUCT, 2, { stock = 99 }))
          return db:update(PRODUCT, 1, { stock = 7 }, { version = 77 })
        end))
        assert.is_false(pcall(db.transaction, db, function() assert(set(8)) error "no" end))
        assert.equal(1, db:transaction(function() return db:update(PRODUCT, 2, { price = 3 }) end))
        return true
      end))
      assert.same({ 6, 0, 3 }, { value "stock", value("stock", 2), value("price", 2) })
    end)

    it("says at its end that it had ended before, or that it has failed", function()
      local ok, err = db:transaction(function()
        assert(set(9))
        if kind == "postgresql" then
          connection:execute "SELECT 1/0"
        else
          assert(connection:execute "ROLLBACK")
        end
        return true
      end)
      assert_fails("lost", ok, err)
      assert.equal(5, value "stock")
      assert.equal(1, db:transaction(function() return set(6) end))
    end)

    it("says at its end that the program has ended it, whatever it has begun since", function()
      for _, own in ipairs { { "ROLLBACK" }, { "COMMIT" }, { "ROLLBACK", "BEGIN" }, { "COMMIT", "BEGIN" } } do
        local other, its = connect { tables = TABLES }
        local ok, err = other:transaction(function()
          assert(other:update(PRODUCT, 1, { stock = 9 }))
          for _, text in ipairs(own) do assert(its:execute(text)) end
          assert(other:update(PRODUCT, 1, { price = 77 }))
          return true
        end)
        assert_fails("lost", ok, err)
        assert.equal("the transaction had ended before its COMMIT; it was not carried out as a whole", err.message)
        assert.equal(1, other:transaction(function() return other:update(PRODUCT, 1, { stock = 5, price = 10 }) end))
      end
    end)

    if not is_mysql then -- which has no rule that only COMMIT looks at
      it("was not committed where the database refuses its COMMIT, and says so", function()
        if kind == "sqlite" then query "PRAGMA foreign_keys=ON" end
        query("CREATE TABLE hierlock_rows_part (product INTEGER REFERENCES %s (id) DEFERRABLE INITIALLY DEFERRED)", PRODUCT)
        finally(function() query "DROP TABLE hierlock_rows_part" end)
        local ok, err = db:transaction(function()
          assert(set(9))
          query "INSERT INTO hierlock_rows_part VALUES (99)"
          return true
        end)
        assert_fails("store", ok, err)
        assert.equal(5, value "stock")
        assert.equal(1, db:transaction(function() return set(6) end))
      end)
    end

    it("is undone where its coroutine is closed", function()
      if not coroutine.close then return end -- luacheck: ignore 143
      local thread = coroutine.create(function()
        db:transaction(function()
          assert(set(9))
          coroutine.yield()
        end)
      end)
      assert(coroutine.resume(thread))
      assert(coroutine.close(thread)) -- luacheck: ignore 143
      assert.equal(1, db:update(PRODUCT, 2, { stock = 3 }, { where = { "1=1" } }))
      self.connection:close()
      self.db, self.connection = connect { tables = TABLES }
      assert.same({ 5, 3 }, { value "stock", value("stock", 2) })
    end)

    it("is over where fn raises because the program has closed the connection", function()
      local own, its = with.connect(by, dsn(), { tables = TABLES })
      assert.is_false(pcall(own.transaction, own, function()
        assert(own:update(PRODUCT, 1, { stock = 9 }))
        its:close()
        error "closed"
      end))
      assert.is_nil(own.transacted)
      support.wait_until(function() return db:transaction(function() return db:read(PRODUCT, 1, { lock = "update" }) end) end)
      assert.equal(5, value "stock")
    end)

    it("calls fn again after a failure that passes, as often as it may", function()
      local _, passing = core.failure("deadlock", "by the spec")
      for _, case in ipairs { { 0, 1 }, { 3, 4 } } do
        local calls = 0
        assert_fails("deadlock", db:transaction({ retries = case[1] }, function()
          calls = calls + 1
          assert(set(9))
          return nil, passing
        end))
        assert.equal(case[2], calls)
        assert.equal(5, value "stock")
      end
      local calls = 0
      assert.is_true(db:transaction({ retries = 3 }, function()
        calls = calls + 1
        if calls < 3 then error(passing) end
        return true
      end))
      assert.equal(3, calls)
      for _, code in ipairs { "connection", "unknown", "lost", "stale", "store" } do
        local _, err = core.failure("store", "by the spec")
        err.code, calls = code, 0
        assert_fails(code, db:transaction({ retries = 3 }, function() calls = calls + 1 return nil, err end))
        assert.equal(1, calls)
      end
    end)
  end)

  -- ------------------------------------------------------------ locks

  -- Locks product 1 until told to let it go.
  local function hold(way)
    local peer = program()
    peer:run([[
      local t, way = ...
      handles.work = coroutine.wrap(function()
        -- pcall in Lua 5.1 cannot be yielded across: so by hand.
        connection:execute(way.begin)
        assert(connection:execute(way.lock)):close()
        coroutine.yield()
        connection:execute "COMMIT"
      end)
      handles.work()
    ]], PRODUCT, { begin = kind == "sqlite" and "BEGIN IMMEDIATE" or "BEGIN",
                   lock = ("SELECT * FROM %s WHERE id=1%s"):format(PRODUCT, kind == "sqlite" and "" or way or " FOR UPDATE") })
    function peer.let(_) return peer:run "handles.work()" end
    return peer
  end

  describe("a lock", function()
    it("keeps another one out until the end", function()
      local peer = program()
      assert.is_true(db:transaction(function()
        local row = assert(db:read(PRODUCT, 1, { lock = "update" }))
        peer:begin([[
          local t = ...
          return db:transaction(function()
            local row, err = db:read(t, 1, { lock = "update", wait = 15 })
            if not row then return nil, err end
            return tonumber(row.stock)
          end)
        ]], PRODUCT)
        assert.is_true(peer:stays_blocked())
        return db:update(PRODUCT, 1, { stock = row.stock + 1 }) == 1
      end))
      assert.equal(6, peer:result())
    end)

    it("is given up in time, to the millisecond, and the transaction goes on", function()
      local other, waited = hold(), nil
      local limited = connect { tables = TABLES, timeout = 0.3 }
      local ok, err = limited:transaction(function()
        if kind ~= "sqlite" then assert(limited:update(PRODUCT, 2, { stock = 3 })) end
        local started = support.now()
        local row, reason = limited:read(PRODUCT, 1, { lock = "update", wait = 0.3 })
        waited = support.now() - started
        assert_fails("timeout", row, reason)
        assert.is_true(waited >= 0.299 and waited < 5, tostring(waited))
        assert.is_true(reason.retryable)
        assert_fails("timeout", limited:read(PRODUCT, 1, { lock = "update", wait = 0 }))
        assert.is_false(limited:read(PRODUCT, 1, { lock = "update", skip_locked = true }))
        return true
      end)
      if kind == "sqlite" then
        assert_fails("timeout", ok, err) -- where it begins
      else
        assert.is_true(ok, tostring(err))
        assert.equal(3, value("stock", 2))
      end
      other:let()
      assert.equal("Tea", limited:transaction(function() return limited:read(PRODUCT, 1, { lock = "update", wait = 0 }).name end))
    end)

    it("leaves the limit of a session what it was", function()
      if kind ~= "postgresql" then return end
      assert.is_true(db:transaction(function()
        query "SET LOCAL statement_timeout='7s'"
        assert(db:read(PRODUCT, 1, { lock = "update", wait = 2 }))
        assert.equal("7s", query("SHOW statement_timeout")[1][1])
        return true
      end))
    end)

    it("is shared by readers, and keeps writers out", function()
      local mine = kind == "mariadb" and " LOCK IN SHARE MODE" or " FOR SHARE"
      local other = hold(mine)
      local limited = connect { tables = TABLES, timeout = 0.1 }
      local ok, err = limited:transaction(function()
        assert(limited:read(PRODUCT, 1, { lock = "share", wait = 0 }))
        assert(limited:read(PRODUCT, 1, { lock = "share", wait = 0.2 }))
        assert(limited:read(PRODUCT, 1, { lock = "share", skip_locked = true }))
        assert_fails("timeout", limited:read(PRODUCT, 1, { lock = "update", wait = 0 }))
        return true
      end)
      if kind == "sqlite" then assert_fails("timeout", ok, err) else assert.is_true(ok, tostring(err)) end
      other:let()
    end)
  end)

  if kind ~= "sqlite" then
    it("a deadlock is tried again, and both get through", function()
      local chunk = [[
        local t, first, second = ...
        local calls = 0
        local ok, err = db:transaction({ retries = 20 }, function()
          calls = calls + 1
          local row, err = db:read(t, first, { lock = "update", wait = 15 })
          if not row then return nil, err end
          if calls == 1 then support.wait_until(function()
            local n = query("SELECT COUNT(*) FROM " .. t .. "_gate")[1][1]
            if calls == 1 and not handles.told then
              handles.told = true
              assert(handles.other.connection:execute("INSERT INTO " .. t .. "_gate VALUES (" .. first .. ")"))
            end
            return tonumber(query("SELECT COUNT(*) FROM " .. t .. "_gate")[1][1]) == 2 or tonumber(n) == 2
          end) end
          row, err = db:read(t, second, { lock = "update", wait = 15 })
          if not row then return nil, err end
          return db:update(t, second, { stock = row.stock + 1 })
        end)
        return ok, err and err.code, calls
      ]]
      query("DROP TABLE IF EXISTS %s_gate", PRODUCT)
      query("CREATE TABLE %s_gate (id INTEGER)", PRODUCT)
      local peers = { program(), program() }
      for i, peer in ipairs(peers) do
        peer:run("handles.other = {} local d _, handles.other.connection = handles.with.connect(...)", by, dsn())
        if is_mysql then peer:run "query 'SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED'" end
        peer:begin(chunk, PRODUCT, i, 3 - i)
      end
      local ok_one, code_one, calls_one = peers[1]:result()
      local ok_two, code_two, calls_two = peers[2]:result()
      query("DROP TABLE %s_gate", PRODUCT)
      assert.same({ 1, 1 }, { ok_one, ok_two }, tostring(code_one) .. tostring(code_two))
      assert.is_true(calls_one + calls_two >= 3)
      assert.same({ 6, 1 }, { value "stock", value("stock", 2) })
    end)
  end

  -- Checks that a transaction that wrote to a row behind another program's write is tried again, and which error it got.
  local function assert_tried_again(versioned, field, code)
    local calls, other = 0, program()
    assert.equal(1, db:transaction({ isolation = "repeatable read", retries = 2 }, function()
      calls = calls + 1
      local row = assert(db:read(PRODUCT, 1))
      if calls == 1 then other:run("assert(db:update(..., 1, { stock = 50 }, { version = 1 }))", PRODUCT) end
      local ok, err = db:update(PRODUCT, 1, { stock = row.stock + 1 }, versioned and { version = row.version } or nil)
      if calls == 1 then
        assert_fails("deadlock", ok, err)
        assert.equal(code, err[field])
      end
      return ok, err
    end))
    assert.equal(2, calls)
    assert.equal(51, value "stock")
  end

  if kind == "postgresql" then
    it("a failed serialization is a deadlock, and tried again", function()
      assert_tried_again(true, "sqlstate", "40001")
    end)
  end

  if kind == "mariadb" then
    it("a view that is too old is a deadlock, and tried again (innodb_snapshot_isolation)", function()
      query "SET SESSION innodb_snapshot_isolation=ON"
      assert_tried_again(false, "errno", 1020)
    end)
  end

  -- ------------------------------------------------------------ claims

  describe("a claim", function()
    local function fill(n)
      for i = 1, n do query("INSERT INTO %s VALUES (%d,'new',0,1)", MESSAGE, i) end
    end

    it("has no message sent twice, by several batches, some of which fail", function()
      fill(24)
      local peers = {}
      for i = 1, 3 do
        peers[i] = program():begin([[
          local MESSAGE, SENT, me = ...
          local NEW = { "status = ? AND attempts < 9", "new" }
          local sent, turns = 0, 0
          while true do
            local claimed, claim
            local ok, err = db:transaction({ isolation = "read committed", retries = 50 }, function()
              local err
              claimed, claim = nil, nil
              claim, err = db:claim(MESSAGE, { where = NEW, order = "id", limit = 2 })
              if not claim then return nil, err end
              claimed = claim.rows
              for _, row in ipairs(claimed) do
                query("INSERT INTO " .. SENT .. " (message) VALUES (" .. row.id .. ")")
                turns = turns + 1
                if turns % 4 == me then return nil, "a failure of the batch's own" end
                local done, reason = claim:done(row, { status = "sent" })
                if not done then return nil, reason end
              end
              return true
            end)
            if ok and #claimed == 0 then
              if tonumber(query("SELECT COUNT(*) FROM " .. MESSAGE .. " WHERE status='new'")[1][1]) == 0 then return sent end
              support.sleep(0.005)
            elseif ok then
              sent = sent + #claimed
            elseif type(err) == "string" then
              for _, row in ipairs(claimed) do
                local counted, reason = claim:fail(row, { attempts = rows.expr "attempts + 0" })
                assert(counted or reason.code == "refused", tostring(reason))
              end
            else
              error(tostring(err))
            end
          end
        ]], MESSAGE, SENT, i)
      end
      local sent = 0
      for i = 1, 3 do sent = sent + peers[i]:result() end
      assert.equal(24, sent)
      assert.equal(24, tonumber(query("SELECT COUNT(*) FROM %s", SENT)[1][1]))
      assert.equal(24, tonumber(query("SELECT COUNT(DISTINCT message) FROM %s", SENT)[1][1]))
    end)

    local NEW = { where = { "status = ?", "new" }, order = { "id" }, columns = { "status" } }

    it("leaves to others what is claimed", function()
      fill(2)
      local peer = program()
      local id, other = nil, nil
      assert.is_true(db:transaction({ isolation = "read committed" }, function()
        local claim = assert(db:claim(MESSAGE, NEW))
        id = tonumber(claim.rows[1].id)
        if kind ~= "sqlite" then
          other = peer:run([[
            local t, options = ...
            return db:transaction({ isolation = "read committed" }, function() return tonumber(db:claim(t, options).rows[1].id) end)
          ]], MESSAGE, NEW)
        end
        return claim:done(claim.rows[1], { status = "sent" }) == 1
      end))
      assert.equal(1, id)
      if kind ~= "sqlite" then assert.equal(2, other) end
    end)

    it("counts a failure only of what nobody has processed in between", function()
      fill(1)
      local claim
      local function attempt()
        return db:transaction(function()
          claim = assert(db:claim(MESSAGE, NEW))
          return nil, "failed"
        end)
      end
      attempt()
      assert.equal(1, claim:fail(claim.rows[1], { attempts = rows.expr "attempts + 1" }))
      attempt()
      program():run([[
        local t, options = ...
        assert(db:transaction(function()
          local claim = assert(db:claim(t, options))
          return claim:done(claim.rows[1], { status = "sent" })
        end))
      ]], MESSAGE, NEW)
      local err = assert_fails("refused", claim:fail(claim.rows[1], { attempts = rows.expr "attempts + 1", status = "bad" }))
      assert.equal("sent", err.current.status)
      assert.equal("sent", query("SELECT status FROM %s", MESSAGE)[1][1])
      assert.equal(1, tonumber(query("SELECT attempts FROM %s", MESSAGE)[1][1]))
    end)
  end)
end)
