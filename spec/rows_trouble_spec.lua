--- What a program is told that has lost its connection, as a COMMIT without an answer is called; and what the isolation
-- levels let happen, as docs/isolation.md has it.

local proxy = require "spec.support.proxy"
local support = require "spec.support"
local tables = require "spec.support.rows_tables"

local PRODUCT, TABLES = tables.PRODUCT, tables.TABLES

tables.each(function(self)
  local kind, store, by, query, value, program = self.kind, self.store, self.by, self.query, self.value, self.program
  local is_mysql = kind == "mysql" or kind == "mariadb"

  -- ------------------------------------------------- a lost connection

  if store then
    describe("a connection that is lost", function()
      local line, peer

      before_each(function()
        line = proxy.open(store)
        -- The proxy's DSN is for hierlock; the parameters are not for LuaSQL.
        peer = support.process(nil)
        peer:call [[
          handles.with = require "spec.support.rows"
          require("luv").os_setenv("PGSSLMODE", "disable") -- else the proxy sees nothing
          require("luv").os_setenv("PGGSSENCMODE", "disable")
        ]]
        peer:start("handles.db, handles.connection = handles.with.connect(...)", by, (line.dsn:gsub("%?.*", "")), { tables = TABLES })
        support.wait_until(function() require("luv").run "nowait" return #line.connections > 0 end)
        peer:result()
      end)
      after_each(function() line.close() end)

      local BEGIN = [[
        local t, statement = ...
        local db = handles.db
        local calls = 0
        local ok, err = db:transaction({ retries = 5 }, function()
          calls = calls + 1
          local n, err = db:update(t, 1, { stock = 9 }, { version = 1 })
          if not n then return nil, err end
          if statement then return db:update(t, 2, { stock = 9 }) end
          return true
        end)
        return ok, err and err.code, calls, err and err.retryable
      ]]

      -- Keeps the line until the program has said a text, and then does something to it.
      local function when_said(text, act)
        support.wait_until(function() require("luv").run "nowait" return line.sent:find(text, 1, true) end, text)
        act(line.connections[1])
      end

      -- Begins the transaction; the program waits for a moment, in which the line may be kept, before it sends COMMIT.
      local function start_and_hesitate()
        peer:call [[
          local real = handles.db.query
          handles.db.query = function(text, ...)
            if text:find "COMMIT" then require("luv").sleep(300) end
            return real(text, ...)
          end
        ]]
        peer:start(BEGIN, PRODUCT)
        when_said("=9", function() end)
        support.wait_until(function() require("luv").run "nowait" return line.sent:find(is_mysql and "RELEASE" or "=9", 1, true) end)
        for _ = 1, 20 do require("luv").run "nowait" support.sleep(0.005) end
      end

      it("before COMMIT: nothing is written, and it is `connection`", function()
        line.hold(1)
        line.let(1)
        peer:call([[
          local real = handles.db.query
          handles.db.query = function(text, ...)
            if text:find "=9.*WHERE .id.='?2" then handles.connection:close() end
            local ok, a, b, c, d = pcall(real, text, ...)
            if not ok then return nil, "closed: " .. tostring(a), nil, "08006" end
            return a, b, c, d
          end
        ]])
        peer:start(BEGIN, PRODUCT, true)
        assert.same({ nil, "connection", 1, true }, { peer:result() })
        support.wait_until(function() return value("version") == 1 end)
        assert.equal(5, value "stock")
      end)

      it("while COMMIT is on its way: `unknown`, not tried again, and not carried out", function()
        -- The client's COMMIT gets no further than here.
        start_and_hesitate()
        line.detain(1)
        for _ = 1, 400 do
          require("luv").run "nowait"
          support.sleep(0.002)
          local detained = line.connections[1].detained
          if detained and #detained > 0 then break end
        end
        assert.truthy(table.concat(line.connections[1].detained):find "COMMIT")
        line.connections[1].finish()
        local ok, code, calls, retryable = peer:result()
        assert.same({ nil, "unknown", 1, false }, { ok, code, calls, retryable })
        assert.equal(5, value "stock")
      end)

      it("before the answer to COMMIT: `unknown`, not tried again, and carried out", function()
        start_and_hesitate()
        line.hold(1)
        when_said("COMMIT", function() end)
        support.wait_until(function() require("luv").run "nowait" return #line.connections[1].kept > 0 end, "the answer")
        line.connections[1].finish()
        assert.same({ nil, "unknown", 1, false }, { peer:result() })
        support.wait_until(function() return value "stock" == 9 end, "the COMMIT")
      end)

      it("while a write outside of a transaction has no answer: `unknown`, for it is its own COMMIT", function()
        peer:call([[ assert(handles.db:read(..., 1)) ]], PRODUCT)
        line.hold(1)
        peer:start([[
          local ok, err = handles.db:update(..., 1, { stock = 9 }, { version = 1 })
          return ok, err.code, err.retryable
        ]], PRODUCT)
        support.wait_until(function() require("luv").run "nowait" return #line.connections[1].kept > 0 end, "the answer")
        line.connections[1].finish()
        assert.same({ nil, "unknown", false }, { peer:result() })
        assert.equal(9, value "stock")
      end)
    end)
  end

  -- ----------------------------------------------------- the anomalies

  describe("the isolation levels", function()
    local LEVELS = kind == "sqlite" and { "serializable" } or
      { "read uncommitted", "read committed", "repeatable read", "serializable" }
    -- On or off by the version of the server, unless it is said.
    local SNAPSHOT = "repeatable read, innodb_snapshot_isolation=ON"
    if kind == "mariadb" then LEVELS[#LEVELS + 1] = SNAPSHOT end

    -- A program that does one statement at a time in a transaction; that fails when one fails or waits, and is then over.
    local function session(level)
      local peer = program()
      if is_mysql then
        peer:run "query 'SET innodb_lock_wait_timeout=1'"
        peer:run("query('SET SESSION TRANSACTION ISOLATION LEVEL ' .. ...)", (level:gsub(",.*", "")))
        if kind == "mariadb" then peer:run("query('SET SESSION innodb_snapshot_isolation=' .. ...)", level == SNAPSHOT and 1 or 0) end
      elseif kind == "postgresql" then
        peer:run "query 'SET lock_timeout=300'"
      else
        peer:run "query 'PRAGMA busy_timeout=0'"
      end
      function peer.try(_, text)
        if peer.over then return nil end
        local found = peer:run("local found = handles.with.query(connection, ...) if not found then connection:execute 'ROLLBACK' end return found", text)
        if not found then peer.over = true end
        return found and (type(found) == "table" and tonumber(found[1][1]) or true)
      end
      peer:try(kind == "sqlite" and "BEGIN IMMEDIATE" or kind == "postgresql" and "BEGIN ISOLATION LEVEL " .. level or "START TRANSACTION")
      return peer
    end

    local STOCK = ("SELECT stock FROM %s WHERE id=1"):format(PRODUCT)
    local BOTH = ("SELECT SUM(stock) FROM %s WHERE id IN (1,2)"):format(PRODUCT)
    local COUNT = ("SELECT COUNT(*) FROM %s WHERE price>=10"):format(PRODUCT)
    local function set(id, stock) return ("UPDATE %s SET stock=%d WHERE id=%d"):format(PRODUCT, stock, id) end

    -- Each true, where it happens.
    local ANOMALIES = {
      { "dirty read", function(one, two)
        two:try(set(1, 99))
        return one:try(STOCK) == 99
      end },
      { "non-repeatable read", function(one, two)
        local before = one:try(STOCK)
        two:try(set(1, 99))
        two:try "COMMIT"
        return before == 5 and one:try(STOCK) == 99
      end },
      { "phantom", function(one, two)
        local before = one:try(COUNT)
        two:try(("INSERT INTO %s (id,price,version) VALUES (3,15,1)"):format(PRODUCT))
        two:try "COMMIT"
        return before == 2 and one:try(COUNT) == 3
      end },
      { "lost update", function(one, two)
        local a, b = one:try(STOCK), two:try(STOCK)
        one:try(set(1, (a or 0) + 10))
        one:try "COMMIT"
        two:try(set(1, (b or 0) + 10))
        return two:try "COMMIT" and one:try "SELECT 1" == 1 and value "stock" == 15
      end },
      { "write skew", function(one, two)
        local a, b = one:try(BOTH), two:try(BOTH)
        one:try(set(1, 0))
        two:try(set(2, 7))
        local first, second = one:try "COMMIT", two:try "COMMIT"
        return a == 5 and b == 5 and first and second and value "stock" == 0 and value("stock", 2) == 7
      end },
    }

    -- The claims of docs/isolation.md: for each level, for each anomaly.
    local function documented(level)
      local file = assert(io.open "docs/isolation.md")
      local text = file:read "*a"
      file:close()
      local cells = text:match("\n| " .. kind .. " | " .. level .. " | ([^\n]*) |\n")
      assert(cells, "the table has no line for it")
      local list = {}
      for cell in (cells .. " | "):gmatch "(.-) | " do list[#list + 1] = cell end
      return list
    end

    for _, level in ipairs(LEVELS) do
      it("have these anomalies, as documented: " .. level, function()
        local measured = {}
        for i, anomaly in ipairs(ANOMALIES) do
          query("DELETE FROM %s WHERE id=3", PRODUCT)
          query(set(1, 5))
          query(set(2, 0))
          local one, two = session(level), session(level)
          measured[i] = anomaly[2](one, two) and "yes" or "no"
          for _, peer in ipairs { one, two } do peer:close() end
        end
        assert.equal(table.concat(documented(level), " | "), table.concat(measured, " | "))
      end)
    end
  end)
end)
